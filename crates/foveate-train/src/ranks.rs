//! What the ranks of a run do together.
//!
//! All ranks read the same recipe and have the same order of rows; of each batch a rank reads and takes
//! a part of the rows. Gradients are summed in order of rank, in f32, so every rank takes the same step, and a run
//! has the same bits every time with the same number of ranks. Rank 0 alone writes to the run's
//! folder. What goes wrong on one rank ends all, and only that rank says why.

use std::num::NonZeroU16;
use std::ops::Range;
use std::path::Path;

use foveate_nn::ParameterLayout;
use foveate_shard::collectives::log::TransferLog;
use foveate_shard::collectives::{Collectives, Kind, OneRank, agree};
use foveate_shard::{Cut, Mesh, MeshAxis, Ranges, ShardError};

use crate::error::{TrainError, TrainErrorKind};
use crate::recipe::MeshSection;

/// The axes that cut parameters, their gradients and moments.
pub(crate) const PARAMETERS: [MeshAxis; 2] = [MeshAxis::Shard, MeshAxis::Context];

/// The axes on which ranks have different elements of parameters.
pub(crate) const ELEMENTS: [MeshAxis; 3] = [MeshAxis::Shard, MeshAxis::Context, MeshAxis::Tensor];

/// The axes that cut the rows of a batch.
pub(crate) const ROWS: [MeshAxis; 2] = [MeshAxis::Replicate, MeshAxis::Shard];

/// An even part of the rows of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowPart {
    pub part: usize,
    pub parts: usize,
}

impl RowPart {
    pub fn of(self, rows: usize) -> Range<usize> {
        Cut::even(rows, self.parts).range(self.part)
    }
}

/// The ranks of a run, seen from one of them, and the mesh that they stand in.
#[derive(Clone, Copy)]
pub(crate) struct Ranks<'a> {
    all: &'a dyn Collectives,
    mesh: Mesh,
    nccl_blocks: Option<NonZeroU16>,
}

impl Ranks<'static> {
    /// One rank, by itself.
    pub fn one() -> Self {
        Self::unplaced(&OneRank)
    }
}

impl<'a> Ranks<'a> {
    /// `all` ranks, in no mesh yet.
    pub fn unplaced(all: &'a dyn Collectives) -> Self {
        Self { all, mesh: Mesh::single(), nccl_blocks: None }
    }

    /// `all` ranks, in the mesh of a recipe.
    pub fn in_mesh(all: &'a dyn Collectives, section: &MeshSection) -> Result<Self, TrainError> {
        let mesh = Self::unplaced(all).together(section.of_ranks(all.ranks()))?;
        Ok(Self { all, mesh, nccl_blocks: section.blocks() })
    }
}

impl Ranks<'_> {
    pub fn mesh(self) -> Mesh {
        self.mesh
    }

    /// Thread blocks that NCCL takes at most.
    pub fn nccl_blocks(self) -> Option<NonZeroU16> {
        self.nccl_blocks
    }

    /// All ranks.
    pub fn world(&self) -> &dyn Collectives {
        self.all
    }

    /// Number of ranks.
    pub fn count(self) -> usize {
        self.all.ranks()
    }

    /// Whether this rank writes.
    pub fn first(self) -> bool {
        self.all.rank() == 0
    }

    pub fn alone(self) -> bool {
        self.count() == 1
    }

    /// The place of this rank on `axes`, taken as one, the first the outermost.
    pub fn coordinate(self, axes: &[MeshAxis]) -> usize {
        self.mesh.index_of(self.all.rank(), axes)
    }

    /// A group of the ranks that differ from this one on `axes` alone, in order of their coordinates.
    /// Every rank asks for its own.
    pub fn group(self, axes: &[MeshAxis]) -> Result<Box<dyn Collectives>, TrainError> {
        match self.mesh.size_of(axes) {
            1 => Ok(Box::new(OneRank)),
            _ => Ok(self.all.subgroup(&self.mesh.group(self.all.rank(), axes))?),
        }
    }

    /// Which rows of a batch this rank takes: those of ranks that differ on other axes, too.
    pub fn row_part(self) -> RowPart {
        RowPart { part: self.coordinate(&ROWS), parts: self.mesh.size_of(&ROWS) }
    }

    /// The rows of this rank, of `rows`.
    pub fn rows(self, rows: usize) -> Range<usize> {
        self.row_part().of(rows)
    }

    /// The elements of all parameters that this rank saves, `layout` being what its place on `tensor` holds:
    /// its share of each group, in order, of which the ranks that hold the same one have a part each. What
    /// several ranks of `tensor` hold, the first of them saves.
    pub fn owned(self, layout: &ParameterLayout) -> Vec<Range<usize>> {
        let (part, replica) =
            (self.coordinate(&PARAMETERS), self.coordinate(&[MeshAxis::Replicate]));
        let replicas = self.mesh.size(MeshAxis::Replicate);
        let share = layout.share(part, self.mesh.size_of(&PARAMETERS));
        let groups = share.groups();
        let trained = groups.iter().map(|group| &group.trained);
        let all = trained.chain(groups.iter().map(|group| &group.frozen));
        let elsewhere = layout.copied().iter().filter(|copied| !copied.first);
        let elsewhere = Ranges::of(elsewhere.map(|copied| copied.place.clone()));
        let own = |place: &Range<usize>| {
            let cut = Cut::even(place.len(), replicas).range(replica);
            Ranges::one(place.start + cut.start..place.start + cut.end).difference(&elsewhere)
        };
        all.flat_map(|place| own(place).as_slice().to_vec()).collect()
    }

    /// Whether this rank is the first of those that take the same tokens: what is counted by tokens, it
    /// counts.
    pub fn counts_tokens(self) -> bool {
        self.coordinate(&[MeshAxis::Tensor]) == 0
    }

    /// This rank, of all.
    pub fn rank(self) -> usize {
        self.all.rank()
    }

    /// Goes on where all ranks do. The first rank that failed returns its error.
    pub fn together<T>(self, result: Result<T, TrainError>) -> Result<T, TrainError> {
        if self.alone() {
            return result;
        }
        let own = result.as_ref().err().map_or(String::new(), ToString::to_string);
        let all = self.all.all_gather(own.as_bytes())?;
        match all.iter().position(|message| !message.is_empty()) {
            Some(rank) if all[rank] == TrainErrorKind::Interrupted.to_string().as_bytes() => {
                Err(TrainErrorKind::Interrupted.into())
            }
            Some(rank) if rank != self.all.rank() => Err(TrainErrorKind::Elsewhere {
                message: format!("rank {rank}: {}", String::from_utf8_lossy(&all[rank])),
                lost: false,
            }
            .into()),
            _ => result,
        }
    }

    /// Compares what has to be the same on all ranks. All find what differs; the first says it.
    pub fn agree(self, fields: &[(&str, u64)]) -> Result<(), TrainError> {
        if self.alone() {
            return Ok(());
        }
        agree(self.all, fields).map_err(|e| {
            let e = TrainError::from(e);
            match e.kind() {
                TrainErrorKind::Ranks { message, lost: false } if !self.first() => {
                    TrainErrorKind::Elsewhere { message: message.clone(), lost: false }.into()
                }
                _ => e,
            }
        })
    }

    /// What every rank gives, in order of rank.
    pub fn all(self, own: &[u8]) -> Result<Vec<Vec<u8>>, TrainError> {
        if self.alone() { Ok(vec![own.to_vec()]) } else { Ok(self.all.all_gather(own)?) }
    }

    /// Sums in order of rank, in f64.
    pub fn sum<const N: usize>(self, own: [f64; N]) -> Result<[f64; N], TrainError> {
        if self.alone() {
            return Ok(own);
        }
        let parts = self.all.exchange_as(
            Kind::AllReduce,
            vec![own.map(f64::to_le_bytes).as_flattened().to_vec(); self.all.ranks()],
        )?;
        let mut sums = [0.0; N];
        for part in parts {
            let (values, _) = part.as_chunks();
            sums.iter_mut().zip(values).for_each(|(sum, &value)| *sum += f64::from_le_bytes(value));
        }
        Ok(sums)
    }

    /// The bytes that rank 0 has, on all.
    pub fn bytes_of_first(self, bytes: Vec<u8>) -> Result<Vec<u8>, TrainError> {
        if self.alone() { Ok(bytes) } else { Ok(self.all.broadcast(0, &bytes)?) }
    }
}

/// Ends `all` ranks where this one has failed, unless another ended it, and writes its last transfers
/// to the folder `transfers`; none where the run's folder was not taken yet, in which those of an earlier
/// attempt, or of a run that is under way, may be. Where several fail alike, the error of all but one is that
/// another failed.
pub(crate) fn end_with<T>(
    all: &dyn Collectives,
    result: Result<T, TrainError>,
    transfers: Option<&Path>,
) -> Result<T, TrainError> {
    result.map_err(|e| {
        let e = match e.kind() {
            // All ranks agree on an interruption before any of them ends.
            TrainErrorKind::Interrupted => return e,
            TrainErrorKind::Elsewhere { .. } => e,
            kind => {
                let said = all.abort(&e.to_string());
                // Every rank says which others are lost to it.
                match said.filter(|_| !matches!(kind, TrainErrorKind::Ranks { lost: true, .. })) {
                    Some(message) => TrainErrorKind::Elsewhere { message, lost: false }.into(),
                    None => e,
                }
            }
        };
        if let Some(transfers) = transfers.filter(|_| all.ranks() > 1) {
            // What ended the run is what has to be told, also where the disk is full.
            let _ = TransferLog::of(all, &e.to_string()).write(transfers);
        }
        e
    })
}

impl From<ShardError> for TrainError {
    fn from(e: ShardError) -> Self {
        let (message, lost) = (e.to_string(), e.is_lost());
        match message.strip_prefix("aborted: ") {
            Some(why) => TrainErrorKind::Elsewhere { message: why.to_owned(), lost },
            None => TrainErrorKind::Ranks { message, lost },
        }
        .into()
    }
}
