//! Batches on the device: one copy brings all that depends on a batch alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foveate_gpu::abi::Address;
use foveate_gpu::driver::{Allocation, Pool};
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, GpuError};
use foveate_nn::{Batch, LabelledTokens, RopePairing, RopeTable};
use foveate_tensor::DType;

use crate::embedding::TokenOrder;
use crate::rope::{Pairing, Turn};

/// Bytes that each array of a batch starts at a multiple of.
const ALIGN: usize = 256;

/// A batch in device memory: tokens, labels, documents, positions, the tokens that have a label, and the order of
/// all.
#[derive(Debug)]
pub struct CudaBatch {
    memory: Arc<Allocation>,
    /// Rows and tokens of a row.
    shape: [usize; 2],
    tokens: [usize; 1],
    words: [usize; 1],
    /// Rows that the head multiplies, where it does not multiply all tokens.
    rows: Option<[usize; 1]>,
    /// Bytes from the start of the memory to labels, documents, positions, tokens and labels of [`Self::rows`],
    /// the rows of tokens, and the words of the order.
    starts: [usize; 7],
    pub(super) order: TokenOrder,
    pub(super) tables: Vec<Arc<Rotations>>,
    /// Differs from that of every other batch.
    version: u64,
}

/// Where batches lie whose passes are recorded.
#[derive(Debug, Default)]
pub(super) struct BatchPlaces(Vec<Arc<Allocation>>);

/// Sizes of batches whose places are kept.
const PLACES: usize = 4;

impl BatchPlaces {
    /// One of so many bytes that no batch lies in.
    fn of(&self, bytes: usize) -> Option<Arc<Allocation>> {
        let is_free =
            |place: &&Arc<Allocation>| place.bytes() == bytes && Arc::strong_count(place) == 1;
        self.0.iter().find(is_free).map(Arc::clone)
    }

    /// Keeps that of `batch` for others of its size; the oldest goes.
    pub fn keep(&mut self, batch: &CudaBatch) {
        if !self.0.iter().any(|place| Arc::ptr_eq(place, &batch.memory)) {
            self.0.truncate(PLACES - 1);
            self.0.insert(0, Arc::clone(&batch.memory));
        }
    }
}

/// A table of rotations in device memory.
#[derive(Debug)]
pub(super) struct Rotations {
    /// What it was made of.
    of: Arc<RopeTable>,
    memory: Allocation,
}

impl Rotations {
    /// Brings `table` to the device.
    pub fn new(pool: &Pool, table: &Arc<RopeTable>) -> Result<Self, GpuError> {
        let [positions, pairs] = table.shape();
        let mut numbers = Vec::with_capacity(2 * positions * pairs);
        for position in 0..positions {
            let (cos, sin) = table.at(position as i32);
            numbers.extend_from_slice(cos);
            numbers.extend_from_slice(sin);
        }
        let memory = pool.upload(&foveate_gpu::abi::array_bytes(&numbers))?;
        Ok(Self { of: Arc::clone(table), memory })
    }

    /// Whether it was made of `table`. A table that is there twice was not changed: `of` would be the
    /// only one else.
    pub fn is_of(&self, table: &Arc<RopeTable>) -> bool {
        Arc::ptr_eq(&self.of, table)
    }

    /// f32 `[positions, rotated]`.
    pub fn tensor(&self) -> DeviceTensor<2> {
        let [positions, pairs] = self.of.shape();
        DeviceTensor::contiguous(self.memory.address(), DType::F32, [positions, 2 * pairs])
    }
}

/// How heads turn by the positions of a batch, as kernels take it.
pub(super) fn turn_of<'a>(turn: &foveate_nn::Turn<'a, CudaBatch>) -> Turn<'a> {
    Turn {
        positions: turn.batch.positions(),
        table: turn.batch.tables[turn.table].tensor(),
        pairing: match turn.pairing {
            RopePairing::HalfSplit => Pairing::Halves,
            RopePairing::Interleaved => Pairing::Neighbours,
        },
    }
}

/// Integers in memory that they keep. Layers share what is made of them, since their version says that they
/// stay the same.
#[derive(Clone, Debug)]
pub(super) struct Words {
    memory: Arc<Allocation>,
    /// Bytes from the start of the memory.
    start: usize,
    shape: Vec<usize>,
    version: u64,
}

impl Words {
    /// Brings arrays, of these shapes, to the device by one copy.
    pub fn upload<const N: usize>(
        pool: &Pool,
        arrays: [(Vec<usize>, Vec<i32>); N],
    ) -> Result<[Self; N], GpuError> {
        let mut bytes = Vec::new();
        let placed = arrays.map(|(shape, words)| {
            bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
            let start = bytes.len();
            bytes.extend(foveate_gpu::abi::array_bytes(&words));
            (shape, start)
        });
        let (memory, version) = (Arc::new(pool.upload(&bytes)?), new_version());
        Ok(placed.map(|(shape, start)| Self { memory: Arc::clone(&memory), start, shape, version }))
    }

    /// i32 of its shape.
    pub fn array(&self) -> DeviceArray<'_> {
        let address = self.memory.address() + self.start as Address;
        let array = DeviceArray::new(address, ElementType::I32, &self.shape);
        DeviceArray { version: Some(self.version), ..array }
    }

    /// `len` of a vector, from `first` on.
    pub fn part(&self, first: usize, len: usize) -> Self {
        Self { start: self.start + 4 * first, shape: vec![len], ..self.clone() }
    }
}

/// Differs from every other one.
fn new_version() -> u64 {
    static VERSION: AtomicU64 = AtomicU64::new(1);
    VERSION.fetch_add(1, Ordering::Relaxed)
}

impl CudaBatch {
    /// Queues the copy of a batch. Its memory has a size that the number of tokens fixes; of a batch whose
    /// pass is `recorded` that is the place of an earlier one of as many tokens, where there is one.
    pub(super) fn new(
        pool: &Pool,
        batch: &Batch<'_>,
        tables: Vec<Arc<Rotations>>,
        recorded: Option<&BatchPlaces>,
    ) -> Result<Self, GpuError> {
        let order = match batch.order {
            [] => TokenOrder::new(batch.tokens)?,
            order => TokenOrder::of_sorted(batch.tokens, order)?,
        };
        let order = if recorded.is_some() { order.padded() } else { order };
        let words: usize = order.parts().iter().map(|part| part.len()).sum();
        let tokens = batch.tokens.len();
        let labelled = LabelledTokens::of(batch.labels);
        let rows = labelled.as_ref().map(|labelled| [labelled.tokens.len()]);
        let [of_rows, labels_of_rows, rows_of_tokens] = match &labelled {
            Some(LabelledTokens { tokens, labels, rows }) => {
                [bytemuck::cast_slice(tokens), labels, bytemuck::cast_slice(rows)]
            }
            None => [&[][..]; 3],
        };
        // The step's thread does this, so no array has a copy of its own in between.
        let arrays = [
            bytemuck::cast_slice(batch.tokens),
            batch.labels,
            batch.documents,
            batch.positions,
            of_rows,
            labels_of_rows,
            rows_of_tokens,
        ];
        // Whichever tokens have a label.
        let all = arrays.len() * (4 * tokens).next_multiple_of(ALIGN);
        let most = all + 4 * TokenOrder::most_words(tokens);
        let mut bytes = Vec::with_capacity(most);
        let starts = arrays.map(|array: &[i32]| {
            bytes.extend_from_slice(bytemuck::cast_slice(array));
            bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
            bytes.len()
        });
        order.parts().iter().for_each(|part| bytes.extend_from_slice(bytemuck::cast_slice(part)));
        let place = recorded.and_then(|places| places.of(most));
        let memory = place.map_or_else(|| pool.take(most).map(Arc::new), Ok)?;
        memory.write(&bytes)?;
        Ok(Self {
            memory,
            shape: [batch.rows, batch.len],
            tokens: [tokens],
            words: [words],
            rows,
            starts,
            order,
            tables,
            version: new_version(),
        })
    }

    /// i32 `[tokens]`.
    pub(super) fn tokens(&self) -> DeviceArray<'_> {
        DeviceArray::new(self.memory.address(), ElementType::I32, &self.tokens)
    }

    /// Where it lies, how many tokens it has, and how many rows the head multiplies.
    pub(super) fn place(&self) -> (Address, usize, Option<[usize; 1]>) {
        (self.memory.address(), self.count(), self.rows)
    }

    fn at(&self, start: usize) -> Address {
        self.memory.address() + self.starts[start] as Address
    }

    /// i32 labels of `len` tokens from `first` on, or of [`Self::rows`].
    pub(super) fn labels<'a>(
        &self,
        of_rows: bool,
        first: usize,
        len: &'a [usize; 1],
    ) -> DeviceArray<'a> {
        let start = self.at(if of_rows { 4 } else { 0 });
        DeviceArray::new(start + 4 * first as Address, ElementType::I32, len)
    }

    /// Of `len` rows that the head multiplies, from `first` on, their tokens: as [`Self::rows`] has them.
    pub(super) fn tokens_of_rows<'a>(&self, first: usize, len: &'a [usize; 1]) -> DeviceArray<'a> {
        DeviceArray::new(self.at(3) + 4 * first as Address, ElementType::I32, len)
    }

    /// Of each row that the head multiplies its token, and of each token its row, negative where there is
    /// none: i32 `[rows]` and `[tokens]`; none where the head multiplies all tokens.
    pub(super) fn rows(&self) -> Option<[DeviceArray<'_>; 2]> {
        let rows = self.rows.as_ref()?;
        let array = |start, shape| DeviceArray::new(self.at(start), ElementType::I32, shape);
        Some([array(3, rows), array(5, &self.tokens)])
    }

    /// i32 `[tokens]`.
    pub(super) fn positions(&self) -> DeviceArray<'_> {
        DeviceArray::new(self.at(2), ElementType::I32, &self.tokens)
    }

    /// The words of [`Self::order`].
    pub(super) fn words(&self) -> DeviceArray<'_> {
        DeviceArray::new(self.at(6), ElementType::I32, &self.words)
    }

    pub(super) fn documents(&self) -> Words {
        Words {
            memory: Arc::clone(&self.memory),
            start: self.starts[1],
            shape: self.shape.to_vec(),
            version: self.version,
        }
    }

    /// Tokens in all rows.
    pub(super) fn count(&self) -> usize {
        self.tokens[0]
    }

    /// Rows that the head multiplies: [`Self::rows`], or all tokens.
    pub(super) fn count_of(&self, of_rows: bool) -> usize {
        self.rows.filter(|_| of_rows).map_or(self.count(), |[rows]| rows)
    }
}
