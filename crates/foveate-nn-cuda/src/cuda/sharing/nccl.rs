//! Ranks that are processes, one a GPU: NCCL sends and receives.
//!
//! NCCL's kernels wait on the device for what another rank sends, and the host behind them. When that rank dies or is
//! stopped, the ranks' own connections know it within seconds; a thread looks there and aborts the communicator, which
//! ends the kernels.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use foveate_gpu::driver::{Event, Stream, default_timeout};
use foveate_gpu::nccl::{Communicator, FlatArray, RankTransfer, Transfer, UniqueId, together};
use foveate_gpu::{ElementType, Engine, GpuError, Queue};
use foveate_nn::{NnError, NnErrorKind, Peers};

use super::super::failed;
use super::{Exchange, Span, Spans};

/// How often the thread looks whether a rank is lost.
const LOOK: Duration = Duration::from_millis(200);

/// How much later than NCCL the ranks' connections may know of a rank that is gone.
const SOON: Duration = Duration::from_secs(1);

/// A communicator for transfers of one kind.
pub struct Nccl {
    communicator: Arc<Communicator>,
    peers: Arc<Mutex<Box<dyn Peers>>>,
    watch: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Nccl {
    /// Among `peers`, of which this one has GPU `ordinal`.
    pub fn new(peers: Box<dyn Peers>, ordinal: usize) -> Result<Self, NnError> {
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
        let (rank, ranks, blocks) = (peers.rank(), peers.ranks(), peers.blocks());
        let is_lost = || peers.is_aborted();
        let joined = Communicator::in_blocks(&engine, &id, rank, ranks, timeout, blocks, &is_lost);
        let joined = joined.map_err(|e| {
            let refused = || refused(&format!("{e}; a GPU has one rank: {remedy}"));
            lost(&*peers).unwrap_or_else(refused)
        })?;
        let (communicator, peers) = (Arc::new(joined), Arc::new(Mutex::new(peers)));
        let watch = Some(watched(&communicator, &peers)?);
        Ok(Self { communicator, peers, watch })
    }

    /// Why transfers cannot be queued: a rank that is lost says more than that the communicator was aborted for it.
    fn why(&self, e: &GpuError) -> NnError {
        lost(&**lock(&self.peers)).unwrap_or_else(|| failed(e))
    }
}

/// Why the ranks cannot go on where one of them is lost, of which NCCL may know a moment before their connections do.
fn lost(peers: &dyn Peers) -> Option<NnError> {
    let began = Instant::now();
    while !peers.is_aborted() {
        if began.elapsed() > SOON {
            return None;
        }
        std::thread::sleep(LOOK / 10);
    }
    peers.all_gather(&[]).err()
}

/// The thread that aborts `communicator` when ranks are lost, and what ends it when dropped.
fn watched(
    communicator: &Arc<Communicator>,
    peers: &Arc<Mutex<Box<dyn Peers>>>,
) -> Result<(Sender<()>, JoinHandle<()>), NnError> {
    let (communicator, peers) = (Arc::clone(communicator), Arc::clone(peers));
    let (alive, ended) = channel::<()>();
    let look = move || {
        loop {
            let waited = ended.recv_timeout(LOOK);
            // Also where the communicator is dropped: NCCL ends one that is not aborted with the other ranks' help.
            if lock(&peers).is_aborted() {
                return communicator.abort();
            }
            if waited != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("nccl's ranks".to_owned()).spawn(look);
    Ok((alive, thread.map_err(|e| refused(&format!("a thread could not be started: {e}")))?))
}

fn lock(peers: &Mutex<Box<dyn Peers>>) -> MutexGuard<'_, Box<dyn Peers>> {
    peers.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Nccl {
    fn drop(&mut self) {
        if let Some((alive, thread)) = self.watch.take() {
            drop(alive);
            // It does not panic, and would have nobody to tell.
            let _ = thread.join();
        }
    }
}

fn refused(message: &str) -> NnError {
    NnErrorKind::Device(message.to_owned()).into()
}

impl Exchange for Nccl {
    fn ranks(&self) -> usize {
        self.communicator.ranks()
    }

    fn begin(
        &mut self,
        queue: &Queue,
        ready: &Event,
        outgoing: Spans,
        incoming: &Spans,
    ) -> Result<(), NnError> {
        queue.stream().after(ready).map_err(|e| failed(&e))?;
        let on = &*self.communicator;
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
        together(&transfers).map_err(|e| self.why(&e))
    }

    fn end(&mut self, done: Event, behind: &Stream) -> Result<(), NnError> {
        // What was sent is read when the work that sends it is done.
        behind.after(&done).map_err(|e| failed(&e))
    }
}
