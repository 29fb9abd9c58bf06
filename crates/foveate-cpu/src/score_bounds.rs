//! Bounds on scores, which find the keys whose weights are 0 before anything is multiplied.
//!
//! A score function may lower scores with the distance so far that most weights are 0 in f32, as
//! ALiBi does for half of its heads. A raw score is at most `scale·|q|·|k|`. Interval arithmetic
//! bounds the score function of that over a rectangle of queries and keys. Where the bound is below
//! the row maxima by more than the logarithm of the smallest float ([`ZERO_WEIGHT`]), the rectangle
//! is skipped. That changes no bit of the results.
//!
//! NaN and infinity are not lost: a non-finite norm, a score that may be NaN, and an index that may
//! be outside its axis have no bound.

use std::cmp::Reverse;
use std::ops::Range;

use foveate_mods::Bounds;
use foveate_mods::Head;

use crate::simd::ZERO_WEIGHT;

/// Keys that are bounded together, a divisor of most key tiles.
const STEP: usize = 64;

/// An upper bound on the rounding of products and norms.
const ROUNDING: f32 = 1.001;

/// The bounds of a head's scores.
#[derive(Clone, Debug)]
pub struct ScoreBounds<'a> {
    bounds: &'a Bounds,
    head: Head,
}

impl<'a> ScoreBounds<'a> {
    /// For a head under the score function of `bounds`.
    pub fn new(bounds: &'a Bounds, head: Head) -> Self {
        Self { bounds, head }
    }

    /// An upper bound on the scores of `queries` and `keys`, whose raw scores are at most
    /// `magnitude`.
    fn highest(&self, queries: &Range<usize>, keys: &Range<usize>, magnitude: f32) -> f32 {
        let [q, kv] = [queries, keys].map(|r| r.start as i32..r.end as i32);
        self.bounds.highest(&self.head, q, kv, ROUNDING * magnitude)
    }

    /// Sorts key tiles by their bound, highest first, so that the row maxima rise early. Returns
    /// whether the bounds differ by enough to skip a tile; if not, the order stays.
    pub fn sort_tiles<T>(
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
        let far = least - most <= ZERO_WEIGHT;
        if far {
            tiles.sort_by_cached_key(|tile| Reverse(order(highest(tile))));
        }
        far
    }

    /// The range of `keys` outside of which all weights of `queries`, whose row maxima are at least
    /// `row_max`, are 0: counted from the first key, whole steps. `magnitude` is called only where
    /// the raw scores matter.
    pub fn nonzero_columns(
        &self,
        queries: &Range<usize>,
        keys: &Range<usize>,
        row_max: f32,
        magnitude: impl Fn() -> f32,
    ) -> Range<usize> {
        let far = |keys: &Range<usize>| {
            let below = |magnitude| self.highest(queries, keys, magnitude) - row_max <= ZERO_WEIGHT;
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

/// An integer that orders as `x` does under [`f32::total_cmp`].
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

    /// The order in which `sort_tiles` leaves key tiles.
    fn sorted(bounds: &ScoreBounds<'_>, tiles: usize) -> Option<Vec<usize>> {
        let mut order: Vec<Range<usize>> = (0..tiles).map(|i| i * 128..(i + 1) * 128).collect();
        let far = bounds.sort_tiles(&(512..640), &mut order, |keys| keys);
        far.then(|| order.iter().map(|keys| keys.start / 128).collect())
    }

    #[test]
    fn a_slope_leaves_the_keys_near_the_queries() {
        let alibi = Bounds::new(scores::alibi(8).unwrap().program());
        let head = |h| Head { h, q_len: 1024, kv_len: 1024, ..Head::default() };
        let steep = ScoreBounds::new(&alibi, head(0));
        // Scores of 8 at most beside one of 0, half a unit a key: 193 keys on either side.
        let columns = |keys, seen| steep.nonzero_columns(&(512..640), &keys, seen, || 8.0);
        assert_eq!(columns(0..512, 0.0), 320..512);
        assert_eq!(columns(512..640, 0.0), 0..128);
        assert_eq!(columns(640..1024, 0.0), 0..192);
        assert_eq!(columns(0..256, 0.0), 0..0);
        // What may be seen, or is not a number, keeps all.
        assert_eq!(columns(0..512, f32::NEG_INFINITY), 0..512);
        assert_eq!(columns(0..512, f32::NAN), 0..512);
        for norm in [f32::INFINITY, f32::NAN] {
            assert_eq!(steep.nonzero_columns(&(512..640), &(0..512), 0.0, || norm), 0..512);
        }
        assert_eq!(sorted(&steep, 8), Some(vec![4, 3, 5, 2, 6, 1, 7, 0]));
        assert_eq!(sorted(&ScoreBounds::new(&alibi, head(7)), 8), None);
    }

    #[test]
    fn a_bounded_score_leaves_every_key() {
        let capped = Bounds::new(scores::soft_cap(30.0).unwrap().program());
        let bounds = ScoreBounds::new(&capped, Head::default());
        assert_eq!(sorted(&bounds, 8), None);
        assert_eq!(bounds.nonzero_columns(&(0..128), &(0..512), 30.0, || 1e9), 0..512);
    }
}
