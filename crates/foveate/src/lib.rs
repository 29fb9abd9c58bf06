//! Programmable attention for training transformers.
//!
//! # Should I use this?
//!
//! Yes, when attention in your model is more than softmax of `q·k`: packed documents, windows,
//! prefixes, learned biases, soft caps, sinks, or a pattern that nobody has a kernel for. You
//! write the mask and the score as Rust functions; forward and backward are exact, read any
//! strides in place, skip what the mask leaves out and give the same bits for any number of
//! threads.
//!
//! It runs on CPUs and on NVIDIA GPUs since Ampere ([`Device::cuda`]). A GPU takes host tensors like
//! the CPU, and tensors in its own memory through [`Plan::cuda`]; the driver and NVRTC are loaded
//! when they are needed, so the same binary runs without a GPU.
//!
//! # Ten lines
//!
//! ```
//! use foveate::{Attention, Buffer, DType, Device, Problem, Tensor, mask_mod, masks, scores};
//!
//! #[mask_mod]
//! fn same_document(q: i32, kv: i32, doc: &Buffer<i32>) -> bool {
//!     doc[q] == doc[kv]
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let wave = |[b, h, s, d]: [usize; 4]| ((b + 3 * h + 7 * s + 5 * d) as f64).sin();
//! # let q = Tensor::from_fn(DType::F32, [1, 4, 6, 16], wave);
//! # let k = Tensor::from_fn(DType::F32, [1, 2, 6, 16], wave);
//! # let (v, d_out) = (k.clone(), q.clone());
//! let doc = Buffer::vector("doc", vec![0, 0, 0, 1, 1, 1]);
//! let program = Attention::new()
//!     .mask(masks::causal() & same_document(&doc))
//!     .score(scores::soft_cap(30.0)?);
//!
//! let plan = program.plan(&Problem::of(&q, &k, &v)?, &Device::cpu())?;
//! println!("{}", plan.explain());
//! let forward = plan.forward(&q, &k, &v)?; // out, lse
//! let gradients = plan.backward(&q, &k, &v, &forward, &d_out)?; // dq, dk, dv, captures
//! # assert_eq!(forward.out.shape(), q.shape());
//! # assert_eq!(gradients.dk.shape(), k.shape());
//! # Ok(())
//! # }
//! ```
//!
//! # The parts
//!
//! - **Mods** ([`mods`]): a [`MaskMod`] says which keys a query sees, a [`ScoreMod`] what becomes
//!   of a score. They are values: written with [`mask_mod`] and [`score_mod`] on a function, with
//!   the macros of [`closure`], traced with the operators of [`Expr`], read from text
//!   ([`mods::text`]) or taken from [`masks`] and [`scores`]. Equal programs are equal values.
//! - **Captures**: a mod may read a [`Buffer`] (document ids, a learned bias) and run-time
//!   scalars. Their contents can change without planning again: [`Plan::rebind`],
//!   [`Plan::set_scalar`]. A buffer made with [`Buffer::learned`] receives a gradient.
//! - **Programs** ([`Attention`]): mask, score, scale, dropout, [`Coordinates`]. No shapes, no
//!   device.
//! - **Problems** ([`Problem`]): shapes, strides, dtype, sequence offsets, sink. No code.
//! - **Plans** ([`Plan`]): both joined on a [`Device`], or an [`Error`] that lists every
//!   candidate and why it declined. Planning is pure. [`Plan::explain`] says what will run.
//! - **Tensors** ([`tensor`]): views of any strides, and the named layouts of packed
//!   projections. [`Plan::forward_into`] and [`Plan::backward_into`] write to such views, so
//!   gradients go straight into a packed buffer. Data goes in with [`Tensor::from_vec`] and
//!   [`TensorRef::new`], out with [`Tensor::as_slice`]; [`Plan::forward_call`] and
//!   [`Plan::backward_call`] take destinations, a gradient of `lse` and sums over calls. The features
//!   `ndarray` and `dlpack` share tensors with other libraries.
//! - **Block masks** ([`mask`]): which tiles of a mask are live, to look at.
//!
//! # Manuals
//!
//! `docs/` of the repository: `docs/getting-started.md`, `docs/masks-and-scores.md`, `docs/cpu.md`,
//! `docs/gpu.md`; what was measured is in `docs/records/README.md`.
//!
//! # Semantics
#![doc = include_str!("../../../docs/semantics.md")]

/// Runs the examples of manuals.
#[cfg(doctest)]
mod manuals {
    #[doc = include_str!("../../../docs/getting-started.md")]
    struct GettingStarted;
    #[doc = include_str!("../../../docs/masks-and-scores.md")]
    struct MasksAndScores;
}

mod attention;
mod backend;
mod call;
mod device;
mod error;
mod explain;
mod plan;
mod positions;
mod problem;

pub use attention::Attention;
pub use call::{BackwardCall, ForwardCall, ForwardRef, GradientsMut};
pub use device::Device;
pub use error::{Declined, Error, ErrorKind};
pub use explain::{Execution, Explanation};
pub use plan::{AsBuffer, Forward, Gradients, Plan};
pub use positions::{Coordinates, Positions};
pub use problem::Problem;

pub use foveate_cpu as cpu;
pub use foveate_cuda as cuda;
pub use foveate_gpu as gpu;
pub use foveate_mask as mask;
pub use foveate_mods as mods;
pub use foveate_mods::{
    AnyBuffer, Buffer, BufferData, ElementType, Expr, MaskMod, ModError, Scalar, ScalarValue,
    ScoreMod, SharedElements, closure, mask_mod, masks, score_mod, scores,
};
pub use foveate_problem::{
    BackwardArgs, CaptureGrad, Dims, Dropout, ForwardArgs, Operands, Pages, ProblemError,
    ScaleBlocks, Scales,
};
pub use foveate_tensor as tensor;
pub use foveate_tensor::{
    DType, Data, Float, Layout, Tensor, TensorError, TensorMut, TensorRef, Varlen,
};
