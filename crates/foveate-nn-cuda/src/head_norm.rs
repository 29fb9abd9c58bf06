//! RMSNorm of each query and key head of a packed projection, and its gradient.

use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceTensor, GpuError};
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source, heads_ahead};
use crate::operands::{count, dense, matrix, one_row, operand_dtype, vector, whole_f32};
use crate::params::{HeadNormBackwardParams, HeadNormParams, Rows};
use crate::rope::{Pairing, Turn, TurnParams};
use crate::vectors::sum_parts;

/// Which heads lie in a packed projection: all of queries, all of keys, all of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Of queries.
    pub queries: usize,
    /// Of keys, and as many of values.
    pub keys: usize,
    /// Columns of a head.
    pub dim: usize,
}

impl Heads {
    /// Columns of the projection.
    pub fn width(&self) -> usize {
        (self.queries + 2 * self.keys) * self.dim
    }

    /// Heads that are normalised.
    pub fn normalised(&self) -> usize {
        self.queries + self.keys
    }
}

/// Of each query and key head `inverse = 1/√(mean(x²) + eps)`, `out = x · inverse · (offset +
/// weight)`, which is turned; value heads are copied.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// Which heads.
    pub heads: Heads,
    /// `[tokens, heads.width()]`, f16, bf16 or f32.
    pub qkv: DeviceTensor<2>,
    /// `[2 · dim]`, in the dtype of qkv: of query heads, then of key heads.
    pub weight: DeviceTensor<1>,
    /// f32 `[tokens · heads.normalised()]`, written.
    pub inverse: DeviceTensor<1>,
    /// As qkv, written.
    pub out: DeviceTensor<2>,
    /// Added to the mean square.
    pub eps: f32,
    /// 0, or 1 where weights are distances from 1.
    pub offset: f32,
    /// By what, where heads turn.
    pub turn: Option<Turn<'a>>,
}

/// Gradients of [`HeadNorm`].
#[derive(Clone, Copy, Debug)]
pub struct HeadNormBackward<'a> {
    /// Which heads.
    pub heads: Heads,
    /// What was normalised: `[tokens, heads.width()]`.
    pub qkv: DeviceTensor<2>,
    /// `[2 · dim]`, in the dtype of qkv.
    pub weight: DeviceTensor<1>,
    /// f32 `[tokens · heads.normalised()]`.
    pub inverse: DeviceTensor<1>,
    /// As qkv: the gradient of `out`, which becomes that of qkv.
    pub d_qkv: DeviceTensor<2>,
    /// `[2 · dim]`, f32 or in the dtype of qkv, added to; none where the weights are not trained.
    pub d_weight: Option<DeviceTensor<1>>,
    /// f32 `[parts(tokens), 2 · dim]`, side by side: scratch.
    pub partial: DeviceTensor<2>,
    /// As in [`HeadNorm`].
    pub offset: f32,
    /// As in [`HeadNorm`].
    pub turn: Option<Turn<'a>>,
}

const THREADS: u32 = 128;
const WARPS: usize = THREADS as usize / 32;

/// Columns of the longest head.
const MOST_COLUMNS: usize = 512;

/// Rows of the scratch of [`HeadNormBackward`].
pub fn parts(tokens: usize) -> usize {
    tokens.div_ceil(WARPS).clamp(1, 512)
}

/// How heads of `dim` columns turn, if they do: as kernels take it, and the columns of a pair's halves.
fn turned(
    turn: &Option<Turn<'_>>,
    [tokens, dim]: [usize; 2],
    accesses: &mut Accesses,
) -> Result<(TurnParams, usize), GpuError> {
    match turn {
        None => Ok((TurnParams { positions: 0, table: 0, rotated: 0 }, dim)),
        Some(turn) => {
            let turn = turn.check(tokens, dim, accesses)?;
            let half = turn.rotated / 2;
            Ok((turn, half))
        }
    }
}

/// [`vector`], of which angles are read as many at once.
fn vector_beside(turn: &TurnParams, dtype: DType, rows: &[Rows], columns: &[usize]) -> usize {
    if whole_f32(turn.table) { vector(dtype, rows, columns) } else { 1 }
}

/// Lanes that a head takes, and vectors of it that each holds.
pub(crate) fn lanes_of(dim: usize, vector: usize) -> (usize, usize) {
    let vectors = dim.div_ceil(vector);
    let lanes = vectors.next_power_of_two().min(32);
    (lanes, vectors.div_ceil(lanes))
}

fn source(
    dtype: DType,
    dim: usize,
    vector: usize,
    turn: &Option<Turn<'_>>,
) -> Result<Source, GpuError> {
    if dim == 0 || dim > MOST_COLUMNS {
        return Err(GpuError::argument(format!(
            "RMSNorm of heads of {dim} columns; it takes 1 to {MOST_COLUMNS}"
        )));
    }
    let (lanes, held) = lanes_of(dim, vector);
    let turn = turn.map(|turn| turn.pairing == Pairing::Neighbours);
    let file = File::HeadNorm { lanes, held, turn };
    Ok(Source { file, dtype, vector, threads: THREADS })
}

impl Block for HeadNorm<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let (dtype, heads) = (operand_dtype("qkv", self.qkv.dtype)?, self.heads);
        let tokens = self.qkv.layout.shape[0];
        let shape = [tokens, heads.width()];
        let qkv = matrix("qkv", &self.qkv, shape, dtype)?;
        let out = matrix("out", &self.out, shape, dtype)?;
        self.weight.check_side_by_side("weight", 2 * heads.dim, dtype)?;
        self.inverse.check_vector("inverse", tokens * heads.normalised())?;
        accesses.read("qkv", &self.qkv)?;
        accesses.read("weight", &self.weight)?;
        accesses.write("inverse", &self.inverse)?;
        accesses.write("out", &self.out)?;
        let (turn, half) = turned(&self.turn, [tokens, heads.dim], accesses)?;
        let rows = [qkv, out, one_row(&self.weight)];
        let vector = vector_beside(&turn, dtype, &rows, &[heads.dim, half]);
        let source = source(dtype, heads.dim, vector, &self.turn)?;
        let parameters = HeadNormParams {
            qkv,
            out,
            weight: self.weight.start(),
            inverse: self.inverse.start(),
            positions: turn.positions,
            table: turn.table,
            tokens: count("tokens", tokens)?,
            heads_q: count("heads", heads.queries)?,
            heads_kv: count("heads", heads.keys)?,
            dim: count("columns", heads.dim)?,
            rotated: count("columns", turn.rotated)?,
            eps: self.eps,
            offset: self.offset,
        };
        let (lanes, held) = lanes_of(heads.dim, vector);
        let of_cta = heads_ahead(held) * THREADS as usize / lanes;
        // Angles wait for positions: a CTA that has two tokens asks for those of the second before.
        let of_grid = if self.turn.is_some() { tokens.div_ceil(2) } else { tokens };
        let grid = [of_grid, (heads.queries + 2 * heads.keys).div_ceil(of_cta)];
        Ok(vec![KernelLaunch::new(&source, "fv_head_norm", grid, &parameters)?])
    }
}

impl Block for HeadNormBackward<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let (dtype, heads) = (operand_dtype("qkv", self.qkv.dtype)?, self.heads);
        let tokens = self.qkv.layout.shape[0];
        let shape = [tokens, heads.width()];
        let (columns, parts) = (2 * heads.dim, parts(tokens));
        let qkv = matrix("qkv", &self.qkv, shape, dtype)?;
        let d_qkv = matrix("d_qkv", &self.d_qkv, shape, dtype)?;
        let partial = dense("partial", &self.partial, [parts, columns], DType::F32)?;
        self.weight.check_side_by_side("weight", columns, dtype)?;
        self.inverse.check_vector("inverse", tokens * heads.normalised())?;
        accesses.read("qkv", &self.qkv)?;
        accesses.read("weight", &self.weight)?;
        accesses.read("inverse", &self.inverse)?;
        accesses.write("d_qkv", &self.d_qkv)?;
        if let Some(d_weight) = &self.d_weight {
            accesses.write("d_weight", d_weight)?;
        }
        accesses.write("partial", &self.partial)?;
        let (turn, half) = turned(&self.turn, [tokens, heads.dim], accesses)?;
        let rows = [qkv, d_qkv, one_row(&self.weight)];
        let vector = vector_beside(&turn, dtype, &rows, &[heads.dim, half]);
        let source = source(dtype, heads.dim, vector, &self.turn)?;
        let parameters = HeadNormBackwardParams {
            qkv,
            d_qkv,
            weight: self.weight.start(),
            inverse: self.inverse.start(),
            partial,
            positions: turn.positions,
            table: turn.table,
            tokens: count("tokens", tokens)?,
            heads_q: count("heads", heads.queries)?,
            heads_kv: count("heads", heads.keys)?,
            dim: count("columns", heads.dim)?,
            rotated: count("columns", turn.rotated)?,
            offset: self.offset,
        };
        let grid = [parts, 1];
        let mut launches =
            vec![KernelLaunch::new(&source, "fv_head_norm_backward", grid, &parameters)?];
        if let Some(d_weight) = &self.d_weight {
            launches.push(sum_parts(partial, [parts, columns], d_weight, dtype, true)?);
        }
        Ok(launches)
    }
}
