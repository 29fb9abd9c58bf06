//! The error of this crate: one opaque type whose kind carries the place and the remedy.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use foveate_shard::ShardError;

/// What went wrong in a recipe, the data, a checkpoint or a training run.
#[derive(Debug, thiserror::Error)]
#[error("{kind}")]
pub struct TrainError {
    kind: Box<TrainErrorKind>,
}

/// The kinds of [`TrainError`].
#[derive(Debug)]
#[non_exhaustive]
pub enum TrainErrorKind {
    /// A recipe that cannot be read or asks for something impossible.
    Recipe {
        /// The recipe file, or the `--set` text that is wrong.
        place: String,
        /// Line and column, counted from one, where the text is wrong.
        position: Option<(usize, usize)>,
        /// What is wrong and what to do.
        message: String,
    },
    /// A document or a data file that cannot be used.
    Data {
        /// The file.
        file: PathBuf,
        /// The line, counted from one, in a file of one document a line.
        line: Option<usize>,
        /// What is wrong and what to do.
        message: String,
    },
    /// A checkpoint that is missing, damaged or of another model.
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong and what to do.
        message: String,
    },
    /// A run's folder in which this one may not start: there is another run, none to resume, or
    /// something that the run would destroy.
    Folder {
        /// The folder, or what in it stands in the way.
        path: PathBuf,
        /// What is there and what to do.
        message: String,
    },
    /// A file could not be written; earlier checkpoints are untouched.
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
        /// The checkpoint that the run can be resumed from, where it has saved one.
        earlier: Option<Earlier>,
    },
    /// The loss or the gradient stopped being a finite number.
    Diverged {
        /// The optimiser step, counted from one.
        step: u64,
        /// What is not finite, with its value.
        message: String,
        /// The checkpoint that the run can be resumed from, where it has saved one.
        earlier: Option<Earlier>,
    },
    /// A step or a save of a run that has begun could not be done: its device failed, or memory ended.
    Step {
        /// Optimiser steps of the run that were done.
        done: u64,
        /// What failed.
        message: String,
        /// The checkpoint that the run can be resumed from, where it has saved one.
        earlier: Option<Earlier>,
    },
    /// The loss or the gradient of the first step is not a finite number: no update made it so.
    NotFinite {
        /// What is not finite, with its value.
        message: String,
    },
    /// The observer ended the run before its first step: nothing was written.
    Interrupted,
    /// The ranks of a run cannot go on together: one is gone, or they do not agree.
    Ranks {
        /// Which, and what to do.
        message: String,
        /// Whether a rank is gone, silent or late: started again, the run may go on.
        lost: bool,
    },
    /// Another rank failed, and says so itself.
    Elsewhere {
        /// The rank and its words.
        message: String,
        /// Whether a rank is gone, silent or late: started again, the run may go on.
        lost: bool,
    },
    /// The model refused its configuration or its input.
    Model {
        /// The model's own words.
        message: String,
    },
}

/// A checkpoint that a run can be resumed from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Earlier {
    /// Its folder.
    pub path: PathBuf,
    /// Whether its checksums were to be read: not of one that a run went on from without them.
    pub verified: bool,
}

/// The override that gave the field which `message` begins with; of several the last.
fn override_of<'a>(overrides: &'a [String], message: &str) -> Option<&'a str> {
    let field = message.split([' ', ':']).next().unwrap_or_default();
    let gave = |set: &&String| {
        let key = set.split('=').next().unwrap_or_default().trim();
        field.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    overrides.iter().rfind(gave).map(String::as_str)
}

impl TrainError {
    /// The kind, with its details.
    pub fn kind(&self) -> &TrainErrorKind {
        &self.kind
    }

    /// The same, with the override in the place of the recipe where what is wrong begins with a field that one
    /// gave.
    #[must_use]
    pub fn of_overrides(self, overrides: &[String]) -> Self {
        let TrainErrorKind::Recipe { place, position: None, message } = self.kind() else {
            return self;
        };
        // A field may stand as the place, too.
        let gap = if message.starts_with("is ") { "" } else { ":" };
        let told = [message.clone(), format!("{place}{gap} {message}")];
        let found = told.iter().find_map(|told| Some((override_of(overrides, told)?, told)));
        match found {
            Some((set, told)) => Self::recipe(format!("--set {set}"), told),
            None => self,
        }
    }

    /// What is wrong with the recipe at `place`.
    pub fn recipe(place: impl Into<String>, message: impl Into<String>) -> Self {
        TrainErrorKind::Recipe { place: place.into(), position: None, message: message.into() }
            .into()
    }

    pub(crate) fn data(file: &Path, line: Option<usize>, message: impl Into<String>) -> Self {
        TrainErrorKind::Data { file: file.to_path_buf(), line, message: message.into() }.into()
    }

    pub(crate) fn checkpoint(path: &Path, message: impl Into<String>) -> Self {
        TrainErrorKind::Checkpoint { path: path.to_path_buf(), message: message.into() }.into()
    }

    pub(crate) fn write(path: &Path, source: io::Error) -> Self {
        TrainErrorKind::Write { path: path.to_path_buf(), source, earlier: None }.into()
    }

    /// The same error, of a run whose newest checkpoint is `last`.
    pub(crate) fn of_run(mut self, last: Option<Earlier>) -> Self {
        if let TrainErrorKind::Write { earlier, .. }
        | TrainErrorKind::Diverged { earlier, .. }
        | TrainErrorKind::Step { earlier, .. } = self.kind.as_mut()
        {
            *earlier = last;
        }
        self
    }

    /// The same error, of a command that writes and is no run.
    pub(crate) fn of_command(self) -> Self {
        let TrainErrorKind::Write { path, source, .. } = self.kind.as_ref() else { return self };
        let remedy = match to_write(source.kind()) {
            Some(remedy) => format!("{remedy} and give the command again"),
            None => "choose another folder".to_owned(),
        };
        Self::checkpoint(path, format!("could not be written: {source}; {remedy}"))
    }

    /// The same error, where `done` steps of a run were done before it.
    pub(crate) fn after(self, done: u64) -> Self {
        match *self.kind {
            TrainErrorKind::Model { message } => {
                TrainErrorKind::Step { done, message, earlier: None }.into()
            }
            kind => kind.into(),
        }
    }

    pub(crate) fn model(message: impl fmt::Display) -> Self {
        TrainErrorKind::Model { message: message.to_string() }.into()
    }
}

impl From<TrainErrorKind> for TrainError {
    fn from(kind: TrainErrorKind) -> Self {
        Self { kind: Box::new(kind) }
    }
}

impl From<foveate_nn::NnError> for TrainError {
    fn from(e: foveate_nn::NnError) -> Self {
        match e.kind() {
            foveate_nn::NnErrorKind::Ranks { message, lost: true } => {
                ShardError::lost(message).into()
            }
            foveate_nn::NnErrorKind::Ranks { message, lost: false } => {
                ShardError::new(message).into()
            }
            _ => Self::model(e),
        }
    }
}

impl fmt::Display for TrainErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Recipe { place, position: Some((line, column)), message } => {
                write!(f, "{place}:{line}:{column}: {message}")
            }
            Self::Recipe { place, position: None, message } => write!(f, "{place}: {message}"),
            Self::Data { file, line: Some(line), message } => {
                write!(f, "{}:{line}: {message}", file.display())
            }
            Self::Data { file, line: None, message } => write!(f, "{}: {message}", file.display()),
            Self::Checkpoint { path, message } | Self::Folder { path, message } => {
                write!(f, "{}: {message}", path.display())
            }
            Self::Write { path, source, earlier } => {
                write!(f, "{}: could not be written: {source}", path.display())?;
                if source.kind() == io::ErrorKind::OutOfMemory && earlier.is_none() {
                    // There may have been none to look for a checkpoint, either.
                    return f.write_str(
                        "; give this process more memory and continue with --resume if a checkpoint was \
                         saved, else start again with --start-over",
                    );
                }
                let Some(remedy) = to_write(source.kind()) else { return Ok(()) };
                write!(f, "; {remedy} and ")?;
                goes_on(f, earlier.as_ref())
            }
            Self::Diverged { step, message, earlier } => {
                write!(
                    f,
                    "step {step}: {message}; training stopped. Lower optimizer.lr, lengthen \
                     schedule.warmup_steps or tighten optimizer.clip_norm, then "
                )?;
                goes_on(f, earlier.as_ref())
            }
            Self::Step { done, message, earlier } => {
                match done {
                    0 => f.write_str("before the first step was done: ")?,
                    _ => write!(f, "after step {done}: ")?,
                }
                write!(f, "{message}; then ")?;
                goes_on(f, earlier.as_ref())
            }
            Self::NotFinite { message } => write!(
                f,
                "step 1: {message}, and no weight was updated before: look at attention.score, \
                 attention.mask and the weights that the run starts from"
            ),
            Self::Interrupted => f.write_str("interrupted"),
            Self::Model { message }
            | Self::Ranks { message, .. }
            | Self::Elsewhere { message, .. } => f.write_str(message),
        }
    }
}

/// What to do where a file could not be written.
fn to_write(kind: io::ErrorKind) -> Option<&'static str> {
    Some(match kind {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free some space",
        io::ErrorKind::OutOfMemory => "give this process more memory",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "make it writable for this process"
        }
        io::ErrorKind::FileTooLarge => "raise the limit of file sizes (ulimit -f)",
        io::ErrorKind::NotADirectory
        | io::ErrorKind::DirectoryNotEmpty
        | io::ErrorKind::AlreadyExists => "move away what lies there",
        _ => return None,
    })
}

/// How a run goes on, whose newest checkpoint is `earlier`.
fn goes_on(f: &mut fmt::Formatter<'_>, earlier: Option<&Earlier>) -> fmt::Result {
    match earlier {
        Some(Earlier { path, verified: true }) => {
            write!(f, "continue with --resume: {} is intact", path.display())
        }
        Some(Earlier { path, verified: false }) => write!(
            f,
            "continue with --resume --skip-checksums: {} is the newest checkpoint, and nobody knows whether it \
             is intact, as its checksums were not read",
            path.display()
        ),
        None => f.write_str("start again with --start-over: no checkpoint of this run was saved"),
    }
}
