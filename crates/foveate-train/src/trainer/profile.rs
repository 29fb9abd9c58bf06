//! What the blocks of some steps did on the device, and the host meanwhile, as a trace that Chrome and
//! Perfetto show.

use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use foveate_nn::{BlockTime, COPY_IN, COPY_OUT};
use serde::Serialize;
use serde_json::json;

use crate::error::TrainError;
use crate::whole;

/// A profile that is to be taken, or is under way.
pub(super) struct Profile {
    steps: Range<u64>,
    /// None before its first step.
    began: Option<Instant>,
    events: Vec<Event>,
}

/// A complete event of the Trace Event Format; times are in microseconds.
#[derive(Serialize)]
struct Event {
    name: &'static str,
    ph: &'static str,
    ts: f64,
    dur: f64,
    pid: u32,
    tid: u32,
}

const HOST: u32 = 0;
const DEVICE: u32 = 1;
const COPIES_IN: u32 = 2;
const COPIES_OUT: u32 = 3;

impl Profile {
    /// Of these steps, counted from one.
    pub fn of(steps: Range<u64>) -> Self {
        Self { steps, began: None, events: Vec::new() }
    }

    /// Whether it begins with `step`, the next one; a run that is resumed may begin inside.
    pub fn begins_with(&self, step: u64) -> bool {
        self.began.is_none() && self.steps.contains(&step)
    }

    /// The device's times count from here.
    pub fn begin(&mut self) {
        self.began = Some(Instant::now());
    }

    /// Whether it has begun.
    pub fn is_under_way(&self) -> bool {
        self.began.is_some()
    }

    /// Whether it is under way and `step` was its last.
    pub fn ends_with(&self, step: u64) -> bool {
        self.began.is_some() && step + 1 >= self.steps.end
    }

    /// The host has done something since `since`.
    pub fn host(&mut self, name: &'static str, since: Instant) {
        if let Some(began) = self.began {
            let start = since.saturating_duration_since(began).as_secs_f64();
            self.push(name, HOST, start, since.elapsed().as_secs_f64());
        }
    }

    /// The device has run blocks, and copied beside them.
    pub fn device(&mut self, times: Vec<BlockTime>) {
        for BlockTime { block, start, seconds } in times {
            let thread = match block {
                COPY_IN => COPIES_IN,
                COPY_OUT => COPIES_OUT,
                _ => DEVICE,
            };
            self.push(block, thread, start, seconds);
        }
    }

    fn push(&mut self, name: &'static str, tid: u32, start: f64, seconds: f64) {
        let [ts, dur] = [start, seconds].map(|seconds| seconds * 1e6);
        self.events.push(Event { name, ph: "X", ts, dur, pid: 0, tid });
    }

    /// Writes the trace.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), TrainError> {
        let named = |tid: u32, name: &str| json!({ "ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": { "name": name } });
        let mut events = vec![named(HOST, "host"), named(DEVICE, "device")];
        for (thread, name) in [(COPIES_IN, "copies in"), (COPIES_OUT, "copies out")] {
            let any = self.events.iter().any(|event| event.tid == thread);
            events.extend(any.then(|| named(thread, name)));
        }
        events.extend(self.events.iter().map(|event| json!(event)));
        let trace = json!({ "displayTimeUnit": "ms", "traceEvents": events });
        whole::replace(file, trace.to_string().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_of_some_steps_becomes_a_trace_of_host_and_device() {
        let mut profile = Profile::of(3..5);
        let asked = [1, 2, 3, 4, 5].map(|step| profile.begins_with(step));
        assert_eq!(asked, [false, false, true, true, false]);
        profile.host("before it begins", Instant::now());
        assert!(!profile.ends_with(4));
        profile.begin();
        assert!(!profile.begins_with(4));
        profile.host("queue", Instant::now());
        profile.device(vec![BlockTime { block: "linear", start: 0.25, seconds: 0.5 }]);
        profile.device(vec![BlockTime { block: COPY_OUT, start: 0.5, seconds: 0.125 }]);
        assert_eq!([3, 4].map(|step| profile.ends_with(step)), [false, true]);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("profile.json");
        profile.write(&file).unwrap();
        let trace: serde_json::Value =
            serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let names: Vec<_> = events.iter().map(|event| event["name"].as_str().unwrap()).collect();
        let threads = ["thread_name"; 3];
        assert_eq!(names, [&threads[..], &["queue", "linear", "copy out"]].concat());
        assert_eq!(events[2]["args"]["name"], "copies out");
        let thread = |event: usize| events[event]["tid"].as_u64().unwrap();
        assert_eq!([2, 3, 4, 5].map(thread), [3, 0, 1, 3]);
        let block = &events[4];
        assert_eq!((&block["ts"], &block["dur"]), (&json!(250_000.0), &json!(500_000.0)));
    }
}
