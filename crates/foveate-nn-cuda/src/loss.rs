//! Cross-entropy of logits that are there a chunk of tokens at a time.

use foveate_gpu::abi::Address;
use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceArray, DeviceTensor, GpuError};
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{count, integers, matrix, operand_dtype, vector};
use crate::optimizer::Totals;
use crate::params::{CrossEntropyParams, TotalParams};

/// Cross-entropy of each token's logits z and label, in nats:
/// `lse − y[label] + z_weight · lse²` with `y = cap · tanh(z/cap)` (or z) and
/// `lse = ln Σ exp(y)`. A token without a label has loss 0 and gradient 0.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// `[tokens, vocabulary]`, f16, bf16 or f32.
    pub logits: DeviceTensor<2>,
    /// i32 `[tokens]`: below the vocabulary, or negative for none. Whoever uploads them has checked
    /// it.
    pub labels: DeviceArray<'a>,
    /// f32 `[tokens]`, written.
    pub losses: DeviceTensor<1>,
    /// Logits become the gradient of the sum of the losses.
    pub gradient: bool,
    /// Gemma's cap of logits.
    pub cap: Option<f32>,
    /// 0, or the weight of the z-loss (PaLM, section 5).
    pub z_weight: f32,
}

/// Adds losses and labels to the totals of a step: the losses in their order, in f64.
#[derive(Clone, Copy, Debug)]
pub struct AddLosses<'a> {
    /// f32 `[tokens]`.
    pub losses: DeviceTensor<1>,
    /// i32 `[tokens]`.
    pub labels: DeviceArray<'a>,
    /// What is added to.
    pub totals: DeviceArray<'a>,
}

const THREADS: u32 = 512;

impl Block for CrossEntropy<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("logits", self.logits.dtype)?;
        let shape @ [tokens, vocabulary] = self.logits.layout.shape;
        let logits = matrix("logits", &self.logits, shape, dtype)?;
        integers("labels", &self.labels, tokens)?;
        self.losses.check_vector("losses", tokens)?;
        if let Some(cap) = self.cap
            && !(cap > 0.0 && cap.is_finite())
        {
            return Err(GpuError::argument(format!("a cap of logits of {cap}; it is above 0")));
        }
        match self.gradient {
            true => accesses.write("logits", &self.logits)?,
            false => accesses.read("logits", &self.logits)?,
        }
        accesses.read_array("labels", &self.labels)?;
        accesses.write("losses", &self.losses)?;
        let vector = vector(dtype, &[logits], &[vocabulary]);
        let file = File::CrossEntropy { cap: self.cap.is_some() };
        let source = Source { file, dtype, vector, threads: THREADS };
        let parameters = CrossEntropyParams {
            logits,
            labels: self.labels.address,
            losses: self.losses.start(),
            vocabulary: count("words of a vocabulary", vocabulary)?,
            wants_gradient: self.gradient.into(),
            cap: self.cap.unwrap_or(0.0),
            z_weight: self.z_weight,
        };
        Ok(vec![KernelLaunch::new(&source, "fv_cross_entropy", [tokens, 1], &parameters)?])
    }
}

impl Block for AddLosses<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let [tokens] = self.losses.layout.shape;
        self.losses.check_vector("losses", tokens)?;
        integers("labels", &self.labels, tokens)?;
        let totals = Totals::check(&self.totals)?;
        accesses.read("losses", &self.losses)?;
        accesses.read_array("labels", &self.labels)?;
        accesses.write_array("totals", &self.totals)?;
        let file = File::CrossEntropy { cap: false };
        let source = Source { file, dtype: DType::F32, vector: 1, threads: THREADS };
        let parameters = TotalParams {
            losses: self.losses.start(),
            labels: self.labels.address,
            loss: totals,
            labelled: totals + size_of::<f64>() as Address,
            tokens: count("tokens", tokens)?,
        };
        Ok(vec![KernelLaunch::new(&source, "fv_total", [1, 1], &parameters)?])
    }
}
