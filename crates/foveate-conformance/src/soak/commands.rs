//! Command lines that are wrong, or right in a way that nobody thought of: an answer or one clear
//! error, in bounded time and memory.

use std::path::{Path, PathBuf};
use std::time::Duration;

use foveate_tensor::random::Random;

use super::damage::special;
use super::process::{self, Full};
use super::training::Folder;

/// Commands that expect to take more than a minute refuse; the rest is for a machine with other work.
const LIMIT: Duration = Duration::from_secs(180);

/// Command lines that work, on the files of a small run.
const WORKING: [&str; 12] = [
    "mask 'causal & window(6)' --len 64 --tile 16x16",
    "mask 'causal & document' --doc-lens 20,30,14 --json",
    "mask 'kv < lens[b]' --len 40 --buffer lens=9,23 --batch-index 1 --svg mask.svg",
    "mask 'q >= kv && q - kv < n * (h + 1)' --len 50 --kv-len 70 --scalar n=7 --head 1",
    "explain --heads 8/2 --len 128 --dim 64 --dtype bf16 --mask causal --backward",
    "explain --heads 8 --len 128 --dim 64 --score softcap(30) --dropout 0.1 --json",
    "explain --device l40s --heads 28/4 --len 512 --dim 128 --dtype f16 --page-size 16",
    "explain --recipe recipe.toml --set data.len=64 --json",
    "eval CHECKPOINT 00.txt 01.txt --len 32 --batch-rows 2 --json",
    "generate CHECKPOINT --prompt the --temperature 0.5 --top-k 5 --top-p 0.9 --seed 3",
    "train recipe.toml --resume --set train.steps=13 --json",
    "train recipe.toml --start-over --set train.steps=1 --set model.hidden_size=16",
];

/// What stands in the place of an argument, or beside it.
const STRANGE: [&str; 44] = [
    "",
    "-1",
    "0",
    "1",
    "2",
    "7",
    "1000",
    "2147483647",
    "2147483648",
    "4294967296",
    "99999999999999999999",
    "-0.5",
    "nan",
    "inf",
    "1e308",
    "1e-308",
    "x",
    "é",
    "🦀🦀",
    "\u{202e}",
    "-",
    "--",
    "--json",
    "--len",
    "--seed",
    "--no-such-option",
    "causal &",
    "q >=",
    "1/0",
    "0x0",
    "1,2,,3",
    "a=b",
    "=",
    ".",
    "/",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "special",
    "x=special",
    "nowhere/at/all",
    "'",
    "\\",
    "%s%n",
];

/// Rounds of command lines.
pub fn rounds(foveate: PathBuf) -> impl FnMut(u64) -> Result<(), String> {
    let mut fixture = None;
    move |seed| {
        let fixture = match &mut fixture {
            Some(fixture) => fixture,
            // The same in every process: a round follows from its seed.
            None => fixture.insert(trained(&foveate)?),
        };
        round(fixture, &mut Random::new(seed))
    }
}

/// A run of 12 steps.
fn trained(foveate: &Path) -> Result<Folder, String> {
    let folder = Folder::random(foveate, &mut Random::new(0))?;
    folder.succeed(&["train", "recipe.toml", "--set", "train.steps=12"])?;
    Ok(folder)
}

fn round(fixture: &Folder, random: &mut Random) -> Result<(), String> {
    let folder = fixture.copy()?;
    let working = WORKING[random.below(WORKING.len())];
    let checkpoint = folder.newest()?.display().to_string();
    let mut args: Vec<String> =
        words(working).into_iter().map(|word| word.replace("CHECKPOINT", &checkpoint)).collect();
    for _ in 0..1 + random.below(3) {
        change(&mut args, random);
    }
    let texts: Vec<&str> = args.iter().map(String::as_str).collect();
    let special = special(&folder.path().join("special"), random).map_err(|e| e.to_string())?;
    let full = [Full::Neither, Full::Neither, Full::Stdout, Full::Stderr][random.below(4)];
    let ended = process::run_into(&mut folder.command(&texts), LIMIT, full);
    let ended = ended.and_then(|ended| match full {
        // What was wrong is told to nobody: the exit code says that it was.
        Full::Stderr => ended.code_means_something(),
        _ => ended.error_line().map(|_| ()),
    });
    let shown = process::shown(&args);
    ended.map_err(|fault| {
        format!("`foveate {shown}` (full: {full:?}; `special` is {special}): {fault}")
    })
}

/// The words of a command line, of which some stand in single quotes.
fn words(line: &str) -> Vec<String> {
    let quoted = line.split('\'').enumerate();
    let words = quoted.flat_map(|(i, part)| match i % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    });
    words.collect()
}

/// One change at random.
fn change(args: &mut Vec<String>, random: &mut Random) {
    let strange = STRANGE[random.below(STRANGE.len())].to_owned();
    let at = random.below(args.len());
    match random.below(8) {
        0 => drop(args.remove(at)),
        1 => args.insert(at, strange),
        2 => args.push(strange),
        3 => args.insert(at, args[at].clone()),
        4 => {
            let other = random.below(args.len());
            args.swap(at, other);
        }
        5 => {
            // A letter less.
            let mut letters: Vec<char> = args[at].chars().collect();
            if !letters.is_empty() {
                letters.remove(random.below(letters.len()));
            }
            args[at] = letters.into_iter().collect();
        }
        6 => {
            // Nothing near what the system takes for one argument.
            let most = 20_000 / args[at].len().max(1);
            args[at] = args[at].repeat(1 + random.below(400).min(most));
        }
        _ => args[at] = strange,
    }
    if args.is_empty() {
        args.push(String::new());
    }
}
