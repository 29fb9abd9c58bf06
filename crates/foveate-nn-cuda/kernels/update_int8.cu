// One step of the optimiser with moments of 8 bits, in blocks of 256 elements (updates.cuh; foveate_nn::moments has the
// format): four codes a word for all blocks, then a scale for each. A warp takes a block, whose elements may be of
// several pieces, all of one shift: those of none keep their weights, and their moments are 0.

constexpr int BLOCK = 256, HELD = BLOCK / 32 / VECTOR;

// A code: 4 bits of exponent and `MANTISSA` of mantissa, with zero and subnormals. An f16 number has the same bias and
// a bit of exponent more; an f32 number 2^-112 times as large has its exponent, and is subnormal where it is.
constexpr float SMALL = 0x1p-112f, TINY = 0x1p-18f;
// Of the codes of a word; with 3 bits of mantissa the bit above a code is its number's sign.
template <int MANTISSA>
__device__ void numbers_of(float (&x)[VECTOR], u32 codes) {
    #pragma unroll
    for (int i = 0; i < VECTOR; i += 2) {
        const u32 upper = pick_bytes(codes, 0, i == 0 ? 0x1404 : 0x3424);
        const u32 halves = MANTISSA == 4 ? upper >> 2 : (upper >> 1 & 0x3f803f80) | (upper & 0x80008000);
        x[i] = from_f16(halves);
        if (i + 1 < VECTOR) x[i + 1] = from_f16(halves >> 16);
    }
}
// The code, above 24 bits of what is cut off, of a number SMALL times as large, rounded up with the probability of what
// is cut off by 16 random bits that begin at bit 8. Numbers end in a minimum or maximum: where bits of products are
// shifted and added to the same random bits, ptxas 13.0 takes the products for integers' and loses them.
template <int MANTISSA>
__device__ u32 code_above(float small, u32 random) { return (float_bits(small) << (1 + MANTISSA)) + random; }
template <int MANTISSA>
__device__ float at_most_top(float small) { return fminf(small, (2.f - 1.f / (1 << MANTISSA)) * SMALL); }

// The upper bytes of words, in one.
__device__ u32 upper_bytes(const u32 (&of)[VECTOR]) {
    if constexpr (VECTOR == 1) return of[0] >> 24;
    else return pick_bytes(pick_bytes(of[0], of[1], 0x0073), pick_bytes(of[2], of[3], 0x7300), 0x7610);
}

template <int COUNT> struct CodesOf { typedef u32 type; };
template <> struct CodesOf<1> { typedef u8 type; };

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
    typedef typename CodesOf<VECTOR>::type Codes;
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
        numbers_of<3>(m[h], of_mean);
        numbers_of<4>(v[h], of_root);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            m[h][i] *= scale_of_mean;
            v[h][i] *= scale_of_root;
            v[h][i] *= v[h][i];
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
        u32 means[VECTOR], roots[VECTOR], signs[VECTOR];
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            draw.to(at + shift, i);
            const float root = sqrt_fast(v[h][i] * NORMAL) * (NORMAL_ROOT * of_root);
            // A root that is not 0 has a code that is not.
            const float least = saturated(root * 0x1p126f) * (TINY * SMALL);
            means[i] = code_above<3>(at_most_top<3>(fabsf(m[h][i]) * of_mean * SMALL),
                                     draw.byte_up(at + shift, i, OF_MEAN));
            roots[i] = code_above<4>(fmaxf(at_most_top<4>(root * SMALL), least),
                                     draw.byte_up(at + shift, i, OF_SQUARE));
            signs[i] = float_bits(m[h][i]);
        }
        const u32 sizes = upper_bytes(means), is_some = sizes + 0x7f7f7f7f;
        *reinterpret_cast<Codes*>(mean_codes + at) = sizes | (upper_bytes(signs) & is_some & 0x80808080);
        if constexpr (FV_RULE == 0) *reinterpret_cast<Codes*>(square_codes + at) = upper_bytes(roots);
    }
    if (threadIdx.x % 32 > 0) return;
    mean_scale = new_mean;
    if constexpr (FV_RULE == 0) reinterpret_cast<float*>(square_codes + blocks * BLOCK)[block] = new_root;
}
