//! Calls that a GPU cannot run: one clear error each, and nothing corrupted. By every family of kernels that it runs.

#[path = "../../../foveate-cuda/tests/refusing/mod.rs"]
mod refusing;

use std::sync::Arc;

use foveate_cuda::{
    CudaErrorKind, CudaOptions, CudaPlan, DeviceForward, DeviceOperands, DeviceTensor, Engine,
};
use foveate_gpu::GpuErrorKind;
use foveate_mods::{Buffer, MaskMod, ScoreMod, expr};
use foveate_problem::Spec;
use foveate_tensor::DType;
use refusing::Refusing;

use crate::gpu::checks::{Outcome, expect_refusal, on_gpu};
use crate::gpu::tensors::{Tensors, causal, dims, families};

/// Runs all of it and prints a line for each check; whether all passed.
pub fn run() -> Result<bool, String> {
    on_gpu("misuse", |engine, checks| {
        for (family, options) in families(engine) {
            let mut say = |name: &str, outcome| checks.say(&format!("{family}: {name}"), outcome);
            say("wrong memory is named before anything runs", memory(engine, &options));
            say("a captured index out of range is reported", out_of_range(engine, &options));
            say("memory that is refused leaves results as they were", refused(engine, &options));
            say(
                "out of memory in a backward is an error, not the end",
                out_of_memory(engine, &options),
            );
            let name = format!("{family}: memory of another GPU is named");
            match Engine::get(1) {
                Ok(other) => checks.say(&name, other_device(engine, &other, &options)),
                Err(e) => checks.skip(&name, e),
            }
        }
    })
}

fn memory(engine: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    let dims = dims(2, 100);
    let plan = causal(engine, &dims, options.clone())?;
    let queue = engine.queue();
    let tensors = Tensors::new(queue, dims, 1)?;
    let good = tensors.forward();
    let host = vec![0u8; 2 * dims.q_shape().iter().product::<usize>()];
    let on_host = DeviceTensor { address: host.as_ptr() as u64, ..good.operands.k };
    let past = DeviceTensor { address: good.operands.v.address + (1 << 46), ..good.operands.v };
    let q = good.operands.q;
    let with = |operands| DeviceForward { operands, ..good };
    let asked = [
        (with(DeviceOperands { k: on_host, ..good.operands }), "k is at"),
        (with(DeviceOperands { v: past, ..good.operands }), "v is at"),
        (DeviceForward { out: q, ..good }, "out overlaps q"),
        (
            DeviceForward { out: DeviceTensor { address: good.out.address + 1, ..q }, ..good },
            "no multiple of the 2 bytes",
        ),
        (
            DeviceForward { out: DeviceTensor { dtype: DType::F64, ..good.out }, ..good },
            "out is f64; kernels write",
        ),
    ];
    for (args, expected) in asked {
        if let Err(wrong) = expect_refusal(plan.forward_on(queue, &args), expected) {
            return Ok(Err(wrong));
        }
    }
    let untouched = tensors.read(4)?.iter().all(|&byte| byte == 0xFF);
    plan.forward_on(queue, &good)?;
    let written = tensors.read(4)?.chunks_exact(2).all(|elem| elem != [0xFF; 2]);
    Ok(match (untouched, written) {
        (true, true) => Ok(()),
        (false, _) => Err("a refused call wrote something".into()),
        (_, false) => Err("the good call after it did not write everything".into()),
    })
}

/// Tensors of `other` given to a plan of `engine`, one at a time and all together, and a queue of
/// `other` given with tensors of `engine`.
fn other_device(engine: &Arc<Engine>, other: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    let dims = dims(2, 100);
    let plan = causal(engine, &dims, options.clone())?;
    let [here, there] = [engine, other].map(|e| Tensors::new(e.queue(), dims, 7));
    let (here, there) = (here?, there?);
    let (good, far) = (here.forward(), there.forward());
    let operands = DeviceOperands { v: far.operands.v, ..good.operands };
    let asked = [
        (DeviceForward { operands, ..good }, "v is on GPU 1"),
        (DeviceForward { out: far.out, ..good }, "out is on GPU 1"),
        (far, "q is on GPU 1"),
    ];
    for (args, expected) in asked {
        if let Err(wrong) = expect_refusal(plan.forward_on(engine.queue(), &args), expected) {
            return Ok(Err(wrong));
        }
    }
    let refused = plan.forward_on(other.queue(), &good);
    if let Err(wrong) = expect_refusal(refused, "the queue is of GPU 1") {
        return Ok(Err(wrong));
    }
    for tensors in [&here, &there] {
        if tensors.read(4)?.iter().any(|&byte| byte != 0xFF) {
            return Ok(Err("a refused call wrote something".into()));
        }
    }
    plan.forward_on(engine.queue(), &good)?;
    here.read(4)?;
    Ok(Ok(()))
}

fn out_of_range(engine: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    let dims = dims(2, 100);
    let bias = Buffer::vector("bias", vec![0.5f32; 70]);
    let doc = Buffer::vector("doc", vec![0i32; 90]);
    let score = ScoreMod::new((expr::score() + bias.at([expr::kv()])).dynamic()).expect("f32");
    let mask = MaskMod::new(doc.at([expr::q()]).ge(0).dynamic()).expect("bool");
    let none = Spec { mask: None, score: None, scale: None, dropout: None };
    let specs = [
        (Spec { score: Some(score), ..none.clone() }, "bias"),
        (Spec { mask: Some(mask), ..none }, "doc"),
    ];
    for (spec, name) in specs {
        let options = CudaOptions { checked: true, ..options.clone() };
        let plan = CudaPlan::new(engine.clone(), &spec, &dims, DType::BF16, options)?;
        let tensors = Tensors::new(engine.queue(), dims, 2)?;
        match plan.forward_on(engine.queue(), &tensors.forward()) {
            Err(e) if matches!(e.kind(), CudaErrorKind::OutOfRange { .. }) => {
                if !e.to_string().contains(name) {
                    return Ok(Err(format!("{e}, but `{name}` is too short")));
                }
            }
            Err(e) => return Ok(Err(e.to_string())),
            Ok(()) => return Ok(Err(format!("`{name}` is too short, and there was no error"))),
        }
        if tensors.read(4)?.chunks_exact(2).any(|elem| elem == [0xFF; 2]) {
            return Ok(Err("the results were not written".into()));
        }
    }
    Ok(Ok(()))
}

/// Both passes of a masked problem, each allocation refused in turn.
fn refused(engine: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    let dims = dims(4, 300);
    let tensors = Tensors::new(engine.queue(), dims, 5)?;
    for deterministic in [false, true] {
        let plan = causal(engine, &dims, CudaOptions { deterministic, ..options.clone() })?;
        tensors.clear()?;
        for (of, results) in [("forward", 4..6), ("backward", 6..9)] {
            for allowed in 0.. {
                let queue = engine.new_queue()?.with_allocator(Refusing::after(allowed, engine));
                let done = match of {
                    "forward" => plan.forward_on(&queue, &tensors.forward()),
                    _ => plan.backward_on(&queue, &tensors.backward()),
                };
                queue.stream().wait(options.timeout, "a pass without memory")?;
                match done {
                    Ok(()) if allowed == 0 => {
                        return Ok(Err(format!("a {of} asked for no memory")));
                    }
                    Ok(()) => break,
                    Err(e) if matches!(e.gpu(), Some(GpuErrorKind::OutOfMemory { .. })) => {}
                    Err(e) => return Ok(Err(format!("{of}: {e}, not an error for memory"))),
                }
                for i in results.clone() {
                    if tensors.read(i)?.iter().any(|&byte| byte != 0xFF) {
                        return Ok(Err(format!("a {of} without memory wrote results")));
                    }
                }
            }
        }
    }
    Ok(Ok(()))
}

fn out_of_memory(engine: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    let dims = dims(16, 8192);
    let plan = causal(engine, &dims, options.clone())?;
    let queue = engine.queue();
    let tensors = Tensors::new(queue, dims, 4)?;
    // Loads the kernels, which takes memory of the device too.
    plan.forward_on(queue, &tensors.forward())?;
    plan.backward_on(queue, &tensors.backward())?;
    queue.pool().release()?;
    let mut hogs = Vec::new();
    let mut step = 1usize << 36;
    while step >= 1 << 21 {
        match queue.pool().take(step) {
            Ok(allocation) => hogs.push(allocation),
            Err(_) => step /= 2,
        }
    }
    match plan.backward_on(queue, &tensors.backward()) {
        Err(e) if matches!(e.gpu(), Some(GpuErrorKind::OutOfMemory { .. })) => {}
        Err(e) => return Ok(Err(format!("{e}, not an error for memory"))),
        Ok(()) => return Ok(Err("no error with all memory taken".into())),
    }
    drop(hogs);
    queue.pool().release()?;
    plan.backward_on(queue, &tensors.backward())?;
    let whole = (6..9).map(|i| tensors.read(i)).collect::<Result<Vec<_>, _>>()?;
    let written = whole.iter().all(|t| t.chunks_exact(2).all(|elem| elem != [0xFF; 2]));
    Ok(if written { Ok(()) } else { Err("the backward after it left gaps".into()) })
}
