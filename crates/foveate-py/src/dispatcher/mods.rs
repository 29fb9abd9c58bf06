//! Masks and scores of an operator: programs in text form, and what they read.
//!
//! A text is parsed once for tensors of the same dtypes and shapes. Integers are values of a call.

use std::any::Any;
use std::sync::{Arc, Mutex};

use foveate::mods::Program;
use foveate::{AnyBuffer, ScalarValue};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use super::layout::{integers, tuple};
use super::stack::{Arguments, Tensor};
use crate::capture::{Captured, Owner};
use crate::dlpack::Place;
use crate::dtype::Dtype;
use crate::error::raised;
use crate::tensor::{Borrowed, row_major};
use crate::text;

/// The arguments `score`, `score_captures` and `score_scalars`, or those of the mask.
pub struct Said {
    text: Option<String>,
    pub captures: Vec<Arc<Tensor>>,
    scalars: Vec<i64>,
}

/// A captured tensor and what keeps its memory.
pub struct Captive {
    pub tensor: Borrowed,
    owner: Arc<dyn Any + Send + Sync>,
}

/// A program with the captured tensors that it may read, by the numbers in their names.
pub struct Mod {
    known: Arc<Known>,
    program: Program,
    captives: Vec<Captive>,
}

impl Said {
    pub fn take(arguments: &mut Arguments) -> Self {
        Self {
            text: arguments.optional_string(),
            captures: arguments.tensors(),
            scalars: arguments.integers(),
        }
    }

    pub fn is_some(&self) -> bool {
        self.text.is_some()
    }

    /// The captured tensors.
    ///
    /// # Errors
    /// When one is not in host memory, or of a dtype that programs do not read.
    pub fn captives(&self) -> PyResult<Vec<Captive>> {
        self.captures.iter().map(Captive::new).collect()
    }

    /// The program of these captured tensors, of which the `learned` want a gradient.
    ///
    /// # Errors
    /// When the text is no program.
    pub fn read(
        &self,
        is_mask: bool,
        captives: Vec<Captive>,
        learned: &[usize],
    ) -> PyResult<Option<Mod>> {
        let Some(text) = &self.text else { return Ok(None) };
        let known = known(text, is_mask, &captives, learned, &self.scalars)?;
        let mut program = known.program.clone();
        for slot in known.program.graph().scalars() {
            let at = number(&slot.name, if is_mask { "mn" } else { "sn" });
            let Some(&value) = at.and_then(|at| self.scalars.get(at)) else { continue };
            let value = ScalarValue::I32(text::narrow(value)?);
            if slot.value != value {
                program = program.set_scalar(&slot.name, value).map_err(raised)?;
            }
        }
        Ok(Some(Mod { known, program, captives }))
    }
}

impl Captive {
    pub fn new(tensor: &Arc<Tensor>) -> PyResult<Self> {
        Ok(Self { tensor: tensor.borrowed()?, owner: tensor.clone() })
    }

    fn shape(&self) -> &[usize] {
        if self.tensor.shape.is_empty() { &[1] } else { &self.tensor.shape }
    }

    fn captured(&self) -> Captured {
        Captured::new(self.tensor.clone(), Owner::Shared(self.owner.clone()))
    }
}

impl Mod {
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// What the program reads, in the order of its slots.
    pub fn captured(&self) -> Vec<Captured> {
        self.known.reads.iter().map(|&at| self.captives[at].captured()).collect()
    }

    /// `error`, where it is of an index outside a captured tensor, with the shape of the tensor in place
    /// of the program's name of it.
    pub fn named(&self, py: Python<'_>, error: PyErr) -> PyErr {
        if !error.is_instance_of::<PyIndexError>(py) {
            return error;
        }
        let mut message = error.value(py).to_string();
        for (slot, &at) in self.known.program.graph().buffers().iter().zip(&self.known.reads) {
            let shape = tuple(&self.captives[at].tensor.shape);
            let captured = format!("captured buffer `{}`", slot.name());
            message = message.replace(&captured, &format!("a captured tensor of shape {shape}"));
        }
        PyIndexError::new_err(message)
    }
}

/// The number in a name of a program's.
pub fn number(name: &str, prefix: &str) -> Option<usize> {
    name.strip_prefix(prefix)?.parse().ok()
}

/// A text that was parsed.
struct Known {
    is_mask: bool,
    text: String,
    scalars: usize,
    slots: Vec<AnyBuffer>,
    program: Program,
    /// The captured tensor in each slot of the program.
    reads: Vec<usize>,
}

/// Texts that are kept; beyond, the least recently used are dropped.
const MOST: usize = 64;

/// The texts of the process, the most recently used last. Locked with the GIL held only, so that a process that
/// is forked never finds it locked.
static KNOWN: Mutex<Vec<Arc<Known>>> = Mutex::new(Vec::new());

/// The program that `text` says, of captured tensors of these dtypes and shapes and as many integers.
fn known(
    text: &str,
    is_mask: bool,
    captives: &[Captive],
    learned: &[usize],
    scalars: &[i64],
) -> PyResult<Arc<Known>> {
    let mut kept = KNOWN.lock().unwrap_or_else(|e| e.into_inner());
    let same = |k: &Arc<Known>| {
        let slots = k.slots.iter().zip(captives).enumerate();
        k.is_mask == is_mask
            && k.text == text
            && k.scalars == scalars.len()
            && k.slots.len() == captives.len()
            && slots.into_iter().all(|(at, (slot, captive))| {
                slot.element() == captive.tensor.dtype
                    && slot.shape() == captive.shape()
                    && slot.learned() == learned.contains(&at)
            })
    };
    if let Some(at) = kept.iter().rposition(same) {
        kept[at..].rotate_left(1);
        return Ok(kept[kept.len() - 1].clone());
    }
    let prefix = if is_mask { "m" } else { "s" };
    let slots = captives.iter().enumerate().map(|(at, captive)| {
        let (name, dtype) = (format!("{prefix}{at}"), captive.tensor.dtype);
        AnyBuffer::on_device(&name, captive.shape(), dtype, learned.contains(&at)).map_err(raised)
    });
    let slots = slots.collect::<PyResult<Vec<_>>>()?;
    let named = scalars.iter().enumerate().map(|(at, &n)| (format!("{prefix}n{at}"), n));
    let program = text::read(text, slots.iter(), &named.collect::<Vec<_>>(), is_mask)?;
    let reads = program.graph().buffers().iter().map(|slot| number(slot.name(), prefix));
    let reads = reads.collect::<Option<_>>();
    let reads =
        reads.ok_or_else(|| PyValueError::new_err("a program reads a tensor of no name"))?;
    let text = text.to_owned();
    let made = Arc::new(Known { is_mask, text, scalars: scalars.len(), slots, program, reads });
    kept.push(made.clone());
    if kept.len() > MOST {
        kept.remove(0);
    }
    Ok(made)
}

/// What lists of tiles make of each tile, as `foveate._blocks.table` and `narrowed`: 0 empty, 1 partial, 2 full,
/// in `[B, H, rows, columns]` without axes of batch and heads that have one entry.
///
/// # Errors
/// When there are too few rows, or a list has a tile outside.
pub fn table(
    lists: &[Arc<Tensor>],
    [tile_q, tile_kv]: [usize; 2],
    q_len: usize,
    kv_len: usize,
) -> PyResult<Captive> {
    let lists = lists.iter().map(|list| list.borrowed()).collect::<PyResult<Vec<_>>>()?;
    let wrong = |what: &str| PyValueError::new_err(format!("block_mask {what}"));
    let four = |of: &Borrowed| <[usize; 4]>::try_from(of.shape.as_slice()).ok();
    let (Some([.., rows, columns]), true) =
        (lists.get(1).and_then(four), [2, 4].contains(&lists.len()) && tile_q > 0 && tile_kv > 0)
    else {
        return Err(wrong("has lists of tiles that are none"));
    };
    let needed = q_len.div_ceil(tile_q);
    if rows < needed {
        return Err(wrong(&format!(
            "lists {rows} rows of tiles of {tile_q} queries; {q_len} queries need {needed}"
        )));
    }
    let width = columns.max(kv_len.div_ceil(tile_kv)).max(1);
    let mut axes = [1; 2];
    let mut pairs = Vec::new();
    for pair in lists.chunks_exact(2) {
        let numbers = (integers(&pair[0]), integers(&pair[1]));
        let ((Some(counts), Some(tiles)), Some(shape)) = (numbers, four(&pair[1])) else {
            return Err(wrong("has lists of tiles that are no integers"));
        };
        if pair[0].shape[..] != shape[..3] || shape[2] != rows {
            return Err(wrong("has lists of tiles of other shapes than their numbers"));
        }
        for (all, n) in axes.iter_mut().zip(shape) {
            *all = (*all).max(n);
        }
        pairs.push((counts, tiles, shape));
    }
    if pairs.iter().any(|(.., shape)| axes.iter().zip(shape).any(|(&all, &n)| n != 1 && n != all)) {
        return Err(wrong("lists partial and full tiles for other batch entries or heads"));
    }
    let mut kinds = vec![0u8; axes[0] * axes[1] * rows * width];
    for (kind, (counts, tiles, [batch, heads, _, columns])) in (1..).zip(&pairs) {
        for (at, row) in kinds.chunks_mut(width).enumerate() {
            let (b, h) = (at / rows / axes[1] % batch, at / rows % axes[1] % heads);
            let from = (b * heads + h) * rows + at % rows;
            let listed = usize::try_from(counts[from]).unwrap_or(0).min(*columns);
            for &tile in &tiles[from * columns..][..listed] {
                let place = usize::try_from(tile).ok().and_then(|tile| row.get_mut(tile));
                let outside = || wrong(&format!("lists a tile outside its {width} columns"));
                *place.ok_or_else(outside)? = kind;
            }
        }
    }
    let mut shape = vec![axes[0], axes[1], rows, width];
    for axis in [1, 0] {
        if shape[axis] == 1 {
            shape.remove(axis);
        }
    }
    let tensor = Borrowed {
        place: Place::Cpu,
        address: kinds.as_ptr() as usize,
        dtype: Dtype::U8,
        strides: row_major(&shape),
        shape,
    };
    Ok(Captive { tensor, owner: Arc::new(kinds) })
}
