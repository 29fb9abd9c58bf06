//! `foveate kernels`: GPU kernels without a GPU.

use clap::Subcommand;

mod blocks;
mod build;
mod check;
mod kind;
mod list;
mod table;

use crate::failure::Failure;
use crate::output::Output;

/// Compile GPU kernels; a GPU need not be there
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Build(Box<build::Args>),
    Check(check::Args),
}

/// Runs the subcommand.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    match &args.command {
        Command::Build(args) => build::run(args, out),
        Command::Check(args) => check::run(args, out),
    }
}
