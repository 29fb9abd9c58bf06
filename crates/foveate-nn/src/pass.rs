//! A pass over a batch: the stages of a model in their order, each with the group of parameters that it
//! uses. Training, evaluation and generation run the same stages.
//!
//! At every boundary the pass tells where the parameters come from which group is needed next, and where
//! the gradients go which are complete. Where all parameters are there ([`Whole`]) nothing happens
//! at a boundary.

use crate::backend::{Blocks, LayerProgram, PartMut};
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
}

impl<B: Blocks> Pass<'_, B> {
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
        ws.fit(blocks, self.config, part, self.shape, layers + 1, recompute.kept(layers))?;
        ws.fit_loss(blocks, self.config, part, self.tokens())?;
        ws.fit_backward(blocks, self.config, part, self.shape)?;
        self.layers_forward(blocks, parameters, ws, None)?;
        parameters.begin(blocks, layers + 1)?;
        let (weights, mut gradients) = parameters.split();
        self.step(blocks, weights, None).head_backward(ws, &mut gradients, totals)?;
        self.sum_copies(blocks, &mut gradients, layers + 1)?;
        parameters.complete(blocks, layers + 1, totals)?;
        for layer in (0..layers).rev() {
            parameters.need(blocks, (layer + 1, Phase::Backward))?;
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

    /// Pairs of query and key that the masks let through, in the mean of the heads, after a step.
    pub fn live_pairs(&self, blocks: &B, programs: &Programs, plans: &[B::Plan]) -> Option<f64> {
        match &self.context {
            Some(context) => Some(context.attention.live_pairs()),
            None => {
                // In the mean of all heads, of which other ranks have some.
                let share = self.part.heads.len() as f64 / self.part.all_heads as f64;
                programs.live_pairs(blocks, plans).map(|pairs| pairs * share)
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
            self.step(blocks, parameters.held(), cache.as_deref_mut()).layer(ws, layer)?;
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
