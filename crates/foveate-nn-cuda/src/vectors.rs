//! What lies between blocks whose operands are of different dtypes or apart.

use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceTensor, GpuError};
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{matrix, operand_dtype, vector};
use crate::params::{AddParams, CopyRowsParams, WidenParams};

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

const THREADS: u32 = 256;

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
        let width = crate::operands::count("columns", width)?;
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
