//! The CPU backend as the planner sees it.

use std::sync::Arc;

use foveate_cpu::tiles::Tiles;
use foveate_cpu::{CpuError, CpuErrorKind, CpuOptions, CpuPlan};
use foveate_mods::{AnyBuffer, ModError, Program, ScalarValue};
use foveate_problem::{BackwardArgs, Dims, ForwardArgs, Spec};
use foveate_tensor::DType;

use super::{Backend, Planned};
use crate::error::{Error, ErrorKind};
use crate::explain::Work;
use crate::problem::Problem;

const NAME: &str = "cpu";

pub(crate) struct Cpu;

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, spec: &Spec, problem: &Problem) -> Result<Arc<dyn Planned>, String> {
        let planned = CpuPlanned::new(spec.clone(), *problem.dims(), problem.dtype());
        Ok(Arc::new(planned.map_err(|e| e.to_string())?))
    }
}

#[derive(Debug)]
struct CpuPlanned {
    spec: Spec,
    dims: Dims,
    dtype: DType,
    plan: CpuPlan,
}

impl CpuPlanned {
    fn new(spec: Spec, dims: Dims, dtype: DType) -> Result<Self, CpuError> {
        let plan = CpuPlan::new(&spec, &dims, dtype, CpuOptions::default())?;
        Ok(Self { spec, dims, dtype, plan })
    }

    fn bound(
        &self,
        name: &str,
        holds: impl Fn(&Program) -> bool,
        f: &dyn Fn(&Program) -> Result<Program, ModError>,
    ) -> Result<Arc<dyn Planned>, Error> {
        let mut spec = self.spec.clone();
        let mut any = false;
        if let Some(mask) = spec.mask.as_mut().filter(|m| holds(m.program())) {
            *mask = mask.map(f)?;
            any = true;
        }
        if let Some(score) = spec.score.as_mut().filter(|s| holds(s.program())) {
            *score = score.map(f)?;
            any = true;
        }
        if !any {
            let reason = format!("no mask or score of the plan captures `{name}`");
            return Err(Error::mismatch(reason));
        }
        Ok(Arc::new(Self::new(spec, self.dims, self.dtype).map_err(error)?))
    }
}

impl Planned for CpuPlanned {
    fn forward(&self, args: ForwardArgs<'_>) -> Result<(), Error> {
        self.plan.forward(args).map_err(error)
    }

    fn backward(&self, args: BackwardArgs<'_>) -> Result<(), Error> {
        self.plan.backward(args).map_err(error)
    }

    fn rebind(&self, buffer: &AnyBuffer) -> Result<Arc<dyn Planned>, Error> {
        let holds = |p: &Program| p.graph().buffers().iter().any(|b| b.name() == buffer.name());
        self.bound(buffer.name(), holds, &|p| p.rebind(buffer))
    }

    fn set_scalar(&self, name: &str, value: ScalarValue) -> Result<Arc<dyn Planned>, Error> {
        let holds = |p: &Program| p.graph().scalars().iter().any(|s| s.name == name);
        self.bound(name, holds, &|p| p.set_scalar(name, value))
    }

    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn work(&self, problem: &Problem) -> Work {
        let tiles = Tiles::choose(problem.dims(), &CpuOptions::default());
        Work { tile_q: tiles.q, tile_kv: tiles.kv, ..Work::default() }
    }
}

fn error(e: CpuError) -> Error {
    match e.kind() {
        CpuErrorKind::Problem(e) => e.clone().into(),
        CpuErrorKind::Mod(e) => e.clone().into(),
        CpuErrorKind::Operands { .. } | CpuErrorKind::Destination { .. } => {
            Error::mismatch(e.to_string())
        }
        CpuErrorKind::OutOfRange { reason } => {
            ErrorKind::OutOfRange { reason: reason.clone() }.into()
        }
        _ => ErrorKind::Backend { backend: NAME, reason: e.to_string() }.into(),
    }
}
