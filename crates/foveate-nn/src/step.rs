//! The training step: the blocks in their order, forward and backward.
//!
//! For a layer with input x: `n = norm(x)`, `qkv = rope(n·Wqkv)`, `a = attention(qkv)`,
//! `y = x + a·Wo`, `m = norm(y)`, `g, u = m·Wgate_up`, `s = silu(g)·u`, output `y + s·Wdown`.
//! Normalised streams and `s` are cheap and are computed again in the backward pass in every
//! mode. See the tape for what is kept.

use std::cell::Cell;
use std::ops::Range;
use std::time::Instant;

use foveate::Plan;

use crate::backend::{Blocks, LayerAttention, LinearShape, PackedHeads, Part, PartMut, Rotation};
use crate::batch::Batch;
use crate::config::{LearnedBuffer, ModelConfig};
use crate::error::NnError;
use crate::parameters::{LayerPlaces, Layout};
use crate::tape::{Recompute, Workspace};

/// All that a step reads.
pub(crate) struct Step<'a, B: Blocks> {
    pub blocks: &'a B,
    pub config: &'a ModelConfig,
    pub layout: &'a Layout,
    /// All parameters.
    pub weights: &'a B::Array,
    /// Attention, bound to the documents of the batch.
    pub plan: &'a Plan,
    /// The learned buffers of every layer.
    pub learned: &'a [(String, LearnedBuffer)],
    pub batch: Batch<'a>,
    pub clocks: Clocks,
}

/// The time that parts of a step took.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    /// Attention, forward and backward.
    pub attention: Clock,
    /// Products with the weights of the layers, forward and backward.
    pub linear: Clock,
    /// The output projection and the loss, forward and backward.
    pub loss: Clock,
}

/// A sum of seconds.
#[derive(Debug, Default)]
pub(crate) struct Clock(Cell<f64>);

impl Clock {
    pub fn seconds(&self) -> f64 {
        self.0.get()
    }

    fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let done = work();
        self.0.set(self.0.get() + start.elapsed().as_secs_f64());
        done
    }
}

impl<B: Blocks> Step<'_, B> {
    /// The loss alone, in nats.
    pub fn loss(&mut self, ws: &mut Workspace<B::Array>) -> Result<f64, NnError> {
        let tokens = self.batch.tokens_total();
        ws.fit(self.blocks, self.config, tokens, 2, (1, 1));
        self.forward(ws)?;
        let head = part(self.weights, &self.layout.head);
        let width = self.config.hidden_size;
        let labels = self.batch.labels;
        let work = || self.blocks.loss(width, &ws.normed, head, labels, &mut ws.logits);
        Ok(self.clocks.loss.time(work))
    }

    /// The loss in nats; its gradients are added to `gradients`.
    pub fn forward_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        gradients: &mut B::Array,
        recompute: Recompute,
    ) -> Result<f64, NnError> {
        let (tokens, layers) = (self.batch.tokens_total(), self.config.num_hidden_layers);
        ws.fit(self.blocks, self.config, tokens, layers + 1, recompute.kept(layers));
        ws.fit_backward(self.blocks, self.config, tokens);
        self.forward(ws)?;
        let head = part(self.weights, &self.layout.head);
        let loss = self.clocks.loss.time(|| {
            self.blocks.loss_backward(
                self.config.hidden_size,
                &ws.normed,
                head,
                self.batch.labels,
                &mut ws.logits,
                &mut ws.d_normed,
                part_mut(gradients, &self.layout.head),
            )
        });
        self.blocks.rms_norm_backward(
            &ws.inputs[layers],
            part(self.weights, &self.layout.norm),
            &ws.inverse,
            &ws.d_normed,
            &mut ws.d_x,
            false,
            part_mut(gradients, &self.layout.norm),
        );
        for layer in (0..layers).rev() {
            if recompute != Recompute::None {
                self.attention_part(ws, layer)?;
            }
            if recompute == Recompute::Full {
                self.mlp_part(ws, layer);
            }
            self.mlp_backward(ws, layer, gradients);
            self.attention_backward(ws, layer, gradients)?;
        }
        let table = part_mut(gradients, &self.layout.embedding);
        let width = self.config.hidden_size;
        self.blocks.embed_backward(self.batch.tokens, &ws.d_x, width, table);
        Ok(loss)
    }

    /// Leaves the normalised output of the last layer in `ws.normed`.
    fn forward(&mut self, ws: &mut Workspace<B::Array>) -> Result<(), NnError> {
        let top = self.batch.positions.iter().max().map_or(0, |&p| p as usize);
        ws.rope.reach(self.config, top + 1);
        let table = part(self.weights, &self.layout.embedding);
        let width = self.config.hidden_size;
        self.blocks.embed(self.batch.tokens, table, width, &mut ws.inputs[0]);
        for layer in 0..self.config.num_hidden_layers {
            self.attention_part(ws, layer)?;
            self.mlp_part(ws, layer);
            self.output_part(ws, layer);
        }
        let last = self.config.num_hidden_layers % ws.inputs.len();
        self.blocks.rms_norm(
            &ws.inputs[last],
            part(self.weights, &self.layout.norm),
            self.config.rms_norm_eps,
            &mut ws.inverse,
            &mut ws.normed,
        );
        Ok(())
    }

    /// From the input of the layer to the output of attention.
    fn attention_part(
        &mut self,
        ws: &mut Workspace<B::Array>,
        layer: usize,
    ) -> Result<(), NnError> {
        let kept = slot(layer, ws.attention.len());
        let tape = &mut ws.attention[kept];
        let places = self.places(layer);
        self.blocks.rms_norm(
            &ws.inputs[layer % ws.inputs.len()],
            part(self.weights, &places.norm),
            self.config.rms_norm_eps,
            &mut tape.inverse,
            &mut ws.normed,
        );
        let weight = part(self.weights, &places.qkv);
        self.linear(self.qkv_shape(), &ws.normed, weight, None, &mut tape.qkv);
        let (heads, pairing) = (self.heads(), self.config.rope_pairing);
        let positions = self.batch.positions;
        self.blocks.rope(heads, pairing, &ws.rope, positions, Rotation::Forward, &mut tape.qkv);
        let attention = self.attention(layer);
        self.clocks
            .attention
            .time(|| self.blocks.attention(attention, &tape.qkv, &mut tape.out, &mut tape.lse))
    }

    /// From the output of attention to the gate and up projections.
    fn mlp_part(&self, ws: &mut Workspace<B::Array>, layer: usize) {
        let attention = &ws.attention[slot(layer, ws.attention.len())];
        let kept = slot(layer, ws.mlp.len());
        let tape = &mut ws.mlp[kept];
        let places = self.places(layer);
        let o = part(self.weights, &places.o);
        self.linear(self.output_shape(), &attention.out, o, None, &mut tape.x);
        self.blocks.add_rms_norm(
            &ws.inputs[layer % ws.inputs.len()],
            &mut tape.x,
            part(self.weights, &places.mlp_norm),
            self.config.rms_norm_eps,
            &mut tape.inverse,
            &mut ws.normed,
        );
        let weight = part(self.weights, &places.gate_up);
        self.linear(self.gate_up_shape(), &ws.normed, weight, None, &mut tape.gate_up);
    }

    /// From the gate and up projections to the output of the layer.
    fn output_part(&self, ws: &mut Workspace<B::Array>, layer: usize) {
        let tape = &ws.mlp[slot(layer, ws.mlp.len())];
        self.blocks.swiglu(self.config.intermediate_size, &tape.gate_up, &mut ws.activated);
        let next = (layer + 1) % ws.inputs.len();
        let down = part(self.weights, &self.places(layer).down);
        let out = &mut ws.inputs[next];
        self.linear(self.down_shape(), &ws.activated, down, Some(&tape.x), out);
    }

    /// `ws.d_x` goes from the gradient of the layer's output to that of the stream between
    /// attention and the feed-forward part.
    fn mlp_backward(&self, ws: &mut Workspace<B::Array>, layer: usize, gradients: &mut B::Array) {
        let blocks = self.blocks;
        let kept = slot(layer, ws.mlp.len());
        let tape = &mut ws.mlp[kept];
        let (shape, places) = (self.down_shape(), self.places(layer));
        let weight = part(self.weights, &places.down);
        self.linear_backward_input(shape, &ws.d_x, weight, &mut ws.activated);
        let wide = self.config.intermediate_size;
        blocks.swiglu_backward(wide, &mut tape.gate_up, &mut ws.activated);
        let d_weight = part_mut(gradients, &places.down);
        self.linear_backward_weight(shape, &ws.d_x, &ws.activated, d_weight);
        let norm = || part(self.weights, &places.mlp_norm);
        blocks.rms_norm_again(&tape.x, norm(), &tape.inverse, &mut ws.normed);
        let shape = self.gate_up_shape();
        let d_weight = part_mut(gradients, &places.gate_up);
        self.linear_backward_weight(shape, &tape.gate_up, &ws.normed, d_weight);
        let weight = part(self.weights, &places.gate_up);
        self.linear_backward_input(shape, &tape.gate_up, weight, &mut ws.d_normed);
        let d_norm = part_mut(gradients, &places.mlp_norm);
        let (d_in, d_x) = (&ws.d_normed, &mut ws.d_x);
        blocks.rms_norm_backward(&tape.x, norm(), &tape.inverse, d_in, d_x, true, d_norm);
    }

    /// `ws.d_x` goes on to the gradient of the layer's input.
    fn attention_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        layer: usize,
        gradients: &mut B::Array,
    ) -> Result<(), NnError> {
        let blocks = self.blocks;
        let tape = &ws.attention[slot(layer, ws.attention.len())];
        let input = &ws.inputs[layer];
        let (shape, places) = (self.output_shape(), self.places(layer));
        let weight = part(self.weights, &places.o);
        self.linear_backward_input(shape, &ws.d_x, weight, &mut ws.d_attention);
        let d_weight = part_mut(gradients, &places.o);
        self.linear_backward_weight(shape, &ws.d_x, &tape.out, d_weight);
        self.clocks.attention.time(|| {
            blocks.attention_backward(
                self.attention(layer),
                &tape.qkv,
                &tape.out,
                &tape.lse,
                &ws.d_attention,
                &mut ws.d_qkv,
                part_mut(gradients, &places.learned),
            )
        })?;
        let pairing = self.config.rope_pairing;
        let (heads, positions) = (self.heads(), self.batch.positions);
        blocks.rope(heads, pairing, &ws.rope, positions, Rotation::Backward, &mut ws.d_qkv);
        let norm = || part(self.weights, &places.norm);
        blocks.rms_norm_again(input, norm(), &tape.inverse, &mut ws.normed);
        let shape = self.qkv_shape();
        let d_weight = part_mut(gradients, &places.qkv);
        self.linear_backward_weight(shape, &ws.d_qkv, &ws.normed, d_weight);
        let weight = part(self.weights, &places.qkv);
        self.linear_backward_input(shape, &ws.d_qkv, weight, &mut ws.d_normed);
        let d_norm = part_mut(gradients, &places.norm);
        let (d_in, d_x) = (&ws.d_normed, &mut ws.d_x);
        blocks.rms_norm_backward(input, norm(), &tape.inverse, d_in, d_x, true, d_norm);
        Ok(())
    }

    fn linear(
        &self,
        shape: LinearShape,
        x: &B::Array,
        weight: Part<'_, B::Array>,
        add: Option<&B::Array>,
        y: &mut B::Array,
    ) {
        self.clocks.linear.time(|| self.blocks.linear(shape, x, weight, add, y));
    }

    fn linear_backward_input(
        &self,
        shape: LinearShape,
        d_y: &B::Array,
        weight: Part<'_, B::Array>,
        d_x: &mut B::Array,
    ) {
        self.clocks.linear.time(|| self.blocks.linear_backward_input(shape, d_y, weight, d_x));
    }

    fn linear_backward_weight(
        &self,
        shape: LinearShape,
        d_y: &B::Array,
        x: &B::Array,
        d_weight: PartMut<'_, B::Array>,
    ) {
        self.clocks.linear.time(|| self.blocks.linear_backward_weight(shape, d_y, x, d_weight));
    }

    fn attention(&self, layer: usize) -> LayerAttention<'_, B::Array> {
        let values = part(self.weights, &self.places(layer).learned);
        LayerAttention { plan: self.plan, heads: self.heads(), learned: self.learned, values }
    }

    fn places(&self, layer: usize) -> &LayerPlaces {
        &self.layout.layers[layer]
    }

    fn heads(&self) -> PackedHeads {
        PackedHeads {
            rows: self.batch.rows,
            len: self.batch.len,
            heads_q: self.config.num_attention_heads,
            heads_kv: self.config.kv_heads(),
            dim: self.config.dim(),
        }
    }

    fn qkv_shape(&self) -> LinearShape {
        self.shape(self.config.hidden_size, self.config.qkv_width())
    }

    fn output_shape(&self) -> LinearShape {
        self.shape(self.config.attention_width(), self.config.hidden_size)
    }

    fn gate_up_shape(&self) -> LinearShape {
        self.shape(self.config.hidden_size, 2 * self.config.intermediate_size)
    }

    fn down_shape(&self) -> LinearShape {
        self.shape(self.config.intermediate_size, self.config.hidden_size)
    }

    fn shape(&self, inputs: usize, outputs: usize) -> LinearShape {
        LinearShape { tokens: self.batch.tokens_total(), inputs, outputs }
    }
}

/// Where the activations of `layer` are among `kept` sets: its own, or the shared one.
fn slot(layer: usize, kept: usize) -> usize {
    if kept == 1 { 0 } else { layer }
}

fn part<'a, A>(array: &'a A, place: &Range<usize>) -> Part<'a, A> {
    Part { array, place: place.clone() }
}

fn part_mut<'a, A>(array: &'a mut A, place: &Range<usize>) -> PartMut<'a, A> {
    PartMut { array, place: place.clone() }
}
