//! How the sequences of a call lie in its operands.

use foveate_tensor::Varlen;

use crate::{Dims, Operands, Pages, Sequence};

/// How the sequences of a call lie in its operands, as far as sizes do not say it.
#[derive(Clone, Copy, Debug, Default)]
pub enum Arrangement<'a> {
    /// One sequence for each batch entry, all of them equally long.
    #[default]
    Dense,
    /// One after the other in one batch entry.
    Packed(Varlen<'a>),
    /// One for each batch entry, its keys in pages.
    Paged {
        /// Number of keys of each batch entry; a negative one is none.
        lengths: &'a [i32],
        /// Keys of a page.
        page_size: usize,
    },
}

impl<'a> Arrangement<'a> {
    /// That of a call with these offsets or pages of `page_size` keys.
    pub fn new(varlen: Option<Varlen<'a>>, pages: Option<Pages<'a>>, page_size: usize) -> Self {
        match (varlen, pages) {
            (Some(varlen), _) => Self::Packed(varlen),
            (None, Some(pages)) => Self::Paged { lengths: pages.lengths(), page_size },
            (None, None) => Self::Dense,
        }
    }

    /// True for keys in pages.
    pub fn paged(&self) -> bool {
        self.page_size().is_some()
    }

    /// Keys of a page, for keys in pages.
    pub fn page_size(&self) -> Option<usize> {
        match *self {
            Self::Paged { page_size, .. } => Some(page_size),
            Self::Dense | Self::Packed(_) => None,
        }
    }
}

impl Dims {
    /// The sizes of a call that is like this one but for its arrangement. Varlen sizes whose
    /// offsets are not given are those of no sequences.
    pub fn arranged(mut self, arrangement: Arrangement<'_>) -> Self {
        match arrangement {
            Arrangement::Packed(varlen) if self.packed => self.batch = varlen.sequences(),
            Arrangement::Paged { lengths, .. } if !self.packed => {
                self.batch = lengths.len();
                self.len_k = lengths.iter().map(|&len| len.max(0)).max().unwrap_or(0) as usize;
                self.shared_kv = false;
            }
            _ if self.packed => self.batch = 0,
            _ => {}
        }
        self
    }

    /// The independent problems inside operands of these sizes, arranged so, in order of `b`.
    pub fn sequences_of(&self, arrangement: Arrangement<'_>) -> Vec<Sequence> {
        match arrangement {
            Arrangement::Dense => self.sequences(None),
            Arrangement::Packed(varlen) => self.sequences(Some(varlen).filter(|_| self.packed)),
            Arrangement::Paged { lengths, .. } => {
                let mut sequences = self.sequences(None);
                Pages::limit(&mut sequences, lengths);
                sequences
            }
        }
    }
}

impl<'a> Operands<'a> {
    /// How their sequences lie.
    pub fn arrangement(&self) -> Arrangement<'a> {
        Arrangement::new(self.varlen, self.pages, self.k.shape()[2])
    }

    /// The independent problems inside, of sizes `dims`, in order of `b`.
    pub fn sequences(&self, dims: &Dims) -> Vec<Sequence> {
        dims.sequences_of(self.arrangement())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: Dims = Dims {
        batch: 2,
        heads_q: 4,
        heads_kv: 2,
        len_q: 3,
        len_k: 9,
        dim: 8,
        dim_v: 8,
        shared_kv: false,
        packed: false,
    };

    #[test]
    fn each_entry_of_a_paged_batch_has_its_own_length() {
        let lengths = [5, 0, 7];
        let paged = Arrangement::Paged { lengths: &lengths, page_size: 4 };
        let dims = DIMS.arranged(paged);
        assert_eq!((dims.batch, dims.len_k), (3, 7));
        let found: Vec<_> = dims.sequences_of(paged).iter().map(|s| (s.q_len, s.k_len)).collect();
        assert_eq!(found, [(3, 5), (3, 0), (3, 7)]);
        assert_eq!(DIMS.arranged(Arrangement::Dense), DIMS);
    }

    #[test]
    fn packed_sizes_have_the_sequences_of_their_offsets_or_none() {
        let packed = Dims { packed: true, len_q: 9, ..DIMS };
        let varlen = Varlen::new(&[0, 2, 9], &[0, 4, 9], 9, 9).unwrap();
        let dims = packed.arranged(Arrangement::Packed(varlen));
        let found = dims.sequences_of(Arrangement::Packed(varlen));
        assert_eq!(found.iter().map(|s| (s.q_len, s.k_len)).collect::<Vec<_>>(), [(2, 4), (7, 5)]);
        assert_eq!(packed.arranged(Arrangement::Dense).batch, 0);
    }
}
