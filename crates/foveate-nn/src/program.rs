//! An attention program: what a query sees and what becomes of its scores, without shapes and
//! device.

use foveate::mask::{BlockMask, Tile, Varies};
use foveate::mods::text::{Names, parse_mask, parse_score};
use foveate::mods::{Head, Leaf, ModError, Node, NodeId, Program};
use foveate::{
    AnyBuffer, Attention, BufferData, DType, Device, ElementType, MaskMod, Positions, Problem,
    ScalarValue, ScoreMod,
};

use crate::config::{BufferValues, LearnedBuffer, ModelConfig, ProgramConfig, ScalarConfig};
use crate::error::{NnError, NnErrorKind};

/// The buffer of document ids, `[rows, len]` i32, that every batch brings.
pub const DOCUMENTS: &str = "doc";

/// What a query sees and what becomes of its scores.
#[derive(Clone, Debug, Default)]
pub struct AttentionProgram {
    /// The mask; none lets every query see every key. It may capture an i32 buffer `doc` with
    /// two axes, which every batch replaces by its document ids.
    pub mask: Option<MaskMod>,
    /// The score. Learned buffers it captures must be in `learned`.
    pub score: Option<ScoreMod>,
    /// Learned buffers by name: each layer trains its own.
    pub learned: Vec<(String, LearnedBuffer)>,
}

impl AttentionProgram {
    /// The program that `config` describes, for `heads` query heads. An empty mask lets every
    /// query see every key.
    ///
    /// # Errors
    /// When mask or score cannot be read (with the place), or a buffer's shape does not hold
    /// its values.
    pub fn parse(config: &ProgramConfig, heads: usize) -> Result<Self, NnError> {
        let doc = AnyBuffer::new(DOCUMENTS, &[1, 1], BufferData::I32(vec![0]), false)?;
        let mut names = Names::new().heads(heads).buffer(&doc);
        for (name, buffer) in &config.buffers {
            if name == DOCUMENTS {
                let reason = "every batch brings this buffer; choose another name";
                return Err(NnError::config(format!("attention.buffers.{name}"), reason));
            }
            let data = match &buffer.values {
                BufferValues::Bool(v) => BufferData::Bool(v.clone()),
                BufferValues::I32(v) => BufferData::I32(v.clone()),
                BufferValues::F32(v) => BufferData::F32(v.clone()),
            };
            names = names.buffer(&AnyBuffer::new(name, &buffer.shape, data, false)?);
        }
        for (name, LearnedBuffer { shape, init, .. }) in &config.learned {
            if name == DOCUMENTS || config.buffers.contains_key(name) {
                let reason = "there is a buffer of this name already; rename one";
                return Err(NnError::config(format!("attention.learned.{name}"), reason));
            }
            let elems = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
            let Some(elems) = elems.filter(|&n| n > 0 && n <= i32::MAX as usize) else {
                let reason = format!("shape {shape:?} has no elements, or too many");
                return Err(NnError::config(format!("attention.learned.{name}"), reason));
            };
            let data = BufferData::F32(vec![*init; elems]);
            names = names.buffer(&AnyBuffer::new(name, shape, data, true)?);
        }
        for (name, &value) in &config.scalars {
            let taken = config.buffers.contains_key(name) || config.learned.contains_key(name);
            if taken || name == DOCUMENTS {
                let reason = "there is a buffer of this name already; rename one";
                return Err(NnError::config(format!("attention.scalars.{name}"), reason));
            }
            let value = match value {
                ScalarConfig::Bool(v) => ScalarValue::Bool(v),
                ScalarConfig::I32(v) => ScalarValue::I32(v),
                ScalarConfig::F32(v) => ScalarValue::F32(v),
            };
            names = names.scalar(name, value);
        }
        let mask = Some(config.mask.trim()).filter(|m| !m.is_empty());
        let score = config.score.as_deref();
        Ok(Self {
            mask: mask
                .map(|m| parse_mask(m, &names))
                .transpose()
                .map_err(in_field("attention.mask"))?,
            score: score
                .map(|s| parse_score(s, &names))
                .transpose()
                .map_err(in_field("attention.score"))?,
            learned: config.learned.iter().map(|(n, b)| (n.clone(), b.clone())).collect(),
        })
    }

    /// The buffers that mask and score read.
    pub fn captures(&self) -> impl Iterator<Item = &AnyBuffer> {
        let mask = self.mask.iter().flat_map(|m| m.program().graph().buffers());
        let score = self.score.iter().flat_map(|s| s.program().graph().buffers());
        mask.chain(score)
    }

    /// Whether mask or score read the documents of a batch.
    pub fn reads_documents(&self) -> bool {
        self.captures().any(|b| b.name() == DOCUMENTS)
    }

    /// Whether mask or score tell the rows of a batch apart by more than their documents: a part of a
    /// batch then has to know which of its rows it has.
    pub fn tells_rows_apart(&self) -> bool {
        let mask = self.mask.as_ref().map(|m| m.program());
        let score = self.score.as_ref().map(|s| s.program());
        mask.into_iter().chain(score).any(|program| {
            let graph = program.graph();
            let is_row = |id: NodeId| *graph.node(id) == Node::Leaf(Leaf::B);
            graph.nodes().iter().any(|node| {
                let (mut operands, mut reads) = (Vec::new(), false);
                node.for_each_operand(|id| operands.push(id));
                if let Node::Load { buffer, .. } = node
                    && graph.buffers()[*buffer as usize].name() == DOCUMENTS
                {
                    operands.remove(0);
                }
                operands.into_iter().for_each(|id| reads |= is_row(id));
                reads
            })
        })
    }

    /// The program over the documents `[rows, len]` of a batch.
    ///
    /// # Errors
    /// When there is not a document for each token.
    pub fn over(&self, shape: [usize; 2], documents: &[i32]) -> Result<Self, NnError> {
        let doc = AnyBuffer::new(DOCUMENTS, &shape, BufferData::I32(documents.to_vec()), false)?;
        let reads = |p: &Program| p.graph().buffers().iter().any(|b| b.name() == DOCUMENTS);
        let bound = |p: &Program| if reads(p) { p.rebind(&doc) } else { Ok(p.clone()) };
        Ok(Self {
            mask: self.mask.clone().map(|mask| mask.map(bound)).transpose()?,
            score: self.score.clone().map(|score| score.map(bound)).transpose()?,
            learned: self.learned.clone(),
        })
    }

    /// The program without shapes and device.
    pub fn attention(&self) -> Attention {
        let mut attention = Attention::new();
        if let Some(mask) = &self.mask {
            attention = attention.mask(mask.clone());
        }
        if let Some(score) = &self.score {
            attention = attention.score(score.clone());
        }
        attention
    }

    /// Whether the mask lets no query of a row of `len` tokens see any key, with two documents in the
    /// row where it knows documents: see [`foveate::mask::sees_nothing`].
    pub fn sees_nothing(&self, config: &ModelConfig, len: usize) -> bool {
        let ids: Vec<i32> = (0..len).map(|at| i32::from(at >= len.div_ceil(2))).collect();
        let Ok(Self { mask: Some(mask), .. }) = self.over([1, len], &ids) else { return false };
        let heads = [1, config.num_attention_heads, config.kv_heads()];
        foveate::mask::sees_nothing(&mask, heads, [len, len])
    }

    /// Pairs of query and key that the mask lets through of rows `[rows, len]` with these `documents`, in
    /// the mean of the heads of a model.
    ///
    /// # Errors
    /// When there is not a document for each token.
    pub fn live_pairs(
        &self,
        config: &ModelConfig,
        shape @ [rows, len]: [usize; 2],
        documents: &[i32],
    ) -> Result<f64, NnError> {
        let Self { mask: Some(mask), .. } = self.over(shape, documents)? else {
            return Ok((rows * len) as f64 * len as f64);
        };
        let (all_heads, varies) = (config.num_attention_heads, Varies::of(&mask));
        let each = |varies: bool, n: usize| if varies { n } else { 1 };
        let (entries, heads) = (each(varies.by_batch, rows), each(varies.by_head, all_heads));
        let count = |n: usize| i32::try_from(n).expect("a batch is counted in i32");
        let pairs = |b: usize, h: usize| {
            let (h_kv, lens) = (count(h / (all_heads / config.kv_heads())), count(len));
            let head = Head { b: count(b), h: count(h), h_kv, q_len: lens, kv_len: lens };
            let tiles = BlockMask::build(&mask, head, len, len, Tile { q: 128, kv: 128 });
            tiles.live_by_row().iter().sum::<u64>()
        };
        let all = (0..entries).flat_map(|b| (0..heads).map(move |h| (b, h)));
        let sum: u64 = all.map(|(b, h)| pairs(b, h)).sum();
        Ok(sum as f64 * rows as f64 / (entries * heads) as f64)
    }

    /// Whether mask or score read a leaf.
    pub(crate) fn reads(&self, leaf: Leaf) -> bool {
        self.mask.as_ref().is_some_and(|m| m.program().uses(leaf))
            || self.score.as_ref().is_some_and(|s| s.program().uses(leaf))
    }

    /// Refuses what no device could run for the heads of a model, whatever the shape of a batch.
    pub(crate) fn check(&self, config: &ModelConfig) -> Result<(), NnError> {
        self.check_learned()?;
        self.check_documents()?;
        let heads = [config.num_attention_heads, config.kv_heads(), config.dim()];
        let problem = problem(heads, [1, 1])?;
        self.attention().plan(&problem, &Device::cpu())?;
        let cached = self.attention().positions(Positions::offset(0), Positions::Rows);
        cached.plan(&problem.forward_only(), &Device::cpu())?;
        Ok(())
    }

    /// Refuses a `doc` that the documents of a batch cannot replace.
    fn check_documents(&self) -> Result<(), NnError> {
        let of_a_batch =
            |b: &AnyBuffer| b.shape().len() == 2 && b.element() == ElementType::I32 && !b.learned();
        match self.captures().find(|b| b.name() == DOCUMENTS && !of_a_batch(b)) {
            Some(other) => {
                let reason = format!(
                    "is captured as {} of shape {:?}; every batch brings this buffer, i32 [rows, len]: read it \
                     at [b, q], or choose another name",
                    other.element(),
                    other.shape()
                );
                Err(NnError::config(format!("attention.buffers.{DOCUMENTS}"), reason))
            }
            None => Ok(()),
        }
    }

    fn check_learned(&self) -> Result<(), NnError> {
        if let Some(mask) = &self.mask {
            mask.check().map_err(in_field("attention.mask"))?;
        }
        if let Some(score) = &self.score {
            score.check().map_err(in_field("attention.score"))?;
        }
        for (name, LearnedBuffer { shape, .. }) in &self.learned {
            let field = format!("attention.learned.{name}");
            let Some(captured) = self.captures().find(|b| b.name() == name) else {
                return Err(NnError::config(field, "is not read by the score; remove it"));
            };
            if !captured.learned() || captured.shape().len() != shape.len() {
                let reason = format!(
                    "has {} axes; the score reads {} buffer with {}",
                    shape.len(),
                    if captured.learned() { "a learned" } else { "a constant" },
                    captured.shape().len()
                );
                return Err(NnError::config(field, reason));
            }
        }
        let missing =
            |b: &&AnyBuffer| b.learned() && self.learned.iter().all(|(n, _)| n != b.name());
        match self.captures().find(missing) {
            Some(b) => {
                let reason = "the score reads it as learned, but its shape is not given";
                Err(NnError::config(format!("attention.learned.{}", b.name()), reason))
            }
            None => Ok(()),
        }
    }
}

/// Attention of query heads, key/value heads and their length over `[rows, len]`, in f32.
pub(crate) fn problem(
    [heads_q, heads_kv, dim]: [usize; 3],
    [rows, len]: [usize; 2],
) -> Result<Problem, NnError> {
    let kv = [rows, heads_kv, len, dim];
    Ok(Problem::shaped(DType::F32, [rows, heads_q, len, dim], kv, kv)?)
}

/// Puts the field of the configuration before an error of a mask or score.
fn in_field(field: &'static str) -> impl Fn(ModError) -> NnError {
    move |error| NnErrorKind::Text { field: field.to_owned(), error }.into()
}

#[cfg(test)]
mod tests {
    use foveate::Buffer;
    use foveate::mods::masks;

    use super::*;
    use crate::config::BufferConfig;
    use crate::tests::tiny;

    #[test]
    fn documents_that_a_text_has_and_those_of_a_batch_are_apart() {
        let of = |mask: &str| {
            let config = ProgramConfig { mask: mask.into(), ..ProgramConfig::default() };
            AttentionProgram::parse(&config, 4).unwrap()
        };
        let pairs = |mask: &str| {
            let program = of(mask);
            program.check(&tiny(true)).unwrap();
            program.live_pairs(&tiny(true), [1, 6], &[0, 0, 1, 1, 1, 1]).unwrap()
        };
        assert_eq!(pairs("causal & document"), 3.0 + 10.0);
        assert_eq!(pairs("causal & documents(3, 3)"), 6.0 + 6.0);
        assert_eq!(pairs("causal & document & documents(3, 3)"), 3.0 + 1.0 + 6.0);
        assert!(!of("documents(3, 3)").reads_documents());
    }

    #[test]
    fn a_scalar_has_no_name_of_a_buffer() {
        let values = BufferValues::I32(vec![1]);
        let buffers = [("first".to_owned(), BufferConfig { shape: vec![1], values })].into();
        let config = ProgramConfig { mask: "causal".into(), buffers, ..ProgramConfig::default() };
        for name in [DOCUMENTS, "first"] {
            let scalars = [(name.to_owned(), ScalarConfig::I32(1))].into();
            let config = ProgramConfig { scalars, ..config.clone() };
            let said = AttentionProgram::parse(&config, 4).unwrap_err().to_string();
            let wanted = "there is a buffer of this name already; rename one";
            assert_eq!(said, format!("attention.scalars.{name}: {wanted}"));
        }
    }

    #[test]
    fn a_capture_that_documents_of_a_batch_cannot_replace_is_refused() {
        let of_a_row = masks::document(&Buffer::vector(DOCUMENTS, vec![0; 6])).unwrap();
        let program = AttentionProgram { mask: Some(of_a_row), ..AttentionProgram::default() };
        let said = program.check(&tiny(true)).unwrap_err().to_string();
        let wanted = "attention.buffers.doc: is captured as i32 of shape [6]; every batch brings this buffer, \
                      i32 [rows, len]: read it at [b, q], or choose another name";
        assert_eq!(said, wanted);
    }
}
