//! How a process finds out which rank it is: from what its launcher put into the environment.
//!
//! [`find`] looks in this order, and takes the first that is there: flags of the command line; the
//! variables of `torchrun` and of `foveate launch` (`RANK`, `WORLD_SIZE`, …); Slurm; Open MPI; PMI, as
//! MPICH and Intel MPI set it; an indexed Job of Kubernetes. Where none is, the process is alone.
//!
//! `FOVEATE_PORT`, `MASTER_ADDR` and `MASTER_PORT` say where ranks meet, whoever launches them;
//! `FOVEATE_ARRIVAL`, `FOVEATE_DEADLINE` and `FOVEATE_SILENCE`, in seconds, how long they wait.

use std::fmt;
use std::num::IntErrorKind;
use std::time::Duration;

use crate::collectives::Meeting;
use crate::error::{ShardError, refused};
use crate::hash;
use crate::mesh::MOST_RANKS;

/// Who started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Flags of the command line.
    Flags,
    /// `torchrun`, `foveate launch`, or whoever else sets `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// `srun`.
    Slurm,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpirun` of MPICH, Intel MPI or another that speaks PMI.
    Pmi,
    /// An indexed Job.
    Kubernetes,
    /// Nobody: one rank.
    Alone,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flags => "flags",
            Self::Torchrun => "RANK and WORLD_SIZE, as torchrun and foveate launch set them",
            Self::Slurm => "Slurm (SLURM_PROCID)",
            Self::OpenMpi => "Open MPI (OMPI_COMM_WORLD_RANK)",
            Self::Pmi => "PMI (PMI_RANK)",
            Self::Kubernetes => "an indexed Job of Kubernetes (JOB_COMPLETION_INDEX)",
            Self::Alone => "no launcher",
        })
    }
}

/// What a command line may say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// This rank.
    pub rank: Option<usize>,
    /// Number of ranks.
    pub ranks: Option<usize>,
    /// `host:port` of rank 0.
    pub meet: Option<String>,
}

/// Which rank this process is, and where it meets the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Who says so.
    pub launcher: Launcher,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// This rank among those of its host: the GPU that it takes.
    pub local_rank: usize,
    /// Host of rank 0.
    pub host: String,
    /// Port at which rank 0 listens.
    pub port: u16,
    /// Where the port is from, for a reader.
    pub port_from: &'static str,
    /// Of the launcher, the same on all ranks.
    pub run: String,
    /// How often the launcher has started the run again.
    pub attempt: u64,
    /// How long ranks wait for the others to come: `FOVEATE_ARRIVAL`, in seconds, or five minutes.
    pub arrival: Duration,
    /// The longest that a rank waits for another in a collective: `FOVEATE_DEADLINE`, in seconds, or
    /// ten minutes.
    pub deadline: Duration,
    /// How long a rank may be silent before it counts as lost: `FOVEATE_SILENCE`, in seconds, or
    /// ten.
    pub silence: Duration,
}

/// Where ranks of one host meet unless something says otherwise.
const LOOPBACK: &str = "127.0.0.1";

/// The port unless something says otherwise, or its launcher gives a number for a run.
const PORT: u16 = 29_400;

impl Launch {
    /// The meeting of these ranks.
    pub fn meeting(&self) -> Meeting {
        Meeting {
            host: self.host.clone(),
            port: self.port,
            rank: self.rank,
            ranks: self.ranks,
            run: hash::bytes(self.run.bytes()),
            attempt: self.attempt,
            arrival: self.arrival,
            deadline: self.deadline,
            silence: self.silence,
        }
    }
}

/// Finds out which rank this is, from `flags` and the variables that `variable` looks up.
///
/// ```
/// use foveate_shard::launch::{Flags, Launcher, find};
///
/// let set = |name: &str| match name {
///     "SLURM_PROCID" => Some("3".to_owned()),
///     "SLURM_NTASKS" => Some("8".to_owned()),
///     "SLURM_JOB_ID" => Some("1234".to_owned()),
///     "SLURM_STEP_ID" => Some("0".to_owned()),
///     "SLURM_STEP_NODELIST" => Some("gpu[07-08]".to_owned()),
///     _ => None,
/// };
/// let launch = find(&Flags::default(), set)?;
/// assert_eq!((launch.launcher, launch.rank, launch.ranks), (Launcher::Slurm, 3, 8));
/// assert_eq!(launch.host, "gpu07");
/// # Ok::<(), foveate_shard::ShardError>(())
/// ```
///
/// # Errors
/// When a variable is no number, one that belongs to the others is missing, the rank is not one of
/// the ranks, or there are more than 65,536 of them; the variable is named.
pub fn find(
    flags: &Flags,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Launch, ShardError> {
    let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
    let of = Variables { variable: &variable };
    let mut launch = if flags != &Flags::default() {
        of.flags(flags)?
    } else if of.is_set("RANK") || of.is_set("WORLD_SIZE") {
        of.torchrun()?
    } else if of.is_step_of_slurm() {
        of.slurm()?
    } else if of.is_set("OMPI_COMM_WORLD_RANK") {
        of.mpi(Launcher::OpenMpi, OPEN_MPI)?
    } else if of.is_set("PMI_RANK") {
        of.mpi(Launcher::Pmi, PMI)?
    } else if of.is_set("JOB_COMPLETION_INDEX") && of.is_set("FOVEATE_RANKS") {
        of.kubernetes()?
    } else {
        of.launch(Launcher::Alone, 0, 1)
    };
    launch.arrival = of.seconds("FOVEATE_ARRIVAL", launch.arrival)?;
    launch.deadline = of.seconds("FOVEATE_DEADLINE", launch.deadline)?;
    launch.silence = of.seconds("FOVEATE_SILENCE", launch.silence)?;
    if launch.ranks > MOST_RANKS {
        return refused(format!(
            "{} ranks by {}; give at most {MOST_RANKS}",
            launch.ranks, launch.launcher
        ));
    }
    if launch.rank >= launch.ranks {
        return refused(format!(
            "rank {} of {} by {}; ranks are counted from 0",
            launch.rank, launch.ranks, launch.launcher
        ));
    }
    if launch.port == 0 && launch.ranks > 1 {
        let by = launch.port_from;
        return refused(format!(
            "the port is 0 by {by}, where no rank finds another; give one from 1 to 65535"
        ));
    }
    Ok(launch)
}

/// Names of variables: rank, number of ranks, rank on this host, ranks on this host, name of the run.
type Names = [&'static str; 5];

const OPEN_MPI: Names = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
];

const PMI: Names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"];

struct Variables<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.variable)(name)
    }

    fn is_set(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    fn number<N: TryFrom<u64>>(&self, name: &str) -> Result<Option<N>, ShardError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        let number = match value.trim().parse::<u64>() {
            Ok(whole) => N::try_from(whole).ok(),
            Err(e) if *e.kind() == IntErrorKind::PosOverflow => None,
            Err(_) => {
                return refused(format!(
                    "{name} is `{value}`, which is no number of at least 0; correct it, or unset it \
                     where no launcher set it"
                ));
            }
        };
        if number.is_none() {
            let most = u64::MAX >> (64 - 8 * size_of::<N>());
            return refused(format!("{name} is `{value}`; it is {most} at most"));
        }
        Ok(number)
    }

    /// A time that is no shorter than two heartbeats.
    fn seconds(&self, name: &str, default: Duration) -> Result<Duration, ShardError> {
        let Some(value) = self.text(name) else { return Ok(default) };
        match value.trim().parse() {
            Ok(seconds) if (1..=1_000_000).contains(&seconds) => Ok(Duration::from_secs(seconds)),
            _ => refused(format!("{name} is `{value}`; give seconds, from 1 to 1000000")),
        }
    }

    fn needed(&self, name: &str, beside: &str) -> Result<usize, ShardError> {
        match self.number(name)? {
            Some(number) => Ok(number),
            None => refused(format!("{beside} is set and {name} is not; set both, or neither")),
        }
    }

    /// A launch on this host, at the usual port.
    fn launch(&self, launcher: Launcher, rank: usize, ranks: usize) -> Launch {
        Launch {
            launcher,
            rank,
            ranks,
            local_rank: 0,
            host: LOOPBACK.to_owned(),
            port: PORT,
            port_from: "the default",
            run: self.text("FOVEATE_RUN").unwrap_or_default(),
            attempt: 0,
            arrival: Duration::from_secs(300),
            deadline: Duration::from_secs(600),
            silence: Duration::from_secs(10),
        }
    }

    /// What the variables that every launcher may set say of the place.
    fn place(&self, mut launch: Launch) -> Result<Launch, ShardError> {
        if let Some(host) = self.text("MASTER_ADDR") {
            launch.host = host;
        }
        if let Some(port) = self.number("MASTER_PORT")? {
            (launch.port, launch.port_from) = (port, "MASTER_PORT");
        }
        if let Some(port) = self.number("FOVEATE_PORT")? {
            (launch.port, launch.port_from) = (port, "FOVEATE_PORT");
        }
        Ok(launch)
    }

    fn flags(&self, flags: &Flags) -> Result<Launch, ShardError> {
        // One rank alone meets nobody.
        let (meets, is_given) = (flags.ranks != Some(1), flags.meet.is_some());
        let all = [
            ("--rank", flags.rank.is_some()),
            ("--ranks", flags.ranks.is_some()),
            ("--meet", is_given || !meets),
        ];
        let named =
            |is: bool| all.iter().filter(move |(_, given)| *given == is).map(|(name, _)| *name);
        let (Some(rank), Some(ranks), None) = (flags.rank, flags.ranks, named(false).next()) else {
            let [given, missing] =
                [true, false].map(|is| named(is).collect::<Vec<_>>().join(" and "));
            return refused(format!(
                "{given} without {missing}; give all three, such as --rank 0 --ranks 2 --meet node0:29400"
            ));
        };
        let mut launch = self.launch(Launcher::Flags, rank, ranks);
        launch.local_rank = self.number("LOCAL_RANK")?.unwrap_or(0);
        let Some(meet) = &flags.meet else { return Ok(launch) };
        let place = meet.rsplit_once(':').and_then(|(host, port)| {
            let port = port.parse().ok()?;
            let host = host.trim_start_matches('[').trim_end_matches(']');
            (!host.is_empty()).then(|| (host.to_owned(), port))
        });
        let Some(place) = place else {
            return refused(format!("--meet {meet}: say host:port, such as node0:29400"));
        };
        (launch.host, launch.port) = place;
        launch.port_from = "--meet";
        Ok(launch)
    }

    fn torchrun(&self) -> Result<Launch, ShardError> {
        let rank = self.needed("RANK", "WORLD_SIZE")?;
        let ranks = self.needed("WORLD_SIZE", "RANK")?;
        let mut launch = self.launch(Launcher::Torchrun, rank, ranks);
        launch.local_rank = self.number("LOCAL_RANK")?.unwrap_or(0);
        launch.attempt = self.number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
        if launch.run.is_empty() {
            launch.run = self.text("TORCHELASTIC_RUN_ID").unwrap_or_default();
        }
        let mut launch = self.place(launch)?;
        let agent = self.text("TORCHELASTIC_USE_AGENT_STORE");
        if agent.as_deref() == Some("True") && launch.port_from == "MASTER_PORT" {
            // torchrun's agent listens at MASTER_PORT itself.
            let Some(next) = launch.port.checked_add(1) else {
                return refused(
                    "MASTER_PORT is 65535, and torchrun's agent has it; set FOVEATE_PORT",
                );
            };
            (launch.port, launch.port_from) =
                (next, "MASTER_PORT + 1, as torchrun has MASTER_PORT");
        }
        Ok(launch)
    }

    /// Whether `srun` started this process. A batch script has no step: its own process is no rank. `mpirun` within
    /// an allocation has `srun` start a process a host, whose variables its ranks inherit; PMI's may be Slurm's own.
    fn is_step_of_slurm(&self) -> bool {
        let differs = |[of_mpi, of_step]: [&str; 2]| {
            self.text(of_mpi).zip(self.text(of_step)).is_some_and(|(own, step)| own != step)
        };
        let by_mpi = self.is_set("OMPI_COMM_WORLD_RANK")
            || differs(["PMI_RANK", "SLURM_PROCID"])
            || differs(["PMI_SIZE", "SLURM_STEP_NUM_TASKS"]);
        self.is_set("SLURM_PROCID") && self.is_set("SLURM_STEP_ID") && !by_mpi
    }

    fn slurm(&self) -> Result<Launch, ShardError> {
        let rank = self.needed("SLURM_PROCID", "SLURM_NTASKS")?;
        let tasks = match self.number("SLURM_STEP_NUM_TASKS")? {
            Some(tasks) => tasks,
            None => self.needed("SLURM_NTASKS", "SLURM_PROCID")?,
        };
        let mut launch = self.launch(Launcher::Slurm, rank, tasks);
        launch.local_rank = self.number("SLURM_LOCALID")?.unwrap_or(0);
        launch.attempt = self.number("SLURM_RESTART_COUNT")?.unwrap_or(0);
        let job: u64 = self.number("SLURM_JOB_ID")?.unwrap_or(0);
        let step: u64 = self.number("SLURM_STEP_ID")?.unwrap_or(0);
        if launch.run.is_empty() {
            launch.run = format!("slurm {job}.{step}");
        }
        // Jobs that share a host rarely share the number.
        let number = (job % 20_000 * 7 + step % 20_000) % 20_000;
        (launch.port, launch.port_from) = (20_000 + number as u16, "the number of the job");
        let nodes = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
        if let Some(nodes) = nodes.iter().find_map(|name| self.text(name)) {
            launch.host = first_node(&nodes);
        }
        self.place(launch)
    }

    fn mpi(&self, launcher: Launcher, names: Names) -> Result<Launch, ShardError> {
        let [rank, ranks, local_rank, local_ranks, run] = names;
        let mut launch =
            self.launch(launcher, self.needed(rank, ranks)?, self.needed(ranks, rank)?);
        launch.local_rank = self.number(local_rank)?.unwrap_or(0);
        if launch.run.is_empty() {
            launch.run = self.text(run).unwrap_or_default();
        }
        let here: Option<usize> = self.number(local_ranks)?;
        if !self.is_set("MASTER_ADDR") && here != Some(launch.ranks) && launch.ranks > 1 {
            return refused(format!(
                "{launcher} does not say which host rank 0 is on; set MASTER_ADDR to it for all \
                 ranks"
            ));
        }
        self.place(launch)
    }

    fn kubernetes(&self) -> Result<Launch, ShardError> {
        let rank = self.needed("JOB_COMPLETION_INDEX", "FOVEATE_RANKS")?;
        let ranks = self.needed("FOVEATE_RANKS", "JOB_COMPLETION_INDEX")?;
        if ranks > 1 && !self.is_set("MASTER_ADDR") {
            return refused(
                "an indexed Job needs MASTER_ADDR, the name of its pod 0: JOB-0.SUBDOMAIN",
            );
        }
        self.place(self.launch(Launcher::Kubernetes, rank, ranks))
    }
}

/// The first host of a list as Slurm writes it: `gpu[007-010,12],login` is `gpu007`, and `r[1-2]n[03,7]` is `r1n03`.
fn first_node(list: &str) -> String {
    let (mut name, mut rest) = (String::new(), list);
    while let Some(end) = rest.find([',', '[']) {
        name += &rest[..end];
        let Some(inside) = rest[end..].strip_prefix('[') else { return name };
        name += inside.split([',', '-', ']']).next().unwrap_or_default();
        rest = inside.split_once(']').map_or("", |(_, after)| after);
    }
    name + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(flags: Flags, set: &[(&str, &str)]) -> Result<Launch, String> {
        let value = |name: &str| {
            set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        find(&flags, value).map_err(|e| e.to_string())
    }

    fn none(set: &[(&str, &str)]) -> Result<Launch, String> {
        found(Flags::default(), set)
    }

    const TORCHRUN: [(&str, &str); 8] = [
        ("RANK", "5"),
        ("WORLD_SIZE", "16"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RUN_ID", "abc"),
        ("TORCHELASTIC_RESTART_COUNT", "2"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ];

    #[test]
    fn every_launcher_is_found_by_what_it_sets() {
        let torchrun = none(&TORCHRUN).unwrap();
        let Launch { rank, ranks, local_rank, port, attempt, .. } = torchrun;
        assert_eq!((rank, ranks, local_rank, port, attempt), (5, 16, 1, 29_501, 2));
        assert_eq!((&*torchrun.host, &*torchrun.run), ("node0", "abc"));
        let plain = none(&TORCHRUN[..5]).unwrap();
        assert_eq!((plain.port, plain.port_from), (29_500, "MASTER_PORT"));
        let slurm = none(&[
            ("SLURM_PROCID", "9"),
            ("SLURM_NTASKS", "16"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "4242"),
            ("SLURM_STEP_ID", "1"),
            ("SLURM_RESTART_COUNT", "3"),
            ("SLURM_STEP_NODELIST", "a100-[03,05-07]"),
        ])
        .unwrap();
        assert_eq!((slurm.rank, slurm.ranks, slurm.attempt), (9, 16, 3));
        assert_eq!((&*slurm.host, &*slurm.run, slurm.port), ("a100-03", "slurm 4242.1", 29_695));
        let mpi = none(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ])
        .unwrap();
        assert_eq!((mpi.launcher, mpi.rank, &*mpi.host), (Launcher::OpenMpi, 1, LOOPBACK));
        let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MASTER_ADDR", "n0")];
        let found = none(&pmi).unwrap();
        assert_eq!((found.launcher, found.local_rank, &*found.host), (Launcher::Pmi, 0, "n0"));
        let job = [
            ("JOB_COMPLETION_INDEX", "3"),
            ("FOVEATE_RANKS", "4"),
            ("MASTER_ADDR", "train-0.train"),
        ];
        let found = none(&job).unwrap();
        assert_eq!((found.launcher, found.rank, found.ranks), (Launcher::Kubernetes, 3, 4));
        assert_eq!((found.port, found.port_from), (29_400, "the default"));
        let times = [("FOVEATE_DEADLINE", "1800"), ("FOVEATE_SILENCE", "30")];
        let patient = none(&[&TORCHRUN[..], &times].concat()).unwrap().meeting();
        assert_eq!([patient.deadline, patient.silence].map(|d| d.as_secs()), [1800, 30]);
        assert_eq!(patient.arrival, torchrun.meeting().arrival);
        let alone = none(&[]).unwrap();
        assert_eq!((alone.launcher, alone.rank, alone.ranks), (Launcher::Alone, 0, 1));
    }

    #[test]
    fn flags_come_first_and_a_port_of_ours_before_the_launchers() {
        let flags = |rank, ranks, meet: &str| Flags {
            rank: Some(rank),
            ranks: Some(ranks),
            meet: Some(meet.to_owned()),
        };
        let launch = found(flags(1, 2, "[::1]:400"), &TORCHRUN).unwrap();
        assert_eq!((launch.launcher, launch.rank), (Launcher::Flags, 1));
        assert_eq!((&*launch.host, launch.port), ("::1", 400));
        let mut with_port = TORCHRUN.to_vec();
        with_port.push(("FOVEATE_PORT", "5000"));
        let launch = none(&with_port).unwrap();
        assert_eq!((launch.port, launch.port_from), (5000, "FOVEATE_PORT"));
        let error = found(flags(1, 2, "node:0"), &[]).unwrap_err();
        assert!(error.starts_with("the port is 0 by --meet"), "{error}");
        let error = found(flags(1, 2, "node"), &[]).unwrap_err();
        assert_eq!(error, "--meet node: say host:port, such as node0:29400");
    }

    #[test]
    fn the_script_of_a_slurm_job_is_no_rank() {
        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "16"), ("SLURM_JOB_ID", "1")];
        assert_eq!(none(&batch).unwrap().launcher, Launcher::Alone);
    }

    /// Slurm's variables are those of the process that `mpirun` has on each host.
    #[test]
    fn ranks_of_mpirun_within_an_allocation_of_slurm_are_its_own() {
        let step = [
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "16"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_STEP_NODELIST", "n[0-1]"),
        ];
        assert_eq!(none(&step).unwrap().launcher, Launcher::Slurm);
        for (mpirun, launcher) in [
            ([("OMPI_COMM_WORLD_RANK", "9"), ("OMPI_COMM_WORLD_SIZE", "16")], Launcher::OpenMpi),
            ([("PMI_RANK", "1"), ("PMI_SIZE", "16")], Launcher::Pmi),
        ] {
            let found = none(&[&step[..], &mpirun, &[("MASTER_ADDR", "n0")]].concat()).unwrap();
            let rank: usize = mpirun[0].1.parse().unwrap();
            assert_eq!((found.launcher, found.rank, found.ranks), (launcher, rank, 16));
        }
        // `srun --mpi=pmi2` sets both alike.
        let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "2")];
        assert_eq!(none(&[&step[..], &pmi].concat()).unwrap().launcher, Launcher::Slurm);
    }

    #[test]
    fn the_largest_numbers_of_slurm_give_a_port() {
        let largest = u64::MAX.to_string();
        let slurm = none(&[
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
            ("SLURM_JOB_ID", &largest),
            ("SLURM_STEP_ID", &largest),
        ]);
        // The number is 11,615 modulo 20,000, and eight of them 12,920.
        assert_eq!(slurm.unwrap().port, 32_920);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        for (set, says) in [
            (&[("RANK", "0")][..], "RANK is set and WORLD_SIZE is not"),
            (&[("WORLD_SIZE", "2")][..], "WORLD_SIZE is set and RANK is not"),
            (&[("RANK", "two"), ("WORLD_SIZE", "2")][..], "RANK is `two`, which is no number"),
            (
                &[("RANK", "-1"), ("WORLD_SIZE", "2")][..],
                "RANK is `-1`, which is no number of at least 0; correct it, or unset it",
            ),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")][..], "rank 2 of 2 by RANK and WORLD_SIZE"),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "70000")][..],
                "MASTER_PORT is `70000`; it is 65535 at most",
            ),
            (
                &[("RANK", "99999999999999999999"), ("WORLD_SIZE", "2")][..],
                "RANK is `99999999999999999999`; it is 18446744073709551615 at most",
            ),
            (
                &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4")][..],
                "set MASTER_ADDR",
            ),
            (
                &[("JOB_COMPLETION_INDEX", "0"), ("FOVEATE_RANKS", "4")][..],
                "an indexed Job needs MASTER_ADDR",
            ),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "0")][..],
                "the port is 0 by MASTER_PORT, where no rank finds another; give one from 1",
            ),
            (&[("FOVEATE_SILENCE", "0")][..], "FOVEATE_SILENCE is `0`; give seconds, from 1"),
            (&[("FOVEATE_DEADLINE", "soon")][..], "FOVEATE_DEADLINE is `soon`"),
        ] {
            let error = none(set).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        let most = |ranks: usize| {
            let meet = Some("127.0.0.1:5555".to_owned());
            found(Flags { rank: Some(0), ranks: Some(ranks), meet }, &[])
        };
        assert_eq!(most(65_536).unwrap().ranks, 65_536);
        for ranks in [65_537, 1_000_000_000, 100_000_000_000] {
            let line = format!("{ranks} ranks by flags; give at most 65536");
            assert_eq!(most(ranks).unwrap_err(), line);
            let set = [("RANK", "0"), ("WORLD_SIZE", &*ranks.to_string())];
            let error = none(&set).unwrap_err();
            assert!(error.starts_with(&format!("{ranks} ranks by RANK and WORLD_SIZE")), "{error}");
        }
        let some = Flags { rank: Some(0), ..Flags::default() };
        assert!(found(some, &[]).unwrap_err().contains("give all three"));
    }

    #[test]
    fn the_first_host_of_a_list_of_slurm_is_found() {
        for (list, first) in [
            ("gpu007", "gpu007"),
            ("gpu[007-010,12],login", "gpu007"),
            ("a,b", "a"),
            ("rack1-[3,5]-ib,x", "rack1-3-ib"),
            ("rack[1-2]n[03-04,7],login", "rack1n03"),
            ("gpu[1", "gpu1"),
        ] {
            assert_eq!(first_node(list), first);
        }
    }
}
