// RMSNorm of each query and key head of a packed projection by itself, as rms_norm.cu has it for rows: LANES lanes of
// a warp a head, so that a warp has GROUPS heads at once. Query heads have one weight and key heads another; value heads stay as they are. Heads are turned by their
// positions in the same pass, as rope.cu has it: a lane computes the other elements of its pairs, too, which another
// lane has, so that nothing is rounded in between.
//
// The gradient of the weights is summed in two stages of fixed order: a warp over the tokens that are its own,
// fv_sum_parts (sum_parts.cu) over the warps.
//   FV_LANES     lanes that a head takes, a power of two
//   FV_HELD      vectors of a head that a lane holds
//   FV_TURN      0 heads stay, 1 pairs are halves, 2 neighbours

constexpr int HELD = FV_HELD, LANES = FV_LANES, GROUPS = 32 / LANES;
// Heads that lanes of the backward ask for before they compute with the first.
constexpr int AHEAD = HELD == 1 ? 2 : 1;

struct HeadNormParams {
    Rows qkv, out;                  // [tokens, (heads_q + 2 heads_kv) dim]
    u64 weight;                     // [2, dim]: of query heads, of key heads
    u64 inverse;                    // f32 [tokens, heads_q + heads_kv]
    u64 positions, table;           // as rope.cu has them
    int heads_q, heads_kv, dim, rotated;
    float eps, offset;
};

struct HeadNormBackwardParams {
    Rows qkv, d_qkv;                // d_qkv: in place
    u64 weight, inverse;
    u64 partial;                    // f32 [parts, 2 dim]; a part a warp
    u64 positions, table;
    int tokens, heads_q, heads_kv, dim, rotated, parts;
    float offset;
};

// Over the lanes of a head.
__device__ float head_sum(float x) {
    #pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
}

// Calls `each(h, column)` for this lane's vectors of a head.
template <typename F>
__device__ void for_each_held(int dim, F each) {
    #pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int column = (h * LANES + int(threadIdx.x % LANES)) * VECTOR;
        if (column < dim) each(h, column);
    }
}

// By what a token's heads turn.
struct Turn {
    const float* angles;            // `half` cosines, then as many sines
    int half;
    float sign;                     // -1: back

    __device__ Turn(u64 positions, u64 table, int rotated, i64 token, float sign) : angles(nullptr), half(rotated / 2), sign(sign) {
        if (FV_TURN) angles = reinterpret_cast<const float*>(table) + i64(reinterpret_cast<const int*>(positions)[token]) * rotated;
    }

    __device__ bool turns(int column) const { return FV_TURN && column < 2 * half; }

    // Turns the vector `x` of a head from `column` on; `load_at(other, column)` gives the one from another column on.
    template <typename F>
    __device__ void turn(float (&x)[VECTOR], int column, F load_at) const {
        float other[VECTOR], cosines[VECTOR], sines[VECTOR];
        if constexpr (FV_TURN == 1) {
            const bool second = column >= half;
            const int pair = second ? column - half : column;
            load_at(other, second ? pair : column + half);
            load_f32(cosines, angles + pair);
            load_f32(sines, angles + half + pair);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) sines[i] = second ? sines[i] : -sines[i];
        } else {
            if constexpr (VECTOR == 1) load_at(other, column ^ 1);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const int at = column + i;
                if constexpr (VECTOR > 1) other[i] = x[i ^ 1];
                cosines[i] = angles[at / 2];
                sines[i] = at % 2 ? angles[half + at / 2] : -angles[half + at / 2];
            }
        }
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) x[i] = x[i] * cosines[i] + sign * sines[i] * other[i];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
fv_head_norm(const __grid_constant__ HeadNormParams p) {
    const int head = blockIdx.y * (THREADS / LANES) + threadIdx.x / LANES, normalised = p.heads_q + p.heads_kv;
    const bool in = head < normalised + p.heads_kv, is_value = head >= normalised;
    const Elem* const from = p.qkv.row(blockIdx.x) + head * p.dim;
    float x[HELD][VECTOR], squares = 0.f;
    if (in) for_each_held(p.dim, [&](int h, int column) {
        load(x[h], from + column);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) squares = fmaf(x[h][i], x[h][i], squares);
    });
    const float inverse = 1.f / sqrtf(head_sum(squares) / float(p.dim) + p.eps);
    if (!in) return;
    if (!is_value && threadIdx.x % LANES == 0) reinterpret_cast<float*>(p.inverse)[i64(blockIdx.x) * normalised + head] = inverse;
    const Elem* const weight = reinterpret_cast<const Elem*>(p.weight) + (head < p.heads_q ? 0 : p.dim);
    const Turn turn(p.positions, p.table, p.rotated, blockIdx.x, 1.f);
    const auto normalise = [&](float (&of)[VECTOR], int column) {
        float w[VECTOR];
        load(w, weight + column);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) of[i] = of[i] * inverse * (p.offset + w[i]);
    };
    for_each_held(p.dim, [&](int h, int column) {
        if (!is_value) {
            normalise(x[h], column);
            if (turn.turns(column)) turn.turn(x[h], column, [&](float (&other)[VECTOR], int at) {
                load(other, from + at);
                normalise(other, at);
            });
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
        const int end = keys ? normalised : p.heads_q;
        float d_w[HELD][VECTOR] = {}, w[HELD][VECTOR];
        for_each_held(p.dim, [&](int h, int column) { load(w[h], weight + keys * p.dim + column); });
        #pragma unroll 1
        for (int token = part; token < p.tokens; token += p.parts) {
            const Turn turn(p.positions, p.table, p.rotated, token, -1.f);
            #pragma unroll 1
            for (int start = keys ? p.heads_q : 0; start < end; start += AHEAD * GROUPS) {
                float x[AHEAD][HELD][VECTOR] = {}, g[AHEAD][HELD][VECTOR] = {}, inverse[AHEAD];
                const auto head_of = [&](int a) { return start + a * GROUPS + int(threadIdx.x % 32) / LANES; };
                #pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    const int head = head_of(a);
                    inverse[a] = 0.f;
                    if (head >= end) continue;
                    inverse[a] = reinterpret_cast<const float*>(p.inverse)[i64(token) * normalised + head];
                    for_each_held(p.dim, [&](int h, int column) {
                        load(x[a][h], p.qkv.row(token) + head * p.dim + column);
                        load(g[a][h], p.d_qkv.row(token) + head * p.dim + column);
                    });
                }
                #pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    const int head = head_of(a);
                    Elem* const at_g = p.d_qkv.row(token) + head * p.dim;
                    float products = 0.f;
                    if (head < end) for_each_held(p.dim, [&](int h, int column) {
                        // All lanes read before one writes: the sum over a head's lanes waits for them.
                        if (turn.turns(column)) turn.turn(g[a][h], column, [&](float (&other)[VECTOR], int at) { load(other, at_g + at); });
                        #pragma unroll
                        for (int i = 0; i < VECTOR; ++i) {
                            const float product = x[a][h][i] * g[a][h][i];
                            d_w[h][i] = fmaf(product, inverse[a], d_w[h][i]);
                            products = fmaf(product, p.offset + w[h][i], products);
                        }
                    });
                    const float mean = head_sum(products) / float(p.dim) * inverse[a] * inverse[a];
                    if (head < end) for_each_held(p.dim, [&](int h, int column) {
                        #pragma unroll
                        for (int i = 0; i < VECTOR; ++i)
                            g[a][h][i] = inverse[a] * (g[a][h][i] * (p.offset + w[h][i]) - x[a][h][i] * mean);
                        store(at_g + column, g[a][h]);
                    });
                }
            }
        }
        // The heads of a warp, in an order that its lanes fix.
        #pragma unroll
        for (int h = 0; h < HELD; ++h)
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                #pragma unroll
                for (int lanes = 16; lanes >= LANES; lanes /= 2) d_w[h][i] += shuffle_xor(d_w[h][i], lanes);
        if (threadIdx.x % 32 < LANES) for_each_held(p.dim, [&](int h, int column) {
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) partial[keys * p.dim + column + i] = d_w[h][i];
        });
    }
}
