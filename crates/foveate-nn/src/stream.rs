//! The residual stream between products, whose tokens are on several ranks of `tensor`: gathered before
//! products with weights that are cut by rows, scattered behind those with weights that are cut by columns.

use std::ops::Range;

use crate::backend::{Blocks, PartMut, StreamProduct, StreamTransfers, VocabularyPart};
use crate::error::NnError;
use crate::parameters::ParameterLayout;
use crate::share::Share;
use crate::tensor::{Copied, Holders, StreamCut, TensorPart};

/// The stream between products, in a pass.
pub(crate) struct Stream<'a, B: Blocks> {
    pub part: &'a TensorPart,
    /// Rows of the batch and tokens of a row.
    pub shape: [usize; 2],
    /// None where nothing is computed.
    pub transfers: Option<&'a mut (dyn StreamTransfers<B> + 'static)>,
}

impl<B: Blocks> Stream<'_, B> {
    pub fn again(&mut self) -> Stream<'_, B> {
        Stream { transfers: self.transfers.as_deref_mut(), ..*self }
    }

    fn cut(&self, width: usize) -> StreamCut {
        let ([rows, len], &TensorPart { part, parts, .. }) = (self.shape, self.part);
        StreamCut { rows, len, width, parts, part }
    }

    /// [`StreamTransfers::gather`].
    pub fn gather(
        &mut self,
        blocks: &mut B,
        own: &B::Array,
        width: usize,
        whole: &mut B::Array,
    ) -> Result<(), NnError> {
        let cut = self.cut(width);
        match &mut self.transfers {
            Some(transfers) => transfers.gather(blocks, cut, own, whole),
            None => Ok(()),
        }
    }

    /// [`StreamTransfers::gathered`].
    pub fn gathered(&mut self, blocks: &mut B) -> Result<(), NnError> {
        self.transfers.as_mut().map_or(Ok(()), |transfers| transfers.gathered(blocks))
    }

    /// [`StreamTransfers::gather_and_multiply`].
    pub fn gather_and_multiply(
        &mut self,
        blocks: &mut B,
        own: &B::Array,
        whole: &mut B::Array,
        product: &StreamProduct<'_, B::Array>,
        to: &mut B::Array,
    ) -> Result<(), NnError> {
        let cut = self.cut(product.widths()[0]);
        match &mut self.transfers {
            Some(transfers) => transfers.gather_and_multiply(blocks, cut, own, whole, product, to),
            None => product.run(blocks, whole, to),
        }
    }

    /// [`StreamTransfers::multiply_and_scatter`].
    pub fn multiply_and_scatter(
        &mut self,
        blocks: &mut B,
        product: &StreamProduct<'_, B::Array>,
        from: &B::Array,
        terms: &mut B::Array,
        add: Option<&B::Array>,
        own: &mut B::Array,
    ) -> Result<(), NnError> {
        let cut = self.cut(product.widths()[1]);
        match &mut self.transfers {
            Some(transfers) => {
                transfers.multiply_and_scatter(blocks, cut, product, from, terms, add, own)
            }
            // What it would read and write.
            None => {
                product.run(blocks, from, terms)?;
                add.map_or(Ok(()), |add| blocks.add(add, own))
            }
        }
    }

    /// [`StreamTransfers::scatter`].
    pub fn scatter(
        &mut self,
        blocks: &mut B,
        terms: &B::Array,
        width: usize,
        own: &mut B::Array,
    ) -> Result<(), NnError> {
        let cut = self.cut(width);
        match &mut self.transfers {
            Some(transfers) => transfers.scatter(blocks, cut, terms, None, own),
            None => Ok(()),
        }
    }

    /// Sums the gradients of `copied` elements, which lie in `array` from where `first` says.
    pub fn sum_copies(
        &mut self,
        blocks: &mut B,
        copied: &[&Copied],
        array: &mut B::Array,
        first: usize,
    ) -> Result<(), NnError> {
        let Some(transfers) = &mut self.transfers else { return Ok(()) };
        for among in [Holders::All, Holders::KvHeads] {
            let places: Vec<Range<usize>> = copied
                .iter()
                .filter(|copied| copied.among == among && !copied.place.is_empty())
                .map(|copied| copied.place.start - first..copied.place.end - first)
                .collect();
            if !places.is_empty() {
                transfers.sum_copies(blocks, among, array, &places)?;
            }
        }
        Ok(())
    }

    /// The ids of this rank.
    pub fn vocabulary(&mut self) -> Option<VocabularyPart<'_, B>> {
        let &TensorPart { part, parts, ref vocab, most_vocab: most, .. } = self.part;
        let transfers = self.transfers.as_deref_mut()?;
        Some(VocabularyPart { first: vocab.start, most, part, parts, transfers })
    }
}

/// Clears those of `gradients` that were summed over ranks of `tensor`, but on the first of these, so that they
/// are summed with those of another batch once.
pub(crate) fn leave_to_first<B: Blocks>(
    blocks: &mut B,
    layout: &ParameterLayout,
    gradients: &mut B::Array,
) -> Result<(), NnError> {
    let copied = layout.copied().iter().filter(|copied| !copied.first);
    for Copied { place, .. } in copied.filter(|copied| layout.trains(&copied.place)) {
        let (array, place) = (&mut *gradients, place.clone());
        blocks.clear_part(PartMut { array, place, accumulate: false })?;
    }
    Ok(())
}

/// Those of a share's trained elements, of which `elems` from `first` on lie in an array, that another rank of
/// `tensor` counts in the norm of gradients: their places in the array.
pub(crate) fn counted_elsewhere(
    layout: &ParameterLayout,
    share: &Share,
    [first, elems]: [usize; 2],
) -> Vec<Range<usize>> {
    let end = first + elems;
    let copied = layout.copied().iter().filter(|copied| !copied.first);
    let copied = copied.filter(|copied| layout.trains(&copied.place));
    let here = |(piece, own): (Range<usize>, usize)| {
        let (start, stop) = (own.max(first), (own + piece.len()).min(end));
        (start < stop).then(|| start - first..stop - first)
    };
    copied.flat_map(|copied| share.pieces(&copied.place)).filter_map(here).collect()
}
