//! Whether a command fits the machine, asked before it takes the memory.

use foveate_train::machine;

use crate::failure::Failure;
use crate::output::bytes;

/// Refuses what needs more than memory and swap together, or than the `free` bytes of a GPU; `help`
/// says what to do.
///
/// # Errors
/// When it does.
pub fn fits(need: u64, free: Option<u64>, help: &str) -> Result<(), Failure> {
    match free.or_else(machine::usable).filter(|there| need > *there) {
        None => Ok(()),
        Some(there) => {
            let (need, there) = (bytes(need as f64), bytes(there as f64));
            let place = if free.is_some() { "the GPU has free" } else { "the machine has" };
            let message = format!("this takes {need}, but {place} {there}");
            Err(Failure::new(message).help(help))
        }
    }
}
