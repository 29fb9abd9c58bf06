// RMSNorm of each query and key head of a packed projection by itself, as rms_norm.cu has it for rows: a warp a
// head. Query heads have one weight and key heads another; value heads stay as they are.
//
// The gradient of the weights is summed in two stages of fixed order: a warp over the tokens that are its own,
// fv_sum_parts (sum_parts.cu) over the warps.
//   FV_HELD      vectors of a head that a lane holds

constexpr int HELD = FV_HELD;

struct HeadNormParams {
    Rows qkv, out;                  // [tokens, (heads_q + 2 heads_kv) dim]
    u64 weight;                     // [2, dim]: of query heads, of key heads
    u64 inverse;                    // f32 [tokens, heads_q + heads_kv]
    int heads_q, heads_kv, dim;
    float eps, offset;
};

struct HeadNormBackwardParams {
    Rows qkv, d_qkv;                // d_qkv: in place
    u64 weight, inverse;
    u64 partial;                    // f32 [parts, 2 dim]; a part a warp
    int tokens, heads_q, heads_kv, dim, parts;
    float offset;
};

__device__ float warp_sum(float x) {
    #pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
}

// Calls `each(h, column)` for this lane's vectors of a head.
template <typename F>
__device__ void for_each_held(int dim, F each) {
    #pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int column = (h * 32 + int(threadIdx.x % 32)) * VECTOR;
        if (column < dim) each(h, column);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_head_norm(const __grid_constant__ HeadNormParams p) {
    const int head = blockIdx.y * WARPS + threadIdx.x / 32, normalised = p.heads_q + p.heads_kv;
    const bool in = head < normalised + p.heads_kv, is_value = head >= normalised;
    const Elem* const from = p.qkv.row(blockIdx.x) + head * p.dim;
    float x[HELD][VECTOR], squares = 0.f;
    if (in) for_each_held(p.dim, [&](int h, int column) {
        load(x[h], from + column);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) squares = fmaf(x[h][i], x[h][i], squares);
    });
    const float inverse = 1.f / sqrtf(warp_sum(squares) / float(p.dim) + p.eps);
    if (!in) return;
    if (!is_value && threadIdx.x % 32 == 0) reinterpret_cast<float*>(p.inverse)[i64(blockIdx.x) * normalised + head] = inverse;
    const Elem* const weight = reinterpret_cast<const Elem*>(p.weight) + (head < p.heads_q ? 0 : p.dim);
    for_each_held(p.dim, [&](int h, int column) {
        if (!is_value) {
            float w[VECTOR];
            load(w, weight + column);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) x[h][i] = x[h][i] * inverse * (p.offset + w[i]);
        }
        store(p.out.row(blockIdx.x) + head * p.dim + column, x[h]);
    });
}

// One CTA an SM is enough to ask for: asked for none, the compiler for sm_120 saves registers by spilling.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
fv_head_norm_backward(const __grid_constant__ HeadNormBackwardParams p) {
    const int part = blockIdx.x * WARPS + threadIdx.x / 32, normalised = p.heads_q + p.heads_kv;
    const Elem* const weight = reinterpret_cast<const Elem*>(p.weight);
    float* const partial = reinterpret_cast<float*>(p.partial) + i64(part) * 2 * p.dim;
    #pragma unroll 1
    for (int keys = 0; keys < 2; ++keys) {
        float d_w[HELD][VECTOR] = {}, w[HELD][VECTOR];
        for_each_held(p.dim, [&](int h, int column) { load(w[h], weight + keys * p.dim + column); });
        #pragma unroll 1
        for (int token = part; token < p.tokens; token += p.parts) {
            #pragma unroll 1
            for (int head = keys ? p.heads_q : 0; head < (keys ? normalised : p.heads_q); ++head) {
                const float inverse = reinterpret_cast<const float*>(p.inverse)[i64(token) * normalised + head];
                const Elem* const at_x = p.qkv.row(token) + head * p.dim;
                Elem* const at_g = p.d_qkv.row(token) + head * p.dim;
                float x[HELD][VECTOR], g[HELD][VECTOR], products = 0.f;
                for_each_held(p.dim, [&](int h, int column) {
                    load(x[h], at_x + column);
                    load(g[h], at_g + column);
                    #pragma unroll
                    for (int i = 0; i < VECTOR; ++i) {
                        const float product = x[h][i] * g[h][i];
                        d_w[h][i] = fmaf(product, inverse, d_w[h][i]);
                        products = fmaf(product, p.offset + w[h][i], products);
                    }
                });
                const float mean = warp_sum(products) / float(p.dim) * inverse * inverse;
                for_each_held(p.dim, [&](int h, int column) {
                    #pragma unroll
                    for (int i = 0; i < VECTOR; ++i) g[h][i] = inverse * (g[h][i] * (p.offset + w[h][i]) - x[h][i] * mean);
                    store(at_g + column, g[h]);
                });
            }
        }
        for_each_held(p.dim, [&](int h, int column) {
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) partial[keys * p.dim + column + i] = d_w[h][i];
        });
    }
}
