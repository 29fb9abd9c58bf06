//! Reading safetensors files, with every claim of the header checked.
//!
//! A file is eight bytes with the header's length, a JSON header, and the tensors' bytes without
//! gaps. A header is believed only where the file agrees: offsets inside the file, no gap or
//! overlap, and as many bytes as dtype and shape need; what is wrong is said with the tensor's
//! name. Tensors are read in pieces and widened to f32, so that reading takes the same memory for every
//! model. Each is compared with its checksum where one is known, and a value that is not
//! finite is an error: nothing computed from it would be a number.

mod write;

pub use write::{Source, WriteError, write};

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde::Deserialize;
use xxhash_rust::xxh3::Xxh3;

use crate::error::TrainError;
use crate::recipe::SaveDtype;
use crate::whole;

/// The longest header that is believed, in bytes.
const MAX_HEADER: u64 = 100_000_000;

/// Elements converted at once.
const CHUNK: usize = 1 << 16;

impl SaveDtype {
    /// Bytes of an element.
    pub(crate) fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// Its name in a header.
    pub(crate) fn tag(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
        }
    }

    fn of_tag(tag: &str) -> Option<Self> {
        [Self::F32, Self::Bf16, Self::F16].into_iter().find(|dtype| dtype.tag() == tag)
    }
}

/// XXH3 (64 bits) over dtype, shape and bytes of a tensor: it finds damage, not malice.
struct Checksum(Xxh3);

impl Checksum {
    fn new(dtype: &str, shape: &[usize]) -> Self {
        let mut sum = Self(Xxh3::new());
        sum.update(format!("{dtype} {shape:?}").as_bytes());
        sum
    }

    fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn hex(&self) -> String {
        format!("{:016x}", self.0.digest())
    }
}

#[derive(Debug, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// A safetensors file whose header was checked.
#[derive(Debug)]
pub struct Tensors {
    path: PathBuf,
    data_start: u64,
    entries: BTreeMap<String, Entry>,
    sums: Option<BTreeMap<String, String>>,
    /// Tensors that were found to be what their checksums are of.
    verified: BTreeSet<String>,
}

impl Tensors {
    /// Opens a file and checks its header against its size.
    ///
    /// # Errors
    /// If the file is missing, cut short, or its header does not describe it; the message names the tensor.
    pub fn open(path: &Path) -> Result<Self, TrainError> {
        let refuse = |message: String| TrainError::checkpoint(path, message);
        let broken = |e: io::Error| refuse(format!("could not be read: {e}"));
        whole::check_regular(path).map_err(broken)?;
        let mut file = File::open(path).map_err(broken)?;
        let size = file.metadata().map_err(broken)?.len();
        let mut length = [0; 8];
        if size < 8 {
            return Err(refuse(format!(
                "is cut short: a safetensors file has at least 8 bytes, this has {size}; {RESTORE}"
            )));
        }
        file.read_exact(&mut length).map_err(broken)?;
        let length = u64::from_le_bytes(length);
        if length > size - 8 || length > MAX_HEADER {
            return Err(refuse(format!(
                "claims a header of {length} bytes in a file of {size}: it is cut short or not \
                 safetensors; {RESTORE}"
            )));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(broken)?;
        let mut header: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(&header).map_err(|e| {
                refuse(format!("has a header that is not a JSON object: {e}; {RESTORE}"))
            })?;
        header.remove("__metadata__");
        let mut entries = BTreeMap::new();
        for (name, value) in header {
            let entry: Entry = serde_json::from_value(value).map_err(|e| {
                refuse(format!("tensor `{name}` is not described as a tensor: {e}"))
            })?;
            entries.insert(name, entry);
        }
        let (path, data_start) = (path.to_path_buf(), 8 + length);
        let tensors = Self { path, data_start, entries, sums: None, verified: BTreeSet::new() };
        tensors.check(size - 8 - length)?;
        Ok(tensors)
    }

    fn check(&self, bytes: u64) -> Result<(), TrainError> {
        let mut in_order: Vec<(&String, &Entry)> = self.entries.iter().collect();
        in_order.sort_by_key(|(_, entry)| entry.data_offsets);
        let mut end = 0;
        for (name, entry) in in_order {
            let (start, stop) = entry.data_offsets;
            let lies = |message: String| {
                TrainError::checkpoint(
                    &self.path,
                    format!("the header lies about tensor `{name}`: {message}"),
                )
            };
            if start != end || stop < start {
                return Err(lies(format!(
                    "its bytes {start}..{stop} leave a gap or overlap after byte {end}"
                )));
            }
            if let Some(size) = element_bytes(&entry.dtype) {
                let elems = entry.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64));
                if elems.and_then(|n| n.checked_mul(size)) != Some(stop - start) {
                    return Err(lies(format!(
                        "{} of shape {:?} does not fill its {} bytes",
                        entry.dtype,
                        entry.shape,
                        stop - start
                    )));
                }
            }
            if stop > bytes {
                let message = format!(
                    "is cut short: tensor `{name}` ends at byte {stop} of the data, but there are {bytes}; {RESTORE}"
                );
                return Err(TrainError::checkpoint(&self.path, message));
            }
            end = stop;
        }
        if end != bytes {
            let message = format!("has {} bytes that belong to no tensor", bytes - end);
            return Err(TrainError::checkpoint(&self.path, message));
        }
        Ok(())
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| entry.shape.as_slice())
    }

    /// The dtype of a tensor, and the bytes of the file that it is.
    pub fn place(&self, name: &str) -> Option<(&str, Range<u64>)> {
        let Entry { dtype, data_offsets: (start, end), .. } = self.entries.get(name)?;
        Some((dtype, self.data_start + start..self.data_start + end))
    }

    /// Compares every tensor read from now on with its checksum among `sums`.
    pub fn verified_by(mut self, sums: BTreeMap<String, String>) -> Self {
        self.sums = Some(sums);
        self
    }

    /// Reads a tensor of `elems` elements, widened to f32, and hands it on in pieces.
    ///
    /// # Errors
    /// If it is missing, holds no floats that can be read, has another number of elements, cannot be
    /// read, is not what its checksum was taken of, or has a value that is not finite, which may be
    /// found after pieces were handed on; or what `put` returns.
    #[cfg(test)]
    pub fn read(
        &mut self,
        name: &str,
        elems: usize,
        put: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        self.read_part(name, elems, 0..elems, put)
    }

    /// Reads the elements `part` of a tensor of `elems` elements, widened to f32, and hands them on in pieces. A
    /// tensor with a checksum is read whole once, whatever is wanted of it.
    ///
    /// # Errors
    /// If it is missing, holds no floats that can be read, has another number of elements, cannot be
    /// read, is not what its checksum was taken of, or has a value that is not finite, which may be
    /// found after pieces were handed on; or what `put` returns.
    pub fn read_part(
        &mut self,
        name: &str,
        elems: usize,
        part: Range<usize>,
        put: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        if self.sums.is_some() && part != (0..elems) && !self.verified.contains(name) {
            self.pass(name, elems, 0..elems, &mut |_| Ok(()))?;
        }
        self.pass(name, elems, part, put)
    }

    fn pass(
        &mut self,
        name: &str,
        elems: usize,
        part: Range<usize>,
        put: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let refuse = |message: String| TrainError::checkpoint(&self.path, message);
        let Some(entry) = self.entries.get(name) else {
            return Err(refuse(format!("tensor `{name}` is missing")));
        };
        let Some(dtype) = SaveDtype::of_tag(&entry.dtype) else {
            let dtype = &entry.dtype;
            let message = format!("tensor `{name}` is {dtype}; F32, BF16 and F16 can be read");
            return Err(refuse(message));
        };
        let (start, end) = entry.data_offsets;
        if end - start != (elems * dtype.bytes()) as u64 {
            let shape = &entry.shape;
            let message = format!("tensor `{name}` has shape {shape:?}, not {elems} elements");
            return Err(refuse(message));
        }
        let failed = |e: io::Error| {
            let message = format!("tensor `{name}` could not be read: {e}");
            TrainError::checkpoint(&self.path, message)
        };
        let mut file = File::open(&self.path).map_err(failed)?;
        let first_byte = self.data_start + start + (part.start * dtype.bytes()) as u64;
        file.seek(SeekFrom::Start(first_byte)).map_err(failed)?;
        let (mut bytes, mut values) = (Vec::new(), vec![0.0; part.len().min(CHUNK)]);
        let sums = self.sums.as_ref().filter(|_| part == (0..elems));
        let mut sum = Checksum::new(dtype.tag(), &entry.shape);
        let mut spoiled = None;
        for first in part.clone().step_by(CHUNK) {
            let values = &mut values[..(part.end - first).min(CHUNK)];
            bytes.resize(values.len() * dtype.bytes(), 0);
            file.read_exact(&mut bytes).map_err(failed)?;
            if sums.is_some() {
                sum.update(&bytes);
            }
            let (words, halves) = (bytes.as_chunks().0.iter(), bytes.as_chunks().0.iter());
            let into = values.iter_mut();
            match dtype {
                SaveDtype::F32 => into.zip(words).for_each(|(x, b)| *x = f32::from_le_bytes(*b)),
                SaveDtype::Bf16 => {
                    into.zip(halves).for_each(|(x, b)| *x = bf16::from_le_bytes(*b).to_f32());
                }
                SaveDtype::F16 => {
                    into.zip(halves).for_each(|(x, b)| *x = f16::from_le_bytes(*b).to_f32());
                }
            }
            let wrong = || values.iter().position(|x| !x.is_finite());
            spoiled = spoiled.or_else(|| wrong().map(|at| (first + at, values[at])));
            put(values)?;
        }
        if let Some(sums) = sums {
            let wrong = match sums.get(name) {
                None => Some("has no checksum"),
                Some(known) => (*known != sum.hex()).then_some("does not match its checksum"),
            };
            if let Some(wrong) = wrong {
                return Err(refuse(format!("tensor `{name}` {wrong}; {DAMAGED}")));
            }
            self.verified.insert(name.to_owned());
        }
        match spoiled {
            None => Ok(()),
            Some((at, value)) => Err(TrainError::checkpoint(
                &self.path,
                format!(
                    "tensor `{name}` is {value} at element {at}, of which no finite loss can come; \
                     use another checkpoint"
                ),
            )),
        }
    }
}

/// What to do with a file that is no part of a checkpoint.
pub const RESTORE: &str = "restore the file, or use another checkpoint";

/// What to do with a file that is not what a checksum was taken of.
pub const DAMAGED: &str = "the file was damaged or changed after it was saved: restore it, use \
                           another checkpoint, or pass --skip-checksums if the change is yours";

/// Bytes of an element of the format's dtypes of whole bytes.
fn element_bytes(tag: &str) -> Option<u64> {
    match tag {
        "F64" | "I64" | "U64" => Some(8),
        "F32" | "I32" | "U32" => Some(4),
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "I8" | "U8" | "BOOL" | "F8_E5M2" | "F8_E4M3" => Some(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::{Dtype, TensorView};

    fn values(len: usize) -> Vec<f32> {
        (0..len).map(|i| (i as f32 - 3.0) * 0.37).collect()
    }

    fn written(dtype: Dtype) -> Vec<u8> {
        let bytes = |len| -> Vec<u8> {
            let of = |x: f32| match dtype {
                Dtype::F32 => x.to_le_bytes().to_vec(),
                Dtype::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
                _ => f16::from_f32(x).to_le_bytes().to_vec(),
            };
            values(len).into_iter().flat_map(of).collect()
        };
        let (a, b) = (bytes(6), bytes(5));
        let a = TensorView::new(dtype, vec![2, 3], &a).unwrap();
        let b = TensorView::new(dtype, vec![5], &b).unwrap();
        safetensors::serialize([("b", b), ("a", a)], None).unwrap()
    }

    /// A file of these bytes, in a folder that lasts as long as what is returned.
    fn open(bytes: &[u8]) -> Result<(tempfile::TempDir, Tensors), TrainError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        std::fs::write(&path, bytes).unwrap();
        Tensors::open(&path).map(|tensors| (dir, tensors))
    }

    #[test]
    fn files_of_the_reference_crate_are_read() {
        for (dtype, step) in
            [(Dtype::F32, 0.0f32), (Dtype::BF16, 1.0 / 256.0), (Dtype::F16, 1.0 / 2048.0)]
        {
            let (_dir, mut tensors) = open(&written(dtype)).unwrap();
            assert_eq!(tensors.names().collect::<Vec<_>>(), ["a", "b"]);
            assert_eq!(tensors.shape("a"), Some(&[2, 3][..]));
            let mut read = Vec::new();
            let mut put = |values: &[f32]| {
                read.extend_from_slice(values);
                Ok(())
            };
            tensors.read("a", 6, &mut put).unwrap();
            assert_eq!(read.len(), 6);
            for (x, y) in read.iter().zip(values(6)) {
                assert!((x - y).abs() <= y.abs() * step, "{x} {y}");
            }
        }
        let (_dir, mut tensors) = open(&written(Dtype::F32)).unwrap();
        let mut told = |name| tensors.read(name, 7, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(told("c").contains("tensor `c` is missing"));
        assert!(told("a").contains("tensor `a` has shape [2, 3], not 7 elements"));
    }

    #[test]
    fn parts_are_those_of_the_whole_and_held_to_its_checksum() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let bytes = written(Dtype::F32);
        std::fs::write(&path, &bytes).unwrap();
        let mut sum = Checksum::new("F32", &[2, 3]);
        values(6).into_iter().for_each(|x| sum.update(&x.to_le_bytes()));
        let sums: BTreeMap<String, String> = [("a".to_owned(), sum.hex())].into();
        for verified in [false, true] {
            let mut tensors = Tensors::open(&path).unwrap();
            if verified {
                tensors = tensors.verified_by(sums.clone());
            }
            for part in [0..6, 0..0, 2..5, 5..6, 0..1] {
                let mut read = Vec::new();
                let mut put = |values: &[f32]| {
                    read.extend_from_slice(values);
                    Ok(())
                };
                tensors.read_part("a", 6, part.clone(), &mut put).unwrap();
                assert_eq!(read, values(6)[part]);
            }
        }
        // The first element of `a`, which comes first in the file or behind the 20 bytes of `b`.
        let mut damaged = bytes.clone();
        let at = bytes.len() - 44..bytes.len();
        let first = at.clone().find(|&i| bytes[i..].starts_with(&values(6)[0].to_le_bytes()));
        damaged[first.unwrap()] ^= 1;
        std::fs::write(&path, damaged).unwrap();
        let mut damaged = Tensors::open(&path).unwrap().verified_by(sums);
        let told = damaged.read_part("a", 6, 4..6, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(told.contains("tensor `a` does not match its checksum"), "{told}");
    }

    #[test]
    fn every_truncation_is_noticed() {
        let bytes = written(Dtype::F32);
        for len in 0..bytes.len() {
            let error = open(&bytes[..len]).unwrap_err().to_string();
            let named = error.contains("cut short") && error.contains("model.safetensors");
            assert!(named, "{len}: {error}");
        }
    }

    #[test]
    fn a_header_that_lies_is_caught_by_tensor() {
        let file = |header: &str, data: usize| {
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.as_bytes());
            bytes.resize(bytes.len() + data, 0);
            open(&bytes).map(|_| ()).unwrap_err().to_string()
        };
        let one = |shape: &str, offsets: &str| {
            format!(r#"{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        for (header, data, expected) in [
            (one("[2]", "[0,4]"), 4, "lies about tensor `w`: F32 of shape [2] does not fill its 4"),
            (one("[1]", "[4,8]"), 8, "leave a gap or overlap after byte 0"),
            (one("[1]", "[8,4]"), 8, "leave a gap"),
            (one("[4294967296,4294967296,4]", "[0,64]"), 64, "does not fill"),
            (one("[1]", "[0,4]"), 9, "5 bytes that belong to no tensor"),
            (one("[1]", "[0]"), 4, "`w` is not described"),
            ("[1, 2]".to_owned(), 0, "not a JSON object"),
        ] {
            let error = file(&header, data);
            assert!(error.contains(expected), "{header}: {error}");
        }
        let mut huge = u64::MAX.to_le_bytes().to_vec();
        huge.extend([0; 32]);
        assert!(open(&huge).unwrap_err().to_string().contains("claims a header of"));
    }

    #[test]
    fn integers_cannot_be_weights() {
        let view = TensorView::new(Dtype::I32, vec![1], &[0; 4]).unwrap();
        let bytes = safetensors::serialize([("w", view)], None).unwrap();
        let (_dir, mut tensors) = open(&bytes).unwrap();
        let error = tensors.read("w", 1, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("tensor `w` is I32"), "{error}");
    }
}
