//! The grid of `foveate bench gpu`, and a case made ready to run.
//!
//! `benches/gpu_peers.py` reads the cases as JSON and makes the same numbers from the same hash,
//! so peers are timed, and compared, on the same data.

use std::iter;
use std::sync::Arc;

use foveate::cuda::choose::{CANDIDATES, KernelOptions, Progress, Tuning};
use foveate::cuda::{
    CudaError, CudaPlan, DeviceBackward, DeviceForward, DeviceOperands, DevicePages, DeviceScales,
    DeviceTensor, Engine,
};
use foveate::gpu::driver::{Allocation, Event};
use foveate::mods::ir::mix;
use foveate::tensor::{F8E4M3, Varlen};
use foveate::{DType, Device, Layout, Problem, ScaleBlocks};
use foveate_problem::Arrangement;
use rayon::prelude::*;
use serde::Serialize;

use crate::bench::workload::{BIAS, Direction, Mask, Score, Workload, normal};
use crate::failure::Failure;

/// One line of the grid, as `benches/gpu_peers.py` reads it.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// Its name: mask, score, heads, length, head dim, direction.
    pub case: String,
    #[serde(flatten)]
    pub work: Workload,
    /// Operations on the pairs that the mask lets through.
    pub flops: f64,
    /// Where it is not contiguous. Of these peers have packed sequences only.
    #[serde(skip_serializing_if = "Storage::is_contiguous")]
    pub storage: Storage,
    /// The blocks of scales that f8e4m3 operands have.
    #[serde(skip)]
    pub scales: Option<ScaleBlocks>,
}

/// How operands lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Storage {
    /// `[batch, heads, length, dim]`.
    Contiguous,
    /// k and v in pages `[pages, rows, heads, dim]` of so many rows, in no order.
    Pages(usize),
    /// Rows of all operands that begin so many bytes past a multiple of 16.
    Shifted(usize),
    /// One row of k and v for all, of stride 0.
    Repeated,
    /// `[1, heads, length, dim]`, a sequence for each document of the mask.
    Packed,
}

impl Storage {
    fn is_contiguous(&self) -> bool {
        *self == Self::Contiguous
    }

    /// As in the name of a case.
    fn name(self) -> String {
        match self {
            Self::Contiguous => String::new(),
            Self::Pages(rows) => format!("pages{rows}/"),
            Self::Shifted(bytes) => format!("shifted{bytes}/"),
            Self::Repeated => "repeated/".to_owned(),
            Self::Packed => "packed/".to_owned(),
        }
    }
}

const FULL: (Mask, usize) = (Mask::Full, 0);
const CAUSAL: (Mask, usize) = (Mask::Causal, 0);
const MASKS: [(Mask, usize); 3] =
    [(Mask::Window, 1024), (Mask::Documents, 16), (Mask::Prefix, 1024)];
/// Masks whose tiles are few and cut, at head dim 128: a neighbourhood, every fourth block.
const SCATTERED: [(Mask, usize); 2] = [(Mask::Neighbourhood, 17), (Mask::Blocks, 4)];
const SCORES: [Score; 3] = [Score::Alibi, Score::Softcap, Score::Relative];
const DIMS: [usize; 5] = [64, 96, 128, 192, 256];
/// Head dims of q and k, and of v, of multi-head latent attention.
const LATENT: (usize, usize) = (192, 128);
const LENGTHS: [usize; 6] = [1024, 2048, 4096, 8192, 16384, 32768];
/// Tokens of a case and size of all its heads together, as attention benchmarks usually have them.
const TOKENS: usize = 16384;
const WIDTH: usize = 2048;

/// Where operands lie otherwise than contiguously.
const STORED: [Storage; 8] = [
    Storage::Pages(1),
    Storage::Pages(16),
    Storage::Pages(24),
    Storage::Pages(64),
    Storage::Pages(256),
    Storage::Shifted(8),
    Storage::Shifted(4),
    Storage::Repeated,
];

/// One row each, whose key/value heads have few tiles: query and key/value heads, length and head dim. SmolLM-135M's
/// heads, those of Llama's 1B, 8B and 70B and of Qwen's 7B, and a part of them on each of two or eight GPUs.
const SINGLE_ROWS: [((usize, usize), usize, usize); 8] = [
    ((9, 3), 2048, 64),
    ((32, 8), 2048, 64),
    ((32, 8), 2048, 128),
    ((64, 8), 2048, 128),
    ((28, 4), 512, 128),
    ((28, 4), 2048, 128),
    ((16, 4), 4096, 128),
    ((8, 1), 8192, 128),
];

/// Every case: plain masks over all sizes, then masks, scores and grouped heads at one length, documents of 128 to 2,048
/// tokens by a mask and as packed sequences, and single rows; forward also operands that are not contiguous, and few
/// queries on caches of 131,072 keys in all. f8e4m3 has contiguous forwards, whose names end with it and its scales.
pub fn grid(dtype: DType, scales: Option<ScaleBlocks>) -> Vec<Case> {
    let mut cases = Vec::new();
    let passes: &[Direction] = match dtype {
        DType::F8E4M3 => &[Direction::Forward],
        _ => &[Direction::Forward, Direction::Backward],
    };
    for &pass in passes {
        for mask in [FULL, CAUSAL] {
            for dim in DIMS {
                for len in LENGTHS {
                    cases.push(Case::new(mask, Score::None, None, len, dim, pass));
                }
            }
        }
        for mask in [FULL, CAUSAL] {
            let case = Case::new(mask, Score::None, None, 8192, LATENT.1, pass);
            let work = Workload { dim: LATENT.0, dim_v: Some(LATENT.1), ..case.work };
            cases.push(Case::named(work, Storage::Contiguous));
        }
        for dim in [64, 128] {
            for mask in MASKS {
                cases.push(Case::new(mask, Score::None, None, 8192, dim, pass));
            }
            for mask in [FULL, CAUSAL] {
                for score in SCORES {
                    cases.push(Case::new(mask, score, None, 8192, dim, pass));
                }
            }
        }
        for mask in [FULL, CAUSAL, MASKS[0]] {
            cases.push(Case::new(mask, Score::None, Some((32, 8)), 8192, 128, pass));
        }
        for mask in SCATTERED {
            cases.push(Case::new(mask, Score::None, None, 8192, 128, pass));
        }
        if dtype != DType::F8E4M3 {
            for dim in [64, 128] {
                let ragged = Case::new((Mask::Ragged, 0), Score::None, None, TOKENS, dim, pass);
                cases.extend([ragged.stored(Storage::Packed), ragged]);
            }
        }
        for (heads, len, dim) in SINGLE_ROWS {
            let case = Case::new(CAUSAL, Score::None, Some(heads), len, dim, pass);
            cases.push(Case::named(Workload { batch: 1, ..case.work }, Storage::Contiguous));
        }
        if pass == Direction::Forward && dtype != DType::F8E4M3 {
            let prompts = [(64, None), (128, Some((32, 8)))]
                .map(|(dim, heads)| Case::new(CAUSAL, Score::None, heads, 8192, dim, pass));
            let stored = |case: &Case| STORED.map(|storage| case.stored(storage));
            cases.extend(prompts.iter().flat_map(stored));
            for len in [8192, 32768, 131_072] {
                for q_len in [1, 4, 16] {
                    let case = Case::of_cache(q_len, len);
                    cases.push(case.stored(Storage::Pages(16)));
                    cases.push(case);
                }
            }
        }
    }
    if dtype == DType::F8E4M3 {
        for case in &mut cases {
            case.work.dtype = dtype;
            case.case += "/f8e4m3";
            case.scales = scales;
            match scales {
                None => {}
                Some(ScaleBlocks::WHOLE) => case.case += "/scales-head",
                Some(blocks) => case.case += &format!("/scales-{}", blocks.q),
            }
        }
    }
    cases
}

impl Case {
    fn new(
        (mask, width): (Mask, usize),
        score: Score,
        heads: Option<(usize, usize)>,
        len: usize,
        dim: usize,
        pass: Direction,
    ) -> Self {
        let (heads, heads_kv) = heads.unwrap_or((WIDTH / dim, WIDTH / dim));
        let work = Workload {
            mask,
            width,
            score,
            batch: (TOKENS / len).max(1),
            dtype: DType::BF16,
            pass,
            ..Workload::causal(heads, heads_kv, len, dim)
        };
        Self::named(work, Storage::Contiguous)
    }

    /// So many queries, of 32 heads on 8, on each cache of `len` keys.
    fn of_cache(q_len: usize, len: usize) -> Self {
        let Self { work, .. } =
            Self::new(FULL, Score::None, Some((32, 8)), len, 128, Direction::Forward);
        Self::named(Workload { q_len, batch: 131_072 / len, ..work }, Storage::Contiguous)
    }

    /// How q, k, v and the gradient of `out` lie.
    fn layouts(&self) -> [Layout; 4] {
        let dense = self.work.shapes().map(|[b, h, s, d]| Layout::bhsd(b, h, s, d));
        let [q, k, v, d_out] = dense;
        match self.storage {
            Storage::Contiguous | Storage::Packed => dense,
            Storage::Pages(rows) => {
                let paged = |Layout { shape: [b, h, s, d], .. }| {
                    Layout::bshd(b * s.div_ceil(rows), rows, h, d)
                };
                [q, paged(k), paged(v), d_out]
            }
            Storage::Shifted(bytes) => dense.map(|Layout { shape: [b, h, s, d], .. }| {
                let longer = Layout::bhsd(b, h, s, d + 8);
                longer.narrowed(3, bytes / 2, d).expect("half of 8 elements and d fit into d + 8")
            }),
            Storage::Repeated => {
                let repeated = |Layout { shape: [b, h, s, d], .. }| {
                    Layout::bhsd(b, h, 1, d).expanded(2, s).expect("there is one row")
                };
                [q, repeated(k), repeated(v), d_out]
            }
        }
    }

    /// The pages of the batch entries, in no order: i32 `[batch, entries]`.
    fn page_table(&self, rows: usize) -> Vec<u8> {
        let pages = self.work.batch * self.work.len.div_ceil(rows);
        let mut order: Vec<i32> = (0..pages as i32).collect();
        order.sort_by_cached_key(|&page| normal(5, page as usize).to_bits());
        order.into_iter().flat_map(i32::to_le_bytes).collect()
    }

    /// What a plan is made of: the documents of packed sequences are no part of its mask.
    fn planned(&self) -> Workload {
        let mask = match (self.storage, self.work.mask) {
            (Storage::Packed, Mask::Ragged) => Mask::Causal,
            (_, mask) => mask,
        };
        Workload { mask, ..self.work.clone() }
    }

    fn plan(
        &self,
        ordinal: usize,
        kernels: KernelOptions,
        deterministic: bool,
    ) -> Result<CudaPlan, Failure> {
        let [q, k, v, _] = self.work.shapes();
        let mut problem = Problem::shaped(self.work.dtype, q, k, v)?;
        if self.storage == Storage::Packed {
            let offsets = self.offsets();
            problem = problem.varlen(&offsets, &offsets)?;
        }
        let program = self.planned().program().deterministic(deterministic);
        let plan = program.plan(&problem, &Device::cuda(ordinal))?;
        Ok(plan.cuda().expect("the case was planned for a GPU").with_kernels(kernels))
    }

    /// First rows of packed sequences, and the end of the last.
    fn offsets(&self) -> Vec<i32> {
        let ends = self.work.documents().into_iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        iter::once(0).chain(ends).collect()
    }

    /// The same of operands that lie so.
    fn stored(&self, storage: Storage) -> Self {
        Self::named(self.work.clone(), storage)
    }

    /// The same problem without mask and score; `None` where it has no mask.
    pub fn without_mask(&self) -> Option<Self> {
        let full = Workload { mask: Mask::Full, width: 0, score: Score::None, ..self.work.clone() };
        let full = Self { scales: self.scales, ..Self::named(full, self.storage) };
        (self.work.mask != Mask::Full).then_some(full)
    }

    fn named(work: Workload, storage: Storage) -> Self {
        let Workload { q_len, len, batch, .. } = work;
        let queries = match (q_len == len, batch == (TOKENS / len).max(1)) {
            (true, true) => String::new(),
            (true, false) => format!("b{batch}-"),
            (false, _) => format!("q{q_len}-"),
        };
        let (program, dims, pass) = (work.program_name(), work.dims_name(), work.pass.name());
        let case = format!("{program}/{queries}s{len}/{dims}/{}{pass}", storage.name());
        Self { case, flops: work.flops(), work, storage, scales: None }
    }
}

/// Operands and destinations of a case in device memory, and its plan.
pub struct Prepared {
    engine: Arc<Engine>,
    plan: CudaPlan,
    backward: bool,
    tensors: Tensors,
    /// The page table, and the keys of each batch entry.
    pages: Option<(u64, Vec<i32>)>,
    /// First rows of packed sequences, and the end of the last.
    offsets: Option<Vec<i32>>,
    /// Gradient of the relative bias.
    bias: Option<(Allocation, usize)>,
    scales: Option<DeviceScales>,
    allocations: Vec<Allocation>,
}

#[derive(Clone, Copy)]
struct Tensors {
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    d_out: DeviceTensor,
    out: DeviceTensor,
    lse: DeviceTensor<3>,
    dq: DeviceTensor,
    dk: DeviceTensor,
    dv: DeviceTensor,
}

impl Prepared {
    /// The case on GPU `ordinal`, its operands uploaded and, for a backward, its forward done.
    pub fn new(
        case: &Case,
        ordinal: usize,
        kernels: KernelOptions,
        deterministic: bool,
    ) -> Result<Self, Failure> {
        let engine = Engine::get(ordinal)?;
        let work = &case.work;
        let shapes = work.shapes();
        let plan = case.plan(ordinal, kernels, deterministic)?;
        let mut allocations = Vec::new();
        let pool = engine.queue().pool();
        let mut random = |seed: i32, layout: Layout| -> Result<DeviceTensor, Failure> {
            let elems = layout.end().unwrap_or(0);
            let numbers = (0..elems).into_par_iter().map(|i| normal(seed, i));
            let bits: Vec<u8> = match work.dtype {
                DType::F8E4M3 => numbers.map(|x| F8E4M3::from_f32(x).to_bits()).collect(),
                _ => numbers.flat_map_iter(|x| bf16_bits(x).to_le_bytes()).collect(),
            };
            let allocation = pool.upload(&bits)?;
            let tensor = DeviceTensor { address: allocation.address(), dtype: work.dtype, layout };
            allocations.push(allocation);
            Ok(tensor)
        };
        let [of_q, of_k, of_v, of_d_out] = case.layouts();
        let (q, k, v) = (random(1, of_q)?, random(2, of_k)?, random(3, of_v)?);
        let backward = work.pass == Direction::Backward;
        let d_out = if backward { random(4, of_d_out)? } else { q };
        let pages = match case.storage {
            Storage::Pages(rows) => {
                let table = pool.upload(&case.page_table(rows))?;
                let pages = (table.address(), vec![work.len as i32; work.batch]);
                allocations.push(table);
                Some(pages)
            }
            Storage::Contiguous | Storage::Shifted(_) | Storage::Repeated | Storage::Packed => None,
        };
        let offsets = (case.storage == Storage::Packed).then(|| case.offsets());
        let mut empty = |dtype: DType, elems: usize| -> Result<u64, Failure> {
            let allocation = pool.take(elems * dtype.bytes())?;
            // What is not written shows as NaN.
            allocation.fill(0xff)?;
            let address = allocation.address();
            allocations.push(allocation);
            Ok(address)
        };
        let mut like = |shape: [usize; 4]| -> Result<DeviceTensor, Failure> {
            let address = empty(DType::BF16, shape.iter().product())?;
            Ok(DeviceTensor::contiguous(address, DType::BF16, shape))
        };
        let [of_q, of_k, of_v, of_out] = shapes;
        let (out, dq) = (like(of_out)?, like(of_q)?);
        let (dk, dv) = (like(of_k)?, like(of_v)?);
        let rows = [work.batch, work.heads, work.q_len];
        let lse = empty(DType::F32, rows.iter().product())?;
        let lse = DeviceTensor::contiguous(lse, DType::F32, rows);
        let scales = case.scales.map(|blocks| -> Result<_, Failure> {
            let problem = Problem::shaped(work.dtype, shapes[0], shapes[1], shapes[2])?;
            let of_blocks = blocks.shapes(problem.dims(), [work.q_len, work.len]);
            let [of_q, of_k, of_v] = of_blocks.expect("blocks are checked when they are read");
            let mut random = |seed: i32, shape: [usize; 3]| -> Result<DeviceTensor<3>, Failure> {
                let numbers = (0..shape.iter().product()).map(|i| normal(seed, i).exp2());
                let bits: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
                allocations.push(pool.upload(&bits)?);
                let address = allocations.last().expect("it was added").address();
                Ok(DeviceTensor::contiguous(address, DType::F32, shape))
            };
            let (q, k, v) = (random(6, of_q)?, random(7, of_k)?, random(8, of_v)?);
            Ok(DeviceScales { q, k, v, blocks })
        });
        let scales = scales.transpose()?;
        let bias = match work.learned() {
            Some((_, elems)) => Some((pool.take(elems * 4)?, elems)),
            None => None,
        };
        let tensors = Tensors { q, k, v, d_out, out, lse, dq, dk, dv };
        let prepared =
            Self { engine, plan, backward, tensors, pages, offsets, bias, scales, allocations };
        if backward {
            prepared.forward()?;
        }
        Ok(prepared)
    }

    fn varlen(&self) -> Option<Varlen<'_>> {
        let rows = self.tensors.q.layout.shape[2];
        let fits = "documents stand one after the other";
        self.offsets.as_ref().map(|all| Varlen::new(all, all, rows, rows).expect(fits))
    }

    fn operands(&self) -> DeviceOperands<'_> {
        let Tensors { q, k, v, .. } = self.tensors;
        let pages = self.pages.as_ref().map(|(table, lengths)| {
            let rows = k.layout.shape[2];
            let entries = lengths.iter().map(|&len| (len as usize).div_ceil(rows)).max();
            DevicePages { table: *table, entries: entries.unwrap_or(0), lengths }
        });
        let varlen = self.varlen().map(Into::into);
        DeviceOperands { pages, varlen, scales: self.scales, ..DeviceOperands::new(q, k, v) }
    }

    fn forward(&self) -> Result<(), Failure> {
        let Tensors { out, lse, .. } = self.tensors;
        let args = DeviceForward { operands: self.operands(), out, lse, max_score: None };
        Ok(self.plan.forward_on(self.engine.queue(), &args)?)
    }

    /// Queues the pass of the case.
    pub fn run(&self) -> Result<(), Failure> {
        if !self.backward {
            return self.forward();
        }
        let Tensors { d_out, out, lse, dq, dk, dv, .. } = self.tensors;
        let bias = self.bias.iter().map(|(allocation, elems)| {
            (BIAS, DeviceTensor::contiguous(allocation.address(), DType::F32, [*elems]))
        });
        let args = DeviceBackward {
            operands: self.operands(),
            out,
            lse,
            d_out,
            d_lse: None,
            dq: Some(dq),
            dk: Some(dk),
            dv: Some(dv),
            accumulate: false,
            d_sink: None,
            d_captures: bias.collect(),
        };
        Ok(self.plan.backward_on(self.engine.queue(), &args)?)
    }

    /// Tunes the kernels of the case; later runs use what is found.
    pub fn tune(&self, tell: &mut dyn FnMut(&Progress) -> bool) -> Result<Tuning, CudaError> {
        let arrangement = self.varlen().map_or(Arrangement::Dense, Arrangement::Packed);
        self.plan.tune(arrangement, self.backward, CANDIDATES, tell)
    }

    /// Milliseconds of device time of `runs` runs that follow one another without a pause. One that is not timed goes
    /// before: while it runs the host queues the others, so that its own part is not measured.
    pub fn times(&self, runs: usize) -> Result<Vec<f64>, Failure> {
        let stream = self.engine.queue().stream();
        let mark = || {
            let event = Event::new(self.engine.device())?;
            event.record(stream)?;
            Ok::<_, Failure>(event)
        };
        self.run()?;
        let mut marks = vec![mark()?];
        for _ in 0..runs {
            self.run()?;
            marks.push(mark()?);
        }
        marks[runs].wait(self.plan.options().timeout, "a case of the benchmark")?;
        marks.windows(2).map(|m| Ok(f64::from(m[1].ms_since(&m[0])?))).collect()
    }

    /// A few elements of the result (out, or dq) all over it: what a peer's are compared with.
    pub fn sample(&self, count: usize) -> Result<Vec<f32>, Failure> {
        let tensor = if self.backward { &self.tensors.dq } else { &self.tensors.out };
        let elems = tensor.layout.elems();
        let allocation = self.allocations.iter().find(|b| b.address() == tensor.address);
        let allocation = allocation.expect("the result is in an allocation");
        (0..count)
            .map(|i| {
                let (mut bits, at) = ([0; 2], sampled(i, elems));
                allocation.read_at(at * 2, &mut bits, self.plan.options().timeout)?;
                Ok(f32::from_bits(u32::from(u16::from_le_bytes(bits)) << 16))
            })
            .collect()
    }
}

/// Which element of `elems` is number `i` of those compared: by a hash, since elements at equal distances may all be
/// of first rows, whose out is v's first row and whose gradient is 0 under a causal mask.
fn sampled(i: usize, elems: usize) -> usize {
    mix(7, i as i32).cast_unsigned() as usize % elems
}

/// Rounds to bf16, to nearest even. No NaN comes here.
fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compared_with_a_peer_lies_in_rows_of_all_kinds() {
        let (rows, dim) = (8192, 128);
        let rows: Vec<usize> = (0..16).map(|i| sampled(i, 32 * rows * dim) / dim % rows).collect();
        let late = rows.iter().filter(|row| **row > 4096).count();
        assert!((4..=12).contains(&late) && rows.iter().all(|row| *row > 64), "{rows:?}");
    }

    #[test]
    fn halves_are_rounded_to_even() {
        assert_eq!(bf16_bits(1.0), 0x3f80);
        assert_eq!(bf16_bits(1.0 + 1.0 / 256.0), 0x3f80, "halfway goes to even");
    }

    #[test]
    fn every_case_has_a_name_of_its_own_and_counts_what_its_mask_lets_through() {
        let cases = grid(DType::BF16, None);
        let names: std::collections::HashSet<_> = cases.iter().map(|c| &c.case).collect();
        assert_eq!(names.len(), cases.len());
        let of = |name: &str| cases.iter().find(|c| c.case == name).expect(name).flops;
        let full = of("full/h16-16/s8192/d128/forward");
        assert_eq!(full, 4.0 * 2.0 * 16.0 * 8192.0 * 8192.0 * 128.0);
        assert_eq!(of("full/h16-16/s8192/d128/backward"), 2.5 * full);
        let causal = of("causal/h16-16/s8192/d128/forward");
        assert_eq!(causal / full, 8193.0 / 16384.0);
        let masked: Vec<_> = cases.iter().filter_map(Case::without_mask).collect();
        assert!(masked.len() > 50 && masked.iter().all(|c| c.work.mask == Mask::Full));
        assert!(masked.iter().any(|c| c.case == "full/h16-16/s8192/d128/backward"));
        // Sequences are documents of the mask; without one there is one sequence, of all pairs.
        let packed = cases.iter().find(|c| c.storage == Storage::Packed).expect("one is packed");
        let full = packed.without_mask().expect("it has a mask");
        assert_eq!([packed.planned().mask, full.planned().mask], [Mask::Causal, Mask::Full]);
        assert_eq!((packed.offsets().len() > 10, full.offsets()), (true, vec![0, TOKENS as i32]));
        let narrow = grid(DType::F8E4M3, None);
        let wide = |c: &Case| c.case.strip_suffix("/f8e4m3").map(|n| names.contains(&n.to_owned()));
        assert!(narrow.len() > 50 && narrow.iter().all(|c| wide(c) == Some(true)));
        assert!(narrow.iter().all(|c| c.work.dtype == DType::F8E4M3));
    }
}
