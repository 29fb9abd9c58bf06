//! Heads, columns and vocabulary that are cut over ranks of `tensor`, threads of this process on the GPUs there
//! are: beside one rank what they reach by each carrier, with the same bits every time.

use std::ops::Range;

use foveate_gpu::driver::Device;
use foveate_nn::{Carrier, Holders, LayerRope, Peers, TensorPart};

use super::sharing::{ADAMW, STEPS, ranks::TestRank};
use super::*;

/// What a rank came to: losses and norms of the steps, the masters that it holds, and those of them that all
/// ranks hold.
#[derive(Clone, Debug, PartialEq)]
struct Came {
    nats: Vec<f64>,
    norms: Vec<f64>,
    masters: Vec<u32>,
    copies: Vec<u32>,
}

/// Norms of heads and of outputs, biases, caps and a tied head; or none of it.
fn architecture(all: bool) -> Architecture {
    match all {
        true => Architecture {
            activation: NnActivation::Gelu,
            qkv_bias: true,
            head_norms: true,
            output_norms: true,
            logit_cap: Some(20.0),
            layer_rope: vec![LayerRope::Global, LayerRope::None],
            ..Architecture::default()
        },
        false => Architecture::default(),
    }
}

/// Steps of two batches each on a rank of `tensor`, or on one rank that has the model.
fn steps(state: ParameterState, rank: Option<TestRank>, all: bool) -> Came {
    let gpus = Device::count().unwrap_or(0).max(1);
    let (part, parts) = rank.as_ref().map_or((0, 1), |rank| (rank.rank(), rank.ranks()));
    let cuda = Cuda::new(part % gpus, state.into(), true).unwrap();
    let bias = LearnedBuffer { shape: vec![HEADS.heads_q], init: 0.1, std: 0.1 };
    let attention = ProgramConfig {
        mask: "causal & document".into(),
        score: Some("score + bias[h] * f32(kv - q) * 0.05".into()),
        learned: BTreeMap::from([("bias".to_owned(), bias)]),
        ..ProgramConfig::default()
    };
    let config = ModelConfig { architecture: architecture(all), ..config(all) };
    let part = TensorPart::of(&config, part, parts).unwrap();
    let holders = part.kv_holders.clone();
    let mut model =
        Model::unfilled_part(cuda, config, &attention.into(), &|_| false, part).unwrap();
    if let Some(rank) = &rank {
        model.tensor(&rank.with_kv_holders(holders)).unwrap();
        model.step_with(rank.step_ranks(rank.rank() == 0));
    }
    model.draw_missing(9).unwrap();
    let (mut gradients, mut moments) = (model.gradients().unwrap(), model.moments(&ADAMW).unwrap());
    let spans = model.spans(Treatment::of).unwrap();
    let [nats, norms] = <[Vec<f64>; 2]>::default();
    let [masters, copies] = <[Vec<u32>; 2]>::default();
    let mut came = Came { nats, norms, masters, copies };
    for step in 1..=STEPS {
        let mut totals = model.totals().unwrap();
        model.clear(&mut gradients);
        for number in 0..2 {
            let texts = Texts::new(&mut Random::new(100 * step + number));
            let again = if number == 0 { Recompute::None } else { Recompute::Full };
            model.accumulate(&texts.batch(), &mut gradients, again, &mut totals).unwrap();
        }
        let of_step = OptimizerStep { rule: ADAMW, step, rate: 1e-2, clip_norm: 1.0, seed: 3 };
        model.update(&of_step, &spans, &gradients, &mut moments, &mut totals).unwrap();
        let sums = model.read(totals).unwrap();
        came.nats.push(sums.nats);
        came.norms.push(sums.grad_norm);
    }
    let masters = |place: &Range<usize>| {
        let mut values = vec![f32::NAN; place.len()];
        model.masters(place.start, &mut values).unwrap();
        values.into_iter().map(f32::to_bits)
    };
    came.masters = model.parameters().iter().flat_map(|p| masters(&p.place)).collect();
    let of_all = model.layout().copied().iter().filter(|copied| copied.among == Holders::All);
    came.copies = of_all.flat_map(|copied| masters(&copied.place)).collect();
    // No rank goes while another reads what it has.
    rank.map(|rank| rank.all_gather(&[]).unwrap());
    came
}

fn on_ranks(state: ParameterState, ranks: usize, carrier: Carrier, all: bool) -> Vec<Came> {
    std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || steps(state, Some(rank), all));
        let ranks = TestRank::all(ranks, carrier, DType::F32).into_iter();
        let threads: Vec<_> = ranks.map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Held to one rank in every state, as what goes through the host's memory is.
fn held(carrier: Carrier, counts: &[usize]) {
    let [f32s, exact] = [ParameterState::F32, ParameterState::Exact];
    for (number, (state, all)) in
        [(f32s, false), (f32s, true), (exact, true), (ParameterState::Bf16, false)]
            .into_iter()
            .enumerate()
    {
        let ranks = counts[number % counts.len()];
        let by = |carrier| on_ranks(state, ranks, carrier, all);
        let found = by(carrier);
        assert!(found == by(carrier), "{state:?} on {ranks} ranks: other bits the second time");
        // Through the host products are of all tokens at once, whose sums may have another order.
        let host = by(Carrier::Host);
        let one = steps(state, None, all);
        let most = if state == f32s { 1e-5 } else { 2e-2 };
        for (came, first) in
            host.iter().map(|came| (came, &host[0])).chain(found.iter().map(|c| (c, &found[0])))
        {
            assert_eq!(came.nats, first.nats, "ranks have the same losses");
            assert!(came.copies == first.copies, "{state:?}: norms differ between ranks");
            for (name, came, one, most) in [
                ("nats", &came.nats, &one.nats, most),
                ("norm", &came.norms, &one.norms, 10.0 * most),
            ] {
                for (step, (came, one)) in came.iter().zip(one).enumerate() {
                    let off = (came - one).abs() / one;
                    println!("{state:?} on {ranks} ranks, step {step}, {name}: {off:.1e} off");
                    assert!(off < most, "{state:?} step {step}, {name}: {came}, not {one}");
                }
            }
        }
    }
}

#[test]
fn threads_of_tensor_reach_what_one_rank_reaches_by_copies() {
    match Cuda::available(0) {
        Ok(()) => held(Carrier::Auto, &[2, 3, 4]),
        Err(e) => println!("skipped: {e}"),
    }
}

#[test]
fn two_gpus_of_tensor_reach_what_one_rank_reaches_by_nccl() {
    match Device::count() {
        Ok(2..) => held(Carrier::Nccl, &[2]),
        Ok(_) => println!("skipped: there is one GPU, and NCCL takes one for each rank"),
        Err(e) => println!("skipped: {e}"),
    }
}
