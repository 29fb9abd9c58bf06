//! Checkpoints in the layout of Hugging Face, plus what an exact resume needs.
//!
//! ```text
//! runs/x/checkpoints/step-000200/
//!   config.json                    sizes, and under `foveate` the attention program
//!   model.safetensors              weights in the saved dtype (or shards and an index)
//!   tokenizer.json                 where the tokenizer is a file
//!   tokenizer_config.json, …       the rest of the tokenizer, from beside it, or of the checkpoint it started from
//!   chat_template.jinja            where the recipe gave one, or a tokenizer with one
//!   masters.safetensors            f32 weights and the optimiser's moments (or several such files)
//!   state.json                     step, data cursor, fingerprint of the data
//!   checksums.json                 of every tensor, of config.json and of state.json
//! ```
//!
//! Where a run has several ranks, each writes its elements of the f32 weights and moments:
//!
//! ```text
//!   part-00002-00000.safetensors   a range of a tensor is a tensor of one axis, `NAME@FIRST`
//!   layout.json                    which elements of which tensor are in which file
//! ```
//!
//! in the place of `model.safetensors` and `masters.safetensors`. Both kinds are read alike, by any number of
//! ranks; [`export`] makes the first of the second. Where ranks have several disks, each has the files of its ranks
//! and all that is no tensor; `layout.json` says which disk has what, and the files of all in one folder are a
//! checkpoint like any other.
//!
//! A checkpoint is written into a folder beside its place, every file is flushed to the disk,
//! and the folder is renamed: whoever looks finds a whole checkpoint or none, whenever the
//! process dies. Only then are older ones removed. Tensors are written in chunks, so a save needs
//! no memory that grows with the model.
//!
//! What is read is held to `checksums.json`. A checkpoint of other tools has none, and is accepted;
//! the tokenizer's files have none either, as people edit them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use foveate_nn::{AttentionConfig, Blocks, Cpu, Model, Moment, Moments};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::TrainError;
use crate::metrics::JsonlLog;
use crate::pack::Cursor;
use crate::recipe::SaveDtype;
use crate::safetensors::RESTORE;
use crate::tokens::Tokenizer;
use crate::whole;

mod checksums;
mod config;
mod content;
mod export;
mod families;
mod layout;
mod load;
mod parts;
mod save;
mod store;

pub use checksums::Checksums;
pub(crate) use checksums::FILE as CHECKSUMS;
pub use config::{
    CheckpointConfig, CheckpointSizes, SpecialTexts, chat, read_config, read_sizes, read_tokenizer,
};
pub(crate) use content::{Content, HostCopy};
pub use export::{Contents, ElsewhereContents, RangeContents, TensorContents, contents, export};
pub use layout::Disk;
pub(crate) use layout::FILE as LAYOUT;
pub use load::{load_state, load_weights};
pub(crate) use parts::{Part, lacks, needed_files, parts};
pub use save::save;
pub(crate) use save::{Save, Written, leads};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const PICKLED_INDEX: &str = "pytorch_model.bin.index.json";
const MASTERS: &str = "masters.safetensors";
const STATE: &str = "state.json";
/// What of `config.json` is Foveate's own.
const OURS: &str = "foveate";
const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// What belongs to a tokenizer besides `tokenizer.json`.
const COMPANIONS: [&str; 4] =
    ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json", CHAT_TEMPLATE];

/// What a run has reached, besides its weights.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Optimiser steps done.
    pub step: u64,
    /// Labelled tokens seen.
    pub tokens: u64,
    /// Where the data stream stands.
    pub cursor: Cursor,
    /// Fingerprint of the documents.
    pub fingerprint: u64,
    /// The GPU of the last step; none is the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// What the bits of that step depended on beside program, weights and data, by name: driver,
    /// libraries, kernels. Empty on the CPU.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub bits_depend_on: BTreeMap<String, String>,
    /// What was found out by timing, by name: the algorithms of a GPU's products. Empty on the CPU.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub choices: BTreeMap<String, usize>,
}

/// What a checkpoint is made of.
pub struct Snapshot<'a, B: Blocks = Cpu> {
    /// The model.
    pub model: &'a Model<B>,
    /// Its attention program.
    pub attention: &'a AttentionConfig,
    /// The optimiser's moments.
    pub moments: &'a Moments<B::Array>,
    /// What the run has reached.
    pub state: &'a State,
    /// Dtype of the weights.
    pub dtype: SaveDtype,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The checkpoint the run started from, whose tokenizer files are kept.
    pub origin: Option<&'a Path>,
    /// Source of the chat template, where the recipe gave one.
    pub chat_template: Option<&'a str>,
}

/// A file of JSON.
fn read_json(path: &Path) -> Result<Value, TrainError> {
    let text = whole::read_text(path).map_err(|e| unreadable(path, &e))?;
    serde_json::from_str(&text).map_err(|e| {
        let is = match text.trim().is_empty() {
            true => "is empty".to_owned(),
            false => format!("is not the JSON it should be: {e}"),
        };
        TrainError::checkpoint(path, format!("{is}; {RESTORE}"))
    })
}

fn unreadable(path: &Path, e: &io::Error) -> TrainError {
    let remedy = match e.kind() {
        io::ErrorKind::NotFound => "; give the folder of a checkpoint that holds it",
        _ => "",
    };
    TrainError::checkpoint(path, format!("could not be read: {e}{remedy}"))
}

/// What a moment's tensors are called, before the name of the parameter.
fn name_of(moment: Moment) -> &'static str {
    match moment {
        Moment::Mean => "mean",
        Moment::Square => "square",
    }
}

/// Removes every checkpoint under `folder`, the oldest first, and what was set aside.
///
/// # Errors
/// When one cannot be removed.
pub fn remove_all(folder: &Path) -> Result<(), TrainError> {
    if !folder.exists() {
        return Ok(());
    }
    remove_but(folder, 0)?;
    list_aside(folder).iter().try_for_each(|(step, place)| remove(folder, *step, place))?;
    remove_leftovers(folder).map_err(|e| TrainError::write(folder, e))
}

/// Removes all checkpoints but the newest `keep`, the oldest first.
fn remove_but(folder: &Path, keep: usize) -> Result<(), TrainError> {
    let all = list(folder);
    let oldest = &all[..all.len().saturating_sub(keep)];
    oldest.iter().try_for_each(|(step, place)| remove(folder, *step, place))
}

/// Removes the checkpoint of a step at `place`, under `folder`.
fn remove(folder: &Path, step: u64, place: &Path) -> Result<(), TrainError> {
    // Out of sight first: a process that dies while it removes leaves no half checkpoint.
    let leaving = folder.join(format!(".writing-{step:06}-old"));
    fs::rename(place, &leaving)
        .and_then(|()| fs::remove_dir_all(&leaving))
        .map_err(|e| TrainError::write(place, e))
}

/// How the name begins of a part of a checkpoint that was newer than the one that a run went on from.
const ASIDE: &str = "aside-step-";

/// Keeps the part of a checkpoint of a step at `place` under a name that no resume looks for.
fn set_aside(folder: &Path, step: u64, place: &Path) -> Result<(), TrainError> {
    let aside = folder.join(format!("{ASIDE}{step:06}"));
    let gone = if aside.exists() { fs::remove_dir_all(&aside) } else { Ok(()) };
    gone.and_then(|()| fs::rename(place, &aside)).map_err(|e| TrainError::write(place, e))
}

/// Sets aside every part of a checkpoint under `folder`.
///
/// # Errors
/// When one cannot be renamed.
pub(crate) fn set_all_aside(folder: &Path) -> Result<(), TrainError> {
    list(folder).iter().try_for_each(|(step, place)| set_aside(folder, *step, place))
}

fn remove_leftovers(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(".writing-") {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Checkpoints under `folder`, oldest first. A folder of such a name without any file of a
/// checkpoint is somebody else's.
fn list(folder: &Path) -> Vec<(u64, PathBuf)> {
    list_named(folder, "step-")
}

/// What [`set_aside`] has kept under `folder`.
fn list_aside(folder: &Path) -> Vec<(u64, PathBuf)> {
    list_named(folder, ASIDE)
}

fn list_named(folder: &Path, begin: &str) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(u64, PathBuf)> = entries
        .filter_map(|e| {
            let step = e.file_name().to_string_lossy().strip_prefix(begin)?.parse().ok()?;
            Some((step, e.path()))
        })
        .filter(|(_, path)| is_checkpoint(path))
        .collect();
    found.sort();
    found
}

/// Refuses a folder of checkpoints, or one of these, that cannot be looked into: it would count as none.
///
/// # Errors
/// When it is there and the system refuses it.
pub fn check_readable(folder: &Path) -> Result<(), TrainError> {
    let refused = |path: &Path, e: &io::Error| match e.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(()),
        _ => Err(unreadable(path, e)),
    };
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) => return refused(folder, &e),
    };
    for entry in entries {
        let step = entry.map_err(|e| unreadable(folder, &e))?.path();
        fs::metadata(step.join(CONFIG)).map(|_| ()).or_else(|e| refused(&step, &e))?;
    }
    Ok(())
}

fn is_checkpoint(folder: &Path) -> bool {
    [CONFIG, MASTERS, STATE].iter().any(|name| folder.join(name).exists())
}

/// Whether a run can go on from the checkpoint in `folder`: everything that is in it is read.
pub(crate) fn is_intact(folder: &Path) -> bool {
    let found = contents(folder, Checksums::Verify, true);
    let masters = || load::masters_of(folder).iter().all(|file| file.exists());
    found.is_ok_and(|found| found.state.is_some() && (found.sharded || masters()))
}

/// The newest intact checkpoint beside the one in `folder` and before it.
pub(crate) fn intact_before(folder: &Path) -> Option<PathBuf> {
    let all = list(folder.parent()?);
    let before = all.into_iter().map(|(_, path)| path).take_while(|path| path != folder);
    let before: Vec<PathBuf> = before.collect();
    before.into_iter().rev().find(|path| is_intact(path))
}

/// Words to stand behind the name of `folder` where it is the folder `checkpoints` of a run, or in it: that run removes
/// what it keeps no longer there.
pub(crate) fn within_a_run(folder: &Path) -> Option<String> {
    let own = whole::resolved(folder);
    let of_run = |place: &&Path| {
        let log = place.parent().map(|run| run.join("metrics.jsonl"));
        let logged = log.map(|log| JsonlLog::last_step(&log, u64::MAX));
        let has_log = matches!(logged, Some(Ok(Some(_))));
        place.ends_with("checkpoints") && (has_log || latest(place).is_some())
    };
    let place = own.ancestors().find(of_run)?;
    let of = place.parent().unwrap_or(place).display();
    let is = match own == place {
        true => "is".to_owned(),
        false => format!("is in {},", place.display()),
    };
    Some(format!("{is} where the run in {of} keeps its checkpoints"))
}

/// The newest checkpoint under `folder`.
pub fn latest(folder: &Path) -> Option<PathBuf> {
    list(folder).pop().map(|(_, path)| path)
}

#[cfg(test)]
mod tests;
