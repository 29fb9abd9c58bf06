//! Parts of checkpoints on one of several disks: what is here, and what a rank needs of it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use foveate_nn::{Blocks, Model, Rule};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::layout::{self, Layout};
use super::load::{kept_of, masters, own};
use super::{checksums, list, read_json, unreadable};
use crate::error::TrainError;
use crate::whole;

/// What one disk has of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    /// The step it was saved behind.
    pub step: u64,
    /// A hash of its checksums, the same for all parts of a checkpoint: these have the bits of all files.
    pub identity: u64,
    /// Files with tensors that all disks together have.
    pub tensors: BTreeSet<String>,
    /// Files that are here, and their bytes.
    pub here: Vec<(String, u64)>,
}

impl Part {
    /// Whether a file is here.
    pub fn has(&self, file: &str) -> bool {
        self.bytes(file).is_some()
    }

    /// How many bytes of a file are here.
    pub fn bytes(&self, file: &str) -> Option<u64> {
        self.here.iter().find(|(name, _)| name == file).map(|(_, bytes)| *bytes)
    }
}

/// The parts under `folder`, oldest first. What has no checksums is none: they come last, so its files are still on
/// their way.
///
/// # Errors
/// When what is there cannot be read: an older checkpoint is not to take its place.
pub(crate) fn parts(folder: &Path) -> Result<Vec<Part>, TrainError> {
    let part = |(step, place): (u64, PathBuf)| {
        let sums = place.join(checksums::FILE);
        let identity = match whole::read(&sums) {
            Ok(sums) => xxh3_64(&sums),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(unreadable(&sums, &e)),
        };
        let files = fs::read_dir(&place).map_err(|e| unreadable(&place, &e))?;
        let named = files.flatten().filter_map(|file| {
            let bytes = file.metadata().ok().filter(fs::Metadata::is_file)?.len();
            Some((file.file_name().into_string().ok()?, bytes))
        });
        // What was on its way when a run ended has a point before its name.
        let here: Vec<_> = named.filter(|(name, _)| !name.starts_with('.')).collect();
        let path = place.join(layout::FILE);
        let tensors = match path.exists() {
            // One rank wrote all of it.
            false => here.iter().map(|(name, _)| name.clone()).collect(),
            true => {
                let layout = Layout::from_json(read_json(&path)?, &path)?;
                layout.files().into_iter().map(str::to_owned).collect()
            }
        };
        Ok(Some(Part { step, identity, tensors, here }))
    };
    list(folder).into_iter().filter_map(|found| part(found).transpose()).collect()
}

/// The files of the checkpoint in `folder` that a rank reads for a resume, with the share that `model` is.
///
/// # Errors
/// When what says where tensors are cannot be read.
pub(crate) fn needed_files<B: Blocks>(
    folder: &Path,
    model: &Model<B>,
    rule: &Rule,
) -> Result<BTreeSet<String>, TrainError> {
    if !folder.join(layout::FILE).exists() {
        return Ok(BTreeSet::new());
    }
    let store = masters(folder, None)?;
    let mut needed = BTreeSet::new();
    for p in model.parameters() {
        let own = own(model, p);
        for kept in kept_of(model, p, rule) {
            let name = layout::tensor(kept, p);
            for file in own.iter().flat_map(|range| store.files_of(&name, range)) {
                needed.insert(file.file_name().unwrap_or_default().to_string_lossy().into_owned());
            }
        }
    }
    Ok(needed)
}

/// That no disk has `file` of the checkpoint in `folder`: what was in it, and on which disk.
pub(crate) fn lacks(folder: &Path, file: &str) -> TrainError {
    let path = folder.join(layout::FILE);
    let layout = read_json(&path).and_then(|json| Layout::from_json(json, &path));
    match layout {
        Ok(layout) => TrainError::checkpoint(&folder.join(file), layout.missing(file, folder)),
        Err(e) => e,
    }
}
