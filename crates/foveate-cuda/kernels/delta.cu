// What the backward needs of each row beforehand: fv_delta<<<(tiles of queries, heads_q), FV_WARPS * 32>>>
//
//     delta[row] = sum over d of out * d_out, minus d_lse
//
// and from it the gradient of the sink, fv_sink_gradient<<<heads_q, 1024, 128>>>:
//
//     d_sink[h] = - sum over rows of exp(sink[h] - lse) * delta
//
// which one block for each head sums in a fixed order, so that it is the same in every run; where
// lse is huge the powers are divided by what the row's add up to (see fv_row_weight_sum).
// fv_delta needs no shared memory, fv_sink_gradient 128 bytes.

extern "C" __device__ const int fv_shared_bytes = 0;

// A row is read in pieces as wide as its alignment allows, by as many lanes as it has pieces.
constexpr int PIECE = FV_ALIGN < ELEM_BYTES ? 1 : FV_ALIGN / ELEM_BYTES;
constexpr int PIECES = ceil_div(FV_DV, PIECE);
constexpr int lanes_for(int pieces) {
    int lanes = 1;
    while (lanes < 32 && lanes < pieces) lanes *= 2;
    return lanes;
}
constexpr int LANES = lanes_for(PIECES);

// Elements column .. column + PIECE of a row, zeros past its end.
__device__ void read_piece(float (&x)[PIECE], const View& view, i64 row, int column) {
    const Elem* data = static_cast<const Elem*>(view.data) + row;
#if FV_ALIGN >= 4
    if (column + PIECE <= FV_DV) {
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
        for (int i = 0; i < PIECE; ++i) {
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
    for (int i = 0; i < PIECE; ++i)
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
            for (int piece = lane; piece < PIECES; piece += LANES) {
                float out[PIECE], d_out[PIECE];
                read_piece(out, p.out, out_row, piece * PIECE);
                read_piece(d_out, p.d_out, d_out_row, piece * PIECE);
                #pragma unroll
                for (int i = 0; i < PIECE; ++i) sum = fmaf(out[i], d_out[i], sum);
            }
        }
        #pragma unroll
        for (int apart = LANES / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
        if (row < end && lane == 0) {
            if (p.d_lse.data)
                sum -= p.d_lse.data[s.q_batch * p.d_lse.batch + head * p.d_lse.head + at * p.d_lse.row];
            p.delta.data[s.q_batch * p.delta.batch + head * p.delta.head + at * p.delta.row] = sum;
        }
    }
}

#if FV_SINK
// A warp walks every 32nd tile, a lane every 32nd row of it; then lanes, then warps are added up.
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
            const bool divides = p.row_weight_sum && is_huge(lse);
            const float rest = divides ? p.row_weight_sum[s.q_batch * p.delta.batch + head * p.delta.head + at * p.delta.row] : 1.f;
            sum -= expf(sink - lse) / rest * delta;
        }
    }
    #pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (lane == 0) of_warp[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.f;
        for (int w = 0; w < 32; ++w) total += of_warp[w];
        p.d_sink[head] = p.accumulate ? p.d_sink[head] + total : total;
    }
}
#endif
