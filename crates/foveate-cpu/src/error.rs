//! The error of this crate.

use std::fmt;

use foveate_mods::ModError;
use foveate_problem::{ProblemError, RebindError};
use foveate_tensor::DType;

/// What the CPU backend cannot plan, was not given, or met while it ran.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{kind}")]
pub struct CpuError {
    kind: Box<CpuErrorKind>,
}

/// The kinds of [`CpuError`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum CpuErrorKind {
    /// Operands of a dtype this backend does not take.
    DType {
        /// The dtype.
        found: DType,
    },
    /// An option out of its range.
    Option {
        /// The option.
        name: &'static str,
        /// What it was given and what it takes.
        reason: String,
    },
    /// Operands that are not the ones planned for.
    Operands {
        /// What differs.
        reason: String,
    },
    /// The program, or operands or destinations, that do not fit together.
    Problem(ProblemError),
    /// The program cannot be differentiated, or bound as asked.
    Mod(ModError),
    /// A mod read a captured buffer outside its bounds. The results were still written, with the
    /// index clamped.
    OutOfRange {
        /// Which buffer, axis, index and length.
        reason: String,
    },
}

impl CpuError {
    /// The kind, with its details.
    pub fn kind(&self) -> &CpuErrorKind {
        &self.kind
    }
}

impl From<CpuErrorKind> for CpuError {
    fn from(kind: CpuErrorKind) -> Self {
        Self { kind: Box::new(kind) }
    }
}

impl From<ProblemError> for CpuError {
    fn from(e: ProblemError) -> Self {
        CpuErrorKind::Problem(e).into()
    }
}

impl From<RebindError> for CpuError {
    fn from(error: RebindError) -> Self {
        match error {
            RebindError::Mod(e) => e.into(),
            RebindError::Problem(e) => e.into(),
        }
    }
}

impl From<ModError> for CpuError {
    fn from(e: ModError) -> Self {
        CpuErrorKind::Mod(e).into()
    }
}

impl fmt::Display for CpuErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DType { found } => {
                write!(f, "the CPU backend takes f32, f16 or bf16 operands, not {found}")
            }
            Self::Option { name, reason } => write!(f, "option {name}: {reason}"),
            Self::Operands { reason } => f.write_str(reason),
            Self::Problem(e) => e.fmt(f),
            Self::Mod(e) => e.fmt(f),
            Self::OutOfRange { reason } => f.write_str(reason),
        }
    }
}
