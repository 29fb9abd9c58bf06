//! Cases small enough for Miri, which interprets the scalar path: forward, backward and decoding over
//! every kind of operand, on one thread.
//!
//! ```console
//! $ cargo +nightly miri test -p foveate-cpu --test attention small
//! ```

use foveate_cpu::CpuOptions;
use foveate_mods::Buffer;
use foveate_mods::expr::{h, kv, q, score};
use foveate_problem::Dropout;
use foveate_tensor::DType;
use foveate_tensor::random::Random;

use crate::common::{Case, vector};
use crate::oracle::{causal, mask, score_mod};

/// Checks a case on the calling thread alone, in a pool of that thread. Miri looks at memory only: the
/// oracle has none that is unsafe, and would take most of the time.
fn check(case: Case, name: &str) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
    pool.expect("a pool of this thread").install(|| match cfg!(miri) {
        true => {
            let written = case.run().bits();
            assert!(written.iter().all(|&bits| !f64::from_bits(bits).is_nan()), "{name}");
        }
        false => case.check(name),
    });
}

#[test]
fn every_feature_at_once_is_right() {
    let bias = Buffer::learned("bias", &[2, 3], vector(&mut Random::new(2), 6)).unwrap();
    let case = Case {
        heads: [2, 1],
        lens: [5, 19],
        dims: [3, 5],
        mask: mask(causal()),
        score: score_mod(score() + bias.at([h(), (q() + kv()) % 3])),
        dropout: Some(Dropout::new(0.25, 7)),
        sink: true,
        d_lse: true,
        ..Case::default()
    };
    check(case, "every feature");
}

#[test]
fn tiles_that_are_chosen_are_right() {
    let options = CpuOptions::default();
    check(Case { lens: [18, 17], dims: [16, 16], options, ..Case::default() }, "tiles");
}

#[test]
fn one_query_over_keys_in_place_is_right() {
    let dtype = DType::F16;
    let case = Case { lens: [1, 33], heads: [2, 1], dtype, ..Case::default() };
    check(case, "keys in place");
}

#[test]
fn one_query_over_keys_that_are_copied_is_right() {
    let dtype = DType::BF16;
    let case = Case { lens: [1, 33], dims: [4, 9], heads: [2, 1], dtype, ..Case::default() };
    check(case, "keys that are copied");
}

#[test]
fn packed_sequences_of_which_one_is_empty_are_right() {
    let offsets = Some([vec![0, 3, 3, 7], vec![0, 9, 14, 20]]);
    let case = Case { lens: [7, 20], dims: [4, 4], offsets, ..Case::default() };
    check(case, "packed sequences");
}

#[test]
fn a_batch_that_shares_its_keys_is_right() {
    let case = Case { batch: 2, shared_kv: true, lens: [4, 18], dims: [2, 2], ..Case::default() };
    check(case, "shared keys");
}
