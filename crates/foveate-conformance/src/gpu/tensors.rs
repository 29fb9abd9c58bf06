//! Operands and results in device memory that the GPU's checks share.

use std::sync::Arc;

use foveate_cuda::choose::{KernelOptions, TileOptions};
use foveate_cuda::compile::config::Family;
use foveate_cuda::{
    CudaError, CudaOptions, CudaPlan, DeviceBackward, DeviceForward, DeviceOperands, DeviceTensor,
    Engine, Queue,
};
use foveate_gpu::driver::Allocation;
use foveate_mods::{MaskMod, expr};
use foveate_problem::{Dims, Spec};
use foveate_tensor::random::Random;
use foveate_tensor::{DType, Data};

/// Options that ask for a family of kernels by name, for each that this GPU runs: the planner would give such small
/// problems to one of them.
pub fn families(engine: &Engine) -> Vec<(&'static str, CudaOptions)> {
    let mut families = vec![Family::Portable];
    families.extend(engine.profile().runs_hopper().then_some(Family::Hopper));
    let options = |family: Family| {
        let asked = TileOptions { family: Some(family), ..TileOptions::default() };
        let kernels = KernelOptions {
            forward: asked,
            backward: asked,
            backward_dq: asked,
            ..KernelOptions::default()
        };
        (family.name(), CudaOptions { kernels, ..CudaOptions::default() })
    };
    families.into_iter().map(options).collect()
}

/// One batch entry, head dim 64.
pub fn dims(heads_q: usize, len: usize) -> Dims {
    Dims {
        batch: 1,
        heads_q,
        heads_kv: heads_q,
        len_q: len,
        len_k: len,
        dim: 64,
        dim_v: 64,
        shared_kv: false,
        packed: false,
    }
}

/// Operands and destinations of one problem on a queue.
pub struct Tensors {
    allocations: Vec<Allocation>,
    dims: Dims,
}

impl Tensors {
    pub fn new(queue: &Queue, dims: Dims, seed: u64) -> Result<Self, CudaError> {
        let mut random = Random::new(seed);
        let elems = dims.q_shape().iter().product();
        let mut allocations = Vec::new();
        for _ in 0..4 {
            allocations.push(queue.pool().upload(&bf16_bytes(&mut random, elems))?);
        }
        for bytes in [2 * elems, 4 * elems / dims.dim, 2 * elems, 2 * elems, 2 * elems] {
            let allocation = queue.pool().take(bytes)?;
            allocation.fill(0xFF)?;
            allocations.push(allocation);
        }
        Ok(Self { allocations, dims })
    }

    fn at(&self, i: usize) -> DeviceTensor {
        let address = self.allocations[i].address();
        DeviceTensor::contiguous(address, DType::BF16, self.dims.q_shape())
    }

    pub fn forward(&self) -> DeviceForward<'static> {
        let lse = self.allocations[5].address();
        DeviceForward {
            operands: DeviceOperands::new(self.at(0), self.at(1), self.at(2)),
            out: self.at(4),
            lse: DeviceTensor::contiguous(lse, DType::F32, self.dims.row_shape()),
            max_score: None,
        }
    }

    pub fn backward(&self) -> DeviceBackward<'static> {
        let DeviceForward { operands, out, lse, .. } = self.forward();
        DeviceBackward {
            operands,
            out,
            lse,
            d_out: self.at(3),
            d_lse: None,
            dq: Some(self.at(6)),
            dk: Some(self.at(7)),
            dv: Some(self.at(8)),
            accumulate: false,
            d_sink: None,
            d_captures: Vec::new(),
        }
    }

    /// Makes every result NaN.
    pub fn clear(&self) -> Result<(), CudaError> {
        Ok(self.allocations[4..].iter().try_for_each(|allocation| allocation.fill(0xFF))?)
    }

    /// The bytes of tensor `i`: q, k, v, d_out, out, lse, dq, dk, dv.
    pub fn read(&self, i: usize) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0; self.allocations[i].bytes()];
        self.allocations[i].read(&mut bytes, CudaOptions::default().timeout)?;
        Ok(bytes)
    }
}

/// A causal plan of bf16 operands.
pub fn causal(
    engine: &Arc<Engine>,
    dims: &Dims,
    options: CudaOptions,
) -> Result<CudaPlan, CudaError> {
    let mask = MaskMod::new(expr::q().ge(expr::kv()).dynamic()).expect("bool");
    let spec = Spec { mask: Some(mask), score: None, scale: None, dropout: None };
    CudaPlan::new(engine.clone(), &spec, dims, DType::BF16, options)
}

/// Random bf16 numbers, as they lie in memory.
pub fn bf16_bytes(random: &mut Random, elems: usize) -> Vec<u8> {
    let values = Data::from_f64(DType::BF16, (0..elems).map(|_| random.normal()));
    let Data::BF16(values) = values else { unreachable!("made as bf16") };
    values.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect()
}
