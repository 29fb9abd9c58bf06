// Gradients of k and v, and dq_accum, on Hopper: fv_backward<<<CTAs of the device, FV_WARPS * 32>>>
//
// Persistent: a CTA computes dK and dV of one tile of FV_BN keys of one KV head (FV_SPLIT_GQA: the part that one of its
// query heads gives) after the other, and its part of dQ of every tile of FV_BM queries that sees them:
//
//     S^T = K Q^T    P^T = exp(score(scale S^T) - lse)            dV += P^T dO
//     dP^T = V dO^T  dS^T = P^T (dP^T - delta) dscore/ds          dK += dS^T Q     dQ += dS K
//
// Roles. In warpgroup 0 warp 2 is the scheduler: it takes the CTA's items, walks their live tiles of queries and
// tells everyone of each step, up to STEPS ahead. A thread of warp 0 starts the copies of K and Q, a thread of
// warp 1 those of V and dO, and warp 3 writes lse and delta of each step to smem. The two other warpgroups are
// consumers with 64 keys each, 16 keys a warp. The scores are transposed, so that P^T is an operand of dV as it
// lies in a consumer's registers; dS passes through smem, for dQ, of which each consumer multiplies its queries or
// its columns by the keys of both. A step of a consumer is
//
//     start S^T of this step     start dQ = dS K and dK += dS^T Q of the step before
//     S^T, dQ have come: dQ -> smem         P = exp(score(scale S) - lse), 0 where the mask is false
//     dK has come: release Q of the step before         (JOINS_DV: and dO)
//     start dP^T                                          (DP_EARLY: before P, FROM_DELTA: from -delta)
//     dP^T has come: dS = P (dP - delta) dscore/ds -> smem
//     dS is written, for both consumers      dQ of the step before, smem -> added to dq_accum
//     start dV += P^T dO, and look for the next step    dV has come: release dO  (not JOINS_DV)
//
// so that the exponentials run beside dK. The beginning of dV joins dP and its end the next step where registers are
// short (JOINS_DV). Where scores are plain and there is room (SUBTRACTS_FIRST), a step is
//
//     start S^T of this step     start dQ, dK and the end of dV of the step before
//     S^T has come: half of P              dQ has come: dQ -> smem
//     start dP^T, from -delta              the other half of P
//     start the beginning of dV            dK, dP^T have come: release Q and dO of the step before
//     dS = P dP -> smem                    start dV in halves, as soon as P^T is rounded
//     dS is written, for both consumers    dQ -> added to dq_accum
//     look for the next step               dV has come
//
// And where scores are functions and tiles have 128 queries (LATE_COLUMNS), half of P comes before dP^T starts, beside
// dK.
//
// Nothing that ptxas cannot follow may stand between the start of a product and the wait for it (see forward.cu), so
// the first step of an item, and one whose mask is evaluated or whose score is not plain arithmetic (FV_OVERLAP),
// waits for all products before P. The mask of a step by mask bits (FV_MASK_BITS) is a word or two of each thread, read
// before the products: it is as plain as arithmetic.
//
// What is slow beside products, and so is done before or after them: an access of smem waits until the products
// that were started before it have been issued; a fence for the copy engine waits for the thread's stores.

// A consumer's place in the ring of steps; in one register, counted on, where registers are short.
template <bool COUNTED>
struct StepPlace {
    Ring<STEPS> ring;

    __device__ Ring<STEPS> now() const { return ring; }
    __device__ void advance() { ring.advance(); }
};
template <>
struct StepPlace<true> {
    u32 number = 0;

    __device__ Ring<STEPS> now() const { return {int(number % STEPS), int(number / STEPS)}; }
    __device__ void advance() { ++number; }
};

// Writes lse and delta of one step after the other to smem. All lanes of a warp call it.
struct RowWriter {
    const BackwardParams& p;
    char* const shared;
    const Barriers& barriers;
    Ring<FV_STAGES> stage;
    int number = 0;
    float lse[FV_BM / 32], delta[FV_BM / 32];

    __device__ void read(const Step& step) { read_rows(p, step, lse, delta); }
    __device__ void write() {
        const Ring<FV_STAGES> before = ROW_STAGES == FV_STAGES ? Ring<FV_STAGES>{stage.stage, stage.round - 1}
                                                               : stage.before().before();
        barriers.d_out_empty(before.stage).wait(before.round);
        const int place = ROW_STAGES == FV_STAGES ? stage.stage : number & 1;
        bool is_any_huge = false;
        #pragma unroll
        for (int i = 0; i < FV_BM / 32; ++i) {
            float* const to = reinterpret_cast<float*>(shared) + place * FV_BM + i * 32 + threadIdx.x % 32;
            to[AT_LSE / 4] = subtracted(lse[i]);
            to[AT_DELTA / 4] = delta[i];
            is_any_huge |= is_huge(lse[i]);
        }
        if constexpr (HAS_ROW_WEIGHT_SUM && FINDS_HUGE_LSE)
            reinterpret_cast<int*>(shared)[AT_HUGE / 4 + stage.stage] = __any_sync(~0u, is_any_huge);
        barriers.full(stage.stage).arrive_warp();
        stage.advance();
        ++number;
    }
};

#if FV_ORDERED_DQ
// The producer of V, dO, lse and delta: one warp, whose first lane starts the copies.
__device__ void copy_values_and_rows(const Copies& copies, const Barriers& barriers, const TensorMap& map_v,
                                     const TensorMap& map_d_out) {
    ValueCopier<Barriers> values = {copies, barriers, map_v, map_d_out};
    RowWriter rows = {copies.p, copies.shared, barriers};
    Ring<STEPS> ring;
    #pragma unroll 1
    for (;; ring.advance()) {
        barriers.step_full(ring.stage).wait(ring.round);
        const Step& step = step_in(copies.shared, ring);
        if (step.kind == Step::STOP) return;
        if (!(step.kind & Step::EMPTY)) {
            rows.read(step);
            if (threadIdx.x % 32 == 0) values.copy(step);
            __syncwarp();
            rows.write();
        }
        barriers.step_empty(ring.stage).arrive_warp();
    }
}

// Adds dQ of each step to dq_accum, after that of all tiles of keys of lower rank and before that of others: one
// thread.
__device__ void add_dq(const Copies& copies, const Barriers& barriers) {
    const BackwardParams& p = copies.p;
    u32* const added = dq_added(p);
    int number = 0;
    bool due = false;                          // whether it was this step's turn when the one before was added
    Ring<STEPS> ring;
    barriers.step_full(0).wait(0);
    #pragma unroll 1
    for (;;) {
        const Step& step = step_in(copies.shared, ring);
        if (step.kind == Step::STOP) return;
        Ring<STEPS> next = ring;
        next.advance();
        if (step.kind & Step::EMPTY) {
            due = false;
            barriers.step_full(next.stage).wait(next.round);
        } else {
            const u32 rows = min(ceil_div(step.queries, 16) * 16, FV_BM);
            if (!due) await_count(added + step.dq, step.dq_rank);
            barriers.dq_full().wait(number++);
            add_bulk(p.dq_accum + i64(step.dq) * (16 * FV_DP), copies.base + AT_DQ, rows * FV_DP * 4);
            // Looked up while smem is read.
            barriers.step_full(next.stage).wait(next.round);
            const Step& after = step_in(copies.shared, next);
            due = !(after.kind & (Step::EMPTY | Step::STOP)) && read_count(added + after.dq) == after.dq_rank;
            await_bulk_reads();
            barriers.dq_empty().arrive();
            await_bulk_writes();
            publish_count(added + step.dq, step.dq_rank + 1);
        }
        barriers.step_empty(ring.stage).arrive();
        ring = next;
    }
}
#else
// The producer of lse and delta: one warp.
__device__ void copy_rows(const Copies& copies, const Barriers& barriers) {
    RowWriter rows = {copies.p, copies.shared, barriers};
    Ring<STEPS> ring;
    #pragma unroll 1
    for (;; ring.advance()) {
        barriers.step_full(ring.stage).wait(ring.round);
        const Step& step = step_in(copies.shared, ring);
        const int kind = step.kind;
        if (kind == Step::STOP) return;
        if (!(kind & Step::EMPTY)) rows.read(step);
        barriers.step_empty(ring.stage).arrive_warp();
        if (!(kind & Step::EMPTY)) rows.write();
    }
}
#endif

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
    const int consumer = warpgroup - 1;
    const Operand keys = Operand::rows(base + consumer * 64 * PANEL_ROW),
                  values = Operand::rows(base + AT_V + consumer * 64 * PANEL_ROW);
    const int dq_first = SPLIT_DQ_ROWS ? 0 : consumer * DQ_COLUMNS;
    const Operand keys_across = Operand::columns(
        base + dq_first / PANEL_COLUMNS * FV_BN * PANEL_ROW + dq_first % PANEL_COLUMNS * 2, FV_BN * PANEL_ROW);
    // Of this thread, where they are constant: what reads threadIdx beside products waits for them.
    const u32 thread = pinned(threadIdx.x);
    const u32 rows_at = pinned(base + Spot::of_lane().query * 4);
    const u32 ds_at = pinned(base + AT_DS + consumer * FV_BM * PANEL_ROW + ds_place());
    const u32 dq_at = pinned(base + AT_DQ + dq_offset() * 4 + threadIdx.x % 32 * 16);
    const int dq_to = SUBTRACTS_FIRST ? 0 : pinned(dq_offset()), first_row = SUBTRACTS_FIRST ? 0 : pinned(dq_row());
    const int bytes_of_dq = SPLIT_DQ_ROWS || N_Q * CONSUMERS == N_K ? N_Q * 512 : pinned(dq_bytes());
    auto leads = [&] { return thread % 128 == 0; };
    auto leads_warp = [&] { return thread % 32 == 0; };

    StepPlace<SUBTRACTS_FIRST> place;
    Ring<FV_STAGES> stage;
    int item = -1, number = 0;                 // of the CTA's items and steps
    Scores scores;
    HeldSums held;
    ScoreFragment dp;
    float dk[N_K][4], dv[N_V][4], dq[N_Q][4];
    u32 weights[FV_BM / 16][4];                // P^T as an operand
    float* target;    // in dq_accum, of the step before and the warp; null if none of its queries exists

    auto kind_at = [&](Ring<STEPS> at) {
        barriers.step_full(at.stage).wait(at.round);
        return step_in(shared, at).kind;
    };
    // Where lse and delta of a step of this parity are.
    auto rows_place = [&](int parity) { return (ROW_STAGES == FV_STAGES ? stage.stage : parity) * FV_BM * 4; };
    auto start_s = [&](Ring<FV_STAGES> stage) {
        product_fence();
        start_scores<FV_DP>(scores.g, keys, Operand::rows(base + AT_Q + stage.stage * Q_BYTES));
        product_commit();
    };
    auto start_dp = [&](Ring<FV_STAGES> stage) {
        if constexpr (FROM_DELTA) {
            float delta[QUERIES_HELD];
            load_rows(delta, rows_at + AT_DELTA + rows_place(number & 1));
            for_each_score([&](int m, int n, int i) { dp[m][n][i] = -delta[query_held(m, n, i)]; });
            pin(dp[0]);
        }
        product_fence();
        start_scores<FV_DVP, FROM_DELTA>(dp, values, Operand::rows(base + AT_D_OUT + stage.stage * D_OUT_BYTES));
        product_commit();
    };
    // With a derivative the weights themselves are an operand only, and rounded at once.
    constexpr bool NARROWS_FIRST = FV_DSCORE && !FV_CAPTURES;
    auto narrow_weights = [&](int n) {
        narrow_column(weights, n, [&](int i) { return scores.dropped(scores.p(0, n, i), 0, n, i); });
    };
    bool has_huge_lse = false;                 // of a step,
    bool has_bits = false;                     // and whether `visible` is its mask
    ScoreBits visible;
    auto compute_weights = [&](const Step& step, const float (&lse)[QUERIES_HELD], bool evaluates, int from = 0,
                               int to = N) {
        compute_p<FIRST_POWERS>(scores, p, mods, step, lse, rows_at + AT_LSE + rows_place(number & 1), evaluates, from,
                                to, has_bits, visible, has_huge_lse);
        if (NARROWS_FIRST)
            #pragma unroll
            for (int n = 0; n < N; ++n) narrow_weights(n);
    };
    auto narrow_first_weights = [&] {
        if (!NARROWS_FIRST)
            #pragma unroll
            for (int n = 0; n < 2 * FIRST_DV; ++n) narrow_weights(n);
    };
    auto start_dv = [&](Ring<FV_STAGES> stage, int from, int to) {
        start_sums(dv, weights, Operand::columns(base + AT_D_OUT + stage.stage * D_OUT_BYTES, FV_BM * PANEL_ROW), from,
                   to);
    };
    auto start_first_dv = [&] {
        start_dv(stage, 0, FIRST_DV);
        product_commit();
    };
    auto start_more_dv = [&](int from, int to) {
        product_fence();
        start_dv(stage, from, to);
        product_commit();
    };
    // Of a dP that was started before P.
    auto await_dp = [&] {
        if constexpr (JOINS_DV) {
            narrow_first_weights();
            pin(dv);
            product_fence();
            start_first_dv();
        }
        product_wait<JOINS_DV>();
    };
    // dQ, dK and the end of dV of the step before `number`, which had this stage.
    auto start_pending = [&](Ring<FV_STAGES> before, int parity) {
        barriers.ds_full(parity).wait((number - 1) >> 1);
        pin(dk);
        if (LAST_DV < FV_BM / 16) pin(dv);
        product_fence();
        start_dv(before, LAST_DV, FV_BM / 16);
        if constexpr (!FV_SEPARATE_DQ)
            start_dq(dq,
                     Operand::rows(base + AT_DS + parity * DS_BYTES + (SPLIT_DQ_ROWS ? consumer * 64 * PANEL_ROW : 0)),
                     keys_across);
        // Into a group without products the assembler puts one of its own.
        if constexpr (!FV_SEPARATE_DQ || LAST_DV < FV_BM / 16) product_commit();
        start_dk(dk, Operand::columns(base + AT_DS + parity * DS_BYTES + consumer * FV_BM * PANEL_ROW, 0),
                 Operand::columns(base + AT_Q + before.stage * Q_BYTES, FV_BM * PANEL_ROW));
        product_commit();
    };
    auto release_step = [&] {
        __syncwarp();
        if (leads_warp()) barriers.step_empty(place.now().stage).arrive();
    };
    // Where the warp's dQ of a step goes in dq_accum; null if none of its queries exists. Where registers are short,
    // from dq_at of its first lane, which is the one to send it.
    auto target_of = [&](const Step& step) -> float* {
        const int to = SUBTRACTS_FIRST ? int(dq_at - base - AT_DQ) / 4 : dq_to;
        const int row = SUBTRACTS_FIRST ? to / (16 * FV_DP) * 16 : first_row;
        return bytes_of_dq > 0 && row < step.queries ? p.dq_accum + step.dq + to : nullptr;
    };
    auto finish_dq = [&] {
        if constexpr (FV_SEPARATE_DQ) return;
        pin(dq);
        if constexpr (FV_ORDERED_DQ) {
            barriers.dq_empty().wait(number - 2);
        } else {
            if (leads_warp()) await_bulk_reads();
            __syncwarp();
        }
        store_dq(dq_at, dq);
    };
    // After a fence, of a step that is not the first of its item.
    auto send_dq = [&] {
        if constexpr (FV_ORDERED_DQ) barriers.dq_full().arrive();
        else if (!FV_SEPARATE_DQ && target) add_bulk(target, dq_at, bytes_of_dq);
    };
    auto finish_dk = [&](Ring<FV_STAGES> before) {
        pin(dk);
        if (LAST_DV < FV_BM / 16) pin(dv);
        if (leads()) {
            barriers.q_empty(before.stage).arrive();
            if (LAST_DV < FV_BM / 16) barriers.d_out_empty(before.stage).arrive();
        }
    };

    #pragma unroll 1
    for (;; place.advance()) {
        int kind = uniform(kind_at(place.now()));
        if (kind == Step::STOP) break;
        clear(dk);
        clear(dv);
        const bool empty = kind & Step::EMPTY;
        target = nullptr;
        if (!empty) {
            ++item;
            barriers.k_full().wait(item);
            barriers.v_full().wait(item);
            const int keys = step_in(shared, place.now()).keys;
            if (kind & Step::EVALUATES && keys < FV_BN) clear_rows(shared, FV_BN, panels(FV_D), keys);
            barriers.full(stage.stage).wait(stage.round);
        }
        #pragma unroll 1
        while (!empty) {
            const Step& step = step_in(shared, place.now());
            const int together = uniform(kind | stage.stage << 6 | (number & 1) << 8);
            kind = together & Step::KINDS;
            stage.stage = together >> 6 & 3;
            const int parity = together >> 8 & 1;
            has_bits = FV_MASK_BITS && kind & Step::BITS;
            if (has_bits) {
                const u32* const from = persistent.mask_bits +
                                        (i64(together / Step::SLOT) * (128 * CONSUMERS) + thread - 128) *
                                            mask_words(FV_BM);
                #pragma unroll
                for (int i = 0; i < mask_words(FV_BM); ++i) visible.words[i] = __ldg(from + i);
            }
            if constexpr (HAS_ROW_WEIGHT_SUM && FINDS_HUGE_LSE)
                has_huge_lse = reinterpret_cast<const int*>(shared)[AT_HUGE / 4 + stage.stage];
            float lse[QUERIES_HELD];
            if (FV_OVERLAP && (kind & ~(Step::LAST | Step::BITS)) == 0) {
                start_s(stage);
                start_pending(stage.before(), 1 - parity);
                if (LSE_EARLY)
                    load_rows(lse, rows_at + AT_LSE + rows_place(parity), 0,
                              SUBTRACTS_FIRST ? 2 * FIRST_POWERS : QUERIES_HELD);
                if constexpr (SUBTRACTS_FIRST) {
                    product_wait<2>();
                    pin(scores.g[0]);
                    scores.subtract<FIRST_POWERS>(p.scale, lse, 0, FIRST_POWERS);
                    keep_before(sign_of_weights(scores, FIRST_POWERS), base);
                }
                product_wait<1>();
                if (SUBTRACTS_FIRST) load_rows(lse, rows_at + AT_LSE + rows_place(parity), 2 * FIRST_POWERS);
                else pin(scores.g[0]);
                finish_dq();
                if constexpr (SUBTRACTS_FIRST) scores.subtract<FIRST_POWERS>(p.scale, lse, FIRST_POWERS);
                if (!LSE_EARLY) load_rows(lse, rows_at + AT_LSE + rows_place(parity), 0, 2 * (N - LATE_COLUMNS));
                if constexpr (LATE_COLUMNS > 0) {
                    compute_weights(step, lse, false, 0, N - LATE_COLUMNS);
                    keep_before(sign_of_weights(scores, N - LATE_COLUMNS), base);
                    load_rows(lse, rows_at + AT_LSE + rows_place(parity), 2 * (N - LATE_COLUMNS));
                }
                if (DP_EARLY) start_dp(stage);
                compute_weights(step, lse, false, LATE_COLUMNS > 0 ? N - LATE_COLUMNS : 0);
                keep_before(sign_of_weights(scores), base);
                if constexpr (DP_EARLY) await_dp();
                else product_wait<0>();
                finish_dk(stage.before());
            } else {
                if (kind & Step::EVALUATES && step.queries < FV_BM) {
                    clear_rows(shared + AT_Q + stage.stage * Q_BYTES, FV_BM, panels(FV_D), step.queries);
                    clear_rows(shared + AT_D_OUT + stage.stage * D_OUT_BYTES, FV_BM, panels(FV_DV), step.queries);
                }
                if (kind & Step::FIRST) {
                    start_s(stage);
                    product_wait<0>();
                } else {
                    start_s(stage);
                    start_pending(stage.before(), 1 - parity);
                    product_wait<0>();
                    finish_dq();
                    finish_dk(stage.before());
                }
                pin(scores.g[0]);
                load_rows(lse, rows_at + AT_LSE + rows_place(parity));
                if constexpr (SUBTRACTS_FIRST) scores.subtract<FIRST_POWERS>(p.scale, lse);
                if constexpr (LATE_COLUMNS > 0) compute_weights(step, lse, kind & Step::EVALUATES);
                else if (kind & Step::EVALUATES) compute_weights(step, lse, true);
                else compute_weights(step, lse, false);
                if constexpr (DP_EARLY) {
                    start_dp(stage);
                    await_dp();
                }
            }
            float delta[QUERIES_HELD];
            if (!FROM_DELTA && !DELTA_LATE) load_rows(delta, rows_at + AT_DELTA + rows_place(parity));
            if constexpr (!DP_EARLY) {
                narrow_first_weights();
                pin(dv);
                start_dp(stage);
                start_first_dv();
                product_wait<1>();
            }
            pin(dp[0]);
            if (leads() && kind & Step::LAST) barriers.v_empty().arrive();
            #pragma unroll
            for (int k = 0; k < FV_BM / 16; ++k) {
                u32 ds[4];
                if (DELTA_LATE && k % 2 == 0)
                    load_rows(delta, rows_at + AT_DELTA + rows_place(parity), k * 4, k * 4 + 8);
                #pragma unroll
                for (int n = k * 2; n < k * 2 + 2; ++n) {
                    if (!NARROWS_FIRST && n >= 2 * FIRST_DV) narrow_weights(n);
                    if constexpr (FROM_DELTA) scores.multiply_column(dp, n);
                    else scores.differentiate_column(dp, delta, n);
                    ds[n % 2 * 2] = narrow2<FV_DTYPE>(scores.g[0][n][0], scores.g[0][n][1]);
                    ds[n % 2 * 2 + 1] = narrow2<FV_DTYPE>(scores.g[0][n][2], scores.g[0][n][3]);
                }
                store_matrices_transposed(ds_at + parity * DS_BYTES + k * 16 * PANEL_ROW, ds);
                if (SPLITS_DV && k + 1 == MIDDLE_DV) start_more_dv(FIRST_DV, MIDDLE_DV);
                if (SPLITS_DV && k + 1 == LAST_DV) start_more_dv(MIDDLE_DV, LAST_DV);
            }
            // What the next step begins with, read while the fence waits.
            const Ring<FV_STAGES> stage_before = stage;
            const bool last = kind & Step::LAST;
            float* const next_target = target_of(step);
            fence_async_proxy();
            __syncwarp();
            if (leads_warp()) {
                barriers.ds_full(parity).arrive();
                if (!FV_ORDERED_DQ || !(kind & Step::FIRST)) send_dq();
            }
            target = next_target;
            if constexpr (FV_CAPTURES) {
                const Place of = {step.b, step.head, step.head_kv, step.q_len, step.k_len};
                scores.capture(mods, {of, step.query, step.queries, step.key, step.keys, true}, held);
            }
            if (!SPLITS_DV) start_more_dv(FIRST_DV, LAST_DV);
            stage.advance();
            ++number;
            if (!last) {
                release_step();
                place.advance();
                kind = kind_at(place.now());
                barriers.full(stage.stage).wait(stage.round);
            }
            product_wait<0>();
            pin(dv);
            if (LAST_DV == FV_BM / 16 && leads()) barriers.d_out_empty(stage_before.stage).arrive();
            if (last) break;
        }
        if (!empty) {
            start_pending(stage.before(), uniform((number - 1) & 1));
            product_wait<0>();
            finish_dq();
            fence_async_proxy();
            __syncwarp();
            if (leads_warp()) send_dq();
            finish_dk(stage.before());
            if (leads()) barriers.k_empty().arrive();
        }
        if constexpr (FV_CAPTURES) held.add_held(mods);
        const Step done = step_in(shared, place.now());
        store_of_keys(p, p.dk, p.head_dk, done, FV_D, dk, p.scale);
        store_of_keys(p, p.dv, p.head_dv, done, FV_DV, dv, 1.f);
        release_step();
    }
    if (!FV_ORDERED_DQ && leads_warp()) await_bulk_reads();
}
