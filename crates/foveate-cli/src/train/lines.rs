//! Progress as lines, where stderr is no terminal: whoever reads a log sees that the run is alive, and
//! at what it is.
//!
//! A thread of its own writes them, as a step, a save or the reading of documents may take minutes.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The longest time between two lines.
pub const LIVELY: Duration = Duration::from_secs(20);

/// What takes less is not worth a word beside how far the run is.
const BRIEF: Duration = Duration::from_secs(5);

/// A share, as a reader sees it.
pub fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

enum Said {
    /// A line for now.
    Now(String),
    /// How far the run is, and what is under way: said when it lasts.
    Doing(String, &'static str),
    /// How far that is.
    Share(f64),
}

/// Where lines go.
pub struct Lines {
    to: Option<Sender<Said>>,
    writer: Option<JoinHandle<()>>,
}

impl Lines {
    /// Lines that `print` writes, at least one in every stretch of `every`.
    pub fn new(every: Duration, print: impl Fn(&str) + Send + 'static) -> Self {
        let (to, said) = mpsc::channel();
        let writer = thread::spawn(move || write(&said, every, &print));
        Self { to: Some(to), writer: Some(writer) }
    }

    /// Writes a line.
    pub fn say(&self, line: String) {
        self.send(Said::Now(line));
    }

    /// The run is as far as `status` says, and `what` is under way from now on.
    pub fn doing(&self, status: String, what: &'static str) {
        self.send(Said::Doing(status, what));
    }

    /// A `share` of what is under way is done, from 0 to 1.
    pub fn share(&self, share: f64) {
        self.send(Said::Share(share));
    }

    fn send(&self, said: Said) {
        if let Some(to) = &self.to {
            // A writer that has panicked can say nothing more.
            let _ = to.send(said);
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.to = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

fn write(said: &Receiver<Said>, every: Duration, print: &dyn Fn(&str)) {
    let (mut status, mut doing, mut done) = (String::new(), "", None);
    let (mut since, mut last) = (Instant::now(), Instant::now());
    loop {
        match said.recv_timeout(every.saturating_sub(last.elapsed())) {
            Ok(Said::Now(line)) => {
                print(&line);
                last = Instant::now();
            }
            Ok(Said::Doing(far, what)) => {
                (status, doing, done, since) = (far, what, None, Instant::now());
            }
            Ok(Said::Share(share)) => done = Some(share),
            Err(RecvTimeoutError::Timeout) => {
                let seconds = since.elapsed().as_secs_f64();
                let share = done.map_or(String::new(), |share| format!(" {}", percent(share)));
                let what = format!("{doing}{share} ({seconds:.0} s so far)");
                print(&match (status.is_empty(), since.elapsed() < BRIEF.min(every)) {
                    (true, _) => what,
                    (false, true) => status.clone(),
                    (false, false) => format!("{status}; {what}"),
                });
                last = Instant::now();
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lasts_is_said_again_and_again() {
        let (to, from) = mpsc::channel();
        let every = Duration::from_millis(20);
        let lines = Lines::new(every, move |line| to.send(line.to_owned()).unwrap());
        lines.doing(String::new(), "reading");
        // What came before a line that begins with `wanted`, which may be any number of others.
        let until = |wanted: &str| {
            let heard = || from.recv_timeout(Duration::from_secs(60)).unwrap();
            let lines = std::iter::repeat_with(heard);
            lines.take_while(|line| !line.starts_with(wanted)).collect::<Vec<_>>()
        };
        until("reading (");
        until("reading (");
        lines.doing("step 3/9".to_owned(), "saving");
        lines.say("a line".to_owned());
        until("a line");
        assert_eq!(until("step 3/9; saving ("), [""; 0]);
        lines.share(0.25);
        until("step 3/9; saving 25 % (");
        lines.doing(String::new(), "evaluating");
        until("evaluating (");
        drop(lines);
        // Ends only when the writer has.
        assert!(!from.iter().any(|line| line == "a line"));
    }
}
