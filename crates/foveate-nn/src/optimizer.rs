//! AdamW and what it goes through.
//!
//! For parameter θ with gradient g at step t (from one), moments m and v:
//!
//! ```text
//! m ← β₁ m + (1 − β₁) g          v ← β₂ v + (1 − β₂) g²
//! θ ← θ − lr · (m̂ / (√v̂ + ε) + λ θ)    with m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ)
//! ```
//!
//! The decay λ is decoupled and applies only to weights of two or more axes (norm gains and biases
//! have one). g is the mean over the labelled tokens of a step, brought down to the largest norm.

use std::ops::Range;

use crate::parameters::ParameterLayout;

/// The constants of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// β₁, the memory of the gradient's mean.
    pub beta1: f64,
    /// β₂, the memory of the gradient's square.
    pub beta2: f64,
    /// ε, added to the root.
    pub eps: f64,
    /// λ, the decoupled weight decay.
    pub weight_decay: f64,
}

/// What one step of the optimiser is told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerStep {
    /// The constants.
    pub adamw: AdamW,
    /// t, counted from one.
    pub step: u64,
    /// The learning rate.
    pub rate: f64,
    /// The largest norm of the mean gradient; 0 for any.
    pub clip_norm: f64,
    /// What random bits are drawn from, with step and place, where something is rounded
    /// stochastically.
    pub seed: u64,
}

/// Neighbouring elements that are treated alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The elements.
    pub place: Range<usize>,
    /// Whether the weight decay λ applies.
    pub decay: bool,
}

impl Span {
    /// Those of a layout, in order.
    pub fn of(layout: &ParameterLayout) -> Vec<Self> {
        let mut spans: Vec<Self> = Vec::new();
        for p in layout.parameters() {
            let decay = p.shape.len() >= 2 && p.name.ends_with(".weight");
            match spans.last_mut() {
                Some(last) if last.decay == decay => last.place.end = p.place.end,
                _ => spans.push(Self { place: p.place.clone(), decay }),
            }
        }
        spans
    }
}

/// The factor that brings a gradient of norm `norm` down to `limit`; one if it is below already or
/// `limit` is zero.
pub fn clip_factor(norm: f64, limit: f64) -> f64 {
    if limit > 0.0 && norm > limit { limit / norm } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LearnedBuffer;
    use crate::tests::tiny;

    #[test]
    fn weights_of_two_axes_decay_and_nothing_else_does() {
        let bias = LearnedBuffer { shape: vec![4, 4], init: 0.0, std: 0.0 };
        let learned = [("bias".to_owned(), bias)];
        let layout = ParameterLayout::new(&tiny(true), &[&learned, &learned]);
        let spans = Span::of(&layout);
        assert!(spans.windows(2).all(|w| w[0].place.end <= w[1].place.start));
        for p in layout.parameters() {
            let own: Vec<&Span> = spans
                .iter()
                .filter(|s| s.place.start <= p.place.start && p.place.end <= s.place.end)
                .collect();
            assert_eq!(own.len(), 1, "{}", p.name);
            let decays = !p.name.contains("norm") && !p.name.ends_with("bias");
            assert_eq!(own[0].decay, decays, "{}", p.name);
        }
    }

    #[test]
    fn clipping_brings_the_norm_to_the_limit_and_leaves_small_gradients_alone() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(4.0, 1.0), 0.25);
        assert_eq!(clip_factor(4.0, 0.0), 1.0);
    }
}
