//! Messages that have arrived and were not taken yet.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::Kind;

/// A message, with what its sender was doing.
#[derive(Debug)]
pub(super) struct Sent {
    pub kind: Kind,
    /// Number of the collective in its group; 0 for messages of pairs.
    pub number: u64,
    pub bytes: Vec<u8>,
}

/// Where a message goes: from a rank of the whole to another, in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Way {
    pub group: u64,
    pub from: usize,
    pub to: usize,
}

/// What ends a rank that waits.
pub(super) enum Ended {
    /// Another rank told why.
    Aborted(String),
    /// This rank found it, and tells the others.
    Found(String),
}

/// Why everything ended.
#[derive(Clone, Debug)]
struct Abort {
    why: String,
    by_another: bool,
}

#[derive(Debug, Default)]
struct State {
    queues: HashMap<Way, VecDeque<Sent>>,
    aborted: Option<Abort>,
    left: Vec<bool>,
}

/// A queue for every way. All are behind one lock, which is held to add or take a message only.
#[derive(Debug)]
pub(super) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
    /// The longest that anybody waits.
    pub deadline: Duration,
}

impl Inbox {
    pub fn new(ranks: usize, deadline: Duration) -> Self {
        let state = Mutex::new(State { left: vec![false; ranks], ..State::default() });
        Self { state, changed: Condvar::new(), deadline }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn put(&self, way: Way, sent: Sent) {
        self.lock().queues.entry(way).or_default().push_back(sent);
        self.changed.notify_all();
    }

    /// Ends everything with `why`, which another rank says or this one found, unless it ended
    /// before; returns whether this was the first.
    pub fn abort(&self, why: &str, by_another: bool) -> bool {
        let mut state = self.lock();
        let first = state.aborted.is_none();
        state.aborted.get_or_insert_with(|| Abort { why: why.to_owned(), by_another });
        drop(state);
        self.changed.notify_all();
        first
    }

    pub fn aborted(&self) -> Option<String> {
        self.lock().aborted.as_ref().map(|abort| abort.why.clone())
    }

    /// `rank` sends nothing any more.
    pub fn leave(&self, rank: usize) {
        self.lock().left[rank] = true;
        self.changed.notify_all();
    }

    pub fn has_left(&self, rank: usize) -> bool {
        self.lock().left[rank]
    }

    /// The next message on `way`, which has to be of this collective.
    pub fn take(&self, way: Way, kind: Kind, number: u64) -> Result<Vec<u8>, Ended> {
        let doing = |kind: Kind, number: u64| match kind {
            Kind::SendReceive => kind.name().to_owned(),
            _ => format!("{} as collective {number} of its group", kind.name()),
        };
        let Way { from, to, .. } = way;
        let until = Instant::now() + self.deadline;
        let mut state = self.lock();
        loop {
            if let Some(Abort { why, by_another }) = state.aborted.clone() {
                return Err(if by_another { Ended::Aborted(why) } else { Ended::Found(why) });
            }
            if let Some(sent) = state.queues.get_mut(&way).and_then(VecDeque::pop_front) {
                if (sent.kind, sent.number) == (kind, number) {
                    return Ok(sent.bytes);
                }
                let (theirs, ours) = (doing(sent.kind, sent.number), doing(kind, number));
                let why = format!("rank {from} does {theirs}, rank {to} {ours}");
                return Err(Ended::Found(why));
            }
            let doing = doing(kind, number);
            if state.left[from] {
                let why = format!("rank {to} waits for rank {from} in {doing}, which has ended");
                return Err(Ended::Found(why));
            }
            let now = Instant::now();
            if now >= until {
                let waited = self.deadline;
                let why = format!("rank {to} waited {waited:?} for rank {from} in {doing}");
                return Err(Ended::Found(why));
            }
            let waited = self.changed.wait_timeout(state, until - now);
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }
}
