//! Inputs of layers in the memory of the host.

use super::*;
use crate::{Dry, Offload, ParameterState, StepKind};

/// Layers enough that every array of the device has the inputs of several.
fn deep(architecture: Architecture, layers: usize) -> Model {
    let config = ModelConfig { architecture, num_hidden_layers: layers, ..tiny(false) };
    model(config, &attention(), 4)
}

fn offloaded(what: Recompute, layers: usize) -> Recomputation {
    Recomputation { what, layers, offload: Offload::LayerInputs }
}

#[test]
fn gradients_are_bitwise_those_of_inputs_that_stay() {
    let all = architectures().into_iter().chain([Architecture::default()]);
    for (architecture, layers) in all.flat_map(|of| [1, 2, 5].map(|layers| (of.clone(), layers))) {
        let mut architecture = architecture;
        if architecture.layer_rope.len() > 1 {
            let kinds = architecture.layer_rope.clone();
            architecture.layer_rope = kinds.into_iter().cycle().take(layers).collect();
        }
        let model = deep(architecture, layers);
        // Batches of other shapes one after another in the same arrays.
        for (rows, lengths) in [(3, &[40, 21, 60, 3, 2][..]), (1, &[7, 2]), (2, &[30, 40])] {
            let text = Text::new(lengths, 40);
            let batch = text.batch(rows);
            let wanted = gradients(&model, &batch, Recompute::None);
            for what in Recompute::ALL {
                for first in [2, usize::MAX] {
                    let found = gradients(&model, &batch, offloaded(what, first));
                    assert_eq!(found, wanted, "{what:?} in {first} of {layers}");
                }
            }
            // Losses keep nothing, so there is nothing on the host.
            assert_eq!(model.loss(&batch).unwrap().sum_nats, wanted.0);
        }
    }
}

#[test]
fn the_host_has_all_inputs_but_the_last_and_the_device_two() {
    let (layers, rows, len) = (9, 2, 70);
    let model = deep(Architecture::default(), layers);
    let input = (rows * len * model.config().hidden_size * 2) as u64;
    let inputs = |again: Recomputation, one_batch: bool| {
        let dry = Dry::new(ParameterState::Exact.into(), 64).sharing();
        let kind = StepKind::Training(crate::Training { one_batch, ..again.into() });
        let config = model.config();
        let account = config.dry_run_on(&dry, &attention(), &|_| false, rows, len, kind).unwrap();
        let count = account.activations.iter().filter(|array| array.name == "layer input").count();
        (account.host_bytes, count, account.activation_bytes())
    };
    for what in Recompute::ALL {
        let (none, all, before) = inputs(what.into(), false);
        assert_eq!((none, all), (0, layers + 1));
        let (host, count, bytes) = inputs(offloaded(what, usize::MAX), false);
        assert_eq!((host, count), (input * (layers as u64 - 1), 2));
        assert!(bytes < before, "{what:?}: {bytes} of {before}");
    }
    // Where everything else is computed again, inputs are what grows with the layers.
    let [(.., kept), (.., away)] = [Recompute::Full.into(), offloaded(Recompute::Full, usize::MAX)]
        .map(|of| inputs(of, false));
    assert!(kept - away >= input * (layers as u64 - 3), "{kept}, {away}, of {input}");
}
