//! Whether a command that a page shows is one that its program takes.
//!
//! A command in a console block is whole: `foveate` commands are parsed as if they were typed. A
//! command in a sentence or a table may be a pattern (`foveate mask TEXT --len N`), so only its
//! subcommands and flags are looked for.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser, error::ErrorKind};
use foveate_train::recipe::Recipe;

use super::files;
use crate::Cli;

/// Folders whose files are named from the root of the repository.
const FOLDERS: [&str; 7] =
    ["crates/", "docs/", "recipes/", "conformance/", "scripts/", "benches/", ".ci/"];
/// Subcommands of cargo that come with it, or that CI installs.
const CARGO: [&str; 11] =
    ["bench", "build", "check", "clippy", "deny", "doc", "fmt", "install", "miri", "run", "test"];
/// Sections of a recipe.
const SECTIONS: [&str; 9] =
    ["run", "model", "attention", "data", "train", "precision", "optimizer", "schedule", "mesh"];
/// A recipe that is right.
const RECIPE: &str = include_str!("../../../../recipes/tiny.toml");
/// Programs of others, of which nothing is known here.
const OTHERS: [&str; 8] =
    ["$env/bin/python", "COMMAND", "cd", "cp", "export", "git", "mdbook", "pip"];

/// The repository, as commands and paths are looked up in it.
pub struct Repository {
    root: PathBuf,
    cli: clap::Command,
    /// Everything that a script can be asked, for flags that stand alone.
    scripts: String,
}

impl Repository {
    pub fn new(root: PathBuf) -> Self {
        let mut cli = Cli::command();
        cli.build();
        let scripts = ["benches", "scripts", ".ci"].map(|folder| files(&root.join(folder), ""));
        let scripts = scripts.iter().flatten().filter_map(|f| fs::read_to_string(f).ok()).collect();
        Self { root, cli, scripts }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether this is a command of ours.
    pub fn is_command(&self, shown: &str) -> bool {
        let program = shown.split_whitespace().next().unwrap_or_default();
        let script = program.starts_with("scripts/") || program.starts_with(".ci/");
        let ours = ["foveate", "cargo", "python3", "gpu-bundle/run.sh"].contains(&program);
        (ours || script) && shown.contains(' ')
    }

    /// What is wrong with a piece of code that a page shows.
    pub fn complaints<'a>(&'a self, shown: &'a str) -> impl Iterator<Item = String> + 'a {
        let words = shlex::split(shown).unwrap_or_default();
        let mut said: Vec<String> = words.iter().filter_map(|word| self.no_file(word)).collect();
        let variables = words.iter().flat_map(|word| word.split(|c| "=`$()".contains(c)));
        said.extend(variables.filter_map(|word| self.no_variable(word)));
        let keys = words.iter().flat_map(|word| word.split(|c| "=(){}[],;:`".contains(c)));
        said.extend(keys.filter_map(no_key));
        let sets = words.len() > 1 && is_setting(&words[0]);
        if sets || self.is_command(shown) {
            // What stands between pipes and redirections is a command of its own.
            let commands = words.split(|word| ["|", "&&", ";"].contains(&word.as_str()));
            said.extend(commands.filter_map(|command| self.refused(command).err()));
        } else if let [flag] = &words[..]
            && flag.starts_with("--")
            && !self.is_flag(flag)
        {
            said.push("no command has this flag".to_owned());
        }
        said.into_iter().map(move |said| format!("`{shown}`: {said}"))
    }

    /// A path of the repository that is not there. What is after a `*` is not looked at.
    fn no_file(&self, word: &str) -> Option<String> {
        let word = word.trim_end_matches([',', '.', ';', ':']);
        FOLDERS.iter().find(|folder| word.starts_with(**folder))?;
        let fixed = match word.split_once(['*', '<', '{']) {
            Some((before, _)) => before.rsplit_once('/').map_or("", |(folder, _)| folder),
            None => word,
        };
        (!self.root.join(fixed).exists()).then(|| format!("there is no {word}"))
    }

    /// A variable of the environment that no program reads.
    fn no_variable(&self, word: &str) -> Option<String> {
        word.strip_prefix("FOVEATE_")?;
        let sources = ["crates", "python/foveate", "scripts", ".ci"]
            .map(|folder| files(&self.root.join(folder), ""));
        let reads = |file: &PathBuf| {
            let is_this = file.components().any(|part| part.as_os_str() == "documentation");
            let text = if is_this { None } else { fs::read_to_string(file).ok() };
            let is_part = |c: char| c.is_ascii_uppercase() || c == '_';
            text.is_some_and(|text| text.split(|c| !is_part(c)).any(|name| name == word))
        };
        (!sources.iter().flatten().any(reads)).then(|| format!("nothing reads {word}"))
    }

    /// Whether a flag belongs to any command of ours, or to cargo in a sentence.
    fn is_flag(&self, flag: &str) -> bool {
        let long = flag.trim_start_matches('-').split(['=', ' ']).next().unwrap_or_default();
        fn has(command: &clap::Command, long: &str) -> bool {
            command.get_arguments().any(|arg| arg.get_long() == Some(long))
                || command.get_subcommands().any(|inner| has(inner, long))
        }
        long.is_empty() || has(&self.cli, long) || self.scripts.contains(&format!("--{long}"))
    }

    /// Checks one command.
    fn refused(&self, words: &[String]) -> Result<(), String> {
        let given = &words[words.iter().take_while(|word| is_setting(word)).count()..];
        let end = given.iter().position(|word| word == ">").unwrap_or(given.len());
        let words: Vec<&str> = given[..end].iter().map(String::as_str).collect();
        let Some((&program, rest)) = words.split_first() else { return Ok(()) };
        match program.trim_start_matches("target/debug/") {
            "foveate" => self.foveate(rest),
            "foveate-conformance" => self.script("crates/foveate-conformance/src/options.rs", rest),
            "cargo" => self.cargo(rest),
            "python3" => match rest.split_first() {
                Some((script, rest)) => self.script(script, rest),
                None => Ok(()),
            },
            "gpu-bundle/run.sh" => self.script("scripts/gpu-run.sh", rest),
            // It runs the command that it is given.
            "scripts/emulated-gpu.sh" => self.refused(&given[1..]),
            _ if program.starts_with("scripts/") || program.starts_with(".ci/") => {
                self.script(program, rest)
            }
            _ if OTHERS.contains(&program) => Ok(()),
            _ => Err(format!("nothing is known here of `{program}`")),
        }
    }

    /// A command of ours: as typed where it is whole, else by its subcommands and flags.
    fn foveate(&self, rest: &[&str]) -> Result<(), String> {
        let is_pattern = |word: &&str| {
            let letters: Vec<char> = word.chars().filter(|c| c.is_alphabetic()).collect();
            word.starts_with('[')
                || *word == "…"
                || letters.iter().all(|c| c.is_uppercase()) && letters.len() == word.len()
        };
        let typed = std::iter::once("foveate").chain(rest.iter().copied());
        match Cli::try_parse_from(typed) {
            Ok(_) => return Ok(()),
            Err(e) if [ErrorKind::DisplayHelp, ErrorKind::DisplayVersion].contains(&e.kind()) => {
                return Ok(());
            }
            // A sentence may name a command without what it needs.
            Err(e) if e.kind() == ErrorKind::MissingRequiredArgument => {}
            Err(e) if e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {}
            Err(_) if rest.iter().any(is_pattern) => {}
            Err(e) => return Err(e.to_string().lines().next().unwrap_or_default().to_owned()),
        }
        let mut command = &self.cli;
        for word in rest.iter().map(|word| word.trim_matches(['[', ']'])) {
            if let Some(inner) = command.find_subcommand(word) {
                command = inner;
            } else if command.has_subcommands() && !word.starts_with('-') && word != "…" {
                return Err(format!("`{}` has no command `{word}`", command.get_name()));
            } else if let Some(long) = word.strip_prefix("--")
                && !command.get_arguments().any(|arg| arg.get_long() == Some(long))
            {
                return Err(format!("`{}` has no flag --{long}", command.get_name()));
            }
        }
        Ok(())
    }

    /// A script takes the flags and words that stand in it.
    fn script(&self, script: &str, rest: &[&str]) -> Result<(), String> {
        let text = fs::read_to_string(self.root.join(script))
            .map_err(|_| format!("there is no script {script}"))?;
        let known = |word: &&&str| {
            let is_name = word.chars().all(|c| c.is_lowercase());
            let name = word.split('=').next().unwrap_or_default();
            !(word.starts_with("--") || script.ends_with(".sh") && is_name)
                || text
                    .split(|c: char| !(c.is_alphanumeric() || "-_".contains(c)))
                    .any(|w| w == name)
        };
        match rest.iter().find(|word| !known(word)) {
            None => Ok(()),
            Some(word) => Err(format!("{script} does not know `{word}`")),
        }
    }

    /// A cargo command: packages, targets and tests that it names are there, and what a binary is
    /// given is checked like a command of its own.
    fn cargo(&self, rest: &[&str]) -> Result<(), String> {
        let ours = rest.iter().position(|word| *word == "--");
        let (rest, given) = match ours {
            Some(at) => (&rest[..at], &rest[at + 1..]),
            None => (rest, &[][..]),
        };
        let mut words = rest.iter().filter(|word| !word.starts_with('+'));
        let subcommand = *words.next().unwrap_or(&"");
        if !CARGO.contains(&subcommand) {
            return Err(format!("nothing is known here of `cargo {subcommand}`"));
        }
        let (mut package, mut runs_ours) = ("foveate-cli", subcommand == "run");
        while let Some(word) = words.next() {
            let mut value = || words.next().copied().ok_or(format!("{word} is given nothing"));
            match *word {
                "-p" | "--package" => {
                    package = value()?;
                    self.there(&format!("crates/{package}/Cargo.toml"))?;
                    runs_ours &= package == "foveate-cli";
                }
                "--example" => {
                    runs_ours = false;
                    self.there(&format!("crates/{package}/examples/{}.rs", value()?))?;
                }
                "--test" => {
                    let name = value()?;
                    let folder = self.there(&format!("crates/{package}/tests/{name}/main.rs"));
                    self.there(&format!("crates/{package}/tests/{name}.rs")).or(folder)?;
                }
                "--bin" => {
                    let name = value()?;
                    if !["foveate", "foveate-conformance"].contains(&name) {
                        return Err(format!("there is no binary `{name}`"));
                    }
                }
                "--path" => self.there(value()?)?,
                "--target" | "--features" | "--profile" | "--manifest-path" => drop(value()?),
                word if word.starts_with('-') => {}
                filter if subcommand == "test" => self.has_test(package, filter)?,
                _ => {}
            }
        }
        if runs_ours { self.foveate(given) } else { Ok(()) }
    }

    fn there(&self, path: &str) -> Result<(), String> {
        if self.root.join(path).exists() { Ok(()) } else { Err(format!("there is no {path}")) }
    }

    /// Whether a test or a module of the package has the filter in its name.
    fn has_test(&self, package: &str, filter: &str) -> Result<(), String> {
        let sources = files(&self.root.join("crates").join(package), ".rs");
        let named = |file: &PathBuf| {
            let text = fs::read_to_string(file).unwrap_or_default();
            file.to_string_lossy().contains(filter)
                || text
                    .split("fn ")
                    .skip(1)
                    .any(|after| after.split('(').next().is_some_and(|name| name.contains(filter)))
        };
        if sources.iter().any(named) {
            return Ok(());
        }
        Err(format!("{package} has no test with `{filter}` in its name"))
    }
}

/// A key of a recipe, such as `train.steps`, that no recipe takes.
fn no_key(word: &str) -> Option<String> {
    let (section, rest) = word.split_once('.')?;
    let key = rest.split('.').next().unwrap_or_default();
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    // Files, names of tensors, and what a checkpoint's `config.json` has.
    let other = match section {
        "model" => ["architecture", "layers", "norm", "rs", "safetensors"].contains(&key),
        "run" => key == "sh",
        _ => false,
    };
    if !SECTIONS.contains(&section) || other || key.is_empty() || !key.chars().all(is_part) {
        return None;
    }
    // Whatever a key takes, it is no date; one that is not there is said to be unknown.
    let set = format!("{section}.{key}=1979-05-27");
    let told = Recipe::parse(RECIPE, "recipe", &[set]).err()?.to_string();
    told.contains(&format!("unknown field `{key}`"))
        .then(|| format!("a recipe has no key {section}.{key}"))
}

/// `NAME=value`, before a command.
fn is_setting(word: &str) -> bool {
    let is_part = |c: char| c.is_ascii_uppercase() || c == '_';
    word.split_once('=').is_some_and(|(name, _)| !name.is_empty() && name.chars().all(is_part))
}

#[test]
fn commands_that_nobody_takes_are_found() {
    let repository = Repository::new(super::root());
    let said = |shown: &str| repository.complaints(shown).collect::<Vec<_>>().join("\n");
    for right in [
        "foveate mask \"causal & window(256)\" --len 2048",
        "foveate mask TEXT --len N",
        "foveate train RECIPE [--set key=value] [--resume]",
        "foveate train recipes/tiny.toml --set train.steps=20",
        "foveate explain --device l40s … --backward",
        "foveate bench gpu --list --json > cases.jsonl",
        "cargo run --release -- train recipes/tiny.toml   # trains",
        "FOVEATE_CASE=\"part of a name\" cargo test -p foveate-conformance every_case",
        "cargo run -p foveate --example documents",
        "python3 benches/cpu_peers.py --quick --threads 2",
        "gpu-bundle/run.sh all",
        "scripts/emulated-gpu.sh target/debug/foveate-conformance run --only packed",
        "crates/*/src/lib.rs",
        "--json",
        "softmax(q·k)",
        "train.recompute_layers = N",
        "attention.learned.rel_bias.shape",
        "model.safetensors",
    ] {
        assert_eq!(said(right), "", "{right}");
    }
    for (wrong, why) in [
        ("foveate mask causal --lenn 2048", "unexpected argument '--lenn'"),
        ("foveate mask causal --len many", "invalid value 'many'"),
        ("foveate mask TEXT --length N", "has no flag --length"),
        ("foveate bench tpu", "unrecognized subcommand 'tpu'"),
        ("foveate train RECIPE [--sett key=value]", "has no flag --sett"),
        ("foveate train recipes/tiny.tml", "there is no recipes/tiny.tml"),
        ("cargo run --release -- trian recipes/tiny.toml", "unrecognized subcommand 'trian'"),
        ("cargo test -p foveate-conformence", "there is no crates/foveate-conformence"),
        ("cargo test -p foveate-conformance every_csae", "has no test with `every_csae`"),
        ("cargo run -p foveate --example document", "there is no crates/foveate/examples/document"),
        ("TRYBUILD=overwrite cargo test -p foveate-mods --test refuse", "there is no crates"),
        ("python3 benches/cpu_peers.py --quik", "does not know `--quik`"),
        ("gpu-bundle/run.sh everything", "does not know `everything`"),
        ("scripts/emulated-gpu.sh foveate doctr", "unrecognized subcommand 'doctr'"),
        ("scripts/emulated-gpu.sh foveate-conformance run --onyl packed", "not know `--onyl`"),
        ("scripts/gpu.sh", "there is no scripts/gpu.sh"),
        ("crates/foveate-cpu/src/lanes.rs", "there is no crates/foveate-cpu/src/lanes.rs"),
        ("FOVEATE_CASES", "nothing reads FOVEATE_CASES"),
        ("--jsonn", "no command has this flag"),
        ("train.recompute_layer = N", "a recipe has no key train.recompute_layer"),
        ("optimizer.z_los", "a recipe has no key optimizer.z_los"),
    ] {
        assert!(said(wrong).contains(why), "{wrong}: {}", said(wrong));
    }
}
