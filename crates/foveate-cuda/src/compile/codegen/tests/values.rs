//! The kernel that transposes values of e4m3, run on the CPU thread by thread.

use super::execute::{Arena, program_output};
use super::*;
use crate::compile::config::Config;
use crate::compile::params::{Abi, Sequence, TransposeValuesParams, View, array_bytes};

const HEADS: usize = 2;
const DIM_V: usize = 20;
/// Bytes from one row of values to the next.
const ROW: usize = 48;
const THREADS: usize = 64;

/// Sequences of one launch: where their keys begin, and how many there are.
#[derive(Debug)]
struct Case {
    spans: Vec<(usize, usize)>,
    packed: bool,
    rows: usize,
    tile: usize,
}

impl Case {
    fn batch(&self) -> usize {
        if self.packed { 1 } else { self.spans.len() }
    }

    fn columns(&self) -> usize {
        let tiles = match self.packed {
            true => self.rows / self.tile + self.spans.len(),
            false => self.rows.div_ceil(self.tile),
        };
        tiles * self.tile
    }

    /// The column of key 0 of a sequence.
    fn first(&self, b: usize) -> usize {
        (self.spans[b].0 / self.tile + if self.packed { b } else { 0 }) * self.tile
    }

    /// The byte of a row of values: no two near each other are equal, and none is 0.
    fn value(batch: usize, head: usize, row: usize, d: usize) -> u8 {
        (1 + (row * 31 + d * 7 + head * 101 + batch * 57) % 251) as u8
    }

    fn put(&self, arena: &mut Arena, input: &mut Vec<u8>) {
        let mut values = vec![0xff; self.batch() * HEADS * self.rows * ROW];
        for (i, value) in values.iter_mut().enumerate() {
            let (row, d) = (i / ROW % self.rows, i % ROW);
            let head = i / ROW / self.rows;
            if d < DIM_V {
                *value = Self::value(head / HEADS, head % HEADS, row, d);
            }
        }
        let sequences = self.spans.iter().enumerate().map(|(b, &(start, len))| Sequence {
            b: b as i32,
            k_batch: if self.packed { 0 } else { b as i32 },
            k_start: start as i32,
            k_len: len as i32,
            ..Default::default()
        });
        let sequences: Vec<Sequence> = sequences.collect();
        let bytes = self.batch() * HEADS * DIM_V * self.columns();
        let (v, at) = (arena.put(&values), arena.put(&vec![0xff; bytes]));
        let params = TransposeValuesParams {
            v: View {
                data: v,
                batch: (HEADS * self.rows * ROW) as i64,
                head: (self.rows * ROW) as i64,
                row: ROW as i64,
                elem: 1,
                group: 0,
            },
            sequences: arena.put(&array_bytes(&sequences)),
            values: at,
            count: self.spans.len() as i32,
            packed: self.packed.into(),
            columns: self.columns() as i32,
            tile_kv: self.tile as i32,
            heads: HEADS as i32,
        };
        let ctas = (self.batch() * HEADS * self.columns() / 64) as i32;
        input.extend([4, 0].map(i32::to_le_bytes).concat());
        input.extend(params.bytes());
        input.extend([ctas, 1].map(i32::to_le_bytes).concat());
        input.extend(at.to_le_bytes());
        input.extend((bytes as u64).to_le_bytes());
    }

    /// Checks every key of every sequence, and the zeros behind it up to the end of its last tile.
    fn check(&self, found: &[u8]) {
        for (b, &(start, len)) in self.spans.iter().enumerate() {
            let batch = if self.packed { 0 } else { b };
            for (head, d) in (0..HEADS).flat_map(|h| (0..DIM_V).map(move |d| (h, d))) {
                let row = &found[((batch * HEADS + head) * DIM_V + d) * self.columns()..];
                for position in 0..len.next_multiple_of(self.tile) {
                    // Four positions of a thread: two keys, and the two that are 8 further.
                    let (c, e) = (position % 16 / 4, position % 4);
                    let key = position / 16 * 16 + 2 * c + e % 2 + e / 2 * 8;
                    let wanted =
                        if key < len { Self::value(batch, head, start + key, d) } else { 0 };
                    let at = self.first(b) + position;
                    assert_eq!(row[at], wanted, "{self:?}: b {b}, head {head}, d {d}, {position}");
                }
            }
        }
    }
}

#[test]
fn values_have_keys_along_their_rows_as_weights_lie_and_zeros_behind_each_sequence() {
    let mut cases = Vec::new();
    for tile in [64, 128, 192] {
        for len in [1, 16, 63, 64, 65, 200] {
            cases.push(Case { spans: vec![(0, len); 2], packed: false, rows: len, tile });
        }
        let spans = vec![(3, 60), (63, 0), (63, 130), (193, 1), (194, 64), (258, 77)];
        cases.push(Case { spans, packed: true, rows: 350, tile });
    }
    let config = Config::transpose_values(DIM_V);
    let defines = config.defines().replace("#define FV_CHECKED 0\n", "");
    let text = [
        &defines,
        include_str!("shim.h"),
        include_str!("../../../../kernels/params.cuh"),
        PRELUDE,
        "struct Mods { int nothing; };\ntypedef unsigned char Elem;\n",
        &format!("static u32 keys[{}];\nconstexpr int THREADS = {THREADS};\n", 64 * ((DIM_V / 4) | 1)),
        "static int ceil_div(int a, int b) { return (a + b - 1) / b; }\n\
         struct uint4 { u32 x, y, z, w; };\n\
         static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }\n\
         static u32 __byte_perm(u32 x, u32 y, u32 selector) {\n\
             const unsigned long long both = (unsigned long long)y << 32 | x;\n\
             u32 bits = 0;\n\
             for (int i = 0; i < 4; ++i) bits |= u32(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;\n\
             return bits;\n\
         }\n",
        include_str!("block.h"),
        &include_str!("../../../../kernels/hopper/transpose_values.cu")
            .replace("constexpr int KEYS", "static const int KEYS")
            .replace("extern \"C\" __device__ const int", "static const int")
            .replace("extern __shared__ u32 keys[];", ""),
        "static void launched(const TransposeValuesParams& p, const Mods&) { fv_transpose_values(p); }\n",
        &format!("LAUNCH(launched, TransposeValuesParams, {THREADS})\nint main() {{ take_arena();"),
        &"run();".repeat(cases.len()),
        "}",
    ]
    .concat();
    let (mut arena, mut input) = (Arena::default(), Vec::new());
    cases.iter().for_each(|case| case.put(&mut arena, &mut input));
    let Some(bytes) = program_output(&text, arena, input) else { return };
    let mut at = 0;
    for case in &cases {
        let len = case.batch() * HEADS * DIM_V * case.columns();
        case.check(&bytes[at..at + len]);
        at += len;
    }
    assert_eq!(at, bytes.len());
}
