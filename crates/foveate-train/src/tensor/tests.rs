//! Ranks of `tensor` beside one rank: losses and gradients of models of all families.

use std::path::Path;
use std::time::Duration;

use foveate::tensor::random::Random;
use foveate_nn::{
    Activation, Architecture, Batch, Cpu, Cutting, Gradients, IGNORE, Model, ProgramConfig,
    Recompute,
};
use foveate_shard::collectives::run_threads;
use foveate_shard::{Axis, Map, Mesh, ShardError, Sharding};

use super::*;
use crate::checkpoint::{self, Checksums, Content, Save, Snapshot};
use crate::ranks::PARAMETERS;
use crate::recipe::{MeshSection, Recipe, SaveDtype};
use crate::step_plan;
use crate::tokens::Tokenizer;
use crate::transfers::{ParameterRanks, step_ranks};

/// The part of a model that this rank of `section`'s mesh has, ready to run.
fn part(
    ranks: Ranks<'_>,
    section: &MeshSection,
    config: &ModelConfig,
    program: &ProgramConfig,
) -> Result<Model, TrainError> {
    part_on(Cpu::default(), ranks, section, config, program)
}

fn part_on(
    blocks: Cpu,
    ranks: Ranks<'_>,
    section: &MeshSection,
    config: &ModelConfig,
    program: &ProgramConfig,
) -> Result<Model, TrainError> {
    let part = part_of(ranks, config)?;
    let attention = program.clone().into();
    let mut model = Model::unfilled_part(blocks, config.clone(), &attention, &|_| false, part)?;
    let part = model.tensor_part().clone();
    model.tensor(&TensorRanks { ranks, part: &part, carrier: Carrier::Auto })?;
    let sharing = ParameterRanks { ranks, mesh: section, replicated: false };
    let cutting: Cutting = section.cutting(&ranks.mesh());
    if cutting.parts > 1 {
        model.cut(cutting, ranks.coordinate(&PARAMETERS), &sharing)?;
    }
    if let Some(all) = step_ranks(ranks)? {
        model.step_with(all);
    }
    Ok(model)
}

/// Reads the checkpoint `from`, and saves it again under `to`.
pub(crate) fn saved_again(
    world: &dyn Collectives,
    recipe: &Recipe,
    from: &Path,
    to: &Path,
) -> Result<(), TrainError> {
    let ranks = Ranks::in_mesh(world, &recipe.mesh)?;
    let read = checkpoint::read_config(from, Checksums::Verify)?;
    let mut model = part(ranks, &recipe.mesh, &read.model, read.attention.of_layer(0).1)?;
    let rule = recipe.optimizer.rule();
    let (moments, state) = checkpoint::load_state(from, &mut model, &rule, Checksums::Verify)?;
    let save = Save::of(to, state.step, 9);
    ranks.together(if ranks.first() { save.begin() } else { Ok(true) })?;
    let snapshot = Snapshot {
        model: &model,
        attention: &read.attention,
        moments: &moments,
        state: &state,
        dtype: SaveDtype::F32,
        tokenizer: &Tokenizer::bytes(),
        origin: None,
        chat_template: None,
    };
    let owned = ranks.owned(model.layout());
    let written = save.write_part(&Content::of(&snapshot)?, &snapshot, &owned, ranks.rank())?;
    let all = ranks.all(&serde_json::to_vec(&written).unwrap())?;
    if ranks.first() {
        save.commit(all.iter().map(|w| serde_json::from_slice(w).unwrap()).collect())?;
    }
    ranks.all(&[]).map(|_| ())
}

/// A small model of a family.
pub(crate) fn config(
    [heads, kv_heads]: [usize; 2],
    tied: bool,
    architecture: Architecture,
) -> ModelConfig {
    ModelConfig {
        vocab_size: 37,
        hidden_size: 12,
        intermediate_size: 19,
        num_hidden_layers: 2,
        num_attention_heads: heads,
        num_key_value_heads: Some(kv_heads),
        head_dim: Some(4),
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: None,
        rope_pairing: Default::default(),
        max_position_embeddings: 64,
        tie_word_embeddings: tied,
        architecture,
    }
}

/// Two rows of 11 tokens, the first of two documents.
struct Rows {
    tokens: Vec<u32>,
    labels: Vec<i32>,
    documents: Vec<i32>,
    positions: Vec<i32>,
}

impl Rows {
    fn new() -> Self {
        let mut random = Random::new(5);
        let mut id = || (random.normal().abs() * 1000.0) as u32 % 37;
        let tokens: Vec<u32> = (0..22).map(|_| id()).collect();
        let labels = (0..22).map(|at| if at % 11 == 10 { IGNORE } else { id() as i32 }).collect();
        let documents = (0..22).map(|at| i32::from(at > 5 && at < 11)).collect();
        let positions =
            (0..22).map(|at| if at > 5 && at < 11 { at - 6 } else { at % 11 }).collect();
        Self { tokens, labels, documents, positions }
    }

    fn batch(&self) -> Batch<'_> {
        let Self { tokens, labels, documents, positions } = self;
        Batch {
            rows: 2,
            len: 11,
            tokens,
            labels,
            documents,
            positions,
            live_pairs: &[],
            order: &[],
        }
    }
}

/// Loss and gradients by the rank of a mesh, and what of whose parameter they are.
type Found = (f64, Vec<(String, Vec<(std::ops::Range<usize>, usize)>)>, Vec<f32>);

fn on_parts(
    config: &ModelConfig,
    program: &ProgramConfig,
    rows: &Rows,
    tensor: usize,
) -> Vec<Found> {
    let section =
        MeshSection { tensor: Some(crate::recipe::AxisSize::Ranks(tensor)), ..Default::default() };
    let found = run_threads(tensor, Duration::from_secs(60), |world| {
        let run = || {
            let ranks = Ranks::in_mesh(world, &section)?;
            let mut model = part(ranks, &section, config, program)?;
            model.draw_missing(7)?;
            let mut gradients = model.gradients()?;
            model.clear(&mut gradients);
            let loss = model.forward_backward(&rows.batch(), &mut gradients, Recompute::None)?;
            let held = |p: &foveate_nn::Parameter| (p.name.clone(), p.held(0..p.elems()));
            let held = model.parameters().iter().map(held).collect();
            // Another batch is added to what was summed over ranks.
            model.forward_backward(&rows.batch(), &mut gradients, Recompute::None)?;
            let alone = model.loss(&rows.batch())?;
            assert_eq!(alone.sum_nats.to_bits(), loss.sum_nats.to_bits());
            Ok::<_, TrainError>((loss.sum_nats, held, gradients.array))
        };
        run().map_err(|e| ShardError::new(e.to_string()))
    });
    found.unwrap()
}

#[test]
fn losses_and_gradients_of_every_family_are_those_of_one_rank() {
    let llama = Architecture::default();
    let qwen = Architecture { qkv_bias: true, head_norms: true, ..llama.clone() };
    let gemma = Architecture {
        head_norms: true,
        output_norms: true,
        centered_norms: true,
        scaled_embedding: true,
        activation: Activation::Gelu,
        logit_cap: Some(3.0),
        ..llama.clone()
    };
    let phi = Architecture { packed_weights: true, ..llama.clone() };
    let packed = Architecture { packed_weights: true, qkv_bias: true, ..llama.clone() };
    let program = ProgramConfig {
        mask: "causal & document & (h < 1 | q - kv < 4)".to_owned(),
        score: Some("score + bias[h_kv] - bias[h] * 0.1".to_owned()),
        learned: [(
            "bias".to_owned(),
            foveate_nn::LearnedBuffer { shape: vec![6], init: 0.1, std: 0.5 },
        )]
        .into(),
        ..Default::default()
    };
    let rows = Rows::new();
    for (architecture, heads, tied, tensors) in [
        (&llama, [4, 2], false, &[2, 3, 4][..]),
        (&llama, [3, 3], true, &[2, 3]),
        (&qwen, [4, 2], true, &[2, 4]),
        (&gemma, [4, 4], true, &[2, 4]),
        (&gemma, [6, 2], false, &[4, 5]),
        (&phi, [4, 2], false, &[2, 4]),
        (&packed, [6, 1], false, &[2, 6]),
    ] {
        let config = config(heads, tied, architecture.clone());
        let model = Model::new(config.clone(), &program.clone().into(), 7).unwrap();
        let mut gradients = Gradients::zeros(&model);
        let mut batch =
            || model.forward_backward(&rows.batch(), &mut gradients, Recompute::None).unwrap();
        let loss = batch();
        batch();
        for &tensor in tensors {
            let what = format!("{:?} {heads:?} over {tensor}", architecture.family);
            let mut counts = vec![Vec::new(); model.parameters().len()];
            for (nats, held, found) in on_parts(&config, &program, &rows, tensor) {
                assert!((nats - loss.sum_nats).abs() < 1e-4, "{what}: {nats} {}", loss.sum_nats);
                for ((p, (name, held)), counts) in
                    model.parameters().iter().zip(held).zip(&mut counts)
                {
                    assert_eq!(p.name, name);
                    counts.resize(p.elems(), 0);
                    let want = gradients.of(p);
                    let largest = want.iter().fold(0f32, |most, g| most.max(g.abs()));
                    for (whole, place) in held {
                        for (at, place) in whole.zip(place..) {
                            counts[at] += 1;
                            let off = (found[place] - want[at]).abs();
                            let allowed = 1e-4 * largest.max(1e-3);
                            assert!(off <= allowed, "{what}: {name} {at} is {off} off {largest}");
                        }
                    }
                }
            }
            assert!(counts.iter().flatten().all(|&n| n > 0), "{what}: every element is held");
        }
    }
}

/// Steps with moments of 8 bits: the losses of one rank, but for what is rounded, and what two ranks hold stays the
/// same on both.
#[test]
fn moments_of_8_bits_are_the_same_on_all_ranks_that_hold_a_parameter() {
    let config = config([4, 2], false, Architecture::default());
    let program = ProgramConfig {
        mask: "causal & document".to_owned(),
        score: Some("score + bias[h]".to_owned()),
        learned: [(
            "bias".to_owned(),
            foveate_nn::LearnedBuffer { shape: vec![4], init: 0.1, std: 0.5 },
        )]
        .into(),
        ..Default::default()
    };
    let rows = Rows::new();
    let rule = foveate_nn::Rule::AdamW(foveate_nn::AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    });
    let steps = |model: &mut Model| {
        let (mut gradients, mut moments) = (model.gradients()?, model.moments(&rule)?);
        let spans = model.spans(foveate_nn::Treatment::of)?;
        let mut losses = Vec::new();
        for step in 1..=4 {
            let mut totals = model.totals()?;
            model.clear(&mut gradients);
            model.accumulate(&rows.batch(), &mut gradients, Recompute::None, &mut totals)?;
            let of_step =
                foveate_nn::OptimizerStep { rule, step, rate: 1e-2, clip_norm: 1.0, seed: 3 };
            model.update(&of_step, &spans, &gradients, &mut moments, &mut totals)?;
            losses.push(model.read(totals)?.nats);
        }
        Ok::<_, NnError>(losses)
    };
    let (blocks, attention) = (Cpu::with_int8_moments(), program.clone().into());
    let mut one = Model::unfilled_on(blocks, config.clone(), &attention).unwrap();
    one.draw_missing(7).unwrap();
    let alone = steps(&mut one).unwrap();
    let section =
        MeshSection { tensor: Some(crate::recipe::AxisSize::Ranks(2)), ..Default::default() };
    let found = run_threads(2, Duration::from_secs(60), |world| {
        let run = || {
            let ranks = Ranks::in_mesh(world, &section)?;
            let blocks = Cpu::with_int8_moments();
            let mut model = part_on(blocks, ranks, &section, &config, &program)?;
            assert!(model.layout().blocks_are_whole());
            model.draw_missing(7)?;
            let losses = steps(&mut model)?;
            let copied = model.layout().copied().iter().map(|copied| copied.place.clone());
            let bits = |place: std::ops::Range<usize>| model.weights()[place].to_vec();
            let copies: Vec<u32> = copied.flat_map(bits).map(f32::to_bits).collect();
            Ok::<_, TrainError>((losses, copies))
        };
        run().map_err(|e| ShardError::new(e.to_string()))
    });
    let found = found.unwrap();
    for (losses, copies) in &found {
        assert!(!copies.is_empty() && *copies == found[0].1, "norms differ between ranks");
        for (one, found) in alone.iter().zip(losses) {
            assert!((one - found).abs() < 2e-2 * one, "{alone:?} and {losses:?}");
        }
    }
    // Of four ranks two have the same key/value head, whose 48 elements share a block with a query head.
    let part = TensorPart::of(&config, 1, 4).unwrap();
    assert!(!one.layout_of(&part).unwrap().blocks_are_whole());
}

/// A token of a document changes what its mask allows, and nothing else.
#[test]
fn a_token_changes_the_losses_of_those_that_see_it_alone() {
    let config = config([4, 2], false, Architecture::default());
    let program = ProgramConfig { mask: "causal & document".to_owned(), ..Default::default() };
    let rows = Rows::new();
    // Losses of the first document's tokens alone.
    let first = |tokens: &[u32]| {
        let mut labels = rows.labels.clone();
        labels[4..].fill(IGNORE);
        let (documents, positions) = (rows.documents.clone(), rows.positions.clone());
        let rows = Rows { tokens: tokens.to_vec(), labels, documents, positions };
        on_parts(&config, &program, &rows, 4).into_iter().map(|found| found.0.to_bits()).collect()
    };
    let before: Vec<u64> = first(&rows.tokens);
    assert!(before.iter().all(|bits| *bits == before[0]), "all ranks have the same loss");
    for (at, changes) in [(0, true), (3, true), (4, false), (7, false), (15, false)] {
        let mut tokens = rows.tokens.clone();
        tokens[at] = (tokens[at] + 1) % 37;
        assert_eq!(first(&tokens) != before, changes, "token {at}");
    }
}

/// What a rank computes is what the map says, from which the layouts of a plan follow.
#[test]
fn what_a_rank_has_is_what_the_map_gives() {
    for (heads, kv_heads) in [(4, 2), (6, 3), (6, 2), (8, 1), (7, 7), (12, 4), (9, 3)] {
        for tensor in 1..=heads {
            let config = config([heads, kv_heads], false, Architecture::default());
            let mesh = Mesh::new([1, 1, 1, tensor]).unwrap();
            let lengths = step_plan::lengths(&config, [2, 11]);
            let sharding = Sharding::new(Map::new(mesh), &lengths).unwrap();
            for rank in 0..tensor {
                let part = TensorPart::of(&config, rank, tensor).unwrap();
                let of_map = |axis| sharding.range(axis, rank);
                assert_eq!(part.heads, of_map(Axis::Heads), "{heads} {kv_heads} {tensor} {rank}");
                assert_eq!(part.kv_heads, of_map(Axis::KvHeads));
                assert_eq!(part.kv_holders, sharding.cut(Axis::KvHeads).copies(rank));
                assert_eq!(part.ffn, of_map(Axis::Ffn));
                assert_eq!(part.vocab, of_map(Axis::Vocab));
                assert_eq!(part.stream(11), of_map(Axis::Stream));
            }
        }
    }
}
