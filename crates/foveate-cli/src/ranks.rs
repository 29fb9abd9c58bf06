//! The ranks of a run: which one this process is, and how it meets the others.

use foveate_shard::collectives::{Collectives, OneRank, connect};
use foveate_shard::launch::{Flags, Launch, Launcher, find};
use foveate_train::device::DeviceChoice;

use crate::failure::Failure;

/// Which rank this is, where no launcher says it in the environment
#[derive(Clone, Debug, clap::Args)]
pub struct RankArgs {
    /// This process is rank N of a run of several processes, which all are given the same recipe;
    /// launchers say it in the environment (docs/cluster.md)
    #[arg(long, value_name = "N", requires = "ranks", help_heading = "Ranks")]
    rank: Option<usize>,
    /// Number of ranks of the run
    #[arg(long, value_name = "N", requires = "rank", help_heading = "Ranks")]
    ranks: Option<usize>,
    /// Where rank 0 listens
    #[arg(long, value_name = "HOST:PORT", requires = "rank", help_heading = "Ranks")]
    meet: Option<String>,
}

impl RankArgs {
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
    Ok(Box::new(connect(&launch.meeting())?))
}

/// The device of this rank: ranks of a host take the GPUs from the given one on.
pub fn device(given: DeviceChoice, launch: &Launch) -> DeviceChoice {
    match given {
        DeviceChoice::Cuda(first) => DeviceChoice::Cuda(first + launch.local_rank),
        DeviceChoice::Auto if launch.local_rank > 0 => {
            match foveate_nn_cuda::Cuda::available(launch.local_rank) {
                Ok(_) => DeviceChoice::Cuda(launch.local_rank),
                Err(_) => DeviceChoice::Cpu,
            }
        }
        other => other,
    }
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
