//! What of a block mask has to be as it was for what was found of it to hold.
//!
//! Asked in every call with a block mask, mostly after attention has taken the processor's caches: in Rust for
//! the instructions and objects that Python's own comparison of seven attributes would bring back.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// The tables of a block mask that count, held, with their versions; its function and its sizes.
#[pyclass(frozen, module = "foveate._native")]
pub struct State {
    /// Numbers and indices of tiles, and those of full ones or `None`.
    tables: [Py<PyAny>; 4],
    /// `None` of a tensor that does not count its writes: it may be another in each call.
    versions: [Option<i64>; 4],
    /// `mask_mod`, `seq_lengths` and `BLOCK_SIZE`.
    rest: [Py<PyAny>; 3],
}

fn names(py: Python<'_>) -> ([&Bound<'_, PyString>; 4], [&Bound<'_, PyString>; 3]) {
    (
        [
            intern!(py, "kv_num_blocks"),
            intern!(py, "kv_indices"),
            intern!(py, "full_kv_num_blocks"),
            intern!(py, "full_kv_indices"),
        ],
        [intern!(py, "mask_mod"), intern!(py, "seq_lengths"), intern!(py, "BLOCK_SIZE")],
    )
}

/// What changes when a table is written to; that of no table never does.
fn version(table: &Bound<'_, PyAny>) -> Option<i64> {
    match table.is_none() {
        true => Some(0),
        // Tensors of inference mode have none.
        false => table.getattr(intern!(table.py(), "_version")).ok()?.extract().ok(),
    }
}

#[pymethods]
impl State {
    #[new]
    fn new(mask: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (tables, rest) = names(mask.py());
        let [a, b, c, d] = tables.map(|name| mask.getattr(name));
        let tables = [a?, b?, c?, d?];
        let [function, lengths, tile] = rest.map(|name| mask.getattr(name).map(Bound::unbind));
        Ok(Self {
            versions: tables.each_ref().map(version),
            tables: tables.map(Bound::unbind),
            rest: [function?, lengths?, tile?],
        })
    }

    /// Whether all of it is so now.
    fn holds(&self, mask: &Bound<'_, PyAny>) -> PyResult<bool> {
        let (tables, rest) = names(mask.py());
        for (at, name) in tables.into_iter().enumerate() {
            let now = mask.getattr(name)?;
            let known = self.versions[at];
            if !now.is(&self.tables[at]) || known.is_none() || version(&now) != known {
                return Ok(false);
            }
        }
        for (name, was) in rest.into_iter().zip(&self.rest) {
            let now = mask.getattr(name)?;
            if !now.is(was) && !now.eq(was)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
