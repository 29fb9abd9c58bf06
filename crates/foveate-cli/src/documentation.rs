//! Whether what the documentation says can be followed: links and anchors of README, CONTRIBUTING,
//! `docs/` and the crates' front pages lead somewhere, files they name are there, and commands they
//! show are ones that the programs take.
//!
//! It stands beside the command line, not in a test of its own, because it asks clap itself: a
//! command is parsed as if it had been typed, and not run.

mod commands;
mod manifests;
mod page;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;

use commands::Repository;
use page::Page;

/// What a record says of itself before anything else.
const RECORD: [&str; 5] = ["date", "commit", "command", "machine", "clocks"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

/// The files of a folder and those below whose name ends so, in order.
fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path, end));
        } else if path.to_string_lossy().ends_with(end) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Every page that somebody reads: README, CONTRIBUTING, `docs/`, and front pages of crates.
fn pages() -> Vec<Page> {
    let root = root();
    let mut pages = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    pages.extend(files(&root.join("docs"), ".md"));
    pages.extend(files(&root.join("crates"), "/src/lib.rs"));
    pages.into_iter().map(|file| Page::read(&root, &file)).collect()
}

#[test]
fn links_files_and_commands_of_the_documentation_are_there() {
    let (pages, repository) = (pages(), Repository::new(root()));
    assert!(pages.len() >= 20, "{} pages", pages.len());
    let mut commands = 0;
    let mut wrong = Vec::new();
    for page in &pages {
        wrong.extend(page.broken_links(&pages, repository.root()));
        for (line, shown) in page.shown() {
            commands += usize::from(repository.is_command(shown));
            wrong.extend(
                repository.complaints(shown).map(|said| format!("{}:{line}: {said}", page.name)),
            );
        }
    }
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
    assert!(commands >= 50, "{commands} commands were found in all pages");
}

/// Rust without spaces, line ends and comments.
fn code(text: &str) -> String {
    let lines = text.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code));
    lines.flat_map(str::split_whitespace).collect()
}

#[test]
fn the_rust_that_pages_show_is_compiled() {
    let library = fs::read_to_string(root().join("crates/foveate/src/lib.rs")).unwrap();
    let excerpts =
        ["foveate/tests/excerpts", "foveate-tensor/src/ndarray", "foveate-tensor/src/dlpack"];
    let excerpts = excerpts.map(|file| {
        let text = fs::read_to_string(root().join(format!("crates/{file}.rs"))).unwrap();
        // What is behind a feature is an example of its module.
        code(&text.replace("//! ", ""))
    });
    let excerpts = excerpts.concat();
    let mut lines = 0;
    for page in pages().iter().filter(|page| page.name.ends_with(".md")) {
        // Whole programs, run as documentation of the public crate.
        if library.contains(&format!("include_str!(\"../../../{}\")", page.name)) {
            continue;
        }
        for line in page.rust().map(code) {
            assert!(excerpts.contains(&line), "{}: no test has `{line}`", page.name);
            lines += usize::from(!line.is_empty());
        }
    }
    assert!(lines >= 20, "{lines} lines of Rust were found outside of whole programs");
}

#[test]
fn a_front_page_has_an_example_that_is_compiled_and_names_its_manual() {
    // The native module of the Python package has no interface in Rust: what its users call is
    // documented in `docs/python.md`.
    let is_front = |name: &str| name.ends_with("/src/lib.rs") && !name.contains("foveate-py/");
    let fronts: Vec<Page> = pages().into_iter().filter(|page| is_front(&page.name)).collect();
    assert!(fronts.len() >= 13, "{} front pages", fronts.len());
    for page in fronts {
        assert!(page.rust().count() > 0, "{}: no example", page.name);
        let manual = |shown: &str| shown.starts_with("docs/") && shown.ends_with(".md");
        assert!(page.shown().any(|(_, shown)| manual(shown)), "{}: no manual", page.name);
    }
}

#[test]
fn the_table_of_contents_lists_every_page_of_the_book() {
    let docs = root().join("docs");
    let contents = Page::read(&root(), &docs.join("SUMMARY.md"));
    let mut listed: Vec<PathBuf> = contents.links().map(|link| docs.join(link)).collect();
    listed.push(docs.join("SUMMARY.md"));
    listed.sort();
    assert_eq!(listed, files(&docs, ".md"), "docs/SUMMARY.md beside the pages of docs/");
}

#[test]
fn a_record_says_when_by_what_and_where_it_was_measured() {
    for record in files(&root().join("docs/records"), ".md") {
        let text = fs::read_to_string(&record).unwrap();
        for row in RECORD.iter().filter(|_| !record.ends_with("README.md")) {
            assert!(text.contains(&format!("\n| {row} | ")), "{}: no `{row}`", record.display());
        }
    }
}

#[test]
fn the_readme_shows_the_mask_that_its_command_draws() {
    let page = Page::read(&root(), &root().join("README.md"));
    let shown: Vec<&str> = page
        .shown()
        .map(|(_, shown)| shown)
        .filter(|shown| shown.contains("--svg docs/"))
        .collect();
    let [command] = shown[..] else { panic!("{shown:?} draw pictures of docs/") };
    let mut words = shlex::split(command).unwrap();
    let drawn = tempfile::NamedTempFile::new().unwrap();
    let to = words.last_mut().unwrap();
    let kept = root().join(std::mem::replace(to, drawn.path().display().to_string()));
    words.push("--json".to_owned());
    let cli = crate::Cli::try_parse_from(words).unwrap();
    assert!(cli.command.run(&mut crate::Output::stdout()).is_ok());
    assert!(fs::read(drawn.path()).unwrap() == fs::read(&kept).unwrap(), "run it: {command}");
}

#[test]
fn the_readme_shows_the_speed_that_the_records_have() {
    let script = root().join("benches/summary.py");
    let Ok(done) = Command::new("python3").arg(script).arg("--check").output() else {
        println!("skipped: there is no python3");
        return;
    };
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}
