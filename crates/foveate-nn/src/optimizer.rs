//! The optimiser's rules and what they go through.
//!
//! For parameter θ with gradient g at step t (from one) and learning rate lr, AdamW with moments m and v:
//!
//! ```text
//! m ← β₁ m + (1 − β₁) g          v ← β₂ v + (1 − β₂) g²
//! θ ← θ − lr · (m̂ / (√v̂ + ε) + λ θ)    with m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ)
//! ```
//!
//! and gradient descent with momentum, which keeps m alone:
//!
//! ```text
//! m ← μ m + g                    θ ← θ − lr · (m + λ θ)
//! ```
//!
//! The decay λ is decoupled and applies only to weights of two or more axes (norm gains and biases
//! have one), unless a parameter is treated otherwise. g is the mean over the labelled tokens of a
//! step, brought down to the largest norm.

use std::ops::Range;

use crate::parameters::{Parameter, ParameterLayout};
use crate::share::Share;

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

/// The constants of gradient descent with momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// μ, the memory of the gradient.
    pub momentum: f64,
    /// λ, the decoupled weight decay.
    pub weight_decay: f64,
}

/// How parameters follow their gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// AdamW.
    AdamW(AdamW),
    /// Gradient descent with momentum.
    Sgd(Sgd),
}

impl Rule {
    /// λ, the decoupled weight decay.
    pub fn weight_decay(&self) -> f64 {
        match self {
            Self::AdamW(adamw) => adamw.weight_decay,
            Self::Sgd(sgd) => sgd.weight_decay,
        }
    }

    /// Whether it keeps the mean of squares beside that of gradients.
    pub fn keeps_squares(&self) -> bool {
        matches!(self, Self::AdamW(_))
    }
}

/// What one step of the optimiser is told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerStep {
    /// The rule and its constants.
    pub rule: Rule,
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

/// How a parameter is treated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Treatment {
    /// Factor of the learning rate.
    pub rate: f32,
    /// Factor of the weight decay λ.
    pub decay: f32,
}

impl Treatment {
    /// The usual one of a parameter: the decay applies to weights of two or more axes.
    pub fn of(parameter: &Parameter) -> Self {
        let decays = parameter.shape.len() >= 2 && parameter.name.ends_with(".weight");
        Self { rate: 1.0, decay: if decays { 1.0 } else { 0.0 } }
    }
}

/// Neighbouring elements that are treated alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The elements, in the arrays that are updated.
    pub place: Range<usize>,
    /// The first one's index among all parameters, which its random bits are drawn from.
    pub origin: usize,
    /// How.
    pub treatment: Treatment,
}

impl Span {
    /// Those of all trained parameters of a layout, in order, each treated as `treat` says.
    pub fn of(layout: &ParameterLayout, treat: impl Fn(&Parameter) -> Treatment) -> Vec<Self> {
        let mut spans: Vec<Self> = Vec::new();
        let trained = layout.parameters().iter().enumerate();
        for (i, p) in trained.filter(|(_, p)| layout.trains(&p.place)) {
            let treatment = treat(p);
            for (place, origin) in layout.indexed(i) {
                match spans.last_mut() {
                    Some(last)
                        if last.treatment == treatment
                            && last.origin + place.start == origin + last.place.start =>
                    {
                        last.place.end = place.end;
                    }
                    _ => spans.push(Self { place, origin, treatment }),
                }
            }
        }
        spans
    }

    /// What of `spans`, which are of all parameters, a rank owns, in its arrays.
    pub(crate) fn owned(spans: &[Self], share: &Share) -> Vec<Self> {
        let of = |span: &Self| {
            let (treatment, span) = (span.treatment, span.clone());
            let own = move |(piece, first): (Range<usize>, usize)| Self {
                place: first..first + piece.len(),
                origin: span.origin + (piece.start - span.place.start),
                treatment,
            };
            let pieces = share.pieces(&span.place);
            pieces.into_iter().map(own)
        };
        let mut joined: Vec<Self> = Vec::new();
        for span in spans.iter().flat_map(of) {
            match joined.last_mut() {
                Some(last) if last.goes_on_with(&span) => last.place.end = span.place.end,
                _ => joined.push(span),
            }
        }
        joined
    }

    /// Whether `next` begins where this one ends, in its arrays and among all parameters.
    fn goes_on_with(&self, next: &Self) -> bool {
        (self.place.end, self.origin + self.place.len(), self.treatment)
            == (next.place.start, next.origin, next.treatment)
    }

    /// What of `spans` lies in `place`.
    pub fn within(spans: &[Self], place: &Range<usize>) -> Vec<Self> {
        let part = |span: &Self| {
            let start = span.place.start.max(place.start);
            Self {
                place: start..span.place.end.min(place.end),
                origin: span.origin + (start - span.place.start),
                treatment: span.treatment,
            }
        };
        spans.iter().map(part).filter(|span| !span.place.is_empty()).collect()
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
    use crate::config::{LearnedBuffer, ModelConfig};
    use crate::tensor::TensorPart;
    use crate::tests::tiny;

    #[test]
    fn weights_of_two_axes_decay_and_nothing_else_does() {
        let bias = LearnedBuffer { shape: vec![4, 4], init: 0.0, std: 0.0 };
        let learned = [("bias".to_owned(), bias)];
        let layout = ParameterLayout::new(&tiny(true), &[&learned, &learned], &|_| false).unwrap();
        let spans = Span::of(&layout, Treatment::of);
        assert!(spans.windows(2).all(|w| w[0].place.end <= w[1].place.start));
        for p in layout.parameters() {
            let own: Vec<&Span> = spans
                .iter()
                .filter(|s| s.place.start <= p.place.start && p.place.end <= s.place.end)
                .collect();
            assert_eq!(own.len(), 1, "{}", p.name);
            let decays = !p.name.contains("norm") && !p.name.ends_with("bias");
            assert_eq!(own[0].treatment.decay != 0.0, decays, "{}", p.name);
        }
    }

    #[test]
    fn frozen_parameters_lie_behind_the_trained_ones_and_in_no_span() {
        let config = tiny(false);
        let frozen = |name: &str| name.contains("embed") || name.contains("layers.0");
        let layout = ParameterLayout::new(&config, &[], &frozen).unwrap();
        let spans = Span::of(&layout, Treatment::of);
        assert!(layout.trained() < layout.elems());
        for p in layout.parameters() {
            let spanned =
                spans.iter().any(|s| s.place.start < p.place.end && p.place.start < s.place.end);
            assert_eq!(spanned, !frozen(&p.name), "{}", p.name);
            assert_eq!(p.place.start >= layout.trained(), frozen(&p.name), "{}", p.name);
        }
        let half = |name: &str| name.ends_with("0.self_attn.q_proj.weight");
        let told = ParameterLayout::new(&config, &[], &half).unwrap_err().to_string();
        assert!(
            told.contains("layers.0.self_attn.q_proj.weight") && told.contains("k_proj"),
            "{told}"
        );
    }

    /// What several ranks of `tensor` hold has the same random bits on all of them, and nothing else has those of
    /// another element.
    #[test]
    fn ranks_of_tensor_index_elements_as_one_rank_does() {
        let config = ModelConfig { vocab_size: 61, intermediate_size: 35, ..tiny(false) };
        let bias = LearnedBuffer { shape: vec![4, 4], init: 0.0, std: 0.0 };
        let learned = [("bias".to_owned(), bias)];
        let learned = [&learned[..], &learned];
        for parts in [2, 3, 4] {
            let mut owners = std::collections::BTreeMap::new();
            for part in 0..parts {
                let part = TensorPart::of(&config, part, parts).unwrap();
                let layout =
                    ParameterLayout::of_part(&config, &learned, &|_| false, &part).unwrap();
                let spans = Span::of(&layout, Treatment::of);
                let index = |at: usize| {
                    let of = spans.iter().find(|span| span.place.contains(&at)).unwrap();
                    of.origin + (at - of.place.start)
                };
                let whole = ParameterLayout::new(&config, &learned, &|_| false).unwrap();
                for (own, all) in layout.parameters().iter().zip(whole.parameters()) {
                    for (run, at) in own.held(0..own.elems()) {
                        for (element, at) in run.zip(at..) {
                            let of_all = all.place.start + element;
                            let holder = owners.entry(index(at)).or_insert(of_all);
                            assert_eq!(*holder, of_all, "{} on {parts} ranks", own.name);
                            let rows = own.cut.as_ref().is_none_or(|cut| cut.axis == 0);
                            assert!(!rows || index(at) == of_all, "{}", own.name);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn clipping_brings_the_norm_to_the_limit_and_leaves_small_gradients_alone() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(4.0, 1.0), 0.25);
        assert_eq!(clip_factor(4.0, 0.0), 1.0);
    }
}
