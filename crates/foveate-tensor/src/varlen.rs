//! Sequences of different lengths packed one after another.

use crate::error::{TensorError, TensorErrorKind};

/// Offsets of packed sequences: sequence `b` owns rows `cu_q[b]..cu_q[b + 1]` of the packed
/// queries and `cu_k[b]..cu_k[b + 1]` of the packed keys. Sequences may be empty and rows past
/// the last offset belong to none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Varlen<'a> {
    cu_q: &'a [i32],
    cu_k: &'a [i32],
}

impl<'a> Varlen<'a> {
    /// Checks that both start at 0 or later, never decrease, end within the packed lengths and
    /// name the same number of sequences.
    ///
    /// # Errors
    /// Names the first offset that is wrong.
    pub fn new(
        cu_q: &'a [i32],
        cu_k: &'a [i32],
        packed_q: usize,
        packed_k: usize,
    ) -> Result<Self, TensorError> {
        check("cu_seqlens_q", cu_q, packed_q)?;
        check("cu_seqlens_k", cu_k, packed_k)?;
        if cu_q.len() != cu_k.len() {
            let reason = format!(
                "{} offsets, but cu_seqlens_q has {}; both need one more than there are sequences",
                cu_k.len(),
                cu_q.len()
            );
            return Err(TensorErrorKind::Offsets { of: "cu_seqlens_k", reason }.into());
        }
        Ok(Self { cu_q, cu_k })
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.cu_q.len() - 1
    }

    /// Rows of sequence `b` in the packed queries.
    pub fn q_rows(&self, b: usize) -> std::ops::Range<usize> {
        self.cu_q[b] as usize..self.cu_q[b + 1] as usize
    }

    /// Rows of sequence `b` in the packed keys and values.
    pub fn k_rows(&self, b: usize) -> std::ops::Range<usize> {
        self.cu_k[b] as usize..self.cu_k[b + 1] as usize
    }
}

fn check(of: &'static str, offsets: &[i32], packed: usize) -> Result<(), TensorError> {
    let fail = |reason| Err(TensorErrorKind::Offsets { of, reason }.into());
    let (Some(&first), Some(&last)) = (offsets.first(), offsets.last()) else {
        return fail("is empty; it needs one more offset than there are sequences".to_owned());
    };
    if first < 0 {
        return fail(format!("offset 0 is {first}, below 0"));
    }
    if let Some(i) = offsets.windows(2).position(|w| w[1] < w[0]) {
        return fail(format!(
            "offset {} is {}, below offset {i}, which is {}; offsets never decrease",
            i + 1,
            offsets[i + 1],
            offsets[i]
        ));
    }
    if last as usize > packed {
        return fail(format!("the last offset is {last}, past the {packed} packed rows"));
    }
    Ok(())
}
