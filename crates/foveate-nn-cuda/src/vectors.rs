//! What lies between blocks whose operands are of different dtypes or apart.

use foveate_gpu::abi::Address;
use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceTensor, GpuError};
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{count, matrix, operand_dtype, vector};
use crate::params::{ColumnSumsParams, ElemsParams, RowsParams, SumPartsParams};

/// `to = from`, in f32.
#[derive(Clone, Copy, Debug)]
pub struct Widen {
    /// `[elems]`, f16, bf16 or f32.
    pub from: DeviceTensor<1>,
    /// f32 `[elems]`, written.
    pub to: DeviceTensor<1>,
}

/// `to += from`.
#[derive(Clone, Copy, Debug)]
pub struct Add {
    /// f32 `[elems]`.
    pub from: DeviceTensor<1>,
    /// `[elems]`, f16, bf16 or f32, added to.
    pub to: DeviceTensor<1>,
}

/// Rows of a matrix to rows elsewhere: new keys to their cache.
#[derive(Clone, Copy, Debug)]
pub struct CopyRows {
    /// `[rows, width]`, f16, bf16 or f32.
    pub from: DeviceTensor<2>,
    /// As `from`, written.
    pub to: DeviceTensor<2>,
}

/// `to += from`, in one dtype.
#[derive(Clone, Copy, Debug)]
pub struct AddRows {
    /// `[rows, width]`, f16, bf16 or f32.
    pub from: DeviceTensor<2>,
    /// As `from`, added to.
    pub to: DeviceTensor<2>,
}

/// `to[j] += Σ_i from[i, j]`: the gradient of a bias.
#[derive(Clone, Copy, Debug)]
pub struct ColumnSums {
    /// `[rows, width]`, f16, bf16 or f32.
    pub from: DeviceTensor<2>,
    /// `[width]`, f32 or in the dtype of `from`, added to.
    pub to: DeviceTensor<1>,
}

const THREADS: u32 = 256;

/// Threads of a CTA that sums columns.
const COLUMNS_THREADS: u32 = 512;

/// Columns that a CTA sums of `width`: as many as leave 128 CTAs, but a line of 16 bits at most and a sector of it
/// at least.
fn columns_of(width: usize, vector: usize) -> usize {
    (width / 128).max(1).next_power_of_two().clamp(16, 64).min(32 * vector)
}

/// Threads of a CTA that sums parts, and the columns of it.
const SUM_THREADS: u32 = 512;
const SUM_COLUMNS: usize = 8;

/// Adds up the rows of `partial`, f32 `[parts, width]`; the sum goes to `to`, which is f32 or of `dtype`,
/// or is added to it.
pub(crate) fn sum_parts(
    partial: Address,
    [parts, width]: [usize; 2],
    to: &DeviceTensor<1>,
    dtype: DType,
    accumulate: bool,
) -> Result<KernelLaunch, GpuError> {
    let is_f32 = to.dtype == DType::F32;
    to.check_side_by_side("sum", width, if is_f32 { DType::F32 } else { dtype })?;
    let source = Source { file: File::SumParts, dtype, vector: 1, threads: SUM_THREADS };
    let parameters = SumPartsParams {
        partial,
        sum: to.start(),
        parts: count("parts", parts)?,
        width: count("columns", width)?,
        accumulate: accumulate.into(),
        sum_is_f32: is_f32.into(),
    };
    KernelLaunch::new(&source, "fv_sum_parts", [width.div_ceil(SUM_COLUMNS), 1], &parameters)
}

/// A thread for each element, of which `dtype` is that of operands.
fn of_elems(
    entry: &'static str,
    dtype: DType,
    [from, to]: [&DeviceTensor<1>; 2],
    accesses: &mut Accesses,
) -> Result<Vec<KernelLaunch>, GpuError> {
    accesses.read("from", from)?;
    accesses.write("to", to)?;
    let [elems] = from.layout.shape;
    let parameters = ElemsParams { from: from.start(), to: to.start(), elems: elems as i64 };
    let source = Source { file: File::Vectors, dtype, vector: 1, threads: THREADS };
    let grid = [elems.div_ceil(THREADS as usize), 1];
    Ok(vec![KernelLaunch::new(&source, entry, grid, &parameters)?])
}

/// A thread for each vector of rows of one dtype.
fn of_rows(
    entry: &'static str,
    tensors: [&DeviceTensor<2>; 2],
    accesses: &mut Accesses,
) -> Result<Vec<KernelLaunch>, GpuError> {
    let dtype = operand_dtype("from", tensors[0].dtype)?;
    let shape @ [rows, width] = tensors[0].layout.shape;
    let from = matrix("from", tensors[0], shape, dtype)?;
    let to = matrix("to", tensors[1], shape, dtype)?;
    accesses.read("from", tensors[0])?;
    accesses.write("to", tensors[1])?;
    let vector = vector(dtype, &[from, to], &[width]);
    let parameters = RowsParams { from, to, width: count("columns", width)? };
    let source = Source { file: File::Vectors, dtype, vector, threads: THREADS };
    let grid = [rows, width.div_ceil(vector * THREADS as usize)];
    Ok(vec![KernelLaunch::new(&source, entry, grid, &parameters)?])
}

impl Block for Widen {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("from", self.from.dtype)?;
        let [elems] = self.from.layout.shape;
        self.from.check_side_by_side("from", elems, dtype)?;
        self.to.check_vector("to", elems)?;
        of_elems("fv_widen", dtype, [&self.from, &self.to], accesses)
    }
}

impl Block for Add {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("to", self.to.dtype)?;
        let [elems] = self.from.layout.shape;
        self.from.check_vector("from", elems)?;
        self.to.check_side_by_side("to", elems, dtype)?;
        of_elems("fv_add", dtype, [&self.from, &self.to], accesses)
    }
}

impl Block for CopyRows {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        of_rows("fv_copy_rows", [&self.from, &self.to], accesses)
    }
}

impl Block for AddRows {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        of_rows("fv_add_rows", [&self.from, &self.to], accesses)
    }
}

impl Block for ColumnSums {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("from", self.from.dtype)?;
        let shape @ [rows, width] = self.from.layout.shape;
        let from = matrix("from", &self.from, shape, dtype)?;
        let to_is_f32 = self.to.dtype == DType::F32;
        self.to.check_side_by_side("to", width, if to_is_f32 { DType::F32 } else { dtype })?;
        accesses.read("from", &self.from)?;
        accesses.write("to", &self.to)?;
        let vector = vector(dtype, &[from], &[width]);
        let columns = columns_of(width, vector);
        let file = File::ColumnSums { columns };
        let source = Source { file, dtype, vector, threads: COLUMNS_THREADS };
        let parameters = ColumnSumsParams {
            from,
            to: self.to.start(),
            rows: count("rows", rows)?,
            width: count("columns", width)?,
            to_is_f32: to_is_f32.into(),
        };
        let grid = [width.div_ceil(columns), 1];
        Ok(vec![KernelLaunch::new(&source, "fv_column_sums", grid, &parameters)?])
    }
}
