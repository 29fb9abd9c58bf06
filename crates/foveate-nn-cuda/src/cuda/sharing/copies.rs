//! Ranks that are threads of one process, on one GPU or several: each copies what it needs from where the
//! others have it. Copies between GPUs go over NVLink or PCIe by the copy engines, and take no SM.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, OnceLock};

use foveate_gpu::Queue;
use foveate_gpu::driver::{Device, Event, Stream};
use foveate_gpu::sync::lock;
use foveate_nn::{NnError, NnErrorKind, Peers};

use super::super::failed;
use super::{Exchange, Span, Spans, mark};

/// A number of this process that no other has.
fn process() -> u64 {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    *PROCESS.get_or_init(|| RandomState::new().hash_one(std::process::id()))
}

/// Whether all ranks are threads of this process.
pub fn in_process(peers: &dyn Peers) -> Result<bool, NnError> {
    let all = peers.all_gather(&process().to_le_bytes())?;
    Ok(all.iter().all(|number| *number == process().to_le_bytes()))
}

/// What a rank has for others, and where its device is with it.
struct Offer {
    ready: Event,
    device: Device,
    outgoing: Spans,
}

/// Where ranks leave what they have for others: of each rank, the last two of a kind. A rank leaves the next
/// one only when all have taken the one before the last.
type Board<T> = [Vec<Mutex<Option<Arc<T>>>>; 2];

/// What the ranks of a group share.
struct Hub {
    offers: Board<Offer>,
    done: Board<Event>,
}

fn board<T>(ranks: usize) -> Board<T> {
    [(); 2].map(|()| (0..ranks).map(|_| Mutex::default()).collect())
}

/// Hubs that not all ranks have found yet.
static HUBS: Mutex<Option<HashMap<u64, Arc<Hub>>>> = Mutex::new(None);

/// Copies from the other ranks of a group.
pub struct Copies {
    peers: Box<dyn Peers>,
    hub: Arc<Hub>,
    /// Exchanges that have begun, and that have ended.
    count: [usize; 2],
}

impl Copies {
    /// Among `peers`, all threads of this process.
    pub fn new(peers: Box<dyn Peers>) -> Result<Self, NnError> {
        let ranks = peers.ranks();
        let key = RandomState::new().hash_one(ranks).to_le_bytes();
        let made = || Arc::new(Hub { offers: board(ranks), done: board(ranks) });
        let of = |hubs: &mut Option<HashMap<_, _>>, key| {
            hubs.get_or_insert_default().entry(u64::from_le_bytes(key)).or_insert_with(made).clone()
        };
        // The number of the first rank names the hub.
        let first = peers.all_gather(&key)?[0].as_slice().try_into().unwrap_or(key);
        let hub = of(&mut lock(&HUBS), first);
        peers.all_gather(&[])?;
        if peers.rank() == 0 {
            lock(&HUBS).iter_mut().for_each(|hubs| drop(hubs.remove(&u64::from_le_bytes(first))));
        }
        Ok(Self { peers, hub, count: [0; 2] })
    }

    /// Leaves `own`, and takes what every rank has left.
    fn meet<T>(&self, board: &Board<T>, round: usize, own: T) -> Result<Vec<Arc<T>>, NnError> {
        let places = &board[round % 2];
        *lock(&places[self.peers.rank()]) = Some(Arc::new(own));
        self.peers.all_gather(&[])?;
        let take = |place: &Mutex<Option<Arc<T>>>| lock(place).clone();
        let all: Option<Vec<_>> = places.iter().map(take).collect();
        all.ok_or_else(|| wrong("a rank has left nothing for the others"))
    }
}

fn wrong(message: &str) -> NnError {
    NnErrorKind::Ranks { message: message.to_owned(), lost: false }.into()
}

impl Exchange for Copies {
    fn ranks(&self) -> usize {
        self.peers.ranks()
    }

    fn begin(
        &mut self,
        queue: &Queue,
        ready: &Event,
        outgoing: Spans,
        incoming: &Spans,
    ) -> Result<(), NnError> {
        let (stream, rank) = (queue.stream(), self.peers.rank());
        stream.after(ready).map_err(|e| failed(&e))?;
        // An event of its own, which others may wait for when this one is gone.
        let offer = Offer { ready: mark(stream)?, device: stream.device().clone(), outgoing };
        let offers = self.meet(&self.hub.offers, self.count[0], offer)?;
        self.count[0] += 1;
        for (other, offer) in offers.iter().enumerate().filter(|(other, _)| *other != rank) {
            let (given, places) = (&offer.outgoing[rank], &incoming[other]);
            if !given.iter().map(|span| span.bytes).eq(places.iter().map(|span| span.bytes)) {
                return Err(wrong(&format!(
                    "rank {other} has other bytes than rank {rank} expects"
                )));
            }
            if self.count[0] == 1 {
                // Where the machine cannot, the driver copies through the host.
                stream.device().reach(&offer.device).map_err(|e| failed(&e))?;
            }
            stream.after(&offer.ready).map_err(|e| failed(&e))?;
            for (Span { address: from, bytes }, to) in given.iter().zip(places) {
                // SAFETY: the other rank keeps its memory until `end`, where it waits for this copy; ours is
                // the caller's, which keeps it as long.
                unsafe { stream.copy(to.address, *from, &offer.device, *bytes) }
                    .map_err(|e| failed(&e))?;
            }
        }
        Ok(())
    }

    fn end(&mut self, done: Event, behind: &Stream) -> Result<(), NnError> {
        let done = self.meet(&self.hub.done, self.count[1], done)?;
        self.count[1] += 1;
        done.iter().try_for_each(|event| behind.after(event)).map_err(|e| failed(&e))
    }
}
