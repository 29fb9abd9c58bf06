//! Attention on the processor, planned by the crate `foveate`. A plan is valid for every batch of its
//! class: what changes with a batch (the documents) and in generation (the first query's position)
//! is bound to it.

use foveate::mods::Leaf;
use foveate::{AnyBuffer, BufferData, Device, Plan, Positions};

use crate::backend::{AttentionShape, PackedHeads, PlanBytes};
use crate::error::NnError;
use crate::program::{AttentionProgram, DOCUMENTS, problem};

/// An attention program planned for the processor.
#[derive(Clone, Debug)]
pub struct CpuPlan {
    plan: Plan,
    reads_documents: bool,
    reads_query: bool,
    heads: PackedHeads,
}

impl CpuPlan {
    /// A plan for batches of a shape, or for a cache that holds one document.
    pub(super) fn new(program: &AttentionProgram, shape: &AttentionShape) -> Result<Self, NnError> {
        let AttentionShape { heads, mean_kv_len, cached, .. } = *shape;
        let mut attention = shape.attention(program);
        if let Some(keys) = mean_kv_len {
            attention = attention.mean_kv_len(keys);
        }
        let PackedHeads { rows, len, heads_q, heads_kv, dim } = heads;
        let mut problem = problem([heads_q, heads_kv, dim], [rows, len])?;
        if cached {
            attention = attention.positions(Positions::offset(0), Positions::Rows);
            problem = problem.forward_only();
        }
        let plan = Self {
            plan: attention.plan(&problem, &Device::cpu())?,
            reads_documents: program.reads_documents(),
            reads_query: program.reads(Leaf::Q),
            heads,
        };
        if !cached {
            return Ok(plan);
        }
        plan.over([rows, len], &vec![0; rows * len])
    }

    /// In the workspace of `other`.
    pub(super) fn with_workspace_of(self, other: &Self) -> Self {
        Self { plan: self.plan.with_workspace_of(&other.plan), ..self }
    }

    pub(super) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Over documents `[rows, len]`.
    pub(super) fn over(&self, shape: [usize; 2], documents: &[i32]) -> Result<Self, NnError> {
        if !self.reads_documents {
            return Ok(self.clone());
        }
        let data = BufferData::I32(documents.to_vec());
        let plan = self.plan.rebind(&AnyBuffer::new(DOCUMENTS, &shape, data, false)?)?;
        Ok(Self { plan, ..self.clone() })
    }

    pub(super) fn at(&self, position: usize) -> Result<Self, NnError> {
        if !self.reads_query {
            return Ok(self.clone());
        }
        Ok(Self { plan: self.plan.set_scalar("q_offset", position as i32)?, ..self.clone() })
    }

    /// After a step the block masks of its passes are counted, and none is built for that.
    pub(super) fn live_pairs(&self) -> Option<f64> {
        let described = self.plan.cpu()?.describe(self.plan.problem().arrangement());
        Some(described.tiling.live_pairs as f64 / self.heads.heads_q as f64)
    }

    pub(super) fn bytes(&self) -> Result<PlanBytes, NnError> {
        let PackedHeads { rows, len, .. } = self.heads;
        let plan = self.over([rows, len], &vec![0; rows * len])?.plan;
        let Some(cpu) = plan.cpu() else { return Ok(PlanBytes::default()) };
        let arrangement = plan.problem().arrangement();
        let described = cpu.describe(arrangement);
        let of_waves = described.forward_bytes.max(described.backward_bytes) as u64;
        let of_threads = (cpu.thread_bytes(arrangement) * described.threads) as u64;
        let masks = described.tiling.block_mask_bytes;
        Ok(PlanBytes { workspace: of_waves + of_threads, masks })
    }
}
