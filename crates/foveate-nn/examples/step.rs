//! Times training steps of a small byte-level model and compares them with the rate of one
//! large matrix product on the same threads:
//! `cargo run --release -p foveate-nn --example step -- [rows] [len] [hidden] [layers]`.

use std::time::Instant;

use foveate_nn::{
    Batch, Gradients, Matrix, Model, ModelConfig, NnError, ProgramConfig, Recompute, matmul,
};

fn main() -> Result<(), NnError> {
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let get = |i: usize, otherwise: usize| given.get(i).copied().unwrap_or(otherwise);
    let (rows, len, hidden, layers) = (get(0, 8), get(1, 512), get(2, 192), get(3, 6));
    let config = ModelConfig {
        vocab_size: 256,
        hidden_size: hidden,
        intermediate_size: hidden * 8 / 3,
        num_hidden_layers: layers,
        num_attention_heads: hidden / 32,
        num_key_value_heads: Some(hidden / 64),
        head_dim: Some(32),
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        rope_pairing: Default::default(),
        max_position_embeddings: len,
        tie_word_embeddings: true,
        architecture: Default::default(),
    };
    let attention = ProgramConfig { mask: "causal & document".into(), ..Default::default() }.into();
    let model = Model::new(config, &attention, 1)?;
    let n = rows * len;
    let tokens: Vec<u32> = (0..n).map(|i| (i * i % 251) as u32).collect();
    let labels: Vec<i32> = (0..n).map(|i| (i * 7 % 251) as i32).collect();
    let documents: Vec<i32> = (0..n).map(|i| (i % len / 200) as i32).collect();
    let positions: Vec<i32> = (0..n).map(|i| (i % len % 200) as i32).collect();
    let batch = Batch {
        rows,
        len,
        tokens: &tokens,
        labels: &labels,
        documents: &documents,
        positions: &positions,
        live_pairs: &[],
        order: &[],
    };

    let peak = product_rate();
    let mut gradients = Gradients::zeros(&model);
    model.forward_backward(&batch, &mut gradients, Recompute::None)?;
    let steps = 8;
    let (mut best, mut attention) = (f64::INFINITY, 0.0);
    for _ in 0..steps {
        let loss = model.forward_backward(&batch, &mut gradients, Recompute::None)?;
        if loss.seconds < best {
            let blocks = loss.blocks.expect("a CPU takes times");
            (best, attention) = (loss.seconds, blocks.attention);
        }
    }
    let linear = model.config().flops_per_token(0.0).linear * n as f64;
    println!("parameters      {:>10}", model.config().parameter_count());
    println!("matrix product  {:>10.1} GFLOP/s", peak / 1e9);
    println!("step            {:>10.1} ms, {:.0} tokens/s", best * 1e3, n as f64 / best);
    println!("  attention     {:>10.1} ms", attention * 1e3);
    println!("  linear bound  {:>10.1} ms", linear / peak * 1e3);
    println!("bound / step    {:>10.2}", linear / peak / best);
    println!("  no attention  {:>10.2}", linear / peak / (best - attention));
    Ok(())
}

/// Operations a second of a product of 1536 × 1536 matrices.
fn product_rate() -> f64 {
    let n = 1536;
    let (a, b, mut c) = (vec![0.5; n * n], vec![0.25; n * n], vec![0.0; n * n]);
    let once = |c: &mut Vec<f32>| {
        let start = Instant::now();
        matmul([n; 3], Matrix::rows(&a, n), Matrix::transposed(&b, n), c, n, false);
        start.elapsed().as_secs_f64()
    };
    let best = (0..6).map(|_| once(&mut c)).fold(f64::INFINITY, f64::min);
    2.0 * (n as f64).powi(3) / best
}
