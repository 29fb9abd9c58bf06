//! What moves between ranks in a step, beside the keys of attention: derived from the map and from what a model
//! has, and proven before the first step.
//!
//! [`foveate_shard`] knows of no model. Here its plan of a step is made for one ([`shape`]), and what the model
//! has on a rank is held against what was proven: its parts of parameters, its heads, columns and
//! token ids, and its tokens between products.

use std::ops::Range;

use foveate_nn::moments::BLOCK;
use foveate_nn::{
    Blocks, Copied, Holders, Model, ModelConfig, NnError, ParameterLayout, Recomputation,
    Recompute, Reshard, Share, TensorPart,
};
use foveate_shard::step::{Again, CopiedElements, Copies, GroupShape, Stays, StepPlan, StepShape};
use foveate_shard::{Axis, Lengths, Map, Mesh, ProvenStep, Ranges, Sharding};

use crate::error::TrainError;
use crate::ranks::Ranks;
use crate::recipe::{Recipe, ReduceDtype};

/// What a step of `recipe` is derived from for the parts of `model` that `tensor` ranks have. Of its batches two
/// stand for all: the others are as the second.
///
/// # Errors
/// When the model cannot be cut over so many ranks.
pub fn shape<B: Blocks>(
    model: &Model<B>,
    recipe: &Recipe,
    recompute: Recomputation,
    tensor: usize,
) -> Result<StepShape, NnError> {
    let (config, precision) = (model.config(), model.precision());
    let part = |part: usize| {
        let part = TensorPart::of(config, part, tensor)?;
        Ok::<_, NnError>(groups(&model.layout_of(&part)?))
    };
    let again = |layer: usize| {
        let what = if layer < recompute.layers { recompute.what } else { Recompute::None };
        let full = what == Recompute::Full;
        Again {
            qkv: full || what == Recompute::Attention,
            out: full,
            gate_up: full || what == Recompute::Mlp,
            down: full && config.architecture.output_norms,
        }
    };
    let weights = precision.weights.into();
    let reduces = match recipe.mesh.reduce_dtype {
        ReduceDtype::F32 => precision.gradients.into(),
        ReduceDtype::Bf16 => foveate::tensor::ElementType::BF16,
    };
    Ok(StepShape {
        groups: (0..tensor).map(part).collect::<Result<_, _>>()?,
        block: BLOCK,
        tied: config.tie_word_embeddings,
        stays: match recipe.mesh.reshard {
            Reshard::Always => Stays::Layer,
            Reshard::AfterBackward => Stays::Batch,
            Reshard::Never => Stays::Step,
        },
        again: (0..config.num_hidden_layers).map(again).collect(),
        batches: if recipe.optimizer.in_backward { 1 } else { recipe.train.accumulate.clamp(1, 2) },
        in_backward: recipe.optimizer.in_backward,
        weights,
        reduces,
    })
}

/// The groups of a layout, with what of them other ranks of `tensor` hold.
fn groups(layout: &ParameterLayout) -> Vec<GroupShape> {
    let of = |group: &foveate_nn::ParameterGroup| {
        let within = |copied: &&Copied| {
            group.place.start <= copied.place.start && copied.place.end <= group.place.end
        };
        let copied = layout.copied().iter().filter(within).map(|copied| CopiedElements {
            elements: copied.place.start - group.place.start..copied.place.end - group.place.start,
            among: match copied.among {
                Holders::All => Copies::All,
                Holders::KvHeads => Copies::KvHeads,
            },
            of: match copied.among {
                Holders::All if is_norm_of_stream(layout, &copied.place) => Axis::Stream,
                Holders::All | Holders::KvHeads => Axis::Heads,
            },
        });
        GroupShape {
            name: group.name.clone(),
            trained: group.place.len(),
            frozen: group.frozen.len(),
            copied: copied.collect(),
        }
    };
    layout.groups().iter().map(of).collect()
}

/// Whether a parameter is of a norm that each rank takes of its own tokens, and not of its heads.
fn is_norm_of_stream(layout: &ParameterLayout, place: &Range<usize>) -> bool {
    let parameter = layout.parameters().iter().find(|p| p.place == *place);
    let name = parameter.map_or("", |p| p.name.as_str());
    name.ends_with("norm.weight") && !name.contains("q_norm") && !name.contains("k_norm")
}

/// Lengths of the axes of a model's arrays, for a batch of `rows` rows of `len` tokens.
pub fn lengths(config: &ModelConfig, [rows, len]: [usize; 2]) -> Lengths {
    let dim = config.dim();
    Lengths {
        batch: rows,
        seq: len,
        kv_seq: len,
        heads: config.num_attention_heads,
        kv_heads: config.kv_heads(),
        dim,
        dim_v: dim,
        hidden: config.hidden_size,
        ffn: config.intermediate_size,
        vocab: config.vocab_size,
    }
}

/// The map with the cuts of a batch of `recipe`, tokens in their own order.
///
/// # Errors
/// When the heads of the model cannot be cut.
pub fn sharding<B: Blocks>(
    model: &Model<B>,
    recipe: &Recipe,
    mesh: Mesh,
) -> Result<Sharding, foveate_shard::ShardError> {
    let lengths = lengths(model.config(), [recipe.train.batch_rows, recipe.data.len]);
    Sharding::new(Map::new(mesh), &lengths)
}

/// The step of a run on several ranks, proven, or why it cannot run. `cuts` are those of a batch whose rows are
/// cut over `context`. Every rank gets the same.
///
/// # Errors
/// When the step contradicts itself, or the model has something else on this rank than was proven.
pub(crate) fn proven<B: Blocks>(
    ranks: Ranks<'_>,
    model: &Model<B>,
    recipe: &Recipe,
    recompute: Recomputation,
    cuts: Option<Sharding>,
) -> Result<ProvenStep, TrainError> {
    let tensor = model.tensor_part().parts;
    let cuts = match cuts {
        Some(cuts) => cuts,
        None => sharding(model, recipe, ranks.mesh())?,
    };
    let plan = StepPlan::new(&cuts, &shape(model, recipe, recompute, tensor)?)?;
    let proven = plan.prove().map_err(|e| TrainError::model(format!("the plan of a step: {e}")))?;
    holds(proven.plan(), ranks.rank(), model, model.share())
        .map_err(|what| TrainError::model(format!("the plan of a step: {what}")))?;
    Ok(proven)
}

/// Whether what `model` has on a rank, of its parameters `share`, is what a step says.
///
/// # Errors
/// The first that differs.
fn holds<B: Blocks>(
    plan: &StepPlan,
    rank: usize,
    model: &Model<B>,
    share: &Share,
) -> Result<(), String> {
    let differs = |what: &str, planned: String, found: String| {
        Err(format!("rank {rank} has {what} {found}, and {planned} are proven"))
    };
    let of_model = model.tensor_part();
    let cut = plan.sharding.range(Axis::Seq, rank);
    let stream = of_model.stream(cut.len());
    let stream = cut.start + stream.start..cut.start + stream.end;
    for (axis, found) in [
        (Axis::Heads, &of_model.heads),
        (Axis::KvHeads, &of_model.kv_heads),
        (Axis::Ffn, &of_model.ffn),
        (Axis::Vocab, &of_model.vocab),
        (Axis::Stream, &stream),
    ] {
        let planned = plan.sharding.range(axis, rank);
        if planned != *found {
            return differs(axis.name(), format!("{planned:?}"), format!("{found:?}"));
        }
    }
    let (layout, owned) = (model.layout(), &plan.ranks[rank].owned);
    for ((group, own), planned) in layout.groups().iter().zip(share.groups()).zip(owned.iter()) {
        let here = |place: &Range<usize>, all: &Range<usize>, first: usize| {
            place.start - all.start + first..place.end - all.start + first
        };
        let found = Ranges::of([
            here(&own.trained, &group.place, 0),
            here(&own.frozen, &group.frozen, group.place.len()),
        ]);
        if found != planned.elements {
            let what = format!("elements of {}", group.name);
            return differs(&what, planned.elements.to_string(), found.to_string());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
