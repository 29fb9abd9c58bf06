//! Masks, scores and dropout inside a tile.
//!
//! A plan compiles its programs once ([`Mods`]); each thread evaluates them in an [`Evaluator`].
//! The mask of a partial tile is evaluated into mask bits before its products. The mask bits say
//! which columns a subtile has to compute. Full tiles never run the mask. Scores are evaluated a
//! subtile at a time; in the backward the same run gives the derivative, which is kept until the
//! subtile's gradient is known.

use std::ops::Range;
use std::sync::Arc;

use foveate_mods::ir::BinaryOp;
use foveate_mods::vector::{Machine, MaskBits, Read, TileProgram};
use foveate_mods::{
    AnyBuffer, Bounds, CaptureGradient, Graph, Head, Leaf, MaskMod, ModError, Node, NodeId,
    ScalarValue, ScoreMod,
};
use foveate_problem::Spec;

use crate::score_bounds::ScoreBounds;
use crate::simd::{LANES, SUBTILE_ROWS};
use crate::slots::{Slot, Sum};

/// A learned buffer of the score.
#[derive(Debug)]
pub struct Learned {
    pub name: String,
    pub shape: Vec<usize>,
    /// Where the score reads it.
    loads: Vec<CaptureGradient>,
    /// For each axis the coordinate that its index is, and what is added to it, when that is all
    /// there is to the only read.
    coordinates: Option<Vec<(Leaf, i32)>>,
}

impl Learned {
    /// Whether no two entries of a problem read the same element, all of them inside the buffer:
    /// `extent` is how many values a coordinate has.
    pub fn is_read_once(&self, extent: impl Fn(Leaf) -> usize) -> bool {
        let Some(coordinates) = &self.coordinates else { return false };
        let inside = coordinates.iter().zip(&self.shape).all(|(&(leaf, offset), &len)| {
            usize::try_from(offset).is_ok_and(|offset| extent(leaf) + offset <= len)
        });
        let apart = |leaf: Leaf| extent(leaf) <= 1 || coordinates.iter().any(|(of, _)| *of == leaf);
        inside && [Leaf::B, Leaf::H, Leaf::Q, Leaf::Kv].into_iter().all(apart)
    }
}

/// The coordinate that a node is, and what is added to it.
fn coordinate(graph: &Graph, id: NodeId) -> Option<(Leaf, i32)> {
    let number = |id: NodeId| match graph.node(id) {
        Node::I32(v) => Some(*v),
        Node::Scalar(slot) => match graph.scalars()[*slot as usize].value {
            ScalarValue::I32(v) => Some(v),
            _ => None,
        },
        _ => None,
    };
    match *graph.node(id) {
        Node::Leaf(leaf @ (Leaf::B | Leaf::H | Leaf::Q | Leaf::Kv)) => Some((leaf, 0)),
        Node::Binary(BinaryOp::Add, x, y) => {
            let of = |x: NodeId, y: NodeId| match (coordinate(graph, x)?, number(y)?) {
                ((leaf, 0), offset) => Some((leaf, offset)),
                _ => None,
            };
            of(x, y).or_else(|| of(y, x))
        }
        _ => None,
    }
}

/// The derivative of the score.
#[derive(Debug)]
struct Gradient {
    /// The derivatives, and last the score.
    kernel: TileProgram,
    /// Root of the score.
    score: usize,
    learned: Arc<Vec<Learned>>,
    /// `∂score'/∂score` is the constant 1.
    is_one: bool,
}

/// The compiled mods of a plan.
#[derive(Debug)]
pub struct Mods {
    mask: Option<TileProgram>,
    score: Option<TileProgram>,
    gradient: Option<Result<Gradient, ModError>>,
    /// The bounds of the score, where they may skip a tile.
    bounds: Option<Bounds>,
    dropout_keep: Option<TileProgram>,
}

/// Elements of captured buffers up to which a score is bounded: the range tables that bounds look up
/// take time to build.
const BOUNDED: usize = 1 << 14;

impl Mods {
    /// Compiles the programs. That a score has no derivative is reported by
    /// [`Self::differentiable`].
    pub fn new(spec: &Spec) -> Self {
        let Spec { mask, score, dropout, .. } = spec;
        let of_mask = |m: &MaskMod| TileProgram::compile(m.program());
        Self {
            mask: mask.as_ref().map(of_mask),
            score: score.as_ref().map(|s| TileProgram::compile(s.program())),
            gradient: score.as_ref().map(Gradient::new),
            bounds: score.as_ref().and_then(bounds),
            dropout_keep: dropout.as_ref().map(|d| of_mask(d.keep_mask())),
        }
    }

    /// The learned buffers of the score.
    ///
    /// # Errors
    /// When the score has no derivative, naming the operation.
    pub fn differentiable(&self) -> Result<&[Learned], ModError> {
        match &self.gradient {
            None => Ok(&[]),
            Some(Ok(gradient)) => Ok(&gradient.learned),
            Some(Err(e)) => Err(e.clone()),
        }
    }

    /// The score bounds of a head; `None` where they cannot skip a tile.
    pub fn score_bounds(&self, head: Head) -> Option<ScoreBounds<'_>> {
        self.bounds.as_ref().map(|bounds| ScoreBounds::new(bounds, head))
    }

    /// Whether [`Self::score_bounds`] gives any.
    pub fn has_score_bounds(&self) -> bool {
        self.bounds.is_some()
    }

    /// An evaluator for tiles of `[queries, keys]`. `backward` is set for the backward pass and says
    /// whether gradients of learned buffers are wanted.
    pub fn evaluator(&self, [queries, keys]: [usize; 2], backward: Option<bool>) -> Evaluator {
        let machine = |k: &Option<TileProgram>| k.as_ref().map(|k| k.machine(queries, keys));
        let score = match &self.gradient {
            Some(Ok(g)) if backward.is_some_and(|captures| captures || !g.is_one) => {
                Some(ScoreMachine {
                    machine: g.kernel.machine(queries, keys),
                    score: g.score,
                    learned: Some(g.learned.clone()),
                })
            }
            _ => machine(&self.score).map(|machine| ScoreMachine {
                machine,
                score: 0,
                learned: None,
            }),
        };
        Evaluator {
            mask: machine(&self.mask),
            score,
            dropout_keep: machine(&self.dropout_keep),
            mask_bits: MaskBits::default(),
            dropout_bits: MaskBits::default(),
            partial: false,
            columns: 0..0,
            queries: 0,
            keys: 0,
        }
    }
}

/// The bounds of a score that depends on the key's position.
fn bounds(score: &ScoreMod) -> Option<Bounds> {
    let graph = score.program().graph();
    let captured: usize = graph.buffers().iter().map(AnyBuffer::elems).sum();
    let may = graph.nodes().contains(&Node::Leaf(Leaf::Kv)) && captured <= BOUNDED;
    may.then(|| Bounds::new(score.program()))
}

impl Gradient {
    fn new(score: &ScoreMod) -> Result<Self, ModError> {
        let gradient = score.gradient()?;
        let graph = gradient.program().graph();
        let mut learned: Vec<(u32, Learned)> = Vec::new();
        for capture in gradient.captures() {
            let load = capture.clone();
            match learned.iter_mut().find(|(slot, _)| *slot == capture.buffer) {
                Some((_, own)) => own.loads.push(load),
                None => {
                    let buffer = &graph.buffers()[capture.buffer as usize];
                    let (name, shape) = (buffer.name().to_owned(), buffer.shape().to_vec());
                    let loads = vec![load];
                    let own = Learned { name, shape, loads, coordinates: None };
                    learned.push((capture.buffer, own));
                }
            }
        }
        let roots = gradient.program().roots();
        for (_, learned) in &mut learned {
            if let [load] = &learned.loads[..] {
                let axes = load.index.iter().map(|&root| coordinate(graph, roots[root]));
                learned.coordinates = axes.collect();
            }
        }
        let root = graph.node(gradient.program().roots()[0]);
        Ok(Self {
            is_one: *root == Node::F32(1f32.to_bits()),
            kernel: TileProgram::compile(gradient.with_score()),
            score: gradient.with_score().roots().len() - 1,
            learned: Arc::new(learned.into_iter().map(|(_, l)| l).collect()),
        })
    }
}

struct ScoreMachine {
    machine: Machine,
    /// Root of the score.
    score: usize,
    /// The buffers whose derivatives are roots, besides root 0, the derivative by the raw score.
    learned: Option<Arc<Vec<Learned>>>,
}

/// Evaluates mods on one thread. Calls go from outside in: [`Self::enter`] a head, then a
/// [`Self::tile`], then its subtiles. Rows are counted from the first of the tile, columns from its
/// first key; columns are whole groups.
pub struct Evaluator {
    mask: Option<Machine>,
    score: Option<ScoreMachine>,
    dropout_keep: Option<Machine>,
    /// Where the mask of a partial tile is true.
    mask_bits: MaskBits,
    /// The entries of the tile that dropout keeps.
    dropout_bits: MaskBits,
    /// Whether the tile is partial.
    partial: bool,
    /// Columns of the tile that may have a weight.
    columns: Range<usize>,
    /// Queries and keys in the tile.
    queries: usize,
    keys: usize,
}

impl Evaluator {
    fn machines(&mut self) -> impl Iterator<Item = &mut Machine> {
        let score = self.score.as_mut().map(|s| &mut s.machine);
        self.mask.iter_mut().chain(score).chain(&mut self.dropout_keep)
    }

    /// Starts a head.
    pub fn enter(&mut self, head: Head) {
        self.machines().for_each(|m| m.set_head(head));
    }

    /// Starts a tile.
    pub fn tile(&mut self, queries: Range<usize>, keys: Range<usize>, partial: bool) {
        let [q, kv] = [queries, keys].map(|r| r.start as i32..r.end as i32);
        (self.queries, self.keys) = (q.len(), kv.len());
        self.columns = 0..self.keys;
        self.partial = partial && self.mask.is_some();
        if let Some(mask) = self.mask.as_mut().filter(|_| self.partial) {
            mask.set_tile(q.clone(), kv.clone());
            mask.mask_bits(None, &mut self.mask_bits);
        }
        if let Some(score) = &mut self.score {
            score.machine.set_tile(q.clone(), kv.clone());
        }
        if let Some(keep) = &mut self.dropout_keep {
            keep.set_tile(q, kv);
            keep.mask_bits(self.partial.then_some(&self.mask_bits), &mut self.dropout_bits);
        }
    }

    /// Leaves out the columns of the tile outside of `columns`, which are whole groups.
    pub fn restrict(&mut self, columns: Range<usize>) {
        self.columns = columns;
    }

    /// Whether there is a score function.
    pub fn has_score(&self) -> bool {
        self.score.is_some()
    }

    /// The columns of the tile outside of which no query of `rows` has a key with a weight.
    pub fn live(&self, rows: Range<usize>) -> Range<usize> {
        let Range { start, end } = self.columns;
        if !self.partial {
            return start..end;
        }
        let live = self.mask_bits.columns(rows);
        let start = start.max(live.start);
        start..end.min(live.end).max(start)
    }

    /// The next subtile of `rows`, the rest of a tile: up to [`SUBTILE_ROWS`] rows. It ends earlier
    /// where a query sees none of the keys that the queries before it see, as at the edge of a
    /// document, if less is computed then.
    pub fn subtile(&self, rows: Range<usize>) -> Range<usize> {
        let subtile = rows.start..rows.end.min(rows.start + SUBTILE_ROWS);
        if !self.partial {
            return subtile;
        }
        // Two rows more, for the fixed cost of a product.
        let cost = |rows: Range<usize>| {
            let columns = self.mask_bits.columns(rows.clone());
            (columns.end.div_ceil(LANES) - columns.start / LANES) * (rows.len() + 2)
        };
        let mut live = 0..0;
        for row in subtile.clone() {
            let own = self.mask_bits.columns(row..row + 1);
            if own.is_empty() {
                continue;
            }
            if !live.is_empty() && (own.start >= live.end || own.end <= live.start) {
                let [before, after] = [subtile.start..row, row..subtile.end];
                let apart = cost(before.clone()) + cost(after) < cost(subtile.clone());
                return if apart { before } else { subtile };
            }
            live = if live.is_empty() {
                own
            } else {
                live.start.min(own.start)..live.end.max(own.end)
            };
        }
        subtile
    }

    /// The rows of the tile outside of which no query sees a key of `columns`.
    pub fn live_rows(&self, columns: Range<usize>) -> Range<usize> {
        if self.partial { self.mask_bits.rows_within(columns) } else { 0..self.queries }
    }

    /// Applies the score function to raw scores, then writes `-∞` where the mask is false and past
    /// the tile's keys. `scores` begins at the first of `rows`, in column 0.
    pub fn score(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
        scores: &mut [f32],
        stride: usize,
    ) {
        let mask_bits = self.partial.then_some(&self.mask_bits);
        if let Some(ScoreMachine { machine, score, .. }) = &mut self.score {
            let step = Machine::strip_rows(columns.len());
            for start in rows.clone().step_by(step) {
                let subtile = start..rows.end.min(start + step);
                let own = &mut scores[(start - rows.start) * stride..];
                machine.change(*score, [subtile, columns.clone()], own, stride, mask_bits);
            }
        }
        for (r, row) in rows.zip(scores.chunks_mut(stride)) {
            let row = &mut row[columns.clone()];
            match mask_bits {
                Some(mask_bits) => mask_bits.fill_false(r, columns.start, row, f32::NEG_INFINITY),
                None if columns.end > self.keys => {
                    row[self.keys.saturating_sub(columns.start)..].fill(f32::NEG_INFINITY);
                }
                None => {}
            }
        }
    }

    /// Sets the entries that dropout drops to 0.
    pub fn apply_dropout(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        p: &mut [f32],
        stride: usize,
    ) {
        if self.dropout_keep.is_some() {
            for (r, row) in rows.zip(p.chunks_mut(stride)) {
                self.dropout_bits.fill_false(r, columns.start, &mut row[columns.clone()], 0.0);
            }
        }
    }

    /// Turns the gradient of the scores into the gradient of the raw scores, for the subtile that
    /// [`Self::score`] was given last, and adds the gradients of learned buffers to the sums of
    /// `slot`, one for each buffer or none at all. An entry without weight has no gradient, whatever the derivative
    /// there.
    pub fn gradient(&self, d: &mut [f32], stride: usize, slot: &mut Slot<'_>) {
        let Some(ScoreMachine { machine, learned: Some(learned), .. }) = &self.score else {
            return;
        };
        for (learned, sum) in learned.iter().zip(&mut slot.sums) {
            for CaptureGradient { value, index, from_end, .. } in &learned.loads {
                let (value, from_end) = (*value, *from_end);
                let read = Read { value, index, from_end, shape: &learned.shape };
                match sum {
                    Sum::Of(sum) => machine.add_read(read, d, stride, sum),
                    Sum::Entries(into) => {
                        machine.each_read(read, d, stride, |at, terms| into.give(at, terms));
                    }
                }
            }
        }
        machine.multiply(0, d, stride);
    }

    /// The first index out of range that a mod read, as a message.
    pub fn out_of_range(&mut self) -> Option<String> {
        self.machines().find_map(|m| m.out_of_range()).map(|o| o.to_string())
    }
}
