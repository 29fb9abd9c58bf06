use foveate_mods::{closure, mask_mod, score_mod};

#[mask_mod]
fn returns(q: i32, kv: i32) -> bool {
    if q < kv {
        return false;
    }
    true
}

#[mask_mod]
fn loops(q: i32, kv: i32) -> bool {
    for i in 0..3 {}
    q == kv
}

#[mask_mod]
fn assigns(q: i32, kv: i32) -> bool {
    let x = q;
    x = kv;
    x > 0
}

#[score_mod]
fn no_else(score: f32, q: i32) -> f32 {
    if q > 3 { score }
}

#[mask_mod]
fn wrong_result(q: i32, kv: i32) -> f32 {
    q - kv
}

#[mask_mod]
fn wrong_coordinate(q: usize, kv: i32) -> bool {
    q > kv
}

#[mask_mod]
fn reads_score(score: f32) -> bool {
    score > 0.0
}

#[score_mod]
fn unknown_method(score: f32) -> f32 {
    score.tan()
}

#[mask_mod]
fn wide(q: i32, kv: i32) -> bool {
    q as i64 > 0
}

#[mask_mod]
fn text(q: i32) -> bool {
    q == "a"
}

#[mask_mod]
fn misspelt(q: i32, k: i32) -> bool {
    q >= k
}

#[mask_mod]
fn a_scalar_by_intent(q: i32, #[scalar] k: i32) -> bool {
    q >= k
}

fn main() {
    closure::mask_mod!(|query, kv| query >= kv);
    closure::mask_mod!(|q, kv| match q {
        0 => true,
        _ => q > kv,
    });
    closure::mask_mod!(|q, kv| { q > kv; });
}
