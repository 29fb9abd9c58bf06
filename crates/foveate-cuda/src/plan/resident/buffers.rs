//! Captured buffers and their range tables on the device, and the structure that tells kernels where
//! they are.

use std::sync::Arc;

use foveate_mods::AnyBuffer;

use super::{CallState, PlanState, count, push_bounded, refuse_made_recorded, refuse_recording};
use crate::compile::codegen::{
    BufferAddresses, ModsSource, buffer_bytes, range_table_bytes, range_table_params,
};
use crate::compile::config::Config;
use crate::compile::params::{Abi, Address};
use crate::error::CudaError;
use crate::plan::CudaPlan;
use crate::plan::call::Call;
use crate::plan::kernels::{Printed, queue_kernel};
use foveate_gpu::driver::Allocation;
use foveate_gpu::sync::lock;
use foveate_gpu::{ElementType, Queue};

/// A captured buffer on the device.
#[derive(Clone, Debug)]
pub(super) struct Uploaded {
    pub queue: u64,
    pub buffer: AnyBuffer,
    elems: Arc<Allocation>,
    /// Its range table, once a kernel has bounds that read it.
    ranges: Option<Arc<Allocation>>,
}

/// Contents of device memory that somebody else promises to leave as they are.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TableKey {
    pub queue: u64,
    address: Address,
    version: u64,
    element: ElementType,
    shape: Vec<usize>,
    strides: Option<Vec<usize>>,
}

/// Where a pass puts the gradient of a learned buffer.
#[derive(Clone, Copy, Debug)]
pub(in crate::plan) struct Gradient<'a> {
    /// The buffer.
    pub name: &'a str,
    /// f32, in the order of the buffer's elements.
    pub into: Address,
    /// i64 `[elements, 3]` for deterministic sums.
    pub sums: Address,
}

/// Range tables of captured buffers in device memory kept at a time.
const MOST_TABLES: usize = 16;

/// The range tables that the CTAs of a kernel of lists make for themselves, each all of them: those of
/// small captured buffers in device memory, whose elements each CTA reads in less time than the launch
/// of [`CudaPlan::range_table`] takes.
#[derive(Debug, Default)]
pub(in crate::plan) struct OwnTables {
    /// The slot of each buffer, and the place of its table in shared memory.
    tables: Vec<(usize, usize)>,
    /// Bytes of shared memory, those before the tables among them.
    pub shared_bytes: usize,
}

impl OwnTables {
    /// Elements that a CTA reads at most, where lists are the same for all heads; where each head has
    /// its own, there are as many times more CTAs.
    const MOST_ELEMS: usize = 1 << 14;

    /// Bytes of shared memory that tables take at most.
    const MOST_BYTES: usize = 40 << 10;

    /// Tables take a multiple of these bytes, so that buffers of many lengths make few kernels.
    const GRANULE: usize = 4 << 10;

    /// Those of a call whose mask is printed as `source`, with lists for so many heads, behind so many
    /// bytes of shared memory, of which a CTA can have `limit`.
    pub fn new(
        call: &Call<'_>,
        source: &ModsSource,
        heads: usize,
        [before, limit]: [usize; 2],
    ) -> Self {
        // No place is 0, which is nowhere.
        let first = before.next_multiple_of(8).max(8);
        let most =
            Self::MOST_BYTES.min(limit.saturating_sub(first) / Self::GRANULE * Self::GRANULE);
        let (mut tables, mut elems, mut end) = (Vec::new(), 0, first);
        for slot in source.bounded() {
            let buffer = &source.buffers()[slot];
            if !buffer.is_on_device() || call.capture(buffer.name()).is_none() {
                continue;
            }
            let more = buffer.elems().saturating_mul(heads);
            let bytes = range_table_bytes(buffer.shape());
            if more <= Self::MOST_ELEMS - elems && bytes <= most - (end - first) {
                tables.push((slot, end));
                (elems, end) = (elems + more, end + bytes);
            }
        }
        let taken = (end - first).next_multiple_of(Self::GRANULE);
        let shared_bytes = if tables.is_empty() { before } else { first + taken };
        Self { tables, shared_bytes }
    }

    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// The place of the table of a slot, if it is one of these.
    fn place(&self, slot: usize) -> Option<Address> {
        let found = self.tables.iter().find(|(of, _)| *of == slot);
        found.map(|&(_, place)| place as Address)
    }
}

impl CudaPlan {
    /// The bytes of `struct Mods`: where captured buffers and their gradients are, and, for a kernel that
    /// reads bounds, the range tables that it does not make for itself.
    pub(in crate::plan) fn mods_bytes(
        &self,
        call: &Call<'_>,
        state: &mut CallState,
        printed: &Printed,
        gradients: &[Gradient<'_>],
        tables: Option<&OwnTables>,
        report: Address,
    ) -> Result<Vec<u8>, CudaError> {
        let source = &printed.source;
        let learned: Vec<usize> = source.learned().collect();
        let bounded: Vec<usize> = match tables {
            Some(own) => source.bounded().filter(|&slot| own.place(slot).is_none()).collect(),
            None => Vec::new(),
        };
        let mut addresses = Vec::with_capacity(source.buffers().len());
        for (slot, buffer) in source.buffers().iter().enumerate() {
            let bounded = bounded.contains(&slot);
            let (elems, ranges) = match call.capture(buffer.name()) {
                Some((at, array)) if buffer.is_on_device() => {
                    let ranges = if bounded { self.table_of(call, state, at, buffer)? } else { 0 };
                    (array.address, ranges)
                }
                _ if call.recorded => self.uploaded_again(call, state, buffer, bounded)?,
                _ => self.uploaded(call.queue, buffer, bounded)?,
            };
            let wanted = gradients.iter().find(|g| g.name == buffer.name());
            let wanted = wanted.filter(|_| learned.contains(&slot));
            let (gradient, sums) = wanted.map_or((0, 0), |g| (g.into, g.sums));
            let ranges = tables.and_then(|own| own.place(slot)).unwrap_or(ranges);
            addresses.push(BufferAddresses { elems, gradient, sums, ranges });
        }
        source.pack(&addresses, report)
    }

    /// Where a captured buffer of the host and, if asked for, its range table are; it is copied
    /// over at its first use.
    fn uploaded(
        &self,
        queue: &Queue,
        buffer: &AnyBuffer,
        bounded: bool,
    ) -> Result<(Address, Address), CudaError> {
        let same = |b: &&Uploaded| b.queue == queue.id() && b.buffer.same(buffer);
        let found = lock(&self.resident).buffers.iter().find(same).cloned();
        let mut uploaded = match found {
            Some(found) => found,
            None => {
                let elems = Arc::new(self.weak_pool(queue).upload(&buffer_bytes(buffer))?);
                let (id, buffer) = (queue.id(), buffer.clone());
                self.keep_uploaded(queue, &Uploaded { queue: id, buffer, elems, ranges: None })
            }
        };
        if bounded && uploaded.ranges.is_none() {
            refuse_recording(queue)?;
            let table = self.range_table(queue, uploaded.elems.address(), buffer)?;
            let made = Uploaded { ranges: Some(Arc::new(table)), ..uploaded };
            uploaded = self.keep_uploaded(queue, &made);
        }
        let ranges = uploaded.ranges.as_ref().map_or(0, |allocation| allocation.address());
        Ok((uploaded.elems.address(), ranges))
    }

    /// What is kept of a buffer when `made` of it is there: where two threads make the same, the first one's.
    fn keep_uploaded(&self, queue: &Queue, made: &Uploaded) -> Uploaded {
        let mut resident = lock(&self.resident);
        let same = |b: &&mut Uploaded| b.queue == made.queue && b.buffer.same(&made.buffer);
        if let Some(kept) = resident.buffers.iter_mut().find(same) {
            kept.ranges = kept.ranges.take().or_else(|| made.ranges.clone());
            return kept.clone();
        }
        resident.keeps_for(queue);
        resident.buffers.push(made.clone());
        made.clone()
    }

    /// [`Self::uploaded`] for a call that keeps nothing.
    fn uploaded_again(
        &self,
        call: &Call<'_>,
        state: &mut CallState,
        buffer: &AnyBuffer,
        bounded: bool,
    ) -> Result<(Address, Address), CudaError> {
        let queue = call.queue.id();
        let same = |b: &Uploaded| b.buffer.same(buffer);
        let at = match state.buffers.iter().position(same) {
            Some(at) => at,
            None => {
                let elems = Arc::new(self.pool(call.queue).upload(&buffer_bytes(buffer))?);
                let buffer = buffer.clone();
                state.buffers.push(Uploaded { queue, buffer, elems, ranges: None });
                state.buffers.len() - 1
            }
        };
        let uploaded = &mut state.buffers[at];
        let elems = uploaded.elems.address();
        if bounded && uploaded.ranges.is_none() {
            uploaded.ranges = Some(Arc::new(self.range_table(call.queue, elems, buffer)?));
        }
        let ranges = uploaded.ranges.as_ref().map_or(0, |allocation| allocation.address());
        Ok((elems, ranges))
    }

    /// Where the range table of a captured buffer of the call is, which takes the place of `buffer`.
    fn table_of(
        &self,
        call: &Call<'_>,
        state: &mut CallState,
        at: usize,
        buffer: &AnyBuffer,
    ) -> Result<Address, CudaError> {
        if let Some((_, table)) = state.tables.iter().find(|(of, _)| *of == at) {
            return Ok(table.address());
        }
        let (_, array) = call.captured(at);
        let key = array.version.filter(|_| !call.recorded).map(|version| TableKey {
            queue: call.queue.id(),
            address: array.address,
            version,
            element: array.element,
            shape: array.shape.to_vec(),
            strides: array.strides.map(<[usize]>::to_vec),
        });
        let found = key.as_ref().and_then(|key| {
            let resident = lock(&self.resident);
            resident.tables.iter().find(|(k, _)| k == key).map(|(_, table)| table.clone())
        });
        let table = match found {
            Some(table) => table,
            None => {
                let (queue, address) = (call.queue, array.address);
                if let Some(key) = &key {
                    refuse_made_recorded(queue)?;
                    // As lists do: the table of what was overwritten gives its memory.
                    let overwritten = |k: &TableKey| {
                        (k.queue, k.address) == (key.queue, key.address) && k.version != key.version
                    };
                    let is_old = |(k, _): &mut (TableKey, _)| overwritten(k);
                    let old: Vec<_> = lock(&self.resident).tables.extract_if(.., is_old).collect();
                    drop(old);
                }
                let table = Arc::new(self.range_table(queue, address, buffer)?);
                if let Some(key) = key {
                    let made = (key, table.clone());
                    let keep = |resident: &mut PlanState| {
                        resident.keeps_for(queue);
                        push_bounded(&mut resident.tables, MOST_TABLES, made)
                    };
                    let oldest = keep(&mut lock(&self.resident));
                    drop(oldest);
                }
                table
            }
        };
        let address = table.address();
        state.tables.push((at, table));
        Ok(address)
    }

    /// Queues the making of a range table.
    fn range_table(
        &self,
        queue: &Queue,
        elems: Address,
        buffer: &AnyBuffer,
    ) -> Result<Allocation, CudaError> {
        const MOST_THREADS: usize = 1024;
        // Nobody reads the table of a buffer without elements, but it has an address.
        let table = self.weak_pool(queue).take(range_table_bytes(buffer.shape()).max(8))?;
        let function = self.plain_kernel(Config::range_table())?;
        let params = range_table_params(buffer, elems, table.address())?;
        let length = params.length as usize;
        let grid = [count(params.rows as usize)? as u32, 1, 1];
        let threads = length.div_ceil(32).next_multiple_of(32).clamp(32, MOST_THREADS) as u32;
        queue_kernel(&function, queue, grid, threads, &[&params.bytes()])?;
        Ok(table)
    }
}
