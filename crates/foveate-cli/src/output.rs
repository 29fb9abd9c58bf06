//! Standard output: text or one JSON object a line.

use std::io::{self, BufWriter, StdoutLock, Write};

use serde::Serialize;

/// Writes a line to stderr. Where it cannot be written there is nobody to tell, which is no failure.
macro_rules! tell {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}
pub(crate) use tell;

/// Where results go. Writing to a closed pipe is an error, not a panic.
pub struct Output {
    to: BufWriter<StdoutLock<'static>>,
}

impl Output {
    /// Standard output.
    pub fn stdout() -> Self {
        Self { to: BufWriter::new(io::stdout().lock()) }
    }

    /// One line.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn line(&mut self, text: impl std::fmt::Display) -> io::Result<()> {
        writeln!(self.to, "{text}")
    }

    /// Text that ends its own lines.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn text(&mut self, text: impl std::fmt::Display) -> io::Result<()> {
        write!(self.to, "{text}")
    }

    /// One JSON object on a line of its own, shown at once.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn json(&mut self, value: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.to, value)?;
        writeln!(self.to)?;
        self.to.flush()
    }

    /// Shows what was written.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// A number of bytes for people: `1.5 GiB`.
pub fn bytes(n: f64) -> String {
    scaled(n, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// A count for people: `12.3 M`.
pub fn count(n: f64) -> String {
    scaled(n, 1000.0, &["", "k", "M", "G", "T", "P"]).trim_end().to_owned()
}

fn scaled(mut n: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while n >= step && unit + 1 < units.len() {
        n /= step;
        unit += 1;
    }
    match unit {
        0 => format!("{n} {}", units[0]),
        _ => format!("{n:.1} {}", units[unit]),
    }
}
