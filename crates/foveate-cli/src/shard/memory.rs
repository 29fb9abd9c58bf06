//! What a whole step takes of a rank's GPU, by the dry run of its part.

use std::path::Path;

use foveate::DType;
use foveate_nn::{Account, ModelConfig, Precision, Recompute, Reshard};
use foveate_shard::simulate::Machine;
use foveate_shard::{Axis, MeshAxis, ProvenPlan};
use foveate_train::memory::{BESIDE, Planned, Setting};
use foveate_train::recipe::{MeshSection, Recipe, ReduceDtype};
use foveate_train::whole;

use crate::failure::Failure;

/// Machines that come with the program.
const MACHINES: [(&str, &str); 2] = [
    ("h100x8", include_str!("../../../foveate-shard/machines/h100x8.toml")),
    ("h200x8", include_str!("../../../foveate-shard/machines/h200x8.toml")),
];

/// The machine of a name or a file.
///
/// # Errors
/// When there is none, or its numbers are wrong.
pub fn machine(name: &str) -> Result<Machine, Failure> {
    let text = match MACHINES.iter().find(|(known, _)| *known == name) {
        Some((_, text)) => (*text).to_owned(),
        None => whole::read_text(Path::new(name)).map_err(|e| {
            let known = MACHINES.map(|(known, _)| known).join(", ");
            Failure::usage(format!("--machine {name}: {e}")).help(format!("known are {known}"))
        })?,
    };
    let wrong = |e: &dyn std::fmt::Display| Failure::usage(format!("--machine {name}: {e}"));
    let machine: Machine = toml::from_str(&text).map_err(|e| wrong(&e.message()))?;
    machine.checked().map_err(|e| wrong(&e))
}

/// A step on a rank's part of a model and of its rows, and the memory that it takes.
pub struct StepMemory {
    pub account: Account,
    /// Of a rank: rows, and what is computed again.
    pub setting: Setting,
    /// Tokens of a row on the rank that has the most.
    pub len: usize,
    /// By place on `context`.
    pub bytes: Vec<u64>,
    /// What a GPU has.
    pub device: u64,
}

impl StepMemory {
    /// That of a recipe, which computes as little again as fits where it leaves that open.
    ///
    /// # Errors
    /// When what is frozen cannot be.
    pub fn of(
        recipe: &Recipe,
        config: &ModelConfig,
        proven: &ProvenPlan,
        machine: &Machine,
    ) -> Result<Self, Failure> {
        let plan = proven.plan();
        let reps = plan.sharding.map().mesh().group(0, &[MeshAxis::Context]);
        let local = local_config(config, proven);
        let len = reps.iter().map(|&r| plan.ranks[r].own.q.len()).max().unwrap_or(0);
        let mut own = recipe.clone();
        own.data.len = len;
        let attention = recipe.attention.clone().unwrap_or_default();
        let planned = Planned { recipe: &own, config: &local, attention: &attention };
        let device = (machine.gpu.memory_gib * f64::from(1 << 30)) as u64;
        let rows = plan.ranks[0].own.batch.len();
        let given = recipe.train.recomputation();
        let run = |recompute| -> Result<Self, Failure> {
            let setting = Setting { rows, recompute, ..Setting::of(recipe) };
            let account = planned.account(&setting, device)?;
            let kept = recompute.kept_attention(config.num_hidden_layers) as u64;
            let precision = setting.state.into();
            let bytes = bytes_of(&account, proven, &reps, &recipe.mesh, precision, kept);
            Ok(Self { account, setting, len, bytes, device })
        };
        let mut step = run(given.unwrap_or(Recompute::None.into()))?;
        for more in Recompute::ALL.into_iter().filter(|_| given.is_none()).skip(1) {
            if step.fits() {
                break;
            }
            step = run(more.into())?;
        }
        Ok(step)
    }

    /// Bytes of the rank that takes the most.
    pub fn most(&self) -> u64 {
        self.bytes.iter().copied().max().unwrap_or(0)
    }

    /// Whether every rank has room.
    pub fn fits(&self) -> bool {
        self.most() <= self.device
    }
}

/// The model of which a rank of `tensor` computes a part.
fn local_config(config: &ModelConfig, proven: &ProvenPlan) -> ModelConfig {
    let plan = proven.plan();
    let part = |axis| plan.sharding.range(axis, 0).len();
    ModelConfig {
        vocab_size: part(Axis::Vocab),
        intermediate_size: part(Axis::Ffn),
        num_attention_heads: part(Axis::Heads),
        num_key_value_heads: Some(part(Axis::KvHeads)),
        head_dim: Some(config.dim()),
        ..config.clone()
    }
}

/// Arrays of the stream between layers, whose tokens are cut over `tensor`.
const STREAM_ARRAYS: [&str; 5] = ["layer input", "residual", "output", "inverse rms", "d_x"];

/// Bytes that each of `reps` holds: its part of parameters, gradients and moments, the groups that stay gathered and
/// gradients of two, one of them a second time where it travels rounded, activations, what attention over
/// `context` keeps for the backward pass of `kept` layers, and what it needs for the time of a layer.
fn bytes_of(
    account: &Account,
    proven: &ProvenPlan,
    reps: &[usize],
    moves: &MeshSection,
    precision: Precision,
    kept: u64,
) -> Vec<u64> {
    let plan = proven.plan();
    let mesh = plan.sharding.map().mesh();
    let parts = mesh.size_of(&[MeshAxis::Shard, MeshAxis::Context]) as u64;
    let tensor = mesh.size(MeshAxis::Tensor) as u64;
    let all = account.memory();
    let mut groups: Vec<u64> = plan.shape.parameters.iter().map(|(_, n)| *n as u64).collect();
    let whole: u64 = groups.iter().sum();
    groups.sort_unstable_by(|a, b| b.cmp(a));
    let two: u64 = groups.iter().take(2).sum();
    let state = (all.weights + all.gradients + all.optimizer).div_ceil(parts);
    let rounded = moves.reduce_dtype == ReduceDtype::Bf16 && precision.gradients == DType::F32;
    let travelling = two * 4 + if rounded { 2 * groups.first().copied().unwrap_or(0) } else { 0 };
    let gathered = match (parts, moves.reshard) {
        (1, _) => 0,
        (_, Reshard::Always) => two * 2 + travelling,
        (_, Reshard::AfterBackward | Reshard::Never) => whole * 2 + travelling,
    };
    let activations: u64 = account
        .activations
        .iter()
        .map(|array| match STREAM_ARRAYS.contains(&array.name) {
            true => array.bytes.div_ceil(tensor),
            false => array.bytes,
        })
        .sum();
    let is_cut = mesh.size(MeshAxis::Context) > 1;
    let keys = |rank: usize| {
        let bytes = &proven.proof().bytes[rank];
        if is_cut { bytes.kept * kept + bytes.passing } else { 0 }
    };
    reps.iter().map(|&rank| state + gathered + activations + keys(rank) + BESIDE).collect()
}
