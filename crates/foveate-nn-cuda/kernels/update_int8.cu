// One step of the optimiser with moments of 8 bits, in blocks of 256 elements (updates.cuh; foveate_nn::moments has the
// format): four codes a word for all blocks, then a scale for each. LANES threads take a block: the fewer, the less an
// element bears of what a block does once, and the more registers. Its elements may be of several pieces, all of one
// shift: those of none keep their weights, and their moments are 0.

constexpr int BLOCK = 256, LANES = VECTOR == 1 ? 32 : 16, HELD = BLOCK / LANES / VECTOR;

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

// The codes of a vector of moments, whose elements are `index` and those behind it among all parameters; `of_mean` and
// `of_root` bring the largest to the largest code.
__device__ void codes_of(u32& means, u32& roots, const float (&m)[VECTOR], const float (&v)[VECTOR], float of_mean,
                         float of_root, Draw draw, i64 index) {
    u32 mean_words[VECTOR], root_words[VECTOR], signs[VECTOR];
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        draw.to(index, i);
        const float root = sqrt_fast(v[i] * NORMAL) * (NORMAL_ROOT * of_root);
        // A root that is not 0 has a code that is not.
        const float least = saturated(root * 0x1p126f) * (TINY * SMALL);
        mean_words[i] = code_above<3>(at_most_top<3>(fabsf(m[i]) * of_mean * SMALL), draw.byte_up(index, i, OF_MEAN));
        root_words[i] = code_above<4>(fmaxf(at_most_top<4>(root * SMALL), least), draw.byte_up(index, i, OF_SQUARE));
        signs[i] = float_bits(m[i]);
    }
    // Of nothing there is no sign.
    const u32 sizes = upper_bytes(mean_words), is_some = sizes + 0x7f7f7f7f;
    means = sizes | (upper_bytes(signs) & is_some & 0x80808080);
    roots = upper_bytes(root_words);
}

template <int COUNT> struct CodesOf { typedef u32 type; };
template <> struct CodesOf<1> { typedef u8 type; };
typedef CodesOf<VECTOR>::type Codes;

__device__ float block_max(float x) {
    #pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) x = max_or_nan(x, shuffle_xor(x, lanes));
    return x;
}

// A moment: codes and, behind those of all blocks, scales.
struct Moment {
    u8* codes;
    float* scales;

    __device__ Moment(u64 at, i64 blocks)
        : codes(reinterpret_cast<u8*>(at)), scales(reinterpret_cast<float*>(codes + blocks * BLOCK)) {}
    __device__ Codes& word(i64 at) const { return *reinterpret_cast<Codes*>(codes + at); }
};

// Three CTAs an SM: without the bound some assemblers take 64 registers, and local memory.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
fv_update_int8(const __grid_constant__ UpdateParams p) {
    const Totals& totals = *reinterpret_cast<const Totals*>(p.totals);
    if (totals.skipped) return;
    const StepConstants& step = *reinterpret_cast<const StepConstants*>(p.constants);
    const PieceParams* const pieces = reinterpret_cast<const PieceParams*>(p.pieces);
    const i64 blocks = (p.elems + BLOCK - 1) / BLOCK;
    const Moment means(p.means, blocks), squares(p.squares, blocks);
    const Weights weights(p);
    const i64 block = pieces[0].first / BLOCK + (i64(blockIdx.x) * THREADS + threadIdx.x) / LANES;
    // Lanes of blocks behind the last stay for the shuffles.
    const bool is_block = block * BLOCK < pieces[p.piece_count - 1].end;
    const i64 first = block * BLOCK + threadIdx.x % LANES * VECTOR;
    const auto place = [&](int h) { return first + h * LANES * VECTOR; };
    const auto piece_of = [&](i64 at) -> const PieceParams& {
        return pieces[last_piece(p.piece_count, [&](int i) { return pieces[i].first <= at; })];
    };
    Codes of_means[HELD] = {}, of_squares[HELD] = {};
    float scale_of_mean = 0.f, scale_of_root = 0.f;
    float w[HELD][VECTOR], g[HELD][VECTOR], m[HELD][VECTOR], v[HELD][VECTOR] = {};
    const PieceParams& piece = piece_of(block * BLOCK);
    const bool is_whole = is_block && block * BLOCK >= piece.first && (block + 1) * BLOCK <= piece.end;
    // Everything is asked for before anything is computed with; bit h says that a piece has the lane's vector h.
    u32 there = is_whole ? (1 << HELD) - 1 : 0;
    if (is_block) {
        scale_of_mean = means.scales[block];
        if constexpr (FV_RULE == 0) scale_of_root = squares.scales[block];
        #pragma unroll
        for (int h = 0; h < HELD; ++h) {
            of_means[h] = means.word(place(h));
            if constexpr (FV_RULE == 0) of_squares[h] = squares.word(place(h));
        }
    }
    i64 shift = piece.shift;
    if (is_whole) {
        #pragma unroll
        for (int h = 0; h < HELD; ++h) {
            load_gradients(g[h], p, place(h));
            weights.load(w[h], place(h));
        }
    } else if (is_block) {
        #pragma unroll
        for (int h = 0; h < HELD; ++h) {
            const PieceParams& own = piece_of(place(h));
            if (place(h) < own.first || place(h) >= own.end) continue;
            there |= 1 << h;
            shift = own.shift;
            load_gradients(g[h], p, place(h));
            weights.load(w[h], place(h));
        }
    }
    Rule rule(p, step, piece, totals.factor);
    Draw draw = {step.random, 0};
    float most_mean = 0.f, most_square = 0.f;
    #pragma unroll
    for (int h = 0; h < HELD; ++h) {
        numbers_of<3>(m[h], of_means[h]);
        numbers_of<4>(v[h], of_squares[h]);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            m[h][i] *= scale_of_mean;
            v[h][i] *= scale_of_root;
            v[h][i] *= v[h][i];
        }
        if (there >> h & 1) {
            if (!is_whole) rule = Rule(p, step, piece_of(place(h)), totals.factor);
            u32 bits[VECTOR] = {};
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                rule.update(w[h][i], m[h][i], v[h][i], g[h][i]);
                draw.to(place(h) + shift, i);
                if constexpr (FV_WEIGHTS == 2)
                    bits[i] = w[h][i] != w[h][i] ? 0 : draw.of(place(h) + shift, i, OF_WEIGHT);
            }
            weights.store(w[h], place(h), bits);
        }
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            most_mean = max_or_nan(most_mean, fabsf(m[h][i]));
            most_square = max_or_nan(most_square, v[h][i]);
        }
    }
    // The largest of a block is the largest code's number.
    const float new_mean = block_max(most_mean) / 1.875f, new_root = sqrtf(block_max(most_square)) / 1.9375f;
    const float of_mean = new_mean > 0.f ? 1.f / new_mean : 0.f, of_root = new_root > 0.f ? 1.f / new_root : 0.f;
    if (!is_block) return;
    #pragma unroll
    for (int h = 0; h < HELD; ++h) {
        u32 mean_codes, root_codes;
        codes_of(mean_codes, root_codes, m[h], v[h], of_mean, of_root, draw, place(h) + shift);
        means.word(place(h)) = mean_codes;
        if constexpr (FV_RULE == 0) squares.word(place(h)) = root_codes;
    }
    if (threadIdx.x % LANES > 0) return;
    means.scales[block] = new_mean;
    if constexpr (FV_RULE == 0) squares.scales[block] = new_root;
}
