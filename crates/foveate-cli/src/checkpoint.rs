//! `foveate checkpoint`: what is in a checkpoint, and its weights for other tools.

use std::path::PathBuf;

use clap::Subcommand;
use foveate::tensor::count::Count;
use foveate_train::checkpoint::{self, Contents};
use foveate_train::recipe::SaveDtype;
use serde_json::json;

use crate::failure::Failure;
use crate::output::{Output, bytes, count, tell};
use crate::train::checksums;

/// Look into a checkpoint, or export its weights
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Show(Show),
    Export(Export),
}

/// List the tensors of a checkpoint, with the files that their elements are in
#[derive(Debug, clap::Args)]
struct Show {
    /// Folder of the checkpoint
    checkpoint: PathBuf,
    /// Read every tensor and compare it with its checksum
    #[arg(long)]
    verify: bool,
    /// Do not compare what is read with the checksums it was saved with
    #[arg(long, conflicts_with = "verify")]
    skip_checksums: bool,
    /// Print one JSON object, with the bytes of every range
    #[arg(long)]
    json: bool,
}

/// Write the weights of a checkpoint, of one rank or of several, in Hugging Face's layout
#[derive(Debug, clap::Args)]
struct Export {
    /// Folder of the checkpoint
    checkpoint: PathBuf,
    /// Folder to make
    to: PathBuf,
    /// Dtype of the weights: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = dtype)]
    dtype: SaveDtype,
    /// Do not compare what is read with the checksums it was saved with
    #[arg(long)]
    skip_checksums: bool,
}

fn dtype(text: &str) -> Result<SaveDtype, String> {
    match text {
        "f32" => Ok(SaveDtype::F32),
        "bf16" => Ok(SaveDtype::Bf16),
        "f16" => Ok(SaveDtype::F16),
        _ => Err("f32, bf16 and f16 are there".to_owned()),
    }
}

/// Runs the subcommand.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    match &args.command {
        Command::Show(args) => show(args, out),
        Command::Export(Export { checkpoint, to, dtype, skip_checksums }) => {
            checkpoint::export(checkpoint, to, *dtype, checksums(*skip_checksums))?;
            tell!("weights in {}", to.display());
            Ok(())
        }
    }
}

fn show(args: &Show, out: &mut Output) -> Result<(), Failure> {
    let skip = checksums(args.skip_checksums);
    let found = checkpoint::contents(&args.checkpoint, skip, args.verify)?;
    if args.json {
        return Ok(out.json(&json!(found))?);
    }
    let Contents { state, sharded, tensors, elsewhere, .. } = &found;
    match state {
        None => out.line("no state to resume from")?,
        Some(state) => out.line(format!(
            "step {}, {} labelled tokens; next is token {} of document {} in pass {}",
            state.step,
            count(state.tokens as f64),
            state.cursor.token,
            state.cursor.document,
            state.cursor.epoch + 1
        ))?,
    }
    let size = |t: &checkpoint::TensorContents| {
        t.ranges.iter().map(|range| range.bytes.end - range.bytes.start).sum::<u64>()
    };
    let mut files: Vec<&str> =
        tensors.iter().flat_map(|t| &t.ranges).map(|range| &*range.file).collect();
    files.sort_unstable();
    files.dedup();
    out.line(format!(
        "{} of {} in {}{}",
        Count(tensors.len(), "tensor"),
        bytes(tensors.iter().map(size).sum::<u64>() as f64),
        Count(files.len(), "file"),
        if *sharded { ", written in ranges by several ranks" } else { "" },
    ))?;
    for file in elsewhere {
        out.line(format!("{} {}", file.file, file.why))?;
    }
    for tensor in tensors {
        let mut ranges: Vec<(&str, Option<[usize; 2]>, usize, usize)> = Vec::new();
        for range in &tensor.ranges {
            // Pieces of one file that follow one another are one range to a reader.
            match ranges.last_mut() {
                Some((file, columns, _, end))
                    if (*file, *columns, *end) == (&*range.file, range.columns, range.first) =>
                {
                    *end += range.elems;
                }
                _ => {
                    let (first, end) = (range.first, range.first + range.elems);
                    ranges.push((&range.file, range.columns, first, end));
                }
            }
        }
        let places = match &ranges[..] {
            [] => "not here".to_owned(),
            [(file, ..)] if elsewhere.is_empty() => (*file).to_owned(),
            all => {
                let places = all.iter().map(|(file, columns, from, to)| match columns {
                    None => format!("{from}..{to} {file}"),
                    Some([first, end]) => format!("columns {first}..{end}: {from}..{to} {file}"),
                });
                places.collect::<Vec<_>>().join(", ")
            }
        };
        out.line(format!("{} {} {:?}  {places}", tensor.name, tensor.dtype, tensor.shape))?;
    }
    if args.verify {
        out.line(match elsewhere.is_empty() {
            true => "every tensor is what was saved",
            false => "all that is here is what was saved",
        })?;
    }
    Ok(())
}
