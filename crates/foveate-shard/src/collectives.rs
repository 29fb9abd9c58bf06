//! What ranks send each other.
//!
//! [`Collectives`] is the trait; [`OneRank`] and [`Rank`] implement it on host memory. A [`Rank`] is a
//! thread of [`run_threads`], or a process that met the others over TCP ([`connect`]). An implementation
//! gives [`Collectives::exchange`] (uneven parts, all to all) and [`Collectives::send_receive`]; the other
//! collectives follow from the first one, and their sums are in order of rank, so every rank gets the same
//! bits.
//!
//! Nothing hangs: a rank that waits gives up when its deadline has passed, a rank has left, another
//! rank aborted, or the ranks of a group do different things. Then all ranks get an error, and
//! [`Collectives::history`] has what each did last ([`log`]).

mod inbox;
pub mod log;
mod meeting;
mod rank;
mod tcp;
mod threads;

pub use meeting::{Meeting, connect};
pub use rank::{Rank, Transfer};
pub use threads::{run_threads, thread_ranks};

use crate::error::{ShardError, refused};
use crate::layout::Cut;

/// A collective, for messages and for the comparison of what ranks do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Uneven parts, all to all.
    Exchange,
    /// Every rank's part to every rank.
    AllGather,
    /// Sums, a part of them to each rank.
    ReduceScatter,
    /// Sums to every rank.
    AllReduce,
    /// One rank's bytes to every rank.
    Broadcast,
    /// Sends and receives between pairs.
    SendReceive,
}

impl Kind {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exchange => "exchange",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllReduce => "all-reduce",
            Self::Broadcast => "broadcast",
            Self::SendReceive => "send/receive",
        }
    }
}

/// Bytes for a rank of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// To whom, or from whom.
    pub peer: usize,
    /// What.
    pub bytes: Vec<u8>,
}

/// What a rank expects from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// From whom.
    pub peer: usize,
    /// How many bytes.
    pub bytes: usize,
}

/// A group of ranks that send each other bytes and f32 sums. Every rank of the group calls the same
/// methods in the same order; [`Self::send_receive`] is called by those that it names alone.
pub trait Collectives: Send {
    /// This rank's place in the group.
    fn rank(&self) -> usize;

    /// Number of ranks of the group.
    fn ranks(&self) -> usize;

    /// Sends `parts[i]` to rank `i` and returns what each rank sent to this one, in order of rank, on
    /// behalf of the collective `kind`. Parts may be empty and of any lengths.
    ///
    /// # Errors
    /// When there is not a part for each rank, or the group cannot go on: its deadline passed, a
    /// rank left or aborted, or another rank does something else.
    fn exchange_as(&self, kind: Kind, parts: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, ShardError>;

    /// Sends and receives between pairs, all of them at once: no order of ranks can wait in a
    /// circle. The result is in the order of `receives`.
    ///
    /// # Errors
    /// Those of [`Self::exchange_as`], a peer that is none, or other bytes than expected.
    fn send_receive(
        &self,
        sends: Vec<Message>,
        receives: &[Expected],
    ) -> Result<Vec<Vec<u8>>, ShardError>;

    /// The group of `members`, ranks of this group in ascending order, this one among them. Every
    /// member calls it.
    ///
    /// # Errors
    /// When the members are not ascending, are none, or this rank is not among them.
    fn subgroup(&self, members: &[usize]) -> Result<Box<dyn Collectives>, ShardError>;

    /// Ends what every rank waits for, now and later, with `why`.
    ///
    /// Ranks that are processes may fail alike at the same time. Then one of them has to say it: this rank
    /// gets what that one says, and nothing where it is the one itself.
    fn abort(&self, why: &str) -> Option<String>;

    /// Whether it is known here that the ranks cannot go on: one aborted, is gone or silent. Asks nobody, and
    /// waits for nothing.
    fn is_aborted(&self) -> bool {
        false
    }

    /// The last 1,000 transfers of this rank, over all its groups, in the order in which they began.
    /// A rank that is alone has none.
    fn history(&self) -> Vec<Transfer> {
        Vec::new()
    }

    /// Which meeting of ranks this is, the same number on all of them, and the seconds since; 0
    /// where nobody met.
    fn meeting(&self) -> (u64, f64) {
        (0, 0.0)
    }

    /// From here on transfers are of the plan with this hash.
    fn plan_is(&self, _hash: u64) {}

    /// [`Self::exchange_as`] for itself.
    ///
    /// # Errors
    /// Those of [`Self::exchange_as`].
    fn exchange(&self, parts: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, ShardError> {
        self.exchange_as(Kind::Exchange, parts)
    }

    /// Every rank's part, in order of rank.
    ///
    /// # Errors
    /// Those of [`Self::exchange_as`].
    fn all_gather(&self, part: &[u8]) -> Result<Vec<Vec<u8>>, ShardError> {
        self.exchange_as(Kind::AllGather, vec![part.to_vec(); self.ranks()])
    }

    /// The bytes that rank `root` gives; what other ranks give is not looked at.
    ///
    /// # Errors
    /// Those of [`Self::exchange_as`], and a root that is none.
    fn broadcast(&self, root: usize, bytes: &[u8]) -> Result<Vec<u8>, ShardError> {
        if root >= self.ranks() {
            return refused(format!(
                "broadcast from rank {root} of {}; there is none",
                self.ranks()
            ));
        }
        let own = if self.rank() == root { bytes.to_vec() } else { Vec::new() };
        let mut parts = self.exchange_as(Kind::Broadcast, vec![own; self.ranks()])?;
        Ok(parts.swap_remove(root))
    }

    /// Sums `values` over the ranks, in order of rank, in place: the same bits on every rank.
    ///
    /// Every rank sums one part and sends the sums to all: of N values it sends and receives
    /// 2 N (ranks - 1) / ranks, as around a ring, in two exchanges. A few values go whole, in one.
    ///
    /// # Errors
    /// Those of [`Self::exchange_as`], and another number of values on another rank.
    fn all_reduce(&self, values: &mut [f32]) -> Result<(), ShardError> {
        let (ranks, len) = (self.ranks(), values.len());
        if len < FEW {
            let parts = vec![counted(values, len); ranks];
            let parts = self.exchange_as(Kind::AllReduce, parts)?;
            values.copy_from_slice(&sums(Kind::AllReduce, parts, len, len)?);
            return Ok(());
        }
        let cut = Cut::even(len, ranks);
        let parts = (0..ranks).map(|rank| counted(&values[cut.range(rank)], len)).collect();
        let parts = self.exchange_as(Kind::AllReduce, parts)?;
        let own = sums(Kind::AllReduce, parts, cut.range(self.rank()).len(), len)?;
        let summed = vec![bytemuck::cast_slice::<f32, u8>(&own).to_vec(); ranks];
        for (rank, part) in self.exchange_as(Kind::AllReduce, summed)?.into_iter().enumerate() {
            let own = &mut values[cut.range(rank)];
            same_length(Kind::AllReduce, rank, part.len() / size_of::<f32>(), own.len())?;
            bytemuck::cast_slice_mut::<f32, u8>(own).copy_from_slice(&part);
        }
        Ok(())
    }

    /// Sums `values` over the ranks, in order of rank, and returns this rank's part of the sums.
    ///
    /// # Errors
    /// Those of [`Self::exchange_as`], a cut that is not of the values or has not a part for each
    /// rank, and another number of values on another rank.
    fn reduce_scatter(&self, values: &[f32], cut: &Cut) -> Result<Vec<f32>, ShardError> {
        if cut.len() != values.len() || cut.parts() != self.ranks() {
            return refused(format!(
                "reduce-scatter of {} values over {} ranks, but the cut has {} parts of {} values",
                values.len(),
                self.ranks(),
                cut.parts(),
                cut.len()
            ));
        }
        let part = |rank| counted(&values[cut.range(rank)], values.len());
        let parts = (0..self.ranks()).map(part).collect();
        let parts = self.exchange_as(Kind::ReduceScatter, parts)?;
        sums(Kind::ReduceScatter, parts, cut.range(self.rank()).len(), values.len())
    }
}

/// Values that [`Collectives::all_reduce`] sends whole: one exchange is sooner there than half the
/// bytes in two.
const FEW: usize = 4096;

/// Values, and behind them of how many they are a part: so every rank sees that another has more.
fn counted(values: &[f32], of: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of_val(values) + size_of::<u64>());
    bytes.extend_from_slice(bytemuck::cast_slice(values));
    bytes.extend_from_slice(&(of as u64).to_le_bytes());
    bytes
}

/// Sums of [`counted`] values in order of rank: `len` of each rank, of `of`.
fn sums(kind: Kind, parts: Vec<Vec<u8>>, len: usize, of: usize) -> Result<Vec<f32>, ShardError> {
    let mut sums = vec![0.0f32; len];
    for (rank, part) in parts.iter().enumerate() {
        let (values, counted) = part.split_last_chunk().unwrap_or((&[], &[0; 8]));
        same_length(kind, rank, u64::from_le_bytes(*counted) as usize, of)?;
        let (values, _) = values.as_chunks();
        same_length(kind, rank, values.len(), len)?;
        sums.iter_mut().zip(values).for_each(|(sum, &value)| *sum += f32::from_ne_bytes(value));
    }
    Ok(sums)
}

fn same_length(kind: Kind, rank: usize, theirs: usize, own: usize) -> Result<(), ShardError> {
    if theirs == own {
        return Ok(());
    }
    let kind = kind.name();
    refused(format!("{kind}: rank {rank} has {theirs} values where this rank has {own}"))
}

/// Checks that all ranks of a group have the same value of each field. Transfers from here on are of
/// the plan that the fields state.
///
/// # Errors
/// On every rank alike: the first field that differs, with the ranks that differ from rank 0.
pub fn agree(group: &dyn Collectives, fields: &[(&str, u64)]) -> Result<(), ShardError> {
    let mut own = Vec::new();
    for (name, value) in fields {
        own.extend(crate::hash::bytes(name.bytes()).to_le_bytes());
        own.extend(value.to_le_bytes());
    }
    let all = group.all_gather(&own)?;
    for (rank, other) in all.iter().enumerate() {
        if other.len() != all[0].len() {
            return refused(format!(
                "rank {rank} states {} fields of its plan and rank 0 {}; run the same binary on all",
                other.len() / 16,
                all[0].len() / 16
            ));
        }
    }
    for (i, (name, _)) in fields.iter().enumerate() {
        let field = |rank: &usize| all[*rank][16 * i..16 * (i + 1)] != all[0][16 * i..16 * (i + 1)];
        let others: Vec<usize> = (0..all.len()).filter(field).collect();
        if !others.is_empty() {
            return refused(format!(
                "ranks {others:?} have another {name} than rank 0; give every rank the same recipe, \
                 data and binary"
            ));
        }
    }
    group.plan_is(crate::hash::bytes(own));
    Ok(())
}

/// A group of one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct OneRank;

impl Collectives for OneRank {
    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        1
    }

    fn exchange_as(&self, kind: Kind, parts: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, ShardError> {
        a_part_each(self, kind, &parts)?;
        Ok(parts)
    }

    fn send_receive(
        &self,
        sends: Vec<Message>,
        receives: &[Expected],
    ) -> Result<Vec<Vec<u8>>, ShardError> {
        let meet = sends.iter().map(|m| (m.peer, m.bytes.len()));
        if !meet.eq(receives.iter().map(|e| (e.peer, e.bytes))) || sends.iter().any(|m| m.peer != 0)
        {
            return refused("send/receive: one rank sends itself other bytes than it receives");
        }
        Ok(sends.into_iter().map(|m| m.bytes).collect())
    }

    fn subgroup(&self, members: &[usize]) -> Result<Box<dyn Collectives>, ShardError> {
        members_of(self, members)?;
        Ok(Box::new(Self))
    }

    fn abort(&self, _: &str) -> Option<String> {
        None
    }
}

fn a_part_each(group: &dyn Collectives, kind: Kind, parts: &[Vec<u8>]) -> Result<(), ShardError> {
    if parts.len() == group.ranks() {
        return Ok(());
    }
    let (kind, given, ranks) = (kind.name(), parts.len(), group.ranks());
    refused(format!("{kind}: {given} parts for {ranks} ranks; give one each"))
}

/// This rank's place among `members`.
fn members_of(group: &dyn Collectives, members: &[usize]) -> Result<usize, ShardError> {
    let ranks = group.ranks();
    if !members.is_sorted_by(|a, b| a < b) || members.last().is_some_and(|&last| last >= ranks) {
        return refused(format!(
            "subgroup {members:?}: give ranks below {ranks} in ascending order"
        ));
    }
    match members.iter().position(|&m| m == group.rank()) {
        Some(place) => Ok(place),
        None => refused(format!("subgroup {members:?}: rank {} is not in it", group.rank())),
    }
}
