//! The error of a case.

/// A case file that cannot be read, or a case that says something impossible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {message}")]
pub struct CaseError {
    at: String,
    message: String,
}

impl CaseError {
    pub(crate) fn new(at: impl Into<String>, message: impl ToString) -> Self {
        Self { at: at.into(), message: message.to_string() }
    }
}
