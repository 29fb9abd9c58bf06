//! `foveate bench`: how fast attention runs here, [on the processor](cpu) and [on a GPU](gpu), how
//! fast [block masks](mask) are built and [models](train) trained.
//!
//! A case is run warm a number of times and its median is reported. The rate counts the
//! operations on pairs of a query and a key that the mask lets through, so a mask never makes it
//! look better than it is.

mod cpu;
mod gpu;
mod mask;
mod train;
mod workload;

use clap::{Args as ClapArgs, Subcommand};

use crate::failure::Failure;
use crate::output::Output;
use crate::ranks::RankArgs;
use crate::threads;

/// Measure attention and training on this machine, beside other implementations
#[derive(Debug, ClapArgs)]
pub struct Args {
    #[command(subcommand)]
    on: On,
}

#[derive(Debug, Subcommand)]
enum On {
    /// On the processor, beside the same products unfused
    Cpu(cpu::Args),
    /// On an NVIDIA GPU, beside PyTorch's attention
    Gpu(gpu::Args),
    /// Of building block masks, on one thread
    Mask(mask::Args),
    /// Of training steps, on random weights and tokens
    Train(Box<train::Args>),
}

impl Args {
    /// Which rank this is asked to be, where ranks measure together; else each would measure what the others slow down.
    pub fn ranks(&self) -> Option<&RankArgs> {
        match &self.on {
            On::Train(args) => Some(args.ranks()),
            _ => None,
        }
    }
}

/// Runs what was asked for.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let threads = match &args.on {
        On::Cpu(args) => args.threads(),
        _ => None,
    };
    threads::start(threads)?;
    match &args.on {
        On::Cpu(args) => cpu::run(args, out),
        On::Gpu(args) => gpu::run(args, out),
        On::Mask(args) => mask::run(args, out),
        On::Train(args) => train::run(args, out),
    }
}
