//! The training step: the blocks in their order, forward and backward.
//!
//! For a layer with input x: `n = norm(x)`, `qkv = rope(n·Wqkv)`, `a = attention(qkv)`,
//! `y = x + a·Wo`, `m = norm(y)`, `s = silu(m·Wgate)·(m·Wup)`, output `y + s·Wdown`.
//! Normalised streams and `s` are cheap and are computed again in the backward pass in every
//! mode. See the tape for what is kept.

use std::cell::Cell;
use std::mem::take;
use std::time::Instant;

use foveate::Plan;

use crate::backend::{Blocks, Columns, LinearShape, PackedHeads, Rotation};
use crate::batch::Batch;
use crate::config::{ModelConfig, QkvOrder};
use crate::error::NnError;
use crate::parameters::{Places, at};
use crate::tape::{Recompute, Workspace};

/// All that a step reads.
pub(crate) struct Step<'a, B: Blocks> {
    pub blocks: &'a B,
    pub config: &'a ModelConfig,
    pub places: Places,
    pub order: QkvOrder,
    pub parameters: Vec<&'a B::Array>,
    /// One for each layer, bound to the batch.
    pub plans: Vec<Plan>,
    /// Names of the learned buffers.
    pub learned: &'a [String],
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
        let head = self.parameters[self.places.head()];
        let width = self.config.hidden_size;
        let labels = self.batch.labels;
        let work = || self.blocks.loss(width, &ws.normed, head, labels, &mut ws.logits);
        Ok(self.clocks.loss.time(work))
    }

    /// The loss in nats; its gradients are added to `gradients`.
    pub fn forward_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        gradients: &mut [B::Array],
        recompute: Recompute,
    ) -> Result<f64, NnError> {
        let (tokens, layers) = (self.batch.tokens_total(), self.config.num_hidden_layers);
        ws.fit(self.blocks, self.config, tokens, layers + 1, recompute.kept(layers));
        ws.fit_backward(self.blocks, self.config, tokens);
        self.forward(ws)?;
        let head = self.parameters[self.places.head()];
        let loss = self.clocks.loss.time(|| {
            self.blocks.loss_backward(
                self.config.hidden_size,
                &ws.normed,
                head,
                self.batch.labels,
                &mut ws.logits,
                &mut ws.d_normed,
                &mut gradients[self.places.head()],
            )
        });
        self.blocks.rms_norm_backward(
            &ws.inputs[layers],
            self.parameters[self.places.norm()],
            &ws.inverse,
            &ws.d_normed,
            &mut ws.d_x,
            false,
            &mut gradients[self.places.norm()],
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
        let table = &mut gradients[self.places.embedding()];
        let width = self.config.hidden_size;
        self.blocks.embed_backward(self.batch.tokens, &ws.d_x, width, table);
        Ok(loss)
    }

    /// Leaves the normalised output of the last layer in `ws.normed`.
    fn forward(&mut self, ws: &mut Workspace<B::Array>) -> Result<(), NnError> {
        let top = self.batch.positions.iter().max().map_or(0, |&p| p as usize);
        ws.rope.reach(self.config, top + 1);
        let table = self.parameters[self.places.embedding()];
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
            self.parameters[self.places.norm()],
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
        self.blocks.rms_norm(
            &ws.inputs[layer % ws.inputs.len()],
            self.weight(layer, at::NORM),
            self.config.rms_norm_eps,
            &mut tape.inverse,
            &mut ws.normed,
        );
        for (which, shape) in self.qkv_shapes() {
            let weight = self.weight(layer, which);
            self.linear(shape, &ws.normed, weight, &mut tape.qkv, false);
        }
        self.rope(ws, Rotation::Forward, kept);
        let tape = &mut ws.attention[kept];
        let (plan, heads) = (&self.plans[layer], self.heads());
        self.clocks
            .attention
            .time(|| self.blocks.attention(plan, heads, &tape.qkv, &mut tape.out, &mut tape.lse))
    }

    /// From the output of attention to the gate and up projections.
    fn mlp_part(&self, ws: &mut Workspace<B::Array>, layer: usize) {
        let attention = &ws.attention[slot(layer, ws.attention.len())];
        let kept = slot(layer, ws.mlp.len());
        let tape = &mut ws.mlp[kept];
        let o = self.weight(layer, at::O);
        self.linear(self.output_shape(), &attention.out, o, &mut tape.x, false);
        self.blocks.add_rms_norm(
            &ws.inputs[layer % ws.inputs.len()],
            &mut tape.x,
            self.weight(layer, at::MLP_NORM),
            self.config.rms_norm_eps,
            &mut tape.inverse,
            &mut ws.normed,
        );
        for (which, shape) in self.gate_up_shapes() {
            let weight = self.weight(layer, which);
            self.linear(shape, &ws.normed, weight, &mut tape.gate_up, false);
        }
    }

    /// From the gate and up projections to the output of the layer.
    fn output_part(&self, ws: &mut Workspace<B::Array>, layer: usize) {
        let tape = &ws.mlp[slot(layer, ws.mlp.len())];
        self.blocks.swiglu(self.config.intermediate_size, &tape.gate_up, &mut ws.activated);
        let next = (layer + 1) % ws.inputs.len();
        let out = &mut ws.inputs[next];
        self.blocks.copy(&tape.x, out);
        let down = self.weight(layer, at::DOWN);
        self.linear(self.down_shape(), &ws.activated, down, out, true);
    }

    /// `ws.d_x` goes from the gradient of the layer's output to that of the stream between
    /// attention and the feed-forward part.
    fn mlp_backward(&self, ws: &mut Workspace<B::Array>, layer: usize, gradients: &mut [B::Array]) {
        let blocks = self.blocks;
        let kept = slot(layer, ws.mlp.len());
        let tape = &mut ws.mlp[kept];
        let down = self.down_shape();
        let weight = self.weight(layer, at::DOWN);
        self.linear_backward_input(down, &ws.d_x, weight, &mut ws.activated, false);
        let wide = self.config.intermediate_size;
        blocks.swiglu_backward(wide, &mut tape.gate_up, &mut ws.activated);
        let d_down = &mut gradients[self.places.layer(layer, at::DOWN)];
        self.linear_backward_weight(down, &ws.d_x, &ws.activated, d_down);
        let norm = self.weight(layer, at::MLP_NORM);
        blocks.rms_norm_again(&tape.x, norm, &tape.inverse, &mut ws.normed);
        for (i, (which, shape)) in self.gate_up_shapes().into_iter().enumerate() {
            let d_weight = &mut gradients[self.places.layer(layer, which)];
            self.linear_backward_weight(shape, &tape.gate_up, &ws.normed, d_weight);
            let weight = self.weight(layer, which);
            let add = i > 0;
            self.linear_backward_input(shape, &tape.gate_up, weight, &mut ws.d_normed, add);
        }
        let d_norm = &mut gradients[self.places.layer(layer, at::MLP_NORM)];
        let (d_in, d_x) = (&ws.d_normed, &mut ws.d_x);
        blocks.rms_norm_backward(&tape.x, norm, &tape.inverse, d_in, d_x, true, d_norm);
    }

    /// `ws.d_x` goes on to the gradient of the layer's input.
    fn attention_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        layer: usize,
        gradients: &mut [B::Array],
    ) -> Result<(), NnError> {
        let blocks = self.blocks;
        let tape = &ws.attention[slot(layer, ws.attention.len())];
        let input = &ws.inputs[layer];
        let (shape, weight) = (self.output_shape(), self.weight(layer, at::O));
        self.linear_backward_input(shape, &ws.d_x, weight, &mut ws.d_attention, false);
        let d_o = &mut gradients[self.places.layer(layer, at::O)];
        self.linear_backward_weight(shape, &ws.d_x, &tape.out, d_o);
        self.clocks.attention.time(|| {
            blocks.attention_backward(
                &self.plans[layer],
                self.heads(),
                &tape.qkv,
                &tape.out,
                &tape.lse,
                &ws.d_attention,
                &mut ws.d_qkv,
                self.learned,
                &mut gradients[self.places.learned(layer)],
            )
        })?;
        let pairing = self.config.rope_pairing;
        let (heads, positions) = (self.heads(), self.batch.positions);
        blocks.rope(heads, pairing, &ws.rope, positions, Rotation::Backward, &mut ws.d_qkv);
        let norm = self.weight(layer, at::NORM);
        blocks.rms_norm_again(input, norm, &tape.inverse, &mut ws.normed);
        for (i, (which, shape)) in self.qkv_shapes().into_iter().enumerate() {
            let d_weight = &mut gradients[self.places.layer(layer, which)];
            self.linear_backward_weight(shape, &ws.d_qkv, &ws.normed, d_weight);
            let weight = self.weight(layer, which);
            self.linear_backward_input(shape, &ws.d_qkv, weight, &mut ws.d_normed, i > 0);
        }
        let d_norm = &mut gradients[self.places.layer(layer, at::NORM)];
        let (d_in, d_x) = (&ws.d_normed, &mut ws.d_x);
        blocks.rms_norm_backward(input, norm, &tape.inverse, d_in, d_x, true, d_norm);
        Ok(())
    }

    fn linear(
        &self,
        shape: LinearShape,
        x: &B::Array,
        weight: &B::Array,
        y: &mut B::Array,
        accumulate: bool,
    ) {
        self.clocks.linear.time(|| self.blocks.linear(shape, x, weight, y, accumulate));
    }

    fn linear_backward_input(
        &self,
        shape: LinearShape,
        d_y: &B::Array,
        weight: &B::Array,
        d_x: &mut B::Array,
        accumulate: bool,
    ) {
        let work = || self.blocks.linear_backward_input(shape, d_y, weight, d_x, accumulate);
        self.clocks.linear.time(work);
    }

    fn linear_backward_weight(
        &self,
        shape: LinearShape,
        d_y: &B::Array,
        x: &B::Array,
        d_weight: &mut B::Array,
    ) {
        self.clocks.linear.time(|| self.blocks.linear_backward_weight(shape, d_y, x, d_weight));
    }

    fn rope(&self, ws: &mut Workspace<B::Array>, rotation: Rotation, kept: usize) {
        let mut qkv = take(&mut ws.attention[kept].qkv);
        let (heads, pairing) = (self.heads(), self.config.rope_pairing);
        self.blocks.rope(heads, pairing, &ws.rope, self.batch.positions, rotation, &mut qkv);
        ws.attention[kept].qkv = qkv;
    }

    fn weight(&self, layer: usize, which: usize) -> &B::Array {
        self.parameters[self.places.layer(layer, which)]
    }

    fn heads(&self) -> PackedHeads {
        PackedHeads {
            rows: self.batch.rows,
            len: self.batch.len,
            heads_q: self.config.num_attention_heads,
            heads_kv: self.config.kv_heads(),
            dim: self.config.dim(),
            order: self.order,
        }
    }

    fn qkv_shapes(&self) -> Vec<(usize, LinearShape)> {
        qkv_shapes(self.config, self.order, self.batch.tokens_total())
    }

    fn gate_up_shapes(&self) -> [(usize, LinearShape); 2] {
        gate_up_shapes(self.config, self.batch.tokens_total())
    }

    fn output_shape(&self) -> LinearShape {
        let (width, hidden) = (self.config.attention_width(), self.config.hidden_size);
        plain_shape(self.batch.tokens_total(), width, hidden)
    }

    fn down_shape(&self) -> LinearShape {
        let (wide, hidden) = (self.config.intermediate_size, self.config.hidden_size);
        plain_shape(self.batch.tokens_total(), wide, hidden)
    }
}

/// Where the activations of `layer` are among `kept` sets: its own, or the shared one.
fn slot(layer: usize, kept: usize) -> usize {
    if kept == 1 { 0 } else { layer }
}

/// A linear block that fills its whole output.
pub(crate) fn plain_shape(tokens: usize, inputs: usize, outputs: usize) -> LinearShape {
    LinearShape { tokens, inputs, outputs, first_output: 0, y: Columns::all(outputs) }
}

/// The linear blocks that fill the packed projection: one for each run of heads of one kind.
pub(crate) fn qkv_shapes(
    config: &ModelConfig,
    order: QkvOrder,
    tokens: usize,
) -> Vec<(usize, LinearShape)> {
    let (kv, dim, inputs) = (config.kv_heads(), config.dim(), config.hidden_size);
    let groups = if order == QkvOrder::Stacked { 1 } else { kv };
    let (queries, keys) = (config.num_attention_heads / groups * dim, kv / groups * dim);
    let (mut shapes, mut first) = (Vec::new(), 0);
    for group in 0..groups {
        for (which, outputs) in [(at::Q, queries), (at::K, keys), (at::V, keys)] {
            let y = Columns { width: config.qkv_width(), first };
            let first_output = group * outputs;
            shapes.push((which, LinearShape { tokens, inputs, outputs, first_output, y }));
            first += outputs;
        }
    }
    shapes
}

/// The two linear blocks that fill the gate and up projections, side by side.
pub(crate) fn gate_up_shapes(config: &ModelConfig, tokens: usize) -> [(usize, LinearShape); 2] {
    let outputs = config.intermediate_size;
    [(at::GATE, 0), (at::UP, outputs)].map(|(which, first)| {
        let y = Columns { width: 2 * outputs, first };
        (which, LinearShape { y, ..plain_shape(tokens, config.hidden_size, outputs) })
    })
}
