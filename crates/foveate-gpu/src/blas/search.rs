//! Which of a problem's kernels is the fastest, by running them.
//!
//! Those that the library names run first. Of a large problem others do, too: tiles that the fastest two may have,
//! then clusters of the two that are fastest by then. The best run once more, since all this has warmed the GPU, and
//! one at its limit of power has another order than one that was idle.

use super::Matmul;
use super::choices::Variation;
use super::matrix::Order;
use super::prepared::{Key, Prepared};
use super::sys;
use crate::driver::sys::Handle;
use crate::driver::{Event, default_timeout};
use crate::error::GpuError;
use crate::queue::Queue;

/// Times that a kernel is timed.
const ROUNDS: usize = 3;
/// Of the time of the library's first choice: what is hardly faster is noise.
const WORTH: f32 = 0.99;
/// Kernels of other tiles that are tried, and of other clusters: each is loaded for that.
const MOST_BESIDE: usize = 32;
/// Kernels beside the library's first that run once more on a GPU that is warm, and for how long at a time.
const FINALISTS: usize = 8;
const WARM_MS: f32 = 8.0;

/// A problem whose operands are there, so that its kernels can run.
pub struct Search<'a> {
    pub handle: Handle,
    pub queue: &'a Queue,
    pub key: &'a Key,
    pub matmul: &'a Matmul,
}

/// Milliseconds that a call of a kernel takes.
type Timed = (f32, Variation);

impl Search<'_> {
    /// The number of the kernel that takes the least time, which leaves c as one call does; of those that the library
    /// names, or where `beyond` of others, too.
    ///
    /// # Errors
    /// Those of the library, of kernels that it names, and of the device.
    pub fn fastest(&self, made: &mut Prepared, beyond: bool) -> Result<usize, GpuError> {
        let again = self.matmul.beta == 0.0 || self.matmul.add.is_some();
        let named: Vec<_> = made.kernels().collect();
        if named.len() == 1 || !again || self.queue.stream().is_recording()? {
            return Ok(0);
        }
        // One call of a kernel that takes a millisecond or more. In the first round kernels are loaded.
        let calls = if self.matmul.flops() < 1e12 { 2 } else { 1 };
        let mut found = self.sorted(made, &named, [1, ROUNDS], calls)?;
        if beyond {
            found = self.beyond(made, found)?;
        }
        let first = found.iter().find(|of| of.1.number() == 0).expect("it is always timed");
        let best = found[0];
        Ok(if best.0 < WORTH * first.0 { best.1.number() } else { 0 })
    }

    /// The best of `found`, which are in the order of their times, and of kernels beside them, on a GPU that is warm.
    fn beyond(&self, made: &mut Prepared, mut found: Vec<Timed>) -> Result<Vec<Timed>, GpuError> {
        for is_tile in [true, false] {
            let mut more: Vec<_> = Vec::new();
            for &(_, of) in &found[..found.len().min(2)] {
                match is_tile {
                    true => {
                        let tiles = made.tiles(of.named).into_iter();
                        more.extend(tiles.map(|tile| Variation { tile, ..of }));
                    }
                    false => more.extend(sys::CLUSTERS.map(|cluster| Variation { cluster, ..of })),
                }
            }
            more.retain(|&variation| made.add(self.handle, variation));
            // Where there are too many, some of all kinds.
            let every = more.len().div_ceil(MOST_BESIDE).max(1);
            let more: Vec<_> = more.into_iter().step_by(every).collect();
            found.extend(self.sorted(made, &more, [1, 1], 1)?);
            found.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        // Whatever else is there, the library's first is what is compared with.
        let (first, others): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|of| of.1.number() == 0);
        let last: Vec<_> = first.into_iter().chain(others.into_iter().take(FINALISTS)).collect();
        let calls = (WARM_MS / last[0].0.max(0.001)).ceil().min(64.0) as usize;
        let kernels: Vec<_> = last.into_iter().map(|of| of.1).collect();
        self.sorted(made, &kernels, [2, ROUNDS], calls)
    }

    /// What a call of each kernel takes, the fastest first: the median of `rounds`, behind `before` whose times nobody
    /// reads. In a round all kernels run in turn, so that all meet the same clock. What the library does not name it
    /// may refuse still, and then it is left out.
    fn sorted(
        &self,
        made: &mut Prepared,
        kernels: &[Variation],
        [before, rounds]: [usize; 2],
        calls: usize,
    ) -> Result<Vec<Timed>, GpuError> {
        let (stream, mut spans) = (self.queue.stream(), Vec::new());
        let factors = self.matmul.addresses(self.key.matrices[3].order == Order::Rows);
        let mut is_refused = vec![false; kernels.len()];
        for round in 0..before + rounds {
            for (number, &kernel) in kernels.iter().enumerate() {
                if is_refused[number] {
                    continue;
                }
                made.choose(self.handle, kernel);
                let workspace = self.queue.pool().take(made.workspace_bytes())?;
                let [begin, end] = [Event::new(stream.device())?, Event::new(stream.device())?];
                begin.record(stream)?;
                for _ in 0..calls {
                    let (handle, queue, matmul) = (self.handle, self.queue, self.matmul);
                    // SAFETY: the operands are those of a product that is to be queued, and of which
                    // nothing of c is read; the workspace is of this queue's pool.
                    match unsafe { made.queue(handle, queue, matmul, factors, &workspace) } {
                        Err(error) if !kernel.is_named() && sys::is_refusal(&error) => {
                            is_refused[number] = true;
                            break;
                        }
                        done => done?,
                    }
                }
                end.record(stream)?;
                spans.push((round, number, [begin, end]));
            }
        }
        if let Some((_, _, [_, last])) = spans.last() {
            last.wait(default_timeout(), "the time of a product")?;
        }
        let mut times = vec![Vec::new(); kernels.len()];
        for (_, number, [begin, end]) in spans.iter().filter(|of| of.0 >= before) {
            times[*number].push(end.ms_since(begin)? / calls as f32);
        }
        let median = |mut of_kernel: Vec<f32>| {
            of_kernel.sort_by(f32::total_cmp);
            of_kernel[of_kernel.len() / 2]
        };
        let whole = times.into_iter().zip(kernels).zip(is_refused).filter(|(_, refused)| !refused);
        let mut found: Vec<_> =
            whole.map(|((of_kernel, kernel), _)| (median(of_kernel), *kernel)).collect();
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(found)
    }
}
