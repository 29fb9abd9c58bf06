//! TensorBoard event files.
//!
//! A file is a sequence of frames: length (u64), masked CRC-32C of the length, payload, masked
//! CRC-32C of the payload, all little-endian (the framing of TensorFlow's record files). Each
//! payload is a protocol-buffer `Event`: wall time (field 1, double), step (2, varint), and a
//! file version (3, string), a summary (5) of values (1) with tag (1, string) and simple value
//! (2, float), or a session log (7) with a status (1, varint).

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{Record, unix_time};

/// An event file.
#[derive(Debug)]
pub struct TensorBoardLog(File);

/// A session log of a start.
const START: [u8; 2] = [1 << 3, 1];

/// What the names of event files begin with.
const PREFIX: &str = "events.out.tfevents.";

/// The event files in `dir`.
///
/// # Errors
/// When the folder cannot be read.
pub fn event_files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// When an event file was begun, by its name.
fn seconds(file: &Path) -> Option<u64> {
    file.file_name()?.to_str()?.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()
}

impl TensorBoardLog {
    /// A new event file in `dir`, of a run that goes on after `step`. TensorBoard reads the files by the order of
    /// their names, which is that of the starts whatever the clock says, and drops what earlier files have of later
    /// steps, from the second start on: a run that was killed takes them again.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn create(dir: &Path, step: u64) -> io::Result<Self> {
        let now = unix_time();
        let earlier = event_files(dir)?.iter().filter_map(|file| seconds(file)).max();
        let start = earlier.map_or(now as u64, |last| (now as u64).max(last.saturating_add(1)));
        let name = format!("{PREFIX}{start:010}.{}", std::process::id());
        let mut log = Self(File::create(dir.join(name))?);
        let mut event = Vec::new();
        double(&mut event, 1, now);
        bytes(&mut event, 3, b"brain.Event:2");
        log.frame(&event)?;
        let mut event = Vec::new();
        double(&mut event, 1, now);
        event.push(2 << 3);
        varint(&mut event, step + 1);
        bytes(&mut event, 7, &START);
        log.frame(&event)?;
        Ok(log)
    }

    /// Adds the numbers of a record.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn append(&mut self, record: &Record) -> io::Result<()> {
        let mut values: Vec<(&str, f64)> = match record {
            Record::Step(m) => vec![
                ("train/loss", m.loss),
                ("train/grad_norm", m.grad_norm),
                ("train/lr", m.lr),
                ("data/epoch", m.epoch),
                ("data/padding_share", m.padding_share),
                ("speed/labelled_tokens_per_s", m.labelled_tokens_per_s),
                ("speed/packed_tokens_per_s", m.packed_tokens_per_s),
                ("speed/data_seconds", m.data_seconds),
                ("speed/tflops_dense", m.tflops_dense),
                ("speed/tflops_live", m.tflops_live),
                ("memory/bytes", m.memory_bytes as f64),
                ("memory/peak_bytes", m.peak_memory_bytes as f64),
            ]
            .into_iter()
            .chain(m.z_loss.map(|z_loss| ("train/z_loss", z_loss)))
            .collect(),
            Record::Eval(m) => {
                vec![("held_out/loss", m.held_out_loss), ("held_out/perplexity", m.perplexity)]
            }
            Record::Save(m) => vec![("speed/save_seconds", m.seconds)],
            Record::Run(_) => return Ok(()),
        };
        if let Record::Step(m) = record {
            let some = [
                ("speed/mfu_live", m.mfu.map(|mfu| mfu.live)),
                ("speed/optimizer_seconds", m.optimizer_seconds),
                ("speed/attention_share", m.attention_share),
            ];
            values.extend(some.into_iter().filter_map(|(tag, value)| Some((tag, value?))));
        }
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut entry = Vec::new();
            bytes(&mut entry, 1, tag.as_bytes());
            entry.push(2 << 3 | 5);
            entry.extend((value as f32).to_le_bytes());
            bytes(&mut summary, 1, &entry);
        }
        let mut event = Vec::new();
        double(&mut event, 1, unix_time());
        event.push(2 << 3);
        varint(&mut event, record.step());
        bytes(&mut event, 5, &summary);
        self.frame(&event)
    }

    fn frame(&mut self, payload: &[u8]) -> io::Result<()> {
        let length = (payload.len() as u64).to_le_bytes();
        let mut frame = length.to_vec();
        frame.extend(masked_crc(&length).to_le_bytes());
        frame.extend(payload);
        frame.extend(masked_crc(payload).to_le_bytes());
        self.0.write_all(&frame)
    }
}

fn double(into: &mut Vec<u8>, field: u8, value: f64) {
    into.push(field << 3 | 1);
    into.extend(value.to_le_bytes());
}

fn bytes(into: &mut Vec<u8>, field: u8, value: &[u8]) {
    into.push(field << 3 | 2);
    varint(into, value.len() as u64);
    into.extend(value);
}

fn varint(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

/// CRC-32C (Castagnoli), reflected polynomial 0x82F63B78.
fn crc32c(data: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 };
    !data.iter().fold(!0u32, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xA282_EAD8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::EvalMetrics;

    #[test]
    fn the_checksum_is_castagnolis() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
    }

    /// The frames of a file, their checksums verified.
    fn frames(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        let u32_at = |b: &[u8]| u32::from_le_bytes(b[..4].try_into().unwrap());
        while !file.is_empty() {
            let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            assert_eq!(u32_at(&file[8..]), masked_crc(&file[..8]));
            let payload = &file[12..12 + length];
            assert_eq!(u32_at(&file[12 + length..]), masked_crc(payload));
            found.push(payload.to_vec());
            file = &file[16 + length..];
        }
        found
    }

    fn read_varint(data: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = data[0];
            *data = &data[1..];
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }

    fn take<'a>(data: &mut &'a [u8], n: usize) -> &'a [u8] {
        let (taken, rest) = data.split_at(n);
        *data = rest;
        taken
    }

    #[test]
    fn what_was_written_is_decoded_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = TensorBoardLog::create(dir.path(), 0).unwrap();
        let metrics = EvalMetrics {
            step: 300,
            unix_time: 5.0,
            held_out_loss: 2.25,
            perplexity: 9.5,
            labelled_tokens: 1,
            seconds: 0.5,
        };
        log.append(&Record::Eval(metrics)).unwrap();
        let path = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let frames = frames(&std::fs::read(path).unwrap());
        assert_eq!(frames.len(), 3);
        assert!(frames[0].ends_with(b"brain.Event:2"));
        let mut event = frames[2].as_slice();
        assert_eq!(take(&mut event, 1), [0x09]);
        take(&mut event, 8);
        assert_eq!(take(&mut event, 1), [0x10]);
        assert_eq!(read_varint(&mut event), 300);
        assert_eq!(take(&mut event, 1), [0x2A]);
        assert_eq!(read_varint(&mut event) as usize, event.len());
        for (tag, value) in [("held_out/loss", 2.25f32), ("held_out/perplexity", 9.5)] {
            assert_eq!(take(&mut event, 1), [0x0A]);
            let n = read_varint(&mut event) as usize;
            let mut entry = take(&mut event, n);
            assert_eq!(take(&mut entry, 1), [0x0A]);
            let n = read_varint(&mut entry) as usize;
            assert_eq!(take(&mut entry, n), tag.as_bytes());
            assert_eq!(take(&mut entry, 1), [0x15]);
            assert_eq!(f32::from_le_bytes(entry.try_into().unwrap()), value);
        }
        assert!(event.is_empty());
    }

    /// As the file of a run that was killed after step 9 and goes on after step 6, on a clock that went back.
    #[test]
    fn a_file_of_a_run_that_goes_on_comes_last_and_drops_later_steps_of_those_before() {
        let dir = tempfile::tempdir().unwrap();
        let earlier = dir.path().join(format!("{PREFIX}4000000000.9"));
        std::fs::write(&earlier, "").unwrap();
        // The first start has the mark too: TensorBoard takes it for no restart.
        for step in [0, 6, 300] {
            let before = event_files(dir.path()).unwrap();
            TensorBoardLog::create(dir.path(), step).unwrap();
            let mut files = event_files(dir.path()).unwrap();
            files.sort();
            assert_eq!(files.len(), before.len() + 1);
            let last = files.pop().unwrap();
            assert!(!before.contains(&last), "{files:?} {last:?}");
            let frames = frames(&std::fs::read(last).unwrap());
            assert_eq!(frames.len(), 2);
            let mut event = &frames[1][9..];
            assert_eq!(take(&mut event, 1), [0x10]);
            assert_eq!(read_varint(&mut event), step + 1);
            assert_eq!(event, [0x3A, 2, 8, 1]);
        }
    }
}
