//! The element types of tensors, as Rust types.

use half::{bf16, f16};

use crate::dtype::{DType, Data};
use crate::f8::F8E4M3;
use crate::round;
use crate::slice::{Slice, SliceMut};

/// A Rust type that tensors hold: `f32`, `f16`, `bf16`, [`F8E4M3`] or `f64`. No other type implements it.
pub trait Float: Copy + Send + Sync + sealed::Sealed + 'static {
    /// Its dtype.
    const DTYPE: DType;

    /// `value`, rounded once.
    fn from_f64(value: f64) -> Self;

    /// The elements of `slice`, when they are of this type.
    fn of(slice: Slice<'_>) -> Option<&[Self]>;

    /// The elements of `slice`, when they are of this type.
    fn of_mut(slice: SliceMut<'_>) -> Option<&mut [Self]>;

    /// The vector inside `data`, when its elements are of this type; otherwise `data` as it was.
    ///
    /// # Errors
    /// `data` itself.
    fn from_data(data: Data) -> Result<Vec<Self>, Data>;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! floats {
    ($($t:ty, $variant:ident, $from_f64:expr;)*) => {$(
        impl sealed::Sealed for $t {}

        impl Float for $t {
            const DTYPE: DType = DType::$variant;

            fn from_f64(value: f64) -> Self {
                $from_f64(value)
            }

            fn of(slice: Slice<'_>) -> Option<&[Self]> {
                if let Slice::$variant(v) = slice { Some(v) } else { None }
            }

            fn of_mut(slice: SliceMut<'_>) -> Option<&mut [Self]> {
                if let SliceMut::$variant(v) = slice { Some(v) } else { None }
            }

            fn from_data(data: Data) -> Result<Vec<Self>, Data> {
                if let Data::$variant(v) = data { Ok(v) } else { Err(data) }
            }
        }

        impl From<Vec<$t>> for Data {
            fn from(elems: Vec<$t>) -> Self {
                Data::$variant(elems)
            }
        }

        impl<'a> From<&'a [$t]> for Slice<'a> {
            fn from(elems: &'a [$t]) -> Self {
                Slice::$variant(elems)
            }
        }

        impl<'a> From<&'a Vec<$t>> for Slice<'a> {
            fn from(elems: &'a Vec<$t>) -> Self {
                Slice::$variant(elems)
            }
        }

        impl<'a, const LEN: usize> From<&'a [$t; LEN]> for Slice<'a> {
            fn from(elems: &'a [$t; LEN]) -> Self {
                Slice::$variant(elems)
            }
        }

        impl<'a> From<&'a mut [$t]> for SliceMut<'a> {
            fn from(elems: &'a mut [$t]) -> Self {
                SliceMut::$variant(elems)
            }
        }

        impl<'a, const LEN: usize> From<&'a mut [$t; LEN]> for SliceMut<'a> {
            fn from(elems: &'a mut [$t; LEN]) -> Self {
                SliceMut::$variant(elems)
            }
        }

        impl<'a> From<&'a mut Vec<$t>> for SliceMut<'a> {
            fn from(elems: &'a mut Vec<$t>) -> Self {
                SliceMut::$variant(elems)
            }
        }
    )*};
}

floats! {
    f32, F32, |v| v as f32;
    f16, F16, round::to_f16;
    bf16, BF16, round::to_bf16;
    F8E4M3, F8E4M3, F8E4M3::from_f64;
    f64, F64, |v| v;
}
