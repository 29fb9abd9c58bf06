//! Which operands of the corpus tensor maps load.

#[path = "../../../foveate-gpu/tests/driver/mod.rs"]
mod driver;

use std::collections::BTreeMap;
use std::path::Path;

use foveate_gpu::DeviceTensor;
use foveate_gpu::driver::{Device, Swizzle, Tiled};
use foveate_gpu::tma::{MapAxes, MapRefusal, MapTile, OperandMap};
use foveate_tensor::indices;

use super::*;

/// Where a buffer starts, as allocations do.
const BASE: usize = 0x7000_0000;

/// Whether a map can have the operand, by its rows one by one.
fn is_legal(tensor: &DeviceTensor) -> bool {
    let Layout { shape, strides, .. } = tensor.layout;
    let bytes = tensor.dtype.bytes();
    let row_starts = indices(shape).filter(|index| index[3] == 0);
    row_starts.map(|index| bytes * tensor.layout.at(index)).all(|at| at.is_multiple_of(16))
        && (shape[3] == 1 || strides[3] == 1)
        && (shape[2] == 1 || strides[2] > 0)
        || shape.contains(&0)
}

/// Whether every element lies where the map's coordinates of it lead.
fn check_elements(tensor: &DeviceTensor, map: &OperandMap, group: Option<usize>) {
    let Tiled { address, dims, strides, element, .. } = map.tiled();
    for index in indices(tensor.layout.shape) {
        let [b, h, r, e] = index;
        let coordinates = match group {
            None => vec![e, r, h, b],
            Some(group) => vec![e, r, h % group, h / group, b],
        };
        let mut found = address as usize;
        for (axis, at) in coordinates.into_iter().enumerate() {
            let at = at * map.steps[axis] as usize;
            assert!(at < dims[axis] as usize);
            let stride = axis.checked_sub(1).map_or(element.bytes(), |i| strides[i] as usize);
            found += at * stride;
        }
        assert_eq!(
            found,
            BASE + element.bytes() * tensor.layout.at(index),
            "{index:?} of {tensor}"
        );
    }
}

#[test]
fn tensor_maps_load_what_the_rules_allow_of_every_layout_of_the_corpus() {
    let name =
        "storage::tests::tensor_maps_load_what_the_rules_allow_of_every_layout_of_the_corpus";
    if !driver::inside(name, &[], &[], &[]) {
        return;
    }
    let device = Device::open(0).unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance/cases");
    let mut found: BTreeMap<String, [usize; 3]> = BTreeMap::new();
    for case in crate::load(&corpus).unwrap() {
        let storage = Storage::of(&case).unwrap();
        let group = case.heads[0] / case.heads[1];
        let operands = storage.operands.into_iter().map(|(_, layout)| layout);
        for (name, layout) in
            ["q", "k", "v", "out"].into_iter().zip(operands.chain([storage.out.0]))
        {
            let tensor =
                DeviceTensor { address: BASE as u64, dtype: case.dtype().unwrap(), layout };
            let map = |axes| {
                let tile = MapTile { axes, rows: 64, swizzle: Swizzle::Bytes128 };
                OperandMap::of(name, &tensor, &tile)
            };
            let (map, groups) = match map(MapAxes::Heads) {
                Err(MapRefusal::Groups { .. }) => {
                    (map(MapAxes::Groups { heads: group }), Some(group))
                }
                other => (other, None),
            };
            let at = format!("{name} of `{}`: {tensor}", case.name);
            let outcome = match map {
                Ok(map) => {
                    assert!(is_legal(&tensor), "{at}");
                    check_elements(&tensor, &map, groups);
                    map.encode(name, &device).unwrap_or_else(|e| panic!("{at}: {e}"));
                    usize::from(groups.is_some())
                }
                Err(refusal) => {
                    assert!(!is_legal(&tensor), "{at}: {refusal}");
                    2
                }
            };
            found.entry(case.layout.clone()).or_default()[outcome] += 1;
        }
    }
    println!("operands by layout: [4 axes, 5 axes, none]");
    found.iter().for_each(|(layout, counts)| println!("{layout}: {counts:?}"));
    let sum = |i: usize| found.values().map(|counts| counts[i]).sum::<usize>();
    assert!((0..3).all(|outcome| sum(outcome) > 0), "the corpus has all three");
}
