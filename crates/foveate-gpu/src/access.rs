//! What a launch reads and writes: whether its memory is the device's, and whether what is written
//! is apart from everything else.
//!
//! A kernel cannot say which operand was wrong: a bad address ends in a failed launch, an overlap
//! in wrong numbers. So whoever launches lists its tensors here first, and the first that does not
//! fit is named.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;

use foveate_tensor::{GroupedAxis, Layout};

use crate::abi::Address;
use crate::array::DeviceArray;
use crate::engine::Engine;
use crate::error::GpuError;
use crate::queue::Queue;
use crate::sync::lock;
use crate::tensor::DeviceTensor;
use crate::trace::{Noted, is_noting, note};

/// The memory of one tensor or array.
#[derive(Clone, Debug)]
struct Access {
    name: String,
    span: (Address, Address),
    written: bool,
    rows: Rows,
}

/// The rows of a tensor: distances and numbers of the axes before the last, bytes of a row.
#[derive(Clone, Debug)]
struct Rows {
    layout: Layout<4>,
    bytes: usize,
    start: Address,
}

/// The memory that a launch reads and writes.
#[derive(Clone, Debug, Default)]
pub struct Accesses(Vec<Access>);

/// Elements up to which an overlap of two interleaved tensors is looked for element by element
/// or row by row.
const MOST_PIECES: usize = 1 << 22;

/// Pairs of tensors that are remembered to be apart.
const MAX_CHECKED: usize = 1 << 14;

impl Accesses {
    /// Adds an array that is read.
    ///
    /// # Errors
    /// When its elements are too many to count, or its address is no multiple of their size.
    pub fn read_array(&mut self, name: &str, array: &DeviceArray<'_>) -> Result<(), GpuError> {
        self.add_array(name, array, false)
    }

    /// Adds an array that is written, or read and written.
    ///
    /// # Errors
    /// Those of [`Self::read_array`].
    pub fn write_array(&mut self, name: &str, array: &DeviceArray<'_>) -> Result<(), GpuError> {
        self.add_array(name, array, true)
    }

    fn add_array(
        &mut self,
        name: &str,
        array: &DeviceArray<'_>,
        written: bool,
    ) -> Result<(), GpuError> {
        let Some(elems) = array.span() else {
            return Err(GpuError::argument(format!(
                "{name} of shape {:?} has too many elements to count",
                array.shape
            )));
        };
        let (address, element, bytes) = (array.address, array.element, array.element.bytes());
        if elems > 0 && !address.is_multiple_of(bytes as u64) {
            return Err(GpuError::argument(format!(
                "{name} starts at {address:#x}, which is no multiple of the {bytes} bytes of {element}"
            )));
        }
        let end = elems.checked_mul(bytes).and_then(|n| address.checked_add(n as u64));
        let end = end.ok_or_else(|| {
            GpuError::argument(format!("{name} of {elems} elements overflows an address"))
        })?;
        self.0.push(Access {
            name: name.to_owned(),
            span: (address, end),
            written,
            rows: Rows { layout: Layout::contiguous([1, 1, 1, elems]), bytes, start: address },
        });
        Ok(())
    }

    /// Adds a tensor that is read.
    ///
    /// # Errors
    /// When its address is no multiple of its elements' size, or its strides overflow an address.
    pub fn read<const N: usize>(
        &mut self,
        name: &str,
        t: &DeviceTensor<N>,
    ) -> Result<(), GpuError> {
        self.add(name, t, false)
    }

    /// Adds a tensor that is written.
    ///
    /// # Errors
    /// Those of [`Self::read`]; when its layout writes an element twice.
    pub fn write<const N: usize>(
        &mut self,
        name: &str,
        t: &DeviceTensor<N>,
    ) -> Result<(), GpuError> {
        if !t.layout.is_disjoint() {
            return Err(GpuError::argument(format!(
                "{name} of shape {:?} with strides {:?} writes an element twice",
                t.layout.shape, t.layout.strides
            )));
        }
        self.add(name, t, true)
    }

    fn add<const N: usize>(
        &mut self,
        name: &str,
        t: &DeviceTensor<N>,
        written: bool,
    ) -> Result<(), GpuError> {
        let bytes = t.dtype.bytes();
        if t.layout.elems() > 0 && !t.start().is_multiple_of(bytes as u64) {
            return Err(GpuError::argument(format!(
                "{name} starts at {:#x}, which is no multiple of the {bytes} bytes of {}",
                t.start(),
                t.dtype
            )));
        }
        let pad = 4 - N;
        let axis =
            |values: [usize; N], i: usize, fill| if i < pad { fill } else { values[i - pad] };
        let layout = Layout {
            shape: std::array::from_fn(|i| axis(t.layout.shape, i, 1)),
            strides: std::array::from_fn(|i| axis(t.layout.strides, i, 0)),
            offset: t.layout.offset,
            groups: t.layout.groups.map(|groups| GroupedAxis { axis: groups.axis + pad, ..groups }),
        };
        self.0.push(Access {
            name: name.to_owned(),
            span: t.span()?,
            written,
            rows: Rows { layout, bytes, start: t.address },
        });
        Ok(())
    }

    /// Whether everything is memory of the engine's device. What is is noted ([`crate::trace`]), since a
    /// launch on `queue` follows.
    ///
    /// # Errors
    /// [`crate::GpuErrorKind::Argument`] naming the first that is not.
    pub fn check_device(&self, engine: &Engine, queue: &Queue) -> Result<(), GpuError> {
        for Access { name, span: (from, to), .. } in self.0.iter().filter(|p| p.span.0 < p.span.1) {
            engine.check_memory(name, *from, (to - from) as usize)?;
        }
        if !is_noting() {
            return Ok(());
        }
        let stream = queue.stream().number();
        for access in self.0.iter().filter(|p| p.span.0 < p.span.1) {
            for span in access.stretches() {
                let name = access.name.clone();
                note(|| match access.written {
                    true => Noted::Written { name, span, stream },
                    false => Noted::Read { name, span, stream },
                });
            }
        }
        Ok(())
    }

    /// Whether every destination is apart from everything else. What has been found apart once is
    /// in `checked`, and not looked at again: tensors that interleave take a while.
    ///
    /// # Errors
    /// [`crate::GpuErrorKind::Argument`] naming the first two that overlap.
    pub fn check_apart(&self, checked: &Mutex<HashSet<u64>>) -> Result<(), GpuError> {
        for (i, one) in self.0.iter().enumerate() {
            for other in &self.0[i + 1..] {
                let apart = one.span.1 <= other.span.0 || other.span.1 <= one.span.0;
                if apart || !(one.written || other.written) {
                    continue;
                }
                let pair = one.beside(other);
                if lock(checked).contains(&pair) {
                    continue;
                }
                if !one.meets(other) {
                    let mut checked = lock(checked);
                    if checked.len() >= MAX_CHECKED {
                        checked.clear();
                    }
                    checked.insert(pair);
                    continue;
                }
                let (written, other) = if one.written { (one, other) } else { (other, one) };
                return Err(GpuError::argument(format!(
                    "{} overlaps {}; give it memory of its own",
                    written.name, other.name
                )));
            }
        }
        Ok(())
    }
}

impl Access {
    /// Its memory, without what lies between one entry of the first axis and the next.
    fn stretches(&self) -> Vec<(Address, Address)> {
        let Rows { layout, bytes, start } = &self.rows;
        let [batch, heads, len, elems] = layout.shape;
        let at = |index| start + (layout.at(index) * bytes) as Address;
        let entry =
            |b| (at([b, 0, 0, 0]), at([b, heads - 1, len - 1, elems - 1]) + *bytes as Address);
        let mut joined: Vec<(Address, Address)> = Vec::new();
        for (from, to) in (0..batch).map(entry) {
            match joined.last_mut() {
                Some(last) if last.0 <= from && from <= last.1 => last.1 = last.1.max(to),
                _ => joined.push((from, to)),
            }
        }
        joined
    }

    /// A number for how two tensors lie beside each other, wherever they are.
    fn beside(&self, other: &Self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.rows.start.wrapping_sub(other.rows.start).hash(&mut hasher);
        for rows in [&self.rows, &other.rows] {
            (rows.layout, rows.bytes).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Whether both have a byte in common; taken as no where there are too many rows to look at.
    fn meets(&self, other: &Self) -> bool {
        let (Some(mut pieces), Some(more)) = (self.rows.pieces(), other.rows.pieces()) else {
            return false;
        };
        pieces.sort_unstable();
        more.iter().any(|&(from, to)| {
            let next = pieces.partition_point(|&(_, end)| end <= from);
            pieces.get(next).is_some_and(|&(start, _)| start < to)
        })
    }
}

impl Rows {
    /// The stretches of memory that hold elements.
    fn pieces(&self) -> Option<Vec<(Address, Address)>> {
        let [batch, heads, len, elems] = self.layout.shape;
        let grouped = self.layout.groups.is_some_and(|groups| groups.axis == 3);
        let whole = (self.layout.strides[3] == 1 && !grouped) || elems == 1;
        let (steps, width) = if whole { (1, elems) } else { (elems, 1) };
        let count = batch.checked_mul(heads)?.checked_mul(len)?.checked_mul(steps)?;
        if count > MOST_PIECES {
            return None;
        }
        let mut pieces = Vec::with_capacity(count);
        for b in 0..batch {
            for h in 0..heads {
                for s in 0..len {
                    for e in 0..steps {
                        let at =
                            self.start + (self.layout.at([b, h, s, e]) * self.bytes) as Address;
                        pieces.push((at, at + (width * self.bytes) as Address));
                    }
                }
            }
        }
        Some(pieces)
    }
}
