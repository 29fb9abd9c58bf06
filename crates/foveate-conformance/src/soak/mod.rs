//! Looks for faults at random for a bounded time: programs and shapes against the oracle, runs that
//! are killed, damaged files, wrong command lines.
//!
//! Everything is made of rounds. A round is drawn from its seed alone, so that one seed replays it
//! without the rounds before; the seed of a run is that of its first round, and each round has the
//! next. Kinds of rounds take turns by the time that they have had.

mod commands;
mod damage;
mod kills;
mod process;
mod programs;
mod training;

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::PROGRESS;

/// How long to look, and for what.
#[derive(Clone, Debug)]
pub struct Options {
    limit: Duration,
    seed: u64,
    /// The one kind to run, if not all.
    only: Option<String>,
    /// How many rounds at most.
    rounds: u64,
    /// The binary under test.
    foveate: PathBuf,
}

/// A kind of rounds.
struct Kind {
    name: &'static str,
    /// Its part of the time, relative to the others'.
    weight: f64,
    /// Runs the round of a seed; what is wrong, in one line.
    round: Box<dyn FnMut(u64) -> Result<(), String>>,
    spent: Duration,
    rounds: u64,
}

impl Options {
    /// Reads `--name value` pairs.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut options = Self {
            limit: Duration::from_secs(600),
            seed: now.as_secs(),
            only: None,
            rounds: u64::MAX,
            foveate: program.with_file_name("foveate"),
        };
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
            let number = || value.parse().map_err(|_| format!("{name} is a number, not {value:?}"));
            match name.as_str() {
                "--seconds" => options.limit = Duration::from_secs(number()?),
                "--seed" => options.seed = number()?,
                "--rounds" => options.rounds = number()?,
                "--only" => options.only = Some(value),
                "--foveate" => options.foveate = value.into(),
                _ => return Err(format!("{name} {value} is no option; --help lists them")),
            }
        }
        Ok(options)
    }

    /// The kinds that were asked for.
    fn kinds(&self) -> Result<Vec<Kind>, String> {
        let foveate = std::path::absolute(&self.foveate).map_err(|e| e.to_string())?;
        let mut kinds: Vec<Kind> = Vec::new();
        let mut add = |name, weight, round| {
            let (spent, rounds) = (Duration::ZERO, 0);
            kinds.push(Kind { name, weight, round, spent, rounds });
        };
        let one = self.rounds == 1;
        add("programs", 4.0, Box::new(programs::rounds(one)));
        add("kills", 2.5, Box::new(kills::rounds(foveate.clone())));
        add("damage", 2.0, Box::new(damage::rounds(foveate.clone())));
        add("commands", 1.5, Box::new(commands::rounds(foveate.clone())));
        let names: Vec<_> = kinds.iter().map(|kind| kind.name).collect();
        kinds.retain(|kind| self.only.as_ref().is_none_or(|only| only == kind.name));
        if kinds.is_empty() {
            return Err(format!("--only takes one of {}", names.join(", ")));
        }
        if kinds.iter().any(|kind| kind.name != "programs") && !foveate.is_file() {
            let message = "is not there; name the binary with --foveate";
            return Err(format!("{}: {message}", foveate.display()));
        }
        Ok(kinds)
    }
}

/// Runs rounds until the time is over; whether none found anything.
pub fn run(options: &Options) -> Result<bool, String> {
    let mut kinds = options.kinds()?;
    let (began, mut told) = (Instant::now(), Instant::now());
    let mut faults = 0;
    for n in 0..options.rounds {
        if began.elapsed() >= options.limit {
            break;
        }
        let seed = options.seed.wrapping_add(n);
        let due = |kind: &Kind| kind.spent.as_secs_f64() / kind.weight;
        let kind = kinds.iter_mut().min_by(|a, b| due(a).total_cmp(&due(b)));
        let kind = kind.expect("there is one at least");
        let start = Instant::now();
        if let Err(fault) = (kind.round)(seed) {
            faults += 1;
            let name = kind.name;
            say!(
                "{name} failed: {fault}; replay: foveate-conformance soak --only {name} \
                 --seed {seed} --rounds 1"
            );
        }
        kind.spent += start.elapsed();
        kind.rounds += 1;
        if told.elapsed() >= PROGRESS {
            told = Instant::now();
            tell!("{}", progress(options, &kinds, began, faults));
        }
    }
    say!("{}", progress(options, &kinds, began, faults));
    Ok(faults == 0)
}

fn progress(options: &Options, kinds: &[Kind], began: Instant, faults: usize) -> String {
    let (now, limit) = (began.elapsed().as_secs(), options.limit.as_secs());
    let counts: Vec<_> =
        kinds.iter().map(|kind| format!("{} {}", kind.rounds, kind.name)).collect();
    let counts = counts.join(", ");
    format!("soak: {now} s of {limit}, seed {}: {counts}; {faults} failed", options.seed)
}
