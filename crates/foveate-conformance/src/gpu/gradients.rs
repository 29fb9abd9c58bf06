//! Gradients of several dtypes from one backward, as ranks that share rows have them: dq in that of q, and those of
//! keys in f32, which other ranks add to.

use std::sync::Arc;

use foveate_cuda::{CudaError, CudaOptions, DeviceBackward, DeviceTensor, Engine};
use foveate_gpu::driver::Allocation;
use foveate_tensor::{DType, Data};

use crate::gpu::checks::Outcome;
use crate::gpu::tensors::{Tensors, causal, dims};

/// dq in bf16 beside dk and dv in f32: the bits of a backward that gives all in f32, with dq rounded once.
pub fn of_two_dtypes(engine: &Arc<Engine>) -> Outcome {
    let (queue, dims) = (engine.queue(), dims(4, 300));
    let options = CudaOptions { deterministic: true, ..CudaOptions::default() };
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
    let numbers = dq.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let Data::BF16(rounded) = Data::from_f64(DType::BF16, numbers.map(f64::from)) else {
        unreachable!("made as bf16")
    };
    let rounded = rounded.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect();
    let wanted = [rounded, dk, dv];
    let wrong = ["dq", "dk", "dv"].iter().zip(wanted.iter().zip(&mixed)).find(|(_, (a, b))| a != b);
    Ok(match wrong {
        None => Ok(()),
        Some((name, _)) => Err(format!("{name} has other bits than beside a dq in f32")),
    })
}
