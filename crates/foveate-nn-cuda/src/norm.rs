//! RMSNorm, of a matrix or of the sum of two, and its gradient.

use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceTensor, GpuError};
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{count, dense, matrix, one_row, operand_dtype, vector, whole_f32};
use crate::params::{RmsNormBackwardParams, RmsNormParams, Rows};
use crate::vectors::sum_parts;

/// `inverse = 1/√(mean(x²) + eps)` of each row, `out = x · inverse · (offset + weight)`; with a
/// residual of `x + residual`, rounded to the operands' dtype.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// `[tokens, width]`, f16, bf16 or f32.
    pub x: DeviceTensor<2>,
    /// What is added to x first, and where the sum goes, which may be x itself; both as x.
    pub residual: Option<(DeviceTensor<2>, DeviceTensor<2>)>,
    /// `[width]`, in the dtype of x.
    pub weight: DeviceTensor<1>,
    /// f32 `[tokens]`, written.
    pub inverse: DeviceTensor<1>,
    /// As x, written.
    pub out: DeviceTensor<2>,
    /// Added to the mean square.
    pub eps: f32,
    /// 0, or 1 where the weight is a distance from 1 (Gemma).
    pub offset: f32,
}

/// `out` of [`RmsNorm`] once more, to the bit, from x (or the sum) and `inverse`.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormAgain {
    /// What was normalised: `[tokens, width]`.
    pub x: DeviceTensor<2>,
    /// `[width]`, in the dtype of x.
    pub weight: DeviceTensor<1>,
    /// f32 `[tokens]`.
    pub inverse: DeviceTensor<1>,
    /// As x, written.
    pub out: DeviceTensor<2>,
    /// As in [`RmsNorm`].
    pub offset: f32,
}

/// Gradients of [`RmsNorm`].
#[derive(Clone, Copy, Debug)]
pub struct RmsNormBackward {
    /// What was normalised: `[tokens, width]`.
    pub x: DeviceTensor<2>,
    /// `[width]`, in the dtype of x.
    pub weight: DeviceTensor<1>,
    /// f32 `[tokens]`.
    pub inverse: DeviceTensor<1>,
    /// As x.
    pub d_out: DeviceTensor<2>,
    /// As x, written; may be `d_out`.
    pub d_x: DeviceTensor<2>,
    /// Add to what is in `d_x`.
    pub accumulate: bool,
    /// What [`RmsNormAgain`] gives, as x, written in the same pass; none where nobody needs it.
    pub again: Option<DeviceTensor<2>>,
    /// `[width]`, f32 or in the dtype of x, written; none where the weight is not trained.
    pub d_weight: Option<DeviceTensor<1>>,
    /// Add to what is in `d_weight`.
    pub accumulate_weight: bool,
    /// f32 `[parts(tokens), width]`, side by side: scratch.
    pub partial: DeviceTensor<2>,
    /// As in [`RmsNorm`].
    pub offset: f32,
}

/// Rows of the scratch of [`RmsNormBackward`].
pub fn parts(tokens: usize) -> usize {
    tokens.min(512)
}

/// Elements of a row that a thread holds, about.
const HELD_ELEMS: usize = 16;

/// Columns of the widest row: `HELD_ELEMS` for each of 1024 threads, or half of them where an element
/// takes a register of its own.
fn most_columns(dtype: DType) -> usize {
    HELD_ELEMS * if dtype.bytes() == 2 { 1024 } else { 512 }
}

/// The file for rows of `width` columns.
fn source(dtype: DType, width: usize, vector: usize) -> Result<Source, GpuError> {
    let most = most_columns(dtype);
    if width == 0 || width > most {
        return Err(GpuError::argument(format!(
            "RMSNorm of {width} columns of {dtype}; it takes 1 to {most}"
        )));
    }
    let threads = width.div_ceil(HELD_ELEMS).next_power_of_two().max(32);
    let held = width.div_ceil(vector * threads);
    Ok(Source { file: File::RmsNorm { held }, dtype, vector, threads: threads as u32 })
}

/// The file and the kernel of gradients for rows of `width` columns. A warp holds a row of up to 1,024, and 512 CTAs of
/// four find place on the card at once. Of up to 2,048 a CTA has one of 256 threads for eight elements each.
fn source_of_gradients(
    dtype: DType,
    width: usize,
    vector: usize,
) -> Result<(Source, &'static str), GpuError> {
    let held = width.div_ceil(32 * vector);
    if (1..=32).contains(&(held * vector)) {
        let file = File::RmsNormRows { held };
        let source = Source { file, dtype, vector, threads: 128 };
        return Ok((source, "fv_rms_norm_backward_rows"));
    }
    let of_cta = source(dtype, width, vector)?;
    let source = match width {
        ..=2048 => {
            Source { file: File::RmsNorm { held: 8usize.div_ceil(vector) }, threads: 256, ..of_cta }
        }
        _ => of_cta,
    };
    Ok((source, "fv_rms_norm_backward"))
}

impl Block for RmsNorm {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("x", self.x.dtype)?;
        let shape @ [tokens, width] = self.x.layout.shape;
        self.weight.check_side_by_side("weight", width, dtype)?;
        self.inverse.check_vector("inverse", tokens)?;
        let x = matrix("x", &self.x, shape, dtype)?;
        let out = matrix("out", &self.out, shape, dtype)?;
        let (mut residual, mut sum) = (Rows::default(), Rows::default());
        let in_place = self.residual.is_some_and(|(_, sum)| sum == self.x);
        if let Some((added, to)) = &self.residual {
            residual = matrix("residual", added, shape, dtype)?;
            sum = matrix("sum", to, shape, dtype)?;
            accesses.read("residual", added)?;
            accesses.write("sum", to)?;
        }
        if !in_place {
            accesses.read("x", &self.x)?;
        }
        accesses.read("weight", &self.weight)?;
        accesses.write("inverse", &self.inverse)?;
        accesses.write("out", &self.out)?;
        let vector = vector(dtype, &[x, out, residual, sum, one_row(&self.weight)], &[width]);
        let source = source(dtype, width, vector)?;
        let parameters = RmsNormParams {
            x,
            residual,
            sum,
            out,
            weight: self.weight.start(),
            inverse: self.inverse.start(),
            width: count("columns", width)?,
            eps: self.eps,
            offset: self.offset,
        };
        Ok(vec![KernelLaunch::new(&source, "fv_rms_norm", [tokens, 1], &parameters)?])
    }
}

impl Block for RmsNormAgain {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("x", self.x.dtype)?;
        let shape @ [tokens, width] = self.x.layout.shape;
        self.weight.check_side_by_side("weight", width, dtype)?;
        self.inverse.check_vector("inverse", tokens)?;
        let x = matrix("x", &self.x, shape, dtype)?;
        let out = matrix("out", &self.out, shape, dtype)?;
        accesses.read("x", &self.x)?;
        accesses.read("weight", &self.weight)?;
        accesses.read("inverse", &self.inverse)?;
        accesses.write("out", &self.out)?;
        let vector = vector(dtype, &[x, out, one_row(&self.weight)], &[width]);
        let source = source(dtype, width, vector)?;
        let parameters = RmsNormParams {
            x,
            out,
            weight: self.weight.start(),
            inverse: self.inverse.start(),
            width: count("columns", width)?,
            offset: self.offset,
            ..RmsNormParams::default()
        };
        Ok(vec![KernelLaunch::new(&source, "fv_rms_norm_again", [tokens, 1], &parameters)?])
    }
}

impl Block for RmsNormBackward {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("x", self.x.dtype)?;
        let shape @ [tokens, width] = self.x.layout.shape;
        let parts = parts(tokens);
        self.weight.check_side_by_side("weight", width, dtype)?;
        self.inverse.check_vector("inverse", tokens)?;
        let x = matrix("x", &self.x, shape, dtype)?;
        let d_out = matrix("d_out", &self.d_out, shape, dtype)?;
        let d_x = matrix("d_x", &self.d_x, shape, dtype)?;
        let partial = dense("partial", &self.partial, [parts, width], DType::F32)?;
        if self.d_x != self.d_out {
            accesses.read("d_out", &self.d_out)?;
        }
        accesses.read("x", &self.x)?;
        accesses.read("weight", &self.weight)?;
        accesses.read("inverse", &self.inverse)?;
        accesses.write("d_x", &self.d_x)?;
        let mut again = Rows::default();
        if let Some(out) = &self.again {
            again = matrix("again", out, shape, dtype)?;
            accesses.write("again", out)?;
        }
        if let Some(d_weight) = &self.d_weight {
            accesses.write("d_weight", d_weight)?;
        }
        accesses.write("partial", &self.partial)?;
        let rows = [x, d_out, d_x, again, one_row(&self.weight)];
        let vector = if whole_f32(partial) { vector(dtype, &rows, &[width]) } else { 1 };
        let (source, entry) = source_of_gradients(dtype, width, vector)?;
        let columns = width;
        let width = count("columns", width)?;
        let backward = RmsNormBackwardParams {
            x,
            d_out,
            d_x,
            again,
            weight: self.weight.start(),
            inverse: self.inverse.start(),
            partial,
            rows: count("tokens", tokens)?,
            width,
            accumulate: self.accumulate.into(),
            offset: self.offset,
        };
        let mut launches = vec![KernelLaunch::new(&source, entry, [parts, 1], &backward)?];
        if let Some(d_weight) = &self.d_weight {
            let sizes = [parts, columns];
            launches.push(sum_parts(partial, sizes, d_weight, dtype, self.accumulate_weight)?);
        }
        Ok(launches)
    }
}
