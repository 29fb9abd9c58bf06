//! Where the sequences of packed operands begin and end, known to the host or not.

use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceArray, ElementType};
use foveate_problem::Dims;
use foveate_tensor::Varlen;

use crate::error::CudaError;

/// Where the sequences of packed operands begin and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceVarlen<'a> {
    /// Offsets that the host knows.
    Host(Varlen<'a>),
    /// Offsets that it does not.
    Device(DeviceOffsets<'a>),
}

impl<'a> From<Varlen<'a>> for DeviceVarlen<'a> {
    fn from(varlen: Varlen<'a>) -> Self {
        Self::Host(varlen)
    }
}

impl<'a> From<DeviceOffsets<'a>> for DeviceVarlen<'a> {
    fn from(offsets: DeviceOffsets<'a>) -> Self {
        Self::Device(offsets)
    }
}

/// Offsets of packed sequences in device memory, `cu_seqlens`: i32, one more than there are
/// sequences.
///
/// Nobody has checked them. An offset outside the tensors, or before the one before it, is moved to
/// the nearest that is not, and what a sequence has beyond the longest is left out; a checked plan
/// reports it after the results were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceOffsets<'a> {
    /// First rows of queries.
    pub q: DeviceArray<'a>,
    /// First rows of keys and values.
    pub k: DeviceArray<'a>,
    /// At least the queries of the longest sequence. Launches are as large as this, the number of
    /// sequences and the rows of the tensors allow.
    pub longest_q: usize,
    /// At least the keys of the longest sequence.
    pub longest_k: usize,
}

impl DeviceOffsets<'_> {
    /// The sizes of packed operands, given those they would have with one sequence.
    ///
    /// # Errors
    /// When the offsets are not i32, of one axis and as many for keys as for queries, or the
    /// operands are not packed.
    pub(super) fn dims(&self, whole: &Dims) -> Result<Dims, CudaError> {
        for (name, array) in self.named() {
            if array.element != ElementType::I32 {
                return Err(CudaError::argument(format!(
                    "{name} is {}; it must be i32",
                    array.element
                )));
            }
            if array.shape.len() != 1 || array.shape[0] == 0 {
                return Err(CudaError::argument(format!(
                    "{name} has shape {:?}; it must have one axis, one longer than there are \
                     sequences",
                    array.shape
                )));
            }
        }
        let [q, k] = [self.q, self.k].map(|array| array.shape[0]);
        if q != k {
            return Err(CudaError::argument(format!(
                "cu_seqlens_k has {k} offsets, but cu_seqlens_q has {q}; both need one more than \
                 there are sequences"
            )));
        }
        if whole.batch != 1 {
            return Err(CudaError::argument(format!(
                "packed operands have batch 1 before packing, not {}",
                whole.batch
            )));
        }
        Ok(Dims { batch: q - 1, packed: true, ..*whole })
    }

    fn named(&self) -> [(&'static str, &DeviceArray<'_>); 2] {
        [("cu_seqlens_q", &self.q), ("cu_seqlens_k", &self.k)]
    }

    pub(super) fn read(&self, accesses: &mut Accesses) -> Result<(), CudaError> {
        for (name, array) in self.named() {
            accesses.read_array(name, array)?;
        }
        Ok(())
    }
}
