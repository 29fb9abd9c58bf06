// dq in a fixed order: fv_backward_dq<<<(tiles of queries, heads_q), FV_WARPS * 32>>>
//
// Roles. A deterministic backward runs this kernel besides fv_backward. A CTA owns FV_BM queries of one
// head, iterates over the live tiles of FV_BN keys, recomputes dS, and accumulates dQ += dS K in registers:
// two matrix products more than dq_accum in memory, and no two CTAs add to one element.
//
// Barriers (mbarriers, as in fv_backward):
//
//     wait copied                         S, P, dP, dS in registers
//     wait ds_read of the last step       dS -> smem           arrive ds_written
//     wait ds_written                     dQ += dS K           arrive ds_read
//
// Once all warps have arrived at ds_written they have finished the previous step, so its stage of K and V is
// free and the copies of the next step start there. With one stage the copies start after dQ instead, when
// all warps have read K.
//
// Shared memory: with row(c) = c * sizeof(element) + 16 bytes,
//     FV_BM * (row(FV_DP) + row(FV_DVP) + 8)                          Q, dO, lse, delta
//   + FV_STAGES * FV_BN * (row(FV_DP) + row(FV_DVP))                  K, V
//   + FV_BM * row(FV_BN)                                              dS
//   + 64                                                              mbarriers
// and at least FV_WARPS * 16 * (32 * columns + 32), where `columns` is the number of accumulators in a row
// of a warp's dQ; with the conditions of fv_backward on tiles, stages and warps.

constexpr int AT_D_OUT = FV_BM * PITCH_K;
constexpr int AT_LSE = AT_D_OUT + FV_BM * PITCH_V;
constexpr int AT_DELTA = AT_LSE + FV_BM * 4;
constexpr int AT_STAGES = AT_DELTA + FV_BM * 4;
constexpr int AT_V = FV_BN * PITCH_K;                      // in a stage
constexpr int STAGE_BYTES = AT_V + FV_BN * PITCH_V;
constexpr int AT_DS = AT_STAGES + FV_STAGES * STAGE_BYTES;
constexpr int AT_MBARRIERS = AT_DS + FV_BM * PITCH_P;

constexpr Warps WARPS_DQ = divide(FV_BM, FV_DP, false);    // warps over dQ

// The epilogue stages dQ in the smem of the tiles.
constexpr int SCRATCH_BYTES = scratch_bytes(WARPS_DQ.columns);
constexpr int SHARED_BYTES = max_of(AT_MBARRIERS + 64, FV_WARPS * SCRATCH_BYTES);
extern "C" __device__ const int fv_shared_bytes = SHARED_BYTES;
static_assert(FV_STAGES == 1 || FV_STAGES == 2, "one or two stages");

// Iterates over the live tiles of keys of a CTA.
struct Steps {
    const Run* runs;
    int left;                           // runs after the current one
    int tile = 0, end = 0;              // remaining tiles of the current run
    bool evaluate = false;

    __device__ Steps(const BackwardParams& p, const Sequence& s, const Tile& queries, int head) {
        if constexpr (FV_MASK) {
            const int row = s.first_row + queries.tile + head * p.lists.head_stride;
            runs = p.lists.runs + i64(row) * p.lists.capacity;
            left = __ldg(p.lists.counts + row);
        } else {
            left = 0;
            end = ceil_div(s.k_len, FV_BN);
        }
    }

    // The first key of the next step, and whether the mask is evaluated there.
    __device__ bool next(int& key, bool& evaluates) {
        while (tile == end) {
            if (left-- == 0) return false;
            const int count_kind = __ldg(&runs->count_kind);
            tile = __ldg(&runs->first);
            end = tile + (count_kind >> 1);
            evaluate = count_kind & 1;
            ++runs;
        }
        key = tile++ * FV_BN;
        evaluates = evaluate;
        return true;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
fv_backward_dq(const __grid_constant__ BackwardParams p, const __grid_constant__ Mods mods) {
    extern __shared__ __align__(16) char shared[];
    const u32 base = shared_address(shared);
    const int warp = threadIdx.x / 32;
    const int head = blockIdx.y, head_kv = head / FV_GROUP;
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence s = p.sequences[tile.sequence];
    const int query = tile.tile * FV_BM, queries = min(FV_BM, s.q_len - query);
    const Place place = {s.b, head, head_kv, s.q_len, s.k_len};

    const u32 mbarriers = base + AT_MBARRIERS;
    const Mbarrier ds_written{mbarriers}, ds_read{mbarriers + 8};
    auto copied = [&](int step) { return Mbarrier{mbarriers + 16 + step % FV_STAGES * 8}; };
    if (threadIdx.x == 0) {
        ds_written.init(FV_WARPS);
        ds_read.init(FV_WARPS);
        for (int i = 0; i < FV_STAGES; ++i) copied(i).init(THREADS);
    }
    __syncthreads();

    const int q_row = warp / WARPS_DQ.across * WARPS_DQ.rows * 16,
              q_column = warp % WARPS_DQ.across * WARPS_DQ.columns * 8;
    const u32 q_by_row = base + lane_rows<PITCH_K>(), d_out_by_row = base + AT_D_OUT + lane_rows<PITCH_V>();
    const u32 k_by_row = lane_columns<PITCH_K>(), v_by_row = AT_V + lane_columns<PITCH_V>();
    const u32 ds_by_row = base + AT_DS + q_row * PITCH_P + lane_offset_a<false>(PITCH_P);
    const u32 k_by_dim = q_column * ELEM_BYTES + lane_offset_b<true>(PITCH_K);

    auto stage_of = [&](int step) { return base + AT_STAGES + step % FV_STAGES * STAGE_BYTES; };
    auto load = [&](int key, int number) {
        const u32 stage = stage_of(number);
        load_tile<FV_BN, FV_D, FV_DP>(stage, rows_of(p.k, s.k_batch, head_kv, s.k_start + key, s.k_len - key));
        load_tile<FV_BN, FV_DV, FV_DVP>(stage + AT_V, rows_of(p.v, s.k_batch, head_kv, s.k_start + key, s.k_len - key));
        copied(number).arrive_after_copies();
    };

    float dq[WARPS_DQ.rows][WARPS_DQ.columns][4];
    clear(dq);
    load_tile<FV_BM, FV_D, FV_DP>(base, rows_of(p.q, s.q_batch, head, s.q_start + query, queries));
    load_tile<FV_BM, FV_DV, FV_DVP>(base + AT_D_OUT, rows_of(p.d_out, s.q_batch, head, s.q_start + query, queries));
    load_row_values<FV_BM>(base + AT_LSE, p.lse, p.delta, s.q_batch, head, s.q_start + query, queries);
    Steps steps(p, s, tile, head);
    int key, following;
    bool evaluate, following_evaluates;
    bool more = steps.next(following, following_evaluates);
    if (more) load(following, 0);
    for (int number = 0; more; ++number) {
        key = following;
        evaluate = following_evaluates;
        more = steps.next(following, following_evaluates);
        const u32 stage = stage_of(number);
        const ScoreTile score_tile = {place, query, queries, key, s.k_len - key, evaluate};

        Scores scores;
        clear(scores.g);
        copied(number).wait(number / FV_STAGES);
        multiply<FV_DP / MMA_K, false, PITCH_K, false, PITCH_K>(scores.g, q_by_row, stage + k_by_row);
        const float* row_weight_sums = row_weight_sums_of(p, s.q_batch, head, s.q_start + query);
        const u32 lse_at = base + AT_LSE + score_row() * 4;
        float lse[QUERIES_HELD];
        load_lse(lse, lse_at);
        scores.compute_p(mods, score_tile, p.scale, lse, lse_at, row_weight_sums, p.delta.row);
        ScoreFragment dp;
        clear(dp);
        multiply<FV_DVP / MMA_K, false, PITCH_V, false, PITCH_V>(dp, d_out_by_row, stage + v_by_row);
        scores.differentiate(dp, base + AT_DELTA + score_row() * 4);
        ds_read.wait(number - 1);
        store_scores(base + AT_DS, [&](int m, int n, int i) { return scores.g[m][n][i]; });
        ds_written.arrive_warp();

        ds_written.wait(number);
        if (FV_STAGES == 2 && more) load(following, number + 1);
        multiply<FV_BN / MMA_K, false, PITCH_P, true, PITCH_K>(dq, ds_by_row, stage + k_by_dim,
                                                               FV_DP / 8 - q_column / 8);
        ds_read.arrive_warp();
        if (FV_STAGES == 1 && more) {
            ds_read.wait(number);
            load(following, number + 1);
        }
    }

    wait_copies();      // a CTA without steps has not waited for its copies
    __syncthreads();    // all of shared memory is free now
    store_rows(p.dq, s.q_batch, head, s.q_start + query, queries, FV_D, dq, q_row, q_column, p.scale, p.accumulate,
               shared + warp * SCRATCH_BYTES);
}
