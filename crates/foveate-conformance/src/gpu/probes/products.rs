//! Products of a warpgroup: operands in shared memory and in registers, along the summed axis and across it.

use std::sync::Arc;

use foveate_cuda::compile::config::{Config, Elem, Family, Kernel};
use foveate_gpu::cubin::Opcode;
use foveate_tensor::random::Random;
use foveate_tensor::{F8E4M3, Float};

use super::layouts::{SWIZZLE_64, SWIZZLE_128, Swizzle, accumulator, left_register};
use super::{Numbers, Probe, source};

const FORWARD: &str = include_str!("forward.cu");
const BACKWARD: &str = include_str!("backward.cu");
/// Rows of a product.
const ROWS: usize = 64;
/// Bytes of a row that a step of a product takes.
const STEP: usize = 32;

/// Whole numbers: `a[row][k]` and `b[column][k]`.
pub struct Factors {
    dtype: Elem,
    pub a: Vec<Vec<i32>>,
    pub b: Vec<Vec<i32>>,
}

impl Factors {
    pub fn new(dtype: Elem, columns: usize, sum: usize) -> Self {
        let mut random = Random::new((columns * 1000 + sum) as u64);
        let largest = if dtype == Elem::E4m3 { 4 } else { 7 };
        let mut numbers = |rows: usize| {
            let mut row = || {
                (0..sum).map(|_| random.below(2 * largest + 1) as i32 - largest as i32).collect()
            };
            (0..rows).map(|_| row()).collect()
        };
        Self { dtype, a: numbers(ROWS), b: numbers(columns) }
    }

    fn sum(&self) -> usize {
        self.a[0].len()
    }

    /// What a thread's accumulators hold after the product, by threads: on top of what they held before with `adds`.
    pub fn result(&self, adds: bool) -> Vec<f32> {
        let held = self.b.len() / 2;
        let threads = (0..128).flat_map(|thread| (0..held).map(move |i| (thread, i)));
        let element = |(thread, i): (usize, usize)| {
            let (row, column) = accumulator(thread, i);
            let sum: i32 = self.a[row].iter().zip(&self.b[column]).map(|(a, b)| a * b).sum();
            // `before` of around.cu.
            let before = if self.dtype == Elem::E4m3 { i } else { thread * 128 + i };
            (sum + if adds { before as i32 } else { 0 }) as f32
        };
        threads.map(element).collect()
    }

    /// The registers of A: of each step four for each thread.
    pub fn left_registers(&self) -> Vec<u8> {
        let bytes = self.dtype.bytes();
        let mut words = Vec::new();
        for step in 0..self.sum() * bytes / STEP {
            for (thread, x) in (0..128).flat_map(|thread| (0..4).map(move |x| (thread, x))) {
                let (row, first) = left_register(thread, x, bytes);
                let first = step * STEP / bytes + first;
                let elements = self.a[row][first..first + 4 / bytes].iter();
                words.extend(elements.flat_map(|&x| bits(self.dtype, x)));
            }
        }
        words
    }
}

/// A small whole number as an element.
pub fn bits(dtype: Elem, value: i32) -> Vec<u8> {
    let value = f64::from(value);
    match dtype {
        Elem::F16 => <half::f16 as Float>::from_f64(value).to_le_bytes().into(),
        Elem::Bf16 => <half::bf16 as Float>::from_f64(value).to_le_bytes().into(),
        Elem::E4m3 => vec![F8E4M3::from_f64(value).to_bits()],
        Elem::F32 => unreachable!("the family has no products of f32"),
    }
}

/// Shared memory as a kernel fills it. Where nothing was put is NaN, of 16 bits and of e4m3.
pub struct Image(pub Vec<u8>);

impl Image {
    pub fn new() -> Self {
        Self(Vec::new())
    }

    /// Puts a tile of `rows` rows behind what there is: `element(row, column)`, panel by panel.
    pub fn tile(
        &mut self,
        dtype: Elem,
        swizzle: Swizzle,
        [rows, columns]: [usize; 2],
        element: impl Fn(usize, usize) -> i32,
    ) {
        let (base, bytes) = (self.0.len(), dtype.bytes());
        let panels = (columns * bytes).div_ceil(swizzle.span);
        self.0.resize(base + panels * rows * swizzle.span, 0xff);
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)))
        {
            let at = swizzle.copied_byte(base, rows, row, column * bytes);
            self.0[at..at + bytes].copy_from_slice(&bits(dtype, element(row, column)));
        }
    }
}

/// A kernel, its operands, and which one it is.
struct Product {
    entry: &'static str,
    what: &'static str,
    image: Image,
    factors: Factors,
    in_registers: bool,
    adds: bool,
}

impl Product {
    /// Operands in shared memory.
    fn new(entry: &'static str, what: &'static str, factors: Factors) -> Self {
        Self { entry, what, image: Image::new(), factors, in_registers: false, adds: false }
    }

    fn probe(self, config: &Config, text: &Arc<str>, shared: usize) -> Probe {
        let Self { entry, what, image, factors, in_registers, adds } = self;
        let Factors { dtype, .. } = factors;
        let (columns, sum) = (factors.b.len(), factors.sum());
        let Config { dim, tile_q, tile_kv, .. } = config;
        let of = format!("{} D {dim}, tiles {tile_q}x{tile_kv}", dtype.name());
        let name = format!("wgmma {of}, {what}: 64x{columns}x{sum}");
        let mut input = image.0;
        input.resize(shared, 0xff);
        if in_registers {
            input.extend(factors.left_registers());
        }
        let held = columns / 2;
        let place = move |i: usize| {
            let (row, column) = accumulator(i / held, i % held);
            format!("row {row}, column {column}")
        };
        let opcode = if dtype == Elem::E4m3 { Opcode::Qgmma } else { Opcode::Hgmma };
        let steps = (sum * dtype.bytes() / STEP) as u32;
        Probe {
            input,
            expected: Numbers::Floats(factors.result(adds)),
            place: Box::new(place),
            instructions: vec![(opcode, steps), (Opcode::WarpgroupDepbar, 1)],
            ..Probe::new(name, text, entry, shared)
        }
    }
}

/// Kernels that one text has, and what it is compiled with.
struct Text {
    config: Config,
    constants: Vec<(&'static str, usize)>,
    text: &'static str,
    products: Vec<Product>,
}

impl Text {
    /// Bytes of smem that hold the operands of each.
    fn shared_bytes(&self) -> usize {
        let images = self.products.iter().map(|product| product.image.0.len());
        images.max().expect("there are some")
    }

    fn probes(self) -> impl Iterator<Item = Probe> {
        let shared = self.shared_bytes();
        let text = source(&self.config, shared, &self.constants, self.text);
        self.products.into_iter().map(move |product| product.probe(&self.config, &text, shared))
    }
}

/// A kernel of the Hopper family, of two consumers.
pub fn config(kernel: Kernel, dtype: Elem, [dim, dim_v]: [usize; 2], tile: [usize; 2]) -> Config {
    let [tile_q, tile_kv] = tile;
    let of_family = Config::new(kernel, dtype, dim, dim_v);
    Config { family: Family::Hopper, tile_q, tile_kv, warps: 12, ..of_family }
}

/// S = Q Kᵀ and out = P V.
fn forward(dtype: Elem, dim: usize, keys: usize, dim_v: usize) -> Text {
    let mut rows =
        Product::new("rows", "A and B in smem along the sum", Factors::new(dtype, keys, dim));
    let Product { image, factors, .. } = &mut rows;
    image.tile(dtype, SWIZZLE_128, [ROWS, dim], |row, k| factors.a[row][k]);
    image.tile(dtype, SWIZZLE_128, [keys, dim], |row, k| factors.b[row][k]);
    let mut registers = Product::new("registers", "", Factors::new(dtype, dim_v, keys));
    (registers.in_registers, registers.adds) = (true, true);
    let Product { image, factors, .. } = &mut registers;
    if dtype == Elem::E4m3 {
        let whole = keys.is_multiple_of(128);
        let swizzle = if whole { SWIZZLE_128 } else { SWIZZLE_64 };
        image.tile(dtype, swizzle, [dim_v, keys], |column, key| factors.b[column][key]);
        let half = "A in registers, B along the sum in half panels";
        registers.what = if whole { "A in registers, B along the sum" } else { half };
    } else {
        image.tile(dtype, SWIZZLE_128, [keys, dim_v], |key, column| factors.b[column][key]);
        registers.what = "A in registers, B across the sum";
    }
    let config = config(Kernel::Forward, dtype, [dim, dim_v], [2 * ROWS, keys]);
    Text { config, constants: Vec::new(), text: FORWARD, products: vec![rows, registers] }
}

/// Sᵀ, dQ = dS K of the second of two consumers, and dK = dSᵀ Q.
fn backward(dtype: Elem, dim: usize, queries: usize) -> Text {
    const KEYS: usize = 128;
    let mut rows = Product::new(
        "rows_first",
        "the first of a sum and others, along it",
        Factors::new(dtype, queries, dim),
    );
    let Product { image, factors, .. } = &mut rows;
    image.tile(dtype, SWIZZLE_128, [ROWS, dim], |row, k| factors.a[row][k]);
    image.tile(dtype, SWIZZLE_128, [queries, dim], |row, k| factors.b[row][k]);
    // Of 128 queries a consumer has 64 with all columns, of 64 all with half of the columns.
    let (first, columns) = match queries == 2 * ROWS {
        true => (0, dim.next_multiple_of(16)),
        false => (dim.next_multiple_of(64) / 2, dim.next_multiple_of(64) / 2),
    };
    let mut across = Product::new(
        "across",
        "A in smem along the sum, B across it",
        Factors::new(dtype, columns, KEYS),
    );
    let Product { image, factors, .. } = &mut across;
    // What stands beside the consumer's own rows and columns would give another result.
    const BESIDE: i32 = 5;
    image.tile(dtype, SWIZZLE_128, [queries, KEYS], |row, k| {
        factors.a.get(row).map_or(BESIDE, |row| row[k])
    });
    image.tile(dtype, SWIZZLE_128, [KEYS, first + columns], |k, column| {
        column.checked_sub(first).map_or(BESIDE, |column| factors.b[column][k])
    });
    let mut transposed = Product::new(
        "transposed",
        "A and B in smem across the sum",
        Factors::new(dtype, dim, queries),
    );
    transposed.adds = true;
    let Product { image, factors, .. } = &mut transposed;
    image.tile(dtype, SWIZZLE_128, [queries, ROWS], |k, row| factors.a[row][k]);
    image.tile(dtype, SWIZZLE_128, [queries, dim], |k, column| factors.b[column][k]);
    let config = config(Kernel::Backward, dtype, [dim; 2], [queries, KEYS]);
    let constants = vec![("DQ_FIRST", first), ("DQ_COLUMNS", columns)];
    Text { config, constants, text: BACKWARD, products: vec![rows, across, transposed] }
}

/// Every number of columns that kernels have, and head dims that end in half a panel.
fn texts() -> Vec<Text> {
    let mut all = Vec::new();
    for columns in [64, 80, 96, 112, 128, 160, 176, 192] {
        all.push(forward(Elem::Bf16, 96, columns, columns));
    }
    for [dim, keys, dim_v] in [[256, 80, 256], [64, 128, 64]] {
        all.push(forward(Elem::Bf16, dim, keys, dim_v));
    }
    for [dim, keys, dim_v] in [[96, 128, 96], [128, 112, 192]] {
        all.push(forward(Elem::F16, dim, keys, dim_v));
    }
    for [dim, keys, dim_v] in [[64, 64, 64], [96, 128, 96], [128, 192, 128], [256, 128, 256]] {
        all.push(forward(Elem::E4m3, dim, keys, dim_v));
    }
    for [dim, queries] in
        [[64, 64], [96, 64], [128, 64], [64, 128], [80, 128], [96, 128], [128, 128]]
    {
        all.push(backward(Elem::Bf16, dim, queries));
    }
    all.push(backward(Elem::F16, 96, 64));
    all
}

pub fn all() -> Vec<Probe> {
    texts().into_iter().flat_map(Text::probes).collect()
}

#[cfg(test)]
mod tests;
