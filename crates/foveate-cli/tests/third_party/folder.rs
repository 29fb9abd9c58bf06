//! A checkpoint folder as other tools write them, made here from nothing but the format's
//! descriptions: of Foveate only the generator of random numbers is used.

use std::collections::BTreeMap;
use std::path::Path;

use foveate::tensor::random::Random;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

/// Ids of the special tokens, which follow the 256 bytes and the merges.
pub const BEGIN: u32 = 262;
pub const END: u32 = 263;
/// Ends a turn; a second id at which generation stops.
pub const TURN: u32 = 266;

/// Rows of the embedding: more than the tokenizer has tokens, as padded vocabularies do.
pub const VOCAB: usize = 272;

/// Sizes of a model and what its folder looks like.
#[derive(Clone, Debug)]
pub struct Sizes {
    pub hidden: usize,
    pub wide: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub tied: bool,
    pub theta: f64,
    /// `Some((factor, low, high, original))` of the scaling "llama3".
    pub llama3: Option<[f64; 4]>,
}

/// Weights by name, as the file has them: rounded to bf16, then widened.
pub type Weights = BTreeMap<String, Vec<f64>>;

fn bf16(x: f32) -> [u8; 2] {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    ((rounded >> 16) as u16).to_le_bytes()
}

fn of_bf16(bytes: [u8; 2]) -> f64 {
    f64::from(f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
}

/// Names and shapes of a Llama checkpoint.
fn tensors(s: &Sizes) -> Vec<(String, Vec<usize>)> {
    let mut all = vec![("model.embed_tokens.weight".to_owned(), vec![VOCAB, s.hidden])];
    for l in 0..s.layers {
        for (name, shape) in [
            ("input_layernorm", vec![s.hidden]),
            ("self_attn.q_proj", vec![s.heads * s.dim, s.hidden]),
            ("self_attn.k_proj", vec![s.kv_heads * s.dim, s.hidden]),
            ("self_attn.v_proj", vec![s.kv_heads * s.dim, s.hidden]),
            ("self_attn.o_proj", vec![s.hidden, s.heads * s.dim]),
            ("post_attention_layernorm", vec![s.hidden]),
            ("mlp.gate_proj", vec![s.wide, s.hidden]),
            ("mlp.up_proj", vec![s.wide, s.hidden]),
            ("mlp.down_proj", vec![s.hidden, s.wide]),
        ] {
            all.push((format!("model.layers.{l}.{name}.weight"), shape));
        }
    }
    all.push(("model.norm.weight".to_owned(), vec![s.hidden]));
    if !s.tied {
        all.push(("lm_head.weight".to_owned(), vec![VOCAB, s.hidden]));
    }
    all
}

/// A stored tensor: name, shape, bytes.
pub type Stored = (String, Vec<usize>, Vec<u8>);

/// Random weights in bf16, large enough that every part of the model shows in the loss.
pub fn random(s: &Sizes, seed: u64) -> Vec<Stored> {
    let mut random = Random::new(seed);
    let mut stored = Vec::new();
    for (name, shape) in tensors(s) {
        let norm = shape.len() == 1;
        let spread = if norm { 0.5 } else { 3.0 / (shape[1] as f32).sqrt() };
        let elems: usize = shape.iter().product();
        let value = |u: f32| if norm { 1.0 + spread * u } else { spread * u };
        let bytes = (0..elems).flat_map(|_| bf16(value(0.5 * random.signed() as f32))).collect();
        stored.push((name, shape, bytes));
    }
    stored
}

pub fn widened(stored: &[Stored]) -> Weights {
    let wide = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|b| of_bf16(*b)).collect();
    stored.iter().map(|(name, _, bytes)| (name.clone(), wide(bytes))).collect()
}

fn serialised(stored: &[Stored]) -> Vec<u8> {
    let views = stored.iter().map(|(name, shape, bytes)| {
        (name.clone(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap())
    });
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize(views, Some(metadata)).unwrap()
}

/// Writes the weights into one file.
pub fn write_single(folder: &Path, stored: &[Stored]) {
    std::fs::write(folder.join("model.safetensors"), serialised(stored)).unwrap();
}

/// Writes the weights into `shards` files and an index.
pub fn write_shards(folder: &Path, stored: &[Stored], shards: usize) {
    let mut map = serde_json::Map::new();
    let each = stored.len().div_ceil(shards);
    for (i, part) in stored.chunks(each).enumerate() {
        let name = format!("model-{:05}-of-{shards:05}.safetensors", i + 1);
        map.extend(part.iter().map(|(tensor, _, _)| (tensor.clone(), json!(name))));
        std::fs::write(folder.join(name), serialised(part)).unwrap();
    }
    let total: usize = stored.iter().map(|(_, _, bytes)| bytes.len()).sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// `config.json` with the fields that are commonly written, most of which say nothing here.
pub fn config(s: &Sizes) -> Value {
    json!({
        "_name_or_path": "someone/tiny-llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.wide,
        "is_llama_config": true,
        "max_position_embeddings": 96,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": false,
        "rope_scaling": null,
        "rope_theta": s.theta,
        "tie_word_embeddings": s.tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": true,
        "vocab_size": VOCAB
    })
}

/// The character that byte-level BPE writes for each byte.
fn byte_characters() -> Vec<char> {
    let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || b >= 174;
    let mut next = 256;
    let shown = |b: u32| {
        if printable(b) {
            return char::from_u32(b).unwrap();
        }
        next += 1;
        char::from_u32(next - 1).unwrap()
    };
    (0..256).map(shown).collect()
}

/// A byte-level BPE with six merges and five special tokens.
pub fn write_tokenizer(folder: &Path) {
    let mut vocab = serde_json::Map::new();
    for (id, c) in byte_characters().into_iter().enumerate() {
        vocab.insert(c.to_string(), json!(id));
    }
    let merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("q", "u"), ("e", "r"), ("o", "w")];
    for (i, (a, b)) in merges.iter().enumerate() {
        vocab.insert(format!("{a}{b}"), json!(256 + i));
    }
    let special = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|turn|>"];
    let added: Vec<Value> = (BEGIN..)
        .zip(special)
        .map(|(id, content)| {
            json!({ "id": id, "content": content, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": true })
        })
        .collect();
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false,
                             "trim_offsets": true, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null,
                   "continuing_subword_prefix": null, "end_of_word_suffix": null,
                   "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                   "merges": merges.map(|(a, b)| format!("{a} {b}")) }
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = "{{- bos_token -}}{%- for message in messages -%}\
                    {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|turn|>' -}}\
                    {%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}";
    let config = json!({
        "add_bos_token": true,
        "bos_token": { "__type": "AddedToken", "content": "<|begin|>", "lstrip": false },
        "eos_token": "<|end|>",
        "chat_template": template,
        "clean_up_tokenization_spaces": false,
        "model_max_length": 96,
        "tokenizer_class": "PreTrainedTokenizerFast"
    });
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}
