//! The device memory that steps of a model take, beside what the dry run says of it.
//!
//! ```text
//! cargo run --release -p foveate-nn-cuda --example memory -- 8b int8_moments mlp 1 8192 in_backward
//! ```
//!
//! Model (135m, 1b, 3b, 8b), state, what is recomputed, rows, tokens of a row, and whether parameters are
//! updated in the backward pass. Weights and tokens are made up.

mod models;

use std::error::Error;
use std::time::Instant;

use foveate_nn::{
    AdamW, Batch, Blocks, Model, OptimizerStep, ParameterState, ProgramConfig, Recompute, Rule,
    StepKind, Training, Treatment,
};
use foveate_nn_cuda::Cuda;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, state, recompute, rows, len, rest @ ..] = &args[..] else {
        return Err("model, state, recompute, rows, tokens of a row and maybe in_backward".into());
    };
    let config = models::sizes(name)?;
    let state = ParameterState::ALL.into_iter().find(|known| known.name() == state);
    let state = state.ok_or("there is no such state")?;
    let recompute = Recompute::ALL.into_iter().find(|known| known.name() == recompute);
    let recompute = recompute.ok_or("there is no such mode of recomputation")?;
    let (rows, len): (usize, usize) = (rows.parse()?, len.parse()?);
    let in_backward = rest.iter().any(|arg| arg == "in_backward");

    let mut cuda = Cuda::new(0, state.into(), true)?;
    let before = cuda.free_bytes()?.unwrap_or_default();
    println!("{}, {:.2} GiB free", cuda.name(), gib(before));
    let attention = ProgramConfig { mask: "causal & document".into(), ..ProgramConfig::default() };
    let training = Training { in_backward, ..recompute.into() };
    let kind = StepKind::Training(training);
    let account =
        config.dry_run_on(&cuda, &attention.clone().into(), &|_| false, rows, len, kind)?;
    let memory = account.memory();
    let said = memory.weights + memory.gradients + memory.optimizer + memory.activations;
    println!(
        "dry run: weights and masters {:.2}, gradients {:.2}, moments {:.2}, activations {:.2}: \
         {:.2} GiB",
        gib(memory.weights),
        gib(memory.gradients),
        gib(memory.optimizer),
        gib(memory.activations),
        gib(said)
    );
    let began = Instant::now();
    let mut model = Model::unfilled_on(cuda, config, &attention.into())?;
    models::fill(&mut model)?;
    println!("weights made up in {:.1} s", began.elapsed().as_secs_f64());
    let rule = Rule::AdamW(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
    let mut moments = model.moments(&rule)?;
    let mut whole = if in_backward { None } else { Some(model.gradients()?) };
    let mut passing = if in_backward { Some(model.passing_gradients()?) } else { None };
    let (spans, groups) = (model.spans(Treatment::of)?, model.group_spans(Treatment::of)?);
    let (count, vocab) = (rows * len, model.config().vocab_size);
    for step in 1..=4u64 {
        let word = |i: usize| (i * 2_654_435_761 + step as usize * 97) % vocab;
        let tokens: Vec<u32> = (0..count).map(|i| word(i) as u32).collect();
        let labels: Vec<i32> = (1..=count).map(|i| word(i) as i32).collect();
        let positions: Vec<i32> = (0..count).map(|i| (i % len) as i32).collect();
        let batch = Batch {
            rows,
            len,
            tokens: &tokens,
            labels: &labels,
            documents: &vec![0; count],
            positions: &positions,
            live_pairs: &[(count * len / 2) as f64],
            order: &[],
        };
        let of_step = OptimizerStep { rule, step, rate: 1e-4, clip_norm: 0.0, seed: 1 };
        let began = Instant::now();
        let mut totals = model.totals()?;
        match (&mut whole, &mut passing) {
            (Some(all), _) => {
                model.clear(all);
                model.accumulate(&batch, all, recompute, &mut totals)?;
                model.update(&of_step, &spans, all, &mut moments, &mut totals)?;
            }
            (None, Some(some)) => {
                let kept = &mut moments;
                model.step_in_backward(
                    &batch,
                    None,
                    some,
                    recompute,
                    &of_step,
                    &groups,
                    kept,
                    &mut totals,
                )?;
            }
            (None, None) => unreachable!("one of both is there"),
        }
        let sums = model.read(totals)?;
        let seconds = began.elapsed().as_secs_f64();
        let taken = before - model.free_bytes()?.unwrap_or_default();
        println!(
            "step {step}: {:.0} ms, {:.0} tokens/s, loss {:.4}, norm {:.3}; {:.2} GiB taken, {:+.2} \
             beside the dry run",
            seconds * 1e3,
            count as f64 / seconds,
            sums.nats / count as f64,
            sums.grad_norm,
            gib(taken),
            gib(taken) - gib(said)
        );
    }
    Ok(())
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
