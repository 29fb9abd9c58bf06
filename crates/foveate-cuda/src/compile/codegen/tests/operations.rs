//! Every operation of mods is printed, has a device function over entries and over ranges, and
//! gives the CPU's bits.

use foveate_mods::fuzz::every_operation;
use foveate_mods::{Type, expr};

use super::execute::{Case, agree_with_the_cpu};
use super::*;

/// Each operation of the score in a score, and of the position in a mask.
fn cases() -> Vec<Case> {
    let position = (expr::kv() - 40).to_f32() / 30.0;
    let scores = every_operation(&expr::score());
    let masks = every_operation(&position);
    let made = scores.into_iter().zip(masks).map(|(score, mask)| {
        let score = ScoreMod::new(&score.value.cast(Type::F32)).expect("an f32");
        Case {
            mask: MaskMod::new(&mask.value.cast(Type::Bool)).expect("a bool"),
            gradient: score.gradient().ok(),
            score,
            dropout: Dropout::new(0.5, 1),
            rectangles: vec![(0..8, 0..90), (30..36, 60..64), (5..6, 70..71), (60..70, 80..90)],
            checked: true,
        }
    });
    made.collect()
}

#[test]
fn every_operation_gives_the_cpus_bits_and_bounds_that_hold() {
    agree_with_the_cpu(&cases());
}

#[test]
fn every_operation_compiles_for_a_gpu_with_and_without_approximations() {
    let compiler = match Compiler::get() {
        Ok(compiler) => compiler,
        Err(error) => return println!("skipped: {error}"),
    };
    for fast_math in [false, true] {
        let mut text = format!("typedef long long i64;\n{PRELUDE}");
        let cases = cases();
        for (i, case) in cases.iter().enumerate() {
            let calls = CALLS.replace("calls", &format!("calls{i}"));
            let source = case.source(fast_math);
            text.push_str(&format!("namespace p{i} {{\n{}{calls}}}\n", source.text()));
        }
        let compiled = Cache::at(None).compile(compiler, &text, Arch::new((8, 0)));
        let compiled = compiled.unwrap_or_else(|e| panic!("{:?}", e.kind()));
        assert_eq!(compiled.kernels.len(), cases.len());
    }
}
