//! Context parallelism: the tokens of a batch on the ranks of `context`, and attention over them.
//!
//! A plan is made for the masks of all layers over the documents of a batch, and proven, before
//! anything runs. The permutation of a rank's rows moves their tokens, labels, documents and positions; the
//! blocks of a step then see rows of this rank's tokens, and attention alone knows of the others. A plan
//! holds for the next batch, too, where the masks read no documents, or the documents are the same.
//!
//! A [`ContextPlanner`] makes plans from what is known of all rows of a batch and from nothing of other
//! ranks, so it works where batches are made, ahead of the steps ([`crate::loader`]). A step takes a finished
//! plan ([`RunContext`]): ranks compare it before it first runs. A device that computes attention over ranks
//! itself is told what the plan says; elsewhere the host does.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use foveate::tensor::ElementType;
use foveate::{AnyBuffer, BufferData, Tensor};
use foveate_nn::{
    AttentionProgram, Blocks, ContextAttention, ContextLayer, ContextMoves, ContextPlan, KeyStage,
    LearnedBuffer, Model, NnError, PackedHeads,
};
use foveate_shard::collectives::Collectives;
use foveate_shard::{
    Axis, Cells, LayerMask, Limits, Map, Mesh, MeshAxis, ModelShape, PlanOptions, Planes,
    PlannedAttention, ProvenPlan, Ranges, RankAttention, RankForward, ShardError, ShardLayout,
    ShardPlan, Sharded, Sharding, Stage, Statement, Strategy, Whole, arrays, usual_tile,
};

use crate::pack::{AllRows, Packed};
use crate::ranks::{ROWS, Ranks};
use crate::recipe::ChosenLinks;
use crate::transfers::of_ranks;

/// Whether a rank cannot compute on its rows alone: other ranks of `mesh` have tokens of them, or what
/// `model` computes depends on which rows of the batch they are, or on the others.
pub(crate) fn is_needed<B: Blocks>(mesh: &Mesh, model: &Model<B>) -> bool {
    let depends = model.config().rope_depends_on_batch()
        || model.programs().iter().any(AttentionProgram::tells_rows_apart);
    mesh.size(MeshAxis::Context) > 1 || depends && mesh.size_of(&ROWS) > 1
}

/// What makes the plans of a run whose ranks compute attention together.
#[derive(Clone, Debug)]
pub(crate) struct ContextPlanner {
    map: Map,
    rank: usize,
    /// Named by the recipe; the planner's choice where it names none.
    strategy: Option<Strategy>,
    /// What that choice goes by.
    links: ChosenLinks,
    /// Whether the device computes attention over ranks.
    by_device: bool,
    programs: Vec<AttentionProgram>,
    /// How many layers have each program.
    layers: Vec<u64>,
    /// Query heads and key/value heads of the model.
    heads: [usize; 2],
    shape: ModelShape,
    /// What every plan is held to.
    limits: Limits,
    last: Option<Arc<PlannedBatch>>,
}

impl ContextPlanner {
    /// For `model` in the mesh of `ranks`; `by_device` says whether its device computes attention over
    /// ranks. No plan may hold more than `bytes` on a rank for the attention of a layer.
    pub fn new<B: Blocks>(
        ranks: Ranks<'_>,
        model: &Model<B>,
        strategy: Option<Strategy>,
        links: ChosenLinks,
        by_device: bool,
        bytes: Option<u64>,
    ) -> Self {
        let config = model.config();
        let layers_of = |i| model.programs_of_layers().iter().filter(|&&of| of == i).count() as u64;
        let shape = ModelShape {
            dim: config.dim(),
            dim_v: config.dim(),
            hidden: config.hidden_size,
            ffn: config.intermediate_size,
            vocab: config.vocab_size,
            element: model.precision().weights.into(),
        };
        Self {
            map: Map::new(ranks.mesh()),
            rank: ranks.rank(),
            strategy,
            links,
            by_device,
            programs: model.programs().to_vec(),
            layers: (0..model.programs().len()).map(layers_of).collect(),
            heads: [config.num_attention_heads, config.kv_heads()],
            shape,
            limits: Limits { attention_bytes: bytes, imbalance: None },
            last: None,
        }
    }

    /// The plan of batches of `rows` rows of one document of `len` tokens.
    ///
    /// # Errors
    /// When such a batch cannot be planned.
    pub fn describe(&self, [rows, len]: [usize; 2]) -> Result<Described, ShardError> {
        let (proven, _) = self.proven([rows, len], &vec![0; rows * len])?;
        let ShardPlan { strategy, reason, sharding, .. } = proven.plan();
        let bytes = &proven.proof().bytes[self.rank];
        let [layer_bytes, passing_bytes] = match self.by_device {
            true => [bytes.kept, bytes.passing],
            false => [bytes.held, 0],
        };
        let by = match self.strategy {
            Some(_) => String::new(),
            None => format!("; on {}", self.links),
        };
        let (strategy, cuts) = (format!("{strategy}: {reason}{by}"), sharding.clone());
        Ok(Described { strategy, layer_bytes, passing_bytes, cuts })
    }

    /// This rank's tokens of its rows `own`, which are part of a batch of which `all` is known, and the plan
    /// of attention over them. Where the rows are shorter than the ranks of `context` are many, the first of
    /// these has them whole, and there is no plan.
    ///
    /// # Errors
    /// When the batch cannot be planned.
    pub fn part(
        &mut self,
        own: Packed,
        all: AllRows,
    ) -> Result<(Packed, Option<ContextPart>), ShardError> {
        let mesh = self.map.mesh();
        let AllRows { shape, mut documents, positions } = all;
        if own.len < mesh.size(MeshAxis::Context) {
            let is_first = mesh.index(self.rank, MeshAxis::Context) == 0;
            return Ok((if is_first { own } else { own.part(0..0) }, None));
        }
        if !self.programs.iter().any(AttentionProgram::reads_documents) {
            documents.fill(0);
        }
        let holds = |last: &Arc<PlannedBatch>| last.shape == shape && last.documents == documents;
        let planned = match self.last.take().filter(holds) {
            Some(last) => last,
            None => Arc::new(self.planned(shape, documents)?),
        };
        let own = planned.own(&own);
        self.last = Some(Arc::clone(&planned));
        Ok((own, Some(ContextPart { planned, positions })))
    }

    fn planned(&self, shape: [usize; 2], documents: Vec<i32>) -> Result<PlannedBatch, ShardError> {
        let (proven, programs) = self.proven(shape, &documents)?;
        let rank = self.rank;
        // Of the heads that this rank computes, in the mean of the layers.
        let pairs = proven.proof().loads[rank] as f64 / self.layers.iter().sum::<u64>() as f64;
        let attention = match self.by_device {
            true => {
                let states = |program: &AttentionProgram| proven.states(&program.attention(), None);
                let statements = programs.iter().map(states).collect::<Result<_, _>>()?;
                let plan = device_plan(proven.plan(), rank, &documents, pairs);
                PlannedPrograms::Device(statements, Arc::new(plan))
            }
            false => {
                let planned = |program: &AttentionProgram| {
                    PlannedAttention::new(&proven, rank, &program.attention(), None)
                };
                let learned = programs.iter().map(|program| program.learned.clone()).collect();
                let planned = programs.iter().map(planned).collect::<Result<_, _>>()?;
                PlannedPrograms::Host(planned, learned)
            }
        };
        let live_pairs = pairs / self.heads[0] as f64;
        Ok(PlannedBatch { shape, documents, proven, rank, live_pairs, attention })
    }

    /// The plan for the masks of the model over the documents of all rows of a batch, and the programs
    /// over them.
    fn proven(
        &self,
        shape @ [rows, len]: [usize; 2],
        documents: &[i32],
    ) -> Result<(Arc<ProvenPlan>, Vec<AttentionProgram>), ShardError> {
        #[cfg(test)]
        tests::PLANS.set(tests::PLANS.get() + 1);
        let over = |program: &AttentionProgram| program.over(shape, documents);
        let programs: Vec<AttentionProgram> = self
            .programs
            .iter()
            .map(over)
            .collect::<Result<_, _>>()
            .map_err(|e| ShardError::new(e.to_string()))?;
        let masks = programs.iter().zip(&self.layers);
        let masks: Vec<LayerMask> = masks
            .map(|(program, &layers)| LayerMask { mask: program.mask.clone(), layers })
            .collect();
        let [heads, kv_heads] = self.heads;
        let whole = Whole { batch: rows, heads, kv_heads, q_len: len, kv_len: len };
        let context = self.map.mesh().size(MeshAxis::Context);
        let planes = Planes::new(whole, &masks, usual_tile(len, context))?;
        let (strategy, links) = (self.strategy, self.links.links);
        let options = PlanOptions { strategy, links, ..Default::default() };
        let plan = ShardPlan::new(&self.map, &planes, &self.shape, options)?;
        let proven = plan
            .prove(&planes, &self.limits)
            .map_err(|e| ShardError::new(format!("the plan of a batch: {e}")))?;
        Ok((Arc::new(proven), programs))
    }
}

/// What ranks do with batches of some documents, planned for one of them.
#[derive(Debug)]
pub(crate) struct PlannedBatch {
    shape: [usize; 2],
    /// Of all rows, `[rows, len]`; zeros where no mask or score reads them.
    documents: Vec<i32>,
    proven: Arc<ProvenPlan>,
    rank: usize,
    /// Pairs that the masks let through of what the rank computes, in the mean of all heads of the model and of
    /// the layers.
    live_pairs: f64,
    attention: PlannedPrograms,
}

#[derive(Debug)]
enum PlannedPrograms {
    /// What the ranks compare, and what a device is told.
    Device(Vec<Statement>, Arc<ContextPlan>),
    /// What the host computes, and what it learns, by program.
    Host(Vec<PlannedAttention>, Vec<Vec<(String, LearnedBuffer)>>),
}

impl PlannedBatch {
    /// Of this rank's rows its tokens, in the order of the plan.
    fn own(&self, rows: &Packed) -> Packed {
        let plan = self.proven.plan();
        let tokens = plan.sharding.range(Axis::Seq, self.rank);
        rows.columns(&plan.permutation(self.rank).positions(tokens))
    }
}

/// What a step has to know of a batch of tokens on several ranks.
#[derive(Clone, Debug)]
pub(crate) struct ContextPart {
    planned: Arc<PlannedBatch>,
    /// One more than the largest position of all rows.
    positions: usize,
}

/// Attention over ranks in a run: the plan of the last batch, with what it keeps between passes.
pub(crate) struct RunContext {
    planner: ContextPlanner,
    last: Option<ContextBatch>,
}

impl RunContext {
    pub fn new(planner: ContextPlanner) -> Self {
        Self { planner, last: None }
    }

    /// To plan batches by, from the plan of the last batch on.
    pub fn planner(&self) -> ContextPlanner {
        let last = self.last.as_ref().map(|last| Arc::clone(&last.planned));
        ContextPlanner { last, ..self.planner.clone() }
    }

    /// To plan batches by it, which keeps the last plan.
    pub fn planner_mut(&mut self) -> &mut ContextPlanner {
        &mut self.planner
    }

    /// Attention over the ranks of the next batch, which is planned. All ranks call it, and compare a plan
    /// before it first runs.
    ///
    /// # Errors
    /// When their plans differ, or they fail to meet.
    pub fn take(
        &mut self,
        ranks: Ranks<'_>,
        part: ContextPart,
    ) -> Result<&mut ContextBatch, ShardError> {
        let ContextPart { planned, positions } = part;
        if !self.last.as_ref().is_some_and(|last| Arc::ptr_eq(&last.planned, &planned)) {
            // What it kept goes first.
            self.last = None;
            self.last = Some(ContextBatch::new(ranks.world(), planned)?);
        }
        let batch = self.last.as_mut().expect("it was just made");
        batch.positions = positions;
        Ok(batch)
    }
}

/// What a plan comes to on a rank.
pub(crate) struct Described {
    /// How keys and queries meet, and why.
    pub strategy: String,
    /// What attention of a layer keeps.
    pub layer_bytes: u64,
    /// What it needs besides for the time of a layer.
    pub passing_bytes: u64,
    /// Which tokens each rank has.
    pub cuts: Sharding,
}

/// A batch over the ranks: who holds which tokens, and attention.
pub(crate) struct ContextBatch {
    planned: Arc<PlannedBatch>,
    positions: usize,
    /// What a device does; nothing where the host computes.
    device: Option<Arc<ContextPlan>>,
    /// What the host computes.
    programs: Vec<LayerAttention>,
    /// What forward passes keep, by slot.
    kept: Vec<Option<RankForward>>,
    /// Time of attention, waiting for other ranks included.
    seconds: f64,
}

struct LayerAttention {
    attention: RankAttention,
    learned: Vec<(String, LearnedBuffer)>,
}

impl ContextBatch {
    fn new(world: &dyn Collectives, planned: Arc<PlannedBatch>) -> Result<Self, ShardError> {
        let (programs, device) = match &planned.attention {
            PlannedPrograms::Device(statements, plan) => {
                Statement::agree(statements, world)?;
                (Vec::new(), Some(Arc::clone(plan)))
            }
            PlannedPrograms::Host(attention, learned) => {
                let attention = RankAttention::of(attention, world)?.into_iter().zip(learned);
                let of_layer = |(attention, learned): (RankAttention, &Vec<_>)| LayerAttention {
                    // They are gradients of parameters, which a step sums over the ranks.
                    attention: attention.without_sums(),
                    learned: learned.clone(),
                };
                (attention.map(of_layer).collect(), None)
            }
        };
        Ok(Self { planned, positions: 0, device, programs, kept: Vec::new(), seconds: 0.0 })
    }

    fn plan(&self) -> &ShardPlan {
        self.planned.proven.plan()
    }

    /// Attention, as a model takes it.
    pub fn attention(&mut self) -> &mut dyn ContextAttention {
        self
    }

    /// The seconds that attention took since the last call.
    pub fn take_seconds(&mut self) -> f64 {
        std::mem::take(&mut self.seconds)
    }

    fn layout(&self, name: &str) -> Result<ShardLayout, ShardError> {
        let array = arrays::by_name(name).expect("attention's arrays are listed");
        array.layout_in(&self.plan().sharding, ElementType::F32)
    }

    /// Heads from `first` on of packed rows, `[rows, heads, len, dim]`.
    fn operand(
        &self,
        name: &str,
        packed: &[f32],
        p: PackedHeads,
        [width, first, heads]: [usize; 3],
    ) -> Result<Sharded<Tensor>, ShardError> {
        let mut values = Vec::with_capacity(p.rows * heads * p.len * p.dim);
        for row in packed.chunks_exact((p.len * width).max(1)).take(p.rows) {
            for head in first..first + heads {
                for token in row.chunks_exact(width) {
                    values.extend_from_slice(&token[head * p.dim..(head + 1) * p.dim]);
                }
            }
        }
        let shape = [p.rows, heads, p.len, p.dim];
        let tensor = Tensor::from_vec(values, shape).map_err(|e| ShardError::new(e.to_string()))?;
        let map = self.plan().sharding.map();
        Sharded::new(name, tensor, &shape, self.layout(name)?, map, self.planned.rank)
    }

    /// Attention with the values that a layer learned.
    fn bound(&mut self, layer: &ContextLayer<'_>) -> Result<(), ShardError> {
        let LayerAttention { attention, learned } = &mut self.programs[layer.program];
        let mut values = layer.learned;
        for (name, LearnedBuffer { shape, .. }) in learned.iter() {
            let (own, rest) = values.split_at(shape.iter().product());
            let buffer = AnyBuffer::new(name, shape, BufferData::F32(own.to_vec()), true);
            attention.bind(&buffer.map_err(|e| ShardError::new(e.to_string()))?)?;
            values = rest;
        }
        Ok(())
    }

    fn run_forward(
        &mut self,
        layer: &ContextLayer<'_>,
        qkv: &[f32],
        out: &mut [f32],
    ) -> Result<(), ShardError> {
        let (p, width) = (layer.heads, layer.heads.width());
        let kept = self.kept.len().max(layer.slot + 1);
        self.kept.resize_with(kept, || None);
        self.kept[layer.slot] = None;
        self.bound(layer)?;
        let q = self.operand("q", qkv, p, [width, 0, p.heads_q])?;
        let k = self.operand("k", qkv, p, [width, p.heads_q, p.heads_kv])?;
        let v = self.operand("v", qkv, p, [width, p.heads_q + p.heads_kv, p.heads_kv])?;
        let forward = self.programs[layer.program].attention.forward(&q, &k, &v)?;
        packed(forward.out.value(), p, [p.heads_q * p.dim, 0], out);
        self.kept[layer.slot] = Some(forward);
        Ok(())
    }

    fn run_backward(
        &mut self,
        layer: &ContextLayer<'_>,
        d_out: &[f32],
        d_qkv: &mut [f32],
        d_learned: &mut [f32],
    ) -> Result<(), ShardError> {
        let (p, width) = (layer.heads, layer.heads.width());
        let forward = self.kept.get_mut(layer.slot).and_then(Option::take);
        let forward = forward.expect("a backward pass follows its forward pass");
        self.bound(layer)?;
        let d_out = self.operand("d_out", d_out, p, [p.heads_q * p.dim, 0, p.heads_q])?;
        let LayerAttention { attention, learned } = &self.programs[layer.program];
        let found = attention.backward(&forward, &d_out)?;
        packed(found.dq.value(), p, [width, 0], d_qkv);
        packed(found.dk.value(), p, [width, p.heads_q], d_qkv);
        packed(found.dv.value(), p, [width, p.heads_q + p.heads_kv], d_qkv);
        let mut sums = d_learned.iter_mut();
        for (name, _) in learned {
            let gradient = &found.captures[name];
            sums.by_ref().zip(gradient).for_each(|(sum, d)| *sum += d);
        }
        Ok(())
    }
}

impl ContextAttention for ContextBatch {
    fn forward(
        &mut self,
        layer: &ContextLayer<'_>,
        qkv: &[f32],
        out: &mut [f32],
    ) -> Result<(), NnError> {
        let began = Instant::now();
        let ran = self.run_forward(layer, qkv, out).map_err(|e| of_ranks(&e));
        self.seconds += began.elapsed().as_secs_f64();
        ran
    }

    fn backward(
        &mut self,
        layer: &ContextLayer<'_>,
        d_out: &[f32],
        d_qkv: &mut [f32],
        d_learned: &mut [f32],
    ) -> Result<(), NnError> {
        let began = Instant::now();
        let ran = self.run_backward(layer, d_out, d_qkv, d_learned).map_err(|e| of_ranks(&e));
        self.seconds += began.elapsed().as_secs_f64();
        ran
    }

    fn plan(&self) -> Option<&Arc<ContextPlan>> {
        self.device.as_ref()
    }

    fn positions(&self) -> usize {
        self.positions
    }

    fn live_pairs(&self) -> f64 {
        self.planned.live_pairs
    }
}

/// What `plan` says of a rank, as a device is told; `pairs` are what the masks let through of all that the rank
/// computes, in the mean of the layers.
fn device_plan(plan: &ShardPlan, rank: usize, documents: &[i32], pairs: f64) -> ContextPlan {
    let own = &plan.ranks[rank].own;
    let members = plan.sharding.map().mesh().group(rank, &[MeshAxis::Context]);
    let of_ranks = |parts: &[foveate_shard::Part]| {
        let of = |member: &usize| {
            let part = parts.iter().find(|part| part.peer == *member);
            part.map_or(Vec::new(), |part| part.cells.kv.as_slice().to_vec())
        };
        members.iter().map(of).collect()
    };
    let moves = match plan.strategy {
        Strategy::Gather | Strategy::Exchange(_) => {
            let stages = plan.ranks[rank].stages.iter().enumerate();
            let stage = |(number, stage): (usize, &Stage)| KeyStage {
                moves: members.iter().any(|&r| !plan.ranks[r].stages[number].sends.is_empty()),
                sends: of_ranks(&stage.sends),
                receives: of_ranks(&stage.receives),
                queries: place_within(&own.q, &stage.compute.q),
            };
            ContextMoves::Keys(stages.map(stage).collect())
        }
        Strategy::HeadsForTokens => {
            let heads = |&member: &usize| {
                let Cells { heads, kv_heads, .. } = &plan.ranks[member].stages[0].compute;
                [(heads, &own.heads), (kv_heads, &own.kv_heads)]
                    .map(|(heads, own)| heads.start - own.start..heads.end - own.start)
            };
            ContextMoves::Heads(members.iter().map(heads).collect())
        }
    };
    let Cells { batch, heads, q, .. } = &plan.ranks[rank].stages[0].compute;
    let computed = batch.len() * heads.len() * q.len();
    ContextPlan {
        whole: [plan.whole.batch, plan.whole.q_len],
        documents: documents.to_vec(),
        first_row: own.batch.start,
        first_heads: [own.heads.start, own.kv_heads.start],
        mean_kv_len: ((pairs / computed.max(1) as f64).ceil() as usize).max(1),
        rank: members.iter().position(|&member| member == rank).expect("it is one of them"),
        tokens: members
            .iter()
            .map(|&member| plan.ranks[member].own.q.as_slice().to_vec())
            .collect(),
        moves,
    }
}

/// From the first to the last of `some` positions, their places among `all`.
fn place_within(all: &Ranges, some: &Ranges) -> Range<usize> {
    let place = |position: usize| all.intersection(&Ranges::one(0..position)).len();
    match some.as_slice() {
        [] => 0..0,
        [first, .., last] => place(first.start)..place(last.end),
        [one] => place(one.start)..place(one.end),
    }
}

/// Heads `[rows, heads, len, dim]` into packed rows of `width`, from head `first` on.
fn packed(heads: &Tensor, p: PackedHeads, [width, first]: [usize; 2], into: &mut [f32]) {
    let values = heads.as_slice::<f32>().expect("attention of f32 gives f32");
    let number = heads.shape()[1];
    for (i, value) in values.chunks_exact(p.dim).enumerate() {
        let (token, head, row) = (i % p.len, i / p.len % number, i / p.len / number);
        let at = (row * p.len + token) * width + (first + head) * p.dim;
        into[at..at + p.dim].copy_from_slice(value);
    }
}

#[cfg(test)]
pub(crate) mod tests;
