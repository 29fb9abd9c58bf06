//! The trainer as a user runs it on a GPU, with a driver and cuBLASLt made for tests: a run on it computes nothing
//! that means anything, and queues, waits and saves as on any other.

#![cfg(target_os = "linux")]

#[path = "../../foveate-gpu/tests/driver/mod.rs"]
mod driver;
// Not all of it is needed here.
#[allow(dead_code)]
mod place;

use std::path::Path;

use foveate_gpu::library::Library;
use place::Place;

/// Of the driver's memory: enough for any run here.
const PLENTY: (&str, &str) = ("TOTAL", "4294967296");

/// Trains on the first GPU of the libraries in a folder: its exit code, and what it says.
fn train(
    place: &Place,
    libraries: &Path,
    variables: &[(&str, &str)],
    sets: &[&str],
) -> (Option<i32>, String) {
    let mut args = vec!["train", "recipe.toml", "--device", "cuda:0", "--start-over"];
    for set in sets {
        args.extend(["--set", set]);
    }
    let mut command = place.command(&args);
    // Nothing of this machine's own.
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        command.env_remove(name);
    }
    command.env("PATH", "").env("HOME", libraries).env("FOVEATE_CUDA_LIBRARIES", libraries);
    // Kernels that have not changed are not compiled again.
    command.env("FOVEATE_CACHE_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels"));
    let done = command.envs(variables.iter().copied()).output().unwrap();
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
    let begins = "error: work on the device did not finish within 1 s; the stream hangs in one of";
    assert!(error.starts_with(begins) && error.contains("fv_embedding"), "{error}");
    assert!(!place.path("run/checkpoints").exists(), "{error}");
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
