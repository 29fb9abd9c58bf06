//! Transfers of any device through the memory of the host.

use std::ops::Range;

use crate::backend::{Blocks, Part, PartMut, StreamTransfers, Transfers};
use crate::error::NnError;
use crate::sharing::{CutGroup, HostTransfers, TensorTransfers};
use crate::tensor::{Holders, StreamCut};

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
}

/// The stream of any device by way of the memory of the host, for which a pass waits.
pub struct StreamThroughHost(Box<dyn TensorTransfers>);

impl StreamThroughHost {
    /// By `host`.
    pub fn new(host: Box<dyn TensorTransfers>) -> Self {
        Self(host)
    }
}

/// The elements `places` of `array`, one after another.
fn read<B: Blocks>(
    blocks: &mut B,
    array: &B::Array,
    places: impl Iterator<Item = Range<usize>>,
) -> Result<Vec<f32>, NnError> {
    let mut values = Vec::new();
    for place in places {
        let start = values.len();
        values.resize(start + place.len(), 0.0);
        blocks.download(Part { array, place }, &mut values[start..])?;
    }
    Ok(values)
}

/// `values`, one after another, to the elements `places` of `array`.
fn write<B: Blocks>(
    blocks: &mut B,
    array: &mut B::Array,
    places: impl Iterator<Item = Range<usize>>,
    mut values: &[f32],
) -> Result<(), NnError> {
    for place in places {
        let (some, rest) = values.split_at(place.len());
        blocks.fill(PartMut { array, place, accumulate: false }, some)?;
        values = rest;
    }
    Ok(())
}

impl<B: Blocks> StreamTransfers<B> for StreamThroughHost {
    fn gather(
        &mut self,
        blocks: &mut B,
        cut: StreamCut,
        own: &B::Array,
        whole: &mut B::Array,
    ) -> Result<(), NnError> {
        let own = read(blocks, own, std::iter::once(0..cut.elems(cut.part)))?;
        for (part, values) in self.0.all_gather(&own)?.iter().enumerate() {
            write(blocks, whole, cut.places(part), values)?;
        }
        Ok(())
    }

    /// It is done.
    fn gathered(&mut self, _: &mut B) -> Result<(), NnError> {
        Ok(())
    }

    fn scatter(
        &mut self,
        blocks: &mut B,
        cut: StreamCut,
        terms: &B::Array,
        add: Option<&B::Array>,
        own: &mut B::Array,
    ) -> Result<(), NnError> {
        let parts = 0..cut.parts;
        let values = read(blocks, terms, parts.clone().flat_map(|part| cut.places(part)))?;
        let lengths: Vec<usize> = parts.map(|part| cut.elems(part)).collect();
        let mut sums = self.0.reduce_scatter(&values, &lengths)?;
        let all = 0..sums.len();
        if let Some(add) = add {
            let add = read(blocks, add, std::iter::once(all.clone()))?;
            sums.iter_mut().zip(add).for_each(|(sum, add)| *sum += add);
        }
        write(blocks, own, std::iter::once(all), &sums)
    }

    fn sum_copies(
        &mut self,
        blocks: &mut B,
        among: Holders,
        gradients: &mut B::Array,
        places: &[Range<usize>],
    ) -> Result<(), NnError> {
        let mut values = read(blocks, gradients, places.iter().cloned())?;
        self.0.sum_copies(among, &mut values)?;
        write(blocks, gradients, places.iter().cloned(), &values)
    }
}
