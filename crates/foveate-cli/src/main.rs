//! The `foveate` command.
//!
//! Results go to stdout, progress and errors to stderr. The process ends with 0 when all went
//! well, 1 when something failed, 2 when the command line itself is wrong, 130 when it was
//! interrupted.

mod bench;
mod captures;
mod doctor;
mod explain;
mod failure;
mod mask;
mod output;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use failure::Failure;
use output::Output;

/// Programmable attention for training transformers.
#[derive(Debug, Parser)]
#[command(name = "foveate", version, arg_required_else_help = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Mask(mask::Args),
    Explain(explain::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
}

impl Command {
    fn run(&self, out: &mut Output) -> Result<(), Failure> {
        match self {
            Command::Mask(args) => mask::run(args, out),
            Command::Explain(args) => explain::run(args, out),
            Command::Doctor(args) => doctor::run(args, out),
            Command::Bench(args) => bench::run(args, out),
        }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut out = Output::stdout();
    let result = cli.command.run(&mut out).and_then(|()| Ok(out.flush()?));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
