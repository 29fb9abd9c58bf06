//! Which of a problem's kernels is the fastest, by running them.

use super::Matmul;
use super::matrix::Order;
use super::prepared::{Key, Prepared};
use crate::driver::sys::Handle;
use crate::driver::{Event, default_timeout};
use crate::error::GpuError;
use crate::queue::Queue;

/// Times that each kernel is timed, in turn with the others, so that all meet the same clock.
const ROUNDS: usize = 3;
/// Of the time of the library's first choice: what is hardly faster is noise.
const WORTH: f32 = 0.99;

/// The number of the kernel that takes the least time for a product whose operands are there. It leaves c as one call
/// does.
///
/// # Errors
/// Those of the library and of the device.
pub fn fastest(
    handle: Handle,
    queue: &Queue,
    key: &Key,
    matmul: &Matmul,
    made: &mut Prepared,
) -> Result<usize, GpuError> {
    let (again, stream) = (matmul.beta == 0.0 || matmul.add.is_some(), queue.stream());
    let kernels = made.kernels();
    if kernels == 1 || !again || stream.is_recording()? {
        return Ok(0);
    }
    let factors = matmul.addresses(key.matrices[3].order == Order::Rows);
    // One call where it takes a millisecond or more.
    let calls = if matmul.flops() < 1e12 { 2 } else { 1 };
    let mut spans = Vec::new();
    for number in (0..=ROUNDS).flat_map(|_| 0..kernels) {
        made.choose(number);
        let workspace = queue.pool().take(made.workspace_bytes())?;
        let [begin, end] = [Event::new(stream.device())?, Event::new(stream.device())?];
        begin.record(stream)?;
        for _ in 0..calls {
            // SAFETY: the operands are those of a product that is to be queued, and of which nothing
            // of c is read; the workspace is of this queue's pool.
            unsafe { made.queue(handle, queue, matmul, factors, &workspace) }?;
        }
        end.record(stream)?;
        spans.push([begin, end]);
    }
    let [_, last] = spans.last().expect("each kernel is timed");
    last.wait(default_timeout(), "the time of a product")?;
    let mut times = vec![Vec::new(); kernels];
    // In the first round kernels are loaded.
    for (number, [begin, end]) in spans.iter().enumerate().skip(kernels) {
        times[number % kernels].push(end.ms_since(begin)?);
    }
    let median = |mut of_kernel: Vec<f32>| {
        of_kernel.sort_by(f32::total_cmp);
        of_kernel[of_kernel.len() / 2]
    };
    let medians: Vec<f32> = times.into_iter().map(median).collect();
    let best = (0..kernels).min_by(|&a, &b| medians[a].total_cmp(&medians[b]));
    Ok(best.filter(|&best| medians[best] < WORTH * medians[0]).unwrap_or(0))
}
