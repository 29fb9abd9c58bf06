//! The error of this crate.

use std::fmt;

use crate::dtype::DType;

/// A layout or a view that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}")]
pub struct TensorError {
    kind: Box<TensorErrorKind>,
}

/// The kinds of [`TensorError`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorErrorKind {
    /// The layout reaches past the end of the storage.
    OutOfBounds {
        /// Shape of the layout.
        shape: Vec<usize>,
        /// Strides in elements.
        strides: Vec<usize>,
        /// Offset in elements.
        offset: usize,
        /// Elements in the storage.
        len: usize,
    },
    /// A shape that has more or fewer elements than were given for it.
    Elements {
        /// The shape.
        shape: Vec<usize>,
        /// Elements given.
        len: usize,
    },
    /// Elements asked for as a slice that do not lie one after the other in row-major order.
    Apart {
        /// Shape of the layout.
        shape: Vec<usize>,
        /// Strides in elements.
        strides: Vec<usize>,
    },
    /// Elements asked for as another type.
    DType {
        /// What they are.
        found: DType,
        /// As what they were asked for.
        asked: DType,
    },
    /// Two elements of a destination would share memory.
    Overlap {
        /// Shape of the layout.
        shape: Vec<usize>,
        /// Strides in elements.
        strides: Vec<usize>,
    },
    /// Sequence offsets that are not `0 = c₀ ≤ c₁ ≤ …` within the packed length.
    Offsets {
        /// What they are of: `cu_seqlens_q` or `cu_seqlens_k`.
        of: &'static str,
        /// What is wrong, with index and values.
        reason: String,
    },
    /// An axis that does not exist or cannot be cut or repeated so.
    Axis {
        /// The axis.
        axis: usize,
        /// What is wrong.
        reason: String,
    },
    /// A tensor of another library that is no view here, or one of ours that is none there.
    Foreign {
        /// What is wrong.
        reason: String,
    },
    /// A packed projection whose buffer or head counts do not fit.
    Packed {
        /// What is wrong.
        reason: String,
    },
}

impl TensorError {
    /// The kind, with its details.
    pub fn kind(&self) -> &TensorErrorKind {
        &self.kind
    }
}

impl From<TensorErrorKind> for TensorError {
    fn from(kind: TensorErrorKind) -> Self {
        Self { kind: Box::new(kind) }
    }
}

impl fmt::Display for TensorErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfBounds { shape, strides, offset, len } => write!(
                f,
                "shape {shape:?} with strides {strides:?} from element {offset} reaches past the \
                 {len} elements of the storage"
            ),
            Self::Elements { shape, len } => {
                write!(f, "{len} elements cannot have shape {shape:?}, which has ")?;
                match shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) {
                    Some(elems) => write!(f, "{elems}"),
                    None => f.write_str("more than memory can address"),
                }
            }
            Self::Apart { shape, strides } => write!(
                f,
                "the elements of shape {shape:?} with strides {strides:?} do not lie one after \
                 the other in row-major order; `to_vec` copies them into it"
            ),
            Self::DType { found, asked } => {
                write!(f, "the elements are {found}, not {asked}; `to_vec` converts them")
            }
            Self::Overlap { shape, strides } => write!(
                f,
                "a destination of shape {shape:?} with strides {strides:?} would write some \
                 elements twice; give every axis longer than 1 a stride of its own"
            ),
            Self::Offsets { of, reason } => write!(f, "{of}: {reason}"),
            Self::Axis { axis, reason } => write!(f, "axis {axis}: {reason}"),
            Self::Foreign { reason } => write!(f, "the tensor cannot be shared: {reason}"),
            Self::Packed { reason } => f.write_str(reason),
        }
    }
}
