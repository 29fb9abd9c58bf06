//! How fast the blocks are on this machine's GPU: of every memory-bound block the bytes that it must
//! move, the time, and the rate as a share of what a copy of the same size reaches. Whole training steps
//! are measured by `foveate bench train`.
//!
//! ```console
//! $ cargo run --release -p foveate-nn-cuda --example block_speed
//! ```

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use foveate_gpu::abi::Abi;
use foveate_gpu::driver::{Allocation, Event};
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, Engine, GpuError};
use foveate_nn_cuda::embedding::{Embedding, EmbeddingBackward, TokenOrder};
use foveate_nn_cuda::gated::{Activation, Gated, GatedBackward};
use foveate_nn_cuda::head_norm::{self, HeadNorm, HeadNormBackward, Heads};
use foveate_nn_cuda::loss::CrossEntropy;
use foveate_nn_cuda::norm::{self, RmsNorm, RmsNormAgain, RmsNormBackward};
use foveate_nn_cuda::optimizer::{
    CONSTANTS_LEN, Piece, Pieces, Rule, Squares, StepConstants, TOTALS_LEN, Totals, Update, parts,
};
use foveate_nn_cuda::rope::{Pairing, Rope, Turn};
use foveate_nn_cuda::vectors::{ColumnSums, CopyRows};
use foveate_nn_cuda::{Block, Kernels};
use foveate_tensor::DType;
use foveate_tensor::random::Random;

const TOKENS: usize = 8192;
const WAIT: Duration = Duration::from_secs(20);
/// Bytes of a table of rotations: f32, and as many positions as tokens.
const ANGLES: usize = 4 * 128 * TOKENS;
/// Calls of which the median is taken.
const CALLS: usize = 21;
/// Written between calls, so that none finds its operands in L2.
const FLUSH_BYTES: usize = 256 << 20;

/// Memory for operands, and the time of blocks.
struct Bench {
    kernels: Kernels,
    kept: Vec<Allocation>,
    flush: Allocation,
}

impl Bench {
    fn new() -> Result<Self, GpuError> {
        let kernels = Kernels::new(Engine::get(0)?);
        let flush = kernels.engine().queue().pool().take(FLUSH_BYTES)?;
        Ok(Self { kernels, kept: Vec::new(), flush })
    }

    /// Zeros, which every block takes.
    fn bytes(&mut self, bytes: usize) -> Result<u64, GpuError> {
        let memory = self.kernels.engine().queue().pool().take(bytes)?;
        memory.fill(0)?;
        let address = memory.address();
        self.kept.push(memory);
        Ok(address)
    }

    fn tensor<const N: usize>(
        &mut self,
        dtype: DType,
        shape: [usize; N],
    ) -> Result<DeviceTensor<N>, GpuError> {
        let address = self.bytes(shape.iter().product::<usize>() * dtype.bytes())?;
        Ok(DeviceTensor::contiguous(address, dtype, shape))
    }

    fn upload(&mut self, bytes: &[u8]) -> Result<u64, GpuError> {
        let memory = self.kernels.engine().queue().pool().upload(bytes)?;
        let address = memory.address();
        self.kept.push(memory);
        Ok(address)
    }

    /// Milliseconds of a block, the median of some calls.
    fn ms(&self, block: &impl Block) -> Result<f32, GpuError> {
        let engine = self.kernels.engine();
        let stream = engine.queue().stream();
        let mut times = Vec::new();
        for _ in 0..CALLS {
            self.flush.fill(1)?;
            let [begin, end] = [Event::new(engine.device())?, Event::new(engine.device())?];
            begin.record(stream)?;
            // SAFETY: operands are allocations that this value keeps.
            unsafe { self.kernels.queue(engine.queue(), block)? };
            end.record(stream)?;
            end.wait(WAIT, "a block")?;
            times.push(end.ms_since(&begin)?);
        }
        times.sort_by(f32::total_cmp);
        Ok(times[CALLS / 2])
    }

    /// A line of the table: the block's name and what it moves.
    fn line(
        &self,
        name: &str,
        width: usize,
        bytes: usize,
        block: &impl Block,
    ) -> Result<(), GpuError> {
        let ms = self.ms(block)?;
        let [rate, copy] = [bytes as f32 / ms / 1e6, self.copy_rate(bytes)?];
        println!(
            "{name:24} {width:6} {:8.1} MiB {:8.1} us {rate:7.0} GB/s  {:5.1} % of a copy's {copy:.0}",
            bytes as f32 / 1048576.0,
            ms * 1e3,
            100.0 * rate / copy,
        );
        Ok(())
    }

    /// GB/s of a copy that moves as many bytes, read and written.
    fn copy_rate(&self, bytes: usize) -> Result<f32, GpuError> {
        let half = (bytes / 2).next_multiple_of(16384).min(self.flush.bytes() / 4);
        let pool = self.kernels.engine().queue().pool();
        let (from, to) = (pool.take(half)?, pool.take(half)?);
        let rows = |of: &Allocation| {
            DeviceTensor::contiguous(of.address(), DType::BF16, [half / 16384, 8192])
        };
        let ms = self.ms(&CopyRows { from: rows(&from), to: rows(&to) })?;
        Ok(2.0 * half as f32 / ms / 1e6)
    }
}

/// Blocks of a stream of `width` columns.
fn streams(b: &mut Bench, width: usize) -> Result<(), GpuError> {
    let (dtype, matrix) = (DType::BF16, 2 * TOKENS * width);
    let (x, y, out) = (
        b.tensor(dtype, [TOKENS, width])?,
        b.tensor(dtype, [TOKENS, width])?,
        b.tensor(dtype, [TOKENS, width])?,
    );
    let weight = b.tensor(dtype, [width])?;
    let inverse = b.tensor(DType::F32, [TOKENS])?;
    let (eps, offset) = (1e-5, 0.0);
    let norm = RmsNorm { x, residual: None, weight, inverse, out, eps, offset };
    b.line("RMSNorm", width, 2 * matrix, &norm)?;
    let with = RmsNorm { residual: Some((y, x)), ..norm };
    b.line("RMSNorm of a sum", width, 4 * matrix, &with)?;
    let again = RmsNormAgain { x, weight, inverse, out, offset };
    b.line("RMSNorm again", width, 2 * matrix, &again)?;
    let d_weight = b.tensor(DType::F32, [width])?;
    let partial = b.tensor(DType::F32, [norm::parts(TOKENS), width])?;
    let backward = RmsNormBackward {
        x,
        weight,
        inverse,
        d_out: y,
        d_x: out,
        accumulate: true,
        again: None,
        d_weight: Some(d_weight),
        accumulate_weight: true,
        partial,
        offset,
    };
    b.line("RMSNorm, backward", width, 4 * matrix, &backward)?;
    let with = RmsNormBackward { again: Some(b.tensor(dtype, [TOKENS, width])?), ..backward };
    b.line("RMSNorm, backward and again", width, 5 * matrix, &with)?;
    b.line("gradient of a bias", width, matrix, &ColumnSums { from: x, to: d_weight })?;
    let gate_up = b.tensor(dtype, [TOKENS, 2 * width])?;
    let activation = Activation::Silu;
    b.line("SwiGLU", width, 3 * matrix, &Gated { activation, gate_up, out })?;
    let backward = GatedBackward { activation, gate_up, d_out: out };
    b.line("SwiGLU, backward", width, 6 * matrix, &backward)?;
    let count = [TOKENS];
    let positions: Vec<u8> = (0..TOKENS as i32).flat_map(i32::to_ne_bytes).collect();
    let positions = DeviceArray::new(b.upload(&positions)?, ElementType::I32, &count);
    let table = b.tensor(DType::F32, [TOKENS, 128])?;
    let (heads, pairing) = (width / 128, Pairing::Halves);
    let turn = Turn { positions, table, pairing };
    let rope = Rope { qkv: x, heads, dim: 128, turn, back: false };
    b.line("RoPE", width, 2 * matrix + ANGLES, &rope)?;
    normed_heads(b, width, turn)
}

/// Norms of heads of a projection of `width` columns: half are queries', a quarter keys'.
fn normed_heads(b: &mut Bench, width: usize, turn: Turn<'_>) -> Result<(), GpuError> {
    let (dtype, matrix) = (DType::BF16, 2 * TOKENS * width);
    let heads = Heads { queries: width / 256, keys: width / 512, dim: 128 };
    let (qkv, out) = (b.tensor(dtype, [TOKENS, width])?, b.tensor(dtype, [TOKENS, width])?);
    let weight = b.tensor(dtype, [256])?;
    let inverse = b.tensor(DType::F32, [TOKENS * heads.normalised()])?;
    let (eps, offset, d_qkv) = (1e-5, 0.0, out);
    let d_weight = Some(b.tensor(DType::F32, [256])?);
    let partial = b.tensor(DType::F32, [head_norm::parts(TOKENS), 256])?;
    let turned = ("norms of heads that turn", Some(turn), ANGLES);
    for (name, turn, angles) in [("norms of heads", None, 0), turned] {
        let norm = HeadNorm { heads, qkv, weight, inverse, out, eps, offset, turn };
        b.line(name, width, 2 * matrix + angles, &norm)?;
        let backward = HeadNormBackward {
            heads,
            qkv,
            weight,
            inverse,
            d_qkv,
            d_weight,
            partial,
            offset,
            turn,
        };
        b.line("their gradients", width, 9 * matrix / 4 + angles, &backward)?;
    }
    Ok(())
}

/// The embedding and its gradient, where a third of the tokens is one of few words.
fn embeddings(b: &mut Bench, width: usize) -> Result<(), GpuError> {
    const VOCABULARY: usize = 32768;
    let (dtype, matrix, count) = (DType::BF16, 2 * TOKENS * width, [TOKENS]);
    let (x, out) = (b.tensor(dtype, [TOKENS, width])?, b.tensor(dtype, [TOKENS, width])?);
    let word = |i: usize| match i % 3 {
        0 => (i % 50) as u32,
        _ => (i * 2_654_435_761 % VOCABULARY) as u32,
    };
    let words: Vec<u32> = (0..TOKENS).map(word).collect();
    let order = TokenOrder::new(&words)?;
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let tokens = DeviceArray::new(b.upload(&bytes)?, ElementType::I32, &count);
    let table = b.tensor(dtype, [VOCABULARY, width])?;
    b.line(
        "embedding",
        width,
        2 * matrix,
        &Embedding { table, first: None, tokens, out, scale: 1.0 },
    )?;
    let words_len = [order.words().len()];
    let backward = EmbeddingBackward {
        first: None,
        d_out: x,
        d_table: b.tensor(DType::F32, [VOCABULARY, width])?,
        order: &order,
        words: DeviceArray::new(b.upload(&order.bytes())?, ElementType::I32, &words_len),
        partial: b.tensor(DType::F32, [order.partial_rows(), width])?,
        scale: 1.0,
    };
    let mut distinct = words.clone();
    distinct.sort_unstable();
    distinct.dedup();
    b.line("embedding, backward", width, matrix + 8 * distinct.len() * width, &backward)
}

fn losses(b: &mut Bench, vocabulary: usize) -> Result<(), GpuError> {
    let count = [2048];
    let [tokens] = count;
    let logits = b.tensor(DType::BF16, [tokens, vocabulary])?;
    let losses = b.tensor(DType::F32, [tokens])?;
    let labels = DeviceArray::new(b.bytes(4 * tokens)?, ElementType::I32, &count);
    let (z_losses, gradient, cap, z_weight) = (None, true, None, 0.0);
    let loss = CrossEntropy { logits, labels, losses, z_losses, gradient, cap, z_weight };
    // The second read comes from L2 mostly.
    b.line("cross-entropy, gradient", vocabulary, 4 * tokens * vocabulary, &loss)
}

/// Steps by random gradients: moments that stay 0 would take the slow paths of divisions and roots.
fn updates(b: &mut Bench) -> Result<(), GpuError> {
    let elems = 64 << 20;
    let betas = [0.9, 0.95];
    let pieces = Pieces::new(&[Piece { range: 0..elems, origin: 0, rate: 1.0, decay: 1.0 }])?;
    let (table_len, elems_len) = ([pieces.len_f64()], [elems]);
    let table = b.upload(&pieces.bytes())?;
    let constants = b.upload(&StepConstants::new(10, 1, 1e-4, betas, 0.0).bytes())?;
    let totals = b.upload(&Totals { factor: 1.0, ..Totals::default() }.bytes())?;
    let f64s = |address, len| DeviceArray::new(address, ElementType::F64, len);
    let mut random = Random::new(1);
    let some: Vec<u8> =
        (0..1 << 20).flat_map(|_| (random.normal() as f32 * 1e-3).to_ne_bytes()).collect();
    let gradients = b.upload(&some.repeat(elems >> 20))?;
    let gradients = DeviceTensor::contiguous(gradients, DType::F32, [elems]);
    let words = foveate_nn::moments::words(elems);
    for (name, weights, completed, moments, kept, bytes) in [
        ("AdamW, exact", DType::BF16, true, DType::F32, elems, 28),
        ("AdamW, f32", DType::F32, false, DType::F32, elems, 28),
        ("AdamW, bf16 moments", DType::BF16, true, DType::BF16, elems, 20),
        ("AdamW, 8-bit moments", DType::BF16, true, DType::F32, words, 16),
    ] {
        let remainders = match completed {
            true => Some(DeviceArray::new(b.bytes(2 * elems)?, ElementType::I16, &elems_len)),
            false => None,
        };
        let update = Update {
            weights: b.tensor(weights, [elems])?,
            remainders,
            gradients,
            first_gradient: 0,
            means: b.tensor(moments, [kept])?,
            squares: Some(b.tensor(moments, [kept])?),
            codes: kept == words,
            trained: elems,
            pieces: &pieces,
            piece_table: f64s(table, &table_len),
            constants: f64s(constants, &[CONSTANTS_LEN]),
            totals: f64s(totals, &[TOTALS_LEN]),
            rule: Rule::AdamW { betas: betas.map(|beta| beta as f32), eps: 1e-8 },
            weight_decay: 0.1,
        };
        b.line(name, elems, bytes * elems, &update)?;
    }
    let partial_len = [parts(elems)];
    let partial = f64s(b.bytes(8 * partial_len[0])?, &partial_len);
    b.line("norm of gradients", elems, 4 * elems, &Squares { gradients, partial })
}

fn blocks() -> Result<(), Box<dyn Error>> {
    let mut b = Bench::new()?;
    let name = &b.kernels.engine().device().info().name;
    println!("{name}, {TOKENS} tokens, bf16; median of {CALLS} calls");
    for width in [2048, 4096, 8192] {
        streams(&mut b, width)?;
        embeddings(&mut b, width)?;
        b.kept.clear();
    }
    for vocabulary in [32768, 128_256] {
        losses(&mut b, vocabulary)?;
        b.kept.clear();
    }
    Ok(updates(&mut b)?)
}

fn main() -> ExitCode {
    match blocks() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
