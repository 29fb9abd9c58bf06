//! Commands on an emulated GPU, by `scripts/emulated-gpu.sh`.

use std::path::Path;
use std::process::{Command, Output};

/// What a program writes that runs there with what `more` adds; nothing, and a line that says so, where a compiler is
/// missing.
pub fn emulated(program: &str, more: impl FnOnce(&mut Command)) -> Option<Output> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/emulated-gpu.sh");
    let mut command = Command::new("bash");
    more(command.arg(script).arg(program));
    let output = command.output().map_err(|e| println!("skipped: no bash: {e}")).ok()?;
    if output.status.code() == Some(77) {
        println!("skipped: {}", String::from_utf8_lossy(&output.stderr).trim());
        return None;
    }
    Some(output)
}
