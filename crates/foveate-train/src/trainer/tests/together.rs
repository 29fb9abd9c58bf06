//! What the ranks of a run decide and sum together in a step.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use foveate_nn::{AdamW, Cpu, OptimizerStep, Recompute, Rule, Treatment};
use foveate_shard::collectives::{Collectives, run_threads};

use super::ranks::over_tcp;
use super::*;
use crate::trainer::setup::share_parameters;

/// How many transfers of how many bytes a rank of two makes in each step of a run.
fn transfers_of_a_step(sets: &[&str]) -> BTreeMap<usize, f64> {
    let of_steps = |steps: u64| {
        let (place, steps) = (Place::new(), format!("train.steps={steps}"));
        let few = ["train.eval_every=0", "train.save_every=0", "data.held_out=0", &steps];
        let causal = ["attention={ mask = \"causal\" }", "train.batch_rows=2"];
        let recipe = place.recipe(&[&few, &causal[..], sets].concat());
        let counted = Mutex::new(BTreeMap::new());
        run_threads(2, Duration::from_secs(60), |world| {
            let mut log = Log::default();
            train_on(world, &recipe, &place.file(), Start::New, &mut log).unwrap();
            let history = world.history();
            assert!(history.len() < 1000, "all are remembered");
            if world.rank() == 0 {
                let mut counted = counted.lock().unwrap();
                history.iter().for_each(|done| *counted.entry(done.bytes).or_insert(0) += 1);
            }
            Ok(())
        })
        .unwrap();
        counted.into_inner().unwrap()
    };
    let (few, more) = (of_steps(2), of_steps(5));
    let in_steps = |(bytes, &number): (&usize, &i32)| {
        (*bytes, f64::from(number - few.get(bytes).unwrap_or(&0)) / 3.0)
    };
    more.iter().map(in_steps).filter(|(_, number)| *number != 0.0).collect()
}

/// Norm, loss, z-loss and labelled tokens go once, then the pairs that masks let through, for the log, and what each rank
/// knows at the end of a step; nothing else but gradients and parameters.
#[test]
fn a_step_sums_its_numbers_over_ranks_at_once() {
    const SUMS: usize = 4 * 8;
    const PAIRS: usize = 8;
    const DECISIONS: usize = 1;
    let copies = transfers_of_a_step(&["mesh.replicate=2", "train.accumulate=3"]);
    assert!([SUMS, PAIRS, DECISIONS].iter().all(|bytes| copies[bytes] == 1.0), "{copies:?}");
    // Parts of all gradients, and their sums.
    assert_eq!(copies.values().sum::<f64>(), 3.0 + 2.0, "{copies:?}");
    let cut = transfers_of_a_step(&["mesh.shard=2"]);
    assert!([SUMS, PAIRS, DECISIONS].iter().all(|bytes| cut[bytes] == 1.0), "{cut:?}");
    // Four groups, one of them twice, and their gradients.
    assert_eq!(cut.values().sum::<f64>(), 3.0 + 5.0 + 4.0, "{cut:?}");
    let back = ["optimizer.in_backward=true", "optimizer.clip_norm=0"];
    let copies = transfers_of_a_step(&[&["mesh.replicate=2"], &back[..]].concat());
    assert_eq!(copies[&SUMS], 1.0, "{copies:?}");
    // A norm for each group, which is updated by it.
    let cut = transfers_of_a_step(&[&["mesh.shard=2"], &back[..]].concat());
    assert_eq!(cut[&SUMS], 4.0, "{cut:?}");
}

/// The bits of the weights before two steps and behind each, on a rank of two that holds all parameters. In
/// the first the loss of rank 1 is infinite, and all gradients are finite.
fn steps_of_copies(world: &dyn Collectives, recipe: &Recipe) -> [Vec<u32>; 3] {
    const UNLIKELY: usize = 7;
    let in_backward = recipe.optimizer.in_backward;
    let ranks = Ranks::in_mesh(world, &recipe.mesh).unwrap();
    let config = recipe.model_config(29).unwrap().unwrap();
    let attention = recipe.attention.clone().unwrap();
    let frozen = |name: &str| !name.contains("lm_head");
    let cpu = Cpu::default();
    let mut model = Model::unfilled_with(cpu, config, &attention, &frozen).unwrap();
    share_parameters(ranks, recipe, &mut model).unwrap();
    model.draw_missing(3).unwrap();
    // Every output of the last norm is about 1.
    let place = |name: &str| model.parameter(name).unwrap().place.clone();
    let [embedding, head] = ["model.embed_tokens.weight", "lm_head.weight"].map(place);
    model.weights_mut()[embedding].fill(1.0);
    let first = head.start + UNLIKELY * head.len() / 29;
    model.weights_mut()[first..first + 2].fill(-3e38);
    let bits = |model: &Model| model.weights().iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let rule = Rule::AdamW(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 });
    let mut moments = model.moments(&rule).unwrap();
    let (spans, group_spans) =
        (model.spans(Treatment::of).unwrap(), model.group_spans(Treatment::of).unwrap());
    let mut seen = vec![bits(&model)];
    for (step, rank) in [(1, 1), (2, 9)] {
        let wrong = world.rank() == rank;
        let labels = vec![if wrong { UNLIKELY as i32 } else { 2 }; 8];
        let packed = Packed { labels, documents: vec![0; 8], ..Packed::empty_row(8) };
        let packed = batch(&packed);
        let clip_norm = if in_backward { 0.0 } else { 1.0 };
        let of_step = OptimizerStep { rule, step, rate: 1e-2, clip_norm, seed: 0 };
        let mut totals = model.totals().unwrap();
        let again = Recompute::None;
        if in_backward {
            let (mut passing, moments) = (model.passing_gradients().unwrap(), &mut moments);
            let (spans, totals) = (&group_spans, &mut totals);
            let ran = model.step_in_backward(
                &packed,
                None,
                &mut passing,
                again,
                &of_step,
                spans,
                moments,
                totals,
            );
            ran.unwrap();
        } else {
            let mut gradients = model.gradients().unwrap();
            model.accumulate(&packed, &mut gradients, again, &mut totals).unwrap();
            assert!(gradients.array.iter().all(|x| x.is_finite()));
            let sum = |values: &mut [f32]| world.all_reduce(values).map_err(TrainError::from);
            model.reduce(&mut gradients, sum).unwrap();
            model.update(&of_step, &spans, &gradients, &mut moments, &mut totals).unwrap();
        }
        let read = model.read(totals).unwrap();
        assert_eq!(read.labelled, 2 * 8, "those of both ranks");
        assert_eq!((read.nats.is_finite(), read.grad_norm.is_finite()), (step == 2, step == 2));
        seen.push(bits(&model));
    }
    seen.try_into().unwrap()
}

#[test]
fn a_loss_that_is_not_finite_on_one_copy_updates_none() {
    for back in [&[][..], &["optimizer.in_backward=true", "optimizer.clip_norm=0"]] {
        let place = Place::new();
        let sets = ["mesh.replicate=2", "model.tie_word_embeddings=false"];
        let recipe = place.recipe(&[&sets, back].concat());
        let threads =
            run_threads(2, Duration::from_secs(60), |world| Ok(steps_of_copies(world, &recipe)));
        let processes = over_tcp(2, |world| steps_of_copies(world, &recipe));
        for found in [threads.unwrap(), processes] {
            let [before, wrong, right] = &found[0];
            assert!(wrong == before, "nothing is updated");
            assert!(right != before, "the next step is taken");
            assert!(found[1] == found[0], "both ranks have the same weights");
        }
    }
}
