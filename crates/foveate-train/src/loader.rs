//! Batches made ahead of the steps that take them, on a thread of their own.
//!
//! The thread reads, tokenises and packs while a step computes, and is at most [`AHEAD`] batches ahead:
//! what it makes does not depend on when it makes it. It sorts the tokens of a step, too, in the order that the
//! embedding's gradient is summed in. Where ranks share the tokens of rows, it plans
//! attention over them, too, so that no step waits for a plan; elsewhere it counts the pairs that masks let
//! through. Each batch comes with the cursor behind it, so
//! what a checkpoint says is where the steps are, not where the thread is. An error comes in the place
//! of the batch that could not be made. Evaluations take their batches, of one pass over documents, from a
//! thread of their own in the same way.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use crate::context::{ContextPart, ContextPlanner};
use crate::corpus::{Corpus, TokenCounts};
use crate::error::TrainError;
use crate::pack::{Cursor, PackOptions, Packed, Packer};
use crate::pairs::PairCounter;
use crate::ranks::RowPart;

/// Batches that wait to be taken, the one that is being made among them.
pub(crate) const AHEAD: usize = 2;

/// A batch, and where the stream stands behind it.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// The rows of this rank, or its tokens of them.
    pub own: Packed,
    /// Attention over ranks, where these compute it together.
    pub context: Option<ContextPart>,
    /// Rows of all ranks.
    pub rows: usize,
    /// Places in these.
    pub places: u64,
    /// Places without a document, in the rows of all ranks.
    pub padding: u64,
    /// Tokens of documents that are longer than a row, behind its end.
    pub cut: u64,
    /// Where the next batch begins.
    pub cursor: Cursor,
    /// Passes over the documents up to there.
    pub passes: f64,
}

/// What is to be made of which documents.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// Indices into the corpus.
    pub documents: Vec<usize>,
    /// How they fill rows.
    pub packing: PackOptions,
    /// Rows of a batch.
    pub rows: usize,
    /// Those of them that this rank takes.
    pub own: RowPart,
    /// At most so many rows of the first pass over the documents; without it all passes, without an end.
    pub of_pass: Option<usize>,
    /// What is known of the documents; without it all rows are read.
    pub counts: Option<Arc<TokenCounts>>,
    /// What plans attention over ranks, where these compute it together.
    pub planner: Option<ContextPlanner>,
    /// What counts the pairs that masks let through, where no plan over ranks does.
    pub pairs: Option<PairCounter>,
    /// Whether tokens are sorted for the gradient of their embedding.
    pub sorted: bool,
}

impl Wanted {
    /// The next batch of `packer`; none behind the last.
    fn next(&mut self, packer: &mut Packer<'_>) -> Result<Option<Loaded>, TrainError> {
        let cut = packer.cut_tokens();
        let part = match &mut self.of_pass {
            None => packer.part_of_batch(self.rows, self.own.of(self.rows))?,
            Some(0) => return Ok(None),
            Some(left) => {
                let own = |rows| self.own.of(rows);
                let next = packer.part_of_pass(self.rows.min(*left), 0, own)?;
                let Some(part) = next else { return Ok(None) };
                *left -= part.lengths.len();
                part
            }
        };
        let rows = part.lengths.len();
        let (places, padding) = (part.places() as u64, part.padding() as u64);
        let (mut own, context) = match &mut self.planner {
            None => (part.packed, None),
            Some(planner) => {
                let all = part.all_rows();
                planner.part(part.packed, all)?
            }
        };
        if let Some(pairs) = &mut self.pairs
            && context.is_none()
            && own.rows > 0
        {
            pairs.count(&mut own)?;
        }
        if self.sorted {
            own.sort();
        }
        let (cursor, passes) = (packer.cursor(), packer.passes());
        let cut = (packer.cut_tokens() - cut) as u64;
        Ok(Some(Loaded { own, context, rows, places, padding, cut, cursor, passes }))
    }
}

/// The stream of batches of a run.
#[derive(Debug)]
pub(crate) struct Loader {
    /// None once the thread is told to end.
    batches: Option<Receiver<Result<Option<Loaded>, TrainError>>>,
    thread: Option<JoinHandle<()>>,
}

impl Loader {
    /// Begins with the batch at `cursor`; none where the cursor stands outside the documents.
    ///
    /// # Errors
    /// If the document that the first batch begins with cannot be read, or there can be no thread.
    pub fn start(
        corpus: &Arc<Corpus>,
        wanted: Wanted,
        cursor: Cursor,
    ) -> Result<Option<Self>, TrainError> {
        let (documents, packing) = (wanted.documents.clone(), wanted.packing);
        let packer = Packer::new(corpus, documents.clone(), packing, cursor);
        if !packer.knowing(wanted.counts.clone()).cursor_fits()? {
            return Ok(None);
        }
        // One more is being made while the channel is full.
        let (put, batches) = sync_channel(AHEAD - 1);
        let corpus = corpus.clone();
        let make = move || {
            let packer = Packer::new(&corpus, documents, packing, cursor);
            let (mut packer, mut wanted) = (packer.knowing(wanted.counts.clone()), wanted);
            loop {
                let batch = wanted.next(&mut packer);
                let is_last = !matches!(batch, Ok(Some(_)));
                if put.send(batch).is_err() || is_last {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("foveate-loader".to_owned()).spawn(make);
        let thread = thread.map_err(|e| {
            TrainError::model(format!("no thread could be started to read documents: {e}"))
        })?;
        Ok(Some(Self { batches: Some(batches), thread: Some(thread) }))
    }

    /// The next batch of passes without an end.
    ///
    /// # Errors
    /// Those of [`Self::take_of_pass`].
    pub fn take(&mut self) -> Result<Loaded, TrainError> {
        self.take_of_pass().map(|batch| batch.expect("there is no end"))
    }

    /// The next batch, waited for where it is not made yet; none behind the last of a pass.
    ///
    /// # Errors
    /// If a document of it cannot be read; there is no batch behind such a one.
    pub fn take_of_pass(&mut self) -> Result<Option<Loaded>, TrainError> {
        let batches = self.batches.as_ref().expect("it is taken when the loader is dropped");
        batches.recv().unwrap_or_else(|_| {
            // It ends by itself only behind an error or an end, which was the last to be taken.
            match self.thread.take().map(JoinHandle::join) {
                Some(Err(panic)) => resume_unwind(panic),
                _ => unreachable!("a batch is asked for behind the last"),
            }
        })
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // A thread that waits for its batch to be taken ends.
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use foveate_shard::Mesh;

    use super::*;
    use crate::context::tests::planner_of;
    use crate::corpus::Sources;
    use crate::pack::AllRows;
    use crate::tokens::Tokenizer;

    fn corpus(documents: usize) -> (tempfile::TempDir, Arc<Corpus>) {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..documents {
            let text = "abcdefgh".repeat(1 + i * 5 % 7);
            std::fs::write(dir.path().join(format!("{i:03}.txt")), text).unwrap();
        }
        let root = dir.path().to_path_buf();
        let sources = Sources { root, files: vec!["*.txt".to_owned()], ..Default::default() };
        let corpus = Corpus::scan(&sources, Tokenizer::bytes(), None, &mut || false).unwrap();
        (dir, Arc::new(corpus))
    }

    const OWN: RowPart = RowPart { part: 0, parts: 3 };

    fn wanted(documents: usize) -> Wanted {
        let packing = PackOptions { len: 13, split: true, shuffle: Some(3) };
        Wanted {
            documents: (0..documents).collect(),
            packing,
            rows: 4,
            own: OWN,
            of_pass: None,
            counts: None,
            planner: None,
            pairs: None,
            sorted: false,
        }
    }

    #[test]
    fn batches_and_cursors_are_those_of_a_packer_from_every_cursor_on() {
        let (_dir, corpus) = corpus(9);
        let Wanted { documents, packing, rows, own, .. } = wanted(9);
        let mut packer = Packer::new(&corpus, documents, packing, Cursor::default());
        for _ in 0..30 {
            let mut loader = Loader::start(&corpus, wanted(9), packer.cursor()).unwrap().unwrap();
            let mut ahead = packer.clone();
            for _ in 0..3 {
                let (loaded, all) = (loader.take().unwrap(), ahead.batch(rows).unwrap());
                assert_eq!(loaded.own, all.part(own.of(rows)));
                assert_eq!(loaded.padding, all.padding() as u64);
                assert_eq!(loaded.places, 4 * 13);
                assert_eq!((loaded.cursor, loaded.passes), (ahead.cursor(), ahead.passes()));
            }
            packer.batch(rows).unwrap();
        }
    }

    #[test]
    fn tokens_of_steps_are_sorted_before_they_are_taken() {
        let (_dir, corpus) = corpus(9);
        let wanted = Wanted { sorted: true, ..wanted(9) };
        let mut loader = Loader::start(&corpus, wanted, Cursor::default()).unwrap().unwrap();
        for _ in 0..3 {
            let Packed { tokens, order, .. } = loader.take().unwrap().own;
            assert!(order.len() == tokens.len() && order == foveate_nn::token_order(&tokens));
        }
    }

    /// What ranks that share rows are given, beside the whole batch and a plan of it.
    #[test]
    fn tokens_and_plans_of_ranks_are_those_of_the_whole_batch() {
        let (_dir, corpus) = corpus(9);
        let of_all = (0..9).map(|i| corpus.document(i).unwrap().tokens.len() as u32).collect();
        let counts = Some(Arc::new(TokenCounts::new(of_all)));
        let mesh = Mesh::parse("shard=2,context=2", 4).unwrap();
        for mask in ["causal & document", "causal"] {
            let mut seen = [(); 4].map(|()| Vec::new());
            for (rank, seen) in seen.iter_mut().enumerate() {
                let planner = || planner_of(mesh, rank, mask);
                let own = RowPart { part: rank / 2, parts: 2 };
                let wanted =
                    Wanted { own, planner: Some(planner()), counts: counts.clone(), ..wanted(9) };
                let Wanted { documents, packing, rows, .. } = wanted.clone();
                let mut packer = Packer::new(&corpus, documents, packing, Cursor::default());
                let mut loader = Loader::start(&corpus, wanted, packer.cursor()).unwrap().unwrap();
                for _ in 0..6 {
                    let (loaded, all) = (loader.take().unwrap(), packer.batch(rows).unwrap());
                    let planned = planner().part(all.part(own.of(rows)), AllRows::of(&all));
                    let (tokens, part) = planned.unwrap();
                    assert_eq!(loaded.own, tokens);
                    let plan = loaded.context.expect("rows are shared");
                    assert_eq!(plan, part.unwrap());
                    seen.push((plan, loaded.own));
                }
                let same = seen.iter().all(|(plan, _)| plan.is_of_one_plan_with(&seen[0].0));
                assert_eq!(same, mask == "causal", "it is made again for other documents alone");
            }
            let tokens = |rank: usize, batch: usize| seen[rank][batch].1.tokens.len();
            assert!((0..6).all(|i| tokens(0, i) + tokens(1, i) == 2 * 13), "each has a part");
        }
    }

    #[test]
    fn an_error_comes_in_the_place_of_its_batch() {
        let (dir, corpus) = corpus(30);
        let mut packing = wanted(30);
        packing.packing.shuffle = None;
        // 9 bytes and one more token at the start: the last document is in a late batch.
        std::fs::write(dir.path().join("029.txt"), "changed").unwrap();
        let mut packer =
            Packer::new(&corpus, packing.documents.clone(), packing.packing, Cursor::default());
        let mut loader = Loader::start(&corpus, packing, Cursor::default()).unwrap().unwrap();
        let mut right = 0;
        let told = loop {
            match (loader.take(), packer.batch(4)) {
                (Ok(loaded), Ok(all)) => assert_eq!(loaded.own, all.part(OWN.of(4))),
                (Err(e), Err(same)) => break (e.to_string(), same.to_string()),
                (one, other) => panic!("{one:?} {other:?}"),
            }
            right += 1;
        };
        assert!(
            right > AHEAD && told.0.contains("029.txt") && told.0 == told.1,
            "{right} {told:?}"
        );
    }
}
