//! The blocks on an NVIDIA GPU: what [`foveate_nn::Blocks`] asks for, queued on one stream. Moments in the memory
//! of the host come and go on two more (`passage`).
//!
//! Every array is memory of the queue's pool. What a block needs besides its operands is taken from
//! there when the block is queued and given back at once: whoever gets it next queues its work
//! behind. A step whose sizes were there before so allocates nothing, and since the pool gives memory
//! to work of its own queue only, nothing waits either, but [`foveate_nn::Blocks::read`] and downloads.
//!
//! Products are cuBLASLt's, attention is `foveate-cuda`'s on strided views of the packed projection,
//! all else this crate's kernels.

mod array;
mod attention;
mod batch;
mod blocks;
mod bus;
mod clock;
mod context;
#[cfg(test)]
#[path = "../../tests/ranks/context.rs"]
pub(crate) mod context_plans;
mod embedding;
mod graphs;
mod loss;
mod passage;
mod sharing;
mod state_memory;
#[cfg(test)]
mod tests;
mod totals;
mod transfer;
mod updates;

use std::sync::Arc;

use foveate::cuda::choose::KernelOptions;
use foveate_gpu::blas::Matmul;
use foveate_gpu::driver::{Allocation, Readback};
use foveate_gpu::{Engine, GpuError, GpuErrorKind, Queue};
use foveate_nn::{MOMENTS_PIECE, NnError, NnErrorKind, PartMut, Precision};
use foveate_tensor::DType;

use crate::launch::{Block, Kernels};
pub use array::CudaArray;
pub use attention::AttentionPlan;
pub use batch::CudaBatch;
use batch::Rotations;
use bus::Bus;
use clock::{Clock, Timed};
use graphs::Recorder;
use passage::Passage;
pub use state_memory::CudaStateMemory;
pub use totals::CudaTotals;
use totals::Updates;
pub use updates::CudaSpans;

/// Tokens whose logits are held at once, at least and at most. Each chunk reads the whole head, and all
/// but the first of a step read its gradient and write it again.
const LOGITS_TOKENS: [usize; 2] = [1024, 16_384];
/// The share of the GPU's memory that logits may take.
const LOGITS_SHARE: usize = 64;

/// An NVIDIA GPU.
#[derive(Debug)]
pub struct Cuda {
    kernels: Kernels,
    queue: Queue,
    ordinal: usize,
    precision: Precision,
    deterministic: bool,
    /// What is asked of attention's kernels.
    attention: KernelOptions,
    shares_memory: bool,
    clock: Clock,
    /// The last tables of rotations that were uploaded.
    tables: Vec<Arc<Rotations>>,
    /// Host memory that totals were read through and others can be.
    readbacks: Vec<Readback>,
    /// Whether a step that was not finite stops those behind it; there with the first totals.
    stopped: Option<Allocation>,
    updates: Updates,
    /// Elements of a piece of moments that lie in the memory of the host.
    piece: usize,
    /// Where they pass through the device; there with the first update.
    passage: Option<Passage>,
    /// Copies from and to the memory of the host; there with the first.
    bus: Option<Arc<Bus>>,
    /// Whether weights and moments are copied to the memory of the host, which nothing that writes them waits for yet.
    copying: bool,
    recorder: Recorder,
}

/// The power of two of tokens whose logits, of `token_bytes` each, take `bytes` or less.
fn logits_tokens(bytes: usize, token_bytes: usize) -> usize {
    let [least, most] = LOGITS_TOKENS;
    let tokens = bytes / token_bytes.max(1);
    tokens.checked_ilog2().map_or(0, |log| 1 << log).clamp(least, most)
}

/// Tokens whose logits are held at once on a GPU with so much memory, of a vocabulary of `vocab`.
pub fn logits_tokens_of(memory_bytes: u64, vocab: usize, precision: Precision) -> usize {
    logits_tokens(memory_bytes as usize / LOGITS_SHARE, vocab * precision.weights.bytes())
}

/// What a product multiplies with that is there before it.
fn beta(accumulate: bool) -> f32 {
    f32::from(u8::from(accumulate))
}

/// A line that says what the device, or a library of it, refused.
fn failed(e: &GpuError) -> NnError {
    NnErrorKind::Device(e.to_string()).into()
}

impl Cuda {
    /// GPU `ordinal`, on a queue of its own. `deterministic` makes attention's gradients the same bits
    /// in every run, as all else is.
    ///
    /// # Errors
    /// Without a driver or a GPU of this number; for a precision that no kernels are made for.
    pub fn new(ordinal: usize, precision: Precision, deterministic: bool) -> Result<Self, NnError> {
        let Precision { weights, gradients, .. } = precision;
        if gradients != DType::F32 && gradients != weights {
            let reason =
                format!("gradients are f32 or {weights} as their weights, not {gradients}");
            return Err(NnErrorKind::Device(reason).into());
        }
        let engine = Engine::get(ordinal).map_err(|e| failed(&e))?;
        let queue = engine.new_queue().map_err(|e| failed(&e))?;
        engine.device().forget_peak();
        let (clock, tables, readbacks, stopped, updates) = Default::default();
        let recorder = Recorder::default();
        let kernels = Kernels::new(engine);
        let shares_memory = !queue.pool().is_exact();
        Ok(Self {
            kernels,
            queue,
            ordinal,
            precision,
            deterministic,
            attention: KernelOptions::default(),
            shares_memory,
            clock,
            tables,
            readbacks,
            stopped,
            updates,
            piece: MOMENTS_PIECE,
            passage: None,
            bus: None,
            copying: false,
            recorder,
        })
    }

    /// The same, with attention by the kernels that are asked for in the place of the planner's choice. What they
    /// cannot do is an error of the first call.
    pub fn with_attention_by(self, kernels: KernelOptions) -> Self {
        Self { attention: kernels, ..self }
    }

    /// The same with memory of its own for every array of a pass, as it is where compute-sanitizer looks
    /// for accesses past their ends (`FOVEATE_EXACT_MEMORY`).
    pub fn with_arrays_apart(self) -> Self {
        Self { shares_memory: false, ..self }
    }

    /// The same with moments of the host's memory in pieces of `elems` elements, a multiple of 8, as tests of
    /// small models have them.
    pub fn with_moments_in_pieces_of(self, elems: usize) -> Self {
        assert!(elems > 0 && elems.is_multiple_of(8), "pieces of {elems} elements");
        Self { piece: elems, ..self }
    }

    /// Its name, as the driver says it.
    pub fn name(&self) -> &str {
        &self.kernels.engine().device().info().name
    }

    /// Whether a GPU `ordinal` can be used.
    ///
    /// # Errors
    /// Why not, in a line.
    pub fn available(ordinal: usize) -> Result<(), NnError> {
        Engine::get(ordinal).map(drop).map_err(|e| failed(&e))
    }

    /// Queues a block.
    fn run(&self, block: &impl Block) -> Result<(), NnError> {
        self.run_on(&self.queue, block)
    }

    /// Queues a block on another queue of the device, which waits for the queue of its operands before,
    /// and which that waits for behind.
    fn run_on(&self, queue: &Queue, block: &impl Block) -> Result<(), NnError> {
        // SAFETY: operands are allocations of the queue's own pool, which gives their memory to later
        // work of this queue alone, and frees it only when that is done; or of one that has waited for the
        // other.
        unsafe { self.kernels.queue(queue, block) }.map_err(|e| failed(&e))
    }

    fn product(&self, matmul: &Matmul) -> Result<(), NnError> {
        self.kernels.engine().matmul(&self.queue, matmul).map_err(|e| failed(&e))
    }

    /// Memory for what is queued next.
    fn scratch(&self, name: &'static str, bytes: usize) -> Result<Allocation, NnError> {
        self.queue.pool().take(bytes).map_err(|e| match e.kind() {
            GpuErrorKind::OutOfMemory { .. } => NnErrorKind::Memory { name, elems: bytes }.into(),
            _ => failed(&e),
        })
    }

    fn copied(&self, bytes: &[u8]) -> Result<Allocation, NnError> {
        self.queue.pool().upload(bytes).map_err(|e| failed(&e))
    }

    /// Queues `work`, whose device time is of `kind`.
    fn timed(
        &mut self,
        kind: Timed,
        work: impl FnOnce(&mut Self) -> Result<(), NnError>,
    ) -> Result<(), NnError> {
        self.clock.begin(self.queue.stream(), kind).map_err(|e| failed(&e))?;
        work(self)?;
        self.clock.end(self.queue.stream()).map_err(|e| failed(&e))
    }

    /// Queues a block, whose device time is of `kind`.
    fn run_timed(&mut self, kind: Timed, block: &impl Block) -> Result<(), NnError> {
        self.timed(kind, |this| this.run(block))
    }

    /// Sets a gradient that blocks can only add to to 0, unless it is to be accumulated.
    fn begin_sums(&self, gradient: &PartMut<'_, CudaArray>) -> Result<(), NnError> {
        let (size, place) = (gradient.array.dtype.bytes(), &gradient.place);
        if gradient.accumulate {
            return Ok(());
        }
        let array = &gradient.array;
        array.fill_at(place.start * size, 0, place.len() * size).map_err(|e| failed(&e))
    }
}
