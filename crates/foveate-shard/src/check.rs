//! The checker: proves a plan before anything runs, or names the first contradiction.
//!
//! A pure function over a plan and the block masks of the model. It works on runs of tiles and on
//! ranges, never on single entries:
//!
//! - (a) the layout of every array on every rank is the one that the map gives, a rank holds what its
//!   layouts say, and mods are told the global coordinates of what they compute;
//! - (b) every live tile of every mask is computed by exactly one (rank, stage), and no key arrives
//!   that no query of the rank needs;
//! - (c) what a stage reads is local or has arrived, with everything that is indexed by `kv`, and each
//!   gradient returns to the rank that holds the operand, once;
//! - (d) every label is counted once, and gradients of copied key/value heads count each query head once;
//!   owners of parameters and sums of gradients are those of a step ([`crate::step`]);
//! - (e) sends meet receives in every stage, with equal bytes; every rank has the same stages, and
//!   sends of a stage wait for nothing, so no order of ranks waits in a circle;
//! - (f) bytes sent and held by each rank, against a limit;
//! - (g) imbalance, against a limit.
//!
//! What it does not prove: that kernels compute a tile rightly (the conformance corpus does), that
//! the masks are the ones that were meant, and how long anything takes.

mod coverage;
mod layouts;
mod ownership;
pub(crate) mod step;
mod transfers;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use foveate::MaskMod;
use foveate::tensor::count::Count;

use crate::plan::{RankPlan, ShardPlan};
use crate::plane::Planes;

/// A contradiction in a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Contradiction {
    /// The point of the proof that fails, `a` to `g`.
    pub point: char,
    /// The operand.
    pub operand: String,
    /// The rank, of the mesh.
    pub rank: Option<usize>,
    /// The stage of the rank.
    pub stage: Option<usize>,
    /// What contradicts what, with ranges.
    pub message: String,
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}) {}", self.point, self.operand)?;
        if let Some(rank) = self.rank {
            write!(f, ", rank {rank}")?;
        }
        if let Some(stage) = self.stage {
            write!(f, ", stage {stage}")?;
        }
        write!(f, ": {}", self.message)
    }
}

/// Where a contradiction is.
#[derive(Clone, Copy)]
struct At {
    point: char,
    rank: Option<usize>,
    stage: Option<usize>,
}

impl At {
    fn plan(point: char) -> Self {
        Self { point, rank: None, stage: None }
    }

    fn rank(point: char, rank: usize) -> Self {
        Self { point, rank: Some(rank), stage: None }
    }

    fn stage(point: char, rank: usize, stage: usize) -> Self {
        Self { point, rank: Some(rank), stage: Some(stage) }
    }

    fn contradicts<T>(
        self,
        operand: impl Into<String>,
        message: impl Into<String>,
    ) -> Result<T, Contradiction> {
        let Self { point, rank, stage } = self;
        let (operand, message) = (operand.into(), message.into());
        Err(Contradiction { point, operand, rank, stage, message })
    }
}

/// Limits that a plan is held to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Bytes that the attention of a layer may hold on a rank.
    pub attention_bytes: Option<u64>,
    /// The largest load by the mean load.
    pub imbalance: Option<f64>,
}

/// What a rank sends and holds for the attention of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RankBytes {
    /// Received in a forward pass.
    pub forward_received: u64,
    /// Sent in a forward pass.
    pub forward_sent: u64,
    /// Gradients sent after a backward pass.
    pub backward_sent: u64,
    /// Operands, results, gradients and what arrives, held at once.
    pub held: u64,
    /// Beside the rank's q, k and v, what a device keeps of a forward pass for the backward pass: all keys and
    /// values that it computes on, its own among them, or, with heads for tokens, the operands and results
    /// of its heads.
    pub kept: u64,
    /// What a device needs besides while it computes: results of stages and gradients, in f32.
    pub passing: u64,
}

/// What was proven, in numbers.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Proof {
    /// Ranks.
    pub ranks: usize,
    /// Layouts that were compared with the map: arrays × ranks.
    pub layouts: usize,
    /// Stages, over all ranks.
    pub stages: usize,
    /// Live tiles that are computed exactly once: of every mask, by batch entry and head.
    pub live_tiles: u64,
    /// Live entries in them, over all layers.
    pub live_entries: u64,
    /// Transfers whose sends meet their receives, in forward and backward passes.
    pub transfers: usize,
    /// Labels that are counted once.
    pub labels: u64,
    /// What each rank sends and holds.
    pub bytes: Vec<RankBytes>,
    /// Live entries of each rank.
    pub loads: Vec<u64>,
    /// The largest load by the mean load.
    pub imbalance: f64,
    /// Identity of what was proven: equal plans have equal ones.
    pub plan_hash: u64,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = |bytes: &dyn Fn(&RankBytes) -> u64| self.bytes.iter().map(bytes).max();
        let size = |bytes: Option<u64>| match bytes.unwrap_or(0) as f64 / 1024.0 {
            kib if kib < 1024.0 => format!("{kib:.1} KiB"),
            kib => format!("{:.1} MiB", kib / 1024.0),
        };
        writeln!(f, "proven for {}, plan {:016x}", Count(self.ranks, "rank"), self.plan_hash)?;
        writeln!(f, "(a) layouts     {} agree with the map", self.layouts)?;
        writeln!(
            f,
            "(b) live tiles  {} computed once each, {} live entries, {}",
            self.live_tiles,
            self.live_entries,
            Count(self.stages, "stage")
        )?;
        writeln!(
            f,
            "(c) keys        local or arrived before they are read; gradients return once"
        )?;
        writeln!(f, "(d) labels      {}, counted once each", self.labels)?;
        writeln!(f, "(e) transfers   {}, with their receives", Count(self.transfers, "send"))?;
        writeln!(
            f,
            "(f) bytes       {} received forward, {} sent backward, {} held by the busiest rank for a \
             layer's attention",
            size(most(&|b| b.forward_received)),
            size(most(&|b| b.backward_sent)),
            size(most(&|b| b.held))
        )?;
        write!(f, "(g) imbalance   {:.4}", self.imbalance)
    }
}

/// A plan that was proven: what may run.
#[derive(Clone, Debug)]
pub struct ProvenPlan {
    plan: ShardPlan,
    proof: Proof,
    masks: Vec<Option<MaskMod>>,
}

impl ProvenPlan {
    /// The plan.
    pub fn plan(&self) -> &ShardPlan {
        &self.plan
    }

    /// The masks that it was proven for.
    pub fn masks(&self) -> &[Option<MaskMod>] {
        &self.masks
    }

    /// What was proven.
    pub fn proof(&self) -> &Proof {
        &self.proof
    }
}

impl ShardPlan {
    /// Proves the plan for the masks of `planes`.
    ///
    /// # Errors
    /// The first contradiction: point, operand, rank, stage and ranges.
    pub fn prove(self, planes: &Planes, limits: &Limits) -> Result<ProvenPlan, Contradiction> {
        let proof = self.check(planes, limits)?;
        Ok(ProvenPlan { plan: self, proof, masks: planes.masks().to_vec() })
    }

    fn check(&self, planes: &Planes, limits: &Limits) -> Result<Proof, Contradiction> {
        let layouts = layouts::check(self, planes)?;
        let transfers = transfers::check(self)?;
        let coverage = coverage::check(self, planes)?;
        let labels = ownership::check(self)?;
        for (rank, bytes) in transfers.bytes.iter().enumerate() {
            if let Some(limit) = limits.attention_bytes.filter(|&limit| bytes.held > limit) {
                let held = bytes.held;
                let message = format!("holds {held} bytes where {limit} are allowed; cut more");
                return At::rank('f', rank).contradicts("attention", message);
            }
        }
        let imbalance = crate::dispatch::imbalance(&coverage.loads);
        if let Some(limit) = limits.imbalance.filter(|&limit| imbalance > limit) {
            let heaviest = (0..coverage.loads.len()).max_by_key(|&r| coverage.loads[r]);
            let message = format!("imbalance is {imbalance:.4} where {limit} is allowed");
            return At { rank: heaviest, ..At::plan('g') }.contradicts("live entries", message);
        }
        Ok(Proof {
            ranks: self.ranks.len(),
            layouts,
            stages: self.ranks.iter().map(|r| r.stages.len()).sum(),
            live_tiles: coverage.tiles,
            live_entries: coverage.loads.iter().sum(),
            transfers: transfers.transfers,
            labels,
            bytes: transfers.bytes,
            imbalance,
            loads: coverage.loads,
            plan_hash: self.hash(),
        })
    }

    /// Identity of the plan: equal plans have equal ones, in every process of one version.
    pub fn hash(&self) -> u64 {
        let said = format!("{:?}", (&self.sharding, &self.whole, &self.shape, self.strategy));
        let mut all = vec![crate::hash::slice(said.as_bytes())];
        // What ranks have in common is read once.
        let mut known = HashMap::new();
        for rank in &self.ranks {
            let RankPlan { arrays, own, stages, returns, returned, labels, kv_copies } = rank;
            let arrays = *known.entry(Arc::as_ptr(arrays).addr()).or_insert_with(|| of(arrays));
            let held = of(&(own, stages, returns, returned, labels, kv_copies));
            all.extend([arrays, held]);
        }
        crate::hash::words(all)
    }
}

/// The hash of what a value prints.
fn of(value: &impl fmt::Debug) -> u64 {
    crate::hash::slice(format!("{value:?}").as_bytes())
}
