//! Documents to rows of one length, streaming, without a token lost or a boundary crossed.
//!
//! Rows are filled from left to right. Each piece of a document in a row gets its own document id (counted from
//! zero in each row) and positions from zero, so the mask `document`, rotary positions and labels all follow from
//! the same boundaries. The label of a token is the next token *of its document*, even when that one lies in the
//! next row; the last token of a document has none. Padding, where a row cannot be filled, has document −1.
//!
//! The state between two rows is a [`Cursor`] of three numbers, so resuming is exact by construction.

use std::ops::Range;
use std::sync::Arc;

use foveate_nn::token_order;
use serde::{Deserialize, Serialize};

use crate::corpus::{Corpus, Document, TokenCounts};
use crate::error::TrainError;
use crate::order::permutation;

/// The label of a token that has no target.
pub const IGNORE: i32 = -100;

/// A place in the endless stream of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Passes over the documents that are complete.
    pub epoch: u64,
    /// Documents of this pass that are complete.
    pub document: usize,
    /// Tokens of the next document that are packed already.
    pub token: usize,
}

/// A part of a document in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The row.
    pub row: usize,
    /// Where in the row it begins.
    pub column: usize,
    /// The document, an index into the corpus.
    pub document: usize,
    /// Its first token that is here, counted in the document.
    pub token: usize,
    /// Tokens here.
    pub len: usize,
}

/// Rows of tokens, `[rows, len]` in row order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Packed {
    /// Rows.
    pub rows: usize,
    /// Tokens a row.
    pub len: usize,
    /// Token ids; zero in padding.
    pub tokens: Vec<u32>,
    /// The next token of the same document, or [`IGNORE`].
    pub labels: Vec<i32>,
    /// Document ids, from zero in each row; −1 in padding.
    pub documents: Vec<i32>,
    /// Positions, from zero in each piece of a document.
    pub positions: Vec<i32>,
    /// What stands where, in order.
    pub pieces: Vec<Piece>,
    /// Pairs of query and key that the mask of each attention program lets through, as
    /// [`foveate_nn::Batch::live_pairs`] has them; empty where nobody has counted them.
    pub live_pairs: Vec<f64>,
    /// The order of the tokens, as [`foveate_nn::Batch::order`] has it; empty where nobody has sorted them.
    pub order: Vec<u32>,
}

impl Packed {
    /// A row of `len` places without a document.
    pub(crate) fn empty_row(len: usize) -> Self {
        Self {
            rows: 1,
            len,
            tokens: vec![0; len],
            labels: vec![IGNORE; len],
            documents: vec![-1; len],
            positions: vec![0; len],
            pieces: Vec::new(),
            live_pairs: Vec::new(),
            order: Vec::new(),
        }
    }

    /// Sorts the tokens, for the gradient of their embedding.
    pub(crate) fn sort(&mut self) {
        self.order = token_order(&self.tokens);
    }

    /// Tokens that have a target.
    pub fn labelled(&self) -> usize {
        self.labels.iter().filter(|&&label| label != IGNORE).count()
    }

    /// Places without a document.
    pub fn padding(&self) -> usize {
        self.documents.iter().filter(|&&document| document < 0).count()
    }

    /// Those of the rows that `rows` names.
    pub fn part(&self, rows: Range<usize>) -> Self {
        let cells = rows.start * self.len..rows.end * self.len;
        let pieces = self.pieces.iter().filter(|piece| rows.contains(&piece.row));
        Self {
            rows: rows.len(),
            len: self.len,
            tokens: self.tokens[cells.clone()].to_vec(),
            labels: self.labels[cells.clone()].to_vec(),
            documents: self.documents[cells.clone()].to_vec(),
            positions: self.positions[cells].to_vec(),
            pieces: pieces.map(|piece| Piece { row: piece.row - rows.start, ..*piece }).collect(),
            live_pairs: Vec::new(),
            order: Vec::new(),
        }
    }

    /// Of every row the tokens at `columns`, one range after another. What stands where is told no
    /// longer.
    pub(crate) fn columns(&self, columns: &[std::ops::Range<usize>]) -> Self {
        fn taken<T: Copy>(cells: &[T], len: usize, columns: &[std::ops::Range<usize>]) -> Vec<T> {
            let rows = cells.chunks_exact(len.max(1));
            rows.flat_map(|row| columns.iter().flat_map(|c| &row[c.clone()])).copied().collect()
        }
        Self {
            rows: self.rows,
            len: columns.iter().map(|c| c.len()).sum(),
            tokens: taken(&self.tokens, self.len, columns),
            labels: taken(&self.labels, self.len, columns),
            documents: taken(&self.documents, self.len, columns),
            positions: taken(&self.positions, self.len, columns),
            pieces: Vec::new(),
            live_pairs: Vec::new(),
            order: Vec::new(),
        }
    }

    /// The first `rows` rows, and of each the first `len` tokens.
    fn cut(self, rows: usize, len: usize) -> Self {
        fn cut<T: Copy>(cells: &[T], width: usize, rows: usize, len: usize) -> Vec<T> {
            cells.chunks_exact(width).take(rows).flat_map(|row| &row[..len]).copied().collect()
        }
        let width = self.len;
        Self {
            rows,
            len,
            tokens: cut(&self.tokens, width, rows, len),
            labels: cut(&self.labels, width, rows, len),
            documents: cut(&self.documents, width, rows, len),
            positions: cut(&self.positions, width, rows, len),
            pieces: self.pieces.into_iter().filter(|piece| piece.row < rows).collect(),
            live_pairs: Vec::new(),
            order: Vec::new(),
        }
    }

    /// Rows of padding.
    pub(crate) fn with_rows(rows: usize, len: usize) -> Self {
        let cells = rows * len;
        Self {
            rows,
            len,
            tokens: vec![0; cells],
            labels: vec![IGNORE; cells],
            documents: vec![-1; cells],
            positions: (0..cells).map(|cell| (cell % len) as i32).collect(),
            pieces: Vec::new(),
            live_pairs: Vec::new(),
            order: Vec::new(),
        }
    }
}

/// How rows are filled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PackOptions {
    /// Tokens a row.
    pub len: usize,
    /// Whether a document may continue in the next row. If not, it starts a new row when it does not fit, and is cut
    /// when it is longer than a row.
    pub split: bool,
    /// The seed of the order, which differs in each pass; none keeps the order of the corpus.
    pub shuffle: Option<u64>,
}

impl PackOptions {
    /// The order of `documents` documents in a pass.
    fn order(&self, documents: usize, pass: u64) -> Vec<usize> {
        match self.shuffle {
            Some(seed) => permutation(documents, seed, pass),
            None => (0..documents).collect(),
        }
    }

    /// The rows that `passes` passes over documents of these numbers of tokens fill, the last of them perhaps in
    /// part.
    pub fn rows(&self, lengths: &[usize], passes: u64) -> u64 {
        // Tokens in the row that is being filled; 0 when there is none.
        let (mut rows, mut at) = (0u64, 0);
        for pass in 0..passes {
            for document in self.order(lengths.len(), pass) {
                let mut left = lengths[document];
                if !self.split {
                    left = left.min(self.len);
                    at = if lengths[document] > self.len - at { 0 } else { at };
                }
                while left > 0 {
                    rows += u64::from(at == 0);
                    let count = left.min(self.len - at);
                    left -= count;
                    at = (at + count) % self.len;
                }
            }
        }
        rows
    }
}

/// A stream of rows over some documents of a corpus.
#[derive(Clone, Debug)]
pub struct Packer<'a> {
    corpus: &'a Corpus,
    documents: Vec<usize>,
    options: PackOptions,
    cursor: Cursor,
    order: Option<(u64, Vec<usize>)>,
    current: Option<(usize, Document)>,
    cut_tokens: usize,
    counts: Option<Arc<TokenCounts>>,
}

/// Rows that were made, of more that were passed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Part {
    /// The rows that were made.
    pub packed: Packed,
    /// Of each row that was passed, the tokens of every piece of a document, in order.
    pub lengths: Vec<Vec<usize>>,
}

impl Part {
    /// Places of all rows that were passed.
    pub fn places(&self) -> usize {
        self.lengths.len() * self.packed.len
    }

    /// Those of them without a document.
    pub fn padding(&self) -> usize {
        self.places() - self.lengths.iter().flatten().sum::<usize>()
    }

    /// What of all rows that were passed is known without reading them.
    pub fn all_rows(&self) -> AllRows {
        let (rows, len) = (self.lengths.len(), self.packed.len);
        let Packed { mut documents, .. } = Packed::with_rows(rows, len);
        let mut positions = 0;
        for (row, lengths) in self.lengths.iter().enumerate() {
            let (mut at, end) = (row * len, (row + 1) * len);
            for (id, &length) in lengths.iter().enumerate() {
                documents[at..at + length].fill(id as i32);
                at += length;
                positions = positions.max(length);
            }
            // Positions of padding are its columns.
            positions = if at < end { len } else { positions };
        }
        AllRows { shape: [rows, len], documents, positions }
    }
}

/// What is known of all rows of a batch, whoever takes them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AllRows {
    /// Rows, and tokens of a row.
    pub shape: [usize; 2],
    /// As in [`Packed`].
    pub documents: Vec<i32>,
    /// One more than the largest of [`Packed::positions`].
    pub positions: usize,
}

impl AllRows {
    /// Of a batch whose rows are all there.
    pub fn of(batch: &Packed) -> Self {
        let positions = batch.positions.iter().max().map_or(0, |&position| position as usize + 1);
        Self { shape: [batch.rows, batch.len], documents: batch.documents.clone(), positions }
    }
}

impl<'a> Packer<'a> {
    /// A stream over `documents` (at least one, indices into `corpus`) from `cursor` on; `options.len` is
    /// at least one.
    pub fn new(
        corpus: &'a Corpus,
        documents: Vec<usize>,
        options: PackOptions,
        cursor: Cursor,
    ) -> Self {
        Self {
            corpus,
            documents,
            options,
            cursor,
            order: None,
            current: None,
            cut_tokens: 0,
            counts: None,
        }
    }

    /// The same stream, which knows how many tokens each document of the corpus has: rows that are passed are
    /// not read.
    pub(crate) fn knowing(mut self, counts: Option<Arc<TokenCounts>>) -> Self {
        self.counts = counts;
        self
    }

    /// Whether the cursor stands inside the documents, as every cursor of a stream over them does.
    ///
    /// # Errors
    /// If a document cannot be read.
    pub fn cursor_fits(&mut self) -> Result<bool, TrainError> {
        let Cursor { document, token, .. } = self.cursor;
        let inside = document < self.documents.len();
        Ok(inside && (token == 0 || token < self.next_len()?.1))
    }

    /// Where the next row starts.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Passes over the documents so far: whole ones, and the share of the documents of the one under way, each
    /// counted alike.
    pub fn passes(&self) -> f64 {
        let Cursor { epoch, document, token } = self.cursor;
        // Where part of a document is packed, its number of tokens is known.
        let begun = (self.order.as_ref()).filter(|(of, _)| token > 0 && *of == epoch);
        let all = begun.map_or(1, |(_, order)| self.known_len(self.documents[order[document]]));
        let documents = document as f64 + token as f64 / all.max(1) as f64;
        epoch as f64 + documents / self.documents.len() as f64
    }

    /// Tokens cut from documents longer than a row so far; zero where documents may split.
    pub fn cut_tokens(&self) -> usize {
        self.cut_tokens
    }

    /// The next `rows` rows of the endless stream.
    ///
    /// # Errors
    /// If a document cannot be read.
    pub fn batch(&mut self, rows: usize) -> Result<Packed, TrainError> {
        Ok(self.part_of_batch(rows, 0..rows)?.packed)
    }

    /// Passes the next `rows` rows of the endless stream and makes those of them that `own` names.
    ///
    /// # Errors
    /// If a document cannot be read.
    pub(crate) fn part_of_batch(
        &mut self,
        rows: usize,
        own: Range<usize>,
    ) -> Result<Part, TrainError> {
        let mut packed = Packed::with_rows(own.len(), self.options.len);
        let mut lengths = Vec::with_capacity(rows);
        for row in 0..rows {
            let into = own.contains(&row).then(|| (&mut packed, row - own.start));
            lengths.push(self.fill(into, u64::MAX)?);
        }
        Ok(Part { packed, lengths })
    }

    /// The next rows of the current pass, at most `rows`, as long as the longest of them is filled; none when the
    /// pass is over. The row that the pass ends in comes alone, so that it makes no padding.
    ///
    /// # Errors
    /// If a document cannot be read.
    pub fn batch_of_pass(&mut self, rows: usize, pass: u64) -> Result<Option<Packed>, TrainError> {
        Ok(self.part_of_pass(rows, pass, |rows| 0..rows)?.map(|part| part.packed))
    }

    /// Passes what [`Self::batch_of_pass`] gives, and makes those of its rows that `own` names of their number.
    ///
    /// # Errors
    /// If a document cannot be read.
    pub(crate) fn part_of_pass(
        &mut self,
        rows: usize,
        pass: u64,
        own: impl Fn(usize) -> Range<usize>,
    ) -> Result<Option<Part>, TrainError> {
        let before = (self.cursor, self.cut_tokens);
        // Where documents are not counted, rows are read to be passed.
        let mut all = self.counts.is_none().then(|| Packed::with_rows(rows, self.options.len));
        let lengths = self.rows_of_pass(rows, pass, all.as_mut())?;
        let (used, longest) = (lengths.len(), longest(&lengths));
        // A row ends without a token where no document that is left of the pass has one.
        if longest == 0 {
            return Ok(None);
        }
        let own = own(used);
        let packed = match all {
            Some(all) => all.cut(used, longest).part(own),
            None => {
                let behind = self.cursor;
                (self.cursor, self.cut_tokens) = before;
                let mut packed = Packed::with_rows(own.len(), self.options.len);
                for row in 0..used {
                    let into = own.contains(&row).then(|| (&mut packed, row - own.start));
                    self.fill(into, pass)?;
                }
                debug_assert_eq!(self.cursor, behind);
                packed.cut(own.len(), longest)
            }
        };
        Ok(Some(Part { packed, lengths }))
    }

    /// Passes the rows of a batch of the pass, filling those of `packed`; the lengths of their pieces.
    fn rows_of_pass(
        &mut self,
        rows: usize,
        pass: u64,
        mut packed: Option<&mut Packed>,
    ) -> Result<Vec<Vec<usize>>, TrainError> {
        let mut lengths = Vec::new();
        while lengths.len() < rows && self.cursor.epoch <= pass {
            let before = (self.cursor, self.cut_tokens);
            let into = packed.as_deref_mut().map(|packed| (packed, lengths.len()));
            let row = self.fill(into, pass)?;
            let is_over = !lengths.is_empty() && self.cursor.epoch > pass;
            if is_over && row.iter().sum::<usize>() < longest(&lengths) {
                (self.cursor, self.cut_tokens) = before;
                break;
            }
            lengths.push(row);
        }
        Ok(lengths)
    }

    /// Passes a row, which becomes that row of `into`, and returns the lengths of its pieces of documents.
    fn fill(
        &mut self,
        mut into: Option<(&mut Packed, usize)>,
        last_pass: u64,
    ) -> Result<Vec<usize>, TrainError> {
        let (len, split) = (self.options.len, self.options.split);
        let (mut at, mut lengths) = (0, Vec::new());
        // Documents one after another that have no token. Twice as many as there are hold all of a pass.
        let mut empty = 0;
        while at < len && self.cursor.epoch <= last_pass {
            let from = self.cursor.token;
            let (index, all) = self.next_len()?;
            if !split && at > 0 && all > len - at {
                break;
            }
            empty = if all == 0 { empty + 1 } else { 0 };
            if empty > 2 * self.documents.len() {
                let message = "no document has a token: the tokenizer knows nothing of what they say; give \
                               one of their language by data.tokenizer";
                return Err(TrainError::recipe("data.files", message));
            }
            let count = (all - from).min(len - at);
            if let Some((packed, row)) = &mut into {
                let document = self.load(index)?;
                let base = *row * len + at;
                let piece =
                    Piece { row: *row, column: at, document: index, token: from, len: count };
                packed.pieces.push(piece);
                for i in 0..count {
                    let (cell, token) = (base + i, from + i);
                    packed.tokens[cell] = document.tokens[token];
                    packed.documents[cell] = lengths.len() as i32;
                    packed.positions[cell] = i as i32;
                    if token + 1 < all && document.learned[token + 1] {
                        packed.labels[cell] = document.tokens[token + 1] as i32;
                    }
                }
            }
            let mut done = from + count == all;
            if !split && !done {
                self.cut_tokens += all - count;
                done = true;
            }
            if done {
                self.advance()
            } else {
                self.cursor.token += count
            }
            at += count;
            lengths.push(count);
        }
        Ok(lengths)
    }

    fn advance(&mut self) {
        self.current = None;
        self.cursor.token = 0;
        self.cursor.document += 1;
        if self.cursor.document == self.documents.len() {
            self.cursor.document = 0;
            self.cursor.epoch += 1;
        }
    }

    /// The next document, an index into the corpus, and its tokens.
    fn next_len(&mut self) -> Result<(usize, usize), TrainError> {
        let epoch = self.cursor.epoch;
        if self.order.as_ref().is_none_or(|(of, _)| *of != epoch) {
            self.order = Some((epoch, self.options.order(self.documents.len(), epoch)));
        }
        let (_, order) = self.order.as_ref().expect("set above");
        let index = self.documents[order[self.cursor.document]];
        if self.counts.is_none() {
            self.load(index)?;
        }
        Ok((index, self.known_len(index)))
    }

    /// Tokens of a document that was counted, or is the one that was read last.
    fn known_len(&self, index: usize) -> usize {
        match (&self.counts, &self.current) {
            (Some(counts), _) => counts.of(index),
            (None, Some((of, document))) if *of == index => document.tokens.len(),
            (None, _) => 0,
        }
    }

    /// The document of this index, read where it is not the last one.
    fn load(&mut self, index: usize) -> Result<&Document, TrainError> {
        if self.current.as_ref().is_none_or(|(of, _)| *of != index) {
            let document = self.corpus.document(index)?;
            let known = self.counts.as_ref().map_or(document.tokens.len(), |c| c.of(index));
            if document.tokens.len() != known {
                let (file, line) = self.corpus.place(index);
                let message = format!(
                    "the document has {} tokens, but {known} when they were counted; remove the \
                     folder `cache` in run.dir, and start again",
                    document.tokens.len()
                );
                return Err(TrainError::data(file, line, message));
            }
            self.current = Some((index, document));
        }
        Ok(&self.current.as_ref().expect("set above").1)
    }
}

/// Tokens of the fullest row.
fn longest(lengths: &[Vec<usize>]) -> usize {
    lengths.iter().map(|row| row.iter().sum()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests;
