// Parts of fv_forward: work items, the iteration over tiles of keys, loads of Q, K and V, and the two
// matrix products.
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

constexpr float RESCALE_THRESHOLD = 8.f;                   // as an exponent of 2: P is at most 2^8
constexpr float LARGE_SCORE = 4096.f;                      // see is_large in forward.cu
// Whether Q stays in registers throughout: where they suffice beside S and O.
constexpr bool Q_IN_REGISTERS = FV_DTYPE != 2 && M * (FV_DP / 16 + N + N_OUT) * 4 <= 192;

// Whether the score function runs in a loop instead of being unrolled.
constexpr bool SCORES_IN_LOOP = is_long(ALL, SCORE_INSTRUCTIONS);

// Whether masked and unmasked steps are compiled separately: not in f32, where a step is three times as
// long, gains less, and the second copy costs two seconds of compilation.
constexpr bool SPECIALIZE_MASKED = FV_DTYPE != 2;

// Whether the epilogue writes out through the smem of Q, for coalesced 16-byte stores.
constexpr bool OUT_THROUGH_SMEM = !FV_KV_SPLIT && !FV_PACK_GQA && FV_ALIGN == 16 && FV_DV * sizeof(OutElem) % 16 == 0
                         && FV_DVP * int(sizeof(OutElem)) < PITCH_K;

constexpr int HEADS = FV_PACK_GQA ? FV_GROUP : 1;          // query heads of a tile,
constexpr int QUERIES = FV_BM / HEADS;                     // queries of each

static_assert(QUERIES > 0, "more heads than rows");
static_assert(FV_BM % (16 * FV_WARPS) == 0 && FV_BN % 16 == 0, "tiles do not fit the warps");
static_assert(FV_STAGES == 1 || FV_STAGES == 2, "one or two stages");

// Loads the rows of a tile of queries.
__device__ void load_queries(const ForwardParams& p, const Sequence& sequence, int head0, int query0, int rows,
                             u32 target) {
    const int first = sequence.q_start + query0;
    if constexpr (FV_PACK_GQA) {
        load_tile_from<FV_BM, FV_D, FV_DP>(target, rows, p.q.elem, [&](int row, int) {
            return rows_of(p.q, sequence.q_batch, head0 + row % HEADS, first + row / HEADS, 1).data;
        });
    } else {
        load_tile<FV_BM, FV_D, FV_DP>(target, rows_of(p.q, sequence.q_batch, head0, first, rows));
    }
}

// Paged KV: the offsets of the rows of a tile. Each lane looks up the pages of a few of the rows that its
// warp copies, and the lanes exchange offsets by shuffles.
template <int COLUMNS>
struct PagedRows {
    static constexpr int ROWS_PER_PASS = Chunks<COLUMNS>::ROWS_PER_PASS,
                         ROWS_PER_WARP = 32 / Chunks<COLUMNS>::THREADS_PER_ROW;    // of these rows, those of a warp
    static constexpr int EACH = ceil_div(ceil_div(FV_BN, ROWS_PER_PASS) * ROWS_PER_WARP, 32);
    i64 offset[EACH];

    // Keys `first` .. of the `count` keys of `sequence`.
    __device__ PagedRows(const ForwardParams& p, const View& view, int count, int sequence, int first) {
        const int row0 = threadIdx.x / 32 * ROWS_PER_WARP;
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int n = i * 32 + threadIdx.x % 32;
            const int key = first + row0 + n / ROWS_PER_WARP * ROWS_PER_PASS + n % ROWS_PER_WARP;
            offset[i] = row_in_pages(p, view, sequence, min(key, count - 1));
        }
    }

    // Elements before the row that this lane copies in pass `pass`.
    __device__ i64 at(int pass) const {
        const int n = pass * ROWS_PER_WARP;
        return __shfl_sync(0xffffffff, offset[n / 32], n % 32 + threadIdx.x % 32 / Chunks<COLUMNS>::THREADS_PER_ROW);
    }
};

// Loads a tile of K or V: rows `first` .. of `all` rows of a sequence, zeros past the last.
template <int DIM, int COLUMNS>
__device__ void load_keys(const ForwardParams& p, const View& view, const Rows& all, int sequence, int head_kv,
                          int first, u32 target) {
    if constexpr (FV_PAGED) {
        const PagedRows<COLUMNS> rows(p, view, all.count, sequence, first);
        load_tile_from<FV_BN, DIM, COLUMNS>(target, all.count - first, all.elem,
                                            [&](int, int pass) { return all.data + rows.at(pass) * ELEM_BYTES; });
    } else {
        load_tile<FV_BN, DIM, COLUMNS>(target,
                                       {all.data + first * all.row * ELEM_BYTES, all.row, all.elem, all.count - first});
    }
}

// The offset of this lane's first element of V, in the order of `p_fragment`.
__device__ u32 lane_offset_v() {
    if constexpr (FV_DTYPE != 2) return lane_offset_b<true>(PITCH_V);
    int lane = threadIdx.x % 32;
    return (lane & 3) * 2 * PITCH_V + (lane >> 2) * 4;
}

// The left operand of Q K^T: a warp's rows of Q, in registers throughout or read from smem in each
// step.
struct QOperand {
    u32 address;
    FragmentA fragments[Q_IN_REGISTERS ? FV_DP / MMA_K : 1][M];

    __device__ FragmentA read(int k, int m) const {
        return load_a<false, PITCH_K>(address + k * 32 + m * 16 * PITCH_K);
    }
    __device__ void hold() {
        if constexpr (Q_IN_REGISTERS)
            #pragma unroll
            for (int i = 0; i < FV_DP / MMA_K * M; ++i) fragments[i / M][i % M] = read(i / M, i % M);
    }
    __device__ FragmentA at(int k, int m) const {
        if constexpr (Q_IN_REGISTERS) return fragments[k][m];
        else return read(k, m);
    }
};

// s = Q K^T for keys 8 FROM .. 8 TO. `between(i)` is called after each of the products
// i = 0 .. FV_DP / MMA_K * (TO - FROM) / 2: other arithmetic overlaps with the tensor cores there.
template <int FROM, int TO, typename F>
__device__ void multiply_qk(float (&s)[M][N][4], const QOperand& queries, u32 keys, F between) {
    constexpr int UNROLL = unrolled_steps<M, N>(FV_DP / MMA_K);
    #pragma unroll UNROLL
    for (int k = 0; k < FV_DP / MMA_K; ++k) {
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

// k-step k of P as the left operand of P V: keys 16 k .. (8 k .. in f32).
__device__ FragmentA p_fragment(const float (&p)[N][4], int k) {
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

// out += P V, where `exponentiate(m, n, i)` turns s[m][n][i] into P: between the mma of one k-step for
// the next k-step, so that exponentials overlap with the tensor cores.
template <typename F>
__device__ void multiply_pv(float (&out)[M][N_OUT][4], float (&s)[M][N][4], u32 values, F exponentiate) {
    constexpr int K = FV_BN / MMA_K;
    constexpr int EACH = MMA_K / 8 * 4 * M;                 // scores of a k-step
    auto exponentiate_some = [&](int k, int from, int to) {
        #pragma unroll
        for (int j = 0; j < EACH; ++j)
            if (j >= from && j < to) exponentiate(j / 4 % M, k * (MMA_K / 8) + j / 4 / M, j % 4);
    };
#if FV_DTYPE == 2
    // Column by column, so that few of the separate 3xTF32 accumulators are live together: with more,
    // large dims spill.
    FragmentA fragment[M][K];
    #pragma unroll
    for (int k = 0; k < K; ++k) {
        exponentiate_some(k, 0, EACH);
        #pragma unroll
        for (int m = 0; m < M; ++m) fragment[m][k] = p_fragment(s[m], k);
    }
    #pragma unroll
    for (int n = 0; n < N_OUT; ++n) {
        float sum[M][1][4];
        clear(sum);
        #pragma unroll
        for (int k = 0; k < K; ++k) {
            u32 address = values + k * MMA_K * PITCH_V + n * 8 * ELEM_BYTES;
            Tf32Pair first = split_tf32(__float_as_uint(load_shared(address)));
            Tf32Pair second = split_tf32(__float_as_uint(load_shared(address + PITCH_V)));
            #pragma unroll
            for (int m = 0; m < M; ++m) multiply_tf32x3(sum[m][0], fragment[m][k], first, second);
        }
        #pragma unroll
        for (int i = 0; i < M * 4; ++i) out[i / 4][n][i % 4] += sum[i / 4][0][i % 4];
    }
#else
    exponentiate_some(0, 0, EACH);
    #pragma unroll
    for (int k = 0; k < K; ++k) {
        FragmentA fragment[M];
        #pragma unroll
        for (int m = 0; m < M; ++m) fragment[m] = p_fragment(s[m], k);
        #pragma unroll
        for (int n = 0; n < N_OUT; n += 2) {
            u32 pair[4];
            load_matrices<true>(pair, values + k * MMA_K * PITCH_V + n * 8 * ELEM_BYTES);
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply_add(out[m][n], fragment[m], pair[0], pair[1]);
                multiply_add(out[m][n + 1], fragment[m], pair[2], pair[3]);
            }
            if (k + 1 < K) exponentiate_some(k + 1, EACH * n / N_OUT, EACH * (n + 2) / N_OUT);
        }
    }
#endif
}
