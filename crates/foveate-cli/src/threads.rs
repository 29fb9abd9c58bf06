//! How many threads work is spread over.

use std::ffi::OsString;

use crate::failure::Failure;

/// The variable that sets the number of threads; it is that of the library that starts them.
pub const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Threads at most. The library starts as many as it is told, and waits for all of them, although
/// the system starts no more than some thousands.
pub const MOST: usize = 1024;

/// Refuses a number of threads that no machine has.
///
/// # Errors
/// When [`VARIABLE`] holds one.
pub fn check() -> Result<(), Failure> {
    admit(std::env::var_os(VARIABLE))
}

fn admit(given: Option<OsString>) -> Result<(), Failure> {
    match number(given.as_ref()) {
        Some(n) if n > MOST => {
            Err(Failure::usage(format!("{VARIABLE} is {n}; up to {MOST} threads run"))
                .help("leave it out to run as many as the machine has cores"))
        }
        _ => Ok(()),
    }
}

/// Why what the variable was given is not the number of threads.
pub fn refused(given: Option<OsString>) -> Option<String> {
    let given = given.filter(|text| !text.is_empty())?;
    let why = "which is no number of threads and not used";
    number(Some(&given)).is_none_or(|n| n == 0).then(|| format!("{VARIABLE} is {given:?}, {why}"))
}

fn number(given: Option<&OsString>) -> Option<usize> {
    given?.to_str()?.parse().ok()
}
