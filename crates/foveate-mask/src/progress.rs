//! How far work on a block mask is, told to whoever may break it off.

use std::ops::ControlFlow;

/// How far building a block mask, or counting what it lets through, is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tiles that are decided, or partial tiles that are counted.
    pub done: u64,
    /// All of them.
    pub all: u64,
    /// Memory that it takes whatever the mask is, about, in bytes.
    pub base_bytes: u64,
    /// Memory that it takes so far, about, in bytes.
    pub bytes: u64,
}

impl Progress {
    /// The share that is done, between 0 and 1.
    pub fn share(&self) -> f64 {
        if self.all == 0 { 1.0 } else { self.done as f64 / self.all as f64 }
    }
}

/// Follows work and may break it off.
pub(crate) type Watch<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<()>;
