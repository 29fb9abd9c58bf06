//! The ranks of a run: which one this process is, and how it meets the others.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use foveate_gpu::driver::Device;
use foveate_shard::ShardError;
use foveate_shard::collectives::{Collectives, OneRank, Rank, connect, thread_ranks};
use foveate_shard::launch::{Flags, Launch, Launcher, find};
use foveate_train::device::DeviceChoice;

use crate::failure::{AGAIN, Failure};
use crate::number::number;
use crate::progress::waiting;

/// How long a rank waits for rank 0 before it says so: longer than ranks are apart that start together.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a rank may take to end when it knows that another is lost: what it has under way may wait, in a driver or on
/// a disk, for what never comes.
const FAREWELL: Duration = Duration::from_secs(20);

/// How often a rank looks whether another is lost.
const LOOK: Duration = Duration::from_millis(200);

/// The most ranks that are threads of a process.
const MOST_THREADS: usize = 256;

/// Which rank this is, where no launcher says it in the environment
#[derive(Clone, Debug, clap::Args)]
pub struct RankArgs {
    /// This process is rank N of a run of several processes, which all are given the same recipe;
    /// launchers say it in the environment (docs/cluster.md)
    #[arg(long, value_name = "N", help_heading = "Ranks", allow_negative_numbers = true, value_parser = number::<usize>)]
    rank: Option<usize>,
    /// Number of ranks of the run; without --rank, all of them are threads of this process
    #[arg(long, value_name = "N", help_heading = "Ranks", allow_negative_numbers = true, value_parser = number::<usize>)]
    ranks: Option<usize>,
    /// Where rank 0 listens
    #[arg(long, value_name = "HOST:PORT", help_heading = "Ranks")]
    meet: Option<String>,
}

impl RankArgs {
    /// Refuses flags that say which rank a process is, where `foveate launch` says it of each.
    ///
    /// # Errors
    /// When one is given.
    pub fn refuse(&self) -> Result<(), Failure> {
        let flags = [
            ("--rank", self.rank.is_some()),
            ("--ranks", self.ranks.is_some()),
            ("--meet", self.meet.is_some()),
        ];
        match flags.into_iter().find(|&(_, is_given)| is_given) {
            Some((flag, _)) => Err(Failure::usage(format!(
                "{flag} behind `--`: `foveate launch` says how many ranks there are and which one each is; leave it \
                 out there"
            ))),
            None => Ok(()),
        }
    }

    /// How many threads are asked to be ranks.
    pub fn as_threads(&self) -> Option<usize> {
        self.ranks.filter(|_| self.rank.is_none() && self.meet.is_none())
    }

    /// How many ranks this process is, as threads, where it is asked to; and how long one waits for
    /// another.
    ///
    /// # Errors
    /// When that is no number of ranks, or a launcher has made this process one of several.
    pub fn threads(&self) -> Result<Option<(usize, Duration)>, Failure> {
        let Some(ranks) = self.as_threads() else { return Ok(None) };
        if !(1..=MOST_THREADS).contains(&ranks) {
            let wrong = format!("--ranks {ranks}: give 1 to {MOST_THREADS} threads");
            return Err(Failure::usage(wrong));
        }
        let launch = launch(&Flags::default())?;
        if launch.ranks > 1 {
            return Err(Failure::usage(format!(
                "--ranks {ranks} makes threads of this process, which is rank {} of {} by {}; leave it \
                 out",
                launch.rank, launch.ranks, launch.launcher
            )));
        }
        Ok(Some((ranks, launch.deadline)))
    }

    /// Which rank this process is.
    ///
    /// # Errors
    /// When flags or variables contradict each other.
    pub fn find(&self) -> Result<Launch, Failure> {
        let Self { rank, ranks, meet } = self.clone();
        launch(&Flags { rank, ranks, meet })
    }
}

/// Which rank this process is, by the environment and `flags`.
///
/// # Errors
/// When they contradict each other.
pub fn launch(flags: &Flags) -> Result<Launch, Failure> {
    let value = |name: &str| std::env::var(name).ok();
    find(flags, value).map_err(|e| Failure::usage(e.to_string()))
}

/// Meets the other ranks of `launch`.
///
/// # Errors
/// When they do not come, or turn this one away.
pub fn meet(launch: &Launch) -> Result<Box<dyn Collectives>, Failure> {
    if launch.ranks == 1 {
        return Ok(Box::new(OneRank));
    }
    if launch.rank == 0 {
        crate::output::tell!(
            "waiting for {} ranks at {}:{} (by {})",
            launch.ranks,
            launch.host,
            launch.port,
            launch.launcher
        );
    }
    let doing = format!("waiting for rank 0 at {}:{}", launch.host, launch.port);
    let meet = || connect(&launch.meeting());
    // Rank 0 has said that it waits, at once.
    let met = if launch.rank == 0 { meet() } else { waiting(&doing, PATIENCE, meet) };
    Ok(Box::new(met?))
}

/// Ends this process, which is one of the ranks of `world`, where they cannot go on and it has not ended by itself
/// [`FAREWELL`] later; `told` is the failure to show, with what it does before. Until what comes back is dropped.
/// Every rank calls it.
///
/// # Errors
/// When the ranks cannot go on already, or there can be no thread.
pub fn end_when_lost(
    world: &dyn Collectives,
    told: impl FnOnce(&dyn Collectives, ShardError) -> Failure + Send + 'static,
) -> Result<Option<Sender<()>>, Failure> {
    if world.ranks() == 1 {
        return Ok(None);
    }
    let world = world.subgroup(&Vec::from_iter(0..world.ranks()))?;
    let (here, gone) = channel::<()>();
    let is_here = move |time| gone.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
    let watch = move || {
        while !world.is_aborted() {
            if !is_here(LOOK) {
                return;
            }
        }
        if is_here(FAREWELL)
            && let Err(e) = world.all_gather(&[])
        {
            let status = if e.is_lost() { AGAIN } else { 1 };
            let _ = told(&*world, e).report();
            // At once: what libraries do at the end of a process would wait, too.
            signal_hook::low_level::exit(status.into());
        }
    };
    let thread = std::thread::Builder::new().name("lost ranks".to_owned()).spawn(watch);
    thread.map_err(|e| Failure::new(format!("a thread could not be started: {e}")))?;
    Ok(Some(here))
}

/// Runs `first` as rank 0 on this thread, and `other` as each other rank on a thread of its own; none waits
/// for another for more than `deadline`.
///
/// # Errors
/// That of the rank that failed by itself, where the others failed because of it.
pub fn in_threads<T>(
    ranks: usize,
    deadline: Duration,
    first: impl FnOnce(&Rank) -> Result<T, Failure>,
    other: impl Fn(&Rank) -> Result<(), Failure> + Sync,
) -> Result<T, Failure> {
    let mut worlds = thread_ranks(ranks, deadline).into_iter();
    let own = worlds.next().expect("there is a rank");
    let other = &other;
    std::thread::scope(|scope| {
        let others: Vec<_> = worlds.map(|world| scope.spawn(move || other(&world))).collect();
        let done = first(&own);
        // Whoever still waits for this rank is told that it has left.
        drop(own);
        let mut failures = Vec::new();
        let done = done.map_err(|failure| failures.push(failure));
        for thread in others {
            let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            failures.extend(ended.err());
        }
        let own = failures.iter().position(|failure| !matches!(failure, Failure::Elsewhere));
        match (failures.is_empty(), done) {
            (true, Ok(done)) => Ok(done),
            _ => Err(failures.swap_remove(own.unwrap_or(0))),
        }
    })
}

/// Tells on which devices `ranks` threads are, where they are GPUs.
pub fn tell_devices(given: DeviceChoice, ranks: usize) {
    if let DeviceChoice::Cuda(_) = given {
        let devices: Vec<_> = (0..ranks).map(|rank| device(given, rank).to_string()).collect();
        crate::output::tell!("ranks on {}", devices.join(", "));
    }
}

/// The device of rank `local` of a host: ranks take the GPUs from the given one on, and begin again with
/// that one where there are no more.
pub fn device(given: DeviceChoice, local: usize) -> DeviceChoice {
    let gpus = || Device::count().unwrap_or(0);
    match given {
        DeviceChoice::Cuda(first) => {
            DeviceChoice::Cuda(first + local % gpus().saturating_sub(first).max(1))
        }
        DeviceChoice::Auto if local > 0 => match gpus() {
            0 => DeviceChoice::Cpu,
            gpus => DeviceChoice::Cuda(local % gpus),
        },
        other => other,
    }
}

/// What the driver calls the GPU that the first rank would have; none on a CPU, or where this host has no such GPU.
pub fn gpu_name(given: DeviceChoice) -> Option<String> {
    let ordinal = match given {
        DeviceChoice::Auto => 0,
        DeviceChoice::Cpu => return None,
        DeviceChoice::Cuda(ordinal) => ordinal,
    };
    Some(Device::open(ordinal).ok()?.info().name.clone())
}

/// What was found, for `doctor --mesh`.
pub fn lines(launch: &Launch) -> Vec<String> {
    let Launch { launcher, rank, ranks, local_rank, host, port, port_from, run, attempt, .. } =
        launch;
    let mut lines = vec![format!("ranks     {rank} of {ranks}, by {launcher}")];
    if *launcher == Launcher::Alone {
        lines.push(
            "          torchrun, srun, mpirun, an indexed Job, foveate launch or --rank say more"
                .to_owned(),
        );
        return lines;
    }
    lines.push(format!("          rank {local_rank} of this host"));
    lines.push(format!("meet      {host}:{port} (the port is {port_from})"));
    lines.push(format!("run       {run:?}, attempt {attempt}"));
    let Launch { arrival, deadline, silence, .. } = launch;
    lines.push(format!(
        "patience  {arrival:?} for ranks to come, {deadline:?} for a transfer, {silence:?} of silence"
    ));
    lines
}
