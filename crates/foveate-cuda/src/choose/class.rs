//! What a problem is to kernels: what they are compiled for, and the sizes that decide between
//! configurations that fit.

use foveate_mask::Varies;
use foveate_mods::ScoreGradient;
use foveate_problem::{Dims, Spec};

use foveate_gpu::tma::MapRefusal;

use crate::compile::codegen::{is_one, mask_reads, mask_steps, score_steps};
use crate::compile::config::{Config, Copied, Count, Elem, Family, Kernel, Tiles};

/// Rows of a box of a tensor map are a multiple of so many, those of the swizzle.
const BOX_ROWS: usize = 8;
/// Rows of the largest tile of the forward.
pub(super) const MOST_ROWS: usize = 128;

/// What kernels are compiled for, tiles aside. Fields are those of [`Config`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Class {
    /// The type of q, k and v.
    pub dtype: Elem,
    /// The type of out.
    pub out_dtype: Elem,
    /// The type of dq.
    pub dq_dtype: Elem,
    /// The type of dk and dv.
    pub grad_dtype: Elem,
    /// Elements of a row of q and k.
    pub dim: usize,
    /// Elements of a row of v.
    pub dim_v: usize,
    /// Query heads for each key/value head.
    pub group: usize,
    /// Bytes that rows are aligned to, or 0; see [`Config::align`].
    pub align: usize,
    /// A mask decides.
    pub mask: bool,
    /// About how many instructions its evaluation takes for one pair.
    pub mask_steps: usize,
    /// Its evaluation reads a captured buffer.
    pub mask_reads: bool,
    /// Scores are modified.
    pub score: bool,
    /// About how many instructions that takes for one of them, an elementary function counted as a polynomial.
    pub score_steps: usize,
    /// The modified score's derivative is not constant 1.
    pub dscore: bool,
    /// Dropout.
    pub dropout: bool,
    /// Captured buffers have gradients.
    pub captures: bool,
    /// Every row has a sink in its denominator.
    pub sink: bool,
    /// Scales of e4m3 operands are those of blocks of rows.
    pub scale_blocks: bool,
    /// The mask tells query heads apart, so that they cannot share a tile.
    pub by_head: bool,
    /// Operands that no tensor map has.
    pub unmapped: Vec<Unmapped>,
    /// Keys and values lie in pages.
    pub paged: bool,
    /// Every sum is in a fixed order.
    pub deterministic: bool,
    /// A captured index outside its axis is reported.
    pub checked: bool,
    /// Gradients of q, or all others, are not asked for, so dq has a kernel of its own.
    pub separate_dq: bool,
}

/// An operand that no tensor map has.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Unmapped {
    /// `q`, `k`, `v` or `d_out`.
    pub name: &'static str,
    /// Why.
    pub reason: String,
    /// Whether `cp.async` can load its rows.
    pub by_copies: bool,
}

impl Unmapped {
    /// What no map has of the operand called `name`.
    pub(crate) fn new(name: &'static str, refusal: &MapRefusal) -> Self {
        Self { name, reason: refusal.to_string(), by_copies: refusal.by_copies() }
    }

    /// Keys or values in pages of `rows` rows that no box of a tensor map ends with.
    pub(crate) fn of_pages(name: &'static str, rows: usize) -> Option<Self> {
        let reason = format!(
            "{name} lies in pages of {}, no multiple of the {BOX_ROWS} of a tensor map",
            Count(rows, "row")
        );
        (!rows.is_multiple_of(BOX_ROWS)).then_some(Self { name, reason, by_copies: true })
    }

    /// An operand whose rows are aligned to `bytes`, fewer than a map needs, or its elements apart where that is 0.
    fn of_rows(name: &'static str, bytes: usize) -> Self {
        let refusal = match bytes {
            0 => MapRefusal::Apart { name: name.to_owned() },
            bytes => MapRefusal::Alignment { name: name.to_owned(), bytes },
        };
        Self::new(name, &refusal)
    }

    /// q, k and v where rows of all of them are aligned to `align` bytes.
    pub fn aligned(align: usize) -> Vec<Self> {
        let all = ["q", "k", "v"].into_iter().filter(|_| align != 16);
        all.map(|name| Self::of_rows(name, align)).collect()
    }

    /// k and v in pages of `rows` rows.
    pub fn paged(rows: usize) -> Vec<Self> {
        ["k", "v"].into_iter().filter_map(|name| Self::of_pages(name, rows)).collect()
    }
}

/// The sizes that decide between configurations that fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Sizes {
    /// Batch entries or sequences.
    pub batch: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key/value heads.
    pub heads_kv: usize,
    /// Queries of a sequence.
    pub queries: usize,
    /// Keys of a sequence.
    pub keys: usize,
    /// Live keys of a query, on average; see [`Self::under`].
    pub mean_kv_len: usize,
}

impl Class {
    /// Operands, results and gradients of one dtype, aligned rows, and nothing special.
    pub fn new(dtype: Elem, dim: usize, dim_v: usize, group: usize) -> Self {
        Self {
            dtype,
            out_dtype: dtype.result(),
            dq_dtype: dtype.result(),
            grad_dtype: dtype.result(),
            dim,
            dim_v,
            group,
            align: 16,
            mask: false,
            mask_steps: 0,
            mask_reads: false,
            score: false,
            score_steps: 0,
            dscore: false,
            dropout: false,
            captures: false,
            sink: false,
            scale_blocks: false,
            by_head: false,
            unmapped: Vec::new(),
            paged: false,
            deterministic: false,
            checked: false,
            separate_dq: false,
        }
    }

    /// The kernels of `spec` on operands of `dims`, whose rows are aligned. `gradient` is that of
    /// its score, for a backward.
    pub fn of(spec: &Spec, dtype: Elem, dims: &Dims, gradient: Option<&ScoreGradient>) -> Self {
        Self {
            mask: spec.mask.is_some(),
            mask_steps: spec.mask.as_ref().map_or(0, mask_steps),
            mask_reads: spec.mask.as_ref().is_some_and(mask_reads),
            by_head: spec.mask.as_ref().is_some_and(|mask| Varies::of(mask).by_head),
            score: spec.score.is_some(),
            score_steps: spec.score.as_ref().map_or(0, score_steps),
            dscore: gradient.is_some_and(|g| !is_one(g.program(), g.program().roots()[0])),
            dropout: spec.dropout.is_some(),
            captures: gradient.is_some_and(|g| !g.captures().is_empty()),
            ..Self::new(dtype, dims.dim, dims.dim_v, dims.group())
        }
    }

    /// The same on contiguous operands: rows lie one after the other, those of keys and values in pages of
    /// `page_size` if there are any.
    pub(crate) fn contiguous(self, page_size: Option<usize>) -> Self {
        let align = |dim: usize| 1 << ((dim * self.dtype.bytes()) | 16).trailing_zeros();
        let (of_k, of_v) = (align(self.dim), align(self.dim_v));
        let operands = [("q", of_k, None), ("k", of_k, page_size), ("v", of_v, page_size)];
        let unmapped = operands.into_iter().filter_map(|(name, align, pages)| match align {
            16 => pages.and_then(|rows| Unmapped::of_pages(name, rows)),
            bytes => Some(Unmapped::of_rows(name, bytes)),
        });
        let (unmapped, paged) = (unmapped.collect(), page_size.is_some());
        Self { align: of_k.min(of_v), unmapped, paged, ..self }
    }

    /// Whether the query heads of a key/value head share a tile of `kernel`, so that keys and
    /// values are read once for all of them: for so few queries that all rows fit a tile or nearly.
    pub(crate) fn packs_gqa(&self, kernel: Kernel, sizes: &Sizes, tile_q: Option<usize>) -> bool {
        let most_rows = tile_q.unwrap_or(MOST_ROWS);
        let few = sizes.queries <= 16 || sizes.queries * self.group <= MOST_ROWS;
        // Heads that share a tile are the portable family's.
        let portable = self.dtype != Elem::E4m3;
        portable
            && kernel.shares_keys()
            && !self.by_head
            && few
            && (2..=most_rows).contains(&self.group)
    }

    /// The operands that the Hopper family's forward copies row by row.
    pub(crate) fn copied(&self) -> Copied {
        let is = |name| self.unmapped.iter().any(|operand| operand.name == name);
        Copied { q: is("q"), k: is("k"), v: is("v") }
    }

    /// Whether the backward finds what the weights of rows with a huge lse add up to:
    /// `HAS_ROW_WEIGHT_SUM` of `backward_device.cuh`.
    pub(crate) fn has_row_weight_sum(&self) -> bool {
        self.score || self.dtype == Elem::F32
    }

    /// Whether `kernel` on Hopper adds dq in a fixed order, and no kernel of its own makes it.
    /// Derivatives of scores and gradients of captured buffers leave too few registers; under a mask as
    /// sparse as documents tiles of keys wait for each other longer than the kernel takes at head
    /// dims above 64.
    pub(crate) fn orders_dq(&self, kernel: Kernel, sizes: &Sizes) -> bool {
        let dim = self.dim.max(self.dim_v);
        let registers = dim <= Tiles::MOST_DIM_OF_BOTH && !self.dscore && !self.captures;
        let short_waits = dim <= 64 || !self.is_sparse(kernel, sizes);
        let wanted = self.deterministic && !self.separate_dq;
        kernel.owns_keys() && wanted && registers && short_waits
    }

    /// Whether `kernel` can have items of a query head, whose dk and dv are added up: a backward of more than one head
    /// to a key/value head.
    pub(crate) fn can_split_gqa(&self, kernel: Kernel) -> bool {
        kernel.owns_keys() && self.group > 1
    }

    /// Instructions of a mask for a pair from which on partial tiles of `kernel` on Hopper read its bits, made
    /// beforehand; `None` where they evaluate every mask. A plain backward of head dims up to 64 has no registers for
    /// them, and one above 128 does not read them. Measured at head dim 128, of plain forwards at 64 too: a window
    /// takes 4 to 7, a causal mask and a prefix up to 3. What reads a buffer may be another mask in every step, of
    /// which bits are made anew.
    pub(crate) fn mask_bits_from(&self, kernel: Kernel) -> Option<usize> {
        match self.dim.max(self.dim_v) {
            ..=128 if kernel == Kernel::Forward && self.is_plain_forward() && !self.mask_reads => {
                Some(4)
            }
            ..=64 if kernel.shares_keys() => Some(32),
            65..=Tiles::MOST_DIM_OF_BOTH if kernel.owns_keys() => Some(8),
            65.. if kernel.shares_keys() => Some(8),
            _ => None,
        }
    }

    /// Whether partial tiles of `kernel` on Hopper read bits of the mask. Not in rows where a query sees many keys:
    /// where few tiles are partial they take no time, and bits of many have no room.
    pub(crate) fn has_mask_bits(&self, kernel: Kernel, sizes: &Sizes) -> bool {
        let from = self.mask_bits_from(kernel).filter(|_| !sizes.are_long());
        self.mask && from.is_some_and(|from| self.mask_steps >= from)
    }

    /// Whether the forward's scores are products and their weights all kept, of 16 bits.
    pub(crate) fn is_plain_forward(&self) -> bool {
        !self.score && !self.dropout && matches!(self.dtype, Elem::Bf16 | Elem::F16)
    }

    /// Whether the mask is as sparse as documents along the loop of `kernel`.
    pub(crate) fn is_sparse(&self, kernel: Kernel, sizes: &Sizes) -> bool {
        self.mask && sizes.mean_loop_len(kernel) < Sizes::FEW
    }

    /// A kernel of this class. What the kernel does not read is left at its default, so that
    /// classes share what they can.
    pub(crate) fn config(&self, kernel: Kernel, tiles: Tiles) -> Config {
        let ordered_dq = tiles.ordered_dq && !self.separate_dq;
        let plain = Config {
            ordered_dq,
            align: self.align,
            ..Config::new(kernel, self.dtype, self.dim, self.dim_v).tiled(tiles)
        };
        let wide = tiles.are_wide_backward(kernel, self.dim.max(self.dim_v));
        let separate_dq = wide || self.separate_dq || self.deterministic && !ordered_dq;
        let (group, mask, score, checked) = (self.group, self.mask, self.score, self.checked);
        match kernel {
            Kernel::Forward => Config {
                group,
                mask,
                score,
                checked,
                dropout: self.dropout,
                out_dtype: self.out_dtype,
                sink: self.sink,
                scale_blocks: self.scale_blocks,
                paged: self.paged,
                copied: match tiles.family {
                    Family::Hopper => self.copied(),
                    Family::Portable => Copied::default(),
                },
                ..plain
            },
            Kernel::Combine => Config { out_dtype: self.out_dtype, sink: self.sink, ..plain },
            Kernel::Delta => Config { grad_dtype: self.grad_dtype, sink: self.sink, ..plain },
            Kernel::RowWeightSum => {
                Config { group, mask, score, checked, grad_dtype: self.grad_dtype, ..plain }
            }
            Kernel::Backward | Kernel::BackwardDq => Config {
                group,
                mask,
                score,
                checked,
                dropout: self.dropout,
                grad_dtype: match kernel {
                    Kernel::BackwardDq => self.dq_dtype,
                    // Of a query head they are sums, and rounded when these are added up.
                    _ if tiles.split_gqa => Elem::F32,
                    _ => self.grad_dtype,
                },
                dscore: self.dscore,
                captures: kernel.owns_keys() && self.captures,
                deterministic: self.deterministic,
                separate_dq: kernel.owns_keys() && separate_dq,
                ..plain
            },
            Kernel::Dq => Config { grad_dtype: self.dq_dtype, ..plain },
            Kernel::GroupSums => Config { group, grad_dtype: self.grad_dtype, ..plain },
            Kernel::BlockLists
            | Kernel::RangeTable
            | Kernel::Sequences
            | Kernel::TransposeValues => plain,
        }
    }
}

impl Sizes {
    /// Below so many [`Self::mean_loop_len`] a mask is as sparse as documents.
    pub(crate) const FEW: f64 = 400.0;

    /// From so many [`Self::mean_kv_len`] on rows are long.
    pub(super) const LONG: usize = 16_384;

    /// The sizes of a problem without a mask whose sequences are all as long as its operands, as
    /// finely as a choice can depend on them: a cache that grows by a key a step, or packed
    /// documents that are others in every step, are the same problem for a while, and are not
    /// planned anew.
    pub fn of(dims: &Dims) -> Self {
        Self {
            batch: coarse(dims.batch),
            heads_q: dims.heads_q,
            heads_kv: dims.heads_kv,
            queries: coarse(dims.len_q),
            keys: coarse(dims.len_k),
            mean_kv_len: coarse(dims.len_k),
        }
    }

    /// What candidates are ranked at. Each other tile is a kernel to compile, between two tokens or two steps; so
    /// lengths are told apart by powers of four: 16 to 63 are 32, and 4096 to 16,383 are 8192. Of few
    /// queries, as in decoding, whose keys are what takes the time, these are told apart by powers of two,
    /// and those of a few tiles not at all.
    pub(super) fn ranked(&self) -> Self {
        const FEW_KEYS: usize = 256;
        let rung = |n: usize| 2 * 4usize.pow(n.max(16).ilog2() / 2);
        match self.keys.checked_next_power_of_two() {
            Some(keys) if self.has_few_queries() => Self { keys: keys.max(FEW_KEYS), ..*self },
            _ => Self { queries: rung(self.queries), keys: rung(self.keys), ..*self },
        }
    }

    /// Whether a query sees so many keys that a launch takes long enough for the device to be at its limit of power.
    pub(super) fn are_long(&self) -> bool {
        self.mean_kv_len >= Self::LONG
    }

    /// Whether there are as few queries as in decoding.
    pub(super) fn has_few_queries(&self) -> bool {
        self.queries <= 16
    }
}

/// Up to 64, where a tile may be as tall, the number itself; beyond, rounded up to one of eight
/// between two powers of two.
pub(super) fn coarse(n: usize) -> usize {
    match n.checked_next_power_of_two() {
        Some(above) if n > 64 => n.next_multiple_of(above / 16),
        _ => n,
    }
}
