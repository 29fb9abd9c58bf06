//! Masks, scores and dropout inside a tile.
//!
//! A plan compiles its programs once ([`Mods`]); each thread evaluates them in an [`Evaluator`],
//! a row of a tile at a time. Full tiles never run the mask. In the backward the evaluator keeps
//! the raw scores of the row, for the derivative.

use std::sync::Arc;

use foveate_mods::vector::{Head, Kernel, Machine};
use foveate_mods::{MaskMod, ModError, Node, ScoreMod};
use foveate_problem::Spec;

use crate::captures::Slot;

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
    kernel: Kernel,
    learned: Arc<Vec<Learned>>,
    /// `∂score'/∂score` is the constant 1.
    is_one: bool,
}

/// The compiled mods of a plan.
#[derive(Debug)]
pub struct Mods {
    mask: Option<Kernel>,
    score: Option<Kernel>,
    gradient: Option<Result<Gradient, ModError>>,
    keep: Option<Kernel>,
}

impl Mods {
    /// Compiles the programs. That a score has no derivative is reported by
    /// [`Self::differentiable`].
    pub fn new(spec: &Spec) -> Self {
        let Spec { mask, score, dropout, .. } = spec;
        let of_mask = |m: &MaskMod| Kernel::compile(m.program());
        Self {
            mask: mask.as_ref().map(of_mask),
            score: score.as_ref().map(|s| Kernel::compile(s.program())),
            gradient: score.as_ref().map(Gradient::new),
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

    /// What a thread needs for tiles of `width` keys. `backward` says that it is for the backward
    /// pass, and whether gradients of learned buffers are wanted.
    pub fn evaluator(&self, width: usize, backward: Option<bool>) -> Evaluator {
        let machine = |k: &Option<Kernel>| k.as_ref().map(|k| k.machine(width));
        let gradient = match &self.gradient {
            Some(Ok(g)) if backward.is_some_and(|captures| captures || !g.is_one) => {
                Some(GradientMachine {
                    machine: g.kernel.machine(width),
                    learned: g.learned.clone(),
                    raw: Vec::with_capacity(width),
                })
            }
            _ => None,
        };
        Evaluator {
            mask: machine(&self.mask),
            score: machine(&self.score),
            keep: machine(&self.keep),
            gradient,
            partial: false,
        }
    }
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
            kernel: Kernel::compile(gradient.program()),
            learned: Arc::new(learned.into_iter().map(|(_, l)| l).collect()),
        })
    }
}

struct GradientMachine {
    machine: Machine,
    learned: Arc<Vec<Learned>>,
    /// The raw scores of the row.
    raw: Vec<f32>,
}

/// What a thread evaluates mods with. Calls go from outside in: [`Self::enter`] a head, the
/// [`Self::columns`] of a tile, then rows.
pub struct Evaluator {
    mask: Option<Machine>,
    score: Option<Machine>,
    keep: Option<Machine>,
    gradient: Option<GradientMachine>,
    /// Whether the mask decides inside the tile.
    partial: bool,
}

impl Evaluator {
    fn machines(&mut self) -> impl Iterator<Item = &mut Machine> {
        let gradient = self.gradient.as_mut().map(|g| &mut g.machine);
        self.mask.iter_mut().chain(&mut self.score).chain(&mut self.keep).chain(gradient)
    }

    /// Starts a head.
    pub fn enter(&mut self, head: Head) {
        self.machines().for_each(|m| m.set_head(head));
    }

    /// Starts a tile of `width` keys from `start` on; `partial` when the mask decides inside.
    pub fn columns(&mut self, start: usize, width: usize, partial: bool) {
        let start = start as i32;
        self.partial = partial;
        if let Some(mask) = &mut self.mask
            && partial
        {
            mask.set_columns(start, width);
        }
        let gradient = self.gradient.as_mut().map(|g| &mut g.machine);
        for machine in self.score.iter_mut().chain(&mut self.keep).chain(gradient) {
            machine.set_columns(start, width);
        }
    }

    /// Turns the raw scores of query `q` into what the softmax sees: the score function, then
    /// `-∞` where the mask is false.
    pub fn score(&mut self, q: usize, row: &mut [f32]) {
        if let Some(gradient) = &mut self.gradient {
            gradient.raw.clear();
            gradient.raw.extend_from_slice(row);
        }
        if let Some(mask) = self.mask.as_mut().filter(|_| self.partial) {
            mask.run_row(q as i32, &[]);
        }
        let visible = visible(&self.mask, self.partial);
        if let Some(score) = &mut self.score {
            run_where(score, q, row, visible);
            row.copy_from_slice(score.f32s(0));
        }
        for (x, &visible) in row.iter_mut().zip(visible.unwrap_or(&[])) {
            *x = if visible { *x } else { f32::NEG_INFINITY };
        }
    }

    /// Sets what dropout drops from query `q`, the one that [`Self::score`] was given last, to 0.
    pub fn drop_out(&mut self, q: usize, row: &mut [f32]) {
        if let Some(keep) = &mut self.keep {
            run_where(keep, q, &[], visible(&self.mask, self.partial));
        }
        self.drop_again(row);
    }

    /// [`Self::drop_out`] of the same query as before.
    pub fn drop_again(&mut self, row: &mut [f32]) {
        if let Some(keep) = &self.keep {
            for (x, &keep) in row.iter_mut().zip(keep.bools(0)) {
                *x = if keep { *x } else { 0.0 };
            }
        }
    }

    /// Turns the gradient of the final scores of query `q` into that of the raw ones, the same
    /// that [`Self::score`] was given last, and adds what learned buffers get. An entry without
    /// weight has no gradient, whatever the derivative there.
    pub fn gradient(&mut self, q: usize, row: &mut [f32], slot: &mut Slot) {
        let Some(GradientMachine { machine, learned, raw }) = &mut self.gradient else { return };
        run_where(machine, q, raw, visible(&self.mask, self.partial));
        for (learned, sum) in learned.iter().zip(&mut slot.sums) {
            if sum.is_empty() {
                continue;
            }
            for (value, index) in &learned.loads {
                let value = machine.f32s(*value);
                for (i, &d) in row.iter().enumerate() {
                    if d != 0.0 {
                        let at = index.iter().zip(&learned.shape).fold(0, |at, (root, &n)| {
                            let index = machine.i32s(*root)[i].max(0) as usize;
                            at * n + index.min(n - 1)
                        });
                        sum[at] += d * value[i];
                    }
                }
            }
        }
        for (d, &slope) in row.iter_mut().zip(machine.f32s(0)) {
            *d = if *d == 0.0 { 0.0 } else { *d * slope };
        }
    }

    /// The first index out of range that any mod has met, as a message.
    pub fn out_of_range(&mut self) -> Option<String> {
        self.machines().find_map(|m| m.out_of_range()).map(|o| o.to_string())
    }
}

/// Which keys the query sees that the mask was last run for; `None` when it sees all of a tile.
fn visible(mask: &Option<Machine>, partial: bool) -> Option<&[bool]> {
    mask.as_ref().filter(|_| partial).map(|mask| mask.bools(0))
}

/// Runs a row, where an index out of range counts at visible keys only.
fn run_where(machine: &mut Machine, q: usize, scores: &[f32], visible: Option<&[bool]>) {
    match visible {
        Some(visible) => machine.run_row_where(q as i32, scores, visible),
        None => machine.run_row(q as i32, scores),
    }
}
