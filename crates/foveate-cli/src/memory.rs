//! Whether a command fits the machine, asked before it takes the memory.

use foveate_train::machine::{self, Free};

use crate::failure::Failure;
use crate::output::bytes;

/// Refuses what needs more than the memory that is free, or than the `free` bytes of a GPU; `help` says
/// what to do.
///
/// # Errors
/// When it does.
pub fn fits(need: u64, free: Option<u64>, help: &str) -> Result<(), Failure> {
    let free = free.map(|bytes| Free { bytes, by: "the GPU has free" }).or_else(machine::free);
    match free.filter(|free| need > free.bytes) {
        None => Ok(()),
        Some(free) => {
            let (need, there) = (bytes(need as f64), bytes(free.bytes as f64));
            let message = format!("this takes {need}, but {} {there}", free.by);
            Err(Failure::new(message).help(help))
        }
    }
}
