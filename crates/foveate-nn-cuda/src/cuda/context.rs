//! Attention over ranks that share the rows of a batch, on GPUs.
//!
//! Keys and values lie side by side in a packed projection, so a token's are one piece. A rank has an array of
//! all that its queries see: its own, and what arrives, straight from where others have it, on a queue of its
//! own: they leave before queries are computed. Attention of a stage waits for that stage's keys alone; the parts
//! are joined in order of stage. The backward pass is one over all keys, with the logs of denominators over all of
//! them. Gradients of keys return in f32, beside products that need nothing of them, and the rank that holds the
//! keys sums them in order of rank: the same mesh has the same bits.

mod heads;
mod keys;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use foveate::Layout;
use foveate_gpu::DeviceTensor;
use foveate_gpu::abi::Address;
use foveate_gpu::blas::Matmul;
use foveate_gpu::driver::{Event, Stream};
use foveate_nn::{
    AttentionProgram, Carrier, ContextCall, ContextForward, ContextMoves, ContextOf, ContextPlan,
    DeviceContext, LearnedBuffer, LinearShape, NnError, PackedHeads, Part, PartMut, Peers,
    Projection,
};
use foveate_tensor::DType;

use super::array::{CudaArray, Place, batched};
use super::attention::{AttentionPlan, Learned};
use super::batch::{CudaBatch, turn_of};
use super::clock::Timed;
use super::sharing::{Span, Spans, Way, mark};
use super::{Cuda, failed};
use crate::rope::Rope;
use heads::Heads;
use keys::Keys;

/// Attention over the ranks of a group.
struct CudaContext {
    moving: Moving,
    planned: Option<Planned>,
    /// Of the shapes of batches so far, the last one first.
    programs: Vec<(ProgramShape, Arc<[Program]>)>,
}

/// Shapes whose programs are kept: batches of steps and of evaluations, a rank's part with the short end of a
/// row or without, and what queries see of few and of many documents.
const SHAPES: usize = 8;

/// What of a plan decides how programs are planned: plans that agree in it differ in what they capture.
#[derive(Clone, Debug, PartialEq)]
struct ProgramShape {
    whole: [usize; 2],
    heads: PackedHeads,
    first: [usize; 2],
    first_row: usize,
    /// [`AttentionPlan::expected_keys`].
    keys: usize,
}

/// What moves between the ranks.
struct Moving {
    /// None where there is one rank.
    way: Option<Way>,
    begun: VecDeque<Event>,
}

/// A plan, and what follows from it.
struct Planned {
    of: Arc<ContextPlan>,
    heads: PackedHeads,
    programs: Arc<[Program]>,
    moves: Moves,
}

/// How keys and queries meet.
enum Moves {
    Keys(Keys),
    Heads(Heads),
}

/// A program, without captured buffers.
struct Program {
    plan: AttentionPlan,
    learned: Vec<(String, LearnedBuffer)>,
}

/// Attention over the ranks of `peers`, of which this one has GPU `ordinal`; none where they meet in the memory
/// of the host.
pub(super) fn context(
    peers: Box<dyn Peers>,
    ordinal: usize,
    carrier: Carrier,
) -> Result<Option<ContextOf<Cuda>>, NnError> {
    if carrier == Carrier::Host {
        return Ok(None);
    }
    let has_others = peers.ranks() > 1;
    let way = has_others.then(|| Way::new(peers, ordinal, carrier)).transpose()?;
    let moving = Moving { way, begun: VecDeque::new() };
    Ok(Some(Box::new(CudaContext { moving, planned: None, programs: Vec::new() })))
}

impl Moving {
    /// Begins an exchange behind what `behind` has been given so far: [`super::sharing::Exchange::begin`].
    fn begin(&mut self, behind: &Stream, outgoing: Spans, incoming: &Spans) -> Result<(), NnError> {
        let Some(Way { exchange, queue }) = &mut self.way else { return Ok(()) };
        exchange.begin(queue, &mark(behind)?, outgoing, incoming)?;
        self.begun.push_back(mark(queue.stream())?);
        Ok(())
    }

    /// Makes what is queued next wait for the exchange that began first.
    fn end(&mut self, blocks: &mut Cuda) -> Result<(), NnError> {
        let Some(way) = &mut self.way else { return Ok(()) };
        let done = self.begun.pop_front().expect("an exchange has begun");
        let behind = blocks.queue.stream();
        blocks.clock.waits(behind).map_err(|e| failed(&e))?;
        way.exchange.end(done, behind)?;
        blocks.clock.goes_on(behind).map_err(|e| failed(&e))
    }
}

impl Drop for Moving {
    /// What is being written, or others read, goes back only when that is over.
    fn drop(&mut self) {
        self.way.iter().for_each(Way::settle);
    }
}

impl DeviceContext<Cuda, CudaArray, CudaBatch> for CudaContext {
    fn plan(
        &mut self,
        blocks: &mut Cuda,
        programs: &[AttentionProgram],
        heads: PackedHeads,
        plan: &Arc<ContextPlan>,
    ) -> Result<(), NnError> {
        let is_same = |of: &Planned| Arc::ptr_eq(&of.of, plan) && of.heads == heads;
        if self.planned.as_ref().is_some_and(is_same) {
            return Ok(());
        }
        // What forward passes kept of another batch goes first.
        self.planned = None;
        let moves = match &plan.moves {
            ContextMoves::Keys(stages) => Moves::Keys(Keys::new(blocks, heads, plan, stages)?),
            ContextMoves::Heads(of) => Moves::Heads(Heads::new(blocks, heads, plan, of)?),
        };
        let (of_program, first) = match &moves {
            Moves::Keys(_) => (heads, plan.first_heads),
            Moves::Heads(moves) => (moves.own_heads(), moves.first_heads(plan)),
        };
        let shape = ProgramShape {
            whole: plan.whole,
            heads: of_program,
            first,
            first_row: plan.first_row,
            keys: AttentionPlan::expected_keys(plan),
        };
        let kept = match self.programs.iter().position(|(of, _)| *of == shape) {
            Some(at) => self.programs.remove(at),
            None => {
                let device = (blocks.ordinal, blocks.precision.weights, blocks.deterministic);
                let planned = |program: &AttentionProgram| {
                    let plan = AttentionPlan::over_ranks(program, of_program, first, plan, device)?;
                    Ok(Program {
                        plan: plan.by(blocks.attention),
                        learned: program.learned.clone(),
                    })
                };
                (shape, programs.iter().map(planned).collect::<Result<_, NnError>>()?)
            }
        };
        let programs = Arc::clone(&kept.1);
        self.programs.insert(0, kept);
        self.programs.truncate(SHAPES);
        self.planned = Some(Planned { of: Arc::clone(plan), heads, programs, moves });
        Ok(())
    }

    fn project(
        &mut self,
        blocks: &mut Cuda,
        call: &ContextCall<'_, CudaArray>,
        projection: &Projection<'_, CudaArray, CudaBatch>,
        qkv: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (moving, planned) = (&mut self.moving, self.planned.as_mut().expect("it is planned"));
        let Moves::Keys(keys) = &mut planned.moves else { unreachable!("keys of the plan travel") };
        let PackedHeads { heads_q, heads_kv, dim, .. } = call.heads;
        let (queries, all) = (heads_q * dim, call.heads.width());
        blocks.project(projection, (heads_kv, dim), queries..all, qkv)?;
        blocks.timed(Timed::KeysSend, |blocks| keys.send(blocks, moving, call.slot, qkv))?;
        blocks.project(projection, (heads_q, dim), 0..queries, qkv)
    }

    fn forward(
        &mut self,
        blocks: &mut Cuda,
        call: ContextCall<'_, CudaArray>,
        qkv: &CudaArray,
        out: &mut CudaArray,
        lse: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (moving, planned) = (&mut self.moving, self.planned.as_mut().expect("it is planned"));
        let program = &planned.programs[call.program];
        blocks.timed(Timed::Attention, |blocks| {
            let (values, gradients, _memory) = blocks.learned(&call.learned, false)?;
            let learned = Learned { buffers: &program.learned, values, gradients };
            let with = Pass { plan: &program.plan, learned, slot: call.slot };
            match &mut planned.moves {
                Moves::Keys(keys) => keys.forward(blocks, moving, &with, qkv, out, lse),
                Moves::Heads(heads) => heads.forward(blocks, moving, &with, qkv, out),
            }
        })
    }

    fn backward(
        &mut self,
        blocks: &mut Cuda,
        call: ContextCall<'_, CudaArray>,
        forward: ContextForward<'_, CudaArray>,
        d_out: &CudaArray,
        d_qkv: &mut CudaArray,
        d_learned: PartMut<'_, CudaArray>,
    ) -> Result<(), NnError> {
        let (moving, planned) = (&mut self.moving, self.planned.as_mut().expect("it is planned"));
        let program = &planned.programs[call.program];
        blocks.timed(Timed::AttentionBackward, |blocks| {
            let (values, gradients, _memory) = blocks.learned(&call.learned, true)?;
            let learned = Learned { buffers: &program.learned, values, gradients };
            let with = Pass { plan: &program.plan, learned, slot: call.slot };
            match &mut planned.moves {
                Moves::Keys(keys) => {
                    keys.backward(blocks, moving, &with, &forward, d_out, d_qkv)?
                }
                Moves::Heads(heads) => heads.backward(blocks, moving, &with, d_out)?,
            }
            blocks.add_learned(gradients, &d_learned)
        })
    }

    fn returned(&mut self, blocks: &mut Cuda, d_qkv: &mut CudaArray) -> Result<(), NnError> {
        let (moving, planned) = (&mut self.moving, self.planned.as_mut().expect("it is planned"));
        blocks.timed(Timed::GradientsReturn, |blocks| match &mut planned.moves {
            Moves::Keys(keys) => keys.returned(blocks, moving, d_qkv),
            Moves::Heads(heads) => heads.returned(blocks, moving, d_qkv),
        })
    }
}

impl Cuda {
    /// Some columns of a projection, of which the first are heads that turn: so many, each of so many columns.
    fn project(
        &mut self,
        of: &Projection<'_, CudaArray, CudaBatch>,
        (heads, dim): (usize, usize),
        place: Range<usize>,
        qkv: &CudaArray,
    ) -> Result<(), NnError> {
        let LinearShape { tokens, inputs, outputs } = of.shape;
        let rows = |part: &Part<'_, CudaArray>, width: usize| {
            let first = part.place.start;
            first + place.start * width..first + place.end * width
        };
        let weight = Part { place: rows(&of.weight, inputs), ..of.weight.again() };
        let shape = [tokens, place.len()];
        let y = columns(qkv.vector().start(), qkv.dtype, shape, outputs, place.start);
        let (x, weight) = (batched(&of.x.rows(inputs)), weight.matrix(inputs).transposed());
        let bias = of.bias.as_ref();
        let bias = bias.map(|bias| Part { place: rows(bias, 1), ..bias.again() }.vector());
        let product = Matmul { bias, ..Matmul::new(x, weight, batched(&y)) };
        self.timed(Timed::Linear, |this| this.product(&product))?;
        let Some(turn) = &of.turn else { return Ok(()) };
        let rope = Rope { qkv: y, heads, dim, turn: turn_of(turn), back: false };
        self.run_timed(Timed::Rope, &rope)
    }
}

/// What a pass runs.
struct Pass<'a> {
    plan: &'a AttentionPlan,
    learned: Learned<'a>,
    slot: usize,
}

/// `shape` elements of rows of `stride` elements, from element `first` on.
fn columns(
    address: Address,
    dtype: DType,
    shape: [usize; 2],
    stride: usize,
    first: usize,
) -> DeviceTensor<2> {
    DeviceTensor { address, dtype, layout: Layout::strided(shape, [stride, 1], first) }
}

/// What slot `slot` keeps.
fn fit<T: Default>(kept: &mut Vec<T>, slot: usize) -> &mut T {
    let slots = kept.len().max(slot + 1);
    kept.resize_with(slots, T::default);
    &mut kept[slot]
}

/// Rows side by side, and bytes of each.
#[derive(Clone, Copy)]
struct RowsAt {
    address: Address,
    bytes: usize,
}

impl RowsAt {
    fn new(address: Address, width: usize, dtype: DType) -> Self {
        Self { address, bytes: width * dtype.bytes() }
    }

    fn span(&self, rows: &Range<usize>) -> Span {
        let address = self.address + (rows.start * self.bytes) as Address;
        Span { address, bytes: rows.len() * self.bytes }
    }

    fn spans(&self, rows: &[Range<usize>]) -> Vec<Span> {
        rows.iter().map(|rows| self.span(rows)).collect()
    }
}
