//! What a mask makes of tiles of any size: the tables of other libraries' block masks, made on the
//! device.

use foveate_mask::Varies;
use foveate_problem::Dims;
use foveate_tensor::DType;

use super::CudaPlan;
use super::call::Call;
use super::resident::{CallState, count};
use crate::choose::schedule::{Axis, TileSize};
use crate::compile::params::Lists;
use crate::error::CudaError;
use crate::operands::DeviceOperands;
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, Queue};

impl CudaPlan {
    /// Queues the making of the runs of live tiles of every row of tiles, `[heads, batch, rows]`,
    /// where heads and batch are 1 if the mask does not tell them apart: their number to `counts`, i32, and to `runs`, i32 `[.., columns, 2]`, the
    /// first tile of each and twice its tiles, plus 1 where the mask hides some pair of them. Tiles that the
    /// lengths cut are judged by the pairs that there are. Nothing waits.
    ///
    /// # Errors
    /// When there is no mask, a captured buffer is missing, or the arrays do not fit.
    pub fn tile_runs_on(
        &self,
        queue: &Queue,
        batch: usize,
        lens: [usize; 2],
        tile: [usize; 2],
        captures: &[(&str, DeviceArray<'_>)],
        into: [DeviceArray<'_>; 2],
    ) -> Result<(), CudaError> {
        let [counts, runs] = into;
        self.engine.check_queue(queue)?;
        let plan = self.bound(captures)?;
        let mask = plan.spec.mask.as_ref().ok_or_else(|| {
            CudaError::argument("runs of tiles are those of a mask, and the plan has none")
        })?;
        let varies = Varies::of(mask);
        let (heads, entries) =
            (self.dims.heads_q, if varies.by_batch { batch } else { batch.min(1) });
        let [rows, columns] = [0, 1].map(|axis| lens[axis].div_ceil(tile[axis]));
        let per_head = entries * rows;
        let all = if varies.by_head { heads * per_head } else { per_head };
        for (array, elems) in [(&counts, all), (&runs, 2 * all * columns)] {
            let found: usize = array.shape.iter().product();
            if array.element != ElementType::I32 || array.strides.is_some() || found != elems {
                return Err(CudaError::argument(format!(
                    "runs of tiles need row-major i32 arrays of {all} and {} elements",
                    2 * all * columns
                )));
            }
        }
        if all * columns == 0 {
            return Ok(());
        }
        let dims = Dims { batch, len_q: lens[0], len_k: lens[1], ..self.dims };
        let shaped = |heads, len| DeviceTensor::contiguous(0, DType::F32, [batch, heads, len, 1]);
        let (q, k) = (shaped(dims.heads_q, dims.len_q), shaped(dims.heads_kv, dims.len_k));
        let operands = DeviceOperands { captures, ..DeviceOperands::new(q, k, k) };
        let call = Call::new(queue, &dims, &operands, false)?;
        let mut state = CallState::default();
        let tile = TileSize { q: tile[0], kv: tile[1] };
        let axis = Axis::Queries;
        let schedule = plan.device_schedule(&call, &mut state, Some(mask), axis, tile)?;
        let lists = Lists {
            counts: counts.address,
            runs: runs.address,
            capacity: count(columns)?,
            head_stride: if varies.by_head { count(per_head)? } else { 0 },
        };
        plan.queue_lists(&call, &mut state, &schedule, axis, tile, lists, 0).map(|_| ())
    }
}
