//! What recipes take of GPUs by the dry run, and what a save takes of this process.

use std::path::Path;

use foveate_nn::{
    AttentionConfig, Model, ModelConfig, Moments, Offload, ParameterState, ProgramConfig,
    Recomputation, Recompute,
};
use foveate_train::checkpoint::{Checksums, Snapshot, State, load_state, load_weights, save};
use foveate_train::machine::peak_resident;
use foveate_train::memory::{PROFILES, Planned, Setting};
use foveate_train::recipe::{Optimizer, Recipe, SaveDtype};
use foveate_train::tokens::Tokenizer;

/// A recipe of this repository, with sizes in the place of its checkpoint.
fn recipe(name: &str) -> (Recipe, ModelConfig, AttentionConfig) {
    let load = |name: &str| {
        let path = format!("{}/../../recipes/{name}.toml", env!("CARGO_MANIFEST_DIR"));
        Recipe::load(Path::new(&path), &[]).unwrap()
    };
    let recipe = load(name);
    let sizes = match recipe.model.checkpoint {
        Some(_) => load("llama3-8b"),
        None => recipe.clone(),
    };
    let config = sizes.model_config(0).unwrap().unwrap();
    let attention = sizes.attention.clone().unwrap();
    (recipe, config, attention)
}

#[test]
fn auto_computes_as_little_again_as_a_card_has_room_for() {
    let h200 = PROFILES[0];
    let (recipe, config, attention) = recipe("llama3-8b-h200");
    let planned = Planned { recipe: &recipe, config: &config, attention: &attention };
    let chosen = planned.setting_on(h200.bytes).unwrap();
    let Recomputation { what, layers, .. } = chosen.recompute;
    println!("{what:?} in {layers} layers");
    // Recorded on one: gate and up, in half of the layers.
    assert!(what == Recompute::Mlp && layers < 32, "{what:?} in {layers}");
    let total = |layers| {
        let recompute = Recomputation { layers, ..chosen.recompute };
        planned.memory(&Setting { recompute, ..chosen }, h200.bytes).unwrap().total()
    };
    assert!(total(layers) <= h200.bytes && total(layers - 1) > h200.bytes);
    let (small, config, attention) = self::recipe("llama32-1b-24gb");
    let planned = Planned { recipe: &small, config: &config, attention: &attention };
    let of = PROFILES.map(|gpu| planned.setting_on(gpu.bytes).unwrap().recompute.what);
    assert_eq!(of, [Recompute::None; 4]);
}

#[test]
fn every_recipe_fits_a_gpu_or_is_told_the_nearest_setting_that_does() {
    // Of each recipe: how it runs on an H200, an H100, an L40S and an RTX 4090.
    let exact = "";
    let nothing = "none";
    let int8 = "precision.state = \"int8_moments\"";
    let host = "precision.state = \"host_moments\", optimizer.in_backward = true";
    for (name, expected) in [
        ("smollm-135m", [exact; 4]),
        ("llama32-1b-24gb", [exact; 4]),
        ("llama3-8b-h200", [exact, int8, host, nothing]),
        ("llama3-8b", [exact, int8, host, nothing]),
    ] {
        let (recipe, config, attention) = recipe(name);
        let planned = Planned { recipe: &recipe, config: &config, attention: &attention };
        let setting = Setting::of(&recipe);
        for (gpu, expected) in PROFILES.iter().zip(expected) {
            let own = planned.memory(&setting, gpu.bytes).unwrap();
            let nearest = planned.nearest(&setting, gpu.bytes, None).unwrap();
            let told = match &nearest {
                None => nothing.to_owned(),
                Some((keys, memory)) => {
                    assert!(memory.total() <= gpu.bytes);
                    keys.clone()
                }
            };
            println!("{name} on {}: {told}, {nearest:?}, own {own:?}", gpu.name);
            assert_eq!(told == exact, own.total() <= gpu.bytes, "{name} on {}", gpu.name);
            assert!(
                if expected == exact { told == exact } else { told.contains(expected) },
                "{name} on {}: {told}, not {expected}",
                gpu.name
            );
        }
    }
}

#[test]
fn a_copy_of_what_is_saved_takes_the_bytes_that_are_kept() {
    let (mut recipe, config, attention) = recipe("llama3-8b");
    for (state, bytes) in [
        (ParameterState::Exact, 12),
        (ParameterState::HostMoments, 12),
        (ParameterState::Bf16Moments, 8),
        (ParameterState::Bf16, 6),
    ] {
        let planned = Planned { recipe: &recipe, config: &config, attention: &attention };
        let setting = Setting { state, ..Setting::of(&recipe) };
        assert_eq!(planned.save_copy(&setting).unwrap(), Some(bytes * 8_030_261_248), "{state:?}");
    }
    recipe.train.async_save = Some(false);
    let planned = Planned { recipe: &recipe, config: &config, attention: &attention };
    assert_eq!(planned.save_copy(&Setting::of(&recipe)).unwrap(), None);
}

#[test]
fn an_update_in_the_backward_pass_is_the_last_resort_and_takes_the_bytes_of_the_table() {
    let (mut recipe, config, attention) = recipe("llama3-8b-h200");
    recipe.train.accumulate = 1;
    let planned = Planned { recipe: &recipe, config: &config, attention: &attention };
    let setting = Setting::of(&recipe);
    // GiB of 8.03 billion parameters: weights with masters, gradients, moments.
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    for (state, in_backward, want) in [
        (ParameterState::Exact, false, 119.7),
        (ParameterState::Bf16Gradients, false, 104.7),
        (ParameterState::Bf16Moments, false, 89.7),
        (ParameterState::Int8Moments, false, 75.0),
        (ParameterState::Bf16, false, 59.8),
        // Three pieces of each moment are on the device.
        (ParameterState::HostMoments, false, 59.8 + 0.19),
        // The gradients of the embedding stay, 2 GiB, which the largest group has.
        (ParameterState::Int8Moments, true, 45.1 + 1.96),
    ] {
        let memory = planned.memory(&Setting { state, in_backward, ..setting }, 144 << 30).unwrap();
        let found = gib(memory.weights + memory.gradients + memory.optimizer);
        assert!((found - want).abs() < 0.06, "{state:?} {in_backward}: {found}, not {want}");
        let host = if state == ParameterState::HostMoments { 59.8 } else { 0.0 };
        assert!((gib(memory.host) - host).abs() < 0.06, "{state:?}: {}", memory.host);
    }
    // Where a step has one batch, activations lie in the memory of its gradients as far as they go: with
    // masters and f32 gradients all of them do, and nothing is computed again on an H200.
    let activations = |state, one_batch| {
        let setting = Setting { state, one_batch, recompute: Recompute::None.into(), ..setting };
        gib(planned.memory(&setting, PROFILES[0].bytes).unwrap().activations)
    };
    for (state, several, one) in
        [(ParameterState::Exact, 25.3, 0.3), (ParameterState::Bf16, 25.3, 11.5)]
    {
        let found = [false, true].map(|one_batch| activations(state, one_batch));
        assert!((found[0] - several).abs() < 0.3 && (found[1] - one).abs() < 0.3, "{found:?}");
    }
    // Nothing but updates in the backward pass makes it fit 52 GiB.
    let (keys, _) = planned.nearest(&setting, 52 << 30, None).unwrap().unwrap();
    assert!(keys.contains("optimizer.in_backward = true, optimizer.clip_norm = 0"), "{keys}");
    assert_eq!(planned.nearest(&setting, 8 << 30, None).unwrap(), None);
    // Gate and up again is what the table of activations says: 9 GiB of the kept, not 23.
    let kept = |recompute: Recompute| {
        let setting = Setting { recompute: recompute.into(), one_batch: false, ..setting };
        gib(planned.memory(&setting, 144 << 30).unwrap().activations)
    };
    let [none, attention, mlp, full] = Recompute::ALL.map(kept);
    for (found, want) in [(none - full, 21.0), (attention - full, 16.0), (mlp - full, 7.0)] {
        assert!((found - want).abs() < 0.7, "{found}, not {want}");
    }
}

#[test]
fn inputs_of_layers_go_to_the_host_before_less_is_kept_of_parameters_where_it_has_room() {
    let (mut recipe, config, attention) = recipe("llama3-8b-h200");
    (recipe.train.accumulate, recipe.train.batch_rows, recipe.data.len) = (4, 1, 8192);
    let planned = Planned { recipe: &recipe, config: &config, attention: &attention };
    let setting = Setting { recompute: Recompute::None.into(), ..Setting::of(&recipe) };
    let memory = |offload| {
        let recompute = Recomputation { offload, ..Recompute::Full.into() };
        planned.memory(&Setting { recompute, ..setting }, PROFILES[0].bytes).unwrap()
    };
    let [stay, away] = [Offload::None, Offload::LayerInputs].map(memory);
    // All inputs but the last, in bf16; the first and the second of the device are what is left.
    assert_eq!((stay.host, away.host), (0, 31 * 8192 * 4096 * 2));
    let (saved, input) = (stay.total() - away.total(), 8192 * 4096 * 2);
    assert!(saved >= 29 * input && saved <= 31 * input, "{saved} is {} inputs", saved / input);
    let nearest =
        |host| planned.nearest(&setting, PROFILES[0].bytes.min(away.total()), host).unwrap();
    let (keys, takes) = nearest(None).unwrap();
    assert_eq!(keys, "train.recompute = \"full\", train.offload = \"layer_inputs\"");
    assert_eq!(takes.host, away.host);
    assert_eq!(nearest(Some(away.host)).unwrap().0, keys);
    // What the host has no room for is not offered.
    let (keys, takes) = nearest(Some(away.host - 1)).unwrap();
    assert!(takes.host == 0 && keys.contains("precision.state"), "{keys}");
}

/// A model of 130 MiB in f32, whose checkpoint is 650: what a save and a load take does not grow with it.
#[test]
fn a_save_and_a_load_take_little_memory_beside_the_model() {
    let config = ModelConfig {
        vocab_size: 8192,
        hidden_size: 1024,
        intermediate_size: 2816,
        num_hidden_layers: 2,
        num_attention_heads: 16,
        num_key_value_heads: Some(16),
        head_dim: None,
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: None,
        rope_pairing: Default::default(),
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        architecture: Default::default(),
    };
    let attention = ProgramConfig { mask: "causal".into(), ..Default::default() }.into();
    let mut model = Model::new(config, &attention, 1).unwrap();
    let rule = Optimizer::default().rule();
    let elems = model.layout().trained();
    assert!(elems > 33_000_000);
    let moments: Moments = Moments { mean: vec![0.5; elems], square: vec![0.25; elems] };
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::bytes();
    let state = State::default();
    let snapshot = Snapshot {
        model: &model,
        attention: &attention,
        moments: &moments,
        state: &state,
        dtype: SaveDtype::F32,
        tokenizer: &tokenizer,
        origin: None,
        chat_template: None,
    };
    let Some(before) = peak_resident() else {
        println!("skipped: the system does not say what a process takes");
        return;
    };
    let place = save(dir.path(), &snapshot, 1).unwrap();
    let saved = peak_resident().unwrap() - before;
    load_weights(&place, &mut model, Checksums::Verify).unwrap();
    let loaded = peak_resident().unwrap() - before;
    // Moments are made anew, as a resume does.
    drop(moments);
    let (again, _) = load_state(&place, &mut model, &rule, Checksums::Verify).unwrap();
    let resumed = peak_resident().unwrap() - before;
    assert_eq!((again.mean[elems / 3], again.square[elems / 3]), (0.5, 0.25));
    println!("a save takes {saved} B, a load {loaded}, a resume {resumed}");
    assert!(saved < 8 << 20, "a save takes {saved} B");
    assert!(loaded < 8 << 20, "a load takes {loaded} B");
    assert!(resumed < 16 << 20, "a resume takes {resumed} B");
}
