//! Generation with a cache of keys and values.
//!
//! Positions are global: a query at position p of the text is query p of the attention program,
//! whatever part of the text is fed at once, so mask and score mean what they meant in training.
//! The whole text is one document.

use std::ops::Range;

use foveate::Plan;

use crate::backend::{Blocks, LayerAttention, LinearShape, PackedHeads, Part, Rotation};
use crate::cpu::{Cpu, attention};
use crate::error::{NnError, NnErrorKind};
use crate::matmul::{Matrix, matmul};
use crate::model::Model;
use crate::rope::RopeTable;
use foveate::tensor::random::Random;

/// How the next token is drawn from the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f32,
    /// Only this many of the likeliest tokens; 0 takes all.
    pub top_k: usize,
    /// Only the likeliest tokens whose probabilities reach this sum together; 1 takes all.
    pub top_p: f32,
    /// Fixes the draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

impl Sampling {
    fn check(&self) -> Result<(), NnError> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            let reason = format!("is {}; it must be 0 or more", self.temperature);
            return Err(NnError::config("temperature", reason));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            let reason = format!("is {}; it must be above 0 and at most 1", self.top_p);
            return Err(NnError::config("top_p", reason));
        }
        Ok(())
    }
}

/// A text being written: the model, the keys and values of what it has read, and the dice.
#[derive(Debug)]
pub struct Generator<'a> {
    model: &'a Model,
    sampling: Sampling,
    random: Random,
    capacity: usize,
    position: usize,
    plan: Plan,
    /// Keys and values of each layer, `[capacity, kv_heads · dim]`.
    cache: Vec<[Vec<f32>; 2]>,
    rope: RopeTable,
    logits: Vec<f32>,
}

impl Model {
    /// A generator for texts of up to `capacity` tokens, prompt included.
    ///
    /// # Errors
    /// When `capacity` is 0 or past `max_position_embeddings`, a sampling option is out of its
    /// range, or attention cannot be planned.
    pub fn generator(&self, capacity: usize, sampling: Sampling) -> Result<Generator<'_>, NnError> {
        sampling.check()?;
        self.check_parameters()?;
        let limit = self.config.max_position_embeddings;
        if capacity == 0 || capacity > limit {
            let reason = format!("is {capacity}; max_position_embeddings allows 1 to {limit}");
            return Err(NnError::config("capacity", reason));
        }
        let layers = 0..self.config.num_hidden_layers;
        let elems = capacity * self.config.kv_heads() * self.config.dim();
        let mut rope = RopeTable::default();
        rope.reach(&self.config, capacity);
        Ok(Generator {
            model: self,
            sampling,
            random: Random::new(sampling.seed),
            capacity,
            position: 0,
            plan: self.plans.generation(capacity)?,
            cache: layers.map(|_| [vec![0.0; elems], vec![0.0; elems]]).collect(),
            rope,
            logits: Vec::new(),
        })
    }
}

impl Generator<'_> {
    /// Tokens read so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Logits of what follows the last token read, `[vocab]`; empty before anything is read.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Draws the next token and reads it.
    ///
    /// # Errors
    /// When nothing was read yet, the cache is full, or a logit is not finite.
    pub fn next_token(&mut self) -> Result<u32, NnError> {
        if self.logits.is_empty() {
            return Err(NnError::batch("generation needs a prompt of at least one token"));
        }
        if let Some((id, logit)) = self.logits.iter().enumerate().find(|(_, z)| !z.is_finite()) {
            let message = format!(
                "after {} tokens the logit of token {id} is {logit}: the weights are finite, but \
                 so large that numbers computed from them are not; take an earlier checkpoint",
                self.position
            );
            return Err(NnErrorKind::NonFinite(message).into());
        }
        let token = sample(&self.logits, &self.sampling, &mut self.random);
        self.feed(&[token])?;
        Ok(token)
    }

    /// Reads `tokens` and returns the logits after each, `[tokens, vocab]`.
    ///
    /// # Errors
    /// When there are none, one is past the vocabulary, or the cache is full.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<Vec<f32>, NnError> {
        let hidden = self.read(tokens)?;
        let logits = self.project(&hidden);
        self.logits = logits[logits.len() - self.model.config.vocab_size..].to_vec();
        Ok(logits)
    }

    /// Reads `tokens`; only the logits after the last are computed.
    ///
    /// # Errors
    /// Those of [`Generator::feed`].
    pub fn prompt(&mut self, tokens: &[u32]) -> Result<(), NnError> {
        let hidden = self.read(tokens)?;
        self.logits = self.project(&hidden[hidden.len() - self.model.config.hidden_size..]);
        Ok(())
    }

    fn project(&self, hidden: &[f32]) -> Vec<f32> {
        let (width, vocab) = (self.model.config.hidden_size, self.model.config.vocab_size);
        let tokens = hidden.len() / width;
        let head = &self.model.weights[self.model.layout.head.clone()];
        let mut logits = vec![0.0; tokens * vocab];
        let (a, b) = (Matrix::rows(hidden, width), Matrix::transposed(head, width));
        matmul([tokens, vocab, width], a, b, &mut logits, vocab, false);
        logits
    }

    /// The normalised output of the last layer, `[tokens, hidden]`.
    fn read(&mut self, tokens: &[u32]) -> Result<Vec<f32>, NnError> {
        let (model, n) = (self.model, tokens.len());
        let (config, layout) = (&model.config, &model.layout);
        if n == 0 {
            return Err(NnError::batch("there are no tokens to read; give at least one"));
        }
        if n > self.capacity - self.position {
            return Err(NnError::batch(format!(
                "{n} tokens after {} do not fit the generator's capacity of {}",
                self.position, self.capacity
            )));
        }
        if let Some(token) = tokens.iter().find(|&&t| t as usize >= config.vocab_size) {
            let vocab = config.vocab_size;
            return Err(NnError::batch(format!("token {token}: the vocabulary has {vocab}")));
        }
        let weight = |place: &Range<usize>| Part { array: &model.weights, place: place.clone() };
        let shape = |inputs, outputs| LinearShape { tokens: n, inputs, outputs };
        let (hidden, wide, eps) =
            (config.hidden_size, config.intermediate_size, config.rms_norm_eps);
        let attended = config.attention_width();
        let heads = PackedHeads {
            rows: 1,
            len: n,
            heads_q: config.num_attention_heads,
            heads_kv: config.kv_heads(),
            dim: config.dim(),
        };
        let end = self.position + n;
        let positions: Vec<i32> = (self.position..end).map(|p| p as i32).collect();
        let mut x = vec![0.0; n * hidden];
        let (mut y, mut normed) = (x.clone(), x.clone());
        let mut inverse = vec![0.0; n];
        let mut qkv = vec![0.0; n * config.qkv_width()];
        let mut out = vec![0.0; n * attended];
        let mut gate_up = vec![0.0; n * 2 * wide];
        let mut activated = vec![0.0; n * wide];
        Cpu.embed(tokens, weight(&layout.embedding), hidden, &mut x);
        for (places, cache) in layout.layers.iter().zip(&mut self.cache) {
            Cpu.rms_norm(&x, weight(&places.norm), eps, &mut inverse, &mut normed);
            let qkv_shape = shape(hidden, config.qkv_width());
            Cpu.linear(qkv_shape, &normed, weight(&places.qkv), None, &mut qkv);
            let pairing = config.rope_pairing;
            Cpu.rope(heads, pairing, &self.rope, &positions, Rotation::Forward, &mut qkv);
            remember(cache, &qkv, heads, self.position);
            let plan = &model.plans.at(&self.plan, self.position)?;
            let values = weight(&places.learned);
            let layer = LayerAttention { plan, heads, learned: model.plans.learned(), values };
            attention::forward_cached(&layer, &qkv, cache, end, &mut out)?;
            Cpu.linear(shape(attended, hidden), &out, weight(&places.o), None, &mut y);
            let norm = weight(&places.mlp_norm);
            Cpu.add_rms_norm(&x, &mut y, norm, eps, &mut inverse, &mut normed);
            let gate_up_shape = shape(hidden, 2 * wide);
            Cpu.linear(gate_up_shape, &normed, weight(&places.gate_up), None, &mut gate_up);
            Cpu.swiglu(wide, &gate_up, &mut activated);
            let down = weight(&places.down);
            Cpu.linear(shape(wide, hidden), &activated, down, Some(&y), &mut x);
        }
        Cpu.rms_norm(&x, weight(&layout.norm), eps, &mut inverse, &mut normed);
        self.position = end;
        Ok(normed)
    }
}

/// Copies the keys and values of a packed projection into the cache, from `position` on.
fn remember(cache: &mut [Vec<f32>; 2], qkv: &[f32], heads: PackedHeads, position: usize) {
    let (q, kv) = (heads.heads_q * heads.dim, heads.heads_kv * heads.dim);
    for (i, row) in qkv.chunks_exact(q + 2 * kv).enumerate() {
        let to = (position + i) * kv..(position + i + 1) * kv;
        cache[0][to.clone()].copy_from_slice(&row[q..q + kv]);
        cache[1][to].copy_from_slice(&row[q + kv..]);
    }
}

fn sample(logits: &[f32], sampling: &Sampling, random: &mut Random) -> u32 {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // Ties go to the smaller id, so that a draw depends on nothing but the logits and the seed.
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if sampling.temperature == 0.0 {
        return order[0] as u32;
    }
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let most = logits[order[0]];
    let weight = |&i: &usize| (f64::from(logits[i] - most) / f64::from(sampling.temperature)).exp();
    let weights: Vec<f64> = order.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();
    let mut kept = 0.0;
    let enough = f64::from(sampling.top_p) * total;
    let count = weights.iter().take_while(|&&w| {
        let more = kept < enough;
        kept += if more { w } else { 0.0 };
        more
    });
    let count = count.count().max(1);
    let mut left = random.unit() * weights[..count].iter().sum::<f64>();
    for (&token, &w) in order[..count].iter().zip(&weights) {
        if left < w {
            return token as u32;
        }
        left -= w;
    }
    order[count - 1] as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_keeps_to_its_limits_and_its_seed() {
        let logits = [0.5, 3.0, 2.9, -1.0, 2.0];
        let draw = |s: Sampling| {
            let mut random = Random::new(s.seed);
            (0..400).map(|_| sample(&logits, &s, &mut random)).collect::<Vec<_>>()
        };
        let base = Sampling { seed: 3, ..Sampling::default() };
        assert!(draw(Sampling { temperature: 0.0, ..base }).iter().all(|&t| t == 1));
        let two = draw(Sampling { top_k: 2, ..base });
        assert!(two.contains(&1) && two.contains(&2) && two.iter().all(|&t| t == 1 || t == 2));
        // The two likeliest hold 0.40 + 0.37 of the probability.
        let nucleus = draw(Sampling { top_p: 0.7, ..base });
        assert!(nucleus.contains(&2) && nucleus.iter().all(|&t| t == 1 || t == 2));
        assert!(draw(base).contains(&4));
        assert_eq!(draw(base), draw(base));
        assert_ne!(draw(base), draw(Sampling { seed: 4, ..base }));
    }
}
