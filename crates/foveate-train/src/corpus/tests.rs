//! Tests of a corpus, and the folders that those of its parts are made of.

use super::*;
use crate::tokens::Ends;

pub fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    dir
}

pub fn sources(dir: &tempfile::TempDir, files: &[&str]) -> Sources {
    Sources {
        root: dir.path().to_path_buf(),
        files: files.iter().map(|&file| file.to_owned()).collect(),
        ..Default::default()
    }
}

pub fn scan(sources: &Sources) -> Result<Corpus, TrainError> {
    let template =
        ChatTemplate::new(crate::chat::DEFAULT_TEMPLATE, Path::new("template"), "", "").unwrap();
    Corpus::scan(sources, Tokenizer::bytes(), Some(template), &mut || false)
}

#[test]
fn a_document_that_is_not_utf8_or_empty_is_an_error_with_its_place() {
    let dir = folder(&[
        ("bad.txt", b"ok\xff"),
        ("empty.txt", b" \n"),
        ("c.jsonl", b"{\"text\": \"x\"}\n{\"text\": \"\"}\n"),
    ]);
    for (file, expected) in [
        ("bad.txt", "bad.txt: the document is not UTF-8 (byte 2 of it); repair"),
        ("empty.txt", "empty.txt: the document is empty; repair"),
        ("c.jsonl", "c.jsonl:2: the document is empty; repair"),
    ] {
        let error = scan(&sources(&dir, &[file])).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let mut all = sources(&dir, &["*"]);
    all.on_bad_document = BadDocument::Skip;
    let corpus = scan(&all).unwrap();
    assert_eq!((corpus.len(), corpus.skipped().len()), (1, 3));
    assert_eq!(corpus.skipped()[1].line, Some(2));
}

#[test]
fn advice_names_the_options_of_who_asked() {
    let dir = folder(&[("a.txt", b" ")]);
    let asked = Sources { asker: Asker::Command, ..sources(&dir, &["a.txt"]) };
    let told = scan(&asked).unwrap_err().to_string();
    assert!(told.ends_with("or pass --skip-bad") && !told.contains("data."), "{told}");
}

#[test]
fn in_a_conversation_only_the_assistants_tokens_are_learned() {
    let line = br#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}"#;
    let dir = folder(&[("chat.jsonl", line)]);
    let document = scan(&sources(&dir, &["chat.jsonl"])).unwrap().document(0).unwrap();
    let learned: Vec<u32> = document
        .tokens
        .iter()
        .zip(&document.learned)
        .filter(|(_, l)| **l)
        .map(|(&t, _)| t)
        .collect();
    assert_eq!(learned, [u32::from(b'y'), u32::from(b'o'), u32::from(b'\n'), 256]);
}

#[test]
fn a_turn_that_the_template_closed_is_not_closed_again() {
    // `|` stands for the token that ends a turn; a newline follows, as in published templates.
    let source = "{% for m in messages %}<{{ m.content }}|\n{% endfor %}{% if add_generation_prompt %}<{% endif %}";
    let template = ChatTemplate::new(source, Path::new("template"), "", "").unwrap();
    let turn = |role: &str, said: &str| format!("{{\"role\":{role:?},\"content\":{said:?}}}");
    let line = |turns: &[String]| format!("{{\"messages\":[{}]}}\n", turns.join(","));
    let (ask, say) = (turn("user", "q"), turn("assistant", "a"));
    let lines = line(&[ask.clone(), say.clone(), ask.clone(), say.clone()]) + &line(&[say, ask]);
    let dir = folder(&[("chat.jsonl", lines.as_bytes())]);
    let learned = |tokenizer: Tokenizer, index| {
        let sources = sources(&dir, &["chat.jsonl"]);
        let corpus =
            Corpus::scan(&sources, tokenizer, Some(template.clone()), &mut || false).unwrap();
        let Document { tokens, learned } = corpus.document(index).unwrap();
        let learned: Vec<u32> = tokens.iter().zip(learned).filter(|t| t.1).map(|t| *t.0).collect();
        (learned, *tokens.last().unwrap())
    };
    let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let closing = Tokenizer::bytes().and_stops([u32::from(b'|')]);
    assert_eq!(learned(closing.clone(), 0), (ids("a|a|"), u32::from(b'\n')));
    // The last turn is the user's.
    assert_eq!(learned(closing, 1), (ids("a|"), u32::from(b'\n')));
    // Where nothing says that `|` ends a turn, the end of a text does.
    let open = [ids("a|\na|\n"), vec![256]].concat();
    assert_eq!(learned(Tokenizer::bytes(), 0), (open, 256));
    let never = Ends { eos: Some(false), ..Default::default() };
    let none = learned(Tokenizer::bytes().adding(never).unwrap(), 0);
    assert_eq!(none, (ids("a|\na|\n"), u32::from(b'\n')));
}

#[test]
fn the_held_out_side_is_decided_by_content() {
    let texts: Vec<String> = (0..200).map(|i| format!("document {i}")).collect();
    let names: Vec<String> = (0..200).map(|i| format!("{i:03}.txt")).collect();
    let files: Vec<(&str, &[u8])> =
        names.iter().zip(&texts).map(|(name, text)| (name.as_str(), text.as_bytes())).collect();
    let dir = folder(&files);
    let corpus = scan(&sources(&dir, &["*.txt"])).unwrap();
    let (train, held_out) = corpus.split(0.2, 1);
    assert_eq!(train.len() + held_out.len(), 200);
    assert!((20..60).contains(&held_out.len()), "{}", held_out.len());
    assert_eq!(corpus.split(0.2, 1), (train, held_out));
    assert_eq!(corpus.split(0.0, 1).1.len(), 0);
    assert_eq!(corpus.split(1e-9, 1).1.len(), 1);
    assert_eq!(corpus.split(1.0, 1).0.len(), 1);
    let alone = scan(&sources(&folder(&[("a.txt", b"words")]), &["a.txt"])).unwrap();
    for fraction in [0.0, 0.5, 0.999] {
        assert_eq!(alone.split(fraction, 1), (vec![0], vec![]), "{fraction}");
    }
}

#[test]
fn a_corpus_without_a_document_says_why() {
    let dir = folder(&[("none.jsonl", b""), ("blank.txt", b" \n"), ("sub/a.rs", b"a")]);
    let told = |files: &[&str], exclude: &str| {
        let mut sources = sources(&dir, files);
        sources.on_bad_document = BadDocument::Skip;
        sources.exclude = vec![exclude.to_owned()];
        scan(&sources).unwrap_err().to_string()
    };
    assert!(told(&["none.jsonl"], "x").ends_with("none.jsonl: has no document in it"));
    let blank = told(&["blank.txt"], "x");
    assert!(blank.ends_with("blank.txt: no usable document; the document is empty"), "{blank}");
    assert!(told(&["blank.txt"], "*.txt").ends_with("no file is left after data.exclude"));
    assert!(
        told(&["sub"], "x").ends_with("`sub` is a folder; write `sub/**/*` for the files in it")
    );
}

#[test]
fn a_file_that_changes_under_the_run_is_noticed() {
    let dir = folder(&[("a.txt", b"before"), ("b.txt", b"b")]);
    let corpus = scan(&sources(&dir, &["*.txt"])).unwrap();
    std::fs::write(dir.path().join("a.txt"), b"after!").unwrap();
    assert!(corpus.document(0).unwrap_err().to_string().contains("changed while it was in use"));
    assert!(corpus.document(1).is_ok());
}

#[test]
fn a_document_longer_than_memory_is_refused_before_it_is_read() {
    let dir = folder(&[("long.txt", b"")]);
    let file = std::fs::OpenOptions::new().write(true).open(dir.path().join("long.txt")).unwrap();
    // Without blocks on the disk.
    file.set_len(1 << 40).unwrap();
    let told = scan(&sources(&dir, &["long.txt"])).unwrap_err().to_string();
    assert!(told.contains("long.txt: the document has 1099511627776 bytes, of which"), "{told}");
}
