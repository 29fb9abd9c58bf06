//! Steps over ranks of `context`, which are threads here, beside the same steps on one rank.

use std::cell::Cell;
use std::ops::Range;
use std::time::Duration;

use foveate::tensor::random::Random;
use foveate_nn::{
    Activation, AdamW, Architecture, AttentionConfig, BufferConfig, BufferValues, CpuTotals,
    Gradients, IGNORE, LayerRope, LearnedBuffer, ModelConfig, Moments, OptimizerStep,
    ProgramConfig, Queued, Recompute, RopeScaling, Rule, StepRanks, Treatment,
};
use foveate_shard::collectives::{OneRank, run_threads};

use super::*;
use crate::error::TrainError;
use crate::recipe::{AxisSize, ChosenLinks, MeshSection};
use crate::trainer::batch;
use crate::transfers::GroupPeers;

thread_local! {
    /// Plans that were made on this thread.
    pub(crate) static PLANS: Cell<usize> = const { Cell::new(0) };
}

const DEADLINE: Duration = Duration::from_secs(60);

fn config(heads: [usize; 2]) -> ModelConfig {
    ModelConfig {
        vocab_size: 13,
        hidden_size: 10,
        intermediate_size: 14,
        num_hidden_layers: 3,
        num_attention_heads: heads[0],
        num_key_value_heads: Some(heads[1]),
        head_dim: Some(6),
        rms_norm_eps: 1e-5,
        rope_theta: 100.0,
        rope_scaling: None,
        rope_pairing: Default::default(),
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        architecture: Default::default(),
    }
}

/// Rows of documents of random lengths, padding at the end of the last.
fn rows(rows: usize, len: usize, seed: u64) -> Packed {
    let random = &mut Random::new(seed);
    let (mut tokens, mut labels, mut documents, mut positions) = (vec![], vec![], vec![], vec![]);
    for row in 0..rows {
        let (mut id, mut position) = (0, 0);
        for column in 0..len {
            let is_padding = row + 1 == rows && column + 3 >= len;
            if position > 0 && random.below(7) == 0 {
                (id, position) = (id + 1, 0);
            }
            tokens.push(random.below(13) as u32);
            let labelled = !is_padding && random.below(9) > 0;
            labels.push(if labelled { random.below(13) as i32 } else { IGNORE });
            documents.push(if is_padding { -1 } else { id });
            positions.push(position);
            position += 1;
        }
    }
    Packed { rows, len, tokens, labels, documents, positions, ..Packed::default() }
}

fn program(mask: &str, score: Option<&str>) -> ProgramConfig {
    ProgramConfig { mask: mask.into(), score: score.map(Into::into), ..ProgramConfig::default() }
}

fn learned() -> ProgramConfig {
    let bias = LearnedBuffer { shape: vec![4, 4], init: 0.1, std: 0.5 };
    ProgramConfig {
        learned: [("bias".to_owned(), bias)].into(),
        ..program(
            "causal & document",
            Some("3 * tanh((score + bias[h, max(min(q - kv, 3), 0)]) / 3)"),
        )
    }
}

/// What a mesh has to get right, of a model with four query heads that share two.
fn cases() -> Vec<(&'static str, AttentionConfig)> {
    let buffer = |shape: &[usize], values| BufferConfig { shape: shape.to_vec(), values };
    let slopes = buffer(&[4], BufferValues::F32(vec![0.5, -0.25, 0.125, 1.0]));
    let prefixes = buffer(&[3], BufferValues::I32(vec![4, 0, 9]));
    let slopes = ProgramConfig {
        buffers: [("slopes".to_owned(), slopes)].into(),
        ..program("causal", Some("score - slopes[h] * ((q - kv) as f32)"))
    };
    let prefixes = ProgramConfig {
        buffers: [("prefixes".to_owned(), prefixes)].into(),
        ..program("prefix & document", None)
    };
    let layers = AttentionConfig::Pattern {
        layers: vec!["local".into(), "global".into()],
        programs: [
            ("local".to_owned(), program("causal & document & sliding_window(4)", None)),
            ("global".to_owned(), learned()),
        ]
        .into(),
    };
    vec![
        ("no mask", program("", None).into()),
        ("documents and a learned bias", learned().into()),
        ("slopes of each head", slopes.into()),
        ("a prefix of each row", prefixes.into()),
        ("a mask of each head", program("kv + 2 * h <= q", Some("softcap(2)")).into()),
        ("chunks, most queries of which see nothing", program("chunked(4) & kv > q", None).into()),
        ("a window and a learned bias in turn", layers),
    ]
}

fn refused(e: TrainError) -> ShardError {
    ShardError::new(e.to_string())
}

fn planner<'a>(
    world: &'a dyn Collectives,
    mesh: [usize; 4],
    strategy: Option<Strategy>,
    model: &Model,
) -> Result<(Ranks<'a>, RunContext), ShardError> {
    let [replicate, shard, context, tensor] = mesh.map(|ranks| Some(AxisSize::Ranks(ranks)));
    let section =
        MeshSection { replicate, shard, context, tensor, strategy, ..MeshSection::default() };
    let ranks = Ranks::in_mesh(world, &section).map_err(refused)?;
    let planner = ContextPlanner::new(ranks, model, strategy, usual(), false, None);
    Ok((ranks, RunContext::new(planner)))
}

/// The links of the usual machine.
fn usual() -> ChosenLinks {
    MeshSection::default().links(None).unwrap()
}

/// What plans for `rank` of `mesh`, of a model whose layers have `mask`.
pub(crate) fn planner_of(mesh: Mesh, rank: usize, mask: &str) -> ContextPlanner {
    let model = Model::new(config([4, 2]), &program(mask, None).into(), 3).unwrap();
    let planner = ContextPlanner::new(Ranks::one(), &model, None, usual(), true, None);
    ContextPlanner { map: Map::new(mesh), rank, ..planner }
}

impl PartialEq for ContextPart {
    /// Whether a device is told the same of both batches.
    fn eq(&self, other: &Self) -> bool {
        let told = |part: &Self| match &part.planned.attention {
            PlannedPrograms::Device(statements, plan) => {
                (part.positions, statements.clone(), Arc::clone(plan))
            }
            PlannedPrograms::Host(..) => panic!("planned for the host"),
        };
        told(self) == told(other)
    }
}

impl ContextPart {
    /// Whether both batches have one plan, made once.
    pub(crate) fn is_of_one_plan_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.planned, &other.planned)
    }
}

/// This rank's tokens of its rows of `rows`, and attention over them.
fn part<'a>(
    context: &'a mut RunContext,
    ranks: Ranks<'_>,
    rows: &Packed,
) -> Result<(Packed, Option<&'a mut ContextBatch>), ShardError> {
    let own = rows.part(ranks.rows(rows.rows));
    let (own, planned) = context.planner.part(own, AllRows::of(rows))?;
    Ok((own, planned.map(|planned| context.take(ranks, planned)).transpose()?))
}

/// What some steps came to.
#[derive(Debug, PartialEq)]
struct Came {
    nats: Vec<f64>,
    gradients: Vec<f32>,
    weights: Vec<f32>,
    live_pairs: f64,
}

/// Adds the loss and the gradients of a part of some rows.
type OfRows<'a> =
    dyn FnMut(&Model, &Packed, &mut Gradients, &mut CpuTotals) -> Result<Queued, ShardError> + 'a;

struct Run<'a> {
    config: ModelConfig,
    attention: &'a AttentionConfig,
    recompute: Recompute,
    /// Of each step.
    rows: Vec<Packed>,
}

impl Run<'_> {
    /// The steps on the rows that `part` takes, together with `world`.
    fn steps(&self, part: &mut OfRows<'_>, world: &dyn Collectives) -> Result<Came, ShardError> {
        let mut model = Model::new(self.config.clone(), self.attention, 3).unwrap();
        let all: Vec<usize> = (0..world.ranks()).collect();
        model.step_with(StepRanks {
            peers: Box::new(GroupPeers { group: world.subgroup(&all)?, blocks: None }),
            counts_tokens: true,
            counts_parameters: world.rank() == 0,
            cut: false,
        });
        // With a smaller ε an element whose gradient is rounding alone takes a whole step.
        let rule = Rule::AdamW(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-4, weight_decay: 0.1 });
        let mut moments = Moments::zeros(model.layout().trained());
        let spans = model.spans(Treatment::of).unwrap();
        let mut came = Came { nats: vec![], gradients: vec![], weights: vec![], live_pairs: 0.0 };
        for (i, rows) in self.rows.iter().enumerate() {
            let mut gradients = Gradients::zeros(&model);
            let mut totals = model.totals().unwrap();
            let queued = part(&model, rows, &mut gradients, &mut totals)?;
            model
                .reduce(&mut gradients, |v| world.all_reduce(v).map_err(|e| of_ranks(&e)))
                .map_err(|e: NnError| ShardError::new(e.to_string()))?;
            let step =
                OptimizerStep { rule, step: 1 + i as u64, rate: 1e-2, clip_norm: 1.0, seed: 0 };
            model.update(&step, &spans, &gradients, &mut moments, &mut totals).unwrap();
            let read = model.read(totals).unwrap();
            assert_eq!(read.labelled, rows.labelled() as u64);
            came.nats.push(read.nats / rows.labelled() as f64);
            let pairs = queued.live_pairs.unwrap_or(0.0).to_le_bytes();
            let pairs = world.all_gather(&pairs)?;
            let pairs = pairs.iter().map(|of| f64::from_le_bytes(of[..].try_into().unwrap()));
            came.live_pairs += pairs.sum::<f64>();
            came.gradients = gradients.array;
        }
        came.weights = model.weights().to_vec();
        Ok(came)
    }

    /// On one rank, all labels at once, or every second one and then the others: the same sums in
    /// another order.
    fn on_one(&self, apart: bool) -> Came {
        let recompute = self.recompute;
        let mut part = |model: &Model, rows: &Packed, gradients: &mut _, totals: &mut _| {
            if !apart {
                return Ok(model.accumulate(&batch(rows), gradients, recompute, totals).unwrap());
            }
            let mut all = Queued::default();
            for turn in 0..2 {
                let mut rows = rows.clone();
                rows.labels.iter_mut().skip(turn).step_by(2).for_each(|label| *label = IGNORE);
                let queued = model.accumulate(&batch(&rows), gradients, recompute, totals).unwrap();
                all.tokens += queued.tokens;
            }
            Ok(all)
        };
        self.steps(&mut part, &OneRank).unwrap()
    }

    fn on_rank(
        &self,
        world: &dyn Collectives,
        mesh: [usize; 4],
        strategy: Option<Strategy>,
    ) -> Result<Came, ShardError> {
        let model = Model::new(self.config.clone(), self.attention, 3).unwrap();
        let (ranks, mut over_ranks) = planner(world, mesh, strategy, &model)?;
        let recompute = self.recompute;
        let mut of_rows = |model: &Model, rows: &Packed, gradients: &mut _, totals: &mut _| {
            let (own, context) = part(&mut over_ranks, ranks, rows)?;
            let context = context.map(ContextBatch::attention);
            let queued = model.accumulate_over(&batch(&own), context, gradients, recompute, totals);
            queued.map_err(|e| ShardError::new(e.to_string()))
        };
        self.steps(&mut of_rows, world)
    }

    /// On a mesh of threads; the same on all of them.
    fn on_mesh(&self, mesh: [usize; 4], strategy: Option<Strategy>) -> Result<Came, ShardError> {
        let ranks = mesh.iter().product();
        let mut came = run_threads(ranks, DEADLINE, |world| self.on_rank(world, mesh, strategy))?;
        for (rank, other) in came.iter().enumerate() {
            assert!(*other == came[0], "rank {rank} came to other numbers than rank 0");
        }
        Ok(came.swap_remove(0))
    }
}

fn most(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The f32 rule: as far off as ten times what another order of the same sums on one rank is, and some
/// roundings of the largest number.
#[track_caller]
fn close(about: &str, found: &Came, one: &Came, other: &Came) {
    for (name, [a, b, c]) in [
        ("gradients", [&found.gradients, &one.gradients, &other.gradients]),
        ("weights", [&found.weights, &one.weights, &other.weights]),
    ] {
        let largest = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let allowed = 10.0 * most(c, b) + 4.0 * f32::EPSILON * largest;
        let off = most(a, b);
        assert!(off <= allowed, "{about}: {name} are {off} off where {allowed} is allowed");
    }
    for ((found, one), other) in found.nats.iter().zip(&one.nats).zip(&other.nats) {
        let allowed = 10.0 * (one - other).abs() + 1e-6;
        assert!((found - one).abs() <= allowed, "{about}: a loss is {found}, on one rank {one}");
    }
    assert!((found.live_pairs - one.live_pairs).abs() < 1e-6 * one.live_pairs, "{about}");
}

const MESHES: [[usize; 4]; 8] = [
    [1, 3, 1, 1],
    [1, 1, 2, 1],
    [1, 1, 3, 1],
    [1, 1, 4, 1],
    [1, 2, 2, 1],
    [2, 1, 3, 1],
    [1, 1, 8, 1],
    [2, 1, 8, 1],
];

#[test]
fn steps_over_context_come_to_what_one_rank_comes_to() {
    for (i, (name, attention)) in cases().iter().enumerate() {
        let recompute = Recompute::ALL[i % Recompute::ALL.len()];
        let rows = (0..5).map(|step| rows(3, 23, 10 * i as u64 + step)).collect();
        let run = Run { config: config([4, 2]), attention, recompute, rows };
        let [one, other] = [run.on_one(false), run.on_one(true)];
        for mesh in MESHES {
            let found = run.on_mesh(mesh, None).unwrap();
            close(&format!("{name} on {mesh:?}"), &found, &one, &other);
        }
    }
}

/// Every way to bring keys to queries, with heads that can be given for tokens.
pub(crate) const STRATEGIES: [Strategy; 7] = [
    Strategy::Gather,
    Strategy::Exchange(0),
    Strategy::Exchange(1),
    Strategy::Exchange(2),
    Strategy::Exchange(3),
    Strategy::Exchange(4),
    Strategy::HeadsForTokens,
];

#[test]
fn every_strategy_and_recomputation_comes_to_what_one_rank_comes_to() {
    let attention = learned().into();
    for (i, strategy) in STRATEGIES.into_iter().enumerate() {
        let recompute = Recompute::ALL[i % Recompute::ALL.len()];
        let rows = (0..5).map(|step| rows(2, 26, 70 + step)).collect();
        let run = Run { config: config([4, 4]), attention: &attention, recompute, rows };
        let [one, other] = [run.on_one(false), run.on_one(true)];
        for mesh in [[1, 1, 4, 1], [2, 1, 2, 1]] {
            let found = run.on_mesh(mesh, Some(strategy)).unwrap();
            close(&format!("{strategy} on {mesh:?}"), &found, &one, &other);
            assert!(found == run.on_mesh(mesh, Some(strategy)).unwrap(), "the same bits again");
        }
    }
}

/// Keys that a query of `cells` sees on average in its own document, itself and those before it, rounded up.
fn mean_of_live_keys(cells: &Cells, rows: &Packed) -> usize {
    let queries = cells.q.as_slice().iter().cloned().flatten();
    let live = cells.batch.clone().flat_map(|row| queries.clone().map(move |q| (row, q)));
    let live = live.map(|(row, q)| {
        let documents = &rows.documents[row * rows.len..][..=q];
        documents.iter().filter(|&of| *of == documents[q]).count()
    });
    let live: Vec<usize> = live.collect();
    live.iter().sum::<usize>().div_ceil(live.len()).max(1)
}

/// What a device moves is what the plan that was proven moves, rank by rank.
#[test]
fn a_device_is_told_what_the_plan_says() {
    let model = Model::new(config([4, 4]), &learned().into(), 3).unwrap();
    for (strategy, sizes) in STRATEGIES.into_iter().zip([
        [1, 1, 4, 1],
        [1, 2, 3, 1],
        [2, 1, 4, 1],
        [1, 1, 2, 2],
        [1, 1, 4, 1],
        [1, 2, 2, 2],
    ]) {
        let [replicate, shard, context, tensor] = sizes;
        let text = format!("replicate={replicate},shard={shard},context={context},tensor={tensor}");
        let mesh = Mesh::parse(&text, sizes.iter().product()).unwrap();
        let rows = rows(4, 37, 5);
        let planner =
            ContextPlanner::new(Ranks::one(), &model, Some(strategy), usual(), true, None);
        let planned: Vec<PlannedBatch> = (0..mesh.ranks())
            .map(|rank| {
                let planner = ContextPlanner { map: Map::new(mesh), rank, ..planner.clone() };
                planner.planned([4, 37], rows.documents.clone()).unwrap()
            })
            .collect();
        let told = |rank: usize| match &planned[rank].attention {
            PlannedPrograms::Device(_, plan) => Arc::clone(plan),
            PlannedPrograms::Host(..) => panic!("planned for the host"),
        };
        for rank in 0..mesh.ranks() {
            let (proven, of) = (&planned[rank].proven, told(rank));
            let own = &proven.plan().ranks[rank];
            let members = mesh.group(rank, &[MeshAxis::Context]);
            assert_eq!((of.whole, members[of.rank]), ([4, 37], rank));
            assert_eq!(of.first_row, own.own.batch.start);
            assert_eq!(of.first_heads, [own.own.heads.start, own.own.kv_heads.start]);
            assert_eq!(of.documents, rows.documents);
            let all: Vec<Range<usize>> = of.tokens.concat();
            assert_eq!(all.iter().map(Range::len).sum::<usize>(), 37);
            assert_eq!(Ranges::of(all), Ranges::one(0..37));
            assert_eq!(of.mean_kv_len, mean_of_live_keys(&own.stages[0].compute, &rows));
            let stages = match &of.moves {
                ContextMoves::Keys(stages) => stages,
                ContextMoves::Heads(heads) => {
                    let cells =
                        |heads: &Range<usize>, first| heads.start + first..heads.end + first;
                    let [q, kv] = &heads[of.rank];
                    let computed = &own.stages[0].compute;
                    assert_eq!(computed.heads, cells(q, of.first_heads[0]));
                    assert_eq!(computed.kv_heads, cells(kv, of.first_heads[1]));
                    continue;
                }
            };
            assert_eq!(stages.len(), own.stages.len());
            // Keys and values that it keeps: its own beside all that arrive.
            let arrive = stages.iter().flat_map(|stage| stage.receives.iter().flatten());
            let keys = own.own.q.len() + arrive.map(Range::len).sum::<usize>();
            let kept = own.own.batch.len() * keys * 2 * own.own.kv_heads.len() * 6 * 4;
            assert_eq!(proven.proof().bytes[rank].kept, kept as u64, "{strategy}, rank {rank}");
            for (number, (stage, planned)) in stages.iter().zip(&own.stages).enumerate() {
                let first = if number == 0 { own.own.kv.clone() } else { Ranges::default() };
                let arrive = Ranges::of(stage.receives.iter().flatten().cloned());
                assert_eq!(first.union(&arrive), planned.compute.kv);
                // Whoever computes is between the first and the last.
                let held: Vec<usize> = own.own.q.as_slice().iter().cloned().flatten().collect();
                let told_of = Ranges::of(held[stage.queries.clone()].iter().map(|&q| q..q + 1));
                assert!(planned.compute.q.difference(&told_of).is_empty());
                let ends = [held.get(stage.queries.start), held.get(stage.queries.end.max(1) - 1)];
                let computed = planned.compute.q.as_slice().iter().cloned().flatten();
                let [first, last] = [computed.clone().next(), computed.last()];
                if first.is_some() {
                    assert_eq!(ends.map(|end| end.copied()), [first, last]);
                } else {
                    assert!(stage.queries.is_empty());
                }
                for (place, &other) in members.iter().enumerate() {
                    let other = told(other);
                    let ContextMoves::Keys(theirs) = &other.moves else { unreachable!() };
                    assert_eq!(stage.sends[place], theirs[number].receives[of.rank]);
                    assert_eq!(stage.moves, theirs[number].moves);
                    assert!(stage.moves || stage.sends[place].is_empty());
                }
            }
            // Gradients return by the way that keys came.
            for part in &own.returns {
                let place = members.iter().position(|&member| member == part.peer).unwrap();
                let came = stages.iter().flat_map(|stage| stage.receives[place].clone());
                assert_eq!(Ranges::of(came), part.cells.kv);
            }
        }
    }
}

/// What a rank would hold of a layer's attention is held to the memory that is there, before anything runs.
#[test]
fn a_plan_that_does_not_fit_is_refused_with_the_numbers() {
    let mesh = Mesh::parse("context=2", 2).unwrap();
    let planner = planner_of(mesh, 0, "causal");
    let held = planner.proven([1, 64], &[0; 64]).unwrap().0.proof().bytes.clone();
    let most = held.iter().map(|bytes| bytes.held).max().unwrap();
    let with = |bytes| {
        let limits = Limits { attention_bytes: Some(bytes), imbalance: None };
        ContextPlanner { limits, ..planner.clone() }.proven([1, 64], &[0; 64])
    };
    assert!(with(most).is_ok());
    let told = with(most - 1).unwrap_err().to_string();
    assert!(told.starts_with("the plan of a batch: (f) attention, rank "), "{told}");
    let numbers = format!("holds {most} bytes where {} are allowed; cut more", most - 1);
    assert!(told.ends_with(&numbers), "{told}");
}

/// Other rotations in other layers, norms of heads, biases, capped logits; and factors of RoPE that the
/// longest position of the batch chooses, which one token alone has.
#[test]
fn what_model_families_have_beside_attention_is_the_same_over_context() {
    let attention = learned().into();
    let mut families = config([4, 2]);
    families.architecture = Architecture {
        family: "all".to_owned(),
        qkv_bias: true,
        head_norms: true,
        output_norms: true,
        centered_norms: true,
        activation: Activation::Gelu,
        scaled_embedding: true,
        logit_cap: Some(3.0),
        packed_weights: true,
        rotary_share: 0.67,
        local_rope_theta: Some(20.0),
        layer_rope: vec![LayerRope::Local, LayerRope::Global],
    };
    let mut long = config([4, 2]);
    long.rope_scaling = Some(RopeScaling {
        rope_type: "longrope".into(),
        factor: 2.0,
        low_freq_factor: None,
        high_freq_factor: None,
        original_max_position_embeddings: Some(9.0),
        short_factor: Some(vec![1.0, 1.0, 1.0]),
        long_factor: Some(vec![3.0, 7.0, 0.3]),
        attention_factor: None,
    });
    for config in [families, long] {
        let mut first = rows(2, 25, 91);
        first.positions.iter_mut().for_each(|position| *position %= 7);
        first.positions[24] = 20;
        let run =
            Run { config, attention: &attention, recompute: Recompute::Full, rows: vec![first] };
        let [one, other] = [run.on_one(false), run.on_one(true)];
        for mesh in [[1, 1, 3, 1], [1, 2, 2, 1]] {
            let found = run.on_mesh(mesh, None).unwrap();
            close(&format!("{} on {mesh:?}", run.config.architecture.family), &found, &one, &other);
        }
    }
}

/// The loss of the tokens that `labelled` names, over `ranks` ranks of context.
fn loss_of(
    ranks: usize,
    run: &Run<'_>,
    rows: &Packed,
    labelled: impl Fn(usize) -> bool,
    strategy: Strategy,
) -> f64 {
    let mut rows = rows.clone();
    for (i, label) in rows.labels.iter_mut().enumerate() {
        *label = if labelled(i) { 5 } else { IGNORE };
    }
    let mesh = [1, 1, ranks, 1];
    let nats = run_threads(ranks, DEADLINE, |world| {
        let model = Model::new(run.config.clone(), run.attention, 3).unwrap();
        let (ranks, mut over_ranks) = planner(world, mesh, Some(strategy), &model)?;
        let (own, context) = part(&mut over_ranks, ranks, &rows)?;
        let context = context.map(ContextBatch::attention);
        let loss = model
            .loss_over(&batch(&own), context, None)
            .map_err(|e| ShardError::new(e.to_string()))?;
        Ok(loss.sum_nats)
    });
    nats.unwrap().iter().sum()
}

#[test]
fn a_token_changes_what_the_mask_lets_see_it_and_nothing_else() {
    let attention = program("causal & document & sliding_window(4)", None).into();
    let one_layer = ModelConfig { num_hidden_layers: 1, ..config([4, 4]) };
    let run =
        Run { config: one_layer, attention: &attention, recompute: Recompute::None, rows: vec![] };
    let mut rows = rows(1, 32, 5);
    for (i, document) in rows.documents.iter_mut().enumerate() {
        *document = [0, 1, 2][usize::from(i >= 9) + usize::from(i >= 25)];
    }
    let changed = 11;
    let mut other = rows.clone();
    other.tokens[changed] = (rows.tokens[changed] + 1) % 13;
    let sees = changed..changed + 4;
    let cases = [2, 3, 4, 8].into_iter().flat_map(|ranks| STRATEGIES.map(|with| (ranks, with)));
    // Heads are given for tokens where there are as many.
    for (ranks, strategy) in
        cases.filter(|&(ranks, with)| ranks <= 4 || with != Strategy::HeadsForTokens)
    {
        let both = |labelled: &dyn Fn(usize) -> bool| {
            [&rows, &other].map(|rows| loss_of(ranks, &run, rows, labelled, strategy).to_bits())
        };
        let [before, after] = both(&|i| !sees.contains(&i));
        assert_eq!(before, after, "{strategy} over {ranks}: tokens that do not see it");
        for i in sees.clone() {
            let [before, after] = both(&|j| i == j);
            assert_ne!(before, after, "{strategy} over {ranks}: token {i} sees it");
        }
    }
}
