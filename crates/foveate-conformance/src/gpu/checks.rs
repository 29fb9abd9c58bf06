//! Commands that check one thing after the other and print a line for each.

use std::fmt::Display;
use std::sync::Arc;

use foveate_cuda::{CudaError, CudaErrorKind, Engine};
use foveate_gpu::GpuErrorKind;

/// A check: the engine failed, the result is wrong, or it passed.
pub type Outcome = Result<Result<(), String>, CudaError>;

/// The checks of a command so far.
#[derive(Debug)]
pub struct Checks {
    passed: bool,
    /// A kernel did not end in time, and may run still.
    hangs: bool,
}

/// Makes the checks of `command` on GPU 0; whether all passed. Without a GPU they are declined.
pub fn on_gpu(command: &str, make: impl FnOnce(&Arc<Engine>, &mut Checks)) -> Result<bool, String> {
    let mut checks = Checks { passed: true, hangs: false };
    match Engine::get(0) {
        Ok(engine) => {
            make(&engine, &mut checks);
            if !checks.hangs {
                let_tools_tell(&engine);
            }
        }
        Err(e) => say!("{command} declined: {e}"),
    }
    Ok(checks.passed)
}

/// Synchronizes with the device, where racecheck tells what it found. What fails there has failed in
/// a check before, which said so.
pub fn let_tools_tell(engine: &Engine) {
    drop(engine.device().synchronize());
}

/// Whether nothing may run on the GPU after this error in this process: a kernel hangs, or has faulted.
pub fn is_lost(error: &CudaError) -> bool {
    is_of(error, |kind| matches!(kind, GpuErrorKind::Timeout { .. } | GpuErrorKind::Driver { .. }))
}

fn is_of(error: &CudaError, kind: impl Fn(&GpuErrorKind) -> bool) -> bool {
    matches!(error.kind(), CudaErrorKind::Gpu(e) if kind(e.kind()))
}

impl Checks {
    /// Prints the outcome of the check `name`.
    pub fn say(&mut self, name: &str, outcome: Outcome) {
        let hangs = |e| is_of(e, |kind| matches!(kind, GpuErrorKind::Timeout { .. }));
        self.hangs |= outcome.as_ref().is_err_and(hangs);
        let line = match outcome {
            Ok(Ok(())) => "passed".to_owned(),
            Ok(Err(wrong)) => format!("FAILED: {wrong}"),
            Err(e) => format!("FAILED: {e}"),
        };
        self.passed &= line == "passed";
        say!("{name:<62} {line}");
    }

    /// Prints why the check `name` is not made.
    pub fn skip(&self, name: &str, why: impl std::fmt::Display) {
        say!("{name:<62} skipped: {why}");
    }
}

/// Checks that a call was refused with words that `expected` is part of.
pub fn expect_refusal<T, E: Display>(result: Result<T, E>, expected: &str) -> Result<(), String> {
    match result {
        Err(e) if e.to_string().contains(expected) => Ok(()),
        Err(e) => Err(format!("{e}, not the expected `{expected}`")),
        Ok(_) => Err(format!("no error, not the expected `{expected}`")),
    }
}

#[cfg(test)]
mod tests {
    use foveate_gpu::GpuError;

    use super::*;

    #[test]
    fn a_command_does_not_synchronize_with_a_kernel_that_hangs() {
        let said = |outcome: Outcome| {
            let mut checks = Checks { passed: true, hangs: false };
            checks.say("a check", outcome);
            (checks.passed, checks.hangs)
        };
        let (waiting, launches) = ("a kernel".to_owned(), String::new());
        let timeout: GpuError = GpuErrorKind::Timeout { waiting, seconds: 1.0, launches }.into();
        assert_eq!(said(Err(timeout.into())), (false, true));
        assert_eq!(said(Err(GpuError::argument("wrong").into())), (false, false));
        assert_eq!(said(Ok(Err("wrong".to_owned()))), (false, false));
        assert_eq!(said(Ok(Ok(()))), (true, false));
    }
}
