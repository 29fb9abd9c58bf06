//! Runs of `foveate train` that are killed at random moments, several times, and resumed: losses and
//! weights must be those of a run that nobody touched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use foveate_tensor::random::Random;

use super::process;
use super::training::{Folder, LIMIT};

/// Rounds of killed runs.
pub fn rounds(foveate: PathBuf) -> impl FnMut(u64) -> Result<(), String> {
    move |seed| round(&foveate, seed)
}

fn round(foveate: &Path, seed: u64) -> Result<(), String> {
    let mut random = Random::new(seed);
    let folder = Folder::random(foveate, &mut random)?;
    let began = Instant::now();
    folder.succeed(&["train", "recipe.toml", "--set", "run.dir=straight"])?;
    let whole = began.elapsed();
    // How far the run got, for the message.
    let mut story = Vec::new();
    for _ in 0..1 + random.below(5) {
        let after = whole.mul_f64(random.unit() * 1.1);
        let signal = ["KILL", "TERM", "INT"][random.below(3)];
        interrupt(&folder, signal, after).map_err(|e| told(&story, &e))?;
        story.push(format!("SIG{signal} after {} ms", after.as_millis()));
    }
    let finish = || -> Result<(), String> {
        folder.succeed(&["train", "recipe.toml", resume(&folder)])?;
        let (straight, killed) = (folder.steps_of("straight")?, folder.steps_of("run")?);
        let other = (1..=folder.steps as u64).find(|step| straight.get(step) != killed.get(step));
        if let Some(step) = other {
            let [straight, killed] = [straight, killed].map(|steps| steps.get(&step).cloned());
            return Err(format!("step {step} is {killed:?}, not {straight:?}"));
        }
        let weights = |run: &str| -> Result<Vec<u8>, String> {
            let last = folder.checkpoints(run).pop().ok_or("no checkpoint is left")?;
            fs::read(last.join("masters.safetensors")).map_err(|e| e.to_string())
        };
        match weights("straight")? == weights("run")? {
            true => Ok(()),
            false => Err("the losses agree, the weights do not".into()),
        }
    };
    finish().map_err(|e| told(&story, &e))
}

fn told(story: &[String], fault: &str) -> String {
    format!("{fault} ({})", story.join(", "))
}

/// The option with which a run goes on, or starts where nothing was saved.
fn resume(folder: &Folder) -> &'static str {
    if folder.checkpoints("run").is_empty() { "--start-over" } else { "--resume" }
}

/// Trains for some time and sends a signal.
fn interrupt(folder: &Folder, signal: &str, after: Duration) -> Result<(), String> {
    let mut command = folder.command(&["train", "recipe.toml", resume(folder)]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().map_err(|e| format!("cannot start: {e}"))?;
    let (began, mut sent) = (Instant::now(), false);
    let ended = process::end(child, LIMIT, |child: &mut Child| {
        if !sent && began.elapsed() >= after {
            sent = true;
            // It may have ended meanwhile.
            let _ = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
        }
    })?;
    // Killed, or stopped after a save as the signal asks.
    if sent && (ended.status.code().is_none() || matches!(ended.status.code(), Some(130 | 143))) {
        return Ok(());
    }
    match ended.error_line()? {
        None => Ok(()),
        Some(line) => Err(format!("a run that was to be stopped by SIG{signal} failed: {line}")),
    }
}
