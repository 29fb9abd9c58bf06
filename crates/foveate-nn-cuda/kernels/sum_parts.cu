// The second stage of a norm's weight gradient: the sum of f32 rows, in an order that THREADS fixes.

struct SumPartsParams {
    u64 partial;                    // f32 [parts, width]
    u64 sum;                        // [width], f32 or as operands
    int parts, width, accumulate, sum_is_f32;
};

// 32 columns a CTA. Warp w adds parts w, w + WARPS, ...; then warp 0 adds the warps' sums.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_sum_parts(const __grid_constant__ SumPartsParams p) {
    float* const of_warps = scratch<float>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    float sum = 0.f;
    if (column < p.width) {
        #pragma unroll 8
        for (int part = warp; part < p.parts; part += WARPS) sum += reinterpret_cast<const float*>(p.partial)[i64(part) * p.width + column];
    }
    of_warps[threadIdx.x] = sum;
    sync_cta();
    if (warp > 0 || column >= p.width) return;
    for (int other = 1; other < WARPS; ++other) sum += of_warps[other * 32 + lane];
    if (p.sum_is_f32) {
        float& to = reinterpret_cast<float*>(p.sum)[column];
        to = p.accumulate ? to + sum : sum;
    } else {
        Elem& to = reinterpret_cast<Elem*>(p.sum)[column];
        to = narrow<FV_DTYPE>(p.accumulate ? widen<FV_DTYPE>(to) + sum : sum);
    }
}
