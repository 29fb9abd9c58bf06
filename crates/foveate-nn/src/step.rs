//! The stages of a pass: the blocks in their order, forward and backward.
//!
//! For a layer with input x: `n = norm(x)`, `qkv = rope(n·Wqkv)`, `a = attention(qkv)`,
//! `y = x + a·Wo`, `m = norm(y)`, `g, u = m·Wgate_up`, `s = f(g)·u`, output `y + s·Wdown`. Some
//! families add a bias to qkv, normalise each of its heads before they are turned, or normalise `a·Wo`
//! and `s·Wdown` before they are added ([`crate::Architecture`]). Normalised streams and `s` are cheap and
//! are computed again in the backward pass in every mode. See the tape for what is kept.

use std::ops::Range;

use crate::architecture::LayerRope;
use crate::backend::{
    Array, Blocks, KvCache, LayerAttention, LayerProgram, LinearShape, LossGradients, LossOperands,
    NormForward, PackedHeads, Part, PartMut, Rotation, StreamProduct, Turn,
};
use crate::config::ModelConfig;
use crate::context::Context;
use crate::device_context::{ContextCall, ContextForward, Projection};
use crate::error::NnError;
use crate::held::{Held, Target};
use crate::parameters::{LayerPlaces, ParameterLayout};
use crate::stream::Stream;
use crate::tape::{AttentionTape, OutputTape, Recomputation, Recompute, Workspace};
use crate::tensor::TensorPart;

/// All that a stage reads, and the cache that generation writes.
pub(crate) struct Step<'a, B: Blocks> {
    pub blocks: &'a mut B,
    pub config: &'a ModelConfig,
    pub layout: &'a ParameterLayout,
    pub weights: Held<'a, B::Array>,
    pub programs: &'a [LayerProgram<'a, B>],
    pub batch: &'a B::Batch,
    pub shape: [usize; 2],
    /// What was read before, where the batch goes on from there.
    pub cache: Option<&'a mut Cache<B::Array>>,
    pub context: Option<Context<'a, B>>,
    pub part: &'a TensorPart,
    pub stream: Option<Stream<'a, B>>,
    /// Of the loss that gradients are of: the weight of its z-loss, or 0.
    pub z_weight: f32,
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
    pub fn loss(
        &mut self,
        ws: &mut Workspace<B::Array>,
        each: Option<&mut B::Array>,
        totals: &mut B::Totals,
    ) -> Result<(), NnError> {
        if self.stream.is_some() {
            self.all_tokens(&ws.normed, &mut ws.whole)?;
            return self.loss_part(&mut ws.whole, &mut ws.logits, None, totals);
        }
        let operands = self.loss_operands(&mut ws.normed, 0.0, &mut ws.logits);
        self.blocks.loss(self.batch, operands, each, None, totals)
    }

    /// The loss, and the gradients of what follows the layers.
    pub fn head_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        gradients: &mut Target<'_, B::Array>,
        totals: &mut B::Totals,
    ) -> Result<(), NnError> {
        let layout = self.layout;
        let d_weight = gradients.part(layout, &layout.head);
        if self.stream.is_some() {
            self.all_tokens(&ws.normed, &mut ws.whole)?;
            let to = LossGradients { d_x: &mut ws.d_whole, d_weight };
            self.loss_part(&mut ws.whole, &mut ws.logits, Some(to), totals)?;
            self.scatter(&ws.d_whole, &mut ws.d_normed)?;
        } else {
            let operands = self.loss_operands(&mut ws.normed, self.z_weight, &mut ws.logits);
            let to = LossGradients { d_x: &mut ws.d_normed, d_weight };
            self.blocks.loss(self.batch, operands, None, Some(to), totals)?;
        }
        let x = &ws.inputs[self.config.num_hidden_layers % ws.inputs.len()];
        let forward = self.norm_forward(x, &layout.norm, &ws.inverse);
        let d_x = PartMut::whole(&mut ws.d_x, false);
        let d_weight = gradients.part(layout, &layout.norm);
        self.blocks.rms_norm_backward(forward, &ws.d_normed, d_x, d_weight, None)
    }

    /// From the gradient of a layer's output, in `ws.d_x`, to that of its input.
    pub fn layer_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        layer: usize,
        gradients: &mut Target<'_, B::Array>,
        recompute: Recomputation,
    ) -> Result<(), NnError> {
        let again = recompute.of(layer);
        if matches!(again, Recompute::Attention | Recompute::Full) {
            self.attention_part(ws, layer)?;
        }
        match again {
            Recompute::None | Recompute::Attention => {}
            Recompute::Mlp => self.gate_up_again(ws, layer)?,
            Recompute::Full => {
                self.mlp_part(ws, layer)?;
                if self.config.architecture.output_norms {
                    self.output_again(ws, layer)?;
                }
            }
        }
        self.mlp_backward(ws, layer, gradients)?;
        self.attention_backward(ws, layer, gradients)
    }

    /// The gradient of the embedding, from that of the first layer's input.
    pub fn embedding_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        gradients: &mut Target<'_, B::Array>,
    ) -> Result<(), NnError> {
        let (width, scale) = (self.config.hidden_size, self.config.embedding_scale());
        // A tied table has the gradient of the head already.
        gradients.accumulate |= self.layout.is_tied();
        let Some(table) = gradients.part(self.layout, &self.layout.embedding) else {
            return Ok(());
        };
        let d_x = self.all_tokens(&ws.d_x, &mut ws.whole)?;
        self.blocks.embed_backward(self.batch, self.first_id(), d_x, width, scale, table)
    }

    pub fn embed(&mut self, ws: &mut Workspace<B::Array>) -> Result<(), NnError> {
        let (width, table) = (self.config.hidden_size, self.part(&self.layout.embedding));
        let scale = self.config.embedding_scale();
        let (first, is_cut) = (self.first_id(), self.stream.is_some());
        let out = if is_cut { &mut ws.whole } else { &mut ws.inputs[0] };
        self.blocks.embed(self.batch, first, table, width, scale, out)?;
        self.scatter(&ws.whole, &mut ws.inputs[0])
    }

    /// The first id of the vocabulary that this rank has, where it has a part.
    fn first_id(&self) -> Option<usize> {
        self.stream.is_some().then_some(self.part.vocab.start)
    }

    pub fn layer(&mut self, ws: &mut Workspace<B::Array>, layer: usize) -> Result<(), NnError> {
        self.attention_part(ws, layer)?;
        self.mlp_part(ws, layer)?;
        self.output_part(ws, layer)
    }

    pub fn last_norm(&mut self, ws: &mut Workspace<B::Array>) -> Result<(), NnError> {
        let last = self.config.num_hidden_layers % ws.inputs.len();
        let (norm, weight) = (self.config.norm(), self.part(&self.layout.norm));
        self.blocks.rms_norm(&ws.inputs[last], weight, norm, &mut ws.inverse, &mut ws.normed)
    }

    /// From the input of the layer to the output of attention.
    pub fn attention_part(
        &mut self,
        ws: &mut Workspace<B::Array>,
        layer: usize,
    ) -> Result<(), NnError> {
        let tape = &mut ws.attention[ws.kept.attention.of(layer)];
        let x = &ws.inputs[layer % ws.inputs.len()];
        let (norm, places) = (self.config.norm(), self.places(layer));
        let weight = part(self.weights, &places.norm);
        self.blocks.rms_norm(x, weight, norm, &mut tape.inverse, &mut ws.normed)?;
        let call = self.context_call(layer, ws.kept.attention.of(layer));
        let qkv = match self.keys_first(layer, call.as_ref(), &ws.normed, &mut tape.qkv)? {
            true => Turned::InTape,
            false => {
                let product = self.projection(layer, &ws.normed);
                let Projection { shape, x, weight, bias, .. } = product;
                self.product_of_all(shape, x, weight, bias, &mut ws.whole, &mut tape.qkv)?;
                self.turned(layer, tape, &mut ws.heads, false)?
            }
        };
        let (qkv, out, lse) = match qkv {
            Turned::InTape => (&tape.qkv, &mut tape.out, &mut tape.lse),
            Turned::Apart => (&ws.heads, &mut tape.out, &mut tape.lse),
        };
        if let Some((context, call)) = self.context.as_mut().zip(call) {
            return context.forward(self.blocks, call, qkv, out, lse);
        }
        let attention = self.attention(layer);
        let cache = self.cache.as_mut().map(|cache| {
            let [keys, values] = &mut cache.layers[layer];
            KvCache { keys, values, position: cache.position }
        });
        self.blocks.attention(attention, qkv, cache, out, lse)
    }

    /// Whether all that attention of a layer reads was computed, keys first: see [`ModelConfig::keys_first`].
    fn keys_first(
        &mut self,
        layer: usize,
        call: Option<&ContextCall<'_, B::Array>>,
        normed: &B::Array,
        qkv: &mut B::Array,
    ) -> Result<bool, NnError> {
        let (projection, gathered) = (self.projection(layer, normed), self.stream.is_some());
        let device = self.context.as_mut().and_then(Context::moves_keys);
        match device.zip(call).filter(|_| self.config.keys_first(true, gathered)) {
            Some((device, call)) => {
                device.project(self.blocks, call, &projection, qkv).map(|()| true)
            }
            None => Ok(false),
        }
    }

    fn projection<'x>(&self, layer: usize, x: &'x B::Array) -> Projection<'x, B::Array, B::Batch>
    where
        'a: 'x,
    {
        let places = self.places(layer);
        let has_bias = self.config.architecture.qkv_bias;
        Projection {
            shape: self.qkv_shape(),
            x,
            weight: self.part(&places.qkv),
            bias: has_bias.then(|| self.part(&places.qkv_bias)),
            turn: self.turn(layer),
        }
    }

    /// What attention reads, of the packed projection in `tape`: its heads normalised, into `heads`,
    /// where the model says so, and turned by their positions. `again` says that this was done before:
    /// only what lies in `heads` is made once more.
    fn turned(
        &mut self,
        layer: usize,
        tape: &mut AttentionTape<B::Array>,
        heads: &mut B::Array,
        again: bool,
    ) -> Result<Turned, NnError> {
        let (shape, places) = (self.heads(), self.places(layer));
        if self.config.architecture.head_norms {
            let weight = part(self.weights, &places.head_norms);
            let (norm, inverse) = (self.config.norm(), &mut tape.heads_inverse);
            let turn = self.turn(layer);
            self.blocks.head_norm(shape, &tape.qkv, weight, norm, turn, inverse, heads)?;
            return Ok(Turned::Apart);
        }
        if !again && let Some(turn) = self.turn(layer) {
            self.blocks.rope(turn, shape, Rotation::Forward, &mut tape.qkv)?;
        }
        Ok(Turned::InTape)
    }

    /// How the heads of a layer turn, where they do.
    fn turn(&self, layer: usize) -> Option<Turn<'a, B::Batch>> {
        let table = match self.config.architecture.rope_of(layer) {
            LayerRope::Global => 0,
            LayerRope::Local => 1,
            LayerRope::None => return None,
        };
        Some(Turn { batch: self.batch, table, pairing: self.config.rope_pairing })
    }

    /// From the output of attention to the gate and up projections.
    pub fn mlp_part(&mut self, ws: &mut Workspace<B::Array>, layer: usize) -> Result<(), NnError> {
        let attention = &ws.attention[ws.kept.attention.of(layer)];
        let tape = &mut ws.residual[ws.kept.residual.of(layer)];
        let gate_up = &mut ws.gate_up[ws.kept.gate_up.of(layer)];
        let x = &ws.inputs[layer % ws.inputs.len()];
        let (norm, places) = (self.config.norm(), self.places(layer));
        let (shape, o) = (self.output_shape(), part(self.weights, &places.o));
        let out = &attention.out;
        if self.config.architecture.output_norms {
            let OutputTape { x: output, inverse } = &mut tape.attention;
            self.summed_product(shape, out, o, None, &mut ws.whole, output)?;
            let weight = part(self.weights, &places.o_norm);
            self.blocks.rms_norm(output, weight, norm, inverse, &mut tape.x)?;
        } else {
            self.summed_product(shape, out, o, None, &mut ws.whole, &mut tape.x)?;
        }
        let weight = part(self.weights, &places.mlp_norm);
        let (inverse, normed) = (&mut tape.inverse, &mut ws.normed);
        self.blocks.add_rms_norm(x, &mut tape.x, weight, norm, inverse, normed)?;
        let (shape, weight) = (self.gate_up_shape(), part(self.weights, &places.gate_up));
        self.product_of_all(shape, &ws.normed, weight, None, &mut ws.whole, gate_up)
    }

    /// The gate and up projections once more.
    fn gate_up_again(&mut self, ws: &mut Workspace<B::Array>, layer: usize) -> Result<(), NnError> {
        let tape = &ws.residual[ws.kept.residual.of(layer)];
        let gate_up = &mut ws.gate_up[ws.kept.gate_up.of(layer)];
        let places = self.places(layer);
        let forward = self.norm_forward(&tape.x, &places.mlp_norm, &tape.inverse);
        self.blocks.rms_norm_again(forward, &mut ws.normed)?;
        let (shape, weight) = (self.gate_up_shape(), part(self.weights, &places.gate_up));
        self.product_of_all(shape, &ws.normed, weight, None, &mut ws.whole, gate_up)
    }

    /// From the gate and up projections to the output of the layer.
    pub fn output_part(
        &mut self,
        ws: &mut Workspace<B::Array>,
        layer: usize,
    ) -> Result<(), NnError> {
        let tape = &mut ws.residual[ws.kept.residual.of(layer)];
        let gate_up = &ws.gate_up[ws.kept.gate_up.of(layer)];
        let next = (layer + 1) % ws.inputs.len();
        let (s, whole, out) = (&mut ws.activated, &mut ws.whole, &mut ws.inputs[next]);
        if self.config.architecture.output_norms {
            self.normed_output(layer, gate_up, s, whole, &mut tape.mlp, out)?;
            return self.blocks.add(&tape.x, out);
        }
        self.gated(gate_up, s)?;
        let down = part(self.weights, &self.places(layer).down);
        self.summed_product(self.down_shape(), s, down, Some(&tape.x), whole, out)
    }

    /// What the feed-forward part adds before it is normalised, once more.
    fn output_again(&mut self, ws: &mut Workspace<B::Array>, layer: usize) -> Result<(), NnError> {
        let tape = &mut ws.residual[ws.kept.residual.of(layer)].mlp;
        let gate_up = &ws.gate_up[ws.kept.gate_up.of(layer)];
        let (s, whole) = (&mut ws.activated, &mut ws.whole);
        self.normed_output(layer, gate_up, s, whole, tape, &mut ws.normed)
    }

    /// What the feed-forward part adds, normalised, to `out`, where the model normalises it.
    fn normed_output(
        &mut self,
        layer: usize,
        gate_up: &B::Array,
        s: &mut B::Array,
        whole: &mut B::Array,
        tape: &mut OutputTape<B::Array>,
        out: &mut B::Array,
    ) -> Result<(), NnError> {
        let (places, OutputTape { x, inverse }) = (self.places(layer), tape);
        self.gated(gate_up, s)?;
        let down = part(self.weights, &places.down);
        self.summed_product(self.down_shape(), s, down, None, whole, x)?;
        let weight = part(self.weights, &places.down_norm);
        self.blocks.rms_norm(x, weight, self.config.norm(), inverse, out)
    }

    fn gated(&mut self, gate_up: &B::Array, s: &mut B::Array) -> Result<(), NnError> {
        let (wide, architecture) = (self.config.intermediate_size, &self.config.architecture);
        self.blocks.gated(architecture.activation, wide, gate_up, s)
    }

    /// `ws.d_x` goes from the gradient of the layer's output to that of the stream between
    /// attention and the feed-forward part.
    fn mlp_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        layer: usize,
        gradients: &mut Target<'_, B::Array>,
    ) -> Result<(), NnError> {
        let tape = &ws.residual[ws.kept.residual.of(layer)];
        let gate_up = &mut ws.gate_up[ws.kept.gate_up.of(layer)];
        let (wide, weights, places) =
            (self.config.intermediate_size, self.weights, self.places(layer));
        let (down, gate_up_shape) = (self.down_shape(), self.gate_up_shape());
        let (d_x, d_normed) = (&ws.d_x, &mut ws.d_normed);
        let d_output =
            self.output_norm_backward(&tape.mlp, &places.down_norm, d_x, d_normed, gradients)?;
        let weight = part(weights, &places.down);
        let (whole, activated) = (&mut ws.whole, &mut ws.activated);
        let d_output = self.gradient_of_all(down, d_output, weight, whole, activated)?;
        let norm = self.norm_forward(&tape.x, &places.mlp_norm, &tape.inverse);
        self.gather_ahead(norm.again(), &mut ws.normed, &mut ws.d_whole)?;
        let activation = self.config.architecture.activation;
        self.blocks.gated_backward(activation, wide, gate_up, &mut ws.activated)?;
        if let Some(d_weight) = gradients.part(self.layout, &places.down) {
            self.blocks.linear_backward_weight(down, d_output, &ws.activated, d_weight)?;
        }
        let product = NormedProduct {
            shape: gate_up_shape,
            weight: &places.gate_up,
            norm: norm.again(),
            norm_weight: &places.mlp_norm,
        };
        let streams = NormedStreams {
            normed: &mut ws.normed,
            d_normed: &mut ws.d_normed,
            whole: &mut ws.whole,
            d_whole: &ws.d_whole,
            d_x: &mut ws.d_x,
        };
        self.normed_product_backward(product, gate_up, streams, gradients)
    }

    /// `ws.d_x` goes on to the gradient of the layer's input.
    fn attention_backward(
        &mut self,
        ws: &mut Workspace<B::Array>,
        layer: usize,
        gradients: &mut Target<'_, B::Array>,
    ) -> Result<(), NnError> {
        let (weights, places) = (self.weights, self.places(layer));
        let (output, qkv_shape, heads) = (self.output_shape(), self.qkv_shape(), self.heads());
        let architecture = &self.config.architecture;
        let tape = &mut ws.attention[ws.kept.attention.of(layer)];
        let turned = self.turned(layer, tape, &mut ws.heads, true)?;
        let qkv = match turned {
            Turned::InTape => &tape.qkv,
            Turned::Apart => &ws.heads,
        };
        let call = self.context_call(layer, ws.kept.attention.of(layer));
        let of_output = &ws.residual[ws.kept.residual.of(layer)].attention;
        let (d_x, d_normed) = (&ws.d_x, &mut ws.d_normed);
        let d_output =
            self.output_norm_backward(of_output, &places.o_norm, d_x, d_normed, gradients)?;
        let weight = part(weights, &places.o);
        let (whole, d_attention) = (&mut ws.whole, &mut ws.d_attention);
        let d_output = self.gradient_of_all(output, d_output, weight, whole, d_attention)?;
        let x = &ws.inputs[layer % ws.inputs.len()];
        let norm = self.norm_forward(x, &places.norm, &tape.inverse);
        self.gather_ahead(norm.again(), &mut ws.normed, &mut ws.d_whole)?;
        let d_learned = gradients.of(&places.learned);
        let (d_out, d_qkv) = (&ws.d_attention, &mut ws.d_qkv);
        let AttentionTape { out, lse, .. } = &*tape;
        match self.context.as_mut().zip(call) {
            Some((context, call)) => {
                let forward = ContextForward { qkv, out, lse };
                context.backward(self.blocks, call, forward, d_out, d_qkv, d_learned)?;
            }
            None => {
                let attention = self.attention(layer);
                self.blocks
                    .attention_backward(attention, qkv, out, lse, d_out, d_qkv, d_learned)?;
            }
        }
        // Gradients of keys travel meanwhile, where other ranks have some.
        if let Some(d_weight) = gradients.part(self.layout, &places.o) {
            self.blocks.linear_backward_weight(output, d_output, out, d_weight)?;
        }
        if let Some(context) = &mut self.context {
            context.returned(self.blocks, &mut ws.d_qkv)?;
        }
        let turn = self.turn(layer);
        if architecture.head_norms {
            let d_weight = gradients.part(self.layout, &places.head_norms);
            let of_heads = self.norm_forward(&tape.qkv, &places.head_norms, &tape.heads_inverse);
            self.blocks.head_norm_backward(heads, of_heads, turn, &mut ws.d_qkv, d_weight)?;
        } else if let Some(turn) = turn {
            self.blocks.rope(turn, heads, Rotation::Backward, &mut ws.d_qkv)?;
        }
        if architecture.qkv_bias
            && let Some(d_bias) = gradients.part(self.layout, &places.qkv_bias)
        {
            self.blocks.bias_backward(&ws.d_qkv, d_bias)?;
        }
        let product = NormedProduct {
            shape: qkv_shape,
            weight: &places.qkv,
            norm: norm.again(),
            norm_weight: &places.norm,
        };
        let streams = NormedStreams {
            normed: &mut ws.normed,
            d_normed: &mut ws.d_normed,
            whole: &mut ws.whole,
            d_whole: &ws.d_whole,
            d_x: &mut ws.d_x,
        };
        self.normed_product_backward(product, &ws.d_qkv, streams, gradients)
    }

    /// Gradients of a product of a norm, from those of what it gave, `d_y`: of its weight, of the norm's weight, and
    /// of the stream that was normalised, to which that of `d_x` is added.
    ///
    /// The weight's comes last where this rank has all tokens: it needs the norm once more, which the pass over
    /// the stream for the norm's own gradient then writes beside it. Where other ranks have some of the tokens, the
    /// norm is on its way already.
    fn normed_product_backward(
        &mut self,
        product: NormedProduct<'_, B::Array>,
        d_y: &B::Array,
        streams: NormedStreams<'_, B::Array>,
        gradients: &mut Target<'_, B::Array>,
    ) -> Result<(), NnError> {
        let NormedProduct { shape, weight, norm, norm_weight } = product;
        let NormedStreams { normed, d_normed, whole, d_whole, d_x } = streams;
        let layout = self.layout;
        if let Some(stream) = &mut self.stream {
            stream.gathered(self.blocks)?;
            if let Some(d_weight) = gradients.part(layout, weight) {
                self.blocks.linear_backward_weight(shape, d_y, d_whole, d_weight)?;
            }
        }
        self.summed_gradient(shape, d_y, part(self.weights, weight), whole, d_normed)?;
        let is_left = self.stream.is_none() && gradients.part(layout, weight).is_some();
        let again = is_left.then_some(&mut *normed);
        let (d_norm, d_x) = (gradients.part(layout, norm_weight), PartMut::whole(d_x, true));
        self.blocks.rms_norm_backward(norm, d_normed, d_x, d_norm, again)?;
        match gradients.part(layout, weight).filter(|_| is_left) {
            Some(d_weight) => self.blocks.linear_backward_weight(shape, d_y, normed, d_weight),
            None => Ok(()),
        }
    }

    /// The gradient of what attention or the feed-forward part gave before its own norm: `d_out`, where the
    /// model has none, and otherwise `d_x`, which is overwritten.
    fn output_norm_backward<'w>(
        &mut self,
        tape: &OutputTape<B::Array>,
        weight: &Range<usize>,
        d_out: &'w B::Array,
        d_x: &'w mut B::Array,
        gradients: &mut Target<'_, B::Array>,
    ) -> Result<&'w B::Array, NnError> {
        if !self.config.architecture.output_norms {
            return Ok(d_out);
        }
        let forward = self.norm_forward(&tape.x, weight, &tape.inverse);
        let (into, d_weight) = (PartMut::whole(d_x, false), gradients.part(self.layout, weight));
        self.blocks.rms_norm_backward(forward, d_out, into, d_weight, None)?;
        Ok(d_x)
    }

    /// The stream of all tokens, `own` being that of this rank's, in `whole` where other ranks have some.
    fn all_tokens<'w>(
        &mut self,
        own: &'w B::Array,
        whole: &'w mut B::Array,
    ) -> Result<&'w B::Array, NnError> {
        let Some(stream) = &mut self.stream else { return Ok(own) };
        stream.gather(self.blocks, own, self.config.hidden_size, whole)?;
        stream.gathered(self.blocks)?;
        Ok(whole)
    }

    /// The sum over ranks of `terms`, which are of all tokens, for this rank's tokens.
    fn scatter(&mut self, terms: &B::Array, own: &mut B::Array) -> Result<(), NnError> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        stream.scatter(self.blocks, terms, self.config.hidden_size, own)
    }

    /// [`Blocks::linear`] of the stream of all tokens, `own` being that of this rank's, by way of `whole` where
    /// other ranks have some.
    fn product_of_all(
        &mut self,
        shape: LinearShape,
        own: &B::Array,
        weight: Part<'_, B::Array>,
        bias: Option<Part<'_, B::Array>>,
        whole: &mut B::Array,
        y: &mut B::Array,
    ) -> Result<(), NnError> {
        let Some(stream) = &mut self.stream else {
            return self.blocks.linear(shape, Part::whole(own), weight, bias, None, y);
        };
        let product = StreamProduct { shape, weight, bias, backward: false };
        stream.gather_and_multiply(self.blocks, own, whole, &product, y)
    }

    /// [`Blocks::linear_backward_input`] of the gradient of the stream of all tokens, which it gives: see
    /// [`Self::product_of_all`].
    fn gradient_of_all<'w>(
        &mut self,
        shape: LinearShape,
        own: &'w B::Array,
        weight: Part<'_, B::Array>,
        whole: &'w mut B::Array,
        d_x: &mut B::Array,
    ) -> Result<&'w B::Array, NnError> {
        let Some(stream) = &mut self.stream else {
            self.blocks.linear_backward_input(shape, own, weight, d_x)?;
            return Ok(own);
        };
        let product = StreamProduct { shape, weight, bias: None, backward: true };
        stream.gather_and_multiply(self.blocks, own, whole, &product, d_x)?;
        Ok(whole)
    }

    /// Begins to gather the norm of a stream, computed once more, where other ranks have some of its tokens.
    fn gather_ahead(
        &mut self,
        norm: NormForward<'_, B::Array>,
        normed: &mut B::Array,
        whole: &mut B::Array,
    ) -> Result<(), NnError> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        self.blocks.rms_norm_again(norm, normed)?;
        stream.gather(self.blocks, normed, self.config.hidden_size, whole)
    }

    /// [`Blocks::linear`] with a weight whose columns may be on several ranks: the sum of their products,
    /// by way of `whole` then, for this rank's tokens.
    fn summed_product(
        &mut self,
        shape: LinearShape,
        x: &B::Array,
        weight: Part<'_, B::Array>,
        add: Option<&B::Array>,
        whole: &mut B::Array,
        y: &mut B::Array,
    ) -> Result<(), NnError> {
        let Some(stream) = &mut self.stream else {
            return self.blocks.linear(shape, Part::whole(x), weight, None, add, y);
        };
        let product = StreamProduct { shape, weight, bias: None, backward: false };
        stream.multiply_and_scatter(self.blocks, &product, x, whole, add, y)
    }

    /// [`Blocks::linear_backward_input`] with a weight whose rows may be on several ranks: see
    /// [`Self::summed_product`].
    fn summed_gradient(
        &mut self,
        shape: LinearShape,
        d_y: &B::Array,
        weight: Part<'_, B::Array>,
        whole: &mut B::Array,
        d_x: &mut B::Array,
    ) -> Result<(), NnError> {
        let Some(stream) = &mut self.stream else {
            return self.blocks.linear_backward_input(shape, d_y, weight, d_x);
        };
        let product = StreamProduct { shape, weight, bias: None, backward: true };
        stream.multiply_and_scatter(self.blocks, &product, d_y, whole, None, d_x)
    }

    /// The loss with the part of the vocabulary that this rank has; `x` is of all tokens.
    fn loss_part(
        &mut self,
        x: &mut B::Array,
        logits: &mut B::Array,
        gradients: Option<LossGradients<'_, B::Array>>,
        totals: &mut B::Totals,
    ) -> Result<(), NnError> {
        let z_weight = if gradients.is_some() { self.z_weight } else { 0.0 };
        let operands = self.loss_operands(x, z_weight, logits);
        let vocabulary = self.stream.as_mut().and_then(Stream::vocabulary);
        self.blocks.loss_part(self.batch, operands, vocabulary, gradients, totals)
    }

    fn norm_forward<'x>(
        &self,
        x: &'x B::Array,
        weight: &Range<usize>,
        inverse: &'x B::Array,
    ) -> NormForward<'x, B::Array>
    where
        'a: 'x,
    {
        NormForward { x, weight: self.part(weight), norm: self.config.norm(), inverse }
    }

    fn loss_operands<'x>(
        &self,
        x: &'x mut B::Array,
        z_weight: f32,
        logits: &'x mut B::Array,
    ) -> LossOperands<'x, B::Array>
    where
        'a: 'x,
    {
        LossOperands {
            x,
            weight: self.part(&self.layout.head),
            width: self.config.hidden_size,
            cap: self.config.architecture.logit_cap,
            z_weight,
            logits,
        }
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

    fn context_call(&self, layer: usize, slot: usize) -> Option<ContextCall<'a, B::Array>> {
        let program = self.context.as_ref()?.program(layer);
        let learned = self.part(&self.places(layer).learned);
        Some(ContextCall { program, slot, heads: self.heads(), learned })
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

/// A product of a norm: `y = norm(x) · weightᵀ`.
struct NormedProduct<'a, A> {
    shape: LinearShape,
    weight: &'a Range<usize>,
    norm: NormForward<'a, A>,
    norm_weight: &'a Range<usize>,
}

/// The streams of its backward pass.
struct NormedStreams<'a, A> {
    /// The norm once more, of this rank's tokens.
    normed: &'a mut A,
    d_normed: &'a mut A,
    /// Of all tokens, where other ranks have some: for sums, and what [`Step::gather_ahead`] brings.
    whole: &'a mut A,
    d_whole: &'a A,
    d_x: &'a mut A,
}

/// Where the turned queries and keys of a layer are.
enum Turned {
    /// In the tape, where they were projected.
    InTape,
    /// In an array that all layers share.
    Apart,
}

fn part<'a, A>(weights: Held<'a, A>, place: &Range<usize>) -> Part<'a, A> {
    weights.part(place)
}
