//! Writing safetensors files in chunks, with a checksum of each tensor on the way.
//!
//! Values are encoded a chunk at a time, so writing takes the same memory for every model. Chunks are
//! summed and written by a second thread while the next ones are read and encoded. A value
//! that the file could not give back (not finite, or past the range of f16) is refused: nobody
//! would want to load it.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{Builder, scope};

use half::{bf16, f16};
use serde_json::{Map, Value, json};

use super::{CHUNK, Checksum};
use crate::error::TrainError;
use crate::recipe::SaveDtype;

/// A tensor to write.
pub struct Source<'a> {
    /// Its name in the file.
    pub name: String,
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// Reads its elements from one on, row-major.
    pub values: Box<Read<'a>>,
}

/// Reads elements from one on.
pub type Read<'a> = dyn Fn(usize, &mut [f32]) -> Result<(), TrainError> + 'a;

/// Why a file was not written.
#[derive(Debug)]
pub enum WriteError {
    /// The system refused.
    Io(io::Error),
    /// A value could not be read.
    Read(TrainError),
    /// A value has no finite form in the file.
    Value {
        /// The tensor's name.
        tensor: String,
        /// Which of its elements, counted from 0.
        element: usize,
        /// The value.
        value: f32,
    },
}

impl Source<'_> {
    fn elems(&self) -> usize {
        self.shape.iter().product()
    }
}

impl From<io::Error> for WriteError {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

/// Writes a file of `tensors`, all in `dtype`, and returns their checksums by name.
///
/// # Errors
/// When the system refuses, or a value cannot be read or has no finite form in `dtype`.
pub fn write(
    to: &mut (dyn Write + Send),
    dtype: SaveDtype,
    tensors: &[Source<'_>],
) -> Result<BTreeMap<String, String>, WriteError> {
    let header = header(dtype, tensors);
    to.write_all(&(header.len() as u64).to_le_bytes())?;
    to.write_all(header.as_bytes())?;
    let sums = tensors.iter().map(|tensor| Checksum::new(dtype.tag(), &tensor.shape)).collect();
    let sums: Vec<Checksum> = scope(|scope| {
        let ((put, chunks), (give_back, free)) = (sync_channel(AHEAD), channel());
        let write = move || put_all(to, sums, &chunks, &give_back);
        let writer = Builder::new().name("foveate-save-write".to_owned());
        let writer = writer.spawn_scoped(scope, write).map_err(|e| {
            let message = format!("no thread could be started to save: {e}");
            WriteError::Read(TrainError::model(message))
        })?;
        let read = encode_all(dtype, tensors, &put, &free);
        // Behind the last chunk.
        drop(put);
        let written = writer.join().unwrap_or_else(|panic| resume_unwind(panic));
        read.and_then(|()| Ok(written?))
    })?;
    let named = tensors.iter().zip(sums);
    Ok(named.map(|(tensor, sum)| (tensor.name.clone(), sum.hex())).collect())
}

/// Chunks that wait to be written.
const AHEAD: usize = 4;

/// Stored numbers of the tensor of an index.
type Chunk = (usize, Vec<u8>);

/// Reads and encodes all chunks in order, in memory that is `free`, until nobody takes them any more.
fn encode_all(
    dtype: SaveDtype,
    tensors: &[Source<'_>],
    put: &SyncSender<Chunk>,
    free: &Receiver<Vec<u8>>,
) -> Result<(), WriteError> {
    let mut values = vec![0.0; CHUNK];
    for (index, tensor) in tensors.iter().enumerate() {
        let elems = tensor.elems();
        for first in (0..elems).step_by(CHUNK) {
            let chunk = &mut values[..(elems - first).min(CHUNK)];
            (tensor.values)(first, chunk).map_err(WriteError::Read)?;
            let mut bytes = free.try_recv().unwrap_or_default();
            if let Err(at) = encode(chunk, dtype, &mut bytes) {
                let (tensor, value) = (tensor.name.clone(), chunk[at]);
                return Err(WriteError::Value { tensor, element: first + at, value });
            }
            if put.send((index, bytes)).is_err() {
                // Why it was not written is the writer's to tell.
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Writes all chunks, and adds each to the sum of its tensor.
fn put_all(
    to: &mut (dyn Write + Send),
    mut sums: Vec<Checksum>,
    chunks: &Receiver<Chunk>,
    give_back: &Sender<Vec<u8>>,
) -> io::Result<Vec<Checksum>> {
    for (index, bytes) in chunks {
        sums[index].update(&bytes);
        to.write_all(&bytes)?;
        // Behind the last one nobody takes it.
        let _ = give_back.send(bytes);
    }
    Ok(sums)
}

/// The JSON that opens a file, padded so that the data begins at a multiple of 8 bytes.
fn header(dtype: SaveDtype, tensors: &[Source<'_>]) -> String {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut end = 0;
    for tensor in tensors {
        let start = end;
        end += tensor.elems() * dtype.bytes();
        let entry =
            json!({ "dtype": dtype.tag(), "shape": tensor.shape, "data_offsets": [start, end] });
        header.insert(tensor.name.clone(), entry);
    }
    let mut text = Value::Object(header).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    text
}

/// Makes `into` the stored form of `values`; the index of the first that has no finite one stops it.
fn encode(values: &[f32], dtype: SaveDtype, into: &mut Vec<u8>) -> Result<(), usize> {
    let stored_is_finite = |x: f32| match dtype {
        SaveDtype::F32 => x.is_finite(),
        SaveDtype::Bf16 => bf16::from_f32(x).is_finite(),
        SaveDtype::F16 => f16::from_f32(x).is_finite(),
    };
    if let Some(at) = values.iter().position(|&x| !stored_is_finite(x)) {
        return Err(at);
    }
    into.resize(values.len() * dtype.bytes(), 0);
    match dtype {
        SaveDtype::F32 => store(values, into, f32::to_le_bytes),
        SaveDtype::Bf16 => store(values, into, |x| bf16::from_f32(x).to_le_bytes()),
        SaveDtype::F16 => store(values, into, |x| f16::from_f32(x).to_le_bytes()),
    }
    Ok(())
}

fn store<const N: usize>(values: &[f32], into: &mut [u8], form: impl Fn(f32) -> [u8; N]) {
    let (places, _) = into.as_chunks_mut();
    places.iter_mut().zip(values).for_each(|(place, &x)| *place = form(x));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source<'a>(name: &str, shape: &'a [usize], values: &'a [f32]) -> Source<'a> {
        let read = |first: usize, into: &mut [f32]| {
            into.copy_from_slice(&values[first..first + into.len()]);
            Ok(())
        };
        Source { name: name.to_owned(), shape: shape.to_vec(), values: Box::new(read) }
    }

    #[test]
    fn the_reference_crate_reads_what_is_written() {
        let values: Vec<f32> = (0..3 * CHUNK + 5).map(|i| (i as f32 - 7e4) * 0.37).collect();
        for (dtype, step) in [(SaveDtype::F32, 0.0f32), (SaveDtype::Bf16, 1.0 / 256.0)] {
            let len = [values.len()];
            let tensors = [
                source("b", &[2, 3], &values[..6]),
                source("a", &len, &values),
                source("c", &[0], &[]),
            ];
            let mut file = Vec::new();
            let sums = write(&mut file, dtype, &tensors).unwrap();
            assert_eq!(sums.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
            let read = safetensors::SafeTensors::deserialize(&file).unwrap();
            for tensor in &tensors {
                let found = read.tensor(&tensor.name).unwrap();
                assert_eq!(found.shape(), tensor.shape);
                let wide = |i: usize| match dtype {
                    SaveDtype::F32 => {
                        f32::from_le_bytes(found.data()[4 * i..4 * i + 4].try_into().unwrap())
                    }
                    _ => bf16::from_le_bytes(found.data()[2 * i..2 * i + 2].try_into().unwrap())
                        .to_f32(),
                };
                for (i, x) in values[..tensor.elems()].iter().enumerate() {
                    assert!((wide(i) - x).abs() <= x.abs() * step, "{i}: {} {x}", wide(i));
                }
            }
        }
    }

    #[test]
    fn a_value_without_a_finite_form_is_refused_with_its_place() {
        let mut values = vec![1.0f32; CHUNK + 9];
        for (dtype, value) in
            [(SaveDtype::F16, 7e4), (SaveDtype::F32, f32::NAN), (SaveDtype::Bf16, f32::INFINITY)]
        {
            values[CHUNK + 3] = value;
            let shape = [values.len()];
            let source = source("w", &shape, &values);
            let told = write(&mut Vec::new(), dtype, &[source]).unwrap_err();
            let WriteError::Value { tensor, element, .. } = told else { panic!("{told:?}") };
            assert_eq!((tensor.as_str(), element), ("w", CHUNK + 3));
        }
    }
}
