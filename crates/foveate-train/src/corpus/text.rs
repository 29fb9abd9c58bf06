//! What a document says: a text as it stands, or a line of JSON.

use std::ops::Range;

use serde::Deserialize;
use serde_json::Value;

use crate::chat::{ChatTemplate, Message, RenderError};

/// A document's text.
pub struct Parts {
    pub text: String,
    /// The bytes to learn from, in a conversation.
    pub learned: Option<Vec<Range<usize>>>,
}

/// The text of a document and, for a conversation, the byte ranges to learn from.
///
/// `interrupted` is asked while a conversation is rendered.
///
/// # Errors
/// Why it cannot be used.
pub fn parts(
    bytes: &[u8],
    json: bool,
    template: Option<&ChatTemplate>,
    interrupted: &mut dyn FnMut() -> bool,
) -> Result<Parts, RenderError> {
    let text = std::str::from_utf8(bytes)
        .map_err(|e| format!("the document is not UTF-8 (byte {} of it)", e.valid_up_to()))?;
    if text.trim().is_empty() {
        return Err("the document is empty".to_owned().into());
    }
    if !json {
        return Ok(Parts { text: text.to_owned(), learned: None });
    }
    if !text.trim_start().starts_with('{') {
        return Err("the line is not a JSON object with `text` or `messages`".to_owned().into());
    }
    // Without the end of the line, of which an error would say that it is the next one.
    let record: Record = serde_json::from_str(text.trim_end()).map_err(|e| {
        let told = e.to_string();
        let why = told.rsplit_once(" at line ").map_or(told.as_str(), |(why, _)| why);
        format!("the line is not a JSON document: {why} (column {})", e.column())
    })?;
    let wrong = match (record.text, record.messages, template) {
        (Some(text), None, _) if text.trim().is_empty() => "the document is empty",
        (Some(text), None, _) => return Ok(Parts { text, learned: None }),
        (None, Some(messages), Some(template)) => {
            let rendered = template.render(&said(messages)?, interrupted)?;
            return Ok(Parts { text: rendered.text, learned: Some(rendered.learned) });
        }
        (None, Some(_), None) => "the line has `messages` but there is no chat template",
        _ => "the line needs either a string `text` or a list `messages`",
    };
    Err(wrong.to_owned().into())
}

#[derive(Deserialize)]
struct Record {
    text: Option<String>,
    messages: Option<Vec<Turn>>,
}

/// A message as files have it: what it says may be no text.
#[derive(Deserialize)]
struct Turn {
    role: String,
    content: Option<Value>,
}

/// The messages of a conversation, or which of them has no text and what to do.
fn said(turns: Vec<Turn>) -> Result<Vec<Message>, String> {
    let message = |(i, turn): (usize, Turn)| {
        let wrong = match turn.content {
            Some(Value::String(content)) => return Ok(Message { role: turn.role, content }),
            None | Some(Value::Null) => {
                "no text (content is null or missing, as where a tool is called); give it a text, \
                 or leave the conversation out"
            }
            Some(Value::Array(_)) => {
                "a list of parts for content; only text is learned: write it as one string"
            }
            Some(_) => "a content that is no string; write it as one",
        };
        Err(format!("message {} ({}) has {wrong}", i + 1, turn.role))
    };
    turns.into_iter().enumerate().map(message).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{folder, scan, sources};

    #[test]
    fn a_message_that_cannot_be_learned_says_what_it_is_and_what_to_do() {
        let told = |line: &str| {
            let dir = folder(&[("c.jsonl", format!("{{\"text\": \"x\"}}\n{line}\n").as_bytes())]);
            scan(&sources(&dir, &["c.jsonl"])).unwrap_err().to_string()
        };
        let talk = |content: &str| {
            format!("{{\"messages\": [{{\"role\": \"user\", \"content\": {content}}}]}}")
        };
        for (line, wanted) in [
            (talk("null"), "c.jsonl:2: message 1 (user) has no text (content is null or missing"),
            (talk("[{\"type\": \"text\"}]"), "c.jsonl:2: message 1 (user) has a list of parts"),
            (talk("3"), "c.jsonl:2: message 1 (user) has a content that is no string"),
            // The line is the file's, not that of the text that was parsed.
            ("{\"text\": ".to_owned(), "c.jsonl:2: the line is not a JSON document: EOF while"),
            ("[\"text\", null]".to_owned(), "c.jsonl:2: the line is not a JSON object with `text`"),
            ("{\"text\": 3}".to_owned(), "expected a string (column 10); repair"),
        ] {
            let told = told(&line);
            assert!(told.contains(wanted) && !told.contains("at line"), "{line}: {told}");
        }
    }

    #[test]
    fn a_line_that_is_not_json_names_its_line() {
        let dir =
            folder(&[("c.jsonl", b"{\"text\": \"x\"}\n{\"tex\": 1}\n"), ("d.jsonl", b"nope\n")]);
        let error = scan(&sources(&dir, &["c.jsonl"])).unwrap_err().to_string();
        assert!(error.contains("c.jsonl:2: the line needs either"), "{error}");
        let error = scan(&sources(&dir, &["d.jsonl"])).unwrap_err().to_string();
        assert!(error.contains("d.jsonl:1: the line is not a JSON object with"), "{error}");
    }
}
