//! What a whole step takes of a rank's GPU, by the dry run of its part.

use foveate_nn::{Account, ModelConfig, Recompute};
use foveate_shard::simulate::Machine;
use foveate_shard::{Axis, MeshAxis, ProvenPlan};
use foveate_train::memory::{Planned, Setting, beside};
use foveate_train::recipe::{self, Recipe};

use crate::failure::Failure;

/// The machine of `--machine`, a name or a file.
///
/// # Errors
/// When there is none, or its numbers are wrong.
pub fn machine(name: &str) -> Result<Machine, Failure> {
    recipe::machine(name).map_err(|why| Failure::usage(format!("--machine {why}")))
}

/// A step on a rank's part of a model and of its rows, and the memory that it takes.
pub struct StepMemory {
    pub account: Account,
    /// Of a rank: rows, and what is computed again.
    pub setting: Setting,
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
        let mesh = plan.sharding.map().mesh();
        let reps = mesh.group(0, &[MeshAxis::Context]);
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
            let whole = Planned { config, ..planned };
            let memory = whole.account_of_rank(&setting, device, mesh)?.memory();
            let arrays = memory.total() - memory.process;
            // What attention over `context` keeps for the backward pass, and needs for the time of a layer.
            let kept = recompute.kept_attention(config.num_hidden_layers) as u64;
            let keys = |rank: usize| match (reps.len(), &proven.proof().bytes[rank]) {
                (1, _) => 0,
                (_, bytes) => bytes.kept * kept + bytes.passing,
            };
            let beside = beside(recipe, config, mesh.ranks() == 1);
            let bytes = reps.iter().map(|&rank| arrays + keys(rank) + beside).collect();
            Ok(Self { account, setting, bytes, device })
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use foveate_nn::{Dry, Model, Precision, TensorPart, Training};
    use foveate_shard::{Links, Mesh};
    use foveate_train::memory::{GpuProfile, beside};

    use super::*;
    use crate::shard::plan;

    /// What a run says that it takes, where a device is nothing but its memory.
    fn of_run(recipe: &Recipe, config: &ModelConfig, mesh: Mesh, step: &StepMemory) -> u64 {
        let attention = recipe.attention.clone().unwrap_or_default();
        let part = TensorPart::of(config, 0, mesh.size(MeshAxis::Tensor)).unwrap();
        let precision: Precision = step.setting.state.into();
        let vocab = config.vocab_size.div_ceil(mesh.size(MeshAxis::Tensor));
        let tokens = foveate_nn_cuda::logits_tokens_of(step.device, vocab, precision);
        let blocks = Dry::new(precision, tokens).sharing();
        let model =
            Model::unfilled_part(blocks, config.clone(), &attention, &|_| false, part).unwrap();
        let training = Training {
            recompute: step.setting.recompute,
            in_backward: recipe.optimizer.in_backward,
            one_batch: recipe.train.accumulate == 1,
            squares: recipe.optimizer.rule().keeps_squares(),
            cutting: recipe.mesh.cutting(&mesh),
        };
        let len = recipe.data.len.div_ceil(mesh.size(MeshAxis::Context));
        let memory = model.training_memory(step.setting.rows, len, training).unwrap();
        memory.total() - memory.process - memory.attention + beside(recipe, config, false)
    }

    #[test]
    fn machines_have_the_memory_of_the_gpus_that_recipes_are_run_dry_for() {
        for (name, gpu) in [("h100x8", "h100"), ("h200x8", "h200")] {
            let of_gpu = GpuProfile::named(gpu).unwrap().bytes as f64 / f64::from(1 << 30);
            let gib = machine(name).unwrap().gpu.memory_gib;
            assert!((gib - of_gpu).abs() < 0.01, "{name} has {gib} GiB, {gpu} {of_gpu}");
        }
    }

    #[test]
    fn a_step_takes_what_the_dry_run_of_a_run_says() {
        let machine = machine("h100x8").unwrap();
        for (file, set) in [
            ("tiny.toml", &[][..]),
            ("tiny.toml", &["mesh.reshard=never", "train.recompute=full"]),
            ("llama3-8b.toml", &["train.batch_rows=8", "precision.state=exact"]),
            ("llama3-8b.toml", &["train.batch_rows=8", "mesh.reshard=after_backward"]),
        ] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes").join(file);
            let set: Vec<String> = set.iter().map(|set| (*set).to_owned()).collect();
            let recipe = Recipe::load(&path, &set).unwrap();
            let config = recipe.model_config(256).unwrap().unwrap();
            for mesh in
                ["shard=2", "replicate=2,shard=2", "tensor=2", "shard=2,tensor=2", "context=2"]
            {
                let mesh = Mesh::parse_whole(mesh).unwrap();
                let proven = plan::proven(&recipe, &config, mesh, Links::default()).unwrap();
                let step = StepMemory::of(&recipe, &config, &proven, &machine).unwrap();
                let kept = step.setting.recompute.kept_attention(config.num_hidden_layers) as u64;
                let keys = &proven.proof().bytes[0];
                let keys = match mesh.size(MeshAxis::Context) {
                    1 => 0,
                    _ => keys.kept * kept + keys.passing,
                };
                let of_run = of_run(&recipe, &config, mesh, &step) + keys;
                assert_eq!(step.bytes[0], of_run, "{file}, {set:?}, {mesh}");
            }
        }
    }
}
