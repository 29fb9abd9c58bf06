//! What a case file says.
//!
//! A file is a list of `[[case]]` tables. A case with `grid` stands for the product of the lists
//! in it, one with `variants` for each table of the list; both override keys of the case, and the
//! values chosen are appended to its name.

use std::collections::BTreeMap;
use std::path::Path;

use foveate::Positions;
use foveate_mods::expr::{kv, q};
use foveate_mods::text::{Names, parse_mask, parse_score};
use foveate_mods::{Buffer, DynExpr, Expr, Leaf, MaskMod, ModError, ScalarValue, ScoreMod};
use foveate_problem::{Dropout, Spec};
use foveate_reference::{NotFinite, Rule};
use foveate_tensor::DType;
use serde::Deserialize;
use toml::{Table, Value};

use crate::data::{Random, buffer};
use crate::given::Given;

/// A case file that cannot be read, or a case that says something impossible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {message}")]
pub struct CaseError {
    at: String,
    message: String,
}

impl CaseError {
    pub(crate) fn new(at: impl Into<String>, message: impl ToString) -> Self {
        Self { at: at.into(), message: message.to_string() }
    }
}

/// One problem, and why it is in the corpus.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// A sentence, unique in the corpus.
    pub name: String,
    /// What it guards against.
    pub why: String,
    /// Batch entries (1 for packed sequences).
    #[serde(default = "one")]
    pub batch: usize,
    /// Query heads and key/value heads.
    pub heads: [usize; 2],
    /// Rows of queries and of keys; of packed operands without the tail.
    pub len: [usize; 2],
    /// Length of query/key vectors and of value vectors.
    pub dim: [usize; 2],
    /// `f32`, `f16` or `bf16`.
    pub dtype: String,
    /// See [`crate::data::place`].
    #[serde(default = "bshd")]
    pub layout: String,
    /// Text form; absent means every key.
    pub mask: Option<String>,
    /// Text form; absent leaves scores as they are.
    pub score: Option<String>,
    /// Captured buffers by name.
    #[serde(default)]
    pub buffers: BTreeMap<String, BufferSpec>,
    /// Run-time scalars by name: integers are i32, numbers with a point f32.
    #[serde(default)]
    pub scalars: BTreeMap<String, Value>,
    /// Factor on `q·k`.
    pub scale: Option<f32>,
    /// A sink logit for each query head.
    #[serde(default)]
    pub sink: Sink,
    /// Probability of dropping an entry.
    pub dropout: Option<f32>,
    /// Lengths of packed sequences; their sums are at most `len`.
    pub varlen: Option<Lengths>,
    /// Rows after the last sequence.
    #[serde(default)]
    pub tail: usize,
    /// Keys and values lie in pages of so many rows, in no order; forward only.
    pub pages: Option<usize>,
    /// Number of keys of each batch entry in pages, at most that of `len`; that of `len` if absent.
    pub key_lens: Option<Vec<usize>>,
    /// The loss depends on `lse` too.
    #[serde(default)]
    pub d_lse: bool,
    /// k and v have one batch entry that all of q's share.
    #[serde(default)]
    pub shared_kv: bool,
    /// Global position of row 0 of q and of k.
    #[serde(default)]
    pub offsets: [i32; 2],
    /// Global position of each row of q; `offsets` is 0 then.
    pub q_map: Option<Vec<i32>>,
    /// Global position of each row of k and v.
    pub kv_map: Option<Vec<i32>>,
    /// Gradients are added to what the destinations hold.
    #[serde(default)]
    pub accumulate: bool,
    /// Dtype of dq, dk and dv when it is not that of the operands.
    pub gradients: Option<String>,
    /// Factor on the random operands, 1 if absent.
    pub magnitude: Option<f64>,
    /// Numbers put into operands after the random fill.
    #[serde(default)]
    pub set: Vec<Given>,
    /// Gradients may be infinite or NaN where gold is not, too; see [`NotFinite::Kept`].
    #[serde(default)]
    pub spreads: bool,
    /// The score goes through something like tanh: factor 3 on the largest error of half types.
    #[serde(default)]
    pub tanh_like: bool,
}

/// Sink logits.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Sink {
    /// None, or random ones.
    Random(bool),
    /// One for each query head.
    Given(Vec<f32>),
}

impl Default for Sink {
    fn default() -> Self {
        Self::Random(false)
    }
}

/// Lengths of packed sequences.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lengths {
    /// Of queries.
    pub q: Vec<usize>,
    /// Of keys.
    pub k: Vec<usize>,
}

/// A captured buffer: what is in it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BufferSpec {
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// Integers given one by one, row-major.
    pub ints: Option<Vec<i32>>,
    /// Floats given one by one, row-major; `nan` and `inf` are legal.
    pub floats: Option<Vec<f32>>,
    /// Document ids: document `i` has length `doc_lens[i]`; the last one takes the rest of the
    /// last axis. The same for every other axis.
    pub doc_lens: Option<Vec<usize>>,
    /// Random integers below this.
    pub below: Option<i32>,
    /// Random floats in `±normal`.
    pub normal: Option<f32>,
    /// Random truth values, true with this probability.
    pub chance: Option<f64>,
    /// Receives a gradient.
    #[serde(default)]
    pub learned: bool,
}

fn one() -> usize {
    1
}

fn bshd() -> String {
    "bshd".to_owned()
}

impl Case {
    /// The dtype of the operands.
    ///
    /// # Errors
    /// When it is none of `f32`, `f16`, `bf16`.
    pub fn dtype(&self) -> Result<DType, CaseError> {
        dtype(&self.name, &self.dtype)
    }

    /// The dtype of dq, dk and dv.
    ///
    /// # Errors
    /// When it is none of `f32`, `f16`, `bf16`.
    pub fn gradient_dtype(&self) -> Result<DType, CaseError> {
        dtype(&self.name, self.gradients.as_ref().unwrap_or(&self.dtype))
    }

    /// The sink logits, random ones from `random`.
    pub(crate) fn sinks(&self, random: &mut Random) -> Option<Vec<f32>> {
        match &self.sink {
            Sink::Random(false) => None,
            Sink::Random(true) => {
                Some((0..self.heads[0]).map(|_| random.normal() as f32).collect())
            }
            Sink::Given(values) => Some(values.clone()),
        }
    }

    /// The rule its results are held to.
    pub fn rule(&self) -> Rule {
        if self.tanh_like { Rule::TanhLike } else { Rule::Plain }
    }

    /// What its gradients may do with numbers that are not finite.
    pub fn not_finite(&self) -> NotFinite {
        if self.spreads { NotFinite::Kept } else { NotFinite::Same }
    }

    /// Where its random data starts: a hash of the name, so that no other case changes it.
    pub fn seed(&self) -> u64 {
        let hash = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
        self.name.bytes().fold(0xcbf2_9ce4_8422_2325, hash)
    }

    /// The program, its buffers filled from `random`, in global positions and in local ones.
    ///
    /// # Errors
    /// When a text does not parse or a buffer cannot be made.
    pub fn question(&self, random: &mut Random) -> Result<Question, CaseError> {
        let fail = |e: &dyn std::fmt::Display| CaseError::new(&self.name, e);
        let mut names = Names::new().heads(self.heads[0]);
        for (name, spec) in &self.buffers {
            names = names.buffer(&buffer(&self.name, name, spec, random)?);
        }
        for (name, value) in &self.scalars {
            names = match value {
                Value::Integer(i) => {
                    let i = i32::try_from(*i);
                    let i = i.map_err(|e| fail(&format!("scalar `{name}`: {e}")))?;
                    names.scalar(name, ScalarValue::I32(i))
                }
                Value::Float(x) => names.scalar(name, ScalarValue::F32(*x as f32)),
                Value::Boolean(x) => names.scalar(name, ScalarValue::Bool(*x)),
                other => return Err(fail(&format!("scalar `{name}` is {other}, not a number"))),
            };
        }
        let mask = self.mask.as_ref().map(|text| parse_mask(text, &names)).transpose();
        let score = self.score.as_ref().map(|text| parse_score(text, &names)).transpose();
        let (mask, score) = (mask.map_err(|e| fail(&e))?, score.map_err(|e| fail(&e))?);
        let dropout = self.dropout.map(|p| Dropout::new(p, self.seed()));
        let global = Spec { mask, score, scale: self.scale, dropout };
        let local = self.local(&global).map_err(|e| fail(&e))?;
        let seed = self.seed();
        Ok(Question { global, local, positions: self.positions(), seed })
    }

    fn positions(&self) -> [Positions; 2] {
        let of = |map: &Option<Vec<i32>>, offset, name| match map {
            Some(map) => Positions::Map(Buffer::vector(name, map.clone())),
            None if offset != 0 => Positions::offset(offset),
            None => Positions::Rows,
        };
        let [q, kv] = self.offsets;
        [of(&self.q_map, q, "q_map"), of(&self.kv_map, kv, "kv_map")]
    }

    /// `global` with rows for positions: offsets are constants here, not run-time scalars as in
    /// the crate `foveate`, which does this for its users.
    fn local(&self, global: &Spec) -> Result<Spec, ModError> {
        let [q_offset, kv_offset] = self.offsets;
        let place = |map: &Option<Vec<i32>>, name, row: Expr<i32>, offset| match map {
            Some(map) => Buffer::vector(name, map.clone()).at([row]),
            None => row + offset,
        };
        let at = |leaf: Leaf| match leaf {
            Leaf::Q => place(&self.q_map, "q_map", q(), q_offset).dynamic().clone(),
            Leaf::Kv => place(&self.kv_map, "kv_map", kv(), kv_offset).dynamic().clone(),
            other => DynExpr::leaf(other),
        };
        let mask = |m: &MaskMod| MaskMod::new(m.at(&at).dynamic());
        let score = |s: &ScoreMod| ScoreMod::new(s.at(&at).dynamic());
        Ok(Spec {
            mask: global.mask.as_ref().map(mask).transpose()?,
            score: global.score.as_ref().map(score).transpose()?,
            scale: global.scale,
            dropout: global.dropout.as_ref().map(|d| d.map(mask)).transpose()?,
        })
    }
}

/// What a backend is asked.
#[derive(Clone, Debug)]
pub struct Question {
    /// The program in global positions.
    pub global: Spec,
    /// Where the rows of q, and those of k and v, stand.
    pub positions: [Positions; 2],
    /// The same program in rows: what stands below the crate `foveate` takes.
    pub local: Spec,
    /// Seed of the dropout.
    pub seed: u64,
}

fn dtype(at: &str, name: &str) -> Result<DType, CaseError> {
    let known = [DType::F32, DType::F16, DType::BF16];
    known
        .into_iter()
        .find(|d| d.name() == name)
        .ok_or_else(|| CaseError::new(at, format!("dtype `{name}`; a case takes f32, f16 or bf16")))
}

/// The cases of every `.toml` file in `folder`, in the order of file names.
///
/// # Errors
/// When a file cannot be read, a key is unknown or ill-typed, or two cases have one name or say
/// the same.
pub fn load(folder: &Path) -> Result<Vec<Case>, CaseError> {
    let at = folder.display().to_string();
    let entries = std::fs::read_dir(folder).map_err(|e| CaseError::new(&at, e))?;
    let mut files: Vec<_> = entries.filter_map(|e| e.ok().map(|e| e.path())).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "toml"));
    files.sort();
    let mut seen: BTreeMap<String, String> = BTreeMap::new();
    let mut cases = Vec::new();
    for file in files {
        let at = file.display().to_string();
        let text = std::fs::read_to_string(&file).map_err(|e| CaseError::new(&at, e))?;
        for (case, content) in expanded(&at, &text)? {
            if let Some(other) = seen.insert(content, case.name.clone()) {
                let message = format!("`{}` says the same as `{other}`", case.name);
                return Err(CaseError::new(at, message));
            }
            cases.push(case);
        }
    }
    let mut names: Vec<&str> = cases.iter().map(|c| c.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|w| w[0] == w[1]) {
        None => Ok(cases),
        Some(w) => Err(CaseError::new(at, format!("two cases are called `{}`", w[0]))),
    }
}

/// The cases of one file's text.
///
/// # Errors
/// When the text is not TOML, or a key is unknown, missing or ill-typed.
pub fn parse(at: &str, text: &str) -> Result<Vec<Case>, CaseError> {
    Ok(expanded(at, text)?.into_iter().map(|(case, _)| case).collect())
}

/// Each case with its content but for name and reason, to tell cases apart by.
fn expanded(at: &str, text: &str) -> Result<Vec<(Case, String)>, CaseError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        case: Vec<Table>,
    }
    let file: File = toml::from_str(text).map_err(|e| CaseError::new(at, e))?;
    let mut cases = Vec::new();
    for mut table in file.case {
        let name = table.get("name").and_then(Value::as_str).unwrap_or("a case without name");
        let here = format!("{at}, `{name}`");
        let fail = |e: &dyn std::fmt::Display| CaseError::new(&here, e);
        let grid: Table = take(&mut table, "grid").map_err(|e| fail(&e))?.unwrap_or_default();
        let variants: Option<Vec<Table>> = take(&mut table, "variants").map_err(|e| fail(&e))?;
        let mut tables: Vec<Table> = match variants {
            None => vec![table],
            Some(all) => all.into_iter().map(|v| overridden(&table, v)).collect(),
        };
        for (key, values) in grid {
            let Value::Array(values) = values else {
                return Err(fail(&format!("grid key `{key}` is not a list")));
            };
            let with = |t: &Table, v: &Value| {
                let mut over = Table::new();
                over.insert("name".into(), format!("{key} {}", plain(v)).into());
                over.insert(key.clone(), v.clone());
                overridden(t, over)
            };
            tables = tables.iter().flat_map(|t| values.iter().map(move |v| with(t, v))).collect();
        }
        for table in tables {
            let mut content = table.clone();
            content.remove("name");
            content.remove("why");
            let case = Case::deserialize(Value::Table(table)).map_err(|e| fail(&e))?;
            cases.push((case, content.to_string()));
        }
    }
    Ok(cases)
}

fn take<T: for<'a> Deserialize<'a>>(
    table: &mut Table,
    key: &str,
) -> Result<Option<T>, toml::de::Error> {
    table.remove(key).map(T::deserialize).transpose()
}

/// `table` with the keys of `over`; its name is appended.
fn overridden(table: &Table, over: Table) -> Table {
    let mut table = table.clone();
    for (key, value) in over {
        let value = match (key.as_str(), table.get("name").and_then(Value::as_str)) {
            ("name", Some(name)) => format!("{name}: {}", plain(&value)).into(),
            _ => value,
        };
        table.insert(key, value);
    }
    table
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(s) => s.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join("/"),
        other => other.to_string(),
    }
}
