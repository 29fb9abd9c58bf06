//! The kernels that a problem will need, compiled before it comes: no GPU has to be there.
//!
//! What is compiled is what [`crate::CudaPlan`] asks the cache for, source by source: contiguous
//! operands, results and gradients in the dtype of the operands.

use std::sync::Arc;

use foveate_mods::ScoreGradient;
use foveate_problem::{Dims, Spec};
use foveate_tensor::DType;

use crate::abi::BlockListsParams;
use crate::check;
use crate::codegen::{Extent, Mods, ModsSource, Options};
use crate::config::{Config, Elem, Kernel};
use crate::error::CudaError;
use crate::plan::for_entry;
use crate::planner::{Candidate, Choice, Class, KernelOptions, KernelPlan, Sizes, admit};
use crate::settle::{settle, tolerate};
use crate::source::source;
use crate::tuner::Records;
use foveate_gpu::GpuError;
use foveate_gpu::nvrtc::Compiled;
use foveate_gpu::profile::Profile;

/// How a problem is going to be run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// With a backward.
    pub backward: bool,
    /// For the same bits in every run.
    pub deterministic: bool,
    /// With captured indices checked, as host tensors always are.
    pub checked: bool,
    /// With keys and values in pages.
    pub paged: bool,
}

/// A kernel that a problem will need, before it is settled on (see `settle`).
#[derive(Debug)]
pub struct Ahead<'a> {
    profile: Profile,
    choice: Choice,
    spec: &'a Spec,
    gradient: Option<Arc<ScoreGradient>>,
    dims: Dims,
    run: Run,
}

/// How a problem is planned.
#[derive(Clone, Debug)]
pub struct Planned {
    /// What its kernels are compiled for.
    pub class: Class,
    /// Its sizes, as finely as they decide.
    pub sizes: Sizes,
    /// What is chosen.
    pub plan: KernelPlan,
    /// The derivative of the score, for a backward.
    gradient: Option<Arc<ScoreGradient>>,
}

/// Plans `spec` on operands of `dims` as [`crate::CudaPlan`] does, for a GPU of which there may be
/// `records`.
///
/// # Errors
/// Those of [`admit`] and [`KernelPlan::new`], and a score that has no derivative.
pub fn plan(
    profile: &Profile,
    spec: &Spec,
    dims: &Dims,
    dtype: DType,
    run: Run,
    options: &KernelOptions,
    records: Option<&Records>,
) -> Result<Planned, CudaError> {
    let dtype = admit(profile, dims, dtype)?;
    let gradient = match &spec.score {
        Some(score) if run.backward => Some(Arc::new(score.gradient()?)),
        _ => None,
    };
    let class = Class {
        align: alignment(dtype, dims),
        deterministic: run.deterministic,
        checked: run.checked,
        paged: run.paged,
        ..Class::of(spec, dtype, dims, gradient.as_deref())
    };
    let sizes = Sizes::of(dims).under(spec);
    let recorded = |kernel| records?.tiles(kernel, &class, &sizes, spec);
    let plan = KernelPlan::with_records(profile, &class, &sizes, run.backward, options, &recorded)?;
    Ok(Planned { class, sizes, plan, gradient })
}

/// Every kernel that `spec` takes on operands of `dims`, on a GPU of which there may be `records`.
///
/// # Errors
/// Those of [`plan`].
pub fn kernels<'a>(
    profile: &Profile,
    spec: &'a Spec,
    dims: &Dims,
    dtype: DType,
    run: Run,
    records: Option<&Records>,
) -> Result<Vec<Ahead<'a>>, CudaError> {
    let options = KernelOptions::default();
    let Planned { plan, gradient, .. } = plan(profile, spec, dims, dtype, run, &options, records)?;
    let ahead = |choice| Ahead {
        profile: profile.clone(),
        choice,
        spec,
        gradient: gradient.clone(),
        dims: *dims,
        run,
    };
    Ok(plan.kernels.into_iter().map(ahead).collect())
}

impl Ahead<'_> {
    /// Compiles what a plan will compile. Returns configuration and source of the kernel that will
    /// run, and of those that go with it.
    ///
    /// # Errors
    /// Those of `compile`; a kernel whose shared memory is not what was planned.
    pub fn build(
        &self,
        compile: impl Fn(&str) -> Result<Arc<Compiled>, GpuError>,
    ) -> Result<Vec<(Config, String)>, CudaError> {
        let settled = settle(&self.choice, |candidate| {
            let sources = self.sources(candidate)?;
            let (config, text) = &sources[0];
            let compared = check::compare(config, &*compile(text)?)?;
            Ok((sources, tolerate(candidate, &self.profile, compared)))
        })?;
        let sources = settled.made;
        sources[1..].iter().try_for_each(|(_, text)| compile(text).map(drop))?;
        Ok(sources)
    }

    /// The kernel of a candidate, the one that makes its block lists, and what else a pass launches
    /// of its file.
    fn sources(&self, candidate: &Candidate) -> Result<Vec<(Config, String)>, CudaError> {
        let config = Config { group: self.dims.group(), ..candidate.config.clone() };
        let text = source(&config, &self.print(&config, false)?);
        let mut sources = vec![(config.clone(), text)];
        let walks = config.mask && !matches!(config.kernel, Kernel::Combine | Kernel::Rests);
        if walks {
            let lists = lists_config(self.run.checked);
            let mods = self.print(&config, true)?;
            let text = source(&lists, &mods);
            sources.push((lists, text));
            if mods.bounded().next().is_some() {
                let table = table_config();
                let text = source(&table, &no_mods());
                sources.push((table, text));
            }
        }
        let captures = self.gradient.as_ref().is_some_and(|g| !g.captures().is_empty());
        if config.kernel == Kernel::BackwardDq && captures {
            let config = for_entry(config, "fv_capture_sums");
            let text = source(&config, &self.print(&config, false)?);
            sources.push((config, text));
        }
        Ok(sources)
    }

    /// Prints the mods that a kernel of these tiles evaluates, or with `lists` the one that makes
    /// its block lists.
    fn print(&self, tiles: &Config, lists: bool) -> Result<ModsSource, CudaError> {
        let Self { spec, dims, run, .. } = self;
        let forward = matches!(tiles.kernel, Kernel::Forward | Kernel::Combine);
        let mask = spec.mask.as_ref();
        let mods = match lists {
            true => Mods { mask, ..Mods::default() },
            false => Mods {
                mask,
                score: spec.score.as_ref(),
                gradient: self.gradient.as_deref().filter(|_| !forward),
                dropout: spec.dropout.as_ref(),
            },
        };
        let extent = Extent {
            batch: dims.batch,
            heads_q: dims.heads_q,
            heads_kv: dims.heads_kv,
            queries: dims.len_q.next_multiple_of(tiles.queries()),
            keys: dims.len_k.next_multiple_of(tiles.tile_kv),
        };
        let options = Options {
            extent,
            fast_math: tiles.dtype.bytes() == 2,
            checked: run.checked,
            deterministic: run.deterministic,
        };
        ModsSource::new(mods, &options)
    }
}

/// The kernel that makes range tables of captured buffers.
pub(crate) fn table_config() -> Config {
    Config { warps: 32, stages: 1, ..Config::new(Kernel::RangeTable, Elem::F16, 64, 64) }
}

/// The kernel that writes sequences from offsets in device memory.
pub(crate) fn sequences_config() -> Config {
    Config { kernel: Kernel::Sequences, ..table_config() }
}

/// What kernels are printed with that evaluate no mods.
pub(crate) fn no_mods() -> ModsSource {
    let extent = Extent { batch: 1, heads_q: 1, heads_kv: 1, queries: 1, keys: 1 };
    let options = Options { extent, fast_math: false, checked: false, deterministic: false };
    ModsSource::new(Mods::default(), &options).expect("without captures everything fits")
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
            let found =
                super::kernels(&profile, &spec, &dims(64, 64), DType::BF16, run, None).unwrap();
            let built = found.iter().flat_map(|k| k.sources(&k.choice.chosen).unwrap());
            built.map(|(config, _)| config.kernel).collect::<Vec<_>>()
        };
        let forward = kernels(Run::default());
        assert_eq!(forward, [Kernel::Forward, Kernel::BlockLists]);
        let both = kernels(Run { backward: true, deterministic: true, ..Run::default() });
        let backward = [Kernel::Delta, Kernel::Rests, Kernel::Backward, Kernel::BlockLists];
        assert_eq!(both[2..6], backward);
        assert_eq!(both[6..], [Kernel::BackwardDq, Kernel::BlockLists]);
    }
}
