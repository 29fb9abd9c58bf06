//! The blocks on the processor, on the rayon pool they are called in.
//!
//! Elementwise work is cut into tasks of whole tokens; every sum over tokens is taken in an order
//! fixed by the shapes, so no result depends on the number of threads. Inner loops are plain
//! loops over slices, compiled for each instruction set (`level`).

mod attention;
mod embed;
mod level;
mod loss;
pub(crate) mod math;
mod norm;
mod rope;
mod swiglu;
#[cfg(test)]
mod tests;

use foveate::Plan;
use rayon::prelude::*;

use crate::backend::{Blocks, LinearShape, PackedHeads, Rotation};
use crate::config::RopePairing;
use crate::error::NnError;
use crate::matmul::{Matrix, matmul, matmul_deep};
use crate::rope::RopeTable;

/// The processor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

/// Tokens of one elementwise task.
const TASK: usize = 32;

impl Blocks for Cpu {
    type Array = Vec<f32>;

    fn resize(&self, array: &mut Vec<f32>, elems: usize) {
        array.resize(elems, 0.0);
    }

    fn copy(&self, from: &Vec<f32>, to: &mut Vec<f32>) {
        let size = from.len().div_ceil(rayon::current_num_threads()).max(1 << 14);
        to.par_chunks_mut(size)
            .zip(from.par_chunks(size))
            .for_each(|(to, from)| to.copy_from_slice(from));
    }

    fn embed(&self, tokens: &[u32], table: &Vec<f32>, width: usize, out: &mut Vec<f32>) {
        embed::gather(tokens, table, width, out);
    }

    fn embed_backward(
        &self,
        tokens: &[u32],
        d_out: &Vec<f32>,
        width: usize,
        d_table: &mut Vec<f32>,
    ) {
        embed::scatter_add(tokens, d_out, width, d_table);
    }

    fn rms_norm(
        &self,
        x: &Vec<f32>,
        weight: &Vec<f32>,
        eps: f32,
        inverse: &mut Vec<f32>,
        out: &mut Vec<f32>,
    ) {
        norm::forward(x, weight, eps, inverse, out);
    }

    fn add_rms_norm(
        &self,
        residual: &Vec<f32>,
        x: &mut Vec<f32>,
        weight: &Vec<f32>,
        eps: f32,
        inverse: &mut Vec<f32>,
        out: &mut Vec<f32>,
    ) {
        norm::add_forward(residual, x, weight, eps, inverse, out);
    }

    fn rms_norm_again(
        &self,
        x: &Vec<f32>,
        weight: &Vec<f32>,
        inverse: &Vec<f32>,
        out: &mut Vec<f32>,
    ) {
        norm::again(x, weight, inverse, out);
    }

    fn rms_norm_backward(
        &self,
        x: &Vec<f32>,
        weight: &Vec<f32>,
        inverse: &Vec<f32>,
        d_out: &Vec<f32>,
        d_x: &mut Vec<f32>,
        accumulate: bool,
        d_weight: &mut Vec<f32>,
    ) {
        norm::backward(x, weight, inverse, d_out, d_x, accumulate, d_weight);
    }

    fn linear(
        &self,
        shape: LinearShape,
        x: &Vec<f32>,
        weight: &Vec<f32>,
        y: &mut Vec<f32>,
        accumulate: bool,
    ) {
        let LinearShape { tokens, inputs, outputs, first_output, y: columns } = shape;
        let a = Matrix::rows(x, inputs);
        let b = Matrix::transposed(&weight[first_output * inputs..], inputs);
        let y = &mut y[columns.first..];
        matmul([tokens, outputs, inputs], a, b, y, columns.width, accumulate);
    }

    fn linear_backward_input(
        &self,
        shape: LinearShape,
        d_y: &Vec<f32>,
        weight: &Vec<f32>,
        d_x: &mut Vec<f32>,
        accumulate: bool,
    ) {
        let LinearShape { tokens, inputs, outputs, first_output, y: columns } = shape;
        let a = Matrix::rows(&d_y[columns.first..], columns.width);
        let b = Matrix::rows(&weight[first_output * inputs..], inputs);
        matmul([tokens, inputs, outputs], a, b, d_x, inputs, accumulate);
    }

    fn linear_backward_weight(
        &self,
        shape: LinearShape,
        d_y: &Vec<f32>,
        x: &Vec<f32>,
        d_weight: &mut Vec<f32>,
    ) {
        let LinearShape { tokens, inputs, outputs, first_output, y: columns } = shape;
        let a = Matrix::transposed(&d_y[columns.first..], columns.width);
        let b = Matrix::rows(x, inputs);
        let d_weight = &mut d_weight[first_output * inputs..];
        matmul_deep([outputs, inputs, tokens], a, b, d_weight, inputs);
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
        plan: &Plan,
        heads: PackedHeads,
        qkv: &Vec<f32>,
        out: &mut Vec<f32>,
        lse: &mut Vec<f32>,
    ) -> Result<(), NnError> {
        attention::forward(plan, heads, qkv, out, lse)
    }

    fn attention_backward(
        &self,
        plan: &Plan,
        heads: PackedHeads,
        qkv: &Vec<f32>,
        out: &Vec<f32>,
        lse: &Vec<f32>,
        d_out: &Vec<f32>,
        d_qkv: &mut Vec<f32>,
        names: &[String],
        captures: &mut [Vec<f32>],
    ) -> Result<(), NnError> {
        attention::backward(plan, heads, qkv, out, lse, d_out, d_qkv, names, captures)
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
        weight: &Vec<f32>,
        labels: &[i32],
        logits: &mut Vec<f32>,
    ) -> f64 {
        loss::cross_entropy(width, x, weight, labels, logits, None)
    }

    fn loss_backward(
        &self,
        width: usize,
        x: &Vec<f32>,
        weight: &Vec<f32>,
        labels: &[i32],
        logits: &mut Vec<f32>,
        d_x: &mut Vec<f32>,
        d_weight: &mut Vec<f32>,
    ) -> f64 {
        loss::cross_entropy(width, x, weight, labels, logits, Some((d_x, d_weight)))
    }
}
