//! Inputs of layers that wait in the memory of the host, on the driver made for tests.

use foveate_gpu::trace::{self, HOST, Noted};
use foveate_nn::{
    Architecture, COPY_IN, COPY_OUT, Model, ModelConfig, Offload, Recomputation, Recompute,
    Recording, StepKind,
};
use foveate_nn_cuda::Cuda;

use super::order::flow::flow;
use super::order::trouble;
use super::{LEN, ROWS, Steps, cuda, filled, inside, sizes, with_host_moments};

const LAYERS: usize = 5;

fn offloaded(what: Recompute) -> Recomputation {
    Recomputation { offload: Offload::LayerInputs, ..what.into() }
}

/// Five layers, with norms of what they add or without.
fn deep(cuda: Cuda, output_norms: bool) -> Steps {
    let (config, attention) = sizes();
    let architecture = Architecture { output_norms, ..config.architecture };
    let config = ModelConfig { num_hidden_layers: LAYERS, architecture, ..config };
    Steps::of(filled(Model::unfilled_on(cuda, config, &attention).unwrap()))
}

/// Three steps, and where the notes of the second one's queueing lie.
fn three(
    steps: &mut Steps,
    again: Recomputation,
    notes: &mut Vec<Noted>,
) -> std::ops::Range<usize> {
    let mut second = 0..0;
    for number in 0..3 {
        let [of_step, read] = steps.run(again);
        let waits = of_step.iter().filter(|n| matches!(n, Noted::Waited { .. })).count();
        let more = of_step.iter().filter(|n| matches!(n, Noted::Allocated { .. })).count();
        assert!(waits == 0 && (number == 0 || more == 0), "step {number}: {waits}, {more}");
        if number == 1 {
            second = notes.len()..notes.len() + of_step.len();
        }
        notes.extend(of_step.into_iter().chain(read));
    }
    second
}

fn copies(notes: &[Noted], what: &str) -> usize {
    let is_copy = |noted: &&Noted| match noted {
        Noted::Read { name, .. } | Noted::Written { name, .. } => name == what,
        _ => false,
    };
    notes.iter().filter(is_copy).count()
}

#[test]
fn inputs_of_layers_go_to_the_host_and_come_back_in_order_and_nothing_waits() {
    let name = "offload::inputs_of_layers_go_to_the_host_and_come_back_in_order_and_nothing_waits";
    if !inside(name) {
        return;
    }
    for (what, output_norms) in
        [(Recompute::Full, false), (Recompute::Full, true), (Recompute::Mlp, false)]
    {
        let again = offloaded(what);
        trace::start();
        let mut steps = deep(cuda(), output_norms);
        let mut notes = trace::stop();
        let second = three(&mut steps, again, &mut notes);
        assert_eq!(trouble(&notes), [""; 0], "{what:?}");
        // Of three steps of two batches.
        let passes = 3 * 2 * (LAYERS - 1);
        assert_eq!(["a copy out", "a copy in"].map(|copy| copies(&notes, copy)), [passes; 2]);
        // What is pinned is what the dry run says.
        let account = steps.model.dry_run(ROWS, LEN, StepKind::Training(again.into())).unwrap();
        let pinned = notes.iter().filter_map(|noted| match noted {
            Noted::Written { name, span, stream: HOST } if name == "memory of the host" => {
                Some(span.1 - span.0)
            }
            _ => None,
        });
        assert_eq!(pinned.sum::<u64>(), account.host_bytes);
        assert_eq!(account.host_bytes, ((LAYERS - 1) * ROWS * LEN * 40 * 2) as u64);
        // Every event that a stream waits for is needed: that an input is written, that it has left, that
        // its place is free, that it has come.
        let follows: Vec<usize> =
            second.filter(|&at| matches!(notes[at], Noted::Follows { .. })).collect();
        assert_eq!(follows.len(), 2 * 4 * (LAYERS - 1));
        for at in follows {
            let without = [&notes[..at], &notes[at + 1..]].concat();
            assert_ne!(trouble(&without), [""; 0], "{what:?}: without {at} {:?}", notes[at]);
        }
    }
}

/// Copies of the steps of a profile, those that end behind the last step, too; none outside of it.
#[test]
fn a_profile_has_the_times_of_copies_between_host_and_device() {
    if !inside("offload::a_profile_has_the_times_of_copies_between_host_and_device") {
        return;
    }
    let mut steps = deep(with_host_moments(2056), false);
    let pieces = steps.model.layout().trained().div_ceil(2056);
    steps.run(offloaded(Recompute::Full));
    steps.model.profile(true).unwrap();
    for _ in 0..2 {
        steps.run(offloaded(Recompute::Full));
    }
    let mut times = steps.model.block_times();
    steps.model.profile(false).unwrap();
    times.extend(steps.model.block_times());
    steps.run(offloaded(Recompute::Full));
    assert_eq!(steps.model.block_times(), []);
    let calls = |block| times.iter().filter(|time| time.block == block).count();
    // Of two steps of two batches, with one copy for both moments of a piece.
    assert_eq!([COPY_OUT, COPY_IN].map(calls), [2 * (2 * (LAYERS - 1) + pieces); 2]);
    assert!(calls("update") == 2 && times.iter().all(|time| time.seconds >= 0.0));
}

#[test]
fn inputs_of_the_host_go_with_moments_of_the_host() {
    if !inside("offload::inputs_of_the_host_go_with_moments_of_the_host") {
        return;
    }
    trace::start();
    let mut steps = deep(with_host_moments(2056), false);
    let mut notes = trace::stop();
    three(&mut steps, offloaded(Recompute::Full), &mut notes);
    assert_eq!(trouble(&notes), [""; 0]);
    let pieces = 2 * steps.model.layout().trained().div_ceil(2056);
    assert_eq!(copies(&notes, "a copy out"), 3 * (2 * (LAYERS - 1) + pieces));
}

/// What each block reads was written by the block that writes it where every array has memory of its own and no
/// input leaves the device.
#[test]
fn blocks_read_what_they_read_where_inputs_stay() {
    if !inside("offload::blocks_read_what_they_read_where_inputs_stay") {
        return;
    }
    for (batches, what) in [1, 2].into_iter().flat_map(|n| Recompute::ALL.map(|what| (n, what))) {
        let [away, stays] = [true, false].map(|away| {
            trace::start();
            let own = if away { cuda() } else { cuda().with_arrays_apart() };
            let mut steps = Steps { batches, ..deep(own, what == Recompute::Full) };
            if batches == 1 {
                steps.state.0 = steps.model.gradients_of_one_batch().unwrap();
            }
            let mut notes = trace::stop();
            let again = if away { offloaded(what) } else { what.into() };
            three(&mut steps, again, &mut notes);
            assert_eq!(trouble(&notes), [""; 0], "{batches} {what:?}");
            notes
        });
        let (found, expected) = (flow(&away), flow(&stays));
        assert_eq!(found.len(), expected.len(), "{batches} {what:?}");
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found, expected, "read {i}, {batches} batches, {what:?}");
        }
    }
}

#[test]
fn passes_whose_inputs_go_to_the_host_are_not_recorded_and_say_so() {
    if !inside("offload::passes_whose_inputs_go_to_the_host_are_not_recorded_and_say_so") {
        return;
    }
    trace::start();
    let mut steps = deep(cuda(), false);
    steps.model.record_passes();
    let mut notes = trace::stop();
    assert_eq!(steps.model.recording(), Recording::On);
    three(&mut steps, offloaded(Recompute::Full), &mut notes);
    assert_eq!(trouble(&notes), [""; 0]);
    assert_eq!(copies(&notes, "a copy out"), 3 * 2 * (LAYERS - 1));
    let reason = "inputs of layers go to the memory of the host";
    assert_eq!(steps.model.recording(), Recording::Off(reason.into()));
}
