//! What a run takes of its device, beside what the dry run says of it.

use std::collections::HashMap;

use foveate_gpu::trace::{self, Noted};
use foveate_nn::{
    AttentionConfig, Model, ModelConfig, ParameterState, Recompute, StepKind, Training,
};
use foveate_nn_cuda::Cuda;

use super::{LEN, ROWS, Steps, filled, inside, sizes};

/// Bytes of memory that is held at the end, and the most that was at once.
fn held(notes: &[Noted]) -> (Vec<u64>, u64) {
    let (mut live, mut now, mut most) = (HashMap::new(), 0, 0);
    for noted in notes {
        match *noted {
            Noted::Taken { address, bytes } => {
                now += bytes as u64;
                assert!(live.insert(address, bytes as u64).is_none());
            }
            Noted::Given { address } => now -= live.remove(&address).unwrap_or(0),
            _ => continue,
        }
        most = most.max(now);
    }
    (live.into_values().collect(), most)
}

/// Of steps in a state: what is held that the dry run does not name, and the most of it at once.
fn beside(state: ParameterState, batches: usize, recompute: Recompute, layers: usize) -> [u64; 2] {
    let (config, attention): (ModelConfig, AttentionConfig) = sizes();
    let config = ModelConfig { num_hidden_layers: layers, vocab_size: 4000, ..config };
    trace::start();
    let cuda = Cuda::new(0, state.into(), true).unwrap();
    let model = filled(Model::unfilled_on(cuda, config, &attention).unwrap());
    let mut steps = match batches {
        1 => Steps::of_one_batch(model),
        _ => Steps { batches, ..Steps::of(model) },
    };
    let mut notes = trace::stop();
    for _ in 0..3 {
        notes.extend(steps.run(recompute).concat());
    }
    let training = Training { one_batch: batches == 1, ..recompute.into() };
    let account = steps.model.dry_run(ROWS, LEN, StepKind::Training(training)).unwrap();
    // The batch and its rotations come first, and have memory of their own.
    let of_batch: u64 = account.activations[..2].iter().map(|array| array.bytes).sum();
    let arena = account.activation_bytes() - of_batch;
    let (mut live, most) = held(&notes);
    let mut named = 0;
    for (name, bytes) in
        account.state.iter().map(|a| (a.name, a.bytes)).chain([("activations", arena)])
    {
        named += bytes;
        if bytes == 0 {
            continue;
        }
        let place = live.iter().position(|&of| of == bytes);
        let place = place.unwrap_or_else(|| panic!("{state:?}: no {bytes} B for {name}: {live:?}"));
        live.swap_remove(place);
    }
    println!("{state:?} {batches} {recompute:?} {layers}: {live:?} {}", most - named);
    [live.iter().sum(), most - named]
}

#[test]
fn arrays_take_what_the_dry_run_says_to_the_byte() {
    if !inside("memory::arrays_take_what_the_dry_run_says_to_the_byte") {
        return;
    }
    for (state, batches) in [
        (ParameterState::F32, 2),
        (ParameterState::Exact, 1),
        (ParameterState::Exact, 2),
        (ParameterState::Bf16Gradients, 1),
        (ParameterState::Bf16Moments, 2),
        (ParameterState::Int8Moments, 2),
        (ParameterState::Bf16, 1),
    ] {
        for recompute in Recompute::ALL {
            let [few, many] = [2, 5].map(|layers| beside(state, batches, recompute, layers));
            println!("{few:?} {many:?}");
        }
    }
}
