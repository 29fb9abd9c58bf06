//! The trainer as a user runs it: a whole run, runs that die, wrong input.

mod place;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use place::Place;

impl Place {
    /// Runs what must succeed and gives its last line of JSON.
    fn json(&self, args: &[&str]) -> serde_json::Value {
        let done = self.run(args);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let text = String::from_utf8(done.stdout).unwrap();
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }

    /// Runs what must fail and gives its one line.
    fn told(&self, code: i32, args: &[&str]) -> String {
        let done = self.run(args);
        let text = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(code), "{text}");
        assert!(!text.contains("panicked"), "{text}");
        text.lines().find(|l| l.starts_with("error: ")).expect("an error line").to_owned()
    }
}

#[test]
fn a_run_leaves_all_it_promises() {
    let place = Place::new();
    let summary = place.json(&["train", "recipe.toml", "--json"]);
    assert!(summary["held_out_loss"].as_f64().unwrap() < 5.6);
    for rate in ["labelled_tokens_per_s", "packed_tokens_per_s"] {
        assert!(summary[rate].as_f64().unwrap() > 0.0, "{rate}");
    }
    let log = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    let ran: serde_json::Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    assert!(ran["kind"] == "run" && ran["threads"].as_u64() > Some(0), "{ran}");
    assert_eq!(summary["steps"], 24);
    let checkpoint = summary["checkpoint"].as_str().unwrap();
    for file in ["config.json", "model.safetensors", "masters.safetensors", "state.json"] {
        assert!(Path::new(checkpoint).join(file).exists(), "{file}");
    }
    for file in ["recipe.toml", "metrics.jsonl", "loss.svg"] {
        assert!(place.path("run").join(file).exists(), "{file}");
    }
    assert_eq!(place.steps("run").len(), 24);
    let weights = std::fs::read(Path::new(checkpoint).join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&weights).unwrap();
    let bias = tensors.tensor("model.layers.1.self_attn.rel_bias").unwrap();
    assert_eq!(bias.shape(), [2, 17]);
    assert!(bias.data().iter().any(|&b| b != 0), "the learned bias has moved");
    for folder in ["run", "run/checkpoints"] {
        let told = place.told(1, &["generate", folder, "--prompt", "the"]);
        assert!(told.contains(&format!("{folder}: is no checkpoint; the newest one")), "{told}");
        assert!(told.ends_with("step-000024"), "{told}");
    }
    let text =
        place.json(&["generate", checkpoint, "--prompt", "the", "--max-tokens", "5", "--json"]);
    assert!(text["tokens"].as_u64().unwrap() <= 5);
    // What is said of the end comes behind all of the text.
    let both = std::fs::File::create(place.path("both")).unwrap();
    let mut generate = place.command(&["generate", checkpoint, "--prompt", "the"]);
    generate.stdout(both.try_clone().unwrap()).stderr(both);
    assert!(generate.status().unwrap().success());
    let both = std::fs::read(place.path("both")).unwrap();
    let end = b"\nit ends here: the model takes 32 tokens in all\n";
    assert!(both.starts_with(b"the") && both.ends_with(end), "{}", String::from_utf8_lossy(&both));
    let found = place.json(&["eval", checkpoint, "00.txt", "01.txt", "--json"]);
    assert_eq!(found["documents"], 2);
    assert!(found["loss"].as_f64().unwrap() > 0.0);
    let again = place.told(1, &["train", "recipe.toml"]);
    assert!(again.contains("run: a run is already here; continue it with --resume, "), "{again}");
    let over = ["train", "recipe.toml", "--json", "--set", "train.steps=2", "--start-over"];
    assert_eq!(place.json(&over)["steps"], 2);
    let late = place.run(&[&over[..], &["--profile", "100..200"]].concat());
    let said = String::from_utf8(late.stderr).unwrap();
    assert!(late.status.success() && !place.path("run/profile.json").exists(), "{said}");
    let line = "no profile: --profile begins at step 100, and the run ended after 2";
    assert!(said.contains(line), "{said}");
    assert_eq!(place.steps("run").len(), 2);
}

#[test]
fn a_run_killed_at_any_moment_resumes_bit_for_bit() {
    killed_at_any_moment("train.async_save=false");
}

#[test]
fn a_run_killed_while_it_saves_beside_its_steps_resumes_bit_for_bit() {
    killed_at_any_moment("train.async_save=true");
}

/// Also, whatever was there when it died: every folder in the place of a checkpoint is a whole one.
fn killed_at_any_moment(set: &str) {
    let place = Place::new();
    place.recipe(|recipe| recipe.replace("save_every = 4", "save_every = 1"));
    let straight = place.path("straight").display().to_string();
    place.json(&["train", "recipe.toml", "--json", "--set", &format!("run.dir={straight}")]);
    for round in 0.. {
        let saved = std::fs::read_dir(place.path("run/checkpoints")).is_ok_and(|mut entries| {
            entries.any(|e| e.unwrap().file_name().to_string_lossy().starts_with("step-"))
        });
        let how = if saved { "--resume" } else { "--start-over" };
        let args = ["train", "recipe.toml", how, "--set", set];
        let mut child =
            place.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // From before the first step to well inside the run.
        std::thread::sleep(Duration::from_millis(20 + 35 * round));
        if round < 8 && child.try_wait().unwrap().is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
            for entry in std::fs::read_dir(place.path("run/checkpoints")).into_iter().flatten() {
                let path = entry.unwrap().path();
                if path.file_name().unwrap().to_str().unwrap().starts_with("step-") {
                    let path = path.to_str().unwrap();
                    assert!(place.run(&["eval", path, "00.txt"]).status.success(), "{path}");
                    let state = std::fs::read_to_string(format!("{path}/checksums.json"));
                    assert!(state.unwrap().contains("masters.safetensors"));
                }
            }
            continue;
        }
        assert!(child.wait().unwrap().success());
        break;
    }
    assert_eq!(place.steps("run"), place.steps("straight"));
    assert_eq!(place.weights("run", 24), place.weights("straight", 24));
}

#[cfg(unix)]
#[test]
fn ctrl_c_and_sigterm_save_and_the_run_goes_on_as_if_it_had_not_been() {
    for signal in ["-INT", "-TERM"] {
        stopped_by(signal);
    }
}

#[cfg(unix)]
fn stopped_by(signal: &str) {
    let place = Place::new();
    let steps = ["train", "recipe.toml", "--set", "train.steps=200"];
    place.json(&[&steps[..], &["--json", "--set", "run.dir=straight"]].concat());
    let child = place.command(&steps).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let log = place.path("run/metrics.jsonl");
    // A line says how the run began, and two are of steps.
    while std::fs::read_to_string(&log).map_or(0, |t| t.lines().count()) < 3 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    let done = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(130), "{told}");
    let stopped = place.steps("run").len();
    assert!((2..200).contains(&stopped), "{stopped}");
    let resume = "foveate train recipe.toml --resume --set 'train.steps=200'";
    assert!(told.contains(resume), "{told}");
    place.json(&[&steps[..], &["--resume", "--json"]].concat());
    assert_eq!(place.steps("run"), place.steps("straight"));
    assert_eq!(place.weights("run", 200), place.weights("straight", 200));
}

/// A place whose recipe reads `lines` conversations, by a template that first does `work`.
#[cfg(unix)]
fn talking(work: &str, lines: usize) -> Place {
    let place = Place::new();
    let files = "files = [\"c.jsonl\"]\nchat_template = \"t.jinja\"";
    place.recipe(|r| r.replace("files = [\"*.txt\"]", files));
    let turns = r#"{"role":"user","content":"hi"},{"role":"assistant","content":"yo"}"#;
    let line = format!("{{\"messages\":[{turns}]}}\n");
    std::fs::write(place.path("c.jsonl"), line.repeat(lines)).unwrap();
    let template = format!("{work}{{% for m in messages %}}{{{{ m.content }}}}|{{% endfor %}}");
    std::fs::write(place.path("t.jinja"), template).unwrap();
    place
}

/// A template whose variable `of.it` is `first` at first and is changed by `again` sixty times.
#[cfg(unix)]
fn growing(first: &str, again: &str) -> String {
    format!(
        "{{% set of = namespace(it={first}) %}}{{% for i in range(60) %}}{{% set of.it = {again} \
         %}}{{% endfor %}}"
    )
}

#[cfg(unix)]
#[test]
fn what_a_chat_template_computes_with_is_bounded_in_memory_and_time() {
    for (work, wanted) in [
        (growing("\"x\"", "of.it ~ of.it"), "takes more than 256 MiB of memory"),
        (growing("\"xy\"", "of.it|replace(\"x\", of.it)"), "takes more than 256 MiB of memory"),
        ("{{ messages|tojson(indent=10**9) }}".to_owned(), "takes more than 256 MiB of memory"),
        (growing("[1]", "of.it + of.it") + "{{ of.it|length }}", "computes for more than 4 s"),
    ] {
        let place = talking(&work, 3);
        let told = place.told(1, &["train", "recipe.toml"]);
        assert!(told.contains("c.jsonl:1: the chat template") && told.contains(wanted), "{told}");
        assert!(!place.path("run").exists(), "nothing was written");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn sigterm_ends_a_run_while_its_documents_render() {
    let endless = growing("[1]", "of.it + of.it") + "{{ of.it|length }}";
    for (work, lines) in [("", 400_000), (&endless, 1)] {
        let place = talking(work, lines);
        let mut command = place.command(&["train", "recipe.toml"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        // The process that renders is there.
        let children = format!("/proc/{pid}/task/{pid}/children");
        while std::fs::read_to_string(&children).unwrap().is_empty() {
            assert!(child.try_wait().unwrap().is_none(), "the run ended by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(Command::new("kill").args(["-TERM", &pid.to_string()]).status().unwrap().success());
        let done = child.wait_with_output().unwrap();
        let told = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(130), "{told}");
        let last = told.lines().last().unwrap();
        assert_eq!(last, "interrupted before the first step; nothing was written", "{told}");
        assert!(!place.path("run").exists());
    }
}

#[cfg(unix)]
#[test]
fn a_long_evaluation_says_how_far_it_is_and_ends_on_sigterm() {
    let place = Place::new();
    assert!(place.run(&["train", "recipe.toml", "--set", "train.steps=1"]).status.success());
    std::fs::write(place.path("long.txt"), "let x = y;\n".repeat(4_000_000)).unwrap();
    for more in [None, Some("--per-token")] {
        let args = ["eval", "run/checkpoints/step-000001", "long.txt"];
        let mut command = place.command(&args);
        command.args(more).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        // Losses of tokens come on stdout.
        match more {
            None => BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut line),
            Some(_) => BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line),
        }
        .unwrap();
        assert!(more.is_some() || line.contains(" %  evaluating  "), "{line}");
        // What is not read any more would stop it otherwise.
        let drain = child.stdout.take().map(|mut out| {
            std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()))
        });
        let pid = child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(130));
        drain.unwrap().join().unwrap().unwrap();
    }
}

/// The system would end the process without a word.
#[cfg(unix)]
#[test]
fn a_checkpoint_past_the_limit_of_file_sizes_is_an_error_with_the_remedy() {
    let place = Place::new();
    for set in ["train.steps=2", "train.async_save=true"] {
        let mut shell = Command::new("sh");
        let limited = "ulimit -f 20; exec \"$0\" train recipe.toml --start-over --set \"$1\"";
        shell.args(["-c", limited, env!("CARGO_BIN_EXE_foveate"), set]);
        shell.current_dir(place.path(""));
        let done = shell.stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{said}");
        let remedy = "raise the limit of file sizes (ulimit -f) and start again with --start-over";
        assert!(said.lines().last().unwrap().contains(remedy), "{said}");
        let left = std::fs::read_dir(place.path("run/checkpoints")).unwrap().count();
        assert_eq!(left, 0, "nothing half-written stays");
    }
}

/// It is no run: there is nothing to go on with.
#[cfg(unix)]
#[test]
fn an_export_that_cannot_be_written_says_what_to_do() {
    let place = Place::new();
    assert!(place.run(&["train", "recipe.toml", "--set", "train.steps=1"]).status.success());
    let saved = "run/checkpoints/step-000001";
    for to in [format!("{saved}/out"), "run/checkpoints/out".to_owned()] {
        let told = place.told(1, &["checkpoint", "export", saved, &to]);
        assert!(told.contains("/out: is in ") && told.contains("keeps its checkpoints; choose"));
    }
    let mut shell = Command::new("sh");
    let limited = "ulimit -f 20; exec \"$0\" checkpoint export \"$1\" out";
    shell.args(["-c", limited, env!("CARGO_BIN_EXE_foveate"), saved]);
    let done = shell.current_dir(place.path("")).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    let remedy = "; raise the limit of file sizes (ulimit -f) and give the command again\n";
    assert!(done.status.code() == Some(1) && said.ends_with(remedy), "{said}");
    assert!(!place.path("out").exists() && !said.contains("--start-over"), "{said}");
}

#[cfg(target_os = "linux")]
#[test]
fn what_the_limit_of_address_space_leaves_is_what_a_run_may_take() {
    let place = Place::new();
    let told = |kib: u64, rows: &str| {
        let mut shell = Command::new("sh");
        let limited =
            format!("ulimit -v {kib}; exec \"$0\" train recipe.toml --start-over --set \"$1\"");
        shell.args(["-c", &limited, env!("CARGO_BIN_EXE_foveate"), rows]);
        shell.current_dir(place.path("")).stdin(Stdio::null()).env("RAYON_NUM_THREADS", "1");
        let done = shell.output().unwrap();
        (done.status.code(), String::from_utf8(done.stderr).unwrap())
    };
    let (status, said) = told(1 << 20, "train.batch_rows=50000");
    // How much of the one is taken by then depends on which threads have allocated.
    let left = said.split_once("but the limit of address space (ulimit -v) leaves ");
    let mib = left.and_then(|(_, left)| left.split_once(" MiB;")?.0.parse::<f64>().ok());
    let within = mib.is_some_and(|mib| 0.0 < mib && mib < 1024.0);
    assert!(status == Some(1) && within, "{status:?}: {said}");
    let (status, said) = told(1 << 20, "train.steps=2");
    assert_eq!(status, Some(0), "{said}");
}

#[test]
fn wrong_input_gets_one_line_with_the_place() {
    let place = Place::new();
    let told = |args: &[&str]| place.told(1, args);
    std::fs::create_dir(place.path("sub")).unwrap();
    assert!(told(&["train", "nowhere.toml"]).contains("nowhere.toml: could not be read"));
    let place_of_none = place.path("run/recipe.toml");
    std::fs::create_dir(place.path("run")).unwrap();
    std::fs::write(&place_of_none, "").unwrap();
    assert!(
        told(&["train", "recipe.toml", "--resume"]).contains("no run is here that it would be")
    );
    std::fs::remove_dir_all(place.path("run")).unwrap();
    for (set, said) in [
        ("train.stesp=3", "did you mean `steps`?"),
        ("train.steps", "--set train.steps: has no `=`; write --set key.path=value"),
        ("trian.steps=3", "--set trian.steps=3: unknown field `trian`"),
    ] {
        for command in [&["train", "recipe.toml"][..], &["explain", "--recipe", "recipe.toml"]] {
            // The command line itself is wrong.
            let line = place.told(2, &[command, &["--set", set]].concat());
            assert!(line.contains(said), "{line}");
        }
    }
    // What a field of the command line cannot be is wrong with the command line; what else is wrong, with the rest.
    for (code, set, said) in [
        (2, "attention.mask=causl", "attention.mask: there is no `causl`"),
        (2, "attention.mask=causal & documnet", "did you mean `document`?"),
        (2, "attention.score=score + bias[h]", "attention.score: there is no captured"),
        (2, "attention.buffers.doc={shape=[1],values=[1]}", "every batch brings this buffer"),
        (2, "attention.scalars.n=\"x\"", "n: a truth value, an integer or a float is expected"),
        (2, "run.dir=", "run.dir is empty; name a folder"),
        (1, "run.dir=00.txt", "00.txt: is no folder; choose another run.dir"),
        (1, "run.dir=/proc/x", "/proc/x: cannot be made: "),
        (1, "data.root=nowhere", "nowhere: there is no such folder; set data.root to the folder"),
        (2, "mesh.machine=", "mesh.machine is empty; name a machine ("),
        (2, "data.files=[*.txt]", "data.files is given [*.txt], which is no value of TOML"),
        (2, "train.steps=-1", "train.steps is -1; a whole number of at least 0 is expected"),
        (2, "train.batch_rows=0", "train.batch_rows is 0; it must be at least 1"),
        (2, "train.batch_rows=99999999999", "times data.len (32) it may be 2147483647 at most"),
        (1, "train.batch_rows=60000000", "but the machine has free"),
        (1, "model.hidden_size=1000000000", "but the machine has free"),
        (2, "model.hidden_size=99999999999", "model.hidden_size: is 99999999999; the limit is"),
        (2, "model.num_hidden_layers=99999999", "model.num_hidden_layers: is 99999999; the limit"),
        (1, "model.num_attention_heads=3", "num_attention_heads (3) must divide it"),
        (2, "model.vocab_size=10", "model.vocab_size is 10, below the tokenizer's 257"),
        (1, "data.files=[\"sub\"]", "`sub` is a folder; write `sub/**/*`"),
        (1, "data.files=[\"*.rs\"]", "no file matches `*.rs`"),
        (1, "data.tokenizer=none.json", "none.json: is missing"),
    ] {
        // Elsewhere the system does not say how much memory there is.
        if cfg!(target_os = "linux") || !said.contains("machine has") {
            let line = place.told(code, &["train", "recipe.toml", "--set", set]);
            assert!(line.contains(said), "{set}: {line}");
            let named = line.contains(&format!("error: --set {set}: "));
            assert_eq!(named, code == 2, "{line}");
        }
    }
    std::fs::write(place.path("99.txt"), b"\xff\xfe").unwrap();
    let utf8 = told(&["train", "recipe.toml"]);
    assert!(utf8.contains("99.txt: the document is not UTF-8"), "{utf8}");
    std::fs::write(place.path("99.txt"), "").unwrap();
    assert!(told(&["train", "recipe.toml"]).contains("99.txt: the document is empty"));
    std::fs::remove_file(place.path("99.txt")).unwrap();
    assert!(!place.path("run").exists(), "nothing was written");

    let summary = place.json(&["train", "recipe.toml", "--json", "--set", "train.steps=4"]);
    let checkpoint = summary["checkpoint"].as_str().unwrap();
    if cfg!(target_os = "linux") {
        let many = told(&["eval", checkpoint, "00.txt", "--batch-rows", "99999999999999"]);
        assert!(many.contains("but the machine has free"), "{many}");
    }
    let file = Path::new(checkpoint).join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    let cut = told(&["eval", checkpoint, "00.txt"]);
    assert!(cut.contains("model.safetensors") && cut.contains("cut short"), "{cut}");
    let mut flipped = whole.clone();
    let last = flipped.len() - 3;
    flipped[last..].iter_mut().for_each(|byte| *byte ^= 0x10);
    std::fs::write(&file, &flipped).unwrap();
    for command in [&["eval", checkpoint, "00.txt"][..], &["generate", checkpoint]] {
        let damaged = told(command);
        assert!(damaged.contains("does not match its checksum"), "{damaged}");
        let unchecked = place.run(&[command, &["--skip-checksums"]].concat());
        assert!(unchecked.status.success(), "{}", String::from_utf8_lossy(&unchecked.stderr));
    }
    std::fs::write(&file, &whole).unwrap();
    std::fs::write(place.path("blank.txt"), " ").unwrap();
    let blank = told(&["eval", checkpoint, "blank.txt"]);
    assert!(blank.contains("or pass --skip-bad"), "{blank}");
    std::fs::remove_file(place.path("blank.txt")).unwrap();
    let fewer = told(&["train", "recipe.toml", "--resume", "--set", "train.steps=3"]);
    assert!(fewer.contains("the run has taken 4 steps, but 3 are asked for"), "{fewer}");
    std::fs::write(place.path("00.txt"), "another text").unwrap();
    let changed = told(&["train", "recipe.toml", "--resume"]);
    assert!(changed.contains("the documents are not those"), "{changed}");
}

#[test]
fn published_models_are_explained_without_their_files() {
    let recipes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let place = Place::new();
    for (name, parameters) in [("smollm-135m", 134_515_008u64), ("llama3-8b", 8_030_261_248)] {
        let file = recipes.join(format!("{name}.toml")).display().to_string();
        let found = place.json(&["explain", "--recipe", &file, "--json"]);
        assert_eq!(found["parameters"], parameters, "{name}");
        let total = |mode: &str| found["memory_bytes"][mode]["total"].as_u64().unwrap();
        assert!(total("none") > total("attention") && total("attention") > total("full"));
    }
}

#[test]
fn layers_with_programs_of_their_own_are_explained_trained_and_run() {
    let place = Place::new();
    let programs = r#"[attention]
layers = ["local", "global"]
[attention.programs.local]
mask = "causal & document & window(4)"
[attention.programs.global]
mask = "causal & document"
score = "softcap(30) then relative_bias"
[attention.programs.global.learned.rel_bias]"#;
    place.recipe(|r| {
        let (before, rest) = r.split_once("[attention]").unwrap();
        let (_, after) = rest.split_once("[attention.learned.rel_bias]").unwrap();
        format!("{before}{programs}{after}")
    });
    let told = place.json(&["explain", "--recipe", "recipe.toml", "--json"]);
    for name in ["local", "global"] {
        assert_eq!(told["attention"][name]["backend"], "cpu", "{told}");
    }
    let shown = place.run(&["explain", "--recipe", "recipe.toml"]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("attention of one layer of the program `local`, one"), "{shown}");
    let summary = place.json(&["train", "recipe.toml", "--json", "--set", "train.steps=3"]);
    let checkpoint = summary["checkpoint"].as_str().unwrap();
    let evaluated = place.json(&["eval", checkpoint, "00.txt", "--json"]);
    assert!(evaluated["loss"].as_f64().unwrap() > 0.0, "{evaluated}");
    let wrote = place.run(&["generate", checkpoint, "--prompt", "the quick", "--max-tokens", "3"]);
    assert!(wrote.status.success(), "{}", String::from_utf8_lossy(&wrote.stderr));
    assert!(!String::from_utf8_lossy(&wrote.stderr).contains("it ends here"));
    let wrote = place.run(&["generate", checkpoint, "--prompt", "the", "--max-tokens", "9999"]);
    let said = String::from_utf8_lossy(&wrote.stderr);
    assert!(wrote.status.success() && said.contains("it ends here: the model takes "), "{said}");
    let set = ["train", "recipe.toml", "--set", "attention.layers=[\"local\", \"globl\"]"];
    let refused = place.run(&set);
    let refused = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.contains("`layers` names `globl`; `programs` has global, local"), "{refused}");
}

/// Models whose weights and moments, activations, logits, workspace of attention or threads take the
/// memory, and the process itself where all of them are small; in each mode of computing again.
#[cfg(target_os = "linux")]
#[test]
fn the_memory_that_explain_and_train_print_is_the_peak_of_the_run() {
    let place = Place::new();
    let six_heads = ["model.num_attention_heads=6", "attention.learned.rel_bias.shape=[6, 17]"];
    let six = |sizes: &[&'static str]| [sizes, &six_heads].concat();
    for (mode, sizes) in [
        (
            "none",
            vec![
                "model.vocab_size=16384",
                "model.hidden_size=512",
                "model.num_attention_heads=8",
                "attention.learned.rel_bias.shape=[8, 17]",
            ],
        ),
        (
            "none",
            vec![
                "model.hidden_size=64",
                "model.intermediate_size=176",
                "model.num_hidden_layers=6",
                "attention.learned.rel_bias.shape=[2, 65]",
                "data.len=256",
                "train.batch_rows=16",
            ],
        ),
        (
            "none",
            vec![
                "model.vocab_size=8192",
                "model.hidden_size=192",
                "data.len=256",
                "train.batch_rows=4",
            ],
        ),
        ("none", vec![]),
        ("none", vec!["model.hidden_size=256", "model.intermediate_size=2048", "data.len=128"]),
        ("none", vec!["model.hidden_size=64", "data.len=4096", "train.batch_rows=1"]),
        ("full", vec!["model.hidden_size=128", "model.num_hidden_layers=16", "data.len=256"]),
        (
            "full",
            six(&[
                "model.hidden_size=192",
                "data.len=512",
                "train.batch_rows=8",
                "data.held_out=0",
            ]),
        ),
        ("attention", six(&["model.hidden_size=192", "data.len=512", "train.batch_rows=8"])),
    ] {
        let recompute = format!("train.recompute=\"{mode}\"");
        let mut sets = Vec::new();
        let run = [&recompute, "train.steps=2", "train.save_every=1", "run.dir=memory"];
        for set in sizes.iter().chain(&run) {
            sets.extend(["--set", *set]);
        }
        let told =
            place.json(&[&["explain", "--recipe", "recipe.toml", "--json"], &sets[..]].concat());
        let told = told["memory_bytes"][mode]["total"].as_f64().unwrap();
        let train = [&["train", "recipe.toml", "--json", "--start-over"], &sets[..]].concat();
        let done = place.run(&train);
        let said = String::from_utf8(done.stderr).unwrap();
        let mib = format!("about {:.1} MiB of memory, saves included", told / f64::from(1 << 20));
        assert!(said.contains(&mib), "{mib}: {said}");
        let text = String::from_utf8(done.stdout).unwrap();
        let summary: serde_json::Value =
            serde_json::from_str(text.lines().last().unwrap()).unwrap();
        let peak = summary["peak_memory_bytes"].as_f64().unwrap();
        assert!((peak / told - 1.0).abs() < 0.1, "{sizes:?}: {told} told, {peak} measured");
    }
}

/// A byte-pair tokenizer of all texts of up to three of so many letters, and its number of tokens.
#[cfg(target_os = "linux")]
fn tokenizer(letters: u32) -> (String, usize) {
    let letters: Vec<String> =
        (0..letters).map(|i| char::from_u32(0x4e00 + i).unwrap().to_string()).collect();
    let longer = |texts: &[String]| -> Vec<(String, String)> {
        let with =
            |text: &String| letters.iter().map(|l| (text.clone(), l.clone())).collect::<Vec<_>>();
        texts.iter().flat_map(with).collect()
    };
    let merged = |pairs: &[(String, String)]| -> Vec<String> {
        pairs.iter().map(|(a, b)| format!("{a}{b}")).collect()
    };
    let pairs = longer(&letters);
    let triples = longer(&merged(&pairs));
    let merges: Vec<_> = pairs.iter().chain(&triples).collect();
    let texts = [letters.clone(), merged(&pairs), merged(&triples)].concat();
    let vocab: serde_json::Map<_, _> =
        texts.iter().enumerate().map(|(id, text)| (text.clone(), id.into())).collect();
    let model = serde_json::json!({
        "type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": false, "fuse_unk": false,
        "unk_token": letters[0], "ignore_merges": false, "dropout": null,
        "continuing_subword_prefix": null, "end_of_word_suffix": null,
    });
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": model,
    });
    (json.to_string(), texts.len())
}

#[cfg(target_os = "linux")]
#[test]
fn a_large_tokenizer_counts_in_the_memory_that_is_told() {
    let place = Place::new();
    let (json, tokens) = tokenizer(40);
    std::fs::write(place.path("tokenizer.json"), json).unwrap();
    let sizes = [format!("model.vocab_size={tokens}"), "train.steps=1".into(), "run.dir=a".into()];
    let run = |more: &[&str]| {
        let sets: Vec<_> = sizes.iter().map(String::as_str).chain(more.iter().copied()).collect();
        let sets: Vec<_> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let explain = [&["explain", "--recipe", "recipe.toml", "--json"], &sets[..]].concat();
        let told = place.json(&explain)["memory_bytes"]["none"]["total"].as_f64().unwrap();
        let train = [&["train", "recipe.toml", "--json", "--start-over"], &sets[..]].concat();
        [told, place.json(&train)["peak_memory_bytes"].as_f64().unwrap()]
    };
    let (bytes, large) = (run(&[]), run(&["data.tokenizer=\"tokenizer.json\""]));
    let [told, peak] = [large[0] - bytes[0], large[1] - bytes[1]];
    assert!((peak / told - 1.0).abs() < 0.35, "{told} told, {peak} measured");
}

#[test]
fn a_checkpoint_is_fine_tuned_on_conversations() {
    let place = Place::new();
    let base = place.json(&["train", "recipe.toml", "--json", "--set", "train.steps=4"]);
    let chat = r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}"#;
    std::fs::write(place.path("chat.jsonl"), format!("{chat}\n").repeat(8)).unwrap();
    let from = format!("model.checkpoint={}", base["checkpoint"].as_str().unwrap());
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/finetune-chat.toml");
    let root = format!("data.root={}", place.path("").display());
    let args = [
        "train",
        &recipe.display().to_string(),
        "--json",
        "--set",
        &from,
        "--set",
        &root,
        "--set",
        "data.files=[\"chat.jsonl\"]",
        "--set",
        "data.len=32",
        "--set",
        "train.steps=3",
        "--set",
        "run.dir=tuned",
        "--set",
        "data.held_out=0.0",
    ];
    let tuned = place.json(&args);
    assert_eq!(tuned["steps"], 3);
    assert!(tuned["train_loss"].as_f64().unwrap().is_finite());
    // What is proposed fits what was saved: a template of its own or none.
    std::fs::write(
        place.path("plain.jinja"),
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    )
    .unwrap();
    let template = format!("data.chat_template={}", place.path("plain.jinja").display());
    let plain = args.iter().filter(|arg| **arg != "--json").copied();
    let over: Vec<&str> = plain.chain(["--start-over"]).collect();
    for (more, talks) in [(&[][..], false), (&["--set", &template], true)] {
        let done = place.run(&[&over[..], more].concat());
        let said = String::from_utf8(done.stdout).unwrap();
        let line = said.lines().find(|line| line.starts_with("try it")).expect(&said);
        assert_eq!(line.contains("--chat"), talks, "{line}");
    }
}

/// A tokenizer of SentencePiece's kind leaves out the space that a text would begin with.
#[test]
fn a_text_goes_on_behind_its_prompt_with_the_space_between_words() {
    let place = Place::new();
    let space = serde_json::json!({
        "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true
    });
    let vocab = serde_json::json!({ "▁fox": 0 });
    let file = serde_json::json!({
        "version": "1.0", "pre_tokenizer": space, "decoder": space,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "▁fox" },
    });
    std::fs::write(place.path("tokenizer.json"), file.to_string()).unwrap();
    let sets = ["--set", "train.steps=1", "--set", "data.tokenizer=tokenizer.json"];
    let run = place.json(&[&["train", "recipe.toml", "--json"][..], &sets].concat());
    let checkpoint = run["checkpoint"].as_str().unwrap();
    let generate = ["generate", checkpoint, "--prompt", "fox", "--max-tokens", "2"];
    assert_eq!(place.run(&generate).stdout, b"fox fox fox\n");
    assert_eq!(place.json(&[&generate[..], &["--json"]].concat())["text"], " fox fox");
    // An answer stands by itself.
    assert_eq!(place.json(&[&generate[..], &["--json", "--chat"]].concat())["text"], "fox fox");
    // What is left out is told with the first reason.
    std::fs::write(place.path("talks.jsonl"), "{}\n{\"text\": \"fox fox\"}\n\n").unwrap();
    let skips = place.run(&["eval", checkpoint, "talks.jsonl", "--skip-bad"]);
    let said = String::from_utf8(skips.stderr).unwrap();
    let first = "2 documents skipped; the first is talks.jsonl:1: the line needs either";
    assert!(skips.status.success() && said.starts_with(first), "{said}");
    // Of a text of one token nothing is foretold, and a loss of 0 would be the best there is.
    std::fs::write(place.path("one.txt"), "fox").unwrap();
    let told = place.told(1, &["eval", checkpoint, "one.txt", "--json"]);
    assert!(
        told.contains("no token of these documents has a target, so there is no loss"),
        "{told}"
    );
}
