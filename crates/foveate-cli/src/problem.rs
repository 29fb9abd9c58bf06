//! A problem given by its sizes on the command line, and the program that is to run on it.

use foveate::mods::ModError;
use foveate::mods::text::{parse_mask, parse_score};
use foveate::{Attention, DType, Problem};
use foveate_problem::{Dropout, Spec};

use crate::captures::Captures;
use crate::failure::Failure;
use crate::limits::{Limits, Need};
use crate::number::number;

/// Which probabilities are dropped is nothing that a plan depends on.
const SEED: u64 = 0;

/// Sizes, dtype and mods.
#[derive(Debug, clap::Args)]
pub struct ProblemArgs {
    /// Query heads, or query heads/key-value heads
    #[arg(long, value_name = "HQ[/HKV]", value_parser = pair)]
    heads: Option<(usize, usize)>,
    /// Number of queries (the sum of --doc-lens when left out)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<usize>)]
    len: Option<usize>,
    /// Number of keys (as many as queries when left out)
    #[arg(long, value_name = "M", allow_negative_numbers = true, value_parser = number::<usize>)]
    kv_len: Option<usize>,
    /// Head dim, or that of queries and keys/that of values
    #[arg(long, value_name = "D[/DV]", value_parser = pair)]
    dim: Option<(usize, usize)>,
    /// Batch entries
    #[arg(long, value_name = "B", allow_negative_numbers = true, default_value_t = 1, value_parser = number::<usize>)]
    batch: usize,
    /// Element type
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = dtype)]
    pub dtype: DType,
    /// The mask, such as "causal & document"
    #[arg(long, value_name = "TEXT")]
    mask: Option<String>,
    /// The score, such as "softcap(30)"
    #[arg(long, value_name = "TEXT")]
    score: Option<String>,
    /// Chance that a probability is dropped, from 0 up to but not including 1
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    dropout: Option<f32>,
    /// Plan the backward pass too
    #[arg(long)]
    pub backward: bool,
    /// Keys and values in pages of so many keys, as a cache keeps them (forward only)
    #[arg(long, value_name = "N", allow_negative_numbers = true, conflicts_with = "backward", value_parser = number::<usize>)]
    page_size: Option<usize>,
    #[command(flatten)]
    captures: Captures,
    #[command(flatten)]
    pub limits: Limits,
}

/// `32/8`, or `32` for `32/32`.
fn pair(text: &str) -> Result<(usize, usize), String> {
    let number = |t: &str| number(t).map_err(|e| format!("`{t}`: {e}"));
    match text.split_once('/') {
        None => number(text).map(|n| (n, n)),
        Some((a, b)) => Ok((number(a)?, number(b)?)),
    }
}

fn dtype(text: &str) -> Result<DType, String> {
    let all = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F64];
    let found = all.into_iter().find(|d| d.name() == text);
    found.ok_or_else(|| "one of f32, f16, bf16, f8e4m3, f64".to_owned())
}

/// What the arguments say.
pub struct Given {
    /// Mask, score and dropout.
    pub spec: Spec,
    /// The sizes.
    pub problem: Problem,
}

impl ProblemArgs {
    /// Reads the texts and joins the sizes.
    ///
    /// # Errors
    /// When an argument is missing, a text cannot be read, or sizes do not fit together.
    pub fn read(&self) -> Result<Given, Failure> {
        let missing = |what: &str| Failure::usage(format!("{what} is missing"));
        let (heads, heads_kv) = self.heads.ok_or_else(|| missing("--heads <HQ[/HKV]>"))?;
        let (dim, dim_v) = self.dim.ok_or_else(|| missing("--dim <D[/DV]>"))?;
        let len = self
            .len
            .or(self.captures.documents_len())
            .ok_or_else(|| missing("--len").help("say how many queries: --len 4096"))?;
        let kv_len = self.kv_len.unwrap_or(len);
        let longest = len.max(kv_len);
        let ids = self.captures.id_bytes(longest, self.mask.iter().chain(&self.score));
        let need = Need { bytes: ids, seconds: 0.0 };
        self.limits.admit("the table of documents", need, "give fewer positions: --len 4096")?;
        let names = self.captures.names(longest)?.heads(heads);
        let wrong = |what: &str, text: &str, e: &ModError| {
            self.captures.hinted(text, Failure::of_text(what, e))
        };
        let mask = self
            .mask
            .as_ref()
            .map(|text| parse_mask(text, &names).map_err(|e| wrong("the mask", text, &e)));
        let score = self
            .score
            .as_ref()
            .map(|text| parse_score(text, &names).map_err(|e| wrong("the score", text, &e)));
        let (mask, score) = (mask.transpose()?, score.transpose()?);
        let q = [self.batch, heads, len, dim];
        let [k, v] = [dim, dim_v].map(|dim| [self.batch, heads_kv, kv_len, dim]);
        let problem = match self.page_size {
            None => Problem::shaped(self.dtype, q, k, v),
            Some(page_size) => Problem::shaped_in_pages(self.dtype, q, k, v, page_size),
        };
        let mut problem = problem.map_err(|e| Failure::usage(e.to_string()))?;
        if !self.backward {
            problem = problem.forward_only();
        }
        let dropout = self.dropout.map(|p| Dropout::new(p, SEED));
        let spec = Spec { mask, score, scale: None, dropout };
        spec.check().map_err(|e| Failure::usage(e.to_string()))?;
        self.captures.read_by(self.mask.iter().chain(&self.score), spec.programs())?;
        Ok(Given { spec, problem })
    }
}

impl Given {
    /// The program.
    pub fn program(&self) -> Attention {
        let Spec { mask, score, dropout, .. } = &self.spec;
        let mut program = Attention::new();
        if let Some(mask) = mask {
            program = program.mask(mask.clone());
        }
        if let Some(score) = score {
            program = program.score(score.clone());
        }
        if let Some(dropout) = dropout {
            program = program.dropout(dropout.p(), SEED);
        }
        program
    }
}
