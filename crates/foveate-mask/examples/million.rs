//! Time and memory of block masks over 1,048,576 queries and keys, on one core:
//! `cargo run --release -p foveate-mask --example million`.

use std::time::Instant;

use foveate_mask::{BlockMask, Tile};
use foveate_mods::{Buffer, Head, MaskMod, ModError, expr};

fn main() -> Result<(), ModError> {
    let len: i32 = 1 << 20;
    let (q, kv) = (expr::q, expr::kv);
    let doc = Buffer::vector("doc", (0..len).map(|i| (i as f64 / 10_486.0) as i32).collect());
    let masks = [
        ("causal", q().ge(kv())),
        ("window 4096", q().ge(kv()) & (q() - kv()).lt(4096)),
        ("prefix 1000", q().ge(kv()) | kv().lt(1000)),
        ("100 documents", doc.at([q()]).eq(doc.at([kv()]))),
        ("causal in 100 documents", q().ge(kv()) & doc.at([q()]).eq(doc.at([kv()]))),
    ];
    println!("{:<26}{:>10}{:>12}{:>12}{:>14}", "mask", "ms", "runs", "kB", "transpose ms");
    for (name, expr) in masks {
        let mask = MaskMod::new(expr.dynamic())?;
        let start = Instant::now();
        let head = Head { q_len: len, kv_len: len, ..Default::default() };
        let tile = Tile { q: 128, kv: 128 };
        let built = BlockMask::build(&mask, head, len as usize, len as usize, tile);
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let stats = built.stats();
        let start = Instant::now();
        let turned = built.transpose();
        let transpose_ms = start.elapsed().as_secs_f64() * 1e3;
        assert_eq!(turned.stats().full, stats.full);
        let kb = stats.bytes / 1000;
        println!("{name:<26}{ms:>10.1}{:>12}{kb:>12}{transpose_ms:>14.1}", stats.runs);
    }
    Ok(())
}
