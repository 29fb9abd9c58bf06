//! Programmable attention for training transformers.

mod attention;
mod backend;
mod device;
mod error;
mod explain;
mod plan;
mod positions;
mod problem;

pub use attention::Attention;
pub use device::Device;
pub use error::{Declined, Error, ErrorKind};
pub use explain::{Explanation, Work};
pub use plan::{AsBuffer, Forward, Gradients, Plan};
pub use positions::Positions;
pub use problem::Problem;

pub use foveate_mask as mask;
pub use foveate_mods as mods;
pub use foveate_mods::{
    AnyBuffer, Buffer, BufferData, Expr, MaskMod, ModError, Scalar, ScalarValue, ScoreMod, closure,
    mask_mod, masks, score_mod, scores,
};
pub use foveate_problem::{BackwardArgs, CaptureGrad, Dims, Dropout, ForwardArgs, Operands};
pub use foveate_tensor as tensor;
pub use foveate_tensor::{DType, Data, Layout, Tensor, TensorError, TensorMut, TensorRef, Varlen};
