//! Standard output: text or one JSON object a line.

use std::fs;
use std::io::{self, BufWriter, StdoutLock, Write};
use std::path::Path;

use foveate_train::metrics::Tflops;
use serde::Serialize;

use crate::failure::Failure;

/// Writes a line to stderr. Where it cannot be written there is nobody to tell, which is no failure.
macro_rules! tell {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}
pub(crate) use tell;

/// What a model computes in a second, by each count, and the share of `peak` where that is known.
pub fn tflops(rate: Tflops, peak: Option<f64>) -> String {
    let mfu = peak.map(|peak| rate.mfu(peak));
    let share = |of: fn(Tflops) -> f64| {
        mfu.map_or(String::new(), |mfu| format!(", MFU {:.1} %", 100.0 * of(mfu)))
    };
    // What small models reach on a few cores.
    let (unit, scale) = if rate.dense < 0.1 { ("GFLOP/s", 1e3) } else { ("TFLOP/s", 1.0) };
    format!(
        "{unit}: {:.3} by live pairs{}; {:.3} with attention over all pairs (torchtitan's count{}), \
         {:.3} over half of them (Megatron Bridge's{})",
        rate.live * scale,
        share(|of| of.live),
        rate.dense * scale,
        share(|of| of.dense),
        rate.half * scale,
        share(|of| of.half),
    )
}

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

/// Writes a file that the user named. A pipe is refused: it would be waited for until somebody reads.
///
/// # Errors
/// Names the file, with the system's reason.
pub fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    let pipe = path.metadata().is_ok_and(|m| is_pipe(&m)) && !is_open(path);
    let is_new = !path.exists();
    let written = match pipe {
        true => Err(io::Error::other("it is a pipe, not a file")),
        // A part of it would be taken for all.
        false => fs::write(path, text).inspect_err(|_| {
            if is_new {
                let _ = fs::remove_file(path);
            }
        }),
    };
    written.map_err(|e| Failure::new(format!("{} cannot be written: {e}", path.display())))
}

/// Whether a path is one of this process' own open files, such as the shell's `<(...)`.
pub fn is_open(path: &Path) -> bool {
    ["/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/proc/self/fd"]
        .iter()
        .any(|own| path.starts_with(own))
}

/// Whether it is a pipe with a name.
pub fn is_pipe(metadata: &fs::Metadata) -> bool {
    #[cfg(unix)]
    return std::os::unix::fs::FileTypeExt::is_fifo(&metadata.file_type());
    #[cfg(not(unix))]
    return false;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_told_by_each_count_with_its_name() {
        let rate = Tflops { live: 400.0, dense: 500.0, half: 425.0 };
        let text = "TFLOP/s: 400.000 by live pairs; 500.000 with attention over all pairs \
                    (torchtitan's count), 425.000 over half of them (Megatron Bridge's)";
        assert_eq!(tflops(rate, None), text);
        let text = "TFLOP/s: 400.000 by live pairs, MFU 40.0 %; 500.000 with attention over all \
                    pairs (torchtitan's count, MFU 50.0 %), 425.000 over half of them (Megatron \
                    Bridge's, MFU 42.5 %)";
        assert_eq!(tflops(rate, Some(1000.0)), text);
        let small = tflops(Tflops { live: 2e-4, dense: 3e-4, half: 2.5e-4 }, None);
        assert!(small.starts_with("GFLOP/s: 0.200 by live pairs; 0.300 with"), "{small}");
    }
}
