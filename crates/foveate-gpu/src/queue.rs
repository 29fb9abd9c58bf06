//! Queues: a stream, and memory for the work on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Pool, Stream};

/// A stream and memory for its work. Cheap to clone.
///
/// Memory that was used on a queue is given out again on the same queue only, so nothing has to
/// wait for work to end before it drops its memory. A queue is gone when the last clone of it, of
/// its pool, and the last block from there are dropped: the driver frees its memory, and waits for
/// the device; what plans keep for the queue, and what they keep it from freeing, other queues get
/// once the work is done ([`Pool::release`] hands it back).
#[derive(Clone, Debug)]
pub struct Queue {
    id: u64,
    pool: Pool,
}

/// What is left of a queue when it is gone, and until then.
#[derive(Clone, Debug)]
pub struct Remains(Queue);

impl Remains {
    /// That of [`Queue::id`].
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Whether nobody holds the queue and its work is done.
    pub fn is_over(&self) -> bool {
        self.0.pool.is_over()
    }

    /// Leaves memory that nothing is kept in to other queues.
    pub fn leave(&self) {
        self.0.pool.leave();
    }
}

impl Queue {
    pub(crate) fn new(stream: Stream) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, pool: Pool::new(Arc::new(stream)) }
    }

    /// Differs from that of every other queue.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What is left of it when it is gone.
    pub fn remains(&self) -> Remains {
        Remains(Self { id: self.id, pool: self.pool.kept() })
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
