//! What a run reports: JSON lines (the source of truth), TensorBoard event files, a curve.

pub mod curve;
mod jsonl;
mod tensorboard;

pub use jsonl::JsonlLog;
pub use tensorboard::TensorBoardLog;
pub(crate) use tensorboard::event_files;

use serde::{Deserialize, Serialize};

/// One training step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Optimiser step, from 1.
    pub step: u64,
    /// Mean loss of a labelled token, in nats.
    pub loss: f64,
    /// Global norm of the gradients of that mean, before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Labelled tokens seen so far.
    pub tokens: u64,
    /// Packed tokens a second, of this step.
    pub tokens_per_s: f64,
    /// Model TFLOP/s, every query counted with a whole row of keys.
    pub tflops_dense: f64,
    /// Model TFLOP/s, queries counted with the keys that the mask lets through.
    pub tflops_live: f64,
    /// Resident memory of the process, in bytes; 0 where the system does not say.
    pub memory_bytes: u64,
    /// Share of the step's time spent in attention, from 0 to 1.
    pub attention_share: f64,
    /// Time of the step, in seconds.
    pub seconds: f64,
}

/// One look at the held-out documents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalMetrics {
    /// Optimiser steps done.
    pub step: u64,
    /// Mean loss of a held-out token, in nats.
    pub held_out_loss: f64,
    /// `e` to that loss.
    pub perplexity: f64,
    /// Held-out tokens looked at.
    pub tokens: u64,
}

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Record {
    /// A training step.
    Step(StepMetrics),
    /// A held-out evaluation.
    Eval(EvalMetrics),
}

impl Record {
    /// The optimiser step it belongs to.
    pub fn step(&self) -> u64 {
        match self {
            Record::Step(m) => m.step,
            Record::Eval(m) => m.step,
        }
    }
}
