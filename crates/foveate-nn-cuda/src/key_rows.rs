//! Where keys of several ranks lie on one of them, and which gradients of them go where.
//!
//! A rank has, of each row of the batch, its own keys and behind them those that arrive, by stage, then by
//! rank: all that its queries see, in one array. Gradients of keys lie alike, and return by the way that the
//! keys came; the rank that holds them has what others send behind its own array, and sums in order of rank.

use std::ops::Range;

use foveate_nn::{ContextPlan, KeyStage};

/// The keys of a row of a batch on a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRows {
    /// The keys that attention of each stage is over.
    pub stages: Vec<Range<usize>>,
    /// The position of each key.
    pub positions: Vec<i32>,
    /// By stage and rank: keys that the rank gets, which are this one's own.
    pub sends: Vec<Vec<Vec<Range<usize>>>>,
    /// By stage and rank: where the keys lie that come from the rank.
    pub receives: Vec<Vec<Vec<Range<usize>>>>,
    rank: usize,
    /// Own keys.
    own: usize,
}

impl KeyRows {
    /// Those of `plan`, whose keys move in `stages`.
    pub fn new(plan: &ContextPlan, stages: &[KeyStage]) -> Self {
        let own = &plan.tokens[plan.rank];
        let mut all = Self {
            stages: Vec::new(),
            positions: own.iter().cloned().flatten().map(|p| p as i32).collect(),
            sends: Vec::new(),
            receives: Vec::new(),
            rank: plan.rank,
            own: own.iter().map(Range::len).sum(),
        };
        let mut first = 0;
        for stage in stages {
            let place = |range: &Range<usize>| {
                let start = place_of(own, range.start);
                start..start + range.len()
            };
            let sends = stage.sends.iter().map(|to| to.iter().map(place).collect()).collect();
            let mut arrive = |range: &Range<usize>| {
                let start = all.positions.len();
                all.positions.extend(range.clone().map(|p| p as i32));
                start..all.positions.len()
            };
            let receives =
                stage.receives.iter().map(|from| from.iter().map(&mut arrive).collect()).collect();
            all.sends.push(sends);
            all.receives.push(receives);
            all.stages.push(first..all.positions.len());
            first = all.positions.len();
        }
        all
    }

    /// Keys of a row.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Keys whose gradients come back from each rank, of a row.
    fn returned(&self, rank: usize) -> impl Iterator<Item = &Range<usize>> {
        self.sends.iter().flat_map(move |stage| &stage[rank])
    }

    /// By rank, gradients that go to it: pieces of an array of `rows` rows of keys.
    pub fn returns(&self, rows: usize) -> Vec<Vec<Range<usize>>> {
        let ranks = self.sends.first().map_or(0, Vec::len);
        let to = |rank: usize| {
            let pieces = move || self.receives.iter().flat_map(move |stage| &stage[rank]);
            of_rows(rows, self.len(), pieces)
        };
        (0..ranks).map(to).collect()
    }

    /// By rank, where gradients go that come from it, behind an array of `rows` rows of keys; and how many
    /// keys they are.
    pub fn returned_to(&self, rows: usize) -> (Vec<Vec<Range<usize>>>, usize) {
        let ranks = self.sends.first().map_or(0, Vec::len);
        let mut next = rows * self.len();
        let places = (0..ranks).map(|rank| {
            let pieces = of_rows(rows, 0, || self.returned(rank));
            let places = pieces.into_iter().map(|piece| {
                next += piece.len();
                next - piece.len()..next
            });
            places.collect()
        });
        let places = places.collect();
        (places, next - rows * self.len())
    }

    /// Of each rank, in order, and each of the own keys of `rows` rows: where its gradient from there lies,
    /// -1 where there is none.
    pub fn sources(&self, rows: usize) -> Vec<i32> {
        let (places, _) = self.returned_to(rows);
        let mut sources = vec![-1; places.len() * rows * self.own];
        for (rank, places) in places.iter().enumerate() {
            let sources = &mut sources[rank * rows * self.own..][..rows * self.own];
            if rank == self.rank {
                for (i, source) in sources.iter_mut().enumerate() {
                    *source = (i / self.own * self.len() + i % self.own) as i32;
                }
            }
            let keys = (0..rows).flat_map(|row| {
                self.returned(rank).flat_map(Range::clone).map(move |key| row * self.own + key)
            });
            let from = places.iter().cloned().flatten();
            keys.zip(from).for_each(|(key, from)| sources[key] = from as i32);
        }
        sources
    }
}

/// `pieces` of each of `rows` rows of `len` keys.
pub fn of_rows<'a, I: Iterator<Item = &'a Range<usize>>>(
    rows: usize,
    len: usize,
    pieces: impl Fn() -> I,
) -> Vec<Range<usize>> {
    let row =
        |row: usize| pieces().map(move |piece| row * len + piece.start..row * len + piece.end);
    (0..rows).flat_map(row).collect()
}

/// The place of a position among those of `ranges`.
fn place_of(ranges: &[Range<usize>], position: usize) -> usize {
    let before = ranges.iter().take_while(|range| range.end <= position).map(Range::len);
    let within = ranges.iter().find(|range| range.contains(&position));
    before.sum::<usize>() + within.map_or(0, |range| position - range.start)
}
