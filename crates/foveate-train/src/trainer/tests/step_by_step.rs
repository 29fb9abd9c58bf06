//! Runs of ranks that a test takes step by step.

use std::time::Duration;

use foveate_nn::Cpu;
use foveate_shard::collectives::{Collectives, run_threads};

use super::*;
use crate::trainer::copies::CopyMemory;
use crate::trainer::copies::tests::{PLANTED, Planted};

fn setup<'a>(
    world: &'a dyn Collectives,
    place: &Place,
    recipe: &'a Recipe,
    observer: &mut dyn Observer,
) -> Result<Setup<'a, Cpu>, TrainError> {
    let ranks = Ranks::in_mesh(world, &recipe.mesh)?;
    Setup::new(ranks, recipe, &place.file(), Start::New.into(), Cpu::default(), None, observer)
}

#[test]
fn numbers_that_a_lost_rank_left_behind_are_not_judged() {
    for is_lost in [false, true] {
        let place = Place::new();
        let recipe = place.recipe(&["optimizer.lr=1e30", "schedule.warmup_steps=0"]);
        let ended = run_threads(2, Duration::from_secs(60), |world| {
            let mut log = Log::default();
            let mut setup = setup(world, &place, &recipe, &mut log).unwrap();
            let (mut loader, mut run) = (setup.loader().unwrap(), Progress::new(None));
            let mut gradients = StepGradients::new(&recipe, &setup.model).unwrap();
            // The first step is finite, the second is not, on either rank.
            let first = setup.queue(&mut loader, &mut gradients, &mut run).unwrap();
            setup.finish(first, &mut gradients, &mut run, &mut log).unwrap();
            let second = setup.queue(&mut loader, &mut gradients, &mut run).unwrap();
            if is_lost && world.rank() == 1 {
                return Ok(None);
            }
            Ok(setup.finish(second, &mut gradients, &mut run, &mut log).err())
        });
        let first = ended.unwrap().swap_remove(0).expect("the step is not finite");
        match first.kind() {
            TrainErrorKind::Diverged { step: 2, .. } => assert!(!is_lost, "{first}"),
            TrainErrorKind::Ranks { lost: true, .. } => assert!(is_lost, "{first}"),
            _ => panic!("{first}"),
        }
    }
}

/// Whether saves are as they were to be, or why not.
#[derive(Default)]
struct Waits {
    steps: usize,
    why: Vec<String>,
}

impl Observer for Waits {
    fn step(&mut self, _: &StepMetrics) {
        self.steps += 1;
    }

    fn saves_wait(&mut self, reason: &str) {
        self.why.push(reason.to_owned());
    }
}

#[test]
fn steps_wait_for_saves_where_a_rank_has_no_memory_for_copies_that_nobody_asked_for() {
    for ranks in [1, 2] {
        let (place, straight) = (Place::new(), Place::new());
        let [recipe, other] = [&place, &straight].map(|place| place.recipe(&["train.keep=9"]));
        let told = run_threads(ranks, Duration::from_secs(60), |world| {
            let mut waits = Waits::default();
            let mut setup = setup(world, &place, &recipe, &mut waits).unwrap();
            // As on a GPU, whose driver pins no memory for one of the ranks.
            setup.saves_beside = true;
            if world.rank() + 1 == ranks {
                PLANTED.set(Planted::Refusal);
            }
            let owned = setup.ranks.owned(setup.model.layout());
            let copies = CopyMemory::begin(&setup.model, &recipe.optimizer.rule(), &owned);
            setup.copies = Some(copies.unwrap());
            let summary = setup.steps(None, &mut waits).unwrap();
            assert!(setup.copies.is_none(), "nothing stays pinned");
            train_on(world, &other, &straight.file(), Start::New, &mut Log::default()).unwrap();
            assert_eq!((summary.steps, waits.steps), (6, 6));
            Ok(waits.why)
        });
        for why in told.unwrap() {
            let [why] = why.try_into().expect("it is told once");
            let of_rank = if ranks == 1 { "" } else { "on rank 1 " };
            assert!(
                why.starts_with(&format!("{of_rank}there is no memory for a copy of ")),
                "{why}"
            );
            assert!(why.ends_with(" values to save while the run goes on (planted)"), "{why}");
        }
        let saved = |place: &Place, step: u64| {
            let folder = place.0.path().join(format!("run/checkpoints/step-{step:06}"));
            std::fs::read(folder.join("checksums.json")).unwrap()
        };
        for step in [2, 4, 6] {
            assert_eq!(saved(&place, step), saved(&straight, step));
        }
    }
}

#[test]
fn ranks_whose_hosts_have_other_memory_free_save_alike() {
    let place = Place::new();
    let recipe = place.recipe(&[]);
    let saved = run_threads(2, Duration::from_secs(60), |world| {
        let mut log = Log::default();
        let mut setup = setup(world, &place, &recipe, &mut log).unwrap();
        for (beside, all) in [(world.rank() == 0, false), (true, true)] {
            setup.saves_beside = beside;
            setup.agree_on_saves().unwrap();
            assert_eq!(setup.saves_beside, all);
        }
        setup.saves_beside = false;
        setup.steps(None, &mut log).unwrap();
        Ok(log.saved)
    });
    assert_eq!(saved.unwrap(), [[2, 4, 6], [2, 4, 6]]);
}

#[test]
fn saves_beside_the_steps_that_are_asked_for_are_refused_before_the_first_step() {
    for ranks in [1, 2] {
        let place = Place::new();
        let recipe = place.recipe(&["train.async_save=true"]);
        let ended = run_threads(ranks, Duration::from_secs(60), |world| {
            if world.rank() + 1 == ranks {
                PLANTED.set(Planted::Refusal);
            }
            let mut log = Log::default();
            Ok(train_on(world, &recipe, &place.file(), Start::New, &mut log).unwrap_err())
        });
        let ended = ended.unwrap();
        for e in &ended {
            let text = e.to_string();
            let of_rank = if std::ptr::eq(e, &ended[ranks - 1]) { "" } else { "rank 1: " };
            let begin = format!("{of_rank}there is no memory for a copy of ");
            let end =
                " values to save while the run goes on (planted); set train.async_save = false";
            assert!(text.starts_with(&begin) && text.ends_with(end), "{text}");
        }
        assert!(!place.0.path().join("run").exists(), "nothing was begun");
    }
}

/// Presses Ctrl-C while memory for copies is made.
#[derive(Default)]
struct Impatient(bool);

impl Observer for Impatient {
    fn begins(&mut self, what: &'static str) {
        self.0 |= what == "making room for copies of what is saved";
    }

    fn interrupted(&mut self) -> bool {
        self.0
    }
}

#[test]
fn a_run_that_waits_for_memory_for_copies_can_be_interrupted() {
    let place = Place::new();
    let recipe = place.recipe(&["train.async_save=true"]);
    PLANTED.set(Planted::Wait);
    let ended = train(&recipe, &place.file(), Start::New, &mut Impatient::default());
    PLANTED.set(Planted::Nothing);
    assert!(matches!(ended.unwrap_err().kind(), TrainErrorKind::Interrupted));
    assert!(!recipe.run.dir.exists());
}

/// Presses Ctrl-C while the first save waits for memory that nobody asked for.
#[derive(Default)]
struct ImpatientAtSave {
    saving: bool,
    steps: usize,
}

impl Observer for ImpatientAtSave {
    fn begins(&mut self, what: &'static str) {
        self.saving |= what == "saving";
    }

    fn step(&mut self, _: &StepMetrics) {
        self.steps += 1;
    }

    fn interrupted(&mut self) -> bool {
        self.saving
    }
}

#[test]
fn a_save_that_waits_for_memory_nobody_asked_for_ends_its_wait_at_ctrl_c() {
    for ranks in [1, 2] {
        let place = Place::new();
        let recipe = place.recipe(&["train.steps=20"]);
        let ended = run_threads(ranks, Duration::from_secs(60), |world| {
            let (mut log, mut impatient) = (Log::default(), ImpatientAtSave::default());
            let first = world.rank() == 0;
            let observer: &mut dyn Observer = if first { &mut impatient } else { &mut log };
            let mut setup = setup(world, &place, &recipe, &mut *observer).unwrap();
            // As on a GPU, whose driver takes long to pin memory for the first of the ranks.
            setup.saves_beside = true;
            PLANTED.set(if first { Planted::Wait } else { Planted::Nothing });
            let owned = setup.ranks.owned(setup.model.layout());
            let copies = CopyMemory::begin(&setup.model, &recipe.optimizer.rule(), &owned);
            PLANTED.set(Planted::Nothing);
            setup.copies = Some(copies.unwrap());
            let summary = setup.steps(None, observer).unwrap();
            Ok((summary.interrupted, summary.steps))
        });
        // The save at step 2 is whole, and the step behind it the last.
        assert_eq!(ended.unwrap(), vec![(true, 3); ranks]);
        for step in [2, 3] {
            let saved = place.0.path().join(format!("run/checkpoints/step-{step:06}"));
            assert!(saved.join("state.json").exists(), "step {step} of {ranks} ranks");
        }
        let resumed = place.run(&place.recipe(&["train.steps=4"]), Start::Resume).unwrap();
        assert_eq!(resumed.0.steps, 4);
    }
}

#[test]
fn nothing_stays_of_a_save_whose_folder_a_rank_does_not_see() {
    let (place, elsewhere) = (Place::new(), Place::new());
    let recipe = place.recipe(&[]);
    let elsewhere = elsewhere.recipe(&[]).run.dir;
    let ended = run_threads(2, Duration::from_secs(60), |world| {
        let mut log = Log::default();
        let mut setup = setup(world, &place, &recipe, &mut log).unwrap();
        if world.rank() == 1 {
            setup.folder = Folder::new(&elsewhere);
        }
        Ok(setup.save(false, &mut log).unwrap_err().to_string())
    });
    let told = "rank 1 does not see here what rank 0 writes";
    assert!(ended.unwrap().iter().all(|e| e.contains(told)));
    let left: Vec<_> = std::fs::read_dir(recipe.run.dir.join("checkpoints")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}
