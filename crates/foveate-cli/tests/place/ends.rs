//! What ends runs while they save beside their steps, on any device: each says so in a line, leaves whole
//! checkpoints, and goes on with the bits of a run that did not end.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use foveate::tensor::random::Random;

use crate::run::{Run, Variables};

/// A seed that differs in each run of the tests, and is shown where one fails.
pub fn random() -> Random {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    println!("seed {seed}");
    Random::stream(seed, 0)
}

/// Some milliseconds below `most`.
pub fn ms(random: &mut Random, most: usize) -> Duration {
    Duration::from_millis(random.below(most) as u64)
}

fn signal(child: &Child, signal: &str) {
    let _ = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
}

/// A disk of its own, which is there until this is dropped.
pub struct Disk {
    holder: Child,
    pub path: PathBuf,
}

impl Disk {
    /// Of so many bytes; none, and a line that says so, where this process may mount none.
    pub fn new(at: &Path, bytes: u64) -> Option<Self> {
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

/// A signal at some time of a save.
pub fn by_signals(run: &Run<'_>, slow: &Variables) {
    let mut random = random();
    let mut ended = 0;
    for round in 0..8 {
        let child = run.start_and_save(slow);
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

/// A `disk` that is full at some time, mostly of a save.
pub fn by_a_full_disk(run: &Run<'_>, disk: &Disk, slow: &Variables) {
    let mut random = random();
    let mut ended = 0;
    let filler = disk.path.join("filler");
    for round in 0..6 {
        // Mostly while it saves: what cannot be written is a file of the checkpoint, or a line of the log.
        let child = if round > 0 { run.start_and_save(slow) } else { run.start(slow) };
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
