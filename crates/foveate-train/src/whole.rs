//! Files that are read or written whole: recipes, tokenizers, templates, what describes a checkpoint.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::error::TrainError;

/// Bytes of such a file at most; a tokenizer of 250,000 words has 20 MiB.
const MOST_BYTES: u64 = 256 << 20;

/// The bytes of a file. What never ends, such as a device, or never begins, such as a pipe that
/// nobody writes to, is refused.
///
/// # Errors
/// The system's reason; what it is where it is no regular file; its limit where it is longer.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_up_to(path, MOST_BYTES)
}

/// The text of a file, as [`read`].
///
/// # Errors
/// Those of [`read`], or that it is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::Error::other("it is not UTF-8 text"))
}

fn read_up_to(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    // Asked before it is opened, which would wait for a pipe's other end.
    check_regular(path)?;
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::other(format!("it has more than the {most} bytes that are read")));
    }
    Ok(bytes)
}

/// Whether a path is a file, and no folder, pipe or device.
///
/// # Errors
/// The system's reason, or what it is.
pub(crate) fn check_regular(path: &Path) -> io::Result<()> {
    let kind = fs::metadata(path)?.file_type();
    if kind.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    match kind.is_file() {
        true => Ok(()),
        false => Err(io::Error::other("it is a pipe or a device, not a file")),
    }
}

/// A path with its links resolved, as far as it is there.
pub(crate) fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = path.ancestors().find_map(|part| Some((part, part.canonicalize().ok()?)));
    let Some((part, there)) = there else { return path };
    match path.strip_prefix(part) {
        Ok(rest) if !rest.as_os_str().is_empty() => there.join(rest),
        _ => there,
    }
}

/// Writes a file and waits until it is on the disk.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Writes a file beside its place, then renames it: readers see the old or the new one.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    let temporary = path.with_extension("tmp");
    write(&temporary, bytes)
        .and_then(|()| fs::rename(&temporary, path))
        .map_err(|e| TrainError::write(path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_long_or_no_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("text");
        fs::write(&file, "four").unwrap();
        assert_eq!(read_up_to(&file, 4).unwrap(), b"four");
        let said = |result: io::Result<Vec<u8>>| result.unwrap_err().to_string();
        assert_eq!(said(read_up_to(&file, 3)), "it has more than the 3 bytes that are read");
        assert_eq!(said(read(folder.path())), "is a directory");
        fs::write(&file, [0xff]).unwrap();
        assert_eq!(read_text(&file).unwrap_err().to_string(), "it is not UTF-8 text");
    }

    #[cfg(unix)]
    #[test]
    fn devices_and_pipes_are_refused_and_not_waited_for() {
        let refused = "it is a pipe or a device, not a file";
        assert_eq!(read(Path::new("/dev/zero")).unwrap_err().to_string(), refused);
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        if made.is_ok_and(|status| status.success()) {
            assert_eq!(read(&pipe).unwrap_err().to_string(), refused);
        }
    }
}
