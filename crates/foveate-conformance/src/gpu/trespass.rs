//! A kernel that is wrong on purpose: a sanitizer that finds nothing in it would find nothing in
//! ours.

use std::time::Duration;

use foveate_gpu::driver::Module;
use foveate_gpu::nvrtc::Compiler;
use foveate_gpu::{Engine, GpuError};

const SOURCE: &str = r#"
// One thread more than there are elements, and a barrier that one warp reaches in two places.
extern "C" __global__ void write_past(float* data) { data[threadIdx.x] = 1.0f; }
extern "C" __global__ void part_at_barrier(float* data) {
    if (threadIdx.x % 2) __syncthreads();
    data[threadIdx.x / 2] = 1.0f;
}
"#;
const ELEMS: usize = 100;

/// Runs what `tool` is to find, and says how it ended: the sanitizer judges.
///
/// # Errors
/// When `tool` is neither memcheck nor synccheck.
pub fn run(tool: &str) -> Result<bool, String> {
    let entry = match tool {
        "memcheck" => "write_past",
        "synccheck" => "part_at_barrier",
        _ => {
            return Err(format!(
                "there is no kernel for {tool:?}; memcheck and synccheck have one"
            ));
        }
    };
    let launched = || -> Result<(), GpuError> {
        let engine = Engine::get(0)?;
        let queue = engine.queue();
        let block = queue.pool().take(4 * ELEMS)?;
        let compiled = Compiler::get()?.compile(SOURCE, &engine.device().info().arch())?;
        let kernel = Module::load(engine.device(), &compiled.cubin)?.function(entry, 0)?;
        let address = block.address().to_le_bytes();
        let threads = ELEMS as u32 + 1;
        // SAFETY: wrong on purpose. Allocations start at multiples of 256 bytes, so nobody else's
        // memory follows the 400 bytes at once.
        unsafe { kernel.launch(queue.stream(), [1; 3], threads, &[&address]) }?;
        queue.stream().wait(Duration::from_secs(20), "a kernel that is wrong on purpose")
    };
    match launched() {
        Ok(()) => println!("{entry} ran"),
        Err(e) => println!("{entry}: {e}"),
    }
    Ok(true)
}
