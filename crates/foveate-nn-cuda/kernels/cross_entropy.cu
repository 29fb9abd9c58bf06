// Cross-entropy of a chunk of logits, whose gradient takes their place. A CTA a token:
//
//     y = cap tanh(z / cap), or z     lse = ln sum exp(y)     loss = lse - y[label] + z_weight lse^2
//     dz = (exp(y - lse) (1 + 2 z_weight lse) - [label]) dy/dz
//
// A token without a label has loss 0 and gradient 0. Logits are read twice; the second time mostly from L2.
//   FV_CAP       0 no cap, 1 a cap

struct CrossEntropyParams {
    Rows logits;                // [tokens, vocabulary]; overwritten by the gradient where that is wanted
    u64 labels;                 // i32 [tokens]; negative: none
    u64 losses;                 // f32 [tokens]
    int vocabulary, wants_gradient;
    float cap, z_weight;
};

struct TotalParams {
    u64 losses, labels;         // f32, i32 [tokens]
    u64 loss, labelled;         // f64, i64: added to
    int tokens;
};

// A maximum and the sum of exponentials below it.
struct Exponentials {
    float most, sum;

    __device__ void add(const Exponentials& other) {
        const float top = max_or_nan(most, other.most);
        // No logit yet: most is -infinity, and -infinity - -infinity NaN.
        auto scaled = [&](const Exponentials& e) { return e.sum == 0.f ? 0.f : e.sum * exp2_fast((e.most - top) * LOG2_E); };
        sum = scaled(*this) + scaled(other);
        most = top;
    }
};

struct Capped { float value, slope; };

__device__ Capped capped(float z, float cap) {
    if constexpr (FV_CAP) {
        const float t = tanhf(z / cap);
        return {cap * t, 1.f - t * t};
    } else return {z, 1.f};
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_cross_entropy(const __grid_constant__ CrossEntropyParams p) {
    Exponentials* const of_warps = scratch<Exponentials>();
    Elem* const logits = p.logits.row(blockIdx.x);
    const int label = reinterpret_cast<const int*>(p.labels)[blockIdx.x];
    const int first = threadIdx.x * VECTOR, step = THREADS * VECTOR;
    if (label < 0) {
        if (threadIdx.x == 0) reinterpret_cast<float*>(p.losses)[blockIdx.x] = 0.f;
        const float zeros[VECTOR] = {};
        if (p.wants_gradient)
            for (int column = first; column < p.vocabulary; column += step) store(logits + column, zeros);
        return;
    }
    Exponentials all = {bits_float(0xff800000), 0.f};
    for (int column = first; column < p.vocabulary; column += step) {
        float z[VECTOR];
        load(z, logits + column);
        Exponentials here = {capped(z[0], p.cap).value, 0.f};
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            z[i] = capped(z[i], p.cap).value;
            here.most = max_or_nan(here.most, z[i]);
        }
        // A row of -infinity alone: its exponentials are NaN, as its softmax is.
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) here.sum += exp2_fast((z[i] - here.most) * LOG2_E);
        if (here.most == bits_float(0xff800000)) here.sum = 0.f;
        all.add(here);
    }
    #pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const float most = shuffle_xor(all.most, lanes), sum = shuffle_xor(all.sum, lanes);
        // The smaller lane first: every lane of a warp adds the same two in the same order.
        Exponentials low = all, high = {most, sum};
        if (threadIdx.x & lanes) { low = high; high = all; }
        low.add(high);
        all = low;
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = all;
    const float at_label = capped(widen<FV_DTYPE>(logits[label]), p.cap).value;
    sync_cta();         // also: the label's logit has been read before its gradient is written
    all = of_warps[0];
    for (int warp = 1; warp < WARPS; ++warp) all.add(of_warps[warp]);
    const float lse = all.most + logf(all.sum);
    if (threadIdx.x == 0) reinterpret_cast<float*>(p.losses)[blockIdx.x] = lse - at_label + p.z_weight * lse * lse;
    if (!p.wants_gradient) return;
    const float factor = fmaf(2.f * p.z_weight, lse, 1.f) / all.sum;
    for (int column = first; column < p.vocabulary; column += step) {
        float z[VECTOR];
        load(z, logits + column);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const Capped y = capped(z[i], p.cap);
            z[i] = (exp2_fast((y.value - all.most) * LOG2_E) * factor - (column + i == label ? 1.f : 0.f)) * y.slope;
        }
        store(logits + column, z);
    }
}

// One CTA: the losses in their order, in f64.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_total(const __grid_constant__ TotalParams p) {
    double loss = 0., labelled = 0.;
    for (int i = threadIdx.x; i < p.tokens; i += THREADS) {
        loss += reinterpret_cast<const float*>(p.losses)[i];
        labelled += reinterpret_cast<const int*>(p.labels)[i] >= 0;
    }
    loss = cta_sum(loss);
    labelled = cta_sum(labelled);
    if (threadIdx.x > 0) return;
    *reinterpret_cast<double*>(p.loss) += loss;
    *reinterpret_cast<i64*>(p.labelled) += i64(labelled);
}
