use std::collections::BTreeMap;

use foveate_nn::{AttentionConfig, LearnedBuffer, Model, ProgramConfig};

use super::*;
use crate::error::TrainErrorKind;
use crate::metrics::JsonlLog;
use crate::pack::Packed;

mod conversations;
mod folder;
mod meshes;
mod probe;
mod ranks;
mod recording;
mod resume;
mod step_by_step;
mod tensor;
mod together;

/// A folder with some documents, and recipes about them.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..12usize {
            let text = format!("fn document_{i}() {{ {} }}\n", "let x = y;".repeat(1 + i * 5 % 7));
            std::fs::write(dir.path().join(format!("{i}.txt")), text).unwrap();
        }
        let turn =
            |role: &str, content: &str| format!(r#"{{"role":"{role}","content":"{content}"}}"#);
        let chats: String = (0..8)
            .map(|i| {
                let (user, said) =
                    (turn("user", &format!("say {i}")), turn("assistant", "yes yes"));
                format!("{{\"messages\":[{user},{said}]}}\n")
            })
            .collect();
        std::fs::write(dir.path().join("chat.jsonl"), chats).unwrap();
        Self(dir)
    }

    fn recipe(&self, sets: &[&str]) -> Recipe {
        let text = r#"
            [run]
            dir = "replaced below"
            seed = 3
            [model]
            hidden_size = 16
            intermediate_size = 24
            num_hidden_layers = 2
            num_attention_heads = 4
            num_key_value_heads = 2
            [attention]
            mask = "causal & document"
            [data]
            files = ["*.txt"]
            len = 24
            held_out = 0.2
            [train]
            steps = 6
            batch_rows = 3
            eval_every = 4
            save_every = 2
            [optimizer]
            lr = 1e-2
        "#;
        let dir = format!("run.dir={}", self.0.path().join("run").display());
        let sets: Vec<String> =
            [dir.as_str()].iter().chain(sets).map(|set| set.to_string()).collect();
        Recipe::parse(text, "test.toml", &sets).unwrap()
    }

    /// Where its recipes would stand.
    fn file(&self) -> std::path::PathBuf {
        self.0.path().join("test.toml")
    }

    fn run(
        &self,
        recipe: &Recipe,
        options: impl Into<Options>,
    ) -> Result<(Summary, Log), TrainError> {
        let mut log = Log::default();
        let summary = train(recipe, &self.file(), options, &mut log)?;
        Ok((summary, log))
    }
}

/// The bits of every loss.
#[derive(Debug, Default, PartialEq)]
struct Log {
    losses: Vec<u64>,
    held_out: Vec<u64>,
    tokens: u64,
    /// How often it was told that documents are cut.
    cuts: usize,
    /// Whether tokens were counted.
    counted: bool,
    stop_at_counting: bool,
    /// Masks that show tokens what they are to predict.
    telling: Vec<String>,
    /// Why a run that was to be resumed begins.
    anew: Option<Anew>,
    /// Shares of evaluations that were done.
    shares: Vec<f64>,
    /// Ends the run once so many shares were told.
    stop_at_share: Option<usize>,
    /// Steps that were saved.
    saved: Vec<u64>,
    stop_after: Option<u64>,
    panics_after: Option<usize>,
}

impl Observer for Log {
    fn started(&mut self, run: &Started) {
        self.telling.clone_from(&run.telling_masks);
        self.anew.clone_from(&run.anew);
    }

    fn step(&mut self, metrics: &StepMetrics) {
        self.losses.push(metrics.loss.to_bits());
        self.tokens = metrics.labelled_tokens;
        self.stop_after = self.stop_after.map(|left| left - 1);
        assert!(self.panics_after != Some(self.losses.len()), "planted");
    }

    fn evaluated(&mut self, metrics: &EvalMetrics) {
        self.held_out.push(metrics.held_out_loss.to_bits());
    }

    fn saved(&mut self, _: &Path, metrics: &SaveMetrics) {
        assert!(metrics.waited_seconds <= metrics.seconds);
        self.saved.push(metrics.step);
    }

    fn counting(&mut self, _: usize, _: usize) {
        self.counted = true;
    }

    fn evaluating(&mut self, share: f64) {
        self.shares.push(share);
    }

    fn cuts(&mut self) {
        self.cuts += 1;
    }

    fn interrupted(&mut self) -> bool {
        self.stop_after == Some(0)
            || self.stop_at_counting && self.counted
            || self.stop_at_share.is_some_and(|shares| self.shares.len() >= shares)
    }
}

#[test]
fn losses_do_not_depend_on_threads_or_recomputation() {
    let run = |threads, recompute: &str| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let place = Place::new();
        let recipe = place.recipe(&[&format!("train.recompute={recompute}")]);
        pool.install(|| place.run(&recipe, Start::New).unwrap().1)
    };
    let one = run(1, "none");
    assert_eq!((one.losses.len(), one.held_out.len()), (6, 2));
    assert!(f64::from_bits(one.losses[5]) < f64::from_bits(one.losses[0]));
    assert_eq!(one, run(3, "none"));
    assert_eq!(one, run(2, "full"));
}

#[test]
fn an_interrupted_run_goes_on_as_if_it_had_not_been() {
    let straight = Place::new();
    let (summary, whole) = straight.run(&straight.recipe(&[]), Start::New).unwrap();
    let place = Place::new();
    // Saved weights are rounded; what resuming reads is not.
    let recipe = place.recipe(&["train.save_dtype=bf16"]);
    let mut first = Log { stop_after: Some(3), ..Log::default() };
    let stopped = train(&recipe, &place.file(), Start::New, &mut first).unwrap();
    assert!(stopped.interrupted && stopped.steps == 3);
    let (resumed, second) = place.run(&recipe, Start::Resume).unwrap();
    assert_eq!([first.losses, second.losses].concat(), whole.losses);
    assert_eq!(resumed.held_out_loss, summary.held_out_loss);
    let again = place.run(&recipe, Start::New).unwrap_err().to_string();
    assert!(again.contains("--resume"), "{again}");
}

#[test]
fn a_mask_that_shows_tokens_what_they_are_to_predict_is_told() {
    for (mask, tells) in [
        ("causal & document", false),
        ("causal", false),
        ("document & q - kv < 8 & kv <= q", false),
        ("prefix(4)", false),
        ("", true),
        ("document", true),
        ("document & q - kv < 8", true),
        ("chunked(8)", true),
        ("q + 1 >= kv", true),
    ] {
        let place = Place::new();
        let recipe = place.recipe(&[&format!("attention.mask=\"{mask}\""), "train.steps=1"]);
        let (_, log) = place.run(&recipe, Start::New).unwrap();
        assert_eq!(log.telling, if tells { vec![mask] } else { vec![] });
    }
}

#[test]
fn an_evaluation_tells_how_far_it_is_and_is_left_when_the_run_is_interrupted() {
    let sets = ["data.held_out=0.7", "train.batch_rows=1"];
    let straight = Place::new();
    let (summary, whole) = straight.run(&straight.recipe(&sets), Start::New).unwrap();
    let passes: Vec<&[f64]> = whole.shares.chunk_by(|a, b| a < b).collect();
    assert_eq!(passes.len(), 2, "{passes:?}");
    for pass in passes {
        assert!(pass.len() > 3 && pass[0] == 0.0 && pass[pass.len() - 1] <= 1.0, "{pass:?}");
    }
    let first = whole.shares.iter().skip(1).position(|share| *share == 0.0).unwrap() + 1;
    // In the evaluation after step 4, and in the last one.
    for (shares, step) in [(2, 4), (first + 2, 6)] {
        let place = Place::new();
        let recipe = place.recipe(&sets);
        let mut log = Log { stop_at_share: Some(shares), ..Log::default() };
        let stopped = train(&recipe, &place.file(), Start::New, &mut log).unwrap();
        assert!(stopped.interrupted && stopped.held_out_loss.is_none());
        assert_eq!((stopped.steps, log.shares.len()), (step, shares));
        // Left once more, it is still the first thing that is due.
        let mut again = Log { stop_at_share: Some(2), ..Log::default() };
        let stopped = train(&recipe, &place.file(), Start::Resume, &mut again).unwrap();
        assert!(stopped.interrupted && again.losses.is_empty() && stopped.steps == step);
        let (resumed, rest) = place.run(&recipe, Start::Resume).unwrap();
        assert_eq!([log.losses, rest.losses].concat(), whole.losses);
        assert_eq!(resumed.held_out_loss, summary.held_out_loss);
        assert_eq!([log.held_out, rest.held_out].concat(), whole.held_out);
    }
}

#[test]
fn a_run_of_every_state_and_rule_goes_on_as_if_it_had_not_been_interrupted() {
    let frozen = "optimizer.groups=[{ match = \"*.layers.0.*\", frozen = true }, \
                  { match = \"*norm*\", rate = 0.5, weight_decay = 0.2 }]";
    for sets in [
        &["precision.state=int8_moments"][..],
        &["optimizer.kind=sgd"],
        &["optimizer.kind=sgd", "precision.state=int8_moments", "train.z_loss=0.05"],
        &["optimizer.in_backward=true", "optimizer.clip_norm=0"],
        &["optimizer.in_backward=true", "optimizer.clip_norm=0", "precision.state=int8_moments"],
        &[frozen, "train.recompute=mlp", "train.recompute_layers=1"],
        &[frozen, "optimizer.in_backward=true", "optimizer.clip_norm=0", "train.recompute=auto"],
    ] {
        let straight = Place::new();
        let (summary, whole) = straight.run(&straight.recipe(sets), Start::New).unwrap();
        assert!(f64::from_bits(whole.losses[5]) < f64::from_bits(whole.losses[0]), "{sets:?}");
        let place = Place::new();
        let mut first = Log { stop_after: Some(3), ..Log::default() };
        train(&place.recipe(sets), &place.file(), Start::New, &mut first).unwrap();
        let (resumed, second) = place.run(&place.recipe(sets), Start::Resume).unwrap();
        assert_eq!([first.losses, second.losses].concat(), whole.losses, "{sets:?}");
        assert_eq!(resumed.held_out_loss, summary.held_out_loss, "{sets:?}");
    }
}

/// Its gradient moves the weights, and metrics tell it apart from the cross-entropy.
#[test]
fn a_z_loss_is_minimised_beside_the_cross_entropy_and_told_apart() {
    let of = |set: &str| {
        let place = Place::new();
        let sets = [set, "train.steps=30", "optimizer.lr=3e-2"];
        let (summary, log) = place.run(&place.recipe(&sets), Start::New).unwrap();
        let records = JsonlLog::read(&place.0.path().join("run/metrics.jsonl")).unwrap();
        let step = |record: Record| match record {
            Record::Step(m) => Some(m.z_loss),
            _ => None,
        };
        let told: Vec<Option<f64>> = records.into_iter().filter_map(step).collect();
        (summary.held_out_loss.unwrap(), log.losses, told)
    };
    let [plain, small, large] = ["train.z_loss=0", "train.z_loss=1e-4", "train.z_loss=0.5"].map(of);
    assert!(plain.2.iter().all(Option::is_none));
    // The first step has the same weights: its cross-entropy is without the z-loss, which goes by its weight.
    assert_eq!([plain.1[0], plain.1[0]], [small.1[0], large.1[0]]);
    let of_step = |of: &(f64, Vec<u64>, Vec<Option<f64>>), step: usize| of.2[step].unwrap();
    // 256 words and more, none likelier than others.
    let start = of_step(&large, 0) / 0.5;
    assert!((start / 5.6f64.powi(2) - 1.0).abs() < 0.05, "{start}");
    assert!((of_step(&small, 0) / 1e-4 / start - 1.0).abs() < 1e-3);
    assert!(of_step(&large, 29) < 0.2 * of_step(&large, 0), "{:?}", large.2);
    assert!(of_step(&small, 29) / 1e-4 > 4.0 * of_step(&large, 29) / 0.5, "{:?}", small.2);
    assert!(large.0 < 5.6 && large.1[29] != plain.1[29]);
}

#[test]
fn frozen_parameters_stay_and_a_resume_keeps_to_what_is_frozen() {
    let place = Place::new();
    let frozen = "optimizer.groups=[{ match = \"model.embed_tokens.*\", frozen = true }]";
    let (summary, _) = place.run(&place.recipe(&[frozen]), Start::New).unwrap();
    let read = checkpoint::read_config(&summary.checkpoint, Checksums::Verify).unwrap();
    let mut model = Model::unfilled(read.model.clone(), &read.attention).unwrap();
    checkpoint::load_weights(&summary.checkpoint, &mut model, Checksums::Verify).unwrap();
    let first = Model::new(read.model, &read.attention, 3).unwrap();
    for p in first.parameters() {
        let same = model.values(model.parameter(&p.name).unwrap()) == first.values(p);
        assert_eq!(same, p.name.contains("embed_tokens"), "{}", p.name);
    }
    let refused =
        |sets: &[&str], start| place.run(&place.recipe(sets), start).unwrap_err().to_string();
    let told = refused(&["train.steps=8"], Start::Resume);
    assert!(told.contains("optimizer.groups is not what this run was started with"), "{told}");
    let told = refused(&[frozen, "optimizer.kind=sgd"], Start::Resume);
    assert!(told.contains("optimizer.kind is not what this run was started with"), "{told}");
    let other = Place::new();
    let told = |groups: &str| {
        let sets = [format!("optimizer.groups={groups}")];
        let recipe = other.recipe(&sets.each_ref().map(String::as_str));
        other.run(&recipe, Start::New).unwrap_err().to_string()
    };
    let unknown = told(r#"[{ match = "layers.9.*", frozen = true }]"#);
    assert!(unknown.contains("`layers.9.*` matches no parameter"), "{unknown}");
    let all = told(r#"[{ match = "*", frozen = true }]"#);
    assert!(all.contains("every parameter is frozen"), "{all}");
    let half = told(r#"[{ match = "*q_proj*", frozen = true }]"#);
    assert!(half.contains("q_proj") && half.contains("they are one matrix"), "{half}");
}

#[test]
fn a_run_whose_layers_have_programs_of_their_own_is_saved_and_resumed() {
    let recipe = |place: &Place| {
        let window = ProgramConfig {
            mask: "causal & document & window(4)".to_owned(),
            ..Default::default()
        };
        let bias = LearnedBuffer { shape: vec![4, 8], init: 0.0, std: 0.1 };
        let global = ProgramConfig {
            mask: "causal & document".to_owned(),
            score: Some("score + bias[h, min(q - kv, 7)]".to_owned()),
            learned: [("bias".to_owned(), bias)].into(),
            ..Default::default()
        };
        let programs = [("local".to_owned(), window), ("global".to_owned(), global)].into();
        let layers = vec!["local".to_owned(), "global".to_owned()];
        Recipe {
            attention: Some(AttentionConfig::Pattern { layers, programs }),
            ..place.recipe(&["train.recompute=attention"])
        }
    };
    let straight = Place::new();
    let (summary, whole) = straight.run(&recipe(&straight), Start::New).unwrap();
    let read = checkpoint::read_config(&summary.checkpoint, Checksums::Verify).unwrap();
    assert_eq!(Some(&read.attention), recipe(&straight).attention.as_ref());
    let mut model = Model::unfilled(read.model, &read.attention).unwrap();
    let fresh = checkpoint::load_weights(&summary.checkpoint, &mut model, Checksums::Verify);
    assert!(fresh.unwrap().is_empty());
    let bias = |layer: usize| model.parameter(&format!("model.layers.{layer}.self_attn.bias"));
    assert!(bias(0).is_none() && bias(1).is_some());
    let place = Place::new();
    let mut first = Log { stop_after: Some(3), ..Log::default() };
    train(&recipe(&place), &place.file(), Start::New, &mut first).unwrap();
    let (_, second) = place.run(&recipe(&place), Start::Resume).unwrap();
    assert_eq!([first.losses, second.losses].concat(), whole.losses);
}

/// Name and bytes of everything in the folder of a run.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.append(&mut files(&path)),
            false => drop(found.insert(path.clone(), std::fs::read(&path).unwrap())),
        }
    }
    found
}

#[test]
fn a_run_is_not_written_over_unless_that_is_asked_for() {
    let place = Place::new();
    let dir = place.0.path().join("run");
    let (first, _) = place.run(&place.recipe(&[]), Start::New).unwrap();
    std::fs::write(dir.join("notes.txt"), "mine").unwrap();
    let before = files(&dir);
    let told =
        |sets: &[&str], start| place.run(&place.recipe(sets), start).unwrap_err().to_string();
    let refused = told(&[], Start::New);
    assert!(refused.starts_with(&format!("{}: a run is already here", dir.display())), "{refused}");
    for way in ["--resume", "--start-over", "run.dir"] {
        assert!(refused.contains(way), "{refused}");
    }
    // What cannot run removes nothing, and what the new run reads is not removed.
    assert!(told(&["data.files=[\"*.rs\"]"], Start::Over).contains("no file matches"));
    let tuned = format!(
        "[run]\ndir = {dir:?}\n[model]\ncheckpoint = {:?}\n[data]\nfiles = [\"*.txt\"]\nlen = 24\n",
        first.checkpoint
    );
    let tuned = Recipe::parse(&tuned, "tune.toml", &[]).unwrap();
    let own = place.run(&tuned, Start::Over).unwrap_err().to_string();
    assert!(own.contains("starting over would remove") && own.contains("step-000006"), "{own}");
    assert_eq!(files(&dir), before);

    let (second, log) = place.run(&place.recipe(&["train.steps=3"]), Start::Over).unwrap();
    assert!(second.checkpoint.ends_with("step-000003") && log.losses.len() == 3);
    let after = files(&dir);
    let has = |part: &str| after.keys().filter(|p| p.display().to_string().contains(part)).count();
    assert_eq!(
        (has("step-000006"), has("step-000004"), has("tfevents"), has("loss.svg")),
        (0, 0, 1, 1)
    );
    assert_eq!(after[&dir.join("notes.txt")], b"mine");
    let records = JsonlLog::read(&dir.join("metrics.jsonl")).unwrap();
    assert_eq!(records.iter().map(Record::step).max(), Some(3));
}

#[test]
fn steps_that_no_checkpoint_has_are_not_written_over_unasked_either() {
    let place = Place::new();
    let sets = ["optimizer.lr=1e30", "schedule.warmup_steps=0", "train.save_every=0"];
    place.run(&place.recipe(&sets), Start::New).unwrap_err();
    let before = files(&place.0.path().join("run"));
    let told = place.run(&place.recipe(&[]), Start::New).unwrap_err().to_string();
    assert!(told.contains(" here") && told.contains(" at step 1 and "), "{told}");
    assert!(told.contains("--resume") && told.contains("--start-over"), "{told}");
    assert_eq!(files(&place.0.path().join("run")), before);
    assert_eq!(place.run(&place.recipe(&[]), Start::Over).unwrap().1.losses.len(), 6);
}

/// Starts another run in the same folder when a run has taken a step.
#[cfg(unix)]
struct Intruder<'a> {
    place: &'a Place,
    told: Vec<String>,
}

#[cfg(unix)]
impl Observer for Intruder<'_> {
    fn step(&mut self, _: &StepMetrics) {
        for start in [Start::New, Start::Resume, Start::Over] {
            let run = self.place.run(&self.place.recipe(&[]), start);
            self.told.extend(run.err().map(|e| e.to_string()));
        }
    }
}

#[cfg(unix)]
#[test]
fn a_folder_in_which_a_process_trains_is_left_alone() {
    let place = Place::new();
    let mut intruder = Intruder { place: &place, told: Vec::new() };
    train(&place.recipe(&["train.save_every=1"]), &place.file(), Start::New, &mut intruder)
        .unwrap();
    // Also before its first checkpoint, where a run that has ended could only be started over.
    assert_eq!(intruder.told.len(), 18);
    for told in intruder.told {
        assert!(told.contains("another process is training here"), "{told}");
    }
    // Its folder is free once a run has ended.
    place.run(&place.recipe(&[]), Start::Over).unwrap();
}

#[test]
fn a_run_of_epochs_ends_when_their_documents_are_seen() {
    let place = Place::new();
    let text = place.recipe(&[]).to_toml().unwrap().replace("steps = 6", "epochs = 3");
    let recipe = Recipe::parse(&text, "test.toml", &[]).unwrap();
    let (summary, _) = place.run(&recipe, Start::New).unwrap();
    let records = JsonlLog::read(&place.0.path().join("run/metrics.jsonl")).unwrap();
    let epochs: Vec<f64> = records
        .iter()
        .filter_map(|r| if let Record::Step(m) = r { Some(m.epoch) } else { None })
        .collect();
    let [.., before, last] = epochs[..] else { panic!("{epochs:?}") };
    assert!(before < 3.0 && last >= 3.0, "{epochs:?}");
    assert_eq!(summary.steps, epochs.len() as u64);
}

#[test]
fn the_saved_recipe_says_all_that_the_run_was_made_of() {
    let place = Place::new();
    let (base, _) =
        place.run(&place.recipe(&["model.max_position_embeddings=64"]), Start::New).unwrap();
    let text = format!(
        "[run]\ndir = {:?}\n[model]\ncheckpoint = {:?}\n[data]\nfiles = [\"chat.jsonl\"]\nlen = 64\n\
         [train]\nepochs = 1\nbatch_rows = 1\n",
        place.0.path().join("tuned"),
        base.checkpoint
    );
    let recipe = Recipe::parse(&text, "tune.toml", &[]).unwrap();
    let (summary, _) = place.run(&recipe, Start::New).unwrap();
    let saved = Recipe::load(&place.0.path().join("tuned/recipe.toml"), &[]).unwrap();
    let resolved = saved.resolved.clone().unwrap();
    assert_eq!(resolved["steps"].as_integer(), Some(summary.steps as i64));
    assert_eq!(resolved["attention"]["mask"].as_str(), Some("causal & document"));
    for (size, want) in [("hidden_size", 16), ("num_key_value_heads", 2), ("head_dim", 4)] {
        assert_eq!(resolved["model"][size].as_integer(), Some(want), "{size}");
    }
    assert_eq!(resolved["chat_template"].as_str(), Some(crate::chat::DEFAULT_TEMPLATE));
    // It can be run again as it is.
    let again = Recipe { resolved: None, ..saved };
    assert_eq!(again, recipe);
}

#[test]
fn a_profile_has_the_steps_that_were_asked_for_and_goes_when_a_run_starts_over() {
    let place = Place::new();
    let recipe = place.recipe(&["train.accumulate=2", "train.steps=5"]);
    let file = place.0.path().join("run/profile.json");
    let of = |start: Start, profile| Options { profile, ..start.into() };
    // Up to the last step, where that comes first.
    for (start, profile) in [(Start::New, 2..4), (Start::Over, 4..9)] {
        place.run(&recipe, of(start, Some(profile))).unwrap();
        let trace: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let count = |name| events.iter().filter(|event| event["name"] == name).count();
        assert_eq!(["wait for data", "queue", "queue the update", "wait"].map(count), [4, 4, 2, 2]);
    }
    place.run(&recipe, of(Start::Over, None)).unwrap();
    assert!(!file.exists());
}

#[test]
fn what_a_step_reports_is_named_and_adds_up() {
    let place = Place::new();
    let options = Options { commit: Some("abc"), ..Start::New.into() };
    let sets = ["data.split_documents=false", "data.len=40", "train.accumulate=2"];
    let recipe = place.recipe(&sets);
    let (summary, _) = place.run(&recipe, options).unwrap();
    let records = JsonlLog::read(&place.0.path().join("run/metrics.jsonl")).unwrap();
    let Record::Run(run) = &records[0] else { panic!("{:?}", records[0]) };
    assert_eq!((run.step, run.commit.as_deref()), (0, Some("abc")));
    assert!(run.version == env!("CARGO_PKG_VERSION") && run.threads > 0);
    let (mut labelled, mut time, mut epoch) = (0, run.unix_time, 0.0);
    let (mut saves, mut waited, mut seconds) = (Vec::new(), 0.0, 0.0);
    for record in &records[1..] {
        let at = match record {
            Record::Run(_) => panic!("one start has one record"),
            Record::Save(m) => {
                saves.push(m.step);
                assert!(m.seconds > 0.0);
                m.unix_time
            }
            Record::Eval(m) => m.unix_time,
            Record::Step(m) => {
                // Documents of 33 tokens and more, one in each row.
                let rate =
                    |tokens: f64, per_s: f64| (per_s * m.seconds / tokens - 1.0).abs() < 1e-9;
                assert!(rate(6.0 * 40.0, m.packed_tokens_per_s));
                assert!(rate((m.labelled_tokens - labelled) as f64, m.labelled_tokens_per_s));
                assert!((0.0..0.2).contains(&m.padding_share), "{m:?}");
                let optimizer = m.optimizer_seconds.unwrap();
                assert!(m.data_seconds + optimizer <= m.seconds && m.epoch > epoch);
                assert!(m.memory_bytes <= m.peak_memory_bytes);
                (labelled, epoch) = (m.labelled_tokens, m.epoch);
                (waited, seconds) = (waited + m.data_seconds, seconds + m.seconds);
                m.unix_time
            }
        };
        assert!(at >= time, "{record:?}");
        time = at;
    }
    assert_eq!(saves, [2, 4, 6]);
    assert!(summary.labelled_tokens_per_s < summary.packed_tokens_per_s);
    assert!(summary.padding_share > 0.0);
    assert!(waited > 0.0 && (summary.data_share - waited / seconds).abs() < 1e-12);
    assert!(summary.peak_memory_bytes > 0 || !cfg!(target_os = "linux"));
}

#[test]
fn accumulated_batches_are_one_large_batch() {
    let losses = |rows: usize, accumulate: usize| {
        let place = Place::new();
        let rows = format!("train.batch_rows={rows}");
        let recipe = place.recipe(&[&rows, &format!("train.accumulate={accumulate}")]);
        place.run(&recipe, Start::New).unwrap().1.losses
    };
    for (a, b) in losses(4, 1).into_iter().zip(losses(2, 2)) {
        let (a, b) = (f64::from_bits(a), f64::from_bits(b));
        assert!((a - b).abs() < 1e-4 * a, "{a} {b}");
    }
}

#[test]
fn a_learned_bias_is_trained_and_comes_back_from_the_checkpoint() {
    let place = Place::new();
    let recipe = place.recipe(&[
        "attention.score=score + bias[h]",
        "attention.learned.bias.shape=[4]",
        "attention.learned.bias.init=0.25",
        "train.recompute=attention",
    ]);
    let (summary, _) = place.run(&recipe, Start::New).unwrap();
    let config = checkpoint::read_config(&summary.checkpoint, Checksums::Verify).unwrap();
    assert_eq!(config.attention.of_layer(0).1.score.as_deref(), Some("score + bias[h]"));
    let mut model = Model::new(config.model, &config.attention, 0).unwrap();
    assert!(
        checkpoint::load_weights(&summary.checkpoint, &mut model, Checksums::Verify)
            .unwrap()
            .is_empty()
    );
    for layer in 0..2 {
        let name = format!("model.layers.{layer}.self_attn.bias");
        let bias = model.values(model.parameter(&name).unwrap());
        // A bias that every key of a row shares has no gradient in a softmax without a sink.
        assert!(bias.iter().all(|&b| (b - 0.25).abs() < 1e-3), "{bias:?}");
    }
    let place = Place::new();
    let recipe = place.recipe(&[
        "attention.score=score + bias[h, min(q - kv, 7)]",
        "attention.learned.bias.shape=[4, 8]",
    ]);
    let (summary, _) = place.run(&recipe, Start::New).unwrap();
    let config = checkpoint::read_config(&summary.checkpoint, Checksums::Verify).unwrap();
    let mut model = Model::new(config.model, &config.attention, 0).unwrap();
    checkpoint::load_weights(&summary.checkpoint, &mut model, Checksums::Verify).unwrap();
    let bias = model.values(model.parameter("model.layers.1.self_attn.bias").unwrap());
    assert!(bias.iter().all(|&b| b != 0.0 && b.is_finite()), "{bias:?}");
}

#[test]
fn a_checkpoint_is_fine_tuned_on_the_assistants_words_alone() {
    let place = Place::new();
    let base = place.recipe(&["model.max_position_embeddings=64"]);
    let (summary, _) = place.run(&base, Start::New).unwrap();
    let text = format!(
        "[run]\ndir = {:?}\n[model]\ncheckpoint = {:?}\n[data]\nfiles = [\"chat.jsonl\"]\nlen = 64\n\
         held_out = 0\nsplit_documents = false\n[train]\nsteps = 20\nbatch_rows = 8\nsave_every = 0\n\
         [optimizer]\nlr = 1e-2\n",
        place.0.path().join("tuned"),
        summary.checkpoint
    );
    let long = Recipe::parse(&text.replace("len = 64", "len = 65"), "tune.toml", &[]).unwrap();
    let error = place.run(&long, Start::New).unwrap_err().to_string();
    assert!(error.contains("data.len is 65, but the model takes 64"), "{error}");
    let recipe = Recipe::parse(&text, "tune.toml", &[]).unwrap();
    let (tuned, log) = place.run(&recipe, Start::New).unwrap();
    // Each conversation fills a row, and its labels are `yes yes`, a newline and the end.
    assert_eq!(log.tokens, 20 * 8 * 9);
    let loss = |i: usize| f64::from_bits(log.losses[i]);
    assert!(loss(19) < 0.8 * loss(0), "{} {}", loss(0), loss(19));
    assert_eq!(
        checkpoint::read_config(&tuned.checkpoint, Checksums::Verify)
            .unwrap()
            .attention
            .of_layer(0)
            .1
            .mask,
        "causal & document"
    );
}

/// A run in which nothing is learned would end with a loss of 0 and a checkpoint.
#[test]
fn a_template_that_prints_nothing_of_what_is_learned_is_an_error() {
    let place = Place::new();
    std::fs::write(place.0.path().join("empty.jinja"), "").unwrap();
    let recipe = place.recipe(&["data.files=['chat.jsonl']", "data.chat_template='empty.jinja'"]);
    let error = place.run(&recipe, Start::New).unwrap_err().to_string();
    assert!(error.starts_with("data.files: no token of these documents is learned"), "{error}");
}

#[test]
fn a_loss_that_is_not_finite_before_any_update_does_not_blame_the_learning_rate() {
    let place = Place::new();
    let error = place.run(&place.recipe(&["attention.score='score / 0'"]), Start::New).unwrap_err();
    assert_eq!(
        error.to_string(),
        "step 1: the loss is NaN; in a replay attention of layer 0 leaves NaN for token 0 of row 0, \
         and no weight was updated before: look at attention.score, attention.mask and the weights \
         that the run starts from"
    );
}

#[test]
fn a_loss_that_is_not_finite_before_the_first_save_advises_a_new_start() {
    let place = Place::new();
    let recipe = place.recipe(&["optimizer.lr=1e30", "schedule.warmup_steps=0"]);
    let error = place.run(&recipe, Start::New).unwrap_err().to_string();
    assert!(
        error.ends_with("start again with --start-over: no checkpoint of this run was saved"),
        "{error}"
    );
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint() {
    let place = Place::new();
    let recipe =
        place.recipe(&["optimizer.lr=1e30", "schedule.warmup_steps=0", "train.save_every=1"]);
    let error = place.run(&recipe, Start::New).unwrap_err();
    assert!(matches!(error.kind(), TrainErrorKind::Diverged { step: 2, .. }), "{error}");
    assert!(error.to_string().contains("; in a replay the "), "{error}");
    assert!(error.to_string().contains("Lower optimizer.lr"), "{error}");
    assert!(error.to_string().contains("step-000001 is intact"), "{error}");
    let kept = checkpoint::latest(&place.0.path().join("run/checkpoints")).unwrap();
    assert!(kept.ends_with("step-000001"), "{}", kept.display());
}

#[test]
fn a_checkpoint_whose_bytes_changed_is_not_trained_on() {
    let place = Place::new();
    let (summary, _) = place.run(&place.recipe(&[]), Start::New).unwrap();
    let more = place.recipe(&["train.steps=7"]);
    let told = |options: Options| place.run(&more, options).unwrap_err().to_string();
    let masters = summary.checkpoint.join("masters.safetensors");
    let whole = std::fs::read(&masters).unwrap();
    let mut flipped = whole.clone();
    let at = flipped.len() - 2;
    flipped[at] ^= 1;
    std::fs::write(&masters, &flipped).unwrap();
    let error = told(Start::Resume.into());
    assert!(error.contains("masters.safetensors: tensor `square:lm_head.weight` does"), "{error}");
    assert!(error.contains("--skip-checksums"), "{error}");
    std::fs::write(&masters, &whole).unwrap();
    // Another step would draw another rate and another order.
    let state = summary.checkpoint.join("state.json");
    let text = std::fs::read_to_string(&state).unwrap();
    std::fs::write(&state, text.replace("\"step\": 6", "\"step\": 5")).unwrap();
    let error = told(Start::Resume.into());
    assert!(error.contains("state.json: does not match its checksum"), "{error}");
    std::fs::write(&state, text).unwrap();
    let sums = summary.checkpoint.join("checksums.json");
    let text = std::fs::read_to_string(&sums).unwrap();
    std::fs::remove_file(&sums).unwrap();
    assert!(told(Start::Resume.into()).contains("checksums.json: is missing; put it back"));
    std::fs::write(&sums, text).unwrap();
    assert_eq!(place.run(&more, Start::Resume).unwrap().0.steps, 7);
}

#[test]
fn a_value_that_is_not_finite_is_named_when_it_is_loaded() {
    let place = Place::new();
    let (summary, _) = place.run(&place.recipe(&[]), Start::New).unwrap();
    let masters = summary.checkpoint.join("masters.safetensors");
    let mut bytes = std::fs::read(&masters).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&masters, bytes).unwrap();
    let unchecked = Options { checksums: Checksums::Skip, ..Start::Resume.into() };
    let error = place.run(&place.recipe(&["train.steps=7"]), unchecked).unwrap_err().to_string();
    let named = "masters.safetensors: tensor `square:lm_head.weight` is NaN at element 4111";
    assert!(error.contains(named) && !error.contains("lr"), "{error}");
}

#[test]
fn a_foreign_folder_among_the_checkpoints_is_no_checkpoint() {
    let place = Place::new();
    let mut first = Log { stop_after: Some(3), ..Log::default() };
    train(&place.recipe(&[]), &place.file(), Start::New, &mut first).unwrap();
    let foreign = |step: u32| place.0.path().join(format!("run/checkpoints/step-{step:06}"));
    // One where a save will be, one past all.
    for step in [6, 900] {
        std::fs::create_dir(foreign(step)).unwrap();
    }
    let (resumed, log) = place.run(&place.recipe(&[]), Start::Resume).unwrap();
    assert_eq!((resumed.steps, log.losses.len()), (6, 3));
    assert!(resumed.checkpoint.join("state.json").exists() && foreign(900).exists());
}
