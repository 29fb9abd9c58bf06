//! The factors, and the kernels of products carried out on the host: their own steps and descriptors, by the
//! model of what a product reads.

use std::collections::BTreeSet;

use super::super::layouts::Descriptor;
use super::*;

#[path = "../../../../../foveate-cuda/src/compile/on_host.rs"]
mod on_host;

const PANEL_ROW: usize = 128;

/// Of factors whose rows differ pairwise, and so do the steps along the sum, any two that change places change
/// the result; so do two rows or columns of the result.
#[test]
fn factors_tell_rows_columns_and_steps_apart_and_sums_are_exact() {
    for (dtype, columns, sum) in [
        (Elem::Bf16, 64, 96),
        (Elem::Bf16, 192, 192),
        (Elem::F16, 32, 128),
        (Elem::E4m3, 256, 128),
        (Elem::E4m3, 64, 64),
    ] {
        let factors = Factors::new(dtype, columns, sum);
        for rows in [&factors.a, &factors.b] {
            let steps = (0..sum).map(|k| rows.iter().map(|row| row[k]).collect::<Vec<_>>());
            assert_eq!(steps.collect::<BTreeSet<_>>().len(), sum, "{columns}x{sum}");
        }
        let product = |row: &Vec<i32>, column: &Vec<i32>| -> i32 {
            row.iter().zip(column).map(|(a, b)| a * b).sum()
        };
        let (a, b) = (&factors.a, &factors.b);
        let rows: BTreeSet<Vec<i32>> =
            a.iter().map(|row| b.iter().map(|column| product(row, column)).collect()).collect();
        let across: BTreeSet<Vec<i32>> =
            b.iter().map(|column| a.iter().map(|row| product(row, column)).collect()).collect();
        assert_eq!((rows.len(), across.len()), (ROWS, columns));
        // Accumulators of e4m3 have 14 bits, others those of f32.
        let most = if dtype == Elem::E4m3 { 1 << 13 } else { 1 << 24 };
        let result = factors.result(true);
        assert!(result.iter().all(|x| x.abs() < most as f32), "{dtype:?}, {columns}x{sum}");
    }
}

#[test]
fn panels_of_an_image_are_whole() {
    let mut image = Image::new();
    image.tile(Elem::Bf16, SWIZZLE_128, [ROWS, 96], |row, k| (row + k) as i32 % 7);
    assert_eq!(image.0.len(), 2 * ROWS * PANEL_ROW);
    // Row 1, element 64: the first chunk of the second panel changes places with its second one.
    assert_eq!(image.0[(ROWS + 1) * PANEL_ROW + 16..][..2], bits(Elem::Bf16, 65 % 7));
    assert_eq!(image.0[(ROWS + 1) * PANEL_ROW + 5 * 16..][..2], [0xff; 2]);
}

const HOPPER: &str = include_str!("../../../../../foveate-cuda/kernels/hopper/hopper.cuh");
const AROUND: &str = include_str!("../around.cu");

/// What the kernels take of other files; a product prints its kind and its operands.
const PRELUDE: &str = r#"
#include <cstdio>
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
typedef unsigned u32;
typedef unsigned long long u64;
struct TensorMap {};
constexpr int ELEM_BYTES = FV_DTYPE == 3 ? 1 : 2, PANEL_ROW = 128, PANEL_COLUMNS = PANEL_ROW / ELEM_BYTES;
constexpr int MMA_K = 32 / ELEM_BYTES;
constexpr int panels(int columns) { return (columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS; }
"#;
const PRODUCTS: &str = r#"
void product(const char* kind, u64 a, u64 b, bool adds) { std::printf("%s %llu %llu %d\n", kind, a, b, adds); }
template <int N> void multiply_async(float (&)[N][4], Operand a, Operand b, bool adds) {
    product("rows", a.bits, b.bits, adds);
}
template <int N> void wgmma_first(float (&)[N][4], u64 a, u64 b) { product("rows", a, b, false); }
template <int N> void multiply_async(float (&)[N][4], const u32 (&a)[4], Operand b) {
    product("registers", a[0], b.bits, true);
}
template <int N> void multiply_across(float (&)[N][4], Operand a, Operand b, bool adds) {
    product("across", a.bits, b.bits, adds);
}
template <int N> void multiply_transposed(float (&)[N][4], Operand a, Operand b) {
    product("transposed", a.bits, b.bits, true);
}
template <int STEPS> void load_registers(u32 (&a)[STEPS][4], const u32*) {
    for (int k = 0; k < STEPS; ++k) a[k][0] = k;
}
u32 load_image(const u32*) { return 0; }
void product_fence() {}
void product_commit() {}
template <int LEFT> void product_wait() {}
template <int N> void pin(float (&)[N][4]) {}
template <int N> void store(float*, const float (&)[N][4]) {}
template <int COLUMNS, typename F> void multiply_and_store(float*, F products) {
    float d[COLUMNS / 8][4];
    products(d);
}
"#;

/// The part of a file from one text up to another.
fn part<'a>(file: &'a str, from: &str, to: &str) -> &'a str {
    let (_, rest) = file.split_once(from).unwrap_or_else(|| panic!("the file has {from:?}"));
    let (part, _) = rest.split_once(to).unwrap_or_else(|| panic!("the file has {to:?}"));
    &file[file.len() - rest.len() - from.len()..][..from.len() + part.len()]
}

/// What the kernels of a text print, one after the other; `None` without a C++ compiler.
fn printed(text: &Text) -> Option<Vec<String>> {
    let constants = text.constants.iter().map(|(name, value)| format!("#define {name} {value}\n"));
    let defines =
        text.config.defines() + &constants.collect::<String>() + "#define PROBE_BYTES 4\n";
    let operand = part(HOPPER, "struct Operand {", "// d += A B, or d = A B");
    let rows = part(AROUND, "// S = A B, both along the sum", "// Registers of a left operand");
    let calls = text.products.iter().map(|product| {
        format!("std::printf(\"kernel\\n\"); {}(TensorMap(), nullptr, nullptr);", product.entry)
    });
    let main = format!("int main() {{ {} }}\n", calls.collect::<String>());
    let said =
        on_host::text(&[&defines, PRELUDE, operand, PRODUCTS, rows, text.text, &main].join("\n"))?;
    Some(said.split("kernel\n").skip(1).map(str::to_owned).collect())
}

/// The element that lies at a byte.
fn element(dtype: Elem, smem: &[u8], at: usize) -> f32 {
    let bytes = &smem[at..at + dtype.bytes()];
    match dtype {
        Elem::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        Elem::Bf16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        Elem::E4m3 => F8E4M3::from_bits(bytes[0]).to_f32(),
        Elem::F32 => unreachable!("no operand"),
    }
}

/// A left operand of a step out of registers, `[row][k]`.
fn of_registers(dtype: Elem, words: &[u8], step: usize) -> Vec<Vec<f32>> {
    let bytes = dtype.bytes();
    let mut operand = vec![vec![f32::NAN; STEP / bytes]; ROWS];
    for (thread, x) in (0..128).flat_map(|thread| (0..4).map(move |x| (thread, x))) {
        let (row, first) = left_register(thread, x, bytes);
        let at = ((step * 128 + thread) * 4 + x) * 4;
        for i in 0..4 / bytes {
            operand[row][first + i] = element(dtype, words, at + i * bytes);
        }
    }
    operand
}

/// What accumulators hold after products that were printed.
fn carried_out(product: &Product, printed: &str) -> Vec<f32> {
    let Product { image, factors, .. } = product;
    let (dtype, columns) = (factors.dtype, factors.b.len());
    let summed = STEP / dtype.bytes();
    let smem = |along: bool, rows: usize, bits: u64| -> Vec<Vec<f32>> {
        let operand = Descriptor(bits);
        let at = |row: usize, k: usize| match along {
            true => operand.along_k_byte(operand.swizzle(), row, k * dtype.bytes()),
            false => operand.along_mn(operand.swizzle(), row, k),
        };
        let row = |row| (0..summed).map(|k| element(dtype, &image.0, at(row, k))).collect();
        (0..rows).map(row).collect()
    };
    let registers = factors.left_registers();
    let mut sums = vec![vec![f32::NAN; columns]; ROWS];
    // What they held before the first product, where that adds.
    let held = (0..128).flat_map(|thread| (0..columns / 2).map(move |i| (thread, i)));
    let before = Factors { dtype, a: vec![vec![0]; ROWS], b: vec![vec![0]; columns] }.result(true);
    for ((thread, i), before) in held.clone().zip(before) {
        let (row, column) = accumulator(thread, i);
        sums[row][column] = before;
    }
    for line in printed.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [a, b, adds] = [1, 2, 3].map(|i| words[i].parse::<u64>().unwrap());
        let a = match words[0] {
            "registers" => of_registers(dtype, &registers, a as usize),
            kind => smem(kind != "transposed", ROWS, a),
        };
        let b = smem(words[0] == "rows" || dtype == Elem::E4m3, columns, b);
        for (sums, a) in sums.iter_mut().zip(&a) {
            for (sum, b) in sums.iter_mut().zip(&b) {
                let step: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                *sum = step + if adds == 1 { *sum } else { 0.0 };
            }
        }
    }
    held.map(|(thread, i)| accumulator(thread, i)).map(|(row, column)| sums[row][column]).collect()
}

#[test]
fn the_kernels_carried_out_on_the_host_give_what_they_are_compared_with() {
    for text in texts() {
        let Some(printed) = printed(&text) else { return };
        for (product, printed) in text.products.iter().zip(printed) {
            let Product { entry, factors, adds, .. } = product;
            assert!(!printed.is_empty(), "{}: {entry}", text.config);
            let found = carried_out(product, &printed);
            assert!(found == factors.result(*adds), "{}: {entry}", text.config);
        }
    }
}
