//! Where the tasks of a slot put gradients of learned captured buffers.
//!
//! A dense bias, `bias[b, h, q, kv]`, has an element for each entry. Its gradient is written where it
//! belongs, entry by entry, in the dtype of its destination, and there is no copy of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use foveate_tensor::{F8E4M3, Float, SliceMut};
use half::{bf16, f16};

use crate::pool::PoolBuffer;
use crate::threads;

/// Elements of a destination that are stored at a time.
pub const PART: usize = 4096;

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
    F8E4M3(&'a [AtomicU8]),
    F64(&'a [AtomicU64]),
}

impl<'a> Entries<'a> {
    /// A destination of zeros, or of what is there when that is added to.
    pub fn new(mut into: SliceMut<'a>, add: bool) -> Self {
        if !add {
            let parts = into.reborrow().chunks(PART);
            threads::each(parts, |mut part| part.store(&[0.0; PART], false));
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
            SliceMut::F8E4M3(v) => Atomics::F8E4M3(atomics!(v, AtomicU8)),
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
                each!(v, |x| f16::from_bits(x).to_f64(), |x| <f16 as Float>::from_f64(x).to_bits())
            }
            Atomics::BF16(v) => {
                each!(v, |x| bf16::from_bits(x).to_f64(), |x| <bf16 as Float>::from_f64(x)
                    .to_bits())
            }
            Atomics::F8E4M3(v) => {
                each!(v, |x| F8E4M3::from_bits(x).to_f64(), |x| F8E4M3::from_f64(x).to_bits())
            }
            Atomics::F64(v) => each!(v, f64::from_bits, f64::to_bits),
        }
    }
}
