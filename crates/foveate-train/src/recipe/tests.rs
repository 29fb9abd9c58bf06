//! Recipes that are read, refused and written.

use foveate_shard::simulate::Machine;

use super::*;

const TEXT: &str = r#"
[run]
dir = "runs/x"

[model]
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4

[attention]
mask = "causal & document"

[data]
files = ["*.md"]
len = 128

[train]
steps = 10
"#;

fn told(text: &str, sets: &[&str]) -> String {
    let sets: Vec<String> = sets.iter().map(|&s| s.to_owned()).collect();
    Recipe::parse(text, "r.toml", &sets).unwrap_err().to_string()
}

#[test]
fn what_older_recipes_say_of_the_order_of_a_product_is_read_and_forgotten() {
    let plain = Recipe::parse(TEXT, "r.toml", &[]).unwrap();
    for order in ["stacked", "interleaved"] {
        let mask = "mask = \"causal & document\"";
        let older = TEXT.replace(mask, &format!("{mask}\nqkv_order = \"{order}\""));
        assert_eq!(Recipe::parse(&older, "r.toml", &[]).unwrap(), plain);
    }
    assert!(!plain.to_toml().unwrap().contains("qkv_order"));
    let error = told(&TEXT.replace("mask =", "qvk_order = 1\nmask ="), &[]);
    assert!(error.contains("qvk_order"), "{error}");
}

#[test]
fn more_layers_than_there_are_are_not_computed_again() {
    let of = |layers: usize| {
        let sets = [format!("train.recompute_layers={layers}"), "train.recompute=full".to_owned()];
        Recipe::parse(TEXT, "r.toml", &sets).unwrap().model_config(256)
    };
    assert!(of(2).is_ok());
    let told = of(3).unwrap_err();
    assert_eq!(
        told,
        "train.recompute_layers is 3, and the model has 2 layers; leave it out for all"
    );
}

#[test]
fn what_does_not_go_together_is_refused_with_the_reason() {
    let back = "optimizer.in_backward=true";
    for (sets, said) in [
        (&[back][..], "optimizer.clip_norm is 1; the norm of all gradients is known only when"),
        (
            &[back, "optimizer.clip_norm=0", "train.accumulate=2"],
            "train.accumulate is 2; the gradients of a batch are gone",
        ),
        (
            &["precision.state=bf16_gradients", "train.accumulate=4"],
            "train.accumulate is 4; sums in bf16 over batches lose what is small, so \
                 precision.state = \"bf16_gradients\" takes 1",
        ),
        (&["train.recompute=most"], "train.recompute is \"most\""),
        (
            &["train.recompute=auto", "train.recompute_layers=3"],
            "train.recompute_layers is given beside train.recompute = \"auto\"",
        ),
        (
            &["optimizer.groups=[{ match = \"*\", rate = -1.0 }]"],
            "optimizer.groups.rate of `*` is -1",
        ),
        (
            &["optimizer.groups=[{ match = \"*\", rate = 1e39 }]"],
            "optimizer.groups.rate of `*` is 1e39; it must be at least 0, and at most 3.4028235e38",
        ),
        (
            &["optimizer.groups=[{ match = \"a\", frozen = true, rate = 0.5 }]"],
            "optimizer.groups.rate of `a` is given, but its parameters are frozen; leave it or frozen out",
        ),
        (
            &["optimizer.groups=[{ match = \"a\", frozen = true, weight_decay = 0.0 }]"],
            "optimizer.groups.weight_decay of `a` is given, but its parameters are frozen",
        ),
        (
            &[
                "optimizer.weight_decay=0",
                "optimizer.groups=[{ match = \"a\", weight_decay = 1.0 }]",
            ],
            "optimizer.groups.weight_decay of `a` is above 0 where optimizer.weight_decay is 0",
        ),
        (&["optimizer.kind=adam"], "adamw"),
        (&["optimizer.momentum=1"], "optimizer.momentum is 1"),
    ] {
        let error = told(TEXT, sets);
        assert!(error.contains(said), "{error}, not {said}");
    }
    let group = |names: &str| OptimizerGroup {
        names: names.to_owned(),
        rate: 1.0,
        weight_decay: None,
        frozen: true,
    };
    for (names, name, is) in [
        ("a.b", "a.b", true),
        ("a.b", "a.bc", false),
        ("*", "anything", true),
        ("*.b.*", "a.b.c", true),
        ("*.b.*", "a.c", false),
        ("a*c", "abc", true),
        ("a*c", "abcd", false),
        ("a*b*c", "axbxc", true),
        ("ab*b", "ab", false),
    ] {
        assert_eq!(group(names).matches(name), is, "{names} and {name}");
    }
}

#[test]
fn programs_have_names_and_layers_name_them() {
    let section = |text: &str| TEXT.replace("mask = \"causal & document\"", text);
    let programs = "[attention.programs.local]\nmask = \"causal & window(64, 0)\"\n\
                        [attention.programs.global]\nmask = \"causal\"";
    let text = section(&format!("layers = [\"local\", \"global\"]\n{programs}"));
    let recipe = Recipe::parse(&text, "r.toml", &[]).unwrap();
    let attention = recipe.attention.clone().unwrap();
    assert_eq!(attention.of_layer(3).0, Some("global"));
    assert_eq!(attention.of_layer(2).1.mask, "causal & window(64, 0)");
    let again = Recipe::parse(&recipe.to_toml().unwrap(), "r.toml", &[]).unwrap();
    assert_eq!(again.attention, Some(attention));
    for (layers, said) in [
        ("", "`layers` is missing"),
        ("layers = [\"local\", \"globl\"]", "`layers` names `globl`; `programs` has global, local"),
        ("layers = [\"local\"]", "no layer runs the program `global`"),
        ("mask = \"causal\"\nlayers = [\"local\"]", "stands beside `programs`"),
    ] {
        let error = told(&section(&format!("{layers}\n{programs}")), &[]);
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn a_resolved_recipe_reads_back_as_itself() {
    let recipe = Recipe::parse(TEXT, "r.toml", &[]).unwrap();
    let again = Recipe::parse(&recipe.to_toml().unwrap(), "again", &[]).unwrap();
    assert_eq!(recipe, again);
    let config = recipe.model_config(257).unwrap().unwrap();
    assert_eq!((config.vocab_size, config.max_position_embeddings), (257, 128));
}

#[test]
fn recipes_to_begin_with_say_their_size_and_remove_no_run() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
    for name in ["README.md", "recipes/tiny.toml", "recipes/learned-bias.toml"] {
        let text = read(name);
        let mut commands = text.lines().filter(|line| line.contains("-- train recipes/"));
        assert!(commands.clone().count() > 0 && commands.all(|c| !c.contains("--start-over")));
    }
    let tiny = Recipe::parse(&read("recipes/tiny.toml"), "tiny.toml", &[]).unwrap();
    let parameters = tiny.model_config(257).unwrap().unwrap().parameter_count();
    let said = format!("about {:.1} million parameters", parameters as f64 * 1e-6);
    assert!(read("recipes/tiny.toml").contains(&said), "{said}");
}

#[test]
fn overrides_change_values_of_every_type() {
    let sets = ["train.steps=20", "optimizer.lr=1e-3", "run.dir=elsewhere", "data.shuffle=false"];
    let sets: Vec<String> = sets.iter().map(|&s| s.to_owned()).collect();
    let recipe = Recipe::parse(TEXT, "r.toml", &sets).unwrap();
    assert_eq!(recipe.train.steps, Some(20));
    assert_eq!(recipe.optimizer.lr, 1e-3);
    assert_eq!(recipe.run.dir, Path::new("elsewhere"));
    assert!(!recipe.data.shuffle);
}

#[test]
fn every_mistake_is_named_with_its_place() {
    let typo = told(&TEXT.replace("steps = 10", "stepz = 10"), &[]);
    assert!(typo.starts_with("r.toml:19:1: unknown field `stepz`"), "{typo}");
    assert!(typo.ends_with("did you mean `steps`?"), "{typo}");
    let ill = told(&TEXT.replace("steps = 10", "steps = \"ten\""), &[]);
    assert_eq!(
        ill,
        "r.toml:19:9: train.steps is \"ten\"; a whole number of at least 0 is expected"
    );
    let without = told(&TEXT.replace("len = 128", ""), &[]);
    assert!(without.ends_with(": data.len is missing"), "{without}");
    let without = told(&TEXT.replace("[run]\ndir = \"runs/x\"", ""), &[]);
    assert!(without.ends_with(": the section [run] is missing"), "{without}");
    let section = told(&TEXT.replace("[train]", "[trian]"), &[]);
    assert!(section.contains("did you mean `train`?"), "{section}");
    let renamed = told(&TEXT.replace("steps = 10", "global_rows = 8"), &[]);
    assert_eq!(renamed, "r.toml:19:1: unknown field `global_rows`: use train.batch_rows");
    let renamed = told(TEXT, &["data.seq_len=8"]);
    assert_eq!(renamed, "--set data.seq_len=8: unknown field `seq_len`: use data.len");
    let set = told(TEXT, &["train.stesp=3"]);
    assert!(set.starts_with("--set train.stesp=3: unknown field `stesp`"), "{set}");
    assert!(told(TEXT, &["train.steps"]).contains("has no `=`"));
    let large = told(TEXT, &["run.seed=9223372036854775808"]);
    assert!(large.contains("is past 9223372036854775807, the largest whole number"), "{large}");
    assert!(told(TEXT, &["train.steps.x=1"]).contains("`steps` is a value, not a section"));
    assert_eq!(
        told(TEXT, &["train.steps=0"]),
        "--set train.steps=0: train.steps is 0; it must be at least 1"
    );
    let both = told(TEXT, &["train.epochs=2"]);
    assert!(both.contains("train.epochs is given beside train.steps; give one"), "{both}");
    let sums = told(TEXT, &["precision.state=bf16", "train.accumulate=2"]);
    assert!(sums.contains("train.accumulate is 2") && sums.contains("takes 1"), "{sums}");
    assert!(told(TEXT, &["optimizer.eps=1e-50"]).contains("optimizer.eps is"));
    let scaling = told(TEXT, &["model.rope_scaling={rope_type=\"linear\",factr=2.0}"]);
    assert!(scaling.contains("did you mean `factor`?"), "{scaling}");
    for (set, says) in [
        ("schedule.min_ratio=1.5", "schedule.min_ratio is 1.5; it must be from 0 to 1"),
        ("optimizer.lr=inf", "optimizer.lr is inf; it must be at least 0 and finite"),
        ("optimizer.beta1=1", "optimizer.beta1 is 1; it must be at least 0 and below 1"),
        (
            "optimizer.beta2=0.99999999",
            "optimizer.beta2 is 0.99999999, which is 1 as a 32-bit number, and steps compute with these; give less",
        ),
    ] {
        assert!(told(TEXT, &[set]).ends_with(says), "{}", told(TEXT, &[set]));
    }
    assert!(told(TEXT, &["data.held_out=1.5"]).contains("data.held_out is 1.5"));
    assert!(told(TEXT, &["model.checkpoint=x"]).contains("brings its own sizes"));
    assert!(told("[run", &[]).starts_with("r.toml:1:"), "not TOML at all");
    let twice = told(&TEXT.replace("steps = 10", "steps = 10\nsteps = 20"), &[]);
    assert_eq!(twice, "r.toml:20:1: train.steps is given twice; keep one of them");
    let twice = told(&format!("{TEXT}[train]\nkeep = 3\n"), &[]);
    assert!(
        twice.ends_with(": the section [train] is there twice; write all of its fields below one")
    );
    for value in ["", "ten"] {
        let none = told(&TEXT.replace("steps = 10", &format!("steps = {value}")), &[]);
        assert!(
            none.contains("train.steps has no value of TOML; write a text in quotes"),
            "{none}"
        );
    }
    for set in ["data.files=[*.txt]", "data.files=[\"*.txt\"", "attention={ mask = causal }"] {
        let (field, value) = set.split_once('=').unwrap();
        let want = format!(
            "--set {set}: {field} is given {value}, which is no value of TOML; write texts"
        );
        assert!(told(TEXT, &[set]).starts_with(&want), "{}", told(TEXT, &[set]));
    }
    for name in ["", "."] {
        let machine =
            Recipe::parse(TEXT, "r.toml", &[format!("mesh.machine={name}")]).unwrap().mesh;
        let said = machine.clone().locate_machine(Path::new("/tmp")).unwrap_err();
        let wanted =
            if name.is_empty() { "is empty; name a machine (" } else { "is \"/tmp/.\", a f" };
        assert!(said.starts_with(wanted), "{said}");
    }
}

#[test]
fn a_mesh_is_a_product_of_the_ranks_with_at_most_one_size_left_open() {
    let mesh = |section: &str, ranks| {
        let recipe = Recipe::parse(&format!("{TEXT}[mesh]\n{section}"), "r.toml", &[]).unwrap();
        let again = Recipe::parse(&recipe.to_toml().unwrap(), "r.toml", &[]).unwrap();
        assert_eq!(again, recipe);
        recipe.mesh.of_ranks(ranks).map(|m| m.to_string()).map_err(|e| e.to_string())
    };
    for (section, ranks, found) in [
        ("", 1, [1, 1]),
        ("", 6, [1, 6]),
        ("replicate = 2", 6, [2, 3]),
        ("replicate = \"auto\"\nshard = 2", 6, [3, 2]),
        ("replicate = \"auto\"", 6, [6, 1]),
        ("shard = \"auto\"\ncontext = 1", 3, [1, 3]),
        ("replicate = 2\nshard = 2\ntensor = 1\nstrategy = \"exchange:3\"", 4, [2, 2]),
    ] {
        let [replicate, shard] = found;
        let want = format!("replicate={replicate},shard={shard},context=1,tensor=1");
        assert_eq!(mesh(section, ranks), Ok(want), "{section}");
    }
    let other = mesh("replicate = 2\nshard = 2", 3).unwrap_err();
    assert_eq!(
        other,
        "[mesh]: mesh `replicate=2,shard=2` has 4 ranks, but 3 run; change a size, or make one axis \
         `auto`"
    );
    let odd = mesh("replicate = 2", 3).unwrap_err();
    assert!(odd.contains("3 ranks cannot be divided by 2"), "{odd}");
    let tensor = "replicate=1,shard=2,context=1,tensor=2".to_owned();
    assert_eq!(mesh("tensor = 2", 4), Ok(tensor));
    let size = |value: &str| told(&format!("{TEXT}[mesh]\nshard = {value}"), &[]);
    for (value, given) in [("0", "0"), ("-1", "-1"), ("\"all\"", "\"all\""), ("1.5", "1.5")] {
        let want = format!(
            "r.toml:21:9: mesh.shard is {given}; a number of ranks of at least 1, or \"auto\", is \
             expected"
        );
        assert_eq!(size(value), want);
    }
    let two = told(&format!("{TEXT}[mesh]\nshard = \"auto\"\ncontext = \"auto\""), &[]);
    assert_eq!(
        two,
        "r.toml: mesh.context is \"auto\", and so is mesh.shard; one axis takes what the others leave"
    );
    let named = told(TEXT, &["mesh.strategy=ring"]);
    assert!(named.contains("\"ring\" is no strategy; gather, exchange,"), "{named}");
    assert!(told(TEXT, &["mesh.sard=2"]).contains("did you mean `shard`?"));
    let limited = Recipe::parse(TEXT, "r.toml", &["mesh.nccl_blocks=8".to_owned()]).unwrap();
    assert_eq!(limited.mesh.blocks().map(u16::from), Some(8));
    for blocks in [0, 65] {
        let why = format!(
            "mesh.nccl_blocks is {blocks}; NCCL takes 1 to 64 thread blocks for a transfer"
        );
        assert!(told(TEXT, &[&format!("mesh.nccl_blocks={blocks}")]).contains(&why));
    }
}

/// Every field of a recipe, and every section, given values of every type.
#[test]
fn a_value_of_a_wrong_type_is_said_without_types_of_rust() {
    let values = [
        "\"text\"",
        "3",
        "-3",
        "1.5",
        "true",
        "[1]",
        "[\"x\"]",
        "[]",
        "{ a = 1 }",
        "{}",
        "2026-11-22",
        "99999999999999999999",
        "nan",
    ];
    let scaling = "rope_scaling = { rope_type = \"llama3\", factor = 2.0, low_freq_factor = 1.0, \
                       high_freq_factor = 4.0, original_max_position_embeddings = 8192.0 }";
    let buffers = "buffers = { window = { shape = [1], values = [7] } }\nlearned = { bias = { shape = [4], init = 0.5 } }\n\
                       score = \"score + bias[h]\"";
    let text = TEXT
        .replace("[attention]", &format!("{scaling}\n[attention]\n{buffers}"))
        .replace("mask = \"causal & document\"", "mask = \"kv <= window[0]\"");
    let recipe = Recipe::parse(&text, "r.toml", &[]).unwrap();
    let table: toml::Table = toml::from_str(&recipe.to_toml().unwrap()).unwrap();
    let mut fields = vec![
        "model.checkpoint",
        "model.vocab_size",
        "model.num_key_value_heads",
        "model.head_dim",
        "model.rms_norm_eps",
        "model.rope_theta",
        "model.rope_pairing",
        "attention.score",
        "model.max_position_embeddings",
        "model.tie_word_embeddings",
        "attention.layers",
        "attention.programs",
        "train.epochs",
        "precision.state",
        "data.tokenizer",
        "data.add_bos_token",
        "data.add_eos_token",
        "data.chat_template",
        "mesh.replicate",
        "mesh.shard",
        "mesh.context",
        "mesh.tensor",
        "mesh.strategy",
        "mesh.nccl_blocks",
        "resolved",
    ]
    .into_iter()
    .map(str::to_owned)
    .collect();
    fn walk(table: &toml::Table, above: &str, fields: &mut Vec<String>) {
        for (key, value) in table {
            let field = format!("{above}{key}");
            if let toml::Value::Table(inner) = value {
                walk(inner, &format!("{field}."), fields);
            }
            fields.push(field);
        }
    }
    walk(&table, "", &mut fields);
    assert!(fields.len() > 60 && fields.iter().any(|f| f == "attention.learned.bias.shape"));
    const OF_RUST: [&str; 17] = [
        "usize", "u64", "u32", "i64", "i32", "f64", "f32", "struct", "enum", "variant", "untagged",
        "option", "map", "sequence", "boolean", "floating", "invalid",
    ];
    let (mut wrong, mut faults) = (0, Vec::new());
    for field in &fields {
        // One of its names is that of a type.
        let is_dtype = ["train.save_dtype", "precision", "mesh.reduce_dtype"]
            .iter()
            .any(|f| field.starts_with(f));
        for value in values {
            let set = format!("{field}={value}");
            let mut given = table.clone();
            let of_set = Recipe::parse(&text, "r.toml", std::slice::from_ref(&set)).err();
            // The same in the file.
            let of_file = override_value(&mut given, &set)
                .and_then(|_| Recipe::parse(&toml::to_string(&given).unwrap(), "r.toml", &[]));
            for said in [of_set, of_file.err()].into_iter().flatten() {
                let said = said.to_string();
                let words: Vec<_> = said.split(|c: char| !c.is_alphanumeric()).collect();
                let leaks = OF_RUST
                    .iter()
                    .any(|&word| words.contains(&word) && !(word == "f32" && is_dtype));
                let named = said.contains(field.rsplit('.').next().unwrap())
                    || said.contains("unknown field `a`, expected");
                if leaks || said.contains('\n') || !named {
                    faults.push(format!("{set}: {said}"));
                }
                wrong += 1;
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(wrong > 700, "{wrong}");
}

#[test]
fn every_recipe_of_the_repository_reads_and_every_field_is_documented() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let manual = std::fs::read_to_string(root.join("docs/recipes.md")).unwrap();
    let mut read = 0;
    for entry in std::fs::read_dir(root.join("recipes")).unwrap() {
        let recipe = Recipe::load(&entry.unwrap().path(), &[]).unwrap();
        read += 1;
        let table: toml::Table = toml::from_str(&recipe.to_toml().unwrap()).unwrap();
        for (section, fields) in &table {
            for field in fields.as_table().unwrap().keys() {
                assert!(manual.contains(&format!("`{section}.{field}")), "{section}.{field}");
            }
        }
    }
    assert!(read >= 5);
}

#[test]
fn links_are_those_of_the_machine_that_is_named_or_has_the_gpu() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("four.toml");
    let text = Machine::text_of("h100x8").unwrap().replace("ranks = 8", "ranks = 4");
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap().to_owned();
    let section = |machine: Option<&str>| MeshSection {
        machine: machine.map(str::to_owned),
        ..MeshSection::default()
    };
    for (named, gpu, machine, by, ranks) in [
        (None, None, "h200x8", "default", 8),
        (None, Some("NVIDIA L4"), "h200x8", "default", 8),
        (None, Some("NVIDIA H100 80GB HBM3"), "h100x8", "the GPU", 8),
        (Some("h200x8"), Some("NVIDIA H100 80GB HBM3"), "h200x8", "mesh.machine", 8),
        (Some(file.as_str()), Some("NVIDIA H200"), file.as_str(), "mesh.machine", 4),
    ] {
        let chosen = section(named).links(gpu).unwrap();
        let is = (chosen.machine.as_str(), chosen.by, chosen.links.host_ranks);
        assert_eq!(is, (machine, by, ranks));
    }
    let shown = section(None).links(None).unwrap().to_string();
    assert_eq!(
        shown,
        "h200x8 by default: 8 ranks a host, 360 GB/s within and 40 GB/s between hosts"
    );
    let told = section(Some("b200x8")).links(None).unwrap_err().to_string();
    assert_eq!(
        told,
        "mesh.machine: is \"b200x8\", which is neither a machine that is known (h100x8, h200x8) nor a file"
    );
    let told = section(dir.path().to_str()).links(None).unwrap_err().to_string();
    assert!(told.contains("\", a file that could not be read: "), "{told}");
    std::fs::write(&file, "name = 3\n").unwrap();
    let told = section(Some(&file)).links(None).unwrap_err().to_string();
    assert!(told.contains("four.toml\": ") && !told.contains('\n'), "{told}");
}
