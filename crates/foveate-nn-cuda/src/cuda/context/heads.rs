//! Heads that are given for tokens: every rank computes some heads over all tokens.

use std::ops::Range;
use std::sync::Arc;

use foveate_gpu::DeviceTensor;
use foveate_gpu::abi::Address;
use foveate_gpu::driver::Allocation;
use foveate_nn::{Array, Blocks, ContextPlan, DOCUMENTS, NnError, PackedHeads};
use foveate_tensor::DType;

use super::super::array::CudaArray;
use super::super::attention::{POSITIONS, output, packed, statistics};
use super::super::batch::Words;
use super::super::sharing::Spans;
use super::super::{Cuda, failed};
use super::{Moving, Pass, RowsAt, columns, fit};
use crate::vectors::CopyRows;

/// Heads for tokens, by a plan.
pub(super) struct Heads {
    heads: PackedHeads,
    rank: usize,
    /// Of each rank, its query heads and its key/value heads among those of a token here.
    of_ranks: Vec<[Range<usize>; 2]>,
    /// Where each rank's tokens lie among all of a row.
    tokens: Vec<Range<usize>>,
    documents: Words,
    /// Of all tokens, as they lie.
    positions: Words,
    kept: Vec<Kept>,
    /// Gradients of all tokens, and those of this rank's tokens from others, while they return.
    returning: Option<(Allocation, Staged)>,
}

/// Of each rank, where its heads of this rank's tokens lie side by side.
type Staged = Vec<(Address, Option<Allocation>)>;

/// What a forward pass keeps of all tokens: the packed projection of this rank's heads, and attention.
#[derive(Default)]
struct Kept {
    qkv: CudaArray,
    out: CudaArray,
    lse: CudaArray,
}

/// What of a token moves.
#[derive(Clone, Copy)]
struct Moved {
    dtype: DType,
    /// Whether keys and values lie behind the query heads.
    packed: bool,
}

impl Moved {
    fn queries(dtype: DType) -> Self {
        Self { dtype, packed: false }
    }

    fn packed(dtype: DType) -> Self {
        Self { dtype, packed: true }
    }
}

impl Heads {
    pub fn new(
        blocks: &mut Cuda,
        heads: PackedHeads,
        plan: &Arc<ContextPlan>,
        of_ranks: &[[Range<usize>; 2]],
    ) -> Result<Self, NnError> {
        let all = plan.tokens.iter().flatten().cloned().flatten();
        let positions: Vec<i32> = all.map(|position| position as i32).collect();
        let mut first = 0;
        let tokens = plan.tokens.iter().map(|own| {
            first += own.iter().map(Range::len).sum::<usize>();
            first - own.iter().map(Range::len).sum::<usize>()..first
        });
        let tokens = tokens.collect();
        let arrays =
            [(plan.whole.to_vec(), plan.documents.clone()), (vec![positions.len()], positions)];
        let words = Words::upload(blocks.queue.pool(), arrays).map_err(|e| failed(&e))?;
        let [documents, positions] = words;
        let (rank, of_ranks) = (plan.rank, of_ranks.to_vec());
        Ok(Self {
            heads,
            rank,
            of_ranks,
            tokens,
            documents,
            positions,
            kept: Vec::new(),
            returning: None,
        })
    }

    /// The packed projection of all tokens, of this rank's heads.
    pub fn own_heads(&self) -> PackedHeads {
        let [q, kv] = &self.of_ranks[self.rank];
        let len = self.tokens.last().map_or(0, |last| last.end);
        PackedHeads { len, heads_q: q.len(), heads_kv: kv.len(), ..self.heads }
    }

    /// The first of these heads among the model's.
    pub fn first_heads(&self, plan: &ContextPlan) -> [usize; 2] {
        let [q, kv] = &self.of_ranks[self.rank];
        [plan.first_heads[0] + q.start, plan.first_heads[1] + kv.start]
    }

    pub fn forward(
        &mut self,
        blocks: &mut Cuda,
        moving: &mut Moving,
        pass: &Pass<'_>,
        qkv: &CudaArray,
        out: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (own, dtype) = (self.own_heads(), qkv.dtype());
        let (all, q_width) = (own.rows * own.len, own.heads_q * own.dim);
        let mut kept = std::mem::take(fit(&mut self.kept, pass.slot));
        let Kept { qkv: all_qkv, out: all_out, lse: all_lse } = &mut kept;
        blocks.resize("heads of all tokens", all_qkv, dtype, all * own.width())?;
        blocks.resize("attention of all tokens", all_out, dtype, all * q_width)?;
        blocks.resize("logs of denominators", all_lse, DType::F32, all * own.heads_q)?;
        let (from, to) = (qkv.vector().start(), all_qkv.vector().start());
        self.give(blocks, moving, [from, to], Moved::packed(dtype))?;
        if all > 0 {
            let operands = packed(own, to, dtype);
            let to = output(own, all_out.vector().start(), dtype);
            let lse = statistics(own, all_lse.vector().start());
            let plan = self.plan(pass);
            plan.forward(&blocks.queue, operands, &pass.learned, to, lse)?;
        }
        let of = Moved::queries(dtype);
        let staged = self.give_back(blocks, moving, all_out.vector().start(), of)?;
        self.given_back(blocks, moving, &staged, out.vector().start(), of)?;
        self.kept[pass.slot] = kept;
        Ok(())
    }

    pub fn backward(
        &mut self,
        blocks: &mut Cuda,
        moving: &mut Moving,
        pass: &Pass<'_>,
        d_out: &CudaArray,
    ) -> Result<(), NnError> {
        let (own, dtype) = (self.own_heads(), d_out.dtype());
        let (all, q_width) = (own.rows * own.len, own.heads_q * own.dim);
        let bytes = all * dtype.bytes();
        let all_d_out = blocks.scratch("gradients of all tokens", bytes * q_width)?;
        let all_d_qkv = blocks.scratch("gradients of all tokens", bytes * own.width())?;
        let (from, to) = (d_out.vector().start(), all_d_out.address());
        self.give(blocks, moving, [from, to], Moved::queries(dtype))?;
        if all > 0 {
            let Kept { qkv, out, lse } = &self.kept[pass.slot];
            let of_rows = (
                output(own, out.vector().start(), dtype),
                statistics(own, lse.vector().start()),
                output(own, to, dtype),
            );
            let operands = packed(own, qkv.vector().start(), dtype);
            let gradients = packed(own, all_d_qkv.address(), dtype);
            let plan = self.plan(pass);
            plan.backward(&blocks.queue, operands, &pass.learned, of_rows, gradients)?;
        }
        let of = Moved::packed(dtype);
        let staged = self.give_back(blocks, moving, all_d_qkv.address(), of)?;
        self.returning = Some((all_d_qkv, staged));
        Ok(())
    }

    /// Waits for gradients of this rank's tokens that others have, and puts all in their places.
    pub fn returned(
        &mut self,
        blocks: &mut Cuda,
        moving: &mut Moving,
        d_qkv: &mut CudaArray,
    ) -> Result<(), NnError> {
        let (_all, staged) = self.returning.take().expect("a backward pass has begun");
        let of = Moved::packed(d_qkv.dtype());
        self.given_back(blocks, moving, &staged, d_qkv.vector().start(), of)
    }

    fn plan(&self, pass: &Pass<'_>) -> super::AttentionPlan {
        pass.plan.capturing(&[
            (DOCUMENTS, &self.documents),
            (POSITIONS[0], &self.positions),
            (POSITIONS[1], &self.positions),
        ])
    }

    /// Elements of a token here, and which of them are a rank's.
    fn columns(&self, rank: usize, of: Moved) -> (usize, Vec<Range<usize>>) {
        let PackedHeads { heads_q, heads_kv, dim, .. } = self.heads;
        let [q, kv] = &self.of_ranks[rank];
        let piece = |first: usize, heads: &Range<usize>| {
            (first + heads.start) * dim..(first + heads.end) * dim
        };
        match of.packed {
            false => (heads_q * dim, vec![piece(0, q)]),
            true => {
                let keys = [heads_q, heads_q + heads_kv].map(|first| piece(first, kv));
                (self.heads.width(), [vec![piece(0, q)], keys.to_vec()].concat())
            }
        }
    }

    /// Tokens of this rank, of every row, to the ranks whose heads they are of.
    fn give(
        &self,
        blocks: &mut Cuda,
        moving: &mut Moving,
        [from, to]: [Address; 2],
        of: Moved,
    ) -> Result<(), NnError> {
        let staged = self.staged(blocks, to, of)?;
        for (rank, (apart, _)) in staged.iter().enumerate() {
            for [from, to] in self.pairs(rank, [from, *apart], of) {
                blocks.run(&CopyRows { from, to })?;
            }
        }
        let [of_ranks, of_all] = self.spans(&staged, to, of);
        moving.begin(blocks.queue.stream(), of_ranks, &of_all)?;
        moving.end(blocks)
    }

    /// Begins to give all tokens of this rank's heads, which are at `from`, to the ranks whose tokens they are, and
    /// says where what others give arrives.
    fn give_back(
        &self,
        blocks: &mut Cuda,
        moving: &mut Moving,
        from: Address,
        of: Moved,
    ) -> Result<Staged, NnError> {
        let staged = self.staged(blocks, from, of)?;
        let [of_ranks, of_all] = self.spans(&staged, from, of);
        moving.begin(blocks.queue.stream(), of_all, &of_ranks)?;
        Ok(staged)
    }

    /// Waits for what [`Self::give_back`] began, and puts this rank's tokens of all heads side by side at `to`.
    fn given_back(
        &self,
        blocks: &mut Cuda,
        moving: &mut Moving,
        staged: &Staged,
        to: Address,
        of: Moved,
    ) -> Result<(), NnError> {
        moving.end(blocks)?;
        for (rank, (apart, _)) in staged.iter().enumerate() {
            for [to, from] in self.pairs(rank, [to, *apart], of) {
                blocks.run(&CopyRows { from, to })?;
            }
        }
        Ok(())
    }

    /// Of each rank, where its heads of this rank's tokens lie side by side: for itself among `all` tokens.
    fn staged(&self, blocks: &Cuda, all: Address, of: Moved) -> Result<Staged, NnError> {
        let PackedHeads { rows, len, .. } = self.heads;
        let staged = |rank: usize| {
            if rank == self.rank {
                return Ok((all, None));
            }
            let bytes = rows * len * self.width(rank, of) * of.dtype.bytes();
            let memory = blocks.scratch("heads of other ranks", bytes)?;
            Ok((memory.address(), Some(memory)))
        };
        (0..self.of_ranks.len()).map(staged).collect()
    }

    /// Elements of a token that are a rank's.
    fn width(&self, rank: usize, of: Moved) -> usize {
        self.columns(rank, of).1.iter().map(Range::len).sum()
    }

    /// A rank's heads of this rank's tokens: among all heads at `here`, and side by side at `apart`.
    fn pairs(
        &self,
        rank: usize,
        [here, apart]: [Address; 2],
        of: Moved,
    ) -> Vec<[DeviceTensor<2>; 2]> {
        let PackedHeads { rows, len, .. } = self.heads;
        let (all, width) = (self.own_heads().len, self.width(rank, of));
        let own = self.tokens[rank].start;
        let groups: Vec<[usize; 3]> = match rank == self.rank {
            true => (0..rows).map(|row| [row * len, row * all + own, len]).collect(),
            false => vec![[0, 0, rows * len]],
        };
        let (stride, pieces) = self.columns(rank, of);
        let mut pairs = Vec::new();
        for [first, first_apart, tokens] in groups.into_iter().filter(|group| group[2] > 0) {
            let mut column = 0;
            for piece in &pieces {
                let shape = [tokens, piece.len()];
                pairs.push([
                    columns(here, of.dtype, shape, stride, first * stride + piece.start),
                    columns(apart, of.dtype, shape, width, first_apart * width + column),
                ]);
                column += piece.len();
            }
        }
        pairs
    }

    /// By rank, its heads of this rank's tokens where they are staged, and this rank's heads of its tokens
    /// among `all`.
    fn spans(&self, staged: &Staged, all: Address, of: Moved) -> [Spans; 2] {
        let PackedHeads { rows, len, .. } = self.heads;
        let others = |rank: usize| if rank == self.rank { 0..0 } else { 0..rows };
        let of_ranks = staged.iter().enumerate().map(|(rank, (address, _))| {
            let at = RowsAt::new(*address, self.width(rank, of), of.dtype);
            others(rank).map(|row| at.span(&(row * len..(row + 1) * len))).collect()
        });
        let at = RowsAt::new(all, self.width(self.rank, of), of.dtype);
        let len = self.own_heads().len;
        let of_all = self.tokens.iter().enumerate().map(|(rank, own)| {
            let place = |row: usize| row * len + own.start..row * len + own.end;
            others(rank).map(|row| at.span(&place(row))).collect()
        });
        [of_ranks.collect(), of_all.collect()]
    }
}
