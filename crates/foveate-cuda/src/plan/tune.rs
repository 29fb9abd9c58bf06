//! Timing a plan's kernels on its own problem.
//!
//! Each candidate of a kernel becomes a plan of its own that runs whole passes on random operands:
//! the real program, the real lists of its mask, the real captured buffers. The other kernels of
//! the pass are the same for all candidates, so that differences are the kernel's.

mod operands;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use foveate_problem::{Arrangement, Dims, Pages};

use super::call::Call;
use super::kernels::sizes;
use super::{CudaPlan, longest, sequences};
use crate::choose::{Choice, Class, KernelOptions, KernelPlan, Pass, Sizes};
use crate::choose::{Finish, Progress, Record, RecordKey, Records, Tuned, Tuning, most_runs, race};
use crate::compile::config::{Kernel, Tiles};
use crate::error::{CudaError, CudaErrorKind};
use crate::operands::{DeviceBackward, DeviceForward, DeviceOperands, DevicePages};
use foveate_gpu::GpuErrorKind;
use foveate_gpu::driver::Event;
use foveate_gpu::nvrtc::Compiler;
use foveate_gpu::sync::lock;
use operands::OnDevice;

/// A run that takes longer hangs: the slowest candidates of the longest problems take seconds.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(20);
/// Passes are repeated between two events until they take as long, so that a clock of microseconds
/// times short ones.
const LEAST_US: f64 = 300.0;
/// Passes between two events at most.
const MOST_PASSES: f64 = 64.0;

/// The forward, as far as its tiles go: whether keys are split follows from the tiles.
const FORWARD: Pass = Pass::Forward { kv_split: false };

/// The problem that is tuned.
struct Subject<'a> {
    plan: &'a CudaPlan,
    dims: Dims,
    arrangement: Arrangement<'a>,
    sizes: Sizes,
    operands: OnDevice,
}

/// Whom to tell how far tuning is, and how far it is.
struct Teller<'a> {
    tell: &'a mut dyn FnMut(&Progress) -> bool,
    now: Progress,
}

impl CudaPlan {
    /// Times the best `candidates` of the planner's ranking for each kernel on this plan's problem,
    /// forward and, with `backward`, backward, and records the fastest on disk: this plan and those
    /// made later choose it for problems like this one ([`RecordKey`] says which). On compute
    /// capability 9.0 those that the model has far behind are left out. Operands are random numbers
    /// that lie as `arrangement` says; pages are in no order.
    ///
    /// `tell` is called after each compilation and each run; tuning stops when it returns false.
    ///
    /// # Errors
    /// When the plan's options fix tiles or splits, which a record would pass on to plans without
    /// them; when NVRTC is missing, operands do not fit the device's memory, the score cannot be
    /// differentiated, a backward is asked for on pages, a kernel hangs or fails, or `tell` stopped
    /// it. A candidate that does not compile, takes more than was planned or does not fit in memory
    /// is skipped.
    pub fn tune(
        &self,
        arrangement: Arrangement<'_>,
        backward: bool,
        candidates: usize,
        tell: &mut dyn FnMut(&Progress) -> bool,
    ) -> Result<Tuning, CudaError> {
        if self.options.kernels != KernelOptions::default() {
            return Err(CudaError::argument(
                "the plan's kernel options fix what tuning is to find; tune a plan without them",
            ));
        }
        self.spec.check_on_host()?;
        Compiler::get()?;
        if backward {
            self.differentiable()?;
        }
        if backward && arrangement.paged() {
            return Err(Pages::no_gradients().into());
        }
        let dims = self.dims.arranged(arrangement);
        let sizes = sizes(&dims, longest(&sequences(&dims, arrangement)))
            .under(&self.spec, self.options.mean_kv_len);
        if sizes.batch * sizes.queries * sizes.keys == 0 {
            return Err(CudaError::argument(
                "there is nothing to tune: the problem has no pairs of a query and a key",
            ));
        }
        let operands = OnDevice::new(self, &dims, arrangement, backward)?;
        let subject = Subject { plan: self, dims, arrangement, sizes, operands };
        let planned = subject.planned(backward)?;
        let mut kernels: Vec<Kernel> =
            planned.kernels.iter().map(|choice| choice.chosen.config.kernel).collect();
        kernels.retain(|kernel| kernel.has_tiles());
        let choices: Vec<Choice> =
            kernels.iter().map(|kernel| subject.choice(*kernel)).collect::<Result<_, _>>()?;
        let count = |c: &Choice| c.worth_timing(candidates).count();
        let of = choices.iter().map(|c| count(c) + most_runs(count(c))).sum();
        let now = Progress { kernel: Kernel::Forward, doing: "compiling", done: 0, of, us: None };
        let mut teller = Teller { tell, now };
        let records = Records::of_engine(&self.engine);
        let records = (*records).as_ref();
        let folder = records.and_then(|r| r.folder()).map(Into::into);
        let mut tuning = Tuning { kernels: Vec::new(), folder, trouble: None };
        for (kernel, choice) in kernels.iter().zip(&choices) {
            let count = count(choice);
            let end = teller.now.done + count + most_runs(count);
            let tuned = subject.tune(*kernel, choice, count, &mut teller)?;
            teller.now.done = end;
            if let (Some((tiles, us)), Some(records)) = (tuned.best, records) {
                let class = subject.class(*kernel);
                let key = RecordKey::of(*kernel, &class, &subject.sizes, &self.spec);
                let record = Record { tiles, us, planned_us: tuned.planned_us };
                if let Some(Err(e)) = key.map(|key| records.keep(&key, record)) {
                    let folder = records.folder().unwrap_or(std::path::Path::new(""));
                    tuning.trouble = Some(format!("{}: {e}", folder.display()));
                }
            }
            // Choices that were made before do not know of the record.
            lock(&self.kernels).forget_choices();
            tuning.kernels.push(tuned);
        }
        Ok(tuning)
    }

    /// The same program with these tiles of `kernel`.
    fn trial(&self, kernel: Kernel, tiles: Tiles) -> Self {
        let mut trial = self.with_kernels(self.options.kernels.with(kernel, tiles));
        trial.options.timeout = trial.options.timeout.min(TRIAL_TIMEOUT);
        trial
    }
}

impl Subject<'_> {
    /// What a pass on these operands compiles.
    fn class(&self, kernel: Kernel) -> Class {
        let backward = !kernel.is_of_forward();
        let d_out = Some(&self.operands.d_out).filter(|_| backward);
        Class {
            align: match backward {
                true => self.backward().align(),
                false => self.forward().align(),
            },
            captures: backward && !self.operands.captures.is_empty(),
            unmapped: self.plan.unmapped(&self.forward().operands, d_out),
            paged: self.arrangement.paged(),
            ..self.plan.class()
        }
    }

    fn choice(&self, kernel: Kernel) -> Result<Choice, CudaError> {
        Ok(self.planned(!kernel.is_of_forward())?.choice(kernel).clone())
    }

    /// Ranked without records: the planner's own choice is what a winner is measured against.
    fn planned(&self, backward: bool) -> Result<KernelPlan, CudaError> {
        let kernel = if backward { Kernel::Backward } else { Kernel::Forward };
        let profile = self.plan.engine.profile();
        let options = KernelOptions::default();
        KernelPlan::new(profile, &self.class(kernel), &self.sizes, backward, &options)
    }

    fn tune(
        &self,
        kernel: Kernel,
        choice: &Choice,
        count: usize,
        teller: &mut Teller<'_>,
    ) -> Result<Tuned, CudaError> {
        let tiles: Vec<Tiles> = choice.worth_timing(count).map(|c| Tiles::of(&c.config)).collect();
        let mut skipped = Vec::new();
        let mut trials = Vec::new();
        (teller.now.kernel, teller.now.us) = (kernel, None);
        for (tiles, made) in tiles.iter().zip(self.compile(kernel, &tiles, teller)?) {
            match made {
                Ok(trial) => trials.push((*tiles, trial)),
                Err(why) => skipped.push((*tiles, why)),
            }
        }
        let device = self.plan.engine.device();
        let (begin, end) = (Event::new(device)?, Event::new(device)?);
        let stream = self.plan.engine.queue().stream();
        if !kernel.is_of_forward() {
            // What the backward reads.
            self.run(self.plan, Kernel::Forward)?;
        }
        let passes = |trial: &CudaPlan, count: usize| -> Result<f64, CudaError> {
            begin.record(stream)?;
            (0..count).try_for_each(|_| self.run(trial, kernel))?;
            end.record(stream)?;
            end.wait(trial.options.timeout, "a kernel that is tuned")?;
            Ok(1000.0 * f64::from(end.ms_since(&begin)?) / count as f64)
        };
        let mut repeats = vec![0; trials.len()];
        teller.now.doing = "timing";
        let finish = race(trials.len(), |i| {
            let trial = &trials[i].1;
            if repeats[i] == 0 {
                // The first pass makes the lists of the mask, the second says how long one takes.
                passes(trial, 1)?;
                let us = passes(trial, 1)?;
                repeats[i] = (LEAST_US / us.max(0.1)).clamp(1.0, MOST_PASSES) as usize;
            }
            let us = passes(trial, repeats[i])?;
            teller.now.us = Some(us);
            teller.step()?;
            Ok(us)
        })?;
        let planned = Tiles::of(&choice.chosen.config);
        let mut tuned =
            Tuned { kernel, planned, planned_us: None, best: None, timed: Vec::new(), skipped };
        if let Some(Finish { winner, medians, skipped }) = finish {
            let timed = trials.iter().zip(&medians).filter_map(|((t, _), us)| Some((*t, (*us)?)));
            tuned.timed = timed.collect();
            tuned.timed.sort_by(|a, b| a.1.total_cmp(&b.1));
            tuned.planned_us = tuned.timed.iter().find(|(t, _)| *t == planned).map(|(_, us)| *us);
            tuned.best = medians[winner].map(|us| (trials[winner].0, us));
            tuned.skipped.extend(skipped.into_iter().map(|(i, why)| (trials[i].0, why)));
        }
        Ok(tuned)
    }

    /// A plan for each candidate with its kernel compiled and loaded, or why it is skipped; on
    /// several threads, since a compilation takes a second.
    fn compile(
        &self,
        kernel: Kernel,
        tiles: &[Tiles],
        teller: &mut Teller<'_>,
    ) -> Result<Vec<Result<CudaPlan, String>>, CudaError> {
        teller.now.doing = "compiling";
        let threads = thread::available_parallelism().map_or(1, |n| n.get()).min(tiles.len());
        let next = AtomicUsize::new(0);
        let mut made: Vec<_> = tiles.iter().map(|_| None).collect();
        thread::scope(|scope| {
            let (send, receive) = mpsc::channel();
            for _ in 0..threads {
                let (send, next) = (send.clone(), &next);
                scope.spawn(move || {
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        let Some(tiles) = tiles.get(i) else { break };
                        // Nobody listens any more once tuning was stopped.
                        if send.send((i, self.compiled(kernel, *tiles))).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(send);
            for (i, result) in receive {
                made[i] = Some(match result {
                    Ok(trial) => Ok(trial),
                    Err(e) => match e.gpu() {
                        Some(GpuErrorKind::Compile { .. } | GpuErrorKind::Resources { .. }) => {
                            Err(e.to_string())
                        }
                        _ => return Err(e),
                    },
                });
                teller.step()?;
            }
            Ok(())
        })?;
        Ok(made.into_iter().map(|m| m.expect("every candidate was compiled or refused")).collect())
    }

    fn compiled(&self, kernel: Kernel, tiles: Tiles) -> Result<CudaPlan, CudaError> {
        let trial = self.plan.trial(kernel, tiles);
        let class = self.class(kernel);
        let chosen = trial.chosen(class.clone(), self.sizes, !kernel.is_of_forward())?;
        let pass = match kernel.is_of_forward() {
            true => FORWARD,
            false => Pass::backward(&class, &chosen.choice(Kernel::Backward).chosen.config),
        };
        let mut launches = pass.launches().into_iter();
        let launch = launches.find(|launch| launch.entry == kernel.entry());
        let launch = launch.expect("a pass launches each of its kernels");
        let forward = self.forward();
        trial.kernel(&chosen, &launch, &self.call(&forward.operands)?)?;
        match trial.notes().pop() {
            None => Ok(trial),
            Some(reason) => {
                let kernel = kernel.name().to_owned();
                Err(GpuErrorKind::Resources { kernel, reason }.into())
            }
        }
    }

    /// Queues a pass.
    fn run(&self, plan: &CudaPlan, kernel: Kernel) -> Result<(), CudaError> {
        let forward = self.forward();
        let call = self.call(&forward.operands)?;
        match kernel.is_of_forward() {
            true => plan.launch_forward(&call, &forward),
            false => plan.launch_backward(&call, &self.backward()),
        }
    }

    fn call<'a>(&'a self, operands: &DeviceOperands<'a>) -> Result<Call<'a>, CudaError> {
        Call::new(self.plan.engine.queue(), &self.dims, operands, false)
    }

    fn forward(&self) -> DeviceForward<'_> {
        let OnDevice { q, k, v, table, out, lse, .. } = self.operands;
        let (varlen, pages) = match self.arrangement {
            Arrangement::Dense => (None, None),
            Arrangement::Packed(varlen) => (Some(varlen.into()), None),
            Arrangement::Paged { lengths, .. } => {
                let (table, entries) = table.expect("a paged problem has a table");
                (None, Some(DevicePages { table, entries, lengths }))
            }
        };
        let operands = DeviceOperands { varlen, pages, ..DeviceOperands::new(q, k, v) };
        DeviceForward { operands, out, lse, max_score: None }
    }

    fn backward(&self) -> DeviceBackward<'_> {
        let OnDevice { d_out, dq, dk, dv, captures, .. } = &self.operands;
        let DeviceForward { operands, out, lse, .. } = self.forward();
        DeviceBackward {
            operands,
            out,
            lse,
            d_out: *d_out,
            d_lse: None,
            dq: Some(*dq),
            dk: Some(*dk),
            dv: Some(*dv),
            accumulate: false,
            d_sink: None,
            d_captures: captures.iter().map(|(name, into)| (name.as_str(), *into)).collect(),
        }
    }
}

impl Teller<'_> {
    fn step(&mut self) -> Result<(), CudaError> {
        self.now.done += 1;
        if (self.tell)(&self.now) {
            return Ok(());
        }
        let what = "tuning was stopped; what was recorded before stays";
        Err(CudaErrorKind::Stopped { what }.into())
    }
}
