//! Strided tensors, dtypes and packed layouts for attention operands.
//!
//! Axes are logical (`[batch, heads, length, dim]` for operands, `[batch, heads, length]` for
//! statistics) and strides are free, so every memory order is a view and nothing here copies.

pub mod dtype;
pub mod error;
pub mod float;
pub mod layout;
pub mod packed;
pub mod random;
pub mod slice;
pub mod varlen;
pub mod view;

pub use dtype::{DType, Data};
pub use error::{TensorError, TensorErrorKind};
pub use float::Float;
pub use layout::{Fold, Layout, indices};
pub use packed::{Order, PackedShape, Part, QkvMut, QkvPacked, QkvRef};
pub use slice::{Slice, SliceMut};
pub use varlen::{Packing, Varlen};
pub use view::{Tensor, TensorMut, TensorRef};
