//! What a model is: sizes in the words of a Hugging Face `config.json`, and its attention
//! program in text form.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, Serializer};

use crate::architecture::{Architecture, LayerRope};
use crate::error::NnError;

/// Layers of the deepest model that is believed: past it, a count is a typing error.
const MAX_LAYERS: usize = 10_000;

/// Sizes of a model; the fields are those of a Hugging Face Llama `config.json`, and what other
/// families have besides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward part.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; as many as query heads when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<usize>,
    /// Length of a query, key or value vector; `hidden_size / num_attention_heads` when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// What RMSNorm adds to the mean square.
    #[serde(default = "default_eps", serialize_with = "shortest")]
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    #[serde(default = "default_theta")]
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Which components of a head are rotated together.
    #[serde(default, skip_serializing_if = "RopePairing::is_half_split")]
    pub rope_pairing: RopePairing,
    /// Longest sequence the model is meant for.
    #[serde(default = "default_positions")]
    pub max_position_embeddings: usize,
    /// True when the output projection is the embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Where it differs from a Llama.
    #[serde(default, skip_serializing_if = "Architecture::is_llama")]
    pub architecture: Architecture,
}

fn default_eps() -> f32 {
    1e-6
}

/// Writes the shortest number that reads back as `x`, not the exact value of its bits.
fn shortest<S: Serializer>(x: &f32, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(x.to_string().parse().unwrap_or(f64::from(*x)))
}

fn default_theta() -> f64 {
    10_000.0
}

fn default_positions() -> usize {
    2048
}

/// What an RMSNorm adds: `out = x / √(mean(x²) + eps) · (offset + weight)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// To the mean square.
    pub eps: f32,
    /// To the weight: 0, or 1 where the weight is a distance from 1.
    pub offset: f32,
}

/// Which components of a head of dim `D` are rotated together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopePairing {
    /// `i` with `i + D/2`: Hugging Face's order.
    #[default]
    HalfSplit,
    /// `2i` with `2i + 1`: the order of Meta's original checkpoints.
    Interleaved,
}

impl RopePairing {
    fn is_half_split(&self) -> bool {
        *self == Self::HalfSplit
    }
}

/// How rotary frequencies are stretched for sequences longer than those of pretraining.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// `"llama3"`, `"linear"`, `"longrope"` or `"default"`.
    #[serde(alias = "type")]
    pub rope_type: String,
    /// By how much low frequencies are divided.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub factor: f64,
    /// llama3: wavelengths longer than `original / low_freq_factor` are divided by `factor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_freq_factor: Option<f64>,
    /// llama3: wavelengths shorter than `original / high_freq_factor` stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high_freq_factor: Option<f64>,
    /// llama3, longrope: the context length of pretraining.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original_max_position_embeddings: Option<f64>,
    /// longrope: what each frequency is divided by, up to the context length of pretraining.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub short_factor: Option<Vec<f64>>,
    /// longrope: what each frequency is divided by in longer batches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub long_factor: Option<Vec<f64>>,
    /// longrope: what cosines and sines are multiplied with; `√(1 + ln f / ln original)` when not
    /// given, f being `max_position_embeddings / original` or `factor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_factor: Option<f64>,
}

fn one() -> f64 {
    1.0
}

fn is_one(x: &f64) -> bool {
    *x == 1.0
}

impl ModelConfig {
    /// Key/value heads.
    pub fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Length of a query, key or value vector.
    pub fn dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Width of the packed projection: all query heads, all key heads, all value heads.
    pub fn qkv_width(&self) -> usize {
        (self.num_attention_heads + 2 * self.kv_heads()) * self.dim()
    }

    /// Width of all query heads together.
    pub fn attention_width(&self) -> usize {
        self.num_attention_heads * self.dim()
    }

    /// Whether GPUs compute keys and values of a layer before queries, which keys travel beside: where keys travel at
    /// all, and neither norms of heads nor tokens that are `gathered` from ranks of a layer's parts stand between the
    /// product and the keys.
    pub fn keys_first(&self, keys_travel: bool, gathered: bool) -> bool {
        keys_travel && !gathered && !self.architecture.head_norms
    }

    /// Whether what RoPE turns by depends on the longest position of a batch.
    pub fn rope_depends_on_batch(&self) -> bool {
        self.rope_scaling.as_ref().is_some_and(|scaling| scaling.rope_type == "longrope")
    }

    /// Components of a head that RoPE turns, the first ones.
    pub fn rotated(&self) -> usize {
        (self.dim() as f64 * self.architecture.rotary_share) as usize
    }

    /// What the weights of norms are added to.
    pub(crate) fn norm(&self) -> Norm {
        let offset = if self.architecture.centered_norms { 1.0 } else { 0.0 };
        Norm { eps: self.rms_norm_eps, offset }
    }

    /// What embeddings are multiplied with.
    pub(crate) fn embedding_scale(&self) -> f32 {
        if self.architecture.scaled_embedding { (self.hidden_size as f32).sqrt() } else { 1.0 }
    }

    /// Checks that a model can be made of these sizes.
    ///
    /// # Errors
    /// Names the first field that does not fit, its value and what it must be.
    pub fn validate(&self) -> Result<(), NnError> {
        self.validate_counts()?;
        self.validate_heads()?;
        self.validate_rotation()?;
        check_positive("rms_norm_eps", self.rms_norm_eps)?;
        let cap = self.architecture.logit_cap;
        cap.map_or(Ok(()), |cap| check_positive("final_logit_softcapping", cap))
    }

    fn validate_counts(&self) -> Result<(), NnError> {
        let counts = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.kv_heads()),
            ("max_position_embeddings", self.max_position_embeddings),
            ("head_dim", self.dim()),
        ];
        for (field, n) in counts {
            let most = if field == "num_hidden_layers" { MAX_LAYERS } else { i32::MAX as usize };
            if n == 0 {
                return Err(NnError::config(field, "is 0; it must be at least 1"));
            }
            if n > most {
                return Err(NnError::config(field, format!("is {n}; the limit is {most}")));
            }
        }
        Ok(())
    }

    fn validate_heads(&self) -> Result<(), NnError> {
        let (heads, kv, width) = (self.num_attention_heads, self.kv_heads(), self.qkv_width());
        if i32::try_from(width).is_err() {
            let reason =
                format!("makes queries, keys and values {width} wide; the limit is {}", i32::MAX);
            return Err(NnError::config("head_dim", reason));
        }
        if !heads.is_multiple_of(kv) {
            let reason = format!("is {kv}; it must divide num_attention_heads ({heads})");
            return Err(NnError::config("num_key_value_heads", reason));
        }
        if self.head_dim.is_none() && !self.hidden_size.is_multiple_of(heads) {
            let reason = format!(
                "is {}; num_attention_heads ({heads}) must divide it, or give head_dim",
                self.hidden_size
            );
            return Err(NnError::config("hidden_size", reason));
        }
        Ok(())
    }

    fn validate_rotation(&self) -> Result<(), NnError> {
        let (dim, rotated) = (self.dim(), self.rotated());
        let Architecture { rotary_share: share, local_rope_theta, layer_rope, .. } =
            &self.architecture;
        if !dim.is_multiple_of(2) {
            let reason = format!("is {dim}; it must be even, as RoPE rotates pairs");
            return Err(NnError::config("head_dim", reason));
        }
        if !(*share > 0.0 && *share <= 1.0) || rotated == 0 || !rotated.is_multiple_of(2) {
            let reason = format!(
                "is {share}; of heads of {dim} it must make an even number of components, at least 2"
            );
            return Err(NnError::config("partial_rotary_factor", reason));
        }
        match *local_rope_theta {
            Some(theta) => check_theta("rope_local_base_freq", theta)?,
            None if layer_rope.contains(&LayerRope::Local) => {
                let reason = "is missing; some layers turn by it";
                return Err(NnError::config("rope_local_base_freq", reason));
            }
            None => {}
        }
        check_theta("rope_theta", self.rope_theta)?;
        self.rope_scaling.as_ref().map_or(Ok(()), |scaling| scaling.validate(rotated / 2))
    }
}

fn check_positive(field: &str, value: f32) -> Result<(), NnError> {
    match value > 0.0 && value.is_finite() {
        true => Ok(()),
        false => Err(NnError::config(field, format!("is {value}; it must be positive"))),
    }
}

fn check_theta(field: &str, theta: f64) -> Result<(), NnError> {
    match theta > 1.0 && theta.is_finite() {
        true => Ok(()),
        false => Err(NnError::config(field, format!("is {theta}; it must be larger than 1"))),
    }
}

impl RopeScaling {
    fn validate(&self, pairs: usize) -> Result<(), NnError> {
        let fail = |field: &str, reason: String| {
            Err(NnError::config(format!("rope_scaling.{field}"), reason))
        };
        if !matches!(self.rope_type.as_str(), "llama3" | "linear" | "longrope" | "default") {
            let reason =
                format!("is {:?}; known are llama3, linear, longrope and default", self.rope_type);
            return fail("rope_type", reason);
        }
        if !(self.factor >= 1.0 && self.factor.is_finite()) {
            return fail("factor", format!("is {}; it must be at least 1", self.factor));
        }
        if self.rope_type == "longrope" {
            for (field, factors) in
                [("short_factor", &self.short_factor), ("long_factor", &self.long_factor)]
            {
                match factors {
                    None => return fail(field, "is missing; longrope scaling needs it".into()),
                    Some(all) if all.len() != pairs => {
                        return fail(field, format!("has {} numbers, not {pairs}", all.len()));
                    }
                    Some(all) if !all.iter().all(|f| *f > 0.0 && f.is_finite()) => {
                        return fail(field, "has a number that is not positive".into());
                    }
                    Some(_) => {}
                }
            }
            return match self.original_max_position_embeddings {
                Some(n) if n > 1.0 && n.is_finite() => Ok(()),
                Some(n) => {
                    fail("original_max_position_embeddings", format!("is {n}; it must be above 1"))
                }
                None => fail(
                    "original_max_position_embeddings",
                    "is missing; longrope scaling needs it".into(),
                ),
            };
        }
        if self.rope_type != "llama3" {
            return Ok(());
        }
        for (field, value) in [
            ("low_freq_factor", self.low_freq_factor),
            ("high_freq_factor", self.high_freq_factor),
            ("original_max_position_embeddings", self.original_max_position_embeddings),
        ] {
            match value {
                None => return fail(field, "is missing; llama3 scaling needs it".into()),
                Some(v) if !(v > 0.0 && v.is_finite()) => {
                    return fail(field, format!("is {v}; it must be positive"));
                }
                Some(_) => {}
            }
        }
        if self.low_freq_factor >= self.high_freq_factor {
            return fail("high_freq_factor", "must be larger than low_freq_factor".into());
        }
        Ok(())
    }
}

/// The attention of a model, in text form.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "WrittenAttention", untagged)]
pub enum AttentionConfig {
    /// One program for every layer.
    Uniform(ProgramConfig),
    /// Several programs.
    Pattern {
        /// Names of programs, repeated over the layers: layer `i` runs the one called
        /// `layers[i % layers.len()]`. As many names as layers give one to each.
        layers: Vec<String>,
        /// The programs by name.
        programs: BTreeMap<String, ProgramConfig>,
    },
}

impl Default for AttentionConfig {
    fn default() -> Self {
        Self::Uniform(ProgramConfig::default())
    }
}

impl From<ProgramConfig> for AttentionConfig {
    fn from(program: ProgramConfig) -> Self {
        Self::Uniform(program)
    }
}

impl AttentionConfig {
    /// The programs, with their names where they have one.
    pub fn programs(&self) -> Vec<(Option<&str>, &ProgramConfig)> {
        match self {
            Self::Uniform(program) => vec![(None, program)],
            Self::Pattern { programs, .. } => {
                programs.iter().map(|(name, program)| (Some(name.as_str()), program)).collect()
            }
        }
    }

    /// The program of a layer, and its name where it has one.
    pub fn of_layer(&self, layer: usize) -> (Option<&str>, &ProgramConfig) {
        match self {
            Self::Uniform(program) => (None, program),
            Self::Pattern { layers, programs } => {
                let name = layers[layer % layers.len()].as_str();
                (Some(name), &programs[name])
            }
        }
    }
}

/// What a query sees and what becomes of its scores, in text form.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProgramConfig {
    /// Which keys a query sees, such as `causal & document`. `document` reads the i32 buffer
    /// `doc [rows, len]` that every batch brings.
    pub mask: String,
    /// What becomes of a score, such as `softcap(30)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score: Option<String>,
    /// Float buffers that the score reads and that are trained, one of each for every layer:
    /// parameters `model.layers.N.self_attn.<name>`.
    pub learned: BTreeMap<String, LearnedBuffer>,
    /// Constant buffers that mask and score read.
    pub buffers: BTreeMap<String, BufferConfig>,
    /// Run-time scalars that mask and score read.
    pub scalars: BTreeMap<String, ScalarConfig>,
}

/// [`AttentionConfig`] as recipes and checkpoints write it.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct WrittenAttention {
    mask: String,
    score: Option<String>,
    learned: BTreeMap<String, LearnedBuffer>,
    buffers: BTreeMap<String, BufferConfig>,
    scalars: BTreeMap<String, ScalarConfig>,
    layers: Vec<String>,
    programs: BTreeMap<String, ProgramConfig>,
    /// Of recipes and checkpoints of the first trainer: how a product lay in memory. Nothing that
    /// they hold depends on it.
    #[serde(rename = "qkv_order")]
    _qkv_order: Option<OldQkvOrder>,
}

impl TryFrom<WrittenAttention> for AttentionConfig {
    type Error = String;

    fn try_from(written: WrittenAttention) -> Result<Self, String> {
        let WrittenAttention { mask, score, learned, buffers, scalars, layers, programs, .. } =
            written;
        let program = ProgramConfig { mask, score, learned, buffers, scalars };
        if layers.is_empty() && programs.is_empty() {
            return Ok(Self::Uniform(program));
        }
        if program != ProgramConfig::default() {
            let message = "a program for all layers stands beside `programs`; give it a name there";
            return Err(message.to_owned());
        }
        if layers.is_empty() {
            let known: Vec<&str> = programs.keys().map(String::as_str).collect();
            return Err(format!(
                "`layers` is missing: names of programs, repeated over the layers, such as {known:?}"
            ));
        }
        if let Some(name) = layers.iter().find(|name| !programs.contains_key(*name)) {
            let known = programs.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(format!("`layers` names `{name}`; `programs` has {known}"));
        }
        if let Some(name) = programs.keys().find(|name| !layers.contains(name)) {
            return Err(format!(
                "no layer runs the program `{name}`; name it in `layers`, or remove it"
            ));
        }
        Ok(Self::Pattern { layers, programs })
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum OldQkvOrder {
    Stacked,
    Interleaved,
}

/// A buffer that is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedBuffer {
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// Mean of its first values.
    #[serde(default)]
    pub init: f32,
    /// Standard deviation of its first values.
    #[serde(default)]
    pub std: f32,
}

/// A buffer that stays as it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BufferConfig {
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// Its elements, row-major.
    pub values: BufferValues,
}

/// Elements of one type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a list of truth values, of integers or of floats")]
pub enum BufferValues {
    /// Truth values.
    Bool(Vec<bool>),
    /// Integers.
    I32(Vec<i32>),
    /// Floats.
    F32(Vec<f32>),
}

/// The value of a run-time scalar.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a truth value, an integer or a float")]
pub enum ScalarConfig {
    /// Truth value.
    Bool(bool),
    /// Integer.
    I32(i32),
    /// Float.
    F32(f32),
}
