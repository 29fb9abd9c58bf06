// Cross-entropy of a chunk of logits, whose gradient takes their place. A CTA a token:
//
//     y = cap tanh(z / cap), or z     lse = ln sum exp(y)     loss = lse - y[label]     z-loss = z_weight lse^2
//     dz = (exp(y - lse) (1 + 2 z_weight lse) - [label]) dy/dz
//
// The gradient is of both losses. A token without a label has losses 0 and gradient 0. Logits are read twice: the
// second time, where a rank has all words, from the end of the row to its start, so that what was read last is still in
// L2; the gradient is written there by streaming stores, which leave room for logits. Long rows have CTAs of so many
// threads that an SM has one, for 132 rows of 128,256 words are 34 MB, and twice as many more than L2 holds.
//
//   FV_CAP       0 no cap, 1 a cap

struct CrossEntropyParams {
    Rows logits;                // [tokens, vocabulary]; overwritten by the gradient where that is wanted
    u64 labels;                 // i32 [tokens]; negative: none
    u64 losses;                 // f32 [tokens]
    u64 z_losses;               // f32 [tokens], or 0 where nobody wants them
    int vocabulary, wants_gradient;
    float cap, z_weight;
};

// Of a rank that has the logits of a part of the vocabulary.
struct LogitSumsParams {
    Rows logits;                // [tokens, vocabulary]
    u64 labels;                 // i32 [tokens]; negative: none
    u64 sums;    // f32 [tokens, 3], written: the largest logit, the sum of exponentials beside it, the label's logit
    int vocabulary, first;      // ids of the rank, and the first of them
    float cap;
};

struct CrossEntropyPartParams {
    Rows logits;                // [tokens, vocabulary]; overwritten by the gradient where that is wanted
    u64 labels;                 // i32 [tokens]; negative: none
    u64 sums;                   // f32 [ranks, tokens, 3]
    u64 losses;                 // f32 [tokens]
    u64 z_losses;               // f32 [tokens], or 0 where nobody wants them
    int vocabulary, first, ranks, tokens, wants_gradient;
    float cap, z_weight;
    int unused;
};

struct TotalParams {
    u64 losses, z_losses, labels;   // f32, f32 or 0, i32 [tokens]
    u64 loss, z_loss, labelled;     // f64, f64, i64: added to
    int tokens;
};

// What is told of a token.
__device__ void tell(u64 losses, u64 z_losses, float loss, float z_loss) {
    if (threadIdx.x > 0) return;
    reinterpret_cast<float*>(losses)[blockIdx.x] = loss;
    if (z_losses) reinterpret_cast<float*>(z_losses)[blockIdx.x] = z_loss;
}

// A maximum and the sum of exponentials below it.
struct Exponentials {
    float most, sum;

    __device__ void add(const Exponentials& other) {
        const float top = max_or_nan(most, other.most);
        // No logit yet: most is -infinity, and -infinity - -infinity NaN.
        auto scaled = [&](const Exponentials& e) {
            return e.sum == 0.f ? 0.f : e.sum * exp2_fast((e.most - top) * LOG2_E);
        };
        sum = scaled(*this) + scaled(other);
        most = top;
    }
};

// Vectors of a row that a thread asks for before it computes with the first.
constexpr int AHEAD = 4;

// Calls `each(column, vector)` for this thread's vectors of a row, the last first where it goes `BACK`.
template <bool BACK, typename F>
__device__ void for_each_vector(const Elem* row, int width, F each) {
    constexpr int STEP = THREADS * VECTOR, BY = BACK ? -STEP : STEP;
    const int first = int(threadIdx.x) * VECTOR, last = first < width ? first + (width - 1 - first) / STEP * STEP : -1;
    const auto is_there = [&](int column) { return BACK ? column >= 0 : column < width; };
    #pragma unroll 1
    for (int start = BACK ? last : first; is_there(start); start += AHEAD * BY) {
        Vector<Elem, VECTOR> got[AHEAD];
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) if (is_there(start + i * BY)) got[i] = fetch(row + start + i * BY);
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) if (is_there(start + i * BY)) each(start + i * BY, got[i]);
    }
}

struct Capped { float value, slope; };

__device__ Capped capped(float z, float cap) {
    if constexpr (FV_CAP) {
        const float t = tanhf(z / cap);
        return {cap * t, 1.f - t * t};
    } else return {z, 1.f};
}

// Of all logits of a row, for every thread of its CTA.
__device__ Exponentials exponentials(const Elem* logits, int vocabulary, float cap) {
    Exponentials* const of_warps = scratch<Exponentials>();
    Exponentials all = {bits_float(0xff800000), 0.f};
    for_each_vector<false>(logits, vocabulary, [&](int, const Vector<Elem, VECTOR>& vector) {
        float y[VECTOR];
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) y[i] = capped(widen<FV_DTYPE>(vector.of[i]), cap).value;
        Exponentials here = {y[0], 0.f};
        #pragma unroll
        for (int i = 1; i < VECTOR; ++i) here.most = max_or_nan(here.most, y[i]);
        // A row of -infinity alone: its exponentials are NaN, as its softmax is.
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) here.sum += exp2_fast((y[i] - here.most) * LOG2_E);
        if (here.most == bits_float(0xff800000)) here.sum = 0.f;
        all.add(here);
    });
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
    sync_cta();
    all = of_warps[0];
    for (int warp = 1; warp < WARPS; ++warp) all.add(of_warps[warp]);
    return all;
}

// Of 512 threads two CTAs find place on an SM.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
fv_cross_entropy(const __grid_constant__ CrossEntropyParams p) {
    Elem* const logits = p.logits.row(blockIdx.x);
    const int label = reinterpret_cast<const int*>(p.labels)[blockIdx.x];
    if (label < 0) {
        tell(p.losses, p.z_losses, 0.f, 0.f);
        const float zeros[VECTOR] = {};
        if (p.wants_gradient)
            for (int column = threadIdx.x * VECTOR; column < p.vocabulary; column += THREADS * VECTOR)
                store(logits + column, zeros);
        return;
    }
    const float at_label = capped(widen<FV_DTYPE>(logits[label]), p.cap).value;
    // Its CTA waits: the label's logit has been read before its gradient is written.
    const Exponentials all = exponentials(logits, p.vocabulary, p.cap);
    const float lse = all.most + logf(all.sum);
    tell(p.losses, p.z_losses, lse - at_label, p.z_weight * lse * lse);
    if (!p.wants_gradient) return;
    const float factor = fmaf(2.f * p.z_weight, lse, 1.f) / all.sum;
    for_each_vector<true>(logits, p.vocabulary, [&](int column, const Vector<Elem, VECTOR>& vector) {
        float d[VECTOR];
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const Capped y = capped(widen<FV_DTYPE>(vector.of[i]), p.cap);
            d[i] = (exp2_fast((y.value - all.most) * LOG2_E) * factor - (column + i == label ? 1.f : 0.f)) * y.slope;
        }
        store_streaming(reinterpret_cast<Vector<Elem, VECTOR>*>(logits + column), narrowed(d));
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_logit_sums(const __grid_constant__ LogitSumsParams p) {
    const Elem* const logits = p.logits.row(blockIdx.x);
    const int label = reinterpret_cast<const int*>(p.labels)[blockIdx.x], own = label - p.first;
    float* const sums = reinterpret_cast<float*>(p.sums) + 3 * i64(blockIdx.x);
    if (label < 0) {
        if (threadIdx.x < 3) sums[threadIdx.x] = 0.f;
        return;
    }
    const Exponentials all = exponentials(logits, p.vocabulary, p.cap);
    if (threadIdx.x > 0) return;
    sums[0] = all.most;
    sums[1] = all.sum;
    sums[2] = own >= 0 && own < p.vocabulary ? capped(widen<FV_DTYPE>(logits[own]), p.cap).value : 0.f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_cross_entropy_part(const __grid_constant__ CrossEntropyPartParams p) {
    Elem* const logits = p.logits.row(blockIdx.x);
    const int label = reinterpret_cast<const int*>(p.labels)[blockIdx.x], own = label - p.first;
    // In order of rank: every rank has the same bits.
    Exponentials all = {bits_float(0xff800000), 0.f};
    float at_label = 0.f;
    for (int rank = 0; rank < p.ranks; ++rank) {
        const float* const sums = reinterpret_cast<const float*>(p.sums) + 3 * (i64(rank) * p.tokens + blockIdx.x);
        all.add({sums[0], sums[1]});
        at_label += sums[2];
    }
    const float lse = all.most + logf(all.sum);
    tell(p.losses, p.z_losses, label < 0 ? 0.f : lse - at_label, label < 0 ? 0.f : p.z_weight * lse * lse);
    if (!p.wants_gradient) return;
    const float factor = fmaf(2.f * p.z_weight, lse, 1.f) / all.sum;
    for_each_vector<false>(logits, p.vocabulary, [&](int column, const Vector<Elem, VECTOR>& vector) {
        float d[VECTOR];
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const Capped y = capped(widen<FV_DTYPE>(vector.of[i]), p.cap);
            const float of_loss = exp2_fast((y.value - all.most) * LOG2_E) * factor - (column + i == own ? 1.f : 0.f);
            d[i] = label < 0 ? 0.f : of_loss * y.slope;
        }
        store_streaming(reinterpret_cast<Vector<Elem, VECTOR>*>(logits + column), narrowed(d));
    });
}

// One CTA: the losses in their order, in f64.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_total(const __grid_constant__ TotalParams p) {
    double loss = 0., z_loss = 0., labelled = 0.;
    for (int i = threadIdx.x; i < p.tokens; i += THREADS) {
        loss += reinterpret_cast<const float*>(p.losses)[i];
        if (p.z_losses) z_loss += reinterpret_cast<const float*>(p.z_losses)[i];
        labelled += reinterpret_cast<const int*>(p.labels)[i] >= 0;
    }
    loss = cta_sum(loss);
    labelled = cta_sum(labelled);
    if (p.z_losses) z_loss = cta_sum(z_loss);
    if (threadIdx.x > 0) return;
    *reinterpret_cast<double*>(p.loss) += loss;
    *reinterpret_cast<double*>(p.z_loss) += z_loss;
    *reinterpret_cast<i64*>(p.labelled) += i64(labelled);
}
