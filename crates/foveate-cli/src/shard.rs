//! `foveate shard`: plans of training over many ranks, without devices.

mod check;
mod log;
mod memory;
pub mod plan;
mod simulate;

use clap::Subcommand;

use crate::failure::Failure;
use crate::output::Output;

/// Plan training over many ranks, and prove the plan without devices
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Check(Box<check::Args>),
    Simulate(Box<simulate::Args>),
    Log(log::Args),
}

/// Runs the subcommand.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    match &args.command {
        Command::Check(args) => check::run(args, out),
        Command::Simulate(args) => simulate::run(args, out),
        Command::Log(args) => log::run(args, out),
    }
}
