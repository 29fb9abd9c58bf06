//! What the commands say to input that cannot be: one line with the place and the remedy, the
//! exit code, and never a panic.

mod explained;

use std::process::{Command, Stdio};

/// Runs `foveate` in a folder with a document `a.txt`; its exit code, stdout and stderr.
fn run(args: &[&str]) -> (Option<i32>, String, String) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.txt"), "words").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
    let done = command.args(args).current_dir(dir.path()).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (done.status.code(), text(done.stdout), text(done.stderr))
}

/// What is too much for a table of documents is refused before the work of minutes that it is for.
#[test]
fn a_table_of_documents_that_is_too_large_is_refused_at_once() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/tiny.toml");
    let (long, rows) = ("data.len=100000000", "train.batch_rows=20");
    let began = std::time::Instant::now();
    let (code, _, err) = run(&["explain", "--recipe", recipe, "--set", long, "--set", rows]);
    let took = began.elapsed();
    assert!(
        code == Some(2) && err.contains("the table of documents takes about 11.2 GiB"),
        "{err}"
    );
    assert!(took.as_secs() < 10, "{took:?}");
}

/// A disk that is full takes no warning, and nobody is told: that is no failure, and no panic.
#[cfg(target_os = "linux")]
#[test]
fn what_cannot_be_told_stops_no_command() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
    command.args(["mask", "kv < 0", "--len", "5"]).stderr(full);
    let done = command.output().unwrap();
    assert!(done.status.success(), "{:?}", done.status);
    assert!(String::from_utf8(done.stdout).unwrap().contains("live"));
}

/// Files that never end, and pipes that nobody writes to.
#[cfg(unix)]
#[test]
fn what_is_no_file_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe").display().to_string();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let buffer = format!("x={pipe}");
    for more in [["x[q] > 0", "--buffer", &buffer], ["causal", "--svg", &pipe]] {
        let (code, _, stderr) = run(&[&["mask", "--len", "1"][..], &more].concat());
        let refused = stderr.contains("it is a pipe, not a file");
        assert!(matches!(code, Some(1 | 2)) && refused, "{more:?}: {stderr}");
    }
    let said = "could not be read: it is a pipe or a device, not a file";
    for line in ["train /dev/zero", "explain --recipe /dev/zero"] {
        let (code, _, stderr) = run(&line.split(' ').collect::<Vec<_>>());
        assert!(code == Some(1) && stderr.contains(said), "{line}: {code:?} {stderr}");
    }
    let (code, _, stderr) = run(&["train", concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes")]);
    let said = "could not be read: is a directory; give the path of a recipe in it";
    assert!(code == Some(1) && stderr.contains(said), "{code:?} {stderr}");
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/tiny.toml");
    let machine = ["shard", "check", recipe, "--mesh", "context=4", "--machine", "/dev/zero"];
    let (code, _, stderr) = run(&machine);
    let refused = stderr.contains(
        "--machine is \"/dev/zero\", a file that could not be read: it is a pipe or a device",
    );
    assert!(code == Some(2) && refused, "{code:?} {stderr}");
    let (code, _, stderr) = run(&["shard", "log", "/dev/zero"]);
    assert!(code == Some(1) && stderr.contains("/dev/zero: it is not a file"), "{code:?} {stderr}");
    let empty = tempfile::tempdir().unwrap();
    let (nowhere, empty) = (empty.path().join("nowhere"), empty.path());
    let damaged = tempfile::tempdir().unwrap();
    std::fs::write(damaged.path().join("rank-00003.jsonl"), "{\"rank\": 3").unwrap();
    for (folder, said) in [
        (damaged.path(), "rank-00003.jsonl:1:10: "),
        (empty, "no transfer log in it; a rank"),
        (&nowhere, "give the folder `transfers` of a run"),
    ] {
        let (code, _, stderr) = run(&["shard", "log", folder.to_str().unwrap()]);
        let named = stderr.contains(folder.to_str().unwrap()) && stderr.contains(said);
        assert!(code == Some(1) && named, "{code:?} {stderr}");
    }
    // Beside a whole one it is left out, and said to be.
    let whole = r#"{"rank":0,"ranks":3,"meeting":7,"seconds":1.5,"why":"rank 3 is gone"}"#;
    std::fs::write(damaged.path().join("rank-00000.jsonl"), whole).unwrap();
    std::fs::write(damaged.path().join("rank-00002.jsonl"), b"\xff\n").unwrap();
    let (code, out, stderr) = run(&["shard", "log", damaged.path().to_str().unwrap()]);
    let warned: Vec<&str> = stderr.lines().collect();
    assert!(code == Some(0) && warned.len() == 2, "{code:?} {stderr}");
    assert!(warned[0].starts_with("warning: ") && warned[0].ends_with("the file is left out"));
    assert!(
        warned[0].contains("rank-00002.jsonl:1:1: ") && warned[1].contains("-00003.jsonl:1:10")
    );
    assert!(out.contains("rank 1 left no log") && out.contains("rank 3 is gone"), "{out}");
}

/// A part would be taken for all of it.
#[cfg(unix)]
#[test]
fn of_a_picture_that_cannot_be_written_no_part_stays() {
    let dir = tempfile::tempdir().unwrap();
    let picture = dir.path().join("mask.svg");
    let mut shell = Command::new("sh");
    let limited = "ulimit -f 1; exec \"$0\" mask causal --len 2048 --tile 16x16 --svg \"$1\"";
    shell.args(["-c", limited, env!("CARGO_BIN_EXE_foveate")]).arg(&picture);
    let done = shell.output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.code() == Some(1) && said.contains("mask.svg cannot be written"), "{said}");
    assert!(!picture.exists(), "{said}");
}

/// Numbers that come late are waited for, which is said.
#[cfg(unix)]
#[test]
fn buffers_that_take_long_to_read_are_told_of() {
    use std::io::Write;
    let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
    command.args(["mask", "x[q] > 0", "--len", "3", "--buffer", "x=/dev/stdin"]);
    let piped = std::process::Stdio::piped;
    let mut child = command.stdin(piped()).stdout(piped()).stderr(piped()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(2600));
    child.stdin.take().unwrap().write_all(b"0, 1, 2").unwrap();
    let done = child.wait_with_output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.success(), "{said}");
    assert!(said.contains("reading captured buffers ..."), "{said}");
}

#[test]
fn what_is_of_attention_alone_is_refused_beside_a_recipe() {
    for args in [
        "--kernel backward.tile_q=64",
        "--mean-kv-len 4",
        "--deterministic",
        "--heads 4",
        "--device h200 --mean-kv-len 4",
        "--device h200 --kernel kv_splits=2",
        "--device h200 --deterministic",
    ] {
        let line = format!("explain --recipe r.toml {args}");
        let (code, _, err) = run(&line.split(' ').collect::<Vec<_>>());
        assert!(code == Some(2) && err.contains("cannot be used with"), "{args}: {err}");
    }
}

#[test]
fn sizes_that_do_not_go_together_are_said_with_the_remedy() {
    for (line, said) in [
        ("mask causal --len 5 --tile 2000000x1", "a side of a tile is 1048576 at most"),
        ("mask documents(3,4) --len 64", "the documents have 7 positions in all, and there are 64"),
        (
            "mask x[q]>0.5 --len 3 --buffer x=1,2,3",
            "`x` is i32, since none of its numbers has a point: --buffer x=1.0,2,3 is f32",
        ),
        (
            "explain --heads 2 --len 9 --dim 8 --score relative_bias(t) --buffer t[1,3]=1,2,3",
            "`t` is i32, since none of its numbers has a point: --buffer t=1.0,2,3 is f32",
        ),
        (
            "explain --heads 8 --len 9 --dim 8 --score alibi(4)",
            "there are slopes of 4 heads, and the",
        ),
        (
            "explain --heads 2000000000 --len 9 --dim 8 --score alibi",
            "the number of heads must be at most 1048576, not 2000000000",
        ),
        (
            "explain --heads 4 --len 9 --dim 8 --device cpu",
            "what the CPU runs is explained where no device is given\nhelp: leave --device out",
        ),
        ("explain --recipe a.txt --device cpu", "help: leave --device out"),
        ("explain --recipe a.txt --device cuda:0", "name a card, which need not be there"),
    ] {
        ends_with_2(line, said);
    }
}

/// Runs a wrong command line, which ends with 2, prints nothing else and says `said`.
fn ends_with_2(line: &str, said: &str) {
    let (code, out, err) = run(&line.split(' ').collect::<Vec<_>>());
    assert!(code == Some(2) && out.is_empty() && err.contains(said), "{line}: {code:?} {err}");
}

/// One way of being wrong has one code, whichever command finds it.
#[test]
fn what_only_a_command_knows_to_be_wrong_ends_with_2_as_what_its_arguments_say() {
    for (line, said) in [
        (
            "mask causal --len 0",
            "the mask has 0 queries\nhelp: give one or more by --len or --doc-lens",
        ),
        (
            "mask causal --len 4 --kv-len 0",
            "the mask has 0 keys\nhelp: give one or more by --kv-len",
        ),
        ("bench train --mask causal&documnet", "did you mean `document`?"),
        ("bench train --score softcp(3)", "did you mean `softcap`?"),
        ("bench train --offload x", "--offload is \"x\"; `none` or `layer_inputs` is expected\n"),
        ("bench train --state x", "--state is \"x\"; one of `f32`, `exact`, `bf16_gradients`, "),
        ("bench train --window 0", "error: --window is 0; it must be 1 to 2147483647\n"),
        ("bench train --window 3000000000", "error: --window is 3000000000; it must be 1 to"),
        (
            "bench train --device cpu --model 135m --len 8 --state exact",
            "--state is \"exact\", but the CPU keeps f32",
        ),
        (
            "bench train --device cpu --kernel forward.tile_q=64",
            "--kernel forward.tile_q=64 is of a GPU, and --device is cpu\nhelp: leave --kernel out",
        ),
        ("train a.toml --rank 0", "--rank without --ranks and --meet; give all three"),
        ("train a.toml --meet a:1", "--meet without --rank and --ranks; give all three"),
    ] {
        ends_with_2(line, said);
    }
}

#[test]
fn a_wrong_command_line_is_said_with_the_argument_and_exit_code_2() {
    for (line, said) in [
        ("mask causal", "--len is missing"),
        ("mask causal --len -3", "invalid value '-3' for '--len <N>'"),
        ("mask causal --len 1/0", "'1/0' for '--len <N>': a number is expected, such as 16"),
        ("mask causal --head x", "'x' for '--head <H>': a number is expected"),
        ("mask h==1 --len 5 --head -1", "'-1' for '--head <H>': it is counted from 0"),
        ("mask causal --len 5 --head 0", "--head 0: the mask is the same for every head"),
        ("mask kv<h --len 5 --batch-index 2", "help: leave it out, or write a mask that reads `b`"),
        ("mask causal --doc-lens 3,4", "--doc-lens: neither mask nor score reads `doc`"),
        ("mask x[q]>0 --len 1 --buffer x=1 --buffer x=2", "--buffer: `x` is given twice"),
        ("mask causal --len 5 --buffer =1", "--buffer: `` is no name that a text can read"),
        ("mask causal --len 5 --buffer x[1,2]=1,2", "--buffer: neither mask nor score reads `x`"),
        ("explain --heads 2 --len 5 --dim 8 --scalar n=3", "neither mask nor score reads `n`"),
        ("mask causal --doc-lens 3,x", "'x' for '--doc-lens <N,N,...>': a number is expected"),
        ("mask causal --len 5000000000", "5000000000 positions; masks count up to 2147483647"),
        ("mask x[q]>0 --len 5 --buffer x=/dev/null", "the file is empty"),
        (
            "mask causal --len 2000000000 --tile 1x1",
            "building the mask in tiles of 1x1 takes about 171.4 GiB, but ",
        ),
        ("mask causal --len 2000000000", "in tiles of 128x128 takes about 1.3 GiB\nhelp: make the"),
        ("mask causal --len 5 --tile 8192x8192", "up to 16777216 points, such as 4096x4096"),
        ("mask document --doc-lens 2000000000", "the table of documents takes about 11.2 GiB"),
        ("mask documents(2000000000,2000000000) --len 9", "more than i32::MAX positions"),
        ("mask documents(-1) --len 9", "length 0 is negative: -1"),
        ("explain --heads 4 --len 9 --dim 8 --batch 1000000000", "explaining this problem takes"),
        (
            "explain --heads 64 --len 2000000000 --dim 8 --mask causal",
            "help: give fewer heads, batch entries or positions",
        ),
        ("explain --recipe a.txt --batch 3", "cannot be used with"),
        ("explain --recipe a.txt --device l40s --deterministic", "cannot be used with"),
        (
            "explain --recipe a.txt --device gt710",
            "recipes are planned for h200, h100, l40s, rtx4090, not for `gt710`",
        ),
        ("explain --recipe a.txt --doc-lens 3", "cannot be used with"),
        (
            "explain --heads 4 --len 9 --dim 8 --device l4 --kernel backward.tile_q=64",
            "--kernel backward.tile_q=64 is of the backward pass, which is not planned",
        ),
        ("explain --heads 4 --len 9 --dim 8 --device l4 --deterministic", "give --backward"),
        ("mask causal --len 5 --tile 0x3", "two lengths of at least 1"),
        ("mask causl --len 5", "did you mean `causal`?"),
        ("mask doc[q]==1 --len 5", "--buffer NAME=1,2,3 brings a buffer"),
        ("mask causal&document --len 5", "--doc-lens 20,44 the ids of packed documents"),
        ("mask q>n --len 5 --scalar n=99999999999", "integers lie in ±2147483647"),
        ("mask document --len 5 --doc-lens 2,2", "the documents have 4 positions in all, not 5"),
        (
            "mask x[q]>0 --len 5 --buffer x=1,2",
            "of axis 0, which has length 2; make the buffer as long",
        ),
        ("explain --heads 32/7 --len 9 --dim 16", "32 query heads cannot share 7"),
        ("explain --heads 0 --len 9 --dim 16", "there must be at least 1 of each"),
        ("explain --heads 4/x --len 9 --dim 16", "`x`: a number is expected"),
        ("explain --heads 4 --len 1/0 --dim 16", "'1/0' for '--len <N>': a number is expected"),
        ("explain --heads 4 --len 9 --dim 0", "head dim is 0"),
        ("explain --heads 4 --len 9", "--dim <D[/DV]>"),
        ("explain --heads 4 --len -9 --dim 8", "invalid value '-9'"),
        ("explain --heads 4 --len 9 --dim 8 --page-size 0", "a page holds one key or more"),
        ("explain --heads 4 --len 9 --dim 8 --page-size 4 --backward", "cannot be used with"),
        ("explain --heads 4 --len 9 --dim 8 --dropout 1", "it must be at least 0, below 1"),
        ("explain --heads 4 --len 9 --dim 8 --set train.steps=3", "give --recipe FILE"),
        ("explain --heads 4 --len 9 --dim 8 --mesh shard=2", "--mesh is of a recipe"),
        ("explain --heads 4 --len 9 --dim 8 --device l40x", "there is no profile of `l40x`"),
        ("explain --heads 4 --len 9 --dim 8 --device cuda:x", "`x` is no number"),
        ("explain --heads 4 --len 9 --dim 8 --kernel kv_splits=2", "--device <NAME>"),
        ("explain --heads 4 --len 9 --dim 8 --mean-kv-len 2", "--device <NAME>"),
        (
            "explain --heads 4 --len 9 --dim 8 --device l4 --kernel tile=2",
            "no kernel option `tile`",
        ),
        (
            "explain --heads 4 --len 9 --dim 8 --device l4 --kernel kv_splits",
            "KEY=VALUE is expected",
        ),
        (
            "explain --heads 4000000000 --len 2000000000 --dim 4000000000",
            "more elements in [1, 4000000000, 2000000000, 4000000000] than memory can address",
        ),
        ("tune --heads 4 --len 9 --dim 8 --mean-kv-len x", "'x' for '--mean-kv-len <N>': a number"),
        ("kernels build --device l4 --len 5 --dim 64", "--heads <HQ[/HKV]> is missing"),
        ("kernels build --device l5 --len 5 --dim 64", "there is no profile of `l5`"),
        ("kernels check --arch sm_70", "no kernels are listed for sm_70, but for sm_80, "),
        ("kernels check --filter nothing", "no kernel that is listed has this in its name"),
        ("generate here --temperature x", "invalid value 'x' for '--temperature <T>'"),
        ("generate here --temperature 0 --top-k 5", "--top-k is of draws"),
        ("generate here --temperature 0 --top-p 0.5", "--top-p is of draws"),
        ("generate here --temperature 0 --seed 3", "--seed is of draws"),
        ("generate here --max-tokens -1", "invalid value '-1' for '--max-tokens <N>'"),
        ("bench cpu --filter nothing", "no case has `nothing` in its name"),
        ("bench mask --seconds nan", "seconds from 0 to 3600 are expected"),
        ("bench gpu --seconds -1", "seconds from 0 to 3600 are expected"),
        ("train", "<RECIPE>"),
        ("paint", "unrecognized subcommand 'paint'"),
    ] {
        let (code, out, err) = run(&line.split(' ').collect::<Vec<_>>());
        assert!(code == Some(2) && err.contains(said), "{line}: {code:?} {err}");
        assert!(out.is_empty() && !err.contains("panicked"), "{line}: {out}{err}");
    }
}

#[test]
fn scales_of_the_bench_are_of_operands_and_blocks_that_have_them() {
    for (line, said) in [
        ("bench gpu --dtype f8e4m3 --scales 96", "`head` or a multiple of 64 rows"),
        ("bench gpu --scales 64", "--scales is for f8e4m3 operands, not bf16"),
    ] {
        ends_with_2(line, said);
    }
}

#[test]
fn what_fails_is_said_with_the_place_and_exit_code_1() {
    for (line, said) in [
        ("generate nowhere", "nowhere: does not exist; give the folder of a checkpoint"),
        ("eval nowhere a.txt", "nowhere: does not exist; give the folder of a checkpoint"),
        ("train nowhere.toml", "nowhere.toml: could not be read"),
        ("train .", ".: could not be read"),
        ("kernels build --device l4 --problems nowhere.toml", "nowhere.toml: could not be read"),
        ("kernels build --device l4 --problems a.txt", "a.txt: "),
        ("kernels build --device l4 --problems /dev/zero", "it is a pipe or a device, not a file"),
        ("explain --recipe nowhere.toml", "nowhere.toml: could not be read"),
        ("explain --heads 4 --len 9 --dim 8 --dtype f64", "cpu declined"),
        (
            "explain --heads 4 --len 9 --dim 8 --dtype f64 --device l4",
            "f16, bf16, f32 and f8e4m3, not f64",
        ),
        (
            "explain --heads 4 --len 2147483647 --batch 2000 --dim 8 --device l4",
            "have 4294967296000 queries of a head together; kernels count to 2147483647: cut the",
        ),
        (
            "explain --heads 70000 --len 9 --dim 8 --device l4",
            "70000 query heads are more than the 65535 of a launch",
        ),
        (
            "explain --heads 4 --len 9 --dim 8 --device l4 --kernel forward.tile_q=48",
            "there is no forward tile with the options given (tile_q 48) that a usual number of",
        ),
        (
            "explain --heads 4 --len 99 --dim 128 --dtype f16 --device l40s --backward \
             --kernel backward.tile_q=64 --kernel backward.tile_kv=128 --kernel backward.warps=8",
            "tile 64x128, 8 warps, 2 stages: 175168 B of shared memory, a CTA can have 101376",
        ),
        ("mask causal --len 9 --svg nowhere/mask.svg", "nowhere/mask.svg cannot be written"),
    ] {
        let (code, out, err) = run(&line.split(' ').collect::<Vec<_>>());
        assert!(code == Some(1) && err.starts_with("error: "), "{line}: {code:?} {err}");
        assert!(out.is_empty() && err.contains(said), "{line}: {out}{err}");
    }
}

/// Whoever reads is told; a closed pipe is no failure of ours.
#[cfg(unix)]
#[test]
fn an_error_that_nobody_reads_has_its_exit_code_still() {
    for line in ["explain --heads 4", "mask causl --len 5", "train nowhere.toml"] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
        let command = command.args(line.split(' ')).stdin(Stdio::null()).stderr(writer);
        let code = command.status().unwrap().code();
        assert!(matches!(code, Some(1 | 2)), "{line}: {code:?}");
    }
}

#[test]
fn a_list_of_problems_is_compiled_into_the_cache() {
    if foveate_gpu::nvrtc::Compiler::get().is_err() {
        return println!("skipped: there is no NVRTC");
    }
    let dir = tempfile::tempdir().unwrap();
    let list = dir.path().join("problems.toml");
    let build = |text: &str| {
        std::fs::write(&list, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
        command.args(["kernels", "build", "--device", "a10", "--problems"]).arg(&list);
        let done = command.env("FOVEATE_CACHE_DIR", dir.path().join("kept")).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (done.status.code(), text(done.stdout) + &text(done.stderr))
    };
    let problem = "[[problem]]\nheads = \"4/2\"\nlen = 100\ndim = 32\ndtype = \"f16\"\n";
    let twice = format!("{problem}mask = \"causal\"\n{problem}mask = \"causal\"\n");
    let (code, said) = build(&twice);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("2 kernels of 2 problems for sm_86 in "), "{said}");
    assert_eq!(std::fs::read_dir(dir.path().join("kept")).unwrap().count(), 2);

    let (code, said) = build(&format!("{problem}{problem}haeds = \"4\"\n"));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("problems.toml: problem 2: unexpected argument '--haeds'"), "{said}");
}

#[test]
fn a_folder_that_cannot_be_filled_with_kernels_is_said_once() {
    if let Err(e) = foveate_gpu::nvrtc::Compiler::get() {
        return println!("skipped: {e}");
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    for variable in ["FOVEATE_CACHE_DIR", "FOVEATE_DUMP_KERNELS"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
        command.args("kernels build --device a10 --heads 2 --len 100 --dim 32".split(' '));
        command.args(["--dtype", "f16"]).env("FOVEATE_CACHE_DIR", dir.path().join("kept"));
        let done = command.env(variable, &file).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(said.starts_with(&format!("error: {}", file.display())), "{said}");
        assert_eq!(said.matches(variable).count(), 1, "{said}");
        assert!(!said.contains("warning") && !said.contains("each process"), "{said}");
    }
}

#[test]
fn the_doctor_says_which_level_and_threads_are_used_and_what_is_wrong_with_those_asked_for() {
    let doctor = |variables: &[(&str, &str)], args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
        command.env_remove("FOVEATE_CPU_LEVEL").env_remove("RAYON_NUM_THREADS");
        let done = command.arg("doctor").args(args).envs(variables.iter().copied()).output();
        let done = done.unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    };
    let json: serde_json::Value = serde_json::from_str(&doctor(&[], &["--json"])).unwrap();
    let level = json["instructions"].as_str().unwrap();
    assert!(json["instructions_refused"].is_null() && json["threads_refused"].is_null(), "{json}");
    let line = format!("level     {level} (FOVEATE_CPU_LEVEL takes a lesser one)\n");
    assert!(doctor(&[], &[]).contains(&line));
    let told = doctor(&[("FOVEATE_CPU_LEVEL", "nonsense"), ("RAYON_NUM_THREADS", "3")], &[]);
    let refused = "level     no attention runs on the CPU: option FOVEATE_CPU_LEVEL: no level \
                   `nonsense`; this machine has ";
    assert!(told.contains(refused) && told.contains(level), "{told}");
    assert!(told.contains("threads   3 of ") && told.contains("(RAYON_NUM_THREADS sets"), "{told}");
    for wrong in ["abc", "0"] {
        let told = doctor(&[("RAYON_NUM_THREADS", wrong)], &[]);
        let refused = format!(
            " (RAYON_NUM_THREADS is {wrong:?}, which is no number of threads; other commands refuse \
             it)"
        );
        assert!(told.contains(&refused), "{told}");
    }
}

#[test]
fn every_command_that_reports_figures_prints_one_object_a_line() {
    for (line, key) in [
        ("mask causal --len 300 --json", "sparsity"),
        ("explain --heads 4/2 --len 300 --dim 16 --mask causal --json", "live_forward_flops"),
        ("doctor --json", "threads"),
        ("bench cpu --filter causal/h8-2/s256 --repeat 1 --json", "tflops"),
    ] {
        let (code, out, err) = run(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(code, Some(0), "{line}: {err}");
        for found in out.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()) {
            assert!(found.get(key).is_some(), "{line}: {found}");
        }
        assert!(!out.is_empty(), "{line}");
    }
}

/// A run of a millisecond that another process interrupts has its time in whatever stage that was, so
/// what the stages share is looked at in several runs; that they add up holds in each.
#[test]
fn the_shares_of_a_profile_add_up_to_the_whole_time() {
    let line = "bench cpu --filter causal/h8-2/s256 --repeat 1 --profile --threads 2 --json";
    let most_of_products = (0..20).find(|_| {
        let (code, out, err) = run(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(code, Some(0), "{err}");
        out.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()).all(|found| {
            let share = |name: &str| found["profile"][name].as_f64().unwrap();
            let shares = ["products", "softmax", "mods", "packing", "idle"].map(share);
            assert!(shares.iter().all(|share| (0.0..=1.0).contains(share)), "{found}");
            assert!((shares.iter().sum::<f64>() - 1.0).abs() < 0.02, "{found}");
            share("products") > 0.1
        })
    });
    assert!(most_of_products.is_some(), "products have less than a tenth in each of 20 runs");
}

#[test]
fn the_doctor_tells_a_damaged_library_from_a_missing_one() {
    let dir = tempfile::tempdir().unwrap();
    let damaged = dir.path().join("libcuda.so.1");
    std::fs::write(&damaged, "cut short").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
    command.args(["doctor", "--json"]).env("FOVEATE_CUDA_LIBRARIES", dir.path());
    let done = command.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let found: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    let libraries = found["libraries"].as_array().unwrap();
    let driver = libraries.iter().find(|l| l["name"] == "the NVIDIA driver").unwrap();
    let step = &driver["searched"][0];
    assert_eq!(
        (&step["origin"], &step["outcome"]),
        (&"FOVEATE_CUDA_LIBRARIES".into(), &"unusable".into())
    );
    assert_eq!(step["path"], damaged.to_str().unwrap());
    assert!(step["reason"].as_str().unwrap().contains("libcuda.so.1"), "{step}");
}

#[test]
fn fine_grained_masks_in_small_tiles_are_broken_off_with_what_they_would_take() {
    let line = ["mask", "(q + kv) % 2 == 0", "--len", "200000", "--tile", "1x1"];
    let began = std::time::Instant::now();
    let (code, out, err) = run(&line);
    assert!(code == Some(2) && out.is_empty(), "{code:?} {err}");
    let (told, help) = err.split_once("\nhelp: ").expect("it says what to do");
    assert!(told.contains("building the mask in tiles of 1x1 takes about "), "{err}");
    assert!(told.contains(" GiB"), "{err}");
    assert!(help.starts_with("make the tiles larger"), "{err}");
    // It is seen after some seconds; the whole takes ten minutes.
    assert!(began.elapsed().as_secs() < 120, "{:?}", began.elapsed());
}

#[test]
fn what_is_drawn_is_what_is_built() {
    for line in [
        "mask document --doc-lens 3,2000000000,2000000000 --len 300",
        "mask documents(3,2000000000) --len 300",
        "explain --heads 2 --dim 8 --mask document --doc-lens 2000000000 --len 300",
    ] {
        let (code, out, err) = run(&line.split(' ').collect::<Vec<_>>());
        assert_eq!((code, err.as_str()), (Some(0), ""), "{line}");
        assert!(!out.is_empty(), "{line}");
    }
}

#[test]
fn a_mask_that_sees_nothing_warns() {
    let (code, _, err) = run(&["mask", "kv < 0", "--len", "300"]);
    let warning = "warning: the mask `kv < 0` lets no query see any key\n";
    assert_eq!((code, err.as_str()), (Some(0), warning));
    let sizes = ["explain", "--heads", "2", "--len", "9", "--dim", "64", "--mask", "kv < 0"];
    let device = ["--device", "l4", "--dtype", "bf16"];
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/tiny.toml");
    let of_recipe = ["explain", "--recipe", recipe, "--set", "attention.mask=kv < 0", "--json"];
    for line in
        [&[&sizes[..], &["--json"]].concat(), &[&sizes[..], &device].concat(), &of_recipe[..]]
    {
        let (code, _, err) = run(line);
        assert_eq!((code, err.as_str()), (Some(0), warning), "{line:?}");
    }
    // Warned of before a compiler or a GPU is looked for: here may be neither.
    let bf16 = [&sizes[1..], &["--dtype", "bf16"]].concat();
    for command in [&["tune"][..], &["kernels", "build", "--device", "l4"]] {
        let (_, _, err) = run(&[command, &bf16].concat());
        assert!(err.starts_with(warning), "{command:?}: {err}");
    }
    let (_, out, _) =
        run(&["explain", "--heads", "2", "--len", "9", "--dim", "8", "--mask", "kv < 0"]);
    assert!(out.contains("warning    the mask lets no query see any key"), "{out}");
}

#[test]
fn a_number_of_threads_that_no_machine_has_is_refused_by_name() {
    for line in ["doctor", "mask causal --len 9", "explain --heads 2 --len 9 --dim 8"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
        let done =
            command.args(line.split(' ')).env("RAYON_NUM_THREADS", "20000").output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(2), "{said}");
        assert!(said.starts_with("error: RAYON_NUM_THREADS is 20000; up to 1024"), "{said}");
    }
    for (line, wrong) in [("mask causal --len 9", "abc"), ("train nowhere.toml", "0")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
        let done = command.args(line.split(' ')).env("RAYON_NUM_THREADS", wrong).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        let wanted =
            format!("error: RAYON_NUM_THREADS is {wrong:?}, which is no number of threads\n");
        assert!(done.status.code() == Some(2) && said.starts_with(&wanted), "{said}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn threads_that_the_system_does_not_start_are_told_by_every_command() {
    let limited = |threads: &str, line: &str| {
        let shell = "ulimit -v 524288; exec \"$0\" \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", shell, env!("CARGO_BIN_EXE_foveate")]).args(line.split(' '));
        command.env("RAYON_NUM_THREADS", threads).output().unwrap()
    };
    for line in [
        "train nowhere.toml",
        "eval nowhere nothing.txt",
        "generate nowhere",
        "mask causal --len 9",
        "explain --heads 2 --len 9 --dim 8",
        "kernels build --heads 2 --len 9 --dim 8 --device h100",
        "bench cpu --filter s128",
        "bench mask",
    ] {
        let done = limited("1000", line);
        let said = String::from_utf8(done.stderr).unwrap();
        let start = "error: RAYON_NUM_THREADS is 1000: so many threads cannot be started, ";
        let limit = "the limit of address space (ulimit -v) leaves ";
        assert!(said.starts_with(start) && said.contains(limit), "{line}: {said}");
        assert!(
            said.contains("help: try RAYON_NUM_THREADS=") && said.lines().count() < 5,
            "{said}"
        );
        assert_eq!(done.status.code(), Some(1), "{line}: {said}");
        // As many as are advised do start.
        let advised = said.split("help: try RAYON_NUM_THREADS=").nth(1).unwrap();
        let advised = advised.split(',').next().unwrap();
        let done = limited(advised, "mask causal --len 9");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(0), "{advised} threads: {said}");
    }
    let done = limited("1000", "doctor");
    let told = String::from_utf8(done.stdout).unwrap();
    let line = told.lines().find(|line| line.starts_with("threads ")).unwrap_or_default();
    assert!(
        line.contains(" 0 of ") && line.contains("so many threads cannot be started"),
        "{told}"
    );
    assert_eq!((done.status.code(), &done.stderr[..]), (Some(0), &b""[..]));
    // What is asked for on the command line is named as there.
    let done = limited("1", "bench cpu --filter s128 --threads 1000");
    let said = String::from_utf8(done.stderr).unwrap();
    let asked = said.starts_with("error: 1000 threads cannot be started, ");
    assert!(asked && said.contains("help: try --threads "), "{said}");
    let done = limited("1", "mask causal --len 9");
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn an_error_is_short_however_long_what_it_is_about() {
    let long = format!("q >= k{}", "x".repeat(100_000));
    let number = "9".repeat(100_000);
    let text = format!("{} & nothing", "causal & ".repeat(9000));
    for line in [
        &["mask", long.as_str(), "--len", "5"][..],
        &["mask", text.as_str(), "--len", "5"],
        &["mask", "causal", "--len", number.as_str()],
        &["mask", "causal", "--len", "5", "--buffer", long.as_str()],
        &["mask", "causal", "--len", "5", "--scalar", long.as_str()],
        &["explain", "--heads", "2", "--len", "9", "--dim", "8", "--score", long.as_str()],
        &["train", long.as_str()],
        &[long.as_str()],
    ] {
        let (code, _, err) = run(line);
        assert!(matches!(code, Some(1 | 2)) && err.len() < 3000, "{}: {code:?}", err.len());
    }
    let sizes = "explain --device h200 --heads 4 --len 99 --dim 1000000";
    let (_, _, err) = run(&sizes.split(' ').collect::<Vec<_>>());
    assert!(err.lines().count() == 1 && err.contains(" more, of larger tiles"), "{err}");
}

#[test]
fn one_thing_is_not_several() {
    let (_, out, _) = run(&["mask", "causal", "--len", "1", "--kv-len", "2"]);
    assert!(out.contains("size     1 query x 2 keys\n"), "{out}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
    command.args("explain --heads 2 --len 1 --dim 8 --mask causal".split(' '));
    let done = command.env("RAYON_NUM_THREADS", "1").output().unwrap();
    let out = String::from_utf8(done.stdout).unwrap();
    assert!(out.contains(", 1 thread\n") && out.contains("1 run in 1 mask, "), "{out}");
}

/// On a CPU no steps are profiled: what is known of a profile alone is no number.
#[test]
fn a_bench_of_steps_on_the_cpu_has_no_time_of_products() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/tiny.toml");
    let line = "bench train --device cpu --len 16 --rows 1 --steps 1 --json --model";
    let (code, out, err) = run(&line.split(' ').chain([recipe]).collect::<Vec<_>>());
    assert_eq!(code, Some(0), "{err}");
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(found["device"], "cpu");
    for key in ["products_ms", "products_alone_ms"] {
        assert!(found[key].is_null(), "{key}: {out}");
    }
}
