// What the kernels of the backward share: how gradients are written, and the layout of the sums of dq.

#if FV_GRAD_DTYPE == 2
typedef float GradElem;
#else
typedef unsigned short GradElem;
#endif

// lse is an f32, and the rounding of it makes e^(score - lse) wrong by up to |lse| 2^-24 of itself:
// a score function may give -1e30 to every key of a row, and then there is no room in lse for the
// logarithm of how many keys share the weight. From this magnitude on fv_row_weight_sum finds what the
// weights add up to, and they are divided by it. Below, they are wrong by 2^-18 at most, or 2^-15
// where operands have 16 bits, a sixteenth of what rounding to f16 may cost.
constexpr float HUGE_LSE = FV_DTYPE == 2 ? 128.f : 1024.f;
// Whether that is done: not for plain scores of 16-bit operands, where scale and change of base are
// one multiply-add.
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

// Columns column .. column + 8 of a row of a gradient that has `dim` columns: x, or x added to
// what is there. `column` is a multiple of 8.
__device__ void store_eight(GradElem* row, i64 elem, int column, int dim, float (&x)[8], bool accumulate) {
    union Piece {
        uint4 words[sizeof(GradElem) / 2];
        GradElem of[8];
    };
    if (FV_ALIGN == 16 && column + 8 <= dim) {
        Piece* at = reinterpret_cast<Piece*>(row + column);
        Piece piece;
        if (accumulate) {
            for (int i = 0; i < int(sizeof(GradElem)) / 2; ++i) piece.words[i] = at->words[i];
            for (int i = 0; i < 8; ++i) x[i] += widen<FV_GRAD_DTYPE>(piece.of[i]);
        }
        for (int i = 0; i < 8; ++i) piece.of[i] = narrow(x[i]);
        for (int i = 0; i < int(sizeof(GradElem)) / 2; ++i) at->words[i] = piece.words[i];
    } else {
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            GradElem* at = row + (column + i) * elem;
            if (column + i < dim) *at = narrow(accumulate ? x[i] + widen<FV_GRAD_DTYPE>(*at) : x[i]);
        }
    }
}

// Bytes that each warp needs to write COLUMNS accumulators side by side.
constexpr int scratch_pitch(int columns) { return columns * 32 + 32; }
constexpr int scratch_bytes(int columns) { return 16 * scratch_pitch(columns); }

// Writes a warp's accumulators times `factor` to a gradient of `count` rows, the first of which
// stands at `first` in its view, and `dim` columns; the first accumulator is at row0, column0 of
// them. They pass through `scratch`, shared memory of the warp, to be written along rows.
template <int M, int N>
__device__ void store_rows(const View& view, int batch, int head, int first, int count, int dim, const float (&sum)[M][N][4],
                           int row0, int column0, float factor, bool accumulate, char* scratch) {
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

// ---- sums of dq ----

// dq_accum holds accumulators: 128 numbers for each 16 rows and 8 columns, so that a warp adds to
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
    return p.dq_accum + (head * p.sum_rows + row) * FV_DP + column * 128;
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
