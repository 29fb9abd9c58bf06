//! What a run says where passes are to be recorded.

use foveate_nn::Recording;

use super::*;
use crate::graphs;
use crate::recipe::GraphsChoice;

/// What a run said when it started, and the bits of its losses.
#[derive(Default)]
struct Seen {
    recording: Option<Recording>,
    losses: Vec<u64>,
}

impl Observer for Seen {
    fn started(&mut self, run: &Started) {
        self.recording.clone_from(&run.recording);
    }

    fn step(&mut self, metrics: &StepMetrics) {
        self.losses.push(metrics.loss.to_bits());
    }
}

#[test]
fn a_run_that_cannot_record_says_why_and_trains_as_without() {
    let place = Place::new();
    let run = |sets: &[&str]| {
        let (recipe, mut seen) = (place.recipe(sets), Seen::default());
        train(&recipe, &place.file(), Start::Over, &mut seen).unwrap();
        seen
    };
    let off = |reason: &str| Some(Recording::Off(reason.into()));
    let without = run(&[]);
    assert_eq!(without.recording, None);
    assert_eq!(run(&["run.graphs=off"]).recording, None);
    assert_eq!(place.recipe(&[]).run.graphs, GraphsChoice::Auto);
    let with = run(&["run.graphs=on"]);
    assert_eq!(with.recording, off("the device records nothing"));
    assert_eq!(with.losses, without.losses);
    let in_backward =
        ["run.graphs=on", "optimizer.in_backward=true", "optimizer.clip_norm=0"].as_slice();
    let reason = "a pass updates parameters with numbers of its step (optimizer.in_backward)";
    assert_eq!(run(in_backward).recording, off(reason));
}

#[test]
fn copies_to_the_host_and_other_ranks_are_reasons_to_record_nothing() {
    let place = Place::new();
    let why = |alone, sets: &[&str]| graphs::in_the_way(alone, &place.recipe(sets));
    assert_eq!(why(true, &["run.graphs=on"]), None);
    assert_eq!(why(false, &["run.graphs=on"]), Some("other ranks have part of its steps"));
    let away = ["run.graphs=on", "train.offload=layer_inputs"];
    let reason = "inputs of layers go to the memory of the host (train.offload)";
    assert_eq!(why(true, &away), Some(reason));
}

#[test]
fn graphs_are_auto_on_or_off_and_may_change_where_a_run_goes_on() {
    let place = Place::new();
    let sets = ["run.graphs=yes".to_owned()];
    let text = place.recipe(&[]).to_toml().unwrap();
    let said = Recipe::parse(&text, "test.toml", &sets).unwrap_err().to_string();
    assert!(
        said.contains("run.graphs") && ["`auto`", "`off`", "`on`"].iter().all(|w| said.contains(w)),
        "{said}"
    );
    let first = place.recipe(&["train.steps=2", "schedule.kind=constant"]);
    place.run(&first, Start::New).unwrap();
    let rest = place.recipe(&["run.graphs=on", "schedule.kind=constant"]);
    let constant = place.recipe(&["schedule.kind=constant"]);
    let resumed = place.run(&rest, Start::Resume).unwrap().1;
    let uninterrupted = place.run(&constant, Start::Over).unwrap().1;
    assert_eq!(resumed.losses, uninterrupted.losses[2..]);
}
