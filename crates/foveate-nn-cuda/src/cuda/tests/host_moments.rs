//! Moments in the memory of the host beside moments on the device: the same bits.

use super::*;

/// Steps of a model in `state`, its masters and its moments.
fn steps(
    state: ParameterState,
    piece: usize,
    rule: Rule,
    in_backward: bool,
) -> Option<(Vec<f64>, Vec<Vec<u32>>)> {
    let cuda = match Cuda::new(0, state.into(), true) {
        Ok(cuda) => cuda.with_moments_in_pieces_of(piece),
        Err(e) => {
            println!("skipped: {e}");
            return None;
        }
    };
    let (config, attention) = parts(Architecture::default(), false);
    let mut model = Model::unfilled_on(cuda, config, &attention.into()).unwrap();
    model.draw_missing(9).unwrap();
    let treat = |p: &Parameter| match p.name.contains("embed") {
        true => Treatment { rate: 0.5, decay: 0.0 },
        false => Treatment::of(p),
    };
    let texts = Texts::new(&mut Random::new(16));
    let mut moments = model.moments(&rule).unwrap();
    let (spans, groups) = (model.spans(treat).unwrap(), model.group_spans(treat).unwrap());
    let (mut all, mut losses) = (model.gradients().unwrap(), Vec::new());
    let mut passing = model.passing_gradients().unwrap();
    let mut before = None;
    for step in 1..=5 {
        let of_step = OptimizerStep { rule, step, rate: 1e-2, clip_norm: 0.0, seed: 3 };
        let (batch, again, mut totals) = (texts.batch(), Recompute::None, model.totals().unwrap());
        if in_backward {
            let (of, kept) = (&of_step, &mut moments);
            model
                .step_in_backward(&batch, None, &mut passing, again, of, &groups, kept, &mut totals)
                .unwrap();
        } else {
            model.clear(&mut all);
            model.accumulate(&batch, &mut all, again, &mut totals).unwrap();
            model.update(&of_step, &spans, &all, &mut moments, &mut totals).unwrap();
        }
        // Each is read behind the next one, as the trainer does.
        if let Some(before) = before.replace(totals) {
            losses.push(model.read(before).unwrap().nats);
        }
    }
    losses.push(model.read(before.unwrap()).unwrap().nats);
    let elems = model.layout().trained();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let mut found = vec![f32::NAN; elems];
    model.masters(0, &mut found).unwrap();
    let mut kept = vec![bits(found)];
    for (moment, array) in [(Moment::Mean, &moments.mean), (Moment::Square, &moments.square)] {
        if array.elems() > 0 {
            let mut found = vec![f32::NAN; elems];
            model.download_moment(moment, array, 0, &mut found).unwrap();
            assert!(found.iter().all(|x| x.is_finite()) && found.iter().any(|&x| x != 0.0));
            kept.push(bits(found));
        }
    }
    Some((losses, kept))
}

#[test]
fn moments_of_the_host_have_the_bits_of_moments_on_the_device() {
    let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let rules = [Rule::AdamW(adamw), Rule::Sgd(Sgd { momentum: 0.9, weight_decay: 0.1 })];
    for (rule, in_backward) in rules.into_iter().flat_map(|rule| [(rule, false), (rule, true)]) {
        let Some(expected) = steps(ParameterState::Exact, 8, rule, in_backward) else { return };
        // Many pieces that end within groups, fewer than there are slots, and one.
        for piece in [2056, 60_000, 1 << 20] {
            let found = steps(ParameterState::HostMoments, piece, rule, in_backward).unwrap();
            assert!(found == expected, "{rule:?}, in backward {in_backward}, {piece}");
        }
    }
}
