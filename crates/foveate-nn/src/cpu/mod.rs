//! The blocks on the processor, on the rayon pool they are called in.
//!
//! Elementwise work is cut into tasks of whole tokens; every sum over tokens is taken in an order
//! fixed by the shapes, so no result depends on the number of threads. Inner loops are plain
//! loops over slices, compiled for each instruction set (`level`).

pub(crate) mod attention;
mod embed;
mod level;
mod loss;
pub(crate) mod math;
mod norm;
mod rope;
mod swiglu;
#[cfg(test)]
mod tests;

use rayon::prelude::*;

use crate::backend::{Blocks, LayerAttention, LinearShape, PackedHeads, Part, PartMut, Rotation};
use crate::config::RopePairing;
use crate::error::NnError;
use crate::matmul::{Matrix, matmul, matmul_deep};
use crate::rope::RopeTable;

/// The processor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

/// Tokens of one elementwise task.
const TASK: usize = 32;

impl<'a> Part<'a, Vec<f32>> {
    fn values(&self) -> &'a [f32] {
        &self.array[self.place.clone()]
    }
}

impl<'a> PartMut<'a, Vec<f32>> {
    fn values(self) -> &'a mut [f32] {
        &mut self.array[self.place]
    }
}

impl Blocks for Cpu {
    type Array = Vec<f32>;

    fn resize(&self, array: &mut Vec<f32>, elems: usize) {
        array.resize(elems, 0.0);
    }

    fn embed(&self, tokens: &[u32], table: Part<'_, Vec<f32>>, width: usize, out: &mut Vec<f32>) {
        embed::gather(tokens, table.values(), width, out);
    }

    fn embed_backward(
        &self,
        tokens: &[u32],
        d_out: &Vec<f32>,
        width: usize,
        d_table: PartMut<'_, Vec<f32>>,
    ) {
        embed::scatter_add(tokens, d_out, width, d_table.values());
    }

    fn rms_norm(
        &self,
        x: &Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        eps: f32,
        inverse: &mut Vec<f32>,
        out: &mut Vec<f32>,
    ) {
        norm::forward(x, weight.values(), eps, inverse, out);
    }

    fn add_rms_norm(
        &self,
        residual: &Vec<f32>,
        x: &mut Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        eps: f32,
        inverse: &mut Vec<f32>,
        out: &mut Vec<f32>,
    ) {
        norm::add_forward(residual, x, weight.values(), eps, inverse, out);
    }

    fn rms_norm_again(
        &self,
        x: &Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        inverse: &Vec<f32>,
        out: &mut Vec<f32>,
    ) {
        norm::again(x, weight.values(), inverse, out);
    }

    fn rms_norm_backward(
        &self,
        x: &Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        inverse: &Vec<f32>,
        d_out: &Vec<f32>,
        d_x: &mut Vec<f32>,
        accumulate: bool,
        d_weight: PartMut<'_, Vec<f32>>,
    ) {
        let (weight, d_weight) = (weight.values(), d_weight.values());
        norm::backward(x, weight, inverse, d_out, d_x, accumulate, d_weight);
    }

    fn linear(
        &self,
        LinearShape { tokens, inputs, outputs }: LinearShape,
        x: &Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        add: Option<&Vec<f32>>,
        y: &mut Vec<f32>,
    ) {
        let (a, b) = (Matrix::rows(x, inputs), Matrix::transposed(weight.values(), inputs));
        // `gemm` adds only to what is in its destination.
        if let Some(add) = add {
            let size = y.len().div_ceil(rayon::current_num_threads()).max(1 << 14);
            let pieces = y.par_chunks_mut(size).zip(add.par_chunks(size));
            pieces.for_each(|(y, add)| y.copy_from_slice(add));
        }
        matmul([tokens, outputs, inputs], a, b, y, outputs, add.is_some());
    }

    fn linear_backward_input(
        &self,
        LinearShape { tokens, inputs, outputs }: LinearShape,
        d_y: &Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        d_x: &mut Vec<f32>,
    ) {
        let (a, b) = (Matrix::rows(d_y, outputs), Matrix::rows(weight.values(), inputs));
        matmul([tokens, inputs, outputs], a, b, d_x, inputs, false);
    }

    fn linear_backward_weight(
        &self,
        LinearShape { tokens, inputs, outputs }: LinearShape,
        d_y: &Vec<f32>,
        x: &Vec<f32>,
        d_weight: PartMut<'_, Vec<f32>>,
    ) {
        let (a, b) = (Matrix::transposed(d_y, outputs), Matrix::rows(x, inputs));
        matmul_deep([outputs, inputs, tokens], a, b, d_weight.values(), inputs);
    }

    fn rope(
        &self,
        heads: PackedHeads,
        pairing: RopePairing,
        table: &RopeTable,
        positions: &[i32],
        rotation: Rotation,
        qkv: &mut Vec<f32>,
    ) {
        rope::rotate(heads, pairing, table, positions, rotation, qkv);
    }

    fn attention(
        &self,
        layer: LayerAttention<'_, Vec<f32>>,
        qkv: &Vec<f32>,
        out: &mut Vec<f32>,
        lse: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        attention::forward(&layer, qkv, out, lse)
    }

    fn attention_backward(
        &self,
        layer: LayerAttention<'_, Vec<f32>>,
        qkv: &Vec<f32>,
        out: &Vec<f32>,
        lse: &Vec<f32>,
        d_out: &Vec<f32>,
        d_qkv: &mut Vec<f32>,
        d_learned: PartMut<'_, Vec<f32>>,
    ) -> Result<(), NnError> {
        attention::backward(&layer, qkv, out, lse, d_out, d_qkv, d_learned.values())
    }

    fn swiglu(&self, width: usize, gate_up: &Vec<f32>, out: &mut Vec<f32>) {
        swiglu::forward(width, gate_up, out);
    }

    fn swiglu_backward(&self, width: usize, gate_up: &mut Vec<f32>, d_out: &mut Vec<f32>) {
        swiglu::backward(width, gate_up, d_out);
    }

    fn loss(
        &self,
        width: usize,
        x: &Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        labels: &[i32],
        logits: &mut Vec<f32>,
    ) -> f64 {
        loss::cross_entropy(width, x, weight.values(), labels, logits, None)
    }

    fn loss_backward(
        &self,
        width: usize,
        x: &Vec<f32>,
        weight: Part<'_, Vec<f32>>,
        labels: &[i32],
        logits: &mut Vec<f32>,
        d_x: &mut Vec<f32>,
        d_weight: PartMut<'_, Vec<f32>>,
    ) -> f64 {
        let gradients = Some((d_x.as_mut_slice(), d_weight.values()));
        loss::cross_entropy(width, x, weight.values(), labels, logits, gradients)
    }
}
