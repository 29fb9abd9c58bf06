//! The arguments of kernels, as `kernels/params.cuh` declares them.

/// A device address.
pub type Address = u64;

/// An operand or a destination, `[batch, head, row, element]`; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Address of element 0.
    pub data: Address,
    /// Stride of the batch axis.
    pub batch: i64,
    /// Stride of the head axis.
    pub head: i64,
    /// Stride of the length axis.
    pub row: i64,
    /// Stride of the last axis.
    pub elem: i64,
}

/// One f32 for each row, `[batch, head, row]`; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowView {
    /// Address of element 0.
    pub data: Address,
    /// Stride of the batch axis.
    pub batch: i64,
    /// Stride of the head axis.
    pub head: i64,
    /// Stride of the length axis.
    pub row: i64,
}

/// One independent problem inside the operands.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sequence {
    /// The batch index that mods see.
    pub b: i32,
    /// Index on the batch axis of q, out, lse.
    pub q_batch: i32,
    /// Index on the batch axis of k and v.
    pub k_batch: i32,
    /// First row of q.
    pub q_start: i32,
    /// Number of queries.
    pub q_len: i32,
    /// First row of k and v.
    pub k_start: i32,
    /// Number of keys.
    pub k_len: i32,
    /// Row of [`Lists`] of its first tile.
    pub first_row: i32,
    /// Row of `dq_sum` of its first query, a multiple of 16 (backward only).
    pub sum_row: i32,
}

/// One tile of a sequence: the work of one block for one head.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tile {
    /// Index of the sequence.
    pub sequence: i32,
    /// Index of the tile in it.
    pub tile: i32,
}

/// Consecutive live tiles on the other axis.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// The first tile.
    pub first: i32,
    /// Twice the number of tiles, plus 1 when the mask has to be evaluated in them.
    pub count_kind: i32,
}

/// The runs of every tile.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lists {
    /// i32 `[rows]`: number of runs.
    pub counts: Address,
    /// [`Run`] `[rows, capacity]`.
    pub runs: Address,
    /// Most runs a row can have.
    pub capacity: i32,
    /// Rows between two heads; 0 for a mask that is the same for every head.
    pub head_stride: i32,
}

/// Arguments of the forward kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ForwardParams {
    /// Queries.
    pub q: View,
    /// Keys.
    pub k: View,
    /// Values.
    pub v: View,
    /// Output.
    pub out: View,
    /// Natural log of the denominator.
    pub lse: RowView,
    /// Largest score of each row, or address 0.
    pub max_score: RowView,
    /// f32 `[heads_q]`, or 0.
    pub sink: Address,
    /// [`Sequence`]s.
    pub sequences: Address,
    /// [`Tile`]s of queries.
    pub tiles: Address,
    /// For a tile of queries, the tiles of keys.
    pub lists: Lists,
    /// Factor on q·k.
    pub scale: f32,
    /// Query heads.
    pub heads_q: i32,
    /// Key/value heads.
    pub heads_kv: i32,
    /// Number of tiles.
    pub tile_count: i32,
    /// Shares that the keys of a tile are split in.
    pub splits: i32,
    /// f32 `[splits, partial_rows, dim_v]`.
    pub partial_out: Address,
    /// f32 `[splits, partial_rows]`.
    pub partial_max: Address,
    /// f32 `[splits, partial_rows]`.
    pub partial_sum: Address,
    /// Rows of a share.
    pub partial_rows: i64,
    /// Partial rows from one batch entry to the next.
    pub partial_batch: i64,
    /// Partial rows from one head to the next.
    pub partial_head: i64,
    /// i32 `[batch, page_stride]`, or 0.
    pub page_table: Address,
    /// Rows of a page.
    pub page_size: i32,
    /// Entries of the table for a sequence.
    pub page_stride: i32,
}

/// Arguments of the backward kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BackwardParams {
    /// Queries.
    pub q: View,
    /// Keys.
    pub k: View,
    /// Values.
    pub v: View,
    /// What the forward wrote.
    pub out: View,
    /// Gradient of `out`.
    pub d_out: View,
    /// Gradient of q.
    pub dq: View,
    /// Gradient of k.
    pub dk: View,
    /// Gradient of v.
    pub dv: View,
    /// What the forward wrote.
    pub lse: RowView,
    /// Gradient of lse, or address 0.
    pub d_lse: RowView,
    /// `Σ out·d_out − d_lse` of each row.
    pub delta: RowView,
    /// f32 `[heads_q]`, or 0.
    pub sink: Address,
    /// f32 `[heads_q]`, or 0.
    pub d_sink: Address,
    /// [`Sequence`]s.
    pub sequences: Address,
    /// [`Tile`]s of keys for `fv_backward`, of queries for every other kernel.
    pub tiles: Address,
    /// For a tile, the tiles of the other axis.
    pub lists: Lists,
    /// Sums over tiles of keys, to be zeroed before the launch: f32 `[heads_q, sum_rows, dim]`
    /// with `dim` rounded up to 16, in the order of accumulators.
    pub dq_sum: Address,
    /// Rows of `dq_sum` for a head: every sequence's queries, rounded up to 16.
    pub sum_rows: i64,
    /// Factor on q·k.
    pub scale: f32,
    /// Query heads.
    pub heads_q: i32,
    /// Key/value heads.
    pub heads_kv: i32,
    /// Number of tiles.
    pub tile_count: i32,
    /// 1 to add to dq, dk and dv.
    pub accumulate: i32,
    /// Sequences from a tile's own on that read the same keys and values.
    pub sharing: i32,
}
