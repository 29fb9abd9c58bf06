//! What a gradient of a weight allocates once its buffers are there.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use foveate_nn::{Blocks, Cpu, LinearShape, PartMut};

/// The system's allocator, which keeps the size of the largest allocation.
struct Watched;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static WATCHED: Watched = Watched;

/// `gemm` allocates for what it packs of a whole factor, by rules of its own: products of weights'
/// gradients are cut so that it packs nothing. This fails when those rules change.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_gradient_of_a_weight_packs_no_factor() {
    let (tokens, inputs, outputs) = (2048, 288, 704);
    let shape = LinearShape { tokens, inputs, outputs };
    let (d_y, x) = (vec![0.5f32; tokens * outputs], vec![0.25; tokens * inputs]);
    let mut d_weight = vec![0.0f32; inputs * outputs];
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut cpu = Cpu::default();
        let mut largest = || {
            LARGEST.store(0, Ordering::Relaxed);
            let place = 0..inputs * outputs;
            let into = PartMut { array: &mut d_weight, place, accumulate: false };
            pool.install(|| cpu.linear_backward_weight(shape, &d_y, &x, into)).unwrap();
            LARGEST.load(Ordering::Relaxed)
        };
        // The first calls make the buffers of the threads.
        let largest = (0..20).map(|_| largest()).min().unwrap();
        assert!(largest < 8 << 10, "{threads} threads: {largest} bytes at once");
    }
    assert!(d_weight.iter().all(|&d| (d - 256.0).abs() < 1e-2), "{}", d_weight[0]);
}
