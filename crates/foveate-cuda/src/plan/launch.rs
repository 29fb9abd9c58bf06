//! The launches of a pass.
//!
//! A forward is one launch. A backward is `Σ out·d_out − d_lse` of each row, the gradients of k
//! and v with the sums for dq, and dq from its sums; deterministic ones compute dq in a kernel of
//! its own instead. Nothing here waits for the device.

use foveate_problem::Pages;
use foveate_tensor::DType;

use super::CudaPlan;
use super::call::Call;
use super::kernels::{PassKind, launch, sizes};
use super::report::Report;
use super::resident::Gradient;
use crate::abi::{Abi, BackwardParams, ForwardParams, RowView};
use crate::config::Kernel;
use crate::driver::Block;
use crate::engine::Queue;
use crate::error::CudaError;
use crate::planner::Class;
use crate::schedule::Axis;
use crate::tensors::{DeviceBackward, DeviceForward, DeviceTensor, Places, written};

/// Bytes of the deterministic sum of one element of a captured buffer's gradient: three i64.
pub(super) const COUNTED_BYTES: usize = 24;

impl CudaPlan {
    /// Queues the forward pass on tensors in device memory: computes `out`, `lse` and, when
    /// asked, `max_score`. Nothing is copied, and unless the plan is checked nothing waits: the
    /// results are there for whatever is queued behind it.
    ///
    /// # Errors
    /// When operands or destinations do not fit the plan or each other, are not aligned to their
    /// elements, overlap, or are not memory of this device, or the queue is another device's:
    /// nothing is launched then. In a checked plan also when a mod read a captured buffer outside
    /// its bounds, or an entry of a page table is no page; the results are written then, the index
    /// clamped.
    pub fn forward_on(&self, queue: &Queue, args: &DeviceForward<'_>) -> Result<(), CudaError> {
        self.engine.check_queue(queue)?;
        let dims = self.admit(&args.operands)?;
        args.check(&dims)?;
        let plan = self.bound(args.operands.captures)?;
        self.check_places(&args.places()?)?;
        plan.launch_forward(&Call::new(queue, &dims, &args.operands, self.options.checked), args)
    }

    /// Queues the backward pass on tensors in device memory: computes `dq`, `dk`, `dv` and, when
    /// asked, the gradients of the sink and of learned captured buffers.
    ///
    /// # Errors
    /// Those of [`Self::forward_on`], a score that cannot be differentiated, or keys in pages.
    pub fn backward_on(&self, queue: &Queue, args: &DeviceBackward<'_>) -> Result<(), CudaError> {
        self.engine.check_queue(queue)?;
        let dims = self.admit(&args.operands)?;
        if args.operands.pages.is_some() {
            return Err(Pages::no_gradients().into());
        }
        args.check(&dims)?;
        let plan = self.bound(args.operands.captures)?;
        plan.check_captures(args)?;
        self.check_places(&args.places()?)?;
        plan.launch_backward(&Call::new(queue, &dims, &args.operands, self.options.checked), args)
    }

    fn check_places(&self, places: &Places) -> Result<(), CudaError> {
        places.check_apart(self.engine.known_apart())?;
        places.check_device(&self.engine)
    }

    fn check_captures(&self, args: &DeviceBackward<'_>) -> Result<(), CudaError> {
        let learned = self.spec.learned();
        for (i, (name, into)) in args.d_captures.iter().enumerate() {
            let Some(buffer) = learned.iter().find(|b| b.name() == *name) else {
                let names: Vec<_> = learned.iter().map(|b| b.name()).collect();
                return Err(CudaError::argument(format!(
                    "a gradient of buffer `{name}` is asked for; the learned buffers of the score \
                     are {names:?}"
                )));
            };
            into.check_vector(&format!("the gradient of `{name}`"), buffer.elems())?;
            if args.d_captures[..i].iter().any(|(other, _)| other == name) {
                return Err(CudaError::argument(format!(
                    "buffer `{name}` has two destinations for its gradient; give it one"
                )));
            }
        }
        Ok(())
    }

    pub(super) fn launch_forward(
        &self,
        call: &Call<'_>,
        args: &DeviceForward<'_>,
    ) -> Result<(), CudaError> {
        let Call { queue, dims, checked, .. } = *call;
        let pages = args.operands.pages;
        let class = Class {
            out_dtype: written("out", args.out.dtype)?,
            align: args.align(),
            sink: args.operands.sink.is_some(),
            paged: pages.is_some(),
            checked,
            ..self.class()
        };
        let chosen = self.chosen(class, sizes(dims, call.sequences.longest()), false)?;
        let ready = |kernel, entry| self.kernel(&chosen, kernel, entry, PassKind::Forward, call);
        let kernel = ready(Kernel::Forward, "fv_forward")?;
        let splits = chosen.splits;
        let work = self.work(call, true, Axis::Queries, kernel.tile())?;
        let report = Report::new(queue, checked)?;
        let mods = self.mods_bytes(call, &kernel.mods, &[], report.address())?;
        let group = dims.group();
        let heads = (dims.heads_q / kernel.config.heads()) as u32;
        let params = ForwardParams {
            q: args.operands.q.view("q", group)?,
            k: args.operands.k.view("k", 1)?,
            v: args.operands.v.view("v", 1)?,
            out: args.out.view("out", group)?,
            lse: args.lse.rows(),
            max_score: args.max_score.map_or(RowView::default(), |m| m.rows()),
            sink: args.operands.sink.map_or(0, |s| s.start()),
            sequences: work.sequences,
            tiles: work.tiles,
            lists: work.lists(),
            scale: self.scale(),
            heads_q: dims.heads_q as i32,
            heads_kv: dims.heads_kv as i32,
            tile_count: work.tile_count as i32,
            heads_together: chosen.heads_together(heads as usize, work.tile_count) as i32,
            splits: splits as i32,
            page_table: pages.map_or(0, |p| p.table),
            page_size: args.operands.k.layout.shape[2] as i32,
            page_stride: pages.map_or(0, |p| p.entries as i32),
            page_count: args.operands.k.layout.shape[0] as i32,
            page_report: report.address(),
            ..Default::default()
        };
        let grid = [work.tile_count as u32, heads, splits as u32];
        if splits == 1 {
            launch(&kernel.function, queue, grid, kernel.threads(), &[&params.bytes(), &mods])?;
            return report.read(self.options.timeout, &work, &kernel.mods.source);
        }
        // Shares leave partial results, which a second kernel joins.
        let [batch, _, len] = dims.row_shape();
        let rows = batch * dims.heads_q * len;
        let partial_out = queue.pool().take(4 * splits * rows * dims.dim_v)?;
        let partial_max = queue.pool().take(4 * splits * rows)?;
        let partial_sum = queue.pool().take(4 * splits * rows)?;
        let params = ForwardParams {
            partial_out: partial_out.address(),
            partial_max: partial_max.address(),
            partial_sum: partial_sum.address(),
            partial_rows: rows as i64,
            partial_batch: (dims.heads_q * len) as i64,
            partial_head: len as i64,
            ..params
        };
        launch(&kernel.function, queue, grid, kernel.threads(), &[&params.bytes(), &mods])?;
        let join = ready(Kernel::Combine, "fv_combine")?;
        let tiles = self.work(call, false, Axis::Queries, join.tile())?;
        let params = ForwardParams {
            sequences: tiles.sequences,
            tiles: tiles.tiles,
            tile_count: tiles.tile_count as i32,
            ..params
        };
        let grid = [tiles.tile_count as u32, dims.heads_q as u32, 1];
        launch(&join.function, queue, grid, join.threads(), &[&params.bytes()])?;
        report.read(self.options.timeout, &work, &kernel.mods.source)
    }

    pub(super) fn launch_backward(
        &self,
        call: &Call<'_>,
        args: &DeviceBackward<'_>,
    ) -> Result<(), CudaError> {
        let Call { queue, dims, checked, .. } = *call;
        let class = Class {
            grad_dtype: written("dq", args.dq.dtype)?,
            align: args.align(),
            sink: args.operands.sink.is_some(),
            captures: !args.d_captures.is_empty(),
            checked,
            ..self.class()
        };
        let has_rests = class.has_rests();
        let chosen = self.chosen(class, sizes(dims, call.sequences.longest()), true)?;
        let ready = |kernel, entry| self.kernel(&chosen, kernel, entry, PassKind::Backward, call);
        let stream = queue.stream();
        let pool = queue.pool();
        let (heads_q, heads_kv) = (dims.heads_q as u32, dims.heads_kv as u32);

        let delta = ready(Kernel::Delta, "fv_delta")?;
        let rows = self.work(call, false, Axis::Queries, delta.tile())?;
        let row_shape = dims.row_shape();
        let row_bytes = row_shape.iter().product::<usize>() * 4;
        let deltas = pool.take(row_bytes)?;
        let rests = has_rests.then(|| pool.take(row_bytes)).transpose()?;
        // Gradients of learned buffers that nobody asked for go where nobody looks.
        let learned = self.spec.learned();
        let longest = learned.iter().map(|b| b.elems()).max().unwrap_or(0);
        let some = !args.d_captures.is_empty() && args.d_captures.len() < learned.len();
        let unwanted = pool.take(if some { 4 * longest } else { 4 })?;
        // Deterministic sums are integers, and added to the gradient at the end.
        let counted = self.options.deterministic && !args.d_captures.is_empty();
        let mut sums = Vec::new();
        let mut gradients = Vec::new();
        for buffer in &learned {
            let wanted = args.d_captures.iter().find(|(name, _)| *name == buffer.name());
            let into = wanted.map_or(unwanted.address(), |(_, into)| into.start());
            let mut gradient = Gradient { name: buffer.name(), into, sums: unwanted.address() };
            if counted {
                let counts = pool.take(COUNTED_BYTES * buffer.elems())?;
                counts.fill(0)?;
                gradient.sums = counts.address();
                sums.push((counts, into, buffer.elems()));
            }
            gradients.push(gradient);
        }
        if !args.accumulate {
            for (_, into) in &args.d_captures {
                // SAFETY: destinations were checked, and live as long as operands (see `launch`).
                unsafe { stream.fill(into.start(), 0, into.layout.elems() * 4)? };
            }
        }

        let report = Report::new(queue, checked)?;
        let mods = self.mods_bytes(call, &delta.mods, &gradients, report.address())?;
        let group = dims.group();
        let o = &args.operands;
        let params = BackwardParams {
            q: o.q.view("q", group)?,
            k: o.k.view("k", 1)?,
            v: o.v.view("v", 1)?,
            out: args.out.view("out", group)?,
            d_out: args.d_out.view("d_out", group)?,
            dq: args.dq.view("dq", group)?,
            dk: args.dk.view("dk", 1)?,
            dv: args.dv.view("dv", 1)?,
            lse: args.lse.rows(),
            d_lse: args.d_lse.map_or(RowView::default(), |d| d.rows()),
            delta: DeviceTensor::<3>::contiguous(deltas.address(), DType::F32, row_shape).rows(),
            sink: o.sink.map_or(0, |s| s.start()),
            d_sink: args.d_sink.map_or(0, |s| s.start()),
            rests: rests.as_ref().map_or(0, Block::address),
            scale: self.scale(),
            heads_q: heads_q as i32,
            heads_kv: heads_kv as i32,
            accumulate: args.accumulate.into(),
            sharing: 1,
            ..Default::default()
        };
        let by_row = BackwardParams {
            sequences: rows.sequences,
            tiles: rows.tiles,
            tile_count: rows.tile_count as i32,
            ..params
        };
        let row_grid = [rows.tile_count as u32, heads_q, 1];
        let parameters = [&by_row.bytes()[..], &mods];
        launch(&delta.function, queue, row_grid, delta.threads(), &parameters)?;
        if has_rests {
            let rests = ready(Kernel::Rests, "fv_rests")?;
            debug_assert_eq!(rests.tile().q, delta.tile().q, "passes over rows have one tile");
            let mods = self.mods_bytes(call, &rests.mods, &gradients, report.address())?;
            let parameters = [&by_row.bytes()[..], &mods];
            launch(&rests.function, queue, row_grid, rests.threads(), &parameters)?;
        }
        if args.d_sink.is_some() {
            let sink = ready(Kernel::Delta, "fv_sink_gradient")?;
            launch(&sink.function, queue, [heads_q, 1, 1], 1024, &parameters)?;
        }

        let keys = ready(Kernel::Backward, "fv_backward")?;
        let work = self.work(call, true, Axis::Keys, keys.tile())?;
        let dq_sum = match self.options.deterministic {
            true => None,
            false => {
                let dim = keys.config.padded_dim();
                let dq_sum = pool.take(dims.heads_q * work.sum_rows * dim * 4)?;
                dq_sum.fill(0)?;
                Some(dq_sum)
            }
        };
        let params = BackwardParams {
            dq_sum: dq_sum.as_ref().map_or(0, Block::address),
            sum_rows: work.sum_rows as i64,
            ..params
        };
        let by_key = BackwardParams {
            sequences: work.sequences,
            tiles: work.tiles,
            tile_count: work.tile_count as i32,
            lists: work.lists(),
            sharing: work.sharing as i32,
            ..params
        };
        let mods = self.mods_bytes(call, &keys.mods, &gradients, report.address())?;
        let grid = [work.tile_count as u32, heads_kv, 1];
        launch(&keys.function, queue, grid, keys.threads(), &[&by_key.bytes(), &mods])?;

        if counted {
            let add = ready(Kernel::BackwardDq, "fv_capture_sums")?;
            for (counts, into, elems) in &sums {
                let blocks = elems.div_ceil(256) as u32;
                let (from, elems) = (counts.address().bytes(), (*elems as i64).bytes());
                launch(&add.function, queue, [blocks, 1, 1], 256, &[&from, &into.bytes(), &elems])?;
            }
        }

        let (kernel, entry) = match self.options.deterministic {
            true => (Kernel::BackwardDq, "fv_backward_dq"),
            false => (Kernel::Dq, "fv_dq"),
        };
        let last = ready(kernel, entry)?;
        let walks = self.options.deterministic;
        let rows = self.work(call, walks, Axis::Queries, last.tile())?;
        let by_row = BackwardParams {
            sequences: rows.sequences,
            tiles: rows.tiles,
            tile_count: rows.tile_count as i32,
            lists: rows.lists(),
            ..params
        };
        let mods = self.mods_bytes(call, &last.mods, &gradients, report.address())?;
        let grid = [rows.tile_count as u32, heads_q, 1];
        launch(&last.function, queue, grid, last.threads(), &[&by_row.bytes(), &mods])?;
        report.read(self.options.timeout, &work, &keys.mods.source)
    }
}
