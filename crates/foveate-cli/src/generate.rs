//! `foveate generate`: text from a checkpoint.

use std::path::PathBuf;

use foveate_nn::{Model, Recompute, Sampling};
use foveate_train::chat::Message;
use foveate_train::checkpoint;
use serde_json::json;

use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::memory;
use crate::number::number;
use crate::output::Output;
use crate::train::checksums;

/// Write text with a trained model
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder of the checkpoint
    checkpoint: PathBuf,
    /// What the text starts with
    #[arg(long, default_value = "")]
    prompt: String,
    /// Take the prompt as what a user says, in the checkpoint's chat template
    #[arg(long)]
    chat: bool,
    /// Tokens to write at most
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 200, value_parser = number::<usize>)]
    max_tokens: usize,
    /// Divides the logits; 0 always takes the likeliest token
    #[arg(long, value_name = "T", allow_negative_numbers = true, default_value_t = 0.8)]
    temperature: f32,
    /// Draw from this many of the likeliest tokens only; 0 draws from all
    #[arg(long, value_name = "K", allow_negative_numbers = true, default_value_t = 0, value_parser = number::<usize>)]
    top_k: usize,
    /// Draw from the likeliest tokens only whose probabilities reach this sum
    #[arg(long, value_name = "P", allow_negative_numbers = true, default_value_t = 0.95)]
    top_p: f32,
    /// Fixes the draws
    #[arg(long, allow_negative_numbers = true, default_value_t = 0, value_parser = number::<u64>)]
    seed: u64,
    /// Read the checkpoint without comparing it with the checksums it was saved with
    #[arg(long)]
    skip_checksums: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Writes the text as it comes.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let config = checkpoint::read_config(&args.checkpoint)?;
    let weights = config.model.memory_estimate(1, 1, 4, Recompute::Full).weights;
    memory::fits(weights, "choose a smaller checkpoint, or a larger machine")?;
    let mut model = Model::unfilled(config.model.clone(), &config.attention)?;
    checkpoint::load_weights(&args.checkpoint, &mut model, checksums(args.skip_checksums))?;
    model.draw_missing(0);
    let tokenizer = &config.tokenizer;
    let text = if args.chat {
        let said = Message { role: "user".to_owned(), content: args.prompt.clone() };
        config.template()?.text(&[said], true).map_err(Failure::new)?
    } else {
        args.prompt.clone()
    };
    let mut prompt = tokenizer.encode(&text)?.ids;
    // A template writes the token that begins a text itself.
    if let Some(bos) = tokenizer.bos().filter(|bos| prompt.first() != Some(bos)) {
        prompt.insert(0, bos);
    }
    if prompt.is_empty() {
        return Err(Failure::usage("there is nothing to start from").help("give --prompt"));
    }
    let limit = model.config().max_position_embeddings;
    if prompt.len() >= limit {
        let message =
            format!("the prompt has {} tokens; the model takes {limit} in all", prompt.len());
        return Err(Failure::usage(message).help("shorten --prompt"));
    }
    let capacity = limit.min(prompt.len() + args.max_tokens);
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
    };
    let mut generator = model.generator(capacity.max(1), sampling)?;
    let interrupt = Interrupt::watch()?;
    generator.prompt(&prompt)?;
    let mut written = Vec::new();
    let mut shown = 0;
    if !args.json {
        out.text(if args.chat { "" } else { &args.prompt })?;
        out.flush()?;
    }
    for _ in prompt.len()..capacity {
        interrupt.check()?;
        let token = generator.next_token()?;
        if config.stops.contains(&token) {
            break;
        }
        written.push(token);
        let text = tokenizer.decode(&written)?;
        // A character may need more tokens: its replacement mark is held back.
        let whole = text.trim_end_matches('\u{FFFD}').len();
        if !args.json && whole > shown {
            out.text(text.get(shown..whole).unwrap_or_default())?;
            out.flush()?;
            shown = whole;
        }
    }
    let text = tokenizer.decode(&written)?;
    if args.json {
        let tokens = written.len();
        out.json(&json!({ "prompt": args.prompt, "text": text, "tokens": tokens }))?;
    } else {
        out.line(text.get(shown..).unwrap_or_default())?;
    }
    Ok(())
}
