//! Messages that have arrived and were not taken yet.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::Kind;
use crate::error::ShardError;

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

/// What a rank waits for, in one of its threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wait {
    /// The rank whose message it waits for.
    pub from: usize,
    pub kind: Kind,
    /// Number of the collective in its group; 0 for messages of pairs.
    pub number: u64,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, number, .. } = self;
        match kind {
            Kind::SendReceive => f.write_str(kind.name()),
            _ => write!(f, "{} as collective {number} of its group", kind.name()),
        }
    }
}

/// Why nobody can go on.
#[derive(Clone, Debug)]
pub(super) struct Why {
    pub text: String,
    /// Whether a rank is gone, silent or late, and not at odds with another.
    pub lost: bool,
}

impl Why {
    pub fn lost(text: impl Into<String>) -> Self {
        Self { text: text.into(), lost: true }
    }

    pub fn wrong(text: impl Into<String>) -> Self {
        Self { text: text.into(), lost: false }
    }

    pub fn error(self) -> ShardError {
        if self.lost { ShardError::lost(self.text) } else { ShardError::new(self.text) }
    }
}

/// What ends a rank that waits.
pub(super) enum Ended {
    /// Another rank told why.
    Aborted(Why),
    /// This rank found it, and tells the others.
    Found(Why),
}

/// Why everything ended.
#[derive(Clone, Debug)]
struct Abort {
    why: Why,
    by_another: bool,
}

#[derive(Debug, Default)]
struct State {
    queues: HashMap<Way, VecDeque<Sent>>,
    aborted: Option<Abort>,
    /// Why each rank ended everything, as far as it told this one.
    told: Vec<Option<Why>>,
    left: Vec<bool>,
    /// Ranks of which nothing more is read.
    closed: Vec<bool>,
    /// What each rank waits for, as far as it was said: oldest first, with what tells waits apart.
    waits: Vec<Vec<(u64, Wait)>>,
    /// Waits so far.
    waited: u64,
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
        let (left, closed) = (vec![false; ranks], vec![false; ranks]);
        let (waits, told) = (vec![Vec::new(); ranks], vec![None; ranks]);
        let state = Mutex::new(State { told, left, closed, waits, ..State::default() });
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
    pub fn abort(&self, why: Why, by_another: bool) -> bool {
        let mut state = self.lock();
        let first = state.aborted.is_none();
        state.aborted.get_or_insert(Abort { why, by_another });
        drop(state);
        self.changed.notify_all();
        first
    }

    pub fn aborted(&self) -> Option<Why> {
        self.lock().aborted.as_ref().map(|abort| abort.why.clone())
    }

    /// `rank` ends everything, and tells why.
    pub fn told(&self, rank: usize, why: Why) {
        self.lock().told[rank] = Some(why);
    }

    /// What another rank says where everything ended by it, or what the first rank before `rank` says that
    /// ended everything as well.
    pub fn said_before(&self, rank: usize) -> Option<Why> {
        let state = self.lock();
        let by_another = state.aborted.iter().filter(|abort| abort.by_another);
        by_another
            .map(|abort| &abort.why)
            .chain(state.told[..rank].iter().flatten())
            .next()
            .cloned()
    }

    /// `rank` sends nothing any more.
    pub fn leave(&self, rank: usize) {
        self.lock().left[rank] = true;
        self.changed.notify_all();
    }

    pub fn has_left(&self, rank: usize) -> bool {
        self.lock().left[rank]
    }

    /// Nothing more is read from `rank`.
    pub fn close(&self, rank: usize) {
        self.lock().closed[rank] = true;
        self.changed.notify_all();
    }

    /// Waits until nothing more is read from any of `ranks`, at most `patience`.
    pub fn wait_closed(&self, ranks: &[usize], patience: Duration) {
        let open = |state: &mut State| ranks.iter().any(|&rank| !state.closed[rank]);
        drop(self.changed.wait_timeout_while(self.lock(), patience, open));
    }

    /// What `rank` waits for longest, if it waits.
    pub fn wait_of(&self, rank: usize) -> Option<Wait> {
        self.lock().waits[rank].first().map(|&(_, wait)| wait)
    }

    /// Another rank says what it waits for.
    pub fn waits(&self, rank: usize, wait: Option<Wait>) {
        self.lock().waits[rank] = wait.map(|wait| (0, wait)).into_iter().collect();
    }

    /// The next message on `way`, which has to be of this collective.
    pub fn take(&self, way: Way, kind: Kind, number: u64) -> Result<Vec<u8>, Ended> {
        let wait = Wait { from: way.from, kind, number };
        let mut state = self.lock();
        state.waited += 1;
        let own = state.waited;
        state.waits[way.to].push((own, wait));
        let (mut state, taken) = self.wait(state, way, wait);
        state.waits[way.to].retain(|&(id, _)| id != own);
        taken
    }

    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        way: Way,
        wait: Wait,
    ) -> (MutexGuard<'a, State>, Result<Vec<u8>, Ended>) {
        let Way { from, to, .. } = way;
        let until = Instant::now() + self.deadline;
        let taken = loop {
            if let Some(Abort { why, by_another }) = state.aborted.clone() {
                break Err(if by_another { Ended::Aborted(why) } else { Ended::Found(why) });
            }
            if let Some(sent) = state.queues.get_mut(&way).and_then(VecDeque::pop_front) {
                if (sent.kind, sent.number) == (wait.kind, wait.number) {
                    break Ok(sent.bytes);
                }
                let theirs = Wait { from: to, kind: sent.kind, number: sent.number };
                let why = format!("rank {from} does {theirs}, rank {to} {wait}");
                break Err(Ended::Found(Why::wrong(why)));
            }
            if state.left[from] {
                let why = format!("rank {to} waits for rank {from} in {wait}, which has ended");
                break Err(Ended::Found(Why::lost(why)));
            }
            let now = Instant::now();
            if now >= until {
                let (waited, others) = (self.deadline, state.blame(to, from));
                let why = format!("rank {to} waited {waited:?} for rank {from} in {wait}{others}");
                break Err(Ended::Found(Why::lost(why)));
            }
            let waited = self.changed.wait_timeout(state, until - now);
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        };
        (state, taken)
    }
}

impl State {
    /// Of ranks that wait for each other the one that waits for none: it holds up the others. `rank`
    /// waits for `from`.
    fn blame(&self, rank: usize, from: usize) -> String {
        let (mut at, mut passed, mut said) = (from, vec![rank], String::new());
        while let Some((_, wait)) = self.waits[at].first() {
            said += &format!("; rank {at} waits for rank {} in {wait}", wait.from);
            passed.push(at);
            at = wait.from;
            if passed.contains(&at) {
                return said + ": they wait in a circle";
            }
        }
        said + &format!("; rank {at} waits for no rank: it computes, reads, writes or hangs")
    }
}
