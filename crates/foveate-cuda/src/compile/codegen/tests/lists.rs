//! The kernel that builds block lists, and the one that ranks what they say, run on the CPU thread by
//! thread, against the block masks of `foveate_mask`.

use foveate_mask::{BlockMask, Kind, Tile};
use foveate_mods::Head;

use super::execute::{Arena, of_a_cta, program_output, put_buffers};
use super::*;
use crate::compile::cells::Cells;
use crate::compile::params::{self, Abi, BlockListsParams, Run, Sequence, array_bytes};

/// One launch: a mask over two sequences of different lengths, all heads.
struct Case {
    mask: MaskMod,
    by_head: bool,
    tile: Tile,
    cells: Cells,
    lengths: [(i32, i32); 2],
    of_keys: bool,
    capacity: i32,
}

const HEADS: i32 = 2;

impl Case {
    fn heads(&self) -> i32 {
        if self.by_head { HEADS } else { 1 }
    }

    /// Rows of tiles of each sequence.
    fn rows(&self) -> [i32; 2] {
        self.lengths.map(|(q, kv)| match self.of_keys {
            false => (q as u32).div_ceil(self.tile.q) as i32,
            true => (kv as u32).div_ceil(self.tile.kv) as i32,
        })
    }

    /// Tiles of queries of the longest sequence.
    fn columns(&self) -> i32 {
        let columns = self.lengths.map(|(q, _)| (q as u32).div_ceil(self.tile.q) as i32);
        columns[0].max(columns[1])
    }

    /// Runs of every row, in order of head, sequence, tile.
    fn wanted(&self) -> Vec<Vec<foveate_mask::Run>> {
        let masks = self.masks(self.tile).into_iter();
        masks
            .flat_map(|m| (0..m.rows()).map(|row| m.row(row).to_vec()).collect::<Vec<_>>())
            .collect()
    }

    /// The runs of rows whose tiles have cells, of strips of them in order.
    fn wanted_cells(&self) -> Vec<Vec<Run>> {
        let mut rows = Vec::new();
        for mask in self.masks(self.cell()) {
            let strips: Vec<_> = (0..mask.rows()).map(|row| mask.row(row)).collect();
            let columns = mask.kv_len().div_ceil(self.tile.kv as usize);
            rows.extend(strips.chunks(self.cells.0).map(|s| self.cells.runs(s, columns)));
        }
        rows
    }

    fn cell(&self) -> Tile {
        Tile { q: self.tile.q / self.cells.0 as u32, ..self.tile }
    }

    /// The block masks of every head and sequence.
    fn masks(&self, tile: Tile) -> Vec<BlockMask> {
        let mut masks = Vec::new();
        for h in 0..self.heads() {
            for (b, (q_len, kv_len)) in self.lengths.into_iter().enumerate() {
                let head = Head { b: b as i32, h, h_kv: h / HEADS, q_len, kv_len };
                let (q, kv) = (q_len as usize, kv_len as usize);
                let built = BlockMask::build(&self.mask, head, q, kv, tile);
                masks.push(if self.of_keys { built.transpose() } else { built });
            }
        }
        masks
    }
}

/// What the kernels make of a case.
struct Built {
    /// The runs of each row.
    rows: Vec<Vec<Run>>,
    /// Of tiles of keys, of each row: how many add to each tile of queries before.
    ranks: Vec<Vec<i32>>,
}

/// The same with range tables that a CTA makes for itself, one behind the other.
fn in_shared_memory(tables: &[BufferAddresses], source: &ModsSource) -> Vec<BufferAddresses> {
    let mut end = 0;
    let place = |(of, buffer): (&BufferAddresses, &AnyBuffer)| {
        let ranges = end + 8;
        end = ranges + range_table_bytes(buffer.shape()) as u64;
        BufferAddresses { ranges, ..*of }
    };
    tables.iter().zip(source.buffers()).map(place).collect()
}

/// What a rank is where nothing was written.
const UNTOUCHED: i32 = -1;

/// What the kernels make of each case; nothing without a host compiler.
fn built(cases: &[Case]) -> Option<Vec<Built>> {
    let mut text = of_a_cta(1);
    let mut main = String::from("int main() { take_arena();");
    let mut arena = Arena::default();
    let mut input = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        let mods = Mods { mask: Some(&case.mask), ..Mods::default() };
        let source = ModsSource::new(mods, &options()).unwrap();
        text.push_str(&format!(
            "#define fv_block_lists fv_block_lists_{i}\n#define fv_dq_ranks fv_dq_ranks_{i}\n\
             #define fv_mask_bits fv_mask_bits_{i}\n\
             namespace p{i} {{\nunsigned lives[4096];\n\
             {}{}\nLAUNCH(fv_block_lists, BlockListsParams, 256)\n\
             LAUNCH_PLAIN(fv_dq_ranks, BlockListsParams, 256)\n}}\n\
             #undef fv_block_lists\n#undef fv_dq_ranks\n#undef fv_mask_bits\n",
            source.text(),
            include_str!("../../../../kernels/block_lists.cu"),
        ));
        main.push_str(&format!(" p{i}::run(); p{i}::run();"));
        if case.of_keys {
            main.push_str(&format!(" p{i}::run_plain();"));
        }
        let rows = case.rows();
        let sequence = |b: usize| Sequence {
            b: b as i32,
            q_len: case.lengths[b].0,
            k_len: case.lengths[b].1,
            first_row: if b == 0 { 0 } else { rows[0] },
            ..Sequence::default()
        };
        let mut tiles: Vec<params::Tile> = (0..2)
            .flat_map(|sequence| (0..rows[sequence as usize]).map(move |t| (sequence, t)))
            .map(|(sequence, tile)| params::Tile { sequence, tile })
            .collect();
        tiles.reverse();
        let all = ((rows[0] + rows[1]) * case.heads()) as usize;
        let list_bytes = all * (4 + 8 * case.capacity as usize);
        let [counts, again] = [(); 2].map(|()| arena.put(&vec![0xff; list_bytes]));
        let params = BlockListsParams {
            sequences: arena.put(&array_bytes(&[sequence(0), sequence(1)])),
            tiles: arena.put(&array_bytes(&tiles)),
            counts,
            runs: counts + 4 * all as u64,
            capacity: case.capacity,
            head_stride: if case.by_head { rows[0] + rows[1] } else { 0 },
            tile_q: case.tile.q as i32,
            tile_kv: case.tile.kv as i32,
            of_keys: case.of_keys.into(),
            group: HEADS,
            strips: case.cells.0 as i32,
            own_tables: 0,
            columns: case.columns(),
            ranks: arena.put(&vec![0xff; 4 * all * case.columns() as usize]),
            ..BlockListsParams::default()
        };
        let tables = put_buffers(&mut arena, &source);
        let own_tables = in_shared_memory(&tables, &source);
        let own = BlockListsParams {
            counts: again,
            runs: again + 4 * all as u64,
            own_tables: 1,
            ..params
        };
        for (params, addresses) in [(params, tables), (own, own_tables)] {
            let mods = source.pack(&addresses, 0).unwrap();
            input.extend((mods.len() as i32).to_le_bytes());
            input.extend(mods);
            input.extend(params.bytes());
            input.extend([tiles.len() as i32, case.heads()].map(i32::to_le_bytes).concat());
            input.extend(params.counts.to_le_bytes());
            input.extend((list_bytes as u64).to_le_bytes());
        }
        if case.of_keys {
            input.extend(params.bytes());
            let warps = BlockListsParams::THREADS as u32 / 32;
            let ctas = (case.columns() as u32).div_ceil(warps) as i32;
            input.extend([2, case.heads(), ctas].map(i32::to_le_bytes).concat());
            input.extend(params.ranks.to_le_bytes());
            input.extend((4 * all as u64 * case.columns() as u64).to_le_bytes());
        }
    }
    Some(parsed(cases, &program_output(&format!("{text}{main} }}\n"), arena, input)?))
}

/// What the kernels of each case wrote: lists by tables that there are, the same by those that each CTA
/// makes, and ranks.
fn parsed(cases: &[Case], bytes: &[u8]) -> Vec<Built> {
    let mut ints = bytes.chunks(4).map(|word| i32::from_le_bytes(word.try_into().unwrap()));
    let lists = cases.iter().map(|case| {
        let all = case.wanted().len();
        let mut take = |n: usize| -> Vec<i32> { ints.by_ref().take(n).collect() };
        let ints = all * (1 + 2 * case.capacity as usize);
        let (lists, by_own_tables) = (take(ints), take(ints));
        assert_eq!(lists, by_own_tables, "{} by tables that each CTA makes", case.mask);
        let (counts, runs) = lists.split_at(all);
        let row = |(row, count): (usize, &i32)| {
            let runs = &runs[row * 2 * case.capacity as usize..][..2 * *count as usize];
            runs.chunks(2).map(|r| Run { first: r[0], count_kind: r[1] }).collect()
        };
        let rows = counts.iter().enumerate().map(row).collect();
        let columns = case.columns() as usize;
        let ranks = take(if case.of_keys { all * columns } else { 0 });
        Built { rows, ranks: ranks.chunks(columns).map(<[i32]>::to_vec).collect() }
    });
    lists.collect()
}

fn as_run(run: &foveate_mask::Run) -> Run {
    let partial = i32::from(run.kind == Kind::Partial);
    Run { first: run.first as i32, count_kind: 2 * run.count as i32 + partial }
}

fn masks_to_build() -> Vec<(MaskMod, bool)> {
    let doc: Vec<i32> = (0..6000).map(|i| i / 173).collect();
    let documents = masks::document(&Buffer::vector("doc", doc)).unwrap();
    let prefixes = Buffer::vector("prefixes", vec![35, 411]);
    let prefix = masks::prefix_lm_per_batch(&prefixes).unwrap();
    let window = masks::window(50, 3).unwrap();
    let of_heads = closure::mask_mod!(|q, kv, h| if h == 0 { q >= kv } else { (q - kv) % 64 < 9 });
    vec![
        (masks::causal(), false),
        (masks::causal() & documents, false),
        (window | masks::global_tokens(20).unwrap(), false),
        (prefix, false),
        (masks::neighbourhood(&[90, 12], &[5, 3]).unwrap(), false),
        (masks::full(), false),
        (of_heads, true),
    ]
}

#[test]
fn lists_built_by_the_kernel_are_those_of_block_masks() {
    let mut cases = Vec::new();
    for (mask, by_head) in masks_to_build() {
        for (of_keys, tile, lengths) in [
            (false, Tile { q: 16, kv: 8 }, [(100, 257), (53, 0)]),
            (true, Tile { q: 8, kv: 16 }, [(260, 70), (511, 40)]),
            // More than 16 words of 32 tiles: those of bounds on 32 tiles at once.
            (false, Tile { q: 32, kv: 8 }, [(70, 4600), (0, 300)]),
        ] {
            let cells = Cells::WHOLE;
            cases.push(Case {
                mask: mask.clone(),
                by_head,
                tile,
                cells,
                lengths,
                of_keys,
                capacity: 80,
            });
        }
    }
    let Some(lists) = built(&cases) else { return };
    for (number, (case, Built { rows, .. })) in cases.iter().zip(lists).enumerate() {
        let wanted: Vec<Vec<Run>> =
            case.wanted().iter().map(|row| row.iter().map(as_run).collect()).collect();
        assert_eq!(rows, wanted, "case {number}: {}", case.mask);
    }
}

#[test]
fn runs_beyond_the_capacity_are_joined_where_gaps_are_narrowest() {
    let mut cases = Vec::new();
    for (mask, by_head) in masks_to_build() {
        for capacity in [1, 3, 7] {
            let (tile, lengths) = (Tile { q: 16, kv: 4 }, [(90, 700), (40, 333)]);
            cases.push(Case {
                mask: mask.clone(),
                by_head,
                tile,
                cells: Cells::WHOLE,
                lengths,
                of_keys: false,
                capacity,
            });
        }
    }
    let Some(lists) = built(&cases) else { return };
    let mut joined = 0;
    for (number, (case, Built { rows, .. })) in cases.iter().zip(lists).enumerate() {
        for (row, (got, all)) in rows.iter().zip(case.wanted()).enumerate() {
            let at = format!("case {number}, row {row}: {got:?} of {all:?}");
            let capacity = case.capacity as usize;
            assert_eq!(got.len(), all.len().min(capacity), "{at}");
            let mut gaps: Vec<i32> =
                all.windows(2).map(|w| (w[1].first - w[0].tiles().end) as i32).collect();
            gaps.sort_unstable();
            let narrowest: i32 = gaps.iter().take(all.len().saturating_sub(capacity)).sum();
            let tiles: i32 = all.iter().map(|run| run.count as i32).sum();
            assert_eq!(
                got.iter().map(|r| r.count_kind / 2).sum::<i32>(),
                tiles + narrowest,
                "{at}"
            );
            for run in got {
                let inside = |r: &&foveate_mask::Run| {
                    r.first as i32 >= run.first
                        && r.tiles().end as i32 <= run.first + run.count_kind / 2
                };
                let of: Vec<_> = all.iter().filter(inside).collect();
                assert!(!of.is_empty(), "{at}");
                if of.len() == 1 {
                    assert_eq!(*run, as_run(of[0]), "{at}");
                } else {
                    assert_eq!(run.count_kind % 2, 1, "{at}");
                }
            }
            joined += usize::from(all.len() > capacity);
        }
    }
    assert!(joined > 40, "only {joined} rows had too many runs");
}

/// Tiles of two strips and of three, another one for each mask.
fn with_cells(capacity: i32, lengths: [(i32, i32); 2], first: usize) -> Vec<Case> {
    let masks = masks_to_build().into_iter().enumerate();
    let case = |(i, (mask, by_head)): (usize, (MaskMod, bool))| {
        let strips = 2 + (i + first) % 2;
        let (tile, cells) = (Tile { q: 8 * strips as u32, kv: 8 }, Cells(strips));
        Case { mask, by_head, tile, cells, lengths, of_keys: false, capacity }
    };
    masks.map(case).collect()
}

#[test]
fn lists_of_cells_built_by_the_kernel_are_those_of_block_masks() {
    // The second has rows of tiles with more than 32 words of cells, whose bounds come first.
    let mut cases = with_cells(400, [(100, 257), (53, 0)], 0);
    cases.extend(with_cells(400, [(40, 6000), (0, 77)], 1));
    let Some(lists) = built(&cases) else { return };
    for (number, (case, Built { rows, .. })) in cases.iter().zip(lists).enumerate() {
        assert_eq!(rows, case.wanted_cells(), "case {number}: {} {:?}", case.mask, case.cells);
    }
}

#[test]
fn whatever_is_joined_each_cell_is_live_where_the_mask_is_and_full_nowhere_else() {
    let mut cases = with_cells(2, [(90, 700), (40, 333)], 1);
    cases.extend(with_cells(5, [(90, 700), (40, 333)], 0));
    let Some(lists) = built(&cases) else { return };
    let mut joined = 0;
    for (number, (case, Built { rows, .. })) in cases.iter().zip(lists).enumerate() {
        let (strips, bits) = (case.cells.0, case.cells.kind_bits());
        let masks = case.masks(case.cell());
        let wanted = masks.iter().flat_map(|mask| {
            let strip = |row: usize| (row < mask.rows()).then(|| mask.row(row));
            let row = move |first: usize| (0..strips).map(|i| strip(first + i)).collect::<Vec<_>>();
            (0..mask.rows()).step_by(strips).map(row).collect::<Vec<_>>()
        });
        for (row, (runs, wanted)) in rows.iter().zip(wanted).enumerate() {
            joined += usize::from(runs.len() == case.capacity as usize);
            for (tile, strip) in (0..700 / 8 + 1).flat_map(|t| (0..strips).map(move |s| (t, s))) {
                let inside = |r: &&Run| (r.first..r.first + (r.count_kind >> bits)).contains(&tile);
                let kind = runs.iter().find(inside).map_or(0, |run| run.count_kind >> (2 * strip));
                let said = (kind & 1 == 1).then_some(kind & 2 == 2);
                let of_strip = wanted[strip].unwrap_or(&[]);
                let found = of_strip.iter().find(|r| r.tiles().contains(&(tile as u32)));
                let right = match (found.map(|run| run.kind), said) {
                    (_, Some(evaluates)) if evaluates => true,
                    (None, None) | (Some(Kind::Full), Some(_)) => true,
                    (None | Some(_), _) => false,
                };
                assert!(right, "case {number}, row {row}, tile {tile}, strip {strip}: {said:?}");
            }
        }
    }
    assert!(joined > 20, "only {joined} rows are as long as there is room");
}

#[test]
fn ranks_count_the_tiles_of_keys_before_that_a_tile_of_queries_sees() {
    let mut cases = Vec::new();
    for (mask, by_head) in masks_to_build() {
        // More tiles of keys than lanes of a warp; a sequence without keys; runs that were joined.
        for (lengths, capacity) in [
            ([(260, 700), (511, 40)], 80),
            ([(90, 1300), (200, 0)], 80),
            ([(511, 333), (0, 64)], 1),
        ] {
            let tile = Tile { q: 16, kv: 16 };
            cases.push(Case {
                mask: mask.clone(),
                by_head,
                tile,
                lengths,
                cells: Cells(1),
                of_keys: true,
                capacity,
            });
        }
    }
    let Some(lists) = built(&cases) else { return };
    let (mut later, mut unseen) = (0, 0);
    for (number, (case, Built { rows, ranks })) in cases.iter().zip(lists).enumerate() {
        let live = |row: usize, column: i32| {
            let sees = |run: &Run| (run.first..run.first + run.count_kind / 2).contains(&column);
            rows[row].iter().any(sees)
        };
        let of_sequences = case.rows().map(|rows| rows as usize);
        let mut first = 0;
        for of_sequence in (0..case.heads()).flat_map(|_| of_sequences) {
            for column in 0..case.columns() {
                let mut before = 0;
                let of_rows = ranks.iter().enumerate().skip(first).take(of_sequence);
                for (row, ranks) in of_rows {
                    let wanted = if live(row, column) { before } else { UNTOUCHED };
                    let found = ranks[column as usize];
                    assert_eq!(found, wanted, "case {number}, row {row}, column {column}");
                    before += i32::from(wanted != UNTOUCHED);
                    later += usize::from(wanted > 0);
                    unseen += usize::from(wanted == UNTOUCHED);
                }
            }
            first += of_sequence;
        }
    }
    assert!(
        later > 1000 && unseen > 1000,
        "{later} ranks above 0, {unseen} tiles that nobody sees"
    );
}
