//! Gradients of several ranks: rounded on their way, and summed in order of rank.

use foveate_gpu::abi::Address;
use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceTensor, GpuError};
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{one_row, operand_dtype, vector, whole_f32};
use crate::params::{NarrowParams, SumRanksParams};

/// Ranks whose gradients a launch adds.
const RANKS: usize = 32;

const THREADS: u32 = 256;

/// `to = from`, rounded to the nearest.
#[derive(Clone, Copy, Debug)]
pub struct Narrow {
    /// f32 `[elems]`.
    pub from: DeviceTensor<1>,
    /// `[elems]`, f16, bf16 or f32, written.
    pub to: DeviceTensor<1>,
}

/// `to = from[0] + from[1] + …`, in f32 and in this order, rounded once.
#[derive(Clone, Copy, Debug)]
pub struct SumRanks<'a> {
    /// `[elems]` of each rank, at least one, all f16, bf16 or f32.
    pub from: &'a [DeviceTensor<1>],
    /// `[elems]`, f32 or as `from`, written.
    pub to: DeviceTensor<1>,
    /// Whether the sum is added to what is there.
    pub accumulate: bool,
}

fn source(dtype: DType, vector: usize) -> Source {
    Source { file: File::Ranks, dtype, vector, threads: THREADS }
}

fn grid(elems: usize, vector: usize) -> [usize; 2] {
    [elems.div_ceil(vector * THREADS as usize), 1]
}

/// Elements of `dtype` that a thread takes at once, beside f32 numbers at `wide`.
fn at_once(
    dtype: DType,
    elems: usize,
    operands: &[DeviceTensor<1>],
    wide: Option<Address>,
) -> usize {
    let rows: Vec<_> = operands.iter().map(one_row).collect();
    match wide.is_none_or(whole_f32) {
        true => vector(dtype, &rows, &[elems]),
        false => 1,
    }
}

impl Block for Narrow {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("to", self.to.dtype)?;
        let [elems] = self.to.layout.shape;
        self.from.check_vector("from", elems)?;
        self.to.check_side_by_side("to", elems, dtype)?;
        accesses.read("from", &self.from)?;
        accesses.write("to", &self.to)?;
        let (from, to) = (self.from.start(), self.to.start());
        let vector = at_once(dtype, elems, &[self.to], Some(from));
        let parameters = NarrowParams { from, to, elems: elems as i64 };
        let source = source(dtype, vector);
        Ok(vec![KernelLaunch::new(&source, "fv_narrow", grid(elems, vector), &parameters)?])
    }
}

impl Block for SumRanks<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let Some(first) = self.from.first() else {
            return Err(GpuError::argument("there is no rank whose gradients are summed"));
        };
        let dtype = operand_dtype("from", first.dtype)?;
        let [elems] = self.to.layout.shape;
        let to_is_f32 = self.to.dtype == DType::F32;
        self.to.check_side_by_side("to", elems, if to_is_f32 { DType::F32 } else { dtype })?;
        for from in self.from {
            from.check_side_by_side("from", elems, dtype)?;
            accesses.read("from", from)?;
        }
        accesses.write("to", &self.to)?;
        let to = self.to.start();
        let narrow = (!to_is_f32).then_some(self.to);
        let operands: Vec<_> = self.from.iter().copied().chain(narrow).collect();
        let vector = at_once(dtype, elems, &operands, to_is_f32.then_some(to));
        let source = source(dtype, vector);
        if self.from.len() > RANKS && !to_is_f32 {
            let reason =
                format!("{} ranks are summed in f32, at most {RANKS} in {dtype}", self.from.len());
            return Err(GpuError::argument(reason));
        }
        let launch = |(number, some): (usize, &[DeviceTensor<1>])| {
            let mut from = [0; RANKS];
            from.iter_mut().zip(some).for_each(|(into, one)| *into = one.start());
            let parameters = SumRanksParams {
                from,
                to,
                elems: elems as i64,
                ranks: some.len() as i32,
                accumulate: (self.accumulate || number > 0).into(),
                to_is_f32: to_is_f32.into(),
                unused: 0,
            };
            KernelLaunch::new(&source, "fv_sum_ranks", grid(elems, vector), &parameters)
        };
        self.from.chunks(RANKS).enumerate().map(launch).collect()
    }
}
