//! Problems: shapes, strides, dtype and sequence offsets, without code and without elements.

use std::sync::Arc;

use foveate_problem::{Arrangement, Dims, Operands, Pages, ScaleBlocks, Scales, Sequence};
use foveate_tensor::{DType, Layout, TensorRef, Varlen};

use crate::error::Error;

/// The sequence offsets of varlen operands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offsets {
    cu_q: Vec<i32>,
    cu_k: Vec<i32>,
}

/// Why a problem cannot have both.
const PAGES_OR_OFFSETS: &str = "keys in pages go with queries that are not packed; give the pages \
                                a table and lengths, or the packed operands offsets, not both";

/// Pages of a table that is made for a problem without operands: a table of real ones belongs to
/// whoever has the pages.
const MOST_PAGES: usize = 1 << 26;

/// The pages that keys and values lie in.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PageTable {
    table: Vec<i32>,
    lengths: Vec<i32>,
}

/// What attention is asked of: the sizes, strides and dtype of q, k and v, the offsets of varlen
/// sequences and the sink. Shapes are `q [B, Hq, Sq, D]`, `k [Bk, Hkv, Sk, D]`,
/// `v [Bk, Hkv, Sk, Dv]` with `Bk` equal to `B` or 1.
#[derive(Clone, Debug)]
pub struct Problem {
    dims: Dims,
    dtype: DType,
    layouts: [Layout; 3],
    offsets: Option<Arc<Offsets>>,
    pages: Option<Arc<PageTable>>,
    sink: Option<Arc<[f32]>>,
    scales: Option<Arc<([Vec<f32>; 3], ScaleBlocks)>>,
    forward_only: bool,
}

impl Problem {
    /// The problem these operands pose.
    ///
    /// # Errors
    /// When shapes, heads or dtypes do not fit together; the message names the operand, what it
    /// has and what it needs.
    pub fn of<'a>(
        q: impl Into<TensorRef<'a>>,
        k: impl Into<TensorRef<'a>>,
        v: impl Into<TensorRef<'a>>,
    ) -> Result<Self, Error> {
        Self::posed_by(&Operands::new(q.into(), k.into(), v.into()))
    }

    /// The problem of queries on keys and values in pages of one size, any size, as a cache keeps
    /// them: k is `[pages, Hkv, page_size, D]` and v `[pages, Hkv, page_size, Dv]`, of any strides.
    /// Batch entry `b` has `lengths[b]` keys, of which key `r` is row `r % page_size` of page
    /// `table[b, r / page_size]`; `table` is `[B, entries]`, row-major, and what no key needs in it
    /// may be anything. It is [`Problem::forward_only`]: pages have no gradients.
    ///
    /// # Errors
    /// Those of [`Problem::of`]; or a negative length, one that needs more entries than there are,
    /// or a page that is none.
    pub fn paged<'a>(
        q: impl Into<TensorRef<'a>>,
        k: impl Into<TensorRef<'a>>,
        v: impl Into<TensorRef<'a>>,
        table: &[i32],
        lengths: &[i32],
    ) -> Result<Self, Error> {
        let problem = Self::posed_by(&Operands {
            pages: Some(Pages::new(table, lengths)?),
            ..Operands::new(q.into(), k.into(), v.into())
        })?;
        problem.forward_only().with_pages(table, lengths)
    }

    fn posed_by(operands: &Operands<'_>) -> Result<Self, Error> {
        let Operands { q, k, v, .. } = operands;
        Ok(Self {
            dims: Dims::of(operands)?,
            dtype: q.dtype(),
            layouts: [*q.layout(), *k.layout(), *v.layout()],
            offsets: None,
            pages: None,
            sink: None,
            scales: None,
            forward_only: operands.q.dtype() == DType::F8E4M3,
        })
    }

    /// Other pages for the keys.
    pub(crate) fn with_pages(mut self, table: &[i32], lengths: &[i32]) -> Result<Self, Error> {
        if self.offsets.is_some() {
            return Err(Error::option("pages", PAGES_OR_OFFSETS));
        }
        self.dims.len_k = Pages::new(table, lengths)?.longest();
        self.pages = Some(Arc::new(PageTable { table: table.to_vec(), lengths: lengths.to_vec() }));
        Ok(self)
    }

    /// The problem of contiguous operands of these shapes, without the operands: for planning
    /// and explaining what does not exist yet.
    ///
    /// # Errors
    /// Those of [`Problem::of`].
    pub fn shaped(
        dtype: DType,
        q: [usize; 4],
        k: [usize; 4],
        v: [usize; 4],
    ) -> Result<Self, Error> {
        let mut problem =
            Self::of(broadcast(dtype, q)?, broadcast(dtype, k)?, broadcast(dtype, v)?)?;
        problem.layouts = [q, k, v].map(Layout::contiguous);
        Ok(problem)
    }

    /// The problem of keys and values in pages of `page_size` keys, without operands and without a
    /// table: shapes as for [`Problem::shaped`], with k and v of q's batch and every batch entry as
    /// long as they are. Entry `b` has the pages from `b` times those of one entry on.
    ///
    /// # Errors
    /// Those of [`Problem::shaped`] and [`Problem::paged`], a page size of 0, and pages so small that
    /// their table would have more than 2²⁶ entries (256 MiB).
    pub fn shaped_in_pages(
        dtype: DType,
        q: [usize; 4],
        k: [usize; 4],
        v: [usize; 4],
        page_size: usize,
    ) -> Result<Self, Error> {
        if page_size == 0 {
            return Err(Error::option("page_size", "is 0; a page holds one key or more"));
        }
        // Checks what k and v are before they are cut into pages.
        Self::shaped(dtype, q, k, v)?;
        let [batch, _, len, _] = k;
        if batch != q[0] {
            let reason = format!("k and v have batch {batch}; pages belong to {} entries", q[0]);
            return Err(Error::option("shape", reason));
        }
        let pages = batch.saturating_mul(len.div_ceil(page_size));
        if pages > MOST_PAGES {
            let reason = format!(
                "is {page_size}: {batch} entries of {len} keys take {pages} pages, and a table is \
                 made for {MOST_PAGES} at most; give larger pages, fewer keys or a smaller batch"
            );
            return Err(Error::option("page_size", reason));
        }
        let number = |n: usize| i32::try_from(n).expect("`Dims` counts lengths in i32");
        let table: Vec<i32> = (0..number(pages)).collect();
        let lengths = vec![number(len); batch];
        let [k, v] = [k, v].map(|[_, heads, _, dim]| [table.len(), heads, page_size, dim]);
        let views = [broadcast(dtype, q)?, broadcast(dtype, k)?, broadcast(dtype, v)?];
        let mut problem = Self::paged(views[0], views[1], views[2], &table, &lengths)?;
        problem.layouts = [q, k, v].map(Layout::contiguous);
        Ok(problem)
    }

    /// Says that the operands, of batch 1, hold sequences one after another on the length axis:
    /// sequence `b` owns rows `cu_q[b]..cu_q[b + 1]` of q and `cu_k[b]..cu_k[b + 1]` of k and v.
    ///
    /// # Errors
    /// When offsets decrease, end past the rows or differ in number, the batch is not 1, or keys
    /// lie in pages.
    pub fn varlen(mut self, cu_q: &[i32], cu_k: &[i32]) -> Result<Self, Error> {
        if self.pages.is_some() {
            return Err(Error::option("varlen", PAGES_OR_OFFSETS));
        }
        let [q, k, v] = self.layouts.map(|l| l.shape);
        Varlen::new(cu_q, cu_k, q[2], k[2])?;
        if q[0] != 1 || k[0] != 1 || v[0] != 1 {
            let reason = format!("packed operands have batch 1, not {} (q) and {} (k)", q[0], k[0]);
            return Err(Error::option("varlen", reason));
        }
        self.dims.batch = cu_q.len() - 1;
        self.dims.packed = true;
        self.dims.shared_kv = false;
        self.offsets = Some(Arc::new(Offsets { cu_q: cu_q.to_vec(), cu_k: cu_k.to_vec() }));
        Ok(self)
    }

    /// The problem of other sequences, whose operands have at least the rows that the offsets reach.
    pub(crate) fn repacked(mut self, cu_q: &[i32], cu_k: &[i32]) -> Result<Self, Error> {
        for (layout, cu) in self.layouts.iter_mut().zip([cu_q, cu_k, cu_k]) {
            let [batch, heads, rows, dim] = layout.shape;
            let end = cu.last().map_or(0, |&end| usize::try_from(end).unwrap_or(0));
            if batch != 1 || rows < end {
                *layout = Layout::contiguous([1, heads, rows.max(end), dim]);
            }
        }
        (self.dims.len_q, self.dims.len_k) = (self.layouts[0].shape[2], self.layouts[1].shape[2]);
        self.varlen(cu_q, cu_k)
    }

    /// A logit for each query head that joins the softmax's denominator only.
    ///
    /// # Errors
    /// When there is not one for each query head.
    pub fn sink(mut self, sink: &[f32]) -> Result<Self, Error> {
        if sink.len() != self.dims.heads_q {
            let reason =
                format!("{} logits for {} query heads; one each", sink.len(), self.dims.heads_q);
            return Err(Error::option("sink", reason));
        }
        self.sink = Some(sink.into());
        Ok(self)
    }

    /// What the elements of q, k and v of f8e4m3 are multiplied by: a number for each head of each batch entry or
    /// sequence ([`Scales::of_heads`]), or for each block of its rows. To be given after [`Problem::varlen`].
    ///
    /// # Errors
    /// When there is not one for each, a block has other than a multiple of 64 rows, or the operands are of
    /// another dtype.
    pub fn scales(mut self, scales: Scales<'_>) -> Result<Self, Error> {
        scales
            .check(&self.dims, self.get_varlen(), self.dtype)
            .map_err(|e| Error::option("scales", e.to_string()))?;
        let Scales { q, k, v, blocks } = scales;
        self.scales = Some(Arc::new(([q, k, v].map(<[f32]>::to_vec), blocks)));
        Ok(self)
    }

    /// Says that no backward pass is wanted, so a score without a derivative is no obstacle.
    pub fn forward_only(mut self) -> Self {
        self.forward_only = true;
        self
    }

    /// The sizes.
    pub fn dims(&self) -> &Dims {
        &self.dims
    }

    /// The dtype of q, k and v.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The layouts of q, k and v.
    pub fn layouts(&self) -> &[Layout; 3] {
        &self.layouts
    }

    /// The independent problems inside, in order of `b`.
    pub fn sequences(&self) -> Vec<Sequence> {
        self.dims.sequences_of(self.arrangement())
    }

    /// How they lie in the operands.
    pub fn arrangement(&self) -> Arrangement<'_> {
        Arrangement::new(self.get_varlen(), self.get_pages(), self.layouts[1].shape[2])
    }

    /// True when no backward pass is wanted.
    pub fn is_forward_only(&self) -> bool {
        self.forward_only
    }

    /// The sink's logits.
    pub fn get_sink(&self) -> Option<&[f32]> {
        self.sink.as_deref()
    }

    /// The scales of f8e4m3 operands.
    pub fn get_scales(&self) -> Option<Scales<'_>> {
        self.scales.as_deref().map(|([q, k, v], blocks)| Scales { q, k, v, blocks: *blocks })
    }

    /// The sequence offsets of varlen operands.
    pub fn get_varlen(&self) -> Option<Varlen<'_>> {
        let [q, k, _] = self.layouts.map(|l| l.shape[2]);
        self.offsets_within(q, k).expect("offsets are checked when they are taken")
    }

    /// The pages that k and v lie in.
    pub fn get_pages(&self) -> Option<Pages<'_>> {
        let PageTable { table, lengths } = self.pages.as_deref()?;
        Some(Pages::new(table, lengths).expect("pages are checked when they are taken"))
    }

    /// The sequence offsets of operands with these packed lengths.
    pub(crate) fn offsets_within(
        &self,
        packed_q: usize,
        packed_k: usize,
    ) -> Result<Option<Varlen<'_>>, Error> {
        let Some(offsets) = &self.offsets else { return Ok(None) };
        Ok(Some(Varlen::new(&offsets.cu_q, &offsets.cu_k, packed_q, packed_k)?))
    }
}

/// A view of this shape without elements of its own, of which there are no more than could be.
fn broadcast(dtype: DType, shape: [usize; 4]) -> Result<TensorRef<'static>, Error> {
    let bytes = shape.iter().try_fold(dtype.bytes(), |n, &d| n.checked_mul(d));
    if bytes.is_none_or(|n| isize::try_from(n).is_err()) {
        let reason = format!("has more elements in {shape:?} than memory can address");
        return Err(Error::option("shape", reason));
    }
    Ok(TensorRef::zeros(dtype, shape))
}
