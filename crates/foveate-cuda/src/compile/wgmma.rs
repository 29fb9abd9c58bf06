//! One function for each shape of `wgmma.mma_async` that a configuration multiplies by.
//!
//! The instruction names every register of its sums, so its text is as long as the tile is wide:
//! it is printed here instead of being written out for every width. What the operands mean is said
//! in `kernels/hopper/hopper.cuh`.

use std::fmt::Write;

use super::config::{Config, Elem, Family, Kernel};

/// Where the left operand of a product is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Left {
    /// In shared memory, by a descriptor; both operands run along the summed axis.
    Shared,
    /// The same, and the right one runs across the summed axis: `wgmma_across`.
    SharedAcross,
    /// Both run across it: `wgmma_transposed`.
    SharedTransposed,
    /// In registers; the right one runs across the summed axis, of e4m3 along it.
    Registers,
}

/// The functions of a configuration; nothing for kernels without such products.
pub fn wrappers(config: &Config) -> String {
    let (dim, dim_v) = (config.padded_dim(), config.padded_dim_v());
    let shapes = match (config.family, config.kernel) {
        (Family::Hopper, Kernel::Forward) => {
            vec![(config.tile_kv, Left::Shared), (dim_v, Left::Registers)]
        }
        (Family::Hopper, Kernel::Backward) if config.is_wide_backward() => {
            let mut shapes = vec![(config.tile_q, Left::Shared), (dim_v, Left::Registers)];
            shapes.extend((dim != dim_v).then_some((dim, Left::Registers)));
            shapes
        }
        (Family::Hopper, Kernel::Backward) => vec![
            (config.tile_q, Left::Shared),
            (dim_v, Left::Registers),
            (dim, Left::SharedTransposed),
            (dq_columns(config), Left::SharedAcross),
        ],
        (Family::Hopper, Kernel::BackwardDq) => {
            vec![(config.tile_kv, Left::Shared), (dim, Left::Registers)]
        }
        (Family::Portable, Kernel::Forward | Kernel::Backward | Kernel::BackwardDq)
        | (
            Family::Portable | Family::Hopper,
            Kernel::Sequences
            | Kernel::TransposeValues
            | Kernel::BlockLists
            | Kernel::RangeTable
            | Kernel::Combine
            | Kernel::RowWeightSum
            | Kernel::Delta
            | Kernel::Dq
            | Kernel::GroupSums,
        ) => return String::new(),
    };
    let backward = !config.kernel.is_of_forward();
    let both = |(n, left)| {
        let first = backward && matches!(left, Left::Shared | Left::SharedAcross);
        let adds = wrapper(config.dtype, n, left, false);
        if first { adds + &wrapper(config.dtype, n, left, true) } else { adds }
    };
    shapes.into_iter().map(both).collect()
}

/// Columns of dQ that a consumer of the backward has: `DQ_COLUMNS` of `backward_layout.cuh`.
fn dq_columns(config: &Config) -> usize {
    let consumers = config.warps / 4 - 1;
    match config.tile_q == 64 * consumers {
        true => config.padded_dim(),
        false => config.dim.next_multiple_of(64) / consumers,
    }
}

/// `wgmma(sums, a, b, adds)`, `wgmma_across` or `wgmma_transposed` of the same, or `wgmma(sums, a, b)`, which always
/// adds, for `n` columns. With `first` it is `wgmma_first(sums, a, b)`, which never does, and
/// `sums` hold nothing before: what the compiler takes to be read has registers of its own.
fn wrapper(dtype: Elem, n: usize, left: Left, first: bool) -> String {
    let registers = n / 2;
    let list = |item: fn(usize) -> String, count: usize| {
        (0..count).map(item).collect::<Vec<_>>().join(", ")
    };
    let sums = list(|i| format!("%{i}"), registers);
    let outputs = list(|i| format!("\"+f\"(d[{}][{}])", i / 4, i % 4), registers);
    let outputs = if first { outputs.replace("+f", "=f") } else { outputs };
    let operand = |i: usize| format!("%{}", registers + i);
    let (parameters, a, b, flags, inputs) = match left {
        Left::Shared | Left::SharedAcross | Left::SharedTransposed => {
            let across = match left {
                Left::SharedAcross => "0, 1",
                Left::SharedTransposed => "1, 1",
                Left::Shared | Left::Registers => "0, 0",
            };
            let (parameters, adds, inputs) = match first {
                true => ("", "0".to_owned(), r#""l"(a), "l"(b)"#),
                false => (", bool adds", operand(2), r#""l"(a), "l"(b), "r"(int(adds))"#),
            };
            (
                format!("unsigned long long a, unsigned long long b{parameters}"),
                operand(0),
                operand(1),
                format!("{adds}|{across}"),
                inputs,
            )
        }
        Left::Registers => (
            "const unsigned (&a)[4], unsigned long long b".to_owned(),
            format!("{{{}, {}, {}, {}}}", operand(0), operand(1), operand(2), operand(3)),
            operand(4),
            format!("{}|1", operand(5)),
            r#""r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1)"#,
        ),
    };
    let (adds, transposed) = flags.split_once('|').expect("two parts");
    // Operands of 8 bits run along the summed axis, and nothing says so.
    let (k, ty, transposed) = match dtype {
        Elem::F16 => (16, "f16", format!(", {transposed}")),
        Elem::Bf16 => (16, "bf16", format!(", {transposed}")),
        Elem::E4m3 => (32, "e4m3", String::new()),
        Elem::F32 => unreachable!("the family refuses f32 operands"),
    };
    let mut text = String::new();
    let name = match (left, first) {
        (Left::SharedAcross, true) => "wgmma_across_first",
        (Left::SharedAcross, false) => "wgmma_across",
        (Left::SharedTransposed, _) => "wgmma_transposed",
        (Left::Shared | Left::Registers, true) => "wgmma_first",
        (Left::Shared | Left::Registers, false) => "wgmma",
    };
    write!(
        text,
        "__device__ void {name}(float (&d)[{}][4], {parameters}) {{\n    \
         asm volatile(\"{{ .reg .pred adds; setp.ne.b32 adds, {adds}, 0; \
         wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{ty}.{ty} {{{sums}}}, {a}, {b}, adds, 1, 1\
         {transposed}; }}\"\n                 : {outputs}\n                 : {inputs});\n}}\n",
        n / 8
    )
    .expect("writing to a String cannot fail");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrapper_names_every_sum_once_and_then_its_operands() {
        let shared = wrapper(Elem::Bf16, 16, Left::Shared, false);
        assert!(shared.contains(
            "m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, adds, 1, 1, 0, 0;"
        ));
        assert!(shared.contains("setp.ne.b32 adds, %10, 0;") && shared.contains("\"+f\"(d[1][3])"));
        let registers = wrapper(Elem::F16, 8, Left::Registers, false);
        assert!(registers.contains(
            "m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, adds, 1, 1, 1;"
        ));
        assert!(registers.contains("setp.ne.b32 adds, %9, 0;"));
        let e4m3 = wrapper(Elem::E4m3, 8, Left::Registers, false);
        assert!(e4m3.contains(
            "m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, adds, 1, 1; }"
        ));
    }
}
