//! Where tests train: a recipe and its documents in a folder of their own.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// A model that trains in a moment, with a learned bias.
const RECIPE: &str = r#"
[run]
dir = "DIR"
seed = 3

[model]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
tie_word_embeddings = true

[attention]
mask = "causal & document"
score = "softcap(30) then relative_bias"

[attention.learned.rel_bias]
shape = [2, 17]

[data]
files = ["*.txt"]
len = 32
held_out = 0.2

[train]
steps = 24
batch_rows = 2
eval_every = 10
save_every = 4

[schedule]
warmup_steps = 4
"#;

/// A folder with documents and that recipe.
pub struct Place(tempfile::TempDir);

impl Place {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..12 {
            let text = format!("document {i}: ") + &"the quick brown fox ".repeat(i + 2);
            std::fs::write(dir.path().join(format!("{i:02}.txt")), text).unwrap();
        }
        let place = Self(dir);
        place.recipe(|r| r);
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes the recipe as `change` makes it.
    pub fn recipe(&self, change: impl Fn(String) -> String) {
        let text = RECIPE.replace("DIR", &self.path("run").display().to_string());
        std::fs::write(self.path("recipe.toml"), change(text)).unwrap();
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
        command.args(args).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Loss and gradient norm of every step, as written.
    pub fn steps(&self, run: &str) -> Vec<(u64, String, String)> {
        let log = std::fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        let records = log.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
        let steps = records.filter(|r| r["kind"] == "step");
        steps
            .map(|r| {
                (r["step"].as_u64().unwrap(), r["loss"].to_string(), r["grad_norm"].to_string())
            })
            .collect()
    }

    /// The bytes of all tensors of a checkpoint, file by file.
    pub fn weights(&self, run: &str, step: u64) -> Vec<u8> {
        let last = self.path(run).join(format!("checkpoints/step-{step:06}"));
        let files = std::fs::read_dir(last).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> =
            files.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
        files.sort();
        files.iter().flat_map(|path| std::fs::read(path).unwrap()).collect()
    }
}
