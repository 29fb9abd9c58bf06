//! Random numbers as functions of a seed and counters.
//!
//! Nothing here has state that outlives a call, so a resumed run needs the seed and its cursor, no more.

/// The finaliser of SplitMix64: a bijection of 64 bits that spreads every input bit.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A stream of 64-bit numbers determined by a seed.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// The stream of `seed`, independent for each `stream`.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self { state: mix(seed ^ mix(stream)) }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// A number below `bound` (which is above zero), without the bias of a plain remainder.
    pub fn below(&mut self, bound: u64) -> u64 {
        let limit = u64::MAX - u64::MAX % bound;
        loop {
            let bits = self.bits();
            if bits < limit {
                return bits % bound;
            }
        }
    }

    /// A number in `[0, 1)` with 53 random bits.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A permutation of `0..len` determined by `seed` and `stream`.
pub fn permutation(len: usize, seed: u64, stream: u64) -> Vec<usize> {
    let mut rng = Rng::new(seed, stream);
    let mut order: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        order.swap(last, rng.below(last as u64 + 1) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_holds_every_index_once_and_depends_on_seed_and_stream() {
        for len in [0, 1, 2, 7, 100] {
            let mut order = permutation(len, 3, 5);
            assert_eq!(order, permutation(len, 3, 5));
            order.sort_unstable();
            assert_eq!(order, (0..len).collect::<Vec<_>>());
        }
        assert_ne!(permutation(100, 3, 5), permutation(100, 3, 6));
        assert_ne!(permutation(100, 3, 5), permutation(100, 4, 5));
    }

    #[test]
    fn numbers_below_a_bound_are_uniform() {
        let mut rng = Rng::new(11, 0);
        let mut counts = [0u32; 7];
        for _ in 0..70_000 {
            counts[rng.below(7) as usize] += 1;
        }
        assert!(counts.iter().all(|&count| (9_600..10_400).contains(&count)), "{counts:?}");
    }
}
