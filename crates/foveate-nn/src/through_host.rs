//! Transfers of any device through the memory of the host.

use std::ops::Range;

use crate::backend::{Blocks, Part, PartMut, Transfers};
use crate::error::NnError;
use crate::sharing::{CutGroup, HostTransfers};

/// Transfers of any device through the memory of the host.
pub struct ThroughHost(Box<dyn HostTransfers>);

impl ThroughHost {
    /// By `host`.
    pub fn new(host: Box<dyn HostTransfers>) -> Self {
        Self(host)
    }
}

impl<B: Blocks> Transfers<B> for ThroughHost {
    fn gather(
        &mut self,
        blocks: &mut B,
        own: &B::Array,
        group: &CutGroup,
        _: &mut B::Array,
    ) -> Result<(), NnError> {
        let places = group.places();
        let mut values = vec![0.0; places.iter().map(Range::len).sum()];
        let (trained, frozen) = values.split_at_mut(places[0].len());
        for (place, into) in places.into_iter().zip([trained, frozen]) {
            blocks.download(Part { array: own, place }, into)?;
        }
        self.0.gather(values)
    }

    fn gathered(
        &mut self,
        blocks: &mut B,
        group: &CutGroup,
        into: &mut B::Array,
    ) -> Result<(), NnError> {
        for (rank, values) in self.0.gathered()?.iter().enumerate() {
            let places = group.of(rank).clone();
            let (trained, frozen) = values.split_at(places[0].len());
            for (place, values) in places.into_iter().zip([trained, frozen]) {
                blocks.fill(PartMut { array: into, place, accumulate: false }, values)?;
            }
        }
        Ok(())
    }

    fn reduce(
        &mut self,
        blocks: &mut B,
        gradients: &mut B::Array,
        group: &CutGroup,
        _: PartMut<'_, B::Array>,
    ) -> Result<(), NnError> {
        let mut values = vec![0.0; group.trained()];
        blocks.download(Part { array: gradients, place: 0..values.len() }, &mut values)?;
        let parts: Vec<_> = (0..group.ranks()).map(|rank| group.of(rank)[0].clone()).collect();
        self.0.reduce(values, &parts)
    }

    fn reduced(
        &mut self,
        blocks: &mut B,
        _: &CutGroup,
        into: PartMut<'_, B::Array>,
    ) -> Result<(), NnError> {
        let mut sums = self.0.reduced()?;
        let PartMut { array, place, accumulate } = into;
        if accumulate {
            let mut before = vec![0.0; sums.len()];
            blocks.download(Part { array, place: place.clone() }, &mut before)?;
            sums.iter_mut().zip(&before).for_each(|(sum, before)| *sum += before);
        }
        blocks.fill(PartMut { array, place, accumulate: false }, &sums)
    }

    fn sum(&mut self, own: f64) -> Result<f64, NnError> {
        self.0.sum(own)
    }
}
