//! Finding and opening what NVIDIA ships.
//!
//! Nothing is linked: a binary runs on machines with and without a GPU. Each library is looked
//! for in the same places, in this order:
//!
//! 1. `FOVEATE_CUDA_LIBRARIES`, a folder or a file (several are separated like `PATH`);
//! 2. wheels: `site-packages/nvidia/*/lib` of the active environment (`VIRTUAL_ENV`,
//!    `CONDA_PREFIX`) and of the `python3` on `PATH`;
//! 3. toolkits: `CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`;
//! 4. the bare name, which leaves the search to the system's loader.
//!
//! A library is opened by its absolute path and stays open for the life of the process.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::{CudaError, CudaErrorKind};

/// Folders or files to look in first.
pub const VARIABLE: &str = "FOVEATE_CUDA_LIBRARIES";

/// A library of NVIDIA's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// The driver's user half, `libcuda`.
    Driver,
    /// The run-time compiler.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// Collectives.
    Nccl,
}

impl Library {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Driver, Self::Nvrtc, Self::CublasLt, Self::Nccl];

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "the NVIDIA driver",
            Self::Nvrtc => "NVRTC",
            Self::CublasLt => "cuBLASLt",
            Self::Nccl => "NCCL",
        }
    }

    /// What is done with it.
    pub fn purpose(self) -> &'static str {
        match self {
            Self::Driver => "to run on a GPU",
            Self::Nvrtc => "to compile kernels",
            Self::CublasLt => "for the matrix products of training on a GPU",
            Self::Nccl => "to train on several GPUs",
        }
    }

    /// How to get it.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Driver => "install an NVIDIA driver of version 580 or newer",
            Self::Nvrtc => {
                "`pip install nvidia-cuda-nvrtc` in the active environment, install the CUDA \
                 toolkit, or point FOVEATE_CUDA_LIBRARIES at a folder that has libnvrtc.so.13"
            }
            Self::CublasLt => "`pip install nvidia-cublas` or install the CUDA toolkit",
            Self::Nccl => "`pip install nvidia-nccl-cu13` or install NCCL",
        }
    }

    /// File names, the preferred one first.
    fn file_names(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1", "nvcuda.dll"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Self::Nccl => &["libnccl.so.2", "libnccl.so"],
        }
    }

    /// Every place it is looked for, in order, existing or not.
    pub fn candidates(self) -> Vec<PathBuf> {
        let mut places: Vec<PathBuf> = Vec::new();
        let named = env::var_os(VARIABLE).unwrap_or_default();
        for given in env::split_paths(&named).filter(|p| !p.as_os_str().is_empty()) {
            if given.is_file() {
                let name = given.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let stem = self.file_names()[0].split(".so").next().unwrap_or_default();
                if name.starts_with(stem) {
                    places.push(given);
                }
            } else {
                places.extend(self.file_names().iter().map(|n| given.join(n)));
            }
        }
        for folder in folders() {
            places.extend(self.file_names().iter().map(|n| folder.join(n)));
        }
        places.extend(self.file_names().iter().map(PathBuf::from));
        places
    }

    /// Opens it, once in a process.
    ///
    /// # Errors
    /// When it is nowhere, with advice.
    pub fn open(self) -> Result<&'static Opened, CudaError> {
        static OPENED: [OnceLock<Result<Opened, CudaError>>; 4] = [const { OnceLock::new() }; 4];
        OPENED[self as usize].get_or_init(|| self.find()).as_ref().map_err(Clone::clone)
    }

    fn find(self) -> Result<Opened, CudaError> {
        let candidates = self.candidates();
        let tried = candidates.len();
        for path in candidates {
            let bare = path.parent().is_none_or(|p| p.as_os_str().is_empty());
            if !bare && !path.exists() {
                continue;
            }
            if self == Self::Nvrtc && !bare {
                open_builtins(&path);
            }
            // SAFETY: the initialisers of NVIDIA's libraries have no preconditions.
            if let Ok(library) = unsafe { libloading::Library::new(&path) } {
                return Ok(Opened { of: self, path, library });
            }
        }
        let (library, advice) = (self.name(), self.advice());
        Err(CudaErrorKind::Missing { library, advice, tried }.into())
    }
}

/// NVRTC 13.0 has no run path: it finds its builtins only when they are open already.
fn open_builtins(nvrtc: &Path) {
    let Some(Ok(entries)) = nvrtc.parent().map(std::fs::read_dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("libnvrtc-builtins.so") {
            // SAFETY: as in `Library::find`.
            if let Ok(library) = unsafe { libloading::Library::new(entry.path()) } {
                std::mem::forget(library);
            }
        }
    }
}

/// Folders of wheels and toolkits.
fn folders() -> Vec<PathBuf> {
    let mut sites = Vec::new();
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(prefix) = env::var_os(variable) {
            sites.extend(site_packages(Path::new(&prefix)));
        }
    }
    let path = env::var_os("PATH").unwrap_or_default();
    for folder in env::split_paths(&path) {
        // The environment of a python3 is found without running it: bin/python3 of a prefix.
        let python = folder.join("python3");
        if let (true, Some(prefix)) = (python.exists(), folder.parent()) {
            sites.extend(site_packages(prefix));
            break;
        }
    }
    let mut folders = Vec::new();
    for site in sites {
        let of_wheels = std::fs::read_dir(site.join("nvidia")).into_iter().flatten().flatten();
        let mut of_wheels: Vec<PathBuf> = of_wheels.map(|e| e.path().join("lib")).collect();
        of_wheels.sort();
        folders.extend(of_wheels.into_iter().filter(|p| p.is_dir()));
    }
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os).map(PathBuf::from);
    for toolkit in toolkits.chain([PathBuf::from("/usr/local/cuda")]) {
        folders.push(toolkit.join("lib64"));
    }
    folders
}

fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let versions = std::fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten();
    let mut sites: Vec<PathBuf> = versions
        .filter(|e| e.file_name().to_string_lossy().starts_with("python"))
        .map(|e| e.path().join("site-packages"))
        .collect();
    sites.sort();
    sites
}

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
    pub(crate) unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F, CudaError> {
        // SAFETY: the caller vouches for the type; the library is never closed.
        match unsafe { self.library.get::<F>(symbol.as_bytes()) } {
            Ok(found) => Ok(*found),
            Err(_) => Err(CudaErrorKind::Symbol { library: self.of.name(), symbol }.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wheels_of_an_environment_are_found() {
        let root = tempfile::tempdir().unwrap();
        let lib = root.path().join("lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).unwrap();
        assert_eq!(site_packages(root.path()), [root.path().join("lib/python3.12/site-packages")]);
        assert_eq!(site_packages(&root.path().join("nowhere")), [] as [PathBuf; 0]);
    }

    #[test]
    fn a_library_that_is_nowhere_is_an_error_with_advice() {
        let error: CudaError = CudaErrorKind::Missing {
            library: Library::Nvrtc.name(),
            advice: Library::Nvrtc.advice(),
            tried: 7,
        }
        .into();
        let said = error.to_string();
        assert!(said.starts_with("NVRTC was not found in 7 places; `pip install"), "{said}");
    }

    #[test]
    fn every_search_ends_with_the_bare_name() {
        for library in Library::ALL {
            let last = library.candidates().pop().unwrap();
            assert_eq!(last.components().count(), 1, "{last:?}");
        }
    }
}
