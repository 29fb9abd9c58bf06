//! Captured buffers and offsets in device memory, whose contents the host never sees: the same bits
//! as from the host, new contents at once, and one clear error for what does not fit.

use std::sync::Arc;

use foveate_cuda::{
    CudaError, CudaErrorKind, CudaOptions, CudaPlan, DeviceArray, DeviceBackward, DeviceForward,
    DeviceOffsets, DeviceOperands, DeviceVarlen, ElementType, Engine, Queue,
};
use foveate_gpu::driver::{Allocation, Graph};
use foveate_mods::{AnyBuffer, Buffer, BufferData, MaskMod, ScoreMod, Type, expr, masks};
use foveate_problem::{Dims, Spec};
use foveate_tensor::{DType, Varlen};

use crate::gpu::checks::{Outcome, expect_refusal};
use crate::gpu::tensors::{Tensors, dims};

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
    operands: DeviceOperands<'_>,
) -> Result<Vec<Vec<u8>>, CudaError> {
    tensors.clear()?;
    queue_passes(plan, queue, tensors, operands)?;
    (4..9).map(|i| tensors.read(i)).collect()
}

fn queue_passes(
    plan: &CudaPlan,
    queue: &Queue,
    tensors: &Tensors,
    operands: DeviceOperands<'_>,
) -> Result<(), CudaError> {
    plan.forward_on(queue, &DeviceForward { operands, ..tensors.forward() })?;
    plan.backward_on(queue, &DeviceBackward { operands, ..tensors.backward() })
}

/// Checks that a forward on these operands is refused with words that `expected` is part of.
fn refuses(
    plan: &CudaPlan,
    queue: &Queue,
    tensors: &Tensors,
    operands: DeviceOperands<'_>,
    expected: &str,
) -> Result<(), String> {
    let args = DeviceForward { operands, ..tensors.forward() };
    expect_refusal(plan.forward_on(queue, &args), expected)
}

fn bytes<const N: usize, T>(numbers: &[T], of: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    numbers.iter().flat_map(of).collect()
}

/// Captured buffers in device memory against the same in the plan.
pub fn captures(engine: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    let queue = engine.queue();
    let dims = dims(4, LEN);
    let options = CudaOptions { deterministic: true, ..options.clone() };
    let made = |spec: &Spec, options: &CudaOptions| {
        CudaPlan::new(engine.clone(), spec, &dims, DType::BF16, options.clone())
    };
    let tensors = Tensors::new(queue, dims, 8)?;
    let held = |n: i32, more| -> Result<Vec<Vec<u8>>, CudaError> {
        let (doc, bias) = contents(n, more);
        let len = [doc.len()];
        let doc = AnyBuffer::new("doc", &len, BufferData::I32(doc), false)?;
        let bias = AnyBuffer::new("bias", &len, BufferData::F32(bias), false)?;
        passes(&made(&spec(doc, bias)?, &options)?, queue, &tensors, all(&tensors, &[]))
    };
    let doc = AnyBuffer::on_device("doc", &[LEN], Type::I32, false)?;
    let bias = AnyBuffer::on_device("bias", &[LEN], Type::F32, false)?;
    let spec = spec(doc, bias)?;
    let plan = made(&spec, &options)?;
    let most = 4 * (LEN + 64);
    let (doc_at, bias_at) = (queue.pool().take(most)?, queue.pool().take(most)?);
    let write = |n: i32, more| -> Result<(), CudaError> {
        let (doc, bias) = contents(n, more);
        doc_at.write(&bytes(&doc, |x| x.to_le_bytes()))?;
        Ok(bias_at.write(&bytes(&bias, |x| x.to_le_bytes()))?)
    };
    let lengths = [[LEN], [LEN + 50]];
    let arrays = |longer: usize, version| {
        let array = |buffer: &Allocation, ty| DeviceArray {
            version,
            ..DeviceArray::new(buffer.address(), ty, &lengths[longer])
        };
        [("doc", array(&doc_at, ElementType::I32)), ("bias", array(&bias_at, ElementType::F32))]
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
        let found = passes(&plan, queue, &tensors, all(&tensors, &arrays(longer, version)))?;
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
    match passes(&checked, queue, &tensors, all(&tensors, &short)) {
        Err(e) if matches!(e.kind(), CudaErrorKind::OutOfRange { .. }) => {
            Ok(if e.to_string().contains("`doc`") { Ok(()) } else { Err(e.to_string()) })
        }
        Err(e) => Err(e),
        Ok(_) => Ok(Err("`doc` is too short, and there was no error".into())),
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
    let of_type = ("doc", DeviceArray { element: ElementType::F32, ..doc.1 });
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
    asked.into_iter().try_for_each(|(captures, expected)| {
        refuses(plan, queue, tensors, all(tensors, captures), expected)
    })
}

/// The operands with these captured buffers.
fn all<'a>(tensors: &Tensors, captures: &'a [(&'a str, DeviceArray<'a>)]) -> DeviceOperands<'a> {
    DeviceOperands { captures, ..tensors.forward().operands }
}

/// The plan that offsets are tried on.
fn of_sequences(
    engine: &Arc<Engine>,
    dims: &Dims,
    options: &CudaOptions,
) -> Result<CudaPlan, CudaError> {
    let mask = Some(masks::causal_bottom_right());
    let spec = Spec { mask, score: None, scale: None, dropout: None };
    CudaPlan::new(engine.clone(), &spec, dims, DType::BF16, options.clone())
}

/// Offsets in device memory against the same from the host, and offsets that are wrong.
pub fn offsets(engine: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    let queue = engine.queue();
    let dims = dims(4, LEN);
    let options = CudaOptions { deterministic: true, ..options.clone() };
    let plan = of_sequences(engine, &Dims { batch: 4, packed: true, ..dims }, &options)?;
    let tensors = Tensors::new(queue, dims, 9)?;
    let [q_at, k_at] = [queue.pool().take(64)?, queue.pool().take(64)?];
    let array = |buffer: &Allocation, version| DeviceArray {
        version,
        ..DeviceArray::new(buffer.address(), ElementType::I32, &[5])
    };
    let given = |[longest_q, longest_k]: [usize; 2], version| DeviceOffsets {
        q: array(&q_at, version),
        k: array(&k_at, version),
        longest_q,
        longest_k,
    };
    let with = |varlen: DeviceVarlen<'static>| DeviceOperands {
        varlen: Some(varlen),
        ..tensors.forward().operands
    };
    let write = |q: &[i32], k: &[i32]| -> Result<(), CudaError> {
        q_at.write(&bytes(q, |x| x.to_le_bytes()))?;
        Ok(k_at.write(&bytes(k, |x| x.to_le_bytes()))?)
    };
    let (q, k) = ([0, 37, 37, 180, 290], [0, 80, 90, 250, 250]);
    let (bad_q, bad_k) = ([-3, 120, 60, 180, 999], [0, 80, i32::MIN, 250, i32::MAX]);
    let (moved_q, moved_k) = ([0, 120, 120, 180, 300], [0, 80, 80, 250, 300]);
    for (what, [q, k], [same_q, same_k], longest, version) in [
        ("offsets", [q, k], [q, k], [143, 160], None),
        ("offsets that are promised", [q, k], [q, k], [143, 160], Some(1)),
        ("promised offsets again", [bad_q, k], [q, k], [143, 160], Some(1)),
        ("the next version", [k, q], [k, q], [160, 143], Some(2)),
        ("bad offsets", [bad_q, bad_k], [moved_q, moved_k], [120, 170], None),
    ] {
        if what != "promised offsets again" {
            write(&q, &k)?;
        }
        let known = Varlen::new(&same_q, &same_k, LEN, LEN).expect("good offsets");
        tensors.clear()?;
        let operands = DeviceOperands { varlen: Some(known.into()), ..tensors.forward().operands };
        let wanted = passes(&plan, queue, &tensors, operands)?;
        let found = passes(&plan, queue, &tensors, with(given(longest, version).into()))?;
        if found != wanted {
            return Ok(Err(format!("{what}: not the bits of offsets from the host")));
        }
    }
    // Those that are longer than was said are cut, and nothing else is touched.
    write(&q, &k)?;
    let found = passes(&plan, queue, &tensors, with(given([100, 160], None).into()))?;
    let row = |head: usize, row: usize| &found[0][(head * LEN + row) * 128..][..128];
    let untouched = |r| row(3, r).iter().all(|&byte| byte == 0xFF);
    if !untouched(137) || !untouched(179) || !untouched(295) || untouched(136) || untouched(180) {
        return Ok(Err("rows beyond the longest sequence are not those left out".into()));
    }
    let good = given([143, 160], None);
    let at = |q| DeviceOffsets { q, ..good };
    let of_type = at(DeviceArray { element: ElementType::F32, ..good.q });
    let of_rank = at(DeviceArray { shape: &[5, 1], ..good.q });
    let fewer = at(DeviceArray { shape: &[4], ..good.q });
    let host = at(DeviceArray { address: q.as_ptr() as u64, ..good.q });
    for (offsets, expected) in [
        (of_type, "cu_seqlens_q is f32; it must be i32"),
        (of_rank, "cu_seqlens_q has shape [5, 1]"),
        (fewer, "cu_seqlens_k has 5 offsets, but cu_seqlens_q has 4"),
        (host, "cu_seqlens_q is at"),
    ] {
        if let Err(wrong) = refuses(&plan, queue, &tensors, with(offsets.into()), expected) {
            return Ok(Err(wrong));
        }
    }
    let checked = CudaOptions { checked: true, ..options };
    let checked = of_sequences(engine, &Dims { batch: 4, packed: true, ..dims }, &checked)?;
    write(&[0, 120, 60, 180, 290], &k)?;
    let expected = "cu_seqlens_q: offset 2 is 60, below the one before it";
    Ok(refuses(&checked, queue, &tensors, with(good.into()), expected))
}

/// Both passes recorded in a graph, from contents that change between its launches: with captured
/// buffers that the mask reads, and with a mask that reads none, whose lists the offsets alone decide.
pub fn graph(engine: &Arc<Engine>, options: &CudaOptions) -> Outcome {
    let dims = dims(4, LEN);
    let doc = AnyBuffer::on_device("doc", &[LEN], Type::I32, false)?;
    let bias = AnyBuffer::on_device("bias", &[LEN], Type::F32, false)?;
    let packed = Dims { batch: 2, packed: true, ..dims };
    let options = CudaOptions { deterministic: true, ..options.clone() };
    let plan =
        CudaPlan::new(engine.clone(), &spec(doc, bias)?, &packed, DType::BF16, options.clone())?;
    if let Err(wrong) = replayed(engine, &plan, dims, true)? {
        return Ok(Err(wrong));
    }
    replayed(engine, &of_sequences(engine, &packed, &options)?, dims, false)
}

/// Whether `plan`, recorded once on packed tensors of `dims`, gives the bits of its calls on other
/// offsets and, if it `captures` them, other contents of buffers.
fn replayed(engine: &Arc<Engine>, plan: &CudaPlan, dims: Dims, captures: bool) -> Outcome {
    let queue = &engine.new_queue()?;
    let tensors = Tensors::new(queue, dims, 10)?;
    let take = |n: usize| queue.pool().take(4 * n);
    let (doc_at, bias_at, cu_at) = (take(LEN)?, take(LEN)?, take(3)?);
    let write = |n: i32, middle: i32| -> Result<(), CudaError> {
        let (doc, bias) = contents(n, 0);
        doc_at.write(&bytes(&doc, |x| x.to_le_bytes()))?;
        bias_at.write(&bytes(&bias, |x| x.to_le_bytes()))?;
        Ok(cu_at.write(&bytes(&[0, middle, 290], |x| x.to_le_bytes()))?)
    };
    let array = |buffer: &Allocation, ty| DeviceArray::new(buffer.address(), ty, &[LEN]);
    let arrays =
        [("doc", array(&doc_at, ElementType::I32)), ("bias", array(&bias_at, ElementType::F32))];
    let cu = DeviceArray::new(cu_at.address(), ElementType::I32, &[3]);
    let offsets = DeviceOffsets { q: cu, k: cu, longest_q: 200, longest_k: 200 };
    let arrays: &[_] = if captures { &arrays } else { &[] };
    let operands = DeviceOperands { varlen: Some(offsets.into()), ..all(&tensors, arrays) };
    let given = [(0, 100), (1, 171), (2, 290 - 200)];
    let mut wanted = Vec::new();
    for (n, middle) in given {
        write(n, middle)?;
        wanted.push(passes(plan, queue, &tensors, operands)?);
    }
    let graph = Graph::record(queue.stream(), || queue_passes(plan, queue, &tensors, operands))?;
    for ((n, middle), wanted) in given.into_iter().zip(wanted) {
        write(n, middle)?;
        tensors.clear()?;
        // SAFETY: tensors, buffers, plan and queue are still there, and nothing else uses them.
        unsafe { graph.launch(queue.stream()) }?;
        let found = (4..9).map(|i| tensors.read(i)).collect::<Result<Vec<_>, _>>()?;
        if found != wanted {
            return Ok(Err(format!("contents {n}: not the bits of calls that are not recorded")));
        }
    }
    Ok(Ok(()))
}
