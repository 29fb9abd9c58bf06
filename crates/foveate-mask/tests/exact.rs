//! Block masks against brute force.

use std::ops::ControlFlow::{Break, Continue};

use foveate_mask::{BlockMask, Kind, Progress, Tile, sees_nothing};
use foveate_mods::{Buffer, Expr, Head, MaskMod, Point, ScalarValue, expr};
use proptest::prelude::*;

/// A random i32 expression over positions.
fn number() -> impl Strategy<Value = Expr<i32>> {
    let leaf = prop_oneof![
        Just(expr::q()),
        Just(expr::kv()),
        Just(expr::kv_len() - expr::q_len()),
        (-3..12i32).prop_map(Expr::from),
        (0..9i32).prop_map(|v| expr::scalar("n", v)),
        prop::collection::vec(0..4i32, 40).prop_map(|mut ids| {
            ids.sort_unstable();
            Buffer::vector("doc", ids).at([expr::kv()])
        }),
        prop::collection::vec(-5..5i32, 40).prop_map(|v| Buffer::vector("v", v).at([expr::q()])),
    ];
    leaf.prop_recursive(3, 12, 2, |inner| {
        (inner.clone(), inner, 0..7u8).prop_map(|(x, y, op)| match op {
            0 => x + y,
            1 => x - y,
            2 => x * y,
            3 => x / y,
            4 => x % y,
            5 => x.min(y),
            _ => x.max(y).abs(),
        })
    })
}

/// A random mask.
fn mask() -> impl Strategy<Value = MaskMod> {
    let leaf = (number(), number(), 0..4u8).prop_map(|(x, y, op)| match op {
        0 => x.ge(y),
        1 => x.lt(y),
        2 => x.eq(y),
        _ => (x.to_f32() * 0.3).tanh().lt(y.to_f32() * 0.2),
    });
    let tree = leaf.prop_recursive(3, 8, 2, |inner| {
        (inner.clone(), inner, 0..5u8).prop_map(|(x, y, op)| match op {
            0 => x & y,
            1 => x | y,
            2 => x ^ y,
            3 => !x,
            _ => x.select(y, true),
        })
    });
    tree.prop_map(|e| MaskMod::new(e.dynamic()).expect("a bool without the score"))
}

fn dense(mask: &MaskMod, q_len: usize, kv_len: usize) -> Vec<Vec<bool>> {
    let at = |q: usize, kv: usize| {
        let (q_len, kv_len) = (q_len as i32, kv_len as i32);
        let point = Point { q: q as i32, kv: kv as i32, q_len, kv_len, ..Default::default() };
        mask.program().eval(&point).expect("in range")[0] == ScalarValue::Bool(true)
    };
    (0..q_len).map(|q| (0..kv_len).map(|kv| at(q, kv)).collect()).collect()
}

fn kind(dense: &[Vec<bool>], tile: Tile, row: usize, column: usize) -> Option<Kind> {
    let rows = dense.iter().skip(row * tile.q as usize).take(tile.q as usize);
    let points: Vec<bool> = rows
        .flat_map(|r| r.iter().skip(column * tile.kv as usize).take(tile.kv as usize))
        .copied()
        .collect();
    match (points.iter().all(|&x| x), points.iter().any(|&x| x)) {
        (true, _) => Some(Kind::Full),
        (_, true) => Some(Kind::Partial),
        _ => None,
    }
}

fn build(mask: &MaskMod, q_len: usize, kv_len: usize, tile: Tile) -> BlockMask {
    let head = Head { q_len: q_len as i32, kv_len: kv_len as i32, ..Default::default() };
    BlockMask::build(mask, head, q_len, kv_len, tile)
}

fn check_runs(built: &BlockMask) {
    for row in 0..built.rows() {
        for pair in built.row(row).windows(2) {
            assert!(pair[0].tiles().end <= pair[1].first, "runs are ordered");
            let touching = pair[0].tiles().end == pair[1].first;
            assert!(!touching || pair[0].kind != pair[1].kind, "runs are as long as can be");
        }
        assert!(built.row(row).iter().all(|r| r.count > 0), "no run is empty");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..Default::default() })]

    #[test]
    fn every_tile_is_what_its_points_are(
        mask in mask(),
        q_len in 0..40usize,
        kv_len in 0..40usize,
        q in 1..9u32,
        kv in 1..9u32,
    ) {
        let tile = Tile { q, kv };
        let dense = dense(&mask, q_len, kv_len);
        let built = build(&mask, q_len, kv_len, tile);
        check_runs(&built);
        let turned = built.transpose();
        check_runs(&turned);
        for row in 0..built.rows() {
            for column in 0..built.columns() {
                let want = kind(&dense, tile, row, column);
                prop_assert_eq!(built.kind(row, column as u32), want);
                prop_assert_eq!(turned.kind(column, row as u32), want);
            }
        }
        let live = dense.iter().flatten().filter(|&&x| x).count() as u64;
        prop_assert_eq!(built.stats().live_entries, live);
        let points = |row: &Vec<bool>| row.iter().filter(|&&x| x).count() as u64;
        let by_row: Vec<u64> =
            dense.chunks(q as usize).map(|rows| rows.iter().map(points).sum()).collect();
        prop_assert_eq!(built.live_by_row(), by_row);
        prop_assert_eq!(turned.live_by_row().iter().sum::<u64>(), live);
        prop_assert_eq!(&turned.transpose(), &built);
    }

    #[test]
    fn a_slice_has_the_tiles_of_the_whole(
        mask in mask(),
        len in 1..40usize,
        tile in 1..9u32,
        cut in 0..20usize,
    ) {
        let built = build(&mask, len, len, Tile { q: tile, kv: tile });
        let from = cut.min(built.rows());
        let rows = built.slice_rows(from..built.rows()).unwrap();
        let columns = built.slice_columns(from..built.columns()).unwrap();
        for row in 0..built.rows() {
            for column in 0..built.columns() {
                let want = built.kind(row, column as u32);
                if row >= from {
                    prop_assert_eq!(rows.kind(row - from, column as u32), want);
                }
                if column >= from {
                    prop_assert_eq!(columns.kind(row, (column - from) as u32), want);
                }
            }
        }
        let tile_entries = rows.live_tile_entries();
        prop_assert_eq!(rows.stats().live_entries, tile_entries);
        prop_assert_eq!(rows.q_len() + from * tile as usize, len.max(from * tile as usize));
    }
}

#[test]
fn a_million_positions_take_a_few_runs_a_row_and_little_time() {
    let len = 1 << 20;
    let (q, kv) = (expr::q, expr::kv);
    let documents: Vec<i32> = (0..len).map(|i| i / 10_486).collect();
    let doc = Buffer::vector("doc", documents);
    let masks = [
        ("causal", q().ge(kv())),
        ("window", q().ge(kv()) & (q() - kv()).lt(4096)),
        ("prefix", q().ge(kv()) | kv().lt(1000)),
        ("documents", doc.at([q()]).eq(doc.at([kv()]))),
    ];
    for (name, expr) in masks {
        let mask = MaskMod::new(expr.dynamic()).unwrap();
        let began = std::time::Instant::now();
        let built = build(&mask, len as usize, len as usize, Tile { q: 128, kv: 128 });
        let (spent, stats) = (began.elapsed(), built.stats());
        // A second is promised of an optimised build on a free core; work that follows the tiles
        // and not the runs would take minutes.
        assert!(spent.as_secs() < 8, "{name} took {spent:?}");
        assert!(stats.bytes < 1 << 20, "{name} holds {} B", stats.bytes);
        assert!(stats.runs <= 4 * built.rows() as u64, "{name}: {} runs", stats.runs);
        assert_eq!(built.transpose().stats().full, stats.full, "{name}");
    }
}

#[test]
fn the_names_of_the_axes_stand_clear_of_the_frame_whatever_its_sides() {
    let causal = MaskMod::new(expr::q().ge(expr::kv()).dynamic()).unwrap();
    for [q_len, kv_len] in [[300, 300], [1, 100_000], [100_000, 1]] {
        let svg = build(&causal, q_len, kv_len, Tile { q: 100, kv: 100 }).to_svg("causal");
        let number = |after: &str| -> f64 {
            let (_, rest) = svg.split_once(after).expect("it is drawn");
            let end = rest.find(|c: char| !"0123456789.".contains(c)).expect("it ends");
            rest[..end].parse().expect("a number")
        };
        let [left, top] = [number("<g transform=\"translate("), 64.0];
        assert!(svg.contains(&format!("<g transform=\"translate({left} {top})\"")), "{svg}");
        // A letter reaches 13 from its foot, which is the right side of a turned one.
        let turned = number("<text transform=\"translate(");
        assert!(turned >= 0.0 && turned + 13.0 + 6.0 <= left, "{turned} {left}");
        let (before, _) = svg.split_once(">keys 0..").expect("it is drawn");
        let (_, foot) = before.rsplit_once("y=\"").expect("it has a place");
        let foot: f64 = foot.split('"').next().unwrap().parse().unwrap();
        // Letters hang 4 below their foot.
        assert!(foot + 4.0 + 6.0 <= top, "{foot}");
    }
}

#[test]
fn building_and_counting_say_how_far_they_are_and_can_be_broken_off() {
    let even = ((expr::q() + expr::kv()) % 2).eq(0);
    let even = MaskMod::new(even.dynamic()).unwrap();
    let tile = Tile { q: 1, kv: 1 };
    let mut heard = Vec::new();
    let head = Head { q_len: 500, kv_len: 500, ..Head::default() };
    let built = BlockMask::build_watched(&even, head, 500, 500, tile, &mut |progress| {
        heard.push(progress);
        Continue(())
    });
    let built = built.expect("nobody broke it off");
    assert_eq!(built.stats().runs, 500 * 250);
    assert!(heard[0].done == 0 && heard.iter().all(|p| p.all == 250_000));
    assert!(heard.windows(2).all(|w| w[0].done < w[1].done), "{heard:?}");
    let last = heard.last().expect("it was told");
    assert!(last.bytes > built.bytes(), "what is kept is part of what is taken: {last:?}");
    assert!(heard.iter().all(|p| p.base_bytes == heard[0].bytes), "{heard:?}");

    let stop = &mut |progress: Progress| match progress.share() > 0.3 {
        true => Break(()),
        false => Continue(()),
    };
    assert!(BlockMask::build_watched(&even, head, 500, 500, tile, stop).is_none());
    let wide = build(&even, 5000, 5000, Tile { q: 128, kv: 128 });
    assert!(wide.stats_watched(stop).is_none());
    assert_eq!(wide.stats().live_entries, 5000 * 5000 / 2);
}

#[test]
fn pictures_show_full_partial_and_empty_tiles() {
    let causal = MaskMod::new(expr::q().ge(expr::kv()).dynamic()).unwrap();
    let built = build(&causal, 300, 300, Tile { q: 100, kv: 100 });
    let picture = built.to_terminal(8, 8);
    let legend = "queries downwards, keys to the right: █ full, ▒ partial, · empty tiles";
    let cells = "each cell: 100 queries x 100 keys";
    assert_eq!(picture, format!("▒··\n█▒·\n██▒\n{legend}\n{cells}\n"));
    let svg = built.to_svg("causal & <more>");
    assert!(svg.contains("<title>causal &amp; &lt;more&gt;</title>"));
    // The background, one partial tile a row, one run of full tiles in two rows, the frame, and a
    // swatch with its outline for each kind of tile.
    assert_eq!(svg.matches("<rect").count(), 1 + 3 + 2 + 1 + 3 * 2);
    for said in [
        ">full<",
        ">partial<",
        ">empty<",
        ">9 tiles of 100 x 100: 33.3 % full, 33.3 % partial, 33.3 % empty<",
        ">45150 of 90000 pairs are live, 49.83 % are masked<",
    ] {
        assert!(svg.contains(said), "`{said}` is not in\n{svg}");
    }
    assert!(build(&causal, 0, 5, Tile { q: 2, kv: 2 }).to_terminal(4, 4).is_empty());
}

#[test]
fn a_mask_that_sees_nothing_is_told_from_one_that_sees_a_single_pair() {
    let blind = |mask: &MaskMod| {
        let built = build(mask, 300, 300, Tile { q: 64, kv: 32 });
        let (told, stats) = (built.sees_nothing(), built.stats());
        // What was counted, and what was not, say the same.
        assert_eq!(told, stats.live_entries == 0);
        assert_eq!([built.sees_nothing(), built.transpose().sees_nothing()], [told; 2]);
        assert_eq!(sees_nothing(mask, [2, 4, 2], [300, 300]), told);
        told
    };
    let mask = |e: Expr<bool>| MaskMod::new(e.dynamic()).unwrap();
    let at = |n: i32| expr::q().eq(n) & expr::kv().eq(n);
    assert!(blind(&mask(expr::kv().lt(0))));
    assert!(blind(&mask(at(300))));
    assert!(!blind(&mask(at(299))));
    assert!(!blind(&mask(expr::kv().ge(0))));
    assert!(!build(&mask(at(0)), 0, 300, Tile { q: 64, kv: 32 }).sees_nothing());
    // Heads and batch entries that differ are all looked at.
    let last = |b: i32, h: i32| mask(expr::b().eq(b) & expr::h().eq(h) & at(7));
    assert!(!sees_nothing(&last(1, 3), [2, 4, 2], [9, 9]));
    for outside in [last(2, 3), last(1, 4)] {
        assert!(sees_nothing(&outside, [2, 4, 2], [9, 9]));
    }
    assert!(!sees_nothing(&last(2, 3), [0, 4, 2], [9, 9]));
}
