//! What goes between GPUs, by NCCL.
//!
//! A *communicator* is one rank: one GPU's place among those that work together. One process makes
//! a [`UniqueId`] and hands its bytes to the others by whatever started them; then every rank
//! makes its [`Communicator::new`]. A process that drives several GPUs does so in a thread for
//! each, or makes all ranks at once ([`Communicator::of_process`]) and runs what belongs together
//! in one call ([`together`]).
//!
//! ```no_run
//! # use foveate_gpu::{Engine, GpuError, driver};
//! # use foveate_gpu::nccl::{FlatArray, Communicator, Reduce, Transfer, UniqueId};
//! # fn step(id: &UniqueId, rank: usize, ranks: usize, gradients: FlatArray) -> Result<(), GpuError> {
//! let engine = Engine::get(rank)?;
//! let among = Communicator::new(&engine, id, rank, ranks, driver::default_timeout())?;
//! let (from, into) = (gradients, gradients);
//! among.run(engine.queue(), Transfer::AllReduce { from, into, reduce: Reduce::Mean })?;
//! among.wait(engine.queue())?;
//! # Ok(())
//! # }
//! ```
//!
//! Every transfer is checked before any of a group is queued: lengths, ranks, memory, and
//! overlaps within a transfer.
//! Then it is queued and nothing waits for the device. A rank that dies or never comes is found
//! by time: NCCL is used without blocking, so that joining, queueing and [`Communicator::wait`]
//! end after the communicator's timeout, or as soon as NCCL reports a failure. The communicator
//! is aborted then, which also ends what it has running on the device, and every later use of it
//! says why it ended.

mod sys;
mod transfer;

use std::fmt;
use std::num::NonZeroU16;
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::driver::sys::Handle;
use crate::driver::{Event, pause};
use crate::engine::Engine;
use crate::error::{GpuError, GpuErrorKind};
use crate::queue::Queue;
use crate::sync::lock;
use sys::{Functions, IN_PROGRESS, Id, NcclConfig, SUCCESS};
use transfer::data_type;
pub use transfer::{FlatArray, Reduce, Transfer};

/// Version of the NCCL of this machine: major, minor, patch.
///
/// # Errors
/// When it is missing, lacks a function or is too old.
pub fn version() -> Result<[u32; 3], GpuError> {
    Functions::get()?.version()
}

/// Names ranks that work together: made by one process, handed to all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(Id);

impl UniqueId {
    /// A new one. The process that makes it has to take part.
    ///
    /// # Errors
    /// When NCCL is missing or does not start.
    pub fn new() -> Result<Self, GpuError> {
        let functions = Functions::get()?;
        let mut id = Id([0; 128]);
        // SAFETY: `id` is valid for a write.
        let code = unsafe { (functions.unique_id)(&mut id) };
        functions.check(code, || "making an id for ranks".into())?;
        Ok(Self(id))
    }

    /// What another process made and sent.
    pub fn from_bytes(bytes: [u8; 128]) -> Self {
        Self(Id(bytes))
    }

    /// What to send.
    pub fn bytes(&self) -> &[u8; 128] {
        &self.0.0
    }
}

/// One rank of those that work together.
pub struct Communicator {
    functions: &'static Functions,
    engine: Arc<Engine>,
    rank: usize,
    ranks: usize,
    timeout: Duration,
    /// Held by who queues; NCCL takes one caller at a time.
    turn: Mutex<()>,
    state: Mutex<State>,
}

enum State {
    Ready(Handle),
    /// Why it cannot be used.
    Ended(String),
}

// SAFETY: NCCL lets any thread use a communicator, one at a time, which the mutexes see to.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

/// A transfer of one rank, to be run with those of others.
#[derive(Clone, Copy, Debug)]
pub struct RankTransfer<'a> {
    /// The rank.
    pub on: &'a Communicator,
    /// A queue of the rank's device.
    pub queue: &'a Queue,
    /// Its part.
    pub transfer: Transfer,
}

impl Communicator {
    /// Rank `rank` of `ranks` on the device of `engine`, once all of them have joined. Waits
    /// `timeout` for the others, now and in every later call.
    ///
    /// # Errors
    /// When NCCL is missing or too old, there is no such rank, or the others do not join in time.
    pub fn new(
        engine: &Arc<Engine>,
        id: &UniqueId,
        rank: usize,
        ranks: usize,
        timeout: Duration,
    ) -> Result<Self, GpuError> {
        Self::in_blocks(engine, id, rank, ranks, timeout, None, &|| false)
    }

    /// [`Self::new`], with transfers that take at most `blocks` CTAs, the same number on every rank: those of
    /// the device that are left compute beside them. NCCL's own variable `NCCL_MAX_CTAS` goes before it. Joining ends
    /// as soon as `is_lost` says that another rank will not come, of which NCCL knows nothing.
    ///
    /// # Errors
    /// Those of [`Self::new`]; when another rank is lost.
    pub fn in_blocks(
        engine: &Arc<Engine>,
        id: &UniqueId,
        rank: usize,
        ranks: usize,
        timeout: Duration,
        blocks: Option<NonZeroU16>,
        is_lost: &dyn Fn() -> bool,
    ) -> Result<Self, GpuError> {
        if rank >= ranks {
            let reason = format!("there is no rank {rank} of {ranks}; ranks are counted from 0");
            return Err(GpuError::argument(reason));
        }
        let mut joined =
            Self::join(&[(engine.clone(), rank)], id, ranks, timeout, blocks, is_lost)?;
        Ok(joined.pop().expect("one was asked for"))
    }

    /// All ranks in this process, one for each device.
    ///
    /// # Errors
    /// Those of [`Self::new`]; when a device is given twice or there is none.
    pub fn of_process(engines: &[Arc<Engine>], timeout: Duration) -> Result<Vec<Self>, GpuError> {
        let ordinal = |engine: &Arc<Engine>| engine.device().ordinal();
        for (i, engine) in engines.iter().enumerate() {
            if engines[..i].iter().any(|other| ordinal(other) == ordinal(engine)) {
                let gpu = ordinal(engine);
                let reason = format!("GPU {gpu} is given twice; a device has one rank");
                return Err(GpuError::argument(reason));
            }
        }
        if engines.is_empty() {
            return Err(GpuError::argument("there are no devices for ranks"));
        }
        let members: Vec<_> = engines.iter().cloned().zip(0..).collect();
        Self::join(&members, &UniqueId::new()?, engines.len(), timeout, None, &|| false)
    }

    /// The ranks `members` of `ranks`, all of which are joining.
    fn join(
        members: &[(Arc<Engine>, usize)],
        id: &UniqueId,
        ranks: usize,
        timeout: Duration,
        blocks: Option<NonZeroU16>,
        is_lost: &dyn Fn() -> bool,
    ) -> Result<Vec<Self>, GpuError> {
        let functions = Functions::get()?;
        let total = i32::try_from(ranks)
            .map_err(|_| GpuError::argument(format!("{ranks} ranks are too many")))?;
        let mut config = NcclConfig::without_blocking(functions.version()?, blocks);
        let mut handles = vec![ptr::null_mut(); members.len()].into_boxed_slice();
        let _around = members.first().map(|(engine, _)| engine.device().current_around());
        let group = InGroup::start(functions)?;
        let mut codes = Vec::new();
        for ((engine, rank), handle) in members.iter().zip(&mut handles) {
            // An early end would leave the others joining.
            let Ok(_current) = engine.device().current() else {
                codes.push(sys::CUDA_FAILED);
                break;
            };
            // SAFETY: `handle` and `config` are valid for writes, the device's context is current.
            let code = unsafe { (functions.init)(handle, total, id.0, *rank as i32, &mut config) };
            codes.push(code);
        }
        codes.push(group.end());
        let joined: Vec<Self> = members
            .iter()
            .zip(&handles)
            .filter(|(_, handle)| !handle.is_null())
            .map(|((engine, rank), handle)| Self {
                functions,
                engine: engine.clone(),
                rank: *rank,
                ranks,
                timeout,
                turn: Mutex::default(),
                state: Mutex::new(State::Ready(*handle)),
            })
            .collect();
        let all: Vec<&Self> = joined.iter().collect();
        let outcome = wait_for(&all, &codes, "joining the other ranks", is_lost);
        if outcome.is_err() {
            // A join that was cut off may still write its handle.
            Box::leak(handles);
        }
        outcome?;
        match joined.len() == members.len() {
            true => Ok(joined),
            false => Err(GpuError::argument("NCCL made no communicator and said nothing")),
        }
    }

    /// Its place, counted from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many work together.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Queues this rank's part of a transfer. Comes back when it is queued, which may take until
    /// the other ranks queue theirs, so one thread that has several ranks uses [`together`].
    ///
    /// # Errors
    /// Those of [`together`].
    pub fn run(&self, queue: &Queue, transfer: Transfer) -> Result<(), GpuError> {
        together(&[RankTransfer { on: self, queue, transfer }])
    }

    /// Waits until everything on `queue` is done, transfers included, and watches for failures of
    /// other ranks meanwhile.
    ///
    /// # Errors
    /// When the work failed; when it is not done within the communicator's timeout, or another
    /// rank failed, which ends this communicator.
    pub fn wait(&self, queue: &Queue) -> Result<(), GpuError> {
        self.engine.check_queue(queue)?;
        let event = Event::new(self.engine.device())?;
        event.record(queue.stream())?;
        let began = Instant::now();
        loop {
            let done = event.done()?;
            match self.progress()? {
                code if code == SUCCESS || code == IN_PROGRESS => {}
                code => return Err(self.end(self.functions.says(code))),
            }
            if done {
                return Ok(());
            }
            if began.elapsed() > self.timeout {
                return Err(self.end(self.late("transfers on the device")));
            }
            pause(began);
        }
    }

    /// Ends the communicator now, and what it has running on the device. Other ranks find out by
    /// time.
    pub fn abort(&self) {
        // What is left to do with the error is to hand it to who uses the communicator next.
        let _ = self.end("the communicator was aborted; make a new one".into());
    }

    /// What NCCL says about it at the moment.
    fn progress(&self) -> Result<sys::Code, GpuError> {
        let state = lock(&self.state);
        let handle = self.ready(&state)?;
        let mut code = SUCCESS;
        // SAFETY: the communicator is alive while the state is locked and ready; `code` is valid
        // for a write.
        let asked = unsafe { (self.functions.async_error)(handle, &mut code) };
        Ok(if asked == SUCCESS { code } else { asked })
    }

    fn ready(&self, state: &State) -> Result<Handle, GpuError> {
        match state {
            State::Ready(handle) => Ok(*handle),
            State::Ended(why) => Err(self.error(why)),
        }
    }

    fn late(&self, doing: &str) -> String {
        format!(
            "{doing} did not finish within {:.0} s; another rank failed, never came, or queues \
             other transfers",
            self.timeout.as_secs_f64()
        )
    }

    fn error(&self, reason: &str) -> GpuError {
        let Self { rank, ranks, .. } = *self;
        GpuErrorKind::Communication { rank, ranks, reason: reason.to_owned() }.into()
    }

    /// Aborts it, unless it has ended before; the error for who finds out. Whoever asks meanwhile is told at once: NCCL
    /// may wait for its threads, and the driver for the device.
    fn end(&self, reason: String) -> GpuError {
        let mut state = lock(&self.state);
        let (handle, why) = match &*state {
            State::Ready(handle) => (Some(*handle), reason),
            State::Ended(why) => (None, why.clone()),
        };
        let error = self.error(&why);
        *state = State::Ended(why);
        drop(state);
        if let Some(handle) = handle {
            let _around = self.engine.device().current_around();
            // SAFETY: the communicator is alive; others use its handle while the state is locked and ready, which it
            // is no more.
            unsafe { (self.functions.abort)(handle) };
        }
        error
    }
}

/// Runs transfers that belong together, in an order that no rank waits in for another: those of
/// several ranks of one thread, or the sends and receives of one rank. All are checked before the
/// first is queued; when this returns all are queued.
///
/// # Errors
/// When a transfer or its memory does not fit its rank, and nothing is queued then; when NCCL
/// fails or the other ranks do not take part in time, which ends the communicators of `transfers`.
pub fn together(transfers: &[RankTransfer<'_>]) -> Result<(), GpuError> {
    let Some(first) = transfers.first() else { return Ok(()) };
    for RankTransfer { on, queue, transfer } in transfers {
        on.engine.check_queue(queue)?;
        transfer.check(on.rank, on.ranks, &on.engine)?;
    }
    transfers.iter().for_each(|one| one.transfer.note(one.queue.stream()));
    // In order of address, so that threads whose transfers have communicators in common wait for each
    // other in turn.
    let mut members: Vec<&Communicator> = transfers.iter().map(|one| one.on).collect();
    members.sort_unstable_by_key(|member| ptr::from_ref(*member));
    members.dedup_by_key(|member| ptr::from_ref(*member));
    let _turns: Vec<_> = members.iter().map(|member| lock(&member.turn)).collect();
    let codes = queue_all(first.on.functions, &members, transfers)?;
    let what = match transfers {
        [one] => one.transfer.to_string(),
        _ => format!("{} transfers from {} on", transfers.len(), first.transfer),
    };
    wait_for(&members, &codes, &what, &|| false)
}

/// Hands `transfers` of `members` to NCCL in one group; what it said to each, and to all.
fn queue_all(
    functions: &'static Functions,
    members: &[&Communicator],
    transfers: &[RankTransfer<'_>],
) -> Result<Vec<sys::Code>, GpuError> {
    let states: Vec<_> = members.iter().map(|member| lock(&member.state)).collect();
    let handles = members.iter().zip(&states).map(|(member, state)| member.ready(state));
    let handles: Vec<Handle> = handles.collect::<Result<_, _>>()?;
    let _around = members.first().map(|member| member.engine.device().current_around());
    let group = InGroup::start(functions)?;
    let mut codes = Vec::new();
    for of_rank in transfers {
        // An early end would leave a part of the group queued.
        let Ok(_current) = of_rank.on.engine.device().current() else {
            codes.push(sys::CUDA_FAILED);
            break;
        };
        let member = members.iter().position(|member| ptr::eq(*member, of_rank.on));
        let handle = handles[member.expect("members are those of the transfers")];
        // SAFETY: the communicator is alive while its state is locked; the arrays were checked to
        // be memory of its device (`Transfer::check`), and the queue to be of that device.
        codes.push(unsafe { queue(functions, handle, of_rank) });
    }
    codes.push(group.end());
    Ok(codes)
}

/// Hands one transfer to NCCL.
///
/// # Safety
/// `handle` is the communicator of the rank, whose device's context is current; the arrays of the
/// transfer are memory of that device, and the queue is one of its.
unsafe fn queue(functions: &Functions, handle: Handle, of_rank: &RankTransfer<'_>) -> sys::Code {
    let stream = of_rank.queue.stream().handle();
    let read = |array: &FlatArray| array.address as *const std::ffi::c_void;
    let write = |array: &FlatArray| array.address as *mut std::ffi::c_void;
    // SAFETY: the caller's promise; lengths are those of both arrays (`Transfer::check`).
    unsafe {
        match of_rank.transfer {
            Transfer::AllReduce { from, into, reduce } => (functions.all_reduce)(
                read(&from),
                write(&into),
                from.len,
                data_type(from.element),
                reduce.number(),
                handle,
                stream,
            ),
            Transfer::AllGather { from, into } => (functions.all_gather)(
                read(&from),
                write(&into),
                from.len,
                data_type(from.element),
                handle,
                stream,
            ),
            Transfer::ReduceScatter { from, into, reduce } => (functions.reduce_scatter)(
                read(&from),
                write(&into),
                into.len,
                data_type(from.element),
                reduce.number(),
                handle,
                stream,
            ),
            Transfer::Broadcast { array, root } => (functions.broadcast)(
                read(&array),
                write(&array),
                array.len,
                data_type(array.element),
                root as i32,
                handle,
                stream,
            ),
            Transfer::Send { from, to } => (functions.send)(
                read(&from),
                from.len,
                data_type(from.element),
                to as i32,
                handle,
                stream,
            ),
            Transfer::Receive { into, from } => (functions.receive)(
                write(&into),
                into.len,
                data_type(into.element),
                from as i32,
                handle,
                stream,
            ),
        }
    }
}

/// Waits until NCCL is done with what it answered `codes` to. A failure, too long a time, or a rank that is lost ends
/// all of `members`.
fn wait_for(
    members: &[&Communicator],
    codes: &[sys::Code],
    doing: &str,
    is_lost: &dyn Fn() -> bool,
) -> Result<(), GpuError> {
    let Some(first) = members.first() else {
        let code = codes.iter().copied().find(|&code| code != SUCCESS).unwrap_or(SUCCESS);
        return Functions::get()?.check(code, || doing.to_owned());
    };
    let end_all = |at: &Communicator, reason: &str| {
        let error = at.end(reason.to_owned());
        members.iter().for_each(|member| drop(member.end(reason.to_owned())));
        Err(error)
    };
    let bad = |code: sys::Code| code != SUCCESS && code != IN_PROGRESS;
    if let Some(code) = codes.iter().copied().find(|&code| bad(code)) {
        return end_all(first, &format!("{doing}: NCCL says {}", first.functions.says(code)));
    }
    let began = Instant::now();
    for member in members {
        loop {
            match member.progress() {
                Ok(SUCCESS) => break,
                Ok(code) if bad(code) => {
                    let says = member.functions.says(code);
                    return end_all(member, &format!("{doing}: NCCL says {says}"));
                }
                Ok(_) => {}
                Err(e) => {
                    members.iter().for_each(|member| drop(member.end(e.to_string())));
                    return Err(e);
                }
            }
            if began.elapsed() > member.timeout {
                return end_all(member, &member.late(doing));
            }
            if is_lost() {
                return end_all(member, &format!("{doing} was given up: a rank is lost"));
            }
            pause(began);
        }
    }
    Ok(())
}

/// A group of calls on this thread, which ends in any case.
struct InGroup(&'static Functions);

impl InGroup {
    fn start(functions: &'static Functions) -> Result<Self, GpuError> {
        // SAFETY: it takes nothing.
        let code = unsafe { (functions.group_start)() };
        functions.check(code, || "beginning a group of transfers".into())?;
        Ok(Self(functions))
    }

    fn end(self) -> sys::Code {
        let functions = self.0;
        std::mem::forget(self);
        // SAFETY: begun in `start` on this thread, and not ended since.
        unsafe { (functions.group_end)() }
    }
}

impl Drop for InGroup {
    fn drop(&mut self) {
        // SAFETY: as in `end`. The error that led here is the one to tell.
        unsafe { (self.0.group_end)() };
    }
}

/// How long a communicator that is dropped waits for the work that it has queued.
const FAREWELL: Duration = Duration::from_secs(10);

impl Drop for Communicator {
    /// Waits for what is queued, a while; then ends it.
    fn drop(&mut self) {
        let State::Ready(handle) = *lock(&self.state) else { return };
        let _around = self.engine.device().current_around();
        // SAFETY: the communicator is alive, and nobody else has it.
        let mut code = unsafe { (self.functions.finalize)(handle) };
        let began = Instant::now();
        while code == IN_PROGRESS && began.elapsed() < FAREWELL.min(self.timeout) {
            pause(began);
            code = self.progress().unwrap_or(IN_PROGRESS);
        }
        let farewell = if code == SUCCESS { self.functions.destroy } else { self.functions.abort };
        // SAFETY: as above. There is nothing to be done about an error here.
        unsafe { farewell(handle) };
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} on GPU {}", self.rank, self.ranks, self.engine.device().ordinal())
    }
}
