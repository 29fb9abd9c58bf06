//! What the tuner has found, on disk.
//!
//! A record is one small JSON file in the folder `tuned` beside the compiled kernels, under a
//! folder for what a time depends on (GPU, driver, NVRTC, and this engine's kernels) and a name
//! that is the hash of its [`RecordKey`]. Files are written whole and renamed, so processes that tune at
//! the same time lose nothing; of two that tune the same problem the last is kept. A process reads
//! the records of its GPU once. A file that is damaged or of another format, or that says it is of
//! another GPU or problem than its place, is no record: a line on stderr says so, and planning goes
//! on without.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use foveate_problem::Spec;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::class::{Class, Sizes};
use super::key::RecordKey;
use crate::compile::config::{Kernel, Tiles};
use crate::compile::source;
use crate::error::CudaError;
use foveate_gpu::Engine;
use foveate_gpu::cache::{Cache, write_whole};
use foveate_gpu::driver::DeviceInfo;
use foveate_gpu::nvrtc::Compiler;
use foveate_gpu::sync::lock;

/// Changes with the format.
const FORMAT: u32 = 4;

/// What a time depends on beside the problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The GPU, as its driver calls it.
    pub gpu: String,
    /// The driver's CUDA version.
    pub driver: String,
    /// NVRTC's version.
    pub nvrtc: String,
    /// Version of this crate and hash of its kernels.
    pub engine: String,
}

/// What was found for one class of problems.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The fastest.
    pub tiles: Tiles,
    /// Median microseconds of a pass with it.
    pub us: f64,
    /// The same with what the planner chose before, when that could run.
    pub planned_us: Option<f64>,
}

/// A file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    format: u32,
    machine: Machine,
    key: RecordKey,
    record: Record,
}

/// What a file of every format has.
#[derive(Deserialize)]
struct Format {
    format: u32,
}

/// The records of one GPU.
#[derive(Debug)]
pub struct Records {
    machine: Machine,
    folder: Option<PathBuf>,
    found: Mutex<HashMap<RecordKey, Record>>,
    ignored: Vec<String>,
}

impl Machine {
    /// This process on a GPU.
    ///
    /// # Errors
    /// When NVRTC is missing: there is nothing to compile, and nothing was recorded.
    pub fn of(info: &DeviceInfo) -> Result<Self, CudaError> {
        let version = |(major, minor): (i64, i64)| format!("{major}.{minor}");
        let (major, minor) = Compiler::get()?.version();
        Ok(Self {
            gpu: info.name.clone(),
            driver: version((info.driver.0.into(), info.driver.1.into())),
            nvrtc: version((major.into(), minor.into())),
            engine: format!("{} {}", env!("CARGO_PKG_VERSION"), source::digest()),
        })
    }

    fn folder(&self) -> String {
        hash(&[&self.gpu, &self.driver, &self.nvrtc, &self.engine].map(String::as_str).join("\n"))
    }
}

impl Records {
    /// The records of a GPU beside the compiled kernels of this process.
    ///
    /// # Errors
    /// Those of [`Machine::of`].
    pub fn of(info: &DeviceInfo) -> Result<Self, CudaError> {
        Ok(Self::at(Cache::get().folder(), Machine::of(info)?))
    }

    /// The records of an engine's GPU, read when they are first asked for; `None` where NVRTC is
    /// missing, and nothing could run.
    pub fn of_engine(engine: &Engine) -> Arc<Option<Self>> {
        engine.keep(|| Self::of(engine.device().info()).ok())
    }

    /// The records of `machine` beside kernels in `folder`, or in memory only.
    pub fn at(folder: Option<&Path>, machine: Machine) -> Self {
        let folder = folder.map(|f| f.join("tuned").join(machine.folder()));
        let (mut found, mut ignored) = (HashMap::new(), Vec::new());
        for file in folder.iter().flat_map(fs::read_dir).flatten().flatten() {
            let path = file.path();
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            match read(&path, &machine) {
                Ok((key, record)) => {
                    found.insert(key, record);
                }
                Err(why) => {
                    let line = format!("{}: {why}; the record is ignored", path.display());
                    eprintln!("warning: {line}");
                    ignored.push(line);
                }
            }
        }
        Self { machine, folder, found: Mutex::new(found), ignored }
    }

    /// What they were measured on.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Where they are.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// What was ignored, and why.
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// The record of a class of problems.
    pub fn find(&self, key: &RecordKey) -> Option<Record> {
        lock(&self.found).get(key).copied()
    }

    /// What was recorded for a kernel of this problem.
    pub fn record(
        &self,
        kernel: Kernel,
        class: &Class,
        sizes: &Sizes,
        spec: &Spec,
    ) -> Option<Record> {
        self.find(&RecordKey::of(kernel, class, sizes, spec)?)
    }

    /// Keeps a record, for this process and for those to come.
    ///
    /// # Errors
    /// When it cannot be written. This process has it all the same.
    pub fn keep(&self, key: &RecordKey, record: Record) -> io::Result<()> {
        lock(&self.found).insert(key.clone(), record);
        let Some(folder) = &self.folder else { return Ok(()) };
        let (machine, key) = (self.machine.clone(), key.clone());
        let name = file_name(&key);
        let entry = Entry { format: FORMAT, machine, key, record };
        let text = serde_json::to_string_pretty(&entry).expect("texts and numbers are JSON");
        write_whole(&folder.join(name), text.as_bytes())
    }
}

fn read(path: &Path, machine: &Machine) -> Result<(RecordKey, Record), String> {
    let text = fs::read_to_string(path).map_err(|e| format!("it cannot be read: {e}"))?;
    let damaged = |e| format!("it is damaged: {e}");
    let Format { format } = serde_json::from_str(&text).map_err(damaged)?;
    if format != FORMAT {
        return Err(format!("it has format {format}, not {FORMAT}"));
    }
    let entry: Entry = serde_json::from_str(&text).map_err(damaged)?;
    if entry.machine != *machine {
        return Err(format!("it is of another machine: {:?}", entry.machine));
    }
    if path.file_name().is_none_or(|name| *name != *file_name(&entry.key)) {
        return Err("it is of another problem than its name".to_owned());
    }
    Ok((entry.key, entry.record))
}

fn file_name(key: &RecordKey) -> String {
    hash(&serde_json::to_string(key).expect("texts and numbers are JSON")) + ".json"
}

/// The first 16 bytes of SHA-256, in hexadecimal.
fn hash(text: &str) -> String {
    Sha256::digest(text)[..16].iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use foveate_mods::masks;

    use super::*;
    use crate::compile::config::Elem;

    const SIZES: Sizes =
        Sizes { batch: 2, heads_q: 16, heads_kv: 16, queries: 8192, keys: 8192, mean_kv_len: 8192 };
    const BEST: Tiles = Tiles::portable(128, 96, 4, 1);

    fn machine() -> Machine {
        let text = str::to_owned;
        Machine {
            gpu: text("NVIDIA H200"),
            driver: text("13.0"),
            nvrtc: text("13.0"),
            engine: text("0.1.0 abc"),
        }
    }

    fn spec() -> Spec {
        Spec { mask: Some(masks::causal()), score: None, scale: None, dropout: None }
    }

    fn class(dim: usize) -> Class {
        Class { mask: true, ..Class::new(Elem::Bf16, dim, dim, 1) }
    }

    fn key(dim: usize) -> RecordKey {
        RecordKey::of(Kernel::Forward, &class(dim), &SIZES, &spec()).unwrap()
    }

    fn record(us: f64) -> Record {
        Record { tiles: BEST, us, planned_us: Some(2.0 * us) }
    }

    #[test]
    fn a_record_is_found_by_this_process_and_by_the_next() {
        let root = tempfile::tempdir().unwrap();
        let at = || Records::at(Some(root.path()), machine());
        let records = at();
        let tiles = |r: &Records, dim| {
            r.record(Kernel::Forward, &class(dim), &SIZES, &spec()).map(|record| record.tiles)
        };
        assert_eq!(tiles(&records, 64), None);
        records.keep(&key(64), record(5.0)).unwrap();
        for records in [records, at()] {
            assert_eq!(tiles(&records, 64), Some(BEST));
            assert_eq!(tiles(&records, 128), None);
            assert_eq!(records.record(Kernel::Backward, &class(64), &SIZES, &spec()), None);
            assert_eq!(records.find(&key(64)), Some(record(5.0)));
            assert!(records.ignored().is_empty());
        }
    }

    #[test]
    fn records_of_another_gpu_driver_compiler_or_engine_are_not_seen() {
        let root = tempfile::tempdir().unwrap();
        let other = [
            Machine { gpu: "NVIDIA L40S".into(), ..machine() },
            Machine { driver: "12.8".into(), ..machine() },
            Machine { nvrtc: "12.8".into(), ..machine() },
            Machine { engine: "0.1.0 abd".into(), ..machine() },
        ];
        Records::at(Some(root.path()), machine()).keep(&key(64), record(5.0)).unwrap();
        for other in other {
            let records = Records::at(Some(root.path()), other);
            assert_eq!(records.find(&key(64)), None);
            assert!(records.ignored().is_empty(), "they lie elsewhere");
        }
    }

    #[test]
    fn damaged_and_foreign_files_are_ignored_with_a_line_each() {
        let root = tempfile::tempdir().unwrap();
        let at = || Records::at(Some(root.path()), machine());
        let records = at();
        records.keep(&key(64), record(5.0)).unwrap();
        records.keep(&key(128), record(6.0)).unwrap();
        let file = records.folder().unwrap().join(file_name(&key(64)));
        let whole = fs::read_to_string(&file).unwrap();
        let first = whole.replace("\"format\": 4", "\"format\": 2").replace("dropout", "keep");
        let damaged = [
            (whole[..whole.len() / 2].to_owned(), "it is damaged: "),
            (String::new(), "it is damaged: "),
            (whole.replace("\"tile_q\": 128", "\"tile_q\": -1"), "it is damaged: "),
            (whole.replace("\"format\": 4", "\"format\": 5"), "it has format 5, not 4"),
            (first, "it has format 2, not 4"),
            (whole.replace("H200", "H100"), "it is of another machine: "),
            (whole.replace("\"dim\": 64", "\"dim\": 80"), "it is of another problem than its name"),
        ];
        for (text, why) in damaged {
            assert_ne!(text, whole);
            fs::write(&file, &text).unwrap();
            let records = at();
            assert_eq!(records.find(&key(64)), None, "{why}");
            assert_eq!(records.find(&key(128)), Some(record(6.0)), "the others are there");
            let [line] = records.ignored() else { panic!("{:?}", records.ignored()) };
            assert!(line.starts_with(&format!("{}: {why}", file.display())), "{line}");
        }
        records.keep(&key(64), record(7.0)).unwrap();
        assert_eq!(at().find(&key(64)), Some(record(7.0)), "it is whole again");
    }

    #[test]
    fn processes_that_tune_at_the_same_time_lose_nothing() {
        let root = tempfile::tempdir().unwrap();
        std::thread::scope(|s| {
            for process in 0..4 {
                let root = root.path();
                s.spawn(move || {
                    let records = Records::at(Some(root), machine());
                    for dim in [16, 32, 64, 80 + 16 * process] {
                        records.keep(&key(dim), record(dim as f64)).unwrap();
                        // Whoever reads in between sees whole files.
                        assert!(Records::at(Some(root), machine()).ignored().is_empty());
                    }
                });
            }
        });
        let records = Records::at(Some(root.path()), machine());
        for dim in [16, 32, 64, 80, 96, 112, 128] {
            assert_eq!(records.find(&key(dim)), Some(record(dim as f64)), "{dim}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_written_costs_only_the_next_process() {
        let root = tempfile::tempdir().unwrap();
        let occupied = root.path().join("file");
        fs::write(&occupied, "").unwrap();
        for folder in [Some(&*occupied), None] {
            let records = Records::at(folder, machine());
            assert_eq!(records.keep(&key(64), record(5.0)).is_err(), folder.is_some());
            assert_eq!(records.find(&key(64)), Some(record(5.0)));
        }
    }
}
