//! Which ranks have the folder of a run on one disk.
//!
//! All have it on one unless the recipe says `run.disks = "local"`. Then each rank leaves a mark in the folder,
//! or the nearest one above that is there, and looks for those of others: ranks that see each other's have one
//! disk, and the first of them does there what rank 0 does where all share one. A checkpoint is whole where all its
//! files are on some disk; a run goes on from the newest such one, and what a rank needs that is on another disk
//! comes from there, in pieces, over the collectives.

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use foveate_nn::{Blocks, Model, Rule};

use crate::checkpoint::{self, Disk, Part, State};
use crate::error::{TrainError, TrainErrorKind};
use crate::machine;
use crate::ranks::Ranks;
use crate::recipe::{DisksChoice, Recipe};

/// Bytes of a file that are sent at once.
const PIECE: usize = 16 << 20;

/// How the name of a rank's mark begins.
const MARK: &str = ".foveate-rank-";

/// How old a mark is that no rank looks for any more.
const OLD: Duration = Duration::from_secs(3600);

/// The disks of the ranks.
pub(super) struct Disks {
    rank: usize,
    /// None where all ranks have one.
    all: Vec<Disk>,
    /// Where there are several, the step of the last checkpoint that is known to be whole.
    saved: Option<u64>,
}

/// What several disks have of checkpoints.
pub(super) enum Newest {
    Nothing,
    /// The newest that is whole.
    Whole(Whole),
    /// The first one alone, and not all of it: its step, and what is missing, in words.
    Torn(String),
}

/// A checkpoint whose files are all on some disk.
pub(super) struct Whole {
    step: u64,
    /// A newer one that is passed over: which, and what is missing, in words.
    pub passed_over: Option<String>,
    /// What is on the disk of each rank that is the first there.
    parts: Vec<Option<Part>>,
}

impl Whole {
    /// Where it is, under the folder of checkpoints.
    pub fn place(&self, checkpoints: &Path) -> PathBuf {
        checkpoints.join(format!("step-{:06}", self.step))
    }
}

impl Disks {
    /// Those of `ranks`, all of which call this.
    ///
    /// # Errors
    /// When a rank cannot write beside the folder.
    pub fn found(ranks: Ranks<'_>, recipe: &Recipe) -> Result<Self, TrainError> {
        let mut disks = Self { rank: ranks.rank(), all: Vec::new(), saved: None };
        if ranks.alone() || recipe.run.disks == DisksChoice::Shared {
            return Ok(disks);
        }
        let dir = std::path::absolute(&recipe.run.dir);
        let dir = ranks.together(dir.map_err(|e| TrainError::write(&recipe.run.dir, e)))?;
        let leaders = leaders(ranks, dir.ancestors().filter(|place| place.is_dir()))?;
        let host = machine::host().unwrap_or_else(|| "unknown".to_owned());
        let own = (host, dir.join("checkpoints"));
        let all = ranks.all(&serde_json::to_vec(&own).expect("plain text"))?;
        let firsts: BTreeSet<usize> = leaders.iter().copied().collect();
        for &first in firsts.iter().filter(|_| firsts.len() > 1) {
            let (host, folder) = serde_json::from_slice(&all[first]).map_err(other)?;
            let has = |&rank: &usize| leaders[rank] == first;
            let ranks = (0..leaders.len()).filter(has).collect();
            disks.all.push(Disk { host, folder, ranks });
        }
        Ok(disks)
    }

    /// Whether there are several.
    pub fn are_several(&self) -> bool {
        !self.all.is_empty()
    }

    /// All of them; none where all ranks have one.
    pub fn all(&self) -> &[Disk] {
        &self.all
    }

    /// Whether this rank is the first that has its disk.
    pub fn leads(&self) -> bool {
        checkpoint::leads(&self.all, self.rank)
    }

    /// Whether every disk is known to have its part of the checkpoint of a step. Where one disk is shared, whoever
    /// looks there sees it.
    pub fn have(&self, step: u64) -> bool {
        self.saved == Some(step)
    }

    /// Notes that every disk has its part of the checkpoint of a step.
    pub fn now_have(&mut self, step: u64) {
        self.saved = self.are_several().then_some(step);
    }

    /// Has every disk save the state that rank 0 has: files of one name are the same on all.
    ///
    /// # Errors
    /// When ranks cannot go on.
    pub fn alike(&self, ranks: Ranks<'_>, state: &mut State) -> Result<(), TrainError> {
        if self.are_several() {
            let of_first = serde_json::to_vec(&*state).expect("plain text and numbers");
            *state = serde_json::from_slice(&ranks.bytes_of_first(of_first)?).map_err(other)?;
        }
        Ok(())
    }

    /// The newest checkpoint under `folder` that is whole, of several disks; `unsaved` says that by the logs on all
    /// of them none has ever been.
    ///
    /// # Errors
    /// When none is whole and one has been: which host has not what of the newest.
    pub fn newest(
        &mut self,
        ranks: Ranks<'_>,
        folder: &Path,
        unsaved: bool,
    ) -> Result<Newest, TrainError> {
        let own = if self.leads() { checkpoint::parts(folder) } else { Ok(Vec::new()) };
        let own = ranks.together(own)?;
        let all = ranks.all(&serde_json::to_vec(&own).expect("plain text and numbers"))?;
        let parse = |parts: &Vec<u8>| serde_json::from_slice(parts);
        let all = all.iter().map(parse).collect::<Result<Vec<Vec<Part>>, _>>().map_err(other)?;
        let of = |id: (u64, u64)| {
            let is = |part: &&Part| (part.step, part.identity) == id;
            all.iter().map(|parts| parts.iter().find(is).cloned()).collect::<Vec<_>>()
        };
        let ids: BTreeSet<(u64, u64)> =
            all.iter().flatten().map(|part| (part.step, part.identity)).collect();
        let told = |id: (u64, u64)| {
            let (_, file) = lacking(&of(id)).expect("it is not whole");
            format!("step {}: no disk has its {file}", id.0)
        };
        for &id in ids.iter().rev() {
            let parts = of(id);
            if lacking(&parts).is_none() {
                self.saved = Some(id.0);
                let passed_over = ids.last().filter(|newest| **newest != id).copied().map(told);
                return Ok(Newest::Whole(Whole { step: id.0, passed_over, parts }));
            }
        }
        let Some(&newest) = ids.last() else { return Ok(Newest::Nothing) };
        // Of a first checkpoint there is one alone.
        if unsaved && ids.len() == 1 {
            return Ok(Newest::Torn(told(newest)));
        }
        let parts = of(newest);
        let (rank, file) = lacking(&parts).expect("it is not whole");
        let place = Whole { step: newest.0, passed_over: None, parts }.place(folder);
        let told = if self.rank == rank {
            Err(checkpoint::lacks(&place, &file))
        } else {
            Ok(Newest::Nothing)
        };
        ranks.together(told)
    }

    /// Brings what this rank's disk has not of the checkpoint `whole`, at `place`, from disks that have it: what is
    /// no tensor, then the files with elements that the ranks of a disk keep of `model`, and last the checksums, without
    /// which it is no part.
    ///
    /// # Errors
    /// When a file cannot be read or written, on all ranks.
    pub fn bring<B: Blocks>(
        &self,
        ranks: Ranks<'_>,
        whole: &Whole,
        place: &Path,
        model: &Model<B>,
        rule: &Rule,
    ) -> Result<(), TrainError> {
        let has =
            |rank: usize, file: &str| whole.parts[rank].as_ref().is_some_and(|part| part.has(file));
        if self.leads() && whole.parts[self.rank].is_none() {
            // A part of another attempt is none of this one.
            let gone = if place.exists() { fs::remove_dir_all(place) } else { Ok(()) };
            let made = gone.and_then(|()| fs::create_dir_all(place));
            ranks.together(made.map_err(|e| TrainError::write(place, e)))?;
        } else {
            ranks.together(Ok(()))?;
        }
        let files = || whole.parts.iter().flatten().flat_map(|part| &part.here);
        let part = whole.parts.iter().flatten().next().expect("it is on some disk");
        let wanted = |is: &dyn Fn(&str) -> bool, needed: &dyn Fn(usize, &str) -> bool| {
            let mut wanted = BTreeMap::new();
            for (file, _) in files().filter(|(file, _)| is(file)) {
                let wants = |disk: &&Disk| {
                    let first = disk.ranks[0];
                    !has(first, file) && disk.ranks.iter().any(|&rank| needed(rank, file))
                };
                let to: Vec<usize> =
                    self.all.iter().filter(wants).map(|disk| disk.ranks[0]).collect();
                if !to.is_empty() {
                    let bytes = |rank: usize| whole.parts[rank].as_ref()?.bytes(file);
                    let found = (0..whole.parts.len()).find_map(|rank| Some((rank, bytes(rank)?)));
                    let (from, bytes) = found.expect("it is on some disk");
                    wanted.insert(file.clone(), Wanted { from, to, bytes });
                }
            }
            wanted
        };
        let last = |file: &str| file == checkpoint::CHECKSUMS;
        let is_tensor = |file: &str| part.tensors.contains(file) && !last(file);
        let beside = |file: &str| !part.tensors.contains(file) && !last(file);
        send(ranks, place, wanted(&beside, &|_, _| true))?;
        let needed = ranks.together(checkpoint::needed_files(place, model, rule))?;
        let all = ranks.all(&serde_json::to_vec(&needed).expect("plain text"))?;
        let parse = |needed: &Vec<u8>| serde_json::from_slice(needed);
        let all = all.iter().map(parse).collect::<Result<Vec<BTreeSet<String>>, _>>();
        let all = all.map_err(other)?;
        let whole_files = !part.has(checkpoint::LAYOUT);
        let needs = |rank: usize, file: &str| whole_files || all[rank].contains(file);
        send(ranks, place, wanted(&is_tensor, &needs))?;
        send(ranks, place, wanted(&last, &|_, _| true))
    }
}

/// Of every rank the first one that sees the same place on its disk: the first of `places`. The first rank of each disk
/// removes marks that earlier runs left there and in the places above, where they lie that were made before the
/// first was there.
fn leaders<'a>(
    ranks: Ranks<'_>,
    places: impl Iterator<Item = &'a Path> + Clone,
) -> Result<Vec<usize>, TrainError> {
    let place = places.clone().next().unwrap_or(Path::new("."));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    let now = ranks.bytes_of_first((now ^ u64::from(std::process::id())).to_le_bytes().to_vec())?;
    let run = now.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let mark = |rank: usize| place.join(format!("{MARK}{rank:05}-{run}"));
    let own = mark(ranks.rank());
    let put = File::create(&own).map(|_| ()).map_err(|e| TrainError::write(&own, e));
    let marked = ranks.together(put).and_then(|()| {
        let first = (0..ranks.count()).find(|&rank| mark(rank).exists());
        let first = first.unwrap_or(ranks.rank()) as u64;
        // Nobody looks any more when all have said what they saw.
        ranks.all(&first.to_le_bytes())
    });
    // It may be none, where it could not be made.
    let _ = fs::remove_file(&own);
    let parse = |first: Vec<u8>| Ok(u64::from_le_bytes(first.try_into().map_err(other)?) as usize);
    let leaders = marked?.into_iter().map(parse).collect::<Result<Vec<usize>, TrainError>>()?;
    if leaders[ranks.rank()] == ranks.rank() {
        places.for_each(remove_old_marks);
    }
    Ok(leaders)
}

/// Removes what ranks that were killed left in `place`; whatever cannot be removed harms nobody.
fn remove_old_marks(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let is_mark = entry.file_name().to_string_lossy().starts_with(MARK);
        let age = entry.metadata().and_then(|of| of.modified()).map(|at| at.elapsed());
        if is_mark && age.is_ok_and(|age| age.is_ok_and(|age| age > OLD)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A file that no disk has, and the first rank that can say what was in it.
fn lacking(parts: &[Option<Part>]) -> Option<(usize, String)> {
    let here = || parts.iter().enumerate().filter_map(|(rank, part)| Some((rank, part.as_ref()?)));
    let (rank, first) = here().next()?;
    let lacks = |file: &&String| !here().any(|(_, part)| part.has(file));
    first.tensors.iter().find(lacks).map(|file| (rank, file.clone()))
}

/// A file that goes from the disk of one rank to those of others.
struct Wanted {
    from: usize,
    to: Vec<usize>,
    bytes: u64,
}

/// Sends files of the folder `place`, in pieces; all ranks that have some send at once. A file is there as a whole or
/// not at all.
fn send(ranks: Ranks<'_>, place: &Path, files: BTreeMap<String, Wanted>) -> Result<(), TrainError> {
    let mut queues = vec![Vec::new(); ranks.count()];
    for (name, Wanted { from, to, bytes }) in &files {
        let pieces = bytes.div_ceil(PIECE as u64).max(1);
        // To one rank at a time: a piece is in memory once, however many want it.
        let of_all = |piece: u64| to.iter().map(move |&to| (name, to, piece, piece + 1 == pieces));
        queues[*from].extend((0..pieces).flat_map(of_all));
    }
    let rounds = queues.iter().map(Vec::len).max().unwrap_or(0);
    let mut sinks = BTreeMap::<usize, File>::new();
    for round in 0..rounds {
        let mut parts = vec![Vec::new(); ranks.count()];
        let read = match queues[ranks.rank()].get(round) {
            None => Ok(()),
            Some(&(name, to, piece, _)) => {
                let path = place.join(name);
                let read = piece_of(&path, piece).map(|bytes| parts[to] = bytes);
                read.map_err(|e| TrainError::checkpoint(&path, format!("could not be read: {e}")))
            }
        };
        ranks.together(read)?;
        let arrived = ranks.world().exchange(parts)?;
        let mut write = |from: usize, bytes: &[u8]| -> Result<(), TrainError> {
            let Some(&(name, to, _, last)) = queues[from].get(round) else { return Ok(()) };
            if to != ranks.rank() {
                return Ok(());
            }
            let (path, coming) = (place.join(name), place.join(format!(".{name}.coming")));
            let failed = |e| TrainError::write(&path, e);
            let file = match sinks.entry(from) {
                Entry::Occupied(open) => open.into_mut(),
                Entry::Vacant(begins) => begins.insert(File::create(&coming).map_err(failed)?),
            };
            file.write_all(bytes).map_err(failed)?;
            if last && let Some(file) = sinks.remove(&from) {
                file.sync_all().and_then(|()| fs::rename(&coming, &path)).map_err(failed)?;
            }
            Ok(())
        };
        let written = arrived.iter().enumerate().try_for_each(|(from, bytes)| write(from, bytes));
        ranks.together(written)?;
    }
    Ok(())
}

/// A piece of a file.
fn piece_of(path: &Path, piece: u64) -> std::io::Result<Vec<u8>> {
    let (mut file, mut bytes) = (File::open(path)?, Vec::new());
    file.seek(SeekFrom::Start(piece * PIECE as u64))?;
    file.take(PIECE as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What a rank sends that this one does not know.
fn other(e: impl std::fmt::Debug) -> TrainError {
    let message = format!("a rank reported something else than its disk: {e:?}");
    TrainErrorKind::Ranks { message, lost: false }.into()
}
