// What lies between blocks whose operands are of different dtypes or apart: widening, adding, copying rows; and the
// gradient of a bias, summed over the tokens in stages of fixed order: fv_column_sums over the rows of a warp and the
// warps of a CTA, fv_sum_parts (sum_parts.cu) over the CTAs.

struct WidenParams {
    u64 from;                   // [elems]
    u64 to;                     // f32 [elems]
    i64 elems;
};

struct AddParams {
    u64 from;                   // f32 [elems]
    u64 to;                     // [elems], added to
    i64 elems;
};

struct AddRowsParams {
    Rows from, to;              // [rows, width]; added to
    int width;
};

struct ColumnSumsParams {
    Rows from;                  // [rows, width]
    u64 partial;                // f32 [parts, width]
    int rows, width;
};

struct CopyRowsParams {
    Rows from, to;              // [rows, width]
    int width;
};

extern "C" __global__ void __launch_bounds__(THREADS)
fv_widen(const __grid_constant__ WidenParams p) {
    const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at < p.elems) reinterpret_cast<float*>(p.to)[at] = widen<FV_DTYPE>(reinterpret_cast<const Elem*>(p.from)[at]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_add(const __grid_constant__ AddParams p) {
    const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= p.elems) return;
    Elem& to = reinterpret_cast<Elem*>(p.to)[at];
    to = narrow<FV_DTYPE>(widen<FV_DTYPE>(to) + reinterpret_cast<const float*>(p.from)[at]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_copy_rows(const __grid_constant__ CopyRowsParams p) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * VECTOR;
    if (column >= p.width) return;
    typedef Vector<Elem, VECTOR> Elems;
    *reinterpret_cast<Elems*>(p.to.row(blockIdx.x) + column) = *reinterpret_cast<const Elems*>(p.from.row(blockIdx.x) + column);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_add_rows(const __grid_constant__ AddRowsParams p) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * VECTOR;
    if (column >= p.width) return;
    float x[VECTOR], y[VECTOR];
    load(x, p.from.row(blockIdx.x) + column);
    load(y, p.to.row(blockIdx.x) + column);
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) y[i] += x[i];
    store(p.to.row(blockIdx.x) + column, y);
}

// A CTA has as many columns as a warp reads at once, and each of its warps rows of its own, whose sums are added at the
// end: 512 bytes of a row are enough to read at once, and parts are few.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_column_sums(const __grid_constant__ ColumnSumsParams p) {
    constexpr int COLUMNS = 32 * VECTOR;
    float* const of_warps = scratch<float>();       // [WARPS, COLUMNS]
    const int warp = threadIdx.x / 32, own = int(threadIdx.x % 32) * VECTOR, first = blockIdx.y * COLUMNS;
    float sum[VECTOR] = {};
    if (first + own < p.width) {
        #pragma unroll 8
        for (int row = blockIdx.x * WARPS + warp; row < p.rows; row += gridDim.x * WARPS) {
            float x[VECTOR];
            load(x, p.from.row(row) + first + own);
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) sum[i] += x[i];
        }
    }
    store_f32(of_warps + warp * COLUMNS + own, sum);
    sync_cta();
    for (int column = threadIdx.x; column < COLUMNS && first + column < p.width; column += THREADS) {
        float all = 0.f;
        #pragma unroll
        for (int other = 0; other < WARPS; ++other) all += of_warps[other * COLUMNS + column];
        reinterpret_cast<float*>(p.partial)[i64(blockIdx.x) * p.width + first + column] = all;
    }
}
