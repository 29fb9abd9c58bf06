//! The error of this crate.

use std::fmt;
use std::panic::Location;

use crate::value::Type;

/// What went wrong while a mod was built, parsed, bound or differentiated.
#[derive(Clone, Debug, PartialEq)]
pub struct ModError {
    kind: Box<ModErrorKind>,
    place: Option<&'static Location<'static>>,
}

impl std::error::Error for ModError {}

impl fmt::Display for ModError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)?;
        self.place.map_or(Ok(()), |place| write!(f, ", in the mod at {place}"))
    }
}

/// The kinds of [`ModError`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ModErrorKind {
    /// A buffer's shape does not hold its elements, or no buffer can have it.
    BufferShape {
        /// Name of the buffer.
        name: String,
        /// The shape given.
        shape: Vec<usize>,
        /// The elements given.
        elems: usize,
    },
    /// A buffer does not fit the memory that it is to read.
    BufferMemory {
        /// Name of the buffer.
        name: String,
        /// What does not fit.
        reason: String,
    },
    /// A buffer of integers or truth values was to be learned.
    NotLearnable {
        /// Name of the buffer.
        name: String,
    },
    /// An operand has a type the operation does not take.
    Type {
        /// The operation.
        operation: String,
        /// What it takes.
        expected: String,
        /// What it was given.
        found: Type,
    },
    /// A buffer was indexed with the wrong number of indices.
    Rank {
        /// Name of the buffer.
        name: String,
        /// Its number of axes.
        rank: usize,
        /// The indices given.
        given: usize,
    },
    /// No captured buffer or scalar has this name (or this type, this rank).
    Binding {
        /// The name.
        name: String,
        /// Why it cannot be bound.
        reason: String,
    },
    /// A mask that reads the score, or a root of the wrong type.
    Root {
        /// What is wrong.
        reason: String,
    },
    /// An operation without a derivative stands between the score (or a learned buffer) and the result.
    NoDerivative {
        /// The operation.
        operation: String,
    },
    /// The text form could not be read.
    Parse {
        /// Byte offset into the text.
        position: usize,
        /// What was expected or is wrong.
        message: String,
        /// The text itself.
        text: String,
    },
    /// A named mask or score was given an argument it cannot take.
    Argument {
        /// The mask or score.
        of: String,
        /// What is wrong and what to do.
        reason: String,
    },
}

impl ModError {
    /// The kind, with its details.
    pub fn kind(&self) -> &ModErrorKind {
        &self.kind
    }

    /// Where in the source the mod stands that a macro made.
    pub fn place(&self) -> Option<&'static Location<'static>> {
        self.place
    }

    /// The error with the place of its mod. The innermost place is kept.
    pub(crate) fn at(mut self, place: &'static Location<'static>) -> Self {
        self.place.get_or_insert(place);
        self
    }

    pub(crate) fn buffer_shape(name: String, shape: &[usize], elems: usize) -> Self {
        ModErrorKind::BufferShape { name, shape: shape.to_vec(), elems }.into()
    }

    pub(crate) fn buffer_memory(name: String, reason: String) -> Self {
        ModErrorKind::BufferMemory { name, reason }.into()
    }

    pub(crate) fn not_learnable(name: String) -> Self {
        ModErrorKind::NotLearnable { name }.into()
    }
}

impl From<ModErrorKind> for ModError {
    fn from(kind: ModErrorKind) -> Self {
        Self { kind: Box::new(kind), place: None }
    }
}

impl fmt::Display for ModErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BufferShape { name, shape, .. } if shape.is_empty() => {
                write!(f, "buffer `{name}` has no axis; give its shape one length or more")
            }
            Self::BufferShape { name, shape, elems } => {
                write!(f, "buffer `{name}` of shape {shape:?} ")?;
                match shape.iter().try_fold(1usize, |n, &len| n.checked_mul(len)) {
                    Some(_) => write!(f, "cannot hold {elems} elements"),
                    None => write!(f, "has more elements than can be counted"),
                }
            }
            Self::BufferMemory { name, reason } => write!(f, "buffer `{name}`: {reason}"),
            Self::NotLearnable { name } => {
                write!(
                    f,
                    "buffer `{name}` cannot be learned: only f32, f16 and bf16 buffers have gradients"
                )
            }
            Self::Type { operation, expected, found } => {
                write!(f, "{operation} takes {expected}, not {found}")
            }
            Self::Rank { name, rank, given } => {
                let axes = if *rank == 1 { "axis" } else { "axes" };
                let indices = if *given == 1 { "index" } else { "indices" };
                write!(f, "buffer `{name}` has {rank} {axes} but was given {given} {indices}")
            }
            Self::Binding { name, reason } => write!(f, "`{name}` cannot be bound: {reason}"),
            Self::Root { reason } => f.write_str(reason),
            Self::NoDerivative { operation } => {
                write!(f, "{operation} has no derivative, but a gradient has to pass through it")
            }
            Self::Parse { position, message, text } => {
                let position = text.floor_char_boundary(*position);
                let start = text[..position].rfind('\n').map_or(0, |i| i + 1);
                let line = text[start..].lines().next().unwrap_or_default();
                // Tabs stay tabs, so that the caret stands where the terminal puts the place.
                let before = text[start..position].chars();
                let indent: String =
                    before.clone().map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
                let column = before.count() + 1;
                write!(f, "{message} at ")?;
                if text.trim_end().contains('\n') {
                    write!(f, "line {}, ", text[..start].matches('\n').count() + 1)?;
                }
                write!(f, "column {column}\n  {line}\n  {indent}^")
            }
            Self::Argument { of, reason } => write!(f, "{of}: {reason}"),
        }
    }
}
