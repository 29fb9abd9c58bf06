//! Where keys lie: in tensors of their own, in sequences one after another, or in pages.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::stack::{Arguments, Tensor};
use crate::capture;
use crate::dtype::{Dtype, TorchDtype};
use crate::tensor::Borrowed;

/// Where an operator's keys lie, by its name.
#[derive(Clone, Copy)]
pub enum Layout {
    Dense,
    /// With the offsets of queries and of keys.
    Sequences,
    /// With a table of pages and the lengths.
    Pages,
}

/// The tensors of a [`Layout`] that say it.
pub enum Where {
    Dense,
    Sequences([Arc<Tensor>; 2]),
    Pages([Arc<Tensor>; 2]),
}

/// What they say.
pub enum Places {
    Dense,
    Sequences(Vec<i32>, Vec<i32>),
    Pages([Vec<i32>; 2]),
}

impl Layout {
    pub fn take(self, arguments: &mut Arguments) -> Where {
        match self {
            Self::Dense => Where::Dense,
            Self::Sequences => Where::Sequences([arguments.tensor(), arguments.tensor()]),
            Self::Pages => Where::Pages([arguments.tensor(), arguments.tensor()]),
        }
    }
}

impl Where {
    /// What the tensors say, for these operands.
    ///
    /// # Errors
    /// When they are no offsets, or no pages, of these.
    pub fn read(&self, py: Python<'_>, [q, k, _]: &[Borrowed; 3]) -> PyResult<Places> {
        let rows = |of: &Borrowed| of.shape.get(2).copied().unwrap_or(0);
        match self {
            Self::Dense => Ok(Places::Dense),
            Self::Sequences([cu_q, cu_k]) => {
                let cu_q = offsets(py, "cu_seqlens_q", &cu_q.borrowed()?, rows(q))?;
                let cu_k = offsets(py, "cu_seqlens_k", &cu_k.borrowed()?, rows(k))?;
                if cu_q.len() != cu_k.len() {
                    return Err(PyValueError::new_err(format!(
                        "cu_seqlens_q has {} offsets and cu_seqlens_k {}; they need as many",
                        cu_q.len(),
                        cu_k.len()
                    )));
                }
                Ok(Places::Sequences(cu_q, cu_k))
            }
            Self::Pages([table, lengths]) => {
                let batch = q.shape.first().copied().unwrap_or(0);
                let table = page_numbers(py, "page_table", &table.borrowed()?, 2, batch)?;
                let lengths = page_numbers(py, "lengths", &lengths.borrowed()?, 1, batch)?;
                Ok(Places::Pages([table, lengths]))
            }
        }
    }
}

/// Offsets of sequences in `rows` rows.
fn offsets(py: Python<'_>, name: &str, of: &Borrowed, rows: usize) -> PyResult<Vec<i32>> {
    let numbers = integers(of).filter(|numbers| of.shape.len() == 1 && !numbers.is_empty());
    let Some(numbers) = numbers else {
        let dtype = of.dtype.object(py)?;
        return Err(PyValueError::new_err(format!(
            "{name} must be a vector of integer offsets, got a tensor of {} {:?}",
            dtype.bind(py).str()?,
            of.shape
        )));
    };
    if numbers[0] != 0 || !numbers.is_sorted() {
        return Err(PyValueError::new_err(format!(
            "{name} must begin at 0 and not decrease, got {:?}",
            &numbers[..numbers.len().min(8)]
        )));
    }
    let last = numbers[numbers.len() - 1];
    if last > rows as i64 {
        return Err(PyValueError::new_err(format!("{name} ends at {last}, past the {rows} rows")));
    }
    let narrow = |n: i64| i32::try_from(n).map_err(|_| too_large(name, n));
    numbers.into_iter().map(narrow).collect()
}

fn too_large(name: &str, n: i64) -> PyErr {
    PyValueError::new_err(format!("{name} has an offset of {n}, which does not fit 32 bits"))
}

/// Numbers of pages or of keys, as the engine reads them: what 32 bits cannot hold is no page.
fn page_numbers(
    py: Python<'_>,
    name: &str,
    of: &Borrowed,
    axes: usize,
    batch: usize,
) -> PyResult<Vec<i32>> {
    let numbers = match of.dtype {
        Dtype::I32 | Dtype::I64 if of.shape.len() == axes => integers(of),
        _ => None,
    };
    let Some(numbers) = numbers else {
        let dtype = of.dtype.object(py)?;
        let plural = if axes > 1 { "axes" } else { "axis" };
        return Err(PyValueError::new_err(format!(
            "{name} must be an int32 or int64 tensor of {axes} {plural}, got {} {}",
            dtype.bind(py).str()?,
            tuple(&of.shape)
        )));
    };
    if of.shape[0] != batch {
        return Err(PyValueError::new_err(format!(
            "{name} is for {} batch entries, and query has {batch}",
            of.shape[0]
        )));
    }
    let clamp = |n: i64| n.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
    Ok(numbers.into_iter().map(clamp).collect())
}

/// The elements of a tensor of integers, in row-major order; `None` of another dtype.
pub fn integers(of: &Borrowed) -> Option<Vec<i64>> {
    // SAFETY: whoever calls holds the tensor, and each type has the size of its dtype.
    unsafe {
        Some(match of.dtype {
            Dtype::I64 => capture::each::<i64>(of).collect(),
            Dtype::I32 => capture::each::<i32>(of).map(i64::from).collect(),
            Dtype::I16 => capture::each::<i16>(of).map(i64::from).collect(),
            Dtype::I8 => capture::each::<i8>(of).map(i64::from).collect(),
            Dtype::U8 | Dtype::Bool => capture::each::<u8>(of).map(i64::from).collect(),
            Dtype::F32 | Dtype::BF16 | Dtype::F16 | Dtype::F64 => return None,
        })
    }
}

/// A shape as Python shows it.
pub fn tuple(shape: &[usize]) -> String {
    match shape {
        [n] => format!("({n},)"),
        _ => format!("({})", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}
