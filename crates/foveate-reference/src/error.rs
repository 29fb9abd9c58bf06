//! The error of this crate.

use std::fmt;

use foveate_problem::ProblemError;

/// Why the oracle has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}")]
pub struct ReferenceError {
    kind: ReferenceErrorKind,
}

/// The kinds of [`ReferenceError`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReferenceErrorKind {
    /// The spec or the operands do not describe a problem.
    Problem(ProblemError),
    /// A captured buffer of i64 holds an integer that no i32 holds.
    TooWide {
        /// Name of the buffer.
        buffer: String,
        /// The element.
        value: i64,
    },
    /// A captured buffer was indexed outside an axis.
    OutOfRange {
        /// Name of the buffer.
        buffer: String,
        /// The axis.
        axis: usize,
        /// The index.
        index: i32,
        /// Length of the axis.
        length: usize,
    },
    /// The derivative of the score passes an operation that has none.
    NoDerivative {
        /// The operation.
        operation: String,
    },
}

impl ReferenceError {
    /// The kind, with its details.
    pub fn kind(&self) -> &ReferenceErrorKind {
        &self.kind
    }
}

impl From<ReferenceErrorKind> for ReferenceError {
    fn from(kind: ReferenceErrorKind) -> Self {
        Self { kind }
    }
}

impl From<ProblemError> for ReferenceError {
    fn from(error: ProblemError) -> Self {
        ReferenceErrorKind::Problem(error).into()
    }
}

impl fmt::Display for ReferenceErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Problem(error) => error.fmt(f),
            Self::TooWide { buffer, value } => {
                write!(f, "buffer `{buffer}` holds {value}, which no i32 holds")
            }
            Self::OutOfRange { buffer, axis, index, length } => write!(
                f,
                "buffer `{buffer}` is indexed at {index} on axis {axis}, which has length {length}"
            ),
            Self::NoDerivative { operation } => {
                write!(f, "{operation} has no derivative, but a gradient has to pass through it")
            }
        }
    }
}
