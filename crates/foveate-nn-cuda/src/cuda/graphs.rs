//! Passes recorded as CUDA graphs and queued again, for batches of other contents, with the same bits.
//!
//! A graph gives its kernels the addresses and numbers that they had when it was recorded, so nothing of
//! them may depend on a batch or a step. Batches lie where the first one of their size did, padded to what
//! any of their size takes ([`TokenOrder::padded`](crate::embedding::TokenOrder::padded)); totals are
//! copied to a fixed place and back around the graph; what attention makes of a batch's documents, the
//! graph makes again; what a pass takes for itself comes from a pool that serves passes alone
//! ([`Queue::for_graphs`]).
//!
//! That this is so is not believed but seen. The first pass of an identity runs, and makes what plans keep.
//! The next two, of two batches, are recorded, each with its operations as data, and only where those are
//! equal, byte by byte, is the second queued for the batches after it. Steps whose blocks are timed run
//! block by block, as before, and their operations are compared with the graph's, too. A graph is queued only
//! while the same of the pool's memory is taken as when it was recorded.
//!
//! What plans make while a pass is recorded in vain, they take for made, though no device has made it. So a
//! recording that fails ends its queue, and all that was made on it: passes begin anew on another one.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use foveate_gpu::abi::Address;
use foveate_gpu::driver::{Graph, Operation, default_timeout, operations};
use foveate_gpu::{GpuError, Queue, WeakQueue};
use foveate_nn::{NnError, NnErrorKind, PassIdentity, PassWork, Recording};

use super::attention::AttentionPlan;
use super::batch::{BatchPlaces, Rotations};
use super::{Cuda, CudaTotals, failed};

/// Passes that are remembered: the first batch of a step and later ones, for a few lengths of documents.
const PASSES: usize = 8;
/// Recordings that may fail, and those in turn that may be other than the one before, until none is tried any
/// more.
const TRIES: usize = 3;
/// A pass that was replayed so often since its blocks were compared with its graph is compared again, where no
/// timed step has done so.
const UNSEEN: usize = 256;

/// What records passes, or why none does.
#[derive(Debug)]
pub(super) enum Recorder {
    Off(String),
    On(Box<Recorded>),
}

/// Passes that were recorded, and what they share.
#[derive(Debug)]
pub(super) struct Recorded {
    /// Of passes alone, on the stream of all other work.
    queue: Queue,
    /// What passes add to.
    totals: CudaTotals,
    places: BatchPlaces,
    /// The last one that was queued comes first.
    passes: Vec<Pass>,
    /// Recordings that failed.
    failed: usize,
    /// Recordings in turn that were other than the one before.
    other: usize,
}

/// A pass and its graph.
#[derive(Debug)]
struct Pass {
    numbers: Vec<u64>,
    place: (Address, usize, Option<[usize; 1]>),
    tables: Vec<Arc<Rotations>>,
    /// Over no batch. What they keep on the device is there as long as the graph.
    plans: Vec<AttentionPlan>,
    state: State,
    /// How often the graph was queued since what it queues was seen.
    unseen: usize,
}

#[derive(Debug)]
enum State {
    /// None of it was queued.
    New,
    /// It was queued block by block.
    Run,
    /// It was recorded once, when the pool had this fingerprint ([`foveate_gpu::driver::Pool::fingerprint`]).
    Once(Graph, u64),
    /// It was recorded twice, the same.
    Twice(Graph, u64),
}

/// Why a pass was not recorded.
enum Failure {
    Gpu(GpuError),
    Work(NnError),
}

impl From<GpuError> for Failure {
    fn from(e: GpuError) -> Self {
        Self::Gpu(e)
    }
}

impl Default for Recorder {
    fn default() -> Self {
        Self::Off("nothing asked for it".into())
    }
}

impl Recorder {
    /// Where batches lie whose passes are recorded.
    pub fn places(&self) -> Option<&BatchPlaces> {
        match self {
            Self::Off(_) => None,
            Self::On(recorded) => Some(&recorded.places),
        }
    }

    pub fn state(&self) -> Recording {
        match self {
            Self::Off(reason) => Recording::Off(reason.clone()),
            Self::On(_) => Recording::On,
        }
    }

    /// Passes from here on queue what no graph holds.
    pub fn stop(&mut self, reason: &str) {
        if let Self::On(_) = self {
            *self = Self::Off(reason.into());
        }
    }

    /// Forgets all passes, and gives up the memory that their graphs name; later ones have `queue`.
    pub fn forget(&mut self, queue: Queue) {
        let Self::On(recorded) = self else { return };
        if recorded.passes.is_empty() {
            return;
        }
        let gone = recorded.begin_anew(queue);
        // Whoever waits next tells of a device that has failed.
        if recorded.queue.stream().wait(default_timeout(), "the last passes").is_ok() {
            gone.release();
        }
    }
}

impl Pass {
    fn is_of(&self, of: &PassIdentity<'_, Cuda>) -> bool {
        let (tables, plans) = (&of.batch.tables, of.plans);
        self.numbers == of.numbers()
            && self.place == of.batch.place()
            && self.tables.len() == tables.len()
            && self.tables.iter().zip(tables).all(|(own, of)| Arc::ptr_eq(own, of))
            && self.plans.len() == plans.len()
            && self.plans.iter().zip(plans).all(|(own, of)| own.is_of(of))
    }

    fn new(of: &PassIdentity<'_, Cuda>) -> Self {
        Self {
            numbers: of.numbers().to_vec(),
            place: of.batch.place(),
            tables: of.batch.tables.clone(),
            plans: of.plans.iter().map(AttentionPlan::unbound).collect(),
            state: State::New,
            unseen: 0,
        }
    }
}

impl Recorded {
    /// The pass of an identity, first of all.
    fn pass(&mut self, of: &PassIdentity<'_, Cuda>) -> &mut Pass {
        let pass = match self.passes.iter().position(|pass| pass.is_of(of)) {
            Some(at) => self.passes.remove(at),
            None => Pass::new(of),
        };
        self.passes.truncate(PASSES - 1);
        self.passes.insert(0, pass);
        self.places.keep(of.batch);
        &mut self.passes[0]
    }

    /// Without passes, on `queue`; the one before, which is gone when its work is done.
    fn begin_anew(&mut self, queue: Queue) -> WeakQueue {
        self.passes.clear();
        std::mem::replace(&mut self.queue, queue).downgrade()
    }
}

/// What became of a pass.
enum Queued {
    /// It is queued, and its totals are added up.
    Done,
    /// It is, but as another than before: how it differs.
    Other(String),
    /// It is not, since it could not be recorded: why.
    Not(String),
}

impl Cuda {
    /// What records passes from here on.
    pub(super) fn new_recorder(&mut self) -> Recorder {
        if !self.shares_memory {
            return Recorder::Off("arrays of a pass have memory of their own".into());
        }
        let queue = self.queue.for_graphs();
        match self.totals_of(0) {
            Err(e) => Recorder::Off(e.to_string()),
            Ok(totals) => {
                let (places, passes) = Default::default();
                let (failed, other) = (0, 0);
                Recorder::On(Box::new(Recorded { queue, totals, places, passes, failed, other }))
            }
        }
    }

    /// Queues `work`, or what was recorded of it.
    pub(super) fn queue_recorded(
        &mut self,
        of: &PassIdentity<'_, Self>,
        totals: &mut CudaTotals,
        work: &mut PassWork<'_, Self>,
    ) -> Result<(), NnError> {
        let mut recorded = match std::mem::take(&mut self.recorder) {
            Recorder::On(recorded) => recorded,
            off => {
                self.recorder = off;
                return work(self, totals);
            }
        };
        let queued = self.queue_beside(&mut recorded, of, totals, work);
        let (done, stops) = match queued {
            Ok(Queued::Done) => (true, None),
            Ok(Queued::Other(difference)) => {
                recorded.other += 1;
                let reason = format!("what batches queue differs: {difference}");
                (true, Some(reason).filter(|_| recorded.other >= TRIES))
            }
            Ok(Queued::Not(reason)) => {
                recorded.failed += 1;
                drop(recorded.begin_anew(self.queue.for_graphs()));
                (false, Some(reason).filter(|_| recorded.failed >= TRIES))
            }
            Err(e) => {
                self.recorder = Recorder::Off(format!("a pass failed: {e}"));
                return Err(e);
            }
        };
        self.recorder = stops.map_or(Recorder::On(recorded), Recorder::Off);
        if done { Ok(()) } else { work(self, totals) }
    }

    /// Queues `work` or its record over totals of its own, between copies of `totals`.
    fn queue_beside(
        &mut self,
        recorded: &mut Recorded,
        of: &PassIdentity<'_, Self>,
        totals: &mut CudaTotals,
        work: &mut PassWork<'_, Self>,
    ) -> Result<Queued, NnError> {
        self.copy_totals(totals, &recorded.totals)?;
        let queued = self.queue_of(recorded, of, work)?;
        if !matches!(queued, Queued::Not(_)) {
            self.copy_totals(&recorded.totals, totals)?;
        }
        Ok(queued)
    }

    fn queue_of(
        &mut self,
        recorded: &mut Recorded,
        of: &PassIdentity<'_, Self>,
        work: &mut PassWork<'_, Self>,
    ) -> Result<Queued, NnError> {
        let queue = recorded.queue.clone();
        let fingerprint = || queue.pool().fingerprint();
        let pass = recorded.pass(of);
        let shows = self.clock.measures() || pass.unseen >= UNSEEN;
        let before = match std::mem::replace(&mut pass.state, State::Run) {
            State::New => return self.run_pass(recorded, work).map(|_| Queued::Done),
            State::Once(_, of) | State::Twice(_, of) if of != fingerprint() => State::Run,
            before => before,
        };
        if shows {
            let operations = self.run_pass(recorded, work)?;
            if let State::Twice(graph, _) = &before {
                check(graph, &operations)?;
            }
            (recorded.passes[0].state, recorded.passes[0].unseen) = (before, 0);
            return Ok(Queued::Done);
        }
        // SAFETY: the pass's arrays are where they were, by its identity, and so is what plans keep, which are
        // held, by the fingerprint; the rest is memory of the pool that nobody has, which it writes first.
        let launch = |graph: &Graph| unsafe { graph.launch(queue.stream()) };
        let (graph, before) = match before {
            State::Twice(graph, of) => {
                launch(&graph).map_err(|e| failed(&e))?;
                recorded.passes[0].state = State::Twice(graph, of);
                recorded.passes[0].unseen += 1;
                return Ok(Queued::Done);
            }
            before => match self.record_pass(recorded, work) {
                Err(reason) => return Ok(Queued::Not(reason)),
                Ok(graph) => (graph, before),
            },
        };
        launch(&graph).map_err(|e| failed(&e))?;
        let of = fingerprint();
        let State::Once(once, first) = before else {
            recorded.passes[0].state = State::Once(graph, of);
            return Ok(Queued::Done);
        };
        let difference = operations::difference(once.operations(), graph.operations());
        let other = difference.filter(|_| first == of);
        recorded.passes[0].state = match &other {
            None if first == of => {
                recorded.other = 0;
                State::Twice(graph, of)
            }
            _ => State::Once(graph, of),
        };
        Ok(other.map_or(Queued::Done, Queued::Other))
    }

    /// Queues a pass block by block, and gives what it queued.
    fn run_pass(
        &mut self,
        recorded: &mut Recorded,
        work: &mut PassWork<'_, Self>,
    ) -> Result<Vec<Operation>, NnError> {
        let (done, operations) = operations::noted(|| self.on_queue_of(recorded, work));
        done.map(|()| operations)
    }

    /// Records a pass.
    ///
    /// # Errors
    /// Why it could not be, in a line.
    fn record_pass(
        &mut self,
        recorded: &mut Recorded,
        work: &mut PassWork<'_, Self>,
    ) -> Result<Graph, String> {
        let queue = recorded.queue.clone();
        let work = || self.on_queue_of(recorded, work).map_err(Failure::Work);
        Graph::record(queue.stream(), work).map_err(|failure| match failure {
            Failure::Gpu(e) => e.to_string(),
            Failure::Work(e) => e.to_string(),
        })
    }

    /// Does `work` with the queue of passes in the place of its own.
    fn on_queue_of(
        &mut self,
        recorded: &mut Recorded,
        work: &mut PassWork<'_, Self>,
    ) -> Result<(), NnError> {
        let own = std::mem::replace(&mut self.queue, recorded.queue.clone());
        let done = catch_unwind(AssertUnwindSafe(|| work(self, &mut recorded.totals)));
        self.queue = own;
        done.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// Whether a pass queues what was recorded of it.
///
/// # Errors
/// The first operation that is another one.
fn check(graph: &Graph, operations: &[Operation]) -> Result<(), NnError> {
    let Some(difference) = operations::difference(graph.operations(), operations) else {
        return Ok(());
    };
    let reason = format!(
        "a recorded pass is not what its blocks queue, so steps since it was recorded may be wrong; \
         resume from a checkpoint before them with run.graphs = \"off\": {difference}"
    );
    Err(NnErrorKind::Device(reason).into())
}
