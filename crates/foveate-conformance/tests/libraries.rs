//! What `foveate-conformance libraries` checks on a GPU, on libraries made for tests: layouts,
//! arguments and errors are right before a GPU sees them, and the checks see what is wrong.

#[path = "../../foveate-gpu/tests/driver/mod.rs"]
mod driver;

use std::process::Command;

/// What the command prints with libraries made for tests, and whether it succeeds.
fn run(options: &[&str], variables: &[(&str, &str)]) -> Option<(String, bool)> {
    let folder = driver::build(&["cublaslt", "nccl"], options)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_foveate-conformance"));
    command.arg("libraries").env("FOVEATE_CUDA_LIBRARIES", folder.path());
    let done = command.envs(variables.iter().copied()).output().unwrap();
    let [out, said] = [done.stdout, done.stderr].map(|text| String::from_utf8(text).unwrap());
    println!("{out}{said}");
    Some((out, done.status.success()))
}

#[test]
fn products_and_transfers_are_right_on_libraries_of_tests() {
    let Some((out, passed)) = run(&[], &[]) else { return };
    assert!(passed);
    let count = |what: &str| out.lines().filter(|line| line.contains(what)).count();
    assert_eq!((count("passed"), count("FAILED")), (15, 0));
    assert_eq!((count("products of"), count("transfers of")), (6, 3));
}

#[test]
fn products_and_sums_that_are_a_little_wrong_are_found() {
    let Some((out, passed)) = run(&["-DWRONG"], &[]) else { return };
    assert!(!passed);
    let failed = |line: &&str| line.contains("products of") && line.contains("FAILED: seed");
    assert_eq!(out.lines().filter(failed).count(), 6);
    let failed = |line: &&str| line.contains("transfers of") && line.contains("wrong numbers");
    assert_eq!(out.lines().filter(failed).count(), 3);
}
