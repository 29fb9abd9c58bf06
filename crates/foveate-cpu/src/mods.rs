//! Masks, scores and dropout inside a tile.
//!
//! A plan compiles its programs once ([`Mods`]); each thread evaluates them in an [`Evaluator`].
//! The mask of a partial tile is evaluated before its products, into bits, which say for each strip
//! of rows between which keys there is anything to compute. Full tiles never run the mask. Scores
//! are evaluated a strip of rows at a time; in the backward the same run gives the derivative,
//! which is kept until the strip's gradient is known.

use std::ops::Range;
use std::sync::Arc;

use foveate_mods::vector::{Machine, MaskBits, Read, TileProgram};
use foveate_mods::{Bounds, Head, Leaf, MaskMod, ModError, Node, ScoreMod};
use foveate_problem::Spec;

use crate::reach::Reach;
use crate::simd::{LANES, STRIP};
use crate::work::Lent;

/// A learned buffer of the score.
#[derive(Debug)]
pub struct Learned {
    pub name: String,
    pub shape: Vec<usize>,
    /// Where the score reads it: the roots of `∂score/∂load` and of the indices.
    loads: Vec<(usize, Vec<usize>)>,
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
    /// What the score is at most, where that may tell anything.
    bounds: Option<Bounds>,
    keep: Option<TileProgram>,
}

/// Elements of captured buffers up to which a score is bounded: what bounds look up in them takes
/// time to make.
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
            keep: dropout.as_ref().map(|d| of_mask(d.keep())),
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

    /// What tells which keys queries of a head do not reach; `None` where nothing does.
    pub fn reach(&self, head: Head) -> Option<Reach<'_>> {
        self.bounds.as_ref().map(|bounds| Reach::new(bounds, head))
    }

    /// Whether [`Self::reach`] is for anything.
    pub fn has_reach(&self) -> bool {
        self.bounds.is_some()
    }

    /// What a thread needs for tiles of `[queries, keys]`. `backward` says that it is for the
    /// backward pass, and whether gradients of learned buffers are wanted.
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
            keep: machine(&self.keep),
            visible: MaskBits::default(),
            kept: MaskBits::default(),
            partial: false,
            reached: 0..0,
            queries: 0,
            keys: 0,
        }
    }
}

/// The bounds of a score that looks at keys.
fn bounds(score: &ScoreMod) -> Option<Bounds> {
    let graph = score.program().graph();
    let captured: usize = graph.buffers().iter().map(|b| b.data().len()).sum();
    let may = graph.nodes().contains(&Node::Leaf(Leaf::Kv)) && captured <= BOUNDED;
    may.then(|| Bounds::new(score.program()))
}

impl Gradient {
    fn new(score: &ScoreMod) -> Result<Self, ModError> {
        let gradient = score.gradient()?;
        let graph = gradient.program().graph();
        let mut learned: Vec<(u32, Learned)> = Vec::new();
        for capture in gradient.captures() {
            let load = (capture.value, capture.index.clone());
            match learned.iter_mut().find(|(slot, _)| *slot == capture.buffer) {
                Some((_, own)) => own.loads.push(load),
                None => {
                    let buffer = &graph.buffers()[capture.buffer as usize];
                    let (name, shape) = (buffer.name().to_owned(), buffer.shape().to_vec());
                    learned.push((capture.buffer, Learned { name, shape, loads: vec![load] }));
                }
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
    /// Root 0 is the derivative by the raw score, and there are those by these buffers.
    learned: Option<Arc<Vec<Learned>>>,
}

/// What a thread evaluates mods with. Calls go from outside in: [`Self::enter`] a head, then a
/// [`Self::tile`], then strips of its rows, which are counted from the first of the tile, and of its
/// columns, which are whole groups counted from its first key.
pub struct Evaluator {
    mask: Option<Machine>,
    score: Option<ScoreMachine>,
    keep: Option<Machine>,
    /// Where the mask of a partial tile is true.
    visible: MaskBits,
    /// What dropout keeps in the tile.
    kept: MaskBits,
    /// Whether the mask decides inside the tile.
    partial: bool,
    /// Columns of the tile that count.
    reached: Range<usize>,
    /// Queries and keys in the tile.
    queries: usize,
    keys: usize,
}

impl Evaluator {
    fn machines(&mut self) -> impl Iterator<Item = &mut Machine> {
        let score = self.score.as_mut().map(|s| &mut s.machine);
        self.mask.iter_mut().chain(score).chain(&mut self.keep)
    }

    /// Starts a head.
    pub fn enter(&mut self, head: Head) {
        self.machines().for_each(|m| m.set_head(head));
    }

    /// Starts a tile; `partial` when the mask decides inside.
    pub fn tile(&mut self, queries: Range<usize>, keys: Range<usize>, partial: bool) {
        let [q, kv] = [queries, keys].map(|r| r.start as i32..r.end as i32);
        (self.queries, self.keys) = (q.len(), kv.len());
        self.reached = 0..self.keys;
        self.partial = partial && self.mask.is_some();
        if let Some(mask) = self.mask.as_mut().filter(|_| self.partial) {
            mask.set_tile(q.clone(), kv.clone());
            mask.mask_bits(None, &mut self.visible);
        }
        if let Some(score) = &mut self.score {
            score.machine.set_tile(q.clone(), kv.clone());
        }
        if let Some(keep) = &mut self.keep {
            keep.set_tile(q, kv);
            keep.mask_bits(self.partial.then_some(&self.visible), &mut self.kept);
        }
    }

    /// Leaves the columns of the tile outside of `columns`, which are whole groups, out.
    pub fn confine(&mut self, columns: Range<usize>) {
        self.reached = columns;
    }

    /// Whether there is a score function.
    pub fn has_score(&self) -> bool {
        self.score.is_some()
    }

    /// The columns of the tile that count, outside of which no query of `rows` sees a key.
    pub fn live(&self, rows: Range<usize>) -> Range<usize> {
        let Range { start, end } = self.reached;
        if !self.partial {
            return start..end;
        }
        let seen = self.visible.columns(rows);
        let start = start.max(seen.start);
        start..end.min(seen.end).max(start)
    }

    /// The first of `rows`, those of a tile that are left, that are computed together: up to
    /// [`STRIP`], but not beyond where queries see other keys than those before them, as at the
    /// edge of a document, if less is computed then.
    pub fn strip(&self, rows: Range<usize>) -> Range<usize> {
        let strip = rows.start..rows.end.min(rows.start + STRIP);
        if !self.partial {
            return strip;
        }
        // Two rows more, for what a product costs besides.
        let cost = |rows: Range<usize>| {
            let columns = self.visible.columns(rows.clone());
            (columns.end.div_ceil(LANES) - columns.start / LANES) * (rows.len() + 2)
        };
        let mut seen = 0..0;
        for row in strip.clone() {
            let own = self.visible.columns(row..row + 1);
            if own.is_empty() {
                continue;
            }
            if !seen.is_empty() && (own.start >= seen.end || own.end <= seen.start) {
                let [before, after] = [strip.start..row, row..strip.end];
                let apart = cost(before.clone()) + cost(after) < cost(strip.clone());
                return if apart { before } else { strip };
            }
            seen = if seen.is_empty() {
                own
            } else {
                seen.start.min(own.start)..seen.end.max(own.end)
            };
        }
        strip
    }

    /// The rows of the tile outside of which no query sees a key of `columns`.
    pub fn live_rows(&self, columns: Range<usize>) -> Range<usize> {
        if self.partial { self.visible.rows_within(columns) } else { 0..self.queries }
    }

    /// Turns raw scores into what the softmax sees: the score function, then `-∞` where the mask
    /// is false and past the tile's keys. `scores` begins at the first of `rows`, in column 0.
    pub fn score(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
        scores: &mut [f32],
        stride: usize,
    ) {
        let visible = self.partial.then_some(&self.visible);
        if let Some(ScoreMachine { machine, score, .. }) = &mut self.score {
            let step = Machine::strip_rows(columns.len());
            for start in rows.clone().step_by(step) {
                let strip = start..rows.end.min(start + step);
                let own = &mut scores[(start - rows.start) * stride..];
                machine.change(*score, [strip, columns.clone()], own, stride, visible);
            }
        }
        for (r, row) in rows.zip(scores.chunks_mut(stride)) {
            let row = &mut row[columns.clone()];
            match visible {
                Some(visible) => visible.fill_false(r, columns.start, row, f32::NEG_INFINITY),
                None if columns.end > self.keys => {
                    row[self.keys.saturating_sub(columns.start)..].fill(f32::NEG_INFINITY);
                }
                None => {}
            }
        }
    }

    /// Sets what dropout drops of the tile to 0.
    pub fn drop_out(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        p: &mut [f32],
        stride: usize,
    ) {
        if self.keep.is_some() {
            for (r, row) in rows.zip(p.chunks_mut(stride)) {
                self.kept.fill_false(r, columns.start, &mut row[columns.clone()], 0.0);
            }
        }
    }

    /// Turns the gradient of the final scores of the strip that [`Self::score`] was given last,
    /// which had twelve rows at most, into that of the raw ones, and adds what learned
    /// buffers get to their `sums`, which are as many as learned buffers, or none. An entry without
    /// weight has no gradient, whatever the derivative there.
    pub fn gradient(&self, d: &mut [f32], stride: usize, sums: &mut [Lent<'_>]) {
        let Some(ScoreMachine { machine, learned: Some(learned), .. }) = &self.score else {
            return;
        };
        for (learned, sum) in learned.iter().zip(sums) {
            for (value, index) in &learned.loads {
                let read = Read { value: *value, index, shape: &learned.shape };
                machine.add_read(read, d, stride, sum);
            }
        }
        machine.multiply(0, d, stride);
    }

    /// The first index out of range that any mod has met, as a message.
    pub fn out_of_range(&mut self) -> Option<String> {
        self.machines().find_map(|m| m.out_of_range()).map(|o| o.to_string())
    }
}
