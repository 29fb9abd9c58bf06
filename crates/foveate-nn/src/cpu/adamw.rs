//! AdamW, and the norm of the gradients. Elements are handled in chunks of a fixed size; the norm is
//! summed over them in f64 and the sums are added in order, so no result depends on the number of
//! threads.

use rayon::prelude::*;

use crate::optimizer::{OptimizerStep, Span};

/// Elements handled as one piece of parallel work; fixed, so that sums have one order.
const CHUNK: usize = 1 << 14;

/// One step of the parameters in `spans`, which are in order and do not overlap; `grad_scale`
/// multiplies the gradient first (the mean over tokens and the clipping in one factor).
pub(super) fn update(
    step: &OptimizerStep,
    spans: &[Span],
    parameters: &mut [f32],
    grads: &[f32],
    [mean, square]: [&mut [f32]; 2],
    grad_scale: f64,
) {
    let OptimizerStep { adamw, rate, .. } = *step;
    let exponent = step.step.min(i32::MAX as u64) as i32;
    let factors = Factors {
        beta: [adamw.beta1, adamw.beta2].map(|beta| beta as f32),
        rest: [adamw.beta1, adamw.beta2].map(|beta| (1.0 - beta) as f32),
        rate: (rate / (1.0 - adamw.beta1.powi(exponent))) as f32,
        root_scale: (1.0 / (1.0 - adamw.beta2.powi(exponent))) as f32,
        keep: 1.0,
        eps: adamw.eps as f32,
        scale: grad_scale as f32,
    };
    let decayed = (1.0 - rate * adamw.weight_decay) as f32;
    parameters
        .par_chunks_mut(CHUNK)
        .zip(grads.par_chunks(CHUNK))
        .zip(mean.par_chunks_mut(CHUNK).zip(square.par_chunks_mut(CHUNK)))
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

/// The Euclidean norm of gradients.
pub(super) fn global_norm(grads: &[f32]) -> f64 {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::{AdamW, clip_factor};
    use foveate::tensor::random::Random;

    const ADAM: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    fn random(len: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::stream(seed, 0);
        (0..len).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect()
    }

    fn at(step: u64, rate: f64) -> OptimizerStep {
        OptimizerStep { adamw: ADAM, step, rate, clip_norm: 0.0, seed: 0 }
    }

    #[test]
    fn ten_steps_follow_the_formula_in_f64() {
        // A part that decays, a gap that belongs to nobody and a part that does not decay.
        let (len, gap) = (3 * CHUNK + 17, CHUNK - 5..CHUNK + 90);
        let spans =
            [Span { place: 0..gap.start, decay: true }, Span { place: gap.end..len, decay: false }];
        let mut parameter = random(len, 1);
        let (mut mean, mut square) = (vec![0.0; len], vec![0.0; len]);
        let (mut theta, mut m, mut v): (Vec<f64>, _, _) = (
            parameter.iter().map(|&x| f64::from(x)).collect(),
            vec![0.0f64; len],
            vec![0.0f64; len],
        );
        for step in 1..=10u64 {
            let grad = random(len, 100 + step);
            let (lr, scale) = (1e-2 / step as f64, 0.37);
            let moments = [mean.as_mut_slice(), square.as_mut_slice()];
            update(&at(step, lr), &spans, &mut parameter, &grad, moments, scale);
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
        assert!(mean[gap.clone()].iter().chain(&square[gap]).all(|&x| x == 0.0));
    }

    #[test]
    fn without_decay_a_zero_gradient_changes_nothing() {
        let mut parameter = random(33, 4);
        let before = parameter.clone();
        let spans = [Span { place: 0..33, decay: false }];
        let (mut mean, mut square) = ([0.0; 33], [0.0; 33]);
        update(&at(1, 0.1), &spans, &mut parameter, &[0.0; 33], [&mut mean, &mut square], 1.0);
        assert_eq!(parameter, before);
    }

    #[test]
    fn the_norm_and_the_update_do_not_depend_on_the_number_of_threads() {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let (mut parameter, grad) = (random(5 * CHUNK + 3, 7), random(5 * CHUNK + 3, 8));
                let norm = global_norm(&grad);
                let (mut mean, mut square) = (vec![0.0; grad.len()], vec![0.0; grad.len()]);
                let (spans, clip) =
                    ([Span { place: 0..parameter.len(), decay: true }], clip_factor(norm, 1.0));
                let moments = [mean.as_mut_slice(), square.as_mut_slice()];
                update(&at(3, 0.1), &spans, &mut parameter, &grad, moments, clip);
                (norm.to_bits(), parameter.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(3));
        assert!((global_norm(&[3.0, 0.0, 4.0]) - 5.0).abs() < 1e-12);
    }
}
