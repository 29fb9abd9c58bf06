//! Keys that go to the queries which see them.

use std::ops::Range;
use std::sync::Arc;

use foveate::Layout;
use foveate_gpu::abi::Address;
use foveate_gpu::driver::Allocation;
use foveate_gpu::{DeviceTensor, GpuError};
use foveate_nn::{
    Array, Blocks, ContextForward, ContextPlan, DOCUMENTS, KeyStage, NnError, PackedHeads,
};
use foveate_tensor::DType;

use super::super::array::CudaArray;
use super::super::attention::{AttentionPlan, POSITIONS, output, packed, statistics};
use super::super::batch::Words;
use super::super::sharing::Spans;
use super::super::{Cuda, failed};
use super::{Moving, Pass, RowsAt, columns, fit};
use crate::context::{Join, SumKeys};
use crate::key_rows::{KeyRows, of_rows};
use crate::vectors::CopyRows;

/// Keys, by a plan.
pub(super) struct Keys {
    heads: PackedHeads,
    rows: Box<KeyRows>,
    /// Whether any rank sends something, by stage.
    moves: Vec<bool>,
    /// Tokens that each stage computes.
    queries: Vec<Range<usize>>,
    documents: Words,
    /// Of the rank's queries, and of the keys as they lie, followed by as many as a plan is told of.
    positions: [Words; 2],
    /// [`KeyRows::sources`].
    sources: Words,
    /// By slot, keys and values, `[rows, keys, 2 · heads_kv · dim]`.
    kept: Vec<CudaArray>,
    /// The slot whose keys were sent before its forward pass.
    sent: Option<usize>,
    /// Gradients of keys, in f32, and behind them those that return, while they do.
    returning: Option<Allocation>,
}

impl Keys {
    pub fn new(
        blocks: &mut Cuda,
        heads: PackedHeads,
        plan: &Arc<ContextPlan>,
        stages: &[KeyStage],
    ) -> Result<Self, NnError> {
        let rows = Box::new(KeyRows::new(plan, stages));
        // What the first stage gives, later ones join.
        let first = stages
            .iter()
            .zip(&rows.stages)
            .find(|(stage, keys)| !stage.queries.is_empty() && !keys.is_empty());
        if let Some((KeyStage { queries, .. }, _)) = first
            && *queries != (0..heads.len)
        {
            let said =
                format!("the first stage has queries {queries:?} of {}; give all", heads.len);
            return Err(failed(&GpuError::argument(said)));
        }
        let sources = rows.sources(heads.rows);
        let own = plan.tokens[plan.rank].iter().cloned().flatten();
        let own: Vec<i32> = own.map(|position| position as i32).collect();
        let told = [heads.len, plan.whole[1]];
        let followed = |positions: &[i32], told: usize| {
            let mut positions = positions.to_vec();
            positions.resize(positions.len() + told, 0);
            (vec![positions.len()], positions)
        };
        let arrays = [
            (plan.whole.to_vec(), plan.documents.clone()),
            followed(&own, told[0]),
            followed(&rows.positions, told[1]),
            (vec![sources.len()], sources),
        ];
        let words = Words::upload(blocks.queue.pool(), arrays).map_err(|e| failed(&e))?;
        let [documents, queries, keys, sources] = words;
        let moves = stages.iter().map(|stage| stage.moves).collect();
        Ok(Self {
            heads,
            rows,
            moves,
            queries: stages.iter().map(|stage| stage.queries.clone()).collect(),
            documents,
            positions: [queries, keys],
            sources,
            kept: Vec::new(),
            sent: None,
            returning: None,
        })
    }

    /// Whether any rank sends something.
    fn travel(&self) -> bool {
        self.moves.contains(&true)
    }

    /// Begins to send the keys of a packed projection to the queries which see them.
    pub fn send(
        &mut self,
        blocks: &mut Cuda,
        moving: &mut Moving,
        slot: usize,
        qkv: &CudaArray,
    ) -> Result<(), NnError> {
        let PackedHeads { rows, len, .. } = self.heads;
        let (width, dtype, all) = (self.width(), qkv.dtype(), self.rows.len());
        let kept = fit(&mut self.kept, slot);
        blocks.resize("keys of all ranks", kept, dtype, rows * all * width)?;
        let (keys, packed_width) = (kept.vector().start(), self.heads.width());
        for row in 0..rows {
            let from = qkv.vector().start();
            let mut token = row * len;
            for Range { start, end } in self.rows.own.iter().cloned() {
                let shape = [end - start, width];
                let first = token * packed_width + packed_width - width;
                let to = (row * all + start) * width;
                blocks.run(&CopyRows {
                    from: columns(from, dtype, shape, packed_width, first),
                    to: columns(keys, dtype, shape, width, to),
                })?;
                token += end - start;
            }
        }
        let at = RowsAt::new(keys, width, dtype);
        for (stage, _) in self.moves.iter().enumerate().filter(|(_, moves)| **moves) {
            let spans = |of: &[Vec<_>]| -> Spans {
                let pieces = of.iter().map(|pieces| of_rows(rows, all, || pieces.iter()));
                pieces.map(|pieces| at.spans(&pieces)).collect()
            };
            let outgoing = spans(&self.rows.sends[stage]);
            let incoming = spans(&self.rows.receives[stage]);
            moving.begin(blocks.queue.stream(), outgoing, &incoming)?;
        }
        self.sent = Some(slot);
        Ok(())
    }

    pub fn forward(
        &mut self,
        blocks: &mut Cuda,
        moving: &mut Moving,
        pass: &Pass<'_>,
        qkv: &CudaArray,
        out: &mut CudaArray,
        lse: &mut CudaArray,
    ) -> Result<(), NnError> {
        if self.sent != Some(pass.slot) {
            self.send(blocks, moving, pass.slot, qkv)?;
        }
        self.sent = None;
        let (dtype, keys) = (qkv.dtype(), self.kept[pass.slot].vector().start());
        let mut sums = self.sums(blocks, dtype)?;
        let to = (out.vector().start(), lse.vector().start());
        for (stage, &moves) in self.moves.iter().enumerate() {
            if moves {
                moving.end(blocks)?;
            }
            if !self.computes(stage) {
                continue;
            }
            let (place, tokens) = (self.rows.stages[stage].clone(), self.queries[stage].clone());
            let plan = self.plan(pass, [tokens.start, place.start]);
            let [q, ..] = packed(self.heads, qkv.vector().start(), dtype);
            let [k, v] = self.views(keys, dtype, place.start, place.len());
            let (part, part_lse) = sums.next(PackedHeads { len: tokens.len(), ..self.heads }, to);
            let operands = [of_tokens(q, &tokens), k, v];
            plan.forward(&blocks.queue, operands, &pass.learned, part, part_lse)?;
            sums.join(blocks, self.heads, tokens, to)?;
        }
        Ok(())
    }

    pub fn backward(
        &mut self,
        blocks: &mut Cuda,
        moving: &mut Moving,
        pass: &Pass<'_>,
        forward: &ContextForward<'_, CudaArray>,
        d_out: &CudaArray,
        d_qkv: &mut CudaArray,
    ) -> Result<(), NnError> {
        let rows = self.heads.rows;
        let (width, dtype, all) = (self.width(), forward.qkv.dtype(), self.rows.len());
        let (places, returned) = self.rows.returned_to(rows);
        let keys = self.kept[pass.slot].vector().start();
        let d_keys = 4 * (rows * all + returned) * width;
        let d_keys = blocks.scratch("gradients of keys", d_keys)?;
        if self.is_needed() {
            let plan = self.plan(pass, [0, 0]);
            let [q, ..] = packed(self.heads, forward.qkv.vector().start(), dtype);
            let [k, v] = self.views(keys, dtype, 0, all);
            let [dk, dv] = self.views(d_keys.address(), DType::F32, 0, all);
            let [dq, ..] = packed(self.heads, d_qkv.vector().start(), dtype);
            let of_rows = (
                output(self.heads, forward.out.vector().start(), dtype),
                statistics(self.heads, forward.lse.vector().start()),
                output(self.heads, d_out.vector().start(), dtype),
            );
            let gradients = [dq, dk, dv];
            plan.backward(&blocks.queue, [q, k, v], &pass.learned, of_rows, gradients)?;
        }
        if self.travel() {
            let at = RowsAt::new(d_keys.address(), width, DType::F32);
            let spans =
                |of: &[Vec<_>]| -> Spans { of.iter().map(|pieces| at.spans(pieces)).collect() };
            let outgoing = spans(&self.rows.returns(rows));
            moving.begin(blocks.queue.stream(), outgoing, &spans(&places))?;
        }
        self.returning = Some(d_keys);
        Ok(())
    }

    /// Waits for gradients of own keys that others have, and sums them.
    pub fn returned(
        &mut self,
        blocks: &mut Cuda,
        moving: &mut Moving,
        d_qkv: &mut CudaArray,
    ) -> Result<(), NnError> {
        let d_keys = self.returning.take().expect("a backward pass has begun");
        if self.travel() {
            moving.end(blocks)?;
        }
        if self.is_needed() {
            let PackedHeads { rows, len, heads_q, dim, .. } = self.heads;
            let width = self.width();
            let (_, returned) = self.rows.returned_to(rows);
            let all = [rows * self.rows.len() + returned, width];
            let from = DeviceTensor::contiguous(d_keys.address(), DType::F32, all);
            let (address, stride) = (d_qkv.vector().start(), self.heads.width());
            let to = columns(address, d_qkv.dtype(), [rows * len, width], stride, heads_q * dim);
            blocks.run(&SumKeys { from, sources: self.sources.array(), to })?;
        }
        Ok(())
    }

    /// The plan of a pass whose first query and first key are these. It is told of as many positions
    /// whichever part of them a stage has: lengths differ from batch to batch, and a plan for other lengths
    /// would be another one.
    fn plan(&self, pass: &Pass<'_>, first: [usize; 2]) -> AttentionPlan {
        let of = [self.heads.len, self.rows.len()];
        let [queries, keys] = [0, 1].map(|i| {
            let told = self.positions[i].array().shape[0] - of[i];
            self.positions[i].part(first[i], told)
        });
        pass.plan.capturing(&[
            (DOCUMENTS, &self.documents),
            (POSITIONS[0], &queries),
            (POSITIONS[1], &keys),
        ])
    }

    /// Elements of a token's keys and values.
    fn width(&self) -> usize {
        2 * self.heads.heads_kv * self.heads.dim
    }

    /// Whether this rank has queries.
    fn is_needed(&self) -> bool {
        self.heads.rows * self.heads.len > 0
    }

    /// Whether this rank computes something in a stage.
    fn computes(&self, stage: usize) -> bool {
        let is_empty = self.rows.stages[stage].is_empty() || self.queries[stage].is_empty();
        self.is_needed() && !is_empty
    }

    /// Keys and values from key `first` on of every row of the array at `address`.
    fn views(&self, address: Address, dtype: DType, first: usize, len: usize) -> [DeviceTensor; 2] {
        let PackedHeads { rows, heads_kv, dim, .. } = self.heads;
        let (width, all) = (self.width(), self.rows.len());
        [0, heads_kv * dim].map(|column| {
            let strides = [all * width, dim, width, 1];
            let layout =
                Layout::strided([rows, heads_kv, len, dim], strides, first * width + column);
            DeviceTensor { address, dtype, layout }
        })
    }

    /// Scratch for what stages give.
    fn sums(&self, blocks: &Cuda, dtype: DType) -> Result<Sums, NnError> {
        let PackedHeads { rows, len, heads_q, dim, .. } = self.heads;
        let stages = (0..self.moves.len()).filter(|&stage| self.computes(stage)).count();
        let mut sums = Sums { dtype, stages, done: 0, outs: Vec::new(), lses: Vec::new() };
        if stages > 1 && self.is_needed() {
            let elems = rows * len * heads_q;
            let take = |elems: usize| blocks.scratch("attention over some keys", 4 * elems);
            sums.outs = (0..2).map(|_| take(elems * dim)).collect::<Result<_, _>>()?;
            sums.lses = (0..3).map(|_| take(elems)).collect::<Result<_, _>>()?;
        }
        Ok(sums)
    }
}

/// `tokens` of each row of queries.
fn of_tokens(q: DeviceTensor, tokens: &Range<usize>) -> DeviceTensor {
    let mut layout = q.layout;
    layout.offset += tokens.start * layout.strides[2];
    layout.shape[2] = tokens.len();
    DeviceTensor { layout, ..q }
}

/// Attention over the keys of the stages so far, in f32 where there are several.
struct Sums {
    dtype: DType,
    stages: usize,
    done: usize,
    /// Over those so far, and over those of a stage.
    outs: Vec<Allocation>,
    /// Over those so far, in turn, and over those of a stage.
    lses: Vec<Allocation>,
}

impl Sums {
    /// Where the next stage's go; `to` are the addresses of those of all.
    fn next(
        &self,
        heads: PackedHeads,
        (out, lse): (Address, Address),
    ) -> (DeviceTensor, DeviceTensor<3>) {
        if self.stages == 1 {
            return (output(heads, out, self.dtype), statistics(heads, lse));
        }
        let (out, lse) = if self.done == 0 { (0, 0) } else { (1, 2) };
        let (out, lse) = (self.outs[out].address(), self.lses[lse].address());
        (output(heads, out, DType::F32), statistics(heads, lse))
    }

    /// Queues that what the stage gave of `tokens` joins that of those before.
    fn join(
        &mut self,
        blocks: &Cuda,
        heads: PackedHeads,
        tokens: Range<usize>,
        (out, lse): (Address, Address),
    ) -> Result<(), NnError> {
        let (before, is_last) = (self.done, self.done + 1 == self.stages);
        self.done += 1;
        if before == 0 {
            return Ok(());
        }
        let PackedHeads { rows, len, heads_q, dim, .. } = heads;
        let count = tokens.len();
        let of_len = |address: Address, dtype, len: usize| {
            DeviceTensor::contiguous(address, dtype, [rows, len, heads_q, dim])
        };
        let of_lse = |which: usize| self.lses[which].address();
        let to_lse = if is_last { lse } else { of_lse(before % 2) };
        blocks.run(&Join {
            out: of_len(self.outs[0].address(), DType::F32, len),
            lse: statistics(heads, of_lse((before - 1) % 2)),
            tokens,
            part: of_len(self.outs[1].address(), DType::F32, count),
            part_lse: statistics(PackedHeads { len: count, ..heads }, of_lse(2)),
            to: is_last.then(|| of_len(out, self.dtype, len)),
            to_lse: statistics(heads, to_lse),
            dtype: self.dtype,
        })
    }
}
