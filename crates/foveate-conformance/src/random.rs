//! The generator behind every random number of the corpus: a case of one name has one set of data
//! on every machine.
//!
//! It is not `foveate_tensor::random`: another generator would change the numbers of every case, and
//! what was measured with them could not be compared any more.

/// A small deterministic generator (PCG output over a 64-bit congruence).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts from `seed`.
    pub fn new(seed: u64) -> Self {
        let mut random = Self(seed ^ 0x9E37_79B9_7F4A_7C15);
        random.bits();
        random
    }

    /// 32 random bits.
    pub fn bits(&mut self) -> u32 {
        let x = self.0;
        self.0 = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let word = (x >> ((x >> 59) + 5) ^ x).wrapping_mul(12_605_985_483_714_917_081);
        (word >> 43 ^ word) as u32
    }

    /// In `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        f64::from(self.bits()) / 4_294_967_296.0
    }

    /// About normal, with mean 0 and variance 1: the sum of twelve.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    /// Below `n`, which is above 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }
}
