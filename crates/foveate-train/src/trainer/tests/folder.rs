//! What a run leaves alone, and what it is told before it starts.

use super::super::folder::Folder;
use super::ranks::{all_well, on_ranks};
use super::*;

const ALL: [Start; 3] = [Start::New, Start::Resume, Start::Over];

impl Place {
    fn dir(&self) -> PathBuf {
        self.0.path().join("run")
    }

    /// Puts a file into the folder of the run.
    fn put(&self, name: &str, text: &str) {
        let file = self.dir().join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }

    /// What a start that has to be refused says; everything stays as it is.
    fn refused(&self, sets: &[&str], start: Start) -> String {
        let before = files(self.0.path());
        let told = self.run(&self.recipe(sets), start).unwrap_err().to_string();
        assert!(files(self.0.path()) == before, "{start:?} changed something: {told}");
        told
    }
}

#[test]
fn the_recipe_that_is_given_is_never_replaced() {
    let place = Place::new();
    let mine = place.0.path().join("recipe.toml");
    std::fs::write(&mine, "# my words\n").unwrap();
    let here = place.recipe(&[&format!("run.dir={}", place.0.path().display())]);
    let spelled = place.0.path().join(".").join("recipe.toml");
    for file in [&mine, &spelled] {
        for start in ALL {
            let told = train(&here, file, start, &mut Log::default()).unwrap_err().to_string();
            assert!(told.contains("recipe.toml: the run would replace this recipe"), "{told}");
        }
    }
    // Neither is one beside it.
    for start in [Start::New, Start::Over] {
        let told = train(&here, &place.file(), start, &mut Log::default()).unwrap_err().to_string();
        assert!(told.contains("recipe.toml: no run is here that it would be"), "{told}");
    }
    assert_eq!(files(place.0.path())[&mine], b"# my words\n");
    assert!(!place.0.path().join("metrics.jsonl").exists());
}

#[test]
fn what_a_start_without_a_step_left_is_replaced() {
    for start in [Start::New, Start::Over] {
        let place = Place::new();
        place.put("metrics.jsonl", "");
        place.put("recipe.toml", "# left behind\n");
        assert_eq!(place.run(&place.recipe(&[]), start).unwrap().1.losses.len(), 6);
        assert!(Recipe::load(&place.dir().join("recipe.toml"), &[]).is_ok());
    }
}

#[test]
fn documents_that_are_files_of_the_run_are_not_removed() {
    let place = Place::new();
    place.run(&place.recipe(&[]), Start::New).unwrap();
    for (files, first) in [
        ("run/checkpoints/**/*.json", "step-000004"),
        ("run/metrics.jsonl", "metrics.jsonl"),
        ("**/*.toml", "recipe.toml"),
        ("*/*.svg", "loss.svg"),
    ] {
        let sets = [&format!("data.files=[\"*.txt\", {files:?}]"), "data.format=text"];
        let told = place.refused(&sets, Start::Over);
        assert!(told.contains("starting over would remove ") && told.contains(first), "{told}");
        assert!(told.contains("data.exclude"), "{told}");
        let told = place.refused(&sets, Start::New);
        assert!(told.contains("a run is already here"), "{told}");
    }
    let left = Place::new();
    left.put("metrics.jsonl", "");
    left.put("recipe.toml", "# left behind\n");
    let told = left.refused(&["data.files=[\"**/*.toml\"]"], Start::New);
    assert!(told.contains("the run would remove or write over "), "{told}");
}

#[cfg(unix)]
#[test]
fn a_run_has_a_folder_apart_from_what_it_reads() {
    let place = Place::new();
    let (first, _) = place.run(&place.recipe(&[]), Start::New).unwrap();
    let root = place.0.path();
    std::fs::create_dir(root.join("data")).unwrap();
    std::fs::rename(root.join("3.txt"), root.join("data/3.txt")).unwrap();
    std::os::unix::fs::symlink(root.join("data"), root.join("link")).unwrap();
    let model = root.join("model");
    std::fs::rename(&first.checkpoint, &model).unwrap();
    let in_data = "data.files=[\"data/*.txt\"]";
    for (dir, files, from, says) in [
        (root.join("data"), in_data, false, "data/3.txt, which the recipe reads"),
        (root.join("link"), in_data, false, "data/3.txt, which the recipe reads"),
        (root.join("data/../data/."), in_data, false, "data/3.txt, which the recipe reads"),
        (model.clone(), "data.files=[\"0.txt\"]", true, "is in "),
        (
            model.join("runs/new"),
            "data.files=[\"0.txt\"]",
            true,
            "model, which the run starts from",
        ),
    ] {
        let mut recipe = place.recipe(&[files, &format!("run.dir={}", dir.display())]);
        if from {
            recipe.model = Default::default();
            recipe.model.checkpoint = Some(model.clone());
        }
        for start in [Start::New, Start::Over] {
            let before = super::files(root);
            let told = place.run(&recipe, start).unwrap_err().to_string();
            assert!(
                told.contains(says) && told.contains("choose a run.dir of the run's own"),
                "{told}"
            );
            assert!(super::files(root) == before, "{told}");
        }
    }
    // Beside what it reads, below a folder of documents, it may be.
    let mut recipe = place.recipe(&[in_data, "data.held_out=0"]);
    recipe.run.dir = root.join("data-runs/a");
    assert!(place.run(&recipe, Start::New).is_ok());
}

#[test]
fn a_run_whose_patterns_match_its_own_files_resumes_without_them() {
    let place = Place::new();
    std::fs::write(place.0.path().join("words.toml"), "words = 3\n").unwrap();
    let matching = "data.files=[\"*.txt\", \"**/*.toml\"]";
    place.run(&place.recipe(&[matching]), Start::New).unwrap();
    let told = place.refused(&[matching, "train.steps=7"], Start::Resume);
    assert!(told.contains("recipe.toml, which the recipe reads"), "{told}");
    assert!(told.contains("data.exclude"), "{told}");
    let without = [matching, "data.exclude=[\"run/**/*\"]", "train.steps=7"];
    assert_eq!(place.run(&place.recipe(&without), Start::Resume).unwrap().0.steps, 7);
    // The documents have to be those of the start still.
    let fewer = place.refused(&[matching, "data.exclude=[\"**/*.toml\"]"], Start::Resume);
    assert!(fewer.contains("the documents are not those"), "{fewer}");
}

#[test]
fn a_log_that_is_no_runs_is_left_alone() {
    let place = Place::new();
    place.put("metrics.jsonl", "{\"loss\": 3.5}\n{\"loss\": 3.25}\n");
    for start in [Start::New, Start::Over] {
        let told = place.refused(&[], start);
        assert!(told.contains("metrics.jsonl: line 1 is no record of a run"), "{told}");
    }
}

#[cfg(unix)]
#[test]
fn a_log_that_cannot_be_read_is_not_said_to_be_unwritten() {
    let place = Place::new();
    std::fs::create_dir(place.dir()).unwrap();
    let log = place.dir().join("metrics.jsonl");
    std::os::unix::fs::symlink(&log, &log).unwrap();
    for start in ALL {
        let told = place.run(&place.recipe(&[]), start).unwrap_err().to_string();
        assert!(told.contains("metrics.jsonl: could not be read: "), "{told}");
    }
}

#[cfg(unix)]
#[test]
fn a_checkpoint_that_cannot_be_looked_into_is_not_taken_for_none() {
    let place = Place::new();
    place.run(&place.recipe(&[]), Start::New).unwrap();
    let newest = checkpoint::latest(&place.dir().join("checkpoints")).unwrap();
    std::fs::remove_dir_all(&newest).unwrap();
    std::os::unix::fs::symlink(&newest, &newest).unwrap();
    let log = || std::fs::read(place.dir().join("metrics.jsonl")).unwrap();
    let before = log();
    for start in ALL {
        let told = place.run(&place.recipe(&[]), start).unwrap_err().to_string();
        assert!(told.contains("step-000006: could not be read: "), "{told}");
    }
    assert_eq!(log(), before);
}

#[test]
fn files_and_folders_in_each_others_place_are_found_before_the_first_step() {
    for (name, is_file) in [
        ("checkpoints", true),
        ("recipe.toml", false),
        ("metrics.jsonl", false),
        ("loss.svg", false),
    ] {
        let place = Place::new();
        match is_file {
            true => place.put(name, "mine"),
            false => std::fs::create_dir_all(place.dir().join(name)).unwrap(),
        }
        for start in ALL {
            let told = place.refused(&[], start);
            let is = if is_file { "is no folder" } else { "is a folder" };
            assert!(told.contains(&format!("{name}: {is}; move it away")), "{told}");
        }
        assert_eq!(std::fs::read_dir(place.dir()).unwrap().count(), 1);
    }
}

#[test]
fn what_resuming_lacks_is_named_with_the_remedy() {
    let place = Place::new();
    let (summary, _) = place.run(&place.recipe(&[]), Start::New).unwrap();
    for (file, remedy) in [
        (place.dir().join("recipe.toml"), "put back the recipe that"),
        (summary.checkpoint.join("state.json"), "resume from an earlier one"),
        (summary.checkpoint.join("masters.safetensors"), "resume from an earlier one"),
        (summary.checkpoint.join("model.safetensors"), "resume from an earlier one"),
    ] {
        let kept = std::fs::read(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let told = place.refused(&[], Start::Resume);
        assert!(told.starts_with(&format!("{}: is missing; ", file.display())), "{told}");
        assert!(told.contains(remedy), "{told}");
        std::fs::write(&file, kept).unwrap();
    }
    for (file, says) in [
        (
            place.dir().join("recipe.toml"),
            "it is the recipe that the run here was started with: put it",
        ),
        (
            summary.checkpoint.join("model.safetensors"),
            "step-000004, which is intact: rename step-000006",
        ),
    ] {
        let kept = std::fs::read(&file).unwrap();
        std::fs::write(&file, &kept[..kept.len() - 9]).unwrap();
        let told = place.refused(&[], Start::Resume);
        assert!(told.starts_with(&file.display().to_string()) && told.contains(says), "{told}");
        std::fs::write(&file, kept).unwrap();
    }
    assert_eq!(place.run(&place.recipe(&[]), Start::Resume).unwrap().0.steps, 6);
}

/// One command starts a run again whenever it died: launchers know no other.
#[test]
fn a_run_that_died_before_its_first_checkpoint_begins_again_by_resume() {
    let place = Place::new();
    let (_, right) = place.run(&place.recipe(&[]), Start::New).unwrap();
    std::fs::remove_dir_all(place.dir().join("checkpoints")).unwrap();
    let told = place.refused(&[], Start::Resume);
    assert!(told.contains("checkpoints: has no checkpoint, and") && told.contains("bring it back"));
    // As a process leaves it that is killed behind a step.
    let dies = || {
        let _ = std::fs::remove_dir_all(place.dir().join("checkpoints"));
        let log = place.dir().join("metrics.jsonl");
        let lines = std::fs::read_to_string(&log).unwrap();
        let of_steps = lines.lines().filter(|line| !line.contains("\"save\""));
        std::fs::write(log, of_steps.map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    };
    dies();
    let told = place.refused(&[], Start::New);
    let says = "already here, at step 6 and without a checkpoint; begin it again with --resume";
    assert!(told.contains(says), "{told}");
    let told = place.refused(&["train.batch_rows=1"], Start::Resume);
    assert!(told.contains("train.batch_rows is not what this run was started with"), "{told}");
    // The second time as one leaves it that is killed while it starts over.
    for recipe in ["stays", "goes"] {
        if recipe == "goes" {
            std::fs::remove_file(place.dir().join("recipe.toml")).unwrap();
        }
        let (_, again) = place.run(&place.recipe(&[]), Start::Resume).unwrap();
        let anew = Some(Anew::Unsaved { step: 6 });
        assert_eq!((again.anew, &again.losses), (anew, &right.losses));
        dies();
    }
    // What is no run's is not replaced.
    std::fs::remove_file(place.dir().join("metrics.jsonl")).unwrap();
    let told = place.refused(&[], Start::Resume);
    assert!(told.contains("recipe.toml: no run is here that it would be"), "{told}");
    place.put("metrics.jsonl", "my words\n");
    let told = place.refused(&[], Start::Resume);
    assert!(told.contains("line 1 is no record of a run"), "{told}");
}

#[test]
fn a_resume_where_no_run_is_begins_one() {
    let right = Place::new();
    let (_, right) = right.run(&right.recipe(&[]), Start::New).unwrap();
    for left in ["nothing", "an empty folder", "what a start without a step left"] {
        let place = Place::new();
        let anew = match left {
            "nothing" => Anew::NoRun,
            "an empty folder" => {
                std::fs::create_dir(place.dir()).unwrap();
                Anew::NoRun
            }
            _ => {
                place.put("metrics.jsonl", "");
                Anew::Unsaved { step: 0 }
            }
        };
        let (_, log) = place.run(&place.recipe(&[]), Start::Resume).unwrap();
        assert_eq!((log.anew, log.losses), (Some(anew), right.losses.clone()), "{left}");
        // The same command goes on with it, and with no other recipe's.
        let told = place.refused(&["data.len=16"], Start::Resume);
        assert!(told.contains("[data] is not what this run was started with"), "{told}");
        let (_, log) = place.run(&place.recipe(&["train.steps=7"]), Start::Resume).unwrap();
        assert_eq!((log.anew, log.losses.len()), (None, 1), "{left}");
    }
    // It stands apart from what it reads, as any that is new.
    let place = Place::new();
    let here = place.recipe(&[&format!("run.dir={}", place.0.path().display())]);
    let told = place.run(&here, Start::Resume).unwrap_err().to_string();
    assert!(told.contains("which the recipe reads; choose a run.dir of the run's own"), "{told}");
}

#[test]
fn a_resume_from_what_is_damaged_names_the_newest_that_is_intact() {
    let place = Place::new();
    let recipe = place.recipe(&["train.keep=3"]);
    let (summary, _) = place.run(&recipe, Start::New).unwrap();
    let newest = summary.checkpoint;
    let [second, first] = [4, 2].map(|step| newest.with_file_name(format!("step-00000{step}")));
    let damage = |checkpoint: &std::path::Path| {
        let file = checkpoint.join("masters.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 64;
        std::fs::write(&file, bytes).unwrap();
    };
    damage(&newest);
    let told = place.refused(&["train.keep=3"], Start::Resume);
    assert!(told.contains("step-000006") && told.contains("masters.safetensors"), "{told}");
    let remedy = format!(
        "go on from {}, which is intact: rename step-000006 to damaged-step-000006",
        second.display()
    );
    assert!(told.contains(&remedy), "{told}");
    damage(&second);
    let told = place.refused(&["train.keep=3"], Start::Resume);
    assert!(told.contains(&format!("go on from {}, which is intact", first.display())), "{told}");
    // As it says, with the bits of the run that was not disturbed.
    for step in [&newest, &second] {
        let name = step.file_name().unwrap().to_str().unwrap();
        std::fs::rename(step, step.with_file_name(format!("damaged-{name}"))).unwrap();
    }
    let (resumed, log) = place.run(&recipe, Start::Resume).unwrap();
    assert_eq!((resumed.steps, log.losses.len()), (6, 4));
    let whole = |name: &str| std::fs::read(newest.with_file_name(name).join("state.json")).unwrap();
    assert!(whole("step-000006") == whole("damaged-step-000006"));
    damage(&resumed.checkpoint);
    for step in [&second, &first] {
        let _ = std::fs::remove_dir_all(step);
    }
    let told = place.refused(&["train.keep=3"], Start::Resume);
    assert!(told.contains("no other checkpoint of this run is intact"), "{told}");
}

#[test]
fn a_run_that_ended_meanwhile_is_not_said_to_be_at_work() {
    let place = Place::new();
    let dir = place.dir();
    let folder = Folder::new(&dir);
    assert_eq!(folder.admit(Start::New, None, false).unwrap(), None);
    let (summary, _) = place.run(&place.recipe(&[]), Start::New).unwrap();
    let older = summary.checkpoint.with_file_name("step-000004");
    let told = |start, last| {
        folder.claim(start, last, None, false).err().map(|e| e.to_string()).unwrap_or_default()
    };
    let new = told(Start::New, None);
    assert!(new.contains("a run is already here; continue it with --resume"), "{new}");
    let resumed = told(Start::Resume, Some(older.as_path()));
    assert!(resumed.contains("has saved or removed a checkpoint meanwhile"), "{resumed}");
    let anew = folder.claim(Start::Resume, None, None, true).err().unwrap().to_string();
    assert!(anew.contains("has saved or removed a checkpoint meanwhile"), "{anew}");
    assert!(folder.claim(Start::Resume, Some(&summary.checkpoint), None, false).is_ok());
}

/// They say why the earlier attempt failed, or are another run's.
#[test]
fn transfer_logs_stay_where_a_start_is_refused() {
    let place = Place::new();
    place.run(&place.recipe(&[]), Start::New).unwrap();
    let log = r#"{"rank":1,"ranks":2,"meeting":7,"seconds":1.5,"why":"rank 0 is gone"}"#;
    place.put("transfers/rank-00001.jsonl", log);
    let refused = |start: Start, sets: &[&str], says: &str| {
        let (before, recipe) = (files(place.0.path()), place.recipe(sets));
        let done = on_ranks(2, &place, |_| recipe.clone(), || start.into(), |_| Log::default());
        for told in done.into_iter().map(|done| done.map(drop).unwrap_err().to_string()) {
            assert!(told.contains(says), "{told}");
        }
        assert!(files(place.0.path()) == before, "{says}: something changed");
    };
    refused(Start::New, &[], "a run is already here");
    refused(Start::Resume, &["data.len=16"], "[data] is not what this run was started with");
    let dir = place.dir();
    let held = Folder::new(&dir).hold().unwrap();
    for start in ALL {
        refused(start, &[], "another process is training here");
    }
    drop(held);
    all_well(2, &place, &place.recipe(&["train.steps=7"]), Start::Resume);
    assert_eq!(std::fs::read_dir(dir.join("transfers")).unwrap().count(), 0);
}

/// It would lose what it has with the checkpoints that the other one removes.
#[test]
fn no_run_begins_among_the_checkpoints_of_another() {
    let place = Place::new();
    let (first, _) = place.run(&place.recipe(&[]), Start::New).unwrap();
    let checkpoints = place.dir().join("checkpoints");
    for (dir, says) in [
        (checkpoints.clone(), "checkpoints: is where the run in "),
        (checkpoints.join("new"), "new: is in "),
        (checkpoints.join("../checkpoints/a/b"), "b: is in "),
        (first.checkpoint.clone(), "step-000006: is in "),
    ] {
        let mut recipe = place.recipe(&[]);
        recipe.run.dir = dir;
        for start in ALL {
            let before = files(place.0.path());
            let told = place.run(&recipe, start).unwrap_err().to_string();
            assert!(
                told.contains(says) && told.contains("keeps its checkpoints; choose"),
                "{told}"
            );
            assert!(files(place.0.path()) == before, "{told}");
        }
    }
    // A folder of this name that is no run's.
    let mut recipe = place.recipe(&[]);
    recipe.run.dir = place.0.path().join("checkpoints/new");
    assert!(place.run(&recipe, Start::New).is_ok());
}
