use proptest::prelude::*;

use super::*;
use crate::capture::Buffer;
use crate::expr::{self, Expr};
use crate::point::Point;
use crate::value::ScalarValue;

fn names() -> Names {
    let doc = Buffer::vector("doc", vec![0, 0, 1, 1, 2, 2]);
    let bias = Buffer::learned("bias", &[2, 6], vec![0.5; 12]).unwrap();
    Names::new()
        .buffer(doc.any())
        .buffer(bias.any())
        .scalar("window", ScalarValue::I32(3))
        .scalar("slope", ScalarValue::F32(0.25))
}

fn mask(text: &str) -> MaskMod {
    parse_mask(text, &names()).unwrap_or_else(|e| panic!("{e}"))
}

fn score_at(text: &str, point: &Point) -> f32 {
    let score = parse_score(text, &names()).unwrap_or_else(|e| panic!("{e}"));
    match score.program().eval(point).unwrap()[0] {
        ScalarValue::F32(v) => v,
        other => panic!("{other:?}"),
    }
}

#[test]
fn text_says_what_tracing_says() {
    let (q, kv) = (expr::q, expr::kv);
    let of = |e: Expr<bool>| MaskMod::new(e.dynamic()).unwrap();
    assert_eq!(mask("causal"), of(q().ge(kv())));
    assert_eq!(mask("q >= kv && q - kv < 256"), of(q().ge(kv()) & (q() - kv()).lt(256)));
    assert_eq!(mask("kv <= q & 256 > q - kv"), mask("q - kv < 256 && q >= kv"));
    assert_eq!(mask("let d = q - kv; d >= 0 && d < 256"), mask("q - kv >= 0 && q - kv < 256"));
    assert_eq!(mask("!(q < kv)"), mask("causal"));
    assert_eq!(mask("if b == 0 { causal } else { false }"), mask("b == 0 && q >= kv"));
    assert_eq!(mask("doc[q] == doc[kv]").program().graph().buffers()[0].name(), "doc");
    assert_eq!(mask("causal & document"), mask("q >= kv && doc[q] == doc[kv]"));
}

#[test]
fn scores_follow_one_another() {
    let point = Point { q: 5, kv: 2, score: 3.0, ..Default::default() };
    assert_eq!(score_at("score * 2 + 1", &point), 7.0);
    assert_eq!(score_at("score * 2 then score + 1", &point), 7.0);
    assert_eq!(score_at("score + 1 then score * 2", &point), 8.0);
    assert_eq!(score_at("score - slope * f32(q - kv)", &point), 2.25);
    assert_eq!(score_at("(q - kv) as f32 / 2 + score.max(10)", &point), 11.5);
    assert_eq!(score_at("if q > kv { -score } else if q == kv { 0.0 } else { 1 }", &point), -3.0);
    assert_eq!(score_at("score + bias[h, min(q - kv, 5)]", &point), 3.5);
    assert_eq!(score_at("-7.0 / 2 * 1 then score", &point), -3.5);
    assert_eq!(score_at("f32(-7 / i32(2))", &point), -4.0);
    assert!((score_at("softcap(2)", &point) - 2.0 * 1.5f32.tanh()).abs() < 1e-6);
}

fn told(text: &str) -> (usize, String) {
    match parse_mask(text, &names()).expect_err(text).kind() {
        crate::ModErrorKind::Parse { position, message, .. } => (*position, message.clone()),
        other => panic!("{other:?} has no position"),
    }
}

#[test]
fn errors_name_the_place_and_what_was_meant() {
    let cases = [
        ("q >= kv &", 9, "expected a value, found the end"),
        ("q >= kvv", 5, "there is no `kvv`; did you mean `kv`?"),
        ("cuasal & document", 0, "there is no `cuasal`; did you mean `causal`?"),
        ("q >= kv >= 1", 8, "comparisons do not chain; write `a < b && b < c`"),
        ("q + kv", 0, "a mask is bool, but this is i32"),
        ("q && kv", 2, "`&&` takes bool, not i32"),
        (
            "q < 1.5",
            2,
            "`<` takes two values of one type, not i32 and f32; convert one with `as i32` or `as f32`",
        ),
        (
            "docs[q] == 1",
            0,
            "there is no captured buffer `docs`; given are bias, doc; did you mean `doc`?",
        ),
        (
            "slope[q] > 1.0",
            0,
            "`slope` is a run-time scalar; only captured buffers are indexed with `[...]`",
        ),
        ("q[kv] > 1", 0, "`q` is a coordinate; only captured buffers are indexed with `[...]`"),
        ("let then = 1; q > then", 4, "`then` has a meaning; choose another name"),
        ("(let x = q; x > 1) & x > 2", 21, "there is no `x`"),
        ("doc == 1", 0, "`doc` is a buffer; index its axes (1) with `[...]`"),
        ("doc[q, kv] == 1", 0, "buffer `doc` has 1 axis but was given 2 indices"),
        ("score > 0", 0, "a mask cannot read the score"),
        (
            "if causal { true }",
            18,
            "expected `else`: an `if` is a value, it needs both sides, found the end",
        ),
        ("causal then causal", 7, "`then` joins scores; join masks with `&` or `|`"),
        ("abs(q, kv) > 1", 0, "`abs` takes 1 argument, not 2"),
        ("softcap() > 1", 0, "soft_cap: argument 1 is missing; write `soft_cap(cap)`"),
        (
            "q > 99999999999",
            4,
            "99999999999 does not fit an i32, which is 2147483647 at most; where an f32 will do, write \
             99999999999.0",
        ),
        ("q ? kv", 2, "the character '?' has no meaning here"),
        ("~causal", 0, "the character '~' has no meaning here; write `!`"),
        ("let q = 1; q > 0", 4, "`q` is a coordinate; choose another name"),
    ];
    for (text, position, message) in cases {
        assert_eq!(told(text), (position, message.to_owned()), "{text}");
    }
    let whole = parse_mask("q >= kvv", &names()).unwrap_err().to_string();
    assert_eq!(whole, "there is no `kvv`; did you mean `kv`? at column 6\n  q >= kvv\n       ^");
    let lines = parse_mask("causal\n\t& kvv > 1\n| true", &names()).unwrap_err().to_string();
    let place = "at line 2, column 4\n  \t& kvv > 1\n  \t  ^";
    assert_eq!(lines, format!("there is no `kvv`; did you mean `kv`? {place}"));
}

#[test]
fn a_scalar_that_no_text_could_read_is_refused() {
    for name in ["q", "score", "then"] {
        let names = names().scalar(name, ScalarValue::I32(1));
        let error = parse_mask("causal", &names).unwrap_err().to_string();
        let reason = "the text form gives this name a meaning; call the scalar something else";
        assert_eq!(error, format!("`{name}` cannot be bound: {reason}"));
    }
}

#[test]
fn a_let_keeps_its_value_and_ends_with_its_block() {
    let scores = |text: &str| parse_score(text, &names()).unwrap();
    let capped = scores("softcap(30.0)");
    let raw = scores("let raw = score; softcap(30.0) then score + raw");
    let at = |s: &ScoreMod, score: f32| {
        let point = Point { score, ..Default::default() };
        match s.program().eval(&point).unwrap()[0] {
            ScalarValue::F32(v) => v,
            other => panic!("{other:?} is not f32"),
        }
    };
    assert_eq!(at(&raw, 50.0), at(&capped, 50.0) + 50.0);
    assert_eq!(
        scores("let x = 1.0; (let x = 2.0; score * x) + x"),
        scores("score * 2.0 + 1.0"),
        "the outer `x` is back after the inner block"
    );
    assert_eq!(scores("-q as f32 + score"), scores("f32(-q) + score"));
}

#[test]
fn a_long_program_prints_and_parses_back_in_linear_time() {
    let steps = |n: i32| (0..n).fold(expr::score(), |e, i| (&e * 0.5).max(&e - i as f32));
    let spent = |n: i32| {
        let score = ScoreMod::new(steps(n).dynamic()).unwrap();
        let began = std::time::Instant::now();
        let (text, names) = score.program().text();
        assert_eq!(parse_score(&text, &names).unwrap(), score);
        began.elapsed().as_secs_f64()
    };
    // Four times as long takes sixteen times as long where the work is quadratic. Other work on the
    // machine only adds, to the least of many rounds the less.
    let (mut short, mut long) = (f64::INFINITY, f64::INFINITY);
    for round in 0.. {
        (short, long) = (short.min(spent(5_000)), long.min(spent(20_000)));
        if round > 1 && long < 10.0 * short.max(0.01) {
            break;
        }
        assert!(round < 20, "{short:.3} s for 5,000 steps, {long:.3} s for 20,000");
    }
}

#[test]
fn deep_nesting_is_refused_and_long_chains_are_not() {
    let deep = format!("{}q{} > 0", "(".repeat(5000), ")".repeat(5000));
    assert!(told(&deep).1.starts_with("nested over"));
    let prefixed = format!("{}causal", "!".repeat(5000));
    assert!(told(&prefixed).1.starts_with("nested over"));
    let long = format!("q{} > kv", " + 1".repeat(5000));
    let chain = mask(&long);
    assert_eq!(parse_mask(&chain.to_string(), &chain.program().text().1).unwrap(), chain);
}

/// A random well-typed expression.
fn number() -> impl Strategy<Value = Expr<f32>> {
    let doc = Buffer::vector("doc", vec![0, 1, 2]);
    let other_doc = Buffer::vector("doc", vec![2, 1, 0]);
    let odd = Buffer::new("0 odd-name", &[1, 3], vec![0.5, 1.5, f32::NAN]).unwrap();
    let leaf = prop_oneof![
        Just(expr::score()),
        (-4..4i32).prop_map(|v| Expr::from(v as f32 / 4.0)),
        Just(Expr::from(f32::NEG_INFINITY)),
        Just(doc.at([expr::q()]).to_f32()),
        Just(other_doc.at([expr::kv() % 3]).to_f32()),
        Just(odd.at([expr::h(), expr::q() - expr::kv()])),
        Just(expr::scalar("if", 0.5f32)),
        Just(expr::scalar("slope", 2.5f32)),
        (any::<i32>(), 0..6u8).prop_map(|(v, op)| {
            let (q, kv) = (expr::q(), expr::kv());
            match op {
                0 => (q - v).to_f32(),
                1 => (q / v % kv).to_f32(),
                2 => q.mix(v).unit(),
                3 => (-q).abs().min(v).to_f32(),
                4 => (kv.ge(v) ^ q.eq(v)).to_f32(),
                _ => (v - q * v).max(kv).to_f32(),
            }
        }),
    ];
    leaf.prop_recursive(24, 40, 3, |inner| {
        (inner.clone(), inner.clone(), inner, 0..12u8).prop_map(|(x, y, z, op)| match op {
            0 => x + y,
            1 => x - (y - z),
            2 => &x * y + &x,
            3 => x / (y * z),
            4 => (x % y).max(z),
            5 => -(-x).exp(),
            6 => x.pow(y).min(z),
            7 => (x.lt(&y) | !y.le(z)).select(x, y),
            8 => (x.ne(&y) & y.eq(&z)).eq(x.lt(z)).to_f32(),
            9 => x.tanh().rsqrt().sigmoid().erf(),
            10 => x.to_i32().to_f32().floor(),
            _ => (&x + &y) * (&x + &y) * (x + y),
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..Default::default() })]

    #[test]
    fn printed_scores_parse_back_to_themselves(e in number()) {
        let score = ScoreMod::new(e.dynamic()).unwrap();
        let (text, names) = score.program().text();
        let again = parse_score(&text, &names).unwrap_or_else(|e| panic!("{e}"));
        prop_assert!(again.program().same_structure(score.program()), "{text}");
        prop_assert_eq!(again.to_string(), text);
        prop_assert_eq!(
            again.program().structural_hash(),
            score.program().structural_hash()
        );
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC{0,60}") {
        let _ = parse_mask(&text, &names());
        let _ = parse_score(&text, &names());
    }

    #[test]
    fn no_soup_of_words_makes_the_parser_panic(
        words in prop::collection::vec(
            prop::sample::select(vec![
                "q", "kv", "score", "doc", "bias", "[", "]", "(", ")", "+", "-", "if", "else",
                "{", "}", "let", "=", ";", "then", "1", "2.5", ".", "abs", "as", "f32", "&&",
                "causal", "!", ",", "softcap", "min", "<", "==", "window",
            ]),
            0..25,
        ),
    ) {
        let text = words.join(" ");
        let _ = parse_mask(&text, &names());
        let _ = parse_score(&text, &names());
    }
}

#[test]
fn shared_parts_are_printed_once() {
    let mut e = expr::score();
    for _ in 0..64 {
        e = &e * &e;
    }
    let score = ScoreMod::new(e.dynamic()).unwrap();
    let (text, names) = score.program().text();
    assert!(text.len() < 4000, "{}", text.len());
    assert_eq!(parse_score(&text, &names).unwrap(), score);
}
