//! Plans: a program checked and compiled for a class of problems.

use foveate_problem::{BackwardArgs, Dims, ForwardArgs, Operands, Spec};
use foveate_tensor::{DType, TensorMut, TensorRef};

use crate::call::Call;
use crate::error::{CpuError, CpuErrorKind};
use crate::mods::Mods;
use crate::tiles::{CpuOptions, Tiles};
use crate::work::{Pool, units};

/// A program ready to run on the CPU.
///
/// A plan is made for a dtype, head counts and head dims; it runs problems of any batch size,
/// lengths and strides of that class. It may be used by several threads at once.
#[derive(Debug)]
pub struct CpuPlan {
    spec: Spec,
    dims: Dims,
    dtype: DType,
    options: CpuOptions,
    mods: Mods,
    pool: Pool,
}

impl CpuPlan {
    /// Plans `spec` for operands of `dtype` (f32, f16 or bf16) and sizes like `dims`.
    ///
    /// # Errors
    /// When the dtype is not one of those, or an option is out of its range.
    pub fn new(
        spec: &Spec,
        dims: &Dims,
        dtype: DType,
        options: CpuOptions,
    ) -> Result<Self, CpuError> {
        if dtype == DType::F64 {
            return Err(CpuErrorKind::DType { found: dtype }.into());
        }
        options.check()?;
        if spec.mask.is_some() || spec.score.is_some() || spec.dropout.is_some() {
            let reason = "masks, scores and dropout are not supported on the CPU".to_owned();
            return Err(CpuErrorKind::Operands { reason }.into());
        }
        Ok(Self {
            spec: spec.clone(),
            dims: *dims,
            dtype,
            options,
            mods: Mods {},
            pool: Pool::default(),
        })
    }

    /// Computes `out`, `lse` and, when asked, `max_score`.
    ///
    /// # Errors
    /// When operands or destinations do not fit the plan or each other. Also when a mod read a
    /// captured buffer outside its bounds; the results are written then, the index clamped.
    pub fn forward(&self, args: ForwardArgs<'_>) -> Result<(), CpuError> {
        let call = self.call(&args.operands)?;
        let Dims { heads_q, dim_v, .. } = call.dims;
        let [batch, _, len_q, _] = args.operands.q.shape();
        check_shape("out", &args.out, [batch, heads_q, len_q, dim_v])?;
        check_shape("lse", &args.lse, [batch, heads_q, len_q])?;
        check_f32("lse", args.lse.dtype())?;
        if let Some(max_score) = &args.max_score {
            check_shape("max_score", max_score, [batch, heads_q, len_q])?;
            check_f32("max_score", max_score.dtype())?;
        }
        crate::forward::forward(&call, args)
    }

    /// Computes `dq`, `dk`, `dv` and, when asked, the gradients of the sink and of learned
    /// captured buffers.
    ///
    /// # Errors
    /// When operands or destinations do not fit the plan or each other, or the score cannot be
    /// differentiated. Also when a mod read a captured buffer outside its bounds; the gradients
    /// are written then, the index clamped.
    pub fn backward(&self, args: BackwardArgs<'_>) -> Result<(), CpuError> {
        let call = self.call(&args.operands)?;
        let Dims { heads_q, dim_v, .. } = call.dims;
        let [batch, _, len_q, _] = args.operands.q.shape();
        check_source("out", &args.out, [batch, heads_q, len_q, dim_v])?;
        check_source("d_out", &args.d_out, [batch, heads_q, len_q, dim_v])?;
        check_source("lse", &args.lse, [batch, heads_q, len_q])?;
        if let Some(d_lse) = &args.d_lse {
            check_source("d_lse", d_lse, [batch, heads_q, len_q])?;
        }
        check_shape("dq", &args.dq, args.operands.q.shape())?;
        check_shape("dk", &args.dk, args.operands.k.shape())?;
        check_shape("dv", &args.dv, args.operands.v.shape())?;
        if let Some(d_sink) = &args.d_sink {
            let reason = match args.operands.sink {
                None => "was asked for, but the operands have no sink".to_owned(),
                Some(_) if d_sink.len() != heads_q => {
                    format!("has {} elements for {heads_q} query heads", d_sink.len())
                }
                Some(_) => return crate::backward::backward(&call, args),
            };
            return Err(CpuError::destination("d_sink", reason));
        }
        crate::backward::backward(&call, args)
    }

    fn call<'a>(&'a self, operands: &Operands<'a>) -> Result<Call<'a>, CpuError> {
        let dims = Dims::of(operands)?;
        let planned = [self.dims.heads_q, self.dims.heads_kv, self.dims.dim, self.dims.dim_v];
        let given = [dims.heads_q, dims.heads_kv, dims.dim, dims.dim_v];
        if planned != given || operands.q.dtype() != self.dtype {
            let reason = format!(
                "the plan is for {}/{} heads of dim {}/{} in {}, the operands have {}/{} heads \
                 of dim {}/{} in {}; make a plan for them",
                planned[0],
                planned[1],
                planned[2],
                planned[3],
                self.dtype,
                given[0],
                given[1],
                given[2],
                given[3],
                operands.q.dtype()
            );
            return Err(CpuErrorKind::Operands { reason }.into());
        }
        let sequences = dims.sequences(operands.varlen);
        Ok(Call {
            units: units(&dims, &sequences),
            sequences,
            tiles: Tiles::choose(&dims, &self.options),
            scale: self.spec.scale.unwrap_or(1.0 / (dims.dim as f32).sqrt()),
            sink: operands.sink,
            keep_factor: self.spec.dropout.map_or(1.0, |d| 1.0 / (1.0 - d.p)),
            mods: &self.mods,
            pool: &self.pool,
            dims,
        })
    }
}

fn check_shape<const N: usize>(
    name: &str,
    t: &TensorMut<'_, N>,
    want: [usize; N],
) -> Result<(), CpuError> {
    if t.shape() == want {
        return Ok(());
    }
    Err(CpuError::destination(name, format!("has shape {:?}; it must be {want:?}", t.shape())))
}

fn check_source<const N: usize>(
    name: &str,
    t: &TensorRef<'_, N>,
    want: [usize; N],
) -> Result<(), CpuError> {
    if t.shape() == want {
        return Ok(());
    }
    let reason = format!("{name} has shape {:?}; it must be {want:?}", t.shape());
    Err(CpuErrorKind::Operands { reason }.into())
}

fn check_f32(name: &str, dtype: DType) -> Result<(), CpuError> {
    if dtype == DType::F32 {
        return Ok(());
    }
    Err(CpuError::destination(name, format!("is {dtype}; it must be f32")))
}
