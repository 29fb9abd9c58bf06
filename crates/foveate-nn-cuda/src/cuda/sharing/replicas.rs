//! Gradients of ranks that hold copies of the same parameters: every rank sums a part, in order of rank and in f32,
//! and gives the sums to all.

use std::ops::Range;

use foveate_gpu::abi::Address;
use foveate_gpu::{DeviceTensor, Queue};
use foveate_nn::{Carrier, NnError, PartMut, Peers, ReplicaSums};

use super::super::array::{CudaArray, Place};
use super::super::{Cuda, failed};
use super::{Span, Spans, Way, mark};
use crate::ranks::SumRanks;

/// Elements that are summed at once: what others send of them takes memory.
const PIECE: usize = 64 << 20;

/// Sums over ranks that hold copies.
pub struct Replicas {
    way: Way,
    rank: usize,
    ranks: usize,
}

impl Replicas {
    /// Among `peers`, of which this one has GPU `ordinal`.
    pub fn new(peers: Box<dyn Peers>, ordinal: usize, carrier: Carrier) -> Result<Self, NnError> {
        let (rank, ranks) = (peers.rank(), peers.ranks());
        Ok(Self { way: Way::new(peers, ordinal, carrier)?, rank, ranks })
    }

    /// Queues on `queue` that `values` become their sums over ranks.
    pub fn sum_on(
        &mut self,
        blocks: &Cuda,
        queue: &Queue,
        values: DeviceTensor<1>,
    ) -> Result<(), NnError> {
        let [elems] = values.layout.shape;
        for first in (0..elems).step_by(PIECE) {
            self.sum_piece(blocks, queue, values, first..elems.min(first + PIECE))?;
        }
        Ok(())
    }

    fn sum_piece(
        &mut self,
        blocks: &Cuda,
        queue: &Queue,
        values: DeviceTensor<1>,
        place: Range<usize>,
    ) -> Result<(), NnError> {
        let (ranks, size, exchange) = (self.ranks, values.dtype.bytes(), &mut self.way.exchange);
        let bound = |rank: usize| place.start + place.len() * rank / ranks;
        let part = |rank: usize| {
            let address = values.start() + (bound(rank) * size) as Address;
            Span { address, bytes: (bound(rank + 1) - bound(rank)) * size }
        };
        let own = part(self.rank);
        let scratch = queue.pool().take(ranks * own.bytes).map_err(|e| failed(&e))?;
        // Those of other ranks lie one after another, and the sums behind them.
        let place = |number: usize| {
            let address = scratch.address() + (number * own.bytes) as Address;
            Span { address, bytes: own.bytes }
        };
        let source = |rank: usize| match rank == self.rank {
            true => own,
            false => place(rank - usize::from(rank > self.rank)),
        };
        let (sums, all) = (place(ranks - 1), 0..ranks);
        let parts: Spans = all.clone().map(|rank| vec![part(rank)]).collect();
        let incoming: Spans = all.clone().map(|rank| vec![source(rank)]).collect();
        exchange.begin(queue, &mark(queue.stream())?, parts.clone(), &incoming)?;
        let vector =
            |span: Span| DeviceTensor::contiguous(span.address, values.dtype, [span.bytes / size]);
        if own.bytes > 0 {
            let from: Vec<_> = all.map(|rank| vector(source(rank))).collect();
            let to = vector(sums);
            blocks.run_on(queue, &SumRanks { from: &from, to, accumulate: false })?;
        }
        // What others read is written behind it.
        exchange.end(mark(queue.stream())?, queue.stream())?;
        exchange.begin(queue, &mark(queue.stream())?, vec![vec![sums]; ranks], &parts)?;
        let stream = queue.stream();
        // SAFETY: both are memory of this device, of as many bytes, and apart.
        unsafe { stream.copy(own.address, sums.address, stream.device(), own.bytes) }
            .map_err(|e| failed(&e))?;
        exchange.end(mark(stream)?, stream)
    }
}

impl ReplicaSums<Cuda, CudaArray> for Replicas {
    fn sum(&mut self, blocks: &mut Cuda, gradients: PartMut<'_, CudaArray>) -> Result<(), NnError> {
        let (queue, own) = (self.way.queue.clone(), blocks.queue.stream());
        queue.stream().after(&mark(own)?).map_err(|e| failed(&e))?;
        self.sum_on(blocks, &queue, gradients.vector())?;
        blocks.queue.stream().after(&mark(queue.stream())?).map_err(|e| failed(&e))
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        self.way.settle();
    }
}
