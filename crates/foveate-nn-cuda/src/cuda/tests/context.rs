//! Attention over ranks that share the rows of a batch, threads of this process on the GPUs there are: losses and
//! gradients of all ranks together beside the CPU's of the whole batch.

use foveate_gpu::driver::Device;
use foveate_nn::{Carrier, Gradients};

use super::sharing::ranks::TestRank;
use super::*;
use crate::cuda::context_plans::{Held, How, Planned, plans};

/// Tokens of a chunk.
const CHUNK: usize = 16;

/// A program, and how many learned numbers its bias has.
fn program(mask: &str, score: Option<&str>) -> ProgramConfig {
    let bias = LearnedBuffer { shape: vec![HEADS.heads_q], init: 0.1, std: 0.1 };
    let learned = score.is_some_and(|score| score.contains("bias"));
    ProgramConfig {
        mask: mask.into(),
        score: score.map(str::to_owned),
        learned: learned.then(|| ("bias".to_owned(), bias)).into_iter().collect(),
        ..ProgramConfig::default()
    }
}

/// The loss of a rank's tokens, and the gradients of all parameters, one after another.
fn on_rank(
    rank: &TestRank,
    state: ParameterState,
    attention: &ProgramConfig,
    plan: &Arc<foveate_nn::ContextPlan>,
    recompute: Recompute,
    texts: &Texts,
) -> (f64, Vec<f32>) {
    use foveate_nn::Peers;
    let gpus = Device::count().unwrap_or(0).max(1);
    let cuda = Cuda::new(rank.rank() % gpus, state.into(), true).unwrap();
    let mut model = Model::unfilled_on(cuda, config(true), &attention.clone().into()).unwrap();
    model.draw_missing(9).unwrap();
    assert!(model.context(Box::new(rank.clone()), rank.carrier).unwrap());
    let mut gradients = model.gradients().unwrap();
    let (held, mut planned) = (Held::of(&texts.batch(), plan), Planned(plan.clone()));
    // The second batch goes with what the first has left, and is added to it.
    let mut nats = 0.0;
    model.clear(&mut gradients);
    for _ in 0..2 {
        let mut totals = model.totals().unwrap();
        let attention = Some(&mut planned as &mut dyn foveate_nn::ContextAttention);
        let batch = held.batch();
        model.accumulate_over(&batch, attention, &mut gradients, recompute, &mut totals).unwrap();
        nats = model.read(totals).unwrap().nats;
    }
    let loss = model.loss_over(&held.batch(), Some(&mut planned), None).unwrap();
    assert_eq!(loss.sum_nats, nats, "a loss alone");
    let mut all = vec![f32::NAN; model.layout().trained()];
    model.download(&gradients.array, 0, &mut all).unwrap();
    // No rank goes while another reads what it has.
    rank.all_gather(&[]).unwrap();
    (nats, all)
}

/// Held to the CPU, and to the same ranks once more.
fn held(carrier: Carrier, counts: &[usize]) {
    let [f32s, exact] = [ParameterState::F32, ParameterState::Exact];
    let biased = "softcap(20) then score + bias[h] * f32(kv - q) * 0.05";
    let cases = [
        (f32s, program("causal & document", Some(biased)), Recompute::None),
        (exact, program("causal & document", None), Recompute::Attention),
        (exact, program("causal & q - kv < 40", Some(biased)), Recompute::Full),
        (f32s, program("causal", Some("alibi")), Recompute::Mlp),
    ];
    let texts = Texts::new(&mut Random::new(6));
    for (number, (state, attention, recompute)) in cases.into_iter().enumerate() {
        let cpu = Model::new(config(true), &attention.clone().into(), 9).unwrap();
        let mut expected = Gradients::zeros(&cpu);
        let nats = cpu.forward_backward(&texts.batch(), &mut expected, recompute).unwrap().sum_nats;
        let exchanges = [0, 1, 2].map(How::Exchange);
        let all = [&[How::Gather], &exchanges[..], &[How::Heads]].concat();
        for (case, how) in all.into_iter().enumerate() {
            // There are two key/value heads.
            let ranks = if how == How::Heads { 2 } else { counts[(number + case) % counts.len()] };
            let heads = [HEADS.heads_q, HEADS.heads_kv];
            let plans = plans(ranks, how, [ROWS, LEN], CHUNK, &texts.documents, heads);
            let run = || -> Vec<(f64, Vec<f32>)> {
                std::thread::scope(|scope| {
                    let ranks = TestRank::all(ranks, carrier, DType::F32);
                    let (attention, texts) = (&attention, &texts);
                    let start = |(rank, plan): (TestRank, _)| {
                        scope
                            .spawn(move || on_rank(&rank, state, attention, plan, recompute, texts))
                    };
                    let threads: Vec<_> = ranks.into_iter().zip(&plans).map(start).collect();
                    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
                })
            };
            let found = run();
            let about = format!("{state:?}, {}, {how:?} on {ranks} ranks", attention.mask);
            assert!(found == run(), "{about}: other bits the second time");
            let narrow = state != f32s;
            let sum: f64 = found.iter().map(|(nats, _)| nats).sum();
            let off = (sum - nats).abs() / nats;
            println!("{about}: loss {off:.1e} off");
            assert!(off < if narrow { 5e-3 } else { 1e-5 }, "{about}: {sum}, not {nats}");
            for p in cpu.parameters() {
                let place = p.place.clone();
                let (mut off, mut of) = (0.0, 0.0);
                for (i, &own) in place.clone().zip(expected.of(p)) {
                    // Of two batches.
                    let sum: f64 = found.iter().map(|(_, all)| f64::from(all[i])).sum();
                    off += (sum - 2.0 * f64::from(own)).powi(2);
                    of += (2.0 * f64::from(own)).powi(2);
                }
                let (off, of) = (off.sqrt(), of.sqrt());
                let most = if narrow { 0.05 } else { 1e-4 };
                assert!(off <= most * of, "{about}: {} {off} of {of}", p.name);
            }
        }
    }
}

#[test]
fn ranks_that_share_rows_have_the_losses_and_gradients_of_one_by_copies() {
    match Cuda::available(0) {
        Ok(()) => held(Carrier::Auto, &[2, 3, 4]),
        Err(e) => println!("skipped: {e}"),
    }
}

#[test]
fn ranks_that_share_rows_on_two_gpus_have_the_losses_and_gradients_of_one_by_nccl() {
    match Device::count() {
        Ok(2..) => held(Carrier::Nccl, &[2]),
        Ok(_) => println!("skipped: there is one GPU, and NCCL takes one for each rank"),
        Err(e) => println!("skipped: {e}"),
    }
}
