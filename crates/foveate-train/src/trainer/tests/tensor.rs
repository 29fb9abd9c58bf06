//! Runs in which ranks of `tensor` have the heads, feed-forward columns and vocabulary, beside one rank.

use std::time::Duration;

use super::ranks::{
    all_well, beside_one_rank, copied, each_goes_on_from_every_other, on_ranks,
    same_bits_over_threads_and_tcp,
};
use super::*;

/// A bias by head that is trained, a constant by head, and a mask by head.
const BY_HEAD: &str = "attention={ mask = \"causal & document & (h < 1 | q - kv < 9)\", \
     score = \"score + bias[h, max(min(q - kv, 3), 0)] - slopes[h] * ((q - kv) as f32)\", \
     learned = { bias = { shape = [4, 4], init = 0.1, std = 0.5 } }, \
     buffers = { slopes = { shape = [4], values = [0.5, 0.25, 0.125, 0.0625] } } }";

#[test]
fn ranks_of_tensor_reach_what_one_rank_reaches() {
    let sets = ["train.batch_rows=4", "train.accumulate=2", BY_HEAD];
    for (ranks, meshes) in [
        (1, &["{ tensor = 1 }"][..]),
        (2, &["{ tensor = 2 }"]),
        // Key/value heads are fewer: two ranks hold each.
        (4, &["{ tensor = 4 }"]),
        // Rank 0 and 1 share a key/value head, rank 2 has the other.
        (3, &["{ tensor = 3 }"]),
    ] {
        beside_one_rank(ranks, meshes, &sets, 1e-5);
    }
}

#[test]
fn tensor_goes_with_every_other_axis() {
    let sets = ["train.batch_rows=4", BY_HEAD];
    for (ranks, meshes) in [
        (
            4,
            &[
                "{ tensor = 2, shard = 2 }",
                "{ tensor = 2, context = 2 }",
                "{ tensor = 2, replicate = 2 }",
            ][..],
        ),
        (
            8,
            &[
                "{ tensor = 2, shard = 2, context = 2 }",
                "{ tensor = 4, shard = 2 }",
                "{ tensor = 4, context = 2 }",
            ],
        ),
        (
            16,
            &["{ tensor = 2, shard = 2, context = 2, replicate = 2 }", "{ tensor = 4, shard = 4 }"],
        ),
    ] {
        beside_one_rank(ranks, meshes, &sets, 1e-5);
    }
}

#[test]
fn counts_that_ranks_of_tensor_do_not_divide_are_cut_unevenly() {
    // 3 heads over 2 ranks, 25 columns over 2, 258 ids over 4.
    let heads = ["model.num_attention_heads=3", "model.num_key_value_heads=3", "model.head_dim=6"];
    let sets = [&heads[..], &["train.batch_rows=4", "model.intermediate_size=25"]].concat();
    beside_one_rank(2, &["{ tensor = 2 }"], &sets, 1e-5);
    beside_one_rank(4, &["{ tensor = 2, shard = 2 }", "{ tensor = 2, context = 2 }"], &sets, 1e-5);
    // 6 heads of 2 key/value heads over 4 ranks: 2, 1, 2 and 1.
    let heads = ["model.num_attention_heads=6", "model.num_key_value_heads=2", "model.head_dim=4"];
    let sets = [&heads[..], &["train.batch_rows=4"]].concat();
    beside_one_rank(4, &["{ tensor = 4 }"], &sets, 1e-5);
    // Every head has its own keys and values.
    let all = ["model.num_key_value_heads=4", "train.batch_rows=4", BY_HEAD];
    beside_one_rank(4, &["{ tensor = 4 }"], &all, 1e-5);
}

#[test]
fn every_rule_and_recomputation_works_over_tensor() {
    let frozen = "optimizer.groups=[{ match = \"*.layers.0.*\", frozen = true }, \
                  { match = \"*norm*\", rate = 0.5, weight_decay = 0.2 }]";
    let back = ["optimizer.in_backward=true", "optimizer.clip_norm=0"];
    let tied = "model.tie_word_embeddings=true";
    let meshes = ["{ tensor = 2, shard = 2 }", "{ tensor = 4, reshard = \"never\" }"];
    for sets in [
        &["train.accumulate=2", "train.z_loss=0.1", tied, "optimizer.clip_norm=0.05"][..],
        &["train.recompute=full", "optimizer.kind=sgd"],
        &["train.recompute=attention", tied],
        &[frozen, "train.recompute=mlp", "train.recompute_layers=1"],
        &[back[0], back[1], tied],
        &[back[0], back[1], frozen, "train.recompute=full"],
    ] {
        beside_one_rank(4, &meshes, &[sets, &["train.batch_rows=4"]].concat(), 1e-5);
    }
}

#[test]
fn a_run_goes_on_in_another_mesh_from_what_ranks_of_tensor_saved() {
    each_goes_on_from_every_other(&[
        (1, "mesh={}"),
        (2, "mesh={tensor=2}"),
        (4, "mesh={tensor=4}"),
        (4, "mesh={tensor=2, shard=2}"),
        (4, "mesh={tensor=2, replicate=2}"),
        (3, "mesh={shard=3}"),
    ]);
}

/// What is read of a checkpoint of `tensor` is what is written of it again, to the bit.
#[test]
fn weights_and_moments_of_a_checkpoint_are_those_saved() {
    let first = Place::new();
    let sets = ["train.batch_rows=4", "train.steps=2", "train.save_every=0"];
    let recipe = first.recipe(&[&sets[..], &["mesh={tensor=2, shard=2}"]].concat());
    let (saved, _) = all_well(4, &first, &recipe, Start::New).remove(0);
    let kept = |checkpoint: &Path| {
        let read = checkpoint::read_config(checkpoint, Checksums::Verify).unwrap();
        let mut model = Model::unfilled(read.model, &read.attention).unwrap();
        let rule = recipe.optimizer.rule();
        let state = checkpoint::load_state(checkpoint, &mut model, &rule, Checksums::Verify);
        let (moments, state) = state.unwrap();
        (model.weights().to_vec(), moments, state.step)
    };
    let wanted = kept(&saved.checkpoint);
    assert_eq!(wanted.2, 2);
    for (ranks, mesh) in [(1, "mesh={}"), (4, "mesh={tensor=4}"), (2, "mesh={tensor=2}")] {
        // Resumed, no step is left to take: what was read is saved.
        let place = copied(&first);
        let checkpoints = place.0.path().join("run/checkpoints");
        let recipe = place.recipe(&[&sets[..], &[mesh]].concat());
        let read = checkpoints.join("read");
        std::fs::rename(checkpoints.join("step-000002"), &read).unwrap();
        let done =
            foveate_shard::collectives::run_threads(ranks, Duration::from_secs(60), |world| {
                let moved = crate::tensor::tests::saved_again(world, &recipe, &read, &checkpoints);
                moved.map_err(|e| foveate_shard::ShardError::new(e.to_string()))
            });
        done.unwrap();
        assert!(kept(&checkpoints.join("step-000002")) == wanted, "{mesh}");
    }
}

#[test]
fn tensor_has_the_same_bits_over_threads_and_tcp() {
    same_bits_over_threads_and_tcp(&["train.batch_rows=4", "mesh={tensor=2, shard=2}"]);
}

#[test]
fn what_tensor_cannot_cut_is_refused_on_all_ranks_with_what_it_can() {
    let said = |ranks: usize, sets: &[&str]| {
        let place = Place::new();
        let recipe = place.recipe(sets);
        let runs =
            on_ranks(ranks, &place, |_| recipe.clone(), || Start::New.into(), |_| Log::default());
        let mut said = runs.into_iter().map(|run| run.unwrap_err().to_string());
        let first = said.next().unwrap();
        said.for_each(|other| assert_eq!(other, format!("rank 0: {first}")));
        assert!(!place.0.path().join("run/checkpoints").exists());
        first
    };
    let heads = said(5, &["mesh.tensor=5"]);
    let why =
        "num_attention_heads: is 4, which cannot be cut over 5 ranks of tensor; use 1 to 4 of them";
    assert!(heads.ends_with(why), "{heads}");
    let columns = said(3, &["mesh.tensor=3", "model.intermediate_size=2"]);
    assert!(columns.contains("intermediate_size: is 2, which cannot be cut over 3"), "{columns}");
    let int8 = said(4, &["mesh.tensor=4", "precision.state=int8_moments"]);
    assert!(int8.starts_with("precision.state: is \"int8_moments\", and with"), "{int8}");
    assert!(int8.contains("mesh.tensor = 4") && int8.contains("at most 2 ranks"), "{int8}");
    let sets = ["mesh.tensor=2", "precision.state=int8_moments", "model.num_key_value_heads=1"];
    let one = said(2, &sets);
    assert!(one.ends_with("leave it out, or use at most 1 rank of tensor"), "{one}");
    let swap = "mesh={ tensor = 4, context = 2, strategy = \"heads\" }";
    let swap = said(8, &[swap]);
    assert!(swap.contains("fewer key/value heads than ranks of tensor; use exchange"), "{swap}");
}
