// Gradients of k and v on Hopper for head dims above 128: fv_backward<<<CTAs of the device, FV_WARPS * 32>>>
//
// Persistent: a CTA computes dK and dV of one tile of 64 keys of one KV head after the other; fv_backward_dq computes
// dQ. dK and dV of 64 keys fill the registers of a warpgroup each, so each consumer has one of them, and what both
// need passes from the first to the second:
//
//     values   S^T = K Q^T      P^T = exp(score(scale S^T) - lse)               dV += P^T dO
//     keys     dP^T = V dO^T    dS^T = P^T (dP^T - delta) dscore/ds             dK += dS^T Q
//
// P^T and dS^T are operands as they lie in registers. P^T dscore/ds passes through smem in f32, in the order of
// accumulators: a thread of one reads what its like of the other wrote. While one consumer computes, the products of
// the other run; the tensor cores see S, dP, dV, dK in turn. Neither has arithmetic beside a product of its own, so
// masks and scores may be anything. The producers are those of fv_backward.

struct Barriers : StepBarriers {
    static constexpr int OWN = STEP_BARRIERS, RINGS = OWN + 7, COUNT = RINGS + 4 * FV_STAGES;

    __device__ CopyBarrier k_full() const { return at(OWN); }
    __device__ CopyBarrier v_full() const { return at(OWN + 1); }
    __device__ CopyBarrier k_empty() const { return at(OWN + 2); }
    __device__ CopyBarrier v_empty() const { return at(OWN + 3); }
    // Of P dscore/ds and the bits of dropout.
    __device__ CopyBarrier p_full() const { return at(OWN + 4); }
    __device__ CopyBarrier p_empty() const { return at(OWN + 5); }
    // Of rows that both have cleared. They come from different places of the code, which synccheck takes for a
    // divergence at a named barrier.
    __device__ CopyBarrier cleared() const { return at(OWN + 6); }
    // Of Q and lse; of dO and delta.
    __device__ CopyBarrier q_full(int stage) const { return at(RINGS + stage); }
    __device__ CopyBarrier d_out_full(int stage) const { return at(RINGS + FV_STAGES + stage); }
    __device__ CopyBarrier q_empty(int stage) const { return at(RINGS + 2 * FV_STAGES + stage); }
    __device__ CopyBarrier d_out_empty(int stage) const { return at(RINGS + 3 * FV_STAGES + stage); }

    __device__ void init() const {
        init_steps();
        k_full().init(1);
        v_full().init(1);
        k_empty().init(1);
        v_empty().init(1);
        p_full().init(4);
        p_empty().init(4);
        cleared().init(4 * CONSUMERS);
        for (int s = 0; s < FV_STAGES; ++s) {
            q_full(s).init(2);
            d_out_full(s).init(2);
            q_empty(s).init(CONSUMERS);
            d_out_empty(s).init(CONSUMERS);
        }
        fence_barrier_init();
    }
};
static_assert(64 * STEPS + 8 * Barriers::COUNT <= END_BYTES, "no room for barriers");

// The producer of lse and delta: one warp.
__device__ void copy_rows(const Copies& copies, const Barriers& barriers) {
    const BackwardParams& p = copies.p;
    const int lane = threadIdx.x % 32;
    Ring<FV_STAGES> stage;
    Ring<STEPS> ring;
    #pragma unroll 1
    for (;; ring.advance()) {
        barriers.step_full(ring.stage).wait(ring.round);
        const Step& step = step_in(copies.shared, ring);
        const int kind = step.kind;
        if (kind == Step::STOP) return;
        float lse[FV_BM / 32], delta[FV_BM / 32];
        if (!(kind & Step::EMPTY)) read_rows(p, step, lse, delta);
        barriers.step_empty(ring.stage).arrive_warp();
        if (kind & Step::EMPTY) continue;
        // Q is released last, after all of lse and delta was read.
        barriers.q_empty(stage.stage).wait(stage.round - 1);
        float* const to = reinterpret_cast<float*>(copies.shared) + stage.stage * FV_BM + lane;
        #pragma unroll
        for (int i = 0; i < FV_BM / 32; ++i) {
            to[AT_LSE / 4 + i * 32] = subtracted(lse[i]);
            to[AT_DELTA / 4 + i * 32] = delta[i];
        }
        barriers.q_full(stage.stage).arrive_warp();
        barriers.d_out_full(stage.stage).arrive_warp();
        stage.advance();
    }
}

// sums += A B with A^T = P or dS.
template <int COLUMNS>
__device__ void start_sums(float (&sums)[COLUMNS][4], const u32 (&scores)[FV_BM / 16][4], Operand rows) {
    #pragma unroll
    for (int k = 0; k < FV_BM / 16; ++k) multiply_async(sums, scores[k], rows + k * 16 * PANEL_ROW);
}

// What the consumers have in common: they walk the same steps, with the same stages.
struct Consumer {
    const BackwardParams& p;
    const Mods& mods;
    const u32 base;
    char* const shared;
    const Barriers barriers;
    const u32 thread;                          // of the warpgroup, in a register of its own
    const u32 rows_at, p_at;                   // smem addresses of the lane's lse and of the thread's P
    Ring<STEPS> place;
    Ring<FV_STAGES> stage;
    int item = -1, number = 0;                 // of the CTA's items and steps
    int cleared = 0;                           // steps whose rows end

    __device__ const Step& step() const { return step_in(shared, place); }
    __device__ bool leads() const { return thread == 0; }
    // The kind of the step at `place`. The same for all threads, and so the compiler knows, as of the stage: only
    // then do operands of products stay in uniform registers.
    __device__ int next_kind() {
        barriers.step_full(place.stage).wait(place.round);
        const int together = __reduce_or_sync(~0u, step().kind | stage.stage << 8);
        stage.stage = together >> 8;
        return together & 0xff;
    }
    __device__ void release_step() {
        __syncwarp();
        if (thread % 32 == 0) barriers.step_empty(place.stage).arrive();
        place.advance();
    }
    __device__ u32 q_at() const { return base + AT_Q + stage.stage * Q_BYTES; }
    __device__ u32 d_out_at() const { return base + AT_D_OUT + stage.stage * D_OUT_BYTES; }
    // Queries that no sequence has may be NaN, and are multiplied by weights of 0.
    __device__ void clear_past_end(int kind) {
        const int queries = step().queries;
        if (!(kind & Step::EVALUATES) || queries >= FV_BM) return;
        barriers.q_full(stage.stage).wait(stage.round);
        barriers.d_out_full(stage.stage).wait(stage.round);
        clear_own_rows(shared + AT_Q + stage.stage * Q_BYTES, FV_BM, panels(FV_D), queries);
        clear_own_rows(shared + AT_D_OUT + stage.stage * D_OUT_BYTES, FV_BM, panels(FV_DV), queries);
        barriers.cleared().arrive_warp();
        barriers.cleared().wait(cleared++);
    }
};

// dV of all items.
__device__ void consume_values(Consumer c) {
    const BackwardParams& p = c.p;
    const Barriers& barriers = c.barriers;
    Scores scores;
    u32 weights[FV_BM / 16][4];                // P^T as an operand
    float dv[N_V][4];
    #pragma unroll 1
    for (;;) {
        int kind = c.next_kind();
        if (kind == Step::STOP) return;
        clear(dv);
        const bool empty = kind & Step::EMPTY;
        if (!empty) barriers.k_full().wait(++c.item);
        #pragma unroll 1
        while (!empty) {
            const Step& step = c.step();
            c.clear_past_end(kind);
            barriers.q_full(c.stage.stage).wait(c.stage.round);
            product_fence();
            start_scores<FV_DP>(scores.g, Operand::rows(c.base), Operand::rows(c.q_at()));
            product_commit();
            float lse[QUERIES_HELD];
            const u32 lse_at = c.rows_at + c.stage.stage * FV_BM * 4;
            load_rows(lse, lse_at);
            product_wait<0>();
            pin(scores.g[0]);
            const bool last = kind & Step::LAST, evaluates = kind & Step::EVALUATES;
            if (c.leads()) {
                barriers.q_empty(c.stage.stage).arrive();
                if (last) barriers.k_empty().arrive();
            }
            const Place of = {step.b, step.head, step.head_kv, step.q_len, step.k_len};
            const float* row_weight_sums = row_weight_sums_of(p, step.q_batch, step.head, step.q_row);
            auto compute_p = [&](ScoreTile tile) {
                scores.compute_p(c.mods, tile, p.scale, lse, lse_at, row_weight_sums, p.delta.row);
            };
            if (evaluates) compute_p({of, step.query, step.queries, step.key, step.keys, true});
            else compute_p({of, step.query, FV_BM, step.key, FV_BN, false});
            barriers.p_empty().wait(c.number - 1);
            #pragma unroll
            for (int n = 0; n < N; ++n) {
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(c.p_at + n * 2048),
                             "f"(scores.g[0][n][0]), "f"(scores.g[0][n][1]), "f"(scores.g[0][n][2]),
                             "f"(scores.g[0][n][3])
                             : "memory");
                narrow_column(weights, n, [&](int i) { return scores.dropped(scores.p(0, n, i), 0, n, i); });
            }
#if FV_DROPOUT
            reinterpret_cast<u32*>(c.shared + AT_BITS)[c.thread] = scores.dropout_keep[0];
#endif
            barriers.p_full().arrive_warp();
            barriers.d_out_full(c.stage.stage).wait(c.stage.round);
            pin(dv);
            product_fence();
            start_sums(dv, weights, Operand::columns(c.d_out_at(), FV_BM * PANEL_ROW));
            product_commit();
            const int stage = c.stage.stage;
            c.stage.advance();
            ++c.number;
            if (!last) {
                c.release_step();
                kind = c.next_kind();
            }
            product_wait<0>();
            pin(dv);
            if (c.leads()) barriers.d_out_empty(stage).arrive();
            if (last) break;
        }
        const Step done = c.step();
        store_of_keys(p, p.dv, p.head_dv, done, FV_DV, dv, 1.f);
        c.release_step();
    }
}

// dK of all items.
__device__ void consume_keys(Consumer c) {
    const BackwardParams& p = c.p;
    const Barriers& barriers = c.barriers;
    Scores scores;
    ScoreFragment dp;
    u32 ds[FV_BM / 16][4];                     // dS^T as an operand
    float dk[N_K][4];
    #pragma unroll 1
    for (;;) {
        int kind = c.next_kind();
        if (kind == Step::STOP) return;
        clear(dk);
        const bool empty = kind & Step::EMPTY;
        if (!empty) barriers.v_full().wait(++c.item);
        #pragma unroll 1
        while (!empty) {
            c.clear_past_end(kind);
            barriers.d_out_full(c.stage.stage).wait(c.stage.round);
            product_fence();
            start_scores<FV_DVP>(dp, Operand::rows(c.base + AT_V), Operand::rows(c.d_out_at()));
            product_commit();
            float delta[QUERIES_HELD];
            load_rows(delta, c.rows_at + AT_DELTA - AT_LSE + c.stage.stage * FV_BM * 4);
            product_wait<0>();
            pin(dp[0]);
            const bool last = kind & Step::LAST;
            if (c.leads()) {
                barriers.d_out_empty(c.stage.stage).arrive();
                if (last) barriers.v_empty().arrive();
            }
            barriers.p_full().wait(c.number);
#if FV_DROPOUT
            scores.dropout_scale = fv_dropout_scale(c.mods);
            scores.dropout_keep[0] = reinterpret_cast<const u32*>(c.shared + AT_BITS)[c.thread];
#endif
            #pragma unroll
            for (int n = 0; n < N; ++n) {
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(scores.g[0][n][0]), "=f"(scores.g[0][n][1]), "=f"(scores.g[0][n][2]),
                               "=f"(scores.g[0][n][3])
                             : "r"(c.p_at + n * 2048)
                             : "memory");
                scores.differentiate_column(dp, delta, n);
                narrow_column(ds, n, [&](int i) { return scores.g[0][n][i]; });
            }
            barriers.p_empty().arrive_warp();
            barriers.q_full(c.stage.stage).wait(c.stage.round);
            pin(dk);
            product_fence();
            start_sums(dk, ds, Operand::columns(c.q_at(), FV_BM * PANEL_ROW));
            product_commit();
            const int stage = c.stage.stage;
            c.stage.advance();
            ++c.number;
            if (!last) {
                c.release_step();
                kind = c.next_kind();
            }
            product_wait<0>();
            pin(dk);
            if (c.leads()) barriers.q_empty(stage).arrive();
            if (last) break;
        }
        const Step done = c.step();
        store_of_keys(p, p.dk, p.head_dk, done, FV_D, dk, p.scale);
        c.release_step();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fv_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ Mods mods,
            const __grid_constant__ PersistentParams persistent, const __grid_constant__ TensorMap map_q,
            const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
            const __grid_constant__ TensorMap map_d_out) {
    extern __shared__ __align__(1024) char shared[];
    const u32 base = shared_address(shared);
    const int warpgroup = warpgroup_of_thread(), warp = warp_of_warpgroup();
    const Barriers barriers = {base};
    prepare(barriers, base, map_q, map_k, map_v, map_d_out);
    if (warpgroup == 0)
        return produce({p, persistent, base, shared, barriers}, barriers, warp, map_q, map_k, map_v, map_d_out);
    take_registers<CONSUMER_REGISTERS>();
    const u32 thread = pinned(threadIdx.x % 128), rows_at = pinned(base + AT_LSE + Spot::of_lane().query * 4);
    const Consumer consumer = {p, mods, base, shared, barriers, thread, rows_at, pinned(base + AT_P + thread * 16)};
    if (warpgroup == 1) consume_values(consumer);
    else consume_keys(consumer);
}
