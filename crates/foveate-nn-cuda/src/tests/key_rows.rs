//! Where keys of several ranks lie, beside ranks that exchange what they say of it.

use foveate_nn::{ContextMoves, ContextPlan};

use crate::cuda::context_plans::{How, plans};
use crate::key_rows::{KeyRows, of_rows};

const ROWS: usize = 2;

/// Every rank's keys after the exchanges, each as its row of the batch and its position.
fn exchanged(plans: &[std::sync::Arc<ContextPlan>], all: &[KeyRows]) -> Vec<Vec<(usize, i32)>> {
    let nothing = (usize::MAX, -1);
    let mut arrays: Vec<_> = all.iter().map(|keys| vec![nothing; ROWS * keys.len()]).collect();
    for (rank, plan) in plans.iter().enumerate() {
        let own = plan.tokens[rank].iter().cloned().flatten();
        let places = all[rank].own.iter().cloned().flatten();
        for (position, place) in own.zip(places) {
            for row in 0..ROWS {
                arrays[rank][row * all[rank].len() + place] = (row, position as i32);
            }
        }
    }
    for stage in 0..all[0].stages.len() {
        for (from, to) in (0..all.len()).flat_map(|from| (0..all.len()).map(move |to| (from, to))) {
            let sends = of_rows(ROWS, all[from].len(), || all[from].sends[stage][to].iter());
            let receives = of_rows(ROWS, all[to].len(), || all[to].receives[stage][from].iter());
            assert_eq!(sends.len(), receives.len(), "{from} to {to} in stage {stage}");
            for (send, receive) in sends.into_iter().zip(receives) {
                let moved = arrays[from][send].to_vec();
                arrays[to][receive].copy_from_slice(&moved);
            }
        }
    }
    arrays
}

#[test]
fn keys_arrive_once_and_gradients_return_to_where_the_keys_are() {
    for (ranks, how, len, chunk) in [
        (1, How::Gather, 7, 3),
        (2, How::Gather, 40, 8),
        (3, How::Exchange(0), 61, 8),
        (3, How::Exchange(1), 61, 8),
        (4, How::Exchange(3), 97, 5),
        // The last rank has no token.
        (5, How::Exchange(2), 12, 3),
    ] {
        let plans = plans(ranks, how, [ROWS, len], chunk, &vec![0; ROWS * len], [2, 2]);
        let all: Vec<KeyRows> = plans
            .iter()
            .map(|plan| match &plan.moves {
                ContextMoves::Keys(stages) => KeyRows::new(plan, stages),
                ContextMoves::Heads(_) => unreachable!(),
            })
            .collect();
        let arrays = exchanged(&plans, &all);
        for (rank, (keys, array)) in all.iter().zip(&arrays).enumerate() {
            for row in 0..ROWS {
                let found = &array[row * keys.len()..(row + 1) * keys.len()];
                let expected: Vec<_> = keys.positions.iter().map(|&p| (row, p)).collect();
                assert_eq!(found, expected, "rank {rank} of {ranks}");
                // Every key that a query may see is there, once.
                let mut sorted = keys.positions.clone();
                sorted.sort_unstable();
                sorted.dedup();
                assert_eq!(sorted.len(), keys.len());
                let last = plans[rank].tokens[rank].last().map_or(0, |last| last.end) as i32;
                assert!((0..last).all(|p| sorted.binary_search(&p).is_ok()));
            }
            let (first, last) = (keys.stages.first().unwrap(), keys.stages.last().unwrap());
            assert_eq!((first.start, last.end), (0, keys.len()));
            if keys.stages.len() == 1 {
                assert!(keys.positions.is_sorted(), "{how:?} on rank {rank}");
            }
        }
        // A gradient is the rank that it is from, and its key.
        for (owner, keys) in all.iter().enumerate() {
            let own_keys: Vec<usize> =
                plans[owner].tokens[owner].iter().cloned().flatten().collect();
            let own = own_keys.len();
            let (places, returned) = keys.returned_to(ROWS);
            let mut gradients: Vec<_> = arrays[owner].iter().map(|&key| (owner, key)).collect();
            gradients.resize(ROWS * keys.len() + returned, (usize::MAX, (0, 0)));
            for (reader, places) in places.iter().enumerate() {
                let returns = &all[reader].returns(ROWS)[owner];
                assert_eq!(returns.len(), places.len(), "{reader} to {owner}");
                for (from, to) in returns.iter().zip(places) {
                    let given = arrays[reader][from.clone()].iter().map(|&key| (reader, key));
                    gradients[to.clone()].copy_from_slice(&given.collect::<Vec<_>>());
                }
            }
            let sources = keys.sources(ROWS);
            assert_eq!(sources.len(), ranks * ROWS * own);
            for (i, &source) in sources.iter().enumerate() {
                let (reader, key) = (i / (ROWS * own), i % (ROWS * own));
                let key = (key / own, own_keys[key % own] as i32);
                let has = arrays[reader].contains(&key);
                assert_eq!(source >= 0, has, "the key {key:?} of {owner} on {reader}");
                if has {
                    assert_eq!(gradients[source as usize], (reader, key));
                }
            }
        }
    }
}
