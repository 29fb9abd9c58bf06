//! The `foveate` command: looks at masks and at what a problem would run before it is run, and trains,
//! evaluates and samples models. Whoever calls attention from Rust needs the crate `foveate` instead.
//!
//! ```console
//! $ foveate mask "causal & window(256)" --len 2048
//! $ foveate explain --heads 32/8 --len 4096 --dim 128 --dtype bf16 --mask causal --backward
//! $ foveate train recipes/tiny.toml
//! ```
//!
//! The manual is `docs/getting-started.md`, with `docs/text-form.md` for masks and scores as text,
//! `docs/recipes.md` for training, and `foveate help` for every option.
//!
//! Results go to stdout, progress and errors to stderr. The process ends with 0 when all went
//! well, 1 when something failed, 2 when the command line itself is wrong, 75 when another rank was
//! lost, 130 when it was interrupted.

mod allocator;
mod bench;
mod blind;
mod captures;
mod chat;
mod checkpoint;
mod doctor;
#[cfg(test)]
mod documentation;
mod eval;
mod explain;
mod failure;
mod generate;
mod interrupt;
mod kernels;
mod launch;
mod limits;
mod mask;
mod memory;
mod number;
mod output;
mod problem;
mod progress;
mod ranks;
mod shard;
mod sizes;
mod threads;
mod train;
mod tune;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use failure::Failure;
use output::Output;

#[global_allocator]
static ALLOCATOR: allocator::Told = allocator::Told;

/// Programmable attention for training transformers.
#[derive(Debug, Parser)]
#[command(name = "foveate", version, arg_required_else_help = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(train::Args),
    Launch(launch::Args),
    Generate(generate::Args),
    Eval(eval::Args),
    Checkpoint(checkpoint::Args),
    Mask(mask::Args),
    Explain(explain::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
    Tune(tune::Args),
    Kernels(kernels::Args),
    Shard(shard::Args),
    RenderChat(chat::Args),
}

impl Command {
    /// Starts the threads that compute. The doctor tells what is wrong with their number, every other
    /// command refuses it; a benchmark starts those that it is told.
    fn start_threads(&self) -> Result<(), Failure> {
        match self {
            Command::Doctor(_) => threads::check_startable(),
            Command::Bench(_) | Command::Launch(_) | Command::RenderChat(_) => threads::check(),
            _ => threads::check().and_then(|()| threads::start(None)),
        }
    }

    fn run(&self, out: &mut Output) -> Result<(), Failure> {
        match self {
            Command::Train(args) => train::run(args, out),
            Command::Launch(args) => launch::run(args),
            Command::Generate(args) => generate::run(args, out),
            Command::Eval(args) => eval::run(args, out),
            Command::Checkpoint(args) => checkpoint::run(args, out),
            Command::Mask(args) => mask::run(args, out),
            Command::Explain(args) => explain::run(args, out),
            Command::Doctor(args) => doctor::run(args, out),
            Command::Bench(args) => bench::run(args, out),
            Command::Tune(args) => tune::run(args, out),
            Command::Kernels(args) => kernels::run(args, out),
            Command::Shard(args) => shard::run(args, out),
            Command::RenderChat(args) => chat::run(args),
        }
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::misread(&error),
    };
    if !matches!(cli.command, Command::RenderChat(_)) {
        allocator::watch();
    }
    let mut out = Output::stdout();
    let result = interrupt::writes_past_the_limit_fail()
        .and_then(|()| launch::end_with_launcher())
        .and_then(|()| cli.command.start_threads())
        .and_then(|()| cli.command.run(&mut out));
    let result = result.and_then(|()| Ok(out.flush()?));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_help_of_every_command_is_as_reviewed() {
        let mut cli = Cli::command().term_width(100);
        cli.build();
        let mut text = cli.render_long_help().to_string();
        for command in cli.get_subcommands_mut().filter(|c| c.get_name() != "help") {
            let name = command.get_name().to_owned();
            text += &format!("\n==== {name}\n{}", command.render_long_help());
        }
        insta::assert_snapshot!("help", text);
    }
}
