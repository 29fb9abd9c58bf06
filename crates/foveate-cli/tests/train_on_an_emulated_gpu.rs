//! The trainer on an emulated GPU, `scripts/emulated-gpu.sh`: every kernel of its steps runs, in any order of threads,
//! and products are those of a cuBLASLt made for tests.

#![cfg(target_os = "linux")]

#[path = "../../foveate-gpu/tests/emulator/mod.rs"]
mod emulator;
mod place;

use std::process::Output;

use place::Place;

const STEPS: u64 = 8;

/// The command on the emulated GPU with these variables.
fn emulated(place: &Place, variables: &[(&str, &str)], args: &[&str]) -> Option<Output> {
    emulator::emulated(env!("CARGO_BIN_EXE_foveate"), |command| {
        command.args(args).current_dir(place.path("")).envs(variables.iter().copied());
    })
}

/// Trains so: what it says, as [`emulated`] does.
fn trains(place: &Place, variables: &[(&str, &str)], dir: &str, args: &[&str]) -> Option<String> {
    let set = format!("run.dir={dir}");
    let all = [&["train", "recipe.toml", "--device", "cuda:0", "--set", &set], args].concat();
    let output = emulated(place, variables, &all)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    Some(said)
}

fn place() -> Place {
    let place = Place::new();
    place.recipe(|recipe| {
        // Heads of a size that tensor cores have.
        let wide = recipe.replace("hidden_size = 16", "hidden_size = 64");
        let few = wide.replace("steps = 24", "steps = 8");
        few.replace("eval_every = 10", "eval_every = 0")
            .replace("[schedule]", "[schedule]\nkind = \"constant\"")
    });
    place
}

#[test]
fn a_run_has_the_losses_of_the_cpu_and_the_bits_of_any_order_of_threads() {
    let place = place();
    let cpu = place.run(&["train", "recipe.toml", "--device", "cpu", "--set", "run.dir=cpu"]);
    assert!(cpu.status.success(), "{}", String::from_utf8_lossy(&cpu.stderr));
    let Some(said) = trains(&place, &[], "whole", &[]) else { return };
    assert!(said.contains("recorded and replayed") && !said.contains("graphs: off"), "{said}");
    let (cpu, whole) = (place.steps("cpu"), place.steps("whole"));
    assert_eq!((cpu.len() as u64, whole.len() as u64), (STEPS, STEPS));
    for ((_, on_cpu, _), (step, loss, _)) in cpu.iter().zip(&whole) {
        let off = loss.parse::<f64>().unwrap() - on_cpu.parse::<f64>().unwrap();
        // Weights of bf16 have 8 bits.
        assert!(off.abs() < 5e-3, "step {step}: a loss of {loss}, {on_cpu} on the CPU");
    }
    // Copies and products at once, other orders, nothing recorded, and layers computed again.
    let variables = [("EAGER", "1"), ("SEED", "7")];
    let other = ["run.graphs=off", "train.recompute=full"].map(|set| ["--set", set]).concat();
    trains(&place, &variables, "again", &other);
    trains(&place, &[("SEED", "8")], "resumed", &["--set", "train.steps=4"]);
    trains(&place, &[("SEED", "9")], "resumed", &["--resume"]);
    for run in ["again", "resumed"] {
        assert_eq!(place.steps(run), whole, "{run}");
        assert_eq!(place.weights(run, STEPS), place.weights("whole", STEPS), "{run}");
    }
}

/// The run ends, with a line that says where, when a kernel reads or writes beside its operands.
#[test]
fn a_kernel_that_leaves_its_memory_is_told_of() {
    let place = place();
    let variables = [
        ("FOVEATE_EXACT_MEMORY", "1"),
        ("REPLACE", "if (column < width) each(h, column);"),
        ("WITH", "if (column < width + 64) each(h, column);"),
    ];
    let args = ["train", "recipe.toml", "--device", "cuda:0", "--set", "train.steps=1"];
    let Some(output) = emulated(&place, &variables, &args) else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("where no memory is"), "{said}");
    assert!(said.contains("of memory of 8192 B"), "{said}");
}
