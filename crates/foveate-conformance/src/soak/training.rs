//! A small run of `foveate train`: its folder, its recipe and what it logged.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use foveate_tensor::random::Random;
use tempfile::TempDir;

use super::process::{self, Ended};

/// More than any of these runs takes on a machine with other work.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A folder with a recipe, documents, and the runs made by them.
pub struct Folder {
    dir: TempDir,
    foveate: PathBuf,
    /// Steps that the recipe trains.
    pub steps: usize,
}

impl Folder {
    /// Documents and a recipe of random sizes; every number of the run follows from them.
    pub fn random(foveate: &Path, random: &mut Random) -> Result<Self, String> {
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        let words = ["the", "quick", "brown", "fox", "über", "lazy", "dogs", "\n", "1234", "🦀"];
        for i in 0..6 + random.below(8) {
            let text: Vec<_> =
                (0..8 + random.below(120)).map(|_| words[random.below(words.len())]).collect();
            write(&dir.path().join(format!("{i:02}.txt")), text.join(" ").as_bytes())?;
        }
        let mut pick = |from: [&'static str; 3]| from[random.below(3)];
        let lines = [
            ("run", "dir", "\"run\""),
            ("", "seed", pick(["1", "7", "9223372036854775807"])),
            ("model", "hidden_size", "16"),
            ("", "intermediate_size", pick(["24", "32", "40"])),
            ("", "num_hidden_layers", pick(["1", "2", "2"])),
            ("", "num_attention_heads", pick(["2", "2", "4"])),
            ("", "num_key_value_heads", pick(["1", "1", "2"])),
            ("", "tie_word_embeddings", pick(["true", "false", "true"])),
            ("attention", "mask", pick(["\"causal\"", "\"causal & document\"", "\"window(9)\""])),
            ("", "score", pick(["\"softcap(30)\"", "\"score * 0.5\"", "\"alibi\""])),
            ("data", "files", "[\"*.txt\"]"),
            ("", "len", pick(["24", "32", "41"])),
            ("", "held_out", pick(["0.0", "0.2", "0.3"])),
            ("train", "steps", "24"),
            ("", "batch_rows", pick(["1", "2", "3"])),
            ("", "accumulate", pick(["1", "1", "2"])),
            ("", "recompute", pick(["\"none\"", "\"mlp\"", "\"full\""])),
            ("", "eval_every", pick(["5", "10", "11"])),
            ("", "save_every", pick(["2", "4", "7"])),
            ("", "save_dtype", pick(["\"f32\"", "\"bf16\"", "\"f16\""])),
            ("", "async_save", pick(["true", "false", "true"])),
            ("schedule", "warmup_steps", pick(["0", "4", "9"])),
        ];
        let mut recipe = String::new();
        for (section, key, value) in lines {
            if !section.is_empty() {
                recipe += &format!("\n[{section}]\n");
            }
            recipe += &format!("{key} = {value}\n");
        }
        write(&dir.path().join("recipe.toml"), recipe.as_bytes())?;
        Ok(Self { dir, foveate: foveate.to_owned(), steps: 24 })
    }

    /// A copy of the folder and all that is in it.
    pub fn copy(&self) -> Result<Self, String> {
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        copy(self.path(), dir.path())?;
        Ok(Self { dir, foveate: self.foveate.clone(), steps: self.steps })
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A command of the binary in this folder.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = process::bounded(&self.foveate);
        command.args(args).current_dir(self.path());
        command
    }

    /// Runs a command to its end.
    pub fn run(&self, args: &[&str]) -> Result<Ended, String> {
        process::run(&mut self.command(args), LIMIT)
    }

    /// Runs a command that has to succeed, and gives what it wrote to stdout.
    pub fn succeed(&self, args: &[&str]) -> Result<String, String> {
        let ended = self.run(args)?;
        match ended.error_line()? {
            None => Ok(ended.stdout),
            Some(line) => Err(format!("`foveate {}`: {line}", args.join(" "))),
        }
    }

    /// The folders of checkpoints of a run, oldest first.
    pub fn checkpoints(&self, run: &str) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.path().join(run).join("checkpoints")) else {
            return Vec::new();
        };
        let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
        let is_checkpoint = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"))
        };
        let mut found: Vec<_> = paths.filter(is_checkpoint).collect();
        found.sort();
        found
    }

    /// The newest checkpoint of `run`.
    pub fn newest(&self) -> Result<PathBuf, String> {
        self.checkpoints("run").pop().ok_or_else(|| "the run has no checkpoint".into())
    }

    /// Loss and gradient norm of every step of a run, as they were written.
    pub fn steps_of(&self, run: &str) -> Result<BTreeMap<u64, [String; 2]>, String> {
        let path = self.path().join(run).join("metrics.jsonl");
        let log = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let mut steps = BTreeMap::new();
        for line in log.lines() {
            let record: serde_json::Value =
                serde_json::from_str(line).map_err(|e| format!("metrics.jsonl: {e}: {line:?}"))?;
            if record["kind"] == "step" {
                let step = record["step"].as_u64().ok_or("metrics.jsonl: a step without number")?;
                let both = ["loss", "grad_norm"].map(|key| record[key].to_string());
                if steps.insert(step, both).is_some() {
                    return Err(format!("metrics.jsonl: step {step} is there twice"));
                }
            }
        }
        Ok(steps)
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    fs::write(path, bytes).map_err(|e| format!("{}: {e}", path.display()))
}

fn copy(from: &Path, into: &Path) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("{}: {e}", from.display());
    for entry in fs::read_dir(from).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let target = into.join(entry.file_name());
        if entry.file_type().map_err(fail)?.is_dir() {
            fs::create_dir(&target).map_err(fail)?;
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target).map_err(fail)?;
        }
    }
    Ok(())
}
