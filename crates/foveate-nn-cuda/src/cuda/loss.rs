//! The loss of a batch, a chunk of tokens after the other.

use foveate_gpu::blas::Matmul;
use foveate_gpu::driver::Allocation;
use foveate_gpu::{DeviceArray, DeviceTensor};
use foveate_nn::{Array, Blocks, LossGradients, LossOperands, NnError, PartMut, VocabularyPart};
use foveate_tensor::DType;

use super::array::{CudaArray, Place, batched, numbers, part_of, rows_of};
use super::clock::Timed;
use super::{Cuda, CudaBatch, CudaTotals, beta};
use crate::embedding::Embedding;
use crate::launch::Block;
use crate::loss::{AddLosses, CrossEntropy, CrossEntropyPart, LOGIT_SUMS, LogitSums};
use crate::optimizer::TOTALS_LEN;
use crate::vectors::CopyRows;

/// Sums of the logits of a chunk, those of this rank and those of all ranks.
type RankSums = [CudaArray; 2];

impl Cuda {
    /// [`Self::cross_entropy`] of a batch. Of fewer tokens than all, rows of these alone lie in the place of `d_x`,
    /// and their gradient in that of `x`, or, without gradients, at the start of `x`.
    pub(super) fn loss_of_batch<'a>(
        &mut self,
        batch: &CudaBatch,
        mut operands: LossOperands<'a, CudaArray>,
        part: Option<VocabularyPart<'_, Self>>,
        each: Option<&CudaArray>,
        mut gradients: Option<LossGradients<'a, CudaArray>>,
        totals: &CudaTotals,
    ) -> Result<(), NnError> {
        let width = operands.width;
        // Memory for no row: a few tokens of a small vocabulary. Ranks of different parts decide alike.
        let vocab = operands.weight.matrix(width).layout.shape[1];
        let least = part.as_ref().map_or(vocab, |part| part.most.saturating_sub(1));
        let has_room = operands.logits.elems() / vocab.max(1) * least >= width;
        let is_whole = each.is_some() || gradients.is_none() && !has_room;
        let Some([of_rows, of_tokens]) = batch.rows().filter(|_| !is_whole) else {
            let all = (batch, false);
            return self.cross_entropy(all, &operands, part, each, gradients.as_ref(), totals);
        };
        let Some(gradients) = &mut gradients else {
            self.take_rows_within(batch, &operands)?;
            return self.cross_entropy((batch, true), &operands, part, None, None, totals);
        };
        self.take_rows(Timed::LossBackward, (operands.x, width), of_rows, gradients.d_x)?;
        std::mem::swap(&mut operands.x, &mut gradients.d_x);
        self.cross_entropy((batch, true), &operands, part, None, Some(gradients), totals)?;
        self.take_rows(Timed::LossBackward, (gradients.d_x, width), of_tokens, operands.x)
    }

    /// Brings the rows of [`CudaBatch::rows`] to the start of `x`, by way of the memory of logits: tokens keep their
    /// order, so that none is overwritten before it is read.
    fn take_rows_within(
        &mut self,
        batch: &CudaBatch,
        operands: &LossOperands<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let &LossOperands { ref x, width, ref logits, .. } = operands;
        let (rows, at_once) = (batch.count_of(true), logits.elems() / width);
        for first in (0..rows).step_by(at_once) {
            let count = [at_once.min(rows - first)];
            let tokens = batch.tokens_of_rows(first, &count);
            self.take_rows(Timed::Loss, (x, width), tokens, logits)?;
            let rows = |array: &CudaArray, first| rows_of(&array.rows(width), first, count[0]);
            let copy = CopyRows { from: rows(logits, 0), to: rows(x, first) };
            self.run_timed(Timed::Loss, &copy)?;
        }
        Ok(())
    }

    /// Rows of `from` by their indices, 0 where one is negative.
    fn take_rows(
        &mut self,
        kind: Timed,
        (from, width): (&CudaArray, usize),
        tokens: DeviceArray<'_>,
        to: &CudaArray,
    ) -> Result<(), NnError> {
        let (table, out) = (from.rows(width), rows_of(&to.rows(width), 0, tokens.shape[0]));
        let block = Embedding { table, first: None, tokens, out, scale: 1.0 };
        self.run_timed(kind, &block)
    }

    /// The loss in chunks of as many tokens as `logits` has room for, with its gradients; with a `part` that
    /// of a rank which has a part of the vocabulary. `of_rows`: of [`CudaBatch::rows`] alone.
    fn cross_entropy(
        &mut self,
        (batch, of_rows): (&CudaBatch, bool),
        operands: &LossOperands<'_, CudaArray>,
        mut part: Option<VocabularyPart<'_, Self>>,
        each: Option<&CudaArray>,
        gradients: Option<&LossGradients<'_, CudaArray>>,
        totals: &CudaTotals,
    ) -> Result<(), NnError> {
        let &LossOperands { ref x, ref weight, width, cap, z_weight, ref logits } = operands;
        let weight = weight.matrix(width);
        let vocab = weight.layout.shape[1];
        let (tokens, chunk) = (batch.count_of(of_rows), logits.elems() / vocab.max(1));
        let own = match each {
            Some(_) => None,
            None => Some(self.scratch("losses", 4 * chunk)?),
        };
        let own_z = match z_weight {
            0.0 => None,
            _ => Some(self.scratch("z-losses", 4 * chunk)?),
        };
        let (kind, gradient) = match gradients {
            None => (Timed::Loss, false),
            Some(_) => (Timed::LossBackward, true),
        };
        let mut rank_sums = RankSums::default();
        for start in (0..tokens).step_by(chunk.max(1)) {
            let count = chunk.min(tokens - start);
            let x = batched(&rows_of(&x.rows(width), start, count));
            let logits = rows_of(&logits.rows(vocab), 0, count);
            let product = Matmul::new(x, weight.transposed(), batched(&logits));
            self.timed(kind, |this| this.product(&product))?;
            let losses = match (&own, each) {
                (Some(own), _) => DeviceTensor::contiguous(own.address(), DType::F32, [count]),
                (None, each) => part_of(&each.expect("one of both").vector(), start, count),
            };
            let of_chunk = |memory: &Allocation| {
                DeviceTensor::contiguous(memory.address(), DType::F32, [count])
            };
            let z_losses = own_z.as_ref().map(of_chunk);
            let count_of = [count];
            let labels = batch.labels(of_rows, start, &count_of);
            let totals = numbers(&totals.memory, &[TOTALS_LEN]);
            let add = AddLosses { losses, z_losses, labels, totals };
            if let Some(part) = &mut part {
                let sums = self.logit_sums(part, logits, labels, cap, &mut rank_sums)?;
                let first = part.first;
                let block = CrossEntropyPart {
                    logits,
                    labels,
                    first,
                    sums,
                    losses,
                    z_losses,
                    gradient,
                    cap,
                    z_weight,
                };
                self.losses(&block, &add)?;
            } else {
                let block =
                    CrossEntropy { logits, labels, losses, z_losses, gradient, cap, z_weight };
                self.losses(&block, &add)?;
            }
            if let Some(LossGradients { d_x, d_weight }) = gradients {
                let (d_logits, d_weight) = (batched(&logits), d_weight.as_ref());
                let d_x = batched(&rows_of(&d_x.rows(width), start, count));
                self.loss_products(d_logits, x, weight, d_x, d_weight, start > 0)?;
            }
        }
        Ok(())
    }

    fn losses(&mut self, of_tokens: &impl Block, add: &AddLosses<'_>) -> Result<(), NnError> {
        self.timed(Timed::CrossEntropy, |this| {
            this.run(of_tokens)?;
            this.run(add)
        })
    }

    /// [`LogitSums`] of all ranks.
    fn logit_sums(
        &mut self,
        part: &mut VocabularyPart<'_, Self>,
        logits: DeviceTensor<2>,
        labels: DeviceArray<'_>,
        cap: Option<f32>,
        [own, all]: &mut RankSums,
    ) -> Result<DeviceTensor<2>, NnError> {
        let ([tokens, _], first) = (logits.layout.shape, part.first);
        let elems = tokens * LOGIT_SUMS;
        self.resize("sums of logits", own, DType::F32, elems)?;
        self.resize("sums of the logits of all ranks", all, DType::F32, part.parts * elems)?;
        let sums = own.rows(LOGIT_SUMS);
        self.run_timed(Timed::CrossEntropy, &LogitSums { logits, labels, first, sums, cap })?;
        part.all(self, [tokens, LOGIT_SUMS], own, all)?;
        Ok(all.rows(LOGIT_SUMS))
    }

    /// From the gradient of logits to those of what they are the product of.
    fn loss_products(
        &mut self,
        d_logits: DeviceTensor<3>,
        x: DeviceTensor<3>,
        weight: DeviceTensor<3>,
        d_x: DeviceTensor<3>,
        d_weight: Option<&PartMut<'_, CudaArray>>,
        again: bool,
    ) -> Result<(), NnError> {
        let product = d_weight.map(|d_weight| {
            let accumulate = d_weight.accumulate || again;
            let width = x.layout.shape[2];
            let product = Matmul::new(d_logits.transposed(), x, d_weight.matrix(width));
            Matmul { beta: beta(accumulate), ..product }
        });
        self.timed(Timed::LossBackward, |this| {
            this.product(&Matmul::new(d_logits, weight, d_x))?;
            product.map_or(Ok(()), |product| this.product(&product))
        })
    }
}
