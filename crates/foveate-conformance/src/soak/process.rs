//! Processes of the binary under test, and what none of them may do.

use std::fs::OpenOptions;
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Kibibytes of address space that a process gets: a command that wants more was not asked for
/// so much, and must say so before it takes it.
const MEMORY_KIB: u64 = 4 << 20;

/// How a process ended, and what it wrote.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// A command of the binary with a bound on its memory, on two threads.
pub fn bounded(program: &std::path::Path) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("ulimit -v {MEMORY_KIB}; exec \"$0\" \"$@\"")).arg(program);
    command.env("RAYON_NUM_THREADS", "2").env_remove("RUST_BACKTRACE").stdin(Stdio::null());
    command
}

/// What of a process is written to a disk that is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    Neither,
    Stdout,
    Stderr,
}

/// Runs a command to its end; an error if that takes longer than `limit`.
pub fn run(command: &mut Command, limit: Duration) -> Result<Ended, String> {
    run_into(command, limit, Full::Neither)
}

/// [`run`], with one of the outputs going to a full disk.
pub fn run_into(command: &mut Command, limit: Duration, full: Full) -> Result<Ended, String> {
    let to = |is_full: bool| match is_full {
        false => Ok(Stdio::piped()),
        true => OpenOptions::new().write(true).open("/dev/full").map(Stdio::from),
    };
    let opened = |e: std::io::Error| format!("/dev/full: {e}");
    command.stdout(to(full == Full::Stdout).map_err(opened)?);
    command.stderr(to(full == Full::Stderr).map_err(opened)?);
    let child = command.spawn().map_err(|e| format!("cannot start: {e}"))?;
    end(child, limit, |_| ())
}

/// Follows a child with piped output to its end; `step` is called again and again meanwhile.
pub fn end(
    mut child: Child,
    limit: Duration,
    mut step: impl FnMut(&mut Child),
) -> Result<Ended, String> {
    let reader = |pipe: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let Some(mut pipe) = pipe else { return String::new() };
            // What came before an error is all there is.
            let _ = pipe.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let stdout = reader(child.stdout.take().map(|p| Box::new(p) as Box<dyn Read + Send>));
    let stderr = reader(child.stderr.take().map(|p| Box::new(p) as Box<dyn Read + Send>));
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            break Ok(status);
        }
        if began.elapsed() > limit {
            // It may have ended meanwhile.
            let _ = child.kill();
            child.wait().map_err(|e| e.to_string())?;
            break Err(format!("did not end within {} s", limit.as_secs()));
        }
        step(&mut child);
        thread::sleep(Duration::from_millis(2));
    };
    let text = |reader: thread::JoinHandle<String>| reader.join().expect("reads to the end");
    let (stdout, stderr) = (text(stdout), text(stderr));
    Ok(Ended { status: status?, stdout, stderr })
}

impl Ended {
    /// Whether the process ended by itself with a code of its own; a panic has another.
    pub fn code_means_something(&self) -> Result<(), String> {
        match self.status.code() {
            Some(0..=2) => Ok(()),
            _ => Err(self.status.to_string()),
        }
    }

    /// The error line of a process that failed as it should; nothing where it succeeded.
    ///
    /// # Errors
    /// When it panicked, was killed, ended with a code that means nothing, or failed without one
    /// line that says what is wrong.
    pub fn error_line(&self) -> Result<Option<&str>, String> {
        let first = self.stderr.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
        if self.stderr.contains("panicked at") {
            let panic = self.stderr.lines().find(|line| line.contains("panicked at"));
            return Err(format!("panicked: {}", panic.unwrap_or_default()));
        }
        match self.status.code() {
            Some(0) => Ok(None),
            Some(1 | 2) => {
                // Faults of a text are shown in the text.
                let is_error = |line: &&str| {
                    ["error: ", "  x ", "  × "].iter().any(|mark| line.starts_with(mark))
                };
                let mut lines = self.stderr.lines().filter(is_error);
                match (lines.next(), lines.next()) {
                    (Some(line), None) => Ok(Some(line)),
                    (None, _) => Err(format!("failed without an error line: {first:?}")),
                    (Some(_), Some(_)) => Err("failed with several error lines".into()),
                }
            }
            Some(code) => Err(format!("ended with code {code}: {first:?}")),
            None => Err(format!("{}: {first:?}", self.status)),
        }
    }
}

/// A command line as a shell takes it.
pub fn shown(args: &[String]) -> String {
    let plain = |arg: &str| {
        !arg.is_empty() && arg.chars().all(|c| c.is_ascii_alphanumeric() || "-_./=,:".contains(c))
    };
    let quoted = |arg: &String| {
        let mut shown = match plain(arg) {
            true => arg.clone(),
            false => format!("'{}'", arg.replace('\'', "'\\''").escape_debug()),
        };
        if shown.len() > 80 {
            let end = (0..=80).rev().find(|&i| shown.is_char_boundary(i)).unwrap_or(0);
            shown.truncate(end);
            shown.push('…');
        }
        shown
    };
    args.iter().map(quoted).collect::<Vec<_>>().join(" ")
}
