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

/// Bytes of steps in a state that the dry run does not name: what is held behind them, and the most at once. What it
/// does name is held to the byte.
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
    let state_arrays = account.state.iter().map(|array| (array.name, array.bytes));
    for (name, bytes) in state_arrays.chain([("activations", arena)]).filter(|of| of.1 > 0) {
        let place = live.iter().position(|&of| of == bytes);
        let place = place.unwrap_or_else(|| panic!("{state:?}: no {bytes} B for {name}: {live:?}"));
        live.swap_remove(place);
        named += bytes;
    }
    [live.iter().sum(), most - named]
}

#[test]
fn arrays_take_what_the_dry_run_says_to_the_byte() {
    if !inside("memory::arrays_take_what_the_dry_run_says_to_the_byte") {
        return;
    }
    let [none, full] = [Recompute::None, Recompute::Full];
    for (state, batches, recompute) in [
        (ParameterState::F32, 2, none),
        (ParameterState::Exact, 1, none),
        (ParameterState::Exact, 2, Recompute::Attention),
        (ParameterState::Exact, 2, Recompute::Mlp),
        (ParameterState::Exact, 2, full),
        (ParameterState::Bf16Gradients, 1, full),
        (ParameterState::Bf16Moments, 2, none),
        (ParameterState::Int8Moments, 2, none),
        (ParameterState::Bf16, 1, none),
    ] {
        let [few, many] = [2, 5].map(|layers| beside(state, batches, recompute, layers));
        // What the update is told of each layer's parameters, and nothing else, grows with them.
        let grown = [many[0] - few[0], many[1] - few[1]];
        assert!(grown[0] == grown[1] && grown[0] <= 3 * 256, "{state:?} {recompute:?}: {grown:?}");
        assert!(few[1] < 64 << 10, "{state:?} {recompute:?}: {few:?}");
    }
}
