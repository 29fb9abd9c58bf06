//! A copy of what a rank keeps of its parameters: masters and moments, in the memory of the host.
//!
//! The bytes are copied as they are kept, so that nothing is computed while steps wait, and no more is copied than a
//! device has. Whoever reads the copy has f32 masters and moments of it, with the bits that
//! [`crate::Blocks::download_weights`] and [`crate::Blocks::download_moment`] give.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::cast_slice_mut;
use foveate::DType;
use half::{bf16, f16};

use crate::array::{Array, Moments, Weights};
use crate::backend::{ArrayBytes, StateMemory};
use crate::error::NnError;
use crate::moments::{self, BLOCK, Moment};
use crate::precision::{MomentDtype, Precision, join_master};

/// Masters and moments of some elements, as they were when [`crate::Model::copy_state`] was called.
#[derive(Debug)]
pub struct StateCopy<M> {
    sections: Vec<Section>,
    memory: Arc<M>,
}

/// What is kept of a range of elements.
#[derive(Debug)]
struct Section {
    /// Which moment; the masters where there is none.
    moment: Option<Moment>,
    /// Elements, in the array of all parameters.
    place: Range<usize>,
    /// The first byte in the memory.
    start: usize,
    form: Form,
}

/// How elements are kept.
#[derive(Debug)]
enum Form {
    /// Each as a number.
    Numbers(DType),
    /// All bf16 weights, then all 16 bits that complete them.
    Masters,
    /// All codes, then all scales, of so many blocks; so many elements of the first lie before the place.
    Blocks { blocks: usize, before: usize },
}

/// Elements that a rank keeps: where they are among all parameters, and from where on in its own arrays.
pub(crate) type Piece = (Range<usize>, usize);

/// What is copied of a rank's arrays, and how it lies in the memory then.
pub(crate) struct Copied<'a, A> {
    sections: Vec<Section>,
    pub from: Vec<ArrayBytes<'a, A>>,
    pub bytes: usize,
}

/// Bytes that are copied of the `pieces` of arrays as `precision` keeps them, with so many moments of what is
/// trained.
pub(crate) fn bytes(precision: Precision, pieces: &[Piece], trained: usize, kept: usize) -> usize {
    let rest = if precision.remainders { 2 } else { 0 };
    let of = |(place, first): &Piece| {
        let moment = match precision.moments {
            MomentDtype::F32 => 4 * place.len(),
            MomentDtype::Bf16 => 2 * place.len(),
            MomentDtype::Int8 => blocks(place, *first).len() * (BLOCK + SCALE),
        };
        let of_trained = if *first < trained { rest * place.len() + kept * moment } else { 0 };
        precision.weights.bytes() * place.len() + of_trained
    };
    pieces.iter().map(of).sum()
}

/// The blocks that a piece lies in.
fn blocks(place: &Range<usize>, first: usize) -> Range<usize> {
    first / BLOCK..(first + place.len()).div_ceil(BLOCK)
}

impl<'a, A: Array> Copied<'a, A> {
    /// Of the `pieces` of arrays that hold what is trained of `trained` elements, and what is not behind it.
    pub fn new(
        precision: Precision,
        pieces: &[Piece],
        trained: usize,
        weights: &'a Weights<A>,
        kept: &'a Moments<A>,
    ) -> Self {
        let mut all = Self { sections: Vec::new(), from: Vec::new(), bytes: 0 };
        for (place, first) in pieces {
            let is_completed = *first < weights.remainders.elems();
            let form = match is_completed {
                true => Form::Masters,
                false => Form::Numbers(weights.array.dtype()),
            };
            all.section(None, place, form);
            all.elems(&weights.array, *first, place.len());
            if is_completed {
                all.elems(&weights.remainders, *first, place.len());
            }
        }
        let arrays = [(Moment::Mean, &kept.mean), (Moment::Square, &kept.square)];
        for (moment, array) in arrays.into_iter().filter(|(_, array)| array.elems() > 0) {
            for (place, first) in pieces.iter().filter(|(_, first)| *first < trained) {
                if precision.moments != MomentDtype::Int8 {
                    all.section(Some(moment), place, Form::Numbers(array.dtype()));
                    all.elems(array, *first, place.len());
                    continue;
                }
                let of = blocks(place, *first);
                let form = Form::Blocks { blocks: of.len(), before: first % BLOCK };
                all.section(Some(moment), place, form);
                all.take(array, of.start * BLOCK, of.len() * BLOCK);
                let scales = trained.div_ceil(BLOCK) * BLOCK;
                all.take(array, scales + of.start * SCALE, of.len() * SCALE);
            }
        }
        all
    }

    fn section(&mut self, moment: Option<Moment>, place: &Range<usize>, form: Form) {
        self.sections.push(Section { moment, place: place.clone(), start: self.bytes, form });
    }

    fn elems(&mut self, array: &'a A, first: usize, count: usize) {
        let size = array.dtype().bytes();
        self.take(array, first * size, count * size);
    }

    fn take(&mut self, array: &'a A, start: usize, bytes: usize) {
        self.from.push(ArrayBytes { array, bytes: start..start + bytes });
        self.bytes += bytes;
    }

    /// What it is in `memory`, once it was copied there.
    pub fn within<M>(self, memory: &Arc<M>) -> StateCopy<M> {
        StateCopy { sections: self.sections, memory: Arc::clone(memory) }
    }
}

/// Bytes of a block's scale.
const SCALE: usize = 4;

impl<M: StateMemory> StateCopy<M> {
    /// Waits until all is there.
    ///
    /// # Errors
    /// When the device fails.
    pub fn wait(&self) -> Result<(), NnError> {
        self.memory.wait()
    }

    /// The f32 masters of the parameters from `first` on.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When they are not all of those that were copied.
    pub fn masters(&self, first: usize, into: &mut [f32]) -> Result<(), NnError> {
        self.read(None, first, into)
    }

    /// A moment of the parameters from `first` on.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When they are not all of those that were copied.
    pub fn moment(&self, moment: Moment, first: usize, into: &mut [f32]) -> Result<(), NnError> {
        self.read(Some(moment), first, into)
    }

    fn read(&self, of: Option<Moment>, first: usize, into: &mut [f32]) -> Result<(), NnError> {
        let (end, mut found) = (first + into.len(), 0);
        for section in self.sections.iter().filter(|section| section.moment == of) {
            let place = section.place.start.max(first)..section.place.end.min(end);
            if !place.is_empty() {
                let into = &mut into[place.start - first..place.end - first];
                section.read(&*self.memory, place.start - section.place.start, into)?;
                found += place.len();
            }
        }
        assert_eq!(found, into.len(), "elements {first}..{end} are among those that were copied");
        Ok(())
    }
}

impl Section {
    /// Reads elements from `first` of the section on.
    fn read(
        &self,
        memory: &impl StateMemory,
        first: usize,
        into: &mut [f32],
    ) -> Result<(), NnError> {
        let (start, count) = (self.start, into.len());
        match self.form {
            Form::Numbers(DType::BF16) => {
                let all = halves(memory, start + 2 * first, count)?;
                into.iter_mut().zip(all).for_each(|(x, bits)| *x = bf16::from_bits(bits).to_f32());
            }
            Form::Numbers(DType::F16) => {
                let all = halves(memory, start + 2 * first, count)?;
                into.iter_mut().zip(all).for_each(|(x, bits)| *x = f16::from_bits(bits).to_f32());
            }
            Form::Numbers(_) => memory.read(start + 4 * first, cast_slice_mut(into))?,
            Form::Masters => {
                let weights = halves(memory, start + 2 * first, count)?;
                let behind = start + 2 * self.place.len();
                let remainders = halves(memory, behind + 2 * first, count)?;
                let both = weights.into_iter().zip(remainders);
                into.iter_mut().zip(both).for_each(|(x, (w, rest))| *x = join_master(w, rest));
            }
            Form::Blocks { blocks, before } => {
                let moment = self.moment.expect("masters are in no blocks");
                let first = before + first;
                let of = first / BLOCK..(first + count).div_ceil(BLOCK);
                let (mut codes, mut scales) = (vec![0; of.len() * BLOCK], vec![0.0; of.len()]);
                memory.read(start + of.start * BLOCK, &mut codes)?;
                let behind = start + blocks * BLOCK;
                memory.read(behind + of.start * SCALE, cast_slice_mut(&mut scales))?;
                let mut values = vec![0.0; of.len() * BLOCK];
                moments::decode(moment, &codes, &scales, &mut values);
                into.copy_from_slice(&values[first - of.start * BLOCK..][..count]);
            }
        }
        Ok(())
    }
}

/// `count` numbers of 16 bits from byte `start` on.
fn halves(memory: &impl StateMemory, start: usize, count: usize) -> Result<Vec<u16>, NnError> {
    let mut all = vec![0; count];
    memory.read(start, cast_slice_mut(&mut all))?;
    Ok(all)
}
