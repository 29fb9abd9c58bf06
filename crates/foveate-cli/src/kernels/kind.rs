//! The mods that kernels are listed with.

use std::fmt;
use std::sync::LazyLock;

use foveate_mods::{Buffer, ScoreGradient, ScoreMod, masks, scores};
use foveate_problem::{Dropout, Spec};

use foveate_cuda::CudaError;
use foveate_cuda::choose::PrintedMods;
use foveate_cuda::compile::codegen::{Extent, ModsSource, Options};
use foveate_cuda::compile::config::{Config, Elem};

/// Query heads and key/value heads of a problem that kernels are listed for.
pub(super) const HEADS: (usize, usize) = (32, 8);
/// Its queries, and its keys.
pub(super) const LENGTH: usize = 8192;

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
    /// The same with a soft cap after it: learned, and with a derivative.
    Capped,
    /// Dropout.
    Dropout,
    /// T5's learned buckets, whose index is the longest of the catalogue.
    Buckets,
    /// A soft cap under a causal mask.
    CausalScore,
    /// ALiBi under a causal mask: a score without a derivative, with registers of its own.
    CausalAlibi,
    /// Dropout and ALiBi.
    DropoutAlibi,
}

/// What one kind of mods is made of.
#[derive(Default)]
struct Program {
    spec: Spec,
    gradient: Option<ScoreGradient>,
}

impl Kind {
    const ALL: [Self; 10] = [
        Self::Plain,
        Self::Mask,
        Self::Score,
        Self::Learned,
        Self::Capped,
        Self::Dropout,
        Self::Buckets,
        Self::CausalScore,
        Self::CausalAlibi,
        Self::DropoutAlibi,
    ];

    fn program(self) -> &'static Program {
        static PROGRAMS: LazyLock<[Program; 10]> = LazyLock::new(|| Kind::ALL.map(Kind::build));
        &PROGRAMS[self as usize]
    }

    fn build(self) -> Program {
        let built = "these mods are written here and can be built";
        let cap = || scores::soft_cap(30.0).expect(built);
        let bias = || {
            let zeros = vec![0.0; HEADS.0 * 257];
            let table = Buffer::<f32>::learned("bias", &[HEADS.0, 257], zeros);
            table.and_then(|table| scores::relative_bias(&table)).expect(built)
        };
        let scored = |score: ScoreMod| {
            let gradient = Some(score.gradient().expect("they have derivatives"));
            Program { spec: Spec { score: Some(score), ..Spec::default() }, gradient }
        };
        let of = |spec: Spec| Program { spec, gradient: None };
        let alibi = || scores::alibi(HEADS.0).expect(built);
        let causal = |Program { spec, gradient }| Program {
            spec: Spec { mask: Some(masks::causal()), ..spec },
            gradient,
        };
        let dropout = Some(Dropout::new(0.1, 1));
        match self {
            Self::Plain => Program::default(),
            Self::Mask => {
                let documents = Buffer::<i32>::vector("doc", vec![0; LENGTH]);
                let mask = masks::document(&documents).map(|m| masks::causal() & m);
                of(Spec { mask: Some(mask.expect(built)), ..Spec::default() })
            }
            Self::Score => scored(cap()),
            Self::Learned => scored(bias()),
            Self::Capped => scored(bias().then(&cap())),
            Self::Dropout => of(Spec { dropout, ..Spec::default() }),
            Self::CausalScore => causal(scored(cap())),
            Self::CausalAlibi => causal(scored(alibi())),
            Self::DropoutAlibi => {
                let Program { spec, gradient } = scored(alibi());
                Program { spec: Spec { dropout, ..spec }, gradient }
            }
            Self::Buckets => {
                let zeros = vec![0.0; 32 * HEADS.0];
                let table = Buffer::<f32>::learned("t5_bias", &[32, HEADS.0], zeros);
                let buckets = table.and_then(|t| scores::t5_buckets(&t, true, 128));
                scored(buckets.expect(built))
            }
        }
    }

    /// The mods as the source of a kernel has them.
    pub(super) fn source(
        self,
        printed: PrintedMods,
        config: &Config,
    ) -> Result<ModsSource, CudaError> {
        let Program { spec, gradient } = self.program();
        let mods = printed.of(spec, gradient.as_ref());
        let (heads_q, heads_kv) = HEADS;
        let extent = Extent { batch: 2, heads_q, heads_kv, queries: LENGTH, keys: LENGTH };
        let options = Options {
            extent,
            fast_math: config.dtype != Elem::F32,
            checked: config.checked,
            deterministic: config.deterministic,
        };
        ModsSource::new(mods, &options)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Mask => "mask",
            Self::Score => "score",
            Self::Learned => "learned",
            Self::Capped => "capped",
            Self::Dropout => "dropout",
            Self::Buckets => "buckets",
            Self::CausalScore => "causal score",
            Self::CausalAlibi => "causal alibi",
            Self::DropoutAlibi => "dropout alibi",
        })
    }
}
