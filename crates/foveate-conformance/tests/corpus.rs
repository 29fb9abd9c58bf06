//! The corpus on every backend of this build.

use std::path::Path;

use foveate_conformance::{Outcome, Row, backends, check, gpu_backends, load, parse, run};

fn cases() -> Vec<foveate_conformance::Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance/cases");
    load(&folder).unwrap_or_else(|e| panic!("{e}"))
}

/// The runner of the binary isolates cases from each other; here a GPU runs them in one process.
#[test]
fn every_case_passes_on_the_gpu_where_there_is_one() {
    let gpu = match gpu_backends() {
        Ok(gpu) => gpu,
        Err(reason) => return println!("cuda declined every case: {reason}"),
    };
    let report = run(&cases(), &gpu);
    println!("{report}");
    assert_eq!(report.failures().count(), 0, "\n{report}");
}

#[test]
fn every_case_passes_on_every_backend_that_takes_it() {
    let only = std::env::var("FOVEATE_CASE").unwrap_or_default();
    let mut cases = cases();
    cases.retain(|case| case.name.contains(&only));
    let report = run(&cases, &backends());
    println!("{report}");
    assert_eq!(report.failures().count(), 0, "\n{report}");
    // Operands of 8 bits are the oracle's and the GPU's.
    let narrow = |row: &&Row| {
        let case = cases.iter().find(|case| case.name == row.case);
        case.is_some_and(|case| case.dtype == "f8e4m3") && row.backend != "plain"
    };
    let refused = report.declined().find(|row| !narrow(row));
    assert!(refused.is_none(), "every backend takes every case of the corpus\n{report}");
}

/// The plain implementation's error of these four numbers happens to be a sixth of what it is on average.
#[test]
fn the_gradient_of_a_temperature_passes_in_bf16_where_the_plain_one_is_right_by_luck() {
    let name = "named score: temperature of each head: mask causal";
    let mut case = cases().into_iter().find(|case| case.name == name).expect(name);
    case.dtype = "bf16".into();
    let report = run(&[case], &backends());
    assert_eq!(report.failures().count(), 0, "\n{report}");
    assert_eq!(report.declined().count(), 0, "\n{report}");
}

/// The text calls `name`, or refers to it; a buffer of that name, `name[...]`, is something else.
fn mentions(text: &str, name: &str) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(name).any(|(at, _)| {
        let (before, after) = (&text[..at], text[at + name.len()..].trim_start());
        !before.ends_with(word) && !after.starts_with(word) && !after.starts_with('[')
    })
}

#[test]
fn every_name_of_the_catalogue_has_a_case() {
    let cases = cases();
    let texts: Vec<_> = cases.iter().flat_map(|c| c.mask.iter().chain(&c.score)).collect();
    let without = |name: &&str| !texts.iter().any(|text| mentions(text, name));
    let missing: Vec<_> = foveate_mods::catalogue::names().filter(without).collect();
    assert!(missing.is_empty(), "no case in conformance/cases calls {missing:?}");
    assert!(without(&"caus") && without(&"no_such_name"));
}

#[test]
fn the_corpus_has_at_least_two_hundred_different_cases() {
    assert!(cases().len() >= 200, "{} cases", cases().len());
}

const CASE: &str = r#"
[[case]]
name = "two heads"
why = "a case"
heads = [2, 1]
len = [5, 7]
dim = [4, 3]
dtype = "f32"
"#;

#[test]
fn a_grid_is_the_product_of_its_lists() {
    let grid = "grid = { len = [[1, 2], [3, 4]], dtype = [\"f16\", \"bf16\", \"f32\"] }\n";
    let cases = parse("here", &format!("{CASE}{grid}")).expect("a grid");
    assert_eq!(cases.len(), 6);
    assert!(cases.iter().any(|c| c.name.contains("3/4") && c.name.contains("bf16")));
}

#[test]
fn an_unknown_key_is_refused_by_name() {
    let error = parse("here", &format!("{CASE}heds = 3\n")).expect_err("no such key").to_string();
    assert!(error.contains("`two heads`") && error.contains("heds"), "{error}");
}

#[test]
fn numbers_are_given_to_elements_of_operands_and_to_nothing_outside() {
    let refusal = |set: &str| {
        let cases = parse("here", &format!("{CASE}set = [{{ {set}, value = nan }}]\n"));
        let cases = cases.expect("the text is a case");
        check(&cases[0], &[]).expect_err("there is no such place").to_string()
    };
    let message = refusal("operand = \"v\", row = 7");
    assert!(message.starts_with("two heads: ") && message.ends_with("v has no row 7, only 7"));
    assert!(refusal("operand = \"k\", head = 1, row = 0").ends_with("k has no head 1, only 1"));
    assert!(refusal("operand = \"q\", row = [2, 6]").ends_with("q has no row 5, only 5"));
    assert!(refusal("operand = \"q\", row = [2, 2]").ends_with("no row in 2..2"));
    let column = refusal("operand = \"d_out\", batch = 0, row = 4, column = 3");
    assert!(column.ends_with("d_out has no column 3, only 3"), "{column}");
}

#[test]
fn a_number_that_was_given_is_in_the_operands() {
    // Adds infinity to one element of row 4 of head 1, which is right only where gold has it.
    let infinite: Vec<Box<dyn foveate_conformance::Backend>> =
        vec![Box::new(Broken(|row| row.copy_from_slice(&[0.0, 0.0, f32::INFINITY])))];
    for (given, failures) in
        [("set = [{ operand = \"v\", row = 6, column = 2, value = inf }]\n", 0), ("", 1)]
    {
        let cases = parse("here", &format!("{CASE}{given}")).expect("a case");
        let report = run(&cases, &infinite);
        assert_eq!(report.failures().count(), failures, "{given}\n{report}");
    }
}

/// A backend that is wrong in one element, late, or writes where it must not.
struct Broken(fn(&mut [f32]));

impl foveate_conformance::Backend for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn prepare(
        &self,
        program: &foveate_conformance::Program,
        dims: &foveate_problem::Dims,
        dtype: foveate_tensor::DType,
    ) -> Result<Box<dyn foveate_conformance::Prepared>, String> {
        let cpu = backends().remove(1).prepare(program, dims, dtype)?;
        Ok(Box::new(BrokenPlan(cpu, self.0)))
    }
}

struct BrokenPlan(Box<dyn foveate_conformance::Prepared>, fn(&mut [f32]));

impl foveate_conformance::Prepared for BrokenPlan {
    fn forward(&self, mut args: foveate_problem::ForwardArgs<'_>) -> Result<(), String> {
        let out = args.out.reborrow();
        let lse = args.lse.reborrow();
        let forward = foveate_problem::ForwardArgs {
            operands: args.operands,
            out,
            lse,
            max_score: args.max_score.as_mut().map(|m| m.reborrow()),
        };
        self.0.forward(forward)?;
        let mut row = vec![0.25; args.out.shape()[3]];
        (self.1)(&mut row);
        args.out.write_row(0, 1, 4, &row, true);
        Ok(())
    }

    fn backward(&self, args: foveate_problem::BackwardArgs<'_>) -> Result<(), String> {
        self.0.backward(args)
    }
}

#[test]
fn one_wrong_row_fails_the_case_and_is_named() {
    let cases = parse("here", CASE).expect("a case");
    let harmless: Vec<Box<dyn foveate_conformance::Backend>> =
        vec![Box::new(Broken(|row| row.fill(0.0)))];
    assert_eq!(run(&cases, &harmless).failures().count(), 0);
    for breaks in [|row: &mut [f32]| row[0] = 1e-3, |row: &mut [f32]| row[0] = f32::NAN] {
        let backends: Vec<Box<dyn foveate_conformance::Backend>> = vec![Box::new(Broken(breaks))];
        let report = run(&cases, &backends);
        let Some(Outcome::Failed(lines)) = report.rows.first().map(|r| r.outcome.clone()) else {
            panic!("{report}");
        };
        assert!(lines[0].starts_with("out: "), "{report}");
    }
}
