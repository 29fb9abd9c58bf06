//! When a backend's numbers are right: the rule "Accuracy" of the semantics.
//!
//! - f32: max |gold − ours| ≤ 10 · max |gold − low| + 1e-6.
//! - f16, bf16, f8e4m3: mean |gold − ours| ≤ 1.1 · mean |gold − low|, and
//!   max |gold − ours| ≤ 2 · max |gold − low| + one rounding of the largest value; 3 instead of 2
//!   with tanh-like scores.
//!
//! The mean of `out` may be that of any program that rounds weights at another place between two powers of two
//! ([`crate::low::placed`], [`Tolerance::or_mean`]).
//!
//! A mean of fewer than 16 elements (the gradient of a sink, of a bias for each head) is a matter
//! of luck: such tensors have the rule of the max only, and gradients of so
//! few are measured by more than one draw of `low` ([`crate::low::backward_drawn`]).
//!
//! What is infinite or NaN in gold must be the same in ours, and nothing else is; gradients of cases
//! that say so need only keep it ([`NonFinite`]).

use foveate_tensor::DType;

const F32_ALLOWANCE: f64 = 1e-6;
pub(crate) const FEWEST_OF_A_MEAN: usize = 16;

/// Which scores a case has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rule {
    /// Factor 2 on the largest error of half types.
    #[default]
    Plain,
    /// Factor 3: the score goes through something like tanh.
    TanhLike,
}

/// What becomes of numbers that are not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// They are those of gold.
    #[default]
    Same,
    /// Where gold is infinite or NaN, ours is one of both. So may other numbers be, which are
    /// then not measured: gradients where a mask or dropout has hidden such a number.
    Kept,
}

/// How far one tensor may be from gold.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Dtype the numbers were computed and stored in.
    pub dtype: DType,
    /// The factor's rule.
    pub rule: Rule,
    /// The rule of what is infinite or NaN.
    pub non_finite: NonFinite,
}

/// Errors found, and what was allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measure {
    /// Largest error.
    pub max: f64,
    /// The largest allowed.
    pub max_allowed: f64,
    /// Mean error.
    pub mean: f64,
    /// The mean allowed; infinite where the rule has none.
    pub mean_allowed: f64,
    /// Position of the largest error.
    pub at: usize,
    /// Elements that are infinite or NaN in one and not, as the rule has it, in the other.
    pub strays: usize,
}

impl Measure {
    /// True when every error is allowed.
    pub fn passes(&self) -> bool {
        self.strays == 0 && self.max <= self.max_allowed && self.mean <= self.mean_allowed
    }
}

impl std::fmt::Display for Measure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Measure { max, max_allowed, mean, mean_allowed, at, strays } = self;
        write!(f, "max error {max:.3e} of {max_allowed:.3e} at {at}, ")?;
        write!(f, "mean {mean:.3e} of {mean_allowed:.3e}, {strays} not finite alike")
    }
}

impl Tolerance {
    /// Measures `ours` against `gold`, allowing what `low` needs.
    ///
    /// # Panics
    /// When the three lengths differ: the caller compares different things.
    pub fn measure(&self, gold: &[f64], low: &[f64], ours: &[f64]) -> Measure {
        assert_eq!((gold.len(), gold.len()), (low.len(), ours.len()), "three of one shape");
        let same = |x: f64, y: f64| x == y || (x.is_nan() && y.is_nan());
        let error = |x: f64, y: f64| if same(x, y) { 0.0 } else { (x - y).abs() };
        let (mut strays, mut at, mut max, mut sum) = (0, 0, 0.0, 0.0);
        let (mut low_max, mut low_sum, mut largest) = (0f64, 0.0, 0f64);
        for (i, ((&g, &l), &o)) in gold.iter().zip(low).zip(ours).enumerate() {
            if !same(g, o) && (!g.is_finite() || !o.is_finite()) {
                strays += usize::from(self.non_finite == NonFinite::Same || o.is_finite());
                continue;
            }
            if error(g, o) > max {
                (at, max) = (i, error(g, o));
            }
            sum += error(g, o);
            if g.is_finite() && l.is_finite() {
                low_max = low_max.max(error(g, l));
                low_sum += error(g, l);
                largest = largest.max(g.abs());
            }
        }
        let count = gold.len().max(1) as f64;
        let (max_allowed, mean_allowed) = match self.dtype {
            DType::F32 | DType::F64 => (10.0 * low_max + F32_ALLOWANCE, f64::INFINITY),
            DType::F16 | DType::BF16 | DType::F8E4M3 => {
                let factor = if self.rule == Rule::TanhLike { 3.0 } else { 2.0 };
                // Results of e4m3 operands are not stored in e4m3.
                let stored = match self.dtype {
                    DType::F8E4M3 => DType::BF16,
                    dtype => dtype,
                };
                let rounding = largest * unit_roundoff(stored);
                let mean = 1.1 * low_sum / count;
                let mean = if gold.len() < FEWEST_OF_A_MEAN { f64::INFINITY } else { mean };
                (factor * low_max + rounding, mean)
            }
        };
        Measure { max, max_allowed, mean: sum / count, mean_allowed, at, strays }
    }

    /// `found`, with the mean error allowed that another plain program needs, where that is larger.
    pub fn or_mean(&self, found: Measure, gold: &[f64], low: &[f64]) -> Measure {
        let other = self.measure(gold, low, gold).mean_allowed;
        Measure { mean_allowed: found.mean_allowed.max(other), ..found }
    }
}

/// Largest relative error of one rounding to nearest: half a unit in the last place of 1.
pub fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F8E4M3 => 2f64.powi(-4),
        DType::F32 => 2f64.powi(-24),
        DType::F64 => 2f64.powi(-53),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BF16: Tolerance =
        Tolerance { dtype: DType::BF16, rule: Rule::Plain, non_finite: NonFinite::Same };

    #[test]
    fn f32_allows_ten_times_the_plain_error() {
        let f32 = Tolerance { dtype: DType::F32, ..BF16 };
        let (gold, low) = ([1.0, 2.0], [1.0, 2.00001]);
        assert!(f32.measure(&gold, &low, &[1.0 + 9.9e-5, 2.0]).passes());
        assert!(!f32.measure(&gold, &low, &[1.0 + 1.02e-4, 2.0]).passes());
    }

    #[test]
    fn half_types_are_held_to_the_mean_as_well() {
        let with = |at: usize, x: f64| {
            let mut values = vec![1.0; 16];
            values[at] = x;
            values
        };
        let (gold, low) = (with(0, 1.0), with(3, 1.01));
        let found = BF16.measure(&gold, &low, &with(1, 1.02));
        assert!(found.max < found.max_allowed && !found.passes(), "the mean is twice low's");
        assert!(BF16.measure(&gold, &low, &with(2, 1.01)).passes());
        assert!(BF16.measure(&gold[..15], &low[..15], &with(1, 1.02)[..15]).passes());
    }

    #[test]
    fn a_tanh_like_score_has_a_third_more_room_on_the_max() {
        let (gold, low, mut ours) = ([0.0; 64], [0.01; 64], [0.0; 64]);
        ours[7] = 0.025;
        assert!(!BF16.measure(&gold, &low, &ours).passes());
        let tanh = Tolerance { rule: Rule::TanhLike, ..BF16 };
        assert!(tanh.measure(&gold, &low, &ours).passes());
    }

    #[test]
    fn a_nan_or_infinity_where_gold_has_none_never_passes() {
        for bad in [f64::NAN, f64::INFINITY] {
            let found = BF16.measure(&[1.0, 1.0], &[1.5, 1.5], &[1.0, bad]);
            assert!(!found.passes() && found.strays == 1);
        }
        let minus = f64::NEG_INFINITY;
        assert!(BF16.measure(&[minus], &[minus], &[minus]).passes());
        assert!(!BF16.measure(&[minus], &[minus], &[-1e9]).passes());
    }

    #[test]
    fn what_may_spread_may_not_be_lost() {
        let kept = Tolerance { non_finite: NonFinite::Kept, ..BF16 };
        let (gold, low) = ([1.0, f64::NAN, f64::INFINITY], [1.0, f64::NAN, f64::INFINITY]);
        assert!(kept.measure(&gold, &low, &[f64::NAN, f64::INFINITY, f64::NAN]).passes());
        assert!(!kept.measure(&gold, &low, &[1.0, 0.0, f64::NAN]).passes());
        assert!(!kept.measure(&gold, &low, &[1.1, f64::NAN, f64::NAN]).passes());
        assert!(!BF16.measure(&gold, &low, &[1.0, f64::INFINITY, f64::INFINITY]).passes());
    }
}
