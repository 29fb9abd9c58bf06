//! Whether a command fits the machine, asked before it takes the memory.

use foveate_train::machine;

use crate::failure::Failure;
use crate::output::bytes;

/// Refuses what needs more than memory and swap together; `help` says what to do.
///
/// # Errors
/// When it does.
pub fn fits(need: u64, help: &str) -> Result<(), Failure> {
    match machine::usable().filter(|there| need > *there) {
        None => Ok(()),
        Some(there) => {
            let (need, there) = (bytes(need as f64), bytes(there as f64));
            let message = format!("this takes {need}, but the machine has {there}");
            Err(Failure::new(message).help(help))
        }
    }
}
