//! The host's time for queueing a forward pass, everything being there.

use std::sync::Arc;
use std::time::Instant;

use foveate_cuda::{CudaError, CudaOptions, Engine};

use crate::gpu::checks::on_gpu;
use crate::gpu::tensors::{Tensors, causal, dims};

/// Prints the time; whether it could be measured.
pub fn run() -> Result<bool, String> {
    on_gpu("host-time", |engine, checks| match warm_forward(engine) {
        Ok(us) => say!("host time of a warm forward: {us:.1} us"),
        Err(e) => checks.say("host time of a warm forward", Err(e)),
    })
}

/// Microseconds that queueing a forward takes: the median of 2,500.
fn warm_forward(engine: &Arc<Engine>) -> Result<f64, CudaError> {
    let dims = dims(2, 128);
    let plan = causal(engine, &dims, CudaOptions::default())?;
    let queue = engine.queue();
    let tensors = Tensors::new(queue, dims, 5)?;
    let args = tensors.forward();
    let mut times = Vec::new();
    for _ in 0..50 {
        for _ in 0..50 {
            let began = Instant::now();
            plan.forward_on(queue, &args)?;
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
        // A full queue would make the host wait.
        tensors.read(5)?;
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
