//! Where documents come from: text files, globs of files, JSONL.
//!
//! A corpus is an index: file, byte range and content hash of each document. Texts are read when a row needs them,
//! so memory and start-up time do not grow with tokenised data. The scan reads every file once to find the lines,
//! to refuse what is not UTF-8 or empty before any step is taken, and to hash. The hash does three jobs: it decides
//! the held-out side (equal documents land on one side), it makes a fingerprint that a resumed run must match, and
//! it notices a file that changes under a running job.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::chat::{ChatTemplate, Message};
use crate::error::TrainError;
use crate::rng::mix;
use crate::tokens::Tokenizer;

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
}

/// An index of documents.
#[derive(Clone, Debug)]
pub struct Corpus {
    files: Vec<PathBuf>,
    entries: Vec<Entry>,
    skipped: Vec<Skipped>,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

impl Corpus {
    /// Finds and checks every document. Files are taken in the order of their paths, each once.
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
        let mut corpus =
            Self { files, entries: Vec::new(), skipped: Vec::new(), tokenizer, template };
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
            BadDocument::Error => Err(TrainError::data(
                &path,
                line,
                format!(
                    "{reason}; repair it, list it in data.exclude, or set data.on_bad_document = \"skip\""
                ),
            )),
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
        let record: Record = serde_json::from_str(text)
            .map_err(|e| format!("the line is not a JSON document: {e}"))?;
        match (record.text, record.messages, &self.template) {
            (Some(text), None, _) if text.trim().is_empty() => {
                Err("the document is empty".to_owned())
            }
            (Some(text), None, _) => Ok(Parts { text, learned: None }),
            (None, Some(messages), Some(template)) => {
                let rendered = template.render(&messages)?;
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
                "the document changed while it was in use; put back what it was and resume";
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
        // A template writes its own special tokens; the first one must not be doubled.
        if let Some(bos) = self.tokenizer.bos().filter(|bos| document.tokens.first() != Some(bos)) {
            document.tokens.insert(0, bos);
            document.learned.insert(0, false);
        }
        if let Some(eos) = self.tokenizer.eos().filter(|eos| document.tokens.last() != Some(eos)) {
            let ends_learned = document.learned.last().copied().unwrap_or(false);
            document.tokens.push(eos);
            document.learned.push(ends_learned);
        }
        Ok(document)
    }
}

#[derive(Deserialize)]
struct Record {
    text: Option<String>,
    messages: Option<Vec<Message>>,
}

struct Parts {
    text: String,
    learned: Option<Vec<std::ops::Range<usize>>>,
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
    files.sort();
    files.dedup();
    Ok(files)
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
