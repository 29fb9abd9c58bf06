//! How far a command is: a bar on stderr, or plain lines now and then where stderr is no terminal.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Steps of one kind, of which it is known how many there are, or how many at most.
pub struct Progress {
    bar: ProgressBar,
    plain: bool,
    /// Goes before the time that is left.
    at_most: &'static str,
    began: Instant,
    said: Instant,
}

/// Between two plain lines.
const EVERY: Duration = Duration::from_secs(20);

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
        bar.enable_steady_tick(Duration::from_millis(500));
        let now = Instant::now();
        Self { bar, plain, at_most, began: now, said: now }
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
        self.bar.set_position(done as u64);
        self.bar.set_message(what.to_owned());
        if self.plain && self.said.elapsed() >= EVERY && done < all {
            self.said = Instant::now();
            let seconds = self.elapsed().as_secs_f64();
            let rate = done as f64 / seconds;
            let (left, at_most) = ((all - done) as f64 / rate, self.at_most);
            eprintln!(
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

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
