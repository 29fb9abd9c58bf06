//! What the steps of a model take, by a dry run.

use super::Model;
use crate::account::{Account, MemoryEstimate, StepKind, Training, dry_run};
use crate::backend::{Blocks, PackedHeads};
use crate::dry::Dry;
use crate::error::NnError;
use crate::parameters::ParameterLayout;
use crate::tensor::TensorPart;

/// Tokens of the largest batch whose attention is described to know its workspace.
const COUNTED_TOKENS: usize = 1 << 22;

impl<B: Blocks> Model<B> {
    /// [`crate::ModelConfig::dry_run_on`] of this model. Parameters need no values yet.
    ///
    /// # Errors
    /// Those of [`crate::ModelConfig::dry_run`].
    pub fn dry_run(&self, rows: usize, len: usize, kind: StepKind) -> Result<Account, NnError> {
        let learned = self.programs.learned();
        let tensor = kind.cutting().tensor;
        let (part, layout) = match self.part.parts == tensor {
            true => (self.part.clone(), None),
            false => {
                let part = TensorPart::of(self.config(), 0, tensor)?;
                (part.clone(), Some(self.layout_of(&part)?))
            }
        };
        let (local, layout) = (part.local(self.config()), layout.as_ref().unwrap_or(self.layout()));
        let dry = Dry::of(&self.running().blocks, part.most_vocab);
        dry_run(dry, &local, &part, layout, &learned, [rows, len], kind)
    }

    /// The places of the parameters of a part of this model, of which the same are trained.
    ///
    /// # Errors
    /// Those of [`ParameterLayout::of_part`].
    pub fn layout_of(&self, part: &TensorPart) -> Result<ParameterLayout, NnError> {
        let is_frozen =
            |name: &str| self.parameter(name).is_some_and(|p| !self.layout().trains(&p.place));
        ParameterLayout::of_part(self.config(), &self.programs.learned(), &is_frozen, part)
    }

    /// The most memory, in bytes, that is taken to train this model on rows of `len` tokens, `rows`
    /// at once, and to save it: that of a dry run, and attention's workspace. On the CPU it is the
    /// resident memory of the process.
    ///
    /// # Errors
    /// Those of [`Model::dry_run`], or when attention cannot be planned for such a batch.
    pub fn training_memory(
        &self,
        rows: usize,
        len: usize,
        training: impl Into<Training>,
    ) -> Result<MemoryEstimate, NnError> {
        let training = training.into();
        let account = self.dry_run(rows, len, StepKind::Training(training))?;
        let part = TensorPart::of(self.config(), 0, training.cutting.tensor)?;
        // The workspace is cut into waves, so more rows than these take no more of it.
        let rows_at_once = rows.min(COUNTED_TOKENS / len.max(1)).max(1);
        let mut running = self.running();
        let blocks = &mut running.blocks;
        let heads = PackedHeads::of(&part.local(self.config()), [rows_at_once, len]);
        let (mut workspace, mut masks) = (0, 0);
        for plan in self.programs.plan(blocks, heads, part.first_heads(), None, false)? {
            let bytes = blocks.plan_bytes(&plan)?;
            (workspace, masks) = (bytes.workspace.max(workspace), masks + bytes.masks);
        }
        Ok(MemoryEstimate { attention: workspace + masks, ..account.memory() })
    }
}
