//! AdamW on f32 master weights, and clipping by the global norm.
//!
//! For parameter θ with gradient g at step t (from one), moments m and v:
//!
//! ```text
//! m ← β₁ m + (1 − β₁) g          v ← β₂ v + (1 − β₂) g²
//! θ ← θ − lr · (m̂ / (√v̂ + ε) + λ θ)    with m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ)
//! ```
//!
//! The decay λ is decoupled and applies only to parameters of two or more axes (norm gains and biases have one).
//! The norm is summed over fixed chunks in f64 and the chunks are added in order, so it does not depend on the
//! number of threads.

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

/// The two moments of one parameter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moments {
    /// m, the running mean of the gradient.
    pub mean: Vec<f32>,
    /// v, the running mean of its square.
    pub square: Vec<f32>,
}

impl Moments {
    /// Zero moments for a parameter of `elems` elements.
    pub fn zeros(elems: usize) -> Self {
        Self { mean: vec![0.0; elems], square: vec![0.0; elems] }
    }
}

impl AdamW {
    /// One step of one parameter: `step` counts from one, `grad_scale` multiplies the gradient first (the mean over
    /// tokens and the clipping in one factor), `decay` says whether λ applies.
    pub fn update(
        &self,
        parameter: &mut [f32],
        grad: &[f32],
        moments: &mut Moments,
        step: u64,
        lr: f64,
        grad_scale: f64,
        decay: bool,
    ) {
        let exponent = step.min(i32::MAX as u64) as i32;
        let factors = Factors {
            beta: [self.beta1, self.beta2].map(|beta| beta as f32),
            rest: [self.beta1, self.beta2].map(|beta| (1.0 - beta) as f32),
            rate: (lr / (1.0 - self.beta1.powi(exponent))) as f32,
            root_scale: (1.0 / (1.0 - self.beta2.powi(exponent))) as f32,
            keep: if decay { (1.0 - lr * self.weight_decay) as f32 } else { 1.0 },
            eps: self.eps as f32,
            scale: grad_scale as f32,
        };
        parameter
            .par_chunks_mut(CHUNK)
            .zip(grad.par_chunks(CHUNK))
            .zip(moments.mean.par_chunks_mut(CHUNK).zip(moments.square.par_chunks_mut(CHUNK)))
            .for_each(|((parameter, grad), (mean, square))| {
                let update = Update { factors, parameter, grad, mean, square };
                pulp::Arch::new().dispatch(update);
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

/// The Euclidean norm of all gradients together, the same for any number of threads.
pub fn global_norm<'a>(grads: impl IntoIterator<Item = &'a [f32]>) -> f64 {
    let mut total = 0.0;
    for grad in grads {
        let parts: Vec<f64> = grad
            .par_chunks(CHUNK)
            .map(|chunk| pulp::Arch::new().dispatch(SquareSum(chunk)))
            .collect();
        total += parts.iter().sum::<f64>();
    }
    total.sqrt()
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

    const ADAM: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    fn random(len: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::stream(seed, 0);
        (0..len).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect()
    }

    #[test]
    fn ten_steps_follow_the_formula_in_f64() {
        let len = 3 * CHUNK + 17;
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
            ADAM.update(&mut parameter, &grad, &mut moments, step, lr, scale, true);
            for i in 0..len {
                let g = f64::from(grad[i]) * scale;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.95 * v[i] + 0.05 * g * g;
                let mean = m[i] / (1.0 - 0.9f64.powi(step as i32));
                let square = v[i] / (1.0 - 0.95f64.powi(step as i32));
                theta[i] -= lr * (mean / (square.sqrt() + 1e-8) + 0.1 * theta[i]);
            }
        }
        let worst = parameter
            .iter()
            .zip(&theta)
            .map(|(&a, b)| (f64::from(a) - b).abs())
            .fold(0.0, f64::max);
        assert!(worst < 2e-6, "{worst}");
    }

    #[test]
    fn without_decay_a_zero_gradient_changes_nothing() {
        let mut parameter = random(33, 4);
        let before = parameter.clone();
        ADAM.update(&mut parameter, &[0.0; 33], &mut Moments::zeros(33), 1, 0.1, 1.0, false);
        assert_eq!(parameter, before);
    }

    #[test]
    fn the_norm_and_the_update_do_not_depend_on_the_number_of_threads() {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let (mut parameter, grad) = (random(5 * CHUNK + 3, 7), random(5 * CHUNK + 3, 8));
                let norm = global_norm([grad.as_slice(), &grad[..100]]);
                let mut moments = Moments::zeros(parameter.len());
                ADAM.update(
                    &mut parameter,
                    &grad,
                    &mut moments,
                    3,
                    0.1,
                    clip_factor(norm, 1.0),
                    true,
                );
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
        assert!((global_norm([&[3.0f32, 0.0][..], &[4.0]]) - 5.0).abs() < 1e-12);
    }
}
