//! What a checkpoint says about itself, all but its weights: `config.json` with the sizes, the
//! tokenizer and the chat template. Written by us or by other tools, some of which use newer
//! names or let several tokens end a text.

use std::path::{Path, PathBuf};

use foveate_nn::{AttentionConfig, Blocks, ModelConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    CHAT_TEMPLATE, CONFIG, Checksums, OURS, Snapshot, families, latest, read_json, unreadable,
};
use crate::chat::{ChatTemplate, DEFAULT_TEMPLATE};
use crate::error::TrainError;
use crate::tokens::{Ends, Tokenizer};
use crate::whole;

pub(super) const GENERATION: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// What `config.json` says about Foveate's own things.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Extra {
    attention: AttentionConfig,
    /// `bytes`, or `file` for the `tokenizer.json` beside it.
    tokenizer: String,
    /// Whether the token that begins a text is added, where the recipe said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    add_bos_token: Option<bool>,
    /// The same of the token that ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    add_eos_token: Option<bool>,
}

/// The `config.json` of a snapshot. Fields of the checkpoint it started from stay where we have
/// none of that name, the tokens that begin and end a text always.
pub(super) fn config_json<B: Blocks>(snapshot: &Snapshot<'_, B>) -> Result<Value, TrainError> {
    let tokenizer = snapshot.tokenizer;
    let mut map = match snapshot.origin.map(|folder| read_json(&folder.join(CONFIG))) {
        Some(Ok(Value::Object(map))) => map,
        Some(Err(e)) => return Err(e),
        _ => Map::new(),
    };
    // Written anew below, under the names that every version of the format has.
    for renamed in ["dtype", "rope_parameters", "rope_scaling", "rope_theta"] {
        map.remove(renamed);
    }
    map.entry("bos_token_id").or_insert(tokenizer.bos().into());
    map.entry("eos_token_id").or_insert(tokenizer.eos().into());
    let model = snapshot.model.config();
    let dtype = snapshot.dtype.torch_name();
    let mut sizes = serde_json::to_value(model).expect("plain numbers");
    // The fields of the family say it.
    sizes.as_object_mut().expect("a struct").remove("architecture");
    if let Some(Value::Object(scaling)) = sizes.get_mut("rope_scaling") {
        as_others_read(scaling);
    }
    let ours = Value::Object(families::written(model));
    let extra = Extra {
        attention: snapshot.attention.clone(),
        tokenizer: if tokenizer.is_bytes() { "bytes" } else { "file" }.to_owned(),
        add_bos_token: tokenizer.said().bos,
        add_eos_token: tokenizer.said().eos,
    };
    for part in [ours, sizes, json!({ "torch_dtype": dtype, OURS: extra })] {
        let Value::Object(part) = part else { unreachable!("each part is an object") };
        map.extend(part);
    }
    Ok(Value::Object(map))
}

/// A scaling of rotations with what transformers has to have of it: the factor where it is 1 too, and a length that
/// is whole.
fn as_others_read(scaling: &mut Map<String, Value>) {
    if matches!(scaling["rope_type"].as_str(), Some("linear" | "llama3")) {
        scaling.entry("factor").or_insert(json!(1.0));
    }
    if let Some(original) = scaling.get_mut("original_max_position_embeddings")
        && let Some(length) = original.as_f64().filter(|length| length.fract() == 0.0)
    {
        *original = json!(length as u64);
    }
}

/// What a checkpoint says about itself: all but its weights.
#[derive(Clone, Debug)]
pub struct CheckpointConfig {
    /// Its folder.
    pub folder: PathBuf,
    /// Sizes.
    pub model: ModelConfig,
    /// The attention programs; those of the family where the checkpoint is not one of ours.
    pub attention: AttentionConfig,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Source of the chat template, where the checkpoint brings one.
    pub chat_template: Option<String>,
    /// Texts of the tokens that begin and end a text, which templates print themselves.
    pub special: SpecialTexts,
}

/// Texts of special tokens; empty where there is none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpecialTexts {
    /// Begins a text.
    pub bos: String,
    /// Ends a text.
    pub eos: String,
}

impl SpecialTexts {
    fn of(tokenizer_config: &Value) -> Self {
        // A special token is its text, or an object with `content`.
        let text = |key: &str| {
            let token = tokenizer_config.get(key);
            let text = token.and_then(|token| token.get("content").unwrap_or(token).as_str());
            text.unwrap_or_default().to_owned()
        };
        Self { bos: text("bos_token"), eos: text("eos_token") }
    }

    /// These, with `others` in the place of those that are empty.
    pub(crate) fn or(self, others: Self) -> Self {
        let first = |own: String, other| if own.is_empty() { other } else { own };
        Self { bos: first(self.bos, others.bos), eos: first(self.eos, others.eos) }
    }
}

impl CheckpointConfig {
    /// The checkpoint's chat template, or the plain one.
    ///
    /// # Errors
    /// When the template is not valid, with its line.
    pub fn template(&self) -> Result<ChatTemplate, TrainError> {
        let source = self.chat_template.as_deref().unwrap_or(DEFAULT_TEMPLATE);
        ChatTemplate::new(source, &self.folder, &self.special.bos, &self.special.eos)
    }
}

fn read_json_if_there(path: &Path) -> Result<Value, TrainError> {
    if path.exists() { read_json(path) } else { Ok(Value::Null) }
}

/// The token ids of a field that holds one, a list, or nothing.
fn ids(json: &Value, key: &str) -> Vec<u32> {
    let value = json.get(key).unwrap_or(&Value::Null);
    let all = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    all.iter().filter_map(|v| v.as_u64()?.try_into().ok()).collect()
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

/// What stands where the folder of a checkpoint is expected, and what to do, if it is none.
fn no_folder(path: &Path) -> Option<String> {
    const LAYOUT: &str = "config.json, *.safetensors and tokenizer.json";
    let remedy = format!(
        "which is not read; give the folder of the model in Hugging Face's layout ({LAYOUT}) that it was \
         converted from"
    );
    if path.is_dir() {
        let mut entries = path.read_dir().into_iter().flatten().flatten();
        let gguf = (!path.join(CONFIG).exists()).then(|| entries.find(|e| is_gguf(&e.path())));
        let name = gguf.flatten()?.file_name();
        return Some(format!("holds a GGUF file, {}, {remedy}", name.display()));
    }
    if path.is_file() {
        return Some(match is_gguf(path) {
            true => format!("is a GGUF file, {remedy}"),
            false => format!("is a file; give the folder that holds it ({LAYOUT})"),
        });
    }
    if path.exists() {
        return Some(format!("is no folder; give the folder of a checkpoint ({LAYOUT})"));
    }
    let text = path.to_str().unwrap_or_default();
    let part = |part: &str| !part.is_empty() && !matches!(part, "." | "..");
    let hub = text.split_once('/').is_some_and(|(owner, name)| {
        part(owner) && part(name) && !name.contains('/') && !Path::new(owner).is_dir()
    });
    Some(match hub {
        true => format!(
            "is no folder here, and nothing is downloaded; if it is a name on the Hugging Face hub, \
             run `hf download {text} --local-dir {name}` and give {name}",
            name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default()
        ),
        false => format!("does not exist; give the folder of a checkpoint ({LAYOUT})"),
    })
}

/// Makes sure that a folder is that of a checkpoint, as far as its files' names say.
///
/// # Errors
/// When it is a file, the name of a model that is elsewhere, or the folder of a run, which holds some.
pub(super) fn expect_checkpoint(folder: &Path) -> Result<(), TrainError> {
    no_folder(folder).map_or(Ok(()), |why| Err(TrainError::checkpoint(folder, why)))?;
    let newest = || latest(&folder.join("checkpoints")).or_else(|| latest(folder));
    let newest = (!folder.join(CONFIG).exists()).then(newest).flatten();
    newest.map_or(Ok(()), |newest| {
        let message = format!("is no checkpoint; the newest one in it is {}", newest.display());
        Err(TrainError::checkpoint(folder, message))
    })
}

/// What `config.json` alone says of a checkpoint.
#[derive(Clone, Debug)]
pub struct CheckpointSizes {
    /// Sizes.
    pub model: ModelConfig,
    /// The attention programs; those of the family where the checkpoint is not one of ours.
    pub attention: AttentionConfig,
    /// Where its tokenizer is expected; none where tokens are bytes.
    pub tokenizer: Option<PathBuf>,
    json: Value,
    extra: Option<Extra>,
}

/// Reads `config.json` of a Hugging Face checkpoint, ours included, which is held to its checksum. Neither weights nor
/// a tokenizer need be there.
///
/// # Errors
/// When it is missing or damaged, or the model is of a family that is not known, or has a field that is not known.
pub fn read_sizes(folder: &Path, checksums: Checksums) -> Result<CheckpointSizes, TrainError> {
    expect_checkpoint(folder)?;
    let path = folder.join(CONFIG);
    checksums.of(folder)?;
    let json = read_json(&path)?;
    let fail = |message: String| Err(TrainError::checkpoint(&path, message));
    let (model, attention) = families::read(&json).map_err(|e| TrainError::checkpoint(&path, e))?;
    let extra: Option<Extra> = match json.get(OURS).cloned().map(serde_json::from_value) {
        None => None,
        Some(Ok(extra)) => Some(extra),
        Some(Err(e)) => return fail(format!("foveate: {e}")),
    };
    let attention = extra.as_ref().map_or(attention, |e| e.attention.clone());
    let is_bytes = extra.as_ref().is_some_and(|e| e.tokenizer == "bytes");
    let tokenizer = (!is_bytes).then(|| folder.join(TOKENIZER));
    Ok(CheckpointSizes { model, attention, tokenizer, json, extra })
}

/// Reads `config.json` and the tokenizer of a Hugging Face checkpoint, ours included, whose
/// `config.json` is held to its checksum.
///
/// # Errors
/// Those of [`read_sizes`], and when the tokenizer is missing or damaged.
pub fn read_config(folder: &Path, checksums: Checksums) -> Result<CheckpointConfig, TrainError> {
    let CheckpointSizes { model, attention, tokenizer, json, extra } =
        read_sizes(folder, checksums)?;
    let first = |key: &str| ids(&json, key).first().copied();
    let tokenizer = match tokenizer {
        None => Tokenizer::bytes(),
        Some(path) => read_tokenizer(&path, first("bos_token_id"), first("eos_token_id"))?,
    };
    let ends =
        extra.map_or_else(Ends::default, |e| Ends { bos: e.add_bos_token, eos: e.add_eos_token });
    let generation = read_json_if_there(&folder.join(GENERATION))?;
    let tokenizer = tokenizer
        .adding(ends)?
        .and_stops(ids(&json, "eos_token_id"))
        .and_stops(ids(&generation, "eos_token_id"));
    let (chat_template, special) = chat(folder)?;
    let folder = folder.to_path_buf();
    Ok(CheckpointConfig { folder, model, attention, tokenizer, chat_template, special })
}

/// Reads a `tokenizer.json`. Tokens that begin and end a text and are not given are those that
/// a `tokenizer_config.json` beside it names, and whether they are added is what that says.
///
/// # Errors
/// When a file is missing or damaged, or a token is to be added that there is not.
pub fn read_tokenizer(
    path: &Path,
    bos: Option<u32>,
    eos: Option<u32>,
) -> Result<Tokenizer, TrainError> {
    if !path.exists() {
        let message = "is missing; put the model's tokenizer.json there";
        return Err(TrainError::checkpoint(path, message));
    }
    let beside = read_json_if_there(&path.with_file_name(TOKENIZER_CONFIG))?;
    let special = SpecialTexts::of(&beside);
    let said = |key: &str| beside.get(key).and_then(Value::as_bool);
    let ends = Ends { bos: said("add_bos_token"), eos: said("add_eos_token") };
    Tokenizer::from_file(path, bos, eos)?.or_ends(&special.bos, &special.eos).adding(ends)
}

/// The source of the chat template in a tokenizer's folder, where one is there, and the texts that it may print.
///
/// # Errors
/// When the template cannot be read, or the `tokenizer_config.json` there is damaged.
pub fn chat(folder: &Path) -> Result<(Option<String>, SpecialTexts), TrainError> {
    let config = read_json_if_there(&folder.join(TOKENIZER_CONFIG))?;
    let alone = folder.join(CHAT_TEMPLATE);
    let template = match (alone.exists(), config.get("chat_template")) {
        (true, _) => Some(whole::read_text(&alone).map_err(|e| unreadable(&alone, &e))?),
        // Several templates with names, of which one is for conversations.
        (false, Some(Value::Array(all))) => {
            let plain = all.iter().find(|t| t.get("name").is_some_and(|name| name == "default"));
            plain.and_then(|t| t.get("template")?.as_str()).map(str::to_owned)
        }
        (false, one) => one.and_then(Value::as_str).map(str::to_owned),
    };
    Ok((template, SpecialTexts::of(&config)))
}
