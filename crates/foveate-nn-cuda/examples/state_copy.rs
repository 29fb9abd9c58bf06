//! How long a copy of weights and moments to the memory of the host holds the thread that queues steps, beside
//! reading the same as f32 numbers into new memory, in turns.
//!
//! ```text
//! cargo run --release -p foveate-nn-cuda --example state_copy -- 1b exact
//! ```
//!
//! Model (135m, 1b, 3b, 8b), and the state of a GPU, or `cpu`. Weights and moments are made up.

mod models;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use foveate_nn::{
    AdamW, Array, Blocks, Cpu, Model, ModelConfig, Moment, Moments, NnError, ParameterState,
    ProgramConfig, Rule, StateMemory,
};
use foveate_nn_cuda::Cuda;

const ROUNDS: usize = 5;

/// Masters and moments as f32 numbers in new memory.
fn read<B: Blocks>(
    model: &Model<B>,
    moments: &Moments<B::Array>,
) -> Result<Vec<Vec<f32>>, NnError> {
    let layout = model.layout();
    let mut masters = vec![0.0; layout.elems()];
    model.masters(0, &mut masters)?;
    let mut all = vec![masters];
    for (moment, array) in [(Moment::Mean, &moments.mean), (Moment::Square, &moments.square)] {
        if array.elems() > 0 {
            let mut values = vec![0.0; layout.trained()];
            model.download_moment(moment, array, 0, &mut values)?;
            all.push(values);
        }
    }
    Ok(all)
}

fn measure<B: Blocks>(blocks: B, config: ModelConfig) -> Result<(), NnError> {
    let attention = ProgramConfig { mask: "causal".into(), ..Default::default() };
    let mut model = Model::unfilled_on(blocks, config, &attention.into())?;
    models::fill(&mut model)?;
    let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let rule = Rule::AdamW(adamw);
    let moments = model.moments(&rule)?;
    let all: Vec<_> = std::iter::once(0..model.layout().elems()).collect();
    let bytes = model.state_bytes(&rule, &all)?;
    let memory = Arc::new(model.state_memory());
    let making = Instant::now();
    memory.reserve(bytes, &AtomicBool::new(false))?;
    println!("{:.2} GB of memory made in {:.3} s", bytes as f64 * 1e-9, seconds(making));
    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        let reading = Instant::now();
        let values = read(&model, &moments)?;
        let read = seconds(reading);
        drop(values);
        let copying = Instant::now();
        let copy = model.copy_state(&moments, &all, &memory)?;
        let held = seconds(copying);
        copy.wait()?;
        let there = seconds(copying);
        let rate = bytes as f64 * 1e-9 / there;
        println!(
            "round {round}: read in {read:.3} s; held for {held:.4} s, there in {there:.3} s \
             ({rate:.1} GB/s)"
        );
        ratios.push(read / held);
    }
    ratios.sort_by(f64::total_cmp);
    println!("a copy holds the thread 1/{:.1} as long (median)", ratios[ROUNDS / 2]);
    Ok(())
}

fn seconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64()
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, state] = &args[..] else { return Err("model and state, or `cpu`".into()) };
    let config = models::sizes(name)?;
    if state == "cpu" {
        return Ok(measure(Cpu::default(), config)?);
    }
    let state = ParameterState::ALL.into_iter().find(|known| known.name() == state);
    let state = state.ok_or("there is no such state")?;
    Ok(measure(Cuda::new(0, state.into(), true)?, config)?)
}
