//! Rows of documents, whole and in parts.

use super::*;
use crate::corpus::Sources;
use crate::tokens::Tokenizer;

fn corpus(texts: &[String]) -> (tempfile::TempDir, Corpus) {
    let dir = tempfile::tempdir().unwrap();
    for (i, text) in texts.iter().enumerate() {
        std::fs::write(dir.path().join(format!("{i:03}.txt")), text).unwrap();
    }
    let sources = Sources {
        root: dir.path().to_path_buf(),
        files: vec!["*.txt".to_owned()],
        ..Default::default()
    };
    let corpus = Corpus::scan(&sources, Tokenizer::bytes(), None, &mut || false).unwrap();
    (dir, corpus)
}

fn texts() -> Vec<String> {
    [3usize, 1, 17, 40, 2, 8, 100, 5]
        .iter()
        .enumerate()
        .map(|(i, &n)| "abcdefgh"[i..=i].repeat(n))
        .collect()
}

fn options(split: bool, shuffle: Option<u64>) -> PackOptions {
    PackOptions { len: 13, split, shuffle }
}

/// Every row's boundaries, positions and labels agree with each other.
fn check_rows(packed: &Packed) {
    for row in 0..packed.rows {
        for i in 0..packed.len {
            let cell = row * packed.len + i;
            let fresh = i == 0 || packed.documents[cell] != packed.documents[cell - 1];
            if packed.documents[cell] < 0 {
                assert_eq!(packed.labels[cell], IGNORE);
                continue;
            }
            assert_eq!(
                packed.positions[cell],
                if fresh { 0 } else { packed.positions[cell - 1] + 1 }
            );
            if i + 1 < packed.len && packed.documents[cell] == packed.documents[cell + 1] {
                assert_eq!(packed.labels[cell], packed.tokens[cell + 1] as i32);
            }
        }
    }
}

#[test]
fn one_pass_holds_every_token_and_every_target_once() {
    let texts = texts();
    let (_dir, corpus) = corpus(&texts);
    let mut packer =
        Packer::new(&corpus, (0..texts.len()).collect(), options(true, Some(3)), Cursor::default());
    let (mut seen, mut targets) = (0, 0);
    while let Some(packed) = packer.batch_of_pass(3, 0).unwrap() {
        check_rows(&packed);
        seen += packed.documents.iter().filter(|&&document| document >= 0).count();
        targets += packed.labelled();
    }
    let bytes: usize = texts.iter().map(String::len).sum();
    assert_eq!(seen, bytes + 2 * texts.len());
    assert_eq!(targets, bytes + texts.len());
    assert_eq!(packer.cursor(), Cursor { epoch: 1, document: 0, token: 0 });
}

#[test]
fn the_rows_of_some_passes_are_counted_without_packing_them() {
    let (_dir, corpus) = corpus(&texts());
    let all: Vec<usize> = (0..corpus.len()).collect();
    let lengths: Vec<usize> =
        all.iter().map(|&i| corpus.document(i).unwrap().tokens.len()).collect();
    for (split, shuffle) in [(true, Some(5)), (false, Some(5)), (false, None)] {
        let options = options(split, shuffle);
        let packer = Packer::new(&corpus, all.clone(), options, Cursor::default());
        for passes in 1..5 {
            let (mut rows, mut stream) = (0, packer.clone());
            while stream.cursor.epoch < passes {
                stream.batch(1).unwrap();
                rows += 1;
            }
            assert_eq!(options.rows(&lengths, passes), rows, "{passes} {split} {shuffle:?}");
        }
    }
}

#[test]
fn the_end_of_a_pass_is_not_padded() {
    let (_dir, corpus) = corpus(&["a".repeat(30), "b".repeat(5)]);
    let mut packer = Packer::new(&corpus, vec![0, 1], options(true, None), Cursor::default());
    let mut shapes = Vec::new();
    while let Some(packed) = packer.batch_of_pass(8, 0).unwrap() {
        check_rows(&packed);
        assert!(packed.documents.iter().all(|&document| document >= 0));
        shapes.push((packed.rows, packed.len));
    }
    assert_eq!(shapes, [(3, 13)]);
    let mut packer = Packer::new(&corpus, vec![1, 0], options(true, None), Cursor::default());
    packer.options.len = 16;
    let mut shapes = Vec::new();
    while let Some(packed) = packer.batch_of_pass(8, 0).unwrap() {
        shapes.push((packed.rows, packed.len));
    }
    assert_eq!(shapes, [(2, 16), (1, 7)]);
    let mut packer = Packer::new(&corpus, vec![1], options(true, None), Cursor::default());
    packer.options.len = 4096;
    let alone = packer.batch_of_pass(8, 0).unwrap().unwrap();
    assert_eq!((alone.rows, alone.len, alone.tokens.len()), (1, 7, 7));
}

#[test]
fn a_label_never_belongs_to_the_next_document() {
    let (_dir, corpus) = corpus(&["aaa".to_owned(), "bbb".to_owned()]);
    let mut packer = Packer::new(&corpus, vec![0, 1], options(true, None), Cursor::default());
    let packed = packer.batch(1).unwrap();
    assert_eq!(packed.documents, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]);
    assert_eq!(packed.positions, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]);
    assert_eq!(packed.labels[..6], [97, 97, 97, 256, IGNORE, 98]);
    assert_eq!(packed.labels[12], 97, "the target of a row's last token lies in the next row");
}

#[test]
fn any_cursor_resumes_the_same_stream() {
    let (_dir, corpus) = corpus(&texts());
    for split in [true, false] {
        let all = (0..corpus.len()).collect::<Vec<_>>();
        let mut straight =
            Packer::new(&corpus, all.clone(), options(split, Some(9)), Cursor::default());
        for step in 0..40 {
            let mut resumed =
                Packer::new(&corpus, all.clone(), options(split, Some(9)), straight.cursor());
            assert_eq!(
                resumed.batch(2).unwrap(),
                straight.batch(2).unwrap(),
                "step {step}, split {split}"
            );
        }
        assert!(straight.cursor().epoch > 2);
    }
}

#[test]
fn passes_differ_in_order_and_seeds_decide_it() {
    let (_dir, corpus) = corpus(&texts());
    let tokens = |seed, epoch| {
        let cursor = Cursor { epoch, ..Default::default() };
        Packer::new(&corpus, (0..8).collect(), options(true, Some(seed)), cursor).batch(4).unwrap()
    };
    assert_eq!(tokens(1, 0), tokens(1, 0));
    assert_ne!(tokens(1, 0), tokens(1, 1));
    assert_ne!(tokens(1, 0), tokens(2, 0));
}

/// Documents of which a tokenizer without an unknown token knows the letter `a` alone.
#[test]
fn documents_without_a_token_end_a_pass_and_are_an_error_where_there_is_no_end() {
    let dir = tempfile::tempdir().unwrap();
    let model = serde_json::json!({ "type": "BPE", "vocab": { "a": 0 }, "merges": [] });
    let file = dir.path().join("tokenizer.json");
    std::fs::write(&file, serde_json::json!({ "version": "1.0", "model": model }).to_string())
        .unwrap();
    for (i, text) in ["好好", "aaa", "好"].iter().enumerate() {
        std::fs::write(dir.path().join(format!("{i}.txt")), text).unwrap();
    }
    let root = dir.path().to_path_buf();
    let sources = Sources { root, files: vec!["*.txt".to_owned()], ..Default::default() };
    let tokenizer = Tokenizer::from_file(&file, None, None).unwrap();
    let corpus = Corpus::scan(&sources, tokenizer, None, &mut || false).unwrap();
    let stream = |documents: &[usize]| {
        Packer::new(&corpus, documents.to_vec(), options(true, Some(1)), Cursor::default())
    };
    let packed = stream(&[0, 1, 2]).batch(2).unwrap();
    assert_eq!((packed.padding(), packed.labelled()), (0, 18));
    let mut pass = stream(&[0, 1, 2]);
    assert_eq!(pass.batch_of_pass(4, 0).unwrap().unwrap().len, 3);
    assert_eq!(pass.batch_of_pass(4, 0).unwrap(), None);
    assert_eq!(stream(&[0, 2]).batch_of_pass(4, 0).unwrap(), None);
    let told = stream(&[0, 2]).batch(1).unwrap_err().to_string();
    assert!(told.starts_with("data.files: no document has a token: the tokenizer"), "{told}");
}

#[test]
fn documents_that_may_not_split_start_rows_and_are_cut_at_their_length() {
    let (_dir, corpus) = corpus(&["a".repeat(9), "b".repeat(4), "c".repeat(30)]);
    let mut packer = Packer::new(&corpus, vec![0, 1, 2], options(false, None), Cursor::default());
    let packed = packer.batch_of_pass(5, 0).unwrap().unwrap();
    check_rows(&packed);
    assert_eq!((packed.rows, packed.len), (3, 13));
    assert_eq!(packed.documents[11..13], [-1, -1]);
    assert_eq!(packed.documents[13 + 6..26], [-1; 7]);
    assert_eq!(packed.documents[26..], [0; 13]);
    assert_eq!(packer.cut_tokens(), 32 - 13);
}

/// Counts of all documents, and a corpus that can no longer read those that `lost` names.
fn counted(corpus: &Corpus, dir: &std::path::Path, lost: &[usize]) -> Arc<TokenCounts> {
    let count = |i| corpus.document(i).unwrap().tokens.len() as u32;
    let counts = TokenCounts::new((0..corpus.len()).map(count).collect());
    for i in lost {
        std::fs::remove_file(dir.join(format!("{i:03}.txt"))).unwrap();
    }
    Arc::new(counts)
}

#[test]
fn parts_of_batches_make_up_the_batches_and_cursors_are_the_same() {
    let texts = texts();
    let (dir, corpus) = corpus(&texts);
    let counts = counted(&corpus, dir.path(), &[]);
    for (split, counts) in
        [true, false].map(|split| [(split, None), (split, Some(&counts))]).concat()
    {
        let options = options(split, Some(5));
        let all: Vec<usize> = (0..8).collect();
        let mut whole = Packer::new(&corpus, all.clone(), options, Cursor::default());
        for ranks in [1, 2, 3, 5] {
            let cut = |rank: usize| rank * 5 / ranks..(rank + 1) * 5 / ranks;
            let at = whole.cursor();
            let batches: Vec<Packed> = (0..9).map(|_| whole.batch(5).unwrap()).collect();
            for rank in 0..ranks {
                let part = Packer::new(&corpus, all.clone(), options, at);
                let mut part = part.knowing(counts.cloned());
                for batch in &batches {
                    let made = part.part_of_batch(5, cut(rank)).unwrap();
                    assert_eq!(made.packed, batch.part(cut(rank)));
                    assert_eq!((made.places(), made.padding()), (5 * 13, batch.padding()));
                    assert_eq!(made.all_rows(), AllRows::of(batch));
                }
                assert_eq!((part.cursor(), part.passes()), (whole.cursor(), whole.passes()));
            }
            // A pass: rows and their lengths are those of one rank's.
            let mut parts: Vec<_> = (0..ranks)
                .map(|_| Packer::new(&corpus, all.clone(), options, Cursor::default()))
                .map(|part| part.knowing(counts.cloned()))
                .collect();
            let mut one = Packer::new(&corpus, all.clone(), options, Cursor::default());
            while let Some(batch) = one.batch_of_pass(5, 0).unwrap() {
                let own =
                    |rank: usize| move |rows: usize| rank * rows / ranks..(rank + 1) * rows / ranks;
                for (rank, part) in parts.iter_mut().enumerate() {
                    let made = part.part_of_pass(5, 0, own(rank)).unwrap().unwrap();
                    assert_eq!(made.packed, batch.part(own(rank)(batch.rows)));
                    assert_eq!(made.all_rows(), AllRows::of(&batch));
                    assert_eq!(part.cut_tokens(), one.cut_tokens());
                }
            }
            assert!(
                parts.iter_mut().all(|part| part.part_of_pass(5, 0, |n| 0..n).unwrap().is_none())
            );
        }
    }
}

#[test]
fn rows_of_others_are_not_read_where_documents_are_counted() {
    let texts: Vec<String> = (0..6).map(|i| "abcdefgh"[i..=i].repeat(24)).collect();
    let (dir, corpus) = corpus(&texts);
    // A document and its two ends fill two rows of 13 tokens.
    let counts = counted(&corpus, dir.path(), &[0, 1, 4, 5]);
    let options = options(true, None);
    let stream = || Packer::new(&corpus, (0..6).collect(), options, Cursor::default());
    let mut part = stream().knowing(Some(counts.clone()));
    let own = part.part_of_batch(12, 4..8).unwrap().packed;
    assert_eq!(own.pieces.iter().map(|piece| piece.document).collect::<Vec<_>>(), [2, 2, 3, 3]);
    assert_eq!(part.cursor(), Cursor { epoch: 1, document: 0, token: 0 });
    // One that is read is held to its count.
    assert!(stream().part_of_batch(12, 4..8).is_err(), "without counts all are read");
    let wrong = Arc::new(TokenCounts::new(vec![26, 26, 25, 26, 26, 26]));
    let told = stream().knowing(Some(wrong)).part_of_batch(12, 4..8).unwrap_err().to_string();
    assert!(told.contains("002.txt") && told.contains("26 tokens, but 25 when"), "{told}");
}
