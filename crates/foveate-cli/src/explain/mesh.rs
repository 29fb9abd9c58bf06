//! `foveate explain --recipe … --mesh …`: what a rank of a run takes, and what moves between ranks.

use std::collections::HashMap;

use foveate::tensor::ElementType;
use foveate_nn::{AttentionConfig, Cpu, MemoryEstimate, Model, ModelConfig, Recompute, Training};
use foveate_shard::step::{self, Copies, EdgeKind, Moved, Stays, StepPlan};
use foveate_shard::{
    Mesh, MeshAxis, Part, RankPlan, ShardError, ShardPlan, Sharding, Strategy, arrays,
};
use foveate_train::recipe::{AxisSize, ChosenLinks, MeshSection, Recipe};
use foveate_train::step_plan;
use serde_json::json;

use crate::failure::Failure;
use crate::output::{Output, bytes};
use crate::ranks::gpu_name;
use crate::shard::plan;

/// How keys and queries of different ranks meet where a row is one document.
struct Keys {
    strategy: Strategy,
    reason: String,
    /// Those of the machine that the choice goes by.
    links: ChosenLinks,
}

/// A recipe over the ranks of a mesh.
pub struct OverRanks {
    mesh: Mesh,
    /// Of a batch, of the rank that has the most.
    rows: usize,
    memory: MemoryEstimate,
    /// Where ranks share rows.
    keys: Option<Keys>,
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
            ..recipe.mesh.clone()
        };
        let mesh = section.of_ranks(asked.ranks())?;
        let part = plan::tensor_part(config, &mesh)?;
        let (blocks, config) = (Cpu::default(), config.clone());
        let model = Model::unfilled_part(blocks, config, attention, &frozen, part)?;
        let cut_rows = mesh.size_of(&[MeshAxis::Replicate, MeshAxis::Shard]);
        let batch = recipe.train.batch_rows;
        let len = recipe.data.len.div_ceil(mesh.size(MeshAxis::Context));
        if batch < cut_rows {
            return Err(Failure::usage(format!(
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
        let (mut cuts, mut of_keys, mut keys) = (None, Vec::new(), None);
        if mesh.size(MeshAxis::Context) > 1 {
            let links = recipe.mesh.links(gpu_name(recipe.run.device).as_deref())?;
            let proven = plan::proven(recipe, model.config(), mesh, links.links)?;
            keys = Some(Keys {
                strategy: proven.plan().strategy,
                reason: proven.plan().reason.clone(),
                links,
            });
            let held = proven.proof().bytes.iter().map(|bytes| bytes.held).max().unwrap_or(0);
            let layers = training.recompute.kept_attention(model.config().num_hidden_layers);
            memory.attention += held * layers as u64;
            of_keys = edges_of_keys(recipe, proven.plan(), model.config())?;
            cuts = Some(proven.plan().sharding.clone());
        }
        let mut edges = edges_of_step(recipe, &model, mesh, cuts)?;
        edges.extend(of_keys);
        Ok(Self { mesh, rows, memory, keys, edges })
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
            "keys": self.keys.as_ref().map(|keys| json!({
                "strategy": keys.strategy.to_string(), "why": keys.reason,
                "machine": keys.links.machine, "machine_by": keys.links.by,
            })),
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
        out.line(format!("memory of a rank {}, at most", sum_of(m)))?;
        if let Some(Keys { strategy, reason, links }) = &self.keys {
            out.line(format!("keys             {strategy}: {reason}"))?;
            out.line(format!("links            of {links}"))?;
        }
        out.line(
            "transfers        of a step, in their order, with the bytes that a rank receives, in f32 (GPUs \
             send weights, keys and the stream in the type of the weights):",
        )?;
        // Edges that differ in the numbers of layers alone are one line.
        let mut lines: Vec<Vec<&Edge>> = Vec::new();
        for edge in &self.edges {
            let alike = |line: &&mut Vec<&Edge>| in_general(line[0]) == in_general(edge);
            match lines.iter_mut().find(alike) {
                Some(line) => line.push(edge),
                None => lines.push(vec![edge]),
            }
        }
        for line in lines {
            let (first, last) = (line[0], line[line.len() - 1]);
            // What follows the name of a layer is said once.
            let split = |what: &'_ str| what.split_once(' ').map(|(a, b)| (a.len(), b.to_owned()));
            let what = match (line.len(), split(&first.what), split(&last.what)) {
                (1, ..) => first.what.clone(),
                (_, Some((end, rest)), Some((_, other))) if rest == other => {
                    format!("{} to {}", &first.what[..end], last.what)
                }
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
        }
        Ok(())
    }
}

/// An edge without the numbers of layers.
fn in_general(e: &Edge) -> Edge {
    let general = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
    Edge { what: general(&e.what), beside: e.beside.as_deref().map(general), ..e.clone() }
}

/// What moves beside the keys of attention, from the step that is proven for the mesh. `cuts` are those of its
/// batches where rows are cut.
fn edges_of_step(
    recipe: &Recipe,
    model: &Model,
    mesh: Mesh,
    cuts: Option<Sharding>,
) -> Result<Vec<Edge>, Failure> {
    let failed = |e: ShardError| Failure::usage(e.to_string());
    let cuts = match cuts {
        Some(cuts) => cuts,
        None => step_plan::sharding(model, recipe, mesh).map_err(failed)?,
    };
    let again = recipe.train.recomputation().unwrap_or_default();
    let mut shape = step_plan::shape(model, recipe, again, mesh.size(MeshAxis::Tensor))?;
    // The batches of a step are alike, but for what is gathered for all of them.
    shape.batches = 1;
    let plan = StepPlan::new(&cuts, &shape).map_err(failed)?;
    let proven = plan.prove().map_err(|e| Failure::new(e.to_string()))?;
    let plan = proven.plan();
    // Parts are the longest on the first ranks, and what comes from others on the last.
    let mut ranks = mesh.group(0, &[MeshAxis::Tensor]);
    ranks.push(mesh.ranks() - 1);
    let mut last: HashMap<&[String; 2], usize> = HashMap::new();
    for edge in plan.edges() {
        last.insert(&edge.values, edge.number);
    }
    let (mut seen, mut edges) = (HashMap::new(), Vec::<Edge>::new());
    let mut replicas: Option<usize> = None;
    for edge in plan.edges() {
        let bytes = ranks.iter().map(|&rank| plan.received(edge, rank)).max().unwrap_or(0);
        let before = seen.insert(&edge.values, ()).is_some();
        let is_last = last[&edge.values] == edge.number;
        let found = of_edge(edge, [before, is_last], bytes, &shape, recipe.train.accumulate);
        // All groups of replicas are summed at once.
        match (replicas, is_of_replicas(edge) && !shape.in_backward) {
            (Some(at), true) => edges[at].bytes += bytes,
            (None, true) => {
                replicas = Some(edges.len());
                edges.push(Edge { what: "gradients".to_owned(), ..found });
            }
            (_, false) => edges.push(found),
        }
    }
    Ok(edges)
}

/// Whether an edge sums gradients of ranks that hold the same elements, and have other tokens.
fn is_of_replicas(edge: &step::Edge) -> bool {
    let sum = edge.from.transfer(&edge.to).and_then(|transfer| transfer.sum);
    let of_elements = matches!(edge.moved, Moved::Elements { .. });
    let all_tokens = sum.is_some_and(|(terms, _)| terms.copies.is_none());
    edge.kind == EdgeKind::AllReduce && of_elements && all_tokens
}

/// An edge of a step as it is told. It may have been `before` in a batch, and be the last of its kind.
fn of_edge(
    edge: &step::Edge,
    [before, is_last]: [bool; 2],
    bytes: u64,
    shape: &step::StepShape,
    accumulate: usize,
) -> Edge {
    let gathers = edge.kind == EdgeKind::AllGather;
    let [from, to] = &edge.values;
    let (what, once, on_gpus) = match edge.moved {
        Moved::Totals => (from.clone(), true, None),
        Moved::Elements { group, .. } => {
            let group = &shape.groups[0][group].name;
            let sum = edge.from.transfer(&edge.to).and_then(|transfer| transfer.sum);
            let what = match sum.and_then(|(terms, _)| terms.copies) {
                Some(Copies::All) => format!("{group} norms, learned buffers"),
                Some(Copies::KvHeads) => format!("{group} copies of key/value heads"),
                None => group.clone(),
            };
            let kept = gathers && shape.stays == Stays::Step;
            (what, kept || is_of_replicas(edge), None)
        }
        Moved::Tokens { .. } => {
            let again = if before { " again" } else { "" };
            let of_layer = from.starts_with("layers.") && !to.starts_with("d_embeddings");
            let for_weights = gathers && before && is_last;
            let beside = match for_weights {
                true => "gradients of weights and attention's",
                false => "the product, rank by rank",
            };
            (format!("{from}{again}"), false, of_layer.then_some(beside))
        }
    };
    Edge {
        what,
        kind: edge.kind.name(),
        from: edge.from.to_string(),
        to: edge.to.to_string(),
        bytes,
        beside: edge.beside.clone(),
        on_gpus,
        times: if once { 1 } else { accumulate },
    }
}

/// The transfers of attention over `context`, of a batch of rows of one document, by the rank that
/// receives the most.
fn edges_of_keys(
    recipe: &Recipe,
    plan: &ShardPlan,
    config: &ModelConfig,
) -> Result<Vec<Edge>, Failure> {
    let layers = config.num_hidden_layers;
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
        let beside = match (plan::keys_first(plan, config), stage > 0) {
            (true, true) => Some("queries and attention on the keys before"),
            (true, false) => Some("queries"),
            (false, true) => Some("attention on the keys before"),
            (false, false) => None,
        };
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
        Some("the gradient of o's weight"),
    ));
    edges.retain(|edge| edge.bytes > 0);
    Ok(edges)
}

/// An estimate and what it is the sum of.
pub(super) fn sum_of(m: &MemoryEstimate) -> String {
    format!(
        "{} = weights {} + gradients {} + optimizer {} + activations {} + attention {} + process {}",
        bytes(m.total() as f64),
        bytes(m.weights as f64),
        bytes(m.gradients as f64),
        bytes(m.optimizer as f64),
        bytes(m.activations as f64),
        bytes(m.attention as f64),
        bytes(m.process as f64),
    )
}
