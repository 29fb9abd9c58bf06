// Parts of fv_backward on Hopper: what its roles hand to each other, and the products of a consumer.

// A tile of queries against the tile of keys that the CTA is at, 64 bytes in smem. The scheduler finds it; the
// producers copy what it needs; the consumers compute it.
struct Step {
    int kind;                   // the sum of the constants below
    int query, queries;         // the first query of its sequence, and how many there are from it on
    int q_batch, q_row;         // where that is
    int head, b, q_len, k_len;
    // Of the item: a tile of keys of a KV head.
    int key, keys;
    int k_batch, k_row, head_kv;
    i64 dq;                     // where dq_accum of the tile begins

    static constexpr int EVALUATES = 1;  // the mask is evaluated, or queries or keys are cut off at the end of the sequence
    static constexpr int FIRST = 2;      // of its item
    static constexpr int LAST = 4;       // of its item
    static constexpr int EMPTY = 8;      // nobody sees the keys: no step at all
    static constexpr int STOP = 16;      // there is no item any more
};
static_assert(sizeof(Step) == 64, "a place of the ring");

// The mbarriers, 8 bytes each. A stage in round r is full for whoever has waited for round r, and empty for
// whoever has waited for round r - 1.
struct Barriers {
    u32 base;

    __device__ CopyBarrier k_full() const { return at(0); }
    __device__ CopyBarrier v_full() const { return at(1); }
    __device__ CopyBarrier k_empty() const { return at(2); }
    __device__ CopyBarrier v_empty() const { return at(3); }
    __device__ CopyBarrier ds_full(int stage) const { return at(4 + stage); }
    __device__ CopyBarrier step_full(int place) const { return at(6 + place); }
    __device__ CopyBarrier step_empty(int place) const { return at(6 + STEPS + place); }
    // Of Q, dO, lse and delta.
    __device__ CopyBarrier full(int stage) const { return at(6 + 2 * STEPS + stage); }
    __device__ CopyBarrier q_empty(int stage) const { return at(6 + 2 * STEPS + FV_STAGES + stage); }
    // Of dO, and of lse and delta, of which there are ROW_STAGES.
    __device__ CopyBarrier d_out_empty(int stage) const { return at(6 + 2 * STEPS + 2 * FV_STAGES + stage); }
    static constexpr int COUNT = 6 + 2 * STEPS + 3 * FV_STAGES;

    __device__ void init() const {
        k_full().init(1);
        v_full().init(1);
        k_empty().init(CONSUMERS);
        v_empty().init(CONSUMERS);
        for (int s = 0; s < 2; ++s) ds_full(s).init(4 * CONSUMERS);
        for (int i = 0; i < STEPS; ++i) {
            step_full(i).init(1);
            step_empty(i).init(3 + 4 * CONSUMERS);
        }
        for (int s = 0; s < FV_STAGES; ++s) {
            full(s).init(3);
            q_empty(s).init(CONSUMERS);
            d_out_empty(s).init(CONSUMERS);
        }
        fence_barrier_init();
    }

private:
    __device__ CopyBarrier at(int number) const {
        CopyBarrier barrier;
        barrier.at = base + AT_BARRIERS + 8 * number;
        return barrier;
    }
};
static_assert(64 * STEPS + 8 * Barriers::COUNT <= END_BYTES, "no room for barriers");

// Iterates over the live tiles of queries of an item: of every sequence that reads its keys, and of every query
// head of the group.
struct LiveQueries {
    const BackwardParams& p;
    const Tile keys;
    const int head_kv;
    int sequence = 0, member = -1;      // of those that read the keys, and head of the group
    const Run* at = nullptr;            // the remaining runs
    int runs = 0;
    int tile = 0, end = 0;              // remaining tiles of the current run
    bool evaluates = false;

    __device__ bool next() {
        while (tile == end) {
            if (runs == 0) {
                if (++member == FV_GROUP) {
                    member = 0;
                    if (++sequence == p.sharing) return false;
                }
                const Sequence& s = p.sequences[keys.sequence + sequence];
                if constexpr (FV_MASK) {
                    const int row = s.first_row + keys.tile + (head_kv * FV_GROUP + member) * p.lists.head_stride;
                    runs = p.lists.counts[row];
                    at = p.lists.runs + i64(row) * p.lists.capacity;
                } else {
                    tile = 0;
                    end = ceil_div(s.q_len, FV_BM);
                }
            } else {
                --runs;
                const int count_kind = at->count_kind;
                tile = at->first;
                end = tile + (count_kind >> 1);
                evaluates = count_kind & 1;
                ++at;
            }
        }
        return true;
    }
};

// S^T = K Q^T and dP^T = V dO^T: 64 rows of one tile, all of the other, over COLUMNS.
template <int COLUMNS>
__device__ void start_scores(ScoreFragment& s, Operand keys, Operand queries) {
    #pragma unroll
    for (int k = 0; k < COLUMNS / 16; ++k)
        if (k == 0) wgmma_first(s[0], keys.bits, queries.bits);
        else multiply_async(s[0], keys + (k / 4 * FV_BN * PANEL_ROW + k % 4 * 32), queries + (k / 4 * FV_BM * PANEL_ROW + k % 4 * 32), true);
}

// dV += P^T dO, of steps FROM .. TO of 16 queries.
template <int FROM, int TO, int COLUMNS>
__device__ void start_sums(float (&sums)[COLUMNS][4], const u32 (&scores)[FV_BM / 16][4], Operand rows) {
    #pragma unroll
    for (int k = FROM; k < TO; ++k) multiply_async(sums, scores[k], rows + k * 16 * PANEL_ROW);
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

// The scores of a lane in column n of accumulators as part of an operand of products over queries.
template <typename F>
__device__ void narrow_column(u32 (&operand)[FV_BM / 16][4], int n, F value) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) operand[n / 2][n % 2 * 2 + half] = narrow2<FV_DTYPE>(value(half * 2), value(half * 2 + 1));
}

// Writes dS^T of a consumer as dS: rows of queries, a panel of 64 keys for each consumer. `at` is ds_place() in
// the panel.
__device__ u32 ds_place() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    return (lane / 16 * 8 + lane % 8) * PANEL_ROW + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
}
__device__ void store_ds(u32 at, const u32 (&ds)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(at), "r"(ds[0]), "r"(ds[1]), "r"(ds[2]), "r"(ds[3]) : "memory");
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
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(lane + n * 512), "f"(dq[n][0]), "f"(dq[n][1]), "f"(dq[n][2]), "f"(dq[n][3]) : "memory");
}

// Writes a consumer's 64 rows of dK or dV.
template <int COLUMNS>
__device__ void store_gradient(const View& view, const Step& item, int dim, const float (&sums)[COLUMNS][4], float factor, bool accumulate) {
    const int lane = threadIdx.x % 32;
    GradElem* data = static_cast<GradElem*>(view.data) + view.at(item.k_batch, item.head_kv, item.k_row);
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp_row() + lane / 4 + half * 8;
        #pragma unroll
        for (int n = 0; n < COLUMNS; n += 4) {
            // Accumulators n .. n + 4 of a row lie across a quad; afterwards each lane has one of them whole.
            u32 low[4], high[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                low[i] = n + i < COLUMNS ? __float_as_uint(sums[n + i < COLUMNS ? n + i : 0][half * 2] * factor) : 0;
                high[i] = n + i < COLUMNS ? __float_as_uint(sums[n + i < COLUMNS ? n + i : 0][half * 2 + 1] * factor) : 0;
            }
            exchange_in_quad(low);
            exchange_in_quad(high);
            const int column = (n + lane % 4) * 8;
            float x[8];
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i * 2] = __uint_as_float(low[i]);
                x[i * 2 + 1] = __uint_as_float(high[i]);
            }
            if (row < item.keys && column < dim) store_aligned(data + row * view.row + column, x, accumulate);
        }
    }
}
