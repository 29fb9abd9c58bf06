//! The loss of a batch, a chunk of tokens after the other.

use foveate_gpu::DeviceTensor;
use foveate_gpu::blas::Matmul;
use foveate_nn::{Array, NnError, Part, PartMut};
use foveate_tensor::DType;

use super::array::{CudaArray, Place, batched, numbers, part_of, rows_of};
use super::clock::Timed;
use super::{Cuda, CudaBatch, CudaTotals, beta};
use crate::loss::{AddLosses, CrossEntropy};
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
                let logits = batched(&logits);
                let product = d_weight.map(|d_weight| {
                    let accumulate = d_weight.accumulate || first > 0;
                    let product = Matmul::new(logits.transposed(), x, d_weight.matrix(width));
                    Matmul { beta: beta(accumulate), ..product }
                });
                self.timed(kind, |this| {
                    this.product(&Matmul::new(logits, weight, d_x))?;
                    product.map_or(Ok(()), |product| this.product(&product))
                })?;
            }
        }
        Ok(())
    }
}
