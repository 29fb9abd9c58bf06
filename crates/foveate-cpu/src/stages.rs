//! The time that each stage of a call takes.
//!
//! Each thread has a [`Clock`]; [`Clock::lap`] ends a stage. Without
//! [`CpuOptions::profile`](crate::CpuOptions::profile) a lap is a test of one word.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time spent in each stage, summed over threads and calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stages {
    /// Products of tiles.
    pub products: Duration,
    /// The online softmax and its backward.
    pub softmax: Duration,
    /// Masks, scores, dropout and their derivatives.
    pub mods: Duration,
    /// Conversion and packing of operands, and the epilogue.
    pub packing: Duration,
    /// Wall time of the calls times their threads.
    pub total: Duration,
}

/// A stage of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// [`Stages::products`].
    Products,
    /// [`Stages::softmax`].
    Softmax,
    /// [`Stages::mods`].
    Mods,
    /// [`Stages::packing`].
    Packing,
}

impl Stages {
    /// The time outside of stages: threads without tasks, and the division of calls into tasks.
    pub fn idle(&self) -> Duration {
        let busy = self.products + self.softmax + self.mods + self.packing;
        self.total.saturating_sub(busy)
    }

    fn of(&mut self, stage: Stage) -> &mut Duration {
        match stage {
            Stage::Products => &mut self.products,
            Stage::Softmax => &mut self.softmax,
            Stage::Mods => &mut self.mods,
            Stage::Packing => &mut self.packing,
        }
    }

    fn add(&mut self, other: &Self) {
        for stage in [Stage::Products, Stage::Softmax, Stage::Mods, Stage::Packing] {
            *self.of(stage) += *other.clone().of(stage);
        }
        self.total += other.total;
    }
}

/// The stages of a plan's calls since they were last asked for.
#[derive(Debug, Default)]
pub struct Profile(Mutex<Stages>);

impl Profile {
    /// The sums so far; they start again from zero.
    pub fn take(&self) -> Stages {
        std::mem::take(&mut self.0.lock().unwrap_or_else(|e| e.into_inner()))
    }

    fn add(&self, stages: &Stages) {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).add(stages);
    }

    /// Runs a call and adds its length times its threads.
    pub fn call<T>(&self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = call();
        let total = start.elapsed() * crate::threads::count() as u32;
        self.add(&Stages { total, ..Stages::default() });
        result
    }
}

/// A thread's stop watch, which adds its sums to the profile when it is dropped.
#[derive(Debug)]
pub struct Clock<'a>(Option<Running<'a>>);

#[derive(Debug)]
struct Running<'a> {
    profile: &'a Profile,
    sums: Stages,
    since: Instant,
}

impl<'a> Clock<'a> {
    /// A clock that counts for `profile`, if there is one.
    pub fn new(profile: Option<&'a Profile>) -> Self {
        let running = |profile| Running { profile, sums: Stages::default(), since: Instant::now() };
        Self(profile.map(running))
    }

    /// Begins a stage. The time since the last stage ended is not counted.
    #[inline]
    pub fn start(&mut self) {
        if let Some(running) = &mut self.0 {
            running.since = Instant::now();
        }
    }

    /// Ends `stage` and begins the next.
    #[inline]
    pub fn lap(&mut self, stage: Stage) {
        if let Some(running) = &mut self.0 {
            let now = Instant::now();
            *running.sums.of(stage) += now - running.since;
            running.since = now;
        }
    }
}

impl Drop for Clock<'_> {
    fn drop(&mut self) {
        if let Some(running) = &self.0 {
            running.profile.add(&running.sums);
        }
    }
}
