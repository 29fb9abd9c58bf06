//! Launches as data, and the kernels that they need.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use foveate_gpu::abi::Abi;
use foveate_gpu::access::Accesses;
use foveate_gpu::driver::Launch;
use foveate_gpu::kernel::{Expected, KernelSource, LoadedKernel, Parameters};
use foveate_gpu::sync::lock;
use foveate_gpu::{Arch, Engine, GpuError, Queue};
use foveate_tensor::DType;

/// What only a GPU's compiler takes.
const DEVICE: &str = include_str!("../kernels/device.cuh");
const ELEMENTS: &str = include_str!("../kernels/elements.cuh");

/// A block of a transformer whose operands are known.
pub trait Block {
    /// Its launches, in their order. What they read and write is added to `accesses`.
    ///
    /// # Errors
    /// [`foveate_gpu::GpuErrorKind::Argument`] naming the operand that does not fit.
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError>;
}

/// A launch of a kernel.
#[derive(Clone, Debug)]
pub struct KernelLaunch {
    /// The file that the kernel is in, and what it is compiled for.
    pub source: Source,
    /// The kernel.
    pub entry: &'static str,
    /// CTAs along each axis.
    pub grid: [u32; 3],
    /// The kernel's one parameter, a struct, as it lies in memory.
    pub parameters: Vec<u8>,
}

/// A file of kernels and what it is compiled for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// The file.
    pub(crate) file: File,
    /// Of operands.
    pub(crate) dtype: DType,
    /// Elements that a thread reads at once.
    pub(crate) vector: usize,
    /// Threads of a CTA.
    pub(crate) threads: u32,
}

/// The files, with what each is compiled for beside the dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum File {
    /// Vectors of a row that a thread holds.
    RmsNorm {
        held: usize,
    },
    /// Vectors of a row that a lane of a warp holds.
    RmsNormRows {
        held: usize,
    },
    SumParts,
    /// Lanes that a head takes, vectors of it that a lane holds, and where heads turn whether pairs are neighbours.
    HeadNorm {
        lanes: usize,
        held: usize,
        turn: Option<bool>,
    },
    /// GELU instead of SiLU.
    Gated {
        gelu: bool,
    },
    /// Pairs of neighbours instead of halves.
    Rope {
        neighbours: bool,
    },
    /// The gradient of the table as operands, not f32.
    Embedding {
        narrow: bool,
    },
    /// With a cap on logits.
    CrossEntropy {
        cap: bool,
    },
    /// The optimiser's rule, and what is kept of parameters; moments of 8 bits are a file of their own.
    Update {
        rule: u32,
        weights: u32,
        moments: u32,
        gradients: u32,
    },
    Vectors,
    /// Columns that a CTA sums.
    ColumnSums {
        columns: usize,
    },
    Ranks,
    Context,
    Pause,
}

/// What lies in `kernels/`: a file, behind its header where it has one, and its kernels, sorted.
macro_rules! kernels {
    ($name:literal $(behind $header:literal)?, $($entry:literal),+) => {
        Contents {
            name: $name,
            text: concat!(
                $(include_str!(concat!("../kernels/", $header)),)?
                include_str!(concat!("../kernels/", $name, ".cu"))
            ),
            entries: &[$($entry),+],
        }
    };
}

/// A file as it is compiled, but for the macros.
struct Contents {
    name: &'static str,
    text: &'static str,
    entries: &'static [&'static str],
}

impl File {
    fn contents(self) -> Contents {
        match self {
            Self::RmsNorm { .. } => kernels!("rms_norm" behind "rms_norm.cuh",
                "fv_rms_norm", "fv_rms_norm_again", "fv_rms_norm_backward"
            ),
            Self::RmsNormRows { .. } => {
                kernels!("rms_norm_rows" behind "rms_norm.cuh", "fv_rms_norm_backward_rows")
            }
            Self::SumParts => kernels!("sum_parts", "fv_sum_parts"),
            Self::HeadNorm { .. } => kernels!("head_norm", "fv_head_norm", "fv_head_norm_backward"),
            Self::Gated { .. } => kernels!("gated", "fv_gated", "fv_gated_backward"),
            Self::Rope { .. } => kernels!("rope", "fv_rope"),
            Self::Embedding { .. } => {
                kernels!("embedding", "fv_embedding", "fv_embedding_backward", "fv_embedding_join")
            }
            Self::CrossEntropy { .. } => kernels!(
                "cross_entropy",
                "fv_cross_entropy",
                "fv_cross_entropy_part",
                "fv_logit_sums",
                "fv_total"
            ),
            Self::Update { moments: 2, .. } => {
                kernels!("update_int8" behind "updates.cuh", "fv_update_int8")
            }
            Self::Update { .. } => {
                kernels!("update" behind "updates.cuh", "fv_factor", "fv_squares", "fv_update")
            }
            Self::Vectors => {
                kernels!("vectors", "fv_add", "fv_add_rows", "fv_copy_rows", "fv_widen")
            }
            Self::ColumnSums { .. } => kernels!("column_sums", "fv_column_sums"),
            Self::Ranks => kernels!("ranks", "fv_narrow", "fv_sum_ranks"),
            Self::Context => kernels!("context", "fv_join", "fv_sum_keys"),
            Self::Pause => kernels!("pause", "fv_pause"),
        }
    }

    /// What it is called, as its file is.
    pub(crate) fn name(self) -> &'static str {
        self.contents().name
    }

    /// Its kernels, sorted.
    pub(crate) fn entries(self) -> &'static [&'static str] {
        self.contents().entries
    }

    /// The macros that it reads beside those of every file.
    pub(crate) fn defines(self) -> Vec<(&'static str, usize)> {
        match self {
            Self::RmsNorm { held } | Self::RmsNormRows { held } => vec![("FV_HELD", held)],
            Self::HeadNorm { lanes, held, turn } => {
                let turn = turn.map_or(0, |neighbours| 1 + usize::from(neighbours));
                let ahead = heads_ahead(held);
                vec![("FV_LANES", lanes), ("FV_HELD", held), ("FV_AHEAD", ahead), ("FV_TURN", turn)]
            }
            Self::ColumnSums { columns } => vec![("FV_COLUMNS", columns)],
            Self::Gated { gelu } => vec![("FV_GELU", gelu.into())],
            Self::Rope { neighbours } => vec![("FV_NEIGHBOURS", neighbours.into())],
            Self::SumParts | Self::Vectors | Self::Ranks | Self::Context | Self::Pause => {
                Vec::new()
            }
            Self::Embedding { narrow } => vec![("FV_NARROW", narrow.into())],
            Self::CrossEntropy { cap } => vec![("FV_CAP", cap.into())],
            Self::Update { rule, weights, moments, gradients } => vec![
                ("FV_RULE", rule as usize),
                ("FV_WEIGHTS", weights as usize),
                ("FV_MOMENTS", moments as usize),
                ("FV_GRADIENTS", gradients as usize),
            ],
        }
    }
}

/// Heads that lanes ask for before they compute with the first, where each holds `held` vectors of one.
pub(crate) fn heads_ahead(held: usize) -> usize {
    if held == 1 { 2 } else { 1 }
}

impl Source {
    /// CUDA C++, one file.
    pub fn text(&self) -> String {
        self.text_on(DEVICE)
    }

    /// The file with `device` in the place of what only a GPU's compiler takes.
    pub(crate) fn text_on(&self, device: &str) -> String {
        let dtype = match self.dtype {
            DType::F16 => 0,
            DType::BF16 => 1,
            DType::F32 => 2,
            DType::F8E4M3 | DType::F64 => unreachable!("operands were checked"),
        };
        let mut defines = self.file.defines();
        defines.push(("FV_DTYPE", dtype));
        defines.push(("FV_VECTOR", self.vector));
        defines.push(("FV_THREADS", self.threads as usize));
        defines.push(("FV_SHARED_BYTES", self.shared_bytes() as usize));
        let defines: String =
            defines.iter().map(|(name, value)| format!("#define {name} {value}\n")).collect();
        [&defines, device, ELEMENTS, self.file.contents().text].join("\n")
    }

    /// Of dynamic shared memory.
    pub(crate) fn shared_bytes(&self) -> u32 {
        let sums = match self.file {
            // An f32 for every column that the lanes of a warp hold.
            File::RmsNormRows { held } => 32 * held * self.vector,
            // For every column of a head.
            File::HeadNorm { lanes, held, .. } => lanes * held * self.vector,
            // For every column of each warp.
            File::ColumnSums { columns } => self.threads as usize / 32 * columns,
            _ => 0,
        };
        4 * self.threads.max(sums as u32)
    }

    /// What a kernel of the file may take: registers of a full CTA, and no local memory but where it
    /// reads element by element, which is slow anyway.
    pub(crate) fn expected(&self, entry: &'static str) -> Expected<'static> {
        Expected {
            name: entry,
            entry,
            registers: (65536 / self.threads).min(255),
            local_bytes: if self.vector == 1 { 128 } else { 0 },
            static_shared_bytes: 0,
            shared_bytes: Some(self.shared_bytes()),
        }
    }
}

impl KernelLaunch {
    pub(crate) fn new(
        source: &Source,
        entry: &'static str,
        grid: [usize; 2],
        parameters: &impl Abi,
    ) -> Result<Self, GpuError> {
        let [x, y] = grid;
        // The most that CUDA takes along either axis.
        let (Ok(x), Ok(y @ ..=65535)) = (i32::try_from(x), i32::try_from(y)) else {
            return Err(GpuError::argument(format!("{entry} takes no grid of {x} by {y} CTAs")));
        };
        let grid = [x.unsigned_abs(), y.unsigned_abs(), 1];
        Ok(Self { source: source.clone(), entry, grid, parameters: parameters.bytes() })
    }
}

/// The kernels of a GPU, compiled when they are first needed.
#[derive(Debug)]
pub struct Kernels {
    engine: Arc<Engine>,
    arch: Arch,
    loaded: Mutex<HashMap<(Source, &'static str), LoadedKernel>>,
}

impl Kernels {
    /// None yet, for the GPU of `engine`.
    pub fn new(engine: Arc<Engine>) -> Self {
        let arch = engine.device().info().arch();
        Self { engine, arch, loaded: Mutex::default() }
    }

    /// The GPU.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Queues the launches of a block, in order with the queue's other work.
    ///
    /// # Errors
    /// [`foveate_gpu::GpuErrorKind::Argument`] for operands that do not fit, overlap or are no memory
    /// of this GPU; those of [`Engine::kernel`] and of the launch.
    ///
    /// # Safety
    /// The operands stay allocated until the queue's work is done.
    pub unsafe fn queue(&self, queue: &Queue, block: &impl Block) -> Result<(), GpuError> {
        let mut accesses = Accesses::default();
        let launches = block.launches(&mut accesses)?;
        accesses.check_apart(self.engine.checked_apart())?;
        accesses.check_device(&self.engine, queue)?;
        for launch in &launches {
            // SAFETY: the operands were checked above, and the caller keeps them.
            unsafe { self.launch(queue, launch)? };
        }
        Ok(())
    }

    /// Queues one launch.
    ///
    /// # Safety
    /// Its parameters name memory that the device reads and writes, until the queue's work is done.
    pub(crate) unsafe fn launch(
        &self,
        queue: &Queue,
        launch: &KernelLaunch,
    ) -> Result<(), GpuError> {
        let kernel = self.kernel(launch)?;
        let sizes = Launch::new(launch.grid, launch.source.threads);
        // SAFETY: the caller's promise is the same.
        unsafe { kernel.launch(queue, &sizes, Struct(&launch.parameters)) }
    }

    /// Compiles the kernels of a block without running it.
    ///
    /// # Errors
    /// Those of [`Self::queue`] that come before a launch.
    pub fn prepare(&self, block: &impl Block) -> Result<(), GpuError> {
        let launches = block.launches(&mut Accesses::default())?;
        launches.iter().try_for_each(|launch| self.kernel(launch).map(drop))
    }

    fn kernel(&self, launch: &KernelLaunch) -> Result<LoadedKernel, GpuError> {
        let key = (launch.source.clone(), launch.entry);
        if let Some(kernel) = lock(&self.loaded).get(&key) {
            return Ok(kernel.clone());
        }
        let source = KernelSource { text: launch.source.text(), arch: self.arch };
        let kernel = self.engine.kernel(&source, &launch.source.expected(launch.entry))?;
        Ok(lock(&self.loaded).entry(key).or_insert(kernel).clone())
    }
}

/// A kernel's one parameter.
struct Struct<'a>(&'a [u8]);

impl Parameters for Struct<'_> {
    fn bytes(&self) -> Vec<Vec<u8>> {
        vec![self.0.to_vec()]
    }
}
