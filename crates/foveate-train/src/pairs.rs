//! Pairs of query and key that masks let through, counted on the host: what attention computes, whatever the
//! device, and how many keys a query sees, which planners of attention over documents are told. They are counted
//! only where somebody reads them.

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

    /// That of a model whose planner is told what documents leave of the pairs; none where no program knows
    /// documents, since nobody reads the pairs then.
    pub fn for_planners<B: Blocks>(model: &Model<B>) -> Option<Self> {
        let knows = model.programs().iter().any(AttentionProgram::reads_documents);
        knows.then(|| Self::of(model))
    }

    /// That of a run: on a GPU, which counts no pairs itself, rates are told by them, too.
    pub fn for_steps<B: Blocks>(model: &Model<B>, on_gpu: bool) -> Option<Self> {
        if on_gpu { Some(Self::of(model)) } else { Self::for_planners(model) }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Recipe;

    fn model(mask: &str) -> Model {
        let text = include_str!("../../../recipes/tiny.toml");
        let set = format!("attention.mask={mask}");
        let recipe = Recipe::parse(text, "tiny.toml", &[set]).expect("it is right");
        let config = recipe.model_config(256).expect("it is right").expect("it has sizes");
        Model::unfilled(config, &recipe.attention.expect("it has one")).expect("they go together")
    }

    #[test]
    fn pairs_are_counted_where_somebody_reads_them() {
        let [plain, packed] = ["causal", "causal & document"].map(model);
        assert!(PairCounter::for_planners(&plain).is_none());
        assert!(PairCounter::for_planners(&packed).is_some());
        assert!(PairCounter::for_steps(&plain, false).is_none());
        assert!(PairCounter::for_steps(&plain, true).is_some());
        assert!(PairCounter::for_steps(&packed, false).is_some());
    }
}
