//! Lines of stdout and stderr. What is read through a pipe may be closed before the checks end.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write, stderr, stdout};

/// Writes a line to stdout. Where nobody reads it any more the program ends, which is no success: checks are left.
macro_rules! say {
    ($($text:tt)*) => { $crate::say::line(format_args!($($text)*)) };
}
/// Writes a line to stderr. Where it cannot be written there is nobody to tell.
macro_rules! tell {
    ($($text:tt)*) => { $crate::say::aside(format_args!($($text)*)) };
}
pub fn line(text: Arguments<'_>) {
    let mut out = stdout().lock();
    let Err(e) = writeln!(out, "{text}").and_then(|()| out.flush()) else { return };
    let reason = match e.kind() {
        ErrorKind::BrokenPipe => "stdout was closed before the checks ended".to_owned(),
        _ => format!("stdout: {e}"),
    };
    tell!("error: {reason}");
    std::process::exit(1);
}

pub fn aside(text: Arguments<'_>) {
    let _ = writeln!(stderr(), "{text}");
}
