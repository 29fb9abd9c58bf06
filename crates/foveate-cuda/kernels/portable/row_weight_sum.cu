// The sum of the weights of rows with a huge lse: fv_row_weight_sum<<<(tiles of queries, heads_q), FV_WARPS * 32>>>
//
//     row_weight_sum[row] = sum of e^(score - lse), over the visible keys of the row and its sink
//
// for rows with |lse| >= HUGE_LSE; the kernel does not write other rows. The scores equal those of
// fv_backward bit for bit: a product sums in the same order in tiles of any size, and the same
// instructions scale and modify it. So the weights, divided by this sum, add up to 1.
//
// Such rows are few, or padding. A CTA without them exits at once. The others iterate over all tiles of
// keys, without a block list, and skip tiles that the mask hides from every such row.
//
// Roles: a warp owns 16 queries, so a row stays within a quad of lanes.
// Barriers: __syncthreads (or its reduction) before and after each load of K.
// Shared memory: with row(c) = c * sizeof(element) + 16 bytes,
//     (FV_BM + FV_BN) * row(FV_DP)                                    Q, K
// FV_BM is 16 * FV_WARPS, FV_BN a multiple of 16 up to 64.

constexpr int PITCH_K = FV_DP * ELEM_BYTES + PAD_BYTES;
constexpr int AT_K = FV_BM * PITCH_K;
constexpr int SHARED_BYTES = AT_K + FV_BN * PITCH_K;
extern "C" __device__ const int fv_shared_bytes = SHARED_BYTES;

constexpr int N = FV_BN / 8;                               // accumulators of a warp

static_assert(FV_BM == 16 * FV_WARPS, "a warp owns 16 queries");
static_assert(FV_BN % 16 == 0 && FV_BN <= 64, "a bit for each score exp_of a lane");

// The sum of e^(score - row_max), with the row_max so far: e^score alone overflows.
struct ExpSum {
    float row_max, sum;

    __device__ static float exp_of(float difference) { return exp2_score(difference * LOG2_E); }
    __device__ void rescale_to(float new_max) {
        if (row_max != -infinity()) sum *= exp_of(__fsub_rn(row_max, new_max));
        row_max = new_max;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
fv_row_weight_sum(const __grid_constant__ BackwardParams p, const __grid_constant__ Mods mods) {
    extern __shared__ __align__(16) char shared[];
    const u32 base = shared_address(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.y, head_kv = head / FV_GROUP;
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence s = p.sequences[tile.sequence];
    [[maybe_unused]] const Place place = {s.b, head, head_kv, s.q_len, s.k_len};
    const int first = tile.tile * FV_BM;
    const int query = first + warp * 16 + lane / 4;        // of this lane's first row; + 8 of its second
    const i64 row = s.q_start + query;

    float lse[2];
    bool huge[2];
    ExpSum exp_sums[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* at = p.lse.data + s.q_batch * p.lse.batch + head * p.lse.head + (row + half * 8) * p.lse.row;
        lse[half] = query + half * 8 < s.q_len ? __ldg(at) : 0.f;
        huge[half] = is_huge(lse[half]);
        const bool brings_sink = p.sink && lane % 4 == 0;
        exp_sums[half] = {brings_sink ? __ldg(p.sink + head) : -infinity(), brings_sink ? 1.f : 0.f};
    }
    if (!__syncthreads_or(huge[0] || huge[1])) return;

    load_tile<FV_BM, FV_D, FV_DP>(base, rows_of(p.q, s.q_batch, head, s.q_start + first, s.q_len - first));
    const u32 queries = base + warp * 16 * PITCH_K + lane_offset_a<false>(PITCH_K);
    const u32 keys = base + AT_K + lane_offset_b<false>(PITCH_K);
    for (int key0 = 0; key0 < s.k_len; key0 += FV_BN) {
        auto key_of = [&](int n, int i) { return key0 + n * 8 + lane % 4 * 2 + i % 2; };
        u32 visible = 0;                                      // a bit for each score of the lane
        #pragma unroll
        for (int j = 0; j < N * 4; ++j) {
            const int half = j % 4 / 2, key = key_of(j / 4, j);
            if (huge[half] && key < s.k_len && (!FV_MASK || fv_mask(mods, place, query + half * 8, key)))
                visible |= 1u << j;
        }
        if (!__syncthreads_or(visible)) continue;             // also: all threads have read the previous tile
        load_tile<FV_BN, FV_D, FV_DP>(base + AT_K, rows_of(p.k, s.k_batch, head_kv, s.k_start + key0, s.k_len - key0));
        wait_copies();
        __syncthreads();
        if (!__any_sync(0xffffffff, visible)) continue;

        float scores[1][N][4];
        clear(scores);
        multiply<FV_DP / MMA_K, false, PITCH_K, false, PITCH_K>(scores, queries, keys);
        float new_max[2] = {exp_sums[0].row_max, exp_sums[1].row_max};
        #pragma unroll
        for (int j = 0; j < N * 4; ++j) {
            float& score = scores[0][j / 4][j % 4];
            score *= p.scale;
#if FV_SCORE
            const int q = query + j % 4 / 2 * 8, kv = key_of(j / 4, j);
            if (visible >> j & 1)
                score = fv_score(mods, place, q, kv, score, to_float(Int(q - kv)), fv_place_reads(mods, place));
#endif
            if (!(visible >> j & 1)) score = -infinity();
            new_max[j % 4 / 2] = fmaxf(new_max[j % 4 / 2], score);
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) exp_sums[half].rescale_to(new_max[half]);
        #pragma unroll
        for (int j = 0; j < N * 4; ++j) {
            const float score = scores[0][j / 4][j % 4];
            ExpSum& of_row = exp_sums[j % 4 / 2];
            if (score != -infinity()) of_row.sum += ExpSum::exp_of(__fsub_rn(score, of_row.row_max));
        }
    }

    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        ExpSum& own = exp_sums[half];
        own.rescale_to(quad_max(own.row_max));
        const float sum = quad_sum(own.sum);
        if (lane % 4 == 0 && huge[half])
            p.row_weight_sum[s.q_batch * p.delta.batch + head * p.delta.head + (row + half * 8) * p.delta.row] =
                sum * ExpSum::exp_of(__fsub_rn(own.row_max, lse[half]));
    }
}
