//! The f64 oracle of attention: what the semantics say, in the shortest code that says it.
//!
//! One naive program (`attention`, three nested loops over rows, no tiles) is run in f64 as
//! `gold` ([`forward`], [`backward`]) and in f32 with every stored tensor rounded to the operands'
//! dtype as `low` ([`low`]), which is what an eager framework computes. [`Tolerance`] compares a
//! backend with both. Mods are evaluated by an interpreter of its own ([`eval`]), and
//! differentiated forwards with dual numbers, so that neither the vectorised evaluator nor the
//! reverse-mode derivative is checked against itself.
//!
//! Results are row-major. Rows of varlen operands that belong to no sequence hold NaN: a backend
//! does not touch them.
//!
//! ```
//! use foveate_mods::masks;
//! use foveate_problem::{Operands, Spec};
//! use foveate_tensor::{DType, Tensor};
//!
//! let q = Tensor::filled(DType::F64, [1, 1, 2, 4], 0.0);
//! let v = Tensor::from_fn(DType::F64, [1, 1, 2, 1], |[_, _, kv, _]| kv as f64);
//! let operands = Operands::new(q.view(), q.view(), v.view());
//! let spec = Spec { mask: Some(masks::causal()), score: None, scale: None, dropout: None };
//! // The first query sees one key, the second the mean of two.
//! assert_eq!(foveate_reference::forward(&spec, &operands)?.out, [0.0, 0.5]);
//! # Ok::<(), foveate_reference::ReferenceError>(())
//! ```
//!
//! The rules of accuracy are in the contract, `docs/semantics.md`.

mod attention;
mod error;
pub mod eval;
pub mod low;
mod real;
mod tolerance;

#[cfg(test)]
mod tests;

pub use attention::{Forward, Gradients, Upstream};
pub use error::{ReferenceError, ReferenceErrorKind};
pub use real::Real;
pub use tolerance::{Measure, NonFinite, Rule, Tolerance, unit_roundoff};

use attention::Rounding;
use foveate_problem::{Operands, Spec};

/// Attention in f64.
///
/// # Errors
/// When the spec or operands do not describe a problem, or a captured buffer is indexed outside
/// its axes by an entry that is evaluated.
pub fn forward(spec: &Spec, operands: &Operands<'_>) -> Result<Forward, ReferenceError> {
    Ok(attention::run::<f64>(spec, operands, &Rounding::none(), None)?.0)
}

/// Gradients of `Σ out·d_out + Σ lse·d_lse` in f64.
///
/// # Errors
/// Those of [`forward`], and a score whose derivative passes an operation that has none.
pub fn backward(
    spec: &Spec,
    operands: &Operands<'_>,
    upstream: &Upstream<'_>,
) -> Result<Gradients, ReferenceError> {
    Ok(attention::run::<f64>(spec, operands, &Rounding::none(), Some(upstream))?.1)
}
