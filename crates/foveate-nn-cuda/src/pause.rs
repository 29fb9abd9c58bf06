//! Time in which a queue does nothing.

use std::time::Duration;

use foveate_gpu::GpuError;
use foveate_gpu::access::Accesses;
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::params::PauseParams;

/// Keeps the queue busy for a while: what the host queues in the meantime runs behind it without waiting for
/// the host. A second at most.
#[derive(Clone, Copy, Debug)]
pub struct Pause(pub Duration);

const MOST: Duration = Duration::from_secs(1);

/// Of a CTA, one of which runs.
pub(crate) const THREADS: u32 = 32;

impl Block for Pause {
    fn launches(&self, _accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let source = Source { file: File::Pause, dtype: DType::F32, vector: 1, threads: THREADS };
        let parameters = PauseParams { nanoseconds: self.0.min(MOST).as_nanos() as i64 };
        Ok(vec![KernelLaunch::new(&source, "fv_pause", [1, 1], &parameters)?])
    }
}
