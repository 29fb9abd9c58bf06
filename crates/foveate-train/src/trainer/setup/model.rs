//! The model of a run, and whether there is memory for its steps.

use foveate_nn::{
    AttentionConfig, Blocks, MemoryEstimate, Model, ModelConfig, Recomputation, Recompute,
    StepKind, Training,
};
use foveate_shard::MeshAxis;

use crate::checkpoint::CheckpointConfig;
use crate::error::TrainError;
use crate::host_memory::{HostMemory, check_offload, size};
use crate::machine::{self, Free};
use crate::memory::{Planned, Setting, beside, least_that_fits, save_copy_bytes};
use crate::ranks::{ROWS, Ranks};
use crate::recipe::Recipe;
use crate::tensor::part_of;
use crate::tokens::{Tokenizer, memory_of};

/// A model without its weights.
pub(super) struct Made<B: Blocks> {
    pub model: Model<B>,
    pub attention: AttentionConfig,
    pub memory: MemoryEstimate,
    pub recompute: Recomputation,
    /// Whether steps go on while a checkpoint is written.
    pub saves_beside: bool,
}

/// The model without its weights, and its attention program; or what is wrong with the recipe.
pub(super) fn model<B: Blocks>(
    ranks: Ranks<'_>,
    recipe: &Recipe,
    from: Option<&CheckpointConfig>,
    tokenizer: &Tokenizer,
    mut blocks: B,
) -> Result<Made<B>, String> {
    let (config, attention) = sizes(recipe, from, tokenizer)?;
    let part = part_of(ranks, &config).map_err(|e| format!("mesh.tensor: {e}"))?;
    let rows = recipe.train.batch_rows.div_ceil(ranks.mesh().size_of(&ROWS));
    let len = recipe.data.len.div_ceil(ranks.mesh().size(MeshAxis::Context));
    let training = |recompute| Training {
        recompute,
        in_backward: recipe.optimizer.in_backward,
        one_batch: recipe.train.accumulate == 1,
        squares: recipe.optimizer.rule().keeps_squares(),
        cutting: recipe.mesh.cutting(&ranks.mesh()),
    };
    let frozen = |name: &str| recipe.optimizer.is_frozen(name);
    let free = blocks.free_bytes().map_err(|e| e.to_string())?;
    check_offload(recipe.train.offload, free.is_some())?;
    let host = HostMemory::here(ranks.world()).map_err(|e| e.to_string())?;
    let gpu = free.map(|free| (free, blocks.total_bytes().unwrap_or(free)));
    let there = free.or_else(|| machine::free().map(|free| free.bytes));
    // By the sizes alone first: nothing is made that cannot be.
    let bytes = |recompute| {
        let kind = StepKind::Training(training(recompute));
        let account = config.dry_run_on(&blocks, &attention, &frozen, rows, len, kind);
        let memory = account.map_err(|e| e.to_string())?.memory();
        let process =
            if free.is_some() { beside(recipe, &config, ranks.alone()) } else { memory.process };
        Ok::<_, String>(MemoryEstimate { process, ..memory })
    };
    let recompute = match recipe.train.recomputation() {
        Some(recompute) => recompute,
        None => {
            let total = |again| Ok::<_, String>(bytes(again)?.total());
            let (layers, offload) = (config.num_hidden_layers, recipe.train.offload);
            let own = least_that_fits(layers, there, offload, total)?;
            most_again(ranks, own).map_err(|e| e.to_string())?
        }
    };
    let words = tokenizer.path().map_or(0, memory_of);
    let (setting, of_model) = (Setting { recompute, ..Setting::of(recipe) }, config.clone());
    let planned = Planned { recipe, config: &of_model, attention: &attention };
    let nearest = |there, words| {
        let found = match free {
            Some(_) => planned.nearest(&setting, there, host.map(HostMemory::each)),
            None => {
                let state = recipe.precision.state.unwrap_or_default();
                planned.nearest_on_cpu(&Setting { state, ..setting }, there, words)
            }
        };
        found.ok().flatten()
    };
    fits(&bytes(recompute)?, gpu, Some(&|there| nearest(there, words)))?;
    let precision = blocks.precision();
    let model = Model::unfilled_part(blocks, config, &attention, &frozen, part);
    let model = model.map_err(|e| e.to_string())?;
    recipe.optimizer.check_groups(model.layout())?;
    let memory = model.training_memory(rows, len, training(recompute));
    let mut memory = memory.map_err(|e| e.to_string())?;
    memory.process = match free {
        // What the process takes is not the device's.
        Some(_) => beside(recipe, &of_model, ranks.alone()),
        None => memory.process + words,
    };
    let copy = save_copy_bytes(
        recipe,
        precision,
        model.layout(),
        ranks.count() / ranks.mesh().size(MeshAxis::Tensor),
    );
    if let Some(host) = host {
        let there = free.unwrap_or_default();
        host.admit(&setting, &memory, || Some(nearest(there, words)?.0))?;
    }
    let left = host.map(|host| host.beside(memory.host));
    let saves_beside = saves_beside(recipe.train.async_save, free.is_some(), copy, left)?;
    let copied = if free.is_none() && saves_beside { copy } else { 0 };
    memory.process += copied;
    fits(&memory, gpu, Some(&|there| nearest(there, words + copied)))?;
    Ok(Made { model, attention, memory, recompute, saves_beside })
}

/// The sizes of the model and its attention programs: the checkpoint's, or the recipe's.
fn sizes(
    recipe: &Recipe,
    from: Option<&CheckpointConfig>,
    tokenizer: &Tokenizer,
) -> Result<(ModelConfig, AttentionConfig), String> {
    let vocab = tokenizer.own_vocab_size();
    let config = match (from, recipe.model_config(tokenizer.vocab_size())?) {
        (Some(from), _) => {
            recipe.check_layers(from.model.num_hidden_layers)?;
            from.model.clone()
        }
        (None, Some(config)) => config,
        (None, None) => unreachable!("a recipe without a checkpoint has sizes"),
    };
    let (len, longest, known) =
        (recipe.data.len, config.max_position_embeddings, config.vocab_size);
    if len > longest {
        return Err(format!("data.len is {len}, but the model takes {longest} tokens at most"));
    }
    if vocab > known {
        return Err(format!(
            "the tokenizer has {vocab} tokens, but the model knows {known}; leave data.tokenizer \
             out to take the checkpoint's own"
        ));
    }
    let attention = recipe.attention.as_ref().or(from.map(|from| &from.attention));
    let attention = attention
        .ok_or("the section [attention] is missing; write mask = \"causal & document\"")?;
    Ok((config, attention.clone()))
}

/// Whether steps go on while a checkpoint is written: as the recipe says it in `asked`, or else on a GPU where a copy
/// of what is saved, of `copy` bytes, takes half of the `host` bytes that are free or less: it is pinned as long as
/// the run goes on.
fn saves_beside(
    asked: Option<bool>,
    on_gpu: bool,
    copy: u64,
    host: Option<u64>,
) -> Result<bool, String> {
    if !on_gpu {
        return Ok(asked.unwrap_or(false));
    }
    let holds = host.is_none_or(|bytes| bytes >= copy);
    if asked == Some(true) && !holds {
        return Err(format!(
            "train.async_save = true takes {} of host memory for a copy of what is saved, which is not \
             free; leave it out, or set it to false",
            size(copy)
        ));
    }
    Ok(asked.unwrap_or_else(|| host.is_none_or(|bytes| bytes / 2 >= copy)))
}

/// What the rank with the least memory computes again, which all do: they meet in the passes.
fn most_again(ranks: Ranks<'_>, own: Recomputation) -> Result<Recomputation, TrainError> {
    let what = Recompute::ALL.iter().position(|&what| what == own.what).unwrap_or(0) as u64;
    let told = what << 32 | own.layers.min(u32::MAX as usize) as u64;
    let all = ranks.all(&told.to_le_bytes())?;
    let all = all.iter().flat_map(|told| told.as_chunks().0).map(|&told| u64::from_le_bytes(told));
    let most = all.max().unwrap_or(told);
    let what = Recompute::ALL.get((most >> 32) as usize).copied().unwrap_or(own.what);
    Ok(Recomputation { what, layers: most as u32 as usize, ..own })
}

/// Refuses, with the remedy, what cannot be held in memory: of the GPU, by its free bytes and all, or of this
/// machine. `nearest` says which setting fits so many bytes, where that is known.
pub(super) fn fits(
    need: &MemoryEstimate,
    gpu: Option<(u64, u64)>,
    nearest: Option<&dyn Fn(u64) -> Option<(String, MemoryEstimate)>>,
) -> Result<(), String> {
    let there = match gpu {
        None => machine::free(),
        Some((bytes, _)) => Some(Free { bytes, by: "the GPU has free" }),
    };
    let Some(Free { bytes, by }) = there.filter(|there| need.total() > there.bytes) else {
        return Ok(());
    };
    let taken = match gpu.filter(|&(_, all)| need.total() <= all) {
        None => String::new(),
        Some((free, all)) => format!(
            ", since other work has {} of its {}: end that, and it fits",
            size(all.saturating_sub(free)),
            size(all)
        ),
    };
    let remedy = match nearest.map(|nearest| nearest(bytes)) {
        None => "lower train.batch_rows or data.len, set train.recompute = \"full\", or choose a \
                 smaller model"
            .to_owned(),
        Some(Some((keys, less))) => {
            let host = match less.host {
                0 => String::new(),
                bytes => format!(", and {} of the host's memory", size(bytes)),
            };
            format!("with {keys} it takes {}{host}", size(less.total()))
        }
        Some(None) => {
            "no other rows, recomputation or state make it fit: lower data.len, or choose a smaller \
             model"
                .to_owned()
        }
    };
    Err(format!(
        "the run takes {}, of which {} are one step's activations, but {by} {}{taken}; {remedy}",
        size(need.total()),
        size(need.activations),
        size(bytes)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_what_is_saved_is_made_where_the_host_has_memory_for_it() {
        assert_eq!(saves_beside(None, true, 5, Some(9)), Ok(false));
        assert_eq!(saves_beside(None, true, 5, Some(10)), Ok(true));
        assert_eq!(saves_beside(Some(true), true, 5, Some(5)), Ok(true));
        assert!(saves_beside(Some(true), true, 5, Some(4)).is_err());
    }

    #[test]
    fn what_a_gpu_has_no_memory_for_is_refused_with_what_would_fit() {
        let need = MemoryEstimate {
            weights: 3 << 30,
            gradients: 3 << 30,
            optimizer: 6 << 30,
            activations: 2 << 30,
            attention: 0,
            process: 0,
            host: 0,
        };
        let full = || ("train.recompute = \"full\"".to_owned(), MemoryEstimate::default());
        let gpu = |free: u64| Some((free, free));
        fits(&need, gpu(14 << 30), Some(&|_| None)).unwrap();
        let told = fits(&need, gpu((14 << 30) - 1), Some(&|_| Some(full()))).unwrap_err();
        assert!(told.contains("takes 14.0 GiB, of which 2.0 GiB are one step's"), "{told}");
        let remedy = "the GPU has free 14.0 GiB; with train.recompute = \"full\" it takes 0.0 MiB";
        assert!(told.contains(remedy), "{told}");
        let told = fits(&need, gpu(1), Some(&|_| None)).unwrap_err();
        assert!(told.contains("choose a smaller model"), "{told}");
        let small = MemoryEstimate { weights: 9 << 20, activations: 3 << 19, ..Default::default() };
        let told = fits(&small, gpu(5 << 19), Some(&|_| None)).unwrap_err();
        let sizes = "takes 10.5 MiB, of which 1.5 MiB are one step's activations, but the GPU has \
                     free 2.5 MiB;";
        assert!(told.contains(sizes), "{told}");
        // It would fit a GPU that nobody else used.
        let told = fits(&need, Some((4 << 30, 16 << 30)), Some(&|_| Some(full()))).unwrap_err();
        let taken = "the GPU has free 4.0 GiB, since other work has 12.0 GiB of its 16.0 GiB: end \
                     that, and it fits; with train.recompute";
        assert!(told.contains(taken), "{told}");
    }
}
