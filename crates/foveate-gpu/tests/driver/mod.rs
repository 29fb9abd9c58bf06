//! Libraries made for tests, in C, in place of NVIDIA's: a driver, cuBLASLt, NCCL, NVML.

// Not every test that has this module uses all of it.
#![allow(dead_code)]

use std::env;
use std::path::Path;
use std::process::Command;

use foveate_gpu::GpuError;
use foveate_gpu::library::Library;
use tempfile::TempDir;

/// Set in the process that has the libraries.
const ROLE: &str = "FOVEATE_TEST_OF_DRIVER";

/// A folder with a driver and `more` of `cublaslt`, `nccl` and `nvml`, compiled with these options and those
/// of the variable `CFLAGS`, and of `nvrtc`, the machine's own; nothing, and a line that says so,
/// where there is no C compiler or no NVRTC.
pub fn build(more: &[&str], options: &[&str]) -> Option<TempDir> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../foveate-gpu/tests/driver");
    let folder = tempfile::tempdir().unwrap();
    let more_options = env::var("CFLAGS").unwrap_or_default();
    for name in ["cuda"].iter().chain(more) {
        if *name == "nvrtc" {
            if let Err(e) = link_nvrtc(folder.path()) {
                println!("skipped: {e}");
                return None;
            }
            continue;
        }
        let file = match *name {
            "cuda" => "libcuda.so.1",
            "cublaslt" => "libcublasLt.so.13",
            "nccl" => "libnccl.so.2",
            "nvml" => "libnvidia-ml.so.1",
            _ => panic!("no library for tests is called {name}"),
        };
        let mut compile = Command::new("cc");
        compile.args(["-shared", "-fPIC", "-O1", "-pthread", "-o", file]).args(options);
        compile.args(more_options.split_whitespace());
        compile.arg(format!("-Wl,-soname,{file}")).arg(sources.join(format!("{name}.c")));
        if *name != "cuda" {
            // The driver beside it, which is open already.
            compile.args(["-Wl,-rpath,$ORIGIN", "libcuda.so.1", "-lm"]);
        }
        match compile.current_dir(folder.path()).status() {
            Ok(status) => assert!(status.success(), "{name}.c for tests does not compile"),
            Err(e) => {
                println!("skipped: no C compiler `cc`: {e}");
                return None;
            }
        }
    }
    Some(folder)
}

/// Puts links to this machine's NVRTC and its builtins into a folder.
fn link_nvrtc(folder: &Path) -> Result<(), GpuError> {
    let file = Library::Nvrtc.open()?.path().to_owned();
    let beside = file.parent().filter(|from| !from.as_os_str().is_empty());
    for entry in beside.into_iter().flat_map(|from| from.read_dir().unwrap()) {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap();
        if name.to_string_lossy().starts_with("libnvrtc") {
            std::os::unix::fs::symlink(&path, folder.join(name)).unwrap();
        }
    }
    Ok(())
}

/// Whether this is the process with the libraries made for tests. Otherwise starts it for the
/// test `name`, with `more` libraries than the driver, options of the C compiler and variables,
/// and waits for it to succeed.
pub fn inside(name: &str, more: &[&str], options: &[&str], variables: &[(&str, &str)]) -> bool {
    if env::var_os(ROLE).is_some() {
        return true;
    }
    let Some(folder) = build(more, options) else { return false };
    let mut again = Command::new(env::current_exe().unwrap());
    again.args(["--exact", name, "--nocapture"]).env(ROLE, "inside");
    // Nothing of this machine's own.
    again.env("PATH", "").env("HOME", folder.path()).env_remove("VIRTUAL_ENV");
    again.env_remove("CONDA_PREFIX").env("FOVEATE_CUDA_LIBRARIES", folder.path());
    let done = again.envs(variables.iter().copied()).output().unwrap();
    let (out, said) =
        (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{}: {out}{said}", done.status);
    assert!(out.contains("1 passed"), "there is no test {name}");
    false
}
