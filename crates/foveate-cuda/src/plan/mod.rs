//! Plans: a program joined with a GPU.
//!
//! A [`CudaPlan`] is made for a dtype, head counts and head dims, and runs problems of any batch,
//! lengths and strides of that class: on tensors that are in device memory already
//! ([`CudaPlan::forward_on`], [`CudaPlan::backward_on`]; nothing is copied, nothing waits) or on
//! host tensors ([`CudaPlan::forward`], [`CudaPlan::backward`]; they are copied over and back).
//!
//! What a call needs and operands do not decide is made once and kept: configurations and kernels
//! (`kernels`), schedules and captured buffers on the device (`resident`). `launch` puts a pass
//! together, `host` moves host tensors, `tune` finds the fastest configurations.

mod call;
mod describe;
mod hopper;
mod host;
mod kernels;
mod launch;
mod prepare;
mod report;
mod resident;
mod tile_kinds;
mod tile_runs;
mod tune;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use foveate_mods::{AnyBuffer, ModError, ScalarValue, ScoreGradient};
use foveate_problem::{Arrangement, Dims, Rebound, Sequence, Spec};
use foveate_tensor::DType;

use crate::choose::{KernelOptions, admit, check_rows};
use crate::compile::config::Elem;
use crate::error::CudaError;
use crate::operands::DeviceOperands;
use foveate_gpu::driver::{Pool, default_timeout};
use foveate_gpu::sync::lock;
use foveate_gpu::trace::{Noted, note};
use foveate_gpu::{Engine, Queue};

pub use describe::Description;
pub use tile_kinds::{DeviceBlockLists, tile_kinds_on};
pub use tile_runs::TileTables;

/// How a plan runs.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaOptions {
    /// The same bits from the same inputs in every run: sums over CTAs are made in a fixed
    /// order, which costs the backward about a fifth of its speed.
    pub deterministic: bool,
    /// Reports captured indices outside their axis. Host tensors are always checked; a checked
    /// call on device tensors waits for its kernels.
    pub checked: bool,
    /// Tiles, stages and warps to use in place of the planner's.
    pub kernels: KernelOptions,
    /// Keys that a query sees on average, for the planner's choice of tiles; more than there are
    /// count as all of them. `None` samples the mask on the host, with all that it reads in device
    /// memory the same: documents count as one.
    pub mean_kv_len: Option<usize>,
    /// How long to wait for the device before it is said to hang; the wait for room to copy through
    /// behind what is queued already is one, too.
    pub timeout: Duration,
}

impl Default for CudaOptions {
    /// Not deterministic, not checked, and two minutes of waiting (`FOVEATE_TIMEOUT` in seconds
    /// sets another).
    fn default() -> Self {
        Self {
            deterministic: false,
            checked: false,
            kernels: KernelOptions::default(),
            mean_kv_len: None,
            timeout: default_timeout(),
        }
    }
}

/// Paths that a plan takes for some calls only, for all of them: the corpus runs every case on each.
#[derive(Clone, Copy, Debug, Default)]
struct Forced {
    /// Makes block lists on the host instead of the device.
    lists_on_host: bool,
    /// Lets calls on host tensors use captured buffers and offsets of sequences as calls on device
    /// tensors can: from device memory, their contents unknown to the host.
    contents_on_device: bool,
    /// Runs kernels of the Hopper family whose waits end in an assertion where they would never end.
    bounded_waits: bool,
}

/// A program ready to run on a GPU. Cheap to clone, and used by several threads at once.
#[derive(Clone, Debug)]
pub struct CudaPlan {
    engine: Arc<Engine>,
    spec: Spec,
    gradient: Result<Option<Arc<ScoreGradient>>, ModError>,
    dims: Dims,
    dtype: DType,
    elem: Elem,
    options: CudaOptions,
    forced: Forced,
    kernels: Arc<Mutex<kernels::Kernels>>,
    resident: Arc<Mutex<resident::PlanState>>,
    maps: Arc<Mutex<hopper::KeptMaps>>,
    /// The same plan for captured buffers in device memory of other lengths.
    bound: Arc<Mutex<Vec<call::ForShapes>>>,
}

impl CudaPlan {
    /// Whether `other` is a clone of this plan, so that what either keeps on the device is kept for both.
    pub fn is_clone_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.resident, &other.resident)
    }

    /// Plans `spec` on the device of `engine` for operands of `dtype` (f16, bf16 or f32, for a forward f8e4m3) and
    /// sizes like `dims`. Kernels are compiled when they are first needed; that a configuration
    /// fits the device is found out here.
    ///
    /// # Errors
    /// When [`admit`] refuses the sizes, no configuration fits, or [`Spec::check`] refuses the
    /// program. A score that cannot be differentiated is an error of the backward.
    pub fn new(
        engine: Arc<Engine>,
        spec: &Spec,
        dims: &Dims,
        dtype: DType,
        options: CudaOptions,
    ) -> Result<Self, CudaError> {
        spec.check()?;
        let elem = admit(engine.profile(), dims, dtype)?;
        let plan = Self {
            engine,
            gradient: gradient_of(spec),
            spec: spec.clone(),
            dims: *dims,
            dtype,
            elem,
            options,
            forced: Forced::default(),
            kernels: Arc::default(),
            resident: Arc::default(),
            maps: Arc::default(),
            bound: Arc::default(),
        };
        let some = [dims.len_q.max(1), dims.len_k.max(1)];
        let backward = plan.gradient.is_ok() && elem != Elem::E4m3;
        plan.chosen(plan.class(), kernels::sizes(dims, some), backward)?;
        note(|| Noted::Planned { lengths: [dims.len_q, dims.len_k] });
        Ok(plan)
    }

    /// The same plan with block lists made on the host instead of the device.
    #[cfg(feature = "conformance")]
    #[must_use]
    pub fn with_lists_of_the_host(mut self) -> Self {
        self.forced.lists_on_host = true;
        self
    }

    /// The same plan, for which the contents of captured buffers and the offsets of sequences of host
    /// tensors lie in device memory, unknown to the host.
    #[cfg(feature = "conformance")]
    #[must_use]
    pub fn with_contents_on_the_device(mut self) -> Self {
        self.forced.contents_on_device = true;
        self
    }

    /// The same plan, whose kernels of the Hopper family give up a wait for an mbarrier or a count after seconds: the
    /// driver prints which one, and in which CTA and thread. They are those that the plan would run, and slower.
    #[cfg(feature = "conformance")]
    #[must_use]
    pub fn with_bounded_waits(mut self) -> Self {
        self.forced.bounded_waits = true;
        self
    }

    /// The engine it runs on.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// How it runs.
    pub fn options(&self) -> &CudaOptions {
        &self.options
    }

    /// What is computed, after every rebinding.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The plan with another captured buffer in place of the one of that name. What was uploaded
    /// of other buffers is shared.
    ///
    /// # Errors
    /// When no mod captures a buffer of that name, or type or rank differ.
    pub fn rebind(&self, buffer: &AnyBuffer) -> Result<Self, CudaError> {
        Ok(self.with(self.spec.rebind(buffer)?))
    }

    /// The plan with another value of the run-time scalar called `name`. Nothing is compiled.
    ///
    /// # Errors
    /// When no mod has a scalar of that name, or its type differs.
    pub fn set_scalar(&self, name: &str, value: ScalarValue) -> Result<Self, CudaError> {
        Ok(self.with(self.spec.set_scalar(name, value)?))
    }

    fn with(&self, Rebound { spec, mask_changed }: Rebound) -> Self {
        let kernels = lock(&self.kernels).with_other_values();
        let resident = lock(&self.resident).with_other_values(&spec, mask_changed);
        Self {
            gradient: gradient_of(&spec),
            spec,
            kernels: Arc::new(Mutex::new(kernels)),
            resident: Arc::new(Mutex::new(resident)),
            bound: Arc::default(),
            ..self.clone()
        }
    }

    /// The sizes of operands that are of the planned class.
    fn admit(&self, operands: &DeviceOperands<'_>) -> Result<Dims, CudaError> {
        let dims = operands.dims()?;
        self.admit_dims(&dims, operands.q.dtype)?;
        Ok(dims)
    }

    /// Whether sizes and dtype are those of the planned class.
    fn admit_dims(&self, dims: &Dims, dtype: DType) -> Result<(), CudaError> {
        self.dims.admit(self.dtype, dims, dtype).map_err(|e| CudaError::argument(e.to_string()))?;
        check_rows(dims)
    }

    /// The same program with other kernel options: what they leave open is planned anew. That they fit
    /// is found out at the first call.
    pub fn with_kernels(&self, kernels: KernelOptions) -> Self {
        let options = CudaOptions { kernels, ..self.options.clone() };
        Self { options, kernels: Arc::default(), bound: Arc::default(), ..self.clone() }
    }

    /// Memory for what is queued on `queue`, filled with the plan's timeout.
    fn pool(&self, queue: &Queue) -> Pool {
        queue.pool().with_timeout(self.options.timeout)
    }

    fn scale(&self) -> f32 {
        self.spec.scale_for(self.dims.dim)
    }

    /// The derivative of the score.
    fn differentiable(&self) -> Result<Option<&Arc<ScoreGradient>>, CudaError> {
        self.gradient.as_ref().map(Option::as_ref).map_err(|e| e.clone().into())
    }
}

/// The sequences of a call. Keys that an empty batch shares have no queries, but still gradients
/// of zero, so they are a sequence of their own.
fn sequences(dims: &Dims, arrangement: Arrangement<'_>) -> Vec<Sequence> {
    let mut sequences = dims.sequences_of(arrangement);
    if arrangement.paged() {
        // The table says where keys are; no batch entry of k and v is one of the sequence's.
        sequences.iter_mut().for_each(|s| s.k_batch = 0);
    }
    if sequences.is_empty() && dims.shared_kv {
        sequences.push(Sequence {
            b: 0,
            q_batch: 0,
            k_batch: 0,
            q_start: 0,
            q_len: 0,
            k_start: 0,
            k_len: dims.len_k,
        });
    }
    sequences
}

/// Queries and keys of the longest sequences.
fn longest(sequences: &[Sequence]) -> [usize; 2] {
    let of = |len: fn(&Sequence) -> usize| sequences.iter().map(len).max().unwrap_or(0);
    [of(|s| s.q_len), of(|s| s.k_len)]
}

/// Adds `one`; where there are `most` already the oldest goes to the caller, who drops it without a lock.
#[must_use]
fn push_bounded<T>(all: &mut Vec<T>, most: usize, one: T) -> Option<T> {
    let oldest = (all.len() >= most).then(|| all.remove(0));
    all.push(one);
    oldest
}

fn gradient_of(spec: &Spec) -> Result<Option<Arc<ScoreGradient>>, ModError> {
    spec.score.as_ref().map(|score| score.gradient().map(Arc::new)).transpose()
}
