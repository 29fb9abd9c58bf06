//! Tokens of rows on several ranks: plans of causal attention over them, and batches of what each holds.

use std::ops::Range;
use std::sync::Arc;

use foveate_nn::{
    Batch, ContextAttention, ContextLayer, ContextMoves, ContextPlan, KeyStage, NnError,
};

/// How keys and queries of different ranks meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Gather,
    /// In so many stages behind the rank's own keys; in none, before attention.
    Exchange(usize),
    Heads,
}

/// The plan of every rank, for rows whose chunks of `chunk` tokens are dealt to the ranks there and back.
pub fn plans(
    ranks: usize,
    how: How,
    whole: [usize; 2],
    chunk: usize,
    documents: &[i32],
    heads: [usize; 2],
) -> Vec<Arc<ContextPlan>> {
    let len = whole[1];
    let dealt = |number: usize| {
        let place = number % (2 * ranks);
        place.min(2 * ranks - 1 - place)
    };
    let tokens = |rank: usize| -> Vec<Range<usize>> {
        let own = (0..len.div_ceil(chunk)).filter(|&number| dealt(number) == rank);
        own.map(|number| number * chunk..len.min((number + 1) * chunk)).collect()
    };
    let tokens: Vec<_> = (0..ranks).map(tokens).collect();
    let end = |rank: usize| tokens[rank].last().map_or(0, |last| last.end);
    // What `reader` gets of `owner` in a stage.
    let moved = |reader: usize, owner: usize, stage: usize| -> Vec<Range<usize>> {
        let of_owner = tokens[owner].iter().cloned().enumerate();
        match how {
            _ if reader == owner => Vec::new(),
            How::Gather => tokens[owner].clone(),
            How::Exchange(1..) if stage == 0 => Vec::new(),
            How::Exchange(stages) => of_owner
                .filter(|(i, range)| {
                    range.start < end(reader) && (stages == 0 || i % stages == stage - 1)
                })
                .map(|(_, range)| range)
                .collect(),
            How::Heads => unreachable!("heads move"),
        }
    };
    // Those behind the first key: masks are causal.
    let queries = |rank: usize, stage: usize| {
        let own = || tokens[rank].iter().cloned().flatten();
        let keys = (0..ranks).flat_map(|owner| moved(rank, owner, stage));
        match (stage, keys.map(|range| range.start).min()) {
            (0, _) => 0..own().count(),
            (_, Some(first)) => own().filter(|&query| query < first).count()..own().count(),
            (_, None) => 0..0,
        }
    };
    let even = |count: usize, rank: usize| count * rank / ranks..count * (rank + 1) / ranks;
    let plan = |rank: usize| {
        let all = |of: &dyn Fn(usize) -> Vec<Range<usize>>| (0..ranks).map(of).collect();
        let stage = |stage: usize| KeyStage {
            moves: matches!(how, How::Gather | How::Exchange(0)) || stage > 0,
            sends: all(&|other| moved(other, rank, stage)),
            receives: all(&|other| moved(rank, other, stage)),
            queries: queries(rank, stage),
        };
        let per = heads[0] / heads[1];
        let of_rank = |rank: usize| {
            let keys = even(heads[1], rank);
            [keys.start * per..keys.end * per, keys]
        };
        let moves = match how {
            How::Gather => ContextMoves::Keys(vec![stage(0)]),
            How::Exchange(stages) => ContextMoves::Keys((0..=stages).map(stage).collect()),
            How::Heads => ContextMoves::Heads((0..ranks).map(of_rank).collect()),
        };
        Arc::new(ContextPlan {
            whole,
            documents: documents.to_vec(),
            first_row: 0,
            first_heads: [0, 0],
            mean_kv_len: 32,
            rank,
            tokens: tokens.clone(),
            moves,
        })
    };
    (0..ranks).map(plan).collect()
}

/// A plan, as a step takes it.
pub struct Planned(pub Arc<ContextPlan>);

impl ContextAttention for Planned {
    fn forward(&mut self, _: &ContextLayer<'_>, _: &[f32], _: &mut [f32]) -> Result<(), NnError> {
        unreachable!("the device computes it")
    }

    fn backward(
        &mut self,
        _: &ContextLayer<'_>,
        _: &[f32],
        _: &mut [f32],
        _: &mut [f32],
    ) -> Result<(), NnError> {
        unreachable!("the device computes it")
    }

    fn plan(&self) -> Option<&Arc<ContextPlan>> {
        Some(&self.0)
    }

    fn positions(&self) -> usize {
        self.0.whole[1]
    }

    fn live_pairs(&self) -> f64 {
        0.0
    }
}

/// What a rank holds of a batch.
pub struct Held {
    rows: usize,
    len: usize,
    tokens: Vec<u32>,
    labels: Vec<i32>,
    documents: Vec<i32>,
    positions: Vec<i32>,
}

impl Held {
    pub fn of(batch: &Batch<'_>, plan: &ContextPlan) -> Self {
        fn own<T: Copy>(all: &[T], batch: &Batch<'_>, plan: &ContextPlan) -> Vec<T> {
            let row = |row: &[T]| {
                let own = plan.tokens[plan.rank].iter().cloned().flatten();
                own.map(|position| row[position]).collect::<Vec<T>>()
            };
            all.chunks(batch.len).flat_map(row).collect()
        }
        Self {
            rows: batch.rows,
            len: plan.tokens[plan.rank].iter().map(Range::len).sum(),
            tokens: own(batch.tokens, batch, plan),
            labels: own(batch.labels, batch, plan),
            documents: own(batch.documents, batch, plan),
            positions: own(batch.positions, batch, plan),
        }
    }

    pub fn batch(&self) -> Batch<'_> {
        Batch {
            rows: self.rows,
            len: self.len,
            tokens: &self.tokens,
            labels: &self.labels,
            documents: &self.documents,
            positions: &self.positions,
            live_pairs: &[],
            order: &[],
        }
    }
}
