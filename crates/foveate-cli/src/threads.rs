//! How many threads work is spread over.

use std::ffi::OsString;

use crate::failure::Failure;

/// The variable that sets the number of threads; it is that of the library that starts them.
pub const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Threads at most. The library starts as many as it is told, and waits for all of them, although
/// the system starts no more than some thousands.
pub const MOST: usize = 1024;

/// Refuses what is no number of threads, and a number that no machine has.
///
/// # Errors
/// When [`VARIABLE`] holds one.
pub fn check() -> Result<(), Failure> {
    check_startable()?;
    match refused(std::env::var_os(VARIABLE)) {
        Some(why) => Err(Failure::usage(why).help(REMEDY)),
        None => Ok(()),
    }
}

/// Refuses a number of threads that cannot be started, and takes what is none: the library then
/// starts as many as there are cores, as a command that describes the machine tells.
///
/// # Errors
/// When [`VARIABLE`] holds one.
pub fn check_startable() -> Result<(), Failure> {
    match number(std::env::var_os(VARIABLE).as_ref()) {
        Some(n) if n > MOST => {
            let message = format!("{VARIABLE} is {n}; up to {MOST} threads run");
            Err(Failure::usage(message).help(REMEDY))
        }
        _ => Ok(()),
    }
}

const REMEDY: &str = "leave it out to run as many as the machine has cores";

/// Why what the variable was given is not the number of threads.
pub fn refused(given: Option<OsString>) -> Option<String> {
    let given = given.filter(|text| !text.is_empty())?;
    let wrong = number(Some(&given)).is_none_or(|n| n == 0);
    wrong.then(|| format!("{VARIABLE} is {given:?}, which is no number of threads"))
}

fn number(given: Option<&OsString>) -> Option<usize> {
    given?.to_str()?.parse().ok()
}
