//! Runs that end while they save beside their steps: by a signal, a disk that is full, memory that ends. Each
//! says so in a line, leaves whole checkpoints, and goes on with the bits of a run that did not end.

#![cfg(target_os = "linux")]

// Not all of it is needed here.
#[allow(dead_code)]
mod place;
#[path = "place/run.rs"]
mod run;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use foveate::tensor::random::Random;
use place::Place;
use run::{Run, slow_disk};

/// What is set beside the recipe, in which every fourth step is saved.
const SETS: [&str; 4] =
    ["train.steps=80", "train.async_save=true", "train.keep=9", "train.eval_every=0"];

/// A seed that differs in each run of the tests, and is shown where one fails.
fn random() -> Random {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    println!("seed {seed}");
    Random::stream(seed, 0)
}

/// Some milliseconds below `most`.
fn ms(random: &mut Random, most: usize) -> Duration {
    Duration::from_millis(random.below(most) as u64)
}

fn signal(child: &Child, signal: &str) {
    let _ = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
}

#[test]
fn a_signal_during_a_save_beside_the_steps_ends_a_run_that_goes_on_as_if_it_had_not_come() {
    let (place, mut random) = (Place::new(), random());
    let Some(slow) = slow_disk(&place.path(""), 15) else { return };
    let run = Run {
        place: &place,
        dir: place.path("run"),
        command: &|args| place.command(args),
        sets: &SETS,
    };
    let mut ended = 0;
    for round in 0..8 {
        let child = run.start_and_save(&slow);
        sleep(ms(&mut random, 80));
        signal(&child, ["-INT", "-TERM"][round % 2]);
        let twice = round % 4 > 1;
        if twice {
            sleep(ms(&mut random, 80));
            signal(&child, "-INT");
        }
        let (code, said) = run.ended(child);
        if code == Some(0) {
            break;
        }
        assert_eq!(code, Some(130), "{said}");
        ended += 1;
        let told = said.lines().find_map(|line| line.strip_prefix("interrupted after step "));
        assert!(told.is_some() || twice, "{said}");
        if let Some((step, how)) = told.and_then(|told| told.split_once("; ")) {
            assert!(how.contains(" train recipe.toml --resume"), "{said}");
            let saved =
                run.dir.join(format!("checkpoints/step-{:06}", step.parse::<u64>().unwrap()));
            assert_eq!(run.checkpoints().last(), Some(&saved), "{said}");
            assert!(run.named(".writing-").is_empty(), "{said}");
        }
    }
    assert!(ended > 0, "no run met its signal");
    run.is_as_if_it_had_not_ended();
}

/// A disk of its own, which is there until this is dropped.
struct Disk {
    holder: Child,
    path: PathBuf,
}

impl Disk {
    /// Of so many bytes; none, and a line that says so, where this process may mount none.
    fn new(at: &Path, bytes: u64) -> Option<Self> {
        fs::create_dir(at).unwrap();
        let mount = "mount -t tmpfs -o size=$1 none \"$0\" && echo mounted && exec cat";
        let mut unshare = Command::new("unshare");
        unshare.args(["-rm", "sh", "-c", mount]).arg(at).arg(bytes.to_string());
        let pipes = unshare.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let Ok(mut holder) = pipes.spawn() else {
            println!("skipped: no `unshare` to mount a small disk with");
            return None;
        };
        let mut told = String::new();
        let out = holder.stdout.as_mut().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut told).unwrap();
        if told != "mounted\n" {
            let _ = holder.wait();
            println!("skipped: a small disk cannot be mounted here");
            return None;
        }
        let path = format!("/proc/{}/root{}", holder.id(), at.display());
        Some(Self { holder, path: path.into() })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Its input ends, and with it the process and the disk.
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

#[test]
fn a_disk_that_is_full_ends_a_run_that_goes_on_when_there_is_space() {
    let (place, mut random) = (Place::new(), random());
    let Some(slow) = slow_disk(&place.path(""), 10) else { return };
    let Some(disk) = Disk::new(&place.path("disk"), 16 << 20) else { return };
    let run = Run {
        place: &place,
        dir: disk.path.join("run"),
        command: &|args| place.command(args),
        sets: &SETS,
    };
    let mut ended = 0;
    let filler = disk.path.join("filler");
    for round in 0..6 {
        // Mostly while it saves: what cannot be written is a file of the checkpoint, or a line of the log.
        let child = if round > 0 { run.start_and_save(&slow) } else { run.start(&slow) };
        sleep(ms(&mut random, 120));
        let mut file = File::create(&filler).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
        let (code, said) = run.ended(child);
        fs::remove_file(&filler).unwrap();
        if code == Some(0) {
            break;
        }
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("could not be written: No space left on device"), "{said}");
        assert!(said.contains("; free some space and "), "{said}");
        run.says_how_it_goes_on(&said);
        assert!(run.named(".writing-").is_empty(), "what was begun is removed: {said}");
        ended += 1;
    }
    assert!(ended > 0, "no run met the full disk");
    run.is_as_if_it_had_not_ended();
}

#[test]
fn memory_that_ends_in_the_middle_of_a_run_is_a_line_and_the_run_goes_on_where_there_is_more() {
    let (place, mut random) = (Place::new(), random());
    let Some(mut slow) = slow_disk(&place.path(""), 10) else { return };
    // Whatever is larger than a page comes from the system.
    slow.push(("MALLOC_MMAP_THRESHOLD_", "4096".to_owned()));
    let run = Run {
        place: &place,
        dir: place.path("run"),
        command: &|args| place.command(args),
        sets: &SETS,
    };
    let mut ended = 0;
    for _ in 0..8 {
        let mut child = run.start_and_save(&slow);
        sleep(ms(&mut random, 120));
        // Less than it has: it keeps that, and gets no more.
        let limited = Command::new("prlimit")
            .args(["--pid", &child.id().to_string(), "--as=1048576"])
            .stderr(Stdio::null())
            .status();
        if limited.is_err() {
            println!("skipped: no `prlimit` to limit a process with");
            child.kill().unwrap();
            child.wait().unwrap();
            return;
        }
        let (code, said) = run.ended(child);
        if code == Some(0) {
            break;
        }
        assert_eq!(code, Some(1), "{said}");
        run.says_how_it_goes_on(&said);
        ended += 1;
    }
    assert!(ended > 0, "no run met the end of its memory");
    run.is_as_if_it_had_not_ended();
}
