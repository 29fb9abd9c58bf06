// One step of the optimiser over a range of a flat arena, and the norm of its gradients: updates.cuh. A CTA updates
// CHUNK elements of one piece.
constexpr int MOMENT_DTYPE = FV_MOMENTS ? 1 : 2;
typedef ElemOf<MOMENT_DTYPE>::type Moment;

__device__ void store_moments(Moment* to, const float (&x)[VECTOR], const u32 (&random)[VECTOR]) {
    if constexpr (FV_MOMENTS) store_rounded(to, x, random);
    else store<MOMENT_DTYPE>(to, x);
}

// Takes the random bits from elements whose numbers are not numbers: then their weight is none.
__device__ void keep_nan(const float (&w)[VECTOR], u32 (&of_means)[VECTOR], u32 (&of_squares)[VECTOR],
                         u32 (&of_weights)[VECTOR]) {
    bool some = false;
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) some |= w[i] != w[i];
    if (!some) return;
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) if (w[i] != w[i]) of_means[i] = of_squares[i] = of_weights[i] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_update(const __grid_constant__ UpdateParams p) {
    const Totals& totals = *reinterpret_cast<const Totals*>(p.totals);
    const StepConstants& step = *reinterpret_cast<const StepConstants*>(p.constants);
    const PieceParams* const pieces = reinterpret_cast<const PieceParams*>(p.pieces);
    const PieceParams piece =
        pieces[last_piece(p.piece_count, [&](int i) { return pieces[i].chunk <= int(blockIdx.x); })];
    const Rule rule(p, step, piece, totals.factor);
    const Weights weights(p);
    Draw draw = {step.random, 0};
    if (totals.skipped) return;
    const i64 first = piece.first + i64(blockIdx.x - piece.chunk) * CHUNK;
    #pragma unroll 1
    for (i64 at = first + threadIdx.x * VECTOR; at < min(first + CHUNK, piece.end); at += THREADS * VECTOR) {
        float w[VECTOR], g[VECTOR], m[VECTOR], v[VECTOR] = {};
        u32 of_means[VECTOR], of_squares[VECTOR], of_weights[VECTOR];
        Moment* const means = reinterpret_cast<Moment*>(p.means) + at;
        Moment* const squares = reinterpret_cast<Moment*>(p.squares) + at;
        load_gradients(g, p, at);
        load<MOMENT_DTYPE>(m, means);
        if constexpr (FV_RULE == 0) load<MOMENT_DTYPE>(v, squares);
        weights.load(w, at);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            rule.update(w[i], m[i], v[i], g[i]);
            if constexpr (FV_MOMENTS == 0) continue;
            draw.to(at + piece.shift, i);
            of_means[i] = draw.of(at + piece.shift, i, OF_MEAN);
            of_squares[i] = draw.of(at + piece.shift, i, OF_SQUARE);
            of_weights[i] = draw.of(at + piece.shift, i, OF_WEIGHT);
        }
        if constexpr (FV_MOMENTS) keep_nan(w, of_means, of_squares, of_weights);
        weights.store(w, at, of_weights);
        store_moments(means, m, of_means);
        if constexpr (FV_RULE == 0) store_moments(squares, v, of_squares);
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

// One CTA: the sum of the parts, and what the gradients are multiplied with. A step whose loss or gradients are not
// finite is skipped, and so is all that was queued behind it, until the host clears `stopped`.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_factor(const __grid_constant__ FactorParams p) {
    double sum = 0.;
    for (int i = threadIdx.x; i < p.parts; i += THREADS) sum += reinterpret_cast<const double*>(p.partial)[i];
    sum = cta_sum(sum);
    if (threadIdx.x > 0) return;
    Totals& totals = *reinterpret_cast<Totals*>(p.totals);
    const StepConstants& step = *reinterpret_cast<const StepConstants*>(p.constants);
    if (p.more) sum += totals.squares;
    totals.squares = sum;
    const double mean = 1. / double(totals.labelled > 1 ? totals.labelled : 1), norm = sqrt(sum) * mean;
    totals.factor = float(step.clip > 0.f && norm > step.clip ? mean * step.clip / norm : mean);
    i64& stopped = *reinterpret_cast<i64*>(p.stopped);
    constexpr double MOST = 1.7976931348623157e308;
    if (!(sum <= MOST) || !(fabs(totals.loss) <= MOST)) stopped = 1;
    totals.skipped = stopped != 0;
}
