//! Dropout as a mask: counter-based, so that no tiling, thread count or shard changes it.

use foveate_mods::expr::{self, scalar};
use foveate_mods::{Buffer, Expr, MaskMod, ModError, Scalar, ScalarValue};

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
    keep_mask: MaskMod,
}

impl Dropout {
    /// Drops entries with probability `p`, chosen by `seed`. An entry is kept where
    /// `unit(mix(mix(mix(mix(mix(seed_lo, b), h), q), seed_hi), kv)) >= p`. The seed's halves and
    /// `p` are run-time scalars `dropout_seed_lo`, `dropout_seed_hi`, `dropout_p`.
    ///
    /// A hash has 32 bits, so two seeds may agree in one row of queries. The upper half comes after
    /// the row is mixed in: the seeds that agree in one row differ in the next, and no two of the
    /// 2⁶⁴ seeds drop the same entries. Mixed with the lower half at once, 2³² of them would be
    /// the same. It comes before the key, so that an entry costs one hash.
    pub fn new(p: f32, seed: u64) -> Self {
        let seed_lo = scalar("dropout_seed_lo", seed as u32 as i32);
        let seed_hi = scalar("dropout_seed_hi", (seed >> 32) as u32 as i32);
        Self::of_halves(p, seed_lo, seed_hi)
    }

    /// [`Self::new`] with a seed that is read where it lies, in device memory too, when a call runs:
    /// `seed [2]` holds its lower and its upper half, as the bytes of a little-endian u64 do. The
    /// same seed drops the same entries.
    ///
    /// ```
    /// use foveate_mods::Buffer;
    /// use foveate_problem::Dropout;
    ///
    /// let seed = Buffer::<i32>::on_device("dropout_seed", &[2])?;
    /// let dropout = Dropout::with_seed_in(0.1, &seed)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the buffer has another shape.
    pub fn with_seed_in(p: f32, seed: &Buffer<i32>) -> Result<Self, ProblemError> {
        if seed.shape() != [2] {
            return Err(ProblemError::new(format!(
                "the seed of dropout has shape {:?}; it must be [2], the halves of a u64",
                seed.shape()
            )));
        }
        Ok(Self::of_halves(p, seed.at([0.into()]), seed.at([1.into()])))
    }

    fn of_halves(p: f32, seed_lo: Expr<i32>, seed_hi: Expr<i32>) -> Self {
        let counters = [expr::b(), expr::h(), expr::q(), seed_hi, expr::kv()];
        let hash = counters.into_iter().fold(seed_lo, |hash, c: Expr<i32>| hash.mix(c));
        let keep_mask = hash.unit().ge(scalar(P, p));
        let keep_mask =
            MaskMod::new(keep_mask.dynamic()).expect("a comparison without the score is a mask");
        Self { p, keep_mask }
    }

    /// Probability that an entry is dropped, in `[0, 1)`. Kept entries are scaled by `1/(1-p)`.
    pub fn p(&self) -> f32 {
        self.p
    }

    /// The mask of the entries that are kept.
    pub fn keep_mask(&self) -> &MaskMod {
        &self.keep_mask
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
        let keep_mask = f(&self.keep_mask)?;
        let own = |s: &&Scalar| s.name == P;
        let p = match keep_mask.program().graph().scalars().iter().find(own).map(|s| s.value) {
            Some(ScalarValue::F32(p)) => p,
            _ => self.p,
        };
        Ok(Self { p, keep_mask })
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
    use foveate_mods::Head;
    use foveate_mods::ir::mix;

    use super::*;

    #[test]
    fn a_seed_in_memory_drops_what_the_same_number_drops() {
        let seed = 0x8123_4567_89AB_CDEF_u64;
        let halves = vec![seed as u32 as i32, (seed >> 32) as u32 as i32];
        let read = Dropout::with_seed_in(0.4, &Buffer::vector("seed", halves)).unwrap();
        let given = Dropout::new(0.4, seed);
        let head = Head { b: 1, h: 3, ..Head::default() };
        let kept = |dropout: &Dropout| {
            let program = dropout.keep_mask().program();
            let all = (0..20).flat_map(|q| (0..20).map(move |kv| (q, kv)));
            all.map(|(q, kv)| program.eval(&head.at(q, kv)).unwrap()[0]).collect::<Vec<_>>()
        };
        assert_eq!(kept(&read), kept(&given));
        assert_ne!(kept(&read), kept(&Dropout::new(0.4, seed + 1)));
        assert_eq!(read.kept_scale(), given.kept_scale());
        let said = Dropout::with_seed_in(0.4, &Buffer::vector("seed", vec![1; 3])).unwrap_err();
        assert!(said.to_string().contains("has shape [3]"), "{said}");
    }

    #[test]
    fn the_seed_and_p_are_run_time_scalars_not_structure() {
        let dropout = Dropout::new(0.25, 0x0123_4567_89AB_CDEF);
        let scalars = dropout.keep_mask().program().graph().scalars();
        let value = |name: &str| scalars.iter().find(|s| s.name == name).expect("present").value;
        use foveate_mods::ScalarValue::{F32, I32};
        assert_eq!(value("dropout_seed_lo"), I32(0x89AB_CDEF_u32 as i32));
        assert_eq!(value("dropout_seed_hi"), I32(0x0123_4567));
        assert_eq!(value("dropout_p"), F32(0.25));
    }

    /// Which of the first 64 keys the rows of a sequence keep_mask.
    fn kept(seed: u64, rows: i32) -> Vec<u64> {
        let keep_mask = Dropout::new(0.5, seed).keep_mask().clone();
        let at = |q, kv| Head { q_len: rows, kv_len: 64, ..Head::default() }.at(q, kv);
        let bit =
            |q, kv| keep_mask.program().eval(&at(q, kv)).unwrap()[0] == ScalarValue::Bool(true);
        (0..rows).map(|q| (0..64).map(|kv| u64::from(bit(q, kv)) << kv).sum()).collect()
    }

    #[test]
    fn every_bit_of_the_seed_changes_what_is_dropped() {
        let usual = kept(1, 8);
        for bit in 0..64 {
            let changed = kept(1 ^ 1 << bit, 8);
            let same = usual.iter().zip(&changed).filter(|(x, y)| x == y).count();
            assert_eq!(same, 0, "rows that bit {bit} of the seed does not change");
        }
        // As one product, these two were one seed.
        assert_ne!(kept(1, 8), kept(0x9E37_79B1_0000_0000, 8));
    }

    #[test]
    fn seeds_that_agree_in_one_row_differ_in_the_next() {
        // What the upper half is mixed with in row `q`; `mix(x, y)` is a function of x·c + y.
        let row = |lo: u32, q| [0, 0, q].into_iter().fold(lo as i32, mix) as u32;
        let product = |lo: u32, q| row(lo, q).wrapping_mul(0x9E37_79B1);
        let (lo, hi) = (7, 11u32);
        let other_lo = 8;
        let other_hi = hi.wrapping_add(product(lo, 0)).wrapping_sub(product(other_lo, 0));
        let seed = |lo: u32, hi: u32| u64::from(hi) << 32 | u64::from(lo);
        let (one, other) = (kept(seed(lo, hi), 6), kept(seed(other_lo, other_hi), 6));
        assert_eq!(one[0], other[0], "the seeds were chosen to agree in row 0");
        assert!((1..6).all(|q| one[q] != other[q]));
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
