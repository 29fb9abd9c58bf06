//! The kernel that writes tables of tiles, run on the CPU thread by thread.

use foveate_tensor::random::Random;

use super::execute::{Arena, program_output};
use crate::compile::params::{Abi, array_bytes};
use crate::compile::tile_tables::{LINES, TEXT, TileTablesParams};

struct Case {
    /// Batch entries and heads of the tables, rows and columns.
    sizes: [usize; 4],
    /// Whether masks differ by batch entry, and by head.
    by: [bool; 2],
    cut: [bool; 2],
    apart: bool,
    /// 0, 1 or 2 for each tile of the masks that there are, `[head, batch, row, column]`.
    kinds: Vec<u8>,
}

/// What the kernel is to write, table by table.
fn wanted(case: &Case) -> Vec<i32> {
    let [batch, heads, rows, columns] = case.sizes;
    let entries = if case.by[0] { batch } else { 1 };
    let kind = |b: usize, h: usize, row: usize, column: usize| {
        let mask = if case.by[1] { h } else { 0 } * entries + if case.by[0] { b } else { 0 };
        let kind = case.kinds[(mask * rows + row) * columns + column];
        let cut = (case.cut[0] && row + 1 == rows) || (case.cut[1] && column + 1 == columns);
        if cut || !case.apart { kind.min(1) } else { kind }
    };
    let mut written = Vec::new();
    for which in 1..=if case.apart { 2 } else { 1 } {
        for by_rows in [true, false] {
            let (lines, length) = if by_rows { (rows, columns) } else { (columns, rows) };
            let (mut counts, mut tiles) = (Vec::new(), Vec::new());
            for at in 0..batch * heads * lines {
                let (line, h, b) = (at % lines, at / lines % heads, at / lines / heads);
                let own = |tile: usize| {
                    let (row, column) = if by_rows { (line, tile) } else { (tile, line) };
                    kind(b, h, row, column) == which
                };
                let (mine, others): (Vec<usize>, Vec<usize>) = (0..length).partition(|&t| own(t));
                counts.push(mine.len() as i32);
                tiles.extend(mine.into_iter().chain(others).map(|tile| tile as i32));
            }
            written.extend(counts);
            written.extend(tiles);
        }
    }
    written
}

/// The runs of a mask's rows as the kernel of block lists leaves them, what is unused wild.
fn runs(case: &Case) -> (Vec<i32>, Vec<i32>) {
    let columns = case.sizes[3];
    let (mut counts, mut runs) = (Vec::new(), Vec::new());
    for row in case.kinds.chunks(columns) {
        let (mut found, mut at) = (Vec::new(), 0);
        for run in row.chunk_by(|a, b| a == b) {
            if run[0] > 0 {
                found.extend([at, 2 * run.len() as i32 + i32::from(run[0] == 1)]);
            }
            at += run.len() as i32;
        }
        counts.push(found.len() as i32 / 2);
        found.resize(2 * columns, -77);
        runs.extend(found);
    }
    (counts, runs)
}

#[test]
fn tables_list_the_tiles_of_each_line_and_then_the_others() {
    let mut r = Random::new(5);
    let cases: Vec<Case> = (0..40)
        .map(|i| {
            let sizes = [1 + r.below(3), 1 + r.below(3), 1 + r.below(70), 1 + r.below(70)];
            let [batch, heads, rows, columns] = sizes;
            let by = [r.below(2) == 0, r.below(2) == 0];
            let masks = if by[0] { batch } else { 1 } * if by[1] { heads } else { 1 };
            let mut last = 0;
            let kinds = (0..masks * rows * columns).map(|_| {
                last = if r.below(4) == 0 { r.below(3) as u8 } else { last };
                last
            });
            let kinds = kinds.collect();
            let cut = [r.below(2) == 0, r.below(2) == 0];
            Case { sizes, by, cut, apart: i % 4 > 0, kinds }
        })
        .collect();
    let text = [
        "#define FV_GROUP 1\n",
        include_str!("shim.h"),
        "struct Mods { int nothing; };\nstruct int2 { int x, y; };\n",
        include_str!("block.h"),
        TEXT,
        "static void launched(const TileTablesParams& p, const Mods&) { fv_tile_tables(p); }\n",
        "LAUNCH(launched, TileTablesParams, 128)\nint main() { take_arena();",
        &"run();".repeat(cases.len()),
        "}",
    ];
    let (mut arena, mut input) = (Arena::default(), Vec::new());
    for case in &cases {
        let [batch, heads, rows, columns] = case.sizes;
        let (counts, runs) = runs(case);
        let all = batch * heads;
        // Of one table: counts by rows, tiles by rows, counts by columns, tiles by columns.
        let parts = [rows, rows * columns, columns, rows * columns].map(|n| 4 * (all * n) as u64);
        let bytes: u64 = parts.iter().sum();
        let total = if case.apart { 2 * bytes } else { bytes };
        let at = arena.put(&vec![0xee; total as usize]);
        let table = |at: u64| {
            let [a, b, c, _] = parts;
            [at, at + a + b, at + a, at + a + b + c]
        };
        let entries = if case.by[0] { batch } else { 1 };
        let params = TileTablesParams {
            counts: arena.put(&array_bytes(&counts)),
            runs: arena.put(&array_bytes(&runs)),
            partial: table(at),
            full: if case.apart { table(at + bytes) } else { [0; 4] },
            head_rows: if case.by[1] { (entries * rows) as i64 } else { 0 },
            batch_rows: if case.by[0] { rows as i64 } else { 0 },
            batch: batch as i32,
            heads: heads as i32,
            rows: rows as i32,
            columns: columns as i32,
            cut_row: case.cut[0].into(),
            cut_column: case.cut[1].into(),
        };
        let grid = (all * (rows + columns)).div_ceil(LINES) as i32;
        input.extend([4, 0].map(i32::to_le_bytes).concat());
        input.extend(params.bytes());
        input.extend([grid, 1].map(i32::to_le_bytes).concat());
        input.extend([at, total].map(u64::to_le_bytes).concat());
    }
    let Some(bytes) = program_output(&text.concat(), arena, input) else { return };
    let mut ints = bytes.chunks(4).map(|word| i32::from_le_bytes(word.try_into().unwrap()));
    for (i, case) in cases.iter().enumerate() {
        let wanted = wanted(case);
        let found: Vec<i32> = ints.by_ref().take(wanted.len()).collect();
        assert_eq!(found, wanted, "case {i}: {:?} {:?}", case.sizes, case.by);
    }
    assert_eq!(ints.next(), None);
}
