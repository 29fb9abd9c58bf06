//! Training on several ranks as a user starts them: by `foveate launch`, by flags, by a launcher's
//! variables; ranks that are killed, and (`refused`) wrong input.

mod place;
mod refused;

use std::collections::BTreeSet;
use std::fs::DirEntry;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use foveate::tensor::random::Random;
use place::Place;

/// Three rows a batch, and the run in `run`.
fn place() -> Place {
    let place = Place::new();
    place.recipe(|recipe| recipe.replace("batch_rows = 2", "batch_rows = 3"));
    place
}

fn saved(place: &Place) -> bool {
    checkpoints(place, "step-").next().is_some()
}

/// What the folder of checkpoints has that begins so.
fn checkpoints<'a>(place: &Place, begins: &'a str) -> impl Iterator<Item = DirEntry> + 'a {
    let entries = std::fs::read_dir(place.path("run/checkpoints")).into_iter().flatten().flatten();
    entries.filter(move |e| e.file_name().to_string_lossy().starts_with(begins))
}

/// Whether a checkpoint is being written that was begun after `since`.
fn saving(place: &Place, since: SystemTime) -> bool {
    let begun = |e: DirEntry| e.metadata().and_then(|m| m.modified()).is_ok_and(|at| at > since);
    checkpoints(place, ".writing-").any(begun)
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
    // Threads of one process have the bits of processes.
    let threads = ["train", "recipe.toml", "--ranks", "3", "--set", "run.dir=threads"];
    let done = place.run(&threads);
    let (out, said) = (text(done.stdout), text(done.stderr));
    assert!(done.status.success(), "{said}");
    assert_eq!(out.matches("held-out loss").count(), 1, "{out}");
    assert!(place.steps("threads") == place.steps("run"), "{said}");
}

#[test]
fn steps_of_a_mesh_are_measured() {
    let place = Place::new();
    let bench = |more: &[&str]| {
        let fixed =
            ["bench", "train", "--model", "recipe.toml", "--rows", "4", "--steps", "2", "--json"];
        place.run(&[&fixed, more].concat())
    };
    for (ranks, mesh) in [
        ("2", "replicate=1,shard=2,context=1,tensor=1"),
        ("4", "replicate=2,shard=1,context=1,tensor=2"),
        ("2", "replicate=1,shard=1,context=2,tensor=1"),
    ] {
        let sets = mesh.split(',').filter(|axis| !axis.starts_with("shard"));
        let sets: Vec<_> =
            sets.flat_map(|axis| ["--set".to_owned(), format!("mesh.{axis}")]).collect();
        let sets = sets.iter().map(String::as_str);
        let done = bench(&["--ranks", ranks].into_iter().chain(sets).collect::<Vec<_>>());
        let (out, said) = (text(done.stdout), text(done.stderr));
        assert!(done.status.success(), "{mesh}: {said}");
        let found: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            (found["mesh"].as_str(), found["rows"].as_u64()),
            (Some(mesh), Some(4)),
            "{out}"
        );
        assert!(found["ms"].as_f64().unwrap() > 0.0, "{out}");
    }
    // One rank says what is wrong, and the others end with it.
    let done = bench(&["--ranks", "8"]);
    let said = text(done.stderr);
    assert_eq!(done.status.code(), Some(2));
    let [error] = errors(&said)[..] else { panic!("{said}") };
    assert!(
        error.contains("--rows is 4, and 8 ranks share the rows of a batch; raise it"),
        "{said}"
    );
}

#[test]
fn launched_ranks_share_the_tokens_of_a_row_over_tcp() {
    let place = place();
    assert!(place.run(&["train", "recipe.toml", "--set", "run.dir=alone"]).status.success());
    for run in ["once", "again"] {
        let dir = format!("run.dir={run}");
        let launch = ["launch", "--ranks", "2", "--", "train", "recipe.toml"];
        let sets = ["--set", "mesh.context=2", "--set", &dir];
        let done = place.run(&[&launch[..], &sets[..]].concat());
        let said = text(done.stderr);
        assert!(done.status.success(), "{said}");
        assert!(said.contains("attention over context: exchange in 2 stages: "), "{said}");
    }
    assert!(place.steps("once") == place.steps("again"), "the same bits every time");
    let losses =
        |run: &str| place.steps(run).into_iter().map(|(_, loss, _)| loss.parse::<f64>().unwrap());
    let far: Vec<f64> = losses("once").zip(losses("alone")).map(|(a, b)| (a - b).abs()).collect();
    assert!(far.len() == 24 && far.iter().all(|&far| far < 1e-4), "{far:?}");
}

#[test]
fn what_ranks_saved_is_listed_exported_evaluated_and_resumed_by_any_number() {
    let place = place();
    let ranks = |n: &str, how: &str, set: &str| {
        let train = ["launch", "--ranks", n, "--", "train", "recipe.toml", how, "--set", set];
        let done = place.run(&train);
        assert!(done.status.success(), "{}", text(done.stderr));
    };
    let said = |args: &[&str]| {
        let done = place.run(args);
        assert!(done.status.success(), "{}", text(done.stderr));
        text(done.stdout)
    };
    ranks("3", "--start-over", "train.steps=8");
    let saved = "run/checkpoints/step-000008";
    let shown = said(&["checkpoint", "show", saved, "--verify"]);
    assert!(
        shown.starts_with("step 8, ") && shown.contains("written in ranges by several"),
        "{shown}"
    );
    assert!(shown.ends_with("every tensor is what was saved\n"), "{shown}");
    let json: serde_json::Value =
        serde_json::from_str(&said(&["checkpoint", "show", saved, "--json"])).unwrap();
    assert_eq!((&json["sharded"], &json["state"]["step"]), (&true.into(), &8.into()));
    for tensor in json["tensors"].as_array().unwrap() {
        let elems: u64 =
            tensor["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).product();
        let ranges = tensor["ranges"].as_array().unwrap();
        assert_eq!(ranges.iter().map(|r| r["elems"].as_u64().unwrap()).sum::<u64>(), elems);
    }
    said(&["checkpoint", "export", saved, "hf", "--dtype", "f32"]);
    let loss = |folder: &str| said(&["eval", folder, "00.txt", "01.txt", "--json"]);
    assert_eq!(loss("hf"), loss(saved));
    assert!(said(&["checkpoint", "show", "hf"]).starts_with("no state to resume from\n"));
    for (args, told) in [
        (&["checkpoint", "export", saved, "hf"][..], "hf: is there already; give a folder that is"),
        (&["checkpoint", "show", "run"], "run: is no checkpoint; the newest one in it is run/"),
        (&["checkpoint", "export", "hf", "other", "--dtype", "f64"], "f32, bf16 and f16 are there"),
    ] {
        let refused = place.run(args);
        let refused = text(refused.stderr);
        assert!(errors(&refused).len() == 1 && refused.contains(told), "{refused}");
    }
    // One rank goes on, then two.
    said(&["train", "recipe.toml", "--resume", "--set", "train.steps=12"]);
    ranks("2", "--resume", "train.steps=16");
    assert_eq!(place.steps("run").len(), 16);
    let part = "part-00001-00000.safetensors";
    std::fs::remove_file(place.path("run/checkpoints/step-000016").join(part)).unwrap();
    let refused = place.run(&["checkpoint", "show", "run/checkpoints/step-000016"]);
    let refused = text(refused.stderr);
    assert!(refused.contains(part) && refused.contains("is missing, where elements"), "{refused}");
}

/// Starts `ranks` ranks by flags, which notice in four seconds that one is silent.
fn some(place: &Place, ranks: usize, args: &[&str]) -> Vec<Child> {
    some_behind(place, ranks, args, |_| None)
}

/// The same, some of them behind a command of the shell.
fn some_behind(
    place: &Place,
    ranks: usize,
    args: &[&str],
    behind: impl Fn(usize) -> Option<&'static str>,
) -> Vec<Child> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (meet, number) = (format!("127.0.0.1:{port}"), ranks.to_string());
    let start = |rank: usize| {
        let mut command = place.command(&["train", "recipe.toml", "--rank", &rank.to_string()]);
        command.args(["--ranks", &number, "--meet", &meet, "--set", "train.steps=150"]).args(args);
        if let Some(before) = behind(rank) {
            let mut shell = Command::new("bash");
            shell.args(["-c", &format!("{before}; exec \"$0\" \"$@\"")]);
            shell.arg(command.get_program()).args(command.get_args());
            shell.current_dir(command.get_current_dir().unwrap());
            command = shell;
        }
        command.env("FOVEATE_SILENCE", "4").env("FOVEATE_ARRIVAL", "8");
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    (0..ranks).map(start).collect()
}

fn signal(name: &str, child: &Child) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status();
    assert!(sent.unwrap().success());
}

/// Starts three ranks that are threads of one process.
fn threads(place: &Place, args: &[&str]) -> Child {
    let mut command = place.command(&["train", "recipe.toml", "--ranks", "3"]);
    command.args(["--set", "train.steps=150"]).args(args);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// As often as `FOVEATE_KILLS` says: any of three ranks is killed or stopped, from before they meet
/// to behind the last step, saves included; of four attempts one has its ranks in one process. The others
/// end by themselves, with one error and the status that launchers start again on; what the run reaches in
/// the end is what one reaches that was left alone.
#[cfg(unix)]
#[test]
fn ranks_that_are_killed_or_stopped_end_the_others_and_the_run_resumes_bit_for_bit() {
    let kills = std::env::var("FOVEATE_KILLS").map_or(4, |n| n.parse::<usize>().unwrap());
    let seed = std::env::var("FOVEATE_SEED").map_or(11, |n| n.parse::<u64>().unwrap());
    println!("FOVEATE_SEED={seed}");
    let mut random = Random::new(seed);
    let place = place();
    // Saves go on beside the steps.
    place.recipe(|recipe| {
        let recipe = recipe.replace("batch_rows = 2", "batch_rows = 3");
        recipe.replace("save_every", "async_save = true\nsave_every")
    });
    let straight = Instant::now();
    for rank in some(&place, 3, &["--set", "run.dir=straight"]) {
        let done = rank.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", text(done.stderr));
    }
    let took = straight.elapsed().as_millis() as usize;
    let right = (place.steps("straight"), place.weights("straight", 150));
    let (mut done, mut stopped, mut of_threads, mut finished) = (0, 0, 0, 0);
    let (mut saves, mut unsaved, mut over) = (0, 0, true);
    while done < kills || finished == 0 {
        // What a launcher's one command comes to.
        let how = if over { "--start-over" } else { "--resume" };
        unsaved += usize::from(!over && !saved(&place));
        over = false;
        let (together, since) = (random.below(4) == 0, SystemTime::now());
        let how = [how];
        let mut ranks = if together { vec![threads(&place, &how)] } else { some(&place, 3, &how) };
        let harmed = random.below(ranks.len());
        let stops = random.below(4) == 0;
        std::thread::sleep(Duration::from_millis(random.below(took + took / 4) as u64));
        let harms = done < kills && ranks[harmed].try_wait().unwrap().is_none();
        if harms {
            signal(if stops { "-STOP" } else { "-KILL" }, &ranks[harmed]);
            done += 1;
            stopped += usize::from(stops);
            of_threads += usize::from(together);
            saves += usize::from(saving(&place, since));
        }
        let began = Instant::now();
        let mut ended = true;
        for (rank, mut child) in ranks.into_iter().enumerate() {
            if harms && rank == harmed {
                if stops {
                    signal("-KILL", &child);
                }
                child.wait().unwrap();
                continue;
            }
            let done = child.wait_with_output().unwrap();
            let said = text(done.stderr);
            assert!(began.elapsed() < Duration::from_secs(60), "it hangs: {said}");
            ended &= done.status.success();
            if !done.status.success() {
                assert_eq!(done.status.code(), Some(75), "{said}");
                assert!(harms && errors(&said).len() <= 1, "{said}");
            }
        }
        if ended && !harms {
            finished += 1;
            assert_eq!((place.steps("run"), place.weights("run", 150)), right);
            over = true;
        }
    }
    println!(
        "{done} harmed, {stopped} of them stopped, {of_threads} with the others in their process, \
         {saves} while a checkpoint was written; {unsaved} resumed before the first was there; {finished} \
         runs reached their end"
    );
}

/// Whichever rank it is, behind a step and before the first save: all begin again alike, by the command that resumes.
#[cfg(unix)]
#[test]
fn ranks_that_are_killed_before_the_first_save_begin_again_by_resume() {
    let place = place();
    let few = ["--set", "train.steps=12", "--set", "train.save_every=12"];
    let run = |ranks: Vec<Child>| -> Vec<String> {
        let done = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap());
        done.map(|done| format!("{:?}: {}", done.status.code(), text(done.stderr))).collect()
    };
    let straight = run(some(&place, 3, &[&few[..], &["--set", "run.dir=straight"]].concat()));
    assert!(straight.iter().all(|said| said.starts_with("Some(0)")), "{straight:?}");
    for harmed in 0..3 {
        // It never comes to its first save.
        let endless = ["--set", "train.steps=100000", "--set", "train.save_every=100000"];
        let mut ranks = some(&place, 3, &[&endless[..], &["--resume"]].concat());
        let steps = || std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap_or_default();
        while steps().matches("\"step\"").count() < 6 {
            std::thread::sleep(Duration::from_millis(5));
        }
        ranks[harmed].kill().unwrap();
        let said = run(ranks);
        let lost = said.iter().filter(|said| said.starts_with("Some(75)")).count();
        assert!(lost == 2 && !saved(&place), "{said:?}");
    }
    let said = run(some(&place, 3, &[&few[..], &["--resume", "--set", "data.len=16"]].concat()));
    assert!(said.iter().all(|said| said.starts_with("Some(1)")), "{said:?}");
    assert_eq!(said.concat().matches("[data] is not what this run was started with").count(), 1);
    let said = run(some(&place, 3, &[&few[..], &["--resume"]].concat())).concat();
    assert_eq!(said.matches("nothing to resume: the run here died at step ").count(), 1, "{said}");
    let reached = |run| (place.steps(run), place.weights(run, 12));
    assert!(reached("run") == reached("straight"), "{said}");
}

/// Processes that are nobody's children any more: none trains on after a test that failed.
#[cfg(target_os = "linux")]
struct Left(Vec<u32>);

#[cfg(target_os = "linux")]
impl Drop for Left {
    fn drop(&mut self) {
        for &id in &self.0 {
            if status(id).is_some_and(|(_, state)| state != 'Z') {
                let _ = Command::new("kill").args(["-KILL", &id.to_string()]).status();
            }
        }
    }
}

/// The processes that `parent` has started and that run.
#[cfg(target_os = "linux")]
fn children(parent: u32) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|&id| status(id).is_some_and(|(of, _)| of == parent)).collect()
}

/// The parent of a process, and its state.
#[cfg(target_os = "linux")]
fn status(id: u32) -> Option<(u32, char)> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // Its name, in brackets, may have any characters.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((fields.next()?.parse().ok()?, state))
}

/// Nobody is left to tell them anything: they save, and end.
#[cfg(target_os = "linux")]
#[test]
fn ranks_whose_launch_is_killed_save_and_end() {
    let place = place();
    let endless = ["--set", "train.steps=100000", "--set", "train.save_every=100000"];
    let launch = [&["launch", "--ranks", "2", "--", "train", "recipe.toml"][..], &endless].concat();
    let mut launcher = place.command(&launch).stderr(Stdio::null()).spawn().unwrap();
    let log = place.path("run/metrics.jsonl");
    let began = Instant::now();
    while std::fs::read_to_string(&log).map_or(0, |t| t.matches("\"step\"").count()) < 3 {
        assert_eq!(launcher.try_wait().unwrap(), None, "it ended before it was killed");
        assert!(began.elapsed() < Duration::from_secs(60), "ranks do not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    let ranks = Left(children(launcher.id()));
    assert_eq!(ranks.0.len(), 2);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let began = Instant::now();
    // Whoever inherits a process may leave it a zombie.
    while ranks.0.iter().any(|&rank| status(rank).is_some_and(|(_, state)| state != 'Z')) {
        assert!(began.elapsed() < Duration::from_secs(60), "ranks train on");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(saved(&place));
    let steps = format!("train.steps={}", place.steps("run").last().unwrap().0 + 1);
    let done = place.run(&["train", "recipe.toml", "--resume", "--ranks", "2", "--set", &steps]);
    assert!(done.status.success(), "{}", text(done.stderr));
}

/// It is woken when the others have found it silent, and ends as they do.
#[cfg(target_os = "linux")]
#[test]
fn a_launched_rank_that_is_stopped_ends_with_the_others() {
    let place = place();
    let endless = ["--set", "train.steps=100000", "--set", "train.save_every=100000"];
    let launch = [&["launch", "--ranks", "3", "--", "train", "recipe.toml"][..], &endless].concat();
    let mut command = place.command(&launch);
    command.env("FOVEATE_SILENCE", "2").stdout(Stdio::null()).stderr(Stdio::piped());
    let launcher = command.spawn().unwrap();
    let log = place.path("run/metrics.jsonl");
    while std::fs::read_to_string(&log).map_or(0, |t| t.matches("\"step\"").count()) < 3 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let ranks = Left(children(launcher.id()));
    let stopped = ranks.0[2].to_string();
    assert!(Command::new("kill").args(["-STOP", &stopped]).status().unwrap().success());
    let began = Instant::now();
    let done = launcher.wait_with_output().unwrap();
    let said = text(done.stderr);
    assert_eq!(done.status.code(), Some(75), "{said}");
    assert!(said.contains("has been silent to rank") && !said.contains("SIGKILL"), "{said}");
    assert!(began.elapsed() < Duration::from_secs(20), "it waited to be killed: {said}");
}

/// What ranks leave behind says who it was, as far as they saw it.
#[cfg(unix)]
#[test]
fn a_rank_that_hangs_is_named_by_the_others_and_in_their_logs() {
    let place = place();
    let ranks = some(&place, 3, &["--set", "train.steps=4000"]);
    let log = place.path("run/metrics.jsonl");
    while std::fs::read_to_string(&log).map_or(0, |t| t.lines().count()) < 3 {
        std::thread::sleep(Duration::from_millis(5));
    }
    signal("-STOP", &ranks[2]);
    let mut ranks = ranks.into_iter();
    let others: Vec<_> = ranks.by_ref().take(2).map(|r| r.wait_with_output().unwrap()).collect();
    let said: String = others.iter().map(|done| text(done.stderr.clone())).collect();
    assert!(others.iter().all(|done| done.status.code() == Some(75)), "{said}");
    assert!(said.contains("rank 2 has been silent to rank"), "{said}");
    assert!(said.contains("help: what each rank did last: foveate shard log "), "{said}");
    let compared = |args: &[&str]| {
        let done = place.run(&[&["shard", "log", "run/transfers"], args].concat());
        assert!(done.status.success(), "{}", text(done.stderr));
        text(done.stdout)
    };
    let out = compared(&[]);
    let first = out.lines().next().unwrap();
    assert!(first.starts_with("rank 2 did not begin "), "{out}");
    assert!(first.ends_with("it left no log: it was killed, or its disk is another"), "{out}");
    // It goes on, finds the others gone, and says so.
    let last = ranks.next().unwrap();
    signal("-CONT", &last);
    assert_eq!(last.wait_with_output().unwrap().status.code(), Some(75));
    let out = compared(&["--last", "2"]);
    let of_rank_2 = out.lines().skip_while(|line| !line.starts_with("rank 2  ")).skip(1);
    assert_eq!(of_rank_2.filter(|line| line.contains(" among [")).count(), 2, "{out}");
    assert!(out.contains("has not ended, among [0, 1, 2]"), "{out}");
    let json: serde_json::Value = serde_json::from_str(&compared(&["--json"])).unwrap();
    assert_eq!((&json["ranks"], &json["silent"]), (&3.into(), &serde_json::json!([])));
    // The next attempt begins without them, and leaves what is none of them.
    let notes = place.path("run/transfers/rank-00007.jsonl");
    std::fs::write(&notes, "what I saw\n").unwrap();
    let over = ["train", "recipe.toml", "--start-over", "--set", "train.steps=2"];
    assert!(place.run(&over).status.success());
    let left = std::fs::read_dir(place.path("run/transfers")).unwrap();
    assert_eq!(left.map(|entry| entry.unwrap().path()).collect::<Vec<_>>(), [notes]);
}

/// Files of a few KiB hold the log of some steps and no checkpoint.
#[cfg(unix)]
/// Nobody reads what rank 0 writes, so that it hears of no rank.
#[cfg(unix)]
#[test]
fn a_rank_that_waits_for_something_else_is_ended_when_another_is_lost() {
    let place = place();
    let unread = |rank| (rank == 0).then_some("exec > >(exec sleep 60 2> /dev/null)");
    let mut ranks = some_behind(&place, 2, &["--json", "--set", "train.steps=10000"], unread);
    let written = || std::fs::metadata(place.path("run/metrics.jsonl")).map_or(0, |m| m.len());
    let mut before = 0;
    while before == 0 || before < written() {
        before = written();
        std::thread::sleep(Duration::from_secs(2));
    }
    signal("-KILL", &ranks[1]);
    let (since, first) = (Instant::now(), ranks.remove(0));
    let done = first.wait_with_output().unwrap();
    let (took, said) = (since.elapsed(), text(done.stderr));
    assert_eq!(done.status.code(), Some(75), "{said}");
    assert!((19..40).contains(&took.as_secs()), "{took:?}");
    let [error] = errors(&said)[..] else { panic!("{said}") };
    assert!(error.contains("rank 1") && error.contains("did not end either"), "{error}");
    assert!(said.contains("to go on, start all ranks with --resume"), "{said}");
    assert!(place.path("run/transfers/rank-00000.jsonl").is_file(), "{said}");
    ranks[0].wait().unwrap();
}

#[test]
fn a_disk_that_is_full_on_the_rank_that_writes_ends_all() {
    let place = place();
    let launch = "ulimit -f 16; exec \"$0\" launch --ranks 3 -- train recipe.toml";
    let mut limited = Command::new("bash");
    limited.args(["-c", launch, env!("CARGO_BIN_EXE_foveate")]);
    let done = limited.current_dir(place.path("")).stdin(Stdio::null()).output().unwrap();
    let said = text(done.stderr);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert_eq!(errors(&said).len(), 1, "{said}");
    assert!(said.contains("raise the limit of file sizes"), "{said}");
}

/// The disk of one rank ends while all save beside their steps: it says so, all end, and the checkpoint before is
/// the newest.
#[cfg(unix)]
#[test]
fn a_disk_that_is_full_on_one_rank_in_a_save_beside_the_steps_ends_all() {
    let place = place();
    let sets = ["--set", "train.async_save=true", "--set", "train.save_every=4"];
    let steps = |steps: &'static str| [&sets[..], &["--set", steps]].concat();
    for rank in some(&place, 3, &steps("train.steps=6")) {
        let done = rank.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", text(done.stderr));
    }
    let whole = || checkpoints(&place, "step-").map(|e| e.file_name()).collect::<BTreeSet<_>>();
    let before = whole();
    for full in [1, 2] {
        let more = [&steps("train.steps=40")[..], &["--resume"]].concat();
        let limit = |rank: usize| (rank == full).then_some("ulimit -f 2");
        for (rank, child) in some_behind(&place, 3, &more, limit).into_iter().enumerate() {
            let done = child.wait_with_output().unwrap();
            let said = text(done.stderr);
            assert!(!done.status.success(), "rank {rank}: {said}");
            // The others end with it, and leave the word to it.
            let told = errors(&said);
            assert_eq!(told.len(), usize::from(rank == full), "rank {rank}: {said}");
            for words in ["raise the limit of file sizes", "checkpoints/step-000006 is intact"] {
                assert!(told.iter().all(|line| line.contains(words)), "{said}");
            }
        }
        assert_eq!(whole(), before, "nothing of it is a checkpoint");
        assert_eq!(checkpoints(&place, ".writing-").count(), 0, "nothing half-written stays");
    }
    for rank in some(&place, 3, &[&steps("train.steps=12")[..], &["--resume"]].concat()) {
        let done = rank.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", text(done.stderr));
    }
    assert_eq!(place.steps("run").last().unwrap().0, 12);
}

/// Ctrl-C on any one rank while all save beside their steps: that save is whole, and so is that of the step after
/// which all end.
#[cfg(unix)]
#[test]
fn a_signal_to_one_rank_in_a_save_beside_the_steps_ends_all_with_whole_checkpoints() {
    let sets = ["train.async_save=true", "train.save_every=2", "train.keep=99", "train.steps=4000"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    for (told, name) in [(0, "-INT"), (2, "-INT"), (1, "-TERM")] {
        let (place, since) = (place(), SystemTime::now());
        let mut ranks = some(&place, 3, &sets);
        while !saving(&place, since) {
            assert!(ranks[0].try_wait().unwrap().is_none(), "it ended before it saved");
        }
        let begun = checkpoints(&place, ".writing-").map(|e| e.file_name()).next();
        signal(name, &ranks[told]);
        let mut last = None;
        for (rank, child) in ranks.drain(..).enumerate() {
            let done = child.wait_with_output().unwrap();
            let said = text(done.stderr);
            assert_eq!(done.status.code(), Some(130), "rank {rank}: {said}");
            if let Some(told) = said.split("interrupted after step ").nth(1) {
                last = told.split(';').next().unwrap().parse::<u64>().ok();
            }
        }
        assert_eq!(checkpoints(&place, ".writing-").count(), 0);
        let last = last.expect("a rank says after which step they ended");
        let whole: Vec<_> = checkpoints(&place, "step-").map(|e| e.path()).collect();
        assert!(
            whole.contains(&place.path(&format!("run/checkpoints/step-{last:06}"))),
            "{whole:?}"
        );
        let begun = begun.map(|name| name.to_string_lossy().replace(".writing-", "step-"));
        if let Some(step) = begun {
            assert!(whole.iter().any(|path| path.ends_with(&step)), "{step} of {whole:?}");
        }
        for path in whole {
            let shown = place.run(&["checkpoint", "show", "--verify", path.to_str().unwrap()]);
            assert!(shown.status.success(), "{}", text(shown.stderr));
        }
    }
}

#[test]
fn a_loss_that_is_no_number_is_told_once_and_ends_all() {
    let place = place();
    let diverges = ["--set", "optimizer.lr=1e30", "--set", "optimizer.clip_norm=0"];
    let launch = ["launch", "--ranks", "3", "--", "train", "recipe.toml"];
    let done = place.run(&[&launch[..], &diverges].concat());
    let said = text(done.stderr);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert_eq!(errors(&said).len(), 1, "{said}");
    assert!(
        errors(&said)[0].contains("the loss is NaN") || said.contains("the gradient norm"),
        "{said}"
    );
}

/// A signal to the launcher, to any one of its ranks, or to all of them, as Ctrl-C is in a terminal.
#[cfg(unix)]
#[test]
fn a_signal_saves_after_the_same_step_on_all_ranks() {
    ends_saved("-TERM", |launcher| launcher.id().to_string());
    for signal in ["-INT", "-TERM", "-USR1"] {
        ends_saved(signal, |launcher| format!("-{}", launcher.id()));
    }
    ends_saved("-USR1", |launcher| {
        // The second of its ranks.
        let of = launcher.id().to_string();
        let children = Command::new("pgrep").args(["-P", &of]).output().unwrap().stdout;
        text(children).lines().nth(1).unwrap().to_owned()
    });
}

#[cfg(unix)]
fn ends_saved(signal: &str, to: impl FnOnce(&Child) -> String) {
    let place = place();
    let steps = ["--set", "train.steps=4000"];
    let launch = ["launch", "--ranks", "2", "--", "train", "recipe.toml"];
    let mut command = place.command(&[&launch[..], &steps].concat());
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let log = place.path("run/metrics.jsonl");
    while std::fs::read_to_string(&log).map_or(0, |t| t.lines().count()) < 3 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before its first steps");
        std::thread::sleep(Duration::from_millis(5));
    }
    let pid = to(&child);
    assert!(Command::new("kill").args([signal, "--", &pid]).status().unwrap().success());
    let done = child.wait_with_output().unwrap();
    let said = text(done.stderr);
    assert_eq!(done.status.code(), Some(130), "{said}");
    let step = said.split("interrupted after step ").nth(1).expect(&said);
    let step: u64 = step.split(';').next().unwrap().parse().unwrap();
    assert_eq!(place.steps("run").last().unwrap().0, step);
    assert!(place.path(&format!("run/checkpoints/step-{step:06}")).is_dir(), "{said}");
    // A line that can be given as it stands.
    let how = format!(
        "continue with: {} launch --ranks 2 -- train recipe.toml --resume --set 'train.steps=4000'",
        env!("CARGO_BIN_EXE_foveate")
    );
    assert!(said.contains(&how), "{said}");
}

#[cfg(unix)]
#[test]
fn ranks_that_are_threads_and_are_stopped_say_the_command_that_goes_on_with_them() {
    let place = place();
    let mut child = threads(&place, &["--set", "train.steps=4000"]);
    let log = place.path("run/metrics.jsonl");
    while std::fs::read_to_string(&log).map_or(0, |t| t.lines().count()) < 3 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before its first steps");
        std::thread::sleep(Duration::from_millis(5));
    }
    signal("-TERM", &child);
    let said = text(child.wait_with_output().unwrap().stderr);
    let how = format!(
        "continue with: {} train recipe.toml --resume --ranks 3 --set 'train.steps=150' --set",
        env!("CARGO_BIN_EXE_foveate")
    );
    assert!(said.contains(&how), "{said}");
}

#[cfg(unix)]
#[test]
fn sigterm_ends_a_rank_that_waits_for_others() {
    let place = place();
    let mut ranks = some(&place, 2, &[]);
    let (mut one, mut zero) = (ranks.remove(1), ranks.remove(0));
    one.kill().unwrap();
    one.wait().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let pid = zero.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let began = Instant::now();
    assert!(!zero.wait().unwrap().success());
    assert!(began.elapsed() < Duration::from_secs(20), "it waits on");
}

/// As torchrun's agent starts ranks, and starts them again when one is killed.
#[cfg(unix)]
#[test]
fn torchrun_starts_ranks_and_starts_them_again() {
    if Command::new("torchrun").arg("--help").output().is_err() {
        println!("skipped: there is no torchrun");
        return;
    }
    let place = place();
    let mut torchrun = Command::new("torchrun");
    torchrun.args(["--no-python", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]);
    torchrun.args([env!("CARGO_BIN_EXE_foveate"), "train", "recipe.toml", "--resume"]);
    torchrun.args(["--set", "train.steps=400"]).env("OMP_NUM_THREADS", "1").stdin(Stdio::null());
    torchrun.current_dir(place.path("")).stdout(Stdio::null()).stderr(Stdio::piped());
    let agent = torchrun.spawn().unwrap();
    while !saved(&place) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let ranks =
        Command::new("pgrep").args(["-P", &agent.id().to_string()]).output().unwrap().stdout;
    let rank = text(ranks).lines().last().unwrap().to_owned();
    assert!(Command::new("kill").args(["-KILL", &rank]).status().unwrap().success());
    let done = agent.wait_with_output().unwrap();
    let said = text(done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(
        said.contains("by RANK and WORLD_SIZE")
            && said.contains("nothing to resume: there is no run in its folder; one begins")
            && said.contains("resumed after step "),
        "{said}"
    );
    assert_eq!(place.steps("run").last().unwrap().0, 400);
}

/// Two processes with what each launcher sets, in a place of N for the rank and P for a port that is free.
#[test]
fn ranks_meet_and_train_by_the_variables_of_every_launcher() {
    let place = place();
    let mut reached = Vec::new();
    for (run, variables) in [
        ("torchrun", "RANK=N WORLD_SIZE=2 LOCAL_RANK=N MASTER_ADDR=127.0.0.1 MASTER_PORT=P"),
        (
            "slurm",
            "SLURM_PROCID=N SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=N SLURM_JOB_ID=7 \
             SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost FOVEATE_PORT=P",
        ),
        (
            "open-mpi",
            "OMPI_COMM_WORLD_RANK=N OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=N \
             OMPI_COMM_WORLD_LOCAL_SIZE=2 FOVEATE_PORT=P",
        ),
        ("pmi", "PMI_RANK=N PMI_SIZE=2 MPI_LOCALRANKID=N MPI_LOCALNRANKS=2 FOVEATE_PORT=P"),
        (
            "kubernetes",
            "JOB_COMPLETION_INDEX=N FOVEATE_RANKS=2 MASTER_ADDR=localhost FOVEATE_PORT=P",
        ),
    ] {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let dir = format!("run.dir={run}");
        let args = ["train", "recipe.toml", "--set", "train.steps=3", "--set", &dir];
        let start = |rank: usize| {
            let sets = variables.split_whitespace().map(|set| set.split_once('=').unwrap());
            let value = |value: &str| match value {
                "N" => rank.to_string(),
                "P" => port.to_string(),
                value => value.to_owned(),
            };
            let mut command = place.command(&args);
            command.envs(sets.map(|(name, of)| (name, value(of))));
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ranks: Vec<Child> = (0..2).map(start).collect();
        for rank in ranks {
            let done = rank.wait_with_output().unwrap();
            assert!(done.status.success(), "{run}: {}", text(done.stderr));
        }
        reached.push((place.steps(run), place.weights(run, 3)));
    }
    assert!(reached.iter().all(|one| *one == reached[0]));
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
    for (sets, says) in [
        ("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0", "1 of 2, by Slurm (SLURM_PROCID)\n"),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALNRANKS=2", "1 of 2, by PMI (PMI_RANK)\n"),
        (
            "JOB_COMPLETION_INDEX=1 FOVEATE_RANKS=2 MASTER_ADDR=train-0.train",
            "1 of 2, by an indexed Job of Kubernetes (JOB_COMPLETION_INDEX)\n",
        ),
    ] {
        let mut command = place.command(&["doctor", "--mesh"]);
        let sets = sets.split(' ').map(|set| set.split_once('=').unwrap());
        let said = text(command.envs(sets).output().unwrap().stdout);
        assert!(said.starts_with(&format!("ranks     {says}")), "{said}");
    }
}
