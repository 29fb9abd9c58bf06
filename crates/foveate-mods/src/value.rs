//! Values of masks and scores: their types, single values, and rows of them.

use std::fmt;

/// Type of a value in a mask or score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Type {
    /// Truth value.
    Bool,
    /// 32-bit signed integer.
    I32,
    /// 32-bit IEEE float.
    F32,
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Type::Bool => "bool",
            Type::I32 => "i32",
            Type::F32 => "f32",
        })
    }
}

/// The value of a run-time scalar or of a constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScalarValue {
    /// Truth value.
    Bool(bool),
    /// Integer.
    I32(i32),
    /// Float.
    F32(f32),
}

impl ScalarValue {
    /// Its type.
    pub fn ty(self) -> Type {
        match self {
            ScalarValue::Bool(_) => Type::Bool,
            ScalarValue::I32(_) => Type::I32,
            ScalarValue::F32(_) => Type::F32,
        }
    }
}

/// The elements of a captured buffer, in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub enum BufferData {
    /// Truth values.
    Bool(Vec<bool>),
    /// Integers.
    I32(Vec<i32>),
    /// Floats; f16 and bf16 are widened when the buffer is made.
    F32(Vec<f32>),
}

impl BufferData {
    /// The type of the elements.
    pub fn ty(&self) -> Type {
        match self {
            BufferData::Bool(_) => Type::Bool,
            BufferData::I32(_) => Type::I32,
            BufferData::F32(_) => Type::F32,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            BufferData::Bool(v) => v.len(),
            BufferData::I32(v) => v.len(),
            BufferData::F32(v) => v.len(),
        }
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Element types of captured buffers, and of values in a mod.
pub trait Element: Copy + Send + Sync + 'static {
    /// The IR type.
    const TYPE: Type;
    /// Wraps elements.
    fn into_data(elems: Vec<Self>) -> BufferData;
}

impl Element for bool {
    const TYPE: Type = Type::Bool;
    fn into_data(elems: Vec<Self>) -> BufferData {
        BufferData::Bool(elems)
    }
}

impl Element for i32 {
    const TYPE: Type = Type::I32;
    fn into_data(elems: Vec<Self>) -> BufferData {
        BufferData::I32(elems)
    }
}

impl Element for f32 {
    const TYPE: Type = Type::F32;
    fn into_data(elems: Vec<Self>) -> BufferData {
        BufferData::F32(elems)
    }
}
