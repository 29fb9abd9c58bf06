//! Captured tensors: from torch's dtypes and strides to the row-major bool, i32 and f32 buffers of
//! the engine.
//!
//! A buffer is a copy. It is made anew only when the tensor's elements have changed, which is found
//! by comparing them, all of them, in each call: an address or a version number does not say it, as
//! another tensor may have the address and NumPy may have written to the memory.

use foveate::AnyBuffer;
use foveate::mods::{BufferData, DynExpr, Type};
use half::{bf16, f16};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::dtype::Dtype;
use crate::error::raised;
use crate::expr::{self, Expr};
use crate::tensor::Borrowed;
use crate::value::{Operand, Value, from_the_end, refused};

/// A captured tensor of one trace: its place in the structure, without its elements.
#[pyclass(frozen, module = "foveate._native")]
pub struct Capture {
    /// Elements are bound when the program runs.
    slot: AnyBuffer,
    tensor: Py<PyAny>,
    dtype: Dtype,
}

#[pymethods]
impl Capture {
    /// `tensor` as the captured buffer `name`; a gradient is wanted if `learned`.
    #[new]
    fn new(name: &str, tensor: &Bound<'_, PyAny>, learned: bool) -> PyResult<Self> {
        let Borrowed { dtype, shape, .. } = Borrowed::of(tensor)?;
        let shape = if shape.is_empty() { vec![1] } else { shape };
        let slot = AnyBuffer::on_device(name, &shape, dtype.ty(), learned).map_err(raised)?;
        Ok(Self { slot, tensor: tensor.clone().unbind(), dtype })
    }

    /// The element at `index`, one value or number an axis, counted from the end when negative.
    fn at(&self, index: Vec<Bound<'_, PyAny>>) -> PyResult<Expr> {
        let shape = self.slot.shape();
        let index = index
            .iter()
            .zip(shape)
            .map(|(i, &len)| from_the_end(&expr::index(i)?, len))
            .collect::<PyResult<Vec<_>>>()?;
        let made = DynExpr::load(&self.slot, index).map_err(raised)?;
        let range = match self.dtype.ty() {
            Type::I32 => self.dtype.narrow(),
            _ => None,
        };
        Ok(Expr(Value { expr: made, dtype: self.dtype, range }))
    }

    /// The only element of a 0-d tensor.
    fn only(&self) -> PyResult<Expr> {
        let zero = Operand::Number(crate::value::Number::Int(0));
        let made = DynExpr::load(&self.slot, vec![from_the_end(&zero, 1)?]).map_err(raised)?;
        Ok(Expr(Value { expr: made, dtype: self.dtype, range: self.dtype.narrow() }))
    }

    /// The tensor.
    #[getter]
    fn tensor(&self, py: Python<'_>) -> Py<PyAny> {
        self.tensor.clone_ref(py)
    }

    /// The name in the program.
    #[getter]
    fn name(&self) -> &str {
        self.slot.name()
    }

    /// Whether a gradient is wanted.
    #[getter]
    fn learned(&self) -> bool {
        self.slot.learned()
    }
}

impl Capture {
    /// Where the tensor's elements lie now.
    ///
    /// # Errors
    /// When it is not in host memory any more.
    pub fn borrowed(&self, py: Python<'_>) -> PyResult<Borrowed> {
        Borrowed::of(self.tensor.bind(py))
    }
}

/// A buffer called as `slot`, and as learned as it, with the elements of `tensor`; `None` if `slot`
/// holds these already. The tensor is held by its [`Capture`].
///
/// # Errors
/// When an integer does not fit 32 bits.
pub fn changed(slot: &AnyBuffer, tensor: &Borrowed) -> PyResult<Option<AnyBuffer>> {
    let shape: &[usize] = if tensor.shape.is_empty() { &[1] } else { &tensor.shape };
    if slot.shape() == shape && slot.data().is_some_and(|data| holds(data, tensor)) {
        return Ok(None);
    }
    let data = copied(tensor, slot.name())?;
    let made = AnyBuffer::new(slot.name(), shape, data, slot.learned());
    made.map(Some).map_err(raised)
}

/// Calls `f` with the elements of a tensor of `T`, in row-major order, until it says false.
///
/// # Safety
/// As for [`Borrowed::elements`].
unsafe fn each<T: Copy>(tensor: &Borrowed, mut f: impl FnMut(T) -> bool) -> bool {
    // SAFETY: the caller's promise.
    let elements: &[T] = unsafe { tensor.elements() };
    if tensor.elems() == 0 {
        return true;
    }
    let Some((&len, outer)) = tensor.shape.split_last() else { return f(elements[0]) };
    let stride = tensor.strides[outer.len()];
    let mut index = vec![0; outer.len()];
    loop {
        let start: usize = index.iter().zip(&tensor.strides).map(|(i, s)| i * s).sum();
        for i in 0..len {
            if !f(elements[start + i * stride]) {
                return false;
            }
        }
        let Some(axis) = (0..outer.len()).rev().find(|&a| index[a] + 1 < outer[a]) else {
            return true;
        };
        index[axis] += 1;
        index[axis + 1..].fill(0);
    }
}

/// Runs `$run` with `$x` an element of each kind, widened.
macro_rules! elements {
    ($tensor:expr, |$x:ident| $bool:expr, $int:expr, $float:expr) => {{
        let tensor: &Borrowed = $tensor;
        // SAFETY: the type is that of the dtype, and the tensor is held by the capture. A bool of
        // torch is read as a byte, since torch allows others than 0 and 1 in memory.
        unsafe {
            match tensor.dtype {
                Dtype::Bool => each(tensor, |v: u8| {
                    let $x = v != 0;
                    $bool
                }),
                Dtype::U8 => each(tensor, |v: u8| {
                    let $x = i64::from(v);
                    $int
                }),
                Dtype::I8 => each(tensor, |v: i8| {
                    let $x = i64::from(v);
                    $int
                }),
                Dtype::I16 => each(tensor, |v: i16| {
                    let $x = i64::from(v);
                    $int
                }),
                Dtype::I32 => each(tensor, |v: i32| {
                    let $x = i64::from(v);
                    $int
                }),
                Dtype::I64 => each(tensor, |v: i64| {
                    let $x = v;
                    $int
                }),
                Dtype::F16 => each(tensor, |v: f16| {
                    let $x = v.to_f32();
                    $float
                }),
                Dtype::BF16 => each(tensor, |v: bf16| {
                    let $x = v.to_f32();
                    $float
                }),
                Dtype::F32 => each(tensor, |v: f32| {
                    let $x = v;
                    $float
                }),
                Dtype::F64 => each(tensor, |v: f64| {
                    let $x = v as f32;
                    $float
                }),
            }
        }
    }};
}

/// The elements, row-major.
fn copied(tensor: &Borrowed, name: &str) -> PyResult<BufferData> {
    let n = tensor.elems();
    let (mut truths, mut ints, mut floats) = (Vec::new(), Vec::new(), Vec::new());
    match tensor.dtype.ty() {
        Type::Bool => truths.reserve_exact(n),
        Type::I32 => ints.reserve_exact(n),
        Type::F32 => floats.reserve_exact(n),
    }
    let mut outside = None;
    elements!(
        tensor,
        |x| {
            truths.push(x);
            true
        },
        {
            match i32::try_from(x) {
                Ok(x) => ints.push(x),
                Err(_) => outside = Some(x),
            }
            outside.is_none()
        },
        {
            floats.push(x);
            true
        }
    );
    if let Some(x) = outside {
        return Err(PyOverflowError::new_err(format!(
            "captured tensor `{name}` of shape {:?} holds {x}, which does not fit 32 bits; masks \
             and scores compute in these: renumber its values",
            tensor.shape
        )));
    }
    Ok(match tensor.dtype.ty() {
        Type::Bool => BufferData::Bool(truths),
        Type::I32 => BufferData::I32(ints),
        Type::F32 => BufferData::F32(floats),
    })
}

/// Whether `data` holds the tensor's elements, bit for bit.
fn holds(data: &BufferData, tensor: &Borrowed) -> bool {
    if data.ty() != tensor.dtype.ty() || data.len() != tensor.elems() {
        return false;
    }
    let mut at = 0;
    let mut next = || {
        at += 1;
        at - 1
    };
    elements!(
        tensor,
        |x| matches!(data, BufferData::Bool(v) if v[next()] == x),
        matches!(data, BufferData::I32(v) if i64::from(v[next()]) == x),
        matches!(data, BufferData::F32(v) if v[next()].to_bits() == x.to_bits())
    )
}

/// The captures behind the names of a program's slots, in the order of the slots.
pub fn in_order<'a>(
    slots: &[AnyBuffer],
    captures: &'a [Py<Capture>],
) -> PyResult<Vec<&'a Py<Capture>>> {
    slots
        .iter()
        .map(|slot| {
            let found = captures.iter().find(|c| c.get().slot.same(slot));
            found.ok_or_else(|| refused("a traced value of another trace is used"))
        })
        .collect()
}
