//! The macros in a crate that depends on `foveate` and not on the crates behind it.

use foveate::{Buffer, MaskMod, ScoreMod, closure, mask_mod, masks, score_mod, scores};

#[mask_mod]
fn same_document(q: i32, kv: i32, doc: &Buffer<i32>) -> bool {
    doc[q] == doc[kv]
}

#[score_mod]
fn capped(score: f32, cap: f32) -> f32 {
    cap * (score / cap).tanh()
}

#[test]
fn a_crate_that_knows_foveate_only_can_write_mods() {
    let doc = Buffer::vector("doc", vec![0, 0, 1]);
    let mask: MaskMod = same_document(&doc);
    assert_eq!(mask, masks::document(&doc).expect("the ids have one axis"));
    assert_eq!(mask, closure::mask_mod!(|q, kv| doc[q] == doc[kv]));
    let score: ScoreMod = capped(30.0);
    assert_eq!(score, scores::soft_cap(30.0).expect("the cap is positive"));
    let cap = 30.0f32;
    assert_eq!(score, closure::score_mod!(|score| cap * (score / cap).tanh()));
}
