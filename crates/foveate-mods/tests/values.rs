//! Mods are values: built, compared, rebound and combined like any other.

#![expect(clippy::erasing_op, reason = "a product with 0 that must not fold away is the point")]

use foveate_mods::{
    Buffer, Expr, Leaf, MaskMod, ModErrorKind, Point, Program, ScalarValue, ScoreMod, expr,
};

fn mask(e: Expr<bool>) -> MaskMod {
    MaskMod::new(e.dynamic()).unwrap()
}

fn score(e: Expr<f32>) -> ScoreMod {
    ScoreMod::new(e.dynamic()).unwrap()
}

fn at(mask: &MaskMod, q: i32, kv: i32) -> bool {
    let point = Point { q, kv, ..Default::default() };
    mask.program().eval(&point).unwrap()[0] == ScalarValue::Bool(true)
}

#[test]
fn what_is_said_differently_is_one_mod() {
    let (q, kv) = (expr::q, expr::kv);
    let causal = mask(q().ge(kv()));
    for same in [
        mask(kv().le(q())),
        mask(!q().lt(kv())),
        mask(q().ge(kv()) & q().ge(kv())),
        mask((q() + 0).ge(kv() * 1) | false),
        mask(q().ge(kv()).select(true, false)),
        mask(q().ge(kv()) & Expr::from(3).lt(4)),
        mask((q() * 0 + 1).select_like(q().ge(kv()))),
    ] {
        assert_eq!(same, causal);
        assert_eq!(same.program().structural_hash(), causal.program().structural_hash());
    }
    let (a, b) = (q().lt(10), kv().lt(20));
    assert_eq!(mask(a.clone() & b.clone()), mask(b & a));
    assert_ne!(causal, mask(q().gt(kv())));
}

/// `if self == 1 { e } else { false }`, which folds away for a constant 1.
trait SelectLike {
    fn select_like(self, e: Expr<bool>) -> Expr<bool>;
}

impl SelectLike for Expr<i32> {
    fn select_like(self, e: Expr<bool>) -> Expr<bool> {
        self.eq(1).select(e, false)
    }
}

#[test]
fn the_structural_hash_is_the_same_in_every_process() {
    let doc = Buffer::vector("doc", vec![1, 2, 3]);
    let e = expr::q().ge(expr::kv()) & doc.at([expr::q()]).eq(doc.at([expr::kv()]));
    assert_eq!(mask(e).program().structural_hash(), PINNED);
}

/// Compile caches survive as long as this stays; a change of the IR changes it on purpose.
const PINNED: u64 = 15_841_060_897_244_200_460;

#[test]
fn names_and_contents_are_not_structure_but_take_part_in_equality() {
    let of = |name: &str, ids: Vec<i32>| {
        let doc = Buffer::vector(name, ids);
        mask(doc.at([expr::q()]).eq(doc.at([expr::kv()])))
    };
    let (a, renamed, other) = (of("doc", vec![0, 1]), of("ids", vec![0, 1]), of("doc", vec![0, 2]));
    assert_eq!(a, renamed);
    assert_ne!(a, other);
    assert!(a.program().same_structure(other.program()));
    let of = |window: i32| mask((expr::q() - expr::kv()).lt(expr::scalar("window", window)));
    assert_ne!(of(4), of(5));
    assert_eq!(of(4).program().structural_hash(), of(5).program().structural_hash());
    let constant = |window: i32| mask((expr::q() - expr::kv()).lt(window));
    assert_ne!(constant(4).program().structural_hash(), constant(5).program().structural_hash());
}

#[test]
fn mods_are_built_in_loops_and_returned_from_closures() {
    let window = |n: i32| move |e: Expr<bool>| e & (expr::q() - expr::kv()).lt(n);
    let nested = [7, 5, 9].into_iter().fold(expr::q().ge(expr::kv()), |e, n| window(n)(e));
    let mask = mask(nested);
    assert!(at(&mask, 10, 6) && !at(&mask, 10, 5) && !at(&mask, 3, 4));
    let joined = (0..4).fold(!mask.clone(), |m, i| m | self::mask(expr::kv().eq(i)));
    assert!(at(&joined, 3, 4) && at(&joined, 3, 3) && !at(&joined, 10, 6));
}

#[test]
fn a_chain_of_a_hundred_thousand_steps_is_built_evaluated_and_dropped() {
    let mut e = expr::score();
    for _ in 0..100_000 {
        e = e + expr::q().to_f32();
    }
    let score = score(e);
    let point = Point { q: 1, score: 5.0, ..Default::default() };
    assert_eq!(score.program().eval(&point).unwrap()[0], ScalarValue::F32(100_005.0));
    assert_eq!(score.clone(), score);
    score.gradient().unwrap();
}

#[test]
fn scores_follow_one_another_and_masks_are_shifted() {
    let first = score(expr::score() * 2.0);
    let second = score(expr::score() + 1.0);
    let point = Point { score: 3.0, ..Default::default() };
    let value = |s: &ScoreMod| s.program().eval(&point).unwrap()[0];
    assert_eq!(value(&first.then(&second)), ScalarValue::F32(7.0));
    assert_eq!(value(&second.then(&first)), ScalarValue::F32(8.0));
    let causal = mask(expr::q().ge(expr::kv()));
    let shifted = causal.at(&|leaf| match leaf {
        Leaf::Q => (expr::q() + 4).dynamic().clone(),
        leaf => foveate_mods::DynExpr::leaf(leaf),
    });
    assert!(at(&mask(shifted.clone()), 0, 4) && !at(&mask(shifted), 0, 5));
}

#[test]
fn a_binding_must_fit_its_slot() {
    let doc = Buffer::vector("doc", vec![0, 0, 1]);
    let program = mask(doc.at([expr::q()]).eq(doc.at([expr::kv()]))).program().clone();
    let rebound = program.rebind(Buffer::vector("doc", vec![5, 6, 7]).any()).unwrap();
    let point = Point { q: 0, kv: 1, ..Default::default() };
    assert_eq!(program.eval(&point).unwrap()[0], ScalarValue::Bool(true));
    assert_eq!(rebound.eval(&point).unwrap()[0], ScalarValue::Bool(false));
    let told = |buffer: &foveate_mods::AnyBuffer| program.rebind(buffer).unwrap_err().to_string();
    assert_eq!(
        told(Buffer::vector("docs", vec![0]).any()),
        "`docs` cannot be bound: the captured buffers are [\"doc\"]"
    );
    assert_eq!(
        told(Buffer::vector("doc", vec![0.5]).any()),
        "`doc` cannot be bound: the slot holds i32 with 1 axis, not f32 with 1 axis"
    );
    let bias = Buffer::learned("bias", &[2], vec![0.0; 2]).unwrap();
    let learned = score(expr::score() + bias.at([expr::h()]));
    let fixed = Buffer::new("bias", &[2], vec![0.0f32; 2]).unwrap();
    assert!(learned.program().rebind(fixed.any()).is_err(), "a gradient would be lost");
    let window = mask((expr::q() - expr::kv()).lt(expr::scalar("window", 4)));
    let wider = window.map(|p| p.set_scalar("window", ScalarValue::I32(9))).unwrap();
    assert!(!at(&window, 8, 2) && at(&wider, 8, 2));
    assert!(window.program().set_scalar("window", ScalarValue::F32(9.0)).is_err());
    assert!(window.program().set_scalar("widow", ScalarValue::I32(9)).is_err());
}

#[test]
fn what_a_buffer_holds_is_one_constant_where_it_is_said_to_be() {
    let doc = Buffer::<i32>::on_device("doc", &[9]).unwrap();
    let flag = Buffer::vector("flag", vec![true, false]);
    let scalar = expr::scalar("window", 4);
    let same = doc.at([expr::q()]).eq(doc.at([expr::kv()]));
    let near = (expr::q() - expr::kv()).lt(scalar) & flag.at([expr::h()]);
    let program = mask(same & near).program().clone();
    let known =
        program.with_constants(|b| (b.name() == "doc").then_some(ScalarValue::I32(i32::MAX)));
    let names = |p: &Program| p.graph().buffers().iter().map(|b| b.name().to_owned()).collect();
    let (before, after): (Vec<_>, Vec<_>) = (names(&program), names(&known));
    assert_eq!((before.len(), after), (2, vec!["flag".to_owned()]));
    for (q, kv, h, seen) in [(8, 5, 0, true), (8, 4, 0, false), (8, 5, 1, false)] {
        let point = Point { q, kv, h, ..Default::default() };
        assert_eq!(known.eval(&point).unwrap()[0], ScalarValue::Bool(seen), "{point:?}");
    }
    let wider = known.set_scalar("window", ScalarValue::I32(5)).unwrap();
    let point = Point { q: 8, kv: 4, ..Default::default() };
    assert_eq!(wider.eval(&point).unwrap()[0], ScalarValue::Bool(true));
}

#[test]
fn roots_and_buffers_are_checked_when_they_are_made() {
    assert!(MaskMod::new(expr::q().dynamic()).is_err());
    assert!(MaskMod::new(expr::score().gt(0.0).dynamic()).is_err());
    assert!(ScoreMod::new(expr::q().dynamic()).is_err());
    let short = Buffer::new("bias", &[2, 3], vec![0.0f32; 5]).unwrap_err();
    assert_eq!(short.to_string(), "buffer `bias` of shape [2, 3] cannot hold 5 elements");
    assert!(matches!(short.kind(), ModErrorKind::BufferShape { elems: 5, .. }));
}

#[test]
fn half_precision_buffers_are_widened() {
    let halves = [1.5f32, -0.25].map(half::f16::from_f32);
    let brains = [1.5f32, -0.25].map(half::bf16::from_f32);
    let (a, b) = (Buffer::from_f16("x", &[2], &halves), Buffer::from_bf16("x", &[2], &brains));
    let read = |buffer: Buffer<f32>| {
        let program = Program::build(&[buffer.at([1.into()]).dynamic().clone()]);
        program.eval(&Point::default()).unwrap()[0]
    };
    assert_eq!(read(a.unwrap()), ScalarValue::F32(-0.25));
    assert_eq!(read(b.unwrap()), ScalarValue::F32(-0.25));
}

#[test]
fn integer_division_rounds_down_and_never_traps() {
    let value = |e: Expr<i32>| {
        Program::build(&[e.dynamic().clone()]).eval(&Point { q: -7, ..Default::default() }).unwrap()
            [0]
    };
    let q = expr::q;
    assert_eq!(value(q() / 2), ScalarValue::I32(-4));
    assert_eq!(value(q() % 2), ScalarValue::I32(1));
    assert_eq!(value(q() / -2), ScalarValue::I32(3));
    assert_eq!(value(q() % -2), ScalarValue::I32(1));
    assert_eq!(value(q() / (q() - q())), ScalarValue::I32(0));
    assert_eq!(value(q() % (q() + 7)), ScalarValue::I32(0));
    assert_eq!(value((q() * 0 + i32::MIN) / (q() + 6)), ScalarValue::I32(i32::MIN));
}

#[test]
fn buffers_in_device_memory_read_as_zeros_on_the_host_and_equal_only_themselves() {
    let doc = Buffer::<i32>::on_device("doc", &[5]).unwrap();
    let reads = |doc: &Buffer<i32>| mask(doc.at([expr::q()]).eq(0));
    assert!(doc.any().is_on_device() && doc.any().elems() == 5 && at(&reads(&doc), 2, 0));
    assert!(!Buffer::vector("doc", vec![0; 5]).any().is_on_device());
    let other = Buffer::<i32>::on_device("doc", &[5]).unwrap();
    assert!(reads(&doc) == reads(&doc) && reads(&doc) != reads(&other));
    let rebound = reads(&doc).program().rebind(other.any()).unwrap();
    assert!(rebound.same_structure(reads(&doc).program()));
    let empty = Buffer::<i32>::on_device("doc", &[0]).unwrap();
    assert!(!empty.any().is_on_device(), "there is nothing to be anywhere");
    let said = |shape: &[usize]| Buffer::<i32>::on_device("doc", shape).unwrap_err().to_string();
    assert_eq!(said(&[]), "buffer `doc` has no axis; give its shape one length or more");
    let many = said(&[usize::MAX, 2]);
    assert!(many.ends_with(", 2] has more elements than can be counted"), "{many}");
}
