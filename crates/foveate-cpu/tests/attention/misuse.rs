//! What is refused, rebinding, and what a plan says of itself.

use foveate_cpu::{CpuErrorKind, CpuOptions, CpuPlan};
use foveate_mods::expr::{b, h, kv, q, scalar, score};
use foveate_mods::{Buffer, ScalarValue};
use foveate_problem::Dims;
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
        case.plan(&case.inputs()).describe(None)
    };
    let full = of(None, [4, 2]);
    assert_eq!((full.tiles, full.full_tiles, full.partial_tiles), (192, 192, 0));
    assert_eq!(full.block_masks, 0);
    assert!(full.backward_bytes > full.forward_bytes && full.forward_bytes >= 3 * 2 * 64 * 32 * 4);
    let causal = of(mask(q().ge(kv())), [4, 2]);
    assert_eq!((causal.tiles, causal.full_tiles, causal.partial_tiles), (192, 72, 48));
    assert_eq!(causal.block_masks, 1);
    assert_eq!(of(mask((q() + h()).ge(kv())), [4, 2]).block_masks, 4);
    assert_eq!(of(mask((q() + h() + b()).ge(kv())), [4, 2]).block_masks, 12);
}
