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

/// The plain implementation in the operands' own precision that backends are measured against:
/// f32 arithmetic, and each tensor that an eager program stores (`q·k`, the probabilities, out,
/// and their gradients) rounded to the operands' dtype.
///
/// Of f8e4m3 operands it is the plain emulation of that type: `q·k` in f32, `2⁸·exp(score − max)` rounded
/// to f8e4m3 as the factor of v, out rounded to bf16.
pub mod low {
    use foveate_problem::{Operands, Spec};
    use foveate_tensor::{DType, F8E4M3};
    use half::{bf16, f16};

    use crate::attention::{self, Forward, Gradients, Rounding, Upstream};
    use crate::error::ReferenceError;

    /// # Errors
    /// Those of [`crate::forward`].
    pub fn forward(spec: &Spec, operands: &Operands<'_>) -> Result<Forward, ReferenceError> {
        Ok(attention::run::<f32>(spec, operands, &rounding(operands.q.dtype()), None)?.0)
    }

    /// # Errors
    /// Those of [`crate::backward`].
    pub fn backward(
        spec: &Spec,
        operands: &Operands<'_>,
        upstream: &Upstream<'_>,
    ) -> Result<Gradients, ReferenceError> {
        Ok(attention::run::<f32>(spec, operands, &rounding(operands.q.dtype()), Some(upstream))?.1)
    }

    /// The forward pass with nothing rounded below f32: the measure for `lse` and `max_score`,
    /// which are f32 whatever the operands are. Of f8e4m3 operands `q·k` is rounded to f16: tensor
    /// cores keep fewer bits of a sum of their products than f32 has.
    ///
    /// # Errors
    /// Those of [`crate::forward`].
    pub fn statistics(spec: &Spec, operands: &Operands<'_>) -> Result<Forward, ReferenceError> {
        let rounding = match operands.q.dtype() {
            DType::F8E4M3 => Rounding { dot: &to_f16, ..Rounding::none() },
            DType::F32 | DType::F16 | DType::BF16 | DType::F64 => Rounding::none(),
        };
        Ok(attention::run::<f32>(spec, operands, &rounding, None)?.0)
    }

    fn rounding(dtype: DType) -> Rounding<'static, f32> {
        match dtype {
            DType::F16 => Rounding { dot: &to_f16, weight: &|p, _| to_f16(p), stored: &to_f16 },
            DType::BF16 => Rounding { dot: &to_bf16, weight: &|p, _| to_bf16(p), stored: &to_bf16 },
            DType::F8E4M3 => {
                Rounding { weight: &e4m3_weight, stored: &to_bf16, ..Rounding::none() }
            }
            DType::F32 | DType::F64 => Rounding::none(),
        }
    }

    fn to_f16(x: f32) -> f32 {
        f16::from_f32(x).to_f32()
    }

    fn to_bf16(x: f32) -> f32 {
        bf16::from_f32(x).to_f32()
    }

    /// A weight in units of 2⁻⁸ of the largest of its row, rounded to e4m3.
    fn e4m3_weight(p: f32, largest: f32) -> f32 {
        let unit = largest / 256.0;
        if unit > 0.0 { F8E4M3::from_f32(p / unit).to_f32() * unit } else { p }
    }
}
