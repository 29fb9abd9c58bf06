//! Text to tokens and back: bytes by default, a `tokenizers` JSON file otherwise.
//!
//! Every token remembers the byte at which it starts, so that a span of text (an assistant's turn) can be
//! labelled after the whole document was tokenised in one piece, as at inference time.
//!
//! Which tokens open and close a text is the tokenizer's own rule, so that a text has the tokens it had when the
//! model was made: what a `tokenizer_config.json` says as `add_bos_token` and `add_eos_token`, and where it says
//! nothing what the post-processor of the `tokenizer.json` adds. Recipes and commands may say otherwise.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::error::TrainError;
use crate::whole;

/// The byte tokenizer's one special token: it opens and closes every document.
pub const DOCUMENT: u32 = 256;

/// The byte tokenizer's vocabulary: 256 bytes and [`DOCUMENT`].
pub const BYTE_VOCAB: usize = 257;

/// Memory of a tokenizer for each text in its file, tokens and both sides of merges, while it is read: 136 to
/// 154 bytes of byte-pair vocabularies of 32,000 to 128,000 tokens.
const TEXT_BYTES: u64 = 145;

/// Bytes that the tokenizer of a file takes once it is read, about; 0 where there is no such file.
pub fn memory_of(file: &Path) -> u64 {
    let quotes = |bytes: Vec<u8>| bytes.iter().filter(|&&byte| byte == b'"').count() as u64;
    whole::read(file).map_or(0, |bytes| quotes(bytes) / 2 * TEXT_BYTES)
}

/// Tokens of one text, each with the byte offset of its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tokens {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Where in the text each token starts, in bytes.
    pub starts: Vec<usize>,
}

/// Whether the tokens that begin and end a text are added to it; `None` follows the rule of before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// The token that begins a text.
    pub bos: Option<bool>,
    /// The token that ends it.
    pub eos: Option<bool>,
}

/// Turns text into tokens and back.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    kind: Kind,
    /// Begins a text, as the model has it.
    bos: Option<u32>,
    /// Ends a text, as the model has it.
    eos: Option<u32>,
    /// All that end a text or a turn.
    stops: Vec<u32>,
    /// What was said of both ends, by whoever said it last.
    said: Ends,
    /// What stands before a text.
    opening: Vec<u32>,
    /// What stands after it.
    closing: Vec<u32>,
}

#[derive(Clone, Debug)]
enum Kind {
    Bytes,
    /// Shared by clones: a vocabulary takes tens of MiB.
    Json {
        tokenizer: Arc<tokenizers::Tokenizer>,
        path: PathBuf,
        /// XXH3 of the file.
        fingerprint: u64,
    },
}

impl Tokenizer {
    /// One token a byte, and [`DOCUMENT`] at both ends.
    pub fn bytes() -> Self {
        let (document, ends) = (Some(DOCUMENT), vec![DOCUMENT]);
        Self {
            kind: Kind::Bytes,
            bos: document,
            eos: document,
            stops: ends.clone(),
            said: Ends::default(),
            opening: ends.clone(),
            closing: ends,
        }
    }

    /// The tokenizer in a `tokenizer.json`, with the model's begin and end tokens where it has them. What it adds to
    /// a text is what its post-processor does.
    ///
    /// # Errors
    /// If the file is missing or is not a tokenizer.
    pub fn from_file(path: &Path, bos: Option<u32>, eos: Option<u32>) -> Result<Self, TrainError> {
        let bytes = whole::read(path)
            .map_err(|e| TrainError::data(path, None, format!("could not be read: {e}")))?;
        let (empty, fingerprint) = (bytes.trim_ascii().is_empty(), xxh3_64(&bytes));
        let tokenizer = tokenizers::Tokenizer::from_bytes(bytes).and_then(whole_texts);
        let tokenizer = tokenizer.map_err(|e| {
            let is = match empty {
                true => "is empty".to_owned(),
                false => {
                    format!("is not a tokenizer JSON file: {}", of_unknown_kind(&e.to_string()))
                }
            };
            let message = format!("{is}; put the model's own tokenizer.json there");
            TrainError::data(path, None, message)
        })?;
        let [plain, whole] = [false, true].map(|special| {
            let encoding = tokenizer.encode("a", special);
            encoding.map(|e| e.get_ids().to_vec()).unwrap_or_default()
        });
        let at = whole.windows(plain.len().max(1)).position(|part| part == plain);
        let (opening, closing) = match at {
            Some(at) => (whole[..at].to_vec(), whole[at + plain.len()..].to_vec()),
            None => (Vec::new(), Vec::new()),
        };
        let (tokenizer, path) = (Arc::new(tokenizer), path.to_path_buf());
        let kind = Kind::Json { tokenizer, path, fingerprint };
        let (stops, said) = (eos.into_iter().collect(), Ends::default());
        Ok(Self { kind, bos, eos, stops, said, opening, closing })
    }

    /// The same tokenizer, with the tokens of these texts to begin and to end a text where it has none; texts that
    /// are no tokens (the empty one) change nothing.
    pub fn or_ends(mut self, opening: &str, closing: &str) -> Self {
        if let Kind::Json { tokenizer, .. } = &self.kind {
            self.bos = self.bos.or_else(|| tokenizer.token_to_id(opening));
            self.eos = self.eos.or_else(|| tokenizer.token_to_id(closing));
        }
        let eos = self.eos;
        self.and_stops(eos)
    }

    /// The same tokenizer, with more tokens at which a text or a turn ends.
    pub fn and_stops(mut self, stops: impl IntoIterator<Item = u32>) -> Self {
        for stop in stops {
            if !self.stops.contains(&stop) {
                self.stops.push(stop);
            }
        }
        self
    }

    /// The same tokenizer, which adds what `ends` says.
    ///
    /// # Errors
    /// If a token is to be added that the tokenizer does not have.
    pub fn adding(mut self, ends: Ends) -> Result<Self, TrainError> {
        let Self { kind, opening, closing, bos, eos, said, .. } = &mut self;
        for (add, token, side, kept, key) in [
            (ends.bos, *bos, opening, &mut said.bos, "bos_token"),
            (ends.eos, *eos, closing, &mut said.eos, "eos_token"),
        ] {
            match (add, token) {
                (None, _) => continue,
                (Some(false), _) => side.clear(),
                (Some(true), Some(token)) => *side = vec![token],
                (Some(true), None) => {
                    let file = kind.place();
                    let message = format!(
                        "add_{key} is true, but the tokenizer has no such token; name it as {key} \
                         in the tokenizer_config.json beside it"
                    );
                    return Err(TrainError::data(file, None, message));
                }
            }
            *kept = add;
        }
        Ok(self)
    }

    /// The file it came from; none for bytes.
    pub fn path(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::Json { path, .. } => Some(path),
        }
    }

    /// A hash of all that decides which tokens a text has.
    pub(crate) fn fingerprint(&self) -> u64 {
        let Self { kind, bos, eos, stops, said, opening, closing } = self;
        let file = match kind {
            Kind::Bytes => None,
            Kind::Json { fingerprint, .. } => Some(fingerprint),
        };
        let rules = format!("{file:?} {bos:?} {eos:?} {stops:?} {said:?} {opening:?} {closing:?}");
        xxh3_64(rules.as_bytes())
    }

    /// What was said of the ends besides the post-processor.
    pub fn said(&self) -> Ends {
        self.said
    }

    /// The tokens before a text.
    pub fn opening(&self) -> &[u32] {
        &self.opening
    }

    /// The tokens after a text.
    pub fn closing(&self) -> &[u32] {
        &self.closing
    }

    /// All tokens that end a text or a turn.
    pub fn stops(&self) -> &[u32] {
        &self.stops
    }

    /// Puts what opens a text before the tokens of one that does not begin with it already, as one that a template
    /// wrote may do. Returns how many tokens were put there.
    pub fn open(&self, tokens: &mut Vec<u32>) -> usize {
        if tokens.starts_with(&self.opening) {
            return 0;
        }
        tokens.splice(..0, self.opening.iter().copied());
        self.opening.len()
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

    /// The number of ids without added tokens, of which a tokenizer may have more than its model: one that several
    /// models share has those of all.
    pub fn own_vocab_size(&self) -> usize {
        match &self.kind {
            Kind::Bytes => BYTE_VOCAB,
            Kind::Json { tokenizer, .. } => tokenizer.get_vocab_size(false),
        }
    }

    /// The token that begins a text, as the model has it, whether it is added or not.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, as the model has it, whether it is added or not.
    pub fn eos(&self) -> Option<u32> {
        self.eos
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

    /// One token for people: its text, or its name where it is a special token.
    pub fn text_of(&self, id: u32) -> String {
        match &self.kind {
            Kind::Bytes => match u8::try_from(id) {
                Ok(byte) => String::from_utf8_lossy(&[byte]).into_owned(),
                Err(_) => "<document>".to_owned(),
            },
            Kind::Json { tokenizer, .. } => {
                tokenizer.decode(&[id], false).ok().unwrap_or_else(|| format!("<{id}>"))
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

impl Tokenizer {
    /// The text of `ids` behind that of `before`, as [`Self::decode`]: with the space that it begins with there, which
    /// some tokenizers leave out at the beginning of a text.
    ///
    /// # Errors
    /// Those of [`Self::decode`].
    pub fn decode_behind(&self, before: &[u32], ids: &[u32]) -> Result<String, TrainError> {
        let (first, all) = (self.decode(before)?, self.decode(&[before, ids].concat())?);
        match all.strip_prefix(&first) {
            Some(text) => Ok(text.to_owned()),
            // Tokens of one character stand on both sides.
            None => self.decode(ids),
        }
    }
}

/// A tokenizer that gives all tokens of a text and no others: files keep to what length texts were cut and padded where
/// they were last used.
fn whole_texts(mut tokenizer: tokenizers::Tokenizer) -> tokenizers::Result<tokenizers::Tokenizer> {
    tokenizer.with_truncation(None)?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

/// A message of the reader, which names types of its own for a part of a kind that is not known.
fn of_unknown_kind(message: &str) -> String {
    let place = message.find(" at line ").map_or("", |at| &message[at..]);
    match ["untagged enum", "struct ", "enum "].iter().any(|word| message.contains(word)) {
        true => format!("a part is of a kind that is not known{place}"),
        false => message.to_owned(),
    }
}

impl Kind {
    /// Where it comes from, for errors.
    fn place(&self) -> &Path {
        match self {
            Self::Bytes => Path::new("the byte tokenizer"),
            Self::Json { path, .. } => path,
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
            error
                .contains("tokenizer.json: is not a tokenizer JSON file: a part is of a kind that")
                && error.contains(" at line 1 column 12; put the model's own"),
            "{error}"
        );
    }

    /// A tokenizer of words, whose post-processor is `post`.
    fn words(post: serde_json::Value) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        let vocab = serde_json::json!({ "a": 0, "b": 1, "<s>": 2, "</s>": 3 });
        let model = serde_json::json!({ "type": "WordLevel", "vocab": vocab, "unk_token": "a" });
        let split = serde_json::json!({ "type": "Whitespace" });
        let file = serde_json::json!({
            "version": "1.0", "model": model, "pre_tokenizer": split, "post_processor": post
        });
        std::fs::write(&path, file.to_string()).unwrap();
        (dir, path)
    }

    #[test]
    fn a_text_goes_on_with_the_space_that_its_first_word_has() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        let vocab = serde_json::json!({ "<unk>": 0, "▁the": 1, "▁fox": 2, "es": 3, "<s>": 4 });
        let model =
            serde_json::json!({ "type": "WordLevel", "vocab": vocab, "unk_token": "<unk>" });
        let space = serde_json::json!({
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true
        });
        let special = serde_json::json!([{ "id": 4, "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true }]);
        let file = serde_json::json!({ "version": "1.0", "model": model, "pre_tokenizer": space,
            "decoder": space, "added_tokens": special });
        std::fs::write(&path, file.to_string()).unwrap();
        let tokenizer = Tokenizer::from_file(&path, None, None).unwrap();
        assert_eq!(tokenizer.decode(&[2, 1]).unwrap(), "fox the");
        for (before, text) in
            [(&[][..], "fox"), (&[4], "fox"), (&[1], " fox"), (&[4, 1, 2], " fox")]
        {
            assert_eq!(tokenizer.decode_behind(before, &[2]).unwrap(), text, "{before:?}");
        }
        assert_eq!(tokenizer.decode_behind(&[1, 2], &[3]).unwrap(), "es");
        // Half of a character, and its other half.
        let half = Tokenizer::bytes().decode_behind(&[0xc3], &[0xa9, 0x61]).unwrap();
        assert_eq!(half, "\u{fffd}a");
    }

    #[test]
    fn texts_are_neither_cut_nor_padded_to_the_length_that_a_file_was_last_used_with() {
        let (_dir, path) = words(serde_json::Value::Null);
        let mut file: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let (strategy, direction) = ("LongestFirst", "Right");
        file["truncation"] = serde_json::json!({
            "max_length": 4, "stride": 0, "strategy": strategy, "direction": direction
        });
        file["padding"] = serde_json::json!({
            "strategy": { "Fixed": 4 }, "direction": direction, "pad_to_multiple_of": null,
            "pad_id": 1, "pad_type_id": 0, "pad_token": "b"
        });
        std::fs::write(&path, file.to_string()).unwrap();
        let tokenizer = Tokenizer::from_file(&path, None, None).unwrap();
        let tokens = |text: &str| tokenizer.encode(text).unwrap().ids;
        assert_eq!((tokens("a b a b a b"), tokens("b")), (vec![0, 1, 0, 1, 0, 1], vec![1]));
        assert_eq!((tokenizer.opening(), tokenizer.closing()), (&[][..], &[][..]));
    }

    #[test]
    fn what_opens_and_closes_a_text_is_the_tokenizers_rule_or_what_is_said() {
        let token = |id: &str| serde_json::json!({ "SpecialToken": { "id": id, "type_id": 0 } });
        let sequence = serde_json::json!({ "Sequence": { "id": "A", "type_id": 0 } });
        let special = serde_json::json!({ "<s>": { "id": "<s>", "ids": [2], "tokens": ["<s>"] } });
        let begins = serde_json::json!({
            "type": "TemplateProcessing", "single": [token("<s>"), sequence],
            "pair": [token("<s>"), sequence, sequence], "special_tokens": special
        });
        let ends = |t: &Tokenizer| (t.opening().to_vec(), t.closing().to_vec());
        let (_dir, path) = words(begins);
        let llama = Tokenizer::from_file(&path, None, None).unwrap().or_ends("<s>", "</s>");
        assert_eq!(ends(&llama), (vec![2], vec![]));
        let said = |bos, eos| ends(&llama.clone().adding(Ends { bos, eos }).unwrap());
        assert_eq!(said(Some(false), None), (vec![], vec![]));
        assert_eq!(said(None, Some(true)), (vec![2], vec![3]));
        let (_dir, path) = words(serde_json::Value::Null);
        let plain = Tokenizer::from_file(&path, None, None).unwrap();
        assert_eq!(ends(&plain), (vec![], vec![]));
        let told = plain.adding(Ends { bos: Some(true), eos: None }).unwrap_err().to_string();
        assert!(told.contains("tokenizer.json: add_bos_token is true, but"), "{told}");
        let mut tokens = vec![0, 1];
        assert_eq!((llama.open(&mut tokens), llama.open(&mut tokens)), (1, 0));
        assert_eq!(tokens, [2, 0, 1]);
    }
}
