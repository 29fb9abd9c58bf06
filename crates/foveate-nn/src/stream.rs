//! The residual stream between products, whose tokens are on several ranks of `tensor`: gathered before
//! products with weights that are cut by rows, scattered behind those with weights that are cut by columns. It
//! goes through host memory, and a pass waits for it.

use std::ops::Range;

use crate::backend::{Array, Blocks, Part, PartMut};
use crate::error::NnError;
use crate::parameters::ParameterLayout;
use crate::share::Share;
use crate::tensor::{Copied, Copies, TensorPart, TensorTransfers, even};

/// The stream between products, in a pass.
pub(crate) struct Stream<'a> {
    pub part: &'a TensorPart,
    /// Rows of the batch and tokens of a row.
    pub shape: [usize; 2],
    /// None where nothing is computed.
    pub transfers: Option<&'a mut (dyn TensorTransfers + 'static)>,
}

impl Stream<'_> {
    pub fn again(&mut self) -> Stream<'_> {
        Stream { transfers: self.transfers.as_deref_mut(), ..*self }
    }

    /// `own`, which is of this rank's tokens of every row, into `whole`, with that of all ranks.
    pub fn gather<B: Blocks>(
        &mut self,
        blocks: &mut B,
        own: &B::Array,
        width: usize,
        whole: &mut B::Array,
    ) -> Result<(), NnError> {
        let [rows, len] = self.shape;
        let Some(transfers) = &mut self.transfers else { return Ok(()) };
        let mut values = vec![0.0; own.elems()];
        blocks.download(Part::whole(own), &mut values)?;
        for (part, values) in transfers.all_gather(&values)?.iter().enumerate() {
            let tokens = even(len, part, self.part.parts);
            for row in 0..rows {
                let start = (row * len + tokens.start) * width;
                let (elems, place) = (tokens.len() * width, start..start + tokens.len() * width);
                let values = &values[row * elems..(row + 1) * elems];
                blocks.fill(PartMut { array: whole, place, accumulate: false }, values)?;
            }
        }
        Ok(())
    }

    /// The sum over ranks of `partial`, which is of all tokens, into `own`, of this rank's tokens.
    pub fn scatter<B: Blocks>(
        &mut self,
        blocks: &mut B,
        partial: &B::Array,
        width: usize,
        own: &mut B::Array,
    ) -> Result<(), NnError> {
        let ([rows, len], parts) = (self.shape, self.part.parts);
        let Some(transfers) = &mut self.transfers else { return Ok(()) };
        let mut values = vec![0.0; partial.elems()];
        let mut rest = &mut values[..];
        let mut lengths = vec![0; parts];
        for (part, length) in lengths.iter_mut().enumerate() {
            let tokens = even(len, part, parts);
            for row in 0..rows {
                let (into, behind) = rest.split_at_mut(tokens.len() * width);
                let start = (row * len + tokens.start) * width;
                let place = start..start + into.len();
                blocks.download(Part { array: partial, place }, into)?;
                (rest, *length) = (behind, *length + into.len());
            }
        }
        let sums = transfers.reduce_scatter(&values, &lengths)?;
        let place = 0..sums.len();
        blocks.fill(PartMut { array: own, place, accumulate: false }, &sums)
    }

    /// Sums the gradients of `copied` elements, which lie in `array` from where `first` says.
    pub fn sum_copies<B: Blocks>(
        &mut self,
        blocks: &mut B,
        copied: &[&Copied],
        array: &mut B::Array,
        first: usize,
    ) -> Result<(), NnError> {
        let Some(transfers) = &mut self.transfers else { return Ok(()) };
        for among in [Copies::All, Copies::KvHeads] {
            let places: Vec<Range<usize>> = copied
                .iter()
                .filter(|copied| copied.among == among)
                .map(|copied| copied.place.start - first..copied.place.end - first)
                .collect();
            let mut values = vec![0.0; places.iter().map(Range::len).sum()];
            if values.is_empty() {
                continue;
            }
            let mut rest = &mut values[..];
            for place in &places {
                let (into, behind) = rest.split_at_mut(place.len());
                blocks.download(Part { array: &*array, place: place.clone() }, into)?;
                rest = behind;
            }
            transfers.sum_copies(among, &mut values)?;
            let mut rest = &values[..];
            for place in places {
                let (from, behind) = rest.split_at(place.len());
                blocks.fill(PartMut { array, place, accumulate: false }, from)?;
                rest = behind;
            }
        }
        Ok(())
    }
}

/// The sum of squares of those of `gradients` that another rank of `tensor` counts in their norm. They are
/// of a share's trained elements, from `first` on in its arrays.
pub(crate) fn counted_elsewhere<B: Blocks>(
    blocks: &mut B,
    layout: &ParameterLayout,
    share: &Share,
    gradients: &B::Array,
    first: usize,
) -> Result<f64, NnError> {
    let (mut sum, end) = (0.0, first + gradients.elems());
    let copied = layout.copied().iter().filter(|copied| !copied.first);
    for copied in copied.filter(|copied| layout.trains(&copied.place)) {
        for (piece, own) in share.pieces(&copied.place) {
            let (start, stop) = (own.max(first), (own + piece.len()).min(end));
            if start < stop {
                let mut values = vec![0.0; stop - start];
                let part = Part { array: gradients, place: start - first..stop - first };
                blocks.download(part, &mut values)?;
                sum += values.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>();
            }
        }
    }
    Ok(sum)
}
