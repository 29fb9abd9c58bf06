//! Losses of a model on documents, as they are.

use std::sync::Arc;

use foveate_nn::{Blocks, Gradients, Model};

use super::batch;
use crate::context::{ContextBatch, RunContext};
use crate::corpus::{Corpus, TokenCounts};
use crate::error::TrainError;
use crate::loader::{Loader, Wanted};
use crate::pack::{Cursor, PackOptions, Packed, Packer};
use crate::pairs::PairCounter;
use crate::ranks::Ranks;

/// A loss summed over tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TotalLoss {
    /// Sum over labelled tokens, in nats.
    pub nats: f64,
    /// Labelled tokens.
    pub tokens: usize,
}

impl TotalLoss {
    /// Mean loss of a token in nats; 0 without tokens.
    pub fn mean(&self) -> f64 {
        self.nats / self.tokens.max(1) as f64
    }
}

/// The loss of `model` on `documents`, in order, over at most `rows` packed rows, which are read and packed on a
/// thread. `watch` is told before each batch which share of this is done, from 0 to 1, and says whether to
/// go on; none where it did not.
///
/// # Errors
/// When a document cannot be read or does not fit the model, or a loss is not finite, naming the
/// document.
pub fn held_out_loss<B: Blocks>(
    model: &Model<B>,
    corpus: &Arc<Corpus>,
    documents: &[usize],
    options: PackOptions,
    batch_rows: usize,
    rows: usize,
    watch: &mut dyn FnMut(f64) -> bool,
) -> Result<Option<TotalLoss>, TrainError> {
    let held_out = HeldOut {
        ranks: Ranks::one(),
        context: None,
        model,
        between: None,
        corpus,
        documents,
        packing: options,
        counts: None,
        batch_rows,
    };
    held_out.loss(rows, watch)
}

/// Documents that the ranks look at together, each at a part of every batch.
pub(super) struct HeldOut<'a, B: Blocks> {
    pub ranks: Ranks<'a>,
    /// Where several ranks have the tokens of a row.
    pub context: Option<&'a mut RunContext>,
    pub model: &'a Model<B>,
    /// Those of [`Model::loss_over`].
    pub between: Option<&'a mut Gradients<B::Array>>,
    pub corpus: &'a Arc<Corpus>,
    pub documents: &'a [usize],
    pub packing: PackOptions,
    /// Where they are known, no rank reads the rows of others.
    pub counts: Option<Arc<TokenCounts>>,
    pub batch_rows: usize,
}

impl<B: Blocks> HeldOut<'_, B> {
    /// [`held_out_loss`] of all ranks, which end where one of them does not go on.
    pub fn loss(
        self,
        rows: usize,
        watch: &mut dyn FnMut(f64) -> bool,
    ) -> Result<Option<TotalLoss>, TrainError> {
        let Self { ranks, mut context, model, mut between, corpus, packing, .. } = self;
        let wanted = Wanted {
            documents: self.documents.to_vec(),
            packing,
            rows: self.batch_rows,
            own: ranks.row_part(),
            of_pass: Some(rows),
            counts: self.counts,
            planner: context.as_ref().map(|context| context.planner()),
            pairs: PairCounter::for_planners(model),
            sorted: false,
        };
        let mut total = TotalLoss::default();
        let Some(mut loader) = Loader::start(corpus, wanted, Cursor::default())? else {
            // There is no document.
            return Ok(Some(total));
        };
        let (mut left, mut passes) = (rows, 0.0f64);
        while left > 0 {
            let done = passes.max((rows - left) as f64 / rows as f64);
            if ranks.all(&[u8::from(!watch(done))])?.concat().contains(&1) {
                return Ok(None);
            }
            let Some(loaded) = loader.take_of_pass()? else { break };
            left -= loaded.rows;
            passes = loaded.passes;
            let attention = match (&mut context, loaded.context) {
                (Some(context), Some(part)) => Some(context.take(ranks, part)?),
                _ => None,
            };
            let packed = loaded.own;
            let (packed, attention) = match packed.rows {
                // Other ranks gather the parameters of this one.
                0 if model.is_cut() => (Packed::empty_row(packing.len), None),
                0 => continue,
                _ => (packed, attention),
            };
            let here = attention.is_none() && !model.is_cut();
            let attention = attention.map(ContextBatch::attention);
            let loss = model.loss_over(&batch(&packed), attention, between.as_deref_mut())?;
            if !loss.sum_nats.is_finite() {
                // Which document it is of, where this rank can say so without the others.
                if here {
                    let between = between.as_deref_mut();
                    of_tokens(model, between, corpus, &packed, |_| Ok::<_, TrainError>(()))?;
                }
                return Err(TrainError::model(format!("the loss is {}", loss.sum_nats)));
            }
            if ranks.counts_tokens() {
                total.nats += loss.sum_nats;
                total.tokens += loss.tokens;
            }
        }
        let [nats, tokens] = ranks.sum([total.nats, total.tokens as f64])?;
        Ok(Some(TotalLoss { nats, tokens: tokens as usize }))
    }
}

/// A token with a target, and what the model thought of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLoss {
    /// The document, an index into the corpus.
    pub document: usize,
    /// Which of the document's tokens, counted from 0, those that open a text included.
    pub token: usize,
    /// Its id.
    pub id: u32,
    /// Its loss.
    pub nats: f64,
}

/// The losses of all labelled tokens of `model` on `documents`, in their order, given to `tell` as
/// they come.
///
/// # Errors
/// Those of [`held_out_loss`], or what `tell` returns.
pub fn token_losses<B: Blocks, E: From<TrainError>>(
    model: &Model<B>,
    corpus: &Corpus,
    documents: &[usize],
    options: PackOptions,
    batch_rows: usize,
    mut tell: impl FnMut(TokenLoss) -> Result<(), E>,
) -> Result<TotalLoss, E> {
    let mut packer = Packer::new(corpus, documents.to_vec(), options, Cursor::default());
    let mut total = TotalLoss::default();
    let mut pairs = PairCounter::for_planners(model);
    while let Some(mut packed) = packer.batch_of_pass(batch_rows, 0)? {
        if let Some(pairs) = &mut pairs {
            pairs.count(&mut packed)?;
        }
        of_tokens(model, None, corpus, &packed, |token| {
            total.nats += token.nats;
            total.tokens += 1;
            tell(token)
        })?;
    }
    Ok(total)
}

/// Gives the losses of the labelled tokens of a batch to `tell`, in order.
fn of_tokens<B: Blocks, E: From<TrainError>>(
    model: &Model<B>,
    between: Option<&mut Gradients<B::Array>>,
    corpus: &Corpus,
    packed: &Packed,
    mut tell: impl FnMut(TokenLoss) -> Result<(), E>,
) -> Result<(), E> {
    let losses = model.token_losses(&batch(packed), between).map_err(TrainError::model)?;
    for piece in &packed.pieces {
        for i in 0..piece.len {
            let cell = piece.row * packed.len + piece.column + i;
            let Ok(id) = u32::try_from(packed.labels[cell]) else { continue };
            let (document, token, nats) = (piece.document, piece.token + i + 1, losses[cell]);
            if !nats.is_finite() {
                let (file, line) = corpus.place(document);
                let message = format!(
                    "the loss of token {token} is {nats}: the weights are finite, but so large \
                     that numbers computed from them are not; take an earlier checkpoint"
                );
                return Err(TrainError::data(file, line, message).into());
            }
            tell(TokenLoss { document, token, id, nats })?;
        }
    }
    Ok(())
}
