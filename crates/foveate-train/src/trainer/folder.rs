//! The folder of a run: what is in it, and whether a run may start there.
//!
//! A run never writes over another one unasked. A folder holds a run when it has a checkpoint or
//! the metrics of a step. While a process trains, it holds a lock on the folder, which the system
//! gives back when the process ends in whatever way; where folders cannot be locked (Windows, some
//! network file systems) two processes are not told apart.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::Start;
use crate::checkpoint;
use crate::error::{TrainError, TrainErrorKind};
use crate::metrics::{self, JsonlLog, Record};

/// Where a run is kept.
#[derive(Clone, Copy)]
pub(super) struct Folder<'a>(&'a Path);

impl<'a> Folder<'a> {
    pub fn new(dir: &'a Path) -> Self {
        Self(dir)
    }

    pub fn recipe(&self) -> PathBuf {
        self.0.join("recipe.toml")
    }

    pub fn metrics(&self) -> PathBuf {
        self.0.join("metrics.jsonl")
    }

    pub fn curve(&self) -> PathBuf {
        self.0.join("loss.svg")
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.0.join("checkpoints")
    }

    /// The checkpoint that a run continues from, `None` for one that starts anew; or why it cannot
    /// start in this way.
    pub fn admit(&self, start: Start) -> Result<Option<PathBuf>, TrainError> {
        const OVER: &str = "start over with --start-over, which removes it";
        let refuse = |message: String| Err(self.refusal(message));
        if self.0.exists() && !self.0.is_dir() {
            return refuse("is no folder; choose another run.dir".to_owned());
        }
        let last = checkpoint::latest(&self.checkpoints());
        let steps = self.steps()?;
        match (start, last) {
            (Start::Over, _) => Ok(None),
            (Start::Resume, Some(last)) => Ok(Some(last)),
            (Start::Resume, None) if steps == 0 => {
                refuse("there is no checkpoint to resume from; start without --resume".to_owned())
            }
            (Start::Resume, None) => refuse(format!(
                "the run here is at step {steps} and has no checkpoint to resume from; {OVER}"
            )),
            (Start::New, Some(_)) => refuse(format!(
                "a run is already here; continue it with --resume, {OVER}, or choose another \
                 run.dir"
            )),
            (Start::New, None) if steps > 0 => refuse(format!(
                "a run is already here, at step {steps} and without a checkpoint; {OVER}, or choose \
                 another run.dir"
            )),
            (Start::New, None) => Ok(None),
        }
    }

    /// Makes the folder, takes it for this process, and removes what is to be started over. What
    /// [`Self::admit`] found, `last`, has to be so still. The folder is this process's for as long
    /// as what is returned lives.
    pub fn claim(&self, start: Start, last: Option<&Path>) -> Result<Claim, TrainError> {
        fs::create_dir_all(self.0).map_err(|e| TrainError::write(self.0, e))?;
        let held = File::open(self.0).ok();
        let taken = held.as_ref().map(File::try_lock);
        if matches!(taken, Some(Err(TryLockError::WouldBlock)))
            || self.admit(start)?.as_deref() != last
        {
            let message =
                "another process is training here; wait for it, or choose another run.dir";
            return Err(self.refusal(message.to_owned()));
        }
        if start == Start::Over {
            self.clear()?;
        }
        Ok(Claim { _held: held })
    }

    /// Refuses to start over where that would remove what the run is going to read.
    pub fn spare(&self, needed: &Path) -> Result<(), TrainError> {
        let [needed_at, checkpoints] =
            [needed.to_owned(), self.checkpoints()].map(|path| path.canonicalize().unwrap_or(path));
        match needed_at.starts_with(&checkpoints) {
            false => Ok(()),
            true => Err(self.refusal(format!(
                "starting over would remove {}, which the recipe reads; choose another run.dir",
                needed.display()
            ))),
        }
    }

    /// Steps that are logged.
    fn steps(&self) -> Result<u64, TrainError> {
        let log = self.metrics();
        let records = JsonlLog::read(&log).map_err(|e| TrainError::write(&log, e))?;
        Ok(records.iter().map(Record::step).max().unwrap_or(0))
    }

    /// Removes the run that is here, checkpoints first and the newest of them last: a process that
    /// dies meanwhile leaves a run that can be resumed, or one that can be told from none.
    fn clear(&self) -> Result<(), TrainError> {
        checkpoint::remove_all(&self.checkpoints())?;
        let logs = metrics::event_files(self.0).map_err(|e| TrainError::write(self.0, e))?;
        for file in logs.into_iter().chain([self.curve(), self.metrics()]) {
            match fs::remove_file(&file) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(TrainError::write(&file, e));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn refusal(&self, message: String) -> TrainError {
        TrainErrorKind::Folder { path: self.0.to_owned(), message }.into()
    }
}

/// That a folder is taken by this process.
pub(super) struct Claim {
    _held: Option<File>,
}
