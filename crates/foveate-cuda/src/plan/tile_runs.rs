//! What a mask makes of tiles of any size: the tables of other libraries' block masks, made on the
//! device.

use std::sync::Mutex;

use foveate_mask::Varies;
use foveate_problem::Dims;
use foveate_tensor::DType;

use super::CudaPlan;
use super::call::Call;
use super::resident::{CallState, count};
use crate::choose::schedule::{Axis, TileSize};
use crate::compile::params::{Address, Lists};
use crate::compile::tile_tables::{self, TileTablesParams};
use crate::error::CudaError;
use crate::operands::DeviceOperands;
use foveate_gpu::driver::Launch;
use foveate_gpu::kernel::LoadedKernel;
use foveate_gpu::sync::lock;
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, Queue};

impl CudaPlan {
    /// Queues the making of the runs of live tiles of every row of tiles, `[heads, batch, rows]`,
    /// where heads and batch are 1 if the mask does not tell them apart: their number to `counts`, i32, and
    /// to `runs`, i32 `[.., columns, 2]`, the first tile of each and twice its tiles, plus 1 where the mask
    /// hides some pair of them. Tiles that the lengths cut are judged by the pairs that there are. Nothing
    /// waits.
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
        let lines = Lines::of(&plan, batch, lens, tile)?;
        for (array, elems) in [(&counts, lines.all), (&runs, 2 * lines.all * lines.columns)] {
            let found: usize = array.shape.iter().product();
            if array.element != ElementType::I32 || array.strides.is_some() || found != elems {
                return Err(CudaError::argument(format!(
                    "runs of tiles need row-major i32 arrays of {} and {} elements",
                    lines.all,
                    2 * lines.all * lines.columns
                )));
            }
        }
        plan.queue_runs(queue, &lines, captures, [counts.address, runs.address])
    }

    /// Queues the making of the tables of a block mask, i32: for `batch` entries and the plan's heads, of the rows of
    /// tiles and of the columns. Nothing waits.
    ///
    /// # Errors
    /// When there is no mask, a captured buffer is missing, or the tables do not fit.
    pub fn tile_tables_on(
        &self,
        queue: &Queue,
        batch: usize,
        lens: [usize; 2],
        tile: [usize; 2],
        captures: &[(&str, DeviceArray<'_>)],
        into: &TileTables<'_>,
    ) -> Result<(), CudaError> {
        self.engine.check_queue(queue)?;
        let plan = self.bound(captures)?;
        let lines = Lines::of(&plan, batch, lens, tile)?;
        let heads = self.dims.heads_q;
        let [rows, columns] = [lines.rows, lines.columns].map(|n| batch * heads * n);
        let whole = rows * lines.columns;
        for table in [Some(&into.partial), into.full.as_ref()].into_iter().flatten() {
            for (array, elems) in table.iter().zip([rows, whole, columns, whole]) {
                let found: usize = array.shape.iter().product();
                if array.element != ElementType::I32 || array.strides.is_some() || found != elems {
                    return Err(CudaError::argument(format!(
                        "tables of {} by {} tiles need row-major i32 arrays",
                        lines.rows, lines.columns
                    )));
                }
            }
        }
        if rows + columns == 0 {
            return Ok(());
        }
        let bytes = [4 * lines.all, 8 * lines.all * lines.columns];
        // Runs are read by pairs.
        let memory = plan.pool(queue).take(bytes[1] + bytes[0])?;
        let [runs, counts] = [memory.address(), memory.address() + bytes[1] as Address];
        plan.queue_runs(queue, &lines, captures, [counts, runs])?;
        // By rows and columns, counts before tiles.
        let ordered = |[row_counts, row_tiles, column_counts, column_tiles]: [DeviceArray<'_>;
                           4]| {
            [row_counts, column_counts, row_tiles, column_tiles].map(|array| array.address)
        };
        let cut = |axis: usize| i32::from(!lens[axis].is_multiple_of(tile[axis]));
        let params = TileTablesParams {
            counts,
            runs,
            partial: ordered(into.partial),
            full: into.full.map_or([0; 4], ordered),
            head_rows: if lines.by_head { lines.per_head as i64 } else { 0 },
            batch_rows: if lines.by_batch { lines.rows as i64 } else { 0 },
            batch: count(batch)?,
            heads: count(heads)?,
            rows: count(lines.rows)?,
            columns: count(lines.columns)?,
            cut_row: cut(0),
            cut_column: cut(1),
        };
        let kernel = self.tables_kernel()?;
        let ctas = count((rows + columns).div_ceil(tile_tables::LINES))? as u32;
        let launch = Launch::new([ctas, 1, 1], tile_tables::THREADS);
        // SAFETY: the arrays have the elements that the kernel writes, checked above, and are the caller's until the
        // work is done; the runs are memory of the queue's pool.
        unsafe { kernel.launch(queue, &launch, (params,))? };
        Ok(())
    }

    /// The kernel of tables, loaded once for the device.
    fn tables_kernel(&self) -> Result<LoadedKernel, CudaError> {
        let kept = self.engine.keep(TablesKernel::default);
        let mut kept = lock(&kept.0);
        if kept.is_none() {
            let source = tile_tables::source(self.engine.device().info().arch());
            *kept = Some(self.engine.kernel(&source, &tile_tables::EXPECTED)?);
        }
        Ok(kept.clone().expect("it was just loaded"))
    }

    /// Queues the making of runs, at the addresses of counts and runs.
    fn queue_runs(
        &self,
        queue: &Queue,
        lines: &Lines,
        captures: &[(&str, DeviceArray<'_>)],
        [counts, runs]: [Address; 2],
    ) -> Result<(), CudaError> {
        let Some(mask) = self.spec.mask.as_ref().filter(|_| lines.all * lines.columns > 0) else {
            return Ok(());
        };
        let Lines { batch, lens, tile, .. } = *lines;
        let dims = Dims { batch, len_q: lens[0], len_k: lens[1], ..self.dims };
        let shaped = |heads, len| DeviceTensor::contiguous(0, DType::F32, [batch, heads, len, 1]);
        let (q, k) = (shaped(dims.heads_q, dims.len_q), shaped(dims.heads_kv, dims.len_k));
        let operands = DeviceOperands { captures, ..DeviceOperands::new(q, k, k) };
        let call = Call::new(queue, &dims, &operands, false)?;
        let mut state = CallState::default();
        let tile = TileSize::whole(tile[0], tile[1]);
        let axis = Axis::Queries;
        let schedule = self.device_schedule(&call, &mut state, Some(mask), axis, tile)?;
        let head_stride = if lines.by_head { count(lines.per_head)? } else { 0 };
        let lists = Lists { counts, runs, capacity: count(lines.columns)?, head_stride };
        self.queue_lists(&call, &mut state, &schedule, axis, tile, lists, 0).map(|_| ())
    }
}

/// The tables of a block mask, each row-major: of rows of tiles the number of tiles `[batch, heads, rows]` and tiles
/// `[batch, heads, rows, columns]`, of columns `[batch, heads, columns]` and
/// `[batch, heads, columns, rows]`. A line's tiles come first, and behind them all others, both in order.
#[derive(Clone, Copy, Debug)]
pub struct TileTables<'a> {
    /// Tiles of which the mask hides some pairs, and those that the lengths cut.
    pub partial: [DeviceArray<'a>; 4],
    /// Whole tiles; without it they count as partial ones.
    pub full: Option<[DeviceArray<'a>; 4]>,
}

/// The kernel of tables, once it is loaded.
#[derive(Default)]
struct TablesKernel(Mutex<Option<LoadedKernel>>);

/// Rows and columns of tiles of a mask.
struct Lines {
    batch: usize,
    lens: [usize; 2],
    tile: [usize; 2],
    rows: usize,
    columns: usize,
    by_batch: bool,
    by_head: bool,
    /// Rows of a head, of all batch entries that differ.
    per_head: usize,
    /// Rows that differ.
    all: usize,
}

impl Lines {
    fn of(
        plan: &CudaPlan,
        batch: usize,
        lens: [usize; 2],
        tile: [usize; 2],
    ) -> Result<Self, CudaError> {
        let mask = plan.spec.mask.as_ref().ok_or_else(|| {
            CudaError::argument("runs of tiles are those of a mask, and the plan has none")
        })?;
        let Varies { by_batch, by_head } = Varies::of(mask);
        let [rows, columns] = [0, 1].map(|axis| lens[axis].div_ceil(tile[axis]));
        let per_head = rows * if by_batch { batch } else { batch.min(1) };
        let all = if by_head { plan.dims.heads_q * per_head } else { per_head };
        Ok(Self { batch, lens, tile, rows, columns, by_batch, by_head, per_head, all })
    }
}
