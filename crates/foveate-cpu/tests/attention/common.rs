//! Random problems, run on the CPU and by the oracle.

use std::collections::BTreeMap;

use foveate_cpu::{CpuError, CpuOptions, CpuPlan};
use foveate_mods::{MaskMod, ScoreMod};
use foveate_problem::{BackwardArgs, CaptureGrad, Dims, Dropout, ForwardArgs, Operands, Spec};
use foveate_reference::{NonFinite, Rule, Tolerance, Upstream, low};
use foveate_tensor::random::Random;
use foveate_tensor::{DType, Slice, Tensor, Varlen};

/// Random elements in `[-2, 2)`.
pub fn tensor<const N: usize>(random: &mut Random, dtype: DType, shape: [usize; N]) -> Tensor<N> {
    Tensor::from_fn(dtype, shape, |_| 2.0 * random.signed())
}

/// Random numbers in `[-1, 1)`.
pub fn vector(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| random.signed() as f32).collect()
}

/// A problem without numbers.
#[derive(Clone)]
pub struct Case {
    pub seed: u64,
    pub batch: usize,
    pub heads: [usize; 2],
    pub lens: [usize; 2],
    pub dims: [usize; 2],
    pub dtype: DType,
    pub mask: Option<MaskMod>,
    pub score: Option<ScoreMod>,
    pub scale: Option<f32>,
    pub dropout: Option<Dropout>,
    pub sink: bool,
    pub d_lse: bool,
    pub shared_kv: bool,
    pub offsets: Option<[Vec<i32>; 2]>,
    pub options: CpuOptions,
    pub rule: Rule,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            seed: 1,
            batch: 1,
            heads: [2, 2],
            lens: [37, 53],
            dims: [16, 16],
            dtype: DType::F32,
            mask: None,
            score: None,
            scale: None,
            dropout: None,
            sink: false,
            d_lse: false,
            shared_kv: false,
            offsets: None,
            options: CpuOptions { tile_q: Some(16), tile_kv: Some(16), ..CpuOptions::default() },
            rule: Rule::Plain,
        }
    }
}

/// The numbers of a problem.
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub d_out: Tensor,
    pub d_lse: Option<Tensor<3>>,
    pub sink: Option<Vec<f32>>,
    pub offsets: Option<[Vec<i32>; 2]>,
}

/// Everything a forward and a backward pass write.
#[derive(Clone, Debug)]
pub struct Results {
    pub out: Tensor,
    pub lse: Tensor<3>,
    pub max_score: Tensor<3>,
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
    pub d_sink: Vec<f32>,
    pub captures: BTreeMap<String, Vec<f32>>,
}

impl Results {
    /// The bits of every result, so that NaN equals NaN.
    pub fn bits(&self) -> Vec<u64> {
        let tensors = [&self.out, &self.dq, &self.dk, &self.dv];
        let rows = [&self.lse, &self.max_score];
        let vectors = self.captures.values().chain([&self.d_sink]);
        tensors
            .into_iter()
            .flat_map(|t| t.to_f64())
            .chain(rows.into_iter().flat_map(|t| t.to_f64()))
            .chain(vectors.flatten().map(|&x| x.into()))
            .map(f64::to_bits)
            .collect()
    }
}

impl Case {
    pub fn spec(&self) -> Spec {
        Spec {
            mask: self.mask.clone(),
            score: self.score.clone(),
            scale: self.scale,
            dropout: self.dropout.clone(),
        }
    }

    pub fn inputs(&self) -> Inputs {
        let mut random = Random::new(self.seed);
        let [heads_q, heads_kv] = self.heads;
        let [len_q, len_k] = self.lens;
        let [dim, dim_v] = self.dims;
        let kv_batch = if self.shared_kv { 1 } else { self.batch };
        let dtype = self.dtype;
        Inputs {
            q: tensor(&mut random, dtype, [self.batch, heads_q, len_q, dim]),
            k: tensor(&mut random, dtype, [kv_batch, heads_kv, len_k, dim]),
            v: tensor(&mut random, dtype, [kv_batch, heads_kv, len_k, dim_v]),
            d_out: tensor(&mut random, dtype, [self.batch, heads_q, len_q, dim_v]),
            d_lse: self
                .d_lse
                .then(|| tensor(&mut random, DType::F32, [self.batch, heads_q, len_q])),
            sink: self.sink.then(|| vector(&mut random, heads_q)),
            offsets: self.offsets.clone(),
        }
    }

    pub fn plan(&self, inputs: &Inputs) -> CpuPlan {
        let dims = Dims::of(&inputs.operands()).expect("operands fit");
        CpuPlan::new(&self.spec(), &dims, self.dtype, self.options).expect("a plan")
    }

    pub fn run(&self) -> Results {
        let inputs = self.inputs();
        run(&self.plan(&inputs), &inputs, &self.spec()).expect("the case runs")
    }

    /// Runs the case on both and compares every result.
    pub fn check(&self, name: &str) {
        let inputs = self.inputs();
        let spec = self.spec();
        let ours = run(&self.plan(&inputs), &inputs, &spec)
            .unwrap_or_else(|e| panic!("{name}, seed {}: {e}", self.seed));
        let operands = inputs.operands();
        let upstream =
            Upstream { d_out: inputs.d_out.view(), d_lse: inputs.d_lse.as_ref().map(|t| t.view()) };
        let gold = foveate_reference::forward(&spec, &operands).expect("gold");
        let plain = low::forward(&spec, &operands).expect("low");
        let rows = low::statistics(&spec, &operands).expect("low");
        let gold_grad = foveate_reference::backward(&spec, &operands, &upstream).expect("gold");
        let plain_grad = low::backward(&spec, &operands, &upstream).expect("low");
        let compare = |what: &str, dtype, gold: &[f64], low: &[f64], ours: &[f64]| {
            let measure = Tolerance { dtype, rule: self.rule, non_finite: NonFinite::Same }
                .measure(gold, low, ours);
            // The mean error of a few sums is chance; it says something of whole tensors.
            let few = gold.len() < 64 && measure.strays == 0 && measure.max <= measure.max_allowed;
            assert!(few || measure.passes(), "{name}, seed {}: {what}: {measure}", self.seed);
        };
        let f32s = |v: &[f32]| v.iter().map(|&x| x.into()).collect::<Vec<f64>>();
        compare("out", self.dtype, &gold.out, &plain.out, &ours.out.to_f64());
        compare("lse", DType::F32, &gold.lse, &rows.lse, &ours.lse.to_f64());
        let max_score = ours.max_score.to_f64();
        compare("max_score", DType::F32, &gold.max_score, &rows.max_score, &max_score);
        let (gold, plain) = (gold_grad, plain_grad);
        compare("dq", self.dtype, &gold.dq, &plain.dq, &ours.dq.to_f64());
        compare("dk", self.dtype, &gold.dk, &plain.dk, &ours.dk.to_f64());
        compare("dv", self.dtype, &gold.dv, &plain.dv, &ours.dv.to_f64());
        compare("d_sink", self.dtype, &gold.d_sink, &plain.d_sink, &f32s(&ours.d_sink));
        for (buffer, gold) in &gold.captures {
            let (low, ours) = (&plain.captures[buffer], f32s(&ours.captures[buffer]));
            compare(buffer, self.dtype, gold, low, &ours);
        }
    }
}

impl Inputs {
    pub fn operands(&self) -> Operands<'_> {
        let varlen = self.offsets.as_ref().map(|[q, k]| {
            Varlen::new(q, k, self.q.shape()[2], self.k.shape()[2]).expect("offsets fit")
        });
        Operands {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            sink: self.sink.as_deref().map(Slice::F32),
            varlen,
            pages: None,
            scales: None,
        }
    }
}

/// Forward and backward into destinations filled with NaN.
pub fn run(plan: &CpuPlan, inputs: &Inputs, spec: &Spec) -> Result<Results, CpuError> {
    let (q, k, v, d_out) =
        (inputs.q.shape(), inputs.k.shape(), inputs.v.shape(), inputs.d_out.shape());
    let dtype = inputs.q.dtype();
    let rows = Tensor::filled(DType::F32, [q[0], q[1], q[2]], f64::NAN);
    let nan = |shape| Tensor::filled(dtype, shape, f64::NAN);
    let mut results = Results {
        out: nan(d_out),
        lse: rows.clone(),
        max_score: rows,
        dq: nan(q),
        dk: nan(k),
        dv: nan(v),
        d_sink: vec![f32::NAN; inputs.sink.as_ref().map_or(0, Vec::len)],
        captures: spec
            .learned()
            .iter()
            .map(|b| (b.name().to_owned(), vec![f32::NAN; b.elems()]))
            .collect(),
    };
    run_into(plan, inputs, &mut results, false)?;
    Ok(results)
}

/// Forward and backward into what `results` holds.
pub fn run_into(
    plan: &CpuPlan,
    inputs: &Inputs,
    results: &mut Results,
    accumulate: bool,
) -> Result<(), CpuError> {
    let Results { out, lse, max_score, dq, dk, dv, d_sink, captures } = results;
    plan.forward(ForwardArgs {
        operands: inputs.operands(),
        out: out.view_mut().expect("own"),
        lse: lse.view_mut().expect("own"),
        max_score: Some(max_score.view_mut().expect("own")),
    })?;
    plan.backward(BackwardArgs {
        operands: inputs.operands(),
        out: out.view(),
        lse: lse.view(),
        d_out: inputs.d_out.view(),
        d_lse: inputs.d_lse.as_ref().map(|t| t.view()),
        dq: Some(dq.view_mut().expect("own")),
        dk: Some(dk.view_mut().expect("own")),
        dv: Some(dv.view_mut().expect("own")),
        accumulate,
        d_sink: inputs.sink.is_some().then_some((&mut d_sink[..]).into()),
        d_captures: captures
            .iter_mut()
            .map(|(name, into)| CaptureGrad { name, into: into.into() })
            .collect(),
    })
}
