//! Queues: a stream, and memory for the work on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Allocator, Pool, Stream};
use crate::error::GpuError;

/// A stream and memory for its work. Cheap to clone.
///
/// Memory that was used on a queue is given out again on the same queue only, so nothing has to
/// wait for work to end before it drops its memory. A queue is gone when the last clone of it, of
/// its pool, and the last allocation from there are dropped: the driver frees its memory, and waits
/// for the device. Memory that caches keep for the queue ([`Self::downgrade`]) goes to the device's
/// shared free list once the work is done ([`Pool::release`] frees it).
#[derive(Clone, Debug)]
pub struct Queue {
    id: u64,
    pool: Pool,
    for_graphs: bool,
}

/// A queue as caches hold it: its memory, without a claim that somebody queues work on it.
#[derive(Clone, Debug)]
pub struct WeakQueue(Queue);

impl WeakQueue {
    /// That of [`Queue::id`].
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Whether nobody holds the queue and its work is done.
    pub fn is_finished(&self) -> bool {
        self.0.pool.is_finished()
    }

    /// Moves the free memory of a finished queue to the free list that the device's queues share.
    pub fn release(&self) {
        self.0.pool.release_finished();
    }
}

impl Queue {
    pub(crate) fn new(stream: Stream) -> Self {
        Self::of(Pool::new(Arc::new(stream)))
    }

    fn of(pool: Pool) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), pool, for_graphs: false }
    }

    /// Another queue on the same stream, with memory of its own, for work that is recorded in graphs and for
    /// that work's first, unrecorded run. What plans make of versions of captured buffers may be made on
    /// it while it is recorded: the graph makes it again in the same memory whenever it runs. So a version
    /// that a recorded call is given is given to no call outside of that recording.
    ///
    /// Memory that is taken on it and given back stays its own, since graphs use it. A graph is good as long
    /// as the same of it is taken as when the graph was recorded ([`Pool::fingerprint`]): then whatever it reads
    /// there is taken, or was written by the graph before.
    pub fn for_graphs(&self) -> Self {
        Self { for_graphs: true, ..Self::of(self.pool.for_graphs()) }
    }

    /// Refuses to make what later calls would take for made while it is only recorded, but where nothing
    /// but the graph uses it ([`Self::for_graphs`]).
    ///
    /// # Errors
    /// When the queue's work is recorded at present.
    pub fn refuse_made_recorded(&self, doing: &str) -> Result<(), GpuError> {
        if self.for_graphs { Ok(()) } else { self.stream().refuse_recording(doing) }
    }

    /// Another queue on the same stream, all of whose device memory is `allocator`'s: scratch of
    /// kernels, workspaces of products, what plans keep for the queue. Host memory that copies go
    /// through stays the crate's own.
    pub fn with_allocator(&self, allocator: Arc<dyn Allocator>) -> Self {
        Self::of(Pool::with_allocator(self.pool.stream().clone(), allocator))
    }

    /// Differs from that of every other queue.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The queue for a cache, which must not keep it from being finished.
    pub fn downgrade(&self) -> WeakQueue {
        WeakQueue(Self { pool: self.pool.downgrade(), ..*self })
    }

    /// Memory for its work.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Where its work is queued.
    pub fn stream(&self) -> &Stream {
        self.pool.stream()
    }
}
