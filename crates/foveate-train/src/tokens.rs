//! Text to tokens and back: bytes by default, a `tokenizers` JSON file otherwise.
//!
//! Every token remembers the byte at which it starts, so that a span of text (an assistant's turn) can be
//! labelled after the whole document was tokenised in one piece, as at inference time.

use std::path::{Path, PathBuf};

use crate::error::TrainError;

/// The byte tokenizer's one special token: it opens and closes every document.
pub const DOCUMENT: u32 = 256;

/// The byte tokenizer's vocabulary: 256 bytes and [`DOCUMENT`].
pub const BYTE_VOCAB: usize = 257;

/// Tokens of one text, each with the byte offset of its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tokens {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Where in the text each token starts, in bytes.
    pub starts: Vec<usize>,
}

/// Turns text into tokens and back.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Bytes,
    Json {
        tokenizer: Box<tokenizers::Tokenizer>,
        path: PathBuf,
        bos: Option<u32>,
        eos: Option<u32>,
    },
}

impl Tokenizer {
    /// One token a byte, and [`DOCUMENT`].
    pub fn bytes() -> Self {
        Self { kind: Kind::Bytes }
    }

    /// The tokenizer in a `tokenizer.json`, with the model's begin and end tokens where it has them.
    ///
    /// # Errors
    /// If the file is missing or is not a tokenizer.
    pub fn from_file(path: &Path, bos: Option<u32>, eos: Option<u32>) -> Result<Self, TrainError> {
        let tokenizer = tokenizers::Tokenizer::from_file(path).map_err(|e| {
            TrainError::data(path, None, format!("is not a tokenizer JSON file: {e}"))
        })?;
        Ok(Self {
            kind: Kind::Json { tokenizer: Box::new(tokenizer), path: path.to_path_buf(), bos, eos },
        })
    }

    /// The same tokenizer, with the tokens of these texts to open and to close a document where
    /// it has none; texts that are no tokens (the empty one) change nothing.
    pub fn or_ends(mut self, opening: &str, closing: &str) -> Self {
        if let Kind::Json { tokenizer, bos, eos, .. } = &mut self.kind {
            *bos = bos.or_else(|| tokenizer.token_to_id(opening));
            *eos = eos.or_else(|| tokenizer.token_to_id(closing));
        }
        self
    }

    /// The file it came from; none for bytes.
    pub fn path(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::Json { path, .. } => Some(path),
        }
    }

    /// Whether a token is a byte, so that a loss per token is a loss per byte.
    pub fn is_bytes(&self) -> bool {
        matches!(self.kind, Kind::Bytes)
    }

    /// The number of ids, added tokens included.
    pub fn vocab_size(&self) -> usize {
        match &self.kind {
            Kind::Bytes => BYTE_VOCAB,
            Kind::Json { tokenizer, .. } => tokenizer.get_vocab_size(true),
        }
    }

    /// The token that opens a document.
    pub fn bos(&self) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => Some(DOCUMENT),
            Kind::Json { bos, .. } => *bos,
        }
    }

    /// The token that closes a document.
    pub fn eos(&self) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => Some(DOCUMENT),
            Kind::Json { eos, .. } => *eos,
        }
    }

    /// The tokens of `text`, no special tokens added.
    ///
    /// # Errors
    /// If the tokenizer's own pipeline fails.
    pub fn encode(&self, text: &str) -> Result<Tokens, TrainError> {
        match &self.kind {
            Kind::Bytes => Ok(Tokens {
                ids: text.bytes().map(u32::from).collect(),
                starts: (0..text.len()).collect(),
            }),
            Kind::Json { tokenizer, path, .. } => {
                let encoding = tokenizer.encode(text, false).map_err(|e| {
                    TrainError::data(path, None, format!("the tokenizer failed: {e}"))
                })?;
                Ok(Tokens {
                    ids: encoding.get_ids().to_vec(),
                    starts: encoding.get_offsets().iter().map(|&(start, _)| start).collect(),
                })
            }
        }
    }

    /// The text of `ids`; special tokens leave no trace and broken UTF-8 becomes the replacement character.
    ///
    /// # Errors
    /// If the tokenizer's own pipeline fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TrainError> {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::Json { tokenizer, path, .. } => tokenizer
                .decode(ids, true)
                .map_err(|e| TrainError::data(path, None, format!("the tokenizer failed: {e}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_as_they_were_and_the_document_token_leaves_no_trace() {
        let tokenizer = Tokenizer::bytes();
        let text = "fn main() { /* ∂score */ }\n";
        let tokens = tokenizer.encode(text).unwrap();
        assert_eq!(tokens.ids.len(), text.len());
        let mut framed = vec![DOCUMENT];
        framed.extend(&tokens.ids);
        framed.push(DOCUMENT);
        assert_eq!(tokenizer.decode(&framed).unwrap(), text);
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, "{\"model\": 3}").unwrap();
        let error = Tokenizer::from_file(&path, None, None).unwrap_err().to_string();
        assert!(
            error.contains("tokenizer.json") && error.contains("is not a tokenizer"),
            "{error}"
        );
    }
}
