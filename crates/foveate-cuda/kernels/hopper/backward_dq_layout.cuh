// Tiles of fv_backward_dq on Hopper: what smem holds, and how consumers own the scores.

constexpr int CONSUMERS = FV_WARPS / 4 - 1;                // warpgroups, 64 queries each
constexpr int N = FV_BN / 8;                               // accumulators of a warp: 16 queries, 8 keys of S and dP,
constexpr int N_Q = FV_DP / 8;                             // 8 columns of dQ

// Shared memory, in this order, in panels of 128-byte rows (see hopper.cuh):
//     FV_BM * (row(FV_D) + row(FV_DV))                            Q, dO
//   + FV_STAGES * FV_BN * row(FV_D)                               K
//   + V_STAGES * FV_BN * row(FV_DV)                               V
//   + FV_BM * 8                                                   lse, delta
//   + 1024                                                        steps and mbarriers
constexpr int ROW_K = panels(FV_D) * PANEL_ROW, ROW_V = panels(FV_DV) * PANEL_ROW;
constexpr int Q_BYTES = FV_BM * ROW_K, D_OUT_BYTES = FV_BM * ROW_V;
constexpr int K_BYTES = FV_BN * ROW_K, V_BYTES = FV_BN * ROW_V;
constexpr int STEPS = 6;                                   // that are announced ahead
constexpr int ROW_BYTES = FV_BM * 8, END_BYTES = 1024, SMEM_LIMIT = 232448;
constexpr int FIXED_BYTES = Q_BYTES + D_OUT_BYTES + ROW_BYTES + END_BYTES;
// V is read by one product of a step, and K by two, a step apart: where there is no room for both, V has a stage less.
constexpr int V_STAGES = FIXED_BYTES + FV_STAGES * (K_BYTES + V_BYTES) <= SMEM_LIMIT ? FV_STAGES : FV_STAGES - 1;
constexpr int AT_D_OUT = Q_BYTES, AT_K = AT_D_OUT + D_OUT_BYTES, AT_V = AT_K + FV_STAGES * K_BYTES;
constexpr int AT_LSE = AT_V + V_STAGES * V_BYTES, AT_DELTA = AT_LSE + FV_BM * 4, AT_STEPS = AT_DELTA + FV_BM * 4;
constexpr int AT_BARRIERS = AT_STEPS + 64 * STEPS;
constexpr int SHARED_BYTES = AT_STEPS + END_BYTES;
extern "C" __device__ const int fv_shared_bytes = SHARED_BYTES;

static_assert(FV_DTYPE != 2, "wgmma sums 16-bit operands in f32; f32 operands are the portable family's");
static_assert(FV_BM == 64 * CONSUMERS && FV_WARPS % 4 == 0, "a consumer owns 64 queries");
static_assert(FV_D % 8 == 0 && FV_DV % 8 == 0, "rows of whole 16 bytes");
static_assert(FV_BN % 16 == 0 && FV_BN <= 256 && FV_STAGES >= 2, "keys of a product");

// Where dQ, S, dP and dS take most of them, producers spill rather than consumers.
constexpr bool MANY_SUMS = FV_DP / 2 + FV_BN * 5 / 4 > 200;
constexpr int PRODUCER_REGISTERS = MANY_SUMS ? 24 : 40;
constexpr int CONSUMER_REGISTERS = MANY_SUMS ? 240 : 232;
static_assert(CONSUMERS == 2, "how registers are dealt out");

constexpr Warps WARPS_S = {4 * CONSUMERS, 1, 1, N};
constexpr bool KEYS_DOWN = false;
constexpr bool HOLDS_SUMS = false;
constexpr int SCORE_COPIES = 2;                            // as the forward counts them: evaluated, and not
constexpr bool FINDS_HUGE_LSE = false;
constexpr bool HIDES_FIRST = false;
__device__ int warp_row() { return (threadIdx.x / 32 - 4) * 16; }
__device__ int warp_column() { return 0; }
__device__ float lse_of(float lse) { return lse; }         // as copy_rows leaves it
