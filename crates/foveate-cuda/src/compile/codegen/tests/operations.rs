//! Every operation of mods is printed, has a device function over entries and over ranges, and
//! gives the CPU's bits.

use foveate_mods::fuzz::every_operation;
use foveate_mods::{DynExpr, ScalarValue, Type, expr};

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

/// Every quotient and remainder of integers by run-time scalars, its upper and its lower half.
fn quotients() -> Vec<Case> {
    let ends = [i32::MIN, i32::MIN + 1, -65, -64, -1, 0, 1, 63, 64, 65, i32::MAX - 1, i32::MAX];
    let random = (0..78).map(|i| foveate_mods::ir::mix(3, i));
    let numbers = Buffer::vector("numbers", ends.into_iter().chain(random).collect::<Vec<i32>>());
    let number = numbers.at([expr::kv()]);
    let number = number.dynamic();
    let divisors = [0, 1, -1, 2, 3, -3, 7, 64, -64, 641, 65_537, -0x4000_0001, i32::MAX, i32::MIN];
    let of = |by: i32, op: BinaryOp, upper: bool| {
        let value = ScalarValue::I32(by);
        let scalar = DynExpr::scalar(foveate_mods::Scalar { name: "by".into(), value });
        let found = DynExpr::binary(op, number.clone(), scalar).expect("integers");
        let (half, by) = if upper { (BinaryOp::Shr, 16) } else { (BinaryOp::And, 0xffff) };
        let half = DynExpr::binary(half, found, DynExpr::constant(ScalarValue::I32(by)))
            .expect("integers");
        half.cast(Type::F32)
    };
    let divisions = [BinaryOp::Div, BinaryOp::Rem];
    let all = divisors.into_iter().flat_map(|by| divisions.map(|op| (by, op)));
    let cases = all.flat_map(|(by, op)| [true, false].map(|upper| (by, op, upper)));
    let made = cases.map(|(by, op, upper)| {
        let score = ScoreMod::new(&of(by, op, upper)).expect("an f32");
        Case {
            mask: MaskMod::new(expr::kv().ge(0).dynamic()).expect("a bool"),
            gradient: score.gradient().ok(),
            score,
            dropout: Dropout::new(0.0, 1),
            rectangles: vec![(0..2, 0..90)],
            checked: false,
        }
    });
    made.collect()
}

#[test]
fn quotients_by_run_time_scalars_have_the_cpus_bits() {
    let source = quotients()[0].source(false);
    assert!(source.text().contains("Divisor by_divisor;"), "{}", source.text());
    agree_with_the_cpu(&quotients());
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
