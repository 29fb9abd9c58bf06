//! Ranks that are threads of one process.
//!
//! All messages go through one inbox: a group of threads is for tests, for planning and for CPUs,
//! where copies cost little beside attention.

use std::sync::Arc;
use std::time::Duration;

use super::inbox::{Inbox, Sent, Way, Why};
use super::rank::{Rank, Wire};
use crate::error::{ShardError, refused};

impl Wire for Inbox {
    fn inbox(&self) -> &Inbox {
        self
    }

    fn send(&self, way: Way, sent: Sent) -> Result<(), ShardError> {
        self.put(way, sent);
        Ok(())
    }

    fn abort(&self, why: Why) {
        Inbox::abort(self, why, true);
    }

    fn leave(&self, rank: usize) {
        Inbox::leave(self, rank);
    }
}

/// `ranks` ranks for threads of this process, in order, none of which waits longer than `deadline` for
/// another. Each belongs to one thread; a rank that is dropped has left.
pub fn thread_ranks(ranks: usize, deadline: Duration) -> Vec<Rank> {
    of_inbox(&Arc::new(Inbox::new(ranks, deadline)), ranks)
}

fn of_inbox(inbox: &Arc<Inbox>, ranks: usize) -> Vec<Rank> {
    let meeting = super::meeting::identity();
    let rank = |rank| Rank::of_all(Arc::clone(inbox) as _, [rank, ranks], meeting);
    (0..ranks).map(rank).collect()
}

/// Runs `body` on `ranks` threads, each with its rank, and returns what each gave in order of rank.
/// No rank waits longer than `deadline` for another.
///
/// ```
/// use std::time::Duration;
/// use foveate_shard::collectives::{Collectives, run_threads};
///
/// let sums = run_threads(3, Duration::from_secs(5), |rank| {
///     let mut values = [rank.rank() as f32];
///     rank.all_reduce(&mut values)?;
///     Ok(values[0])
/// })?;
/// assert_eq!(sums, [3.0, 3.0, 3.0]);
/// # Ok::<(), foveate_shard::ShardError>(())
/// ```
///
/// # Errors
/// What the first rank that failed by itself gave, or that it panicked.
pub fn run_threads<T: Send>(
    ranks: usize,
    deadline: Duration,
    body: impl Fn(&Rank) -> Result<T, ShardError> + Sync,
) -> Result<Vec<T>, ShardError> {
    let inbox = Arc::new(Inbox::new(ranks, deadline));
    let run = |(rank, world): (usize, Rank)| {
        let body = std::panic::AssertUnwindSafe(|| body(&world));
        let result = std::panic::catch_unwind(body).unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            refused(format!("it panicked: {said}"))
        });
        if let Err(error) = &result {
            inbox.abort(Why::wrong(format!("rank {rank}: {error}")), true);
        }
        result
    };
    let run = &run;
    let results: Vec<_> = std::thread::scope(|scope| {
        let worlds = of_inbox(&inbox, ranks).into_iter().enumerate();
        let threads: Vec<_> = worlds.map(|world| scope.spawn(move || run(world))).collect();
        let join = |t: std::thread::ScopedJoinHandle<'_, _>| t.join().expect("panics are caught");
        threads.into_iter().map(join).collect()
    });
    let why = |error| inbox.aborted().map_or(error, Why::error);
    results.into_iter().map(|result| result.map_err(why)).collect()
}
