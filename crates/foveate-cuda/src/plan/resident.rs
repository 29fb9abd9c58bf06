//! What a plan keeps on the device: schedules, block lists and captured buffers.
//!
//! They are kept for each queue: memory goes back to the pool of the queue that used it, so it is
//! never given out again while work of another stream still reads it. What is kept for a queue that
//! nobody holds any more goes with the first call after its work is done; nothing waits for that, and
//! other queues get the memory. What depends on captured buffers in device memory is kept as long as
//! the caller promises that they are the same, and else made anew in each call.
//!
//! Memory may be an allocator's of the caller's, which may wait for another thread. So none is taken or given
//! back while a lock is held: what is no longer kept leaves its list under the lock, and is dropped behind it.

mod buffers;

use std::ops::Deref;
use std::sync::{Arc, Mutex};

use foveate_mask::Varies;
use foveate_mods::{AnyBuffer, MaskMod};
use foveate_problem::Spec;

use super::call::{Call, Contents, Offsets, Sequences};
use super::kernels::{Printed, queue_kernel};
use super::report::Report;
use super::{CudaPlan, push_bounded};
use crate::choose::schedule::{
    Axis, Outline, Schedule, TileSize, mask_slots, most_sum_rows, most_tiles, run_capacity,
};
use crate::compile::config::Config;
use crate::compile::params::{self, Abi, Address, BlockListsParams, SequencesParams, array_bytes};
use crate::error::CudaError;
pub(super) use buffers::Gradient;
use buffers::{OwnTables, TableKey, Uploaded};
use foveate_gpu::driver::{Allocation, Function, Pool};
use foveate_gpu::sync::lock;
use foveate_gpu::{Queue, WeakQueue};

/// What the calls of a plan share on the device: schedules and captured buffers.
#[derive(Debug, Default)]
pub(super) struct PlanState {
    schedules: Vec<(ScheduleKey, Arc<DeviceSchedule>)>,
    buffers: Vec<Uploaded>,
    tables: Vec<(TableKey, Arc<Allocation>)>,
    /// The queues that all this is kept for.
    queues: Vec<WeakQueue>,
}

/// What one call makes for itself: from captured buffers and offsets of which nothing is promised, or
/// all of it where the call is recorded.
#[derive(Debug, Default)]
pub(super) struct CallState {
    /// Range tables of captured buffers, by their place in the call.
    tables: Vec<(usize, Arc<Allocation>)>,
    /// Captured buffers of the host, of a call that is recorded.
    buffers: Vec<Uploaded>,
    schedules: Vec<(ScheduleKey, Arc<DeviceSchedule>)>,
}

/// What decides a schedule.
#[derive(Clone, Debug, PartialEq)]
struct ScheduleKey {
    queue: u64,
    masked: bool,
    checked: bool,
    axis: Axis,
    tile: TileSize,
    shared_kv: bool,
    sequences: Sequences,
}

/// Sequences and tiles on the device.
#[derive(Debug)]
pub(super) struct DeviceSchedule {
    _memory: Allocation,
    pub sequences: Address,
    pub tiles: Address,
    pub tile_count: usize,
    pub sum_rows: usize,
    pub sharing: usize,
    sequence_count: usize,
    rows: Rows,
    /// An offset that was moved into the tensors.
    moved: Option<String>,
    /// What persistent CTAs take their items from, where there may be any. Launches of one queue come
    /// one after the other, and each leaves the counter as it found it.
    taken: Option<Allocation>,
}

/// The rows of the lists of a schedule, and lists that were made.
#[derive(Debug, Default)]
struct Rows {
    /// One tile for each row of a head, several of the same where they are of no sequence.
    tiles: Address,
    count: usize,
    /// Rows of a head.
    per_head: usize,
    heads: usize,
    head_stride: usize,
    capacity: usize,
    longest: usize,
    made: Mutex<Vec<(Contents, Arc<DeviceLists>)>>,
}

/// Block lists on the device.
#[derive(Debug)]
struct DeviceLists {
    _memory: Allocation,
    lists: params::Lists,
    out_of_range: Option<String>,
    /// The order in which tiles of keys add to tiles of queries, once it was asked for:
    /// `BackwardParams::dq_ranks`.
    dq_ranks: Mutex<Option<Arc<Allocation>>>,
    /// The mask of their partial tiles, once it was asked for.
    mask_bits: Mutex<Option<Arc<MaskBits>>>,
}

/// Bits of a mask: `PersistentParams::mask_bits` and `mask_slots`.
#[derive(Debug)]
struct MaskBits {
    _memory: Allocation,
    bits: Address,
    slots: Address,
}

/// The tiles of one launch: their schedule and, under a mask, its block lists.
pub(super) struct LaunchSchedule {
    schedule: Arc<DeviceSchedule>,
    lists: Option<Arc<DeviceLists>>,
    /// Whether later calls get the lists, too.
    kept: bool,
    dq_ranks: Option<Arc<Allocation>>,
    mask_bits: Option<Arc<MaskBits>>,
}

impl Deref for LaunchSchedule {
    type Target = DeviceSchedule;

    fn deref(&self) -> &DeviceSchedule {
        &self.schedule
    }
}

impl LaunchSchedule {
    /// The runs of each tile; nowhere without a mask.
    pub fn lists(&self) -> params::Lists {
        self.lists.as_ref().map_or(params::Lists::default(), |l| l.lists)
    }

    /// What persistent CTAs take their items from: `PersistentParams::taken`.
    pub fn taken(&self) -> Address {
        self.schedule.taken.as_ref().map_or(0, Allocation::address)
    }

    /// `BackwardParams::dq_ranks` and its columns; nowhere without lists.
    pub fn dq_ranks(&self) -> (Address, usize) {
        let ranks = self.dq_ranks.as_ref().map_or(0, |ranks| ranks.address());
        (ranks, self.schedule.rows.longest)
    }

    /// `PersistentParams::mask_bits` and `mask_slots`; nowhere where none were made.
    pub fn mask_bits(&self) -> [Address; 2] {
        self.mask_bits.as_ref().map_or([0; 2], |made| [made.bits, made.slots])
    }

    /// An offset or an index of a captured buffer that was found to be out of range before.
    pub fn out_of_range(&self) -> Option<String> {
        let of_lists = self.lists.as_ref().and_then(|l| l.out_of_range.as_ref());
        self.moved.as_ref().or(of_lists).cloned()
    }
}

/// Schedules kept at a time: a few kernels of a few problems.
const MOST_SCHEDULES: usize = 48;

/// Lists of one schedule, for different contents of captured buffers, kept at a time.
const MOST_LISTS: usize = 4;

impl PlanState {
    /// What still holds for a program of other captured values, `spec`; `masked` when those of
    /// the mask are others.
    pub fn with_other_values(&self, spec: &Spec, masked: bool) -> Self {
        let read = |buffer: &AnyBuffer| {
            spec.programs().flat_map(|p| p.graph().buffers()).any(|b| b.same(buffer))
        };
        let schedules = self.schedules.iter().filter(|(key, _)| !(masked && key.masked));
        let buffers = self.buffers.iter().filter(|b| read(&b.buffer));
        Self {
            schedules: schedules.cloned().collect(),
            buffers: buffers.cloned().collect(),
            tables: self.tables.clone(),
            queues: self.queues.clone(),
        }
    }

    /// Notes that something is kept for `queue`.
    fn keeps_for(&mut self, queue: &Queue) {
        if !self.queues.iter().any(|of| of.id() == queue.id()) {
            self.queues.push(queue.downgrade());
        }
    }

    /// Takes out what was kept for queues that are gone and whose work is done.
    fn take_finished_queues(&mut self) -> Self {
        let queues: Vec<WeakQueue> =
            self.queues.extract_if(.., |queue| queue.is_finished()).collect();
        if queues.is_empty() {
            return Self::default();
        }
        let gone = |id: u64| queues.iter().any(|queue| queue.id() == id);
        Self {
            schedules: self.schedules.extract_if(.., |(key, _)| gone(key.queue)).collect(),
            buffers: self.buffers.extract_if(.., |uploaded| gone(uploaded.queue)).collect(),
            tables: self.tables.extract_if(.., |(key, _)| gone(key.queue)).collect(),
            queues,
        }
    }
}

/// Whether a buffer of `old` has other contents by now.
fn is_overwritten(old: &Contents, new: &Contents) -> bool {
    old.iter().any(|(at, version)| new.iter().any(|(a, v)| a == at && v != version))
}

impl DeviceSchedule {
    /// A schedule that was made on the host.
    fn new(pool: &Pool, schedule: Schedule) -> Result<Self, CudaError> {
        let parts = [array_bytes(&schedule.sequences), array_bytes(&schedule.tiles)];
        let (memory, [sequences, tiles]) = upload(pool, parts)?;
        let mut rows = Rows { longest: schedule.longest, ..Rows::default() };
        if let Some(l) = &schedule.lists {
            rows.heads = l.counts.len().checked_div(l.head_stride).unwrap_or(1).max(1);
            rows.per_head = l.counts.len() / rows.heads;
            let (memory, [counts, runs]) =
                upload(pool, [array_bytes(&l.counts), array_bytes(&l.runs)])?;
            let (capacity, head_stride) = (count(l.capacity)?, count(l.head_stride)?);
            let lists = params::Lists { counts, runs, capacity, head_stride };
            let out_of_range = schedule.out_of_range;
            let lists = Arc::new(DeviceLists {
                _memory: memory,
                lists,
                out_of_range,
                dq_ranks: Mutex::default(),
                mask_bits: Mutex::default(),
            });
            lock(&rows.made).push((Contents::new(), lists));
        }
        Ok(Self {
            _memory: memory,
            sequences,
            tiles,
            tile_count: schedule.tiles.len(),
            sum_rows: schedule.sum_rows,
            sharing: schedule.sharing,
            sequence_count: schedule.sequences.len(),
            rows,
            moved: None,
            taken: None,
        })
    }

    /// A schedule whose lists the device will make.
    fn outlined(pool: &Pool, outline: &Outline) -> Result<Self, CudaError> {
        let parts = [
            array_bytes(&outline.sequences),
            array_bytes(&outline.tiles),
            array_bytes(&outline.rows),
        ];
        let (memory, [sequences, tiles, rows]) = upload(pool, parts)?;
        Ok(Self {
            _memory: memory,
            sequences,
            tiles,
            tile_count: outline.tiles.len(),
            sum_rows: outline.sum_rows,
            sharing: outline.sharing,
            sequence_count: outline.sequences.len(),
            rows: Rows {
                tiles: rows,
                count: outline.rows.len(),
                per_head: outline.rows.len(),
                heads: outline.heads,
                head_stride: outline.head_stride,
                capacity: outline.capacity,
                longest: outline.longest,
                made: Mutex::default(),
            },
            moved: None,
            taken: None,
        })
    }
}

/// Parts one after the other in one allocation, each at a multiple of 16 bytes, and where each is.
fn upload<const N: usize>(
    pool: &Pool,
    parts: [Vec<u8>; N],
) -> Result<(Allocation, [Address; N]), CudaError> {
    let mut bytes = Vec::with_capacity(parts.iter().map(|p| p.len() + 16).sum());
    let mut at = [0; N];
    for (part, at) in parts.iter().zip(&mut at) {
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        *at = bytes.len() as Address;
        bytes.extend(part);
    }
    let memory = pool.take(bytes.len())?;
    memory.write(&bytes)?;
    let at = at.map(|at| memory.address() + at);
    Ok((memory, at))
}

/// Refuses to make what later calls would take for made while it is only recorded.
///
/// # Errors
/// When the queue's work is recorded at present.
fn refuse_recording(queue: &Queue) -> Result<(), CudaError> {
    Ok(queue.stream().refuse_recording(MAKING)?)
}

/// The same of what a call makes of captured buffers in device memory, which a graph makes again.
fn refuse_made_recorded(queue: &Queue) -> Result<(), CudaError> {
    Ok(queue.refuse_made_recorded(MAKING)?)
}

const MAKING: &str = "making what is kept from call to call";

/// Rows or runs as kernels count them.
pub(super) fn count(n: usize) -> Result<i32, CudaError> {
    i32::try_from(n).map_err(|_| {
        CudaError::argument(format!("{n} rows of tiles are more than a launch can count"))
    })
}

impl CudaPlan {
    /// Lets go of what was kept for queues that are gone. Nothing waits.
    pub(super) fn release_finished_queues(&self) {
        let mut gone = lock(&self.resident).take_finished_queues();
        let queues = std::mem::take(&mut gone.queues);
        drop(gone);
        queues.iter().for_each(WeakQueue::release);
    }

    /// Memory for what is kept for a queue until it is gone.
    fn weak_pool(&self, queue: &Queue) -> Pool {
        self.pool(queue).downgrade()
    }

    /// The tiles of a launch whose CTAs own tiles of `axis`, with the mask's lists if it has a
    /// `main_loop` over the other one.
    pub(super) fn launch_schedule(
        &self,
        call: &Call<'_>,
        state: &mut CallState,
        main_loop: bool,
        axis: Axis,
        tile: TileSize,
    ) -> Result<LaunchSchedule, CudaError> {
        let mask = self.spec.mask.as_ref().filter(|_| main_loop);
        let schedule = self.device_schedule(call, state, mask, axis, tile)?;
        let of = |schedule, lists, kept| LaunchSchedule {
            schedule,
            lists,
            kept,
            dq_ranks: None,
            mask_bits: None,
        };
        let Some(mask) = mask else { return Ok(of(schedule, None, false)) };
        let contents = call.contents(mask);
        let found = contents.as_ref().and_then(|contents| {
            let made = lock(&schedule.rows.made);
            made.iter().find(|(of, _)| of == contents).map(|(_, lists)| lists.clone())
        });
        if found.is_some() {
            return Ok(of(schedule, found, true));
        }
        if self.forced.lists_on_host {
            return Err(CudaError::argument(
                "block lists cannot be made on the host from captured buffers or offsets in device \
                 memory",
            ));
        }
        if let Some(contents) = &contents {
            refuse_made_recorded(call.queue)?;
            // Lists of what has been overwritten give their memory to those that take their place.
            let is_old = |(of, _): &mut (Contents, _)| is_overwritten(of, contents);
            let old: Vec<_> = lock(&schedule.rows.made).extract_if(.., is_old).collect();
            drop(old);
        }
        let lists = Arc::new(self.device_lists(call, state, &schedule, axis, tile)?);
        let kept = contents.is_some();
        if let Some(contents) = contents {
            let made = (contents, lists.clone());
            let oldest = push_bounded(&mut lock(&schedule.rows.made), MOST_LISTS, made);
            drop(oldest);
        }
        Ok(of(schedule, Some(lists), kept))
    }

    pub(super) fn device_schedule(
        &self,
        call: &Call<'_>,
        state: &mut CallState,
        mask: Option<&MaskMod>,
        axis: Axis,
        tile: TileSize,
    ) -> Result<Arc<DeviceSchedule>, CudaError> {
        let Call { queue, dims, ref sequences, checked, .. } = *call;
        let key = ScheduleKey {
            queue: queue.id(),
            masked: mask.is_some(),
            checked: checked && (mask.is_some() || matches!(sequences, Sequences::Offsets(_))),
            axis,
            tile,
            shared_kv: dims.shared_kv,
            sequences: sequences.clone(),
        };
        let find = |all: &[(ScheduleKey, Arc<DeviceSchedule>)]| {
            all.iter().find(|(k, _)| *k == key).map(|(_, schedule)| schedule.clone())
        };
        let promised = sequences.are_promised() && !call.recorded;
        let found = match promised {
            true => find(&lock(&self.resident).schedules),
            false => find(&state.schedules),
        };
        if let Some(schedule) = found {
            return Ok(schedule);
        }
        if promised {
            refuse_recording(queue)?;
        }
        let mut schedule = match (sequences, mask) {
            (Sequences::Offsets(offsets), _) => {
                self.schedule_from_offsets(call, offsets, mask, axis, tile)?
            }
            (Sequences::Known(sequences), Some(mask)) if !self.forced.lists_on_host => {
                DeviceSchedule::outlined(
                    &self.weak_pool(queue),
                    &Outline::new(dims, sequences, mask, axis, tile),
                )?
            }
            (Sequences::Known(sequences), _) => DeviceSchedule::new(
                &self.weak_pool(queue),
                Schedule::new(dims, sequences, mask, axis, tile),
            )?,
        };
        if self.may_persist() {
            // The forward also remembers which items a CTA has taken.
            let remembered = match axis {
                Axis::Queries => schedule.tile_count * dims.heads_q,
                Axis::Keys => 0,
            };
            let taken = self.weak_pool(queue).take(4 * (1 + remembered))?;
            taken.fill(0)?;
            schedule.taken = Some(taken);
        }
        let schedule = Arc::new(schedule);
        match promised {
            true => {
                let made = (key, schedule.clone());
                let keep = |resident: &mut PlanState| {
                    resident.keeps_for(queue);
                    push_bounded(&mut resident.schedules, MOST_SCHEDULES, made)
                };
                let oldest = keep(&mut lock(&self.resident));
                drop(oldest);
            }
            false => state.schedules.push((key, schedule.clone())),
        }
        Ok(schedule)
    }

    /// A schedule that the device makes from offsets in its memory. Nothing waits, unless they are
    /// checked.
    fn schedule_from_offsets(
        &self,
        call: &Call<'_>,
        offsets: &Offsets,
        mask: Option<&MaskMod>,
        axis: Axis,
        tile: TileSize,
    ) -> Result<DeviceSchedule, CudaError> {
        let Call { queue, dims, checked, .. } = *call;
        let Offsets { address: [cu_q, cu_k], count: sequences, rows, longest, .. } = *offsets;
        let ((own, side), (other, other_side)) = match axis {
            Axis::Queries => ((0, tile.q), (1, tile.kv)),
            Axis::Keys => ((1, tile.kv), (0, tile.q)),
        };
        let tile_capacity = most_tiles(sequences, rows[own], longest[own], side);
        let sum_rows = most_sum_rows(sequences, rows[0]);
        count(sum_rows)?;
        let sequence_bytes =
            ((sequences + 1) * size_of::<params::Sequence>()).next_multiple_of(size_of::<u64>());
        let memory = self
            .weak_pool(queue)
            .take(sequence_bytes + tile_capacity * size_of::<params::Tile>())?;
        let report = Report::new(queue, checked)?;
        let [rows_q, rows_k] = rows.map(|n| n as i32);
        let [longest_q, longest_k] = longest.map(|n| n as i32);
        let params = SequencesParams {
            cu_q,
            cu_k,
            sequences: memory.address(),
            tiles: memory.address() + sequence_bytes as Address,
            report: report.address(),
            count: count(sequences)?,
            rows_q,
            rows_k,
            longest_q,
            longest_k,
            side: side as i32,
            of_keys: (axis == Axis::Keys).into(),
            tile_capacity: count(tile_capacity)?,
        };
        let config = Config::sequences();
        let function = self.plain_kernel(config.clone())?;
        queue_kernel(&function, queue, [1, 1, 1], config.threads() as u32, &[&params.bytes()])?;
        let by_head = mask.is_some_and(|mask| Varies::of(mask).by_head);
        let heads = if by_head { dims.heads_q } else { 1 };
        // One more for the tiles of no sequence.
        let per_head = tile_capacity + 1;
        let columns = longest[other].div_ceil(other_side);
        Ok(DeviceSchedule {
            sequences: params.sequences,
            tiles: params.tiles,
            tile_count: tile_capacity,
            sum_rows,
            sharing: 1,
            sequence_count: sequences,
            rows: Rows {
                tiles: params.tiles,
                count: tile_capacity,
                per_head,
                heads,
                head_stride: if by_head { per_head } else { 0 },
                capacity: run_capacity(columns, per_head * heads),
                longest: columns,
                made: Mutex::default(),
            },
            moved: report.moved(self.options.timeout, offsets)?,
            taken: None,
            _memory: memory,
        })
    }

    /// Block lists that the device makes. Nothing waits, unless indices are checked.
    fn device_lists(
        &self,
        call: &Call<'_>,
        state: &mut CallState,
        schedule: &DeviceSchedule,
        axis: Axis,
        tile: TileSize,
    ) -> Result<DeviceLists, CudaError> {
        let Call { queue, checked, .. } = *call;
        let rows = &schedule.rows;
        let all_rows = rows.per_head * rows.heads;
        let (count_bytes, run_bytes) = (4 * all_rows, 8 * all_rows * rows.capacity);
        let memory = self.weak_pool(queue).take(run_bytes + count_bytes)?;
        let runs = memory.address();
        let lists = params::Lists {
            counts: runs + run_bytes as Address,
            runs,
            capacity: count(rows.capacity)?,
            head_stride: count(rows.head_stride)?,
        };
        let report = Report::new(queue, checked)?;
        let printed =
            self.queue_lists(call, state, schedule, axis, tile, lists, report.address())?;
        let out_of_range = report.noted(self.options.timeout, &printed.source)?;
        Ok(DeviceLists {
            _memory: memory,
            lists,
            out_of_range,
            dq_ranks: Mutex::default(),
            mask_bits: Mutex::default(),
        })
    }

    /// Adds to a schedule of tiles of keys the order in which they add to tiles of queries. Nothing
    /// waits.
    pub(super) fn rank_dq(
        &self,
        call: &Call<'_>,
        of: &mut LaunchSchedule,
        tile: TileSize,
    ) -> Result<(), CudaError> {
        let Some(lists) = &of.lists else { return Ok(()) };
        of.dq_ranks = lock(&lists.dq_ranks).clone();
        if of.dq_ranks.is_some() {
            return Ok(());
        }
        let (queue, schedule) = (call.queue, &of.schedule);
        if of.kept {
            refuse_made_recorded(queue)?;
        }
        let rows = &schedule.rows;
        let (all_rows, columns) = (rows.per_head * rows.heads, rows.longest.max(1));
        let ranks = Arc::new(self.weak_pool(queue).take(4 * all_rows * columns)?);
        let params = BlockListsParams {
            columns: count(columns)?,
            ranks: ranks.address(),
            ..self.list_params(call, schedule, Axis::Keys, tile, lists.lists)
        };
        let function = self.rank_kernel(call, tile)?;
        let warps = BlockListsParams::THREADS / 32;
        let grid = [schedule.sequence_count, rows.heads, columns.div_ceil(warps)];
        let threads = BlockListsParams::THREADS as u32;
        queue_kernel(&function, queue, grid.map(|n| n as u32), threads, &[&params.bytes()])?;
        // Another thread may have made the same meanwhile: whichever is kept, both are on the queue.
        lock(&lists.dq_ranks).get_or_insert_with(|| ranks.clone());
        of.dq_ranks = Some(ranks);
        Ok(())
    }

    /// Adds to a schedule the mask of its partial tiles, as far as there is room for it. Nothing waits.
    /// Lists that the host made have none: their tiles are evaluated.
    pub(super) fn make_mask_bits(
        &self,
        call: &Call<'_>,
        state: &mut CallState,
        of: &mut LaunchSchedule,
        axis: Axis,
        tile: TileSize,
    ) -> Result<(), CudaError> {
        let Some(lists) = &of.lists else { return Ok(()) };
        of.mask_bits = lock(&lists.mask_bits).clone();
        let (queue, schedule) = (call.queue, &of.schedule);
        let rows = &schedule.rows;
        if of.mask_bits.is_some() || rows.count == 0 {
            return Ok(());
        }
        if of.kept {
            refuse_made_recorded(queue)?;
        }
        let all_rows = rows.per_head * rows.heads;
        let (tile_bytes, row_slots) = mask_slots(axis, tile, rows.longest, all_rows);
        let (bit_bytes, slot_bytes) =
            (tile_bytes * all_rows * row_slots, 4 * all_rows * rows.capacity);
        let memory = self.weak_pool(queue).take(bit_bytes + slot_bytes)?;
        let (bits, slots) = (memory.address(), memory.address() + bit_bytes as Address);
        let params = BlockListsParams {
            row_slots: count(row_slots)?,
            mask_bits: bits,
            mask_slots: slots,
            ..self.list_params(call, schedule, axis, tile, lists.lists)
        };
        let (function, printed) = self.mask_bits_kernel(call, tile)?;
        // Indices out of range were reported when the lists were made, which evaluates as many.
        let report = Report::new(queue, call.checked)?;
        let mods = self.mods_bytes(call, state, &printed, &[], None, report.address())?;
        let sms = self.engine.profile().sms;
        let shares = (2 * sms).div_ceil(rows.count * rows.heads).clamp(1, rows.longest.max(1));
        let grid = [rows.count, rows.heads, shares].map(|n| n as u32);
        let threads = BlockListsParams::THREADS as u32;
        queue_kernel(&function, queue, grid, threads, &[&params.bytes(), &mods])?;
        let made = Arc::new(MaskBits { _memory: memory, bits, slots });
        // Another thread may have made the same meanwhile: whichever is kept, both are on the queue.
        lock(&lists.mask_bits).get_or_insert_with(|| made.clone());
        of.mask_bits = Some(made);
        Ok(())
    }

    fn list_params(
        &self,
        call: &Call<'_>,
        schedule: &DeviceSchedule,
        axis: Axis,
        tile: TileSize,
        lists: params::Lists,
    ) -> BlockListsParams {
        BlockListsParams {
            sequences: schedule.sequences,
            tiles: schedule.rows.tiles,
            counts: lists.counts,
            runs: lists.runs,
            capacity: lists.capacity,
            head_stride: lists.head_stride,
            tile_q: tile.q as i32,
            tile_kv: tile.kv as i32,
            of_keys: (axis == Axis::Keys).into(),
            group: call.dims.group() as i32,
            strips: tile.cells.0 as i32,
            ..Default::default()
        }
    }

    /// The kernel that makes block lists of so many heads, with room for rows of so many tiles, its
    /// mask, and the range tables that it makes for itself.
    pub(super) fn list_kernel_of(
        &self,
        call: &Call<'_>,
        tile: TileSize,
        columns: usize,
        heads: usize,
    ) -> Result<(Function, Arc<Printed>, OwnTables), CudaError> {
        let printed = self.printed_mask(call, tile)?;
        let list_bytes = tile.cells.list_bytes(columns);
        let limit = self.engine.profile().shared_per_block;
        let own = OwnTables::new(call, &printed.source, heads, [list_bytes, limit]);
        let function = self.list_kernel(call, &printed, own.shared_bytes)?;
        Ok((function, printed, own))
    }

    /// Queues the making of block lists in memory that is there, and returns the mask that makes them.
    #[expect(clippy::too_many_arguments, reason = "what decides a list, and where it goes")]
    pub(super) fn queue_lists(
        &self,
        call: &Call<'_>,
        state: &mut CallState,
        schedule: &DeviceSchedule,
        axis: Axis,
        tile: TileSize,
        lists: params::Lists,
        report: Address,
    ) -> Result<Arc<Printed>, CudaError> {
        let (rows, queue) = (&schedule.rows, call.queue);
        let (function, printed, own) = self.list_kernel_of(call, tile, rows.longest, rows.heads)?;
        let params = BlockListsParams {
            own_tables: i32::from(!own.is_empty()),
            ..self.list_params(call, schedule, axis, tile, lists)
        };
        let mods = self.mods_bytes(call, state, &printed, &[], Some(&own), report)?;
        let grid = [rows.count as u32, rows.heads as u32, 1];
        let threads = BlockListsParams::THREADS as u32;
        queue_kernel(&function, queue, grid, threads, &[&params.bytes(), &mods])?;
        Ok(printed)
    }
}
