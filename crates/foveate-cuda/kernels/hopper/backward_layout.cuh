// Tiles of fv_backward on Hopper: what smem holds, and how consumers own the scores.

constexpr int CONSUMERS = FV_WARPS / 4 - 1;                // warpgroups, 64 keys each
constexpr int N = FV_BM / 8;    // accumulators of a warp: 16 keys, 8 queries of S^T and dP^T,
constexpr int N_K = FV_DP / 8, N_V = FV_DVP / 8;           // 8 columns of dK, of dV,
// and of its part of dQ: 64 queries for each consumer where there are so many, else columns of all queries.
constexpr bool SPLIT_DQ_ROWS = FV_BM == 64 * CONSUMERS;
constexpr int DQ_COLUMNS = SPLIT_DQ_ROWS ? FV_DP : panels(FV_DP) * PANEL_COLUMNS / CONSUMERS;
constexpr int N_Q = DQ_COLUMNS / 8;

// Shared memory, in this order, in panels of 128-byte rows (see hopper.cuh):
//     FV_BN * (row(FV_D) + row(FV_DV))                            K, V
//   + FV_STAGES * FV_BM * (row(FV_D) + row(FV_DV))                Q, dO
//   + 2 * FV_BM * FV_BN * 2                                       dS of two steps
//   + FV_BM * FV_DP * 4                                           dQ on its way to dq_accum, unless FV_SEPARATE_DQ
//   + ROW_STAGES * FV_BM * 8                                      lse, delta
//   + 1024                                                        steps and mbarriers; whether an lse is huge
constexpr int ROW_K = panels(FV_D) * PANEL_ROW, ROW_V = panels(FV_DV) * PANEL_ROW;
constexpr int K_BYTES = FV_BN * ROW_K, V_BYTES = FV_BN * ROW_V;
constexpr int Q_BYTES = FV_BM * ROW_K, D_OUT_BYTES = FV_BM * ROW_V, DS_BYTES = FV_BM * FV_BN * 2;
constexpr int STEPS = 8;                                   // that are announced ahead
constexpr int END_BYTES = 1024;
constexpr int AT_V = K_BYTES, AT_Q = AT_V + V_BYTES, AT_D_OUT = AT_Q + FV_STAGES * Q_BYTES;
constexpr int AT_DS = AT_D_OUT + FV_STAGES * D_OUT_BYTES, AT_DQ = AT_DS + 2 * DS_BYTES;
constexpr int AT_LSE = AT_DQ + (FV_SEPARATE_DQ ? 0 : FV_BM * FV_DP * 4);
constexpr int ROW_STAGES = FV_BM == 64 ? FV_STAGES : 2;    // of many queries there is no room for more
constexpr int AT_DELTA = AT_LSE + ROW_STAGES * FV_BM * 4, AT_STEPS = AT_DELTA + ROW_STAGES * FV_BM * 4;
constexpr int AT_BARRIERS = AT_STEPS + 64 * STEPS;
constexpr int SHARED_BYTES = AT_STEPS + END_BYTES, AT_HUGE = SHARED_BYTES - 4 * ROW_STAGES;
extern "C" __device__ const int fv_shared_bytes = SHARED_BYTES;

static_assert(FV_DTYPE != 2, "wgmma sums 16-bit operands in f32; f32 operands are the portable family's");
static_assert(FV_BN == 64 * CONSUMERS && FV_WARPS % 4 == 0, "a consumer owns 64 keys");
static_assert(FV_D % 8 == 0 && FV_DV % 8 == 0, "rows of whole 16 bytes");
static_assert(FV_BM == 64 || SPLIT_DQ_ROWS, "consumers divide dQ evenly");

// Whether dK and dV take most registers. Where they do not, there are some to start dP before P, beside which it runs.
constexpr bool WIDE_SUMS = FV_DP + FV_DVP > 128, DP_EARLY = !WIDE_SUMS;

// Such a dP starts from -delta in its accumulators, which then is in no register beside P and dP: not where dropout
// scales dP before delta is subtracted, and not where a tile of 128 queries with a score adds dQ in order, which has no
// registers for it.
constexpr bool FROM_DELTA = DP_EARLY && !FV_DROPOUT && !(FV_SCORE && FV_ORDERED_DQ && FV_BM == 128);

// Where scores are plain, lse is subtracted from S at once, and is in no register either.
constexpr bool SUBTRACTS_FIRST = FROM_DELTA && !FV_SCORE;
// Where a dP starts from -delta and scores are plain, or have a derivative, dV is started in two halves, each as soon
// as its weights are rounded, beside the dS that follow.
constexpr bool SPLITS_DV = FROM_DELTA && (!FV_SCORE || (FV_DSCORE && !FV_CAPTURES));

// And where there are registers for it, lse is read before S has come: where it is subtracted first, that of the
// columns whose powers stand beside dQ.
constexpr bool LSE_EARLY = FV_BM == 64 || SUBTRACTS_FIRST;

// Where registers are short, the first and the last of the products that make dV of a step run with dP and with S of
// the next: ptxas leaves sums where they are while they are under way, and would else move dV out of the way of S and
// dP, and back, in every step.
constexpr bool JOINS_DV = WIDE_SUMS || SPLITS_DV;
constexpr int FIRST_DV = JOINS_DV ? 1 : 0, LAST_DV = FV_BM / 16 - (JOINS_DV ? 1 : 0);

// Where lse is subtracted first, so many columns of accumulators of P are made before dP starts, beside dQ and dK.
constexpr int FIRST_POWERS = SUBTRACTS_FIRST ? N / 2 : -1;
constexpr int MIDDLE_DV = (FIRST_DV + LAST_DV) / 2;

constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(CONSUMERS == 2, "two consumers share the registers");

// How consumers own the scores of a tile: S^T = K Q^T, so that P^T and dS^T are operands of dV and dK as they
// lie in registers.
constexpr Warps WARPS_S = {4 * CONSUMERS, 1, 1, N};
constexpr bool KEYS_DOWN = true;
constexpr bool HOLDS_SUMS = true;                          // over the tiles of an item
constexpr int SCORE_COPIES = 2;                            // as the forward counts them: evaluated, and not
// With a derivative in tiles of 64 queries; elsewhere there is no register for the answer.
constexpr bool FINDS_HUGE_LSE = SPLITS_DV && FV_SCORE && FV_BM == 64;
static_assert(!FINDS_HUGE_LSE || ROW_STAGES == FV_STAGES, "a flag for each stage");
constexpr bool HIDES_FIRST = FV_SCORE && FV_MASK;
__device__ int warp_row() { return (threadIdx.x / 32 - 4) * 16; }
__device__ int warp_column() { return 0; }

__device__ float lse_of(float lse) { return lse; }         // as Statistics leaves it
