//! What a plan keeps on the device: schedules and captured buffers.
//!
//! Both are kept for each queue: memory goes back to the pool of the queue that used it, so it is
//! never given out again while work of another stream still reads it.

use std::sync::Arc;

use foveate_mods::{AnyBuffer, MaskMod};
use foveate_problem::{Dims, Sequence, Spec};

use super::CudaPlan;
use super::kernels::{Printed, launch};
use super::report::Report;
use crate::abi::{self, Abi, Address, BlockListsParams, array_bytes};
use crate::codegen::{BufferAddresses, buffer_bytes, range_table};
use crate::driver::Block;
use crate::engine::{Queue, lock};
use crate::error::CudaError;
use crate::schedule::{Axis, Outline, Schedule, TileSize};

/// Schedules and captured buffers on the device.
#[derive(Debug, Default)]
pub(super) struct Resident {
    schedules: Vec<(Key, Arc<Placed>)>,
    buffers: Vec<Uploaded>,
}

/// A captured buffer on the device.
#[derive(Clone, Debug)]
struct Uploaded {
    queue: u64,
    buffer: AnyBuffer,
    elems: Arc<Block>,
    /// Its range table, once a kernel has bounds that read it.
    ranges: Option<Arc<Block>>,
}

#[derive(Clone, Debug, PartialEq)]
struct Key {
    queue: u64,
    masked: bool,
    checked: bool,
    axis: Axis,
    tile: TileSize,
    shared_kv: bool,
    sequences: Vec<Sequence>,
}

/// A schedule on the device.
#[derive(Debug)]
pub(super) struct Placed {
    _memory: Block,
    pub sequences: Address,
    pub tiles: Address,
    pub tile_count: usize,
    pub lists: abi::Lists,
    pub sum_rows: usize,
    pub sharing: usize,
    pub out_of_range: Option<String>,
}

/// Schedules kept at a time: a few kernels of a few problems.
const MOST_SCHEDULES: usize = 48;

impl Resident {
    /// What still holds for a program of other captured values, `spec`; `masked` when those of
    /// the mask are others.
    pub fn with_other_values(&self, spec: &Spec, masked: bool) -> Self {
        let mask = spec.mask.as_ref().map(|m| m.program());
        let score = spec.score.as_ref().map(|s| s.program());
        let keep = spec.dropout.as_ref().map(|d| d.keep().program());
        let programs = [mask, score, keep];
        let read = |buffer: &AnyBuffer| {
            let mut all = programs.iter().flatten().flat_map(|p| p.graph().buffers());
            all.any(|b| b.same(buffer))
        };
        let schedules = self.schedules.iter().filter(|(key, _)| !(masked && key.masked));
        let buffers = self.buffers.iter().filter(|b| read(&b.buffer));
        Self { schedules: schedules.cloned().collect(), buffers: buffers.cloned().collect() }
    }
}

impl Placed {
    /// A schedule that was made on the host.
    fn new(queue: &Queue, schedule: Schedule) -> Result<Self, CudaError> {
        let lists = schedule.lists.as_ref();
        let parts = [
            array_bytes(&schedule.sequences),
            array_bytes(&schedule.tiles),
            lists.map_or(Vec::new(), |l| array_bytes(&l.counts)),
            lists.map_or(Vec::new(), |l| array_bytes(&l.runs)),
        ];
        let (memory, [sequences, tiles, counts, runs]) = upload(queue, parts, 0)?;
        let lists = match lists {
            None => abi::Lists::default(),
            Some(l) => abi::Lists {
                counts,
                runs,
                capacity: count(l.capacity)?,
                head_stride: count(l.head_stride)?,
            },
        };
        Ok(Self {
            _memory: memory,
            sequences,
            tiles,
            tile_count: schedule.tiles.len(),
            lists,
            sum_rows: schedule.sum_rows,
            sharing: schedule.sharing,
            out_of_range: schedule.out_of_range,
        })
    }
}

/// Parts one after the other in one block, each at a multiple of 16 bytes, and `room` bytes more.
/// Where each part is; the room follows the last.
fn upload<const N: usize>(
    queue: &Queue,
    parts: [Vec<u8>; N],
    room: usize,
) -> Result<(Block, [Address; N]), CudaError> {
    let mut bytes = Vec::with_capacity(parts.iter().map(|p| p.len() + 16).sum());
    let mut at = [0; N];
    for (part, at) in parts.iter().zip(&mut at) {
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        *at = bytes.len() as Address;
        bytes.extend(part);
    }
    let memory = queue.pool().take(bytes.len() + room)?;
    memory.write(&bytes)?;
    let at = at.map(|at| memory.address() + at);
    Ok((memory, at))
}

/// Rows or runs as kernels count them.
fn count(n: usize) -> Result<i32, CudaError> {
    i32::try_from(n).map_err(|_| {
        CudaError::argument(format!("{n} rows of tiles are more than a launch can count"))
    })
}

/// Where a pass puts the gradient of a learned buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gradient<'a> {
    /// The buffer.
    pub name: &'a str,
    /// f32, in the order of the buffer's elements.
    pub into: Address,
    /// i64 `[elements, 3]` for deterministic sums.
    pub sums: Address,
}

impl CudaPlan {
    /// The schedule of a kernel that owns tiles of `axis`, with the mask's lists if it walks along
    /// the other one.
    pub(super) fn placed(
        &self,
        queue: &Queue,
        dims: &Dims,
        sequences: &[Sequence],
        walks: bool,
        axis: Axis,
        tile: TileSize,
        checked: bool,
    ) -> Result<Arc<Placed>, CudaError> {
        let mask = self.spec.mask.as_ref().filter(|_| walks);
        let key = Key {
            queue: queue.id(),
            masked: mask.is_some(),
            checked: checked && mask.is_some(),
            axis,
            tile,
            shared_kv: dims.shared_kv,
            sequences: sequences.to_vec(),
        };
        let found = {
            let resident = lock(&self.resident);
            resident.schedules.iter().find(|(k, _)| *k == key).map(|(_, placed)| placed.clone())
        };
        if let Some(placed) = found {
            return Ok(placed);
        }
        let placed = Arc::new(match mask {
            Some(mask) if !self.options.lists_on_host => {
                self.outlined(queue, dims, sequences, mask, axis, tile, checked)?
            }
            _ => Placed::new(queue, Schedule::new(dims, sequences, mask, axis, tile))?,
        });
        let mut resident = lock(&self.resident);
        if resident.schedules.len() >= MOST_SCHEDULES {
            resident.schedules.remove(0);
        }
        resident.schedules.push((key, placed.clone()));
        Ok(placed)
    }

    /// A schedule whose lists the device makes. Nothing waits, unless indices are checked.
    fn outlined(
        &self,
        queue: &Queue,
        dims: &Dims,
        sequences: &[Sequence],
        mask: &MaskMod,
        axis: Axis,
        tile: TileSize,
        checked: bool,
    ) -> Result<Placed, CudaError> {
        let outline = Outline::new(dims, sequences, mask, axis, tile);
        let all_rows = outline.rows.len() * outline.heads;
        let (count_bytes, run_bytes) = (4 * all_rows, 8 * all_rows * outline.capacity);
        let parts = [
            array_bytes(&outline.sequences),
            array_bytes(&outline.tiles),
            array_bytes(&outline.rows),
            Vec::new(),
        ];
        let (memory, [sequences_at, tiles, rows, runs]) =
            upload(queue, parts, run_bytes + count_bytes)?;
        let lists = abi::Lists {
            counts: runs + run_bytes as Address,
            runs,
            capacity: count(outline.capacity)?,
            head_stride: count(outline.head_stride)?,
        };
        let params = BlockListsParams {
            sequences: sequences_at,
            tiles: rows,
            counts: lists.counts,
            runs,
            capacity: lists.capacity,
            head_stride: lists.head_stride,
            tile_q: tile.q as i32,
            tile_kv: tile.kv as i32,
            of_keys: (axis == Axis::Keys).into(),
            group: dims.group() as i32,
        };
        let shared = BlockListsParams::shared_bytes(outline.longest);
        let (function, printed) = self.list_kernel(dims, sequences, tile, shared, checked)?;
        let report = Report::new(queue, checked)?;
        let mods = self.mods_bytes(queue, &printed, &[], report.address())?;
        let grid = [outline.rows.len() as u32, outline.heads as u32, 1];
        let threads = BlockListsParams::THREADS as u32;
        launch(&function, queue, grid, threads, &[&params.bytes(), &mods])?;
        Ok(Placed {
            _memory: memory,
            sequences: sequences_at,
            tiles,
            tile_count: outline.tiles.len(),
            lists,
            sum_rows: outline.sum_rows,
            sharing: outline.sharing,
            out_of_range: report.noted(self.options.timeout, &printed.source)?,
        })
    }

    /// The bytes of `struct Mods`: where captured buffers and their gradients are.
    pub(super) fn mods_bytes(
        &self,
        queue: &Queue,
        printed: &Printed,
        gradients: &[Gradient<'_>],
        report: Address,
    ) -> Result<Vec<u8>, CudaError> {
        let source = &printed.source;
        let learned: Vec<usize> = source.learned().collect();
        let bounded: Vec<usize> = source.bounded().collect();
        let mut addresses = Vec::with_capacity(source.buffers().len());
        for (slot, buffer) in source.buffers().iter().enumerate() {
            let (elems, ranges) = self.uploaded(queue, buffer, bounded.contains(&slot))?;
            let wanted = gradients.iter().find(|g| g.name == buffer.name());
            let wanted = wanted.filter(|_| learned.contains(&slot));
            let (gradient, sums) = wanted.map_or((0, 0), |g| (g.into, g.sums));
            addresses.push(BufferAddresses { elems, gradient, sums, ranges });
        }
        source.pack(&addresses, report)
    }

    /// Where a captured buffer and, if asked for, its range table are; they are copied over at
    /// their first use.
    fn uploaded(
        &self,
        queue: &Queue,
        buffer: &AnyBuffer,
        bounded: bool,
    ) -> Result<(Address, Address), CudaError> {
        let mut resident = lock(&self.resident);
        let same = |b: &Uploaded| b.queue == queue.id() && b.buffer.same(buffer);
        let at = match resident.buffers.iter().position(same) {
            Some(at) => at,
            None => {
                let elems = Arc::new(queue.pool().upload(&buffer_bytes(buffer))?);
                let (queue, buffer) = (queue.id(), buffer.clone());
                resident.buffers.push(Uploaded { queue, buffer, elems, ranges: None });
                resident.buffers.len() - 1
            }
        };
        let uploaded = &mut resident.buffers[at];
        if bounded && uploaded.ranges.is_none() {
            uploaded.ranges = Some(Arc::new(queue.pool().upload(&range_table(buffer))?));
        }
        let ranges = uploaded.ranges.as_ref().map_or(0, |block| block.address());
        Ok((uploaded.elems.address(), ranges))
    }
}
