//! What a pass over a batch is made of: the batch on the device, plans that are bound to it, and places for its
//! arrays.

use super::{Passed, Running};
use crate::account::{self, StepKind};
use crate::backend::{Blocks, LayerProgram, PackedHeads, PassIdentity};
use crate::batch::{Batch, IGNORE, Queued};
use crate::config::ModelConfig;
use crate::context::{Context, ContextAttention};
use crate::error::NnError;
use crate::gathering::Gathering;
use crate::groups::PassingGradients;
use crate::parameters::ParameterLayout;
use crate::pass::Pass;
use crate::plans::Programs;
use crate::rope::RopeTable;
use crate::sharing::StepRanks;
use crate::stream::Stream;
use crate::tape::Workspace;
use crate::tensor::TensorPart;

/// Kinds of passes whose places are kept.
const PLACES: usize = 8;

/// What passes read of a model and nothing changes.
#[derive(Clone, Copy)]
pub(super) struct Fixed<'a> {
    pub config: &'a ModelConfig,
    /// The sizes of what this rank has.
    pub local: &'a ModelConfig,
    pub part: &'a TensorPart,
    pub layout: &'a ParameterLayout,
    pub programs: &'a Programs,
    pub z_weight: f32,
}

/// A pass whose arrays have their places, and what it runs with.
pub(super) struct Begun<'a, B: Blocks> {
    pub pass: Pass<'a, B>,
    pub blocks: &'a mut B,
    pub workspace: &'a mut Workspace<B::Array>,
    pub gathering: &'a mut Option<Gathering<B>>,
    pub passing: &'a mut PassingGradients<B::Array>,
    /// Those that take steps together.
    pub ranks: Option<&'a StepRanks>,
}

impl<B: Blocks> Running<B> {
    /// Whether arrays of a pass may share memory, as far as ranks let them: this one has all parameters, and
    /// all tokens of its rows, which it has not in a pass over ranks of `context`.
    pub(super) fn shares(&self, Fixed { part, .. }: Fixed<'_>, over_context: bool) -> bool {
        let has_all = self.gathering.is_none() && self.context.is_none() && !part.is_cut();
        has_all && !over_context
    }

    /// Begins a pass over a batch that was prepared, with the programs of its layers.
    pub(super) fn begin<'a>(
        &'a mut self,
        fixed: Fixed<'a>,
        prepared: &'a Prepared<B>,
        of_layers: &'a [LayerProgram<'a, B>],
        context: Option<&'a mut (dyn ContextAttention + '_)>,
        kind: StepKind,
        idle: Option<&B::Array>,
    ) -> Result<Begun<'a, B>, NnError> {
        let shares = self.shares(fixed, context.is_some());
        self.place(fixed, prepared.shape, (shares, kind), idle)?;
        let Self { blocks, workspace, gathering, passing, ranks, tensor, context: device, .. } =
            self;
        let heads = PackedHeads::of(fixed.local, prepared.shape);
        let context = Context::of(context, device, blocks, fixed.programs, heads)?;
        let (part, shape) = (fixed.part, prepared.shape);
        let transfers = tensor.as_deref_mut().filter(|_| part.is_cut());
        let stream = transfers.map(|transfers| Stream { part, shape, transfers: Some(transfers) });
        let pass = prepared.pass(fixed, of_layers, context, stream);
        Ok(Begun { pass, blocks, workspace, gathering, passing, ranks: ranks.as_ref() })
    }

    /// Gives the arrays of the next pass their places, some of them in the memory of gradients that is
    /// `idle`; where they do not share memory, each has its own.
    fn place(
        &mut self,
        Fixed { local, part, layout, programs, .. }: Fixed<'_>,
        shape: [usize; 2],
        (shares, kind): (bool, StepKind),
        idle: Option<&B::Array>,
    ) -> Result<(), NnError> {
        let Self { blocks, workspace, places, .. } = self;
        if !shares || !blocks.shares_memory() {
            return workspace.arena.begin(blocks, None, None);
        }
        let reuses = idle.is_some();
        // Fewer rows lie where more do, so that the last of an evaluation take no more memory.
        let holds = |&([rows, len], of, reused): &Passed| {
            rows >= shape[0] && len == shape[1] && of == kind && reused == reuses
        };
        let known = places.iter().position(|(of, _)| holds(of));
        let index = match known {
            Some(index) => index,
            None => {
                let learned = programs.learned();
                let made =
                    account::places(blocks, local, part, layout, &learned, shape, kind, reuses)?;
                places.truncate(PLACES - 1);
                places.insert(0, ((shape, kind, reuses), made));
                0
            }
        };
        let places = places[index].1.as_ref();
        if places.is_some_and(|places| workspace.arena.must_grow(places)) {
            // Nothing keeps the memory of the smaller one.
            blocks.forget_passes();
            *workspace = Workspace::default();
        }
        workspace.arena.begin(blocks, places, idle)
    }
}

/// A batch on the device, with what depends on it.
pub(super) struct Prepared<B: Blocks> {
    batch: B::Batch,
    /// A plan for each program, bound to the documents; none where other ranks hold tokens of the
    /// rows.
    pub plans: Vec<B::Plan>,
    shape: [usize; 2],
}

impl<B: Blocks> Prepared<B> {
    pub fn new(
        Running { blocks, plans, tables, tensor, .. }: &mut Running<B>,
        Fixed { config, local, part, programs, .. }: Fixed<'_>,
        batch: &Batch<'_>,
        context: Option<&dyn ContextAttention>,
    ) -> Result<Self, NnError> {
        batch.validate(config)?;
        if part.is_cut() && tensor.is_none() {
            let reason =
                "is of a part of a model, without transfers to the ranks that have the others";
            return Err(NnError::batch(format!("the batch {reason}")));
        }
        let shape = [batch.rows, batch.len];
        let own = batch.positions.iter().max().map_or(0, |&p| p as usize + 1);
        let reaches = context.map_or(0, ContextAttention::positions);
        RopeTable::reach_all(tables, config, own.max(reaches));
        let uploaded = blocks.upload(batch, tables)?;
        if context.is_some() {
            return Ok(Self { batch: uploaded, plans: Vec::new(), shape });
        }
        let (heads, first) = (PackedHeads::of(local, shape), part.first_heads());
        let keys = programs.mean_kv_len(batch)?;
        let plans = plans.of(blocks, programs, heads, first, keys)?;
        let bind = |plan: &B::Plan| blocks.bind(plan, batch.documents, &uploaded);
        let plans = plans.iter().map(bind).collect::<Result<_, _>>()?;
        Ok(Self { batch: uploaded, plans, shape })
    }

    /// Of a pass over the batch, of which `numbers` say what it is beside its shape.
    pub fn identity(&self, numbers: impl Iterator<Item = u64>) -> PassIdentity<'_, B> {
        let shape = self.shape.map(|n| n as u64);
        let numbers = shape.into_iter().chain(numbers).collect();
        PassIdentity::new(numbers, &self.batch, &self.plans)
    }

    pub fn of_layers<'a>(&'a self, programs: &'a Programs) -> Vec<LayerProgram<'a, B>> {
        match self.plans.is_empty() {
            true => Vec::new(),
            false => programs.of_layers(&self.plans),
        }
    }

    fn pass<'a>(
        &'a self,
        Fixed { local: config, part, layout, z_weight, .. }: Fixed<'a>,
        programs: &'a [LayerProgram<'a, B>],
        context: Option<Context<'a, B>>,
        stream: Option<Stream<'a, B>>,
    ) -> Pass<'a, B> {
        let (batch, shape) = (&self.batch, self.shape);
        Pass { config, layout, programs, batch, shape, context, part, stream, z_weight }
    }

    pub fn queued(&self, live_pairs: Option<f64>, batch: &Batch<'_>) -> Queued {
        let tokens = batch.labels.iter().filter(|&&l| l != IGNORE).count();
        Queued { tokens, live_pairs }
    }
}
