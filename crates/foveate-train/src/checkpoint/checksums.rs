//! `checksums.json`: what was saved, so that what is read can be held to it.
//!
//! One checksum for each tensor, one for `config.json` and one for `state.json`. They find damage (a disk, a copy cut
//! short, an editor), not malice. Taking them costs a pass over bytes that are read or written
//! anyway.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::{CONFIG, OURS, read_json, unreadable};
use crate::error::TrainError;
use crate::safetensors::DAMAGED;
use crate::whole;

/// Its name.
pub(crate) const FILE: &str = "checksums.json";

/// Whether what is read is held to the checksums it was saved with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksums {
    /// It is; a checkpoint of other tools has none.
    #[default]
    Verify,
    /// It is not.
    Skip,
}

impl Checksums {
    /// The checksums of a checkpoint, where they are wanted; none of one of other tools. One that says
    /// in its `config.json` that it is ours has some, and its `config.json` is held to them here.
    pub(super) fn of(self, folder: &Path) -> Result<Option<Manifest>, TrainError> {
        let path = folder.join(FILE);
        if self == Self::Skip {
            return Ok(None);
        }
        if !path.exists() {
            let config = folder.join(CONFIG);
            let ours = config.exists() && read_json(&config)?.get(OURS).is_some();
            return if ours { Err(missing(&path)) } else { Ok(None) };
        }
        let manifest: Manifest = serde_json::from_value(read_json(&path)?).map_err(|e| {
            let message = format!("is no list of checksums: {e}; {DAMAGED}");
            TrainError::checkpoint(&path, message)
        })?;
        // Earlier versions wrote none of it.
        if manifest.files.contains_key(CONFIG) {
            let config = folder.join(CONFIG);
            manifest.check_file(&config)?;
        }
        Ok(Some(manifest))
    }

    /// [`Self::of`] a checkpoint of ours, which has some.
    pub(super) fn of_ours(self, folder: &Path) -> Result<Option<Manifest>, TrainError> {
        let found = self.of(folder)?;
        if found.is_none() && self == Self::Verify {
            return Err(missing(&folder.join(FILE)));
        }
        Ok(found)
    }
}

fn missing(path: &Path) -> TrainError {
    let message = "is missing; put it back, or pass --skip-checksums to do without";
    TrainError::checkpoint(path, message)
}

/// The checksums of a checkpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    /// XXH3 (64 bits, hexadecimal) of whole files, by name.
    files: BTreeMap<String, String>,
    /// XXH3 of dtype, shape and bytes of each tensor, by file and name.
    tensors: BTreeMap<String, BTreeMap<String, String>>,
}

impl Manifest {
    pub fn add_file(&mut self, name: &str, bytes: &[u8]) {
        self.files.insert(name.to_owned(), hex(bytes));
    }

    pub fn add_tensors(&mut self, file: &str, sums: BTreeMap<String, String>) {
        self.tensors.insert(file.to_owned(), sums);
    }

    /// Adds all of `other`.
    pub fn join(&mut self, other: Self) {
        self.files.extend(other.files);
        self.tensors.extend(other.tensors);
    }

    /// Holds a whole file to its checksum.
    pub fn check_file(&self, file: &Path) -> Result<(), TrainError> {
        self.check(file, &whole::read(file).map_err(|e| unreadable(file, &e))?)
    }

    /// Those of the tensors in `file`.
    pub fn tensors(&self, file: &Path) -> Result<BTreeMap<String, String>, TrainError> {
        match self.tensors.get(name(file)) {
            Some(sums) => Ok(sums.clone()),
            None => Err(TrainError::checkpoint(file, format!("has no checksums; {DAMAGED}"))),
        }
    }

    /// Holds the bytes of a whole file to its checksum.
    pub fn check(&self, file: &Path, bytes: &[u8]) -> Result<(), TrainError> {
        if self.files.get(name(file)).is_some_and(|sum| *sum == hex(bytes)) {
            return Ok(());
        }
        Err(TrainError::checkpoint(file, format!("does not match its checksum; {DAMAGED}")))
    }

    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).expect("plain text")
    }
}

fn hex(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

fn name(file: &Path) -> &str {
    file.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}
