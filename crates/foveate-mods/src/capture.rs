//! What a mod captures: buffers and run-time scalars.
//!
//! A buffer is an immutable array behind a shared pointer. The structure of a mod (what is
//! hashed, compiled, cached) holds its type and rank only; its contents and lengths are bound
//! to a slot and can be replaced without tracing or compiling anything again
//! ([`crate::Program::rebind`]).

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use crate::error::{ModError, ModErrorKind};
use crate::ranges::RangeTable;
use crate::value::{BufferData, Element, ScalarValue, Type};

#[derive(Debug)]
struct Inner {
    name: String,
    shape: Vec<usize>,
    data: BufferData,
    learned: bool,
    /// For bounds; the elements never change, so it is made once.
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
        let name = name.into();
        let elems = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if shape.is_empty() || elems != Some(data.len()) {
            return Err(ModError::buffer_shape(name, shape, data.len()));
        }
        if learned && !matches!(data, BufferData::F32(_)) {
            return Err(ModError::not_learnable(name));
        }
        let (shape, ranges) = (shape.to_vec(), OnceLock::new());
        Ok(Self(Arc::new(Inner { name, shape, data, learned, ranges })))
    }

    /// A buffer of `shape` whose elements are not in host memory: each call on a GPU says where in
    /// its memory they lie. On the host they read as 0, and nothing can be computed with them.
    ///
    /// # Errors
    /// When the shape has no axis or too many elements to count, or a buffer that is not f32 is to
    /// be learned.
    pub fn on_device(
        name: impl Into<String>,
        shape: &[usize],
        ty: Type,
        learned: bool,
    ) -> Result<Self, ModError> {
        let name = name.into();
        let elems = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if shape.is_empty() || elems.is_none() {
            return Err(ModError::buffer_shape(name, shape, 0));
        }
        if learned && ty != Type::F32 {
            return Err(ModError::not_learnable(name));
        }
        let data = match ty {
            Type::Bool => BufferData::Bool(Vec::new()),
            Type::I32 => BufferData::I32(Vec::new()),
            Type::F32 => BufferData::F32(Vec::new()),
        };
        let (shape, ranges) = (shape.to_vec(), OnceLock::new());
        Ok(Self(Arc::new(Inner { name, shape, data, learned, ranges })))
    }

    /// Whether its elements are not in host memory, see [`Self::on_device`].
    pub fn is_on_device(&self) -> bool {
        self.elems() > self.0.data.len()
    }

    /// The name it is printed and rebound under.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Length of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.0.shape.iter().product()
    }

    /// The elements, row-major; none when they are not in host memory.
    pub fn data(&self) -> &BufferData {
        &self.0.data
    }

    /// True when a gradient is wanted.
    pub fn learned(&self) -> bool {
        self.0.learned
    }

    /// The element type.
    pub fn ty(&self) -> Type {
        self.0.data.ty()
    }

    /// Smallest and largest elements of its stretches. The first call takes time linear in the
    /// number of elements.
    pub(crate) fn ranges(&self) -> &RangeTable {
        self.0.ranges.get_or_init(|| RangeTable::new(&self.0.data))
    }

    /// True when both share one allocation.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
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
