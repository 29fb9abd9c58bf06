//! Files of a run that are damaged at random: what reads them says so, or gives what it gave before.
//! Nothing panics, aborts or hangs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use foveate_tensor::random::Random;

use super::process::Ended;
use super::training::Folder;

/// The commands that read a checkpoint, and what of their output is the answer.
const READERS: [&[&str]; 3] = [
    &["eval", "CHECKPOINT", "00.txt", "--json"],
    &["generate", "CHECKPOINT", "--prompt", "the", "--max-tokens", "6", "--seed", "1", "--json"],
    &["train", "recipe.toml", "--resume"],
];

/// Files of a checkpoint that people edit: other sizes of a rotation, other tokens.
const EDITED: [&str; 3] = ["config.json", "tokenizer.json", "tokenizer_config.json"];

/// A run of half its steps, and what each reader gives on it.
struct Fixture {
    folder: Folder,
    answers: Vec<Vec<String>>,
}

/// Rounds of damaged files.
pub fn rounds(foveate: PathBuf) -> impl FnMut(u64) -> Result<(), String> {
    let mut fixture = None;
    move |seed| {
        let fixture = match &mut fixture {
            Some(fixture) => fixture,
            // The same in every process: a round follows from its seed.
            None => fixture.insert(Fixture::new(&foveate)?),
        };
        fixture.round(&mut Random::new(seed))
    }
}

impl Fixture {
    fn new(foveate: &Path) -> Result<Self, String> {
        let folder = Folder::random(foveate, &mut Random::new(0))?;
        let half = format!("train.steps={}", folder.steps / 2);
        folder.succeed(&["train", "recipe.toml", "--set", &half])?;
        let answer = |args: &&[&str]| {
            let copy = folder.copy()?;
            let ended = run(&copy, args)?;
            match ended.error_line()? {
                None => answer(&copy, args, &ended),
                Some(line) => Err(format!("on intact files: {line}")),
            }
        };
        let answers = READERS.iter().map(answer).collect::<Result<_, _>>()?;
        Ok(Self { folder, answers })
    }

    fn round(&self, random: &mut Random) -> Result<(), String> {
        let folder = self.folder.copy()?;
        let newest = folder.newest()?;
        let mut files = Vec::new();
        list(&folder.path().join("run"), &mut files)?;
        list(&newest, &mut files)?;
        files.extend(["00.txt", "recipe.toml"].map(|name| folder.path().join(name)));
        let file = &files[random.below(files.len())];
        let done = damage(file, random).map_err(|e| format!("{}: {e}", file.display()))?;
        let reader = random.below(READERS.len());
        let shown = file.strip_prefix(folder.path()).unwrap_or(file).display();
        let story = |fault: String| {
            format!("`foveate {}` with {done} in {shown}: {fault}", READERS[reader].join(" "))
        };
        let ended = run(&folder, READERS[reader]).map_err(&story)?;
        // Another recipe, another document and another log are not damage, and answers differ; nor is
        // what people edit in a checkpoint, which has no checksum for that reason.
        let edited = |name: &&str| file.ends_with(name);
        let not_damage = !file.starts_with(&newest) || EDITED.iter().any(edited);
        if ended.error_line().map_err(&story)?.is_some() || not_damage {
            return Ok(());
        }
        let answer = answer(&folder, READERS[reader], &ended).map_err(&story)?;
        if answer == self.answers[reader] {
            return Ok(());
        }
        let mut both = answer.iter().zip(&self.answers[reader]);
        let told = both
            .find(|(found, intact)| found != intact)
            .map_or("a part of the answer".into(), |(found, intact)| {
                format!("{found} in place of {intact}")
            });
        Err(story(format!("gave {told}")))
    }
}

/// Runs a reader to its end.
fn run(folder: &Folder, args: &[&str]) -> Result<Ended, String> {
    let checkpoint = folder.newest()?.display().to_string();
    let place = |&arg: &&str| if arg == "CHECKPOINT" { checkpoint.clone() } else { arg.into() };
    let args: Vec<String> = args.iter().map(place).collect();
    folder.run(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

/// What a reader that succeeded gave: a line, for training one for each step.
fn answer(folder: &Folder, args: &[&str], ended: &Ended) -> Result<Vec<String>, String> {
    if args[0] == "train" {
        let steps = folder.steps_of("run")?;
        return Ok(steps.iter().map(|(step, both)| format!("step {step}: {both:?}")).collect());
    }
    let last = ended.stdout.lines().last().unwrap_or_default();
    let record: serde_json::Value =
        serde_json::from_str(last).map_err(|e| format!("stdout is no JSON: {e}: {last:?}"))?;
    Ok(vec![record[if args[0] == "eval" { "loss" } else { "text" }].to_string()])
}

/// The files below a folder, in order of their names.
fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("{}: {e}", folder.display());
    let entries = fs::read_dir(folder).map_err(fail)?;
    let mut paths = entries
        .map(|entry| entry.map(|e| e.path()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(fail)?;
    paths.sort();
    for path in paths {
        if path.is_dir() { list(&path, files)? } else { files.push(path) }
    }
    Ok(())
}

/// Damages a file and says how.
fn damage(file: &Path, random: &mut Random) -> std::io::Result<String> {
    let mut bytes = fs::read(file)?;
    let at = random.below(bytes.len().max(1));
    let done = match random.below(11) {
        0 => {
            fs::remove_file(file)?;
            return Ok("no file".into());
        }
        1 => {
            fs::remove_file(file)?;
            fs::create_dir(file)?;
            return Ok("a folder".into());
        }
        2 => {
            fs::remove_file(file)?;
            return special(file, random);
        }
        3 => {
            bytes.truncate(at);
            format!("the end cut off at byte {at}")
        }
        4 => {
            bytes.clear();
            "nothing".into()
        }
        5 => {
            let end = bytes.len().min(at + 1 + random.below(64));
            bytes[at.min(end)..end].fill(0);
            format!("zeros in bytes {at} to {end}")
        }
        6 => {
            bytes.extend((0..1 + random.below(40)).map(|_| random.bits() as u8));
            "more bytes at the end".into()
        }
        7 => {
            let digits: Vec<usize> =
                (0..bytes.len().min(1 << 16)).filter(|&i| bytes[i].is_ascii_digit()).collect();
            match digits.get(random.below(digits.len().max(1))) {
                Some(&digit) => {
                    bytes[digit] = b'0' + (bytes[digit] - b'0' + 1 + random.below(9) as u8) % 10;
                    format!("another digit at byte {digit}")
                }
                None => "no change".into(),
            }
        }
        _ => {
            let mut places = Vec::new();
            for _ in 0..1 + random.below(3) {
                let at = random.below(bytes.len().max(1));
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                    places.push(at);
                }
            }
            format!("a bit flipped at bytes {places:?}")
        }
    };
    fs::write(file, bytes)?;
    Ok(done)
}

/// Puts something in the place of a file that is no file, and says what: a device, a pipe, a link that
/// leads to itself or nowhere.
pub fn special(place: &Path, random: &mut Random) -> std::io::Result<String> {
    let target = ["/dev/zero", "/dev/full", "/dev/null", "/dev/random", "nowhere"];
    let link = |target: &Path| std::os::unix::fs::symlink(target, place);
    match random.below(target.len() + 2) {
        0 => {
            let made = Command::new("mkfifo").arg(place).status()?;
            assert!(made.success(), "mkfifo makes a pipe");
            Ok("a pipe that nobody writes to".into())
        }
        1 => link(place).map(|()| "a link to itself".into()),
        i => link(Path::new(target[i - 2])).map(|()| format!("a link to {}", target[i - 2])),
    }
}
