//! The error of this crate.

/// What cannot be sharded, sent or joined: one line with what, where and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ShardError {
    message: String,
    lost: bool,
}

impl ShardError {
    /// An error that says `message`.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), lost: false }
    }

    /// An error that says `message`, of ranks that are gone, silent or late.
    pub fn lost(message: impl Into<String>) -> Self {
        Self { message: message.into(), lost: true }
    }

    /// The same error, whose message goes on with `; more`. Whether a rank is lost stays as it was.
    #[must_use]
    pub fn and(self, more: &str) -> Self {
        Self { message: format!("{}; {more}", self.message), ..self }
    }

    /// Whether a rank is gone, silent or late: nothing is wrong with what was asked for, and the
    /// same ranks, started again, may go on.
    pub fn is_lost(&self) -> bool {
        self.lost
    }
}

/// [`ShardError::new`] as a result.
pub(crate) fn refused<T>(message: impl Into<String>) -> Result<T, ShardError> {
    Err(ShardError::new(message))
}
