// What the kernels of the backward share: how gradients are written, and the layout of the sums of dq.

#if FV_GRAD_DTYPE == 2
typedef float GradElem;
#else
typedef unsigned short GradElem;
#endif

// ---- destinations ----

// One element of a gradient.
__device__ void store_gradient(GradElem* target, float x, bool accumulate) {
    if (accumulate) x += widen<FV_GRAD_DTYPE>(*target);
    if constexpr (FV_GRAD_DTYPE == 2) *target = x;
    else *target = narrow2<FV_GRAD_DTYPE>(x, 0.f);
}

// Columns column, column + 1 of a row of a gradient that has `dim` columns; column is even.
__device__ void store_gradients(GradElem* row, i64 elem, int column, int dim, float x, float y, bool accumulate) {
    if (column >= dim) return;
    if constexpr (FV_ALIGN >= (FV_GRAD_DTYPE == 2 ? 8 : 4)) {
        if (column + 1 < dim && !accumulate) {
            if constexpr (FV_GRAD_DTYPE == 2) *reinterpret_cast<float2*>(row + column) = make_float2(x, y);
            else *reinterpret_cast<u32*>(row + column) = narrow2<FV_GRAD_DTYPE>(x, y);
            return;
        }
    }
    store_gradient(row + column * elem, x, accumulate);
    if (column + 1 < dim) store_gradient(row + (column + 1) * elem, y, accumulate);
}

// Writes accumulators times `factor` to rows first .. first + count of a gradient that has `dim`
// columns; the warp's first accumulator is at row0, column0 of them.
template <int M, int N>
__device__ void store_rows(const View& view, int batch, int head, int first, int count, int dim,
                           const float (&sum)[M][N][4], int row0, int column0, float factor, bool accumulate) {
    int lane = threadIdx.x % 32;
    GradElem* data = static_cast<GradElem*>(view.data) + view.at(batch, head, 0);
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = row0 + m * 16 + half * 8 + lane / 4;
            if (row >= count) continue;
            GradElem* target = data + (first + row) * view.row;
            #pragma unroll
            for (int n = 0; n < N; ++n)
                store_gradients(target, view.elem, column0 + n * 8 + lane % 4 * 2, dim,
                                sum[m][n][half * 2] * factor, sum[m][n][half * 2 + 1] * factor, accumulate);
        }
}

// ---- sums of dq ----

// dq_sum holds accumulators: 128 numbers for each 16 rows and 8 columns, so that a warp adds to
// consecutive addresses. Where one instruction can add four numbers, those of a lane are neighbours.
#if __CUDA_ARCH__ >= 900
constexpr bool ADDS_FOUR = true;
#else
constexpr bool ADDS_FOUR = false;
#endif

// Where number `i` of `lane` lies in its 128.
__device__ int sum_offset(int lane, int i) { return ADDS_FOUR ? lane * 4 + i : i * 32 + lane; }

// The accumulators of rows row .. row + 16 (row a multiple of 16) and columns 8 * column .. of a head.
__device__ float* sum_fragment(const BackwardParams& p, int head, i64 row, int column) {
    return p.dq_sum + (head * p.sum_rows + row) * FV_DP + column * 128;
}

__device__ void add_sums(float* fragment, const float (&x)[4]) {
    int lane = threadIdx.x % 32;
    if constexpr (ADDS_FOUR) {
#if __CUDA_ARCH__ >= 900
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                     :: "l"(fragment + lane * 4), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#endif
    } else {
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("red.global.add.f32 [%0], %1;" :: "l"(fragment + sum_offset(lane, i)), "f"(x[i]) : "memory");
    }
}
