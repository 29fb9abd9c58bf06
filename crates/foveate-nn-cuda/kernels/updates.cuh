// What the kernels of the optimiser share: the rule, pieces of an arena, what a step is told.
//
//     g = factor gradient
//     FV_RULE 0, AdamW      m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2
//                           w = keep w - rate m / (sqrt(v root_scale) + eps)
//     FV_RULE 1, momentum   m = b1 m + g              w = keep w - rate m
//
// What is kept of a parameter (src/optimizer.rs has the table):
//   FV_WEIGHTS   0 f32 weights; 1 bf16 weights and the 16 bits that complete them to f32 masters;
//                2 bf16 weights alone, rounded stochastically
//   FV_GRADIENTS 0 f32; 1 bf16
//   FV_MOMENTS   0 f32; 1 bf16, rounded stochastically; 2 codes of 8 bits. Where moments are rounded, the quotient of
//                AdamW is right to 4 ulp, and else rounded once.
//
// Parameters of one rate and decay are a piece. What changes from step to step is read from device memory, so that a
// graph of a step can be replayed.

constexpr int CHUNK = 4096, GRADIENT_DTYPE = FV_GRADIENTS ? 1 : 2, WEIGHT_DTYPE = FV_WEIGHTS == 0 ? 2 : 1;
typedef ElemOf<GRADIENT_DTYPE>::type Gradient;
typedef ElemOf<WEIGHT_DTYPE>::type Weight;

// Elements first..end of the arena, whose first chunk is number `chunk` of the launch.
struct PieceParams {
    i64 first, end;
    i64 shift;                  // from an element's place in the arena to its index among all parameters
    int chunk;
    float rate, decay;          // factors of the step's rate and of the weight decay
    int unused;
};

// What the host says of a step.
struct StepConstants {
    float rate;                 // the learning rate
    float mean_scale, root_scale;   // 1 / (1 - b1^t), 1 / (1 - b2^t)
    float clip;                 // the largest norm of the mean gradient; 0: any
    u64 random;                 // of seed and step
};

// What a step adds up, f64 but for the count.
struct Totals {
    double loss;
    i64 labelled;
    double z_loss;
    double squares;             // of all gradients, as sums over tokens
    float factor;               // of the gradients: the mean over tokens, and clipping
    int skipped;                // 1: nothing is updated
};

struct UpdateParams {
    u64 weights;                // f32 or bf16
    u64 remainders;             // u16, with FV_WEIGHTS 1
    u64 gradients, means, squares;  // gradients: of weights from first_gradient on
    u64 pieces;                 // PieceParams [piece_count]
    u64 constants, totals;
    i64 elems;                  // that moments are kept of
    i64 first_gradient;
    int piece_count;
    float beta1, beta2, eps, weight_decay;
};

__device__ void load_gradients(float (&g)[VECTOR], const UpdateParams& p, i64 at) {
    load<GRADIENT_DTYPE>(g, reinterpret_cast<const Gradient*>(p.gradients) + (at - p.first_gradient));
}

struct SquaresParams {
    u64 gradients;
    i64 elems;
    u64 partial;                // f64 [CTAs]
};

struct FactorParams {
    u64 partial;
    u64 constants, totals;
    u64 stopped;                // i64: whether a step before was skipped
    int parts, more;            // more: add to the squares of gradients before
};

// A bijection of 64 bits that spreads every input bit: SplitMix64 (Steele, Lea and Flood, 2014), as in
// foveate_tensor::random.
__device__ u64 mix(u64 x) {
    u64 z = x + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Random bits of the moments and the weight of an element: three of the four parts of 16 bits that a hash of seed,
// step and a quarter of the element's index has. Its three neighbours have the same parts for other numbers, so that
// what is rounded by the same bits is never of one element.
enum Drawn { OF_MEAN, OF_SQUARE, OF_WEIGHT };

struct Draw {
    u64 random, bits;           // of seed and step; of 4 elements

    // For element `i` of a vector that begins at `at`; vectors' elements come in their order.
    __device__ void to(i64 at, int i) { if (i % 4 == 0) bits = mix(random + u64(at + i) / 4); }
    __device__ u32 of(i64 at, int i, Drawn number) const {
        const int place = VECTOR % 4 == 0 ? i : int(at % 4);
        return u32(bits >> (place + number) % 4 * 16) & 0xffff;
    }
    // The same bits, a byte up.
    __device__ u32 byte_up(i64 at, int i, Drawn number) const {
        const int part = ((VECTOR % 4 == 0 ? i : int(at % 4)) + number) % 4;
        return pick_bytes(u32(bits >> part / 2 * 32), 0, part % 2 ? 0x4324 : 0x4104);
    }
};

// Rounded to bf16 up with the probability of what is cut off, by 16 random bits. Infinity stays; NaN does with bits of
// 0
// (`keep_nan`), since a carry could make it zero.
template <typename To>
__device__ void store_rounded(To* to, const float (&x)[VECTOR], const u32 (&random)[VECTOR]) {
    if constexpr (VECTOR == 1) {
        *reinterpret_cast<u16*>(to) = (float_bits(x[0]) + random[0]) >> 16;
    } else {
        Vector<u32, (VECTOR + 1) / 2> pairs;
        #pragma unroll
        for (int i = 0; i < VECTOR; i += 2)
            pairs.of[i / 2] = upper_halves(float_bits(x[i]) + random[i], float_bits(x[i + 1]) + random[i + 1]);
        *reinterpret_cast<Vector<u32, (VECTOR + 1) / 2>*>(to) = pairs;
    }
}

// A master is the weight's bits followed by 16 zeros, plus the remainder as a signed number: the weight is the
// master rounded to the nearest, ties away from zero, so that no remainder is beyond 16 bits.
__device__ float master_of(u16 weight, u16 remainder) {
    return bits_float((u32(weight) << 16) + u32(int(short(remainder))));
}
__device__ void split_master(float master, u16& weight, u16& remainder) {
    const u32 bits = float_bits(master);
    weight = (bits + 0x8000) >> 16;
    remainder = bits;
    if (master != master) {         // rounding a NaN's bits may leave the NaNs
        weight = 0x7fff;
        remainder = 0;
    }
}
// The same of a vector, where one look at all of it is worth its registers.
__device__ void split_masters(const float (&masters)[VECTOR], Vector<u16, VECTOR>& weight,
                              Vector<u16, VECTOR>& remainder) {
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const u32 bits = float_bits(masters[i]);
        weight.of[i] = (bits + 0x8000) >> 16;
        remainder.of[i] = bits;
        sum += masters[i];
    }
    if (sum == sum) return;
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) split_master(masters[i], weight.of[i], remainder.of[i]);
}

// A factor that makes every number above 0 a normal one, which the fast root needs, and what its root is taken back by.
constexpr float NORMAL = 16777216.f, NORMAL_ROOT = 1.f / 4096.f;

// What the optimiser does with one weight; v is of AdamW alone.
struct Rule {
    float factor, rate, keep, beta1, beta2, root_scale, eps;

    __device__ Rule(const UpdateParams& p, const StepConstants& step, const PieceParams& piece, float factor)
        : factor(factor) {
        rate = step.rate * piece.rate * step.mean_scale;
        keep = 1.f - step.rate * piece.rate * p.weight_decay * piece.decay;
        beta1 = p.beta1;
        beta2 = p.beta2;
        root_scale = step.root_scale * (FV_MOMENTS ? NORMAL : 1.f);
        eps = p.eps;
    }

    __device__ void update(float& w, float& m, float& v, float g) const {
        const float x = g * factor;
        if constexpr (FV_RULE == 0) {
            m = fmaf(beta1, m, (1.f - beta1) * x);
            v = fmaf(beta2, v, (1.f - beta2) * x * x);
            if constexpr (FV_MOMENTS > 0)
                w = keep * w - rate * (m * reciprocal_fast(fmaf(sqrt_fast(v * root_scale), NORMAL_ROOT, eps)));
            else w = keep * w - rate * m / (sqrtf(v * root_scale) + eps);
        } else {
            m = fmaf(beta1, m, x);
            w = keep * w - rate * m;
        }
    }
};

// The number of the last piece that does not begin after `at`, or 0.
template <typename Begins>
__device__ int last_piece(int count, Begins begins_by) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (begins_by(middle) ? low : high) = middle;
    }
    return low;
}

// Weights as numbers, and what completes them.
struct Weights {
    Weight* weights;
    u16* remainders;

    __device__ Weights(const UpdateParams& p)
        : weights(reinterpret_cast<Weight*>(p.weights)), remainders(reinterpret_cast<u16*>(p.remainders)) {}

    __device__ void load(float (&w)[VECTOR], i64 at) const {
        ::load<WEIGHT_DTYPE>(w, weights + at);
        if constexpr (FV_WEIGHTS == 1) {
            const auto remainder = *reinterpret_cast<const Vector<u16, VECTOR>*>(remainders + at);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) w[i] = master_of(float_bits(w[i]) >> 16, remainder.of[i]);
        }
    }

    // `random` has 16 bits for each.
    __device__ void store(const float (&w)[VECTOR], i64 at, const u32 (&random)[VECTOR]) const {
        if constexpr (FV_WEIGHTS == 0) return ::store<WEIGHT_DTYPE>(weights + at, w);
        if constexpr (FV_WEIGHTS == 2) return store_rounded(weights + at, w, random);
        Vector<u16, VECTOR> weight, remainder;
        if constexpr (FV_MOMENTS == 2) split_masters(w, weight, remainder);
        else {
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) split_master(w[i], weight.of[i], remainder.of[i]);
        }
        *reinterpret_cast<Vector<u16, VECTOR>*>(weights + at) = weight;
        *reinterpret_cast<Vector<u16, VECTOR>*>(remainders + at) = remainder;
    }
};
