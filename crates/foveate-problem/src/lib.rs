//! What an attention backend is asked to compute.
//!
//! The oracle, the CPU and the GPU take the same three things: a [`Spec`] (the program: mask,
//! score, scale, dropout; no shapes), [`Dims`] checked against the operands, and the operands
//! with their destinations ([`ForwardArgs`], [`BackwardArgs`]). Dense and varlen problems look
//! alike to a backend: a list of [`Sequence`]s.
//!
//! ```
//! use foveate_problem::{Dims, Operands};
//! use foveate_tensor::{DType, Tensor};
//!
//! let q = Tensor::filled(DType::F32, [2, 6, 5, 16], 0.0);
//! let k = Tensor::filled(DType::F32, [2, 4, 9, 16], 0.0);
//! let operands = Operands::new(q.view(), k.view(), k.view());
//! let refused = Dims::of(&operands).unwrap_err();
//! assert!(refused.to_string().contains("6 query heads cannot share 4 key/value heads"));
//! ```
//!
//! The contract of the numbers is `docs/semantics.md`; who writes a backend starts at
//! `CONTRIBUTING.md`.

mod arrangement;
mod check;
mod dropout;
mod error;
mod pages;
mod rebind;
#[cfg(test)]
mod tests;

pub use arrangement::Arrangement;
pub use dropout::Dropout;
pub use error::ProblemError;
pub use pages::Pages;
pub use rebind::{RebindError, Rebound};

use foveate_mods::{MaskMod, ScoreMod};
use foveate_tensor::count::Count;
use foveate_tensor::{DType, Slice, SliceMut, TensorMut, TensorRef, Varlen};

/// The program: what is computed, whatever the shapes.
#[derive(Clone, Debug, Default)]
pub struct Spec {
    /// Which keys a query sees; `None` is all of them.
    pub mask: Option<MaskMod>,
    /// What becomes of a score; `None` leaves it as it is.
    pub score: Option<ScoreMod>,
    /// Factor on `q·k`; `None` is `1/√D`.
    pub scale: Option<f32>,
    /// Dropout of probabilities after the softmax.
    pub dropout: Option<Dropout>,
}

/// The sizes of a problem. For varlen operands `batch` is the number of sequences and the
/// lengths are those of the axes that all sequences share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Number of batch entries or sequences.
    pub batch: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key/value heads; divides `heads_q`.
    pub heads_kv: usize,
    /// Rows of q (varlen: of all sequences and the unused tail).
    pub len_q: usize,
    /// Rows of k and v (varlen: of all sequences and the unused tail).
    pub len_k: usize,
    /// Length of a query or key vector.
    pub dim: usize,
    /// Length of a value vector.
    pub dim_v: usize,
    /// True when k and v have one batch entry that all of q's share.
    pub shared_kv: bool,
    /// True when the operands are varlen: sequences one after another in one buffer.
    pub packed: bool,
}

#[cfg(feature = "counts")]
static FOUND: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// How often this process has called [`Dims::of`].
#[cfg(feature = "counts")]
pub fn dims_found() -> usize {
    FOUND.load(std::sync::atomic::Ordering::SeqCst)
}

const LONGEST: usize = i32::MAX as usize;

impl Dims {
    /// The sizes of `operands`, once they fit together.
    ///
    /// # Errors
    /// Names the first operand that does not fit, its shape, and what it would have to be.
    pub fn of(operands: &Operands<'_>) -> Result<Self, ProblemError> {
        #[cfg(feature = "counts")]
        FOUND.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let Operands { q, k, v, sink, varlen, pages, scales } = operands;
        let [q_batch, heads_q, len_q, dim] = q.shape();
        let [k_batch, heads_kv, len_k, k_dim] = k.shape();
        let [v_batch, v_heads, v_len, dim_v] = v.shape();
        let fail = |message: String| Err(ProblemError::new(message));
        if dim == 0 || dim_v == 0 {
            return fail(format!("head dim is 0: q has {dim}, v has {dim_v}; both must be given"));
        }
        if k_dim != dim {
            return fail(format!("k has head dim {k_dim} but q has {dim}; they must be equal"));
        }
        if (v_batch, v_heads, v_len) != (k_batch, heads_kv, len_k) {
            return fail(format!(
                "v has batch {v_batch}, heads {v_heads}, length {v_len} but k has \
                 {k_batch}, {heads_kv}, {len_k}; they must be equal"
            ));
        }
        if k.dtype() != q.dtype() || v.dtype() != q.dtype() {
            return fail(format!(
                "q is {}, k is {}, v is {}; they must have one dtype",
                q.dtype(),
                k.dtype(),
                v.dtype()
            ));
        }
        if heads_q == 0 || heads_kv == 0 {
            return fail(format!(
                "{heads_q} query heads and {heads_kv} key/value heads; there must be at least 1 of \
                 each"
            ));
        }
        if heads_q % heads_kv != 0 {
            return fail(format!(
                "{heads_q} query heads cannot share {heads_kv} key/value heads; \
                 the first must be a multiple of the second"
            ));
        }
        if let Some(pages) = pages {
            if varlen.is_some() {
                return fail("keys in pages go with queries that are not packed".to_owned());
            }
            pages.check(q_batch, k_batch, len_k)?;
        } else if k_batch != q_batch && k_batch != 1 {
            return fail(format!("k and v have batch {k_batch}; q needs {q_batch}, or 1 to share"));
        }
        if let Some(sink) = sink
            && sink.len() != heads_q
        {
            return fail(format!("the sink has {} logits for {heads_q} query heads", sink.len()));
        }
        if varlen.is_some() && q_batch != 1 {
            return fail(format!("packed operands have batch 1 before packing, not {q_batch}"));
        }
        if let Some(varlen) = varlen {
            let ends = |rows: &dyn Fn(usize) -> usize| (0..varlen.sequences()).map(rows).max();
            for (name, len, end) in [
                ("q", len_q, ends(&|b| varlen.q_rows(b).end)),
                ("k", len_k, ends(&|b| varlen.k_rows(b).end)),
            ] {
                if let Some(end) = end
                    && end > len
                {
                    return fail(format!(
                        "cu_seqlens_{name} ends at {end}, past the {len} packed rows of {name}"
                    ));
                }
            }
        }
        let len_k = pages.map_or(len_k, |pages| pages.longest());
        if let Some(n) = [q_batch, heads_q, len_q, len_k].into_iter().find(|&n| n > LONGEST) {
            return fail(format!("an axis has length {n}; masks count in i32, up to {LONGEST}"));
        }
        let dims = Self {
            batch: varlen.map_or(q_batch, |v| v.sequences()),
            heads_q,
            heads_kv,
            len_q,
            len_k,
            dim,
            dim_v,
            shared_kv: varlen.is_none() && pages.is_none() && k_batch == 1 && q_batch != 1,
            packed: varlen.is_some(),
        };
        scales.iter().try_for_each(|scales| scales.check(&dims, *varlen, q.dtype()))?;
        Ok(dims)
    }

    /// Queries and keys of the longest sequence inside operands of these sizes.
    pub fn longest(&self, varlen: Option<Varlen<'_>>) -> [usize; 2] {
        let Some(varlen) = varlen else { return [self.len_q, self.len_k] };
        let sequences = 0..varlen.sequences();
        let longest =
            |rows: &dyn Fn(usize) -> usize| sequences.clone().map(rows).max().unwrap_or(0);
        [longest(&|b| varlen.q_rows(b).len()), longest(&|b| varlen.k_rows(b).len())]
    }

    /// The independent problems inside operands of these sizes, in order of `b`.
    pub fn sequences(&self, varlen: Option<Varlen<'_>>) -> Vec<Sequence> {
        (0..self.batch)
            .map(|b| match varlen {
                None => Sequence {
                    b,
                    q_batch: b,
                    k_batch: if self.shared_kv { 0 } else { b },
                    q_start: 0,
                    q_len: self.len_q,
                    k_start: 0,
                    k_len: self.len_k,
                },
                Some(v) => Sequence {
                    b,
                    q_batch: 0,
                    k_batch: 0,
                    q_start: v.q_rows(b).start,
                    q_len: v.q_rows(b).len(),
                    k_start: v.k_rows(b).start,
                    k_len: v.k_rows(b).len(),
                },
            })
            .collect()
    }

    /// Query heads to one key/value head.
    pub fn group(&self) -> usize {
        self.heads_q / self.heads_kv
    }
}

/// One independent attention problem inside the operands: rows `q_start..q_start + q_len` of
/// batch entry `q_batch` attend to rows `k_start..k_start + k_len` of entry `k_batch`. Mods see
/// `b`, and positions from 0 inside the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// The batch index that mods see.
    pub b: usize,
    /// Index on the batch axis of q, out, lse.
    pub q_batch: usize,
    /// Index on the batch axis of k and v.
    pub k_batch: usize,
    /// First row on the length axis of q.
    pub q_start: usize,
    /// Number of queries.
    pub q_len: usize,
    /// First row on the length axis of k and v.
    pub k_start: usize,
    /// Number of keys.
    pub k_len: usize,
}

/// What attention reads. Shapes are `q [B, Hq, Sq, D]`, `k [Bk, Hkv, Sk, D]`,
/// `v [Bk, Hkv, Sk, Dv]`; varlen operands have `B = Bk = 1` and the rows of all sequences on the length axis,
/// keys and values in pages a page in place of a batch entry.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// Queries.
    pub q: TensorRef<'a>,
    /// Keys.
    pub k: TensorRef<'a>,
    /// Values.
    pub v: TensorRef<'a>,
    /// A logit per query head that joins the softmax's denominator only, `[Hq]`, of any dtype.
    pub sink: Option<Slice<'a>>,
    /// Sequence offsets of varlen operands.
    pub varlen: Option<Varlen<'a>>,
    /// The pages that k and v lie in; their shapes are those of [`Pages`] then. Forward only.
    pub pages: Option<Pages<'a>>,
    /// What the elements of f8e4m3 operands are multiplied by; `None` is 1.
    pub scales: Option<Scales<'a>>,
}

/// What the elements of q, k and v of f8e4m3 are multiplied by: a number for each block of rows of each
/// head of each batch entry or sequence `b`, row-major. Row `r` of a sequence is in block `r / rows`, and there
/// are as many blocks as the longest sequence has, at least one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales<'a> {
    /// Of queries, `[B, Hq, ceil(Sq / blocks.q)]`.
    pub q: &'a [f32],
    /// Of keys, `[B, Hkv, ceil(Sk / blocks.kv)]`.
    pub k: &'a [f32],
    /// Of values, of the same shape.
    pub v: &'a [f32],
    /// The rows of a block.
    pub blocks: ScaleBlocks,
}

/// Rows of a sequence that share a scale: a multiple of [`Self::UNIT`], or all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleBlocks {
    /// Of queries.
    pub q: usize,
    /// Of keys and of values.
    pub kv: usize,
}

impl ScaleBlocks {
    /// What the rows of a block are a multiple of.
    pub const UNIT: usize = 64;
    /// One block as long as any sequence: a scale for each head.
    pub const WHOLE: Self = Self { q: usize::MAX, kv: usize::MAX };

    /// The shapes of scales of q, of k and of v, where the longest sequence has so many queries and keys.
    ///
    /// # Errors
    /// When a block is neither a multiple of [`Self::UNIT`] rows nor the whole sequence.
    pub fn shapes(
        &self,
        dims: &Dims,
        [queries, keys]: [usize; 2],
    ) -> Result<[[usize; 3]; 3], ProblemError> {
        for (name, rows) in [("queries", self.q), ("keys", self.kv)] {
            if rows != usize::MAX && (rows == 0 || !rows.is_multiple_of(Self::UNIT)) {
                return Err(ProblemError::new(format!(
                    "scales are of blocks of {rows} {name}; a block has a multiple of {} rows, or all of them",
                    Self::UNIT
                )));
            }
        }
        let of_keys = [dims.batch, dims.heads_kv, keys.div_ceil(self.kv).max(1)];
        Ok([[dims.batch, dims.heads_q, queries.div_ceil(self.q).max(1)], of_keys, of_keys])
    }
}

impl<'a> Scales<'a> {
    /// A scale for each head: of q `[B, Hq]`, of k and v `[B, Hkv]`.
    pub fn of_heads(q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Self {
        Self { q, k, v, blocks: ScaleBlocks::WHOLE }
    }

    /// What row `q` of query head `h` of sequence `b` is multiplied by.
    pub fn of_query(&self, dims: &Dims, [b, h, q]: [usize; 3]) -> f32 {
        of_block(self.q, dims.batch * dims.heads_q, b * dims.heads_q + h, q / self.blocks.q)
    }

    /// What row `kv` of k and of v of key/value head `h` of sequence `b` are multiplied by.
    pub fn of_key(&self, dims: &Dims, [b, h, kv]: [usize; 3]) -> [f32; 2] {
        let (heads, head) = (dims.batch * dims.heads_kv, b * dims.heads_kv + h);
        [self.k, self.v].map(|scales| of_block(scales, heads, head, kv / self.blocks.kv))
    }

    /// Why there is no backward pass on f8e4m3 operands: its products would need scales of their own.
    pub fn no_gradients() -> ProblemError {
        ProblemError::new("f8e4m3 operands have no gradients; give bf16 or f16 ones to a backward")
    }

    /// Checks that there is a number for each block of a problem of `dims` in `dtype`.
    ///
    /// # Errors
    /// When there is not, the dtype has no scales, or [`ScaleBlocks::shapes`] refuses the blocks.
    pub fn check(
        &self,
        dims: &Dims,
        varlen: Option<Varlen<'_>>,
        dtype: DType,
    ) -> Result<(), ProblemError> {
        if dtype != DType::F8E4M3 {
            let message = format!("scales are for f8e4m3 operands; q, k and v are {dtype}");
            return Err(ProblemError::new(message));
        }
        let shapes = self.blocks.shapes(dims, dims.longest(varlen))?;
        for ((name, found), [batch, heads, blocks]) in
            [("q", self.q), ("k", self.k), ("v", self.v)].into_iter().zip(shapes)
        {
            if found.len() != batch * heads * blocks {
                return Err(ProblemError::new(format!(
                    "{} scales of {name} for a batch of {batch}, {heads} heads and {}; one each",
                    found.len(),
                    Count(blocks, "block"),
                )));
            }
        }
        Ok(())
    }
}

/// The scale of a block of one of so many heads.
fn of_block(scales: &[f32], heads: usize, head: usize, block: usize) -> f32 {
    scales[scales.len() / heads * head + block]
}

impl<'a> Operands<'a> {
    /// Queries, keys and values, and nothing else.
    pub fn new(q: TensorRef<'a>, k: TensorRef<'a>, v: TensorRef<'a>) -> Self {
        Self { q, k, v, sink: None, varlen: None, pages: None, scales: None }
    }

    /// Where row `row` of a sequence's batch entry `k_batch` stands in k and v: its index on the
    /// batch axis and on the length axis.
    pub fn locate_key(&self, k_batch: usize, row: usize) -> [usize; 2] {
        match self.pages {
            None => [k_batch, row],
            Some(pages) => pages.locate(k_batch, row, self.k.shape()[2]),
        }
    }
}

/// Operands and destinations of a forward pass.
#[derive(Debug)]
pub struct ForwardArgs<'a> {
    /// What is read.
    pub operands: Operands<'a>,
    /// `out [B, Hq, Sq, Dv]`.
    pub out: TensorMut<'a>,
    /// Natural log of the softmax's denominator, `lse [B, Hq, Sq]`, f32.
    pub lse: TensorMut<'a, 3>,
    /// Largest score of each row, `[B, Hq, Sq]`, f32; `-∞` for an empty row.
    pub max_score: Option<TensorMut<'a, 3>>,
}

/// Operands and destinations of a backward pass.
#[derive(Debug)]
pub struct BackwardArgs<'a> {
    /// What the forward pass read.
    pub operands: Operands<'a>,
    /// What it wrote.
    pub out: TensorRef<'a>,
    /// What it wrote.
    pub lse: TensorRef<'a, 3>,
    /// Gradient of the loss with respect to `out`.
    pub d_out: TensorRef<'a>,
    /// Gradient of the loss with respect to `lse`.
    pub d_lse: Option<TensorRef<'a, 3>>,
    /// Gradient of q. What has no destination is not computed; so for the others.
    pub dq: Option<TensorMut<'a>>,
    /// Gradient of k (summed over the batch when k is shared).
    pub dk: Option<TensorMut<'a>>,
    /// Gradient of v (summed over the batch when v is shared).
    pub dv: Option<TensorMut<'a>>,
    /// Add to dq, dk, dv, d_sink and d_captures instead of overwriting them.
    pub accumulate: bool,
    /// Gradient of the sink, `[Hq]`, of any dtype.
    pub d_sink: Option<SliceMut<'a>>,
    /// Gradients of learned captured buffers of the score, row-major like the buffers.
    pub d_captures: Vec<CaptureGrad<'a>>,
}

/// Destination for the gradient of one captured buffer.
#[derive(Debug)]
pub struct CaptureGrad<'a> {
    /// Name of the buffer.
    pub name: &'a str,
    /// One number for each element of the buffer, row-major, of any dtype: sums are in f32 and
    /// rounded once.
    pub into: SliceMut<'a>,
}
