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
        }
    }

    /// Tokens that have a target.
    pub fn labelled(&self) -> usize {
        self.labels.iter().filter(|&&label| label != IGNORE).count()
    }

    /// Places without a document.
    pub fn padding(&self) -> usize {
        self.documents.iter().filter(|&&document| document < 0).count()
    }

    /// Keys of its own document, itself among them, that a query has not behind it, on average
    /// and rounded up; none where there are no rows.
    pub fn mean_kv_len(&self) -> Option<usize> {
        let keys: usize = self.positions.iter().map(|&position| position as usize + 1).sum();
        Some(keys.div_ceil(self.positions.len().max(1))).filter(|&keys| keys > 0)
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
    /// Places of all rows that were passed.
    pub places: usize,
    /// Those of them without a document.
    pub padding: usize,
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
        let (places, mut filled) = (rows * self.options.len, 0);
        for row in 0..rows {
            let into = own.contains(&row).then(|| (&mut packed, row - own.start));
            filled += self.fill(into, u64::MAX)?;
        }
        Ok(Part { packed, places, padding: places - filled })
    }

    /// The next rows of the current pass, at most `rows`, as long as the longest of them is filled; none when the
    /// pass is over. The row that the pass ends in comes alone, so that it makes no padding.
    ///
    /// # Errors
    /// If a document cannot be read.
    pub fn batch_of_pass(&mut self, rows: usize, pass: u64) -> Result<Option<Packed>, TrainError> {
        let mut packed = Packed::with_rows(rows, self.options.len);
        let (used, longest) = self.rows_of_pass(rows, pass, Some(&mut packed))?;
        Ok((used > 0).then(|| packed.cut(used, longest)))
    }

    /// Passes what [`Self::batch_of_pass`] gives, and makes those of its rows that `own` names of their number, which
    /// comes with them.
    ///
    /// # Errors
    /// If a document cannot be read.
    pub(crate) fn part_of_pass(
        &mut self,
        rows: usize,
        pass: u64,
        own: impl Fn(usize) -> Range<usize>,
    ) -> Result<Option<(usize, Packed)>, TrainError> {
        if self.counts.is_none() {
            let all = self.batch_of_pass(rows, pass)?;
            return Ok(all.map(|all| (all.rows, all.part(own(all.rows)))));
        }
        let before = (self.cursor, self.cut_tokens);
        let (used, longest) = self.rows_of_pass(rows, pass, None)?;
        if used == 0 {
            return Ok(None);
        }
        let behind = self.cursor;
        (self.cursor, self.cut_tokens) = before;
        let own = own(used);
        let mut packed = Packed::with_rows(own.len(), self.options.len);
        for row in 0..used {
            let into = own.contains(&row).then(|| (&mut packed, row - own.start));
            self.fill(into, pass)?;
        }
        debug_assert_eq!(self.cursor, behind);
        let made = packed.rows;
        Ok(Some((used, packed.cut(made, longest))))
    }

    /// Passes the rows of a batch of the pass, filling those of `packed`; how many there are, and how long the
    /// longest is.
    fn rows_of_pass(
        &mut self,
        rows: usize,
        pass: u64,
        mut packed: Option<&mut Packed>,
    ) -> Result<(usize, usize), TrainError> {
        let (mut used, mut longest) = (0, 0);
        while used < rows && self.cursor.epoch <= pass {
            let before = (self.cursor, self.cut_tokens);
            let filled = self.fill(packed.as_deref_mut().map(|packed| (packed, used)), pass)?;
            if used > 0 && self.cursor.epoch > pass && filled < longest {
                (self.cursor, self.cut_tokens) = before;
                break;
            }
            longest = longest.max(filled);
            used += 1;
        }
        Ok((used, longest))
    }

    /// Passes a row, which becomes that row of `into`, and returns how many tokens are in it.
    fn fill(
        &mut self,
        mut into: Option<(&mut Packed, usize)>,
        last_pass: u64,
    ) -> Result<usize, TrainError> {
        let (len, split) = (self.options.len, self.options.split);
        let (mut at, mut id) = (0, 0);
        while at < len && self.cursor.epoch <= last_pass {
            let from = self.cursor.token;
            let (index, all) = self.next_len()?;
            if !split && at > 0 && all > len - at {
                break;
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
                    packed.documents[cell] = id;
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
            id += 1;
        }
        Ok(at)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_sees_what_is_before_it_in_its_piece() {
        let mut packed = Packed::with_rows(2, 4);
        packed.positions = vec![0, 1, 2, 0, 0, 0, 0, 1];
        // 6 + 1 and 1 + 1 + 3 keys, of 8 queries.
        assert_eq!(packed.mean_kv_len(), Some(2));
    }
    use crate::corpus::Sources;
    use crate::tokens::Tokenizer;

    fn corpus(texts: &[String]) -> (tempfile::TempDir, Corpus) {
        let dir = tempfile::tempdir().unwrap();
        for (i, text) in texts.iter().enumerate() {
            std::fs::write(dir.path().join(format!("{i:03}.txt")), text).unwrap();
        }
        let sources = Sources {
            root: dir.path().to_path_buf(),
            files: vec!["*.txt".to_owned()],
            ..Default::default()
        };
        let corpus = Corpus::scan(&sources, Tokenizer::bytes(), None, &mut || false).unwrap();
        (dir, corpus)
    }

    fn texts() -> Vec<String> {
        [3usize, 1, 17, 40, 2, 8, 100, 5]
            .iter()
            .enumerate()
            .map(|(i, &n)| "abcdefgh"[i..=i].repeat(n))
            .collect()
    }

    fn options(split: bool, shuffle: Option<u64>) -> PackOptions {
        PackOptions { len: 13, split, shuffle }
    }

    /// Every row's boundaries, positions and labels agree with each other.
    fn check_rows(packed: &Packed) {
        for row in 0..packed.rows {
            for i in 0..packed.len {
                let cell = row * packed.len + i;
                let fresh = i == 0 || packed.documents[cell] != packed.documents[cell - 1];
                if packed.documents[cell] < 0 {
                    assert_eq!(packed.labels[cell], IGNORE);
                    continue;
                }
                assert_eq!(
                    packed.positions[cell],
                    if fresh { 0 } else { packed.positions[cell - 1] + 1 }
                );
                if i + 1 < packed.len && packed.documents[cell] == packed.documents[cell + 1] {
                    assert_eq!(packed.labels[cell], packed.tokens[cell + 1] as i32);
                }
            }
        }
    }

    #[test]
    fn one_pass_holds_every_token_and_every_target_once() {
        let texts = texts();
        let (_dir, corpus) = corpus(&texts);
        let mut packer = Packer::new(
            &corpus,
            (0..texts.len()).collect(),
            options(true, Some(3)),
            Cursor::default(),
        );
        let (mut seen, mut targets) = (0, 0);
        while let Some(packed) = packer.batch_of_pass(3, 0).unwrap() {
            check_rows(&packed);
            seen += packed.documents.iter().filter(|&&document| document >= 0).count();
            targets += packed.labelled();
        }
        let bytes: usize = texts.iter().map(String::len).sum();
        assert_eq!(seen, bytes + 2 * texts.len());
        assert_eq!(targets, bytes + texts.len());
        assert_eq!(packer.cursor(), Cursor { epoch: 1, document: 0, token: 0 });
    }

    #[test]
    fn the_rows_of_some_passes_are_counted_without_packing_them() {
        let (_dir, corpus) = corpus(&texts());
        let all: Vec<usize> = (0..corpus.len()).collect();
        let lengths: Vec<usize> =
            all.iter().map(|&i| corpus.document(i).unwrap().tokens.len()).collect();
        for (split, shuffle) in [(true, Some(5)), (false, Some(5)), (false, None)] {
            let options = options(split, shuffle);
            let packer = Packer::new(&corpus, all.clone(), options, Cursor::default());
            for passes in 1..5 {
                let (mut rows, mut stream) = (0, packer.clone());
                while stream.cursor.epoch < passes {
                    stream.batch(1).unwrap();
                    rows += 1;
                }
                assert_eq!(options.rows(&lengths, passes), rows, "{passes} {split} {shuffle:?}");
            }
        }
    }

    #[test]
    fn the_end_of_a_pass_is_not_padded() {
        let (_dir, corpus) = corpus(&["a".repeat(30), "b".repeat(5)]);
        let mut packer = Packer::new(&corpus, vec![0, 1], options(true, None), Cursor::default());
        let mut shapes = Vec::new();
        while let Some(packed) = packer.batch_of_pass(8, 0).unwrap() {
            check_rows(&packed);
            assert!(packed.documents.iter().all(|&document| document >= 0));
            shapes.push((packed.rows, packed.len));
        }
        assert_eq!(shapes, [(3, 13)]);
        let mut packer = Packer::new(&corpus, vec![1, 0], options(true, None), Cursor::default());
        packer.options.len = 16;
        let mut shapes = Vec::new();
        while let Some(packed) = packer.batch_of_pass(8, 0).unwrap() {
            shapes.push((packed.rows, packed.len));
        }
        assert_eq!(shapes, [(2, 16), (1, 7)]);
        let mut packer = Packer::new(&corpus, vec![1], options(true, None), Cursor::default());
        packer.options.len = 4096;
        let alone = packer.batch_of_pass(8, 0).unwrap().unwrap();
        assert_eq!((alone.rows, alone.len, alone.tokens.len()), (1, 7, 7));
    }

    #[test]
    fn a_label_never_belongs_to_the_next_document() {
        let (_dir, corpus) = corpus(&["aaa".to_owned(), "bbb".to_owned()]);
        let mut packer = Packer::new(&corpus, vec![0, 1], options(true, None), Cursor::default());
        let packed = packer.batch(1).unwrap();
        assert_eq!(packed.documents, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]);
        assert_eq!(packed.positions, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]);
        assert_eq!(packed.labels[..6], [97, 97, 97, 256, IGNORE, 98]);
        assert_eq!(packed.labels[12], 97, "the target of a row's last token lies in the next row");
    }

    #[test]
    fn any_cursor_resumes_the_same_stream() {
        let (_dir, corpus) = corpus(&texts());
        for split in [true, false] {
            let all = (0..corpus.len()).collect::<Vec<_>>();
            let mut straight =
                Packer::new(&corpus, all.clone(), options(split, Some(9)), Cursor::default());
            for step in 0..40 {
                let mut resumed =
                    Packer::new(&corpus, all.clone(), options(split, Some(9)), straight.cursor());
                assert_eq!(
                    resumed.batch(2).unwrap(),
                    straight.batch(2).unwrap(),
                    "step {step}, split {split}"
                );
            }
            assert!(straight.cursor().epoch > 2);
        }
    }

    #[test]
    fn passes_differ_in_order_and_seeds_decide_it() {
        let (_dir, corpus) = corpus(&texts());
        let tokens = |seed, epoch| {
            let cursor = Cursor { epoch, ..Default::default() };
            Packer::new(&corpus, (0..8).collect(), options(true, Some(seed)), cursor)
                .batch(4)
                .unwrap()
        };
        assert_eq!(tokens(1, 0), tokens(1, 0));
        assert_ne!(tokens(1, 0), tokens(1, 1));
        assert_ne!(tokens(1, 0), tokens(2, 0));
    }

    #[test]
    fn documents_that_may_not_split_start_rows_and_are_cut_at_their_length() {
        let (_dir, corpus) = corpus(&["a".repeat(9), "b".repeat(4), "c".repeat(30)]);
        let mut packer =
            Packer::new(&corpus, vec![0, 1, 2], options(false, None), Cursor::default());
        let packed = packer.batch_of_pass(5, 0).unwrap().unwrap();
        check_rows(&packed);
        assert_eq!((packed.rows, packed.len), (3, 13));
        assert_eq!(packed.documents[11..13], [-1, -1]);
        assert_eq!(packed.documents[13 + 6..26], [-1; 7]);
        assert_eq!(packed.documents[26..], [0; 13]);
        assert_eq!(packer.cut_tokens(), 32 - 13);
    }

    /// Counts of all documents, and a corpus that can no longer read those that `lost` names.
    fn counted(corpus: &Corpus, dir: &std::path::Path, lost: &[usize]) -> Arc<TokenCounts> {
        let count = |i| corpus.document(i).unwrap().tokens.len() as u32;
        let counts = TokenCounts::new((0..corpus.len()).map(count).collect());
        for i in lost {
            std::fs::remove_file(dir.join(format!("{i:03}.txt"))).unwrap();
        }
        Arc::new(counts)
    }

    #[test]
    fn parts_of_batches_make_up_the_batches_and_cursors_are_the_same() {
        let texts = texts();
        let (dir, corpus) = corpus(&texts);
        let counts = counted(&corpus, dir.path(), &[]);
        for (split, counts) in
            [true, false].map(|split| [(split, None), (split, Some(&counts))]).concat()
        {
            let options = options(split, Some(5));
            let all: Vec<usize> = (0..8).collect();
            let mut whole = Packer::new(&corpus, all.clone(), options, Cursor::default());
            for ranks in [1, 2, 3, 5] {
                let cut = |rank: usize| rank * 5 / ranks..(rank + 1) * 5 / ranks;
                let at = whole.cursor();
                let batches: Vec<Packed> = (0..9).map(|_| whole.batch(5).unwrap()).collect();
                for rank in 0..ranks {
                    let part = Packer::new(&corpus, all.clone(), options, at);
                    let mut part = part.knowing(counts.cloned());
                    for batch in &batches {
                        let made = part.part_of_batch(5, cut(rank)).unwrap();
                        assert_eq!(made.packed, batch.part(cut(rank)));
                        assert_eq!((made.places, made.padding), (5 * 13, batch.padding()));
                    }
                    assert_eq!((part.cursor(), part.passes()), (whole.cursor(), whole.passes()));
                }
                // A pass: rows and their lengths are those of one rank's.
                let mut parts: Vec<_> = (0..ranks)
                    .map(|_| Packer::new(&corpus, all.clone(), options, Cursor::default()))
                    .map(|part| part.knowing(counts.cloned()))
                    .collect();
                let mut one = Packer::new(&corpus, all.clone(), options, Cursor::default());
                while let Some(batch) = one.batch_of_pass(5, 0).unwrap() {
                    let own = |rank: usize| {
                        move |rows: usize| rank * rows / ranks..(rank + 1) * rows / ranks
                    };
                    for (rank, part) in parts.iter_mut().enumerate() {
                        let (rows, made) = part.part_of_pass(5, 0, own(rank)).unwrap().unwrap();
                        assert_eq!((rows, made), (batch.rows, batch.part(own(rank)(batch.rows))));
                        assert_eq!(part.cut_tokens(), one.cut_tokens());
                    }
                }
                assert!(
                    parts
                        .iter_mut()
                        .all(|part| part.part_of_pass(5, 0, |n| 0..n).unwrap().is_none())
                );
            }
        }
    }

    #[test]
    fn rows_of_others_are_not_read_where_documents_are_counted() {
        let texts: Vec<String> = (0..6).map(|i| "abcdefgh"[i..=i].repeat(24)).collect();
        let (dir, corpus) = corpus(&texts);
        // A document and its two ends fill two rows of 13 tokens.
        let counts = counted(&corpus, dir.path(), &[0, 1, 4, 5]);
        let options = options(true, None);
        let stream = || Packer::new(&corpus, (0..6).collect(), options, Cursor::default());
        let mut part = stream().knowing(Some(counts.clone()));
        let own = part.part_of_batch(12, 4..8).unwrap().packed;
        assert_eq!(own.pieces.iter().map(|piece| piece.document).collect::<Vec<_>>(), [2, 2, 3, 3]);
        assert_eq!(part.cursor(), Cursor { epoch: 1, document: 0, token: 0 });
        // One that is read is held to its count.
        assert!(stream().part_of_batch(12, 4..8).is_err(), "without counts all are read");
        let wrong = Arc::new(TokenCounts::new(vec![26, 26, 25, 26, 26, 26]));
        let told = stream().knowing(Some(wrong)).part_of_batch(12, 4..8).unwrap_err().to_string();
        assert!(told.contains("002.txt") && told.contains("26 tokens, but 25 when"), "{told}");
    }
}
