//! The stream between ranks of `tensor` on GPUs: moved on a queue of its own, which begins behind what the blocks'
//! queue has been given, and which that waits for. Terms are summed by our own kernel, in order of rank and
//! in f32, whatever carries them, so the same mesh has the same bits.

use std::collections::VecDeque;
use std::ops::Range;

use foveate_gpu::DeviceTensor;
use foveate_gpu::abi::Address;
use foveate_gpu::blas::Matmul;
use foveate_gpu::driver::{Allocation, Event};
use foveate_nn::{
    Carrier, Holders, NnError, PartMut, Peers, StreamCut, StreamProduct, StreamThroughHost,
    StreamTransfers, TensorSharing,
};
use foveate_tensor::DType;

use super::super::array::{CudaArray, Place, batched, part_of, rows_of};
use super::super::clock::Timed;
use super::super::{Cuda, failed};
use super::{Span, Spans, Way, mark, span};
use crate::ranks::SumRanks;

/// Between GPUs.
struct GpuStream {
    all: Way,
    /// Among ranks with the same key/value heads, where there are several.
    kv_heads: Option<Way>,
    /// This rank, among all and among those.
    ranks: [usize; 2],
    /// What was gathered and not waited for.
    begun: VecDeque<Event>,
}

/// Transfers of `ranks` on GPU `ordinal`, by what they say.
pub(in crate::cuda) fn stream_transfers(
    ranks: &dyn TensorSharing,
    ordinal: usize,
) -> Result<Box<dyn StreamTransfers<Cuda>>, NnError> {
    if ranks.carrier() == Carrier::Host {
        return Ok(Box::new(StreamThroughHost::new(ranks.through_host()?)));
    }
    let (all, kv_heads) = (ranks.holders(Holders::All)?, ranks.holders(Holders::KvHeads)?);
    let places = [all.rank(), kv_heads.rank()];
    let way = |peers: Box<dyn Peers>| Way::new(peers, ordinal, ranks.carrier());
    let kv_heads = (kv_heads.ranks() > 1).then_some(kv_heads);
    Ok(Box::new(GpuStream {
        all: way(all)?,
        kv_heads: kv_heads.map(way).transpose()?,
        ranks: places,
        begun: VecDeque::new(),
    }))
}

/// Elements side by side in device memory.
fn vector(at: Span, dtype: DType) -> DeviceTensor<1> {
    DeviceTensor::contiguous(at.address, dtype, [at.bytes / dtype.bytes()])
}

/// `spans` of memory, one after another.
fn in_turn(memory: &Allocation, first: usize, spans: &[Span]) -> Vec<Span> {
    let mut address = memory.address() + first as Address;
    let next = |&Span { bytes, .. }: &Span| {
        let span = Span { address, bytes };
        address += bytes as Address;
        span
    };
    spans.iter().map(next).collect()
}

/// This rank's tokens of each row.
fn pieces(own: &CudaArray, cut: StreamCut) -> Vec<Span> {
    let row = cut.elems(cut.part) / cut.rows.max(1);
    (0..cut.rows).map(|i| span(own, i * row..(i + 1) * row)).collect()
}

/// Bytes of all.
fn bytes(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.bytes).sum()
}

impl Way {
    /// Begins to send what each rank has in `outgoing` to where others have it in `incoming`, behind the blocks so
    /// far; of this one, `rank`, it is copied.
    fn begin(
        &mut self,
        blocks: &Cuda,
        rank: usize,
        outgoing: Spans,
        incoming: &Spans,
    ) -> Result<Event, NnError> {
        let ready = mark(blocks.queue.stream())?;
        let own = outgoing[rank].clone();
        self.exchange.begin(&self.queue, &ready, outgoing, incoming)?;
        let stream = self.queue.stream();
        for (from, to) in own.iter().zip(&incoming[rank]) {
            // SAFETY: both are parts of memory of this device, of as many bytes; the blocks' queue gives
            // it to nobody before it has waited for what is done here.
            unsafe { stream.copy(to.address, from.address, stream.device(), from.bytes) }
                .map_err(|e| failed(&e))?;
        }
        self.done()
    }

    /// Lets the blocks that are queued next find what came in the exchange that began first, which is `done`.
    fn end(&mut self, blocks: &Cuda, done: Event) -> Result<(), NnError> {
        self.exchange.end(done, blocks.queue.stream())
    }
}

/// A transfer beside products: the first of these ranks gets something of this one, which gets something of the
/// second.
fn turns(StreamCut { part, parts, .. }: StreamCut) -> impl Iterator<Item = (usize, usize)> {
    (1..parts).map(move |turn| ((part + turn) % parts, (part + parts - turn) % parts))
}

impl Cuda {
    /// The product of the tokens of `part`, which are rows of `from`, if that has all tokens, or all that it has.
    fn product_of_part(
        &mut self,
        cut: StreamCut,
        part: usize,
        product: &StreamProduct<'_, CudaArray>,
        (from, has_all): (&CudaArray, bool),
        to: &CudaArray,
    ) -> Result<(), NnError> {
        let [read, written] = product.widths();
        let count = cut.elems(part) / (cut.rows * cut.width).max(1);
        let starts = cut.places(part).map(|place| place.start / cut.width.max(1));
        let kind = match product.backward {
            true => Timed::LinearBackwardInput,
            false => Timed::Linear,
        };
        let weight = product.weight.matrix(product.shape.inputs);
        let weight = if product.backward { weight } else { weight.transposed() };
        for (row, start) in starts.enumerate().filter(|_| count > 0) {
            let first = if has_all { start } else { row * count };
            let from = batched(&rows_of(&from.rows(read), first, count));
            let to = batched(&rows_of(&to.rows(written), start, count));
            let bias = product.bias.as_ref().map(Place::vector);
            let product = Matmul { bias, ..Matmul::new(from, weight, to) };
            self.timed(kind, |this| this.product(&product))?;
        }
        Ok(())
    }
}

impl GpuStream {
    /// Sums `terms`, which others have sent to `scratch`.
    fn sum_terms(
        blocks: &mut Cuda,
        cut: StreamCut,
        incoming: &Spans,
        dtype: DType,
        add: Option<&CudaArray>,
        own: &CudaArray,
    ) -> Result<(), NnError> {
        let row = cut.elems(cut.part) / cut.rows.max(1);
        blocks.timed(Timed::StreamSum, |blocks| {
            for i in (0..cut.rows).filter(|_| row > 0) {
                let of_row = |array: &CudaArray| part_of(&array.vector(), i * row, row);
                let terms = incoming.iter().map(|spans| vector(spans[i], dtype));
                let from: Vec<_> = terms.chain(add.map(of_row)).collect();
                blocks.run(&SumRanks { from: &from, to: of_row(own), accumulate: false })?;
            }
            Ok(())
        })
    }

    /// Where this rank's terms are, and those that others send to `scratch`: one after another.
    fn places_of_terms(
        blocks: &Cuda,
        cut: StreamCut,
        terms: &CudaArray,
    ) -> Result<(Allocation, Spans), NnError> {
        let own: Vec<Span> = cut.places(cut.part).map(|place| span(terms, place)).collect();
        let each = bytes(&own);
        let scratch = blocks.scratch("terms of other ranks", (cut.parts - 1) * each)?;
        let mut places = vec![own; cut.parts];
        let others = (0..cut.parts).filter(|&part| part != cut.part);
        for (number, part) in others.enumerate() {
            places[part] = in_turn(&scratch, number * each, &places[part]);
        }
        Ok((scratch, places))
    }
}

impl StreamTransfers<Cuda> for GpuStream {
    fn gather(
        &mut self,
        blocks: &mut Cuda,
        cut: StreamCut,
        own: &CudaArray,
        whole: &mut CudaArray,
    ) -> Result<(), NnError> {
        let places = |part| cut.places(part).map(|place| span(whole, place)).collect();
        let incoming: Spans = (0..cut.parts).map(places).collect();
        let given = vec![pieces(own, cut); cut.parts];
        self.begun.push_back(self.all.begin(blocks, cut.part, given, &incoming)?);
        Ok(())
    }

    fn gathered(&mut self, blocks: &mut Cuda) -> Result<(), NnError> {
        let done = self.begun.pop_front().expect("one has begun");
        blocks.timed(Timed::StreamWait, |blocks| self.all.end(blocks, done))
    }

    /// Own tokens first, while the others come.
    fn gather_and_multiply(
        &mut self,
        blocks: &mut Cuda,
        cut: StreamCut,
        own: &CudaArray,
        whole: &mut CudaArray,
        product: &StreamProduct<'_, CudaArray>,
        to: &mut CudaArray,
    ) -> Result<(), NnError> {
        let mut begun = VecDeque::new();
        for (number, (receiver, sender)) in turns(cut).enumerate() {
            let (mut given, mut incoming) =
                (vec![Vec::new(); cut.parts], vec![Vec::new(); cut.parts]);
            given[receiver] = pieces(own, cut);
            incoming[sender] = cut.places(sender).map(|place| span(whole, place)).collect();
            if number + 2 == cut.parts {
                given[cut.part] = pieces(own, cut);
                incoming[cut.part] = cut.places(cut.part).map(|place| span(whole, place)).collect();
            }
            begun.push_back((sender, self.all.begin(blocks, cut.part, given, &incoming)?));
        }
        blocks.product_of_part(cut, cut.part, product, (own, false), to)?;
        for (sender, done) in begun {
            blocks.timed(Timed::StreamWait, |blocks| self.all.end(blocks, done))?;
            blocks.product_of_part(cut, sender, product, (whole, true), to)?;
        }
        Ok(())
    }

    /// What others wait for first, while they do the same.
    fn multiply_and_scatter(
        &mut self,
        blocks: &mut Cuda,
        cut: StreamCut,
        product: &StreamProduct<'_, CudaArray>,
        from: &CudaArray,
        terms: &mut CudaArray,
        add: Option<&CudaArray>,
        own: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (_scratch, places) = Self::places_of_terms(blocks, cut, terms)?;
        let mut begun = VecDeque::new();
        for (receiver, sender) in turns(cut) {
            blocks.product_of_part(cut, receiver, product, (from, true), terms)?;
            let (mut given, mut incoming) =
                (vec![Vec::new(); cut.parts], vec![Vec::new(); cut.parts]);
            given[receiver] = cut.places(receiver).map(|place| span(terms, place)).collect();
            incoming[sender] = places[sender].clone();
            begun.push_back(self.all.begin(blocks, cut.part, given, &incoming)?);
        }
        blocks.product_of_part(cut, cut.part, product, (from, true), terms)?;
        blocks.timed(Timed::StreamWait, |blocks| {
            begun.into_iter().try_for_each(|done| self.all.end(blocks, done))
        })?;
        Self::sum_terms(blocks, cut, &places, terms.dtype, add, own)
    }

    fn scatter(
        &mut self,
        blocks: &mut Cuda,
        cut: StreamCut,
        terms: &CudaArray,
        add: Option<&CudaArray>,
        own: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (_scratch, incoming) = Self::places_of_terms(blocks, cut, terms)?;
        let places = |part| cut.places(part).map(|place| span(terms, place)).collect();
        let mut outgoing: Spans = (0..cut.parts).map(places).collect();
        // What this rank has of the sum itself stays where it is.
        outgoing[cut.part].clear();
        let done = self.all.begin(blocks, cut.part, outgoing, &incoming)?;
        blocks.timed(Timed::StreamWait, |blocks| self.all.end(blocks, done))?;
        Self::sum_terms(blocks, cut, &incoming, terms.dtype, add, own)
    }

    fn sum_copies(
        &mut self,
        blocks: &mut Cuda,
        among: Holders,
        gradients: &mut CudaArray,
        places: &[Range<usize>],
    ) -> Result<(), NnError> {
        let (way, rank) = match among {
            Holders::All => (Some(&mut self.all), self.ranks[0]),
            Holders::KvHeads => (self.kv_heads.as_mut(), self.ranks[1]),
        };
        let Some(way) = way else { return Ok(()) };
        let given: Vec<Span> = places.iter().map(|place| span(gradients, place.clone())).collect();
        let (each, ranks) = (bytes(&given), way.exchange.ranks());
        blocks.timed(Timed::SumCopies, |blocks| {
            let scratch = blocks.scratch("gradients of other ranks", ranks * each)?;
            let incoming: Spans =
                (0..ranks).map(|rank| in_turn(&scratch, rank * each, &given)).collect();
            let done = way.begin(blocks, rank, vec![given; ranks], &incoming)?;
            way.end(blocks, done)?;
            let dtype = gradients.dtype;
            for (i, place) in places.iter().enumerate() {
                let from: Vec<_> = incoming.iter().map(|spans| vector(spans[i], dtype)).collect();
                let to = PartMut { array: gradients, place: place.clone(), accumulate: false };
                blocks.run(&SumRanks { from: &from, to: to.vector(), accumulate: false })?;
            }
            Ok(())
        })
    }
}

impl Drop for GpuStream {
    /// Arrays that are being written, or that others read, go back only when that is over.
    fn drop(&mut self) {
        [Some(&self.all), self.kv_heads.as_ref()].into_iter().flatten().for_each(Way::settle);
    }
}
