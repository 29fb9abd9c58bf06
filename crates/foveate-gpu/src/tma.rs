//! Which operands the copy engine (TMA) loads and stores, and by which tensor map.
//!
//! A map takes rows whose elements lie side by side, a start and strides of multiples of 16 bytes,
//! and no stride of 0 or of 2⁴⁰ bytes. [`OperandMap::of`] finds the map of an operand
//! `[batch, heads, rows, elements]` of any order of axes, or says by a [`MapRefusal`] what the map
//! would need, and whether copies of 4 bytes (`cp.async`) read the operand.
//!
//! A kernel is compiled for a fixed number of coordinates, so the axes of a map follow from
//! [`MapAxes`] and never from the operand:
//!
//! - [`MapAxes::Heads`]: element, row, head, batch;
//! - [`MapAxes::Groups`]: element, row, head in its group, group, batch, for the interleaved heads
//!   of a packed projection;
//! - [`MapAxes::PackedGroups`]: element, head in its group, row, group, batch, so that a tile holds
//!   all query heads of a key/value head and row `r` of the tile is query `r / heads`, head
//!   `r % heads`.
//!
//! An axis of length 1 stays, with a stride that a map takes. An axis of stride 0, whose entries are
//! one, gets length 1 too, and the kernel multiplies its coordinate by the map's
//! [`step`](OperandMap::steps) of that axis, which is 0. A tile is as many elements wide as the
//! swizzle spans: a row longer than that is several tiles (*panels*), and what a tile has past the
//! last element or row of the operand arrives as zeros, is not stored, and counts in
//! [`OperandMap::tile_bytes`], the bytes that an mbarrier expects.

use std::fmt;

use foveate_tensor::{GroupedAxis, Layout};

use crate::abi::Address;
use crate::driver::{Device, Fill, L2Promotion, Swizzle, TensorMap, Tiled};
use crate::error::{GpuError, GpuErrorKind};
use crate::tensor::DeviceTensor;
use foveate_tensor::ElementType;

/// The axes of a map, innermost first, which are a kernel's coordinates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MapAxes {
    /// 4: element, row, head, batch.
    Heads,
    /// 5: element, row, head in its group, group, batch.
    Groups {
        /// Heads of a group.
        heads: usize,
    },
    /// 5: element, head in its group, row, group, batch; a tile has all heads of a group.
    PackedGroups {
        /// Heads of a group.
        heads: usize,
    },
}

/// The tile that one copy moves: `rows` of one head, or of each head of a group
/// ([`MapAxes::PackedGroups`]), as many elements of each as the swizzle spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapTile {
    /// The map's axes.
    pub axes: MapAxes,
    /// Rows, 1 to 256.
    pub rows: u32,
    /// How the rows lie in shared memory; not [`Swizzle::None`].
    pub swizzle: Swizzle,
}

/// The map of an operand, as numbers: two operands of equal maps have equal [`TensorMap`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperandMap {
    axes: MapAxes,
    element: ElementType,
    address: Address,
    rank: usize,
    dims: [u64; 5],
    /// Bytes from one entry of an axis to the next; the first is that of elements.
    strides: [u64; 5],
    tile: [u32; 5],
    /// What a kernel multiplies its coordinate of each axis by: 1, and 0 for an axis of stride 0.
    pub steps: [u32; 5],
    swizzle: Swizzle,
}

/// An axis of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperandAxis {
    /// The batch.
    Batch,
    /// Heads.
    Head,
    /// Rows: positions of a sequence.
    Row,
    /// Elements of a row.
    Element,
}

/// Why an operand has no map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapRefusal {
    /// Elements of a row are apart.
    Apart {
        /// The operand.
        name: String,
    },
    /// The start or a stride is no multiple of 16 bytes.
    Alignment {
        /// The operand.
        name: String,
        /// Bytes that all are multiples of.
        bytes: usize,
    },
    /// An axis of the tile has stride 0, or any axis one of 2⁴⁰ bytes or more.
    Stride {
        /// The operand.
        name: String,
        /// The axis.
        axis: OperandAxis,
        /// The stride in bytes.
        bytes: u64,
    },
    /// An axis is longer than 2³².
    Length {
        /// The operand.
        name: String,
        /// The axis.
        axis: OperandAxis,
        /// Its length.
        len: u64,
    },
    /// Heads come in groups that the map's axes do not have.
    Groups {
        /// The operand.
        name: String,
        /// What the groups are, and what the map has.
        reason: String,
    },
}

impl MapRefusal {
    /// Whether `cp.async` can load the operand, which needs elements side by side and 4 bytes of
    /// alignment.
    pub fn by_copies(&self) -> bool {
        match self {
            Self::Apart { .. } => false,
            Self::Alignment { bytes, .. } => *bytes >= COPY_BYTES,
            Self::Stride { .. } | Self::Length { .. } | Self::Groups { .. } => true,
        }
    }
}

impl fmt::Display for OperandAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Batch => "batch",
            Self::Head => "head",
            Self::Row => "row",
            Self::Element => "element",
        })
    }
}

impl fmt::Display for MapRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Apart { name } => {
                write!(f, "elements of {name} are apart; loads need them side by side")
            }
            Self::Alignment { name, bytes } if *bytes >= COPY_BYTES => {
                write!(f, "rows of {name} are aligned to {bytes} B; a tensor map needs {ALIGN}")
            }
            Self::Alignment { name, bytes } => {
                write!(f, "rows of {name} are aligned to {bytes} B; loads need {COPY_BYTES}")
            }
            Self::Stride { name, axis, bytes: 0 } => {
                write!(f, "{name} has {axis} stride 0, which no tensor map has")
            }
            Self::Stride { name, axis, bytes } => {
                write!(f, "{name} has a {axis} stride of {bytes} B; a tensor map's are below 2^40")
            }
            Self::Length { name, axis, len } => {
                write!(f, "{name} has {len} entries of its {axis} axis; a tensor map has 2^32")
            }
            Self::Groups { name, reason } => write!(f, "{name} has {reason}"),
        }
    }
}

/// Bytes that the start and the strides of a map are multiples of.
const ALIGN: usize = 16;
/// Bytes of the smallest `cp.async`.
const COPY_BYTES: usize = 4;

/// Entries of an axis, and elements from one to the next.
type Axis = (usize, usize);

impl OperandMap {
    /// The map by which a kernel moves tiles of `tensor`, which errors call `name`.
    ///
    /// An empty operand has a map of one element that no copy must use.
    ///
    /// # Errors
    /// What a map would need. Alignment comes first: what it says of copies is of the whole operand.
    pub fn of(name: &str, tensor: &DeviceTensor, tile: &MapTile) -> Result<Self, MapRefusal> {
        let name = || name.to_owned();
        let layout = &tensor.layout;
        match tensor.row_align() {
            0 => return Err(MapRefusal::Apart { name: name() }),
            ALIGN => {}
            bytes => return Err(MapRefusal::Alignment { name: name(), bytes }),
        }
        let heads = head_axes(layout, tile.axes)
            .map_err(|reason| MapRefusal::Groups { name: name(), reason })?;
        let [batch, _, rows, elems] = layout.shape;
        let batch = (OperandAxis::Batch, (batch, layout.strides[0]), 1);
        let row = (OperandAxis::Row, (rows, layout.strides[2]), tile.rows);
        let head = |axis, len| (OperandAxis::Head, axis, len);
        let axes = match tile.axes {
            MapAxes::Heads => vec![row, head(heads[0], 1), batch],
            MapAxes::Groups { .. } => vec![row, head(heads[0], 1), head(heads[1], 1), batch],
            MapAxes::PackedGroups { heads: in_tile } => {
                vec![head(heads[0], in_tile as u32), row, head(heads[1], 1), batch]
            }
        };
        let bytes = tensor.dtype.bytes() as u64;
        let mut map = Self {
            axes: tile.axes,
            element: tensor.dtype.into(),
            address: tensor.address + layout.at([0; 4]) as u64 * bytes,
            rank: 1,
            dims: [elems as u64, 1, 1, 1, 1],
            strides: [bytes, ALIGN as u64, ALIGN as u64, ALIGN as u64, ALIGN as u64],
            tile: [tile.swizzle.span().unwrap_or(ALIGN as u64) as u32 / bytes as u32, 1, 1, 1, 1],
            steps: [1; 5],
            swizzle: tile.swizzle,
        };
        for (axis, (len, stride), in_tile) in axes {
            let (at, len, stride) = (map.rank, len as u64, (stride as u64).saturating_mul(bytes));
            map.rank += 1;
            map.tile[at] = in_tile;
            if len > 1 && stride == 0 && in_tile == 1 {
                map.steps[at] = 0;
            } else if len > 1 && (stride == 0 || stride >= 1 << 40) {
                return Err(MapRefusal::Stride { name: name(), axis, bytes: stride });
            } else if len > 1 << 32 {
                return Err(MapRefusal::Length { name: name(), axis, len });
            } else if len > 1 {
                (map.dims[at], map.strides[at]) = (len, stride);
            }
        }
        if layout.elems() == 0 {
            (map.dims, map.address) = ([1; 5], ALIGN as u64);
        }
        Ok(map)
    }

    /// Bytes of a tile, which is what one copy adds to an mbarrier, whole also where the tile
    /// reaches past the operand.
    pub fn tile_bytes(&self) -> u32 {
        self.tile.iter().product::<u32>() * self.element.bytes() as u32
    }

    /// The map, as the driver takes it.
    pub fn tiled(&self) -> Tiled<'_> {
        Tiled {
            element: self.element,
            address: self.address,
            dims: &self.dims[..self.rank],
            strides: &self.strides[1..self.rank],
            tile: &self.tile[..self.rank],
            element_strides: &[1; 5][..self.rank],
            swizzle: self.swizzle,
            l2_promotion: L2Promotion::Bytes256,
            fill: Fill::Zeros,
        }
    }

    /// The map as kernels on `device` take it; errors call the operand `name`.
    ///
    /// # Errors
    /// Those of [`TensorMap::tiled`]. A driver that refuses the map does not say why, so that the
    /// error has all numbers, axis by axis.
    pub fn encode(&self, name: &str, device: &Device) -> Result<TensorMap, GpuError> {
        TensorMap::tiled(device, &self.tiled()).map_err(|error| match error.kind() {
            GpuErrorKind::Driver { code, says, .. } => {
                let (doing, says) =
                    (format!("encoding a tensor map of {name}, {self}"), says.clone());
                GpuErrorKind::Driver { doing, code: *code, says }.into()
            }
            _ => error,
        })
    }
}

impl fmt::Display for OperandMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {:#x}", self.element, self.address)?;
        for (axis, name) in self.axes.names().iter().enumerate() {
            let [len, bytes] = [self.dims[axis], self.strides[axis]];
            write!(f, "; {name} axis: {len} every {bytes} B, {} in a tile", self.tile[axis])?;
        }
        Ok(())
    }
}

impl MapAxes {
    /// What the axes are, innermost first.
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Heads => &["element", "row", "head", "batch"],
            Self::Groups { .. } => &["element", "row", "head", "group", "batch"],
            Self::PackedGroups { .. } => &["element", "head", "row", "group", "batch"],
        }
    }
}

/// The two axes of a map that the heads of `layout` are on, or what they are instead. The second has
/// length 1 where the map has one.
fn head_axes(layout: &Layout, axes: MapAxes) -> Result<[Axis; 2], String> {
    let (heads, stride) = (layout.shape[1], layout.strides[1]);
    // The distance of heads and, where they come in groups, how many and how far apart.
    let (stride, groups) = match layout.groups {
        None => (stride, None),
        Some(GroupedAxis { axis: 1, inner, outer, first }) => match first % inner {
            _ if inner == 1 => (outer, None),
            _ if outer == inner * stride => (stride, None),
            entry if entry + heads <= inner => (stride, None),
            0 if heads.is_multiple_of(inner) => (stride, Some((inner, outer))),
            entry => {
                return Err(format!("{heads} heads, from head {entry} of a group of {inner} on"));
            }
        },
        Some(GroupedAxis { axis, inner, .. }) => {
            return Err(format!("groups of {inner} on axis {axis}"));
        }
    };
    match (axes, groups) {
        (MapAxes::Heads, None) => Ok([(heads, stride), (1, 0)]),
        (MapAxes::Heads, Some((inner, _))) => {
            Err(format!("groups of {inner} heads; this kernel's maps have no groups"))
        }
        (MapAxes::Groups { heads: n } | MapAxes::PackedGroups { heads: n }, None) => {
            match heads.is_multiple_of(n) {
                true => Ok([(n, stride), (heads / n, n * stride)]),
                false => Err(format!("{heads} heads; this kernel's maps have groups of {n}")),
            }
        }
        (
            MapAxes::Groups { heads: n } | MapAxes::PackedGroups { heads: n },
            Some((inner, outer)),
        ) => match inner == n {
            true => Ok([(n, stride), (heads / n, outer)]),
            false => Err(format!("groups of {inner} heads; this kernel's maps have those of {n}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use foveate_tensor::{DType, indices};
    use proptest::prelude::*;

    use super::*;

    const BASE: Address = 0x7000_0000;

    fn bf16(layout: Layout) -> DeviceTensor {
        DeviceTensor { address: BASE, dtype: DType::BF16, layout }
    }

    fn tile(axes: MapAxes) -> MapTile {
        MapTile { axes, rows: 64, swizzle: Swizzle::Bytes128 }
    }

    /// The coordinates that a kernel gives for an element of its operand, `[batch, head, row, element]`.
    fn coordinates(axes: MapAxes, [b, h, r, e]: [usize; 4]) -> Vec<usize> {
        match axes {
            MapAxes::Heads => vec![e, r, h, b],
            MapAxes::Groups { heads } => vec![e, r, h % heads, h / heads, b],
            MapAxes::PackedGroups { heads } => vec![e, h % heads, r, h / heads, b],
        }
    }

    /// Every element of the operand is inside the map, at its own address.
    fn check_elements(tensor: &DeviceTensor, axes: MapAxes, map: &OperandMap) {
        map.tiled().check().unwrap();
        let Tiled { dims, strides, .. } = map.tiled();
        for index in indices(tensor.layout.shape) {
            let mut address = map.address;
            for (axis, at) in coordinates(axes, index).into_iter().enumerate() {
                let at = at as u64 * u64::from(map.steps[axis]);
                assert!(at < dims[axis], "{index:?} of {tensor} is outside axis {axis} of {map:?}");
                address += at * if axis == 0 { 2 } else { strides[axis - 1] };
            }
            let expected = tensor.address + 2 * tensor.layout.at(index) as u64;
            assert_eq!(address, expected, "{index:?} of {tensor} by {map:?}");
        }
    }

    /// Axes in any order, each cut from a longer one, lengths and cuts in half rows of 16 bytes; an
    /// axis may have stride 0, heads may come in groups, and now and then an odd element slips in.
    fn any_operand() -> impl Strategy<Value = DeviceTensor> {
        let order = Just([0usize, 1, 2]).prop_shuffle();
        let lens = [1..4usize, 1..7, 1..5, 1..20];
        let slips = prop::array::uniform4(prop_oneof![6 => Just(0usize), 1 => 1..9usize]);
        let zero = prop_oneof![3 => Just(None), 1 => (0..3usize).prop_map(Some)];
        let groups = prop_oneof![Just(None), (1..4usize, 0..4usize, 0..5usize).prop_map(Some)];
        (order, lens, slips, zero, groups).prop_map(|(order, shape, slips, zero, groups)| {
            let mut step = shape[3].next_multiple_of(8) + slips[3];
            let mut strides = [step, step, step, 1];
            let mut outer = 0;
            for axis in order {
                (strides[axis], step) = (step, step * (shape[axis] + 1) + slips[axis]);
                if let (1, Some((inner, gap, _))) = (axis, groups) {
                    outer = inner * strides[1] + 8 * gap;
                    step = outer * (shape[1] + 8);
                }
            }
            zero.into_iter().for_each(|axis| strides[axis] = 0);
            let groups =
                groups.map(|(inner, _, first)| GroupedAxis { axis: 1, inner, outer, first });
            bf16(Layout { groups, ..Layout::strided(shape, strides, 8 * slips[0]) })
        })
    }

    proptest! {
        #[test]
        fn a_map_has_every_element_of_its_operand_and_a_refusal_its_reason(
            tensor in any_operand(),
            axes in prop_oneof![
                Just(MapAxes::Heads),
                (1..4usize).prop_map(|heads| MapAxes::Groups { heads }),
                (1..4usize).prop_map(|heads| MapAxes::PackedGroups { heads }),
            ],
        ) {
            let layout = &tensor.layout;
            match OperandMap::of("k", &tensor, &tile(axes)) {
                Ok(map) => check_elements(&tensor, axes, &map),
                Err(MapRefusal::Alignment { bytes, .. }) => {
                    let rows = indices(layout.shape).filter(|index| index[3] == 0);
                    let bits = rows.fold(16, |bits, index| bits | (2 * layout.at(index)));
                    let aligned = 1 << bits.trailing_zeros();
                    prop_assert!(bytes < 16 && bytes <= aligned);
                    prop_assert!(bytes == aligned || layout.groups.is_some());
                }
                Err(MapRefusal::Stride { axis, bytes, .. }) => {
                    prop_assert_eq!(bytes, 0);
                    match axis {
                        OperandAxis::Row => prop_assert!(layout.strides[2] == 0),
                        OperandAxis::Head => {
                            prop_assert!(layout.strides[1] == 0 || layout.groups.is_some());
                            let packed = matches!(axes, MapAxes::PackedGroups { .. });
                            prop_assert!(packed);
                        }
                        OperandAxis::Batch | OperandAxis::Element => prop_assert!(false, "{axis}"),
                    }
                }
                Err(MapRefusal::Groups { .. }) => {
                    prop_assert!(axes != MapAxes::Heads || layout.groups.is_some());
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }

    #[test]
    fn axes_stand_in_the_kernels_order_whatever_the_operands_is() {
        let map =
            |layout: Layout| OperandMap::of("q", &bf16(layout), &tile(MapAxes::Heads)).unwrap();
        let bshd = map(Layout::bshd(2, 1000, 8, 96));
        assert_eq!(bshd.tiled().dims, [96, 1000, 8, 2]);
        assert_eq!(bshd.tiled().strides, [2 * 8 * 96, 2 * 96, 2 * 8000 * 96]);
        assert_eq!((bshd.tiled().tile, bshd.tile_bytes()), (&[64, 64, 1, 1][..], 64 * 128));
        assert_eq!(
            map(Layout::sbhd(1000, 2, 8, 96)).tiled().strides,
            [2 * 16 * 96, 2 * 96, 2 * 768]
        );
        assert_eq!(map(Layout::thd(77, 8, 64)).tiled().dims, [64, 77, 8, 1]);
        // Lengths of 1 have strides that nobody reads; an empty operand has no element.
        let single = Layout::strided([1, 1, 1, 40], [7, 7, 7, 1], 0);
        assert_eq!(map(single).tiled().strides, [16; 3]);
        assert_eq!(map(Layout::bshd(2, 0, 8, 64)).tiled().dims, [1; 4]);
        map(Layout::bshd(2, 0, 8, 64)).tiled().check().unwrap();
        let wide = MapTile { axes: MapAxes::Heads, rows: 64, swizzle: Swizzle::Bytes64 };
        let halves = OperandMap::of("q", &bf16(Layout::bshd(1, 64, 1, 96)), &wide).unwrap();
        assert_eq!(halves.tiled().tile, [32, 64, 1, 1]);
    }

    #[test]
    fn an_axis_of_stride_0_is_left_out_and_its_coordinate_is_0() {
        let shared = Layout::strided([3, 4, 50, 64], [0, 0, 64, 1], 0);
        let map = OperandMap::of("k", &bf16(shared), &tile(MapAxes::Heads)).unwrap();
        assert_eq!((map.tiled().dims, map.steps), (&[64, 50, 1, 1][..], [1, 1, 0, 0, 1]));
        check_elements(&bf16(shared), MapAxes::Heads, &map);
    }

    #[test]
    fn interleaved_heads_are_an_axis_of_heads_and_one_of_groups() {
        let q = Layout {
            groups: Some(GroupedAxis { axis: 1, inner: 3, outer: 5 * 64, first: 0 }),
            ..Layout::strided([2, 6, 9, 64], [9 * 640, 64, 640, 1], 0)
        };
        let of = |axes| OperandMap::of("q", &bf16(q), &tile(axes));
        let groups = of(MapAxes::Groups { heads: 3 }).unwrap();
        assert_eq!(groups.tiled().dims, [64, 9, 3, 2, 2]);
        let packed = of(MapAxes::PackedGroups { heads: 3 }).unwrap();
        assert_eq!(packed.tiled().dims, [64, 3, 9, 2, 2]);
        assert_eq!(packed.tiled().tile, [64, 3, 64, 1, 1]);
        let said = |axes| of(axes).unwrap_err().to_string();
        assert_eq!(
            said(MapAxes::Heads),
            "q has groups of 3 heads; this kernel's maps have no groups"
        );
        let whole = Layout { shape: [2, 3, 9, 64], ..q };
        OperandMap::of("q", &bf16(whole), &tile(MapAxes::Heads)).expect("one group is even");
    }

    #[test]
    fn a_refusal_has_its_numbers_and_says_whether_copies_do() {
        let said = |tensor: DeviceTensor| {
            let refusal = OperandMap::of("v", &tensor, &tile(MapAxes::Heads)).unwrap_err();
            (refusal.to_string(), refusal.by_copies())
        };
        let dense = |dim| bf16(Layout::bshd(2, 5, 3, dim));
        let at = |address| DeviceTensor { address, ..dense(64) };
        let strides = |strides| bf16(Layout::strided([2, 3, 5, 64], strides, 0));
        for (tensor, expected, copies) in [
            (dense(65), "rows of v are aligned to 2 B; loads need 4", false),
            (dense(66), "rows of v are aligned to 4 B; a tensor map needs 16", true),
            (at(BASE + 8), "rows of v are aligned to 8 B; a tensor map needs 16", true),
            (at(BASE + 2), "rows of v are aligned to 2 B; loads need 4", false),
            (
                strides([960, 320, 64, 3]),
                "elements of v are apart; loads need them side by side",
                false,
            ),
            (strides([960, 320, 0, 1]), "v has row stride 0, which no tensor map has", true),
            (
                strides([1 << 39, 320, 64, 1]),
                "v has a batch stride of 1099511627776 B; a tensor map's are below 2^40",
                true,
            ),
        ] {
            assert_eq!(said(tensor), (expected.to_owned(), copies));
        }
    }
}
