//! The optimiser's step, and the norm of the gradients. Elements are handled in chunks of a fixed size;
//! the norm is summed over them in f64 and the sums are added in order, so no result depends on the
//! number of threads.

use std::ops::Range;

use foveate::tensor::random::mix;
use rayon::prelude::*;

use crate::moments::{self, BLOCK, Moment, Rounding};
use crate::optimizer::{OptimizerStep, Rule, Span, Treatment};
use crate::precision::MomentDtype;

/// Elements handled as one piece of parallel work; fixed, so that sums have one order, and whole blocks
/// of moments.
const CHUNK: usize = 64 * BLOCK;

/// A moment, as it is kept.
pub(super) struct Kept<'a> {
    /// Of how many elements.
    pub elems: usize,
    pub dtype: MomentDtype,
    /// m, and v where the rule keeps it.
    pub words: [&'a mut [f32]; 2],
}

/// What a chunk has of a moment.
enum Piece<'a> {
    Numbers(&'a mut [f32]),
    Codes(&'a mut [u8], &'a mut [f32]),
    Nothing,
}

fn pieces(
    words: &mut [f32],
    elems: usize,
    dtype: MomentDtype,
    chunks: Range<usize>,
) -> Vec<Piece<'_>> {
    let count = chunks.len();
    if words.is_empty() {
        return (0..count).map(|_| Piece::Nothing).collect();
    }
    if dtype == MomentDtype::F32 {
        let all = words.chunks_mut(CHUNK).skip(chunks.start).take(count);
        return all.map(Piece::Numbers).collect();
    }
    let (codes, scales) = moments::parts_mut(words, elems);
    let all = codes.chunks_mut(CHUNK).zip(scales.chunks_mut(CHUNK / BLOCK));
    all.skip(chunks.start).take(count).map(|(codes, scales)| Piece::Codes(codes, scales)).collect()
}

impl Piece<'_> {
    /// The numbers, in `scratch` where they are kept otherwise.
    fn open<'b>(&'b mut self, moment: Moment, scratch: &'b mut [f32]) -> &'b mut [f32] {
        match self {
            Self::Numbers(numbers) => numbers,
            Self::Codes(codes, scales) => {
                moments::decode(moment, codes, scales, scratch);
                scratch
            }
            Self::Nothing => &mut [],
        }
    }

    /// Keeps what is in `scratch`; `origin` is the index among all parameters of the first element of
    /// each block.
    fn close(
        &mut self,
        moment: Moment,
        scratch: &[f32],
        origin: impl Fn(usize) -> usize,
        random: u64,
    ) {
        let Self::Codes(codes, scales) = self else { return };
        let rounding = Rounding::Stochastic(random);
        let blocks = scratch.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales.chunks_mut(1));
        for (block, ((scratch, codes), scale)) in blocks.enumerate() {
            moments::encode(moment, scratch, origin(block), rounding, codes, scale);
        }
    }
}

/// One step of the parameters in `spans`, which are in order and do not overlap; `grad_scale`
/// multiplies the gradient first (the mean over tokens and the clipping in one factor). The first
/// gradient is that of parameter `first`, and the last that of the last in a span or behind it.
pub(super) fn update(
    step: &OptimizerStep,
    spans: &[Span],
    parameters: &mut [f32],
    (grads, first): (&[f32], usize),
    kept: Kept<'_>,
    grad_scale: f64,
) {
    let (Some(start), Some(end)) = (spans.first(), spans.last()) else { return };
    let chunks = start.place.start / CHUNK..end.place.end.div_ceil(CHUNK);
    let Kept { elems, dtype, words: [mean, square] } = kept;
    let random = mix(step.seed ^ mix(step.step));
    let moments = pieces(mean, elems, dtype, chunks.clone())
        .into_iter()
        .zip(pieces(square, elems, dtype, chunks.clone()))
        .collect::<Vec<_>>();
    let parameters = parameters.par_chunks_mut(CHUNK).skip(chunks.start).take(chunks.len());
    parameters.zip(moments).enumerate().for_each(|(i, (parameters, (mut mean, mut square)))| {
        let start = (chunks.start + i) * CHUNK;
        let len = parameters.len().min(elems.saturating_sub(start));
        let parameters = &mut parameters[..len];
        let mut scratch = match dtype {
            MomentDtype::F32 => [Vec::new(), Vec::new()],
            _ => [vec![0.0; len], vec![0.0; len]],
        };
        let [of_mean, of_square] = &mut scratch;
        {
            let m = mean.open(Moment::Mean, of_mean);
            let v = square.open(Moment::Square, of_square);
            let from = spans.partition_point(|span| span.place.end <= start);
            let spans = spans[from..].iter().take_while(|span| span.place.start < start + len);
            for Span { place, treatment, .. } in spans {
                let own = place.start.max(start)..place.end.min(start + len);
                let here = own.start - start..own.end - start;
                let v = if v.is_empty() { &mut [][..] } else { &mut v[here.clone()] };
                pulp::Arch::new().dispatch(Update {
                    factors: Factors::new(step, *treatment, grad_scale),
                    parameter: &mut parameters[here.clone()],
                    grad: &grads[own.start - first..own.end - first],
                    mean: &mut m[here],
                    square: v,
                });
            }
        }
        // A block that no span is in holds zeros or codes that are written back as they are.
        let origin = |block: usize| {
            let at = start + block * BLOCK;
            let in_or_behind = spans.partition_point(|span| span.place.end <= at);
            let span = &spans[in_or_behind.min(spans.len() - 1)];
            (at + span.origin).wrapping_sub(span.place.start)
        };
        mean.close(Moment::Mean, of_mean, origin, random);
        square.close(Moment::Square, of_square, origin, random);
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

impl Factors {
    fn new(step: &OptimizerStep, treatment: Treatment, grad_scale: f64) -> Self {
        let rate = step.rate * f64::from(treatment.rate);
        let decay = step.rule.weight_decay() * f64::from(treatment.decay);
        let (keep, scale) = ((1.0 - rate * decay) as f32, grad_scale as f32);
        let exponent = step.step.min(i32::MAX as u64) as i32;
        match step.rule {
            Rule::AdamW(adamw) => Self {
                beta: [adamw.beta1, adamw.beta2].map(|beta| beta as f32),
                rest: [adamw.beta1, adamw.beta2].map(|beta| (1.0 - beta) as f32),
                rate: (rate / (1.0 - adamw.beta1.powi(exponent))) as f32,
                root_scale: (1.0 / (1.0 - adamw.beta2.powi(exponent))) as f32,
                keep,
                eps: adamw.eps as f32,
                scale,
            },
            Rule::Sgd(sgd) => Self {
                beta: [sgd.momentum as f32, 0.0],
                rest: [1.0, 0.0],
                rate: rate as f32,
                root_scale: 0.0,
                keep,
                eps: 0.0,
                scale,
            },
        }
    }
}

/// A chunk's update, compiled for the best instruction set of the machine. Without squares it is that
/// of gradient descent with momentum.
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
        if self.square.is_empty() {
            for ((theta, &g), m) in self.parameter.iter_mut().zip(self.grad).zip(self.mean) {
                *m = beta[0] * *m + rest[0] * (g * scale);
                *theta = keep * *theta - rate * *m;
            }
            return;
        }
        let moments = self.mean.iter_mut().zip(self.square);
        for ((theta, &g), (m, v)) in self.parameter.iter_mut().zip(self.grad).zip(moments) {
            let g = g * scale;
            *m = beta[0] * *m + rest[0] * g;
            *v = beta[1] * *v + rest[1] * g * g;
            *theta = keep * *theta - rate * *m / ((*v * root_scale).sqrt() + eps);
        }
    }
}

/// The sum of the squares of gradients.
pub(super) fn squares(grads: &[f32]) -> f64 {
    let squares = grads.par_chunks(CHUNK).map(|chunk| pulp::Arch::new().dispatch(SquareSum(chunk)));
    let parts: Vec<f64> = squares.collect();
    parts.iter().sum()
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
    use crate::optimizer::{AdamW, Sgd, clip_factor};
    use foveate::tensor::random::Random;

    const ADAM: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    fn random(len: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::stream(seed, 0);
        (0..len).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect()
    }

    fn at(step: u64, rate: f64) -> OptimizerStep {
        OptimizerStep { rule: Rule::AdamW(ADAM), step, rate, clip_norm: 0.0, seed: 0 }
    }

    fn span(place: Range<usize>, rate: f32, decay: f32) -> Span {
        Span { origin: place.start, place, treatment: Treatment { rate, decay } }
    }

    fn kept<'a>(mean: &'a mut [f32], square: &'a mut [f32]) -> Kept<'a> {
        Kept { elems: mean.len(), dtype: MomentDtype::F32, words: [mean, square] }
    }

    #[test]
    fn ten_steps_follow_the_formula_in_f64() {
        // A part that decays, a gap that belongs to nobody and a part that does not decay.
        let (len, gap) = (3 * CHUNK + 17, CHUNK - 5..CHUNK + 90);
        let spans = [span(0..gap.start, 1.0, 1.0), span(gap.end..len, 0.5, 0.0)];
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
            let moments = kept(&mut mean, &mut square);
            update(&at(step, lr), &spans, &mut parameter, (&grad, 0), moments, scale);
            for i in (0..len).filter(|i| !gap.contains(i)) {
                let g = f64::from(grad[i]) * scale;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.95 * v[i] + 0.05 * g * g;
                let mean = m[i] / (1.0 - 0.9f64.powi(step as i32));
                let square = v[i] / (1.0 - 0.95f64.powi(step as i32));
                let (lr, decay) = if i < gap.start { (lr, 0.1) } else { (lr * 0.5, 0.0) };
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
    fn momentum_follows_its_formula_in_f64_on_a_part_of_the_gradients() {
        let (len, first) = (CHUNK + 700, CHUNK - 300);
        let rule = Rule::Sgd(Sgd { momentum: 0.9, weight_decay: 0.1 });
        let spans = [span(first..CHUNK + 50, 1.0, 1.0), span(CHUNK + 50..len, 2.0, 0.0)];
        let (before, mut mean) = (random(len, 11), vec![0.0; len]);
        let mut parameter = before.clone();
        let mut theta: Vec<f64> = before.iter().map(|&x| f64::from(x)).collect();
        let mut m = vec![0.0f64; len];
        for step in 1..=5u64 {
            let grad = random(len - first, 20 + step);
            let of_step = OptimizerStep { rule, ..at(step, 0.01) };
            let moments = kept(&mut mean, &mut []);
            update(&of_step, &spans, &mut parameter, (&grad, first), moments, 0.5);
            for i in first..len {
                m[i] = 0.9 * m[i] + 0.5 * f64::from(grad[i - first]);
                let (lr, decay) = if i < CHUNK + 50 { (0.01, 0.1) } else { (0.02, 0.0) };
                theta[i] -= lr * (m[i] + decay * theta[i]);
            }
        }
        assert_eq!(parameter[..first], before[..first]);
        for i in 0..len {
            assert!((f64::from(parameter[i]) - theta[i]).abs() < 2e-6, "{i}");
        }
    }

    /// Of gradients with a mean, as those of a loss that goes down: what is rounded is small beside it.
    #[test]
    fn moments_of_8_bits_lead_near_where_exact_ones_do() {
        let len = CHUNK + 3 * BLOCK + 9;
        let spans = [span(0..len, 1.0, 1.0)];
        let start = random(len, 30);
        let run = |dtype: MomentDtype| {
            let mut parameter = start.clone();
            let words = dtype.array(len).1;
            let (mut mean, mut square) = (vec![0.0; words], vec![0.0; words]);
            for step in 1..=30u64 {
                let noise = random(len, 40 + step);
                let grad: Vec<f32> =
                    noise.iter().enumerate().map(|(i, x)| x + (i % 7) as f32 - 3.0).collect();
                let words = [&mut mean[..], &mut square[..]];
                let moments = Kept { elems: len, dtype, words };
                update(&at(step, 1e-2), &spans, &mut parameter, (&grad, 0), moments, 1.0);
            }
            parameter
        };
        let (exact, narrow) = (run(MomentDtype::F32), run(MomentDtype::Int8));
        let size =
            |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let moved = size(&mut exact.iter().zip(&start).map(|(a, b)| a - b));
        let off = size(&mut exact.iter().zip(&narrow).map(|(a, b)| a - b));
        assert!(off < 0.05 * moved && off > 0.0, "{off} of {moved}");
    }

    #[test]
    fn without_decay_a_zero_gradient_changes_nothing() {
        let mut parameter = random(33, 4);
        let before = parameter.clone();
        let spans = [span(0..33, 1.0, 0.0)];
        let (mut mean, mut square) = ([0.0; 33], [0.0; 33]);
        let moments = kept(&mut mean, &mut square);
        update(&at(1, 0.1), &spans, &mut parameter, (&[0.0; 33], 0), moments, 1.0);
        assert_eq!(parameter, before);
    }

    #[test]
    fn the_norm_and_the_update_do_not_depend_on_the_number_of_threads() {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let (mut parameter, grad) = (random(5 * CHUNK + 3, 7), random(5 * CHUNK + 3, 8));
                let norm = squares(&grad).sqrt();
                let (mut mean, mut square) = (vec![0.0; grad.len()], vec![0.0; grad.len()]);
                let (spans, clip) = ([span(0..parameter.len(), 1.0, 1.0)], clip_factor(norm, 1.0));
                let moments = kept(&mut mean, &mut square);
                update(&at(3, 0.1), &spans, &mut parameter, (&grad, 0), moments, clip);
                (norm.to_bits(), parameter.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(3));
        assert!((squares(&[3.0, 0.0, 4.0]) - 25.0).abs() < 1e-12);
    }
}
