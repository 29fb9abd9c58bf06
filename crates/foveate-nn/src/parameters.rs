//! Parameters: their names and shapes, their places in one array, and their first values.
//!
//! Names and shapes are those of a Hugging Face checkpoint of the family, so saving and loading map
//! nothing. All parameters lie in one array, as do their gradients and moments; a layer's query,
//! key and value weights lie one after another, and so do its gate and up weights, so that each is
//! one matrix to multiply with. Everything else starts at a multiple of [`ALIGN`] elements, and groups
//! at one of [`GROUP_ALIGN`], so that no block of moments is of two. Parameters that are not trained lie
//! behind all that are: gradients, moments and what completes weights to masters end before them.

use std::ops::Range;

use crate::config::{LearnedBuffer, ModelConfig};
use crate::error::NnError;
use crate::moments::BLOCK;
use crate::tensor::{Copied, Holders, TensorPart};
use foveate::tensor::random::Random;
use rayon::prelude::*;

/// Elements that the start of a matrix, of a vector and of a group is a multiple of: 128 bytes in
/// 16 bits.
const ALIGN: usize = 64;

/// Elements that the start of a group is a multiple of.
const GROUP_ALIGN: usize = BLOCK;

/// Places of what is not trained are counted from here until it is known where they begin.
const FROZEN: usize = 1 << 62;

/// A trained array: where it lies among all.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its name in a checkpoint.
    pub name: String,
    /// Length of each axis; linear weights are `[out, in]`. It is stored row-major.
    pub shape: Vec<usize>,
    /// Its elements in the array of all parameters, of their gradients or of a moment: those that the
    /// rank holds where it is cut over `tensor`.
    pub place: Range<usize>,
    /// How it is cut over the ranks of `tensor`; none where it is whole.
    pub cut: Option<AxisCut>,
}

/// What of an axis of a parameter a rank of `tensor` holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AxisCut {
    /// The axis: 0, rows, or 1, columns.
    pub axis: usize,
    /// The rank's part, in order. Of columns it is one range.
    pub ranges: Vec<Range<usize>>,
}

impl Parameter {
    /// Elements of all of it.
    pub fn elems(&self) -> usize {
        self.shape.iter().fold(1, |n, &d| n.saturating_mul(d))
    }

    /// What of `elements` of all of it is held: pieces of them, each with where it begins in the array of
    /// all parameters.
    pub fn held(&self, elements: Range<usize>) -> Vec<(Range<usize>, usize)> {
        let first = self.place.start;
        let within = |run: Range<usize>, at: usize| {
            let (start, end) = (run.start.max(elements.start), run.end.min(elements.end));
            (start < end).then(|| (start..end, first + at + (start - run.start)))
        };
        let Some(AxisCut { axis, ranges }) = &self.cut else {
            return within(0..self.elems(), 0).into_iter().collect();
        };
        let width = self.shape[1..].iter().product::<usize>().max(1);
        if *axis == 0 {
            let mut at = 0;
            let rows = |rows: &Range<usize>| {
                let run = rows.start * width..rows.end * width;
                at += run.len();
                within(run.clone(), at - run.len())
            };
            return ranges.iter().filter_map(rows).collect();
        }
        let own = &ranges[0];
        let rows = elements.start / width..elements.end.div_ceil(width).min(self.shape[0]);
        let row =
            |row: usize| within(row * width + own.start..row * width + own.end, row * own.len());
        rows.filter_map(row).collect()
    }
}

/// Parameters that are used together: the embedding, a layer, or what follows the layers.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterGroup {
    /// `embedding`, `layers.N` or `head`.
    pub name: String,
    /// Its elements that are trained.
    pub place: Range<usize>,
    /// Its elements that are not, behind those that are of all groups.
    pub frozen: Range<usize>,
    /// Its parameters, as indices; some may be frozen.
    pub parameters: Range<usize>,
}

impl ParameterGroup {
    /// Its elements, trained or not.
    pub fn elems(&self) -> usize {
        self.place.len().saturating_add(self.frozen.len())
    }
}

/// The places of all parameters of a model. Groups lie one after another without gaps, and hold what is
/// trained of their parameters; elements of a group that belong to no parameter are 0 and stay 0.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterLayout {
    parameters: Vec<Parameter>,
    groups: Vec<ParameterGroup>,
    elems: usize,
    /// Elements of what is trained: the first ones.
    trained: usize,
    pub(crate) embedding: Range<usize>,
    pub(crate) layers: Vec<LayerPlaces>,
    pub(crate) norm: Range<usize>,
    /// The output projection; the embedding when tied.
    pub(crate) head: Range<usize>,
    starts: Vec<Start>,
    /// What other ranks of `tensor` hold, too, in the order of their places.
    copied: Vec<Copied>,
    /// Where each parameter begins in the layout of all of the model.
    origins: Vec<usize>,
}

/// The places of what a layer multiplies with.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LayerPlaces {
    pub norm: Range<usize>,
    /// `[(heads_q + 2·heads_kv) · dim, hidden]`: queries, keys, values.
    pub qkv: Range<usize>,
    /// `[(heads_q + 2·heads_kv) · dim]`; empty without a bias.
    pub qkv_bias: Range<usize>,
    /// `[2 · dim]`, of query heads and of key heads; empty where heads are not normalised.
    pub head_norms: Range<usize>,
    pub o: Range<usize>,
    /// Of what attention adds; empty where that is not normalised.
    pub o_norm: Range<usize>,
    pub mlp_norm: Range<usize>,
    /// `[2 · intermediate, hidden]`: gate, up.
    pub gate_up: Range<usize>,
    pub down: Range<usize>,
    /// Of what the feed-forward part adds; empty where that is not normalised.
    pub down_norm: Range<usize>,
    /// Learned attention buffers, one after another.
    pub learned: Range<usize>,
}

/// Standard deviation of the first weights.
const INIT_STD: f32 = 0.02;

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Start {
    mean: f32,
    std: f32,
}

impl ParameterLayout {
    /// The layout of a model of these sizes; `learned` has the learned attention buffers of each
    /// layer, by name, and `frozen` says by its name whether a parameter is not trained.
    ///
    /// # Errors
    /// When a parameter is frozen and another is not with which it is one matrix, or a learned buffer
    /// is.
    pub fn new(
        config: &ModelConfig,
        learned: &[&[(String, LearnedBuffer)]],
        frozen: &dyn Fn(&str) -> bool,
    ) -> Result<Self, NnError> {
        Self::of_part(config, learned, frozen, &TensorPart::whole(config))
    }

    /// [`Self::new`] of what a rank of `tensor` holds. Shapes are those of the whole parameters.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn of_part(
        config: &ModelConfig,
        learned: &[&[(String, LearnedBuffer)]],
        frozen: &dyn Fn(&str) -> bool,
        part: &TensorPart,
    ) -> Result<Self, NnError> {
        let mut layout = Self::placed(config, learned, frozen, part)?;
        if part.is_cut() {
            let whole = Self::placed(config, learned, frozen, &TensorPart::whole(config))?;
            layout.origins = whole.origins;
        }
        Ok(layout)
    }

    fn placed(
        config: &ModelConfig,
        learned: &[&[(String, LearnedBuffer)]],
        frozen: &dyn Fn(&str) -> bool,
        part: &TensorPart,
    ) -> Result<Self, NnError> {
        let weight = Start { mean: 0.0, std: INIT_STD };
        // Norms that change nothing but the length.
        let ones = Start { mean: 1.0 - config.norm().offset, std: 0.0 };
        let mut all = Builder::new(frozen, part);
        let table = vec![config.vocab_size, config.hidden_size];
        let table = Shape::rows(part, table, [part.vocab.clone()]);
        let embedding = all.add("model.embed_tokens.weight", table.clone(), weight);
        all.close("embedding".to_owned());
        let layer = |layer: usize| {
            let learned = learned.get(layer).copied().unwrap_or_default();
            all.layer(config, layer, learned, [weight, ones])
        };
        let layers: Vec<LayerPlaces> = (0..config.num_hidden_layers).map(layer).collect();
        let norm = all.add("model.norm.weight", vec![config.hidden_size], ones);
        let head = match config.tie_word_embeddings {
            true => embedding.clone(),
            false => all.add("lm_head.weight", table, weight),
        };
        all.close("head".to_owned());
        all.finish(embedding, layers, norm, head)
    }

    /// Elements of what is trained, the first of all: those of gradients, of moments, and of what
    /// completes weights to masters.
    pub fn trained(&self) -> usize {
        self.trained
    }

    /// Elements of the gradients that are held at once where groups are updated in the backward pass:
    /// of the embedding, where it is the output projection, too, and of any other group.
    pub(crate) fn passing(&self) -> [usize; 2] {
        let tied = self.is_tied();
        let others = self.groups.iter().skip(usize::from(tied)).map(|group| group.place.len());
        [if tied { self.groups[0].place.len() } else { 0 }, others.max().unwrap_or(0)]
    }

    /// Whether what lies in `place` is trained.
    pub fn trains(&self, place: &Range<usize>) -> bool {
        place.start < self.trained
    }

    /// All parameters, in the order of their places. A tied output projection is not among them.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The groups, in the order of their places.
    pub fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }

    /// Whether the embedding is the output projection, too.
    pub(crate) fn is_tied(&self) -> bool {
        self.head == self.embedding
    }

    /// The groups that are used with `group`: the head has the embedding where they are tied.
    pub(crate) fn used_with(&self, group: usize) -> Vec<usize> {
        match self.is_tied() && group + 1 == self.groups.len() {
            true => vec![0, group],
            false => vec![group],
        }
    }

    /// The groups whose gradients begin where the backward pass comes to `group`: those of a tied embedding
    /// begin with the head's.
    pub(crate) fn begun_with(&self, group: usize) -> Vec<usize> {
        match self.is_tied() && group == 0 {
            true => Vec::new(),
            false => self.used_with(group),
        }
    }

    /// Elements of all groups together.
    pub fn elems(&self) -> usize {
        self.elems
    }

    /// The elements of parameter `index` that are held: pieces of them, each with the index of its first one among
    /// all parameters of the model, from which random bits are drawn. Where columns are held, these are a
    /// piece with as many indices that no other rank has.
    pub(crate) fn indexed(&self, index: usize) -> Vec<(Range<usize>, usize)> {
        let (p, origin) = (&self.parameters[index], self.origins[index]);
        match &p.cut {
            None => vec![(p.place.clone(), origin)],
            Some(AxisCut { axis: 0, .. }) => {
                let held = p.held(0..p.elems()).into_iter();
                held.map(|(run, at)| (at..at + run.len(), origin + run.start)).collect()
            }
            Some(AxisCut { ranges, .. }) => {
                vec![(p.place.clone(), origin + p.shape[0] * ranges[0].start)]
            }
        }
    }

    /// What other ranks of `tensor` hold, too; nothing where parameters are not cut over them.
    pub fn copied(&self) -> &[Copied] {
        &self.copied
    }

    /// Whether blocks of moments in 8 bits are of elements that the same ranks of `tensor` hold, so that these keep
    /// the same of them.
    pub fn blocks_are_whole(&self) -> bool {
        let trained = self.copied.iter().filter(|copied| self.trains(&copied.place));
        let mut before: Option<&Copied> = None;
        trained.into_iter().all(|copied| {
            let last = before.replace(copied);
            let goes_on =
                |last: &Copied| last.place.end == copied.place.start && last.among == copied.among;
            last.is_some_and(goes_on) || copied.place.start.is_multiple_of(BLOCK)
        })
    }

    /// Trained values of the whole model.
    pub fn parameter_count(&self) -> u64 {
        self.parameters.iter().map(|p| p.elems() as u64).sum()
    }

    /// Fills with the first values of parameter `index`, from one of them on; they depend on `seed` and
    /// index alone.
    pub(crate) fn draw(&self, index: usize, seed: u64) -> impl Fn(usize, &mut [f32]) + use<> {
        /// Values that a thread draws at a time.
        const PIECE: usize = 1 << 14;
        let Start { mean, std } = self.starts[index];
        let stream = (index as u64 + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        move |at, values| {
            if std == 0.0 {
                return values.fill(mean);
            }
            values.par_chunks_mut(PIECE).enumerate().for_each(|(number, values)| {
                let mut random = Random::new(seed ^ stream);
                // A normal number takes two.
                random.skip(2 * (at + number * PIECE) as u64);
                values.fill_with(|| mean + std * random.normal() as f32);
            });
        }
    }
}

/// The axes of a parameter, and what of them a rank holds.
#[derive(Clone)]
struct Shape {
    all: Vec<usize>,
    cut: Option<AxisCut>,
}

impl From<Vec<usize>> for Shape {
    fn from(all: Vec<usize>) -> Self {
        Self { all, cut: None }
    }
}

impl Shape {
    /// One of which a rank of `tensor` has some ranges of rows.
    fn rows(part: &TensorPart, all: Vec<usize>, ranges: impl Into<Vec<Range<usize>>>) -> Self {
        let cut = part.is_cut().then(|| AxisCut { axis: 0, ranges: ranges.into() });
        Self { all, cut }
    }

    /// One of which a rank of `tensor` has some columns.
    fn columns(part: &TensorPart, all: Vec<usize>, range: &Range<usize>) -> Self {
        let cut = part.is_cut().then(|| AxisCut { axis: 1, ranges: vec![range.clone()] });
        Self { all, cut }
    }

    /// Elements that the rank holds.
    fn elems(&self) -> usize {
        let len = |(axis, &len): (usize, &usize)| match &self.cut {
            Some(cut) if cut.axis == axis => cut.ranges.iter().map(Range::len).sum(),
            _ => len,
        };
        self.all.iter().enumerate().map(len).fold(1, usize::saturating_mul)
    }
}

/// A layout being made. Sizes that no memory holds stop at `usize::MAX`: such a model is counted
/// and refused, never made.
struct Builder<'a> {
    is_frozen: &'a dyn Fn(&str) -> bool,
    part: &'a TensorPart,
    copied: Vec<Copied>,
    parameters: Vec<Parameter>,
    starts: Vec<Start>,
    groups: Vec<ParameterGroup>,
    /// Of what is trained.
    elems: usize,
    /// Of what is not.
    frozen: usize,
    /// What is wrong with what is frozen.
    wrong: Option<NnError>,
}

impl<'a> Builder<'a> {
    fn new(is_frozen: &'a dyn Fn(&str) -> bool, part: &'a TensorPart) -> Self {
        Self {
            is_frozen,
            part,
            copied: Vec::new(),
            parameters: Vec::new(),
            starts: Vec::new(),
            groups: Vec::new(),
            elems: 0,
            frozen: 0,
            wrong: None,
        }
    }

    /// Adds a parameter at the next aligned place.
    fn add(
        &mut self,
        name: impl Into<String>,
        shape: impl Into<Shape>,
        start: Start,
    ) -> Range<usize> {
        self.add_packed([(name.into(), shape.into())], start)
    }

    /// Adds parameters at the next aligned place, each right behind the one before.
    fn add_packed<const N: usize>(
        &mut self,
        all: [(String, Shape); N],
        start: Start,
    ) -> Range<usize> {
        let frozen = (self.is_frozen)(&all[0].0);
        if let Some((other, _)) = all.iter().find(|(name, _)| (self.is_frozen)(name) != frozen) {
            let (is, not) = if frozen { (&all[0].0, other) } else { (other, &all[0].0) };
            let reason = format!("is frozen and {not} is not: they are one matrix; freeze both");
            self.wrong.get_or_insert(NnError::parameter(is, reason));
        }
        let first = if frozen {
            self.frozen = aligned(self.frozen, ALIGN);
            FROZEN + self.frozen.min(FROZEN)
        } else {
            self.align()
        };
        let mut end = first;
        for (name, shape) in all {
            end = self.push(name, shape, start, end);
        }
        if frozen {
            self.frozen = end - FROZEN;
        } else {
            self.elems = end;
        }
        first..end
    }

    /// Adds a parameter that is trained right behind the last one.
    fn append_trained(&mut self, name: String, shape: Vec<usize>, start: Start) {
        if (self.is_frozen)(&name) {
            let reason = "is a learned buffer, which cannot be frozen; make it one of `buffers`";
            self.wrong.get_or_insert(NnError::parameter(&name, reason));
        }
        self.elems = self.push(name, shape.into(), start, self.elems);
    }

    /// Notes a parameter that begins at `first`; where it ends.
    fn push(&mut self, name: String, shape: Shape, start: Start, first: usize) -> usize {
        let place = first..first.saturating_add(shape.elems());
        let end = place.end;
        if self.part.is_cut() && shape.cut.is_none() {
            self.copy(place.clone(), Holders::All);
        }
        let Shape { all: shape, cut } = shape;
        self.parameters.push(Parameter { name, shape, place, cut });
        self.starts.push(start);
        end
    }

    /// Notes elements that other ranks of `tensor` hold, too.
    fn copy(&mut self, place: Range<usize>, among: Holders) {
        let first = match among {
            Holders::All => 0,
            Holders::KvHeads => self.part.kv_holders.start,
        };
        self.copied.push(Copied { place, among, first: self.part.part == first });
    }

    /// Adds the projections of queries, keys and values of a layer, and their bias.
    fn projections(
        &mut self,
        config: &ModelConfig,
        name: &dyn Fn(&str) -> String,
        weight: Start,
    ) -> [Range<usize>; 2] {
        let (part, hidden, dim) = (self.part, config.hidden_size, config.dim());
        let (q, kv) = (config.attention_width(), config.kv_heads() * dim);
        let [of_q, of_kv] = [&part.heads, &part.kv_heads].map(|h| h.start * dim..h.end * dim);
        let projections = [("q", q, &of_q), ("k", kv, &of_kv), ("v", kv, &of_kv)];
        let qkv = if config.architecture.packed_weights {
            let rows = [of_q.clone(), behind(&of_kv, q), behind(&of_kv, q + kv)];
            let shape = Shape::rows(part, vec![q + 2 * kv, hidden], rows);
            self.add(name("self_attn.qkv_proj.weight"), shape, weight)
        } else {
            let named = |(p, rows, own): (&str, usize, &Range<usize>)| {
                let shape = Shape::rows(part, vec![rows, hidden], [own.clone()]);
                (name(&format!("self_attn.{p}_proj.weight")), shape)
            };
            self.add_packed(projections.map(named), weight)
        };
        let qkv_bias = if config.architecture.qkv_bias {
            let named = |(p, rows, own): (&str, usize, &Range<usize>)| {
                let shape = Shape::rows(part, vec![rows], [own.clone()]);
                (name(&format!("self_attn.{p}_proj.bias")), shape)
            };
            self.add_packed(projections.map(named), Start { mean: 0.0, std: 0.0 })
        } else {
            Range::default()
        };
        if part.kv_holders.len() > 1 {
            for (place, width) in [(&qkv, hidden), (&qkv_bias, 1)] {
                if !place.is_empty() {
                    self.copy(place.start + of_q.len() * width..place.end, Holders::KvHeads);
                }
            }
        }
        [qkv, qkv_bias]
    }

    /// Adds the parameters of a layer, and closes its group.
    fn layer(
        &mut self,
        config: &ModelConfig,
        layer: usize,
        learned: &[(String, LearnedBuffer)],
        [weight, ones]: [Start; 2],
    ) -> LayerPlaces {
        let (hidden, wide, dim) = (config.hidden_size, config.intermediate_size, config.dim());
        let (part, q) = (self.part, config.attention_width());
        let of_q = part.heads.start * dim..part.heads.end * dim;
        // Outputs into the residual stream shrink with depth, so that its variance does not grow.
        let output =
            Start { mean: 0.0, std: INIT_STD / (2.0 * config.num_hidden_layers as f32).sqrt() };
        let architecture = &config.architecture;
        let name = &|part: &str| format!("model.layers.{layer}.{part}");
        let norm = self.add(name("input_layernorm.weight"), vec![hidden], ones);
        let [qkv, qkv_bias] = self.projections(config, name, weight);
        let head_norms = if architecture.head_norms {
            let named = |p: &str| (name(&format!("self_attn.{p}_norm.weight")), vec![dim].into());
            self.add_packed(["q", "k"].map(named), ones)
        } else {
            Range::default()
        };
        let shape = Shape::columns(part, vec![hidden, q], &of_q);
        let o = self.add(name("self_attn.o_proj.weight"), shape, output);
        let mut norm_called = |part: &str| self.add(name(part), vec![hidden], ones);
        let (o_norm, mlp_norm) = if architecture.output_norms {
            let o_norm = norm_called("post_attention_layernorm.weight");
            (o_norm, norm_called("pre_feedforward_layernorm.weight"))
        } else {
            (Range::default(), norm_called("post_attention_layernorm.weight"))
        };
        let gate_up = if architecture.packed_weights {
            let rows = [part.ffn.clone(), behind(&part.ffn, wide)];
            let shape = Shape::rows(part, vec![2 * wide, hidden], rows);
            self.add(name("mlp.gate_up_proj.weight"), shape, weight)
        } else {
            let named = |p: &str| {
                let shape = Shape::rows(part, vec![wide, hidden], [part.ffn.clone()]);
                (name(&format!("mlp.{p}_proj.weight")), shape)
            };
            self.add_packed(["gate", "up"].map(named), weight)
        };
        let shape = Shape::columns(part, vec![hidden, wide], &part.ffn);
        let down = self.add(name("mlp.down_proj.weight"), shape, output);
        let down_norm = if architecture.output_norms {
            self.add(name("post_feedforward_layernorm.weight"), vec![hidden], ones)
        } else {
            Range::default()
        };
        let first = self.align();
        for (buffer, LearnedBuffer { shape, init, std }) in learned {
            let start = Start { mean: *init, std: *std };
            self.append_trained(name(&format!("self_attn.{buffer}")), shape.clone(), start);
        }
        let learned = first..self.elems;
        self.close(format!("layers.{layer}"));
        LayerPlaces {
            norm,
            qkv,
            qkv_bias,
            head_norms,
            o,
            o_norm,
            mlp_norm,
            gate_up,
            down,
            down_norm,
            learned,
        }
    }

    fn align(&mut self) -> usize {
        // What several ranks hold is in blocks of its own, so that they keep the same moments of it.
        let to = if self.part.is_cut() { BLOCK } else { ALIGN };
        self.elems = aligned(self.elems, to);
        self.elems
    }

    /// Makes a group of what was added since the last one.
    fn close(&mut self, name: String) {
        let first = self.groups.last().map_or(0, |g| g.place.end);
        let parameter = self.groups.last().map_or(0, |g| g.parameters.end);
        self.elems = aligned(self.elems, GROUP_ALIGN);
        let (place, parameters) = (first..self.elems, parameter..self.parameters.len());
        let frozen = self.groups.last().map_or(0, |g| g.frozen.end)..self.frozen;
        self.groups.push(ParameterGroup { name, place, frozen, parameters });
    }

    /// The layout, once it is known where what is not trained begins.
    fn finish(
        self,
        mut embedding: Range<usize>,
        mut layers: Vec<LayerPlaces>,
        mut norm: Range<usize>,
        mut head: Range<usize>,
    ) -> Result<ParameterLayout, NnError> {
        let Self { mut parameters, starts, mut groups, elems: trained, frozen, .. } = self;
        let Self { mut copied, wrong, .. } = self;
        if let Some(wrong) = wrong {
            return Err(wrong);
        }
        let move_behind = |place: &mut Range<usize>| {
            if place.start >= FROZEN && place.start < usize::MAX {
                let at = |at: usize| trained.saturating_add(at - FROZEN);
                *place = at(place.start)..at(place.end);
            }
        };
        if frozen > 0 {
            parameters.iter_mut().for_each(|p| move_behind(&mut p.place));
            copied.iter_mut().for_each(|c| move_behind(&mut c.place));
            layers.iter_mut().flat_map(LayerPlaces::all).for_each(move_behind);
            [&mut embedding, &mut norm, &mut head].into_iter().for_each(move_behind);
        }
        let elems = aligned(trained.saturating_add(frozen), ALIGN);
        for group in &mut groups {
            let at = |at: usize| trained.saturating_add(at);
            group.frozen = at(group.frozen.start)..at(group.frozen.end);
        }
        groups.last_mut().expect("there is a head").frozen.end = elems;
        copied.sort_by_key(|copied| copied.place.start);
        Ok(ParameterLayout {
            origins: parameters.iter().map(|p| p.place.start).collect(),
            parameters,
            groups,
            elems,
            trained,
            embedding,
            layers,
            norm,
            head,
            starts,
            copied,
        })
    }
}

fn behind(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

fn aligned(elems: usize, to: usize) -> usize {
    elems.checked_next_multiple_of(to).unwrap_or(usize::MAX)
}

impl LayerPlaces {
    fn all(&mut self) -> [&mut Range<usize>; 11] {
        [
            &mut self.norm,
            &mut self.qkv,
            &mut self.qkv_bias,
            &mut self.head_norms,
            &mut self.o,
            &mut self.o_norm,
            &mut self.mlp_norm,
            &mut self.gate_up,
            &mut self.down,
            &mut self.down_norm,
            &mut self.learned,
        ]
    }
}
