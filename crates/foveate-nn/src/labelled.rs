//! The tokens of a batch that have a label. Only these have a loss and a gradient behind the last norm, so the
//! head multiplies them alone where a batch leaves many out, as conversations do, of which the answers are learned.

use crate::batch::IGNORE;

/// Rows that the head multiplies are this part of a batch's tokens, or a multiple of it: products of few sizes,
/// each of which may be timed or recorded.
const PARTS: usize = 8;

/// The index that stands for none.
const NONE: u32 = u32::MAX;

/// The rows that the head multiplies for a batch: its labelled tokens in their order, and behind
/// them rows of no token, up to a multiple of an eighth of the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelledTokens {
    /// The token of each row; beyond all tokens where it has none.
    pub tokens: Vec<u32>,
    /// The label of each row, or [`IGNORE`].
    pub labels: Vec<i32>,
    /// The row of each token of the batch; beyond all rows where it has none.
    pub rows: Vec<u32>,
}

impl LabelledTokens {
    /// Of the labels of a batch; none where all of its tokens are multiplied, as they lie.
    pub fn of(labels: &[i32]) -> Option<Self> {
        let count = labels.iter().filter(|&&label| label != IGNORE).count();
        // One row at least: the gradient of a weight is written, if by zeros.
        let padded = count.max(1).next_multiple_of(labels.len().div_ceil(PARTS).max(1));
        if padded >= labels.len() {
            return None;
        }
        let (mut tokens, mut rows) = (vec![NONE; padded], vec![NONE; labels.len()]);
        let mut of_rows = vec![IGNORE; padded];
        let labelled = (0..labels.len()).filter(|&token| labels[token] != IGNORE);
        for (row, token) in labelled.enumerate() {
            (tokens[row], of_rows[row]) = (token as u32, labels[token]);
            rows[token] = row as u32;
        }
        Some(Self { tokens, labels: of_rows, rows })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labelled_tokens_keep_their_order_and_fill_eighths_of_a_batch() {
        let mut labels = vec![IGNORE; 29];
        (labels[3], labels[11], labels[12], labels[20], labels[28]) = (5, 0, 9, 2, 7);
        let of = LabelledTokens::of(&labels).unwrap();
        assert_eq!(of.tokens, [3, 11, 12, 20, 28, NONE, NONE, NONE]);
        assert_eq!(of.labels, [5, 0, 9, 2, 7, IGNORE, IGNORE, IGNORE]);
        for (token, &row) in of.rows.iter().enumerate() {
            let found = of.tokens.iter().position(|&of| of as usize == token);
            assert_eq!(row, found.map_or(NONE, |row| row as u32), "{token}");
        }
        // Seven eighths and one more are all of them; so are all, and those of nothing.
        let most = |count| (0..32).map(|i| if i < count { 1 } else { IGNORE }).collect::<Vec<_>>();
        assert_eq!(LabelledTokens::of(&most(28)).unwrap().tokens.len(), 28);
        assert_eq!([29, 32].map(|count| LabelledTokens::of(&most(count))), [None, None]);
        assert_eq!(LabelledTokens::of(&[]), None);
        assert_eq!(LabelledTokens::of(&most(0)).unwrap().tokens, [NONE; 4]);
    }
}
