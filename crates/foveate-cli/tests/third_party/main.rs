//! Checkpoints that other tools wrote: read, measured, continued, fine-tuned and written back,
//! each time against an f64 forward pass that shares nothing with the crates.

mod folder;
mod oracle;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use folder::{BEGIN, END, Sizes, Stored, TURN, Weights};
use serde_json::{Value, json};

const TEXTS: [&str; 2] = ["the quick fox saw the other fox.\n", "howl over the wörld, then row"];

struct Place(tempfile::TempDir);

impl Place {
    /// A folder with a checkpoint `base` of `sizes`, whose weights `write` stores and whose
    /// `config.json` has been through `change`.
    fn new(sizes: &Sizes, write: impl Fn(&Path, &[Stored]), change: impl Fn(&mut Value)) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        let base = place.path("base");
        std::fs::create_dir(&base).unwrap();
        let mut config = folder::config(sizes);
        change(&mut config);
        std::fs::write(base.join("config.json"), format!("{config:#}")).unwrap();
        folder::write_tokenizer(&base);
        write(&base, &folder::random(sizes, SEED));
        for (i, text) in TEXTS.iter().enumerate() {
            std::fs::write(place.path(&format!("{i}.txt")), text).unwrap();
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
        command.args(args).current_dir(self.0.path()).stdin(Stdio::null()).output().unwrap()
    }

    /// The last line of JSON of what must succeed.
    fn json(&self, args: &[&str]) -> Value {
        let done = self.run(args);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let text = String::from_utf8(done.stdout).unwrap();
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }

    /// The error line of what must fail.
    fn told(&self, args: &[&str]) -> String {
        let done = self.run(args);
        let text = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{text}");
        text.lines().find(|l| l.starts_with("error: ")).expect("an error line").to_owned()
    }

    fn tokenizer(&self) -> tokenizers::Tokenizer {
        tokenizers::Tokenizer::from_file(self.path("base/tokenizer.json")).unwrap()
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        self.tokenizer().encode(text, false).unwrap().get_ids().to_vec()
    }

    /// Holds `eval` and `generate` of the checkpoint `name` to the oracle.
    fn agrees(&self, name: &str, sizes: &Sizes, weights: &Weights) {
        let mut losses = Vec::new();
        for text in TEXTS {
            // As the tokenizer's own files say: a text is begun, and not ended.
            let tokens = [vec![BEGIN], self.encode(text)].concat();
            losses.extend(oracle::losses(sizes, weights, &tokens));
        }
        let want = losses.iter().sum::<f64>() / losses.len() as f64;
        let found = self.json(&["eval", name, "0.txt", "1.txt", "--json"]);
        assert_eq!(found["tokens"], losses.len());
        let loss = found["loss"].as_f64().unwrap();
        assert!((loss - want).abs() < 2e-5 * want, "{loss}, but the oracle has {want}");

        let prompt = "the other ";
        let read = [vec![BEGIN], self.encode(prompt)].concat();
        let written = oracle::greedy(sizes, weights, &read, 24, &[END, TURN]);
        let want = self.tokenizer().decode(&written, true).unwrap();
        let greedy = ["--prompt", prompt, "--temperature", "0", "--max-tokens", "24", "--json"];
        let found = self.json(&[&["generate", name][..], &greedy].concat());
        assert_eq!((&found["text"], &found["token_ids"]), (&json!(want), &json!(written)));
        assert_eq!(found["prompt_token_ids"], json!(read));
    }
}

const SEED: u64 = 11;

fn sizes() -> Sizes {
    Sizes {
        hidden: 48,
        wide: 56,
        layers: 2,
        heads: 6,
        kv_heads: 2,
        dim: 8,
        tied: true,
        theta: 10_000.0,
        llama3: None,
    }
}

fn weights(sizes: &Sizes) -> Weights {
    folder::widened(&folder::random(sizes, SEED))
}

#[test]
fn a_tied_bf16_checkpoint_in_one_file_gives_the_oracles_losses_and_words() {
    let sizes = sizes();
    let place = Place::new(&sizes, folder::write_single, |_| ());
    place.agrees("base", &sizes, &weights(&sizes));
}

#[test]
fn an_untied_checkpoint_in_shards_with_llama3_rope_gives_the_oracles_losses_and_words() {
    let sizes = Sizes {
        tied: false,
        dim: 12,
        kv_heads: 3,
        theta: 500.0,
        llama3: Some([4.0, 1.0, 4.0, 32.0]),
        ..sizes()
    };
    let place = Place::new(
        &sizes,
        |folder, stored| folder::write_shards(folder, stored, 3),
        |config| {
            config["head_dim"] = json!(12);
            config["eos_token_id"] = json!([END, TURN]);
            // Some versions write the kind under both of its names.
            config["rope_scaling"] = json!({
                "factor": 4.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 32, "rope_type": "llama3", "type": "llama3",
                "mscale": 1.0
            });
        },
    );
    place.agrees("base", &sizes, &weights(&sizes));
    std::fs::remove_file(place.path("base/model-00002-of-00003.safetensors")).unwrap();
    let told = place.told(&["eval", "base", "0.txt"]);
    assert!(told.contains("model-00002-of-00003.safetensors: could not be read"), "{told}");
}

#[test]
fn generation_stops_at_every_token_that_ends_a_text() {
    let sizes = sizes();
    let place = Place::new(&sizes, folder::write_single, |_| ());
    let greedy = |name: &str| {
        let args = ["generate", name, "--prompt", "the", "--temperature", "0", "--json"];
        place.json(&[&args[..], &["--max-tokens", "30"]].concat())["tokens"].as_u64().unwrap()
    };
    assert_eq!(greedy("base"), 30);
    // A token that is written is declared to end a text, in one file or the other.
    let read = [vec![BEGIN], place.encode("the")].concat();
    let written = oracle::greedy(&sizes, &weights(&sizes), &read, 30, &[]);
    let fresh = |&at: &usize| !written[..at].contains(&written[at]);
    let at = (1..30).rfind(fresh).expect("not all tokens are the same");
    for file in ["config.json", "generation_config.json"] {
        let path = place.path("base").join(file);
        let before = std::fs::read_to_string(&path).unwrap_or("{}".to_owned());
        let mut config: Value = serde_json::from_str(&before).unwrap();
        config["eos_token_id"] = json!([END, written[at]]);
        std::fs::write(&path, config.to_string()).unwrap();
        assert_eq!(greedy("base"), at as u64, "{file}");
        std::fs::write(&path, before).unwrap();
    }
}

#[test]
fn a_checkpoint_is_fine_tuned_on_chat_data_and_written_as_others_read_it() {
    let sizes = sizes();
    let place = Place::new(&sizes, folder::write_single, |config| {
        // The newer names of two fields.
        config.as_object_mut().unwrap().remove("torch_dtype");
        config["dtype"] = json!("bfloat16");
        let theta = config.as_object_mut().unwrap().remove("rope_theta").unwrap();
        config["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": theta });
        config["pad_token_id"] = json!(END);
        config["eos_token_id"] = json!([END, TURN]);
    });
    let chat = json!({ "messages": [
        { "role": "user", "content": " who runs over the row? " },
        { "role": "assistant", "content": "the quick fox" },
    ]});
    std::fs::write(place.path("chat.jsonl"), format!("{chat}\n").repeat(4)).unwrap();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/finetune-chat.toml");
    let mut args = vec!["train".to_owned(), recipe.display().to_string(), "--json".to_owned()];
    let root = place.path("").display().to_string();
    for set in [
        format!("model.checkpoint={root}base"),
        format!("data.root={root}"),
        "data.files=[\"chat.jsonl\"]".to_owned(),
        "data.len=60".to_owned(),
        "data.held_out=0.0".to_owned(),
        "train.steps=6".to_owned(),
        "train.accumulate=1".to_owned(),
        "optimizer.lr=1e-3".to_owned(),
        "schedule.warmup_steps=0".to_owned(),
        "run.dir=tuned".to_owned(),
    ] {
        args.extend(["--set".to_owned(), set]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let tuned = place.json(&args);

    // The first step's loss is that of the assistant's words alone, in the template's text.
    let before = "<|begin|><|user|>who runs over the row?<|turn|><|assistant|>";
    let (head, said) = (place.encode(before), place.encode("the quick fox<|turn|>"));
    // The template's token ends a text, so no other one follows.
    let tokens = [head.clone(), said].concat();
    let losses = oracle::losses(&sizes, &weights(&sizes), &tokens);
    let learned = &losses[head.len() - 1..];
    let want = learned.iter().sum::<f64>() / learned.len() as f64;
    let log = std::fs::read_to_string(place.path("tuned/metrics.jsonl")).unwrap();
    let records = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let first = records.into_iter().find(|record| record["kind"] == "step").unwrap();
    let loss = first["loss"].as_f64().unwrap();
    assert!((loss - want).abs() < 2e-5 * want, "{loss}, but the oracle has {want}");
    assert!(tuned["train_loss"].as_f64().unwrap() < 0.9 * loss, "{tuned}");

    // What was saved is what any reader of the format finds, and what was read stays.
    let checkpoint = tuned["checkpoint"].as_str().unwrap();
    let saved = place.path(checkpoint);
    let bytes = std::fs::read(saved.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let of = |(name, shape, _): &Stored| {
        let tensor = file.tensor(name).unwrap();
        assert_eq!((tensor.shape(), tensor.dtype()), (&shape[..], safetensors::Dtype::BF16));
        (name.clone(), shape.clone(), tensor.data().to_vec())
    };
    let stored: Vec<Stored> = folder::random(&sizes, SEED).iter().map(of).collect();
    assert_eq!(file.len(), stored.len());
    place.agrees(checkpoint, &sizes, &folder::widened(&stored));
    let read = place.encode(before);
    let tuned_weights = folder::widened(&stored);
    let written = oracle::greedy(&sizes, &tuned_weights, &read, 12, &[END, TURN]);
    let says = ["--chat", "--prompt", "who runs over the row? ", "--temperature", "0", "--json"];
    let args = [&["generate", checkpoint, "--max-tokens", "12"][..], &says].concat();
    let found = place.json(&args);
    assert_eq!(found["text"], json!(place.tokenizer().decode(&written, true).unwrap()));
    let config: Value =
        serde_json::from_slice(&std::fs::read(saved.join("config.json")).unwrap()).unwrap();
    for (key, value) in [
        ("eos_token_id", json!([END, TURN])),
        ("pad_token_id", json!(END)),
        ("rms_norm_eps", json!(1e-5)),
        ("hidden_size", json!(sizes.hidden)),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let read = |folder: PathBuf| std::fs::read(folder.join(file)).unwrap();
        assert!(read(saved.clone()) == read(place.path("base")), "{file}");
    }
}

#[test]
fn the_losses_of_single_tokens_are_the_oracles() {
    let sizes = sizes();
    let place = Place::new(&sizes, folder::write_single, |_| ());
    let weights = weights(&sizes);
    // Rows of 96 hold both texts; the second file comes after the first.
    let done = place.run(&["eval", "base", "0.txt", "1.txt", "--per-token", "--json"]);
    let text = String::from_utf8(done.stdout).unwrap();
    let mut found: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let summary = found.pop().unwrap();
    assert_eq!(summary["tokens"], found.len());
    let mut found = found.iter();
    for (i, text) in TEXTS.iter().enumerate() {
        let tokens = [vec![BEGIN], place.encode(text)].concat();
        for (at, want) in oracle::losses(&sizes, &weights, &tokens).into_iter().enumerate() {
            let token = found.next().unwrap();
            assert_eq!(token["file"], format!("{i}.txt"));
            assert_eq!(
                (&token["token"], &token["token_id"]),
                (&json!(at + 1), &json!(tokens[at + 1]))
            );
            let nats = token["nats"].as_f64().unwrap();
            assert!(
                (nats - want).abs() < 1e-4 * (1.0 + want),
                "{token}, but the oracle has {want}"
            );
        }
    }
    assert!(found.next().is_none());
}

#[test]
fn options_decide_which_tokens_begin_and_end_a_text() {
    let sizes = sizes();
    let place = Place::new(&sizes, folder::write_single, |_| ());
    let weights = weights(&sizes);
    let text = place.encode(TEXTS[0]);
    for (options, tokens) in [
        (["false", "false"], text.clone()),
        (["true", "true"], [vec![BEGIN], text.clone(), vec![END]].concat()),
    ] {
        let [bos, eos] = options;
        let args = ["eval", "base", "0.txt", "--json", "--add-bos-token", bos];
        let found = place.json(&[&args[..], &["--add-eos-token", eos]].concat());
        let losses = oracle::losses(&sizes, &weights, &tokens);
        assert_eq!(found["tokens"], losses.len());
        let want = losses.iter().sum::<f64>() / losses.len() as f64;
        let loss = found["loss"].as_f64().unwrap();
        assert!((loss - want).abs() < 2e-5 * want, "{loss}, but the oracle has {want}");
    }
    let args = ["generate", "base", "--prompt", "the", "--max-tokens", "1", "--json"];
    let found = place.json(&[&args[..], &["--add-bos-token", "false"]].concat());
    assert_eq!(found["prompt_token_ids"], json!(place.encode("the")));
}

#[test]
fn a_conversation_has_a_system_and_several_turns() {
    let sizes = sizes();
    let place = Place::new(&sizes, folder::write_single, |_| ());
    std::fs::write(place.path("system.txt"), "be brief\n").unwrap();
    let weights = weights(&sizes);
    let before = "<|begin|><|system|>be brief<|turn|>";
    let args = ["generate", "base", "--chat", "--temperature", "0", "--max-tokens", "5", "--json"];
    for system in ["system.txt", "be brief"] {
        let turns = ["--system", system, "--prompt", "the fox", "--prompt", "the row"];
        let done = place.run(&[&args[..], &turns].concat());
        let text = String::from_utf8(done.stdout).unwrap();
        let found: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(found.len(), 2, "{}", String::from_utf8_lossy(&done.stderr));
        let mut said = before.to_owned();
        for (answer, prompt) in found.iter().zip(["the fox", "the row"]) {
            said += &format!("<|user|>{prompt}<|turn|><|assistant|>");
            let read = place.encode(&said);
            assert_eq!(answer["prompt_token_ids"], json!(read));
            let written = oracle::greedy(&sizes, &weights, &read, 5, &[END]);
            assert_eq!(answer["token_ids"], json!(written));
            said += &format!("{}<|turn|>", answer["text"].as_str().unwrap().trim());
        }
    }
    let done = place.run(&["generate", "base", "--prompt", "a", "--prompt", "b"]);
    assert_eq!(done.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&done.stderr).contains("add --chat"));
}

#[test]
fn what_cannot_be_read_as_a_checkpoint_is_told_apart() {
    let sizes = sizes();
    let place = Place::new(&sizes, folder::write_single, |_| ());
    std::fs::write(place.path("model.gguf"), "GGUF").unwrap();
    for (name, wanted) in [
        ("model.gguf", "is a GGUF file"),
        ("someone/Tiny-1B", "run `hf download someone/Tiny-1B"),
        ("nowhere", "does not exist"),
    ] {
        let told = place.told(&["eval", name, "0.txt"]);
        assert!(told.contains(wanted), "{told}");
    }
    // The last value of the last tensor becomes NaN.
    let file = place.path("base/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let end = bytes.len();
    bytes[end - 2..].copy_from_slice(&0x7fc0u16.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    for command in [&["eval", "base", "0.txt"][..], &["generate", "base", "--prompt", "a"]] {
        let told = place.told(command);
        assert!(told.contains("model.safetensors: tensor `model.norm.weight` is NaN at"), "{told}");
    }
}

#[test]
fn weights_so_large_that_their_logits_overflow_are_an_error_with_the_place() {
    let sizes = sizes();
    // The largest finite bf16: products with it overflow.
    let huge = |folder: &Path, stored: &[Stored]| {
        let mut stored = stored.to_vec();
        let (_, _, norm) = stored.iter_mut().find(|t| t.0 == "model.norm.weight").unwrap();
        norm.chunks_exact_mut(2).for_each(|x| x.copy_from_slice(&0x7f7fu16.to_le_bytes()));
        folder::write_single(folder, &stored);
    };
    let place = Place::new(&sizes, huge, |_| ());
    for (command, wanted) in [
        (&["eval", "base", "0.txt", "1.txt"][..], "0.txt: the loss of token 1 is "),
        (&["eval", "base", "0.txt", "--per-token", "--json"], "0.txt: the loss of token 1 is "),
        (&["generate", "base", "--prompt", "a", "--json"], "error: after 2 tokens the logit of"),
    ] {
        let told = place.told(command);
        assert!(told.contains(wanted) && told.contains("take an earlier checkpoint"), "{told}");
    }
}

#[test]
fn what_a_folder_lacks_is_named_with_what_to_do() {
    let sizes = sizes();
    let place = Place::new(&sizes, folder::write_single, |_| ());
    let told = |file: &str| {
        let (at, aside) = (place.path("base").join(file), place.path("aside"));
        std::fs::rename(&at, &aside).unwrap();
        let told = place.told(&["eval", "base", "0.txt"]);
        std::fs::rename(&aside, &at).unwrap();
        assert!(told.contains(&format!("base/{file}")), "{told}");
        told
    };
    assert!(told("tokenizer.json").contains("put the model's tokenizer.json there"));
    assert!(told("model.safetensors").contains("give the folder of a checkpoint that holds it"));
    assert!(told("config.json").contains("give the folder of a checkpoint that holds it"));
    std::fs::rename(place.path("base/model.safetensors"), place.path("base/pytorch_model.bin"))
        .unwrap();
    let pickled = place.told(&["eval", "base", "0.txt"]);
    assert!(pickled.contains("only safetensors are read"), "{pickled}");
}
