//! Rows of a table, or of a part of it, by token, and the gradient of the table without atomics.

use foveate_gpu::abi::{Address, array_bytes};
use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, GpuError};
use foveate_nn::token_order;
use foveate_tensor::DType;

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{array, count, dense, integers, matrix, operand_dtype, vector, whole_f32};
use crate::params::{EmbeddingBackwardParams, EmbeddingParams};

/// `out[t] = scale · table[tokens[t]]`.
#[derive(Clone, Copy, Debug)]
pub struct Embedding<'a> {
    /// `[rows, width]`, f16, bf16 or f32: of all tokens, or of some that follow each other.
    pub table: DeviceTensor<2>,
    /// Of a part of a table the token of its first row; tokens that have no row are 0.
    pub first: Option<usize>,
    /// i32 `[tokens]`, each a row of a table that is whole: whoever uploads them has checked it.
    pub tokens: DeviceArray<'a>,
    /// `[tokens, width]`, in the dtype of the table, written.
    pub out: DeviceTensor<2>,
    /// 1, or √width (Gemma).
    pub scale: f32,
}

/// `d_table[tokens[t]] += scale · d_out[t]`, for each row of the table in order of t within
/// segments of 64 places, then of segments.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingBackward<'a> {
    /// `[tokens, width]`, f16, bf16 or f32.
    pub d_out: DeviceTensor<2>,
    /// `[rows, width]`, f32 or in the dtype of `d_out`, rows side by side, added to.
    pub d_table: DeviceTensor<2>,
    /// Of a part of a table the token of its first row; tokens that have no row are left out.
    pub first: Option<usize>,
    /// The order of the batch's tokens.
    pub order: &'a TokenOrder,
    /// Where [`TokenOrder::words`] lies: i32 `[words]`.
    pub words: DeviceArray<'a>,
    /// f32 `[order.partial_rows(), width]`, rows side by side: scratch.
    pub partial: DeviceTensor<2>,
    /// As in [`Embedding`].
    pub scale: f32,
}

/// The places of a batch's tokens, sorted by token and cut into segments. Made once a batch, on the
/// host; the device has its words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenOrder {
    places: Vec<i32>,
    segments: Vec<[i32; 4]>,
    joined: Vec<[i32; 4]>,
    partial_rows: usize,
    /// The largest token.
    last: i32,
}

/// Places of a segment at most: a CTA reads so many rows one after the other.
const SEGMENT: usize = 64;
const THREADS: u32 = 128;
/// Of a CTA of the gradient, where a row has a vector for each of them.
const THREADS_OF_WIDE_ROWS: u32 = 256;

impl TokenOrder {
    /// Sorts the places where each token stands.
    ///
    /// # Errors
    /// For more than 2³¹ tokens, or one that is 2³¹ or more.
    pub fn new(tokens: &[u32]) -> Result<Self, GpuError> {
        count("tokens", tokens.len())?;
        Self::of_sorted(tokens, &token_order(tokens))
    }

    /// [`Self::new`] of tokens whose places are sorted by token and then by place already
    /// ([`token_order`]).
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn of_sorted(tokens: &[u32], order: &[u32]) -> Result<Self, GpuError> {
        count("tokens", tokens.len())?;
        let last = tokens.iter().copied().max().unwrap_or(0);
        let last = count("words of a vocabulary", last as usize)?;
        let places: Vec<i32> = order.iter().map(|&place| place as i32).collect();
        let (mut segments, mut joined, mut partial_rows) = (Vec::new(), Vec::new(), 0);
        let same = |a: &i32, b: &i32| tokens[*a as usize] == tokens[*b as usize];
        let mut first = 0;
        for run in places.chunk_by(same) {
            let token = tokens[run[0] as usize] as i32;
            let before = partial_rows;
            for part in run.chunks(SEGMENT) {
                let end = first + part.len() as i32;
                let row = if run.len() > SEGMENT { partial_rows } else { -1 };
                segments.push([token, first, end, row]);
                partial_rows += i32::from(row >= 0);
                first = end;
            }
            if partial_rows > before {
                joined.push([token, before, partial_rows, 0]);
            }
        }
        let partial_rows = partial_rows as usize;
        Ok(Self { places, segments, joined, partial_rows, last })
    }

    /// With segments that are of no token, as many as any order of so many tokens has: what is launched for it
    /// depends on their number alone.
    pub fn padded(self) -> Self {
        const OF_NO_TOKEN: i32 = -1;
        let Self { places, mut segments, mut joined, last, .. } = self;
        segments.resize(places.len(), [OF_NO_TOKEN, 0, 0, -1]);
        joined.resize(places.len() / (SEGMENT + 1), [OF_NO_TOKEN, 0, 0, 0]);
        let partial_rows = Self::most_partial_rows(places.len());
        Self { places, segments, joined, partial_rows, last }
    }

    /// Rows of the scratch of [`EmbeddingBackward`].
    pub fn partial_rows(&self) -> usize {
        self.partial_rows
    }

    /// [`Self::partial_rows`] of any order of `tokens` tokens, at most.
    pub fn most_partial_rows(tokens: usize) -> usize {
        // A token that stands at 65 places has two segments, the largest number for its places.
        2 * (tokens / (SEGMENT + 1))
    }

    /// [`Self::words`] of any order of `tokens` tokens, at most.
    pub fn most_words(tokens: usize) -> usize {
        4 * (tokens + tokens / (SEGMENT + 1)) + tokens
    }

    /// What the device reads: segments, joined segments, places.
    pub fn words(&self) -> Vec<i32> {
        self.parts().concat()
    }

    /// [`Self::words`] where they lie.
    pub(crate) fn parts(&self) -> [&[i32]; 3] {
        [self.segments.as_flattened(), self.joined.as_flattened(), &self.places]
    }

    /// Its bytes, as they lie in memory.
    pub fn bytes(&self) -> Vec<u8> {
        array_bytes(&self.words())
    }
}

impl Block for Embedding<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let dtype = operand_dtype("table", self.table.dtype)?;
        let [tokens, width] = self.out.layout.shape;
        let [rows, _] = self.table.layout.shape;
        let table = matrix("table", &self.table, [rows, width], dtype)?;
        let out = matrix("out", &self.out, [tokens, width], dtype)?;
        integers("tokens", &self.tokens, tokens)?;
        accesses.read("table", &self.table)?;
        accesses.read_array("tokens", &self.tokens)?;
        accesses.write("out", &self.out)?;
        let vector = vector(dtype, &[table, out], &[width]);
        let file = File::Embedding { narrow: false };
        let source = Source { file, dtype, vector, threads: THREADS };
        let parameters = EmbeddingParams {
            table,
            out,
            tokens: self.tokens.address,
            width: count("columns", width)?,
            scale: self.scale,
            first: count("tokens before a part", self.first.unwrap_or(0))?,
            rows: count("rows of a table", rows)?,
        };
        let columns = width.div_ceil(vector * THREADS as usize);
        Ok(vec![KernelLaunch::new(&source, "fv_embedding", [tokens, columns], &parameters)?])
    }
}

impl Block for EmbeddingBackward<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let Self { order, .. } = self;
        let dtype = operand_dtype("d_out", self.d_out.dtype)?;
        let [rows, width] = self.d_table.layout.shape;
        let d_out = matrix("d_out", &self.d_out, [order.places.len(), width], dtype)?;
        let is_f32 = self.d_table.dtype == DType::F32;
        let sum_dtype = if is_f32 { DType::F32 } else { dtype };
        let d_table = dense("d_table", &self.d_table, [rows, width], sum_dtype)?;
        let partial_shape = [order.partial_rows, width];
        let partial = dense("partial", &self.partial, partial_shape, DType::F32)?;
        let is_whole = self.first.is_none();
        if is_whole && !order.places.is_empty() && order.last as usize >= rows {
            return Err(GpuError::argument(format!(
                "token {} is beyond the {rows} rows of d_table",
                order.last
            )));
        }
        let fours = order.segments.len() + order.joined.len();
        array("words", &self.words, ElementType::I32, 4 * fours + order.places.len())?;
        accesses.read("d_out", &self.d_out)?;
        accesses.read_array("words", &self.words)?;
        accesses.write("d_table", &self.d_table)?;
        accesses.write("partial", &self.partial)?;
        let four = size_of::<[i32; 4]>() as Address;
        let joined = self.words.address + four * order.segments.len() as Address;
        let mut parameters = EmbeddingBackwardParams {
            d_out,
            d_table,
            order: self.words.address + four * fours as Address,
            segments: self.words.address,
            partial,
            width: count("columns", width)?,
            scale: self.scale,
            first: count("tokens before a part", self.first.unwrap_or(0))?,
            rows: count("rows of a table", rows)?,
        };
        let vector = vector(dtype, &[d_out], &[width]);
        let whole = whole_f32(d_table) && whole_f32(partial);
        let vector = if whole { vector } else { 1 };
        let file = File::Embedding { narrow: sum_dtype != DType::F32 };
        let wide = width >= vector * THREADS_OF_WIDE_ROWS as usize;
        let threads = if wide { THREADS_OF_WIDE_ROWS } else { THREADS };
        let source = Source { file, dtype, vector, threads };
        let columns = |elems: usize| width.div_ceil(elems * threads as usize);
        let grid = [order.segments.len(), columns(vector)];
        let mut launches =
            vec![KernelLaunch::new(&source, "fv_embedding_backward", grid, &parameters)?];
        if !order.joined.is_empty() {
            parameters.segments = joined;
            let grid = [order.joined.len(), columns(1)];
            launches.push(KernelLaunch::new(&source, "fv_embedding_join", grid, &parameters)?);
        }
        Ok(launches)
    }
}
