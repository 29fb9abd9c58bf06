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
        (&["run", "--on", "gpus"], "--on gpus is no option; --help lists them"),
        (&["run", "--workers", "-1"], "--workers is a number, not \"-1\""),
        (&["run", "--on", "cpu", "--only", "no such case"], " has `no such case` in its name"),
        (
            &["run", "--on", "cpu", "--backend", "tpu"],
            "no backend has `tpu` in its name; there are",
        ),
        (&["run", "--on", "cpu", "--subset", "0"], "--subset 0 runs nothing"),
        (&["misuse", "--twice"], "--twice is no option; --help lists them"),
        (&["trespass", "memcheck", "twice"], "twice is no option"),
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
