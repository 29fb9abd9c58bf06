//! The error of this crate.

/// What cannot be sharded, sent or joined: one line with what, where and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ShardError {
    message: String,
}

impl ShardError {
    /// An error that says `message`.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

/// [`ShardError::new`] as a result.
pub(crate) fn refused<T>(message: impl Into<String>) -> Result<T, ShardError> {
    Err(ShardError::new(message))
}
