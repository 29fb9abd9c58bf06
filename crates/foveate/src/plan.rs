//! Plans: a program joined with a problem on a device.

use std::collections::BTreeMap;
use std::sync::Arc;

use foveate_cpu::CpuPlan;
use foveate_cuda::CudaPlan;
use foveate_mods::expr::IntoScalar;
use foveate_mods::{AnyBuffer, Buffer, Element};
use foveate_problem::{BackwardArgs, Dims, ForwardArgs, Operands, Scales};
use foveate_tensor::{DType, Slice, Tensor, TensorRef};

use crate::backend::{self, BackendPlan, Chosen, Wanted};
use crate::device::Device;
use crate::error::{Declined, Error};
use crate::explain::Explanation;
use crate::problem::Problem;

/// A program ready to run. A plan is immutable and cheap to clone, and may be used by several
/// threads at once. It was made for one problem and runs every problem of its class: dtype, head
/// counts and head dims are fixed; batch, lengths, strides and the contents of captured buffers
/// are free.
#[derive(Clone, Debug)]
pub struct Plan {
    problem: Problem,
    device: Device,
    backend: &'static str,
    planned: Arc<dyn BackendPlan>,
    declined: Arc<[Declined]>,
    gradients_in: Option<DType>,
}

/// What a forward pass gives: contiguous tensors.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Forward {
    /// `[B, Hq, Sq, Dv]` in the dtype of the operands, bf16 where that is f8e4m3. Rows of varlen operands
    /// that belong to no sequence are 0.
    pub out: Tensor,
    /// Natural log of the softmax's denominator, `[B, Hq, Sq]`, f32; `-∞` for an empty row.
    pub lse: Tensor<3>,
    /// Largest score of each row, `[B, Hq, Sq]`, f32; `-∞` for an empty row.
    pub max_score: Tensor<3>,
}

/// What a backward pass gives: contiguous tensors of the shapes of q, k and v.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Gradients {
    /// Gradient of q.
    pub dq: Tensor,
    /// Gradient of k, summed over the batch when k is shared.
    pub dk: Tensor,
    /// Gradient of v, summed over the batch when v is shared.
    pub dv: Tensor,
    /// Gradient of the sink, `[Hq]`, when there is one.
    pub d_sink: Option<Vec<f32>>,
    /// Gradient of each learned captured buffer by its name, row-major like the buffer.
    pub captures: BTreeMap<String, Vec<f32>>,
}

impl Plan {
    pub(crate) fn new(wanted: &Wanted<'_>, device: &Device) -> Result<Self, Error> {
        let Chosen { backend, plan, declined } = backend::choose(wanted, device)?;
        Ok(Self {
            problem: wanted.problem.clone(),
            device: device.clone(),
            backend,
            planned: plan,
            declined: declined.into(),
            gradients_in: None,
        })
    }

    /// Computes attention.
    ///
    /// # Errors
    /// When the operands are not of the class that was planned for, or a mod reads a captured
    /// buffer outside its axis.
    pub fn forward<'a>(
        &self,
        q: impl Into<TensorRef<'a>>,
        k: impl Into<TensorRef<'a>>,
        v: impl Into<TensorRef<'a>>,
    ) -> Result<Forward, Error> {
        let operands = self.operands(q.into(), k.into(), v.into())?;
        let dims = Dims::of(&operands)?;
        let dtype = match operands.q.dtype() {
            DType::F8E4M3 => DType::BF16,
            dtype => dtype,
        };
        let mut out = Tensor::filled(dtype, dims.out_shape(), 0.0);
        let mut lse = Tensor::filled(DType::F32, dims.row_shape(), f64::NEG_INFINITY);
        let mut max_score = lse.clone();
        self.forward_into(ForwardArgs {
            operands,
            out: out.view_mut()?,
            lse: lse.view_mut()?,
            max_score: Some(max_score.view_mut()?),
        })?;
        Ok(Forward { out, lse, max_score })
    }

    /// Gradients for these operands, all 0.
    pub(crate) fn zero_gradients(&self, operands: &Operands<'_>) -> Result<Gradients, Error> {
        let dims = Dims::of(operands)?;
        let dtype = self.gradients_in.unwrap_or(operands.q.dtype());
        let zeros = |b: &AnyBuffer| (b.name().to_owned(), vec![0.0; b.elems()]);
        Ok(Gradients {
            dq: Tensor::filled(dtype, dims.q_shape(), 0.0),
            dk: Tensor::filled(dtype, dims.k_shape(), 0.0),
            dv: Tensor::filled(dtype, dims.v_shape(), 0.0),
            d_sink: operands.sink.map(|s| vec![0.0; s.len()]),
            captures: self.learned().into_iter().map(zeros).collect(),
        })
    }

    /// Computes attention into destinations of any strides and dtype. The sink and the sequence
    /// offsets are those of `args`.
    ///
    /// # Errors
    /// When operands or destinations do not fit the plan or each other: nothing is written then.
    /// Also when a mod reads a captured buffer outside its axis: the index is clamped and the
    /// results are written.
    pub fn forward_into(&self, args: ForwardArgs<'_>) -> Result<(), Error> {
        self.planned.forward(args)
    }

    /// Computes gradients into destinations of any strides and dtype, and adds to what is there
    /// when asked to.
    ///
    /// # Errors
    /// Those of [`Plan::forward_into`], or a score that has no derivative.
    pub fn backward_into(&self, args: BackwardArgs<'_>) -> Result<(), Error> {
        self.planned.backward(args)
    }

    /// The operands with the sink, the offsets and the pages of the problem that was planned for, as
    /// [`Plan::forward_into`] and [`Plan::backward_into`] take them.
    ///
    /// # Errors
    /// When the offsets end past the rows of the operands.
    pub fn operands<'a>(
        &'a self,
        q: TensorRef<'a>,
        k: TensorRef<'a>,
        v: TensorRef<'a>,
    ) -> Result<Operands<'a>, Error> {
        let varlen = self.problem.offsets_within(q.shape()[2], k.shape()[2])?;
        let pages = self.problem.get_pages();
        let (sink, scales) = (self.problem.get_sink().map(Slice::F32), self.problem.get_scales());
        Ok(Operands { q, k, v, sink, varlen, pages, scales })
    }

    /// The plan with another buffer in place of the captured one of the same name.
    ///
    /// # Errors
    /// When no mod captures a buffer of that name, or its type or number of axes differ.
    pub fn rebind(&self, buffer: impl AsBuffer) -> Result<Self, Error> {
        Ok(Self { planned: self.planned.rebind(buffer.as_buffer())?, ..self.clone() })
    }

    /// The plan with another value for the run-time scalar called `name`.
    ///
    /// # Errors
    /// When no mod has a scalar of that name, or its type differs.
    pub fn set_scalar(&self, name: &str, value: impl IntoScalar) -> Result<Self, Error> {
        Ok(Self { planned: self.planned.set_scalar(name, value.into_scalar())?, ..self.clone() })
    }

    /// The plan with other sequence offsets, of any number of rows; the program is not planned again.
    ///
    /// # Errors
    /// When offsets decrease or differ in number, or keys lie in pages. That they end within the
    /// rows is checked when operands are given.
    pub fn with_varlen(&self, cu_q: &[i32], cu_k: &[i32]) -> Result<Self, Error> {
        Ok(Self { problem: self.problem.clone().repacked(cu_q, cu_k)?, ..self.clone() })
    }

    /// The plan with another page table and other lengths, as the keys of a cache become more; the
    /// program is not planned again. That pages are there is checked when operands are given.
    ///
    /// # Errors
    /// When a length is negative, the table has not as many entries for each length, or the operands
    /// are packed.
    pub fn with_pages(&self, table: &[i32], lengths: &[i32]) -> Result<Self, Error> {
        Ok(Self { problem: self.problem.clone().with_pages(table, lengths)?, ..self.clone() })
    }

    /// The plan with other logits for the sink; the program is not planned again.
    ///
    /// # Errors
    /// Those of [`Problem::sink`].
    pub fn with_sink(&self, sink: &[f32]) -> Result<Self, Error> {
        Ok(Self { problem: self.problem.clone().sink(sink)?, ..self.clone() })
    }

    /// The plan with other scales of f8e4m3 operands; the program is not planned again.
    ///
    /// # Errors
    /// Those of [`Problem::scales`].
    pub fn with_scales(&self, scales: Scales<'_>) -> Result<Self, Error> {
        Ok(Self { problem: self.problem.clone().scales(scales)?, ..self.clone() })
    }

    /// The plan with `dq`, `dk` and `dv` of [`Plan::backward`] in `dtype`.
    pub fn gradients_in(mut self, dtype: DType) -> Self {
        self.gradients_in = Some(dtype);
        self
    }

    /// The plan with the workspace of `other`, where both run on a CPU: what a call of either leaves
    /// serves the next call of both, so that plans which take turns need no more than the largest.
    pub fn with_workspace_of(&self, other: &Self) -> Self {
        let planned: Arc<dyn BackendPlan> = match (self.cpu(), other.cpu()) {
            (Some(plan), Some(other)) => Arc::new(plan.with_workspace_of(other)),
            _ => Arc::clone(&self.planned),
        };
        Self { planned, ..self.clone() }
    }

    /// The captured buffers that receive a gradient, in order.
    pub fn learned(&self) -> Vec<&AnyBuffer> {
        self.planned.spec().learned()
    }

    /// What will run, and why not something else.
    pub fn explain(&self) -> Explanation {
        let execution = self.planned.execution(&self.problem);
        Explanation::new(
            self.backend,
            &self.device,
            &self.problem,
            self.planned.spec(),
            execution,
            &self.declined,
        )
    }

    /// The plan of the GPU engine, for tensors that are in device memory already and for streams
    /// of one's own; `None` on a CPU.
    pub fn cuda(&self) -> Option<&CudaPlan> {
        self.planned.cuda()
    }

    /// The plan of the CPU backend, whose program can be planned again with options of one's own;
    /// `None` on a GPU.
    pub fn cpu(&self) -> Option<&CpuPlan> {
        self.planned.cpu()
    }

    /// The problem that was planned for.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The name of the backend that runs the plan.
    pub fn backend(&self) -> &'static str {
        self.backend
    }
}

/// A captured buffer, with or without its static element type.
pub trait AsBuffer {
    /// The buffer without its static type.
    fn as_buffer(&self) -> &AnyBuffer;
}

impl AsBuffer for &AnyBuffer {
    fn as_buffer(&self) -> &AnyBuffer {
        self
    }
}

impl<T: Element> AsBuffer for &Buffer<T> {
    fn as_buffer(&self) -> &AnyBuffer {
        self.any()
    }
}
