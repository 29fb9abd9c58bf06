//! Passes that a device records once and queues again, for batches of other contents.

use super::{Array, Blocks};
use crate::error::NnError;

/// Whether passes are recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recording {
    /// They are.
    On,
    /// They are queued block by block: why, in words that follow "since".
    Off(String),
}

/// All that decides which work a pass over a batch queues, and with which addresses and numbers: a pass of
/// an equal identity queues the same work, whatever its batch contains.
pub struct PassIdentity<'a, B: Blocks> {
    /// What is run and where its arrays lie, as numbers.
    numbers: Vec<u64>,
    /// Where batches of its size lie, and what they share with others.
    pub batch: &'a B::Batch,
    /// What attention runs, bound to the batch.
    pub plans: &'a [B::Plan],
}

/// The blocks of a pass, which adds to totals.
pub type PassWork<'a, B> =
    dyn FnMut(&mut B, &mut <B as Blocks>::Totals) -> Result<(), NnError> + 'a;

impl<'a, B: Blocks> PassIdentity<'a, B> {
    /// Of a pass over `batch` that all else which decides its work is in `numbers` and `plans` of.
    pub fn new(numbers: Vec<u64>, batch: &'a B::Batch, plans: &'a [B::Plan]) -> Self {
        Self { numbers, batch, plans }
    }

    /// What is run and where its arrays lie, as numbers: equal for the same.
    pub fn numbers(&self) -> &[u64] {
        &self.numbers
    }
}

/// An array in the numbers of an identity.
pub(crate) fn numbers_of(array: &impl Array) -> [u64; 2] {
    [array.address(), array.elems() as u64]
}
