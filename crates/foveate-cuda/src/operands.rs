//! What attention reads and writes in device memory, and whether it fits together: shapes, dtypes,
//! groups of heads, pages, offsets. Whether the memory is the device's, and destinations are apart,
//! is [`foveate_gpu::access`]'s.

#[cfg(test)]
mod tests;
mod varlen;

use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType};
use foveate_mods::AnyBuffer;
use foveate_problem::{Arrangement, Dims, Operands, ScaleBlocks};
use foveate_tensor::{DType, TensorRef};

use crate::compile::config::Elem;
use crate::compile::params::{Address, RowView, View};
use crate::error::CudaError;
pub use varlen::{DeviceOffsets, DeviceVarlen};

/// What attention reads, in device memory; shapes as in [`Operands`].
#[derive(Clone, Copy, Debug)]
pub struct DeviceOperands<'a> {
    /// Queries.
    pub q: DeviceTensor,
    /// Keys.
    pub k: DeviceTensor,
    /// Values.
    pub v: DeviceTensor,
    /// A logit per query head that joins the softmax's denominator only, f32 `[Hq]`.
    pub sink: Option<DeviceTensor<1>>,
    /// Sequence offsets of packed operands.
    pub varlen: Option<DeviceVarlen<'a>>,
    /// The pages that k and v lie in, for a forward.
    pub pages: Option<DevicePages<'a>>,
    /// What the elements of f8e4m3 operands are multiplied by; `None` is 1.
    pub scales: Option<DeviceScales>,
    /// Captured buffers by name that lie in device memory. One takes the place of the buffer of
    /// that name in the plan, whose type and number of axes it has; the lengths are its own.
    pub captures: &'a [(&'a str, DeviceArray<'a>)],
}

/// Operands and destinations of a forward pass, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceForward<'a> {
    /// What is read.
    pub operands: DeviceOperands<'a>,
    /// `out [B, Hq, Sq, Dv]`, f16, bf16 or f32.
    pub out: DeviceTensor,
    /// Natural log of the softmax's denominator, f32 `[B, Hq, Sq]`.
    pub lse: DeviceTensor<3>,
    /// Largest score of each row, f32 `[B, Hq, Sq]`.
    pub max_score: Option<DeviceTensor<3>>,
}

/// Operands and destinations of a backward pass, in device memory.
#[derive(Clone, Debug)]
pub struct DeviceBackward<'a> {
    /// What the forward pass read.
    pub operands: DeviceOperands<'a>,
    /// What it wrote, in the dtype of the operands.
    pub out: DeviceTensor,
    /// What it wrote.
    pub lse: DeviceTensor<3>,
    /// Gradient of the loss with respect to `out`, in the dtype of the operands.
    pub d_out: DeviceTensor,
    /// Gradient of the loss with respect to `lse`, f32.
    pub d_lse: Option<DeviceTensor<3>>,
    /// Gradient of q, if it is wanted. What only unwanted ones need is not computed.
    pub dq: Option<DeviceTensor>,
    /// Gradient of k (summed over the batch when k is shared), if it is wanted; dk and dv have one dtype.
    pub dk: Option<DeviceTensor>,
    /// Gradient of v (summed over the batch when v is shared), if it is wanted.
    pub dv: Option<DeviceTensor>,
    /// Add to dq, dk, dv, d_sink and d_captures instead of overwriting them.
    pub accumulate: bool,
    /// Gradient of the sink, f32 `[Hq]`.
    pub d_sink: Option<DeviceTensor<1>>,
    /// Gradients of learned captured buffers by name, f32, row-major like the buffers.
    pub d_captures: Vec<(&'a str, DeviceTensor<1>)>,
}

/// Gradients that a backward pass makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// dq.
    pub q: bool,
    /// dk.
    pub k: bool,
    /// dv.
    pub v: bool,
    /// Those of learned captured buffers.
    pub captures: bool,
}

impl Wanted {
    /// All of them.
    pub const ALL: Self = Self { q: true, k: true, v: true, captures: true };

    /// Whether a kernel whose CTAs own tiles of keys makes any.
    pub(crate) fn by_keys(self) -> bool {
        self.k || self.v || self.captures
    }

    /// Whether dq has a kernel of its own because nothing, or nothing else, is wanted of the one
    /// whose CTAs own tiles of keys.
    pub(crate) fn separates_dq(self) -> bool {
        !(self.q && self.by_keys())
    }
}

/// What the elements of q, k and v of f8e4m3 are multiplied by: an f32 for each block of rows of each head
/// of each batch entry or sequence `b`, of any strides, 0 too. Shapes as in [`Scales`]; where offsets lie in
/// device memory, the longest sequence is as long as they are said to be at most.
///
/// [`Scales`]: foveate_problem::Scales
#[derive(Clone, Copy, Debug)]
pub struct DeviceScales {
    /// Of queries, `[B, Hq, ceil(Sq / blocks.q)]`.
    pub q: DeviceTensor<3>,
    /// Of keys, `[B, Hkv, ceil(Sk / blocks.kv)]`.
    pub k: DeviceTensor<3>,
    /// Of values, of the same shape.
    pub v: DeviceTensor<3>,
    /// The rows of a block.
    pub blocks: ScaleBlocks,
}

impl DeviceScales {
    fn named(&self) -> [(&'static str, &DeviceTensor<3>); 3] {
        [("the scales of q", &self.q), ("the scales of k", &self.k), ("the scales of v", &self.v)]
    }

    fn check(&self, dims: &Dims, longest: [usize; 2], dtype: DType) -> Result<(), CudaError> {
        if dtype != DType::F8E4M3 {
            return Err(CudaError::argument(format!(
                "scales are for f8e4m3 operands; q, k and v are {dtype}"
            )));
        }
        let shapes = self.blocks.shapes(dims, longest);
        let shapes = shapes.map_err(|e| CudaError::argument(e.to_string()))?;
        for ((name, tensor), shape) in self.named().into_iter().zip(shapes) {
            tensor.check_shape(name, shape)?;
            tensor.check_dtype(name, DType::F32)?;
        }
        Ok(())
    }
}

/// A cache of keys and values in pages: row `r` of batch entry `b` is row `r % page_size` of page
/// `table[b, r / page_size]`. k is `[pages, Hkv, page_size, D]` then, v `[pages, Hkv, page_size, Dv]`.
/// An entry of the table that is no page is read as the nearest one, and reported by a checked plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePages<'a> {
    /// Address of the table, i32 `[B, entries]`, in device memory.
    pub table: Address,
    /// Entries of the table for each batch entry.
    pub entries: usize,
    /// Number of keys of each batch entry, in host memory.
    pub lengths: &'a [i32],
}

impl<'a> DeviceOperands<'a> {
    /// Queries, keys and values, and nothing else.
    pub fn new(q: DeviceTensor, k: DeviceTensor, v: DeviceTensor) -> Self {
        Self { q, k, v, sink: None, varlen: None, pages: None, scales: None, captures: &[] }
    }

    /// Whether there are scales of blocks rather than of heads.
    pub(crate) fn has_scale_blocks(&self) -> bool {
        self.scales.is_some_and(|scales| scales.blocks != ScaleBlocks::WHOLE)
    }

    /// How their sequences lie; the offsets that say it where the host does not know.
    #[expect(clippy::result_large_err, reason = "no error: the other of two answers")]
    pub(crate) fn arrangement(&self) -> Result<Arrangement<'a>, DeviceOffsets<'a>> {
        Ok(match (self.varlen, self.pages) {
            (Some(DeviceVarlen::Device(offsets)), _) => return Err(offsets),
            (Some(DeviceVarlen::Host(varlen)), _) => Arrangement::Packed(varlen),
            (None, Some(DevicePages { lengths, .. })) => {
                Arrangement::Paged { lengths, page_size: self.k.layout.shape[2] }
            }
            (None, None) => Arrangement::Dense,
        })
    }

    /// The sizes, once the operands fit together.
    ///
    /// # Errors
    /// Those of [`Dims::of`]; or a sink that is not f32, one logit for each query head.
    pub fn dims(&self) -> Result<Dims, CudaError> {
        if let Some(pages) = &self.pages {
            return self.paged_dims(pages);
        }
        let (varlen, offsets) = match self.varlen {
            None => (None, None),
            Some(DeviceVarlen::Host(varlen)) => (Some(varlen), None),
            Some(DeviceVarlen::Device(offsets)) => (None, Some(offsets)),
        };
        let zeros = |t: &DeviceTensor| TensorRef::zeros(t.dtype, t.layout.shape);
        let [q, k, v] = [&self.q, &self.k, &self.v].map(zeros);
        let operands = Operands { varlen, ..Operands::new(q, k, v) };
        let mut dims = Dims::of(&operands).map_err(|e| CudaError::argument(e.to_string()))?;
        if let Some(offsets) = offsets {
            dims = offsets.dims(&dims)?;
        }
        if let Some(sink) = &self.sink {
            sink.check_vector("sink", dims.heads_q)?;
        }
        let longest = match offsets {
            None => dims.longest(varlen),
            Some(offsets) => [offsets.longest_q, offsets.longest_k],
        };
        self.scales.iter().try_for_each(|scales| scales.check(&dims, longest, self.q.dtype))?;
        Ok(dims)
    }

    /// The sizes with keys and values in `pages`, once all fit together: the keys are as many as
    /// those of the longest batch entry.
    ///
    /// # Errors
    /// When k and v are not pages of one size, lengths are not one for each batch entry, or
    /// longer than the table.
    fn paged_dims(&self, pages: &DevicePages<'_>) -> Result<Dims, CudaError> {
        let [batch, ..] = self.q.layout.shape;
        let page_size = self.k.layout.shape[2];
        if self.varlen.is_some() {
            return Err(CudaError::argument("keys in pages go with queries that are not packed"));
        }
        if pages.lengths.len() != batch {
            let given = pages.lengths.len();
            return Err(CudaError::argument(format!(
                "{given} lengths of keys are given for a batch of {batch}"
            )));
        }
        for (what, count) in [("pages", self.k.layout.shape[0]), ("entries", pages.entries)] {
            if i32::try_from(count).is_err() {
                let most = i32::MAX;
                return Err(CudaError::argument(format!(
                    "a page table of {count} {what} is more than kernels count; they go to {most}"
                )));
            }
        }
        let capacity = pages.entries.saturating_mul(page_size);
        let fits = |len: i32| usize::try_from(len).is_ok_and(|len| len <= capacity);
        if let Some(len) = pages.lengths.iter().find(|&&len| !fits(len)) {
            return Err(CudaError::argument(format!(
                "a batch entry has {len} keys in {} pages of {page_size}; it can have 0 to {capacity}",
                pages.entries
            )));
        }
        let longest = pages.lengths.iter().copied().max().unwrap_or(0);
        if longest > 0 && self.k.layout.shape[0] == 0 {
            return Err(CudaError::argument(format!(
                "k has no pages, but a batch entry has {longest} keys"
            )));
        }
        // One page stands for the keys of a batch of one: heads, dims and dtypes are checked so.
        let one = |mut tensor: DeviceTensor| {
            tensor.layout.shape[0] = 1;
            tensor
        };
        let of_page = DeviceOperands { k: one(self.k), v: one(self.v), pages: None, ..*self };
        let dims = of_page.dims()?;
        if self.v.layout.shape[0] != self.k.layout.shape[0] {
            let [k, v] = [&self.k, &self.v].map(|t| t.layout.shape[0]);
            return Err(CudaError::argument(format!("k has {k} pages, v has {v}")));
        }
        Ok(Dims { len_k: longest as usize, shared_kv: false, ..dims })
    }

    fn tensors(&self) -> [(&'static str, &DeviceTensor); 3] {
        [("q", &self.q), ("k", &self.k), ("v", &self.v)]
    }

    /// Adds everything that is read.
    fn read(&self, accesses: &mut Accesses) -> Result<(), CudaError> {
        self.tensors().into_iter().try_for_each(|(name, t)| accesses.read(name, t))?;
        self.sink.iter().try_for_each(|t| accesses.read("sink", t))?;
        for (name, tensor) in self.scales.iter().flat_map(DeviceScales::named) {
            accesses.read(name, tensor)?;
        }
        for (name, array) in self.captures {
            accesses.read_array(&format!("captured buffer `{name}`"), array)?;
        }
        if let Some(DeviceVarlen::Device(offsets)) = &self.varlen {
            offsets.read(accesses)?;
        }
        if let Some(pages) = self.pages {
            let shape = [self.q.layout.shape[0], pages.entries];
            let table = DeviceArray::new(pages.table, ElementType::I32, &shape);
            accesses.read_array("the page table", &table)?;
        }
        Ok(())
    }
}

impl DeviceForward<'_> {
    /// Checks shapes and dtypes against `dims`.
    pub(crate) fn check(&self, dims: &Dims) -> Result<(), CudaError> {
        self.out.check_shape("out", dims.out_shape())?;
        written("out", self.out.dtype)?;
        let statistics = [("lse", Some(&self.lse)), ("max_score", self.max_score.as_ref())];
        statistics.iter().try_for_each(|(name, rows)| statistic(name, *rows, dims))
    }

    /// The least alignment of a row of any tensor.
    pub(crate) fn align(&self) -> usize {
        let tensors = self.operands.tensors().map(|(_, t)| t);
        tensors.into_iter().chain([&self.out]).map(DeviceTensor::row_align).min().unwrap_or(0)
    }

    /// Everything that is read or written.
    pub(crate) fn accesses(&self) -> Result<Accesses, CudaError> {
        let mut accesses = Accesses::default();
        self.operands.read(&mut accesses)?;
        accesses.write("out", &self.out)?;
        accesses.write("lse", &self.lse)?;
        self.max_score.iter().try_for_each(|m| accesses.write("max_score", m))?;
        Ok(accesses)
    }
}

impl DeviceBackward<'_> {
    /// Checks shapes and dtypes against `dims`; the captured buffers have been checked.
    pub(crate) fn check(&self, dims: &Dims) -> Result<(), CudaError> {
        let dtype = self.operands.q.dtype;
        for (name, tensor) in [("out", &self.out), ("d_out", &self.d_out)] {
            tensor.check_shape(name, dims.out_shape())?;
            tensor.check_dtype(name, dtype)?;
        }
        let statistics = [("lse", Some(&self.lse)), ("d_lse", self.d_lse.as_ref())];
        statistics.iter().try_for_each(|(name, rows)| statistic(name, *rows, dims))?;
        let shapes = [dims.q_shape(), dims.k_shape(), dims.v_shape()];
        for ((name, tensor), shape) in self.destinations().zip(shapes) {
            let Some(tensor) = tensor else { continue };
            tensor.check_shape(name, shape)?;
            if name != "dq" {
                tensor.check_dtype(name, self.grad_dtype())?;
            }
            written(name, tensor.dtype)?;
        }
        if let Some(d_sink) = &self.d_sink {
            if self.operands.sink.is_none() {
                let reason = "d_sink is asked for, but there is no sink; leave it out";
                return Err(CudaError::argument(reason));
            }
            d_sink.check_vector("d_sink", dims.heads_q)?;
        }
        Ok(())
    }

    fn destinations(&self) -> impl Iterator<Item = (&'static str, Option<&DeviceTensor>)> {
        [("dq", &self.dq), ("dk", &self.dk), ("dv", &self.dv)]
            .map(|(n, t)| (n, t.as_ref()))
            .into_iter()
    }

    fn gradients(&self) -> impl Iterator<Item = (&'static str, &DeviceTensor)> {
        self.destinations().filter_map(|(name, tensor)| Some((name, tensor?)))
    }

    /// The dtype of dq; that of q where it is not wanted.
    pub(crate) fn dq_dtype(&self) -> DType {
        self.dq.as_ref().map_or(self.operands.q.dtype, |tensor| tensor.dtype)
    }

    /// The dtype of dk and dv; that of q where neither is wanted.
    pub(crate) fn grad_dtype(&self) -> DType {
        self.dk.as_ref().or(self.dv.as_ref()).map_or(self.operands.q.dtype, |tensor| tensor.dtype)
    }

    /// Which gradients are wanted.
    pub(crate) fn wanted(&self) -> Wanted {
        let [q, k, v] = [&self.dq, &self.dk, &self.dv].map(Option::is_some);
        Wanted { q, k, v, captures: !self.d_captures.is_empty() }
    }

    /// The least alignment of a row of any tensor.
    pub(crate) fn align(&self) -> usize {
        let read = self.operands.tensors().into_iter().chain([("", &self.out), ("", &self.d_out)]);
        let all = read.chain(self.gradients());
        all.map(|(_, t)| t.row_align()).min().unwrap_or(0)
    }

    /// Everything that is read or written.
    pub(crate) fn accesses(&self) -> Result<Accesses, CudaError> {
        let mut accesses = Accesses::default();
        self.operands.read(&mut accesses)?;
        accesses.read("out", &self.out)?;
        accesses.read("lse", &self.lse)?;
        accesses.read("d_out", &self.d_out)?;
        self.d_lse.iter().try_for_each(|t| accesses.read("d_lse", t))?;
        self.gradients().try_for_each(|(name, t)| accesses.write(name, t))?;
        self.d_sink.iter().try_for_each(|t| accesses.write("d_sink", t))?;
        self.d_captures.iter().try_for_each(|(name, t)| accesses.write(name, t))?;
        Ok(accesses)
    }
}

/// An operand or a destination as kernels take it.
///
/// # Errors
/// When the heads come in groups that are not those of a key/value head.
pub(crate) fn view(tensor: &DeviceTensor, name: &str, group: usize) -> Result<View, CudaError> {
    let [batch, mut head, row, elem] = tensor.layout.strides.map(|s| s as i64);
    let mut data = tensor.start();
    let mut between = 0;
    if let Some(groups) = tensor.layout.groups {
        let (entry, outer) = (groups.first % groups.inner, groups.outer as i64);
        let inside = |h: usize| (groups.first + h) % groups.inner;
        data += ((groups.first / groups.inner * groups.outer) as u64 + entry as u64 * head as u64)
            * tensor.dtype.bytes() as u64;
        let heads = tensor.layout.shape[1];
        if groups.inner == 1 {
            head = outer;
        } else if entry == 0 && groups.inner == group {
            between = outer - group as i64 * head;
        } else if inside(heads.saturating_sub(1)) < entry || entry + heads > groups.inner {
            return Err(CudaError::argument(format!(
                "the heads of {name} come in groups of {} that start at head {entry} of one, \
                 but {group} query heads share a key head; cut them at whole groups",
                groups.inner
            )));
        }
    }
    Ok(View { data, batch, head, row, elem, group: between })
}

/// Statistics of rows, `[B, Hq, Sq]`, as kernels take them.
pub(crate) fn row_view(tensor: &DeviceTensor<3>) -> RowView {
    let [batch, head, row] = tensor.layout.strides.map(|s| s as i64);
    RowView { data: tensor.start(), batch, head, row }
}

/// The type of a destination that kernels write.
pub(crate) fn written(name: &str, dtype: DType) -> Result<Elem, CudaError> {
    Elem::of(dtype).filter(|elem| *elem != Elem::E4m3).ok_or_else(|| {
        CudaError::argument(format!("{name} is {dtype}; kernels write f16, bf16 and f32"))
    })
}

fn statistic(name: &str, rows: Option<&DeviceTensor<3>>, dims: &Dims) -> Result<(), CudaError> {
    let Some(rows) = rows else { return Ok(()) };
    rows.check_shape(name, dims.row_shape())?;
    Ok(rows.check_dtype(name, DType::F32)?)
}

/// The captured buffer called `name` that lies in device memory as `array` says.
///
/// # Errors
/// When the array has too many elements to count or no axis, or is to be learned and cannot.
pub(crate) fn captured(
    name: &str,
    array: &DeviceArray<'_>,
    learned: bool,
) -> Result<AnyBuffer, CudaError> {
    let element = array.element;
    Ok(match array.strides {
        None => AnyBuffer::on_device(name, array.shape, element, learned)?,
        Some(strides) => {
            AnyBuffer::on_device_strided(name, array.shape, strides, element, learned)?
        }
    })
}
