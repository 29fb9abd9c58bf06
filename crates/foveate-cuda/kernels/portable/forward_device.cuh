// What fv_forward is made of: the turns and steps of a block, how queries, keys and values come into
// shared memory, and its two products.
//
// Shared memory, with row(c) = c * sizeof(element) + 16 bytes:
//     FV_BM * row(FV_DP)                                       Q
//   + FV_STAGES * FV_BN * (row(FV_DP) + row(FV_DVP))           K, V
// FV_BM is a multiple of 16 * FV_WARPS, FV_BN a multiple of 16; FV_STAGES is 1 or 2.

constexpr int PITCH_K = FV_DP * ELEM_BYTES + PAD_BYTES;    // of K and Q
constexpr int PITCH_V = FV_DVP * ELEM_BYTES + PAD_BYTES;
constexpr int AT_STAGES = FV_BM * PITCH_K;
constexpr int AT_V = FV_BN * PITCH_K;                      // in a stage
constexpr int STAGE_BYTES = AT_V + FV_BN * PITCH_V;
constexpr int SHARED_BYTES = AT_STAGES + FV_STAGES * STAGE_BYTES;
extern "C" __device__ const int fv_shared_bytes = SHARED_BYTES;

constexpr int M = FV_BM / 16 / FV_WARPS;                   // accumulators of a warp: 16 rows,
constexpr int N = FV_BN / 8;                               // 8 keys,
constexpr int N_OUT = FV_DVP / 8;                          // 8 columns of out
constexpr int ALL = M * N * 4;                             // scores of a lane

constexpr float SLACK = 8.f;                               // in exponents of 2
constexpr float FAR = 4096.f;                              // in units of the scores
// Whether the queries stay in registers: where there is room beside S and O.
constexpr bool HOLDS_QUERIES = FV_DTYPE != 2 && M * (FV_DP / 16 + N + N_OUT) * 4 <= 192;

// Whether the scores of a step come from a loop.
constexpr bool IN_TURN = is_long(ALL, SCORE_STEPS);

// Whether steps that ask the mask have code of their own: not in f32, where a step is three times as
// long, gains less, and two of them take the compiler two seconds.
constexpr bool TWO_KINDS = FV_DTYPE != 2;

// Whether a warp's rows of out pass through the place of its queries, to be written in whole chunks.
constexpr bool STAGES_OUT = !FV_SPLIT && !FV_FOLD && FV_ALIGN == 16 && FV_DV * sizeof(OutElem) % 16 == 0
                         && FV_DVP * int(sizeof(OutElem)) < PITCH_K;

constexpr int HEADS = FV_FOLD ? FV_GROUP : 1;              // query heads of a tile,
constexpr int QUERIES = FV_BM / HEADS;                     // queries of each

static_assert(QUERIES > 0, "more heads than rows");
static_assert(FV_BM % (16 * FV_WARPS) == 0 && FV_BN % 16 == 0, "tiles do not fit the warps");
static_assert(FV_STAGES == 1 || FV_STAGES == 2, "one or two stages");

// What a block works on. Blocks start in the order of their numbers, and a mask's first tiles have the
// most work: p.heads_together heads take turns at each, so that light tiles are left for the end.
struct Turn {
    u32 tile, head;

    __device__ static Turn of(const ForwardParams& p) {
        if constexpr (!FV_MASK) return {blockIdx.x, blockIdx.y};
        const u32 tiles = gridDim.x, together = p.heads_together, first = blockIdx.y / together * together;
        const u32 heads = min(together, gridDim.y - first), number = (blockIdx.y - first) * tiles + blockIdx.x;
        return {number / heads, first + number % heads};
    }
};

// The steps of a block: tiles of keys, one after the other.
struct Steps {
    const Run* runs;
    int left;                           // runs behind the present one
    int budget = 0;                     // steps of this block's share that are left
    int tile = 0, end = 0;              // what is left of the present run
    bool run_evaluates = false;

    int key;                            // of the present step: its first key,
    bool evaluate;                      // whether the mask is evaluated

    // Share `split` of the tiles of keys that tile `queries` sees.
    __device__ Steps(const ForwardParams& p, const Sequence& sequence, const Tile& queries, int head, int split) {
        if constexpr (FV_MASK) {
            int row = sequence.first_row + queries.tile + head * p.lists.head_stride;
            runs = p.lists.runs + i64(row) * p.lists.capacity;
            left = __ldg(p.lists.counts + row);
        } else {
            left = 0;
            end = ceil_div(sequence.k_len, FV_BN);
        }
        if constexpr (FV_SPLIT) {
            int total = end;
            for (int i = 0; i < left; ++i) total += __ldg(&runs[i].count_kind) >> 1;
            int from = int(i64(total) * split / p.splits);
            budget = int(i64(total) * (split + 1) / p.splits) - from;
            while (from > 0) {
                open();
                int skipped = min(from, end - tile);
                tile += skipped;
                from -= skipped;
            }
        }
    }

    // Goes on to the next run where the present one is used up.
    __device__ bool open() {
        while (tile == end) {
            if (left == 0) return false;
            int count_kind = __ldg(&runs->count_kind);
            tile = __ldg(&runs->first);
            end = tile + (count_kind >> 1);
            run_evaluates = count_kind & 1;
            ++runs;
            --left;
        }
        return true;
    }

    __device__ bool next() {
        if (FV_SPLIT && budget-- == 0) return false;
        if (!open()) return false;
        key = tile++ * FV_BN;
        evaluate = run_evaluates;
        return true;
    }
};

// Where a share of a row lies among those of all splits.
[[maybe_unused]] __device__ i64 partial_row(const ForwardParams& p, const Sequence& sequence, int head, int query) {
    return blockIdx.z * p.partial_rows + sequence.q_batch * p.partial_batch + head * p.partial_head + sequence.q_start + query;
}

// The rows of a tile of queries.
__device__ void load_queries(const ForwardParams& p, const Sequence& sequence, int head0, int query0, int rows, u32 target) {
    const int first = sequence.q_start + query0;
    if constexpr (FV_FOLD) {
        load_tile_from<FV_BM, FV_D, FV_DP>(target, rows, p.q.elem, [&](int row, int) {
            return rows_of(p.q, sequence.q_batch, head0 + row % HEADS, first + row / HEADS, 1).data;
        });
    } else {
        load_tile<FV_BM, FV_D, FV_DP>(target, rows_of(p.q, sequence.q_batch, head0, first, rows));
    }
}

// Where the rows of a tile of keys or values lie in their pages: each lane looks up a few of those
// that its warp copies, and they tell each other.
template <int COLUMNS>
struct PagedRows {
    static constexpr int APART = Chunks<COLUMNS>::APART, ALONGSIDE = 32 / Chunks<COLUMNS>::ABREAST;  // of them, those of a warp
    static constexpr int EACH = ceil_div(ceil_div(FV_BN, APART) * ALONGSIDE, 32);
    i64 offset[EACH];

    // The keys of `sequence` from `first` on, of `count`. An entry of the table that is no page is
    // the nearest one.
    __device__ PagedRows(const ForwardParams& p, const View& view, int count, int sequence, int first) {
        const int* pages = p.page_table + i64(sequence) * p.page_stride;
        const int row0 = threadIdx.x / 32 * ALONGSIDE;
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int n = i * 32 + threadIdx.x % 32;
            const u32 key = min(first + row0 + n / ALONGSIDE * APART + n % ALONGSIDE, count - 1), entry = key / u32(p.page_size);
            const int page = __ldg(pages + entry), held = max(min(page, p.page_count - 1), 0);
            if (FV_CHECKED && page != held) report_index(p.page_report, -1, sequence, page);
            offset[i] = held * view.batch + (key - entry * p.page_size) * view.row;
        }
    }

    // Elements before the row that this lane copies in turn `turn`.
    __device__ i64 at(int turn) const {
        const int n = turn * ALONGSIDE;
        return __shfl_sync(0xffffffff, offset[n / 32], n % 32 + threadIdx.x % 32 / Chunks<COLUMNS>::ABREAST);
    }
};

// Keys or values from `first` on, of `all` of a sequence; zeros after the last.
template <int DIM, int COLUMNS>
__device__ void load_keys(const ForwardParams& p, const View& view, const Rows& all, int sequence, int head_kv,
                          int first, u32 target) {
    if constexpr (FV_PAGED) {
        const PagedRows<COLUMNS> rows(p, view, all.count, sequence, first);
        load_tile_from<FV_BN, DIM, COLUMNS>(target, all.count - first, all.elem,
                                            [&](int, int turn) { return all.data + rows.at(turn) * ELEM_BYTES; });
    } else {
        load_tile<FV_BN, DIM, COLUMNS>(target, {all.data + first * all.row * ELEM_BYTES, all.row, all.elem, all.count - first});
    }
}

// Where this lane's share of V begins, in the order of `weights`.
__device__ u32 lane_offset_values() {
    if constexpr (FV_DTYPE != 2) return lane_offset_b<true>(PITCH_V);
    int lane = threadIdx.x % 32;
    return (lane & 3) * 2 * PITCH_V + (lane >> 2) * 4;
}

// The left operand of the first product: a warp's queries, in registers throughout or read from
// shared memory for each step.
struct Queries {
    u32 address;
    FragmentA held[HOLDS_QUERIES ? FV_DP / STEP : 1][M];

    __device__ FragmentA read(int k, int m) const {
        return load_a<false, PITCH_K>(address + k * 32 + m * 16 * PITCH_K);
    }
    __device__ void hold() {
        if constexpr (HOLDS_QUERIES)
            #pragma unroll
            for (int i = 0; i < FV_DP / STEP * M; ++i) held[i / M][i % M] = read(i / M, i % M);
    }
    __device__ FragmentA at(int k, int m) const {
        if constexpr (HOLDS_QUERIES) return held[k][m];
        else return read(k, m);
    }
};

// s = Q K^T for keys 8 FROM .. 8 TO. `between(i)` is called after each of the products
// i = 0 .. FV_DP / STEP * (TO - FROM) / 2, to give the tensor cores company.
template <int FROM, int TO, typename F>
__device__ void multiply_keys(float (&s)[M][N][4], const Queries& queries, u32 keys, F between) {
    constexpr int TOGETHER = together<M, N>(FV_DP / STEP);
    #pragma unroll TOGETHER
    for (int k = 0; k < FV_DP / STEP; ++k) {
        FragmentA fragment[M];
        #pragma unroll
        for (int m = 0; m < M; ++m) fragment[m] = queries.at(k, m);
        #pragma unroll
        for (int n = FROM; n < TO; n += 2) {
            u32 pair[4];
            load_b<false, PITCH_K>(pair, keys + k * 32 + n * 8 * PITCH_K);
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply_add(s[m][n], fragment[m], pair[0], pair[1]);
                multiply_add(s[m][n + 1], fragment[m], pair[2], pair[3]);
            }
            between(k * (TO - FROM) / 2 + (n - FROM) / 2);
        }
    }
}

// Step k of P as the left operand of the second product: keys 16 k .. (8 k .. in f32).
__device__ FragmentA weights(const float (&p)[N][4], int k) {
    FragmentA a;
#if FV_DTYPE == 2
    // Slots t and t + 4 of the summed axis hold keys 2 t and 2 t + 1, as the accumulator has them.
    a.set(0, __float_as_uint(p[k][0]));
    a.set(1, __float_as_uint(p[k][2]));
    a.set(2, __float_as_uint(p[k][1]));
    a.set(3, __float_as_uint(p[k][3]));
#else
    a.bits[0] = narrow2<FV_DTYPE>(p[2 * k][0], p[2 * k][1]);
    a.bits[1] = narrow2<FV_DTYPE>(p[2 * k][2], p[2 * k][3]);
    a.bits[2] = narrow2<FV_DTYPE>(p[2 * k + 1][0], p[2 * k + 1][1]);
    a.bits[3] = narrow2<FV_DTYPE>(p[2 * k + 1][2], p[2 * k + 1][3]);
#endif
    return a;
}

// out += P V, where `weigh(m, n, i)` turns s[m][n][i] into P: between the products of one step for
// the step after it, so that the tensor cores have work while powers are computed.
template <typename F>
__device__ void multiply_values(float (&out)[M][N_OUT][4], float (&s)[M][N][4], u32 values, F weigh) {
    constexpr int K = FV_BN / STEP;
    constexpr int EACH = STEP / 8 * 4 * M;                 // scores of a step
    auto weigh_some = [&](int k, int from, int to) {
        #pragma unroll
        for (int j = 0; j < EACH; ++j)
            if (j >= from && j < to) weigh(j / 4 % M, k * (STEP / 8) + j / 4 / M, j % 4);
    };
#if FV_DTYPE == 2
    // Column by column, so that few of the sums that are kept apart are alive together: with more
    // there are not enough registers for large dims.
    FragmentA fragment[M][K];
    #pragma unroll
    for (int k = 0; k < K; ++k) {
        weigh_some(k, 0, EACH);
        #pragma unroll
        for (int m = 0; m < M; ++m) fragment[m][k] = weights(s[m], k);
    }
    #pragma unroll
    for (int n = 0; n < N_OUT; ++n) {
        float sum[M][1][4];
        clear(sum);
        #pragma unroll
        for (int k = 0; k < K; ++k) {
            u32 address = values + k * STEP * PITCH_V + n * 8 * ELEM_BYTES;
            Split first = split(__float_as_uint(load_shared(address)));
            Split second = split(__float_as_uint(load_shared(address + PITCH_V)));
            #pragma unroll
            for (int m = 0; m < M; ++m) multiply_split(sum[m][0], fragment[m][k], first, second);
        }
        #pragma unroll
        for (int i = 0; i < M * 4; ++i) out[i / 4][n][i % 4] += sum[i / 4][0][i % 4];
    }
#else
    weigh_some(0, 0, EACH);
    #pragma unroll
    for (int k = 0; k < K; ++k) {
        FragmentA fragment[M];
        #pragma unroll
        for (int m = 0; m < M; ++m) fragment[m] = weights(s[m], k);
        #pragma unroll
        for (int n = 0; n < N_OUT; n += 2) {
            u32 pair[4];
            load_matrices<true>(pair, values + k * STEP * PITCH_V + n * 8 * ELEM_BYTES);
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply_add(out[m][n], fragment[m], pair[0], pair[1]);
                multiply_add(out[m][n + 1], fragment[m], pair[2], pair[3]);
            }
            if (k + 1 < K) weigh_some(k + 1, EACH * n / N_OUT, EACH * (n + 2) / N_OUT);
        }
    }
#endif
}
