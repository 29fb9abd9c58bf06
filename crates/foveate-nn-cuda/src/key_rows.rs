//! Where keys of several ranks lie on one of them, and which gradients of them go where.
//!
//! A rank has, of each row of the batch, its own keys and those that arrive: all that its queries see, in one array.
//! Where attention waits for all of them they lie in order of position: neighbours are in one tile, and what a mask
//! lets a tile of queries see is as it is in the row. Otherwise own keys come first, behind them those of each
//! stage, by rank. Gradients of keys lie alike, and return by the way that the keys came; the rank that holds them
//! has what others send behind its own array, and sums in order of rank.

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
    /// Where own keys lie, in their order; pieces that lie side by side are one.
    pub own: Vec<Range<usize>>,
    rank: usize,
}

impl KeyRows {
    /// Those of `plan`, whose keys move in `stages`.
    pub fn new(plan: &ContextPlan, stages: &[KeyStage]) -> Self {
        // Positions, in the order in which their keys lie.
        let mut order = plan.tokens[plan.rank].clone();
        let mut first = 0;
        let of_stage = |stage: &KeyStage| {
            order.extend(stage.receives.iter().flatten().cloned());
            let end = order.iter().map(Range::len).sum();
            std::mem::replace(&mut first, end)..end
        };
        let of_stages = stages.iter().map(of_stage).collect();
        if let [_] = stages {
            order.sort_unstable_by_key(|range| range.start);
        }
        let mut next = 0;
        let placed = |range: &Range<usize>| {
            next += range.len();
            (range.clone(), next - range.len())
        };
        let placed: Vec<(Range<usize>, usize)> = order.iter().map(placed).collect();
        let place = |range: &Range<usize>| {
            let within = placed.iter().find(|(of, _)| of.contains(&range.start));
            let (of, first) = within.expect("what moves is a rank's own or arrives");
            let start = first + range.start - of.start;
            start..start + range.len()
        };
        let places = |of: &[Vec<Range<usize>>]| -> Vec<Vec<Range<usize>>> {
            of.iter().map(|of_rank| of_rank.iter().map(place).collect()).collect()
        };
        let mut own: Vec<Range<usize>> = Vec::new();
        for piece in plan.tokens[plan.rank].iter().map(place) {
            match own.last_mut().filter(|last| last.end == piece.start) {
                Some(last) => last.end = piece.end,
                None => own.push(piece),
            }
        }
        Self {
            stages: of_stages,
            positions: order.iter().cloned().flatten().map(|p| p as i32).collect(),
            sends: stages.iter().map(|stage| places(&stage.sends)).collect(),
            receives: stages.iter().map(|stage| places(&stage.receives)).collect(),
            own,
            rank: plan.rank,
        }
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
        let own: Vec<usize> = self.own.iter().cloned().flatten().collect();
        let mut sources = vec![-1; places.len() * rows * own.len()];
        for (rank, places) in places.iter().enumerate() {
            let sources = &mut sources[rank * rows * own.len()..][..rows * own.len()];
            if rank == self.rank {
                for (i, source) in sources.iter_mut().enumerate() {
                    *source = (i / own.len() * self.len() + own[i % own.len()]) as i32;
                }
            }
            // Own keys lie in their order.
            let which = |place: usize| own.binary_search(&place).expect("its own key");
            let keys = (0..rows).flat_map(|row| {
                let keys = self.returned(rank).flat_map(Range::clone).map(which);
                keys.map(move |key| (row, key))
            });
            let from = places.iter().cloned().flatten();
            keys.zip(from)
                .for_each(|((row, key), from)| sources[row * own.len() + key] = from as i32);
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
