//! The error of this crate.

/// Operands that do not describe an attention problem. The message names the operand, what it
/// has and what it needs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ProblemError {
    message: String,
}

impl ProblemError {
    /// An error that says `message`: one line with what, where and what to do.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }

    /// A value for a slot that the program does not have: a `what` called `name`.
    pub fn no_slot(what: &str, name: &str) -> Self {
        Self::new(format!("no mask or score of the plan has a {what} called `{name}`"))
    }
}
