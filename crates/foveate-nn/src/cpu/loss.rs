//! Linear + cross-entropy in chunks of tokens: logits of one chunk exist at a time, and turn
//! into their own gradient `softmax − onehot` in place.

use rayon::prelude::*;

use super::CpuBatch;
use super::embed::gather;
use super::level::for_each_level;
use super::math::{exp, largest, sum, tanh};
use crate::backend::{LossGradients, LossOperands, PartMut};
use crate::batch::IGNORE;
use crate::error::NnError;
use crate::labelled::LabelledTokens;
use crate::matmul::{Matrix, matmul, matmul_deep};

/// Operands of a loss in host memory.
pub(super) struct Operands<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    width: usize,
    cap: Option<f32>,
    z_weight: f32,
    labels: &'a [i32],
    logits: &'a mut [f32],
}

impl<'a> Operands<'a> {
    fn new(operands: LossOperands<'a, Vec<f32>>, labels: &'a [i32]) -> Self {
        let LossOperands { x, weight, width, cap, z_weight, logits } = operands;
        Self { x, weight: weight.values(), width, cap, z_weight, labels, logits }
    }

    fn vocab(&self) -> usize {
        self.weight.len() / self.width
    }

    /// Of each chunk of tokens the first, and their labels.
    fn chunks(&self) -> impl Iterator<Item = (usize, &'a [i32])> + use<'a> {
        let chunk = (self.logits.len() / self.vocab()).max(1);
        self.labels.chunks(chunk).enumerate().map(move |(i, labels)| (i * chunk, labels))
    }

    /// `x` of `tokens` tokens from `first` on.
    fn rows(&self, first: usize, tokens: usize) -> &'a [f32] {
        &self.x[first * self.width..][..tokens * self.width]
    }

    /// Logits of `tokens` tokens from `first` on, without the cap.
    fn product(&mut self, first: usize, tokens: usize) -> &mut [f32] {
        let (vocab, width) = (self.vocab(), self.width);
        let x = Matrix::rows(self.rows(first, tokens), width);
        let w = Matrix::transposed(self.weight, width);
        let z = &mut self.logits[..tokens * vocab];
        matmul([tokens, vocab, width], x, w, z, vocab, false);
        z
    }
}

/// Where the gradients go.
pub(super) struct Gradients<'a> {
    /// Overwritten.
    d_x: &'a mut [f32],
    /// Added to.
    d_weight: Option<&'a mut [f32]>,
    /// What [`matmul_deep`] keeps.
    kept: &'a mut Vec<f32>,
}

impl<'a> Gradients<'a> {
    fn new(to: LossGradients<'a, Vec<f32>>, kept: &'a mut Vec<f32>) -> Self {
        Self { d_x: to.d_x, d_weight: to.d_weight.map(PartMut::sums), kept }
    }

    /// From what has become of the logits of `tokens` tokens from `first` on: their gradient.
    fn of_logits(&mut self, operands: &Operands<'_>, first: usize, tokens: usize) {
        let (vocab, width) = (operands.vocab(), operands.width);
        let d_z = &operands.logits[..tokens * vocab];
        let d_x = &mut self.d_x[first * width..][..tokens * width];
        let w = Matrix::rows(operands.weight, width);
        matmul([tokens, width, vocab], Matrix::rows(d_z, vocab), w, d_x, width, false);
        if let Some(d_weight) = &mut self.d_weight {
            let x = operands.rows(first, tokens);
            matmul_deep([vocab, width, tokens], d_z, x, d_weight, self.kept);
        }
    }
}

/// Calls `loss` with a batch's operands and where gradients go. Of fewer tokens than all it sees their rows alone:
/// these lie in the place of `d_x`, and their gradient in that of `x`, or, without gradients, at the start of `x`.
pub(super) fn of_batch<R>(
    batch: &CpuBatch,
    rows: Option<&LabelledTokens>,
    operands: LossOperands<'_, Vec<f32>>,
    gradients: Option<LossGradients<'_, Vec<f32>>>,
    kept: &mut Vec<f32>,
    loss: impl FnOnce(Operands<'_>, Option<Gradients<'_>>) -> R,
) -> R {
    let Some(rows) = rows else {
        let gradients = gradients.map(|to| Gradients::new(to, kept));
        return loss(Operands::new(operands, &batch.labels), gradients);
    };
    let (x, width) = (operands.x, operands.width);
    let Some(LossGradients { d_x, d_weight }) = gradients else {
        for (row, &token) in rows.tokens.iter().enumerate() {
            // Tokens keep their order, so that none is overwritten before it is read.
            let (from, to) = (token as usize * width, row * width);
            if from < x.len() {
                x.copy_within(from..from + width, to);
            } else {
                x[to..to + width].fill(0.0);
            }
        }
        return loss(Operands::new(LossOperands { x, ..operands }, &rows.labels), None);
    };
    gather(&rows.tokens, 0, x, width, 1.0, &mut d_x[..rows.tokens.len() * width]);
    let of_rows = Operands::new(LossOperands { x: &mut *d_x, ..operands }, &rows.labels);
    let to = LossGradients { d_x: &mut *x, d_weight };
    let found = loss(of_rows, Some(Gradients::new(to, kept)));
    gather(&rows.rows, 0, x, width, 1.0, d_x);
    found
}

/// Numbers that ranks tell each other of a token.
pub(super) const TOLD: usize = 3;

/// The ids of the vocabulary that a rank has.
pub(super) struct Part<'a> {
    /// The first.
    pub first: usize,
    /// `[tokens, TOLD]` of this rank become those of all ranks, in order of rank.
    pub all: &'a mut dyn FnMut(Vec<f32>) -> Result<Vec<f32>, NnError>,
}

/// Sums over labelled tokens of `lse − z_label` and of `z_weight·lse²`, with `lse = ln Σ_j e^{z_j}` and
/// `z = x·weightᵀ`, capped where there is a cap; `each` has the first of the tokens.
pub(super) fn cross_entropy(
    mut operands: Operands<'_>,
    mut each: Option<&mut [f32]>,
    mut gradients: Option<Gradients<'_>>,
) -> Nats {
    let (vocab, cap, wanted) = (operands.vocab(), operands.cap, gradients.is_some());
    let z_weight = operands.z_weight;
    let mut total = [0.0; 2];
    for (first, labels) in operands.chunks() {
        let losses: Vec<Nats> = operands
            .product(first, labels.len())
            .par_chunks_mut(vocab)
            .zip(labels)
            .with_min_len(8)
            .map(|(z, &label)| match cap {
                None => token(z_weight, z, label, wanted),
                Some(cap) => capped_token(cap, z_weight, z, label, wanted),
            })
            .collect();
        total = sum_of(total, &losses);
        if let Some(each) = &mut each {
            let each = each[first..].iter_mut();
            each.zip(&losses).for_each(|(each, &[nats, _])| *each = nats as f32);
        }
        if let Some(gradients) = &mut gradients {
            gradients.of_logits(&operands, first, labels.len());
        }
    }
    total
}

/// [`cross_entropy`] of a rank that has the logits of some ids. Of every token the ranks tell each other
/// their largest logit, the sum of exponentials beside it, and the logit of the label where they have it.
/// d_x is this rank's term of the sum over ranks.
pub(super) fn cross_entropy_part(
    mut operands: Operands<'_>,
    part: Part<'_>,
    mut gradients: Option<Gradients<'_>>,
) -> Result<Nats, NnError> {
    let (vocab, cap, z_weight) = (operands.vocab(), operands.cap, operands.z_weight);
    let mut total = [0.0; 2];
    for (first, labels) in operands.chunks() {
        let tokens = labels.len();
        let z = operands.product(first, tokens);
        // The place of a label among this rank's ids.
        let own = |label: i32| {
            let at = usize::try_from(label).ok()?.checked_sub(part.first)?;
            (at < vocab).then_some(at)
        };
        let told = z.par_chunks_mut(vocab).zip(labels).with_min_len(8);
        let told: Vec<[f32; TOLD]> = told
            .map(|(z, &label)| {
                if label == IGNORE {
                    return [0.0; 3];
                }
                let [most, sum] = part_sum(cap, z);
                [most, sum, own(label).map_or(0.0, |at| z[at])]
            })
            .collect();
        let all = (part.all)(told.into_flattened())?;
        let all: Vec<&[[f32; TOLD]]> = all.as_chunks().0.chunks(tokens).collect();
        // The largest logit of each token, the sum of exponentials beside it, and its loss.
        let of_token = |token: usize| {
            let of_ranks = || all.iter().map(|told| told[token]);
            let most = of_ranks().map(|[most, ..]| most).fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = of_ranks().map(|[part, sum, _]| sum * exp(part - most)).sum();
            let at_label: f32 = of_ranks().map(|[.., z]| z).sum();
            (most, sum, nats(most, sum, at_label, z_weight))
        };
        let losses = (0..tokens).filter(|&token| labels[token] != IGNORE);
        total = sum_of(total, &losses.map(|token| of_token(token).2).collect::<Vec<_>>());
        let Some(gradients) = &mut gradients else { continue };
        z.par_chunks_mut(vocab).zip(labels).enumerate().with_min_len(8).for_each(
            |(token, (z, &label))| {
                if label == IGNORE {
                    return z.fill(0.0);
                }
                let (most, sum, _) = of_token(token);
                part_gradient(cap, z, most, factor(most, sum, z_weight), own(label));
            },
        );
        gradients.of_logits(&operands, first, tokens);
    }
    Ok(total)
}

/// Cross-entropy and z-loss.
type Nats = [f64; 2];

/// `total` with `losses` added one after the other, so that chunks, and tokens without a loss, change no bit.
fn sum_of(total: Nats, losses: &[Nats]) -> Nats {
    losses.iter().fold(total, |[nats, z_loss], loss| [nats + loss[0], z_loss + loss[1]])
}

/// `lse − z_label` and `z_weight·lse²`, of the largest logit and the sum of exponentials beside it.
#[inline(always)]
fn nats(most: f32, sum: f32, at_label: f32, z_weight: f32) -> Nats {
    let (most, ln) = (f64::from(most), f64::from(sum).ln());
    let z_loss =
        if z_weight == 0.0 { 0.0 } else { f64::from(z_weight) * (most + ln) * (most + ln) };
    [most + ln - f64::from(at_label), z_loss]
}

/// What exponentials beside the largest logit are multiplied with for the gradient: `(1 + 2·z_weight·lse) / sum`.
#[inline(always)]
fn factor(most: f32, sum: f32, z_weight: f32) -> f32 {
    if z_weight == 0.0 {
        return 1.0 / sum;
    }
    let lse = f64::from(most) + f64::from(sum).ln();
    ((1.0 + 2.0 * f64::from(z_weight) * lse) / f64::from(sum)) as f32
}

for_each_level! {
    /// Caps logits where there is a cap; the largest, and the sum of exponentials beside it.
    part_sum / part_sum_on = part_sum_body(cap: Option<f32>, z: &mut [f32]) -> [f32; 2]
}

#[inline(always)]
fn part_sum_body(cap: Option<f32>, z: &mut [f32]) -> [f32; 2] {
    if let Some(cap) = cap {
        z.iter_mut().for_each(|z| *z = cap * tanh(*z / cap));
    }
    let most = largest(z);
    [most, sum(z, z, |z, _| exp(z - most))]
}

for_each_level! {
    /// Capped logits become their gradient, `factor` being [`factor`] of all exponentials beside the logit
    /// `most`.
    part_gradient / part_gradient_on = part_gradient_body(
        cap: Option<f32>,
        z: &mut [f32],
        most: f32,
        factor: f32,
        label: Option<usize>,
    ) -> ()
}

#[inline(always)]
fn part_gradient_body(
    cap: Option<f32>,
    z: &mut [f32],
    most: f32,
    factor: f32,
    label: Option<usize>,
) {
    match cap {
        None => {
            z.iter_mut().for_each(|z| *z = exp(*z - most) * factor);
            if let Some(label) = label {
                z[label] -= 1.0;
            }
        }
        Some(cap) => {
            let slope = |y: f32| 1.0 - (y / cap) * (y / cap);
            let at_label = label.map(|label| slope(z[label]));
            z.iter_mut().for_each(|y| *y = exp(*y - most) * factor * slope(*y));
            if let (Some(label), Some(slope)) = (label, at_label) {
                z[label] -= slope;
            }
        }
    }
}

for_each_level! {
    /// The loss of one token; its logits become their gradient when that is wanted.
    token / token_on = token_body(z_weight: f32, z: &mut [f32], label: i32, gradient: bool) -> Nats
}

#[inline(always)]
fn token_body(z_weight: f32, z: &mut [f32], label: i32, gradient: bool) -> Nats {
    if label == IGNORE {
        if gradient {
            z.fill(0.0);
        }
        return [0.0; 2];
    }
    let label = label as usize;
    let at_label = z[label];
    let most = largest(z);
    for x in z.iter_mut() {
        *x = exp(*x - most);
    }
    let sum = sum(z, z, |a, _| a);
    if gradient {
        let factor = factor(most, sum, z_weight);
        z.iter_mut().for_each(|x| *x *= factor);
        z[label] -= 1.0;
    }
    nats(most, sum, at_label, z_weight)
}

for_each_level! {
    /// [`token`] of the logits `cap · tanh(z / cap)`.
    capped_token / capped_token_on = capped_token_body(
        cap: f32,
        z_weight: f32,
        z: &mut [f32],
        label: i32,
        gradient: bool,
    ) -> Nats
}

#[inline(always)]
fn capped_token_body(cap: f32, z_weight: f32, z: &mut [f32], label: i32, gradient: bool) -> Nats {
    if label == IGNORE {
        return token_body(z_weight, z, label, gradient);
    }
    let label = label as usize;
    z.iter_mut().for_each(|z| *z = cap * tanh(*z / cap));
    let (at_label, most) = (z[label], largest(z));
    let sum = sum(z, z, |y, _| exp(y - most));
    if gradient {
        let factor = factor(most, sum, z_weight);
        let slope = |y: f32| 1.0 - (y / cap) * (y / cap);
        z.iter_mut().for_each(|y| *y = exp(*y - most) * factor * slope(*y));
        z[label] -= slope(at_label);
    }
    nats(most, sum, at_label, z_weight)
}
