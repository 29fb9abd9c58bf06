// Gradients of k and v, and dq_accum: fv_backward<<<(tiles of keys, heads_kv), FV_WARPS * 32>>>
//
// Roles. A CTA owns a tile of FV_BN keys of one KV head. It iterates over the live tiles of FV_BM queries,
// of every query head of the group (and of every sequence that shares the keys), and recomputes P:
//
//     S = Q K^T    P = exp(score(scale S) - lse)            dV += P^T dO
//     dP = dO V^T  dS = P (dP - delta) dscore/ds            dK += dS^T Q     dQ += dS K
//
// All warps have one role. dK and dV stay in registers until the epilogue; one that has no destination is not
// asked for, and left out. dQ of a step is a partial sum
// over all CTAs, so it is added to dq_accum in memory, in no fixed order; with FV_SEPARATE_DQ this kernel
// skips dq and fv_backward_dq computes it. `scale` joins dK in the epilogue and dQ in fv_dq.
//
// Barriers. Warps synchronise by mbarriers only where data passes between them: they arrive early and wait
// late (`Mbarrier`), so that warps drift apart and one computes while another multiplies:
//
//     wait copied                         S, P in registers
//     wait p_read of the last step        P -> smem            arrive p_written
//                                         dP, dS in registers
//     wait ds_read of the last step       dS -> smem           arrive ds_written
//     wait p_written                      dV += P^T dO         arrive p_read
//     wait ds_written                     dQ = dS K, added to dq_accum
//                                         dK += dS^T Q         arrive ds_read
//
// Once all warps have arrived at ds_written they have finished the previous step, so its stage of Q and dO
// is free and the copies of the next step start there; each thread arrives at `copied` when its copies have
// landed. With one stage dK comes before dQ, and warps wait for each other between them (stage_read).
//
// Shared memory: with row(c) = c * sizeof(element) + 16 bytes,
//     FV_BN * (row(FV_DP) + row(FV_DVP))                              K, V
//   + FV_STAGES * FV_BM * (row(FV_DP) + row(FV_DVP) + 8)              Q, dO, lse, delta
//   + 2 * FV_BM * row(FV_BN)                                          P, dS
//   + 64                                                              mbarriers
// and at least FV_WARPS * 16 * (32 * columns + 32), where `columns` is the larger number of accumulators in
// a row of a warp's dK or dV.
// FV_BM and FV_BN are multiples of 16; FV_STAGES is 1 or 2. The warps must divide S evenly: some
// divisor `down` of FV_WARPS divides FV_BM / 16, and FV_WARPS / down divides FV_BN / 8.

constexpr int AT_V = FV_BN * PITCH_K;
constexpr int AT_STAGES = AT_V + FV_BN * PITCH_V;
constexpr int AT_D_OUT = FV_BM * PITCH_K;                  // in a stage
constexpr int AT_LSE = AT_D_OUT + FV_BM * PITCH_V;
constexpr int AT_DELTA = AT_LSE + FV_BM * 4;
constexpr int STAGE_BYTES = AT_DELTA + FV_BM * 4;
constexpr int AT_P = AT_STAGES + FV_STAGES * STAGE_BYTES;
constexpr int AT_DS = AT_P + FV_BM * PITCH_P;
constexpr int AT_MBARRIERS = AT_DS + FV_BM * PITCH_P;

constexpr Warps WARPS_DK = divide(FV_BN, FV_DP, false);    // warps over dK
constexpr Warps WARPS_DV = divide(FV_BN, FV_DVP, false);       // over dV
constexpr Warps WARPS_DQ = divide(FV_BM, FV_DP, false);    // over dQ

// The epilogue stages dK and dV in the smem of the tiles.
constexpr int SCRATCH_BYTES = scratch_bytes(WARPS_DK.columns > WARPS_DV.columns ? WARPS_DK.columns : WARPS_DV.columns);
constexpr int SHARED_BYTES = max_of(AT_MBARRIERS + 64, FV_WARPS * SCRATCH_BYTES);
extern "C" __device__ const int fv_shared_bytes = SHARED_BYTES;

static_assert(FV_STAGES == 1 || FV_STAGES == 2, "one or two stages");

// One tile of queries of one head.
struct Step {
    int sequence_offset;    // to tile.sequence
    int head;       // query head
    int query;      // its first query
    bool evaluate;  // whether the mask is evaluated in it
};

// Iterates over the live tiles of queries of a CTA.
struct Steps {
    int sequence_offset = 0, member = -1;   // sequence, head of the group
    const Run* at = nullptr;            // the remaining runs of its tiles of queries
    int runs = 0;
    int tile = 0, end = 0;              // remaining tiles of the current run
    bool evaluate = false;

    __device__ bool next(const BackwardParams& p, const Tile& keys, int head_kv, Step& step) {
        while (tile == end) {
            if (runs == 0) {
                if (++member == FV_GROUP) {
                    member = 0;
                    if (++sequence_offset == p.sharing) return false;
                }
                const Sequence* s = p.sequences + keys.sequence + sequence_offset;
                if constexpr (FV_MASK) {
                    const int row = __ldg(&s->first_row) + keys.tile +
                                    (head_kv * FV_GROUP + member) * p.lists.head_stride;
                    runs = __ldg(p.lists.counts + row);
                    at = p.lists.runs + i64(row) * p.lists.capacity;
                } else {
                    tile = 0;
                    end = ceil_div(__ldg(&s->q_len), FV_BM);
                }
            } else {
                --runs;
                const int count_kind = __ldg(&at->count_kind);
                tile = __ldg(&at->first);
                end = tile + (count_kind >> 1);
                evaluate = count_kind & 1;
                ++at;
            }
        }
        step = {sequence_offset, head_kv * FV_GROUP + member, tile * FV_BM, evaluate};
        ++tile;
        return true;
    }
};

__device__ void load_step(const BackwardParams& p, const Sequence* sequences, const Step& step, u32 stage) {
    const Sequence* s = sequences + step.sequence_offset;
    int batch = __ldg(&s->q_batch), first = __ldg(&s->q_start) + step.query, count = __ldg(&s->q_len) - step.query;
    load_tile<FV_BM, FV_D, FV_DP>(stage, rows_of(p.q, batch, step.head, first, count));
    load_tile<FV_BM, FV_DV, FV_DVP>(stage + AT_D_OUT, rows_of(p.d_out, batch, step.head, first, count));
    load_row_values<FV_BM>(stage + AT_LSE, p.lse, p.delta, batch, step.head, first, count);
}

// Adds a warp's part of dQ of a step to dq_accum: of rows from q_row and columns from q_column on.
__device__ void add_dq(const BackwardParams& p, const Step& step, int sum_row, int q_len, int q_row, int q_column,
                       const float (&dq)[WARPS_DQ.rows][WARPS_DQ.columns][4]) {
    const i64 accum_row = sum_row + step.query + q_row;
    #pragma unroll
    for (int m = 0; m < WARPS_DQ.rows; ++m) {
        if (step.query + q_row + m * 16 >= q_len) break;
        float* fragment = dq_accum_fragment(p, step.head, accum_row + m * 16, q_column / 8);
        #pragma unroll
        for (int n = 0; n < WARPS_DQ.columns; ++n) {
            if (q_column / 8 + n >= FV_DP / 8) break;
            add_to_dq_accum(fragment + n * 128, dq[m][n]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ Mods mods) {
    extern __shared__ __align__(16) char shared[];
    const u32 base = shared_address(shared);
    const int warp = threadIdx.x / 32;
    const int head_kv = blockIdx.y;
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence* sequences = p.sequences + tile.sequence;
    const int key = tile.tile * FV_BN, keys = min(FV_BN, sequences->k_len - key);
    const int k_batch = sequences->k_batch, k_first = sequences->k_start + key;

    const u32 mbarriers = base + AT_MBARRIERS;
    const Mbarrier p_written{mbarriers}, ds_written{mbarriers + 8}, p_read{mbarriers + 16}, ds_read{mbarriers + 24};
    [[maybe_unused]] const Mbarrier stage_read{mbarriers + 32};
    auto copied = [&](int step) { return Mbarrier{mbarriers + 40 + step % FV_STAGES * 8}; };
    if (threadIdx.x == 0) {
        for (int i = 0; i < 5; ++i) Mbarrier{mbarriers + i * 8}.init(FV_WARPS);
        for (int i = 0; i < FV_STAGES; ++i) copied(i).init(THREADS);
    }
    __syncthreads();

    // Addresses of this lane's first elements of the operands; those of Q and dO relative to their stage.
    const int k_row = warp / WARPS_DK.across * WARPS_DK.rows * 16,
              k_column = warp % WARPS_DK.across * WARPS_DK.columns * 8;
    const int v_row = warp / WARPS_DV.across * WARPS_DV.rows * 16,
              v_column = warp % WARPS_DV.across * WARPS_DV.columns * 8;
    const int q_row = warp / WARPS_DQ.across * WARPS_DQ.rows * 16,
              q_column = warp % WARPS_DQ.across * WARPS_DQ.columns * 8;
    const u32 q_by_row = lane_rows<PITCH_K>(), d_out_by_row = AT_D_OUT + lane_rows<PITCH_V>();
    const u32 k_by_row = base + lane_columns<PITCH_K>(), v_by_row = base + AT_V + lane_columns<PITCH_V>();
    const u32 p_by_key = base + AT_P + v_row * ELEM_BYTES + lane_offset_a<true>(PITCH_P);
    const u32 ds_by_key = base + AT_DS + k_row * ELEM_BYTES + lane_offset_a<true>(PITCH_P);
    const u32 ds_by_row = base + AT_DS + q_row * PITCH_P + lane_offset_a<false>(PITCH_P);
    const u32 d_out_by_dim = AT_D_OUT + v_column * ELEM_BYTES + lane_offset_b<true>(PITCH_V);
    const u32 q_by_dim = k_column * ELEM_BYTES + lane_offset_b<true>(PITCH_K);
    const u32 k_by_dim = base + q_column * ELEM_BYTES + lane_offset_b<true>(PITCH_K);

    float dk[WARPS_DK.rows][WARPS_DK.columns][4], dv[WARPS_DV.rows][WARPS_DV.columns][4];
    clear(dk);
    clear(dv);

    auto stage_of = [&](int step) { return base + AT_STAGES + step % FV_STAGES * STAGE_BYTES; };
    auto load = [&](const Step& step, int number) {
        load_step(p, sequences, step, stage_of(number));
        copied(number).arrive_after_copies();
    };

    load_tile<FV_BN, FV_D, FV_DP>(base, rows_of(p.k, k_batch, head_kv, k_first, keys));
    load_tile<FV_BN, FV_DV, FV_DVP>(base + AT_V, rows_of(p.v, k_batch, head_kv, k_first, keys));
    Steps steps;
    Step step, following;
    bool more = steps.next(p, tile, head_kv, following);
    if (more) load(following, 0);
    for (int number = 0; more; ++number) {
        step = following;
        more = steps.next(p, tile, head_kv, following);
        const u32 stage = stage_of(number);
        const Sequence* s = sequences + step.sequence_offset;
        const int q_len = __ldg(&s->q_len);
        const Place place = {__ldg(&s->b), step.head, head_kv, q_len, __ldg(&s->k_len)};
        const ScoreTile score_tile = {place, step.query, q_len - step.query, key, keys, step.evaluate};

        Scores scores;
        clear(scores.g);
        copied(number).wait(number / FV_STAGES);
        multiply<FV_DP / MMA_K, false, PITCH_K, false, PITCH_K>(scores.g, stage + q_by_row, k_by_row);
        const float* row_weight_sums = row_weight_sums_of(p, __ldg(&s->q_batch), step.head,
                                                          __ldg(&s->q_start) + step.query);
        const u32 lse_at = stage + AT_LSE + score_row() * 4;
        float lse[QUERIES_HELD];
        load_lse(lse, lse_at);
        scores.compute_p(mods, score_tile, p.scale, lse, lse_at, row_weight_sums, p.delta.row);
        p_read.wait(number - 1);
        store_scores(base + AT_P, [&](int m, int n, int i) { return scores.dropped(scores.p(m, n, i), m, n, i); });
        p_written.arrive_warp();

        ScoreFragment dp;
        clear(dp);
        multiply<FV_DVP / MMA_K, false, PITCH_V, false, PITCH_V>(dp, stage + d_out_by_row, v_by_row);
        scores.differentiate(dp, stage + AT_DELTA + score_row() * 4);
        ds_read.wait(number - 1);
        store_scores(base + AT_DS, [&](int m, int n, int i) { return scores.g[m][n][i]; });
        ds_written.arrive_warp();
        HeldSums none;
        scores.capture(mods, score_tile, none);

        p_written.wait(number);
        if (p.dv.data)
            multiply<FV_BM / MMA_K, true, PITCH_P, true, PITCH_V>(dv, p_by_key, stage + d_out_by_dim,
                                                                  FV_DVP / 8 - v_column / 8);
        p_read.arrive_warp();
        ds_written.wait(number);
        auto add_dk = [&] {
            if (p.dk.data)
                multiply<FV_BM / MMA_K, true, PITCH_P, true, PITCH_K>(dk, ds_by_key, stage + q_by_dim,
                                                                      FV_DP / 8 - k_column / 8);
        };
        if constexpr (FV_STAGES == 1) {
            add_dk();
            stage_read.arrive_warp();
            stage_read.wait(number);
        }
        if (more) load(following, number + 1);
        if constexpr (!FV_SEPARATE_DQ) {
            float dq[WARPS_DQ.rows][WARPS_DQ.columns][4];
            clear(dq);
            multiply<FV_BN / MMA_K, false, PITCH_P, true, PITCH_K>(dq, ds_by_row, k_by_dim, FV_DP / 8 - q_column / 8);
            add_dq(p, step, __ldg(&s->sum_row), q_len, q_row, q_column, dq);
        }
        if constexpr (FV_STAGES == 2) add_dk();
        ds_read.arrive_warp();
    }

    wait_copies();      // a CTA without steps has not waited for its copies
    __syncthreads();    // all of shared memory is free now
    char* scratch = shared + warp * SCRATCH_BYTES;
    store_rows(p.dk, k_batch, head_kv, k_first, keys, FV_D, dk, k_row, k_column, p.scale, p.accumulate, scratch);
    store_rows(p.dv, k_batch, head_kv, k_first, keys, FV_DV, dv, v_row, v_column, 1.f, p.accumulate, scratch);
}
