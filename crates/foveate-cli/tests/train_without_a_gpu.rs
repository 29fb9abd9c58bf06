//! The trainer as a user runs it on a GPU, with a driver and cuBLASLt made for tests: a run on it computes nothing
//! that means anything, and queues, waits and saves as on any other.

#![cfg(target_os = "linux")]

#[path = "../../foveate-gpu/tests/driver/mod.rs"]
mod driver;
#[path = "place/ends.rs"]
mod ends;
// Not all of it is needed here.
#[allow(dead_code)]
mod place;
#[path = "place/preload.rs"]
mod preload;
#[path = "place/run.rs"]
mod run;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ends::Disk;
use foveate_gpu::library::Library;
use foveate_nn::ParameterState;
use place::Place;
use run::{Run, slow_disk};

/// Of the driver's memory: enough for any run here.
const PLENTY: (&str, &str) = ("TOTAL", "4294967296");

/// The command that trains on the first GPU of the libraries in a folder, by these arguments.
fn command(place: &Place, libraries: &Path, variables: &[(&str, &str)], args: &[&str]) -> Command {
    let mut command = place.command(args);
    if !args.contains(&"--device") {
        command.args(["--device", "cuda:0"]);
    }
    with_libraries(command, libraries, variables)
}

/// A command with the libraries in a folder.
fn with_libraries(mut command: Command, libraries: &Path, variables: &[(&str, &str)]) -> Command {
    // Nothing of this machine's own.
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        command.env_remove(name);
    }
    command.env("PATH", "").env("HOME", libraries).env("FOVEATE_CUDA_LIBRARIES", libraries);
    // Kernels that have not changed are not compiled again.
    command.env("FOVEATE_CACHE_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels"));
    command.envs(variables.iter().copied());
    command
}

/// Trains so, from the beginning: the exit code, and what is said.
fn train(
    place: &Place,
    libraries: &Path,
    variables: &[(&str, &str)],
    sets: &[&str],
) -> (Option<i32>, String) {
    let args = ["train", "recipe.toml", "--start-over"]
        .into_iter()
        .chain(sets.iter().flat_map(|set| ["--set", set]));
    told(command(place, libraries, variables, &args.collect::<Vec<_>>()).output().unwrap())
}

fn told(done: Output) -> (Option<i32>, String) {
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(!said.contains("panicked"), "{said}");
    (done.status.code(), said)
}

/// Heads of a size that tensor cores have, and weights that products take.
fn place() -> Place {
    let place = Place::new();
    place.recipe(|recipe| {
        let wide = recipe.replace("hidden_size = 16", "hidden_size = 64");
        wide.replace("save_every = 4", "save_every = 0").replace("steps = 24", "steps = 4")
    });
    place
}

#[test]
fn a_gpu_that_cannot_train_is_one_line_before_anything_is_written() {
    let place = place();
    let refused = |libraries: &[&str], variables: &[(&str, &str)], wanted: &[&str]| {
        let Some(folder) = driver::build(libraries, &["-DLOADS"]) else { return };
        let (code, said) = train(&place, folder.path(), variables, &[]);
        assert_eq!(code, Some(1), "{said}");
        let error = said.lines().last().unwrap();
        assert!(error.starts_with("error: "), "{said}");
        assert!(wanted.iter().all(|words| error.contains(words)), "{error}");
        assert!(!place.path("run").exists(), "{error}");
    };
    let both = ["nvrtc", "cublaslt"];
    let remedy = "run on the CPU by --device cpu";
    refused(&[], &[("INIT", "100")], &["cuda:0: ", remedy]);
    if Library::CublasLt.open().is_err() {
        refused(&["nvrtc"], &[PLENTY], &["cuBLASLt was not found in", "pip install nvidia-cublas"]);
    }
    let small = ["the run takes ", "but the GPU has free 64.0 MiB", "choose a smaller model"];
    refused(&both, &[], &small);
}

#[test]
fn a_gpu_that_hangs_ends_the_run_and_names_its_last_launches() {
    let place = place();
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    let hangs = [PLENTY, ("HANGS", "1"), ("FOVEATE_TIMEOUT", "1")];
    let (code, said) = train(&place, folder.path(), &hangs, &[]);
    assert_eq!(code, Some(1), "{said}");
    let error = said.lines().last().unwrap();
    let begins = "error: before the first step was done: work on the device did not finish within 1 s; \
                  the stream hangs in one of";
    assert!(error.starts_with(begins) && error.contains("fv_embedding"), "{error}");
    let how = "then start again with --start-over: no checkpoint of this run was saved";
    assert!(error.ends_with(how), "{error}");
    assert!(!place.path("run/checkpoints").exists(), "{error}");
}

/// As a run on this host would reckon.
#[test]
fn the_links_that_explain_tells_are_those_of_the_gpu_that_the_recipe_asks_for() {
    let place = Place::new();
    let Some(folder) = driver::build(&[], &[]) else { return };
    for (device, name, by) in [
        ("cuda:0", "NVIDIA H100 80GB HBM3", "h100x8 by the GPU: "),
        ("auto", "NVIDIA H100 80GB HBM3", "h100x8 by the GPU: "),
        ("cuda:0", "NVIDIA L4", "h200x8 by default: "),
        ("cpu", "NVIDIA H100 80GB HBM3", "h200x8 by default: "),
    ] {
        let set = format!("run.device={device}");
        let args = ["explain", "--recipe", "recipe.toml", "--mesh", "context=2", "--set", &set];
        let mut command = with_libraries(place.command(&args), folder.path(), &[("NAME", name)]);
        let done = command.output().unwrap();
        let out = String::from_utf8(done.stdout.clone()).unwrap();
        let links = out.lines().find(|line| line.starts_with("links "));
        assert!(links.is_some_and(|line| line.contains(by)), "{out}{}", told(done).1);
    }
}

/// What a run prints as JSON, a line each; on this machine's CPU without libraries.
fn lines(place: &Place, libraries: Option<&Path>, sets: &[&str]) -> Vec<serde_json::Value> {
    lines_of(place, libraries, &[PLENTY], sets)
}

/// The same of a driver with these variables.
fn lines_of(
    place: &Place,
    libraries: Option<&Path>,
    variables: &[(&str, &str)],
    sets: &[&str],
) -> Vec<serde_json::Value> {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let args: Vec<&str> =
        ["train", "recipe.toml", "--start-over", "--json"].into_iter().chain(sets).collect();
    let done = match libraries {
        Some(libraries) => command(place, libraries, variables, &args).output().unwrap(),
        None => place.run(&args),
    };
    let out = String::from_utf8(done.stdout.clone()).unwrap();
    let (code, said) = told(done);
    assert_eq!(code, Some(0), "{said}");
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The metrics of the steps among such lines.
fn metrics(lines: &[serde_json::Value]) -> Vec<&serde_json::Value> {
    lines.iter().filter(|line| line["kind"] == "step").map(|line| &line["metrics"]).collect()
}

#[test]
fn the_memory_that_a_run_tells_is_that_of_its_gpu() {
    let place = place();
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    let run = |sets: &[&str]| {
        let sets = [&["train.eval_every=0", "data.held_out=0", "run.graphs=off"], sets].concat();
        lines(&place, Some(folder.path()), &sets)
    };
    let peak = |lines: &[serde_json::Value]| lines.last().unwrap()["peak_memory_bytes"].as_u64();
    let few = run(&[]);
    for step in metrics(&few) {
        let bytes = |name: &str| step[name].as_u64().unwrap();
        assert!(0 < bytes("memory_bytes") && bytes("memory_bytes") <= bytes("peak_memory_bytes"));
        assert!(Some(bytes("peak_memory_bytes")) <= peak(&few), "{step}");
    }
    // A process has more resident before it does anything.
    assert!(peak(&few) < Some(4 << 20), "{:?}", peak(&few));
    // Weights, gradients and moments of a table of so many rows more.
    let wide = run(&["model.vocab_size=16384", "train.accumulate=2"]);
    let more = peak(&wide).unwrap() - peak(&few).unwrap();
    let table = 16_384 * 64 * 16;
    assert!((table..table * 3 / 2).contains(&more), "{more} for {table}");
}

#[test]
fn times_of_blocks_are_told_of_the_steps_that_they_are_of() {
    let place = place();
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    let lines = lines(&place, Some(folder.path()), &["train.steps=20", "train.eval_every=0"]);
    let names = ["attention_share", "linear_seconds", "loss_seconds", "optimizer_seconds"];
    for step in metrics(&lines) {
        let is_timed = [2, 18].contains(&step["step"].as_u64().unwrap());
        assert!(names.iter().all(|name| step[name].is_number() == is_timed), "{step}");
    }
}

#[test]
fn operations_are_counted_by_the_masks_of_the_recipe_on_every_device() {
    let place = place();
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    for mask in ["causal & document & sliding_window(5)", "causal & document", "causal"] {
        let of = format!("attention.mask=\"{mask}\"");
        let [cpu, gpu] = [None, Some(folder.path())].map(|libraries| {
            let lines = lines(&place, libraries, &[&of, "train.eval_every=0"]);
            let number = |step: &serde_json::Value, name: &str| step[name].as_f64().unwrap();
            let operations =
                |step: &&serde_json::Value| number(step, "tflops_live") * number(step, "seconds");
            metrics(&lines).iter().map(operations).collect::<Vec<f64>>()
        });
        assert_eq!(cpu.len(), 4);
        for (cpu, gpu) in cpu.iter().zip(&gpu) {
            assert!((gpu / cpu - 1.0).abs() < 1e-9, "{mask}: {gpu} on a GPU, {cpu} on a CPU");
        }
    }
    // Of a benchmark, too, whose programs differ by layer.
    let [cpu, gpu] = ["cpu", "cuda:0"].map(|device| {
        let mut args = vec!["bench", "train", "--model", "recipe.toml", "--steps", "1", "--json"];
        args.extend(["--window", "5", "--documents", "3", "--order", "fixed", "--device", device]);
        let done = command(&place, folder.path(), &[PLENTY], &args).output().unwrap();
        let found: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
        let number = |name: &str| found[name].as_f64().unwrap();
        number("tflops_live") / number("tokens_per_s")
    });
    assert!((gpu / cpu - 1.0).abs() < 1e-9, "{gpu} on a GPU, {cpu} on a CPU");
}

#[test]
fn operations_are_a_share_of_the_peak_of_a_card_that_is_known() {
    let place = place();
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    let of_card = |name: &str, sets: &[&str]| {
        let sets = [&["train.eval_every=0"], sets].concat();
        lines_of(&place, Some(folder.path()), &[PLENTY, ("NAME", name)], &sets)
    };
    let known = of_card("NVIDIA H200", &[]);
    for step in metrics(&known) {
        for count in ["live", "dense", "half"] {
            let rate = step[format!("tflops_{count}")].as_f64().unwrap();
            let share = step["mfu"][count].as_f64().unwrap();
            assert!(rate > 0.0 && (share * 989.4 / rate - 1.0).abs() < 1e-9, "{step}");
        }
    }
    let last = known.last().unwrap();
    let [rate, share] = ["tflops", "mfu"].map(|name| last[name]["live"].as_f64().unwrap());
    assert!(rate > 0.0 && (share * 989.4 / rate - 1.0).abs() < 1e-9, "{last}");
    // The peak is that of 16 bits, and what an unknown card reaches nobody knows.
    let unknown = [of_card("NVIDIA H200", &["precision.state=f32"]), of_card("Test GPU", &[])];
    for lines in unknown {
        assert!(metrics(&lines).iter().all(|step| step.get("mfu").is_none()));
        assert!(lines.last().unwrap()["mfu"].is_null());
    }
}

#[test]
fn checkpoints_are_evaluated_and_continued_on_a_gpu() {
    let place = place();
    // Logits of what is not computed are to be numbers.
    let options = ["-DLOADS", "-DZEROS"];
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &options) else { return };
    let trained = lines(&place, Some(folder.path()), &[]);
    let checkpoint = trained.last().unwrap()["checkpoint"].as_str().unwrap();
    let json = |mut command: Command| -> serde_json::Value {
        let done = command.output().unwrap();
        let out = done.stdout.clone();
        let (code, said) = told(done);
        assert_eq!(code, Some(0), "{said}");
        serde_json::from_slice(&out).unwrap()
    };
    let evaluate = ["eval", checkpoint, "00.txt", "01.txt", "--json"];
    let on_gpu = |args: &[&str]| json(command(&place, folder.path(), &[PLENTY], args));
    let (found, own) = (on_gpu(&evaluate), json(place.command(&evaluate)));
    for count in ["documents", "tokens"] {
        assert!(found[count].as_u64() > Some(0) && found[count] == own[count], "{found} {own}");
    }
    let text = on_gpu(&["generate", checkpoint, "--prompt", "the", "--max-tokens", "5", "--json"]);
    assert_eq!(text["token_ids"].as_array().unwrap().len(), 5, "{text}");
    // Neither fits a GPU without memory, and both say so before they read weights.
    for args in [&evaluate[..], &["generate", checkpoint, "--prompt", "the"]] {
        let small = [("TOTAL", "65536")];
        let (code, said) = told(command(&place, folder.path(), &small, args).output().unwrap());
        let error = said.lines().find(|line| line.starts_with("error: "));
        assert!(
            code == Some(1) && error.unwrap().ends_with("but the GPU has free 64.0 KiB"),
            "{said}"
        );
    }
}

/// A place with more to read: a driver that computes nothing learns nothing, which a pass over all documents finds
/// out.
fn long_place() -> Place {
    let place = place();
    for i in 0..12 {
        let text = format!("document {i}: ") + &"the quick brown fox ".repeat(30);
        std::fs::write(place.path(&format!("{i:02}.txt")), text).unwrap();
    }
    place
}

/// What is set where runs of a GPU end while they save.
const SAVES: [&str; 5] = [
    "train.steps=60",
    "train.save_every=4",
    "train.async_save=true",
    "train.keep=9",
    "train.eval_every=0",
];

#[test]
fn a_signal_during_a_save_beside_the_steps_of_a_gpu_ends_a_run_that_goes_on() {
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    let Some(slow) = slow_disk(folder.path(), 15) else { return };
    let place = long_place();
    let run = Run {
        place: &place,
        dir: place.path("run"),
        command: &|args| command(&place, folder.path(), &[PLENTY], args),
        sets: &SAVES,
    };
    ends::by_signals(&run, &slow);
}

#[test]
fn a_disk_that_is_full_ends_a_run_of_a_gpu_that_goes_on_when_there_is_space() {
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    let Some(slow) = slow_disk(folder.path(), 10) else { return };
    let place = long_place();
    let Some(disk) = Disk::new(&place.path("disk"), 32 << 20) else { return };
    let run = Run {
        place: &place,
        dir: disk.path.join("run"),
        command: &|args| command(&place, folder.path(), &[PLENTY], args),
        sets: &SAVES,
    };
    ends::by_a_full_disk(&run, &disk, &slow);
}

#[test]
fn a_run_says_whether_its_passes_are_recorded() {
    let place = place();
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    let recorded = "graphs: the pass of a batch is recorded and replayed";
    let of_host = "inputs of layers go to the memory of the host (train.offload)";
    // Unasked, since launches are most of so small a model's steps.
    for (sets, wanted) in [
        (&[][..], Some(recorded)),
        (&["run.graphs=off"], None),
        (&["train.offload=layer_inputs", "run.graphs=on"], Some(of_host)),
    ] {
        let (code, said) = train(&place, folder.path(), &[PLENTY], sets);
        assert_eq!(code, Some(0), "{said}");
        let line = said.lines().find(|line| line.starts_with("graphs: "));
        assert_eq!(line.is_some(), wanted.is_some(), "{said}");
        assert!(line.is_none_or(|line| line.contains(wanted.unwrap())), "{said}");
        assert_eq!(place.steps("run").len(), 4);
    }
}

#[test]
fn ranks_without_nccl_are_one_line_that_says_how_they_run_without_it() {
    let place = place();
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    if Library::Nccl.open().is_ok() {
        println!("skipped: this machine has NCCL");
        return;
    }
    let launched = |sets: &[&str]| {
        let mut args = vec!["launch", "--ranks", "2", "--", "train", "recipe.toml", "--start-over"];
        args.extend(["--device", "cuda", "--set", "mesh.shard=2"]);
        sets.iter().for_each(|set| args.extend(["--set", set]));
        let mut command = place.command(&args);
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            command.env_remove(name);
        }
        command.env("PATH", "").env("HOME", folder.path());
        command.env("FOVEATE_CUDA_LIBRARIES", folder.path()).envs([PLENTY]);
        command.env("FOVEATE_CACHE_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels"));
        let done = command.output().unwrap();
        (done.status.code(), String::from_utf8(done.stderr).unwrap())
    };
    let (code, said) = launched(&[]);
    assert_eq!(code, Some(1), "{said}");
    let told: Vec<&str> = said.lines().filter(|line| line.contains("error: ")).collect();
    assert_eq!(told.len(), 1, "{said}");
    for words in ["NCCL was not found in ", "(--ranks N)", "mesh.transfers = \"host\""] {
        assert!(told[0].contains(words), "{said}");
    }
    assert!(!place.path("run/checkpoints").exists());
    // What the line says to do.
    let (code, said) = launched(&["mesh.transfers=\"host\""]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(place.steps("run").len(), 4);
}

/// The files of tensors of all checkpoints of a run, by the names of both.
fn tensors(place: &Place) -> BTreeMap<String, Vec<u8>> {
    let all = std::fs::read_dir(place.path("run/checkpoints")).unwrap();
    let files = all.flat_map(|entry| std::fs::read_dir(entry.unwrap().path()).unwrap());
    let paths = files.map(|entry| entry.unwrap().path());
    let paths = paths.filter(|path| path.extension().is_some_and(|ext| ext == "safetensors"));
    let root = place.path("run/checkpoints");
    let named = |path: PathBuf| {
        let name = path.strip_prefix(&root).unwrap().display().to_string();
        (name, std::fs::read(&path).unwrap())
    };
    paths.map(named).collect()
}

#[test]
fn saves_beside_the_steps_of_a_gpu_have_the_bytes_of_those_that_steps_wait_for() {
    let place = place();
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    for state in ParameterState::ALL {
        let state = format!("precision.state={}", state.name());
        let [waited, beside] = ["false", "true"].map(|beside| {
            let beside = format!("train.async_save={beside}");
            let sets = [&state, &beside, "train.save_every=1", "train.keep=9"];
            let (code, said) = train(&place, folder.path(), &[PLENTY], &sets);
            assert_eq!(code, Some(0), "{state}, {beside}: {said}");
            tensors(&place)
        });
        assert_eq!(waited.len(), 2 * 4, "{state}: {:?}", waited.keys());
        assert!(waited.keys().eq(beside.keys()), "{state}: {:?}", beside.keys());
        for (name, bytes) in &waited {
            assert!(bytes == &beside[name], "{state}: {name}");
        }
    }
}

#[test]
fn weights_are_updated_in_the_backward_pass_whatever_is_kept_of_them() {
    let place = place();
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    for state in ["exact", "int8_moments", "bf16"] {
        let state = format!("precision.state={state}");
        let sets =
            ["optimizer.in_backward=true", "optimizer.clip_norm=0", "train.accumulate=1", &state];
        let (code, said) = train(&place, folder.path(), &[PLENTY], &sets);
        assert_eq!(code, Some(0), "{state}: {said}");
        assert_eq!(place.steps("run").len(), 4, "{state}");
    }
}

/// What a GPU does while a run saves beside its steps is known when the save is done: it is made, and told.
#[test]
fn a_gpu_that_fails_while_a_run_saves_ends_the_run_which_goes_on_when_it_is_there_again() {
    let Some(folder) = driver::build(&["nvrtc", "cublaslt"], &["-DLOADS"]) else { return };
    for (file, wanted) in [
        ("fault", "this process cannot use the GPU any more: start it again; then continue"),
        ("busy", "work on the device did not finish within 1 s; the stream hangs in one of"),
        (
            "full",
            "; end what else uses the GPU, or take a smaller batch or shorter sequences; then continue",
        ),
    ] {
        let place = long_place();
        let Some(mut slow) = slow_disk(folder.path(), 30) else { return };
        slow.push(("FOVEATE_TIMEOUT", "1".to_owned()));
        if file == "full" {
            // Every array is allocated when it is needed, and freed.
            slow.push(("FOVEATE_EXACT_MEMORY", "1".to_owned()));
        }
        let run = Run {
            place: &place,
            dir: place.path("run"),
            command: &|args| command(&place, folder.path(), &[PLENTY], args),
            sets: &[
                "train.steps=12",
                "train.save_every=4",
                "train.eval_every=6",
                "train.async_save=true",
            ],
        };
        let child = run.start_and_save(&slow);
        let saved = run.named(".writing-");
        std::fs::write(folder.path().join(file), "").unwrap();
        let (code, said) = run.ended(child);
        std::fs::remove_file(folder.path().join(file)).unwrap();
        assert_eq!(code, Some(1), "{said}");
        assert!(said.lines().last().unwrap().contains(wanted), "{said}");
        assert!(said.lines().last().unwrap().starts_with("error: after step "), "{said}");
        run.says_how_it_goes_on(&said);
        let name = |path: &Path| path.to_str().unwrap().rsplit_once('-').unwrap().1.to_owned();
        assert!(name(&saved[0]) <= name(run.checkpoints().last().unwrap()), "{said}");
        run.is_as_if_it_had_not_ended();
    }
}
