//! Compiled kernels, kept in memory and on disk.
//!
//! A kernel's key is the SHA-256 of everything that decides its machine code: versions of this
//! crate and of the file format, NVRTC's version, options, architecture, source. One key is
//! compiled once in a process, however many threads ask for it; processes write whole files under
//! a temporary name and rename them, so a reader never sees half of one, and of two that compile
//! one key at the same time the last to finish is kept, which is the same. A file whose checksum
//! is wrong is built again. A folder that cannot be written, read-only or full, costs its users
//! nothing but the time to compile: stderr says so once, and [`Cache::trouble`] always. For whoever
//! compiles only to keep, it is an error ([`Cache::to_fill`]).
//!
//! The folder is `FOVEATE_CACHE_DIR`, else `foveate/kernels` in the user's cache folder.
//! `FOVEATE_DUMP_KERNELS` names a folder that gets source, log and machine code of every kernel
//! that is asked for.

use std::collections::HashMap;
use std::env;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use sha2::{Digest, Sha256};

use crate::arch::Arch;
use crate::error::{GpuError, GpuErrorKind};
use crate::nvrtc::{Compiled, Compiler, OPTIONS};

/// Where compiled kernels are kept.
pub const FOLDER_VARIABLE: &str = "FOVEATE_CACHE_DIR";
/// Where kernels are written for people to read.
pub const DUMP_VARIABLE: &str = "FOVEATE_DUMP_KERNELS";

/// First bytes of a file; the number changes with the format.
const MAGIC: &[u8; 16] = b"foveate-kernel-1";

/// The key of a kernel, in hexadecimal.
type Key = String;
type Slot = Arc<OnceLock<Result<Arc<Compiled>, GpuError>>>;

/// Compiled kernels by key.
#[derive(Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    dump: Option<PathBuf>,
    /// What cannot be written is an error.
    to_fill: bool,
    slots: Mutex<HashMap<Key, Slot>>,
    trouble: OnceLock<String>,
}

impl Cache {
    /// The cache of this process.
    pub fn get() -> &'static Self {
        static CACHE: OnceLock<Cache> = OnceLock::new();
        CACHE.get_or_init(Self::of_process)
    }

    /// The same folders for whoever compiles to fill them: a kernel that cannot be kept, or dumped
    /// where that is asked for, is an error.
    pub fn to_fill() -> Self {
        Self { to_fill: true, ..Self::of_process() }
    }

    fn of_process() -> Self {
        Self { dump: named(DUMP_VARIABLE), ..Self::at(folder()) }
    }

    /// A cache in `folder`, or in memory only.
    pub fn at(folder: Option<PathBuf>) -> Self {
        let (slots, trouble) = Default::default();
        Self { folder, dump: None, to_fill: false, slots, trouble }
    }

    /// The folder of compiled kernels.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The first reason why a kernel could not be written to disk.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.get().map(String::as_str)
    }

    /// `source` compiled for `arch`, from memory, from disk, or by the compiler.
    ///
    /// # Errors
    /// [`GpuErrorKind::Compile`] and [`GpuErrorKind::UnknownArchitecture`], and those of writing with
    /// [`Self::to_fill`]. They are kept like results.
    pub fn compile(
        &self,
        compiler: &Compiler,
        source: &str,
        arch: Arch,
    ) -> Result<Arc<Compiled>, GpuError> {
        let version = compiler.version();
        self.find(key(version, arch, source), arch, source, || compiler.compile(source, arch))
    }

    /// Forgets what is in memory; files stay. For whoever compiles more than memory should hold.
    pub fn forget(&self) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn find(
        &self,
        key: Key,
        arch: Arch,
        source: &str,
        compile: impl FnOnce() -> Result<Compiled, GpuError>,
    ) -> Result<Arc<Compiled>, GpuError> {
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            slots.entry(key.clone()).or_default().clone()
        };
        let made = slot.get_or_init(|| {
            let file = self.folder.as_ref().map(|f| f.join(&key));
            let kept = file.as_ref().and_then(|f| unpack(arch, &fs::read(f).ok()?));
            let fresh = kept.is_none();
            let compiled = kept.map_or_else(compile, Ok)?;
            if let (true, Some(file)) = (fresh, &file) {
                self.write(file, &pack(&compiled), &KEEPING)?;
            }
            if let Some(dump) = &self.dump {
                let taken: String = compiled.kernels.iter().map(|k| format!("{k}\n")).collect();
                let parts: [(&str, &[u8]); 4] = [
                    ("cu", source.as_bytes()),
                    ("log", compiled.log.as_bytes()),
                    ("resources", taken.as_bytes()),
                    ("cubin", &compiled.cubin),
                ];
                for (extension, bytes) in parts {
                    let file = dump.join(&key[..16]).with_extension(extension);
                    self.write(&file, bytes, &DUMPING)?;
                }
            }
            Ok(Arc::new(compiled))
        });
        made.clone()
    }

    /// Writes a file for `purpose`. Keeps and prints the first failure, where it is no error.
    fn write(&self, file: &Path, bytes: &[u8], purpose: &Purpose) -> Result<(), GpuError> {
        let Err(e) = write_whole(file, bytes) else { return Ok(()) };
        let Purpose { fails, instead, variable } = purpose;
        let instead = if self.to_fill { "" } else { instead };
        let trouble = format!(
            "{}: {e}; {fails}{instead} until {variable} names a folder that can be written",
            file.display()
        );
        if self.to_fill {
            return Err(GpuErrorKind::Unkept { reason: trouble }.into());
        }
        self.trouble.get_or_init(|| {
            eprintln!("warning: {trouble}");
            trouble
        });
        Ok(())
    }
}

/// Why a file is written.
struct Purpose {
    /// What is not done when it cannot be.
    fails: &'static str,
    /// What is done instead.
    instead: &'static str,
    /// What names its folder.
    variable: &'static str,
}

const KEEPING: Purpose = Purpose {
    fails: "compiled kernels cannot be kept",
    instead: ", and each process compiles its own,",
    variable: FOLDER_VARIABLE,
};

const DUMPING: Purpose =
    Purpose { fails: "kernels cannot be dumped", instead: "", variable: DUMP_VARIABLE };

/// What a variable names; nothing when it is empty.
fn named(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from)
}

fn folder() -> Option<PathBuf> {
    named(FOLDER_VARIABLE).or_else(|| {
        let caches = named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|h| h.join(".cache")));
        caches.map(|c| c.join("foveate").join("kernels"))
    })
}

fn key((major, minor): (i32, i32), arch: Arch, source: &str) -> Key {
    let mut hash = Sha256::new();
    let generator = env!("CARGO_PKG_VERSION");
    for part in
        [generator, &format!("{major}.{minor}"), &arch.to_string(), &OPTIONS.join(" "), source]
    {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.update(MAGIC);
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Magic, checksum of the rest, length of the log, log, cubin.
fn pack(compiled: &Compiled) -> Vec<u8> {
    let mut body = (compiled.log.len() as u64).to_le_bytes().to_vec();
    body.extend(compiled.log.as_bytes());
    body.extend(&compiled.cubin);
    [&MAGIC[..], &Sha256::digest(&body)[..], &body].concat()
}

fn unpack(arch: Arch, bytes: &[u8]) -> Option<Compiled> {
    let (magic, rest) = bytes.split_at_checked(MAGIC.len())?;
    let (checksum, body) = rest.split_at_checked(32)?;
    if magic != MAGIC || checksum != &Sha256::digest(body)[..] {
        return None;
    }
    let (len, rest) = body.split_first_chunk()?;
    let (log, cubin) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    let kept = Compiled::new(arch, cubin.to_vec(), String::from_utf8(log.to_vec()).ok()?);
    // What the log does not speak of, nobody has looked at.
    kept.unreported().is_none().then_some(kept)
}

/// Writes a file that is either whole or not there.
pub fn write_whole(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = file.parent().expect("files are in a folder");
    fs::create_dir_all(folder)?;
    let mut part = tempfile::NamedTempFile::new_in(folder)?;
    part.write_all(bytes)?;
    part.persist(file)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const HOPPER: Arch = Arch::new((9, 0));

    fn made(text: &str) -> Compiled {
        Compiled::new(HOPPER, text.as_bytes().to_vec(), format!("log of {text}"))
    }

    fn kernel_of(cache: &Cache, source: &str, compiled: &AtomicUsize) -> Arc<Compiled> {
        let compile = || {
            compiled.fetch_add(1, Ordering::SeqCst);
            Ok(made(source))
        };
        cache.find(key((13, 0), HOPPER, source), HOPPER, source, compile).unwrap()
    }

    #[test]
    fn many_threads_compile_a_kernel_once() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::at(Some(root.path().join("deep/kernels")));
        let compiled = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| assert_eq!(*kernel_of(&cache, "a", &compiled), made("a")));
            }
        });
        kernel_of(&cache, "b", &compiled);
        assert_eq!(compiled.load(Ordering::SeqCst), 2);
        assert_eq!(cache.trouble(), None);
    }

    #[test]
    fn another_process_reads_what_one_has_compiled_and_builds_damaged_files_again() {
        let root = tempfile::tempdir().unwrap();
        let compiled = AtomicUsize::new(0);
        let again = || kernel_of(&Cache::at(Some(root.path().into())), "a", &compiled);
        again();
        assert_eq!(*again(), made("a"));
        assert_eq!(compiled.load(Ordering::SeqCst), 1);

        let file = root.path().join(key((13, 0), HOPPER, "a"));
        let whole = fs::read(&file).unwrap();
        for damage in [&whole[..whole.len() - 1], &whole[..20], &[]] {
            let before = compiled.load(Ordering::SeqCst);
            fs::write(&file, damage).unwrap();
            assert_eq!(*again(), made("a"));
            assert_eq!(compiled.load(Ordering::SeqCst), before + 1);
            assert_eq!(fs::read(&file).unwrap(), whole, "the file is whole again");
        }
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        assert_eq!(unpack(HOPPER, &flipped), None);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_reported_and_costs_only_time() {
        let root = tempfile::tempdir().unwrap();
        let occupied = root.path().join("file");
        fs::write(&occupied, "").unwrap();
        let cache = Cache::at(Some(occupied));
        let compiled = AtomicUsize::new(0);
        for _ in 0..2 {
            assert_eq!(*kernel_of(&cache, "a", &compiled), made("a"));
        }
        assert_eq!(compiled.load(Ordering::SeqCst), 1);
        let trouble = cache.trouble().unwrap();
        assert!(trouble.starts_with(root.path().to_str().unwrap()), "{trouble}");
        let advice = "; compiled kernels cannot be kept, and each process compiles its own, until \
                      FOVEATE_CACHE_DIR names a folder that can be written";
        assert!(trouble.ends_with(advice), "{trouble}");
    }

    #[test]
    fn a_folder_to_be_filled_that_cannot_be_written_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let occupied = root.path().join("file");
        fs::write(&occupied, "").unwrap();
        let find = |cache: Cache| {
            let cache = Cache { to_fill: true, ..cache };
            let found = cache.find(key((13, 0), HOPPER, "a"), HOPPER, "a", || Ok(made("a")));
            assert_eq!(cache.trouble(), None, "nothing is printed");
            found.map_err(|e| e.to_string())
        };
        let said = find(Cache::at(Some(occupied.clone()))).unwrap_err();
        assert!(said.starts_with(root.path().to_str().unwrap()), "{said}");
        let advice = "; compiled kernels cannot be kept until FOVEATE_CACHE_DIR names a folder that \
                      can be written";
        assert!(said.ends_with(advice), "{said}");
        let dumped = Cache { dump: Some(occupied), ..Cache::at(None) };
        assert!(
            find(dumped).unwrap_err().contains("; kernels cannot be dumped until FOVEATE_DUMP")
        );
        assert_eq!(*find(Cache::at(Some(root.path().join("kernels")))).unwrap(), made("a"));
    }

    #[test]
    fn a_dump_has_source_log_resources_and_machine_code() {
        let root = tempfile::tempdir().unwrap();
        let mut cache = Cache::at(None);
        cache.dump = Some(root.path().join("kernels"));
        kernel_of(&cache, "a", &AtomicUsize::new(0));
        let key = key((13, 0), HOPPER, "a");
        let dumped = |extension: &str| {
            fs::read_to_string(
                root.path().join("kernels").join(&key[..16]).with_extension(extension),
            )
        };
        assert_eq!((dumped("cu").unwrap().as_str(), dumped("cubin").unwrap().as_str()), ("a", "a"));
        assert_eq!(dumped("log").unwrap(), "log of a");
        assert_eq!(dumped("resources").unwrap(), "");
        assert_eq!(cache.trouble(), None);

        let mut cache = Cache::at(None);
        cache.dump = Some(root.path().join("kernels").join(&key[..16]).with_extension("cu"));
        kernel_of(&cache, "a", &AtomicUsize::new(0));
        let trouble = cache.trouble().unwrap();
        let advice = "; kernels cannot be dumped until FOVEATE_DUMP_KERNELS names a folder that \
                      can be written";
        assert!(trouble.ends_with(advice), "{trouble}");
    }

    #[test]
    fn keys_differ_by_everything_that_decides_the_code() {
        let keys = [
            key((13, 0), HOPPER, "a"),
            key((13, 1), HOPPER, "a"),
            key((13, 0), Arch::new((8, 0)), "a"),
            key((13, 0), HOPPER.specific(), "a"),
            key((13, 0), HOPPER, "b"),
        ];
        let distinct: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
    }

    #[test]
    fn a_kept_kernel_has_what_the_assembler_said_and_is_built_again_where_it_said_nothing() {
        let Ok(compiler) = Compiler::get().map_err(|e| println!("skipped: {e}")) else { return };
        // Dropped, since the source does not fix the registers of its launch.
        let source = "extern \"C\" __global__ void f() { asm volatile(\"setmaxnreg.dec.sync.aligned.u32 24;\"); }";
        let arch = HOPPER.specific();
        let root = tempfile::tempdir().unwrap();
        let find = || Cache::at(Some(root.path().into())).compile(compiler, source, arch).unwrap();
        let fresh = find();
        assert_eq!(fresh.advisories.len(), 1, "{}", fresh.log);
        assert_eq!(find().advisories, fresh.advisories);

        let file = root.path().join(key(compiler.version(), arch, source));
        let silent = pack(&Compiled::new(arch, fresh.cubin.clone(), String::new()));
        fs::write(&file, &silent).unwrap();
        assert_eq!(find().advisories, fresh.advisories);
        assert_ne!(fs::read(&file).unwrap(), silent);
    }

    #[test]
    fn a_warm_start_is_quick() {
        let Ok(compiler) = Compiler::get().map_err(|e| println!("skipped: {e}")) else { return };
        let root = tempfile::tempdir().unwrap();
        let source = "extern \"C\" __global__ void f(float* x) { x[threadIdx.x] += 1.0f; }";
        let at = || Cache::at(Some(root.path().into()));
        at().compile(compiler, source, HOPPER).unwrap();
        let began = std::time::Instant::now();
        let compiled = at().compile(compiler, source, HOPPER).unwrap();
        let spent = began.elapsed();
        assert_eq!(compiled.kernels[0].name, "f");
        println!("warm start: {spent:?}");
        assert!(spent.as_millis() < 100, "{spent:?}");
    }
}
