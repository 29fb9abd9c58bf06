// Gradients of k and v, and the sums for dq: fv_backward<<<(tiles of keys, heads_kv), FV_WARPS * 32>>>
//
// A block owns FV_BN keys of one key/value head. It steps over the tiles of FV_BM queries that see
// them, for every query head of the group (and every sequence that shares the keys), and
// recomputes the probabilities:
//
//     S = Q K^T    P = exp(score(scale S) - lse)            dV += P^T dO
//     dP = dO V^T  dS = P (dP - delta) dscore/ds            dK += dS^T Q     dQ += dS K
//
// dK and dV stay in registers until the end. dQ of a step is complete only after all blocks, so it
// is added to dq_sum in memory, in no fixed order; with FV_DETERMINISTIC this kernel leaves dq
// alone and fv_backward_dq computes it. `scale` joins dK at the end and dQ in fv_dq.
//
// One step, with two stages of Q and dO:
//
//     copies of this step have landed ---- barrier ---- start the copies of the next step
//     S, P -> shared      dP, dS -> shared
//     ------------------------------------ barrier
//     dV += P^T dO        dQ = dS K, added to dq_sum    dK += dS^T Q
//
// With one stage dQ comes last, and the next copies start before it, behind a third barrier.
//
// Shared memory: with row(c) = c * sizeof(element) + 16 bytes,
//     FV_BN * (row(FV_DP) + row(FV_DVP))                              K, V
//   + FV_STAGES * FV_BM * (row(FV_DP) + row(FV_DVP) + 8)              Q, dO, lse, delta
//   + 2 * FV_BM * row(FV_BN)                                          P, dS
// FV_BM and FV_BN are multiples of 16; FV_STAGES is 1 or 2. The warps must divide S evenly: some
// divisor `down` of FV_WARPS divides FV_BM / 16, and FV_WARPS / down divides FV_BN / 8.

constexpr int PITCH_K = FV_DP * ELEM_BYTES + PAD_BYTES;    // of K and Q
constexpr int PITCH_V = FV_DVP * ELEM_BYTES + PAD_BYTES;   // of V and dO
constexpr int PITCH_P = FV_BN * ELEM_BYTES + PAD_BYTES;    // of P and dS

constexpr int AT_V = FV_BN * PITCH_K;
constexpr int AT_STAGES = AT_V + FV_BN * PITCH_V;
constexpr int AT_D_OUT = FV_BM * PITCH_K;                  // in a stage
constexpr int AT_LSE = AT_D_OUT + FV_BM * PITCH_V;
constexpr int AT_DELTA = AT_LSE + FV_BM * 4;
constexpr int STAGE_BYTES = AT_DELTA + FV_BM * 4;
constexpr int AT_P = AT_STAGES + FV_STAGES * STAGE_BYTES;
constexpr int AT_DS = AT_P + FV_BM * PITCH_P;
constexpr int SHARED_BYTES = AT_DS + FV_BM * PITCH_P;
extern "C" __device__ const int fv_shared_bytes = SHARED_BYTES;

constexpr Warps OF_S = divide(FV_BM, FV_BN, true);         // warps over S and dP
constexpr Warps OF_K = divide(FV_BN, FV_DP, false);        // over dK
constexpr Warps OF_V = divide(FV_BN, FV_DVP, false);       // over dV
constexpr Warps OF_Q = divide(FV_BM, FV_DP, false);        // over dQ

static_assert(FV_BM % 16 == 0 && FV_BN % 16 == 0, "tiles are multiples of 16");
static_assert(FV_STAGES == 1 || FV_STAGES == 2, "one or two stages");
static_assert(OF_S.down > 0, "the warps cannot share the scores evenly");

// One tile of queries of one head.
struct Step {
    int share;      // sequence tile.sequence + share
    int head;       // query head
    int query;      // its first query
    bool evaluate;  // whether the mask is evaluated in it
};

// The steps of a block, one after the other.
struct Steps {
    int share = 0, member = -1;         // sequence, head of the group
    int run = 0, runs = 0;
    int tile = 0, end = 0;              // what is left of the present run
    bool evaluate = false;

    __device__ bool next(const BackwardParams& p, const Tile& keys, int head_kv, Step& step) {
        while (tile == end) {
            if (run == runs) {
                if (++member == FV_GROUP) {
                    member = 0;
                    if (++share == p.sharing) return false;
                }
                run = 0;
                runs = FV_MASK ? __ldg(p.lists.counts + row(p, keys, head_kv)) : 1;
            }
            if (FV_MASK) {
                const Run* at = p.lists.runs + i64(row(p, keys, head_kv)) * p.lists.capacity + run;
                int count_kind = __ldg(&at->count_kind);
                tile = __ldg(&at->first);
                end = tile + (count_kind >> 1);
                evaluate = count_kind & 1;
            } else {
                tile = 0;
                end = ceil_div(__ldg(&p.sequences[keys.sequence + share].q_len), FV_BM);
            }
            ++run;
        }
        step = {share, head_kv * FV_GROUP + member, tile * FV_BM, evaluate};
        ++tile;
        return true;
    }

    __device__ int row(const BackwardParams& p, const Tile& keys, int head_kv) const {
        return __ldg(&p.sequences[keys.sequence + share].first_row) + keys.tile
             + (head_kv * FV_GROUP + member) * p.lists.head_stride;
    }
};

__device__ void load_step(const BackwardParams& p, const Sequence* sequences, const Step& step, u32 stage) {
    const Sequence* s = sequences + step.share;
    int batch = __ldg(&s->q_batch), first = __ldg(&s->q_start) + step.query, count = __ldg(&s->q_len) - step.query;
    load_tile<FV_BM, FV_D, FV_DP>(stage, rows_of(p.q, batch, step.head, first, count));
    load_tile<FV_BM, FV_DV, FV_DVP>(stage + AT_D_OUT, rows_of(p.d_out, batch, step.head, first, count));
    load_row_values<FV_BM, 0>(stage + AT_LSE, p.lse, batch, step.head, first, count);
    load_row_values<FV_BM, FV_BM>(stage + AT_DELTA, p.delta, batch, step.head, first, count);
}

// Calls `f(m, n, i, row, column)` for each score of the warp: number i of accumulator (m, n).
template <typename F>
__device__ void for_each_score(int row, int column, F f) {
    #pragma unroll
    for (int m = 0; m < OF_S.rows; ++m)
        #pragma unroll
        for (int n = 0; n < OF_S.columns; ++n)
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                f(m, n, i, row + m * 16 + i / 2 * 8, column + n * 8 + i % 2);
}

// Writes a block's gradient of [FV_BN, dim] to rows first .. first + count of a destination.
template <int M, int N>
__device__ void store_rows(const View& view, int batch, int head, int first, int count, int dim,
                           const float (&sum)[M][N][4], int row0, int column0, float factor, bool accumulate) {
    int lane = threadIdx.x % 32;
    GradElem* data = static_cast<GradElem*>(view.data) + batch * view.batch + head * view.head;
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = row0 + m * 16 + half * 8 + lane / 4;
            if (row >= count) continue;
            GradElem* target = data + (first + row) * view.row;
            #pragma unroll
            for (int n = 0; n < N; ++n)
                store_gradients(target, view.elem, column0 + n * 8 + lane % 4 * 2, dim,
                                sum[m][n][half * 2] * factor, sum[m][n][half * 2 + 1] * factor, accumulate);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ Mods mods) {
    extern __shared__ __align__(16) char shared[];
    const u32 base = shared_address(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head_kv = blockIdx.y;
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence* sequences = p.sequences + tile.sequence;
    const int key0 = tile.tile * FV_BN;
    const int keys = min(FV_BN, sequences->k_len - key0);
    const int k_batch = sequences->k_batch, k_first = sequences->k_start + key0;

    load_tile<FV_BN, FV_D, FV_DP>(base, rows_of(p.k, k_batch, head_kv, k_first, keys));
    load_tile<FV_BN, FV_DV, FV_DVP>(base + AT_V, rows_of(p.v, k_batch, head_kv, k_first, keys));

    // Where this lane's shares of the operands begin.
    const int s_row = warp / OF_S.across * OF_S.rows * 16, s_column = warp % OF_S.across * OF_S.columns * 8;
    const int k_row = warp / OF_K.across * OF_K.rows * 16, k_column = warp % OF_K.across * OF_K.columns * 8;
    const int v_row = warp / OF_V.across * OF_V.rows * 16, v_column = warp % OF_V.across * OF_V.columns * 8;
    const int q_row = warp / OF_Q.across * OF_Q.rows * 16, q_column = warp % OF_Q.across * OF_Q.columns * 8;
    const int row = s_row + lane / 4, column = s_column + lane % 4 * 2;    // of the lane's first score
    const u32 q_by_row = s_row * PITCH_K + lane_offset_a<false>(PITCH_K);
    const u32 d_out_by_row = AT_D_OUT + s_row * PITCH_V + lane_offset_a<false>(PITCH_V);
    const u32 k_by_row = base + s_column * PITCH_K + lane_offset_b<false>(PITCH_K);
    const u32 v_by_row = base + AT_V + s_column * PITCH_V + lane_offset_b<false>(PITCH_V);
    const u32 p_by_key = base + AT_P + v_row * ELEM_BYTES + lane_offset_a<true>(PITCH_P);
    const u32 ds_by_key = base + AT_DS + k_row * ELEM_BYTES + lane_offset_a<true>(PITCH_P);
    const u32 ds_by_row = base + AT_DS + q_row * PITCH_P + lane_offset_a<false>(PITCH_P);
    const u32 d_out_by_dim = AT_D_OUT + v_column * ELEM_BYTES + lane_offset_b<true>(PITCH_V);
    const u32 q_by_dim = k_column * ELEM_BYTES + lane_offset_b<true>(PITCH_K);
    const u32 k_by_dim = base + q_column * ELEM_BYTES + lane_offset_b<true>(PITCH_K);
    const u32 score_at = base + AT_P + row * PITCH_P + column * ELEM_BYTES;

    float dk[OF_K.rows][OF_K.columns][4], dv[OF_V.rows][OF_V.columns][4];
    clear(dk);
    clear(dv);

    Steps steps;
    Step step, following;
    bool more = steps.next(p, tile, head_kv, following);
    int parity = 0;
    if (more) load_step(p, sequences, following, base + AT_STAGES);
    while (more) {
        step = following;
        const u32 stage = base + AT_STAGES + parity * STAGE_BYTES;
        more = steps.next(p, tile, head_kv, following);
        wait_copies();
        __syncthreads();
        if constexpr (FV_STAGES == 2) {
            parity ^= 1;
            if (more) load_step(p, sequences, following, base + AT_STAGES + parity * STAGE_BYTES);
        }

        // P, in `g` times the derivative of the score.
        float g[OF_S.rows][OF_S.columns][4];
        clear(g);
        multiply<FV_DP / STEP, false, PITCH_K, false, PITCH_K>(g, stage + q_by_row, k_by_row);

        const int q_len = __ldg(&sequences[step.share].q_len);
        const Place place = {__ldg(&sequences[step.share].b), step.head, head_kv, q_len, sequences->k_len};
        // Rows past the end have zeros for q, d_out, lse and delta, and add nothing by themselves
        // unless a score function makes something of them.
        const bool ends = keys < FV_BN || (FV_SCORE && step.query + FV_BM > q_len);
        auto live = [&](int r, int c) {
            if (c >= keys || (FV_SCORE && step.query + r >= q_len)) return false;
            if constexpr (FV_MASK) return !step.evaluate || fv_mask(mods, place, step.query + r, key0 + c);
            return true;
        };
        float lse[OF_S.rows][2];
        #pragma unroll
        for (int i = 0; i < OF_S.rows * 2; ++i) {
            float x = load_shared(stage + AT_LSE + (row + i * 8) * 4);
            // A row that sees nothing gives P = 0.
            if (x == -infinity()) x = infinity();
            lse[i / 2][i % 2] = FV_DTYPE == 2 ? x : x * LOG2_E;
        }
        auto probability = [&](float score, int m, int i) {
            if constexpr (FV_DTYPE == 2) return exp2_score((score - lse[m][i / 2]) * LOG2_E);
            return exp2_score(fmaf(score, LOG2_E, -lse[m][i / 2]));
        };
#if FV_CAPTURES
        float raw[OF_S.rows][OF_S.columns][4], d_score[OF_S.rows][OF_S.columns][4];
#endif
#if FV_SCORE
        const bool check = ends || (FV_MASK && step.evaluate);
        float weight[OF_S.rows][OF_S.columns][4];
        for_each_score(row, column, [&](int m, int n, int i, int r, int c) {
            float s = g[m][n][i] * p.scale;
            int q = step.query + r, kv = key0 + c;
            float x = probability(fv_score(mods, place, q, kv, s), m, i);
            if (check && !live(r, c)) x = 0.f;
            weight[m][n][i] = x;
            g[m][n][i] = FV_DSCORE && x != 0.f ? fv_score_gradient(mods, place, q, kv, s, x) : x;
#if FV_CAPTURES
            raw[m][n][i] = s;
            d_score[m][n][i] = x;
#endif
        });
#else
        for_each_score(row, column, [&](int m, int n, int i, int, int) {
            if constexpr (FV_DTYPE == 2) g[m][n][i] = probability(g[m][n][i] * p.scale, m, i);
            else g[m][n][i] = exp2_score(fmaf(g[m][n][i], p.scale * LOG2_E, -lse[m][i / 2]));
        });
        if (ends || (FV_MASK && step.evaluate))
            for_each_score(row, column, [&](int m, int n, int i, int r, int c) {
                if (!live(r, c)) g[m][n][i] = 0.f;
            });
        float (&weight)[OF_S.rows][OF_S.columns][4] = g;
#endif
#if FV_KEEP
        // One bit for each score: whether dropout keeps it.
        u32 kept[ceil_div(OF_S.rows * OF_S.columns * 4, 32)] = {};
        const float keep_scale = fv_keep_scale(mods);
        for_each_score(row, column, [&](int m, int n, int i, int r, int c) {
            int at = (m * OF_S.columns + n) * 4 + i;
            kept[at / 32] |= u32(fv_keep(mods, place, step.query + r, key0 + c)) << at % 32;
        });
        auto dropped = [&](float x, int m, int n, int i) {
            int at = (m * OF_S.columns + n) * 4 + i;
            return kept[at / 32] >> at % 32 & 1 ? x * keep_scale : 0.f;
        };
#else
        auto dropped = [](float x, int, int, int) { return x; };
#endif
        #pragma unroll
        for (int m = 0; m < OF_S.rows; ++m)
            #pragma unroll
            for (int n = 0; n < OF_S.columns; ++n)
                #pragma unroll
                for (int i = 0; i < 4; i += 2)
                    store_pair(score_at + (m * 16 + i * 4) * PITCH_P + n * 8 * ELEM_BYTES,
                               dropped(weight[m][n][i], m, n, i), dropped(weight[m][n][i + 1], m, n, i + 1));

        // dP, then dS.
        float dp[OF_S.rows][OF_S.columns][4];
        clear(dp);
        multiply<FV_DVP / STEP, false, PITCH_V, false, PITCH_V>(dp, stage + d_out_by_row, v_by_row);
        #pragma unroll
        for (int m = 0; m < OF_S.rows; ++m)
            #pragma unroll
            for (int i = 0; i < 4; i += 2) {
                float delta = load_shared(stage + AT_DELTA + (row + m * 16 + i * 4) * 4);
                #pragma unroll
                for (int n = 0; n < OF_S.columns; ++n) {
                    #pragma unroll
                    for (int j = i; j < i + 2; ++j) {
                        float d = dropped(dp[m][n][j], m, n, j) - delta;
#if FV_CAPTURES
                        d_score[m][n][j] *= d;
#endif
                        g[m][n][j] *= d;
                    }
                    store_pair(score_at + (AT_DS - AT_P) + (m * 16 + i * 4) * PITCH_P + n * 8 * ELEM_BYTES,
                               g[m][n][i], g[m][n][i + 1]);
                }
            }
#if FV_CAPTURES
        for_each_score(row, column, [&](int m, int n, int i, int r, int c) {
            if (d_score[m][n][i] != 0.f)
                fv_capture_gradients(mods, place, step.query + r, key0 + c, raw[m][n][i], d_score[m][n][i]);
        });
#endif
        __syncthreads();

        multiply<FV_BM / STEP, true, PITCH_P, true, PITCH_V>(dv, p_by_key, stage + d_out_by_dim, FV_DVP / 8 - v_column / 8);
        auto add_dk = [&] {
            multiply<FV_BM / STEP, true, PITCH_P, true, PITCH_K>(dk, ds_by_key, stage + q_by_dim, FV_DP / 8 - k_column / 8);
        };
        if constexpr (FV_STAGES == 1) {
            add_dk();
            __syncthreads();
            if (more) load_step(p, sequences, following, stage);
        }
        if constexpr (!FV_DETERMINISTIC) {
            float dq[OF_Q.rows][OF_Q.columns][4];
            clear(dq);
            multiply<FV_BN / STEP, false, PITCH_P, true, PITCH_K>(dq, ds_by_row, k_by_dim, FV_DP / 8 - q_column / 8);
            const i64 sum_row = __ldg(&sequences[step.share].sum_row) + step.query + q_row;
            #pragma unroll
            for (int m = 0; m < OF_Q.rows; ++m) {
                if (step.query + q_row + m * 16 >= q_len) break;
                float* fragment = sum_fragment(p, step.head, sum_row + m * 16, q_column / 8);
                #pragma unroll
                for (int n = 0; n < OF_Q.columns; ++n) {
                    if (q_column / 8 + n >= FV_DP / 8) break;
                    add_sums(fragment + n * 128, dq[m][n]);
                }
            }
        }
        if constexpr (FV_STAGES == 2) add_dk();
    }

    const bool accumulate = p.accumulate;
    store_rows(p.dk, k_batch, head_kv, k_first, keys, FV_D, dk, k_row, k_column, p.scale, accumulate);
    store_rows(p.dv, k_batch, head_kv, k_first, keys, FV_DV, dv, v_row, v_column, 1.f, accumulate);
}
