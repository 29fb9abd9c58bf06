use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use foveate_nn::{ModelConfig, ProgramConfig};
use half::bf16;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use super::save::{Durable, SHARD_BYTES, create, save_with};
use super::*;
use crate::error::Earlier;

mod sharded;

const RULE: foveate_nn::Rule = foveate_nn::Rule::AdamW(foveate_nn::AdamW {
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
});

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 257,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: None,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        rope_pairing: Default::default(),
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        architecture: Default::default(),
    }
}

fn attention() -> AttentionConfig {
    ProgramConfig { mask: "causal & document".to_owned(), ..Default::default() }.into()
}

fn model(seed: u64) -> Model {
    Model::new(config(), &attention(), seed).unwrap()
}

struct SavedRun {
    model: Model,
    attention: AttentionConfig,
    moments: Moments,
    state: State,
    tokenizer: Tokenizer,
}

impl SavedRun {
    fn new(seed: u64, step: u64) -> Self {
        let model = model(seed);
        let mut moments = Moments::zeros(model.layout().elems());
        for (i, p) in model.parameters().iter().enumerate() {
            for (j, at) in p.place.clone().enumerate() {
                moments.mean[at] = (i * 31 + j) as f32 * 1e-3;
                moments.square[at] = ((i + 7) * 31 + j) as f32 * 1e-3;
            }
        }
        let state = State { step, tokens: 99, fingerprint: u64::MAX - 3, ..Default::default() };
        Self { model, attention: attention(), moments, state, tokenizer: Tokenizer::bytes() }
    }

    fn snapshot(&self, dtype: SaveDtype) -> Snapshot<'_> {
        Snapshot {
            model: &self.model,
            attention: &self.attention,
            moments: &self.moments,
            state: &self.state,
            dtype,
            tokenizer: &self.tokenizer,
            origin: None,
            chat_template: None,
        }
    }
}

/// The newest checkpoint under `folder`, as an error of a run tells of it.
fn verified(folder: &Path) -> Option<Earlier> {
    latest(folder).map(|path| Earlier { path, verified: true })
}

#[test]
fn all_is_removed_with_what_was_set_aside_and_nothing_of_others() {
    let place = tempfile::tempdir().unwrap();
    let named = |name: &str| place.path().join(name);
    for name in ["step-000004", "step-000008", "notes"] {
        std::fs::create_dir(named(name)).unwrap();
        std::fs::write(named(name).join(CONFIG), "{}").unwrap();
    }
    set_aside(place.path(), 8, &named("step-000008")).unwrap();
    assert!(named("aside-step-000008").exists() && !named("step-000008").exists());
    remove_all(place.path()).unwrap();
    let left = std::fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["notes"]);
}

#[test]
fn what_was_saved_is_loaded_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let run = SavedRun::new(1, 20);
    let place = save(dir.path(), &run.snapshot(SaveDtype::Bf16), 2).unwrap();
    assert_eq!(place, dir.path().join("step-000020"));
    let read = read_config(&place, Checksums::Verify).unwrap();
    assert_eq!((read.model.clone(), read.attention), (config(), attention()));
    assert!(read.tokenizer.is_bytes());
    let mut other = model(2);
    let (moments, state) = load_state(&place, &mut other, &RULE, Checksums::Verify).unwrap();
    assert_eq!((moments, state), (run.moments.clone(), run.state.clone()));
    assert_eq!(other.weights(), run.model.weights());
    let mut rounded = model(3);
    assert!(load_weights(&place, &mut rounded, Checksums::Verify).unwrap().is_empty());
    let want: Vec<f32> = run.model.weights().iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    assert_eq!(rounded.weights(), want);
}

#[test]
fn a_checkpoint_of_the_first_trainer_is_loaded_bit_for_bit() {
    // As it was written: each tensor by its own name, and the order of a product in the
    // configuration.
    let dir = tempfile::tempdir().unwrap();
    let run = SavedRun::new(1, 20);
    let place = save(dir.path(), &run.snapshot(SaveDtype::F32), 2).unwrap();
    let path = place.join(CONFIG);
    let mut json = read_json(&path).unwrap();
    json["foveate"]["attention"]["qkv_order"] = json!("interleaved");
    fs::write(&path, json.to_string()).unwrap();
    let values = |p: &foveate_nn::Parameter, scale: f32| -> Vec<u8> {
        (0..p.place.len()).flat_map(|i| (scale * (i as f32 - 40.0)).to_le_bytes()).collect()
    };
    let parameters = run.model.parameters();
    let (mut weights, mut masters) = (Vec::new(), Vec::new());
    for p in parameters {
        weights.push((p.name.clone(), p, values(p, 0.5)));
        for (kind, scale) in [("weight", 0.5), ("mean", 0.25), ("square", 2.0)] {
            masters.push((format!("{kind}:{}", p.name), p, values(p, scale)));
        }
    }
    for (name, tensors) in [(SINGLE, weights), (MASTERS, masters)] {
        let views = tensors.iter().map(|(name, p, bytes)| {
            let shape = p.shape.clone();
            (name, TensorView::new(Dtype::F32, shape, bytes).unwrap())
        });
        fs::write(place.join(name), safetensors::serialize(views, None).unwrap()).unwrap();
    }
    let read = read_config(&place, Checksums::Skip).unwrap();
    assert_eq!(read.attention, attention());
    let (mut first, mut resumed) = (model(2), model(3));
    assert!(load_weights(&place, &mut first, Checksums::Skip).unwrap().is_empty());
    let (moments, _) = load_state(&place, &mut resumed, &RULE, Checksums::Skip).unwrap();
    assert_eq!(first.weights(), resumed.weights());
    for p in parameters {
        let found = [resumed.weights(), &moments.mean, &moments.square];
        for (array, scale) in found.into_iter().zip([0.5, 0.25, 2.0]) {
            let bytes: Vec<u8> =
                array[p.place.clone()].iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(bytes, values(p, scale), "{}", p.name);
        }
    }
}

#[test]
fn large_models_are_saved_in_shards_with_an_index() {
    let dir = tempfile::tempdir().unwrap();
    let run = SavedRun::new(1, 5);
    let snapshot = run.snapshot(SaveDtype::F32);
    let place = save_with(dir.path(), &snapshot, 1, &create, 4000).unwrap();
    assert!(place.join(INDEX).exists() && !place.join(SINGLE).exists());
    let mut other = model(2);
    load_weights(&place, &mut other, Checksums::Verify).unwrap();
    assert_eq!(other.weights(), run.model.weights());
    let mut resumed = model(3);
    let (moments, _) = load_state(&place, &mut resumed, &RULE, Checksums::Verify).unwrap();
    assert_eq!((resumed.weights(), &moments), (run.model.weights(), snapshot.moments));
    assert!(!place.join(MASTERS).exists(), "masters are in several files, too");
    let shard = fs::read_dir(&place).unwrap().flatten().map(|e| e.path());
    let shard = shard.into_iter().find(|p| p.to_string_lossy().contains("/model-")).unwrap();
    fs::remove_file(&shard).unwrap();
    let told = load_weights(&place, &mut other, Checksums::Verify).unwrap_err().to_string();
    assert!(told.contains(&shard.display().to_string()), "{told}");
    assert!(told.contains("could not be read"), "{told}");
}

#[test]
fn the_newest_checkpoints_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    for step in [3, 10, 200] {
        save(dir.path(), &SavedRun::new(1, step).snapshot(SaveDtype::F32), 2).unwrap();
    }
    let steps: Vec<u64> = list(dir.path()).into_iter().map(|(s, _)| s).collect();
    assert_eq!(steps, [10, 200]);
    assert_eq!(latest(dir.path()), Some(dir.path().join("step-000200")));
}

/// A file on a disk that has `left` bytes.
struct Filling {
    file: File,
    left: Arc<AtomicUsize>,
}

impl Write for Filling {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let fits = bytes.len().min(self.left.load(Ordering::Relaxed));
        if fits == 0 && !bytes.is_empty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.left.fetch_sub(fits, Ordering::Relaxed);
        self.file.write_all(&bytes[..fits]).map(|()| fits)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Durable for Filling {
    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_all()
    }
}

#[test]
fn a_disk_that_fills_up_leaves_the_earlier_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let first = save(dir.path(), &SavedRun::new(1, 1).snapshot(SaveDtype::F32), 2).unwrap();
    let sizes = fs::read_dir(&first).unwrap().map(|e| e.unwrap().metadata().unwrap().len());
    let all = sizes.sum::<u64>() as usize;
    for room in [0, 100, all / 5, all / 2, all - 1] {
        let left = Arc::new(AtomicUsize::new(room));
        let full = |path: &Path| {
            let file = File::create(path)?;
            Ok(Box::new(Filling { file, left: Arc::clone(&left) }) as Box<dyn Durable>)
        };
        let later = SavedRun::new(2, 2);
        let snapshot = later.snapshot(SaveDtype::F32);
        let told = save_with(dir.path(), &snapshot, 2, &full, SHARD_BYTES).unwrap_err();
        let resumable = told.of_run(verified(dir.path())).to_string();
        let wanted = format!("continue with --resume: {} is intact", first.display());
        assert!(resumable.contains(&wanted), "{resumable}");
        assert_eq!(latest(dir.path()), Some(first.clone()));
        load_state(&first, &mut model(5), &RULE, Checksums::Verify).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing half-written stays");
    }
}

#[test]
fn a_disk_that_is_full_at_the_first_save_advises_no_resume() {
    let dir = tempfile::tempdir().unwrap();
    let run = SavedRun::new(1, 1);
    let full =
        |_: &Path| -> io::Result<Box<dyn Durable>> { Err(io::ErrorKind::StorageFull.into()) };
    let told = save_with(dir.path(), &run.snapshot(SaveDtype::F32), 2, &full, SHARD_BYTES);
    let told = told.unwrap_err().of_run(verified(dir.path())).to_string();
    assert!(told.contains("start again with --start-over") && !told.contains("resume"), "{told}");
}

/// Where there is no memory to write, there may be none to look for checkpoints.
#[test]
fn a_save_without_memory_says_how_the_run_goes_on_with_and_without_a_checkpoint_in_sight() {
    let dir = tempfile::tempdir().unwrap();
    let [run, later] = [1, 2].map(|step| SavedRun::new(step, step));
    let none =
        |_: &Path| -> io::Result<Box<dyn Durable>> { Err(io::ErrorKind::OutOfMemory.into()) };
    let told = || {
        let saved = save_with(dir.path(), &later.snapshot(SaveDtype::F32), 2, &none, SHARD_BYTES);
        saved.unwrap_err().of_run(verified(dir.path())).to_string()
    };
    let unseen = "; give this process more memory and continue with --resume if a checkpoint was saved, else \
                  start again with --start-over";
    assert!(told().ends_with(unseen), "{}", told());
    let first = save(dir.path(), &run.snapshot(SaveDtype::F32), 1).unwrap();
    let seen = format!(
        "; give this process more memory and continue with --resume: {} is intact",
        first.display()
    );
    assert!(told().ends_with(&seen), "{}", told());
}

#[test]
fn three_flipped_bytes_are_found_in_every_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let run = SavedRun::new(1, 1);
    let place = save(dir.path(), &run.snapshot(SaveDtype::Bf16), 1).unwrap();
    let file = place.join(SINGLE);
    let whole = fs::read(&file).unwrap();
    let start = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut target = model(2);
    let mut at = start;
    for p in run.model.parameters() {
        let mut bytes = whole.clone();
        bytes[at..at + 3].iter_mut().for_each(|b| *b ^= 0x10);
        fs::write(&file, &bytes).unwrap();
        let told = load_weights(&place, &mut target, Checksums::Verify).unwrap_err().to_string();
        let wanted = format!("model.safetensors: tensor `{}` does not match", p.name);
        assert!(told.contains(&wanted), "{told}");
        load_weights(&place, &mut target, Checksums::Skip).unwrap();
        at += 2 * p.place.len();
    }
    assert_eq!(at, whole.len());
    fs::write(&file, &whole).unwrap();
}

#[test]
fn a_flipped_byte_in_config_json_is_found_by_whatever_reads_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let place = save(dir.path(), &SavedRun::new(1, 1).snapshot(SaveDtype::F32), 1).unwrap();
    let file = place.join(CONFIG);
    let whole = fs::read_to_string(&file).unwrap();
    // A digit of the base of the rotary angles becomes another one.
    let field = whole.find("rope_theta").unwrap();
    let at = field + whole[field..].find('0').unwrap();
    let mut flipped = whole.clone().into_bytes();
    flipped[at] ^= 1;
    fs::write(&file, &flipped).unwrap();
    let mut target = model(2);
    for told in [
        read_config(&place, Checksums::Verify).map(drop),
        load_weights(&place, &mut target, Checksums::Verify).map(drop),
        load_state(&place, &mut target, &RULE, Checksums::Verify).map(drop),
    ] {
        let told = told.unwrap_err().to_string();
        assert!(told.contains("config.json: does not match its checksum"), "{told}");
    }
    read_config(&place, Checksums::Skip).unwrap();
    // Earlier versions took no checksum of it.
    let sums = place.join("checksums.json");
    let mut earlier = read_json(&sums).unwrap();
    earlier["files"].as_object_mut().unwrap().remove(CONFIG).unwrap();
    fs::write(&sums, earlier.to_string()).unwrap();
    read_config(&place, Checksums::Verify).unwrap();
    load_weights(&place, &mut target, Checksums::Verify).unwrap();
}

#[test]
fn checksums_that_are_gone_are_missed_but_in_checkpoints_of_other_tools() {
    let dir = tempfile::tempdir().unwrap();
    let place = save(dir.path(), &SavedRun::new(1, 1).snapshot(SaveDtype::F32), 1).unwrap();
    fs::remove_file(place.join("checksums.json")).unwrap();
    let mut target = model(2);
    let told = load_weights(&place, &mut target, Checksums::Verify).unwrap_err().to_string();
    assert!(
        told.ends_with(
            "checksums.json: is missing; put it back, or pass --skip-checksums to do \
                            without"
        ),
        "{told}"
    );
    load_weights(&place, &mut target, Checksums::Skip).unwrap();
    let mut config = read_json(&place.join(CONFIG)).unwrap();
    config.as_object_mut().unwrap().remove("foveate").unwrap();
    fs::write(place.join(CONFIG), config.to_string()).unwrap();
    load_weights(&place, &mut target, Checksums::Verify).unwrap();
}

#[test]
fn a_file_of_a_checkpoint_that_is_empty_is_named_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let run = SavedRun::new(1, 1);
    let place = save(dir.path(), &run.snapshot(SaveDtype::F32), 1).unwrap();
    for name in [CONFIG, SINGLE, MASTERS, STATE, "checksums.json"] {
        let file = place.join(name);
        let whole = fs::read(&file).unwrap();
        fs::write(&file, "").unwrap();
        let mut target = model(2);
        let read = read_config(&place, Checksums::Verify)
            .and_then(|_| load_weights(&place, &mut target, Checksums::Verify))
            .and_then(|_| load_state(&place, &mut target, &RULE, Checksums::Verify).map(drop));
        let told = read.unwrap_err().to_string();
        let remedy = told.contains("restore the file, or use another checkpoint")
            || told.contains("restore it, use another checkpoint, or pass --skip-checksums");
        assert!(told.starts_with(&file.display().to_string()) && remedy, "{told}");
        // A pipe that nobody writes to is not waited for.
        fs::remove_file(&file).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&file).status();
        if made.is_ok_and(|status| status.success()) {
            let read = read_config(&place, Checksums::Verify)
                .and_then(|_| load_weights(&place, &mut target, Checksums::Verify))
                .and_then(|_| load_state(&place, &mut target, &RULE, Checksums::Verify).map(drop));
            let told = read.unwrap_err().to_string();
            assert!(told.ends_with("it is a pipe or a device, not a file"), "{told}");
            fs::remove_file(&file).unwrap();
        }
        fs::write(&file, whole).unwrap();
    }
    let tokenizer = dir.path().join("tokenizer.json");
    fs::write(&tokenizer, "").unwrap();
    let told = read_tokenizer(&tokenizer, None, None).unwrap_err().to_string();
    assert!(told.ends_with("is empty; put the model's own tokenizer.json there"), "{told}");
}

#[test]
fn weights_that_the_saved_dtype_cannot_hold_are_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = SavedRun::new(1, 1);
    let fifth = run.model.parameters()[2].place.start + 5;
    run.model.weights_mut()[fifth] = 7e4;
    let told = save(dir.path(), &run.snapshot(SaveDtype::F16), 1).unwrap_err().to_string();
    assert!(told.contains("q_proj.weight` is 70000 at element 5, past the range of F16"), "{told}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    save(dir.path(), &run.snapshot(SaveDtype::Bf16), 1).unwrap();
}

#[test]
fn a_process_that_died_while_saving_is_cleaned_up_after() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(".writing-000007")).unwrap();
    fs::write(dir.path().join(".writing-000007/config.json"), "{").unwrap();
    assert_eq!(latest(dir.path()), None);
    save(dir.path(), &SavedRun::new(1, 8).snapshot(SaveDtype::F32), 1).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn damage_is_named_with_file_and_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let run = SavedRun::new(1, 1);
    let place = save(dir.path(), &run.snapshot(SaveDtype::F32), 1).unwrap();
    let file = place.join(SINGLE);
    let whole = fs::read(&file).unwrap();
    let mut target = model(2);
    let mut told = |bytes: &[u8]| {
        fs::write(&file, bytes).unwrap();
        let told = load_weights(&place, &mut target, Checksums::Verify).unwrap_err().to_string();
        assert!(told.contains("model.safetensors"), "{told}");
        told
    };
    assert!(told(&whole[..whole.len() - 7]).contains("cut short"));
    assert!(told(&whole[..4]).contains("cut short"));
    let mut lying = whole.clone();
    lying[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(told(&lying).contains("claims a header of"));
    let text = String::from_utf8_lossy(&whole[8..2000]).into_owned();
    let start = 8 + text.find("[16,16]").unwrap();
    let mut wrong = whole.clone();
    wrong[start..start + 7].copy_from_slice(b"[16,17]");
    let told_wrong = told(&wrong);
    assert!(told_wrong.contains("lies about tensor `model."), "{told_wrong}");
    let mut renamed = whole.clone();
    let at = 8 + text.find("model.norm.weight").unwrap_or_else(|| text.find("q_proj").unwrap());
    renamed[at] = b'x';
    let told_renamed = told(&renamed);
    assert!(told_renamed.contains("is not one of this model's"), "{told_renamed}");
    fs::write(&file, &whole).unwrap();
    let other = ModelConfig { intermediate_size: 32, ..config() };
    let mut other = Model::new(other, &attention(), 1).unwrap();
    let told = load_weights(&place, &mut other, Checksums::Verify).unwrap_err().to_string();
    assert!(told.contains("mlp.") && told.contains("but config.json makes it"), "{told}");
}

#[test]
fn configurations_that_are_not_supported_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let told = |text: &str| {
        fs::write(dir.path().join("config.json"), text).unwrap();
        read_config(dir.path(), Checksums::Verify).unwrap_err().to_string()
    };
    assert!(told("{").contains("is not the JSON it should be"));
    assert!(told(r#"{"model_type": "gpt2"}"#).contains("model_type is `gpt2`"));
    assert!(told(r#"{"hidden_act": "gelu"}"#).contains("hidden_act is \"gelu\""));
    assert!(told(r#"{"vocab_size": 3}"#).contains("does not describe a llama model"));
    let kinds = told(r#"{"model_type": "gemma3"}"#);
    assert!(kinds.contains("`gemma3`") && kinds.contains("gemma3_text"), "{kinds}");
    let of = |family: &str, field: &str| {
        told(&format!(
            r#"{{"model_type": "{family}", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8,
                "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4, {field}}}"#
        ))
    };
    for (family, field, expected) in [
        (
            "llama",
            r#""sliding_window": 4"#,
            "field `sliding_window` is not known for model_type `llama`",
        ),
        ("qwen3", r#""num_experts": 8"#, "field `num_experts` is not known"),
        ("qwen3", r#""attention_bias": true"#, "attention_bias is true"),
        ("qwen2", r#""attention_dropout": 0.1"#, "attention_dropout is 0.1"),
        ("qwen2", r#""layer_types": ["full_attention", "linear"]"#, "layer_types has `linear`"),
        ("qwen2", r#""layer_types": ["full_attention"]"#, "a kind for each of 2 layers"),
        ("smollm3", r#""no_rope_layers": [1, 2]"#, "no_rope_layers is [1,2]"),
        ("gemma2", r#""hidden_activation": "gelu""#, "hidden_activation is \"gelu\""),
        ("gemma2", r#""sliding_window": 0"#, "sliding_window is 0"),
        ("gemma2", r#""final_logit_softcapping": -1"#, "final_logit_softcapping: is -1"),
        ("gemma2", r#""attn_logit_softcapping": 0"#, "attn_logit_softcapping is 0"),
        ("gemma3_text", r#""query_pre_attn_scalar": 0"#, "query_pre_attn_scalar is 0"),
        ("phi3", r#""partial_rotary_factor": 0.3"#, "partial_rotary_factor: is 0.3"),
        (
            "phi3",
            r#""rope_scaling": {"type": "longrope", "short_factor": [1]}"#,
            "short_factor: has 1",
        ),
        ("mistral", r#""quantization_config": {"bits": 4}"#, "its weights are quantised"),
    ] {
        let told = of(family, field);
        assert!(told.contains(expected), "{told}, not {expected}");
    }
    fs::remove_file(dir.path().join("config.json")).unwrap();
    let missing = read_config(dir.path(), Checksums::Verify).unwrap_err().to_string();
    assert!(missing.contains("config.json: could not be read"), "{missing}");
}

#[test]
fn tokenizer_files_of_the_origin_go_along_and_a_given_template_wins() {
    let (origin, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let special = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "a"}"#;
    fs::write(origin.path().join("tokenizer_config.json"), special).unwrap();
    for name in ["config.json", "generation_config.json"] {
        fs::write(origin.path().join(name), "{}").unwrap();
    }
    let run = SavedRun::new(1, 1);
    let mut snapshot = run.snapshot(SaveDtype::F32);
    snapshot.origin = Some(origin.path());
    let place = save(dir.path(), &snapshot, 2).unwrap();
    assert!(place.join("generation_config.json").exists());
    let config = read_config(&place, Checksums::Verify).unwrap();
    assert_eq!(config.chat_template.as_deref(), Some("a"));
    assert_eq!((config.special.bos.as_str(), config.special.eos.as_str()), ("<s>", "</s>"));
    let later = SavedRun::new(1, 2);
    let mut snapshot = later.snapshot(SaveDtype::F32);
    snapshot.origin = Some(origin.path());
    snapshot.chat_template = Some("{{ bos_token }}b");
    let config = read_config(&save(dir.path(), &snapshot, 2).unwrap(), Checksums::Verify).unwrap();
    assert_eq!(config.template().unwrap().text(&[], false, &mut || false).unwrap(), "<s>b");
}

#[test]
fn rotary_settings_are_read_from_the_newer_key_too() {
    let dir = tempfile::tempdir().unwrap();
    let place = save(dir.path(), &SavedRun::new(1, 1).snapshot(SaveDtype::F32), 2).unwrap();
    let path = place.join("config.json");
    let mut json = read_json(&path).unwrap();
    let map = json.as_object_mut().unwrap();
    map.remove("rope_theta");
    map.insert(
        "rope_parameters".to_owned(),
        json!({ "rope_type": "linear", "factor": 2.0, "rope_theta": 5e5 }),
    );
    fs::write(&path, json.to_string()).unwrap();
    let model = read_config(&place, Checksums::Skip).unwrap().model;
    assert_eq!(model.rope_theta, 5e5);
    assert_eq!(model.rope_scaling.unwrap().rope_type, "linear");
}

/// Transformers refuses a kind of scaling without its factor, and warns of a length that is not whole.
#[test]
fn scalings_of_rotations_are_written_as_others_read_them() {
    for (scaling, written) in [
        (json!({ "rope_type": "linear" }), json!({ "rope_type": "linear", "factor": 1.0 })),
        (json!({ "rope_type": "default" }), json!({ "rope_type": "default" })),
        (
            json!({ "rope_type": "llama3", "factor": 1, "low_freq_factor": 1, "high_freq_factor": 4,
                "original_max_position_embeddings": 8192 }),
            json!({ "rope_type": "llama3", "factor": 1.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 }),
        ),
    ] {
        let run = SavedRun::new(1, 1);
        let rope_scaling = Some(serde_json::from_value(scaling).unwrap());
        let config = ModelConfig { rope_scaling, ..run.model.config().clone() };
        let model = Model::new(config.clone(), &run.attention, 1).unwrap();
        let (dir, run) = (tempfile::tempdir().unwrap(), SavedRun { model, ..run });
        let place = save(dir.path(), &run.snapshot(SaveDtype::F32), 2).unwrap();
        assert_eq!(read_json(&place.join("config.json")).unwrap()["rope_scaling"], written);
        assert_eq!(read_config(&place, Checksums::Verify).unwrap().model, config);
    }
}

#[test]
fn the_tokens_that_end_a_document_are_those_named_beside_its_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let missing = read_tokenizer(&path, None, None).unwrap_err().to_string();
    assert!(missing.ends_with("tokenizer.json: is missing; put the model's tokenizer.json there"));
    let vocab = json!({ "a": 0, "<s>": 1, "</s>": 2 });
    let model = json!({ "type": "WordLevel", "vocab": vocab, "unk_token": "a" });
    fs::write(&path, json!({ "version": "1.0", "model": model }).to_string()).unwrap();
    let ends = |bos, eos| {
        let tokenizer = read_tokenizer(&path, bos, eos).unwrap();
        (tokenizer.bos(), tokenizer.eos())
    };
    assert_eq!(ends(None, None), (None, None));
    let named = json!({ "bos_token": "<s>", "eos_token": { "content": "</s>" } });
    fs::write(dir.path().join("tokenizer_config.json"), named.to_string()).unwrap();
    assert_eq!(ends(None, None), (Some(1), Some(2)));
    assert_eq!(ends(Some(0), None), (Some(0), Some(2)));
}

#[test]
fn of_several_chat_templates_the_default_one_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let place = save(dir.path(), &SavedRun::new(1, 1).snapshot(SaveDtype::F32), 2).unwrap();
    let of = |name: &str| json!({ "name": name, "template": format!("{name}!") });
    let config = json!({ "chat_template": [of("tool_use"), of("default")] });
    fs::write(place.join("tokenizer_config.json"), config.to_string()).unwrap();
    assert_eq!(
        read_config(&place, Checksums::Verify).unwrap().chat_template.as_deref(),
        Some("default!")
    );
}

#[test]
fn what_is_no_folder_of_a_checkpoint_says_what_it_is_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let told = |path: &Path| read_config(path, Checksums::Verify).unwrap_err().to_string();
    for (name, wanted) in [
        ("model.gguf", "is a GGUF file, which is not read; give the folder"),
        ("model.safetensors", "is a file; give the folder that holds it"),
    ] {
        fs::write(dir.path().join(name), "GGUF").unwrap();
        assert!(told(&dir.path().join(name)).contains(wanted), "{name}");
    }
    let holds = told(dir.path());
    assert!(holds.contains("holds a GGUF file, model.gguf, which is not read; give"), "{holds}");
    let hub = told(Path::new("someone/Tiny-1B"));
    assert!(hub.contains("run `hf download someone/Tiny-1B --local-dir Tiny-1B`"), "{hub}");
    let none = told(&dir.path().join("none"));
    assert!(none.contains("does not exist; give the folder of a checkpoint"), "{none}");
    #[cfg(unix)]
    {
        let device = told(Path::new("/dev/null"));
        assert!(device.contains("is no folder; give the folder of a checkpoint"), "{device}");
    }
    let listed = |path: &Path| contents(path, Checksums::Verify, false).unwrap_err().to_string();
    assert!(listed(&dir.path().join("model.safetensors")).contains("is a file; give the folder"));
    let run = tempfile::tempdir().unwrap();
    fs::create_dir_all(run.path().join("checkpoints/step-000002")).unwrap();
    fs::write(run.path().join("checkpoints/step-000002").join(STATE), "{}").unwrap();
    for told in [told(run.path()), listed(run.path())] {
        assert!(told.contains("is no checkpoint; the newest one in it is"), "{told}");
    }
}
