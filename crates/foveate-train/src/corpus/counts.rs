//! The numbers of tokens of all documents: where each row begins, without the texts before it.
//!
//! Where a row begins depends on the lengths of all documents before it. With these numbers a rank
//! finds its rows by addition, and reads and tokenises no others. Counting takes a pass over all texts, so
//! the numbers are kept in a file, under a fingerprint of all that decides them: the documents' bytes,
//! tokenizer, chat template, and the version of this program.
//!
//! The file is `counts-FINGERPRINT.bin`: [`MAGIC`], the number of documents (8 bytes), a count for each (4 bytes),
//! and an XXH3 checksum of all before it (8 bytes); little-endian. A file that is damaged or of other
//! documents is no error: the documents are counted again.

use std::fs;
use std::path::Path;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::Corpus;
use crate::error::TrainError;
use crate::whole;

/// How such a file begins.
const MAGIC: &[u8; 8] = b"FVTCNT01";

/// How many tokens each document of a corpus has, in its order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TokenCounts(Vec<u32>);

impl TokenCounts {
    /// Counts that were made in the order of the documents.
    pub fn new(counts: Vec<u32>) -> Self {
        Self(counts)
    }

    /// Those of documents that follow one another.
    pub fn concat(parts: &[Self]) -> Self {
        Self(parts.iter().flat_map(|part| &part.0).copied().collect())
    }

    /// Documents that were counted.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Tokens of the document of this index.
    pub fn of(&self, document: usize) -> usize {
        self.0[document] as usize
    }

    /// Those of a corpus that are kept in `folder`; none where there is no such file, or not a whole one.
    pub fn read(folder: &Path, corpus: &Corpus) -> Option<Self> {
        let bytes = fs::read(folder.join(name(corpus))).ok()?;
        let (body, sum) = bytes.split_last_chunk()?;
        let body = (u64::from_le_bytes(*sum) == xxh3_64(body)).then_some(body)?;
        let (documents, counts) = body.strip_prefix(MAGIC)?.split_first_chunk()?;
        let counts = Self::from_bytes(counts)?;
        let all = u64::from_le_bytes(*documents) == corpus.len() as u64;
        (all && counts.0.len() == corpus.len()).then_some(counts)
    }

    /// Keeps them in `folder`, which is made, in the place of those that were there.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, folder: &Path, corpus: &Corpus) -> Result<(), TrainError> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend((self.0.len() as u64).to_le_bytes());
        bytes.extend(self.to_bytes());
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        fs::create_dir_all(folder).map_err(|e| TrainError::write(folder, e))?;
        let path = folder.join(name(corpus));
        whole::replace(&path, &bytes)?;
        let is_old = |name: &str| name.starts_with("counts-") && name.ends_with(".bin");
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.path() != path && entry.file_name().to_str().is_some_and(is_old) {
                fs::remove_file(entry.path()).map_err(|e| TrainError::write(&entry.path(), e))?;
            }
        }
        Ok(())
    }

    /// What ranks send each other.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|count| count.to_le_bytes()).collect()
    }

    /// What was sent; none where it is cut short.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (counts, rest) = bytes.as_chunks();
        rest.is_empty()
            .then(|| Self(counts.iter().map(|&count| u32::from_le_bytes(count)).collect()))
    }
}

/// The name of a corpus's file.
fn name(corpus: &Corpus) -> String {
    let mut all = Xxh3::new();
    all.update(env!("CARGO_PKG_VERSION").as_bytes());
    let template = corpus.template.as_ref().map_or(0, |template| template.fingerprint());
    for part in [corpus.fingerprint(), corpus.tokenizer.fingerprint(), template] {
        all.update(&part.to_le_bytes());
    }
    format!("counts-{:016x}.bin", all.digest())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{folder, scan, sources};
    use super::*;
    use crate::tokens::{Ends, Tokenizer};

    fn counted(corpus: &Corpus) -> TokenCounts {
        let count = |i| corpus.document(i).unwrap().tokens.len() as u32;
        TokenCounts::new((0..corpus.len()).map(count).collect())
    }

    #[test]
    fn counts_are_read_again_for_the_same_documents_and_tokenizer_alone() {
        let dir = folder(&[("a.txt", b"abc"), ("b.txt", b"defgh")]);
        let corpus = scan(&sources(&dir, &["*.txt"])).unwrap();
        let (counts, cache) = (counted(&corpus), dir.path().join("cache"));
        assert_eq!((counts.of(0), counts.of(1)), (5, 7));
        assert_eq!(TokenCounts::read(&cache, &corpus), None);
        counts.write(&cache, &corpus).unwrap();
        assert_eq!(TokenCounts::read(&cache, &corpus), Some(counts));
        let ends = Ends { bos: Some(false), eos: None };
        let tokenizer = Tokenizer::bytes().adding(ends).unwrap();
        let other = Corpus { tokenizer, ..corpus.clone() };
        assert_eq!(TokenCounts::read(&cache, &other), None);
        fs::write(dir.path().join("b.txt"), "defgi").unwrap();
        let changed = scan(&sources(&dir, &["*.txt"])).unwrap();
        assert_eq!(TokenCounts::read(&cache, &changed), None);
    }

    #[test]
    fn a_file_that_is_damaged_or_cut_short_anywhere_is_not_believed() {
        let dir = folder(&[("a.txt", b"abc"), ("b.txt", b"defgh")]);
        let corpus = scan(&sources(&dir, &["*.txt"])).unwrap();
        let cache = dir.path().join("cache");
        counted(&corpus).write(&cache, &corpus).unwrap();
        let file = cache.join(name(&corpus));
        let whole = fs::read(&file).unwrap();
        for at in 0..whole.len() {
            fs::write(&file, &whole[..at]).unwrap();
            assert_eq!(TokenCounts::read(&cache, &corpus), None, "cut at {at}");
            let mut flipped = whole.clone();
            flipped[at] ^= 1;
            fs::write(&file, flipped).unwrap();
            assert_eq!(TokenCounts::read(&cache, &corpus), None, "flipped at {at}");
        }
    }
}
