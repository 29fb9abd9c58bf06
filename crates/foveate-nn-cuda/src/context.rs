//! Attention whose tokens are on several ranks: partial results joined, and gradients of keys brought together.

use std::ops::Range;

use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, GpuError};
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{array, count, dense, matrix, one_row, operand_dtype, vector, whole_f32};
use crate::params::{JoinParams, SumKeysParams};

const THREADS: u32 = 256;

/// Attention over some keys and over others becomes that over both, in f32: rows of `out` are divided by their
/// denominators, `lse` has the natural logs of these, -∞ where a row sees no key.
#[derive(Clone, Debug)]
pub struct Join {
    /// f32 `[rows, len, heads, dim]`, written where `to` is none.
    pub out: DeviceTensor<4>,
    /// f32 `[rows, heads, len]`.
    pub lse: DeviceTensor<3>,
    /// The tokens of each row that see other keys, which `part` has.
    pub tokens: Range<usize>,
    /// Over other keys, f32 `[rows, tokens, heads, dim]`.
    pub part: DeviceTensor<4>,
    /// f32 `[rows, heads, tokens]`.
    pub part_lse: DeviceTensor<3>,
    /// As `out`, in `dtype`, written; none for `out` itself.
    pub to: Option<DeviceTensor<4>>,
    /// As `lse`, written.
    pub to_lse: DeviceTensor<3>,
    /// Of operands.
    pub dtype: DType,
}

/// `to[row]` = the sum over parts of `from[sources[part, row]]`, in order of part, in f32, rounded once.
#[derive(Clone, Copy, Debug)]
pub struct SumKeys<'a> {
    /// f32 `[all rows, width]`.
    pub from: DeviceTensor<2>,
    /// i32 `[parts, rows]`, -1 where a part has nothing for a row.
    pub sources: DeviceArray<'a>,
    /// `[rows, width]`, f16, bf16 or f32, written.
    pub to: DeviceTensor<2>,
}

impl Block for Join {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("to", self.dtype)?;
        let [rows, len, heads, dim] = self.out.layout.shape;
        let Range { start, end } = self.tokens;
        if start > end || end > len {
            let given = format!("tokens {start}..{end} of rows of {len}; give some of them");
            return Err(GpuError::argument(given));
        }
        let contiguous = |name: &str, tensor: &DeviceTensor<4>, dtype, len: usize| {
            tensor.check_dtype(name, dtype)?;
            let flat = DeviceTensor::contiguous(tensor.address, dtype, [rows, len, heads, dim]);
            match tensor.layout == flat.layout {
                true => {
                    Ok(DeviceTensor::contiguous(tensor.address, dtype, [rows * len * heads * dim]))
                }
                false => Err(GpuError::argument(format!("{name} is {tensor}; it must be {flat}"))),
            }
        };
        let out = contiguous("out", &self.out, DType::F32, len)?;
        let part = contiguous("part", &self.part, DType::F32, end - start)?;
        let to = self.to.map(|to| contiguous("to", &to, dtype, len)).transpose()?;
        let statistics = [
            ("lse", self.lse, len),
            ("part_lse", self.part_lse, end - start),
            ("to_lse", self.to_lse, len),
        ];
        for (name, lse, len) in statistics {
            lse.check_dtype(name, DType::F32)?;
            let flat = DeviceTensor::contiguous(lse.address, DType::F32, [rows, heads, len]);
            if lse.layout != flat.layout {
                return Err(GpuError::argument(format!("{name} is {lse}; it must be {flat}")));
            }
        }
        match &to {
            Some(to) => {
                accesses.read("out", &out)?;
                accesses.write("to", to)?;
            }
            None => accesses.write("out", &out)?,
        }
        accesses.read("lse", &self.lse)?;
        accesses.read("part", &part)?;
        accesses.read("part_lse", &self.part_lse)?;
        accesses.write("to_lse", &self.to_lse)?;
        let narrow: Vec<_> = to.iter().map(one_row).collect();
        let vector = match [&out, &part].iter().all(|wide| whole_f32(wide.start())) {
            true => vector(dtype, &narrow, &[dim]),
            false => 1,
        };
        let elems = rows * len * heads * dim;
        let parameters = JoinParams {
            out: out.start(),
            lse: self.lse.start(),
            part: part.start(),
            part_lse: self.part_lse.start(),
            to: to.unwrap_or(out).start(),
            to_lse: self.to_lse.start(),
            elems: elems as i64,
            heads: count("heads", heads)?,
            len: count("tokens", len)?,
            dim: count("columns", dim)?,
            to_is_f32: to.is_none().into(),
            first: count("tokens", start)?,
            count: count("tokens", end - start)?,
        };
        let source = Source { file: File::Context, dtype, vector, threads: THREADS };
        let grid = [elems.div_ceil(vector * THREADS as usize), 1];
        Ok(vec![KernelLaunch::new(&source, "fv_join", grid, &parameters)?])
    }
}

impl Block for SumKeys<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("to", self.to.dtype)?;
        let [rows, width] = self.to.layout.shape;
        let [all, _] = self.from.layout.shape;
        let from = dense("from", &self.from, [all, width], DType::F32)?;
        let to = matrix("to", &self.to, [rows, width], dtype)?;
        let parts = self.sources.shape.first().map_or(0, |len| len / rows.max(1));
        array("sources", &self.sources, ElementType::I32, parts * rows)?;
        accesses.read_array("sources", &self.sources)?;
        accesses.read("from", &self.from)?;
        accesses.write("to", &self.to)?;
        let vector = match whole_f32(from) {
            true => vector(dtype, &[to], &[width]),
            false => 1,
        };
        let parameters = SumKeysParams {
            from,
            sources: self.sources.address,
            to,
            parts: count("parts", parts)?,
            rows: count("rows", rows)?,
            width: count("columns", width)?,
        };
        let source = Source { file: File::Context, dtype, vector, threads: THREADS };
        let grid = [rows, width.div_ceil(vector * THREADS as usize)];
        Ok(vec![KernelLaunch::new(&source, "fv_sum_keys", grid, &parameters)?])
    }
}
