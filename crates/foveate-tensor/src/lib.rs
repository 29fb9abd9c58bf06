//! Strided tensors, dtypes and packed layouts for attention operands.
//!
//! Axes are logical (`[batch, heads, length, dim]` for operands, `[batch, heads, length]` for
//! statistics) and strides are free, so every memory order is a view and nothing here copies.
//!
//! One buffer may hold queries, keys and values; each packed order has a constructor that gives the
//! three views, and the same views of a gradient buffer as destinations:
//!
//! ```
//! use foveate_tensor::{Order, PackedShape, QkvPacked};
//!
//! let shape =
//!     PackedShape { order: Order::Bshd, batch: 1, len: 3, heads_q: 4, heads_kv: 2, dim: 8, dim_v: 8 };
//! let packed = QkvPacked::interleaved(&shape)?;
//! let buffer = vec![0.0_f32; packed.elems()];
//! let views = packed.views(&buffer)?;
//! assert_eq!((views.q.shape(), views.k.shape()), ([1, 4, 3, 8], [1, 2, 3, 8]));
//! # Ok::<(), foveate_tensor::TensorError>(())
//! ```
//!
//! [`varlen`] has the offsets of sequences that lie one after another. The layouts by name and what
//! every axis means are in the manual, `docs/semantics.md`.
//!
//! Arrays of `ndarray` come and go with the feature `ndarray`, tensors of other libraries in the same
//! process with the feature `dlpack`.

pub mod count;
#[cfg(feature = "dlpack")]
pub mod dlpack;
pub mod dtype;
pub mod element;
pub mod error;
pub mod f8;
pub mod float;
pub mod hash;
pub mod layout;
pub mod memory;
#[cfg(feature = "ndarray")]
mod ndarray;
pub mod packed;
pub mod random;
mod round;
pub mod slice;
pub mod varlen;
pub mod view;

pub use dtype::{DType, Data};
pub use element::ElementType;
pub use error::{TensorError, TensorErrorKind};
pub use f8::F8E4M3;
pub use float::Float;
pub use layout::{GroupedAxis, Layout, indices};
pub use packed::{Order, PackedShape, Part, QkvMut, QkvPacked, QkvRef};
pub use slice::{Slice, SliceMut};
pub use varlen::{Packing, Varlen};
pub use view::{Tensor, TensorMut, TensorRef};
