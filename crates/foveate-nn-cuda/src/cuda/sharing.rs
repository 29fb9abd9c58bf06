//! Parameters that are cut over ranks on GPUs: groups are gathered on one queue and gradients summed on
//! another, both beside the queue of the blocks.
//!
//! A transfer begins behind what the blocks' queue has been given so far, and the blocks' queue waits for
//! it where its result is needed; the host waits for other hosts alone. Memory that the blocks' queue
//! gives out is written by a transfer only between the two. Gradients are summed by our own kernel, in
//! order of rank and in f32, whatever carries them, so the same mesh has the same bits.

mod copies;
mod nccl;
mod replicas;
mod stream;

use std::collections::VecDeque;

use foveate_gpu::abi::Address;
use foveate_gpu::driver::{Allocation, Event, Stream};
use foveate_gpu::{DeviceTensor, Engine, Queue};
use foveate_nn::{
    Carrier, CutGroup, NnError, Part, PartMut, Peers, ReplicaSumsOf, Sharing, ThroughHost,
    Transfers,
};
use foveate_tensor::DType;

use super::array::{CudaArray, Place};
use super::{Cuda, failed};
use crate::ranks::{Narrow, SumRanks};
use crate::vectors::Add;
use copies::Copies;
use nccl::Nccl;
use replicas::Replicas;
pub(super) use stream::stream_transfers;

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub address: Address,
    pub bytes: usize,
}

/// Of each rank, in order of rank.
pub(super) type Spans = Vec<Vec<Span>>;

/// What carries bytes between the GPUs of a group of ranks.
pub(super) trait Exchange: Send {
    /// Ranks of the group.
    fn ranks(&self) -> usize;

    /// Queues that what each rank has in `outgoing` for another goes to where that has it in `incoming`,
    /// as many bytes in as many pieces, once the work before `ready` is done. What a rank sends itself is
    /// not looked at.
    fn begin(
        &mut self,
        queue: &Queue,
        ready: &Event,
        outgoing: Spans,
        incoming: &Spans,
    ) -> Result<(), NnError>;

    /// Makes `behind` wait until the exchange that began first is `done`, and what this rank sent was read.
    fn end(&mut self, done: Event, behind: &Stream) -> Result<(), NnError>;
}

/// Transfers of one kind.
pub(super) struct Way {
    pub exchange: Box<dyn Exchange>,
    pub queue: Queue,
}

impl Way {
    /// Among `peers`, of which this one has GPU `ordinal`. All ranks call it.
    pub fn new(peers: Box<dyn Peers>, ordinal: usize, carrier: Carrier) -> Result<Self, NnError> {
        let in_process = copies::in_process(&*peers)? && carrier == Carrier::Auto;
        let queue = Engine::get(ordinal).and_then(|e| e.new_queue()).map_err(|e| failed(&e))?;
        let exchange: Box<dyn Exchange> = match in_process {
            true => Box::new(Copies::new(peers)?),
            false => Box::new(Nccl::new(peers, ordinal)?),
        };
        Ok(Self { exchange, queue })
    }

    /// The present end of its transfers.
    pub fn done(&self) -> Result<Event, NnError> {
        mark(self.queue.stream())
    }

    /// Waits for its transfers.
    pub fn settle(&self) {
        // Where the device has failed there is nobody to tell.
        let _ = self.queue.stream().wait(FAREWELL, "transfers between ranks");
    }
}

/// The present end of a stream's work.
pub(super) fn mark(stream: &Stream) -> Result<Event, NnError> {
    let mark = || {
        let event = Event::new(stream.device())?;
        event.record(stream).map(|()| event)
    };
    mark().map_err(|e| failed(&e))
}

/// Gradients that are being summed.
struct Summing {
    done: Event,
    /// What others read.
    _gradients: CudaArray,
    _narrow: Option<Allocation>,
}

/// Between GPUs.
pub(super) struct GpuTransfers {
    gathers: Way,
    sums: Way,
    /// Of ranks that hold the same groups, where these are summed over them, too.
    replicas: Option<Replicas>,
    /// What gradients travel as, where they are f32.
    reduce_dtype: DType,
    gathering: VecDeque<Event>,
    summing: VecDeque<Summing>,
}

/// Sums over the ranks of `peers`, of which this one has GPU `ordinal`; none where there is one rank, or they
/// meet in the memory of the host.
pub(super) fn replicas(
    peers: Box<dyn Peers>,
    ordinal: usize,
    carrier: Carrier,
) -> Result<Option<ReplicaSumsOf<Cuda>>, NnError> {
    if peers.ranks() == 1 || carrier == Carrier::Host {
        return Ok(None);
    }
    Ok(Some(Box::new(Replicas::new(peers, ordinal, carrier)?)))
}

/// Transfers of `ranks` on GPU `ordinal`, by what they say.
pub(super) fn transfers(
    ranks: &dyn Sharing,
    ordinal: usize,
) -> Result<Box<dyn Transfers<Cuda>>, NnError> {
    if ranks.carrier() == Carrier::Host {
        return Ok(Box::new(ThroughHost::new(ranks.through_host()?)));
    }
    let replicas = ranks.replicas()?.filter(|peers| peers.ranks() > 1);
    let replicas = replicas.map(|peers| Replicas::new(peers, ordinal, ranks.carrier()));
    let way = || Way::new(ranks.peers()?, ordinal, ranks.carrier());
    Ok(Box::new(GpuTransfers {
        gathers: way()?,
        sums: way()?,
        replicas: replicas.transpose()?,
        reduce_dtype: ranks.reduce_dtype(),
        gathering: VecDeque::new(),
        summing: VecDeque::new(),
    }))
}

/// The bytes of part of an array.
fn span(array: &CudaArray, place: std::ops::Range<usize>) -> Span {
    let (address, dtype, elems) = Part { array, place }.place();
    Span { address, bytes: elems * dtype.bytes() }
}

/// Memory for work of a queue.
fn taken(queue: &Queue, bytes: usize) -> Result<Allocation, NnError> {
    queue.pool().take(bytes).map_err(|e| failed(&e))
}

impl GpuTransfers {
    /// Queues the sum of what ranks have, in order of rank, and where replicas sum theirs, of their sums, too.
    fn add_up(
        &mut self,
        blocks: &mut Cuda,
        sources: &[DeviceTensor<1>],
        into: &PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let (queue, to, accumulate) = (&self.sums.queue, into.vector(), into.accumulate);
        let Some(replicas) = &mut self.replicas else {
            return blocks.run_on(queue, &SumRanks { from: sources, to, accumulate });
        };
        let [own] = to.layout.shape;
        let memory = taken(queue, 4 * own)?;
        let sums = DeviceTensor::contiguous(memory.address(), DType::F32, [own]);
        blocks.run_on(queue, &SumRanks { from: sources, to: sums, accumulate: false })?;
        replicas.sum_on(blocks, queue, sums)?;
        match accumulate {
            true => blocks.run_on(queue, &Add { from: sums, to }),
            false => blocks.run_on(queue, &Narrow { from: sums, to }),
        }
    }
}

impl Transfers<Cuda> for GpuTransfers {
    fn gather(
        &mut self,
        blocks: &mut Cuda,
        own: &CudaArray,
        group: &CutGroup,
        into: &mut CudaArray,
    ) -> Result<(), NnError> {
        let Way { exchange, queue } = &mut self.gathers;
        let ready = mark(blocks.queue.stream())?;
        let given: Vec<Span> = group.places().into_iter().map(|place| span(own, place)).collect();
        let places = |rank| group.of(rank).iter().map(|place| span(into, place.clone())).collect();
        let incoming: Spans = (0..group.ranks()).map(places).collect();
        exchange.begin(queue, &ready, vec![given.clone(); group.ranks()], &incoming)?;
        let stream = queue.stream();
        for (from, to) in given.iter().zip(&incoming[group.rank()]) {
            // SAFETY: both are parts of arrays of this device, of as many bytes; the blocks' queue gives
            // their memory to nobody before it has waited for what is done here.
            unsafe { stream.copy(to.address, from.address, stream.device(), from.bytes) }
                .map_err(|e| failed(&e))?;
        }
        self.gathering.push_back(self.gathers.done()?);
        Ok(())
    }

    fn gathered(
        &mut self,
        blocks: &mut Cuda,
        _: &CutGroup,
        _: &mut CudaArray,
    ) -> Result<(), NnError> {
        let done = self.gathering.pop_front().expect("a gathering has begun");
        self.gathers.exchange.end(done, blocks.queue.stream())
    }

    fn reduce(
        &mut self,
        blocks: &mut Cuda,
        gradients: &mut CudaArray,
        group: &CutGroup,
        into: PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let queue = self.sums.queue.clone();
        let mut ready = mark(blocks.queue.stream())?;
        queue.stream().after(&ready).map_err(|e| failed(&e))?;
        let mut from = Part { array: &*gradients, place: 0..group.trained() }.vector();
        let mut narrow = None;
        if self.reduce_dtype.bytes() < from.dtype.bytes() {
            let memory = taken(&queue, group.trained() * self.reduce_dtype.bytes())?;
            let to =
                DeviceTensor::contiguous(memory.address(), self.reduce_dtype, from.layout.shape);
            blocks.run_on(&queue, &Narrow { from, to })?;
            (from, ready, narrow) = (to, mark(queue.stream())?, Some(memory));
        }
        let (own, size) = (group.own().len(), from.dtype.bytes());
        let part = |rank: usize| {
            let place = &group.of(rank)[0];
            let address = from.start() + (place.start * size) as Address;
            Span { address, bytes: place.len() * size }
        };
        let ranks = 0..group.ranks();
        let outgoing = ranks.clone().map(|rank| vec![part(rank)]).collect();
        let others = group.ranks() - 1;
        let scratch = taken(&queue, others * own * size)?;
        // Those of other ranks lie one after another.
        let place = |rank: usize| match rank == group.rank() {
            true => part(rank),
            false => {
                let number = rank - usize::from(rank > group.rank());
                let address = scratch.address() + (number * own * size) as Address;
                Span { address, bytes: own * size }
            }
        };
        let incoming: Spans = ranks.map(|rank| vec![place(rank)]).collect();
        self.sums.exchange.begin(&queue, &ready, outgoing, &incoming)?;
        if own > 0 {
            let vector =
                |spans: &Vec<Span>| DeviceTensor::contiguous(spans[0].address, from.dtype, [own]);
            let sources: Vec<_> = incoming.iter().map(vector).collect();
            self.add_up(blocks, &sources, &into)?;
        }
        self.summing.push_back(Summing {
            done: self.sums.done()?,
            _gradients: std::mem::take(gradients),
            _narrow: narrow,
        });
        Ok(())
    }

    fn reduced(
        &mut self,
        blocks: &mut Cuda,
        _: &CutGroup,
        _: PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let Summing { done, _gradients, _narrow } =
            self.summing.pop_front().expect("a sum has begun");
        // What was read goes back behind the wait.
        self.sums.exchange.end(done, blocks.queue.stream())
    }
}

impl Drop for GpuTransfers {
    /// Arrays that are being written, or that others read, go back only when that is over.
    fn drop(&mut self) {
        self.gathers.settle();
        self.sums.settle();
    }
}

/// How long a rank that ends waits for its transfers.
pub(super) const FAREWELL: std::time::Duration = std::time::Duration::from_secs(5);
