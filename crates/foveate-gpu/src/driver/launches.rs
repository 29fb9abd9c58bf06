//! What a stream was last given to run. A failure of a device names no kernel, and comes when somebody waits: it
//! is of a launch that was not known to be done by then, and the first of these is where to look.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::sync::lock;

/// Launches that are kept of a stream, and names of them that an error has.
const KEPT: usize = 256;
const NAMED: usize = 8;

/// The last launches of a stream.
#[derive(Debug, Default)]
pub(super) struct Launches(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Launches so far, and those of them that are known to be done: the first ones.
    queued: u64,
    done: u64,
    /// Of the last launches, but those that are done.
    names: VecDeque<Arc<str>>,
}

impl Launches {
    /// Notes a launch.
    pub fn note(&self, name: &Arc<str>) {
        let mut state = lock(&self.0);
        if state.names.len() == KEPT {
            state.names.pop_front();
        }
        state.names.push_back(name.clone());
        state.queued += 1;
    }

    /// Launches so far.
    pub fn queued(&self) -> u64 {
        lock(&self.0).queued
    }

    /// Notes that the first `count` launches are done.
    pub fn done(&self, count: u64) {
        let mut state = lock(&self.0);
        if count > state.done {
            state.done = count.min(state.queued);
            let left = state.names.len().min((state.queued - state.done) as usize);
            let over = state.names.len() - left;
            state.names.drain(..over);
        }
    }

    /// Takes back all but the first `count` launches, which were recorded and do not run: their names.
    pub fn take_back(&self, count: u64) -> String {
        let mut state = lock(&self.0);
        let back = state.queued.saturating_sub(count);
        let kept = state.names.len().saturating_sub(back as usize);
        let names = state.names.split_off(kept);
        state.queued -= back;
        list(names.iter())
    }

    /// Which of the first `count` launches may not be done, the earliest first; nothing where all are.
    pub fn unfinished(&self, count: u64) -> String {
        let state = lock(&self.0);
        let open = count.min(state.queued).saturating_sub(state.done);
        let forgotten = (state.queued - state.done).saturating_sub(state.names.len() as u64);
        let names = list(state.names.iter().take(open.saturating_sub(forgotten) as usize));
        match (open, forgotten) {
            (0, _) => String::new(),
            _ if names.is_empty() => format!("one of its last {open} launches"),
            (1, _) => format!("its launch of {names}"),
            (_, 0) => format!("one of its last {open} launches ({names})"),
            _ => format!("one of its last {open} launches (at the end {names})"),
        }
    }
}

/// Different names in their order, and how often each is there.
fn list<'a>(all: impl Iterator<Item = &'a Arc<str>>) -> String {
    let mut names: Vec<(&str, usize)> = Vec::new();
    for name in all {
        match names.iter_mut().find(|(known, _)| *known == &**name) {
            Some((_, times)) => *times += 1,
            None => names.push((name, 1)),
        }
    }
    let named = names.iter().take(NAMED).map(|(name, times)| match times {
        1 => (*name).to_owned(),
        _ => format!("{name}, {times} times"),
    });
    let more = names.len().saturating_sub(NAMED);
    let more = (more > 0).then(|| format!("{more} others"));
    named.chain(more).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_not_be_done_is_named_in_its_order_until_it_is() {
        let launches = Launches::default();
        assert_eq!(launches.unfinished(0), "");
        let note = |name: &str| launches.note(&name.into());
        ["delta", "backward", "dq", "backward"].into_iter().for_each(note);
        assert_eq!(launches.unfinished(1), "its launch of delta");
        let all = "one of its last 4 launches (delta; backward, 2 times; dq)";
        assert_eq!(launches.unfinished(launches.queued()), all);
        launches.done(2);
        launches.done(1);
        assert_eq!(launches.unfinished(2), "");
        assert_eq!(launches.unfinished(3), "its launch of dq");
        assert_eq!(launches.unfinished(4), "one of its last 2 launches (dq; backward)");
        launches.done(4);
        assert_eq!(launches.unfinished(4), "");
        ["forward", "combine", "forward"].into_iter().for_each(note);
        assert_eq!(launches.take_back(5), "combine; forward");
        assert_eq!(launches.unfinished(7), "its launch of forward");
    }

    #[test]
    fn what_is_kept_and_said_is_bounded() {
        let launches = Launches::default();
        for i in 0..1000 {
            launches.note(&format!("kernel {}", i % 10).into());
        }
        assert_eq!(lock(&launches.0).names.len(), KEPT);
        let said = launches.unfinished(1000);
        let start = "one of its last 1000 launches (at the end kernel 4, 26 times; ";
        assert!(said.starts_with(start) && said.ends_with("; 2 others)"), "{said}");
        assert_eq!(launches.unfinished(700), "one of its last 700 launches");
        launches.done(990);
        let said = launches.unfinished(1000);
        assert!(said.starts_with("one of its last 10 launches (kernel 0; kernel 1; "), "{said}");
    }
}
