//! Writing a checkpoint: beside its place, flushed, then renamed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use foveate_nn::{Array, Blocks, Moment, NnError, Parameter};
use serde_json::{Value, json};

use super::checksums::{self, Manifest};
use super::config::config_json;
use super::{
    CHAT_TEMPLATE, COMPANIONS, CONFIG, INDEX, MASTERS, SINGLE, STATE, Snapshot, is_checkpoint,
    name_of, remove_but, remove_leftovers, unreadable,
};
use crate::error::{TrainError, TrainErrorKind};
use crate::recipe::SaveDtype;
use crate::safetensors::{self, Source, WriteError};

/// Bytes of tensors in one file before they are divided into several.
pub(super) const SHARD_BYTES: usize = 5_000_000_000;

/// A file that is being written.
pub(super) trait Durable: Write {
    /// Waits until all that was written is on the disk.
    fn sync(&mut self) -> io::Result<()>;
}

impl Durable for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// How files are made; tests put a full disk in its place.
pub(super) type Create<'a> = &'a dyn Fn(&Path) -> io::Result<Box<dyn Durable>>;

/// A file of the file system.
pub(super) fn create(path: &Path) -> io::Result<Box<dyn Durable>> {
    Ok(Box::new(File::create(path)?))
}

/// Saves a checkpoint under `folder` and removes all but the newest `keep`.
///
/// # Errors
/// When something cannot be written, or a value is not finite in the file; earlier checkpoints are
/// untouched then.
pub fn save<B: Blocks>(
    folder: &Path,
    snapshot: &Snapshot<'_, B>,
    keep: usize,
) -> Result<PathBuf, TrainError> {
    save_with(folder, snapshot, keep, &create, SHARD_BYTES)
}

pub(super) fn save_with<B: Blocks>(
    folder: &Path,
    snapshot: &Snapshot<'_, B>,
    keep: usize,
    create: Create<'_>,
    shard_bytes: usize,
) -> Result<PathBuf, TrainError> {
    let place = folder.join(format!("step-{:06}", snapshot.state.step));
    if is_checkpoint(&place) {
        // Steps are reproducible, so what is here is what would be written.
        return Ok(place);
    }
    let temporary = folder.join(format!(".writing-{:06}", snapshot.state.step));
    let failed = |e: io::Error| TrainError::write(&place, e);
    fs::create_dir_all(folder).map_err(failed)?;
    remove_leftovers(folder).map_err(failed)?;
    fs::create_dir(&temporary).map_err(failed)?;
    let mut writer = Writer { to: &temporary, create, sums: Manifest::default() };
    let written = writer.all(snapshot, shard_bytes).and_then(|()| {
        let synced = File::open(&temporary).and_then(|dir| dir.sync_all());
        synced.map_err(|e| TrainError::write(&temporary, e))
    });
    // An empty folder of another origin gives way; one with files in it is somebody's.
    if let Err(e) = written
        .and_then(|()| fs::rename(&temporary, &place).map_err(|e| TrainError::write(&place, e)))
    {
        // The disk may be full: give back what was taken, then tell of the first failure.
        let _ = fs::remove_dir_all(&temporary);
        return Err(e);
    }
    File::open(folder).and_then(|dir| dir.sync_all()).map_err(failed)?;
    remove_but(folder, keep.max(1))?;
    Ok(place)
}

/// The files of one checkpoint, with the checksums of those written so far.
struct Writer<'a> {
    to: &'a Path,
    create: Create<'a>,
    sums: Manifest,
}

impl Writer<'_> {
    fn all<B: Blocks>(
        &mut self,
        snapshot: &Snapshot<'_, B>,
        shard_bytes: usize,
    ) -> Result<(), TrainError> {
        let config = self.json(CONFIG, &config_json(snapshot)?)?;
        self.sums.add_file(CONFIG, config.as_bytes());
        if let Some(path) = snapshot.tokenizer.path() {
            let bytes = fs::read(path).map_err(|e| TrainError::checkpoint(path, e.to_string()))?;
            self.put("tokenizer.json", &bytes)?;
        }
        for name in COMPANIONS {
            let found = snapshot.origin.map(|folder| folder.join(name));
            match (found.filter(|path| path.is_file()), snapshot.chat_template) {
                (_, Some(source)) if name == CHAT_TEMPLATE => self.put(name, source.as_bytes())?,
                (Some(path), _) => {
                    self.put(name, &fs::read(&path).map_err(|e| unreadable(&path, &e))?)?;
                }
                (None, _) => {}
            }
        }
        self.weights(snapshot, shard_bytes)?;
        self.masters(snapshot, shard_bytes)?;
        let state = serde_json::to_value(snapshot.state).expect("plain numbers");
        let state = self.json(STATE, &state)?;
        self.sums.add_file(STATE, state.as_bytes());
        self.json(checksums::FILE, &self.sums.to_json()).map(|_| ())
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), TrainError> {
        let path = self.to.join(name);
        let put = |file: &mut dyn Durable| file.write_all(bytes).and_then(|()| file.sync());
        (self.create)(&path)
            .and_then(|mut file| put(file.as_mut()))
            .map_err(|e| TrainError::write(&path, e))
    }

    fn json(&self, name: &str, value: &Value) -> Result<String, TrainError> {
        let text = format!("{value:#}\n");
        self.put(name, text.as_bytes()).map(|()| text)
    }

    /// The weights, in shards with an index where they are large.
    fn weights<B: Blocks>(
        &mut self,
        snapshot: &Snapshot<'_, B>,
        shard_bytes: usize,
    ) -> Result<(), TrainError> {
        let (parameters, dtype) = (snapshot.model.parameters(), snapshot.dtype);
        let size = |p: &Parameter| p.place.len() * dtype.bytes();
        let shards = shards(parameters.iter(), |p| size(p), shard_bytes);
        let mut weight_map = BTreeMap::new();
        let count = shards.len();
        for (i, shard) in shards.iter().enumerate() {
            let name = match count {
                1 => SINGLE.to_owned(),
                n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
            };
            let read = |first, into: &mut [f32]| snapshot.model.masters(first, into);
            let sources: Vec<Source<'_>> =
                shard.iter().map(|&p| source(p.name.clone(), p, read)).collect();
            self.tensors(&name, dtype, &sources, snapshot.state.step)?;
            weight_map.extend(shard.iter().map(|p| (p.name.clone(), name.clone())));
        }
        if count > 1 {
            let total: usize = parameters.iter().map(size).sum();
            let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
            self.json(INDEX, &index)?;
        }
        Ok(())
    }

    /// f32 weights and moments, in several files where they are large.
    fn masters<B: Blocks>(
        &mut self,
        snapshot: &Snapshot<'_, B>,
        shard_bytes: usize,
    ) -> Result<(), TrainError> {
        let Snapshot { model, moments, .. } = snapshot;
        let mut sources: Vec<Source<'_>> = Vec::new();
        for p in model.parameters() {
            let name = |kind: &str| format!("{kind}:{}", p.name);
            sources.push(source(name("weight"), p, |first, into| model.masters(first, into)));
            let trained = model.layout().trains(&p.place);
            let kept = [(Moment::Mean, &moments.mean), (Moment::Square, &moments.square)];
            for (moment, array) in kept.into_iter().filter(|(_, a)| trained && a.elems() > 0) {
                let read = move |first, into: &mut [f32]| {
                    model.download_moment(moment, array, first, into)
                };
                sources.push(source(name(name_of(moment)), p, read));
            }
        }
        let shards = shards(sources, |s| s.shape.iter().product::<usize>() * 4, shard_bytes);
        let count = shards.len();
        for (i, shard) in shards.iter().enumerate() {
            let name = match count {
                1 => MASTERS.to_owned(),
                n => format!("masters-{:05}-of-{n:05}.safetensors", i + 1),
            };
            self.tensors(&name, SaveDtype::F32, shard, snapshot.state.step)?;
        }
        Ok(())
    }

    fn tensors(
        &mut self,
        name: &str,
        dtype: SaveDtype,
        tensors: &[Source<'_>],
        step: u64,
    ) -> Result<(), TrainError> {
        let path = self.to.join(name);
        let written = (self.create)(&path).map_err(WriteError::Io).and_then(|mut file| {
            let sums = safetensors::write(file.as_mut(), dtype, tensors)?;
            file.sync()?;
            Ok(sums)
        });
        let sums = written.map_err(|e| match e {
            WriteError::Io(e) => TrainError::write(&path, e),
            WriteError::Read(e) => e.into(),
            WriteError::Value { tensor, element, value } if value.is_finite() => {
                let message = format!(
                    "tensor `{tensor}` is {value} at element {element}, past the range of {}; set \
                     train.save_dtype to f32 or bf16",
                    dtype.tag()
                );
                TrainError::checkpoint(&path, message)
            }
            WriteError::Value { tensor, element, value } => {
                let message = format!("tensor `{tensor}` is {value} at element {element}");
                TrainErrorKind::Diverged { step, message, earlier: None }.into()
            }
        })?;
        self.sums.add_tensors(name, sums);
        Ok(())
    }
}

/// `all` in their order, divided where `most` bytes would be passed.
fn shards<T>(
    all: impl IntoIterator<Item = T>,
    bytes: impl Fn(&T) -> usize,
    most: usize,
) -> Vec<Vec<T>> {
    let mut shards: Vec<Vec<T>> = vec![Vec::new()];
    let mut used = 0;
    for one in all {
        if used > 0 && used + bytes(&one) > most {
            shards.push(Vec::new());
            used = 0;
        }
        used += bytes(&one);
        shards.last_mut().expect("there is a shard").push(one);
    }
    shards
}

/// The elements of a parameter of an array that `read` reads from any element on.
fn source<'a>(
    name: String,
    parameter: &'a Parameter,
    read: impl Fn(usize, &mut [f32]) -> Result<(), NnError> + 'a,
) -> Source<'a> {
    let start = parameter.place.start;
    let values = move |first: usize, into: &mut [f32]| read(start + first, into);
    Source { name, shape: &parameter.shape, values: Box::new(values) }
}
