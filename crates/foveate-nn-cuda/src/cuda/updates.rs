//! The optimiser: what it goes through, the norm of gradients, and the update of weights.

use std::ops::Range;

use foveate_gpu::abi::{Abi, Address};
use foveate_gpu::driver::{Allocation, default_timeout};
use foveate_gpu::{DeviceArray, ElementType};
use foveate_nn::{Array, Moments, NnError, OptimizerStep, Part, Rule, Span, SumOverRanks, Weights};

use super::array::{CudaArray, Place, numbers};
use super::clock::Timed;
use super::totals::CudaTotals;
use super::{Cuda, failed};
use crate::optimizer::{
    self, CONSTANTS_LEN, Factor, Piece, Pieces, Squares, StepConstants, TOTALS_LEN, Update,
};

/// What AdamW goes through, in device memory.
#[derive(Debug)]
pub struct CudaSpans {
    pieces: Pieces,
    table: Allocation,
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
        let pieces: Vec<Piece> = spans.iter().map(piece).collect();
        let pieces = Pieces::new(&pieces).map_err(|e| failed(&e))?;
        let table = self.copied(&pieces.bytes())?;
        Ok(CudaSpans { pieces, table })
    }

    /// The sum of squares of elements of an array, for which it waits once.
    pub(super) fn sum_of_squares(
        &mut self,
        of: &CudaArray,
        places: &[Range<usize>],
    ) -> Result<f64, NnError> {
        let parts: Vec<usize> = places.iter().map(|place| optimizer::parts(place.len())).collect();
        let mut squares = vec![[0; 8]; parts.iter().sum()];
        let partial = self.scratch("squares", 8 * squares.len())?;
        let mut address = partial.address();
        for (place, parts) in places.iter().zip(parts).filter(|(_, parts)| *parts > 0) {
            let gradients = Part { array: of, place: place.clone() }.vector();
            let shape = [parts];
            let partial = DeviceArray::new(address, ElementType::F64, &shape);
            self.run(&Squares { gradients, partial })?;
            address += 8 * parts as Address;
        }
        let bytes = squares.as_flattened_mut();
        partial.read(bytes, default_timeout()).map_err(|e| failed(&e))?;
        Ok(squares.into_iter().map(f64::from_ne_bytes).sum())
    }

    /// Queues the sum of squares of gradients, and from it the factor of the step. Waits for the former
    /// where `sum` makes it that of all ranks.
    pub(super) fn clip_gradients(
        &mut self,
        step: &OptimizerStep,
        gradients: &CudaArray,
        more: bool,
        sum: Option<SumOverRanks<'_>>,
        totals: &mut CudaTotals,
    ) -> Result<(), NnError> {
        self.timed(Timed::Clip, |this| {
            let mut parts = [optimizer::parts(gradients.elems())];
            let partial = this.scratch("squares of gradients", 8 * parts[0].max(1))?;
            // A rank of many may own none.
            if parts[0] > 0 {
                let partial = numbers(&partial, &parts);
                this.run(&Squares { gradients: gradients.vector(), partial })?;
            }
            if let Some(sum) = sum {
                let mut own = vec![[0; 8]; parts[0]];
                let bytes = own.as_flattened_mut();
                partial.read(bytes, default_timeout()).map_err(|e| failed(&e))?;
                let mut nats = [0; 8];
                totals.memory.read(&mut nats, default_timeout()).map_err(|e| failed(&e))?;
                let own = own.into_iter().map(f64::from_ne_bytes).sum();
                let of_all =
                    sum(if f64::from_ne_bytes(nats).is_finite() { own } else { f64::NAN })?;
                partial.write(&of_all.to_ne_bytes()).map_err(|e| failed(&e))?;
                parts = [1];
            }
            let partial = numbers(&partial, &parts);
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
        self.timed(Timed::Update, |this| {
            let remainders_len = [weights.remainders.elems()];
            let remainders = this.precision.remainders.then(|| {
                let at = weights.remainders.vector().start();
                DeviceArray::new(at, ElementType::I16, &remainders_len)
            });
            let constants = this.constants(step)?;
            let rule = match step.rule {
                Rule::AdamW(adamw) => optimizer::Rule::AdamW {
                    betas: [adamw.beta1 as f32, adamw.beta2 as f32],
                    eps: adamw.eps as f32,
                },
                Rule::Sgd(sgd) => optimizer::Rule::Momentum(sgd.momentum as f32),
            };
            this.run(&Update {
                weights: weights.array.vector(),
                remainders,
                gradients: gradients.vector(),
                first_gradient,
                means: moments.mean.vector(),
                squares: step.rule.keeps_squares().then(|| moments.square.vector()),
                trained: elems,
                pieces: &spans.pieces,
                piece_table: numbers(&spans.table, &[spans.pieces.len_f64()]),
                constants: numbers(&constants, &[CONSTANTS_LEN]),
                totals: numbers(&totals.memory, &[TOTALS_LEN]),
                rule,
                weight_decay: step.rule.weight_decay() as f32,
            })
        })?;
        self.queue_readback(totals)
    }
}
