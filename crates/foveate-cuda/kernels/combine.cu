// Joins what the shares of a split forward left: fv_combine<<<(tiles of queries, heads_q), FV_WARPS * 32>>>
//
// With (top_i, sum_i, out_i) of share i and top the largest top_i:
//     sum = sum_i sum_i e^(top_i - top)    out = (sum_i out_i e^(top_i - top)) / sum
// A warp takes a row at a time. No shared memory.

extern "C" __device__ const int fv_shared_bytes = 0;

extern "C" __global__ void __launch_bounds__(THREADS)
fv_combine(const __grid_constant__ ForwardParams p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence sequence = p.sequences[tile.sequence];
    const int end = min((tile.tile + 1) * FV_BM, sequence.q_len);
    for (int query = tile.tile * FV_BM + warp; query < end; query += FV_WARPS) {
        const i64 first = sequence.q_batch * p.partial_batch + head * p.partial_head + sequence.q_start + query;
        float top = -infinity();
        for (int i = 0; i < p.splits; ++i) top = fmaxf(top, __ldg(p.partial_max + i * p.partial_rows + first));
        const float safe = top == -infinity() ? 0.f : top;
        float total = 0.f;
        for (int i = 0; i < p.splits; ++i) {
            i64 row = i * p.partial_rows + first;
            total += __ldg(p.partial_sum + row) * exp2f((__ldg(p.partial_max + row) - safe) * LOG2_E);
        }
        const Row row = finish_row(p, sequence, head, query, top, total, lane == 0);
        for (int column = lane * 2; column < FV_DV; column += 64) {
            float x = 0.f, y = 0.f;
            for (int i = 0; i < p.splits; ++i) {
                i64 at = i * p.partial_rows + first;
                float weight = exp2f((__ldg(p.partial_max + at) - safe) * LOG2_E);
                x += p.partial_out[at * FV_DV + column] * weight;
                if (column + 1 < FV_DV) y += p.partial_out[at * FV_DV + column + 1] * weight;
            }
            store_out(row, column, x, y);
        }
    }
}
