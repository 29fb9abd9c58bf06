//! A rank of a group, over any wire.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use super::inbox::{Ended, Inbox, Sent, Way, Why};
use super::{Collectives, Expected, Kind, Message, a_part_each, members_of};
use crate::error::{ShardError, refused};

/// How messages reach another rank.
pub(super) trait Wire: fmt::Debug + Send + Sync {
    /// Where messages for this rank arrive.
    fn inbox(&self) -> &Inbox;

    /// Brings a message on its way. Waits for nobody to take it.
    fn send(&self, way: Way, sent: Sent) -> Result<(), ShardError>;

    /// Ends what every rank waits for, with `why`.
    fn abort(&self, why: Why);

    /// After an abort, what a rank says that failed, too, and has to say it instead of `rank`, whose wire
    /// this is; of ranks that share a process the process sees to it.
    fn said_instead(&self, _rank: usize) -> Option<Why> {
        None
    }

    /// `rank`, whose wire this is, sends nothing any more.
    fn leave(&self, rank: usize);
}

/// Transfers that [`Collectives::history`] remembers.
const HISTORY: usize = 1000;

/// One exchange of messages, as [`Collectives::history`] tells it. A collective is one or two.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// Which exchange this was of all of the rank, counted from 1.
    pub number: u64,
    /// What was called.
    pub kind: Kind,
    /// Tells groups of the same members apart, the same number on all of them.
    pub group: u64,
    /// Ranks of the group, as they are called in the whole.
    pub members: Vec<usize>,
    /// Which exchange of the group this was, counted from 1; 0 for messages of pairs.
    pub place: u64,
    /// Bytes that were sent to other ranks.
    pub bytes: usize,
    /// Hash of the plan that the ranks had agreed on ([`super::agree`]); 0 before they did.
    pub plan: u64,
    /// Seconds after the ranks met when it began.
    pub began: f64,
    /// Seconds after the ranks met when it ended; `None` while it lasts, and where it failed.
    pub ended: Option<f64>,
}

#[derive(Debug)]
struct History {
    met: Instant,
    calls: u64,
    plan: u64,
    last: VecDeque<Transfer>,
}

/// A rank that is a thread ([`super::run_threads`]) or a process ([`super::connect`]). When the group of all
/// is dropped, the others are told that this rank leaves: its subgroups can do nothing any more.
#[derive(Debug)]
pub struct Rank {
    wire: Arc<dyn Wire>,
    /// Tells groups apart.
    group: u64,
    /// Ranks of the whole, in order of rank of the group.
    members: Vec<usize>,
    rank: usize,
    /// Collectives of the group so far.
    number: Mutex<u64>,
    /// Subgroups made so far, by their members.
    subgroups: Mutex<HashMap<Vec<usize>, u64>>,
    /// Which meeting this is.
    meeting: u64,
    /// Shared by all groups of the rank.
    history: Arc<Mutex<History>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Rank {
    /// `rank` of the group of all `ranks`.
    pub(super) fn of_all(wire: Arc<dyn Wire>, [rank, ranks]: [usize; 2], meeting: u64) -> Self {
        let history = History { met: Instant::now(), calls: 0, plan: 0, last: VecDeque::new() };
        Self {
            wire,
            group: 0,
            members: (0..ranks).collect(),
            rank,
            number: Mutex::default(),
            subgroups: Mutex::default(),
            meeting,
            history: Arc::new(Mutex::new(history)),
        }
    }

    /// Whether this is the group of all ranks.
    fn is_whole(&self) -> bool {
        self.group == 0
    }

    fn begin(&self, kind: Kind, place: u64, bytes: usize) -> u64 {
        let mut history = lock(&self.history);
        history.calls += 1;
        let (number, began) = (history.calls, history.met.elapsed().as_secs_f64());
        if history.last.len() == HISTORY {
            history.last.pop_front();
        }
        let (group, members, plan) = (self.group, self.members.clone(), history.plan);
        let ended = None;
        history.last.push_back(Transfer {
            number,
            kind,
            group,
            members,
            place,
            bytes,
            plan,
            began,
            ended,
        });
        number
    }

    fn end(&self, number: u64) {
        let mut history = lock(&self.history);
        let now = history.met.elapsed().as_secs_f64();
        if let Some(transfer) = history.last.iter_mut().rev().find(|t| t.number == number) {
            transfer.ended = Some(now);
        }
    }

    fn send(&self, to: usize, sent: Sent) -> Result<(), ShardError> {
        let from = self.members[self.rank];
        self.wire.send(Way { group: self.group, from, to: self.members[to] }, sent)
    }

    /// The next message from a rank of the group, which has to be of this collective.
    fn receive(&self, from: usize, kind: Kind, number: u64) -> Result<Vec<u8>, ShardError> {
        let to = self.members[self.rank];
        let way = Way { group: self.group, from: self.members[from], to };
        self.wire.inbox().take(way, kind, number).or_else(|ended| match ended {
            Ended::Aborted(why) => {
                Err(Why { text: format!("aborted: {}", why.text), ..why }.error())
            }
            Ended::Found(why) => self.fail(why),
        })
    }

    fn fail<T>(&self, why: Why) -> Result<T, ShardError> {
        self.wire.abort(why.clone());
        Err(why.error())
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.is_whole() {
            self.wire.leave(self.rank);
        }
    }
}

impl Collectives for Rank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.members.len()
    }

    fn exchange_as(&self, kind: Kind, parts: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, ShardError> {
        a_part_each(self, kind, &parts)?;
        let number = {
            let mut number = lock(&self.number);
            *number += 1;
            *number
        };
        let sent = parts.iter().map(Vec::len).sum::<usize>() - parts[self.rank].len();
        let transfer = self.begin(kind, number, sent);
        // Each begins with the rank behind it, so that not all send to the first at once.
        let mut parts = parts;
        for to in (1..=self.ranks()).map(|i| (self.rank + i) % self.ranks()) {
            let bytes = std::mem::take(&mut parts[to]);
            self.send(to, Sent { kind, number, bytes })?;
        }
        let received: Result<_, _> =
            (0..self.ranks()).map(|from| self.receive(from, kind, number)).collect();
        if received.is_ok() {
            self.end(transfer);
        }
        received
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
        let sent = sends.iter().map(|m| m.bytes.len()).sum();
        let transfer = self.begin(Kind::SendReceive, 0, sent);
        for Message { peer, bytes } in sends {
            self.send(peer, Sent { kind: Kind::SendReceive, number: 0, bytes })?;
        }
        let mut received = Vec::with_capacity(receives.len());
        for expected in receives {
            let bytes = self.receive(expected.peer, Kind::SendReceive, 0)?;
            if bytes.len() != expected.bytes {
                let [from, own] = [expected.peer, self.rank].map(|rank| self.members[rank]);
                let (sent, wanted) = (bytes.len(), expected.bytes);
                return self.fail(Why::wrong(format!(
                    "rank {from} sent {sent} bytes to rank {own}, which expects {wanted}"
                )));
            }
            received.push(bytes);
        }
        self.end(transfer);
        Ok(received)
    }

    fn subgroup(&self, members: &[usize]) -> Result<Box<dyn Collectives>, ShardError> {
        let rank = members_of(self, members)?;
        let of_all: Vec<usize> = members.iter().map(|&m| self.members[m]).collect();
        let mut made = lock(&self.subgroups);
        let made = made.entry(members.to_vec()).or_default();
        *made += 1;
        let words = [self.group, *made].into_iter().chain(of_all.iter().map(|&m| m as u64));
        Ok(Box::new(Self {
            wire: Arc::clone(&self.wire),
            group: crate::hash::words(words),
            members: of_all,
            rank,
            number: Mutex::default(),
            subgroups: Mutex::default(),
            meeting: self.meeting,
            history: Arc::clone(&self.history),
        }))
    }

    fn abort(&self, why: &str) -> Option<String> {
        let rank = self.members[self.rank];
        self.wire.abort(Why::wrong(format!("rank {rank}: {why}")));
        // Why a rank was lost explains no failure of this one.
        self.wire.said_instead(rank).filter(|said| !said.lost).map(|said| said.text)
    }

    fn is_aborted(&self) -> bool {
        self.wire.inbox().aborted().is_some()
    }

    fn history(&self) -> Vec<Transfer> {
        lock(&self.history).last.iter().cloned().collect()
    }

    fn meeting(&self) -> (u64, f64) {
        (self.meeting, lock(&self.history).met.elapsed().as_secs_f64())
    }

    fn plan_is(&self, hash: u64) {
        lock(&self.history).plan = hash;
    }
}
