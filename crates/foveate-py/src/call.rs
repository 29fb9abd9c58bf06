//! What a call of attention asks for besides tensors, as the package's Python says it: what plans for
//! the CPU and for CUDA tensors are made of.

use pyo3::prelude::*;

use crate::traced::Traced;

/// `foveate._autograd.Call`, by its attributes. What is a `PyAny` has another type on each device, which
/// the functions that plan say.
#[derive(FromPyObject)]
pub struct Call<'py> {
    pub score: Option<Bound<'py, Traced>>,
    pub mask: Option<Bound<'py, Traced>>,
    pub scale: Option<f64>,
    /// A probability, and a seed.
    pub dropout: Option<(f32, Bound<'py, PyAny>)>,
    /// Offsets of sequences that lie one after another in q, and in k and v, of batch 1.
    pub varlen: Option<Bound<'py, PyAny>>,
    /// The table `[B, entries]` and the lengths `[B]` of k `[pages, Hkv, page_size, D]` and v.
    pub pages: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
}
