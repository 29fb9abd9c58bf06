//! `foveate shard check` proves the plan of a recipe, or says in one line what cannot be.

use std::path::Path;
use std::process::{Command, Stdio};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Exit code, stdout and stderr of `foveate shard check` on a recipe of the repository.
fn check(recipe: &str, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
    command.args(["shard", "check"]).arg(root().join("recipes").join(recipe)).args(args);
    let done = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (done.status.code(), text(done.stdout), text(done.stderr))
}

#[test]
fn a_recipe_is_proven_on_a_mesh_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("plan.svg");
    let args = ["--mesh", "replicate=2,shard=2,context=auto", "--ranks", "16"];
    let more = ["--doc-lens", "200,50,262", "--svg", picture.to_str().unwrap(), "--json"];
    let (code, out, said) = check("tiny.toml", &[&args[..], &more].concat());
    assert_eq!(code, Some(0), "{said}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["mesh"], "replicate=2,shard=2,context=4,tensor=1");
    assert_eq!(report["ranks"], 16);
    // Four layers of six heads of eight rows of three causal documents.
    let causal: u64 = [200u64, 50, 262].iter().map(|n| n * (n + 1) / 2).sum();
    assert_eq!(report["live_entries"], 4 * 6 * 8 * causal);
    assert_eq!(report["labels"], 8 * 512);
    let drawn = std::fs::read_to_string(&picture).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n") && drawn.contains("hsl(270,"));

    let (code, out, said) = check("tiny.toml", &["--mesh", "context=2,tensor=2"]);
    assert_eq!(code, Some(0), "{said}");
    for line in [
        "  q             bf16[batch, heads@tensor, seq@context, dim]",
        "  masters       f32[elements@context]",
        "(b) live tiles  ",
        "(g) imbalance   1.",
    ] {
        assert!(out.contains(line), "{line} is not in\n{out}");
    }
}

#[test]
fn what_cannot_be_planned_or_proven_is_one_line() {
    for (args, code, says) in [
        (
            &["--mesh", "context=8", "--set", "data.len=4"][..],
            2,
            "a row of 4 tokens is 4 chunks of 1, and 8 ranks need one each",
        ),
        (
            &["--mesh", "context=2", "--chunk", "512"],
            2,
            "is 1 chunk of 512, and 2 ranks need one each; use 1 rank of context",
        ),
        (&["--mesh", "context=2", "--rows", "0"], 2, "--rows is 0; a batch has a row or more"),
        (&["--mesh", "context=2", "--rows", "-1"], 2, "invalid value '-1' for '--rows <N>'"),
        (&["--mesh", "context=2", "--max-imbalance", "nan"], 2, "--max-imbalance is NaN; the"),
        (&["--mesh", "context=2", "--max-imbalance", "-1"], 2, "--max-imbalance is -1; the"),
        (
            &["--mesh", "replicate=65536", "--rows", "65536"],
            2,
            "error: the plan of so many ranks takes about 64.0 GiB",
        ),
        (&["--mesh", "replicate=1000000"], 2, "has more than 65536 ranks"),
        (&["--mesh", "tensor=4"], 2, "2 key/value heads cannot be cut over 4 ranks"),
        (&["--mesh", "data=4"], 2, "`data` is no axis of a mesh"),
        (&["--mesh", "context=auto"], 2, "the number of ranks is not known"),
        (&["--mesh", "context=3,shard=auto", "--ranks", "8"], 2, "8 ranks cannot be divided by 3"),
        (&["--mesh", "context=2", "--chunk", "100"], 2, "no multiple of tiles of 32"),
        (
            &["--mesh", "context=4", "--strategy", "heads"],
            2,
            "2 key/value heads of a rank cannot be cut over 4",
        ),
        (&["--mesh", "context=4", "--strategy", "ring"], 2, "gather, exchange, exchange:1"),
        (
            &["--mesh", "context=4", "--doc-lens", "5"],
            2,
            "the documents have 5 tokens, a row has 512",
        ),
        (&["--mesh", "context=3", "--max-imbalance", "1.0"], 1, "(g) live entries, rank"),
        (
            &["--mesh", "context=2", "--set", "attention.mask=causal", "--doc-lens", "512"],
            2,
            "reads no documents",
        ),
    ] {
        let (found, out, said) = check("tiny.toml", args);
        assert_eq!(found, Some(code), "{args:?}: {out}{said}");
        assert!(said.contains(says), "{args:?}: {said}");
        assert!(!said.contains("panicked"), "{args:?}: {said}");
    }
    let (code, _, said) = check("finetune-chat.toml", &["--mesh", "context=2"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("the recipe starts from a checkpoint"), "{said}");
}
