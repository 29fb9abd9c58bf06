//! Cross-entropy of logits that are there a chunk of tokens at a time.

use std::mem::offset_of;

use foveate_gpu::abi::Address;
use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceArray, DeviceTensor, GpuError};
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{count, dense, integers, matrix, operand_dtype, vector};
use crate::optimizer::Totals;
use crate::params::{
    CrossEntropyParams, CrossEntropyPartParams, LogitSumsParams, Rows, TotalParams,
};

/// Cross-entropy of each token's logits z and label, in nats: `lse − y[label]` with
/// `y = cap · tanh(z/cap)` (or z) and `lse = ln Σ exp(y)`, and beside it the z-loss
/// `z_weight · lse²`. A token without a label has losses 0 and gradient 0.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// `[tokens, vocabulary]`, f16, bf16 or f32.
    pub logits: DeviceTensor<2>,
    /// i32 `[tokens]`: below the vocabulary, or negative for none. Whoever uploads them has checked
    /// it.
    pub labels: DeviceArray<'a>,
    /// f32 `[tokens]`, written.
    pub losses: DeviceTensor<1>,
    /// Where z-losses are wanted: f32 `[tokens]`, written.
    pub z_losses: Option<DeviceTensor<1>>,
    /// Logits become the gradient of the sum of both losses.
    pub gradient: bool,
    /// Gemma's cap of logits.
    pub cap: Option<f32>,
    /// 0, or the weight of the z-loss (PaLM, section 5).
    pub z_weight: f32,
}

/// Numbers that ranks which have different parts of the vocabulary tell each other of a token.
pub const LOGIT_SUMS: usize = 3;

/// Of each token's logits, those of a part of the vocabulary: the largest y ([`CrossEntropy`]), the sum of
/// `exp(y)` beside it, and the label's y, 0 where another rank has it. All are 0 for a token without a
/// label.
#[derive(Clone, Copy, Debug)]
pub struct LogitSums<'a> {
    /// `[tokens, ids of the part]`, f16, bf16 or f32.
    pub logits: DeviceTensor<2>,
    /// i32 `[tokens]`: ids of all of the vocabulary, or negative for none.
    pub labels: DeviceArray<'a>,
    /// The part's first id.
    pub first: usize,
    /// f32 `[tokens, LOGIT_SUMS]`, side by side, written.
    pub sums: DeviceTensor<2>,
    /// As in [`CrossEntropy`].
    pub cap: Option<f32>,
}

/// [`CrossEntropy`] of a rank that has the logits of a part of the vocabulary: losses are
/// those of all of it, and the same bits on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyPart<'a> {
    /// `[tokens, ids of the part]`, f16, bf16 or f32.
    pub logits: DeviceTensor<2>,
    /// i32 `[tokens]`: ids of all of the vocabulary, or negative for none.
    pub labels: DeviceArray<'a>,
    /// The part's first id.
    pub first: usize,
    /// f32 `[ranks · tokens, LOGIT_SUMS]`, side by side: what [`LogitSums`] wrote on each rank, in order of
    /// rank.
    pub sums: DeviceTensor<2>,
    /// f32 `[tokens]`, written.
    pub losses: DeviceTensor<1>,
    /// As in [`CrossEntropy`].
    pub z_losses: Option<DeviceTensor<1>>,
    /// Logits become their part of the gradient of the sum of both losses.
    pub gradient: bool,
    /// As in [`CrossEntropy`].
    pub cap: Option<f32>,
    /// As in [`CrossEntropy`].
    pub z_weight: f32,
}

/// Adds losses and labels to the totals of a step: the losses in their order, in f64.
#[derive(Clone, Copy, Debug)]
pub struct AddLosses<'a> {
    /// f32 `[tokens]`.
    pub losses: DeviceTensor<1>,
    /// f32 `[tokens]`, where there are some.
    pub z_losses: Option<DeviceTensor<1>>,
    /// i32 `[tokens]`.
    pub labels: DeviceArray<'a>,
    /// What is added to.
    pub totals: DeviceArray<'a>,
}

/// Of a CTA, for rows of logits that are short enough for several at once on an SM, and for others.
const THREADS: u32 = 512;
const THREADS_OF_LONG_ROWS: u32 = 1024;
/// Words of a row that is long: [`THREADS_OF_LONG_ROWS`] have several vectors of it each.
const LONG_ROW: usize = 65_536;

/// The address of z-losses, or 0.
fn start_of(z_losses: Option<DeviceTensor<1>>, tokens: usize) -> Result<Address, GpuError> {
    let Some(z_losses) = z_losses else { return Ok(0) };
    z_losses.check_vector("z-losses", tokens)?;
    Ok(z_losses.start())
}

/// [`start_of`] what is written.
fn start_written(
    z_losses: Option<DeviceTensor<1>>,
    tokens: usize,
    accesses: &mut Accesses,
) -> Result<Address, GpuError> {
    let start = start_of(z_losses, tokens)?;
    z_losses.iter().try_for_each(|z_losses| accesses.write("z-losses", z_losses))?;
    Ok(start)
}

fn check_cap(cap: Option<f32>) -> Result<(), GpuError> {
    match cap {
        Some(cap) if !(cap > 0.0 && cap.is_finite()) => {
            Err(GpuError::argument(format!("a cap of logits of {cap}; it is above 0")))
        }
        _ => Ok(()),
    }
}

/// Logits and labels, as kernels take them.
struct Labelled {
    logits: Rows,
    labels: Address,
    tokens: usize,
    vocabulary: i32,
    cap: f32,
    source: Source,
}

impl Labelled {
    /// Checks them, and notes that they are read; `gradient` says that logits are written, too.
    fn check(
        logits: &DeviceTensor<2>,
        labels: &DeviceArray<'_>,
        cap: Option<f32>,
        gradient: bool,
        accesses: &mut Accesses,
    ) -> Result<Self, GpuError> {
        let dtype = operand_dtype("logits", logits.dtype)?;
        let shape @ [tokens, vocabulary] = logits.layout.shape;
        let rows = matrix("logits", logits, shape, dtype)?;
        integers("labels", labels, tokens)?;
        check_cap(cap)?;
        match gradient {
            true => accesses.write("logits", logits)?,
            false => accesses.read("logits", logits)?,
        }
        accesses.read_array("labels", labels)?;
        let file = File::CrossEntropy { cap: cap.is_some() };
        let vector = vector(dtype, &[rows], &[vocabulary]);
        let threads = if vocabulary < LONG_ROW { THREADS } else { THREADS_OF_LONG_ROWS };
        Ok(Self {
            logits: rows,
            labels: labels.address,
            tokens,
            vocabulary: count("words of a vocabulary", vocabulary)?,
            cap: cap.unwrap_or(0.0),
            source: Source { file, dtype, vector, threads },
        })
    }
}

impl Block for CrossEntropy<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let (cap, gradient) = (self.cap, self.gradient);
        let Labelled { logits, labels, tokens, vocabulary, cap, source } =
            Labelled::check(&self.logits, &self.labels, cap, gradient, accesses)?;
        self.losses.check_vector("losses", tokens)?;
        accesses.write("losses", &self.losses)?;
        let parameters = CrossEntropyParams {
            logits,
            labels,
            losses: self.losses.start(),
            z_losses: start_written(self.z_losses, tokens, accesses)?,
            vocabulary,
            wants_gradient: gradient.into(),
            cap,
            z_weight: self.z_weight,
        };
        Ok(vec![KernelLaunch::new(&source, "fv_cross_entropy", [tokens, 1], &parameters)?])
    }
}

impl Block for LogitSums<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let Labelled { logits, labels, tokens, vocabulary, cap, source } =
            Labelled::check(&self.logits, &self.labels, self.cap, false, accesses)?;
        let sums = dense("sums", &self.sums, [tokens, LOGIT_SUMS], DType::F32)?;
        accesses.write("sums", &self.sums)?;
        let first = count("words before a part", self.first)?;
        let parameters = LogitSumsParams { logits, labels, sums, vocabulary, first, cap };
        Ok(vec![KernelLaunch::new(&source, "fv_logit_sums", [tokens, 1], &parameters)?])
    }
}

impl Block for CrossEntropyPart<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let (cap, gradient) = (self.cap, self.gradient);
        let Labelled { logits, labels, tokens, vocabulary, cap, source } =
            Labelled::check(&self.logits, &self.labels, cap, gradient, accesses)?;
        self.losses.check_vector("losses", tokens)?;
        let ranks = self.sums.layout.shape[0] / tokens.max(1);
        let sums = dense("sums", &self.sums, [ranks * tokens, LOGIT_SUMS], DType::F32)?;
        accesses.read("sums", &self.sums)?;
        accesses.write("losses", &self.losses)?;
        let parameters = CrossEntropyPartParams {
            logits,
            labels,
            sums,
            losses: self.losses.start(),
            z_losses: start_written(self.z_losses, tokens, accesses)?,
            vocabulary,
            first: count("words before a part", self.first)?,
            ranks: count("ranks", ranks)?,
            tokens: count("tokens", tokens)?,
            wants_gradient: gradient.into(),
            cap,
            z_weight: self.z_weight,
            unused: 0,
        };
        Ok(vec![KernelLaunch::new(&source, "fv_cross_entropy_part", [tokens, 1], &parameters)?])
    }
}

impl Block for AddLosses<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let [tokens] = self.losses.layout.shape;
        self.losses.check_vector("losses", tokens)?;
        integers("labels", &self.labels, tokens)?;
        let totals = Totals::check(&self.totals)?;
        accesses.read("losses", &self.losses)?;
        let z_losses = start_of(self.z_losses, tokens)?;
        self.z_losses.iter().try_for_each(|z_losses| accesses.read("z-losses", z_losses))?;
        accesses.read_array("labels", &self.labels)?;
        accesses.write_array("totals", &self.totals)?;
        let file = File::CrossEntropy { cap: false };
        let source = Source { file, dtype: DType::F32, vector: 1, threads: THREADS };
        let parameters = TotalParams {
            losses: self.losses.start(),
            z_losses,
            labels: self.labels.address,
            loss: totals + offset_of!(Totals, loss) as Address,
            z_loss: totals + offset_of!(Totals, z_loss) as Address,
            labelled: totals + offset_of!(Totals, labelled) as Address,
            tokens: count("tokens", tokens)?,
        };
        Ok(vec![KernelLaunch::new(&source, "fv_total", [1, 1], &parameters)?])
    }
}
