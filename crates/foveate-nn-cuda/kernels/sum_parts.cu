// The second stage of a norm's weight gradient: the sum of f32 rows, in an order that THREADS fixes.

struct SumPartsParams {
    u64 partial;                    // f32 [parts, width]
    u64 sum;                        // [width], f32 or as operands
    int parts, width, accumulate, sum_is_f32;
};

// Of a CTA: a sector of a row, so that many CTAs share the work. The host counts CTAs by SUM_COLUMNS.
constexpr int COLUMNS = 8, AT_ONCE = THREADS / COLUMNS;

// A thread adds every AT_ONCE-th part; then lanes of a warp are added, then warps.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_sum_parts(const __grid_constant__ SumPartsParams p) {
    float* const of_warps = scratch<float>();       // [WARPS, COLUMNS]
    const int own = threadIdx.x % COLUMNS, column = blockIdx.x * COLUMNS + own;
    float sum = 0.f;
    if (column < p.width) {
        #pragma unroll 8
        for (int part = threadIdx.x / COLUMNS; part < p.parts; part += AT_ONCE)
            sum += reinterpret_cast<const float*>(p.partial)[i64(part) * p.width + column];
    }
    #pragma unroll
    for (int lanes = 16; lanes >= COLUMNS; lanes /= 2) sum += shuffle_xor(sum, lanes);
    if (threadIdx.x % 32 < COLUMNS) of_warps[threadIdx.x / 32 * COLUMNS + own] = sum;
    sync_cta();
    if (threadIdx.x >= COLUMNS || column >= p.width) return;
    for (int warp = 1; warp < WARPS; ++warp) sum += of_warps[warp * COLUMNS + own];
    if (p.sum_is_f32) {
        float& to = reinterpret_cast<float*>(p.sum)[column];
        to = p.accumulate ? to + sum : sum;
    } else {
        Elem& to = reinterpret_cast<Elem*>(p.sum)[column];
        to = narrow<FV_DTYPE>(p.accumulate ? widen<FV_DTYPE>(to) + sum : sum);
    }
}
