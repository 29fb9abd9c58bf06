//! Kernels that tell what a sanitizer is worth: one that is wrong on purpose for each tool, since a
//! tool that finds nothing in it would find nothing in ours, and one that is right, which a tool
//! that knows mbarriers has nothing to say of.

use std::time::Duration;

use foveate_gpu::driver::Launch;
use foveate_gpu::{Engine, GpuError};

const SOURCE: &str = r#"
// The last thread writes past the elements.
extern "C" __global__ void write_past(float* data) { data[threadIdx.x] = 1.0f; }
// A barrier that half of a warp reaches.
extern "C" __global__ void part_at_barrier(float* data) {
    if (threadIdx.x % 2) __syncthreads();
    data[threadIdx.x / 2] = 1.0f;
}
// The first thread adds up what all warps write to shared memory, with no barrier between: the race
// that the manual of the tool shows, in shared memory of both kinds. Racecheck tells of it where the
// host synchronizes with the device.
extern "C" __global__ void read_unwritten(float* data) {
    __shared__ volatile float fixed[64];
    extern __shared__ volatile float requested[];
    fixed[threadIdx.x] = data[threadIdx.x] + threadIdx.x;
    requested[threadIdx.x] = data[threadIdx.x] - threadIdx.x;
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int i = 0; i < blockDim.x; ++i) sum += fixed[i] + requested[i];
        data[0] = sum;
    }
}
// Two warps exchange 32 numbers each by an mbarrier at which one lane arrives for its warp, after
// __syncwarp, as in the backward kernels.
extern "C" __global__ void handed_over(float* data) {
    __shared__ volatile float passed[64];
    __shared__ alignas(8) unsigned long long mbarrier;
    const unsigned at = __cvta_generic_to_shared(&mbarrier);
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 2;" :: "r"(at) : "memory");
    __syncthreads();
    passed[threadIdx.x] = data[threadIdx.x];
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" :: "r"(at) : "memory");
    unsigned done;
    do {
        asm volatile(
            "{ .reg .pred over; mbarrier.test_wait.parity.shared.b64 over, [%1], 0; selp.u32 %0, 1, 0, over; }"
            : "=r"(done) : "r"(at) : "memory");
    } while (!done);
    data[threadIdx.x] = passed[(threadIdx.x + 32) % 64];
}
"#;

/// A kernel of [`SOURCE`] and its launch.
#[derive(Debug)]
struct Planted {
    /// What it is asked for by: the tool that must complain of it, or what it uses rightly.
    name: &'static str,
    entry: &'static str,
    threads: u32,
    /// Dynamic shared memory, in bytes.
    shared_bytes: u32,
}

/// Elements of `data`.
const ELEMS: usize = 100;

const KERNELS: [Planted; 4] = [
    Planted { name: "memcheck", entry: "write_past", threads: 101, shared_bytes: 0 },
    Planted { name: "synccheck", entry: "part_at_barrier", threads: 101, shared_bytes: 0 },
    Planted { name: "racecheck", entry: "read_unwritten", threads: 64, shared_bytes: 256 },
    Planted { name: "mbarrier", entry: "handed_over", threads: 64, shared_bytes: 0 },
];

/// Runs the kernel of this name, and says how it ended: the sanitizer judges.
///
/// # Errors
/// When there is no kernel of this name.
pub fn run(name: &str) -> Result<bool, String> {
    let Some(Planted { entry, threads, shared_bytes, .. }) =
        KERNELS.into_iter().find(|planted| planted.name == name)
    else {
        let names = KERNELS.map(|planted| planted.name).join(", ");
        return Err(format!("there is no kernel for {name:?}; there is one for {names}"));
    };
    let launched = || -> Result<(), GpuError> {
        let engine = Engine::get(0)?;
        let queue = engine.queue();
        let allocation = queue.pool().take(4 * ELEMS)?;
        let compiled = engine.compiled(SOURCE, engine.device().info().arch())?;
        let kernel = engine.load(&compiled, entry, shared_bytes)?;
        let address = allocation.address().to_le_bytes();
        // SAFETY: the first one is wrong on purpose: allocations start at multiples of 256 bytes, so
        // nobody else's memory follows the 400 bytes at once. The others keep inside of them.
        unsafe { kernel.launch(queue.stream(), &Launch::new([1; 3], threads), &[&address]) }?;
        queue.stream().wait(Duration::from_secs(20), "a planted kernel")?;
        engine.device().synchronize()
    };
    match launched() {
        Ok(()) => say!("{entry} ran"),
        Err(e) => say!("{entry}: {e}"),
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use foveate_gpu::Arch;
    use foveate_gpu::cache::Cache;
    use foveate_gpu::nvrtc::Compiler;

    use super::*;

    #[test]
    fn every_planted_kernel_compiles() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let compiled = Cache::at(None).compile(compiler, SOURCE, Arch::new((9, 0))).unwrap();
        for planted in KERNELS {
            let is_there = compiled.kernels.iter().any(|kernel| kernel.name == planted.entry);
            assert!(is_there, "{planted:?} of {compiled:?}");
        }
    }
}
