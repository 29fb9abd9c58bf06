//! Whole kernels of the Hopper family on an emulated GPU, `scripts/emulated-gpu.sh`, through the engine as it is:
//! threads go on in an order drawn from a seed, and what is asynchronous is done late, or at once.

#[path = "../../foveate-gpu/tests/emulator/mod.rs"]
mod emulator;

use std::path::Path;
use std::process::Output;

use emulator::emulated;

/// What a case is run with: a part of its name, the backends, and variables of the emulator.
struct Run<'a> {
    case: &'a str,
    backends: &'a str,
    variables: &'a [(&'a str, &'a str)],
}

impl Run<'_> {
    fn output(&self) -> Option<Output> {
        let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance/cases");
        emulated(env!("CARGO_BIN_EXE_foveate-conformance"), |command| {
            command.args(["run", "--workers", "0", "--on", "gpu", "--only", self.case]);
            command.args(["--backend", self.backends]).arg("--cases").arg(cases);
            command.envs(self.variables.iter().copied());
        })
    }
}

/// What a command wrote.
fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|s| String::from_utf8_lossy(s).into_owned()).concat()
}

const STEPS: &str = "steps that run into each other: ";
/// The second 64 queries of most of its tiles are of no sequence, and a consumer of the forward passes them over.
const SHORT: &str = "wide packed sequences: bottom-right causal: dim 192/128";
const EAGER: (&str, &str) = ("EAGER", "1");
/// Orders of threads in one of which a mutant has to show.
const SEEDS: u32 = 12;
/// What tells of a fence that is missing, and of a wait: what is read too early has no fence either.
const FENCE: &[&str] = &["without a fence since"];
const WAIT: &[&str] = &["nobody can go on", "max error", "without a fence since"];

#[test]
fn hopper_kernels_have_the_numbers_of_the_oracle_in_any_order_of_threads() {
    let plain = &format!("{STEPS}without a mask");
    let causal = &format!("{STEPS}head dim of 128, causal in f16");
    let runs = [
        (plain.as_str(), "cuda, hopper", &[("SEED", "1")][..]),
        (causal, "cuda, dq in order", &[("SEED", "2"), EAGER]),
        (SHORT, "cuda, hopper backward", &[("SEED", "3")]),
    ];
    for (case, backends, variables) in runs {
        let Some(output) = (Run { case, backends, variables }).output() else { return };
        let said = said(&output);
        let passed = output.status.success() && said.contains("1 cases");
        assert!(passed, "{case}, {backends}, {variables:?}: {said}");
    }
}

/// Kernels without one of their waits or fences: the numbers are others, nobody can go on, or it is told.
#[test]
fn what_is_not_waited_for_is_noticed() {
    let causal = &format!("{STEPS}head dim of 128, causal in f16");
    let mutants = [
        (
            WAIT,
            causal.as_str(),
            "cuda, dq in order",
            "barriers.ds_full(parity).wait((number - 1) >> 1);",
        ),
        (
            FENCE,
            causal,
            "cuda, dq in order",
            "= target_of(step);\n            fence_async_proxy();",
        ),
        (FENCE, causal, "cuda, hopper backward", "fence_barrier_init();"),
        (
            WAIT,
            causal,
            "cuda, hopper",
            "keep_before(softmax.row_sum[0] + softmax.row_sum[1], base);\n    product_wait<0>();",
        ),
        (WAIT, SHORT, "cuda, hopper backward by query heads", "else turns.pass_over();"),
    ];
    for (signs, case, backends, replaced) in mutants {
        // What assigns stays.
        let with = replaced.split_once("fence_async_proxy").map_or("{}", |(before, _)| before);
        let is_noticed = |seed: u32| {
            let variables = &[("SEED", seed.to_string()), ("REPLACE", replaced.into())];
            let variables = variables.iter().map(|(name, value)| (*name, value.as_str()));
            let variables: Vec<_> = variables.chain([("WITH", with)]).collect();
            let output = Run { case, backends, variables: &variables }.output()?;
            let said = said(&output);
            assert!(
                said.contains("a kernel with a text replaced"),
                "no kernel has `{replaced}`: {said}"
            );
            let told = signs.iter().any(|sign| said.contains(sign));
            assert!(told || output.status.success(), "{said}");
            Some(told)
        };
        // A wait that is missing shows in some orders of threads.
        let mut told = (1..=SEEDS).map(is_noticed).skip_while(|told| *told == Some(false));
        match told.next() {
            Some(None) => return,
            told => assert!(told.is_some(), "nobody noticed that `{replaced}` is missing"),
        }
    }
}
