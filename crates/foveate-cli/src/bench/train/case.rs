//! What is measured: a model, its attention, and batches of random tokens.

use std::path::Path;

use foveate::tensor::random::Random;
use foveate_nn::{
    AttentionConfig, Batch, IGNORE, ModelConfig, ParameterState, ProgramConfig, Recompute,
};
use foveate_train::checkpoint::{self, Checksums};
use foveate_train::recipe::Recipe;
use foveate_train::tokens::BYTE_VOCAB;
use serde_json::json;

use super::{Args, recompute, word};
use crate::failure::Failure;

/// A model and how it is trained.
#[derive(Debug)]
pub struct Case {
    pub name: String,
    pub config: ModelConfig,
    pub attention: AttentionConfig,
    pub rows: usize,
    pub len: usize,
    pub accumulate: usize,
    pub documents: usize,
    pub state: Option<ParameterState>,
    recompute: Recompute,
}

/// Rows of tokens as a batch has them.
pub struct Tokens {
    rows: usize,
    len: usize,
    tokens: Vec<u32>,
    labels: Vec<i32>,
    documents: Vec<i32>,
    positions: Vec<i32>,
}

impl Case {
    pub fn of(args: &Args) -> Result<Self, Failure> {
        let published = published(&args.model);
        if published.is_some() && !args.set.is_empty() {
            return Err(Failure::usage("--set overrides a field of a recipe, but none is given")
                .help("name a recipe by --model, or leave --set out"));
        }
        let mut case = match published {
            Some(config) => Self {
                name: args.model.clone(),
                len: if args.model == "135m" { 2048 } else { 8192 },
                rows: 1,
                accumulate: 1,
                documents: args.documents,
                attention: program(causal(args.documents)),
                state: None,
                recompute: Recompute::default(),
                config,
            },
            None => Self::of_recipe(args)?,
        };
        case.len = args.len.unwrap_or(case.len);
        case.rows = args.rows.unwrap_or(case.rows);
        case.accumulate = args.accumulate.unwrap_or(case.accumulate);
        for (option, value) in
            [("len", case.len), ("rows", case.rows), ("accumulate", case.accumulate)]
        {
            if value == 0 {
                return Err(Failure::usage(format!("--{option} is 0; it must be at least 1")));
            }
        }
        if args.documents == 0 || args.documents > case.len {
            let (documents, len) = (args.documents, case.len);
            let message =
                format!("--documents is {documents}; a row of {len} tokens has 1 to {len}");
            return Err(Failure::usage(message));
        }
        let longest = case.config.max_position_embeddings;
        case.config.max_position_embeddings = longest.max(case.len);
        if args.mask.is_some() || args.score.is_some() {
            let mask = args.mask.clone().unwrap_or_else(|| causal(args.documents).to_owned());
            let score = args.score.clone();
            case.attention = ProgramConfig { mask, score, ..ProgramConfig::default() }.into();
        }
        if let Some(state) = &args.state {
            case.state = Some(word("state", state)?);
        }
        case.recompute = recompute(args)?.unwrap_or(case.recompute);
        Ok(case)
    }

    fn of_recipe(args: &Args) -> Result<Self, Failure> {
        let path = Path::new(&args.model);
        if !path.exists() {
            let message = format!("--model {}: there is no such recipe", args.model);
            return Err(Failure::usage(message).help("name a file, or one of 135m, 1b, 3b and 8b"));
        }
        let recipe = Recipe::load(path, &args.set)?;
        let wrong = |message: String| Failure::new(format!("{}: {message}", path.display()));
        let place = path.parent().unwrap_or(Path::new(""));
        let base = recipe.model.checkpoint.as_ref().map(|folder| place.join(folder));
        let read = |folder| checkpoint::read_config(folder, Checksums::Verify);
        let from = base.as_deref().map(read).transpose()?;
        let vocab = if recipe.data.tokenizer.is_some() { 0 } else { BYTE_VOCAB };
        let config = match (recipe.model_config(vocab).map_err(wrong)?, &from) {
            (Some(config), _) => config,
            (None, Some(from)) => from.model.clone(),
            (None, None) => return Err(wrong("neither sizes nor a checkpoint are given".into())),
        };
        let attention = recipe.attention.clone().or_else(|| from.map(|from| from.attention));
        Ok(Self {
            name: args.model.clone(),
            config,
            attention: attention.unwrap_or_else(|| program(causal(args.documents))),
            rows: recipe.train.batch_rows,
            len: recipe.data.len,
            accumulate: recipe.train.accumulate,
            documents: args.documents,
            state: recipe.precision.state,
            recompute: recipe.train.recomputation().unwrap_or_default().what,
        })
    }

    pub fn recompute(&self) -> Recompute {
        self.recompute
    }

    /// The masks of its programs.
    pub fn mask(&self) -> String {
        let programs = self.attention.programs().into_iter();
        programs.map(|(_, program)| program.mask.clone()).collect::<Vec<_>>().join("`, `")
    }

    /// Tokens of a step.
    pub fn tokens(&self) -> usize {
        self.rows * self.len * self.accumulate
    }

    /// Rows of random tokens, other ones for every `number`.
    pub fn batch(&self, number: usize) -> Tokens {
        let Self { rows, len, .. } = *self;
        let vocab = self.config.vocab_size;
        let mut draw = Random::stream(number as u64, 0);
        let mut batch = Tokens {
            rows,
            len,
            tokens: Vec::with_capacity(rows * len),
            labels: Vec::with_capacity(rows * len),
            documents: Vec::with_capacity(rows * len),
            positions: Vec::with_capacity(rows * len),
        };
        for starts in self.starts(number) {
            for (document, (&start, end)) in
                starts.iter().zip(starts[1..].iter().copied().chain([len])).enumerate()
            {
                for i in start..end {
                    batch.documents.push(document as i32);
                    batch.positions.push((i - start) as i32);
                    batch.tokens.push(draw.below(vocab) as u32);
                    let has_next = i + 1 < end;
                    batch.labels.push(if has_next { draw.below(vocab) as i32 } else { IGNORE });
                }
            }
        }
        batch
    }

    /// Where the documents of each row of a batch start, in order: at random, each row by a stream of its
    /// own. Peers cut theirs at those of batch 0.
    pub fn starts(&self, number: usize) -> Vec<Vec<usize>> {
        let row = |row: usize| {
            let (mut draw, mut starts) = (Random::stream(number as u64, 1 + row as u64), vec![0]);
            while starts.len() < self.documents {
                let at = draw.below(self.len);
                if let Err(place) = starts.binary_search(&at) {
                    starts.insert(place, at);
                }
            }
            starts
        };
        (0..self.rows).map(row).collect()
    }

    /// Keys that a query sees on average of a causal mask within documents, itself among them.
    pub fn causal_keys(&self) -> f64 {
        let batch = self.batch(0);
        let keys: i64 = batch.positions.iter().map(|&position| i64::from(position) + 1).sum();
        keys as f64 / batch.positions.len() as f64
    }
}

impl Tokens {
    pub fn as_batch(&self) -> Batch<'_> {
        let keys: usize = self.positions.iter().map(|&position| position as usize + 1).sum();
        Batch {
            rows: self.rows,
            len: self.len,
            tokens: &self.tokens,
            labels: &self.labels,
            documents: &self.documents,
            positions: &self.positions,
            mean_kv_len: Some(keys.div_ceil(self.positions.len())),
        }
    }
}

/// The mask of so many documents a row.
fn causal(documents: usize) -> &'static str {
    if documents > 1 { "causal & document" } else { "causal" }
}

fn program(mask: &str) -> AttentionConfig {
    ProgramConfig { mask: mask.into(), ..ProgramConfig::default() }.into()
}

/// The sizes of SmolLM-135M, Llama-3.2-1B and -3B, and Llama-3.1-8B.
fn published(name: &str) -> Option<ModelConfig> {
    let [hidden, wide, layers, heads, kv, dim, vocab] = match name {
        "135m" => [576, 1536, 30, 9, 3, 64, 49_152],
        "1b" => [2048, 8192, 16, 32, 8, 64, 128_256],
        "3b" => [3072, 8192, 28, 24, 8, 128, 128_256],
        "8b" => [4096, 14_336, 32, 32, 8, 128, 128_256],
        _ => return None,
    };
    let config = serde_json::from_value(json!({
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": if name == "135m" { 10_000.0 } else { 500_000.0 },
        "max_position_embeddings": 8192,
        "tie_word_embeddings": name != "8b",
    }));
    Some(config.expect("these are fields of a model"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_sizes_have_their_published_parameter_counts() {
        let counts =
            ["135m", "1b", "3b", "8b"].map(|name| published(name).unwrap().parameter_count());
        assert_eq!(counts, [134_515_008, 1_235_814_400, 3_212_749_824, 8_030_261_248]);
    }

    #[test]
    fn documents_fill_their_rows_and_know_no_next_token_at_their_ends() {
        let config = published("135m").unwrap();
        let attention = program("causal & document");
        let case = Case {
            name: "135m".into(),
            config,
            attention,
            rows: 3,
            len: 57,
            accumulate: 1,
            documents: 5,
            state: None,
            recompute: Recompute::None,
        };
        let tokens = case.batch(2);
        let batch = tokens.as_batch();
        batch.validate(&case.config).unwrap();
        for row in 0..3 {
            let cells = row * 57..(row + 1) * 57;
            let (documents, positions) = (&batch.documents[cells.clone()], &batch.positions[cells]);
            assert_eq!((documents[0], documents[56]), (0, 4));
            for i in 1..57 {
                let same = documents[i] == documents[i - 1];
                assert_eq!(positions[i], if same { positions[i - 1] + 1 } else { 0 });
                assert_eq!(batch.labels[row * 57 + i - 1] == IGNORE, !same);
            }
        }
        assert_ne!(case.starts(2)[0], case.starts(2)[1]);
        assert_ne!(case.starts(2), case.starts(3));
        let keys: f64 = case.batch(0).positions.iter().map(|&p| f64::from(p + 1)).sum();
        assert_eq!(case.causal_keys(), keys / 171.0);
    }
}
