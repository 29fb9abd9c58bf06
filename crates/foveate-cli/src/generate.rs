//! `foveate generate`: text from a checkpoint, or a conversation with it.

use std::path::{Path, PathBuf};

use foveate::tensor::count::Count;
use foveate_nn::{Blocks, Generator, Model, NnError, NnErrorKind, Sampling, StepKind};
use foveate_train::chat::{ChatTemplate, Message, RenderError};
use foveate_train::checkpoint;
use foveate_train::device::{DeviceChoice, DeviceOptions, OnDevice};
use foveate_train::tokens::{Ends, Tokenizer};
use foveate_train::whole;
use serde_json::json;

use crate::chat::RENDERER;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::memory;
use crate::number::number;
use crate::output::Output;
use crate::train::checksums;

/// The sum of probabilities that tokens are drawn from unless something says otherwise.
const TOP_P: f32 = 0.95;

/// Write text with a trained model
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder of the checkpoint
    checkpoint: PathBuf,
    /// What the text starts with; with --chat it may be given several times, one for each of the
    /// user's turns
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// Take each prompt as what a user says, in the checkpoint's chat template, and answer it
    #[arg(long)]
    chat: bool,
    /// What the system says first in a conversation: a file that is there, or the text itself
    #[arg(long, value_name = "FILE|TEXT", requires = "chat")]
    system: Option<String>,
    /// Tokens to write at most, in each turn
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 200, value_parser = number::<usize>)]
    max_tokens: usize,
    /// Divides the logits; 0 always takes the likeliest token
    #[arg(long, value_name = "T", allow_negative_numbers = true, default_value_t = 0.8)]
    temperature: f32,
    /// Draw from this many of the likeliest tokens only; 0 draws from all
    #[arg(long, value_name = "K", allow_negative_numbers = true, default_value_t = 0, value_parser = number::<usize>)]
    top_k: usize,
    /// Draw from the likeliest tokens only whose probabilities reach this sum
    #[arg(long, value_name = "P", allow_negative_numbers = true, default_value_t = TOP_P)]
    top_p: f32,
    /// Fixes the draws
    #[arg(long, allow_negative_numbers = true, default_value_t = 0, value_parser = number::<u64>)]
    seed: u64,
    /// Device to compute on: cpu, cuda:0, or auto for the first GPU where there is one
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceChoice,
    /// Whether the token that begins a text is put before it (the tokenizer's own rule when left
    /// out)
    #[arg(long, value_name = "BOOL")]
    add_bos_token: Option<bool>,
    /// Read the checkpoint without comparing it with the checksums it was saved with
    #[arg(long)]
    skip_checksums: bool,
    /// Print one JSON object for each prompt, with token ids
    #[arg(long)]
    json: bool,
}

/// Writes the text as it comes.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    if args.prompt.len() > 1 && !args.chat {
        return Err(Failure::usage("--prompt is given several times, but one text has one start")
            .help("add --chat to take them as the user's turns"));
    }
    let drawing =
        [("top-k", args.top_k != 0), ("top-p", args.top_p != TOP_P), ("seed", args.seed != 0)];
    let drawing = drawing.iter().find(|(_, given)| args.temperature == 0.0 && *given);
    if let Some((option, _)) = drawing {
        let message = format!("--{option} is of draws, and --temperature 0 draws nothing");
        return Err(Failure::usage(message).help("leave one of the two out"));
    }
    DeviceOptions::from(args.device).run(Generation { args, out })?
}

/// A text before it has a device.
struct Generation<'a> {
    args: &'a Args,
    out: &'a mut Output,
}

impl OnDevice for Generation<'_> {
    type Output = Result<(), Failure>;

    fn run<B: Blocks>(self, blocks: B, _: Option<String>) -> Self::Output {
        generate(self.args, blocks, self.out)
    }
}

fn generate<B: Blocks>(args: &Args, mut blocks: B, out: &mut Output) -> Result<(), Failure> {
    let config = checkpoint::read_config(&args.checkpoint, checksums(args.skip_checksums))?;
    let account =
        config.model.dry_run_on(&blocks, &config.attention, &|_| false, 1, 1, StepKind::Loss)?;
    let help = "choose a smaller checkpoint, or a larger machine";
    memory::fits(account.memory().weights, blocks.free_bytes()?, help)?;
    let template = config.template()?.of_today().isolated(RENDERER);
    let ends = Ends { bos: args.add_bos_token, eos: None };
    let tokenizer = config.tokenizer.adding(ends)?;
    let mut model = Model::unfilled_on(blocks, config.model, &config.attention)?;
    checkpoint::load_weights(&args.checkpoint, &mut model, checksums(args.skip_checksums))?;
    model.draw_missing(0)?;
    let (interrupt, free) = (Interrupt::watch()?, model.free_bytes()?);
    let writer = Writer { args, model: &model, tokenizer: &tokenizer, interrupt, free };
    if !args.chat {
        let prompt = args.prompt.first().map_or("", String::as_str);
        return writer.answer(prompt, prompt, out).map(|_| ());
    }
    writer.converse(&template, out)
}

/// A model that writes.
struct Writer<'a, B: Blocks> {
    args: &'a Args,
    model: &'a Model<B>,
    tokenizer: &'a Tokenizer,
    interrupt: Interrupt,
    /// Bytes that a GPU had free before the first text; what a text took serves the next.
    free: Option<u64>,
}

impl<B: Blocks> Writer<'_, B> {
    /// Answers one prompt after the other in one conversation.
    fn converse(&self, template: &ChatTemplate, out: &mut Output) -> Result<(), Failure> {
        let says = |role: &str, content: &str| Message {
            role: role.to_owned(),
            content: content.to_owned(),
        };
        let system = self.args.system.as_deref().map(file_or_text).transpose()?;
        let mut said: Vec<Message> = system.iter().map(|text| says("system", text)).collect();
        let alone = [String::new()];
        let prompts = if self.args.prompt.is_empty() { &alone } else { &self.args.prompt[..] };
        for prompt in prompts {
            said.push(says("user", prompt));
            let text = template.text(&said, true, &mut || self.interrupt.pressed());
            let text = text.map_err(|e| match e {
                RenderError::Interrupted => Failure::Interrupted,
                RenderError::Document(reason) | RenderError::Template(reason) => {
                    Failure::new(reason)
                }
            })?;
            let answer = self.answer(prompt, &text, out)?;
            said.push(says("assistant", &answer));
        }
        Ok(())
    }

    /// What the model writes after `text`; `prompt` is what the user gave of it.
    fn answer(&self, prompt: &str, text: &str, out: &mut Output) -> Result<String, Failure> {
        let (args, tokenizer) = (self.args, self.tokenizer);
        let mut read = tokenizer.encode(text)?.ids;
        tokenizer.open(&mut read);
        if read.is_empty() {
            return Err(Failure::usage("there is nothing to start from")
                .help("give --prompt, or --add-bos-token true"));
        }
        let limit = self.model.config().max_position_embeddings;
        if read.len() >= limit {
            let tokens = Count(read.len(), "token");
            let message = format!("the prompt has {tokens}; the model takes {limit} in all");
            return Err(Failure::usage(message).help("shorten --prompt"));
        }
        let capacity = limit.min(read.len().saturating_add(args.max_tokens));
        let sampling = Sampling {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            seed: args.seed,
        };
        let need = self.model.generation_memory(capacity, read.len())?;
        let need = need.activations.saturating_add(need.attention);
        memory::fits(need, self.free, "shorten --prompt, or lower --max-tokens")?;
        let mut generator = self.model.generator(capacity, sampling).map_err(of_option)?;
        generator.prompt(&read)?;
        if !args.json {
            out.text(if args.chat { "" } else { prompt })?;
            out.flush()?;
        }
        let shown = (!args.json).then_some(&mut *out);
        let most = capacity - read.len();
        // An answer stands by itself, other text goes on from the prompt.
        let before = if args.chat { &[][..] } else { &read };
        let (written, answer) = self.write(&mut generator, before, most, shown)?;
        if written.len() == most && most < args.max_tokens {
            crate::output::tell!("it ends here: the model takes {limit} tokens in all");
        }
        if args.json {
            out.json(&json!({
                "prompt": prompt,
                "text": answer,
                "tokens": written.len(),
                "prompt_token_ids": read,
                "token_ids": written,
            }))?;
        }
        Ok(answer)
    }

    /// At most `most` tokens and their text behind `before`, shown as it comes.
    fn write(
        &self,
        generator: &mut Generator<'_, B>,
        before: &[u32],
        most: usize,
        mut out: Option<&mut Output>,
    ) -> Result<(Vec<u32>, String), Failure> {
        let mut written = Vec::new();
        let mut shown = 0;
        for _ in 0..most {
            self.interrupt.check()?;
            let token = generator.next_token()?;
            if self.tokenizer.stops().contains(&token) {
                break;
            }
            written.push(token);
            let Some(out) = out.as_mut() else { continue };
            let text = self.tokenizer.decode_behind(before, &written)?;
            // A character may need more tokens: its replacement mark is held back.
            let whole = text.trim_end_matches('\u{FFFD}').len();
            if whole > shown {
                out.text(text.get(shown..whole).unwrap_or_default())?;
                out.flush()?;
                shown = whole;
            }
        }
        let text = self.tokenizer.decode_behind(before, &written)?;
        if let Some(out) = out {
            out.line(text.get(shown..).unwrap_or_default())?;
            // Before what is told of the end.
            out.flush()?;
        }
        Ok((written, text))
    }
}

/// A field of [`Sampling`] that is wrong, under the name of its option.
fn of_option(e: NnError) -> Failure {
    match e.kind() {
        NnErrorKind::Config { field, reason } if OPTIONS.contains(&field.as_str()) => {
            Failure::usage(format!("--{} {reason}", field.replace('_', "-")))
        }
        _ => e.into(),
    }
}

const OPTIONS: [&str; 3] = ["temperature", "top_k", "top_p"];

/// What is in the file `given`, without the end of its last line, or `given` itself where nothing has
/// that path.
fn file_or_text(given: &str) -> Result<String, Failure> {
    let path = Path::new(given);
    if !path.exists() {
        return Ok(given.to_owned());
    }
    whole::read_text(path)
        .map(|text| text.trim_end().to_owned())
        .map_err(|e| Failure::new(format!("{given}: could not be read: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_message_is_a_file_or_a_text_and_no_device() {
        assert_eq!(file_or_text("Be brief. ").unwrap(), "Be brief. ");
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("system.txt");
        std::fs::write(&file, "Be brief.\n").unwrap();
        assert_eq!(file_or_text(file.to_str().unwrap()).unwrap(), "Be brief.");
        #[cfg(unix)]
        {
            let Failure::Failed(report) = file_or_text("/dev/zero").unwrap_err() else {
                panic!("a device is no text")
            };
            let said = "/dev/zero: could not be read: it is a pipe or a device, not a file";
            assert_eq!(report.to_string(), said);
        }
    }
}
