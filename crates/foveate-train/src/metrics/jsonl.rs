//! The log as JSON lines.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use serde::Deserialize;

use super::Record;
use crate::whole;

/// How every record begins.
const BEGINNING: &[u8] = b"{\"kind\":\"";

/// What a line of a log is.
enum Line<'a> {
    /// A whole record.
    Record(Box<Record>),
    /// A record of another version of the trainer.
    Other { step: u64, line: &'a [u8] },
    /// Blank, or a record cut short at the end of the file, as a process that dies leaves it.
    Nothing,
    /// What is not ours.
    Foreign(&'a [u8]),
}

/// The step of a record of another version, where `line` is one.
fn other_version(line: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Stub {
        kind: String,
        step: u64,
    }
    let Stub { kind, step } = serde_json::from_slice(line).ok()?;
    matches!(kind.as_str(), "run" | "step" | "eval" | "save").then_some(step)
}

fn lines(text: &[u8]) -> impl Iterator<Item = Line<'_>> {
    text.split_inclusive(|&byte| byte == b'\n').map(|line| {
        let cut = !line.ends_with(b"\n");
        match serde_json::from_slice(line) {
            Ok(record) => Line::Record(Box::new(record)),
            _ if line.trim_ascii().is_empty() => Line::Nothing,
            _ if cut && (line.starts_with(BEGINNING) || BEGINNING.starts_with(line)) => {
                Line::Nothing
            }
            _ => match (other_version(line), line.trim_ascii_end()) {
                (Some(step), line) => Line::Other { step, line },
                (None, line) => Line::Foreign(line),
            },
        }
    })
}

/// The bytes of a log; none of one that is not there.
fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    match whole::check_regular(path).and_then(|()| std::fs::read(path)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read,
    }
}

/// An append-only file of one record a line.
#[derive(Debug)]
pub struct JsonlLog(File);

impl JsonlLog {
    /// Opens the log for a run that continues after `step` (0 for a new one): records of later
    /// steps, which a resumed run takes again, and a last line cut short are dropped. Lines that are no
    /// records stay.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn open(path: &Path, step: u64) -> io::Result<Self> {
        if path.exists() {
            let mut kept = Vec::new();
            for line in lines(&bytes(path)?) {
                match line {
                    Line::Record(record) if record.step() <= step => {
                        serde_json::to_writer(&mut kept, &record)?;
                    }
                    Line::Other { step: of, line } if of <= step => kept.extend_from_slice(line),
                    Line::Foreign(line) => kept.extend_from_slice(line),
                    Line::Record(_) | Line::Other { .. } | Line::Nothing => continue,
                }
                kept.push(b'\n');
            }
            let temporary = path.with_extension("tmp");
            crate::whole::write(&temporary, &kept)?;
            std::fs::rename(&temporary, path)?;
        }
        Ok(Self(OpenOptions::new().create(true).append(true).open(path)?))
    }

    /// Adds a record.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn append(&mut self, record: &Record) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        self.0.write_all(&line)
    }

    /// All whole records of a log; none of one that is not there.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn read(path: &Path) -> io::Result<Vec<Record>> {
        let record = |line| match line {
            Line::Record(record) => Some(*record),
            Line::Other { .. } | Line::Nothing | Line::Foreign(_) => None,
        };
        Ok(lines(&bytes(path)?).filter_map(record).collect())
    }

    /// The last step, `most` at most, of which there is a record, of this or another version.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn last_step(path: &Path, most: u64) -> io::Result<Option<u64>> {
        let step = |line| match line {
            Line::Record(record) => Some(record.step()),
            Line::Other { step, .. } => Some(step),
            Line::Nothing | Line::Foreign(_) => None,
        };
        Ok(lines(&bytes(path)?).filter_map(step).filter(|&step| step <= most).max())
    }

    /// The first line, counted from one, that is not of a log: neither a record, nor the beginning
    /// of one that ends the file, nor blank. `None` without the file.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn foreign_line(path: &Path) -> io::Result<Option<usize>> {
        let found = lines(&bytes(path)?).position(|line| matches!(line, Line::Foreign(_)));
        Ok(found.map(|before| before + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::EvalMetrics;

    fn record(step: u64) -> Record {
        let held_out_loss = 1.0 / step as f64;
        Record::Eval(EvalMetrics {
            step,
            unix_time: 1.5,
            held_out_loss,
            perplexity: 2.0,
            labelled_tokens: 7,
            seconds: 0.25,
        })
    }

    #[test]
    fn lines_that_are_no_records_are_found_and_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        assert_eq!(JsonlLog::foreign_line(&path).unwrap(), None);
        let ours = serde_json::to_string(&record(1)).unwrap();
        let whole = format!("{ours}\n\n{{\"loss\": 2}}\n{ours}\nnot\u{e9} \u{0}");
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(JsonlLog::foreign_line(&path).unwrap(), Some(3));
        JsonlLog::open(&path, 0).unwrap().append(&record(2)).unwrap();
        let ours = serde_json::to_string(&record(2)).unwrap();
        let kept = format!("{{\"loss\": 2}}\nnot\u{e9} \u{0}\n{ours}\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), kept);
        // Not text at all, or the only line, without an end.
        for other in [&b"\xff\xfe"[..], b"{\"loss\": 2}"] {
            std::fs::write(&path, other).unwrap();
            assert_eq!(JsonlLog::foreign_line(&path).unwrap(), Some(1));
        }
        for torn in ["", "{", "{\"kind\":\"ev", &ours[..20]] {
            std::fs::write(&path, format!("{ours}\n{torn}")).unwrap();
            assert_eq!(JsonlLog::foreign_line(&path).unwrap(), None, "{torn}");
        }
    }

    #[test]
    fn records_of_another_version_are_a_runs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let older = |step: u64| format!("{{\"kind\":\"step\",\"step\":{step},\"tokens\":9}}\n");
        std::fs::write(&path, older(1) + &older(2)).unwrap();
        assert_eq!(JsonlLog::foreign_line(&path).unwrap(), None);
        JsonlLog::open(&path, 1).unwrap().append(&record(2)).unwrap();
        assert_eq!(JsonlLog::read(&path).unwrap(), [record(2)]);
        assert!(std::fs::read_to_string(&path).unwrap().starts_with(&older(1)));
    }

    #[test]
    fn a_resumed_log_goes_on_after_its_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut log = JsonlLog::open(&path, 0).unwrap();
        (1..=5).for_each(|step| log.append(&record(step)).unwrap());
        let mut torn = OpenOptions::new().append(true).open(&path).unwrap();
        torn.write_all(b"{\"kind\":\"eval\",\"st").unwrap();
        let mut log = JsonlLog::open(&path, 3).unwrap();
        log.append(&record(4)).unwrap();
        let read = JsonlLog::read(&path).unwrap();
        assert_eq!(read, (1..=4).map(record).collect::<Vec<_>>());
        assert!(
            std::fs::read_to_string(&path).unwrap().starts_with("{\"kind\":\"eval\",\"step\":1,")
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_in_the_place_of_the_log_is_refused_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        if made.is_ok_and(|status| status.success()) {
            let told = JsonlLog::open(&path, 3).unwrap_err().to_string();
            assert_eq!(told, "it is a pipe or a device, not a file");
        }
    }
}
