//! Runs that end while they save beside their steps: by a signal, a disk that is full, memory that ends. Each
//! says so in a line, leaves whole checkpoints, and goes on with the bits of a run that did not end.

#![cfg(target_os = "linux")]

#[path = "place/ends.rs"]
mod ends;
// Not all of it is needed here.
#[allow(dead_code)]
mod place;
#[path = "place/preload.rs"]
mod preload;
#[path = "place/run.rs"]
mod run;

use std::process::{Command, Stdio};
use std::thread::sleep;

use ends::{Disk, ms, random};
use place::Place;
use run::{Run, slow_disk};

/// What is set beside the recipe, in which every fourth step is saved.
const SETS: [&str; 4] =
    ["train.steps=80", "train.async_save=true", "train.keep=9", "train.eval_every=0"];

#[test]
fn a_signal_during_a_save_beside_the_steps_ends_a_run_that_goes_on_as_if_it_had_not_come() {
    let place = Place::new();
    let Some(slow) = slow_disk(&place.path(""), 15) else { return };
    let run = Run {
        place: &place,
        dir: place.path("run"),
        command: &|args| place.command(args),
        sets: &SETS,
    };
    ends::by_signals(&run, &slow);
}

#[test]
fn a_disk_that_is_full_ends_a_run_that_goes_on_when_there_is_space() {
    let place = Place::new();
    let Some(slow) = slow_disk(&place.path(""), 10) else { return };
    let Some(disk) = Disk::new(&place.path("disk"), 16 << 20) else { return };
    let run = Run {
        place: &place,
        dir: disk.path.join("run"),
        command: &|args| place.command(args),
        sets: &SETS,
    };
    ends::by_a_full_disk(&run, &disk, &slow);
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
