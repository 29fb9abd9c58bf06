//! Masks that let no query see any key, of a whole problem.

use std::ops::ControlFlow::{Break, Continue};
use std::time::{Duration, Instant};

use foveate_mods::{Head, MaskMod};

use crate::{BlockMask, Kind, Tile, Varies};

/// Heads and batch entries that are looked at, at most.
const MOST_MASKS: usize = 1 << 12;
/// Points of partial tiles that are looked at in one of them, at most: a second or so.
const MOST_POINTS: u64 = 1 << 30;
/// How long all of it may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether `mask` lets no query see any key: of `heads` `[batch entries, query heads, key/value heads]`
/// and `lens` `[queries, keys]`. The first live point that is found ends the search; a search that
/// would take more than about a second ends with false, as does a mask that cannot be evaluated on
/// the host.
pub fn sees_nothing(mask: &MaskMod, heads: [usize; 3], lens: [usize; 2]) -> bool {
    let began = Instant::now();
    let ([batch, heads, heads_kv], [q_len, kv_len]) = (heads, lens);
    let ([Ok(q_len_i32), Ok(kv_len_i32)], true) =
        (lens.map(i32::try_from), mask.check().is_ok() && batch * heads * heads_kv > 0)
    else {
        return false;
    };
    if mask.program().graph().buffers().iter().any(|buffer| buffer.is_on_device()) {
        return false;
    }
    let varies = Varies::of(mask);
    let of = |varies: bool, n: usize| if varies { n } else { 1 };
    let (batch, own_heads) = (of(varies.by_batch, batch), of(varies.by_head, heads));
    if batch.saturating_mul(own_heads) > MOST_MASKS {
        return false;
    }
    let tile = Tile { q: 128, kv: 128 };
    let blind = |b: usize, h: usize| {
        let h_kv = h / (heads / heads_kv).max(1);
        let [b, h, h_kv] = [b, h, h_kv].map(|n| n as i32);
        let head = Head { b, h, h_kv, q_len: q_len_i32, kv_len: kv_len_i32 };
        let mut watch = |_| if began.elapsed() > PATIENCE { Break(()) } else { Continue(()) };
        let built = BlockMask::build_watched(mask, head, q_len, kv_len, tile, &mut watch);
        built.is_some_and(|tiles| {
            let points = tiles.tiles_of(Kind::Partial) * u64::from(tile.q * tile.kv);
            tiles.out_of_range().is_none() && points <= MOST_POINTS && tiles.sees_nothing()
        })
    };
    (0..batch).all(|b| (0..own_heads).all(|h| blind(b, h)))
}
