//! Captured tensors: small ones are copied when their elements have changed, others are read where they
//! lie.
//!
//! Kept plans hold copies of small tensors. Whether these are still the tensors' elements is found by
//! comparing them, all of them, in each call: an address or a version number does not say it, as another
//! tensor may have the address and NumPy may have written to the memory. A tensor of more bytes than
//! [`MOST_COPIED`] is bound for one call, and no kept plan holds it.

use std::sync::Arc;

use bytemuck::NoUninit;
use foveate::AnyBuffer;
use foveate::mods::{DynExpr, Elements, SharedElements};
use pyo3::prelude::*;

use crate::dlpack::Place;
use crate::dtype::{Dtype, TorchDtype};
use crate::error::{raised, refused};
use crate::expr::{self, Expr};
use crate::tensor::{self, Borrowed, Held, row_major};
use crate::value::{self, Value};

/// Bytes of the largest tensor that is copied.
const MOST_COPIED: usize = 1 << 20;

/// A captured tensor of one trace.
#[pyclass(frozen, module = "foveate._native")]
pub struct Capture {
    slot: Slot,
    tensor: Py<PyAny>,
}

/// The place of a captured tensor in the structure, without its elements.
#[derive(Clone)]
pub struct Slot {
    /// Elements are bound when the program runs.
    buffer: AnyBuffer,
    dtype: Dtype,
    /// Whether calls read it where it lies: a large one, and every one on a device.
    shared: bool,
    /// Whether a gradient of it is wanted, or may be.
    may_learn: bool,
}

#[pymethods]
impl Capture {
    /// `tensor` as the captured buffer `name`; a gradient is wanted if `learned`, and may be, of a program that
    /// others will run, if `may_learn`.
    #[new]
    #[pyo3(signature = (name, tensor, learned, may_learn = false))]
    fn new(
        name: &str,
        tensor: &Bound<'_, PyAny>,
        learned: bool,
        may_learn: bool,
    ) -> PyResult<Self> {
        let (dtype, shape, place) = tensor::kind(tensor)?;
        let shape = if shape.is_empty() { vec![1] } else { shape };
        let buffer = AnyBuffer::on_device(name, &shape, dtype, learned).map_err(raised)?;
        let shared = place != Place::Cpu || buffer.elems() * dtype.bytes() > MOST_COPIED;
        let may_learn = learned || may_learn;
        let slot = Slot { buffer, dtype, shared, may_learn };
        Ok(slot.with(tensor.clone().unbind()))
    }

    /// The element at `index`, one value or number an axis, counted from the end when negative.
    fn at(&self, index: Vec<Bound<'_, PyAny>>) -> PyResult<Expr> {
        let index = index.iter().map(|i| value::index(&expr::operand_of(i)?));
        let index = index.collect::<PyResult<Vec<_>>>()?;
        let positive = index.iter().all(|i| i.range.is_some_and(|(low, _)| low >= 0));
        let index = index.into_iter().map(|i| i.expr).collect();
        let made = match positive {
            true => DynExpr::load(&self.slot.buffer, index),
            false => DynExpr::load_from_end(&self.slot.buffer, index),
        };
        Ok(self.element(made.map_err(raised)?))
    }

    /// The only element of a 0-d tensor.
    fn only(&self) -> PyResult<Expr> {
        let zero = DynExpr::constant(foveate::ScalarValue::I32(0));
        Ok(self.element(DynExpr::load(&self.slot.buffer, vec![zero]).map_err(raised)?))
    }

    /// The tensor.
    #[getter]
    pub fn tensor(&self, py: Python<'_>) -> Py<PyAny> {
        self.tensor.clone_ref(py)
    }

    /// The name in the program.
    #[getter]
    fn name(&self) -> &str {
        self.slot.buffer.name()
    }

    /// Whether a gradient is wanted.
    #[getter]
    fn learned(&self) -> bool {
        self.is_learned()
    }
}

impl Capture {
    /// Its place in the program.
    pub fn buffer(&self) -> &AnyBuffer {
        &self.slot.buffer
    }

    /// What it is without the tensor.
    pub fn slot(&self) -> &Slot {
        &self.slot
    }

    fn element(&self, expr: DynExpr) -> Expr {
        let Slot { dtype, may_learn, .. } = self.slot;
        Expr(Value { expr, dtype, range: dtype.narrow(), learns: may_learn })
    }

    /// The tensor as it is now, or `other` in its place: what a transform of torch's unwrapped. The operands
    /// are in `place`.
    ///
    /// # Errors
    /// When it is elsewhere, or `other` has another shape or dtype.
    pub fn now(
        &self,
        py: Python<'_>,
        other: Option<&Bound<'_, PyAny>>,
        place: Place,
    ) -> PyResult<Held> {
        let object = other.unwrap_or(self.tensor.bind(py));
        let captured = Held::on(place, object, "a captured tensor")?;
        if captured.at.dtype != self.slot.dtype || captured.at.shape != self.slot.buffer.shape() {
            return Err(refused(format!(
                "captured tensor `{}` has another shape or dtype when attention runs",
                self.slot.buffer.name()
            )));
        }
        Ok(captured)
    }

    /// Whether calls read the tensor where it lies: it must not be written to before the backward.
    pub fn is_shared(&self) -> bool {
        self.slot.shared
    }

    /// Whether a gradient is wanted.
    pub fn is_learned(&self) -> bool {
        self.slot.buffer.learned()
    }
}

impl Slot {
    /// The place with a tensor of its dtype, shape and device in it.
    pub fn with(&self, tensor: Py<PyAny>) -> Capture {
        Capture { slot: self.clone(), tensor }
    }
}

/// Of a captured tensor as it is in one call.
impl Held {
    fn is_copied(&self) -> bool {
        self.at.bytes() <= MOST_COPIED
    }

    /// Whether `slot` is what a kept plan holds of the tensor: a copy of a small one, no elements of
    /// another one.
    pub fn is_held(&self, slot: &AnyBuffer) -> bool {
        match self.is_copied() {
            true => slot.shape() == self.at.shape && holds(&slot.elements(), &self.at),
            false => slot.shape().iter().all(|&n| n == 0) && !slot.is_on_device(),
        }
    }

    /// What a kept plan holds in place of `slot`, if that is something else.
    ///
    /// # Errors
    /// Never for a slot of this tensor's program.
    pub fn at_rest(&self, slot: &AnyBuffer) -> PyResult<Option<AnyBuffer>> {
        if self.is_held(slot) {
            return Ok(None);
        }
        let empty = vec![0; slot.shape().len()];
        let (shape, elements) = match self.is_copied() {
            true => (&self.at.shape, copied(&self.at)),
            false => (&empty, copied(&Borrowed { shape: empty.clone(), ..self.at.clone() })),
        };
        let strides = row_major(shape);
        let made = AnyBuffer::shared(slot.name(), &elements, shape, &strides, 0, slot.learned());
        made.map(Some).map_err(raised)
    }

    /// A tensor of host memory where it lies, for one call, if it is none that is copied.
    ///
    /// # Errors
    /// When it is not in host memory; else never for a slot of this tensor's program.
    pub fn borrowed(&self, slot: &AnyBuffer) -> PyResult<Option<AnyBuffer>> {
        if self.is_copied() {
            return Ok(None);
        }
        let Borrowed { shape, strides, dtype, .. } = &self.at;
        let elements = SharedElements::new(*dtype, Arc::new(OnHost::of(self)?));
        let made = AnyBuffer::shared(slot.name(), &elements, shape, strides, 0, slot.learned());
        made.map(Some).map_err(raised)
    }
}

/// A tensor of host memory.
struct OnHost(Held);

impl OnHost {
    fn of(tensor: &Held) -> PyResult<Self> {
        tensor.at.clone().in_place(Place::Cpu, "a captured tensor")?;
        Ok(Self(tensor.clone()))
    }
}

impl AsRef<[u8]> for OnHost {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the elements are in host memory, and the owner is held as long as the slice is.
        unsafe { self.0.at.as_bytes() }
    }
}

/// The elements of a tensor, in row-major order, as the integers `T` of their size.
///
/// # Safety
/// As for [`Borrowed::elements`]; `T` has the size of the tensor's dtype.
pub unsafe fn each<'a, T: Copy + 'a>(tensor: &'a Borrowed) -> impl Iterator<Item = T> + 'a {
    // SAFETY: the caller's promise; an integer of the same size has the same alignment.
    let elements: &[T] = unsafe { tensor.elements() };
    let (&len, outer) = tensor.shape.split_last().unwrap_or((&1, &[]));
    let stride = tensor.strides.last().copied().unwrap_or(0);
    (0..outer.iter().product::<usize>()).flat_map(move |mut row| {
        let mut start = 0;
        for (&n, &stride) in outer.iter().zip(&tensor.strides).rev() {
            start += row % n * stride;
            row /= n;
        }
        (0..len).map(move |i| elements[start + i * stride])
    })
}

/// The elements of a tensor of integers, in row-major order; `None` of another dtype.
pub fn integers(of: &Borrowed) -> Option<Vec<i64>> {
    // SAFETY: whoever calls holds the tensor, and each type has the size of its dtype.
    unsafe {
        Some(match of.dtype {
            Dtype::I64 => each::<i64>(of).collect(),
            Dtype::I32 => each::<i32>(of).map(i64::from).collect(),
            Dtype::I16 => each::<i16>(of).map(i64::from).collect(),
            Dtype::I8 => each::<i8>(of).map(i64::from).collect(),
            Dtype::U8 | Dtype::Bool => each::<u8>(of).map(i64::from).collect(),
            Dtype::F32 | Dtype::BF16 | Dtype::F16 | Dtype::F64 => return None,
        })
    }
}

/// Elements of one size.
struct Owned<T>(Vec<T>);

impl<T: NoUninit> AsRef<[u8]> for Owned<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// A row-major copy of a tensor that is held.
fn copied(tensor: &Borrowed) -> SharedElements {
    fn copy<T: NoUninit + Send + Sync>(tensor: &Borrowed) -> SharedElements {
        // SAFETY: `T` has the size of the dtype, see below, and the tensor is held.
        let elements: Vec<T> = unsafe {
            match tensor.is_contiguous() {
                true => tensor.elements().to_vec(),
                false => each(tensor).collect(),
            }
        };
        SharedElements::new(tensor.dtype, Arc::new(Owned(elements)))
    }
    match tensor.dtype.bytes() {
        1 => copy::<u8>(tensor),
        2 => copy::<u16>(tensor),
        4 => copy::<u32>(tensor),
        _ => copy::<u64>(tensor),
    }
}

/// Whether `kept`, row-major and of the tensor's dtype, holds the elements of a tensor that is held,
/// bit for bit.
fn holds(kept: &Elements<'_>, tensor: &Borrowed) -> bool {
    fn same<T: NoUninit>(kept: &[u8], tensor: &Borrowed) -> bool {
        // SAFETY: `T` has the size of the dtype, see below, and the tensor is held.
        let mut elements = unsafe { each::<T>(tensor) };
        kept.chunks_exact(size_of::<T>())
            .all(|k| elements.next().is_some_and(|e| bytemuck::bytes_of(&e) == k))
    }
    let kept = match kept {
        Elements::Bool(v) | Elements::U8(v) => v,
        Elements::I8(v) => bytemuck::cast_slice(v),
        Elements::I16(v) => bytemuck::cast_slice(v),
        Elements::I32(v) => bytemuck::cast_slice(v),
        Elements::I64(v) => bytemuck::cast_slice(v),
        Elements::F16(v) => bytemuck::cast_slice(v),
        Elements::BF16(v) => bytemuck::cast_slice(v),
        Elements::F32(v) => bytemuck::cast_slice(v),
        Elements::F64(v) => bytemuck::cast_slice(v),
    };
    if kept.len() != tensor.bytes() {
        return false;
    }
    if tensor.is_contiguous() {
        // SAFETY: the tensor is held.
        return kept == unsafe { tensor.as_bytes() };
    }
    match tensor.dtype.bytes() {
        1 => same::<u8>(kept, tensor),
        2 => same::<u16>(kept, tensor),
        4 => same::<u32>(kept, tensor),
        _ => same::<u64>(kept, tensor),
    }
}

/// The captures behind the names of a program's slots, in the order of the slots.
pub fn in_order<'a>(
    slots: &[AnyBuffer],
    captures: &'a [Py<Capture>],
) -> PyResult<Vec<&'a Py<Capture>>> {
    slots
        .iter()
        .map(|slot| {
            let found = captures.iter().find(|c| c.get().buffer().same(slot));
            found.ok_or_else(|| refused("a traced value of another trace is used"))
        })
        .collect()
}
