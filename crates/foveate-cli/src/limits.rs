//! What a command expects to take, before it does: a refusal with the numbers, and a way to insist.
//!
//! A command foresees memory from its arguments, and time from how far it has come. Past
//! [`MODEST_BYTES`] or [`MODEST_SECONDS`] it stops, unless `--insist` is given; what the machine has
//! not got is refused in any case, so that no argument ends in an abort.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use foveate::mask::Progress;
use foveate_train::machine::{self, Free};

use crate::failure::Failure;
use crate::output::bytes;
use crate::progress::{Gauge, PATIENCE};

/// Memory that a command takes without being asked twice.
const MODEST_BYTES: f64 = (1u64 << 30) as f64;
/// Time that a command takes without being asked twice.
const MODEST_SECONDS: f64 = 60.0;

/// Whether a command may take much.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Limits {
    /// Go on where more than 1 GiB of memory or a minute is expected
    #[arg(long)]
    pub insist: bool,
}

/// What something is expected to take in all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Need {
    /// Memory in bytes.
    pub bytes: f64,
    /// Time in seconds.
    pub seconds: f64,
}

impl Limits {
    /// Refuses what takes too much; `what` takes it, and `instead` says what takes less.
    ///
    /// # Errors
    /// When it does.
    pub fn admit(self, what: &str, need: Need, instead: &str) -> Result<(), Failure> {
        self.admit_within(what, need, instead, machine::free())
    }

    fn admit_within(
        self,
        what: &str,
        need: Need,
        instead: &str,
        free: Option<Free>,
    ) -> Result<(), Failure> {
        let takes = format!("{what} takes about {}", bytes(need.bytes.round()));
        if let Some(free) = free.filter(|free| need.bytes > free.bytes as f64) {
            let message = format!("{takes}, but {} {}", free.by, bytes(free.bytes as f64));
            return Err(Failure::usage(message).help(instead));
        }
        if self.insist || (need.bytes <= MODEST_BYTES && need.seconds <= MODEST_SECONDS) {
            return Ok(());
        }
        let message = match need.seconds > MODEST_SECONDS {
            true => format!("{takes} and {}", time(need.seconds)),
            false => takes,
        };
        Err(Failure::usage(message).help(format!("{instead}, or give --insist")))
    }

    /// Does work that tells how far it is, with a bar once it takes long, and breaks it off when it
    /// is expected to take too much. `held` is what is in memory beside it, in bytes.
    ///
    /// # Errors
    /// What [`Self::admit`] says.
    pub fn watched<T>(
        self,
        what: &str,
        held: f64,
        instead: &str,
        work: impl FnOnce(&mut dyn FnMut(Progress) -> ControlFlow<()>) -> Option<T>,
    ) -> Result<T, Failure> {
        let (mut forecast, mut gauge, mut refused) = (Forecast::new(), Gauge::new(what), None);
        let done = work(&mut |progress| {
            let (mut need, elapsed) = (forecast.need(progress), forecast.elapsed());
            gauge.at(progress.share(), need.seconds - elapsed.as_secs_f64());
            if elapsed < PATIENCE {
                // The beginning of a mask may be unlike the rest of it.
                need = Need { bytes: progress.bytes as f64, seconds: 0.0 };
            }
            need.bytes += held;
            match self.admit(what, need, instead) {
                Ok(()) => ControlFlow::Continue(()),
                Err(failure) => {
                    refused = Some(failure);
                    ControlFlow::Break(())
                }
            }
        });
        match (done, refused) {
            (Some(done), _) => Ok(done),
            (None, refused) => Err(refused.expect("only a refusal breaks the work off")),
        }
    }
}

/// Foresees what work takes in all from how far it has come.
///
/// The share of tiles that is decided is not the share of the work: along a diagonal, work follows
/// the root of it, for the corners beside the diagonal are decided at once. So the power of the
/// share that time has followed until now is taken to hold for the rest, and of memory the power
/// that memory has followed: on a machine at work, time follows what else runs.
pub struct Forecast {
    began: Instant,
    /// What had been done some time ago.
    early: Option<Early>,
}

/// How far work was: the share that was done, and what it had taken.
#[derive(Clone, Copy)]
struct Early {
    share: f64,
    need: Need,
}

/// When [`Forecast`] first looks, in seconds, and by how much later it foresees.
const EARLY: f64 = 0.05;
const LATER: f64 = 4.0;

impl Forecast {
    /// The work begins now.
    pub fn new() -> Self {
        Self { began: Instant::now(), early: None }
    }

    /// Since the work began.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// What the work takes in all; what it has taken, where it is too early to tell.
    pub fn need(&mut self, progress: Progress) -> Need {
        self.need_after(progress, self.elapsed().as_secs_f64())
    }

    fn need_after(&mut self, progress: Progress, seconds: f64) -> Need {
        let (share, bytes, base) =
            (progress.share(), progress.bytes as f64, progress.base_bytes as f64);
        let so_far = Need { bytes, seconds };
        if progress.done == 0 || seconds < EARLY {
            return so_far;
        }
        let early = *self.early.get_or_insert(Early { share, need: so_far });
        if seconds < LATER * early.need.seconds || share <= early.share {
            return so_far;
        }
        // What has taken nothing at first grows as the share does.
        let growth = |then: f64, now: f64| {
            let followed = (now / then).ln() / (share / early.share).ln();
            let power = if then > 0.0 { followed.clamp(0.3, 1.0) } else { 1.0 };
            share.powf(-power)
        };
        Need {
            bytes: base + (bytes - base) * growth(early.need.bytes - base, bytes - base),
            seconds: seconds * growth(early.need.seconds, seconds),
        }
    }
}

/// Seconds for people.
fn time(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} minutes", s / 60.0),
        s if s < 48.0 * 3600.0 => format!("{:.0} hours", s / 3600.0),
        s => format!("{:.0} days", s / 86400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: f64 = (1u64 << 30) as f64;

    fn said(insist: bool, bytes: f64, seconds: f64) -> Option<String> {
        let need = Need { bytes, seconds };
        let free = Free { bytes: 8 << 30, by: "the machine has free" };
        let told = Limits { insist }.admit_within("it", need, "take less", Some(free));
        told.err().map(|e| e.message())
    }

    #[test]
    fn what_takes_much_is_refused_unless_one_insists_and_what_is_not_there_always() {
        assert_eq!(said(false, GIB, 60.0), None);
        assert_eq!(said(false, 2.0 * GIB, 1.0).unwrap(), "it takes about 2.0 GiB");
        assert_eq!(said(false, 1024.0, 660.0).unwrap(), "it takes about 1.0 KiB and 11 minutes");
        assert_eq!(said(true, 2.0 * GIB, 1e9), None);
        let gone = said(true, 9.0 * GIB, 1.0).unwrap();
        assert_eq!(gone, "it takes about 9.0 GiB, but the machine has free 8.0 GiB");
    }

    /// What is foreseen of work that takes `seconds` and `bytes` for a share, heard of at several
    /// shares.
    fn foreseen_of(seconds: impl Fn(f64) -> f64, bytes: impl Fn(f64) -> f64, until: u64) -> Need {
        let (mut forecast, mut need) = (Forecast::new(), Need::default());
        for done in (0..=until).step_by(10) {
            let share = done as f64 / 1e6;
            let bytes = 50 + bytes(share) as u64;
            let progress = Progress { done, all: 1_000_000, base_bytes: 50, bytes };
            need = forecast.need_after(progress, seconds(share));
        }
        need
    }

    fn foreseen(seconds: impl Fn(f64) -> f64, until: u64) -> Need {
        foreseen_of(&seconds, |share| seconds(share) * 1e3, until)
    }

    #[test]
    fn memory_and_time_are_foreseen_whether_work_follows_the_area_or_its_root() {
        let near = |found: f64, all: f64| (found / all - 1.0).abs() < 0.05;
        let even = foreseen(|share| 80.0 * share, 30_000);
        assert!(near(even.seconds, 80.0) && near(even.bytes, 80_050.0), "{even:?}");
        let diagonal = foreseen(|share| 8.0 * share.sqrt(), 60_000);
        assert!(near(diagonal.seconds, 8.0) && near(diagonal.bytes, 8050.0), "{diagonal:?}");
        let begun = foreseen(|share| 8.0 * share, 5_000);
        assert_eq!(begun, Need { bytes: 90.0, seconds: 0.04 });
    }

    #[test]
    fn memory_is_foreseen_by_itself_where_other_work_holds_the_clock_up() {
        // It waits for a processor at first.
        let seconds = |share: f64| if share < 1e-4 { 0.1 } else { 1.0 + 80.0 * share };
        let need = foreseen_of(seconds, |share| 8e10 * share, 30_000);
        assert!((need.bytes / 8e10 - 1.0).abs() < 0.05, "{need:?}");
        let nothing_at_first = |share: f64| if share < 0.01 { 0.0 } else { 1e9 * (share - 0.01) };
        let need = foreseen_of(|share| 80.0 * share, nothing_at_first, 30_000);
        assert!((0.5..1.0).contains(&(need.bytes / 1e9)), "{need:?}");
    }

    #[test]
    fn watched_work_is_broken_off_when_it_is_too_much_and_finished_when_not() {
        let work = |bytes| {
            move |watch: &mut dyn FnMut(Progress) -> ControlFlow<()>| {
                let progress = Progress { done: 0, all: 2, base_bytes: bytes, bytes };
                watch(progress).is_continue().then_some(7)
            }
        };
        let limits = Limits::default();
        assert_eq!(limits.watched("it", 0.0, "take less", work(5)).expect("it is little"), 7);
        let much = limits.watched("it", GIB, "take less", work(1 << 29)).unwrap_err();
        assert!(much.message().starts_with("it takes about 1.5 GiB"), "{}", much.message());
    }
}
