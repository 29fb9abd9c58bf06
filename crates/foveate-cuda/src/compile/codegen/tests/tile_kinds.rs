//! The kernel that makes a table of tiles from lists, run on the CPU thread by thread.

use foveate_tensor::random::Random;

use super::execute::{Arena, program_output};
use crate::compile::params::{Abi, array_bytes};
use crate::compile::tile_kinds::{LINES, TEXT, TileKindsParams, TileList};

/// Lists of `[heads, rows]`, shared by the batch, rows of lists `pitch` entries apart.
struct Listed {
    counts: Vec<i32>,
    tiles: Vec<i32>,
    most: usize,
    pitch: usize,
}

impl Listed {
    /// Random ones that name tiles outside of `columns` too, some with counts beyond the room for them; what lies
    /// behind a count is wild.
    fn new(r: &mut Random, lines: usize, columns: usize) -> Self {
        let (most, apart) = (r.below(columns + 1), r.below(3));
        let counts = (0..lines).map(|_| r.below(most + 3) as i32 - 1).collect();
        let pitch = most + apart;
        let tiles = (0..lines * pitch.max(1)).map(|_| r.below(columns + 4) as i32 - 2).collect();
        Self { counts, tiles, most, pitch }
    }

    fn names(&self, line: usize, column: usize) -> bool {
        let count = (self.counts[line].max(0) as usize).min(self.most);
        self.tiles[line * self.pitch..][..count].contains(&(column as i32))
    }

    fn put(&self, arena: &mut Arena, rows: usize) -> TileList {
        TileList {
            counts: arena.put(&array_bytes(&self.counts)),
            tiles: arena.put(&array_bytes(&self.tiles)),
            count_strides: [0, rows as i64, 1],
            tile_strides: [0, (rows * self.pitch) as i64, self.pitch as i64, 1],
            most: self.most as i64,
        }
    }
}

#[test]
fn a_table_says_what_the_lists_name() {
    let mut r = Random::new(11);
    let cases: Vec<_> = (0..40)
        .map(|i| {
            let sizes = [1 + r.below(3), 1 + r.below(3), 1 + r.below(40), 1 + r.below(70)];
            let [_, heads, rows, columns] = sizes;
            let partial = Listed::new(&mut r, heads * rows, columns);
            let full = (i % 4 > 0).then(|| Listed::new(&mut r, heads * rows, columns));
            (sizes, partial, full)
        })
        .collect();
    let text = [
        "#define FV_GROUP 1\n",
        include_str!("shim.h"),
        "struct Mods { int nothing; };\n",
        include_str!("block.h"),
        TEXT,
        "static void launched(const TileKindsParams& p, const Mods&) { fv_tile_kinds(p); }\n",
        "LAUNCH(launched, TileKindsParams, 128)\nint main() { take_arena();",
        &"run();".repeat(cases.len()),
        "}",
    ];
    let (mut arena, mut input) = (Arena::default(), Vec::new());
    for ([batch, heads, rows, columns], partial, full) in &cases {
        let lines = batch * heads * rows;
        let kinds = arena.put(&vec![0xee; lines * columns]);
        let params = TileKindsParams {
            partial: partial.put(&mut arena, *rows),
            full: full.as_ref().map_or(TileList::default(), |full| full.put(&mut arena, *rows)),
            kinds,
            heads: *heads as i64,
            rows: *rows as i64,
            columns: *columns as i64,
            lines: lines as i64,
        };
        input.extend([4, 0].map(i32::to_le_bytes).concat());
        input.extend(params.bytes());
        input.extend([lines.div_ceil(LINES) as i32, 1].map(i32::to_le_bytes).concat());
        input.extend([kinds, (lines * columns) as u64].map(u64::to_le_bytes).concat());
    }
    let Some(bytes) = program_output(&text.concat(), arena, input) else { return };
    let mut found = bytes.into_iter();
    for (i, ([batch, heads, rows, columns], partial, full)) in cases.iter().enumerate() {
        for line in 0..batch * heads * rows {
            let list = line % (heads * rows);
            for column in 0..*columns {
                let is_full = full.as_ref().is_some_and(|full| full.names(list, column));
                let wanted = if is_full { 2 } else { partial.names(list, column).into() };
                assert_eq!(found.next(), Some(wanted), "case {i}: line {line}, column {column}");
            }
        }
    }
    assert_eq!(found.next(), None);
}
