//! Device time of blocks, by events. Events cost the queue some time, so they are recorded in some
//! steps only, or while a profile is taken, and nothing waits for them: they are read with the totals
//! of their step. Copies between host and device are measured in profiles. What a block waits for
//! other ranks lies within its time, and is told beside it.

use foveate_gpu::GpuError;
use foveate_gpu::driver::{Event, Stream, default_timeout};
use foveate_nn::{BlockSeconds, BlockTime, KEYS_WAIT};

/// A step of so many is measured.
const EVERY: u64 = 16;

/// What time is taken of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timed {
    Add,
    BiasBackward,
    Embedding,
    HeadNorm,
    HeadNormBackward,
    Norm,
    AddNorm,
    Linear,
    Rope,
    Attention,
    Gate,
    Loss,
    CrossEntropy,
    LossBackward,
    NormBackward,
    NormAgain,
    LinearBackwardInput,
    LinearBackwardWeight,
    GateBackward,
    AttentionBackward,
    KeysSend,
    GradientsReturn,
    EmbeddingBackward,
    StreamWait,
    StreamSum,
    SumCopies,
    Clip,
    Update,
}

impl Timed {
    /// As the dry executor names blocks.
    fn name(self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::BiasBackward => "bias backward",
            Self::Embedding => "embed",
            Self::HeadNorm => "head_norm",
            Self::HeadNormBackward => "head_norm backward",
            Self::Norm => "rms_norm",
            Self::AddNorm => "add_rms_norm",
            Self::Linear => "linear",
            Self::Rope => "rope",
            Self::Attention => "attention",
            Self::Gate => "gated",
            Self::Loss => "loss",
            Self::CrossEntropy => "cross_entropy",
            Self::LossBackward => "loss backward",
            Self::NormBackward => "rms_norm backward",
            Self::NormAgain => "rms_norm again",
            Self::LinearBackwardInput => "linear backward, input",
            Self::LinearBackwardWeight => "linear backward, weight",
            Self::GateBackward => "gated backward",
            Self::AttentionBackward => "attention backward",
            Self::KeysSend => "keys send",
            Self::GradientsReturn => "gradients return",
            Self::EmbeddingBackward => "embed backward",
            Self::StreamWait => "stream wait",
            Self::StreamSum => "stream sum",
            Self::SumCopies => "sum copies",
            Self::Clip => "clip",
            Self::Update => "update",
        }
    }

    /// What its time is part of.
    fn part(self, seconds: &mut BlockSeconds) -> Option<&mut f64> {
        match self {
            Self::Attention | Self::AttentionBackward | Self::KeysSend | Self::GradientsReturn => {
                Some(&mut seconds.attention)
            }
            Self::Linear | Self::LinearBackwardInput | Self::LinearBackwardWeight => {
                Some(&mut seconds.linear)
            }
            Self::Loss | Self::CrossEntropy | Self::LossBackward => Some(&mut seconds.loss),
            Self::Clip | Self::Update => Some(&mut seconds.optimizer),
            _ => None,
        }
    }
}

/// Events of the steps under way, and times of earlier ones.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// Totals that were made, each of a step or of an evaluation.
    steps: u64,
    /// Steps whose update is queued.
    updated: u64,
    /// Whether what the last totals are of is measured.
    measured: bool,
    marks: Vec<Mark>,
    /// Events that can be recorded again.
    free: Vec<Event>,
    /// The beginning of the profile, while one is taken.
    origin: Option<Event>,
    /// Of the profile, beside the blocks: begun and ended on queues of their own.
    copies: Vec<Copied>,
    profiled: Vec<BlockTime>,
}

/// A copy between host and device.
#[derive(Debug)]
struct Copied {
    name: &'static str,
    begin: Event,
    end: Event,
}

#[derive(Debug)]
struct Mark {
    step: u64,
    kind: Timed,
    begin: Event,
    /// Where it waits for other ranks: from, and to where it goes on.
    waits: Vec<(Event, Option<Event>)>,
    end: Option<Event>,
}

impl Mark {
    /// Whether its end was not reached.
    fn is_open(&self) -> bool {
        self.end.is_none()
    }
}

impl Clock {
    /// A new step, or evaluation; its number. Steps are counted by their updates, however many evaluations
    /// lie between them; where nothing is updated, evaluations are. The first is not measured: its kernels
    /// are compiled between events.
    pub fn step(&mut self) -> u64 {
        let before = if self.updated > 0 { self.updated } else { self.steps };
        self.measured = before % EVERY == 1;
        self.steps += 1;
        self.steps
    }

    /// The update of the present step is queued.
    pub fn update(&mut self) {
        self.updated += 1;
    }

    /// Measures every block and every copy from here on, or blocks of some steps only. Waits for copies of a profile
    /// that ends.
    pub fn profile(&mut self, stream: &Stream, on: bool) -> Result<(), GpuError> {
        for copy in &self.copies {
            copy.end.wait(default_timeout(), "copies of a profile")?;
        }
        self.read_copies()?;
        self.origin = match on {
            true => Some(self.event(stream)?),
            false => None,
        };
        Ok(())
    }

    /// The times of the profile so far, of steps that were read.
    pub fn take(&mut self) -> Vec<BlockTime> {
        std::mem::take(&mut self.profiled)
    }

    /// Whether the present step is measured.
    pub fn measures(&self) -> bool {
        self.origin.is_some() || self.measured
    }

    /// A copy of the profile begins on `stream`; none where no profile is taken.
    pub fn copy_begins(&mut self, stream: &Stream) -> Result<Option<Event>, GpuError> {
        self.origin.is_some().then(|| self.event(stream)).transpose()
    }

    /// The end of a copy that has begun.
    pub fn copy_ends(
        &mut self,
        stream: &Stream,
        name: &'static str,
        begin: Option<Event>,
    ) -> Result<(), GpuError> {
        if let Some(begin) = begin {
            let end = self.event(stream)?;
            self.copies.push(Copied { name, begin, end });
        }
        Ok(())
    }

    /// The times of copies that are done.
    fn read_copies(&mut self) -> Result<(), GpuError> {
        let Some(origin) = &self.origin else { return Ok(()) };
        let mut under_way = Vec::new();
        for Copied { name, begin, end } in std::mem::take(&mut self.copies) {
            if !end.done()? {
                under_way.push(Copied { name, begin, end });
                continue;
            }
            let (start, seconds) =
                (seconds_between(origin, &begin)?, seconds_between(&begin, &end)?);
            self.profiled.push(BlockTime { block: name, start, seconds });
            self.free.extend([begin, end]);
        }
        self.copies = under_way;
        Ok(())
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
            let (step, waits, end) = (self.steps, Vec::new(), None);
            self.marks.push(Mark { step, kind, begin, waits, end });
        }
        Ok(())
    }

    /// What was begun last waits for other ranks from here on, until [`Self::goes_on`].
    pub fn waits(&mut self, stream: &Stream) -> Result<(), GpuError> {
        if self.measures() && self.marks.last().is_some_and(Mark::is_open) {
            let from = self.event(stream)?;
            self.marks.last_mut().expect("there is one").waits.push((from, None));
        }
        Ok(())
    }

    /// The end of a wait.
    pub fn goes_on(&mut self, stream: &Stream) -> Result<(), GpuError> {
        let waits = |mark: &Mark| mark.waits.last().is_some_and(|(_, to)| to.is_none());
        if self.measures() && self.marks.last().is_some_and(waits) {
            let to = self.event(stream)?;
            let mark = self.marks.last_mut().expect("there is one");
            mark.waits.last_mut().expect("it waits").1 = Some(to);
        }
        Ok(())
    }

    /// The end of what was begun last.
    pub fn end(&mut self, stream: &Stream) -> Result<(), GpuError> {
        if self.measures() && self.marks.last().is_some_and(Mark::is_open) {
            let end = self.event(stream)?;
            self.marks.last_mut().expect("there is one").end = Some(end);
        }
        Ok(())
    }

    /// The times of step `step`, all of whose work is done; none where it was not measured.
    pub fn read(&mut self, step: u64) -> Result<Option<BlockSeconds>, GpuError> {
        self.read_copies()?;
        let own: Vec<Mark> = self.marks.extract_if(.., |mark| mark.step == step).collect();
        if own.is_empty() {
            return Ok(None);
        }
        let mut sums = BlockSeconds::default();
        for Mark { kind, begin, waits, end, .. } in own {
            let Some(end) = end else { continue };
            let seconds = seconds_between(&begin, &end)?;
            if let Some(sum) = kind.part(&mut sums) {
                *sum += seconds;
            }
            for (from, to) in waits {
                let Some(to) = to else { continue };
                if let Some(origin) = &self.origin {
                    let (start, seconds) =
                        (seconds_between(origin, &from)?, seconds_between(&from, &to)?);
                    self.profiled.push(BlockTime { block: KEYS_WAIT, start, seconds });
                }
                self.free.extend([from, to]);
            }
            if let Some(origin) = &self.origin {
                let start = seconds_between(origin, &begin)?;
                self.profiled.push(BlockTime { block: kind.name(), start, seconds });
            }
            self.free.extend([begin, end]);
        }
        Ok(Some(sums))
    }
}

fn seconds_between(begin: &Event, end: &Event) -> Result<f64, GpuError> {
    Ok(f64::from(end.ms_since(begin)?) / 1e3)
}
