//! Where documents come from: text files, globs of files, JSONL.
//!
//! A corpus is an index: file, byte range and content hash of each document. Texts are read when a row needs them,
//! so memory and start-up time do not grow with tokenised data. The scan reads every file once to find the lines,
//! to refuse what is not UTF-8 or empty before any step is taken, and to hash. The hash does three jobs: it decides
//! the held-out side (equal documents land on one side), it makes a fingerprint that a resumed run must match, and
//! it notices a file that changes under a running job.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::chat::{ChatTemplate, Message};
use crate::error::TrainError;
use crate::tokens::Tokenizer;
use foveate::tensor::random::mix;

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

#[derive(Clone, Debug)]
struct Entry {
    file: usize,
    line: Option<usize>,
    start: u64,
    bytes: usize,
    hash: u64,
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
    /// however many names patterns and links find it.
    ///
    /// # Errors
    /// If a pattern matches nothing, a file cannot be read, or a document is empty, not UTF-8 or not the JSON that
    /// is expected and the policy is [`BadDocument::Error`].
    pub fn scan(
        sources: &Sources,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
    ) -> Result<Self, TrainError> {
        let files = find_files(sources)?;
        let (entries, skipped) = (Vec::new(), Vec::new());
        let mut corpus =
            Self { files, entries, skipped, tokenizer, template, asker: sources.asker };
        for index in 0..corpus.files.len() {
            corpus.scan_file(index, sources)?;
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

    fn scan_file(&mut self, index: usize, sources: &Sources) -> Result<(), TrainError> {
        let path = self.files[index].clone();
        let bytes = std::fs::read(&path).map_err(|e| unreadable(&path, &e))?;
        let lines = match sources.format {
            Format::Text => false,
            Format::Jsonl => true,
            Format::Auto => path.extension().is_some_and(|extension| extension == "jsonl"),
        };
        if !lines {
            return self.add(index, None, 0, &bytes, sources.on_bad_document);
        }
        let mut start = 0;
        for (number, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
            self.add(index, Some(number + 1), start, line, sources.on_bad_document)?;
            start += line.len();
        }
        Ok(())
    }

    fn add(
        &mut self,
        file: usize,
        line: Option<usize>,
        start: usize,
        bytes: &[u8],
        policy: BadDocument,
    ) -> Result<(), TrainError> {
        let entry =
            Entry { file, line, start: start as u64, bytes: bytes.len(), hash: hash(bytes) };
        let Err(reason) = self.parts(line.is_some(), bytes).map(|_| ()) else {
            self.entries.push(entry);
            return Ok(());
        };
        let path = self.files[file].clone();
        match policy {
            BadDocument::Skip => {
                self.skipped.push(Skipped { file: path, line, reason });
                Ok(())
            }
            BadDocument::Error => {
                let message = format!("{reason}; {}", self.asker.on_bad_document());
                Err(TrainError::data(&path, line, message))
            }
        }
    }

    /// The text of a document and, for a conversation, the byte ranges to learn from.
    fn parts(&self, json: bool, bytes: &[u8]) -> Result<Parts, String> {
        let text = std::str::from_utf8(bytes)
            .map_err(|e| format!("the document is not UTF-8 (byte {} of it)", e.valid_up_to()))?;
        if text.trim().is_empty() {
            return Err("the document is empty".to_owned());
        }
        if !json {
            return Ok(Parts { text: text.to_owned(), learned: None });
        }
        // Without the end of the line, of which an error would say that it is the next one.
        let record: Record = serde_json::from_str(text.trim_end()).map_err(|e| {
            let told = e.to_string();
            let why = told.rsplit_once(" at line ").map_or(told.as_str(), |(why, _)| why);
            format!("the line is not a JSON document: {why} (column {})", e.column())
        })?;
        match (record.text, record.messages, &self.template) {
            (Some(text), None, _) if text.trim().is_empty() => {
                Err("the document is empty".to_owned())
            }
            (Some(text), None, _) => Ok(Parts { text, learned: None }),
            (None, Some(messages), Some(template)) => {
                let rendered = template.render(&said(messages)?)?;
                Ok(Parts { text: rendered.text, learned: Some(rendered.learned) })
            }
            (None, Some(_), None) => {
                Err("the line has `messages` but there is no chat template".to_owned())
            }
            _ => Err("the line needs either a string `text` or a list `messages`".to_owned()),
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
        let parts = self
            .parts(entry.line.is_some(), &bytes)
            .map_err(|reason| TrainError::data(path, entry.line, reason))?;
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

#[derive(Deserialize)]
struct Record {
    text: Option<String>,
    messages: Option<Vec<Turn>>,
}

/// A message as files have it: what it says may be no text.
#[derive(Deserialize)]
struct Turn {
    role: String,
    content: Option<Value>,
}

/// The messages of a conversation, or which of them has no text and what to do.
fn said(turns: Vec<Turn>) -> Result<Vec<Message>, String> {
    let message = |(i, turn): (usize, Turn)| {
        let wrong = match turn.content {
            Some(Value::String(content)) => return Ok(Message { role: turn.role, content }),
            None | Some(Value::Null) => {
                "no text (content is null or missing, as where a tool is called); give it a text, \
                 or leave the conversation out"
            }
            Some(Value::Array(_)) => {
                "a list of parts for content; only text is learned: write it as one string"
            }
            Some(_) => "a content that is no string; write it as one",
        };
        Err(format!("message {} ({}) has {wrong}", i + 1, turn.role))
    };
    turns.into_iter().enumerate().map(message).collect()
}

struct Parts {
    text: String,
    learned: Option<Vec<Range<usize>>>,
}

fn unreadable(path: &Path, error: &std::io::Error) -> TrainError {
    TrainError::data(path, None, format!("could not be read: {error}"))
}

/// FNV-1a over the bytes, then mixed.
fn hash(bytes: &[u8]) -> u64 {
    mix(bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    }))
}

fn find_files(sources: &Sources) -> Result<Vec<PathBuf>, TrainError> {
    let root = sources.root.as_path();
    let shown = if root.as_os_str().is_empty() { Path::new(".") } else { root };
    let refuse = |pattern: &str, e: &dyn std::fmt::Display| {
        TrainError::data(shown, None, format!("`{pattern}` is not a file pattern: {e}"))
    };
    let mut excluded = Vec::new();
    for pattern in &sources.exclude {
        excluded.push(glob::Pattern::new(pattern).map_err(|e| refuse(pattern, &e))?);
    }
    if sources.files.is_empty() {
        return Err(TrainError::data(
            shown,
            None,
            "no files are named: set data.files to paths or globs",
        ));
    }
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..Default::default() };
    let escaped = glob::Pattern::escape(&root.to_string_lossy());
    let mut files = Vec::new();
    for pattern in &sources.files {
        let full = Path::new(&escaped).join(pattern);
        let mut found = false;
        for path in
            glob::glob_with(&full.to_string_lossy(), options).map_err(|e| refuse(pattern, &e))?
        {
            let path = path.map_err(|e| unreadable(e.path(), e.error()))?;
            if !path.is_file() {
                continue;
            }
            found = true;
            let relative = path.strip_prefix(root).unwrap_or(&path);
            if !excluded.iter().any(|pattern| pattern.matches_path(relative)) {
                files.push(path);
            }
        }
        if !found {
            return Err(TrainError::data(shown, None, no_match(root, pattern)));
        }
    }
    // Of the names of a file the one nearest to the root stays: the others go through links.
    files.sort_by_cached_key(|path| (path.components().count(), path.clone()));
    let mut known = HashSet::new();
    let mut once = Vec::with_capacity(files.len());
    for path in files {
        if known.insert(identity(&path).map_err(|e| unreadable(&path, &e))?) {
            once.push(path);
        }
    }
    once.sort();
    Ok(once)
}

/// What two names of one file share: device and inode.
#[cfg(unix)]
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    path.metadata().map(|file| (file.dev(), file.ino()))
}

/// What two names of one file share: the path with its links resolved.
#[cfg(not(unix))]
fn identity(path: &Path) -> std::io::Result<PathBuf> {
    path.canonicalize()
}

/// What to say of a pattern that matches no file under `root`.
fn no_match(root: &Path, pattern: &str) -> String {
    if root.join(pattern).is_dir() {
        let inside = Path::new(pattern).join("**/*");
        return format!(
            "`{pattern}` is a folder; write `{}` for the files in it",
            inside.display()
        );
    }
    format!("no file matches `{pattern}`; patterns are relative to this folder")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::Ends;

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
        dir
    }

    fn sources(dir: &tempfile::TempDir, files: &[&str]) -> Sources {
        Sources {
            root: dir.path().to_path_buf(),
            files: files.iter().map(|&file| file.to_owned()).collect(),
            ..Default::default()
        }
    }

    fn scan(sources: &Sources) -> Result<Corpus, TrainError> {
        let template =
            ChatTemplate::new(crate::chat::DEFAULT_TEMPLATE, Path::new("template"), "", "")
                .unwrap();
        Corpus::scan(sources, Tokenizer::bytes(), Some(template))
    }

    #[test]
    fn files_come_sorted_once_and_without_the_excluded() {
        let dir =
            folder(&[("b.rs", b"b"), ("a/z.rs", b"z"), ("a/y.md", b"y"), ("target/t.rs", b"t")]);
        let mut sources = sources(&dir, &["**/*.rs", "b.rs", "**/*.md"]);
        sources.exclude = vec!["target/**".to_owned()];
        let corpus = scan(&sources).unwrap();
        let names: Vec<_> = corpus
            .files()
            .iter()
            .map(|path| path.strip_prefix(dir.path()).unwrap().to_owned())
            .collect();
        assert_eq!(names, [Path::new("a/y.md"), Path::new("a/z.rs"), Path::new("b.rs")]);
        assert_eq!(corpus.document(0).unwrap().tokens, [256, u32::from(b'y'), 256]);
        assert_eq!(corpus.document(0).unwrap().learned, [false, true, true]);
    }

    #[test]
    fn a_document_that_is_not_utf8_or_empty_is_an_error_with_its_place() {
        let dir = folder(&[
            ("bad.txt", b"ok\xff"),
            ("empty.txt", b" \n"),
            ("c.jsonl", b"{\"text\": \"x\"}\n{\"text\": \"\"}\n"),
        ]);
        for (file, expected) in [
            ("bad.txt", "bad.txt: the document is not UTF-8 (byte 2 of it); repair"),
            ("empty.txt", "empty.txt: the document is empty; repair"),
            ("c.jsonl", "c.jsonl:2: the document is empty; repair"),
        ] {
            let error = scan(&sources(&dir, &[file])).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let mut all = sources(&dir, &["*"]);
        all.on_bad_document = BadDocument::Skip;
        let corpus = scan(&all).unwrap();
        assert_eq!((corpus.len(), corpus.skipped().len()), (1, 3));
        assert_eq!(corpus.skipped()[1].line, Some(2));
    }

    #[cfg(unix)]
    #[test]
    fn a_file_is_one_document_however_many_names_links_give_it() {
        let dir = folder(&[("a.txt", b"a"), ("sub/b.txt", b"b")]);
        let link = |to: &str, name: &str| {
            std::os::unix::fs::symlink(dir.path().join(to), dir.path().join(name)).unwrap();
        };
        link("", "sub/loop");
        link("a.txt", "0.txt");
        std::fs::hard_link(dir.path().join("a.txt"), dir.path().join("sub/z.txt")).unwrap();
        let corpus = scan(&sources(&dir, &["**/*.txt"])).unwrap();
        let found: Vec<u32> =
            (0..corpus.len()).map(|i| corpus.document(i).unwrap().tokens[1]).collect();
        assert_eq!(found, [u32::from(b'a'), u32::from(b'b')]);
        let name = |i: usize| corpus.files()[i].strip_prefix(dir.path()).unwrap().to_owned();
        assert_eq!([name(0), name(1)], [Path::new("0.txt"), Path::new("sub/b.txt")]);
    }

    #[test]
    fn a_message_that_cannot_be_learned_says_what_it_is_and_what_to_do() {
        let told = |line: &str| {
            let dir = folder(&[("c.jsonl", format!("{{\"text\": \"x\"}}\n{line}\n").as_bytes())]);
            scan(&sources(&dir, &["c.jsonl"])).unwrap_err().to_string()
        };
        let talk = |content: &str| {
            format!("{{\"messages\": [{{\"role\": \"user\", \"content\": {content}}}]}}")
        };
        for (line, wanted) in [
            (talk("null"), "c.jsonl:2: message 1 (user) has no text (content is null or missing"),
            (talk("[{\"type\": \"text\"}]"), "c.jsonl:2: message 1 (user) has a list of parts"),
            (talk("3"), "c.jsonl:2: message 1 (user) has a content that is no string"),
            // The line is the file's, not that of the text that was parsed.
            ("{\"text\": ".to_owned(), "c.jsonl:2: the line is not a JSON document: EOF while"),
            ("{\"text\": 3}".to_owned(), "expected a string (column 10); repair"),
        ] {
            let told = told(&line);
            assert!(told.contains(wanted) && !told.contains("at line"), "{line}: {told}");
        }
    }

    #[test]
    fn advice_names_the_options_of_who_asked() {
        let dir = folder(&[("a.txt", b" ")]);
        let asked = Sources { asker: Asker::Command, ..sources(&dir, &["a.txt"]) };
        let told = scan(&asked).unwrap_err().to_string();
        assert!(told.ends_with("or pass --skip-bad") && !told.contains("data."), "{told}");
    }

    #[test]
    fn a_line_that_is_not_json_names_its_line() {
        let dir =
            folder(&[("c.jsonl", b"{\"text\": \"x\"}\n{\"tex\": 1}\n"), ("d.jsonl", b"nope\n")]);
        let error = scan(&sources(&dir, &["c.jsonl"])).unwrap_err().to_string();
        assert!(error.contains("c.jsonl:2: the line needs either"), "{error}");
        let error = scan(&sources(&dir, &["d.jsonl"])).unwrap_err().to_string();
        assert!(error.contains("d.jsonl:1: the line is not a JSON document"), "{error}");
    }

    #[test]
    fn in_a_conversation_only_the_assistants_tokens_are_learned() {
        let line = br#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}"#;
        let dir = folder(&[("chat.jsonl", line)]);
        let document = scan(&sources(&dir, &["chat.jsonl"])).unwrap().document(0).unwrap();
        let learned: Vec<u32> = document
            .tokens
            .iter()
            .zip(&document.learned)
            .filter(|(_, l)| **l)
            .map(|(&t, _)| t)
            .collect();
        assert_eq!(learned, [u32::from(b'y'), u32::from(b'o'), u32::from(b'\n'), 256]);
    }

    #[test]
    fn a_turn_that_the_template_closed_is_not_closed_again() {
        // `|` stands for the token that ends a turn; a newline follows, as in published templates.
        let source = "{% for m in messages %}<{{ m.content }}|\n{% endfor %}{% if add_generation_prompt %}<{% endif %}";
        let template = ChatTemplate::new(source, Path::new("template"), "", "").unwrap();
        let turn = |role: &str, said: &str| format!("{{\"role\":{role:?},\"content\":{said:?}}}");
        let line = |turns: &[String]| format!("{{\"messages\":[{}]}}\n", turns.join(","));
        let (ask, say) = (turn("user", "q"), turn("assistant", "a"));
        let lines =
            line(&[ask.clone(), say.clone(), ask.clone(), say.clone()]) + &line(&[say, ask]);
        let dir = folder(&[("chat.jsonl", lines.as_bytes())]);
        let learned = |tokenizer: Tokenizer, index| {
            let sources = sources(&dir, &["chat.jsonl"]);
            let corpus = Corpus::scan(&sources, tokenizer, Some(template.clone())).unwrap();
            let Document { tokens, learned } = corpus.document(index).unwrap();
            let learned: Vec<u32> =
                tokens.iter().zip(learned).filter(|t| t.1).map(|t| *t.0).collect();
            (learned, *tokens.last().unwrap())
        };
        let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
        let closing = Tokenizer::bytes().and_stops([u32::from(b'|')]);
        assert_eq!(learned(closing.clone(), 0), (ids("a|a|"), u32::from(b'\n')));
        // The last turn is the user's.
        assert_eq!(learned(closing, 1), (ids("a|"), u32::from(b'\n')));
        // Where nothing says that `|` ends a turn, the end of a text does.
        let open = [ids("a|\na|\n"), vec![256]].concat();
        assert_eq!(learned(Tokenizer::bytes(), 0), (open, 256));
        let never = Ends { eos: Some(false), ..Default::default() };
        let none = learned(Tokenizer::bytes().adding(never).unwrap(), 0);
        assert_eq!(none, (ids("a|\na|\n"), u32::from(b'\n')));
    }

    #[test]
    fn a_pattern_without_a_file_says_so() {
        let dir = folder(&[("a.txt", b"a")]);
        let error = scan(&sources(&dir, &["*.rs"])).unwrap_err().to_string();
        assert!(error.contains("no file matches `*.rs`"), "{error}");
    }

    #[test]
    fn the_held_out_side_is_decided_by_content() {
        let texts: Vec<String> = (0..200).map(|i| format!("document {i}")).collect();
        let names: Vec<String> = (0..200).map(|i| format!("{i:03}.txt")).collect();
        let files: Vec<(&str, &[u8])> =
            names.iter().zip(&texts).map(|(name, text)| (name.as_str(), text.as_bytes())).collect();
        let dir = folder(&files);
        let corpus = scan(&sources(&dir, &["*.txt"])).unwrap();
        let (train, held_out) = corpus.split(0.2, 1);
        assert_eq!(train.len() + held_out.len(), 200);
        assert!((20..60).contains(&held_out.len()), "{}", held_out.len());
        assert_eq!(corpus.split(0.2, 1), (train, held_out));
        assert_eq!(corpus.split(0.0, 1).1.len(), 0);
        assert_eq!(corpus.split(1e-9, 1).1.len(), 1);
        assert_eq!(corpus.split(1.0, 1).0.len(), 1);
        let alone = scan(&sources(&folder(&[("a.txt", b"words")]), &["a.txt"])).unwrap();
        for fraction in [0.0, 0.5, 0.999] {
            assert_eq!(alone.split(fraction, 1), (vec![0], vec![]), "{fraction}");
        }
    }

    #[test]
    fn a_corpus_without_a_document_says_why() {
        let dir = folder(&[("none.jsonl", b""), ("blank.txt", b" \n"), ("sub/a.rs", b"a")]);
        let told = |files: &[&str], exclude: &str| {
            let mut sources = sources(&dir, files);
            sources.on_bad_document = BadDocument::Skip;
            sources.exclude = vec![exclude.to_owned()];
            scan(&sources).unwrap_err().to_string()
        };
        assert!(told(&["none.jsonl"], "x").ends_with("none.jsonl: has no document in it"));
        let blank = told(&["blank.txt"], "x");
        assert!(blank.ends_with("blank.txt: no usable document; the document is empty"), "{blank}");
        assert!(told(&["blank.txt"], "*.txt").ends_with("no file is left after data.exclude"));
        assert!(
            told(&["sub"], "x")
                .ends_with("`sub` is a folder; write `sub/**/*` for the files in it")
        );
    }

    #[test]
    fn a_file_that_changes_under_the_run_is_noticed() {
        let dir = folder(&[("a.txt", b"before"), ("b.txt", b"b")]);
        let corpus = scan(&sources(&dir, &["*.txt"])).unwrap();
        std::fs::write(dir.path().join("a.txt"), b"after!").unwrap();
        assert!(
            corpus.document(0).unwrap_err().to_string().contains("changed while it was in use")
        );
        assert!(corpus.document(1).is_ok());
    }
}
