//! The product of gated MLPs.

use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceTensor, GpuError};

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{count, matrix, operand_dtype, vector};
use crate::params::GatedParams;

/// What the gate passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x · sigmoid(x)`: SwiGLU.
    Silu,
    /// `x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³)))`: GeGLU.
    Gelu,
}

/// `out = f(gate) · up`.
#[derive(Clone, Copy, Debug)]
pub struct Gated {
    /// f.
    pub activation: Activation,
    /// `[tokens, 2 width]`, f16, bf16 or f32: gate, then up.
    pub gate_up: DeviceTensor<2>,
    /// `[tokens, width]`, in the dtype of `gate_up`, written.
    pub out: DeviceTensor<2>,
}

/// Its gradient in place: `gate_up` becomes its gradient, and what holds the gradient of `out`
/// becomes `out`, which the gradient of the next weight is made of.
#[derive(Clone, Copy, Debug)]
pub struct GatedBackward {
    /// f.
    pub activation: Activation,
    /// As in [`Gated`]; overwritten.
    pub gate_up: DeviceTensor<2>,
    /// The gradient of `out`; overwritten.
    pub d_out: DeviceTensor<2>,
}

const THREADS: u32 = 256;

fn launch(
    entry: &'static str,
    activation: Activation,
    gate_up: &DeviceTensor<2>,
    (name, out): (&str, &DeviceTensor<2>),
) -> Result<KernelLaunch, GpuError> {
    let dtype = operand_dtype("gate_up", gate_up.dtype)?;
    let [tokens, width] = out.layout.shape;
    let gate_up = matrix("gate_up", gate_up, [tokens, 2 * width], dtype)?;
    let out = matrix(name, out, [tokens, width], dtype)?;
    let vector = vector(dtype, &[gate_up, out], &[width]);
    let file = File::Gated { gelu: activation == Activation::Gelu };
    let source = Source { file, dtype, vector, threads: THREADS };
    let parameters = GatedParams { gate_up, out, width: count("columns", width)? };
    KernelLaunch::new(
        &source,
        entry,
        [tokens, width.div_ceil(vector * THREADS as usize)],
        &parameters,
    )
}

impl Block for Gated {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        accesses.read("gate_up", &self.gate_up)?;
        accesses.write("out", &self.out)?;
        Ok(vec![launch("fv_gated", self.activation, &self.gate_up, ("out", &self.out))?])
    }
}

impl Block for GatedBackward {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        accesses.write("gate_up", &self.gate_up)?;
        accesses.write("d_out", &self.d_out)?;
        let d_out = ("d_out", &self.d_out);
        Ok(vec![launch("fv_gated_backward", self.activation, &self.gate_up, d_out)?])
    }
}
