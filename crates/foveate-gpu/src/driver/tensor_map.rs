//! Tensor maps: how the copy engine (TMA) of Hopper and newer GPUs finds tiles of a tensor.
//!
//! A map is 128 bytes that the driver encodes on the host. A kernel takes it by value, as
//! `const __grid_constant__ CUtensorMap` (or any struct of 128 bytes aligned to 64), and gives its
//! address to `cp.async.bulk.tensor`. The driver says of a wrong description only that it is wrong,
//! so everything that it would refuse is checked here first ([`Tiled::check`]), by name.

use std::ffi::c_void;
use std::fmt;

use super::device::Device;
use crate::abi::{Abi, Address};
use crate::error::{GpuError, GpuErrorKind};
use crate::library::Library;
use foveate_tensor::ElementType;

/// A tensor in device memory and the tile that one copy moves. Axes are listed innermost first.
///
/// Elements outside the tensor are not read or written; a copy to shared memory writes
/// [`Self::fill`] in their place, and counts the bytes of the whole tile.
#[derive(Clone, Copy, Debug)]
pub struct Tiled<'a> {
    /// Type of its elements.
    pub element: ElementType,
    /// Address of element 0, a multiple of 16.
    pub address: Address,
    /// Length of each axis in elements, 1 to 5 axes of 1 to 2³² elements.
    pub dims: &'a [u64],
    /// Bytes from one entry of an axis to the next, for each axis but the innermost, whose elements
    /// lie side by side: multiples of 16, more than 0 and less than 2⁴⁰.
    pub strides: &'a [u64],
    /// Elements of the tile along each axis, 1 to 256; the innermost ones fill a multiple of 16
    /// bytes, and at most the span of the swizzle.
    pub tile: &'a [u32],
    /// Of so many elements along each axis one is copied, 1 to 8; 1 copies all.
    pub element_strides: &'a [u32],
    /// How the tile's rows lie in shared memory.
    pub swizzle: Swizzle,
    /// How much L2 fetches at once.
    pub l2_promotion: L2Promotion,
    /// What stands for elements outside the tensor.
    pub fill: Fill,
}

/// How 16-byte parts of a tile's rows change places in shared memory, so that a column of parts
/// meets no bank twice. The name is the span in which they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// They stay.
    None,
    /// Spans of 32 bytes.
    Bytes32,
    /// Spans of 64 bytes.
    Bytes64,
    /// Spans of 128 bytes.
    Bytes128,
}

/// Bytes that L2 fetches at once for a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2Promotion {
    /// Those of the copy.
    None,
    /// 64 bytes.
    Bytes64,
    /// 128 bytes.
    Bytes128,
    /// 256 bytes.
    Bytes256,
}

/// What a copy writes for elements outside the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Zeros.
    Zeros,
    /// NaN, for element types that have it.
    Nan,
}

impl Swizzle {
    /// Bytes of the span, the most that the innermost axis of a tile fills; `None` without one.
    pub(crate) fn span(self) -> Option<u64> {
        match self {
            Self::None => None,
            Self::Bytes32 => Some(32),
            Self::Bytes64 => Some(64),
            Self::Bytes128 => Some(128),
        }
    }
}

/// The number of an element type in `CUtensorMapDataType`.
fn data_type(element: ElementType) -> i32 {
    match element {
        // Of one byte there is the type without sign only; the bytes are the same.
        ElementType::Bool | ElementType::U8 | ElementType::I8 => 0,
        ElementType::I16 => 1,
        ElementType::I32 => 3,
        ElementType::I64 => 5,
        ElementType::F16 => 6,
        ElementType::F32 => 7,
        ElementType::F64 => 8,
        ElementType::BF16 => 9,
    }
}

fn has_nan(element: ElementType) -> bool {
    match element {
        ElementType::Bool
        | ElementType::U8
        | ElementType::I8
        | ElementType::I16
        | ElementType::I32
        | ElementType::I64 => false,
        ElementType::F16 | ElementType::BF16 | ElementType::F32 | ElementType::F64 => true,
    }
}

impl Tiled<'_> {
    /// Checks everything that the driver would refuse.
    ///
    /// # Errors
    /// [`GpuErrorKind::Argument`]: what is wrong, of which axis, and what it must be.
    pub fn check(&self) -> Result<(), GpuError> {
        let wrong = |reason: String| Err(GpuError::argument(format!("tensor map: {reason}")));
        let rank = self.dims.len();
        if !(1..=5).contains(&rank) {
            return wrong(format!("the tensor has {rank} axes; take 1 to 5"));
        }
        for (name, found, needed) in [
            ("strides (the innermost axis has none)", self.strides.len(), rank - 1),
            ("lengths of the tile", self.tile.len(), rank),
            ("element strides", self.element_strides.len(), rank),
        ] {
            if found != needed {
                return wrong(format!("{found} {name} for {rank} axes; give {needed}"));
            }
        }
        if self.address == 0 || !self.address.is_multiple_of(16) {
            return wrong(format!(
                "the tensor starts at {:#x}; it must start at a multiple of 16 bytes",
                self.address
            ));
        }
        for (axis, &len) in self.dims.iter().enumerate() {
            if !(1..=1 << 32).contains(&len) {
                return wrong(format!("axis {axis} has {len} elements; take 1 to 2^32"));
            }
        }
        for (axis, &stride) in (1..).zip(self.strides) {
            if stride == 0 || stride >= 1 << 40 || !stride.is_multiple_of(16) {
                return wrong(format!(
                    "axis {axis} has a stride of {stride} bytes; it must be a multiple of 16 above \
                     0 and below 2^40"
                ));
            }
        }
        for (axis, &len) in self.tile.iter().enumerate() {
            if !(1..=256).contains(&len) {
                return wrong(format!("the tile has {len} elements of axis {axis}; take 1 to 256"));
            }
        }
        for (axis, &step) in self.element_strides.iter().enumerate() {
            if !(1..=8).contains(&step) {
                return wrong(format!("axis {axis} has an element stride of {step}; take 1 to 8"));
            }
        }
        let row = u64::from(self.tile[0]) * self.element.bytes() as u64;
        if !row.is_multiple_of(16) {
            return wrong(format!(
                "a row of the tile is {row} bytes; it must be a multiple of 16: take more elements \
                 of axis 0"
            ));
        }
        if let Some(span) = self.swizzle.span().filter(|&span| row > span) {
            return wrong(format!(
                "a row of the tile is {row} bytes, but the swizzle spans {span}; take fewer \
                 elements of axis 0, or a wider swizzle"
            ));
        }
        if self.fill == Fill::Nan && !has_nan(self.element) {
            return wrong(format!("{} has no NaN to fill with; fill with zeros", self.element));
        }
        Ok(())
    }
}

/// A tensor map as a kernel takes it: `const __grid_constant__ CUtensorMap`.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TensorMap([u64; 16]);

impl TensorMap {
    /// What a kernel is given in place of a map that it does not read.
    pub const UNUSED: Self = Self([0; 16]);

    /// The map of `tiled`, for kernels on `device`.
    ///
    /// # Errors
    /// Those of [`Tiled::check`]; [`GpuErrorKind::Symbol`] when the driver is too old to have maps;
    /// those of the driver.
    pub fn tiled(device: &Device, tiled: &Tiled<'_>) -> Result<Self, GpuError> {
        tiled.check()?;
        let driver = device.current()?;
        let symbol = "cuTensorMapEncodeTiled";
        let encode = driver
            .tensor_map_tiled
            .ok_or(GpuErrorKind::Symbol { library: Library::Driver.name(), symbol })?;
        let mut map = Self([0; 16]);
        // The driver reads a stride more than it uses.
        let mut strides = [0u64; 5];
        strides[..tiled.strides.len()].copy_from_slice(tiled.strides);
        const NOT_INTERLEAVED: i32 = 0;
        // SAFETY: the map has 128 bytes and is aligned; each array has an entry for each axis
        // (`check`), and the driver copies them. It stores the address and reads nothing there.
        let code = unsafe {
            encode(
                (&raw mut map).cast(),
                data_type(tiled.element),
                tiled.dims.len() as u32,
                tiled.address as *mut c_void,
                tiled.dims.as_ptr(),
                strides.as_ptr(),
                tiled.tile.as_ptr(),
                tiled.element_strides.as_ptr(),
                NOT_INTERLEAVED,
                tiled.swizzle as i32,
                tiled.l2_promotion as i32,
                tiled.fill as i32,
            )
        };
        driver.check(code, || {
            let Tiled { element, dims, tile, .. } = tiled;
            format!("encoding a tensor map of {element} {dims:?}, tile {tile:?}")
        })?;
        Ok(map)
    }
}

impl Abi for TensorMap {
    fn put(&self, into: &mut [u8]) {
        for (word, into) in self.0.iter().zip(into.chunks_exact_mut(8)) {
            into.copy_from_slice(&word.to_ne_bytes());
        }
    }
}

impl fmt::Debug for TensorMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TensorMap")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Tiled<'static> = Tiled {
        element: ElementType::BF16,
        address: 0x7000_0000,
        dims: &[128, 1000, 8, 2],
        strides: &[2048, 256, 2_048_000],
        tile: &[64, 128, 1, 1],
        element_strides: &[1; 4],
        swizzle: Swizzle::Bytes128,
        l2_promotion: L2Promotion::Bytes256,
        fill: Fill::Zeros,
    };

    #[test]
    fn a_map_is_128_bytes_aligned_to_64() {
        assert_eq!((size_of::<TensorMap>(), align_of::<TensorMap>()), (128, 64));
        let map = TensorMap(std::array::from_fn(|i| i as u64));
        let expected: Vec<u8> = (0..16u64).flat_map(u64::to_ne_bytes).collect();
        assert_eq!(map.bytes(), expected);
    }

    #[test]
    fn what_the_driver_would_refuse_is_named() {
        GOOD.check().unwrap();
        let said = |tiled: Tiled<'_>| tiled.check().unwrap_err().to_string();
        let refused = [
            (Tiled { dims: &[], ..GOOD }, "the tensor has 0 axes; take 1 to 5"),
            (Tiled { dims: &[1; 6], ..GOOD }, "the tensor has 6 axes; take 1 to 5"),
            (
                Tiled { strides: &[2048, 256], ..GOOD },
                "2 strides (the innermost axis has none) for 4 axes; give 3",
            ),
            (Tiled { tile: &[64], ..GOOD }, "1 lengths of the tile for 4 axes; give 4"),
            (Tiled { element_strides: &[1; 5], ..GOOD }, "5 element strides for 4 axes; give 4"),
            (
                Tiled { address: 0x7000_0008, ..GOOD },
                "the tensor starts at 0x70000008; it must start at a multiple of 16 bytes",
            ),
            (Tiled { dims: &[128, 0, 8, 2], ..GOOD }, "axis 1 has 0 elements; take 1 to 2^32"),
            (
                Tiled { strides: &[2048, 0, 16], ..GOOD },
                "axis 2 has a stride of 0 bytes; it must be a multiple of 16 above 0 and below 2^40",
            ),
            (
                Tiled { strides: &[2048, 256, 1 << 40], ..GOOD },
                "axis 3 has a stride of 1099511627776 bytes; it must be a multiple of 16 above 0 \
                 and below 2^40",
            ),
            (
                Tiled { strides: &[2050, 256, 16], ..GOOD },
                "axis 1 has a stride of 2050 bytes; it must be a multiple of 16 above 0 and below \
                 2^40",
            ),
            (
                Tiled { tile: &[64, 257, 1, 1], ..GOOD },
                "the tile has 257 elements of axis 1; take 1 to 256",
            ),
            (
                Tiled { element_strides: &[1, 9, 1, 1], ..GOOD },
                "axis 1 has an element stride of 9; take 1 to 8",
            ),
            (
                Tiled { tile: &[63, 128, 1, 1], ..GOOD },
                "a row of the tile is 126 bytes; it must be a multiple of 16: take more elements of \
                 axis 0",
            ),
            (
                Tiled { tile: &[72, 128, 1, 1], ..GOOD },
                "a row of the tile is 144 bytes, but the swizzle spans 128; take fewer elements of \
                 axis 0, or a wider swizzle",
            ),
            (
                Tiled { element: ElementType::U8, fill: Fill::Nan, ..GOOD },
                "u8 has no NaN to fill with; fill with zeros",
            ),
        ];
        for (tiled, reason) in refused {
            assert_eq!(said(tiled), format!("tensor map: {reason}"));
        }
        // Rows may be as long as they like without a swizzle.
        Tiled { tile: &[256, 64, 1, 1], swizzle: Swizzle::None, ..GOOD }.check().unwrap();
    }
}
