//! The files of kernels that models need, for whoever compiles them where no GPU is.

use std::sync::Arc;

use foveate_gpu::cache::Cache;
use foveate_gpu::nvrtc::{Compiled, Compiler};
use foveate_gpu::{Arch, GpuError, GpuErrorKind};
use foveate_tensor::DType;

use crate::head_norm;
use crate::launch::{File, Source};
use crate::optimizer::VECTORS;
use crate::pause;

/// A file of kernels and what it is compiled for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ListedSource {
    pub(crate) source: Source,
    /// Whether it is of the sample.
    few: bool,
}

impl ListedSource {
    /// The file, the dtype of its operands, and what else it is compiled for: `rms_norm bf16, held 2,
    /// vector 8, threads 256`.
    pub fn name(&self) -> String {
        let Source { file, dtype, vector, threads } = &self.source;
        let mut parts = vec![format!("{} {dtype}", file.name())];
        let own = file.defines().into_iter();
        let own = own.map(|(name, value)| (name.trim_start_matches("FV_").to_lowercase(), value));
        parts.extend(own.map(|(name, value)| format!("{name} {value}")));
        parts.extend([format!("vector {vector}"), format!("threads {threads}")]);
        parts.join(", ")
    }

    /// Its kernels, sorted.
    pub fn entries(&self) -> Vec<&'static str> {
        self.source.file.entries().to_vec()
    }

    /// Whether [`list`] has it in a sample.
    pub fn is_few(&self) -> bool {
        self.few
    }

    /// Whether its operands are bf16.
    pub fn is_bf16(&self) -> bool {
        self.source.dtype == DType::BF16
    }

    /// Whether a thread reads several elements at once.
    pub fn reads_vectors(&self) -> bool {
        self.source.vector > 1
    }

    /// Threads of a CTA.
    pub fn threads(&self) -> u32 {
        self.source.threads
    }

    /// Bytes of dynamic shared memory of a CTA.
    pub fn shared_bytes(&self) -> u32 {
        self.source.shared_bytes()
    }

    /// Its machine code for `arch`, compiled unless `cache` has it, and compared with its plan: a whole
    /// CTA's registers, shared memory as stated, no local memory where vectors are read.
    ///
    /// # Errors
    /// Those of [`Cache::compile`]; [`GpuErrorKind::Resources`] where a kernel takes more than was
    /// planned, or the file has other kernels than [`Self::entries`].
    pub fn compile(
        &self,
        compiler: &Compiler,
        cache: &Cache,
        arch: Arch,
    ) -> Result<Arc<Compiled>, GpuError> {
        let compiled = cache.compile(compiler, &self.source.text(), arch)?;
        let wrong = |reason| GpuErrorKind::Resources { kernel: self.name(), reason };
        let mut found: Vec<&str> = compiled.kernels.iter().map(|k| k.name.as_str()).collect();
        found.sort_unstable();
        if found != self.entries() {
            let reason = format!("it has {}, not {}", found.join(", "), self.entries().join(", "));
            return Err(wrong(reason).into());
        }
        for entry in self.entries() {
            self.source.expected(entry).compare(&compiled)?.map_err(|e| wrong(e.reason))?;
        }
        Ok(compiled)
    }
}

/// The files that models of widths 1024 to 16384 (f32: 8192) need, in every dtype of operands, read
/// in vectors and element by element.
pub fn list() -> Vec<ListedSource> {
    let mut all = Vec::new();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for vector in [16 / dtype.bytes(), 1] {
            for (file, threads) in files(dtype, vector) {
                let source = Source { file, dtype, vector, threads };
                let few = dtype == DType::BF16
                    && vector > 1
                    && !all.iter().any(|l: &ListedSource| l.source.file.name() == file.name());
                all.push(ListedSource { source, few });
            }
        }
    }
    let exact = [(1, 0, 0), (0, 0, 0), (1, 0, 1), (0, 0, 1)];
    let rounded = [(1, 2, 0), (1, 1, 0), (2, 1, 1), (0, 2, 0), (1, 2, 1)];
    for (weights, moments, gradients) in exact.into_iter().chain(rounded) {
        // Moments of 16 bits are updated 8 at a time, and gradients of 16 bits squared.
        let wide = moments == 1 || (weights, moments, gradients) == (0, 0, 1);
        let widest = if wide { &VECTORS[..] } else { &VECTORS[1..] };
        for rule in [0, 1] {
            for vector in widest.iter().copied().chain([1]) {
                let file = File::Update { rule, weights, moments, gradients };
                let source = Source { file, dtype: DType::F32, vector, threads: 256 };
                let few = !all.iter().any(|l| l.source.file.name() == file.name());
                all.push(ListedSource { source, few });
            }
        }
    }
    let pause = Source { file: File::Pause, dtype: DType::F32, vector: 1, threads: pause::THREADS };
    all.push(ListedSource { source: pause, few: true });
    all
}

/// The files for operands of `dtype` but the optimiser's, and threads of a CTA.
fn files(dtype: DType, vector: usize) -> Vec<(File, u32)> {
    let widest = if dtype == DType::F32 { 512 } else { 1024 };
    let mut files: Vec<(File, u32)> =
        [256, 64, widest].map(|threads| (File::RmsNorm { held: 16 / vector }, threads)).to_vec();
    files.push((File::RmsNorm { held: usize::div_ceil(8, vector) }, 256));
    for width in [1024usize, 576] {
        files.push((File::RmsNormRows { held: width.div_ceil(32 * vector) }, 128));
    }
    files.extend([(File::Vectors, 256), (File::Ranks, 256), (File::Context, 256)]);
    let columns = [64, 32, 16].into_iter().filter(|&columns| columns <= 32 * vector);
    files.extend(columns.map(|columns| (File::ColumnSums { columns }, 512)));
    files.push((File::SumParts, 512));
    let heads = [128, 64, 256].map(|dim| head_norm::lanes_of(dim, vector));
    for turn in [Some(false), None, Some(true)] {
        files.extend(heads.map(|(lanes, held)| (File::HeadNorm { lanes, held, turn }, 128)));
    }
    for other in [false, true] {
        files.extend([128, 256].map(|threads| (File::Embedding { narrow: other }, threads)));
        files.push((File::Gated { gelu: other }, 256));
        files.push((File::Rope { neighbours: other }, 128));
        files.extend([512, 1024].map(|threads| (File::CrossEntropy { cap: other }, threads)));
    }
    files
}
