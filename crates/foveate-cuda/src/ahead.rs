//! The kernels that a problem will need, compiled before it comes: no GPU has to be there.
//!
//! What is compiled is what [`crate::CudaPlan`] asks the cache for, source by source: contiguous
//! operands, results and gradients in the dtype of the operands.

use foveate_problem::{Dims, Spec};

use crate::abi::BlockListsParams;
use crate::codegen::{Extent, Mods, ModsSource, Options};
use crate::config::{Config, Elem, Kernel};
use crate::error::CudaError;
use crate::planner::{Class, KernelOptions, KernelPlan, Sizes};
use crate::profile::Profile;
use crate::source::source;

/// How a problem is going to be run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// With a backward.
    pub backward: bool,
    /// For the same bits in every run.
    pub deterministic: bool,
    /// With captured indices checked, as host tensors always are.
    pub checked: bool,
}

/// The configuration and the source of every kernel that `spec` takes on operands of `dims`.
///
/// # Errors
/// Those of [`KernelPlan::new`], and a score that has no derivative.
pub fn sources(
    profile: &Profile,
    spec: &Spec,
    dims: &Dims,
    dtype: Elem,
    run: Run,
) -> Result<Vec<(Config, String)>, CudaError> {
    let gradient = match &spec.score {
        Some(score) if run.backward => {
            Some(score.gradient().map_err(|e| CudaError::argument(e.to_string()))?)
        }
        _ => None,
    };
    let class = Class {
        align: alignment(dtype, dims),
        deterministic: run.deterministic,
        checked: run.checked,
        ..Class::of(spec, dtype, dims, gradient.as_ref())
    };
    let sizes = Sizes::of(dims);
    let plan = KernelPlan::new(profile, &class, &sizes, run.backward, &KernelOptions::default())?;
    let mut all: Vec<(Config, String)> = Vec::new();
    for choice in &plan.kernels {
        let config = Config { group: dims.group(), ..choice.chosen.config.clone() };
        let forward = matches!(config.kernel, Kernel::Forward | Kernel::Combine);
        let (mask, score) = (spec.mask.as_ref(), spec.score.as_ref());
        let gradient = if forward { None } else { gradient.as_ref() };
        let mods = Mods { mask, score, gradient, dropout: spec.dropout.as_ref() };
        all.push((config.clone(), source(&config, &print(mods, dims, dtype, run, &config)?)));
        let walks = config.mask && config.kernel != Kernel::Combine;
        if walks {
            let mods = Mods { mask, ..Mods::default() };
            let lists = lists_config(run.checked);
            let text = source(&lists, &print(mods, dims, dtype, run, &config)?);
            if !all.iter().any(|(_, known)| *known == text) {
                all.push((lists, text));
            }
        }
    }
    Ok(all)
}

/// Prints mods for tiles of `tiles`.
fn print(
    mods: Mods<'_>,
    dims: &Dims,
    dtype: Elem,
    run: Run,
    tiles: &Config,
) -> Result<ModsSource, CudaError> {
    let extent = Extent {
        batch: dims.batch,
        heads_q: dims.heads_q,
        heads_kv: dims.heads_kv,
        queries: dims.len_q.next_multiple_of(tiles.queries()),
        keys: dims.len_k.next_multiple_of(tiles.tile_kv),
    };
    let options = Options {
        extent,
        fast_math: dtype.bytes() == 2,
        checked: run.checked,
        deterministic: run.deterministic,
    };
    ModsSource::new(mods, &options)
}

/// The kernel that makes block lists. Tiles are its arguments and elements are of no account, so
/// that one serves all.
pub(crate) fn lists_config(checked: bool) -> Config {
    let (mask, warps, stages) = (true, BlockListsParams::THREADS / 32, 1);
    let config = Config::new(Kernel::BlockLists, Elem::F16, 64, 64);
    Config { mask, warps, stages, checked, ..config }
}

/// Bytes that rows of contiguous operands are aligned to: 16, 8, 4 or 2.
fn alignment(dtype: Elem, dims: &Dims) -> usize {
    let bits = (dims.dim * dtype.bytes()) | (dims.dim_v * dtype.bytes()) | 16;
    1 << bits.trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;
    use foveate_mods::{masks, scores};

    fn dims(dim: usize, dim_v: usize) -> Dims {
        Dims {
            batch: 2,
            heads_q: 8,
            heads_kv: 2,
            len_q: 1000,
            len_k: 900,
            dim,
            dim_v,
            shared_kv: false,
            packed: false,
        }
    }

    #[test]
    fn rows_are_aligned_as_contiguous_rows_are() {
        for (dtype, dim, dim_v, align) in [
            (Elem::Bf16, 64, 128, 16),
            (Elem::Bf16, 64, 36, 8),
            (Elem::F16, 34, 64, 4),
            (Elem::F16, 64, 33, 2),
            (Elem::F32, 33, 64, 4),
        ] {
            assert_eq!(alignment(dtype, &dims(dim, dim_v)), align, "{dim}/{dim_v}");
        }
    }

    #[test]
    fn a_masked_problem_takes_its_kernels_and_those_of_its_block_lists() {
        let score = scores::soft_cap(30.0).unwrap();
        let (mask, score) = (Some(masks::causal()), Some(score));
        let spec = Spec { mask, score, scale: None, dropout: None };
        let profile = Profile::named("a100").unwrap();
        let kernels = |run: Run| {
            let found = sources(&profile, &spec, &dims(64, 64), Elem::Bf16, run).unwrap();
            found.into_iter().map(|(config, _)| config.kernel).collect::<Vec<_>>()
        };
        let forward = kernels(Run::default());
        assert_eq!(forward, [Kernel::Forward, Kernel::BlockLists]);
        let both = kernels(Run { backward: true, deterministic: true, checked: false });
        for kernel in [Kernel::Delta, Kernel::Backward, Kernel::BackwardDq] {
            assert!(both.contains(&kernel), "{both:?}");
        }
    }
}
