//! `foveate shard check` proves the plan of a recipe, `foveate shard simulate` predicts its step; what
//! cannot be is said in one line.

use std::path::Path;
use std::process::{Command, Stdio};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Exit code, stdout and stderr of `foveate shard check` on a recipe of the repository.
fn check(recipe: &str, args: &[&str]) -> (Option<i32>, String, String) {
    shard("check", recipe, args)
}

fn shard(what: &str, recipe: &str, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
    command.args(["shard", what]).arg(root().join("recipes").join(recipe)).args(args);
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
    // Of each of the six groups a gather, of the layers but the last one more, two sums; and the norm.
    assert_eq!(report["step"]["edges"], 6 + 3 + 1 + 2 * 6 + 1);
    assert_eq!(report["step"]["ranks"], 16);
    let drawn = std::fs::read_to_string(&picture).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n") && drawn.contains("hsl(270,"));

    let (code, out, said) = check("tiny.toml", &["--mesh", "context=2,tensor=2"]);
    assert_eq!(code, Some(0), "{said}");
    for line in [
        "  q             bf16[batch, heads@tensor, seq@context, dim]",
        "  masters       f32[elements@context]",
        "(b) live tiles  ",
        "(g) imbalance   1.",
        "the step between its attention, step ",
        "(d) sums        ",
    ] {
        assert!(out.contains(line), "{line} is not in\n{out}");
    }
}

/// The pictures of docs/sharding.md are what the commands beside them draw.
#[test]
fn pictures_of_the_manual_are_drawn_by_its_commands() {
    let manual = std::fs::read_to_string(root().join("docs/sharding.md")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let drawn = folder.path().join("plan.svg");
    for (image, documents) in [("dispatch", ""), ("shard", " --doc-lens 2900,700,1100,3492")] {
        let words = format!("--mesh context=4 --rows 1 --set data.len=8192{documents} --svg");
        let command = format!("`foveate shard check recipes/tiny.toml {words} plan.svg`");
        assert!(manual.contains(&command), "{command} is not in docs/sharding.md");
        let args: Vec<_> = words.split(' ').chain(drawn.to_str()).collect();
        let (code, _, said) = check("tiny.toml", &args);
        assert_eq!(code, Some(0), "{said}");
        let image = root().join(format!("docs/images/{image}.svg"));
        let same = std::fs::read(&drawn).unwrap() == std::fs::read(&image).unwrap();
        assert!(same, "{} is of another version; draw it again: {command}", image.display());
    }
}

/// Rows, chunks and heads that nothing divides: it is proven where every rank has something, and refused with what can
/// be where it has not.
#[test]
fn a_mesh_that_divides_nothing_is_proven_or_refused_with_the_numbers() {
    let mesh = ["--mesh", "shard=3,context=5"];
    let (code, out, said) = check("tiny.toml", &[&mesh[..], &["--json"]].concat());
    assert_eq!(code, Some(0), "{said}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&report["ranks"], &report["labels"]), (&15.into(), &(8 * 512).into()));
    // Two or three rows, and six or seven chunks of a row, on each rank.
    let loads: Vec<f64> =
        report["loads"].as_array().unwrap().iter().map(|load| load.as_f64().unwrap()).collect();
    assert!(loads.len() == 15 && loads.iter().all(|&load| load > 0.0), "{out}");
    assert!(number(&report, "imbalance") < 1.15, "{out}");
    let (code, _, said) =
        check("tiny.toml", &["--mesh", "shard=3,context=5", "--max-imbalance", "1.1"]);
    assert!(code == Some(1) && said.contains("imbalance"), "{said}");
    for (more, says) in [
        (&["--rows", "2"][..], "3 ranks share the rows"),
        (&["--set", "data.len=4"], "5 ranks need one each"),
        (&["--mesh", "shard=3,context=5,tensor=7"], "num_attention_heads: is 6, which cannot"),
    ] {
        let mesh: &[&str] = if more[0] == "--mesh" { &[] } else { &mesh };
        let (code, _, said) = check("tiny.toml", &[mesh, more].concat());
        let errors = said.lines().filter(|line| line.starts_with("error: ")).count();
        assert!(code == Some(2) && errors == 1 && said.contains(says), "{said}");
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
        (&["--mesh", "replicate=3,shard=3"], 2, "9 ranks share the rows of a batch, which has 8"),
        (&["--mesh", "context=2", "--rows", "-1"], 2, "invalid value '-1' for '--rows <N>'"),
        (&["--mesh", "context=2", "--max-imbalance", "nan"], 2, "--max-imbalance is NaN; the"),
        (&["--mesh", "context=2", "--max-imbalance", "-1"], 2, "--max-imbalance is -1; the"),
        (
            &["--mesh", "replicate=65536", "--rows", "65536"],
            2,
            "error: the plan of so many ranks takes about 64.0 GiB",
        ),
        (
            &["--mesh", "replicate=1000000"],
            2,
            "a mesh of replicate=1000000,shard=1,context=1,tensor=1 has more than 65536 ranks",
        ),
        (
            &["--mesh", "tensor=8"],
            2,
            "num_attention_heads: is 6, which cannot be cut over 8 ranks of tensor; use 1 to 6 of them",
        ),
        (&["--mesh", "data=4"], 2, "`data` is no axis of a mesh"),
        (&["--mesh", "context=auto"], 2, "the number of ranks is not known"),
        (&["--mesh", "context=3,shard=auto", "--ranks", "8"], 2, "8 ranks cannot be divided by 3"),
        (
            &["--mesh", "context=2", "--chunk", "100"],
            2,
            "no multiple of tiles of 32 queries; give 96",
        ),
        (&["--mesh", "context=2", "--chunk", "4096"], 2, "longer rows, or smaller chunks"),
        (
            &["--mesh", "tensor=4", "--set", "model.vocab_size=3"],
            2,
            "model.vocab_size is 3, below the tokenizer's 257",
        ),
        (
            &["--mesh", "tensor=2", "--set", "data.tokenizer=t.json"],
            2,
            "model.vocab_size is not given, and t.json is not read for it; give it",
        ),
        (
            &[
                "--mesh",
                "tensor=4",
                "--set",
                "model.vocab_size=3",
                "--set",
                "data.tokenizer=t.json",
            ],
            2,
            "vocab_size: is 3, which cannot be cut over 4 ranks of tensor; use 1 to 3 of them",
        ),
        (
            &["--mesh", "context=4", "--strategy", "heads"],
            2,
            "2 key/value heads of a rank cannot be cut over 4",
        ),
        (&["--mesh", "context=4", "--strategy", "ring"], 2, "gather, exchange, exchange:0"),
        (
            &["--mesh", "context=4", "--doc-lens", "5"],
            2,
            "the documents have 5 tokens, a row has 512",
        ),
        (
            &["--mesh", "context=4", "--doc-lens", "500,500"],
            2,
            "the documents have 1000 tokens, a row has 512",
        ),
        (
            &["--mesh", "context=4", "--doc-lens", "0"],
            2,
            "the documents have 0 tokens, a row has 512",
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
    assert!(said.contains("models/base is not there") && said.contains("config.json"), "{said}");
}

/// Sizes, masks and the number of token ids are those that a run would have.
#[test]
fn a_recipe_of_a_checkpoint_is_proven_and_simulated_by_its_config_alone() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = r#"{ "model_type": "mistral", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "sliding_window": 100, "tie_word_embeddings": false }"#;
    std::fs::write(folder.path().join("config.json"), sizes).unwrap();
    let set = format!("model={{ checkpoint = {:?} }}", folder.path());
    let args = ["--mesh", "context=2,tensor=2", "--rows", "1", "--set", &set, "--json"];
    // The recipe's attention is another.
    let text = std::fs::read_to_string(root().join("recipes/tiny.toml")).unwrap();
    let own = folder.path().join("recipe.toml");
    std::fs::write(&own, text.replace("[attention]\nmask = \"causal & document\"\n", "")).unwrap();
    let (code, out, said) = check(own.to_str().unwrap(), &args);
    assert_eq!(code, Some(0), "{said}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    // A window of 100 in 512 tokens, of four heads in two layers.
    let live: u64 = (0..512u64).map(|q| 100.min(q + 1)).sum();
    assert_eq!(report["live_entries"], 4 * 2 * live, "{out}");
    let found = simulated(own.to_str().unwrap(), &[&args[..6], &["--machine", "h100x8"]].concat());
    assert!(number(&found, "step_ms") > 0.0, "{found}");
    // 257 ids of bytes, of the embedding and, where it is not tied, the head.
    let untied = ["--mesh", "shard=2", "--set", "model.tie_word_embeddings=false", "--json"];
    let elements = |args: &[&str]| {
        let (code, out, said) = check("tiny.toml", args);
        assert_eq!(code, Some(0), "{said}");
        serde_json::from_str::<serde_json::Value>(&out).unwrap()["step"]["parameter_elements"]
            .as_u64()
    };
    let tied = elements(&["--mesh", "shard=2", "--json"]).unwrap();
    assert_eq!((elements(&untied).unwrap() - tied) / 192, 257);
}

/// What `foveate shard simulate` says of a recipe with its state as it is measured.
fn simulated(recipe: &str, args: &[&str]) -> serde_json::Value {
    let exact =
        ["--set", "precision.state=exact", "--set", "train.accumulate=1", "--json", "--insist"];
    let again = ["--set", "train.recompute=none"];
    let again = if args.contains(&"train.recompute=full") { &[][..] } else { &again[..] };
    let (code, out, said) = shard("simulate", recipe, &[&exact[..], again, args].concat());
    assert_eq!(code, Some(0), "{args:?}: {said}");
    serde_json::from_str(&out).unwrap()
}

fn number(report: &serde_json::Value, name: &str) -> f64 {
    report[name].as_f64().unwrap_or_else(|| panic!("{name} is no number in {report}"))
}

/// The steps of scripts/meshes.toml, eight of which the machine's rates do not come from; docs/sharding.md has them
/// all.
#[test]
fn measured_steps_are_predicted_within_a_tenth_and_stand_in_the_manual() {
    let read = |file: &str| std::fs::read_to_string(root().join(file)).unwrap();
    let given: toml::Table = toml::from_str(&read("scripts/meshes.toml")).unwrap();
    let manual = read("docs/sharding.md");
    let text = |of: &toml::Value, name: &str| of[name].as_str().unwrap().to_owned();
    let steps = given["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 3 + 8);
    for step in steps {
        let (name, mesh) = (text(step, "name"), text(step, "mesh"));
        let [rows, len] = ["rows", "len"].map(|name| step[name].as_integer().unwrap());
        let measured = step["ms"].as_float().unwrap();
        let mut args: Vec<String> =
            ["--machine", "h200x8", "--mesh", &mesh, "--rows"].map(str::to_owned).to_vec();
        args.push(rows.to_string());
        let mut set = |name: &str, value: &dyn std::fmt::Display| {
            args.extend(["--set".to_owned(), format!("{name}={value}")]);
        };
        let model = given["models"][&text(step, "model")].as_table().unwrap();
        for (name, value) in model.iter().filter(|(name, _)| *name != "recipe") {
            set(&format!("model.{name}"), value);
        }
        set("precision.state", &text(step, "state"));
        set("data.len", &len);
        if len > 8192 {
            set("model.max_position_embeddings", &len);
        }
        if let Some(strategy) = step.get("strategy") {
            set("mesh.strategy", strategy);
        }
        if let Some(lens) = step.get("doc_lens") {
            let lens: Vec<_> = lens.as_array().unwrap().iter().map(|n| n.to_string()).collect();
            args.extend(["--doc-lens".to_owned(), lens.join(",")]);
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let recipe = text(&given["models"][&text(step, "model")], "recipe") + ".toml";
        let found = number(&simulated(&recipe, &args), "step_ms");
        let off = found / measured - 1.0;
        println!("{name}: {found:.1} ms, {measured} measured, {:.1} %", 100.0 * off);
        assert!(off.abs() < 0.1, "{name}: {found} ms predicted, {measured} measured");
        let gpus = &mesh[mesh.len() - 1..];
        let begins = format!("| {name} | {gpus} | {rows} × {} | ", thousands(len));
        let row = manual.lines().find_map(|line| line.strip_prefix(&begins));
        let row = row.unwrap_or_else(|| panic!("{begins} is not in docs/sharding.md"));
        let said = row.split(" | ").map(|cell| cell.replace(',', "").parse::<f64>());
        let [Ok(of_manual), Ok(simulated), ..] = said.collect::<Vec<_>>()[..] else {
            panic!("{row}");
        };
        assert_eq!(of_manual, measured, "{name}");
        assert!(
            (simulated / found - 1.0).abs() < 5e-3,
            "{name}: the manual has {simulated} ms, {found} are simulated; run scripts/meshes.py"
        );
    }
}

/// With a comma before the last three digits.
fn thousands(n: i64) -> String {
    if n < 1000 { n.to_string() } else { format!("{},{:03}", n / 1000, n % 1000) }
}

/// By how many bytes they are in f32, at the machine's rate; with one stage there is nothing to join.
#[test]
fn parts_of_attention_take_their_time_to_be_joined() {
    let folder = tempfile::tempdir().unwrap();
    let machine = std::fs::read_to_string(root().join("crates/foveate-shard/machines/h100x8.toml"));
    let machine = machine.unwrap();
    let file = folder.path().join("machine.toml");
    let step = |join: &str, strategy: &str| {
        let with = machine.replace("[gpu.gbps]\n", &format!("[gpu.gbps]\n\"join\" = {join}\n"));
        assert_ne!(with, machine);
        std::fs::write(&file, with).unwrap();
        let args = ["--mesh", "context=2", "--rows", "1", "--strategy", strategy, "--machine"];
        number(
            &simulated("llama3-8b.toml", &[&args[..], &[file.to_str().unwrap()]].concat()),
            "step_ms",
        )
    };
    assert_eq!(step("1000", "exchange:0"), step("1", "exchange:0"));
    // A causal row of 8,192 tokens on two ranks: 4,096 queries of 32 heads, all of which the first stage computes and
    // each of the two later ones some of. In 32 layers, 1,000 GB/s in place of 1.
    let slower = step("1", "exchange:2") - step("1000", "exchange:2");
    let numbers = 32.0 * 4096.0 * 32.0 * 128.0 * (1.0 - 1e-3) / 1e6;
    let [least, most] = [2.0 + 6.0, 2.0 + 16.0 + 8.0 + 6.0].map(|bytes| bytes * numbers);
    assert!((least..=most).contains(&slower), "{slower}: {least} to {most}");
}

#[test]
fn transfers_that_take_longer_make_a_step_longer_and_are_seen_in_its_trace() {
    let folder = tempfile::tempdir().unwrap();
    let machine = std::fs::read_to_string(root().join("crates/foveate-shard/machines/h100x8.toml"));
    let machine = machine.unwrap();
    let slow = folder.path().join("slow.toml");
    let slower = machine.replace("gbps = 360", "gbps = 3.6").replace("gbps = 40", "gbps = 0.4");
    assert_ne!(slower, machine);
    std::fs::write(&slow, slower).unwrap();
    let (slow, trace) = (slow.to_str().unwrap(), folder.path().join("trace.json"));
    let mut last = 0.0;
    for mesh in ["shard=2", "context=2", "tensor=2", "replicate=2", "shard=4,context=2,tensor=2"] {
        let args = ["--mesh", mesh, "--rows", "8", "--trace", trace.to_str().unwrap()];
        let on =
            |machine| simulated("llama3-8b.toml", &[&args[..], &["--machine", machine]].concat());
        let (fast, slow) = (on("h100x8"), on(slow));
        assert!(number(&slow, "step_ms") > 1.2 * number(&fast, "step_ms"), "{mesh}");
        for report in [&fast, &slow] {
            let rank = &report["ranks"][0];
            let idle =
                rank["idle"].as_array().unwrap().iter().map(|i| number(i, "seconds")).sum::<f64>();
            let whole = number(rank, "compute_ms") + 1e3 * idle;
            assert!((whole / number(report, "step_ms") - 1.0).abs() < 1e-6, "{mesh}: {report}");
        }
        let text = std::fs::read_to_string(&trace).unwrap();
        let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let end = events.iter().map(|e| number(e, "ts") + number(e, "dur")).fold(0.0, f64::max);
        assert!((end / 1e3 / number(&slow, "step_ms") - 1.0).abs() < 1e-6, "{mesh}");
        last = number(&fast, "memory_bytes");
    }
    // More ranks hold less each.
    let one = simulated("llama3-8b.toml", &["--mesh", "shard=1", "--machine", "h100x8"]);
    assert!(last < number(&one, "memory_bytes") / 2.0);
}

/// All figures are of a step, whatever it has of batches, and the text says so.
#[test]
fn what_is_simulated_is_of_a_step_and_says_so() {
    let of = |accumulate: &str| {
        let set = format!("train.accumulate={accumulate}");
        let args = ["--mesh", "shard=2", "--machine", "h100x8", "--set", &set];
        let json = [&args[..], &["--json"]].concat();
        let (code, out, said) = shard("simulate", "tiny.toml", &json);
        assert_eq!(code, Some(0), "{said}");
        let (_, text, _) = shard("simulate", "tiny.toml", &args);
        (serde_json::from_str::<serde_json::Value>(&out).unwrap(), text)
    };
    let [one, two, eight] = ["1", "2", "8"].map(of);
    assert!(one.1.contains(" ms for 1 batch of 8 rows over all ranks, "), "{}", one.1);
    assert!(eight.1.contains(" ms for 8 batches of 8 rows over all ranks, "), "{}", eight.1);
    assert!(eight.1.contains(" ms of the step, waits for "), "{}", eight.1);
    let computed = |found: &serde_json::Value| number(&found["ranks"][0], "compute_ms");
    let [a, b, c] = [&one.0, &two.0, &eight.0].map(computed);
    assert!((c - (a + 7.0 * (b - a))).abs() < 1e-9 * c, "{a} {b} {c}");
    assert!(c > 4.0 * a && c <= number(&eight.0, "step_ms") + 1e-9, "{a} {c}");
    for (found, _) in [&one, &two, &eight] {
        let idle = found["ranks"][0]["idle"].as_array().unwrap();
        let idle: f64 = idle.iter().map(|idle| number(idle, "seconds")).sum();
        let all = computed(found) + 1e3 * idle;
        assert!((all / number(found, "step_ms") - 1.0).abs() < 1e-6, "{found}");
    }
}

/// The events of a trace by name: `[begin, end]`, in microseconds.
fn named(events: &[serde_json::Value], name: &str) -> Vec<[f64; 2]> {
    let found = events.iter().filter(|event| event["name"] == name);
    found.map(|e| [number(e, "ts"), number(e, "ts") + number(e, "dur")]).collect()
}

/// Copies of the parameters have their gradients summed once a step, behind all of its batches, and the norm waits;
/// where groups are updated in the backward pass, each behind its layer.
#[test]
fn gradients_of_copies_are_summed_once_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let of = |sets: &[&str]| {
        let mesh = ["--mesh", "replicate=2", "--rows", "2", "--machine", "h100x8", "--trace"];
        let args = [&mesh[..], &[file.to_str().unwrap()], sets].concat();
        simulated("llama3-8b.toml", &args);
        let trace = std::fs::read_to_string(&file).unwrap();
        let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
        trace["traceEvents"].as_array().unwrap().clone()
    };
    let events = of(&["--set", "train.accumulate=3"]);
    let sums = named(&events, "all-reduce gradients");
    let [norm, last] = ["norm of gradients", "embed backward"].map(|name| named(&events, name));
    assert_eq!((sums.len(), norm.len(), last.len()), (1, 1, 2), "two batches are traced");
    assert!(last[1][1] <= sums[0][0] + 1e-3, "behind the last batch");
    assert!(sums[0][1] <= norm[0][0] + 1e-3, "the norm waits");
    let events = of(&["--set", "optimizer.in_backward=true", "--set", "optimizer.clip_norm=0"]);
    assert!(named(&events, "all-reduce gradients").is_empty());
    let (first, last) = (named(&events, "all-reduce layers.31"), named(&events, "embed backward"));
    assert!(first.len() == 1 && first[0][0] < last[0][0], "{first:?} {last:?}");
}

/// What a recipe says of how parameters stay and gradients travel is what is checked and simulated.
#[test]
fn what_a_recipe_says_of_its_mesh_is_held_to_the_gpu_and_simulated() {
    let mesh = ["--mesh", "shard=8", "--rows", "8", "--machine", "h100x8"];
    let of = |sets: &[&str]| simulated("llama3-8b.toml", &[&mesh[..], sets].concat());
    let memory = |sets: &[&str]| number(&of(sets), "memory_bytes");
    // In 16 bits all weights in place of two groups that follow each other, which are a layer and the head.
    let (all, head, layer) = (8_030_261_248.0, 128_256.0 * 4096.0, 218_112_000.0);
    let usual = memory(&[]);
    // The backward pass of the embedding reads no weights.
    for (kept, dropped) in [("never", 0.0), ("after_backward", head)] {
        let more = memory(&["--set", &format!("mesh.reshard={kept}")]) - usual;
        let right = 2.0 * (all - dropped - head - layer);
        assert!((more / right - 1.0).abs() < 0.01, "{kept}: {more}");
    }
    let rounded = memory(&["--set", "mesh.reduce_dtype=bf16"]) - usual;
    assert!((rounded / (2.0 * head) - 1.0).abs() < 0.01, "{rounded}");
    let state = ["--set", "precision.state=exact", "--machine", "h100x8", "--rows", "2"];
    let full = ["--set", "train.recompute=full", "--mesh", "shard=2"];
    let args = [&state[..], &full].concat();
    let (code, _, said) = check("llama3-8b.toml", &args);
    assert_eq!(code, Some(0), "{said}");
    let (code, _, said) =
        check("llama3-8b.toml", &[&args[..], &["--set", "mesh.reshard=never"]].concat());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("(f) a step, place 0 of context: takes "), "{said}");
    // Half the bytes of gradients.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let reduced = |sets: &[&str]| {
        of(&[&["--trace", file.to_str().unwrap()], sets].concat());
        let trace = std::fs::read_to_string(&file).unwrap();
        let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let reduce = named(events, "reduce layers.3");
        reduce[0][1] - reduce[0][0]
    };
    let (f32, bf16) = (reduced(&[]), reduced(&["--set", "mesh.reduce_dtype=bf16"]));
    assert!(bf16 < 0.6 * f32, "{bf16} µs beside {f32}");
}

/// Keys leave before queries are computed, and attention waits for both; gradients of keys return while that of o's
/// weight is computed. Where a product needs the tokens of other ranks, keys leave behind it.
#[test]
fn keys_travel_beside_products_as_in_a_step_on_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let of = |mesh: &str| {
        let long = ["--set", "data.len=65536", "--set", "model.max_position_embeddings=65536"];
        let args = ["--mesh", mesh, "--rows", "1", "--machine", "h100x8", "--trace"];
        let once = ["--set", "train.accumulate=1", "--set", "train.recompute=none"];
        let args = [&args[..], &[file.to_str().unwrap()], &long, &once].concat();
        simulated("llama3-8b.toml", &args);
        let trace = std::fs::read_to_string(&file).unwrap();
        let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
        move |name: &str| named(trace["traceEvents"].as_array().unwrap(), name)
    };
    let found = of("context=2");
    let [keys, arrive, queries, attention] = [
        "layer 3: keys, values",
        "layer 3: attention: keys of stage 0",
        "layer 3: queries",
        "layer 3: attention, stage 0",
    ]
    .map(|name| found(name)[0]);
    assert!(keys[1] <= arrive[0] + 1e-3 && arrive[0] < queries[1], "{arrive:?} {queries:?}");
    assert!(attention[0] + 1e-3 >= arrive[1].max(queries[1]), "{attention:?}");
    let [attention, returned, weight, next] = [
        "layer 3 backward: attention",
        "layer 3 backward: attention: gradients of keys",
        "layer 3 backward: gradient of weights, out",
        "layer 3 backward: gradient of weights, qkv",
    ]
    .map(|name| found(name)[0]);
    assert!(attention[1] <= returned[0] + 1e-3 && returned[0] < weight[1], "{returned:?}");
    assert!(next[0] + 1e-3 >= returned[1], "{next:?}");
    let found = of("tensor=2,context=2");
    let [product, arrive] =
        ["layer 3: qkv", "layer 3: attention: keys of stage 0"].map(|name| found(name)[0]);
    assert!(product[1] <= arrive[0] + 1e-3 && found("layer 3: queries").is_empty());
}

/// Over four ranks of `tensor` a product is of one rank's tokens at a time: this one's while others' come, or
/// others' first, each sent while the next is computed.
#[test]
fn the_stream_moves_as_a_step_on_gpus_moves_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let of = |sets: &[&str]| {
        let args = ["--mesh", "tensor=4", "--rows", "2", "--machine", "h100x8", "--trace"];
        simulated("llama3-8b.toml", &[&args[..], &[file.to_str().unwrap()], sets].concat());
        let trace = std::fs::read_to_string(&file).unwrap();
        let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
        trace["traceEvents"].as_array().unwrap().clone()
    };
    let events = of(&[]);
    let near = |a: f64, b: f64| (a - b).abs() < 1e-3;
    let (kernels, gathers) =
        (named(&events, "layer 3: qkv"), named(&events, "layer 3: qkv: gather tokens"));
    assert_eq!((kernels.len(), gathers.len()), (4, 3));
    assert!(near(kernels[0][0], gathers[0][0]), "own tokens wait for none");
    for (gather, kernel) in gathers.iter().zip(&kernels[1..]) {
        assert!(gather[1] <= kernel[0] + 1e-3, "{gather:?} {kernel:?}");
    }
    let (kernels, sends) =
        (named(&events, "layer 3: out"), named(&events, "layer 3: out: send terms"));
    assert_eq!((kernels.len(), sends.len()), (4, 3));
    for (kernel, send) in kernels.iter().zip(&sends) {
        assert!(kernel[1] <= send[0] + 1e-3, "{kernel:?} {send:?}");
    }
    assert!(sends[0][0] < kernels[1][1], "beside the next product");
    let sum = named(&events, "layer 3: out: sum terms");
    assert!(sends[2][1].max(kernels[3][1]) <= sum[0][0] + 1e-3);
    // The stream for gradients of weights comes while attention goes backward, from its beginning on.
    let again = "layer 3 backward: stream again";
    let again = named(&events, again);
    let attention = named(&events, "layer 3 backward: attention");
    assert!(again.len() == 2 && again[1][0] <= attention[0][0], "{again:?} {attention:?}");
    for one in ["head and loss: gather tokens", "head and loss: send terms", "embed: send terms"] {
        assert_eq!(named(&events, one).len(), 1, "{one}");
    }
    assert!(named(&events, "layer 3 backward, again: qkv").is_empty());
    // What is computed again gathers again.
    let events = of(&["--set", "train.recompute=full"]);
    for (product, moves) in
        [("qkv", "gather tokens"), ("out", "send terms"), ("gate, up", "gather tokens")]
    {
        let name = format!("layer 3 backward, again: {product}");
        assert_eq!(named(&events, &name).len(), 4, "{name}");
        assert_eq!(named(&events, &format!("{name}: {moves}")).len(), 3, "{name}");
    }
    assert!(named(&events, "layer 3 backward, again: down").is_empty());
}

/// Every edge of the step that is proven is a transfer of the step that is simulated, and there are no others.
#[test]
fn what_moves_is_what_is_proven() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let of = |mesh: &str, sets: &[&str]| {
        let mesh = ["--mesh", mesh, "--rows", "8"];
        let machine = ["--machine", "h100x8", "--trace", file.to_str().unwrap()];
        simulated("llama3-8b.toml", &[&mesh[..], &machine, sets].concat());
        let trace = std::fs::read_to_string(&file).unwrap();
        let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
        let one = ["--set", "train.accumulate=1", "--set", "train.recompute=none", "--json"];
        let (code, out, said) = shard("check", "llama3-8b.toml", &[&mesh[..], &one, sets].concat());
        assert_eq!(code, Some(0), "{said}");
        let proof: serde_json::Value = serde_json::from_str(&out).unwrap();
        let moves = trace["traceEvents"].as_array().unwrap().iter();
        let moves = moves.filter(|event| event["pid"] == 0 && event["tid"] != "compute");
        let names = moves.map(|event| event["name"].as_str().unwrap().to_owned());
        (names.collect::<Vec<_>>(), proof["step"]["edges"].as_u64().unwrap() as usize)
    };
    let (always, edges) = of("shard=4", &[]);
    assert_eq!(always.len(), edges);
    let (never, edges) = of("shard=4", &["--set", "mesh.reshard=never"]);
    assert_eq!(never.len(), edges);
    assert!(never.len() < always.len(), "weights that stay are gathered once");
    // Copies of all groups are summed at once.
    let (copies, edges) = of("replicate=2", &[]);
    assert_eq!((copies.len(), edges), (2, 34 + 1), "{copies:?}");
    for recompute in ["none", "attention", "mlp", "full"] {
        let again = format!("train.recompute={recompute}");
        let (names, edges) = of("tensor=2", &["--set", &again]);
        // The product of one rank's tokens waits for one transfer, or sends one, where there are two ranks.
        assert_eq!(names.len(), edges, "{recompute}");
        let alone = names.iter().filter(|name| name.contains(", by ")).collect::<Vec<_>>();
        assert_eq!(alone, ["logits' maximum, sum and label, by token id"], "{recompute}");
    }
}

/// What attention over `context` keeps of each layer are the keys of all that its queries see, its own among
/// them; computed again, of one layer.
#[test]
fn memory_of_context_has_the_keys_that_are_kept() {
    let memory = |again: &str, strategy: &str| {
        let again = format!("train.recompute={again}");
        let sets = ["--set", "precision.state=exact", "--set", &again, "--json"];
        let mesh = ["--mesh", "context=2", "--rows", "1", "--machine", "h200x8"];
        let args = [&sets[..], &mesh, &["--strategy", strategy]].concat();
        let (code, out, said) = shard("simulate", "llama3-8b.toml", &args);
        assert_eq!(code, Some(0), "{said}");
        number(&serde_json::from_str(&out).unwrap(), "memory_bytes")
    };
    // 32 layers, 8,192 tokens, 8 heads of 128 in 16 bits.
    let all = 8192.0 * 2.0 * 8.0 * 128.0 * 2.0;
    let (attention, none) = (memory("attention", "gather"), memory("none", "gather"));
    // Without attention again a rank keeps of its own tokens q, k, v, out and lse, too.
    let own = 4096.0 * ((32.0 + 2.0 * 8.0 + 32.0) * 128.0 * 2.0 + 32.0 * 4.0);
    let off = (none - attention) / (31.0 * (all + own));
    assert!((off - 1.0).abs() < 0.02, "{off}: {none} {attention}");
}

#[test]
fn memory_of_a_step_is_held_to_the_gpu() {
    let exact = ["--set", "precision.state=exact", "--machine", "h100x8"];
    let (code, out, said) =
        check("llama3-8b.toml", &[&exact[..], &["--mesh", "shard=8", "--rows", "8"]].concat());
    assert_eq!(code, Some(0), "{said}");
    assert!(out.contains("(f) a step      ") && out.contains(" of 79.2 GiB on the rank"), "{out}");
    let (code, _, said) = check("llama3-8b.toml", &[&exact[..], &["--mesh", "shard=1"]].concat());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("(f) a step, place 0 of context: takes 1"), "{said}");
}

#[test]
fn a_machine_that_is_wrong_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("machine.toml");
    let right = std::fs::read_to_string(root().join("crates/foveate-shard/machines/h200x8.toml"));
    let right = right.unwrap();
    for (from, to, says) in [
        ("products_tflops = 697", "products_tflops = 0", "gpu.products_tflops is 0; a positive"),
        ("products_tflops = 697", "product_tflops = 697", "unknown field `product_tflops`"),
        ("default = 3400", "", "gpu.gbps has no `default`"),
        ("keys = [4096, 8192]", "keys = [8192, 4096]", "head_dim 256: keys are ascending"),
        ("keys = [4096, 8192]", "keys = [4096]", "head_dim 256: keys, forward and backward"),
        ("latency_us = 6", "latency_us = -6", "a time of -6 µs"),
        ("ranks = 8", "ranks = 0", "host.ranks is 0"),
    ] {
        let wrong = right.replacen(from, to, 1);
        assert_ne!(wrong, right, "{from}");
        std::fs::write(&file, wrong).unwrap();
        let args = ["--mesh", "shard=2", "--machine", file.to_str().unwrap()];
        let (code, _, said) = shard("simulate", "llama3-8b.toml", &args);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(says), "{said}");
    }
    let (code, _, said) =
        shard("simulate", "llama3-8b.toml", &["--mesh", "shard=2", "--machine", "b200"]);
    assert_eq!(code, Some(2));
    let why = "--machine is \"b200\", which is neither a machine that is known (h100x8, h200x8) nor a file";
    assert!(said.contains(why), "{said}");
}

/// Whatever the mesh; by its path from the recipe, wherever the command runs.
#[test]
fn the_machine_of_a_recipe_is_looked_at_and_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = std::fs::read_to_string(root().join("recipes/llama3-8b.toml")).unwrap();
    let of_recipe = |machine: &str| {
        let machine = format!("{recipe}\n[mesh]\nmachine = \"{machine}\"\n");
        std::fs::write(folder.path().join("mine.toml"), machine).unwrap();
        let mine = folder.path().join("mine.toml");
        let args = ["--mesh", "shard=8", "--rows", "8"];
        shard("simulate", mine.to_str().unwrap(), &args)
    };
    let h100 = std::fs::read_to_string(root().join("crates/foveate-shard/machines/h100x8.toml"));
    let h100 = h100.unwrap();
    let four = h100.replacen("hosts of 8", "hosts of 4", 1);
    assert_ne!(four, h100);
    std::fs::write(folder.path().join("four.toml"), four).unwrap();
    for (machine, name) in [("h200x8", "hosts of 8 H200 SXM"), ("four.toml", "hosts of 4 H100 SXM")]
    {
        let (code, out, said) = of_recipe(machine);
        assert_eq!(code, Some(0), "{said}");
        assert!(out.starts_with(&format!("simulated, not measured: {name}")), "{out}");
    }
    let (code, _, said) = of_recipe("b200x8");
    assert_eq!(code, Some(2), "{said}");
    let file = folder.path().join("b200x8").display().to_string();
    assert!(said.contains(&format!("mine.toml: mesh.machine is \"{file}\", which is neither ")));
    let (code, _, said) = shard("simulate", "llama3-8b.toml", &["--mesh", "shard=8"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("no machine is given, and the recipe has no mesh.machine"), "{said}");
    // A run, too, whatever its mesh is.
    let set = ["--set", "mesh.machine=b200x8"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
    command.arg("train").arg(root().join("recipes/tiny.toml")).args(set);
    let done = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(said.contains("--set mesh.machine=b200x8: mesh.machine is \""), "{said}");
}

/// Tokens so few that memory decides whether parts of attention are worth joining.
#[test]
fn the_machine_of_a_recipe_chooses_how_keys_meet_queries_and_explain_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.toml");
    let text = root().join("crates/foveate-shard/machines/h100x8.toml");
    let text = std::fs::read_to_string(text).unwrap();
    std::fs::write(&file, text.replace("ranks = 8", "ranks = 1")).unwrap();
    let of_file = format!("mesh.machine={}", file.display());
    let recipe = root().join("recipes/tiny.toml");
    for (set, strategy, links) in [
        ("run.seed=0", "exchange in 2 stages: ", "h200x8 by default: 8 ranks a host"),
        (
            "mesh.machine=h100x8",
            "exchange before attention: ",
            "h100x8 by mesh.machine: 8 ranks a host",
        ),
        (&of_file, "", "mine.toml by mesh.machine: 1 rank a host"),
    ] {
        let mesh = ["--mesh", "context=2", "--set", set];
        let mut command = Command::new(env!("CARGO_BIN_EXE_foveate"));
        command.args(["explain", "--recipe"]).arg(&recipe).args(mesh);
        let done = command.stdin(Stdio::null()).output().unwrap();
        let out = String::from_utf8(done.stdout).unwrap();
        let line = |name: &str| out.lines().find(|line| line.starts_with(name)).expect(&out);
        assert!(line("keys  ").contains(strategy) && line("links  ").contains(links), "{out}");
        let of_8b = ["--mesh", "context=4", "--rows", "1", "--set", "data.len=2048", "--set", set];
        let (code, out, said) = check("llama3-8b.toml", &of_8b);
        assert!(code == Some(0) && out.contains(strategy), "{said}{out}");
    }
    let (code, _, said) =
        check("tiny.toml", &["--mesh", "context=2", "--set", "mesh.machine=b200x8"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("--set mesh.machine=b200x8: mesh.machine is ") && said.contains("(h100x8, ")
    );
}
