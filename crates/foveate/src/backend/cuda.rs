//! The GPU engine as the planner sees it.

use std::sync::Arc;

use foveate_cuda::{CudaError, CudaErrorKind, CudaOptions, CudaPlan, Engine};
use foveate_gpu::GpuErrorKind;
use foveate_mods::{AnyBuffer, ScalarValue};
use foveate_problem::{BackwardArgs, ForwardArgs, Spec};

use super::{Backend, BackendPlan, Wanted};
use crate::error::{Error, ErrorKind};
use crate::explain::Execution;
use crate::problem::Problem;

const NAME: &str = "cuda";

/// The portable kernels on the GPU of this ordinal.
pub(crate) struct Cuda(pub(crate) usize);

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, wanted: &Wanted<'_>) -> Result<Arc<dyn BackendPlan>, String> {
        let Wanted { spec, problem, deterministic, mean_kv_len } = *wanted;
        let options = CudaOptions { deterministic, mean_kv_len, ..CudaOptions::default() };
        let plan = Engine::get(self.0)
            .map_err(CudaError::from)
            .and_then(|engine| {
                CudaPlan::new(engine, spec, problem.dims(), problem.dtype(), options)
            })
            .map_err(|e| e.to_string())?;
        Ok(Arc::new(plan))
    }
}

impl BackendPlan for CudaPlan {
    fn forward(&self, args: ForwardArgs<'_>) -> Result<(), Error> {
        self.forward(args).map_err(error)
    }

    fn backward(&self, args: BackwardArgs<'_>) -> Result<(), Error> {
        self.backward(args).map_err(error)
    }

    fn rebind(&self, buffer: &AnyBuffer) -> Result<Arc<dyn BackendPlan>, Error> {
        Ok(Arc::new(self.rebind(buffer).map_err(error)?))
    }

    fn set_scalar(&self, name: &str, value: ScalarValue) -> Result<Arc<dyn BackendPlan>, Error> {
        Ok(Arc::new(self.set_scalar(name, value).map_err(error)?))
    }

    fn spec(&self) -> &Spec {
        self.spec()
    }

    fn execution(&self, problem: &Problem) -> Execution {
        let copies = ["q, k, v to the device", "out, lse and gradients back"];
        let copies = copies.map(|what| format!("{what} (host tensors only)")).to_vec();
        let mean_kv_len = self.options().mean_kv_len;
        let scales = problem.get_scales().map(|scales| scales.blocks);
        match self.describe(problem.arrangement(), scales) {
            Err(e) => {
                let trouble = Some(e.to_string());
                Execution { trouble, copies, mean_kv_len, ..Execution::default() }
            }
            Ok(found) => Execution {
                instructions: found.device,
                threads: found.sms,
                kernels: found.kernels,
                notes: found.notes,
                mean_kv_len,
                declined: Vec::new(),
                copies,
                trouble: None,
                tiling: found.tiling,
                forward_bytes: found.forward_bytes,
                backward_bytes: found.backward_bytes,
            },
        }
    }

    fn cuda(&self) -> Option<&CudaPlan> {
        Some(self)
    }
}

fn error(e: CudaError) -> Error {
    match e.kind() {
        CudaErrorKind::Problem(e) => e.clone().into(),
        CudaErrorKind::Mod(e) => e.clone().into(),
        CudaErrorKind::Argument { reason } => Error::mismatch(reason.clone()),
        CudaErrorKind::Gpu(e) if let GpuErrorKind::Argument { reason } = e.kind() => {
            Error::mismatch(reason.clone())
        }
        CudaErrorKind::OutOfRange { reason } => {
            ErrorKind::OutOfRange { reason: reason.clone() }.into()
        }
        _ => ErrorKind::Backend { backend: NAME, reason: e.to_string() }.into(),
    }
}
