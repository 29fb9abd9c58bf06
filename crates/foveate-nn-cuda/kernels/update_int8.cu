// One step of the optimiser with moments of 8 bits, in blocks of 256 elements (updates.cuh; foveate_nn::moments has the
// format): four codes a word for all blocks, then a scale for each. A warp takes a block, whose elements may be of
// several pieces, all of one shift: those of none keep their weights, and their moments are 0.

constexpr int BLOCK = 256, HELD = BLOCK / 32 / VECTOR;

// A code: 4 bits of exponent and `MANTISSA` of mantissa, with zero and subnormals. Those lie as far apart as the
// numbers of the least exponent, so that they are codes of these with LEAST, their smallest, taken away.
constexpr float LEAST = 1.f / 16384.f;

template <int MANTISSA>
__device__ float number_of(u32 code) {
    const bool subnormal = code >> MANTISSA == 0;
    return bits_float((code + ((subnormal ? 113u : 112u) << MANTISSA)) << (23 - MANTISSA)) - (subnormal ? LEAST : 0.f);
}
// Of y in [0, 2), rounded up with the probability of what is cut off, by 16 random bits.
template <int MANTISSA>
__device__ u32 code_of(float y, u32 random) {
    constexpr int CUT = 23 - MANTISSA;
    constexpr u32 TOP = (16u << MANTISSA) - 1;
    const bool subnormal = y < LEAST;
    const u32 bits = float_bits(subnormal ? y + LEAST : y) + (random << (CUT - 16));
    const u32 code = (bits >> CUT) - ((subnormal ? 113u : 112u) << MANTISSA);
    return code < TOP ? code : TOP;
}

__device__ float warp_max(float x) {
    #pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = max_or_nan(x, shuffle_xor(x, lanes));
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_update_int8(const __grid_constant__ UpdateParams p) {
    const Totals& totals = *reinterpret_cast<const Totals*>(p.totals);
    if (totals.skipped) return;
    const StepConstants& step = *reinterpret_cast<const StepConstants*>(p.constants);
    const PieceParams* const pieces = reinterpret_cast<const PieceParams*>(p.pieces);
    const Weights weights(p);
    Draw draw = {step.random, 0};
    const i64 blocks = (p.elems + BLOCK - 1) / BLOCK;
    const i64 block = pieces[0].first / BLOCK + i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (block * BLOCK >= pieces[p.piece_count - 1].end) return;
    typedef Vector<u8, VECTOR> Codes;
    u8* const mean_codes = reinterpret_cast<u8*>(p.means);
    u8* const square_codes = reinterpret_cast<u8*>(p.squares);
    float& mean_scale = reinterpret_cast<float*>(mean_codes + blocks * BLOCK)[block];
    float m[HELD][VECTOR], v[HELD][VECTOR] = {}, most_mean = 0.f, most_root = 0.f;
    i64 shift = 0;
    const float scale_of_mean = mean_scale,
                scale_of_root = FV_RULE == 0 ? reinterpret_cast<float*>(square_codes + blocks * BLOCK)[block] : 0.f;
    int number = last_piece(p.piece_count, [&](int i) { return pieces[i].first <= block * BLOCK; });
    #pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const i64 at = block * BLOCK + (h * 32 + threadIdx.x % 32) * VECTOR;
        const Codes of_mean = *reinterpret_cast<const Codes*>(mean_codes + at);
        Codes of_root = {};
        if constexpr (FV_RULE == 0) of_root = *reinterpret_cast<const Codes*>(square_codes + at);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float mean = number_of<3>(of_mean.of[i] & 0x7f) * scale_of_mean,
                        root = number_of<4>(of_root.of[i]) * scale_of_root;
            m[h][i] = bits_float(float_bits(mean) ^ (of_mean.of[i] & 0x80) << 24);
            v[h][i] = root * root;
        }
        while (number + 1 < p.piece_count && pieces[number].end <= at) ++number;
        const PieceParams piece = pieces[number];
        if (at >= piece.first && at < piece.end) {
            const Rule rule(p, step, piece, totals.factor);
            shift = piece.shift;
            float w[VECTOR], g[VECTOR];
            u32 bits[VECTOR] = {};
            load_gradients(g, p, at);
            weights.load(w, at);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                rule.update(w[i], m[h][i], v[h][i], g[i]);
                draw.to(at + shift, i);
                if constexpr (FV_WEIGHTS == 2) bits[i] = w[i] != w[i] ? 0 : draw.of(at + shift, i, OF_WEIGHT);
            }
            weights.store(w, at, bits);
        }
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            most_mean = max_or_nan(most_mean, fabsf(m[h][i]));
            most_root = max_or_nan(most_root, v[h][i]);
        }
    }
    // The largest of a block is the largest code's number.
    const float new_mean = warp_max(most_mean) / 1.875f, new_root = sqrtf(warp_max(most_root)) / 1.9375f;
    const float of_mean = new_mean > 0.f ? 1.f / new_mean : 0.f, of_root = new_root > 0.f ? 1.f / new_root : 0.f;
    #pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const i64 at = block * BLOCK + (h * 32 + threadIdx.x % 32) * VECTOR;
        Codes means, roots;
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            draw.to(at + shift, i);
            const float mean = fabsf(m[h][i]), root = sqrt_fast(v[h][i] * NORMAL) * (NORMAL_ROOT * of_root);
            const u32 of_m = code_of<3>(mean * of_mean, draw.of(at + shift, i, OF_MEAN)),
                      code = code_of<4>(root, draw.of(at + shift, i, OF_SQUARE));
            means.of[i] = of_m | (m[h][i] < 0.f && of_m > 0 ? 0x80 : 0);
            roots.of[i] = code > 0 || root == 0.f ? code : 1;
        }
        *reinterpret_cast<Codes*>(mean_codes + at) = means;
        if constexpr (FV_RULE == 0) *reinterpret_cast<Codes*>(square_codes + at) = roots;
    }
    if (threadIdx.x % 32 > 0) return;
    mean_scale = new_mean;
    if constexpr (FV_RULE == 0) reinterpret_cast<float*>(square_codes + blocks * BLOCK)[block] = new_root;
}
