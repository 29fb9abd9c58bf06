//! Runs of ranks that a test takes step by step.

use std::time::Duration;

use foveate_nn::Cpu;
use foveate_shard::collectives::{Collectives, run_threads};

use super::*;

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
