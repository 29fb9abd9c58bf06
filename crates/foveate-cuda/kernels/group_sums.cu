// dk and dv of key/value heads from those of their query heads: fv_group_sums<<<(tiles of keys, heads_kv), FV_WARPS *
// 32>>>
//
//     dk = sum of head_dk over the query heads of the group, or dk += it with accumulate, rounded once to its dtype
//
// and dv alike. Summed in f32, in order of the heads. fv_backward with FV_SPLIT_GQA has written them, dk with its
// scale.
//
// Roles: a thread sums 8 columns of a row of dk or of dv.
// No barriers, no shared memory.

extern "C" __device__ const int fv_shared_bytes = 0;

// Columns column .. column + 8 of row `row` of the tile's sequence.
__device__ void sum_group(const View& to, const View& of_head, const Sequence& s, int head_kv, int row, int column,
                          int dim, bool accumulate) {
    if (!to.data) return;     // not asked for
    float x[8] = {};
    #pragma unroll 8
    for (int member = 0; member < FV_GROUP; ++member) {
        const i64 at = of_head.at(s.k_batch, head_kv * FV_GROUP + member, s.k_start + row);
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(of_head.data) + at + column);
        const float4 low = from[0], high = from[1];
        const float of_member[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        #pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += of_member[i];
    }
    GradElem* data = static_cast<GradElem*>(to.data) + to.at(s.k_batch, head_kv, s.k_start + row);
    store_eight(data, to.elem, column, dim, x, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_group_sums(const __grid_constant__ BackwardParams p) {
    static_assert(FV_D % 8 == 0 && FV_DV % 8 == 0, "rows of whole 8 columns");
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence s = p.sequences[tile.sequence];
    constexpr int OF_K = FV_D / 8, COLUMNS = OF_K + FV_DV / 8;
    for (int i = threadIdx.x; i < FV_BN * COLUMNS; i += THREADS) {
        const int row = tile.tile * FV_BN + i / COLUMNS, column = i % COLUMNS;
        if (row >= s.k_len) break;
        if (column < OF_K) sum_group(p.dk, p.head_dk, s, blockIdx.y, row, column * 8, FV_D, p.accumulate);
        else sum_group(p.dv, p.head_dv, s, blockIdx.y, row, (column - OF_K) * 8, FV_DV, p.accumulate);
    }
}
