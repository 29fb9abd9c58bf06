//! Runs that go on with other documents, another model, state, device or driver.

use super::*;

#[test]
fn a_run_is_not_resumed_on_other_documents_or_with_another_model() {
    let place = Place::new();
    let mut first = Log { stop_after: Some(2), ..Log::default() };
    train(&place.recipe(&[]), &place.file(), Start::New, &mut first).unwrap();
    for (set, key) in [
        ("model.num_hidden_layers=1", "[model]"),
        ("attention.mask=causal", "[attention]"),
        ("data.len=23", "[data]"),
        ("run.seed=4", "run.seed"),
        ("train.batch_rows=2", "train.batch_rows"),
        ("train.z_loss=0.1", "train.z_loss"),
    ] {
        let error = place.run(&place.recipe(&[set]), Start::Resume).unwrap_err().to_string();
        assert!(error.contains(&format!("{key} is not what this run was started with")), "{error}");
    }
    let long = format!("attention.mask=causal & document{}", " & q >= 0".repeat(30));
    let it = |shape: usize, values: &[i32]| {
        format!("attention={{ buffers = {{ it = {{ shape = [{shape}], values = {values:?} }} }} }}")
    };
    let nowhere = Place::new();
    nowhere.run(&nowhere.recipe(&[&long]), Start::New).unwrap();
    let other = long.replacen("q >= 0", "q >= 1", 1);
    let error = nowhere.run(&nowhere.recipe(&[&other]), Start::Resume).unwrap_err().to_string();
    let says = "attention.mask from character 26 on was \"0 & q >= 0 & q";
    assert!(error.contains(says) && error.contains(" and is \"1 & q >= 0"), "{error}");
    let nowhere = Place::new();
    let mut values = vec![2; 60];
    nowhere.run(&nowhere.recipe(&[&it(60, &values)]), Start::New).unwrap();
    values[7] = 9;
    for (set, says) in [
        (it(60, &values), "attention.buffers.it.values[7] was 2 and is 9; restore it"),
        (it(61, &values), "attention.buffers.it.shape was [60] and is [61]; restore it"),
        (it(60, &values[1..]), "attention.buffers.it.values had 60 values and has 59; restore it"),
    ] {
        let error = nowhere.run(&nowhere.recipe(&[&set]), Start::Resume).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    for (set, field) in [
        ("data.len=23", "data.len was 24 and is 23; restore it"),
        ("data.add_eos_token=true", "data.add_eos_token was not given and is true; restore it"),
        ("data.files=[\"1*.txt\"]", "data.files was [\"*.txt\"] and is [\"1*.txt\"]; restore it"),
        ("model.hidden_size=32", "model.hidden_size was 16 and is 32; restore it"),
        ("attention.scalars={ w = 3 }", "attention.scalars.w was not given and is 3; restore it"),
        ("run.seed=4", "run.seed was 3 and is 4; restore it"),
        ("train.batch_rows=2", "train.batch_rows was 3 and is 2; restore it"),
        ("train.accumulate=2", "train.accumulate was 1 and is 2; restore it"),
        ("train.z_loss=0.1", "train.z_loss was 0.0 and is 0.1; restore it"),
        ("optimizer.kind=sgd", "optimizer.kind was \"adamw\" and is \"sgd\"; restore it"),
        (
            "optimizer.groups=[{ match = \"*embed*\", frozen = true }]",
            "optimizer.groups was [] and is [\"*embed* frozen\"]; restore it",
        ),
    ] {
        let error = place.run(&place.recipe(&[set]), Start::Resume).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
    let state = place.0.path().join("run/checkpoints/step-000002/state.json");
    let whole = std::fs::read_to_string(&state).unwrap();
    for (key, value) in [("document", 99), ("token", 1 << 30)] {
        let mut damaged: serde_json::Value = serde_json::from_str(&whole).unwrap();
        damaged["cursor"][key] = value.into();
        std::fs::write(&state, damaged.to_string()).unwrap();
        let error = place.run(&place.recipe(&[]), Start::Resume).unwrap_err().to_string();
        assert!(error.contains("state.json: does not match its checksum"), "{error}");
        let unchecked = Options { checksums: Checksums::Skip, ..Start::Resume.into() };
        let error = place.run(&place.recipe(&[]), unchecked).unwrap_err().to_string();
        assert!(error.contains("step-000002: state.json has a cursor outside"), "{error}");
    }
    std::fs::write(&state, whole).unwrap();
    let file = place.0.path().join("3.txt");
    let before = std::fs::read(&file).unwrap();
    std::fs::write(&file, "other words").unwrap();
    let error = place.run(&place.recipe(&[]), Start::Resume).unwrap_err().to_string();
    assert!(error.contains("documents are not those"), "{error}");
    std::fs::write(&file, before).unwrap();
    assert_eq!(place.run(&place.recipe(&["train.steps=7"]), Start::Resume).unwrap().0.steps, 7);
}

#[test]
fn the_cpu_refuses_a_state_that_it_does_not_keep() {
    let place = Place::new();
    let recipe = place.recipe(&["precision.state=\"exact\""]);
    let told = place.run(&recipe, Start::New).unwrap_err().to_string();
    assert!(told.contains("precision.state: is \"exact\", but the CPU keeps f32"), "{told}");
    assert!(!recipe.run.dir.exists());
}

#[test]
fn a_resume_tells_of_the_device_that_earlier_steps_ran_on() {
    let place = Place::new();
    let (first, _) = place.run(&place.recipe(&["train.steps=2"]), Start::New).unwrap();
    let path = first.checkpoint.join("state.json");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(!text.contains("gpu"), "a CPU's state is that of earlier versions: {text}");
    let elsewhere = text.replacen('{', "{\n  \"gpu\": \"NVIDIA H200\",", 1);
    std::fs::write(&path, elsewhere).unwrap();
    let options = Options { checksums: Checksums::Skip, ..Start::Resume.into() };
    let mut told = Devices::default();
    train(&place.recipe(&["train.steps=4"]), &place.file(), options.clone(), &mut told).unwrap();
    train(&place.recipe(&["train.steps=6"]), &place.file(), options, &mut told).unwrap();
    assert_eq!(told.0, [Some("NVIDIA H200".to_owned()), None]);
}

#[test]
fn a_resume_tells_of_a_driver_and_kernels_that_are_others() {
    let place = Place::new();
    let (first, _) = place.run(&place.recipe(&["train.steps=2"]), Start::New).unwrap();
    let path = first.checkpoint.join("state.json");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(!text.contains("bits_depend_on"), "the CPU's bits depend on nothing: {text}");
    let depends = r#"{ "bits_depend_on": { "driver": "CUDA 12.9", "attention": "forward" },"#;
    std::fs::write(&path, text.replacen('{', depends, 1)).unwrap();
    let options = Options { checksums: Checksums::Skip, ..Start::Resume.into() };
    let mut told = Changes::default();
    train(&place.recipe(&["train.steps=4"]), &place.file(), options.clone(), &mut told).unwrap();
    train(&place.recipe(&["train.steps=6"]), &place.file(), options, &mut told).unwrap();
    let lines = ["attention: forward before, nothing now", "driver: CUDA 12.9 before, nothing now"];
    assert_eq!(told.0, [lines.map(str::to_owned).to_vec(), Vec::new()]);
}

/// What was other in earlier steps, of each run.
#[derive(Default)]
struct Changes(Vec<Vec<String>>);

impl Observer for Changes {
    fn started(&mut self, run: &Started) {
        self.0.push(run.changed.clone());
    }
}

/// The devices that earlier steps ran on, of each run.
#[derive(Default)]
struct Devices(Vec<Option<String>>);

impl Observer for Devices {
    fn started(&mut self, run: &Started) {
        self.0.push(run.other_device.clone());
    }
}

/// What a resumed run says of its log.
#[derive(Default)]
struct OfLog(Vec<String>);

impl Observer for OfLog {
    fn started(&mut self, run: &Started) {
        self.0.clone_from(&run.log);
    }
}

#[test]
fn a_log_that_is_gone_cut_or_has_other_lines_is_told_of_and_nothing_of_it_is_lost() {
    let place = Place::new();
    place.run(&place.recipe(&["train.steps=4"]), Start::New).unwrap();
    let log = place.0.path().join("run/metrics.jsonl");
    let resumed = |steps: u64| {
        let (mut told, set) = (OfLog::default(), format!("train.steps={steps}"));
        train(&place.recipe(&[&set]), &place.file(), Start::Resume, &mut told).unwrap();
        let (told, of) = (told.0, format!("{}", log.display()));
        told.into_iter().map(|line| line.strip_prefix(&of).unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert!(resumed(5).is_empty());
    std::fs::remove_file(&log).unwrap();
    assert_eq!(resumed(6), [" has no record of a step: records of steps 1 to 5 are missing"]);
    let lines = std::fs::read_to_string(&log).unwrap();
    let mut few: String = lines.lines().take(1).map(|line| format!("{line}\n")).collect();
    few.push_str("my words\n");
    std::fs::write(&log, &few).unwrap();
    let told = resumed(7);
    assert_eq!(
        told,
        [
            " ends at step 5: records of steps 6 to 6 are missing",
            ":2 is no record of a run, and stays"
        ]
    );
    assert!(std::fs::read_to_string(&log).unwrap().starts_with(&few), "nothing is lost");
}

/// A checkpoint that nobody has read whole is not called intact.
#[test]
fn a_run_that_ends_behind_a_checkpoint_without_its_checksums_does_not_vouch_for_it() {
    let place = Place::new();
    place.run(&place.recipe(&["train.steps=2"]), Start::New).unwrap();
    let recipe = place.recipe(&["optimizer.lr=1e30", "schedule.warmup_steps=0"]);
    for (checksums, advice) in [
        (Checksums::Skip, "then continue with --resume --skip-checksums: "),
        (Checksums::Verify, "then continue with --resume: "),
    ] {
        let options = Options { checksums, ..Start::Resume.into() };
        let error = place.run(&recipe, options).unwrap_err().to_string();
        assert!(error.contains(advice), "{error}");
        let end = match checksums {
            Checksums::Skip => {
                "step-000002 is the newest checkpoint, and nobody knows whether it is intact, as its \
                 checksums were not read"
            }
            Checksums::Verify => "step-000002 is intact",
        };
        assert!(error.ends_with(end), "{error}");
    }
    // What a run saves itself it knows.
    let saves =
        place.recipe(&["optimizer.lr=1e30", "schedule.warmup_steps=0", "train.save_every=1"]);
    let options = Options { checksums: Checksums::Skip, ..Start::Resume.into() };
    let error = place.run(&saves, options).unwrap_err().to_string();
    assert!(error.ends_with("step-000003 is intact"), "{error}");
}
