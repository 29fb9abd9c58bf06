use foveate_mods::{Buffer, ScoreMod, expr};
use foveate_tensor::{DType, Slice, SliceMut, Tensor, TensorMut, Varlen};

use crate::{
    BackwardArgs, CaptureGrad, Dims, ForwardArgs, Operands, ProblemError, ScaleBlocks, Scales, Spec,
};

fn tensor(shape: [usize; 4]) -> Tensor {
    Tensor::filled(DType::F32, shape, 0.5)
}

fn operands<'a>(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor) -> Operands<'a> {
    Operands::new(q.view(), k.view(), v.view())
}

fn dims_of(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<Dims, String> {
    let (q, k, v) = (tensor(q), tensor(k), tensor(v));
    Dims::of(&operands(&q, &k, &v)).map_err(|e| e.to_string())
}

#[test]
fn the_sizes_are_read_from_the_operands() {
    let dims = dims_of([3, 6, 5, 7], [1, 2, 11, 7], [1, 2, 11, 4]).expect("they fit");
    assert_eq!((dims.batch, dims.heads_q, dims.heads_kv), (3, 6, 2));
    assert_eq!((dims.len_q, dims.len_k, dims.dim, dims.dim_v), (5, 11, 7, 4));
    assert!(dims.shared_kv && !dims.packed);
    assert_eq!(dims.group(), 3);
    assert_eq!(dims.k_shape(), [1, 2, 11, 7]);
    assert_eq!(dims.out_shape(), [3, 6, 5, 4]);
    assert!(dims.sequences(None).iter().all(|s| s.k_batch == 0 && s.q_batch == s.b));
}

#[test]
fn empty_lengths_are_sizes_like_any_other() {
    let dims = dims_of([2, 1, 0, 3], [2, 1, 0, 3], [2, 1, 0, 3]).expect("lengths may be 0");
    assert_eq!((dims.len_q, dims.len_k), (0, 0));
}

#[test]
fn each_misfit_names_its_operand() {
    let q = [2, 4, 5, 8];
    for (k, v, says) in [
        ([2, 4, 5, 9], [2, 4, 5, 8], "k has head dim 9 but q has 8"),
        ([2, 4, 5, 8], [2, 4, 6, 8], "v has batch 2, heads 4, length 6"),
        ([2, 3, 5, 8], [2, 3, 5, 8], "4 query heads cannot share 3"),
        (
            [2, 0, 5, 8],
            [2, 0, 5, 8],
            "4 query heads and 0 key/value heads; there must be at least 1",
        ),
        ([3, 4, 5, 8], [3, 4, 5, 8], "k and v have batch 3; q needs 2"),
        ([2, 4, 5, 8], [2, 4, 5, 0], "head dim is 0"),
    ] {
        let error = dims_of(q, k, v).expect_err("they do not fit");
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn operands_of_two_dtypes_are_refused() {
    let (q, v) = (tensor([1, 1, 2, 3]), tensor([1, 1, 2, 3]));
    let k = Tensor::filled(DType::BF16, [1, 1, 2, 3], 0.5);
    let error = Dims::of(&operands(&q, &k, &v)).expect_err("dtypes differ").to_string();
    assert!(error.contains("q is f32, k is bf16, v is f32"), "{error}");
}

#[test]
fn packed_operands_are_a_list_of_sequences() {
    let (q, k) = (tensor([1, 2, 9, 3]), tensor([1, 2, 7, 3]));
    let (cu_q, cu_k) = ([0, 4, 4, 8], [0, 1, 5, 7]);
    let varlen = Varlen::new(&cu_q, &cu_k, 9, 7).expect("offsets fit");
    let operands = Operands { varlen: Some(varlen), ..operands(&q, &k, &k) };
    let dims = Dims::of(&operands).expect("they fit");
    assert_eq!((dims.batch, dims.q_axis(), dims.packed, dims.shared_kv), (3, 1, true, false));
    let lengths: Vec<_> =
        dims.sequences(Some(varlen)).iter().map(|s| (s.q_start, s.q_len, s.k_len)).collect();
    assert_eq!(lengths, [(0, 4, 1), (4, 0, 4), (4, 4, 2)]);
}

#[test]
fn offsets_made_for_longer_operands_are_refused() {
    let q = tensor([1, 2, 9, 3]);
    let varlen = Varlen::new(&[0, 12], &[0, 9], 12, 9).expect("offsets fit 12 rows");
    let error = Dims::of(&Operands { varlen: Some(varlen), ..operands(&q, &q, &q) });
    let error = error.expect_err("q has 9 rows").to_string();
    assert!(error.contains("cu_seqlens_q ends at 12, past the 9 packed rows"), "{error}");
}

#[test]
fn a_sink_needs_a_logit_for_each_query_head() {
    let q = tensor([1, 2, 3, 3]);
    let error = Dims::of(&Operands { sink: Some(Slice::F32(&[0.0; 3])), ..operands(&q, &q, &q) });
    assert!(error.expect_err("3 logits").to_string().contains("3 logits for 2 query heads"));
}

#[test]
fn a_forward_destination_of_the_wrong_shape_or_dtype_is_named() {
    let (q, k) = (tensor([2, 4, 5, 8]), tensor([2, 2, 5, 8]));
    let operands = operands(&q, &k, &k);
    let dims = Dims::of(&operands).expect("they fit");
    let check = |out: [usize; 4], lse: [usize; 3], lse_dtype| {
        let (mut out, mut lse) = (tensor(out), Tensor::filled(lse_dtype, lse, 0.0));
        let (out, lse) = (out.view_mut().expect("dense"), lse.view_mut().expect("dense"));
        let args = ForwardArgs { operands, out, lse, max_score: None };
        args.check(&dims).map_err(|e| e.to_string())
    };
    assert_eq!(check([2, 4, 5, 8], [2, 4, 5], DType::F32), Ok(()));
    let error = check([2, 4, 5, 7], [2, 4, 5], DType::F32).expect_err("Dv is 8");
    assert_eq!(error, "out has shape [2, 4, 5, 7]; it must be [2, 4, 5, 8]");
    let error = check([2, 4, 5, 8], [2, 2, 5], DType::F32).expect_err("4 heads");
    assert_eq!(error, "lse has shape [2, 2, 5]; it must be [2, 4, 5]");
    let error = check([2, 4, 5, 8], [2, 4, 5], DType::F16).expect_err("f32 only");
    assert_eq!(error, "lse is f16; statistics of rows are f32");
}

#[test]
fn operands_other_than_the_planned_ones_are_refused() {
    let (q, longer) = (tensor([1, 1, 3, 2]), tensor([1, 1, 4, 2]));
    let planned = Dims::of(&operands(&q, &q, &q)).expect("they fit");
    let mut lse = [0.0; 4];
    let mut out = tensor([1, 1, 4, 2]);
    let args = ForwardArgs {
        operands: operands(&longer, &longer, &longer),
        out: out.view_mut().expect("dense"),
        lse: TensorMut::new(&mut lse, foveate_tensor::Layout::contiguous([1, 1, 4])).expect("fits"),
        max_score: None,
    };
    let error = args.check(&planned).expect_err("4 rows, not 3").to_string();
    assert!(error.contains("lengths 4/4") && error.contains("lengths 3/3"), "{error}");
}

fn biased(names: &[&str]) -> Spec {
    let score = names.iter().fold(expr::score(), |score, name| {
        let bias = Buffer::learned(*name, &[4], vec![0.0; 4]).expect("4 elements");
        score + bias.at([expr::kv()])
    });
    let score = ScoreMod::new(score.dynamic()).expect("f32");
    Spec { mask: None, score: Some(score), scale: None, dropout: None }
}

/// Runs `check` on correct arguments of a backward pass but for the captured gradients and sink.
fn backward_check(spec: &Spec, captures: &[(&str, usize)], d_sink: Option<usize>) -> String {
    let q = tensor([1, 2, 4, 3]);
    let operands = operands(&q, &q, &q);
    let dims = Dims::of(&operands).expect("they fit");
    let lse = Tensor::<3>::filled(DType::F32, [1, 2, 4], 0.0);
    let [mut dq, mut dk, mut dv] = [q.clone(), q.clone(), q.clone()];
    let mut into: Vec<_> = captures.iter().map(|&(name, n)| (name, vec![0.0; n])).collect();
    let mut d_sink = d_sink.map(|n| vec![0.0; n]);
    let args = BackwardArgs {
        operands,
        out: q.view(),
        lse: lse.view(),
        d_out: q.view(),
        d_lse: None,
        dq: Some(dq.view_mut().expect("dense")),
        dk: Some(dk.view_mut().expect("dense")),
        dv: Some(dv.view_mut().expect("dense")),
        accumulate: false,
        d_sink: d_sink.as_deref_mut().map(SliceMut::F32),
        d_captures: into
            .iter_mut()
            .map(|(name, into)| CaptureGrad { name, into: into.into() })
            .collect(),
    };
    args.check(&dims, spec).map_or_else(|e| e.to_string(), |()| "ok".into())
}

#[test]
fn captured_gradients_must_name_learned_buffers_of_the_score_and_hold_them() {
    let spec = biased(&["bias"]);
    assert_eq!(backward_check(&spec, &[("bias", 4)], None), "ok");
    assert_eq!(backward_check(&spec, &[], None), "ok");
    let says = backward_check(&spec, &[("bais", 4)], None);
    assert!(says.contains("`bais`") && says.contains("[\"bias\"]"), "{says}");
    let says = backward_check(&spec, &[("bias", 5)], None);
    assert_eq!(says, "the gradient of buffer `bias` has 5 elements; it must have 4");
    let says = backward_check(&spec, &[("bias", 4), ("bias", 4)], None);
    assert!(says.contains("two destinations"), "{says}");
}

#[test]
fn a_sink_gradient_needs_a_sink() {
    let says = backward_check(&biased(&["bias"]), &[], Some(2));
    assert!(says.contains("there is no sink"), "{says}");
}

#[test]
fn learned_buffers_that_share_a_name_are_refused() {
    let error = biased(&["bias", "bias"]).check().expect_err("one name for two").to_string();
    assert!(error.contains("two learned buffers of the score are called `bias`"), "{error}");
    assert!(biased(&["bias", "other"]).check().is_ok());
}

#[test]
fn a_scale_that_is_not_finite_is_refused() {
    let spec = Spec { scale: Some(f32::NAN), ..biased(&["bias"]) };
    assert!(spec.check().expect_err("NaN").to_string().contains("the scale is NaN"));
}

#[test]
fn what_lies_in_device_memory_is_refused_by_whoever_computes_on_the_host() {
    let bias = Buffer::<f32>::on_device("bias", &[4]).expect("a shape");
    let score = (expr::score() + bias.at([expr::kv()])).dynamic().clone();
    let spec = Spec { score: Some(ScoreMod::new(&score).expect("f32")), ..biased(&["other"]) };
    assert!(spec.check().is_ok());
    let error = spec.check_on_host().expect_err("no elements").to_string();
    assert!(error.starts_with("captured buffer `bias` is in device memory"), "{error}");
    let held = Buffer::vector("bias", vec![0.5f32; 4]);
    let rebound = spec.rebind(held.any()).expect("captured").spec;
    assert!(rebound.check_on_host().is_ok());
}

#[test]
fn scales_are_one_for_each_head_of_e4m3_operands() {
    let of = |dtype, batch: usize, q: &[f32], k: &[f32], v: &[f32]| {
        let tensor = |heads| Tensor::filled(dtype, [batch, heads, 3, 16], 0.0);
        let (query, key) = (tensor(4), tensor(2));
        let scales = Some(Scales::of_heads(q, k, v));
        let operands = Operands { scales, ..Operands::new(query.view(), key.view(), key.view()) };
        Dims::of(&operands).map(|dims| dims.batch).map_err(|e| e.to_string())
    };
    let (eight, four) = ([1.0; 8], [1.0; 4]);
    assert_eq!(of(DType::F8E4M3, 2, &eight, &four, &four), Ok(2));
    assert_eq!(
        of(DType::F8E4M3, 2, &eight, &four, &eight).unwrap_err(),
        "8 scales of v for a batch of 2, 2 heads and 1 block; one each"
    );
    assert_eq!(
        of(DType::BF16, 2, &eight, &four, &four).unwrap_err(),
        "scales are for f8e4m3 operands; q, k and v are bf16"
    );
}

#[test]
fn blocks_of_scales_are_counted_in_the_longest_sequence_and_cut_at_its_end() {
    let scaled = |blocks: ScaleBlocks, varlen: Option<Varlen<'_>>, counts: [usize; 3]| {
        let tensor = |heads, len| Tensor::filled(DType::F8E4M3, [1, heads, len, 16], 0.0);
        let (query, key) = (tensor(4, 300), tensor(2, 500));
        let all = counts.map(|n| (0..n).map(|i| i as f32).collect::<Vec<_>>());
        let scales = Scales { q: &all[0], k: &all[1], v: &all[2], blocks };
        let operands = Operands::new(query.view(), key.view(), key.view());
        let dims = Dims::of(&Operands { scales: Some(scales), varlen, ..operands })?;
        let last = [dims.batch - 1, 1, 140];
        Ok::<_, ProblemError>((scales.of_query(&dims, last), scales.of_key(&dims, last)))
    };
    let blocks = ScaleBlocks { q: 64, kv: 128 };
    // Row 140 is in block 2 of 5 of queries, in block 1 of 4 of keys; both of head 1.
    assert_eq!(scaled(blocks, None, [20, 8, 8]), Ok((7.0, [5.0; 2])));
    let long = ScaleBlocks { q: 512, kv: usize::MAX };
    assert_eq!(scaled(long, None, [4, 2, 2]), Ok((1.0, [1.0; 2])));
    // Sequences of 250 and 50 queries, 141 and 359 keys: 4 and 3 blocks.
    let varlen = Varlen::new(&[0, 50, 300], &[0, 141, 500], 300, 500).unwrap();
    assert_eq!(scaled(blocks, Some(varlen), [32, 12, 12]), Ok((22.0, [10.0; 2])));
    let said = |blocks, counts| scaled(blocks, None, counts).unwrap_err().to_string();
    assert_eq!(
        said(blocks, [20, 8, 6]),
        "6 scales of v for a batch of 1, 2 heads and 4 blocks; one each"
    );
    for rows in [0, 96] {
        assert_eq!(
            said(ScaleBlocks { kv: rows, ..blocks }, [20, 8, 8]),
            format!(
                "scales are of blocks of {rows} keys; a block has a multiple of 64 rows, or all of them"
            )
        );
    }
}
