//! Where documents come from: text files, globs of files, JSONL.
//!
//! A corpus is an index: file, byte range and content hash of each document. Texts are read when a row needs them,
//! so memory and start-up time do not grow with tokenised data. The scan reads every file once to find the lines,
//! to refuse what is not UTF-8 or empty before any step is taken, and to hash. The hash does three jobs: it decides
//! the held-out side (equal documents land on one side), it makes a fingerprint that a resumed run must match, and
//! it notices a file that changes under a running job.

mod counts;
mod files;
#[cfg(test)]
mod tests;
mod text;

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::chat::{ChatTemplate, RenderError};
use crate::error::{TrainError, TrainErrorKind};
use crate::tokens::Tokenizer;
use foveate::tensor::hash::Fnv;
use foveate::tensor::random::mix;
use text::Parts;

pub(crate) use counts::TokenCounts;

/// The longest document that is read, a file or a line of JSON, in bytes.
const LONGEST: u64 = 1 << 30;

/// How a file divides into documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// `.jsonl` files by line, all others whole.
    #[default]
    Auto,
    /// One document a file.
    Text,
    /// One JSON object a line, with `text` or `messages`.
    Jsonl,
}

/// What to do with a document that is empty or not UTF-8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BadDocument {
    /// Stop with an error that names file and line.
    #[default]
    Error,
    /// Leave it out and count it.
    Skip,
}

/// A document left out, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Skipped {
    /// The file.
    pub file: PathBuf,
    /// The line, counted from one, in a JSONL file.
    pub line: Option<usize>,
    /// Why.
    pub reason: String,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, reason } = self;
        let line = line.map_or(String::new(), |line| format!(":{line}"));
        write!(f, "{}{line}: {reason}", file.display())
    }
}

#[derive(Clone, Debug)]
struct Entry {
    file: usize,
    line: Option<usize>,
    start: u64,
    bytes: usize,
    hash: u64,
}

impl Entry {
    fn of(file: usize, line: Option<usize>, start: u64, bytes: &[u8]) -> Self {
        Self { file, line, start, bytes: bytes.len(), hash: hash(bytes) }
    }
}

/// A document's tokens, ready to be packed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    /// Token ids, the opening and closing tokens included.
    pub tokens: Vec<u32>,
    /// Whether each token is to be predicted from the ones before it.
    pub learned: Vec<bool>,
}

/// Who asked for the documents: the words in which errors say what to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Asker {
    /// A recipe, with its fields.
    #[default]
    Recipe,
    /// A command, with its options.
    Command,
}

impl Asker {
    fn on_bad_document(self) -> &'static str {
        match self {
            Self::Recipe => {
                "repair it, list it in data.exclude, or set data.on_bad_document = \"skip\""
            }
            Self::Command => "repair it, leave the file out, or pass --skip-bad",
        }
    }

    /// Where files are named.
    fn names(self) -> &'static str {
        match self {
            Self::Recipe => " in data.files",
            Self::Command => "",
        }
    }

    fn on_change(self) -> &'static str {
        match self {
            Self::Recipe => "put back what it was and resume",
            Self::Command => "give the command again when nothing writes to it",
        }
    }
}

/// Which files to read and how; the data section of a recipe with its paths resolved.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Folder that relative patterns start from.
    pub root: PathBuf,
    /// Glob patterns or plain paths.
    pub files: Vec<String>,
    /// Glob patterns of files to leave out, relative to `root`.
    pub exclude: Vec<String>,
    /// How files divide into documents.
    pub format: Format,
    /// The policy for unusable documents.
    pub on_bad_document: BadDocument,
    /// Who asked.
    pub asker: Asker,
}

/// An index of documents.
#[derive(Clone, Debug)]
pub struct Corpus {
    files: Vec<PathBuf>,
    entries: Vec<Entry>,
    skipped: Vec<Skipped>,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    asker: Asker,
}

impl Corpus {
    /// Finds and checks every document. Files are taken in the order of their paths, each once under
    /// however many names patterns and links find it. `interrupted` is asked before each document and while one
    /// is rendered.
    ///
    /// # Errors
    /// If a pattern matches nothing, a file cannot be read, or a document is empty, not UTF-8 or not the JSON that
    /// is expected and the policy is [`BadDocument::Error`]; if the chat template takes too much; or if the caller
    /// wants to stop.
    pub fn scan(
        sources: &Sources,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Self, TrainError> {
        let files = files::find(sources)?;
        let (entries, skipped) = (Vec::new(), Vec::new());
        let mut corpus =
            Self { files, entries, skipped, tokenizer, template, asker: sources.asker };
        for index in 0..corpus.files.len() {
            corpus.scan_file(index, sources, interrupted)?;
        }
        if corpus.entries.is_empty() {
            let message = match (corpus.files.first(), corpus.skipped.first()) {
                (Some(_), Some(first)) => format!("no usable document; {}", first.reason),
                (Some(_), None) => "has no document in it".to_owned(),
                (None, _) => "no file is left after data.exclude".to_owned(),
            };
            let place = corpus.files.first().unwrap_or(&sources.root);
            return Err(TrainError::data(place, None, message));
        }
        Ok(corpus)
    }

    fn scan_file(
        &mut self,
        index: usize,
        sources: &Sources,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<(), TrainError> {
        let path = self.files[index].clone();
        let failed = |e: std::io::Error| unreadable(&path, &e);
        let lines = match sources.format {
            Format::Text => false,
            Format::Jsonl => true,
            Format::Auto => path.extension().is_some_and(|extension| extension == "jsonl"),
        };
        if !lines {
            let file = File::open(&path).map_err(failed)?;
            let len = file.metadata().map_err(failed)?.len();
            if len > LONGEST {
                let message = format!(
                    "the document has {len} bytes, of which {LONGEST} are read; cut it into several \
                     files, or write it as .jsonl, a document a line"
                );
                return Err(TrainError::data(&path, None, message));
            }
            let mut bytes = Vec::with_capacity(len as usize);
            file.take(LONGEST).read_to_end(&mut bytes).map_err(failed)?;
            let entry = Entry::of(index, None, 0, &bytes);
            return self.add(entry, &bytes, sources.on_bad_document, interrupted);
        }
        let mut reader = BufReader::new(File::open(&path).map_err(failed)?);
        let (mut line, mut number, mut start) = (Vec::new(), 0, 0);
        loop {
            line.clear();
            number += 1;
            let len = reader.by_ref().take(LONGEST).read_until(b'\n', &mut line);
            match len.map_err(failed)? as u64 {
                0 => return Ok(()),
                LONGEST if !line.ends_with(b"\n") => {
                    let message = "the line is longer than 1 GiB; a document takes one line";
                    return Err(TrainError::data(&path, Some(number), message));
                }
                len => {
                    let entry = Entry::of(index, Some(number), start, &line);
                    self.add(entry, &line, sources.on_bad_document, interrupted)?;
                    start += len;
                }
            }
        }
    }

    fn add(
        &mut self,
        entry: Entry,
        bytes: &[u8],
        policy: BadDocument,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<(), TrainError> {
        if interrupted() {
            return Err(TrainErrorKind::Interrupted.into());
        }
        let line = entry.line;
        let template = self.template.as_ref();
        let Err(wrong) = text::parts(bytes, line.is_some(), template, interrupted) else {
            self.entries.push(entry);
            return Ok(());
        };
        let path = &self.files[entry.file];
        match (wrong, policy) {
            (RenderError::Document(reason), BadDocument::Skip) => {
                self.skipped.push(Skipped { file: path.clone(), line, reason });
                Ok(())
            }
            (RenderError::Document(reason), BadDocument::Error) => {
                let message = format!("{reason}; {}", self.asker.on_bad_document());
                Err(TrainError::data(path, line, message))
            }
            (wrong, _) => Err(unrendered(path, line, wrong)),
        }
    }

    /// The number of documents.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no document; never true of a corpus that was scanned.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The files read, in order.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The documents left out, in order.
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Where document `index` stands: its file, and its line, counted from one, in a JSONL file.
    pub fn place(&self, index: usize) -> (&Path, Option<usize>) {
        let entry = &self.entries[index];
        (&self.files[entry.file], entry.line)
    }

    /// The size of document `index` in bytes; none for a line of JSON, whose text is shorter.
    pub fn text_bytes(&self, index: usize) -> Option<usize> {
        let entry = &self.entries[index];
        entry.line.is_none().then_some(entry.bytes)
    }

    /// The size of document `index` where it stands, in bytes.
    pub(crate) fn bytes(&self, index: usize) -> usize {
        self.entries[index].bytes
    }

    /// A hash of all contents in order: two corpora that give the same documents have the same fingerprint.
    pub fn fingerprint(&self) -> u64 {
        self.entries.iter().fold(0, |all, entry| mix(all ^ entry.hash))
    }

    /// The indices of the training and of the held-out documents: about `fraction` of the documents are held out,
    /// chosen by content and `seed`. A fraction above zero holds out at least one document of two or more; at least
    /// one is always trained on.
    pub fn split(&self, fraction: f64, seed: u64) -> (Vec<usize>, Vec<usize>) {
        let draw = |index: usize| mix(self.entries[index].hash ^ mix(seed));
        let limit = (fraction.clamp(0.0, 1.0) * u64::MAX as f64) as u64;
        let (mut held_out, mut train): (Vec<usize>, Vec<usize>) =
            (0..self.len()).partition(|&index| fraction > 0.0 && draw(index) < limit);
        if fraction > 0.0 && held_out.is_empty() && train.len() > 1 {
            let lowest =
                (0..train.len()).min_by_key(|&i| draw(train[i])).expect("two documents or more");
            held_out.push(train.remove(lowest));
        }
        if train.is_empty() {
            train.extend(held_out.pop());
        }
        (train, held_out)
    }

    /// Reads and tokenises document `index`.
    ///
    /// # Errors
    /// If its file has gone or changed since the scan.
    pub fn document(&self, index: usize) -> Result<Document, TrainError> {
        let entry = &self.entries[index];
        let path = &self.files[entry.file];
        let mut bytes = vec![0; entry.bytes];
        let read = File::open(path).and_then(|file| {
            let mut file = BufReader::new(file);
            file.seek(SeekFrom::Start(entry.start))?;
            file.read_exact(&mut bytes)
        });
        if read.is_err() || hash(&bytes) != entry.hash {
            let message =
                format!("the document changed while it was in use; {}", self.asker.on_change());
            return Err(TrainError::data(path, entry.line, message));
        }
        let template = self.template.as_ref();
        let parts = text::parts(&bytes, entry.line.is_some(), template, &mut || false)
            .map_err(|wrong| unrendered(path, entry.line, wrong))?;
        self.tokenise(&parts)
    }

    fn tokenise(&self, parts: &Parts) -> Result<Document, TrainError> {
        let tokens = self.tokenizer.encode(&parts.text)?;
        let learned = match &parts.learned {
            None => vec![true; tokens.ids.len()],
            Some(spans) => tokens
                .starts
                .iter()
                .map(|start| spans.iter().any(|span| span.contains(start)))
                .collect(),
        };
        let mut document = Document { tokens: tokens.ids, learned };
        let closing = match &parts.learned {
            None => self.tokenizer.closing().to_vec(),
            Some(spans) => {
                let end = self.close_turns(&mut document, &tokens.starts, spans, parts.text.len());
                end.into_iter().collect()
            }
        };
        if !document.tokens.ends_with(&closing) {
            document.learned.extend(closing.iter().map(|_| true));
            document.tokens.extend(closing);
        }
        // A template writes its own special tokens; those that open a text are not doubled.
        let opened = self.tokenizer.open(&mut document.tokens);
        document.learned.splice(..0, (0..opened).map(|_| false));
        Ok(document)
    }

    /// Ends the learning of each turn in `spans` with the last token in it that ends a turn: what a template writes
    /// after that is not the assistant's. Returns what is still to be added at the end: the token that ends a text,
    /// where the last turn is the assistant's and the last token learned in it ends no turn.
    fn close_turns(
        &self,
        document: &mut Document,
        starts: &[usize],
        spans: &[Range<usize>],
        bytes: usize,
    ) -> Option<u32> {
        let stops = self.tokenizer.stops();
        let mut closed = true;
        for span in spans {
            let first = starts.partition_point(|&start| start < span.start);
            let turn = first..starts.partition_point(|&start| start < span.end);
            let end = document.tokens[turn.clone()].iter().rposition(|token| stops.contains(token));
            if let Some(end) = end {
                document.learned[first + end + 1..turn.end].fill(false);
            }
            closed = end.is_some() || span.end < bytes;
        }
        let never = self.tokenizer.said().eos == Some(false);
        self.tokenizer.eos().filter(|_| !closed && !never)
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> TrainError {
    TrainError::data(path, None, format!("could not be read: {error}"))
}

fn unrendered(file: &Path, line: Option<usize>, error: RenderError) -> TrainError {
    match error {
        RenderError::Interrupted => TrainErrorKind::Interrupted.into(),
        RenderError::Document(reason) | RenderError::Template(reason) => {
            TrainError::data(file, line, reason)
        }
    }
}

/// FNV-1a over the bytes, then mixed.
fn hash(bytes: &[u8]) -> u64 {
    mix(Fnv::of(bytes))
}
