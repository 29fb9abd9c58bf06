//! A block mask's lists of tiles, and the table that masks read in their place.
//!
//! A tile is a byte, a sixteenth of what it takes in a block mask with all its tables, and an eighth without
//! lists of full tiles: 1 MiB for 131,072 queries and keys. Bits would need an atomic operation for each listed
//! tile on a device, where lists come in any order, instead of a store.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::capture;
use crate::cuda;
use crate::dlpack::Place;
use crate::dtype::{Dtype, TorchDtype};
use crate::tensor::{Borrowed, Held};

/// `kv_num_blocks` and `kv_indices` of a block mask, and those of its full tiles where it has them.
#[pyclass(frozen, module = "foveate._native")]
pub struct Lists {
    lists: Vec<Held>,
    /// Of the table: `[B, H, rows, columns]`.
    #[pyo3(get)]
    pub shape: [usize; 4],
}

impl Lists {
    /// Of these tiles, for operands of these lengths.
    ///
    /// # Errors
    /// When they are none, do not fit each other, or have too few rows.
    pub fn of(
        lists: Vec<Held>,
        [tile_q, tile_kv]: [usize; 2],
        q_len: usize,
        kv_len: usize,
    ) -> PyResult<Self> {
        let four = |of: &Held| <[usize; 4]>::try_from(of.at.shape.as_slice()).ok();
        let (Some([.., rows, columns]), true) = (
            lists.get(1).and_then(four),
            [2, 4].contains(&lists.len()) && tile_q > 0 && tile_kv > 0,
        ) else {
            return Err(wrong("has lists of tiles that are none"));
        };
        let needed = q_len.div_ceil(tile_q);
        if rows < needed {
            return Err(wrong(&format!(
                "lists {rows} rows of tiles of {tile_q} queries; {q_len} queries need {needed}"
            )));
        }
        let mut axes = [1; 2];
        for pair in lists.chunks_exact(2) {
            let shape = four(&pair[1]).filter(|_| pair.iter().all(|of| !of.at.dtype.floating()));
            let shape = shape.ok_or_else(|| wrong("has lists of tiles that are no integers"))?;
            if pair[0].at.shape[..] != shape[..3] || shape[2] != rows {
                return Err(wrong("has lists of tiles of other shapes than their numbers"));
            }
            for (all, n) in axes.iter_mut().zip(shape) {
                *all = (*all).max(n);
            }
        }
        let fits = |of: &Held| axes.iter().zip(&of.at.shape).all(|(&all, &n)| n == 1 || n == all);
        if !lists.iter().all(fits) {
            return Err(wrong("lists partial and full tiles for other batch entries or heads"));
        }
        let width = columns.max(kv_len.div_ceil(tile_kv)).max(1);
        Ok(Self { lists, shape: [axes[0], axes[1], rows, width] })
    }

    /// Writes what each tile is to `into`, a new contiguous uint8 tensor of [`Self::shape`] where the lists are: 0
    /// empty, 1 partial, 2 full. On a device it is queued.
    ///
    /// # Errors
    /// On the CPU, when a list has a tile outside.
    pub fn write(&self, py: Python<'_>, into: &Borrowed) -> PyResult<()> {
        if into.shape != self.shape || into.dtype != Dtype::U8 || !into.is_contiguous() {
            return Err(PyValueError::new_err("the table of tiles is no new one of its shape"));
        }
        if into.place != Place::Cpu {
            let lists: Vec<_> = self.lists.iter().map(|held| held.at.clone()).collect();
            return cuda::kinds_of_lists(py, &lists, into);
        }
        let [_, heads, rows, width] = self.shape;
        // SAFETY: the caller holds the tensor, which is new, and of this dtype.
        let kinds: &mut [u8] = unsafe { into.elements_mut() };
        kinds.fill(0);
        for (kind, pair) in (1..).zip(self.lists.chunks_exact(2)) {
            let [counts, tiles] =
                [0, 1].map(|i| capture::integers(&pair[i].at).unwrap_or_default());
            let [batch, of_heads, _, columns] = [0, 1, 2, 3].map(|axis| pair[1].at.shape[axis]);
            for (at, row) in kinds.chunks_mut(width).enumerate() {
                let (b, h) = (at / rows / heads % batch, at / rows % heads % of_heads);
                let from = (b * of_heads + h) * rows + at % rows;
                let listed = usize::try_from(counts[from]).unwrap_or(0).min(columns);
                for &tile in &tiles[from * columns..][..listed] {
                    let place = usize::try_from(tile).ok().and_then(|tile| row.get_mut(tile));
                    let outside = || wrong(&format!("lists a tile outside its {width} columns"));
                    *place.ok_or_else(outside)? = kind;
                }
            }
        }
        Ok(())
    }
}

#[pymethods]
impl Lists {
    /// Lists on a device are int32.
    #[new]
    fn new(
        lists: Vec<Bound<'_, PyAny>>,
        tile: [usize; 2],
        q_len: usize,
        kv_len: usize,
    ) -> PyResult<Self> {
        let place = lists
            .first()
            .map_or(Ok(Place::Cpu), |of| PyResult::Ok(Borrowed::anywhere(of)?.place))?;
        let held = lists.iter().map(|list| Held::on(place, list, "a list of tiles"));
        Self::of(held.collect::<PyResult<_>>()?, tile, q_len, kv_len)
    }

    /// Writes the table.
    fn table(&self, py: Python<'_>, into: &Bound<'_, PyAny>) -> PyResult<()> {
        self.write(py, &Borrowed::on(self.lists[0].at.place, into, "a table of tiles")?)
    }
}

fn wrong(what: &str) -> PyErr {
    PyValueError::new_err(format!("block_mask {what}"))
}
