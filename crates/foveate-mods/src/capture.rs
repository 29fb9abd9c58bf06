//! What a mod captures: buffers and run-time scalars.
//!
//! A buffer is an array behind a shared pointer: elements of its own, or memory of somebody else's
//! that is read where it lies ([`AnyBuffer::shared`]). The structure of a mod (what is
//! hashed, compiled, cached) holds its type and rank only; its contents and lengths are bound
//! to a slot and can be replaced without tracing or compiling anything again
//! ([`crate::Program::rebind`]).

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use crate::elements::{ElementType, Elements, Placed, RowMajor, SharedElements, is_learnable};
use crate::error::{ModError, ModErrorKind};
use crate::ranges::RangeTable;
use crate::value::{BufferData, Element, ScalarValue, Type};

/// Where elements are.
#[derive(Debug)]
enum Storage {
    /// Row-major, the buffer's own.
    Owned(BufferData),
    /// Somebody else's, with strides.
    Shared(SharedElements),
    /// Not in host memory: in device memory, or to be bound before a call.
    Elsewhere(ElementType),
}

#[derive(Debug)]
struct Inner {
    name: String,
    shape: Vec<usize>,
    /// Distance of neighbours along each axis, in elements.
    strides: Vec<usize>,
    /// Place of the element of index 0 in memory.
    offset: usize,
    data: Storage,
    learned: bool,
    /// For bounds; the elements never change while they are looked at, so it is made once.
    ranges: OnceLock<RangeTable>,
}

/// A captured buffer of any element type. Cloning shares the elements.
#[derive(Clone, Debug)]
pub struct AnyBuffer(Arc<Inner>);

impl AnyBuffer {
    /// A row-major buffer of `shape`.
    ///
    /// # Errors
    /// When the product of `shape` is not the number of elements, the shape has no axis, or a
    /// buffer that is not f32 is to be learned.
    pub fn new(
        name: impl Into<String>,
        shape: &[usize],
        data: BufferData,
        learned: bool,
    ) -> Result<Self, ModError> {
        let len = data.len();
        let buffer = Self::dense(name.into(), shape, Storage::Owned(data), learned)?;
        if buffer.elems() != len {
            return Err(ModError::buffer_shape(buffer.0.name.clone(), shape, len));
        }
        Ok(buffer)
    }

    /// A buffer of somebody else's memory, which is read where it lies and never copied: the element
    /// of index `i` is at place `offset + Σ i·strides` of `elements`, all in elements. Strides may be
    /// 0 (an axis that is broadcast) and in any order. A shape without axes is one element, a buffer
    /// of shape `[1]`.
    ///
    /// What the memory holds may change between calls of a plan, not during one. Bounds keep what
    /// they have found out about a buffer's elements: after a change make a new buffer of the same
    /// memory, and bind it ([`crate::Program::rebind`]).
    ///
    /// # Errors
    /// When there is not one stride an axis, an element is outside the memory, the memory is not
    /// aligned for the element type, or a buffer that is not f32, f16 or bf16 is to be learned.
    pub fn shared(
        name: impl Into<String>,
        elements: &SharedElements,
        shape: &[usize],
        strides: &[usize],
        offset: usize,
        learned: bool,
    ) -> Result<Self, ModError> {
        let name = name.into();
        let wrong = |reason: String| ModError::buffer_memory(name.clone(), reason);
        if strides.len() != shape.len() {
            return Err(wrong(format!(
                "shape {shape:?} has another rank than strides {strides:?}"
            )));
        }
        let (shape, strides) =
            if shape.is_empty() { (&[1][..], &[0][..]) } else { (shape, strides) };
        let data = Storage::Shared(elements.clone());
        let buffer = Self::dense(name.clone(), shape, data, learned)?;
        let len = elements.elements().len();
        if buffer.elems() > 0 {
            if !elements.is_aligned() {
                let (element, bytes) = (elements.element(), elements.element().bytes());
                return Err(wrong(format!(
                    "the memory begins at no multiple of the {bytes} bytes of {element}"
                )));
            }
            let last = shape.iter().zip(strides).try_fold(offset, |at, (&len, &stride)| {
                (len - 1).checked_mul(stride)?.checked_add(at)
            });
            if last.is_none_or(|last| last >= len) {
                return Err(wrong(format!(
                    "shape {shape:?} with strides {strides:?} from element {offset} on reaches past the {len} \
                     elements of the memory"
                )));
            }
        }
        let mut inner = Arc::into_inner(buffer.0).expect("nobody else has it yet");
        (inner.strides, inner.offset) = (strides.to_vec(), offset);
        Ok(Self(Arc::new(inner)))
    }

    /// A row-major buffer of `shape` whose elements, of a [`Type`] or any [`ElementType`], are not in
    /// host memory: each call on a GPU says where in its memory they lie. On the host they read as 0, and
    /// nothing can be computed with them.
    ///
    /// # Errors
    /// When the shape has no axis or too many elements to count, or a buffer that is not f32, f16 or
    /// bf16 is to be learned.
    pub fn on_device(
        name: impl Into<String>,
        shape: &[usize],
        element: impl Into<ElementType>,
        learned: bool,
    ) -> Result<Self, ModError> {
        Self::dense(name.into(), shape, Storage::Elsewhere(element.into()), learned)
    }

    /// [`Self::on_device`] with strides: the element of index `i` lies `Σ i·strides` elements behind
    /// that of index 0, whose address each call says.
    ///
    /// # Errors
    /// Those of [`Self::on_device`]; when there is not one stride an axis.
    pub fn on_device_strided(
        name: impl Into<String>,
        shape: &[usize],
        strides: &[usize],
        element: impl Into<ElementType>,
        learned: bool,
    ) -> Result<Self, ModError> {
        let buffer = Self::on_device(name, shape, element, learned)?;
        if strides.len() != shape.len() {
            let reason = format!("shape {shape:?} has another rank than strides {strides:?}");
            return Err(ModError::buffer_memory(buffer.0.name.clone(), reason));
        }
        let mut inner = Arc::into_inner(buffer.0).expect("nobody else has it yet");
        inner.strides = strides.to_vec();
        Ok(Self(Arc::new(inner)))
    }

    fn dense(
        name: String,
        shape: &[usize],
        data: Storage,
        learned: bool,
    ) -> Result<Self, ModError> {
        let mut strides = vec![1; shape.len()];
        let mut elems = Some(1usize);
        for (stride, &len) in strides.iter_mut().zip(shape).rev() {
            *stride = elems.unwrap_or(0);
            elems = elems.and_then(|n| n.checked_mul(len));
        }
        if shape.is_empty() || elems.is_none() {
            let given = if let Storage::Owned(data) = &data { data.len() } else { 0 };
            return Err(ModError::buffer_shape(name, shape, given));
        }
        let (shape, ranges) = (shape.to_vec(), OnceLock::new());
        let inner = Inner { name, shape, strides, offset: 0, data, learned, ranges };
        let buffer = Self(Arc::new(inner));
        if learned && !is_learnable(buffer.element()) {
            return Err(ModError::not_learnable(buffer.0.name.clone()));
        }
        Ok(buffer)
    }

    /// Whether its elements are not in host memory, see [`Self::on_device`].
    pub fn is_on_device(&self) -> bool {
        matches!(self.0.data, Storage::Elsewhere(_)) && self.elems() > 0
    }

    /// The name it is printed and rebound under.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Length of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// Distance of neighbours along each axis in memory, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.0.strides
    }

    /// Place of the element of index 0 in [`Self::elements`].
    pub fn offset(&self) -> usize {
        self.0.offset
    }

    /// Whether the elements lie row-major, nothing between them.
    pub fn is_dense(&self) -> bool {
        let mut step = 1;
        self.elems() == 0
            || self.0.shape.iter().zip(&self.0.strides).rev().all(|(&len, &stride)| {
                let next = len == 1 || stride == step;
                step *= len;
                next
            })
    }

    /// Elements from that of index 0 to the last one in memory, both of them counted.
    pub fn span(&self) -> usize {
        let axes = self.0.shape.iter().zip(&self.0.strides);
        match self.elems() {
            0 => 0,
            _ => 1 + axes.map(|(len, stride)| (len - 1) * stride).sum::<usize>(),
        }
    }

    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.0.shape.iter().product()
    }

    /// The memory: the element of index `i` is at place `offset + Σ i·strides`. Empty when it is not
    /// host memory.
    pub fn elements(&self) -> Elements<'_> {
        match &self.0.data {
            Storage::Owned(data) => data.into(),
            Storage::Shared(elements) => elements.elements(),
            Storage::Elsewhere(_) => Elements::U8(&[]),
        }
    }

    /// The elements, row-major, where they are the buffer's own.
    pub fn data(&self) -> Option<&BufferData> {
        if let Storage::Owned(data) = &self.0.data { Some(data) } else { None }
    }

    /// A copy of the elements as mods read them, row-major; without any when they are not in host
    /// memory.
    pub fn to_data(&self) -> BufferData {
        match &self.0.data {
            Storage::Owned(data) => data.clone(),
            Storage::Elsewhere(_) => self.gathered(0),
            Storage::Shared(_) => self.gathered(self.elems()),
        }
    }

    /// The first `count` elements, row-major.
    fn gathered(&self, count: usize) -> BufferData {
        let elements = self.elements();
        let places = RowMajor::new(&self.0.shape, &self.0.strides, self.0.offset).take(count);
        let read = places.map(|at| elements.get(at));
        match self.ty() {
            Type::Bool => BufferData::Bool(read.map(|x| x == ScalarValue::Bool(true)).collect()),
            Type::I32 => BufferData::I32(read.map(int).collect()),
            Type::F32 => BufferData::F32(read.map(float).collect()),
        }
    }

    /// The first integer, row-major, that no i32 holds.
    pub fn too_wide(&self) -> Option<i64> {
        if self.element() != ElementType::I64 {
            return None;
        }
        let elements = self.elements();
        let mut places = RowMajor::new(&self.0.shape, &self.0.strides, self.0.offset);
        places.find_map(|at| elements.too_wide(at))
    }

    /// Whether both read the same elements, whatever they lie in.
    pub(crate) fn same_elements(&self, other: &Self) -> bool {
        self.same(other)
            || match (&self.0.data, &other.0.data) {
                (Storage::Owned(x), Storage::Owned(y)) => self.shape() == other.shape() && x == y,
                _ => {
                    let known = !self.is_on_device() && self.shape() == other.shape();
                    known && self.to_data() == other.to_data()
                }
            }
    }

    /// True when a gradient is wanted.
    pub fn learned(&self) -> bool {
        self.0.learned
    }

    /// The type of the elements in memory.
    pub fn element(&self) -> ElementType {
        match &self.0.data {
            Storage::Owned(data) => data.ty().into(),
            Storage::Shared(elements) => elements.element(),
            Storage::Elsewhere(element) => *element,
        }
    }

    /// The type that mods read.
    pub fn ty(&self) -> Type {
        self.element().into()
    }

    /// Smallest and largest elements of its stretches. The first call takes time linear in the
    /// number of elements.
    pub(crate) fn ranges(&self) -> &RangeTable {
        self.0.ranges.get_or_init(|| RangeTable::new(self.placed()))
    }

    /// Its elements and where they lie.
    pub(crate) fn placed(&self) -> Placed<'_> {
        Placed {
            ty: self.ty(),
            shape: &self.0.shape,
            strides: &self.0.strides,
            offset: self.0.offset,
            elements: self.elements(),
        }
    }

    /// True when both share one allocation.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

fn int(value: ScalarValue) -> i32 {
    let ScalarValue::I32(x) = value else { unreachable!("the buffer's type is i32") };
    x
}

fn float(value: ScalarValue) -> f32 {
    let ScalarValue::F32(x) = value else { unreachable!("the buffer's type is f32") };
    x
}

/// A captured buffer whose element type Rust knows.
#[derive(Clone, Debug)]
pub struct Buffer<T: Element>(AnyBuffer, PhantomData<T>);

impl<T: Element> Buffer<T> {
    /// A row-major buffer of `shape`, read-only.
    ///
    /// # Errors
    /// When the product of `shape` is not `elems.len()`.
    pub fn new(name: impl Into<String>, shape: &[usize], elems: Vec<T>) -> Result<Self, ModError> {
        Ok(Self(AnyBuffer::new(name, shape, T::into_data(elems), false)?, PhantomData))
    }

    /// A buffer with one axis.
    pub fn vector(name: impl Into<String>, elems: Vec<T>) -> Self {
        let len = elems.len();
        Self::new(name, &[len], elems).expect("a vector's shape is its length")
    }

    /// A buffer whose elements are not in host memory; see [`AnyBuffer::on_device`].
    ///
    /// # Errors
    /// When the shape has no axis or too many elements to count.
    pub fn on_device(name: impl Into<String>, shape: &[usize]) -> Result<Self, ModError> {
        Ok(Self(AnyBuffer::on_device(name, shape, T::TYPE, false)?, PhantomData))
    }

    /// A buffer whose element type becomes static.
    ///
    /// # Errors
    /// When it holds another type.
    pub fn from_any(buffer: AnyBuffer) -> Result<Self, ModError> {
        if buffer.ty() != T::TYPE {
            let reason = format!("it holds {}, not {}", buffer.ty(), T::TYPE);
            let name = buffer.name().to_owned();
            return Err(ModErrorKind::Binding { name, reason }.into());
        }
        Ok(Self(buffer, PhantomData))
    }

    /// The buffer without its static type.
    pub fn any(&self) -> &AnyBuffer {
        &self.0
    }

    /// Length of each axis.
    pub fn shape(&self) -> &[usize] {
        self.0.shape()
    }
}

impl Buffer<f32> {
    /// A read-only buffer of f16 elements, widened.
    ///
    /// # Errors
    /// When the product of `shape` is not `elems.len()`.
    pub fn from_f16(
        name: impl Into<String>,
        shape: &[usize],
        elems: &[half::f16],
    ) -> Result<Self, ModError> {
        Self::new(name, shape, elems.iter().map(|x| x.to_f32()).collect())
    }

    /// A read-only buffer of bf16 elements, widened.
    ///
    /// # Errors
    /// When the product of `shape` is not `elems.len()`.
    pub fn from_bf16(
        name: impl Into<String>,
        shape: &[usize],
        elems: &[half::bf16],
    ) -> Result<Self, ModError> {
        Self::new(name, shape, elems.iter().map(|x| x.to_f32()).collect())
    }

    /// A buffer that receives a gradient in the backward pass.
    ///
    /// # Errors
    /// When the product of `shape` is not `elems.len()`.
    pub fn learned(
        name: impl Into<String>,
        shape: &[usize],
        elems: Vec<f32>,
    ) -> Result<Self, ModError> {
        Ok(Self(AnyBuffer::new(name, shape, BufferData::F32(elems), true)?, PhantomData))
    }
}

/// A run-time scalar: its value can change without tracing or compiling again.
#[derive(Clone, Debug, PartialEq)]
pub struct Scalar {
    /// The name it is printed and set under.
    pub name: String,
    /// Its value.
    pub value: ScalarValue,
}

impl Scalar {
    /// Its type.
    pub fn ty(&self) -> Type {
        self.value.ty()
    }
}
