//! Gradients of learned captured buffers.
//!
//! Any entry of a tile may add to any element of a buffer, so tasks cannot own parts of a buffer.
//! Instead tasks are dealt to a fixed number of *slots*, each with f32 accumulators of its own. The
//! tasks of a slot run one after another, and the slots are added up in order. Memory is one copy
//! of the learned buffers per slot: sixteen slots when they fit 64 MiB, never fewer than four.
//!
//! A dense bias, `bias[b, h, q, kv]`, has no copy: see [`Sum::Entries`].

use std::sync::Arc;

use foveate_mods::Leaf;
use foveate_problem::CaptureGrad;
use foveate_tensor::SliceMut;

use crate::call::Call;
use crate::error::CpuError;
use crate::slots::{Entries, PART, Slot, Sum};
use crate::threads;

/// Floats that all slots together may take before there are fewer of them.
const BUDGET_ELEMS: usize = 16 << 20;

/// The slots of a call and the destinations of their totals.
pub struct CaptureSums<'a> {
    slots: Vec<Slot<'a>>,
    /// Destination of the total of each learned buffer.
    into: Vec<Option<SliceMut<'a>>>,
    /// The destinations that entries are written to.
    entries: Vec<Option<Arc<Entries<'a>>>>,
}

impl<'a> CaptureSums<'a> {
    /// Slots for the buffers that `wanted` names, which are learned buffers of the score and have
    /// as many elements. One that the score does not depend on smoothly gets zeros.
    ///
    /// # Errors
    /// When the score has no derivative.
    pub fn new(
        call: &Call<'a>,
        wanted: Vec<CaptureGrad<'a>>,
        accumulate: bool,
    ) -> Result<Self, CpuError> {
        let learned = call.mods.differentiable()?;
        let longest = |of: &dyn Fn(&foveate_problem::Sequence) -> usize| {
            call.sequences.iter().map(of).max().unwrap_or(0)
        };
        let (longest_q, longest_k) = (longest(&|s| s.q_len), longest(&|s| s.k_len));
        let extent = |leaf: Leaf| match leaf {
            Leaf::B => call.sequences.len(),
            Leaf::H => call.dims.heads_q,
            Leaf::Q => longest_q,
            _ => longest_k,
        };
        let mut into: Vec<Option<SliceMut<'a>>> = learned.iter().map(|_| None).collect();
        let mut entries: Vec<Option<Arc<Entries<'a>>>> = learned.iter().map(|_| None).collect();
        let mut elems = 0;
        for mut grad in wanted {
            match learned.iter().position(|l| l.name == grad.name) {
                Some(i) if learned[i].is_read_once(extent) => {
                    entries[i] = Some(Arc::new(Entries::new(grad.into, accumulate)));
                }
                Some(i) => {
                    elems += grad.into.len();
                    into[i] = Some(grad.into);
                }
                None if !accumulate => grad.into.store(&vec![0.0; grad.into.len()], false),
                None => {}
            }
        }
        let mut sums = Self { slots: Vec::new(), into, entries };
        if let Some(count) = BUDGET_ELEMS.checked_div(elems) {
            let slots = (0..count.clamp(4, 16)).map(|_| sums.slot(call)).collect();
            sums.slots = slots;
            threads::each(
                sums.slots.iter_mut().flat_map(|s| &mut s.sums).collect(),
                |sum| match sum {
                    Sum::Of(sum) => sum.fill(0.0),
                    Sum::Entries(_) => {}
                },
            );
        }
        Ok(sums)
    }

    fn slot(&self, call: &Call<'a>) -> Slot<'a> {
        let sums = self.into.iter().zip(&self.entries).map(|(into, entries)| match entries {
            Some(entries) => Sum::Entries(entries.clone()),
            None => Sum::Of(call.pool.alloc(into.as_ref().map_or(0, |i| i.len()))),
        });
        Slot { sums: sums.collect() }
    }

    /// Whether any gradient is wanted.
    pub fn wanted(&self) -> bool {
        self.into.iter().any(Option::is_some) || self.entries.iter().any(Option::is_some)
    }

    /// Deals tasks to slots in turn. Without gradients to sum each task is alone.
    pub fn deal<T>(
        &mut self,
        call: &Call<'a>,
        tasks: Vec<T>,
    ) -> impl Iterator<Item = (&mut Slot<'a>, Vec<T>)> {
        if !self.into.iter().any(Option::is_some) {
            self.slots = tasks.iter().map(|_| self.slot(call)).collect();
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
        for (i, into) in self.into.into_iter().enumerate() {
            let Some(into) = into else { continue };
            let parts = into.chunks(PART).into_iter().enumerate();
            threads::each(parts.collect(), |(part, mut into): (usize, SliceMut<'_>)| {
                let mut sums = [0.0; PART];
                for slot in &self.slots {
                    let Sum::Of(own) = &slot.sums[i] else { unreachable!("it has a total") };
                    let own = &own[part * PART..][..into.len()];
                    sums.iter_mut().zip(own).for_each(|(sum, x)| *sum += x);
                }
                into.store(&sums, accumulate);
            });
        }
    }
}
