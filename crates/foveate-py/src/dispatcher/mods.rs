//! Masks and scores of an operator: programs in text form, and what they read.
//!
//! A text is parsed once for tensors of the same dtypes and shapes. Integers are values of a call.

use std::sync::{Arc, Mutex};

use foveate::mods::Program;
use foveate::{AnyBuffer, ScalarValue};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use super::layout::tuple;
use super::made::Maker;
use super::stack::{Arguments, Tensor};
use crate::dlpack::Place;
use crate::dtype::Dtype;
use crate::error::raised;
use crate::lists::Lists;
use crate::tensor::{Borrowed, Held};
use crate::text;

/// The arguments `score`, `score_captures` and `score_scalars`, or those of the mask.
pub struct Said {
    text: Option<String>,
    pub captures: Vec<Arc<Tensor>>,
    scalars: Vec<i64>,
}

/// A program with the captured tensors that it may read, by the numbers in their names.
pub struct Mod {
    known: Arc<Known>,
    program: Program,
    captives: Vec<Held>,
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

    /// The captured tensors, of a call on operands in `place`.
    ///
    /// # Errors
    /// When one is elsewhere, or of a dtype that programs do not read.
    pub fn captives(&self, place: Place) -> PyResult<Vec<Held>> {
        let held = |tensor: &Arc<Tensor>| {
            let at = tensor.borrowed()?.in_place(place, "a captured tensor")?;
            Ok(Held::new(at, tensor.clone()))
        };
        self.captures.iter().map(held).collect()
    }

    /// The program of these captured tensors, of which the `learned` want a gradient.
    ///
    /// # Errors
    /// When the text is no program.
    pub fn read(
        &self,
        is_mask: bool,
        captives: Vec<Held>,
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

impl Mod {
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// What the program reads, in the order of its slots.
    pub fn captured(&self) -> Vec<Held> {
        self.known.reads.iter().map(|&at| self.captives[at].clone()).collect()
    }

    /// `error`, where it is of an index outside a captured tensor, with the shape of the tensor in place
    /// of the program's name of it.
    pub fn named(&self, py: Python<'_>, error: PyErr) -> PyErr {
        if !error.is_instance_of::<PyIndexError>(py) {
            return error;
        }
        let mut message = error.value(py).to_string();
        for (slot, &at) in self.known.program.graph().buffers().iter().zip(&self.known.reads) {
            let shape = tuple(&self.captives[at].at.shape);
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
    captives: &[Held],
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
                slot.element() == captive.at.dtype
                    && slot.shape() == captive.at.shape
                    && slot.learned() == learned.contains(&at)
            })
    };
    if let Some(at) = kept.iter().rposition(same) {
        kept[at..].rotate_left(1);
        return Ok(kept[kept.len() - 1].clone());
    }
    let prefix = if is_mask { "m" } else { "s" };
    let slots = captives.iter().enumerate().map(|(at, captive)| {
        let (name, Borrowed { dtype, shape, .. }) = (format!("{prefix}{at}"), &captive.at);
        AnyBuffer::on_device(&name, shape, *dtype, learned.contains(&at)).map_err(raised)
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

/// The table that lists of tiles make, as the program that reads it has it: without axes of batch and heads that have
/// one entry.
///
/// # Errors
/// Those of [`Lists::of`] and [`Lists::write`].
pub fn table(
    make: &Maker<'_>,
    lists: &[Arc<Tensor>],
    tile: [usize; 2],
    q_len: usize,
    kv_len: usize,
) -> PyResult<Held> {
    const WHAT: &str = "a list of tiles";
    let held = |list: &Arc<Tensor>| {
        let list = match make.place {
            Place::Cpu => list.clone(),
            Place::Cuda(_) => make.converted(list, Dtype::I32, WHAT)?,
        };
        Ok(Held::new(list.borrowed()?.in_place(make.place, WHAT)?, list))
    };
    let lists = lists.iter().map(held).collect::<PyResult<_>>()?;
    let lists = Lists::of(lists, tile, q_len, kv_len)?;
    let table = make.empty(Dtype::U8, &lists.shape)?;
    let mut at = table.written()?;
    lists.write(make.py, &at)?;
    for axis in [1, 0] {
        if at.shape[axis] == 1 {
            at.shape.remove(axis);
            at.strides.remove(axis);
        }
    }
    Ok(Held::new(at, Arc::new(table)))
}
