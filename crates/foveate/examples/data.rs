//! Data in and out: vectors become tensors without a copy and results are slices; a call may write
//! where the caller says, take a gradient of `lse`, and add to what is there.
//!
//! `cargo run -p foveate --example data`

use foveate::{
    Attention, Device, GradientsMut, Layout, Problem, Tensor, TensorMut, TensorRef, masks,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let wave = |len: usize| (0..len).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<f32>>();

    // A vector becomes a tensor [batch, heads, length, head dim]; nothing is copied.
    let q = Tensor::from_vec(wave(4 * 6 * 16), [1, 4, 6, 16])?;
    // Memory of other orders is a view: here the heads of a position lie side by side.
    let (keys, values) = (wave(6 * 2 * 16), wave(6 * 2 * 16));
    let order = Layout::bshd(1, 6, 2, 16);
    let (k, v) = (TensorRef::new(&keys, order)?, TensorRef::new(&values, order)?);

    let problem = Problem::of(&q, k, v)?;
    let plan = Attention::new().mask(masks::causal()).plan(&problem, &Device::cpu())?;
    let forward = plan.forward(&q, k, v)?;
    let out: &[f32] = forward.out.as_slice()?;
    println!("out of the first query: {:.3?} ...", &out[..4]);

    // The same into memory of one's own.
    let (mut own_out, mut own_lse) = (vec![0.0f32; out.len()], vec![0.0f32; 4 * 6]);
    plan.forward_call(&q, k, v).write_to(
        TensorMut::from_slice(&mut own_out, [1, 4, 6, 16])?,
        TensorMut::from_slice(&mut own_lse, [1, 4, 6])?,
    )?;
    assert_eq!(own_out, out);

    // A loss that depends on `lse` too, and the gradients of two parts of a batch added up.
    let d_out = Tensor::from_vec(wave(out.len()), [1, 4, 6, 16])?;
    let d_lse = Tensor::from_vec(vec![1e-3f32; 4 * 6], [1, 4, 6])?;
    let mut sum = plan.backward_call(&q, k, v, &forward, &d_out).d_lse(&d_lse).run()?;
    plan.backward_call(&q, k, v, &forward, &d_out).add_to(sum.view_mut()?)?;
    println!("dq of the first query:  {:.3?} ...", &sum.dq.as_slice::<f32>()?[..4]);

    // Gradients into memory of one's own, in the order of the keys and values above.
    let mut dq = vec![0.0f32; 4 * 6 * 16];
    let (mut dk, mut dv) = (vec![0.0f32; keys.len()], vec![0.0f32; values.len()]);
    plan.backward_call(&q, k, v, &forward, &d_out).write_to(GradientsMut::new(
        TensorMut::from_slice(&mut dq, [1, 4, 6, 16])?,
        TensorMut::new(&mut dk, order)?,
        TensorMut::new(&mut dv, order)?,
    ))?;
    println!("dv of the first key:    {:.3?} ...", &dv[..4]);
    Ok(())
}
