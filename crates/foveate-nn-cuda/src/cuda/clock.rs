//! Device time of kinds of blocks, by events. Events cost the queue some time, so they are recorded in
//! some steps only, and nothing waits for them: they are read with the totals of their step.

use foveate_gpu::GpuError;
use foveate_gpu::driver::{Event, Stream};
use foveate_nn::Sums;

/// A step of so many is measured.
const EVERY: u64 = 16;

/// What time is taken of.
#[derive(Clone, Copy, Debug)]
pub(super) enum Timed {
    Attention,
    Linear,
    Loss,
    Optimizer,
}

/// Events of a step, and times of an earlier one.
#[derive(Debug, Default)]
pub(super) struct Clock {
    steps: u64,
    marks: Vec<Mark>,
    /// Events that can be recorded again.
    free: Vec<Event>,
    /// Seconds of the last step that was measured.
    last: Sums,
}

#[derive(Debug)]
struct Mark {
    step: u64,
    kind: Timed,
    begin: Event,
    end: Option<Event>,
}

impl Clock {
    /// A new step; its number.
    pub fn step(&mut self) -> u64 {
        self.steps += 1;
        self.steps
    }

    /// Whether the present step is measured. The first is not: its kernels are compiled between
    /// events.
    fn measures(&self) -> bool {
        self.steps % EVERY == 2
    }

    fn event(&mut self, stream: &Stream) -> Result<Event, GpuError> {
        let event = self.free.pop().map_or_else(|| Event::new(stream.device()), Ok)?;
        event.record(stream)?;
        Ok(event)
    }

    /// What is queued from here on is of `kind`, until [`Self::end`].
    pub fn begin(&mut self, stream: &Stream, kind: Timed) -> Result<(), GpuError> {
        if self.measures() {
            let begin = self.event(stream)?;
            self.marks.push(Mark { step: self.steps, kind, begin, end: None });
        }
        Ok(())
    }

    /// The end of what was begun last.
    pub fn end(&mut self, stream: &Stream) -> Result<(), GpuError> {
        if self.measures() && self.marks.last().is_some_and(|mark| mark.end.is_none()) {
            let end = self.event(stream)?;
            self.marks.last_mut().expect("there is one").end = Some(end);
        }
        Ok(())
    }

    /// The times of step `step`, all of whose work is done; where it was not measured, those of the
    /// last one that was.
    pub fn read(&mut self, step: u64) -> Result<Sums, GpuError> {
        let own: Vec<Mark> = self.marks.extract_if(.., |mark| mark.step == step).collect();
        if !own.is_empty() {
            self.last = Sums::default();
        }
        for Mark { kind, begin, end, .. } in own {
            let Some(end) = end else { continue };
            let seconds = f64::from(end.ms_since(&begin)?) / 1e3;
            let sum = match kind {
                Timed::Attention => &mut self.last.attention_seconds,
                Timed::Linear => &mut self.last.linear_seconds,
                Timed::Loss => &mut self.last.loss_seconds,
                Timed::Optimizer => &mut self.last.optimizer_seconds,
            };
            *sum += seconds;
            self.free.extend([begin, end]);
        }
        Ok(self.last)
    }
}
