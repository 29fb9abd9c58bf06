//! Tensor parallelism with sequence parallelism: what a rank of `tensor` holds of a model, and what moves
//! between these ranks.
//!
//! Heads, feed-forward columns and the vocabulary are cut over the ranks of `tensor`; the residual
//! stream between the products is cut by tokens. A product with a weight that is cut by rows (qkv, gate
//! and up, head) reads all tokens, which are gathered before it; one with a weight that is cut by columns
//! (o, down, embedding) gives a part of a sum for all tokens, and the sum is scattered behind it. Norms
//! are of a rank's own tokens. Parameters that several ranks hold (norms, learned buffers, key/value
//! heads where these are fewer than ranks) have gradients that are summed over them.

use std::ops::Range;

use crate::config::ModelConfig;
use crate::error::NnError;

/// What of a model a rank of `tensor` holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPart {
    /// The rank's place on `tensor`.
    pub part: usize,
    /// Ranks on `tensor`.
    pub parts: usize,
    /// Its query heads.
    pub heads: Range<usize>,
    /// Query heads of all ranks.
    pub all_heads: usize,
    /// Its key/value heads: those of its query heads.
    pub kv_heads: Range<usize>,
    /// The ranks of `tensor` that hold the same key/value heads, it among them.
    pub kv_holders: Range<usize>,
    /// Its columns of the feed-forward block.
    pub ffn: Range<usize>,
    /// Its token ids.
    pub vocab: Range<usize>,
    /// The most token ids that a rank has.
    pub most_vocab: usize,
}

impl TensorPart {
    /// All of a model.
    pub fn whole(config: &ModelConfig) -> Self {
        Self {
            part: 0,
            parts: 1,
            heads: 0..config.num_attention_heads,
            all_heads: config.num_attention_heads,
            kv_heads: 0..config.kv_heads(),
            kv_holders: 0..1,
            ffn: 0..config.intermediate_size,
            vocab: 0..config.vocab_size,
            most_vocab: config.vocab_size,
        }
    }

    /// Part `part` of `parts`. Key/value heads are cut evenly with their query heads; where they are fewer
    /// than the ranks, ranks are cut evenly over them and share the query heads of theirs.
    ///
    /// # Errors
    /// When there are fewer query heads, feed-forward columns or token ids than ranks, with the counts that
    /// would do.
    ///
    /// # Panics
    /// When there is no such part.
    pub fn of(config: &ModelConfig, part: usize, parts: usize) -> Result<Self, NnError> {
        assert!(part < parts, "part {part} of {parts}");
        let (heads, kv_heads) = (config.num_attention_heads, config.kv_heads());
        for (field, count) in [
            ("num_attention_heads", heads),
            ("intermediate_size", config.intermediate_size),
            ("vocab_size", config.vocab_size),
        ] {
            if count < parts {
                let reason = format!(
                    "is {count}, which cannot be cut over {parts} ranks of tensor; use 1 to {count} of \
                     them"
                );
                return Err(NnError::config(field, reason));
            }
        }
        let group = heads / kv_heads.max(1);
        let (of_heads, of_kv, kv_holders) = if kv_heads >= parts {
            let own = even(kv_heads, part, parts);
            (own.start * group..own.end * group, own, part..part + 1)
        } else {
            let holders = |head: usize| even(parts, head, kv_heads);
            let head = (0..kv_heads).find(|&head| holders(head).contains(&part)).unwrap_or(0);
            let ranks = holders(head);
            let own = even(group, part - ranks.start, ranks.len());
            (head * group + own.start..head * group + own.end, head..head + 1, ranks)
        };
        Ok(Self {
            part,
            parts,
            heads: of_heads,
            all_heads: heads,
            kv_heads: of_kv,
            kv_holders,
            ffn: even(config.intermediate_size, part, parts),
            vocab: even(config.vocab_size, part, parts),
            most_vocab: config.vocab_size.div_ceil(parts),
        })
    }

    /// Whether it is a part, and not all.
    pub fn is_cut(&self) -> bool {
        self.parts > 1
    }

    /// Its first query head and its first key/value head.
    pub(crate) fn first_heads(&self) -> [usize; 2] {
        [self.heads.start, self.kv_heads.start]
    }

    /// The sizes of the model that the rank computes.
    pub(crate) fn local(&self, config: &ModelConfig) -> ModelConfig {
        ModelConfig {
            vocab_size: self.vocab.len(),
            intermediate_size: self.ffn.len(),
            num_attention_heads: self.heads.len(),
            num_key_value_heads: Some(self.kv_heads.len()),
            head_dim: Some(config.dim()),
            ..config.clone()
        }
    }

    /// Which of the `len` tokens of each row the rank has between products.
    pub fn stream(&self, len: usize) -> Range<usize> {
        even(len, self.part, self.parts)
    }
}

/// Part `part` of `parts` of `len` elements, which differ by 1 at most; the longer ones are first.
pub(crate) fn even(len: usize, part: usize, parts: usize) -> Range<usize> {
    let (each, longer) = (len / parts, len % parts);
    let start = |part: usize| part * each + part.min(longer);
    start(part)..start(part + 1)
}

/// The ranks of `tensor` that hold the same elements of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holders {
    /// All of them.
    All,
    /// Those with the same key/value heads.
    KvHeads,
}

/// Elements that other ranks of `tensor` hold, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The elements, in the arrays of all parameters that the rank holds.
    pub place: Range<usize>,
    /// The ranks.
    pub among: Holders,
    /// Whether this rank is the first of them: it counts them in norms, and saves them.
    pub first: bool,
}

/// The tokens that each rank of `tensor` has of every row of the stream, `[rows, len, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamCut {
    /// Rows.
    pub rows: usize,
    /// Tokens of a row, of all ranks.
    pub len: usize,
    /// Elements of a token.
    pub width: usize,
    /// Ranks.
    pub parts: usize,
    /// This rank.
    pub part: usize,
}

impl StreamCut {
    /// The elements of rank `part`, of each row a range of the stream.
    pub fn places(&self, part: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let Self { rows, len, width, parts, .. } = *self;
        let tokens = even(len, part, parts);
        (0..rows)
            .map(move |row| (row * len + tokens.start) * width..(row * len + tokens.end) * width)
    }

    /// Elements of rank `part`, in all rows.
    pub fn elems(&self, part: usize) -> usize {
        self.rows * even(self.len, part, self.parts).len() * self.width
    }
}
