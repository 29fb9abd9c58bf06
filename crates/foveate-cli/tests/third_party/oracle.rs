//! A Llama forward pass in f64 as its papers describe it: one token after another, no tiles, no
//! packing, no cache. It shares nothing with the crates under test.

use crate::folder::{Sizes, VOCAB, Weights};

const EPS: f64 = 1e-5;

/// `weight [out, in] · x`.
fn linear(weight: &[f64], x: &[f64]) -> Vec<f64> {
    weight.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn rms_norm(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + EPS).sqrt() * w).collect()
}

/// The angle a pair turns by at each position.
fn frequency(s: &Sizes, pair: usize) -> f64 {
    let plain = s.theta.powf(-2.0 * pair as f64 / s.dim as f64);
    let Some([factor, low, high, original]) = s.llama3 else { return plain };
    let wavelength = std::f64::consts::TAU / plain;
    if wavelength < original / high {
        plain
    } else if wavelength > original / low {
        plain / factor
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * plain / factor + smooth * plain
    }
}

/// Turns component `i` with component `i + dim/2`.
fn rotate(s: &Sizes, head: &mut [f64], position: usize) {
    let half = s.dim / 2;
    for i in 0..half {
        let (sin, cos) = (position as f64 * frequency(s, i)).sin_cos();
        let (a, b) = (head[i], head[i + half]);
        (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
    }
}

/// The logits after every token, `[tokens][vocab]`.
pub fn logits(s: &Sizes, weights: &Weights, tokens: &[u32]) -> Vec<Vec<f64>> {
    let embedding = &weights["model.embed_tokens.weight"];
    let row = |&t: &u32| embedding[t as usize * s.hidden..][..s.hidden].to_vec();
    let mut stream: Vec<Vec<f64>> = tokens.iter().map(row).collect();
    for layer in 0..s.layers {
        let of = |name: &str| weights[&format!("model.layers.{layer}.{name}.weight")].as_slice();
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in stream.iter_mut().enumerate() {
            let normed = rms_norm(x, of("input_layernorm"));
            let mut q = linear(of("self_attn.q_proj"), &normed);
            let mut k = linear(of("self_attn.k_proj"), &normed);
            q.chunks_mut(s.dim).for_each(|head| rotate(s, head, position));
            k.chunks_mut(s.dim).for_each(|head| rotate(s, head, position));
            keys.push(k);
            values.push(linear(of("self_attn.v_proj"), &normed));
            let mut attended = Vec::new();
            for h in 0..s.heads {
                let at = h / (s.heads / s.kv_heads) * s.dim;
                let query = &q[h * s.dim..][..s.dim];
                let score = |k: &Vec<f64>| -> f64 {
                    let dot: f64 = query.iter().zip(&k[at..]).map(|(q, k)| q * k).sum();
                    (dot / (s.dim as f64).sqrt()).exp()
                };
                let p: Vec<f64> = keys.iter().map(score).collect();
                let total: f64 = p.iter().sum();
                attended.extend((0..s.dim).map(|d| {
                    p.iter().zip(&values).map(|(p, v)| p * v[at + d]).sum::<f64>() / total
                }));
            }
            let out = linear(of("self_attn.o_proj"), &attended);
            x.iter_mut().zip(out).for_each(|(x, y)| *x += y);
            let normed = rms_norm(x, of("post_attention_layernorm"));
            let (gate, up) =
                (linear(of("mlp.gate_proj"), &normed), linear(of("mlp.up_proj"), &normed));
            let wide: Vec<f64> =
                gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let out = linear(of("mlp.down_proj"), &wide);
            x.iter_mut().zip(out).for_each(|(x, y)| *x += y);
        }
    }
    let head = if s.tied { embedding } else { &weights["lm_head.weight"] };
    stream.iter().map(|x| linear(head, &rms_norm(x, &weights["model.norm.weight"]))).collect()
}

/// The loss of each token after the first, in nats.
pub fn losses(s: &Sizes, weights: &Weights, tokens: &[u32]) -> Vec<f64> {
    let all = logits(s, weights, tokens);
    let loss = |(logits, &next): (&Vec<f64>, &u32)| {
        logits.iter().map(|l| l.exp()).sum::<f64>().ln() - logits[next as usize]
    };
    all.iter().zip(&tokens[1..]).map(loss).collect()
}

/// What always taking the likeliest token writes after `tokens`.
pub fn greedy(
    s: &Sizes,
    weights: &Weights,
    tokens: &[u32],
    count: usize,
    stop: &[u32],
) -> Vec<u32> {
    let mut all = tokens.to_vec();
    for _ in 0..count {
        let last = logits(s, weights, &all).pop().unwrap();
        let best = (0..VOCAB).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap() as u32;
        if stop.contains(&best) {
            break;
        }
        all.push(best);
    }
    all.split_off(tokens.len())
}
