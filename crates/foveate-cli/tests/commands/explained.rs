//! What `foveate explain` says of problems, masks and recipes, on devices that are not there too.

use super::run;

#[test]
fn the_kernels_of_a_cache_in_pages_are_explained() {
    let line = "explain --device h200 --heads 8/2 --batch 16 --len 1 --kv-len 700 --dim 64 \
                --dtype bf16 --page-size 16";
    let line: Vec<&str> = line.split_whitespace().collect();
    let (code, out, err) = run(&line);
    assert!(code == Some(0) && err.is_empty(), "{err}");
    assert!(
        out.contains("heads      packed GQA: 4 query heads share a tile, 4 rows of it each"),
        "{out}"
    );
    let (_, json, _) = run(&[&line[..], &["--json"]].concat());
    let found: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(found["plan"]["kernels"][0]["chosen"]["config"]["paged"], true);
    assert_eq!(found["class"]["paged"], true);
}

#[test]
fn the_kernels_of_dropout_are_explained() {
    let line = "explain --device h200 --heads 8/2 --len 700 --dim 64 --dtype bf16 --dropout 0.1";
    let line: Vec<&str> = line.split_whitespace().collect();
    let (code, out, err) = run(&line);
    assert!(code == Some(0) && err.is_empty(), "{err}");
    assert!(out.contains("dropout    0.1\n"), "{out}");
    let (_, json, _) = run(&[&line[..], &["--json"]].concat());
    let found: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(found["class"]["dropout"], true);
    let (_, on_cpu, _) =
        run(&"explain --heads 2 --len 9 --dim 8 --dropout 0.25".split(' ').collect::<Vec<_>>());
    assert!(on_cpu.contains("dropout    0.25\n"), "{on_cpu}");
    assert_eq!(found["plan"]["kernels"][0]["chosen"]["config"]["dropout"], true);
}

/// The case of torchtune #2113: FlexAttention has no valid choice for this backward.
#[test]
fn the_kernels_of_a_card_that_is_not_there_are_explained() {
    let line = "explain --device l40s --heads 28/4 --len 512 --dim 128 --dtype bf16 --backward";
    let (code, out, err) = run(&line.split(' ').collect::<Vec<_>>());
    assert_eq!(code, Some(0), "{err}");
    for said in [
        "device     l40s (sm_89): 142 SMs, 101376 B of shared memory a CTA",
        "of 101376 B: k, v ",
        "per SM, ",
        "refused    tile 64x128, 8 warps, 2 stages: 175168 B of shared memory, a CTA can have 101376",
    ] {
        assert!(out.contains(said), "`{said}` is not in\n{out}");
    }
    let json = format!("{line} --json");
    let (code, out, err) = run(&json.split(' ').collect::<Vec<_>>());
    assert_eq!(code, Some(0), "{err}");
    let plan: serde_json::Value = serde_json::from_str(&out).unwrap();
    let kernels = plan["plan"]["kernels"].as_array().unwrap();
    let names: Vec<_> = kernels.iter().map(|k| &k["chosen"]["config"]["kernel"]).collect();
    assert_eq!(names, ["forward", "delta", "backward", "dq"]);
    for kernel in kernels {
        assert!(kernel["chosen"]["resources"]["shared_bytes"].as_u64().unwrap() <= 101_376);
    }
    // Rows of 33 f16 numbers begin at multiples of 2 bytes.
    let odd = "explain --device l40s --heads 4 --len 50 --dim 33 --dtype f16 --json";
    let (_, out, _) = run(&odd.split(' ').collect::<Vec<_>>());
    let plan: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(plan["plan"]["kernels"][0]["chosen"]["config"]["align"], 2);
}

/// The Hopper family is refused by its head dims, whichever its tiles and stages.
#[test]
fn a_reason_is_told_once_and_not_of_each_configuration_that_it_refuses() {
    for backward in [&[][..], &["--backward"]] {
        let line = "explain --device h200 --heads 8 --len 64 --dim 300 --dtype bf16";
        let line: Vec<&str> = line.split(' ').chain(backward.iter().copied()).collect();
        let (code, out, err) = run(&line);
        assert_eq!(code, Some(0), "{err}");
        let kernel = out.split("\n\n").nth(1).expect("the forward");
        let told: Vec<&str> = kernel.lines().filter(|line| line.contains("hopper: ")).collect();
        assert_eq!(told, ["  refused    hopper: head dim 300; it takes those up to 256"]);
        for kernel in out.split("\n\n").skip(1) {
            let refused = kernel.lines().filter(|line| line.starts_with("  refused"));
            let mut refused: Vec<&str> = refused.collect();
            let all = refused.len();
            refused.sort_unstable();
            refused.dedup();
            assert_eq!(refused.len(), all, "{out}");
        }
    }
    let (code, _, err) = run(&"explain --device h200 --heads 8 --len 64 --dim 300 --dtype f8e4m3"
        .split(' ')
        .collect::<Vec<_>>());
    assert!(code != Some(0) && err.len() < 600, "{err}");
}

#[test]
fn the_tiles_of_a_mask_are_counted_for_each_kernel_of_a_card() {
    let sizes = "explain --device h200 --heads 4 --len 1024 --dim 64 --dtype bf16 --backward \
                 --kernel backward.tile_q=128 --kernel backward.tile_kv=128";
    let explained = |more: &[&str]| {
        let (code, out, err) =
            run(&sizes.split_whitespace().chain(more.iter().copied()).collect::<Vec<_>>());
        assert_eq!(code, Some(0), "{err}");
        out
    };
    let out = explained(&["--mask", "causal", "--json"]);
    let told: serde_json::Value = serde_json::from_str(&out).unwrap();
    let [forward, backward] = [0, 1].map(|n| &told["tiles"][n]);
    assert_eq!([&forward["kernel"], &backward["kernel"]], ["forward", "backward"]);
    assert_eq!(backward["tile"], serde_json::json!([128, 128]));
    let counts = ["tiles", "full", "partial"].map(|name| backward[name].as_u64().unwrap());
    assert_eq!(counts, [64, 28, 8]);
    let live = backward["live_share"].as_f64().unwrap();
    assert!((live - (1024.0 * 1025.0 / 2.0) / (36.0 * 128.0 * 128.0)).abs() < 1e-12, "{live}");
    let out = explained(&["--mask", "causal & h < 2"]);
    let said = "backward: 64 of 128 x 128, in the first head: 43.8 % full, 12.5 % partial by evaluation, 43.8 % empty";
    assert!(out.contains(said), "{out}");
    assert!(!explained(&[]).contains("\ntiles"));
    // A consumer of the Hopper forward passes over what its own 64 queries do not see.
    let hopper = "explain --device h200 --heads 32 --batch 8 --len 1024 --dim 64 --dtype bf16 \
                  --mask causal";
    let (code, out, err) = run(&hopper.split_whitespace().collect::<Vec<_>>());
    assert_eq!(code, Some(0), "{err}");
    let said = "forward: 128 of 64 x 128, cells of tiles of 192 x 128: 43.8 % full, 12.5 % partial by \
                evaluation, 43.8 % empty; 89.0 % of what live ones compute is seen\n";
    assert!(out.contains(said), "{out}");
    assert!(
        out.contains("  chosen     hopper, tile 192x128, ")
            && out.contains("  compiled   for sm_90a\n")
    );
    let portable = hopper.split_whitespace().chain(["--kernel", "forward.family=portable"]);
    let (_, on_portable, _) = run(&portable.collect::<Vec<_>>());
    assert!(on_portable.contains("  chosen     portable, tile "), "{on_portable}");
    assert!(out.contains("  consumers  3: 64 queries by 128 keys a step each\n"), "{out}");
    assert!(out.contains("  overlap    softmax beside P V of the step before, "), "{out}");
    // What takes minutes is left out, and the rest told.
    let long = "explain --device h200 --heads 8 --len 1000000 --dim 128 --dtype bf16 --mask";
    let line: Vec<_> = long.split(' ').chain(["q*kv % 7 == 1"]).collect();
    let (code, out, err) = run(&line);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("tiles      counting the tiles of this mask takes about"), "{out}");
    assert!(out.contains("--insist does it\n") && out.contains("\nforward\n"), "{out}");
}

#[test]
fn options_of_a_kernel_that_a_backward_has_not_are_refused() {
    let line = "explain --device h200 --heads 32 --len 4096 --dim 64 --dtype bf16 --backward \
                --kernel backward_dq.stages=2";
    let explained =
        |more: &str| run(&[line, more].join(" ").split_whitespace().collect::<Vec<_>>());
    let refused =
        "--kernel backward_dq.stages=2 is of a kernel for dq alone, which this backward has not";
    for more in ["", "--deterministic"] {
        let (code, _, err) = explained(more);
        assert!(code == Some(2) && err.contains(refused), "{err}");
    }
    let (code, out, err) = explained("--deterministic --kernel backward.ordered_dq=false");
    assert_eq!((code, out.contains("\nbackward_dq\n")), (Some(0), true), "{err}");
}

#[test]
fn a_stated_length_of_live_keys_is_explained() {
    let line = "explain --device h200 --heads 16 --len 8192 --dim 64 --dtype bf16 --mask causal \
                --backward --mean-kv-len";
    for (stated, taken) in [("256", 256), ("9000", 8192)] {
        let (code, out, err) = run(&line.split_whitespace().chain([stated]).collect::<Vec<_>>());
        assert_eq!(code, Some(0), "{err}");
        let said = format!("live keys  {taken} a query on average, as stated");
        assert!(out.contains(&said), "`{said}` is not in\n{out}");
    }
}

#[test]
fn problems_without_elements_are_explained_in_plain_zeros() {
    for line in ["explain --heads 4 --len 0 --dim 8", "explain --heads 4 --len 9 --dim 8 --batch 0"]
    {
        let (code, out, err) = run(&line.split(' ').collect::<Vec<_>>());
        assert_eq!((code, err.as_str()), (Some(0), ""), "{line}");
        assert!(out.contains("forward    0.000 FLOP dense, 0.000 FLOP live"), "{line}: {out}");
    }
}

#[test]
fn sizes_that_no_machine_holds_are_still_explained() {
    let line = "explain --heads 100000 --len 2000000000 --dim 1000 --json";
    let (code, out, err) = run(&line.split(' ').collect::<Vec<_>>());
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(found["dense_forward_flops"].as_f64().unwrap() > 1e27, "{found}");
}

/// `foveate explain` of the tiny recipe over a mesh.
fn explained_over(mesh: &str, more: &[&str]) -> (Option<i32>, String, String) {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/tiny.toml");
    run(&[&["explain", "--recipe", recipe, "--mesh", mesh], more].concat())
}

/// What it says of the mesh.
fn mesh_of(mesh: &str, sets: &[&str]) -> serde_json::Value {
    let (code, out, err) = explained_over(mesh, &[sets, &["--json"]].concat());
    assert_eq!((code, err.as_str()), (Some(0), ""));
    serde_json::from_str::<serde_json::Value>(&out).unwrap()["mesh"].clone()
}

#[test]
fn a_recipe_is_explained_over_the_ranks_of_a_mesh() {
    let (of, json) = (explained_over, mesh_of);
    let count = |found: &serde_json::Value, kind: &str| {
        let edges = found["edges"].as_array().unwrap();
        edges.iter().filter(|edge| edge["kind"] == kind).count()
    };
    // Four layers, embedding and head, which is the embedding, too; the last layer stays for its backward
    // pass.
    let cut = json("replicate=2,shard=4", &[]);
    let counts = ["all-gather", "reduce-scatter", "all-reduce"].map(|kind| count(&cut, kind));
    assert_eq!((counts, &cut["rows"]), ([7 + 3, 6, 2], &1.into()));
    let kept = json("shard=8", &["--set", "mesh.reshard=never", "--set", "train.accumulate=3"]);
    assert_eq!((count(&kept, "all-gather"), count(&kept, "all-reduce")), (6, 1));
    assert_eq!(kept["edges"][0]["times"], 1);
    assert_eq!(kept["edges"][6]["times"], 3, "{kept}");
    let whole = json("replicate=8", &[]);
    assert_eq!((count(&whole, "all-gather"), count(&whole, "all-reduce")), (0, 2));
    let memory = |found: &serde_json::Value| found["memory_bytes"].as_u64().unwrap();
    assert!(memory(&cut).max(memory(&kept)) < memory(&whole));
    // Where groups are updated in the backward pass, each is summed there.
    let back = ["--set", "optimizer.in_backward=true", "--set", "optimizer.clip_norm=0"];
    for mesh in ["replicate=8", "replicate=2,shard=4"] {
        let found = json(mesh, &back);
        let edges = found["edges"].as_array().unwrap();
        let sums: Vec<&str> = edges
            .iter()
            .filter(|edge| edge["kind"] == "all-reduce")
            .map(|edge| edge["what"].as_str().unwrap())
            .collect();
        let groups = ["head", "layers.3", "layers.2", "layers.1", "layers.0", "embedding"];
        let of_groups: Vec<&str> =
            sums.iter().copied().filter(|sum| !sum.starts_with("norm")).collect();
        assert_eq!(of_groups, groups, "{found}");
        // Ranks with the same gradients have the same norm: the first sum tells all of the loss.
        let norms = if mesh == "replicate=8" { 1 } else { groups.len() };
        assert_eq!(sums.len() - groups.len(), norms, "{found}");
        let summed = |found: &serde_json::Value| -> u64 {
            let edges = found["edges"].as_array().unwrap().iter();
            let sums = edges.filter(|e| e["kind"] == "all-reduce");
            let of_gradients = sums.filter(|e| !e["what"].as_str().unwrap().starts_with("norm"));
            of_gradients.map(|edge| edge["bytes"].as_u64().unwrap()).sum()
        };
        assert!(summed(&found).abs_diff(summed(&json(mesh, &[]))) < 8, "{found}");
    }
    let (_, text, _) = of("shard=4", &[]);
    for line in [
        "  all-gather     layers.1 to layers.3   f32[elements@shard] -> f32[elements]",
        "beside layers.0 forward to layers.2 forward",
        "  reduce-scatter embedding              f32[elements] by shard -> f32[elements@shard]",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    // Of each layer two gathers and two sums forward, four and two backward.
    let tensor = json("tensor=2", &[]);
    let times = |kind: &str| {
        let of_kind = tensor["edges"].as_array().unwrap().iter().filter(|e| e["kind"] == kind);
        of_kind.map(|e| e["times"].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!((times("all-gather"), times("reduce-scatter")), (4 * 6 + 2, 4 * 4 + 2));
    // Of as many rows, the largest part of weights, their state and activations is half.
    assert!(3 * memory(&tensor) < 2 * memory(&json("shard=1", &[])));
    let edge = &tensor["edges"][1];
    assert_eq!(edge["from"], "f32[batch, stream@tensor, hidden]", "{tensor}");
    assert_eq!(edge["to"], "f32[batch, seq, hidden]", "{tensor}");
    assert_eq!(edge["on_gpus"], "the product, rank by rank");
    // Two gathers and the sum behind o once more.
    let again = json("tensor=2", &["--set", "train.recompute=full"]);
    let all = |found: &serde_json::Value, kind: &str| count(found, kind);
    for (kind, more) in [("all-gather", 2 * 4), ("reduce-scatter", 4)] {
        assert_eq!(all(&again, kind), all(&tensor, kind) + more, "{again}");
    }
    // Fewer key/value heads than ranks: their gradients are summed, and said to be.
    let (_, text, _) = of("tensor=4", &[]);
    assert!(text.contains("copies of key/value heads"), "{text}");
    for (mesh, said) in [
        ("shard=auto", "shard is auto, but the number of ranks is not known"),
        ("tensor=16", "num_attention_heads: is 6, which cannot be cut over 16 ranks of tensor"),
        ("shard=16", "train.batch_rows is 8, and 16 ranks share the rows"),
    ] {
        let (code, _, err) = of(mesh, &[]);
        assert!(code == Some(2) && err.contains(said), "{mesh}: {code:?} {err}");
    }
}

/// Keys of two ranks: the later has half of the causal keys still to come, in two stages, and sends as many gradients
/// back.
#[test]
fn keys_over_context_are_explained_with_what_they_travel_beside() {
    let context =
        mesh_of("context=2", &["--set", "train.batch_rows=1", "--set", "mesh.strategy=exchange"]);
    let keys: Vec<_> =
        context["edges"].as_array().unwrap().iter().filter(|e| e["kind"] == "exchange").collect();
    let bytes = |e: &serde_json::Value| e["bytes"].as_u64().unwrap();
    assert_eq!(keys.len(), 3, "{context}");
    let beside: Vec<_> = keys.iter().map(|edge| edge["on_gpus"].as_str().unwrap()).collect();
    let of_stage = "queries and attention on the keys before";
    assert_eq!(beside, [of_stage, of_stage, "the gradient of o's weight"]);
    // Keys and values of two heads of 32, and a position.
    assert_eq!((bytes(keys[0]) + bytes(keys[1])) % (2 * 2 * 32 * 4 + 4), 0, "{context}");
    assert_eq!((bytes(keys[2]) % (2 * 2 * 32 * 4), keys[2]["times"].as_u64()), (0, Some(4)));
    // What it keeps is in the memory that is told.
    let (_, text, _) = explained_over("context=2", &["--set", "train.batch_rows=2"]);
    assert!(text.contains("; waited for, on GPUs beside queries and attention on"), "{text}");
    let gather = mesh_of("context=4", &["--set", "mesh.strategy=gather"]);
    let exchange = mesh_of("context=4", &["--set", "mesh.strategy=exchange"]);
    let memory = |found: &serde_json::Value| found["memory_bytes"].as_u64().unwrap();
    assert!(memory(&gather) >= memory(&exchange), "{gather} {exchange}");
}

/// What moves between 16 ranks, two of each axis: edge, kind, layouts, bytes, how often, and what hides it.
#[test]
fn transfers_of_every_axis_are_those_that_were_derived() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/tiny.toml");
    let mesh = "replicate=2,shard=2,context=2,tensor=2";
    let (code, out, err) = run(&["explain", "--recipe", recipe, "--mesh", mesh, "--json"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    let edges = found["mesh"]["edges"].as_array().unwrap();
    let lines: Vec<String> = edges.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!("transfers_of_every_axis", lines.join("\n"));
}

/// Memory by state is of one card, fits of cards are of one state, and both are named.
#[test]
fn memory_of_a_recipe_names_its_card_its_rows_and_its_state() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/tiny.toml");
    let of = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let (code, out, err) =
            run(&["explain", "--recipe", recipe].into_iter().chain(sets).collect::<Vec<_>>());
        assert_eq!(code, Some(0), "{err}");
        out
    };
    let plain = of(&[]);
    for line in [
        "on a GPU         by state, on an H200 (139.8 GiB), 8 rows, nothing computed again; * is the recipe's\n",
        "\n  *exact ",
        "\ncards            with the state exact:\n  H200 ",
    ] {
        assert!(plain.contains(line), "{line}: {plain}");
    }
    let other = of(&["precision.state=int8_moments", "train.recompute=mlp", "train.batch_rows=1"]);
    for line in ["1 row, mlp computed again", "\n  *int8_moments ", "with the state int8_moments:"]
    {
        assert!(other.contains(line), "{line}: {other}");
    }
    let auto = of(&["train.recompute=auto"]);
    let most = "full computed again, the most that `auto` does; ";
    assert!(auto.contains(most) && !plain.contains("auto"), "{auto}");
    assert!(auto.contains("H200      139.8 GiB fits with nothing computed again\n"), "{auto}");
}

#[test]
fn a_step_of_a_recipe_is_explained_for_a_gpu_that_is_not_there() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/smollm-135m.toml");
    let line = ["explain", "--recipe", recipe, "--device", "rtx 4090"];
    let (code, out, err) = run(&line);
    assert_eq!(code, Some(0), "{err}");
    for part in [
        "RTX 4090 with 23.5 GiB: 4 rows of state exact, updated at the end, nothing computed again",
        "weights, masters",
        "gate and up",
        "in all",
        "  fits",
        "backward",
        "if none shared its memory",
        "of the host's memory, pinned, where steps go on beside saves",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    let (_, out, _) = run(&[&line[..], &["--json"]].concat());
    let step: serde_json::Value = serde_json::from_str(&out).unwrap();
    let sum = |of: &serde_json::Value, key: &str| -> u64 {
        of.as_object().unwrap().values().map(|v| v.get(key).unwrap_or(v).as_u64().unwrap()).sum()
    };
    let memory = &step["memory"];
    // Arrays that live at other times share memory.
    let (arrays, taken) = (&step["activations"], memory["activations"].as_u64().unwrap());
    let largest = arrays.as_object().unwrap().values().map(|v| v["bytes"].as_u64().unwrap()).max();
    assert!(largest.unwrap() < taken && taken < sum(arrays, "bytes"), "{step}");
    assert_eq!(sum(memory, "bytes"), 2 * memory["total"].as_u64().unwrap());
    assert!(!step["attention"][0]["plan"]["kernels"].as_array().unwrap().is_empty(), "{out}");
    // 12 bytes a parameter.
    let copied = step["save_copy"].as_u64().unwrap() as f64 / 12.0;
    assert!((copied / 134_515_008.0 - 1.0).abs() < 1e-4, "{copied}");
    let waits = [&line[..], &["--json", "--set", "train.async_save=false"]].concat();
    let waits: serde_json::Value = serde_json::from_str(&run(&waits).1).unwrap();
    assert!(waits["save_copy"].is_null(), "{waits}");
}

/// What `explain` and `train` say that a recipe takes is one number, whatever the recipe says of moments, gradients
/// and what is trained.
#[test]
fn memory_of_a_recipe_on_the_cpu_is_what_train_says() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/tiny.toml");
    let sizes = [
        "data.root=.",
        "data.files=[\"tiny.toml\"]",
        "data.held_out=0",
        "data.len=64",
        "train.steps=1",
    ];
    let mut totals = Vec::new();
    for sets in [
        &[][..],
        &["precision.state=int8_moments"],
        &["optimizer.kind=sgd"],
        &["optimizer.in_backward=true", "optimizer.clip_norm=0", "train.accumulate=1"],
        &["optimizer.groups=[{ match = \"model.layers.*\", frozen = true }]"],
        &["train.recompute=full", "train.recompute_layers=3"],
    ] {
        let sets = sizes.iter().chain(sets).flat_map(|set| ["--set", set]);
        let sets: Vec<&str> = sets.collect();
        let (code, out, err) = run(&[&["explain", "--recipe", recipe][..], &sets].concat());
        assert_eq!(code, Some(0), "{err}");
        let own = out.lines().find(|line| line.starts_with("memory *")).expect("the recipe's");
        let total: Vec<&str> = own.split_whitespace().skip(2).take(2).collect();
        let total = total.join(" ");
        let (code, _, err) = run(&[&["train", recipe][..], &sets].concat());
        assert_eq!(code, Some(0), "{err}");
        assert!(err.contains(&format!("about {total} of memory")), "{total}: {err}");
        totals.push(total);
    }
    totals.sort();
    totals.dedup();
    assert_eq!(totals.len(), 6, "one for each: {totals:?}");
}

/// Memory of the CPU is marked as the recipe's where a run would take it: not of a recipe for a GPU, nor by `auto`.
#[test]
fn what_a_recipe_runs_on_is_told_before_what_it_takes() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/tiny.toml");
    let of = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let line: Vec<&str> = ["explain", "--recipe", recipe].into_iter().chain(sets).collect();
        let (code, out, err) = run(&line);
        assert_eq!(code, Some(0), "{err}");
        let at = |begin: &str| out.lines().position(|line| line.starts_with(begin)).unwrap();
        let gpu_first = at("on a GPU ") < at("memory ");
        let batch = out.lines().nth(at("batch ")).unwrap();
        (batch.split_once("tokens, ").unwrap().1.to_owned(), gpu_first, out)
    };
    for (sets, place, gpu_first, marked, told) in [
        (&[][..], "f32 on the CPU", false, true, "; * is the recipe's\n"),
        (
            &["precision.state=int8_moments"],
            "f32 with moments of 8 bits on the CPU",
            false,
            true,
            "; * is the recipe's\n",
        ),
        (
            &["train.recompute=auto"],
            "f32 on the CPU",
            false,
            false,
            "; `auto` takes the first that fits the machine\n",
        ),
        (
            &["run.device=cuda:0", "train.recompute=auto"],
            "exact on cuda:0",
            true,
            false,
            "; of a run in f32 by `--device cpu`\n",
        ),
        (&["run.device=cuda:1"], "exact on cuda:1", true, false, "; of a run in f32 by"),
        (
            &["run.device=auto"],
            "exact on the first GPU, f32 on the CPU where there is none",
            false,
            true,
            "; * is the recipe's\n",
        ),
    ] {
        let (said, is_first, out) = of(sets);
        assert_eq!((said.as_str(), is_first), (place, gpu_first), "{sets:?}");
        assert_eq!(out.contains("\nmemory *"), marked, "{out}");
        assert!(out.contains(told), "{out}");
    }
}

/// Of a checkpoint `config.json` is enough, and where there is not even that a line says so.
#[test]
fn a_recipe_of_a_checkpoint_is_explained_by_its_config_alone() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = dir.path().join("recipes/llama3-8b-h200.toml");
    std::fs::create_dir(recipe.parent().unwrap()).unwrap();
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/llama3-8b-h200.toml");
    std::fs::copy(own, &recipe).unwrap();
    let line = ["explain", "--recipe", recipe.to_str().unwrap()];
    let on_gpu = [&line[..], &["--device", "h200"]].concat();
    for line in [&line[..], &on_gpu] {
        let (code, out, err) = run(line);
        assert!(code == Some(1) && out.is_empty() && err.lines().count() == 1, "{err}");
        assert!(err.contains("models/llama3-8b is not there"), "{err}");
        assert!(err.contains("put the model's config.json there, which is enough"), "{err}");
    }
    let model = dir.path().join("models/llama3-8b");
    std::fs::create_dir_all(&model).unwrap();
    let sizes = r#"{ "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "max_position_embeddings": 8192, "tie_word_embeddings": false }"#;
    std::fs::write(model.join("config.json"), sizes).unwrap();
    let (code, out, err) = run(&line);
    assert!(code == Some(0) && err.is_empty(), "{err}");
    assert!(out.contains("parameters       8030261248 "), "{out}");
    let (code, out, err) = run(&on_gpu);
    assert!(code == Some(0) && err.is_empty(), "{err}");
    assert!(out.contains("H200 with 139.8 GiB: 1 row of state exact"), "{out}");
}
