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

    /// The offsets of queries, one more than there are sequences.
    pub fn cu_q(&self) -> &'a [i32] {
        self.cu_q
    }

    /// The offsets of keys and values.
    pub fn cu_k(&self) -> &'a [i32] {
        self.cu_k
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

/// Offsets that own their numbers, made from lengths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    cu_q: Vec<i32>,
    cu_k: Vec<i32>,
}

impl Packing {
    /// Sequences of these lengths, one after another from row 0.
    ///
    /// # Errors
    /// When the numbers of lengths differ or their sum is past `i32::MAX`.
    pub fn new(q: &[usize], k: &[usize]) -> Result<Self, TensorError> {
        if q.len() != k.len() {
            let reason = format!("{} lengths, but there are {} of queries", k.len(), q.len());
            return Err(TensorErrorKind::Offsets { of: "cu_seqlens_k", reason }.into());
        }
        Ok(Self { cu_q: offsets("cu_seqlens_q", q)?, cu_k: offsets("cu_seqlens_k", k)? })
    }

    /// The offsets for operands with so many packed rows; rows past the last offset are unused.
    ///
    /// # Errors
    /// When the sequences need more rows.
    pub fn varlen(&self, packed_q: usize, packed_k: usize) -> Result<Varlen<'_>, TensorError> {
        Varlen::new(&self.cu_q, &self.cu_k, packed_q, packed_k)
    }

    /// Rows of queries that belong to a sequence.
    pub fn rows_q(&self) -> usize {
        self.cu_q[self.cu_q.len() - 1] as usize
    }

    /// Rows of keys that belong to a sequence.
    pub fn rows_k(&self) -> usize {
        self.cu_k[self.cu_k.len() - 1] as usize
    }
}

fn offsets(of: &'static str, lengths: &[usize]) -> Result<Vec<i32>, TensorError> {
    let mut offsets = vec![0];
    let mut end = 0i32;
    for (i, &n) in lengths.iter().enumerate() {
        let next = i32::try_from(n).ok().and_then(|n| end.checked_add(n));
        end = next.ok_or_else(|| {
            let reason = format!("sequence {i} of length {n} ends past {}", i32::MAX);
            TensorError::from(TensorErrorKind::Offsets { of, reason })
        })?;
        offsets.push(end);
    }
    Ok(offsets)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_become_offsets_and_the_rest_is_an_unused_tail() {
        let packing = Packing::new(&[3, 0, 2], &[1, 4, 0]).unwrap();
        let varlen = packing.varlen(7, 5).unwrap();
        assert_eq!(varlen.sequences(), 3);
        assert_eq!((varlen.q_rows(1), varlen.k_rows(1)), (3..3, 1..5));
        assert_eq!((packing.rows_q(), packing.rows_k()), (5, 5));
        assert!(packing.varlen(4, 5).is_err());
    }

    #[test]
    fn wrong_offsets_are_refused_by_name_index_and_value() {
        let says = |q: &[i32], k: &[i32]| Varlen::new(q, k, 9, 9).unwrap_err().to_string();
        assert!(says(&[], &[0]).contains("cu_seqlens_q: is empty"));
        assert!(says(&[-1, 2], &[0, 2]).contains("offset 0 is -1"));
        assert!(says(&[0, 5, 4], &[0, 1, 2]).contains("offset 2 is 4, below offset 1, which is 5"));
        assert!(
            says(&[0, 2], &[0, 10]).contains("cu_seqlens_k: the last offset is 10, past the 9")
        );
        assert!(says(&[0, 2], &[0, 1, 2]).contains("3 offsets, but cu_seqlens_q has 2"));
        assert!(Packing::new(&[1], &[1, 2]).is_err());
        assert!(Packing::new(&[usize::MAX], &[1]).is_err());
    }
}
