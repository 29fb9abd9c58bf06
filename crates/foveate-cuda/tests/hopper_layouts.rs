//! Where the operands of `wgmma` lie in shared memory and its accumulators in registers, by models of
//! what the PTX manual says ("Asynchronous warpgroup level matrix shared memory layout", "Register
//! fragments", "Swizzling modes"): that a product reads what a copy by tensor map wrote where the
//! kernels' descriptors and steps lead it, and that weights are operands as they stand. The kernels'
//! own descriptors and steps are compiled for the host and followed.

mod layouts;
#[path = "../src/compile/on_host.rs"]
mod on_host;

use layouts::{
    Descriptor, SWIZZLE_64, SWIZZLE_128, Swizzle, accumulator, left_register, stored_transposed,
};

/// Rows of tiles, head dims, and the swizzle that suits them; tiles begin where others end.
fn tiles() -> impl Iterator<Item = (Swizzle, usize, usize, usize)> {
    let sizes = [64usize, 80, 112, 128, 176, 192]
        .into_iter()
        .flat_map(|rows| [64usize, 96, 128, 192, 256].into_iter().map(move |dim| (rows, dim)));
    sizes.flat_map(|(rows, dim)| {
        let fits = move |swizzle: &Swizzle| dim.is_multiple_of(swizzle.columns());
        let swizzles = [SWIZZLE_128, SWIZZLE_64].into_iter().filter(fits);
        swizzles.map(move |swizzle| (swizzle, rows, dim, rows * dim * 2))
    })
}

#[test]
fn products_along_rows_read_what_copies_wrote() {
    for (swizzle, rows, dim, base) in tiles() {
        let tile = Descriptor::new(swizzle, base, 16);
        let steps = swizzle.columns() / 16;
        for step in 0..dim / 16 {
            let panel = step / steps * rows * swizzle.span;
            let operand = tile.plus(panel + step % steps * 32);
            for (mn, k) in (0..rows).flat_map(|mn| (0..16).map(move |k| (mn, k))) {
                let expected = swizzle.copied(base, rows, mn, 16 * step + k);
                let found = operand.along_k(swizzle, mn, k);
                assert_eq!(
                    found, expected,
                    "{swizzle:?}, {rows}x{dim}: ({mn}, {k}) of step {step}"
                );
            }
        }
    }
}

#[test]
fn products_across_rows_read_what_copies_wrote() {
    for (swizzle, rows, dim, base) in tiles() {
        let tile = Descriptor::new(swizzle, base, rows * swizzle.span);
        for step in 0..rows / 16 {
            let operand = tile.plus(step * 16 * swizzle.span);
            for (mn, k) in (0..dim).flat_map(|mn| (0..16).map(move |k| (mn, k))) {
                let expected = swizzle.copied(base, rows, 16 * step + k, mn);
                let found = operand.along_mn(swizzle, mn, k);
                assert_eq!(
                    found, expected,
                    "{swizzle:?}, {rows}x{dim}: ({mn}, {k}) of step {step}"
                );
            }
        }
    }
}

/// The 128 threads of a warpgroup.
const THREADS: std::ops::Range<usize> = 0..128;

#[test]
fn accumulators_are_those_of_m16n8_and_every_element_is_one() {
    for n in (8..=256).step_by(8) {
        // Rows of queries and columns of keys, and the other way round.
        for swapped in [false, true] {
            let (queries, keys) = if swapped { (n, 64) } else { (64, n) };
            let mut found = vec![0; queries * keys];
            for (thread, i) in THREADS.flat_map(|thread| (0..n / 2).map(move |i| (thread, i))) {
                let (row, column) = accumulator(thread, i);
                let (q, kv) = if swapped { (column, row) } else { (row, column) };
                found[q * keys + kv] += 1;
                // What differs between the elements of a thread: two rows, n / 4 columns.
                assert_eq!(row, accumulator(thread, i % 4).0);
                assert_eq!(column, accumulator(thread, i - i % 4 + i % 2).1);
            }
            assert!(found.iter().all(|&count| count == 1), "{n} columns, swapped: {swapped}");
        }
    }
}

#[test]
fn weights_stand_in_the_order_of_a_left_operand() {
    for (thread, i) in THREADS.flat_map(|thread| (0..64).map(move |i| (thread, i))) {
        // weights[i / 4][i % 4] = narrow2(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1])
        let pair = [0, 1].map(|e| accumulator(thread, i / 2 * 4 + i % 2 * 2 + e));
        let (row, k) = left_register(thread, i % 4, 2);
        let k = 16 * (i / 4) + k;
        assert_eq!(pair, [(row, k), (row, k + 1)], "register {i} of thread {thread}");
    }
}

#[test]
fn chunks_of_a_column_meet_each_bank_once_in_eight_rows() {
    for swizzle in [SWIZZLE_128, SWIZZLE_64] {
        for chunk in 0..swizzle.span / 16 {
            let banks = (0..8).map(|row| swizzle.place(row * swizzle.span + chunk * 16) / 16 % 8);
            let mut banks: Vec<_> = banks.collect();
            banks.sort_unstable();
            assert_eq!(banks, (0..8).collect::<Vec<_>>(), "{swizzle:?}, chunk {chunk}");
        }
    }
}

// ---- the backward ----

const BACKWARD: [&str; 3] = [
    include_str!("../kernels/hopper/backward_layout.cuh"),
    include_str!("../kernels/hopper/backward_device.cuh"),
    include_str!("../kernels/backward_scores.cuh"),
];

#[test]
fn the_backward_says_what_is_modelled_here() {
    for formula in [
        "int warp_row() { return (threadIdx.x / 32 - 4) * 16; }",
        "int score_row() { return warp_row() + threadIdx.x % 32 / 4; }",
        "int score_column() { return warp_column() + threadIdx.x % 4 * 2; }",
        "return of(m * 16 + i / 2 * 8, n * 8 + i % 2);",
        "KEYS_DOWN ? held / 2 * 8 + held % 2 : held * 8;",
        "(lane / 16 * 8 + lane % 8) * PANEL_ROW + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;",
        "SPLIT_DQ_ROWS ? FV_DP : panels(FV_DP) * PANEL_COLUMNS / CONSUMERS;",
        "(SPLIT_DQ_ROWS ? threadIdx.x / 128 * 64 - 64 : 0) + threadIdx.x / 32 % 4 * 16;",
        "return SPLIT_DQ_ROWS ? 0 : (threadIdx.x / 128 - 1) * N_Q;",
        "return dq_row() * FV_DP + dq_column() * 128;",
        "return max(min(N_Q, N_K - dq_column()), 0) * 512;",
    ] {
        assert!(BACKWARD.iter().any(|text| text.contains(formula)), "model {formula} anew");
    }
}

/// Warps of the two consumers of the backward, which own 64 keys each.
const WARPS: usize = 8;

/// `Spot` with `KEYS_DOWN`, as `backward_layout.cuh` has it: (query, key) in the tile of number `i` of
/// accumulator `n` of a lane.
fn spot(warp: usize, lane: usize, n: usize, i: usize) -> (usize, usize) {
    let (row, column) = (warp * 16 + lane / 4, lane % 4 * 2);
    (column + n * 8 + i % 2, row + i / 2 * 8)
}

#[test]
fn spots_are_the_accumulators_of_transposed_scores() {
    for tile_q in [64, 128] {
        let mut found = vec![0; tile_q * 128];
        for (warp, lane) in (0..WARPS).flat_map(|warp| (0..32).map(move |lane| (warp, lane))) {
            for (n, i) in (0..tile_q / 8).flat_map(|n| (0..4).map(move |i| (n, i))) {
                // S^T of a consumer: rows of keys, columns of queries.
                let (key, query) = accumulator(warp % 4 * 32 + lane, n * 4 + i);
                let (q, kv) = spot(warp, lane, n, i);
                assert_eq!((q, kv), (query, warp / 4 * 64 + key), "warp {warp}, lane {lane}");
                found[q * 128 + kv] += 1;
                // `query_held` and `held_query`: what lse and delta are read by.
                let held = n * 2 + i % 2;
                assert_eq!(lane % 4 * 2 + held / 2 * 8 + held % 2, q);
            }
        }
        assert!(found.iter().all(|&count| count == 1), "{tile_q} queries");
    }
}

#[test]
fn stored_ds_is_what_both_products_read() {
    for tile_q in [64, 128] {
        let panel = tile_q * 128;
        let mut found = std::collections::BTreeMap::new();
        for warp in 0..WARPS {
            // `ds_place`.
            let place = |lane: usize| {
                let chunk = (2 * (warp % 4) + lane / 8 % 2) ^ (lane % 8);
                warp / 4 * panel + (lane / 16 * 8 + lane % 8) * 128 + chunk * 16
            };
            for step in 0..tile_q / 16 {
                for ((lane, register, half), byte) in
                    stored_transposed(|lane| place(lane) + step * 16 * 128)
                {
                    // ds[n % 2 * 2 + i / 2] = narrow2(g[n][i], g[n][i + 1])
                    let (n, i) = (step * 2 + register / 2, register % 2 * 2 + half);
                    let before = found.insert(byte, spot(warp, lane, n, i));
                    assert_eq!(before, None, "warp {warp}, lane {lane}, register {register}");
                }
            }
        }
        for (q, kv) in (0..tile_q).flat_map(|q| (0..128).map(move |kv| (q, kv))) {
            let byte = SWIZZLE_128.copied(0, tile_q, q, kv);
            assert_eq!(found.get(&byte), Some(&(q, kv)), "{tile_q} queries");
            // dQ, of 64 queries from `first` on, sums over keys: `start_dq`.
            let first = q / 64 * 64;
            let ds = Descriptor::new(SWIZZLE_128, first * 128, 16);
            let ds = ds.plus(kv / 64 * panel + kv % 64 / 16 * 32);
            assert_eq!(ds.along_k(SWIZZLE_128, q - first, kv % 16), byte);
            // dK of a consumer sums over queries: `start_dk`.
            let ds = Descriptor::new(SWIZZLE_128, kv / 64 * panel, 0).plus(q / 16 * 2048);
            assert_eq!(ds.along_mn(SWIZZLE_128, kv % 64, q % 16), byte);
        }
    }
}

/// A warp's part of dQ.
#[derive(Clone, Copy, Debug)]
struct PartOfDq {
    /// `SPLIT_DQ_ROWS`: of 128 queries each consumer has 64, of 64 each has columns.
    split_rows: bool,
    /// `FV_DP`.
    padded_dim: usize,
    warp: usize,
}

impl PartOfDq {
    /// `N_Q`.
    fn accumulators(self) -> usize {
        match self.split_rows {
            true => self.padded_dim / 8,
            false => self.padded_dim.div_ceil(64) * 64 / 2 / 8,
        }
    }
    /// `dq_row`.
    fn row(self) -> usize {
        (if self.split_rows { self.warp / 4 * 64 } else { 0 }) + self.warp % 4 * 16
    }
    /// `dq_column`.
    fn column(self) -> usize {
        if self.split_rows { 0 } else { self.warp / 4 * self.accumulators() }
    }
    /// `dq_offset`, in floats.
    fn offset(self) -> usize {
        self.row() * self.padded_dim + self.column() * 128
    }
    /// `dq_bytes`.
    fn bytes(self) -> usize {
        self.accumulators().min((self.padded_dim / 8).saturating_sub(self.column())) * 512
    }
}

#[test]
fn dq_is_sent_once_and_in_the_order_of_dq_accum() {
    for (dim, split_rows) in (8..=128).step_by(8).flat_map(|dim| [(dim, false), (dim, true)]) {
        let padded_dim = usize::next_multiple_of(dim, 16);
        let tile_q = if split_rows { 128 } else { 64 };
        let mut sent = vec![None; tile_q * padded_dim];
        let mut staged = 0;
        for warp in 0..WARPS {
            let part = PartOfDq { split_rows, padded_dim, warp };
            for (n, lane, i) in (0..part.bytes() / 512)
                .flat_map(|n| (0..32).flat_map(move |lane| (0..4).map(move |i| (n, lane, i))))
            {
                let (row, column) = accumulator(warp % 4 * 32 + lane, n * 4 + i);
                let query = if split_rows { warp / 4 * 64 + row } else { row };
                // `store_dq`: lane * 16 + n * 512 bytes after the part's own offset.
                let at = part.offset() + n * 128 + lane * 4 + i;
                assert_eq!(sent[at].replace((query, part.column() * 8 + column)), None, "{part:?}");
                staged = staged.max(at + 1);
            }
            // A part of 16 rows of queries begins where dq_accum of these rows does.
            assert_eq!(part.row() % 16, 0);
            assert!(part.bytes().is_multiple_of(16) && part.offset().is_multiple_of(4), "{part:?}");
        }
        assert_eq!(staged, tile_q * padded_dim, "what smem holds of dQ");
        // As fv_dq reads: `dq_accum_fragment`, then `dq_accum_offset` of lane (row % 8) * 4 + column / 2.
        for (query, column) in (0..tile_q).flat_map(|q| (0..padded_dim).map(move |c| (q, c))) {
            let fragment = query / 16 * 16 * padded_dim + column / 8 * 128;
            let lane = query % 8 * 4 + column % 8 / 2;
            let number = query % 16 / 8 * 2 + column % 2;
            let found = sent[fragment + lane * 4 + number];
            assert_eq!(found, Some((query, column)), "dim {dim}, split rows: {split_rows}");
        }
    }
}

#[test]
fn columns_of_dq_are_multiplied_by_those_of_keys() {
    for dim in (8..=128).step_by(8) {
        let padded_dim = usize::next_multiple_of(dim, 16);
        let columns = padded_dim.div_ceil(64) * 64 / 2;
        for consumer in 0..2 {
            let first = consumer * columns;
            // `keys_across`.
            let start = first / 64 * 128 * 128 + first % 64 * 2;
            let keys = Descriptor::new(SWIZZLE_128, start, 128 * 128);
            for (key, column) in (0..128).flat_map(|key| (0..columns).map(move |c| (key, c))) {
                let found = keys.plus(key / 16 * 2048).along_mn(SWIZZLE_128, column, key % 16);
                let expected = SWIZZLE_128.copied(0, 128, key, first + column);
                assert_eq!(found, expected, "dim {dim}, consumer {consumer}");
            }
        }
    }
}

/// What the kernels' files take of others, with products that print their operands.
const PRELUDE: &str = r#"
#include <cstdio>
#define __device__
typedef unsigned u32;
typedef unsigned long long u64;
constexpr int ELEM_BYTES = FV_DTYPE == 3 ? 1 : 2, PANEL_ROW = 128, MMA_K = 32 / ELEM_BYTES;
constexpr int N = FV_BN / 8, N_OUT = FV_DVP / 8, N_K = FV_DP / 8, N_Q = FV_DP / 8;
constexpr int VALUE_KEYS = FV_BN % 128 == 0 ? 128 : 64;
"#;
const PRODUCTS: &str = r#"
void product(u64 a, u64 b) { std::printf("%llu %llu\n", a, b); }
template <int N> void multiply_async(float (&)[N][4], Operand a, Operand b, bool) { product(a.bits, b.bits); }
template <int N> void multiply_async(float (&)[N][4], const u32 (&)[4], Operand b) { product(0, b.bits); }
template <int N> void multiply_across(float (&)[N][4], Operand a, Operand b, bool) { product(a.bits, b.bits); }
template <int N> void multiply_transposed(float (&)[N][4], Operand a, Operand b) { product(a.bits, b.bits); }
"#;
const HOPPER: &str = include_str!("../kernels/hopper/hopper.cuh");
const FORWARD: &str = include_str!("../kernels/hopper/forward_device.cuh");

/// The part of a kernel's file from one text up to another.
fn part<'a>(file: &'a str, from: &str, to: &str) -> &'a str {
    let (_, rest) = file.split_once(from).unwrap_or_else(|| panic!("the file has {from:?}"));
    let (part, _) = rest.split_once(to).unwrap_or_else(|| panic!("the file has {to:?}"));
    &file[file.len() - rest.len() - from.len()..][..from.len() + part.len()]
}

/// A tile of a kernel: whether operands have 8 bits, queries and keys, padded head dims.
#[derive(Clone, Copy, Debug)]
struct Shape {
    eight_bits: bool,
    queries: usize,
    keys: usize,
    dim: usize,
    dim_v: usize,
}

impl Shape {
    /// Elements that a product sums.
    fn summed(self) -> usize {
        if self.eight_bits { 32 } else { 16 }
    }
}

/// The descriptors of the products that `functions`, of a kernel's file, start in `main`; `None`
/// without a C++ compiler.
fn products(shape: Shape, functions: &str, main: &str) -> Option<Vec<[Descriptor; 2]>> {
    let Shape { eight_bits, queries, keys, dim, dim_v } = shape;
    let dtype = if eight_bits { 3 } else { 1 };
    let sizes = [("DTYPE", dtype), ("BM", queries), ("BN", keys), ("DP", dim), ("DVP", dim_v)];
    let defines: String =
        sizes.iter().map(|(name, value)| format!("#define FV_{name} {value}\n")).collect();
    let operand = part(HOPPER, "struct Operand {", "// d += A B, or d = A B");
    let main = format!("int main() {{ {main} }}\n");
    let code = [&defines, PRELUDE, operand, PRODUCTS, functions, &main].concat();
    let said = on_host::text(&code)?;
    let pair = |line: &str| {
        let bits: Vec<u64> = line.split(' ').map(|n| n.parse().unwrap()).collect();
        [Descriptor(bits[0]), Descriptor(bits[1])]
    };
    Some(said.lines().map(pair).collect())
}

/// Where tiles begin in the programs: q or dS, k or q, v or d_out.
const AT: [usize; 3] = [0, 65_536, 131_072];

#[test]
fn products_of_the_forward_read_what_copies_wrote() {
    let of = |eight_bits, keys, dim, dim_v| Shape { eight_bits, queries: 64, keys, dim, dim_v };
    let shapes = [
        of(false, 128, 128, 128),
        of(false, 80, 64, 256),
        of(false, 112, 192, 96),
        // Keys of 64 in half rows, and of 128.
        of(true, 64, 128, 128),
        of(true, 192, 64, 96),
        of(true, 128, 256, 256),
    ];
    for shape in shapes {
        let Shape { eight_bits, keys, dim, dim_v, .. } = shape;
        let functions = part(FORWARD, "// s = Q K^T.", "// Weights as the operand of P V.");
        let [q, k, v] = AT;
        let main = format!(
            "float s[N][4], out[N_OUT][4]; u32 weights[FV_BN / MMA_K][4] = {{}}; \
             start_qk(s, Operand::rows({q}), Operand::rows({k})); \
             start_pv(out, weights, values_at({v}));"
        );
        let Some(made) = products(shape, functions, &main) else { return };
        let (summed, bytes) = (shape.summed(), if eight_bits { 1 } else { 2 });
        let (of_scores, of_values) = made.split_at(dim / summed);
        assert_eq!(of_values.len(), keys / summed, "{shape:?}");
        for (step, [a, b]) in of_scores.iter().enumerate() {
            for (operand, at, rows) in [(a, q, 64), (b, k, keys)] {
                for (row, byte) in (0..rows).flat_map(|row| (0..32).map(move |byte| (row, byte))) {
                    let found = operand.along_k_byte(operand.swizzle(), row, byte);
                    let expected = SWIZZLE_128.copied_byte(at, rows, row, 32 * step + byte);
                    assert_eq!(found, expected, "{shape:?}: step {step}, ({row}, {byte})");
                }
            }
        }
        // Of 8 bits values lie with keys along their rows, in the swizzle of as many bytes as a box.
        let box_keys = if keys % 128 == 0 { SWIZZLE_128 } else { SWIZZLE_64 };
        for (step, [_, values]) in of_values.iter().enumerate() {
            let pairs = (0..dim_v).flat_map(|column| (0..summed).map(move |key| (column, key)));
            for (column, key) in pairs {
                let at = step * summed + key;
                let (found, expected) = match eight_bits {
                    true => (
                        values.along_k_byte(values.swizzle(), column, key * bytes),
                        box_keys.copied_byte(v, dim_v, column, at),
                    ),
                    false => (
                        values.along_mn(values.swizzle(), column, key),
                        SWIZZLE_128.copied(v, keys, at, column),
                    ),
                };
                assert_eq!(found, expected, "{shape:?}: step {step}, ({column}, {key})");
            }
        }
    }
}

#[test]
fn products_of_the_backward_read_what_copies_and_consumers_wrote() {
    for (queries, dim) in [(64, 128), (128, 64), (64, 96)] {
        let shape = Shape { eight_bits: false, queries, keys: 128, dim, dim_v: dim };
        let functions = part(BACKWARD[1], "// dV += P^T dO", "// A consumer writes its dS^T as dS");
        let [ds, q, d_out] = AT;
        // Of the second consumer: its 64 keys of dS, and the columns of q and of K.
        let main = format!(
            "float sums[N_OUT][4], dk[N_K][4], dq[N_Q][4]; u32 weights[FV_BM / 16][4] = {{}}; \
             start_sums(sums, weights, Operand::columns({d_out}, FV_BM * PANEL_ROW), 0, FV_BM / 16); \
             start_dk(dk, Operand::columns({ds} + FV_BM * PANEL_ROW, 0), \
                      Operand::columns({q}, FV_BM * PANEL_ROW)); \
             start_dq(dq, Operand::rows({ds}), Operand::columns({q}, FV_BN * PANEL_ROW));"
        );
        let Some(made) = products(shape, functions, &main) else { return };
        let (of_queries, of_keys) = made.split_at(2 * queries / 16);
        let (of_values, of_dk) = of_queries.split_at(queries / 16);
        assert_eq!(of_keys.len(), shape.keys / 16);
        let across =
            |operand: &Descriptor, at, rows, step: usize, columns: std::ops::Range<usize>| {
                for (i, k) in (0..columns.len()).flat_map(|i| (0..16).map(move |k| (i, k))) {
                    let found = operand.along_mn(operand.swizzle(), i, k);
                    let expected = SWIZZLE_128.copied(at, rows, 16 * step + k, columns.start + i);
                    assert_eq!(found, expected, "{shape:?}: step {step}, ({i}, {k})");
                }
            };
        for (step, [_, rows]) in of_values.iter().enumerate() {
            across(rows, d_out, queries, step, 0..dim);
        }
        for (step, [a, b]) in of_dk.iter().enumerate() {
            across(a, ds, queries, step, 64..128);
            across(b, q, queries, step, 0..dim);
        }
        for (step, [a, b]) in of_keys.iter().enumerate() {
            across(b, q, shape.keys, step, 0..dim);
            for (row, k) in (0..64).flat_map(|row| (0..16).map(move |k| (row, k))) {
                let found = a.along_k(a.swizzle(), row, k);
                assert_eq!(found, SWIZZLE_128.copied(ds, queries, row, 16 * step + k), "{shape:?}");
            }
        }
    }
}
