// Shared by the kernels of the backward: huge lse, stores of gradients, and the layout of dq_accum.

#if FV_GRAD_DTYPE == 2
typedef float GradElem;
#else
typedef unsigned short GradElem;
#endif

// lse is an f32, and the rounding of it makes e^(score - lse) wrong by up to |lse| 2^-24 of itself:
// a score function may give -1e30 to every key of a row, and then lse loses the logarithm of the number of
// keys. From this magnitude on fv_row_weight_sum sums the weights, and the backward divides them by the
// sum. Below, the error of weights is 2^-18 at most, or 2^-15 where operands have 16 bits, a sixteenth of
// the rounding error of f16.
constexpr float HUGE_LSE = FV_DTYPE == 2 ? 128.f : 1024.f;
// Whether the backward uses row_weight_sum: not for plain scores of 16-bit operands, where scale and
// change of base are one multiply-add.
[[maybe_unused]] constexpr bool HAS_ROW_WEIGHT_SUM = FV_DTYPE == 2 || FV_SCORE;
__device__ bool is_huge(float lse) { return fabsf(lse) >= HUGE_LSE && fabsf(lse) < infinity(); }

// ---- destinations ----

__device__ GradElem narrow(float x) {
#if FV_GRAD_DTYPE == 2
    return x;
#else
    return narrow2<FV_GRAD_DTYPE>(x, 0.f);
#endif
}

// Eight columns of a gradient, aligned to 16 bytes: x, or x added to what is there.
__device__ void store_aligned(GradElem* at, float (&x)[8], bool accumulate) {
    union Vector {
        uint4 words[sizeof(GradElem) / 2];
        GradElem of[8];
    };
    Vector* const target = reinterpret_cast<Vector*>(at);
    Vector vector;
    if (accumulate) {
        for (int i = 0; i < int(sizeof(GradElem)) / 2; ++i) vector.words[i] = target->words[i];
        for (int i = 0; i < 8; ++i) x[i] += widen<FV_GRAD_DTYPE>(vector.of[i]);
    }
    for (int i = 0; i < 8; ++i) vector.of[i] = narrow(x[i]);
    for (int i = 0; i < int(sizeof(GradElem)) / 2; ++i) target->words[i] = vector.words[i];
}

// Columns column .. column + 8 of a row of a gradient that has `dim` columns: x, or x added to
// what is there. `column` is a multiple of 8.
__device__ void store_eight(GradElem* row, i64 elem, int column, int dim, float (&x)[8], bool accumulate) {
    if (FV_ALIGN == 16 && column + 8 <= dim) {
        store_aligned(row + column, x, accumulate);
        return;
    }
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        GradElem* at = row + (column + i) * elem;
        if (column + i < dim) *at = narrow(accumulate ? x[i] + widen<FV_GRAD_DTYPE>(*at) : x[i]);
    }
}

// Bytes of smem that a warp needs for store_rows of `columns` accumulators in a row.
constexpr int scratch_pitch(int columns) { return columns * 32 + 32; }
constexpr int scratch_bytes(int columns) { return 16 * scratch_pitch(columns); }

// Writes a warp's accumulators times `factor` to a gradient of `count` rows, the first of which
// stands at `first` in its view, and `dim` columns; the first accumulator is at row0, column0 of
// them. They pass through `scratch`, shared memory of the warp, to be written along rows.
template <int M, int N>
__device__ void store_rows(const View& view, int batch, int head, int first, int count, int dim,
                           const float (&sum)[M][N][4], int row0, int column0, float factor, bool accumulate,
                           char* scratch) {
    if (!view.data) return;     // not asked for
    const int lane = threadIdx.x % 32;
    GradElem* data = static_cast<GradElem*>(view.data) + view.at(batch, head, first);
    #pragma unroll
    for (int m = 0; m < M; ++m) {
        #pragma unroll
        for (int n = 0; n < N; ++n)
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2*>(scratch + (lane / 4 + half * 8) * scratch_pitch(N) + n * 32 + lane % 4 * 8) =
                    make_float2(sum[m][n][half * 2], sum[m][n][half * 2 + 1]);
        __syncwarp();
        #pragma unroll 1
        for (int i = lane; i < 16 * N; i += 32) {
            const int row = row0 + m * 16 + i / N, column = column0 + i % N * 8;
            if (row >= count || column >= dim) continue;
            const float* from = reinterpret_cast<const float*>(scratch + i / N * scratch_pitch(N) + i % N * 32);
            float x[8];
            #pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = from[j] * factor;
            store_eight(data + row * view.row, view.elem, column, dim, x, accumulate);
        }
        __syncwarp();
    }
}

// ---- dq_accum ----

// dq_accum holds accumulators: 128 floats for each 16 rows and 8 columns, so that a warp reduces into
// consecutive addresses. Where red.v4 exists, the four floats of a lane are consecutive.
#if __CUDA_ARCH__ >= 900
constexpr bool REDUCES_VECTOR = true;
#else
constexpr bool REDUCES_VECTOR = false;
#endif

// The offset of float `i` of `lane` in the 128 of an accumulator.
__device__ int dq_accum_offset(int lane, int i) { return REDUCES_VECTOR ? lane * 4 + i : i * 32 + lane; }

// The accumulators of rows row .. row + 16 (row a multiple of 16) and columns 8 * column .. of a head.
__device__ float* dq_accum_fragment(const BackwardParams& p, int head, i64 row, int column) {
    return p.dq_accum + (head * p.sum_rows + row) * FV_DP + column * 128;
}

// How many tiles of keys have added to dq_accum, in the order of their ranks, for each 16 rows with which a tile of
// queries begins: [heads_q, sum_rows / 16], behind dq_accum.
__device__ u32* dq_added(const BackwardParams& p) {
    return reinterpret_cast<u32*>(p.dq_accum + p.heads_q * p.sum_rows * FV_DP);
}

__device__ void add_to_dq_accum(float* fragment, const float (&x)[4]) {
    int lane = threadIdx.x % 32;
    if constexpr (REDUCES_VECTOR) {
#if __CUDA_ARCH__ >= 900
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                     :: "l"(fragment + lane * 4), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#endif
    } else {
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("red.global.add.f32 [%0], %1;" :: "l"(fragment + dq_accum_offset(lane, i)), "f"(x[i])
                         : "memory");
    }
}
