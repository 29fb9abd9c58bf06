//! What lies between blocks whose operands are of different dtypes or apart.

use foveate_gpu::abi::Address;
use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceTensor, GpuError};
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{count, matrix, operand_dtype, vector};
use crate::params::{
    AddParams, AddRowsParams, ColumnSumsParams, CopyRowsParams, SumPartsParams, WidenParams,
};

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

fn source(dtype: DType, vector: usize) -> Source {
    Source { file: File::Vectors, dtype, vector, threads: THREADS }
}

fn grid(elems: usize) -> [usize; 2] {
    [elems.div_ceil(THREADS as usize), 1]
}

impl Block for Widen {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("from", self.from.dtype)?;
        let [elems] = self.from.layout.shape;
        self.from.check_side_by_side("from", elems, dtype)?;
        self.to.check_vector("to", elems)?;
        accesses.read("from", &self.from)?;
        accesses.write("to", &self.to)?;
        let (from, to) = (self.from.start(), self.to.start());
        let parameters = WidenParams { from, to, elems: elems as i64 };
        Ok(vec![KernelLaunch::new(&source(dtype, 1), "fv_widen", grid(elems), &parameters)?])
    }
}

impl Block for Add {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let [elems] = self.from.layout.shape;
        let dtype = operand_dtype("to", self.to.dtype)?;
        self.from.check_vector("from", elems)?;
        self.to.check_side_by_side("to", elems, dtype)?;
        accesses.read("from", &self.from)?;
        accesses.write("to", &self.to)?;
        let (from, to) = (self.from.start(), self.to.start());
        let parameters = AddParams { from, to, elems: elems as i64 };
        Ok(vec![KernelLaunch::new(&source(dtype, 1), "fv_add", grid(elems), &parameters)?])
    }
}

impl Block for CopyRows {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("from", self.from.dtype)?;
        let shape @ [rows, width] = self.from.layout.shape;
        let from = matrix("from", &self.from, shape, dtype)?;
        let to = matrix("to", &self.to, shape, dtype)?;
        accesses.read("from", &self.from)?;
        accesses.write("to", &self.to)?;
        let vector = vector(dtype, &[from, to], &[width]);
        let width = count("columns", width)?;
        let columns = (width as usize).div_ceil(vector * THREADS as usize);
        let parameters = CopyRowsParams { from, to, width };
        Ok(vec![KernelLaunch::new(
            &source(dtype, vector),
            "fv_copy_rows",
            [rows, columns],
            &parameters,
        )?])
    }
}

impl Block for AddRows {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("from", self.from.dtype)?;
        let shape @ [rows, width] = self.from.layout.shape;
        let from = matrix("from", &self.from, shape, dtype)?;
        let to = matrix("to", &self.to, shape, dtype)?;
        accesses.read("from", &self.from)?;
        accesses.write("to", &self.to)?;
        let vector = vector(dtype, &[from, to], &[width]);
        let columns = width.div_ceil(vector * THREADS as usize);
        let parameters = AddRowsParams { from, to, width: count("columns", width)? };
        let source = source(dtype, vector);
        Ok(vec![KernelLaunch::new(&source, "fv_add_rows", [rows, columns], &parameters)?])
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
