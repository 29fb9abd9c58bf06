//! Keys that are out of reach: their weights are 0, whatever their products with the queries are.
//!
//! A score function may lower scores with the distance so far that most weights are 0 in f32, as
//! ALiBi does for half of its heads. How far is known before anything is multiplied: a raw score is
//! at most `scale·|q|·|k|`, interval arithmetic gives what the score function makes of that over a
//! rectangle of queries and keys, and where that is below the scores that the queries have seen by
//! more than the logarithm of the smallest float, the rectangle is left out. That changes no bit of
//! the results.
//!
//! NaN and infinity are not lost: a norm that is not finite, a score that may be NaN, and an index
//! that may be outside its axis have no bound.

use std::cmp::Reverse;
use std::ops::Range;

use foveate_mods::Bounds;
use foveate_mods::Head;

use crate::simd::NOTHING;

/// Keys that are looked at together, a divisor of most key tiles.
const STEP: usize = 64;

/// More than products and norms of rows are rounded by.
const ROUNDING: f32 = 1.001;

/// What bounds the scores of a head.
#[derive(Clone, Debug)]
pub struct Reach<'a> {
    bounds: &'a Bounds,
    head: Head,
}

impl<'a> Reach<'a> {
    /// For a head under the score function of `bounds`.
    pub fn new(bounds: &'a Bounds, head: Head) -> Self {
        Self { bounds, head }
    }

    /// What no score of `queries` and `keys` is above, where raw ones are at most `magnitude`.
    fn highest(&self, queries: &Range<usize>, keys: &Range<usize>, magnitude: f32) -> f32 {
        let [q, kv] = [queries, keys].map(|r| r.start as i32..r.end as i32);
        self.bounds.highest(&self.head, q, kv, ROUNDING * magnitude)
    }

    /// Sorts key tiles, those that may weigh most for `queries` first, so that the others are
    /// compared with them. Says whether any may be out of reach of queries that reach another; if
    /// not, nothing is moved.
    pub fn sort<T>(
        &self,
        queries: &Range<usize>,
        tiles: &mut [T],
        keys: impl Fn(&T) -> &Range<usize>,
    ) -> bool {
        let highest = |tile: &T| self.highest(queries, keys(tile), 0.0);
        let (mut least, mut most) = (f32::INFINITY, f32::NEG_INFINITY);
        for x in tiles.iter().map(highest) {
            (least, most) = (least.min(x), most.max(x));
        }
        let far = least - most <= NOTHING;
        if far {
            tiles.sort_by_cached_key(|tile| Reverse(order(highest(tile))));
        }
        far
    }

    /// The stretch of `keys` outside of which all weights of `queries`, which have seen a score of
    /// `seen` at least, are 0: counted from the first key, whole steps. `magnitude` is asked for
    /// where it matters.
    pub fn columns(
        &self,
        queries: &Range<usize>,
        keys: &Range<usize>,
        seen: f32,
        magnitude: impl Fn() -> f32,
    ) -> Range<usize> {
        let far = |keys: &Range<usize>| {
            let below = |magnitude| self.highest(queries, keys, magnitude) - seen <= NOTHING;
            below(0.0) && below(magnitude())
        };
        let mut steps = (0..keys.len()).step_by(STEP).map(|first| {
            let own = keys.start + first..keys.end.min(keys.start + first + STEP);
            (first, own)
        });
        let Some((first, _)) = steps.find(|(_, own)| !far(own)) else { return 0..0 };
        let last = steps.rev().find(|(_, own)| !far(own)).map_or(first, |(last, _)| last);
        first..keys.len().min(last + STEP)
    }
}

/// A number that is as much larger as `x` is, in the order of [`f32::total_cmp`].
fn order(x: f32) -> i32 {
    let bits = x.to_bits() as i32;
    if bits < 0 { bits ^ i32::MAX } else { bits }
}

/// The smallest of some scores; NaN when one is.
pub fn lowest(scores: impl Iterator<Item = f32>) -> f32 {
    scores.fold(f32::INFINITY, |low, x| if x < low || x.is_nan() { x } else { low })
}

#[cfg(test)]
mod tests {
    use foveate_mods::scores;

    use super::*;

    /// One key tile after the other, as `sort` leaves them.
    fn sorted(reach: &Reach<'_>, tiles: usize) -> Option<Vec<usize>> {
        let mut order: Vec<Range<usize>> = (0..tiles).map(|i| i * 128..(i + 1) * 128).collect();
        let far = reach.sort(&(512..640), &mut order, |keys| keys);
        far.then(|| order.iter().map(|keys| keys.start / 128).collect())
    }

    #[test]
    fn a_slope_leaves_the_keys_near_the_queries() {
        let alibi = Bounds::new(scores::alibi(8).unwrap().program());
        let head = |h| Head { h, q_len: 1024, kv_len: 1024, ..Head::default() };
        let steep = Reach::new(&alibi, head(0));
        // Scores of 8 at most beside one of 0, half a unit a key: 193 keys on either side.
        let columns = |keys, seen| steep.columns(&(512..640), &keys, seen, || 8.0);
        assert_eq!(columns(0..512, 0.0), 320..512);
        assert_eq!(columns(512..640, 0.0), 0..128);
        assert_eq!(columns(640..1024, 0.0), 0..192);
        assert_eq!(columns(0..256, 0.0), 0..0);
        // What may be seen, or is not a number, keeps all.
        assert_eq!(columns(0..512, f32::NEG_INFINITY), 0..512);
        assert_eq!(columns(0..512, f32::NAN), 0..512);
        for norm in [f32::INFINITY, f32::NAN] {
            assert_eq!(steep.columns(&(512..640), &(0..512), 0.0, || norm), 0..512);
        }
        assert_eq!(sorted(&steep, 8), Some(vec![4, 3, 5, 2, 6, 1, 7, 0]));
        assert_eq!(sorted(&Reach::new(&alibi, head(7)), 8), None);
    }

    #[test]
    fn a_bounded_score_leaves_every_key() {
        let capped = Bounds::new(scores::soft_cap(30.0).unwrap().program());
        let reach = Reach::new(&capped, Head::default());
        assert_eq!(sorted(&reach, 8), None);
        assert_eq!(reach.columns(&(0..128), &(0..512), 30.0, || 1e9), 0..512);
    }
}
