//! How a command fails: what is shown and what the process ends with.

use std::io::{self, Write};
use std::process::ExitCode;

use foveate::mods::{ModError, ModErrorKind};
use miette::{Diagnostic, GraphicalReportHandler, LabeledSpan, NamedSource, SourceCode};

/// Why a command stops.
#[derive(Debug)]
pub enum Failure {
    /// Something went wrong; the report says what, where and what to do.
    Failed(Box<Report>),
    /// The command line asks for something that cannot be.
    Usage(Box<Report>),
    /// The command line of other processes cannot be read, or asks for help.
    Misread(clap::Error),
    /// The user pressed Ctrl-C.
    Interrupted,
    /// Another rank failed, and shows why.
    Elsewhere,
    /// Ranks that this process started have said that the command line is wrong.
    ToldUsage,
    /// A rank is gone, silent or late, as this one says or another: the run may go on when it is
    /// started again.
    Lost(Option<Box<Report>>),
    /// Standard output could not be written.
    Output(io::Error),
}

/// One error with, when there is one, the text it points into.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Report {
    message: String,
    help: Option<String>,
    excerpt: Option<(NamedSource<String>, LabeledSpan)>,
}

impl Diagnostic for Report {
    fn help<'a>(&'a self) -> Option<Box<dyn std::fmt::Display + 'a>> {
        self.help.as_ref().map(|h| Box::new(h) as _)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.excerpt.as_ref().map(|(text, _)| text as _)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let (_, label) = self.excerpt.as_ref()?;
        Some(Box::new(std::iter::once(label.clone())))
    }
}

/// What a process ends with that has nothing wrong itself and may be started again: EX_TEMPFAIL of
/// sysexits.h.
pub const AGAIN: u8 = 75;

impl Failure {
    /// A failure that says `message`.
    pub fn new(message: impl Into<String>) -> Self {
        let report = Report { message: message.into(), help: None, excerpt: None };
        Self::Failed(Box::new(report))
    }

    /// A rank is lost, as `message` says.
    pub fn lost(message: impl Into<String>) -> Self {
        let report = Report { message: message.into(), help: None, excerpt: None };
        Self::Lost(Some(Box::new(report)))
    }

    /// A fault of the command line, which says `message`.
    pub fn usage(message: impl Into<String>) -> Self {
        let report = Report { message: message.into(), help: None, excerpt: None };
        Self::Usage(Box::new(report))
    }

    /// What is wrong, in one line.
    pub fn message(&self) -> String {
        match self {
            Self::Failed(report) | Self::Usage(report) | Self::Lost(Some(report)) => {
                report.message.clone()
            }
            Self::Lost(None) => "another rank lost a rank".to_owned(),
            Self::Misread(e) => e.to_string(),
            Self::Interrupted => "interrupted".to_owned(),
            Self::Elsewhere => "another rank failed".to_owned(),
            Self::ToldUsage => "ranks cannot read their command line".to_owned(),
            Self::Output(e) => format!("standard output cannot be written: {e}"),
        }
    }

    /// The failure with a line on what to do.
    pub fn help(mut self, help: impl Into<String>) -> Self {
        if let Self::Failed(report) | Self::Usage(report) | Self::Lost(Some(report)) = &mut self {
            report.help = Some(help.into());
        }
        self
    }

    /// Whether the message, or what stands beside the text that it points into, has all of `words`.
    pub fn says(&self, words: &[&str]) -> bool {
        let label = match self {
            Self::Failed(report) | Self::Usage(report) => {
                report.excerpt.as_ref().and_then(|(_, label)| label.label()).unwrap_or_default()
            }
            _ => "",
        };
        let said = format!("{} {label}", self.message());
        words.iter().all(|word| said.contains(word))
    }

    /// A mod given as text on the command line that is wrong; `what` names the argument. A typo is
    /// shown with its place.
    pub fn of_text(what: &str, error: &ModError) -> Self {
        let ModErrorKind::Parse { position, message, text } = error.kind() else {
            return Self::usage(format!("{what}: {error}"));
        };
        let (text, position) = excerpt(text, *position);
        let help = message.contains("captured buffer").then(|| {
            "--buffer NAME=1,2,3 brings a buffer, --doc-lens 20,44 the ids of packed documents"
                .to_owned()
        });
        let message = cut(message, EXCERPT_LINE);
        let width = text[position..].chars().next().map_or(1, char::len_utf8);
        // The blank is what a fault at the end of the text points at.
        let label = LabeledSpan::at(position..position + width, message.clone());
        Self::Usage(Box::new(Report {
            message: format!("{what} cannot be read"),
            help,
            excerpt: Some((NamedSource::new(what, format!("{text} ")), label)),
        }))
    }

    /// Shows the failure on stderr and gives the exit code. A closed pipe is no failure: whoever
    /// reads has seen enough.
    pub fn report(&self) -> ExitCode {
        match self {
            Self::Failed(report) => {
                show(report);
                ExitCode::from(1)
            }
            Self::Usage(report) => {
                show(report);
                ExitCode::from(2)
            }
            Self::Misread(error) => misread(error),
            Self::Interrupted => ExitCode::from(130),
            Self::Elsewhere => ExitCode::from(1),
            Self::ToldUsage => ExitCode::from(2),
            Self::Lost(report) => {
                report.iter().for_each(|report| show(report));
                ExitCode::from(AGAIN)
            }
            Self::Output(e) if e.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            Self::Output(_) => {
                tell(&format!("error: {}\n", self.message()));
                ExitCode::from(1)
            }
        }
    }
}

/// Shows what is wrong with the command line, or the help that it asks for, and gives the exit code.
pub fn misread(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    if error.use_stderr() && text.lines().any(|line| line.chars().count() > LINE) {
        tell(&bounded(&text));
    } else {
        // In colours, where there is a terminal. Nobody is told where it cannot be written.
        let _ = error.print();
    }
    ExitCode::from(error.exit_code() as u8)
}

fn show(report: &Report) {
    let mut text = String::new();
    let drawn = report.excerpt.is_some()
        && GraphicalReportHandler::new().render_report(&mut text, report).is_ok();
    if !drawn {
        text = bounded(&format!("error: {report}\n"));
        text.extend(report.help.iter().map(|help| format!("help: {help}\n")));
    }
    tell(text.trim_start_matches('\n'));
}

/// Characters of a line of an error at most.
const LINE: usize = 1000;
/// The same of what is said beside a part of a text.
const EXCERPT_LINE: usize = 200;

/// A message whose lines, which may repeat an argument of any length, are cut in the middle.
pub fn bounded(message: &str) -> String {
    let mut text = message.lines().map(|line| cut(line, LINE)).collect::<Vec<_>>().join("\n");
    if message.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// A line without its middle, where it has more than `most` characters.
fn cut(line: &str, most: usize) -> String {
    let chars: Vec<char> = line.chars().collect();
    if chars.len() <= most {
        return line.to_owned();
    }
    let side = |part: &[char]| part.iter().collect::<String>();
    let (first, last) = (side(&chars[..most / 2]), side(&chars[chars.len() - most / 2..]));
    format!("{first} [... {} characters ...] {last}", chars.len() - most)
}

/// The part of `text` around byte `position`, and where that lies in it.
fn excerpt(text: &str, position: usize) -> (String, usize) {
    const SIDE: usize = 60;
    let position = (0..=position.min(text.len())).rfind(|&at| text.is_char_boundary(at));
    let (before, after) = text.split_at(position.unwrap_or_default());
    let cut = before.char_indices().rev().nth(SIDE - 1).map_or(0, |(at, _)| at);
    let end = after.char_indices().nth(SIDE).map_or(after.len(), |(at, _)| at);
    let dots = |missing: bool| if missing { "..." } else { "" };
    let (first, last) = (dots(cut > 0), dots(end < after.len()));
    let before = format!("{first}{}", &before[cut..]);
    (format!("{before}{}{last}", &after[..end]), before.len())
}

/// Writes to stderr. Where nobody reads that any more, there is nobody to tell.
fn tell(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        Self::Output(e)
    }
}

impl From<foveate::Error> for Failure {
    fn from(e: foveate::Error) -> Self {
        Self::new(e.to_string())
    }
}

impl From<foveate::cuda::CudaError> for Failure {
    fn from(e: foveate::cuda::CudaError) -> Self {
        if matches!(e.kind(), foveate::cuda::CudaErrorKind::Stopped { .. }) {
            return Self::Interrupted;
        }
        Self::new(e.to_string())
    }
}

impl From<foveate::gpu::GpuError> for Failure {
    fn from(e: foveate::gpu::GpuError) -> Self {
        Self::new(e.to_string())
    }
}

impl From<foveate_train::TrainError> for Failure {
    fn from(e: foveate_train::TrainError) -> Self {
        match e.kind() {
            foveate_train::TrainErrorKind::Interrupted => return Self::Interrupted,
            foveate_train::TrainErrorKind::Elsewhere { lost: true, .. } => return Self::Lost(None),
            foveate_train::TrainErrorKind::Elsewhere { .. } => return Self::Elsewhere,
            foveate_train::TrainErrorKind::Ranks { lost: true, .. } => {
                return Self::lost(e.to_string());
            }
            // An override is of the command line.
            foveate_train::TrainErrorKind::Recipe { place, .. } if place.starts_with("--set ") => {
                return Self::usage(e.to_string());
            }
            _ => {}
        }
        Self::new(e.to_string())
    }
}

impl From<foveate_shard::ShardError> for Failure {
    fn from(e: foveate_shard::ShardError) -> Self {
        if e.is_lost() { Self::lost(e.to_string()) } else { Self::new(e.to_string()) }
    }
}

impl From<foveate_nn::NnError> for Failure {
    fn from(e: foveate_nn::NnError) -> Self {
        Self::new(e.to_string())
    }
}

impl From<ModError> for Failure {
    fn from(e: ModError) -> Self {
        Self::of_text("the expression", &e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_error_repeats_is_bounded() {
        assert_eq!(bounded("short\nlines\n"), "short\nlines\n");
        let long = bounded(&format!("--mask: {}: it ends here", "é".repeat(100_000)));
        assert!(long.starts_with("--mask: éé") && long.ends_with("é: it ends here"), "{long}");
        assert!(long.contains("[... 99022 characters ...]") && long.len() < 2100, "{long}");
    }

    #[test]
    fn a_long_text_is_shown_around_its_fault() {
        assert_eq!(excerpt("q >= kx", 5), ("q >= kx".to_owned(), 5));
        assert_eq!(excerpt("q >=", 99), ("q >=".to_owned(), 4));
        let text = format!("{}!{}", "é".repeat(900), "y".repeat(900));
        let (shown, at) = excerpt(&text, 1800);
        assert_eq!(shown, format!("...{}!{}...", "é".repeat(60), "y".repeat(59)));
        assert!(shown[at..].starts_with('!'));
    }
}
