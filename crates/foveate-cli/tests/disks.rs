//! Ranks whose hosts have no folder in common: processes that each see another folder of the run.

mod place;
#[path = "place/preload.rs"]
mod preload;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

use foveate::tensor::random::Random;
use place::Place;
use preload::preloaded;

/// A run of three ranks, and the folders that stand for the disks of hosts.
struct Hosts(Place);

impl Hosts {
    fn new() -> Self {
        let place = Place::new();
        place.recipe(|recipe| {
            let recipe = recipe.replace("batch_rows = 2", "batch_rows = 3");
            recipe.replace("[schedule]", "[schedule]\nkind = \"constant\"")
        });
        for host in ["a", "b", "c"] {
            std::fs::create_dir(place.path(host)).unwrap();
        }
        Self(place)
    }

    /// Trains with a rank in each of the folders `on`, with the folder `run` of each as that of the run.
    fn train(&self, on: [&str; 3], args: &[&str]) -> [Output; 3] {
        self.start(on, args).map(|child| child.wait_with_output().unwrap())
    }

    fn start(&self, on: [&str; 3], args: &[&str]) -> [Child; 3] {
        self.start_each(on, [args; 3])
    }

    /// Ranks that are each given arguments of their own.
    fn start_each(&self, on: [&str; 3], args: [&[&str]; 3]) -> [Child; 3] {
        self.start_as(on, args, |_, _| ())
    }

    /// Ranks whose commands are changed, by number.
    fn start_as(
        &self,
        on: [&str; 3],
        args: [&[&str]; 3],
        change: impl Fn(usize, &mut Command),
    ) -> [Child; 3] {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (meet, recipe) = (format!("127.0.0.1:{port}"), self.0.path("recipe.toml"));
        let start = |i: usize| {
            let (rank, host) = (i.to_string(), self.0.path(on[i]));
            let mut command = self.0.command(&["train", recipe.to_str().unwrap(), "--ranks", "3"]);
            command.args(["--rank", &rank, "--meet", &meet, "--set", "run.dir=run"]);
            command.args(["--set", "run.disks=local"]).args(args[i]).current_dir(host);
            command.env("FOVEATE_SILENCE", "4").env("FOVEATE_ARRIVAL", "8");
            change(i, &mut command);
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        [0, 1, 2].map(start)
    }

    fn trained(&self, on: [&str; 3], args: &[&str]) {
        for done in self.train(on, args) {
            assert!(done.status.success(), "{}", said(&done));
        }
    }

    /// The one error of three ranks.
    fn refused(&self, on: [&str; 3], args: &[&str]) -> String {
        self.refused_each(on, [args; 3])
    }

    fn refused_each(&self, on: [&str; 3], args: [&[&str]; 3]) -> String {
        let all = self.start_each(on, args).map(|child| child.wait_with_output().unwrap());
        assert!(all.iter().all(|done| !done.status.success()));
        let all: Vec<String> = all.iter().map(said).collect();
        let errors = || all.iter().flat_map(|said| said.lines()).filter(|l| l.contains("error: "));
        assert!(errors().count() == 1, "{all:?}");
        errors().next().unwrap().to_owned()
    }

    fn step(&self, host: &str, step: u64) -> PathBuf {
        self.0.path(host).join(format!("run/checkpoints/step-{step:06}"))
    }

    /// The names of the checkpoints of which a host has its part.
    fn saved(&self, host: &str) -> Vec<String> {
        let names = names(&self.0.path(host).join("run/checkpoints"));
        names.into_iter().filter(|name| name.starts_with("step-")).collect()
    }
}

fn said(done: &Output) -> String {
    let said = String::from_utf8(done.stderr.clone()).unwrap();
    assert!(!said.contains("panicked"), "{said}");
    said
}

fn said_of(all: &[Output; 3]) -> String {
    all.iter().map(said).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn parts(folder: &Path) -> Vec<String> {
    names(folder).into_iter().filter(|name| name.starts_with("part-")).collect()
}

#[test]
fn every_host_has_its_ranks_parts_and_what_says_where_the_others_are() {
    let hosts = Hosts::new();
    let place = &hosts.0;
    let shared = ["train", "recipe.toml", "--ranks", "3", "--set", "run.dir=shared"];
    let eight = ["--set", "train.steps=8"];
    let done = place.run(&[&shared[..], &eight].concat());
    assert!(done.status.success(), "{}", said(&done));
    hosts.trained(["a", "a", "b"], &eight);
    let [a, b] = ["a", "b"].map(|host| hosts.step(host, 8));
    let part = |rank: usize| format!("part-{rank:05}-00000.safetensors");
    assert_eq!((parts(&a), parts(&b)), (vec![part(0), part(1)], vec![part(2)]));
    for file in ["layout.json", "checksums.json", "config.json", "state.json"] {
        let [a, b] = [&a, &b].map(|place| std::fs::read(place.join(file)).unwrap());
        assert!(a == b, "{file}");
    }
    // Nothing else stays beside the folders of the run, and both have its log.
    assert_eq!(names(&place.path("a")), ["run"]);
    assert_eq!(place.steps("a/run"), place.steps("shared"));
    assert_eq!(place.steps("b/run"), place.steps("shared"));
    // A part says what it lacks.
    let [a, b, all] = [a, b, place.path("all")];
    let shown = place.run(&["checkpoint", "show", b.to_str().unwrap(), "--verify"]);
    let out = String::from_utf8(shown.stdout.clone()).unwrap();
    assert!(shown.status.success(), "{}", said(&shown));
    let rsync = format!("bring it here by `rsync -a {}:", host());
    for rank in [0, 1] {
        let line = out.lines().find(|line| line.starts_with(&part(rank))).expect(&out);
        assert!(line.contains("is missing, where elements "), "{line}");
        assert!(line.contains(&format!("by ranks 0, 1 of host {}; {rsync}", host())), "{line}");
    }
    assert!(out.ends_with("all that is here is what was saved\n"), "{out}");
    let json = place.run(&["checkpoint", "show", b.to_str().unwrap(), "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["elsewhere"][1]["file"], part(1));
    for args in [
        &["checkpoint", "export", b.to_str().unwrap(), "hf"][..],
        &["eval", b.to_str().unwrap(), "00.txt"],
    ] {
        let refused = place.run(args);
        let error = said(&refused);
        assert!(!refused.status.success() && error.contains(&rsync), "{error}");
        assert!(error.contains(&part(0)) && !place.path("hf").exists(), "{error}");
    }
    // Brought together they are a checkpoint like any other.
    std::fs::create_dir(&all).unwrap();
    for (from, name) in
        [&a, &b].into_iter().flat_map(|from| names(from).into_iter().map(move |n| (from, n)))
    {
        std::fs::copy(from.join(&name), all.join(&name)).unwrap();
    }
    let export = |from: &Path, to: &str| {
        let done = place.run(&["checkpoint", "export", from.to_str().unwrap(), to]);
        assert!(done.status.success(), "{}", said(&done));
        std::fs::read(place.path(to).join("model.safetensors")).unwrap()
    };
    let shared = export(&place.path("shared/checkpoints/step-000008"), "hf-shared");
    assert!(export(&all, "hf-all") == shared);
}

#[test]
fn a_run_on_local_disks_resumes_from_the_newest_checkpoint_that_is_whole() {
    let hosts = Hosts::new();
    let steps = |steps: u64| format!("train.steps={steps}");
    // Copies of parameters: each host has elements that ranks of the other read.
    let train = |on, n: u64, how: &[&str]| {
        let (steps, mesh) = (steps(n), ["--set", "mesh.replicate=3", "--set"]);
        hosts.trained(on, &[how, &mesh, &[&steps]].concat());
    };
    let save = ["--set", "train.keep=3"];
    let over = [&save[..], &["--start-over"]].concat();
    let resume = [&save[..], &["--resume"]].concat();
    train(["a", "a", "b"], 24, &over);
    let (right, weights) = (hosts.0.steps("a/run"), hosts.0.weights("b/run", 24));
    train(["a", "a", "b"], 12, &over);
    // As if one host had died before it renamed its part of the last.
    std::fs::remove_dir_all(hosts.step("b", 12)).unwrap();
    let mesh = ["--set", "mesh.replicate=3", "--set", "train.steps=16"];
    let [first, ..] = hosts.train(["a", "a", "b"], &[&resume[..], &mesh].concat());
    assert!(first.status.success(), "{}", said(&first));
    let passed = format!("{PASSED}12: no disk has its ");
    assert!(said(&first).contains(&passed), "{}", said(&first));
    assert_eq!(hosts.0.steps("a/run").len(), 16);
    // Ranks that begin again on other hosts, one of them new, where a run ended while its part was on the way.
    std::fs::create_dir_all(hosts.step("c", 16)).unwrap();
    std::fs::copy(hosts.step("a", 16).join("config.json"), hosts.step("c", 16).join("config.json"))
        .unwrap();
    train(["b", "c", "a"], 24, &resume);
    assert_eq!(hosts.0.steps("b/run"), right);
    assert!(hosts.0.weights("a/run", 24) == weights, "rank 2 wrote the same elements");
    assert_eq!(names(&hosts.step("c", 20).join("..")), names(&hosts.step("a", 20).join("..")));
}

/// What a resume says that finds parts of a newer checkpoint.
const PASSED: &str = "a newer checkpoint is passed over, and set aside at the next save: step ";

/// Whichever host dies, the other has renamed its part of a checkpoint that is not whole; that before it is, though
/// one alone is kept.
#[test]
fn a_host_that_dies_between_the_renames_of_a_checkpoint_leaves_the_one_before_whole() {
    let (hosts, on) = (Hosts::new(), ["a", "a", "b"]);
    let Some((name, library)) = preloaded(&hosts.0.path(""), "dies_at_rename") else { return };
    let args = ["--set", "train.keep=1", "--start-over"];
    hosts.trained(on, &args);
    let right = (hosts.0.steps("a/run"), hosts.0.weights("b/run", 24));
    for dies in [0, 2] {
        let ranks = hosts.start_as(on, [&args; 3], |rank, command| {
            if rank == dies {
                command.env(name, &library).env("DIES_AT", "step-000012");
            }
        });
        let ended = ranks.map(|child| child.wait_with_output().unwrap().status.code());
        let lost = [0, 1, 2].map(|rank| (rank != dies).then_some(75));
        assert_eq!(ended, lost);
        let (lives, dead) = if dies == 0 { ("b", "a") } else { ("a", "b") };
        assert_eq!(hosts.saved(dead), ["step-000008"]);
        assert_eq!(hosts.saved(lives), ["step-000008", "step-000012"]);
        let resumed = hosts.train(on, &["--set", "train.keep=1", "--resume"]);
        assert!(resumed.iter().all(|done| done.status.success()), "{}", said(&resumed[0]));
        let passed = format!("{PASSED}12: no disk has its part-{dies:05}-00000.safetensors");
        assert!(said(&resumed[0]).contains(&passed), "{}", said(&resumed[0]));
        assert_eq!(hosts.0.steps("a/run"), right.0);
        assert!(hosts.0.weights("b/run", 24) == right.1);
        assert_eq!([hosts.saved("a"), hosts.saved("b")], [["step-000024"], ["step-000024"]]);
    }
}

/// The first checkpoint that one host alone has renamed is none, and no way but the one command is needed.
#[test]
fn a_first_checkpoint_that_one_host_alone_has_is_set_aside_and_the_run_begins_again() {
    let (hosts, on) = (Hosts::new(), ["a", "a", "b"]);
    let Some((name, library)) = preloaded(&hosts.0.path(""), "dies_at_rename") else { return };
    hosts.trained(on, &[]);
    let right = (hosts.0.steps("a/run"), hosts.0.weights("b/run", 24));
    for dies in [0, 2] {
        for host in ["a", "b"] {
            std::fs::remove_dir_all(hosts.0.path(host).join("run")).unwrap();
        }
        let (lives, dead) = if dies == 0 { ("b", "a") } else { ("a", "b") };
        // The second time where the first part has been set aside.
        for _ in 0..2 {
            let ranks = hosts.start_as(on, [&["--resume"]; 3], |rank, command| {
                if rank == dies {
                    command.env(name, &library).env("DIES_AT", "step-000004");
                }
            });
            let ended = ranks.map(|child| child.wait_with_output().unwrap().status.code());
            assert_eq!(ended, [0, 1, 2].map(|rank| (rank != dies).then_some(75)));
            assert_eq!((hosts.saved(lives).len(), hosts.saved(dead).len()), (1, 0));
        }
        // A host that lost its folder might have had the checkpoint that is missing.
        let (run, away) = (hosts.0.path(dead).join("run"), hosts.0.path("away"));
        std::fs::rename(&run, &away).unwrap();
        let file = format!("step-000004/part-{dies:05}-00000.safetensors: is missing");
        assert!(hosts.refused(on, &["--resume"]).contains(&file));
        let _ = std::fs::remove_dir_all(&run);
        std::fs::rename(&away, &run).unwrap();
        // Parts of two steps are of no first checkpoint.
        let (first, next) = (hosts.step(lives, 4), hosts.step(lives, 8));
        std::fs::create_dir(&next).unwrap();
        for name in names(&first) {
            std::fs::copy(first.join(&name), next.join(&name)).unwrap();
        }
        assert!(hosts.refused(on, &["--resume"]).contains(&file.replace("000004", "000008")));
        std::fs::remove_dir_all(next).unwrap();
        let said = hosts.refused(on, &["--resume", "--set", "data.len=16"]);
        assert!(said.contains("[data] is not what this run was started with"), "{said}");
        let resumed = hosts.train(on, &["--resume"]);
        assert!(resumed.iter().all(|done| done.status.success()), "{}", said_of(&resumed));
        let told = format!(
            "nothing to resume: the first checkpoint is not whole, step 4: no disk has its \
             part-{dies:05}-00000.safetensors; it is set aside, and the run begins anew"
        );
        assert_eq!(said_of(&resumed).matches(&told).count(), 1, "{}", said_of(&resumed));
        assert_eq!(hosts.0.steps("a/run"), right.0);
        assert!(hosts.0.weights("b/run", 24) == right.1);
        let kept = |host: &str| names(&hosts.0.path(host).join("run/checkpoints"));
        assert_eq!(kept("a"), kept("b"), "nothing stays aside");
    }
}

/// In the folder of the run, and however far above it, where marks lie of ranks that began before it was there.
#[test]
fn marks_of_ranks_that_were_killed_are_removed_an_hour_later() {
    let hosts = Hosts::new();
    let few = ["--set", "train.steps=1", "--set", "run.dir=far/below/run"];
    hosts.trained(["a", "a", "b"], &few);
    let [old, above, far, young] = [
        "a/far/below/run/.foveate-rank-00000-aa",
        "a/far/below/.foveate-rank-00001-bb",
        "a/.foveate-rank-00001-cc",
        "a/.foveate-rank-00002-dd",
    ]
    .map(|name| hosts.0.path(name));
    let hours = SystemTime::now() - Duration::from_secs(2 * 3600);
    for path in [&old, &above, &far, &young] {
        let mark = std::fs::File::create(path).unwrap();
        if path != &young {
            mark.set_modified(hours).unwrap();
        }
    }
    hosts.trained(["a", "a", "b"], &[&few[..], &["--start-over"]].concat());
    let are = [&old, &above, &far, &young].map(|path| path.exists());
    assert_eq!(are, [false, false, false, true]);
}

/// A host whose newer checkpoints are gone for a while, and come back or do not.
#[test]
fn a_part_that_is_passed_over_is_kept_aside_until_the_run_has_come_as_far() {
    let (hosts, on) = (Hosts::new(), ["a", "a", "b"]);
    let train = |steps: &str, how: &str| {
        let done = hosts.train(on, &["--set", "train.keep=3", "--set", steps, how]);
        assert!(done.iter().all(|done| done.status.success()), "{}", said(&done[0]));
        said(&done[0])
    };
    for comes_back in [true, false] {
        train("train.steps=12", "--start-over");
        let (aside, away) = (hosts.step("a", 12).with_file_name("aside-step-000012"), "away");
        std::fs::rename(hosts.step("b", 12), hosts.0.path(away)).unwrap();
        std::fs::remove_dir_all(hosts.step("b", 8)).unwrap();
        assert!(train("train.steps=8", "--resume").contains(&format!("{PASSED}12: ")));
        let kept = ["aside-step-000012", "step-000004", "step-000008"];
        assert_eq!(names(&hosts.step("a", 8).join("..")), kept);
        if comes_back {
            std::fs::rename(&aside, hosts.step("a", 12)).unwrap();
            std::fs::rename(hosts.0.path(away), hosts.step("b", 12)).unwrap();
            assert!(!train("train.steps=16", "--resume").contains("passed over"));
            assert_eq!(hosts.0.steps("a/run").last().unwrap().0, 16);
        } else {
            train("train.steps=12", "--resume");
            assert_eq!(hosts.saved("a"), ["step-000004", "step-000008", "step-000012"]);
            assert!(!aside.exists());
        }
    }
}

/// As often as `FOVEATE_KILLS` says any rank is killed, saves included: once a checkpoint was whole there is always one
/// that is, at most the newest is on one host alone, and what a run reaches is what one reaches that was left alone.
#[test]
fn ranks_on_local_disks_that_are_killed_leave_a_checkpoint_that_is_whole() {
    let kills = std::env::var("FOVEATE_KILLS").map_or(2, |n| n.parse::<usize>().unwrap());
    let seed = std::env::var("FOVEATE_SEED").map_or(5, |n| n.parse::<u64>().unwrap());
    println!("FOVEATE_SEED={seed}");
    let (mut random, hosts, on) = (Random::new(seed), Hosts::new(), ["a", "a", "b"]);
    let long = ["--set", "train.steps=60", "--set", "train.save_every=3"];
    let began = Instant::now();
    hosts.trained(on, &long);
    let took = began.elapsed().as_millis() as usize;
    let right = (hosts.0.steps("a/run"), hosts.0.weights("b/run", 60));
    let (mut done, mut was_whole, mut over) = (0, false, true);
    let (mut unsaved, mut finished) = (0, 0);
    loop {
        let how = if over { "--start-over" } else { "--resume" };
        unsaved += usize::from(!over && !was_whole);
        (over, was_whole) = (false, !over && was_whole);
        let mut ranks = hosts.start(on, &[&long[..], &[how]].concat());
        let harmed = random.below(3);
        std::thread::sleep(Duration::from_millis(random.below(took) as u64));
        let harms = done < kills && ranks[harmed].try_wait().unwrap().is_none();
        if harms {
            ranks[harmed].kill().unwrap();
            done += 1;
        }
        let ended = ranks.map(|child| child.wait_with_output().unwrap());
        let [a, b] = ["a", "b"].map(|host| hosts.saved(host));
        let whole = a.iter().rfind(|name| b.contains(name));
        assert!(whole.is_some() || !was_whole, "no checkpoint is whole: {a:?} and {b:?}");
        was_whole = whole.is_some();
        let newer = |all: &[String]| all.iter().filter(|name| Some(*name) > whole).count();
        assert!(how == "--start-over" || newer(&a) + newer(&b) <= 1, "{a:?} and {b:?}");
        if harms {
            continue;
        }
        assert!(ended.iter().all(|done| done.status.success()), "{}", said(&ended[0]));
        assert_eq!(hosts.0.steps("a/run"), right.0);
        assert!(hosts.0.weights("b/run", 60) == right.1);
        finished += 1;
        if done == kills {
            break;
        }
    }
    println!(
        "{done} killed, {unsaved} attempts resumed before the first checkpoint was there; {finished} runs \
         reached their end"
    );
}

/// A host that is new to the run has nothing of it, and begins with the others.
#[test]
fn ranks_that_died_before_the_first_save_begin_again_on_other_hosts() {
    let (hosts, eight) = (Hosts::new(), ["--set", "train.steps=8"]);
    hosts.trained(["a", "a", "b"], &eight);
    let right = ["a/run", "b/run"].map(|run| (hosts.0.steps(run), hosts.0.weights(run, 8)));
    for host in ["a", "b"] {
        let run = hosts.0.path(host).join("run");
        std::fs::remove_dir_all(run.join("checkpoints")).unwrap();
        let log = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let of_steps = log.lines().filter(|line| !line.contains("\"save\""));
        let log: String = of_steps.map(|line| format!("{line}\n")).collect();
        std::fs::write(run.join("metrics.jsonl"), log).unwrap();
    }
    let on = ["c", "c", "b"];
    let said = hosts.refused(on, &["--resume", "--set", "train.accumulate=2"]);
    assert!(said.contains("train.accumulate is not what this run was started with"), "{said}");
    hosts.trained(on, &[&eight[..], &["--resume"]].concat());
    let reached = ["c/run", "b/run"].map(|run| (hosts.0.steps(run), hosts.0.weights(run, 8)));
    assert!(reached == right);
}

#[test]
fn ranks_that_are_told_otherwise_of_disks_or_of_a_resume_are_refused_with_what_differs() {
    let hosts = Hosts::new();
    let (plain, shared): (&[&str], &[&str]) = (&[], &["--set", "run.disks=shared"]);
    let said = hosts.refused_each(["a", "a", "b"], [plain, plain, shared]);
    assert!(said.contains("run.disks"), "{said}");
    let said = hosts.refused_each(["a", "a", "b"], [plain, &["--resume"], plain]);
    assert!(said.contains("start of the run"), "{said}");
}

#[test]
fn a_part_that_cannot_be_read_is_an_error_and_nothing_older_takes_its_place() {
    let hosts = Hosts::new();
    hosts.trained(["a", "a", "b"], &["--set", "train.keep=3", "--start-over"]);
    let checkpoints = hosts.0.path("b").join("run/checkpoints");
    let newest = names(&checkpoints).pop().unwrap();
    let sums = checkpoints.join(newest).join("checksums.json");
    std::fs::remove_file(&sums).unwrap();
    std::fs::create_dir(&sums).unwrap();
    let said = hosts.refused(["a", "a", "b"], &["--set", "train.steps=24", "--resume"]);
    assert!(said.contains("checksums.json"), "{said}");
}

#[test]
fn a_host_without_its_part_is_named_with_what_was_on_it() {
    let hosts = Hosts::new();
    let on = ["a", "a", "b"];
    hosts.trained(on, &["--set", "train.steps=8"]);
    std::fs::remove_dir_all(hosts.0.path("b/run")).unwrap();
    let error = hosts.refused(on, &["--resume"]);
    let file =
        "run/checkpoints/step-000008/part-00002-00000.safetensors: is missing, where elements ";
    assert!(error.contains(file), "{error}");
    let by = format!("are, by rank 2 of host {}; bring it here by `rsync -a {}:", host(), host());
    assert!(error.contains(&by) && error.contains("/b/run/checkpoints/step-000008/ "), "{error}");
    assert!(parts(&hosts.step("a", 8)).len() == 2, "nothing was removed");
    // Without the key a rank does not see what rank 0 writes.
    for how in ["--start-over", "--resume"] {
        let error = hosts.refused(["a", "a", "c"], &["--set", "run.disks=shared", how]);
        assert!(error.contains("or set run.disks = \"local\""), "{how}: {error}");
    }
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "unknown".to_owned(),
        name => name.to_owned(),
    }
}
