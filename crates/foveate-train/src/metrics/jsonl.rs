//! The log as JSON lines.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use super::Record;

/// An append-only file of one record a line.
#[derive(Debug)]
pub struct JsonlLog(File);

impl JsonlLog {
    /// Opens the log for a run that continues after `step` (0 for a new one): records of later
    /// steps, which a resumed run takes again, and a last line cut short are dropped.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn open(path: &Path, step: u64) -> io::Result<Self> {
        if path.exists() {
            let mut kept = Vec::new();
            for record in Self::read(path)?.iter().filter(|r| r.step() <= step) {
                serde_json::to_writer(&mut kept, record)?;
                kept.push(b'\n');
            }
            let temporary = path.with_extension("tmp");
            crate::checkpoint::write_file(&temporary, &kept)?;
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
        match std::fs::read_to_string(path) {
            Ok(text) => Ok(text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::EvalMetrics;

    fn record(step: u64) -> Record {
        let held_out_loss = 1.0 / step as f64;
        Record::Eval(EvalMetrics { step, held_out_loss, perplexity: 2.0, tokens: 7 })
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
}
