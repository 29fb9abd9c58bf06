// How the producers of fv_forward bring tiles of Q, K and V into smem: by a tensor map, or, of an operand that no map
// has (FV_COPIED), by the lanes of a warp, row by row, into the same panels.

constexpr bool COPIED_Q = FV_COPIED & 1, COPIED_K = FV_COPIED & 2, COPIED_V = FV_COPIED & 4;
// Producers are warps instead of threads: each lane looks up pages, or copies rows.
constexpr bool BY_WARP = FV_PAGED || FV_COPIED != 0;
static_assert(FV_COPIED == 0 || FV_ALIGN >= 4, "cp.async copies 4 bytes at least");

// Rows at one distance.
struct EvenRows {
    const char* next;
    i64 bytes;                          // from a row to the next

    __device__ EvenRows(const Rows& rows) : next(rows.data), bytes(rows.row * ELEM_BYTES) {}
    __device__ void start(int row) {
        next += row * bytes;
        asm volatile("" : "+l"(next));  // or each row's address would be computed from the strides
    }
    __device__ void begin(int) {}
    __device__ const char* take(int, int distance) {
        const char* row = next;
        next += distance * bytes;
        return row;
    }
};

// Rows of keys in pages. Each lane finds one of 32 rows; it reads the table before the 32 rows that come before are
// copied.
struct PagedRows {
    const ForwardParams& p;
    const View& view;
    const char* pages;                  // row 0 of page 0
    const int sequence, last;           // the sequence, and its last key
    u32 key;                            // of this lane's next row,
    int page;                           // and what the table has for it
    const char* own;

    __device__ PagedRows(const ForwardParams& p, const View& view, const Sequence& of, int head, int first)
        : p(p), view(view), pages(rows_of(view, 0, head, 0, 1).data), sequence(of.b), last(of.k_len - 1) {
        read(first + threadIdx.x % 32);
    }
    __device__ void read(int of) {
        key = min(of, last);
        page = read_entry(p, sequence, key / u32(p.page_size));
    }
    __device__ void start(int) {}
    __device__ void begin(int block) {
        own = pages + (valid_page(p, sequence, page) * view.batch + key % u32(p.page_size) * view.row) * ELEM_BYTES;
        if (block + 32 < FV_BN) read(key + 32);
    }
    __device__ const char* take(int row, int) const {
        return reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<u64>(own), row));
    }
};

// Copies a tile of ROWS rows of DIM elements, zeros up to COLUMNS and from row `count` on, by the lanes of a warp: some
// copy chunks of one row, the others those of the rows below it. Of `source`, `start(row)` comes first, the lane's
// first row; `begin(block)` before the 32 rows from `block` on; and `take(row, distance)` for each of the lane's rows,
// `row` of the block.
template <int ROWS, int DIM, int COLUMNS, typename Source>
__device__ void copy_rows(u32 tile, int count, Source& source) {
    constexpr int BYTES = FV_ALIGN, ROW_BYTES = COLUMNS * ELEM_BYTES, CHUNKS = ROW_BYTES / BYTES;
    constexpr int LANES = min_of(32, CHUNKS & -CHUNKS), DOWN = 32 / LANES;
    const int lane = threadIdx.x % 32, own_row = lane / LANES, byte = lane % LANES * BYTES;
    // The 16-byte chunk c of row r lies at chunk c ^ (r & 7). What is added to a lane's row and byte has no bit of
    // theirs.
    const u32 target = tile + byte / PANEL_ROW * (ROWS * PANEL_ROW) + own_row * PANEL_ROW;
    const u32 in_row = byte % PANEL_ROW ^ (own_row & 7) * 16;
    source.start(own_row);
    #pragma unroll 1
    for (int block = 0; block < ROWS; block += 32) {
        source.begin(block);
        #pragma unroll
        for (int down = 0; down < 32; down += DOWN) {
            if (ROWS % 32 != 0 && block + down >= ROWS) break;
            const int row = block + down + own_row;
            const char* from = source.take(down + own_row, DOWN) + byte;
            const u32 to = target + (block + down) * PANEL_ROW;
            #pragma unroll
            for (int across = 0; across < ROW_BYTES; across += LANES * BYTES) {
                const int left = DIM == COLUMNS ? BYTES : min(max(DIM * ELEM_BYTES - byte - across, 0), BYTES);
                copy_async<BYTES>(
                    to + across / PANEL_ROW * (ROWS * PANEL_ROW) + (in_row ^ (across % PANEL_ROW ^ (down & 7) * 16)),
                    from + across, row < count ? left : 0);
            }
        }
    }
}

// How a producer copies tiles of K, or of V: a thread, or a warp.
template <int DIM, int COLUMNS, bool COPIED>
struct KeyTiles {
    const ForwardParams& p;
    const View& view;
    const TensorMap& map;
    const int head_step, batch_step, box_keys;

    static constexpr int BYTES = FV_BN * panels(DIM) * PANEL_ROW;
    // Arrivals of a warp that copies row by row; otherwise one, which announces the bytes.
    static constexpr int ARRIVALS = COPIED ? 32 : 1;

    // Copies keys `key` .. of a sequence and head. In between, when it has found out where they are, `begin()` waits
    // for the stage and announces the copy. `leads` is true for one thread.
    template <typename F>
    __device__ void copy(const Sequence& sequence, int head, int key, u32 target, CopyBarrier full, bool leads,
                         F begin) const {
        if constexpr (COPIED) {
            auto copy = [&](auto rows) {
                begin();
                copy_rows<FV_BN, DIM, COLUMNS>(target, sequence.k_len - key, rows);
                full.arrive_after_copies();
            };
            if constexpr (FV_PAGED) copy(PagedRows(p, view, sequence, head, key));
            else copy(EvenRows(rows_of(view, sequence.k_batch, head, sequence.k_start + key, 1)));
        } else if constexpr (FV_PAGED) {
            // A lane for each box, which is of one page.
            const int first = threadIdx.x % 32 * box_keys;
            const u32 at = min(key + first, sequence.k_len - 1), entry = at / u32(p.page_size);
            const int entry_page = read_entry(p, sequence.b, entry), row = at - entry * p.page_size;
            begin();
            const int page = valid_page(p, sequence.b, entry_page);
            if (first < FV_BN)
                #pragma unroll
                for (int i = 0; i < panels(DIM); ++i)
                    copy_panel(target + (i * FV_BN + first) * PANEL_ROW, map, full, i * PANEL_COLUMNS, row,
                               head * head_step, page * batch_step);
        } else {
            begin();
            if (leads)
                #pragma unroll
                for (int i = 0; i < panels(DIM); ++i)
                    copy_panel(target + i * FV_BN * PANEL_ROW, map, full, i * PANEL_COLUMNS, sequence.k_start + key,
                               head * head_step, sequence.k_batch * batch_step);
        }
    }
};
typedef KeyTiles<FV_D, FV_DP, COPIED_K> Keys;
typedef KeyTiles<FV_DV, FV_DVP, COPIED_V> Values;
