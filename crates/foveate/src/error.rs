//! The error of this crate.

use std::fmt;

use foveate_mods::ModError;
use foveate_problem::ProblemError;
use foveate_tensor::TensorError;

/// What could not be planned or run. One line says what, where and what to do;
/// [`Error::kind`] has the details.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kind}")]
pub struct Error {
    kind: Box<ErrorKind>,
}

/// The kinds of [`Error`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Operands that do not fit together.
    Problem(ProblemError),
    /// A view, a layout or a list of sequence offsets that cannot be.
    Tensor(TensorError),
    /// A mask or a score that cannot be built, bound or differentiated.
    Mod(ModError),
    /// An option of the program or of the problem outside its range.
    Option {
        /// The option.
        name: &'static str,
        /// What it was given and what it takes.
        reason: String,
    },
    /// No backend of the device takes the problem.
    Declined {
        /// The device.
        device: String,
        /// Every candidate, with its reason.
        declined: Vec<Declined>,
    },
    /// Operands or destinations that are not those the plan was made for.
    Mismatch {
        /// What differs, and what it would have to be.
        reason: String,
    },
    /// A mod read a captured buffer outside its axis while the plan ran.
    OutOfRange {
        /// Buffer, axis, index and length.
        reason: String,
    },
    /// The backend failed in another way.
    Backend {
        /// Its name.
        backend: &'static str,
        /// What it says.
        reason: String,
    },
}

/// A backend that could have run a problem, and why it does not.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Declined {
    /// The backend.
    pub backend: &'static str,
    /// Why it declined.
    pub reason: String,
}

impl Error {
    /// The kind, with its details.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// The backends that declined, when that is what happened.
    pub fn declined(&self) -> &[Declined] {
        match self.kind() {
            ErrorKind::Declined { declined, .. } => declined,
            _ => &[],
        }
    }

    pub(crate) fn option(name: &'static str, reason: impl Into<String>) -> Self {
        ErrorKind::Option { name, reason: reason.into() }.into()
    }

    pub(crate) fn mismatch(reason: impl Into<String>) -> Self {
        ErrorKind::Mismatch { reason: reason.into() }.into()
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self { kind: Box::new(kind) }
    }
}

impl From<ProblemError> for Error {
    fn from(e: ProblemError) -> Self {
        ErrorKind::Problem(e).into()
    }
}

impl From<TensorError> for Error {
    fn from(e: TensorError) -> Self {
        ErrorKind::Tensor(e).into()
    }
}

impl From<ModError> for Error {
    fn from(e: ModError) -> Self {
        ErrorKind::Mod(e).into()
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Problem(e) => e.fmt(f),
            Self::Tensor(e) => e.fmt(f),
            Self::Mod(e) => e.fmt(f),
            Self::Option { name, reason } => write!(f, "{name}: {reason}"),
            Self::Declined { device, declined } => {
                write!(f, "no backend of the {device} takes this problem")?;
                for (i, d) in declined.iter().enumerate() {
                    let mark = if i == 0 { ": " } else { "; " };
                    write!(f, "{mark}{} declined: {}", d.backend, d.reason)?;
                }
                Ok(())
            }
            Self::Mismatch { reason } | Self::OutOfRange { reason } => f.write_str(reason),
            Self::Backend { backend, reason } => write!(f, "{backend}: {reason}"),
        }
    }
}
