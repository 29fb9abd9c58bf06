//! Gradients of learned captured buffers.
//!
//! Any entry of a tile may add to any element of a buffer, so tasks cannot own parts of a buffer.
//! Instead tasks are dealt to a fixed number of *slots*, each with f32 accumulators of its own. The
//! tasks of a slot run one after another, and the slots are added up in order. Memory is one copy
//! of the learned buffers per slot: sixteen slots when they fit 64 MiB, never fewer than four.

use foveate_problem::CaptureGrad;
use foveate_tensor::SliceMut;
use rayon::iter::{
    IndexedParallelIterator, IntoParallelIterator, IntoParallelRefMutIterator, ParallelIterator,
};

use crate::error::CpuError;
use crate::mods::Mods;
use crate::pool::{Pool, PoolBuffer};

/// Floats that all slots together may take before there are fewer of them.
const BUDGET_ELEMS: usize = 16 << 20;

/// The accumulators of one slot: one for each learned buffer of the mods, empty when its gradient is
/// not wanted.
#[derive(Debug, Default)]
pub struct Slot<'a> {
    pub sums: Vec<PoolBuffer<'a>>,
}

/// The slots of a call and the destinations of their totals.
pub struct CaptureSums<'a> {
    slots: Vec<Slot<'a>>,
    /// Destination of each learned buffer.
    into: Vec<Option<SliceMut<'a>>>,
}

impl<'a> CaptureSums<'a> {
    /// Slots for the buffers that `wanted` names, which are learned buffers of the score and have
    /// as many elements. One that the score does not depend on smoothly gets zeros.
    ///
    /// # Errors
    /// When the score has no derivative.
    pub fn new(
        mods: &Mods,
        pool: &'a Pool,
        wanted: Vec<CaptureGrad<'a>>,
        accumulate: bool,
    ) -> Result<Self, CpuError> {
        let learned = mods.differentiable()?;
        let mut into: Vec<Option<SliceMut<'a>>> = learned.iter().map(|_| None).collect();
        let mut elems = 0;
        for mut grad in wanted {
            match learned.iter().position(|l| l.name == grad.name) {
                Some(i) => {
                    elems += grad.into.len();
                    into[i] = Some(grad.into);
                }
                None if !accumulate => grad.into.store(&vec![0.0; grad.into.len()], false),
                None => {}
            }
        }
        let mut slots = Vec::new();
        if let Some(count) = BUDGET_ELEMS.checked_div(elems) {
            slots.resize_with(count.clamp(4, 16), || Slot {
                sums: into.iter().map(|i| pool.alloc(i.as_ref().map_or(0, |i| i.len()))).collect(),
            });
            slots.par_iter_mut().flat_map(|s| &mut s.sums).for_each(|sum| sum.fill(0.0));
        }
        Ok(Self { slots, into })
    }

    /// Whether any gradient is wanted.
    pub fn wanted(&self) -> bool {
        self.into.iter().any(Option::is_some)
    }

    /// Deals tasks to slots in turn. Without gradients to sum each task is alone.
    pub fn deal<T>(&mut self, tasks: Vec<T>) -> impl Iterator<Item = (&mut Slot<'a>, Vec<T>)> {
        if !self.wanted() {
            self.slots.resize_with(tasks.len(), Slot::default);
        }
        let count = self.slots.len();
        let mut hands: Vec<Vec<T>> = (0..count).map(|_| Vec::new()).collect();
        for (i, task) in tasks.into_iter().enumerate() {
            hands[i % count].push(task);
        }
        self.slots.iter_mut().zip(hands)
    }

    /// Adds the slots up into the destinations.
    pub fn store(self, accumulate: bool) {
        const PART: usize = 4096;
        for (i, into) in self.into.into_iter().enumerate() {
            let Some(into) = into else { continue };
            into.chunks(PART).into_par_iter().enumerate().for_each(|(part, mut into)| {
                let mut sums = [0.0; PART];
                for slot in &self.slots {
                    let own = &slot.sums[i][part * PART..][..into.len()];
                    sums.iter_mut().zip(own).for_each(|(sum, x)| *sum += x);
                }
                into.store(&sums, accumulate);
            });
        }
    }
}
