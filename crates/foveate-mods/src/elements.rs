//! The elements of a captured buffer where they lie: their type in memory, and whose memory it is.
//!
//! A mod computes with bool, i32 and f32. Memory may hold more types than that ([`ElementType`]);
//! an element becomes one of the three when it is loaded, so a buffer is never converted, and one
//! of somebody else's memory ([`SharedElements`]) is never copied.

use std::fmt;
use std::sync::Arc;

use bytemuck::{NoUninit, try_cast_slice};
use half::{bf16, f16};

pub use foveate_tensor::ElementType;

use crate::value::{BufferData, ScalarValue, Type};

/// The type that a mod sees of elements in memory: 16-bit floats are widened, f64 is rounded to the
/// nearest f32. An i64 that is no i32 is reported like an index outside its axis, and its lower 32
/// bits are taken.
impl From<ElementType> for Type {
    fn from(element: ElementType) -> Self {
        match element {
            ElementType::Bool => Type::Bool,
            ElementType::U8
            | ElementType::I8
            | ElementType::I16
            | ElementType::I32
            | ElementType::I64 => Type::I32,
            ElementType::F16 | ElementType::BF16 | ElementType::F32 | ElementType::F64 => Type::F32,
        }
    }
}

impl From<Type> for ElementType {
    fn from(ty: Type) -> Self {
        match ty {
            Type::Bool => ElementType::Bool,
            Type::I32 => ElementType::I32,
            Type::F32 => ElementType::F32,
        }
    }
}

/// Whether a buffer of it can be learned: f32, f16 and bf16, which its gradient comes back in.
pub(crate) fn is_learnable(element: ElementType) -> bool {
    matches!(element, ElementType::F32 | ElementType::F16 | ElementType::BF16)
}

/// Rust types that captured buffers may hold in memory.
pub trait StoredElement: NoUninit + Send + Sync {
    /// The type in memory.
    const ELEMENT: ElementType;
}

macro_rules! stored {
    ($($ty:ty = $element:ident),*) => {$(
        impl StoredElement for $ty {
            const ELEMENT: ElementType = ElementType::$element;
        }
    )*};
}

stored!(
    bool = Bool,
    u8 = U8,
    i8 = I8,
    i16 = I16,
    i32 = I32,
    i64 = I64,
    f16 = F16,
    bf16 = BF16,
    f32 = F32,
    f64 = F64
);

/// Memory of somebody else's with elements of one type. A captured buffer reads it where it lies and
/// keeps its owner alive.
///
/// ```
/// use foveate_mods::{AnyBuffer, SharedElements};
///
/// // Document ids as another library has them: i64, every second of an array.
/// let ids = SharedElements::from_vec(vec![0i64, -1, 0, -1, 1, -1]);
/// let doc = AnyBuffer::shared("doc", &ids, &[3], &[2], 0, false)?;
/// assert_eq!(doc.shape(), [3]);
/// # Ok::<(), foveate_mods::ModError>(())
/// ```
#[derive(Clone)]
pub struct SharedElements {
    element: ElementType,
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
}

impl fmt::Debug for SharedElements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = (*self.owner).as_ref().len();
        write!(f, "SharedElements({} bytes of {})", bytes, self.element)
    }
}

impl SharedElements {
    /// Memory that `owner` gives the bytes of, elements of type `element` one after another. The
    /// owner gives the same bytes each time. What they hold may change between two calls of a plan,
    /// not during one.
    pub fn new(element: ElementType, owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        Self { element, owner }
    }

    /// Elements of a vector.
    pub fn from_vec<T: StoredElement>(elems: Vec<T>) -> Self {
        struct Typed<T>(Vec<T>);
        impl<T: StoredElement> AsRef<[u8]> for Typed<T> {
            fn as_ref(&self) -> &[u8] {
                bytemuck::cast_slice(&self.0)
            }
        }
        Self::new(T::ELEMENT, Arc::new(Typed(elems)))
    }

    /// The type of the elements.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// The elements; none where the memory is not aligned for them.
    pub fn elements(&self) -> Elements<'_> {
        fn cast<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> &[T] {
            let whole = bytes.len() / size_of::<T>() * size_of::<T>();
            try_cast_slice(&bytes[..whole]).unwrap_or_default()
        }
        let bytes = (*self.owner).as_ref();
        match self.element {
            ElementType::Bool => Elements::Bool(bytes),
            ElementType::U8 => Elements::U8(bytes),
            ElementType::I8 => Elements::I8(cast(bytes)),
            ElementType::I16 => Elements::I16(cast(bytes)),
            ElementType::I32 => Elements::I32(cast(bytes)),
            ElementType::I64 => Elements::I64(cast(bytes)),
            ElementType::F16 => Elements::F16(cast(bytes)),
            ElementType::BF16 => Elements::BF16(cast(bytes)),
            ElementType::F32 => Elements::F32(cast(bytes)),
            ElementType::F64 => Elements::F64(cast(bytes)),
        }
    }

    /// Whether the memory begins where an element may.
    pub(crate) fn is_aligned(&self) -> bool {
        ((*self.owner).as_ref().as_ptr() as usize).is_multiple_of(self.element.bytes())
    }
}

/// The elements of a captured buffer as they lie in memory.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the variants of ElementType")]
pub enum Elements<'a> {
    /// Bytes; any but 0 is true.
    Bool(&'a [u8]),
    U8(&'a [u8]),
    I8(&'a [i8]),
    I16(&'a [i16]),
    I32(&'a [i32]),
    I64(&'a [i64]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
    F32(&'a [f32]),
    F64(&'a [f64]),
}

impl<'a> From<&'a BufferData> for Elements<'a> {
    fn from(data: &'a BufferData) -> Self {
        match data {
            BufferData::Bool(v) => Elements::Bool(bytemuck::cast_slice(v)),
            BufferData::I32(v) => Elements::I32(v),
            BufferData::F32(v) => Elements::F32(v),
        }
    }
}

impl Elements<'_> {
    /// Number of elements in memory, those that a stride leaves out too.
    pub fn len(&self) -> usize {
        match self {
            Elements::Bool(v) | Elements::U8(v) => v.len(),
            Elements::I8(v) => v.len(),
            Elements::I16(v) => v.len(),
            Elements::I32(v) => v.len(),
            Elements::I64(v) => v.len(),
            Elements::F16(v) => v.len(),
            Elements::BF16(v) => v.len(),
            Elements::F32(v) => v.len(),
            Elements::F64(v) => v.len(),
        }
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of the elements at `places`, as they lie in memory.
    pub fn bytes(&self, places: std::ops::Range<usize>) -> &[u8] {
        match self {
            Elements::Bool(v) | Elements::U8(v) => &v[places],
            Elements::I8(v) => bytemuck::cast_slice(&v[places]),
            Elements::I16(v) => bytemuck::cast_slice(&v[places]),
            Elements::I32(v) => bytemuck::cast_slice(&v[places]),
            Elements::I64(v) => bytemuck::cast_slice(&v[places]),
            Elements::F16(v) => bytemuck::cast_slice(&v[places]),
            Elements::BF16(v) => bytemuck::cast_slice(&v[places]),
            Elements::F32(v) => bytemuck::cast_slice(&v[places]),
            Elements::F64(v) => bytemuck::cast_slice(&v[places]),
        }
    }

    /// The element at place `at` in memory as mods read it; zero past the end.
    pub fn get(&self, at: usize) -> ScalarValue {
        use ScalarValue::{Bool, F32, I32};
        match self {
            Elements::Bool(v) => Bool(v.get(at).is_some_and(|&x| x != 0)),
            Elements::U8(v) => I32(v.get(at).map_or(0, |&x| x.into())),
            Elements::I8(v) => I32(v.get(at).map_or(0, |&x| x.into())),
            Elements::I16(v) => I32(v.get(at).map_or(0, |&x| x.into())),
            Elements::I32(v) => I32(v.get(at).map_or(0, |&x| x)),
            Elements::I64(v) => I32(v.get(at).map_or(0, |&x| x as i32)),
            Elements::F16(v) => F32(v.get(at).map_or(0.0, |x| x.to_f32())),
            Elements::BF16(v) => F32(v.get(at).map_or(0.0, |x| x.to_f32())),
            Elements::F32(v) => F32(v.get(at).map_or(0.0, |&x| x)),
            Elements::F64(v) => F32(v.get(at).map_or(0.0, |&x| x as f32)),
        }
    }

    /// The element at place `at` in memory when it is an integer that no i32 holds.
    pub fn too_wide(&self, at: usize) -> Option<i64> {
        let Elements::I64(v) = self else { return None };
        v.get(at).copied().filter(|&x| i32::try_from(x).is_err())
    }
}

/// The elements of a captured buffer, and where each of them lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed<'a> {
    /// What mods read.
    pub ty: Type,
    pub shape: &'a [usize],
    /// Distance of neighbours along each axis, in elements.
    pub strides: &'a [usize],
    /// Place of the element of index 0.
    pub offset: usize,
    /// None where they are not in host memory.
    pub elements: Elements<'a>,
}

/// Places in memory of the elements of a shape, row-major.
pub(crate) struct RowMajor<'a> {
    shape: &'a [usize],
    strides: &'a [usize],
    index: Vec<usize>,
    at: usize,
    left: usize,
}

impl<'a> RowMajor<'a> {
    pub(crate) fn new(shape: &'a [usize], strides: &'a [usize], offset: usize) -> Self {
        Self::starting(shape, strides, offset, vec![0; shape.len()])
    }

    /// Those from that of `index` on, which is in the shape unless that is empty.
    pub(crate) fn starting(
        shape: &'a [usize],
        strides: &'a [usize],
        offset: usize,
        index: Vec<usize>,
    ) -> Self {
        let before = index.iter().zip(shape).fold(0, |n, (i, len)| n * len + i);
        let at = index.iter().zip(strides).fold(offset, |at, (i, stride)| at + i * stride);
        Self { shape, strides, index, at, left: shape.iter().product::<usize>() - before }
    }
}

impl Iterator for RowMajor<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        let at = self.at;
        for axis in (0..self.shape.len()).rev() {
            self.index[axis] += 1;
            self.at += self.strides[axis];
            if self.index[axis] < self.shape[axis] {
                break;
            }
            self.at -= self.index[axis] * self.strides[axis];
            self.index[axis] = 0;
        }
        Some(at)
    }
}
