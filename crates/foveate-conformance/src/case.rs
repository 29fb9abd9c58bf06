//! What a case says: the keys of its table in a case file.

use std::collections::BTreeMap;

use foveate_reference::NonFinite;
use foveate_tensor::DType;
use foveate_tensor::hash::Fnv;
use serde::Deserialize;
use toml::Value;

use crate::error::CaseError;
use crate::overrides::{Operand, Override};

/// One problem, and why it is in the corpus.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// A sentence, unique in the corpus.
    pub name: String,
    /// What it guards against.
    pub why: String,
    /// Batch entries (1 for packed sequences).
    #[serde(default = "one")]
    pub batch: usize,
    /// Query heads and key/value heads.
    pub heads: [usize; 2],
    /// Rows of queries and of keys; of packed operands without the tail.
    pub len: [usize; 2],
    /// Length of query/key vectors and of value vectors.
    pub dim: [usize; 2],
    /// `f32`, `f16` or `bf16`; or `f8e4m3`, of which there is a forward only, whose out is bf16.
    pub dtype: String,
    /// q, k and v of `f8e4m3` have random scales.
    #[serde(default)]
    pub scales: bool,
    /// Rows of the blocks of q, and of k and v, that have scales of their own; without, heads have.
    pub scale_blocks: Option<[usize; 2]>,
    /// Scales of q, k and v are from 2⁻ⁿ to 2ⁿ times as large as usual.
    #[serde(default)]
    pub scale_spread: [u32; 3],
    /// Scales put in place of the random ones.
    #[serde(default)]
    pub set_scales: Vec<SetScale>,
    /// Where operands lie: an order of axes (`bshd`, `sbhd`, `bhsd`, `thd`), alone for dense
    /// storage, or after one word. A packing (`interleaved`, `stacked`, `per_head`,
    /// `gated_per_head`, `gated_interleaved`, `gated_stacked`) is one buffer for q, k and v.
    /// `cache` puts k and v in front of a longer cache, `sliced` cuts every vector from a longer
    /// one by odd numbers, `shifted` by 4 elements at either end; `padded` cuts every vector, those
    /// of out too, from one of the next multiple of 8 elements; `expanded` repeats one key/value
    /// head with stride 0, `repeated` one row of keys and values; `odd` gives axes of length 1
    /// meaningless strides and starts inside the buffer, `columns` makes the dim the slowest axis.
    #[serde(default = "bshd")]
    pub layout: String,
    /// Text form; absent means every key.
    pub mask: Option<String>,
    /// Text form; absent leaves scores as they are.
    pub score: Option<String>,
    /// Captured buffers by name.
    #[serde(default)]
    pub buffers: BTreeMap<String, BufferSpec>,
    /// Run-time scalars by name: integers are i32, numbers with a point f32.
    #[serde(default)]
    pub scalars: BTreeMap<String, Value>,
    /// Factor on `q·k`.
    pub scale: Option<f32>,
    /// A sink logit for each query head.
    #[serde(default)]
    pub sink: Sink,
    /// Probability of dropping an entry.
    pub dropout: Option<f32>,
    /// Lengths of packed sequences; their sums are at most `len`.
    pub varlen: Option<Lengths>,
    /// Rows after the last sequence.
    #[serde(default)]
    pub tail: usize,
    /// Keys and values lie in pages of so many rows, in no order; forward only.
    pub pages: Option<usize>,
    /// Number of keys of each batch entry in pages, at most that of `len`; that of `len` if absent.
    pub key_lens: Option<Vec<usize>>,
    /// The loss depends on `lse` too.
    #[serde(default)]
    pub d_lse: bool,
    /// k and v have one batch entry that all of q's share.
    #[serde(default)]
    pub shared_kv: bool,
    /// Global position of row 0 of q and of k.
    #[serde(default)]
    pub offsets: [i32; 2],
    /// Global position of each row of q; `offsets` is 0 then.
    pub q_map: Option<Vec<i32>>,
    /// Global position of each row of k and v.
    pub kv_map: Option<Vec<i32>>,
    /// Global index of the first batch entry, query head and key/value head.
    #[serde(default)]
    pub first: [i32; 3],
    /// Global batch entry of each one; that of `first` is 0 then.
    pub b_map: Option<Vec<i32>>,
    /// Global query head and key/value head of each one; those of `first` are 0 then.
    pub head_maps: Option<[Vec<i32>; 2]>,
    /// Numbers of queries and of keys of the whole problem.
    pub whole: Option<[i32; 2]>,
    /// Gradients are added to what the destinations hold.
    #[serde(default)]
    pub accumulate: bool,
    /// Gradients that get no destination: `dq`, `dk`, `dv`, `d_sink`, or the name of a learned
    /// buffer.
    #[serde(default)]
    pub without: Vec<String>,
    /// Dtype of the sink and of its gradient, f32 if absent.
    pub sink_dtype: Option<String>,
    /// Dtype of dq, dk and dv when it is not that of the operands.
    pub gradients: Option<String>,
    /// Factor on the random operands, 1 if absent.
    pub magnitude: Option<f64>,
    /// Numbers put into operands after the random fill.
    #[serde(default)]
    pub set: Vec<Override>,
    /// Gradients may be non-finite where gold is finite, too; see [`NonFinite::Kept`].
    #[serde(default)]
    pub spreads: bool,
    /// The score goes through something like tanh: factor 3 on the largest error of half types.
    #[serde(default)]
    pub tanh_like: bool,
}

/// A scale of q, k or v.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetScale {
    /// Whose it is.
    pub operand: Operand,
    /// Batch entry or sequence, head and block.
    pub at: [usize; 3],
    /// What it is.
    pub value: f32,
}

/// Sink logits.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Sink {
    /// None, or random ones.
    Random(bool),
    /// One for each query head.
    Given(Vec<f32>),
}

impl Default for Sink {
    fn default() -> Self {
        Self::Random(false)
    }
}

/// Lengths of packed sequences.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lengths {
    /// Of queries.
    pub q: Vec<usize>,
    /// Of keys.
    pub k: Vec<usize>,
}

/// A captured buffer: what is in it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BufferSpec {
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// Integers given one by one, row-major.
    pub ints: Option<Vec<i32>>,
    /// Floats given one by one, row-major; `nan` and `inf` are legal.
    pub floats: Option<Vec<f32>>,
    /// Document ids: document `i` has length `doc_lens[i]`; the last one takes the rest of the
    /// last axis. The same for every other axis.
    pub doc_lens: Option<Vec<usize>>,
    /// Random integers below this.
    pub below: Option<i32>,
    /// Random floats in `±normal`.
    pub normal: Option<f32>,
    /// Random bools, true with this probability.
    pub chance: Option<f64>,
    /// Receives a gradient.
    #[serde(default)]
    pub learned: bool,
    /// Type of the elements in memory: `bool`, `u8`, `i8`, `i16`, `i32`, `i64`, `f16`, `bf16`, `f32`
    /// or `f64`; without, bool, i32 or f32 as they are filled. Floats are rounded to it.
    pub element: Option<String>,
    /// The axes from the outermost in memory to the innermost.
    pub order: Option<Vec<usize>>,
    /// Axes of stride 0: what stands at index 0 of them is everywhere.
    #[serde(default)]
    pub broadcast: Vec<usize>,
    /// Distance of neighbours in memory, 1 if absent; what is between them is another number.
    pub gap: Option<usize>,
}

impl BufferSpec {
    /// Whether it is memory of somebody else's rather than row-major elements of its own.
    pub fn is_shared(&self) -> bool {
        let Self { element, order, broadcast, gap, .. } = self;
        element.is_some() || order.is_some() || !broadcast.is_empty() || gap.is_some()
    }
}

fn one() -> usize {
    1
}

fn bshd() -> String {
    "bshd".to_owned()
}

impl Case {
    /// The dtype of the operands.
    ///
    /// # Errors
    /// When it is none of `f32`, `f16`, `bf16`, `f8e4m3`.
    pub fn dtype(&self) -> Result<DType, CaseError> {
        match self.dtype.as_str() {
            "f8e4m3" => Ok(DType::F8E4M3),
            name => dtype(&self.name, name),
        }
    }

    /// The dtype of dq, dk and dv.
    ///
    /// # Errors
    /// When it is none of `f32`, `f16`, `bf16`.
    pub fn gradient_dtype(&self) -> Result<DType, CaseError> {
        dtype(&self.name, self.gradients.as_ref().unwrap_or(&self.dtype))
    }

    /// The dtype of the sink.
    ///
    /// # Errors
    /// When it is none of `f32`, `f16`, `bf16`.
    pub fn sink_dtype(&self) -> Result<DType, CaseError> {
        self.sink_dtype.as_ref().map_or(Ok(DType::F32), |name| dtype(&self.name, name))
    }

    /// Whether a gradient gets a destination.
    pub fn wants(&self, gradient: &str) -> bool {
        !self.without.iter().any(|name| name == gradient)
    }

    /// Rows of q, and of k and v, those after the last packed sequence included.
    pub fn rows(&self) -> [usize; 2] {
        self.len.map(|n| n + self.tail)
    }

    /// What its gradients may do with non-finite numbers.
    pub fn nonfinite(&self) -> NonFinite {
        if self.spreads { NonFinite::Kept } else { NonFinite::Same }
    }

    /// Where its random data starts: a hash of the name, so that no other case changes it.
    pub fn seed(&self) -> u64 {
        Fnv::of(self.name.as_bytes())
    }
}

fn dtype(at: &str, name: &str) -> Result<DType, CaseError> {
    let known = [DType::F32, DType::F16, DType::BF16];
    known
        .into_iter()
        .find(|d| d.name() == name)
        .ok_or_else(|| CaseError::new(at, format!("dtype `{name}`; a case takes f32, f16 or bf16")))
}
