//! How far a command is: a bar on stderr, or plain lines now and then where stderr is no terminal;
//! and that it is at work, where it is not known how far.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Steps of one kind, of which it is known how many there are, or how many at most.
pub struct Progress {
    bar: ProgressBar,
    plain: bool,
    /// Goes before the time that is left.
    at_most: &'static str,
    /// Steps that were done before the first one that is told of.
    before: Option<usize>,
    began: Instant,
    said: Instant,
}

/// Between two drawings of a bar.
const TICK: Duration = Duration::from_millis(500);

/// Between two plain lines.
const EVERY: Duration = Duration::from_secs(20);

/// How long a command may say nothing.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// What takes long of a mask that bounds do not decide.
pub const COUNTING: &str = "counting the pairs that the mask lets through";

impl Progress {
    /// None of `all` steps is done.
    pub fn new(all: usize) -> Self {
        Self::of(all, "")
    }

    /// None of steps of which there may be fewer than expected is done.
    pub fn at_most() -> Self {
        Self::of(0, "at most ")
    }

    fn of(all: usize, at_most: &'static str) -> Self {
        let plain = !std::io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(Some(all as u64), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template(&format!(
            "{{bar:30}} {{pos}}/{{len}}  {{msg}}  {{per_sec}}  {{elapsed}} elapsed, {at_most}{{eta}} left"
        ));
        bar.set_style(style.expect("the template is valid"));
        bar.enable_steady_tick(TICK);
        let now = Instant::now();
        Self { bar, plain, at_most, before: None, began: now, said: now }
    }

    /// One step more is done, `what`; what `print` writes to the terminal does not disturb the bar.
    pub fn step<T>(&mut self, what: &str, print: impl FnOnce() -> T) -> T {
        let (done, all) = (self.bar.position() + 1, self.bar.length().unwrap_or_default());
        self.at(done as usize, all as usize, what);
        self.bar.suspend(print)
    }

    /// `done` of `all` steps are done, the last of them `what`.
    pub fn at(&mut self, done: usize, all: usize, what: &str) {
        self.bar.set_length(all as u64);
        let before = *self.before.get_or_insert_with(|| {
            // A run that goes on: what it did earlier took none of this time. The bar counts from the position at
            // its last tick, and is not ticked by hand while it ticks by itself.
            let before = done.saturating_sub(1);
            self.bar.disable_steady_tick();
            self.bar.set_position(before as u64);
            self.bar.tick();
            self.bar.reset_eta();
            self.bar.enable_steady_tick(TICK);
            before
        });
        self.bar.set_position(done as u64);
        self.bar.set_message(what.to_owned());
        if self.plain && self.said.elapsed() >= EVERY && done < all {
            self.said = Instant::now();
            let seconds = self.elapsed().as_secs_f64();
            let rate = (done - before) as f64 / seconds;
            let (left, at_most) = ((all - done) as f64 / rate, self.at_most);
            crate::output::tell!(
                "{done}/{all}  {what}  {rate:.1}/s  {seconds:.0} s elapsed, {at_most}{left:.0} s \
                 left"
            );
        }
    }

    /// Since the first step began.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }
}

/// Work that knows which share of it is done: a bar, or a line now and then, once it takes more than
/// [`PATIENCE`].
pub struct Gauge {
    doing: String,
    bar: Option<ProgressBar>,
    began: Instant,
    said: Option<Instant>,
}

impl Gauge {
    /// Nothing is done of what is `doing`.
    pub fn new(doing: &str) -> Self {
        Self { doing: doing.to_owned(), bar: None, began: Instant::now(), said: None }
    }

    /// A `share` is done, from 0 to 1, and the rest takes about as long as `left`, in seconds.
    pub fn at(&mut self, share: f64, left: f64) {
        let elapsed = self.began.elapsed();
        if elapsed < PATIENCE {
            return;
        }
        // An estimate that has run out may be below 0, and no -0 is shown.
        let left = left.max(0.0) + 0.0;
        let times = format!("{:.0} s elapsed, {left:.0} s left", elapsed.as_secs_f64());
        if std::io::stderr().is_terminal() {
            let bar = self.bar.get_or_insert_with(|| {
                let target = ProgressDrawTarget::stderr();
                let bar = ProgressBar::with_draw_target(Some(SHARES), target);
                let style = ProgressStyle::with_template("{bar:30} {percent} %  {msg}");
                bar.set_style(style.expect("the template is valid"));
                bar
            });
            bar.set_message(format!("{}  {times}", self.doing));
            bar.set_position((share * SHARES as f64) as u64);
        } else if self.said.is_none_or(|said| said.elapsed() >= EVERY) {
            self.said = Some(Instant::now());
            crate::output::tell!("{:.1} %  {}  {times}", 100.0 * share, self.doing);
        }
    }
}

/// Steps of a [`Gauge`]'s bar.
const SHARES: u64 = 10_000;

impl Drop for Gauge {
    fn drop(&mut self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
    }
}

/// Does `work`, of which nobody knows how long it takes, and says what is `doing` once it takes more
/// than `patience`.
pub fn waiting<T>(doing: &str, patience: Duration, work: impl FnOnce() -> T) -> T {
    let (done, wait) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            if wait.recv_timeout(patience) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            if !std::io::stderr().is_terminal() {
                crate::output::tell!("{doing} ...");
                return;
            }
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{spinner} {msg}  {elapsed} elapsed");
            bar.set_style(style.expect("the template is valid"));
            bar.set_message(doing.to_owned());
            let bar = bar.with_elapsed(patience);
            bar.enable_steady_tick(Duration::from_millis(100));
            // Until the other end is dropped.
            let _ = wait.recv();
            bar.finish_and_clear();
        });
        // The other end goes with the result, and with a panic too.
        let _done = done;
        work()
    })
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_before_counts_for_no_rate() {
        let mut progress = Progress::new(0);
        progress.at(1001, 2000, "a step");
        thread::sleep(Duration::from_millis(600));
        progress.at(1002, 2000, "a step");
        assert_eq!((progress.before, progress.bar.position()), (Some(1000), 1002));
        let rate = progress.bar.per_sec();
        assert!(rate < 100.0, "2 steps in 0.6 s, and {rate} a second");
    }

    #[test]
    fn work_is_waited_for_however_long_it_takes_and_a_panic_ends_it() {
        let patience = Duration::from_millis(5);
        assert_eq!(waiting("a short while", patience, || 3), 3);
        let slow = || {
            thread::sleep(10 * patience);
            4
        };
        assert_eq!(waiting("a long while", patience, slow), 4);
        let panics = || waiting("a while", patience, || panic!("on purpose"));
        assert!(std::panic::catch_unwind(panics).is_err());
    }
}
