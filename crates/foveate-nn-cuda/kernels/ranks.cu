// Gradients of ranks: rounded for the way, and summed in order of rank.

struct NarrowParams {
    u64 from;                   // f32 [elems]
    u64 to;                     // [elems]
    i64 elems;
};

struct SumRanksParams {
    u64 from[32];               // [elems] of each rank
    u64 to;                     // [elems], f32 or as operands
    i64 elems;
    int ranks;
    int accumulate;             // the sum is added to what is there
    int to_is_f32;
    int unused;
};

extern "C" __global__ void __launch_bounds__(THREADS)
fv_narrow(const __grid_constant__ NarrowParams p) {
    const i64 at = (i64(blockIdx.x) * THREADS + threadIdx.x) * VECTOR;
    if (at >= p.elems) return;
    float x[VECTOR];
    load_f32(x, reinterpret_cast<const float*>(p.from) + at);
    store(reinterpret_cast<Elem*>(p.to) + at, x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_sum_ranks(const __grid_constant__ SumRanksParams p) {
    const i64 at = (i64(blockIdx.x) * THREADS + threadIdx.x) * VECTOR;
    if (at >= p.elems) return;
    float sum[VECTOR] = {};
    float* const wide = reinterpret_cast<float*>(p.to) + at;
    Elem* const to = reinterpret_cast<Elem*>(p.to) + at;
    #pragma unroll 1
    for (int rank = 0; rank < p.ranks; ++rank) {
        float x[VECTOR];
        load(x, reinterpret_cast<const Elem*>(p.from[rank]) + at);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += x[i];
    }
    if (p.accumulate) {
        float x[VECTOR];
        if (p.to_is_f32) load_f32(x, wide);
        else load(x, to);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += x[i];
    }
    if (p.to_is_f32) store_f32(wide, sum);
    else store(to, sum);
}
