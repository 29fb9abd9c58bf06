//! Rows of the table of a vocabulary, or of a rank's part of it.

use foveate_gpu::DeviceTensor;
use foveate_nn::{NnError, Part, PartMut};
use foveate_tensor::DType;

use super::array::{CudaArray, Place};
use super::clock::Timed;
use super::{Cuda, CudaBatch};
use crate::embedding::{Embedding, EmbeddingBackward, TokenOrder};

impl Cuda {
    /// Of a part of the table from that of id `first` on.
    pub(super) fn embed_rows(
        &mut self,
        batch: &CudaBatch,
        first: Option<usize>,
        table: Part<'_, CudaArray>,
        width: usize,
        scale: f32,
        out: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (table, out) = (table.rows(width), out.rows(width));
        let block = Embedding { table, first, tokens: batch.tokens(), out, scale };
        self.run_timed(Timed::Embedding, &block)
    }

    /// The gradient of what [`Self::embed_rows`] reads.
    pub(super) fn embed_rows_backward(
        &mut self,
        batch: &CudaBatch,
        first: Option<usize>,
        d_out: &CudaArray,
        width: usize,
        scale: f32,
        d_table: PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let most = TokenOrder::most_partial_rows(batch.count());
        let partial = self.scratch("partial rows of the embedding's gradient", 4 * most * width)?;
        let rows = batch.order.partial_rows();
        let block = EmbeddingBackward {
            d_out: d_out.rows(width),
            d_table: d_table.rows(width),
            first,
            order: &batch.order,
            words: batch.words(),
            partial: DeviceTensor::contiguous(partial.address(), DType::F32, [rows, width]),
            scale,
        };
        self.timed(Timed::EmbeddingBackward, |this| {
            this.begin_sums(&d_table)?;
            this.run(&block)
        })
    }
}
