//! The kernel that writes the mask of partial tiles as bits, run on the CPU thread by thread, against the mask at every
//! pair, in the order in which accumulators of `wgmma` have them.

use foveate_mask::{BlockMask, Run as MaskRun, Tile};
use foveate_mods::{Head, ScalarValue};

use super::execute::{Arena, of_a_cta, program_output, put_buffers};
use super::*;
use crate::choose::schedule::{Axis, TileSize, mask_slots};
use crate::compile::cells::Cells;
use crate::compile::params::{self, Abi, BlockListsParams, Run, Sequence, array_bytes};

/// Lists of a mask over two sequences, all heads, and room for so many tiles of a row.
struct Case {
    mask: MaskMod,
    by_head: bool,
    axis: Axis,
    tile: TileSize,
    lengths: [(i32, i32); 2],
    row_slots: usize,
    /// The first run of a row is all of it, as where runs were joined.
    joined: bool,
}

/// A row of lists: whose it is, and its runs.
struct Row {
    head: Head,
    tile: usize,
    runs: Vec<Run>,
}

const HEADS: i32 = 2;
/// CTAs that share a row.
const SHARES: i32 = 3;

impl Case {
    /// Positions of the axis of the list and of the other one in a tile.
    fn sides(&self) -> (usize, usize) {
        match self.axis {
            Axis::Queries => (self.tile.q, self.tile.kv),
            Axis::Keys => (self.tile.kv, self.tile.q),
        }
    }

    fn lengths_of(&self, head: &Head) -> (usize, usize) {
        let (q, kv) = (head.q_len as usize, head.kv_len as usize);
        if self.axis == Axis::Queries { (q, kv) } else { (kv, q) }
    }

    /// Rows in order of head, sequence, tile.
    fn rows(&self) -> Vec<Row> {
        let (own, across) = self.sides();
        let strips = self.tile.cells.0;
        let mut rows = Vec::new();
        for h in 0..if self.by_head { HEADS } else { 1 } {
            for (b, (q_len, kv_len)) in self.lengths.into_iter().enumerate() {
                let head = Head { b: b as i32, h, h_kv: h / HEADS, q_len, kv_len };
                let cell = Tile { q: (self.tile.q / strips) as u32, kv: self.tile.kv as u32 };
                let built =
                    BlockMask::build(&self.mask, head, q_len as usize, kv_len as usize, cell);
                let built = if self.axis == Axis::Keys { built.transpose() } else { built };
                let (length, other) = self.lengths_of(&head);
                let columns = other.div_ceil(across);
                for tile in 0..length.div_ceil(own) {
                    let strip = |s: usize| {
                        (tile * strips + s < built.rows()).then(|| built.row(tile * strips + s))
                    };
                    let of_strips: Vec<&[MaskRun]> = (0..strips).filter_map(strip).collect();
                    let mut runs = self.tile.cells.runs(&of_strips, columns);
                    let bits = self.tile.cells.kind_bits();
                    if self.joined && columns > 0 {
                        runs = vec![Run {
                            first: 0,
                            count_kind: (columns << bits | ((1 << bits) - 1)) as i32,
                        }];
                    }
                    rows.push(Row { head, tile, runs });
                }
            }
        }
        rows
    }

    /// Whether a query sees a key, by their places on the axis of the list and on the other one; no pair outside does.
    fn sees(&self, head: &Head, own: usize, other: usize) -> bool {
        let (length, others) = self.lengths_of(head);
        let (q, kv) = if self.axis == Axis::Queries { (own, other) } else { (other, own) };
        let program = self.mask.program();
        let value = |point| program.eval(&point).expect("indices are in range")[0];
        own < length
            && other < others
            && value(head.at(q as i32, kv as i32)) == ScalarValue::Bool(true)
    }
}

fn cases() -> Vec<Case> {
    let doc: Vec<i32> = (0..1000).map(|i| i / 73).collect();
    let documents = masks::document(&Buffer::vector("doc", doc)).unwrap();
    let of_heads = closure::mask_mod!(|q, kv, h| if h == 0 { q >= kv } else { (q - kv) % 64 < 9 });
    let all = [
        (masks::neighbourhood(&[20, 12], &[5, 3]).unwrap(), false),
        (masks::causal() & documents, false),
        (of_heads, true),
    ];
    let two = TileSize { cells: Cells(2), ..TileSize::whole(128, 96) };
    let mut cases = Vec::new();
    for (i, (mask, by_head)) in all.into_iter().enumerate() {
        for (axis, tile, row_slots, joined) in [
            (Axis::Queries, two, 8, false),
            (Axis::Queries, TileSize { cells: Cells(3), ..TileSize::whole(192, 32) }, 3, false),
            (Axis::Queries, TileSize::whole(64, 128), 2, true),
            (Axis::Keys, TileSize::whole(64, 128), 8, false),
            (Axis::Keys, TileSize::whole(128, 128), 1 + i, false),
        ] {
            let mask = mask.clone();
            let lengths = [(240, 200), (131, 99)];
            cases.push(Case { mask, by_head, axis, tile, lengths, row_slots, joined });
        }
    }
    cases
}

/// Slots of all runs, and words of all slots, as the kernel leaves them; nothing without a host compiler.
fn written(cases: &[Case]) -> Option<Vec<(Vec<i32>, Vec<u32>)>> {
    let mut text = of_a_cta(2);
    let mut main = String::from("int main() { take_arena();");
    let (mut arena, mut input, mut sizes) = (Arena::default(), Vec::new(), Vec::new());
    for (i, case) in cases.iter().enumerate() {
        let mods = Mods { mask: Some(&case.mask), ..Mods::default() };
        let source = ModsSource::new(mods, &options()).unwrap();
        text.push_str(&format!(
            "namespace p{i} {{\nunsigned lives[4096];\n{}{}\nLAUNCH_SHARED(fv_mask_bits, BlockListsParams, 256)\n}}\n",
            source.text(),
            include_str!("../../../../kernels/block_lists.cu").replace("extern \"C\" ", ""),
        ));
        main.push_str(&format!(" p{i}::run_shared();"));
        let rows = case.rows();
        let capacity = rows.iter().map(|row| row.runs.len()).max().unwrap().max(1);
        let (own, across) = case.sides();
        let of_sequence = |b: usize| {
            let (q, kv) = case.lengths[b];
            (if case.axis == Axis::Queries { q } else { kv } as usize).div_ceil(own)
        };
        let per_head = of_sequence(0) + of_sequence(1);
        let sequence = |b: usize| Sequence {
            b: b as i32,
            q_len: case.lengths[b].0,
            k_len: case.lengths[b].1,
            first_row: if b == 0 { 0 } else { of_sequence(0) as i32 },
            ..Sequence::default()
        };
        let tiles: Vec<params::Tile> = (0..2)
            .flat_map(|b| (0..of_sequence(b)).map(move |tile| (b as i32, tile as i32)))
            .map(|(sequence, tile)| params::Tile { sequence, tile })
            .collect();
        let counts: Vec<i32> = rows.iter().map(|row| row.runs.len() as i32).collect();
        let mut runs = Vec::new();
        for row in &rows {
            runs.extend(&row.runs);
            runs.resize(runs.len().next_multiple_of(capacity), Run::default());
        }
        let (tile_bytes, _) = mask_slots(case.axis, case.tile, case.row_slots, rows.len());
        assert_eq!(tile_bytes, own / 16 * 32 * across.div_ceil(64) * 4);
        let slot_bytes = 4 * rows.len() * capacity;
        let bit_bytes = tile_bytes * rows.len() * case.row_slots;
        let to = arena.put(&vec![0xee; slot_bytes + bit_bytes]);
        let heads = if case.by_head { HEADS } else { 1 };
        let params = BlockListsParams {
            sequences: arena.put(&array_bytes(&[sequence(0), sequence(1)])),
            tiles: arena.put(&array_bytes(&tiles)),
            counts: arena.put(&array_bytes(&counts)),
            runs: arena.put(&array_bytes(&runs)),
            capacity: capacity as i32,
            head_stride: if case.by_head { per_head as i32 } else { 0 },
            tile_q: case.tile.q as i32,
            tile_kv: case.tile.kv as i32,
            of_keys: (case.axis == Axis::Keys).into(),
            group: HEADS,
            strips: case.tile.cells.0 as i32,
            row_slots: case.row_slots as i32,
            mask_slots: to,
            mask_bits: to + slot_bytes as u64,
            ..BlockListsParams::default()
        };
        let mods = source.pack(&put_buffers(&mut arena, &source), 0).unwrap();
        input.extend((mods.len() as i32).to_le_bytes());
        input.extend(mods);
        input.extend(params.bytes());
        input.extend([tiles.len() as i32, heads, SHARES].map(i32::to_le_bytes).concat());
        input.extend([to, (slot_bytes + bit_bytes) as u64].map(u64::to_le_bytes).concat());
        sizes.push((slot_bytes / 4, bit_bytes / 4));
    }
    let bytes = program_output(&format!("{text}{main} }}\n"), arena, input)?;
    let mut words = bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    let of_case = |(slots, bits): (usize, usize)| {
        let slots = words.by_ref().take(slots).map(|slot| slot as i32).collect();
        (slots, words.by_ref().take(bits).collect())
    };
    Some(sizes.into_iter().map(of_case).collect())
}

#[test]
fn mask_bits_are_the_mask_in_the_order_of_accumulators() {
    let cases = cases();
    let Some(written) = written(&cases) else { return };
    let (mut with_bits, mut without, mut hidden, mut visible) = (0, 0, 0, 0);
    for (number, (case, (slots, words))) in cases.iter().zip(written).enumerate() {
        let rows = case.rows();
        let capacity = slots.len() / rows.len();
        let (own, across) = case.sides();
        let (strips, bits) = (case.tile.cells.0, case.tile.cells.kind_bits());
        let lane_words = across.div_ceil(64);
        for (at, row) in rows.iter().enumerate() {
            let mut taken = 0;
            for (i, run) in row.runs.iter().enumerate() {
                let slot = slots[at * capacity + i];
                let tiles = (run.count_kind >> bits) as usize;
                let partial = case.tile.cells.live(run.count_kind).any(|(_, partial)| partial);
                let said = format!("case {number}, row {at}, {run:?}");
                if !partial || taken + tiles > case.row_slots {
                    assert!(slot < 0 && slot + (tiles as i32) < 0, "{said}: {slot}");
                    without += usize::from(partial);
                    continue;
                }
                assert_eq!(slot as usize, at * case.row_slots + taken, "{said}");
                taken += tiles;
                with_bits += 1;
                for (tile, thread) in (0..tiles).flat_map(|t| (0..own * 2).map(move |n| (t, n))) {
                    let (warp, lane) = (thread / 32, thread % 32);
                    let strip = warp * strips / (own / 16);
                    if !case.tile.cells.live(run.count_kind).any(|(cell, _)| cell == strip) {
                        continue;
                    }
                    // A thread of m64n8 accumulators: numbers of rows r and r + 8, two columns of each eight.
                    let first = ((slot as usize + tile) * own * 2 + thread) * lane_words;
                    for j in 0..across / 2 {
                        let a = row.tile * own + warp * 16 + lane / 4 + j % 4 / 2 * 8;
                        let b =
                            (run.first as usize + tile) * across + j / 4 * 8 + lane % 4 * 2 + j % 2;
                        let wanted = case.sees(&row.head, a, b);
                        let found = words[first + j / 32] >> (j % 32) & 1 == 1;
                        assert_eq!(found, wanted, "{said}: {a}, {b}");
                        *(if wanted { &mut visible } else { &mut hidden }) += 1;
                    }
                }
            }
        }
    }
    assert!(with_bits > 20 && without > 5, "{with_bits} runs with bits, {without} without");
    assert!(hidden > 10_000 && visible > 10_000, "{hidden} pairs hidden, {visible} visible");
}
