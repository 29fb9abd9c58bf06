//! What one call brings along: where it is queued, its sizes, and captured buffers and offsets of
//! sequences that lie in device memory, whose contents the host never sees.
//!
//! A program is printed for the lengths of its captured buffers, so buffers of other lengths than
//! the plan's make a plan of their own, which is kept and shares what does not depend on them.

use std::ops::Deref;
use std::sync::Arc;

use foveate_mods::{AnyBuffer, MaskMod};
use foveate_problem::{Dims, ProblemError, Sequence};

use super::{CudaPlan, longest, push_bounded, sequences};
use crate::compile::params::Address;
use crate::error::CudaError;
use crate::operands::{DeviceOffsets, DeviceOperands, captured};
use foveate_gpu::sync::lock;
use foveate_gpu::trace::{Noted, note};
use foveate_gpu::{DeviceArray, Queue};

/// One call of a plan.
pub(super) struct Call<'a> {
    pub queue: &'a Queue,
    pub dims: &'a Dims,
    pub sequences: Sequences,
    /// Whether indices outside captured buffers are reported.
    pub checked: bool,
    /// Whether it is recorded in a graph that takes its memory from the caller's allocator, or that allocator lends
    /// memory for the call alone: then it keeps nothing and uses nothing that is kept, since the graph outlives both.
    pub recorded: bool,
    captures: &'a [(&'a str, DeviceArray<'a>)],
}

/// The sequences of a call.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Sequences {
    /// Known to the host.
    Known(Vec<Sequence>),
    /// Offsets in device memory.
    Offsets(Offsets),
}

/// Offsets in device memory; pairs are of queries and of keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Offsets {
    pub address: [Address; 2],
    /// Sequences.
    pub count: usize,
    /// Packed rows.
    pub rows: [usize; 2],
    /// Rows of a sequence at most.
    pub longest: [usize; 2],
    /// The same for the same contents, when that is promised.
    version: Option<[u64; 2]>,
}

impl Sequences {
    fn of(dims: &Dims, operands: &DeviceOperands<'_>) -> Self {
        match operands.arrangement() {
            Ok(arrangement) => Self::Known(sequences(dims, arrangement)),
            Err(DeviceOffsets { q, k, longest_q, longest_k }) => Self::Offsets(Offsets {
                address: [q.address, k.address],
                count: dims.batch,
                rows: [dims.len_q, dims.len_k],
                longest: [longest_q.min(dims.len_q), longest_k.min(dims.len_k)],
                version: q.version.zip(k.version).map(Into::into),
            }),
        }
    }

    /// Queries and keys of the longest sequence, or more.
    pub fn longest(&self) -> [usize; 2] {
        match self {
            Self::Known(sequences) => longest(sequences),
            Self::Offsets(offsets) => offsets.longest,
        }
    }

    /// Whether they are the same wherever they compare equal.
    pub fn are_promised(&self) -> bool {
        !matches!(self, Self::Offsets(Offsets { version: None, .. }))
    }
}

/// What is promised of the captured buffers in device memory that a mask reads: the same number
/// for the same contents. Empty when it reads none.
pub(super) type Contents = Vec<(Address, u64)>;

impl<'a> Call<'a> {
    pub fn new(
        queue: &'a Queue,
        dims: &'a Dims,
        operands: &DeviceOperands<'a>,
        checked: bool,
    ) -> Result<Self, CudaError> {
        let sequences = Sequences::of(dims, operands);
        let recorded = queue.pool().is_lent()?;
        Ok(Self { queue, dims, sequences, checked, recorded, captures: operands.captures })
    }

    /// The captured buffer of this name in device memory, and its place in the call.
    pub fn capture(&self, name: &str) -> Option<(usize, &DeviceArray<'a>)> {
        let at = self.captures.iter().position(|(n, _)| *n == name)?;
        Some((at, &self.captures[at].1))
    }

    /// The captured buffer at a place in the call, with its name.
    pub fn captured(&self, at: usize) -> &(&'a str, DeviceArray<'a>) {
        &self.captures[at]
    }

    /// What is promised of the contents that decide block lists; `None` when nothing is, of what
    /// the mask reads or of the sequences themselves, or the call is recorded.
    pub fn contents(&self, mask: &MaskMod) -> Option<Contents> {
        if self.recorded || !self.sequences.are_promised() {
            return None;
        }
        let buffers = mask.program().graph().buffers().iter().filter(|b| b.is_on_device());
        let arrays = buffers.filter_map(|b| self.capture(b.name()));
        arrays.map(|(_, array)| Some((array.address, array.version?))).collect()
    }
}

/// A plan for the captured buffers of a call.
pub(super) enum Bound<'a> {
    Same(&'a CudaPlan),
    Other(Arc<CudaPlan>),
}

impl Deref for Bound<'_> {
    type Target = CudaPlan;

    fn deref(&self) -> &CudaPlan {
        match self {
            Self::Same(plan) => plan,
            Self::Other(plan) => plan,
        }
    }
}

/// A plan, and the captured buffers that it was made for.
pub(super) type ForShapes = (Vec<AnyBuffer>, Arc<CudaPlan>);

/// Plans for other lengths of captured buffers that are kept at a time.
const MOST_BOUND: usize = 16;

impl CudaPlan {
    /// The plan for captured buffers in device memory.
    ///
    /// # Errors
    /// When there is no captured buffer of a name, its type or number of axes differs, two have one
    /// name, or it is not said where a buffer lies that is not in host memory.
    pub(super) fn bound(
        &self,
        captures: &[(&str, DeviceArray<'_>)],
    ) -> Result<Bound<'_>, CudaError> {
        let buffers = || self.spec.programs().flat_map(|p| p.graph().buffers());
        let given = |b: &AnyBuffer| captures.iter().any(|(name, _)| *name == b.name());
        if let Some(missing) = buffers().find(|b| b.is_on_device() && !given(b)) {
            return Err(CudaError::argument(format!(
                "captured buffer `{}` is in device memory; say where in the call's captures",
                missing.name()
            )));
        }
        for (i, (name, _)) in captures.iter().enumerate() {
            if captures[..i].iter().any(|(other, _)| other == name) {
                return Err(CudaError::argument(format!(
                    "captured buffer `{name}` is said to be in two places; give one"
                )));
            }
            if !buffers().any(|b| b.name() == *name) {
                return Err(ProblemError::no_slot("captured buffer", name).into());
            }
        }
        let same = |b: &AnyBuffer, a: &DeviceArray<'_>| {
            let strides = a.strides.map_or(b.is_dense(), |strides| b.strides() == strides);
            b.shape() == a.shape && b.element() == a.element && strides
        };
        let fits = |b: &AnyBuffer| {
            let mut of_name = captures.iter().filter(|(name, _)| *name == b.name());
            of_name.all(|(_, a)| (b.is_on_device() || b.elems() == 0) && same(b, a))
        };
        if buffers().all(fits) {
            return Ok(Bound::Same(self));
        }
        let found = {
            let bound = lock(&self.bound);
            let found = bound.iter().find(|(of, _)| {
                of.len() == captures.len()
                    && of.iter().zip(captures).all(|(b, (name, a))| b.name() == *name && same(b, a))
            });
            found.map(|(_, plan)| plan.clone())
        };
        if let Some(found) = found {
            return Ok(Bound::Other(found));
        }
        note(|| {
            let shape = |(name, array): &(&str, DeviceArray<'_>)| {
                ((*name).to_owned(), array.shape.to_vec())
            };
            Noted::Bound { buffers: captures.iter().map(shape).collect() }
        });
        let mut plan = self.clone();
        let mut of = Vec::with_capacity(captures.len());
        for (name, array) in captures {
            let learned = buffers().any(|b| b.name() == *name && b.learned());
            let buffer = captured(name, array, learned)?;
            plan = plan.rebind(&buffer)?;
            of.push(buffer);
        }
        let plan = Arc::new(plan);
        let oldest = push_bounded(&mut lock(&self.bound), MOST_BOUND, (of, plan.clone()));
        drop(oldest);
        Ok(Bound::Other(plan))
    }
}
