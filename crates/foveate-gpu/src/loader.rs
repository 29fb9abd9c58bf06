//! Finding and opening what NVIDIA ships.
//!
//! Nothing is linked: a binary runs on machines with and without a GPU. Each library is looked
//! for in the same places, in this order:
//!
//! 1. `FOVEATE_CUDA_LIBRARIES`, a folder or a file (several are separated like `PATH`);
//! 2. what the process has open already, and the folders of [`look_first_in`];
//! 3. wheels: `nvidia/*/lib` in the packages of the Python that runs this process, of the active
//!    environment (`VIRTUAL_ENV`, `CONDA_PREFIX`), of the `python3` on `PATH` (which is asked for
//!    its place when it is a script, such as a shim of pyenv's), and of the user;
//! 4. toolkits: `CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`, `/opt/cuda`;
//! 5. the bare name, which leaves the search to the system's loader.
//!
//! The driver and NVML are no part of wheels and toolkits, so they are looked for in the first and the last
//! place only. Where one of the first two has a library, nothing is looked for elsewhere and no other
//! process is started. A library is opened by its absolute path and stays open for the life of the
//! process. What was tried and what came of it is kept ([`Search`]), so that a file that is there
//! and cannot be opened is never reported as missing without its reason.

mod surroundings;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use crate::error::{GpuError, GpuErrorKind};
use crate::library::{LIBRARIES_VARIABLE, Library};
use crate::sync::lock;
use surroundings::Surroundings;

impl Library {
    /// Whether a driver of CUDA `driver` runs what this library of CUDA `version` makes: one of its
    /// own major version, whatever the minor ones, or a newer one.
    ///
    /// # Errors
    /// [`GpuErrorKind::OldDriver`] with the versions that would do.
    pub fn check_driver(self, version: (u32, u32), driver: (u32, u32)) -> Result<(), GpuError> {
        match driver.0 >= version.0 {
            true => Ok(()),
            false => Err(GpuErrorKind::OldDriver { driver, library: self, version }.into()),
        }
    }

    /// The search for it, done once in a process.
    pub fn search(self) -> &'static Search {
        static SEARCHES: [OnceLock<Search>; 5] = [const { OnceLock::new() }; 5];
        SEARCHES[self as usize].get_or_init(|| self.search_in_process())
    }

    /// Opens it, once in a process.
    ///
    /// # Errors
    /// When it is nowhere, with advice.
    pub fn open(self) -> Result<&'static Opened, GpuError> {
        let search = self.search();
        search.opened.as_ref().ok_or_else(|| {
            let (library, advice) = (self.name(), self.advice());
            let unusable = search.steps.iter().find_map(|step| match &step.outcome {
                Outcome::Unusable(why) => Some(format!("{}: {why}", step.path.display())),
                _ => None,
            });
            let tried = search.steps.iter().map(|step| step.path.clone()).collect();
            GpuErrorKind::Missing { library, advice, tried, unusable }.into()
        })
    }

    /// What the process says itself comes first: looking around may start another Python.
    fn search_in_process(self) -> Search {
        let named = Surroundings::named();
        let mut nearest = named.candidates_named(self);
        if !self.is_of_driver() {
            nearest.extend(self.loaded().map(|path| (Origin::Loaded, path)));
            let folders = lock(&FIRST).clone();
            let files = folders.iter().flat_map(|folder| {
                self.file_names().iter().map(|name| (Origin::Interpreter, folder.join(name)))
            });
            nearest.extend(files);
        }
        let near = self.search_among(nearest);
        if near.opened.is_some() {
            return near;
        }
        let mut far = self.search_in(&Surroundings::of_process());
        let tried = far.steps.extract_if(.., |step| near.steps.contains(step)).count();
        debug_assert!(tried <= near.steps.len());
        far.steps.splice(0..0, near.steps);
        far
    }

    /// The file of a library of this name that the process has open already.
    fn loaded(self) -> Option<PathBuf> {
        #[cfg(target_os = "linux")]
        {
            let stem = self.file_names()[0].split_inclusive(".so").next()?;
            let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
            let mut paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
            let is = |path: &str| {
                let name = path.rsplit('/').next().unwrap_or_default();
                name == stem || name.strip_prefix(stem).is_some_and(|rest| rest.starts_with('.'))
            };
            paths.find(|path| is(path)).map(PathBuf::from)
        }
        #[cfg(not(target_os = "linux"))]
        None
    }

    fn search_in(self, around: &Surroundings) -> Search {
        self.search_among(around.candidates(self))
    }

    fn search_among(self, candidates: Vec<(Origin, PathBuf)>) -> Search {
        let mut steps = Vec::new();
        for (origin, path) in candidates {
            let bare = origin == Origin::System;
            let found = if bare || path.is_file() { self.open_at(&path, bare) } else { Ok(None) };
            let (outcome, opened) = match found {
                Ok(None) => (Outcome::Absent, None),
                Ok(opened) => (Outcome::Opened, opened),
                Err(why) => (Outcome::Unusable(why), None),
            };
            steps.push(Step { origin, path, outcome });
            if opened.is_some() {
                return Search { steps, opened };
            }
        }
        Search { steps, opened: None }
    }

    /// `None` when the system's loader knows of no such library.
    fn open_at(self, path: &Path, bare: bool) -> Result<Option<Opened>, String> {
        if self == Self::Nvrtc && !bare {
            open_builtins(path);
        }
        // SAFETY: the initialisers of NVIDIA's libraries have no preconditions.
        match unsafe { libloading::Library::new(path) } {
            Ok(library) => Ok(Some(Opened { of: self, path: path.into(), library })),
            Err(e) => {
                // The loader's own words are behind the error.
                let why = e.source().map_or_else(|| e.to_string(), |said| said.to_string());
                // It names the file it misses, which may also be one that the library needs.
                let missed = format!("{}: cannot open shared object file", path.display());
                if bare && why.starts_with(&missed) { Ok(None) } else { Err(why) }
            }
        }
    }
}

/// Folders of [`look_first_in`].
static FIRST: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Looks for every library but the driver in these folders before wheels, toolkits and the system's
/// places: a Python that runs this process knows better than files around it where its packages are.
/// A library that has been searched for stays what it is.
pub fn look_first_in(folders: Vec<PathBuf>) {
    *lock(&FIRST) = folders;
}

/// What became of the search for a library.
#[derive(Debug)]
pub struct Search {
    steps: Vec<Step>,
    opened: Option<Opened>,
}

impl Search {
    /// The files tried, in order; the last one is open if any is.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }
}

/// A file that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Why there.
    pub origin: Origin,
    /// The file; a bare name for the system's loader.
    pub path: PathBuf,
    /// What came of it.
    pub outcome: Outcome,
}

/// Why a place is looked in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// `FOVEATE_CUDA_LIBRARIES` names it.
    Variable,
    /// The process has it open already.
    Loaded,
    /// A package of the Python that runs this process, which said so ([`look_first_in`]).
    Interpreter,
    /// Packages of a Python.
    Wheel,
    /// A CUDA toolkit.
    Toolkit,
    /// The system's loader.
    System,
}

impl Origin {
    /// A word for reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Variable => LIBRARIES_VARIABLE,
            Self::Loaded => "loaded",
            Self::Interpreter => "interpreter",
            Self::Wheel => "wheel",
            Self::Toolkit => "toolkit",
            Self::System => "system",
        }
    }
}

/// What came of trying a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is not there.
    Absent,
    /// It is there and the loader refuses it: why.
    Unusable(String),
    /// It is open.
    Opened,
}

/// NVRTC 13.0 has no run path: it finds its builtins only when they are open already.
fn open_builtins(nvrtc: &Path) {
    let Some(Ok(entries)) = nvrtc.parent().map(std::fs::read_dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("libnvrtc-builtins.so") {
            // SAFETY: as in `Library::open_at`.
            if let Ok(library) = unsafe { libloading::Library::new(entry.path()) } {
                std::mem::forget(library);
            }
        }
    }
}

/// A struct of a library's functions, each found when the library is first used: a symbol that is
/// missing is an error then, and not a panic at a first call. One with a `?` before its name may be
/// missing: only what needs it is declined. The types are those of the library's header.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident of $library:expr;
     $($field:ident $symbol:literal ($($arg:ty),*) -> $result:ty;)*
     $(? $may:ident $may_symbol:literal ($($may_arg:ty),*) -> $may_result:ty;)*) => {
        $(#[$doc])*
        pub(crate) struct $name {
            $(pub $field: unsafe extern "C" fn($($arg),*) -> $result,)*
            $(pub $may: Option<unsafe extern "C" fn($($may_arg),*) -> $may_result>,)*
        }

        impl $name {
            fn load() -> Result<Self, $crate::error::GpuError> {
                let library = $library.open()?;
                // SAFETY: each type is that of the function in the library's header.
                unsafe {
                    Ok(Self {
                        $($field: library.function($symbol)?,)*
                        $($may: library.function($may_symbol).ok(),)*
                    })
                }
            }
        }
    };
}
pub(crate) use functions;

/// A library that is open.
#[derive(Debug)]
pub struct Opened {
    of: Library,
    path: PathBuf,
    library: libloading::Library,
}

impl Opened {
    /// Where it was found; a bare name when the system's loader found it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A function of the library.
    ///
    /// # Errors
    /// When the library has none of that name.
    ///
    /// # Safety
    /// `F` must be the function's type.
    pub(crate) unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F, GpuError> {
        // SAFETY: the caller vouches for the type; the library is never closed.
        match unsafe { self.library.get::<F>(symbol.as_bytes()) } {
            Ok(found) => Ok(*found),
            Err(_) => Err(GpuErrorKind::Symbol { library: self.of.name(), symbol }.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let file = root.path().join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "no library").unwrap();
        }
        root
    }

    #[test]
    fn places_are_tried_in_the_documented_order() {
        let root = tree(&[
            "mine/libnvrtc.so.13",
            "venv/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "venv/lib/python3.13/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "venv/lib/python3.13/site-packages/nvidia/cu12/lib/libnvrtc.so.12",
            "venv/lib/python3.13/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            "usr/local/lib/python3.11/dist-packages/nvidia/cu13/lib/libnvrtc.so.13",
            "conda/conda-meta/history",
            "conda/lib/libnvrtc.so.13",
            "cuda/lib64/libnvrtc.so.13",
        ]);
        let at = |name: &str| root.path().join(name);
        let around = Surroundings {
            named: vec![at("mine")],
            pythons: vec![at("venv"), at("usr"), at("conda"), at("nowhere")],
            toolkits: vec![at("cuda")],
        };
        let search = Library::Nvrtc.search_in(&around);
        let there = search.steps.iter().filter(|s| s.path.starts_with(root.path()));
        let there: Vec<_> = there
            .filter(|s| s.outcome != Outcome::Absent)
            .map(|s| {
                assert!(matches!(s.outcome, Outcome::Unusable(_)), "{s:?}");
                let path = s.path.strip_prefix(root.path()).unwrap().to_str().unwrap();
                (s.origin.name(), path.replace("site-packages/nvidia", "*"))
            })
            .collect();
        let expected = [
            (LIBRARIES_VARIABLE, "mine/libnvrtc.so.13"),
            ("wheel", "venv/lib/python3.13/*/cu13/lib/libnvrtc.so.13"),
            ("wheel", "venv/lib/python3.13/*/cu12/lib/libnvrtc.so.12"),
            ("wheel", "venv/lib/python3.13/*/cuda_nvrtc/lib/libnvrtc.so.12"),
            ("wheel", "venv/lib/python3.9/*/cuda_nvrtc/lib/libnvrtc.so.12"),
            ("wheel", "usr/local/lib/python3.11/dist-packages/nvidia/cu13/lib/libnvrtc.so.13"),
            ("wheel", "conda/lib/libnvrtc.so.13"),
            ("toolkit", "cuda/lib64/libnvrtc.so.13"),
        ];
        assert_eq!(there, expected.map(|(origin, path)| (origin, path.to_owned())));
        let system = search.steps.iter().find(|s| s.origin == Origin::System).unwrap();
        assert_eq!(system.path, Path::new("libnvrtc.so.13"));
    }

    #[test]
    fn a_file_is_taken_for_the_library_it_is_of() {
        let root = tree(&["libnvrtc.so.13.0", "libnvrtc-builtins.so.13.0", "libnccl.so.2"]);
        let files = ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13.0", "libnccl.so.2"];
        let named: Vec<PathBuf> = files.map(|name| root.path().join(name)).into();
        let around = Surroundings { named: named.clone(), ..Surroundings::default() };
        let of = |library: Library| -> Vec<PathBuf> {
            let all = around.candidates(library).into_iter();
            all.filter(|(origin, _)| *origin == Origin::Variable).map(|(_, path)| path).collect()
        };
        assert_eq!(of(Library::Nvrtc), [named[1].clone()]);
        assert_eq!(of(Library::Nccl), [named[2].clone()]);
        assert_eq!(of(Library::CublasLt), [] as [PathBuf; 0]);
    }

    #[test]
    fn the_driver_is_not_looked_for_among_wheels_and_toolkits() {
        let root = tree(&["lib/python3.12/site-packages/nvidia/cu13/lib/libcuda.so.1"]);
        let prefix = vec![root.path().to_owned()];
        let around = Surroundings { pythons: prefix.clone(), toolkits: prefix, named: vec![] };
        let places = around.candidates(Library::Driver);
        assert!(places.iter().all(|(origin, _)| *origin == Origin::System), "{places:?}");
    }

    #[test]
    fn a_library_that_is_nowhere_is_an_error_with_advice() {
        let missing = |unusable| -> String {
            let (library, advice) = (Library::Nvrtc.name(), Library::Nvrtc.advice());
            let tried = (1..=7).map(|n| format!("/{n}/libnvrtc.so").into()).collect();
            GpuError::from(GpuErrorKind::Missing { library, advice, tried, unusable }).to_string()
        };
        let said = missing(None);
        let places = "/1/libnvrtc.so, /2/libnvrtc.so, /3/libnvrtc.so, 4 more";
        let expected = format!("NVRTC was not found in 7 places ({places}); `pip install");
        assert!(said.starts_with(&expected), "{said}");
        let said = missing(Some("/x/libnvrtc.so.13: file too short".into()));
        let expected = "NVRTC cannot be opened (/x/libnvrtc.so.13: file too short); `pip install";
        assert!(said.starts_with(expected), "{said}");
    }

    #[test]
    fn a_bare_name_that_the_system_does_not_know_is_absent_and_a_text_file_is_unusable() {
        let absent = Library::Nccl.open_at(Path::new("libfoveate-has-none.so.2"), true);
        assert!(matches!(absent, Ok(None)), "{absent:?}");
        let root = tree(&["libnccl.so.2"]);
        let why = Library::Nccl.open_at(&root.path().join("libnccl.so.2"), false).unwrap_err();
        assert!(why.contains("libnccl.so.2: "), "{why}");
    }

    #[test]
    fn every_search_ends_with_the_bare_name() {
        for library in Library::ALL {
            let (origin, last) = Surroundings::of_process().candidates(library).pop().unwrap();
            assert_eq!((origin, last.components().count()), (Origin::System, 1), "{last:?}");
        }
    }
}
