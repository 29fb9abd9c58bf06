//! Rotary positions on a packed projection.

use foveate_gpu::abi::Address;
use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceArray, DeviceTensor, GpuError};
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{count, dense, integers, matrix, operand_dtype, vector};
use crate::params::RopeParams;

/// Which columns of a head are a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// A column and the one half of the rotated columns later.
    Halves,
    /// Two neighbours.
    Neighbours,
}

/// By what heads turn: the angles of their tokens' positions. A pair (a, b) becomes
/// `(a·cos − b·sin, b·cos + a·sin)`.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a> {
    /// i32 `[tokens]`: rows of `table`.
    pub positions: DeviceArray<'a>,
    /// f32 `[positions, rotated]`, side by side: cosines of a position's `rotated / 2` angles, then
    /// sines. Columns of a head from `rotated` on stay as they are.
    pub table: DeviceTensor<2>,
    /// Which columns are a pair.
    pub pairing: Pairing,
}

/// A [`Turn`] as kernels take it.
pub(crate) struct TurnParams {
    pub positions: Address,
    pub table: Address,
    pub rotated: usize,
}

impl Turn<'_> {
    /// Checks it for heads of `dim` columns of so many tokens, and notes that it is read.
    pub(crate) fn check(
        &self,
        tokens: usize,
        dim: usize,
        accesses: &mut Accesses,
    ) -> Result<TurnParams, GpuError> {
        let [positions, rotated] = self.table.layout.shape;
        if rotated % 2 != 0 || rotated == 0 || rotated > dim {
            return Err(GpuError::argument(format!(
                "the table has {rotated} columns; it must have an even number up to the {dim} of a head"
            )));
        }
        let table = dense("table", &self.table, [positions, rotated], DType::F32)?;
        integers("positions", &self.positions, tokens)?;
        accesses.read("table", &self.table)?;
        accesses.read_array("positions", &self.positions)?;
        Ok(TurnParams { positions: self.positions.address, table, rotated })
    }
}

/// Turns query and key heads in place.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    /// `[tokens, width]`, f16, bf16 or f32: the heads that turn come first, side by side.
    pub qkv: DeviceTensor<2>,
    /// Heads that turn: those of queries and keys.
    pub heads: usize,
    /// Columns of a head.
    pub dim: usize,
    /// By what.
    pub turn: Turn<'a>,
    /// The other way round: the backward pass.
    pub back: bool,
}

const THREADS: u32 = 128;

impl Block for Rope<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("qkv", self.qkv.dtype)?;
        let shape @ [tokens, width] = self.qkv.layout.shape;
        let Self { heads, dim, .. } = *self;
        if heads.checked_mul(dim).is_none_or(|columns| columns > width) {
            return Err(GpuError::argument(format!(
                "{heads} heads of {dim} columns are more than the {width} columns of qkv"
            )));
        }
        let qkv = matrix("qkv", &self.qkv, shape, dtype)?;
        accesses.write("qkv", &self.qkv)?;
        let TurnParams { positions, table, rotated } = self.turn.check(tokens, dim, accesses)?;
        let vector = vector(dtype, &[qkv], &[dim, rotated / 2]);
        let file = File::Rope { neighbours: self.turn.pairing == Pairing::Neighbours };
        let source = Source { file, dtype, vector, threads: THREADS };
        let parameters = RopeParams {
            qkv,
            positions,
            table,
            heads: count("heads", heads)?,
            dim: count("columns", dim)?,
            rotated: count("columns", rotated)?,
            sign: if self.back { -1.0 } else { 1.0 },
        };
        let vectors = heads * (rotated / 2 / vector);
        let grid = [tokens, vectors.div_ceil(THREADS as usize)];
        Ok(vec![KernelLaunch::new(&source, "fv_rope", grid, &parameters)?])
    }
}
