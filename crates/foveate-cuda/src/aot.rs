//! The kernels that a problem will need, compiled before it comes: no GPU has to be there.
//!
//! What is compiled is what [`crate::CudaPlan`] asks the cache for, source by source: contiguous
//! operands, results and gradients in the dtype of the operands.

use std::sync::Arc;

use foveate_mods::ScoreGradient;
use foveate_problem::{Dims, Spec};
use foveate_tensor::DType;

use crate::choose::{
    Choice, Class, KernelOptions, KernelPlan, Pass, PrintedMods, Records, Sizes, admit,
};
use crate::compile::Candidate;
use crate::compile::codegen::{Extent, ModsSource, Options};
use crate::compile::config::{Config, Elem, Kernel};
use crate::compile::params::BlockListsParams;
use crate::compile::source::source;
use crate::compile::spill_fallback::compile_one_that_fits;
use crate::error::CudaError;
use foveate_gpu::nvrtc::Compiled;
use foveate_gpu::profile::Profile;
use foveate_gpu::{Arch, GpuError};

/// How a problem is going to be run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// With a backward.
    pub backward: bool,
    /// For the same bits in every run.
    pub deterministic: bool,
    /// With captured indices checked, as host tensors always are.
    pub checked: bool,
    /// With keys and values in pages of so many rows.
    pub page_size: Option<usize>,
    /// Keys that a query sees on average, see [`crate::CudaOptions::mean_kv_len`].
    pub mean_kv_len: Option<usize>,
}

/// A kernel that a problem will need, before it is known whether it spills.
#[derive(Debug)]
pub struct AotKernel<'a> {
    profile: Profile,
    /// The pass that launches it.
    pass: Pass,
    choice: Choice,
    spec: &'a Spec,
    gradient: Option<Arc<ScoreGradient>>,
    dims: Dims,
    run: Usage,
    /// Of one that adds dq in order: what runs where all that do so spill.
    instead: Vec<Self>,
}

/// Compiles a source.
type Compile<'a> = &'a dyn Fn(&str, Arch) -> Result<Arc<Compiled>, GpuError>;

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
    run: Usage,
    options: &KernelOptions,
    records: Option<&Records>,
) -> Result<Planned, CudaError> {
    let dtype = admit(profile, dims, dtype)?;
    let gradient = match &spec.score {
        Some(score) if run.backward => Some(Arc::new(score.gradient()?)),
        _ => None,
    };
    let class = Class {
        deterministic: run.deterministic,
        checked: run.checked,
        ..Class::of(spec, dtype, dims, gradient.as_deref()).contiguous(run.page_size)
    };
    let sizes = Sizes::of(dims).under(spec, run.mean_kv_len);
    let recorded = |kernel| records?.record(kernel, &class, &sizes, spec);
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
    run: Usage,
    records: Option<&Records>,
) -> Result<Vec<AotKernel<'a>>, CudaError> {
    let options = KernelOptions::default();
    let Planned { class, sizes, plan, gradient } =
        plan(profile, spec, dims, dtype, run, &options, records)?;
    let aot_kernel = |pass: Pass, choice: Choice| AotKernel {
        profile: profile.clone(),
        pass,
        choice,
        spec,
        gradient: gradient.clone(),
        dims: *dims,
        run,
        instead: Vec::new(),
    };
    let forward = Pass::Forward { kv_split: plan.kv_splits > 1 };
    let backward = plan.config(Kernel::Backward).map(|keys| Pass::backward(&class, keys));
    let of_forward = forward.kernels();
    let of_pass = |choice: Choice| match of_forward.contains(&choice.chosen.config.kernel) {
        true => aot_kernel(forward, choice),
        false => {
            let pass = backward.expect("a kernel that is not the forward's is the backward's");
            aot_kernel(pass, choice)
        }
    };
    let mut all: Vec<_> = plan.kernels.into_iter().map(of_pass).collect();
    if let Some(keys) = all.iter_mut().find(|kernel| kernel.choice.chosen.config.ordered_dq) {
        let class = Class { separate_dq: true, ..class };
        let recorded = |kernel| records?.record(kernel, &class, &sizes, spec);
        let plan = KernelPlan::with_records(profile, &class, &sizes, true, &options, &recorded)?;
        let products = |choice: &Choice| {
            let kernel = choice.chosen.config.kernel;
            kernel.owns_keys() || kernel.makes_dq_alone()
        };
        let pass = Pass::backward(&class, plan.config(Kernel::Backward).expect("it is planned"));
        let products = plan.kernels.into_iter().filter(products);
        keys.instead = products.map(|choice| aot_kernel(pass, choice)).collect();
    }
    Ok(all)
}

impl AotKernel<'_> {
    /// Compiles what a plan will compile. Returns configuration and source of the kernel that will
    /// run, and of those that go with it.
    ///
    /// # Errors
    /// Those of `compile`; a kernel whose shared memory is not what was planned.
    pub fn build(
        &self,
        compile: impl Fn(&str, Arch) -> Result<Arc<Compiled>, GpuError>,
    ) -> Result<Vec<(Config, String)>, CudaError> {
        self.built_by(&compile)
    }

    fn built_by(&self, compile: Compile<'_>) -> Result<Vec<(Config, String)>, CudaError> {
        let selected = compile_one_that_fits(&self.profile, self.choice.ranked(), |candidate| {
            let sources = self.sources(candidate)?;
            let (config, text) = &sources[0];
            let compiled = compile(text, config.family.arch(self.profile.arch()))?;
            Ok((config.clone(), sources, compiled))
        })?;
        if !selected.holds && !self.instead.is_empty() {
            let built = self.instead.iter().map(|kernel| kernel.built_by(compile));
            return Ok(built.collect::<Result<Vec<_>, _>>()?.concat());
        }
        let (_, sources, _) = selected.made;
        for (config, text) in &sources[1..] {
            compile(text, config.family.arch(self.profile.arch()))?;
        }
        Ok(sources)
    }

    /// What a pass launches of the kernel of a candidate, its own entry point first, and what makes
    /// the block lists of those whose main loop follows them.
    fn sources(&self, candidate: &Candidate) -> Result<Vec<(Config, String)>, CudaError> {
        let kernel = candidate.config.kernel;
        let grouped = Config { group: self.dims.group(), ..candidate.config.clone() };
        let mut launches = self.pass.launches();
        launches.retain(|launch| launch.entry.kernel() == kernel);
        launches.sort_by_key(|launch| launch.entry != kernel.entry());
        let mut sources = Vec::new();
        let mut add = |config: Config, mods: &ModsSource| {
            let text = source(&config, mods);
            if !sources.iter().any(|(_, known)| *known == text) {
                sources.push((config, text));
            }
        };
        for launch in &launches {
            let config = launch.entry.config(grouped.clone());
            add(config.clone(), &self.print(launch.mods, &config)?);
        }
        if kernel == Kernel::Forward && grouped.dtype == Elem::E4m3 {
            add(Config::transpose_values(grouped.dim_v), &ModsSource::nothing());
        }
        if launches.iter().any(|launch| launch.has_lists(&grouped)) {
            let mods = self.print(PrintedMods::Mask, &grouped)?;
            add(Config::block_lists(BlockListsParams::THREADS, self.run.checked), &mods);
            if mods.bounded().next().is_some() {
                add(Config::range_table(), &ModsSource::nothing());
            }
        }
        Ok(sources)
    }

    /// Prints mods for a kernel of these tiles.
    fn print(&self, mods: PrintedMods, tiles: &Config) -> Result<ModsSource, CudaError> {
        let Self { spec, dims, run, .. } = self;
        if mods == PrintedMods::Nothing {
            return Ok(ModsSource::nothing());
        }
        let options = Options {
            extent: Extent::of(dims, [dims.len_q, dims.len_k], tiles),
            fast_math: tiles.dtype != Elem::F32,
            checked: run.checked,
            deterministic: run.deterministic,
        };
        ModsSource::new(mods.of(spec, self.gradient.as_deref()), &options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foveate_gpu::cache::Cache;
    use foveate_gpu::nvrtc::Compiler;
    use foveate_mods::text::{Names, parse_score};
    use foveate_mods::{Buffer, ScoreMod, masks, scores};
    use foveate_problem::Dropout;

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
    fn a_masked_problem_takes_its_kernels_and_those_of_its_block_lists() {
        let score = scores::soft_cap(30.0).unwrap();
        let (mask, score) = (Some(masks::causal()), Some(score));
        let spec = Spec { mask, score, scale: None, dropout: None };
        let profile = Profile::named("a100").unwrap();
        let kernels = |run: Usage| {
            let found =
                super::kernels(&profile, &spec, &dims(64, 64), DType::BF16, run, None).unwrap();
            let built = found.iter().flat_map(|k| k.sources(&k.choice.chosen).unwrap());
            built.map(|(config, _)| config.kernel).collect::<Vec<_>>()
        };
        let forward = kernels(Usage::default());
        assert_eq!(forward, [Kernel::Forward, Kernel::BlockLists]);
        let both = kernels(Usage { backward: true, deterministic: true, ..Usage::default() });
        let backward = [Kernel::Delta, Kernel::RowWeightSum, Kernel::Backward, Kernel::BlockLists];
        assert_eq!(both[2..6], backward);
        assert_eq!(both[6..], [Kernel::BackwardDq, Kernel::BlockLists]);
    }

    #[test]
    fn where_all_that_add_dq_in_order_spill_a_kernel_of_dq_is_compiled() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let (profile, cache) = (Profile::named("h200").unwrap(), Cache::at(None));
        let dims = Dims { heads_kv: 8, len_q: 2048, len_k: 2048, ..dims(128, 128) };
        let run = Usage { backward: true, deterministic: true, ..Usage::default() };
        let built = |score: Option<ScoreMod>| {
            let dropout = score.as_ref().map(|_| Dropout::new(0.1, 1));
            let spec = Spec { mask: Some(masks::causal()), score, scale: None, dropout };
            let found = super::kernels(&profile, &spec, &dims, DType::BF16, run, None).unwrap();
            let keys = found.iter().find(|k| k.choice.chosen.config.ordered_dq).unwrap();
            let built = keys.build(|text, arch| cache.compile(compiler, text, arch)).unwrap();
            let products = built.iter().map(|(config, _)| (config.kernel, config.ordered_dq));
            products.filter(|(kernel, _)| *kernel != Kernel::BlockLists).collect::<Vec<_>>()
        };
        // Waves, two numbers for each entry and dropout take the registers that the order has.
        let bias = Buffer::new("bias", &[2048; 2], vec![0.5f32; 2048 * 2048]).unwrap();
        let names = Names::new().buffer(bias.any());
        let text = "score + sin(f32(q) * f32(kv)) + bias[q, kv] * bias[kv, q]";
        let waves = parse_score(text, &names).unwrap();
        let apart = [(Kernel::Backward, false), (Kernel::BackwardDq, false)];
        assert_eq!(built(Some(waves)), apart);
        assert_eq!(built(None), [(Kernel::Backward, true)]);
    }

    #[test]
    fn reads_of_learned_buffers_that_scores_share_in_every_way_compile() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let learned = |name, shape: &[usize]| {
            let zeros = vec![0.0f32; shape.iter().product()];
            Buffer::learned(name, shape, zeros).unwrap()
        };
        let buffers = [
            learned("dense", &[1000, 900]),
            learned("binned", &[9]),
            learned("row", &[1000]),
            learned("column", &[900]),
            learned("distance", &[1999]),
            learned("head", &[8]),
        ];
        let names = buffers.iter().fold(Names::new(), |names, b| names.buffer(b.any()));
        let text = "score * head[h] + dense[q, kv] + row[q] + column[kv] + distance[q - kv + 999] \
                    + binned[min(max(i32(score.detach()) + 4, 0), 8)]";
        let score = Some(parse_score(text, &names).unwrap());
        let spec = Spec { mask: None, score, scale: None, dropout: None };
        let run = Usage { backward: true, ..Usage::default() };
        for name in ["h200", "a100"] {
            let profile = Profile::named(name).unwrap();
            let found =
                super::kernels(&profile, &spec, &dims(64, 64), DType::BF16, run, None).unwrap();
            let built = found.iter().flat_map(|k| k.sources(&k.choice.chosen).unwrap());
            let of_keys = built.filter(|(config, _)| config.captures).collect::<Vec<_>>();
            assert!(!of_keys.is_empty(), "{name}");
            for (config, text) in of_keys {
                let compiled =
                    Cache::at(None).compile(compiler, &text, config.family.arch(profile.arch()));
                compiled.unwrap_or_else(|e| panic!("{name}, {config}: {e}"));
            }
        }
    }

    #[test]
    fn a_stated_length_chooses_the_tiles_of_a_mask_that_the_host_can_read() {
        let profile = Profile::named("h200").unwrap();
        let len = 8192;
        let dims =
            Dims { batch: 2, heads_q: 16, heads_kv: 16, len_q: len, len_k: len, ..dims(64, 64) };
        let tiles = |mask, mean_kv_len| {
            let spec = Spec { mask: Some(mask), score: None, scale: None, dropout: None };
            let run = Usage { backward: true, mean_kv_len, ..Usage::default() };
            // The portable backward has smaller tiles for fewer keys.
            let mut options = KernelOptions::default();
            options.set("backward.family", "portable").unwrap();
            let planned = plan(&profile, &spec, &dims, DType::BF16, run, &options, None).unwrap();
            [Kernel::Forward, Kernel::Backward].map(|kernel| {
                let config = planned.plan.config(kernel).unwrap();
                (config.tile_q, config.tile_kv)
            })
        };
        let window = masks::sliding_window(256).unwrap();
        let doc = Buffer::on_device("doc", &[len]).unwrap();
        let documents = masks::document(&doc).unwrap();
        let [known, unknown] = [&window, &documents].map(|mask| tiles(mask.clone(), None));
        assert_ne!(known[1], unknown[1], "the lengths differ in the backward");
        assert_eq!(tiles(documents.clone(), Some(256)), known);
        // More keys than there are, as none that are stated.
        assert_eq!(tiles(documents, Some(1 << 40)), unknown);
        // What is stated comes before the sample.
        assert_eq!(tiles(window, Some(len)), unknown);
    }
}
