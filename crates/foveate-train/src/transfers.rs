//! Parameters and gradients on their way between ranks.
//!
//! Groups of parameters are gathered on one thread and gradients are summed on another, each with its own
//! group of ranks, so that both run beside the layers. A thread does what it is asked to in order, and
//! every rank asks for the same; sums are in order of rank, so a mesh has the same bits every time.

use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};

use foveate::DType;
use foveate_nn::{Carrier, HostTransfers, NnError, NnErrorKind, Peers, Sharing, StepRanks};
use foveate_shard::collectives::{Collectives, Kind};
use foveate_shard::{Cut, MeshAxis, ShardError};
use half::bf16;

use crate::error::{TrainError, TrainErrorKind};
use crate::ranks::{ELEMENTS, PARAMETERS, Ranks};
use crate::recipe::{MeshSection, ReduceDtype};

/// The ranks that share parameters with this one.
pub(crate) struct ParameterRanks<'a> {
    pub ranks: Ranks<'a>,
    /// What gradients travel as, and by what.
    pub mesh: &'a MeshSection,
    /// Whether gradients of ranks that hold the same parameters are summed with those of a group.
    pub replicated: bool,
}

impl Sharing for ParameterRanks<'_> {
    fn peers(&self) -> Result<Box<dyn Peers>, NnError> {
        let group = GroupPeers::new(self.ranks, &PARAMETERS).map_err(|e| of_group(&e))?;
        Ok(Box::new(group))
    }

    fn reduce_dtype(&self) -> DType {
        match self.mesh.reduce_dtype {
            ReduceDtype::F32 => DType::F32,
            ReduceDtype::Bf16 => DType::BF16,
        }
    }

    fn replicas(&self) -> Result<Option<Box<dyn Peers>>, NnError> {
        let group = self.replicated.then(|| GroupPeers::new(self.ranks, &[MeshAxis::Replicate]));
        let group = group.transpose().map_err(|e| of_group(&e))?;
        Ok(group.map(|group| Box::new(group) as Box<dyn Peers>))
    }

    fn carrier(&self) -> Carrier {
        self.mesh.transfers
    }

    fn through_host(&self) -> Result<Box<dyn HostTransfers>, NnError> {
        let host = GroupTransfers::new(self.ranks, self.mesh.reduce_dtype, self.replicated);
        Ok(Box::new(host.map_err(|e| of_group(&e))?))
    }
}

/// A group of ranks, for what a device moves.
pub(crate) struct GroupPeers {
    pub group: Box<dyn Collectives>,
    /// Thread blocks that NCCL takes at most.
    pub blocks: Option<NonZeroU16>,
}

impl GroupPeers {
    /// Of the ranks that differ on `axes` alone. Every rank asks for its own.
    pub fn new(ranks: Ranks<'_>, axes: &[MeshAxis]) -> Result<Self, TrainError> {
        Ok(Self { group: ranks.group(axes)?, blocks: ranks.nccl_blocks() })
    }
}

impl Peers for GroupPeers {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn ranks(&self) -> usize {
        self.group.ranks()
    }

    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, NnError> {
        self.group.all_gather(own).map_err(|e| of_ranks(&e))
    }

    fn is_aborted(&self) -> bool {
        self.group.is_aborted()
    }

    fn blocks(&self) -> Option<NonZeroU16> {
        self.blocks
    }
}

/// The ranks that take steps together; none where there is one.
pub(crate) fn step_ranks(ranks: Ranks<'_>) -> Result<Option<StepRanks>, TrainError> {
    if ranks.alone() {
        return Ok(None);
    }
    Ok(Some(StepRanks {
        peers: Box::new(GroupPeers::new(ranks, &MeshAxis::ALL)?),
        counts_tokens: ranks.counts_tokens(),
        counts_parameters: ranks.coordinate(&[MeshAxis::Replicate]) == 0,
        cut: ranks.mesh().size_of(&ELEMENTS) > 1,
    }))
}

/// Transfers between the ranks that share parameters, through the memory of the host.
pub(crate) struct GroupTransfers {
    gathers: Worker<Vec<f32>, Vec<Vec<f32>>>,
    sums: Worker<(Vec<f32>, Vec<usize>), Vec<f32>>,
}

impl GroupTransfers {
    /// Those of `ranks`. Gradients travel as `dtype`; those of replicas are summed, too, where
    /// parameters are `replicated`.
    pub fn new(ranks: Ranks<'_>, dtype: ReduceDtype, replicated: bool) -> Result<Self, TrainError> {
        let gathering = ranks.group(&PARAMETERS)?;
        let gather = move |own: Vec<f32>| {
            let parts = gathering.all_gather(bytemuck::cast_slice(&own))?;
            Ok(parts.iter().map(|part| values(part)).collect())
        };
        let summing = ranks.group(&PARAMETERS)?;
        let replicas = replicated.then(|| ranks.group(&[MeshAxis::Replicate])).transpose()?;
        let sum = move |(gradients, lengths): (Vec<f32>, Vec<usize>)| {
            let cut = Cut::of_lengths(&lengths)?;
            let mut own = match dtype {
                ReduceDtype::F32 => summing.reduce_scatter(&gradients, &cut)?,
                ReduceDtype::Bf16 => reduce_scatter_bf16(&*summing, &gradients, &cut)?,
            };
            if let Some(replicas) = replicas.as_ref().filter(|replicas| replicas.ranks() > 1) {
                replicas.all_reduce(&mut own)?;
            }
            Ok(own)
        };
        Ok(Self {
            gathers: Worker::start("foveate-gather", gather)?,
            sums: Worker::start("foveate-reduce", sum)?,
        })
    }
}

/// [`Collectives::reduce_scatter`] of values rounded to bf16 on their way, added in f32.
fn reduce_scatter_bf16(
    group: &dyn Collectives,
    values: &[f32],
    cut: &Cut,
) -> Result<Vec<f32>, ShardError> {
    let rounded = |rank| {
        let of_rank = values[cut.range(rank)].iter();
        of_rank.flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect()
    };
    let parts = (0..group.ranks()).map(rounded).collect();
    let parts = group.exchange_as(Kind::ReduceScatter, parts)?;
    let mut sums = vec![0.0; cut.range(group.rank()).len()];
    for (rank, part) in parts.iter().enumerate() {
        let (values, _) = part.as_chunks();
        if values.len() != sums.len() {
            let (found, want) = (values.len(), sums.len());
            return Err(ShardError::new(format!(
                "reduce-scatter: rank {rank} has {found} values where this rank has {want}"
            )));
        }
        let values = values.iter().map(|&value| bf16::from_le_bytes(value).to_f32());
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }
    Ok(sums)
}

impl HostTransfers for GroupTransfers {
    fn gather(&mut self, own: Vec<f32>) -> Result<(), NnError> {
        self.gathers.begin(own)
    }

    fn gathered(&mut self) -> Result<Vec<Vec<f32>>, NnError> {
        self.gathers.wait()
    }

    fn reduce(&mut self, gradients: Vec<f32>, parts: &[Range<usize>]) -> Result<(), NnError> {
        self.sums.begin((gradients, parts.iter().map(Range::len).collect()))
    }

    fn reduced(&mut self) -> Result<Vec<f32>, NnError> {
        self.sums.wait()
    }
}

/// Values that came as bytes.
pub(crate) fn values(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&value| f32::from_ne_bytes(value)).collect()
}

/// A thread that works one request after another. It ends when nobody can ask any more, or behind an error;
/// nobody waits for that, since it may wait for other ranks.
struct Worker<T, R> {
    requests: Sender<T>,
    done: Receiver<Result<R, ShardError>>,
}

impl<T: Send + 'static, R: Send + 'static> Worker<T, R> {
    fn start(
        name: &str,
        mut work: impl FnMut(T) -> Result<R, ShardError> + Send + 'static,
    ) -> Result<Self, TrainError> {
        let (requests, requested) = channel();
        let (put, done) = channel();
        let run = move || {
            for request in requested {
                let result = work(request);
                let failed = result.is_err();
                if put.send(result).is_err() || failed {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
        thread.map_err(|e| {
            TrainError::model(format!("no thread could be started for transfers: {e}"))
        })?;
        Ok(Self { requests, done })
    }

    fn begin(&mut self, request: T) -> Result<(), NnError> {
        if self.requests.send(request).is_ok() {
            return Ok(());
        }
        // The thread has ended, and has said why behind what it has done.
        loop {
            self.wait()?;
        }
    }

    fn wait(&mut self) -> Result<R, NnError> {
        let ended = || ShardError::new("the thread of the transfers has ended");
        self.done.recv().map_err(|_| ended()).flatten().map_err(|e| of_ranks(&e))
    }
}

/// No group of ranks, or no thread for its transfers.
pub(crate) fn of_group(e: &TrainError) -> NnError {
    let lost = matches!(
        e.kind(),
        TrainErrorKind::Ranks { lost: true, .. } | TrainErrorKind::Elsewhere { lost: true, .. }
    );
    NnErrorKind::Ranks { message: e.to_string(), lost }.into()
}

pub(crate) fn of_ranks(e: &ShardError) -> NnError {
    NnErrorKind::Ranks { message: e.to_string(), lost: e.is_lost() }.into()
}
