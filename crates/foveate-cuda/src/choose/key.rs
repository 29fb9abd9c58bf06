//! Which problems a record speaks for.
//!
//! A record is of use if it holds for more than the problem it was made on, and of harm if it
//! holds for one that another configuration is faster on. So its key has what decides between
//! configurations, and only so finely:
//!
//! - the kernel, the dtype, head dims and alignment of its operands, and what it is compiled for:
//!   they decide what a step costs, and which registers and shared memory it takes;
//! - the *operations* of the score, and not its constants or what its buffers hold: a soft cap of
//!   30 costs what one of 50 does. Of a mask only that there is one: it costs in partial tiles
//!   alone;
//! - the mean length of the main loop: live keys of a query (in the backward, live queries of a
//!   key, over all heads of its group). A window, documents and a causal mask differ in it: the
//!   shorter the loop, the more weigh prologue, epilogue and what a tile covers beyond the mask.
//!   Rounded to a power of two, and beyond 4096 all the same;
//! - rows of all heads and batch entries, because with few of them small tiles keep more SMs
//!   busy. Rounded to a power of two, and beyond 2¹⁸, many CTAs for each SM of any GPU, all the
//!   same;
//! - queries of a sequence up to 128, those of all heads that share a tile, because a tile need not
//!   be taller than they are.
//!
//! Batch, heads, groups and lengths themselves are not in it.

use foveate_mods::Program;
use foveate_mods::ir::Node;
use foveate_problem::Spec;
use serde::{Deserialize, Serialize};

use super::class::{Class, Sizes};
use crate::compile::config::{Kernel, Tiles};

/// Beyond these nothing changes any more.
const LONGEST_LOOP: f64 = 4096.0;
const MOST_ROWS: f64 = (1 << 18) as f64;
const MOST_QUERIES: usize = 128;

/// The class of problems that a record is of.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordKey {
    /// Name of the kernel.
    pub kernel: String,
    /// Type of the operands.
    pub dtype: String,
    /// Elements of a row of q and k.
    pub dim: usize,
    /// Elements of a row of v.
    pub dim_v: usize,
    /// Bytes that rows are aligned to.
    pub align: usize,
    /// Whether there is a mask.
    pub mask: bool,
    /// Operations of the score, sorted; empty without one.
    pub score: String,
    /// Whether the score's derivative is evaluated.
    pub dscore: bool,
    /// Whether there is dropout.
    pub dropout: bool,
    /// Whether captured buffers get gradients.
    pub captures: bool,
    /// Whether keys lie in pages.
    pub paged: bool,
    /// Whether sums are in a fixed order.
    pub deterministic: bool,
    /// Packed GQA: whether the query heads of a key/value head share a tile.
    pub pack_gqa: bool,
    /// Queries of a sequence and of heads that share a tile, up to 128, rounded up to a power of
    /// two.
    pub queries: usize,
    /// Rows of the tiles that CTAs own.
    pub rows: usize,
    /// Live rows of the other axis for each of those, on average; see [`Sizes::mean_loop_len`].
    pub mean_loop_len: usize,
}

impl RecordKey {
    /// The class of `kernel` on a problem of these sizes; `None` for one that has no tiles to
    /// choose.
    pub fn of(kernel: Kernel, class: &Class, sizes: &Sizes, spec: &Spec) -> Option<Self> {
        let Sizes { batch, heads_q, heads_kv, queries, keys, .. } = *sizes;
        let rows = match kernel {
            Kernel::Forward | Kernel::BackwardDq => batch * heads_q * queries,
            Kernel::Backward => batch * heads_kv * keys,
            Kernel::Combine
            | Kernel::Delta
            | Kernel::RowWeightSum
            | Kernel::Dq
            | Kernel::GroupSums
            | Kernel::BlockLists
            | Kernel::RangeTable
            | Kernel::Sequences
            | Kernel::TransposeValues => return None,
        };
        // Tiles are what a record tells.
        let any = Tiles::portable(64, 64, 4, 1);
        let config = class.config(kernel, any);
        let pack_gqa = class.packs_gqa(kernel, sizes, None);
        let heads = if pack_gqa { class.group } else { 1 };
        let score = spec.score.as_ref().map(|score| operations(score.program()));
        Some(Self {
            kernel: kernel.name().to_owned(),
            dtype: config.dtype.name().to_owned(),
            dim: config.dim,
            dim_v: config.dim_v,
            align: config.align,
            mask: config.mask,
            score: score.unwrap_or_default(),
            dscore: config.dscore,
            dropout: config.dropout,
            captures: config.captures,
            paged: config.paged,
            deterministic: config.deterministic,
            pack_gqa,
            queries: (queries * heads).clamp(1, MOST_QUERIES).next_power_of_two(),
            rows: rounded((rows as f64).min(MOST_ROWS)),
            mean_loop_len: rounded(sizes.mean_loop_len(kernel).min(LONGEST_LOOP)),
        })
    }
}

/// The nearest power of two: what lies close to one, as many sizes do, is never taken for the
/// next.
pub(crate) fn rounded(n: f64) -> usize {
    1 << n.max(1.0).log2().round() as u32
}

/// The operations of a program without their operands, sorted: `div mul tanh`.
fn operations(program: &Program) -> String {
    let name = |node: &Node| match node {
        Node::Unary(op, _) => Some(format!("{op:?}")),
        Node::Binary(op, ..) => Some(format!("{op:?}")),
        Node::Select { .. } => Some("select".to_owned()),
        Node::Load { .. } => Some("load".to_owned()),
        Node::Cast(..) => Some("cast".to_owned()),
        Node::Leaf(_) | Node::Bool(_) | Node::I32(_) | Node::F32(_) | Node::Scalar(_) => None,
    };
    let mut names: Vec<String> = program.graph().nodes().iter().filter_map(name).collect();
    names.iter_mut().for_each(|name| name.make_ascii_lowercase());
    names.sort_unstable();
    names.join(" ")
}

#[cfg(test)]
mod tests {
    use foveate_mods::{MaskMod, masks, scores};

    use super::*;
    use crate::compile::config::Elem;

    const SIZES: Sizes =
        Sizes { batch: 2, heads_q: 16, heads_kv: 4, queries: 8192, keys: 8192, mean_kv_len: 8192 };

    fn spec(mask: Option<MaskMod>, cap: Option<f32>) -> Spec {
        let score = cap.map(|cap| scores::soft_cap(cap).unwrap());
        Spec { mask, score, scale: None, dropout: None }
    }

    fn key(kernel: Kernel, spec: &Spec, sizes: &Sizes) -> RecordKey {
        let class = Class {
            mask: spec.mask.is_some(),
            score: spec.score.is_some(),
            ..Class::new(Elem::Bf16, 128, 128, sizes.heads_q / sizes.heads_kv)
        };
        RecordKey::of(kernel, &class, &sizes.under(spec, None), spec).unwrap()
    }

    #[test]
    fn problems_that_want_the_same_tiles_have_the_same_key() {
        let window = |n| spec(Some(masks::sliding_window(n).unwrap()), Some(30.0));
        let one = key(Kernel::Forward, &window(1024), &SIZES);
        for sizes in [
            Sizes { batch: 7, ..SIZES },
            Sizes { heads_kv: 16, ..SIZES },
            Sizes { queries: 30_000, keys: 30_000, ..SIZES },
        ] {
            assert_eq!(key(Kernel::Forward, &window(1024), &sizes), one, "{sizes:?}");
        }
        let mask = masks::sliding_window(1000).unwrap();
        assert_eq!(key(Kernel::Forward, &spec(Some(mask), Some(50.0)), &SIZES), one);
        assert_eq!((one.mean_loop_len, one.rows, one.queries), (1024, 1 << 18, 128));
        assert_eq!(one.score, "div mul tanh");
    }

    #[test]
    fn problems_that_may_want_other_tiles_have_other_keys() {
        let causal = |cap| spec(Some(masks::causal()), cap);
        let window = spec(Some(masks::sliding_window(256).unwrap()), None);
        let short = Sizes { batch: 1, queries: 64, ..SIZES };
        let keys = [
            key(Kernel::Forward, &spec(None, None), &SIZES),
            key(Kernel::Forward, &causal(None), &SIZES),
            key(Kernel::Forward, &causal(Some(30.0)), &SIZES),
            key(Kernel::Forward, &window, &SIZES),
            key(Kernel::Forward, &causal(None), &short),
            key(Kernel::Backward, &causal(None), &SIZES),
            key(Kernel::BackwardDq, &causal(None), &SIZES),
        ];
        for (i, one) in keys.iter().enumerate() {
            assert!(!keys[..i].contains(one), "{one:?}");
        }
        // The backward's main loop runs over the whole group: four heads of queries a key.
        assert_eq!(key(Kernel::Backward, &window, &SIZES).mean_loop_len, 1024);
        let class = Class::new(Elem::Bf16, 128, 128, 4);
        assert_eq!(RecordKey::of(Kernel::Delta, &class, &SIZES, &window), None);
    }
}
