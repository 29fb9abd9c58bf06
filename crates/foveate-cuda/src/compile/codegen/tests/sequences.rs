//! The kernel that writes sequences and tiles from offsets, run on the CPU thread by thread.

use super::execute::{Arena, program_output};
use super::*;
use crate::choose::schedule::{most_sum_rows, most_tiles};
use crate::compile::params::{Abi, SequencesParams};

/// One launch.
#[derive(Debug)]
struct Case {
    q: Vec<i32>,
    k: Vec<i32>,
    rows: [i32; 2],
    longest: [i32; 2],
    side: i32,
    of_keys: bool,
}

/// Where a sequence is, and whether an offset of it had to be moved.
fn spans(offsets: &[i32], rows: i32, longest: i32) -> (Vec<(i32, i32)>, bool) {
    let mut at = offsets[0].clamp(0, rows);
    let mut moved = offsets.len() > 1 && at != offsets[0];
    let spans = offsets[1..].iter().map(|&offset| {
        let (start, end) = (at, offset.clamp(0, rows).max(at));
        at = end;
        moved |= end != offset || end - start > longest;
        (start, (end - start).min(longest))
    });
    (spans.collect(), moved)
}

impl Case {
    fn count(&self) -> usize {
        self.q.len() - 1
    }

    fn tile_capacity(&self) -> usize {
        let own = usize::from(self.of_keys);
        let (rows, longest) = (self.rows[own] as usize, self.longest[own] as usize);
        most_tiles(self.count(), rows, longest, self.side as usize)
    }

    /// Ints that the kernel writes: sequences, tiles, report.
    fn ints(&self) -> [usize; 3] {
        [9 * (self.count() + 1), 2 * self.tile_capacity(), 4]
    }
}

/// What the kernel writes for each case; nothing without a host compiler.
fn written(cases: &[Case]) -> Option<Vec<Vec<i32>>> {
    let text = [
        "#define FV_GROUP 1\n#define FV_WARPS 2\n",
        include_str!("shim.h"),
        include_str!("../../../../kernels/params.cuh"),
        PRELUDE,
        "struct Mods { int nothing; };\nint of_warps[FV_WARPS];\n",
        include_str!("block.h"),
        include_str!("../../../../kernels/sequences.cu"),
        "static void launched(const SequencesParams& p, const Mods&) { fv_sequences(p); }\n",
        "LAUNCH(launched, SequencesParams, 64)\nint main() { take_arena();",
        &"run();".repeat(cases.len()),
        "}",
    ];
    let (mut arena, mut input) = (Arena::default(), Vec::new());
    for case in cases {
        let [sequences, tiles, report] = case.ints().map(|ints| 4 * ints as u64);
        // Ones everywhere but in the report, which is empty before a launch.
        let mut memory = vec![0xff; (sequences + tiles) as usize];
        memory.resize((sequences + tiles + report) as usize, 0);
        let at = arena.put(&memory);
        let mut offsets =
            |of: &[i32]| arena.put(&of.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        let params = SequencesParams {
            cu_q: offsets(&case.q),
            cu_k: offsets(&case.k),
            sequences: at,
            tiles: at + sequences,
            report: at + sequences + tiles,
            count: case.count() as i32,
            rows_q: case.rows[0],
            rows_k: case.rows[1],
            longest_q: case.longest[0],
            longest_k: case.longest[1],
            side: case.side,
            of_keys: case.of_keys.into(),
            tile_capacity: case.tile_capacity() as i32,
        };
        // Mods without captures are one unused int.
        input.extend([4, 0].map(i32::to_le_bytes).concat());
        input.extend(params.bytes());
        input.extend([1, 1].map(i32::to_le_bytes).concat());
        input.extend(at.to_le_bytes());
        input.extend((sequences + tiles + report).to_le_bytes());
    }
    let bytes = program_output(&text.concat(), arena, input)?;
    let mut ints = bytes.chunks(4).map(|word| i32::from_le_bytes(word.try_into().unwrap()));
    let take = |case: &Case| ints.by_ref().take(case.ints().iter().sum()).collect();
    Some(cases.iter().map(take).collect())
}

fn check(case: &Case, ints: &[i32]) {
    let [of_sequences, of_tiles, _] = case.ints();
    let (sequences, rest) = ints.split_at(of_sequences);
    let (tiles, report) = rest.split_at(of_tiles);
    let (q, q_moved) = spans(&case.q, case.rows[0], case.longest[0]);
    let (k, k_moved) = spans(&case.k, case.rows[1], case.longest[1]);
    let (mut row, mut sum_row, mut wanted) = (0, 0, Vec::new());
    for (i, found) in sequences.chunks(9).take(case.count()).enumerate() {
        let ((q_start, q_len), (k_start, k_len)) = (q[i], k[i]);
        let b = i as i32;
        assert_eq!(found[..8], [b, 0, 0, q_start, q_len, k_start, k_len, row], "{i} of {case:?}");
        assert!(found[8] >= sum_row && found[8] % 16 == 0, "sums of {i} overlap in {case:?}");
        sum_row = found[8] + (q_len + 15) / 16 * 16;
        let own = if case.of_keys { k_len } else { q_len };
        let count = (own as u32).div_ceil(case.side as u32) as i32;
        wanted.extend((0..count).map(|tile| [b, tile]));
        row += count;
    }
    assert!(sum_row as usize <= most_sum_rows(case.count(), case.rows[0] as usize), "{case:?}");
    let tile_capacity = case.tile_capacity() as i32;
    assert_eq!(sequences[9 * case.count()..], [0, 0, 0, 0, 0, 0, 0, tile_capacity, 0], "{case:?}");
    // The last tiles of queries have the most work, the first of keys.
    if !case.of_keys {
        wanted.reverse();
    }
    let mut wanted: Vec<i32> = wanted.into_flattened();
    let left_over = [case.count() as i32, 0];
    wanted.extend(left_over.repeat(case.tile_capacity() - wanted.len() / 2));
    assert_eq!(tiles, wanted, "{case:?}");
    assert_eq!(report[0] == 1, q_moved || k_moved, "{report:?} of {case:?}");
    if let [1, which, index, offset] = *report {
        let of = if which == -2 { &case.q } else { &case.k };
        assert!(which == -2 || which == -3);
        assert_eq!(of[index as usize], offset, "{case:?}");
    }
}

#[test]
fn sequences_lie_where_offsets_say_and_never_outside_or_in_each_other() {
    let mut cases = Vec::new();
    for i in 0..60 {
        let mut at = 0;
        let mut below = |n: i32| {
            at += 1;
            foveate_mods::ir::mix(1000 + i, at).rem_euclid(n)
        };
        // More sequences than threads in some.
        let count = [0, 1, 3, 63, 64, 65, 150][i as usize % 7];
        let good = |most: i32, below: &mut dyn FnMut(i32) -> i32| {
            let mut offsets = vec![below(3)];
            (0..count).for_each(|i| offsets.push(offsets[i] + below(most)));
            offsets
        };
        let (mut q, mut k) = (good(40, &mut below), good(90, &mut below));
        let tail = |offsets: &[i32], more| offsets[offsets.len() - 1] + more;
        let rows = [tail(&q, below(20)), tail(&k, below(2))];
        let mut longest = [39, 89];
        if i % 3 == 1 {
            // Whatever is in memory that nobody has written.
            for _ in 0..=below(4) {
                let wild = [-7, i32::MIN, i32::MAX, 5, 300][below(5) as usize];
                let (of, at) =
                    (if below(2) == 0 { &mut q } else { &mut k }, below(count as i32 + 1));
                of[at as usize] = wild;
            }
        } else if i % 3 == 2 {
            longest = [20, 50];
        }
        let side = [16, 48, 128][below(3) as usize];
        cases.push(Case { q, k, rows, longest, side, of_keys: below(2) == 1 });
    }
    let Some(found) = written(&cases) else { return };
    cases.iter().zip(&found).for_each(|(case, ints)| check(case, ints));
}
