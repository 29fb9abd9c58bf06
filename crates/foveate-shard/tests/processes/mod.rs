//! Ranks over TCP for tests, as threads that meet at a port of this host.

mod meeting;

use std::time::Duration;

use foveate_shard::ShardError;
use foveate_shard::collectives::{Collectives, Meeting, Rank, connect};
use meeting::meeting;

/// What `run_threads` does, over TCP.
pub fn run_tcp<T: Send>(
    ranks: usize,
    deadline: Duration,
    body: impl Fn(&Rank) -> Result<T, ShardError> + Sync,
) -> Result<Vec<T>, ShardError> {
    let meeting = meeting(ranks, deadline);
    let run = |rank: usize| {
        let world = connect(&Meeting { rank, ..meeting.clone() })?;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(&world)));
        result
            .unwrap_or_else(|panic| {
                let said = panic.downcast_ref::<&str>().copied().unwrap_or("no message");
                Err(ShardError::new(format!("it panicked: {said}")))
            })
            .inspect_err(|e| drop(world.abort(&e.to_string())))
    };
    let run = &run;
    let results: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("panics are caught")).collect()
    });
    // What ended all is what the ranks were told that did not find it.
    let errors =
        || results.iter().filter_map(|result| result.as_ref().err().map(|e| e.to_string()));
    match errors().find_map(|e| e.strip_prefix("aborted: ").map(str::to_owned)).or(errors().next())
    {
        Some(why) => Err(ShardError::new(why)),
        None => results.into_iter().collect(),
    }
}
