//! The launches of a pass.
//!
//! [`Pass`] says which they are; here each gets its memory and its parameters. Nothing waits for the
//! device, and what a warm call does on the host is counted in microseconds: nothing is made twice.
//! All launches are made ready, with their kernels, lists, maps and memory, before the first is queued: a pass that
//! cannot be leaves its destinations as they were.

use std::sync::Arc;

use foveate_problem::{Dims, Pages, Scales};
use foveate_tensor::DType;

use super::CudaPlan;
use super::call::Call;
use super::kernels::{Ready, queue_kernel, sizes};
use super::report::Report;
use super::resident::{CallState, Gradient, LaunchSchedule};
use crate::choose::{Class, Grid, KernelPlan, Pass, PassLaunch, PrintedMods};
use crate::compile::config::{Config, Elem, Entry, Family, Kernel};
use crate::compile::params::{Abi, BackwardParams, ForwardParams, RowView, View};
use crate::error::CudaError;
use crate::operands::{
    DeviceBackward, DeviceForward, DeviceOperands, Wanted, row_view, view, written,
};
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
    /// elements, overlap, or are not memory of this device, or the queue is another device's; when a
    /// kernel cannot be compiled, or there is no memory for lists, bits or sums: destinations are as they
    /// were then. In a checked plan also when a mod read a captured buffer outside
    /// its bounds, or an entry of a page table is no page; the results are written then, the index
    /// clamped.
    pub fn forward_on(&self, queue: &Queue, args: &DeviceForward<'_>) -> Result<(), CudaError> {
        self.engine.check_queue(queue)?;
        let dims = self.admit(&args.operands)?;
        args.check(&dims)?;
        let plan = self.bound(args.operands.captures)?;
        self.check_accesses(&args.accesses()?, queue)?;
        plan.launch_forward(&Call::new(queue, &dims, &args.operands, self.options.checked)?, args)
    }

    /// Queues the backward pass on tensors in device memory: computes those of `dq`, `dk`, `dv`
    /// and the gradients of the sink and of learned captured buffers that are asked for.
    ///
    /// # Errors
    /// Those of [`Self::forward_on`], a score that cannot be differentiated, or keys in pages.
    pub fn backward_on(&self, queue: &Queue, args: &DeviceBackward<'_>) -> Result<(), CudaError> {
        self.engine.check_queue(queue)?;
        let dims = self.admit(&args.operands)?;
        if args.operands.pages.is_some() {
            return Err(Pages::no_gradients().into());
        }
        if args.operands.q.dtype == DType::F8E4M3 {
            return Err(Scales::no_gradients().into());
        }
        args.check(&dims)?;
        let plan = self.bound(args.operands.captures)?;
        plan.check_captures(args)?;
        self.check_accesses(&args.accesses()?, queue)?;
        plan.launch_backward(&Call::new(queue, &dims, &args.operands, self.options.checked)?, args)
    }

    pub(super) fn check_accesses(
        &self,
        accesses: &Accesses,
        queue: &Queue,
    ) -> Result<(), CudaError> {
        accesses.check_apart(self.engine.checked_apart())?;
        Ok(accesses.check_device(&self.engine, queue)?)
    }

    fn check_captures(&self, args: &DeviceBackward<'_>) -> Result<(), CudaError> {
        let names: Vec<&str> = args.d_captures.iter().map(|(name, _)| *name).collect();
        for ((name, into), buffer) in args.d_captures.iter().zip(self.spec.learned_of(&names)?) {
            into.check_vector(&format!("the gradient of buffer `{name}`"), buffer.elems())?;
        }
        Ok(())
    }

    pub(super) fn forward_class(
        &self,
        call: &Call<'_>,
        args: &DeviceForward<'_>,
    ) -> Result<Class, CudaError> {
        Ok(Class {
            out_dtype: written("out", args.out.dtype)?,
            align: args.align(),
            sink: args.operands.sink.is_some(),
            scale_blocks: args.operands.has_scale_blocks(),
            unmapped: self.unmapped(&args.operands, None),
            paged: args.operands.pages.is_some(),
            checked: call.checked,
            ..self.class()
        })
    }

    pub(super) fn launch_forward(
        &self,
        call: &Call<'_>,
        args: &DeviceForward<'_>,
    ) -> Result<(), CudaError> {
        self.release_finished_queues();
        let class = self.forward_class(call, args)?;
        let mut pass = PassLauncher::new(self, call, class, false, &[])?;
        let partial = Partial::new(call, &pass.chosen)?;
        for launch in (Pass::Forward { kv_split: partial.is_some() }).launches() {
            let step = pass.step(&launch)?;
            let params = pass.forward_params(args, &step, partial.as_ref())?;
            match step.kernel.config.family {
                Family::Portable => pass.add(step, &params)?,
                Family::Hopper => pass.add_persistent(step, &params, &args.operands, None)?,
            }
        }
        pass.queue()
    }

    pub(super) fn launch_backward(
        &self,
        call: &Call<'_>,
        args: &DeviceBackward<'_>,
    ) -> Result<(), CudaError> {
        self.release_finished_queues();
        let Call { queue, dims, checked, .. } = *call;
        let wanted = args.wanted();
        if !(wanted.q || wanted.by_keys() || args.d_sink.is_some()) {
            return Ok(());
        }
        let class = Class {
            dq_dtype: written("dq", args.dq_dtype())?,
            grad_dtype: written("a gradient", args.grad_dtype())?,
            align: args.align(),
            unmapped: self.unmapped(&args.operands, Some(&args.d_out)),
            sink: args.operands.sink.is_some(),
            captures: wanted.captures,
            checked,
            separate_dq: wanted.separates_dq(),
            ..self.class()
        };
        let sums = RowSums::new(queue, dims, class.has_row_weight_sum())?;
        let captured = Captured::new(self, queue, args)?;
        let [row_weight_sum, deterministic] = [class.has_row_weight_sum(), class.deterministic];
        let mut pass = PassLauncher::new(self, call, class, true, &captured.gradients)?;
        let launches = Pass::Backward {
            row_weight_sum,
            sink: args.d_sink.is_some(),
            deterministic,
            separate_dq: pass.chosen.separates_dq(),
            split_gqa: pass.chosen.splits_gqa(),
            wanted,
        };
        let mut params = backward_params(args, dims, self.scale(), &sums)?;
        let (mut _dq_accum, mut of_heads) = (None, None);
        for launch in launches.launches() {
            // What ran in place of the chosen kernel may have added them up itself.
            if launch.entry == Entry::GroupSums && of_heads.is_none() {
                continue;
            }
            let step = pass.step(&launch)?;
            match launch.entry {
                Entry::CaptureSums => pass.add_capture_sums(step, &captured),
                Entry::Backward => {
                    _dq_accum = pass.dq_accum(&step)?;
                    params.dq_accum = _dq_accum.as_ref().map_or(0, Allocation::address);
                    of_heads = HeadGradients::new(call, &step, args)?;
                    (params.head_dk, params.head_dv) =
                        of_heads.as_ref().map_or_else(Default::default, HeadGradients::views);
                    let (heads, tiles) = (pass.item_heads(&step), step.schedule.tile_count);
                    params.interleaved_heads =
                        pass.chosen.interleaved_heads(Kernel::Backward, heads, tiles) as i32;
                    pass.add_products(step, &params, args)?;
                }
                Entry::BackwardDq => pass.add_products(step, &params, args)?,
                Entry::GroupSums
                | Entry::Delta
                | Entry::RowWeightSum
                | Entry::SinkGradient
                | Entry::Dq => {
                    let params = params.over(&step.schedule);
                    pass.add(step, &params)?;
                }
                Entry::Forward
                | Entry::Combine
                | Entry::BlockLists
                | Entry::DqRanks
                | Entry::MaskBits
                | Entry::RangeTable
                | Entry::Sequences
                | Entry::TransposeValues => unreachable!("no launch of a backward"),
            }
        }
        begin_gradients(queue, args)?;
        pass.queue()
    }
}

/// A pass on its way to the device: what its launches have in common, and those that are ready.
struct PassLauncher<'a> {
    plan: &'a CudaPlan,
    call: &'a Call<'a>,
    state: CallState,
    chosen: Arc<KernelPlan>,
    /// Where gradients of learned buffers go.
    gradients: &'a [Gradient<'a>],
    report: Report,
    ready: Vec<ReadyStep>,
}

/// A launch with its kernel and the tiles that its CTAs own.
struct Step {
    launch: PassLaunch,
    kernel: Ready,
    schedule: LaunchSchedule,
}

/// A step whose launches need nothing more.
struct ReadyStep {
    step: Step,
    /// Grid, threads of a CTA and parameters of each.
    launches: Vec<([u32; 3], u32, Vec<Vec<u8>>)>,
    /// Values that were transposed for it.
    _values: Option<Allocation>,
}

impl<'a> PassLauncher<'a> {
    fn new(
        plan: &'a CudaPlan,
        call: &'a Call<'_>,
        class: Class,
        backward: bool,
        gradients: &'a [Gradient<'a>],
    ) -> Result<Self, CudaError> {
        let sizes = sizes(call.dims, call.sequences.longest());
        let chosen = match backward {
            true => plan.chosen_backward(class, call)?,
            false => plan.chosen(class, sizes, false)?,
        };
        let report = Report::new(call.queue, call.checked)?;
        let (state, ready) = Default::default();
        Ok(Self { plan, call, state, chosen, gradients, report, ready })
    }

    fn step(&mut self, launch: &PassLaunch) -> Result<Step, CudaError> {
        let kernel = self.plan.kernel(&self.chosen, launch, self.call)?;
        let PassLaunch { axis, main_loop, .. } = *launch;
        let tile = kernel.tile();
        let mut schedule =
            self.plan.launch_schedule(self.call, &mut self.state, main_loop, axis, tile)?;
        if kernel.config.ordered_dq {
            self.plan.rank_dq(self.call, &mut schedule, tile)?;
        }
        if kernel.config.mask_bits {
            self.plan.make_mask_bits(self.call, &mut self.state, &mut schedule, axis, tile)?;
        }
        Ok(Step { launch: *launch, kernel, schedule })
    }

    /// Adds a launch whose arguments are `params` and, where it evaluates any, mods.
    fn add(&mut self, step: Step, params: &impl Abi) -> Result<(), CudaError> {
        let (grid, threads) = self.grid(&step);
        let mut parameters = vec![params.bytes()];
        if step.launch.mods != PrintedMods::Nothing {
            parameters.push(self.mods_bytes(&step.kernel)?);
        }
        let launches = vec![(grid, threads, parameters)];
        self.ready.push(ReadyStep { step, launches, _values: None });
        Ok(())
    }

    /// Adds a kernel of the backward that multiplies tiles.
    fn add_products(
        &mut self,
        step: Step,
        params: &BackwardParams,
        args: &DeviceBackward<'_>,
    ) -> Result<(), CudaError> {
        let params = params.over(&step.schedule);
        match step.kernel.config.family {
            Family::Portable => self.add(step, &params),
            Family::Hopper => self.add_persistent(step, &params, &args.operands, Some(&args.d_out)),
        }
    }

    /// Adds a kernel of the Hopper family, whose CTAs take items until there are none: a forward, or
    /// one of a backward, which has a `d_out`.
    fn add_persistent(
        &mut self,
        step: Step,
        params: &impl Abi,
        operands: &DeviceOperands<'_>,
        d_out: Option<&DeviceTensor>,
    ) -> Result<(), CudaError> {
        let Step { kernel, schedule, .. } = &step;
        let ([tiles, heads, _], threads) = self.grid(&step);
        let items = tiles as usize * heads as usize;
        if items == 0 {
            self.ready.push(ReadyStep { step, launches: Vec::new(), _values: None });
            return Ok(());
        }
        let values = match kernel.config.dtype {
            Elem::E4m3 => {
                Some(self.plan.transposed_values(self.call, operands, &kernel.config, schedule)?)
            }
            Elem::F16 | Elem::Bf16 | Elem::F32 => None,
        };
        let (values, v) = values.unzip();
        let (persistent, maps) =
            self.plan.persistent(operands, v.as_ref(), d_out, &kernel.config, schedule)?;
        let mut parameters = vec![params.bytes(), self.mods_bytes(kernel)?, persistent.bytes()];
        parameters.extend(maps.iter().map(Abi::bytes));
        let grid = [items.min(self.plan.engine.profile().sms) as u32, 1, 1];
        let launches = vec![(grid, threads, parameters)];
        self.ready.push(ReadyStep { step, launches, _values: values });
        Ok(())
    }

    /// Queues all that was added, in order, and tells what checked kernels have reported, of the pass or of the
    /// schedule and lists of its main loop.
    fn queue(self) -> Result<(), CudaError> {
        let Self { plan, call, report, ready, state: _state, .. } = self;
        for ReadyStep { step, launches, .. } in &ready {
            for (grid, threads, parameters) in launches {
                let parameters: Vec<_> = parameters.iter().map(|bytes| &bytes[..]).collect();
                queue_kernel(&step.kernel.function, call.queue, *grid, *threads, &parameters)?;
            }
        }
        // Without a main loop nothing was evaluated whose result anybody asked for.
        let main = ready.iter().find(|of| of.step.launch.main_loop);
        let Some(ReadyStep { step: Step { kernel, schedule, .. }, .. }) = main else {
            return Ok(());
        };
        report.read(plan.options.timeout, schedule.out_of_range(), &kernel.mods.source)
    }

    fn mods_bytes(&mut self, kernel: &Ready) -> Result<Vec<u8>, CudaError> {
        let (report, state) = (self.report.address(), &mut self.state);
        self.plan.mods_bytes(self.call, state, &kernel.mods, self.gradients, None, report)
    }

    /// CTAs of a launch, and threads of each.
    fn grid(&self, step: &Step) -> ([u32; 3], u32) {
        let (dims, tiles) = (self.call.dims, step.schedule.tile_count as u32);
        let heads_q = dims.heads_q as u32;
        let tile_heads = (dims.heads_q / step.kernel.config.heads()) as u32;
        let threads = step.kernel.threads();
        match step.launch.grid {
            Grid::TilesByHeadsByKvSplits => {
                ([tiles, tile_heads, self.chosen.kv_splits as u32], threads)
            }
            Grid::TilesByTileHeads => ([tiles, tile_heads, 1], threads),
            Grid::TilesByHeads => ([tiles, heads_q, 1], threads),
            Grid::TilesByKvHeads => ([tiles, self.item_heads(step) as u32, 1], threads),
            Grid::Heads => ([heads_q, 1, 1], 1024),
            Grid::Elements { threads } => ([1, 1, 1], threads),
        }
    }

    /// Heads that have tiles of keys of their own.
    fn item_heads(&self, step: &Step) -> usize {
        let Dims { heads_q, heads_kv, .. } = *self.call.dims;
        if step.kernel.config.split_gqa { heads_q } else { heads_kv }
    }

    fn forward_params(
        &self,
        args: &DeviceForward<'_>,
        step: &Step,
        partial: Option<&Partial>,
    ) -> Result<ForwardParams, CudaError> {
        let (o, dims, schedule) = (&args.operands, self.call.dims, &step.schedule);
        let group = dims.group();
        let (heads, tiles) = (dims.heads_q / step.kernel.config.heads(), schedule.tile_count);
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
            interleaved_heads: self.chosen.interleaved_heads(Kernel::Forward, heads, tiles) as i32,
            kv_splits: self.chosen.kv_splits as i32,
            page_table: o.pages.map_or(0, |p| p.table),
            page_size: o.k.layout.shape[2] as i32,
            page_stride: o.pages.map_or(0, |p| p.entries as i32),
            page_count: o.k.layout.shape[0] as i32,
            page_report: self.report.address(),
            ..partial.map_or_else(ForwardParams::default, Partial::params)
        };
        Ok(params.over(schedule))
    }

    /// Zeros that tiles of keys add dq to, and behind them, where they do so in order, how many have
    /// added; nothing where dq has a kernel of its own.
    fn dq_accum(&self, keys: &Step) -> Result<Option<Allocation>, CudaError> {
        let config = &keys.kernel.config;
        if config.separate_dq {
            return Ok(None);
        }
        let rows = self.call.dims.heads_q * keys.schedule.sum_rows;
        let dq_accum = self.call.queue.pool().take(dq_accum_bytes(config, rows))?;
        dq_accum.fill(0)?;
        Ok(Some(dq_accum))
    }

    /// Adds the addition of integer sums to the gradients of learned buffers.
    fn add_capture_sums(&mut self, step: Step, captured: &Captured<'_>) {
        let (_, threads) = self.grid(&step);
        let of_each = |(counts, gradient): (&Allocation, &Gradient<'_>)| {
            let elems = counts.bytes() / COUNTED_BYTES;
            let grid = [elems.div_ceil(threads as usize) as u32, 1, 1];
            let (from, into) = (counts.address().bytes(), gradient.into.bytes());
            (grid, threads, vec![from, into, (elems as i64).bytes()])
        };
        let launches = captured.counts.iter().zip(self.gradients).map(of_each).collect();
        self.ready.push(ReadyStep { step, launches, _values: None });
    }
}

/// Partial results of a forward whose keys are split over CTAs.
struct Partial {
    out: Allocation,
    max: Allocation,
    sum: Allocation,
    dims: [usize; 3],
}

impl Partial {
    /// Memory for them; nothing where keys are not split.
    fn new(call: &Call<'_>, chosen: &KernelPlan) -> Result<Option<Self>, CudaError> {
        if chosen.kv_splits == 1 {
            return Ok(None);
        }
        let (dims, pool) = (call.dims.row_shape(), call.queue.pool());
        let bytes = 4 * chosen.kv_splits * dims.iter().product::<usize>();
        let (out, max) = (pool.take(bytes * call.dims.dim_v)?, pool.take(bytes)?);
        Ok(Some(Self { out, max, sum: pool.take(bytes)?, dims }))
    }

    fn params(&self) -> ForwardParams {
        let [batch, heads, len] = self.dims;
        ForwardParams {
            partial_out: self.out.address(),
            partial_max: self.max.address(),
            partial_sum: self.sum.address(),
            partial_rows: (batch * heads * len) as i64,
            partial_batch: (heads * len) as i64,
            partial_head: len as i64,
            ..Default::default()
        }
    }
}

/// Bytes of `dq_accum` for so many rows of all heads: sums, and for every 16 rows a count.
pub(super) fn dq_accum_bytes(config: &Config, rows: usize) -> usize {
    4 * rows * config.padded_dim() + if config.ordered_dq { 4 * rows / 16 } else { 0 }
}

/// dk and dv of each query head, until they are added up.
struct HeadGradients {
    /// Those of the two that are asked for.
    memory: [Option<(Allocation, View)>; 2],
}

impl HeadGradients {
    /// Memory for them; nothing where the kernel adds them up itself.
    fn new(
        call: &Call<'_>,
        step: &Step,
        args: &DeviceBackward<'_>,
    ) -> Result<Option<Self>, CudaError> {
        if !step.kernel.config.split_gqa {
            return Ok(None);
        }
        let of = |shape: [usize; 4], wanted: bool| -> Result<_, CudaError> {
            if !wanted {
                return Ok(None);
            }
            let memory = call.queue.pool().take(4 * shape.iter().product::<usize>())?;
            let tensor = DeviceTensor::contiguous(memory.address(), DType::F32, shape);
            let view = view(&tensor, "gradients of keys of a query head", 1)?;
            Ok(Some((memory, view)))
        };
        let Wanted { k, v, .. } = args.wanted();
        let [of_k, of_v] = head_gradients(call.dims);
        Ok(Some(Self { memory: [of(of_k, k)?, of(of_v, v)?] }))
    }

    fn views(&self) -> (View, View) {
        let [dk, dv] = self.memory.each_ref().map(|m| m.as_ref().map_or(View::default(), |m| m.1));
        (dk, dv)
    }
}

/// Shapes of dk and dv of each query head, in f32.
fn head_gradients(dims: &Dims) -> [[usize; 4]; 2] {
    let heads = Dims { heads_kv: dims.heads_q, ..*dims };
    [heads.k_shape(), heads.v_shape()]
}

/// Bytes of these.
pub(super) fn head_gradient_bytes(dims: &Dims) -> usize {
    4 * head_gradients(dims).iter().map(|shape| shape.iter().product::<usize>()).sum::<usize>()
}

/// Memory for a number or two of each row, in the order of `lse`.
struct RowSums {
    delta: Allocation,
    /// What the weights of a row add up to.
    weights: Option<Allocation>,
}

impl RowSums {
    fn new(queue: &Queue, dims: &Dims, has_row_weight_sum: bool) -> Result<Self, CudaError> {
        let bytes = 4 * dims.row_shape().iter().product::<usize>();
        let delta = queue.pool().take(bytes)?;
        let weights = has_row_weight_sum.then(|| queue.pool().take(bytes)).transpose()?;
        Ok(Self { delta, weights })
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

/// Zeroes the gradients of captured buffers that are not accumulated. Queued when all launches are ready: what fails
/// earlier leaves them as they were.
fn begin_gradients(queue: &Queue, args: &DeviceBackward<'_>) -> Result<(), CudaError> {
    for (_, into) in args.d_captures.iter().filter(|_| !args.accumulate) {
        let (start, bytes) = (into.start(), 4 * into.layout.elems());
        // SAFETY: destinations were checked, and live as long as operands (see `launch`).
        unsafe { queue.stream().fill(start, 0, bytes)? };
    }
    Ok(())
}

/// A gradient as kernels take it; nowhere if it is not wanted.
fn destination(wanted: &Option<DeviceTensor>, name: &str, group: usize) -> Result<View, CudaError> {
    wanted.as_ref().map_or(Ok(View::default()), |tensor| view(tensor, name, group))
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
        dq: destination(&args.dq, "dq", group)?,
        dk: destination(&args.dk, "dk", 1)?,
        dv: destination(&args.dv, "dv", 1)?,
        lse: row_view(&args.lse),
        d_lse: args.d_lse.map_or(RowView::default(), |d| row_view(&d)),
        delta: row_view(&DeviceTensor::contiguous(delta, DType::F32, dims.row_shape())),
        sink: o.sink.map_or(0, |s| s.start()),
        d_sink: args.d_sink.map_or(0, |s| s.start()),
        row_weight_sum: sums.weights.as_ref().map_or(0, Allocation::address),
        scale,
        heads_q: dims.heads_q as i32,
        heads_kv: dims.heads_kv as i32,
        accumulate: args.accumulate.into(),
        ..Default::default()
    })
}

impl ForwardParams {
    /// The same for a launch over the tiles of `schedule`.
    fn over(&self, schedule: &LaunchSchedule) -> Self {
        Self {
            sequences: schedule.sequences,
            tiles: schedule.tiles,
            tile_count: schedule.tile_count as i32,
            lists: schedule.lists(),
            ..*self
        }
    }
}

impl BackwardParams {
    /// The same for a launch over the tiles of `schedule`.
    fn over(&self, schedule: &LaunchSchedule) -> Self {
        Self {
            sequences: schedule.sequences,
            tiles: schedule.tiles,
            tile_count: schedule.tile_count as i32,
            lists: schedule.lists(),
            sharing: schedule.sharing as i32,
            sum_rows: schedule.sum_rows as i64,
            dq_ranks: schedule.dq_ranks().0,
            dq_rank_columns: schedule.dq_ranks().1 as i32,
            ..*self
        }
    }
}
