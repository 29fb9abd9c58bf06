//! Tiles against single points.

use std::ops::Range;

use super::compile::Place;
use super::registers::padded;
use super::*;
use foveate_tensor::random::Random;

use crate::bounds::random::{buffers, random};
use crate::capture::Buffer;
use crate::eval::{self, OutOfRange};
use crate::expr::{self, DynExpr, Expr};
use crate::point::{Head, Point};
use crate::program::Program;
use crate::value::ScalarValue;
use crate::value::Type;

const HEAD: Head = Head { b: 1, h: 2, h_kv: 1, q_len: 70, kv_len: 90 };

fn at(q: i32, kv: i32, score: f32) -> Point {
    let Head { b, h, h_kv, q_len, kv_len } = HEAD;
    Point { b, h, h_kv, q, kv, q_len, kv_len, score }
}

/// A tile of up to 40 × 40, at most the machines' size.
fn tile(r: &mut Random) -> (Range<i32>, Range<i32>) {
    let (q, kv) = (r.below(30) as i32, r.below(50) as i32);
    (q..q + 1 + r.below(40) as i32, kv..kv + 1 + r.below(40) as i32)
}

fn machine(program: &Program) -> Machine {
    let mut machine = TileProgram::compile(program).machine(40, 40);
    machine.set_head(HEAD);
    machine
}

#[test]
fn random_masks_are_over_tiles_what_they_are_at_points() {
    let seed = 41_000;
    println!("seed {seed}");
    let buffers = buffers();
    for case in 0..3000 {
        let mut r = Random::new(seed + case);
        let program = Program::build(&[random(&mut r, &buffers, Type::Bool)]);
        let mut machine = machine(&program);
        let mut bits = MaskBits::default();
        for _ in 0..3 {
            let (q, kv) = tile(&mut r);
            machine.set_tile(q.clone(), kv.clone());
            machine.mask_bits(None, &mut bits);
            let mut outside = false;
            for (i, q) in q.clone().enumerate() {
                for (j, kv) in kv.clone().enumerate() {
                    match program.eval(&at(q, kv, 0.0)) {
                        Ok(values) => assert_eq!(
                            ScalarValue::Bool(bits.get(i, j)),
                            values[0],
                            "case {case} at {q}, {kv}: {program:?}"
                        ),
                        Err(_) => outside = true,
                    }
                }
            }
            let found = machine.out_of_range().is_some();
            assert!(found || !outside, "case {case}: nobody noticed over {q:?} x {kv:?}");
            machine.out_of_range = None;
        }
    }
}

#[test]
fn random_scores_are_over_strips_what_they_are_at_points() {
    let seed = 52_000;
    println!("seed {seed}");
    let buffers = buffers();
    let same = |x: f32, y: f32| x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
    for case in 0..3000 {
        let mut r = Random::new(seed + case);
        let program = Program::build(&[random(&mut r, &buffers, Type::F32)]);
        let mut machine = machine(&program);
        let (q, kv) = tile(&mut r);
        let stride = 64;
        let score = |i: usize, j: usize| ((i * 37 + j * 11) % 23) as f32 * 0.5 - 4.0;
        let given: Vec<f32> =
            (0..q.len() * stride).map(|at| score(at / stride, at % stride)).collect();
        let mut tile = given.clone();
        machine.set_tile(q.clone(), kv.clone());
        let first = r.below(kv.len()) / LANES * LANES;
        let columns = first..first + 1 + r.below(kv.len() - first);
        let step = Machine::strip_rows(columns.len()).min(1 + r.below(9));
        for start in (0..q.len()).step_by(step) {
            let rows = start..q.len().min(start + step);
            let scores = Scores { data: &given[start * stride..], stride };
            machine.run(rows, columns.clone(), scores, None);
            machine.store(0, &mut tile[start * stride..], stride);
        }
        for (i, q) in q.clone().enumerate() {
            for (j, kv) in kv.clone().enumerate().take(columns.end).skip(columns.start) {
                if let Ok(values) = program.eval(&at(q, kv, score(i, j))) {
                    let ScalarValue::F32(want) = values[0] else { unreachable!() };
                    let got = tile[i * stride + j];
                    assert!(same(got, want), "case {case} at {q}, {kv}: {got}, not {want}");
                }
            }
        }
    }
}

#[test]
fn mask_bits_made_of_words_are_what_they_are_at_points() {
    let (q, kv) = (expr::q, expr::kv);
    let ids = |step: usize| (0..400).map(|i| (i / step) as i32).collect::<Vec<_>>();
    let (doc, other) = (Buffer::vector("doc", ids(37)), Buffer::vector("other", ids(5)));
    let same = || doc.at([q()]).eq(doc.at([kv()]));
    let causal = || q().ge(kv());
    let masks = [
        causal(),
        causal() & (q() - kv()).lt(70),
        causal() | kv().lt(130),
        causal() & same(),
        !same() ^ causal(),
        other.at([q()]).le(other.at([kv()])) & q().ge(90),
        same().ne(expr::h().gt(1)).eq(kv().lt(100) | (q() - kv()).eq(3)),
    ];
    for (case, mask) in masks.iter().enumerate() {
        let program = Program::build(&[mask.dynamic().clone()]);
        let compiled = TileProgram::compile(&program);
        assert!(compiled.0.planes.is_some(), "case {case} looks at every entry");
        let mut machine = compiled.machine(96, 256);
        machine.set_head(HEAD);
        let mut bits = MaskBits::default();
        for (rows, columns) in [(80..117, 3..203), (0..96, 64..320), (200..201, 130..195)] {
            machine.set_tile(rows.clone(), columns.clone());
            machine.mask_bits(None, &mut bits);
            let mut count = 0;
            for (i, q) in rows.enumerate() {
                for (j, kv) in columns.clone().enumerate() {
                    let want = program.eval(&at(q, kv, 0.0)).unwrap()[0];
                    let got = bits.get(i, j);
                    assert_eq!(ScalarValue::Bool(got), want, "case {case} at {q}, {kv}");
                    assert!(!got || bits.columns(i..i + 1).contains(&j));
                    count += u64::from(got);
                }
            }
            assert_eq!(bits.count(), count, "case {case}: nothing is true past the tile");
        }
    }
}

#[test]
fn a_score_that_something_is_done_to_once_is_changed_where_it_lies() {
    let (score, apart) = (expr::score, || (expr::q() - expr::kv()).abs().to_f32());
    let row = || expr::q().to_f32();
    let changed = [
        score() - apart() * 0.25,
        apart() * 0.25 - score(),
        row() - score(),
        score() * expr::kv().to_f32(),
        score() + 0.5,
    ];
    let evaluated = [score() * score(), (score() + row()) * 0.5, score() / apart()];
    for (case, expr) in changed.iter().chain(&evaluated).enumerate() {
        let program = Program::build(&[expr.dynamic().clone()]);
        let mut machine = machine(&program);
        assert_eq!(machine.program.0.on_score.is_some(), case < changed.len(), "case {case}");
        let stride = 48;
        let given = |i: usize, j: usize| ((i * 7 + j * 5) % 11) as f32 - 5.5;
        let mut scores: Vec<f32> =
            (0..9 * stride).map(|at| given(at / stride, at % stride)).collect();
        machine.set_tile(20..29, 3..40);
        machine.change(0, [0..9, 16..37], &mut scores, stride, None);
        for (i, j) in (0..9 * stride).map(|at| (at / stride, at % stride)) {
            let want = if (16..37).contains(&j) {
                let point = at(20 + i as i32, 3 + j as i32, given(i, j));
                let ScalarValue::F32(want) = program.eval(&point).unwrap()[0] else { panic!() };
                want
            } else if (37..48).contains(&j) {
                continue;
            } else {
                given(i, j)
            };
            assert_eq!(scores[i * stride + j], want, "case {case}: {i}, {j}");
        }
    }
}

fn places(expr: impl Into<DynExpr>) -> (Place, usize) {
    let program = Program::build(&[expr.into()]);
    let compiled = TileProgram::compile(&program);
    (compiled.0.places[program.roots()[0].index()], compiled.0.full.len())
}

#[test]
fn what_depends_on_a_distance_is_evaluated_once_a_diagonal() {
    let (q, kv) = (expr::q, expr::kv);
    let is_diagonal =
        |(place, full): (Place, usize)| matches!(place, Place::Diagonal(_)) && full == 0;
    assert!(is_diagonal(places(q().ge(kv()).dynamic().clone())));
    assert!(is_diagonal(places(
        (q() + (expr::kv_len() - expr::q_len())).ge(kv()).dynamic().clone()
    )));
    assert!(is_diagonal(places((q().ge(kv()) & (q() - kv()).lt(7)).dynamic().clone())));
    assert!(is_diagonal(places(((q() * 3 - kv() * 3).abs() % 4).eq(0).dynamic().clone())));
    let bias = Buffer::vector("bias", vec![0.5; 17]);
    let biased = bias.at([(kv() - q()).max(-8).min(8) + 8]);
    assert!(is_diagonal(places(biased.dynamic().clone())));
    assert_eq!(places((expr::score() + biased).dynamic().clone()).1, 1);
    // Not of the distance alone: another factor, and a sum that may wrap.
    assert!(!is_diagonal(places((q() * 2).ge(kv()).dynamic().clone())));
    assert!(!is_diagonal(places((q() + i32::MAX).ge(kv()).dynamic().clone())));
}

#[test]
fn a_comparison_that_wraps_inside_a_tile_wraps_at_its_points() {
    let program = Program::build(&[(expr::q() + (i32::MAX - 3)).ge(expr::kv()).dynamic().clone()]);
    let mut machine = machine(&program);
    let mut bits = MaskBits::default();
    machine.set_tile(0..8, 0..8);
    machine.mask_bits(None, &mut bits);
    for (q, kv) in (0..64).map(|i| (i / 8, i % 8)) {
        let want = program.eval(&at(q, kv, 0.0)).unwrap()[0];
        assert_eq!(ScalarValue::Bool(bits.get(q as usize, kv as usize)), want);
    }
}

#[test]
fn a_tile_may_end_at_the_largest_position() {
    let program = Program::build(&[(expr::q() % 7).ge(expr::kv() % 5).dynamic().clone()]);
    let mut machine = machine(&program);
    let mut bits = MaskBits::default();
    let [first, end] = [i32::MAX - 5, i32::MAX];
    machine.set_tile(first..end, first..end);
    machine.mask_bits(None, &mut bits);
    for (q, kv) in (0..25).map(|i| (i / 5, i % 5)) {
        let want = program.eval(&at(first + q, first + kv, 0.0)).unwrap()[0];
        assert_eq!(ScalarValue::Bool(bits.get(q as usize, kv as usize)), want);
    }
}

#[test]
fn bits_know_between_which_columns_a_row_is_true() {
    let band = (expr::q() - expr::kv()).abs().le(3) | expr::kv().eq(30);
    let program = Program::build(&[band.dynamic().clone()]);
    let mut machine = machine(&program);
    let mut bits = MaskBits::default();
    machine.set_tile(10..14, 0..40);
    machine.mask_bits(None, &mut bits);
    assert_eq!((bits.rows(), bits.columns(0..1), bits.columns(1..3)), (4, 7..31, 8..31));
    assert_eq!((bits.rows_within(8..9), bits.rows_within(0..7)), (0..2, 0..0));
    let mut row = [1.0; 48];
    bits.fill_false(0, 0, &mut row, -1.0);
    let seen = |c: usize| (7..=13).contains(&c) || c == 30;
    assert!((0..48).all(|c| (row[c] == 1.0) == seen(c)));
    let mut part = [1.0; 16];
    bits.fill_false(0, 16, &mut part, -1.0);
    assert!((0..16).all(|c| (part[c] == 1.0) == seen(16 + c)));
    machine.set_tile(20..22, 0..10);
    machine.mask_bits(None, &mut bits);
    assert_eq!(bits.columns(0..2), 0..0);
}

#[test]
fn bits_of_distances_are_those_of_their_entries() {
    let ago = || expr::q() - expr::kv();
    let masks = [
        ago().ge(0),
        ago().ge(0) & ago().lt(70),
        ago().abs().gt(5) & ago().lt(150),
        ago().ge(1000),
        (ago() % 3).eq(0),
    ];
    for mask in masks {
        let program = Program::build(&[mask.dynamic().clone()]);
        let mut machine = TileProgram::compile(&program).machine(100, 200);
        machine.set_head(HEAD);
        let mut bits = MaskBits::default();
        for (q, kv) in [(150..210, 90..249), (60..61, 0..64), (7..70, 3..131), (0..16, 0..1)] {
            machine.set_tile(q.clone(), kv.clone());
            machine.mask_bits(None, &mut bits);
            assert_eq!(bits.rows(), q.len());
            for (r, q) in q.enumerate() {
                let want =
                    |kv| program.eval(&at(q, kv, 0.0)).unwrap()[0] == ScalarValue::Bool(true);
                let seen: Vec<usize> =
                    (0..kv.len()).filter(|c| want(kv.start + *c as i32)).collect();
                let ends = seen.first().zip(seen.last()).map_or(0..0, |(a, b)| *a..b + 1);
                assert_eq!(bits.columns(r..r + 1), ends);
                assert!((0..kv.len()).all(|c| bits.get(r, c) == seen.contains(&c)));
                let mut row = vec![1.0; padded(kv.len())];
                bits.fill_false(r, 0, &mut row, 0.0);
                let left = row.iter().enumerate().filter(|(_, x)| **x == 1.0).map(|(c, _)| c);
                assert!(left.eq(seen));
            }
        }
    }
}

#[test]
fn an_index_out_of_range_counts_where_the_entry_does() {
    let table = Buffer::vector("table", vec![1.0; 8]);
    let score = expr::score() + table.at([expr::kv() - expr::q()]);
    let program = Program::build(&[score.dynamic().clone()]);
    let mut machine = machine(&program);
    let mut live = MaskBits::default();
    let causal = Program::build(&[expr::q().le(expr::kv()).dynamic().clone()]);
    let mut mask = self::machine(&causal);
    mask.set_tile(0..8, 0..8);
    mask.mask_bits(None, &mut live);
    let data = vec![0.0; 8 * LANES];
    let scores = Scores { data: &data, stride: LANES };
    machine.set_tile(0..8, 0..8);
    machine.run(0..8, 0..8, scores, Some(&live));
    assert_eq!(machine.out_of_range(), None);
    machine.run(0..8, 0..8, scores, None);
    let wrong = machine.out_of_range().expect("noted");
    assert!(matches!(wrong, OutOfRange::Index { index: ..0, len: 8, .. }), "{wrong}");
}

#[test]
fn what_a_buffer_gets_is_summed_over_the_entries_that_read_it() {
    // However often the indices change: never, with queries, keys, distances, with each entry in
    // rows of the buffer, and in no order.
    let (q, kv) = (expr::q, expr::kv);
    let one = |x: Expr<i32>| vec![x.max(0).min(30)];
    let indices = [
        one(expr::h()),
        one(q()),
        one(kv()),
        one(kv() - q() + 15),
        vec![q(), kv()],
        one((q() * kv()) % 31),
    ];
    for (case, index) in indices.into_iter().enumerate() {
        let from_end = case % 2 == 1;
        // The same element, counted from the end where that is another number.
        let index: Vec<Expr<i32>> = match from_end && index.len() == 1 {
            true => index.into_iter().map(|i| i - 31).collect(),
            false => index,
        };
        let shape = if index.len() == 2 { vec![24, 24] } else { vec![31] };
        let value = (q() - kv()).to_f32() * 0.5;
        let mut roots = vec![value.dynamic().clone()];
        roots.extend(index.iter().map(|x| x.dynamic().clone()));
        let program = Program::build(&roots);
        let mut machine = machine(&program);
        let (rows, columns, stride) = (5, 21, 32);
        machine.set_tile(3..3 + rows as i32, 2..2 + columns as i32);
        let weight = |r: usize, c: usize| ((r * 7 + c * 5) % 9) as f32 - 4.0;
        let mut d = vec![0.0; rows * stride];
        for (r, c) in (0..rows * columns).map(|i| (i / columns, i % columns)) {
            d[r * stride + c] = weight(r, c);
        }
        machine.run(0..rows, 0..columns, Scores::default(), None);
        let index: Vec<usize> = (1..roots.len()).collect();
        let mut got = vec![0.0; shape.iter().product()];
        let read = Read { value: 0, index: &index, from_end, shape: &shape };
        machine.add_read(read, &d, stride, &mut got);
        let mut want = vec![0.0; got.len()];
        for (r, c) in (0..rows * columns).map(|i| (i / columns, i % columns)) {
            let values = program.eval(&at(3 + r as i32, 2 + c as i32, 0.0)).unwrap();
            let ScalarValue::F32(value) = values[0] else { unreachable!() };
            let place = values[1..]
                .iter()
                .zip(&shape)
                .fold(0, |place, (i, n)| place * n + eval::clamped(eval::int(*i), *n, from_end));
            want[place] += weight(r, c) * value;
        }
        assert_eq!(got, want, "case {case}");
    }
}
