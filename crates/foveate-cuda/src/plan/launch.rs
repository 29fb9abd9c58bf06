//! The launches of a pass.
//!
//! A forward is one launch, or two where the keys of a tile are split over blocks. A backward is
//! `Σ out·d_out − d_lse` of each row, the gradients of k and v with the sums for dq, and dq from its
//! sums; deterministic ones compute dq in a kernel of its own instead. Nothing here waits for the
//! device, and what a warm call does on the host is counted in microseconds: nothing is made twice.

use std::sync::Arc;

use foveate_problem::{Dims, Pages};
use foveate_tensor::DType;

use super::CudaPlan;
use super::call::Call;
use super::kernels::{PassKind, Ready, launch, sizes};
use super::report::Report;
use super::resident::{Gradient, Work};
use crate::abi::{Abi, BackwardParams, ForwardParams, RowView};
use crate::config::Kernel;
use crate::error::CudaError;
use crate::operands::{DeviceBackward, DeviceForward, row_view, view, written};
use crate::planner::{Class, KernelPlan};
use crate::schedule::Axis;
use foveate_gpu::access::Accesses;
use foveate_gpu::driver::Allocation;
use foveate_gpu::{DeviceTensor, Queue};

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
        self.check_accesses(&args.accesses()?)?;
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
        self.check_accesses(&args.accesses()?)?;
        plan.launch_backward(&Call::new(queue, &dims, &args.operands, self.options.checked), args)
    }

    fn check_accesses(&self, accesses: &Accesses) -> Result<(), CudaError> {
        accesses.check_apart(self.engine.known_apart())?;
        Ok(accesses.check_device(&self.engine)?)
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
        self.forget_queues();
        let class = Class {
            out_dtype: written("out", args.out.dtype)?,
            align: args.align(),
            sink: args.operands.sink.is_some(),
            paged: args.operands.pages.is_some(),
            checked: call.checked,
            ..self.class()
        };
        let pass = Pass::new(self, call, PassKind::Forward, class, &[])?;
        let kernel = pass.ready(Kernel::Forward, "fv_forward")?;
        let work = pass.work(&kernel, Axis::Queries, true)?;
        let params = pass.forward_params(args, &kernel, &work)?;
        match pass.chosen.splits {
            1 => pass.launch_shares(&kernel, &params)?,
            _ => pass.launch_split(&kernel, params)?,
        }
        pass.report.read(self.options.timeout, &work, &kernel.mods.source)
    }

    pub(super) fn launch_backward(
        &self,
        call: &Call<'_>,
        args: &DeviceBackward<'_>,
    ) -> Result<(), CudaError> {
        self.forget_queues();
        let Call { queue, dims, checked, .. } = *call;
        let class = Class {
            grad_dtype: written("dq", args.dq.dtype)?,
            align: args.align(),
            sink: args.operands.sink.is_some(),
            captures: !args.d_captures.is_empty(),
            checked,
            ..self.class()
        };
        let sums = RowSums::new(queue, dims, class.has_rests())?;
        let captured = Captured::new(self, queue, args)?;
        let pass = Pass::new(self, call, PassKind::Backward, class, &captured.gradients)?;
        let params = backward_params(args, dims, self.scale(), &sums)?;
        pass.launch_row_sums(&params)?;

        let keys = pass.ready(Kernel::Backward, "fv_backward")?;
        let work = pass.work(&keys, Axis::Keys, true)?;
        let dq_sum = pass.dq_sum(&keys, &work)?;
        let params =
            BackwardParams { dq_sum: dq_sum.as_ref().map_or(0, Allocation::address), ..params };
        let grid = [work.tile_count as u32, dims.heads_kv as u32, 1];
        begin_gradients(queue, args)?;
        pass.launch(&keys, grid, &params.over(&work))?;

        pass.launch_capture_sums(&captured)?;
        pass.launch_dq(&params)?;
        pass.report.read(self.options.timeout, &work, &keys.mods.source)
    }
}

/// A pass on its way to the device: what its launches have in common.
struct Pass<'a> {
    plan: &'a CudaPlan,
    call: &'a Call<'a>,
    kind: PassKind,
    chosen: Arc<KernelPlan>,
    /// Where gradients of learned buffers go.
    gradients: &'a [Gradient<'a>],
    report: Report,
}

impl<'a> Pass<'a> {
    fn new(
        plan: &'a CudaPlan,
        call: &'a Call<'_>,
        kind: PassKind,
        class: Class,
        gradients: &'a [Gradient<'a>],
    ) -> Result<Self, CudaError> {
        let sizes = sizes(call.dims, call.sequences.longest());
        let chosen = plan.chosen(class, sizes, kind == PassKind::Backward)?;
        let report = Report::new(call.queue, call.checked)?;
        Ok(Self { plan, call, kind, chosen, gradients, report })
    }

    /// The kernel `entry` in the file of `kernel`.
    fn ready(&self, kernel: Kernel, entry: &'static str) -> Result<Ready, CudaError> {
        self.plan.kernel(&self.chosen, kernel, entry, self.kind, self.call)
    }

    /// What `kernel` works on as the owner of tiles of `axis`, with the mask's lists if it `walks`
    /// along the other one.
    fn work(&self, kernel: &Ready, axis: Axis, walks: bool) -> Result<Work, CudaError> {
        self.plan.work(self.call, walks, axis, kernel.tile())
    }

    /// The bytes of a kernel's mods.
    fn mods(&self, kernel: &Ready) -> Result<Vec<u8>, CudaError> {
        self.plan.mods_bytes(self.call, &kernel.mods, self.gradients, self.report.address())
    }

    /// Queues a kernel whose arguments are `params` and mods.
    fn launch(&self, kernel: &Ready, grid: [u32; 3], params: &impl Abi) -> Result<(), CudaError> {
        self.launch_with(kernel, grid, &[&params.bytes(), &self.mods(kernel)?])
    }

    fn launch_with(
        &self,
        kernel: &Ready,
        grid: [u32; 3],
        parameters: &[&[u8]],
    ) -> Result<(), CudaError> {
        launch(&kernel.function, self.call.queue, grid, kernel.threads(), parameters)
    }

    fn forward_params(
        &self,
        args: &DeviceForward<'_>,
        kernel: &Ready,
        work: &Work,
    ) -> Result<ForwardParams, CudaError> {
        let (o, dims) = (&args.operands, self.call.dims);
        let group = dims.group();
        let heads = dims.heads_q / kernel.config.heads();
        let params = ForwardParams {
            q: view(&o.q, "q", group)?,
            k: view(&o.k, "k", 1)?,
            v: view(&o.v, "v", 1)?,
            out: view(&args.out, "out", group)?,
            lse: row_view(&args.lse),
            max_score: args.max_score.map_or(RowView::default(), |m| row_view(&m)),
            sink: o.sink.map_or(0, |s| s.start()),
            scale: self.plan.scale(),
            heads_q: dims.heads_q as i32,
            heads_kv: dims.heads_kv as i32,
            heads_together: self.chosen.heads_together(heads, work.tile_count) as i32,
            splits: self.chosen.splits as i32,
            page_table: o.pages.map_or(0, |p| p.table),
            page_size: o.k.layout.shape[2] as i32,
            page_stride: o.pages.map_or(0, |p| p.entries as i32),
            page_count: o.k.layout.shape[0] as i32,
            page_report: self.report.address(),
            ..Default::default()
        };
        Ok(params.over(work))
    }

    /// Queues the forward: a block for each share of the keys of a tile.
    fn launch_shares(&self, kernel: &Ready, params: &ForwardParams) -> Result<(), CudaError> {
        let heads = self.call.dims.heads_q / kernel.config.heads();
        let grid = [params.tile_count as u32, heads as u32, self.chosen.splits as u32];
        self.launch(kernel, grid, params)
    }

    /// The same where there are several shares: they leave partial results, which a second kernel
    /// joins.
    fn launch_split(&self, kernel: &Ready, params: ForwardParams) -> Result<(), CudaError> {
        let (dims, pool) = (self.call.dims, self.call.queue.pool());
        let [batch, heads, len] = dims.row_shape();
        let rows = batch * heads * len;
        let numbers = 4 * self.chosen.splits * rows;
        let partial_out = pool.take(numbers * dims.dim_v)?;
        let partial_max = pool.take(numbers)?;
        let partial_sum = pool.take(numbers)?;
        let params = ForwardParams {
            partial_out: partial_out.address(),
            partial_max: partial_max.address(),
            partial_sum: partial_sum.address(),
            partial_rows: rows as i64,
            partial_batch: (heads * len) as i64,
            partial_head: len as i64,
            ..params
        };
        self.launch_shares(kernel, &params)?;
        let join = self.ready(Kernel::Combine, "fv_combine")?;
        let tiles = self.work(&join, Axis::Queries, false)?;
        let grid = [tiles.tile_count as u32, heads as u32, 1];
        self.launch_with(&join, grid, &[&params.over(&tiles).bytes()])
    }

    /// Queues delta = `Σ out·d_out − d_lse` of each row and, where they are needed, what the weights
    /// of rows add up to and the gradient of the sink, which is made of both.
    fn launch_row_sums(&self, params: &BackwardParams) -> Result<(), CudaError> {
        let heads = params.heads_q as u32;
        let delta = self.ready(Kernel::Delta, "fv_delta")?;
        let rows = self.work(&delta, Axis::Queries, false)?;
        let grid = [rows.tile_count as u32, heads, 1];
        let params = params.over(&rows);
        let (bytes, mods) = (params.bytes(), self.mods(&delta)?);
        self.launch_with(&delta, grid, &[&bytes, &mods])?;
        if params.rests != 0 {
            let rests = self.ready(Kernel::Rests, "fv_rests")?;
            debug_assert_eq!(rests.tile().q, delta.tile().q, "passes over rows have one tile");
            self.launch_with(&rests, grid, &[&bytes, &self.mods(&rests)?])?;
        }
        if params.d_sink != 0 {
            const THREADS: u32 = 1024;
            let sink = self.ready(Kernel::Delta, "fv_sink_gradient")?;
            launch(&sink.function, self.call.queue, [heads, 1, 1], THREADS, &[&bytes, &mods])?;
        }
        Ok(())
    }

    /// Zeros for the sums of dq, which tiles of keys add to; nothing where it is made in a fixed
    /// order.
    fn dq_sum(&self, keys: &Ready, work: &Work) -> Result<Option<Allocation>, CudaError> {
        if self.plan.options.deterministic {
            return Ok(None);
        }
        let rows = self.call.dims.heads_q * work.sum_rows;
        let dq_sum = self.call.queue.pool().take(4 * rows * keys.config.padded_dim())?;
        dq_sum.fill(0)?;
        Ok(Some(dq_sum))
    }

    /// Queues dq: from its sums, or in a fixed order along the keys that a query sees.
    fn launch_dq(&self, params: &BackwardParams) -> Result<(), CudaError> {
        let walks = self.plan.options.deterministic;
        let (kernel, entry) = match walks {
            true => (Kernel::BackwardDq, "fv_backward_dq"),
            false => (Kernel::Dq, "fv_dq"),
        };
        let last = self.ready(kernel, entry)?;
        let rows = self.work(&last, Axis::Queries, walks)?;
        let grid = [rows.tile_count as u32, params.heads_q as u32, 1];
        self.launch(&last, grid, &params.over(&rows))
    }

    /// Queues the addition of integer sums to the gradients of learned buffers.
    fn launch_capture_sums(&self, captured: &Captured<'_>) -> Result<(), CudaError> {
        const THREADS: usize = 256;
        if captured.counts.is_empty() {
            return Ok(());
        }
        let add = self.ready(Kernel::BackwardDq, "fv_capture_sums")?;
        for (counts, gradient) in captured.counts.iter().zip(self.gradients) {
            let elems = counts.bytes() / COUNTED_BYTES;
            let grid = [elems.div_ceil(THREADS) as u32, 1, 1];
            let (from, into) = (counts.address().bytes(), gradient.into.bytes());
            let parameters = [&from[..], &into, &(elems as i64).bytes()];
            launch(&add.function, self.call.queue, grid, THREADS as u32, &parameters)?;
        }
        Ok(())
    }
}

/// Memory for a number or two of each row, in the order of `lse`.
struct RowSums {
    delta: Allocation,
    /// What the weights of a row add up to.
    rests: Option<Allocation>,
}

impl RowSums {
    fn new(queue: &Queue, dims: &Dims, has_rests: bool) -> Result<Self, CudaError> {
        let bytes = 4 * dims.row_shape().iter().product::<usize>();
        let delta = queue.pool().take(bytes)?;
        let rests = has_rests.then(|| queue.pool().take(bytes)).transpose()?;
        Ok(Self { delta, rests })
    }
}

/// Where a backward puts the gradients of learned buffers.
struct Captured<'a> {
    gradients: Vec<Gradient<'a>>,
    /// Deterministic sums of each, which are integers and added to the gradient at the end; none
    /// otherwise.
    counts: Vec<Allocation>,
    /// What nobody asked for goes where nobody looks.
    _unwanted: Allocation,
}

impl<'a> Captured<'a> {
    /// Memory for what the caller gives none for.
    fn new(
        plan: &'a CudaPlan,
        queue: &Queue,
        args: &DeviceBackward<'_>,
    ) -> Result<Self, CudaError> {
        let asked = &args.d_captures;
        let learned = plan.spec.learned();
        let longest = learned.iter().map(|b| b.elems()).max().unwrap_or(0);
        let some = !asked.is_empty() && asked.len() < learned.len();
        let unwanted = queue.pool().take(if some { 4 * longest } else { 4 })?;
        let counted = plan.options.deterministic && !asked.is_empty();
        let mut counts = Vec::new();
        let mut gradients = Vec::with_capacity(learned.len());
        for buffer in learned {
            let name = buffer.name();
            let destination = asked.iter().find(|(wanted, _)| *wanted == name);
            let into = destination.map_or(unwanted.address(), |(_, into)| into.start());
            let mut sums = unwanted.address();
            if counted {
                let count = queue.pool().take(COUNTED_BYTES * buffer.elems())?;
                count.fill(0)?;
                sums = count.address();
                counts.push(count);
            }
            gradients.push(Gradient { name, into, sums });
        }
        Ok(Self { gradients, counts, _unwanted: unwanted })
    }
}

/// Zeroes the gradients of captured buffers that are not accumulated. Queued right before the first
/// kernel that adds to them: what fails earlier leaves them as they were.
fn begin_gradients(queue: &Queue, args: &DeviceBackward<'_>) -> Result<(), CudaError> {
    for (_, into) in args.d_captures.iter().filter(|_| !args.accumulate) {
        let (start, bytes) = (into.start(), 4 * into.layout.elems());
        // SAFETY: destinations were checked, and live as long as operands (see `launch`).
        unsafe { queue.stream().fill(start, 0, bytes)? };
    }
    Ok(())
}

fn backward_params(
    args: &DeviceBackward<'_>,
    dims: &Dims,
    scale: f32,
    sums: &RowSums,
) -> Result<BackwardParams, CudaError> {
    let (o, group) = (&args.operands, dims.group());
    let delta = sums.delta.address();
    Ok(BackwardParams {
        q: view(&o.q, "q", group)?,
        k: view(&o.k, "k", 1)?,
        v: view(&o.v, "v", 1)?,
        out: view(&args.out, "out", group)?,
        d_out: view(&args.d_out, "d_out", group)?,
        dq: view(&args.dq, "dq", group)?,
        dk: view(&args.dk, "dk", 1)?,
        dv: view(&args.dv, "dv", 1)?,
        lse: row_view(&args.lse),
        d_lse: args.d_lse.map_or(RowView::default(), |d| row_view(&d)),
        delta: row_view(&DeviceTensor::contiguous(delta, DType::F32, dims.row_shape())),
        sink: o.sink.map_or(0, |s| s.start()),
        d_sink: args.d_sink.map_or(0, |s| s.start()),
        rests: sums.rests.as_ref().map_or(0, Allocation::address),
        scale,
        heads_q: dims.heads_q as i32,
        heads_kv: dims.heads_kv as i32,
        accumulate: args.accumulate.into(),
        ..Default::default()
    })
}

impl ForwardParams {
    /// The same for a kernel that works on `work`.
    fn over(&self, work: &Work) -> Self {
        Self {
            sequences: work.sequences,
            tiles: work.tiles,
            tile_count: work.tile_count as i32,
            lists: work.lists(),
            ..*self
        }
    }
}

impl BackwardParams {
    /// The same for a kernel that works on `work`.
    fn over(&self, work: &Work) -> Self {
        Self {
            sequences: work.sequences,
            tiles: work.tiles,
            tile_count: work.tile_count as i32,
            lists: work.lists(),
            sharing: work.sharing as i32,
            sum_rows: work.sum_rows as i64,
            ..*self
        }
    }
}
