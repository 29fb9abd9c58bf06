// RMSNorm, alone or of a sum: a CTA a row.
//
//     x += residual     r = 1 / sqrt(mean(x^2) + eps)     out = x r (offset + w)
//
// so for a gradient g of out
//
//     dw = sum over rows of g x r     dx = r (g (offset + w) - x r^2 mean(g (offset + w) x))
//
// A thread holds its HELD vectors of a row, so that rows are read once. The gradient of the weight is summed in two
// stages of fixed order: fv_rms_norm_backward over every PARTS-th row, fv_sum_parts (sum_parts.cu) over these.
//   FV_HELD      vectors of a row that a thread holds

struct RmsNormParams {
    Rows x, residual, sum, out;     // no residual: its data is null; sum may be x
    u64 weight;                     // [width]
    u64 inverse;                    // f32 [rows]
    int width;
    float eps, offset;
};

// Calls `each(h, column)` for this thread's vectors of a row.
template <typename F>
__device__ void for_each_held(int width, F each) {
    #pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int column = (h * THREADS + int(threadIdx.x)) * VECTOR;
        if (column < width) each(h, column);
    }
}

// out from x and r, as both the first and the second time.
__device__ void normalise(const RmsNormParams& p, const float (&x)[HELD][VECTOR], float inverse) {
    Elem* const out = p.out.row(blockIdx.x);
    for_each_held(p.width, [&](int h, int column) {
        float w[VECTOR];
        load(w, reinterpret_cast<const Elem*>(p.weight) + column);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) w[i] = x[h][i] * inverse * (p.offset + w[i]);
        store(out + column, w);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_rms_norm(const __grid_constant__ RmsNormParams p) {
    const i64 row = blockIdx.x;
    float x[HELD][VECTOR], squares = 0.f;
    for_each_held(p.width, [&](int h, int column) {
        load(x[h], p.x.row(row) + column);
        if (p.residual.data != 0) {
            float residual[VECTOR];
            load(residual, p.residual.row(row) + column);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) x[h][i] = rounded(x[h][i] + residual[i]);
            store(p.sum.row(row) + column, x[h]);
        }
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) squares = fmaf(x[h][i], x[h][i], squares);
    });
    const float inverse = 1.f / sqrtf(cta_sum(squares) / float(p.width) + p.eps);
    if (threadIdx.x == 0) reinterpret_cast<float*>(p.inverse)[row] = inverse;
    normalise(p, x, inverse);
}

// out once more, to the bit, from x and r.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_rms_norm_again(const __grid_constant__ RmsNormParams p) {
    float x[HELD][VECTOR];
    for_each_held(p.width, [&](int h, int column) { load(x[h], p.x.row(blockIdx.x) + column); });
    normalise(p, x, reinterpret_cast<const float*>(p.inverse)[blockIdx.x]);
}

// Writes out once more, too, where it is asked for, to the bit: what multiplies with it needs no pass over x of its own.
// The gradients of a row are read for the sum, and held for what needs it where they are 16 bits. What lies in
// d_out is read before d_x is written, by the same thread: they may be one.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_rms_norm_backward(const __grid_constant__ RmsNormBackwardParams p) {
    constexpr bool HOLDS = sizeof(Elem) == 2;
    const Elem* const weight = reinterpret_cast<const Elem*>(p.weight);
    float d_w[HELD][VECTOR] = {};
    #pragma unroll 1
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const float inverse = reinterpret_cast<const float*>(p.inverse)[row];
        Vector<Elem, VECTOR> x[HELD], g[HELD];
        float w[VECTOR], products = 0.f;
        for_each_held(p.width, [&](int h, int column) {
            x[h] = fetch(p.x.row(row) + column);
            g[h] = fetch(p.d_out.row(row) + column);
            load(w, weight + column);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float product = widen<FV_DTYPE>(x[h].of[i]) * widen<FV_DTYPE>(g[h].of[i]);
                d_w[h][i] = fmaf(product, inverse, d_w[h][i]);
                products = fmaf(product, p.offset + w[i], products);
            }
        });
        const float mean = cta_sum(products) / float(p.width) * inverse * inverse;
        for_each_held(p.width, [&](int h, int column) {
            if (!HOLDS) {
                x[h] = fetch(p.x.row(row) + column);
                g[h] = fetch(p.d_out.row(row) + column);
            }
            Elem* const to = p.d_x.row(row) + column;
            float d_x[VECTOR] = {};
            if (p.accumulate) load(d_x, to);
            load(w, weight + column);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                d_x[i] += inverse * (widen<FV_DTYPE>(g[h].of[i]) * (p.offset + w[i]) - widen<FV_DTYPE>(x[h].of[i]) * mean);
            store(to, d_x);
        });
        if (p.again.data != 0) give_again(p, row, inverse, int(threadIdx.x), THREADS);
    }
    float* const partial = reinterpret_cast<float*>(p.partial) + i64(blockIdx.x) * p.width;
    for_each_held(p.width, [&](int h, int column) { store_f32(partial + column, d_w[h]); });
}
