//! Kernels that are wrong on purpose: a sanitizer that finds nothing in them would find nothing in
//! ours.

use std::time::Duration;

use foveate_gpu::driver::Launch;
use foveate_gpu::{Engine, GpuError};

const SOURCE: &str = r#"
const int ELEMS = 100;
// One thread more than there are elements.
extern "C" __global__ void write_past(float* data) { data[threadIdx.x] = 1.0f; }
// A barrier that half of a warp reaches.
extern "C" __global__ void part_at_barrier(float* data) {
    if (threadIdx.x % 2) __syncthreads();
    data[threadIdx.x / 2] = 1.0f;
}
// Each warp reads from shared memory what another wrote, with no barrier between.
extern "C" __global__ void read_unwritten(float* data) {
    __shared__ float passed[ELEMS + 1];
    passed[threadIdx.x] = threadIdx.x;
    const float other = passed[(threadIdx.x + 37) % (ELEMS + 1)];
    if (threadIdx.x < ELEMS) data[threadIdx.x] = other;
}
"#;
const ELEMS: usize = 100;

/// The kernel that each tool must complain of.
const KERNELS: [(&str, &str); 3] =
    [("memcheck", "write_past"), ("synccheck", "part_at_barrier"), ("racecheck", "read_unwritten")];

/// Runs what `tool` is to find, and says how it ended: the sanitizer judges.
///
/// # Errors
/// When there is no kernel for `tool`.
pub fn run(tool: &str) -> Result<bool, String> {
    let Some((_, entry)) = KERNELS.into_iter().find(|(name, _)| *name == tool) else {
        let names = KERNELS.map(|(name, _)| name).join(", ");
        return Err(format!("there is no kernel for {tool:?}; there is one for {names}"));
    };
    let launched = || -> Result<(), GpuError> {
        let engine = Engine::get(0)?;
        let queue = engine.queue();
        let allocation = queue.pool().take(4 * ELEMS)?;
        let compiled = engine.compiled(SOURCE, engine.device().info().arch())?;
        let kernel = engine.load(&compiled, entry, 0)?;
        let address = allocation.address().to_le_bytes();
        let threads = ELEMS as u32 + 1;
        // SAFETY: wrong on purpose. Allocations start at multiples of 256 bytes, so nobody else's
        // memory follows the 400 bytes at once.
        unsafe { kernel.launch(queue.stream(), &Launch::new([1; 3], threads), &[&address]) }?;
        queue.stream().wait(Duration::from_secs(20), "a kernel that is wrong on purpose")
    };
    match launched() {
        Ok(()) => println!("{entry} ran"),
        Err(e) => println!("{entry}: {e}"),
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
    fn every_tool_has_a_kernel_that_compiles() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let compiled = Cache::at(None).compile(compiler, SOURCE, Arch::new((9, 0))).unwrap();
        for (tool, entry) in KERNELS {
            assert!(compiled.kernels.iter().any(|k| k.name == entry), "{tool}: {compiled:?}");
        }
    }
}
