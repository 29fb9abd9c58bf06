// What the persistent kernels of the Hopper backward have in common: one warp, the scheduler, takes the CTA's items
// and announces their steps in a ring in smem; the producers copy what a step needs, and the consumers compute it.
//
// A layout says before: STEPS, AT_STEPS, AT_BARRIERS, CONSUMERS, PRODUCER_REGISTERS, KEYS_DOWN.

// A tile of queries against a tile of keys, 64 bytes in smem.
struct Step {
    int kind;                   // the sum of the constants below, and with BITS the slot of its mask bits times SLOT
    int query, queries;         // the first query of its sequence, and how many there are from it on
    int q_batch, q_row;         // where that is
    int head, b, q_len, k_len;
    int key, keys;              // the same of the keys
    int k_batch, k_row, head_kv;
#if FV_ORDERED_DQ
    int dq;                     // where dq_accum of the tile begins, in units of 16 rows
    int dq_rank;                // tiles of keys that add to it before
#else
    i64 dq;                     // where dq_accum of the tile begins
#endif

    // The mask is evaluated, or queries or keys are cut off at the end of the sequence.
    static constexpr int EVALUATES = 1;
    static constexpr int FIRST = 2;      // of its item
    static constexpr int LAST = 4;       // of its item
    static constexpr int EMPTY = 8;      // the item has no step at all
    static constexpr int STOP = 16;      // there is no item any more
    static constexpr int BITS = 32;      // the mask has bits
    static constexpr int KINDS = 63, SLOT = 1 << 9;
};
static_assert(sizeof(Step) == 64, "a place of the ring");

// Named barriers, of which 0 is __syncthreads: of all consumers, behind rows that they have cleared.
struct Named {
    static constexpr int CLEARED = 1, COUNT = 2;
};

// The mbarriers of the ring of steps, 8 bytes each. A stage in round r is full for whoever has waited for round r,
// and empty for whoever has waited for round r - 1.
struct StepBarriers {
    u32 base;

    __device__ CopyBarrier step_full(int place) const { return at(place); }
    __device__ CopyBarrier step_empty(int place) const { return at(STEPS + place); }
    static constexpr int STEP_BARRIERS = 2 * STEPS;

    __device__ void init_steps() const {
        for (int i = 0; i < STEPS; ++i) {
            step_full(i).init(1);
            step_empty(i).init(3 + 4 * CONSUMERS);
        }
    }

    __device__ CopyBarrier at(int number) const {
        CopyBarrier barrier;
        barrier.at = base + AT_BARRIERS + 8 * number;
        return barrier;
    }
};

// The CTA's next item, from a counter. Whoever takes the last number that anybody takes sets it back.
__device__ u32 next_item(const PersistentParams& persistent, u32 items) {
    const u32 given = FV_ORDERED_DQ ? 0 : gridDim.x;       // items that nobody takes from the counter
    u32 taken = 0;
    if (threadIdx.x % 32 == 0) {
        taken = atomicAdd(persistent.taken, 1);
        if (taken == items - given + gridDim.x - 1) *persistent.taken = 0;
    }
    return given + __shfl_sync(~0u, taken, 0);
}
// And its first one: a CTA that waits for earlier items must not have one before those are taken.
__device__ u32 first_item(const PersistentParams& persistent, u32 items) {
    return FV_ORDERED_DQ ? next_item(persistent, items) : blockIdx.x;
}

__device__ const Step& step_in(const char* shared, Ring<STEPS> place) {
    return *reinterpret_cast<const Step*>(shared + AT_STEPS + 64 * place.stage);
}

// The scheduler's end of the ring. All lanes of its warp call it.
struct Announcer {
    char* const shared;
    const StepBarriers barriers;
    Ring<STEPS> ring;

    __device__ void announce(const Step& step) {
        barriers.step_empty(ring.stage).wait(ring.round - 1);
        *reinterpret_cast<Step*>(shared + AT_STEPS + 64 * ring.stage) = step;
        barriers.step_full(ring.stage).arrive_warp();
        ring.advance();
    }
};

// What the producers have in common.
struct Copies {
    const BackwardParams& p;
    const PersistentParams& persistent;
    const u32 base;
    char* const shared;
    const StepBarriers steps;

    // Calls `each(step)` for the steps of all items that have any.
    template <typename F>
    __device__ void for_each_step(F each) const {
        Ring<STEPS> ring;
        #pragma unroll 1
        for (;; ring.advance()) {
            steps.step_full(ring.stage).wait(ring.round);
            const Step& step = step_in(shared, ring);
            if (step.kind == Step::STOP) return;
            if (!(step.kind & Step::EMPTY)) each(step);
            steps.step_empty(ring.stage).arrive();
        }
    }

    // A tile of `rows` rows in panels, from a map of heads in groups.
    template <int ROWS, int COLUMNS>
    __device__ void queries(u32 target, const TensorMap& map, CopyBarrier full, const Step& step, int head, int group,
                            int batch) const {
        #pragma unroll
        for (int i = 0; i < panels(COLUMNS); ++i)
            copy_panel(target + i * ROWS * PANEL_ROW, map, full, i * PANEL_COLUMNS, step.q_row,
                       step.head % FV_GROUP * head, step.head_kv * group, step.q_batch * batch);
    }
    template <int COLUMNS>
    __device__ void keys(u32 target, const TensorMap& map, CopyBarrier full, const Step& step, int head,
                         int batch) const {
        #pragma unroll
        for (int i = 0; i < panels(COLUMNS); ++i)
            copy_panel(target + i * FV_BN * PANEL_ROW, map, full, i * PANEL_COLUMNS, step.k_row, step.head_kv * head,
                       step.k_batch * batch);
    }
};

// The roles of warpgroup 0, a warp each. What a kernel's own file says of them is found by the type of its barriers.
template <typename Barriers>
__device__ void produce(const Copies& copies, const Barriers& barriers, int warp, const TensorMap& map_q,
                        const TensorMap& map_k, const TensorMap& map_v, const TensorMap& map_d_out) {
    give_registers<PRODUCER_REGISTERS>();
    if (warp == 0 && elect_one()) copy_k_and_q(copies, barriers, map_k, map_q);
    if (warp == 2) schedule(copies.p, copies.persistent, copies.shared, barriers);
#if FV_ORDERED_DQ
    if (warp == 1) copy_values_and_rows(copies, barriers, map_v, map_d_out);
    if (warp == 3 && elect_one()) add_dq(copies, barriers);
#else
    if (warp == 1 && elect_one()) copy_v_and_d_out(copies, barriers, map_v, map_d_out);
    if (warp == 3) copy_rows(copies, barriers);
#endif
}

// lse and delta of every 32nd query of a step from the lane's on; past the end of the sequence as of a row that sees
// no key.
template <int COUNT>
__device__ void read_rows(const BackwardParams& p, const Step& step, float (&lse)[COUNT], float (&delta)[COUNT]) {
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int row = i * 32 + threadIdx.x % 32;
        lse[i] = -infinity();
        delta[i] = 0.f;
        if (row < step.queries) {
            lse[i] = __ldg(p.lse.data + step.q_batch * p.lse.batch + step.head * p.lse.head +
                           (step.q_row + row) * p.lse.row);
            delta[i] = __ldg(p.delta.data + step.q_batch * p.delta.batch + step.head * p.delta.head +
                             (step.q_row + row) * p.delta.row);
        }
    }
}
// What is subtracted from the scores of a row: infinity where no key is visible, so that P = 0.
__device__ float subtracted(float lse) {
    const float x = lse == -infinity() ? infinity() : lse;
    return HAS_ROW_WEIGHT_SUM ? x : x * LOG2_E;
}

// Rows of a tile from `live` on are none of the sequence's: what stands there, which may be NaN, is multiplied by
// weights of 0. All consumers clear them together, and meet before anybody multiplies.
__device__ void clear_own_rows(char* tile, int rows, int tile_panels, int live) {
    const int thread = threadIdx.x - 128;
    for (int chunk = live * 8 + thread; chunk < rows * 8; chunk += 128 * CONSUMERS)
        for (int panel = 0; panel < tile_panels; ++panel)
            *reinterpret_cast<uint4*>(tile + panel * rows * PANEL_ROW + chunk * 16) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();
}
__device__ void clear_rows(char* tile, int rows, int tile_panels, int live) {
    clear_own_rows(tile, rows, tile_panels, live);
    named_sync(Named::CLEARED, 128 * CONSUMERS);
}

// `x` in a register of its own: the compiler does not make it again.
__device__ u32 pinned(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// S or dP: 64 rows of one tile, all of the other, over COLUMNS. Rows are keys where KEYS_DOWN, else queries. With ADDS
// it is added to what `s` holds.
template <int COLUMNS, bool ADDS = false>
__device__ void start_scores(ScoreFragment& s, Operand down, Operand across) {
    constexpr int DOWN = KEYS_DOWN ? FV_BN : FV_BM, ACROSS = KEYS_DOWN ? FV_BM : FV_BN;
    #pragma unroll
    for (int k = 0; k < COLUMNS / 16; ++k)
        if (k == 0 && !ADDS) wgmma_first(s[0], down.bits, across.bits);
        else
            multiply_async(s[0], down + (k / 4 * DOWN * PANEL_ROW + k % 4 * 32),
                           across + (k / 4 * ACROSS * PANEL_ROW + k % 4 * 32), true);
}

// The scores of a lane in column n of accumulators as part of an operand of products over what lies across.
template <int ROWS, typename F>
__device__ void narrow_column(u32 (&operand)[ROWS][4], int n, F value) {
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        operand[n / 2][n % 2 * 2 + half] = narrow2<FV_DTYPE>(value(half * 2), value(half * 2 + 1));
}

// The same for all threads, and now the compiler knows: only then do operands of products stay in uniform registers.
__device__ int uniform(int x) { return int(__reduce_or_sync(~0u, x)); }

template <int COUNT>
__device__ void clear(float (&sums)[COUNT][4]) {
    #pragma unroll
    for (int i = 0; i < COUNT * 4; ++i) sums[i / 4][i % 4] = 0.f;
}

// Not negative; of all weights of a lane in so many columns of accumulators (see keep_before).
__device__ float sign_of_weights(const Scores& scores, int columns = WARPS_S.columns) {
    u32 bits = 0;
    for_each_score([&](int m, int n, int i) {
        if (n < columns) bits |= __float_as_uint(scores.p(m, n, i));
    });
    return __uint_as_float(bits);
}

// P of a step, of columns from .. to of accumulators, in place of its scores, or of what Scores::subtract made of them;
// lse stands at `lse_at` too, for rows whose weights need it again.
template <int POWERS = -1>
__device__ void compute_p(Scores& scores, const BackwardParams& p, const Mods& mods, const Step& step,
                          const float (&lse)[QUERIES_HELD], u32 lse_at, bool evaluates, int from = 0,
                          int to = WARPS_S.columns, bool has_bits = false, const ScoreBits& visible = {},
                          bool has_huge_lse = false) {
    const Place of = {step.b, step.head, step.head_kv, step.q_len, step.k_len};
    const int queries = evaluates ? step.queries : FV_BM, keys = evaluates ? step.keys : FV_BN;
    const ScoreTile tile = {of, step.query, queries, step.key, keys, evaluates, has_bits, visible, has_huge_lse};
    const float* row_weight_sums = row_weight_sums_of(p, step.q_batch, step.head, step.q_row);
    scores.compute_p<POWERS>(mods, tile, p.scale, lse, lse_at, row_weight_sums, p.delta.row, from, to);
}

// One f32 of each of the lane's queries, or of those from .. to: lse, or delta; `first` is the smem address of that of
// its first.
template <int HELD>
__device__ void load_rows(float (&rows)[HELD], u32 first, int from = 0, int to = HELD) {
    static_assert(HELD % 2 == 0);
    #pragma unroll
    for (int h = from; h < to; h += 2) {
        const u32 at = first + held_query(h) * 4;
        if constexpr (KEYS_DOWN) {
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(rows[h]), "=f"(rows[h + 1]) : "r"(at));
        } else {
            rows[h] = load_shared(at);
            rows[h + 1] = load_shared(first + held_query(h + 1) * 4);
        }
    }
}

// Writes a consumer's 64 rows of a gradient, of which `rows` exist from the tile's first on: it stands at `first` in
// its view.
template <int COLUMNS>
__device__ void store_gradient(const View& view, i64 first, int rows, int dim, const float (&sums)[COLUMNS][4],
                               float factor, bool accumulate) {
    if (!view.data) return;     // not asked for
    const int lane = threadIdx.x % 32;
    GradElem* data = static_cast<GradElem*>(view.data) + first;
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
                high[i] = n + i < COLUMNS ? __float_as_uint(sums[n + i < COLUMNS ? n + i : 0][half * 2 + 1] * factor)
                                          : 0;
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
            if (row < rows && column < dim) store_aligned(data + row * view.row + column, x, accumulate);
        }
    }
}
