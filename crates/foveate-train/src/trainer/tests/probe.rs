//! The perturbation probe: one token of a batch becomes another, and exactly the outputs that the mask allows
//! change, on every product of the four axes and with every strategy.
//!
//! A model of one layer, so that an output depends on the keys that its query sees and on its own token.
//! Which these are is asked of the mask, pair by pair. The loss of all tokens that do not see the other
//! token has the same bits, and that of each token which sees it has not.

use foveate::ScalarValue;
use foveate::mods::Point;
use foveate::tensor::random::Random;
use foveate_nn::{AttentionProgram, Cpu, IGNORE};
use foveate_shard::collectives::run_threads;
use foveate_shard::{MeshAxis, ShardError, Strategy};

use super::meshes::{meshes, whole};
use super::*;
use crate::context::tests::STRATEGIES;

const LEN: usize = 26;
const VOCAB: usize = 29;

/// Rows of a batch and query heads on so many ranks: each axis of a mesh may cut them to one a rank.
fn rows_and_heads(ranks: usize) -> usize {
    ranks.max(8)
}

/// Programs whose queries see keys by their documents, by their heads, by their rows, and by a window.
const PROGRAMS: [&str; 4] = [
    "attention={ mask = \"causal & document\", score = \"score + bias[h, max(min(q - kv, 3), 0)]\", \
     learned = { bias = { shape = [HEADS, 4], init = 0.1, std = 0.5 } } }",
    "attention={ mask = \"h % 4 > 2 & kv < q | kv == q\", score = \"softcap(2)\" }",
    "attention={ mask = \"prefix & document\", buffers = { prefixes = { shape = [HEADS], values = PREFIXES } } }",
    "attention={ mask = \"document & abs(q - kv) < 4\" }",
];

/// A program for so many rows and heads.
fn program_of(program: &str, size: usize) -> String {
    let prefixes: Vec<usize> = [2, 9, 20, 0, 5, 26, 7, 1].into_iter().cycle().take(size).collect();
    program.replace("HEADS", &size.to_string()).replace("PREFIXES", &format!("{prefixes:?}"))
}

/// Rows of documents of random lengths, of which the last row ends in padding.
fn batch_of(rows: usize, seed: u64) -> Packed {
    let random = &mut Random::new(seed);
    let mut all = Packed::with_rows(rows, LEN);
    for row in 0..rows {
        let (mut id, mut position) = (0, 0);
        let filled = if row + 1 == rows { LEN - 3 } else { LEN };
        for cell in row * LEN..row * LEN + filled {
            if position > 0 && random.below(9) == 0 {
                (id, position) = (id + 1, 0);
            }
            all.tokens[cell] = random.below(VOCAB) as u32;
            (all.documents[cell], all.positions[cell]) = (id, position);
            position += 1;
        }
    }
    all
}

/// The places whose outputs depend on the token at `changed`, by the mask alone.
fn seeing(recipe: &Recipe, rows: &Packed, changed: usize) -> Vec<usize> {
    let attention = recipe.attention.clone().unwrap_or_default();
    let [(_, program)] = attention.programs()[..] else { panic!("one program") };
    let heads = recipe.model_config(VOCAB).unwrap().unwrap().num_attention_heads;
    let program = AttentionProgram::parse(program, heads).unwrap();
    let shape = [rows.rows, LEN];
    let mask = program.over(shape, &rows.documents).unwrap().mask.expect("it has a mask");
    let (row, kv) = (changed / LEN, changed % LEN);
    let sees = |h: usize, q: usize| {
        let [b, h, q, kv, len] = [row, h, q, kv, LEN].map(|n| n as i32);
        let point = Point { b, h, q, kv, q_len: len, kv_len: len, ..Point::default() };
        mask.program().eval(&point).unwrap() == [ScalarValue::Bool(true)]
    };
    let depends = |&q: &usize| q == kv || (0..heads).any(|h| sees(h, q));
    (0..LEN).filter(depends).map(|q| row * LEN + q).collect()
}

/// `rows`, in which the tokens at `labelled` alone have a target.
fn labelled(rows: &Packed, labelled: impl Fn(usize) -> bool) -> Packed {
    let mut rows = rows.clone();
    for (cell, label) in rows.labels.iter_mut().enumerate() {
        *label = if labelled(cell) { 5 } else { IGNORE };
    }
    rows
}

/// The sums of the losses of batches over all ranks of the recipe's mesh, in bits.
fn losses(ranks: usize, recipe: &Recipe, batches: &[Packed]) -> Vec<u64> {
    let config = recipe.model_config(VOCAB).unwrap().unwrap();
    let attention = recipe.attention.clone().unwrap_or_default();
    let wrong = |e: TrainError| ShardError::new(e.to_string());
    let found = run_threads(ranks, std::time::Duration::from_secs(60), |world| {
        let cpu = Cpu::default();
        let mesh = MeshModel::unfilled(world, recipe, config.clone(), &attention, cpu, None);
        let mut mesh = mesh.map_err(wrong)?;
        let counts = mesh.mesh().index(world.rank(), MeshAxis::Tensor) == 0;
        mesh.model.draw_missing(3).unwrap();
        let mut gradients = mesh.model.gradients().unwrap();
        let mut nats = Vec::new();
        for batch in batches {
            let part = mesh.part(batch).map_err(wrong)?;
            let mut totals = mesh.model.totals().unwrap();
            let again = Recomputation::from(foveate_nn::Recompute::None);
            mesh.accumulate(&part, &mut gradients, again, &mut totals).map_err(wrong)?;
            let read = mesh.model.read(totals).unwrap().nats;
            let all = world.all_gather(&if counts { read } else { 0.0 }.to_le_bytes())?;
            let all = all.iter().flat_map(|part| part.as_chunks().0);
            nats.push(all.map(|&bytes| f64::from_le_bytes(bytes)).sum::<f64>().to_bits());
        }
        Ok(nats)
    });
    let mut found = found.unwrap();
    assert!(found.iter().all(|rank| *rank == found[0]), "all ranks see the same");
    found.swap_remove(0)
}

#[test]
fn a_token_changes_what_the_mask_lets_see_it_on_every_mesh_and_nothing_else() {
    let numbers = if whole() { &[1, 2, 3, 4, 8, 16][..] } else { &[2, 4][..] };
    let mut runs = 0;
    for (number, mesh) in numbers.iter().flat_map(|&ranks| meshes(ranks)).enumerate() {
        let [replicate, shard, context, tensor] = mesh;
        let sizes = format!(
            "replicate = {replicate}, shard = {shard}, context = {context}, tensor = {tensor}"
        );
        // Heads are given for tokens where a rank of tensor has as many as context has ranks.
        let has = |strategy: &Strategy| {
            *strategy != Strategy::HeadsForTokens || (4 / tensor).max(1) >= context
        };
        let strategies: Vec<_> = match context {
            1 => vec![None],
            _ => STRATEGIES.into_iter().filter(has).map(Some).collect(),
        };
        for (turn, strategy) in strategies.into_iter().enumerate() {
            let programs = match whole() {
                true => PROGRAMS.to_vec(),
                // Each program comes up with each mesh or with another that is like it.
                false => vec![PROGRAMS[(number + turn) % PROGRAMS.len()]],
            };
            for program in programs {
                let named = strategy.map_or(String::new(), |strategy| {
                    format!(", strategy = \"{}\"", String::from(strategy))
                });
                let named = format!("mesh={{ {sizes}{named} }}");
                probe(mesh.iter().product(), &named, program, number as u64);
                runs += 1;
            }
        }
    }
    println!("{runs} meshes, strategies and programs");
}

/// On one mesh, with one strategy and one program.
fn probe(ranks: usize, mesh: &str, program: &str, seed: u64) {
    let (place, size) = (Place::new(), rows_and_heads(ranks));
    let [heads, batch_rows] = ["model.num_attention_heads", "train.batch_rows"];
    let [heads, batch_rows] = [heads, batch_rows].map(|key| format!("{key}={size}"));
    let sizes = [
        "model.hidden_size=12",
        "model.intermediate_size=20",
        "model.num_hidden_layers=1",
        &heads,
        "model.num_key_value_heads=4",
        "model.head_dim=4",
        "data.len=26",
        &batch_rows,
    ];
    let recipe = place.recipe(&[&sizes[..], &[mesh, &program_of(program, size)]].concat());
    let rows = batch_of(size, 100 + seed);
    let changed = (1 + seed as usize % 6) * LEN + 3 + seed as usize % 11;
    let mut other = rows.clone();
    other.tokens[changed] = (rows.tokens[changed] + 1) % VOCAB as u32;
    let sees = seeing(&recipe, &rows, changed);
    let mut batches = Vec::new();
    let blind = |cell: usize| !sees.contains(&cell);
    batches.extend([&rows, &other].map(|rows| labelled(rows, blind)));
    for &one in &sees {
        batches.extend([&rows, &other].map(|rows| labelled(rows, |cell| cell == one)));
    }
    let found = losses(ranks, &recipe, &batches);
    let about = format!("{mesh}, {program}: token {} of row {}", changed % LEN, changed / LEN);
    assert_eq!(found[0], found[1], "{about}: tokens that do not see it");
    for (one, pair) in sees.iter().zip(found[2..].chunks(2)) {
        assert_ne!(pair[0], pair[1], "{about}: token {} sees it", one % LEN);
    }
}
