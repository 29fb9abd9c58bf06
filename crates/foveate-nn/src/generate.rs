//! Generation with a cache of keys and values.
//!
//! Positions are global: a query at position p of the text is query p of the attention program,
//! whatever part of the text is fed at once, so mask and score mean what they meant in training.
//! The whole text is one document.

use std::ops::Range;
use std::sync::Arc;

use foveate::tensor::random::Random;

use crate::backend::{Array, Blocks, LinearShape, PackedHeads, Part};
use crate::batch::{Batch, IGNORE};
use crate::cpu::Cpu;
use crate::error::{NnError, NnErrorKind};
use crate::model::Model;
use crate::pass::{Pass, Whole};
use crate::rope::RopeTable;
use crate::step::Cache;
use crate::tape::Workspace;

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
pub struct Generator<'a, B: Blocks = Cpu> {
    model: &'a Model<B>,
    sampling: Sampling,
    random: Random,
    capacity: usize,
    plans: Vec<B::Plan>,
    workspace: Workspace<B::Array>,
    cache: Cache<B::Array>,
    tables: Vec<Arc<RopeTable>>,
    logits: Vec<f32>,
}

impl<B: Blocks> Model<B> {
    /// A generator for texts of up to `capacity` tokens, prompt included.
    ///
    /// # Errors
    /// When `capacity` is 0 or past `max_position_embeddings`, a sampling option is out of its
    /// range, the cache does not fit the memory, or attention cannot be planned.
    pub fn generator(
        &self,
        capacity: usize,
        sampling: Sampling,
    ) -> Result<Generator<'_, B>, NnError> {
        sampling.check()?;
        self.check_parameters()?;
        if self.is_cut() {
            let reason = "the parameters are cut over ranks; generate from a checkpoint on one";
            return Err(NnErrorKind::Ranks { message: reason.to_owned(), lost: false }.into());
        }
        let limit = self.config.max_position_embeddings;
        if capacity == 0 || capacity > limit {
            let reason = format!("is {capacity}; max_position_embeddings allows 1 to {limit}");
            return Err(NnError::config("capacity", reason));
        }
        let (mut running, mut cache) = (self.running(), Cache::default());
        let blocks = &mut running.blocks;
        cache.fit(blocks, &self.config, capacity)?;
        let heads = PackedHeads::of(&self.config, [1, capacity]);
        let mut tables = Vec::new();
        RopeTable::reach_all(&mut tables, &self.config, capacity);
        Ok(Generator {
            model: self,
            sampling,
            random: Random::new(sampling.seed),
            capacity,
            plans: self.programs.plan(blocks, heads, [0, 0], &[], true)?,
            workspace: Workspace::default(),
            cache,
            tables,
            logits: Vec::new(),
        })
    }
}

impl<B: Blocks> Generator<'_, B> {
    /// Tokens read so far.
    pub fn position(&self) -> usize {
        self.cache.position
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
                self.position()
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
        self.read(tokens)?;
        let logits = self.project(0..tokens.len())?;
        self.logits = logits[logits.len() - self.model.config.vocab_size..].to_vec();
        Ok(logits)
    }

    /// Reads `tokens`; only the logits after the last are computed.
    ///
    /// # Errors
    /// Those of [`Generator::feed`].
    pub fn prompt(&mut self, tokens: &[u32]) -> Result<(), NnError> {
        self.read(tokens)?;
        self.logits = self.project(tokens.len() - 1..tokens.len())?;
        Ok(())
    }

    /// The logits after some of the tokens read last, `[tokens, vocab]`.
    fn project(&mut self, tokens: Range<usize>) -> Result<Vec<f32>, NnError> {
        let Self { model, workspace: Workspace { normed, logits, .. }, .. } = self;
        let mut running = model.running();
        let blocks = &mut running.blocks;
        let (inputs, outputs) = (model.config.hidden_size, model.config.vocab_size);
        let shape = LinearShape { tokens: tokens.len(), inputs, outputs };
        blocks.resize("logits", logits, blocks.precision().weights, tokens.len() * outputs)?;
        let x = Part { array: &*normed, place: tokens.start * inputs..tokens.end * inputs };
        let head = Part { array: &model.weights.array, place: model.layout.head.clone() };
        blocks.linear(shape, x, head, None, None, logits)?;
        let mut read = vec![0.0; logits.elems()];
        blocks.download(Part::whole(logits), &mut read)?;
        if let Some(cap) = model.config.architecture.logit_cap {
            read.iter_mut().for_each(|z| *z = cap * (*z / cap).tanh());
        }
        Ok(read)
    }

    /// Leaves the normalised output of the last layer, `[tokens, hidden]`, in the workspace.
    fn read(&mut self, tokens: &[u32]) -> Result<(), NnError> {
        let (model, n, position) = (self.model, tokens.len(), self.position());
        if n == 0 {
            return Err(NnError::batch("there are no tokens to read; give at least one"));
        }
        if n > self.capacity - position {
            return Err(NnError::batch(format!(
                "{n} tokens after {position} do not fit the generator's capacity of {}",
                self.capacity
            )));
        }
        let vocab = model.config.vocab_size;
        if let Some(token) = tokens.iter().find(|&&t| t as usize >= vocab) {
            return Err(NnError::batch(format!("token {token}: the vocabulary has {vocab}")));
        }
        let positions: Vec<i32> = (position..position + n).map(|p| p as i32).collect();
        let batch = Batch {
            rows: 1,
            len: n,
            tokens,
            labels: &vec![IGNORE; n],
            documents: &vec![0; n],
            positions: &positions,
            live_pairs: &[],
            order: &[],
        };
        let mut running = model.running();
        let blocks = &mut running.blocks;
        let batch = blocks.upload(&batch, &self.tables)?;
        let plans = self.plans.iter().map(|plan| blocks.at(plan, position));
        let plans: Vec<B::Plan> = plans.collect::<Result<_, _>>()?;
        let programs = &model.programs.of_layers(&plans);
        let (config, layout) = (&model.config, &model.layout);
        let (batch, shape) = (&batch, [1, n]);
        let (part, context, stream, z_weight) = (&model.part, None, None, 0.0);
        let mut pass =
            Pass { config, layout, programs, batch, shape, context, part, stream, z_weight };
        let mut parameters = Whole { weights: &model.weights.array, gradients: None, reused: None };
        let cache = Some(&mut self.cache);
        pass.forward(blocks, &mut parameters, &mut self.workspace, cache)?;
        self.cache.position += n;
        Ok(())
    }
}

impl<B: Blocks> std::fmt::Debug for Generator<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generator").field("position", &self.position()).finish_non_exhaustive()
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
