//! Parameters that are cut over ranks, threads of this process on the GPUs there are: by each carrier the
//! bits that the host's memory gives, and beside one rank what it reaches.

#[path = "../../../tests/ranks/mod.rs"]
pub(super) mod ranks;

use foveate_gpu::driver::Device;
use foveate_nn::{Carrier, Cutting, Peers, Reshard};

use super::*;
use ranks::TestRank;

pub(super) const STEPS: u64 = 3;
pub(super) const ADAMW: Rule =
    Rule::AdamW(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });

/// What a rank came to: the losses of all rows, the norms, and the masters that it owns.
type Came = (Vec<f64>, Vec<f64>, Vec<u32>);

/// Steps of two batches each on a rank of some, or of all ranks' batches on one.
fn steps(state: ParameterState, rank: Option<(TestRank, Reshard)>, all: usize, tied: bool) -> Came {
    let gpus = Device::count().unwrap_or(0).max(1);
    let (own, ordinal) = match &rank {
        Some((rank, _)) => (rank.rank()..rank.rank() + 1, rank.rank() % gpus),
        None => (0..all, 0),
    };
    let cuda = Cuda::new(ordinal, state.into(), true).unwrap();
    let attention = ProgramConfig { mask: "causal & document".into(), ..ProgramConfig::default() };
    let mut model = Model::unfilled_on(cuda, config(tied), &attention.into()).unwrap();
    if let Some((rank, reshard)) = &rank {
        let cutting = Cutting { parts: rank.ranks(), reshard: *reshard, ..Cutting::WHOLE };
        model.cut(cutting, rank.rank(), rank).unwrap();
        model.step_with(rank.step_ranks(true));
    }
    model.draw_missing(9).unwrap();
    let (mut gradients, mut moments) = (model.gradients().unwrap(), model.moments(&ADAMW).unwrap());
    let spans = model.spans(Treatment::of).unwrap();
    let (mut nats, mut norms) = (Vec::new(), Vec::new());
    for step in 1..=STEPS {
        let mut totals = model.totals().unwrap();
        model.clear(&mut gradients);
        for number in 0..2 {
            for of in 0..all {
                let seed = 100 * step + 10 * number + of as u64;
                let texts = Texts::new(&mut Random::new(seed));
                if own.contains(&of) {
                    let batch = texts.batch();
                    let again = Recompute::None;
                    model.accumulate(&batch, &mut gradients, again, &mut totals).unwrap();
                }
            }
        }
        let of_step = OptimizerStep { rule: ADAMW, step, rate: 1e-2, clip_norm: 1.0, seed: 3 };
        model.update(&of_step, &spans, &gradients, &mut moments, &mut totals).unwrap();
        let sums = model.read(totals).unwrap();
        nats.push(sums.nats);
        norms.push(sums.grad_norm);
    }
    let mut masters = Vec::new();
    for p in model.parameters() {
        for (own, _) in model.share().pieces(&p.place) {
            let mut values = vec![f32::NAN; own.len()];
            model.masters(own.start, &mut values).unwrap();
            masters.extend(values.into_iter().map(f32::to_bits));
        }
    }
    (nats, norms, masters)
}

fn on_ranks(state: ParameterState, all: Vec<TestRank>, reshard: Reshard, tied: bool) -> Vec<Came> {
    let ranks = all.len();
    std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || steps(state, Some((rank, reshard)), ranks, tied));
        let threads: Vec<_> = all.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Held to one rank in f32, and in every state to what goes through the host's memory.
fn held(carrier: Carrier, counts: &[usize]) {
    let [f32s, exact] = [ParameterState::F32, ParameterState::Exact];
    let (wide, narrow) = (DType::F32, DType::BF16);
    for (number, (state, reduce, reshard, tied)) in [
        (f32s, wide, Reshard::Always, false),
        (exact, wide, Reshard::Always, true),
        (exact, narrow, Reshard::AfterBackward, false),
        (ParameterState::Bf16, wide, Reshard::Never, true),
        (ParameterState::Int8Moments, wide, Reshard::Always, false),
    ]
    .into_iter()
    .enumerate()
    {
        let ranks = counts[number % counts.len()];
        let by = |carrier| on_ranks(state, TestRank::all(ranks, carrier, reduce), reshard, tied);
        let found = by(carrier);
        assert!(found == by(carrier), "{state:?} on {ranks} ranks: other bits the second time");
        assert!(
            found == by(Carrier::Host),
            "{state:?} on {ranks} ranks: other bits than the host's"
        );
        let (nats, norms, _) = steps(state, None, ranks, tied);
        let most = if state == f32s { 1e-5 } else { 2e-2 };
        for (step, (nats, norm)) in nats.iter().zip(norms).enumerate() {
            let of_all = found[0].0[step];
            assert!(found.iter().all(|came| came.0[step] == of_all), "losses of all ranks");
            let off = (of_all - nats).abs() / nats;
            println!("{state:?} on {ranks} ranks, step {step}: {off:.1e} off");
            assert!(off < most, "{state:?} step {step}: {of_all}, not {nats}");
            for came in &found {
                assert!((came.1[step] - norm).abs() < most * 10.0 * norm, "{:?} {norm}", came.1);
            }
        }
    }
}

/// Gradients of ranks that hold the same parameters have the bits of a sum in order of rank, rounded once.
fn replicas(carrier: Carrier, counts: &[usize]) {
    for (state, &ranks) in [ParameterState::F32, ParameterState::Bf16].into_iter().zip(counts) {
        let own = |rank: usize, elems: usize| -> Vec<f32> {
            let mut random = Random::new(rank as u64);
            let draw = || {
                let x = (random.unit() - 0.5) as f32;
                if state == ParameterState::F32 { x } else { half::bf16::from_f32(x).to_f32() }
            };
            std::iter::repeat_with(draw).take(elems).collect()
        };
        let on_rank = |rank: TestRank| -> Vec<f32> {
            let gpus = Device::count().unwrap_or(0).max(1);
            let cuda = Cuda::new(rank.rank() % gpus, state.into(), true).unwrap();
            let program = ProgramConfig { mask: "causal".into(), ..ProgramConfig::default() };
            let mut model = Model::unfilled_on(cuda, config(true), &program.into()).unwrap();
            model.replicas(Box::new(rank.clone()), rank.carrier).unwrap();
            let mut gradients = model.gradients().unwrap();
            let mut values = own(rank.rank(), model.layout().trained());
            model.upload(&mut gradients.array, 0, &values).unwrap();
            let by_host = |_: &mut [f32]| -> Result<(), NnError> { unreachable!("the GPU sums") };
            model.reduce(&mut gradients, by_host).unwrap();
            values.fill(f32::NAN);
            model.download(&gradients.array, 0, &mut values).unwrap();
            // No rank goes while another reads what it has.
            rank.all_gather(&[]).unwrap();
            values
        };
        let found: Vec<Vec<f32>> = std::thread::scope(|scope| {
            let (all, on_rank) = (TestRank::all(ranks, carrier, DType::F32), &on_rank);
            let start = |rank| scope.spawn(move || on_rank(rank));
            let threads: Vec<_> = all.into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut sums = vec![0.0f32; found[0].len()];
        for rank in 0..ranks {
            sums.iter_mut().zip(own(rank, found[0].len())).for_each(|(sum, x)| *sum += x);
        }
        if state != ParameterState::F32 {
            sums.iter_mut().for_each(|sum| *sum = half::bf16::from_f32(*sum).to_f32());
        }
        for (rank, found) in found.iter().enumerate() {
            assert!(*found == sums, "{state:?}: rank {rank} of {ranks} has other sums");
        }
    }
}

#[test]
fn ranks_with_copies_have_the_sums_of_gradients_in_order_of_rank() {
    match Cuda::available(0) {
        Ok(()) => replicas(Carrier::Auto, &[2, 5]),
        Err(e) => return println!("skipped: {e}"),
    }
    if Device::count().is_ok_and(|gpus| gpus > 1) {
        replicas(Carrier::Nccl, &[2, 2]);
    }
}

#[test]
fn ranks_that_are_threads_reach_what_one_rank_reaches_by_copies() {
    match Cuda::available(0) {
        Ok(()) => held(Carrier::Auto, &[2, 3, 4]),
        Err(e) => println!("skipped: {e}"),
    }
}

#[test]
fn ranks_on_two_gpus_reach_what_one_rank_reaches_by_nccl() {
    match Device::count() {
        Ok(2..) => held(Carrier::Nccl, &[2]),
        Ok(_) => println!("skipped: there is one GPU, and NCCL takes one for each rank"),
        Err(e) => println!("skipped: {e}"),
    }
}
