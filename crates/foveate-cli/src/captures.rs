//! Captured buffers and run-time scalars given on the command line.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use foveate::mods::Program;
use foveate::mods::text::Names;
use foveate::tensor::ElementType;
use foveate::{AnyBuffer, BufferData, ScalarValue};

use crate::failure::Failure;
use crate::number::number;
use crate::output::{bytes, is_open, is_pipe};
use crate::progress::{PATIENCE, waiting};

/// What the texts of a command may name.
#[derive(Debug, Default, clap::Args)]
pub struct Captures {
    /// Lengths of documents one after another; their ids become the buffer `doc`, which
    /// `document` reads
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', value_parser = number::<usize>)]
    pub doc_lens: Vec<usize>,
    /// A captured buffer: numbers (or true and false) with commas between, or a file of them.
    /// `NAME[8,64]=...` gives it axes
    #[arg(long = "buffer", value_name = "NAME=VALUES|FILE")]
    buffers: Vec<String>,
    /// A run-time scalar: a number, true or false
    #[arg(long = "scalar", value_name = "NAME=VALUE")]
    scalars: Vec<String>,
}

impl Captures {
    /// Length of all documents together.
    pub fn documents_len(&self) -> Option<usize> {
        let all = self.doc_lens.iter().fold(0usize, |sum, &n| sum.saturating_add(n));
        (!self.doc_lens.is_empty()).then_some(all)
    }

    /// Memory of the document ids that `texts` read, for sequences of up to `len` positions.
    pub fn id_bytes<'a>(&self, len: usize, texts: impl IntoIterator<Item = &'a String>) -> f64 {
        let made = texts.into_iter().filter(|text| text.contains("documents")).count();
        let given = usize::from(!self.doc_lens.is_empty());
        ((made + given) * len) as f64 * ID_BYTES
    }

    /// Refuses what is given for nothing: what neither `texts` name nor the `programs` read that
    /// they became, as `document` reads `doc`.
    ///
    /// # Errors
    /// Names the option and what it gives.
    pub fn read_by<'a>(
        &self,
        texts: impl IntoIterator<Item = &'a String>,
        programs: impl IntoIterator<Item = &'a Program>,
    ) -> Result<(), Failure> {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let mut read: HashSet<&str> =
            texts.into_iter().flat_map(|text| text.split(|c| !word(c))).collect();
        let buffers = programs.into_iter().flat_map(|p| p.graph().buffers());
        read.extend(buffers.map(AnyBuffer::name));
        match self.given().find(|(_, name)| !read.contains(name)) {
            None => Ok(()),
            Some((option, name)) => {
                let message = format!("--{option}: neither mask nor score reads `{name}`");
                Err(Failure::usage(message).help("leave it out, or name it in a text"))
            }
        }
    }

    /// A failure to read `text`, with the remedy where floats are expected and a buffer of whole numbers that it
    /// names has none.
    pub fn hinted(&self, text: &str, failure: Failure) -> Failure {
        if !failure.says(&["i32", "f32"]) {
            return failure;
        }
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let whole = |given: &&String| {
            let named = text.split(|c| !word(c)).any(|part| part == name_of(given));
            named && buffer(given).is_ok_and(|buffer| buffer.element() == ElementType::I32)
        };
        match self.buffers.iter().find(whole).map(|given| name_of(given)) {
            None => failure,
            Some(name) => failure.help(format!(
                "`{name}` is i32, since none of its numbers has a point: --buffer {name}=1.0,2,3 is f32"
            )),
        }
    }

    /// Every option with the name that it gives.
    fn given(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let lens = self.documents_len().map(|_| ("doc-lens", "doc"));
        let buffers = self.buffers.iter().map(|given| ("buffer", name_of(given)));
        let scalars = self.scalars.iter().map(|given| ("scalar", name_of(given)));
        lens.into_iter().chain(buffers).chain(scalars)
    }

    /// Refuses what is no name, and a name that is given twice.
    fn named_once(&self) -> Result<(), Failure> {
        let mut known: Vec<(&str, &str)> = Vec::new();
        for (option, name) in self.given() {
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            if !name.chars().all(word) || !name.starts_with(|c| word(c) && !c.is_ascii_digit()) {
                let name = shortened(name);
                let message = format!("--{option}: `{name}` is no name that a text can read");
                return Err(Failure::usage(message)
                    .help("a name has letters, digits and _, and begins with no digit"));
            }
            if let Some((other, _)) = known.iter().find(|(_, known)| *known == name) {
                let twice = match *other == option {
                    true => "twice".to_owned(),
                    false => format!("by --{other} and by --{option}"),
                };
                let message = format!("--{option}: `{name}` is given {twice}");
                return Err(Failure::usage(message).help("leave one of them out"));
            }
            known.push((option, name));
        }
        Ok(())
    }

    /// The names, for texts about sequences of up to `len` positions. Document ids are made for
    /// these only.
    pub fn names(&self, len: usize) -> Result<Names, Failure> {
        self.named_once()?;
        waiting("reading captured buffers", PATIENCE, || self.read(len))
    }

    fn read(&self, len: usize) -> Result<Names, Failure> {
        let mut names = Names::new().positions(len);
        if let Some(total) = self.documents_len() {
            if total < len {
                let message =
                    format!("--doc-lens: the documents have {total} positions in all, not {len}");
                return Err(Failure::usage(message)
                    .help("add a document, or leave --len out: it is the sum then"));
            }
            let mut ids = Vec::with_capacity(len);
            for (&n, id) in self.doc_lens.iter().zip(0..) {
                ids.resize(ids.len().saturating_add(n).min(len), id);
            }
            names = names.buffer(foveate::Buffer::<i32>::vector("doc", ids).any());
        }
        for given in &self.buffers {
            names = names.buffer(&buffer(given)?);
        }
        for given in &self.scalars {
            let (name, value) = given.split_once('=').ok_or_else(|| malformed("scalar", given))?;
            let value = value.trim();
            let value = match (value.parse(), value.parse(), value.parse()) {
                (Ok(v), _, _) => ScalarValue::Bool(v),
                (_, Ok(v), _) => ScalarValue::I32(v),
                (_, _, Ok(v)) if value.contains(['.', 'e', 'E', 'n']) => ScalarValue::F32(v),
                (_, _, Ok(_)) => {
                    let message = format!("--scalar {given}: integers lie in ±{}", i32::MAX);
                    return Err(Failure::usage(message).help("write a float with a point: 1.0"));
                }
                _ => return Err(Failure::usage(format!("--scalar {given}: no number"))),
            };
            names = names.scalar(name.trim(), value);
        }
        Ok(names)
    }
}

/// The name in `NAME=VALUE` or `NAME[SHAPE]=VALUES`.
fn name_of(given: &str) -> &str {
    given.split(['=', '[']).next().unwrap_or_default().trim()
}

/// Memory of a document's id: itself, and its part of the table of ranges.
const ID_BYTES: f64 = 6.0;

/// The longest file of numbers that is read.
const FILE_BYTES: u64 = 256 << 20;

fn malformed(option: &str, given: &str) -> Failure {
    Failure::usage(format!("--{option} {given}: a name, `=` and a value are expected"))
}

/// `NAME=VALUES`, `NAME[SHAPE]=VALUES` or the same with a file.
fn buffer(given: &str) -> Result<AnyBuffer, Failure> {
    let fail = |reason: String| Failure::usage(format!("--buffer {given}: {reason}"));
    let (name, values) = given.split_once('=').ok_or_else(|| malformed("buffer", given))?;
    let (name, shape) = match name.trim().strip_suffix(']').and_then(|n| n.split_once('[')) {
        None => (name.trim(), None),
        Some((name, axes)) => {
            let axes: Result<Vec<usize>, _> = axes.split(',').map(|n| n.trim().parse()).collect();
            (name, Some(axes.map_err(|_| fail("the axes in [ ] are lengths".into()))?))
        }
    };
    let data = match numbers(values) {
        Ok(data) => data,
        Err(word) => {
            let text = read(values).map_err(|e| {
                let word = shortened(word);
                fail(format!("`{word}` is no number, and as a file it cannot be read: {e}"))
            })?;
            if text.trim().is_empty() {
                return Err(fail("the file is empty; it holds numbers with commas between".into()));
            }
            let wrong = |word| fail(format!("`{}` in the file is no number", shortened(word)));
            numbers(&text).map_err(wrong)?
        }
    };
    let shape = shape.unwrap_or_else(|| vec![data.len()]);
    AnyBuffer::new(name, &shape, data, false).map_err(|e| fail(e.to_string()))
}

/// The text of a file of numbers, which may be a pipe or a device that never ends.
fn read(path: &str) -> io::Result<String> {
    let mut text = String::new();
    // Opening it would wait for somebody who writes.
    if is_pipe(&fs::metadata(path)?) && !is_open(Path::new(path)) {
        return Err(io::Error::other("it is a pipe, not a file"));
    }
    fs::File::open(path)?.take(FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > FILE_BYTES {
        let limit = bytes(FILE_BYTES as f64);
        return Err(io::Error::other(format!("it is longer than the {limit} that are read")));
    }
    Ok(text)
}

/// The beginning of a word, as far as a message shows it.
fn shortened(word: &str) -> String {
    let mut shown: String = word.chars().take(40).flat_map(char::escape_default).collect();
    if word.chars().nth(40).is_some() {
        shown += "...";
    }
    shown
}

/// All words of a text, with commas or blanks between, as the narrowest type that holds them; or
/// the first that is no number.
fn numbers(text: &str) -> Result<BufferData, &str> {
    let separate = |c: char| c == ',' || c.is_whitespace();
    let words = || text.split(separate).filter(|word| !word.is_empty());
    if let Ok(bools) = words().map(str::parse).collect() {
        return Ok(BufferData::Bool(bools));
    }
    if let Ok(ints) = words().map(str::parse).collect() {
        return Ok(BufferData::I32(ints));
    }
    let floats = words().map(|word| word.parse().map_err(|_| word));
    Ok(BufferData::F32(floats.collect::<Result<_, _>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(given: &str) -> String {
        match buffer(given).expect_err("it is malformed") {
            Failure::Usage(report) => report.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_buffer_has_the_narrowest_type_and_the_axes_given() {
        let b = buffer("doc=0,0,1").expect("numbers");
        assert_eq!((b.name(), b.to_data()), ("doc", BufferData::I32(vec![0, 0, 1])));
        let b = buffer("bias[2,2]=0,1.5,2,3").expect("numbers");
        assert_eq!((b.shape(), b.to_data()), (&[2, 2][..], BufferData::F32(vec![0., 1.5, 2., 3.])));
        let b = buffer("keep=true,false").expect("truth values");
        assert_eq!(b.to_data(), BufferData::Bool(vec![true, false]));
    }

    #[test]
    fn a_buffer_may_come_from_a_file() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("ids.txt");
        fs::write(&file, "3 4\n5\n").expect("written");
        let b = buffer(&format!("ids={}", file.display())).expect("numbers");
        assert_eq!(b.to_data(), BufferData::I32(vec![3, 4, 5]));
    }

    #[test]
    fn what_is_no_name_or_is_given_twice_is_refused() {
        let of = |lens: &[usize], buffers: &[&str], scalars: &[&str]| {
            let texts = |all: &[&str]| all.iter().map(|&text| text.to_owned()).collect();
            let (buffers, scalars) = (texts(buffers), texts(scalars));
            let given = Captures { doc_lens: lens.to_vec(), buffers, scalars };
            given.names(1).expect_err("a name is wrong").message()
        };
        assert_eq!(of(&[], &["x=1", "x[1]=2"], &[]), "--buffer: `x` is given twice");
        assert_eq!(
            of(&[], &["x=1"], &["x=2"]),
            "--scalar: `x` is given by --buffer and by --scalar"
        );
        let both = "--buffer: `doc` is given by --doc-lens and by --buffer";
        assert_eq!(of(&[4], &["doc=1"], &[]), both);
        for wrong in ["", " ", "1x", "a-b", "é"] {
            let told = of(&[], &[&format!("{wrong}=1")], &[]);
            assert!(told.ends_with("is no name that a text can read"), "{wrong}: {told}");
        }
    }

    #[test]
    fn document_ids_are_made_for_the_positions_that_are_looked_at() {
        let captures = Captures { doc_lens: vec![3, usize::MAX, 9], ..Captures::default() };
        assert_eq!(captures.documents_len(), Some(usize::MAX));
        let names = captures.names(5).expect("long enough");
        let ids = names.get_buffer("doc").expect("made of the lengths").to_data();
        assert_eq!(ids, BufferData::I32(vec![0, 0, 0, 1, 1]));
        let texts = ["documents(4) | document".to_owned()];
        assert_eq!(captures.id_bytes(5, &texts), 10.0 * ID_BYTES);
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_never_ends_is_refused() {
        let endless = said("doc=/dev/zero");
        let why = "as a file it cannot be read: it is longer than the 256.0 MiB that are read";
        assert!(endless.ends_with(why), "{endless}");
    }

    #[test]
    fn what_is_malformed_is_said_with_the_argument() {
        assert_eq!(said("doc"), "--buffer doc: a name, `=` and a value are expected");
        assert_eq!(said("doc[x]=1"), "--buffer doc[x]=1: the axes in [ ] are lengths");
        assert_eq!(
            said("doc[3]=1,2"),
            "--buffer doc[3]=1,2: buffer `doc` of shape [3] cannot hold 2 elements"
        );
        let missing = said("doc=nowhere.txt");
        assert!(
            missing.starts_with(
                "--buffer doc=nowhere.txt: `nowhere.txt` is no number, and as a file it cannot be \
                 read: "
            ),
            "{missing}"
        );
    }
}
