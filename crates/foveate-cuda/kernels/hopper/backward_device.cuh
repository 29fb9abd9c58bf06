// Parts of fv_backward on Hopper: its mbarriers, and the products of a consumer.

// Where a tile has 128 queries and scores are functions, registers do not hold lse of all queries beside S, dP, dK and
// dV: so many columns of P come after the others, once dP has started, and lse of theirs is read then.
constexpr int LATE_COLUMNS = DP_EARLY && FV_SCORE && FV_BM == 128 && !SCORES_IN_LOOP ? N / 2 : 0;
// And delta is read when it is subtracted, if dP does not start from it.
constexpr bool DELTA_LATE = !FROM_DELTA && (LATE_COLUMNS > 0 || FV_DSCORE);

// The mbarriers.
struct Barriers : StepBarriers {
    static constexpr int OWN = STEP_BARRIERS, RINGS = OWN + 6, DQ = RINGS + 3 * FV_STAGES,
                         COUNT = DQ + 2 * FV_ORDERED_DQ;

    __device__ CopyBarrier k_full() const { return at(OWN); }
    __device__ CopyBarrier v_full() const { return at(OWN + 1); }
    __device__ CopyBarrier k_empty() const { return at(OWN + 2); }
    __device__ CopyBarrier v_empty() const { return at(OWN + 3); }
    __device__ CopyBarrier ds_full(int stage) const { return at(OWN + 4 + stage); }
    // Of Q, dO, lse and delta together.
    __device__ CopyBarrier full(int stage) const { return at(RINGS + stage); }
    __device__ CopyBarrier q_full(int stage) const { return full(stage); }
    __device__ CopyBarrier d_out_full(int stage) const { return full(stage); }
    __device__ CopyBarrier q_empty(int stage) const { return at(RINGS + FV_STAGES + stage); }
    // Of dQ of a step, for the thread that adds it to dq_accum (FV_ORDERED_DQ).
    __device__ CopyBarrier dq_full() const { return at(DQ); }
    __device__ CopyBarrier dq_empty() const { return at(DQ + 1); }
    // Of dO, and of lse and delta, of which there are ROW_STAGES.
    __device__ CopyBarrier d_out_empty(int stage) const { return at(RINGS + 2 * FV_STAGES + stage); }

    __device__ void init() const {
        init_steps();
        k_full().init(1);
        v_full().init(1);
        k_empty().init(CONSUMERS);
        v_empty().init(CONSUMERS);
        for (int s = 0; s < 2; ++s) ds_full(s).init(4 * CONSUMERS);
        for (int s = 0; s < FV_STAGES; ++s) {
            full(s).init(3);
            q_empty(s).init(CONSUMERS);
            d_out_empty(s).init(CONSUMERS);
        }
        if constexpr (FV_ORDERED_DQ) {
            dq_full().init(4 * CONSUMERS);
            dq_empty().init(1);
        }
        fence_barrier_init();
    }
};
static_assert(64 * STEPS + 8 * Barriers::COUNT + 4 * ROW_STAGES <= END_BYTES, "no room for barriers");

// dV += P^T dO, of steps from .. to of 16 queries.
template <int COLUMNS>
__device__ void start_sums(float (&sums)[COLUMNS][4], const u32 (&scores)[FV_BM / 16][4], Operand rows, int from,
                           int to) {
    #pragma unroll
    for (int k = from; k < to; ++k) multiply_async(sums, scores[k], rows + k * 16 * PANEL_ROW);
}

// dK += dS^T Q; dS is read across its rows.
__device__ void start_dk(float (&dk)[N_K][4], Operand ds, Operand queries) {
    #pragma unroll
    for (int k = 0; k < FV_BM / 16; ++k) multiply_transposed(dk, ds + k * 16 * PANEL_ROW, queries + k * 16 * PANEL_ROW);
}

// dQ = dS K, of this consumer's queries or columns.
__device__ void start_dq(float (&dq)[N_Q][4], Operand ds, Operand keys) {
    #pragma unroll
    for (int k = 0; k < FV_BN / 16; ++k)
        multiply_across(dq, ds + (k / 4 * FV_BM * PANEL_ROW + k % 4 * 32), keys + k * 16 * PANEL_ROW, k > 0);
}

// A consumer writes its dS^T as dS: rows of queries, a panel of 64 keys for each consumer. Where the row of a lane's
// address is in the panel: see store_matrices_transposed.
__device__ u32 ds_place() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    return (lane / 16 * 8 + lane % 8) * PANEL_ROW + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
}

// A warp's part of dQ of a tile: 16 rows, in the order of dq_accum, from its first column of accumulators on.
__device__ int dq_row() { return (SPLIT_DQ_ROWS ? threadIdx.x / 128 * 64 - 64 : 0) + threadIdx.x / 32 % 4 * 16; }
__device__ int dq_column() { return SPLIT_DQ_ROWS ? 0 : (threadIdx.x / 128 - 1) * N_Q; }
__device__ int dq_offset() { return dq_row() * FV_DP + dq_column() * 128; }
__device__ int dq_bytes() { return max(min(N_Q, N_K - dq_column()), 0) * 512; }

// Leaves it in smem; `lane` is where the lane's first numbers go.
__device__ void store_dq(u32 lane, const float (&dq)[N_Q][4]) {
    #pragma unroll
    for (int n = 0; n < N_Q; ++n)
        if (FV_DP % PANEL_COLUMNS == 0 || dq_column() + n < N_K)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(lane + n * 512), "f"(dq[n][0]),
                         "f"(dq[n][1]), "f"(dq[n][2]), "f"(dq[n][3])
                         : "memory");
}
