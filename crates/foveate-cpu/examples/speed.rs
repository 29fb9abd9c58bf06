//! Attention against a large matrix product on the same threads.
//!
//! `cargo run --release -p foveate-cpu --example speed [CASE [TILE_Q TILE_KV]]` prints GFLOP/s of
//! the live area, the best of several runs, and the ratio to the product's rate, which is
//! measured in alternation with each case. CASE is a part of the names of the cases to run. With
//! `FOVEATE_PROFILE` set, also the shares of the stages of forward and backward.

use std::time::{Duration, Instant};

use foveate_cpu::{CpuOptions, CpuPlan, Stages};
use foveate_mods::{MaskMod, expr};
use foveate_problem::{BackwardArgs, Dims, ForwardArgs, Operands, Spec};
use foveate_tensor::random::Random;
use foveate_tensor::{DType, Tensor};

const RUNS: usize = 7;

fn random(seed: u64, dtype: DType, shape: [usize; 4]) -> Tensor {
    let mut random = Random::new(seed);
    Tensor::from_fn(dtype, shape, |_| random.signed())
}

fn seconds(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// A product of 1536 × 1536 matrices on every thread of the pool.
struct Product {
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Product {
    const N: usize = 1536;

    fn new() -> Self {
        let n = Self::N * Self::N;
        Self { a: vec![0.5; n], b: vec![0.25; n], c: vec![0.0; n] }
    }

    fn gflops(&mut self) -> f64 {
        let n = Self::N;
        // SAFETY: the three matrices hold n·n elements, row-major.
        let time = seconds(|| unsafe {
            let c = self.c.as_mut_ptr();
            let (a, b) = (self.a.as_ptr(), self.b.as_ptr());
            let (row, column) = (n as isize, 1);
            let threads = gemm::Parallelism::Rayon(rayon::current_num_threads());
            gemm::gemm(
                n, n, n, c, column, row, false, a, column, row, b, column, row, 0.0, 1.0, false,
                false, false, threads,
            );
        });
        2.0 * (n * n * n) as f64 / time * 1e-9
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let wanted = args.next().unwrap_or_default();
    let mut tile = || args.next().map(|a| a.parse().expect("a tile size is a number"));
    let profile = std::env::var_os("FOVEATE_PROFILE").is_some();
    let options = CpuOptions { tile_q: tile(), tile_kv: tile(), profile, ..CpuOptions::default() };
    let mut product = Product::new();
    println!("{} threads", rayon::current_num_threads());
    println!(
        "{:32} {:>9} {:>6} {:>9} {:>6} {:>9}",
        "case", "forward", "ratio", "backward", "ratio", "product"
    );
    for dim in [64, 128] {
        for len in [512, 2048] {
            for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
                for mask in ["full", "causal"] {
                    let case = format!("{mask} D{dim} S{len} {name}");
                    if case.contains(&wanted) {
                        measure(&case, mask == "causal", dim, len, dtype, options, &mut product);
                    }
                }
            }
        }
    }
}

fn measure(
    case: &str,
    causal: bool,
    dim: usize,
    len: usize,
    dtype: DType,
    options: CpuOptions,
    product: &mut Product,
) {
    let shape = [1, 8, len, dim];
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| random(seed, dtype, shape));
    let operands = Operands::new(q.view(), k.view(), v.view());
    let dims = Dims::of(&operands).expect("operands fit");
    let mask = MaskMod::new(expr::q().ge(expr::kv()).dynamic()).expect("a mask");
    let spec = Spec { mask: causal.then_some(mask), score: None, scale: None, dropout: None };
    let plan = CpuPlan::new(&spec, &dims, dtype, options).expect("a plan");
    let live = if causal { len * (len + 1) / 2 } else { len * len } as f64;
    let mut out = Tensor::filled(dtype, shape, 0.0);
    let mut lse = Tensor::filled(DType::F32, [1, 8, len], 0.0);
    let [mut dq, mut dk, mut dv] = [0; 3].map(|_| Tensor::filled(dtype, shape, 0.0));
    let (mut forward, mut backward, mut rate) = (f64::MAX, f64::MAX, 0.0f64);
    let mut stages = [Stages::default(); 2];
    for _ in 0..RUNS {
        rate = rate.max(product.gflops());
        forward = forward.min(seconds(|| {
            let (out, lse) = (out.view_mut().expect("own"), lse.view_mut().expect("own"));
            let args = ForwardArgs { operands, out, lse, max_score: None };
            plan.forward(args).expect("forward");
        }));
        stages[0] = plan.take_stages();
        backward = backward.min(seconds(|| {
            let args = BackwardArgs {
                operands,
                out: out.view(),
                lse: lse.view(),
                d_out: d_out.view(),
                d_lse: None,
                dq: Some(dq.view_mut().expect("own")),
                dk: Some(dk.view_mut().expect("own")),
                dv: Some(dv.view_mut().expect("own")),
                accumulate: false,
                d_sink: None,
                d_captures: vec![],
            };
            plan.backward(args).expect("backward");
        }));
        stages[1] = plan.take_stages();
    }
    let products = 2.0 * 8.0 * live * dim as f64 * 1e-9;
    let (f, b) = (2.0 * products / forward, 5.0 * products / backward);
    println!("{case:32} {f:9.1} {:6.2} {b:9.1} {:6.2} {rate:9.1}", f / rate, b / rate);
    for (pass, s) in ["forward", "backward"].iter().zip(stages).filter(|_| options.profile) {
        let share = |d: Duration| 100.0 * d.as_secs_f64() / s.total.as_secs_f64();
        println!(
            "    {pass}: products {:.1} %, softmax {:.1} %, mods {:.1} %, packing {:.1} %, idle {:.1} %",
            share(s.products),
            share(s.softmax),
            share(s.mods),
            share(s.packing),
            share(s.idle()),
        );
    }
}
