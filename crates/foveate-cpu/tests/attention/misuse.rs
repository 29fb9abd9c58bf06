//! What is refused, rebinding, and what a plan says of itself.

use foveate_cpu::{CpuErrorKind, CpuOptions, CpuPlan};
use foveate_mods::expr::{b, h, kv, q, scalar, score};
use foveate_mods::{Buffer, ScalarValue};
use foveate_problem::{Arrangement, Dims};
use foveate_tensor::DType;

use crate::common::{Case, run};
use crate::oracle::{mask, score_mod};

#[test]
fn an_index_out_of_range_is_an_error_that_names_the_buffer() {
    let bias = Buffer::vector("bias", vec![0.5; 10]);
    let case = Case { score: score_mod(score() + bias.at([kv() - q()])), ..Case::default() };
    let inputs = case.inputs();
    let error = run(&case.plan(&inputs), &inputs, &case.spec()).unwrap_err();
    assert!(matches!(error.kind(), CpuErrorKind::OutOfRange { .. }));
    assert!(error.to_string().contains("`bias`"), "{error}");

    let hidden = Case { mask: mask(kv().ge(q()) & (kv() - q()).lt(10)), ..case };
    hidden.check("out of range where the mask is false only");
}

#[test]
fn a_read_that_simplification_leaves_out_is_no_read_and_every_other_one_is() {
    let doc = Buffer::vector("doc", vec![0; 3]);
    let read = || doc.at([q()]).eq(0);
    let left_out = read() & (kv().ge(q()) ^ kv().ge(q())) | kv().le(q());
    let case = Case { mask: mask(left_out), ..Case::default() };
    case.check("a read that is left out");
    let case = Case { mask: mask(read() & kv().lt(0) | kv().le(q())), ..case };
    let inputs = case.inputs();
    let error = run(&case.plan(&inputs), &inputs, &case.spec()).unwrap_err();
    assert!(matches!(error.kind(), CpuErrorKind::OutOfRange { .. }), "{error}");
}

#[test]
fn an_index_out_of_range_of_a_score_counts_at_visible_entries_only_hoisted_or_not() {
    // Read once a column, once a row, once a head; the mask hides what lies outside.
    let (few, one) = (Buffer::vector("few", vec![0.5f32; 30]), Buffer::vector("one", vec![0.5f32]));
    let by_head = Buffer::vector("by_head", vec![0.5f32]);
    let everything = [
        (score() + few.at([kv()]), kv().lt(30)),
        (score() + few.at([q()]), q().lt(30)),
        (score() + by_head.at([h()]), h().eq(0)),
        (score() + one.at([kv() - q()]), kv().eq(q())),
    ];
    for (i, (score, visible)) in everything.into_iter().enumerate() {
        for tile in [1, 16, 64] {
            let options =
                CpuOptions { tile_q: Some(tile), tile_kv: Some(16), ..CpuOptions::default() };
            let case = Case { options, score: score_mod(score.clone()), ..Case::default() };
            let hidden = Case { mask: mask(visible.clone()), ..case.clone() };
            hidden.check(&format!("score {i}, tiles of {tile}"));
            let inputs = case.inputs();
            let error = run(&case.plan(&inputs), &inputs, &case.spec()).unwrap_err();
            assert!(matches!(error.kind(), CpuErrorKind::OutOfRange { .. }), "score {i}: {error}");
        }
    }
}

#[test]
fn a_mask_that_reads_past_a_buffer_is_reported_whatever_the_tiles() {
    let short = Buffer::vector("short", vec![0; 50]);
    let never = Buffer::new("never", &[1], vec![false]).unwrap();
    for (i, m) in [
        // Clamped, the last element is that of the others: bounds would see a full plane.
        short.at([kv()]).eq(0),
        // Causal keeps the last keys from most rows, and the empty ones are skipped.
        q().ge(kv()) & short.at([kv()]).eq(0),
        // The last query and the last key alone, in an empty plane.
        never.at([(q() + kv() - 87).max(0)]),
    ]
    .into_iter()
    .enumerate()
    {
        for tile in [None, Some(1), Some(8), Some(16), Some(64)] {
            let options = CpuOptions {
                tile_q: tile,
                tile_kv: tile.map(|t| t.max(16)),
                ..CpuOptions::default()
            };
            let case = Case { options, mask: mask(m.clone()), ..Case::default() };
            let inputs = case.inputs();
            let error = run(&case.plan(&inputs), &inputs, &case.spec()).unwrap_err();
            assert!(
                matches!(error.kind(), CpuErrorKind::OutOfRange { .. }),
                "mask {i}, {tile:?}: {error}"
            );
        }
    }
}

#[test]
fn other_heads_dims_or_dtypes_than_planned_are_refused() {
    let case = Case::default();
    let plan = case.plan(&case.inputs());
    for other in [
        Case { heads: [4, 2], ..case.clone() },
        Case { dims: [16, 17], ..case.clone() },
        Case { dtype: DType::BF16, ..case.clone() },
    ] {
        let inputs = other.inputs();
        let error = run(&plan, &inputs, &other.spec()).unwrap_err().to_string();
        assert!(error.starts_with("the plan is for 2/2 heads of dim 16/16 in f32"), "{error}");
    }
}

#[test]
fn f64_operands_are_refused() {
    let case = Case { dtype: DType::F64, ..Case::default() };
    let inputs = case.inputs();
    let dims = Dims::of(&inputs.operands()).unwrap();
    let error = CpuPlan::new(&case.spec(), &dims, DType::F64, CpuOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), "the CPU backend takes f32, f16 or bf16 operands, not f64");
}

#[test]
fn a_score_without_a_derivative_runs_forward_only() {
    let case = Case { score: score_mod(score().floor()), ..Case::default() };
    let inputs = case.inputs();
    let plan = case.plan(&inputs);
    let why = plan.differentiable().unwrap_err();
    assert!(matches!(why.kind(), CpuErrorKind::Mod(_)));
    assert_eq!(run(&plan, &inputs, &case.spec()).unwrap_err(), why);
}

#[test]
fn rebinding_and_setting_scalars_equal_a_new_plan() {
    let with = |width: i32, shift: i32| {
        let doc = Buffer::vector("doc", (0..60).map(|i| (i + shift) / 13).collect());
        let same = doc.at([q()]).eq(doc.at([kv()]));
        let near = (q() - kv()).abs().lt(scalar("width", width));
        let case = Case { mask: mask(same & near), ..Case::default() };
        (case, doc)
    };
    let (first, _) = with(5, 0);
    let (second, doc) = with(9, 4);
    let inputs = first.inputs();
    let plan = first.plan(&inputs);
    let before = run(&plan, &inputs, &first.spec()).unwrap().bits();
    let changed = plan.rebind(doc.any()).unwrap().set_scalar("width", ScalarValue::I32(9)).unwrap();
    let after = run(&changed, &inputs, &second.spec()).unwrap().bits();
    assert!(after == run(&second.plan(&inputs), &inputs, &second.spec()).unwrap().bits());
    assert!(before != after);
    assert!(before == run(&plan, &inputs, &first.spec()).unwrap().bits());

    let unknown = Buffer::vector("docs", vec![0]);
    let error = plan.rebind(unknown.any()).unwrap_err().to_string();
    assert_eq!(error, "no mask or score of the plan has a captured buffer called `docs`");
    let error = plan.set_scalar("wide", ScalarValue::I32(1)).unwrap_err().to_string();
    assert_eq!(error, "no mask or score of the plan has a run-time scalar called `wide`");
}

#[test]
fn a_plan_describes_its_live_tiles_and_shares_block_masks() {
    let tiles = Case::default().options;
    let of = |m, heads| {
        let case =
            Case { batch: 3, heads, lens: [64, 64], options: tiles, mask: m, ..Case::default() };
        case.plan(&case.inputs()).describe(Arrangement::Dense)
    };
    let full = of(None, [4, 2]);
    assert_eq!(
        (full.tiling.tiles, full.tiling.full_tiles, full.tiling.partial_tiles),
        (192, 192, 0)
    );
    assert_eq!(full.tiling.block_masks, 0);
    assert!(full.backward_bytes > full.forward_bytes && full.forward_bytes >= 3 * 2 * 64 * 32 * 4);
    let causal = of(mask(q().ge(kv())), [4, 2]);
    assert_eq!(
        (causal.tiling.tiles, causal.tiling.full_tiles, causal.tiling.partial_tiles),
        (192, 72, 48)
    );
    assert_eq!(causal.tiling.block_masks, 1);
    assert_eq!(of(mask((q() + h()).ge(kv())), [4, 2]).tiling.block_masks, 4);
    assert_eq!(of(mask((q() + h() + b()).ge(kv())), [4, 2]).tiling.block_masks, 12);
}
