//! What can go wrong between a plan and a GPU.

use std::fmt;

use foveate_gpu::{GpuError, GpuErrorKind};
use foveate_mods::ModError;
use foveate_problem::{ProblemError, RebindError};

/// A refusal or a failure of attention on a GPU. [`Self::kind`] has the details.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kind}")]
pub struct CudaError {
    kind: Box<CudaErrorKind>,
}

/// What is wrong.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum CudaErrorKind {
    /// The GPU, or a library that it needs.
    Gpu(GpuError),
    /// The caller wanted to stop.
    Stopped {
        /// What was stopped, and what remains of it.
        what: &'static str,
    },
    /// A program or operands that do not fit together.
    Problem(ProblemError),
    /// A mask or a score that cannot be bound or differentiated.
    Mod(ModError),
    /// A mod read a captured buffer outside its axis. The results are written, the index clamped.
    OutOfRange {
        /// Buffer, axis, index and length.
        reason: String,
    },
    /// An argument cannot be used.
    Argument {
        /// Which, why, and what to do.
        reason: String,
    },
}

impl CudaError {
    /// What is wrong.
    pub fn kind(&self) -> &CudaErrorKind {
        &self.kind
    }

    /// What is wrong with the GPU or a library, if that is the reason.
    pub fn gpu(&self) -> Option<&GpuErrorKind> {
        match self.kind() {
            CudaErrorKind::Gpu(e) => Some(e.kind()),
            _ => None,
        }
    }

    pub(crate) fn argument(reason: impl Into<String>) -> Self {
        CudaErrorKind::Argument { reason: reason.into() }.into()
    }
}

impl From<CudaErrorKind> for CudaError {
    fn from(kind: CudaErrorKind) -> Self {
        Self { kind: Box::new(kind) }
    }
}

impl From<GpuError> for CudaError {
    fn from(e: GpuError) -> Self {
        CudaErrorKind::Gpu(e).into()
    }
}

impl From<GpuErrorKind> for CudaError {
    fn from(kind: GpuErrorKind) -> Self {
        GpuError::from(kind).into()
    }
}

impl From<ProblemError> for CudaError {
    fn from(e: ProblemError) -> Self {
        CudaErrorKind::Problem(e).into()
    }
}

impl From<RebindError> for CudaError {
    fn from(error: RebindError) -> Self {
        match error {
            RebindError::Mod(e) => e.into(),
            RebindError::Problem(e) => e.into(),
        }
    }
}

impl From<ModError> for CudaError {
    fn from(e: ModError) -> Self {
        CudaErrorKind::Mod(e).into()
    }
}

impl fmt::Display for CudaErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(e) => e.fmt(f),
            Self::Stopped { what } => f.write_str(what),
            Self::Problem(e) => e.fmt(f),
            Self::Mod(e) => e.fmt(f),
            Self::OutOfRange { reason } | Self::Argument { reason } => f.write_str(reason),
        }
    }
}
