//! A pass over a batch: the stages of a model in their order, each with the group of parameters that it
//! uses. Training, evaluation and generation run the same stages.
//!
//! At every boundary the pass tells where the parameters come from which group is needed next, and where
//! the gradients go which are complete. Where all parameters are there ([`Whole`]) nothing happens
//! at a boundary.

use crate::backend::{Blocks, LayerProgram, PartMut};
use crate::batch::Batch;
use crate::config::ModelConfig;
use crate::context::Context;
use crate::error::NnError;
use crate::gathering::Phase;
use crate::held::{Held, Target};
use crate::parameters::ParameterLayout;
use crate::plans::Programs;
use crate::step::{Cache, Step};
use crate::stream::Stream;
use crate::tape::{Kept, Recomputation, Workspace};
use crate::tensor::{Copied, TensorPart};

/// A pass over a batch: the stages of a model, each of which uses a group of parameters.
pub(crate) struct Pass<'a, B: Blocks> {
    /// The sizes that this rank computes.
    pub config: &'a ModelConfig,
    pub layout: &'a ParameterLayout,
    /// What each layer runs, bound to the documents of the batch; nothing where `context` computes
    /// attention.
    pub programs: &'a [LayerProgram<'a, B>],
    pub batch: &'a B::Batch,
    /// Rows of the batch and tokens of a row.
    pub shape: [usize; 2],
    /// Attention, where the tokens of the batch are on several ranks.
    pub context: Option<Context<'a, B>>,
    /// What of the model this rank has.
    pub part: &'a TensorPart,
    /// The stream, where its tokens are on several ranks of `tensor`.
    pub stream: Option<Stream<'a, B>>,
    /// Of the loss that gradients are of: the weight of its z-loss, or 0.
    pub z_weight: f32,
}

/// Sees an array as a block has left it, with the layer, where it is of one, and the block in words; true
/// ends the pass.
pub(crate) type Look<'a, B> = dyn FnMut(&mut B, Option<usize>, &'static str, &<B as Blocks>::Array) -> Result<bool, NnError>
    + 'a;

impl<B: Blocks> Pass<'_, B> {
    /// [`Pass::loss`] of a model whose parameters are all there. `look` sees what its blocks leave, until it
    /// ends the pass.
    pub fn looked_at(
        &mut self,
        blocks: &mut B,
        weights: &B::Array,
        ws: &mut Workspace<B::Array>,
        each: &mut B::Array,
        totals: &mut B::Totals,
        look: &mut Look<'_, B>,
    ) -> Result<(), NnError> {
        let (held, layers) = (Held::All(weights), self.config.num_hidden_layers);
        let architecture = &self.config.architecture;
        let (turned_apart, output_norms) = (architecture.head_norms, architecture.output_norms);
        ws.fit(blocks, self.config, self.part, self.shape, 2, Kept::nothing(layers))?;
        ws.fit_loss(blocks, self.config, self.part, self.tokens())?;
        self.step(blocks, held, None).embed(ws)?;
        if look(blocks, None, "the embedding", &ws.inputs[0])? {
            return Ok(());
        }
        for layer in 0..layers {
            let of = Some(layer);
            // Nothing is kept: what other blocks have read is overwritten where arrays share memory.
            self.step(blocks, held, None).attention_part(ws, layer)?;
            let qkv = if turned_apart { &ws.heads } else { &ws.attention[0].qkv };
            if look(blocks, of, "the projection to q, k and v", qkv)?
                || look(blocks, of, "attention", &ws.attention[0].out)?
            {
                return Ok(());
            }
            self.step(blocks, held, None).mlp_part(ws, layer)?;
            if look(blocks, of, "the output projection", &ws.residual[0].x)?
                || look(blocks, of, "the projection to gate and up", &ws.gate_up[0])?
            {
                return Ok(());
            }
            self.step(blocks, held, None).output_part(ws, layer)?;
            if !output_norms && look(blocks, of, "the gate", &ws.activated)?
                || look(blocks, of, "the down projection", &ws.inputs[(layer + 1) % 2])?
            {
                return Ok(());
            }
        }
        self.step(blocks, held, None).last_norm(ws)?;
        if look(blocks, None, "the last norm", &ws.normed)? {
            return Ok(());
        }
        self.step(blocks, held, None).loss(ws, Some(each), totals)?;
        look(blocks, None, "the loss", each).map(drop)
    }

    /// The loss alone; that of each token, `[T]`, goes to `each`.
    pub fn loss(
        &mut self,
        blocks: &mut B,
        parameters: &mut impl Parameters<B>,
        ws: &mut Workspace<B::Array>,
        each: Option<&mut B::Array>,
        totals: &mut B::Totals,
    ) -> Result<(), NnError> {
        self.forward(blocks, parameters, ws, None)?;
        ws.fit_loss(blocks, self.config, self.part, self.tokens())?;
        self.step(blocks, parameters.held(), None).loss(ws, each, totals)
    }

    /// The normalised output of the last layer in `ws.normed`, and nothing kept.
    pub fn forward(
        &mut self,
        blocks: &mut B,
        parameters: &mut impl Parameters<B>,
        ws: &mut Workspace<B::Array>,
        cache: Option<&mut Cache<B::Array>>,
    ) -> Result<(), NnError> {
        let kept = Kept::nothing(self.config.num_hidden_layers);
        ws.fit(blocks, self.config, self.part, self.shape, 2, kept)?;
        self.layers_forward(blocks, parameters, ws, cache)
    }

    /// The loss and its gradients.
    pub fn forward_backward(
        &mut self,
        blocks: &mut B,
        parameters: &mut impl Trained<B>,
        ws: &mut Workspace<B::Array>,
        recompute: Recomputation,
        totals: &mut B::Totals,
    ) -> Result<(), NnError> {
        let (part, layers) = (self.part, self.config.num_hidden_layers);
        let (inputs, kept) = (recompute.inputs(layers), recompute.kept(layers));
        ws.fit(blocks, self.config, part, self.shape, inputs, kept)?;
        ws.fit_host(blocks, layers, recompute.offload)?;
        ws.fit_loss(blocks, self.config, part, self.tokens())?;
        ws.fit_backward(blocks, self.config, part, self.shape)?;
        let done = self.both_passes(blocks, parameters, ws, recompute, totals);
        if done.is_err() {
            ws.on_host.abandon(blocks, &ws.inputs);
        }
        done
    }

    fn both_passes(
        &mut self,
        blocks: &mut B,
        parameters: &mut impl Trained<B>,
        ws: &mut Workspace<B::Array>,
        recompute: Recomputation,
        totals: &mut B::Totals,
    ) -> Result<(), NnError> {
        let layers = self.config.num_hidden_layers;
        self.layers_forward(blocks, parameters, ws, None)?;
        parameters.begin(blocks, layers + 1)?;
        let (weights, mut gradients) = parameters.split();
        self.step(blocks, weights, None).head_backward(ws, &mut gradients, totals)?;
        self.sum_copies(blocks, &mut gradients, layers + 1)?;
        parameters.complete(blocks, layers + 1, totals)?;
        for layer in (0..layers).rev() {
            parameters.need(blocks, (layer + 1, Phase::Backward))?;
            ws.on_host.come(blocks, &mut ws.inputs, layer)?;
            parameters.begin(blocks, layer + 1)?;
            let (weights, mut gradients) = parameters.split();
            let mut step = self.step(blocks, weights, None);
            step.layer_backward(ws, layer, &mut gradients, recompute)?;
            self.sum_copies(blocks, &mut gradients, layer + 1)?;
            parameters.complete(blocks, layer + 1, totals)?;
        }
        parameters.begin(blocks, 0)?;
        let (weights, mut gradients) = parameters.split();
        self.step(blocks, weights, None).embedding_backward(ws, &mut gradients)?;
        parameters.complete(blocks, 0, totals)
    }

    /// Pairs of query and key that the masks let through, in the mean of the heads, after a step over
    /// `batch`.
    pub fn live_pairs(
        &self,
        blocks: &B,
        programs: &Programs,
        plans: &[B::Plan],
        batch: &Batch<'_>,
    ) -> Option<f64> {
        match &self.context {
            Some(context) => Some(context.attention.live_pairs()),
            None => {
                // In the mean of all heads, of which other ranks have some.
                let share = self.part.heads.len() as f64 / self.part.all_heads as f64;
                let pairs = programs.live_pairs(blocks, plans, batch.live_pairs);
                pairs.map(|pairs| pairs * share)
            }
        }
    }

    /// Sums the gradients of a group that other ranks of `tensor` have terms of.
    fn sum_copies(
        &mut self,
        blocks: &mut B,
        gradients: &mut Target<'_, B::Array>,
        group: usize,
    ) -> Result<(), NnError> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        let place = &self.layout.groups()[group].place;
        let is_here =
            |copied: &&Copied| place.start <= copied.place.start && copied.place.end <= place.end;
        let copied: Vec<&Copied> = self.layout.copied().iter().filter(is_here).collect();
        stream.sum_copies(blocks, &copied, gradients.array, gradients.first)
    }

    fn layers_forward(
        &mut self,
        blocks: &mut B,
        parameters: &mut impl Parameters<B>,
        ws: &mut Workspace<B::Array>,
        mut cache: Option<&mut Cache<B::Array>>,
    ) -> Result<(), NnError> {
        parameters.need(blocks, (0, Phase::Forward))?;
        self.step(blocks, parameters.held(), None).embed(ws)?;
        let layers = self.config.num_hidden_layers;
        for layer in 0..layers {
            parameters.need(blocks, (layer + 1, Phase::Forward))?;
            ws.on_host.leave(blocks, &ws.inputs, layer)?;
            self.step(blocks, parameters.held(), cache.as_deref_mut()).layer(ws, layer)?;
            ws.on_host.left(blocks, &ws.inputs)?;
        }
        parameters.need(blocks, (layers + 1, Phase::Forward))?;
        self.step(blocks, parameters.held(), None).last_norm(ws)
    }

    fn step<'s>(
        &'s mut self,
        blocks: &'s mut B,
        weights: Held<'s, B::Array>,
        cache: Option<&'s mut Cache<B::Array>>,
    ) -> Step<'s, B> {
        let &mut Self {
            config,
            layout,
            programs,
            batch,
            shape,
            ref mut context,
            part,
            ref mut stream,
            z_weight,
        } = self;
        let stream = stream.as_mut().map(Stream::again);
        let context = context.as_mut().map(Context::again);
        Step {
            blocks,
            config,
            layout,
            weights,
            programs,
            batch,
            shape,
            cache,
            context,
            part,
            stream,
            z_weight,
        }
    }

    fn tokens(&self) -> usize {
        self.shape[0].saturating_mul(self.shape[1])
    }
}

/// Sets to 0 what of the gradients of a group belongs to no parameter; `array` has those of parameters from
/// an element on.
pub(crate) fn clear_between<B: Blocks>(
    blocks: &mut B,
    layout: &ParameterLayout,
    group: usize,
    (array, first): (&mut B::Array, usize),
) -> Result<(), NnError> {
    let group = &layout.groups()[group];
    let trained = layout.parameters()[group.parameters.clone()].iter().map(|p| &p.place);
    let places = trained.filter(|place| layout.trains(place)).cloned();
    let mut end = group.place.start;
    for place in places.chain(std::iter::once(group.place.end..group.place.end)) {
        let gap = end - first..place.start - first;
        if !gap.is_empty() {
            blocks.clear_part(PartMut { array, place: gap, accumulate: false })?;
        }
        end = place.end;
    }
    Ok(())
}

/// Where a pass finds parameters: all there, or each group when it is needed.
pub(crate) trait Parameters<B: Blocks> {
    /// A stage uses its group next. Stages come in their order.
    fn need(&mut self, blocks: &mut B, stage: (usize, Phase)) -> Result<(), NnError>;

    fn held(&self) -> Held<'_, B::Array>;
}

/// Where gradients go, too, and what becomes of those of a group.
pub(crate) trait Trained<B: Blocks>: Parameters<B> {
    /// The gradients of a group come next.
    fn begin(&mut self, blocks: &mut B, group: usize) -> Result<(), NnError>;

    /// Parameters, and where the gradients of the group go that has begun.
    fn split(&mut self) -> (Held<'_, B::Array>, Target<'_, B::Array>);

    /// The gradients of a group are complete.
    fn complete(
        &mut self,
        blocks: &mut B,
        group: usize,
        totals: &mut B::Totals,
    ) -> Result<(), NnError>;
}

/// A model whose parameters are all there, and all gradients.
pub(crate) struct Whole<'a, A> {
    pub weights: &'a A,
    /// Where gradients go; none without a backward pass.
    pub gradients: Option<Target<'a, A>>,
    /// The places of the gradients, where other arrays lie in their memory before they begin.
    pub reused: Option<&'a ParameterLayout>,
}

impl<B: Blocks> Parameters<B> for Whole<'_, B::Array> {
    fn need(&mut self, _: &mut B, _: (usize, Phase)) -> Result<(), NnError> {
        Ok(())
    }

    fn held(&self) -> Held<'_, B::Array> {
        Held::All(self.weights)
    }
}

impl<B: Blocks> Trained<B> for Whole<'_, B::Array> {
    fn begin(&mut self, blocks: &mut B, group: usize) -> Result<(), NnError> {
        let (Some(layout), Some(gradients)) = (self.reused, &mut self.gradients) else {
            return Ok(());
        };
        for group in layout.begun_with(group) {
            clear_between(blocks, layout, group, (gradients.array, 0))?;
        }
        Ok(())
    }

    fn split(&mut self) -> (Held<'_, B::Array>, Target<'_, B::Array>) {
        let gradients = self.gradients.as_mut().expect("a backward pass has gradients");
        (Held::All(self.weights), gradients.again())
    }

    fn complete(&mut self, _: &mut B, _: usize, _: &mut B::Totals) -> Result<(), NnError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use foveate::DType;

    use super::*;
    use crate::dry::Dry;
    use crate::precision::ParameterState;
    use crate::{Architecture, ModelConfig};

    /// Arrays that share memory lie apart at every block between which both are needed.
    #[test]
    fn what_is_looked_at_is_needed_by_the_block_before_so_that_nothing_lies_over_it() {
        let config = ModelConfig {
            vocab_size: 61,
            hidden_size: 24,
            intermediate_size: 40,
            num_hidden_layers: 3,
            num_attention_heads: 4,
            num_key_value_heads: Some(2),
            head_dim: Some(8),
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            rope_scaling: None,
            rope_pairing: Default::default(),
            max_position_embeddings: 64,
            tie_word_embeddings: false,
            architecture: Architecture::default(),
        };
        for (head_norms, output_norms) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let architecture =
                Architecture { head_norms, output_norms, ..config.architecture.clone() };
            let config = ModelConfig { architecture, ..config.clone() };
            let layout = ParameterLayout::new(&config, &[&[][..]; 3], &|_| false).unwrap();
            let (mut dry, mut ws) =
                (Dry::new(ParameterState::Exact.into(), 64), Workspace::default());
            let weights = dry.state("weights", DType::BF16, layout.elems());
            let mut each = dry.state("token losses", DType::F32, 18);
            let program = || LayerProgram { plan: &(), learned: &[] };
            let programs = [program(), program(), program()];
            let (config, layout, part) = (&config, &layout, &TensorPart::whole(&config));
            let (programs, batch, shape) = (&programs[..], &(), [2, 9]);
            let (context, stream, z_weight) = (None, None, 0.0);
            let mut pass =
                Pass { config, layout, programs, batch, shape, context, part, stream, z_weight };
            let mut seen = Vec::new();
            let look = &mut |dry: &mut Dry, _, block, array: &_| {
                let array: &crate::DryArray = array;
                seen.push((array.index.unwrap(), dry.blocks.len(), block));
                Ok(false)
            };
            pass.looked_at(&mut dry, &weights, &mut ws, &mut each, &mut (), look).unwrap();
            assert_eq!(seen.len(), 3 * (5 + usize::from(!output_norms)) + 3);
            for (index, now, block) in seen {
                let needed = &dry.arrays[index].needed;
                let is_needed = needed.iter().any(|of| of.start < now && now <= of.end);
                assert!(is_needed, "{block}, {head_norms} {output_norms}: {needed:?} at {now}");
            }
        }
    }
}
