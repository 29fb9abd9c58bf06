//! What a backend is to the planner.
//!
//! A backend either takes a problem or declines it with a reason; the planner asks the
//! candidates of a device in order and keeps every reason. A backend is the only thing that knows
//! its plan; to the rest of the crate a plan is a [`BackendPlan`].

mod cpu;
mod cuda;

use std::sync::Arc;

use foveate_cpu::CpuPlan;
use foveate_cuda::CudaPlan;
use foveate_mods::{AnyBuffer, ScalarValue};
use foveate_problem::{BackwardArgs, ForwardArgs, Spec};

use crate::device::Device;
use crate::error::{Declined, Error, ErrorKind};
use crate::explain::Execution;
use crate::problem::Problem;

/// A way to compute attention.
pub(crate) trait Backend {
    /// Its name in explanations and refusals.
    fn name(&self) -> &'static str;
    /// A plan, or why not.
    fn plan(&self, wanted: &Wanted<'_>) -> Result<Arc<dyn BackendPlan>, String>;
}

/// What is to be planned.
pub(crate) struct Wanted<'a> {
    pub(crate) spec: &'a Spec,
    pub(crate) problem: &'a Problem,
    /// The same bits in every run.
    pub(crate) deterministic: bool,
    /// Keys that a query sees on average, as the caller states.
    pub(crate) mean_kv_len: Option<usize>,
}

/// A backend's plan. It runs every problem of its class: lengths, batch, strides and buffer
/// contents are free.
pub(crate) trait BackendPlan: std::fmt::Debug + Send + Sync {
    /// Checks `args` before anything is written.
    fn forward(&self, args: ForwardArgs<'_>) -> Result<(), Error>;
    /// Checks `args` before anything is written.
    fn backward(&self, args: BackwardArgs<'_>) -> Result<(), Error>;
    fn rebind(&self, buffer: &AnyBuffer) -> Result<Arc<dyn BackendPlan>, Error>;
    fn set_scalar(&self, name: &str, value: ScalarValue) -> Result<Arc<dyn BackendPlan>, Error>;
    /// What it computes, after every substitution and rebinding.
    fn spec(&self) -> &Spec;
    /// How it would run `problem`.
    fn execution(&self, problem: &Problem) -> Execution;
    /// The plan of the GPU engine, when it is one.
    fn cuda(&self) -> Option<&CudaPlan> {
        None
    }
    /// The plan of the CPU backend, when it is one.
    fn cpu(&self) -> Option<&CpuPlan> {
        None
    }
}

/// A plan and the name of its backend, with the candidates that declined before it.
pub(crate) struct Chosen {
    pub(crate) backend: &'static str,
    pub(crate) plan: Arc<dyn BackendPlan>,
    pub(crate) declined: Vec<Declined>,
}

/// The candidates of a device, the preferred one first.
fn candidates(device: &Device) -> Vec<Box<dyn Backend>> {
    match device {
        Device::Cpu => vec![Box::new(cpu::Cpu)],
        Device::Cuda(ordinal) => vec![Box::new(cuda::Cuda(*ordinal))],
    }
}

pub(crate) fn choose(wanted: &Wanted<'_>, device: &Device) -> Result<Chosen, Error> {
    let mut declined = Vec::new();
    for backend in candidates(device) {
        match backend.plan(wanted) {
            Ok(plan) => return Ok(Chosen { backend: backend.name(), plan, declined }),
            Err(reason) => declined.push(Declined { backend: backend.name(), reason }),
        }
    }
    Err(ErrorKind::Declined { device: device.to_string(), declined }.into())
}
