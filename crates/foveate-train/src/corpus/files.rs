//! The files that patterns name.
//!
//! A pattern is walked from its folders without wildcards, through links, but not into a folder that it came
//! through: a link that leads back gives files no further names. Each file is taken once, by device and inode.

use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

use walkdir::{DirEntry, WalkDir};

use super::{Asker, Sources, unreadable};
use crate::error::TrainError;

/// Names that a pattern may be compared with. More are links that lead to one another in ever new ways.
const MOST_NAMES: usize = 10_000_000;

/// All files of `sources`, in the order of their paths, each once.
///
/// # Errors
/// If something is no pattern, matches nothing, or a folder cannot be read.
pub fn find(sources: &Sources) -> Result<Vec<PathBuf>, TrainError> {
    let root = sources.root.as_path();
    let shown = if root.as_os_str().is_empty() { Path::new(".") } else { root };
    let refuse = |pattern: &str, e: &dyn std::fmt::Display| {
        TrainError::data(shown, None, format!("`{pattern}` is not a file pattern: {e}"))
    };
    let mut excluded = Vec::new();
    for pattern in &sources.exclude {
        excluded.push(glob::Pattern::new(pattern).map_err(|e| refuse(pattern, &e))?);
    }
    if sources.files.is_empty() {
        let message = format!("no files are named: give paths or globs{}", sources.asker.names());
        return Err(TrainError::data(shown, None, message));
    }
    let mut files = Vec::new();
    for pattern in &sources.files {
        let walk = Walk::of(root, pattern).map_err(|e| refuse(pattern, &e))?;
        let mut found = false;
        walk.files(MOST_NAMES, sources.asker, |path| {
            found = true;
            let relative = path.strip_prefix(root).unwrap_or(&path);
            if !excluded.iter().any(|pattern| pattern.matches_path(relative)) {
                files.push(path);
            }
        })?;
        if !found {
            return Err(TrainError::data(shown, None, no_match(root, pattern)));
        }
    }
    // Of the names of a file the one nearest to the root stays: the others go through links.
    files.sort_by_cached_key(|path| (path.components().count(), path.clone()));
    let mut known = HashSet::new();
    let mut once = Vec::with_capacity(files.len());
    for path in files {
        if known.insert(identity(&path).map_err(|e| unreadable(&path, &e))?) {
            once.push(path);
        }
    }
    once.sort();
    Ok(once)
}

/// A pattern, ready to be walked.
struct Walk {
    /// The folder where its first wildcard is looked for, or the file that it names.
    start: PathBuf,
    /// The pattern below that.
    below: glob::Pattern,
    /// Levels of folders below, without limit where the pattern has `**`.
    depth: usize,
    /// Whether names that begin with a point are looked at.
    hidden: bool,
}

impl Walk {
    fn of(root: &Path, pattern: &str) -> Result<Self, glob::PatternError> {
        // What is wrong is said of the whole.
        glob::Pattern::new(pattern)?;
        let parts = Path::new(pattern).components().filter(|part| *part != Component::CurDir);
        let parts: Vec<Component<'_>> = parts.collect();
        let text = |part: &Component<'_>| part.as_os_str().to_string_lossy().into_owned();
        let wild = |part: &Component<'_>| text(part).contains(['*', '?', '[']);
        let first = parts.iter().position(wild).unwrap_or(parts.len());
        let start = parts[..first].iter().fold(root.to_path_buf(), |path, part| path.join(part));
        let below: Vec<String> = parts[first..].iter().map(text).collect();
        Ok(Self {
            start,
            depth: if below.iter().any(|part| part == "**") { usize::MAX } else { below.len() },
            hidden: below.iter().any(|part| part.starts_with('.')),
            below: glob::Pattern::new(&below.join("/"))?,
        })
    }

    /// Gives all files to `take`, and stops after `most` names, with an error in the words of `asker`.
    fn files(
        &self,
        most: usize,
        asker: Asker,
        mut take: impl FnMut(PathBuf),
    ) -> Result<(), TrainError> {
        let options = glob::MatchOptions {
            require_literal_separator: true,
            require_literal_leading_dot: true,
            ..Default::default()
        };
        let dot = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(b".");
        let here = Path::new(".");
        let start = if self.start.as_os_str().is_empty() { here } else { &self.start };
        let walk = WalkDir::new(start).follow_links(true).max_depth(self.depth).into_iter();
        let seen = |entry: &DirEntry| entry.depth() == 0 || self.hidden || !dot(entry.file_name());
        for (count, entry) in walk.filter_entry(seen).enumerate() {
            if count == most {
                let message = format!(
                    "there are more than {most} names below this folder; where links lead to one \
                     folder in many ways, name folders without them{}",
                    asker.names()
                );
                return Err(TrainError::data(start, None, message));
            }
            let entry = match entry {
                Ok(entry) => entry,
                Err(e) => match (e.path().filter(|path| path.metadata().is_ok()), e.io_error()) {
                    (Some(path), Some(reason)) => return Err(unreadable(path, reason)),
                    // A link into a folder that it stands in, or to nothing.
                    _ => continue,
                },
            };
            let below = entry.path().strip_prefix(start).unwrap_or(entry.path());
            if entry.file_type().is_file() && self.below.matches_path_with(below, options) {
                let below = below.to_path_buf();
                take(if start == here { below } else { entry.into_path() });
            }
        }
        Ok(())
    }
}

/// What two names of one file share: device and inode.
#[cfg(unix)]
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    path.metadata().map(|file| (file.dev(), file.ino()))
}

/// What two names of one file share: the path with its links resolved.
#[cfg(not(unix))]
fn identity(path: &Path) -> std::io::Result<PathBuf> {
    path.canonicalize()
}

/// What to say of a pattern that matches no file under `root`.
fn no_match(root: &Path, pattern: &str) -> String {
    let named = root.join(pattern);
    if Path::new(pattern).is_relative() && !root.as_os_str().is_empty() && !root.is_dir() {
        let is = if root.exists() { "is no folder" } else { "there is no such folder" };
        return format!("{is}; set data.root to the folder of the documents");
    }
    if named.exists() && !named.is_dir() {
        return format!("`{pattern}` is no regular file; copy what it gives into one");
    }
    if named.is_dir() {
        let inside = Path::new(pattern).join("**/*");
        return format!(
            "`{pattern}` is a folder; write `{}` for the files in it",
            inside.display()
        );
    }
    format!("no file matches `{pattern}`; patterns are relative to this folder")
}

#[cfg(test)]
mod tests {
    use super::super::tests::{folder, scan, sources};
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_file_is_one_document_however_many_names_links_give_it() {
        let dir = folder(&[("a.txt", b"a"), ("sub/b.txt", b"b")]);
        let link = |to: &str, name: &str| {
            std::os::unix::fs::symlink(dir.path().join(to), dir.path().join(name)).unwrap();
        };
        link("", "sub/loop");
        link("a.txt", "0.txt");
        std::fs::hard_link(dir.path().join("a.txt"), dir.path().join("sub/z.txt")).unwrap();
        let corpus = scan(&sources(&dir, &["**/*.txt"])).unwrap();
        let found: Vec<u32> =
            (0..corpus.len()).map(|i| corpus.document(i).unwrap().tokens[1]).collect();
        assert_eq!(found, [u32::from(b'a'), u32::from(b'b')]);
        let name = |i: usize| corpus.files()[i].strip_prefix(dir.path()).unwrap().to_owned();
        assert_eq!([name(0), name(1)], [Path::new("0.txt"), Path::new("sub/b.txt")]);
    }

    #[test]
    fn files_come_sorted_once_and_without_the_excluded() {
        let dir =
            folder(&[("b.rs", b"b"), ("a/z.rs", b"z"), ("a/y.md", b"y"), ("target/t.rs", b"t")]);
        let mut sources = sources(&dir, &["**/*.rs", "b.rs", "**/*.md"]);
        sources.exclude = vec!["target/**".to_owned()];
        let corpus = scan(&sources).unwrap();
        let names: Vec<_> = corpus
            .files()
            .iter()
            .map(|path| path.strip_prefix(dir.path()).unwrap().to_owned())
            .collect();
        assert_eq!(names, [Path::new("a/y.md"), Path::new("a/z.rs"), Path::new("b.rs")]);
        assert_eq!(corpus.document(0).unwrap().tokens, [256, u32::from(b'y'), 256]);
        assert_eq!(corpus.document(0).unwrap().learned, [false, true, true]);
    }

    #[test]
    fn a_pattern_without_a_file_says_so() {
        let dir = folder(&[("a.txt", b"a")]);
        let error = scan(&sources(&dir, &["*.rs"])).unwrap_err().to_string();
        assert!(error.contains("no file matches `*.rs`"), "{error}");
        let mut elsewhere = sources(&dir, &["*.txt"]);
        elsewhere.root = dir.path().join("nowhere");
        for says in ["nowhere: there is no such folder; set data.root", "a.txt: is no folder; set"]
        {
            let error = scan(&elsewhere).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
            elsewhere.root = dir.path().join("a.txt");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_device_is_said_to_be_no_regular_file() {
        let error = scan(&sources(&folder(&[]), &["/dev/zero"])).unwrap_err().to_string();
        assert!(error.contains("`/dev/zero` is no regular file"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn folders_that_link_to_one_another_are_walked_in_bounded_time() {
        let dir = folder(&[("a.txt", b"a"), ("one/b.txt", b"b"), ("two/c.txt", b"c")]);
        for (at, to) in
            ["", "one", "two"].iter().flat_map(|at| [(at, ""), (at, "one"), (at, "two")])
        {
            let link = dir.path().join(at).join(format!("via-{to}"));
            std::os::unix::fs::symlink(dir.path().join(to), link).unwrap();
        }
        std::os::unix::fs::symlink("nowhere", dir.path().join("nothing.txt")).unwrap();
        std::os::unix::fs::symlink("itself.txt", dir.path().join("itself.txt")).unwrap();
        let found = find(&sources(&dir, &["**/*.txt"])).unwrap();
        let names: Vec<_> =
            found.iter().map(|path| path.strip_prefix(dir.path()).unwrap()).collect();
        assert_eq!(names, [Path::new("a.txt"), Path::new("one/b.txt"), Path::new("two/c.txt")]);
        // Links that lead to one folder in ever more ways are no loop.
        let walk = Walk::of(dir.path(), "**/*.txt").unwrap();
        let told = |asker| walk.files(20, asker, |_| ()).unwrap_err().to_string();
        let (recipe, command) = (told(Asker::Recipe), told(Asker::Command));
        assert!(recipe.contains("there are more than 20 names below this folder"), "{recipe}");
        assert!(recipe.ends_with("name folders without them in data.files"), "{recipe}");
        assert!(command.ends_with("name folders without them"), "{command}");
    }

    #[test]
    fn patterns_are_matched_folder_by_folder() {
        let dir = folder(&[
            ("a.rs", b"a"),
            ("x/a.rs", b"b"),
            ("x/y/a.rs", b"c"),
            (".dot/a.rs", b"d"),
            ("x[1]/a.rs", b"e"),
        ]);
        let found = |pattern: &str| {
            let found = find(&sources(&dir, &[pattern])).map_err(|e| e.to_string())?;
            let name =
                |path: &PathBuf| path.strip_prefix(dir.path()).unwrap().display().to_string();
            Ok::<_, String>(found.iter().map(name).collect::<Vec<_>>().join(" "))
        };
        for (pattern, wanted) in [
            ("*.rs", "a.rs"),
            ("./*.rs", "a.rs"),
            ("*/a.rs", "x/a.rs x[1]/a.rs"),
            ("x/*.rs", "x/a.rs"),
            ("x/**/*.rs", "x/a.rs x/y/a.rs"),
            ("**/a.rs", "a.rs x/a.rs x/y/a.rs x[1]/a.rs"),
            (".dot/*", ".dot/a.rs"),
            ("x/y/a.rs", "x/y/a.rs"),
            ("x/../x/?.rs", "x/../x/a.rs"),
            ("x[[]1]/a.rs", "x[1]/a.rs"),
        ] {
            assert_eq!(found(pattern).as_deref(), Ok(wanted), "{pattern}");
        }
        let told = found("x/***").unwrap_err();
        assert!(told.contains("`x/***` is not a file pattern: "), "{told}");
    }
}
