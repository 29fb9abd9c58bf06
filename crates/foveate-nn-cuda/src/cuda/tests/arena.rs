//! Arrays of a pass that share memory, beside arrays that do not.

use super::*;

/// Gradients, losses and weights of steps whose arrays share memory, that of gradients among it, are to
/// the bit those of steps whose arrays do not; with an evaluation between steps, whose arrays lie in the
/// same memory.
#[test]
fn arrays_that_share_memory_change_no_bit() {
    let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let rule = Rule::AdamW(adamw);
    for (state, tied) in [(ParameterState::Exact, true), (ParameterState::Bf16, false)] {
        let texts = Texts::new(&mut Random::new(17));
        let steps = |apart: bool, batches: usize, recompute: Recompute| {
            let (_, mut model) = models(state, tied, Architecture::default())?;
            if apart {
                let cuda = Cuda::new(0, state.into(), true).unwrap().with_arrays_apart();
                let (config, attention) = parts(Architecture::default(), tied);
                model = Model::unfilled_on(cuda, config, &attention.into()).unwrap();
                model.draw_missing(9).unwrap();
            }
            let mut gradients = match batches {
                1 => model.gradients_of_one_batch().unwrap(),
                _ => model.gradients().unwrap(),
            };
            let (spans, mut moments) =
                (model.spans(Treatment::of).unwrap(), model.moments(&rule).unwrap());
            let (mut losses, mut bits) = (Vec::new(), Vec::new());
            let trained = model.layout().trained();
            for step in 1..=3 {
                let mut totals = model.totals().unwrap();
                model.clear(&mut gradients);
                for _ in 0..batches {
                    let batch = texts.batch();
                    model.accumulate(&batch, &mut gradients, recompute, &mut totals).unwrap();
                }
                let mut all = vec![f32::NAN; trained];
                model.download(&gradients.array, 0, &mut all).unwrap();
                bits.extend(all.iter().map(|x| x.to_bits()));
                let step = OptimizerStep { rule, step, rate: 1e-2, clip_norm: 1.0, seed: 3 };
                model.update(&step, &spans, &gradients, &mut moments, &mut totals).unwrap();
                losses.push(model.read(totals).unwrap().nats.to_bits());
                losses.push(model.loss(&texts.batch()).unwrap().sum_nats.to_bits());
            }
            let mut masters = vec![f32::NAN; trained];
            model.masters(0, &mut masters).unwrap();
            bits.extend(masters.iter().map(|x| x.to_bits()));
            Some((losses, bits))
        };
        // Sums of gradients that are bf16 are not made.
        let most = if state == ParameterState::Bf16 { 1 } else { 2 };
        for (batches, recompute) in
            (1..=most).flat_map(|n| Recompute::ALL.map(|recompute| (n, recompute)))
        {
            let Some(shared) = steps(false, batches, recompute) else { return };
            let apart = steps(true, batches, recompute).expect("there is a GPU");
            assert!(shared.0 == apart.0, "losses: {state:?}, {batches} batches, {recompute:?}");
            assert!(shared.1 == apart.1, "bits: {state:?}, {batches} batches, {recompute:?}");
        }
    }
}
