//! `foveate shard log`: which rank did what others did not, by what each wrote of its last transfers.

use std::path::{Path, PathBuf};

use foveate_shard::collectives::log::{TransferLog, compare, rank_named};

use crate::failure::Failure;
use crate::number::number;
use crate::output::{Output, tell};

/// Say which rank did what others did not, from the logs that ranks write when one fails
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    /// Files of a run's folder `transfers`, one for each rank, or that folder
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print the last N transfers of each rank, too
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = number::<usize>)]
    last: usize,
    /// Print one JSON object
    #[arg(long, conflicts_with = "last")]
    json: bool,
}

/// Reads, compares and prints.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let mut files = Vec::new();
    for file in &args.files {
        files.extend(if file.is_dir() { of_folder(file)? } else { vec![file.clone()] });
    }
    let (mut logs, mut wrong, mut unread) = (Vec::new(), Vec::new(), Vec::new());
    for file in &files {
        match TransferLog::read(file) {
            Ok(log) => logs.push(log),
            Err(e) => {
                wrong.push(e);
                unread.extend(rank_named(file));
            }
        }
    }
    if logs.is_empty() && !wrong.is_empty() {
        let remedy = "give the folder `transfers` of a run, or files of it";
        return Err(Failure::from(wrong.swap_remove(0)).help(remedy));
    }
    wrong.iter().for_each(|e| tell!("warning: {e}; the file is left out"));
    let comparison = compare(logs.clone(), &unread)?;
    if args.json {
        return Ok(out.json(&comparison)?);
    }
    out.text(&comparison)?;
    if comparison.findings.is_empty() {
        out.line("all ranks did the same")?;
    }
    logs.sort_by_key(|log| log.header.rank);
    for TransferLog { header, transfers } in &logs {
        out.line(format_args!("rank {:<6} {}", header.rank, header.why))?;
        for t in &transfers[transfers.len().saturating_sub(args.last)..] {
            let took = t.ended.map_or("has not ended".to_owned(), |ended| {
                format!("{:.3} ms", 1e3 * (ended - t.began))
            });
            out.line(format_args!(
                "  {:>8} {:>12.6} s  {:<14} exchange {:<8} {:>12} bytes  plan {:016x}  {took}, \
                 among {:?}",
                t.number,
                t.began,
                t.kind.name(),
                t.place,
                t.bytes,
                t.plan,
                t.members
            ))?;
        }
    }
    Ok(())
}

/// The logs of a folder, in order of rank.
fn of_folder(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |e| Failure::new(format!("{}: {e}", dir.display()));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        files.push(entry.map_err(failed)?.path());
    }
    // One that is damaged is named when it is read.
    files.retain(|file| rank_named(file).is_some());
    if files.is_empty() {
        let message = "there is no transfer log in it; a rank writes one when another fails";
        return Err(Failure::new(format!("{}: {message}", dir.display())));
    }
    files.sort();
    Ok(files)
}
