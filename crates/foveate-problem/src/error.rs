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
}
