//! Every operation is in every table of this crate: evaluation, vectors, bounds, text, macros, and
//! the random programs that other crates test with. What the oracle and the GPU make of each is
//! tested where they are.

use std::collections::BTreeSet;

use foveate_mods::fuzz::{every_operation, expression};
use foveate_mods::ir::{BinaryOp, UnaryOp};
use foveate_mods::text::parse_score;
use foveate_mods::vector::Scores;
use foveate_mods::{
    Bounds, Buffer, Cover, DynExpr, Head, Leaf, MaskBits, MaskMod, Node, Program, ScalarValue,
    ScoreMod, TileProgram, Type, closure, expr,
};
use foveate_tensor::random::Random;

const HEAD: Head = Head { b: 0, h: 0, h_kv: 0, q_len: 9, kv_len: 16 };
const STRIDE: usize = 16;

/// Between 0 and 1, another at every entry.
fn score_at(q: i32, kv: i32) -> f32 {
    (q * 16 + kv + 1) as f32 / 160.0
}

/// The operations of a program and the types of their operands.
fn operations(program: &Program) -> BTreeSet<String> {
    let graph = program.graph();
    let name = |node: &Node| match node {
        Node::Unary(op, x) => Some(format!("{op:?} of {}", graph.ty(*x))),
        Node::Binary(op, x, _) => Some(format!("{op:?} of {}", graph.ty(*x))),
        _ => None,
    };
    graph.nodes().iter().filter_map(name).collect()
}

/// The names of [`operations`] for every operation there is.
fn all() -> BTreeSet<String> {
    let unary = UnaryOp::ALL.iter();
    let unary = unary.flat_map(|op| op.takes().iter().map(move |ty| format!("{op:?} of {ty}")));
    let binary = BinaryOp::ALL.iter();
    let binary = binary.flat_map(|op| op.takes().iter().map(move |ty| format!("{op:?} of {ty}")));
    unary.chain(binary).collect()
}

fn as_score(value: &DynExpr) -> ScoreMod {
    ScoreMod::new(&value.clone().cast(Type::F32)).expect("it is an f32")
}

fn number(value: ScalarValue) -> f32 {
    let ScalarValue::F32(value) = value else { panic!("{value:?} is no f32") };
    value
}

#[test]
fn every_operation_is_over_a_tile_what_it_is_at_a_point() {
    for operation in every_operation(&expr::score()) {
        let score = as_score(&operation.value);
        let scores: Vec<f32> =
            (0..9).flat_map(|q| (0..16).map(move |kv| score_at(q, kv))).collect();
        let mut found = vec![f32::NAN; scores.len()];
        let mut machine = TileProgram::compile(score.program()).machine(9, 16);
        machine.set_head(HEAD);
        machine.set_tile(0..9, 0..16);
        machine.run(0..9, 0..16, Scores { data: &scores, stride: STRIDE }, None);
        machine.store(0, &mut found, STRIDE);
        for (q, kv) in (0..9).flat_map(|q| (0..16).map(move |kv| (q, kv))) {
            let point = foveate_mods::Point { score: score_at(q, kv), ..HEAD.at(q, kv) };
            let want = number(score.program().eval(&point).expect("it reads nothing")[0]);
            let got = found[q as usize * STRIDE + kv as usize];
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(same, "{} at {q}, {kv}: {got}, not {want}", operation.name);
        }
    }
}

#[test]
fn every_operation_has_bounds_that_hold_and_mask_bits() {
    let x = (expr::kv() + 1).to_f32() / 5.0;
    for operation in every_operation(&x) {
        let mask = MaskMod::new(&operation.value.clone().cast(Type::Bool)).expect("a bool");
        let score = as_score(&operation.value);
        let negated = -score.expr();
        let negated = ScoreMod::new(negated.dynamic()).expect("an f32");
        let covers = Bounds::new(mask.program());
        let heights = [&score, &negated].map(|score| Bounds::new(score.program()));
        let mut machine = TileProgram::compile(mask.program()).machine(9, 16);
        let mut bits = MaskBits::default();
        machine.set_head(HEAD);
        for (q, kv) in [(0..9, 0..16), (3..4, 5..6), (2..5, 8..16), (0..1, 0..16)] {
            machine.set_tile(q.clone(), kv.clone());
            machine.mask_bits(None, &mut bits);
            let cover = covers.cover(&HEAD, q.clone(), kv.clone());
            let highest = |of: &Bounds| of.highest(&HEAD, q.clone(), kv.clone(), 1.0);
            let [high, low] = [highest(&heights[0]), -highest(&heights[1])];
            for (i, j) in q.clone().flat_map(|q| kv.clone().map(move |kv| (q, kv))) {
                let at = |program: &Program| program.eval(&HEAD.at(i, j)).expect("no read")[0];
                let seen = at(mask.program()) == ScalarValue::Bool(true);
                let name = &operation.name;
                let bit = bits.get((i - q.start) as usize, (j - kv.start) as usize);
                assert_eq!(bit, seen, "{name} at {i}, {j}");
                match cover {
                    Cover::Full => assert!(seen, "{name}: {q:?} x {kv:?} is not full"),
                    Cover::Empty => assert!(!seen, "{name}: {q:?} x {kv:?} is not empty"),
                    Cover::Undecided => {}
                }
                let value = number(at(score.program()));
                let holds = value.is_nan() || (low..=high).contains(&value);
                assert!(holds, "{name}: {value} is outside {low}..={high}");
            }
        }
    }
}

#[test]
fn every_operation_prints_as_text_that_reads_back_and_is_documented() {
    let manual = include_str!("../../../docs/text-form.md");
    let mut met = BTreeSet::new();
    for operation in every_operation(&expr::score()) {
        let score = as_score(&operation.value);
        let (text, names) = score.program().text();
        let again = parse_score(&text, &names).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(again, score, "{}: {text}", operation.name);
        met.extend(operations(score.program()));
        // A name before a bracket is a function.
        for (open, _) in text.match_indices('(') {
            let before = &text[..open];
            let start = before.rfind(|c: char| !c.is_alphanumeric() && c != '_');
            let function = &before[start.map_or(0, |i| i + 1)..];
            let written = |line: &str| line.contains(function);
            let listed =
                manual.lines().filter(|l| l.contains("**Functions**") || l.contains("f32(x)"));
            let known = function.is_empty() || listed.clone().any(written);
            assert!(known, "docs/text-form.md does not list `{function}`");
        }
    }
    assert_eq!(met, all(), "what is printed is what there is");
}

#[test]
fn every_operation_can_be_written_in_a_macro() {
    let masks = [
        closure::mask_mod!(|q, kv| q == kv && (q < 3) || (kv <= 5) ^ (q != 2)),
        closure::mask_mod!(|q, kv| (q < 3) == (kv < 3)),
        closure::mask_mod!(|q, kv| (q < 3) != (kv < 3)),
        closure::mask_mod!(|q, kv| ((q & 7) | (kv ^ 3)) == ((q << 2) >> kv)),
        closure::mask_mod!(
            |q, kv| (-q).abs() + kv.detach() * 2 - q / 3 == (q % 5).min(kv).max(q.mix(kv))
        ),
    ];
    let scores = [
        closure::score_mod!(
            |score, q, kv| score + 1.5 - score * 2.5 / score % 3.5 + q.mix(kv).unit()
        ),
        closure::score_mod!(|score| score.min(1.0).max(0.5).pow(2.0 + score)),
        closure::score_mod!(|score| if score == 1.0
            || score != 2.0
            || !(score < 3.0)
            || score <= 4.0
        {
            -score
        } else {
            score.abs()
        }),
        closure::score_mod!(|score| score.floor() + score.exp() + score.exp2() + score.log()),
        closure::score_mod!(|score| score.log2() + score.sqrt() + score.rsqrt() + score.tanh()),
        closure::score_mod!(|score| score.sigmoid()
            + score.erf()
            + score.sin()
            + score.cos()
            + score.detach()),
    ];
    let programs = masks.iter().map(MaskMod::program).chain(scores.iter().map(ScoreMod::program));
    let met: BTreeSet<String> = programs.flat_map(operations).collect();
    let missing: Vec<_> = all().difference(&met).cloned().collect();
    assert!(missing.is_empty(), "no macro above writes {missing:?}");
}

#[test]
fn random_programs_meet_every_operation() {
    let seed = 7;
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let ids = Buffer::vector("ids", (0..90).collect::<Vec<i32>>());
    let given = [Leaf::Q, Leaf::Kv, Leaf::Score].map(DynExpr::leaf);
    let mut met = BTreeSet::new();
    for _ in 0..1000 {
        let buffers = [ids.any().clone()];
        let below = &mut |n| random.below(n);
        let score = expression(below, &given, &buffers, 20, Type::F32);
        let mask = expression(below, &given[..2], &buffers, 20, Type::Bool);
        met.extend(operations(&Program::build(&[score, mask])));
    }
    assert_eq!(met, all());
}
