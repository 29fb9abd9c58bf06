//! `foveate explain --recipe … --mesh …`: what a rank of a run takes, and what moves between ranks.

use foveate::tensor::ElementType;
use foveate_nn::{
    AttentionConfig, Cpu, GroupTransfer, GroupTransferKind, Holders, MemoryEstimate, Model,
    ModelConfig, Recompute, Reshard, TensorPart, Training,
};
use foveate_shard::{
    Axis, Lengths, Map, Mesh, MeshAxis, Part, RankPlan, ShardError, ShardPlan, Sharding, Strategy,
    arrays,
};
use foveate_train::recipe::{AxisSize, MeshSection, Recipe, ReduceDtype};
use serde_json::json;

use crate::failure::Failure;
use crate::output::{Output, bytes};
use crate::shard::plan;

/// A recipe over the ranks of a mesh.
pub struct OverRanks {
    mesh: Mesh,
    /// Of a batch, of the rank that has the most.
    rows: usize,
    memory: MemoryEstimate,
    edges: Vec<Edge>,
}

/// A transfer: from one layout of an array to another.
#[derive(Clone, Debug, PartialEq)]
struct Edge {
    what: String,
    kind: &'static str,
    from: String,
    to: String,
    /// That a rank receives, at most.
    bytes: u64,
    /// What is computed at the same time; nothing waits for it.
    beside: Option<String>,
    /// The same of GPUs, where a rank on a CPU waits.
    on_gpus: Option<&'static str>,
    /// How often in a step.
    times: usize,
}

impl OverRanks {
    /// `recipe` over the ranks of the mesh that `text` says.
    pub fn of(
        text: &str,
        recipe: &Recipe,
        config: &ModelConfig,
        attention: &AttentionConfig,
    ) -> Result<Self, Failure> {
        let frozen = |name: &str| recipe.optimizer.is_frozen(name);
        let asked = Mesh::parse_whole(text).map_err(|e| Failure::usage(e.to_string()))?;
        let size = |axis| Some(AxisSize::Ranks(asked.size(axis)));
        let section = MeshSection {
            replicate: size(MeshAxis::Replicate),
            shard: size(MeshAxis::Shard),
            context: size(MeshAxis::Context),
            tensor: size(MeshAxis::Tensor),
            ..recipe.mesh
        };
        let mesh = section.of_ranks(asked.ranks())?;
        // The first rank of `tensor` has the most.
        let part = TensorPart::of(config, 0, mesh.size(MeshAxis::Tensor))?;
        let (blocks, config) = (Cpu::default(), config.clone());
        let model = Model::unfilled_part(blocks, config, attention, &frozen, part)?;
        let cut_rows = mesh.size_of(&[MeshAxis::Replicate, MeshAxis::Shard]);
        let batch = recipe.train.batch_rows;
        let len = recipe.data.len.div_ceil(mesh.size(MeshAxis::Context));
        if batch < cut_rows {
            return Err(Failure::new(format!(
                "train.batch_rows is {batch}, and {cut_rows} ranks share the rows of a batch; raise it \
                 to {cut_rows}, or give fewer ranks"
            )));
        }
        let rows = batch.div_ceil(cut_rows);
        let again = recipe.train.recomputation();
        let training = Training {
            recompute: again.unwrap_or_default(),
            in_backward: recipe.optimizer.in_backward,
            one_batch: recipe.train.accumulate == 1,
            squares: recipe.optimizer.rule().keeps_squares(),
            cutting: section.cutting(&mesh),
        };
        let mut memory = model.training_memory(rows, len, training)?;
        let mut edges = edges(recipe, &section, &model, mesh);
        if mesh.size(MeshAxis::Context) > 1 {
            let proven = plan::proven(recipe, model.config(), mesh)?;
            let held = proven.proof().bytes.iter().map(|bytes| bytes.held).max().unwrap_or(0);
            let layers = training.recompute.kept_attention(model.config().num_hidden_layers);
            memory.attention += held * layers as u64;
            edges.extend(of_keys(recipe, proven.plan())?);
        }
        edges.extend(of_stream(recipe, &model, mesh, [rows, len])?);
        Ok(Self { mesh, rows, memory, edges })
    }

    pub fn json(&self) -> serde_json::Value {
        let edge = |e: &Edge| {
            json!({
                "what": e.what, "kind": e.kind, "from": e.from, "to": e.to, "bytes": e.bytes,
                "beside": e.beside, "on_gpus": e.on_gpus, "times": e.times,
            })
        };
        json!({
            "mesh": self.mesh.to_string(),
            "rows": self.rows,
            "memory_bytes": self.memory.total(),
            "edges": self.edges.iter().map(edge).collect::<Vec<_>>(),
        })
    }

    pub fn print(&self, out: &mut Output) -> Result<(), Failure> {
        let (mesh, m) = (&self.mesh, &self.memory);
        out.line(format!(
            "mesh             {mesh}: {} ranks, {} rows of a batch each at most",
            mesh.ranks(),
            self.rows
        ))?;
        out.line(format!(
            "memory of a rank {} = weights {} + gradients {} + optimizer {} + activations {} + attention \
             {} + process {}, at most",
            bytes(m.total() as f64),
            bytes(m.weights as f64),
            bytes(m.gradients as f64),
            bytes(m.optimizer as f64),
            bytes(m.activations as f64),
            bytes(m.attention as f64),
            bytes(m.process as f64),
        ))?;
        out.line(
            "transfers        of a step, in their order, with the bytes that a rank receives, in f32 (GPUs \
             send weights, keys and the stream in the type of the weights):",
        )?;
        let mut edges = &self.edges[..];
        while let Some(first) = edges.first() {
            // Layers that differ in their numbers alone are one line.
            let alike = |e: &&Edge| in_general(e) == in_general(first);
            let count = edges.iter().take_while(alike).count();
            let last = &edges[count - 1];
            let what = match count {
                1 => first.what.clone(),
                _ => format!("{} to {}", first.what, last.what),
            };
            let beside = match (&first.beside, &last.beside) {
                (None, _) => match first.on_gpus {
                    Some(beside) => format!("waited for, on GPUs beside {beside}"),
                    None => "waited for".to_owned(),
                },
                (Some(one), Some(other)) if one != other => format!("beside {one} to {other}"),
                (Some(one), _) => format!("beside {one}"),
            };
            let times =
                if first.times > 1 { format!(", {} times", first.times) } else { String::new() };
            out.line(format!(
                "  {:<14} {what:<22} {} -> {}, {}{times}; {beside}",
                first.kind,
                first.from,
                first.to,
                bytes(first.bytes as f64),
            ))?;
            edges = &edges[count..];
        }
        Ok(())
    }
}

/// An edge without the numbers of layers.
fn in_general(e: &Edge) -> Edge {
    let general = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
    Edge { what: general(&e.what), beside: e.beside.as_deref().map(general), ..e.clone() }
}

fn edges(recipe: &Recipe, section: &MeshSection, model: &Model, mesh: Mesh) -> Vec<Edge> {
    let (map, groups) = (Map::new(mesh), model.layout().groups());
    let parts = map.parts(Axis::Elements) as u64;
    let on = map.of(Axis::Elements).iter().filter(|&&axis| mesh.size(axis) > 1);
    let on: Vec<&str> = on.map(|axis| axis.name()).collect();
    let cut = |dtype: &str| match on[..] {
        [] => format!("{dtype}[elements]"),
        [one] => format!("{dtype}[elements@{one}]"),
        _ => format!("{dtype}[elements@({})]", on.join(",")),
    };
    let (accumulate, copies) = (recipe.train.accumulate, mesh.size(MeshAxis::Replicate) as u64);
    let stage = |(group, backward): (usize, bool)| {
        let way = if backward { "backward" } else { "forward" };
        format!("{} {way}", groups[group].name)
    };
    let of_others = |elems: usize, bytes: u64| elems as u64 * bytes * (parts - 1) / parts;
    let mut edges = Vec::new();
    let travels = match section.reduce_dtype {
        ReduceDtype::F32 => ("f32", 4),
        ReduceDtype::Bf16 => ("bf16", 2),
    };
    let edge = |t: GroupTransfer| {
        let (group, beside) = (&groups[t.group], t.beside.map(stage));
        let (kind, from, to, bytes) = match t.kind {
            GroupTransferKind::Gather => {
                ("all-gather", cut("f32"), "f32[elements]".to_owned(), of_others(group.elems(), 4))
            }
            GroupTransferKind::Reduce => (
                "reduce-scatter",
                format!("{}[elements] by rank", travels.0),
                cut("f32"),
                of_others(group.place.len(), travels.1),
            ),
        };
        // What stays gathered until the update is gathered once a step.
        let once = t.kind == GroupTransferKind::Gather && section.reshard == Reshard::Never;
        let times = if once { 1 } else { accumulate };
        Edge { what: group.name.clone(), kind, from, to, bytes, beside, on_gpus: None, times }
    };
    let share = model.layout().share(0, parts as usize);
    let over_replicas = |what: String, elems: usize, beside: Option<String>| Edge {
        what,
        kind: "all-reduce",
        from: format!("{} by rank", cut("f32")),
        to: format!("{} on replicate", cut("f32")),
        bytes: 2 * elems as u64 * 4 * (copies - 1) / copies,
        beside,
        on_gpus: None,
        times: 1,
    };
    // Groups that are updated in the backward pass are summed there, each behind its own.
    let by_group = copies > 1 && recipe.optimizer.in_backward;
    for transfer in model.layout().transfers(section.reshard) {
        let sums = (by_group && transfer.kind == GroupTransferKind::Reduce).then(|| {
            let elems = share.groups()[transfer.group].trained.len();
            over_replicas(groups[transfer.group].name.clone(), elems, transfer.beside.map(stage))
        });
        edges.extend((parts > 1).then(|| edge(transfer)));
        edges.extend(sums);
    }
    if copies > 1 && !by_group {
        edges.push(over_replicas("gradients".to_owned(), share.trained(), None));
    }
    if mesh.ranks() > 1 {
        edges.push(Edge {
            what: "norm, labels".to_owned(),
            kind: "all-reduce",
            from: "f64[2] by rank".to_owned(),
            to: "f64[2]".to_owned(),
            bytes: 16 * (mesh.ranks() as u64 - 1),
            beside: None,
            on_gpus: None,
            times: 1,
        });
    }
    edges
}

/// The transfers between the ranks of `tensor`, for `rows` rows of `len` tokens of a rank, from the layouts
/// that the map gives.
fn of_stream(
    recipe: &Recipe,
    model: &Model,
    mesh: Mesh,
    [rows, len]: [usize; 2],
) -> Result<Vec<Edge>, Failure> {
    let (config, part) = (model.config(), model.tensor_part());
    if !part.is_cut() {
        return Ok(Vec::new());
    }
    let lengths = Lengths {
        batch: recipe.train.batch_rows,
        seq: recipe.data.len,
        kv_seq: recipe.data.len,
        heads: config.num_attention_heads,
        kv_heads: config.kv_heads(),
        dim: config.dim(),
        dim_v: config.dim(),
        hidden: config.hidden_size,
        ffn: config.intermediate_size,
        vocab: config.vocab_size,
    };
    let failed = |e: ShardError| Failure::usage(e.to_string());
    let sharding = Sharding::new(Map::new(mesh), &lengths).map_err(failed)?;
    let layout = |name| {
        let array = arrays::by_name(name).expect("it is listed");
        let layout = array.layout_in(&sharding, ElementType::F32).map_err(failed)?;
        Ok::<_, Failure>(layout.to_string())
    };
    let (cut, whole) = (layout("residual")?, layout("normed")?);
    let tokens = rows * len;
    let (of_all, others) = (part.parts as u64, part.parts as u64 - 1);
    let received = |width: usize| (tokens * width) as u64 * 4 * others / of_all;
    let edge = |what: &str, gathers: bool, times: usize, on_gpus: Option<&'static str>| {
        let (kind, from, to) = match gathers {
            true => ("all-gather", cut.clone(), whole.clone()),
            false => ("reduce-scatter", format!("{whole} by rank"), cut.clone()),
        };
        let (what, bytes) = (what.to_owned(), received(config.hidden_size));
        let times = times * recipe.train.accumulate;
        Edge { what, kind, from, to, bytes, beside: None, on_gpus, times }
    };
    let layers = config.num_hidden_layers;
    let copies = |what: &str, among: Holders, ranks: usize| {
        let copied = model.layout().copied().iter().filter(|copied| copied.among == among);
        let elems: usize = copied.map(|copied| copied.place.len()).sum();
        (elems > 0).then(|| Edge {
            what: what.to_owned(),
            kind: "all-reduce",
            from: "f32[elements] by rank".to_owned(),
            to: format!("f32[elements] on {ranks} of tensor"),
            bytes: 2 * elems as u64 * 4 * (ranks as u64 - 1) / ranks as u64,
            beside: None,
            on_gpus: None,
            times: recipe.train.accumulate,
        })
    };
    let summed = [
        copies("norms, learned buffers", Holders::All, part.parts),
        copies("copies of key/value heads", Holders::KvHeads, part.kv_holders.len()),
    ];
    let product = Some("the product, rank by rank");
    let again = recipe.train.recomputation().unwrap_or_default();
    let layers_again =
        |of: &[Recompute]| if of.contains(&again.what) { again.layers.min(layers) } else { 0 };
    let of_attention = layers_again(&[Recompute::Attention, Recompute::Full]);
    let edges = [
        edge("embeddings", false, 1, None),
        edge("stream before qkv", true, layers, product),
        edge("sum behind o", false, layers, product),
        edge("stream before gate, up", true, layers, product),
        edge("sum behind down", false, layers, product),
        edge("stream before head", true, 1, None),
        Edge {
            what: "logits".to_owned(),
            kind: "all-gather",
            from: "f32[tokens, 3] by rank".to_owned(),
            to: "f32[tensor, tokens, 3]".to_owned(),
            bytes: tokens as u64 * 12 * others,
            beside: None,
            on_gpus: None,
            times: recipe.train.accumulate,
        },
        edge("gradient behind head", false, 1, None),
        edge("before qkv again", true, of_attention, product),
        edge("behind o again", false, layers_again(&[Recompute::Full]), product),
        edge(
            "before gate, up again",
            true,
            layers_again(&[Recompute::Mlp, Recompute::Full]),
            product,
        ),
        edge("gradients before down, o", true, 2 * layers, product),
        edge(
            "streams of both again",
            true,
            2 * layers,
            Some("gradients of weights and attention's"),
        ),
        edge("gradients behind both", false, 2 * layers, product),
        edge("gradient of embeddings", true, 1, None),
    ];
    let edges = edges.into_iter().filter(|edge| edge.times > 0);
    Ok(edges.chain(summed.into_iter().flatten()).collect())
}

/// The transfers of attention over `context`, of a batch of rows of one document, by the rank that
/// receives the most.
fn of_keys(recipe: &Recipe, plan: &ShardPlan) -> Result<Vec<Edge>, Failure> {
    let layout = |name| {
        let array = arrays::by_name(name).expect("it is listed");
        let layout = array.layout_in(&plan.sharding, ElementType::F32);
        Ok::<_, Failure>(layout.map_err(|e| Failure::usage(e.to_string()))?.to_string())
    };
    let sum = |parts: &[Part]| parts.iter().map(|part| part.bytes).sum::<u64>();
    let most = |of: &dyn Fn(&RankPlan) -> u64| plan.ranks.iter().map(of).max().unwrap_or(0);
    let heads = plan.strategy == Strategy::HeadsForTokens;
    let (what, read) = if heads {
        ("queries, keys", "all tokens of own heads")
    } else {
        ("keys", "what queries see")
    };
    let again = recipe.train.recomputation().unwrap_or_default();
    let layers = plan.shape.parameters.len() - 2;
    let again = match again.what {
        Recompute::Attention | Recompute::Full => again.layers.min(layers),
        Recompute::None | Recompute::Mlp => 0,
    };
    let edge = |what: String, [from, to]: [String; 2], bytes, times, on_gpus| Edge {
        what,
        kind: "exchange",
        from,
        to,
        bytes,
        beside: None,
        on_gpus,
        times: times * recipe.train.accumulate,
    };
    let stages = plan.ranks[0].stages.len();
    let mut edges = Vec::new();
    for stage in 0..stages {
        let bytes = most(&|rank| sum(&rank.stages[stage].receives));
        let beside = (stage > 0).then_some("attention on the keys before");
        let name = if stages > 1 { format!("{what}, stage {stage}") } else { what.to_owned() };
        edges.push(edge(name, [layout("k")?, read.to_owned()], bytes, layers + again, beside));
    }
    if heads {
        let rows =
            |part: &Part| part.cells.batch.len() * part.cells.heads.len() * part.cells.q.len();
        let width = 4 * plan.shape.dim_v as u64;
        let results = |parts: &[Part]| parts.iter().map(rows).sum::<usize>() as u64 * width;
        let bytes = most(&|rank| results(&rank.returned));
        edges.push(edge(
            "results".to_owned(),
            [read.to_owned(), layout("out")?],
            bytes,
            layers + again,
            None,
        ));
        let bytes = most(&|rank| results(&rank.stages[0].receives));
        edges.push(edge(
            "gradients of results".to_owned(),
            [layout("d_out")?, read.to_owned()],
            bytes,
            layers,
            None,
        ));
    }
    let bytes = most(&|rank| sum(&rank.returned));
    edges.push(edge(
        format!("gradients of {what}"),
        [read.to_owned(), layout("dk")?],
        bytes,
        layers,
        None,
    ));
    edges.retain(|edge| edge.bytes > 0);
    Ok(edges)
}
