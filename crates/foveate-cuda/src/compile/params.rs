//! The parameters of kernels, as `kernels/params.cuh` declares them.
//!
//! Every struct knows its bytes as the kernel reads them: each field at its offset, zeros between
//! them. A test compiles `params.cuh` and holds the offsets against these.

pub use foveate_gpu::abi::{Abi, Address, array_bytes};
use foveate_gpu::driver::TensorMap;

foveate_gpu::abi_structs! {
    /// An operand or a destination, `[batch, head, row, element]`; strides in elements.
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
        /// What each group of query heads of a key/value head adds to the distance of its heads;
        /// 0 where heads are evenly apart.
        pub group: i64,
    }

    /// One f32 for each row, `[batch, head, row]`; strides in elements.
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

    /// Scales of e4m3 operands, f32 `[batch, head, block]`; strides in elements.
    pub struct ScaleView {
        /// Address of element 0, or 0 for scales of 1.
        pub data: Address,
        /// Stride of the axis of batch entries or sequences.
        pub batch: i64,
        /// Stride of the head axis.
        pub head: i64,
        /// Stride of the axis of blocks.
        pub block: i64,
        /// Rows of a block.
        pub rows: i64,
    }

    /// One independent problem inside the operands.
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
        /// Row of `dq_accum` of its first query, a multiple of 16 (backward only).
        pub sum_row: i32,
    }

    /// One tile of a sequence: the work of one CTA for one head.
    pub struct Tile {
        /// Index of the sequence.
        pub sequence: i32,
        /// Index of the tile in it.
        pub tile: i32,
    }

    /// Consecutive live tiles on the other axis.
    pub struct Run {
        /// The first tile.
        pub first: i32,
        /// Twice the number of tiles, plus 1 when the mask has to be evaluated in them. Where a
        /// tile has several cells, their kinds take the place of the lowest bit.
        pub count_kind: i32,
    }

    /// The runs of every tile.
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
        /// Heads that take turns at each tile, when there is a mask.
        pub interleaved_heads: i32,
        /// Shares that the keys of a tile are split in.
        pub kv_splits: i32,
        /// f32 `[kv_splits, partial_rows, dim_v]`.
        pub partial_out: Address,
        /// f32 `[kv_splits, partial_rows]`.
        pub partial_max: Address,
        /// f32 `[kv_splits, partial_rows]`.
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
        /// Pages there are.
        pub page_count: i32,
        /// i32 `[4]` for an entry that is no page, in checked kernels.
        pub page_report: Address,
    }

    /// What the forward of the Hopper family takes besides, before its three tensor maps.
    pub struct PersistentParams {
        /// u32: a counter of items that CTAs have taken beyond the first of each, 0 before and
        /// after a launch. In the forward `[1 + items]`: after it for each item taken so the one
        /// that its CTA had before.
        pub taken: Address,
        /// Factors on the coordinates of the maps, 0 for axes of stride 0: head of the group.
        pub q_head: i32,
        /// Group of heads.
        pub q_group: i32,
        /// Batch entry.
        pub q_batch: i32,
        /// Head.
        pub k_head: i32,
        /// Batch entry.
        pub k_batch: i32,
        /// Head.
        pub v_head: i32,
        /// Batch entry.
        pub v_batch: i32,
        /// Head of the group, in the backward.
        pub d_out_head: i32,
        /// Group of heads.
        pub d_out_group: i32,
        /// Batch entry.
        pub d_out_batch: i32,
        /// Keys of a box of the maps of k and v that lie in pages.
        pub box_keys: i32,
        /// Of e4m3 operands: 1 where sequences lie one after another.
        pub packed: i32,
        /// Scales of queries.
        pub q_scale: ScaleView,
        /// Scales of keys.
        pub k_scale: ScaleView,
        /// Scales of values.
        pub v_scale: ScaleView,
        /// u32 `[rows of lists, slots of a row]` tiles: the mask of partial tiles, or 0.
        pub mask_bits: Address,
        /// i32 `[rows of lists, capacity]`: for each run where its first tile is, negative where it has no bits; or 0.
        pub mask_slots: Address,
    }

    /// Arguments of the kernel that transposes values of e4m3, a CTA for 64 columns of a head.
    pub struct TransposeValuesParams {
        /// Values.
        pub v: View,
        /// [`Sequence`] `[count]`.
        pub sequences: Address,
        /// `[batch, heads, dim_v, columns]` of bytes, to be written.
        pub values: Address,
        /// Sequences.
        pub count: i32,
        /// 1 where they lie one after another.
        pub packed: i32,
        /// Keys of a head with what rounds each sequence up to tiles.
        pub columns: i32,
        /// Keys of a tile, a multiple of 64.
        pub tile_kv: i32,
        /// Key/value heads.
        pub heads: i32,
    }

    /// Arguments of the backward kernels.
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
        /// dk of each query head, f32 `[batch of k, heads_q, rows of k, dim]`; with `FV_SPLIT_GQA`.
        pub head_dk: View,
        /// dv of each, alike.
        pub head_dv: View,
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
        /// [`Tile`]s of keys for `fv_backward` and `fv_group_sums`, of queries for every other kernel.
        pub tiles: Address,
        /// For a tile, the tiles of the other axis.
        pub lists: Lists,
        /// Sums over tiles of keys, to be zeroed before the launch: f32 `[heads_q, sum_rows, dim]`
        /// with `dim` rounded up to 16, in the order of accumulators.
        pub dq_accum: Address,
        /// Rows of `dq_accum` for a head: every sequence's queries, rounded up to 16.
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
        /// What the powers of rows whose lse is huge add up to, in the order of `delta`; 0 for
        /// plain scores of 16-bit operands.
        pub row_weight_sum: Address,
        /// KV heads that take turns at each tile of keys.
        pub interleaved_heads: i32,
        /// Tiles of queries of the longest sequence.
        pub dq_rank_columns: i32,
        /// i32 `[rows of lists, dq_rank_columns]`, or 0.
        pub dq_ranks: Address,
    }

    /// Arguments of the kernel that writes sequences and tiles from offsets in device memory: one
    /// CTA.
    pub struct SequencesParams {
        /// i32 `[count + 1]`: where the queries of sequences begin, and where the last ones end.
        pub cu_q: Address,
        /// The same for keys.
        pub cu_k: Address,
        /// [`Sequence`] `[count + 1]`, to be written; the last is empty.
        pub sequences: Address,
        /// [`Tile`] `[tile_capacity]`, to be written; those left over are of the empty sequence.
        pub tiles: Address,
        /// i32 `[4]` for an offset that had to be moved, or 0.
        pub report: Address,
        /// Sequences.
        pub count: i32,
        /// Packed rows of queries.
        pub rows_q: i32,
        /// Packed rows of keys.
        pub rows_k: i32,
        /// Most queries of a sequence.
        pub longest_q: i32,
        /// Most keys of a sequence.
        pub longest_k: i32,
        /// Queries of a tile, or keys.
        pub side: i32,
        /// 1 when the tiles are of keys, 0 when they are of queries.
        pub of_keys: i32,
        /// Capacity of `tiles`, and the row of lists of the empty sequence.
        pub tile_capacity: i32,
    }

    /// Arguments of the kernel that makes the range table of a captured buffer. Its grid is
    /// `[rows]`, of blocks of any size.
    pub struct RangeTableParams {
        /// The element of index 0.
        pub elems: Address,
        /// The table to be written: pairs of 4 bytes, `[levels, rows, blocks]`.
        pub table: Address,
        /// Product of the axes before the last one.
        pub rows: i64,
        /// Length of the last axis.
        pub length: i32,
        /// Type of the elements: the number of an `ElementType`.
        pub ty: i32,
        /// Distance of neighbours along the last axis, in elements.
        pub step: i64,
        /// Distance of neighbours along each axis before the last one, in elements.
        pub strides: [i64; 8],
        /// Length of each axis before the last one.
        pub lengths: [i32; 8],
        /// How many axes are before the last one.
        pub axes: i32,
    }

    /// Arguments of the kernel that builds block lists. Its grid is `[tiles, heads]` and a block
    /// has [`Self::THREADS`] threads and `Cells::list_bytes` of shared memory, before the tables that it
    /// makes for itself.
    pub struct BlockListsParams {
        /// [`Sequence`]s.
        pub sequences: Address,
        /// [`Tile`]s whose rows are made: of queries, or of keys.
        pub tiles: Address,
        /// i32 `[rows]`, [`Lists::counts`] to be written.
        pub counts: Address,
        /// [`Run`] `[rows, capacity]`, [`Lists::runs`] to be written.
        pub runs: Address,
        /// Most runs a row can have, at least 1. Where there are more, the closest are joined
        /// into partial ones.
        pub capacity: i32,
        /// Rows between two heads; 0 for a mask that is the same for every head, and a grid
        /// with one head.
        pub head_stride: i32,
        /// Queries of a tile.
        pub tile_q: i32,
        /// Keys of a tile.
        pub tile_kv: i32,
        /// 1 when the rows are tiles of keys, 0 when they are tiles of queries.
        pub of_keys: i32,
        /// Query heads of a key/value head.
        pub group: i32,
        /// Strips of queries of a tile that have cells of their own.
        pub strips: i32,
        /// 1 where a CTA makes range tables for itself: those of `struct Mods` that are told by their
        /// place in its shared memory.
        pub own_tables: i32,
        /// Tiles of the longest row: the columns of `ranks`.
        pub columns: i32,
        /// i32 `[rows, columns]`, `BackwardParams::dq_ranks` to be written.
        pub ranks: Address,
        /// Tiles of a row that there is room for in `mask_bits`.
        pub row_slots: i32,
        /// `PersistentParams::mask_bits` to be written.
        pub mask_bits: Address,
        /// `PersistentParams::mask_slots` to be written.
        pub mask_slots: Address,
    }
}

/// Bytes of arguments that every driver takes for a launch.
const LAUNCH_BYTES: usize = 4096;

/// Bytes of `struct Mods` beside the arguments of any kernel: most are those of a Hopper backward, with four tensor
/// maps at the end, at multiples of their alignment.
pub(crate) const MODS_BYTES: usize =
    (LAUNCH_BYTES - 4 * size_of::<TensorMap>()) / align_of::<TensorMap>() * align_of::<TensorMap>()
        - size_of::<BackwardParams>()
        - size_of::<PersistentParams>();

impl BlockListsParams {
    /// Threads of a CTA.
    pub const THREADS: usize = 256;
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;
    use foveate_gpu::Arch;
    use foveate_gpu::cache::Cache;
    use foveate_gpu::nvrtc::Compiler;

    #[test]
    fn bytes_are_those_of_the_fields_with_zeros_between() {
        let run = Run { first: 3, count_kind: -2 };
        assert_eq!(run.bytes(), [3i32.to_ne_bytes(), (-2i32).to_ne_bytes()].concat());
        let params = ForwardParams { page_report: 5, page_count: 7, ..Default::default() };
        let bytes = params.bytes();
        let at = std::mem::offset_of!(ForwardParams, page_count);
        assert_eq!(
            bytes[at..at + 16],
            [[7, 0, 0, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0, 0]].concat()
        );
        assert_eq!(array_bytes(&[run, run]), [run.bytes(), run.bytes()].concat());
    }

    #[test]
    fn params_cuh_declares_the_same_sizes_and_offsets() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let mut source =
            String::from("#define FV_GROUP 1\n") + include_str!("../../kernels/params.cuh");
        for (name, size, fields) in STRUCTS {
            writeln!(source, "static_assert(sizeof({name}) == {size});").unwrap();
            for (field, offset) in *fields {
                writeln!(
                    source,
                    "static_assert(__INTADDR__(&((({name}*)0)->{field})) == {offset});"
                )
                .unwrap();
            }
        }
        Cache::at(None)
            .compile(compiler, &source, Arch::new((8, 0)))
            .unwrap_or_else(|e| panic!("{e}"));
    }
}
