//! C that a process has in place of functions of the system.

use std::path::Path;
use std::process::Command;

/// The variable that has a process load the C source `name` of this folder before all else; none, and a line that
/// says so, where there is no C compiler.
pub fn preloaded(folder: &Path, name: &str) -> Option<(&'static str, String)> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/place/{name}.c"));
    let library = folder.join(format!("{name}.so"));
    let mut compile = Command::new("cc");
    compile.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source);
    match compile.status() {
        Ok(status) => assert!(status.success(), "{name}.c does not compile"),
        Err(e) => {
            println!("skipped: no C compiler `cc`: {e}");
            return None;
        }
    }
    Some(("LD_PRELOAD", library.display().to_string()))
}
