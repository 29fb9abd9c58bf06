// AdamW over a range of a flat arena, and the norm of its gradients.
//
//     g = factor gradient     m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2
//     w = keep w - rate m / (sqrt(v root_scale) + eps)
//
// What is kept of a parameter (src/optimizer.rs has the table):
//   FV_WEIGHTS   0 f32 weights; 1 bf16 weights and the 16 bits that complete them to f32 masters;
//                2 bf16 weights alone, rounded stochastically
//   FV_MOMENTS   0 f32; 1 bf16, rounded stochastically
//   FV_GRADIENTS 0 f32; 1 bf16
//
// Parameters of one rate and decay are a piece; a CTA updates CHUNK elements of one. What changes from step to
// step is read from device memory, so that a graph of a step can be replayed.

constexpr int CHUNK = 4096, GRADIENT_DTYPE = FV_GRADIENTS ? 1 : 2, WEIGHT_DTYPE = FV_WEIGHTS == 0 ? 2 : 1, MOMENT_DTYPE = FV_MOMENTS ? 1 : 2;
typedef ElemOf<GRADIENT_DTYPE>::type Gradient;
typedef ElemOf<WEIGHT_DTYPE>::type Weight;
typedef ElemOf<MOMENT_DTYPE>::type Moment;

// Elements first..end of the arena, whose first chunk is number `chunk` of the launch.
struct PieceParams {
    i64 first, end;
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
    double squares;             // of all gradients, as sums over tokens
    float factor;               // of the gradients: the mean over tokens, and clipping
    int skipped;                // 1: some gradient is not finite, and nothing is updated
};

struct UpdateParams {
    u64 weights;                // f32 or bf16
    u64 remainders;             // u16, with FV_WEIGHTS 1
    u64 gradients, means, squares;
    u64 pieces;                 // PieceParams [piece_count]
    u64 constants, totals;
    int piece_count;
    float beta1, beta2, eps, weight_decay;
};

struct SquaresParams {
    u64 gradients;
    i64 elems;
    u64 partial;                // f64 [CTAs]
};

struct FactorParams {
    u64 partial;
    u64 constants, totals;
    int parts;
};

// A bijection of 64 bits that spreads every input bit: SplitMix64 (Steele, Lea and Flood, 2014), as in
// foveate_tensor::random.
__device__ u64 mix(u64 x) {
    u64 z = x + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Up with the probability of what is cut off, by 16 random bits. Numbers that are not finite are rounded to
// the nearest, which keeps them what they are.
__device__ u16 to_bf16_stochastic(float x, u32 random) {
    const u32 bits = float_bits(x);
    if ((bits & 0x7f800000) == 0x7f800000) return to_bf16(x);
    return (bits + (random & 0xffff)) >> 16;
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

__device__ float narrow_moment(float x, u32 random) {
    return MOMENT_DTYPE == 1 ? bits_float(u32(to_bf16_stochastic(x, random)) << 16) : x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_adamw(const __grid_constant__ UpdateParams p) {
    const Totals& totals = *reinterpret_cast<const Totals*>(p.totals);
    if (totals.skipped) return;
    const StepConstants& step = *reinterpret_cast<const StepConstants*>(p.constants);
    // The last piece whose first chunk is not after this one.
    const PieceParams* const pieces = reinterpret_cast<const PieceParams*>(p.pieces);
    int low = 0, high = p.piece_count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (pieces[middle].chunk <= int(blockIdx.x) ? low : high) = middle;
    }
    const PieceParams piece = pieces[low];
    const float rate = step.rate * piece.rate * step.mean_scale, factor = totals.factor;
    const float keep = 1.f - step.rate * piece.rate * p.weight_decay * piece.decay;
    const i64 first = piece.first + i64(blockIdx.x - piece.chunk) * CHUNK;
    #pragma unroll 1
    for (i64 at = first + threadIdx.x * VECTOR; at < min(first + CHUNK, piece.end); at += THREADS * VECTOR) {
        float w[VECTOR], g[VECTOR], m[VECTOR], v[VECTOR];
        u16 low_bits[VECTOR] = {};
        Weight* const weights = reinterpret_cast<Weight*>(p.weights) + at;
        Moment* const means = reinterpret_cast<Moment*>(p.means) + at;
        Moment* const squares = reinterpret_cast<Moment*>(p.squares) + at;
        Vector<u16, VECTOR>* const remainders = reinterpret_cast<Vector<u16, VECTOR>*>(reinterpret_cast<u16*>(p.remainders) + at);
        load<GRADIENT_DTYPE>(g, reinterpret_cast<const Gradient*>(p.gradients) + at);
        load<MOMENT_DTYPE>(m, means);
        load<MOMENT_DTYPE>(v, squares);
        load<WEIGHT_DTYPE>(w, weights);
        if constexpr (FV_WEIGHTS == 1) {
            const Vector<u16, VECTOR> remainder = *remainders;
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) w[i] = master_of(float_bits(w[i]) >> 16, remainder.of[i]);
        }
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const u64 random = FV_WEIGHTS == 2 || FV_MOMENTS ? mix(step.random + u64(at + i)) : 0;
            const float x = g[i] * factor;
            m[i] = fmaf(p.beta1, m[i], (1.f - p.beta1) * x);
            v[i] = fmaf(p.beta2, v[i], (1.f - p.beta2) * x * x);
            w[i] = keep * w[i] - rate * m[i] / (sqrtf(v[i] * step.root_scale) + p.eps);
            m[i] = narrow_moment(m[i], u32(random));
            v[i] = narrow_moment(v[i], u32(random >> 16));
            if constexpr (FV_WEIGHTS == 2) w[i] = bits_float(u32(to_bf16_stochastic(w[i], u32(random >> 32))) << 16);
            if constexpr (FV_WEIGHTS == 1) {
                u16 weight;
                split_master(w[i], weight, low_bits[i]);
                w[i] = bits_float(u32(weight) << 16);
            }
        }
        store<WEIGHT_DTYPE>(weights, w);
        store<MOMENT_DTYPE>(means, m);
        store<MOMENT_DTYPE>(squares, v);
        if constexpr (FV_WEIGHTS == 1) {
            Vector<u16, VECTOR> remainder;
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) remainder.of[i] = low_bits[i];
            *remainders = remainder;
        }
    }
}

// The squares of CHUNK elements after the other, in f64: a part a CTA.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_squares(const __grid_constant__ SquaresParams p) {
    double sum = 0.;
    #pragma unroll 1
    for (i64 chunk = i64(blockIdx.x) * CHUNK; chunk < p.elems; chunk += i64(gridDim.x) * CHUNK) {
        float squares = 0.f;
        #pragma unroll 2
        for (i64 at = chunk + threadIdx.x * VECTOR; at < min(chunk + CHUNK, p.elems); at += THREADS * VECTOR) {
            float g[VECTOR];
            load<GRADIENT_DTYPE>(g, reinterpret_cast<const Gradient*>(p.gradients) + at);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) squares = fmaf(g[i], g[i], squares);
        }
        sum += squares;
    }
    sum = cta_sum(sum);
    if (threadIdx.x == 0) reinterpret_cast<double*>(p.partial)[blockIdx.x] = sum;
}

// One CTA: the sum of the parts, and what the gradients are multiplied with.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_factor(const __grid_constant__ FactorParams p) {
    double sum = 0.;
    for (int i = threadIdx.x; i < p.parts; i += THREADS) sum += reinterpret_cast<const double*>(p.partial)[i];
    sum = cta_sum(sum);
    if (threadIdx.x > 0) return;
    Totals& totals = *reinterpret_cast<Totals*>(p.totals);
    const StepConstants& step = *reinterpret_cast<const StepConstants*>(p.constants);
    const double mean = 1. / double(totals.labelled > 1 ? totals.labelled : 1), norm = sqrt(sum) * mean;
    totals.squares = sum;
    totals.factor = float(step.clip > 0.f && norm > step.clip ? mean * step.clip / norm : mean);
    totals.skipped = !(sum <= 1.7976931348623157e308);
}
