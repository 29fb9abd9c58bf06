//! What a GPU is asked that it cannot do: one clear error each, and nothing corrupted.

use std::sync::Arc;
use std::time::Instant;

use foveate_conformance::data::Random;
use foveate_cuda::driver::Block;
use foveate_cuda::{
    CudaError, CudaErrorKind, CudaOptions, CudaPlan, DeviceBackward, DeviceForward, DeviceOperands,
    DevicePages, DeviceTensor, Engine, Queue,
};
use foveate_mods::{Buffer, MaskMod, ScoreMod, expr};
use foveate_problem::{Dims, Spec};
use foveate_tensor::DType;

use crate::checks::{Outcome, on_gpu};
use crate::determinism::bf16_bytes;
use crate::on_device;

/// Runs all of it and prints a line for each check; whether all passed.
pub fn run() -> Result<bool, String> {
    on_gpu("misuse", |engine, checks| {
        let mut say = |name: &str, outcome| checks.say(name, outcome);
        say("wrong memory is named before anything runs", memory(engine));
        say("a captured index out of range is reported", out_of_range(engine));
        say(
            "captured buffers in device memory give the bits of the plan's",
            on_device::captures(engine),
        );
        say("offsets in device memory give the bits of the host's", on_device::offsets(engine));
        say("a recorded graph gives the bits of the calls", on_device::graph(engine));
        say("a stream of somebody else gives the same bits", foreign_stream(engine));
        for page_size in [16, 7] {
            let name = format!("keys in pages of {page_size} give what a cache in one piece gives");
            say(&name, paged(engine, page_size));
        }
        say("out of memory in a backward is an error, not the end", out_of_memory(engine));
        match warm_forward(engine) {
            Ok(us) => println!("host time of a warm forward: {us:.1} us"),
            Err(e) => println!("host time of a warm forward: {e}"),
        }
        let name = "memory of another GPU is named";
        match Engine::get(1) {
            Ok(other) => checks.say(name, other_device(engine, &other)),
            Err(e) => checks.skip(name, e),
        }
    })
}

/// One batch entry, head dim 64.
pub(crate) fn dims(heads_q: usize, len: usize) -> Dims {
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
pub(crate) struct Tensors {
    blocks: Vec<Block>,
    dims: Dims,
}

impl Tensors {
    pub(crate) fn new(queue: &Queue, dims: Dims, seed: u64) -> Result<Self, CudaError> {
        let mut random = Random::new(seed);
        let elems = dims.q_shape().iter().product();
        let mut blocks = Vec::new();
        for _ in 0..4 {
            blocks.push(queue.pool().upload(&bf16_bytes(&mut random, elems))?);
        }
        for bytes in [2 * elems, 4 * elems / dims.dim, 2 * elems, 2 * elems, 2 * elems] {
            let block = queue.pool().take(bytes)?;
            block.fill(0xFF)?;
            blocks.push(block);
        }
        Ok(Self { blocks, dims })
    }

    fn at(&self, i: usize) -> DeviceTensor {
        let address = self.blocks[i].address();
        DeviceTensor::contiguous(address, DType::BF16, self.dims.q_shape())
    }

    pub(crate) fn forward(&self) -> DeviceForward<'static> {
        let lse = self.blocks[5].address();
        DeviceForward {
            operands: DeviceOperands::new(self.at(0), self.at(1), self.at(2)),
            out: self.at(4),
            lse: DeviceTensor::contiguous(lse, DType::F32, self.dims.row_shape()),
            max_score: None,
        }
    }

    pub(crate) fn backward(&self) -> DeviceBackward<'static> {
        let DeviceForward { operands, out, lse, .. } = self.forward();
        DeviceBackward {
            operands,
            out,
            lse,
            d_out: self.at(3),
            d_lse: None,
            dq: self.at(6),
            dk: self.at(7),
            dv: self.at(8),
            accumulate: false,
            d_sink: None,
            d_captures: Vec::new(),
        }
    }

    /// Makes every result NaN.
    pub(crate) fn clear(&self) -> Result<(), CudaError> {
        self.blocks[4..].iter().try_for_each(|block| block.fill(0xFF))
    }

    /// The bytes of tensor `i`: q, k, v, d_out, out, lse, dq, dk, dv.
    pub(crate) fn read(&self, i: usize) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0; self.blocks[i].bytes()];
        self.blocks[i].read(&mut bytes, CudaOptions::default().timeout)?;
        Ok(bytes)
    }
}

fn plan(engine: &Arc<Engine>, dims: &Dims, options: CudaOptions) -> Result<CudaPlan, CudaError> {
    let mask = MaskMod::new(expr::q().ge(expr::kv()).dynamic()).expect("bool");
    let spec = Spec { mask: Some(mask), score: None, scale: None, dropout: None };
    CudaPlan::new(engine.clone(), &spec, dims, DType::BF16, options)
}

fn memory(engine: &Arc<Engine>) -> Outcome {
    let dims = dims(2, 100);
    let plan = plan(engine, &dims, CudaOptions::default())?;
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
        match plan.forward_on(queue, &args) {
            Err(e) if e.to_string().contains(expected) => {}
            Err(e) => return Ok(Err(format!("{e}, where `{expected}` was to be said"))),
            Ok(()) => return Ok(Err(format!("nothing was said, not `{expected}`"))),
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
fn other_device(engine: &Arc<Engine>, other: &Arc<Engine>) -> Outcome {
    let dims = dims(2, 100);
    let plan = plan(engine, &dims, CudaOptions::default())?;
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
        match plan.forward_on(engine.queue(), &args) {
            Err(e) if e.to_string().contains(expected) => {}
            Err(e) => return Ok(Err(format!("{e}, where `{expected}` was to be said"))),
            Ok(()) => return Ok(Err(format!("nothing was said, not `{expected}`"))),
        }
    }
    match plan.forward_on(other.queue(), &good) {
        Err(e) if e.to_string().starts_with("the queue is of GPU 1") => {}
        Err(e) => return Ok(Err(format!("{e}, where the queue's GPU was to be named"))),
        Ok(()) => return Ok(Err("a queue of another GPU was taken".into())),
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

fn out_of_range(engine: &Arc<Engine>) -> Outcome {
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
        let options = CudaOptions { checked: true, ..CudaOptions::default() };
        let plan = CudaPlan::new(engine.clone(), &spec, &dims, DType::BF16, options)?;
        let tensors = Tensors::new(engine.queue(), dims, 2)?;
        match plan.forward_on(engine.queue(), &tensors.forward()) {
            Err(e) if matches!(e.kind(), CudaErrorKind::OutOfRange { .. }) => {
                if !e.to_string().contains(name) {
                    return Ok(Err(format!("{e}, but `{name}` is too short")));
                }
            }
            Err(e) => return Ok(Err(e.to_string())),
            Ok(()) => return Ok(Err(format!("`{name}` is too short, and nothing was said"))),
        }
        if tensors.read(4)?.chunks_exact(2).any(|elem| elem == [0xFF; 2]) {
            return Ok(Err("the results were not written".into()));
        }
    }
    Ok(Ok(()))
}

fn foreign_stream(engine: &Arc<Engine>) -> Outcome {
    let dims = dims(2, 300);
    let plan = plan(engine, &dims, CudaOptions::default())?;
    // SAFETY: 0 is the default stream.
    let other = unsafe { engine.queue_on(0) };
    let mut found = Vec::new();
    for queue in [engine.queue(), &other] {
        let tensors = Tensors::new(queue, dims, 3)?;
        plan.forward_on(queue, &tensors.forward())?;
        found.push((tensors.read(4)?, tensors.read(5)?));
    }
    Ok(if found[0] == found[1] { Ok(()) } else { Err("results differ".into()) })
}

/// Two batch entries with different numbers of keys in scattered pages, against each alone.
fn paged(engine: &Arc<Engine>, page_size: usize) -> Outcome {
    let (lengths, heads, queries, dim) = ([100i32, 37], 2, 3, 64);
    let entries = 100usize.div_ceil(page_size);
    let pages = 2 * entries;
    let queue = engine.queue();
    let mut random = Random::new(6);
    let page = heads * page_size * dim * 2;
    let [keys, values] = [(); 2].map(|()| bf16_bytes(&mut random, pages * page / 2));
    let queries_of = bf16_bytes(&mut random, 2 * heads * queries * dim);
    // The pages of both entries are spread over all of them.
    let at = |b: usize, i: usize| (2 * i + b) * step(pages) % pages;
    let table_bytes: Vec<u8> = (0..2)
        .flat_map(|b| (0..entries).flat_map(move |i| (at(b, i) as i32).to_le_bytes()))
        .collect();
    let upload = |bytes: &[u8]| queue.pool().upload(bytes);
    let (q, k, v, table) =
        (upload(&queries_of)?, upload(&keys)?, upload(&values)?, upload(&table_bytes)?);
    let (out, lse) = (queue.pool().take(queries_of.len())?, queue.pool().take(4 * 2 * 2 * 3)?);
    let tensor =
        |block: &Block, shape| DeviceTensor::contiguous(block.address(), DType::BF16, shape);
    let dims = Dims { batch: 2, len_q: queries, ..dims(heads, 100) };
    let spec = Spec { mask: None, score: None, scale: None, dropout: None };
    let options = CudaOptions::default();
    let plan = CudaPlan::new(engine.clone(), &spec, &dims, DType::BF16, options.clone())?;
    let forward = |batch: usize, k, v, pages| DeviceForward {
        operands: DeviceOperands {
            pages,
            ..DeviceOperands::new(tensor(&q, [batch, heads, queries, dim]), k, v)
        },
        out: tensor(&out, [batch, heads, queries, dim]),
        lse: DeviceTensor::contiguous(lse.address(), DType::F32, [batch, heads, queries]),
        max_score: None,
    };
    let shape = [pages, heads, page_size, dim];
    let listed = DevicePages { table: table.address(), entries, lengths: &lengths };
    let args = forward(2, tensor(&k, shape), tensor(&v, shape), Some(listed));
    plan.forward_on(queue, &args)?;
    let mut found = vec![0; queries_of.len()];
    out.read(&mut found, options.timeout)?;
    // A page that is none is reported by a checked plan, and read as another.
    let checked = CudaOptions { checked: true, ..options.clone() };
    let checked = CudaPlan::new(engine.clone(), &spec, &dims, DType::BF16, checked)?;
    let good = table_bytes.len() - 4 * entries;
    let mut bad = table_bytes.clone();
    bad[good..good + 4].copy_from_slice(&(pages as i32 + 3).to_le_bytes());
    table.write(&bad)?;
    match checked.forward_on(queue, &args) {
        Err(e) if e.to_string().contains(&format!("has page {}", pages + 3)) => {}
        other => return Ok(Err(format!("{other:?}, where a page that is none was to be named"))),
    }
    for (b, len) in lengths.map(|len| len as usize).into_iter().enumerate() {
        // Heads, rows, elements of one entry, gathered from its pages.
        let gather = |from: &[u8]| -> Vec<u8> {
            let row = |h: usize, r: usize| {
                let start = at(b, r / page_size) * page + (h * page_size + r % page_size) * dim * 2;
                &from[start..start + dim * 2]
            };
            (0..heads).flat_map(|h| (0..len).flat_map(move |r| row(h, r).to_vec())).collect()
        };
        let (k, v) = (upload(&gather(&keys))?, upload(&gather(&values))?);
        let entry = queries_of.len() / 2;
        q.write(&queries_of[b * entry..][..entry])?;
        let shape = [1, heads, len, dim];
        plan.forward_on(queue, &forward(1, tensor(&k, shape), tensor(&v, shape), None))?;
        let mut alone = vec![0; entry];
        out.read(&mut alone, options.timeout)?;
        let number = |bytes: &[u8]| {
            f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
        };
        let pairs = found[b * entry..].chunks_exact(2).zip(alone.chunks_exact(2));
        let mut far = pairs.map(|(x, y)| (number(x) - number(y)).abs());
        if far.any(|x| x.is_nan() || x > 0.02) {
            return Ok(Err(format!("entry {b} differs")));
        }
    }
    Ok(Ok(()))
}

/// A step that visits every one of `n` pages.
fn step(n: usize) -> usize {
    [5, 7, 11, 13].into_iter().find(|&step| !n.is_multiple_of(step)).unwrap_or(1)
}

fn out_of_memory(engine: &Arc<Engine>) -> Outcome {
    let dims = dims(16, 8192);
    let plan = plan(engine, &dims, CudaOptions::default())?;
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
            Ok(block) => hogs.push(block),
            Err(_) => step /= 2,
        }
    }
    match plan.backward_on(queue, &tensors.backward()) {
        Err(e) if matches!(e.kind(), CudaErrorKind::OutOfMemory { .. }) => {}
        Err(e) => return Ok(Err(format!("{e}, where memory was to run out"))),
        Ok(()) => return Ok(Err("there was memory after all".into())),
    }
    drop(hogs);
    queue.pool().release()?;
    plan.backward_on(queue, &tensors.backward())?;
    let whole = (6..9).map(|i| tensors.read(i)).collect::<Result<Vec<_>, _>>()?;
    let written = whole.iter().all(|t| t.chunks_exact(2).all(|elem| elem != [0xFF; 2]));
    Ok(if written { Ok(()) } else { Err("the backward after it left gaps".into()) })
}

/// Microseconds that queueing a forward takes, everything being there: the median of many.
fn warm_forward(engine: &Arc<Engine>) -> Result<f64, CudaError> {
    let dims = dims(2, 128);
    let plan = plan(engine, &dims, CudaOptions::default())?;
    let queue = engine.queue();
    let tensors = Tensors::new(queue, dims, 5)?;
    let args = tensors.forward();
    let mut times = Vec::new();
    for _ in 0..50 {
        for _ in 0..50 {
            let began = Instant::now();
            plan.forward_on(queue, &args)?;
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
        // A full queue would make the host wait.
        tensors.read(5)?;
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
