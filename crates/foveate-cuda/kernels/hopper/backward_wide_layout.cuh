// Tiles of fv_backward on Hopper for head dims above 128: what smem holds, and how consumers own the scores.

constexpr int CONSUMERS = FV_WARPS / 4 - 1;                // warpgroups, of the same 64 keys: one for dV, one for dK
constexpr int N = FV_BM / 8;    // accumulators of a warp: 16 keys, 8 queries of S^T and dP^T,
constexpr int N_K = FV_DP / 8, N_V = FV_DVP / 8;           // 8 columns of dK, of dV

// Shared memory, in this order, in panels of 128-byte rows (see hopper.cuh):
//     FV_BN * (row(FV_D) + row(FV_DV))                            K, V
//   + FV_STAGES * FV_BM * (row(FV_D) + row(FV_DV))                Q, dO
//   + FV_BM * FV_BN * 4                                           P dscore/ds of a step
//   + 512                                                         its bits of dropout
//   + FV_STAGES * FV_BM * 8                                       lse, delta
//   + 1024                                                        steps and mbarriers
constexpr int ROW_K = panels(FV_D) * PANEL_ROW, ROW_V = panels(FV_DV) * PANEL_ROW;
constexpr int K_BYTES = FV_BN * ROW_K, V_BYTES = FV_BN * ROW_V;
constexpr int Q_BYTES = FV_BM * ROW_K, D_OUT_BYTES = FV_BM * ROW_V, P_BYTES = FV_BM * FV_BN * 4;
constexpr int STEPS = 6;                                   // that are announced ahead
constexpr int BIT_BYTES = 512, END_BYTES = 1024;
constexpr int AT_V = K_BYTES, AT_Q = AT_V + V_BYTES, AT_D_OUT = AT_Q + FV_STAGES * Q_BYTES;
constexpr int AT_P = AT_D_OUT + FV_STAGES * D_OUT_BYTES, AT_BITS = AT_P + P_BYTES, AT_LSE = AT_BITS + BIT_BYTES;
constexpr int AT_DELTA = AT_LSE + FV_STAGES * FV_BM * 4, AT_STEPS = AT_DELTA + FV_STAGES * FV_BM * 4;
constexpr int AT_BARRIERS = AT_STEPS + 64 * STEPS;
constexpr int SHARED_BYTES = AT_STEPS + END_BYTES;
extern "C" __device__ const int fv_shared_bytes = SHARED_BYTES;

static_assert(FV_DTYPE != 2, "wgmma sums 16-bit operands in f32; f32 operands are the portable family's");
static_assert(CONSUMERS == 2 && FV_WARPS == 12, "a consumer for dV, and one for dK");
static_assert(FV_BN == 64 && FV_BM == 64, "64 keys, and a word of bits for 64 queries");
static_assert(FV_D % 8 == 0 && FV_DV % 8 == 0, "rows of whole 16 bytes");
static_assert(FV_SEPARATE_DQ && !FV_CAPTURES, "dQ and the gradients of captured buffers are fv_backward_dq's");

constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

constexpr Warps WARPS_S = {4, 1, 1, N};
constexpr bool KEYS_DOWN = true;
constexpr bool HOLDS_SUMS = false;
constexpr int SCORE_COPIES = 2;                            // as the forward counts them: evaluated, and not
constexpr bool FINDS_HUGE_LSE = false;
constexpr bool HIDES_FIRST = false;
__device__ int warp_row() { return threadIdx.x / 32 % 4 * 16; }
__device__ int warp_column() { return 0; }
__device__ float lse_of(float lse) { return lse; }         // as copy_rows leaves it
