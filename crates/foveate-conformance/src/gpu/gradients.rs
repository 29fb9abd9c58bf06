//! Gradients of several dtypes from one backward, as ranks that share rows have them: dq in that of q, and those of
//! keys in f32, which other ranks add to.

use std::sync::Arc;

use foveate_cuda::{CudaError, CudaOptions, DeviceBackward, DeviceTensor, Engine};
use foveate_gpu::driver::Allocation;
use foveate_tensor::DType;
use half::bf16;

use crate::gpu::checks::Outcome;
use crate::gpu::determinism::numbers;
use crate::gpu::tensors::{Tensors, causal, dims};

/// dq in bf16 beside dk and dv in f32: the bits of a backward that gives all in f32, with dq rounded once.
pub fn of_two_dtypes(engine: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    let (queue, dims) = (engine.queue(), dims(4, 300));
    let options = CudaOptions { deterministic: true, ..options.clone() };
    let plan = causal(engine, &dims, options)?;
    let tensors = Tensors::new(queue, dims, 9)?;
    plan.forward_on(queue, &tensors.forward())?;
    let elems: usize = dims.q_shape().iter().product();
    let gradients = |dtypes: [DType; 3]| -> Result<[Vec<u8>; 3], CudaError> {
        let take = |dtype: DType| -> Result<Allocation, CudaError> {
            let memory = queue.pool().take(dtype.bytes() * elems)?;
            memory.fill(0xFF)?;
            Ok(memory)
        };
        let memory = dtypes.iter().map(|&dtype| take(dtype)).collect::<Result<Vec<_>, _>>()?;
        let at = |i: usize| {
            Some(DeviceTensor::contiguous(memory[i].address(), dtypes[i], dims.q_shape()))
        };
        let args = DeviceBackward { dq: at(0), dk: at(1), dv: at(2), ..tensors.backward() };
        plan.backward_on(queue, &args)?;
        let mut found = [0, 1, 2].map(|i| vec![0; memory[i].bytes()]);
        for (memory, bytes) in memory.iter().zip(&mut found) {
            memory.read(bytes, CudaOptions::default().timeout)?;
        }
        Ok(found)
    };
    let [dq, dk, dv] = gradients([DType::F32; 3])?;
    let mixed = gradients([DType::BF16, DType::F32, DType::F32])?;
    // Not by way of f64, of which `half` looks at the upper 32 bits only: some numbers beside a tie are ties to it.
    let dq = numbers(&dq, DType::F32).into_iter().map(bf16::from_f32);
    let rounded = dq.flat_map(|x| x.to_bits().to_le_bytes()).collect();
    let wanted = [rounded, dk, dv];
    let wrong = ["dq", "dk", "dv"].iter().zip(wanted.iter().zip(&mixed)).find(|(_, (a, b))| a != b);
    Ok(match wrong {
        None => Ok(()),
        Some((name, (wanted, found))) => {
            let dtype = if *name == "dq" { DType::BF16 } else { DType::F32 };
            let [wanted, found] = [wanted, found].map(|bytes| numbers(bytes, dtype));
            let differences = differences(&wanted, &found);
            Err(format!("{name} has other bits than beside a dq in f32: {differences}"))
        }
    })
}

/// How many numbers differ, where first, and how far at most, beside the largest.
fn differences(wanted: &[f32], found: &[f32]) -> String {
    let apart = |(a, b): (&f32, &f32)| if a == b { 0.0 } else { (a - b).abs() };
    let apart: Vec<f32> = wanted.iter().zip(found).map(apart).collect();
    let first = apart.iter().position(|apart| *apart != 0.0);
    let number = apart.iter().filter(|apart| **apart != 0.0).count();
    let most = |all: &[f32]| all.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    format!(
        "{number} of {} elements, the first {first:?}, by at most {:e} where the largest is {:e}",
        wanted.len(),
        most(&apart),
        most(wanted)
    )
}
