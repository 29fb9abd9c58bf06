use foveate_mods::{closure, mask_mod, masks};

#[mask_mod]
fn mixed(q: i32, h: i32) -> bool {
    q as f32 > h
}

#[mask_mod]
fn number(q: i32, kv: i32) -> bool {
    q - kv
}

fn main() {
    let len = vec![1].len();
    closure::mask_mod!(|q| q < len);
    let causal = masks::causal();
    closure::mask_mod!(|q, kv| causal && q > kv);
    closure::mask_mod!(|q| causal(q));
}
