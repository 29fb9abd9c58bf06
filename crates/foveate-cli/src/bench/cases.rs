//! The grid of `foveate bench cpu`, and a case made ready to run.

use foveate::mask::{BlockMask, Tile};
use foveate::mods::expr::{kv, q, score};
use foveate::mods::{Head, MaskMod, ScoreMod};
use foveate::{
    Attention, BackwardArgs, DType, Data, Device, ForwardArgs, Layout, Plan, Problem, Tensor,
    TensorMut,
};

use crate::failure::Failure;

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Forward,
    Backward,
}

/// What a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sees {
    Everything,
    Causal,
    /// The last so many keys.
    Window(i32),
    /// Causal, scores capped at 30.
    Capped,
}

/// One line of the grid.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub heads: usize,
    pub heads_kv: usize,
    pub len: usize,
    pub dim: usize,
    pub dtype: DType,
    pub sees: Sees,
    pub pass: Pass,
}

impl Case {
    /// Its name: mask, heads, length, head dim, dtype, direction.
    pub fn name(&self) -> String {
        let sees = match self.sees {
            Sees::Everything => "full".to_owned(),
            Sees::Causal => "causal".to_owned(),
            Sees::Window(n) => format!("window{n}"),
            Sees::Capped => "causal-softcap".to_owned(),
        };
        let pass = if self.pass == Pass::Forward { "forward" } else { "backward" };
        let Self { heads, heads_kv, len, dim, dtype, .. } = self;
        format!("{sees}/h{heads}-{heads_kv}/s{len}/d{dim}/{dtype}/{pass}")
    }

    /// Whether query `q` sees key `k`.
    pub fn keeps(&self, q: usize, k: usize) -> bool {
        match self.sees {
            Sees::Everything => true,
            Sees::Causal | Sees::Capped => k <= q,
            Sees::Window(n) => k <= q && q - k < n as usize,
        }
    }

    /// What becomes of a score, and its slope there.
    pub fn scored(&self, s: f32) -> (f32, f32) {
        if self.sees != Sees::Capped {
            return (s, 1.0);
        }
        let t = (s / CAP).tanh();
        (CAP * t, 1.0 - t * t)
    }

    fn program(&self) -> Attention {
        let causal = kv().le(q());
        let mask = match self.sees {
            Sees::Everything => return Attention::new(),
            Sees::Causal | Sees::Capped => causal,
            Sees::Window(n) => causal & (q() - kv()).lt(n),
        };
        let mask = MaskMod::new(mask.dynamic()).expect("a comparison is a mask");
        let program = Attention::new().mask(mask);
        if self.sees != Sees::Capped {
            return program;
        }
        let capped = (score() / CAP).tanh() * CAP;
        program.score(ScoreMod::new(capped.dynamic()).expect("a product is a score"))
    }
}

const CAP: f32 = 30.0;

/// The cases of the command.
pub fn grid() -> Vec<Case> {
    let mut cases = Vec::new();
    for pass in [Pass::Forward, Pass::Backward] {
        let base = Case {
            heads: 8,
            heads_kv: 2,
            len: 1024,
            dim: 64,
            dtype: DType::F32,
            sees: Sees::Causal,
            pass,
        };
        cases.push(Case { sees: Sees::Everything, ..base });
        cases.push(base);
        cases.push(Case { sees: Sees::Window(256), len: 2048, ..base });
        cases.push(Case { sees: Sees::Capped, ..base });
        cases.push(Case { dim: 128, ..base });
        cases.push(Case { dtype: DType::BF16, ..base });
        cases.push(Case { len: 256, ..base });
        cases.push(Case { heads: 4, heads_kv: 4, len: 4096, ..base });
    }
    cases
}

/// The masks of the grid on sizes that divide nothing, for tests.
#[cfg(test)]
pub fn small() -> Vec<Case> {
    let all = [Sees::Everything, Sees::Causal, Sees::Window(9), Sees::Capped];
    let base = Case {
        heads: 6,
        heads_kv: 2,
        len: 45,
        dim: 20,
        dtype: DType::F32,
        sees: Sees::Causal,
        pass: Pass::Forward,
    };
    all.map(|sees| Case { sees, ..base }).to_vec()
}

/// Operands, destinations and the plan of a case.
pub struct Prepared {
    pub case: Case,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    out: Tensor,
    lse: Tensor<3>,
    gradients: [(Data, Layout); 3],
}

impl Prepared {
    /// Random operands for the case, planned.
    pub fn new(case: &Case) -> Result<Self, Failure> {
        let q_shape = [1, case.heads, case.len, case.dim];
        let kv_shape = [1, case.heads_kv, case.len, case.dim];
        let [q, d_out] = [1, 4].map(|seed| random(seed, case.dtype, q_shape));
        let [k, v] = [2, 3].map(|seed| random(seed, case.dtype, kv_shape));
        let plan = case.program().plan(&Problem::of(&q, &k, &v)?, &Device::cpu())?;
        let gradient = |shape| {
            let layout = Layout::contiguous(shape);
            (Data::filled(case.dtype, layout.elems(), f64::NAN), layout)
        };
        let forward = plan.forward(&q, &k, &v)?;
        Ok(Self {
            case: *case,
            plan,
            q,
            k,
            v,
            d_out,
            out: forward.out,
            lse: forward.lse,
            gradients: [gradient(q_shape), gradient(kv_shape), gradient(kv_shape)],
        })
    }

    /// One forward pass into the tensors that are there.
    pub fn forward(&mut self) -> Result<(), Failure> {
        let operands = self.plan.operands((&self.q).into(), (&self.k).into(), (&self.v).into())?;
        let args = ForwardArgs {
            operands,
            out: self.out.view_mut().map_err(foveate::Error::from)?,
            lse: self.lse.view_mut().map_err(foveate::Error::from)?,
            max_score: None,
        };
        Ok(self.plan.forward_into(args)?)
    }

    /// One backward pass into the tensors that are there.
    pub fn backward(&mut self) -> Result<(), Failure> {
        let operands = self.plan.operands((&self.q).into(), (&self.k).into(), (&self.v).into())?;
        let [dq, dk, dv] = self
            .gradients
            .each_mut()
            .map(|(data, layout)| TensorMut::new(data, *layout).expect("gradients are contiguous"));
        let args = BackwardArgs {
            operands,
            out: self.out.view(),
            lse: self.lse.view(),
            d_out: self.d_out.view(),
            d_lse: None,
            dq,
            dk,
            dv,
            accumulate: false,
            d_sink: None,
            d_captures: Vec::new(),
        };
        Ok(self.plan.backward_into(args)?)
    }

    /// q, k, v and d_out, widened.
    pub fn widened(&self) -> [Vec<f32>; 4] {
        [&self.q, &self.k, &self.v, &self.d_out]
            .map(|t| t.to_f64().into_iter().map(|x| x as f32).collect())
    }

    /// Operations on pairs that the mask lets through.
    pub fn live_flops(&self) -> f64 {
        let Case { len, heads, dim, pass, .. } = self.case;
        let tile = Tile { q: 64, kv: 64 };
        let pairs = match self.case.program().get_mask() {
            None => (len * len) as f64,
            Some(mask) => {
                let block = BlockMask::build(mask, Head::default(), len, len, tile);
                block.stats().live_entries as f64
            }
        };
        let products = if pass == Pass::Forward { 2.0 } else { 5.0 };
        2.0 * products * pairs * (heads * dim) as f64
    }

    #[cfg(test)]
    pub fn out(&self) -> Vec<f32> {
        self.out.to_f64().into_iter().map(|x| x as f32).collect()
    }

    #[cfg(test)]
    pub fn gradients(&self) -> Vec<(&'static str, Vec<f32>)> {
        let floats = |data: &Data| match data {
            Data::F32(v) => v.clone(),
            _ => unreachable!("tests run in f32"),
        };
        ["dq", "dk", "dv"].into_iter().zip(self.gradients.iter().map(|g| floats(&g.0))).collect()
    }
}

/// Elements in [-1, 1) from a counter.
fn random(seed: u64, dtype: DType, shape: [usize; 4]) -> Tensor {
    let mut state = seed;
    Tensor::from_fn(dtype, shape, |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (state >> 40) as f64 / f64::from(1 << 23) - 1.0
    })
}
