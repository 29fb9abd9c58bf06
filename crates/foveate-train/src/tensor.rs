//! Tensor parallelism: which ranks of `tensor` send each other what in a pass, and on CPUs how.
//!
//! Sums are in order of rank, so a mesh has the same bits every time.

use foveate::tensor::count::Count;
use foveate_nn::{
    Carrier, Holders, ModelConfig, NnError, Peers, TensorPart, TensorSharing, TensorTransfers,
};
use foveate_shard::collectives::Collectives;
use foveate_shard::{Cut, MeshAxis};

use crate::error::TrainError;
use crate::ranks::Ranks;
use crate::transfers::{GroupPeers, of_group, of_ranks, values};

/// What of a model this rank has: what the map gives it ([`foveate_shard::Sharding`]).
pub(crate) fn part_of(ranks: Ranks<'_>, config: &ModelConfig) -> Result<TensorPart, NnError> {
    let axis = [MeshAxis::Tensor];
    TensorPart::of(config, ranks.coordinate(&axis), ranks.mesh().size_of(&axis))
}

/// That ranks of `tensor` hold copies of key/value heads; none where each has its own.
pub(crate) fn copied_heads(config: &ModelConfig, part: &TensorPart) -> Option<String> {
    let (heads, ranks) = (config.kv_heads(), part.parts);
    (heads < ranks).then(|| {
        format!(
            "{} for {ranks} ranks: each is copied to {} or {} of them, which sum its gradients",
            Count(heads, "key/value head"),
            ranks / heads,
            ranks.div_ceil(heads)
        )
    })
}

/// The ranks that have the parts of a model.
pub(crate) struct TensorRanks<'a> {
    pub ranks: Ranks<'a>,
    pub part: &'a TensorPart,
    pub carrier: Carrier,
}

impl TensorRanks<'_> {
    fn group(&self, among: Holders) -> Result<Box<dyn Collectives>, TrainError> {
        let all = self.ranks.group(&[MeshAxis::Tensor])?;
        match among {
            Holders::All => Ok(all),
            Holders::KvHeads => {
                Ok(all.subgroup(&self.part.kv_holders.clone().collect::<Vec<usize>>())?)
            }
        }
    }
}

impl TensorSharing for TensorRanks<'_> {
    fn holders(&self, among: Holders) -> Result<Box<dyn Peers>, NnError> {
        let group = self.group(among).map_err(|e| of_group(&e))?;
        Ok(Box::new(GroupPeers { group, blocks: self.ranks.nccl_blocks() }))
    }

    fn carrier(&self) -> Carrier {
        self.carrier
    }

    fn through_host(&self) -> Result<Box<dyn TensorTransfers>, NnError> {
        let group = |among| self.group(among).map_err(|e| of_group(&e));
        Ok(Box::new(TensorGroup {
            all: group(Holders::All)?,
            kv_holders: group(Holders::KvHeads)?,
        }))
    }
}

/// Transfers between the ranks that have the parts of a model, in the memory of the host.
struct TensorGroup {
    all: Box<dyn Collectives>,
    /// Those with the same key/value heads.
    kv_holders: Box<dyn Collectives>,
}

impl TensorTransfers for TensorGroup {
    fn all_gather(&mut self, own: &[f32]) -> Result<Vec<Vec<f32>>, NnError> {
        let parts = self.all.all_gather(bytemuck::cast_slice(own)).map_err(|e| of_ranks(&e))?;
        Ok(parts.iter().map(|part| values(part)).collect())
    }

    fn reduce_scatter(&mut self, partial: &[f32], lengths: &[usize]) -> Result<Vec<f32>, NnError> {
        let cut = Cut::of_lengths(lengths).map_err(|e| of_ranks(&e))?;
        self.all.reduce_scatter(partial, &cut).map_err(|e| of_ranks(&e))
    }

    fn sum_copies(&mut self, among: Holders, gradients: &mut [f32]) -> Result<(), NnError> {
        let group = match among {
            Holders::All => &self.all,
            Holders::KvHeads => &self.kv_holders,
        };
        group.all_reduce(gradients).map_err(|e| of_ranks(&e))
    }
}

#[cfg(test)]
pub(crate) mod tests;
