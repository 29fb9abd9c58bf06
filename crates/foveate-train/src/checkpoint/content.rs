//! What is saved: the files of a checkpoint, and where the values of its tensors come from.
//!
//! A save that the step waits for reads values where they are ([`Snapshot`]). One that it does not wait for
//! reads a [`HostCopy`] of the elements that this rank writes, on another thread.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use foveate_nn::{Array, Blocks, Moment, Parameter, StateCopy, StateMemory};
use serde_json::Value;

use super::config::{GENERATION, config_json};
use super::{CHAT_TEMPLATE, COMPANIONS, Snapshot, State, name_of};
use crate::error::{TrainError, TrainErrorKind};
use crate::recipe::SaveDtype;

/// What is kept of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Its f32 master.
    Weight,
    /// A moment of the optimiser.
    Moment(Moment),
}

impl Kept {
    /// What its tensors are called, before the name of the parameter.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::Moment(moment) => name_of(moment),
        }
    }
}

/// Where values come from.
pub(crate) trait Values {
    /// Reads elements from `first` on, counted in the array of all parameters.
    fn read(&self, kept: Kept, first: usize, into: &mut [f32]) -> Result<(), TrainError>;
}

/// A file that goes along.
#[derive(Clone, Debug)]
pub(super) enum Carried {
    /// A copy of this one.
    Copy(PathBuf),
    /// This text.
    Text(String),
}

/// A checkpoint without the values of its tensors.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    /// `config.json`.
    pub(super) config: Value,
    /// Files that go along, by their names.
    pub(super) files: Vec<(String, Carried)>,
    /// In the order of their places.
    pub(super) parameters: Vec<Parameter>,
    /// What is kept of them for a resume, besides the weights; of those that lie before `trained`.
    pub(super) moments: Vec<Moment>,
    /// Elements that are trained: the first ones.
    pub(super) trained: usize,
    /// Of the weights, where they are saved beside masters.
    pub(super) dtype: SaveDtype,
    /// None of a checkpoint that no run continues from.
    pub(super) state: Option<State>,
}

impl Content {
    /// That of a run.
    ///
    /// # Errors
    /// When `config.json` of the checkpoint it started from cannot be read.
    pub fn of<B: Blocks>(snapshot: &Snapshot<'_, B>) -> Result<Self, TrainError> {
        let Snapshot { model, moments, state, dtype, tokenizer, origin, chat_template, .. } =
            snapshot;
        let mut files = Vec::new();
        if let Some(path) = tokenizer.path() {
            files.push(("tokenizer.json".to_owned(), Carried::Copy(path.to_path_buf())));
        }
        let of_tokenizer = tokenizer.path().and_then(Path::parent);
        for name in COMPANIONS {
            // What goes with a tokenizer that is not the checkpoint's lies beside that.
            let beside = of_tokenizer.filter(|_| name != GENERATION);
            let folders = beside.into_iter().chain(*origin);
            let found = folders.map(|folder| folder.join(name)).find(|path| path.is_file());
            match (found, chat_template) {
                (_, Some(source)) if name == CHAT_TEMPLATE => {
                    files.push((name.to_owned(), Carried::Text((*source).to_owned())));
                }
                (Some(path), _) => files.push((name.to_owned(), Carried::Copy(path))),
                (None, _) => {}
            }
        }
        let kept = [(Moment::Mean, &moments.mean), (Moment::Square, &moments.square)];
        let layout = model.layout();
        Ok(Self {
            config: config_json(snapshot)?,
            files,
            parameters: layout.parameters().to_vec(),
            moments: kept.into_iter().filter(|(_, a)| a.elems() > 0).map(|(m, _)| m).collect(),
            trained: layout.trained(),
            dtype: *dtype,
            state: Some((*state).clone()),
        })
    }

    /// Optimiser steps done.
    pub(super) fn step(&self) -> u64 {
        self.state.as_ref().map_or(0, |state| state.step)
    }

    /// What is kept of a parameter for a resume.
    pub(super) fn kept(&self, parameter: &Parameter) -> impl Iterator<Item = Kept> {
        let trained = parameter.place.start < self.trained;
        let moments = self.moments.iter().filter(move |_| trained).map(|&m| Kept::Moment(m));
        [Kept::Weight].into_iter().chain(moments)
    }
}

impl<B: Blocks> Values for Snapshot<'_, B> {
    fn read(&self, kept: Kept, first: usize, into: &mut [f32]) -> Result<(), TrainError> {
        let array = match kept {
            Kept::Weight => return Ok(self.model.masters(first, into)?),
            Kept::Moment(Moment::Mean) => &self.moments.mean,
            Kept::Moment(Moment::Square) => &self.moments.square,
        };
        let Kept::Moment(moment) = kept else { unreachable!("a weight was read above") };
        Ok(self.model.download_moment(moment, array, first, into)?)
    }
}

/// Values of some elements, in host memory.
#[derive(Debug)]
pub(crate) struct HostCopy<M> {
    state: StateCopy<M>,
    /// Whether nobody waits for what is read any more.
    pub(crate) dropped: Arc<AtomicBool>,
}

impl<M: StateMemory> HostCopy<M> {
    /// Begins to copy the elements `owned` to `memory`, which has room for them. They may change from here on.
    ///
    /// # Errors
    /// When the device fails.
    pub fn begin<B: Blocks<StateMemory = M>>(
        snapshot: &Snapshot<'_, B>,
        owned: &[Range<usize>],
        memory: &Arc<M>,
    ) -> Result<Self, TrainError> {
        let state = snapshot.model.copy_state(snapshot.moments, owned, memory)?;
        Ok(Self { state, dropped: Arc::default() })
    }

    /// Waits until all of them are there.
    ///
    /// # Errors
    /// When the device fails.
    pub fn wait(&self) -> Result<(), TrainError> {
        Ok(self.state.wait()?)
    }
}

impl<M: StateMemory> Values for HostCopy<M> {
    fn read(&self, kept: Kept, first: usize, into: &mut [f32]) -> Result<(), TrainError> {
        if self.dropped.load(Ordering::Relaxed) {
            return Err(TrainErrorKind::Interrupted.into());
        }
        match kept {
            Kept::Weight => self.state.masters(first, into)?,
            Kept::Moment(moment) => self.state.moment(moment, first, into)?,
        }
        Ok(())
    }
}
