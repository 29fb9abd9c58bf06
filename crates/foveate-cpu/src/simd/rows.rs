//! Passes over rows of scores and of head vectors. Rows are whole groups.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::exp::{exp, exp2, exp2_small};
use super::group::{LANES, Lanes, Pair, Simd, larger};
use super::level::for_each_level;

for_each_level! {
    /// `row[i] = exp(row[i] - shift)`; returns the sum. `-∞` becomes 0 for any finite `shift`.
    pub exp_sum / exp_sum_on = exp_sum_body(row: &mut [f32], shift: f32) -> f32
}
for_each_level! {
    /// The online softmax of a subtile. Row `r` is `scores[r * stride..][columns]`, for as many rows
    /// as `rows` has. Scores become weights relative to the row maximum so far; a row whose scores
    /// so far are all `-∞` becomes 0.
    pub online_softmax / online_softmax_on = online_softmax_body(
        scores: &mut [f32],
        stride: usize,
        columns: Range<usize>,
        rows: &mut [RowState],
    )
}
for_each_level! {
    /// `row[i] *= factor`.
    pub scale / scale_on = scale_body(row: &mut [f32], factor: f32)
}
for_each_level! {
    /// Whether no element is infinite or NaN.
    pub all_finite / all_finite_on = all_finite_body(row: &[f32]) -> bool
}
for_each_level! {
    /// `into[i] += row[i]`.
    pub add / add_on = add_body(into: &mut [f32], row: &[f32])
}
for_each_level! {
    /// `Σ a[i]·b[i]`.
    pub dot / dot_on = dot_body(a: &[f32], b: &[f32]) -> f32
}
for_each_level! {
    /// `Σ x²` over numbers in bf16.
    pub pair_square_sum / pair_square_sum_on = pair_square_sum_body(row: &[Pair]) -> f32
}
for_each_level! {
    /// The softmax's weights and the gradient of its scores, in place: scores `p` become
    /// `weight_factor·exp(p - lse)`, and gradients `d` of the weights become `p·(d - delta)`. Row
    /// `r` is `[r * stride..][columns]` of both, for as many rows as `rows` has. A row whose lse is
    /// `+∞` becomes 0 in both, and so does an entry whose score is `-∞`, whatever lse, `d` and delta
    /// are: a masked entry takes nothing of values or rows that are non-finite.
    pub softmax_backward / softmax_backward_on = softmax_backward_body(
        p: &mut [f32],
        d: &mut [f32],
        stride: usize,
        columns: Range<usize>,
        rows: RowStatistics<'_>,
    )
}

for_each_level! {
    /// Whether [`softmax_backward`] would make every weight of a subtile 0, because all scores are
    /// further than [`ZERO_WEIGHT`] below their lse.
    pub weights_are_zero / weights_are_zero_on = weights_are_zero_body(
        scores: &[f32],
        stride: usize,
        columns: Range<usize>,
        lse: &[f32],
    ) -> bool
}

/// The exponential of this difference, and of any below it, is 0 in f32.
pub const ZERO_WEIGHT: f32 = -127.0 / LOG2_E - 0.1;

/// The statistics of rows that the backward reads.
#[derive(Clone, Copy, Debug)]
pub struct RowStatistics<'a> {
    /// `+∞` for an empty row.
    pub lse: &'a [f32],
    /// `Σ d_out·out - d_lse`, divided by the factor of entries that dropout keeps.
    pub delta: &'a [f32],
    /// What `exp(score - lse)` is multiplied by: the factor of entries that dropout keeps, and
    /// `1 / Σ exp(score - lse)` of rows whose lse is too large for its rounding not to matter.
    pub weight_factor: &'a [f32],
}

impl<'a> RowStatistics<'a> {
    /// The statistics of a range of rows.
    pub fn of(&self, rows: Range<usize>) -> Self {
        let Self { lse, delta, weight_factor } = self;
        Self {
            lse: &lse[rows.clone()],
            delta: &delta[rows.clone()],
            weight_factor: &weight_factor[rows],
        }
    }
}

/// The groups of a row.
#[inline(always)]
fn groups(row: &[f32]) -> &[Lanes] {
    let (groups, rest) = row.as_chunks::<LANES>();
    debug_assert!(rest.is_empty(), "rows are padded to whole groups");
    groups
}

/// The groups of a row, to be changed.
#[inline(always)]
fn groups_mut(row: &mut [f32]) -> &mut [Lanes] {
    let (groups, rest) = row.as_chunks_mut::<LANES>();
    debug_assert!(rest.is_empty(), "rows are padded to whole groups");
    groups
}

/// The largest element of `row`; `-∞` when empty, NaN when one is NaN.
#[inline(always)]
fn max_body<S: Simd>(s: S, row: &[f32]) -> f32 {
    // Two maxima: consecutive comparisons do not depend on each other.
    let mut max = [s.splat(f32::NEG_INFINITY); 2];
    let (pairs, last) = groups(row).as_chunks::<2>();
    for pair in pairs {
        max = [s.larger(max[0], s.load(&pair[0])), s.larger(max[1], s.load(&pair[1]))];
    }
    for group in last {
        max[0] = s.larger(max[0], s.load(group));
    }
    s.largest(s.larger(max[0], max[1]))
}

/// [`max_body`] with a third of the operations where the result is finite. It may miss a NaN there.
#[inline(always)]
fn finite_max_body<S: Simd>(s: S, row: &[f32]) -> f32 {
    let mut max = [s.splat(f32::NEG_INFINITY); 2];
    let (pairs, last) = groups(row).as_chunks::<2>();
    for pair in pairs {
        max = [s.max(max[0], s.load(&pair[0])), s.max(max[1], s.load(&pair[1]))];
    }
    for group in last {
        max[0] = s.max(max[0], s.load(group));
    }
    let max = s.largest(s.larger(max[0], max[1]));
    if max.is_finite() { max } else { max_body(s, row) }
}

#[inline(always)]
fn exp_sum_body<S: Simd>(s: S, row: &mut [f32], shift: f32) -> f32 {
    let (mut sum, shift) = (s.splat(0.0), s.splat(shift));
    for group in groups_mut(row) {
        let x = exp(s, s.sub(s.load(group), shift));
        s.store(x, group);
        sum = s.add(sum, x);
    }
    s.sum(sum)
}

/// The online softmax of a row.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RowState {
    /// The row maximum so far, which weights are relative to.
    pub max: f32,
    /// The sum of the weights so far.
    pub sum: f32,
    /// What the last subtile rescaled `sum` by before it added its own weights. The output
    /// accumulator is to be rescaled by the same.
    pub factor: f32,
}

// SAFETY: three floats in C's layout, without padding: zeros are a value, and so are all bits.
unsafe impl bytemuck::Zeroable for RowState {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for RowState {}

impl RowState {
    /// Floats of one.
    pub const ELEMS: usize = size_of::<Self>() / size_of::<f32>();

    /// Before the first score.
    pub const START: Self = Self { max: f32::NEG_INFINITY, sum: 0.0, factor: 1.0 };

    /// Whether no key has had a weight.
    pub fn is_fresh(&self) -> bool {
        self.max == f32::NEG_INFINITY
    }
}

#[inline(always)]
fn online_softmax_body<S: Simd>(
    s: S,
    scores: &mut [f32],
    stride: usize,
    columns: Range<usize>,
    rows: &mut [RowState],
) {
    // All maxima first, so that their reductions overlap.
    for (row, state) in scores.chunks(stride).zip(&mut *rows) {
        let max = larger(state.max, finite_max_body(s, &row[columns.clone()]));
        state.factor = 1.0;
        if max != state.max {
            // Before the first score there is nothing to rescale.
            if state.max != f32::NEG_INFINITY {
                state.factor = (state.max - max).exp();
            }
            state.max = max;
        }
    }
    let log2_e = s.splat(LOG2_E);
    for (row, state) in scores.chunks_mut(stride).zip(rows) {
        let row = &mut row[columns.clone()];
        if state.max == f32::NEG_INFINITY {
            row.fill(0.0);
            continue;
        }
        let (mut sum, max) = (s.splat(0.0), s.splat(state.max));
        for group in groups_mut(row) {
            // The difference comes first: it is exact near the maximum, however large scores are.
            let weights = exp2_small(s, s.mul(s.sub(s.load(group), max), log2_e));
            s.store(weights, group);
            sum = s.add(sum, weights);
        }
        let sum = s.sum(sum);
        state.sum = state.sum * state.factor + sum;
        // The maximum is a number, but another score is NaN.
        if sum.is_nan() && state.max.is_finite() {
            state.max = f32::NAN;
        }
    }
}

#[inline(always)]
fn scale_body<S: Simd>(s: S, row: &mut [f32], factor: f32) {
    let factor = s.splat(factor);
    for group in groups_mut(row) {
        s.store(s.mul(s.load(group), factor), group);
    }
}

/// `row[i] *= factor` for a weighted sum of values. A factor of 0 clears it, whatever is in it.
#[inline]
pub fn rescale(row: &mut [f32], factor: f32) {
    if factor == 0.0 {
        row.fill(0.0);
    } else if factor != 1.0 {
        scale(row, factor);
    }
}

#[inline(always)]
fn all_finite_body<S: Simd>(s: S, row: &[f32]) -> bool {
    // 0 times what is not finite is NaN.
    let (zero, mut sums) = (s.splat(0.0), [s.splat(0.0); 4]);
    let (fours, last) = groups(row).as_chunks::<4>();
    for four in fours {
        for (sum, group) in sums.iter_mut().zip(four) {
            *sum = s.mul_add(s.load(group), zero, *sum);
        }
    }
    for group in last {
        sums[0] = s.mul_add(s.load(group), zero, sums[0]);
    }
    let [a, b, c, d] = sums;
    s.sum(s.add(s.add(a, b), s.add(c, d))) == 0.0
}

#[inline(always)]
fn add_body<S: Simd>(s: S, into: &mut [f32], row: &[f32]) {
    for (into, group) in groups_mut(into).iter_mut().zip(groups(row)) {
        s.store(s.add(s.load(into), s.load(group)), into);
    }
}

#[inline(always)]
fn dot_body<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = s.splat(0.0);
    for (a, b) in groups(a).iter().zip(groups(b)) {
        sum = s.mul_add(s.load(a), s.load(b), sum);
    }
    s.sum(sum)
}

#[inline(always)]
fn pair_square_sum_body<S: Simd>(s: S, row: &[Pair]) -> f32 {
    let (groups, rest) = row.as_flattened().as_chunks::<LANES>();
    debug_assert!(rest.is_empty(), "rows are padded to whole groups");
    let mut sum = s.splat(0.0);
    for group in groups {
        // As bf16::to_f32, except that a signalling NaN stays one.
        let x = s.load(&group.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16)));
        sum = s.mul_add(x, x, sum);
    }
    s.sum(sum)
}

#[inline(always)]
fn weights_are_zero_body<S: Simd>(
    s: S,
    scores: &[f32],
    stride: usize,
    columns: Range<usize>,
    lse: &[f32],
) -> bool {
    // The first row decides most subtiles.
    for (row, &lse) in scores.chunks(stride).zip(lse) {
        let lse = s.splat(lse);
        // Two maxima: consecutive comparisons do not depend on each other.
        let mut above = [s.splat(f32::NEG_INFINITY); 2];
        let (pairs, last) = groups(&row[columns.clone()]).as_chunks::<2>();
        for pair in pairs {
            above[0] = s.larger(above[0], s.sub(s.load(&pair[0]), lse));
            above[1] = s.larger(above[1], s.sub(s.load(&pair[1]), lse));
        }
        for group in last {
            above[0] = s.larger(above[0], s.sub(s.load(group), lse));
        }
        let largest = s.largest(s.larger(above[0], above[1]));
        if largest.is_nan() || largest > ZERO_WEIGHT {
            return false;
        }
    }
    true
}

#[inline(always)]
fn softmax_backward_body<S: Simd>(
    s: S,
    p: &mut [f32],
    d: &mut [f32],
    stride: usize,
    columns: Range<usize>,
    rows: RowStatistics<'_>,
) {
    let log2_e = s.splat(LOG2_E);
    for (r, (p, d)) in p.chunks_mut(stride).zip(d.chunks_mut(stride)).enumerate() {
        let Some(&lse) = rows.lse.get(r) else { return };
        let (p, d) = (&mut p[columns.clone()], &mut d[columns.clone()]);
        if lse == f32::INFINITY {
            p.fill(0.0);
            d.fill(0.0);
            continue;
        }
        let (lse, delta, weight_factor) =
            (s.splat(lse), s.splat(rows.delta[r]), s.splat(rows.weight_factor[r]));
        let plain = rows.weight_factor[r] == 1.0;
        for (p, d) in groups_mut(p).iter_mut().zip(groups_mut(d)) {
            // The difference comes first: it is exact near the maximum, however large scores are.
            let score = s.load(p);
            let power = exp2(s, s.mul(s.sub(score, lse), log2_e));
            let weight = if plain { power } else { s.mul(power, weight_factor) };
            s.store(s.clear_masked(weight, score), p);
            s.store(s.clear_masked(s.mul(weight, s.sub(s.load(d), delta)), score), d);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::level::Level;
    use super::*;

    #[test]
    fn row_passes_agree_with_plain_loops_on_every_level() {
        let row: Vec<f32> = (0..48).map(|i| ((i * 37) % 23) as f32 * 0.25 - 3.0).collect();
        let other: Vec<f32> = (0..48).map(|i| ((i * 11) % 17) as f32 * 0.5 - 4.0).collect();
        for &level in Level::available() {
            let exact: f32 = row.iter().zip(&other).map(|(a, b)| a * b).sum();
            assert_eq!(dot_on(level, &row, &other), exact);
            let mut sum = row.clone();
            add_on(level, &mut sum, &other);
            scale_on(level, &mut sum, 2.0);
            let want = row.iter().zip(&other).map(|(a, b)| 2.0 * (a + b));
            assert!(sum.iter().copied().eq(want));
            let mut p = row.clone();
            let sum = exp_sum_on(level, &mut p, 1.5);
            let exact: Vec<f32> = row.iter().map(|x| (x - 1.5).exp()).collect();
            assert!(p.iter().zip(&exact).all(|(a, b)| (a - b).abs() <= 1e-6 * b));
            assert!((sum - exact.iter().sum::<f32>()).abs() < 1e-6 * sum);
        }
    }

    #[test]
    fn weights_and_their_gradients_are_those_of_plain_loops_on_every_level() {
        let (stride, columns) = (48, 16..48);
        let scores: Vec<f32> = (0..4 * stride).map(|i| ((i * 37) % 23) as f32 * 0.25).collect();
        let d_p: Vec<f32> = (0..4 * stride).map(|i| ((i * 11) % 17) as f32 * 0.5 - 4.0).collect();
        let (lse, delta) = ([2.0, f32::INFINITY, -95.0, 7.0], [1.5, 0.0, -2.0, 0.5]);
        let weight_factor = [1.0, 1.0, 1.0, 0.25];
        for &level in Level::available() {
            let (mut p, mut d) = (scores.clone(), d_p.clone());
            let rows = RowStatistics { lse: &lse, delta: &delta, weight_factor: &weight_factor };
            softmax_backward_on(level, &mut p, &mut d, stride, columns.clone(), rows);
            for i in 0..4 * stride {
                let (r, inside) = (i / stride, columns.contains(&(i % stride)));
                let weight = f64::from(weight_factor[r]) * f64::from(scores[i] - lse[r]).exp();
                let near = |got: f32, want: f64| {
                    // Above 2^127 what is not infinite is as large as can be.
                    let want = want.min(f64::from(2f32.powi(127)) * 1.5);
                    (f64::from(got) - want).abs() <= 2e-5 * want.abs() || want > 1e38
                };
                if inside {
                    assert!(near(p[i], weight), "{}: {} of {weight}", level.name(), p[i]);
                    let want = p[i] * (d_p[i] - delta[r]);
                    assert!(d[i] == want, "{}: {} of {want}", level.name(), d[i]);
                } else {
                    assert!(p[i] == scores[i] && d[i] == d_p[i]);
                }
            }
        }
    }

    #[test]
    fn a_masked_entry_is_zero_whatever_else_is_not_finite_on_every_level() {
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0];
        let hidden = |i: usize| i % 3 == 1;
        for &level in Level::available() {
            for (lse, delta) in odd.iter().flat_map(|&lse| odd.map(|delta| (lse, delta))) {
                let score = |i| if hidden(i) { f32::NEG_INFINITY } else { 0.5 };
                let mut p: Vec<f32> = (0..2 * LANES).map(score).collect();
                let mut d: Vec<f32> = (0..2 * LANES).map(|i| odd[i % 4]).collect();
                let rows = RowStatistics { lse: &[lse], delta: &[delta], weight_factor: &[0.5] };
                softmax_backward_on(level, &mut p, &mut d, 2 * LANES, 0..2 * LANES, rows);
                for i in (0..2 * LANES).filter(|&i| hidden(i)) {
                    let name = level.name();
                    assert!(p[i] == 0.0 && d[i] == 0.0, "{name}, lse {lse}, delta {delta}: {i}");
                }
                let seen = (0..2 * LANES).filter(|&i| !hidden(i));
                let lost = lse.is_nan() && seen.clone().any(|i| p[i].is_finite());
                assert!(!lost, "{}: NaN is lost from the weights", level.name());
                let lost = lse == 1.0 && delta.is_nan() && seen.clone().any(|i| d[i].is_finite());
                assert!(!lost, "{}: NaN is lost from the gradients", level.name());
            }
        }
    }

    #[test]
    fn a_subtile_is_skipped_when_all_of_its_weights_are_zero() {
        let (stride, columns) = (48, 16..48);
        let lse = [50.0, f32::INFINITY, 10.0];
        let derived = |level, scores: &[f32]| {
            let (mut p, mut d) = (scores.to_vec(), vec![1.0; scores.len()]);
            let rows = RowStatistics { lse: &lse, delta: &[0.5; 3], weight_factor: &[1.0; 3] };
            softmax_backward_on(level, &mut p, &mut d, stride, columns.clone(), rows);
            (0..3).all(|r| p[r * stride..][columns.clone()].iter().all(|&p| p == 0.0))
        };
        for &level in Level::available() {
            for largest in [-40.0, -70.0, -78.0, -78.2, -90.0, f32::NAN] {
                let mut scores = vec![-100.0; 3 * stride];
                scores[2 * stride + 30] = largest;
                // Not of the columns.
                scores[3] = 60.0;
                let nothing = weights_are_zero_on(level, &scores, stride, columns.clone(), &lse);
                assert!(!nothing || derived(level, &scores), "{}: {largest}", level.name());
                assert_eq!(nothing, largest <= -78.2, "{}: {largest}", level.name());
            }
        }
    }

    #[test]
    fn one_element_that_is_not_finite_is_seen_wherever_it_is_on_every_level() {
        for (&level, groups) in Level::available().iter().flat_map(|l| (0..7).map(move |g| (l, g)))
        {
            let mut row = vec![f32::MAX; groups * LANES];
            assert!(all_finite_on(level, &row));
            for at in 0..row.len() {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    row[at] = bad;
                    assert!(!all_finite_on(level, &row), "{}: {bad} at {at}", level.name());
                }
                row[at] = -f32::MAX;
            }
        }
    }

    #[test]
    fn nothing_is_left_of_infinity_after_a_factor_of_zero() {
        let odd = [f32::INFINITY, f32::NAN, f32::NEG_INFINITY, 2.0];
        for (factor, want) in [(0.0, 0.0), (1.0, 2.0), (0.5, 1.0)] {
            let mut row = [odd; LANES / 4].concat();
            rescale(&mut row, factor);
            let kept = if factor == 0.0 { 0.0 } else { f32::INFINITY };
            assert!(row[3] == want && row[0] == kept, "{factor} gave {row:?}");
        }
    }

    /// A subtile of one row through [`online_softmax`].
    fn soften_row(level: Level, row: &[f32], mut state: RowState) -> (Vec<f32>, RowState) {
        let mut p = row.to_vec();
        online_softmax_on(level, &mut p, row.len(), 0..row.len(), std::slice::from_mut(&mut state));
        (p, state)
    }

    fn state(max: f32, sum: f32) -> RowState {
        RowState { max, sum, factor: f32::NAN }
    }

    #[test]
    fn a_row_is_weighed_against_the_largest_score_so_far() {
        let row: Vec<f32> = (0..48).map(|i| ((i * 37) % 23) as f32 * 0.25 - 3.0).collect();
        for &level in Level::available() {
            for (before, sum, max) in
                [(f32::NEG_INFINITY, 0.0, 2.5), (1.0, 2.0, 2.5), (4.0, 2.0, 4.0)]
            {
                let (p, new) = soften_row(level, &row, state(before, sum));
                assert_eq!(new.max, max);
                let exact: Vec<f32> = row.iter().map(|x| (x - max).exp()).collect();
                assert!(p.iter().zip(&exact).all(|(a, b)| (a - b).abs() <= 1e-6 * b));
                let want = exact.iter().sum::<f32>() + sum * (before - max).exp();
                assert!((new.sum - want).abs() < 1e-6 * want);
                assert!(sum == 0.0 || (new.factor - (before - max).exp()).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn a_weight_is_within_what_its_score_is_known_to() {
        // A difference x is known to half a unit in its last place, which makes |x|·2⁻²⁴ of its
        // weight; rounding to base 2 may double that.
        let steps = if cfg!(miri) { 100 } else { 20_000 };
        for &level in Level::available() {
            for i in 0..steps {
                let x = -87.0 * i as f32 / steps as f32;
                let (p, _) = soften_row(level, &[x; LANES], state(0.0, 1.0));
                let exact = f64::from(x).exp();
                let error = (f64::from(p[0]) - exact).abs() / exact;
                let allowed = f64::from(f32::EPSILON) * (2.0 + f64::from(x.abs()));
                assert!(error < allowed, "{}: {x} weighs {}", level.name(), p[0]);
            }
        }
    }

    #[test]
    fn a_row_without_a_score_weighs_nothing() {
        for &level in Level::available() {
            let (p, new) = soften_row(level, &[f32::NEG_INFINITY; 16], RowState::START);
            assert!(p == [0.0; 16] && new.max == f32::NEG_INFINITY && new.sum == 0.0);
            let mut half = [f32::NEG_INFINITY; 16];
            half[3] = -200.0;
            let (p, new) = soften_row(level, &half, RowState::START);
            assert!(p[3] == 1.0 && new.max == -200.0 && new.sum == 1.0);
        }
    }

    #[test]
    fn a_row_with_nan_is_nan_wherever_it_is() {
        for &level in Level::available() {
            for others in [1.0, f32::NEG_INFINITY, f32::INFINITY, f32::NAN] {
                for at in 0..48 {
                    let mut row = [others; 48];
                    row[at] = f32::NAN;
                    for before in [state(0.0, 1.0), RowState::START] {
                        let (_, new) = soften_row(level, &row, before);
                        assert!(new.max.is_nan() && new.sum.is_nan(), "{others}, NaN at {at}");
                    }
                }
            }
        }
    }
}
