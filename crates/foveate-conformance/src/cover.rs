//! A few small cases that have between them what the corpus has.
//!
//! A tool that slows kernels down a hundredfold cannot run the corpus. What decides which kernels
//! run, and from which sources they are compiled, are a few features of a case; the cases chosen
//! have every feature that the corpus has, in every dtype that it has it in.

use std::collections::HashSet;

use crate::case::{Case, Sink};
use crate::error::CaseError;
use foveate_tensor::random::Random;

/// The smallest cases that together have every pair of dtype and feature, in the order of `cases`.
///
/// # Errors
/// When the program of a case cannot be made.
pub fn cover(cases: Vec<Case>) -> Result<Vec<Case>, CaseError> {
    let mut by_work: Vec<usize> = (0..cases.len()).collect();
    by_work.sort_by_key(|&i| work(&cases[i]));
    let mut covered = HashSet::new();
    let mut chosen = HashSet::new();
    for i in by_work {
        for feature in features(&cases[i])? {
            if covered.insert((cases[i].dtype.clone(), feature)) {
                chosen.insert(i);
            }
        }
    }
    let kept = cases.into_iter().enumerate().filter(|(i, _)| chosen.contains(i));
    Ok(kept.map(|(_, case)| case).collect())
}

/// Multiply-adds of the forward pass without a mask. Cases of few rows come last: in one tile no
/// two warps meet.
fn work(case: &Case) -> (bool, usize) {
    let [queries, keys] = case.len;
    let one_tile = queries.min(keys) < 32;
    (one_tile, case.batch * case.heads[0] * queries * keys * (case.dim[0] + case.dim[1]))
}

/// What of a case decides which kernels run and how they are compiled.
fn features(case: &Case) -> Result<Vec<&'static str>, CaseError> {
    let spec = case.program(&mut Random::new(case.seed()))?.local;
    let captures = |program: &foveate_mods::Program| !program.graph().buffers().is_empty();
    let mask = spec.mask.as_ref().map(|mask| captures(mask.program()));
    let score = spec.score.as_ref().map(|score| captures(score.program()));
    let learned = case.buffers.values().any(|buffer| buffer.learned);
    let [heads, heads_kv] = case.heads;
    let widest = case.dim[0].max(case.dim[1]);
    let all = [
        ("a mask of positions", mask == Some(false)),
        ("a mask that reads a buffer", mask == Some(true)),
        ("a score of positions", score == Some(false)),
        ("a score that reads a buffer", score == Some(true)),
        ("a gradient of a buffer", learned),
        ("a sink", !matches!(case.sink, Sink::Random(false))),
        ("dropout", case.dropout.is_some()),
        ("a gradient of lse", case.d_lse),
        ("packed sequences", case.varlen.is_some()),
        ("pages", case.pages.is_some()),
        ("several query heads a key head", heads > heads_kv),
        ("accumulation", case.accumulate),
        ("non-finite operands", !case.set.is_empty()),
        ("dims up to 64", widest <= 64),
        ("dims up to 128", (65..=128).contains(&widest)),
        ("dims above 128", widest > 128),
        ("several tiles of keys", case.len[1] > 128),
    ];
    Ok(all.into_iter().filter_map(|(feature, has)| has.then_some(feature)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_small_cases_have_every_feature_of_the_corpus_in_every_dtype() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../conformance/cases");
        let all = crate::corpus::load(folder.as_ref()).unwrap();
        let pairs = |cases: &[Case]| -> HashSet<(String, &str)> {
            let of = |case: &Case| {
                let dtype = case.dtype.clone();
                features(case).unwrap().into_iter().map(move |f| (dtype.clone(), f))
            };
            cases.iter().flat_map(of).collect()
        };
        let few = cover(all.clone()).unwrap();
        assert_eq!(pairs(&few), pairs(&all));
        assert!(few.len() <= 50, "{} of {} cases", few.len(), all.len());
    }
}
