//! Plans: a program checked and compiled for a class of problems.

use std::sync::{Arc, Mutex};

use foveate_mods::{AnyBuffer, ScalarValue};
use foveate_problem::{
    Arrangement, BackwardArgs, Dims, ForwardArgs, Operands, Rebound, Sequence, Spec,
};
use foveate_tensor::{DType, Slice};

use crate::call::{Call, head};
use crate::decode;
use crate::describe::{Description, instructions};
use crate::error::{CpuError, CpuErrorKind};
use crate::forward;
use crate::masks::{Live, MaskCache};
use crate::mods::Mods;
use crate::pool::Pool;
use crate::simd;
use crate::stages::{Profile, Stages};
use crate::tasks::{WAVE_BYTES, kv_heads};
use crate::tiles::{CpuOptions, Tiles};

/// A program ready to run on the CPU.
///
/// A plan is made for a dtype, head counts and head dims; it runs problems of any batch size,
/// lengths and strides of that class. It may be used by several threads at once.
#[derive(Clone, Debug)]
pub struct CpuPlan {
    spec: Spec,
    dims: Dims,
    dtype: DType,
    options: CpuOptions,
    mods: Arc<Mods>,
    masks: Arc<MaskCache>,
    pool: Arc<Pool>,
    profile: Arc<Profile>,
}

impl CpuPlan {
    /// Plans `spec` for operands of `dtype` (f32, f16 or bf16) and sizes like `dims`.
    ///
    /// # Errors
    /// When the dtype is not one of those, an option is out of its range, the environment variable
    /// `FOVEATE_CPU_LEVEL` names an instruction set that this machine does not have, or [`Spec::check`] or
    /// [`Spec::check_on_host`] refuses the program. A score that cannot be differentiated is an
    /// error of [`Self::backward`], and of [`Self::differentiable`].
    pub fn new(
        spec: &Spec,
        dims: &Dims,
        dtype: DType,
        options: CpuOptions,
    ) -> Result<Self, CpuError> {
        if matches!(dtype, DType::F8E4M3 | DType::F64) {
            return Err(CpuErrorKind::DType { found: dtype }.into());
        }
        options.check()?;
        instructions()?;
        spec.check()?;
        spec.check_on_host()?;
        Ok(Self {
            mods: Arc::new(Mods::new(spec)),
            spec: spec.clone(),
            dims: *dims,
            dtype,
            options,
            masks: Arc::default(),
            pool: Arc::default(),
            profile: Arc::default(),
        })
    }

    /// The program, after every rebinding.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Says whether the backward pass can run.
    ///
    /// # Errors
    /// When the score has no derivative, naming the operation.
    pub fn differentiable(&self) -> Result<(), CpuError> {
        self.mods.differentiable()?;
        Ok(())
    }

    /// The plan with another captured buffer in place of the one of that name. Block masks are
    /// built again if the mask reads it.
    ///
    /// # Errors
    /// When no mod captures a buffer of that name, type or rank differ, or its elements are not in
    /// host memory.
    pub fn rebind(&self, buffer: &AnyBuffer) -> Result<Self, CpuError> {
        let rebound = self.spec.rebind(buffer)?;
        rebound.spec.check_on_host()?;
        Ok(self.with(rebound))
    }

    /// The plan with another value of the run-time scalar called `name`. Block masks are built
    /// again if the mask reads it.
    ///
    /// # Errors
    /// When no mod has a scalar of that name, or its type differs.
    pub fn set_scalar(&self, name: &str, value: ScalarValue) -> Result<Self, CpuError> {
        Ok(self.with(self.spec.set_scalar(name, value)?))
    }

    fn with(&self, Rebound { spec, mask_changed }: Rebound) -> Self {
        let mut plan = self.clone();
        if mask_changed {
            plan.masks = Arc::default();
        }
        plan.mods = Arc::new(Mods::new(&spec));
        plan.spec = spec;
        plan
    }

    /// Computes `out`, `lse` and, when asked, `max_score`.
    ///
    /// # Errors
    /// When operands or destinations do not fit the plan or each other. Also when a mod read a
    /// captured buffer outside its bounds; the results are written then, the index clamped.
    pub fn forward(&self, args: ForwardArgs<'_>) -> Result<(), CpuError> {
        let dims = self.admit(&args.operands)?;
        args.check_destinations(&dims)?;
        let call = self.call(dims, args.operands.sequences(&dims), args.operands.sink, false);
        self.profiled(|| match decode::suits(&call) {
            true => decode::forward(&call, args),
            false => forward::forward(&call, args),
        })
    }

    /// Computes `dq`, `dk`, `dv` and, when asked, the gradients of the sink and of learned
    /// captured buffers.
    ///
    /// # Errors
    /// When operands or destinations do not fit the plan or each other, or the score cannot be
    /// differentiated. Also when a mod read a captured buffer outside its bounds; the gradients
    /// are written then, the index clamped.
    pub fn backward(&self, args: BackwardArgs<'_>) -> Result<(), CpuError> {
        let dims = self.admit(&args.operands)?;
        args.check_destinations(&dims, &self.spec)?;
        let call = self.call(dims, args.operands.sequences(&dims), args.operands.sink, true);
        self.profiled(|| crate::backward::backward(&call, args))
    }

    /// The plan with the workspace of `other`: buffers that a call of either leaves serve the next call
    /// of both. Plans that do not run at the same time then take the workspace of the largest of them.
    pub fn with_workspace_of(&self, other: &Self) -> Self {
        Self { pool: Arc::clone(&other.pool), ..self.clone() }
    }

    /// Workspace of each thread in bytes, beside that of a [`Description`], of a forward pass and a
    /// backward pass one after the other, without the sums of learned buffers. Allocates as much for a
    /// moment.
    pub fn thread_bytes(&self, arrangement: Arrangement<'_>) -> usize {
        let alone = Self { pool: Arc::default(), ..self.clone() };
        let dims = self.dims.arranged(arrangement);
        let call = |backward| alone.call(dims, dims.sequences_of(arrangement), None, backward);
        forward::take_scratch(&call(false));
        crate::backward::take_scratch(&call(true));
        alone.workspace_bytes()
    }

    /// Bytes of workspace that calls of this plan have left, and of the plans that share it.
    pub fn workspace_bytes(&self) -> usize {
        self.pool.bytes()
    }

    /// The stages of calls of this plan, and of plans bound from it, since the last call of this
    /// function; zero unless [`CpuOptions::profile`] is set.
    pub fn take_stages(&self) -> Stages {
        self.profile.take()
    }

    fn profiled<T>(&self, call: impl FnOnce() -> T) -> T {
        if self.options.profile { self.profile.call(call) } else { call() }
    }

    /// What a call of the planned sizes does: see [`Description`]. Packed problems need their
    /// offsets; without any, the description is that of no sequences.
    pub fn describe(&self, arrangement: Arrangement<'_>) -> Description {
        let dims = self.dims.arranged(arrangement);
        let call = |backward| self.call(dims, dims.sequences_of(arrangement), None, backward);
        Description::of(&call(false), &call(true))
    }

    /// The sizes of operands that are of the planned class.
    fn admit(&self, operands: &Operands<'_>) -> Result<Dims, CpuError> {
        let dims = Dims::of(operands)?;
        self.dims
            .admit(self.dtype, &dims, operands.q.dtype())
            .map_err(|e| CpuErrorKind::Operands { reason: e.to_string() })?;
        Ok(dims)
    }

    /// The call of a problem of sizes `dims`, whose independent problems are `sequences`.
    fn call<'a>(
        &'a self,
        dims: Dims,
        sequences: Vec<Sequence>,
        sink: Option<Slice<'_>>,
        backward: bool,
    ) -> Call<'a> {
        let pairs = self.dtype == DType::BF16 && simd::level().has_pairs();
        let tiles = if backward {
            Tiles::backward(&dims, &self.options, if pairs { 2 } else { 1 })
        } else {
            Tiles::forward(&dims, &self.options)
        };
        let live = match &self.spec.mask {
            None => {
                let all = |s: &Sequence| Live::All(s.k_len.div_ceil(tiles.kv));
                sequences.iter().flat_map(|s| vec![all(s); dims.heads_q]).collect()
            }
            Some(mask) => {
                let heads = sequences.iter().flat_map(|s| {
                    let dims = &dims;
                    (0..dims.heads_q).map(move |h| head(dims, s, h))
                });
                self.masks.live(mask, &heads.collect::<Vec<_>>(), [tiles.q, tiles.kv])
            }
        };
        // The report of the first head, so that it depends on neither tiles nor threads.
        let out_of_range = live.iter().find_map(Live::out_of_range).map(ToString::to_string);
        Call {
            kv_heads: kv_heads(&dims, &sequences),
            sequences,
            tiles,
            wave_bytes: self.options.workspace_bytes.unwrap_or(WAVE_BYTES),
            live,
            scale: self.spec.scale_for(dims.dim),
            sink: sink.map(|s| (0..s.len()).map(|h| s.get_f64(h) as f32).collect()),
            dropout_scale: self.spec.dropout.as_ref().map_or(1.0, |d| d.kept_scale()),
            pairs,
            mods: &self.mods,
            pool: &self.pool,
            profile: self.options.profile.then_some(&*self.profile),
            out_of_range: Mutex::new(out_of_range),
            dims,
        }
    }
}

#[cfg(test)]
mod tests {
    use foveate_mods::text::{Names, parse_score};
    use foveate_mods::{BufferData, masks};
    use foveate_problem::CaptureGrad;
    use foveate_tensor::Tensor;
    use foveate_tensor::random::Random;

    use super::*;

    /// `t` as queries, keys and values.
    fn of_one(t: &Tensor) -> Operands<'_> {
        let (q, k, v) = (t.view(), t.view(), t.view());
        Operands { q, k, v, sink: None, varlen: None, pages: None, scales: None }
    }

    /// Destinations of passes over [`of_one`], filled with NaN.
    struct Results {
        out: Tensor,
        lse: Tensor<3>,
        gradients: [Tensor; 3],
    }

    impl Results {
        fn new(dtype: DType, shape: [usize; 4]) -> Self {
            let [batch, heads, len, _] = shape;
            let like = || Tensor::filled(dtype, shape, f64::NAN);
            let lse = Tensor::filled(DType::F32, [batch, heads, len], f64::NAN);
            Self { out: like(), lse, gradients: [like(), like(), like()] }
        }

        fn forward<'a>(&'a mut self, operands: Operands<'a>) -> ForwardArgs<'a> {
            let (out, lse) = (self.out.view_mut().unwrap(), self.lse.view_mut().unwrap());
            ForwardArgs { operands, out, lse, max_score: None }
        }

        fn backward<'a>(
            &'a mut self,
            operands: Operands<'a>,
            d_out: &'a Tensor,
        ) -> BackwardArgs<'a> {
            let [dq, dk, dv] = self.gradients.each_mut().map(|d| Some(d.view_mut().unwrap()));
            BackwardArgs {
                operands,
                out: self.out.view(),
                lse: self.lse.view(),
                d_out: d_out.view(),
                d_lse: None,
                dq,
                dk,
                dv,
                accumulate: false,
                d_sink: None,
                d_captures: Vec::new(),
            }
        }
    }

    #[test]
    fn a_dense_learned_bias_gets_its_gradient_without_a_copy_of_it() {
        let (shape, bias) = ([2, 2, 150, 8], [2, 2, 150, 150]);
        let elems = bias.iter().product();
        let mut random = Random::new(3);
        let mut floats = |n: usize| (0..n).map(|_| random.normal() as f32).collect::<Vec<_>>();
        let t = Tensor::from_vec(floats(2 * 2 * 150 * 8), shape).unwrap();
        let operands = of_one(&t);
        let dims = Dims::of(&operands).unwrap();
        let data = BufferData::F32(floats(elems));
        let buffer = AnyBuffer::new("bias", &bias, data, true).unwrap();
        let names = Names::new().buffer(&buffer);
        // The floats that a plan keeps after a backward, and the gradient of the bias.
        let kept = |score: &str| {
            let score = Some(parse_score(score, &names).unwrap());
            let spec = Spec { mask: Some(masks::causal()), score, scale: None, dropout: None };
            let plan = CpuPlan::new(&spec, &dims, DType::F32, CpuOptions::default()).unwrap();
            let mut results = Results::new(DType::F32, shape);
            plan.forward(results.forward(operands)).unwrap();
            let mut d_bias = vec![f32::NAN; elems];
            let into = (&mut d_bias).into();
            let backward = BackwardArgs {
                dq: None,
                dk: None,
                dv: None,
                d_captures: vec![CaptureGrad { name: "bias", into }],
                ..results.backward(operands, &t)
            };
            plan.backward(backward).unwrap();
            (plan.pool.free().into_iter().sum::<usize>(), d_bias)
        };
        let (direct, d_bias) = kept("score + bias[b, h, q, kv]");
        // The same element by an index that is not known to be one of its own.
        let (copied, wanted) = kept("score + bias[b, h, q, min(kv, 149)]");
        assert!(direct < elems && copied > 4 * elems, "{direct} and {copied} of {elems}");
        assert_eq!(d_bias, wanted);
    }

    #[test]
    fn passes_leave_their_workspace_and_block_masks_to_what_comes_after() {
        let shape = [2, 4, 300, 16];
        let t = Tensor::filled(DType::F32, shape, 0.5);
        let operands = of_one(&t);
        let spec = Spec { mask: Some(masks::causal()), score: None, scale: None, dropout: None };
        let dims = Dims::of(&operands).unwrap();
        let plan = CpuPlan::new(&spec, &dims, DType::F32, CpuOptions::default()).unwrap();
        let mut results = Results::new(DType::F32, shape);
        plan.forward(results.forward(operands)).unwrap();
        // The softmax of the rows of a tile lies in the pool: a maximum, a sum and a factor.
        let tile_q = plan.describe(operands.arrangement()).tiling.tile_q;
        assert!(plan.pool.free().contains(&(3 * tile_q)), "{tile_q}: {:?}", plan.pool.free());
        let other = CpuPlan::new(&spec, &dims, DType::F32, CpuOptions::default()).unwrap();
        let shared = other.with_workspace_of(&plan);
        plan.backward(results.backward(operands, &t)).unwrap();
        let kept = [&other, &shared, &plan].map(CpuPlan::workspace_bytes);
        assert!(kept[0] == 0 && kept[1] == kept[2], "{kept:?}");
        let built = plan.masks.addresses();
        let described = plan.describe(operands.arrangement());
        assert_eq!(described.tiling.live_pairs, 2 * 4 * 300 * 301 / 2);
        assert!(!built.is_empty());
        assert_eq!(plan.masks.addresses(), built);
    }

    #[test]
    fn the_workspace_that_is_told_of_waves_and_threads_is_what_passes_leave() {
        for (dtype, dim, len) in
            [(DType::F32, 16, 300), (DType::F32, 72, 1030), (DType::BF16, 64, 500)]
        {
            let shape = [2, 4, len, dim];
            let t = Tensor::filled(dtype, shape, 0.5);
            let operands = of_one(&t);
            let mask = Some(masks::causal());
            let spec = Spec { mask, score: None, scale: None, dropout: None };
            let dims = Dims::of(&operands).unwrap();
            let plan = CpuPlan::new(&spec, &dims, dtype, CpuOptions::default()).unwrap();
            let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            one.install(|| {
                let mut results = Results::new(dtype, shape);
                plan.forward(results.forward(operands)).unwrap();
                plan.backward(results.backward(operands, &t)).unwrap();
            });
            let described = plan.describe(operands.arrangement());
            let of_waves = described.forward_bytes.max(described.backward_bytes);
            let told = of_waves + plan.thread_bytes(operands.arrangement());
            let left = plan.workspace_bytes();
            // A causal mask leaves up to half of a backward pass's waves out.
            let ratio = left as f64 / told as f64;
            assert!((0.6..=1.1).contains(&ratio), "{told} bytes told, {left} left");
        }
    }
}
