//! Loads by each kind of tensor map that the engine makes, and what they fill with zeros.

use std::sync::Arc;

use foveate_cuda::compile::config::{Elem, Kernel};
use foveate_gpu::cubin::Opcode;
use foveate_gpu::driver::Swizzle;
use foveate_gpu::tma::{MapAxes, MapTile};
use foveate_tensor::random::mix;
use foveate_tensor::{DType, GroupedAxis, Layout};

use super::layouts::{self, SWIZZLE_64, SWIZZLE_128};
use super::products::config;
use super::{Mapped, Numbers, Probe, source};

const TEXT: &str = include_str!("loads.cu");
/// Boxes of a kernel at most, and the bytes of smem that they land in.
const MOST_BOXES: usize = 16;
const LANDING: usize = 40 << 10;
const SHARED: usize = LANDING + 1024;

/// A box: where it lands, and its first element of the operand.
#[derive(Clone, Copy, Debug)]
struct Place {
    target: usize,
    batch: usize,
    head: usize,
    row: usize,
    column: usize,
}

/// A tensor, a box, and the loads of it.
struct Load {
    what: &'static str,
    dtype: DType,
    layout: Layout,
    axes: MapAxes,
    rows: usize,
    swizzle: Swizzle,
    places: Vec<Place>,
}

impl Load {
    /// Of boxes of whole panels of bf16.
    fn new(what: &'static str, layout: Layout, axes: MapAxes, rows: usize, at: [usize; 3]) -> Self {
        Self::of_panels(what, (DType::BF16, layout), axes, Swizzle::Bytes128, rows, at)
    }

    /// Of e4m3, from the first row of the second head.
    fn of_e4m3(what: &'static str, layout: Layout, swizzle: Swizzle, rows: usize) -> Self {
        let at = [layout.shape[0] - 1, 1, 0];
        Self::of_panels(what, (DType::F8E4M3, layout), MapAxes::Heads, swizzle, rows, at)
    }

    /// Of a tile of one head, panel by panel.
    fn of_panels(
        what: &'static str,
        (dtype, layout): (DType, Layout),
        axes: MapAxes,
        swizzle: Swizzle,
        rows: usize,
        [batch, head, row]: [usize; 3],
    ) -> Self {
        let span = model(swizzle).span;
        let columns = span / dtype.bytes();
        let panel = |i| Place { target: i * rows * span, batch, head, row, column: i * columns };
        let places = (0..layout.shape[3].div_ceil(columns)).map(panel).collect();
        Self { what, dtype, layout, axes, rows, swizzle, places }
    }

    fn mapped(&self) -> Mapped {
        let Self { dtype, layout, axes, rows, swizzle, .. } = *self;
        let elems = layout.end().expect("a small tensor");
        let bytes = match dtype.bytes() {
            // All differ.
            2 => (0..elems).flat_map(|i| (i as u16 + 1).to_le_bytes()).collect(),
            _ => (0..elems).map(|i| mix(i as u64) as u8).collect(),
        };
        Mapped { dtype, layout, tile: MapTile { axes, rows: rows as u32, swizzle }, bytes }
    }

    /// What smem holds afterwards.
    fn landed(&self, mapped: &Mapped) -> Vec<u8> {
        let swizzle = self.model();
        let (bytes, [.., rows, columns]) = (self.dtype.bytes(), self.layout.shape);
        let mut smem = vec![0xff; LANDING];
        for place in &self.places {
            for (row, column) in
                (0..self.rows).flat_map(|row| (0..swizzle.span / bytes).map(move |c| (row, c)))
            {
                let index = [place.batch, place.head, place.row + row, place.column + column];
                let at = swizzle.copied_byte(place.target, self.rows, row, column * bytes);
                let inside = index[2] < rows && index[3] < columns;
                let from = inside.then(|| self.layout.at(index) * bytes);
                let element =
                    from.map_or(&[0, 0][..bytes], |from| &mapped.bytes[from..from + bytes]);
                smem[at..at + bytes].copy_from_slice(element);
            }
        }
        smem
    }

    fn model(&self) -> layouts::Swizzle {
        model(self.swizzle)
    }

    fn probe(&self, text: &Arc<str>) -> Probe {
        let mapped = self.mapped();
        // Coordinates depend on the layout alone.
        let map = mapped.at(1 << 20).expect("a layout that a map takes");
        let steps = map.steps.map(|step| step as usize);
        let count = self.places.len();
        assert!(count <= MOST_BOXES, "{}: {count} boxes", self.what);
        let mut input = vec![count, count * map.tile_bytes() as usize];
        for Place { target, batch, head, row, column } in &self.places {
            input.extend([*target, *column, *row]);
            input.extend(match self.axes {
                MapAxes::Groups { heads } => {
                    [head % heads * steps[2], head / heads * steps[3], batch * steps[4]]
                }
                MapAxes::Heads | MapAxes::PackedGroups { .. } => {
                    [head * steps[2], batch * steps[3], 0]
                }
            });
        }
        input.resize(2 + 6 * MOST_BOXES, 0);
        let entry = if self.axes == MapAxes::Heads { "heads" } else { "groups" };
        let words = self.landed(&mapped);
        let words = words.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("four")));
        let (rows, span) = (self.rows, self.model().span);
        let place = move |i: usize| {
            let (boxed, byte) = (4 * i / (rows * span), 4 * i % (rows * span));
            format!(
                "box {boxed} of {rows} rows, row {}, byte {} as it lies",
                byte / span,
                byte % span
            )
        };
        Probe {
            mapped: Some(mapped),
            input: input.iter().flat_map(|&x| (x as i32).to_le_bytes()).collect(),
            expected: Numbers::Words(words.collect()),
            place: Box::new(place),
            instructions: vec![(Opcode::Utmaldg, 1), (Opcode::SyncsPhasechk, 1)],
            ..Probe::new(format!("TMA, {}", self.what), text, entry, SHARED)
        }
    }
}

fn model(swizzle: Swizzle) -> layouts::Swizzle {
    if swizzle == Swizzle::Bytes64 { SWIZZLE_64 } else { SWIZZLE_128 }
}

/// Heads of a group of a packed projection, groups, and elements of a head.
const GROUP: usize = 3;
const GROUPS: usize = 2;
const DIM: usize = 64;

/// `heads` heads of each group, from `first` on, of a projection whose groups have the query heads, K and V.
fn projection(batch: usize, rows: usize, first: usize, heads: usize) -> Layout {
    let (each, of_row) = ((GROUP + 2) * DIM, GROUPS * (GROUP + 2) * DIM);
    let plain = heads == 1;
    let strides = [rows * of_row, if plain { each } else { DIM }, of_row, 1];
    let layout = Layout::strided([batch, GROUPS * heads, rows, DIM], strides, first * DIM);
    let groups = GroupedAxis { axis: 1, inner: heads, outer: each, first: 0 };
    Layout { groups: (!plain).then_some(groups), ..layout }
}

fn of_sixteen_bits() -> Vec<Load> {
    let heads = MapAxes::Heads;
    let shared = |axis| {
        let shape = if axis == 0 { [1, 3, 50, 96] } else { [2, 1, 50, 96] };
        let expanded = Layout::contiguous(shape).expanded(axis, 4);
        expanded.expect("an axis of one entry")
    };
    let of_one = MapAxes::Groups { heads: 1 };
    let rows_past = "rows past the end, 80 elements";
    let mut all = vec![
        Load::new(rows_past, Layout::bhsd(2, 3, 70, 80), heads, 64, [1, 2, 16]),
        Load::new("rows of interleaved heads", Layout::bshd(2, 40, 3, 128), heads, 80, [1, 1, 8]),
        Load::new("batch inside of rows", Layout::sbhd(40, 2, 3, 96), heads, 48, [1, 2, 0]),
        Load::new(
            "192 elements, rows past the end",
            Layout::bhsd(1, 2, 33, 192),
            heads,
            64,
            [0, 1, 0],
        ),
        Load::new(
            "queries of a packed projection",
            projection(2, 26, 0, GROUP),
            MapAxes::Groups { heads: GROUP },
            64,
            [1, 4, 5],
        ),
        Load::new("keys of a packed projection", projection(2, 26, GROUP, 1), heads, 64, [1, 1, 5]),
        Load::new(
            "queries in groups that no data parts",
            Layout::bshd(2, 30, 6, 96),
            MapAxes::Groups { heads: GROUP },
            128,
            [1, 5, 3],
        ),
        Load::new("queries in groups of one", Layout::bhsd(2, 3, 70, 64), of_one, 64, [0, 2, 8]),
        Load::new("a batch axis of stride 0", shared(0), heads, 64, [3, 2, 0]),
        Load::new("a head axis of stride 0", shared(1), heads, 64, [1, 3, 0]),
        Load::new(
            "a head axis of stride 0 in groups",
            shared(1),
            MapAxes::Groups { heads: 2 },
            64,
            [1, 3, 0],
        ),
    ];
    // A tile of keys, in boxes that divide it and a page.
    for (what, page_size, box_keys) in [("pages of 24 keys", 24, 8), ("pages of 64 keys", 64, 64)] {
        const TILE: usize = 64;
        let table = [3, 1, 4, 0];
        let layout = Layout::bhsd(5, 2, page_size, 96);
        let boxes = (0..2).flat_map(|panel| (0..TILE / box_keys).map(move |i| (panel, i)));
        let place = |(panel, i): (usize, usize)| {
            let key = 24 / box_keys * box_keys + i * box_keys; // of the second page, if that is so short
            let target = (panel * TILE + i * box_keys) * 128;
            let (batch, row) = (table[key / page_size], key % page_size);
            Place { target, batch, head: 1, row, column: panel * 64 }
        };
        let places = boxes.map(place).collect();
        all.push(Load { places, ..Load::new(what, layout, heads, box_keys, [0; 3]) });
    }
    all
}

fn of_eight_bits() -> [Load; 3] {
    let (wide, narrow) = (Swizzle::Bytes128, Swizzle::Bytes64);
    let transposed = Layout::bhsd(1, 2, 72, 256);
    [
        Load::of_e4m3(
            "e4m3, 160 elements, rows past the end",
            Layout::bhsd(2, 2, 50, 160),
            wide,
            64,
        ),
        Load::of_e4m3(
            "e4m3, transposed values by 64 keys",
            Layout::bhsd(1, 2, 96, 384),
            narrow,
            96,
        ),
        Load::of_e4m3(
            "e4m3, transposed values by 128 keys, 72 columns of 80",
            transposed,
            wide,
            80,
        ),
    ]
}

pub fn all() -> Vec<Probe> {
    let config = config(Kernel::Forward, Elem::Bf16, [64; 2], [128, 64]);
    let text = source(&config, SHARED, &[], TEXT);
    let loads = of_sixteen_bits().into_iter().chain(of_eight_bits());
    loads.map(|load| load.probe(&text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_of_sixteen_bits_is_another_and_every_load_has_zeros_or_ends_inside() {
        for load in of_sixteen_bits().iter().chain(&of_eight_bits()) {
            let mapped = load.mapped();
            if load.dtype.bytes() == 2 {
                assert!(mapped.bytes.len() / 2 < 1 << 16, "{}", load.what);
            }
            let landed = load.landed(&mapped);
            let bytes = load.places.len() * load.rows * load.model().span;
            let map = mapped.at(1 << 20).unwrap();
            assert_eq!(bytes, load.places.len() * map.tile_bytes() as usize, "{}", load.what);
            assert!(bytes <= LANDING, "{}", load.what);
            assert!(landed[bytes..].iter().all(|&byte| byte == 0xff), "{}", load.what);
        }
    }

    /// What a copy engine does by the numbers of the map with the coordinates that the kernel is given.
    fn copied(load: &Load, text: &Arc<str>) -> Vec<u32> {
        const AT: u64 = 1 << 20;
        let mapped = load.mapped();
        let map = mapped.at(AT).unwrap();
        let (tiled, bytes) = (map.tiled(), load.dtype.bytes());
        let words = load.probe(text).input;
        let words: Vec<u64> = words
            .chunks_exact(4)
            .map(|word| u64::from(u32::from_le_bytes(word.try_into().unwrap())))
            .collect();
        assert_eq!(words[1], words[0] * u64::from(map.tile_bytes()), "{}", load.what);
        let mut smem = vec![0xff; LANDING];
        for place in words[2..].chunks_exact(6).take(words[0] as usize) {
            for (row, column) in
                (0..load.rows).flat_map(|row| (0..load.model().span / bytes).map(move |c| (row, c)))
            {
                let mut at = place[1..][..tiled.dims.len()].to_vec();
                at[0] += column as u64;
                at[1] += row as u64;
                let inside = at.iter().zip(tiled.dims).all(|(at, len)| at < len);
                let offset: u64 =
                    at[1..].iter().zip(tiled.strides).map(|(at, stride)| at * stride).sum();
                let from = (map.tiled().address - AT + offset) as usize + at[0] as usize * bytes;
                let to =
                    load.model().copied_byte(place[0] as usize, load.rows, row, column * bytes);
                let element =
                    if inside { &mapped.bytes[from..from + bytes] } else { &[0, 0][..bytes] };
                smem[to..to + bytes].copy_from_slice(element);
            }
        }
        smem.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    #[test]
    fn maps_and_coordinates_lead_to_what_kernels_are_compared_with() {
        let text = "".into();
        for load in of_sixteen_bits().into_iter().chain(of_eight_bits()) {
            let expected = load.probe(&text).expected;
            assert!(expected == Numbers::Words(copied(&load, &text)), "{}", load.what);
        }
    }
}
