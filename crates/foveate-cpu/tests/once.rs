//! What a call does once, counted: operands are looked at once, block masks are built once a plan, and
//! workspace is allocated once a plan.
//!
//! The counters are the process's, so that this program has one test.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use foveate_cpu::{CpuOptions, CpuPlan};
use foveate_mask::built;
use foveate_mods::masks;
use foveate_problem::{BackwardArgs, Dims, ForwardArgs, Operands, Spec, dims_found};
use foveate_tensor::{DType, Tensor};

/// Bytes of an allocation that counts: the tiles of the problem below have more, lists of tasks less.
const COUNTED: usize = 1 << 14;

/// The system's allocator, which counts.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= COUNTED {
            ALLOCATED.fetch_add(1, Ordering::SeqCst);
        }
        // SAFETY: the caller keeps the contract of this method, which is that of the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What was done since the counters were read.
#[derive(Debug)]
struct Counts {
    dims: usize,
    masks: usize,
    allocations: usize,
}

fn counted(call: impl FnOnce()) -> Counts {
    let now = || [dims_found(), built(), ALLOCATED.load(Ordering::SeqCst)];
    let before = now();
    call();
    let [dims, masks, allocations] = [0, 1, 2].map(|i| now()[i] - before[i]);
    Counts { dims, masks, allocations }
}

#[test]
fn calls_look_at_operands_once_and_later_ones_neither_build_masks_nor_allocate() {
    let (shape, rows) = ([2, 2, 200, 128], [2, 2, 200]);
    let t = Tensor::filled(DType::F32, shape, 0.5);
    let operands = Operands::new(t.view(), t.view(), t.view());
    let dims = Dims::of(&operands).unwrap();
    let options = CpuOptions { tile_q: Some(64), tile_kv: Some(64), ..CpuOptions::default() };
    // Workers make the machines that evaluate a mask themselves.
    for (mask, machines) in [(Some(masks::causal()), true), (None, false)] {
        let masks = usize::from(mask.is_some());
        let spec = Spec { mask, score: None, scale: None, dropout: None };
        let plan = CpuPlan::new(&spec, &dims, DType::F32, options).unwrap();
        let [mut out, mut dq, mut dk, mut dv] = [(); 4].map(|()| t.clone());
        let mut lse = Tensor::filled(DType::F32, rows, 0.0);
        let mut forward = || {
            let args = ForwardArgs {
                operands,
                out: out.view_mut().unwrap(),
                lse: lse.view_mut().unwrap(),
                max_score: None,
            };
            counted(|| plan.forward(args).unwrap())
        };
        let check = |first: Counts, later: &mut dyn FnMut() -> Counts| {
            assert!(first.allocations > 0, "{first:?}");
            assert_eq!((first.dims, first.masks), (1, masks));
            let later: Vec<Counts> = (0..20).map(|_| later()).collect();
            assert!(later.iter().all(|c| (c.dims, c.masks) == (1, 0)), "{later:?}");
            // One in which more workers have a part than in any before allocates for them.
            assert!(machines || later.iter().any(|c| c.allocations == 0), "{later:?}");
        };
        check(forward(), &mut forward);
        let mut backward = || {
            let args = BackwardArgs {
                operands,
                out: out.view(),
                lse: lse.view(),
                d_out: t.view(),
                d_lse: None,
                dq: Some(dq.view_mut().unwrap()),
                dk: Some(dk.view_mut().unwrap()),
                dv: Some(dv.view_mut().unwrap()),
                accumulate: false,
                d_sink: None,
                d_captures: Vec::new(),
            };
            counted(|| plan.backward(args).unwrap())
        };
        // Tiles are those of the forward pass, and so are their block masks.
        let first = backward();
        check(Counts { masks: first.masks + masks, ..first }, &mut backward);
    }
}
