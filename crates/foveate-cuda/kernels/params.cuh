// Parameters that the host passes to kernels. src/compile/params.rs mirrors each field and tests the
// offsets.
//
// Strides are in elements. A problem is a list of sequences and a list of tiles: a dense problem has
// one sequence for each batch entry, a varlen problem one for each pair of offsets. A CTA computes one
// tile of one head, so the order of the list of tiles is the schedule.

typedef long long i64;
typedef unsigned int u32;

// [batch, head, row, element] of an operand or a destination. Query heads may come in groups of
// FV_GROUP with other data between the groups, as in an interleaved projection: `group` is the stride
// that each group adds to the head stride, 0 where the head stride is uniform.
struct View {
    void* data;
    i64 batch, head, row, elem, group;

    // Elements before row r of head h of batch entry b.
    __device__ i64 at(int b, int h, i64 r) const { return b * batch + h * head + h / FV_GROUP * group + r * row; }
};

// [batch, head, row] of lse, max_score, delta: f32.
struct RowView {
    float* data;
    i64 batch, head, row;
};

// [batch, head, block] of scales: f32, of batch entries or sequences b and blocks of so many of their rows; null for 1.
struct ScaleView {
    const float* data;
    i64 batch, head, block;
    i64 rows;
};

struct Sequence {
    int b;              // the batch index that mods see
    int q_batch;        // index on the batch axis of q, out, lse
    int k_batch;        // index on the batch axis of k and v
    int q_start, q_len; // rows of q
    int k_start, k_len; // rows of k and v
    int first_row;      // row of Lists of its first tile
    int sum_row;        // row of dq_accum of its first query, a multiple of 16 (backward only)
};

// Tile `tile` of a sequence: of queries in the forward, of keys in the backward.
struct Tile {
    int sequence;
    int tile;
};

// A run of consecutive live tiles on the other axis: tiles first .. first + (count_kind >> 1);
// the mask is evaluated in them when count_kind & 1.
//
// A tile of queries by keys may have several cells, strips of its queries by all of its keys. Then a run is of tiles
// that have the same cells, and its kind takes two bits for each, the first strip's lowest: whether it is live, and
// whether the mask is evaluated in it.
struct Run {
    int first;
    int count_kind;
};

// The runs of live tiles of the other axis, for each tile of the list's axis. The row of a tile is
// sequence.first_row + tile + head * head_stride, where head_stride is 0 for a mask that is the
// same for every head.
struct Lists {
    const int* counts;  // [rows] number of runs
    const Run* runs;    // [rows, capacity]
    int capacity;
    int head_stride;
};

struct ForwardParams {
    View q, k, v, out;
    RowView lse, max_score;   // max_score.data may be null
    const float* sink;        // [heads_q], or null
    const Sequence* sequences;
    const Tile* tiles;
    Lists lists;
    float scale;              // on q.k
    int heads_q, heads_kv;
    int tile_count;
    int interleaved_heads;    // heads that the schedule interleaves at each tile; see WorkItem
    // Split-KV: CTA z computes KV split z of a tile's live tiles and writes partial results that are
    // not normalised: out [kv_splits, partial_rows, FV_DV], row_max and the sum of e^(score - row_max),
    // [kv_splits, partial_rows] each. Row q of a head is partial row
    // q_batch * partial_batch + head * partial_head + q_start + q.
    int kv_splits;
    float* partial_out;
    float* partial_max;
    float* partial_sum;
    i64 partial_rows, partial_batch, partial_head;
    // Paged keys and values: row r of sequence b is row r % page_size of page
    // page_table[b * page_stride + r / page_size], which stands on the batch axis of k and v.
    const int* page_table;
    int page_size, page_stride, page_count;
    int* page_report;         // reports entries outside 0 .. page_count: {1, -1, sequence, entry}; see report_index
};

// What kernels of the Hopper family take besides, before their tensor maps.
struct PersistentParams {
    // How many items CTAs have taken beyond the first of each, 0 before and after a launch. In the forward
    // [1 + items]: after it for each item taken so the one that its CTA had before.
    u32* taken;
    // Factors on the coordinates of the maps, 0 for axes of stride 0.
    int q_head, q_group, q_batch, k_head, k_batch, v_head, v_batch;
    int d_out_head, d_out_group, d_out_batch;    // in the backward
    int box_keys;               // keys of a box of the maps of k and v that lie in pages: it divides a page, and a tile
    // Of e4m3 operands.
    int packed;                                  // sequences lie one after another, and values so: see first_value
    ScaleView q_scale, k_scale, v_scale;         // without FV_SCALE_BLOCKS of one block
    // With FV_MASK_BITS: what fv_mask_bits writes. Without lists of the device mask_slots is null.
    const u32* mask_bits;
    const int* mask_slots;
};

struct BackwardParams {
    View q, k, v, out, d_out, dq, dk, dv;
    // dk and dv of each query head, f32: [batch of k, heads_q, rows of k, columns]; with FV_SPLIT_GQA.
    View head_dk, head_dv;
    RowView lse, d_lse, delta;   // d_lse.data may be null; delta[row] = sum(out * d_out) - d_lse
    const float* sink;
    float* d_sink;               // [heads_q], or null
    const Sequence* sequences;
    const Tile* tiles;           // fv_backward, fv_group_sums: of FV_BN keys; every other kernel: of FV_BM queries
    Lists lists;                 // for a tile, the tiles of the other axis
    // dq before scale and rounding, zeroed by the host: [heads_q, sum_rows, FV_DP] f32 in the order of
    // accumulators: 16 rows x 8 columns at a time, see dq_accum_fragment in backward_device.cuh.
    // A sequence has its query 0 at row sum_row, and q_len rounded up to 16 rows.
    float* dq_accum;
    i64 sum_rows;                // a multiple of 16
    float scale;
    int heads_q, heads_kv;
    int tile_count;
    int accumulate;              // add to dq, dk, dv instead of overwriting
    // Sequences tile.sequence .. + sharing read the same keys and values: 1, or the batch size
    // when k and v are shared over the batch. The CTA sums their gradients.
    int sharing;
    // The sum of e^(score - lse) of rows whose lse is too large to hold it (see HUGE_LSE),
    // with the strides of delta. Null unless HAS_ROW_WEIGHT_SUM.
    float* row_weight_sum;
    int interleaved_heads;       // heads that take turns at each tile of keys; see KeysItem
    // Where dq is added in a fixed order: for each row of the lists and tile of queries, how many tiles of keys add to
    // it before; null without a mask, where that is the tile's number.
    int dq_rank_columns;
    const int* dq_ranks;         // [rows, dq_rank_columns]
};

// Where the values of a sequence begin among those that fv_transpose_values writes: each sequence has as many tiles of
// keys as it can need, which begin with it.
__device__ inline int first_value(const Sequence& sequence, int tile_kv, int packed) {
    return (sequence.k_start / tile_kv + (packed ? sequence.b : 0)) * tile_kv;
}

struct TransposeValuesParams {
    View v;
    const Sequence* sequences;   // [count]
    unsigned char* values;       // to be written: [batch, heads, FV_DV, columns], columns are keys; see first_value
    int count, packed;
    int columns;                 // a multiple of tile_kv, and that of 64
    int tile_kv;
    int heads;
};

struct SequencesParams {
    const int* cu_q;             // [count + 1] where sequences begin, and where the last one ends
    const int* cu_k;
    Sequence* sequences;         // [count + 1] to be written; the last is empty
    Tile* tiles;                 // [tile_capacity] to be written, tiles of queries or of keys
    int* report;    // reports offsets that were clamped: {1, OFFSETS_Q or OFFSETS_K, index, offset}; or null
    int count;
    int rows_q, rows_k;          // of the tensors
    int longest_q, longest_k;    // of a sequence
    int side, of_keys;           // queries of a tile, or keys
    int tile_capacity;
};

struct RangeTableParams {
    const void* elems;           // the element of index 0
    void* table;                 // [levels, rows, blocks] of BoolEnds, IntEnds or FloatEnds
    i64 rows;
    int length;
    int ty;                      // of the elements: the number of an ElementType
    i64 step;                    // distance of neighbours along the last axis
    i64 strides[8];              // and along each of the axes before it,
    int lengths[8];              // of these lengths
    int axes;
};

struct BlockListsParams {
    const Sequence* sequences;
    const Tile* tiles;           // the rows of the lists, a CTA for each: tiles of queries, or of keys
    // The Lists that the kernel writes. With head_stride 0 the grid has one head.
    int* counts;
    Run* runs;
    int capacity, head_stride;
    int tile_q, tile_kv;         // queries and keys of a tile
    int of_keys;                 // 1 when the rows are tiles of keys
    int group;                   // query heads of a key/value head
    int strips;                  // cells of a tile; 1 when the rows are tiles of keys
    int own_tables;              // 1 where a CTA makes range tables for itself
    // Of fv_dq_ranks, which reads counts and runs.
    int columns;                 // tiles of the longest row
    int* ranks;                  // [rows, columns] BackwardParams::dq_ranks to be written, where a tile is live
    // Of fv_mask_bits, which reads them, too.
    int row_slots;               // tiles of a row that there is room for
    u32* mask_bits;              // [rows, row_slots] tiles to be written; see fv_mask_bits
    int* mask_slots;             // [rows, capacity] to be written: the slot of a run's first tile, or NO_SLOTS
};

// Of a run whose tiles have no mask bits: negative as far as a run goes.
constexpr int NO_SLOTS = -(1 << 30);
// Words of mask bits of a lane, of accumulators that have so many keys, or queries, across.
__device__ constexpr int mask_words(int across) { return (across + 63) / 64; }
