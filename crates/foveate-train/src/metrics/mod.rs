//! What a run reports: JSON lines (the source of truth), TensorBoard event files, a curve.

pub mod curve;
mod jsonl;
mod tensorboard;

pub use jsonl::JsonlLog;
pub use tensorboard::TensorBoardLog;
pub(crate) use tensorboard::event_files;

use std::time::{SystemTime, UNIX_EPOCH};

use foveate_nn::ModelConfig;
use serde::{Deserialize, Serialize};

/// What ran, once for each start of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunMetrics {
    /// Optimiser steps done before this start.
    pub step: u64,
    /// When, in seconds since 1970 (UTC).
    pub unix_time: f64,
    /// Version of the trainer.
    pub version: String,
    /// Commit it was built from, where that is known.
    pub commit: Option<String>,
    /// Name of the machine, where the system says.
    pub host: Option<String>,
    /// Threads of the pool that computes.
    pub threads: usize,
}

/// What a model computes in a second, in TFLOP/s, or the share of a peak that this is: each product once,
/// forward and backward, and nothing that is computed again. Counts differ in the pairs of query and key that
/// attention is counted with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tflops {
    /// With those that the masks let through.
    pub live: f64,
    /// With all of a row: torchtitan's count.
    pub dense: f64,
    /// With half of these, as a causal mask has: Megatron Bridge's.
    pub half: f64,
}

impl Tflops {
    /// Of so many tokens a second in rows of `len`, of which a query sees `keys` on average.
    pub fn of(config: &ModelConfig, tokens_per_s: f64, len: usize, keys: f64) -> Self {
        let len = len as f64;
        let count = |keys: f64| tokens_per_s * config.flops_per_token(keys).total() * 1e-12;
        Self { live: count(keys), dense: count(len), half: count(len / 2.0) }
    }

    /// The share of `peak` that this is.
    pub fn mfu(self, peak: f64) -> Self {
        Self { live: self.live / peak, dense: self.dense / peak, half: self.half / peak }
    }
}

/// One training step. A *packed* token is any place of a row, padding included: what is computed. A
/// *labelled* token is one that has a target: what is learned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Optimiser step, from 1.
    pub step: u64,
    /// When it ended, in seconds since 1970 (UTC).
    pub unix_time: f64,
    /// Passes over the training documents: whole ones, and the share of the one under way.
    pub epoch: f64,
    /// Mean cross-entropy of a labelled token, in nats.
    pub loss: f64,
    /// Mean z-loss of a labelled token, which `loss` has not; none where the recipe asks for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub z_loss: Option<f64>,
    /// Global norm of the gradients of the mean losses, before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Labelled tokens seen so far.
    pub labelled_tokens: u64,
    /// Labelled tokens a second, of this step.
    pub labelled_tokens_per_s: f64,
    /// Packed tokens a second, of this step.
    pub packed_tokens_per_s: f64,
    /// Share of this step's packed tokens that are padding, from 0 to 1.
    pub padding_share: f64,
    /// Model TFLOP/s, every query counted with a whole row of keys.
    pub tflops_dense: f64,
    /// Model TFLOP/s, queries counted with the keys that the mask lets through.
    pub tflops_live: f64,
    /// Model TFLOP/s, every query counted with half a row of keys.
    #[serde(default)]
    pub tflops_half: f64,
    /// Share of the devices' peak in 16 bits that these three are, as `live`, `dense` and `half`; none where
    /// the peak is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<Tflops>,
    /// Memory of the GPU that the run holds, in bytes; on a CPU resident memory of the process, 0 where the
    /// system does not say.
    pub memory_bytes: u64,
    /// The most it has been, in bytes.
    pub peak_memory_bytes: u64,
    /// Share of the step's time spent in attention, from 0 to 1; like the times of other blocks left out of
    /// a step whose blocks were not timed, as most are on a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_share: Option<f64>,
    /// Time in products with the weights of the layers, forward and backward, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_seconds: Option<f64>,
    /// Time of the output projection and the loss, forward and backward, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_seconds: Option<f64>,
    /// Time that the step waited for its packed rows, in seconds: they are made on another thread.
    pub data_seconds: f64,
    /// Time of clipping and AdamW, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer_seconds: Option<f64>,
    /// Time of the whole step, in seconds; evaluations and saves are not part of it.
    pub seconds: f64,
}

/// One look at the held-out documents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalMetrics {
    /// Optimiser steps done.
    pub step: u64,
    /// When it ended, in seconds since 1970 (UTC).
    pub unix_time: f64,
    /// Mean loss of a held-out token, in nats.
    pub held_out_loss: f64,
    /// `e` to that loss.
    pub perplexity: f64,
    /// Held-out tokens that have a target, looked at.
    pub labelled_tokens: u64,
    /// Time it took, in seconds.
    pub seconds: f64,
}

/// One checkpoint saved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaveMetrics {
    /// Optimiser steps done.
    pub step: u64,
    /// When it was whole, in seconds since 1970 (UTC).
    pub unix_time: f64,
    /// Time until it was whole on the disk, in seconds.
    pub seconds: f64,
    /// Time that the steps waited for it, in seconds; 0 in records of versions that did not say.
    #[serde(default)]
    pub waited_seconds: f64,
}

/// Seconds since 1970 (UTC).
pub(crate) fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Record {
    /// A start of the run.
    Run(RunMetrics),
    /// A training step.
    Step(StepMetrics),
    /// A held-out evaluation.
    Eval(EvalMetrics),
    /// A checkpoint.
    Save(SaveMetrics),
}

impl Record {
    /// The optimiser step it belongs to.
    pub fn step(&self) -> u64 {
        match self {
            Record::Run(m) => m.step,
            Record::Step(m) => m.step,
            Record::Eval(m) => m.step,
            Record::Save(m) => m.step,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Recipe;

    /// As torchtitan and Megatron Bridge count Llama 3 8B in rows of 8,192 tokens.
    #[test]
    fn rates_follow_the_two_conventions_in_use() {
        let text = include_str!("../../../../recipes/llama3-8b.toml");
        let recipe = Recipe::parse(text, "llama3-8b.toml", &[]).expect("it is right");
        let config = recipe.model_config(0).expect("it is right").expect("it has sizes");
        // TFLOP of a thousand tokens are GFLOP of one.
        let of_a_token = Tflops::of(&config, 1e3, 8192, 4096.5);
        let attention = 12.0 * 32.0 * 32.0 * 128.0 * 8192.0 * 1e-9;
        // 6 for each parameter that is multiplied with: not of the embedding, nor of norms.
        let products = 6.0 * (8_030_261_248.0 - (128_256.0 + 65.0) * 4096.0) * 1e-9;
        let close = |found: f64, want: f64| assert!((found / want - 1.0).abs() < 1e-12, "{found}");
        close(of_a_token.dense, products + attention);
        close(of_a_token.half, products + attention / 2.0);
        let rounded = [of_a_token.dense, of_a_token.half, of_a_token.live];
        assert_eq!(rounded.map(|gflop| format!("{gflop:.1}")), ["57.9", "51.5", "51.5"]);
        let ratio = of_a_token.mfu(100.0);
        assert!((ratio.dense - of_a_token.dense / 100.0).abs() < 1e-15);
    }
}
