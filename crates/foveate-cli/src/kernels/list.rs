//! The kernels of attention that are compiled where there is no GPU, and compared with what is on
//! record.
//!
//! It is what the planner chooses, for what kernels tell apart: architecture, dtype, head dims,
//! mods, and what a call asks for (`Variant`). Every pair of these would be some ten thousand
//! kernels, of which most say nothing that others have not said. What is left out, and why nothing
//! is lost:
//!
//! - Head dims of the middle sizes have two kinds of mods, none and a learned bias (the most
//!   registers); the other kinds, and sums in a fixed order under a mask, at 64, 128, 192/128, 256.
//! - f16 has those two kinds at two head dims: it differs from bf16 in the name of two
//!   instructions. f32 has every kind at those two.
//! - f8e4m3 has the forward of compute capability 9.0.
//! - Variants are listed at bf16 and one or two head dims: they change how rows are found, read and
//!   written, not what is computed.
//! - sm_86 has the sample alone: the assembler makes the same of a source for it as for sm_89,
//!   whose cards have as much shared memory, so that the planner chooses the same.

use std::collections::HashSet;
use std::sync::Arc;

use foveate_cuda::CudaError;
use foveate_cuda::choose::{
    Choice, Class, KernelOptions, KernelPlan, Origin, Pass, PrintedMods, Sizes, Unmapped,
};
use foveate_cuda::compile::Candidate;
use foveate_cuda::compile::check::{Taken, compare_code, taken};
use foveate_cuda::compile::config::{Config, Elem, Family, HeadDims, Kernel, TilesOf};
use foveate_cuda::compile::params::BlockListsParams;
use foveate_cuda::compile::resources::Resources;
use foveate_cuda::compile::source::source;
use foveate_cuda::compile::spill_fallback::{Fallback, Selected, compile_one_that_fits};
use foveate_gpu::cache::Cache;
use foveate_gpu::nvrtc::{Compiled, Compiler};
use foveate_gpu::profile::Profile;
use foveate_gpu::{Arch, GpuError, GpuErrorKind};

use super::kind::{HEADS, Kind, LENGTH};

/// What a call asks for beside dtype, head dims and mods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// Nothing: long sequences of contiguous operands.
    Long,
    /// A mask that lets few queries see a key.
    Sparse,
    /// Sums in a fixed order.
    Deterministic,
    /// Hopper's backward with gradients of keys for each query head, and with sums in a fixed order or not.
    ByQueryHeads { deterministic: bool },
    /// A mask whose bits Hopper's kernels read, since its evaluation takes long; with sums in a fixed order or not.
    LongMask { deterministic: bool },
    /// The keys of a tile in several KV splits.
    Split,
    /// Keys in pages.
    Paged,
    /// So many queries for each sequence: few, so that the heads of a group share a tile, and its
    /// keys are split.
    Queries(usize),
    /// The same with keys in pages.
    PagedQueries(usize),
    /// A row of so many tokens, whose usual tiles leave SMs idle: Hopper's forward has tiles of fewer queries.
    Row(usize),
    /// Keys in pages of one row, which no tensor map has.
    PagedRows,
    /// A sink in the denominator, and its gradient.
    Sink,
    /// Scales of e4m3 operands for each block of rows.
    ScaleBlocks,
    /// Captured indices checked, as for host tensors.
    Checked,
    /// Rows aligned to so many bytes only.
    Align(usize),
    /// Results and gradients in f32.
    Wide,
}

/// A kernel of the list.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedKernel {
    /// The architecture it is planned and compiled for.
    pub arch: Arch,
    /// Its mods.
    pub mods: Kind,
    /// Which of them its source is printed with.
    printed: PrintedMods,
    profile: Profile,
    /// Its configurations, the planner's choice first.
    choice: Choice,
    /// Where all of them add dq in order and spill: those that leave dq to a kernel of its own.
    instead: Option<Choice>,
    /// Queries of a sequence where they are few.
    queries: Option<usize>,
    /// What the planner chooses where few queries see a key, and not else.
    sparse: bool,
}

/// Instructions of a mask of which bits are made.
const LONG_MASK: usize = 100;

/// Instructions of a score without an elementary function, and of one that has some.
const SHORT_SCORE: usize = 9;
const LONG_SCORE: usize = 41;

/// What the planner chooses, and in place of what adds dq in order.
type Choices = (Choice, Option<Choice>);

/// How a CTA of a kernel is made.
#[derive(Clone, Debug, PartialEq)]
pub struct Cta {
    /// Queries and keys of a tile, warps, stages; no tile and no stages for kernels that have none.
    pub numbers: [u32; 4],
    /// What else was chosen, of the Hopper family: `hopper`, `overlap`, `ordered dq`.
    pub hopper: Vec<&'static str>,
    /// All of it in words: `tile 64x128, 8 warps, 2 stages`.
    pub words: String,
}

/// A kernel that can be compiled where there is no GPU.
pub trait Listed: Send + Sync {
    /// The architecture it is planned and compiled for.
    fn arch(&self) -> Arch;

    /// What the kernel is, without what was chosen for it: `backward bf16 D 128, mask`.
    fn name(&self) -> String;

    /// What was chosen: `tile 64x128, 8 warps, 2 stages`.
    fn cta(&self) -> Cta;

    /// Compiles the kernel, unless `cache` has it, and compares it with its plan. Where that takes
    /// more, another configuration may be selected, as a plan does.
    ///
    /// # Errors
    /// Those of the compiler; when every configuration takes more than was planned.
    fn check(&self, compiler: &Compiler, cache: &Cache) -> Result<Checked, CudaError>;
}

/// A kernel of the list as a plan would run it.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// How its CTAs are made.
    pub cta: Cta,
    /// The entry points of its file by their names, the kernel's own first, and what each takes.
    pub entries: Vec<(String, Taken)>,
    /// Why it is not what the planner chose.
    pub fallback: Option<Fallback>,
    /// The same with the numbers, and what runs.
    pub note: Option<String>,
}

/// Architectures of the list, each with a card that has it.
pub const ARCHS: [(Arch, &str); 6] = [
    (Arch::new((8, 0)), "a100"),
    (Arch::new((8, 6)), "a10"),
    (Arch::new((8, 9)), "l40s"),
    (Arch::new((9, 0)), "h200"),
    (Arch::new((10, 0)), "b200"),
    (Arch::new((12, 0)), "rtx5090"),
];

/// Head dims of the list.
pub const DIMS: [(usize, usize); 10] = [
    (16, 16),
    (32, 32),
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (160, 160),
    (192, 192),
    (256, 256),
    (192, 128),
];

/// The kernels of `arch`; with `few` a sample of them.
///
/// # Errors
/// When `arch` is not one of [`ARCHS`], or nothing fits.
pub fn list(arch: Arch, few: bool) -> Result<Vec<ListedKernel>, CudaError> {
    let Some((_, card)) = ARCHS.iter().find(|(name, _)| *name == arch) else {
        let plain = Arch::new(arch.capability());
        if ARCHS.iter().any(|(name, _)| *name == plain) {
            return Err(GpuError::argument(format!(
                "kernels for {arch} are listed beside those for {plain}: write {plain}"
            ))
            .into());
        }
        let names = ARCHS.map(|(name, _)| name.to_string()).join(", ");
        return Err(GpuError::argument(format!(
            "no kernels are listed for {arch}, but for {names}"
        ))
        .into());
    };
    let profile = Profile::named(card).map_err(GpuError::argument)?;
    let few = few || arch == Arch::new((8, 6));
    let mut listed = Vec::new();
    let mut seen = HashSet::new();
    let mut add = |(choice, instead): Choices, printed, mods, queries, sparse| {
        if seen.insert((choice.chosen.config.clone(), mods, queries)) {
            let profile = profile.clone();
            listed.push(ListedKernel {
                arch,
                mods,
                printed,
                profile,
                choice,
                instead,
                queries,
                sparse,
            });
        }
    };
    let has_hopper = profile.capability == (9, 0);
    let e4m3 = has_hopper.then_some(Elem::E4m3);
    for dtype in [Elem::Bf16, Elem::F32, Elem::F16].into_iter().chain(e4m3) {
        for dims in DIMS {
            for (mods, variant) in wanted(dtype, dims, few, has_hopper) {
                for (choices, printed) in variant.kernels(&profile, mods, dtype, dims)? {
                    let mods = if printed == PrintedMods::Nothing { Kind::Plain } else { mods };
                    add(choices, printed, mods, variant.queries(), variant == Variant::Sparse);
                }
            }
        }
    }
    for checked in [false, true] {
        let lists = only(Config::block_lists(BlockListsParams::THREADS, checked), &profile)?;
        add((lists, None), PrintedMods::Mask, Kind::Mask, None, false);
    }
    let transposing = e4m3.map(|_| Config::transpose_values(128));
    for config in [Config::range_table(), Config::sequences()].into_iter().chain(transposing) {
        add((only(config, &profile)?, None), PrintedMods::Nothing, Kind::Plain, None, false);
    }
    Ok(listed)
}

/// The mods and variants that are listed for a dtype and head dims.
fn wanted(dtype: Elem, dims: (usize, usize), few: bool, has_hopper: bool) -> Vec<(Kind, Variant)> {
    use Kind::*;
    use Variant::*;
    let fixed_order = |mods: &[Kind]| mods.iter().map(|&m| (m, Deterministic)).collect::<Vec<_>>();
    let long = |mods: &[Kind]| mods.iter().map(|&m| (m, Long)).collect::<Vec<_>>();
    let blocks = |mods: &[Kind]| mods.iter().map(|&m| (m, ScaleBlocks)).collect::<Vec<_>>();
    let every = [long(&[Plain, Mask, Score, Learned]), fixed_order(&[Mask, Learned])].concat();
    let usual = matches!(dims, (64, 64) | (128, 128));
    let by_query_heads = |mods: &[(Kind, bool)]| {
        let variant = |&(mods, deterministic)| (mods, ByQueryHeads { deterministic });
        mods.iter().filter(|_| has_hopper).map(variant).collect::<Vec<_>>()
    };
    let long_masks = |mods: &[(Kind, bool)]| {
        let variant = |&(mods, deterministic)| (mods, LongMask { deterministic });
        mods.iter().filter(|_| has_hopper).map(variant).collect::<Vec<_>>()
    };
    if few {
        return match (dtype, dims) {
            (Elem::E4m3, (128, 128)) => [long(&[Plain, Mask]), blocks(&[Plain])].concat(),
            (Elem::Bf16, (128, 128)) => {
                let more = [(Plain, Queries(1)), (Mask, Checked), (Plain, Sink)];
                let of_hopper =
                    [by_query_heads(&[(Mask, true)]), long_masks(&[(Mask, false)])].concat();
                [every, more.to_vec(), of_hopper].concat()
            }
            (Elem::Bf16, (192, 128)) => [long(&[Learned]), fixed_order(&[Learned])].concat(),
            (Elem::Bf16, (256, 256)) | (Elem::F32, (64, 64)) => long(&[Plain]),
            _ => Vec::new(),
        };
    }
    let ends = [long(&[Plain, Learned]), fixed_order(&[Learned])].concat();
    let mut all = match (dtype, dims) {
        (Elem::E4m3, (128, 128)) => {
            let variants = [Sink, Checked, Wide].map(|variant| (Plain, variant));
            let by_head = long(&[Plain, Mask, Score, Learned, Capped, Dropout]);
            [by_head, blocks(&[Plain, Mask, Score, Dropout]), variants.to_vec()].concat()
        }
        (Elem::E4m3, (64, 64) | (192, 128) | (256, 256)) => {
            [long(&[Plain, Mask, Score, Learned]), blocks(&[Plain, Mask])].concat()
        }
        (Elem::E4m3, _) => Vec::new(),
        (Elem::Bf16, (192, 128) | (256, 256)) => every,
        (Elem::Bf16, _) if usual => {
            let more = long(&[Capped, Dropout, Buckets, CausalScore, CausalAlibi]);
            [every, more, fixed_order(&[CausalAlibi, DropoutAlibi])].concat()
        }
        (Elem::F32, _) if usual => [every, long(&[Capped, Dropout])].concat(),
        (Elem::F16, _) if !usual => Vec::new(),
        (Elem::F32, _) if !usual => long(&[Plain, Learned]),
        _ => ends,
    };
    if dims == (64, 64) && dtype == Elem::F32 {
        all.push((Buckets, Long));
    }
    if usual && dtype == Elem::Bf16 {
        let by_mods = [Plain, Mask, Score, Learned].into_iter().flat_map(|m| [(m, Split)]);
        all.extend(by_mods);
        for mods in [Plain, Mask] {
            let variants = [Paged, PagedRows, Queries(1), PagedQueries(1), Queries(16), Checked];
            all.extend(variants.map(|variant| (mods, variant)));
        }
        all.extend([(Score, Queries(1)), (Learned, Checked), (Plain, Sink), (Plain, Wide)]);
    }
    if dims == (64, 64) && dtype == Elem::Bf16 {
        all.extend([0, 2, 4, 8].map(|bytes| (Plain, Align(bytes))));
        all.push((Mask, Sparse));
    }
    if usual && dtype == Elem::Bf16 && has_hopper {
        let rows = if dims == (64, 64) { &[768, 320][..] } else { &[320] };
        all.extend(rows.iter().flat_map(|&len| [(Plain, Row(len)), (Mask, Row(len))]));
    }
    if usual && dtype == Elem::Bf16 {
        let kinds = [(Mask, false), (Mask, true), (CausalScore, false), (CausalAlibi, false)];
        all.extend(long_masks(&kinds));
    }
    if matches!((dtype, dims), (Elem::Bf16, (192, 128) | (256, 256)) | (Elem::E4m3, (128, 128))) {
        all.extend(long_masks(&[(Mask, false)]));
    }
    if dtype == Elem::Bf16 && (usual || dims == (256, 256)) {
        all.extend(by_query_heads(&[(Plain, false), (Mask, false), (Mask, true)]));
        all.extend(by_query_heads(
            &[(Score, false), (Learned, false)][..if usual { 2 } else { 1 }],
        ));
    }
    if dims == (64, 64) && dtype == Elem::F32 {
        all.extend([(Plain, Queries(1)), (Plain, Align(0)), (Plain, Sink)]);
    }
    all
}

impl Variant {
    fn queries(self) -> Option<usize> {
        match self {
            Self::Queries(queries) | Self::PagedQueries(queries) | Self::Row(queries) => {
                Some(queries)
            }
            _ => None,
        }
    }

    /// What is chosen for it, kernel by kernel, and which mods each is printed with.
    fn kernels(
        self,
        profile: &Profile,
        mods: Kind,
        dtype: Elem,
        dims: (usize, usize),
    ) -> Result<Vec<(Choices, PrintedMods)>, CudaError> {
        let class = self.class(mods, dtype, dims);
        let queries = self.queries();
        let (batch, keys, mean_kv_len) = match self {
            Self::Row(len) => (1, len, len),
            Self::Sparse => (2, LENGTH, LENGTH / 64),
            _ => (if queries.is_some() { 16 } else { 2 }, LENGTH, LENGTH),
        };
        let (heads_q, heads_kv) = HEADS;
        let queries = queries.unwrap_or(LENGTH);
        let sizes = Sizes { batch, heads_q, heads_kv, queries, keys, mean_kv_len };
        let is_split = matches!(self, Self::Split | Self::Queries(_) | Self::PagedQueries(_));
        let kv_splits = Some(if is_split { 2 } else { 1 });
        let mut options = KernelOptions { kv_splits, ..KernelOptions::default() };
        if matches!(self, Self::ByQueryHeads { .. }) {
            options.backward.split_gqa = Some(true);
        }
        let forward_only =
            is_split || class.paged || matches!(self, Self::Row(_)) || dtype == Elem::E4m3;
        let plan = KernelPlan::new(profile, &class, &sizes, !forward_only, &options)?;
        let ordered = plan.config(Kernel::Backward).is_some_and(|config| config.ordered_dq);
        let apart = Class { separate_dq: true, ..class.clone() };
        let apart = ordered.then(|| KernelPlan::new(profile, &apart, &sizes, true, &options));
        let apart = apart.transpose()?;
        let mut passes = vec![Pass::Forward { kv_split: plan.kv_splits > 1 }];
        passes.extend(
            (!forward_only)
                .then(|| Pass::backward(&class, &plan.choice(Kernel::Backward).chosen.config)),
        );
        let mut kernels = Vec::new();
        for launch in passes.into_iter().flat_map(Pass::launches) {
            let choice = |plan: &KernelPlan| {
                let mut choice = plan.choice(launch.entry.kernel()).clone();
                for candidate in choice.others.iter_mut().chain([&mut choice.chosen]) {
                    candidate.config = launch.entry.config(candidate.config.clone());
                }
                choice
            };
            let instead = apart.as_ref().filter(|_| launch.entry.kernel().owns_keys());
            kernels.push(((choice(&plan), instead.map(choice)), launch.mods));
        }
        let dq = apart.map(|plan| plan.choice(Kernel::BackwardDq).clone());
        kernels.extend(dq.map(|dq| ((dq, None), PrintedMods::Backward)));
        Ok(kernels)
    }

    fn class(self, mods: Kind, dtype: Elem, (dim, dim_v): (usize, usize)) -> Class {
        let class = Class {
            mask: matches!(mods, Kind::Mask | Kind::CausalScore | Kind::CausalAlibi),
            score: !matches!(mods, Kind::Plain | Kind::Mask | Kind::Dropout),
            score_steps: match mods {
                Kind::Plain | Kind::Mask | Kind::Dropout => 0,
                Kind::Learned | Kind::CausalAlibi | Kind::DropoutAlibi => SHORT_SCORE,
                Kind::Score | Kind::Capped | Kind::CausalScore | Kind::Buckets => LONG_SCORE,
            },
            dscore: matches!(mods, Kind::Score | Kind::Capped | Kind::CausalScore),
            captures: matches!(mods, Kind::Learned | Kind::Capped | Kind::Buckets),
            dropout: matches!(mods, Kind::Dropout | Kind::DropoutAlibi),
            ..Class::new(dtype, dim, dim_v, HEADS.0 / HEADS.1)
        };
        match self {
            Self::Long | Self::Sparse | Self::Split | Self::Queries(_) | Self::Row(_) => class,
            Self::Deterministic => Class { deterministic: true, ..class },
            Self::ByQueryHeads { deterministic } => Class { deterministic, ..class },
            Self::LongMask { deterministic } => {
                Class { deterministic, mask_steps: LONG_MASK, ..class }
            }
            Self::Paged | Self::PagedQueries(_) => Class { paged: true, ..class },
            Self::PagedRows => Class { paged: true, unmapped: Unmapped::paged(1), ..class },
            Self::Sink => Class { sink: true, ..class },
            Self::ScaleBlocks => Class { scale_blocks: true, ..class },
            Self::Checked => Class { checked: true, ..class },
            Self::Align(align) => Class { align, unmapped: Unmapped::aligned(align), ..class },
            Self::Wide => {
                Class { out_dtype: Elem::F32, dq_dtype: Elem::F32, grad_dtype: Elem::F32, ..class }
            }
        }
    }
}

/// The choice of a kernel that has nothing to choose.
fn only(config: Config, profile: &Profile) -> Result<Choice, CudaError> {
    let resources = Resources::on(&config, profile);
    let resources = resources.map_err(|refusal| GpuError::argument(refusal.to_string()))?;
    let occupancy = resources.occupancy(profile);
    let chosen = Candidate { config, resources, occupancy, modelled_us: 0.0 };
    Ok(Choice {
        chosen,
        origin: Origin::Model,
        copied: Vec::new(),
        mask: None,
        others: Vec::new(),
        refused: Vec::new(),
    })
}

impl Cta {
    fn of(config: &Config) -> Self {
        let Config { tile_q, tile_kv, warps, stages, overlap, ordered_dq, .. } = *config;
        let numbers = [tile_q, tile_kv, warps, stages].map(|n| n as u32);
        let hopper = config.family == Family::Hopper;
        let words = [(hopper, "hopper"), (overlap, "overlap"), (ordered_dq, "ordered dq")];
        let hopper = words.into_iter().filter(|(on, _)| *on).map(|(_, word)| word).collect();
        Self { numbers, hopper, words: TilesOf(config).to_string() }
    }
}

impl ListedKernel {
    /// Compiles the kernel by `compile`, and compares it with its plan.
    pub(super) fn compiled_by(
        &self,
        compile: impl Fn(&str, Arch) -> Result<Arc<Compiled>, GpuError>,
    ) -> Result<Checked, CudaError> {
        let make = |candidate: &Candidate| {
            let config = candidate.config.clone();
            let text = source(&config, &self.mods.source(self.printed, &config)?);
            let compiled = compile(&text, config.family.arch(self.arch))?;
            Ok((config, (), compiled))
        };
        let mut selected = compile_one_that_fits(&self.profile, self.choice.ranked(), make)?;
        if let Some(apart) = self.instead.as_ref().filter(|_| !selected.holds) {
            let note = selected.without_order();
            let apart = compile_one_that_fits(&self.profile, apart.ranked(), make)?;
            selected = Selected { fallback: selected.fallback, note, ..apart };
        }
        let (config, (), compiled) = selected.made;
        if !selected.holds {
            let reason = selected.note.unwrap_or_default();
            return Err(GpuErrorKind::Resources { kernel: config.to_string(), reason }.into());
        }
        let planned = &selected.candidate.resources;
        compare_code(&config, planned, &compiled)?;
        let mut entries: Vec<_> = compiled
            .kernels
            .iter()
            .map(|e| (e.name.clone(), taken(planned, &compiled, e)))
            .collect();
        let main = config.kernel.entry().name();
        entries.sort_by_key(|(name, _)| (*name != main, name.clone()));
        let (fallback, note) = (selected.fallback, selected.note);
        Ok(Checked { cta: Cta::of(&config), entries, fallback, note })
    }
}

impl Listed for ListedKernel {
    fn arch(&self) -> Arch {
        self.arch
    }

    fn name(&self) -> String {
        let config = &self.choice.chosen.config;
        let Config { kernel, dtype, dim, dim_v, align, .. } = *config;
        let mut parts = match kernel {
            Kernel::BlockLists
            | Kernel::RangeTable
            | Kernel::Sequences
            | Kernel::TransposeValues => vec![kernel.to_string()],
            Kernel::Forward
            | Kernel::RowWeightSum
            | Kernel::Combine
            | Kernel::Delta
            | Kernel::Backward
            | Kernel::BackwardDq
            | Kernel::Dq
            | Kernel::GroupSums => {
                vec![format!("{kernel} {} D {}", dtype.name(), HeadDims(dim, dim_v))]
            }
        };
        parts.push(self.mods.to_string());
        let flags = [
            (config.deterministic, "deterministic"),
            (!kernel.owns_keys() && config.captures, "captures"),
            (config.kv_split, "split-KV"),
            (config.split_gqa, "by query heads"),
            (config.mask_bits, "mask bits"),
            (config.pack_gqa, "packed GQA"),
            (config.paged, "paged"),
            (config.copied.any(), "by copies"),
            (config.sink, "sink"),
            (config.scale_blocks, "scales of blocks"),
            (config.checked, "checked"),
            (
                !config.split_gqa
                    && [config.out_dtype, config.grad_dtype].iter().any(|t| *t != dtype.result()),
                "into f32",
            ),
        ];
        parts.extend(flags.iter().filter(|(on, _)| *on).map(|(_, flag)| (*flag).to_owned()));
        parts.extend(self.queries.map(|n| format!("queries {n}")));
        parts.extend(self.sparse.then(|| "sparse".to_owned()));
        parts.extend((align != 16).then(|| format!("align {align}")));
        parts.join(", ")
    }

    fn cta(&self) -> Cta {
        Cta::of(&self.choice.chosen.config)
    }

    fn check(&self, compiler: &Compiler, cache: &Cache) -> Result<Checked, CudaError> {
        self.compiled_by(|text, arch| cache.compile(compiler, text, arch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_every_class_of_kernel_for_every_architecture() {
        for (arch, _) in ARCHS {
            let all = list(arch, false).unwrap();
            let mut names: Vec<_> = all.iter().map(ListedKernel::name).collect();
            println!("{arch}: {} kernels", all.len());
            names.sort();
            let twice = names.windows(2).find(|pair| pair[0] == pair[1]);
            assert_eq!(twice, None, "a name for each kernel");
            let few = list(arch, true).unwrap();
            assert!(few.iter().all(|l| all.contains(l)));
            let of_few: [fn(&Config) -> bool; 4] = [
                |c| c.pack_gqa && c.kv_split,
                |c| c.checked && c.mask,
                |c| c.sink,
                |c| c.kernel == Kernel::RowWeightSum && c.score,
            ];
            let of_all: [fn(&Config) -> bool; 7] = [
                |c| c.paged && c.pack_gqa && c.mask,
                |c| c.paged && !c.pack_gqa,
                |c| c.captures && c.dscore,
                |c| c.kernel == Kernel::BackwardDq && c.captures,
                |c| c.dropout,
                |c| c.align == 0 && c.kernel == Kernel::Backward,
                |c| c.grad_dtype != c.dtype,
            ];
            let has = |list: &[ListedKernel], is: &dyn Fn(&Config) -> bool| {
                list.iter().any(|l| is(&l.choice.chosen.config))
            };
            for kernel in Kernel::ALL {
                let of_hopper = [Kernel::TransposeValues, Kernel::GroupSums].contains(&kernel);
                let here = !of_hopper || arch == Arch::new((9, 0));
                assert_eq!(has(&few, &|c| c.kernel == kernel), here, "{kernel} for {arch}");
            }
            for (i, is) in of_few.iter().enumerate() {
                assert!(has(&few, is), "class {i} of the sample for {arch}");
            }
            if arch == Arch::new((8, 6)) {
                continue;
            }
            assert!(few.len() < all.len() / 5, "{} of {}", few.len(), all.len());
            for (i, is) in of_all.iter().enumerate() {
                assert!(has(&all, is), "class {i} for {arch}");
            }
        }
        let said = list(Arch::new((7, 0)), true).unwrap_err().to_string();
        assert!(said.starts_with("no kernels are listed for sm_70, but for sm_80, "), "{said}");
        let said = list(Arch::new((9, 0)).specific(), true).unwrap_err().to_string();
        assert_eq!(said, "kernels for sm_90a are listed beside those for sm_90: write sm_90");
    }

    #[test]
    fn what_is_chosen_for_sm_86_is_chosen_for_sm_89() {
        let chosen = |arch: Arch| -> Vec<_> {
            list(arch, true).unwrap().into_iter().map(|l| l.choice.chosen.config).collect()
        };
        assert_eq!(chosen(Arch::new((8, 6))), chosen(Arch::new((8, 9))));
    }

    #[test]
    fn compiled_kernels_take_what_was_planned() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let cache = Cache::at(None);
        let sample = |arch: Arch| list(arch, true).unwrap().into_iter();
        for one in sample(Arch::new((8, 6))).chain(sample(Arch::new((9, 0)))).step_by(5) {
            if let Err(e) = one.check(compiler, &cache) {
                panic!("{}: {e}", one.arch);
            }
        }
    }

    #[test]
    fn every_entry_of_a_file_is_told() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let all = list(Arch::new((9, 0)), false).unwrap();
        let entries = |name: &str| {
            let found = all.iter().find(|l| l.name() == name).expect("it is listed");
            let checked = found.check(compiler, &Cache::at(None)).unwrap();
            let entries = checked.entries.into_iter();
            entries.map(|(name, taken)| (name, taken.shared_bytes)).collect::<Vec<_>>()
        };
        let of = |entries: &[(&str, u32)]| -> Vec<_> {
            entries.iter().map(|&(name, bytes)| (name.to_owned(), bytes)).collect()
        };
        assert_eq!(
            entries("row_weight_sum bf16 D 64, score"),
            of(&[("fv_row_weight_sum", 96 * (64 * 2 + 16))])
        );
        let sink = of(&[("fv_delta", 0), ("fv_sink_gradient", 128)]);
        assert_eq!(entries("delta bf16 D 64, plain, sink"), sink);
    }

    /// What a compilation costs is what is in it. Wall time is not to be tested; the machine code
    /// of a score that the compiler has to copy for each entry of a tile is.
    #[test]
    fn the_longest_score_of_the_catalogue_is_not_copied_for_every_entry() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let all = list(Arch::new((9, 0)), false).unwrap();
        let bytes = |name: String| {
            let found = all.iter().find(|l| l.name() == name).expect("it is listed");
            let config = &found.choice.chosen.config;
            let source = source(config, &found.mods.source(found.printed, config).unwrap());
            let arch = config.family.arch(Arch::new((9, 0)));
            Cache::at(None).compile(compiler, &source, arch).unwrap().cubin.len()
        };
        // An f32 product is three and the splitting of their operands, so that scores are less of it.
        for (dtype, most) in [("bf16", 2.5), ("f32", 1.75)] {
            for kernel in [Kernel::Forward, Kernel::Backward] {
                let [plain, buckets] = [Kind::Plain, Kind::Buckets]
                    .map(|kind| bytes(format!("{kernel} {dtype} D 64, {kind}")) as f64);
                let said = format!("{kernel} {dtype}: {plain} B plain, {buckets} B with buckets");
                println!("{said}");
                assert!(buckets < most * plain, "{said}");
            }
        }
    }
}
