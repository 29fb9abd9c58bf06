//! The macros write what one would write by hand with the tracing API.

use foveate_mods::expr::{self, Expr, scalar};
use foveate_mods::{
    Buffer, Leaf, MaskMod, ModErrorKind, Node, Program, ScalarValue, ScoreMod, closure, mask_mod,
    score_mod,
};

/// Nodes, names of buffers and values of scalars: all of a mod but the buffers' addresses.
fn say(program: &Program) -> (Vec<Node>, Vec<String>, Vec<(String, ScalarValue)>) {
    let graph = program.graph();
    (
        graph.nodes().to_vec(),
        graph.buffers().iter().map(|b| b.name().to_owned()).collect(),
        graph.scalars().iter().map(|s| (s.name.clone(), s.value)).collect(),
    )
}

#[track_caller]
fn same_mask(made: &MaskMod, by_hand: Expr<bool>) {
    let by_hand = MaskMod::new(by_hand.dynamic()).expect("a mask");
    assert_eq!(say(made.program()), say(by_hand.program()));
}

#[track_caller]
fn same_score(made: &ScoreMod, by_hand: Expr<f32>) {
    let by_hand = ScoreMod::new(by_hand.dynamic()).expect("a score");
    assert_eq!(say(made.program()), say(by_hand.program()));
}

fn q() -> Expr<i32> {
    expr::q()
}

fn kv() -> Expr<i32> {
    expr::kv()
}

fn s() -> Expr<f32> {
    expr::score()
}

#[mask_mod]
fn causal(q: i32, kv: i32) -> bool {
    q >= kv
}

#[mask_mod]
fn same_document(q: i32, kv: i32, doc: &Buffer<i32>) -> bool {
    doc[q] == doc[kv]
}

/// Captures may stand anywhere; coordinates in any order.
#[mask_mod]
pub fn near(kv: i32, window: i32, q: i32, #[constant] step: i32) -> bool {
    q - kv < window && (q - kv) % step == 0
}

#[score_mod]
fn soft_cap(score: f32, cap: f32) -> f32 {
    cap * (score / cap).tanh()
}

#[score_mod]
fn biased(score: f32, h: i32, q: i32, kv: i32, bias: &Buffer<f32>) -> f32 {
    score + bias[h][q - kv]
}

#[test]
fn a_function_loses_its_coordinates_and_keeps_its_captures() {
    same_mask(&causal(), q().ge(kv()));
    let doc = Buffer::vector("doc", vec![0, 0, 1]);
    same_mask(&same_document(&doc), doc.at([q()]).eq(doc.at([kv()])));
}

#[test]
fn numbers_are_run_time_scalars_unless_marked_constant() {
    let made = near(256, 2);
    let d = q() - kv();
    same_mask(&made, d.lt(scalar("window", 256)) & (d % 2).eq(0));
    assert_eq!(say(made.program()).0, say(near(64, 2).program()).0);
    assert_ne!(say(made.program()).0, say(near(256, 3).program()).0);
}

#[test]
fn a_score_reads_scalars_and_buffers_of_any_rank() {
    let cap = scalar("cap", 30.0);
    same_score(&soft_cap(30.0), &cap * (s() / &cap).tanh());
    let bias = Buffer::learned("bias", &[2, 3], vec![0.0; 6]).unwrap();
    let by_hand = s() + bias.at([expr::h(), q() - kv()]);
    same_score(&biased(&bias), by_hand.clone());
    same_score(&closure::score_mod!(|score, h, q, kv| score + bias[[h, q - kv]]), by_hand.clone());
    same_score(&closure::score_mod!(|score, h, q, kv| score + bias[(h, q - kv)]), by_hand);
}

#[test]
fn if_else_let_blocks_and_shadowing_read_as_in_rust() {
    let made = closure::score_mod!(|score, q, kv| {
        let d = (q - kv).abs();
        let d: f32 = if d > 8 {
            let d = d / 2;
            d as f32
        } else if q == kv {
            0
        } else {
            -1.5
        };
        score - d * 2
    });
    let d = (q() - kv()).abs();
    let inner = q().eq(kv()).select(0.0, -1.5);
    let d = d.gt(8).select((d / 2).to_f32(), inner);
    same_score(&made, s() - d * 2.0);
}

#[test]
fn every_operator_has_its_operation() {
    let made = closure::mask_mod!(|b, h, h_kv, q, kv, q_len, kv_len| {
        let a = q + b * 2 - kv / 3 % 5;
        let c = !(a < h) ^ (a <= h_kv) | (a > q_len) & (a >= kv_len);
        c && (a == 7 || a != -q) || true
    });
    use foveate_mods::expr::{b, h, h_kv, kv_len, q_len};
    let a = q() + b() * 2 - kv() / 3 % 5;
    let c = (!a.lt(h()) ^ a.le(h_kv())) | (a.gt(q_len()) & a.ge(kv_len()));
    same_mask(&made, (c & (a.eq(7) | a.ne(-q()))) | Expr::from(true));
}

#[test]
fn functions_and_methods_are_the_same_operations() {
    let by_function = closure::score_mod!(|score, q, kv| {
        select(q < kv, powf(abs(score), 1.5), min(exp(score), clamp(tanh(score), -0.5, 0.5)))
            + max(q, kv) as f32
            + score.powi(2).sqrt().ln().sigmoid()
    });
    let by_method = closure::score_mod!(|score, q, kv| {
        (q < kv).select(score.abs().powf(1.5), score.exp().min(score.tanh().clamp(-0.5, 0.5)))
            + q.max(kv) as f32
            + sigmoid(log(sqrt(pow(score, 2))))
    });
    assert_eq!(say(by_function.program()), say(by_method.program()));
    let clamped = s().tanh().max(-0.5).min(0.5);
    let by_hand = q().lt(kv()).select(s().abs().pow(1.5), s().exp().min(clamped))
        + q().max(kv()).to_f32()
        + s().pow(2.0).sqrt().log().sigmoid();
    same_score(&by_function, by_hand);
}

#[test]
fn constants_are_named_by_path_or_marked() {
    const SINKS: i32 = 4;
    let window = 16;
    let made = closure::mask_mod!(|q, kv| {
        kv < SINKS || q - kv < constant(window) && kv != i32::MAX && kv > -2147483648
    });
    let by_hand = kv().lt(4) | (((q() - kv()).lt(16) & kv().ne(i32::MAX)) & kv().gt(i32::MIN));
    same_mask(&made, by_hand);
    assert!(made.program().graph().scalars().is_empty());
}

#[test]
fn fields_are_captured_under_their_name() {
    struct Layer {
        window: i32,
        doc: Buffer<i32>,
    }
    impl Layer {
        #[mask_mod]
        fn mask(&self, q: i32, kv: i32) -> bool {
            q - kv < self.window && self.doc[q] == self.doc[kv]
        }
    }
    let layer = Layer { window: 5, doc: Buffer::vector("doc", vec![1]) };
    let doc = &layer.doc;
    let by_hand = (q() - kv()).lt(scalar("window", 5)) & doc.at([q()]).eq(doc.at([kv()]));
    same_mask(&layer.mask(), by_hand);
}

#[test]
fn a_scalar_can_be_given_another_name() {
    let windows = [8, 16];
    let made = closure::mask_mod!(|q, kv| q - kv < scalar("near", windows[1]));
    same_mask(&made, (q() - kv()).lt(scalar("near", 16)));
}

#[test]
fn mods_call_mods_in_every_form() {
    let doc = Buffer::vector("doc", vec![0, 0, 1]);
    let by_hand = q().ge(kv()) & doc.at([q()]).eq(doc.at([kv()]));

    let document = same_document(&doc);
    let variable = closure::mask_mod!(|q, kv| causal(q, kv) && document(q, kv));
    same_mask(&variable, by_hand.clone());

    let borrowed = &document;
    same_mask(&closure::mask_mod!(|q, kv| q >= kv && borrowed(q, kv)), by_hand.clone());

    let made_here = closure::mask_mod!(|q, kv| causal()(q, kv) && same_document(&doc)(q, kv));
    same_mask(&made_here, by_hand.clone());

    #[mask_mod]
    fn both(q: i32, kv: i32, doc: &Buffer<i32>, first: &MaskMod) -> bool {
        first(q, kv) && same_document(doc)(q, kv)
    }
    same_mask(&both(&doc, &causal()), by_hand.clone());

    let inline =
        closure::mask_mod!(|q, kv| closure::mask_mod!(|q, kv| q >= kv)(q, kv) && document());
    same_mask(&inline, by_hand);
}

#[test]
fn a_called_mod_sees_the_coordinates_it_is_given() {
    let causal = causal();
    same_mask(&closure::mask_mod!(|q, kv| causal(kv, q + 1)), kv().ge(q() + 1));
    let at_head = closure::mask_mod!(|h, q| q > h);
    let shifted = closure::mask_mod!(|b, h, q, kv| at_head(b, h + 1, q, kv));
    same_mask(&shifted, q().gt(expr::h() + 1));

    let cap = soft_cap(5.0);
    let c = scalar("cap", 5.0);
    let twice = closure::score_mod!(|score, q, kv| cap(cap(score), q, kv) * 2);
    let once = &c * (s() / &c).tanh();
    same_score(&twice, &c * (once / &c).tanh() * 2.0);
}

#[test]
fn functions_and_closures_over_expressions_are_called_too() {
    fn distance(x: Expr<i32>, y: Expr<i32>) -> Expr<i32> {
        (x - y).abs()
    }
    let within = |x: Expr<i32>, n: Expr<i32>| x.le(n);
    let made = closure::mask_mod!(|q, kv| within(distance(q, kv), 3));
    same_mask(&made, (q() - kv()).abs().le(3));

    let nested = closure::mask_mod!(|q, kv| {
        let limit = 3;
        let near = |x: i32, y: i32| (x - y).abs() <= limit;
        near(q, kv) || near(kv, 0)
    });
    same_mask(&nested, (q() - kv()).abs().le(3) | (kv() - 0).abs().le(3));
}

#[test]
fn closures_that_return_mods_nest_and_leave_nothing_borrowed() {
    // The shape of TorchTitan #1005: a mask made by a closure that is made inside a function.
    fn document_then(doc: &Buffer<i32>) -> impl Fn(i32) -> MaskMod + use<> {
        let same = same_document(doc);
        move |window| {
            let near = closure::mask_mod!(|q, kv| q - kv < window);
            let same = same.clone();
            closure::mask_mod!(|q, kv| same(q, kv) && near(q, kv))
        }
    }
    let make = {
        let doc = Buffer::vector("doc", vec![0, 1, 1]);
        document_then(&doc)
    };
    let doc = Buffer::vector("doc", vec![0, 1, 1]);
    for window in [1, 2] {
        let near = (q() - kv()).lt(scalar("window", window));
        same_mask(&make(window), doc.at([q()]).eq(doc.at([kv()])) & near);
    }
}

#[test]
fn mods_are_built_in_loops() {
    let mut any = closure::mask_mod!(|q, kv| q == kv);
    for start in [10, 20, 30] {
        any =
            closure::mask_mod!(|q, kv| any(q, kv) || q >= constant(start) && kv == constant(start));
    }
    let mut by_hand = q().eq(kv());
    for start in [10, 20, 30] {
        by_hand = by_hand | (q().ge(start) & kv().eq(start));
    }
    same_mask(&any, by_hand);

    let layers: Vec<MaskMod> =
        (0..3).map(|i| closure::mask_mod!(|q, kv| (q - kv) % constant(i + 1) == 0)).collect();
    let all = closure::mask_mod!(|q, kv| layers[1](q, kv) && layers[2](q, kv));
    let d = || q() - kv();
    same_mask(&all, (d() % 2).eq(0) & (d() % 3).eq(0));
}

#[test]
fn unused_coordinates_are_no_warning_and_no_leaf() {
    #![deny(warnings)]
    let made = closure::mask_mod!(|b, h, q, kv| q >= kv);
    assert!(!made.program().uses(Leaf::B) && !made.program().uses(Leaf::H));
}

#[test]
fn a_body_that_is_no_mod_makes_one_that_says_why_and_where() {
    let table = Buffer::new("table", &[2, 2], vec![0; 4]).unwrap();
    let line = line!() + 1;
    let short = closure::mask_mod!(|q, kv| q >= kv && table[q] == 0);
    let error = short.check().unwrap_err();
    assert!(matches!(error.kind(), ModErrorKind::Rank { rank: 2, given: 1, .. }), "{error:?}");
    let place = error.place().expect("a macro knows its place");
    assert_eq!((place.file(), place.line()), (file!(), line));
    let text = format!("buffer `table` has 2 axes but was given 1 index, in the mod at {place}");
    assert_eq!(error.to_string(), text);

    let score = s() * 2.0;
    let reads = closure::mask_mod!(|q, kv| q >= kv && score > 0);
    let told = reads.check().unwrap_err().to_string();
    assert!(told.starts_with("a mask cannot read the score, in the mod at "), "{told}");

    let wide = same_document(&Buffer::new("doc", &[1, 3], vec![0; 3]).unwrap());
    let inner = wide.check().unwrap_err();
    let doc = Buffer::new("bias", &[3], vec![0.5; 3]).unwrap();
    assert_eq!(biased(&doc).then(&soft_cap(3.0)).check(), biased(&doc).check());
    assert!(biased(&doc).check().is_err() && biased(&doc).gradient().is_err());
    // What is made of it holds the same error, and the place stays that of the body at fault.
    for joined in [
        causal() & wide.clone(),
        !wide.clone() | causal(),
        wide.clone() ^ short,
        closure::mask_mod!(|q, kv| causal()(q, kv) && wide(q, kv)),
    ] {
        assert_eq!(joined.check().unwrap_err(), inner);
        assert_eq!(MaskMod::new(joined.expr().dynamic()).unwrap_err(), inner);
        assert!(joined.map(|program| program.set_scalar("n", ScalarValue::I32(1))).is_err());
        assert_ne!(joined, closure::mask_mod!(|q| false));
    }
}

#[test]
fn the_crate_can_be_named() {
    use foveate_mods as renamed;
    #[mask_mod(crate = renamed)]
    fn anti_causal(q: i32, kv: i32) -> bool {
        q <= kv
    }
    same_mask(&anti_causal(), q().le(kv()));
}

#[test]
fn a_macro_of_the_closures_name_can_be_imported_beside_the_attribute() {
    use foveate_mods::closure::mask_mod;
    same_mask(&mask_mod!(|q, kv| q > kv), q().gt(kv()));
    same_mask(&causal(), q().ge(kv()));
}

#[test]
fn a_closure_indexes_with_commas_as_the_text_form_does() {
    let bias = Buffer::new("bias", &[2, 3], vec![0.5f32; 6]).unwrap();
    let pairs = closure::score_mod!(|score, h, q| score + bias[[h, q]]);
    let commas = closure::score_mod!(|score, h, q| score + bias[h, q]);
    assert_eq!(commas, pairs);
}
