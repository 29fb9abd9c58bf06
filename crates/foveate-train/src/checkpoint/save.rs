//! Writing a checkpoint: beside its place, flushed, then renamed.
//!
//! A save has three parts. [`Save::begin`] makes a folder beside the place; rank 0 does it. Then every rank
//! writes its files there: all of them where there is one rank ([`Save::write`]), its ranges where there are
//! several ([`Save::write_part`]), rank 0 also what is no tensor. When all have reported what they wrote,
//! rank 0 says what is where, renames the folder ([`Save::publish`]) and removes older ones ([`Save::retire`]).
//! Whatever dies before the second, nothing is in the place.
//!
//! Where ranks have several disks ([`Save::on`]), the first rank of each does on it what rank 0 does, and every
//! disk has what is no tensor, `layout.json` and the checksums of all, the same on each. Older checkpoints are
//! removed when every disk has the new one ([`Save::publish`], then [`Save::retire`]), so one is whole at all times.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use foveate_nn::{Blocks, Parameter};
use serde_json::{Value, json};

use super::checksums::{self, Manifest};
use super::content::{Carried, Content, Kept, Values};
use super::layout::{self, Disk, Layout, Part, Piece};
use super::{
    CONFIG, INDEX, MASTERS, SINGLE, STATE, Snapshot, is_checkpoint, list, list_aside, remove,
    remove_but, remove_leftovers, set_aside, unreadable,
};
use crate::error::{TrainError, TrainErrorKind};
use crate::recipe::SaveDtype;
use crate::safetensors::{self, Source, WriteError};

/// Bytes of tensors in one file before they are divided into several.
pub(super) const SHARD_BYTES: usize = 5_000_000_000;

/// How long a folder that rank 0 made may stay unseen by another rank.
const VISIBLE: Duration = Duration::from_secs(5);

/// A file that is being written.
pub(super) trait Durable: Write + Send {
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
    let save = Save::of(folder, snapshot.state.step, keep);
    if !save.begin()? {
        return Ok(save.place);
    }
    let written = Content::of(snapshot)
        .and_then(|content| save.write_with(&content, snapshot, create, shard_bytes));
    match written {
        Ok(written) => save.commit_with(vec![written], create),
        Err(e) => Err(save.abandon(e)),
    }
}

/// A save that is under way.
#[derive(Clone, Debug)]
pub(crate) struct Save {
    folder: PathBuf,
    step: u64,
    /// How many checkpoints of a run stay; none where `folder` is no run's.
    keep: Option<usize>,
    /// The disks of the ranks, where these are several.
    disks: Vec<Disk>,
    temporary: PathBuf,
    /// Where the checkpoint will be.
    pub place: PathBuf,
}

/// Whether rank `rank` is the first of those that write to its disk, of `disks`; of all where there are none.
pub(crate) fn leads(disks: &[Disk], rank: usize) -> bool {
    match disks.is_empty() {
        true => rank == 0,
        false => disks.iter().any(|disk| disk.ranks.first() == Some(&rank)),
    }
}

/// What a rank has written.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Written {
    sums: Manifest,
    /// What there is to be written in ranges, by all ranks: rank 0 says so.
    tensors: BTreeMap<String, Vec<usize>>,
    /// The ranges that this rank has written.
    parts: Vec<Part>,
}

impl Save {
    /// The save of a step under `folder`, which then keeps the newest `keep`.
    pub fn of(folder: &Path, step: u64, keep: usize) -> Self {
        let temporary = folder.join(format!(".writing-{step:06}"));
        let place = folder.join(format!("step-{step:06}"));
        let (folder, disks) = (folder.to_owned(), Vec::new());
        Self { folder, step, keep: Some(keep.max(1)), disks, temporary, place }
    }

    /// The same, each rank on one of `disks`; all on one where there are none.
    pub fn on(self, disks: &[Disk]) -> Self {
        Self { disks: disks.to_vec(), ..self }
    }

    /// Whether rank `rank` is the first of those that write to its disk.
    pub fn leads(&self, rank: usize) -> bool {
        leads(&self.disks, rank)
    }

    /// One to the new folder `place`, begun.
    ///
    /// # Errors
    /// When something is there, or the folder to write to, beside it, cannot be made.
    pub fn to_new(place: &Path) -> Result<Self, TrainError> {
        let refuse = |message: &str| {
            let (path, message) = (place.to_owned(), message.to_owned());
            Err(TrainErrorKind::Folder { path, message }.into())
        };
        let is_empty = |folder: fs::ReadDir| folder.count() == 0;
        if place.exists() && !fs::read_dir(place).is_ok_and(is_empty) {
            return refuse("is there already; give a folder that is not");
        }
        let Some(name) = place.file_name() else { return refuse("is no name of a folder") };
        let folder = place.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new(".")).to_owned();
        let temporary = folder.join(format!(".exporting-{}", name.to_string_lossy()));
        let left = if temporary.exists() { fs::remove_dir_all(&temporary) } else { Ok(()) };
        left.and_then(|()| fs::create_dir_all(&temporary))
            .map_err(|e| TrainError::write(&temporary, e))?;
        let (place, disks) = (place.to_owned(), Vec::new());
        Ok(Self { folder, step: 0, keep: None, disks, temporary, place })
    }

    /// Makes the folder to write to. False where the step is saved already: steps are reproducible, so what
    /// is here is what would be written. One of several disks may be the only one that has it, so it is written anew.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn begin(&self) -> Result<bool, TrainError> {
        if self.disks.is_empty() && is_checkpoint(&self.place) {
            return Ok(false);
        }
        fs::create_dir_all(&self.folder)
            .and_then(|()| remove_leftovers(&self.folder))
            .and_then(|()| fs::create_dir(&self.temporary))
            .map_err(|e| TrainError::write(&self.place, e))?;
        Ok(true)
    }

    /// Writes all of a checkpoint, tensors whole.
    ///
    /// # Errors
    /// When something cannot be written, or a value is not finite in the file.
    pub fn write(&self, content: &Content, values: &dyn Values) -> Result<Written, TrainError> {
        self.write_with(content, values, &create, SHARD_BYTES)
    }

    pub(super) fn write_with(
        &self,
        content: &Content,
        values: &dyn Values,
        create: Create<'_>,
        shard_bytes: usize,
    ) -> Result<Written, TrainError> {
        let mut writer = Writer::to(&self.temporary, create);
        writer.beside(content)?;
        writer.weights(content, values, shard_bytes)?;
        if content.state.is_some() {
            writer.masters(content, values, shard_bytes)?;
        }
        Ok(Written { sums: writer.sums, ..Default::default() })
    }

    /// Writes the elements `owned` of the f32 weights and moments, as rank `rank`; the first of a disk also writes
    /// what is no tensor.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn write_part(
        &self,
        content: &Content,
        values: &dyn Values,
        owned: &[Range<usize>],
        rank: usize,
    ) -> Result<Written, TrainError> {
        self.write_part_with(content, values, owned, rank, &create, (SHARD_BYTES, layout::PIECE))
    }

    pub(super) fn write_part_with(
        &self,
        content: &Content,
        values: &dyn Values,
        owned: &[Range<usize>],
        rank: usize,
        create: Create<'_>,
        (shard_bytes, piece): (usize, usize),
    ) -> Result<Written, TrainError> {
        let mut writer = Writer::to(&self.temporary, create);
        if self.leads(rank) {
            writer.beside(content)?;
        }
        let pieces = layout::pieces(content, owned, piece);
        let (mut parts, step) = (Vec::new(), content.step());
        for (i, some) in shards(pieces, |(p, ..)| p.elems * 4, shard_bytes).into_iter().enumerate()
        {
            if some.is_empty() {
                continue;
            }
            let file = layout::file_of(rank, i);
            let source = |(piece, kept, start): &(Piece, Kept, usize)| {
                let (kept, start) = (*kept, *start);
                let values = move |first, into: &mut [f32]| values.read(kept, start + first, into);
                Source { name: piece.name(), shape: vec![piece.elems], values: Box::new(values) }
            };
            let sources: Vec<Source<'_>> = some.iter().map(source).collect();
            writer.tensors(&file, SaveDtype::F32, &sources, step)?;
            drop(sources);
            let pieces: Vec<Piece> = some.into_iter().map(|(piece, ..)| piece).collect();
            parts.push(Part { file, pieces });
        }
        let tensors = if rank == 0 { layout::tensors(content) } else { BTreeMap::new() };
        Ok(Written { sums: writer.sums, tensors, parts })
    }

    /// Whether rank `rank` sees the folder that rank 0 made.
    ///
    /// # Errors
    /// When it does not, after some seconds.
    pub fn is_shared(&self, rank: usize) -> Result<(), TrainError> {
        let began = Instant::now();
        while !self.temporary.is_dir() {
            // A network file system may show it late.
            if began.elapsed() > VISIBLE {
                let message = format!(
                    "rank {rank} does not see here what rank 0 writes; give all ranks one run.dir on \
                     a file system that they share, or set run.disks = \"local\""
                );
                return Err(TrainErrorKind::Folder { path: self.folder.clone(), message }.into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Removes what was written, for the sake of `e`, which it returns.
    pub fn abandon(&self, e: TrainError) -> TrainError {
        // The disk may be full: give back what was taken, then tell of the first failure.
        let _ = fs::remove_dir_all(&self.temporary);
        e
    }

    /// Makes a checkpoint of what all ranks have written, in order of rank, and removes older ones.
    ///
    /// # Errors
    /// Those of [`Self::publish`] and [`Self::retire`].
    pub fn commit(&self, all: Vec<Written>) -> Result<PathBuf, TrainError> {
        self.commit_with(all, &create)
    }

    fn commit_with(&self, all: Vec<Written>, create: Create<'_>) -> Result<PathBuf, TrainError> {
        self.publish_with(all, create)?;
        self.retire().map(|()| self.place.clone())
    }

    /// Makes a checkpoint of what all ranks have written, in order of rank; of several disks that of this one.
    ///
    /// # Errors
    /// A range of a tensor that is missing or written twice, or a file system that refuses: nothing stays
    /// of it then.
    pub fn publish(&self, all: Vec<Written>) -> Result<(), TrainError> {
        self.publish_with(all, &create)
    }

    fn publish_with(&self, all: Vec<Written>, create: Create<'_>) -> Result<(), TrainError> {
        let failed = |e: io::Error| TrainError::write(&self.place, e);
        let sync = |folder: &Path| File::open(folder).and_then(|dir| dir.sync_all());
        let described = self.describe(all, create).and_then(|()| {
            sync(&self.temporary).map_err(|e| TrainError::write(&self.temporary, e))
        });
        // An empty folder of another origin gives way; one with files in it is somebody's.
        described
            .and_then(|()| {
                // What an attempt left that did not reach every disk.
                match is_checkpoint(&self.place) && !self.disks.is_empty() {
                    true => remove(&self.folder, self.step, &self.place),
                    false => Ok(()),
                }
            })
            .and_then(|()| fs::rename(&self.temporary, &self.place).map_err(failed))
            .map_err(|e| self.abandon(e))?;
        sync(&self.folder).map_err(failed)
    }

    /// Removes all but the newest checkpoints, as many as are kept; of several disks also parts of later steps: a
    /// run that had all of them would have gone on from there.
    ///
    /// # Errors
    /// When one cannot be removed.
    pub fn retire(&self) -> Result<(), TrainError> {
        let Some(keep) = self.keep else { return Ok(()) };
        if !self.disks.is_empty() {
            for (step, later) in list(&self.folder).iter().filter(|(step, _)| *step > self.step) {
                set_aside(&self.folder, *step, later)?;
            }
            for (step, aside) in list_aside(&self.folder) {
                if step <= self.step {
                    remove(&self.folder, step, &aside)?;
                }
            }
        }
        remove_but(&self.folder, keep)
    }

    /// Writes what is where, and the checksums.
    fn describe(&self, all: Vec<Written>, create: Create<'_>) -> Result<(), TrainError> {
        let mut writer = Writer::to(&self.temporary, create);
        let (mut tensors, mut parts) = (BTreeMap::new(), Vec::new());
        for written in all {
            writer.sums.join(written.sums);
            tensors.extend(written.tensors);
            parts.extend(written.parts);
        }
        if !tensors.is_empty() {
            let (disks, path) = (self.disks.clone(), self.temporary.join(layout::FILE));
            let layout = Layout::of(tensors, parts, disks, &path)?;
            let text = writer.json(layout::FILE, &layout.to_json())?;
            writer.sums.add_file(layout::FILE, text.as_bytes());
        }
        let sums = writer.sums.to_json();
        writer.json(checksums::FILE, &sums).map(|_| ())
    }
}

/// The files of one checkpoint, with the checksums of those written so far.
struct Writer<'a> {
    to: &'a Path,
    create: Create<'a>,
    sums: Manifest,
}

impl<'a> Writer<'a> {
    fn to(to: &'a Path, create: Create<'a>) -> Self {
        Self { to, create, sums: Manifest::default() }
    }

    /// What is no tensor.
    fn beside(&mut self, content: &Content) -> Result<(), TrainError> {
        let config = self.json(CONFIG, &content.config)?;
        self.sums.add_file(CONFIG, config.as_bytes());
        for (name, carried) in &content.files {
            match carried {
                Carried::Text(text) => self.put(name, text.as_bytes())?,
                Carried::Copy(path) => {
                    self.put(name, &fs::read(path).map_err(|e| unreadable(path, &e))?)?;
                }
            }
        }
        let Some(state) = &content.state else { return Ok(()) };
        let state = self.json(STATE, &serde_json::to_value(state).expect("plain numbers"))?;
        self.sums.add_file(STATE, state.as_bytes());
        Ok(())
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
    fn weights(
        &mut self,
        content: &Content,
        values: &dyn Values,
        shard_bytes: usize,
    ) -> Result<(), TrainError> {
        let (parameters, dtype) = (&content.parameters, content.dtype);
        let size = |p: &Parameter| p.place.len() * dtype.bytes();
        let shards = shards(parameters, |p| size(p), shard_bytes);
        let mut weight_map = BTreeMap::new();
        let count = shards.len();
        for (i, shard) in shards.iter().enumerate() {
            let name = match count {
                1 => SINGLE.to_owned(),
                n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
            };
            let sources = shard.iter().map(|&p| source(p.name.clone(), p, Kept::Weight, values));
            self.tensors(&name, dtype, &sources.collect::<Vec<_>>(), content.step())?;
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
    fn masters(
        &mut self,
        content: &Content,
        values: &dyn Values,
        shard_bytes: usize,
    ) -> Result<(), TrainError> {
        let of = |p| content.kept(p).map(move |kept| (layout::tensor(kept, p), p, kept));
        let all = content.parameters.iter().flat_map(of);
        let shards = shards(all, |(_, p, _)| p.place.len() * 4, shard_bytes);
        let count = shards.len();
        for (i, shard) in shards.into_iter().enumerate() {
            let name = match count {
                1 => MASTERS.to_owned(),
                n => format!("masters-{:05}-of-{n:05}.safetensors", i + 1),
            };
            let sources = shard.into_iter().map(|(name, p, kept)| source(name, p, kept, values));
            self.tensors(&name, SaveDtype::F32, &sources.collect::<Vec<_>>(), content.step())?;
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
            WriteError::Read(e) => e,
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

/// A whole tensor of a parameter.
fn source<'a>(
    name: String,
    parameter: &Parameter,
    kept: Kept,
    values: &'a dyn Values,
) -> Source<'a> {
    let start = parameter.place.start;
    let values = move |first: usize, into: &mut [f32]| values.read(kept, start + first, into);
    Source { name, shape: parameter.shape.clone(), values: Box::new(values) }
}
