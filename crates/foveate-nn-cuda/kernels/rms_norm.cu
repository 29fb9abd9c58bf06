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

// The sum over the CTA, as cta_sum, by one barrier. `turn` is 0 and 1 in turns: what was written two calls ago has been
// read before the barrier of the last.
__device__ float cta_sum_in_turn(float x, int turn) {
    float* const of_warps = scratch<float>() + turn * WARPS;
    #pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    sync_cta();
    float sum = of_warps[0];
    #pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) sum += of_warps[warp];
    return sum;
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

// All that is read of a row is asked for at once, where registers hold it: with 1024 threads an SM enough is on its way
// then. Elements that take a register each leave one CTA.
constexpr bool AT_ONCE = HELD <= 8;
constexpr int CTAS = sizeof(Elem) == 2 && VECTOR > 1 && THREADS < 1024 ? 1024 / THREADS : 1;

// Writes out once more, too, where it is asked for, to the bit: what multiplies with it needs no pass over x of its
// own. What lies in d_out is read before d_x is written, by the same thread: they may be one.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
fv_rms_norm_backward(const __grid_constant__ RmsNormBackwardParams p) {
    const Elem* const weight = reinterpret_cast<const Elem*>(p.weight);
    float d_w[HELD][VECTOR] = {};
    int turn = 0;
    #pragma unroll 1
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
        const float inverse = reinterpret_cast<const float*>(p.inverse)[row];
        Vector<Elem, VECTOR> x[HELD], g[HELD], before[HELD];
        for_each_held(p.width, [&](int h, int column) {
            x[h] = fetch(p.x.row(row) + column);
            g[h] = fetch(p.d_out.row(row) + column);
            if (p.accumulate && AT_ONCE) before[h] = fetch(p.d_x.row(row) + column);
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
        const float mean = cta_sum_in_turn(products, turn) / float(p.width) * inverse * inverse;
        for_each_held(p.width, [&](int h, int column) {
            if (p.accumulate && !AT_ONCE) before[h] = fetch(p.d_x.row(row) + column);
            float d_x[VECTOR];
            load(w, weight + column);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float own = widen<FV_DTYPE>(g[h].of[i]) * (p.offset + w[i]) - widen<FV_DTYPE>(x[h].of[i]) * mean;
                d_x[i] = (p.accumulate ? widen<FV_DTYPE>(before[h].of[i]) : 0.f) + inverse * own;
            }
            store(p.d_x.row(row) + column, d_x);
        });
        if (p.again.data != 0) for_each_held(p.width, [&](int h, int column) {
            float again[VECTOR];
            load(w, weight + column);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) again[i] = widen<FV_DTYPE>(x[h].of[i]) * inverse * (p.offset + w[i]);
            store(p.again.row(row) + column, again);
        });
    }
    float* const partial = reinterpret_cast<float*>(p.partial) + i64(blockIdx.x) * p.width;
    for_each_held(p.width, [&](int h, int column) { store_f32(partial + column, d_w[h]); });
}
