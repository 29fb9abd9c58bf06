//! The order of documents, as a function of a seed and counters.
//!
//! Nothing here has state that outlives a call, so a resumed run needs the seed and its cursor, no
//! more.

use foveate::tensor::random::Random;

/// A permutation of `0..len` determined by `seed` and `stream`.
pub fn permutation(len: usize, seed: u64, stream: u64) -> Vec<usize> {
    let mut random = Random::stream(seed, stream);
    let mut order: Vec<usize> = (0..len).collect();
    for last in (1..len).rev() {
        order.swap(last, random.below(last + 1));
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
    fn a_seed_gives_the_order_that_it_has_always_given() {
        // A checkpoint holds a seed and a cursor, not the order.
        assert_eq!(permutation(10, 3, 5), [8, 0, 5, 2, 4, 6, 9, 3, 7, 1]);
    }
}
