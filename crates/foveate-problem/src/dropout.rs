//! Dropout as a mask: counter-based, so that no tiling, thread count or shard changes it.

use foveate_mods::expr::{self, scalar};
use foveate_mods::{Expr, MaskMod};

use crate::ProblemError;

/// Dropout that depends on (seed, b, h, q, kv) only, never on tiling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability that an entry is dropped, in `[0, 1)`. Kept entries are scaled by `1/(1-p)`.
    pub p: f32,
    /// Seed of the counter-based generator.
    pub seed: u64,
}

impl Dropout {
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

/// The mask of the entries that dropout keeps:
/// `unit(mix(mix(mix(mix(mix(seed_lo, seed_hi), b), h), q), kv)) >= p`. The seed's halves and `p`
/// are run-time scalars `dropout_seed_lo`, `dropout_seed_hi`, `dropout_p`.
pub fn dropout_keep(dropout: &Dropout) -> MaskMod {
    let seed_lo = scalar("dropout_seed_lo", dropout.seed as u32 as i32);
    let seed_hi = scalar("dropout_seed_hi", (dropout.seed >> 32) as u32 as i32);
    let counters = [seed_hi, expr::b(), expr::h(), expr::q(), expr::kv()];
    let hash = counters.into_iter().fold(seed_lo, |hash, c: Expr<i32>| hash.mix(c));
    let keep = hash.unit().ge(scalar("dropout_p", dropout.p));
    MaskMod::new(keep.dynamic()).expect("a comparison without the score is a mask")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_and_p_are_run_time_scalars_not_structure() {
        let mask = dropout_keep(&Dropout { p: 0.25, seed: 0x0123_4567_89AB_CDEF });
        let scalars = mask.program().graph().scalars();
        let value = |name: &str| scalars.iter().find(|s| s.name == name).expect("present").value;
        use foveate_mods::ScalarValue::{F32, I32};
        assert_eq!(value("dropout_seed_lo"), I32(0x89AB_CDEF_u32 as i32));
        assert_eq!(value("dropout_seed_hi"), I32(0x0123_4567));
        assert_eq!(value("dropout_p"), F32(0.25));
    }

    #[test]
    fn a_probability_outside_the_half_open_interval_is_refused() {
        for p in [-0.1, 1.0, 1.5, f32::NAN] {
            let error = Dropout { p, seed: 0 }.check().expect_err("out of range");
            assert!(error.to_string().contains("dropout p"), "{error}");
        }
        assert!(Dropout { p: 0.0, seed: 0 }.check().is_ok());
    }
}
