//! Whether compiled kernels are what was planned, and the list of kernels on which that is seen
//! without a GPU.

use std::fmt;
use std::sync::LazyLock;

use foveate_mods::{Buffer, MaskMod, ScoreGradient, ScoreMod, masks, scores};
use foveate_problem::Dropout;

use crate::ahead::lists_config;
use crate::cache::Cache;
use crate::codegen::{Extent, Mods, ModsSource, Options};
use crate::config::{Config, Elem, Kernel};
use crate::cubin;
use crate::error::{CudaError, CudaErrorKind};
use crate::nvrtc::{Compiled, Compiler};
use crate::planner::{Class, HeadDims, KernelOptions, KernelPlan, Sizes, TilesOf};
use crate::profile::Profile;
use crate::resources::{Resources, local_bytes_allowed};
use crate::source::source;

/// What a compiled kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Taken {
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of local memory a thread, spills included: the memory, and not the instructions that
    /// write and read it.
    pub local_bytes: u32,
    /// Bytes of shared memory a block asks for at its launch.
    pub shared_bytes: u32,
}

/// What a compiled kernel takes beyond its plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// What it takes.
    pub taken: Taken,
    /// Of what it takes too much, with the numbers.
    pub reason: String,
}

/// Compares what NVRTC says of a kernel with what was planned for it.
///
/// # Errors
/// [`CudaErrorKind::Resources`] when shared memory is not what the formula gives, registers
/// exceed the bound, or local memory exceeds [`local_bytes_allowed`].
pub fn verify(config: &Config, compiled: &Compiled) -> Result<Taken, CudaError> {
    compare(config, compiled)?.map_err(|excess| wrong(config, excess.reason))
}

/// The same, for whoever can do with a kernel that is slower than planned: it runs when only its
/// registers or its local memory are more than was planned, which the inner error says.
///
/// # Errors
/// [`CudaErrorKind::Resources`] when the kernel is not there or its shared memory is not what the
/// formula gives: it must not run.
pub fn compare(config: &Config, compiled: &Compiled) -> Result<Result<Taken, Excess>, CudaError> {
    let wrong = |reason: String| wrong(config, reason);
    let entry = config.kernel.entry();
    let Some(found) = compiled.kernels.iter().find(|k| k.name == entry) else {
        return Err(wrong(format!("the compiled source has no `{entry}`")));
    };
    let planned = Resources::of(config).map_err(|refusal| wrong(refusal.to_string()))?;
    let stated = cubin::constant(&compiled.cubin, "fv_shared_bytes");
    // Block lists ask for as much as a row of tiles is long, which is known at the launch only.
    let states = config.kernel != Kernel::BlockLists;
    let taken = Taken {
        registers: found.registers,
        local_bytes: found.stack_bytes,
        shared_bytes: planned.shared_bytes as u32,
    };
    if states && stated != i32::try_from(planned.shared_bytes).ok() {
        let stated = stated.map_or("nothing".to_owned(), |bytes| format!("{bytes} B"));
        return Err(wrong(format!(
            "it states {stated} of shared memory, but {} B are planned",
            planned.shared_bytes
        )));
    }
    if found.static_shared_bytes != 0 {
        let bytes = found.static_shared_bytes;
        return Err(wrong(format!("it has {bytes} B of static shared memory, none is planned")));
    }
    let allowed = local_bytes_allowed(config.dtype);
    let reason = if taken.local_bytes > allowed {
        format!("a thread takes {} B of local memory, {allowed} are allowed", taken.local_bytes)
    } else if taken.registers as usize > planned.registers {
        format!("a thread takes {} registers, the bound is {}", taken.registers, planned.registers)
    } else {
        return Ok(Ok(taken));
    };
    Ok(Err(Excess { taken, reason }))
}

fn wrong(config: &Config, reason: String) -> CudaError {
    CudaErrorKind::Resources { kernel: config.to_string(), reason }.into()
}

/// The mods that kernels are listed with, one of each kind that they tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// None.
    Plain,
    /// Causal inside documents.
    Mask,
    /// A soft cap of 30.
    Score,
    /// A learned relative bias.
    Learned,
    /// Dropout.
    Dropout,
    /// T5's learned buckets, whose index is the longest of the catalogue.
    Buckets,
}

/// A kernel of the list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Listed {
    /// The architecture it is planned and compiled for.
    pub arch: String,
    /// Its configuration.
    pub config: Config,
    /// Its mods.
    pub mods: Kind,
}

/// Architectures of the list, each with a card that has it.
pub const ARCHS: [(&str, &str); 6] = [
    ("sm_80", "a100"),
    ("sm_86", "a10"),
    ("sm_89", "l40s"),
    ("sm_90", "h200"),
    ("sm_100", "b200"),
    ("sm_120", "rtx5090"),
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

const SIZES: Sizes = Sizes { batch: 2, heads_q: 32, heads_kv: 8, queries: 8192, keys: 8192 };

/// What the planner chooses on `arch`: every dtype, head dim and kind of mods, forward and
/// backward, in a fixed order or not; then, at the usual head dims, dropout, keys that are split
/// over blocks and keys in pages. f16 is listed at two head dims; it differs from bf16 in the name
/// of two instructions. With `few`, a sample of it.
///
/// # Errors
/// When `arch` is not one of [`ARCHS`], or nothing fits.
pub fn list(arch: &str, few: bool) -> Result<Vec<Listed>, CudaError> {
    let Some((_, card)) = ARCHS.iter().find(|(name, _)| *name == arch) else {
        let names = ARCHS.map(|(name, _)| name).join(", ");
        return Err(CudaError::argument(format!(
            "no kernels are listed for {arch}, but for {names}"
        )));
    };
    let profile = Profile::named(card).map_err(CudaError::argument)?;
    let mut listed: Vec<Listed> = Vec::new();
    let mut add = |config: Config, mods| {
        let one = Listed { arch: arch.to_owned(), config, mods };
        if !listed.contains(&one) {
            listed.push(one);
        }
    };
    for (class, mods) in classes(few) {
        let options = KernelOptions { splits: Some(2), ..KernelOptions::default() };
        let plan = KernelPlan::new(&profile, &class, &SIZES, true, &options)?;
        for choice in plan.kernels {
            let config = choice.chosen.config;
            let usual = matches!(config.dim, 64 | 128) && config.dtype == Elem::Bf16;
            match config.kernel {
                Kernel::Forward => {
                    if usual && !config.paged && !config.keep && !few {
                        add(config.clone(), mods);
                    }
                    add(Config { split: false, ..config }, mods);
                }
                // The forward alone reads pages.
                _ if class.paged => {}
                Kernel::Backward | Kernel::BackwardDq => add(config, mods),
                _ => add(config, Kind::Plain),
            }
        }
    }
    add(lists_config(false), Kind::Mask);
    Ok(listed)
}

/// The classes of [`list`], each with its mods.
fn classes(few: bool) -> impl Iterator<Item = (Class, Kind)> {
    let kinds = [Kind::Plain, Kind::Mask, Kind::Score, Kind::Learned, Kind::Dropout, Kind::Buckets];
    let dims = [Elem::Bf16, Elem::F32, Elem::F16].map(|dtype| DIMS.map(|dims| (dtype, dims)));
    let all = dims.into_iter().flatten().flat_map(move |of| kinds.map(|mods| (of, mods)));
    all.flat_map(move |((dtype, (dim, dim_v)), mods)| {
        let usual = matches!(dim, 64 | 128);
        let wanted = match (dtype, dim, mods) {
            (_, _, Kind::Dropout) => usual && dtype != Elem::F16 && !few,
            // At 128 a plan settles on another tile than the one that is listed.
            (_, _, Kind::Buckets) => dim == 64 && dtype != Elem::F16 && !few,
            (Elem::F16, ..) => usual && !few,
            (Elem::Bf16, 128, _) => true,
            (Elem::F32, 64, _) | (Elem::Bf16, 256, _) => !few || mods == Kind::Plain,
            (Elem::Bf16, 192, Kind::Learned) => !few || dim_v == 128,
            _ => !few,
        };
        let fixed_order = matches!(mods, Kind::Mask | Kind::Learned);
        let in_pages = usual && dtype == Elem::Bf16 && matches!(mods, Kind::Plain | Kind::Mask);
        let variants = [
            (wanted, mods.class(dtype, dim, dim_v)),
            (wanted && fixed_order, Class { deterministic: true, ..mods.class(dtype, dim, dim_v) }),
            (wanted && in_pages && !few, Class { paged: true, ..mods.class(dtype, dim, dim_v) }),
        ];
        variants.into_iter().filter(|(on, _)| *on).map(move |(_, class)| (class, mods))
    })
}

impl Kind {
    fn class(self, dtype: Elem, dim: usize, dim_v: usize) -> Class {
        let group = SIZES.heads_q / SIZES.heads_kv;
        Class {
            mask: self == Self::Mask,
            score: matches!(self, Self::Score | Self::Learned | Self::Buckets),
            dscore: self == Self::Score,
            captures: matches!(self, Self::Learned | Self::Buckets),
            keep: self == Self::Dropout,
            ..Class::new(dtype, dim, dim_v, group)
        }
    }

    fn source(self, config: &Config) -> Result<ModsSource, CudaError> {
        static DROPOUT: LazyLock<Dropout> = LazyLock::new(|| Dropout::new(0.1, 1));
        static MODS: LazyLock<(MaskMod, ScoreMod, ScoreMod, ScoreMod)> = LazyLock::new(|| {
            let documents = Buffer::<i32>::vector("doc", vec![0; SIZES.queries]);
            let mask = masks::document(&documents).map(|m| masks::causal() & m);
            let table = Buffer::<f32>::learned("bias", &[SIZES.heads_q, 257], vec![0.0; 32 * 257]);
            let learned = table.and_then(|t| scores::relative_bias(&t));
            let buckets =
                Buffer::<f32>::learned("t5_bias", &[32, SIZES.heads_q], vec![0.0; 32 * 32]);
            let buckets = buckets.and_then(|t| scores::t5_buckets(&t, true, 128));
            let built = "these mods are written here and can be built";
            let cap = scores::soft_cap(30.0).expect(built);
            (mask.expect(built), cap, learned.expect(built), buckets.expect(built))
        });
        static GRADIENTS: LazyLock<[ScoreGradient; 3]> = LazyLock::new(|| {
            let (_, cap, learned, buckets) = &*MODS;
            [cap, learned, buckets].map(|s| s.gradient().expect("they have derivatives"))
        });
        let (mask, cap, learned, buckets) = &*MODS;
        let [of_cap, of_learned, of_buckets] = &*GRADIENTS;
        let mods = match self {
            Self::Plain => Mods::default(),
            Self::Mask => Mods { mask: Some(mask), ..Mods::default() },
            Self::Score => Mods { score: Some(cap), gradient: Some(of_cap), ..Mods::default() },
            Self::Learned => {
                Mods { score: Some(learned), gradient: Some(of_learned), ..Mods::default() }
            }
            Self::Buckets => {
                Mods { score: Some(buckets), gradient: Some(of_buckets), ..Mods::default() }
            }
            Self::Dropout => Mods { dropout: Some(&DROPOUT), ..Mods::default() },
        };
        let extent = Extent {
            batch: SIZES.batch,
            heads_q: SIZES.heads_q,
            heads_kv: SIZES.heads_kv,
            queries: SIZES.queries,
            keys: SIZES.keys,
        };
        let options = Options {
            extent,
            fast_math: config.dtype != Elem::F32,
            checked: config.checked,
            deterministic: config.deterministic,
        };
        ModsSource::new(mods, &options)
    }
}

impl Listed {
    /// What the kernel is, without what the planner chose: `backward bf16 D 128, mask`.
    pub fn name(&self) -> String {
        let Config { kernel, dtype, dim, dim_v, deterministic, split, paged, .. } = self.config;
        if kernel == Kernel::BlockLists {
            return format!("{kernel}, {}", self.mods);
        }
        let dims = HeadDims(dim, dim_v);
        let mut name = format!("{kernel} {} D {dims}, {}", dtype.name(), self.mods);
        let more = [(deterministic, "deterministic"), (split, "split"), (paged, "paged")];
        for (_, word) in more.iter().filter(|(on, _)| *on) {
            name = name + ", " + word;
        }
        name
    }

    /// What the planner chose: `tile 64x128, 8 warps, 2 stages`.
    pub fn tiles(&self) -> String {
        TilesOf(&self.config).to_string()
    }

    /// Compiles the kernel, unless `cache` has it, and compares it with its plan.
    ///
    /// # Errors
    /// Those of the compiler and of [`verify`].
    pub fn check(&self, compiler: &Compiler, cache: &Cache) -> Result<Taken, CudaError> {
        let mods = self.mods.source(&self.config)?;
        let compiled = cache.compile(compiler, &source(&self.config, &mods), &self.arch)?;
        verify(&self.config, &compiled)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Mask => "mask",
            Self::Score => "score",
            Self::Learned => "learned",
            Self::Dropout => "dropout",
            Self::Buckets => "buckets",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_every_kernel_for_every_architecture() {
        for (arch, _) in ARCHS {
            let all = list(arch, false).unwrap();
            let mut names: Vec<_> = all.iter().map(Listed::name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), all.len(), "a name for each kernel");
            for kernel in Kernel::ALL {
                assert!(all.iter().any(|l| l.config.kernel == kernel), "{kernel} for {arch}");
            }
            let few = list(arch, true).unwrap();
            assert!(few.len() < all.len() / 5, "{} of {}", few.len(), all.len());
            assert!(few.iter().all(|l| all.contains(l)));
        }
        let said = list("sm_70", true).unwrap_err().to_string();
        assert!(said.starts_with("no kernels are listed for sm_70, but for sm_80, "), "{said}");
    }

    #[test]
    fn compiled_kernels_take_what_was_planned() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let cache = Cache::at(None);
        let sample = |arch: &str| list(arch, true).unwrap().into_iter();
        for one in sample("sm_86").chain(sample("sm_90")).step_by(5) {
            if let Err(e) = one.check(compiler, &cache) {
                panic!("{}: {e}", one.arch);
            }
        }
    }

    /// What a compilation costs is what is in it. Wall time is not to be tested; the machine code
    /// of a score that the compiler has to copy for each entry of a tile is.
    #[test]
    fn the_longest_score_of_the_catalogue_is_not_copied_for_every_entry() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let all = list("sm_90", false).unwrap();
        let bytes = |kernel: Kernel, mods: Kind| {
            let config = |c: &Config| {
                (c.kernel, c.dtype, c.dim, c.split, c.paged, c.deterministic)
                    == (kernel, Elem::Bf16, 64, false, false, false)
            };
            let found = all.iter().find(|l| l.mods == mods && config(&l.config)).unwrap();
            let source = source(&found.config, &found.mods.source(&found.config).unwrap());
            compiler.compile(&source, "sm_90").unwrap().cubin.len()
        };
        for kernel in [Kernel::Forward, Kernel::Backward] {
            let (plain, buckets) = (bytes(kernel, Kind::Plain), bytes(kernel, Kind::Buckets));
            println!("{kernel}: {plain} B plain, {buckets} B with buckets");
            assert!(2 * buckets < 5 * plain, "{kernel}: {plain} B plain, {buckets} B with buckets");
        }
    }
}
