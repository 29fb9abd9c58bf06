//! AdamW on f32 master weights, and clipping by the global norm.
//!
//! For parameter θ with gradient g at step t (from one), moments m and v:
//!
//! ```text
//! m ← β₁ m + (1 − β₁) g          v ← β₂ v + (1 − β₂) g²
//! θ ← θ − lr · (m̂ / (√v̂ + ε) + λ θ)    with m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ)
//! ```
//!
//! The decay λ is decoupled and applies only to weights of two or more axes (norm gains and biases have one).
//! Parameters, gradients and moments lie in arrays of one layout, which a step walks through once. The norm is
//! summed over fixed chunks in f64 and the chunks are added in order, so it does not depend on the number of
//! threads.

use std::ops::Range;

use foveate_nn::ParameterLayout;
use rayon::prelude::*;

/// Elements handled as one piece of parallel work; fixed, so that sums have one order.
const CHUNK: usize = 1 << 14;

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

/// The two moments of an array of parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moments {
    /// m, the running mean of the gradient.
    pub mean: Vec<f32>,
    /// v, the running mean of its square.
    pub square: Vec<f32>,
}

impl Moments {
    /// Zero moments for `elems` elements.
    pub fn zeros(elems: usize) -> Self {
        Self { mean: vec![0.0; elems], square: vec![0.0; elems] }
    }
}

impl AdamW {
    /// One step of the parameters in `spans`, which are in order and do not overlap: `step` counts from one,
    /// `grad_scale` multiplies the gradient first (the mean over tokens and the clipping in one factor).
    pub fn update(
        &self,
        spans: &[Span],
        parameters: &mut [f32],
        grads: &[f32],
        moments: &mut Moments,
        step: u64,
        lr: f64,
        grad_scale: f64,
    ) {
        let exponent = step.min(i32::MAX as u64) as i32;
        let factors = Factors {
            beta: [self.beta1, self.beta2].map(|beta| beta as f32),
            rest: [self.beta1, self.beta2].map(|beta| (1.0 - beta) as f32),
            rate: (lr / (1.0 - self.beta1.powi(exponent))) as f32,
            root_scale: (1.0 / (1.0 - self.beta2.powi(exponent))) as f32,
            keep: 1.0,
            eps: self.eps as f32,
            scale: grad_scale as f32,
        };
        let decayed = (1.0 - lr * self.weight_decay) as f32;
        parameters
            .par_chunks_mut(CHUNK)
            .zip(grads.par_chunks(CHUNK))
            .zip(moments.mean.par_chunks_mut(CHUNK).zip(moments.square.par_chunks_mut(CHUNK)))
            .enumerate()
            .for_each(|(i, ((parameters, grads), (mean, square)))| {
                let (start, end) = (i * CHUNK, i * CHUNK + parameters.len());
                let first = spans.partition_point(|span| span.place.end <= start);
                for Span { place, decay } in
                    spans[first..].iter().take_while(|span| span.place.start < end)
                {
                    let own = place.start.max(start) - start..place.end.min(end) - start;
                    pulp::Arch::new().dispatch(Update {
                        factors: Factors { keep: if *decay { decayed } else { 1.0 }, ..factors },
                        parameter: &mut parameters[own.clone()],
                        grad: &grads[own.clone()],
                        mean: &mut mean[own.clone()],
                        square: &mut square[own],
                    });
                }
            });
    }
}

/// What a step multiplies with.
#[derive(Clone, Copy)]
struct Factors {
    beta: [f32; 2],
    rest: [f32; 2],
    rate: f32,
    root_scale: f32,
    keep: f32,
    eps: f32,
    scale: f32,
}

/// A chunk's update, compiled for the best instruction set of the machine.
struct Update<'a> {
    factors: Factors,
    parameter: &'a mut [f32],
    grad: &'a [f32],
    mean: &'a mut [f32],
    square: &'a mut [f32],
}

impl pulp::WithSimd for Update<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        let Factors { beta, rest, rate, root_scale, keep, eps, scale } = self.factors;
        let moments = self.mean.iter_mut().zip(self.square);
        for ((theta, &g), (m, v)) in self.parameter.iter_mut().zip(self.grad).zip(moments) {
            let g = g * scale;
            *m = beta[0] * *m + rest[0] * g;
            *v = beta[1] * *v + rest[1] * g * g;
            *theta = keep * *theta - rate * *m / ((*v * root_scale).sqrt() + eps);
        }
    }
}

/// The Euclidean norm of gradients, the same for any number of threads.
pub fn global_norm(grads: &[f32]) -> f64 {
    let squares = grads.par_chunks(CHUNK).map(|chunk| pulp::Arch::new().dispatch(SquareSum(chunk)));
    let parts: Vec<f64> = squares.collect();
    parts.iter().sum::<f64>().sqrt()
}

/// `Σ g²` in f64, in sixteen partial sums, compiled for the best instruction set of the machine.
struct SquareSum<'a>(&'a [f32]);

impl pulp::WithSimd for SquareSum<'_> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) -> f64 {
        let mut sums = [0.0f64; 16];
        let (groups, rest) = self.0.as_chunks::<16>();
        for group in groups {
            for (sum, &g) in sums.iter_mut().zip(group) {
                *sum += f64::from(g) * f64::from(g);
            }
        }
        let rest: f64 = rest.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
        sums.iter().sum::<f64>() + rest
    }
}

/// The factor that brings a gradient of norm `norm` down to `limit`; one if it is below already or `limit` is zero.
pub fn clip_factor(norm: f64, limit: f64) -> f64 {
    if limit > 0.0 && norm > limit { limit / norm } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foveate::tensor::random::Random;
    use foveate_nn::{LearnedBuffer, ModelConfig};

    const ADAM: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    fn random(len: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::stream(seed, 0);
        (0..len).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect()
    }

    #[test]
    fn ten_steps_follow_the_formula_in_f64() {
        // A part that decays, a gap that belongs to nobody and a part that does not decay.
        let (len, gap) = (3 * CHUNK + 17, CHUNK - 5..CHUNK + 90);
        let spans =
            [Span { place: 0..gap.start, decay: true }, Span { place: gap.end..len, decay: false }];
        let mut parameter = random(len, 1);
        let mut moments = Moments::zeros(len);
        let (mut theta, mut m, mut v): (Vec<f64>, _, _) = (
            parameter.iter().map(|&x| f64::from(x)).collect(),
            vec![0.0f64; len],
            vec![0.0f64; len],
        );
        for step in 1..=10u64 {
            let grad = random(len, 100 + step);
            let (lr, scale) = (1e-2 / step as f64, 0.37);
            ADAM.update(&spans, &mut parameter, &grad, &mut moments, step, lr, scale);
            for i in (0..len).filter(|i| !gap.contains(i)) {
                let g = f64::from(grad[i]) * scale;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.95 * v[i] + 0.05 * g * g;
                let mean = m[i] / (1.0 - 0.9f64.powi(step as i32));
                let square = v[i] / (1.0 - 0.95f64.powi(step as i32));
                let decay = if i < gap.start { 0.1 } else { 0.0 };
                theta[i] -= lr * (mean / (square.sqrt() + 1e-8) + decay * theta[i]);
            }
        }
        let worst = parameter
            .iter()
            .zip(&theta)
            .map(|(&a, b)| (f64::from(a) - b).abs())
            .fold(0.0, f64::max);
        assert!(worst < 2e-6, "{worst}");
        assert!(moments.mean[gap.clone()].iter().chain(&moments.square[gap]).all(|&x| x == 0.0));
    }

    #[test]
    fn weights_of_two_axes_decay_and_nothing_else_does() {
        let bias = LearnedBuffer { shape: vec![4, 4], init: 0.0, std: 0.0 };
        let config: ModelConfig = toml::from_str(
            "vocab_size = 9\nhidden_size = 8\nintermediate_size = 5\nnum_hidden_layers = 2\n\
             num_attention_heads = 4",
        )
        .unwrap();
        let learned = [("bias".to_owned(), bias)];
        let layout = ParameterLayout::new(&config, &[&learned, &learned]);
        let spans = Span::of(&layout);
        assert!(spans.windows(2).all(|w| w[0].place.end <= w[1].place.start));
        for p in layout.parameters() {
            let own: Vec<&Span> = spans
                .iter()
                .filter(|s| s.place.start <= p.place.start && p.place.end <= s.place.end)
                .collect();
            assert_eq!(own.len(), 1, "{}", p.name);
            assert_eq!(
                own[0].decay,
                !p.name.contains("norm") && !p.name.ends_with("bias"),
                "{}",
                p.name
            );
        }
    }

    #[test]
    fn without_decay_a_zero_gradient_changes_nothing() {
        let mut parameter = random(33, 4);
        let before = parameter.clone();
        let spans = [Span { place: 0..33, decay: false }];
        ADAM.update(&spans, &mut parameter, &[0.0; 33], &mut Moments::zeros(33), 1, 0.1, 1.0);
        assert_eq!(parameter, before);
    }

    #[test]
    fn the_norm_and_the_update_do_not_depend_on_the_number_of_threads() {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let (mut parameter, grad) = (random(5 * CHUNK + 3, 7), random(5 * CHUNK + 3, 8));
                let norm = global_norm(&grad);
                let mut moments = Moments::zeros(parameter.len());
                let (spans, clip) =
                    ([Span { place: 0..parameter.len(), decay: true }], clip_factor(norm, 1.0));
                ADAM.update(&spans, &mut parameter, &grad, &mut moments, 3, 0.1, clip);
                (norm.to_bits(), parameter.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(3));
    }

    #[test]
    fn clipping_brings_the_norm_to_the_limit_and_leaves_small_gradients_alone() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert_eq!(clip_factor(4.0, 1.0), 0.25);
        assert_eq!(clip_factor(4.0, 0.0), 1.0);
        assert!((global_norm(&[3.0, 0.0, 4.0]) - 5.0).abs() < 1e-12);
    }
}
