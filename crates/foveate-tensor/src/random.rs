//! Random numbers that a seed determines, the same on every machine: SplitMix64 (Steele, Lea and
//! Flood, 2014).
//!
//! First weights, the order of documents and the data of tests are drawn from here, so that a seed
//! in a recipe, a checkpoint or a failed test's output stands for the same numbers ever after.
//! Nothing here is fit for secrets.

/// What the state grows by at each number: 2⁶⁴ over the golden ratio.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// A bijection of 64 bits that spreads every input bit: number 0 of the generator that starts at
/// `value`.
pub fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(STEP);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Stream number `stream` of `seed`; the streams of a seed do not follow one another.
    pub fn stream(seed: u64, stream: u64) -> Self {
        Self { state: mix(seed ^ mix(stream)).wrapping_add(STEP) }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        let bits = mix(self.state);
        self.state = self.state.wrapping_add(STEP);
        bits
    }

    /// Leaves out the next `count` calls of [`Random::bits`].
    pub fn skip(&mut self, count: u64) {
        self.state = self.state.wrapping_add(STEP.wrapping_mul(count));
    }

    /// A number below `bound`, without the bias of a plain remainder.
    ///
    /// # Panics
    /// When `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let bound = bound as u64;
        let limit = u64::MAX - u64::MAX % bound;
        loop {
            let bits = self.bits();
            if bits < limit {
                return (bits % bound) as usize;
            }
        }
    }

    /// A number in `[0, 1)`, a multiple of 2⁻⁵³.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number in `[-1, 1)`, a multiple of 2⁻²³: f32 holds it exactly.
    pub fn signed(&mut self) -> f64 {
        (self.bits() >> 40) as f64 / f64::from(1 << 23) - 1.0
    }

    /// A standard normal number, by Box and Muller's transform.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_published_numbers() {
        // The reference implementation's first numbers for seed 1234567.
        let mut random = Random::new(1_234_567);
        let numbers = [random.bits(), random.bits(), random.bits()];
        let published =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(numbers, published);
        let mut later = Random::new(1_234_567);
        later.skip(2);
        assert_eq!(later.bits(), published[2]);
    }

    #[test]
    fn numbers_below_a_bound_are_uniform() {
        let mut random = Random::stream(11, 0);
        let mut counts = [0u32; 7];
        for _ in 0..70_000 {
            counts[random.below(7)] += 1;
        }
        assert!(counts.iter().all(|&count| (9_600..10_400).contains(&count)), "{counts:?}");
    }

    #[test]
    fn numbers_have_their_mean_and_variance() {
        let mut random = Random::new(3);
        let mut holds = |draw: fn(&mut Random) -> f64, mean: f64, variance: f64| {
            let numbers: Vec<f64> = (0..100_000).map(|_| draw(&mut random)).collect();
            let found = numbers.iter().sum::<f64>() / 1e5;
            let spread = numbers.iter().map(|x| (x - found).powi(2)).sum::<f64>() / 1e5;
            assert!((found - mean).abs() < 0.01, "mean {found}, not {mean}");
            assert!((spread - variance).abs() < 0.02, "variance {spread}, not {variance}");
        };
        holds(Random::unit, 0.5, 1.0 / 12.0);
        holds(Random::signed, 0.0, 1.0 / 3.0);
        holds(Random::normal, 0.0, 1.0);
    }
}
