// Gradients of RMSNorm (rms_norm.cu) for rows that the registers of a warp hold: a warp a row. No row waits for
// other warps, and all that is read of a row is asked for at once, so that many bytes are on their way.
//
// The gradient of the weight is summed in stages of fixed order: a warp over its rows, the CTA over its warps,
// fv_sum_parts (sum_parts.cu) over the CTAs.
//   FV_HELD      vectors of a row that a lane holds

// Calls `each(h, column)` for this lane's vectors of a row.
template <typename F>
__device__ void for_each_held(int width, F each) {
    #pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int column = (h * 32 + int(threadIdx.x % 32)) * VECTOR;
        if (column < width) each(h, column);
    }
}

// What the forward gave of a row, to the bit: x comes from the caches, a few vectors at a time, so that no
// registers hold it until here.
__device__ void give_again(const RmsNormBackwardParams& p, int row, float inverse) {
    #pragma unroll 4
    for (int column = int(threadIdx.x % 32) * VECTOR; column < p.width; column += 32 * VECTOR) {
        float again[VECTOR], w[VECTOR];
        load(again, p.x.row(row) + column);
        load(w, reinterpret_cast<const Elem*>(p.weight) + column);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) again[i] = again[i] * inverse * (p.offset + w[i]);
        store(p.again.row(row) + column, again);
    }
}

// What lies in d_out is read before d_x is written, by the same lane: they may be one.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_rms_norm_backward_rows(const __grid_constant__ RmsNormBackwardParams p) {
    const Elem* const weight = reinterpret_cast<const Elem*>(p.weight);
    const int warp = threadIdx.x / 32;
    float d_w[HELD][VECTOR] = {};
    #pragma unroll 1
    for (int row = blockIdx.x * WARPS + warp; row < p.rows; row += gridDim.x * WARPS) {
        const float inverse = reinterpret_cast<const float*>(p.inverse)[row];
        Vector<Elem, VECTOR> x[HELD], g[HELD], before[HELD];
        for_each_held(p.width, [&](int h, int column) {
            x[h] = fetch(p.x.row(row) + column);
            g[h] = fetch(p.d_out.row(row) + column);
            if (p.accumulate) before[h] = fetch(p.d_x.row(row) + column);
        });
        float w[VECTOR], products = 0.f;
        for_each_held(p.width, [&](int h, int column) {
            load(w, weight + column);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float product = widen<FV_DTYPE>(x[h].of[i]) * widen<FV_DTYPE>(g[h].of[i]);
                d_w[h][i] = fmaf(product, inverse, d_w[h][i]);
                products = fmaf(product, p.offset + w[i], products);
            }
        });
        #pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) products += shuffle_xor(products, lanes);
        const float mean = products / float(p.width) * inverse * inverse;
        for_each_held(p.width, [&](int h, int column) {
            load(w, weight + column);
            float d_x[VECTOR];
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float own = widen<FV_DTYPE>(g[h].of[i]) * (p.offset + w[i]) - widen<FV_DTYPE>(x[h].of[i]) * mean;
                d_x[i] = (p.accumulate ? widen<FV_DTYPE>(before[h].of[i]) : 0.f) + inverse * own;
            }
            store(p.d_x.row(row) + column, d_x);
        });
        if (p.again.data != 0) give_again(p, row, inverse);
    }
    float* const sums = scratch<float>();
    #pragma unroll 1
    for (int turn = 0; turn < WARPS; ++turn) {
        if (turn == warp) for_each_held(p.width, [&](int h, int column) {
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) sums[column + i] = (turn > 0 ? sums[column + i] : 0.f) + d_w[h][i];
        });
        sync_cta();
    }
    float* const partial = reinterpret_cast<float*>(p.partial) + i64(blockIdx.x) * p.width;
    for (int column = threadIdx.x; column < p.width; column += THREADS) partial[column] = sums[column];
}
