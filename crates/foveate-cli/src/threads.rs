//! The threads that work is spread over: how many, and that the system starts them.

use std::ffi::OsString;
use std::io;
use std::sync::mpsc;
use std::thread;

use foveate_train::machine;
use rayon::ThreadPoolBuilder;

use crate::failure::Failure;
use crate::output::bytes;

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

const SET: &str = "RAYON_NUM_THREADS=";

const REMEDY: &str = "leave it out to run as many as the machine has cores";

/// Why what the variable was given is not the number of threads.
pub fn refused(given: Option<OsString>) -> Option<String> {
    let given = given.filter(|text| !text.is_empty())?;
    let wrong = number(Some(&given)).is_none_or(|n| n == 0);
    wrong.then(|| format!("{VARIABLE} is {given:?}, which is no number of threads"))
}

/// Address space that is left to work when a thread starts. What the start itself maps fails in the
/// new thread, where nobody can tell of it.
const ROOM: u64 = 16 << 20;

/// Threads that a command has beside those that compute, for its progress and its files.
const BESIDE: usize = 2;

/// Starts the threads that compute: `count`, or as many as [`VARIABLE`] says, or as there are cores.
/// Once a process, before any of them is used: the library panics where it cannot start them itself.
///
/// # Errors
/// When the system does not start so many and [`BESIDE`].
pub fn start(count: Option<usize>) -> Result<(), Failure> {
    let mut started = 0usize;
    let builder = ThreadPoolBuilder::new().num_threads(count.unwrap_or(0)).spawn_handler(|own| {
        spawn(move || own.run())?;
        started += 1;
        Ok(())
    });
    let built = builder.build_global().map_err(|e| e.to_string()).and_then(|()| {
        let others: io::Result<Vec<_>> = (0..BESIDE).map(|_| spawn(thread::park)).collect();
        let others = others.map_err(|e| format!("for {BESIDE} beside them, {e}"))?;
        others.iter().for_each(|other| other.thread().unpark());
        Ok(())
    });
    built.map_err(|why| {
        let (asked, way) = match (count, number(std::env::var_os(VARIABLE).as_ref())) {
            (Some(n), _) => (format!("{n} threads"), "--threads "),
            (None, Some(n)) => (format!("{VARIABLE} is {n}: so many threads"), SET),
            (None, None) => ("as many threads as there are cores".to_owned(), SET),
        };
        let raise = "raise the limit (ulimit -v, ulimit -u, pids.max)";
        // So many did start, with those beside them.
        let help = match started.saturating_sub(BESIDE) {
            0 => raise.to_owned(),
            fewer => format!("try {way}{fewer}, or {raise}"),
        };
        Failure::new(format!("{asked} cannot be started, {started} were: {why}")).help(help)
    })
}

/// Starts a thread where there is room. Where address space is limited, it waits until the thread has
/// allocated for the first time, for which the allocator may reserve 64 MiB.
fn spawn(work: impl FnOnce() + Send + 'static) -> io::Result<thread::JoinHandle<()>> {
    let Some(left) = machine::address_space_left() else {
        return thread::Builder::new().spawn(work);
    };
    if left < ROOM {
        let left = bytes(left as f64);
        let message = format!("the limit of address space (ulimit -v) leaves {left}");
        return Err(io::Error::other(message));
    }
    let (runs, running) = mpsc::channel();
    let thread = thread::Builder::new().spawn(move || {
        // To send allocates.
        let _ = runs.send(());
        work();
    })?;
    let _ = running.recv();
    Ok(thread)
}

fn number(given: Option<&OsString>) -> Option<usize> {
    given?.to_str()?.parse().ok()
}
