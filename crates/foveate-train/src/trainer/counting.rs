//! Counting the documents' tokens, all ranks together.

use rayon::prelude::*;

use super::Observer;
use crate::corpus::{Corpus, TokenCounts};
use crate::error::{TrainError, TrainErrorKind};
use crate::ranks::Ranks;

/// Documents of a block at most.
const DOCUMENTS: usize = 1024;

/// Bytes of a block, about.
const BYTES: usize = 4 << 20;

/// The numbers of tokens of all documents, which every rank gets. A round gives each rank a block of documents to
/// read and tokenise, so that none waits for another for longer than a block takes.
///
/// # Errors
/// If a document cannot be read, or the observer of a rank ends the run: on all ranks.
pub(super) fn count(
    ranks: Ranks<'_>,
    corpus: &Corpus,
    observer: &mut dyn Observer,
) -> Result<TokenCounts, TrainError> {
    let mut all = Vec::with_capacity(corpus.len());
    let mut next = 0;
    while next < corpus.len() {
        observer.counting(next, corpus.len());
        let blocks: Vec<_> = (0..ranks.count())
            .map(|_| {
                let block = block(corpus, next);
                next = block.end;
                block
            })
            .collect();
        let interrupted = observer.interrupted();
        let own = match interrupted {
            true => Err(TrainErrorKind::Interrupted.into()),
            false => {
                blocks[ranks.rank()].clone().into_par_iter().map(|i| tokens(corpus, i)).collect()
            }
        };
        let own = TokenCounts::new(ranks.together(own)?);
        for (rank, bytes) in ranks.all(&own.to_bytes())?.iter().enumerate() {
            let some =
                TokenCounts::from_bytes(bytes).filter(|some| some.len() == blocks[rank].len());
            let some = some.ok_or_else(|| TrainErrorKind::Ranks {
                lost: false,
                message: format!("rank {rank} has not counted the documents that were its part"),
            })?;
            all.push(some);
        }
    }
    observer.counting(next, corpus.len());
    Ok(TokenCounts::concat(&all))
}

fn tokens(corpus: &Corpus, document: usize) -> Result<u32, TrainError> {
    // At most 1 GiB of text, so that a token a byte and those at the ends are fewer than 2³².
    corpus.document(document).map(|d| u32::try_from(d.tokens.len()).expect("a document is bounded"))
}

/// The documents from `first` on that are counted at once.
fn block(corpus: &Corpus, first: usize) -> std::ops::Range<usize> {
    let (mut end, mut bytes) = (first, 0);
    while end < corpus.len() && end - first < DOCUMENTS && bytes < BYTES {
        bytes += corpus.bytes(end);
        end += 1;
    }
    first..end
}
