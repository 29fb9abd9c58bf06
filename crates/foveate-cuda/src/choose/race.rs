//! Which configuration is the fastest on the GPU that is there.
//!
//! The planner's model ranks without a GPU; the tuner times the first of its ranking on a plan's
//! own problem ([`crate::CudaPlan::tune`]), and [`Records`] keeps what it finds for plans to come.
//! Timing is a race in rounds (`race`): all run in turn, so that a clock that sinks is felt by
//! all, and who is clearly behind leaves before the longer rounds.

use std::path::PathBuf;

use crate::compile::config::{Kernel, Tiles};
use crate::error::CudaError;
use foveate_gpu::GpuErrorKind;

/// Candidates of a kernel that are timed if nobody says how many.
pub const CANDIDATES: usize = 12;

/// Runs of a round, and how much slower than the best so far one may be to stay for the next.
const ROUNDS: [(usize, f64); 3] = [(3, 1.25), (7, 1.05), (15, 1.0)];
/// What wins by less is no faster: two series of one kernel differ as much.
const MARGIN: f64 = 0.01;

/// How far the tuner is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// The kernel that is being tuned.
    pub kernel: Kernel,
    /// What is being done with it, `compiling` or `timing`.
    pub doing: &'static str,
    /// Compilations or runs that are done, over all kernels.
    pub done: usize,
    /// Those that there will be at most.
    pub of: usize,
    /// Microseconds of the last run.
    pub us: Option<f64>,
}

/// What came of one kernel.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Tuned {
    /// The kernel.
    pub kernel: Kernel,
    /// What the planner chose before.
    pub planned: Tiles,
    /// Microseconds of a pass with it; `None` when it could not run.
    pub planned_us: Option<f64>,
    /// What plans choose from now on, and microseconds of a pass with it; `None` when nothing
    /// could run, and nothing was recorded.
    pub best: Option<(Tiles, f64)>,
    /// Median microseconds of a pass with each candidate, the fastest first; those that left early
    /// ran fewer times.
    pub timed: Vec<(Tiles, f64)>,
    /// Candidates that were not timed, and why.
    pub skipped: Vec<(Tiles, String)>,
}

/// What came of tuning a plan.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Tuning {
    /// Each kernel that has tiles to choose.
    pub kernels: Vec<Tuned>,
    /// The folder of the records.
    pub folder: Option<PathBuf>,
    /// Why records could not be written there.
    pub trouble: Option<String>,
}

/// The end of a race.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finish {
    /// The fastest, or the first if no other is faster by more than runs differ.
    pub winner: usize,
    /// Median of each by its number, `None` for those that could not run.
    pub medians: Vec<Option<f64>>,
    /// Those that could not run, and why.
    pub skipped: Vec<(usize, String)>,
}

/// Runs `count` candidates against each other. `time` runs one of them once and gives its
/// microseconds; the first run of each is not counted. The first candidate, what would run
/// otherwise, stays to the end, so that the winner has been measured beside it.
///
/// `None` when nothing could run.
///
/// # Errors
/// The first of `time`, except [`GpuErrorKind::OutOfMemory`], for which a candidate is skipped.
pub(crate) fn race(
    count: usize,
    mut time: impl FnMut(usize) -> Result<f64, CudaError>,
) -> Result<Option<Finish>, CudaError> {
    let mut times = vec![Vec::new(); count];
    let mut skipped = Vec::new();
    let mut running: Vec<usize> = Vec::new();
    for i in 0..count {
        match time(i) {
            Ok(_) => running.push(i),
            Err(e) if matches!(e.gpu(), Some(GpuErrorKind::OutOfMemory { .. })) => {
                skipped.push((i, e.to_string()));
            }
            Err(e) => return Err(e),
        }
    }
    let Some(&first) = running.first() else { return Ok(None) };
    for (runs, behind) in ROUNDS {
        for _ in 0..runs {
            for &i in &running {
                times[i].push(time(i)?);
            }
        }
        let best = running.iter().map(|&i| median(&times[i])).fold(f64::INFINITY, f64::min);
        running.retain(|&i| i == first || median(&times[i]) <= best * behind);
    }
    let medians: Vec<_> = times.iter().map(|t| (!t.is_empty()).then(|| median(t))).collect();
    let last = |&i: &usize| median(&times[i]);
    let fastest = running.iter().copied().min_by(|a, b| last(a).total_cmp(&last(b)));
    let fastest = fastest.expect("the first stays to the end");
    let clear = last(&fastest) < last(&first) * (1.0 - MARGIN);
    Ok(Some(Finish { winner: if clear { fastest } else { first }, medians, skipped }))
}

/// Runs that a race of `count` takes at most.
pub(crate) fn most_runs(count: usize) -> usize {
    count * (1 + ROUNDS.iter().map(|(runs, _)| runs).sum::<usize>())
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels of these times, which every third run takes a third longer, and the runs of each.
    fn run(true_us: &[f64]) -> (Finish, Vec<usize>) {
        let mut runs = vec![0usize; true_us.len()];
        let finish = race(true_us.len(), |i| {
            runs[i] += 1;
            // The first run of anything is slow.
            let cold = if runs[i] == 1 { 50.0 } else { 1.0 };
            Ok(true_us[i] * cold * if runs[i].is_multiple_of(3) { 1.33 } else { 1.0 })
        });
        (finish.unwrap().unwrap(), runs)
    }

    #[test]
    fn the_fastest_wins_and_the_slow_leave_early() {
        let (finish, runs) = run(&[10.0, 20.0, 9.9, 8.0, 8.2]);
        assert_eq!(finish.winner, 3);
        assert_eq!(finish.medians, [10.0, 20.0, 9.9, 8.0, 8.2].map(Some));
        assert_eq!(runs[3], 26, "every round and the first run");
        assert!(runs[1] < runs[4] && runs[4] <= runs[3], "{runs:?}");
        assert_eq!(runs[0], runs[3], "the planner's choice stays");
        assert!(runs.iter().sum::<usize>() < most_runs(5));
    }

    #[test]
    fn the_planners_choice_stays_unless_another_is_clearly_faster() {
        assert_eq!(run(&[10.0, 9.95, 9.93]).0.winner, 0);
        assert_eq!(run(&[10.0, 9.95, 9.85]).0.winner, 2);
        assert_eq!(run(&[5.0]).0.winner, 0);
    }

    #[test]
    fn what_does_not_fit_in_memory_is_skipped_and_a_hang_ends_the_race() {
        let full = || -> CudaError {
            GpuErrorKind::OutOfMemory { bytes: 1 << 30, free: 1 << 20, total: 1 << 33 }.into()
        };
        let finish = race(3, |i| if i == 0 { Err(full()) } else { Ok(3.0 - i as f64) });
        let finish = finish.unwrap().unwrap();
        assert_eq!((finish.winner, finish.medians[0]), (2, None));
        assert_eq!(finish.skipped, [(0, full().to_string())]);
        assert_eq!(race(2, |_| Err(full())).unwrap(), None);
        assert_eq!(race(0, |_| Ok(1.0)).unwrap(), None);
        let mut runs = 0;
        let hung = race(2, |_| {
            runs += 1;
            let waiting = "a kernel that is tuned".to_owned();
            Err(GpuErrorKind::Timeout { waiting, seconds: 20.0, launches: String::new() }.into())
        });
        assert!(hung.unwrap_err().to_string().starts_with("a kernel that is tuned did not"));
        assert_eq!(runs, 1);
    }
}
