//! Ranks that are threads of one process.
//!
//! Every pair of ranks of a group has a queue of messages. Sending never waits; receiving waits for
//! the next message of the queue, and compares what it belongs to with what the receiver does. All
//! queues are behind one lock: a group of threads is for tests, for planning and for CPUs, where
//! copies cost little beside attention.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::{Collectives, Expected, Kind, Message, a_part_each, members_of};
use crate::error::{ShardError, refused};

/// A message in a queue, with what its sender was doing.
#[derive(Debug)]
struct Sent {
    kind: Kind,
    /// Number of the collective in its group; 0 for messages of pairs.
    number: u64,
    bytes: Vec<u8>,
}

#[derive(Debug, Default)]
struct State {
    /// By group, sender and receiver, ranks of the whole.
    queues: HashMap<(u64, usize, usize), VecDeque<Sent>>,
    aborted: Option<String>,
    left: Vec<bool>,
}

#[derive(Debug)]
struct Hub {
    state: Mutex<State>,
    changed: Condvar,
    deadline: Duration,
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn abort(&self, why: String) {
        self.lock().aborted.get_or_insert(why);
        self.changed.notify_all();
    }
}

/// A rank that is a thread: see [`run_threads`].
#[derive(Debug)]
pub struct ThreadRank {
    hub: Arc<Hub>,
    /// Tells groups apart.
    group: u64,
    /// Ranks of the whole, in order of rank of the group.
    members: Vec<usize>,
    rank: usize,
    /// Collectives of the group so far.
    number: Mutex<u64>,
    /// Subgroups made so far, by their members.
    subgroups: Mutex<HashMap<Vec<usize>, u64>>,
}

/// Runs `body` on `ranks` threads, each with its rank, and returns what each gave in order of rank.
/// No rank waits longer than `deadline` for another.
///
/// ```
/// use std::time::Duration;
/// use foveate_shard::collectives::{Collectives, run_threads};
///
/// let sums = run_threads(3, Duration::from_secs(5), |rank| {
///     let mut values = [rank.rank() as f32];
///     rank.all_reduce(&mut values)?;
///     Ok(values[0])
/// })?;
/// assert_eq!(sums, [3.0, 3.0, 3.0]);
/// # Ok::<(), foveate_shard::ShardError>(())
/// ```
///
/// # Errors
/// What the first rank that failed by itself gave, or that it panicked.
pub fn run_threads<T: Send>(
    ranks: usize,
    deadline: Duration,
    body: impl Fn(&ThreadRank) -> Result<T, ShardError> + Sync,
) -> Result<Vec<T>, ShardError> {
    let results = run_threads_each(ranks, deadline, body);
    let mut values = Vec::with_capacity(ranks);
    for result in results.0 {
        match result {
            Ok(value) => values.push(value),
            Err(error) => return Err(results.1.map_or(error, ShardError::new)),
        }
    }
    Ok(values)
}

/// What every rank gave, and why the first of them ended all.
fn run_threads_each<T: Send>(
    ranks: usize,
    deadline: Duration,
    body: impl Fn(&ThreadRank) -> Result<T, ShardError> + Sync,
) -> (Vec<Result<T, ShardError>>, Option<String>) {
    let state = Mutex::new(State { left: vec![false; ranks], ..State::default() });
    let hub = Arc::new(Hub { state, changed: Condvar::new(), deadline });
    let run = |rank: usize| {
        let world = ThreadRank::new(&hub, 0, (0..ranks).collect(), rank);
        let body = std::panic::AssertUnwindSafe(|| body(&world));
        let result = std::panic::catch_unwind(body).unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            refused(format!("it panicked: {said}"))
        });
        if let Err(error) = &result {
            hub.abort(format!("rank {rank}: {error}"));
        }
        hub.lock().left[rank] = true;
        hub.changed.notify_all();
        result
    };
    let run = &run;
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        let join = |t: std::thread::ScopedJoinHandle<'_, _>| t.join().expect("panics are caught");
        threads.into_iter().map(join).collect()
    });
    let aborted = hub.lock().aborted.take();
    (results, aborted)
}

impl ThreadRank {
    fn new(hub: &Arc<Hub>, group: u64, members: Vec<usize>, rank: usize) -> Self {
        let hub = Arc::clone(hub);
        Self { hub, group, members, rank, number: Mutex::default(), subgroups: Mutex::default() }
    }

    fn send(&self, to: usize, sent: Sent) {
        let key = (self.group, self.members[self.rank], self.members[to]);
        self.hub.lock().queues.entry(key).or_default().push_back(sent);
        self.hub.changed.notify_all();
    }

    /// The next message from a rank of the group, which has to be of this collective.
    fn receive(&self, from: usize, kind: Kind, number: u64) -> Result<Vec<u8>, ShardError> {
        let (sender, own) = (self.members[from], self.members[self.rank]);
        let key = (self.group, sender, own);
        let doing = |kind: Kind, number: u64| match kind {
            Kind::SendReceive => kind.name().to_owned(),
            _ => format!("{} as collective {number} of its group", kind.name()),
        };
        let until = Instant::now() + self.hub.deadline;
        let mut state = self.hub.lock();
        let failed = loop {
            if let Some(why) = &state.aborted {
                return refused(format!("aborted: {why}"));
            }
            if let Some(sent) = state.queues.get_mut(&key).and_then(VecDeque::pop_front) {
                if (sent.kind, sent.number) == (kind, number) {
                    return Ok(sent.bytes);
                }
                let (theirs, ours) = (doing(sent.kind, sent.number), doing(kind, number));
                break format!("rank {sender} does {theirs}, rank {own} {ours}");
            }
            let doing = doing(kind, number);
            if state.left[sender] {
                break format!("rank {own} waits for rank {sender} in {doing}, which has ended");
            }
            let now = Instant::now();
            if now >= until {
                let waited = self.hub.deadline;
                break format!("rank {own} waited {waited:?} for rank {sender} in {doing}");
            }
            let waited = self.hub.changed.wait_timeout(state, until - now);
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        };
        drop(state);
        self.hub.abort(failed.clone());
        refused(failed)
    }
}

impl Collectives for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.members.len()
    }

    fn exchange_as(&self, kind: Kind, parts: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, ShardError> {
        a_part_each(self, kind, &parts)?;
        let number = {
            let mut number = self.number.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            *number += 1;
            *number
        };
        for (to, bytes) in parts.into_iter().enumerate() {
            self.send(to, Sent { kind, number, bytes });
        }
        (0..self.ranks()).map(|from| self.receive(from, kind, number)).collect()
    }

    fn send_receive(
        &self,
        sends: Vec<Message>,
        receives: &[Expected],
    ) -> Result<Vec<Vec<u8>>, ShardError> {
        let peers = sends.iter().map(|m| m.peer).chain(receives.iter().map(|e| e.peer));
        if let Some(none) = peers.into_iter().find(|&peer| peer >= self.ranks()) {
            return refused(format!(
                "send/receive: rank {none} of {}; there is none",
                self.ranks()
            ));
        }
        for Message { peer, bytes } in sends {
            self.send(peer, Sent { kind: Kind::SendReceive, number: 0, bytes });
        }
        let mut received = Vec::with_capacity(receives.len());
        for expected in receives {
            let bytes = self.receive(expected.peer, Kind::SendReceive, 0)?;
            if bytes.len() != expected.bytes {
                let [from, own] = [expected.peer, self.rank].map(|rank| self.members[rank]);
                let (sent, wanted) = (bytes.len(), expected.bytes);
                let why =
                    format!("rank {from} sent {sent} bytes to rank {own}, which expects {wanted}");
                self.hub.abort(why.clone());
                return refused(why);
            }
            received.push(bytes);
        }
        Ok(received)
    }

    fn subgroup(&self, members: &[usize]) -> Result<Box<dyn Collectives>, ShardError> {
        let rank = members_of(self, members)?;
        let of_all: Vec<usize> = members.iter().map(|&m| self.members[m]).collect();
        let mut made = self.subgroups.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let made = made.entry(members.to_vec()).or_default();
        *made += 1;
        let words = [self.group, *made].into_iter().chain(of_all.iter().map(|&m| m as u64));
        let group = crate::hash::words(words);
        Ok(Box::new(Self::new(&self.hub, group, of_all, rank)))
    }

    fn abort(&self, why: &str) {
        self.hub.abort(format!("rank {}: {why}", self.members[self.rank]));
    }
}
