//! What the binary answers to what it is asked.

use std::path::Path;
use std::process::Command;

/// Exit code, and what was said on stdout and stderr.
fn asked(args: &[&str]) -> (i32, String, String) {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    asked_in(&repository, args)
}

/// The same, asked in `folder`.
fn asked_in(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_foveate-conformance"));
    let done = command.args(args).current_dir(folder).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
}

#[test]
fn help_is_given_wherever_it_is_asked_for() {
    for args in [&["--help"][..], &["run", "--help"], &["determinism", "--repeats", "5", "-h"]] {
        let (code, out, _) = asked(args);
        assert!(code == 0 && out.starts_with("foveate-conformance run "), "{args:?}: {out}");
    }
}

#[test]
fn what_runs_nothing_is_an_error_and_not_a_success() {
    for (args, expected) in [
        (&[][..], "a command is needed; --help lists them"),
        (&["rum"], "rum is no command; --help lists them"),
        (&["run", "--on", "gpus"], "--on takes one of gpu, cpu, all, not \"gpus\""),
        (&["run", "--dtype", "f99"], "--dtype takes one of f32, f16, bf16, f8e4m3, not \"f99\""),
        (&["run", "--waits", "5"], "--waits takes one of endless, bounded, not \"5\""),
        (&["run", "--colour", "red"], "--colour is no option; --help lists them"),
        (&["run", "--workers", "-1"], "--workers is a number, not \"-1\""),
        (&["run", "--on", "cpu", "--only", "no such case"], " has `no such case` in its name"),
        (
            &["run", "--on", "cpu", "--backend", "tpu"],
            "no backend has `tpu` in its name; there are",
        ),
        (&["run", "--on", "cpu", "--subset", "0"], "--subset 0 runs nothing"),
        (&["misuse", "--twice"], "--twice is no option; --help lists them"),
        (&["probes", "--only", "no such probe"], "no probe has `no such probe` in its name"),
        (&["trespass", "memcheck", "twice"], "twice is no option"),
        (&["soak", "--minutes", "1"], "--minutes 1 is no option; --help lists them"),
        (&["soak", "--only", "luck"], "--only takes one of programs, kills, damage, commands"),
        (
            &["soak", "--foveate", "nowhere"],
            "nowhere: is not there; name the binary with --foveate",
        ),
        (&["determinism", "--repeats", "1"], "--repeats 1: bits of 2 runs or more are compared"),
    ] {
        let (code, out, said) = asked(args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}");
        assert!(said.starts_with("error: ") && said.contains(expected), "{args:?}: {said}");
    }
}

#[test]
fn where_no_cases_are_the_option_that_names_their_folder_is_said() {
    let elsewhere = tempfile::tempdir().unwrap();
    for (args, said) in
        [(&["run"][..], "conformance/cases: "), (&["run", "--cases", "."], ". has no cases; ")]
    {
        let (code, out, err) = asked_in(elsewhere.path(), args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}");
        let remedy = "; name the folder of cases with --cases; in Foveate's repository it is ";
        assert!(err.starts_with(&format!("error: {said}")) && err.contains(remedy), "{err}");
    }
}

#[test]
fn a_case_runs_in_a_worker_and_in_the_process_itself() {
    for workers in ["0", "1"] {
        let only = ["--only", "ALiBi", "--subset", "1", "--workers", workers];
        let (code, out, said) =
            asked(&[&["run", "--on", "cpu", "--backend", "plain"], &only[..]].concat());
        assert_eq!(code, 0, "{out}{said}");
        assert!(out.starts_with("1 cases\n") && out.contains("plain"), "{out}");
    }
}

#[test]
fn a_soak_replays_the_same_program_from_its_seed() {
    let round = ["soak", "--only", "programs", "--seed", "5", "--rounds", "1"];
    let (code, out, said) = asked(&round);
    assert_eq!(code, 0, "{out}{said}");
    assert!(out.starts_with("[[case]]\n") && out.contains("seed 5: 1 programs; 0 failed"), "{out}");
    assert_eq!(asked(&round).1, out);
    let next = asked(&["soak", "--only", "programs", "--seed", "6", "--rounds", "1"]).1;
    assert_ne!(next.split("soak: ").next(), out.split("soak: ").next());
}

#[cfg(unix)]
#[test]
fn a_fault_that_a_soak_finds_is_one_line_with_the_way_to_replay_it() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("foveate");
    let name = program.display().to_string();
    for (script, fault) in [
        ("echo \"thread 'main' panicked at x.rs\" >&2; exit 101", "panicked: thread 'main'"),
        ("echo oh no >&2; exit 1", "failed without an error line: \"oh no\""),
        ("kill -s ABRT $$", "signal: 6"),
    ] {
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        for kind in ["kills", "damage", "commands"] {
            let round = ["soak", "--only", kind, "--seed", "9", "--rounds", "1"];
            let (code, out, _) = asked(&[&round[..], &["--foveate", &name]].concat());
            let replay = format!("foveate-conformance soak --only {kind} --seed 9 --rounds 1");
            let line = out.lines().next().unwrap();
            assert!(code == 1 && line.contains(fault) && line.ends_with(&replay), "{out}");
        }
    }
}

#[test]
fn a_run_that_nobody_reads_ends_without_a_panic_and_is_no_success() {
    for args in [&["--help"][..], &["run", "--on", "cpu", "--only", "row that one document"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut command = Command::new(env!("CARGO_BIN_EXE_foveate-conformance"));
        let done = command.args(args).current_dir(repository).stdout(writer).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        let expected = "error: stdout was closed before the checks ended\n";
        assert_eq!((done.status.code(), said.as_str()), (Some(1), expected), "{args:?}");
    }
}
