//! The families of models: from a Hugging Face `config.json` to sizes, blocks and attention programs,
//! and back.
//!
//! One table says what each family has. A kind of model, a kind of layer or a field that is not known
//! is refused by its name: it would mean that the model computes something else than it was trained
//! to. Fields that say nothing about what is computed are known and passed over.

use foveate_nn::{
    Activation, Architecture, AttentionConfig, LayerRope, ModelConfig, ProgramConfig,
};
use serde_json::{Map, Value, json};

/// What sets a family apart.
struct Family {
    /// `model_type`.
    kind: &'static str,
    /// `architectures`.
    class: &'static str,
    /// Values of fields that a file may leave out: `rope_theta`, `rms_norm_eps`, `tie_word_embeddings`.
    defaults: (f64, f64, bool),
    /// `head_dim` where a file leaves it out; none is the hidden size by the heads.
    head_dim: Option<usize>,
    /// The field with the activation, and its value.
    activation: (&'static str, &'static str),
    /// Fields of its own that are read below.
    fields: &'static [&'static str],
}

const FAMILIES: [Family; 8] = [
    Family {
        kind: "llama",
        class: "LlamaForCausalLM",
        defaults: (1e4, 1e-6, false),
        head_dim: None,
        activation: ("hidden_act", "silu"),
        fields: &[],
    },
    Family {
        kind: "mistral",
        class: "MistralForCausalLM",
        defaults: (1e4, 1e-6, false),
        head_dim: None,
        activation: ("hidden_act", "silu"),
        fields: &["sliding_window"],
    },
    Family {
        kind: "qwen2",
        class: "Qwen2ForCausalLM",
        defaults: (1e4, 1e-6, false),
        head_dim: None,
        activation: ("hidden_act", "silu"),
        fields: &["sliding_window", "use_sliding_window", "max_window_layers", "layer_types"],
    },
    Family {
        kind: "qwen3",
        class: "Qwen3ForCausalLM",
        defaults: (1e4, 1e-6, false),
        head_dim: Some(128),
        activation: ("hidden_act", "silu"),
        fields: &["sliding_window", "use_sliding_window", "max_window_layers", "layer_types"],
    },
    Family {
        kind: "smollm3",
        class: "SmolLM3ForCausalLM",
        defaults: (2e6, 1e-6, true),
        head_dim: None,
        activation: ("hidden_act", "silu"),
        fields: &[
            "sliding_window",
            "use_sliding_window",
            "max_window_layers",
            "layer_types",
            "no_rope_layers",
            "no_rope_layer_interval",
        ],
    },
    Family {
        kind: "gemma2",
        class: "Gemma2ForCausalLM",
        defaults: (1e4, 1e-6, true),
        head_dim: Some(256),
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        fields: &[
            "sliding_window",
            // Published files have it beside that, and transformers reads that alone.
            "sliding_window_size",
            "layer_types",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        ],
    },
    Family {
        kind: "gemma3_text",
        class: "Gemma3ForCausalLM",
        defaults: (1e6, 1e-6, true),
        head_dim: Some(256),
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        fields: &[
            "sliding_window",
            "sliding_window_pattern",
            "layer_types",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "rope_local_base_freq",
        ],
    },
    Family {
        kind: "phi3",
        class: "Phi3ForCausalLM",
        defaults: (1e4, 1e-5, false),
        head_dim: None,
        activation: ("hidden_act", "silu"),
        fields: &["sliding_window", "partial_rotary_factor", "original_max_position_embeddings"],
    },
];

/// Fields of every family that are read, here or elsewhere.
const READ: [&str; 20] = [
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_pairing",
    "max_position_embeddings",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    super::OURS,
    "quantization_config",
];

/// Fields that say nothing about what a model computes from its weights. Others begin with `_`.
const SILENT: [&str; 23] = [
    "torch_dtype",
    "dtype",
    "transformers_version",
    "transformers.js_config",
    "use_cache",
    "cache_implementation",
    "initializer_range",
    "pad_token_id",
    "unk_token_id",
    "pretraining_tp",
    "auto_map",
    "name_or_path",
    "tokenizer_class",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "chunk_size_feed_forward",
    "is_llama_config",
    "id2label",
    "label2id",
    "max_sequence_length",
    "unsloth_fixed",
    "unsloth_version",
];

/// Fields that must have the value of a plain decoder, or none.
fn plain() -> [(&'static str, Value); 12] {
    [
        ("attention_bias", json!(false)),
        ("mlp_bias", json!(false)),
        ("attention_dropout", json!(0.0)),
        ("hidden_dropout", json!(0.0)),
        ("embd_pdrop", json!(0.0)),
        ("resid_pdrop", json!(0.0)),
        ("use_bidirectional_attention", json!(false)),
        ("rope_interleaved", json!(false)),
        ("is_encoder_decoder", json!(false)),
        ("lm_head_bias", json!(false)),
        ("full_attn_mod", json!(1)),
        ("interpolate_factor", json!(1)),
    ]
}

/// Fields of `rope_scaling` that say something to the kinds that are known.
const SCALING: [&str; 9] = [
    "rope_type",
    "type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "short_factor",
    "long_factor",
    "attention_factor",
];

/// Layers that see a window.
const SLIDING: &str = "sliding_attention";
/// Layers that see everything.
const FULL: &str = "full_attention";

fn family(kind: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.kind == kind)
}

fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| Some(a) == b.as_f64())
}

/// Sizes, blocks and attention programs of a `config.json`; or what in it is not supported.
pub(super) fn read(json: &Value) -> Result<(ModelConfig, AttentionConfig), String> {
    let Some(fields) = json.as_object() else { return Err("is not a JSON object".to_owned()) };
    let kind = fields.get("model_type").and_then(Value::as_str).unwrap_or("llama");
    let Some(family) = family(kind) else {
        let known: Vec<&str> = FAMILIES.iter().map(|family| family.kind).collect();
        return Err(format!("model_type is `{kind}`, which is not known; {}", known.join(", ")));
    };
    refuse_unknown(family, fields)?;
    let sizes = with_plain_rope(family, fields.clone());
    let field = Fields { fields: &sizes };
    let mut model: ModelConfig = serde_json::from_value(Value::Object(sizes.clone()))
        .map_err(|e| format!("does not describe a {kind} model: {e}"))?;
    model.architecture = architecture(family, &field, model.num_hidden_layers)?;
    model.validate().map_err(|e| e.to_string())?;
    let attention = attention(family, &field, &model)?;
    Ok((model, attention))
}

fn refuse_unknown(family: &Family, fields: &Map<String, Value>) -> Result<(), String> {
    let (activation, name) = family.activation;
    let plain = plain();
    for (key, value) in fields {
        let says_nothing = value.is_null() || *value == json!(false) || key.starts_with('_');
        let key = key.as_str();
        // Gemma's older files have the activation under both names, of which this one counts.
        if key == activation || (key == "hidden_act" && !fields.contains_key(activation)) {
            if !value.is_null() && *value != json!(name) {
                return Err(format!(
                    "{key} is {value}, which is not supported; it must be {name:?}"
                ));
            }
        } else if let Some((_, want)) = plain.iter().find(|(plain, _)| *plain == key) {
            if !value.is_null() && !same(value, want) {
                return Err(format!("{key} is {value}, which is not supported; it must be {want}"));
            }
        } else if key == "quantization_config" && !value.is_null() {
            let why = "its weights are quantised; give a checkpoint in bf16, f16 or f32";
            return Err(format!("has a quantization_config: {why}"));
        } else if !(says_nothing
            || key == "hidden_act"
            || READ.contains(&key)
            || SILENT.contains(&key)
            || family.fields.contains(&key))
        {
            return Err(format!(
                "field `{key}` is not known for model_type `{}`, and could change what the model \
                 computes; remove it if it does not",
                family.kind
            ));
        }
    }
    Ok(())
}

/// Fields under the names of sizes.
struct Fields<'a> {
    fields: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    fn number(&self, key: &str) -> Result<Option<f64>, String> {
        let wrong = |value: &Value| format!("{key} is {value}; it must be a number");
        self.get(key).map(|value| value.as_f64().ok_or_else(|| wrong(value))).transpose()
    }

    fn count(&self, key: &str) -> Result<Option<usize>, String> {
        let wrong =
            |value: &Value| format!("{key} is {value}; it must be a whole number from 1 on");
        let count = |value: &Value| {
            let count = value.as_u64().and_then(|n| usize::try_from(n).ok());
            count.filter(|&n| n > 0).ok_or_else(|| wrong(value))
        };
        self.get(key).map(count).transpose()
    }

    fn says(&self, key: &str) -> bool {
        self.get(key).and_then(Value::as_bool).unwrap_or(false)
    }
}

fn architecture(
    family: &Family,
    field: &Fields<'_>,
    layers: usize,
) -> Result<Architecture, String> {
    let plain = Architecture { family: family.kind.to_owned(), ..Architecture::default() };
    let gemma = Architecture {
        output_norms: true,
        centered_norms: true,
        activation: Activation::Gelu,
        scaled_embedding: true,
        ..plain.clone()
    };
    let logit_cap = || field.number("final_logit_softcapping");
    Ok(match family.kind {
        "qwen2" => Architecture { qkv_bias: true, ..plain },
        "qwen3" => Architecture { head_norms: true, ..plain },
        "smollm3" => {
            let turns = no_rope_layers(field, layers)?;
            let rope = |turns: bool| if turns { LayerRope::Global } else { LayerRope::None };
            Architecture { layer_rope: turns.into_iter().map(rope).collect(), ..plain }
        }
        "gemma2" => {
            let given = field.fields.contains_key("final_logit_softcapping");
            let cap = if given { logit_cap()? } else { Some(30.0) };
            Architecture { logit_cap: cap.map(|cap| cap as f32), ..gemma }
        }
        "gemma3_text" => {
            let kinds = layer_types(family, field, layers)?;
            let rope = |kind: &String| match kind.as_str() {
                SLIDING => LayerRope::Local,
                _ => LayerRope::Global,
            };
            Architecture {
                head_norms: true,
                logit_cap: logit_cap()?.map(|cap| cap as f32),
                local_rope_theta: Some(field.number("rope_local_base_freq")?.unwrap_or(1e4)),
                layer_rope: kinds.iter().map(rope).collect(),
                ..gemma
            }
        }
        "phi3" => Architecture {
            packed_weights: true,
            rotary_share: field.number("partial_rotary_factor")?.unwrap_or(1.0),
            ..plain
        },
        _ => plain,
    })
}

/// Whether each layer turns queries and keys.
fn no_rope_layers(field: &Fields<'_>, layers: usize) -> Result<Vec<bool>, String> {
    const KEY: &str = "no_rope_layers";
    let Some(given) = field.get(KEY) else {
        let every = field.count("no_rope_layer_interval")?.unwrap_or(4);
        return Ok((1..=layers).map(|layer| layer % every != 0).collect());
    };
    let turns: Option<Vec<bool>> = given.as_array().and_then(|all| {
        let turns = |value: &Value| match value.as_u64() {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => None,
        };
        all.iter().take(layers).map(turns).collect()
    });
    turns
        .filter(|turns| turns.len() == layers)
        .ok_or_else(|| format!("{KEY} is {given}; it must have 0 or 1 for each of {layers} layers"))
}

/// The kind of each layer.
fn layer_types(family: &Family, field: &Fields<'_>, layers: usize) -> Result<Vec<String>, String> {
    const KEY: &str = "layer_types";
    if let Some(given) = field.get(KEY) {
        let all: Option<Vec<String>> = given
            .as_array()
            .and_then(|all| all.iter().map(|v| v.as_str().map(str::to_owned)).collect());
        let Some(all) = all.filter(|all| all.len() == layers) else {
            return Err(format!("{KEY} must name a kind for each of {layers} layers"));
        };
        return match all.iter().find(|kind| ![SLIDING, FULL].contains(&kind.as_str())) {
            Some(kind) => {
                Err(format!("{KEY} has `{kind}`, which is not known; {FULL} and {SLIDING} are"))
            }
            None => Ok(all),
        };
    }
    let uses = field.says("use_sliding_window") && field.get("sliding_window").is_some();
    let first = field.number("max_window_layers")?.unwrap_or(28.0) as usize;
    let every = field.count("sliding_window_pattern")?.unwrap_or(6);
    let turns = match family.kind {
        "smollm3" => no_rope_layers(field, layers)?,
        _ => Vec::new(),
    };
    let slides = |layer: usize| match family.kind {
        "mistral" | "phi3" => window(family, field).is_ok_and(|window| window.is_some()),
        "qwen2" | "qwen3" => uses && layer >= first,
        "smollm3" => uses && !turns[layer],
        "gemma2" => layer.is_multiple_of(2),
        "gemma3_text" => !(layer + 1).is_multiple_of(every),
        _ => false,
    };
    Ok((0..layers).map(|layer| if slides(layer) { SLIDING } else { FULL }.to_owned()).collect())
}

/// The window of layers that have one. Where a file says nothing of it, transformers has one all the same; null is none.
fn window(family: &Family, field: &Fields<'_>) -> Result<Option<usize>, String> {
    const KEY: &str = "sliding_window";
    let usual = match family.kind {
        "mistral" if !field.fields.contains_key(KEY) => Some(4096),
        "gemma2" | "gemma3_text" => Some(4096),
        _ => None,
    };
    Ok(field.count(KEY)?.or(usual))
}

fn attention(
    family: &Family,
    field: &Fields<'_>,
    model: &ModelConfig,
) -> Result<AttentionConfig, String> {
    let kinds = layer_types(family, field, model.num_hidden_layers)?;
    let gemma = matches!(family.kind, "gemma2" | "gemma3_text");
    let usual = (family.kind == "gemma2").then_some(50.0);
    let cap = match field.fields.contains_key("attn_logit_softcapping") {
        true => field.number("attn_logit_softcapping")?,
        false => usual,
    };
    if let Some(cap) = cap
        && !(cap > 0.0 && cap.is_finite())
    {
        return Err(format!("attn_logit_softcapping is {cap}; it must be positive"));
    }
    let mut score = Vec::new();
    if gemma {
        let scalar = field.number("query_pre_attn_scalar")?.unwrap_or(256.0);
        if !(scalar > 0.0 && scalar.is_finite()) {
            return Err(format!("query_pre_attn_scalar is {scalar}; it must be positive"));
        }
        // Scores come divided by the root of the head's length.
        let factor = (model.dim() as f64 / scalar).sqrt() as f32;
        if factor != 1.0 {
            score.push(format!("score * {factor:?}"));
        }
    }
    score.extend(cap.map(|cap| format!("softcap({:?})", cap as f32)));
    let score = (!score.is_empty()).then(|| score.join(" then "));
    let window = window(family, field)?;
    let program = |kind: &str| match (kind, window) {
        (SLIDING, Some(window)) => Ok(ProgramConfig {
            mask: format!("causal & document & window({}, 0)", window - 1),
            score: score.clone(),
            ..ProgramConfig::default()
        }),
        (SLIDING, None) => Err(format!("sliding_window is missing; layers of {SLIDING} need it")),
        _ => Ok(ProgramConfig {
            mask: "causal & document".to_owned(),
            score: score.clone(),
            ..ProgramConfig::default()
        }),
    };
    if kinds.iter().all(|kind| *kind == kinds[0]) {
        return Ok(program(&kinds[0])?.into());
    }
    let programs = [SLIDING, FULL].map(|kind| Ok((kind.to_owned(), program(kind)?)));
    let programs = programs.into_iter().collect::<Result<_, String>>()?;
    Ok(AttentionConfig::Pattern { layers: kinds, programs })
}

/// The fields with all that says something of rotations under the older names, and what the family
/// does not let a file leave out. Newer files hold rotations in `rope_parameters`, one for every kind
/// of layer where they differ; some give the kind of scaling as `type` and as `rope_type`.
fn with_plain_rope(family: &Family, mut map: Map<String, Value>) -> Map<String, Value> {
    if let Some(Value::Object(mut rope)) = map.remove("rope_parameters") {
        if let Some(Value::Object(full)) = rope.remove(FULL) {
            let local = rope.get(SLIDING).and_then(|local| local.get("rope_theta"));
            if let Some(theta) = local {
                map.insert("rope_local_base_freq".to_owned(), theta.clone());
            }
            rope = full;
        }
        for key in ["rope_theta", "partial_rotary_factor"] {
            if let Some(value) = rope.remove(key) {
                map.insert(key.to_owned(), value);
            }
        }
        map.insert("rope_scaling".to_owned(), Value::Object(rope));
    }
    let original = map.get("original_max_position_embeddings").cloned();
    if let Some(Value::Object(rope)) = map.get_mut("rope_scaling") {
        let newer = rope.contains_key("rope_type");
        rope.retain(|key, _| SCALING.contains(&key.as_str()) && !(newer && key == "type"));
        for key in ["type", "rope_type"] {
            // Earlier names of it.
            if rope.get(key).is_some_and(|kind| *kind == json!("su") || *kind == json!("yarn"))
                && family.kind == "phi3"
            {
                rope.insert(key.to_owned(), json!("longrope"));
            }
        }
        if let Some(original) = original {
            rope.entry("original_max_position_embeddings").or_insert(original);
        }
        if rope.is_empty() {
            map.remove("rope_scaling");
        }
    }
    let (theta, eps, tied) = family.defaults;
    for (key, value) in [
        ("rope_theta", json!(theta)),
        ("rms_norm_eps", json!(eps)),
        ("tie_word_embeddings", json!(tied)),
    ] {
        map.entry(key).or_insert(value);
    }
    if let Some(dim) = family.head_dim {
        map.entry("head_dim").or_insert(json!(dim));
    }
    map
}

/// What `config.json` says of `model` besides its sizes.
pub(super) fn written(model: &ModelConfig) -> Map<String, Value> {
    let architecture = &model.architecture;
    let family = family(&architecture.family).unwrap_or(&FAMILIES[0]);
    let (activation, name) = family.activation;
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| map.insert(key.to_owned(), value);
    put("architectures", json!([family.class]));
    put("model_type", json!(family.kind));
    put(activation, json!(name));
    if family.kind == "llama" {
        put("attention_bias", json!(false));
        put("mlp_bias", json!(false));
    }
    if architecture.logit_cap.is_some() || family.fields.contains(&"final_logit_softcapping") {
        put("final_logit_softcapping", json!(architecture.logit_cap));
    }
    if let Some(theta) = architecture.local_rope_theta {
        put("rope_local_base_freq", json!(theta));
    }
    if family.kind == "phi3" {
        put("partial_rotary_factor", json!(architecture.rotary_share));
        let original = model.rope_scaling.as_ref().and_then(|s| s.original_max_position_embeddings);
        if let Some(original) = original {
            put("original_max_position_embeddings", json!(original as u64));
        }
    }
    if family.kind == "smollm3" {
        let turns = |&rope: &LayerRope| u8::from(rope != LayerRope::None);
        let turns: Vec<u8> = architecture.layer_rope.iter().map(turns).collect();
        put("no_rope_layers", json!(turns));
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a file of a family with these fields besides its sizes is read as.
    fn of(family: &str, fields: Value) -> Result<(ModelConfig, String), String> {
        let mut all = json!({
            "model_type": family, "vocab_size": 9, "hidden_size": 16, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 2
        });
        all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (model, attention) = read(&all)?;
        Ok((model, attention.of_layer(0).1.mask.clone()))
    }

    /// Of microsoft/Phi-4-mini-instruct, google/gemma-2-9b-it, huggyllama/llama-7b and mirrors of unsloth.
    #[test]
    fn fields_that_published_files_have_beside_others_are_known() {
        let phi = json!({ "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": false,
            "partial_rotary_factor": 0.75, "sliding_window": 262_144 });
        let (model, mask) = of("phi3", phi).unwrap();
        assert_eq!((model.rotated(), &*mask), (6, "causal & document & window(262143, 0)"));
        let told = of("phi3", json!({ "full_attn_mod": 2 })).unwrap_err();
        assert_eq!(told, "full_attn_mod is 2, which is not supported; it must be 1");
        let gemma = json!({ "sliding_window": 64, "sliding_window_size": 64 });
        assert_eq!(of("gemma2", gemma).unwrap().1, "causal & document & window(63, 0)");
        let llama = json!({ "unsloth_fixed": true, "unsloth_version": "2025.1", "max_sequence_length": 2048 });
        assert_eq!(of("llama", llama).unwrap(), of("llama", json!({})).unwrap());
    }

    #[test]
    fn a_window_that_a_file_does_not_name_is_that_of_transformers() {
        let mask = |fields: Value| of("mistral", fields).unwrap().1;
        assert_eq!(mask(json!({})), "causal & document & window(4095, 0)");
        assert_eq!(mask(json!({ "sliding_window": null })), "causal & document");
        assert_eq!(of("phi3", json!({})).unwrap().1, "causal & document");
    }
}
