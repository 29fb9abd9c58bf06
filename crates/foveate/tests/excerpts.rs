//! The Rust that README and the manual of the GPU show without what surrounds it, whole here: what
//! they show runs or, where it needs a GPU, compiles. A test of the documentation in `foveate-cli`
//! compares them with this file; other manuals show whole programs, which are tests themselves.

use foveate::cuda::{DeviceArray, DeviceOffsets, DeviceOperands, DeviceTensor};
use foveate::{
    Attention, Buffer, Device, ElementType, Layout, Problem, Tensor, TensorMut, TensorRef, masks,
};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn wave(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.37).sin()).collect()
}

#[test]
fn ten_lines() -> Outcome {
    let tensor = |heads| Tensor::from_vec(wave(heads * 6 * 16), [1, heads, 6, 16]);
    let (q, k, v, d_out) = (tensor(4)?, tensor(2)?, tensor(2)?, tensor(4)?);
    let doc = Buffer::vector("doc", vec![0, 0, 0, 1, 1, 1]);

    use foveate::{Attention, Buffer, Device, Problem, mask_mod, masks, scores};

    #[mask_mod]
    fn same_document(q: i32, kv: i32, doc: &Buffer<i32>) -> bool {
        doc[q] == doc[kv]
    }

    let program =
        Attention::new().mask(masks::causal() & same_document(&doc)).score(scores::soft_cap(30.0)?);

    let plan = program.plan(&Problem::of(&q, &k, &v)?, &Device::cpu())?;
    println!("{}", plan.explain());
    let forward = plan.forward(&q, &k, &v)?; // out, lse
    let gradients = plan.backward(&q, &k, &v, &forward, &d_out)?; // dq, dk, dv, captures

    // The first query of a document sees itself alone.
    let value = &v.as_slice::<f32>()?[3 * 16..][..16];
    assert_eq!(&forward.out.as_slice::<f32>()?[3 * 16..][..16], value);
    assert!(gradients.dq.to_f64().iter().any(|&x| x != 0.0));
    Ok(())
}

#[test]
fn data_in_and_out() -> Outcome {
    let (numbers, keys, values) = (wave(4 * 6 * 16), wave(6 * 2 * 16), wave(6 * 2 * 16));
    let d_out = Tensor::from_vec(wave(4 * 6 * 16), [1, 4, 6, 16])?;
    let d_lse = Tensor::from_vec(vec![1e-3f32; 4 * 6], [1, 4, 6])?;
    let (mut own_out, mut own_lse) = (vec![0.0f32; 4 * 6 * 16], vec![0.0f32; 4 * 6]);

    let q = Tensor::from_vec(numbers, [1, 4, 6, 16])?; // Vec<f32>, f16, bf16 or f64
    let k = TensorRef::new(&keys, Layout::bshd(1, 6, 2, 16))?; // heads side by side
    let v = TensorRef::new(&values, Layout::bshd(1, 6, 2, 16))?;
    let plan =
        Attention::new().mask(masks::causal()).plan(&Problem::of(&q, k, v)?, &Device::cpu())?;
    let forward = plan.forward(&q, k, v)?;
    let out: &[f32] = forward.out.as_slice()?;
    {
        let own_out = TensorMut::from_slice(&mut own_out, [1, 4, 6, 16])?;
        let own_lse = TensorMut::from_slice(&mut own_lse, [1, 4, 6])?;
        plan.forward_call(&q, k, v).write_to(own_out, own_lse)?; // own destinations
    }
    let mut sum = plan.backward_call(&q, k, v, &forward, &d_out).d_lse(&d_lse).run()?;
    let once = sum.dv.to_f64();
    plan.backward_call(&q, k, v, &forward, &d_out).add_to(sum.view_mut()?)?; // accumulation

    assert_eq!(own_out, out);
    // `lse` does not depend on the values, so their gradient is the same in both calls.
    let twice = sum.dv.to_f64();
    assert!(once.iter().zip(twice).all(|(once, twice)| 2.0 * once == twice));
    Ok(())
}

/// Tensors in device memory: q, k, v and `out`.
type Tensors = [DeviceTensor; 4];

#[allow(clippy::missing_safety_doc, reason = "the manual's code states the promise at the call")]
unsafe fn on_a_stream(
    (program, problem): (&Attention, Problem),
    [q, k, v, out]: Tensors,
    lse: DeviceTensor<3>,
    stream: usize,
) -> Outcome {
    use foveate::cuda::{DeviceForward, DeviceOperands, Engine};

    let plan = program.plan(&problem, &Device::cuda(0))?;
    let engine = Engine::get(0)?;
    // SAFETY: PyTorch keeps its stream while the queue is in use.
    let queue = unsafe { engine.queue_on(stream) }; // or engine.queue(), a stream of our own
    plan.cuda().expect("planned for a GPU").forward_on(
        &queue,
        &DeviceForward { operands: DeviceOperands::new(q, k, v), out, lse, max_score: None },
    )?;
    Ok(())
}

fn captured([q, k, v, _]: Tensors, (address, len, step): (u64, usize, u64)) -> Outcome {
    let shape = [len];
    let doc = Buffer::<i32>::on_device("doc", &shape)?;
    let program = Attention::new().mask(masks::causal() & masks::document(&doc)?);
    println!("{program:?}");
    let doc =
        DeviceArray { version: Some(step), ..DeviceArray::new(address, ElementType::I32, &shape) };
    let operands = DeviceOperands { captures: &[("doc", doc)], ..DeviceOperands::new(q, k, v) };
    println!("{operands:?}");
    Ok(())
}

fn varlen([q, k, v, _]: Tensors, (cu_q, cu_k, sequences): (u64, u64, usize)) {
    let count = [sequences + 1];
    let array = |address| DeviceArray::new(address, ElementType::I32, &count);
    let offsets =
        DeviceOffsets { q: array(cu_q), k: array(cu_k), longest_q: 4096, longest_k: 4096 };
    let operands = DeviceOperands { varlen: Some(offsets.into()), ..DeviceOperands::new(q, k, v) };
    println!("{operands:?}");
}

/// The addresses are nobody's: nothing is queued with them.
#[test]
fn operands_in_device_memory() -> Outcome {
    let _: unsafe fn(_, _, _, _) -> _ = on_a_stream;
    let tensor = DeviceTensor::contiguous(4096, foveate::DType::BF16, [1, 2, 8, 16]);
    captured([tensor; 4], (4096, 8, 1))?;
    varlen([tensor; 4], (4096, 8192, 3));
    Ok(())
}
