//! The native module `foveate._native` of the Python package `foveate`.
//!
//! The package's Python sources are in `python/foveate`; `docs/python.md` is its manual. What users
//! meet is there. Here is what has to be fast or close to memory: traced values and their operators
//! (`value`, `expr`), what they become (`traced`), captured tensors (`capture`), borrowed operands
//! (`tensor`), what a function reads (`reads`), what a block mask was (`state`) and lists (`lists`), what a
//! call asks for (`call`), plans that are kept by structure (`plan`, and `cuda` for device tensors) and the
//! threads that run them (`threads`), and kernels that torch's dispatcher calls without Python
//! (`dispatcher`). Nothing here is public: it changes with the Python sources.
//!
//! ```python
//! from foveate import flex_attention
//!
//! out = flex_attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score * 0.5)
//! ```
//!
//! Torch is not linked and not needed to build: tensors say their address, shape and strides through
//! the table of C functions that DLPack standardises (`dlpack`), or by their attributes; kernels are registered
//! through functions of torch's that are looked up when the package is imported.

mod call;
mod capture;
mod cuda;
mod dispatcher;
mod dlpack;
mod dtype;
mod error;
mod expr;
mod lists;
mod plan;
mod reads;
mod state;
mod tensor;
mod text;
mod threads;
mod traced;
mod value;

use pyo3::prelude::*;

/// The native half of the package `foveate`.
#[pymodule]
mod _native {
    /// The package's version.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use crate::capture::Capture;
    #[pymodule_export]
    use crate::cuda::{Plan as CudaPlan, cuda_plan, tile_runs, tile_tables, varies};
    #[pymodule_export]
    use crate::dispatcher::{kernel_calls, kernel_error, kernel_functions, register_operators};
    #[pymodule_export]
    use crate::error::TraceError;
    #[pymodule_export]
    use crate::expr::{Expr, binary, constant, leaf, literal, scalar, select, unary};
    #[pymodule_export]
    use crate::lists::Lists;
    #[pymodule_export]
    use crate::plan::{Plan, extents, kinds, plan, rows_fit};
    #[pymodule_export]
    use crate::reads::reads;
    #[pymodule_export]
    use crate::state::State;
    #[pymodule_export]
    use crate::text::parse;
    #[cfg(debug_assertions)]
    #[pymodule_export]
    use crate::threads::panic_next;
    #[pymodule_export]
    use crate::traced::{Structure, Traced, mask, score};
    #[pymodule_export]
    use crate::value::Numbers;
}
