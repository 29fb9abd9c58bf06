//! What a step is given and what it reports.

use crate::config::ModelConfig;
use crate::error::NnError;

/// The label of a token that has no loss.
pub const IGNORE: i32 = -100;

/// Packed sequences: `rows` rows of `len` tokens each, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Tokens of a row.
    pub len: usize,
    /// Token ids, `[rows, len]`.
    pub tokens: &'a [u32],
    /// The token each one has to predict, or [`IGNORE`], `[rows, len]`.
    pub labels: &'a [i32],
    /// The document each one belongs to, `[rows, len]`.
    pub documents: &'a [i32],
    /// Its position in its document, which RoPE rotates by, `[rows, len]`.
    pub positions: &'a [i32],
    /// Pairs of query and key that the mask of each attention program lets through, in the mean of the
    /// heads ([`crate::AttentionProgram::live_pairs`]); empty where nobody has counted them. Planners
    /// that do not look at the documents are told how many keys a query sees. They change no result.
    pub live_pairs: &'a [f64],
    /// The order of the tokens that the embedding's gradient is summed in ([`token_order`]); empty where nobody has
    /// sorted them, and then whoever uploads the batch does. It changes no result.
    pub order: &'a [u32],
}

/// Indices of `tokens`, of which there are fewer than 2³¹, sorted by id and then by index.
pub fn token_order(tokens: &[u32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..tokens.len() as u32).collect();
    order.sort_by_key(|&t| tokens[t as usize]);
    order
}

/// Seconds that the blocks of a step took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockSeconds {
    /// Attention, forward and backward.
    pub attention: f64,
    /// Products with the weights of the layers, forward and backward.
    pub linear: f64,
    /// The output projection and the loss, forward and backward.
    pub loss: f64,
    /// The norm and the update.
    pub optimizer: f64,
}

/// The loss of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSum {
    /// Cross-entropy summed over all tokens that have a label, in nats.
    pub sum_nats: f64,
    /// Tokens that have a label.
    pub tokens: usize,
    /// Pairs of query and key that the mask lets through, in the mean of the heads; `None` where no
    /// gradient was asked for.
    pub live_pairs: Option<f64>,
    /// What blocks took; none where the device took no times of it.
    pub blocks: Option<BlockSeconds>,
    /// Time of the whole step, in seconds.
    pub seconds: f64,
}

/// A batch whose loss and gradients are queued.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Queued {
    /// Tokens that have a label.
    pub tokens: usize,
    /// Pairs of query and key that the mask lets through, in the mean of heads and layers; `None` where
    /// neither the device nor the batch has counted them.
    pub live_pairs: Option<f64>,
}

impl LossSum {
    /// Mean loss of a token, in nats; 0 when no token has a label.
    pub fn mean_nats(&self) -> f64 {
        self.sum_nats / self.tokens.max(1) as f64
    }
}

impl Batch<'_> {
    /// Tokens in all rows.
    pub fn tokens_total(&self) -> usize {
        self.rows * self.len
    }

    /// Refuses an order of other tokens.
    fn check_order(&self) -> Result<(), NnError> {
        let key = |place: u32| Some((*self.tokens.get(place as usize)?, place));
        let follow = |pair: &[u32]| matches!((key(pair[0]), key(pair[1])), (Some(one), Some(next)) if one < next);
        let is_order = match self.order {
            [] => true,
            // As many places as tokens, each once, since no two of them are the same.
            order => {
                order.len() == self.tokens.len()
                    && order.first().is_some_and(|&place| key(place).is_some())
                    && order.windows(2).all(follow)
            }
        };
        match is_order {
            true => Ok(()),
            false => Err(NnError::batch("order is not that of the batch's tokens".to_owned())),
        }
    }

    /// Checks that the batch is whole and fits `config`.
    ///
    /// # Errors
    /// Names the array that has the wrong length, or the first token, label or position that is
    /// out of range and where it stands.
    pub fn validate(&self, config: &ModelConfig) -> Result<(), NnError> {
        let n = self.rows.checked_mul(self.len).filter(|&n| n > 0 && i32::try_from(n).is_ok());
        let Some(n) = n else {
            let (rows, len) = (self.rows, self.len);
            return Err(NnError::batch(format!("a batch of {rows} rows of {len} tokens")));
        };
        for (name, found) in [
            ("tokens", self.tokens.len()),
            ("labels", self.labels.len()),
            ("documents", self.documents.len()),
            ("positions", self.positions.len()),
        ] {
            if found != n {
                return Err(NnError::batch(format!(
                    "{name} has {found} elements; a batch of {} rows of {} has {n}",
                    self.rows, self.len
                )));
            }
        }
        let vocab = config.vocab_size;
        let at = |i: usize| format!("at row {}, column {}", i / self.len, i % self.len);
        if let Some(i) = self.tokens.iter().position(|&t| t as usize >= vocab) {
            let token = self.tokens[i];
            return Err(NnError::batch(format!(
                "token {token} {}; the vocabulary has {vocab}",
                at(i)
            )));
        }
        let bad = |&l: &i32| l != IGNORE && !usize::try_from(l).is_ok_and(|l| l < vocab);
        if let Some(i) = self.labels.iter().position(bad) {
            let label = self.labels[i];
            return Err(NnError::batch(format!(
                "label {label} {}; labels are {IGNORE} or below the vocabulary's {vocab}",
                at(i)
            )));
        }
        self.check_order()?;
        let limit = config.max_position_embeddings;
        let bad = |&p: &i32| !usize::try_from(p).is_ok_and(|p| p < limit);
        if let Some(i) = self.positions.iter().position(bad) {
            let position = self.positions[i];
            return Err(NnError::batch(format!(
                "position {position} {}; max_position_embeddings is {limit}",
                at(i)
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_of_other_tokens_is_refused() {
        let tokens = [3, 0, 3, 1];
        let order = token_order(&tokens);
        assert_eq!(order, [1, 3, 0, 2]);
        let of = |order: &[u32]| {
            let (labels, four) = (&[0; 4][..], &[0; 4][..]);
            let (documents, positions, live_pairs) = (four, four, &[][..]);
            let (rows, len, tokens) = (1, 4, &tokens[..]);
            let batch =
                Batch { rows, len, tokens, labels, documents, positions, live_pairs, order };
            batch.check_order().map_err(|e| e.to_string())
        };
        assert_eq!((of(&[]), of(&order)), (Ok(()), Ok(())));
        for wrong in
            [&[1, 3, 2, 0][..], &[1, 3, 0], &[1, 1, 3, 0], &[3, 1, 0, 2], &[1, 3, 0, 4], &[9; 4]]
        {
            assert!(of(wrong).is_err_and(|e| e.contains("order")), "{wrong:?}");
        }
    }
}
