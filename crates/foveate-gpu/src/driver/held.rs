//! How much memory of a device the pools of this process hold, in use or free.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a device's memory that the pools of this process have from the driver. Contexts, kernels and
/// what the driver keeps of graphs are not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldBytes {
    /// Now.
    pub now: u64,
    /// The most at once, since the device was opened or
    /// [`Device::forget_peak`](super::Device::forget_peak) was called.
    pub peak: u64,
}

/// Counts them.
#[derive(Debug, Default)]
pub(super) struct Held {
    now: AtomicU64,
    peak: AtomicU64,
}

impl Held {
    pub fn took(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    pub fn freed(&self, bytes: usize) {
        self.now.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    pub fn bytes(&self) -> HeldBytes {
        let now = self.now.load(Ordering::Relaxed);
        HeldBytes { now, peak: self.peak.load(Ordering::Relaxed) }
    }

    pub fn forget_peak(&self) {
        self.peak.store(self.now.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}
