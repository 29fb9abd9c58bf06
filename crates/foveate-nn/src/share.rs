//! Parameters that are cut over ranks: which elements of each group a rank owns, an even part, with their
//! gradients and moments.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::moments::BLOCK;
use crate::parameters::{ParameterGroup, ParameterLayout};

/// How long gathered parameters stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reshard {
    /// Until the layer has used them: two groups at once, each gathered for the forward and for the
    /// backward pass.
    #[default]
    Always,
    /// From the forward to the backward pass of a batch.
    AfterBackward,
    /// Until parameters are updated: over all batches of a step.
    Never,
}

/// Over how many ranks parameters are cut, and how long they stay gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cutting {
    /// Ranks; 1 keeps them whole.
    pub parts: usize,
    /// Ranks of `tensor`, which have other parameters: each of them is one of so many that share its own.
    pub tensor: usize,
    /// Whether other ranks hold the same parameters, with gradients of their own.
    pub replicated: bool,
    /// How long gathered groups stay.
    pub reshard: Reshard,
    /// Whether gradients in f32 are rounded to 16 bits on their way.
    pub rounds: bool,
}

impl Cutting {
    /// Nothing is cut.
    pub const WHOLE: Self =
        Self { parts: 1, tensor: 1, replicated: false, reshard: Reshard::Always, rounds: false };
}

/// What a rank owns of a group of parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owned {
    /// Elements that are trained, among all parameters.
    pub trained: Range<usize>,
    /// Elements that are not, among all parameters.
    pub frozen: Range<usize>,
    /// Where each begins in the arrays of the rank.
    first: [usize; 2],
}

impl Owned {
    /// Where what is trained begins in the arrays of the rank.
    pub(crate) fn first_trained(&self) -> usize {
        self.first[0]
    }

    /// Both ranges, and where they lie in the arrays of the rank.
    pub(crate) fn places(&self) -> [(&Range<usize>, usize); 2] {
        [(&self.trained, self.first[0]), (&self.frozen, self.first[1])]
    }
}

/// The elements that one of several ranks owns of each group of parameters. The arrays of the rank hold
/// what is trained of all groups, in order, and behind it what is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    groups: Vec<Owned>,
    trained: usize,
    elems: usize,
}

impl Share {
    /// What is owned of each group.
    pub fn groups(&self) -> &[Owned] {
        &self.groups
    }

    /// Elements of what is trained.
    pub fn trained(&self) -> usize {
        self.trained
    }

    /// Elements of all.
    pub fn elems(&self) -> usize {
        self.elems
    }

    /// What of `place`, a range of all parameters, is owned: pieces of it, with where they begin in the
    /// arrays of the rank.
    pub fn pieces(&self, place: &Range<usize>) -> Vec<(Range<usize>, usize)> {
        let piece = |(own, first): (&Range<usize>, usize)| {
            let start = own.start.max(place.start);
            let here = start..own.end.min(place.end);
            (!here.is_empty()).then(|| (here, first + (start - own.start)))
        };
        self.groups.iter().flat_map(Owned::places).filter_map(piece).collect()
    }
}

impl ParameterLayout {
    /// What rank `part` of `parts` owns: of each group an even part, in order. What is trained is cut
    /// between blocks of 256 elements, which share a scale where moments are kept in 8 bits.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn share(&self, part: usize, parts: usize) -> Share {
        let (mut at, mut behind) = (0usize, 0usize);
        let mut groups: Vec<Owned> = Vec::with_capacity(self.groups().len());
        for group in self.groups() {
            let [trained, frozen] = owned(group, part, parts);
            let first = [at, behind];
            // Sizes that no memory holds are refused later.
            at = at.saturating_add(trained.len());
            behind = behind.saturating_add(frozen.len());
            groups.push(Owned { trained, frozen, first });
        }
        for group in &mut groups {
            group.first[1] = group.first[1].saturating_add(at);
        }
        Share { groups, trained: at, elems: at.saturating_add(behind) }
    }
}

/// The part `part` of `parts` of what is trained of a group, and of what is not.
pub(crate) fn owned(group: &ParameterGroup, part: usize, parts: usize) -> [Range<usize>; 2] {
    assert!(part < parts, "rank {part} of {parts}");
    let even = |place: &Range<usize>, block: usize| {
        let blocks = place.len().div_ceil(block);
        let (each, longer) = (blocks / parts, blocks % parts);
        let start = |part: usize| {
            let block_start = (part * each + part.min(longer)).saturating_mul(block);
            place.start + block_start.min(place.len())
        };
        start(part)..start(part + 1)
    };
    [even(&group.place, BLOCK), even(&group.frozen, 1)]
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::tests::tiny;

    pub(crate) fn layouts() -> Vec<ParameterLayout> {
        let frozen = |name: &str| name.contains("embed") || name.contains("layers.0");
        [(false, false), (true, false), (false, true), (true, true)]
            .map(|(tied, freezes)| {
                let is_frozen = |name: &str| freezes && frozen(name);
                ParameterLayout::new(&tiny(tied), &[], &is_frozen).unwrap()
            })
            .into()
    }

    #[test]
    fn every_element_has_one_owner_whose_arrays_hold_it_once() {
        for layout in layouts() {
            for parts in [1, 2, 3, 4, 8, 16] {
                let mut owners = vec![0; layout.elems()];
                for part in 0..parts {
                    let share = layout.share(part, parts);
                    let mut held = vec![0; share.elems()];
                    for (place, first) in share.pieces(&(0..layout.elems())) {
                        let trained = place.start < layout.trained();
                        assert_eq!(trained, first < share.trained(), "what is trained is first");
                        owners[place.clone()].iter_mut().for_each(|n| *n += 1);
                        held[first..first + place.len()].iter_mut().for_each(|n| *n += 1);
                    }
                    assert!(held.iter().all(|&n| n == 1), "rank {part} of {parts}");
                    // Blocks of moments are whole.
                    let whole = |own: &Owned| {
                        own.trained.start.is_multiple_of(BLOCK)
                            && own.trained.len().is_multiple_of(BLOCK)
                    };
                    assert!(share.groups().iter().all(whole));
                    let even = |own: &Owned, group: &ParameterGroup| {
                        own.trained.len() <= group.place.len() / parts + BLOCK
                            && own.frozen.len() <= group.frozen.len() / parts + 1
                    };
                    assert!(share.groups().iter().zip(layout.groups()).all(|(o, g)| even(o, g)));
                }
                assert!(owners.iter().all(|&n| n == 1), "{parts} ranks");
            }
            let whole = layout.share(0, 1);
            for (place, first) in whole.pieces(&(3..layout.elems())) {
                assert_eq!(place.start, first, "one rank holds all at its place");
            }
        }
    }
}
