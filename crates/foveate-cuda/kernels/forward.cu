// Attention, forward: fv_forward<<<(tiles of queries, heads_q, splits), FV_WARPS * 32>>>
//
// A block owns FV_BM rows, queries of one head, and steps over the tiles of FV_BN keys that they
// see. A warp owns FV_BM / FV_WARPS rows, so the softmax of a row stays within four lanes:
//
//     S = Q K^T    S = score(scale S), -inf where the mask is false
//     P = 2^(unit S - reference)    sum += P    O += P V
//
// `unit` turns what S is kept in into exponents of 2: log2 e for scores, scale * log2 e where there
// is no score function and S stays unscaled (unless scale <= 0, which would turn the order round, or
// next to nothing).
// The reference of a row may be any number near its largest exponent. It follows only when an
// exponent exceeds it by more than SLACK = 8, which is rare; then sum and O are rescaled. P becomes
// the operand of the second product without leaving the registers, and the powers of one step of
// that product are computed between the instructions of the step before.
//
// One step, with two stages of K and V:         with one stage:
//
//     K, V of this step have landed, barrier        K has landed, barrier, start V
//     start K of the next step                      S, what is seen, largest scores
//     S, what is seen, largest scores               V has landed, barrier, start the next K
//     start V of the next step                      powers and O
//     powers and O
//
// Only a step whose run says so, or that has the last keys of a sequence, asks the mask and the length;
// there a warp whose rows see nothing of the tile does without powers. With 16-bit operands such steps
// have code of their own, so that neither kind waits for what the other needs. A row that sees nothing
// at all gives out = 0 and lse = -inf.
//
// With FV_FOLD, for few queries, the rows of a tile are those of all query heads of a key/value
// head, so that keys and values are read once for all of them: row r is query r / FV_GROUP of head
// r % FV_GROUP of the group, and the grid has heads_kv in place of heads_q. Where FV_GROUP does not
// divide FV_BM, the last rows are nobody's. The mask is one that does not tell heads apart.
//
// Shared memory, with row(c) = c * sizeof(element) + 16 bytes:
//     FV_BM * row(FV_DP)                                       Q
//   + FV_STAGES * FV_BN * (row(FV_DP) + row(FV_DVP))           K, V
// FV_BM is a multiple of 16 * FV_WARPS, FV_BN a multiple of 16; FV_STAGES is 1 or 2.
//
// Which tiles do best is the planner's to know (src/planner/known.rs); what each takes of an
// architecture is in conformance/kernel-resources.toml.
//
// With 16-bit operands a warp of 32 rows reads each key for twice the work of one of 16: at head
// dims up to 128 shared memory's bandwidth would otherwise be the limit.

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

// Two columns of a row of out, into the place of the warp's queries in shared memory.
__device__ void stage_out(u32 queries, int row, int column, float x, float y) {
    const u32 at = queries + row * PITCH_K + column * int(sizeof(OutElem));
    if constexpr (FV_OUT_DTYPE == 2) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(at), "f"(x), "f"(y) : "memory");
    else asm volatile("st.shared.u32 [%0], %1;" :: "r"(at), "r"(narrow2<FV_OUT_DTYPE>(x, y)) : "memory");
}

struct Yes { static constexpr bool value = true; };
struct No { static constexpr bool value = false; };

// Where shared memory has room for two blocks at most, the assembler need not spare registers for a
// third, as it does for some f32 kernels, which took a fifth longer.
constexpr int BLOCKS = FV_DTYPE == 2 && THREADS <= 128 && 3 * SHARED_BYTES > 228 * 1024 ? 2 : 0;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fv_forward(const __grid_constant__ ForwardParams p, const __grid_constant__ Mods mods) {
    extern __shared__ __align__(16) char shared[];
    const u32 base = shared_address(shared);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Turn turn = Turn::of(p);
    const int head0 = turn.head * HEADS, head_kv = head0 / FV_GROUP;
    const Tile tile = p.tiles[turn.tile];
    const Sequence sequence = p.sequences[tile.sequence];
    const int query0 = tile.tile * QUERIES;
    const int rows = min(QUERIES, sequence.q_len - query0) * HEADS;
    const int row0 = warp * M * 16 + lane / 4;             // this lane's first row and column of S
    const int column0 = lane % 4 * 2;
    const bool unscaled = !FV_SCORE && p.scale > 1e-20f;
    const float unit = unscaled ? p.scale * LOG2_E : LOG2_E;

    Steps steps(p, sequence, tile, head0, blockIdx.z);
    load_queries(p, sequence, head0, query0, rows, base);
    const Rows of_k = rows_of(p.k, sequence.k_batch, head_kv, sequence.k_start, sequence.k_len);
    const Rows of_v = rows_of(p.v, sequence.k_batch, head_kv, sequence.k_start, sequence.k_len);
    auto load_k = [&](int key, u32 stage) { load_keys<FV_D, FV_DP>(p, p.k, of_k, sequence.b, head_kv, key, stage); };
    auto load_v = [&](int key, u32 stage) { load_keys<FV_DV, FV_DVP>(p, p.v, of_v, sequence.b, head_kv, key, stage + AT_V); };
    bool more = steps.next();
    if (more) {
        load_k(steps.key, base + AT_STAGES);
        if constexpr (FV_STAGES == 2) load_v(steps.key, base + AT_STAGES);
    }

    Queries queries;
    queries.address = base + warp * M * 16 * PITCH_K + lane_offset_a<false>(PITCH_K);
    if constexpr (HOLDS_QUERIES) {
        wait_copies();
        __syncthreads();
        queries.hold();
    }
    const u32 keys = lane_offset_b<false>(PITCH_K);
    const u32 values = AT_V + lane_offset_values();

    float out[M][N_OUT][4];
    clear(out);
    float top[M][2], ceiling[M][2], sum[M][2];             // `top` and `sum` of this lane's columns
    #pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        top[i / 2][i % 2] = ceiling[i / 2][i % 2] = -infinity();
        sum[i / 2][i % 2] = 0.f;
    }
    // The exponent that a row's powers are relative to.
    auto reference = [&](int m, int half) {
        return ceiling[m][half] == -infinity() ? 0.f : fmaf(ceiling[m][half], unit, -SLACK);
    };
    // A score function may give -1e30 to a whole row. Only a difference of scores that is taken before
    // anything is multiplied is then small; products of both differ by their rounding. f32 always takes
    // it so, 16-bit operands where a largest score is far from 0.
    constexpr bool apart = FV_DTYPE == 2;
    auto is_far = [&](float highest) { return apart || (FV_SCORE && fabsf(highest) > FAR && highest != -infinity()); };

    int parity = 0;
    while (more) {
        const u32 stage = base + AT_STAGES + parity * STAGE_BYTES;
        const int key0 = steps.key;
        const bool evaluate = steps.evaluate;
        wait_copies();
        __syncthreads();
        more = steps.next();
        if constexpr (FV_STAGES == 2) parity ^= 1;
        const u32 next_stage = base + AT_STAGES + parity * STAGE_BYTES;
        if constexpr (FV_STAGES == 1) load_v(key0, stage);
        else if (more) load_k(steps.key, next_stage);

        // Mods are called past the ends of a sequence too, within the tile.
        auto row_of = [&](int m, int i) {
            const u32 row = row0 + m * 16 + i / 2 * 8;
            return FV_BM % HEADS == 0 ? row : min(row, QUERIES * HEADS - 1u);
        };
        auto query_of = [&](int m, int i) { return query0 + int(row_of(m, i) / HEADS); };
        auto place_of = [&](int m, int i) -> Place {
            return {sequence.b, head0 + int(row_of(m, i) % HEADS), head_kv, sequence.q_len, sequence.k_len};
        };
        auto key_of = [&](int n, int i) { return key0 + column0 + n * 8 + i % 2; };
        // Calls `f(m, n, i)` for numbers from .. to of this lane's scores.
        auto for_each = [&](int from, int to, auto f) {
            #pragma unroll
            for (int j = from; j < to; ++j) f(j / 4 % M, j / 4 / M, j % 4);
        };

        // The step, evaluating what is seen or taking everything for seen.
        const bool ends = key0 + FV_BN > sequence.k_len;
        auto step = [&](auto evaluates) {
            constexpr bool EVALUATES = decltype(evaluates)::value;
            float s[M][N][4];
            clear(s);
            auto score = [&](int m, int n, int i) {
                float& x = s[m][n][i];
                x *= p.scale;
                if constexpr (FV_SCORE) x = fv_score(mods, place_of(m, i), query_of(m, i), key_of(n, i), x);
            };
            if constexpr (IN_TURN) {
                multiply_keys<0, N>(s, queries, stage + keys, [](int) {});
                #pragma unroll 1
                for (int at = 0; at < M * N; ++at) {
                    const int m = at / N, n = at % N;
                    #pragma unroll
                    for (int i = 0; i < 4; ++i)
                        s[0][0][i] = fv_score(mods, place_of(m, i), query_of(m, i), key_of(n, i), s[0][0][i] * p.scale);
                    rotate(s);
                }
            } else if constexpr (FV_SCORE && FV_DTYPE != 2) {
                // The scores of the first keys are finished between the products of the others.
                constexpr int FIRST = N / 4 * 2, EACH = M * FIRST * 4, PRODUCTS = FV_DP / STEP * (N - FIRST) / 2;
                // A loop as long as a share at most: one over all scores would be copied for every product
                // before the compiler drops what is not in the share, which takes it seconds.
                constexpr int SHARE = ceil_div(EACH, PRODUCTS);
                auto score_share = [&](int product) {
                    const int from = EACH * product / PRODUCTS, to = EACH * (product + 1) / PRODUCTS;
                    #pragma unroll
                    for (int k = 0; k < SHARE; ++k)
                        if (from + k < to) for_each(from + k, from + k + 1, score);
                };
                multiply_keys<0, FIRST>(s, queries, stage + keys, [](int) {});
                multiply_keys<FIRST, N>(s, queries, stage + keys, score_share);
                for_each(EACH, ALL, score);
            } else {
                multiply_keys<0, N>(s, queries, stage + keys, [](int) {});
                if (!unscaled) for_each(0, ALL, score);
            }
            auto hide = [&](auto hidden) {
                for_each(0, ALL, [&](int m, int n, int i) { if (hidden(m, n, i)) s[m][n][i] = -infinity(); });
            };
            if (EVALUATES && (TWO_KINDS || evaluate || ends))
                hide([&](int m, int n, int i) {
                    return !fv_mask(mods, place_of(m, i), query_of(m, i), key_of(n, i)) | (key_of(n, i) >= sequence.k_len);
                });
            else if (!FV_MASK && ends) hide([&](int m, int n, int i) { return key_of(n, i) >= sequence.k_len; });

            bool rises = false, sees = !EVALUATES;
            #pragma unroll
            for (int m = 0; m < M; ++m)
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float largest = fmaxf(s[m][0][half * 2], s[m][0][half * 2 + 1]);
                    #pragma unroll
                    for (int n = 1; n < N; ++n) largest = fmaxf(largest, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
                    sees |= largest != -infinity();
                    top[m][half] = fmaxf(top[m][half], largest);
                    rises |= top[m][half] > ceiling[m][half];
                }
            if (__any_sync(0xffffffff, rises)) {
                #pragma unroll
                for (int m = 0; m < M; ++m)
                    #pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        // A row that has seen nothing yet has nothing to rescale.
                        const float before = ceiling[m][half], reference_before = reference(m, half);
                        ceiling[m][half] = fmaxf(before, over_quad_max(top[m][half]) + SLACK / unit);
                        const float falls = is_far(before) ? (before - ceiling[m][half]) * unit : reference_before - reference(m, half);
                        const float shrink = before == -infinity() ? 1.f : exp2_score(falls);
                        sum[m][half] *= shrink;
                        #pragma unroll
                        for (int n = 0; n < N_OUT; ++n) {
                            out[m][n][half * 2] *= shrink;
                            out[m][n][half * 2 + 1] *= shrink;
                        }
                    }
            }

            if constexpr (FV_STAGES == 1) {
                wait_copies();
                __syncthreads();
                if (more) load_k(steps.key, stage);
            } else if (more) {
                load_v(steps.key, next_stage);
            }
            if (EVALUATES && !__any_sync(0xffffffff, sees)) return;

            float shift[M][2];
            bool far = false;
            auto offset = [&](int m, int half) { return ceiling[m][half] == -infinity() ? 0.f : -ceiling[m][half]; };
            #pragma unroll
            for (int i = 0; i < M * 2; ++i) {
                shift[i / 2][i % 2] = apart ? offset(i / 2, i % 2) : -reference(i / 2, i % 2);
                far |= is_far(ceiling[i / 2][i % 2]);
            }
            if (FV_SCORE && !apart && __any_sync(0xffffffff, far)) {
                for_each(0, ALL, [&](int m, int n, int i) { s[m][n][i] += offset(m, i / 2); });
                #pragma unroll
                for (int i = 0; i < M * 2; ++i) shift[i / 2][i % 2] = SLACK;
            }
            auto weigh = [&](int m, int n, int i) {
                float& x = s[m][n][i];
                x = exp2_score(apart ? fmaf(x + shift[m][i / 2], unit, SLACK) : fmaf(x, unit, shift[m][i / 2]));
                sum[m][i / 2] += x;
                if constexpr (FV_KEEP)
                    if (!fv_keep(mods, place_of(m, i), query_of(m, i), key_of(n, i))) x = 0.f;
            };
            multiply_values(out, s, stage + values, weigh);
        };
        if (FV_MASK && (evaluate || ends || !TWO_KINDS)) step(Yes());
        else if constexpr (!FV_MASK || TWO_KINDS) step(No());
    }

    // What the rows have come to, relative to their largest scores.
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 row_of_tile = row0 + m * 16 + half * 8;
            const int query = query0 + int(row_of_tile / HEADS), head = head0 + int(row_of_tile % HEADS);
            const float largest = over_quad_max(top[m][half]), score = unscaled ? largest * p.scale : largest;
            const float above = is_far(ceiling[m][half]) ? fmaf(ceiling[m][half] - largest, unit, -SLACK)
                                                         : fmaf(-largest, unit, reference(m, half));
            float factor = score == -infinity() ? 0.f : exp2_score(above);
            const float total = over_quad_sum(sum[m][half]) * factor;
            if (int(row_of_tile) >= rows) continue;
            if constexpr (FV_KEEP) factor *= fv_keep_scale(mods);
            if constexpr (FV_SPLIT) {
                i64 row = blockIdx.z * p.partial_rows + sequence.q_batch * p.partial_batch
                        + head * p.partial_head + sequence.q_start + query;
                if (lane % 4 == 0) {
                    p.partial_max[row] = score;
                    p.partial_sum[row] = total;
                }
                #pragma unroll
                for (int n = 0; n < N_OUT; ++n)
                    #pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        int column = n * 8 + column0 + i;
                        if (column < FV_DV) p.partial_out[row * FV_DV + column] = out[m][n][half * 2 + i] * factor;
                    }
            } else {
                Row row = finish_row(p, sequence, head, query, score, total, lane % 4 == 0);
                row.factor *= factor;
                #pragma unroll
                for (int n = 0; n < N_OUT; ++n) {
                    const float x = out[m][n][half * 2], y = out[m][n][half * 2 + 1];
                    if constexpr (STAGES_OUT) stage_out(base, row0 + m * 16 + half * 8, n * 8 + column0, x * row.factor, y * row.factor);
                    else store_out(row, n * 8 + column0, x, y);
                }
            }
        }
    if constexpr (STAGES_OUT) {
        __syncwarp();
        constexpr int CHUNKS = max_of(1, FV_DV * int(sizeof(OutElem)) / 16), ABREAST = min_of(32, CHUNKS & -CHUNKS), APART = 32 / ABREAST;
        const int row = warp * M * 16 + lane / ABREAST, byte = lane % ABREAST * 16;
        const int left = rows - row;
        char* target = static_cast<char*>(p.out.data) + byte
                     + p.out.at(sequence.q_batch, head0, sequence.q_start + query0 + row) * sizeof(OutElem);
        #pragma unroll
        for (int down = 0; down < M * 16; down += APART) {
            if (down < left) {
                #pragma unroll
                for (int across = 0; across < CHUNKS * 16; across += ABREAST * 16)
                    *reinterpret_cast<uint4*>(target + across) =
                        *reinterpret_cast<const uint4*>(shared + (row + down) * PITCH_K + byte + across);
            }
            target += p.out.row * (APART * sizeof(OutElem));
        }
    }
}
