//! The kernel that makes range tables, run on the CPU thread by thread, against plain loops.

use foveate_mods::ir::BinaryOp;
use foveate_mods::{AnyBuffer, BufferData, DynExpr, ElementType, ScalarValue, SharedElements};

use super::execute::{Arena, of_a_cta, program_output};
use super::*;
use crate::compile::params::Abi;

const BLOCK: usize = 32;

/// The range table of a buffer; see [`range_table_bytes`].
pub(super) fn range_table(buffer: &AnyBuffer) -> Vec<u8> {
    let length = *buffer.shape().last().expect("a buffer has an axis");
    let whole = |a: Ends<i32>, b: Ends<i32>| (a.0.min(b.0), a.1.max(b.1));
    match &buffer.to_data() {
        data if data.is_empty() => vec![0; 8],
        BufferData::Bool(v) => {
            let ints: Vec<i32> = v.iter().map(|&x| i32::from(x)).collect();
            bytes(&levels(&ints, length, |&x| (x, x), whole), |x| x.to_le_bytes())
        }
        BufferData::I32(v) => {
            // What no i32 holds takes both ends, too: the first above the second.
            let join = |a: Ends<i32>, b: Ends<i32>| match (a.0 > a.1, b.0 > b.1) {
                (true, _) => a,
                (false, true) => b,
                _ => whole(a, b),
            };
            let wide = too_wide(buffer);
            let all: Vec<(i32, bool)> = v.iter().copied().zip(wide).collect();
            let of = |&(x, wide): &(i32, bool)| if wide { (1, 0) } else { (x, x) };
            bytes(&levels(&all, length, of, join), |x| x.to_le_bytes())
        }
        // A NaN takes both ends.
        BufferData::F32(v) => {
            let of = |x: &f32| if x.is_nan() { (f32::NAN, f32::NAN) } else { (*x, *x) };
            let join = |a: Ends<f32>, b: Ends<f32>| match (a.0.is_nan(), b.0.is_nan()) {
                (true, _) => a,
                (false, true) => b,
                _ => (a.0.min(b.0), a.1.max(b.1)),
            };
            bytes(&levels(v, length, of, join), |x| x.to_le_bytes())
        }
    }
}

/// Whether each element, row-major, is one that no i32 holds.
fn too_wide(buffer: &AnyBuffer) -> Vec<bool> {
    let elements = buffer.elements();
    let place = |at: usize| {
        let mut rest = at;
        let axes = buffer.shape().iter().zip(buffer.strides()).rev();
        axes.fold(buffer.offset(), |place, (&len, &stride)| {
            let index = rest % len;
            rest /= len;
            place + index * stride
        })
    };
    (0..buffer.elems()).map(|at| elements.too_wide(place(at)).is_some()).collect()
}

type Ends<T> = (T, T);

fn bytes<T: Copy>(levels: &[Ends<T>], of: impl Fn(T) -> [u8; 4]) -> Vec<u8> {
    levels.iter().flat_map(|&(lo, hi)| [of(lo), of(hi)]).flatten().collect()
}

fn levels<E, T: Copy>(
    elems: &[E],
    length: usize,
    of: impl Fn(&E) -> Ends<T> + Copy,
    join: impl Fn(Ends<T>, Ends<T>) -> Ends<T> + Copy,
) -> Vec<Ends<T>> {
    let mut all: Vec<Ends<T>> = Vec::new();
    for row in elems.chunks(length) {
        all.extend(
            row.chunks(BLOCK).map(|block| block[1..].iter().map(of).fold(of(&block[0]), join)),
        );
    }
    let blocks = length.div_ceil(BLOCK);
    let level = all.len();
    let mut reach = 1;
    while 2 * reach <= blocks {
        let from = all.len() - level;
        for i in from..from + level {
            // Past the end of its row an entry is not asked for.
            let other = if (i - from) % blocks + reach < blocks { i + reach } else { i };
            all.push(join(all[i], all[other]));
        }
        reach *= 2;
    }
    all
}

/// Buffers of every type, of rows that end in a block and those that do not, dense and not.
fn buffers_to_read() -> Vec<AnyBuffer> {
    let ints = |n: usize| (0..n).map(|i| foveate_mods::ir::mix(7, i as i32) % 1000);
    let float = |i: i32| if i % 97 == 0 { f32::NAN } else { i as f32 * 0.25 };
    let shapes: [&[usize]; 8] =
        [&[1], &[32], &[33], &[5000], &[3, 70], &[2, 5, 64], &[4, 1], &[2, 1025]];
    let mut buffers = Vec::new();
    for (i, shape) in shapes.into_iter().enumerate() {
        let n = shape.iter().product();
        let all = [
            BufferData::Bool(ints(n).map(|x| x % 40 == 0).collect()),
            BufferData::I32(ints(n).collect()),
            BufferData::F32(ints(n).map(float).collect()),
        ];
        let named = |data| AnyBuffer::new(format!("x{i}"), shape, data, false).unwrap();
        buffers.extend(all.map(named));
    }
    // Memory of every type: as it comes, transposed with gaps, and broadcast.
    for (strides, element) in [[280, 70, 1], [2, 6, 30], [0, 70, 1], [70, 0, 2]]
        .iter()
        .flat_map(|strides| ElementType::ALL.map(|element| (strides, element)))
    {
        let bytes = ints(8 * 2500).map(|x| (x % 50) as u8).collect::<Vec<_>>();
        let memory = match element {
            ElementType::Bool | ElementType::U8 | ElementType::I8 => {
                SharedElements::new(element, std::sync::Arc::new(bytes))
            }
            ElementType::I16 => SharedElements::from_vec(ints(2500).map(|x| x as i16).collect()),
            ElementType::I32 => SharedElements::from_vec(ints(2500).collect()),
            ElementType::I64 => SharedElements::from_vec(
                ints(2500).map(|x| i64::from(x) << if x == 500 { 33 } else { 0 }).collect(),
            ),
            ElementType::F16 => SharedElements::from_vec(
                ints(2500).map(|x| half::f16::from_f32(float(x))).collect(),
            ),
            ElementType::BF16 => SharedElements::from_vec(
                ints(2500).map(|x| half::bf16::from_f32(float(x))).collect(),
            ),
            ElementType::F32 => SharedElements::from_vec(ints(2500).map(float).collect()),
            ElementType::F64 => {
                SharedElements::from_vec(ints(2500).map(|x| f64::from(float(x))).collect())
            }
        };
        let made = AnyBuffer::shared("memory", &memory, &[3, 5, 70], strides, 9, false);
        buffers.push(made.unwrap());
    }
    buffers
}

#[test]
fn tables_made_by_the_kernel_are_those_of_plain_loops() {
    let buffers = buffers_to_read();
    let text = [
        "#define FV_GROUP 1\n",
        include_str!("shim.h"),
        include_str!("../../../../kernels/params.cuh"),
        PRELUDE,
        "struct Mods { int nothing; };\n",
        include_str!("block.h"),
        include_str!("../../../../kernels/range_ends.cuh"),
        include_str!("../../../../kernels/range_table.cu"),
        "static void table(const RangeTableParams& p, const Mods&) { fv_range_table(p); }\n",
        "LAUNCH(table, RangeTableParams, 64)\nint main() { take_arena();",
        &"run();".repeat(buffers.len()),
        "}",
    ];
    let (mut arena, mut input) = (Arena::default(), Vec::new());
    for buffer in &buffers {
        let (shape, bytes) = (buffer.shape(), range_table_bytes(buffer.shape()));
        let length = shape[shape.len() - 1];
        let rows = buffer.elems() / length;
        let (elems, table) = (arena.put(&buffer_bytes(buffer)), arena.put(&vec![0xff; bytes]));
        let params = range_table_params(buffer, elems, table).unwrap();
        // Mods without captures are one unused int.
        input.extend([4, 0].map(i32::to_le_bytes).concat());
        input.extend(params.bytes());
        input.extend([rows as i32, 1].map(i32::to_le_bytes).concat());
        input.extend(params.table.to_le_bytes());
        input.extend((bytes as u64).to_le_bytes());
    }
    let Some(mut found) = program_output(&text.concat(), arena, input) else { return };
    for buffer in &buffers {
        let rest = found.split_off(range_table_bytes(buffer.shape()));
        let (element, shape, strides) = (buffer.element(), buffer.shape(), buffer.strides());
        assert_eq!(found, range_table(buffer), "{element} of {shape:?}, strides {strides:?}");
        found = rest;
    }
}

#[test]
fn tables_that_a_cta_makes_for_itself_are_those_of_plain_loops() {
    // Bytes of shared memory before the tables.
    const FIRST: u64 = 24;
    // Two buffers at a time, so that one table follows another.
    let buffers = buffers_to_read();
    let pairs: Vec<&[AnyBuffer]> = buffers.chunks(2).collect();
    let mut text = of_a_cta(1);
    text.push_str("struct Tables { char* to; i64 bytes; };\n");
    let mut main = String::from("int main() { take_arena();");
    let (mut arena, mut input, mut order) = (Arena::default(), Vec::new(), Vec::new());
    for (i, pair) in pairs.iter().enumerate() {
        let (kv, half) = (DynExpr::leaf(Leaf::Kv), DynExpr::constant(ScalarValue::F32(0.5)));
        let read = |buffer: &AnyBuffer| {
            let value = DynExpr::load(buffer, vec![kv.clone(); buffer.shape().len()]).unwrap();
            match buffer.ty() {
                Type::Bool => value,
                Type::I32 => DynExpr::binary(BinaryOp::Lt, value, kv.clone()).unwrap(),
                Type::F32 => DynExpr::binary(BinaryOp::Lt, value, half.clone()).unwrap(),
            }
        };
        let both = DynExpr::binary(BinaryOp::And, read(&pair[0]), read(&pair[1])).unwrap();
        let mask = MaskMod::new(&both).unwrap();
        let mods = Mods { mask: Some(&mask), ..Mods::default() };
        let source = ModsSource::new(mods, &options()).unwrap();
        text.push_str(&format!(
            "namespace p{i} {{\n{}\nstatic void tables(const Tables& p, const Mods& mods) {{\n\
             for_each_bounded(mods, OwnTables());\n__syncthreads();\n\
             if (threadIdx.x == 0) memcpy(p.to, dynamic_shared + {FIRST}, size_t(p.bytes));\n}}\n\
             LAUNCH(tables, Tables, 128)\n}}\n",
            source.text(),
        ));
        main.push_str(&format!(" p{i}::run();"));
        let bytes: usize = source.buffers().iter().map(|b| range_table_bytes(b.shape())).sum();
        let to = arena.put(&vec![0xff; bytes]);
        let mut next = FIRST;
        let elems = source.buffers().iter().map(|buffer| {
            let (elems, ranges) = (arena.put(&buffer_bytes(buffer)), next);
            next += range_table_bytes(buffer.shape()) as u64;
            BufferAddresses { elems, ranges, ..Default::default() }
        });
        let mods = source.pack(&elems.collect::<Vec<_>>(), 0).unwrap();
        order.extend(source.buffers().to_vec());
        input.extend((mods.len() as i32).to_le_bytes());
        input.extend(mods);
        input.extend([to, bytes as u64].map(u64::to_le_bytes).concat());
        input.extend([1, 1].map(i32::to_le_bytes).concat());
        input.extend(to.to_le_bytes());
        input.extend((bytes as u64).to_le_bytes());
    }
    let Some(mut found) = program_output(&format!("{text}{main} }}\n"), arena, input) else {
        return;
    };
    assert_eq!(order.len(), buffers.len());
    for buffer in &order {
        let rest = found.split_off(range_table_bytes(buffer.shape()));
        let (element, shape, strides) = (buffer.element(), buffer.shape(), buffer.strides());
        assert_eq!(found, range_table(buffer), "{element} of {shape:?}, strides {strides:?}");
        found = rest;
    }
}
