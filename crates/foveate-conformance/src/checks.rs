//! What commands that check one thing after the other print: a line for each.

use foveate_cuda::CudaError;

/// A check: the engine failed, the result is wrong, or it passed.
pub type Outcome = Result<Result<(), String>, CudaError>;

/// The checks of a command so far.
#[derive(Debug)]
pub struct Checks {
    passed: bool,
}

impl Checks {
    /// None yet.
    pub fn new() -> Self {
        Self { passed: true }
    }

    /// Prints the outcome of the check `name`.
    pub fn say(&mut self, name: &str, outcome: Outcome) {
        let line = match outcome {
            Ok(Ok(())) => "passed".to_owned(),
            Ok(Err(wrong)) => format!("FAILED: {wrong}"),
            Err(e) => format!("FAILED: {e}"),
        };
        self.passed &= line == "passed";
        println!("{name:<62} {line}");
    }

    /// Prints why the check `name` is not made.
    pub fn skip(&self, name: &str, why: impl std::fmt::Display) {
        println!("{name:<62} skipped: {why}");
    }

    /// Whether every check passed.
    pub fn passed(&self) -> bool {
        self.passed
    }
}
