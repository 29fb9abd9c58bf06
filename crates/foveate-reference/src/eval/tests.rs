//! Every operation's value and derivative, beside those that backends compute.

use foveate_mods::fuzz::every_operation;
use foveate_mods::ir::{Leaf, Node};
use foveate_mods::{Head, Point as At, ScalarValue, ScoreMod, Type, expr};

use super::*;

const HEAD: Head = Head { b: 0, h: 0, h_kv: 0, q_len: 5, kv_len: 6 };

fn close(x: f64, y: f64) -> bool {
    (x - y).abs() <= 2e-5 * (1.0 + x.abs())
}

#[test]
fn every_operation_has_the_value_and_the_derivative_that_backends_compute() {
    for operation in every_operation(&expr::score()) {
        let name = &operation.name;
        let score = ScoreMod::new(&operation.value.clone().cast(Type::F32)).expect("an f32");
        let program = score.program();
        let gradient = score.gradient();
        let is_score = |node: &Node| *node == Node::Leaf(Leaf::Score);
        // A bool or an integer in between has no derivative, which only the planner refuses.
        let smooth = operation.operands == Type::F32 && operation.value.ty() == Type::F32;
        let seed = program.graph().nodes().iter().position(is_score).filter(|_| smooth);
        let mut values = Vec::new();
        for (q, kv) in (0..5).flat_map(|q| (0..6).map(move |kv| (q, kv))) {
            let at = At { score: (q * 6 + kv + 1) as f32 / 32.0, ..HEAD.at(q, kv) };
            let At { b, h, h_kv, q_len, kv_len, .. } = at;
            let point = Point { b, h, h_kv, q, kv, q_len, kv_len, score: f64::from(at.score) };
            let of = |program: &Program| match program.eval(&at).expect("it reads nothing")[0] {
                ScalarValue::F32(value) => f64::from(value),
                other => panic!("{name}: {other:?} is no f32"),
            };
            eval(program, &point, None, &mut values).expect("no tangent, no refusal");
            let (value, _) = values[program.roots()[0].index()].real();
            assert!(close(value, of(program)), "{name} at {q}, {kv}: {value}, {}", of(program));
            let told = eval(program, &point, seed, &mut values);
            if !smooth {
                continue;
            }
            assert_eq!(told.is_ok(), gradient.is_ok(), "{name}: {told:?}, {gradient:?}");
            if let Ok(gradient) = &gradient {
                let (_, slope) = values[program.roots()[0].index()].real();
                let found = of(gradient.program());
                assert!(close(slope, found), "{name} at {q}, {kv}: slope {slope}, {found}");
            }
        }
    }
}
