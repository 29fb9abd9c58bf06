//! The ranks that share parameters, and what each owns of a group, as transfers between them see it.

use std::num::NonZeroU16;
use std::ops::Range;

use foveate::DType;
use serde::{Deserialize, Serialize};

use crate::array::PartMut;
use crate::error::NnError;
use crate::parameters::{ParameterGroup, ParameterLayout};
use crate::share::{Owned, owned};
use crate::tensor::Holders;

/// A group of parameters that is cut over ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutGroup {
    /// Of each rank, the elements of the group that are trained and those that are not, in an array of
    /// the group: what is trained, then what is not.
    parts: Vec<[Range<usize>; 2]>,
    /// This rank.
    part: usize,
    /// Where each of its ranges begins in its arrays.
    first: [usize; 2],
    /// Elements that are trained, and those that are not.
    elems: [usize; 2],
}

impl CutGroup {
    /// The groups of `layout`, seen from rank `part` of `parts`.
    pub(crate) fn all(layout: &ParameterLayout, part: usize, parts: usize) -> Vec<Self> {
        let share = layout.share(part, parts);
        let of = |(group, own): (&ParameterGroup, &Owned)| {
            let trained = group.place.len();
            let places = |rank| {
                let [of_trained, of_frozen] = owned(group, rank, parts);
                let from = |place: Range<usize>, start, at| {
                    place.start - start + at..place.end - start + at
                };
                [
                    from(of_trained, group.place.start, 0),
                    from(of_frozen, group.frozen.start, trained),
                ]
            };
            Self {
                parts: (0..parts).map(places).collect(),
                part,
                first: own.places().map(|(_, first)| first),
                elems: [trained, group.frozen.len()],
            }
        };
        layout.groups().iter().zip(share.groups()).map(of).collect()
    }

    /// Elements of the group.
    pub fn elems(&self) -> usize {
        self.elems.iter().sum()
    }

    /// Those that are trained: the first ones, and all that gradients are of.
    pub fn trained(&self) -> usize {
        self.elems[0]
    }

    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.parts.len()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.part
    }

    /// What rank `rank` owns, in an array of the group: what is trained, and what is not.
    pub fn of(&self, rank: usize) -> &[Range<usize>; 2] {
        &self.parts[rank]
    }

    /// What of the trained elements this rank owns, in an array of the group.
    pub fn own(&self) -> &Range<usize> {
        &self.parts[self.part][0]
    }

    /// What this rank owns, in its own arrays: what is trained, and what is not.
    pub fn places(&self) -> [Range<usize>; 2] {
        let [trained, frozen] = self.of(self.part);
        let place = |first: usize, part: &Range<usize>| first..first + part.len();
        [place(self.first[0], trained), place(self.first[1], frozen)]
    }
}

/// Transfers of numbers in the memory of the host. All ranks begin and wait for transfers of a kind
/// in the same order; what is begun runs beside the caller.
pub trait HostTransfers: Send {
    /// Begins to bring together the parts of a group; `own` is that of this rank.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn gather(&mut self, own: Vec<f32>) -> Result<(), NnError>;

    /// Waits for the group whose gathering began first, and gives the parts in order of rank.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn gathered(&mut self) -> Result<Vec<Vec<f32>>, NnError>;

    /// Begins to sum the gradients of a group over ranks, of which rank `i` gets those of `parts[i]`.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn reduce(&mut self, gradients: Vec<f32>, parts: &[Range<usize>]) -> Result<(), NnError>;

    /// Waits for the sum that began first, and gives this rank's part.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn reduced(&mut self) -> Result<Vec<f32>, NnError>;
}

/// A group of ranks, as the transfers of a device find each other in it. Every rank calls the same methods
/// in the same order.
pub trait Peers: Send {
    /// This rank's place in the group.
    fn rank(&self) -> usize;

    /// Number of ranks of the group.
    fn ranks(&self) -> usize;

    /// What every rank gives, in order of rank.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, NnError>;

    /// Whether it is known here that the ranks cannot go on, without asking them: what a device waits for from
    /// another rank then never comes, and is ended.
    fn is_aborted(&self) -> bool {
        false
    }

    /// Thread blocks that what moves between GPUs takes at most, the same number on every rank; as many as the
    /// library likes where there is none.
    fn blocks(&self) -> Option<NonZeroU16> {
        None
    }
}

/// What a step sums over ranks, at once.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankSums {
    /// Squares of gradients; NaN where the loss is not finite.
    pub squares: f64,
    /// Cross-entropy in nats.
    pub nats: f64,
    /// The z-loss.
    pub z_loss: f64,
    /// Tokens that have a label.
    pub labelled: u64,
}

/// The ranks that take steps together, and what this one counts where several have the same.
pub struct StepRanks {
    /// All of them.
    pub peers: Box<dyn Peers>,
    /// Whether it counts its tokens, and their losses.
    pub counts_tokens: bool,
    /// Whether it counts the gradients of its parameters.
    pub counts_parameters: bool,
    /// Whether others have other parameters.
    pub cut: bool,
}

impl StepRanks {
    /// The sums of all ranks, in order of rank, so that all have the same bits: every rank calls it. Squares
    /// that are not finite are told whoever counts them.
    pub(crate) fn sum(&self, own: RankSums) -> Result<RankSums, NnError> {
        let RankSums { squares, nats, z_loss, labelled } = own;
        let squares = match self.counts_parameters || !squares.is_finite() {
            true => squares,
            false => 0.0,
        };
        let [nats, z_loss, labelled] = match self.counts_tokens {
            true => [nats, z_loss, labelled as f64],
            false => [0.0; 3],
        };
        let mut sums = [0.0; 4];
        let own = [squares, nats, z_loss, labelled].map(f64::to_le_bytes);
        for theirs in self.peers.all_gather(own.as_flattened())? {
            let (theirs, _) = theirs.as_chunks();
            sums.iter_mut().zip(theirs).for_each(|(sum, &x)| *sum += f64::from_le_bytes(x));
        }
        let [squares, nats, z_loss, labelled] = sums;
        Ok(RankSums { squares, nats, z_loss, labelled: labelled as u64 })
    }
}

/// What carries groups between GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Carrier {
    /// Copies where all ranks are threads of one process, else NCCL.
    #[default]
    Auto,
    /// NCCL, for threads too: a GPU has one rank.
    Nccl,
    /// The memory of the host.
    Host,
}

/// Sums gradients over ranks that hold the same parameters, by the blocks `B` of a device, on its arrays `A`.
pub trait ReplicaSums<B, A>: Send {
    /// Queues that the gradients become their sums over the ranks, in order of rank and in f32. All ranks call
    /// it, with as many.
    ///
    /// # Errors
    /// When the ranks cannot go on, or the device fails.
    fn sum(&mut self, blocks: &mut B, gradients: PartMut<'_, A>) -> Result<(), NnError>;
}

/// The ranks that share parameters, before a device says how they move.
pub trait Sharing {
    /// A group of them for transfers of one kind. Every rank asks for the same number, in the same order.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn peers(&self) -> Result<Box<dyn Peers>, NnError>;

    /// What gradients travel as, where they are wider: f32 or bf16.
    fn reduce_dtype(&self) -> DType;

    /// The ranks that hold the same groups, where these are summed over them, too. Every rank asks for them.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn replicas(&self) -> Result<Option<Box<dyn Peers>>, NnError>;

    /// What carries groups between GPUs.
    fn carrier(&self) -> Carrier;

    /// Transfers through the memory of the host.
    ///
    /// # Errors
    /// When the ranks cannot go on, or there is no thread for them.
    fn through_host(&self) -> Result<Box<dyn HostTransfers>, NnError>;
}

/// Transfers between the ranks of `tensor` of numbers in the memory of the host. All of them make the same calls
/// in the same order.
pub trait TensorTransfers: Send {
    /// The values of all ranks, in order of rank.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn all_gather(&mut self, own: &[f32]) -> Result<Vec<Vec<f32>>, NnError>;

    /// The sum over ranks of `partial`, in order of rank, of which rank `i` gets the next `lengths[i]`
    /// values.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn reduce_scatter(&mut self, partial: &[f32], lengths: &[usize]) -> Result<Vec<f32>, NnError>;

    /// Sums gradients over the ranks that hold the same parameters, in order of rank.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn sum_copies(&mut self, among: Holders, gradients: &mut [f32]) -> Result<(), NnError>;
}

/// The ranks of `tensor`, before a device says how the stream moves between them.
pub trait TensorSharing {
    /// A group of those that hold the same elements. Every rank asks for the same, in the same order.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn holders(&self, among: Holders) -> Result<Box<dyn Peers>, NnError>;

    /// What carries the stream between GPUs.
    fn carrier(&self) -> Carrier;

    /// Transfers through the memory of the host.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    fn through_host(&self) -> Result<Box<dyn TensorTransfers>, NnError>;
}
