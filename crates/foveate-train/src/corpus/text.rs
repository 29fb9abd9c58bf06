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
    // Some editors begin a file of UTF-8 with a mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
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
        (None, Some(_), _) if record.tools.is_some_and(|tools| says_something(&tools)) => {
            "the line has `tools`, which no chat template is given; write them into a system message, or \
             remove the field"
        }
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
    tools: Option<Value>,
}

/// A message as files have it: what it says may be no text.
#[derive(Deserialize)]
struct Turn {
    role: String,
    content: Option<Value>,
    tool_calls: Option<Value>,
    function_call: Option<Value>,
    reasoning_content: Option<Value>,
    reasoning: Option<Value>,
    thinking: Option<Value>,
    weight: Option<Value>,
}

impl Turn {
    /// What it says beside its content, or otherwise than by it, which would be lost: what that is, and what to do.
    fn lost(&self) -> Option<String> {
        let weight = self.weight.as_ref().filter(|_| self.role == "assistant");
        if let Some(weight) = weight.filter(|weight| weight.as_f64() != Some(1.0)) {
            return Some(format!(
                "a weight of {weight}, and all that the assistant says is learned alike; remove the \
                 weight, or end the conversation before"
            ));
        }
        let beside = [
            ("tool_calls", &self.tool_calls),
            ("function_call", &self.function_call),
            ("reasoning_content", &self.reasoning_content),
            ("reasoning", &self.reasoning),
            ("thinking", &self.thinking),
        ];
        let is_said = |(_, said): &(_, &Option<Value>)| said.as_ref().is_some_and(says_something);
        let (field, _) = beside.into_iter().find(is_said)?;
        Some(format!(
            "{field}, of which nothing would be learned; write into content what the model is to \
             write, or remove the field"
        ))
    }
}

/// Whether a field that may be empty is not.
fn says_something(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(all) => !all.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    }
}

/// The messages of a conversation, or which of them has no text and what to do.
fn said(turns: Vec<Turn>) -> Result<Vec<Message>, String> {
    let message = |(i, turn): (usize, Turn)| {
        let lost = turn.lost();
        let wrong = match turn.content {
            Some(Value::String(content)) => match lost {
                None => return Ok(Message { role: turn.role, content }),
                Some(lost) => lost,
            },
            None | Some(Value::Null) => {
                "no text (content is null or missing, as where a tool is called); give it a text, \
                 or leave the conversation out"
                    .to_owned()
            }
            Some(Value::Array(_)) => {
                "a list of parts for content; only text is learned: write it as one string"
                    .to_owned()
            }
            Some(_) => "a content that is no string; write it as one".to_owned(),
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
    fn what_would_be_lost_of_a_conversation_is_refused_and_empty_fields_are_not() {
        let found = |message: &str, beside: &str| {
            let line = format!(
                "\u{feff}{{\"messages\": [{{\"role\": \"user\", \"content\": \"q\", \"weight\": 0}}, {{\"role\": \
                 \"assistant\", \"content\": \"a\"{message}}}]{beside}}}\n"
            );
            let dir = folder(&[("c.jsonl", line.as_bytes())]);
            let corpus = scan(&sources(&dir, &["c.jsonl"])).map_err(|e| e.to_string());
            corpus.map(|corpus| corpus.document(0).unwrap())
        };
        let plain = found("", "").unwrap();
        let empty =
            ", \"tool_calls\": [], \"reasoning_content\": \"\", \"weight\": 1, \"name\": \"x\"";
        assert_eq!(found(empty, ", \"tools\": null, \"id\": 3").unwrap(), plain);
        for (message, beside, wanted) in [
            (", \"tool_calls\": [{\"id\": \"1\"}]", "", "message 2 (assistant) has tool_calls, of"),
            (
                ", \"function_call\": {\"name\": \"f\"}",
                "",
                "message 2 (assistant) has function_call",
            ),
            (", \"reasoning_content\": \"hm\"", "", "message 2 (assistant) has reasoning_content"),
            (", \"weight\": 0", "", "message 2 (assistant) has a weight of 0, and all"),
            ("", ", \"tools\": [{}]", "c.jsonl:1: the line has `tools`, which no chat template"),
        ] {
            let told = found(message, beside).unwrap_err();
            assert!(told.contains(wanted), "{told}, not {wanted}");
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
