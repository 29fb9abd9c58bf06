//! `foveate train`: a recipe, run.

mod lines;

use std::io::{IsTerminal, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use foveate::tensor::count::Count;
use foveate_nn::Recording;
use foveate_shard::ShardError;
use foveate_shard::collectives::Collectives;
use foveate_shard::collectives::log::TransferLog;
use foveate_train::checkpoint::{self, Checksums};
use foveate_train::corpus::Skipped;
use foveate_train::device::DeviceChoice;
use foveate_train::error::{TrainError, TrainErrorKind};
use foveate_train::metrics::{EvalMetrics, SaveMetrics, StepMetrics};
use foveate_train::recipe::Recipe;
use foveate_train::trainer::{
    Anew, Observer, Options, Start, Started, Summary, load_recipe, train_on,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::allocator;
use crate::chat::RENDERER;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::launch;
use crate::number::number;
use crate::output::{Output, bytes, count, tflops};
use crate::ranks;
use lines::{LIVELY, Lines, percent};

/// Train a model by a recipe
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The recipe, a TOML file (docs/recipes.md lists every field)
    recipe: PathBuf,
    /// Override a field, such as train.steps=100; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Device to train on, in place of the recipe's: cpu, cuda:0, or auto for the first GPU where
    /// there is one
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceChoice>,
    /// Continue from the newest checkpoint of the run's folder
    #[arg(long)]
    resume: bool,
    /// Remove the run that is in the folder, if one is: its checkpoints, metrics and curve
    #[arg(long, conflicts_with = "resume")]
    start_over: bool,
    /// Read checkpoints without comparing them with the checksums they were saved with
    #[arg(long)]
    skip_checksums: bool,
    /// Write what the blocks of steps A to B - 1 do on the device, and the host meanwhile, into
    /// profile.json in the run's folder, a trace for Chrome or ui.perfetto.dev
    #[arg(long, value_name = "A..B", value_parser = steps)]
    profile: Option<Range<u64>>,
    /// Print one JSON object a line: steps and evaluations, at the end a summary
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: ranks::RankArgs,
}

impl Args {
    /// Which rank this is asked to be.
    pub fn ranks(&self) -> &ranks::RankArgs {
        &self.ranks
    }
}

/// Set when a run has begun: it has its folder.
type Begun = Arc<OnceLock<()>>;

/// Trains and says what came of it.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    if let Some(ranks) = args.ranks.threads()? {
        let recipe = Recipe::load(&args.recipe, &args.set)?;
        let device = args.device.unwrap_or(recipe.run.device);
        return threads(args, ranks, &recipe, device, out);
    }
    let launch = args.ranks.find()?;
    // A rank that waits for others has nothing to save, and a signal ends it. What is wrong with the recipe of
    // one is known to all once they have met.
    let group = ranks::meet(&launch)?;
    let mut recipe = load_recipe(&*group, &args.recipe, &args.set)?;
    let device = args.device.unwrap_or(recipe.run.device);
    recipe.run.device = ranks::device(device, launch.local_rank);
    let interrupt = Interrupt::watch()?;
    let begun = Begun::default();
    let _here = ranks::end_when_lost(&*group, stuck(args, &recipe, &begun))?;
    rank(args, &*group, &recipe, interrupt, begun, out)
}

/// The failure of a rank that does not end though another is lost, whose last transfers it writes.
fn stuck(
    args: &Args,
    recipe: &Recipe,
    begun: &Begun,
) -> impl FnOnce(&dyn Collectives, ShardError) -> Failure + Send + use<> {
    let (args, recipe, begun) = (args.clone(), recipe.clone(), begun.clone());
    move |group, e| {
        let begun = begun.get().is_some();
        let e = e.and("what this rank had under way did not end either");
        if begun {
            // What ended the run is what has to be told, also where the disk is full.
            let _ = TransferLog::of(group, &e.to_string()).write(&transfers(&recipe));
        }
        told(&args, &recipe, begun, e.into())
    }
}

/// Trains on ranks that are threads, of which this thread is the first.
fn threads(
    args: &Args,
    (ranks, deadline): (usize, Duration),
    recipe: &Recipe,
    device: DeviceChoice,
    out: &mut Output,
) -> Result<(), Failure> {
    let interrupt = Interrupt::watch()?;
    let of_rank = |rank: usize| {
        let mut own = recipe.clone();
        own.run.device = ranks::device(device, rank);
        own
    };
    ranks::tell_devices(device, ranks);
    ranks::in_threads(
        ranks,
        deadline,
        |world| rank(args, world, &of_rank(0), interrupt.clone(), Begun::default(), out),
        |world| other(args, world, &of_rank(world.rank()), interrupt.clone(), Begun::default()),
    )
}

/// How a run begins, as the arguments say.
fn options(args: &Args) -> Options {
    let start = match (args.resume, args.start_over) {
        (true, _) => Start::Resume,
        (_, true) => Start::Over,
        _ => Start::New,
    };
    Options {
        start,
        checksums: checksums(args.skip_checksums),
        commit: option_env!("FOVEATE_COMMIT"),
        renderer: Some(RENDERER),
        profile: args.profile.clone(),
    }
}

/// Where ranks write their last transfers.
fn transfers(recipe: &Recipe) -> PathBuf {
    recipe.run.dir.join("transfers")
}

/// A failure of a rank. Where others are lost it says how to go on, and where its last transfers are, of a run that
/// has `begun`.
fn told(args: &Args, recipe: &Recipe, begun: bool, e: TrainError) -> Failure {
    let failure = Failure::from(e.of_overrides(&args.set));
    let Failure::Lost(Some(_)) = &failure else { return failure };
    let transfers = transfers(recipe);
    let logs = match begun && transfers.is_dir() {
        true => format!("what each rank did last: foveate shard log {}; ", word(&transfers)),
        false => String::new(),
    };
    failure.help(format!("{logs}to go on, start all ranks with --resume"))
}

/// Trains as any rank but the first, which shows nothing.
fn other(
    args: &Args,
    group: &dyn Collectives,
    recipe: &Recipe,
    interrupt: Interrupt,
    begun: Begun,
) -> Result<(), Failure> {
    let mut silent = Silent { interrupt, begun };
    let summary = train_on(group, recipe, &args.recipe, options(args), &mut silent);
    let summary = summary.map_err(|e| told(args, recipe, silent.begun.get().is_some(), e))?;
    if summary.interrupted { Err(Failure::Interrupted) } else { Ok(()) }
}

/// Trains as the rank of `group` that this is.
fn rank(
    args: &Args,
    group: &dyn Collectives,
    recipe: &Recipe,
    interrupt: Interrupt,
    begun: Begun,
    out: &mut Output,
) -> Result<(), Failure> {
    if group.rank() > 0 {
        return other(args, group, recipe, interrupt, begun);
    }
    let mut view = View::new(interrupt, begun, args.json.then_some(&mut *out));
    let result = train_on(group, recipe, &args.recipe, options(args), &mut view);
    view.bar.finish_and_clear();
    if let Some(e) = view.unwritten.take() {
        return Err(e.into());
    }
    let summary = result.map_err(|e| {
        if matches!(e.kind(), TrainErrorKind::Interrupted) {
            crate::output::tell!("interrupted before the first step; nothing was written");
        }
        told(args, recipe, view.begun.get().is_some(), e)
    })?;
    if summary.interrupted {
        let threads = args.ranks.as_threads();
        let how = match group.ranks() {
            1 => "continue with:".to_owned(),
            // Its own words, as they were given but for how it starts.
            _ if launch::ranks().is_some() || threads.is_some() => "continue with:".to_owned(),
            ranks => {
                format!("continue by starting all {ranks} ranks again as before, with --resume:")
            }
        };
        crate::output::tell!(
            "interrupted after step {}; {how} {} {}train {} --resume{}{}{}",
            summary.steps,
            called(),
            launch::ranks().map_or(String::new(), |ranks| format!("launch --ranks {ranks} -- ")),
            word(&args.recipe),
            threads.map_or(String::new(), |ranks| format!(" --ranks {ranks}")),
            args.device.map_or(String::new(), |device| format!(" --device {device}")),
            args.set.iter().map(|s| format!(" --set {}", quoted(s))).collect::<String>(),
        );
        return Err(Failure::Interrupted);
    }
    if let Some(steps) = args.profile.as_ref().filter(|steps| steps.start > summary.steps) {
        let (first, last) = (steps.start, summary.steps);
        crate::output::tell!(
            "no profile: --profile begins at step {first}, and the run ended after {last}"
        );
    }
    if args.json {
        out.json(&json!({
            "held_out_loss": summary.held_out_loss,
            "labelled_tokens_per_s": summary.labelled_tokens_per_s,
            "packed_tokens_per_s": summary.packed_tokens_per_s,
            "padding_share": summary.padding_share,
            "data_share": summary.data_share,
            "cut_tokens": summary.cut_tokens,
            "tflops": summary.tflops,
            "mfu": summary.peak_tflops.map(|peak| summary.tflops.mfu(peak)),
            "peak_memory_bytes": summary.peak_memory_bytes,
            "steps": summary.steps,
            "checkpoint": summary.checkpoint,
            "train_loss": summary.train_loss,
            "seconds": summary.seconds,
        }))?;
        return Ok(());
    }
    report(recipe, &summary, out)
}

/// Whether checkpoints are held to their checksums, as `--skip-checksums` says.
pub fn checksums(skip: bool) -> Checksums {
    if skip { Checksums::Skip } else { Checksums::Verify }
}

/// Steps such as `10..13`, the last of which is 12.
fn steps(text: &str) -> Result<Range<u64>, String> {
    let (from, to) = text.split_once("..").ok_or("steps are written as 10..13")?;
    let range = number::<u64>(from)?..number::<u64>(to)?;
    match range.start == 0 || range.is_empty() {
        true => Err("no such steps; the first is 1, and 10..13 are 10, 11 and 12".to_owned()),
        false => Ok(range),
    }
}

fn report(recipe: &Recipe, summary: &Summary, out: &mut Output) -> Result<(), Failure> {
    let is_byte = recipe.data.tokenizer.is_none() && recipe.model.checkpoint.is_none();
    let token = if is_byte { "byte" } else { "token" };
    match summary.held_out_loss {
        Some(loss) => out.line(format!(
            "held-out loss {loss:.4} nats a {token} (perplexity {:.2}) after {}",
            loss.exp(),
            Count(summary.steps as usize, "step")
        ))?,
        None => {
            let steps = Count(summary.steps as usize, "step");
            let why = match summary.held_out_documents {
                0 => "no document is held out",
                _ => "no token that is held out has a target",
            };
            out.line(format!("{steps} done; {why}"))?;
        }
    }
    if summary.cut_tokens > 0 {
        let tokens = count(summary.cut_tokens as f64);
        out.line(format!("{tokens} tokens behind data.len of longer documents were left out"))?;
    }
    out.line(format!(
        "{} labelled tokens/s, {} packed tokens/s ({:.1} % padding), {:.0} s of training, {:.1} % of it \
         waiting for data, peak memory {}",
        count(summary.labelled_tokens_per_s.round()),
        count(summary.packed_tokens_per_s.round()),
        100.0 * summary.padding_share,
        summary.seconds,
        100.0 * summary.data_share,
        bytes(summary.peak_memory_bytes as f64),
    ))?;
    out.line(tflops(summary.tflops, summary.peak_tflops))?;
    let dir = recipe.run.dir.display();
    out.line(format!("checkpoint  {}", summary.checkpoint.display()))?;
    out.line(format!("metrics     {dir}/metrics.jsonl, TensorBoard files in {dir}"))?;
    out.line(format!("curve       {dir}/loss.svg"))?;
    let config = checkpoint::read_config(&summary.checkpoint, Checksums::Skip);
    let prompt = match config.is_ok_and(|config| config.chat_template.is_some()) {
        true => "--chat --prompt \"Hello\"",
        false if recipe.model.checkpoint.is_some() => "--prompt \"The\"",
        false => "--prompt \"fn main() {\"",
    };
    let checkpoint = word(&summary.checkpoint);
    out.line(format!("try it      {} generate {checkpoint} {prompt}", called()))?;
    Ok(())
}

/// How this program was called, so that the commands it proposes can be typed as they are.
fn called() -> String {
    std::env::args().next().map_or("foveate".to_owned(), |name| word(Path::new(&name)))
}

/// A text as a shell takes it for one word.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// A path as a shell takes it for one word.
fn word(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,:@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) { text } else { quoted(&text) }
}

/// Any rank but the first shows nothing, and can be interrupted.
struct Silent {
    interrupt: Interrupt,
    begun: Begun,
}

impl Observer for Silent {
    fn started(&mut self, _run: &Started) {
        let _ = self.begun.set(());
    }

    fn interrupted(&mut self) -> bool {
        self.interrupt.pressed()
    }
}

/// A progress bar on stderr, or lines where stderr is no terminal.
struct View<'a> {
    bar: ProgressBar,
    lines: Option<Lines>,
    interrupt: Interrupt,
    /// Where JSON lines go, when they are wanted.
    json: Option<&'a mut Output>,
    /// The first failure to write one; it ends the run as an interruption does.
    unwritten: Option<std::io::Error>,
    begun: Begun,
    held_out: Option<f64>,
    steps: u64,
    /// What the last step came to.
    message: String,
    /// What is under way beside that, such as `evaluating`.
    doing: &'static str,
}

impl<'a> View<'a> {
    fn new(interrupt: Interrupt, begun: Begun, json: Option<&'a mut Output>) -> Self {
        let plain = !std::io::stderr().is_terminal();
        // Where nobody reads stderr any more, there is nobody to tell.
        let print = |line: &str| drop(writeln!(std::io::stderr(), "{line}"));
        let lines = plain.then(|| Lines::new(LIVELY, print));
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{spinner} {msg}  {elapsed} elapsed");
        bar.set_style(style.expect("the template is valid"));
        let (unwritten, held_out, steps) = (None, None, 0);
        let (message, doing) = (String::new(), "");
        Self { bar, lines, interrupt, json, unwritten, begun, held_out, steps, message, doing }
    }

    /// A `share` of what is under way is done.
    fn share(&self, share: f64) {
        match &self.lines {
            Some(lines) => lines.share(share),
            None => self.bar.set_message(self.told(&format!("{} {}", self.doing, percent(share)))),
        }
    }

    /// What the last step came to, and what is under way.
    fn told(&self, doing: &str) -> String {
        let gap = if self.message.is_empty() || doing.is_empty() { "" } else { "; " };
        format!("{}{gap}{doing}", self.message)
    }

    fn line(&mut self, value: serde_json::Value) {
        if let Some(Err(e)) = self.json.as_mut().map(|out| out.json(&value)) {
            self.unwritten.get_or_insert(e);
        }
    }
}

/// How a run goes on that has saved into this folder.
fn resumes(checkpoints: &Path) -> String {
    format!("continue with --resume: the newest checkpoint in {} is whole", checkpoints.display())
}

/// Whether passes are recorded, in a line.
pub(crate) fn recorded(recording: &Recording) -> String {
    match recording {
        Recording::On => "graphs: the pass of a batch is recorded and replayed".into(),
        Recording::Off(reason) => format!("graphs: off, since {reason}"),
    }
}

/// Says how many documents were left out, and why the first was.
pub(crate) fn tell_skipped(documents: usize, first: Option<&Skipped>) {
    if let Some(first) = first {
        crate::output::tell!("{} skipped; the first is {first}", Count(documents, "document"));
    }
}

/// What is said of a run before its first step.
fn introduce(run: &Started) {
    crate::output::tell!(
        "{} parameters; {} to train on, {} held out; run folder {}",
        count(run.parameters as f64),
        Count(run.train_documents, "document"),
        run.held_out_documents,
        run.dir.display()
    );
    if run.mesh.ranks() > 1 {
        crate::output::tell!("{} ranks: {}", run.mesh.ranks(), run.mesh);
    }
    if let Some(heads) = &run.copied_heads {
        crate::output::tell!("tensor: {heads}");
    }
    if let Some(context) = &run.context {
        crate::output::tell!("attention over context: {context}");
    }
    let needed = bytes(run.memory.total() as f64);
    match &run.gpu {
        None => crate::output::tell!("about {needed} of memory, saves included"),
        Some(gpu) => crate::output::tell!("about {needed} of the memory of {gpu}"),
    }
    if let Some(passed) = &run.passed_over {
        crate::output::tell!(
            "a newer checkpoint is passed over, and set aside at the next save: {passed}"
        );
    }
    if let Some(mixed) = &run.mixed_devices {
        crate::output::tell!("ranks are on {mixed}: a step takes as long as the slowest");
    }
    if let Some(recording) = &run.recording {
        crate::output::tell!("{}", recorded(recording));
    }
    tell_skipped(run.skipped_documents, run.first_skipped.as_ref());
    for name in &run.fresh_buffers {
        crate::output::tell!("{name} is not in the checkpoint and starts from its first values");
    }
    run.blind_masks.iter().for_each(|mask| crate::blind::warn(mask));
    for mask in &run.telling_masks {
        let of = if mask.is_empty() { "attention without a mask" } else { "the mask" };
        let mask = if mask.is_empty() { String::new() } else { format!(" `{mask}`") };
        crate::output::tell!(
            "warning: {of}{mask} lets a token see the next one, which it is to predict; join the mask \
             with `causal`"
        );
    }
    match &run.anew {
        // Its name may be mistyped.
        Some(anew @ Anew::NoRun) => {
            crate::output::tell!("nothing to resume: {anew} (run.dir is {})", run.dir.display());
        }
        Some(anew) => crate::output::tell!("nothing to resume: {anew}"),
        None => {}
    }
    if run.step > 0 {
        crate::output::tell!("resumed after step {}", run.step);
        run.log.iter().for_each(|line| crate::output::tell!("{line}"));
        if let Some(other) = &run.other_device {
            crate::output::tell!(
                "the steps before ran on {other}: losses may differ in their last bits from a \
                 run that stays there"
            );
        }
        for line in &run.changed {
            crate::output::tell!(
                "{line}: losses may differ in their last bits from a run without the change"
            );
        }
    }
}

impl Observer for View<'_> {
    fn started(&mut self, run: &Started) {
        let _ = self.begun.set(());
        let checkpoints = run.dir.join("checkpoints");
        allocator::goes_on(match run.step {
            0 => format!(
                "continue with --resume, which begins again if {} has no checkpoint",
                checkpoints.display()
            ),
            _ => resumes(&checkpoints),
        });
        self.bar.suspend(|| introduce(run));
        self.steps = run.steps;
        self.bar.set_length(run.steps);
        self.bar.set_position(run.step);
        self.bar.reset_eta();
        let style = ProgressStyle::with_template(
            "{bar:30} {pos}/{len} steps  {msg}  {elapsed} elapsed, {eta} left",
        );
        self.bar.set_style(style.expect("the template is valid"));
        self.bar.enable_steady_tick(Duration::from_millis(500));
    }

    fn step(&mut self, m: &StepMetrics) {
        let held_out = self.held_out.map_or(String::new(), |l| format!("  held out {l:.3}"));
        let message = format!(
            "loss {:.3}{held_out}  {} labelled tokens/s, {} packed",
            m.loss,
            count(m.labelled_tokens_per_s.round()),
            count(m.packed_tokens_per_s.round())
        );
        match &self.lines {
            Some(lines) => {
                self.message = format!("step {}/{}  {message}", m.step, self.steps);
                if m.step.is_multiple_of(50) || m.step == 1 {
                    lines.say(self.message.clone());
                }
            }
            None => {
                self.bar.set_message(message.clone());
                self.bar.set_position(m.step);
                self.message = message;
            }
        }
        self.line(json!({ "kind": "step", "metrics": m }));
    }

    fn evaluated(&mut self, m: &EvalMetrics) {
        self.held_out = Some(m.held_out_loss);
        self.line(json!({ "kind": "eval", "metrics": m }));
    }

    fn saved(&mut self, path: &Path, m: &SaveMetrics) {
        path.parent().into_iter().for_each(|checkpoints| allocator::goes_on(resumes(checkpoints)));
        self.line(json!({ "kind": "save", "metrics": m, "checkpoint": path }));
    }

    fn cuts(&mut self) {
        self.bar.suspend(|| {
            crate::output::tell!(
                "warning: documents longer than a row end with it, and what is behind is not learned: \
                 raise data.len, or set data.split_documents = true"
            );
        });
    }

    fn profiled(&mut self, path: &Path) {
        self.bar.suspend(|| crate::output::tell!("profile in {}", path.display()));
    }

    fn not_recorded(&mut self, reason: &str) {
        self.bar.suspend(|| crate::output::tell!("graphs: off from here on, since {reason}"));
    }

    fn saves_wait(&mut self, reason: &str) {
        self.bar.suspend(|| {
            crate::output::tell!("saves: steps wait for them from here on, since {reason}");
        });
    }

    fn counting(&mut self, done: usize, all: usize) {
        self.share(done as f64 / all.max(1) as f64);
    }

    fn evaluating(&mut self, share: f64) {
        self.share(share);
    }

    fn begins(&mut self, what: &'static str) {
        self.doing = what;
        match &self.lines {
            Some(lines) => lines.doing(self.message.clone(), what),
            // Steps are what the bar counts.
            None if what == "a step" && self.bar.position() > 0 => {
                self.bar.set_message(self.message.clone());
            }
            None => {
                self.bar.enable_steady_tick(Duration::from_millis(500));
                self.bar.set_message(self.told(what));
            }
        }
    }

    fn interrupted(&mut self) -> bool {
        self.interrupt.pressed() || self.unwritten.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_proposed_can_be_typed_as_it_is() {
        for (path, typed) in [
            ("runs/tiny/checkpoints/step-000350", "runs/tiny/checkpoints/step-000350"),
            ("my runs/a", "'my runs/a'"),
            ("it's", r"'it'\''s'"),
            ("läufe/$x", "'läufe/$x'"),
        ] {
            assert_eq!(word(Path::new(path)), typed);
        }
        assert_eq!(quoted("data.files=[\"*.txt\"]"), "'data.files=[\"*.txt\"]'");
    }
}
