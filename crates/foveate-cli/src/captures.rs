//! Captured buffers and run-time scalars given on the command line.

use std::fs;

use foveate::mods::text::Names;
use foveate::{AnyBuffer, BufferData, ScalarValue};

use crate::failure::Failure;
use crate::number::number;

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
        (!self.doc_lens.is_empty()).then(|| self.doc_lens.iter().sum())
    }

    /// The names, for texts about sequences of up to `len` positions.
    pub fn names(&self, len: usize) -> Result<Names, Failure> {
        let mut names = Names::new();
        if let Some(total) = self.documents_len() {
            if total < len {
                let message =
                    format!("--doc-lens: the documents have {total} positions in all, not {len}");
                return Err(Failure::usage(message)
                    .help("add a document, or leave --len out: it is the sum then"));
            }
            let ids = self.doc_lens.iter().zip(0..).flat_map(|(&n, id)| vec![id; n]).collect();
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
    let words = |text: &str| -> Vec<String> {
        let separate = |c: char| c == ',' || c.is_whitespace();
        text.split(separate).filter(|w| !w.is_empty()).map(str::to_owned).collect()
    };
    let data = match numbers(&words(values)) {
        Ok(data) => data,
        Err(word) => {
            let text = fs::read_to_string(values).map_err(|e| {
                fail(format!("`{word}` is no number, and as a file it cannot be read: {e}"))
            })?;
            numbers(&words(&text)).map_err(|w| fail(format!("`{w}` in the file is no number")))?
        }
    };
    let shape = shape.unwrap_or_else(|| vec![data.len()]);
    AnyBuffer::new(name, &shape, data, false).map_err(|e| fail(e.to_string()))
}

/// All words as the narrowest type that holds them; or the first that is no number.
fn numbers(words: &[String]) -> Result<BufferData, String> {
    if let Ok(bools) = words.iter().map(|w| w.parse()).collect() {
        return Ok(BufferData::Bool(bools));
    }
    if let Ok(ints) = words.iter().map(|w| w.parse()).collect() {
        return Ok(BufferData::I32(ints));
    }
    let floats = words.iter().map(|w| w.parse().map_err(|_| w.clone()));
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
        assert_eq!((b.name(), b.data()), ("doc", &BufferData::I32(vec![0, 0, 1])));
        let b = buffer("bias[2,2]=0,1.5,2,3").expect("numbers");
        assert_eq!((b.shape(), b.data()), (&[2, 2][..], &BufferData::F32(vec![0., 1.5, 2., 3.])));
        let b = buffer("keep=true,false").expect("truth values");
        assert_eq!(b.data(), &BufferData::Bool(vec![true, false]));
    }

    #[test]
    fn a_buffer_may_come_from_a_file() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("ids.txt");
        fs::write(&file, "3 4\n5\n").expect("written");
        let b = buffer(&format!("ids={}", file.display())).expect("numbers");
        assert_eq!(b.data(), &BufferData::I32(vec![3, 4, 5]));
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
