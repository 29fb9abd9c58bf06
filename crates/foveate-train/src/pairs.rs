//! Pairs of query and key that masks let through, counted on the host: what attention computes, whatever the
//! device, and how many keys a query sees, which planners of attention over documents are told.

use foveate_nn::{AttentionProgram, Blocks, DOCUMENTS, Model, ModelConfig};

use crate::error::TrainError;
use crate::pack::Packed;

/// Counts the pairs of a model's attention programs.
#[derive(Clone, Debug)]
pub(crate) struct PairCounter {
    config: ModelConfig,
    programs: Vec<AttentionProgram>,
    /// Rows, their length and the pairs of masks that know no documents: every such batch has as many.
    kept: Vec<Option<([usize; 2], f64)>>,
}

impl PairCounter {
    pub fn of<B: Blocks>(model: &Model<B>) -> Self {
        let programs = model.programs().to_vec();
        Self { config: model.config().clone(), kept: vec![None; programs.len()], programs }
    }

    /// Tells `batch` its pairs.
    ///
    /// # Errors
    /// When a mask does not take its documents.
    pub fn count(&mut self, batch: &mut Packed) -> Result<(), TrainError> {
        let shape = [batch.rows, batch.len];
        let mut pairs = Vec::with_capacity(self.programs.len());
        for (program, kept) in self.programs.iter().zip(&mut self.kept) {
            let known = kept.filter(|(of, _)| *of == shape);
            let counted = match known {
                Some((_, counted)) => counted,
                None => program.live_pairs(&self.config, shape, &batch.documents)?,
            };
            let captured = program.mask.iter().flat_map(|mask| mask.program().graph().buffers());
            if !captured.into_iter().any(|buffer| buffer.name() == DOCUMENTS) {
                *kept = Some((shape, counted));
            }
            pairs.push(counted);
        }
        batch.live_pairs = pairs;
        Ok(())
    }
}
