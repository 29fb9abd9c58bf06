// What the weights of rows with a huge lse add up to: fv_row_weight_sum<<<(tiles of queries, heads_q), FV_WARPS * 32>>>
//
//     sums[row] = sum of e^(score - lse), over the keys that the row sees and its sink
//
// for rows from HUGE_LSE on; the sums of others are not written. The scores are those of
// fv_backward bit for bit: a product adds up in the same order in tiles of any size, and is scaled
// and modified by the same instructions. So the weights, divided by this, add up to 1.
//
// Such rows are few, or padding. A block without them leaves at once. The others step over all
// tiles of keys, without a list of them, and pass over those in which no such row sees a key. A
// warp owns 16 queries, so a row stays within four lanes.
//
// Shared memory: with row(c) = c * sizeof(element) + 16 bytes,
//     (FV_BM + FV_BN) * row(FV_DP)                                    Q, K
// FV_BM is 16 * FV_WARPS, FV_BN a multiple of 16 up to 64.

constexpr int PITCH_K = FV_DP * ELEM_BYTES + PAD_BYTES;
constexpr int AT_K = FV_BM * PITCH_K;
constexpr int SHARED_BYTES = AT_K + FV_BN * PITCH_K;
extern "C" __device__ const int fv_shared_bytes = SHARED_BYTES;

constexpr int N = FV_BN / 8;                               // accumulators of a warp

static_assert(FV_BM == 16 * FV_WARPS, "a warp owns 16 queries");
static_assert(FV_BN % 16 == 0 && FV_BN <= 64, "a bit for each score of a lane");

// The sum of powers, relative to the largest score so far: e^score and e^top are out of range.
struct Powers {
    float top, sum;

    __device__ static float of(float difference) { return exp2_score(difference * LOG2_E); }
    __device__ void raise(float highest) {
        if (top != -infinity()) sum *= of(__fsub_rn(top, highest));
        top = highest;
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
    const int query = first + warp * 16 + lane / 4;        // of this lane's first row; 8 more of its second
    const i64 row = s.q_start + query;

    float lse[2];
    bool huge[2];
    Powers powers[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* at = p.lse.data + s.q_batch * p.lse.batch + head * p.lse.head + (row + half * 8) * p.lse.row;
        lse[half] = query + half * 8 < s.q_len ? __ldg(at) : 0.f;
        huge[half] = is_huge(lse[half]);
        const bool brings_sink = p.sink && lane % 4 == 0;
        powers[half] = {brings_sink ? __ldg(p.sink + head) : -infinity(), brings_sink ? 1.f : 0.f};
    }
    if (!__syncthreads_or(huge[0] || huge[1])) return;

    load_tile<FV_BM, FV_D, FV_DP>(base, rows_of(p.q, s.q_batch, head, s.q_start + first, s.q_len - first));
    const u32 queries = base + warp * 16 * PITCH_K + lane_offset_a<false>(PITCH_K);
    const u32 keys = base + AT_K + lane_offset_b<false>(PITCH_K);
    for (int key0 = 0; key0 < s.k_len; key0 += FV_BN) {
        auto key_of = [&](int n, int i) { return key0 + n * 8 + lane % 4 * 2 + i % 2; };
        u32 seen = 0;                                      // a bit for each score of the lane
        #pragma unroll
        for (int j = 0; j < N * 4; ++j) {
            const int half = j % 4 / 2, key = key_of(j / 4, j);
            if (huge[half] && key < s.k_len && (!FV_MASK || fv_mask(mods, place, query + half * 8, key))) seen |= 1u << j;
        }
        if (!__syncthreads_or(seen)) continue;             // all have read the tile before, too
        load_tile<FV_BN, FV_D, FV_DP>(base + AT_K, rows_of(p.k, s.k_batch, head_kv, s.k_start + key0, s.k_len - key0));
        wait_copies();
        __syncthreads();
        if (!__any_sync(0xffffffff, seen)) continue;

        float scores[1][N][4];
        clear(scores);
        multiply<FV_DP / STEP, false, PITCH_K, false, PITCH_K>(scores, queries, keys);
        float highest[2] = {powers[0].top, powers[1].top};
        #pragma unroll
        for (int j = 0; j < N * 4; ++j) {
            float& score = scores[0][j / 4][j % 4];
            score *= p.scale;
#if FV_SCORE
            if (seen >> j & 1) score = fv_score(mods, place, query + j % 4 / 2 * 8, key_of(j / 4, j), score);
#endif
            if (!(seen >> j & 1)) score = -infinity();
            highest[j % 4 / 2] = fmaxf(highest[j % 4 / 2], score);
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) powers[half].raise(highest[half]);
        #pragma unroll
        for (int j = 0; j < N * 4; ++j) {
            const float score = scores[0][j / 4][j % 4];
            Powers& of_row = powers[j % 4 / 2];
            if (score != -infinity()) of_row.sum += Powers::of(__fsub_rn(score, of_row.top));
        }
    }

    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        Powers& own = powers[half];
        own.raise(over_quad_max(own.top));
        const float sum = over_quad_sum(own.sum);
        if (lane % 4 == 0 && huge[half])
            p.row_weight_sum[s.q_batch * p.delta.batch + head * p.delta.head + (row + half * 8) * p.delta.row] =
                sum * Powers::of(__fsub_rn(own.top, lse[half]));
    }
}
