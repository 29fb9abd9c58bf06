//! Parameters of kernels: values that know their bytes as a kernel reads them.

/// A device address.
pub type Address = u64;

/// A value that a kernel reads: its bytes are those of the value in C.
pub trait Abi: Copy {
    /// Writes the value to the start of `into`, which has room for it.
    fn put(&self, into: &mut [u8]);

    /// The value's bytes.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; size_of::<Self>()];
        self.put(&mut bytes);
        bytes
    }
}

/// The bytes of an array of values.
pub fn array_bytes<T: Abi>(values: &[T]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(values)];
    if size_of::<T>() > 0 {
        for (value, into) in values.iter().zip(bytes.chunks_exact_mut(size_of::<T>())) {
            value.put(into);
        }
    }
    bytes
}

macro_rules! numbers {
    ($($t:ty)*) => {$(
        impl Abi for $t {
            fn put(&self, into: &mut [u8]) {
                into[..size_of::<Self>()].copy_from_slice(&self.to_ne_bytes());
            }
        }
    )*};
}

numbers!(i32 i64 u64 f32);

impl<T: Abi, const N: usize> Abi for [T; N] {
    fn put(&self, into: &mut [u8]) {
        into[..size_of::<Self>()].copy_from_slice(&array_bytes(self));
    }
}

/// Structs that kernels take as parameters, laid out as C lays them out: each implements [`Abi`].
/// Tests of the crate that uses it see their sizes and offsets in `STRUCTS`, to hold them against
/// the declarations in CUDA C++.
#[macro_export]
macro_rules! abi_structs {
    ($($(#[$doc:meta])* pub struct $name:ident {
        $($(#[$field_doc:meta])* pub $field:ident: $t:ty,)*
    })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default, PartialEq)]
            pub struct $name {
                $($(#[$field_doc])* pub $field: $t,)*
            }

            impl $crate::abi::Abi for $name {
                fn put(&self, into: &mut [u8]) {
                    $($crate::abi::Abi::put(&self.$field, &mut into[std::mem::offset_of!(Self, $field)..]);)*
                }
            }
        )*

        /// Size of each struct, and the offset of each of its fields.
        #[cfg(test)]
        const STRUCTS: &[(&str, usize, &[(&str, usize)])] = &[
            $((stringify!($name), size_of::<$name>(), &[
                $((stringify!($field), std::mem::offset_of!($name, $field)),)*
            ]),)*
        ];
    };
}
