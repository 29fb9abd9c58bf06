//! Data in other places gives the same bits: captured buffers and offsets in device memory, keys in
//! pages, calls recorded in a graph, a stream of the caller's; and so do gradients of keys beside a narrower dq.

use std::sync::Arc;

use foveate_cuda::{CudaOptions, Engine};

use crate::gpu::checks::{Outcome, on_gpu};
use crate::gpu::tensors::{Tensors, causal, dims};
use crate::gpu::{device_data, gradients, pages};

/// Runs all of it and prints a line for each check; whether all passed.
pub fn run() -> Result<bool, String> {
    on_gpu("placement", |engine, checks| {
        let mut say = |name: &str, outcome| checks.say(name, outcome);
        say(
            "captured buffers in device memory give the bits of the plan's",
            device_data::captures(engine),
        );
        say("offsets in device memory give the bits of the host's", device_data::offsets(engine));
        say("a recorded graph gives the bits of the calls", device_data::graph(engine));
        say("a stream of the caller's gives the same bits", callers_stream(engine));
        say(
            "dq in bf16 beside dk and dv in f32 is theirs, rounded",
            gradients::of_two_dtypes(engine),
        );
        for page_size in [16, 7] {
            let name = format!("keys in pages of {page_size} give what a cache in one piece gives");
            say(&name, pages::paged(engine, page_size));
        }
    })
}

fn callers_stream(engine: &Arc<Engine>) -> Outcome {
    let dims = dims(2, 300);
    let plan = causal(engine, &dims, CudaOptions::default())?;
    // SAFETY: 0 is the default stream.
    let other = unsafe { engine.queue_on(0) };
    let mut found = Vec::new();
    for queue in [engine.queue(), &other] {
        let tensors = Tensors::new(queue, dims, 3)?;
        plan.forward_on(queue, &tensors.forward())?;
        found.push((tensors.read(4)?, tensors.read(5)?));
    }
    Ok(if found[0] == found[1] { Ok(()) } else { Err("results differ".into()) })
}
