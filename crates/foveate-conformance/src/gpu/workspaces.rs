//! Memory that passes take for themselves holds what was there before: NaN in all of it changes no bit.

use std::sync::{Arc, Mutex, PoisonError};

use foveate_cuda::compile::config::Family;
use foveate_cuda::{CudaOptions, CudaPlan, Engine};
use foveate_gpu::GpuError;
use foveate_gpu::abi::Address;
use foveate_gpu::driver::{Allocation, Allocator};
use foveate_mods::{MaskMod, ScoreMod, expr, scores};
use foveate_problem::Spec;
use foveate_tensor::DType;

use crate::gpu::checks::Outcome;
use crate::gpu::determinism::numbers;
use crate::gpu::tensors::{Tensors, dims};

/// Gives memory of the engine's own pool, every byte of which is this one.
#[derive(Debug)]
struct Filled {
    byte: u8,
    engine: Arc<Engine>,
    parts: Mutex<Vec<Allocation>>,
}

// SAFETY: the engine's own pool gives the memory, which is kept for as long as the allocator is there.
unsafe impl Allocator for Filled {
    fn allocate(&self, bytes: usize, _: usize) -> Result<Address, GpuError> {
        let memory = self.engine.queue().pool().take(bytes + 256)?;
        memory.fill(self.byte)?;
        self.engine.queue().stream().wait(CudaOptions::default().timeout, "memory to be filled")?;
        let address = memory.address().next_multiple_of(256);
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        Ok(address)
    }

    // What was given is not given again before all work on it is done.
    unsafe fn free(&self, _: Address, _: usize, _: usize) {}
}

/// Both passes of a score under a mask, with memory of zeros and with memory of NaN, by mask bits too where the family
/// has them.
pub fn dirty(engine: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    let dims = dims(4, 300);
    let mask = MaskMod::new((expr::q().ge(expr::kv()) & (expr::q() - expr::kv()).ne(7)).dynamic());
    let mask = mask.expect("bool");
    let scores: [Option<ScoreMod>; 2] = [None, Some(scores::soft_cap(30.0)?)];
    let mut variants = vec![options.clone()];
    if options.kernels.forward.family == Some(Family::Hopper) {
        let mut by_bits = options.clone();
        by_bits.kernels.forward.mask_bits = Some(true);
        by_bits.kernels.backward.mask_bits = Some(true);
        variants.push(by_bits);
    }
    for (score, deterministic) in scores.iter().flat_map(|score| [(score, false), (score, true)]) {
        let spec = Spec { mask: Some(mask.clone()), score: score.clone(), ..Spec::default() };
        for options in &variants {
            let options = CudaOptions { deterministic, ..options.clone() };
            let mut found = Vec::new();
            for byte in [0, 0xFF] {
                let plan =
                    CudaPlan::new(engine.clone(), &spec, &dims, DType::BF16, options.clone())?;
                let filled = Filled { byte, engine: engine.clone(), parts: Mutex::default() };
                let queue = engine.new_queue()?.with_allocator(Arc::new(filled));
                let tensors = Tensors::new(engine.queue(), dims, 19)?;
                engine.queue().stream().wait(options.timeout, "operands")?;
                plan.forward_on(&queue, &tensors.forward())?;
                plan.backward_on(&queue, &tensors.backward())?;
                queue.stream().wait(options.timeout, "a pass with memory that was used")?;
                found.push((4..9).map(|i| tensors.read(i)).collect::<Result<Vec<_>, _>>()?);
            }
            let [zeros, nan] = &found[..] else { unreachable!("twice") };
            for (i, name) in ["out", "lse", "dq", "dk", "dv"].into_iter().enumerate() {
                // Parts of dq come in any order, if they need not be in one.
                let any_order = name == "dq" && !deterministic;
                let is_nan = |bytes: &[u8]| numbers(bytes, DType::BF16).iter().any(|x| x.is_nan());
                if if any_order { is_nan(&nan[i]) } else { zeros[i] != nan[i] } {
                    return Ok(Err(format!("{name} depends on what memory held before")));
                }
            }
        }
    }
    Ok(Ok(()))
}
