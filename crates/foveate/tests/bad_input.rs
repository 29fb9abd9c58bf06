//! What is wrong with the input is said in one line: what, where, what to do.

use foveate::mods::expr::{self, h, kv, q, score};
use foveate::{
    AnyBuffer, Attention, Buffer, BufferData, DType, Data, Device, ErrorKind, Layout, MaskMod,
    Problem, ScaleBlocks, Scales, ScoreMod, Tensor, TensorMut,
};

fn tensor(dtype: DType, shape: [usize; 4]) -> Tensor {
    Tensor::from_fn(dtype, shape, |[b, h, s, d]| {
        ((b * 31 + h * 17 + s * 7 + d * 3) % 13) as f64 / 13.0 - 0.4
    })
}

/// What `Problem::of` says to operands of these shapes.
fn refusal(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> String {
    let [q, k, v] = [q, k, v].map(|shape| tensor(DType::F32, shape));
    Problem::of(&q, &k, &v).expect_err("the operands do not fit").to_string()
}

fn score_mod(expr: foveate::Expr<f32>) -> ScoreMod {
    ScoreMod::new(expr.dynamic()).expect("a score")
}

fn mask_mod(expr: foveate::Expr<bool>) -> MaskMod {
    MaskMod::new(expr.dynamic()).expect("a mask")
}

#[test]
fn operands_that_do_not_fit_are_refused_with_what_they_have_and_need() {
    assert_eq!(
        refusal([1, 2, 5, 8], [1, 2, 7, 6], [1, 2, 7, 8]),
        "k has head dim 6 but q has 8; they must be equal"
    );
    assert_eq!(
        refusal([1, 2, 5, 8], [1, 2, 7, 8], [1, 2, 6, 8]),
        "v has batch 1, heads 2, length 6 but k has 1, 2, 7; they must be equal"
    );
    assert_eq!(
        refusal([1, 6, 5, 8], [1, 4, 7, 8], [1, 4, 7, 8]),
        "6 query heads cannot share 4 key/value heads; the first must be a multiple of the second"
    );
    assert_eq!(
        refusal([3, 2, 5, 8], [2, 2, 7, 8], [2, 2, 7, 8]),
        "k and v have batch 2; q needs 3, or 1 to share"
    );
    assert_eq!(
        refusal([1, 2, 5, 0], [1, 2, 7, 0], [1, 2, 7, 8]),
        "head dim is 0: q has 0, v has 8; both must be given"
    );
}

#[test]
fn a_gpu_that_is_not_there_declines_with_what_would_be_needed() {
    let q = tensor(DType::F32, [1, 2, 5, 8]);
    let problem = Problem::of(&q, &q, &q).unwrap();
    let e = Attention::new().plan(&problem, &Device::cuda(4096)).unwrap_err();
    let [declined] = e.declined() else { panic!("{e}") };
    assert_eq!(declined.backend, "cuda");
    let said = &declined.reason;
    assert!(said.contains("install an NVIDIA driver") || said.contains("no GPU 4096"), "{said}");
    assert!(e.to_string().starts_with("no backend of the GPU 4096 takes this problem"), "{e}");
}

#[test]
fn operands_of_different_dtypes_are_refused() {
    let q = tensor(DType::BF16, [1, 2, 5, 8]);
    let k = tensor(DType::F32, [1, 2, 5, 8]);
    let e = Problem::of(&q, &k, &k).unwrap_err();
    assert_eq!(e.to_string(), "q is bf16, k is f32, v is f32; they must have one dtype");
    assert!(matches!(e.kind(), ErrorKind::Problem(_)));
}

#[test]
fn offsets_that_decrease_or_end_past_the_rows_are_refused() {
    let problem = || Problem::shaped(DType::F32, [1, 2, 9, 8], [1, 2, 9, 8], [1, 2, 9, 8]).unwrap();
    let say = |q: &[i32], k: &[i32]| problem().varlen(q, k).unwrap_err().to_string();
    assert_eq!(
        say(&[0, 5, 3], &[0, 5, 9]),
        "cu_seqlens_q: offset 2 is 3, below offset 1, which is 5; offsets never decrease"
    );
    assert_eq!(
        say(&[0, 5, 9], &[0, 5, 10]),
        "cu_seqlens_k: the last offset is 10, past the 9 packed rows"
    );
    assert_eq!(
        say(&[0, 5, 9], &[0, 9]),
        "cu_seqlens_k: 2 offsets, but cu_seqlens_q has 3; both need one more than there are \
         sequences"
    );
    assert_eq!(
        say(&[], &[0]),
        "cu_seqlens_q: is empty; it needs one more offset than there are sequences"
    );
    let batched = Problem::shaped(DType::F32, [2, 2, 9, 8], [2, 2, 9, 8], [2, 2, 9, 8]).unwrap();
    assert_eq!(
        batched.varlen(&[0, 9], &[0, 9]).unwrap_err().to_string(),
        "varlen: packed operands have batch 1, not 2 (q) and 2 (k)"
    );
}

#[test]
fn a_sink_needs_a_logit_for_each_query_head() {
    let problem = Problem::shaped(DType::F32, [1, 4, 3, 8], [1, 2, 3, 8], [1, 2, 3, 8]).unwrap();
    let e = problem.sink(&[0.0, 1.0]).unwrap_err();
    assert_eq!(e.to_string(), "sink: 2 logits for 4 query heads; one each");
}

#[test]
fn a_scale_or_a_dropout_outside_its_range_is_refused() {
    let problem = Problem::shaped(DType::F32, [1, 1, 3, 8], [1, 1, 3, 8], [1, 1, 3, 8]).unwrap();
    let say = |a: Attention| a.plan(&problem, &Device::cpu()).unwrap_err().to_string();
    assert_eq!(say(Attention::new().scale(f32::NAN)), "the scale is NaN; it must be finite");
    assert_eq!(
        say(Attention::new().dropout(1.0, 7)),
        "dropout p is 1; it must be at least 0, below 1"
    );
}

#[test]
fn a_refusal_lists_every_candidate_with_its_reason() {
    let problem = Problem::shaped(DType::F64, [1, 1, 3, 8], [1, 1, 3, 8], [1, 1, 3, 8]).unwrap();
    let e = Attention::new().plan(&problem, &Device::cpu()).unwrap_err();
    assert_eq!(
        e.to_string(),
        "no backend of the CPU takes this problem: cpu declined: the CPU backend takes f32, f16 \
         or bf16 operands, not f64"
    );
    assert_eq!(e.declined().len(), 1);
    assert_eq!(e.declined()[0].backend, "cpu");
}

#[test]
fn a_captured_buffer_too_short_for_its_index_is_named_with_index_and_length() {
    let t = tensor(DType::F32, [1, 3, 5, 8]);
    let bias = Buffer::vector("slope", vec![0.5f32, 0.25]);
    let program = Attention::new().score(score_mod(score() + bias.at([h()])));
    let plan = program.plan(&Problem::of(&t, &t, &t).unwrap(), &Device::cpu()).unwrap();
    let e = plan.forward(&t, &t, &t).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::OutOfRange { .. }), "{e:?}");
    assert_eq!(
        e.to_string(),
        "captured buffer `slope` was read at index 2 of axis 0, which has length 2; make the \
         buffer as long as the positions that read it"
    );
}

#[test]
fn a_learned_buffer_in_a_mask_is_refused_when_the_program_is_planned() {
    let gate = Buffer::learned("gate", &[5], vec![1.0; 5]).unwrap();
    let program = Attention::new().mask(mask_mod(gate.at([kv()]).gt(0.0)));
    let problem = Problem::shaped(DType::F32, [1, 1, 5, 8], [1, 1, 5, 8], [1, 1, 5, 8]).unwrap();
    assert_eq!(
        program.plan(&problem, &Device::cpu()).unwrap_err().to_string(),
        "mask: it captures `gate`, which is to be learned, but a mask has no gradient; capture a \
         copy that is not learned, or move it into the score"
    );
}

#[test]
fn a_score_without_a_derivative_plans_for_the_forward_pass_only() {
    let program = Attention::new().score(score_mod(score().floor()));
    let problem = Problem::shaped(DType::F32, [1, 1, 5, 8], [1, 1, 5, 8], [1, 1, 5, 8]).unwrap();
    let e = program.plan(&problem, &Device::cpu()).unwrap_err();
    assert_eq!(e.to_string(), "floor has no derivative, but a gradient has to pass through it");
    assert!(program.plan(&problem.forward_only(), &Device::cpu()).is_ok());
}

#[test]
fn a_destination_that_would_be_written_twice_is_refused() {
    let mut data = Data::filled(DType::F32, 64, f64::NAN);
    let layout = Layout::strided([1, 2, 4, 8], [64, 0, 8, 1], 0);
    assert_eq!(
        TensorMut::new(&mut data, layout).unwrap_err().to_string(),
        "a destination of shape [1, 2, 4, 8] with strides [64, 0, 8, 1] would write some elements \
         twice; give every axis longer than 1 a stride of its own"
    );
    let layout = Layout::strided([1, 2, 5, 8], [64, 32, 8, 1], 0);
    assert_eq!(
        TensorMut::new(&mut data, layout).unwrap_err().to_string(),
        "shape [1, 2, 5, 8] with strides [64, 32, 8, 1] from element 0 reaches past the 64 \
         elements of the storage"
    );
}

#[test]
fn rebinding_the_wrong_type_rank_or_name_is_refused_and_the_plan_still_runs() {
    let t = tensor(DType::F32, [1, 1, 5, 8]);
    let doc = Buffer::vector("doc", vec![0, 0, 1, 1, 1]);
    let window = expr::scalar("window", 3);
    let mask = mask_mod(doc.at([q()]).eq(doc.at([kv()])) & (q() - kv()).lt(window));
    let problem = Problem::of(&t, &t, &t).unwrap();
    let plan = Attention::new().mask(mask).plan(&problem, &Device::cpu()).unwrap();
    let before = plan.forward(&t, &t, &t).unwrap();

    let say = |name: &str, shape: &[usize], data: BufferData| {
        let buffer = AnyBuffer::new(name, shape, data, false).unwrap();
        plan.rebind(&buffer).unwrap_err().to_string()
    };
    assert_eq!(
        say("doc", &[5], BufferData::F32(vec![0.0; 5])),
        "`doc` cannot be bound: the slot holds i32 with 1 axis, not f32 with 1 axis"
    );
    assert_eq!(
        say("doc", &[1, 5], BufferData::I32(vec![0; 5])),
        "`doc` cannot be bound: the slot holds i32 with 1 axis, not i32 with 2 axes"
    );
    assert_eq!(
        say("documents", &[5], BufferData::I32(vec![0; 5])),
        "no mask or score of the plan has a captured buffer called `documents`"
    );
    assert_eq!(
        plan.set_scalar("window", 3.0).unwrap_err().to_string(),
        "`window` cannot be bound: the scalar is i32, not f32"
    );
    assert_eq!(
        plan.set_scalar("wnidow", 3).unwrap_err().to_string(),
        "no mask or score of the plan has a run-time scalar called `wnidow`"
    );
    assert_eq!(plan.forward(&t, &t, &t).unwrap().out, before.out);
}

#[test]
fn operands_of_another_class_than_planned_are_refused() {
    let t = tensor(DType::F32, [1, 2, 5, 8]);
    let plan = Attention::new().plan(&Problem::of(&t, &t, &t).unwrap(), &Device::cpu()).unwrap();
    let other = tensor(DType::F32, [1, 2, 5, 16]);
    let e = plan.forward(&other, &other, &other).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Mismatch { .. }));
    assert_eq!(
        e.to_string(),
        "the plan is for 2/2 heads of dim 8/8 in f32, the operands have 2/2 heads of dim 16/16 in \
         f32; make a plan for them"
    );
    let forward = plan.forward(&t, &t, &t).unwrap();
    let short = tensor(DType::F32, [1, 2, 4, 8]);
    let e = plan.backward(&t, &t, &t, &forward, &short).unwrap_err();
    assert_eq!(e.to_string(), "d_out has shape [1, 2, 4, 8]; it must be [1, 2, 5, 8]");
}

#[test]
fn operands_of_eight_bits_are_refused_where_no_kernel_takes_them_and_scales_where_they_do_not_fit()
{
    let shape = |heads| [2, heads, 9, 16];
    let problem = |dtype| Problem::shaped(dtype, shape(4), shape(2), shape(2)).unwrap();
    let narrow = problem(DType::F8E4M3);
    assert!(narrow.is_forward_only(), "they have no gradients");
    let refused = Attention::new().plan(&narrow, &Device::cpu()).unwrap_err().to_string();
    assert!(
        refused.contains("the CPU backend takes f32, f16 or bf16 operands, not f8e4m3"),
        "{refused}"
    );
    let scaled = narrow.clone().scales(Scales::of_heads(&[0.5; 8], &[1.0; 4], &[2.0; 4])).unwrap();
    assert_eq!(scaled.get_scales().unwrap().v, [2.0; 4]);
    let few = Scales::of_heads(&[0.5; 4], &[1.0; 4], &[2.0; 4]);
    let few = narrow.clone().scales(few).unwrap_err().to_string();
    let said = "4 scales of q for a batch of 2, 4 heads and 1 block; one each";
    assert!(few.contains(said), "{few}");
    let eight = Scales::of_heads(&[0.5; 8], &[1.0; 4], &[2.0; 4]);
    let short = Scales { blocks: ScaleBlocks { q: 32, kv: 64 }, ..eight };
    let short = narrow.scales(short).unwrap_err().to_string();
    assert!(short.contains("scales are of blocks of 32 queries"), "{short}");
    let wide = problem(DType::BF16).scales(eight).unwrap_err();
    assert!(wide.to_string().contains("scales are for f8e4m3 operands"), "{wide}");
}
