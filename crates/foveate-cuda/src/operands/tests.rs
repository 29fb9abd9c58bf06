use std::sync::Mutex;

use foveate_tensor::{GroupedAxis, Layout, Order, PackedShape, QkvPacked};

use super::*;
use foveate_gpu::sync::lock;

const BASE: Address = 0x10000;

fn at(address: Address, layout: Layout<4>) -> DeviceTensor {
    DeviceTensor { address, dtype: DType::BF16, layout }
}

fn forward(out: DeviceTensor, [q, k, v]: [DeviceTensor; 3]) -> DeviceForward<'static> {
    let operands = DeviceOperands::new(q, k, v);
    let [b, h, s, _] = q.layout.shape;
    let lse = DeviceTensor::contiguous(0x900_0000, DType::F32, [b, h, s]);
    DeviceForward { operands, out, lse, max_score: None }
}

fn packed() -> QkvPacked {
    let (heads_q, heads_kv) = (6, 2);
    let order = Order::Sbhd;
    QkvPacked::interleaved(&PackedShape {
        order,
        batch: 2,
        len: 5,
        heads_q,
        heads_kv,
        dim: 16,
        dim_v: 16,
    })
    .unwrap()
}

#[test]
fn tables_of_pages_that_lie_wrong_and_caches_without_pages_are_refused() {
    let q = DeviceTensor::contiguous(BASE, DType::BF16, [2, 6, 1, 16]);
    let kv = |pages| {
        let at = |address| DeviceTensor::contiguous(address, DType::BF16, [pages, 2, 8, 16]);
        [at(0x20_0000), at(0x30_0000)]
    };
    let out = DeviceTensor::contiguous(0x800_0000, DType::BF16, [2, 6, 1, 16]);
    let said = |table, pages| {
        let [k, v] = kv(pages);
        let mut call = forward(out, [q, k, v]);
        let pages = DevicePages { table, entries: 3, lengths: &[17, 24] };
        call.operands.pages = Some(pages);
        let accesses = call.operands.dims().and_then(|_| call.accesses());
        let accesses = accesses.map_err(|e| e.to_string())?;
        accesses.check_apart(&Mutex::default()).map_err(|e| e.to_string())
    };
    assert_eq!(said(0x40_0000, 5), Ok(()));
    let odd = said(0x40_0002, 5).unwrap_err();
    assert!(odd.contains("the page table starts at 0x400002"), "{odd}");
    let inside = said(0x800_0000, 5).unwrap_err();
    assert!(inside.contains("out overlaps the page table"), "{inside}");
    let none = said(0x40_0000, 0).unwrap_err();
    assert_eq!(none, "k has no pages, but a batch entry has 24 keys");
}

#[test]
fn destinations_that_interleave_in_one_buffer_are_apart_and_others_are_named() {
    let packing = packed();
    let [q, k, v] = [packing.q(), packing.k(), packing.v()].map(|l| at(BASE, *l));
    let out = DeviceTensor::contiguous(0x800_0000, DType::BF16, [2, 6, 5, 16]);
    let apart = |f: DeviceForward<'_>| -> Result<(), CudaError> {
        Ok(f.accesses()?.check_apart(&Mutex::default())?)
    };
    assert!(apart(forward(out, [q, k, v])).is_ok());
    let rows = DeviceTensor::<3>::contiguous(0x900_0000, DType::F32, [2, 6, 5]);
    let gradients = DeviceBackward {
        operands: forward(out, [q, k, v]).operands,
        out,
        lse: rows,
        d_out: DeviceTensor { address: 0xa00_0000, ..out },
        d_lse: None,
        dq: Some(at(0xb00_0000, *packing.q())),
        dk: Some(at(0xb00_0000, *packing.k())),
        dv: Some(at(0xb00_0000, *packing.v())),
        accumulate: false,
        d_sink: None,
        d_captures: Vec::new(),
    };
    let checked = Mutex::default();
    assert!(gradients.accesses().unwrap().check_apart(&checked).is_ok());
    let pairs = lock(&checked).len();
    assert!(pairs > 0);
    assert!(gradients.accesses().unwrap().check_apart(&checked).is_ok());
    assert_eq!(lock(&checked).len(), pairs, "nothing is looked at twice");
    let same = DeviceBackward { dv: gradients.dk, ..gradients.clone() };
    let said = same.accesses().unwrap().check_apart(&checked).unwrap_err().to_string();
    assert_eq!(said, "dk overlaps dv; give it memory of its own");
    let over_q = forward(DeviceTensor { address: BASE + 64, ..out }, [q, k, v]);
    let said = apart(over_q).unwrap_err().to_string();
    assert_eq!(said, "out overlaps q; give it memory of its own");
    let crooked = DeviceTensor { address: 0x800_0001, ..out };
    let said = apart(forward(crooked, [q, k, v])).unwrap_err().to_string();
    assert!(said.starts_with("out starts at 0x8000001, which is no multiple"), "{said}");
    let twice = at(0x800_0000, Layout::strided([2, 6, 5, 16], [0, 80, 16, 1], 0));
    assert!(apart(forward(twice, [q, k, v])).unwrap_err().to_string().contains("twice"));
}

#[test]
fn pages_give_the_sizes_of_the_longest_entry_or_say_what_does_not_fit() {
    let q = DeviceTensor::contiguous(BASE, DType::BF16, [3, 4, 2, 16]);
    let k = DeviceTensor::contiguous(BASE, DType::BF16, [9, 2, 7, 16]);
    let v = DeviceTensor::contiguous(BASE, DType::BF16, [9, 2, 7, 8]);
    let operands = DeviceOperands::new(q, k, v);
    let pages = |lengths| Some(DevicePages { table: BASE, entries: 3, lengths });
    let dims = DeviceOperands { pages: pages(&[5, 21, 0]), ..operands }.dims().unwrap();
    assert_eq!((dims.batch, dims.len_q, dims.len_k), (3, 2, 21));
    assert_eq!((dims.heads_kv, dims.dim_v, dims.shared_kv), (2, 8, false));
    let said = |operands: DeviceOperands<'_>, lengths| {
        DeviceOperands { pages: pages(lengths), ..operands }.dims().unwrap_err().to_string()
    };
    assert_eq!(
        said(operands, &[5, 22, 0]),
        "a batch entry has 22 keys in 3 pages of 7; it can have 0 to 21"
    );
    assert!(said(operands, &[5, -2, 0]).starts_with("a batch entry has -2 keys"));
    assert!(said(operands, &[5]).starts_with("1 lengths of keys"));
    let table = DevicePages { table: BASE, entries: 1 << 31, lengths: &[1, 1, 1] };
    let long = DeviceOperands { pages: Some(table), ..operands }.dims().unwrap_err();
    assert!(long.to_string().starts_with("a page table of 2147483648 entries is more"));
    let fewer = DeviceTensor::contiguous(BASE, DType::BF16, [8, 2, 7, 8]);
    assert_eq!(said(DeviceOperands { v: fewer, ..operands }, &[1, 1, 1]), "k has 9 pages, v has 8");
}

#[test]
fn the_alignment_is_that_of_the_least_aligned_row() {
    let align = |layout: Layout<4>, address| at(address, layout).row_align();
    assert_eq!(align(Layout::bshd(2, 3, 4, 64), BASE), 16);
    assert_eq!(align(Layout::bshd(2, 3, 4, 64), BASE + 8), 8);
    assert_eq!(align(Layout::bshd(2, 3, 4, 66), BASE), 4);
    assert_eq!(align(Layout::bshd(2, 3, 4, 65), BASE), 2);
    assert_eq!(align(Layout::strided([1, 1, 1, 65], [3, 3, 3, 1], 0), BASE), 16);
    assert_eq!(align(Layout::strided([1, 4, 8, 16], [0, 8, 1, 32], 0), BASE), 0);
    assert_eq!(align(Layout::bshd(2, 0, 4, 65), BASE + 2), 16);
    // One head of a group starts where the heads before it end.
    let groups = GroupedAxis { axis: 1, inner: 2, outer: 24, first: 0 };
    let heads = Layout { groups: Some(groups), ..Layout::strided([1, 4, 8, 6], [0, 6, 48, 1], 0) };
    assert_eq!(align(heads.narrowed(1, 0, 1).unwrap(), BASE), 16);
    assert_eq!(align(heads.narrowed(1, 1, 1).unwrap(), BASE), 4);
}

#[test]
fn heads_in_groups_become_a_distance_between_groups() {
    let q = at(BASE, *packed().q());
    let taken = view(&q, "q", 3).unwrap();
    for h in 0..6 {
        let expected = BASE + 2 * q.layout.at([1, h, 2, 5]) as u64;
        let elems = taken.batch
            + h as i64 * taken.head
            + (h / 3) as i64 * taken.group
            + 2 * taken.row
            + 5 * taken.elem;
        assert_eq!(taken.data + 2 * elems as u64, expected);
    }
    let first = DeviceTensor { layout: q.layout.narrowed(1, 0, 3).unwrap(), ..q };
    assert!(view(&first, "q", 1).is_ok(), "one group needs no distance between groups");
    let said = view(&q, "q", 2).unwrap_err().to_string();
    assert!(said.contains("groups of 3"), "{said}");
}
