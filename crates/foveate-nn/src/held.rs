//! The parameters that a stage reads, and where its gradients go.

use std::ops::Range;

use crate::backend::{Part, PartMut};
use crate::parameters::{ParameterGroup, ParameterLayout};

/// The parameters that are there.
#[derive(Debug)]
pub(crate) enum Held<'a, A> {
    /// All, at their places.
    All(&'a A),
    /// Gathered groups: what is trained of each, then what is not.
    Groups(&'a ParameterLayout, &'a [A]),
}

impl<A> Clone for Held<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Held<'_, A> {}

impl<'a, A> Held<'a, A> {
    pub fn part(self, place: &Range<usize>) -> Part<'a, A> {
        let (layout, groups) = match self {
            Self::All(array) => return Part { array, place: place.clone() },
            Self::Groups(layout, groups) => (layout, groups),
        };
        if place.is_empty() {
            return Part { array: &groups[0], place: 0..0 };
        }
        let all = layout.groups();
        let trained = layout.trains(place);
        let is_in = |group: &ParameterGroup| match trained {
            true => place.end <= group.place.end,
            false => place.end <= group.frozen.end,
        };
        let index = all.partition_point(|group| !is_in(group));
        let group = &all[index];
        let start = match trained {
            true => place.start - group.place.start,
            false => group.place.len() + (place.start - group.frozen.start),
        };
        Part { array: &groups[index], place: start..start + place.len() }
    }
}

/// Where gradients go.
pub(crate) struct Target<'a, A> {
    /// Those of parameters from `first` on.
    pub array: &'a mut A,
    pub first: usize,
    /// Those of the embedding, where they are apart, and its elements.
    pub embedding: Option<(&'a mut A, usize)>,
    /// Whether they are added to what is there.
    pub accumulate: bool,
}

impl<'a, A> Target<'a, A> {
    /// All in one array.
    pub fn whole(array: &'a mut A, accumulate: bool) -> Self {
        Self { array, first: 0, embedding: None, accumulate }
    }

    pub fn again(&mut self) -> Target<'_, A> {
        let &mut Self { ref mut array, first, ref mut embedding, accumulate } = self;
        let embedding = embedding.as_mut().map(|(array, elems)| (&mut **array, *elems));
        Target { array, first, embedding, accumulate }
    }

    /// The gradient of what lies in `place`; none where it is not trained.
    pub fn part(
        &mut self,
        layout: &ParameterLayout,
        place: &Range<usize>,
    ) -> Option<PartMut<'_, A>> {
        layout.trains(place).then(|| self.of(place))
    }

    /// The gradient of what lies in `place`, which is trained.
    pub fn of(&mut self, place: &Range<usize>) -> PartMut<'_, A> {
        let accumulate = self.accumulate;
        match &mut self.embedding {
            Some((array, elems)) if place.end <= *elems => {
                PartMut { array, place: place.clone(), accumulate }
            }
            _ => {
                // An empty place, such as that of no learned buffers, may be anywhere.
                let start = place.start.saturating_sub(self.first);
                PartMut { array: self.array, place: start..start + place.len(), accumulate }
            }
        }
    }
}
