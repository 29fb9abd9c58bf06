//! Dropout as a mask: counter-based, so that no tiling, thread count or shard changes it.

use foveate_mods::expr::{self, scalar};
use foveate_mods::{Expr, MaskMod, ModError, Scalar, ScalarValue};

use crate::ProblemError;

const P: &str = "dropout_p";

/// Dropout that depends on (seed, b, h, q, kv) only, never on tiling.
///
/// Like every mod of a [`crate::Spec`] the mask of kept entries reads local positions once the
/// offsets and maps of a shard were substituted into it, so a shard drops what the whole problem
/// drops.
#[derive(Clone, Debug, PartialEq)]
pub struct Dropout {
    p: f32,
    keep: MaskMod,
}

impl Dropout {
    /// Drops entries with probability `p`, chosen by `seed`. An entry is kept where
    /// `unit(mix(mix(mix(mix(mix(seed_lo, seed_hi), b), h), q), kv)) >= p`. The seed's halves and
    /// `p` are run-time scalars `dropout_seed_lo`, `dropout_seed_hi`, `dropout_p`.
    pub fn new(p: f32, seed: u64) -> Self {
        let seed_lo = scalar("dropout_seed_lo", seed as u32 as i32);
        let seed_hi = scalar("dropout_seed_hi", (seed >> 32) as u32 as i32);
        let counters = [seed_hi, expr::b(), expr::h(), expr::q(), expr::kv()];
        let hash = counters.into_iter().fold(seed_lo, |hash, c: Expr<i32>| hash.mix(c));
        let keep = hash.unit().ge(scalar(P, p));
        let keep = MaskMod::new(keep.dynamic()).expect("a comparison without the score is a mask");
        Self { p, keep }
    }

    /// Probability that an entry is dropped, in `[0, 1)`. Kept entries are scaled by `1/(1-p)`.
    pub fn p(&self) -> f32 {
        self.p
    }

    /// The mask of the entries that are kept.
    pub fn keep(&self) -> &MaskMod {
        &self.keep
    }

    /// The same dropout with another form of its mask: positions substituted, a scalar or a
    /// buffer rebound. `p` follows the mask's scalar `dropout_p`.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map(
        &self,
        f: impl FnOnce(&MaskMod) -> Result<MaskMod, ModError>,
    ) -> Result<Self, ModError> {
        let keep = f(&self.keep)?;
        let own = |s: &&Scalar| s.name == P;
        let p = match keep.program().graph().scalars().iter().find(own).map(|s| s.value) {
            Some(ScalarValue::F32(p)) => p,
            _ => self.p,
        };
        Ok(Self { p, keep })
    }

    /// Factor on the entries that are kept, `1/(1-p)`.
    pub fn kept_scale(&self) -> f32 {
        1.0 / (1.0 - self.p)
    }

    /// # Errors
    /// When `p` is not in `[0, 1)`.
    pub fn check(&self) -> Result<(), ProblemError> {
        if (0.0..1.0).contains(&self.p) {
            return Ok(());
        }
        Err(ProblemError::new(format!("dropout p is {}; it must be at least 0, below 1", self.p)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_and_p_are_run_time_scalars_not_structure() {
        let dropout = Dropout::new(0.25, 0x0123_4567_89AB_CDEF);
        let scalars = dropout.keep().program().graph().scalars();
        let value = |name: &str| scalars.iter().find(|s| s.name == name).expect("present").value;
        use foveate_mods::ScalarValue::{F32, I32};
        assert_eq!(value("dropout_seed_lo"), I32(0x89AB_CDEF_u32 as i32));
        assert_eq!(value("dropout_seed_hi"), I32(0x0123_4567));
        assert_eq!(value("dropout_p"), F32(0.25));
    }

    #[test]
    fn p_follows_the_scalar_of_the_mask() {
        let dropout = Dropout::new(0.25, 9);
        let half = dropout.map(|m| m.map(|p| p.set_scalar(P, ScalarValue::F32(0.5)))).unwrap();
        assert_eq!((half.p(), half.kept_scale()), (0.5, 2.0));
        assert_eq!(half, Dropout::new(0.5, 9));
    }

    #[test]
    fn a_probability_outside_the_half_open_interval_is_refused() {
        for p in [-0.1, 1.0, 1.5, f32::NAN] {
            let error = Dropout::new(p, 0).check().expect_err("out of range");
            assert!(error.to_string().contains("dropout p"), "{error}");
        }
        assert!(Dropout::new(0.0, 0).check().is_ok());
    }
}
