//! What is wrong with the text of a recipe, in a user's words: the field, what it is given and what
//! it takes, with line and column.

use foveate::mods::text::nearest;

use crate::error::{TrainError, TrainErrorKind};

/// Sections that a recipe cannot do without.
const SECTIONS: [&str; 3] = ["run", "model", "data"];

/// Fields by names that others give them, and their own.
const RENAMED: [(&str, &str); 4] = [
    ("global_rows", "batch_rows"),
    ("global_batch_size", "batch_rows"),
    ("gradient_accumulation_steps", "accumulate"),
    ("seq_len", "len"),
];

/// The error of the recipe `text`, with its place in it.
pub(super) fn located(place: &str, text: &str, e: &toml::de::Error) -> TrainError {
    let start = e.span().map(|span| span.start.min(text.len()));
    let before = start.and_then(|start| text.get(..start));
    let position = before.map(|before| {
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |l| l.chars().count()) + 1;
        (line, column)
    });
    let field = before.and_then(|before| field_at(text, before.len()));
    let is_header = before.is_some_and(|before| {
        before.rsplit('\n').next().is_some_and(|line| line.trim_start().starts_with('['))
    });
    let message = match (e.message(), &field) {
        ("duplicate key", Some(section)) if is_header => {
            format!("the section [{section}] is there twice; write all of its fields below one")
        }
        (message, field) => in_words(message, field.as_deref()),
    };
    let place = place.to_owned();
    TrainErrorKind::Recipe { place, position, message }.into()
}

/// The error of an override of `field` by `value`, which was taken for a text where `is_text`.
pub(super) fn of_override(
    set: &str,
    field: &str,
    (value, is_text): (&str, bool),
    e: &toml::de::Error,
) -> TrainError {
    let message = match is_text && value.starts_with(['[', '{', '"', '\'']) {
        true => format!(
            "{field} is given {value}, which is no value of TOML; write texts in it in quotes, such as \
             [\"a.txt\"], and close what it opens"
        ),
        false => in_words(e.message(), Some(field)),
    };
    TrainError::recipe(format!("--set {set}"), message)
}

/// The field whose value holds byte `at`, with its section: `train.steps`; the section alone for
/// its header.
fn field_at(text: &str, at: usize) -> Option<String> {
    let end = text[at..].find('\n').map_or(text.len(), |n| at + n);
    let mut field = None;
    for line in text[..end].lines().rev().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.split(']').next())
            && !section.is_empty()
            && section.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
            && !section.starts_with(|c: char| c.is_ascii_digit())
        {
            return Some(field.map_or(section.to_owned(), |field| format!("{section}.{field}")));
        }
        if let Some((key, _)) = line.split_once('=').filter(|_| field.is_none()) {
            field = Some(key.trim());
        }
    }
    field.map(str::to_owned)
}

/// A message of the reader: `field`, what it is, and what is expected.
fn in_words(message: &str, field: Option<&str>) -> String {
    let message = message.trim().replace('\n', " ");
    let name = field.unwrap_or("a value");
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    if let Some(missing) = message.strip_prefix("missing field") {
        let missing = missing.trim().trim_matches('`');
        return match field {
            _ if SECTIONS.contains(&missing) => format!("the section [{missing}] is missing"),
            Some(section) => format!("{section}.{missing} is missing"),
            None => format!("`{missing}` is missing"),
        };
    }
    if let Some(rest) = message.strip_prefix("unknown variant `")
        && let Some((given, expected)) = rest.split_once("`, expected ")
    {
        return format!("{name} is \"{given}\"; {expected} is expected");
    }
    for kind in ["invalid type: ", "invalid value: "] {
        if let Some((found, expected)) =
            message.strip_prefix(kind).and_then(|rest| rest.rsplit_once(", expected "))
        {
            let wanted = wanted(expected);
            return match found.ends_with("variant") {
                // Of one of several names, which the reader found to be none.
                true => format!("{name}: {wanted} is expected"),
                false => format!("{name} is {}; {wanted} is expected", given(found)),
            };
        }
    }
    if message == "duplicate key" {
        return format!("{name} is given twice; keep one of them");
    }
    // What begins as a truth value does is taken for one.
    if ["string values must be quoted", "invalid boolean"]
        .iter()
        .any(|say| message.starts_with(say))
    {
        return format!("{name} has no value of TOML; write a text in quotes, such as \"cosine\"");
    }
    // How the reader says that a list or a date is no section, and that one is no name.
    if message.starts_with("invalid length") {
        return format!("{name} is a list; a section of fields is expected");
    }
    if message.starts_with("unknown field `$__toml_private_datetime`") {
        return format!("{name} is a date; a section of fields is expected");
    }
    if message.starts_with("wanted ") {
        return format!("{name}: a text in quotes is expected");
    }
    if let Some(expected) = message.strip_prefix("expected ") {
        return format!("{name}: {expected} is expected");
    }
    if let (true, Some((wrong, known))) =
        (message.starts_with("unknown field"), quoted.split_first())
    {
        let renamed = RENAMED.iter().find(|(other, own)| other == wrong && known.contains(own));
        if let Some((_, own)) = renamed {
            let section = field.and_then(|field| field.rsplit_once('.'));
            let section = section.map_or(String::new(), |(section, _)| format!("{section}."));
            return format!("unknown field `{wrong}`: use {section}{own}");
        }
        if let Some(near) = nearest(wrong, known.iter().copied()) {
            return format!("{message}; did you mean `{near}`?");
        }
    }
    message
}

/// A value as the recipe has it: `string "ten"` is `"ten"`.
fn given(found: &str) -> &str {
    match found {
        "map" => "a section",
        "sequence" => "a list",
        _ => match found.split_once('`') {
            Some((_, value)) => value.trim_end_matches('`'),
            None => found.strip_prefix("string ").unwrap_or(found),
        },
    }
}

/// What a type of Rust's takes.
fn wanted(expected: &str) -> &str {
    match expected {
        "usize" | "u64" | "u32" => "a whole number of at least 0",
        "isize" | "i64" | "i32" => "a whole number",
        "f64" | "f32" => "a number",
        "a boolean" => "true or false",
        "a string" | "path string" | "string only" => "a text in quotes",
        "a sequence" => "a list in brackets",
        "a map" => "a section of fields",
        _ if expected.starts_with("struct ") => "a section of fields",
        _ => expected,
    }
}
