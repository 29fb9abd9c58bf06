//! Data in other places gives the same bits: captured buffers and offsets in device memory, keys in
//! pages, calls recorded in a graph, a stream of the caller's, two queues at once, memory that was used before; and so do
//! gradients of keys beside a narrower dq. By every family of kernels that the GPU runs.

use std::sync::Arc;

use foveate_cuda::{CudaOptions, Engine};

use crate::gpu::checks::{Outcome, on_gpu};
use crate::gpu::tensors::{Tensors, causal, dims, families};
use crate::gpu::{device_data, gradients, pages, workspaces};

/// Runs all of it and prints a line for each check; whether all passed.
pub fn run() -> Result<bool, String> {
    on_gpu("placement", |engine, checks| {
        for (family, options) in families(engine) {
            let mut say = |name: &str, outcome| checks.say(&format!("{family}: {name}"), outcome);
            say(
                "captured buffers in device memory give the bits of the plan's",
                device_data::captures(engine, &options),
            );
            say(
                "offsets in device memory give the bits of the host's",
                device_data::offsets(engine, &options),
            );
            say(
                "a recorded graph gives the bits of the calls",
                device_data::graph(engine, &options),
            );
            say("a stream of the caller's gives the same bits", callers_stream(engine, &options));
            say("two queues at once give the bits of one", two_queues(engine, &options));
            say(
                "dq in bf16 beside dk and dv in f32 is theirs, rounded",
                gradients::of_two_dtypes(engine, &options),
            );
            say("memory that held NaN before changes no bit", workspaces::dirty(engine, &options));
            for page_size in [16, 7] {
                let name =
                    format!("keys in pages of {page_size} give what a cache in one piece gives");
                say(&name, pages::paged(engine, page_size, &options));
            }
        }
    })
}

fn callers_stream(engine: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    let dims = dims(2, 300);
    let plan = causal(engine, &dims, options.clone())?;
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

/// One plan on two queues that do not wait for each other, with CTAs for some of the SMs each, so that both run: its
/// counters, lists and sums are each queue's own.
fn two_queues(engine: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    const ROUNDS: usize = 20;
    let dims = dims(4, 1500);
    let plan = causal(engine, &dims, CudaOptions { deterministic: true, ..options.clone() })?;
    let queues = [engine.new_queue()?, engine.new_queue()?];
    let [one, other] = [0, 1].map(|i: usize| Tensors::new(&queues[i], dims, 11 + i as u64));
    let tensors = [one?, other?];
    let both = |i: usize| {
        tensors[i].clear()?;
        plan.forward_on(&queues[i], &tensors[i].forward())?;
        plan.backward_on(&queues[i], &tensors[i].backward())
    };
    let results = |i: usize| (4..9).map(|of| tensors[i].read(of)).collect::<Result<Vec<_>, _>>();
    let mut alone = Vec::new();
    for i in 0..2 {
        both(i)?;
        alone.push(results(i)?);
    }
    for round in 0..ROUNDS {
        (0..2).try_for_each(both)?;
        for (i, wanted) in alone.iter().enumerate() {
            if results(i)? != *wanted {
                return Ok(Err(format!("round {round}: queue {i} has other bits than alone")));
            }
        }
    }
    Ok(Ok(()))
}
