//! Captured indices outside their axis, pages and offsets that are none: how checked kernels tell of
//! them.

use std::time::Duration;

use super::call::Offsets;
use crate::compile::codegen::ModsSource;
use crate::compile::params::Address;
use crate::error::{CudaError, CudaErrorKind};
use foveate_gpu::Queue;
use foveate_gpu::driver::Allocation;

/// What stands in place of a captured buffer's number for the table of paged keys.
const PAGE_TABLE: i32 = -1;

/// The same for offsets of queries; those of keys are the other thing that sequences are made from.
const OFFSETS_Q: i32 = -2;

/// Where a checked kernel notes the first index outside its axis that it meets, as `report_index`
/// in `mods.cuh` does. Without checks there is none.
pub(super) struct Report(Option<Allocation>);

impl Report {
    pub fn new(queue: &Queue, checked: bool) -> Result<Self, CudaError> {
        if !checked {
            return Ok(Self(None));
        }
        let allocation = queue.pool().take(16)?;
        allocation.fill(0)?;
        Ok(Self(Some(allocation)))
    }

    pub fn address(&self) -> Address {
        self.0.as_ref().map_or(0, Allocation::address)
    }

    /// Waits for the kernels, at most `limit`; the four numbers that they left.
    fn numbers(self, limit: Duration) -> Result<Option<[i32; 4]>, CudaError> {
        let Some(allocation) = self.0 else { return Ok(None) };
        let mut noted = [0; 16];
        allocation.read(&mut noted, limit)?;
        let number = |i: usize| i32::from_le_bytes([0, 1, 2, 3].map(|b| noted[4 * i + b]));
        Ok(Some([0, 1, 2, 3].map(number)))
    }

    /// Waits for the kernel that reads offsets, at most `limit`, and says which it had to move.
    pub fn moved(self, limit: Duration, offsets: &Offsets) -> Result<Option<String>, CudaError> {
        let Some([1, which, index, offset]) = self.numbers(limit)? else { return Ok(None) };
        let (of, at) = if which == OFFSETS_Q { ("cu_seqlens_q", 0) } else { ("cu_seqlens_k", 1) };
        let (rows, longest) = (offsets.rows[at], offsets.longest[at]);
        Ok(Some(format!(
            "{of}: offset {index} is {offset}, {}",
            match offset {
                ..0 => "below 0".to_owned(),
                _ if offset as usize > rows => format!("past the {rows} packed rows"),
                _ =>
                    format!("below the one before it, or more than the longest {longest} after it"),
            }
        )))
    }

    /// Waits for the kernels, at most `limit`, and says what they noted.
    pub fn noted(self, limit: Duration, mods: &ModsSource) -> Result<Option<String>, CudaError> {
        let Some(noted) = self.numbers(limit)? else { return Ok(None) };
        if let [1, PAGE_TABLE, b, page] = noted {
            return Ok(Some(format!(
                "the page table of batch entry {b} has page {page}, which k and v do not have"
            )));
        }
        let outside = mods.out_of_range(noted);
        Ok(outside.map(|outside| outside.to_string()))
    }

    /// The same as an error for a pass whose schedule or block lists met `before`.
    pub fn read(
        self,
        limit: Duration,
        before: Option<String>,
        mods: &ModsSource,
    ) -> Result<(), CudaError> {
        let checked = self.0.is_some();
        let noted = self.noted(limit, mods)?.or(before);
        match noted.filter(|_| checked) {
            None => Ok(()),
            Some(reason) => Err(CudaErrorKind::OutOfRange { reason }.into()),
        }
    }
}
