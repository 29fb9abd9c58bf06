// Sums of columns, in an order that the sizes fix: the gradient of a bias.
//
// A CTA has COLUMNS of all rows, so that no second launch adds up what several have: a warp reads few columns of many
// rows at once. Neighbours read the rest of a line at about the same time.
//   FV_COLUMNS   of a CTA, a power of two; at most as many as a warp reads of a row

struct ColumnSumsParams {
    Rows from;                  // [rows, width]
    u64 to;                     // [width], f32 or as operands; added to
    int rows, width, to_is_f32;
};

constexpr int COLUMNS = FV_COLUMNS, LANES = COLUMNS / VECTOR, ROWS = THREADS / LANES, AT_ONCE = 8;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fv_column_sums(const __grid_constant__ ColumnSumsParams p) {
    float* const of_warps = scratch<float>();       // [WARPS, COLUMNS]
    const int own = int(threadIdx.x % LANES) * VECTOR, column = blockIdx.x * COLUMNS + own;
    float sum[VECTOR] = {};
    if (column < p.width) {
        #pragma unroll 1
        for (int row = threadIdx.x / LANES; row < p.rows; row += AT_ONCE * ROWS) {
            // Were the loop unrolled instead, each of its turns might be the last, and none asked for before.
            Vector<Elem, VECTOR> held[AT_ONCE] = {};
            #pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (row + i * ROWS < p.rows) held[i] = fetch_streaming(p.from.row(row + i * ROWS) + column);
            #pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                float x[VECTOR];
                widened(x, held[i]);
                #pragma unroll
                for (int j = 0; j < VECTOR; ++j) sum[j] += x[j];
            }
        }
    }
    // The rows of a warp, then the warps.
    #pragma unroll
    for (int lanes = 16; lanes >= LANES; lanes /= 2)
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += shuffle_xor(sum[i], lanes);
    if (threadIdx.x % 32 < LANES) store_f32(of_warps + threadIdx.x / 32 * COLUMNS + own, sum);
    sync_cta();
    const int place = blockIdx.x * COLUMNS + threadIdx.x;
    if (threadIdx.x >= COLUMNS || place >= p.width) return;
    float all = of_warps[threadIdx.x];
    for (int warp = 1; warp < WARPS; ++warp) all += of_warps[warp * COLUMNS + threadIdx.x];
    if (p.to_is_f32) {
        reinterpret_cast<float*>(p.to)[place] += all;
    } else {
        Elem& to = reinterpret_cast<Elem*>(p.to)[place];
        to = narrow<FV_DTYPE>(widen<FV_DTYPE>(to) + all);
    }
}
