// RMSNorm of each query and key head of a packed projection by itself, as rms_norm.cu has it for rows: LANES lanes of
// a warp a head, so that a warp has GROUPS heads at once. Query heads have one weight and key heads another; value
// heads stay as they are. Heads are turned by their positions in the same pass, as rope.cu has it. The other elements
// of its pairs, not rounded yet, a lane is given by the one that has them; where lanes hold several vectors of a head,
// it computes them, too.
//
// All that heads need is asked for before a sum over lanes waits for the first of it; angles of a token serve all its
// heads. The gradient of the weights is summed in stages of fixed order: a warp over the tokens that are its own, the
// CTA over its warps, fv_sum_parts (sum_parts.cu) over the CTAs.
//   FV_LANES     lanes that a head takes, a power of two
//   FV_HELD      vectors of a head that a lane holds
//   FV_AHEAD     heads that lanes ask for before they compute with the first
//   FV_TURN      0 heads stay, 1 pairs are halves, 2 neighbours

constexpr int HELD = FV_HELD, LANES = FV_LANES, GROUPS = 32 / LANES;
constexpr int AHEAD = FV_AHEAD, AHEAD_BACKWARD = HELD == 1 ? 4 : 1;

typedef Vector<Elem, VECTOR> Elems;

struct HeadNormParams {
    Rows qkv, out;                  // [tokens, (heads_q + 2 heads_kv) dim]
    u64 weight;                     // [2, dim]: of query heads, of key heads
    u64 inverse;                    // f32 [tokens, heads_q + heads_kv]
    u64 positions, table;           // as rope.cu has them
    int tokens, heads_q, heads_kv, dim, rotated;
    float eps, offset;
};

struct HeadNormBackwardParams {
    Rows qkv, d_qkv;                // d_qkv: in place
    u64 weight, inverse;
    u64 partial;                    // f32 [parts, 2 dim]; a part a CTA
    u64 positions, table;
    int tokens, heads_q, heads_kv, dim, rotated;
    float offset;
};

// Over the lanes of a head.
__device__ float head_sum(float x) {
    #pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
}

// Where this lane's vector h of a head begins.
__device__ int column_of(int h) { return (h * LANES + int(threadIdx.x % LANES)) * VECTOR; }

// Calls `each(h, column)` for this lane's vectors of a head.
template <typename F>
__device__ void for_each_held(int dim, F each) {
    #pragma unroll
    for (int h = 0; h < HELD; ++h)
        if (const int column = column_of(h); column < dim) each(h, column);
}

__device__ int position_of(u64 positions, i64 token) {
    return FV_TURN ? reinterpret_cast<const int*>(positions)[token] : 0;
}

// By what this lane's vectors of a head at a position turn, forward or, with a sign of -1, back. Nothing waits for
// angles before they are used.
struct Turn {
    float cosines[HELD][VECTOR], sines[HELD][VECTOR], sign;
    int half;

    __device__ Turn(u64 table, int rotated, int dim, int position, float sign) : sign(sign), half(rotated / 2) {
        if constexpr (FV_TURN == 0) return;
        // `half` cosines, then as many sines.
        const float* const angles = reinterpret_cast<const float*>(table) + i64(position) * rotated;
        for_each_held(dim, [&](int h, int column) {
            if (!turns(column)) return;
            if constexpr (FV_TURN == 1) {
                const int pair = column < half ? column : column - half;
                load_f32(cosines[h], angles + pair);
                load_f32(sines[h], angles + half + pair);
            } else {
                #pragma unroll
                for (int i = 0; i < VECTOR; ++i) {
                    cosines[h][i] = angles[(column + i) / 2];
                    sines[h][i] = angles[half + (column + i) / 2];
                }
            }
        });
    }

    __device__ bool turns(int column) const { return FV_TURN && column < 2 * half; }

    // Whether the other elements of pairs lie in another vector, which begins at `other_column`, and whether that is
    // another lane's only one.
    static constexpr bool APART = FV_TURN == 1 || FV_TURN == 2 && VECTOR == 1, OF_LANE = APART && HELD == 1;
    __device__ int other_column(int column) const {
        if constexpr (FV_TURN == 2) return column ^ 1;
        else return column < half ? column + half : column - half;
    }

    // What the lane has that holds the other elements of this one's pairs. All lanes of a warp call it.
    __device__ void exchange(float (&other)[VECTOR], const float (&x)[VECTOR], int column) const {
        const int of_head = (turns(column) ? other_column(column) : column) / VECTOR;
        const int lane = int(threadIdx.x % 32) / LANES * LANES + of_head;
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) other[i] = shuffle(x[i], lane);
    }

    // Turns vector h from `column` on, whose pairs have `other`.
    __device__ void turn(float (&x)[VECTOR], int h, int column, const float (&other)[VECTOR]) const {
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const bool second = FV_TURN == 1 ? column >= half : (column + i) % 2;
            x[i] = x[i] * cosines[h][i] + (second ? sign : -sign) * sines[h][i] * other[i];
        }
    }
    // The same by neighbours in it.
    __device__ void turn(float (&x)[VECTOR], int h, int column) const {
        float other[VECTOR];
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) other[i] = x[VECTOR > 1 ? i ^ 1 : i];
        turn(x, h, column, other);
    }
};

// A CTA takes some heads of every gridDim.x-th token, and asks for the position of the next before it needs it: angles
// wait for positions.
extern "C" __global__ void __launch_bounds__(THREADS, HELD == 1 && VECTOR > 1 ? 9 : 1)
fv_head_norm(const __grid_constant__ HeadNormParams p) {
    constexpr int OF_CTA = THREADS / LANES;
    const int first = blockIdx.y * (AHEAD * OF_CTA) + threadIdx.x / LANES, normalised = p.heads_q + p.heads_kv;
    const Elem* const weights = reinterpret_cast<const Elem*>(p.weight);
    int next = position_of(p.positions, blockIdx.x);
    #pragma unroll 1
    for (int token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        Elems x[AHEAD][HELD];
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int head = first + a * OF_CTA;
            if (head < normalised + p.heads_kv) for_each_held(p.dim, [&](int h, int column) {
                x[a][h] = fetch(p.qkv.row(token) + head * p.dim + column);
            });
        }
        const Turn turn(p.table, p.rotated, p.dim, next, 1.f);
        if (token + int(gridDim.x) < p.tokens) next = position_of(p.positions, token + gridDim.x);
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int head = first + a * OF_CTA;
            const bool in = head < normalised + p.heads_kv, is_value = head >= normalised;
            float squares = 0.f, y[VECTOR];
            if (in) for_each_held(p.dim, [&](int h, int) {
                widened(y, x[a][h]);
                #pragma unroll
                for (int i = 0; i < VECTOR; ++i) squares = fmaf(y[i], y[i], squares);
            });
            const float inverse = 1.f / sqrtf(head_sum(squares) / float(p.dim) + p.eps);
            if (in && !is_value && threadIdx.x % LANES == 0)
                reinterpret_cast<float*>(p.inverse)[i64(token) * normalised + head] = inverse;
            const auto normalise = [&](float (&of)[VECTOR], const Elems& held, int column) {
                float w[VECTOR];
                load(w, weights + (head < p.heads_q ? 0 : p.dim) + column);
                widened(of, held);
                #pragma unroll
                for (int i = 0; i < VECTOR; ++i) of[i] = of[i] * inverse * (p.offset + w[i]);
            };
            #pragma unroll
            for (int h = 0; h < HELD; ++h) {
                const int column = column_of(h);
                const bool own = in && column < p.dim, turns = own && !is_value && turn.turns(column);
                float pairs[VECTOR];
                if (own && !is_value) normalise(y, x[a][h], column);
                if constexpr (Turn::OF_LANE) turn.exchange(pairs, y, column);
                if (turns) {
                    if constexpr (Turn::APART) {
                        if constexpr (!Turn::OF_LANE) {
                            const int at = turn.other_column(column);
                            normalise(pairs, fetch(p.qkv.row(token) + head * p.dim + at), at);
                        }
                        turn.turn(y, h, column, pairs);
                    } else turn.turn(y, h, column);
                }
                if (own) {
                    Elems* const to = reinterpret_cast<Elems*>(p.out.row(token) + head * p.dim + column);
                    store_whole(to, is_value ? x[a][h] : narrowed(y));
                }
            }
        }
    }
}

// Gradients of query and key heads are summed apart, so a lane whose head is a query's adds nothing to the keys'.
// With four CTAs an SM the 512 that there are at most run at once. Of heads that lanes hold several vectors of, one:
// asked for more, the compiler spills.
extern "C" __global__ void __launch_bounds__(THREADS, HELD == 1 ? 4 : 1)
fv_head_norm_backward(const __grid_constant__ HeadNormBackwardParams p) {
    const int warp = threadIdx.x / 32, group = int(threadIdx.x % 32) / LANES, normalised = p.heads_q + p.heads_kv;
    const Elem* const weights = reinterpret_cast<const Elem*>(p.weight);
    const float share = 1.f / float(p.dim);
    float d_w[2][HELD][VECTOR] = {};
    const int stride = gridDim.x * WARPS;
    int token = blockIdx.x * WARPS + warp, next = token < p.tokens ? position_of(p.positions, token) : 0;
    #pragma unroll 1
    for (; token < p.tokens; token += stride) {
        const Turn turn(p.table, p.rotated, p.dim, next, -1.f);
        if (token + stride < p.tokens) next = position_of(p.positions, token + stride);
        #pragma unroll 1
        for (int start = 0; start < normalised; start += AHEAD_BACKWARD * GROUPS) {
            Elems x[AHEAD_BACKWARD][HELD], g[AHEAD_BACKWARD][HELD], other[AHEAD_BACKWARD][HELD];
            float inverse[AHEAD_BACKWARD];
            #pragma unroll
            for (int a = 0; a < AHEAD_BACKWARD; ++a) {
                const int head = start + a * GROUPS + group;
                inverse[a] = 0.f;
                if (head >= normalised) continue;
                inverse[a] = reinterpret_cast<const float*>(p.inverse)[i64(token) * normalised + head];
                const Elem* const at_g = p.d_qkv.row(token) + head * p.dim;
                for_each_held(p.dim, [&](int h, int column) {
                    x[a][h] = fetch_streaming(p.qkv.row(token) + head * p.dim + column);
                    g[a][h] = fetch(at_g + column);
                    if (Turn::APART && !Turn::OF_LANE && turn.turns(column))
                        other[a][h] = fetch(at_g + turn.other_column(column));
                });
            }
            #pragma unroll
            for (int a = 0; a < AHEAD_BACKWARD; ++a) {
                if (start + a * GROUPS >= normalised) break;
                const int head = start + a * GROUPS + group;
                const bool in = head < normalised, is_key = head >= p.heads_q;
                const Elem* const weight = weights + (is_key ? p.dim : 0);
                float y[VECTOR], w[VECTOR], d_y[HELD][VECTOR], products = 0.f;
                #pragma unroll
                for (int h = 0; h < HELD; ++h) {
                    const int column = column_of(h);
                    const bool own = in && column < p.dim, turns = own && turn.turns(column);
                    float pairs[VECTOR];
                    if (own) widened(d_y[h], g[a][h]);
                    if constexpr (Turn::OF_LANE) turn.exchange(pairs, d_y[h], column);
                    if (turns) {
                        if constexpr (Turn::APART) {
                            if constexpr (!Turn::OF_LANE) widened(pairs, other[a][h]);
                            turn.turn(d_y[h], h, column, pairs);
                        } else turn.turn(d_y[h], h, column);
                    }
                    if (!own) continue;
                    load(w, weight + column);
                    widened(y, x[a][h]);
                    #pragma unroll
                    for (int i = 0; i < VECTOR; ++i) {
                        const float product = y[i] * d_y[h][i];
                        // A product that is not finite reaches the weights of both kinds: its step is left out anyway.
                        #pragma unroll
                        for (int keys = 0; keys < 2; ++keys)
                            d_w[keys][h][i] = fmaf(product, keys == is_key ? inverse[a] : 0.f, d_w[keys][h][i]);
                        products = fmaf(product, p.offset + w[i], products);
                    }
                }
                // All lanes have read before one writes: the sum over a head's lanes waits for them.
                const float mean = head_sum(products) * share * inverse[a] * inverse[a];
                if (in) for_each_held(p.dim, [&](int h, int column) {
                    load(w, weight + column);
                    widened(y, x[a][h]);
                    #pragma unroll
                    for (int i = 0; i < VECTOR; ++i) y[i] = inverse[a] * (d_y[h][i] * (p.offset + w[i]) - y[i] * mean);
                    store_whole(reinterpret_cast<Elems*>(p.d_qkv.row(token) + head * p.dim + column), narrowed(y));
                });
            }
        }
    }
    float* const sums = scratch<float>();
    #pragma unroll
    for (int keys = 0; keys < 2; ++keys) {
        // The heads of a warp, in an order that its lanes fix, then the warps.
        #pragma unroll
        for (int h = 0; h < HELD; ++h)
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                #pragma unroll
                for (int lanes = 16; lanes >= LANES; lanes /= 2)
                    d_w[keys][h][i] += shuffle_xor(d_w[keys][h][i], lanes);
        #pragma unroll 1
        for (int turn = 0; turn < WARPS; ++turn) {
            if (turn == warp && threadIdx.x % 32 < LANES)
                for_each_held(p.dim, [&](int h, int column) {
                    #pragma unroll
                    for (int i = 0; i < VECTOR; ++i)
                        sums[column + i] = (turn > 0 ? sums[column + i] : 0.f) + d_w[keys][h][i];
                });
            sync_cta();
        }
        float* const partial = reinterpret_cast<float*>(p.partial) + (i64(blockIdx.x) * 2 + keys) * p.dim;
        for (int column = threadIdx.x; column < p.dim; column += THREADS) partial[column] = sums[column];
        sync_cta();         // before keys' sums lie there
    }
}
