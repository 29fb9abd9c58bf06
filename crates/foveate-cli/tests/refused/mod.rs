//! What ranks cannot run with: one line on one rank, the same decision on all, and nothing lost.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::place::Place;
use super::{errors, place, saved, signal, text};

/// Runs rank 0 and rank 1, each with its folder and arguments; status and errors of both.
fn pair(ranks: [(&Place, &[&str]); 2]) -> [(Option<i32>, String); 2] {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let meet = format!("127.0.0.1:{port}");
    let start = |(rank, (place, more)): (usize, (&Place, &[&str]))| {
        let rank = rank.to_string();
        let args = ["train", "recipe.toml", "--rank", &rank, "--ranks", "2", "--meet", &meet];
        let mut command = place.command(&[&args[..], more].concat());
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let both: Vec<_> = ranks.into_iter().enumerate().map(start).collect();
    let ends = both.into_iter().map(|rank| rank.wait_with_output().unwrap());
    let ends: Vec<_> = ends.map(|done| (done.status.code(), text(done.stderr))).collect();
    ends.try_into().unwrap()
}

/// Who has something else is named, once, and no rank has begun.
#[test]
fn ranks_with_other_recipes_data_or_folders_end_all_with_one_line() {
    let (place, other) = (place(), place());
    let run = format!("run.dir={}", place.path("run").display());
    std::fs::write(other.path("03.txt"), "another document").unwrap();
    let same: &[&str] = &["--set", &run];
    let rate: &[&str] = &["--set", &run, "--set", "optimizer.lr=0.5"];
    for (first, second, what) in [
        ((&place, same), (&place, rate), "recipe"),
        ((&place, same), (&other, same), "set of documents"),
    ] {
        let ends = pair([first, second]);
        let said: String = ends.iter().map(|(_, said)| said.as_str()).collect();
        assert!(ends.iter().all(|(status, _)| *status == Some(1)), "{said}");
        let why = format!(
            "error: ranks [1] have another {what} than rank 0; give every rank the same recipe, data and \
             binary"
        );
        assert_eq!(errors(&said), [why]);
        assert!(!place.path("run").exists());
    }
    // A run that is there keeps its folder, and what it has.
    let long = ["train", "recipe.toml", "--ranks", "2", "--set", "train.steps=4000"];
    let mut first = place.command(&long).stderr(Stdio::null()).spawn().unwrap();
    while !saved(&place) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let second =
        place.run(&["launch", "--ranks", "2", "--", "train", "recipe.toml", "--start-over"]);
    let said = text(second.stderr);
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(matches!(errors(&said)[..], [one] if one.contains("another process is training here")));
    assert!(first.try_wait().unwrap().is_none() && saved(&place));
    signal("-TERM", &first);
    assert_eq!(first.wait().unwrap().code(), Some(130));
}

#[test]
fn a_rank_says_that_it_waits_for_a_rank_0_that_does_not_come() {
    let place = place();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let at = format!("127.0.0.1:{port}");
    let args = ["train", "recipe.toml", "--rank", "1", "--ranks", "2", "--meet", &at];
    let done = place.command(&args).env("FOVEATE_ARRIVAL", "12").output().unwrap();
    let said = text(done.stderr);
    assert_eq!(done.status.code(), Some(75), "{said}");
    assert!(said.starts_with(&format!("waiting for rank 0 at {at} ...")), "{said}");
}

#[test]
fn wrong_input_gets_one_line_on_one_rank() {
    let place = place();
    for (set, says) in [
        ("mesh.transfers=nccl", "=nccl: mesh.transfers is \"nccl\", which carries between GPUs"),
        ("train.recompute_layers=9", "train.recompute_layers is 9, and the model has"),
        ("train.batch_rows=2", "=2: train.batch_rows is 2, and 3 ranks share the rows of a batch"),
        ("data.files=none.txt", "data.files"),
        ("optimizer.lr=-1", "optimizer.lr"),
        ("mesh.strategy=fast", "\"fast\" is no strategy"),
        ("precision.state=exact", "=exact: precision.state is \"exact\", but the CPU keeps f32"),
        ("mesh={ shard = 2 }", "mesh `shard=2` has 2 ranks, but 3 run"),
        (
            "mesh={ tensor = 3 }",
            "error: --set mesh={ tensor = 3 }: mesh.tensor: num_attention_heads: is 2, which cannot be cut \
             over 3 ranks of tensor; use 1 to 2 of them",
        ),
        ("mesh={ context = 3 }\ndata.len=2", "a row of 2 tokens is 2 chunks of 1, and 3 ranks"),
        // A mask is true or false: what it reads has no gradient.
        (
            "attention.learned={ edge = { shape = [2] } }\nattention.mask=causal & edge[h] < 1.0\n\
             attention.score=score",
            "mask: it captures `edge`, which is to be learned, but a mask has no gradient",
        ),
    ] {
        let sets: Vec<&str> = set.split('\n').flat_map(|set| ["--set", set]).collect();
        let launched = ["launch", "--ranks", "3", "--", "train", "recipe.toml"];
        let threads = ["train", "recipe.toml", "--ranks", "3"];
        for args in [&launched[..], &threads] {
            let done = place.run(&[args, &sets].concat());
            let said = text(done.stderr);
            // What --set itself says is of the command line.
            let code = if said.contains("error: --set ") { 2 } else { 1 };
            assert_eq!(done.status.code(), Some(code), "{said}");
            assert!(matches!(errors(&said)[..], [one] if one.contains(says)), "{said}");
            assert!(!place.path("run").exists());
        }
    }
    // A rank whose recipe is not there ends the others at once.
    let other = Place::new();
    std::fs::remove_file(other.path("recipe.toml")).unwrap();
    let ends = pair([(&place, &[]), (&other, &[])]);
    let said: String = ends.iter().map(|(_, said)| said.as_str()).collect();
    assert!(ends.iter().all(|(status, _)| *status == Some(1)), "{said}");
    let one = errors(&said);
    assert!(one.len() == 1 && one[0].contains("recipe.toml: could not be read"), "{said}");
    assert!(one[0].ends_with("; give the path of a recipe that is there"), "{said}");
    for (args, says) in [
        (
            &["train", "recipe.toml", "--rank", "0"][..],
            "--rank without --ranks and --meet; give all",
        ),
        (
            &["train", "recipe.toml", "--ranks", "2", "--meet", "a:1"],
            "without --rank; give all three",
        ),
        (&["train", "recipe.toml", "--rank", "2", "--ranks", "2", "--meet", "a:1"], "rank 2 of 2"),
        (&["train", "recipe.toml", "--rank", "0", "--ranks", "2"], "give all three"),
        (&["train", "recipe.toml", "--ranks", "0"], "--ranks 0: give 1 to 256 threads"),
        (&["train", "recipe.toml", "--ranks", "1000000000"], "give 1 to 256 threads"),
        (
            &["train", "recipe.toml", "--rank", "0", "--ranks", "1000000000", "--meet", "a:1"],
            "1000000000 ranks by flags; give at most 65536",
        ),
        (&["train", "recipe.toml", "--ranks", "-1"], "'--ranks <N>': at least 0 is expected"),
        (&["shard", "log", "--last", "-1", "transfers"], "'--last <N>': at least 0 is expected"),
    ] {
        let done = place.run(args);
        let said = text(done.stderr);
        assert_eq!(done.status.code(), Some(2), "{said}");
        assert!(said.contains(says), "{said}");
    }
    let mut both = place.command(&["train", "recipe.toml", "--ranks", "2"]);
    let done = both.env("RANK", "0").env("WORLD_SIZE", "2").output().unwrap();
    assert_eq!(done.status.code(), Some(2));
    assert!(text(done.stderr).contains("which is rank 0 of 2 by RANK and WORLD_SIZE"));
    let mut half = place.command(&["train", "recipe.toml"]);
    let done = half.env("WORLD_SIZE", "2").output().unwrap();
    assert_eq!(
        text(done.stderr).trim(),
        "error: WORLD_SIZE is set and RANK is not; set both, or neither"
    );
}

#[test]
fn what_launch_cannot_start_is_said_once() {
    let place = place();
    for (args, says) in [
        (&["launch", "--ranks", "0", "--", "train"][..], "--ranks"),
        (&["launch", "--ranks", "x", "--", "train"], "a number is expected, such as 16"),
        (
            &["launch", "--ranks", "2", "--", "train", "recipe.toml", "--ranks", "2"],
            "--ranks behind `--`: `foveate launch` says how many ranks there are",
        ),
        (
            &["launch", "--ranks", "2", "--", "bench", "train", "--meet", "a:1"],
            "--meet behind `--`: `foveate launch` says how many ranks there are",
        ),
        (&["launch", "--ranks", "1000000000", "--", "train"], "1000000000 is not in 1..=1024"),
        (&["launch", "--ranks", "2"], "COMMAND"),
        (
            &["launch", "--ranks", "2", "--", "eval", "a", "b"],
            "`foveate eval a b` is not shared by ranks",
        ),
        (
            &["launch", "--ranks", "2", "--", "bench", "cpu"],
            "`foveate bench cpu` is not shared by ranks",
        ),
        (&["launch", "--ranks", "2", "--", "launch", "--ranks", "2", "--", "doctor"], "no ranks"),
    ] {
        let done = place.run(args);
        let said = text(done.stderr);
        assert_eq!(done.status.code(), Some(2), "{said}");
        assert!(errors(&said).len() == 1 && said.contains(says), "{said}");
    }
    // Said once, not by every rank.
    let done = place.run(&["launch", "--ranks", "3", "--", "trian", "recipe.toml"]);
    assert_eq!(done.status.code(), Some(2));
    assert_eq!(errors(&text(done.stderr)), ["error: unrecognized subcommand 'trian'"]);
    let mut launched = place.command(&["launch", "--ranks", "3", "--", "train", "recipe.toml"]);
    let done = launched.env("FOVEATE_SILENCE", "0").output().unwrap();
    assert_eq!(done.status.code(), Some(2));
    let why = "error: FOVEATE_SILENCE is `0`; give seconds, from 1 to 1000000";
    assert_eq!(errors(&text(done.stderr)), [why]);
    // Those of the ranks are its own to set.
    let mut launched = place.command(&["launch", "--ranks", "2", "--", "doctor", "--mesh"]);
    let done = launched.env("RANK", "x").env("LOCAL_RANK", "y").output().unwrap();
    assert!(done.status.success(), "{}", text(done.stderr));
}

/// Both say the same wrong at the same time.
#[test]
fn what_is_wrong_on_both_ranks_is_told_by_one() {
    let place = place();
    let run = format!("run.dir={}", place.path("run").display());
    let short = ["attention.learned={ bias = { shape = [1] } }", "attention.score=score + bias[h]"];
    let short: Vec<&str> = short.iter().chain([&&*run]).flat_map(|set| ["--set", set]).collect();
    for _ in 0..4 {
        let ends = pair([(&place, &short), (&place, &short)]);
        let said: String = ends.iter().map(|(_, said)| said.as_str()).collect();
        assert!(ends.iter().all(|(status, _)| *status == Some(1)), "{said}");
        assert!(matches!(errors(&said)[..], [one] if one.contains("`bias` was read")), "{said}");
        let _ = std::fs::remove_dir_all(place.path("run"));
    }
}

/// All that is in a folder, by path.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap().is_dir() {
            true => all.extend(contents(&entry.path())),
            false => {
                let path = entry.path();
                all.push((path.display().to_string(), std::fs::read(path).unwrap()));
            }
        }
    }
    all.sort();
    all
}

#[test]
fn a_checkpoint_with_a_range_missing_or_twice_is_refused_once_and_kept() {
    let place = place();
    let first = ["launch", "--ranks", "2", "--", "train", "recipe.toml", "--set", "train.steps=4"];
    let done = place.run(&first);
    assert!(done.status.success(), "{}", text(done.stderr));
    let file = place.path("run/checkpoints/step-000004/layout.json");
    let saved = std::fs::read(&file).unwrap();
    let whole: Value = serde_json::from_slice(&saved).unwrap();
    let (name, tensor) = whole["tensors"].as_object().unwrap().iter().next().unwrap();
    let ranges = tensor["ranges"].as_array().unwrap();
    assert!(ranges.len() > 1, "{name} is on one rank");
    let without: Vec<Value> = ranges[1..].to_vec();
    let twice: Vec<Value> = ranges.iter().chain(&ranges[..1]).cloned().collect();
    let elsewhere = |file: &str| {
        let mut other = ranges.clone();
        other[0]["file"] = json!(file);
        other
    };
    for (ranges, says) in [
        (ranges.iter().rev().cloned().collect(), "layout.json: does not match its checksum"),
        (without, "are missing of tensor"),
        (twice, "are there twice of tensor"),
        (elsewhere("part-00007-00000.safetensors"), "part-00007-00000.safetensors"),
        // Of the right name and length, and other elements.
        (elsewhere(ranges.last().unwrap()["file"].as_str().unwrap()), "safetensors"),
    ] {
        let mut changed = whole.clone();
        changed["tensors"][name]["ranges"] = ranges.into();
        std::fs::write(&file, changed.to_string()).unwrap();
        let before = contents(&place.path("run/checkpoints"));
        let mut more = vec!["recipe.toml", "--resume", "--set", "train.steps=8"];
        more.extend((!says.contains("checksum")).then_some("--skip-checksums"));
        for how in [
            &["launch", "--ranks", "2", "--", "train"][..],
            &["launch", "--ranks", "3", "--", "train"],
            &["train", "--ranks", "2"],
            &["train"],
        ] {
            let done = place.run(&[how, &more].concat());
            let said = text(done.stderr);
            assert_eq!(done.status.code(), Some(1), "{said}");
            assert!(matches!(errors(&said)[..], [one] if one.contains(says)), "{how:?}: {said}");
            assert!(contents(&place.path("run/checkpoints")) == before, "{how:?}");
        }
    }
    std::fs::write(&file, saved).unwrap();
    let resumed = place.run(&[&first[..6], &["--resume", "--set", "train.steps=8"]].concat());
    assert!(resumed.status.success(), "{}", text(resumed.stderr));
}

#[test]
fn a_rank_without_a_way_to_rank_0_says_so_in_time() {
    let place = place();
    // No name, and no network that has an address.
    for host in ["rank-0.invalid", "192.0.2.1"] {
        let at = format!("{host}:29400");
        let args = ["train", "recipe.toml", "--rank", "1", "--ranks", "2", "--meet", &at];
        let began = Instant::now();
        let done = place.command(&args).env("FOVEATE_ARRIVAL", "2").output().unwrap();
        let said = text(done.stderr);
        assert_eq!(done.status.code(), Some(75), "{said}");
        let says = format!("rank 1 could not reach rank 0 at {at} in 2s");
        assert!(matches!(errors(&said)[..], [one] if one.contains(&says)), "{said}");
        assert!(began.elapsed() < Duration::from_secs(30) && !place.path("run").exists());
    }
}

/// A clock of the day that goes backwards, from before 1970 on, for what is run with it.
#[cfg(target_os = "linux")]
const CLOCK: &str = r"
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static long calls;
int clock_gettime(clockid_t clock, struct timespec *at) {
    if (clock != CLOCK_REALTIME) return syscall(SYS_clock_gettime, clock, at);
    at->tv_sec = -1000 - 3600 * __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    at->tv_nsec = 5;
    return 0;
}
";

#[cfg(target_os = "linux")]
#[test]
fn a_rank_whose_clock_lies_trains_as_others_do() {
    let (place, other) = (place(), place());
    std::fs::write(place.path("clock.c"), CLOCK).unwrap();
    let clock = place.path("clock.so");
    let mut compile = Command::new("cc");
    compile.args(["-shared", "-fPIC", "-o"]).arg(&clock).arg(place.path("clock.c"));
    match compile.status() {
        Ok(status) if status.success() => {}
        failed => return println!("skipped: no C compiler: {failed:?}"),
    }
    let train = |place: &Place, run: &str, lies: [bool; 2], more: &[&str]| {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let start = |(rank, lies): (usize, bool)| {
            let (rank, meet) = (rank.to_string(), format!("127.0.0.1:{port}"));
            let run = format!("run.dir={run}");
            let args = ["train", "recipe.toml", "--set", &run, "--ranks", "2", "--meet", &meet];
            let mut command = place.command(&[&args[..], &["--rank", &rank], more].concat());
            if lies {
                command.env("LD_PRELOAD", &clock);
            }
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ranks: Vec<_> = lies.into_iter().enumerate().map(start).collect();
        for rank in ranks {
            let done = rank.wait_with_output().unwrap();
            assert!(done.status.success(), "{}", text(done.stderr));
        }
    };
    let constant = ["--set", "schedule.kind=constant"];
    train(&other, "run", [false; 2], &constant);
    for lies in [[true, false], [false, true], [true; 2]] {
        let run = format!("lies-{}-{}", lies[0], lies[1]);
        train(&place, &run, lies, &[&constant[..], &["--set", "train.steps=12"]].concat());
        train(&place, &run, lies, &[&constant[..], &["--resume"]].concat());
        assert_eq!(place.steps(&run), other.steps("run"), "{lies:?}");
        assert!(place.weights(&run, 24) == other.weights("run", 24), "{lies:?}");
    }
}
