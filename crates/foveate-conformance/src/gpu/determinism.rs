//! The same bits again and again, and tensors whose elements are further apart than 2^31.

use std::sync::Arc;
use std::time::Duration;

use foveate_cuda::choose::{KernelOptions, TileOptions};
use foveate_cuda::compile::config::Family;
use foveate_cuda::{
    CudaError, CudaOptions, CudaPlan, DeviceBackward, DeviceForward, DeviceOperands, DeviceTensor,
    Engine,
};
use foveate_gpu::driver::{Allocation, Function, Launch};
use foveate_mods::{Buffer, MaskMod, ScoreMod, expr, masks};
use foveate_problem::{Dims, Spec};
use foveate_tensor::random::Random;
use foveate_tensor::{DType, Layout};

use crate::gpu::checks::{Outcome, on_gpu};
use crate::gpu::tensors::bf16_bytes;

/// Runs every check whose name has `only` in it and prints a line for each; whether all passed.
pub fn run(repeats: usize, only: &str) -> Result<bool, String> {
    on_gpu("determinism", |engine, checks| {
        let mut say = |name: &str, check: &dyn Fn() -> Outcome| {
            if name.contains(only) {
                checks.say(name, check());
            }
        };
        let hopper = TileOptions { family: Some(Family::Hopper), ..TileOptions::default() };
        let of_hopper =
            KernelOptions { backward: hopper, backward_dq: hopper, ..KernelOptions::default() };
        // Also where the planner leaves dq to a kernel of its own, unless registers are too few.
        let in_order = KernelOptions {
            backward: TileOptions { ordered_dq: Some(true), ..hopper },
            ..KernelOptions::default()
        };
        let has_hopper = engine.profile().runs_hopper();
        for lens in [[4224, 4224], [2000, 4000]] {
            let runs = format!("{repeats} equal runs of {lens:?}");
            let programs = programs(lens);
            let (_, learns) = programs.last().expect("the one that learns");
            let problem = Problem { spec: learns, lens, dim: [64, 64] };
            say(&runs, &|| repeat(engine, &problem, KernelOptions::default(), repeats));
            for (program, spec) in programs.iter().filter(|_| has_hopper) {
                for dim in HEAD_DIMS {
                    let wide = dim[0] > MOST_DIM;
                    let learns = spec.score.is_some();
                    if wide && learns {
                        continue;
                    }
                    let problem = Problem { spec, lens, dim };
                    let [d, d_v] = dim;
                    let of = if d == d_v { d.to_string() } else { format!("{d}/{d_v}") };
                    let name = format!("{runs} on hopper, {program}, D {of}");
                    let kernels = if wide || learns { of_hopper } else { in_order };
                    say(&name, &|| repeat(engine, &problem, kernels, repeats));
                }
            }
        }
        say("rows further apart than 2^31 elements", &|| far(engine));
    })
}

/// Programs whose sums have another order each: all tiles, those below the diagonal with and without a
/// learned buffer, a band, and a block for each of some documents.
fn programs([len_q, len_k]: [usize; 2]) -> Vec<(&'static str, Spec)> {
    let (q, kv) = (expr::q(), expr::kv());
    let offset = len_k as i32 - len_q as i32;
    let causal = MaskMod::new((q.clone() + offset).ge(kv.clone()).dynamic()).expect("bool");
    let far = MaskMod::new((q.clone() + offset - kv.clone()).le(700).dynamic()).expect("bool");
    let documents = |len: usize| (0..len as i32).map(|i| i / 390).collect();
    let [of_q, of_kv] =
        [("of_q", len_q), ("of_kv", len_k)].map(|(name, len)| Buffer::vector(name, documents(len)));
    let documents = masks::document_pair(&of_q, &of_kv).expect("two vectors");
    let distances = (0..len_k).map(|i| (i as f32 * 0.37).sin()).collect();
    let bias = Buffer::learned("bias", &[len_k], distances).expect("one axis");
    let distance = (q + offset - kv).abs();
    let score = ScoreMod::new((expr::score() + bias.at([distance])).dynamic()).expect("f32");
    let of = |mask: Option<&MaskMod>| Spec { mask: mask.cloned(), ..Spec::default() };
    vec![
        ("full", of(None)),
        ("causal", of(Some(&causal))),
        ("window", of(Some(&(causal.clone() & far)))),
        ("documents", of(Some(&documents))),
        ("causal with a learned bias", Spec { score: Some(score), ..of(Some(&causal)) }),
    ]
}

const HEADS: [usize; 2] = [12, 6];

/// Up to this head dim kernels add dq in order, and have registers for gradients of captured buffers.
const MOST_DIM: usize = 128;

/// Head dims of queries and keys, and of values.
const HEAD_DIMS: [[usize; 2]; 5] = [[64, 64], [96, 96], [128, 128], [192, 128], [256, 256]];

fn dims([len_q, len_k]: [usize; 2], [dim, dim_v]: [usize; 2], batch: usize) -> Dims {
    Dims {
        batch,
        heads_q: HEADS[0],
        heads_kv: HEADS[1],
        len_q,
        len_k,
        dim,
        dim_v,
        shared_kv: false,
        packed: false,
    }
}

/// A program on queries and keys of these lengths.
struct Problem<'a> {
    spec: &'a Spec,
    lens: [usize; 2],
    dim: [usize; 2],
}

/// Notes in `at[0]` the first run of which a word is another than in run 0.
const COMPARE: &str = r#"
extern "C" __global__ void note_differences(const unsigned* one, const unsigned* other, long long words, int run, int* at) {
    bool same = true;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < words; i += gridDim.x * (long long)blockDim.x)
        same &= one[i] == other[i];
    if (!same) atomicMin(at, run);
}
"#;

/// The results of a problem, in order.
const NAMES: [&str; 6] = ["out", "lse", "dq", "dk", "dv", "the gradient of bias"];

/// Runs whose results are compared before the host looks.
const COMPARED_AT_ONCE: usize = 50;

/// Results of one run against those of the first, on the device: the host would need a hundred times as long.
struct Compared {
    kernel: Function,
    /// For each result, those of run 0 and the first run that differs.
    first: Vec<(Allocation, Allocation)>,
}

impl Compared {
    /// Against these results of run 0.
    fn new(engine: &Engine, results: &[Vec<u8>]) -> Result<Self, CudaError> {
        let compiled = engine.compiled(COMPARE, engine.device().info().arch())?;
        let kernel = engine.load(&compiled, "note_differences", 0)?;
        let pool = engine.queue().pool();
        let of = |bytes: &Vec<u8>| Ok((pool.upload(bytes)?, pool.upload(&i32::MAX.to_le_bytes())?));
        Ok(Self { kernel, first: results.iter().map(of).collect::<Result<_, CudaError>>()? })
    }

    /// Whether a bit of the last result is seen to differ, and none else, where `results` are these.
    fn sees_a_bit(
        engine: &Engine,
        results: &[Allocation],
        bytes: &[Vec<u8>],
        timeout: Duration,
    ) -> Result<bool, CudaError> {
        let mut other = bytes.to_vec();
        let last = other.len() - 1;
        *other[last].last_mut().expect("results have elements") ^= 1;
        let control = Self::new(engine, &other)?;
        control.queue(engine, results, 7)?;
        Ok(control.differing(timeout)? == Some((last, 7)))
    }

    /// Queues the comparison of `results` of a run, whose sizes are multiples of 4 bytes.
    fn queue(&self, engine: &Engine, results: &[Allocation], run: usize) -> Result<(), CudaError> {
        for (result, (first, at)) in results.iter().zip(&self.first) {
            let words = (result.bytes() / 4) as i64;
            let addresses = [result, first, at].map(|memory| memory.address().to_le_bytes());
            let [one, other, at] = addresses.each_ref().map(|bytes| &bytes[..]);
            let parameters = [one, other, &words.to_le_bytes(), &(run as i32).to_le_bytes(), at];
            let launch = Launch::new([engine.profile().sms as u32, 1, 1], 512);
            // SAFETY: it reads `words` words of both results, which are as long, and writes one of `at`.
            unsafe { self.kernel.launch(engine.queue().stream(), &launch, &parameters)? };
        }
        Ok(())
    }

    /// The result and the first run that differs, if any does.
    fn differing(&self, timeout: Duration) -> Result<Option<(usize, i32)>, CudaError> {
        for (i, (_, at)) in self.first.iter().enumerate() {
            let mut run = [0; 4];
            at.read(&mut run, timeout)?;
            let run = i32::from_le_bytes(run);
            if run != i32::MAX {
                return Ok(Some((i, run)));
            }
        }
        Ok(None)
    }
}

/// Forward and backward `repeats` times, deterministic; every result has the bits of the first, and is
/// near that of sums in any order.
fn repeat(
    engine: &Arc<Engine>,
    problem: &Problem<'_>,
    kernels: KernelOptions,
    repeats: usize,
) -> Outcome {
    let Problem { spec, lens, dim } = *problem;
    let dims = dims(lens, dim, 1);
    let len_k = dims.len_k;
    let options = CudaOptions { deterministic: true, kernels, ..CudaOptions::default() };
    let timeout = options.timeout;
    let plan = CudaPlan::new(engine.clone(), spec, &dims, DType::BF16, options)?;
    let queue = engine.queue();
    let mut random = Random::new(4224);
    let mut operand = |shape: [usize; 4]| -> Result<(Allocation, DeviceTensor), CudaError> {
        let bytes = bf16_bytes(&mut random, shape.iter().product());
        let allocation = queue.pool().upload(&bytes)?;
        let tensor = DeviceTensor::contiguous(allocation.address(), DType::BF16, shape);
        Ok((allocation, tensor))
    };
    let (_q, q) = operand(dims.q_shape())?;
    let (_k, k) = operand(dims.k_shape())?;
    let (_v, v) = operand(dims.v_shape())?;
    let (_d_out, d_out) = operand(dims.out_shape())?;
    let result = |shape: [usize; 4], dtype: DType| -> Result<Allocation, CudaError> {
        Ok(queue.pool().take(shape.iter().product::<usize>() * dtype.bytes())?)
    };
    let [b, h, s] = dims.row_shape();
    let mut allocations = vec![
        result(dims.out_shape(), DType::BF16)?,
        result([1, b, h, s], DType::F32)?,
        result(dims.q_shape(), DType::BF16)?,
        result(dims.k_shape(), DType::BF16)?,
        result(dims.v_shape(), DType::BF16)?,
    ];
    if spec.score.is_some() {
        allocations.push(result([1, 1, 1, len_k], DType::F32)?);
    }
    let at =
        |i: usize, shape| DeviceTensor::contiguous(allocations[i].address(), DType::BF16, shape);
    let lse = DeviceTensor::contiguous(allocations[1].address(), DType::F32, dims.row_shape());
    let operands = DeviceOperands::new(q, k, v);
    let forward = DeviceForward { operands, out: at(0, dims.out_shape()), lse, max_score: None };
    let backward = DeviceBackward {
        operands,
        out: forward.out,
        lse,
        d_out,
        d_lse: None,
        dq: Some(at(2, dims.q_shape())),
        dk: Some(at(3, dims.k_shape())),
        dv: Some(at(4, dims.v_shape())),
        accumulate: false,
        d_sink: None,
        d_captures: allocations
            .get(5)
            .map(|bias| ("bias", DeviceTensor::contiguous(bias.address(), DType::F32, [len_k])))
            .into_iter()
            .collect(),
    };
    let queue_run = |plan: &CudaPlan| -> Result<(), CudaError> {
        allocations.iter().try_for_each(|allocation| allocation.fill(0xFF))?;
        plan.forward_on(queue, &forward)?;
        plan.backward_on(queue, &backward)
    };
    let results = || -> Result<Vec<Vec<u8>>, CudaError> {
        let read = |allocation: &Allocation| {
            let mut bytes = vec![0; allocation.bytes()];
            allocation.read(&mut bytes, timeout)?;
            Ok(bytes)
        };
        allocations.iter().map(read).collect()
    };
    queue_run(&plan)?;
    let first = results()?;
    if let Some(i) = first.iter().position(|of| of.chunks_exact(4).any(|w| w == [0xFF; 4])) {
        return Ok(Err(format!("{} was not written everywhere", NAMES[i])));
    }
    if !Compared::sees_a_bit(engine, &allocations, &first, timeout)? {
        return Ok(Err("the comparison does not see a bit that differs".into()));
    }
    let compared = Compared::new(engine, &first)?;
    for run in 1..repeats {
        queue_run(&plan)?;
        compared.queue(engine, &allocations, run)?;
        if (run % COMPARED_AT_ONCE == 0 || run + 1 == repeats)
            && let Some((i, run)) = compared.differing(timeout)?
        {
            return Ok(Err(format!("{} of run {run} differs from run 0", NAMES[i])));
        }
    }
    let mut kernels = kernels;
    kernels.backward.ordered_dq = None;
    let options = CudaOptions { kernels, ..CudaOptions::default() };
    let plan = CudaPlan::new(engine.clone(), spec, &dims, DType::BF16, options)?;
    queue_run(&plan)?;
    Ok(near(&first, &results()?))
}

/// Whether results are near those of sums in any order.
fn near(fixed: &[Vec<u8>], any: &[Vec<u8>]) -> Result<(), String> {
    let mut pairs = fixed.iter().zip(any).zip(NAMES).take(5).enumerate();
    let wrong = pairs.find_map(|(i, ((fixed, any), name))| {
        let dtype = if i == 1 { DType::F32 } else { DType::BF16 };
        apart([fixed, any].map(|bytes| numbers(bytes, dtype))).map(|what| (name, what))
    });
    wrong.map_or(Ok(()), |(name, what)| Err(format!("{what} of {name} are not those of any order")))
}

/// How many numbers differ by more than the order of a sum explains, if any do.
fn apart([fixed, any]: [Vec<f32>; 2]) -> Option<String> {
    let largest = any.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let far = |(x, y): (&f32, &f32)| (x - y).abs() > (x.abs() + y.abs()) / 128.0 + largest / 4096.0;
    let apart = fixed.iter().zip(&any).filter(|pair| far(*pair)).count();
    (apart > 0 || !largest.is_finite()).then(|| format!("{apart} of {} numbers", any.len()))
}

/// Little-endian numbers as f32.
pub(super) fn numbers(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let word = |word: &[u8]| match dtype {
        DType::F32 => f32::from_le_bytes([word[0], word[1], word[2], word[3]]),
        _ => f32::from_bits(u32::from(u16::from_le_bytes([word[0], word[1]])) << 16),
    };
    bytes.chunks_exact(dtype.bytes()).map(word).collect()
}

/// Two batch entries 2^31 + 16 elements apart give what neighbours give.
fn far(engine: &Arc<Engine>) -> Outcome {
    const APART: usize = (1 << 31) + 16;
    let (len_q, len_k) = (130, 200);
    let (_, spec) = programs([len_q, len_k]).pop().expect("the one that learns");
    let dims = dims([len_q, len_k], [64; 2], 2);
    let options = CudaOptions { deterministic: true, ..CudaOptions::default() };
    let timeout = options.timeout;
    let plan = CudaPlan::new(engine.clone(), &spec, &dims, DType::BF16, options)?;
    let queue = engine.queue();
    let shapes = [dims.q_shape(), dims.k_shape(), dims.v_shape(), dims.out_shape()];
    let mut random = Random::new(31);
    let values = shapes.map(|shape| bf16_bytes(&mut random, shape.iter().product()));
    let mut results = Vec::new();
    for apart in [None, Some(APART)] {
        // q, k, v, d_out, then out, dq, dk, dv: one after the other in the memory of a batch
        // entry.
        let all = [0, 1, 2, 3, 3, 0, 1, 2];
        let each: Vec<usize> = all.iter().map(|&i| shapes[i][1..].iter().product()).collect();
        let dense: usize = each.iter().sum();
        let stride = apart.unwrap_or(dense);
        let memory = queue.pool().take((stride + dense) * 2)?;
        let mut layouts = Vec::new();
        let mut offset = 0;
        for (i, elems) in all.iter().zip(&each) {
            let mut layout = Layout::contiguous(shapes[*i]);
            (layout.strides[0], layout.offset) = (stride, offset);
            layouts.push(layout);
            offset += elems;
        }
        for (i, bytes) in values.iter().enumerate() {
            for (b, entry) in bytes.chunks_exact(2 * each[i]).enumerate() {
                memory.write_at(2 * (layouts[i].offset + b * stride), entry)?;
            }
        }
        let at = |i: usize| DeviceTensor {
            address: memory.address(),
            dtype: DType::BF16,
            layout: layouts[i],
        };
        let rows = queue.pool().take(4 * dims.row_shape().iter().product::<usize>())?;
        let lse = DeviceTensor::contiguous(rows.address(), DType::F32, dims.row_shape());
        let operands = DeviceOperands::new(at(0), at(1), at(2));
        let forward = DeviceForward { operands, out: at(4), lse, max_score: None };
        plan.forward_on(queue, &forward)?;
        plan.backward_on(
            queue,
            &DeviceBackward {
                operands,
                out: at(4),
                lse,
                d_out: at(3),
                d_lse: None,
                dq: Some(at(5)),
                dk: Some(at(6)),
                dv: Some(at(7)),
                accumulate: false,
                d_sink: None,
                d_captures: Vec::new(),
            },
        )?;
        let mut found = Vec::new();
        for i in 4..8 {
            for b in 0..2 {
                let mut bytes = vec![0; 2 * each[i]];
                memory.read_at(2 * (layouts[i].offset + b * stride), &mut bytes, timeout)?;
                found.push(bytes);
            }
        }
        results.push(found);
    }
    Ok(match results[0] == results[1] {
        true => Ok(()),
        false => Err("results differ from those of neighbouring batch entries".into()),
    })
}

#[cfg(test)]
mod tests {
    use foveate_gpu::Arch;
    use foveate_gpu::cache::Cache;
    use foveate_gpu::nvrtc::Compiler;

    use super::*;

    #[test]
    fn the_comparing_kernel_compiles() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let compiled = Cache::at(None).compile(compiler, COMPARE, Arch::new((9, 0))).unwrap();
        assert_eq!(compiled.kernels[0].name, "note_differences");
    }
}
