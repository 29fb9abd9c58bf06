//! Checkpoints in the layout of Hugging Face, plus what an exact resume needs.
//!
//! ```text
//! runs/x/checkpoints/step-000200/
//!   config.json                    sizes, and under `foveate` the attention program
//!   model.safetensors              weights in the saved dtype (or shards and an index)
//!   tokenizer.json                 where the tokenizer is a file
//!   tokenizer_config.json, …       the rest of the tokenizer, of the checkpoint it started from
//!   chat_template.jinja            where the recipe gave one
//!   masters.safetensors            f32 weights and AdamW's moments
//!   state.json                     step, data cursor, fingerprint of the data
//! ```
//!
//! A checkpoint is written into a folder beside its place, every file is flushed to the disk,
//! and the folder is renamed: whoever looks finds a whole checkpoint or none, whenever the
//! process dies. Only then are older ones removed.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use foveate_nn::{AttentionConfig, Model, Parameter};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::TrainError;
use crate::optimizer::Moments;
use crate::pack::Cursor;
use crate::recipe::SaveDtype;
use crate::safetensors::Tensors;
use crate::tokens::Tokenizer;

mod config;

pub use config::{Config, SpecialTexts, read_config, read_tokenizer, special_texts};
use config::{config_json, read_json, unreadable};

/// Bytes of weights in one file before they are divided into shards.
const SHARD_BYTES: usize = 2 << 30;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const PICKLED_INDEX: &str = "pytorch_model.bin.index.json";
const MASTERS: &str = "masters.safetensors";
const STATE: &str = "state.json";
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
}

/// How files are written; tests put a full disk in its place.
pub(crate) type WriteFile<'a> = &'a dyn Fn(&Path, &[u8]) -> io::Result<()>;

/// Writes a file and waits until it is on the disk.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Writes a file beside its place, then renames it: readers see the old or the new one.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    let temporary = path.with_extension("tmp");
    write_file(&temporary, bytes)
        .and_then(|()| fs::rename(&temporary, path))
        .map_err(|e| TrainError::write(path, e))
}

/// What a checkpoint is made of.
pub struct Snapshot<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its attention program.
    pub attention: &'a AttentionConfig,
    /// AdamW's moments, one for each parameter.
    pub moments: &'a [Moments],
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

/// Saves a checkpoint under `folder` and removes all but the newest `keep`.
///
/// # Errors
/// When something cannot be written; earlier checkpoints are untouched then.
pub fn save(folder: &Path, snapshot: &Snapshot<'_>, keep: usize) -> Result<PathBuf, TrainError> {
    save_with(folder, snapshot, keep, &write_file, SHARD_BYTES)
}

fn save_with(
    folder: &Path,
    snapshot: &Snapshot<'_>,
    keep: usize,
    write: WriteFile<'_>,
    shard_bytes: usize,
) -> Result<PathBuf, TrainError> {
    let place = folder.join(format!("step-{:06}", snapshot.state.step));
    if place.exists() {
        // Steps are reproducible, so what is here is what would be written.
        return Ok(place);
    }
    let temporary = folder.join(format!(".writing-{:06}", snapshot.state.step));
    let failed = |e: io::Error| TrainError::write(&place, e);
    fs::create_dir_all(folder).map_err(failed)?;
    remove_leftovers(folder).map_err(failed)?;
    fs::create_dir(&temporary).map_err(failed)?;
    let written = write_all(&temporary, snapshot, write, shard_bytes).and_then(|()| {
        let synced = File::open(&temporary).and_then(|dir| dir.sync_all());
        synced.map_err(|e| TrainError::write(&temporary, e))
    });
    if let Err(e) = written {
        // The disk may be full: give back what was taken, then tell of the first failure.
        let _ = fs::remove_dir_all(&temporary);
        return Err(e);
    }
    fs::rename(&temporary, &place).map_err(failed)?;
    File::open(folder).and_then(|dir| dir.sync_all()).map_err(failed)?;
    remove_but(folder, keep.max(1))?;
    Ok(place)
}

/// Removes every checkpoint under `folder`, the oldest first.
///
/// # Errors
/// When one cannot be removed.
pub fn remove_all(folder: &Path) -> Result<(), TrainError> {
    if !folder.exists() {
        return Ok(());
    }
    remove_but(folder, 0)?;
    remove_leftovers(folder).map_err(|e| TrainError::write(folder, e))
}

/// Removes all checkpoints but the newest `keep`, the oldest first.
fn remove_but(folder: &Path, keep: usize) -> Result<(), TrainError> {
    let all = list(folder);
    for (step, oldest) in &all[..all.len().saturating_sub(keep)] {
        // Out of sight first: a process that dies while it removes leaves no half checkpoint.
        let leaving = folder.join(format!(".writing-{step:06}"));
        fs::rename(oldest, &leaving)
            .and_then(|()| fs::remove_dir_all(&leaving))
            .map_err(|e| TrainError::write(oldest, e))?;
    }
    Ok(())
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

/// Whole checkpoints under `folder`, oldest first.
fn list(folder: &Path) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(u64, PathBuf)> = entries
        .filter_map(|e| {
            let step = e.file_name().to_string_lossy().strip_prefix("step-")?.parse().ok()?;
            Some((step, e.path()))
        })
        .collect();
    found.sort();
    found
}

/// The newest checkpoint under `folder`.
pub fn latest(folder: &Path) -> Option<PathBuf> {
    list(folder).pop().map(|(_, path)| path)
}

fn write_all(
    to: &Path,
    snapshot: &Snapshot<'_>,
    write: WriteFile<'_>,
    shard_bytes: usize,
) -> Result<(), TrainError> {
    let put = |name: &str, bytes: &[u8]| {
        let path = to.join(name);
        write(&path, bytes).map_err(|e| TrainError::write(&path, e))
    };
    let config = config_json(snapshot)?.to_string_pretty();
    put("config.json", config.as_bytes())?;
    if let Some(path) = snapshot.tokenizer.path() {
        let bytes = fs::read(path).map_err(|e| TrainError::checkpoint(path, e.to_string()))?;
        put("tokenizer.json", &bytes)?;
    }
    for name in COMPANIONS {
        let found = snapshot.origin.map(|folder| folder.join(name)).filter(|path| path.is_file());
        match (found, snapshot.chat_template) {
            (_, Some(source)) if name == CHAT_TEMPLATE => put(name, source.as_bytes())?,
            (Some(path), _) => put(name, &fs::read(&path).map_err(|e| unreadable(&path, &e))?)?,
            (None, _) => {}
        }
    }
    let parameters = snapshot.model.parameters();
    let size = |p: &Parameter| p.data.len() * dtype_bytes(snapshot.dtype);
    let mut shards: Vec<Vec<&Parameter>> = vec![Vec::new()];
    let mut used = 0;
    for p in parameters {
        if used > 0 && used + size(p) > shard_bytes {
            shards.push(Vec::new());
            used = 0;
        }
        used += size(p);
        shards.last_mut().expect("there is a shard").push(p);
    }
    let mut weight_map = BTreeMap::new();
    let count = shards.len();
    for (i, shard) in shards.iter().enumerate() {
        let name = match count {
            1 => SINGLE.to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        let tensors: Vec<_> = shard
            .iter()
            .map(|p| (p.name.clone(), p.shape.clone(), encode(&p.data, snapshot.dtype)))
            .collect();
        put(&name, &serialised(&tensors, dtype_of(snapshot.dtype), to)?)?;
        weight_map.extend(shard.iter().map(|p| (p.name.clone(), name.clone())));
    }
    if count > 1 {
        let total: usize = parameters.iter().map(size).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        put(INDEX, index.to_string_pretty().as_bytes())?;
    }
    let mut masters = Vec::with_capacity(3 * parameters.len());
    for (p, m) in parameters.iter().zip(snapshot.moments) {
        for (kind, data) in [("weight", &p.data), ("mean", &m.mean), ("square", &m.square)] {
            let name = format!("{kind}:{}", p.name);
            masters.push((name, p.shape.clone(), encode(data, SaveDtype::F32)));
        }
    }
    put(MASTERS, &serialised(&masters, Dtype::F32, to)?)?;
    let state = serde_json::to_value(snapshot.state).expect("plain numbers");
    put(STATE, state.to_string_pretty().as_bytes())
}

trait Pretty {
    fn to_string_pretty(&self) -> String;
}

impl Pretty for Value {
    fn to_string_pretty(&self) -> String {
        format!("{self:#}\n")
    }
}

fn dtype_of(dtype: SaveDtype) -> Dtype {
    match dtype {
        SaveDtype::F32 => Dtype::F32,
        SaveDtype::Bf16 => Dtype::BF16,
        SaveDtype::F16 => Dtype::F16,
    }
}

fn dtype_bytes(dtype: SaveDtype) -> usize {
    if dtype == SaveDtype::F32 { 4 } else { 2 }
}

fn encode(data: &[f32], dtype: SaveDtype) -> Vec<u8> {
    match dtype {
        SaveDtype::F32 => data.par_iter().flat_map_iter(|x| x.to_le_bytes()).collect(),
        SaveDtype::Bf16 => {
            data.par_iter().flat_map_iter(|x| bf16::from_f32(*x).to_le_bytes()).collect()
        }
        SaveDtype::F16 => {
            data.par_iter().flat_map_iter(|x| f16::from_f32(*x).to_le_bytes()).collect()
        }
    }
}

fn serialised(
    tensors: &[(String, Vec<usize>, Vec<u8>)],
    dtype: Dtype,
    place: &Path,
) -> Result<Vec<u8>, TrainError> {
    let failed = |e: safetensors::SafeTensorError| TrainError::checkpoint(place, e.to_string());
    let mut views = Vec::with_capacity(tensors.len());
    for (name, shape, bytes) in tensors {
        views.push((name, TensorView::new(dtype, shape.clone(), bytes).map_err(failed)?));
    }
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(views, Some(metadata)).map_err(failed)
}

/// Reads weights into `model`. Learned attention buffers that the files do not have keep their
/// first values; their names are returned.
///
/// # Errors
/// Names the file, and the tensor, that is missing, damaged, of another shape or not known.
pub fn load_weights(folder: &Path, model: &mut Model) -> Result<Vec<String>, TrainError> {
    let index = folder.join(INDEX);
    let files: Vec<PathBuf> = if index.exists() {
        let json = read_json(&index)?;
        let Some(map) = json.get("weight_map").and_then(Value::as_object) else {
            return Err(TrainError::checkpoint(&index, "has no `weight_map`"));
        };
        let mut names: Vec<&str> = map.values().filter_map(Value::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names.into_iter().map(|n| folder.join(n)).collect()
    } else {
        let file = folder.join(SINGLE);
        let pickled = || ["pytorch_model.bin", PICKLED_INDEX].map(|n| folder.join(n));
        if !file.exists() && pickled().iter().any(|other| other.exists()) {
            let message =
                "is missing; only safetensors are read, so convert pytorch_model.bin first";
            return Err(TrainError::checkpoint(&file, message));
        }
        if let Err(e) = File::open(&file) {
            return Err(unreadable(&file, &e));
        }
        vec![file]
    };
    let tied = model.config().tie_word_embeddings;
    let mut missing: BTreeMap<String, usize> =
        model.parameters().iter().enumerate().map(|(i, p)| (p.name.clone(), i)).collect();
    for file in &files {
        let mut tensors = Tensors::open(file)?;
        let names: Vec<String> = tensors.names().map(str::to_owned).collect();
        for name in names {
            let derived =
                name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight");
            if derived {
                continue;
            }
            let Some(i) = missing.remove(&name) else {
                let message =
                    format!("tensor `{name}` is not one of this model's, or stands twice");
                return Err(TrainError::checkpoint(file, message));
            };
            let parameter = &mut model.parameters_mut()[i];
            let shape = tensors.shape(&name).expect("it is one of the names");
            if parameter.shape != shape {
                let message = format!(
                    "tensor `{name}` has shape {shape:?}, but config.json makes it {:?}",
                    parameter.shape
                );
                return Err(TrainError::checkpoint(file, message));
            }
            parameter.data = tensors.read(&name)?;
        }
    }
    let standard = |name: &str| name.ends_with(".weight");
    if let Some(name) = missing.keys().find(|n| standard(n)) {
        let file = files.last().expect("there is a file");
        return Err(TrainError::checkpoint(file, format!("tensor `{name}` is missing")));
    }
    Ok(missing.into_keys().collect())
}

/// Reads f32 masters, moments and state of one of our own checkpoints.
///
/// # Errors
/// Names the file and the tensor that is missing or damaged.
pub fn load_state(folder: &Path, model: &mut Model) -> Result<(Vec<Moments>, State), TrainError> {
    let [path, masters] = [STATE, MASTERS].map(|name| folder.join(name));
    if let Some(missing) = [&path, &masters].into_iter().find(|file| !file.exists()) {
        let message =
            "is missing; put it back, or remove this checkpoint and resume from an earlier one";
        return Err(TrainError::checkpoint(missing, message));
    }
    let state: State = serde_json::from_value(read_json(&path)?)
        .map_err(|e| TrainError::checkpoint(&path, format!("is not a training state: {e}")))?;
    let path = masters;
    let mut tensors = Tensors::open(&path)?;
    let mut moments = Vec::with_capacity(model.parameters().len());
    for p in model.parameters_mut() {
        let mut read = |kind: &str| {
            let name = format!("{kind}:{}", p.name);
            match tensors.shape(&name) {
                Some(shape) if shape != p.shape => {
                    let message = format!("tensor `{name}` has shape {shape:?}, not {:?}", p.shape);
                    Err(TrainError::checkpoint(&path, message))
                }
                _ => tensors.read(&name),
            }
        };
        let weight = read("weight")?;
        moments.push(Moments { mean: read("mean")?, square: read("square")? });
        p.data = weight;
    }
    Ok((moments, state))
}

#[cfg(test)]
mod tests;
