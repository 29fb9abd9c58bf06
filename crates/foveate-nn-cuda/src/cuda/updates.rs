//! The optimiser: what it goes through, the norm of gradients, and the update of weights.

use std::ops::Range;

use foveate_gpu::abi::{Abi, Address};
use foveate_gpu::driver::{Allocation, default_timeout};
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType};
use foveate_nn::{
    Array, MomentDtype, Moments, NnError, OptimizerStep, Part, RankSums, Rule, Span, SumOverRanks,
    Weights,
};

use super::array::{CudaArray, Place, numbers, part_of};
use super::clock::Timed;
use super::passage::{self, Passage};
use super::totals::CudaTotals;
use super::{Cuda, failed};
use crate::optimizer::{
    self, CONSTANTS_LEN, Factor, Piece, Pieces, Squares, StepConstants, TOTALS_LEN, Update,
};

/// What the optimiser goes through, in device memory.
#[derive(Debug)]
pub struct CudaSpans {
    /// What one launch updates: all, or where moments lie in the memory of the host, each piece of these.
    launches: Vec<Launch>,
    /// Of all of them, one after another.
    _table: Allocation,
}

/// What one launch updates.
#[derive(Debug)]
struct Launch {
    pieces: Pieces,
    /// Where the table of its pieces starts.
    table: Address,
    /// Which piece of the moments, and which elements of all it has; their places count from the first of
    /// these.
    moments: Option<(usize, Range<usize>)>,
}

/// What a launch updates, and what it updates it with.
struct Arena {
    weights: DeviceTensor<1>,
    /// Where there are some.
    remainders: DeviceTensor<1>,
    gradients: DeviceTensor<1>,
    /// Which weight the first gradient is of.
    first_gradient: usize,
    means: DeviceTensor<1>,
    /// Where the rule keeps them.
    squares: DeviceTensor<1>,
    trained: usize,
}

impl Arena {
    /// Elements `place` alone, whose moments are on the device as `piece`.
    fn part(&self, place: &Range<usize>, piece: passage::Piece) -> Self {
        let (first, trained) = (place.start, place.len());
        Self {
            weights: part_of(&self.weights, first, trained),
            remainders: part_of(&self.remainders, first, trained),
            gradients: part_of(&self.gradients, first - self.first_gradient, trained),
            first_gradient: 0,
            means: piece.moment(0),
            squares: piece.moment(1),
            trained,
        }
    }
}

/// What of `spans` lies in each piece of `piece` elements, counted from the first that they reach; with the
/// piece's number, and the elements that they reach over.
fn by_piece(spans: &[Span], piece: usize) -> Vec<(usize, Range<usize>, Vec<Span>)> {
    let Some(end) = spans.last().map(|span| span.place.end) else { return Vec::new() };
    let all = (spans[0].place.start / piece..end.div_ceil(piece)).filter_map(|number| {
        let of = Span::within(spans, &(number * piece..(number + 1) * piece));
        let reach = of.first()?.place.start..of.last()?.place.end;
        let from_first = |span: Span| {
            let place = span.place.start - reach.start..span.place.end - reach.start;
            Span { place, ..span }
        };
        Some((number, reach.clone(), of.into_iter().map(from_first).collect()))
    });
    all.collect()
}

impl Cuda {
    /// What the optimiser's kernels are told of a step, in device memory.
    fn constants(&self, step: &OptimizerStep) -> Result<Allocation, NnError> {
        let OptimizerStep { rule, step, rate, clip_norm, seed } = *step;
        let constants = match rule {
            Rule::AdamW(adamw) => {
                StepConstants::new(step, seed, rate, [adamw.beta1, adamw.beta2], clip_norm)
            }
            Rule::Sgd(_) => StepConstants::of_momentum(step, seed, rate, clip_norm),
        };
        self.copied(&constants.bytes())
    }

    /// Places of weights with their treatment, uploaded once.
    pub(super) fn upload_spans(&mut self, spans: &[Span]) -> Result<CudaSpans, NnError> {
        let piece = |&Span { ref place, origin, treatment }: &Span| Piece {
            range: place.clone(),
            origin,
            rate: treatment.rate,
            decay: treatment.decay,
        };
        let parts: Vec<_> = match self.precision.host_moments {
            true => by_piece(spans, self.piece)
                .into_iter()
                .map(|(number, place, spans)| (Some((number, place)), spans))
                .collect(),
            false => vec![(None, spans.to_vec())],
        };
        let (mut bytes, mut launches) = (Vec::new(), Vec::new());
        for (moments, spans) in parts {
            let pieces: Vec<Piece> = spans.iter().map(piece).collect();
            let pieces = Pieces::new(&pieces).map_err(|e| failed(&e))?;
            let table = bytes.len() as Address;
            bytes.extend(pieces.bytes());
            launches.push(Launch { pieces, table, moments });
        }
        let table = self.copied(&bytes)?;
        launches.iter_mut().for_each(|launch| launch.table += table.address());
        Ok(CudaSpans { launches, _table: table })
    }

    /// Queues the sum of squares of gradients, and from it the factor of the step. Waits for the former, once,
    /// where `over` makes it that of all ranks.
    pub(super) fn clip_gradients(
        &mut self,
        step: &OptimizerStep,
        gradients: &CudaArray,
        more: bool,
        over: Option<SumOverRanks<'_>>,
        totals: &mut CudaTotals,
    ) -> Result<(), NnError> {
        self.timed(Timed::Clip, |this| {
            let whole = 0..gradients.elems();
            let elsewhere = over.as_ref().map_or(&[][..], |over| over.elsewhere);
            let places = || std::iter::once(&whole).chain(elsewhere);
            let parts: Vec<usize> = places().map(|place| optimizer::parts(place.len())).collect();
            let all = parts.iter().sum::<usize>();
            // And three numbers of the totals.
            let partial = this.scratch("squares of gradients", 8 * (all + 3))?;
            let mut address = partial.address();
            // A rank of many may own none.
            for (place, parts) in places().zip(&parts).filter(|(_, parts)| **parts > 0) {
                let gradients = Part { array: gradients, place: place.clone() }.vector();
                let shape = [*parts];
                let partial = DeviceArray::new(address, ElementType::F64, &shape);
                this.run(&Squares { gradients, partial })?;
                address += 8 * *parts as Address;
            }
            let (mut squares, mut parts_of_all) = (partial, [parts[0]]);
            if let Some(over) = over {
                // Loss, labelled tokens and z-loss, which totals begin with, come with them, so that this waits
                // once.
                let stream = this.queue.stream();
                // SAFETY: both are memory of this device, of 24 bytes or more from there on, and belong to
                // this queue.
                unsafe { stream.copy(address, totals.memory.address(), stream.device(), 24) }
                    .map_err(|e| failed(&e))?;
                let mut read = vec![[0; 8]; all + 3];
                let bytes = read.as_flattened_mut();
                squares.read(bytes, default_timeout()).map_err(|e| failed(&e))?;
                let sum = |squares: &[[u8; 8]]| -> f64 {
                    squares.iter().map(|&square| f64::from_ne_bytes(square)).sum()
                };
                let own = RankSums {
                    squares: sum(&read[..parts[0]]) - sum(&read[parts[0]..all]),
                    nats: f64::from_ne_bytes(read[all]),
                    labelled: u64::from_ne_bytes(read[all + 1]),
                    z_loss: f64::from_ne_bytes(read[all + 2]),
                };
                let of_all = over.of_all(own, more)?;
                if !more {
                    let RankSums { nats, z_loss, labelled, .. } = of_all;
                    let words = [nats.to_ne_bytes(), labelled.to_ne_bytes(), z_loss.to_ne_bytes()];
                    totals.memory.write(words.as_flattened()).map_err(|e| failed(&e))?;
                }
                (squares, parts_of_all) = (this.copied(&of_all.squares.to_ne_bytes())?, [1]);
            }
            let partial = numbers(&squares, &parts_of_all);
            let constants = this.constants(step)?;
            let constants = numbers(&constants, &[CONSTANTS_LEN]);
            let totals = numbers(&totals.memory, &[TOTALS_LEN]);
            let stopped = this.stopped.as_ref().expect("there are totals");
            let stopped = numbers(stopped, &[1]);
            this.run(&Factor { partial, constants, totals, stopped, more })
        })
    }

    /// Queues the update, and behind it the copy of the totals.
    pub(super) fn update_weights(
        &mut self,
        step: &OptimizerStep,
        spans: &CudaSpans,
        weights: &mut Weights<CudaArray>,
        (gradients, first_gradient): (&CudaArray, usize),
        moments: &mut Moments<CudaArray>,
        elems: usize,
        totals: &mut CudaTotals,
    ) -> Result<(), NnError> {
        self.await_copies_out()?;
        if self.precision.host_moments {
            let bytes = self.piece.min(elems) * moments.mean.dtype.bytes();
            let kept = passage::kept(moments).count();
            if !self.passage.as_ref().is_some_and(|passage| passage.fits(bytes, kept)) {
                self.passage = Some(Passage::new(self, bytes, kept)?);
            }
        }
        let updated = self.timed(Timed::Update, |this| {
            let constants = this.constants(step)?;
            let all = Arena {
                weights: weights.array.vector(),
                remainders: weights.remainders.vector(),
                gradients: gradients.vector(),
                first_gradient,
                means: moments.mean.vector(),
                squares: moments.square.vector(),
                trained: elems,
            };
            let queued = (&constants, &*totals);
            for launch in &spans.launches {
                match this.passage.as_ref().zip(launch.moments.as_ref()) {
                    None => this.update_arena(step, &all, launch, queued)?,
                    Some((passage, (number, place))) => {
                        let piece =
                            passage.bring(&this.queue, &mut this.clock, moments, *number, place)?;
                        this.update_arena(step, &all.part(place, piece), launch, queued)?;
                        passage.take_back(&this.queue, &mut this.clock, moments, piece, place)?;
                    }
                }
            }
            Ok(())
        });
        if let (Err(_), Some(passage)) = (&updated, &self.passage) {
            passage.settle();
        }
        updated?;
        self.queue_readback(totals)
    }

    fn update_arena(
        &self,
        step: &OptimizerStep,
        arena: &Arena,
        launch: &Launch,
        (constants, totals): (&Allocation, &CudaTotals),
    ) -> Result<(), NnError> {
        let Arena { weights, remainders, gradients, first_gradient, means, squares, trained } =
            *arena;
        let (trained_len, table_len) = ([trained], [launch.pieces.len_f64()]);
        let remainders = self
            .precision
            .remainders
            .then(|| DeviceArray::new(remainders.start(), ElementType::I16, &trained_len));
        let rule = match step.rule {
            Rule::AdamW(adamw) => optimizer::Rule::AdamW {
                betas: [adamw.beta1 as f32, adamw.beta2 as f32],
                eps: adamw.eps as f32,
            },
            Rule::Sgd(sgd) => optimizer::Rule::Momentum(sgd.momentum as f32),
        };
        self.run(&Update {
            weights,
            remainders,
            gradients,
            first_gradient,
            means,
            squares: step.rule.keeps_squares().then_some(squares),
            codes: self.precision.moments == MomentDtype::Int8,
            trained,
            pieces: &launch.pieces,
            piece_table: DeviceArray::new(launch.table, ElementType::F64, &table_len),
            constants: numbers(constants, &[CONSTANTS_LEN]),
            totals: numbers(&totals.memory, &[TOTALS_LEN]),
            rule,
            weight_decay: step.rule.weight_decay() as f32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foveate_nn::Treatment;

    #[test]
    fn spans_are_cut_where_pieces_of_moments_meet() {
        let span = |place: Range<usize>, rate| {
            let treatment = Treatment { rate, decay: 0.0 };
            Span { origin: place.start + 1000, place, treatment }
        };
        let spans = [span(10..20, 1.0), span(20..50, 0.5), span(90..100, 1.0)];
        let found = by_piece(&spans, 16);
        let numbers: Vec<_> =
            found.iter().map(|(number, place, _)| (*number, place.clone())).collect();
        assert_eq!(
            numbers,
            [(0, 10..16), (1, 16..32), (2, 32..48), (3, 48..50), (5, 90..96), (6, 96..100)]
        );
        // Places count from the first element of a piece that is updated; random bits do not.
        let at = |place, origin, rate| Span { origin, ..span(place, rate) };
        assert_eq!(found[1].2, [at(0..4, 1016, 1.0), at(4..16, 1020, 0.5)]);
        let all: Vec<Span> = found.into_iter().flat_map(|(.., spans)| spans).collect();
        assert_eq!(all.iter().map(|span| span.place.len()).sum::<usize>(), 50);
        assert_eq!(by_piece(&[], 16), []);
    }
}
