//! Training on several ranks as a user starts them: by `foveate launch`, by flags, by a launcher's
//! variables; ranks that are killed, and wrong input.

mod place;

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use place::Place;

/// Three rows a batch, and the run in `run`.
fn place() -> Place {
    let place = Place::new();
    place.recipe(|recipe| recipe.replace("batch_rows = 2", "batch_rows = 3"));
    place
}

fn saved(place: &Place) -> bool {
    std::fs::read_dir(place.path("run/checkpoints")).is_ok_and(|mut entries| {
        entries.any(|e| e.unwrap().file_name().to_string_lossy().starts_with("step-"))
    })
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

fn errors(said: &str) -> Vec<&str> {
    assert!(!said.contains("panicked"), "{said}");
    said.lines().filter(|line| line.contains("error: ")).collect()
}

#[test]
fn launched_ranks_reach_what_one_reaches_and_one_of_them_writes() {
    let place = place();
    assert!(place.run(&["train", "recipe.toml", "--set", "run.dir=alone"]).status.success());
    let done = place.run(&["launch", "--ranks", "3", "--", "train", "recipe.toml"]);
    let (out, said) = (text(done.stdout), text(done.stderr));
    assert!(done.status.success(), "{said}");
    assert!(said.contains("3 ranks: replicate=1,shard=3,context=1,tensor=1"), "{said}");
    assert_eq!(out.matches("held-out loss").count(), 1, "{out}");
    assert!(!said.lines().chain(out.lines()).any(|line| line.starts_with('[')), "{said}{out}");
    let losses =
        |run: &str| place.steps(run).into_iter().map(|(_, loss, _)| loss.parse::<f64>().unwrap());
    let far = losses("run").zip(losses("alone")).map(|(a, b)| (a - b).abs());
    let far: Vec<f64> = far.collect();
    assert!(far.len() == 24 && far.iter().all(|&far| far < 1e-4), "{far:?}");
}

/// Starts two ranks by flags.
fn two(place: &Place, args: &[&str]) -> [Child; 2] {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let meet = format!("127.0.0.1:{port}");
    ["0", "1"].map(|rank| {
        let mut command = place.command(&["train", "recipe.toml", "--rank", rank]);
        command.args(["--ranks", "2", "--meet", &meet, "--set", "train.steps=150"]).args(args);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    })
}

#[test]
fn a_rank_that_is_killed_ends_the_others_and_the_run_resumes_bit_for_bit() {
    let place = place();
    for rank in two(&place, &["--set", "run.dir=straight"]) {
        let done = rank.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", text(done.stderr));
    }
    for round in 0.. {
        let how = if saved(&place) { "--resume" } else { "--start-over" };
        let [zero, one] = two(&place, &[how]);
        // From before they meet to well inside the run; each of them in turn.
        std::thread::sleep(Duration::from_millis(30 + 50 * round));
        let (mut killed, other) = if round % 2 == 0 { (one, zero) } else { (zero, one) };
        if round < 6 && killed.try_wait().unwrap().is_none() {
            killed.kill().unwrap();
            killed.wait().unwrap();
            let began = Instant::now();
            let mut other = other;
            if round == 0 {
                // It may wait for one that never came.
                let _ = other.kill();
            }
            let done = other.wait_with_output().unwrap();
            assert!(began.elapsed() < Duration::from_secs(60), "it hangs");
            let said = text(done.stderr);
            if round > 0 && !done.status.success() {
                assert_eq!(done.status.code(), Some(1), "{said}");
                assert_eq!(errors(&said).len(), 1, "{said}");
            }
            continue;
        }
        for rank in [killed, other] {
            let done = rank.wait_with_output().unwrap();
            assert!(done.status.success(), "{}", text(done.stderr));
        }
        break;
    }
    assert_eq!(place.steps("run"), place.steps("straight"));
    assert_eq!(place.weights("run", 150), place.weights("straight", 150));
}

#[cfg(unix)]
#[test]
fn sigterm_to_the_launcher_saves_after_the_same_step_on_all_ranks() {
    let place = place();
    let steps = ["--set", "train.steps=4000"];
    let launch = ["launch", "--ranks", "2", "--", "train", "recipe.toml"];
    let child = place.command(&[&launch[..], &steps].concat());
    let mut child = { child }.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let log = place.path("run/metrics.jsonl");
    while std::fs::read_to_string(&log).map_or(0, |t| t.lines().count()) < 3 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before its first steps");
        std::thread::sleep(Duration::from_millis(5));
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let done = child.wait_with_output().unwrap();
    let said = text(done.stderr);
    assert_eq!(done.status.code(), Some(130), "{said}");
    assert!(said.contains("interrupted after step"), "{said}");
    assert!(saved(&place));
}

#[cfg(unix)]
#[test]
fn sigterm_ends_a_rank_that_waits_for_others() {
    let place = place();
    let [mut zero, mut one] = two(&place, &[]);
    one.kill().unwrap();
    one.wait().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let pid = zero.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let began = Instant::now();
    assert!(!zero.wait().unwrap().success());
    assert!(began.elapsed() < Duration::from_secs(20), "it waits on");
}

#[test]
fn wrong_input_gets_one_line_on_one_rank() {
    let place = place();
    for (set, says) in [
        ("train.batch_rows=2", "train.batch_rows: is 2, and 3 ranks share the rows of a batch"),
        ("data.files=none.txt", "data.files"),
        ("optimizer.lr=-1", "optimizer.lr"),
    ] {
        let args = ["launch", "--ranks", "3", "--", "train", "recipe.toml", "--set", set];
        let done = place.run(&args);
        let said = text(done.stderr);
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(errors(&said)[0].contains(says), "{said}");
        assert!(!place.path("run").exists());
    }
    for (args, says) in [
        (&["train", "recipe.toml", "--rank", "0"][..], "--ranks"),
        (&["train", "recipe.toml", "--rank", "2", "--ranks", "2", "--meet", "a:1"], "rank 2 of 2"),
        (&["train", "recipe.toml", "--rank", "0", "--ranks", "2"], "give all three"),
        (&["launch", "--ranks", "0", "--", "train"], "--ranks"),
        (&["launch", "--ranks", "2"], "COMMAND"),
    ] {
        let done = place.run(args);
        let said = text(done.stderr);
        assert_eq!(done.status.code(), Some(2), "{said}");
        assert!(said.contains(says), "{said}");
    }
    let mut half = place.command(&["train", "recipe.toml"]);
    let done = half.env("WORLD_SIZE", "2").output().unwrap();
    assert_eq!(
        text(done.stderr).trim(),
        "error: WORLD_SIZE is set and RANK is not; set both, or neither"
    );
}

#[test]
fn the_doctor_says_which_rank_this_is_and_why() {
    let place = place();
    let alone = text(place.run(&["doctor", "--mesh"]).stdout);
    assert!(alone.starts_with("ranks     0 of 1, by no launcher"), "{alone}");
    let mut command = place.command(&["doctor", "--mesh"]);
    let set = [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ];
    let said = text(command.envs(set).output().unwrap().stdout);
    assert!(said.contains("ranks     3 of 8, by RANK and WORLD_SIZE"), "{said}");
    assert!(said.contains("node0:29501 (the port is MASTER_PORT + 1"), "{said}");
}
