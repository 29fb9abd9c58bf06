//! What the commands of `shard` plan: a recipe on a mesh.

use std::path::PathBuf;
use std::time::Instant;

use foveate::tensor::ElementType;
use foveate::{AnyBuffer, BufferData, MaskMod};
use foveate_nn::{AttentionProgram, Dry, Model, ModelConfig, TensorPart};
use foveate_shard::simulate::Machine;
use foveate_shard::step::{StepPlan, StepShape};
use foveate_shard::{
    LayerMask, Lengths, Limits, Links, Map, Mesh, MeshAxis, ModelShape, PlanOptions, Planes,
    ProvenPlan, ProvenStep, ShardError, ShardPlan, Sharding, Strategy, Whole, usual_tile,
};
use foveate_train::checkpoint::Checksums;
use foveate_train::memory::Setting;
use foveate_train::recipe::Recipe;
use foveate_train::step_plan;

use crate::blind;
use crate::failure::Failure;
use crate::limits::{self, Need};
use crate::number::number;
use crate::progress::{PATIENCE, waiting};
use crate::ranks::gpu_name;
use crate::sizes::{self, Sizes};

/// Tokens of all rows of a plan at most: each has a document id.
const MOST_TOKENS: usize = 1 << 28;

/// Memory of a plan for each pair of ranks, in bytes: every rank knows what the others hold.
const PAIR_BYTES: f64 = 16.0;

/// [`ModelConfig::keys_first`] of a plan, as the step asks it.
pub fn keys_first(plan: &ShardPlan, config: &ModelConfig) -> bool {
    let gathered = plan.sharding.map().mesh().size(MeshAxis::Tensor) > 1;
    config.keys_first(plan.keys_travel(), gathered)
}

/// What is planned
#[derive(Debug, clap::Args)]
pub struct PlanArgs {
    /// The recipe
    pub recipe: PathBuf,
    /// Sizes of the mesh, such as shard=2,context=4; the axes are replicate, shard, context, tensor
    #[arg(long, value_name = "AXIS=N,...")]
    mesh: String,
    /// Number of ranks, for a mesh with one axis that is auto
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<usize>)]
    ranks: Option<usize>,
    /// Change a value of the recipe, such as data.len=65536
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Lengths of the documents of every row, one after another; one document when left out
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', value_parser = number::<usize>)]
    doc_lens: Vec<usize>,
    /// Rows of a batch over all ranks (train.batch_rows when left out)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<usize>)]
    rows: Option<usize>,
    /// How keys meet queries: gather, exchange (in 2 stages), exchange:0 to exchange:4, or heads; the
    /// one whose bytes arrive soonest when left out, an exchange before attention or in 2 stages
    #[arg(long)]
    strategy: Option<Strategy>,
    /// Tokens of a chunk, a multiple of the tile: 128, or less where a row is short
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<usize>)]
    chunk: Option<usize>,
}

/// A recipe, its model and its plan.
pub struct PlannedRecipe {
    pub recipe: Recipe,
    pub config: ModelConfig,
    pub map: Map,
    pub planes: Planes,
    pub plan: ShardPlan,
    pub plan_ms: f64,
}

impl PlanArgs {
    /// The recipe, with what is set.
    ///
    /// # Errors
    /// What is wrong with it, in one line.
    pub fn recipe(&self) -> Result<Recipe, Failure> {
        Recipe::load(&self.recipe, &self.set).map_err(|e| Failure::usage(e.to_string()))
    }

    /// Plans `recipe` for ranks of this machine, or of that of the recipe or its GPU.
    ///
    /// # Errors
    /// What is wrong with mesh or documents, in one line.
    pub fn plan(
        &self,
        mut recipe: Recipe,
        limits: &limits::Limits,
        machine: Option<&Machine>,
    ) -> Result<PlannedRecipe, Failure> {
        let mesh = match self.ranks {
            Some(ranks) => Mesh::parse(&self.mesh, ranks),
            None => Mesh::parse_whole(&self.mesh),
        };
        let map = Map::new(mesh.map_err(refused)?);
        let ranks = map.mesh().ranks() as f64;
        let need = Need { bytes: ranks * ranks * PAIR_BYTES, seconds: 0.0 };
        limits.admit("the plan of so many ranks", need, "give a smaller mesh")?;
        let wrong = |message| Failure::usage(message);
        let Sizes { config, attention, .. } =
            sizes::of_recipe(&recipe, &self.recipe, Checksums::Skip, wrong)?;
        // Masks and scores of a checkpoint are those that would run.
        recipe.attention = attention;
        let (batch, len) = (self.rows.unwrap_or(recipe.train.batch_rows), recipe.data.len);
        if batch == 0 {
            return Err(Failure::usage("--rows is 0; a batch has a row or more"));
        }
        let sharing = map.mesh().size_of(&[MeshAxis::Replicate, MeshAxis::Shard]);
        if batch < sharing {
            // A run is refused too: a rank without rows would wait for the others.
            let message = format!("{sharing} ranks share the rows of a batch, which has {batch}");
            return Err(Failure::usage(message)
                .help(format!("give --rows {sharing} or more, or smaller replicate and shard")));
        }
        if batch.saturating_mul(len) > MOST_TOKENS {
            let message =
                format!("{batch} rows of {len} tokens are more than {MOST_TOKENS} tokens");
            return Err(Failure::usage(message).help("give fewer --rows"));
        }
        let masks = masks(&self.doc_lens, &recipe, &config, [batch, len])?;
        let began = Instant::now();
        let strategy = self.strategy.or(recipe.mesh.strategy);
        let links = match machine {
            Some(machine) => machine.links(),
            None => {
                let links = recipe.mesh.links(gpu_name(recipe.run.device).as_deref());
                links.map_err(|e| Failure::usage(e.to_string()))?.links
            }
        };
        let options = PlanOptions { strategy, chunk: self.chunk, links };
        tensor_part(&config, map.mesh())?;
        let (planes, plan) =
            planned(&config, &map, [batch, len], &masks, ElementType::BF16, options)?;
        if planes.work().iter().sum::<u64>() == 0 {
            let attention = recipe.attention.clone().unwrap_or_default();
            attention.programs().into_iter().for_each(|(_, program)| blind::warn(&program.mask));
        }
        let plan_ms = began.elapsed().as_secs_f64() * 1e3;
        Ok(PlannedRecipe { recipe, config, map, planes, plan, plan_ms })
    }
}

/// The plan of a batch of `rows` rows of `len` tokens.
fn planned(
    config: &ModelConfig,
    map: &Map,
    [rows, len]: [usize; 2],
    masks: &[LayerMask],
    element: ElementType,
    options: PlanOptions,
) -> Result<(Planes, ShardPlan), Failure> {
    let whole = Whole {
        batch: rows,
        heads: config.num_attention_heads,
        kv_heads: config.kv_heads(),
        q_len: len,
        kv_len: len,
    };
    let shape = shape(config, [rows, len], element);
    let planned = waiting("planning", PATIENCE, || {
        let tile = usual_tile(len, map.mesh().size(MeshAxis::Context));
        let planes = Planes::new(whole, masks, tile)?;
        let plan = ShardPlan::new(map, &planes, &shape, options)?;
        Ok((planes, plan))
    });
    planned.map_err(refused)
}

/// The plan of a recipe's batch whose rows are one document each, as ranks on CPUs run it.
///
/// # Errors
/// When it cannot be planned.
pub fn proven(
    recipe: &Recipe,
    config: &ModelConfig,
    mesh: Mesh,
    links: Links,
) -> Result<ProvenPlan, Failure> {
    let shape = [recipe.train.batch_rows, recipe.data.len];
    let masks = masks(&[], recipe, config, shape)?;
    let options = PlanOptions { strategy: recipe.mesh.strategy, links, ..Default::default() };
    let (planes, plan) =
        planned(config, &Map::new(mesh), shape, &masks, ElementType::F32, options)?;
    plan.prove(&planes, &Limits::default()).map_err(|e| Failure::new(e.to_string()))
}

/// What the first rank of `tensor`, which has the most, has of a model.
///
/// # Errors
/// When the command line asks for more ranks than the model can be cut over.
pub fn tensor_part(config: &ModelConfig, mesh: &Mesh) -> Result<TensorPart, Failure> {
    TensorPart::of(config, 0, mesh.size(MeshAxis::Tensor))
        .map_err(|e| Failure::usage(e.to_string()))
}

/// What a step of a recipe moves beside the keys of attention follows from, on GPUs with this setting.
///
/// # Errors
/// When the model cannot be cut over `tensor`.
pub fn step_shape(
    recipe: &Recipe,
    config: &ModelConfig,
    mesh: &Mesh,
    setting: &Setting,
) -> Result<StepShape, Failure> {
    let (tensor, part) = (mesh.size(MeshAxis::Tensor), tensor_part(config, mesh)?);
    let frozen = |name: &str| recipe.optimizer.is_frozen(name);
    let attention = recipe.attention.clone().unwrap_or_default();
    let (blocks, config) = (Dry::new(setting.state.into(), 1), config.clone());
    let model = Model::unfilled_part(blocks, config, &attention, &frozen, part)?;
    Ok(step_plan::shape(&model, recipe, setting.recompute, tensor)?)
}

/// The step of a shape with the cuts of a plan, proven.
///
/// # Errors
/// The first contradiction.
pub fn proven_step(cuts: &Sharding, shape: &StepShape) -> Result<ProvenStep, Failure> {
    let plan = StepPlan::new(cuts, shape).map_err(refused)?;
    let proven = waiting("proving the step", PATIENCE, || plan.prove());
    proven.map_err(|e| Failure::new(e.to_string()))
}

pub fn refused(error: ShardError) -> Failure {
    Failure::usage(error.to_string())
}

/// The masks of the recipe, with the documents of its rows, and how many layers each has.
fn masks(
    doc_lens: &[usize],
    recipe: &Recipe,
    config: &ModelConfig,
    shape: [usize; 2],
) -> Result<Vec<LayerMask>, Failure> {
    let attention = recipe.attention.clone().unwrap_or_default();
    let mut masks = Vec::new();
    let mut documents = false;
    for (name, program) in attention.programs() {
        let program = AttentionProgram::parse(program, config.num_attention_heads);
        let mut mask = program.map_err(|e| Failure::usage(e.to_string()))?.mask;
        let reads = |mask: &&mut MaskMod| {
            mask.program().graph().buffers().iter().any(|b| b.name() == "doc")
        };
        if let Some(mask) = mask.as_mut().filter(reads) {
            *mask = with_documents(doc_lens, mask, shape)?;
            documents = true;
        }
        let runs = |&layer: &usize| attention.of_layer(layer).0 == name;
        let layers = (0..config.num_hidden_layers).filter(runs).count() as u64;
        masks.push(LayerMask { mask, layers });
    }
    if !documents && doc_lens.iter().any(|&tokens| tokens > 0) {
        let message = "--doc-lens: the mask of the recipe reads no documents";
        return Err(Failure::usage(message).help("leave it out, or write `& document`"));
    }
    Ok(masks)
}

/// A mask that reads documents, with those of every row.
fn with_documents(
    doc_lens: &[usize],
    mask: &MaskMod,
    [batch, len]: [usize; 2],
) -> Result<MaskMod, Failure> {
    let total = doc_lens.iter().fold(0usize, |sum, &n| sum.saturating_add(n));
    if !doc_lens.is_empty() && total != len {
        let message = format!("--doc-lens: the documents have {total} tokens, a row has {len}");
        return Err(Failure::usage(message).help("give lengths that fill a row and end with it"));
    }
    let mut row = Vec::with_capacity(len);
    for (id, &tokens) in doc_lens.iter().enumerate() {
        row.resize(len.min(row.len().saturating_add(tokens)), id as i32);
    }
    row.resize(len, 0);
    let ids = BufferData::I32(row.repeat(batch));
    let ids = AnyBuffer::new("doc", &[batch, len], ids, false);
    let ids = ids.map_err(|e| Failure::usage(e.to_string()))?;
    let bound = mask.clone().map(|program| program.rebind(&ids));
    bound.map_err(|e| Failure::usage(e.to_string()))
}

/// Shapes of the model.
fn shape(config: &ModelConfig, batch: [usize; 2], element: ElementType) -> ModelShape {
    let Lengths { dim, dim_v, hidden, ffn, vocab, .. } = step_plan::lengths(config, batch);
    ModelShape { dim, dim_v, hidden, ffn, vocab, element }
}
