//! The error of this crate.

/// What is wrong with a configuration, a batch or an attention program. One line says what,
/// where and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kind}")]
pub struct NnError {
    kind: Box<NnErrorKind>,
}

/// The kinds of [`NnError`].
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NnErrorKind {
    /// A field of a configuration has a value it cannot have.
    #[error("{field}: {reason}")]
    Config {
        /// The field, by its name in the configuration.
        field: String,
        /// Its value and what it must be.
        reason: String,
    },
    /// A batch or a prompt does not fit the model or itself.
    #[error("{0}")]
    Batch(String),
    /// Numbers computed from finite weights are not finite.
    #[error("{0}")]
    NonFinite(String),
    /// The attention program could not be built, planned or run.
    #[error("attention: {0}")]
    Attention(foveate::Error),
    /// Mask or score of an attention program cannot be read.
    #[error("{field}: {error}")]
    Text {
        /// `attention.mask`, `attention.score`, or those of a named program.
        field: String,
        /// What is wrong and where.
        error: foveate::ModError,
    },
    /// The device's memory does not suffice.
    #[error(
        "there is no memory for {elems} elements of `{name}`; end what else takes memory, recompute more, or lower the rows or the length of a batch"
    )]
    Memory {
        /// The array.
        name: &'static str,
        /// Its elements.
        elems: usize,
    },
    /// A device, or a library of it, refused or failed.
    #[error("{0}")]
    Device(String),
    /// What the ranks of a run do together in a step failed.
    #[error("{message}")]
    Ranks {
        /// What, and on which rank.
        message: String,
        /// Whether a rank is gone, silent or late, so that the same ranks may go on, started again.
        lost: bool,
    },
    /// A parameter or a gradient that the model does not have in this shape.
    #[error("parameter `{name}`: {reason}")]
    Parameter {
        /// Its name.
        name: String,
        /// What is wrong.
        reason: String,
    },
}

impl NnError {
    /// The kind, with its details.
    pub fn kind(&self) -> &NnErrorKind {
        &self.kind
    }

    pub(crate) fn config(field: impl Into<String>, reason: impl Into<String>) -> Self {
        NnErrorKind::Config { field: field.into(), reason: reason.into() }.into()
    }

    /// Of one of several attention programs: puts its name into the field.
    pub(crate) fn in_program(self, name: &str) -> Self {
        let named =
            |field: String| field.replacen("attention.", &format!("attention.programs.{name}."), 1);
        match *self.kind {
            NnErrorKind::Config { field, reason } => Self::config(named(field), reason),
            NnErrorKind::Text { field, error } => {
                NnErrorKind::Text { field: named(field), error }.into()
            }
            kind => kind.into(),
        }
    }

    pub(crate) fn batch(reason: impl Into<String>) -> Self {
        NnErrorKind::Batch(reason.into()).into()
    }

    pub(crate) fn memory(name: &'static str, elems: usize) -> Self {
        NnErrorKind::Memory { name, elems }.into()
    }

    pub(crate) fn parameter(name: impl Into<String>, reason: impl Into<String>) -> Self {
        NnErrorKind::Parameter { name: name.into(), reason: reason.into() }.into()
    }
}

impl From<NnErrorKind> for NnError {
    fn from(kind: NnErrorKind) -> Self {
        Self { kind: Box::new(kind) }
    }
}

impl From<foveate::Error> for NnError {
    fn from(e: foveate::Error) -> Self {
        NnErrorKind::Attention(e).into()
    }
}

impl From<foveate::ModError> for NnError {
    fn from(e: foveate::ModError) -> Self {
        foveate::Error::from(e).into()
    }
}

impl From<foveate::TensorError> for NnError {
    fn from(e: foveate::TensorError) -> Self {
        foveate::Error::from(e).into()
    }
}
