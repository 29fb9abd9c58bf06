//! What no kernel runs, whatever its tiles. It is asked before anything is chosen, by everything
//! that plans, so that what is explained or compiled ahead is what a call will run.

use foveate_problem::Dims;
use foveate_tensor::DType;

use super::schedule::most_sum_rows;
use crate::compile::config::Elem;
use crate::error::CudaError;
use foveate_gpu::profile::Profile;

/// Query heads of a launch: CTAs along its second axis.
const MOST_HEADS: usize = 65535;

/// Whether a device can run problems of these sizes, and its name for their dtype.
///
/// # Errors
/// When the device is older than Ampere, the dtype is not f16, bf16, f32 or, on compute capability 9.0,
/// f8e4m3, or there are more queries or heads than a launch counts.
pub fn admit(profile: &Profile, dims: &Dims, dtype: DType) -> Result<Elem, CudaError> {
    check_rows(dims)?;
    profile.check_capability()?;
    let elem = Elem::of(dtype).ok_or_else(|| {
        CudaError::argument(format!("kernels take f16, bf16, f32 and f8e4m3, not {dtype}"))
    })?;
    let (major, minor) = profile.capability;
    if elem == Elem::E4m3 && (major, minor) != (9, 0) {
        return Err(CudaError::argument(format!(
            "f8e4m3 operands run on compute capability 9.0; this GPU has {major}.{minor}: give bf16 \
             or f16 ones"
        )));
    }
    if dims.heads_q > MOST_HEADS {
        return Err(CudaError::argument(format!(
            "{} query heads are more than the {MOST_HEADS} of a launch",
            dims.heads_q
        )));
    }
    Ok(elem)
}

/// Whether kernels can count the queries of all sequences, each rounded up as in the sums of dq.
///
/// # Errors
/// When there are more than an i32 holds.
pub(crate) fn check_rows(dims: &Dims) -> Result<(), CudaError> {
    const UNIT: usize = 16;
    let rows = match dims.packed {
        true => most_sum_rows(dims.batch, dims.len_q),
        false => dims.batch.saturating_mul(dims.len_q.next_multiple_of(UNIT)),
    };
    if i32::try_from(rows).is_ok() {
        return Ok(());
    }
    Err(CudaError::argument(format!(
        "batch and sequences have {rows} queries of a head together; kernels count to {}: cut the \
         batch",
        i32::MAX
    )))
}
