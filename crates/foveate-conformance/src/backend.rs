//! The backends that run cases.

use std::sync::Arc;

use foveate::{Attention, Device, Plan, Problem};
use foveate_cpu::{CpuOptions, CpuPlan};
use foveate_cuda::choose::{KernelOptions, TileOptions};
use foveate_cuda::compile::config::{Family, Tiles};
use foveate_cuda::{CudaOptions, CudaPlan, Engine};
use foveate_problem::{BackwardArgs, Dims, ForwardArgs, Spec};
use foveate_reference::{Upstream, low};
use foveate_tensor::{DType, SliceMut, TensorMut, indices};

use crate::program::Program;

/// What each element of a gradient holds before a backward pass that accumulates.
pub(crate) const ACCUMULATE_START: f64 = 0.5;

/// Something that computes attention.
pub trait Backend: Sync {
    /// Its name in the report.
    fn name(&self) -> &'static str;

    /// Gets ready to run a problem.
    ///
    /// # Errors
    /// Why it declines.
    fn prepare(
        &self,
        program: &Program,
        dims: &Dims,
        dtype: DType,
    ) -> Result<Box<dyn Prepared>, String>;

    /// Whether a pass that ended with `reason` was declined: strides are known at the call only.
    fn declines(&self, _reason: &str) -> bool {
        false
    }
}

/// A backend that took a problem.
pub trait Prepared {
    /// Runs the forward pass.
    ///
    /// # Errors
    /// What went wrong.
    fn forward(&self, args: ForwardArgs<'_>) -> Result<(), String>;

    /// Runs the backward pass.
    ///
    /// # Errors
    /// What went wrong.
    fn backward(&self, args: BackwardArgs<'_>) -> Result<(), String>;

    /// Whether a tanh of 16-bit operands is the hardware's, good to 2⁻¹¹ of its value.
    fn approximates_tanh(&self) -> bool {
        false
    }
}

/// Every backend that needs no GPU: the plain implementation of the oracle (which checks the
/// harness), the CPU with the tiles it chooses, the CPU with tiles that most cases leave partly
/// filled, and the crate `foveate`, which is given global positions.
pub fn backends() -> Vec<Box<dyn Backend>> {
    let odd = CpuOptions { tile_q: Some(5), tile_kv: Some(16), ..CpuOptions::default() };
    vec![
        Box::new(Plain),
        Box::new(Cpu { name: "cpu", options: CpuOptions::default() }),
        Box::new(Cpu { name: "cpu, tiles 5x16", options: odd }),
        Box::new(Public { name: "public", device: Device::cpu() }),
    ]
}

/// The backends on GPU 0: its engine with the tiles it chooses and with small ones that leave most
/// cases several tiles, made deterministic, with block lists that the host made, with captured
/// buffers that lie in device memory, and the crate `foveate` on it; on compute capability 9.0 also
/// with the forward and with the backward of the Hopper family, also by mask bits, and deterministic, with dq as the
/// planner has it and added in order, of problems too small for them to be chosen too.
///
/// # Errors
/// Why there is no GPU to run on.
pub fn gpu_backends() -> Result<Vec<Box<dyn Backend>>, String> {
    gpu_backends_that_wait(false)
}

/// Those of [`gpu_backends`]; with `bounded`, kernels of the engine's Hopper family give up a wait after seconds, and
/// the driver prints which one on stderr.
///
/// # Errors
/// Those of [`gpu_backends`].
pub fn gpu_backends_that_wait(bounded: bool) -> Result<Vec<Box<dyn Backend>>, String> {
    let engine = Engine::get(0).map_err(|e| e.to_string())?;
    let of =
        |tile_q, tile_kv, warps| TileOptions::exactly(Tiles::portable(tile_q, tile_kv, warps, 1));
    let kernels = KernelOptions {
        forward: of(16, 16, 1),
        backward: of(16, 32, 4),
        backward_dq: of(32, 16, 2),
        kv_splits: Some(3),
    };
    let default = CudaOptions::default();
    let small = CudaOptions { kernels, ..default.clone() };
    let deterministic = CudaOptions { deterministic: true, ..default.clone() };
    let forced = |name, options, force: fn(CudaPlan) -> CudaPlan| {
        Box::new(Cuda { name, options, force, bounded, engine: engine.clone() })
    };
    let cuda = |name, options| forced(name, options, |plan| plan);
    let hopper = TileOptions { family: Some(Family::Hopper), ..TileOptions::default() };
    let forward = KernelOptions { forward: hopper, ..KernelOptions::default() };
    let backward =
        KernelOptions { backward: hopper, backward_dq: hopper, ..KernelOptions::default() };
    let [forward, backward] =
        [forward, backward].map(|kernels| CudaOptions { kernels, ..default.clone() });
    let has_hopper = engine.profile().runs_hopper();
    let mut backends: Vec<Box<dyn Backend>> = vec![
        cuda("cuda", default.clone()),
        cuda("cuda, small tiles", small),
        cuda("cuda, deterministic", deterministic),
        forced("cuda, lists of the host", default.clone(), CudaPlan::with_lists_of_the_host),
        forced("cuda, contents on the device", default, CudaPlan::with_contents_on_the_device),
        Box::new(Public { name: "public, cuda", device: Device::cuda(0) }),
    ];
    if has_hopper {
        let mut by_bits = [forward.clone(), backward.clone()];
        by_bits[0].kernels.forward.mask_bits = Some(true);
        by_bits[1].kernels.backward.mask_bits = Some(true);
        let [forward_by_bits, backward_by_bits] = by_bits;
        backends.push(cuda("cuda, hopper", forward));
        backends.push(cuda("cuda, mask bits", forward_by_bits));
        backends.push(cuda("cuda, mask bits backward", backward_by_bits));
        let fixed_order = CudaOptions { deterministic: true, ..backward.clone() };
        let mut in_order = fixed_order.clone();
        in_order.kernels.backward.ordered_dq = Some(true);
        backends.push(cuda("cuda, hopper backward", of_groups(backward.clone(), false)));
        backends.push(cuda("cuda, hopper backward by query heads", of_groups(backward, true)));
        backends.push(cuda("cuda, deterministic on hopper", of_groups(fixed_order, false)));
        backends.push(cuda("cuda, dq in order", of_groups(in_order.clone(), false)));
        backends.push(cuda("cuda, dq in order by query heads", of_groups(in_order, true)));
    }
    Ok(backends)
}

/// With dk and dv of query heads that are added up, or not.
fn of_groups(mut options: CudaOptions, split_gqa: bool) -> CudaOptions {
    options.kernels.backward.split_gqa = Some(split_gqa);
    options
}

struct Cuda {
    name: &'static str,
    options: CudaOptions,
    /// Puts a plan on paths that only some calls take.
    force: fn(CudaPlan) -> CudaPlan,
    /// Whether waits in kernels are bounded.
    bounded: bool,
    engine: Arc<Engine>,
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        self.name
    }

    fn prepare(
        &self,
        program: &Program,
        dims: &Dims,
        dtype: DType,
    ) -> Result<Box<dyn Prepared>, String> {
        let (engine, options) = (self.engine.clone(), self.options.clone());
        let plan = CudaPlan::new(engine, &program.local, dims, dtype, options);
        let plan = (self.force)(plan.map_err(|e| e.to_string())?);
        Ok(Box::new(if self.bounded { plan.with_bounded_waits() } else { plan }))
    }

    fn declines(&self, reason: &str) -> bool {
        let KernelOptions { forward, backward, .. } = &self.options.kernels;
        [(forward, "forward"), (backward, "backward")].into_iter().any(|(asked, pass)| {
            asked.family == Some(Family::Hopper)
                && reason.starts_with(&format!("no {pass} kernel for "))
        })
    }
}

impl Prepared for CudaPlan {
    fn forward(&self, args: ForwardArgs<'_>) -> Result<(), String> {
        CudaPlan::forward(self, args).map_err(|e| e.to_string())
    }

    fn backward(&self, args: BackwardArgs<'_>) -> Result<(), String> {
        CudaPlan::backward(self, args).map_err(|e| e.to_string())
    }

    fn approximates_tanh(&self) -> bool {
        true
    }
}

struct Cpu {
    name: &'static str,
    options: CpuOptions,
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        self.name
    }

    fn prepare(
        &self,
        program: &Program,
        dims: &Dims,
        dtype: DType,
    ) -> Result<Box<dyn Prepared>, String> {
        let plan = CpuPlan::new(&program.local, dims, dtype, self.options);
        Ok(Box::new(plan.map_err(|e| e.to_string())?))
    }
}

impl Prepared for CpuPlan {
    fn forward(&self, args: ForwardArgs<'_>) -> Result<(), String> {
        CpuPlan::forward(self, args).map_err(|e| e.to_string())
    }

    fn backward(&self, args: BackwardArgs<'_>) -> Result<(), String> {
        CpuPlan::backward(self, args).map_err(|e| e.to_string())
    }
}

/// What users call: the program in global positions, planned by the crate `foveate`.
struct Public {
    name: &'static str,
    device: Device,
}

impl Backend for Public {
    fn name(&self) -> &'static str {
        self.name
    }

    fn prepare(
        &self,
        program: &Program,
        dims: &Dims,
        dtype: DType,
    ) -> Result<Box<dyn Prepared>, String> {
        let Program { global, coordinates, seed, .. } = program;
        let mut program = Attention::new().coordinates(coordinates.clone());
        if let Some(mask) = &global.mask {
            program = program.mask(mask.clone());
        }
        if let Some(score) = &global.score {
            program = program.score(score.clone());
        }
        if let Some(scale) = global.scale {
            program = program.scale(scale);
        }
        if let Some(dropout) = &global.dropout {
            program = program.dropout(dropout.p(), *seed);
        }
        let problem = Problem::shaped(dtype, dims.q_shape(), dims.k_shape(), dims.v_shape());
        let plan = problem.and_then(|problem| program.plan(&problem, &self.device));
        Ok(Box::new(plan.map_err(|e| e.to_string())?))
    }
}

impl Prepared for Plan {
    fn forward(&self, args: ForwardArgs<'_>) -> Result<(), String> {
        self.forward_into(args).map_err(|e| e.to_string())
    }

    fn backward(&self, args: BackwardArgs<'_>) -> Result<(), String> {
        self.backward_into(args).map_err(|e| e.to_string())
    }

    fn approximates_tanh(&self) -> bool {
        self.cuda().is_some()
    }
}

/// The oracle's implementation in the operands' precision, written through the same destinations.
struct Plain;

struct PlainPlan(Spec);

impl Backend for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn prepare(&self, program: &Program, _: &Dims, _: DType) -> Result<Box<dyn Prepared>, String> {
        Ok(Box::new(PlainPlan(program.local.clone())))
    }
}

impl Prepared for PlainPlan {
    fn forward(&self, args: ForwardArgs<'_>) -> Result<(), String> {
        let ForwardArgs { operands, mut out, mut lse, max_score } = args;
        let found = low::forward(&self.0, &operands).map_err(|e| e.to_string())?;
        let statistics = low::statistics(&self.0, &operands).map_err(|e| e.to_string())?;
        write(&mut out, &found.out, None);
        write(&mut lse, &statistics.lse, None);
        if let Some(mut max_score) = max_score {
            write(&mut max_score, &statistics.max_score, None);
        }
        Ok(())
    }

    fn backward(&self, args: BackwardArgs<'_>) -> Result<(), String> {
        let BackwardArgs { operands, d_out, d_lse, mut dq, mut dk, mut dv, accumulate, .. } = args;
        // The destinations cannot be read, so this backend is told what they hold by the harness:
        // every element starts at one value.
        let start = accumulate.then_some(ACCUMULATE_START);
        let upstream = Upstream { d_out, d_lse };
        let found = low::backward(&self.0, &operands, &upstream).map_err(|e| e.to_string())?;
        for (into, found) in [(&mut dq, &found.dq), (&mut dk, &found.dk), (&mut dv, &found.dv)] {
            into.iter_mut().for_each(|into| write(into, found, start));
        }
        let add = |mut into: SliceMut<'_>, from: &[f64]| {
            let from: Vec<f32> = from.iter().map(|&x| x as f32).collect();
            into.store(&from, accumulate);
        };
        if let Some(d_sink) = args.d_sink {
            add(d_sink, &found.d_sink);
        }
        for grad in args.d_captures {
            add(grad.into, &found.captures[grad.name]);
        }
        Ok(())
    }
}

/// Row-major values into a destination; NaN is what a backend leaves alone.
fn write<const N: usize>(to: &mut TensorMut<'_, N>, values: &[f64], start: Option<f64>) {
    let mut values = values.iter();
    for index in indices(to.shape()) {
        let value = *values.next().expect("as many values as elements");
        if !value.is_nan() {
            to.write(index, value + start.unwrap_or(0.0));
        }
    }
}
