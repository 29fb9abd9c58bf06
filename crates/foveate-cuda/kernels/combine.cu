// Combines the partial results of split-KV: fv_combine<<<(tiles of queries, heads_q), FV_WARPS * 32>>>
//
// With (row_max_i, row_sum_i, out_i) of KV split i and row_max the largest row_max_i:
//     row_sum = sum_i row_sum_i e^(row_max_i - row_max)
//     out = (sum_i out_i e^(row_max_i - row_max)) / row_sum
// Roles: a warp processes one row at a time. Where a tile has fewer rows than the CTA has warps, as of one query on a
// cache, a row has several, each of which adds up a share of its splits; the first adds the shares, in order.
// Barriers: one __syncthreads before shares are added.
// Shared memory: FV_WARPS * COLUMNS * 64 * 4              sums of shares

constexpr int COLUMNS = ceil_div(FV_DV, 64);               // pairs of columns of a lane, 64 columns apart
extern "C" __device__ const int fv_shared_bytes = FV_WARPS * COLUMNS * 64 * 4;

static_assert(FV_WARPS <= 4, "every warp that has a share of a row meets the others at the barrier");

// Columns column, column + 1 of a partial row; zeros past the last. `column` is even.
__device__ float2 load_pair(const float* row, int column) {
    if (column >= FV_DV) return make_float2(0.f, 0.f);
    if constexpr (FV_DV % 2 == 0) return __ldg(reinterpret_cast<const float2*>(row + column));
    return make_float2(__ldg(row + column), column + 1 < FV_DV ? __ldg(row + column + 1) : 0.f);
}

// Six CTAs per SM suffice; without the bound ptxas spills to fit more.
extern "C" __global__ void __launch_bounds__(THREADS, 6)
fv_combine(const __grid_constant__ ForwardParams p) {
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence sequence = p.sequences[tile.sequence];
    const int rows = min(sequence.q_len - tile.tile * FV_BM, FV_BM);
    int shares = 1;                                        // of a row
    while (2 * shares * max(rows, 1) <= FV_WARPS) shares *= 2;
    const int share = warp % shares, splits = ceil_div(p.kv_splits, shares);
    const int first_split = share * splits, end_split = min(first_split + splits, p.kv_splits);
    for (int row = warp / shares; row < rows; row += FV_WARPS / shares) {
        const int query = tile.tile * FV_BM + row;
        const i64 first = sequence.q_batch * p.partial_batch + head * p.partial_head + sequence.q_start + query;
        // Each lane reduces every 32nd split to row_max and row_sum.
        float row_max = -infinity();
        for (int i = lane; i < p.kv_splits; i += 32)
            row_max = max_or_nan(row_max, __ldg(p.partial_max + i * p.partial_rows + first));
        for (int step = 16; step > 0; step /= 2)
            row_max = max_or_nan(row_max, __shfl_xor_sync(0xffffffff, row_max, step));
        const float reference = row_max == -infinity() ? 0.f : row_max;
        auto weight = [&](int i) {
            return i < p.kv_splits ? exp2f((__ldg(p.partial_max + i * p.partial_rows + first) - reference) * LOG2_E)
                                   : 0.f;
        };
        float row_sum = 0.f;
        for (int i = lane; i < p.kv_splits; i += 32)
            row_sum += __ldg(p.partial_sum + i * p.partial_rows + first) * weight(i);
        for (int step = 16; step > 0; step /= 2) row_sum += __shfl_xor_sync(0xffffffff, row_sum, step);

        float2 sum[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) sum[c] = make_float2(0.f, 0.f);
        for (int from = first_split; from < end_split; from += 32) {
            const float mine = weight(from + lane);
            const int count = min(32, end_split - from);
            const float* partial = p.partial_out + (from * p.partial_rows + first) * FV_DV;
            #pragma unroll 8
            for (int i = 0; i < count; ++i, partial += p.partial_rows * FV_DV) {
                const float factor = __shfl_sync(0xffffffff, mine, i);
                #pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    const float2 pair = load_pair(partial, lane * 2 + c * 64);
                    sum[c].x += factor == 0.f ? 0.f : pair.x * factor;
                    sum[c].y += factor == 0.f ? 0.f : pair.y * factor;
                }
            }
        }
        if (shares > 1) {
            float2* const of_shares = reinterpret_cast<float2*>(shared) + lane;
            for (int c = 0; c < COLUMNS; ++c) of_shares[(warp * COLUMNS + c) * 32] = sum[c];
            __syncthreads();
            if (share > 0) return;
            for (int other = 1; other < shares; ++other)
                for (int c = 0; c < COLUMNS; ++c) {
                    const float2 pair = of_shares[((warp + other) * COLUMNS + c) * 32];
                    sum[c].x += pair.x;
                    sum[c].y += pair.y;
                }
        }
        const Row target = finish_row(p, sequence, head, query, row_max, row_sum, lane == 0);
        for (int c = 0; c < COLUMNS; ++c) store_out(target, lane * 2 + c * 64, sum[c].x, sum[c].y);
    }
}
