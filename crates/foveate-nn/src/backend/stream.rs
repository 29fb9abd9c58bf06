//! The residual stream, whose tokens are on several ranks of `tensor` between products.

use std::ops::Range;

use super::{Array, Blocks, LinearShape, Part};
use crate::error::NnError;
use crate::tensor::{Holders, StreamCut};

/// A product of the stream and this rank's part of a weight: [`Blocks::linear`], or
/// [`Blocks::linear_backward_input`].
#[derive(Debug)]
pub struct StreamProduct<'a, A> {
    /// Of all tokens.
    pub shape: LinearShape,
    /// The weight.
    pub weight: Part<'a, A>,
    /// What is added for every token, forward.
    pub bias: Option<Part<'a, A>>,
    /// Whether it is that of the backward pass.
    pub backward: bool,
}

impl<A: Array> StreamProduct<'_, A> {
    /// Columns of what it reads and of what it writes.
    pub fn widths(&self) -> [usize; 2] {
        let LinearShape { inputs, outputs, .. } = self.shape;
        if self.backward { [outputs, inputs] } else { [inputs, outputs] }
    }

    /// It, of all tokens.
    ///
    /// # Errors
    /// When the device fails.
    pub fn run<B: Blocks<Array = A>>(
        &self,
        blocks: &mut B,
        from: &A,
        to: &mut A,
    ) -> Result<(), NnError> {
        let (shape, weight) = (self.shape, self.weight.again());
        if self.backward {
            return blocks.linear_backward_input(shape, from, weight, to);
        }
        blocks.linear(
            shape,
            Part::whole(from),
            weight,
            self.bias.as_ref().map(Part::again),
            None,
            to,
        )
    }
}

/// What moves the stream between the ranks of `tensor`. All of them make the same calls in the same order.
/// What is written is there for the blocks that are called next.
pub trait StreamTransfers<B: Blocks>: Send {
    /// Begins to bring `own`, this rank's tokens of each row, and those of all other ranks into `whole`. Both
    /// stay as they are until [`StreamTransfers::gathered`].
    ///
    /// # Errors
    /// When the ranks cannot go on, or the device fails.
    fn gather(
        &mut self,
        blocks: &mut B,
        cut: StreamCut,
        own: &B::Array,
        whole: &mut B::Array,
    ) -> Result<(), NnError>;

    /// Waits for what [`StreamTransfers::gather`] began; nothing else begins between the two.
    ///
    /// # Errors
    /// Those of [`StreamTransfers::gather`].
    fn gathered(&mut self, blocks: &mut B) -> Result<(), NnError>;

    /// [`StreamTransfers::gather`], and `product` of it; the product of some tokens may run while others come.
    ///
    /// # Errors
    /// Those of [`StreamTransfers::gather`].
    fn gather_and_multiply(
        &mut self,
        blocks: &mut B,
        cut: StreamCut,
        own: &B::Array,
        whole: &mut B::Array,
        product: &StreamProduct<'_, B::Array>,
        to: &mut B::Array,
    ) -> Result<(), NnError> {
        self.gather(blocks, cut, own, whole)?;
        self.gathered(blocks)?;
        product.run(blocks, whole, to)
    }

    /// [`StreamTransfers::scatter`] of `terms` which are the `product` of `from`; those of some tokens may be on
    /// their way while others are computed.
    ///
    /// # Errors
    /// Those of [`StreamTransfers::gather`].
    fn multiply_and_scatter(
        &mut self,
        blocks: &mut B,
        cut: StreamCut,
        product: &StreamProduct<'_, B::Array>,
        from: &B::Array,
        terms: &mut B::Array,
        add: Option<&B::Array>,
        own: &mut B::Array,
    ) -> Result<(), NnError> {
        product.run(blocks, from, terms)?;
        self.scatter(blocks, cut, terms, add, own)
    }

    /// The sum over ranks of `terms`, which are of all tokens, and behind them of `add`, for this rank's
    /// tokens of each row. It is made in order of rank.
    ///
    /// # Errors
    /// Those of [`StreamTransfers::gather`].
    fn scatter(
        &mut self,
        blocks: &mut B,
        cut: StreamCut,
        terms: &B::Array,
        add: Option<&B::Array>,
        own: &mut B::Array,
    ) -> Result<(), NnError>;

    /// Sums the elements `places` of gradients over the ranks that hold the same parameters, in order of rank.
    ///
    /// # Errors
    /// Those of [`StreamTransfers::gather`].
    fn sum_copies(
        &mut self,
        blocks: &mut B,
        among: Holders,
        gradients: &mut B::Array,
        places: &[Range<usize>],
    ) -> Result<(), NnError>;
}

/// The ids of the vocabulary that a rank has, and what brings together what depends on all of them.
pub struct VocabularyPart<'a, B: Blocks> {
    /// The rank's first id.
    pub first: usize,
    /// The most ids that a rank has; the others have one less.
    pub most: usize,
    /// The rank.
    pub part: usize,
    /// Ranks.
    pub parts: usize,
    /// To the ranks that have the others.
    pub transfers: &'a mut dyn StreamTransfers<B>,
}

impl<B: Blocks> VocabularyPart<'_, B> {
    /// `width` numbers of each of `tokens` tokens of this rank, and those of all ranks in order of rank,
    /// `[parts, tokens, width]`.
    ///
    /// # Errors
    /// Those of [`StreamTransfers::gather`].
    pub fn all(
        &mut self,
        blocks: &mut B,
        [tokens, width]: [usize; 2],
        own: &B::Array,
        all: &mut B::Array,
    ) -> Result<(), NnError> {
        let Self { part, parts, .. } = *self;
        let cut = StreamCut { rows: 1, len: parts * tokens, width, parts, part };
        self.transfers.gather(blocks, cut, own, all)?;
        self.transfers.gathered(blocks)
    }
}
