//! Whether the scripts and manifests of `docs/cluster.md` are ones: they are read by shells and as YAML, what they
//! ask of a cluster goes together, the variables that they set make the ranks that they mean, and the commands in
//! them are ones that this program takes. No cluster is asked.

use std::collections::BTreeSet;
use std::fs;

use clap::Parser;
use foveate_shard::launch::{Flags, Launch, Launcher, find};
use serde_json::{Value, json};

use super::root;
use crate::Cli;

fn page() -> String {
    fs::read_to_string(root().join("docs/cluster.md")).unwrap()
}

/// The blocks of a language.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    let found = page.split(&fence).skip(1);
    let found: Vec<&str> = found.map(|block| block.split("```").next().unwrap()).collect();
    assert!(!found.is_empty(), "no block of {language}");
    found
}

/// Manifests, in their order.
fn manifests() -> Vec<Value> {
    let page = page();
    let read =
        |text: &&str| serde_yaml_ng::from_str(text).unwrap_or_else(|e| panic!("{text}\n{e}"));
    blocks(&page, "yaml").iter().map(read).collect()
}

/// Texts of a list.
fn texts(list: &Value) -> Vec<&str> {
    let of = |text: &Value| text.as_str().map(|_| ());
    let list = list.as_array().unwrap_or_else(|| panic!("{list} is no list"));
    assert!(list.iter().all(|text| of(text).is_some()), "{list:?} has something that is no text");
    list.iter().filter_map(Value::as_str).collect()
}

/// Fails where `value` has other keys than `known`.
fn only(value: &Value, known: &[&str]) {
    let keys = value.as_object().unwrap_or_else(|| panic!("{value} is no mapping")).keys();
    let other: Vec<&String> = keys.filter(|key| !known.contains(&key.as_str())).collect();
    assert!(other.is_empty(), "{other:?} are no keys of {value}");
}

/// Fails where a shell cannot read `script`.
#[cfg(unix)]
fn is_read_by(shell: &str, script: &str) {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut read = Command::new(shell);
    let read = read.arg("-n").stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut read = read.spawn().unwrap();
    read.stdin.take().expect("it is piped").write_all(script.as_bytes()).unwrap();
    let done = read.wait_with_output().unwrap();
    assert!(done.status.success(), "{script}\n{}", String::from_utf8_lossy(&done.stderr));
}

#[cfg(not(unix))]
fn is_read_by(_: &str, _: &str) {}

/// Fails where a command of ours in a script is none that this program takes.
fn are_taken(script: &str) {
    let lines = script.lines().filter(|line| !line.starts_with('#'));
    let commands: Vec<&str> =
        lines.filter_map(|line| line.find("foveate ").map(|at| &line[at..])).collect();
    assert!(!commands.is_empty(), "no command in {script}");
    for command in commands {
        is_taken(&shlex::split(command).unwrap_or_else(|| panic!("{command}")));
    }
}

/// Fails where a command is none that this program takes.
fn is_taken<S: AsRef<str>>(command: &[S]) {
    let command = command.iter().map(AsRef::as_ref);
    if let Err(e) = Cli::try_parse_from(command.clone()) {
        panic!("{:?}: {e}", command.collect::<Vec<&str>>());
    }
}

/// The rank that a process is where these variables are set.
fn launched(variables: &[(&str, &str)]) -> Launch {
    let value = |name: &str| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    };
    find(&Flags::default(), value).unwrap_or_else(|e| panic!("{variables:?}: {e}"))
}

#[test]
fn scripts_of_the_cluster_are_read_by_shells_and_name_commands() {
    let page = page();
    for (shell, language) in [("bash", "bash"), ("sh", "sh")] {
        for script in blocks(&page, language) {
            is_read_by(shell, script);
            are_taken(script);
        }
    }
    let slurm = blocks(&page, "bash");
    let slurm = slurm.iter().find(|script| script.contains("#SBATCH")).expect("a script of Slurm");
    for line in slurm.lines().filter_map(|line| line.strip_prefix("#SBATCH ")) {
        let known = ["nodes", "ntasks-per-node", "gpus-per-node", "requeue", "signal", "open-mode"];
        for option in line.split(' ') {
            let name = option.trim_start_matches("--").split('=').next().unwrap();
            assert!(option.starts_with("--") && known.contains(&name), "{option}");
        }
    }
    // What ends by itself, or is wrong, is not queued again.
    assert!(slurm.contains("in 0 | 1 | 2) ;;"), "{slurm}");
}

#[test]
fn the_indexed_job_makes_the_ranks_that_it_says() {
    let manifests = manifests();
    let job = manifests.iter().find(|m| m["kind"] == "Job").expect("a Job");
    only(job, &["apiVersion", "kind", "metadata", "spec"]);
    assert_eq!(job["apiVersion"], "batch/v1");
    let spec = &job["spec"];
    only(
        spec,
        &[
            "completions",
            "parallelism",
            "completionMode",
            "backoffLimit",
            "podFailurePolicy",
            "template",
        ],
    );
    assert_eq!(spec["completionMode"], "Indexed");
    let ranks = spec["completions"].as_u64().expect("a number");
    // All ranks run at once, or they wait for each other.
    assert_eq!(spec["parallelism"], ranks);
    let pod = &spec["template"]["spec"];
    only(pod, &["subdomain", "restartPolicy", "containers"]);
    // What a podFailurePolicy asks for.
    assert_eq!(pod["restartPolicy"], "Never");
    let [container] = &pod["containers"].as_array().expect("containers")[..] else {
        panic!("{pod}")
    };
    only(container, &["name", "image", "command", "env"]);
    for rule in spec["podFailurePolicy"]["rules"].as_array().expect("rules") {
        only(rule, &["action", "onExitCodes"]);
        assert_eq!(rule["onExitCodes"]["containerName"], container["name"]);
        // 75 is to start again.
        assert_eq!(rule["onExitCodes"]["values"], json!([1, 2]));
    }
    let command = texts(&container["command"]);
    // A pod that is started again knows no other command.
    assert!(command.contains(&"--resume"), "{command:?}");
    is_taken(&command);
    let env = container["env"].as_array().expect("variables");
    let env = env.iter().map(|set| {
        only(set, &["name", "value"]);
        let of = |key: &str| set[key].as_str().unwrap_or_else(|| panic!("{set}: {key} is no text"));
        (of("name"), of("value"))
    });
    let mut env: Vec<(&str, &str)> = env.collect();
    let last = (ranks - 1).to_string();
    env.push(("JOB_COMPLETION_INDEX", &last));
    let launch = launched(&env);
    assert_eq!(launch.launcher, Launcher::Kubernetes);
    assert_eq!((launch.rank as u64, launch.ranks as u64), (ranks - 1, ranks));
    // The name of pod 0 under its headless service.
    let [name, service] =
        [&job["metadata"]["name"], &pod["subdomain"]].map(|v| v.as_str().unwrap());
    assert_eq!(launch.host, format!("{name}-0.{service}"));
    let reads = |(set, _): &(&str, &str)| variables_that_are_read().contains(*set);
    assert!(env.iter().all(reads), "{env:?}");
}

#[test]
fn the_train_job_starts_torchrun_and_torchrun_starts_ranks() {
    let manifests = manifests();
    let job = manifests.iter().find(|m| m["kind"] == "TrainJob").expect("a TrainJob");
    only(job, &["apiVersion", "kind", "metadata", "spec"]);
    only(&job["spec"], &["runtimeRef", "trainer"]);
    let trainer = &job["spec"]["trainer"];
    only(trainer, &["image", "numNodes", "numProcPerNode", "command", "resourcesPerNode"]);
    let command = texts(&trainer["command"]);
    let at = command.iter().position(|word| *word == "foveate").expect("ours");
    assert_eq!(command[..at], ["torchrun", "--no-python", "--max-restarts=3"]);
    assert!(command.contains(&"--resume"), "{command:?}");
    is_taken(&command[at..]);
    let [nodes, each] = ["numNodes", "numProcPerNode"].map(|key| trainer[key].as_u64().unwrap());
    assert_eq!(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"], each, "a GPU a rank");
    let [rank, world] = [nodes * each - 1, nodes * each].map(|n| n.to_string());
    let set = [
        ("RANK", rank.as_str()),
        ("WORLD_SIZE", &world),
        ("MASTER_ADDR", "train-node-0-0.train"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ];
    let launch = launched(&set);
    assert_eq!((launch.launcher, launch.ranks as u64), (Launcher::Torchrun, nodes * each));
}

/// The variables that a process looks up to find out which rank it is.
fn variables_that_are_read() -> BTreeSet<String> {
    let source = root().join("crates/foveate-shard/src/launch.rs");
    let source = fs::read_to_string(source).unwrap();
    let (source, _) = source.split_once("#[cfg(test)]").expect("its tests");
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = code.collect::<Vec<_>>().join("\n");
    let texts = code.split('"').skip(1).step_by(2).map(str::to_owned);
    texts.filter(|text| is_variable(text)).collect()
}

fn is_variable(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_uppercase() || c == '_';
    text.len() > 3
        && text.starts_with(|c: char| c.is_ascii_uppercase())
        && text.chars().all(is_part)
}

#[test]
fn the_variables_of_launchers_are_those_that_are_read() {
    let page = page();
    let shown: BTreeSet<String> = page
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|text| is_variable(text))
        .map(str::to_owned)
        .collect();
    let read = variables_that_are_read();
    assert!(read.len() > 20, "{read:?}");
    let missing: Vec<&String> = read.difference(&shown).collect();
    assert!(missing.is_empty(), "docs/cluster.md names none of {missing:?}");
    // torchrun reads its own.
    let others = |name: &&String| name.starts_with("PET_");
    let unread: Vec<&String> = shown.difference(&read).filter(|name| !others(name)).collect();
    assert!(unread.is_empty(), "docs/cluster.md names {unread:?}, which nothing reads");
}
