// dQ in a fixed order, on Hopper: fv_backward_dq<<<CTAs of the device, FV_WARPS * 32>>>
//
// Persistent: a CTA computes dQ of one tile of FV_BM queries of one head after the other:
//
//     S = Q K^T    P = exp(score(scale S) - lse)    dP = dO V^T    dS = P (dP - delta) dscore/ds    dQ += dS K
//
// over its live tiles of FV_BN keys. Roles as in fv_backward: the scheduler, producers of K and Q, of V and dO, and of
// lse and delta; and consumers with 64 queries each. Queries are rows of the scores, so dS is an operand of dQ as it
// lies in registers, nothing but operands passes through smem, and no consumer waits for another. A step is
//
//     start dQ += dS K of the step before     start S
//     dQ has come: release K of the step before, start dP
//     S has come:                                    P = exp(score(scale S) - lse), 0 where the mask is false
//     dP has come: release V                         dS = P (dP - delta) dscore/ds, rounded
//
// What of it runs beside no product of its own runs beside those of the other consumer. As in fv_backward, the first
// step of an item, and one whose mask is evaluated or whose score is not plain arithmetic (FV_OVERLAP), waits for all
// products before P.

struct Barriers : StepBarriers {
    static constexpr int OWN = STEP_BARRIERS, COUNT = OWN + 2 + 2 * FV_STAGES + 2 * V_STAGES;

    // Of Q, dO, lse and delta.
    __device__ CopyBarrier rows_full() const { return at(OWN); }
    __device__ CopyBarrier rows_empty() const { return at(OWN + 1); }
    __device__ CopyBarrier k_full(int stage) const { return at(OWN + 2 + stage); }
    __device__ CopyBarrier k_empty(int stage) const { return at(OWN + 2 + FV_STAGES + stage); }
    __device__ CopyBarrier v_full(int stage) const { return at(OWN + 2 + 2 * FV_STAGES + stage); }
    __device__ CopyBarrier v_empty(int stage) const { return at(OWN + 2 + 2 * FV_STAGES + V_STAGES + stage); }

    __device__ void init() const {
        init_steps();
        rows_full().init(3);
        rows_empty().init(4 * CONSUMERS);
        for (int s = 0; s < FV_STAGES; ++s) {
            k_full(s).init(1);
            k_empty(s).init(CONSUMERS);
        }
        for (int s = 0; s < V_STAGES; ++s) {
            v_full(s).init(1);
            v_empty(s).init(CONSUMERS);
        }
        fence_barrier_init();
    }
};
static_assert(64 * STEPS + 8 * Barriers::COUNT <= END_BYTES, "no room for barriers");

// Iterates over the live tiles of keys of an item.
struct LiveKeys {
    const Run* at = nullptr;            // the remaining runs
    int runs = 0;
    int tile = 0, end = 0;              // remaining tiles of the current run
    bool evaluates = false;

    __device__ LiveKeys(const BackwardParams& p, const Sequence& s, int tile_q, int head) {
        if constexpr (FV_MASK) {
            const int row = s.first_row + tile_q + head * p.lists.head_stride;
            runs = p.lists.counts[row];
            at = p.lists.runs + i64(row) * p.lists.capacity;
        } else {
            end = ceil_div(s.k_len, FV_BN);
        }
    }

    __device__ bool next() {
        while (tile == end) {
            if (runs-- == 0) return false;
            const int count_kind = at->count_kind;
            tile = at->first;
            end = tile + (count_kind >> 1);
            evaluates = count_kind & 1;
            ++at;
        }
        return true;
    }
};

// The scheduler: one warp, whose lanes do the same.
__device__ void schedule(const BackwardParams& p, const PersistentParams& persistent, char* shared,
                         StepBarriers barriers) {
    const u32 items = p.tile_count * p.heads_q;
    Announcer ring = {shared, barriers};
    Step step = {};
    #pragma unroll 1
    for (u32 number = blockIdx.x; number < items; number = next_item(persistent, items)) {
        const Tile tile = p.tiles[number % p.tile_count];
        const Sequence& s = p.sequences[tile.sequence];
        step.head = number / p.tile_count;
        step.head_kv = step.head / FV_GROUP;
        step.query = tile.tile * FV_BM;
        step.queries = s.q_len - step.query;
        step.q_batch = s.q_batch;
        step.q_row = s.q_start + step.query;
        step.k_batch = s.k_batch;
        step.b = s.b;
        step.q_len = s.q_len;
        step.k_len = s.k_len;
        LiveKeys keys(p, s, tile.tile, step.head);
        bool more = keys.next();
        if (!more) {
            step.kind = Step::EMPTY | Step::FIRST | Step::LAST;
            ring.announce(step);
        }
        #pragma unroll 1
        for (bool first = true; more; first = false) {
            step.key = keys.tile * FV_BN;
            step.keys = s.k_len - step.key;
            step.k_row = s.k_start + step.key;
            const bool evaluates = keys.evaluates || step.queries < FV_BM || step.keys < FV_BN;
            ++keys.tile;
            more = keys.next();
            step.kind = (evaluates ? Step::EVALUATES : 0) + (first ? Step::FIRST : 0) + (more ? 0 : Step::LAST);
            ring.announce(step);
        }
    }
    step.kind = Step::STOP;
    ring.announce(step);
}

// The producer of K and Q: one thread.
__device__ void copy_k_and_q(const Copies& copies, const Barriers& barriers, const TensorMap& map_k,
                             const TensorMap& map_q) {
    const PersistentParams& at = copies.persistent;
    Ring<FV_STAGES> k;
    int item = -1;
    copies.for_each_step([&](const Step& step) {
        if (step.kind & Step::FIRST) {
            barriers.rows_empty().wait(item++);
            barriers.rows_full().arrive_expecting(Q_BYTES);
            copies.queries<FV_BM, FV_D>(copies.base, map_q, barriers.rows_full(), step, at.q_head, at.q_group,
                                        at.q_batch);
        }
        barriers.k_empty(k.stage).wait(k.round - 1);
        barriers.k_full(k.stage).arrive_expecting(K_BYTES);
        copies.keys<FV_D>(copies.base + AT_K + k.stage * K_BYTES, map_k, barriers.k_full(k.stage), step, at.k_head,
                          at.k_batch);
        k.advance();
    });
}

// The producer of V and dO: one thread.
__device__ void copy_v_and_d_out(const Copies& copies, const Barriers& barriers, const TensorMap& map_v,
                                 const TensorMap& map_d_out) {
    const PersistentParams& at = copies.persistent;
    Ring<V_STAGES> v;
    int item = -1;
    copies.for_each_step([&](const Step& step) {
        if (step.kind & Step::FIRST) {
            barriers.rows_empty().wait(item++);
            barriers.rows_full().arrive_expecting(D_OUT_BYTES);
            copies.queries<FV_BM, FV_DV>(copies.base + AT_D_OUT, map_d_out, barriers.rows_full(), step, at.d_out_head,
                                         at.d_out_group, at.d_out_batch);
        }
        barriers.v_empty(v.stage).wait(v.round - 1);
        barriers.v_full(v.stage).arrive_expecting(V_BYTES);
        copies.keys<FV_DV>(copies.base + AT_V + v.stage * V_BYTES, map_v, barriers.v_full(v.stage), step, at.v_head,
                           at.v_batch);
        v.advance();
    });
}

// The producer of lse and delta: one warp.
__device__ void copy_rows(const Copies& copies, const Barriers& barriers) {
    const BackwardParams& p = copies.p;
    const int lane = threadIdx.x % 32;
    int item = -1;
    Ring<STEPS> ring;
    #pragma unroll 1
    for (;; ring.advance()) {
        barriers.step_full(ring.stage).wait(ring.round);
        const Step& step = step_in(copies.shared, ring);
        const int kind = step.kind;
        if (kind == Step::STOP) return;
        const bool writes = (kind & (Step::FIRST | Step::EMPTY)) == Step::FIRST;
        if (writes) {
            barriers.rows_empty().wait(item++);
            float lse[FV_BM / 32], delta[FV_BM / 32];
            read_rows(p, step, lse, delta);
            float* const to = reinterpret_cast<float*>(copies.shared + AT_LSE) + lane;
            #pragma unroll
            for (int i = 0; i < FV_BM / 32; ++i) {
                to[i * 32] = subtracted(lse[i]);
                to[FV_BM + i * 32] = delta[i];
            }
        }
        barriers.step_empty(ring.stage).arrive_warp();
        if (writes) barriers.rows_full().arrive_warp();
    }
}

// From dP to dS, and this as an operand.
__device__ void differentiate(u32 (&ds)[FV_BN / 16][4], Scores& scores, const ScoreFragment& dp,
                              const float (&delta)[QUERIES_HELD]) {
    #pragma unroll
    for (int n = 0; n < N; ++n) {
        scores.differentiate_column(dp, delta, n);
        narrow_column(ds, n, [&](int i) { return scores.g[0][n][i]; });
    }
}

// A consumer, by what the kernel holds of it.
struct Consumer {
    const u32& base;
    const Barriers& barriers;
    const Operand& queries;
    const Operand& d_outs;
    const Ring<STEPS>& place;
    const Ring<V_STAGES>& v;
    const u32& thread;
    const Ring<FV_STAGES>& k;
    Scores& scores;
    ScoreFragment& dp;
    float (&dq)[N_Q][4];
    u32 (&ds)[FV_BN / 16][4];

    __device__ bool leads() const { return thread % 128 == 0; }
    __device__ void release_step() const {
        __syncwarp();
        if (thread % 32 == 0) barriers.step_empty(place.stage).arrive();
    }
    __device__ void release_keys(int stage) const {
        if (leads()) barriers.k_empty(stage).arrive();
    }
    __device__ void start_s() const {
        start_scores<FV_DP>(scores.g, queries, Operand::rows(base + AT_K + k.stage * K_BYTES));
    }
    __device__ void start_dp() const {
        start_scores<FV_DVP>(dp, d_outs, Operand::rows(base + AT_V + v.stage * V_BYTES));
    }
    // dQ += dS K of the step before, whose keys have this stage.
    __device__ void start_dq(int before) const {
        pin(dq);
        product_fence();
        const Operand keys = Operand::columns(base + AT_K + before * K_BYTES, FV_BN * PANEL_ROW);
        #pragma unroll
        for (int i = 0; i < FV_BN / 16; ++i) multiply_async(dq, ds[i], keys + i * 16 * PANEL_ROW);
        product_commit();
    }

    // The products of an overlapped step, of which S has come.
    __device__ void multiply_overlapped(int before) const {
        start_dq(before);
        start_s();
        product_commit();
        // dP takes the registers of dS.
        product_wait<1>();
        pin(dq);
        release_keys(before);
        barriers.v_full(v.stage).wait(v.round);
        product_fence();
        start_dp();
        product_commit();
        product_wait<1>();
        pin(scores.g[0]);
    }
    // Those of a step that waits for them.
    __device__ void multiply_waiting(int kind, int before) const {
        if (kind & Step::FIRST) {
            product_fence();
            start_s();
            start_dp();
            product_commit();
            product_wait<0>();
        } else {
            start_dq(before);
            start_s();
            product_commit();
            product_wait<1>();
            pin(dq);
            product_fence();
            start_dp();
            product_commit();
            product_wait<0>();
            release_keys(before);
        }
        pin(scores.g[0]);
    }
    // dQ of the last step of an item.
    __device__ void finish_dq(int before) const {
        start_dq(before);
        product_wait<0>();
        pin(dq);
        release_keys(before);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fv_backward_dq(const __grid_constant__ BackwardParams p, const __grid_constant__ Mods mods,
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
    const int number = warpgroup - 1;
    const Operand queries = Operand::rows(base + number * 64 * PANEL_ROW),
                  d_outs = Operand::rows(base + AT_D_OUT + number * 64 * PANEL_ROW);
    // Of this thread, where they are constant: what reads threadIdx beside products waits for them.
    const u32 thread = pinned(threadIdx.x);
    const u32 lse_at = pinned(base + AT_LSE + Spot::of_lane().query * 4);

    Ring<STEPS> place;
    Ring<FV_STAGES> k;
    Ring<V_STAGES> v;
    int item = -1;
    Scores scores;
    ScoreFragment dp;
    float dq[N_Q][4];
    u32 ds[FV_BN / 16][4];                     // as an operand

    auto kind_at = [&](Ring<STEPS> at) {
        barriers.step_full(at.stage).wait(at.round);
        return step_in(shared, at).kind;
    };
    const Consumer consumer = {base, barriers, queries, d_outs, place, v, thread, k, scores, dp, dq, ds};

    #pragma unroll 1
    for (;; place.advance()) {
        int kind = uniform(kind_at(place));
        if (kind == Step::STOP) break;
        clear(dq);
        float lse[QUERIES_HELD], delta[QUERIES_HELD];
        const bool empty = kind & Step::EMPTY;
        if (!empty) {
            barriers.rows_full().wait(++item);
            load_rows(lse, lse_at);
            load_rows(delta, lse_at + FV_BM * 4);
        }
        int before = 0;                        // the stage of K of the step before
        #pragma unroll 1
        while (!empty) {
            const Step& step = step_in(shared, place);
            barriers.k_full(k.stage).wait(k.round);
            const int together = uniform(kind | k.stage << 8 | v.stage << 12 | before << 16);
            kind = together & 0xff;
            k.stage = together >> 8 & 0xf;
            v.stage = together >> 12 & 0xf;
            before = together >> 16;
            if (FV_OVERLAP && (kind & ~Step::LAST) == 0) {
                consumer.multiply_overlapped(before);
                compute_p(scores, p, mods, step, lse, lse_at, false);
                keep_before(sign_of_weights(scores), base);
                product_wait<0>();
            } else {
                barriers.v_full(v.stage).wait(v.round);
                // NaN past the end times a weight of 0 is NaN.
                if (kind & Step::EVALUATES && step.keys < FV_BN)
                    clear_rows(shared + AT_K + k.stage * K_BYTES, FV_BN, panels(FV_D), step.keys);
                consumer.multiply_waiting(kind, before);
                if (kind & Step::EVALUATES) compute_p(scores, p, mods, step, lse, lse_at, true);
                else compute_p(scores, p, mods, step, lse, lse_at, false);
            }
            pin(dp[0]);
            const bool last = kind & Step::LAST;
            if (consumer.leads()) barriers.v_empty(v.stage).arrive();
            if (last) {
                // Every warp of a consumer reads lse.
                __syncwarp();
                if (thread % 32 == 0) barriers.rows_empty().arrive();
            }
            differentiate(ds, scores, dp, delta);
            before = k.stage;
            k.advance();
            v.advance();
            if (last) break;
            consumer.release_step();
            place.advance();
            kind = kind_at(place);
        }
        if (!empty) {
            before = uniform(before);
            consumer.finish_dq(before);
        }
        const Step done = step_in(shared, place);
        store_gradient(p.dq, p.dq.at(done.q_batch, done.head, done.q_row), done.queries, FV_D, dq, p.scale,
                       p.accumulate);
        consumer.release_step();
    }
}
