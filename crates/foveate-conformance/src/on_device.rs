//! What lies in device memory and is never seen by the host: the same bits as from the host, new
//! contents at once, and one clear error for what does not fit.

use std::sync::Arc;

use foveate_cuda::driver::Block;
use foveate_cuda::{
    CudaError, CudaErrorKind, CudaOptions, CudaPlan, DeviceArray, DeviceBackward, DeviceForward,
    DeviceOperands, Engine, Queue,
};
use foveate_mods::{AnyBuffer, Buffer, BufferData, MaskMod, ScoreMod, Type, expr};
use foveate_problem::Spec;
use foveate_tensor::DType;

use crate::checks::Outcome;
use crate::misuse::{Tensors, dims};

const LEN: usize = 300;

/// Causal inside documents, and a bias for each key.
fn spec(doc: AnyBuffer, bias: AnyBuffer) -> Result<Spec, CudaError> {
    let (doc, bias) = (Buffer::<i32>::from_any(doc)?, Buffer::<f32>::from_any(bias)?);
    let (q, kv) = (expr::q(), expr::kv());
    let mask = q.ge(kv.clone()) & doc.at([q.clone()]).eq(doc.at([kv.clone()]));
    let score = expr::score() + bias.at([kv]);
    let mask = Some(MaskMod::new(mask.dynamic())?);
    let score = Some(ScoreMod::new(score.dynamic())?);
    Ok(Spec { mask, score, scale: None, dropout: None })
}

/// Contents number `n` of both buffers, with `more` elements than there are keys.
fn contents(n: i32, more: usize) -> (Vec<i32>, Vec<f32>) {
    let all = 0..(LEN + more) as i32;
    let doc = all.clone().map(|i| i / (40 + 31 * n)).collect();
    (doc, all.map(|i| ((i * (7 + n)) % 13) as f32 * 0.25).collect())
}

/// Both passes, and the bytes of every result.
fn passes(
    plan: &CudaPlan,
    queue: &Queue,
    tensors: &Tensors,
    captures: &[(&str, DeviceArray<'_>)],
) -> Result<Vec<Vec<u8>>, CudaError> {
    tensors.clear()?;
    let DeviceForward { operands, out, lse, max_score } = tensors.forward();
    let operands = DeviceOperands { captures, ..operands };
    plan.forward_on(queue, &DeviceForward { operands, out, lse, max_score })?;
    plan.backward_on(queue, &DeviceBackward { operands, ..tensors.backward() })?;
    (4..9).map(|i| tensors.read(i)).collect()
}

/// Captured buffers in device memory against the same in the plan.
pub fn captures(engine: &Arc<Engine>) -> Outcome {
    let queue = engine.queue();
    let dims = dims(4, LEN);
    let options = CudaOptions { deterministic: true, ..CudaOptions::default() };
    let made = |spec: &Spec, options: &CudaOptions| {
        CudaPlan::new(engine.clone(), spec, &dims, DType::BF16, options.clone())
    };
    let tensors = Tensors::new(queue, dims, 8)?;
    let held = |n: i32, more| -> Result<Vec<Vec<u8>>, CudaError> {
        let (doc, bias) = contents(n, more);
        let len = [doc.len()];
        let doc = AnyBuffer::new("doc", &len, BufferData::I32(doc), false)?;
        let bias = AnyBuffer::new("bias", &len, BufferData::F32(bias), false)?;
        passes(&made(&spec(doc, bias)?, &options)?, queue, &tensors, &[])
    };
    let doc = AnyBuffer::on_device("doc", &[LEN], Type::I32, false)?;
    let bias = AnyBuffer::on_device("bias", &[LEN], Type::F32, false)?;
    let spec = spec(doc, bias)?;
    let plan = made(&spec, &options)?;
    let room = 4 * (LEN + 64);
    let (doc_at, bias_at) = (queue.pool().take(room)?, queue.pool().take(room)?);
    let write = |n: i32, more| -> Result<(), CudaError> {
        let (doc, bias) = contents(n, more);
        doc_at.write(&doc.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())?;
        bias_at.write(&bias.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    };
    let lengths = [[LEN], [LEN + 50]];
    let arrays = |longer: usize, version| {
        let array = |block: &Block, ty| DeviceArray {
            version,
            ..DeviceArray::new(block.address(), ty, &lengths[longer])
        };
        [("doc", array(&doc_at, Type::I32)), ("bias", array(&bias_at, Type::F32))]
    };
    for (what, n, longer, version) in [
        ("first contents", 0, 0, None),
        ("other contents", 1, 0, None),
        ("contents that are promised", 2, 0, Some(1)),
        ("the same contents again", 2, 0, Some(1)),
        ("the next version", 3, 0, Some(2)),
        ("longer buffers", 1, 1, None),
        ("the first length again", 0, 0, None),
    ] {
        write(n, 50 * longer)?;
        let found = passes(&plan, queue, &tensors, &arrays(longer, version))?;
        if found != held(n, 50 * longer)? {
            return Ok(Err(format!("{what}: not the bits of buffers in the plan")));
        }
    }
    if let Err(wrong) = refused(&plan, queue, &tensors, &arrays(0, None)) {
        return Ok(Err(wrong));
    }
    // Too short, where that is to be reported.
    let checked = made(&spec, &CudaOptions { checked: true, ..options })?;
    let short = [("doc", DeviceArray { shape: &[90], ..arrays(0, None)[0].1 }), arrays(0, None)[1]];
    match passes(&checked, queue, &tensors, &short) {
        Err(e) if matches!(e.kind(), CudaErrorKind::OutOfRange { .. }) => {
            Ok(if e.to_string().contains("`doc`") { Ok(()) } else { Err(e.to_string()) })
        }
        Err(e) => Err(e),
        Ok(_) => Ok(Err("`doc` is too short, and nothing was said".into())),
    }
}

/// Captured buffers that do not fit the plan.
fn refused(
    plan: &CudaPlan,
    queue: &Queue,
    tensors: &Tensors,
    [doc, bias]: &[(&str, DeviceArray<'_>); 2],
) -> Result<(), String> {
    let host = [0i32; LEN];
    let at = |address: u64| ("doc", DeviceArray { address, ..doc.1 });
    let of_type = ("doc", DeviceArray { ty: Type::F32, ..doc.1 });
    let of_rank = ("doc", DeviceArray { shape: &[1, LEN], ..doc.1 });
    let asked: [(&[(&str, DeviceArray<'_>)], &str); 8] = [
        (&[*bias], "captured buffer `doc` is in device memory; say where"),
        (&[*doc, *bias, ("dcos", doc.1)], "called `dcos`"),
        (&[*doc, *bias, *doc], "`doc` is said to be in two places"),
        (&[of_type, *bias], "the slot holds i32 with 1 axis, not f32 with 1 axis"),
        (&[of_rank, *bias], "the slot holds i32 with 1 axis, not i32 with 2 axes"),
        (&[at(doc.1.address + 2), *bias], "no multiple of the 4 bytes of i32"),
        (&[at(host.as_ptr() as u64), *bias], "captured buffer `doc` is at"),
        (&[at(tensors.forward().out.address), *bias], "out overlaps captured buffer `doc`"),
    ];
    for (captures, expected) in asked {
        let args = tensors.forward();
        let operands = DeviceOperands { captures, ..args.operands };
        match plan.forward_on(queue, &DeviceForward { operands, ..args }) {
            Err(e) if e.to_string().contains(expected) => {}
            Err(e) => return Err(format!("{e}, where `{expected}` was to be said")),
            Ok(()) => return Err(format!("nothing was said, not `{expected}`")),
        }
    }
    Ok(())
}
