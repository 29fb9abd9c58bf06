//! `foveate eval`: the loss of a checkpoint on files.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use foveate::tensor::count::Count;
use foveate_nn::{Blocks, MemoryEstimate, Model, StepKind};
use foveate_train::checkpoint;
use foveate_train::corpus::{Asker, BadDocument, Corpus, Format, Sources};
use foveate_train::device::{DeviceChoice, DeviceOptions, OnDevice};
use foveate_train::memory::BESIDE;
use foveate_train::pack::PackOptions;
use foveate_train::tokens::Ends;
use foveate_train::trainer::{TokenLoss, held_out_loss, token_losses};
use serde_json::json;

use crate::chat::RENDERER;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::memory;
use crate::number::number;
use crate::output::Output;
use crate::progress::{Gauge, PATIENCE, waiting};
use crate::train::{checksums, tell_skipped};

/// Tokens of a row where the user gives none and the model takes more.
const LONGEST_ROW: usize = 4096;

/// Measure the loss of a checkpoint on files
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder of the checkpoint
    checkpoint: PathBuf,
    /// Files or globs; .jsonl files are one document a line
    #[arg(required = true)]
    files: Vec<String>,
    /// Tokens of a packed row (the model's longest sequence when left out, 4096 at most)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<usize>)]
    len: Option<usize>,
    /// Packed rows computed at once
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 8, value_parser = number::<usize>)]
    batch_rows: usize,
    /// Device to compute on: cpu, cuda:0, or auto for the first GPU where there is one
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
    /// Leave out documents that cannot be used instead of stopping
    #[arg(long)]
    skip_bad: bool,
    /// Whether the token that begins a text is put before each document (the tokenizer's own rule
    /// when left out)
    #[arg(long, value_name = "BOOL")]
    add_bos_token: Option<bool>,
    /// Whether the token that ends a text is put after each document (the tokenizer's own rule when
    /// left out)
    #[arg(long, value_name = "BOOL")]
    add_eos_token: Option<bool>,
    /// Read the checkpoint without comparing it with the checksums it was saved with
    #[arg(long)]
    skip_checksums: bool,
    /// Print the loss of every token first: nats and the token's text; with --json one object for
    /// each, with its document and id
    #[arg(long)]
    per_token: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Reads every document once and prints loss and perplexity.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    DeviceOptions::from(args.device).run(Evaluation { args, out })?
}

/// An evaluation before it has a device.
struct Evaluation<'a> {
    args: &'a Args,
    out: &'a mut Output,
}

impl OnDevice for Evaluation<'_> {
    type Output = Result<(), Failure>;

    fn run<B: Blocks>(self, blocks: B, _: Option<String>) -> Self::Output {
        evaluate(self.args, blocks, self.out)
    }
}

fn evaluate<B: Blocks>(args: &Args, mut blocks: B, out: &mut Output) -> Result<(), Failure> {
    let config = checkpoint::read_config(&args.checkpoint, checksums(args.skip_checksums))?;
    let limit = config.model.max_position_embeddings;
    let len = args.len.unwrap_or(limit.min(LONGEST_ROW));
    if len == 0 || len > limit || args.batch_rows == 0 {
        let message = format!("--len is {len} and --batch-rows {}", args.batch_rows);
        let help = format!(
            "--len takes 1 to {limit}, the model's longest sequence; --batch-rows 1 or more"
        );
        return Err(Failure::usage(message).help(help));
    }
    let (attention, rows) = (&config.attention, args.batch_rows);
    let account =
        config.model.dry_run_on(&blocks, attention, &|_| false, rows, len, StepKind::Loss)?;
    let free = blocks.free_bytes()?;
    let beside = free.map_or(0, |_| BESIDE);
    let need = MemoryEstimate { process: beside, ..account.memory() };
    memory::fits(need.total(), free, "lower --batch-rows or --len")?;
    let template = config.template()?.isolated(RENDERER);
    let mut model = Model::unfilled_on(blocks, config.model, &config.attention)?;
    let need = MemoryEstimate { process: beside, ..model.loss_memory(rows, len)? };
    memory::fits(need.total(), free, "lower --batch-rows or --len")?;
    checkpoint::load_weights(&args.checkpoint, &mut model, checksums(args.skip_checksums))?;
    model.draw_missing(0)?;
    let sources = Sources {
        root: PathBuf::new(),
        files: args.files.clone(),
        exclude: Vec::new(),
        format: Format::Auto,
        on_bad_document: if args.skip_bad { BadDocument::Skip } else { BadDocument::Error },
        asker: Asker::Command,
    };
    let ends = Ends { bos: args.add_bos_token, eos: args.add_eos_token };
    let tokenizer = config.tokenizer.adding(ends)?;
    let interrupt = Interrupt::watch()?;
    let scan = || Corpus::scan(&sources, tokenizer, Some(template), &mut || interrupt.pressed());
    let corpus = Arc::new(waiting("reading the documents", PATIENCE, scan)?);
    tell_skipped(corpus.skipped().len(), corpus.skipped().first());
    let all: Vec<usize> = (0..corpus.len()).collect();
    let bytes = all.iter().map(|&i| corpus.text_bytes(i)).sum::<Option<usize>>();
    let options = PackOptions { len, split: true, shuffle: None };
    let total = if args.per_token {
        token_losses(&model, &corpus, &all, options, args.batch_rows, |token| {
            interrupt.check()?;
            print_token(&corpus, &token, args.json, out)
        })?
    } else {
        let (mut gauge, began) = (Gauge::new("evaluating"), Instant::now());
        let mut watch = |share: f64| {
            let left = began.elapsed().as_secs_f64() * (1.0 - share) / share.max(f64::EPSILON);
            gauge.at(share, left);
            !interrupt.pressed()
        };
        held_out_loss(&model, &corpus, &all, options, args.batch_rows, usize::MAX, &mut watch)?
            .ok_or(Failure::Interrupted)?
    };
    if total.tokens == 0 {
        return Err(Failure::new(
            "no token of these documents has a target, so there is no loss: each has one token at most, or \
             the chat template prints nothing of what assistants say",
        ));
    }
    let bits_per_byte = bytes.map(|n| total.nats / n.max(1) as f64 / std::f64::consts::LN_2);
    if args.json {
        out.json(&json!({
            "loss": total.mean(),
            "perplexity": total.mean().exp(),
            "bits_per_byte": bits_per_byte,
            "tokens": total.tokens,
            "documents": corpus.len(),
            "skipped": corpus.skipped().len(),
        }))?;
        return Ok(());
    }
    out.line(format!("loss           {:.4} nats a token", total.mean()))?;
    out.line(format!("perplexity     {:.3}", total.mean().exp()))?;
    if let Some(bits) = bits_per_byte {
        out.line(format!("bits per byte  {bits:.4}"))?;
    }
    out.line(format!(
        "over           {} of {} ({} skipped)",
        Count(total.tokens as usize, "token"),
        Count(corpus.len(), "document"),
        corpus.skipped().len()
    ))?;
    Ok(())
}

/// One line for a token.
fn print_token(
    corpus: &Corpus,
    token: &TokenLoss,
    as_json: bool,
    out: &mut Output,
) -> Result<(), Failure> {
    let text = corpus.tokenizer().text_of(token.id);
    if !as_json {
        return Ok(out.line(format!("{:9.4}  {text:?}", token.nats))?);
    }
    let (file, line) = corpus.place(token.document);
    Ok(out.json(&json!({
        "file": file,
        "line": line,
        "token": token.token,
        "token_id": token.id,
        "text": text,
        "nats": token.nats,
    }))?)
}
