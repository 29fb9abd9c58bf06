// delta, and from it the gradient of the sink: fv_delta<<<(tiles of queries, heads_q), FV_WARPS * 32>>>
//
//     delta[row] = sum over d of out * d_out, minus d_lse
//
// and fv_sink_gradient<<<heads_q, 1024, 128 bytes of smem>>>:
//
//     d_sink[h] = - sum over rows of exp(sink[h] - lse) * delta
//
// One CTA for each head sums in a fixed order, so that every run gives the same bits; where lse is huge,
// the exponential is divided by row_weight_sum (see fv_row_weight_sum).
//
// Roles: fv_delta, LANES lanes for each row; fv_sink_gradient, a warp for every 32nd tile.
// Barriers: one __syncthreads of fv_sink_gradient. Shared memory: none, and 128 bytes.

extern "C" __device__ const int fv_shared_bytes = 0;

// A row is read in vectors as wide as its alignment allows, by as many lanes as it has vectors.
constexpr int VECTOR = FV_ALIGN < ELEM_BYTES ? 1 : FV_ALIGN / ELEM_BYTES;
constexpr int VECTORS = ceil_div(FV_DV, VECTOR);
constexpr int lanes_of_row(int vectors) {
    int lanes = 1;
    while (lanes < 32 && lanes < vectors) lanes *= 2;
    return lanes;
}
constexpr int LANES = lanes_of_row(VECTORS);

// Elements column .. column + VECTOR of a row, zeros past its end.
__device__ void read_vector(float (&x)[VECTOR], const View& view, i64 row, int column) {
    const Elem* data = static_cast<const Elem*>(view.data) + row;
#if FV_ALIGN >= 4
    if (column + VECTOR <= FV_DV) {
        const char* at = reinterpret_cast<const char*>(data + column);
        u32 word[FV_ALIGN / 4];
#if FV_ALIGN == 16
        uint4 w = __ldg(reinterpret_cast<const uint4*>(at));
        word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
#elif FV_ALIGN == 8
        uint2 w = __ldg(reinterpret_cast<const uint2*>(at));
        word[0] = w.x, word[1] = w.y;
#else
        word[0] = __ldg(reinterpret_cast<const u32*>(at));
#endif
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
#if FV_DTYPE == 2
            x[i] = __uint_as_float(word[i]);
#else
            x[i] = widen<FV_DTYPE>((unsigned short)(word[i / 2] >> i % 2 * 16));
#endif
        }
        return;
    }
#endif
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i)
        x[i] = column + i < FV_DV ? widen<FV_DTYPE>(__ldg(data + (column + i) * view.elem)) : 0.f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_delta(const __grid_constant__ BackwardParams p) {
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence s = p.sequences[tile.sequence];
    const int head = blockIdx.y, lane = threadIdx.x % LANES;
    const int end = min(s.q_len, (tile.tile + 1) * FV_BM);
    for (int row0 = tile.tile * FV_BM; row0 < end; row0 += THREADS / LANES) {
        const int row = row0 + threadIdx.x / LANES;
        const i64 at = s.q_start + row;
        float sum = 0.f;
        if (row < end) {
            const i64 out_row = p.out.at(s.q_batch, head, at);
            const i64 d_out_row = p.d_out.at(s.q_batch, head, at);
            for (int vector = lane; vector < VECTORS; vector += LANES) {
                float out[VECTOR], d_out[VECTOR];
                read_vector(out, p.out, out_row, vector * VECTOR);
                read_vector(d_out, p.d_out, d_out_row, vector * VECTOR);
                #pragma unroll
                for (int i = 0; i < VECTOR; ++i) sum = fmaf(out[i], d_out[i], sum);
            }
        }
        #pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (row < end && lane == 0) {
            if (p.d_lse.data)
                sum -= p.d_lse.data[s.q_batch * p.d_lse.batch + head * p.d_lse.head + at * p.d_lse.row];
            p.delta.data[s.q_batch * p.delta.batch + head * p.delta.head + at * p.delta.row] = sum;
        }
    }
}

#if FV_SINK
// A warp sums every 32nd tile, a lane every 32nd row of a tile; then lanes, then warps are reduced.
extern "C" __global__ void __launch_bounds__(1024)
fv_sink_gradient(const __grid_constant__ BackwardParams p) {
    extern __shared__ float of_warp[];
    const int head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float sink = p.sink[head];
    float sum = 0.f;
    for (int t = warp; t < p.tile_count; t += 32) {
        const Tile tile = p.tiles[t];
        const Sequence s = p.sequences[tile.sequence];
        const int end = min(s.q_len, (tile.tile + 1) * FV_BM);
        for (int row = tile.tile * FV_BM + lane; row < end; row += 32) {
            const i64 at = s.q_start + row;
            const float lse = p.lse.data[s.q_batch * p.lse.batch + head * p.lse.head + at * p.lse.row];
            const float delta = p.delta.data[s.q_batch * p.delta.batch + head * p.delta.head + at * p.delta.row];
            if (lse == -infinity()) continue;
            const bool huge = p.row_weight_sum && is_huge(lse);
            const float weight_sum =
                huge ? p.row_weight_sum[s.q_batch * p.delta.batch + head * p.delta.head + at * p.delta.row] : 1.f;
            sum -= expf(sink - lse) / weight_sum * delta;
        }
    }
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0) of_warp[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.f;
        for (int w = 0; w < 32; ++w) total += of_warp[w];
        p.d_sink[head] = p.accumulate ? p.d_sink[head] + total : total;
    }
}
#endif
