//! Ranks that are processes, one a GPU: NCCL sends and receives.

use foveate_gpu::driver::{Event, Stream, default_timeout};
use foveate_gpu::nccl::{Communicator, FlatArray, RankTransfer, Transfer, UniqueId, together};
use foveate_gpu::{ElementType, Engine, Queue};
use foveate_nn::{NnError, NnErrorKind, Peers};

use super::super::failed;
use super::{Exchange, Span, Spans};

/// A communicator for transfers of one kind.
pub struct Nccl(Communicator);

impl Nccl {
    /// Among `peers`, of which this one has GPU `ordinal`.
    pub fn new(peers: &dyn Peers, ordinal: usize) -> Result<Self, NnError> {
        let engine = Engine::get(ordinal).map_err(|e| failed(&e))?;
        let own = match peers.rank() {
            0 => UniqueId::new().map(|id| id.bytes().to_vec()),
            _ => Ok(Vec::new()),
        };
        // The others learn that there is none before this rank says why.
        let all = peers.all_gather(own.as_deref().unwrap_or(&[]))?;
        let remedy = "train on one host by threads of one process (--ranks N), or set \
                      mesh.transfers = \"host\"";
        own.map_err(|e| refused(&format!("{e}; {remedy}")))?;
        let id = all[0].as_slice().try_into().map_err(|_| refused("rank 0 has no NCCL"))?;
        let (id, timeout) = (UniqueId::from_bytes(id), default_timeout());
        let joined = Communicator::new(&engine, &id, peers.rank(), peers.ranks(), timeout);
        Ok(Self(joined.map_err(|e| refused(&format!("{e}; a GPU has one rank: {remedy}")))?))
    }
}

fn refused(message: &str) -> NnError {
    NnErrorKind::Device(message.to_owned()).into()
}

impl Exchange for Nccl {
    fn ranks(&self) -> usize {
        self.0.ranks()
    }

    fn begin(
        &mut self,
        queue: &Queue,
        ready: &Event,
        outgoing: Spans,
        incoming: &Spans,
    ) -> Result<(), NnError> {
        queue.stream().after(ready).map_err(|e| failed(&e))?;
        let on = &self.0;
        let array = |&Span { address, bytes }: &Span| FlatArray {
            address,
            element: ElementType::U8,
            len: bytes,
        };
        let some = |&span: &&Span| span.bytes > 0;
        let others = (0..on.ranks()).filter(|&other| other != on.rank());
        let transfers: Vec<_> = others
            .flat_map(|other| {
                let send = move |span| Transfer::Send { from: array(span), to: other };
                let receive = move |span| Transfer::Receive { into: array(span), from: other };
                let sends = outgoing[other].iter().filter(some).map(send);
                sends.chain(incoming[other].iter().filter(some).map(receive))
            })
            .map(|transfer| RankTransfer { on, queue, transfer })
            .collect();
        together(&transfers).map_err(|e| failed(&e))
    }

    fn end(&mut self, done: Event, behind: &Stream) -> Result<(), NnError> {
        // What was sent is read when the work that sends it is done.
        behind.after(&done).map_err(|e| failed(&e))
    }
}
