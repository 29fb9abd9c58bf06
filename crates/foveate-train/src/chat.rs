//! Conversations to text by the model's own chat template, with the assistant's turns marked.
//!
//! A template says nothing about who speaks where in its output, so the spans are found by rendering prefixes:
//! the conversation up to an assistant's turn, ending with the generation prompt, must be a prefix of the same
//! conversation with that turn, and what follows is the turn. A template that rewrites earlier turns (some drop
//! old reasoning) breaks that, which is an error rather than a wrong label.
//!
//! A template is a program of somebody else's: what it may do and write is bounded, so that a loop in one ends
//! with an error and not with the machine's memory. What it computes with in between, such as a text that it
//! doubles, is bounded where it renders in a process of its own: see [`ChatTemplate::isolated`].

mod date;
#[cfg(unix)]
mod process;

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::Path;
#[cfg(unix)]
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, ErrorKind, Value, context, filters};
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use date::Moment;

/// A plain template, used where neither the recipe nor the checkpoint gives one.
pub const DEFAULT_TEMPLATE: &str = "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n\
    {% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";

/// Bytes of a template's source at most; published ones have some ten thousand.
const SOURCE_BYTES: usize = 256 << 10;
/// Bytes that a template may write, beside those of the conversation as often as below.
const WRITTEN_BYTES: usize = 1 << 20;
const TIMES_WRITTEN: usize = 8;
/// Instructions that a template may run for a conversation, and more for each of its messages.
const STEPS: u64 = 500_000;
const STEPS_A_MESSAGE: u64 = 10_000;

/// What templates of transformers call for the date.
const NOW: &str = "strftime_now";

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or whatever else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// A conversation as text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rendered {
    /// The whole conversation.
    pub text: String,
    /// The byte ranges that an assistant wrote, in order: the ones to learn from.
    pub learned: Vec<Range<usize>>,
}

/// Why there is no text of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RenderError {
    /// This conversation or document cannot be used; others may.
    Document(String),
    /// The template took more than it may have, or its process could not be used.
    Template(String),
    /// The caller wants to stop.
    Interrupted,
}

impl fmt::Display for RenderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Document(reason) | Self::Template(reason) => f.write_str(reason),
            Self::Interrupted => f.write_str("interrupted"),
        }
    }
}

impl From<String> for RenderError {
    fn from(reason: String) -> Self {
        Self::Document(reason)
    }
}

#[cfg(unix)]
pub use process::serve;

/// A compiled chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    program: Program,
    /// The process that renders; none renders in this one.
    #[cfg(unix)]
    process: Option<Arc<process::Renderer>>,
}

impl ChatTemplate {
    /// Compiles `source`; `bos` and `eos` are the texts of the tokens a template may print itself.
    ///
    /// # Errors
    /// If the template is longer than 256 KiB or not valid Jinja, naming `place` and the line.
    pub fn new(source: &str, place: &Path, bos: &str, eos: &str) -> Result<Self, TrainError> {
        let program = Program::new(source, place, bos, eos)?;
        Ok(Self {
            program,
            #[cfg(unix)]
            process: None,
        })
    }

    /// A hash of all that decides what it prints.
    pub(crate) fn fingerprint(&self) -> u64 {
        let Program { source, bos, eos, .. } = &self.program;
        xxhash_rust::xxh3::xxh3_64(format!("{source:?} {bos:?} {eos:?}").as_bytes())
    }

    /// The same template, rendered in a process of its own, which starts when there is something to render: this
    /// program, called with `arguments`, for which it calls [`serve`]. A conversation takes at most 4 s of a
    /// processor there, and 256 MiB of address space; long ones may take more of both. Elsewhere than on Unix, the
    /// template renders in this process all the same.
    #[cfg_attr(not(unix), expect(unused_variables, reason = "there is no other process"))]
    #[must_use]
    pub fn isolated(self, arguments: &'static [&'static str]) -> Self {
        #[cfg(unix)]
        let process = Some(Arc::new(process::Renderer::new(arguments)));
        Self {
            #[cfg(unix)]
            process,
            ..self
        }
    }

    /// The same template, which may ask for the date of today. One whose texts are to be the same on every day, as
    /// those of a run are, is refused where it asks, and has no such function where it looks for one first.
    #[must_use]
    pub fn of_today(self) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Self { program: self.program.at(now), ..self }
    }

    /// The conversation with the spans to learn from. `interrupted` is asked while another process renders.
    ///
    /// # Errors
    /// In one line: the template refused the conversation, nobody speaks as `assistant`, or an earlier turn changes
    /// when a later one is added; the template takes too much; or the caller wants to stop.
    pub fn render(
        &self,
        messages: &[Message],
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Rendered, RenderError> {
        #[cfg(unix)]
        if let Some(process) = &self.process {
            return process.ask(&self.program, messages, None, interrupted);
        }
        self.program.render(messages)
    }

    /// The conversation as a prompt that the model is to continue. `interrupted` is asked while another process
    /// renders.
    ///
    /// # Errors
    /// In one line: the template refuses the conversation or takes too much, or the caller wants to stop.
    pub fn text(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<String, RenderError> {
        #[cfg(unix)]
        if let Some(process) = &self.process {
            let asked =
                process.ask(&self.program, messages, Some(add_generation_prompt), interrupted);
            return asked.map(|rendered| rendered.text);
        }
        self.program.text(messages, add_generation_prompt)
    }
}

/// A template that renders in this process.
#[derive(Clone, Debug)]
struct Program {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    /// When it renders, in seconds since 1970, where it may ask.
    now: Option<u64>,
}

impl Program {
    fn new(source: &str, place: &Path, bos: &str, eos: &str) -> Result<Self, TrainError> {
        if source.len() > SOURCE_BYTES {
            let message = format!(
                "the chat template has {} bytes, of which {SOURCE_BYTES} are read; give the model's own",
                source.len()
            );
            return Err(TrainError::data(place, None, message));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("the standard delimiters are consistent"));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_filter("tojson", json);
        environment.add_template_owned("chat", plain(source).into_owned()).map_err(|e| {
            TrainError::data(place, e.line(), format!("the chat template is not valid: {e}"))
        })?;
        let (source, bos, eos) = (source.to_owned(), bos.to_owned(), eos.to_owned());
        Ok(Self { environment, source, bos, eos, now: None })
    }

    /// The same, rendered at `now`.
    fn at(mut self, now: u64) -> Self {
        let written = move |format: String| {
            let failed = |wrong| minijinja::Error::new(ErrorKind::InvalidOperation, wrong);
            Moment(now).written(&format).map_err(failed)
        };
        self.environment.add_function(NOW, written);
        Self { now: Some(now), ..self }
    }

    fn render(&self, messages: &[Message]) -> Result<Rendered, RenderError> {
        let text = self.text(messages, false)?;
        let mut learned = Vec::new();
        for (turn, _) in
            messages.iter().enumerate().filter(|(_, message)| message.role == "assistant")
        {
            let first = |why: &dyn fmt::Display| {
                RenderError::Document(format!(
                    "the conversation begins with the assistant, which the chat template does not \
                     allow ({why}); put a user's turn first, or use another chat template"
                ))
            };
            let start = self.text(&messages[..turn], true);
            let start = match start {
                Err(RenderError::Document(why)) if turn == 0 => return Err(first(&why)),
                start => start?,
            };
            let end = self.text(&messages[..=turn], false)?;
            if !end.starts_with(&start) || !text.starts_with(&end) {
                if turn == 0 {
                    return Err(first(&"it writes something else before a first turn"));
                }
                return Err(format!(
                    "the chat template rewrites earlier turns, so turn {} cannot be labelled; \
                     split the conversation or use a template that only appends",
                    turn + 1
                )
                .into());
            }
            learned.push(start.len()..end.len());
        }
        if learned.is_empty() {
            let why = "no message has the role `assistant`, so there is nothing to learn";
            return Err(why.to_owned().into());
        }
        Ok(Rendered { text, learned })
    }

    fn text(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, RenderError> {
        let said: usize = messages.iter().map(|m| m.role.len() + m.content.len()).sum();
        let left = WRITTEN_BYTES.saturating_add(said.saturating_mul(TIMES_WRITTEN));
        let mut text = Bounded { text: Vec::new(), left };
        let steps = STEPS + STEPS_A_MESSAGE * messages.len() as u64;
        let messages: Vec<Value> = messages
            .iter()
            .map(|m| context! { role => m.role.as_str(), content => m.content.as_str() })
            .collect();
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(steps));
        let template = environment.get_template("chat").expect("it was added");
        let (bos_token, eos_token) = (self.bos.as_str(), self.eos.as_str());
        // As transformers has it, what is not given is none, and not undefined.
        let (tools, documents) = ((), ());
        let given =
            context! { messages, add_generation_prompt, bos_token, eos_token, tools, documents };
        let unbounded = |what: String| {
            format!("the chat template {what}, which no conversation needs; correct its loops")
        };
        let text = match template.render_captured_to(given, &mut text) {
            Ok(_) => Ok(String::from_utf8(text.text).expect("a template writes text")),
            Err(e) if e.kind() == ErrorKind::OutOfFuel => {
                Err(unbounded(format!("runs more than {steps} instructions")))
            }
            Err(e) if e.kind() == ErrorKind::WriteFailure => {
                let most = text.text.len() + text.left;
                Err(unbounded(format!("writes more than {most} bytes")))
            }
            Err(e) if e.kind() == ErrorKind::UnknownFunction && e.to_string().contains(NOW) => {
                return Err(RenderError::Template(format!(
                    "the chat template asks for today's date ({NOW}), and documents are to be the same on \
                     every day; write a date in its place, in a copy that data.chat_template names"
                )));
            }
            Err(e) => Err(format!("the chat template failed: {e}")),
        };
        text.map_err(RenderError::Document)
    }
}

/// A template without the marks of transformers around what an assistant writes, `{% generation %}` and
/// `{% endgeneration %}`: they print nothing, and become a condition that always holds.
fn plain(source: &str) -> Cow<'_, str> {
    let mut pieces = source.split("{%");
    let mut text = pieces.next().unwrap_or_default().to_owned();
    let mut is_same = true;
    for piece in pieces {
        let statement = piece.split("%}").next().unwrap_or_default();
        let word = statement.trim_matches(|c: char| c.is_whitespace() || "+-".contains(c));
        let instead = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => word,
        };
        is_same &= instead == word;
        text.push_str("{%");
        text.push_str(&piece.replacen(word, instead, usize::from(instead != word)));
    }
    if is_same { Cow::Borrowed(source) } else { Cow::Owned(text) }
}

/// The filter `tojson` as transformers has it: without the escapes that keep JSON safe in a web page, which a model
/// would learn to write, and with `ensure_ascii` where it is false.
fn json(value: &Value, indent: Option<Value>, named: Kwargs) -> Result<String, minijinja::Error> {
    if named.get::<Option<bool>>("ensure_ascii")? == Some(true) {
        let message = "tojson(ensure_ascii=true) is not supported; leave it out";
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, message));
    }
    let escaped = filters::tojson(value, indent, named)?;
    let mut rest = escaped.as_str().unwrap_or_default();
    let mut text = String::with_capacity(rest.len());
    while let Some(at) = rest.find('\\') {
        text.push_str(&rest[..at]);
        let of_web = [("003c", "<"), ("003e", ">"), ("0026", "&"), ("0027", "'")];
        let found = of_web.iter().find(|(code, _)| {
            rest[at + 1..].strip_prefix('u').is_some_and(|digits| digits.starts_with(code))
        });
        // Any other escape is two characters at least, of which the second may be a backslash too.
        let (instead, length) =
            found.map_or((&rest[at..at + 2], 2), |(_, character)| (*character, 6));
        text.push_str(instead);
        rest = &rest[at + length..];
    }
    text.push_str(rest);
    Ok(text)
}

/// Text that ends with an error where it would have more than `left` bytes more.
struct Bounded {
    text: Vec<u8>,
    left: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.left = self.left.checked_sub(bytes.len()).ok_or(io::ErrorKind::FileTooLarge)?;
        self.text.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(role: &str, content: &str) -> Message {
        Message { role: role.to_owned(), content: content.to_owned() }
    }

    fn template(source: &str) -> Program {
        Program::new(source, Path::new("template"), "<s>", "</s>").unwrap()
    }

    #[test]
    fn only_the_assistants_words_are_learned() {
        let messages = [
            says("system", "Be brief."),
            says("user", "Hi"),
            says("assistant", "Hé"),
            says("user", "2+2?"),
            says("assistant", "4"),
        ];
        let rendered = template(DEFAULT_TEMPLATE).render(&messages).unwrap();
        let spans: Vec<&str> =
            rendered.learned.iter().map(|span| &rendered.text[span.clone()]).collect();
        assert_eq!(spans, ["Hé\n", "4\n"]);
    }

    #[test]
    fn python_methods_of_published_templates_work() {
        let source = "{{ bos_token }}{% for m in messages %}[{{ m['role'].upper() }}]{{ m['content'].strip() }}{{ eos_token }}\
                      {% endfor %}{% if add_generation_prompt %}[ASSISTANT]{% endif %}";
        let rendered =
            template(source).render(&[says("user", " a "), says("assistant", " b ")]).unwrap();
        assert_eq!(rendered.text, "<s>[USER]a</s>[ASSISTANT]b</s>");
        assert_eq!(&rendered.text[rendered.learned[0].clone()], "b</s>");
    }

    /// What of SmolLM3's template others have not: marks around turns, a date, a test of a message that is not there.
    #[test]
    fn marks_of_an_assistants_turns_and_the_date_of_published_templates_work() {
        let source = "{%- if '/x' in system_message -%}x{%- endif -%}\n\
                      {%- if tools is not none %}tools {% endif -%}\n\
                      {{- strftime_now('%Y') | length ~ '\n' -}}\n\
                      {%- for m in messages -%}\n    {%- if m.role == 'assistant' -%}\n\
                      {% generation %}\n    {{- '[A]' + m.content.lstrip('\n') }}\n  {%- endgeneration -%}\n\
                      {%- else -%}{{ '[U]' + m.content }}{%- endif -%}{%- endfor -%}\n\
                      {%- if add_generation_prompt -%}{{ '[A]' }}{%- endif -%}";
        let messages = [says("user", "a"), says("assistant", "b")];
        let rendered = template(source).at(0).render(&messages).unwrap();
        assert_eq!(rendered.text, "4\n[U]a[A]b");
        assert_eq!(&rendered.text[rendered.learned[0].clone()], "b");
        // Texts of a run are the same on every day.
        let told = template(source).render(&messages).unwrap_err();
        assert!(matches!(&told, RenderError::Template(why) if why.contains("data.chat_template")));
        let guarded = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}";
        assert_eq!(template(guarded).text(&messages, true).unwrap(), "26 Jul 2024");
        assert_eq!(template(guarded).at(0).text(&messages, true).unwrap(), "01 Jan 1970");
        assert_eq!(
            plain("{% raw %}{% generation_ %}{{ 'generation' }}"),
            "{% raw %}{% generation_ %}{{ 'generation' }}"
        );
    }

    /// Llama 3.1's template writes what a tool said so.
    #[test]
    fn json_of_published_templates_has_no_escapes_of_web_pages() {
        let source = r#"{% for m in messages %}{{ m.content | tojson }},{% endfor %}
{{ {"<a>": ["é'", 1, none, 2.5]} | tojson(ensure_ascii=False, indent=2) }}"#;
        let said = r#"if a<b && c>'d' {"\n\\u003c\u0026"} é"#;
        let text = template(source).text(&[says("tool", said)], false).unwrap();
        let as_python = r#""if a<b && c>'d' {\"\\n\\\\u003c\\u0026\"} é""#;
        assert_eq!(
            text,
            format!(
                "{as_python},{{\n  \"<a>\": [\n    \"é'\",\n    1,\n    null,\n    2.5\n  ]\n}}"
            )
        );
        let whole = template("{{ messages | tojson }}").text(&[says("tool", "a\n")], true).unwrap();
        assert_eq!(whole, r#"[{"role": "tool", "content": "a\n"}]"#);
        let told = template("{{ 'é' | tojson(ensure_ascii=True) }}").text(&[], true).unwrap_err();
        assert!(told.to_string().contains("ensure_ascii"), "{told}");
    }

    #[test]
    fn what_a_template_writes_and_how_long_it_runs_is_bounded() {
        let said = |source: &str| {
            let told = template(source).text(&[says("user", "Hi")], true).unwrap_err();
            told.to_string()
        };
        let loops = |text: &str| {
            format!(
                "{{% for i in range(9999) %}}{{% for j in range(9999) %}}{text}{{% endfor %}}{{% endfor %}}"
            )
        };
        let long = said(&loops(&"many words ".repeat(100)));
        assert_eq!(
            long,
            "the chat template writes more than 1048624 bytes, which no conversation needs; correct \
             its loops"
        );
        for source in [loops(""), format!("{{% set text %}}{}{{% endset %}}", loops("words"))] {
            let endless = said(&source);
            assert!(
                endless.starts_with("the chat template runs more than 510000 inst"),
                "{endless}"
            );
        }
        let source = "a".repeat(SOURCE_BYTES + 1);
        let told =
            ChatTemplate::new(&source, Path::new("t.jinja"), "", "").unwrap_err().to_string();
        assert!(told.starts_with("t.jinja: the chat template has 262145 bytes"), "{told}");
        // A long conversation has its own share of both.
        let talk: Vec<_> = (0..20_000).map(|_| says("user", &"word ".repeat(20))).collect();
        let text = template(DEFAULT_TEMPLATE).text(&talk, true).unwrap();
        assert!(text.len() > 2_000_000, "{}", text.len());
    }

    #[test]
    fn a_template_that_rewrites_turns_is_refused() {
        let source = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}";
        let error =
            template(source).render(&[says("user", "a"), says("assistant", "b")]).unwrap_err();
        assert!(error.to_string().contains("rewrites earlier turns"), "{error}");
    }

    #[test]
    fn a_conversation_that_the_assistant_begins_says_so_where_the_template_cannot() {
        let turns = [says("assistant", "Hello!"), says("user", "Hi"), says("assistant", "Yes?")];
        assert_eq!(template(DEFAULT_TEMPLATE).render(&turns).unwrap().learned.len(), 2);
        for source in [
            "{% if messages[0]['role'] == 'system' %}s{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
            "{% if not messages %}new{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
        ] {
            let told = template(source).render(&turns).unwrap_err().to_string();
            assert!(told.starts_with("the conversation begins with the assistant"), "{told}");
            assert!(told.contains("put a user's turn first"), "{told}");
        }
    }

    #[test]
    fn a_broken_template_names_its_line() {
        let error = ChatTemplate::new("a\n{% for %}", Path::new("chat.jinja"), "", "")
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("chat.jinja:2: the chat template is not valid"), "{error}");
    }

    #[test]
    fn a_conversation_without_an_assistant_is_refused() {
        assert!(
            template(DEFAULT_TEMPLATE)
                .render(&[says("user", "a")])
                .unwrap_err()
                .to_string()
                .contains("assistant")
        );
    }
}
