//! The folder of a run: what is in it, and whether a run may start there.
//!
//! A run never writes over another one unasked, and never over a recipe, a log or documents that are
//! the user's. A folder holds a run when it has a checkpoint or the metrics of a step. A run's log is
//! there before its recipe and is removed after it, so a recipe without one is no run's. While a
//! process trains, it holds a lock on the folder, which the system
//! gives back when the process ends in whatever way; where folders cannot be locked (Windows, some
//! network file systems) two processes are not told apart.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use foveate_shard::collectives::log;
use serde::{Deserialize, Serialize};

use super::Start;
use crate::checkpoint;
use crate::error::{TrainError, TrainErrorKind};
use crate::metrics::{self, JsonlLog, Record};
use crate::whole::resolved;

/// How far the run came that is in a folder.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) struct Reached {
    /// The last step in its log.
    pub step: u64,
    /// Whether the log has a checkpoint that was whole.
    pub saved: bool,
}

/// Where a run is kept.
#[derive(Clone, Copy)]
pub(super) struct Folder<'a>(&'a Path);

impl<'a> Folder<'a> {
    pub fn new(dir: &'a Path) -> Self {
        Self(dir)
    }

    /// The last transfers of the ranks of an attempt that failed.
    pub fn transfers(&self) -> PathBuf {
        self.0.join("transfers")
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

    pub fn profile(&self) -> PathBuf {
        self.0.join("profile.json")
    }

    /// What would take long to find again.
    pub fn cache(&self) -> PathBuf {
        self.0.join("cache")
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.0.join("checkpoints")
    }

    /// What is here of a run, by its log; none where there is no log.
    ///
    /// # Errors
    /// When the log or a checkpoint cannot be read.
    pub fn reached(&self) -> Result<Option<Reached>, TrainError> {
        checkpoint::check_readable(&self.checkpoints())?;
        let log = self.metrics();
        if !log.try_exists().map_err(|e| unreadable(&log, &e))? || !log.is_file() {
            return Ok(None);
        }
        let records = self.records()?;
        let step = records.iter().map(Record::step).max().unwrap_or(0);
        let saved = records.iter().any(|record| matches!(record, Record::Save(_)));
        Ok(Some(Reached { step, saved }))
    }

    /// Of a log with a checkpoint that is not here: a run that begins anew would write over what it says.
    pub fn lost_checkpoints(&self) -> TrainError {
        let metrics = self.metrics();
        at(
            &self.checkpoints(),
            format!(
                "has no checkpoint, and {} says that one was saved; bring it back, or start over with \
                 --start-over, which removes the log",
                metrics.display()
            ),
        )
    }

    /// The checkpoint that a run continues from, `None` for one that starts anew; or why it cannot
    /// start in this way. Of several disks it is the `part` here of the newest that is whole; `anew` says
    /// that a run is on some disk of which no checkpoint is whole, and begins again.
    pub fn admit(
        &self,
        start: Start,
        part: Option<&Path>,
        anew: bool,
    ) -> Result<Option<PathBuf>, TrainError> {
        if self.0.exists() && !self.0.is_dir() {
            return Err(self.refusal("is no folder; choose another run.dir".to_owned()));
        }
        if start != Start::Resume {
            self.check_no_checkpoints()?;
        }
        self.check_kinds()?;
        checkpoint::check_readable(&self.checkpoints())?;
        // Before what is said of a run: it is not over, and nobody should start it over.
        if self.is_busy() {
            return Err(self.busy());
        }
        self.admit_run(start, part, anew)
    }

    /// [`Self::admit`] of a folder that no process is at work on, or this one holds.
    fn admit_run(
        &self,
        start: Start,
        part: Option<&Path>,
        anew: bool,
    ) -> Result<Option<PathBuf>, TrainError> {
        const OVER: &str = "start over with --start-over, which removes it";
        let refuse = |message: String| Err(self.refusal(message));
        let last = match (start, part) {
            (Start::Resume, Some(part)) => Some(part.to_owned()),
            _ => checkpoint::latest(&self.checkpoints()),
        };
        let steps = self.records()?.iter().map(Record::step).max().unwrap_or(0);
        match (start, last) {
            (Start::Resume, last) if anew => self.check_ours(last.is_some()).map(|()| None),
            (Start::Resume, Some(last)) => Ok(Some(last)),
            (Start::Resume, None) => refuse(
                "there is no checkpoint to resume from, and other ranks have one; give all ranks one \
                 folder, or set run.disks = \"local\""
                    .to_owned(),
            ),
            (Start::New, Some(_)) => refuse(format!(
                "a run is already here; continue it with --resume, {OVER}, or choose another \
                 run.dir"
            )),
            (Start::New, None) if steps > 0 => refuse(format!(
                "a run is already here, at step {steps} and without a checkpoint; begin it again with \
                 --resume, {OVER}, or choose another run.dir"
            )),
            (Start::New | Start::Over, last) => self.check_ours(last.is_some()).map(|()| None),
        }
    }

    /// Refuses to begin a run among the checkpoints of another, which removes those that it keeps no longer.
    fn check_no_checkpoints(&self) -> Result<(), TrainError> {
        match checkpoint::within_a_run(self.0) {
            Some(within) => Err(self.refusal(format!(
                "{within}; choose a run.dir of the run's own, such as runs/NAME"
            ))),
            None => Ok(()),
        }
    }

    /// Refuses folders where the run has files and files where it has a folder: it would fail after
    /// its first steps or its last.
    fn check_kinds(&self) -> Result<(), TrainError> {
        let files = [self.recipe(), self.metrics(), self.curve()].map(|file| (file, false));
        let found = |path: &Path| path.symlink_metadata().is_ok();
        for (path, folder) in
            [(self.checkpoints(), true), (self.cache(), true)].into_iter().chain(files)
        {
            if found(&path) && path.is_dir() != folder {
                let is = if folder { "is no folder" } else { "is a folder" };
                return Err(at(&path, format!("{is}; move it away, or choose another run.dir")));
            }
        }
        Ok(())
    }

    /// Refuses where a new run would replace a log or a recipe that no run wrote; `run` says that
    /// there is a checkpoint.
    fn check_ours(&self, run: bool) -> Result<(), TrainError> {
        let log = self.metrics();
        if let Some(line) = JsonlLog::foreign_line(&log).map_err(|e| unreadable(&log, &e))? {
            let message = format!(
                "line {line} is no record of a run, and a new run would remove it; move the file \
                 away, or choose another run.dir"
            );
            return Err(at(&log, message));
        }
        if self.recipe().exists() && !run && !log.exists() {
            let message = "no run is here that it would be the recipe of, and a new run would \
                           replace it; move it away, or choose another run.dir";
            return Err(at(&self.recipe(), message.to_owned()));
        }
        Ok(())
    }

    /// Refuses a recipe, given as `file`, that stands where the run saves the resolved one.
    pub fn check_recipe(&self, file: &Path, start: Start) -> Result<(), TrainError> {
        let [given, saved] = [file, &self.recipe()].map(|path| path.canonicalize().ok());
        if given.is_none() || given != saved {
            return Ok(());
        }
        let remedy = match start {
            Start::Resume => "resume with a copy of it that has another name",
            Start::New | Start::Over => "give it another name, or choose another run.dir",
        };
        Err(at(file, format!("the run would replace this recipe by its resolved form; {remedy}")))
    }

    /// Makes the folder, takes it for this process, and removes what is to be started over. What
    /// [`Self::admit`] found, `last`, has to be so still. The folder is this process's for as long
    /// as what is returned lives.
    pub fn claim(
        &self,
        start: Start,
        last: Option<&Path>,
        part: Option<&Path>,
        anew: bool,
    ) -> Result<Claim, TrainError> {
        let held = self.hold()?;
        self.check_kinds()?;
        let saved = anew && self.reached()?.is_some_and(|run| run.saved);
        if saved || self.admit_run(start, part, anew)?.as_deref() != last {
            let message = "another process has saved or removed a checkpoint meanwhile; give the \
                           command again";
            return Err(self.refusal(message.to_owned()));
        }
        if start == Start::Over {
            self.clear()?;
        }
        if anew {
            checkpoint::set_all_aside(&self.checkpoints())?;
        }
        self.clear_transfers()?;
        Ok(Claim { _held: held })
    }

    /// Makes the folder, and keeps other processes from it for as long as what is returned lives.
    pub fn hold(&self) -> Result<Option<File>, TrainError> {
        let unmade = |e| self.refusal(format!("cannot be made: {e}; choose another run.dir"));
        fs::create_dir_all(self.0).map_err(unmade)?;
        let held = File::open(self.0).ok();
        match held.as_ref().is_some_and(|folder| is_held(folder.try_lock())) {
            true => Err(self.busy()),
            false => Ok(held),
        }
    }

    /// Whether another process is at work on the folder.
    fn is_busy(&self) -> bool {
        // Several ranks may look at once; the lock of a look goes with its file.
        File::open(self.0).is_ok_and(|folder| is_held(folder.try_lock_shared()))
    }

    fn busy(&self) -> TrainError {
        let message = "another process is training here; wait for it, or choose another run.dir";
        self.refusal(message.to_owned())
    }

    /// Refuses to start where the run would remove or write over what it reads: `needed`.
    pub fn spare(
        &self,
        start: Start,
        needed: impl IntoIterator<Item = PathBuf>,
    ) -> Result<(), TrainError> {
        let own = self.own()?;
        let touched = |path: &PathBuf| {
            path.canonicalize().is_ok_and(|path| own.iter().any(|own| path.starts_with(own)))
        };
        let Some(path) = needed.into_iter().find(touched) else {
            return Ok(());
        };
        let would = match start {
            Start::Over => "starting over would remove",
            Start::New | Start::Resume => "the run would remove or write over",
        };
        Err(self.refusal(format!(
            "{would} {}, which the recipe reads; choose another run.dir, or leave the files of runs \
             out with data.exclude",
            path.display()
        )))
    }

    /// Refuses a new run in a folder that holds what the recipe reads, `needed`, or that lies in the checkpoint
    /// that the run starts from: files of the run would stand among the user's, where patterns of the next run
    /// find them.
    pub fn stand_apart(
        &self,
        start: Start,
        needed: impl IntoIterator<Item = PathBuf>,
        origin: Option<&Path>,
    ) -> Result<(), TrainError> {
        if start == Start::Resume {
            return Ok(());
        }
        let own = resolved(self.0);
        let within = origin.filter(|origin| own.starts_with(resolved(origin)));
        let why = match within {
            Some(origin) => format!("is in {}, which the run starts from", origin.display()),
            None => {
                let held = needed.into_iter().find(|path| resolved(path).starts_with(&own));
                let Some(held) = held else { return Ok(()) };
                format!("holds {}, which the recipe reads", held.display())
            }
        };
        Err(self.refusal(format!(
            "the folder of the run {why}; choose a run.dir of the run's own, such as runs/NAME"
        )))
    }

    /// What is here of all that a run removes or writes, links resolved.
    fn own(&self) -> Result<Vec<PathBuf>, TrainError> {
        let mut own = match self.0.is_dir() {
            true => metrics::event_files(self.0).map_err(|e| unreadable(self.0, &e))?,
            false => Vec::new(),
        };
        let replaced = [self.recipe(), self.metrics()];
        own.extend(replaced.iter().map(|file| file.with_extension("tmp")));
        own.extend(replaced);
        own.extend([self.curve(), self.profile(), self.checkpoints(), self.cache()]);
        Ok(own.into_iter().filter_map(|path| path.canonicalize().ok()).collect())
    }

    /// All that is logged.
    pub fn records(&self) -> Result<Vec<Record>, TrainError> {
        let log = self.metrics();
        JsonlLog::read(&log).map_err(|e| unreadable(&log, &e))
    }

    /// What the log of a run that goes on after `step` lacks of the steps before, and what stays in it that is no
    /// record.
    pub fn told_of_log(&self, step: u64) -> Result<Vec<String>, TrainError> {
        let (path, mut told) = (self.metrics(), Vec::new());
        if step == 0 {
            return Ok(told);
        }
        let failed = |e| unreadable(&path, &e);
        let is = match JsonlLog::last_step(&path, step).map_err(failed)? {
            Some(last) if last >= step => None,
            Some(last) => Some((format!("ends at step {last}"), last + 1)),
            None => Some(("has no record of a step".to_owned(), 1)),
        };
        told.extend(is.map(|(is, first)| {
            format!("{} {is}: records of steps {first} to {step} are missing", path.display())
        }));
        if let Some(line) = JsonlLog::foreign_line(&path).map_err(failed)? {
            told.push(format!("{}:{line} is no record of a run, and stays", path.display()));
        }
        Ok(told)
    }

    /// Removes the run that is here, checkpoints first and the newest of them last: a process that
    /// dies meanwhile leaves a run that can be resumed, or one that can be told from none.
    fn clear(&self) -> Result<(), TrainError> {
        checkpoint::remove_all(&self.checkpoints())?;
        let logs = metrics::event_files(self.0).map_err(|e| unreadable(self.0, &e))?;
        for file in
            logs.into_iter().chain([self.curve(), self.profile(), self.recipe(), self.metrics()])
        {
            match fs::remove_file(&file) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(TrainError::write(&file, e));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes what the ranks of an earlier attempt wrote about its end, and nothing else.
    fn clear_transfers(&self) -> Result<(), TrainError> {
        let dir = self.transfers();
        let Ok(entries) = fs::read_dir(&dir) else { return Ok(()) };
        for path in entries.flatten().map(|entry| entry.path()) {
            if log::is_log(&path) {
                fs::remove_file(&path).map_err(|e| TrainError::write(&path, e))?;
            }
        }
        Ok(())
    }

    fn refusal(&self, message: String) -> TrainError {
        at(self.0, message)
    }
}

/// Whether another process has the lock that was tried.
fn is_held(tried: Result<(), TryLockError>) -> bool {
    matches!(tried, Err(TryLockError::WouldBlock))
}

/// The refusal to run in a folder for the sake of what is at `path`.
fn at(path: &Path, message: String) -> TrainError {
    TrainErrorKind::Folder { path: path.to_owned(), message }.into()
}

fn unreadable(path: &Path, e: &io::Error) -> TrainError {
    at(path, format!("could not be read: {e}; repair that, or choose another run.dir"))
}

/// That a folder is taken by this process.
pub(super) struct Claim {
    _held: Option<File>,
}
