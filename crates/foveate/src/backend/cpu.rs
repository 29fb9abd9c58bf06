//! The CPU backend as the planner sees it.

use std::sync::Arc;

use foveate_cpu::{CpuError, CpuErrorKind, CpuOptions, CpuPlan};
use foveate_mods::{AnyBuffer, ScalarValue};
use foveate_problem::{BackwardArgs, ForwardArgs, Spec};

use super::{Backend, BackendPlan, Wanted};
use crate::error::{Declined, Error, ErrorKind};
use crate::explain::Execution;
use crate::problem::Problem;

const NAME: &str = "cpu";

pub(crate) struct Cpu;

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, wanted: &Wanted<'_>) -> Result<Arc<dyn BackendPlan>, String> {
        let Wanted { spec, problem, .. } = wanted;
        let options = CpuOptions::default();
        let plan = CpuPlan::new(spec, problem.dims(), problem.dtype(), options);
        Ok(Arc::new(plan.map_err(|e| e.to_string())?))
    }
}

impl BackendPlan for CpuPlan {
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

    fn cpu(&self) -> Option<&CpuPlan> {
        Some(self)
    }

    fn execution(&self, problem: &Problem) -> Execution {
        let found = self.describe(problem.arrangement());
        Execution {
            instructions: found.instructions.to_owned(),
            threads: found.threads,
            declined: found.decode_declined.map(decode_declined).into_iter().collect(),
            tiling: found.tiling,
            forward_bytes: found.forward_bytes,
            backward_bytes: found.backward_bytes,
            ..Execution::default()
        }
    }
}

fn decode_declined(reason: String) -> Declined {
    Declined { backend: "cpu decode", reason }
}

fn error(e: CpuError) -> Error {
    match e.kind() {
        CpuErrorKind::Problem(e) => e.clone().into(),
        CpuErrorKind::Mod(e) => e.clone().into(),
        CpuErrorKind::Operands { .. } => Error::mismatch(e.to_string()),
        CpuErrorKind::OutOfRange { reason } => {
            ErrorKind::OutOfRange { reason: reason.clone() }.into()
        }
        _ => ErrorKind::Backend { backend: NAME, reason: e.to_string() }.into(),
    }
}
