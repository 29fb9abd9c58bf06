// From the sums of fv_backward to dq: fv_dq<<<(tiles of queries, heads_q), FV_WARPS * 32>>>
//
//     dq = scale * dq_sum, or dq += scale * dq_sum with accumulate, rounded once to its dtype
//
// A thread takes 8 columns of rows r and r + 8: 64 or 2 x 32 consecutive bytes of dq_sum.
// No shared memory is asked for.

extern "C" __device__ const int fv_shared_bytes = 0;

extern "C" __global__ void __launch_bounds__(THREADS)
fv_dq(const __grid_constant__ BackwardParams p, const __grid_constant__ Mods) {
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence s = p.sequences[tile.sequence];
    const int head = blockIdx.y;
    constexpr int COLUMNS = ceil_div(FV_D, 8);
    GradElem* data = static_cast<GradElem*>(p.dq.data) + p.dq.at(s.q_batch, head, 0);
    for (int i = threadIdx.x; i < FV_BM / 2 * COLUMNS; i += THREADS) {
        const int column = i % COLUMNS, pair = i / COLUMNS;
        const int group = tile.tile * FV_BM + pair / 8 * 16, row = group + pair % 8;
        if (row >= s.q_len) continue;
        const float* sums = sum_fragment(p, head, i64(s.sum_row) + group, column);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (row + half * 8 >= s.q_len) break;
            float x[8];
            #pragma unroll
            for (int c = 0; c < 8; ++c) x[c] = p.scale * sums[sum_offset(pair % 8 * 4 + c / 2, half * 2 + c % 2)];
            store_eight(data + (s.q_start + row + half * 8) * p.dq.row, p.dq.elem, column * 8, FV_D, x, p.accumulate);
        }
    }
}
