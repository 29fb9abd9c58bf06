// What fv_backward and fv_backward_dq of the portable family have in common: how warps share the scores of a
// tile, and P and dS in smem.

constexpr Warps WARPS_S = divide(FV_BM, FV_BN, true);         // warps over S, P, dP and dS
static_assert(FV_BM % 16 == 0 && FV_BN % 16 == 0, "tiles are multiples of 16");
static_assert(WARPS_S.down > 0, "the warps cannot divide the scores evenly");

constexpr int PITCH_K = FV_DP * ELEM_BYTES + PAD_BYTES;    // of K and Q in shared memory
constexpr int PITCH_V = FV_DVP * ELEM_BYTES + PAD_BYTES;   // of V and dO
constexpr int PITCH_P = FV_BN * ELEM_BYTES + PAD_BYTES;    // of P and dS

constexpr bool KEYS_DOWN = false;
constexpr bool HOLDS_SUMS = false;
constexpr int SCORE_COPIES = 1;
constexpr bool FINDS_HUGE_LSE = false;
constexpr bool HIDES_FIRST = false;
__device__ int warp_row() { return threadIdx.x / 32 / WARPS_S.across * WARPS_S.rows * 16; }
__device__ int warp_column() { return threadIdx.x / 32 % WARPS_S.across * WARPS_S.columns * 8; }

// Offsets of this lane's first elements of the operands of S and dP: by row, and by column.
template <int PITCH>
__device__ u32 lane_rows() { return warp_row() * PITCH + lane_offset_a<false>(PITCH); }
template <int PITCH>
__device__ u32 lane_columns() { return warp_column() * PITCH + lane_offset_b<false>(PITCH); }

// What is subtracted from the scores of a row: infinity where no key is visible, so that P = 0.
__device__ float lse_of(float lse) {
    const float x = lse == -infinity() ? infinity() : lse;
    return HAS_ROW_WEIGHT_SUM ? x : x * LOG2_E;
}
// Of the rows of queries that a lane's scores are of; `first` is the smem address of the lse of its first query.
template <int HELD>
__device__ void load_lse(float (&lse)[HELD], u32 first) {
    #pragma unroll
    for (int h = 0; h < HELD; ++h) lse[h] = lse_of(load_shared(first + h * 32));
}

// Two consecutive elements of a row of P or dS.
__device__ void store_pair(u32 address, float x, float y) {
    if constexpr (FV_DTYPE == 2)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(address), "f"(x), "f"(y) : "memory");
    else asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(narrow2<FV_DTYPE>(x, y)) : "memory");
}

// Writes a tile of P or dS, rounded to the operands' dtype.
template <typename F>
__device__ void store_scores(u32 tile, F value) {
    const int row = warp_row() + threadIdx.x % 32 / 4, column = warp_column() + threadIdx.x % 4 * 2;
    const u32 at = tile + row * PITCH_P + column * ELEM_BYTES;
    #pragma unroll
    for (int m = 0; m < WARPS_S.rows; ++m)
        #pragma unroll
        for (int n = 0; n < WARPS_S.columns; ++n)
            #pragma unroll
            for (int i = 0; i < 4; i += 2)
                store_pair(at + (m * 16 + i * 4) * PITCH_P + n * 8 * ELEM_BYTES, value(m, n, i), value(m, n, i + 1));
}

