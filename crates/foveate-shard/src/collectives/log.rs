//! What ranks did last, on disk: a file for each rank, and what one did that others did not.
//!
//! A [`TransferLog`] is written by a rank that ends because another failed. Its file has one JSON
//! object a line: what the rank is and why it ended, then [`Transfer`]s from the oldest. [`compare`]
//! reads the files of a run together.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Collectives, Kind, Transfer};
use crate::error::{ShardError, refused};
use crate::mesh::MOST_RANKS;

/// The last transfers of a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferLog {
    /// Which rank it is, and why it ended.
    pub header: Header,
    /// Oldest first.
    pub transfers: Vec<Transfer>,
}

const OPENS: &str = "rank-";
const ENDS: &str = ".jsonl";

/// Bytes of a first line at most, by which a file is told to be a log.
const FIRST_LINE: u64 = 1 << 16;

/// Bytes of a log at most: 1,000 transfers, each among as many ranks as there may be.
const MOST_BYTES: u64 = 1 << 29;

/// The rank that `path` names, where it has the name of a file of [`TransferLog::write`].
pub fn rank_named(path: &Path) -> Option<usize> {
    let number = path.file_name()?.to_str()?.strip_prefix(OPENS)?.strip_suffix(ENDS)?;
    let digits = number.bytes().all(|b| b.is_ascii_digit());
    number.parse().ok().filter(|_| digits)
}

/// Whether `path` has the name of a file of [`TransferLog::write`], and its first line; or nothing, where its rank was
/// killed before it had written that.
pub fn is_log(path: &Path) -> bool {
    // Opening a pipe would wait for its other end.
    if rank_named(path).is_none() || !fs::metadata(path).is_ok_and(|file| file.is_file()) {
        return false;
    }
    let mut line = Vec::new();
    let read = File::open(path)
        .and_then(|file| BufReader::new(file).take(FIRST_LINE).read_until(b'\n', &mut line));
    read.is_ok_and(|_| line.is_empty() || serde_json::from_slice::<Header>(&line).is_ok())
}

/// The first line of a log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// The rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Which meeting of ranks it was: logs of another one are of an earlier attempt.
    pub meeting: u64,
    /// Seconds after the meeting when it wrote this.
    pub seconds: f64,
    /// Why the rank ended, in its words.
    pub why: String,
}

impl TransferLog {
    /// What `group`, that of all ranks, did last on this rank, which ends because of `why`.
    pub fn of(group: &dyn Collectives, why: &str) -> Self {
        let (rank, ranks, (meeting, seconds)) = (group.rank(), group.ranks(), group.meeting());
        let header = Header { rank, ranks, meeting, seconds, why: why.to_owned() };
        Self { header, transfers: group.history() }
    }

    /// Writes it to the folder `dir`, which is made where it is not there, and gives the file.
    ///
    /// # Errors
    /// When folder or file cannot be written, or the file is there and is no log.
    pub fn write(&self, dir: &Path) -> io::Result<PathBuf> {
        fs::create_dir_all(dir)?;
        let file = dir.join(format!("{OPENS}{:05}{ENDS}", self.header.rank));
        if file.exists() && !is_log(&file) {
            let why = format!("{} is no log of transfers, and stays", file.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        // Half of one would be taken for no log.
        let written = self.write_to(File::create(&file)?);
        written.inspect_err(|_| drop(fs::remove_file(&file)))?;
        Ok(file)
    }

    fn write_to(&self, file: File) -> io::Result<()> {
        let mut out = BufWriter::new(file);
        serde_json::to_writer(&mut out, &self.header)?;
        for transfer in &self.transfers {
            out.write_all(b"\n")?;
            serde_json::to_writer(&mut out, transfer)?;
        }
        out.write_all(b"\n")?;
        out.flush()
    }

    /// Reads a file of [`Self::write`].
    ///
    /// # Errors
    /// When it cannot be read, or a line of it is none of a log.
    pub fn read(file: &Path) -> Result<Self, ShardError> {
        let at = file.display();
        let failed = |e| ShardError::new(format!("{at}: {e}"));
        // Opening a pipe would wait for its other end.
        let about = fs::metadata(file).map_err(failed)?;
        if !about.is_file() {
            return Err(ShardError::new(format!("{at}: it is not a file")));
        }
        if about.len() > MOST_BYTES {
            let bytes = about.len();
            return refused(format!(
                "{at}: it has {bytes} bytes, and a transfer log at most {MOST_BYTES}"
            ));
        }
        let opened = File::open(file).map_err(failed)?;
        let mut header = None;
        let mut transfers = Vec::new();
        // Not of text: a line that is none is named, too.
        for (i, line) in BufReader::new(opened).split(b'\n').enumerate() {
            let line = line.map_err(failed)?;
            let wrong = |e: serde_json::Error| {
                // It knows of one line.
                let (why, place) = (e.to_string(), format!(" at line 1 column {}", e.column()));
                let why = why.strip_suffix(&place).unwrap_or(&why);
                let at = format!("{at}:{}:{}", i + 1, e.column());
                ShardError::new(format!("{at}: {why}; that is no line of a transfer log"))
            };
            match header {
                None => header = Some(serde_json::from_slice(&line).map_err(wrong)?),
                Some(_) => transfers.push(serde_json::from_slice(&line).map_err(wrong)?),
            }
        }
        match header {
            Some(Header { rank, ranks, .. }) if rank >= ranks || ranks > MOST_RANKS => refused(
                format!("{at}:1: rank {rank} of {ranks}; that is no line of a transfer log"),
            ),
            Some(header) => Ok(Self { header, transfers }),
            None => refused(format!("{at}: it is empty; a transfer log has a line for its rank")),
        }
    }

    /// The transfers in which the rank was at `end`.
    fn unfinished(&self, end: f64) -> impl Iterator<Item = &Transfer> {
        self.transfers.iter().filter(move |t| t.ended.is_none() && t.began <= end)
    }
}

/// What logs of a run say together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Number of ranks of the run.
    pub ranks: usize,
    /// Ranks without a log: they were killed, or wrote to another disk, or their log was not read.
    pub silent: Vec<usize>,
    /// Those of them whose log is there and was not read.
    pub unread: Vec<usize>,
    /// Ranks whose log is of an earlier meeting, and was left out.
    pub earlier: Vec<usize>,
    /// One line for each thing that some ranks did and others did not.
    pub findings: Vec<Finding>,
}

/// What one rank did, or did not do, and others did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The ranks that differ.
    pub ranks: Vec<usize>,
    /// What differs.
    pub message: String,
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{}", finding.message)?;
        }
        if !self.earlier.is_empty() {
            let ranks = listed(&self.earlier);
            writeln!(f, "{ranks}: the log is of an earlier attempt, and was left out")?;
        }
        Ok(())
    }
}

/// Ranks in words: `rank 3`, `ranks 0 to 2 and 7`.
fn listed(ranks: &[usize]) -> String {
    let runs: Vec<String> = ranks
        .chunk_by(|a, b| a + 1 == *b)
        .map(|run| match run {
            [one] => one.to_string(),
            [one, two] => format!("{one}, {two}"),
            [first, .., last] => format!("{first} to {last}"),
            [] => String::new(),
        })
        .collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, runs.join(", "))
}

/// An exchange of a group: the group and its number there.
type Exchange = (u64, u64);

/// What the logs of the ranks of a run say together: which rank did what others did not. The ranks `unread` have
/// a log that is not among them, since it could not be read.
///
/// # Errors
/// When there is no log, two are of one rank, or they count other ranks.
pub fn compare(mut logs: Vec<TransferLog>, unread: &[usize]) -> Result<Comparison, ShardError> {
    logs.sort_by_key(|log| log.header.rank);
    // Of the meeting that most are of.
    let votes = |log: &TransferLog| {
        logs.iter().filter(|other| other.header.meeting == log.header.meeting).count()
    };
    let Some(most) = logs.iter().max_by_key(|log| votes(log)) else {
        return refused("there is no transfer log; a rank writes one when another fails");
    };
    let Header { ranks, meeting, .. } = most.header;
    let earlier = logs.iter().filter(|log| log.header.meeting != meeting);
    let earlier: Vec<usize> = earlier.map(|log| log.header.rank).collect();
    logs.retain(|log| log.header.meeting == meeting);
    for pair in logs.windows(2) {
        if pair[0].header.rank == pair[1].header.rank {
            let rank = pair[0].header.rank;
            return refused(format!("two logs are of rank {rank}; give one of each rank"));
        }
    }
    if let Some(log) = logs.iter().find(|log| log.header.ranks != ranks) {
        let Header { rank, ranks: theirs, .. } = log.header;
        return refused(format!("rank {rank} counts {theirs} ranks, and others {ranks}"));
    }
    // What a rank began when the first had given up was too late.
    let end = logs.iter().map(|log| log.header.seconds).fold(f64::INFINITY, f64::min);
    let of = |rank: usize| logs.iter().find(|log| log.header.rank == rank);
    let silent: Vec<usize> = (0..ranks).filter(|&rank| of(rank).is_none()).collect();
    let unread: Vec<usize> = silent.iter().copied().filter(|rank| unread.contains(rank)).collect();
    let mut findings = different(&logs);
    let mut waited_for: BTreeMap<usize, Vec<(usize, &Transfer)>> = BTreeMap::new();
    for log in &logs {
        for transfer in log.unfinished(end) {
            for &member in &transfer.members {
                let began = |other: &TransferLog| {
                    let same = |t: &&Transfer| {
                        (t.group, t.place) == (transfer.group, transfer.place)
                            && transfer.kind != Kind::SendReceive
                            && t.began <= end
                    };
                    other.transfers.iter().any(|t| same(&t))
                };
                if member != log.header.rank && !of(member).is_some_and(began) {
                    waited_for.entry(member).or_default().push((log.header.rank, transfer));
                }
            }
        }
    }
    for (&rank, waits) in &waited_for {
        // A rank that waits itself is held up, and not the one that holds up.
        let held_up = of(rank).is_some_and(|log| log.unfinished(end).next().is_some());
        if held_up {
            continue;
        }
        let (_, first) = waits[0];
        let mut by: Vec<usize> = waits.iter().map(|&(rank, _)| rank).collect();
        by.dedup();
        let last = of(rank).and_then(|log| log.transfers.iter().rfind(|t| t.began <= end));
        let what = match last {
            None if unread.contains(&rank) => "its log could not be read".to_owned(),
            None if silent.contains(&rank) => "it left no log: it was killed, or its disk is \
                                               another"
                .to_owned(),
            None => "it had begun no transfer".to_owned(),
            Some(last) => {
                let ended = last.ended.unwrap_or(last.began);
                format!("its last was {}, which ended at {ended:.3} s", said(last))
            }
        };
        let message = format!(
            "rank {rank} did not begin {}, in which {} {} since {:.3} s; {what}",
            said(first),
            listed(&by),
            if by.len() == 1 { "waits" } else { "wait" },
            waits.iter().map(|(_, t)| t.began).fold(f64::INFINITY, f64::min)
        );
        findings.push(Finding { ranks: vec![rank], message });
    }
    let is_told = |rank: &usize| waited_for.contains_key(rank) || unread.contains(rank);
    let rest: Vec<usize> = silent.iter().copied().filter(|rank| !is_told(rank)).collect();
    if !rest.is_empty() {
        let message = format!("{} left no log", listed(&rest));
        findings.push(Finding { ranks: rest, message });
    }
    Ok(Comparison { ranks, silent, unread, earlier, findings })
}

/// Exchanges of one place in a group that are not the same on all its ranks.
fn different(logs: &[TransferLog]) -> Vec<Finding> {
    let mut at: BTreeMap<Exchange, Vec<(usize, &Transfer)>> = BTreeMap::new();
    for log in logs {
        for transfer in log.transfers.iter().filter(|t| t.kind != Kind::SendReceive) {
            at.entry((transfer.group, transfer.place))
                .or_default()
                .push((log.header.rank, transfer));
        }
    }
    let mut findings = Vec::new();
    for all in at.values() {
        // What most did is what was meant.
        let same = |a: &Transfer, b: &Transfer| (a.kind, a.plan) == (b.kind, b.plan);
        let votes = |t: &Transfer| all.iter().filter(|(_, other)| same(t, other)).count();
        let Some(&(_, most)) = all.iter().rev().max_by_key(|(_, t)| votes(t)) else { continue };
        let odd: Vec<_> = all.iter().filter(|(_, t)| !same(t, most)).collect();
        let Some(&&(_, first)) = odd.first() else { continue };
        let ranks: Vec<usize> = odd.iter().map(|&&(rank, _)| rank).collect();
        let others = all.iter().filter(|(_, t)| same(t, most)).map(|&(rank, _)| rank);
        let others: Vec<usize> = others.collect();
        let what = match first.kind == most.kind {
            true => {
                format!("is of plan {:016x}, {} of {:016x}", first.plan, listed(&others), most.plan)
            }
            false => {
                format!("does {}, {} {}", first.kind.name(), listed(&others), most.kind.name())
            }
        };
        let message = format!(
            "{} {what}, as exchange {} of the group of {}",
            listed(&ranks),
            first.place,
            listed(&first.members)
        );
        findings.push(Finding { ranks, message });
        // What follows differs because this did.
        break;
    }
    findings
}

/// A transfer in words.
fn said(transfer: &Transfer) -> String {
    let Transfer { kind, members, place, bytes, .. } = transfer;
    let at = match kind {
        Kind::SendReceive => String::new(),
        _ => format!(", exchange {place}"),
    };
    format!("{} of {bytes} bytes among {}{at}", kind.name(), listed(members))
}
