//! Conversations of a run, and with the checkpoint that it saves.

use super::*;
use crate::chat::Message;
use crate::checkpoint::SpecialTexts;

/// A token that a tokenizer has beside its words.
fn special(id: u32, text: &str) -> serde_json::Value {
    serde_json::json!({ "id": id, "content": text, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true })
}

/// A tokenizer of words in a folder of its own, with a template for conversations beside it.
fn tokenizer_in(folder: &Path) {
    let vocab = serde_json::json!({ "say": 0, "yes": 1, "<s>": 2, "</s>": 3, "?": 4 });
    let file = serde_json::json!({
        "version": "1.0", "added_tokens": [special(2, "<s>"), special(3, "</s>")],
        "pre_tokenizer": { "type": "Whitespace" },
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "?" },
    });
    let template =
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}";
    let beside = serde_json::json!({
        "bos_token": "<s>", "eos_token": { "content": "</s>" }, "chat_template": template
    });
    std::fs::create_dir(folder).unwrap();
    std::fs::write(folder.join("tokenizer.json"), file.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), beside.to_string()).unwrap();
}

/// A run on conversations with that tokenizer.
fn run_of_words(place: &Place) -> (Summary, Log) {
    tokenizer_in(&place.0.path().join("words"));
    let sets = ["data.files=['chat.jsonl']", "data.tokenizer='words/tokenizer.json'"];
    place.run(&place.recipe(&sets), Start::New).unwrap()
}

/// Of a checkpoint without it, others and `foveate generate` would write conversations without the tokens that a run
/// learned to end turns with.
#[test]
fn what_lies_beside_a_tokenizer_of_the_recipe_is_used_and_goes_along_with_the_checkpoint() {
    let place = Place::new();
    let (summary, log) = run_of_words(&place);
    // `yes yes` and what ends that turn, of `<s>say ?</s>yes yes</s>`.
    assert_eq!(log.tokens, 6 * 3 * 24 * 3 / 7);
    let saved = checkpoint::read_config(&summary.checkpoint, Checksums::Verify).unwrap();
    assert_eq!(saved.special, SpecialTexts { bos: "<s>".to_owned(), eos: "</s>".to_owned() });
    let says = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
    let talk = [says("user", "say"), says("assistant", "yes"), says("user", "say")];
    let text = saved.template().unwrap().text(&talk, true, &mut || false).unwrap();
    assert_eq!(text, "<s>say</s>yes</s>say</s>");
    assert_eq!(saved.tokenizer.encode(&text).unwrap().ids, [2, 0, 3, 1, 3, 0, 3]);
    // A run from there keeps both.
    let run = place.0.path().join("tuned");
    let sets = [
        format!("model={{ checkpoint = {:?} }}", summary.checkpoint),
        format!("run.dir={}", run.display()),
        "data.files=['chat.jsonl']".to_owned(),
    ];
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let (summary, _) = place.run(&place.recipe(&sets), Start::New).unwrap();
    let tuned = checkpoint::read_config(&summary.checkpoint, Checksums::Verify).unwrap();
    assert_eq!((tuned.special, tuned.chat_template), (saved.special, saved.chat_template));
}

/// A loss of no token is no loss of 0, which would be the best there is.
#[test]
fn held_out_conversations_without_a_token_to_learn_have_no_loss_and_what_is_cut_is_told() {
    let place = Place::new();
    let write = |file: &str, text: &str| std::fs::write(place.0.path().join(file), text).unwrap();
    write("short.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    let run = |question: &str, answer: &str| {
        let turn = |role: &str, said: &str| serde_json::json!({ "role": role, "content": said });
        let talk = |question: &str, answer: &str| {
            let messages = [turn("user", question), turn("assistant", answer)];
            format!("{}\n", serde_json::json!({ "messages": messages }))
        };
        write("talks.jsonl", &(talk(question, answer) + &talk("say", "no")));
        let recipe = place.recipe(&[
            "data.files=['talks.jsonl']",
            "data.chat_template='short.jinja'",
            "data.split_documents=false",
            "data.len=8",
        ]);
        let mut log = Log::default();
        // Where nothing is learned of the one that is trained on, there is no run.
        let summary = train(&recipe, &place.file(), Start::Over, &mut log).ok()?;
        assert!(!summary.interrupted && summary.held_out_documents == 1);
        Some((summary, log))
    };
    let (summary, log) = run("tell", "yes").unwrap();
    assert_eq!((summary.cut_tokens, log.cuts, log.held_out.len()), (0, 0, 2));
    // Rows end before what is learned behind a long question. Which of the two is held out depends on what it says.
    let long = |i: usize| format!("say it all again, {i}");
    let mut runs = (0..).filter_map(|i| run(&long(i), "yes"));
    let (summary, log) = runs.find(|(summary, _)| summary.cut_tokens == 0).unwrap();
    assert_eq!((summary.held_out_loss, log.held_out.len()), (None, 0));
    let mut runs = (0..).filter_map(|i| run("say", &long(i)));
    let (summary, log) = runs.find(|(summary, _)| summary.cut_tokens > 0).unwrap();
    assert!(summary.held_out_loss.is_some());
    assert_eq!((log.held_out.len(), log.cuts), (2, 1));
}

/// As that of Gemma 3, whose models without vision have no row for what stands for an image.
#[test]
fn a_tokenizer_may_have_added_tokens_that_its_model_does_not_know() {
    let place = Place::new();
    let (base, _) = run_of_words(&place);
    let file = base.checkpoint.join("tokenizer.json");
    let whole: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let model = format!("model={{ checkpoint = {:?} }}", base.checkpoint);
    let dir = format!("run.dir={}", place.0.path().join("tuned").display());
    let recipe = place.recipe(&["data.files=['chat.jsonl']", &model, &dir]);
    let mut more = whole.clone();
    more["added_tokens"].as_array_mut().unwrap().push(special(5, "<image>"));
    std::fs::write(&file, more.to_string()).unwrap();
    place.run(&recipe, Start::Over).unwrap();
    let mut other = whole;
    other["model"]["vocab"]["no"] = 5.into();
    std::fs::write(&file, other.to_string()).unwrap();
    let told = place.run(&recipe, Start::Over).unwrap_err().to_string();
    assert!(told.contains("the tokenizer has 6 tokens, but the model knows 5"), "{told}");
}
