//! Where libraries are looked for: what the user names, the packages of Pythons, toolkits, and the
//! system's loader.

use std::env;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Origin;
use crate::library::{LIBRARIES_VARIABLE, Library};

/// What decides where libraries are looked for.
#[derive(Debug, Default)]
pub struct Surroundings {
    /// Folders and files of [`LIBRARIES_VARIABLE`].
    pub named: Vec<PathBuf>,
    /// Prefixes of Python environments, `/usr` for `/usr/bin/python3`.
    pub pythons: Vec<PathBuf>,
    /// Folders of CUDA toolkits.
    pub toolkits: Vec<PathBuf>,
}

impl Surroundings {
    /// What [`LIBRARIES_VARIABLE`] names, and nothing else.
    pub fn named() -> Self {
        Self { named: paths(LIBRARIES_VARIABLE), ..Self::default() }
    }

    /// Those of this process.
    pub fn of_process() -> Self {
        let folder = |variable: &&str| env::var_os(*variable).filter(|v| !v.is_empty());
        // A Python that runs this process goes by the name it was called with, which is in its
        // environment, and by its real path, which is in the installation behind it.
        let called = env::args_os().next().map(PathBuf::from);
        let running = [called, env::current_exe().ok()].into_iter().flatten();
        let mut pythons: Vec<PathBuf> = running.filter_map(|p| prefix_of(&p)).collect();
        let active = ["VIRTUAL_ENV", "CONDA_PREFIX"];
        pythons.extend(active.iter().filter_map(folder).map(PathBuf::from));
        let on_path = paths("PATH").into_iter().map(|f| f.join("python3")).find(|p| p.exists());
        pythons.extend(on_path.and_then(|p| match is_script(&p) {
            true => asked_prefix(&p, SCRIPT_TIMEOUT),
            false => prefix_of(&p),
        }));
        pythons.extend(env::home_dir().map(|home| home.join(".local")));
        let toolkits = ["CUDA_HOME", "CUDA_PATH"];
        let mut toolkits: Vec<_> = toolkits.iter().filter_map(folder).map(PathBuf::from).collect();
        toolkits.extend(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from));
        Self { named: paths(LIBRARIES_VARIABLE), pythons, toolkits }
    }

    /// The files that the variable names.
    pub fn candidates_named(&self, library: Library) -> Vec<(Origin, PathBuf)> {
        let mut all = self.candidates(library);
        all.retain(|(origin, _)| *origin == Origin::Variable);
        all
    }

    /// Every file to try, in order, existing or not.
    pub fn candidates(&self, library: Library) -> Vec<(Origin, PathBuf)> {
        let names = library.file_names();
        let stem = names[0].split(".so").next().expect("a part before the first cut");
        let mut places = Vec::new();
        let mut add = |origin: Origin, path: PathBuf| {
            if !places.iter().any(|(_, p)| *p == path) {
                places.push((origin, path));
            }
        };
        for given in &self.named {
            let file = given.file_name().unwrap_or_default().to_string_lossy();
            if given.is_file() {
                // A file is of one library; builtins and alternatives share its stem.
                if file.strip_prefix(stem).is_some_and(|rest| rest.starts_with(".so")) {
                    add(Origin::Variable, given.clone());
                }
            } else {
                names.iter().for_each(|name| add(Origin::Variable, given.join(name)));
            }
        }
        if !library.is_of_driver() {
            for folder in self.pythons.iter().flat_map(|prefix| wheels(prefix)) {
                names.iter().for_each(|name| add(Origin::Wheel, folder.join(name)));
            }
            for toolkit in &self.toolkits {
                for folder in ["lib64", "lib"].map(|lib| toolkit.join(lib)) {
                    names.iter().for_each(|name| add(Origin::Toolkit, folder.join(name)));
                }
            }
        }
        names.iter().for_each(|name| add(Origin::System, PathBuf::from(name)));
        places
    }
}

/// The paths that a variable of the environment lists.
fn paths(variable: &str) -> Vec<PathBuf> {
    let value = env::var_os(variable).unwrap_or_default();
    env::split_paths(&value).filter(|p| !p.as_os_str().is_empty()).collect()
}

/// The prefix of `bin/python3` or the like.
fn prefix_of(executable: &Path) -> Option<PathBuf> {
    let name = executable.file_name()?.to_str()?;
    let folder = executable.parent().filter(|_| name.starts_with("python"))?;
    Some(folder.parent()?.to_owned())
}

/// How long a script that stands for a Python may take to say which one.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(2);

/// Whether an executable is a script, as pyenv and asdf put in the place of a Python: where it lies
/// says nothing of where that Python's packages are.
fn is_script(executable: &Path) -> bool {
    let mut head = [0; 2];
    let read = std::fs::File::open(executable).and_then(|mut f| f.read_exact(&mut head));
    read.is_ok() && head == *b"#!"
}

/// The prefix that the interpreter behind a script gives; nothing when it takes longer than
/// `timeout`, after which it is ended.
fn asked_prefix(script: &Path, timeout: Duration) -> Option<PathBuf> {
    // A file and not a pipe: whatever the script leaves running cannot keep its end open.
    let mut said = tempfile::tempfile().ok()?;
    let mut child = Command::new(script)
        .args(["-I", "-c", "import sys; print(sys.prefix)"])
        .stdin(Stdio::null())
        .stdout(said.try_clone().ok()?)
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let began = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if began.elapsed() < timeout => thread::sleep(Duration::from_millis(5)),
            // Ended already, or about to: there is nothing to be done about an error.
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    };
    let mut text = String::new();
    said.rewind().ok()?;
    said.read_to_string(&mut text).ok()?;
    let prefix = text.trim();
    (status.success() && !prefix.is_empty()).then(|| prefix.into())
}

/// Folders that hold libraries of NVIDIA's in the packages below `prefix`.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    // Debian's pip installs to `/usr/local` and calls the folder `dist-packages`.
    for lib in ["lib", "lib64", "local/lib"].map(|lib| prefix.join(lib)) {
        for (name, python) in newest_first(&lib) {
            for packages in ["site-packages", "dist-packages"].map(|p| python.join(p)) {
                if !name.starts_with("python") {
                    continue;
                }
                let mut nvidia = newest_first(&packages.join("nvidia"));
                // `cu13` has all libraries of a version, and is newer than folders of one each.
                nvidia.sort_by_key(|(name, _)| {
                    name.strip_prefix("cu").is_none_or(|v| v.parse::<u32>().is_err())
                });
                found.extend(nvidia.into_iter().map(|(_, folder)| folder.join("lib")));
            }
        }
    }
    found.retain(|folder| folder.is_dir());
    // Conda's packages put libraries beside those of Python.
    if prefix.join("conda-meta").is_dir() {
        found.push(prefix.join("lib"));
    }
    found
}

/// Entries of a folder with their names; of `python3.9` and `python3.13` the latter first.
fn newest_first(folder: &Path) -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut named: Vec<(String, PathBuf)> =
        entries.map(|e| (e.file_name().to_string_lossy().into_owned(), e.path())).collect();
    named.sort_by(|(a, _), (b, _)| (b.len(), b).cmp(&(a.len(), a)));
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefix_of_a_python_is_above_its_bin() {
        let prefix = |path: &str| prefix_of(Path::new(path));
        assert_eq!(prefix("/opt/env/bin/python3.12"), Some("/opt/env".into()));
        assert_eq!(prefix("/usr/bin/foveate"), None);
        assert_eq!(prefix("python3"), None);
    }

    #[cfg(unix)]
    #[test]
    fn a_script_in_the_place_of_a_python_is_asked_and_not_waited_for() {
        use std::os::unix::fs::PermissionsExt;

        let root = tempfile::tempdir().unwrap();
        let script = |name: &str, body: &str| {
            let path = root.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        // Linux executes no file that another test's child has inherited open for writing.
        let ask = |path: &Path, timeout| {
            let tries = (0..20).map(|_| {
                thread::sleep(Duration::from_millis(5));
                asked_prefix(path, timeout)
            });
            tries.into_iter().find(Option::is_some).flatten()
        };
        let shim = script("python3", "echo /opt/versions/3.12");
        assert!(is_script(&shim) && !is_script(Path::new("/bin/sh")));
        assert_eq!(ask(&shim, SCRIPT_TIMEOUT), Some("/opt/versions/3.12".into()));
        let leaves = script("leaves", "sleep 5 & echo /opt/other");
        assert_eq!(ask(&leaves, SCRIPT_TIMEOUT), Some("/opt/other".into()));

        let began = Instant::now();
        let hangs = script("hangs", "exec sleep 30");
        assert_eq!(asked_prefix(&hangs, Duration::from_millis(50)), None);
        assert_eq!(asked_prefix(&script("fails", "echo /opt; exit 1"), SCRIPT_TIMEOUT), None);
        assert_eq!(asked_prefix(&root.path().join("none"), SCRIPT_TIMEOUT), None);
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    }
}
