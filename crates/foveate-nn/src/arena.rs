//! One place for the arrays of a pass: where each lies, by the blocks between which it is needed.
//!
//! Arrays that are never needed at once share memory. Where a step has one batch, they lie in the memory
//! of its gradients, too: those of a group of parameters are needed from the group's backward pass on,
//! when the arrays of the groups behind it are done with.

use std::ops::Range;

use foveate::DType;

use crate::backend::{Array, Blocks, numbers_of};
use crate::dry::NotedArray;
use crate::error::NnError;

/// Bytes that every array starts at a multiple of.
const ALIGN: u64 = 512;

/// Memory that holds something else from a block of the pass on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Idle {
    /// Its bytes.
    pub place: Range<u64>,
    /// The first block that uses it for what it is.
    pub until: usize,
}

/// Where the arrays of a pass lie: in memory that is idle, and behind its end in an arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    /// The bytes of each array, in the order in which they are made.
    of_arrays: Vec<Range<u64>>,
    /// Where the arena begins.
    border: u64,
    /// Bytes of the arena.
    pub arena: u64,
}

impl Places {
    /// Of `arrays`, some of which may lie in memory that is `idle`.
    ///
    /// Those that are done with first are placed first, and as high in what is idle as they fit: the
    /// gradients of later groups are needed first, too.
    pub fn new(arrays: &[NotedArray], idle: &[Idle]) -> Self {
        let border = idle.iter().map(|idle| idle.place.end).max().unwrap_or(0);
        let border = border - border % ALIGN;
        let mut order: Vec<usize> = (0..arrays.len()).collect();
        let end = |array: &NotedArray| array.needed.last().map_or(0, |needed| needed.end);
        order.sort_by_key(|&i| (end(&arrays[i]), std::cmp::Reverse(arrays[i].bytes)));
        let mut of_arrays = vec![0..0; arrays.len()];
        for (count, &i) in order.iter().enumerate() {
            let NotedArray { bytes, needed, .. } = &arrays[i];
            let size = bytes.checked_next_multiple_of(ALIGN).unwrap_or(*bytes);
            let meets = |other: &Range<usize>| {
                needed.iter().any(|own| own.start < other.end && other.start < own.end)
            };
            let others = order[..count].iter().filter(|&&i| arrays[i].needed.iter().any(meets));
            let idle = idle.iter().filter(|idle| meets(&(idle.until..usize::MAX)));
            let mut taken: Vec<Range<u64>> = others.map(|&i| of_arrays[i].clone()).collect();
            taken.extend(idle.map(|Idle { place, .. }| {
                let start = place.start - place.start % ALIGN;
                let end = place.end.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX);
                start.min(border)..end.min(border)
            }));
            let start = gap(taken, size, border);
            of_arrays[i] = start..start.saturating_add(size);
        }
        let end = of_arrays.iter().map(|place| place.end).max().unwrap_or(0);
        Self { of_arrays, border, arena: end.saturating_sub(border) }
    }
}

/// Where `size` bytes fit between `taken` ranges: in the highest place that ends at `border` or before it,
/// or in the lowest behind it.
fn gap(mut taken: Vec<Range<u64>>, size: u64, border: u64) -> u64 {
    // Nothing lies on both sides of the border.
    taken.push(border..border);
    taken.sort_unstable_by_key(|place| (place.start, place.end));
    let (mut end, mut before) = (0, None);
    for place in taken {
        if place.start.saturating_sub(end) >= size {
            if place.start > border {
                break;
            }
            before = Some(place.start - size);
        }
        end = place.end.max(end);
    }
    before.unwrap_or(end)
}

/// The memory of the arrays of a pass, and who is next to get some.
#[derive(Debug, Default)]
pub(crate) struct Arena<A> {
    own: A,
    idle: A,
    places: Option<Places>,
    next: usize,
}

impl<A: Array> Arena<A> {
    /// Whether it is there, and too small for `places`.
    pub fn must_grow(&self, places: &Places) -> bool {
        let bytes = self.bytes();
        0 < bytes && bytes < places.arena
    }

    fn bytes(&self) -> u64 {
        (self.own.elems() * self.own.dtype().bytes()) as u64
    }

    /// Gives the arrays that are made from here on their `places`, those below the border in the memory of
    /// `idle`; without places each has memory of its own.
    pub fn begin<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        places: Option<&Places>,
        idle: Option<&A>,
    ) -> Result<(), NnError> {
        self.next = 0;
        if self.places.as_ref() != places {
            self.places = places.cloned();
        }
        let Some(Places { arena, .. }) = places else {
            self.idle = A::default();
            return Ok(());
        };
        if self.bytes() < *arena {
            let elems = usize::try_from(arena.div_ceil(4)).unwrap_or(usize::MAX);
            blocks.resize("activations", &mut self.own, DType::F32, elems)?;
        }
        match idle {
            None => self.idle = A::default(),
            Some(idle) => {
                blocks.resize_within(&mut self.idle, idle.dtype(), idle.elems(), (idle, 0))?;
            }
        }
        Ok(())
    }

    /// Where all arrays of a pass lie, as numbers.
    pub fn numbers(&self) -> impl Iterator<Item = u64> {
        let places = self.places.iter().flat_map(|places| {
            let of_arrays = places.of_arrays.iter().map(|place| place.start);
            [places.border, places.arena].into_iter().chain(of_arrays)
        });
        [&self.own, &self.idle].into_iter().flat_map(numbers_of).chain(places)
    }

    /// The next array gets the first place again: for a pass that is begun once more.
    pub fn rewind(&mut self) {
        self.next = 0;
    }

    /// [`Blocks::resize`] at the next place.
    pub fn resize<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        name: &'static str,
        array: &mut A,
        dtype: DType,
        elems: usize,
    ) -> Result<(), NnError> {
        let places = self.places.as_ref();
        let place =
            places.and_then(|places| Some((places.border, places.of_arrays.get(self.next)?)));
        let Some((border, place)) = place else {
            return blocks.resize(name, array, dtype, elems);
        };
        self.next += 1;
        let within = match place.start < border {
            true => (&self.idle, place.start),
            false => (&self.own, place.start - border),
        };
        blocks.resize_within(array, dtype, elems, (within.0, within.1 as usize))
    }
}

#[cfg(test)]
mod tests {
    use foveate::tensor::random::Random;

    use super::*;

    fn array(bytes: u64, needed: Vec<Range<usize>>) -> NotedArray {
        NotedArray { name: "x", dtype: DType::F32, bytes, needed }
    }

    fn needed_once(bytes: u64, needed: Range<usize>) -> NotedArray {
        array(bytes, std::iter::once(needed).collect())
    }

    /// No two arrays that are needed at once lie in one place, nor one in memory that is needed for what it
    /// is, nor on both sides of the border.
    fn check(arrays: &[NotedArray], idle: &[Idle]) -> Places {
        let places = Places::new(arrays, idle);
        let meet = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
        let share = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
        for (i, place) in places.of_arrays.iter().enumerate() {
            assert!(place.end - place.start >= arrays[i].bytes && place.start % ALIGN == 0);
            assert!(place.end <= places.border || place.start >= places.border);
            assert!(place.end <= places.border + places.arena);
            let needed = &arrays[i].needed;
            for (j, other) in places.of_arrays[..i].iter().enumerate() {
                let at_once = needed.iter().any(|a| arrays[j].needed.iter().any(|b| meet(a, b)));
                assert!(!(at_once && share(place, other)), "{i} {place:?} and {j} {other:?}");
            }
            for idle in idle {
                let at_once = needed.iter().any(|a| a.end > idle.until);
                // Behind the border begins the arena.
                let held = idle.place.start..idle.place.end.min(places.border);
                assert!(!(at_once && share(place, &held)), "{i} {place:?} in {idle:?}");
            }
        }
        places
    }

    #[test]
    fn arrays_needed_at_once_lie_apart_and_others_share() {
        // The second is done with when the third begins.
        let arrays = [needed_once(1024, 0..9), needed_once(2048, 1..4), needed_once(1536, 4..8)];
        assert_eq!(check(&arrays, &[]).arena, 1024 + 2048);
        // What is idle until block 4 takes the second.
        let idle = [Idle { place: 0..3000, until: 4 }];
        assert_eq!(check(&arrays, &idle).arena, 1024 + 1536);
        assert_eq!(check(&[], &[]), Places::default());
    }

    #[test]
    fn random_arrays_never_meet() {
        let mut random = Random::new(5);
        for _ in 0..200 {
            let range = |random: &mut Random| {
                let start = random.below(40);
                start..start + 1 + random.below(12)
            };
            let arrays: Vec<NotedArray> = (0..random.below(40))
                .map(|_| {
                    let count = 1 + random.below(3);
                    let needed: Vec<_> = (0..count).map(|_| range(&mut random)).collect();
                    array(random.below(9000) as u64, needed)
                })
                .collect();
            let (mut idle, mut at) = (Vec::new(), 0);
            for _ in 0..random.below(5) {
                let end = at + random.below(20_000) as u64;
                idle.push(Idle { place: at..end, until: random.below(50) });
                at = end;
            }
            check(&arrays, &idle);
        }
    }
}
