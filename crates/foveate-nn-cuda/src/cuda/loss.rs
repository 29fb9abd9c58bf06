//! The loss of a batch, a chunk of tokens after the other.

use foveate_gpu::DeviceTensor;
use foveate_gpu::blas::Matmul;
use foveate_nn::{Array, Blocks, LossGradients, NnError, Part, PartMut, VocabularyPart};
use foveate_tensor::DType;

use super::array::{CudaArray, Place, batched, numbers, part_of, rows_of};
use super::clock::Timed;
use super::{Cuda, CudaBatch, CudaTotals, beta};
use crate::loss::{AddLosses, CrossEntropy, CrossEntropyPart, LOGIT_SUMS, LogitSums};
use crate::optimizer::TOTALS_LEN;

impl Cuda {
    /// The loss in chunks of as many tokens as `logits` has room for, with its gradients.
    pub(super) fn cross_entropy(
        &mut self,
        batch: &CudaBatch,
        width: usize,
        x: &CudaArray,
        weight: &Part<'_, CudaArray>,
        cap: Option<f32>,
        logits: &CudaArray,
        each: Option<&CudaArray>,
        gradients: Option<(&CudaArray, Option<&PartMut<'_, CudaArray>>)>,
        totals: &CudaTotals,
    ) -> Result<(), NnError> {
        let weight = weight.matrix(width);
        let vocab = weight.layout.shape[1];
        let (tokens, chunk) = (batch.count(), logits.elems() / vocab.max(1));
        let own = match each {
            Some(_) => None,
            None => Some(self.scratch("losses", 4 * chunk)?),
        };
        let totals_len = [TOTALS_LEN];
        for first in (0..tokens).step_by(chunk.max(1)) {
            let count = chunk.min(tokens - first);
            let x = batched(&rows_of(&x.rows(width), first, count));
            let logits = rows_of(&logits.rows(vocab), 0, count);
            let kind = if gradients.is_some() { Timed::LossBackward } else { Timed::Loss };
            let product = Matmul::new(x, weight.transposed(), batched(&logits));
            self.timed(kind, |this| this.product(&product))?;
            let losses = match (&own, each) {
                (Some(own), _) => DeviceTensor::contiguous(own.address(), DType::F32, [count]),
                (None, each) => part_of(&each.expect("one of both").vector(), first, count),
            };
            let count_of = [count];
            let labels = batch.labels(first, &count_of);
            let gradient = gradients.is_some();
            let totals = numbers(&totals.memory, &totals_len);
            let of_tokens = CrossEntropy { logits, labels, losses, gradient, cap, z_weight: 0.0 };
            self.timed(Timed::CrossEntropy, |this| {
                this.run(&of_tokens)?;
                this.run(&AddLosses { losses, labels, totals })
            })?;
            if let Some((d_x, d_weight)) = gradients {
                let d_x = batched(&rows_of(&d_x.rows(width), first, count));
                self.loss_products(kind, batched(&logits), x, weight, d_x, d_weight, first > 0)?;
            }
        }
        Ok(())
    }

    /// [`Self::cross_entropy`] of a rank that has a part of the vocabulary.
    pub(super) fn cross_entropy_part(
        &mut self,
        batch: &CudaBatch,
        mut part: VocabularyPart<'_, Self>,
        width: usize,
        x: &CudaArray,
        weight: &Part<'_, CudaArray>,
        cap: Option<f32>,
        logits: &CudaArray,
        gradients: Option<LossGradients<'_, CudaArray>>,
        totals: &CudaTotals,
    ) -> Result<(), NnError> {
        let weight = weight.matrix(width);
        let vocab = weight.layout.shape[1];
        let (tokens, chunk) = (batch.count(), logits.elems() / vocab.max(1));
        let of_losses = self.scratch("losses", 4 * chunk)?;
        let first = part.first;
        let [mut own, mut all] = <[CudaArray; 2]>::default();
        for start in (0..tokens).step_by(chunk.max(1)) {
            let count = chunk.min(tokens - start);
            let x = batched(&rows_of(&x.rows(width), start, count));
            let logits = rows_of(&logits.rows(vocab), 0, count);
            let kind = if gradients.is_some() { Timed::LossBackward } else { Timed::Loss };
            let product = Matmul::new(x, weight.transposed(), batched(&logits));
            self.timed(kind, |this| this.product(&product))?;
            let (count_of, gradient) = ([count], gradients.is_some());
            let labels = batch.labels(start, &count_of);
            self.resize("sums of logits", &mut own, DType::F32, count * LOGIT_SUMS)?;
            let ranks = part.parts * count * LOGIT_SUMS;
            self.resize("sums of the logits of all ranks", &mut all, DType::F32, ranks)?;
            let sums = own.rows(LOGIT_SUMS);
            self.run_timed(Timed::CrossEntropy, &LogitSums { logits, labels, first, sums, cap })?;
            part.all(self, [count, LOGIT_SUMS], &own, &mut all)?;
            let losses = DeviceTensor::contiguous(of_losses.address(), DType::F32, [count]);
            let totals = numbers(&totals.memory, &[TOTALS_LEN]);
            let sums = all.rows(LOGIT_SUMS);
            let of_tokens = CrossEntropyPart { logits, labels, first, sums, losses, gradient, cap };
            self.timed(Timed::CrossEntropy, |this| {
                this.run(&of_tokens)?;
                this.run(&AddLosses { losses, labels, totals })
            })?;
            if let Some((d_x, d_weight)) = &gradients {
                let d_x = batched(&rows_of(&d_x.rows(width), start, count));
                self.loss_products(
                    kind,
                    batched(&logits),
                    x,
                    weight,
                    d_x,
                    d_weight.as_ref(),
                    start > 0,
                )?;
            }
        }
        Ok(())
    }

    /// From the gradient of logits to those of what they are the product of.
    fn loss_products(
        &mut self,
        kind: Timed,
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
        self.timed(kind, |this| {
            this.product(&Matmul::new(d_logits, weight, d_x))?;
            product.map_or(Ok(()), |product| this.product(&product))
        })
    }
}
