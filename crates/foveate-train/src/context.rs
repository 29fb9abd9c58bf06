//! Context parallelism: the tokens of a batch on the ranks of `context`, and attention over them.
//!
//! A plan is made for the masks of all layers over the documents of a batch, and proven, before
//! anything runs. Its one permutation moves tokens, labels, documents and positions of every row; the
//! blocks of a step then see rows of this rank's tokens, and attention alone knows of the others. A plan
//! holds for the next batch, too, where the masks read no documents, or the documents are the same. A device
//! that computes attention over ranks itself is told what the plan says; elsewhere the host does.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use foveate::tensor::ElementType;
use foveate::{AnyBuffer, BufferData, Tensor};
use foveate_nn::{
    AttentionProgram, Blocks, ContextAttention, ContextLayer, ContextMoves, ContextPlan, KeyStage,
    LearnedBuffer, Model, NnError, PackedHeads, TensorPart,
};
use foveate_shard::collectives::Collectives;
use foveate_shard::{
    Axis, Cells, LayerMask, Limits, Map, Mesh, MeshAxis, ModelShape, Part, PlanOptions, Planes,
    ProvenPlan, Ranges, RankAttention, RankForward, ShardError, ShardLayout, ShardPlan, Sharded,
    Stage, Strategy, Whole, arrays, usual_tile,
};

use crate::error::TrainError;
use crate::pack::Packed;
use crate::ranks::{ROWS, Ranks};
use crate::transfers::of_ranks;

/// Whether a rank cannot compute on its rows alone: other ranks of `mesh` have tokens of them, or what
/// `model` computes depends on which rows of the batch they are, or on the others.
pub(crate) fn is_needed<B: Blocks>(mesh: &Mesh, model: &Model<B>) -> bool {
    let depends = model.config().rope_depends_on_batch()
        || model.programs().iter().any(AttentionProgram::tells_rows_apart);
    mesh.size(MeshAxis::Context) > 1 || depends && mesh.size_of(&ROWS) > 1
}

/// What makes the plans of a run whose ranks compute attention together.
pub(crate) struct ContextPlanner {
    map: Map,
    /// Named by the recipe; the planner's choice where it names none.
    strategy: Option<Strategy>,
    /// Whether the device computes attention over ranks.
    by_device: bool,
    /// Ranks that have the other rows of a batch.
    rows: Box<dyn Collectives>,
    last: Option<ContextBatch>,
}

impl ContextPlanner {
    /// For the mesh of `ranks`, which all call it; `by_device` says whether the model's device computes
    /// attention over ranks.
    pub fn new(
        ranks: Ranks<'_>,
        strategy: Option<Strategy>,
        by_device: bool,
    ) -> Result<Self, TrainError> {
        let (map, rows) = (Map::new(ranks.mesh()), ranks.group(&ROWS)?);
        Ok(Self { map, strategy, by_device, rows, last: None })
    }

    /// The plan of batches of `rows` rows of one document of `len` tokens.
    ///
    /// # Errors
    /// When such a batch cannot be planned.
    pub fn describe<B: Blocks>(
        &self,
        ranks: Ranks<'_>,
        model: &Model<B>,
        [rows, len]: [usize; 2],
    ) -> Result<Described, ShardError> {
        let documents = vec![0; rows * len];
        let (proven, _) = proven(&self.map, self.strategy, model, [rows, len], &documents)?;
        let ShardPlan { strategy, reason, .. } = proven.plan();
        let bytes = &proven.proof().bytes[ranks.rank()];
        let [layer_bytes, passing_bytes] = match self.by_device {
            true => [bytes.kept, bytes.passing],
            false => [bytes.held, 0],
        };
        Ok(Described { strategy: format!("{strategy}: {reason}"), layer_bytes, passing_bytes })
    }

    /// This rank's tokens of its rows, which are part of a batch of `all` rows, and attention over
    /// them. Where the rows are shorter than the ranks of `context` are many, the first of these has
    /// them whole, and there is none. All ranks call it.
    pub fn part<B: Blocks>(
        &mut self,
        ranks: Ranks<'_>,
        model: &Model<B>,
        all: usize,
        own: Packed,
    ) -> Result<(Packed, Option<&mut ContextBatch>), TrainError> {
        if own.len < self.map.mesh().size(MeshAxis::Context) {
            let is_first = ranks.coordinate(&[MeshAxis::Context]) == 0;
            return Ok((if is_first { own } else { own.part(0..0) }, None));
        }
        let reads = model.programs().iter().any(AttentionProgram::reads_documents);
        let mut told = vec![own.positions.iter().max().map_or(0, |&position| position + 1)];
        told.extend(own.documents.iter().filter(|_| reads));
        let (mut positions, mut documents) = (0, Vec::new());
        for told in self.rows.all_gather(&words(&told))? {
            let mut told = numbers(&told);
            positions = positions.max(told.next().unwrap_or(0));
            documents.extend(told);
        }
        let shape = [all, own.len];
        documents.resize(all * own.len, 0);
        let holds = |last: &ContextBatch| last.shape == shape && last.documents == documents;
        if !self.last.as_ref().is_some_and(holds) {
            // What it kept goes first.
            self.last = None;
            let (proven, programs) = proven(&self.map, self.strategy, model, shape, &documents)?;
            let layers = model.programs_of_layers().len();
            let batch = match self.by_device {
                true => {
                    ContextBatch::by_device(ranks.world(), proven, &programs, layers, &documents)?
                }
                false => ContextBatch::new(ranks.world(), proven, &programs, layers)?,
            };
            self.last = Some(ContextBatch { shape, documents, ..batch });
        }
        let batch = self.last.as_mut().expect("it was just made");
        batch.positions = positions as usize;
        Ok((batch.own(&own), Some(batch)))
    }
}

fn words(numbers: &[i32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

fn numbers(words: &[u8]) -> impl Iterator<Item = i32> {
    words.as_chunks().0.iter().map(|&word| i32::from_le_bytes(word))
}

/// What a plan comes to on a rank.
pub(crate) struct Described {
    /// How keys and queries meet, and why.
    pub strategy: String,
    /// What attention of a layer keeps.
    pub layer_bytes: u64,
    /// What it needs besides for the time of a layer.
    pub passing_bytes: u64,
}

/// A batch over the ranks: who holds which tokens, and attention.
pub(crate) struct ContextBatch {
    shape: [usize; 2],
    /// Of all rows, `[rows, len]`.
    documents: Vec<i32>,
    positions: usize,
    proven: Arc<ProvenPlan>,
    rank: usize,
    /// What a device does; nothing where the host computes.
    device: Option<Arc<ContextPlan>>,
    /// What the host computes.
    programs: Vec<LayerAttention>,
    /// What forward passes keep, by slot.
    kept: Vec<Option<RankForward>>,
    layers: usize,
    /// Time of attention, waiting for other ranks included.
    seconds: f64,
}

struct LayerAttention {
    attention: RankAttention,
    learned: Vec<(String, LearnedBuffer)>,
}

impl ContextBatch {
    fn new(
        world: &dyn Collectives,
        proven: Arc<ProvenPlan>,
        programs: &[AttentionProgram],
        layers: usize,
    ) -> Result<Self, ShardError> {
        let attention = |program: &AttentionProgram| {
            let attention = RankAttention::new(world, &proven, &program.attention(), None)?;
            Ok(LayerAttention {
                // They are gradients of parameters, which a step sums over the ranks.
                attention: attention.without_sums(),
                learned: program.learned.clone(),
            })
        };
        let programs = programs.iter().map(attention).collect::<Result<_, ShardError>>()?;
        Ok(Self { programs, ..Self::of(world, proven, layers) })
    }

    /// A batch whose attention a device computes. All ranks call it.
    fn by_device(
        world: &dyn Collectives,
        proven: Arc<ProvenPlan>,
        programs: &[AttentionProgram],
        layers: usize,
        documents: &[i32],
    ) -> Result<Self, ShardError> {
        for program in programs {
            proven.agree(world, &program.attention(), None)?;
        }
        let batch = Self::of(world, proven, layers);
        let plan = device_plan(batch.plan(), batch.rank, documents, batch.live_pairs());
        Ok(Self { device: Some(Arc::new(plan)), ..batch })
    }

    fn of(world: &dyn Collectives, proven: Arc<ProvenPlan>, layers: usize) -> Self {
        Self {
            shape: [0; 2],
            documents: Vec::new(),
            positions: 0,
            device: None,
            programs: Vec::new(),
            rank: world.rank(),
            proven,
            kept: Vec::new(),
            layers,
            seconds: 0.0,
        }
    }

    /// The plan.
    pub fn plan(&self) -> &ShardPlan {
        self.proven.plan()
    }

    /// Of this rank's rows its tokens, in the order of the plan.
    fn own(&self, rows: &Packed) -> Packed {
        let plan = self.plan();
        let tokens = plan.sharding.range(Axis::Seq, self.rank);
        rows.columns(&plan.permutation.positions(tokens))
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
        Sharded::new(name, tensor, &shape, self.layout(name)?, map, self.rank)
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
        let heads = self.plan().whole.heads;
        self.proven.proof().loads[self.rank] as f64 / (heads * self.layers) as f64
    }
}

/// What `plan` says of a rank, as a device is told; `live` is of its queries, in the mean of heads and layers.
fn device_plan(plan: &ShardPlan, rank: usize, documents: &[i32], live: f64) -> ContextPlan {
    let own = &plan.ranks[rank].own;
    let members = plan.sharding.map().mesh().group(rank, &[MeshAxis::Context]);
    let of_ranks = |parts: &[Part]| {
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
    let queries = own.batch.len() * own.q.len();
    ContextPlan {
        whole: [plan.whole.batch, plan.whole.q_len],
        documents: documents.to_vec(),
        first_row: own.batch.start,
        first_heads: [own.heads.start, own.kv_heads.start],
        mean_kv_len: ((live / queries.max(1) as f64).ceil() as usize).max(1),
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

/// The plan for the masks of `model` over the documents of all rows of a batch, and the programs over
/// them.
fn proven<B: Blocks>(
    map: &Map,
    strategy: Option<Strategy>,
    model: &Model<B>,
    shape @ [rows, len]: [usize; 2],
    documents: &[i32],
) -> Result<(Arc<ProvenPlan>, Vec<AttentionProgram>), ShardError> {
    let programs: Vec<AttentionProgram> = model
        .programs()
        .iter()
        .map(|program| program.over(shape, documents))
        .collect::<Result<_, _>>()
        .map_err(|e| ShardError::new(e.to_string()))?;
    let layers_of = |i| model.programs_of_layers().iter().filter(|&&of| of == i).count() as u64;
    let masks: Vec<LayerMask> = programs
        .iter()
        .enumerate()
        .map(|(i, program)| LayerMask { mask: program.mask.clone(), layers: layers_of(i) })
        .collect();
    let config = model.config();
    let whole = Whole {
        batch: rows,
        heads: config.num_attention_heads,
        kv_heads: config.kv_heads(),
        q_len: len,
        kv_len: len,
    };
    // Of the first rank of `tensor`, which all ranks plan with.
    let first = TensorPart::of(config, 0, model.tensor_part().parts);
    let layout = first.and_then(|part| model.layout_of(&part));
    let layout = layout.map_err(|e| ShardError::new(e.to_string()))?;
    let group = |group: &foveate_nn::ParameterGroup| (group.name.clone(), group.place.len());
    let model_shape = ModelShape {
        dim: config.dim(),
        dim_v: config.dim(),
        hidden: config.hidden_size,
        ffn: config.intermediate_size,
        vocab: config.vocab_size,
        element: model.precision().weights.into(),
        parameters: layout.groups().iter().map(group).collect(),
    };
    let context = map.mesh().size(MeshAxis::Context);
    let planes = Planes::new(whole, &masks, usual_tile(len, context))?;
    let options = PlanOptions { strategy, chunk: None };
    let plan = ShardPlan::new(map, &planes, &model_shape, options)?;
    let proven = plan
        .prove(&planes, &Limits::default())
        .map_err(|e| ShardError::new(format!("the plan of a batch is wrong: {e}")))?;
    Ok((Arc::new(proven), programs))
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
mod tests;
