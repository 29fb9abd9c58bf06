//! Where keys lie: in tensors of their own, in sequences one after another, or in pages.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::made::Maker;
use super::stack::{Arguments, Tensor};
use crate::capture::integers;
use crate::cuda::{Lengths, Pages, Sequences};
use crate::dlpack::Place;
use crate::dtype::{Dtype, TorchDtype};
use crate::tensor::{Borrowed, Held};

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

/// What they say, of operands on the CPU.
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
                let cu_q = offsets(py, CU_Q, &cu_q.borrowed()?, rows(q))?;
                let cu_k = offsets(py, CU_K, &cu_k.borrowed()?, rows(k))?;
                as_many(cu_q.len(), cu_k.len())?;
                Ok(Places::Sequences(cu_q, cu_k))
            }
            Self::Pages([table, lengths]) => {
                let batch = q.shape.first().copied().unwrap_or(0);
                let table = page_numbers(py, TABLE, &table.borrowed()?, batch)?;
                let lengths = page_numbers(py, LENGTHS, &lengths.borrowed()?, batch)?;
                Ok(Places::Pages([table, lengths]))
            }
        }
    }

    /// What the tensors say of operands on a device, where their elements stay: offsets of 32 bits with all rows as
    /// the longest sequence; a table of 32 bits.
    ///
    /// # Errors
    /// When they are no offsets, or no pages, of these.
    pub fn there(
        &self,
        make: &Maker<'_>,
        [q, k, _]: &[Borrowed; 3],
    ) -> PyResult<(Option<Sequences>, Option<Pages>)> {
        let rows = |of: &Borrowed| of.shape.get(2).copied().unwrap_or(0);
        match self {
            Self::Dense => Ok((None, None)),
            Self::Sequences([cu_q, cu_k]) => {
                let offsets = |name, of: &Arc<Tensor>| {
                    is_vector(make.py, name, &of.borrowed()?)?;
                    make.dense(of, Dtype::I32, name)
                };
                let both = [offsets(CU_Q, cu_q)?, offsets(CU_K, cu_k)?];
                as_many(both[0].at.elems(), both[1].at.elems())?;
                Ok((Some((both, [rows(q), rows(k)])), None))
            }
            Self::Pages([table, lengths]) => {
                let batch = q.shape.first().copied().unwrap_or(0);
                are_pages(make.py, TABLE, &table.borrowed()?, batch)?;
                let here = lengths.borrowed()?;
                let lengths = match here.place {
                    Place::Cpu => Lengths::Known(page_numbers(make.py, LENGTHS, &here, batch)?),
                    Place::Cuda(_) => {
                        are_pages(make.py, LENGTHS, &here, batch)?;
                        Lengths::There(page_numbers_there(make, LENGTHS, lengths)?)
                    }
                };
                Ok((None, Some((page_numbers_there(make, TABLE, table)?, lengths))))
            }
        }
    }
}

const CU_Q: &str = "cu_seqlens_q";
const CU_K: &str = "cu_seqlens_k";

/// Tensors of pages: name and number of axes.
const TABLE: (&str, usize) = ("page_table", 2);
const LENGTHS: (&str, usize) = ("lengths", 1);

fn as_many(q: usize, k: usize) -> PyResult<()> {
    match q == k {
        true => Ok(()),
        false => Err(PyValueError::new_err(format!(
            "{CU_Q} has {q} offsets and {CU_K} {k}; they need as many"
        ))),
    }
}

fn is_vector(py: Python<'_>, name: &str, of: &Borrowed) -> PyResult<()> {
    if of.shape.len() == 1 && of.elems() > 0 && !of.dtype.floating() {
        return Ok(());
    }
    let dtype = of.dtype.object(py)?;
    Err(PyValueError::new_err(format!(
        "{name} must be a vector of integer offsets, got a tensor of {} {:?} on {}",
        dtype.bind(py).str()?,
        of.shape,
        of.place
    )))
}

/// Offsets of sequences in `rows` rows.
fn offsets(py: Python<'_>, name: &str, of: &Borrowed, rows: usize) -> PyResult<Vec<i32>> {
    is_vector(py, name, of)?;
    let numbers = integers(of).unwrap_or_default();
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

fn are_pages(
    py: Python<'_>,
    (name, axes): (&str, usize),
    of: &Borrowed,
    batch: usize,
) -> PyResult<()> {
    if !matches!(of.dtype, Dtype::I32 | Dtype::I64) || of.shape.len() != axes {
        let dtype = of.dtype.object(py)?;
        let plural = if axes > 1 { "axes" } else { "axis" };
        return Err(PyValueError::new_err(format!(
            "{name} must be an int32 or int64 tensor of {axes} {plural}, got {} {}",
            dtype.bind(py).str()?,
            tuple(&of.shape)
        )));
    }
    if of.shape[0] != batch {
        return Err(PyValueError::new_err(format!(
            "{name} is for {} batch entries, and query has {batch}",
            of.shape[0]
        )));
    }
    Ok(())
}

/// Numbers of pages or of keys, as the engine reads them: what 32 bits cannot hold is no page.
fn page_numbers(
    py: Python<'_>,
    named: (&str, usize),
    of: &Borrowed,
    batch: usize,
) -> PyResult<Vec<i32>> {
    are_pages(py, named, of, batch)?;
    let numbers = integers(of).unwrap_or_default();
    let clamp = |n: i64| n.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
    Ok(numbers.into_iter().map(clamp).collect())
}

/// [`page_numbers`] of a tensor whose elements stay on the device.
fn page_numbers_there(
    make: &Maker<'_>,
    (name, _): (&str, usize),
    of: &Arc<Tensor>,
) -> PyResult<Held> {
    let narrow = match of.borrowed()?.dtype {
        // Of a number beyond 32 bits CUDA makes the largest or the least one if it is a float, and its lowest bits if
        // it is an integer.
        Dtype::I64 => &Arc::new(make.copied(of, Dtype::F64)?),
        _ => of,
    };
    make.dense(narrow, Dtype::I32, name)
}

/// A shape as Python shows it.
pub fn tuple(shape: &[usize]) -> String {
    match shape {
        [n] => format!("({n},)"),
        _ => format!("({})", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}
