//! The grid of `foveate bench gpu`, and a case made ready to run.
//!
//! `benches/gpu_peers.py` reads the cases as JSON and makes the same numbers from the same hash,
//! so peers are timed, and compared, on the same data.

use std::sync::Arc;

use foveate::cuda::driver::{Block, Event};
use foveate::cuda::{
    CudaPlan, DeviceBackward, DeviceForward, DeviceOperands, DeviceTensor, Engine,
};
use foveate::mask::{BlockMask, Tile};
use foveate::mods::ir::mix;
use foveate::mods::{Head, MaskMod, ScoreMod};
use foveate::{Attention, Buffer, DType, Device, Plan, Problem, masks, scores};
use rayon::prelude::*;
use serde::Serialize;

use crate::failure::Failure;

/// One line of the grid. Fields are those that `benches/gpu_peers.py` reads.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// Its name: mask, score, heads, length, head dim, direction.
    pub case: String,
    mask: &'static str,
    /// Keys of the window or the prefix, or the number of documents.
    width: usize,
    score: &'static str,
    /// Largest distance that the relative bias tells apart.
    reach: usize,
    batch: usize,
    heads: usize,
    heads_kv: usize,
    pub len: usize,
    pub dim: usize,
    dtype: &'static str,
    pass: &'static str,
    /// Operations on the pairs that the mask lets through.
    pub flops: f64,
}

const FULL: (&str, usize) = ("full", 0);
const CAUSAL: (&str, usize) = ("causal", 0);
const MASKS: [(&str, usize); 3] = [("window", 1024), ("documents", 16), ("prefix", 1024)];
const SCORES: [&str; 3] = ["alibi", "softcap", "relative"];
const DIMS: [usize; 5] = [64, 96, 128, 192, 256];
const LENGTHS: [usize; 6] = [1024, 2048, 4096, 8192, 16384, 32768];
/// Tokens of a case and size of all its heads together, as attention benchmarks usually have them.
const TOKENS: usize = 16384;
const WIDTH: usize = 2048;

/// Every case: plain masks over all sizes, then masks, scores and grouped heads at one length.
pub fn grid() -> Vec<Case> {
    let mut cases = Vec::new();
    for pass in ["forward", "backward"] {
        for mask in [FULL, CAUSAL] {
            for dim in DIMS {
                for len in LENGTHS {
                    cases.push(Case::new(mask, "none", None, len, dim, pass));
                }
            }
        }
        for dim in [64, 128] {
            for mask in MASKS {
                cases.push(Case::new(mask, "none", None, 8192, dim, pass));
            }
            for mask in [FULL, CAUSAL] {
                for score in SCORES {
                    cases.push(Case::new(mask, score, None, 8192, dim, pass));
                }
            }
        }
        for mask in [FULL, CAUSAL, MASKS[0]] {
            cases.push(Case::new(mask, "none", Some((32, 8)), 8192, 128, pass));
        }
    }
    cases
}

impl Case {
    fn new(
        (mask, width): (&'static str, usize),
        score: &'static str,
        heads: Option<(usize, usize)>,
        len: usize,
        dim: usize,
        pass: &'static str,
    ) -> Self {
        let (heads, heads_kv) = heads.unwrap_or((WIDTH / dim, WIDTH / dim));
        let wide = if width > 0 { width.to_string() } else { String::new() };
        let scored = if score == "none" { String::new() } else { format!("-{score}") };
        let mut case = Self {
            case: format!("{mask}{wide}{scored}/h{heads}-{heads_kv}/s{len}/d{dim}/{pass}"),
            mask,
            width,
            score,
            reach: 128,
            batch: (TOKENS / len).max(1),
            heads,
            heads_kv,
            len,
            dim,
            dtype: "bf16",
            pass,
            flops: 0.0,
        };
        case.flops = case.count();
        case
    }

    fn mask_mod(&self) -> Option<MaskMod> {
        let width = self.width as i32;
        let causal = masks::causal;
        let fits = "the grid's arguments are in range";
        match self.mask {
            "causal" => Some(causal()),
            "window" => Some(masks::sliding_window(width).expect(fits)),
            "prefix" => Some(masks::prefix_lm(width).expect(fits)),
            "documents" => {
                let ids = (0..self.len).map(|i| (i * self.width / self.len) as i32).collect();
                Some(causal() & masks::document(&Buffer::vector("doc", ids)).expect(fits))
            }
            _ => None,
        }
    }

    fn score_mod(&self) -> Option<ScoreMod> {
        let fits = "the grid's arguments are in range";
        match self.score {
            "alibi" => Some(scores::alibi(self.heads).expect(fits)),
            "softcap" => Some(scores::soft_cap(30.0).expect(fits)),
            "relative" => {
                let shape = [self.heads, 2 * self.reach + 1];
                let table = (0..shape[0] * shape[1]).map(|i| normal(5, i)).collect();
                let table = Buffer::learned("rel_bias", &shape, table).expect(fits);
                Some(scores::relative_bias(&table).expect(fits))
            }
            _ => None,
        }
    }

    fn program(&self) -> Attention {
        let masked = self.mask_mod().into_iter().fold(Attention::new(), Attention::mask);
        self.score_mod().into_iter().fold(masked, Attention::score)
    }

    fn count(&self) -> f64 {
        let len = self.len;
        let pairs = match self.mask_mod() {
            None => (len * len) as f64,
            Some(mask) => {
                let head = Head { q_len: len as i32, kv_len: len as i32, ..Head::default() };
                let tiles = BlockMask::build(&mask, head, len, len, Tile { q: 128, kv: 128 });
                tiles.stats().live_entries as f64
            }
        };
        let products = if self.pass == "forward" { 2.0 } else { 5.0 };
        2.0 * products * pairs * (self.batch * self.heads * self.dim) as f64
    }
}

/// Number `i` of stream `seed`: the sum of the four bytes of its hash, with variance 1.
fn normal(seed: i32, i: usize) -> f32 {
    let bytes = mix(seed, i as i32).to_le_bytes();
    let sum: i32 = bytes.iter().map(|&b| i32::from(b)).sum();
    // Four uniform bytes have the variance 4 (256² − 1) / 12.
    (sum - 510) as f32 / (4.0 * 65535.0 / 12.0f32).sqrt()
}

/// Operands and destinations of a case in device memory, and its plan.
pub struct Prepared {
    engine: Arc<Engine>,
    plan: Plan,
    backward: bool,
    tensors: Tensors,
    /// Gradient of the relative bias.
    bias: Option<(Block, usize)>,
    blocks: Vec<Block>,
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
    pub fn new(case: &Case, ordinal: usize) -> Result<Self, Failure> {
        let engine = Engine::get(ordinal)?;
        let q_shape = [case.batch, case.heads, case.len, case.dim];
        let kv_shape = [case.batch, case.heads_kv, case.len, case.dim];
        let problem = Problem::shaped(DType::BF16, q_shape, kv_shape, kv_shape)?;
        let plan = case.program().plan(&problem, &Device::cuda(ordinal))?;
        let mut blocks = Vec::new();
        let pool = engine.queue().pool();
        let mut random = |seed: i32, shape: [usize; 4]| -> Result<DeviceTensor, Failure> {
            let elems: usize = shape.iter().product();
            let bits: Vec<u8> = (0..elems)
                .into_par_iter()
                .flat_map_iter(|i| bf16_bits(normal(seed, i)).to_le_bytes())
                .collect();
            let block = pool.upload(&bits)?;
            let tensor = DeviceTensor::contiguous(block.address(), DType::BF16, shape);
            blocks.push(block);
            Ok(tensor)
        };
        let [q, k] = [random(1, q_shape)?, random(2, kv_shape)?];
        let [v, d_out] = [random(3, kv_shape)?, random(4, q_shape)?];
        let mut empty = |dtype: DType, elems: usize| -> Result<u64, Failure> {
            let block = pool.take(elems * dtype.bytes())?;
            // What is not written shows as NaN.
            block.fill(0xff)?;
            let address = block.address();
            blocks.push(block);
            Ok(address)
        };
        let mut like = |shape: [usize; 4]| -> Result<DeviceTensor, Failure> {
            let address = empty(DType::BF16, shape.iter().product())?;
            Ok(DeviceTensor::contiguous(address, DType::BF16, shape))
        };
        let (out, dq) = (like(q_shape)?, like(q_shape)?);
        let (dk, dv) = (like(kv_shape)?, like(kv_shape)?);
        let rows = [case.batch, case.heads, case.len];
        let lse = empty(DType::F32, rows.iter().product())?;
        let lse = DeviceTensor::contiguous(lse, DType::F32, rows);
        let bias = match case.score {
            "relative" => {
                let elems = case.heads * (2 * case.reach + 1);
                Some((pool.take(elems * 4)?, elems))
            }
            _ => None,
        };
        let tensors = Tensors { q, k, v, d_out, out, lse, dq, dk, dv };
        let backward = case.pass == "backward";
        let prepared = Self { engine, plan, backward, tensors, bias, blocks };
        if backward {
            prepared.forward()?;
        }
        Ok(prepared)
    }

    fn plan(&self) -> &CudaPlan {
        self.plan.cuda().expect("the case was planned for a GPU")
    }

    fn operands(&self) -> DeviceOperands<'static> {
        let Tensors { q, k, v, .. } = self.tensors;
        DeviceOperands { q, k, v, sink: None, varlen: None }
    }

    fn forward(&self) -> Result<(), Failure> {
        let Tensors { out, lse, .. } = self.tensors;
        let args = DeviceForward { operands: self.operands(), out, lse, max_score: None };
        Ok(self.plan().forward_on(self.engine.queue(), &args)?)
    }

    /// Queues the pass of the case.
    pub fn run(&self) -> Result<(), Failure> {
        if !self.backward {
            return self.forward();
        }
        let Tensors { d_out, out, lse, dq, dk, dv, .. } = self.tensors;
        let bias = self.bias.iter().map(|(block, elems)| {
            ("rel_bias", DeviceTensor::contiguous(block.address(), DType::F32, [*elems]))
        });
        let args = DeviceBackward {
            operands: self.operands(),
            out,
            lse,
            d_out,
            d_lse: None,
            dq,
            dk,
            dv,
            accumulate: false,
            d_sink: None,
            d_captures: bias.collect(),
        };
        Ok(self.plan().backward_on(self.engine.queue(), &args)?)
    }

    /// Runs the pass once and gives its milliseconds of device time.
    pub fn time(&self) -> Result<f64, Failure> {
        let device = self.engine.device();
        let (begin, end) = (Event::new(device)?, Event::new(device)?);
        begin.record(self.engine.queue().stream())?;
        self.run()?;
        end.record(self.engine.queue().stream())?;
        end.wait(self.plan().options().timeout, "a case of the benchmark")?;
        Ok(f64::from(end.ms_since(&begin)?))
    }

    /// A few elements of the result (out, or dq), evenly spaced: what a peer's are compared with.
    pub fn sample(&self, count: usize) -> Result<Vec<f32>, Failure> {
        let tensor = if self.backward { &self.tensors.dq } else { &self.tensors.out };
        let elems = tensor.layout.elems();
        let block = self.blocks.iter().find(|b| b.address() == tensor.address);
        let block = block.expect("the result is in a block");
        let step = (elems / count).max(1);
        (0..count.min(elems))
            .map(|i| {
                let mut bits = [0; 2];
                block.read_at(i * step * 2, &mut bits, self.plan().options().timeout)?;
                Ok(f32::from_bits(u32::from(u16::from_le_bytes(bits)) << 16))
            })
            .collect()
    }
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
    fn numbers_have_mean_0_and_variance_1() {
        let numbers: Vec<f64> = (0..100_000).map(|i| f64::from(normal(1, i))).collect();
        let mean = numbers.iter().sum::<f64>() / 1e5;
        let variance = numbers.iter().map(|x| x * x).sum::<f64>() / 1e5 - mean * mean;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "{mean}, {variance}");
        assert_eq!(bf16_bits(1.0), 0x3f80);
        assert_eq!(bf16_bits(1.0 + 1.0 / 256.0), 0x3f80, "halfway goes to even");
    }

    #[test]
    fn every_case_has_a_name_of_its_own_and_counts_what_its_mask_lets_through() {
        let cases = grid();
        let names: std::collections::HashSet<_> = cases.iter().map(|c| &c.case).collect();
        assert_eq!(names.len(), cases.len());
        let of = |name: &str| cases.iter().find(|c| c.case == name).expect(name).flops;
        let full = of("full/h16-16/s8192/d128/forward");
        assert_eq!(full, 4.0 * 2.0 * 16.0 * 8192.0 * 8192.0 * 128.0);
        assert_eq!(of("full/h16-16/s8192/d128/backward"), 2.5 * full);
        let causal = of("causal/h16-16/s8192/d128/forward");
        assert_eq!(causal / full, 8193.0 / 16384.0);
    }
}
