//! Gradients of learned captured buffers.
//!
//! Any entry of a tile may add to any element of a buffer, so tasks cannot own parts of a buffer.
//! Instead tasks are dealt to a fixed number of *slots*, each with f32 accumulators of its own. The
//! tasks of a slot run one after another, and the slots are added up in order. Memory is one copy
//! of the learned buffers per slot: sixteen slots when they fit 64 MiB, never fewer than four.
//!
//! A dense bias, `bias[b, h, q, kv]`, has an element for each entry. Its gradient is written where it
//! belongs, entry by entry, in the dtype of its destination, and there is no copy of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use foveate_mods::Leaf;
use foveate_problem::CaptureGrad;
use foveate_tensor::SliceMut;
use half::{bf16, f16};
use rayon::iter::{
    IndexedParallelIterator, IntoParallelIterator, IntoParallelRefMutIterator, ParallelIterator,
};

use crate::call::Call;
use crate::error::CpuError;
use crate::pool::PoolBuffer;

/// Floats that all slots together may take before there are fewer of them.
const BUDGET_ELEMS: usize = 16 << 20;

/// Elements of a destination that are stored at a time.
const PART: usize = 4096;

/// Where one slot puts the gradient of a learned buffer.
#[derive(Debug)]
pub enum Sum<'a> {
    /// Accumulators of the slot's own, none when the gradient is not wanted.
    Of(PoolBuffer<'a>),
    /// The destination, of which each entry has an element of its own.
    Entries(Arc<Entries<'a>>),
}

/// What one slot adds to: one sum for each learned buffer of the mods.
#[derive(Debug, Default)]
pub struct Slot<'a> {
    pub sums: Vec<Sum<'a>>,
}

/// A destination that tasks write elements of at a time, each of which belongs to one entry.
#[derive(Debug)]
pub struct Entries<'a> {
    into: Atomics<'a>,
    add: bool,
}

/// Elements by their bits.
#[derive(Debug)]
enum Atomics<'a> {
    F32(&'a [AtomicU32]),
    F16(&'a [AtomicU16]),
    BF16(&'a [AtomicU16]),
    F64(&'a [AtomicU64]),
}

impl<'a> Entries<'a> {
    /// A destination of zeros, or of what is there when that is added to.
    fn new(mut into: SliceMut<'a>, add: bool) -> Self {
        if !add {
            let parts = into.reborrow().chunks(PART);
            parts.into_par_iter().for_each(|mut part| part.store(&[0.0; PART], false));
        }
        macro_rules! atomics {
            ($elems:expr, $atomic:ty) => {{
                let elems: &'a mut [_] = $elems;
                // SAFETY: the atomic type has the size and, on every platform that has it, the
                // alignment of the element; the slice is borrowed exclusively for as long.
                unsafe { &*(std::ptr::from_mut(elems) as *const [$atomic]) }
            }};
        }
        let into = match into {
            SliceMut::F32(v) => Atomics::F32(atomics!(v, AtomicU32)),
            SliceMut::F16(v) => Atomics::F16(atomics!(v, AtomicU16)),
            SliceMut::BF16(v) => Atomics::BF16(atomics!(v, AtomicU16)),
            SliceMut::F64(v) => Atomics::F64(atomics!(v, AtomicU64)),
        };
        Self { into, add }
    }

    /// Writes what entries give to the elements from `at` on, each of one entry.
    pub fn give(&self, at: usize, terms: &[f32]) {
        macro_rules! each {
            ($into:expr, $wide:expr, $bits:expr) => {
                for (into, &x) in $into[at..at + terms.len()].iter().zip(terms) {
                    let held = if self.add { $wide(into.load(Ordering::Relaxed)) } else { 0.0 };
                    into.store($bits(held + f64::from(x)), Ordering::Relaxed);
                }
            };
        }
        match self.into {
            // The sum of two f32 in f64, rounded to f32, is their sum in f32.
            Atomics::F32(v) => {
                each!(v, |x| f64::from(f32::from_bits(x)), |x: f64| (x as f32).to_bits())
            }
            Atomics::F16(v) => {
                each!(v, |x| f16::from_bits(x).to_f64(), |x| f16::from_f64(x).to_bits())
            }
            Atomics::BF16(v) => {
                each!(v, |x| bf16::from_bits(x).to_f64(), |x| bf16::from_f64(x).to_bits())
            }
            Atomics::F64(v) => each!(v, f64::from_bits, f64::to_bits),
        }
    }
}

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
            sums.slots.par_iter_mut().flat_map(|s| &mut s.sums).for_each(|sum| match sum {
                Sum::Of(sum) => sum.fill(0.0),
                Sum::Entries(_) => {}
            });
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
            into.chunks(PART).into_par_iter().enumerate().for_each(|(part, mut into)| {
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
