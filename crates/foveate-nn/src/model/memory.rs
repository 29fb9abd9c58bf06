//! What the steps of a model take, by a dry run.

use super::Model;
use crate::account::{Account, MemoryEstimate, StepKind, Training, dry_run};
use crate::backend::{Blocks, PackedHeads};
use crate::dry::Dry;
use crate::error::NnError;
use crate::parameters::ParameterLayout;
use crate::step::Cache;
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
    /// at once, to evaluate such rows between steps and to save it: that of a dry run, and attention's
    /// workspace. On the CPU it is the resident memory of the process.
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
        let attention = self.attention_bytes([rows, len], &part, false)?;
        Ok(MemoryEstimate { attention, ..account.memory() })
    }

    /// The memory, in bytes, of losses of `rows` rows of `len` tokens: that of a dry run, and attention's
    /// workspace.
    ///
    /// # Errors
    /// Those of [`Model::training_memory`].
    pub fn loss_memory(&self, rows: usize, len: usize) -> Result<MemoryEstimate, NnError> {
        let account = self.dry_run(rows, len, StepKind::Loss)?;
        let attention = self.attention_bytes([rows, len], &self.part, false)?;
        Ok(MemoryEstimate { attention, ..account.memory() })
    }

    /// The memory, in bytes, of a [`Model::generator`] for texts of `capacity` tokens, the first `prompt` of
    /// which are read at once: its cache among the activations, and attention's workspace.
    ///
    /// # Errors
    /// Those of [`Model::training_memory`].
    pub fn generation_memory(
        &self,
        capacity: usize,
        prompt: usize,
    ) -> Result<MemoryEstimate, NnError> {
        let account = self.dry_run(1, prompt, StepKind::Loss)?;
        let (mut dry, mut cache) = (Dry::of(&self.running().blocks, 1), Cache::default());
        cache.fit(&mut dry, &self.config, capacity)?;
        // Each array has memory of its own, and logits are of the last token.
        let arrays = dry.arrays.iter().chain(&account.activations);
        let bytes = arrays.map(|array| match array.name {
            "logits" => array.bytes / prompt.min(dry.logits_tokens(0)).max(1) as u64,
            _ => array.bytes,
        });
        let activations = bytes.fold(0, u64::saturating_add);
        let attention = self.attention_bytes([1, capacity], &self.part, true)?;
        Ok(MemoryEstimate { attention, activations, ..account.memory() })
    }

    /// Bytes of attention's workspace and of masks of all programs.
    fn attention_bytes(
        &self,
        [rows, len]: [usize; 2],
        part: &TensorPart,
        cached: bool,
    ) -> Result<u64, NnError> {
        // The workspace is cut into waves, so more rows than these take no more of it.
        let rows_at_once = rows.min(COUNTED_TOKENS / len.max(1)).max(1);
        let mut running = self.running();
        let blocks = &mut running.blocks;
        let heads = PackedHeads::of(&part.local(self.config()), [rows_at_once, len]);
        let (mut workspace, mut masks) = (0, 0);
        for plan in self.programs.plan(blocks, heads, part.first_heads(), &[], cached)? {
            let bytes = blocks.plan_bytes(&plan)?;
            (workspace, masks) = (bytes.workspace.max(workspace), masks + bytes.masks);
        }
        Ok(workspace + masks)
    }
}
