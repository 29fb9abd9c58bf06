//! Whether compiled kernels are what was planned, and the list of kernels on which that is seen
//! without a GPU.

use std::fmt;
use std::sync::LazyLock;

use foveate_mods::{Buffer, MaskMod, ScoreGradient, ScoreMod, masks, scores};

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
    /// Bytes of local memory a thread, spills included.
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
    let taken = Taken {
        registers: found.registers,
        local_bytes: found.stack_bytes.max(found.spill_bytes),
        shared_bytes: planned.shared_bytes as u32,
    };
    if stated != i32::try_from(planned.shared_bytes).ok() {
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
/// backward, in a fixed order or not. f16 is listed at two head dims; it differs from bf16 in the
/// name of two instructions. With `few`, a sample of it.
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
    for dtype in [Elem::Bf16, Elem::F32, Elem::F16] {
        for (dim, dim_v) in DIMS {
            for mods in [Kind::Plain, Kind::Mask, Kind::Score, Kind::Learned] {
                let wanted = match (dtype, dim) {
                    (Elem::F16, 64 | 128) => !few,
                    (Elem::F16, _) => false,
                    (Elem::Bf16, 128) => true,
                    (Elem::F32, 64) | (Elem::Bf16, 256) => !few || mods == Kind::Plain,
                    _ => !few || (dtype, dim, dim_v, mods) == (Elem::Bf16, 192, 128, Kind::Learned),
                };
                for deterministic in [false, true] {
                    if !wanted || (deterministic && matches!(mods, Kind::Plain | Kind::Score)) {
                        continue;
                    }
                    let class = mods.class(dtype, dim, dim_v, deterministic);
                    let options = KernelOptions { splits: Some(2), ..KernelOptions::default() };
                    let plan = KernelPlan::new(&profile, &class, &SIZES, true, &options)?;
                    for choice in plan.kernels {
                        let mut config = choice.chosen.config;
                        config.split = false;
                        let rows = !matches!(
                            config.kernel,
                            Kernel::Forward | Kernel::Backward | Kernel::BackwardDq
                        );
                        let mods = if rows { Kind::Plain } else { mods };
                        let one = Listed { arch: arch.to_owned(), config, mods };
                        if !listed.contains(&one) {
                            listed.push(one);
                        }
                    }
                }
            }
        }
    }
    Ok(listed)
}

impl Kind {
    fn class(self, dtype: Elem, dim: usize, dim_v: usize, deterministic: bool) -> Class {
        let group = SIZES.heads_q / SIZES.heads_kv;
        Class {
            mask: self == Self::Mask,
            score: matches!(self, Self::Score | Self::Learned),
            dscore: self == Self::Score,
            captures: self == Self::Learned,
            deterministic,
            ..Class::new(dtype, dim, dim_v, group)
        }
    }

    fn source(self, config: &Config) -> Result<ModsSource, CudaError> {
        static MODS: LazyLock<(MaskMod, ScoreMod, ScoreMod)> = LazyLock::new(|| {
            let documents = Buffer::<i32>::vector("doc", vec![0; SIZES.queries]);
            let mask = masks::document(&documents).map(|m| masks::causal() & m);
            let table = Buffer::<f32>::learned("bias", &[SIZES.heads_q, 257], vec![0.0; 32 * 257]);
            let learned = table.and_then(|t| scores::relative_bias(&t));
            let built = "these mods are written here and can be built";
            (mask.expect(built), scores::soft_cap(30.0).expect(built), learned.expect(built))
        });
        static GRADIENTS: LazyLock<[ScoreGradient; 2]> = LazyLock::new(|| {
            let (_, cap, learned) = &*MODS;
            [cap, learned].map(|s| s.gradient().expect("both have derivatives"))
        });
        let (mask, cap, learned) = &*MODS;
        let [of_cap, of_learned] = &*GRADIENTS;
        let mods = match self {
            Self::Plain => Mods::default(),
            Self::Mask => Mods { mask: Some(mask), ..Mods::default() },
            Self::Score => Mods { score: Some(cap), gradient: Some(of_cap), ..Mods::default() },
            Self::Learned => {
                Mods { score: Some(learned), gradient: Some(of_learned), ..Mods::default() }
            }
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
        let Config { kernel, dtype, dim, dim_v, .. } = self.config;
        let dims = HeadDims(dim, dim_v);
        let order = if self.config.deterministic { ", deterministic" } else { "" };
        format!("{kernel} {} D {dims}, {}{order}", dtype.name(), self.mods)
    }

    /// What the planner chose: `tile 64x128, 8 warps, 2 stages`.
    pub fn tiles(&self) -> String {
        TilesOf(&self.config).to_string()
    }

    /// Compiles the kernel and compares it with its plan.
    ///
    /// # Errors
    /// Those of the compiler and of [`verify`].
    pub fn check(&self, compiler: &Compiler) -> Result<Taken, CudaError> {
        let mods = self.mods.source(&self.config)?;
        verify(&self.config, &compiler.compile(&source(&self.config, &mods), &self.arch)?)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Mask => "mask",
            Self::Score => "score",
            Self::Learned => "learned",
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
            for kernel in Kernel::ALL.into_iter().filter(|&k| k != Kernel::BlockLists) {
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
        let sample = |arch: &str| list(arch, true).unwrap().into_iter();
        for one in sample("sm_86").chain(sample("sm_90")).step_by(5) {
            if let Err(e) = one.check(compiler) {
                panic!("{}: {e}", one.arch);
            }
        }
    }
}
