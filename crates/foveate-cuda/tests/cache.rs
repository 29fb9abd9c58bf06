//! The cache between processes: this file's test runs itself again in processes of their own.

use std::env;
use std::process::{Command, Stdio};
use std::time::Instant;

use foveate_cuda::compile::codegen::{Extent, Mods, ModsSource, Options};
use foveate_cuda::compile::config::{Config, Elem, Kernel};
use foveate_cuda::compile::source::source;
use foveate_gpu::Arch;
use foveate_gpu::cache::{Cache, FOLDER_VARIABLE};
use foveate_gpu::nvrtc::Compiler;

const ROLE: &str = "FOVEATE_TEST_OF_CACHE";

/// A real kernel, for the times to mean something.
fn forward() -> String {
    let extent = Extent { batch: 1, heads_q: 8, heads_kv: 8, queries: 512, keys: 512 };
    let options = Options { extent, fast_math: true, checked: false, deterministic: false };
    let mods = ModsSource::new(Mods::default(), &options).unwrap();
    source(&Config::new(Kernel::Forward, Elem::Bf16, 128, 128), &mods)
}

/// What a process of the test does: compiles, and prints what came of it.
fn compile_here(compiler: &Compiler) {
    let (cache, source) = (Cache::get(), forward());
    let began = Instant::now();
    let compiled = cache.compile(compiler, &source, Arch::new((9, 0))).unwrap();
    let ms = began.elapsed().as_secs_f64() * 1e3;
    let sum: u64 = compiled.cubin.iter().map(|&b| u64::from(b)).sum();
    println!("result {} {sum} {ms}", compiled.cubin.len());
    assert_eq!(cache.trouble(), None);
}

/// Length and sum of the machine code, and milliseconds, of processes started together.
fn processes(folder: &std::path::Path, count: usize) -> Vec<(String, f64)> {
    let me = env::current_exe().unwrap();
    let start = |_| {
        let mut command = Command::new(&me);
        command.args(["--nocapture", "--exact", "processes_share_one_folder"]);
        command.env(ROLE, "worker").env(FOLDER_VARIABLE, folder).stdout(Stdio::piped());
        command.spawn().unwrap()
    };
    let started: Vec<_> = (0..count).map(start).collect();
    let result = |process: std::process::Child| {
        let done = process.wait_with_output().unwrap();
        let out = String::from_utf8(done.stdout).unwrap();
        assert!(done.status.success(), "{out}");
        let line = out.lines().find_map(|l| l.split_once("result ")).expect("a result").1;
        let (what, ms) = line.rsplit_once(' ').unwrap();
        (what.to_owned(), ms.parse().unwrap())
    };
    started.into_iter().map(result).collect()
}

#[test]
fn processes_share_one_folder() {
    let compiler = match Compiler::get() {
        Ok(compiler) => compiler,
        Err(e) => return println!("skipped: {e}"),
    };
    if env::var_os(ROLE).is_some() {
        return compile_here(compiler);
    }
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("kernels");
    let cold = processes(&folder, 3);
    let warm = processes(&folder, 1);
    assert!(cold.iter().chain(&warm).all(|(what, _)| *what == cold[0].0), "{cold:?} {warm:?}");
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|f| f.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "one kernel, no parts of files: {files:?}");
    println!("cold {:.0} ms of three at a time, warm {:.2} ms", cold[0].1, warm[0].1);
    assert!(warm[0].1 < cold[0].1 / 4.0, "{cold:?} {warm:?}");
}
