//! Parts of kernels as C++ programs of this machine, for tests.

use std::io::Write;
use std::process::{Command, Stdio};

/// What the program `code` writes, compiled with `options` and given its input; nothing, and a line that says
/// so, without a compiler.
pub fn output(code: &str, options: &[&str], input: Vec<u8>) -> Option<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let (file, program) = (folder.path().join("program.cpp"), folder.path().join("program"));
    std::fs::write(&file, code).unwrap();
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-w"]).args(options).arg("-o").args([&program, &file]);
    let compiled = match compiler.output() {
        Err(error) => {
            println!("skipped: no C++ compiler `c++`: {error}");
            return None;
        }
        Ok(compiled) => compiled,
    };
    let message = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{}", message.chars().take(3000).collect::<String>());
    let mut program = Command::new(&program);
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().expect("it is piped");
    // Beside it: what is read and what is written may be more than pipes hold.
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let done = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(done.status.success(), "the program ended with {}", done.status);
    Some(done.stdout)
}

/// The same of a program that reads nothing and writes text.
#[allow(dead_code)] // Not every file of tests needs both.
pub fn text(code: &str) -> Option<String> {
    output(code, &[], Vec::new()).map(|bytes| String::from_utf8(bytes).unwrap())
}
