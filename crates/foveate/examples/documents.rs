//! The README's ten lines with everything around them: packed documents, a score with a learned
//! bias, a plan that takes other documents, gradients.
//!
//! `cargo run -p foveate --example documents`

use foveate::{
    Attention, Buffer, DType, Device, Problem, Tensor, mask_mod, masks, score_mod, scores,
};

#[mask_mod]
fn same_document(q: i32, kv: i32, doc: &Buffer<i32>) -> bool {
    doc[q] == doc[kv]
}

#[score_mod]
fn distance_bias(score: f32, h: i32, q: i32, kv: i32, bias: &Buffer<f32>, reach: i32) -> f32 {
    score + bias[[h, (q - kv).clamp(0, reach)]]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // [batch, heads, length, head dim]; two query heads share a key/value head.
    let wave = |[b, h, s, d]: [usize; 4]| ((b + 3 * h + 7 * s + 5 * d) as f64).sin();
    let q = Tensor::from_fn(DType::F32, [1, 4, 6, 16], wave);
    let k = Tensor::from_fn(DType::F32, [1, 2, 6, 16], wave);
    let (v, d_out) = (k.clone(), q.clone());

    // The document of each position, and a bias for each head and distance, to be learned.
    let doc = Buffer::vector("doc", vec![0, 0, 0, 1, 1, 1]);
    let bias = Buffer::learned("bias", &[4, 5], vec![0.0; 20])?;
    let program = Attention::new()
        .mask(masks::causal() & same_document(&doc))
        .score(scores::soft_cap(30.0)?.then(&distance_bias(&bias, 4)));

    let plan = program.plan(&Problem::of(&q, &k, &v)?, &Device::cpu())?;
    println!("{}", plan.explain());
    let forward = plan.forward(&q, &k, &v)?;
    let gradients = plan.backward(&q, &k, &v, &forward, &d_out)?;
    println!("out {:?}, lse {:?}", forward.out.shape(), forward.lse.shape());
    println!("gradient of the bias of head 0: {:.3?}", &gradients.captures["bias"][..5]);

    // The next batch has other documents: the same plan, another buffer.
    let next = plan.rebind(&Buffer::vector("doc", vec![0, 1, 1, 1, 1, 2]))?;
    assert_ne!(next.forward(&q, &k, &v)?.out, forward.out);
    Ok(())
}
