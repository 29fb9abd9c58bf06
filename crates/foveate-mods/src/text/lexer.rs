//! Text to tokens.

use crate::error::{ModError, ModErrorKind};

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Name(String),
    Int(i64),
    Float(f32),
    /// An operator or a bracket.
    Mark(&'static str),
    End,
}

impl Token {
    /// How an error names it.
    pub(super) fn shown(&self) -> String {
        match self {
            Token::Name(name) => format!("`{name}`"),
            Token::Int(v) => format!("`{v}`"),
            Token::Float(v) => format!("`{v:?}`"),
            Token::Mark(mark) => format!("`{mark}`"),
            Token::End => "the end".to_owned(),
        }
    }
}

/// Longer marks first, so that `>=` is not `>` and `=`.
const MARKS: [&str; 29] = [
    "&&", "||", "<<", ">>", "==", "!=", "<=", ">=", "&", "|", "^", "!", "<", ">", "=", "+", "-",
    "*", "/", "%", "(", ")", "[", "]", "{", "}", ",", ";", ".",
];

pub(super) fn error(text: &str, position: usize, message: impl Into<String>) -> ModError {
    let (message, text) = (message.into(), text.to_owned());
    ModErrorKind::Parse { position, message, text }.into()
}

/// Tokens with their byte positions, closed by [`Token::End`].
pub(super) fn tokens(text: &str) -> Result<Vec<(usize, Token)>, ModError> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        if c.is_whitespace() {
            at += c.len_utf8();
        } else if c.is_alphabetic() || c == '_' {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            found.push((at, Token::Name(rest[..end].to_owned())));
            at += end;
        } else if c.is_ascii_digit() {
            let len = number_len(rest);
            found.push((at, number(text, at, &rest[..len])?));
            at += len;
        } else if let Some(mark) = MARKS.iter().find(|m| rest.starts_with(**m)) {
            found.push((at, Token::Mark(mark)));
            at += mark.len();
        } else {
            // Python's and torch's sign, which a mask from there has.
            let instead = if c == '~' { "; write `!`" } else { "" };
            return Err(error(
                text,
                at,
                format!("the character {c:?} has no meaning here{instead}"),
            ));
        }
    }
    found.push((text.len(), Token::End));
    Ok(found)
}

/// Length of the number that `rest` starts with: digits, a fraction, an exponent.
fn number_len(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let digits = |from: usize| {
        let more = bytes[from..].iter().take_while(|b| b.is_ascii_digit() || **b == b'_');
        from + more.count()
    };
    let mut len = digits(0);
    // `1.abs()` is a method of 1, `1.5` and `1.` are floats.
    let after = bytes.get(len + 1).copied().unwrap_or(b' ');
    if bytes.get(len) == Some(&b'.') && !after.is_ascii_alphabetic() && after != b'_' {
        len = digits(len + 1);
    }
    if matches!(bytes.get(len), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(len + 1), Some(b'+' | b'-')));
        if bytes.get(len + 1 + sign).is_some_and(u8::is_ascii_digit) {
            len = digits(len + 1 + sign);
        }
    }
    len
}

fn number(text: &str, at: usize, written: &str) -> Result<Token, ModError> {
    let plain = written.replace('_', "");
    if plain.bytes().all(|b| b.is_ascii_digit()) {
        // One more than i32::MAX, for the literal of i32::MIN behind its minus.
        return match plain.parse::<i64>() {
            Ok(v) if v <= 1 << 31 => Ok(Token::Int(v)),
            _ => Err(error(
                text,
                at,
                format!(
                    "{written} does not fit an i32, which is {} at most; where an f32 will do, write {written}.0",
                    i32::MAX
                ),
            )),
        };
    }
    match plain.parse::<f32>() {
        Ok(v) if v.is_finite() => Ok(Token::Float(v)),
        _ => Err(error(text, at, format!("{written} does not fit an f32"))),
    }
}
