//! Templates rendered in a process of their own, so that nothing in one takes more memory or time than it may.
//!
//! The engine counts instructions, but one instruction may double a text, and a filter may work on it for long.
//! The process has the system's limits instead: of its address space, for its allocator then ends it, and of the
//! processor's time, in which neither a machine at work nor a suspended one counts. They are set anew for every
//! request, by its size. The process renders one conversation after the other; asking takes some ten
//! microseconds.
//!
//! Both sides send frames: eight bytes of length, then JSON. The first frame is the template, all others are a
//! question and its answer. The process ends with its input.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Message, Program, RenderError, Rendered};

/// Address space that the process may take, in bytes, and more for each byte of a question.
const SPACE: u64 = 256 << 20;
const SPACE_A_BYTE: u64 = 16;
/// Seconds of a processor that a question may take, and more for each message of each rendering of it.
const SECONDS: u64 = 4;
const SECONDS_A_MESSAGE: f64 = 20e-6;
/// How often the caller is asked whether it wants to stop.
const PATIENCE: Duration = Duration::from_millis(50);

fn space(question_bytes: u64) -> u64 {
    SPACE.saturating_add(question_bytes.saturating_mul(SPACE_A_BYTE))
}

/// The conversation is rendered once, and twice more for each turn to learn from.
fn seconds(messages: &[Message], prompt: Option<bool>) -> u64 {
    let turns = messages.iter().filter(|m| m.role == "assistant").count();
    let renderings = if prompt.is_none() { 1 + 2 * turns } else { 1 };
    SECONDS + (renderings as f64 * messages.len() as f64 * SECONDS_A_MESSAGE) as u64
}

#[derive(Serialize, Deserialize)]
struct Template {
    source: String,
    bos: String,
    eos: String,
    now: Option<u64>,
}

#[derive(Deserialize)]
struct Question {
    messages: Vec<Message>,
    prompt: Option<bool>,
}

/// [`Question`] with borrowed messages.
#[derive(Serialize)]
struct Asked<'a> {
    messages: &'a [Message],
    prompt: Option<bool>,
}

/// Renders for the process that started this one, until there are no more questions: see
/// [`super::ChatTemplate::isolated`]. Limits what this process takes, so that it can do little else.
///
/// # Errors
/// Where the system does not let it read, write or limit itself.
pub fn serve() -> io::Result<()> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    limit(Resource::Core, 0)?;
    let bytes = length(&mut input)?;
    let Template { source, bos, eos, now } = parse(&body(&mut input, bytes)?)?;
    let program = Program::new(&source, Path::new("chat template"), &bos, &eos);
    let program = program.map_err(|e| io::Error::other(e.to_string()))?;
    let program = now.into_iter().fold(program, Program::at);
    loop {
        let bytes = match length(&mut input) {
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            bytes => bytes?,
        };
        limit(Resource::As, space(bytes))?;
        let Question { messages, prompt } = parse(&body(&mut input, bytes)?)?;
        let used = clock_gettime(ClockId::ProcessCPUTime).tv_sec.unsigned_abs();
        // The kernel takes whole seconds.
        limit(Resource::Cpu, used + 1 + seconds(&messages, prompt))?;
        let answer = match prompt {
            None => program.render(&messages),
            Some(prompt) => {
                let text = program.text(&messages, prompt);
                text.map(|text| Rendered { text, learned: Vec::new() })
            }
        };
        write_frame(&mut output, &to_json(&answer))?;
    }
}

fn limit(what: Resource, most: u64) -> io::Result<()> {
    let now = getrlimit(what);
    let current = Some(now.maximum.map_or(most, |maximum| maximum.min(most)));
    Ok(setrlimit(what, Rlimit { current, ..now })?)
}

/// The other end: a process that renders, started when it is first needed and again after it ended.
#[derive(Debug)]
pub struct Renderer {
    arguments: &'static [&'static str],
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    stream: UnixStream,
}

impl Renderer {
    /// This program renders when it is called with `arguments`.
    pub fn new(arguments: &'static [&'static str]) -> Self {
        Self { arguments, running: Mutex::default() }
    }

    /// The text of a conversation by `program`: with the spans to learn from, or as the prompt that it is where
    /// `prompt` says whether the assistant is to go on.
    ///
    /// # Errors
    /// What rendering says, and what the process died of.
    pub fn ask(
        &self,
        program: &Program,
        messages: &[Message],
        prompt: Option<bool>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Rendered, RenderError> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut process = match running.take() {
            Some(process) => process,
            None => Running::start(self.arguments, program).map_err(|e| {
                let message =
                    format!("the process that renders chat templates does not start: {e}");
                RenderError::Template(message)
            })?,
        };
        let question = to_json(&Asked { messages, prompt });
        match process.answer(&question, interrupted) {
            Ok(answer) => {
                *running = Some(process);
                answer
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => Err(RenderError::Interrupted),
            Err(e) => {
                let why = process.end().map_or_else(
                    |e| format!("is rendered by a process that is lost: {e}"),
                    |status| {
                        died(status, space(question.len() as u64), seconds(messages, prompt), &e)
                    },
                );
                Err(RenderError::Template(format!("the chat template {why}")))
            }
        }
    }
}

/// What a template did whose process ended while it was asked.
fn died(status: ExitStatus, bytes: u64, seconds: u64, error: &io::Error) -> String {
    let took = match status.signal() {
        Some(signal) if signal == Signal::XCPU.as_raw() => {
            format!("computes for more than {seconds} s")
        }
        Some(signal) if signal == Signal::ABORT.as_raw() => {
            format!("takes more than {} MiB of memory", bytes >> 20)
        }
        _ => return format!("ended the process that renders it ({status}; {error})"),
    };
    format!("{took}, which no conversation needs; correct what it repeats, or use another one")
}

impl Running {
    fn start(arguments: &[&str], program: &Program) -> io::Result<Self> {
        let (stream, theirs) = UnixStream::pair()?;
        stream.set_read_timeout(Some(PATIENCE))?;
        // The file that runs, whatever has its name by now.
        let own = Path::new("/proc/self/exe");
        let path = if own.exists() { PathBuf::from(own) } else { std::env::current_exe()? };
        let mut command = Command::new(path);
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        let (input, output): (OwnedFd, OwnedFd) = (theirs.try_clone()?.into(), theirs.into());
        command.args(arguments).stdin(input).stdout(output).stderr(Stdio::null());
        let child = command.spawn()?;
        let mut running = Self { child, stream };
        let Program { source, bos, eos, now, .. } = program.clone();
        write_frame(&mut running.stream, &to_json(&Template { source, bos, eos, now }))?;
        Ok(running)
    }

    /// The answer to a question.
    ///
    /// # Errors
    /// [`ErrorKind::Interrupted`] where the caller wants to stop; others where the process ended.
    fn answer(
        &mut self,
        question: &[u8],
        interrupted: &mut dyn FnMut() -> bool,
    ) -> io::Result<Result<Rendered, RenderError>> {
        write_frame(&mut self.stream, question)?;
        let mut bytes = [0; 8];
        self.read(&mut bytes, interrupted)?;
        let mut answer = vec![0; u64::from_le_bytes(bytes) as usize];
        self.read(&mut answer, interrupted)?;
        parse(&answer)
    }

    fn read(
        &mut self,
        mut into: &mut [u8],
        interrupted: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        while !into.is_empty() {
            if interrupted() {
                return Err(ErrorKind::Interrupted.into());
            }
            match self.stream.read(into) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => into = &mut into[read..],
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Ends the process where it did not end by itself.
    fn end(mut self) -> io::Result<ExitStatus> {
        self.stream.shutdown(std::net::Shutdown::Both).ok();
        self.child.wait()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended is waited for all the same.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn write_frame(to: &mut impl Write, body: &[u8]) -> io::Result<()> {
    to.write_all(&(body.len() as u64).to_le_bytes())?;
    to.write_all(body)?;
    to.flush()
}

fn length(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn body(from: &mut impl Read, bytes: u64) -> io::Result<Vec<u8>> {
    let mut body = vec![0; bytes as usize];
    from.read_exact(&mut body)?;
    Ok(body)
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> io::Result<T> {
    Ok(serde_json::from_slice(body)?)
}

fn to_json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("texts and numbers are JSON")
}
