//! The floor of a sparse mask: no implementation of ours can be below it.
//!
//! Where a mask hides most pairs, rates by live pairs say little: tiles that it cuts are multiplied whole, and bytes,
//! not products, may be the limit. So a row of a mask has the longer of two times beside its own: that of its live tiles
//! at the rate of the same problem without mask and score, and that of the bytes which have to move at the rate of a
//! copy. Both rates are measured in the same run.

use foveate::cuda::Engine;
use foveate::gpu::driver::{Event, default_timeout};

use crate::bench::workload::Workload;
use crate::failure::Failure;

/// Bytes of a copy that is timed: past every cache.
const COPIED: usize = 1 << 29;
/// How often it is timed.
const COPIES: usize = 12;

/// What limits a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Products of live tiles.
    Products,
    /// Bytes of operands and results.
    Bytes,
}

/// The least time that a case takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Floor {
    /// Milliseconds.
    pub ms: f64,
    /// Which of the two is longer.
    pub limit: Limit,
}

impl Floor {
    /// Of a case whose problem without mask and score runs at so many TFLOP/s, where a copy moves so many GB/s.
    pub fn of(work: &Workload, full_tflops: f64, copy_gbs: f64) -> Self {
        let products = work.tile_flops() / full_tflops / 1e9;
        let bytes = work.compulsory_bytes() as f64 / copy_gbs / 1e6;
        match products >= bytes {
            true => Self { ms: products, limit: Limit::Products },
            false => Self { ms: bytes, limit: Limit::Bytes },
        }
    }
}

/// GB/s, read and written together, of a copy within the memory of GPU `ordinal`: the median of some.
pub fn copy_gbs(ordinal: usize) -> Result<f64, Failure> {
    let engine = Engine::get(ordinal)?;
    let queue = engine.queue();
    let [from, to] = [queue.pool().take(COPIED)?, queue.pool().take(COPIED)?];
    from.fill(1)?;
    let (device, stream) = (engine.device(), queue.stream());
    let mut times = Vec::new();
    for _ in 0..COPIES {
        let (begin, end) = (Event::new(device)?, Event::new(device)?);
        begin.record(stream)?;
        // SAFETY: both allocations are of this device and as long as that, and go back to the pool of the same queue
        // behind this copy.
        unsafe { stream.copy(to.address(), from.address(), device, COPIED)? };
        end.record(stream)?;
        end.wait(default_timeout(), "a copy of the benchmark")?;
        times.push(f64::from(end.ms_since(&begin)?));
    }
    times.sort_by(f64::total_cmp);
    Ok(2.0 * COPIED as f64 / times[COPIES / 2] / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::workload::{Direction, Mask};
    use foveate::DType;

    /// 16 causal documents of 512 in a row of 8192, two rows, 16 heads of 128.
    fn documents(pass: Direction) -> Workload {
        let causal = Workload::causal(16, 16, 8192, 128);
        Workload { mask: Mask::Documents, width: 16, batch: 2, dtype: DType::BF16, pass, ..causal }
    }

    #[test]
    fn bytes_are_the_floor_of_documents_and_products_that_of_a_causal_mask() {
        let work = documents(Direction::Forward);
        // q, k, v and out, and lse.
        assert_eq!(
            work.compulsory_bytes(),
            (4 * 2 * 16 * 8192 * 128 * 2 + 2 * 16 * 8192 * 4) as u64
        );
        // Ten of the sixteen tiles of 128x128 of each document are live.
        let tiles = 16.0 * 10.0 * 128.0 * 128.0;
        assert_eq!(work.tile_flops(), 4.0 * tiles * (2 * 16 * 128) as f64);
        let floor = Floor::of(&work, 700.0, 4200.0);
        assert_eq!(floor.limit, Limit::Bytes);
        assert!((floor.ms - 0.0642).abs() < 1e-3, "{floor:?}");
        let causal = Workload { mask: Mask::Causal, width: 0, ..work };
        let floor = Floor::of(&causal, 700.0, 4200.0);
        assert_eq!(floor.limit, Limit::Products);
        assert!((floor.ms - causal.tile_flops() / 700e9).abs() < 1e-12, "{floor:?}");
    }

    #[test]
    fn a_backward_reads_out_and_its_gradient_and_writes_three() {
        let work = documents(Direction::Backward);
        let operand = 2 * 16 * 8192 * 128 * 2;
        assert_eq!(work.compulsory_bytes(), (8 * operand + 2 * 16 * 8192 * 4) as u64);
    }
}
