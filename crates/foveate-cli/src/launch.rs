//! `foveate launch`: several ranks of a command on this host.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use foveate_shard::launch::{Flags, find};

use crate::failure::{AGAIN, Failure};
use crate::interrupt::Interrupt;
use crate::number::number;
use crate::{Cli, Command, threads};

/// Run a command of this program as several ranks on this host
///
/// Each rank is a process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set as
/// torchrun sets them. Rank 0 has this terminal; lines of the others come with their rank before
/// them. When a rank fails, all end.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Number of ranks
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = several)]
    ranks: u16,
    /// The command and its arguments, such as: train recipe.toml
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// A number of ranks that one host starts.
fn several(text: &str) -> Result<u16, String> {
    let ranks: usize = number(text)?;
    let few = u16::try_from(ranks).ok().filter(|few| (1..=1024).contains(few));
    few.ok_or_else(|| format!("{ranks} is not in 1..=1024"))
}

/// Tells ranks how many this command started.
const VARIABLE: &str = "FOVEATE_LAUNCHED";

/// The ranks that `foveate launch` started, in one of them.
pub fn ranks() -> Option<String> {
    std::env::var(VARIABLE).ok()
}

/// Tells ranks the process id of this command.
const LAUNCHER: &str = "FOVEATE_LAUNCHER";

/// Has this process end when the `foveate launch` that started it is gone, as it does by Ctrl-C: saved where there is
/// something to save. A rank of other launchers, or one that is no direct child, goes its own way.
///
/// # Errors
/// When that command is gone already.
#[cfg(target_os = "linux")]
pub fn end_with_launcher() -> Result<(), Failure> {
    use rustix::process::{
        Pid, Signal, getppid, set_parent_process_death_signal, test_kill_process,
    };
    let id = std::env::var(LAUNCHER).ok().and_then(|id| Pid::from_raw(id.parse().ok()?));
    let Some(launcher) = id else { return Ok(()) };
    let is_child = getppid() == Some(launcher);
    if is_child {
        set_parent_process_death_signal(Some(Signal::USR1)).map_err(|e| {
            Failure::new(format!("the end of `foveate launch` cannot be watched: {e}"))
        })?;
    }
    // It may have ended before: a child has another parent then, even where nobody has waited for the launcher yet.
    let is_gone = match is_child {
        true => getppid() != Some(launcher),
        false => test_kill_process(launcher) == Err(rustix::io::Errno::SRCH),
    };
    if is_gone {
        return Err(Failure::lost("`foveate launch` ended before its ranks began"));
    }
    Ok(())
}

/// Elsewhere ranks do not know of it.
///
/// # Errors
/// None.
#[cfg(not(target_os = "linux"))]
pub fn end_with_launcher() -> Result<(), Failure> {
    Ok(())
}

/// How long the other ranks have to end by themselves when one has failed.
const GRACE: Duration = Duration::from_secs(30);

/// How often ranks are looked at.
const PAUSE: Duration = Duration::from_millis(20);

/// Starts the ranks and waits for them.
pub fn run(args: &Args) -> Result<(), Failure> {
    readable(&args.command)?;
    patient(usize::from(args.ranks))?;
    let interrupt = Interrupt::watch()?;
    let failed = |what: &str, e: std::io::Error| Failure::new(format!("{what}: {e}"));
    let program = std::env::current_exe().map_err(|e| failed("this program is not found", e))?;
    // Free now; rank 0 says so should somebody else have it by then.
    let port = TcpListener::bind(("127.0.0.1", 0))
        .and_then(|listener| listener.local_addr())
        .map_err(|e| failed("no port is free", e))?
        .port();
    let run = format!("{}", std::process::id());
    // Ranks share the cores, unless the user says otherwise.
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::var_os(threads::VARIABLE)
        .unwrap_or_else(|| (cores / usize::from(args.ranks)).max(1).to_string().into());
    let mut ranks = Ranks(Vec::new());
    for rank in 0..args.ranks {
        let first = rank == 0;
        let stdio = |own: bool| if own { Stdio::inherit() } else { Stdio::piped() };
        let mut child = std::process::Command::new(&program)
            .args(&args.command)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", args.ranks.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("FOVEATE_RUN", &run)
            .env(VARIABLE, args.ranks.to_string())
            .env(LAUNCHER, &run)
            .env(threads::VARIABLE, &threads)
            .env_remove("FOVEATE_PORT")
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .stdin(if first { Stdio::inherit() } else { Stdio::null() })
            .stdout(stdio(first))
            .stderr(stdio(first))
            .spawn()
            .map_err(|e| failed(&format!("rank {rank} does not start"), e))?;
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || copy(rank, BufReader::new(stdout), std::io::stdout()));
        }
        if let Some(stderr) = child.stderr.take() {
            thread::spawn(move || copy(rank, BufReader::new(stderr), std::io::stderr()));
        }
        ranks.0.push((child, None));
    }
    ranks.wait(&interrupt)
}

/// Whether ranks can read what of this environment is not theirs: how long they wait. What is wrong with it is said
/// once.
fn patient(ranks: usize) -> Result<(), Failure> {
    let meet = Some("127.0.0.1:1".to_owned());
    let of_all = |name: &str| std::env::var(name).ok().filter(|_| name.starts_with("FOVEATE_"));
    let found = find(&Flags { rank: Some(0), ranks: Some(ranks), meet }, of_all);
    found.map(|_| ()).map_err(|e| Failure::usage(e.to_string()))
}

/// Whether ranks can read their command line, and share what it asks for: what is wrong with it is said once.
fn readable(command: &[String]) -> Result<(), Failure> {
    let words = std::iter::once("foveate").chain(command.iter().map(String::as_str));
    match &Cli::try_parse_from(words).map_err(Failure::Misread)?.command {
        Command::Launch(_) => Err(Failure::usage("a rank of `foveate launch` launches no ranks")
            .help("name the command that ranks run, such as: foveate launch --ranks 2 -- train recipe.toml")),
        Command::Doctor(_) => Ok(()),
        Command::Train(args) => args.ranks().refuse(),
        Command::Bench(args) if let Some(ranks) = args.ranks() => ranks.refuse(),
        _ => {
            let alone = format!("`foveate {}` is not shared by ranks: each would do all of it", command.join(" "));
            Err(Failure::usage(alone).help("give it by itself; ranks share train and bench train"))
        }
    }
}

/// Copies lines with the rank before them.
fn copy(rank: u16, from: impl BufRead, mut to: impl Write) {
    for line in from.split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        // Nobody reads: the rank goes on.
        let _ = writeln!(to, "[{rank}] {line}");
    }
}

/// Processes that have not ended with their rank's status; those that are left end with this value.
struct Ranks(Vec<(Child, Option<ExitStatus>)>);

impl Ranks {
    fn wait(&mut self, interrupt: &Interrupt) -> Result<(), Failure> {
        let (mut failed, mut killed) = (false, None);
        let mut until = None;
        let mut told = false;
        loop {
            let mut ends = false;
            for (rank, (child, ended)) in self.0.iter_mut().enumerate() {
                if ended.is_none() {
                    *ended = child.try_wait().map_err(|e| {
                        Failure::new(format!("rank {rank} cannot be waited for: {e}"))
                    })?;
                    if let Some(status) = ended.filter(|status| !status.success()) {
                        failed = true;
                        if status.code().is_none() {
                            killed.get_or_insert((rank, status));
                        }
                        until.get_or_insert(Instant::now() + GRACE);
                        ends = true;
                    }
                }
            }
            if self.0.iter().all(|(_, ended)| ended.is_some()) {
                break;
            }
            if ends {
                self.wake();
            }
            if interrupt.pressed() && !told {
                told = true;
                self.ask_to_end();
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                break;
            }
            thread::sleep(PAUSE);
        }
        if interrupt.pressed() {
            return Err(Failure::Interrupted);
        }
        let statuses = || self.0.iter().filter_map(|(_, ended)| *ended);
        let again = |status: ExitStatus| status.code() == Some(i32::from(AGAIN));
        if let Some((rank, status)) = killed {
            return Err(Failure::lost(format!("rank {rank} ended by {status}")));
        }
        // Ranks have said why. Where one has something wrong, starting again is of no use.
        match failed {
            false => Ok(()),
            true if statuses().any(|s| s.code() == Some(130)) => Err(Failure::Interrupted),
            true if statuses().all(|s| s.success() || again(s)) => Err(Failure::Lost(None)),
            // All were given the same.
            true if statuses().any(|s| s.code() == Some(2)) => Err(Failure::ToldUsage),
            true => Err(Failure::Elsewhere),
        }
    }

    /// Has a rank that was stopped go on, when another has failed: it finds that, and ends by itself.
    #[cfg(unix)]
    fn wake(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    /// Sends SIGUSR1: Ctrl-C in a terminal and some schedulers signal ranks, too, and a second SIGINT or SIGTERM would
    /// end them before they have saved.
    #[cfg(unix)]
    fn ask_to_end(&self) {
        self.signal(rustix::process::Signal::USR1);
    }

    /// Sends a signal to the ranks that run.
    #[cfg(unix)]
    fn signal(&self, signal: rustix::process::Signal) {
        for (child, _) in self.0.iter().filter(|(_, ended)| ended.is_none()) {
            // One that has just ended needs none.
            let _ = rustix::process::kill_process(rustix::process::Pid::from_child(child), signal);
        }
    }

    #[cfg(not(unix))]
    fn wake(&self) {}

    #[cfg(not(unix))]
    fn ask_to_end(&self) {}
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (child, ended) in &mut self.0 {
            if ended.is_none() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}
