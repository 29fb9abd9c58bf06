//! A model on the ranks of a mesh without a run: no documents, logs or checkpoints. Benchmarks step it.

use foveate_nn::{
    AttentionConfig, Batch, Blocks, Gradients, Model, ModelConfig, Queued, Recomputation, Recording,
};
use foveate_shard::collectives::Collectives;
use foveate_shard::{Mesh, MeshAxis};

use super::setup::{context, recording, rows_suffice, share_parameters};
use crate::context::{ContextBatch, ContextPart, RunContext};
use crate::error::TrainError;
use crate::pack::{AllRows, Packed};
use crate::pairs::PairCounter;
use crate::ranks::Ranks;
use crate::recipe::Recipe;
use crate::tensor::part_of;

/// What one rank has of a model, and what its steps need of the other ranks.
pub struct MeshModel<'a, B: Blocks> {
    /// This rank's part.
    pub model: Model<B>,
    ranks: Ranks<'a>,
    /// The ranks that hold the same parameters.
    replicas: Box<dyn Collectives>,
    context: Option<RunContext>,
    pairs: PairCounter,
    /// Whether the passes of batches are recorded, where the recipe asks for it.
    recording: Option<Recording>,
}

/// What one rank has of a batch: its rows, or its tokens of them with a plan of attention.
#[derive(Clone, Debug)]
pub struct MeshBatch {
    own: Packed,
    context: Option<ContextPart>,
}

impl<'a, B: Blocks> MeshModel<'a, B> {
    /// The part of a model of `config` that this rank has in the mesh of `recipe`, which has the batch's
    /// rows, too; without values. `gpu` names the device where it is a GPU. All ranks of `all` call it.
    ///
    /// # Errors
    /// When the ranks are no such mesh, or it cannot cut the model or the rows.
    pub fn unfilled(
        all: &'a dyn Collectives,
        recipe: &'a Recipe,
        config: ModelConfig,
        attention: &AttentionConfig,
        blocks: B,
        gpu: Option<&str>,
    ) -> Result<Self, TrainError> {
        let ranks = Ranks::in_mesh(all, &recipe.mesh)?;
        rows_suffice(recipe, ranks.mesh().size_of(&crate::ranks::ROWS))?;
        let part = part_of(ranks, &config)?;
        let mut model = Model::unfilled_part(blocks, config, attention, &|_| false, part)?;
        share_parameters(ranks, recipe, &mut model)?;
        let context = context(ranks, recipe, &mut model, gpu)?;
        let replicas = ranks.group(&[MeshAxis::Replicate])?;
        let recording = recording(ranks, recipe, &model);
        let pairs = PairCounter::of(&model);
        Ok(Self { model, ranks, replicas, context, pairs, recording })
    }

    /// Whether the passes of batches are recorded so far, where the recipe asks for it.
    pub fn recording(&self) -> Option<Recording> {
        match &self.recording {
            Some(Recording::On) => Some(self.model.recording()),
            other => other.clone(),
        }
    }

    /// The mesh.
    pub fn mesh(&self) -> Mesh {
        self.ranks.mesh()
    }

    /// The sum over the ranks of pairs that [`Self::accumulate`] gave each.
    ///
    /// # Errors
    /// Those of transfers.
    pub fn pairs_of_all(&self, own: f64) -> Result<f64, TrainError> {
        Ok(self.ranks.sum([own])?[0])
    }

    /// This rank's part of a batch, planned: no step waits for it.
    ///
    /// # Errors
    /// When attention over the ranks cannot be planned.
    pub fn part(&mut self, batch: &Packed) -> Result<MeshBatch, TrainError> {
        let own = batch.part(self.ranks.rows(batch.rows));
        let (mut own, context) = match &mut self.context {
            None => (own, None),
            Some(context) => context.planner_mut().part(own, AllRows::of(batch))?,
        };
        if context.is_none() && own.rows > 0 {
            self.pairs.count(&mut own)?;
        }
        own.sort();
        Ok(MeshBatch { own, context })
    }

    /// Adds the gradients of a batch.
    ///
    /// # Errors
    /// Those of [`Model::accumulate`], ranks that planned it in other ways, and those of transfers.
    pub fn accumulate(
        &mut self,
        part: &MeshBatch,
        gradients: &mut Gradients<B::Array>,
        recompute: Recomputation,
        totals: &mut B::Totals,
    ) -> Result<Queued, TrainError> {
        let MeshBatch { own, context } = part;
        let context = match (&mut self.context, context) {
            (Some(of_run), Some(part)) => Some(of_run.take(self.ranks, part.clone())?),
            _ => None,
        };
        let context = context.map(ContextBatch::attention);
        let batch = batch(own);
        Ok(self.model.accumulate_over(&batch, context, gradients, recompute, totals)?)
    }

    /// Sums what ranks with the same parameters have accumulated: what comes between the batches of a step
    /// and its update.
    ///
    /// # Errors
    /// Those of transfers.
    pub fn sum(&mut self, gradients: &mut Gradients<B::Array>) -> Result<(), TrainError> {
        sum_replicas(&*self.replicas, &mut self.model, gradients)
    }
}

/// Sums the gradients of ranks that hold the same parameters, in order of rank.
pub(super) fn sum_replicas<B: Blocks>(
    replicas: &dyn Collectives,
    model: &mut Model<B>,
    gradients: &mut Gradients<B::Array>,
) -> Result<(), TrainError> {
    if replicas.ranks() > 1 {
        model.reduce(gradients, |values| Ok::<_, TrainError>(replicas.all_reduce(values)?))?;
    }
    Ok(())
}

/// Packed rows as the model takes them.
pub fn batch(packed: &Packed) -> Batch<'_> {
    Batch {
        rows: packed.rows,
        len: packed.len,
        tokens: &packed.tokens,
        labels: &packed.labels,
        documents: &packed.documents,
        positions: &packed.positions,
        live_pairs: &packed.live_pairs,
        order: &packed.order,
    }
}
