// dq from dq_accum: fv_dq<<<(tiles of queries, heads_q), FV_WARPS * 32>>>
//
//     dq = scale * dq_accum, or dq += scale * dq_accum with accumulate, rounded once to its dtype
//
// Roles: a thread converts 8 columns of rows r and r + 8, four float4 of dq_accum. The grid runs over the
// heads backwards, because dq_accum of the last heads is still in L2.
// No barriers, no shared memory.

extern "C" __device__ const int fv_shared_bytes = 0;

extern "C" __global__ void __launch_bounds__(THREADS)
fv_dq(const __grid_constant__ BackwardParams p) {
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence s = p.sequences[tile.sequence];
    const int head = p.heads_q - 1 - blockIdx.y;
    constexpr int COLUMNS = ceil_div(FV_D, 8);
    GradElem* data = static_cast<GradElem*>(p.dq.data) + p.dq.at(s.q_batch, head, 0);
    for (int i = threadIdx.x; i < FV_BM / 2 * COLUMNS; i += THREADS) {
        const int column = i % COLUMNS, pair = i / COLUMNS;
        const int group = tile.tile * FV_BM + pair / 8 * 16, row = group + pair % 8;
        if (row >= s.q_len) continue;
        // The accumulators of four lanes, in the order of add_to_dq_accum.
        __align__(16) float sums[16];
        const float* fragment = dq_accum_fragment(p, head, i64(s.sum_row) + group, column);
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int at = REDUCES_VECTOR ? dq_accum_offset(pair % 8 * 4 + k, 0) : dq_accum_offset(pair % 8 * 4, k);
            *reinterpret_cast<float4*>(sums + k * 4) = *reinterpret_cast<const float4*>(fragment + at);
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (row + half * 8 >= s.q_len) break;
            float x[8];
            #pragma unroll
            for (int c = 0; c < 8; ++c) {
                const int of_lane = c / 2, number = half * 2 + c % 2;
                x[c] = p.scale * sums[REDUCES_VECTOR ? of_lane * 4 + number : number * 4 + of_lane];
            }
            store_eight(data + (s.q_start + row + half * 8) * p.dq.row, p.dq.elem, column * 8, FV_D, x, p.accumulate);
        }
    }
}
