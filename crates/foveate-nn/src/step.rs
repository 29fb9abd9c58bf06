//! The training step: the blocks in their order, forward and backward. Generation runs the same
//! layers forward.
//!
//! For a layer with input x: `n = norm(x)`, `qkv = rope(n·Wqkv)`, `a = attention(qkv)`,
//! `y = x + a·Wo`, `m = norm(y)`, `g, u = m·Wgate_up`, `s = silu(g)·u`, output `y + s·Wdown`.
//! Normalised streams and `s` are cheap and are computed again in the backward pass in every
//! mode. See the tape for what is kept.

use std::ops::Range;

use crate::backend::{
    Array, Blocks, KvCache, LayerAttention, LayerProgram, LinearShape, PackedHeads, Part, PartMut,
    Rotation,
};
use crate::config::ModelConfig;
use crate::error::NnError;
use crate::parameters::{LayerPlaces, ParameterLayout};
use crate::tape::{Recompute, Workspace};

/// All that a step reads, and the cache that generation writes.
pub(crate) struct Step<'a, B: Blocks> {
    pub blocks: &'a mut B,
    pub config: &'a ModelConfig,
    pub layout: &'a ParameterLayout,
    /// All parameters.
    pub weights: &'a B::Array,
    /// What each layer runs, bound to the documents of the batch.
    pub programs: &'a [LayerProgram<'a, B>],
    pub batch: &'a B::Batch,
    /// Rows of the batch and tokens of a row.
    pub shape: [usize; 2],
    /// What was read before, where the batch goes on from there.
    pub cache: Option<&'a mut Cache<B::Array>>,
}

/// Keys and values of every layer for the tokens that were read.
#[derive(Debug, Default)]
pub(crate) struct Cache<A> {
    /// Keys and values of each layer, `[capacity, kv_heads · dim]`.
    pub layers: Vec<[A; 2]>,
    /// Tokens in it.
    pub position: usize,
}

impl<A: Array> Cache<A> {
    /// Makes the cache fit `capacity` tokens.
    pub fn fit<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        config: &ModelConfig,
        capacity: usize,
    ) -> Result<(), NnError> {
        let elems = capacity * config.kv_heads() * config.dim();
        let dtype = blocks.precision().weights;
        self.layers.resize_with(config.num_hidden_layers, Default::default);
        for [keys, values] in &mut self.layers {
            blocks.resize("cached keys", keys, dtype, elems)?;
            blocks.resize("cached values", values, dtype, elems)?;
        }
        Ok(())
    }
}

impl<'a, B: Blocks> Step<'a, B> {
    /// The loss alone; that of each token, `[T]`, goes to `each`.
    pub fn loss(
        &mut self,
        ws: &mut Workspace<B::Array>,
        each: Option<&mut B::Array>,
        totals: &mut B::Totals,
    ) -> Result<(), NnError> {
        self.forward(ws)?;
        ws.fit_loss(self.blocks, self.config, self.tokens())?;
        let (width, head) = (self.config.hidden_size, self.part(&self.layout.head));
        self.blocks.loss(self.batch, width, &ws.normed, head, &mut ws.logits, each, totals)
    }

    /// The normalised output of the last layer in `ws.normed`, and nothing kept.
    pub fn forward(&mut self, ws: &mut Workspace<B::Array>) -> Result<(), NnError> {
        ws.fit(self.blocks, self.config, self.tokens(), 2, (1, 1))?;
        self.run_forward(ws)
    }

    /// The loss; its gradients are added to `gradients`.
    pub fn forward_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        gradients: &mut B::Array,
        recompute: Recompute,
        totals: &mut B::Totals,
    ) -> Result<(), NnError> {
        let (tokens, layers) = (self.tokens(), self.config.num_hidden_layers);
        ws.fit(self.blocks, self.config, tokens, layers + 1, recompute.kept(layers))?;
        ws.fit_loss(self.blocks, self.config, tokens)?;
        ws.fit_backward(self.blocks, self.config, tokens)?;
        self.run_forward(ws)?;
        let (width, layout) = (self.config.hidden_size, self.layout);
        self.blocks.loss_backward(
            self.batch,
            width,
            &ws.normed,
            part(self.weights, &layout.head),
            &mut ws.logits,
            &mut ws.d_normed,
            part_mut(gradients, &layout.head),
            totals,
        )?;
        self.blocks.rms_norm_backward(
            &ws.inputs[layers],
            part(self.weights, &layout.norm),
            &ws.inverse,
            &ws.d_normed,
            &mut ws.d_x,
            false,
            part_mut(gradients, &layout.norm),
        )?;
        for layer in (0..layers).rev() {
            if recompute != Recompute::None {
                self.attention_part(ws, layer)?;
            }
            if recompute == Recompute::Full {
                self.mlp_part(ws, layer)?;
            }
            self.mlp_backward(ws, layer, gradients)?;
            self.attention_backward(ws, layer, gradients)?;
        }
        let table = part_mut(gradients, &layout.embedding);
        self.blocks.embed_backward(self.batch, &ws.d_x, width, table)
    }

    fn run_forward(&mut self, ws: &mut Workspace<B::Array>) -> Result<(), NnError> {
        let (width, table) = (self.config.hidden_size, self.part(&self.layout.embedding));
        self.blocks.embed(self.batch, table, width, &mut ws.inputs[0])?;
        for layer in 0..self.config.num_hidden_layers {
            self.attention_part(ws, layer)?;
            self.mlp_part(ws, layer)?;
            self.output_part(ws, layer)?;
        }
        let last = self.config.num_hidden_layers % ws.inputs.len();
        let (eps, weight) = (self.config.rms_norm_eps, self.part(&self.layout.norm));
        self.blocks.rms_norm(&ws.inputs[last], weight, eps, &mut ws.inverse, &mut ws.normed)
    }

    /// From the input of the layer to the output of attention.
    fn attention_part(
        &mut self,
        ws: &mut Workspace<B::Array>,
        layer: usize,
    ) -> Result<(), NnError> {
        let kept = slot(layer, ws.attention.len());
        let tape = &mut ws.attention[kept];
        let x = &ws.inputs[layer % ws.inputs.len()];
        let (eps, places) = (self.config.rms_norm_eps, self.places(layer));
        let norm = part(self.weights, &places.norm);
        self.blocks.rms_norm(x, norm, eps, &mut tape.inverse, &mut ws.normed)?;
        let (shape, weight) = (self.qkv_shape(), part(self.weights, &places.qkv));
        self.blocks.linear(shape, Part::whole(&ws.normed), weight, None, &mut tape.qkv)?;
        let (heads, pairing) = (self.heads(), self.config.rope_pairing);
        self.blocks.rope(self.batch, heads, pairing, Rotation::Forward, &mut tape.qkv)?;
        let attention = self.attention(layer);
        let cache = self.cache.as_mut().map(|cache| {
            let [keys, values] = &mut cache.layers[layer];
            KvCache { keys, values, position: cache.position }
        });
        self.blocks.attention(attention, &tape.qkv, cache, &mut tape.out, &mut tape.lse)
    }

    /// From the output of attention to the gate and up projections.
    fn mlp_part(&mut self, ws: &mut Workspace<B::Array>, layer: usize) -> Result<(), NnError> {
        let attention = &ws.attention[slot(layer, ws.attention.len())];
        let kept = slot(layer, ws.mlp.len());
        let tape = &mut ws.mlp[kept];
        let x = &ws.inputs[layer % ws.inputs.len()];
        let (eps, places) = (self.config.rms_norm_eps, self.places(layer));
        let (shape, o) = (self.output_shape(), part(self.weights, &places.o));
        self.blocks.linear(shape, Part::whole(&attention.out), o, None, &mut tape.x)?;
        let norm = part(self.weights, &places.mlp_norm);
        let (inverse, normed) = (&mut tape.inverse, &mut ws.normed);
        self.blocks.add_rms_norm(x, &mut tape.x, norm, eps, inverse, normed)?;
        let (shape, weight) = (self.gate_up_shape(), part(self.weights, &places.gate_up));
        self.blocks.linear(shape, Part::whole(&ws.normed), weight, None, &mut tape.gate_up)
    }

    /// From the gate and up projections to the output of the layer.
    fn output_part(&mut self, ws: &mut Workspace<B::Array>, layer: usize) -> Result<(), NnError> {
        let tape = &ws.mlp[slot(layer, ws.mlp.len())];
        let wide = self.config.intermediate_size;
        self.blocks.swiglu(wide, &tape.gate_up, &mut ws.activated)?;
        let (shape, down) = (self.down_shape(), self.part(&self.places(layer).down));
        let next = (layer + 1) % ws.inputs.len();
        let (s, out) = (Part::whole(&ws.activated), &mut ws.inputs[next]);
        self.blocks.linear(shape, s, down, Some(&tape.x), out)
    }

    /// `ws.d_x` goes from the gradient of the layer's output to that of the stream between
    /// attention and the feed-forward part.
    fn mlp_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        layer: usize,
        gradients: &mut B::Array,
    ) -> Result<(), NnError> {
        let kept = slot(layer, ws.mlp.len());
        let tape = &mut ws.mlp[kept];
        let (wide, weights, places) =
            (self.config.intermediate_size, self.weights, self.places(layer));
        let (down, gate_up) = (self.down_shape(), self.gate_up_shape());
        let blocks = &mut *self.blocks;
        let weight = part(weights, &places.down);
        blocks.linear_backward_input(down, &ws.d_x, weight, &mut ws.activated)?;
        blocks.swiglu_backward(wide, &mut tape.gate_up, &mut ws.activated)?;
        let d_weight = part_mut(gradients, &places.down);
        blocks.linear_backward_weight(down, &ws.d_x, &ws.activated, d_weight)?;
        let norm = || part(weights, &places.mlp_norm);
        blocks.rms_norm_again(&tape.x, norm(), &tape.inverse, &mut ws.normed)?;
        let d_weight = part_mut(gradients, &places.gate_up);
        blocks.linear_backward_weight(gate_up, &tape.gate_up, &ws.normed, d_weight)?;
        let weight = part(weights, &places.gate_up);
        blocks.linear_backward_input(gate_up, &tape.gate_up, weight, &mut ws.d_normed)?;
        let d_norm = part_mut(gradients, &places.mlp_norm);
        let (d_in, d_x) = (&ws.d_normed, &mut ws.d_x);
        blocks.rms_norm_backward(&tape.x, norm(), &tape.inverse, d_in, d_x, true, d_norm)
    }

    /// `ws.d_x` goes on to the gradient of the layer's input.
    fn attention_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        layer: usize,
        gradients: &mut B::Array,
    ) -> Result<(), NnError> {
        let tape = &ws.attention[slot(layer, ws.attention.len())];
        let input = &ws.inputs[layer];
        let (weights, places) = (self.weights, self.places(layer));
        let (output, qkv) = (self.output_shape(), self.qkv_shape());
        let (attention, heads, pairing) =
            (self.attention(layer), self.heads(), self.config.rope_pairing);
        let blocks = &mut *self.blocks;
        let weight = part(weights, &places.o);
        blocks.linear_backward_input(output, &ws.d_x, weight, &mut ws.d_attention)?;
        let d_weight = part_mut(gradients, &places.o);
        blocks.linear_backward_weight(output, &ws.d_x, &tape.out, d_weight)?;
        let d_learned = part_mut(gradients, &places.learned);
        blocks.attention_backward(
            attention,
            &tape.qkv,
            &tape.out,
            &tape.lse,
            &ws.d_attention,
            &mut ws.d_qkv,
            d_learned,
        )?;
        blocks.rope(self.batch, heads, pairing, Rotation::Backward, &mut ws.d_qkv)?;
        let norm = || part(weights, &places.norm);
        blocks.rms_norm_again(input, norm(), &tape.inverse, &mut ws.normed)?;
        let d_weight = part_mut(gradients, &places.qkv);
        blocks.linear_backward_weight(qkv, &ws.d_qkv, &ws.normed, d_weight)?;
        let weight = part(weights, &places.qkv);
        blocks.linear_backward_input(qkv, &ws.d_qkv, weight, &mut ws.d_normed)?;
        let d_norm = part_mut(gradients, &places.norm);
        let (d_in, d_x) = (&ws.d_normed, &mut ws.d_x);
        blocks.rms_norm_backward(input, norm(), &tape.inverse, d_in, d_x, true, d_norm)
    }

    fn part(&self, place: &Range<usize>) -> Part<'a, B::Array> {
        part(self.weights, place)
    }

    fn places(&self, layer: usize) -> &'a LayerPlaces {
        &self.layout.layers[layer]
    }

    fn attention(&self, layer: usize) -> LayerAttention<'a, B> {
        let values = self.part(&self.places(layer).learned);
        LayerAttention { program: &self.programs[layer], heads: self.heads(), values }
    }

    fn tokens(&self) -> usize {
        self.shape[0].saturating_mul(self.shape[1])
    }

    fn heads(&self) -> PackedHeads {
        PackedHeads::of(self.config, self.shape)
    }

    fn qkv_shape(&self) -> LinearShape {
        self.linear_shape(self.config.hidden_size, self.config.qkv_width())
    }

    fn output_shape(&self) -> LinearShape {
        self.linear_shape(self.config.attention_width(), self.config.hidden_size)
    }

    fn gate_up_shape(&self) -> LinearShape {
        self.linear_shape(self.config.hidden_size, 2 * self.config.intermediate_size)
    }

    fn down_shape(&self) -> LinearShape {
        self.linear_shape(self.config.intermediate_size, self.config.hidden_size)
    }

    fn linear_shape(&self, inputs: usize, outputs: usize) -> LinearShape {
        LinearShape { tokens: self.tokens(), inputs, outputs }
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
