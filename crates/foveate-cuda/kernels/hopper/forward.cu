// Attention forward on Hopper: fv_forward<<<CTAs of the device, FV_WARPS * 32>>>
//
// Persistent: a CTA computes one tile of FV_BM query rows of one head after the other, the heaviest of the
// launch first, and its pipeline does not drain between them.
//
// Roles. In warpgroup 0 the scheduler, warp 2, takes the CTA's items and reads what there is to know of them, each
// when the copies of the one before come to its last step: as late as hides its own latency. A thread of warp 0 walks
// their live tiles of keys, starts the copies of Q and K, and tells the consumers of each step; a thread of warp 1
// starts those of V. Of keys in pages, and of operands that no tensor map has, the whole warp does (see copies.cuh).
// The other warpgroups are consumers, each with 64 rows of Q: 16 rows a warp, whose scores lie in the warp's registers
// as after mma.sync. A step of a consumer is
//
//     start S = Q K^T of this step     start O += P V of the step before
//     S has come: release K            S = score(scale S), -inf where the mask is false
//     new row_max and reference,       P = 2^(unit S - reference)     row_sum += P
//     but BY_SUMS
//     O has come: release V            rescale O if the reference has changed
//
// The softmax of a step so runs beside P V of the step before, and beside both products of the other
// consumers, which may take turns in starting theirs. Nothing that ptxas cannot follow may stand between the start
// of a product and the wait for it: a call or a divergent branch there, and it waits for every single
// instruction. So a step is one of two pieces of code. `overlapped`: the score function runs beside P V, if it
// is plain arithmetic (FV_OVERLAP). `waiting`: both products come first. It evaluates the mask, may
// call anything, and finishes the tile before when a new one begins. A consumer passes over a step whose keys
// none of its rows sees: it has only the product P V of the step before, if that one was no such step. Where the
// mask has bits (FV_MASK_BITS), a load and a selection for each score take the place of its evaluation, in either
// piece.
//
// The softmax is that of softmax.cuh.

// A consumer's part of its item, which stays in smem until it is finished: registers are scarce.
struct ItemRows {
    const Item* item;
    int first;          // this warp's first row of the item

    __device__ int query0() const { return item->tile * FV_BM + first; }
    __device__ int query() const { return query0() + threadIdx.x % 32 / 4; }       // of this lane's first row
    __device__ float value_scale() const {
#if FV_DTYPE == 3
        return item->scales.out;
#else
        return 1.f;
#endif
    }
    __device__ Place place() const {
        return {item->sequence.b, item->head, item->head / FV_GROUP, item->sequence.q_len, item->sequence.k_len};
    }
};

// 0, or NaN where out has a non-finite element.
__device__ float nonfinite_probe(const float (&out)[N_OUT][4]) {
    float probe[4] = {};
    #pragma unroll
    for (int i = 0; i < N_OUT * 4; ++i) probe[i % 4] = fmaf(out[i / 4][i % 4], 0.f, probe[i % 4]);
    return probe[0] + probe[1] + probe[2] + probe[3];
}

// Where a lane's scores of a step are, and what a score function needs of that beside the products. Found before these
// have started: from smem and from memory it comes too late after them.
struct ScorePlace {
    Place place;
    int query, key;             // of the lane's first score
    float distance;             // query - key
    PlaceReads reads;

    __device__ ScorePlace(const Mods& mods, const ItemRows& rows, int key0)
        : place(rows.place()), query(rows.query()), key(key0 + threadIdx.x % 4 * 2),
          distance(to_float(Int(query - key))),
          reads(fv_place_reads(mods, place)) {}
};

// Scores of this lane from accumulators, in place: rows and columns as of m16n8.
template <bool EVALUATES>
__device__ void score(float (&s)[N][4], float scale, const KeyScales& scales, const Mods& mods, const ScorePlace& at,
                      int k_len, bool unscaled) {
    auto of = [&](int n, int i, float x) {
        const int query_step = i / 2 * 8, key_step = n * 8 + i % 2;
        const float distance = at.distance + float(query_step - key_step);
        const float of_block = FV_SCALE_BLOCKS ? scale * scales.score[n / N_BLOCK] : scale;
        return fv_score(mods, at.place, at.query + query_step, at.key + key_step, x * of_block, distance, at.reads);
    };
    if constexpr (SCORES_IN_LOOP) {
        #pragma unroll 1
        for (int n = 0; n < N; ++n) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) s[0][i] = of(n, i, s[0][i]);
            float (&all)[1][N][4] = reinterpret_cast<float (&)[1][N][4]>(s);
            rotate(all);
        }
    } else if (FV_SCORE) {
        #pragma unroll
        for (int j = 0; j < N * 4; ++j) s[j / 4][j % 4] = of(j / 4, j % 4, s[j / 4][j % 4]);
    } else if (!FV_SCALE_BLOCKS && !unscaled) {
        #pragma unroll
        for (int j = 0; j < N * 4; ++j) s[j / 4][j % 4] *= scale;
    }
    if constexpr (EVALUATES) {
        #pragma unroll
        for (int j = 0; j < N * 4; ++j) {
            const int i = j % 4, key = at.key + j / 4 * 8 + i % 2;
            const bool visible = (!FV_MASK || fv_mask(mods, at.place, at.query + i / 2 * 8, key)) & (key < k_len);
            if (!visible) s[j / 4][i] = -infinity();
        }
    }
}

// The mask of this lane's scores of a step, as fv_mask_bits leaves it.
struct MaskBits {
    u32 words[mask_words(FV_BN)];

    __device__ void read(const u32* all, int slot) {
        const u32* const from = all + (i64(slot) * (128 * CONSUMERS) + threadIdx.x - 128) * mask_words(FV_BN);
        #pragma unroll
        for (int i = 0; i < mask_words(FV_BN); ++i) words[i] = __ldg(from + i);
    }
    __device__ void hide(float (&s)[N][4]) const {
        #pragma unroll
        for (int j = 0; j < N * 4; ++j)
            if (!(words[j / 32] >> j % 32 & 1)) s[j / 4][j % 4] = -infinity();
    }
};

// Weights of keys that dropout drops become 0, after they were summed.
__device__ void drop(float (&s)[N][4], const Mods& mods, const ItemRows& rows, int key0) {
    const int first = key0 + threadIdx.x % 4 * 2, query0 = rows.query();
    const Place place = rows.place();
    #pragma unroll
    for (int j = 0; j < N * 4; ++j) {
        const int i = j % 4;
        if (!fv_dropout_keep(mods, place, query0 + i / 2 * 8, first + j / 4 * 8 + i % 2)) s[j / 4][i] = 0.f;
    }
}

// Writes the rows of a finished item: out, lse and max_score. Returns whether one of the warp is to be looked at by
// recompute_nonfinite_rows.
__device__ bool finish(const ForwardParams& p, const Mods& mods, const ItemRows& rows, const Softmax& softmax,
                       const float (&out)[N_OUT][4]) {
    const int lane = threadIdx.x % 32, query0 = rows.query0(), head = rows.item->head;
    const Sequence& sequence = rows.item->sequence;
    const int left = sequence.q_len - query0;
    const float scale = FV_DTYPE == 3 ? softmax.scale : p.scale;
    bool any_lost = false;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = quad_sum(softmax.row_sum[half]);
        const float largest = softmax.largest_of_row(half, sum);
        const float highest = softmax.unscaled && !FV_SCALE_BLOCKS ? largest * scale : largest;
        const float above = Softmax::is_large(softmax.reference_max[half])
                          ? fmaf(softmax.reference_max[half] - largest, softmax.unit, -LARGEST_EXPONENT)
                          : fmaf(-largest, softmax.unit, softmax.reference(half));
        float factor = highest == -infinity() ? 0.f : exp2_score(above);
        // Weights that overflow, or their sum. Out may be finite all the same, so one that is not is written.
        const bool is_lost = BY_SUMS && sum > LOST_SUM;
        any_lost |= is_lost;
        sum = is_lost ? 0.f : sum * factor;
        if constexpr (FV_DROPOUT) factor *= fv_dropout_scale(mods);
        const int row = lane / 4 + half * 8;
        const bool exists = row < left;
        Row target = finish_row(p, sequence, head, query0 + row, highest, sum, exists && lane % 4 == 0);
        target.factor = is_lost ? __int_as_float(0x7fffffff) : target.factor * factor;
        if constexpr (FV_DTYPE == 3) target.factor *= rows.value_scale();
        if constexpr (FV_OUT_DTYPE != 2 && FV_DV % 8 == 0 && FV_ALIGN == 16) {
            #pragma unroll
            for (int n = 0; n < N_OUT; n += 4) {
                u32 chunk[4];
                #pragma unroll
                for (int i = 0; i < 4; ++i)
                    chunk[i] = n + i < N_OUT ? narrow2<FV_OUT_DTYPE>(out[n + i][half * 2] * target.factor,
                                                                     out[n + i][half * 2 + 1] * target.factor)
                                             : 0;
                exchange_in_quad(chunk);
                const int column = (n + lane % 4) * 8;
                if (exists && (FV_DV % 32 == 0 || column < FV_DV))
                    *reinterpret_cast<uint4*>(target.out + column) = make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
            }
        } else if (exists) {
            #pragma unroll
            for (int n = 0; n < N_OUT; ++n)
                store_out(target, n * 8 + lane % 4 * 2, out[n][half * 2], out[n][half * 2 + 1]);
        }
    }
    return __any_sync(~0u, any_lost || nonfinite_probe(out) != 0.f);
}

// A row once more, key by key.
__device__ void recompute_by_keys(const ForwardParams& p, const PersistentParams& persistent, const Mods& mods,
                                  const Sequence& sequence, const RowSteps& steps, int head, int query) {
#if FV_DTYPE == 3
    recompute_row(p, mods, sequence, steps, KeyedScales{p, persistent, sequence.b, head, query}, head, query);
#else
    recompute_row(p, mods, sequence, steps, RowScales{p.scale}, head, query);
#endif
}

// Recomputes the rows of a warp whose out is not finite though their lse is, or is -inf, of all items of the CTA. At the
// end, because a call within the main loop would cost every product the uniform registers of its operands.
// `number` is the CTA's last item.
__device__ __noinline__ void recompute_nonfinite_rows(const ForwardParams& p, const PersistentParams& persistent,
                                                      const Mods& mods, u32 number, int first) {
    #pragma unroll 1
    for (;; number = persistent.taken[1 + number]) {
        const WorkItem work = WorkItem::number(p, number);
        const Tile tile = p.tiles[work.tile];
        const Sequence sequence = p.sequences[tile.sequence];
        const int list = sequence.first_row + tile.tile + work.head * p.lists.head_stride;
        const int runs = FV_MASK ? p.lists.counts[list] : 0;
        const Run last = runs > 0 ? p.lists.runs[i64(list) * p.lists.capacity + runs - 1] : Run{};
        const RowSteps steps = {LiveKeys(p, sequence, tile.tile, work.head, runs, last)};
        const int query0 = tile.tile * FV_BM + first, rows = min(16, sequence.q_len - query0);
        #pragma unroll 1
        for (int row = 0; row < rows; ++row) {
            const i64 at = sequence.q_start + query0 + row;
            const OutElem* out = static_cast<const OutElem*>(p.out.data) + p.out.at(sequence.q_batch, work.head, at);
            const float row_sum = p.lse.data[sequence.q_batch * p.lse.batch + work.head * p.lse.head + at * p.lse.row];
            float probe = 0.f;
            for (int column = threadIdx.x % 32; column < FV_DV; column += 32)
                probe = fmaf(widen<FV_OUT_DTYPE>(out[column * p.out.elem]), 0.f, probe);
            if (__any_sync(~0u, probe != 0.f) && row_sum < infinity())
                recompute_by_keys(p, persistent, mods, sequence, steps, work.head, query0 + row);
        }
        if (number == blockIdx.x) return;
    }
}

// The rows of an item that no key is seen from, by one warp.
__device__ void finish_empty(const ForwardParams& p, const Sequence& sequence, int tile, int head) {
    const int lane = threadIdx.x % 32, query0 = tile * FV_BM;
    #pragma unroll 1
    for (int row = 0; row < min(FV_BM, sequence.q_len - query0); ++row) {
        const Row target = finish_row(p, sequence, head, query0 + row, -infinity(), 0.f, lane == 0);
        for (int column = lane; column < FV_DV; column += 32) store_one(target, column, 0.f);
    }
}

// Rows of V from `live` on are none of the sequence's: what stands there, which may be NaN, is multiplied by
// weights of 0. Every consumer clears all of them for itself, before its product.
__device__ void clear_rows(char* values, int live, int consumer) {
    const int thread = threadIdx.x % 128;
    for (int chunk = live * 8 + thread; chunk < FV_BN * 8; chunk += 128)
        #pragma unroll
        for (int panel = 0; panel < panels(FV_DV); ++panel)
            *reinterpret_cast<uint4*>(values + panel * FV_BN * PANEL_ROW + chunk * 16) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();
    named_sync(Named::OWN + consumer, 128);
}

// The item after item `number` of this CTA, from a counter. Whoever takes the last number that anybody takes sets
// it back.
__device__ u32 item_after(const PersistentParams& persistent, u32 number, u32 items) {
    u32 taken = 0;
    if (threadIdx.x % 32 == 0) {
        taken = atomicAdd(persistent.taken, 1);
        if (taken == items - 1) *persistent.taken = 0;
        if (gridDim.x + taken < items) persistent.taken[1 + gridDim.x + taken] = number;
    }
    return gridDim.x + __shfl_sync(~0u, taken, 0);
}

// The scheduler: one warp, whose lanes do the same until an item has no keys.
__device__ void schedule(const ForwardParams& p, const PersistentParams& persistent, char* shared, Barriers barriers) {
    const u32 items = p.tile_count * p.heads_q;
    int announced = 0;
    Ring<ITEMS> ring;
    auto place = [&]() -> Item& {
        barriers.item_empty(ring.stage).wait(ring.round - 1);
        return *reinterpret_cast<Item*>(shared + AT_ITEMS + ITEM_BYTES * ring.stage);
    };
    #pragma unroll 1
    for (u32 number = blockIdx.x; number < items; number = item_after(persistent, number, items)) {
        const WorkItem work = WorkItem::number(p, number);
        const Tile tile = p.tiles[work.tile];
        const Sequence& sequence = p.sequences[tile.sequence];
        int runs = 0;
        Run last_run = {};
        [[maybe_unused]] int last_slot = NO_SLOTS;
        if constexpr (FV_MASK) {
            const int row = sequence.first_row + tile.tile + work.head * p.lists.head_stride;
            const i64 at = i64(row) * p.lists.capacity;
            runs = p.lists.counts[row];
            if (runs > 0) last_run = p.lists.runs[at + runs - 1];
            if (FV_MASK_BITS && runs > 0 && persistent.mask_slots) last_slot = persistent.mask_slots[at + runs - 1];
        }
        if (FV_MASK ? runs == 0 : sequence.k_len == 0) {
            finish_empty(p, sequence, tile.tile, work.head);
            continue;
        }
        Item& item = place();
        item.number = number;
        item.head = work.head;
        item.tile = tile.tile;
        if (threadIdx.x % 32 < sizeof(Sequence) / 4)
            reinterpret_cast<int*>(&item.sequence)[threadIdx.x % 32] =
                reinterpret_cast<const int*>(&sequence)[threadIdx.x % 32];
        item.runs = runs;
        item.last_run = last_run;
        item.stop = 0;
#if FV_DTYPE == 3
        item.scales = item_scales(p, persistent, sequence, work.head, tile.tile);
#endif
#if FV_MASK_BITS
        item.last_slot = last_slot;
#endif
        barriers.item_full(ring.stage).arrive_warp();
        ring.advance();
        // An item that is taken earlier is one that no other CTA can take, and the first are the heaviest.
        barriers.item_ends().wait(announced++);
    }
    place().stop = 1;
    barriers.item_full(ring.stage).arrive_warp();
}

// What the producers have in common.
struct Copies {
    const ForwardParams& p;
    const PersistentParams& persistent;
    const u32 base;
    char* const shared;
    const Barriers barriers;

    // Calls `each(item, key, kind, slot)` for the live tiles of keys of all items: the first key, the kind of step, and
    // the slot of its mask bits where it has some.
    template <typename F>
    __device__ void for_each_tile(F each) const {
        Ring<ITEMS> ring;
        #pragma unroll 1
        for (;; ring.advance()) {
            barriers.item_full(ring.stage).wait(ring.round);
            const Item& item = *reinterpret_cast<const Item*>(shared + AT_ITEMS + ITEM_BYTES * ring.stage);
            if (item.stop) return;
            LiveKeys keys(p, item.sequence, item.tile, item.head, item.runs, item.last_run);
#if FV_MASK_BITS
            if (persistent.mask_slots) keys.take_slots(p, persistent.mask_slots, item.last_slot);
#endif
            bool more = keys.next();
            #pragma unroll 1
            for (bool first = true; more; first = false) {
                const int key = keys.tile * FV_BN;
                const u32 cells = keys.cells << Step::CELLS;
                const int slot = keys.slot();
                const u32 bits = FV_MASK_BITS && slot >= 0 ? Step::BITS : 0;
                more = keys.next();
                each(item, key, cells + bits + (first ? Step::FIRST : 0) + (more ? 0 : Step::LAST), slot);
            }
            arrive(barriers.item_empty(ring.stage));
        }
    }

    // Once for all that walk together.
    __device__ static void arrive(CopyBarrier barrier) {
        if constexpr (BY_WARP) barrier.arrive_warp();
        else barrier.arrive();
    }
};

// The producer of Q, K and of steps.
__device__ void copy_keys(const Copies& copies, const TensorMap& map_q, const TensorMap& map_k) {
    const ForwardParams& p = copies.p;
    const Barriers& barriers = copies.barriers;
    const PersistentParams& persistent = copies.persistent;
    const Keys keys = {p, p.k, map_k, persistent.k_head, persistent.k_batch, persistent.box_keys};
    const bool leads = !BY_WARP || threadIdx.x % 32 == 0;
    Ring<FV_STAGES> k;
    Ring<Q_STAGES> q;
    [[maybe_unused]] KeyScales scales = {};
    auto announce = [&](const Step& step, int bytes) {
        barriers.k_empty(k.stage).wait(k.round - 1);
        if (!leads) return;
        *reinterpret_cast<Step*>(copies.shared + AT_STEPS + 16 * k.stage) = step;
        if constexpr (FV_SCALE_BLOCKS) key_scales(copies.shared, k) = scales;
        if constexpr (COPIED_K) barriers.k_full(k.stage).arrive();
        else barriers.k_full(k.stage).arrive_expecting(bytes);
    };
    copies.for_each_tile([&](const Item& item, int key, u32 kind, int slot) {
        const int live = item.sequence.k_len - key, group = item.head / FV_GROUP;
        if (kind & Step::LAST) copies.arrive(barriers.item_ends());
#if FV_SCALE_BLOCKS
        if (scales.read(persistent, item, key)) kind |= Step::ODD;
#endif
        const u32 keys_at = copies.base + AT_K + k.stage * K_BYTES;
        keys.copy(item.sequence, group, key, keys_at, barriers.k_full(k.stage), leads, [&] {
            announce({key, live < FV_BN ? kind | Cells::all(Cells::EVALUATES) << Step::CELLS : kind, live, slot},
                     K_BYTES);
        });
        k.advance();
        if (!(kind & Step::FIRST)) return;
        #pragma unroll 1
        for (int c = 0; c < CONSUMERS; ++c) {
            const CopyBarrier full = barriers.q_full(q.stage, c);
            barriers.q_empty(q.stage, c).wait(q.round - 1);
            const u32 target = copies.base + (q.stage * CONSUMERS + c) * Q_BYTES;
            const int query = item.tile * FV_BM + c * 64;
            if constexpr (COPIED_Q) {
                EvenRows rows(rows_of(p.q, item.sequence.q_batch, item.head, item.sequence.q_start + query, 1));
                copy_rows<64, FV_D, FV_DP>(target, item.sequence.q_len - query, rows);
                full.arrive_after_copies();
            } else if (leads) {
                full.arrive_expecting(Q_BYTES);
                #pragma unroll
                for (int i = 0; i < panels(FV_D); ++i)
                    copy_panel(target + i * 64 * PANEL_ROW, map_q, full, i * PANEL_COLUMNS,
                               item.sequence.q_start + query, item.head % FV_GROUP * persistent.q_head,
                               group * persistent.q_group, item.sequence.q_batch * persistent.q_batch);
            }
        }
        q.advance();
    });
    announce({0, Step::STOP, 0, 0}, 0);
    if constexpr (COPIED_K) barriers.k_full(k.stage).arrive_after_copies();
    if constexpr (COPIED_Q || COPIED_K) wait_copies();
}

// The producer of V.
__device__ void copy_values(const Copies& copies, const TensorMap& map_v) {
    const ForwardParams& p = copies.p;
    const Barriers& barriers = copies.barriers;
    const PersistentParams& persistent = copies.persistent;
    [[maybe_unused]] const Values values = {p, p.v, map_v, persistent.v_head, persistent.v_batch, persistent.box_keys};
    const bool leads = !BY_WARP || threadIdx.x % 32 == 0;
    Ring<FV_STAGES> v;
    copies.for_each_tile([&](const Item& item, int key, u32, int) {
        const CopyBarrier full = barriers.v_full(v.stage);
        const int group = item.head / FV_GROUP;
        const u32 target = copies.base + AT_V + v.stage * V_BYTES;
        auto begin = [&] {
            barriers.v_empty(v.stage).wait(v.round - 1);
            if (!COPIED_V && leads) full.arrive_expecting(V_BYTES);
        };
        if constexpr (FV_DTYPE == 3) {
            const int first = first_value(item.sequence, FV_BN, persistent.packed) + key;
            begin();
            #pragma unroll
            for (int i = 0; i < VALUE_PANELS; ++i)
                copy_panel(target + i * FV_DVP * VALUE_KEYS, map_v, full, first + i * VALUE_KEYS, 0,
                           group * persistent.v_head, item.sequence.k_batch * persistent.v_batch);
        } else {
            values.copy(item.sequence, group, key, target, full, leads, begin);
        }
        v.advance();
    });
    if constexpr (COPIED_V) wait_copies();
}

__device__ void clear(float (&out)[N_OUT][4]) {
    #pragma unroll
    for (int i = 0; i < N_OUT * 4; ++i) out[i / 4][i % 4] = 0.f;
}

// The scores of a step that waits.
__device__ void score_waiting(float (&s)[N][4], float scale, const KeyScales& scales, const Mods& mods,
                              const ItemRows& rows, int key, bool evaluates, bool unscaled) {
    const ScorePlace at(mods, rows, key);
    const int k_len = rows.item->sequence.k_len;
    if (evaluates) score<true>(s, scale, scales, mods, at, k_len, unscaled);
    else score<false>(s, scale, scales, mods, at, k_len, unscaled);
}

// What one thread makes ready for all.
__device__ void begin_launch(const Barriers& barriers, u32 base, const TensorMap& map_q, const TensorMap& map_k,
                             const TensorMap& map_v) {
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();
        barriers.init();
        reset_named_barriers();
        if (!COPIED_Q) prefetch_map(map_q);
        if (!COPIED_K) prefetch_map(map_k);
        if (!COPIED_V) prefetch_map(map_v);
    }
    __syncthreads();
}

// Warpgroup 0: the copies and the scheduler.
__device__ void produce(const ForwardParams& p, const PersistentParams& persistent, char* shared, u32 base,
                        const Barriers& barriers, int warp, const TensorMap& map_q, const TensorMap& map_k,
                        const TensorMap& map_v) {
    give_registers<PRODUCER_REGISTERS>();
    const Copies copies = {p, persistent, base, shared, barriers};
    if (warp == 0 && (BY_WARP || elect_one())) copy_keys(copies, map_q, map_k);
    if (warp == 1 && (BY_WARP || elect_one())) copy_values(copies, map_v);
    if (warp == 2) schedule(p, persistent, shared, barriers);
}

// Makes operands of the weights, and out ready for their product.
__device__ void hand_on_weights(u32 (&weights)[FV_BN / MMA_K][4], float (&s)[N][4], float (&out)[N_OUT][4],
                                const float (&rescale)[2], bool rescales, [[maybe_unused]] bool is_odd,
                                [[maybe_unused]] const PersistentParams& persistent, const Mods& mods,
                                const ItemRows& rows, int key) {
    if constexpr (FV_DROPOUT) drop(s, mods, rows, key);
#if FV_SCALE_BLOCKS
    if (is_odd) KeyScales::complete_weights(s, persistent, *rows.item, key);
#endif
    if (rescales) multiply_rows(out, rescale);
    narrow_weights(weights, s);
}

// The keys of a step, and the queries with the last one of an item.
__device__ void release(const Barriers& barriers, int k_stage, int q_stage, int consumer, u32 kind) {
    barriers.k_empty(k_stage).arrive();
    if (kind & Step::LAST) barriers.q_empty(q_stage, consumer).arrive();
}

// The turns of a consumer, which begin.
__device__ Turns begin_turns(int consumer) {
    const Turns turns = {consumer};
    turns.begin();
    return turns;
}

// Awaits P V: behind the softmax, see keep_before.
__device__ void await_out(float (&out)[N_OUT][4], const Softmax& softmax, u32 base) {
    keep_before(softmax.row_sum[0] + softmax.row_sum[1], base);
    product_wait<0>();
    pin(out);
}

// Those of the next item.
__device__ void await_queries(const Barriers& barriers, Ring<Q_STAGES>& q, int consumer) {
    q.advance();
    barriers.q_full(q.stage, consumer).wait(q.round);
}

// Where scales are out of the ordinary: see KeyScales.
__device__ void complete_scores([[maybe_unused]] float (&s)[N][4], [[maybe_unused]] const PersistentParams& persistent,
                                [[maybe_unused]] const Item& item, [[maybe_unused]] int consumer,
                                [[maybe_unused]] int key) {
#if FV_SCALE_BLOCKS && !FV_SCORE
    KeyScales::complete_scores(s, persistent, item, consumer, key);
#endif
}

// The step of a stage of K that is full.
__device__ Step announced(u32 base, int stage) {
    Step step;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(step.key), "=r"(step.kind), "=r"(step.live), "=r"(step.slot)
                 : "r"(base + AT_STEPS + 16 * stage)
                 : "memory");
    // The same for all threads, as the compiler now knows: else operands of products leave uniform registers.
    step.kind = __reduce_or_sync(~0u, step.kind);
    return step;
}

// What is there already of the step ahead, looked up beside the softmax: after it, each look is a wait.
struct Ahead {
    bool has_keys, has_values;          // has_values: of the step at work, which are multiplied in the one ahead
    Step step;                          // where it has keys
};

// Behind the step of `k`, and behind `weights`, a sum of which it does not look earlier than these are there: what
// it finds is seldom there yet before.
__device__ Ahead look_ahead(const Barriers& barriers, u32 base, Ring<FV_STAGES> k, float weights) {
    Ahead ahead = {};
    if constexpr (!LOOKS_AHEAD) return ahead;
    keep_before(weights, base);
    ahead.has_values = barriers.v_full(k.stage).is_complete(k.round);
    k.advance();
    ahead.has_keys = barriers.k_full(k.stage).is_complete(k.round);
    ahead.step = announced(base, k.stage);
    return ahead;
}

// The step of `k`, whose keys are there then; its kind with what is known of the step before.
__device__ Step begin_step(const Barriers& barriers, u32 base, Ring<FV_STAGES> k, const Ahead& ahead, u32 before) {
    Step step = ahead.step;
    if (!LOOKS_AHEAD || !__all_sync(~0u, ahead.has_keys)) {
        barriers.k_full(k.stage).wait(k.round);
        step = announced(base, k.stage);
    }
    step.kind |= before;
    return step;
}

// Turns scores into weights; see Softmax::weigh.
template <bool OVERLAPPED, typename Look>
__device__ bool hide_and_weigh(float (&s)[N][4], float (&rescale)[2], Softmax& softmax, const KeyScales& scales,
                               const MaskBits& bits, bool has_bits, const Look& look) {
    if (has_bits) bits.hide(s);
    if constexpr (OVERLAPPED && BY_SUMS) return softmax.weigh_by_sums(s, rescale, look);
    else return softmax.weigh(s, rescale, scales, look);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fv_forward(const __grid_constant__ ForwardParams p, const __grid_constant__ Mods mods,
           const __grid_constant__ PersistentParams persistent, const __grid_constant__ TensorMap map_q,
           const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v) {
    extern __shared__ __align__(1024) char shared[];
    const u32 base = shared_address(shared);
    const int warpgroup = warpgroup_of_thread(), warp = warp_of_warpgroup();
    const Barriers barriers = {base};
    begin_launch(barriers, base, map_q, map_k, map_v);
    if (warpgroup == 0) return produce(p, persistent, shared, base, barriers, warp, map_q, map_k, map_v);
    take_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1, first_row = consumer * 64 + warp * 16;
    const bool leads = threadIdx.x % 128 == 0;
    const Turns turns = begin_turns(consumer);
    Ring<FV_STAGES> k;
    Ring<Q_STAGES> q = Ring<Q_STAGES>::before_first();
    Ring<ITEMS> items = Ring<ITEMS>::before_first();
    bool has_nonfinite = false;
    u32 last_item = 0, before = 0;             // before: of that step STEP, and WEIGHTS where it was no pass
    constexpr u32 STEP = 1u << 30, WEIGHTS = 1u << 31;
    int live_keys = FV_BN;                     // of the step before
    ItemRows rows = {nullptr, first_row};
    Softmax softmax(p.scale, p.max_score.data != nullptr);
    auto scale = [&] { return FV_DTYPE == 3 ? softmax.scale : p.scale; };
    float s[N][4], out[N_OUT][4] = {};
    u32 weights[FV_BN / MMA_K][4] = {};
    Ahead ahead = {};
    #pragma unroll 1
    for (;;) {
        const Step step = begin_step(barriers, base, k, ahead, before);
        const u32 cell = Step::cell(step.kind, consumer);
        const bool sees = cell & Cells::LIVE, has_weights = step.kind & WEIGHTS;
        const bool has_bits = FV_MASK_BITS && step.kind & Step::BITS && cell == (Cells::LIVE | Cells::EVALUATES);
        MaskBits bits;
        if (has_bits) bits.read(persistent.mask_bits, step.slot);
        if (step.kind & Step::FIRST) await_queries(barriers, q, consumer);
        const Ring<FV_STAGES> v = k.before();
        if (step.kind & STEP && !ahead.has_values) barriers.v_full(v.stage).wait(v.round);
        if constexpr (FV_COPIED != 0) fence_async_proxy();    // what lanes have copied, products read
        if (FV_DTYPE != 3 && live_keys < FV_BN) clear_rows(shared + AT_V + v.stage * V_BYTES, live_keys, consumer);
        const Operand queries = Operand::rows(base + (q.stage * CONSUMERS + consumer) * Q_BYTES);
        const Operand keys = Operand::rows(base + AT_K + k.stage * K_BYTES);
        const Operand values = values_at(base + AT_V + v.stage * V_BYTES);
        const KeyScales& scales = key_scales(shared, k);
        const bool odd_keys = FV_SCALE_BLOCKS && step.kind & Step::ODD;
        auto is_odd = [&] { return FV_SCALE_BLOCKS && !FV_SCORE && (odd_keys || !softmax.unscaled); };
        auto release_keys = [&] { if (leads) release(barriers, k.stage, q.stage, consumer, step.kind); };
        float rescale[2] = {1.f, 1.f};
        bool rescales = false;
        // With a score the turn is awaited in either piece of code: one of them has read the place before.
        if constexpr (!FV_SCORE) begin_turn(s, out, turns);
        if (FV_OVERLAP && (cell == Cells::LIVE || has_bits) && has_weights && !(step.kind & Step::FIRST) && !is_odd()) {
            const ScorePlace at(mods, rows, step.key);
            if constexpr (FV_SCORE) begin_turn(s, out, turns);
            multiply_overlapped(s, out, weights, queries, keys, values, turns);
            release_keys();
            score<false>(s, scale(), scales, mods, at, FV_BN, softmax.unscaled);
            rescales = hide_and_weigh<true>(s, rescale, softmax, scales, bits, has_bits,
                                            [&](float weights) { ahead = look_ahead(barriers, base, k, weights); });
            await_out(out, softmax, base);
        } else {
            ahead = {};
            if constexpr (FV_SCORE) begin_turn(s, out, turns);
            if (sees && has_weights) multiply_both(s, out, weights, queries, keys, values, turns);
            else if (sees) multiply_keys(s, queries, keys, turns);
            else if (has_weights) multiply_values(out, weights, values, turns);
            else turns.pass_over();
            release_keys();
            if (step.kind & (Step::FIRST | Step::STOP)) {
                if (step.kind & STEP) {
                    has_nonfinite |= finish(p, mods, rows, softmax, out);
                    last_item = rows.item->number;
                    barriers.item_empty(items.stage).arrive_warp();
                }
                if (step.kind & Step::STOP) break;
                items.advance();
                barriers.item_full(items.stage).wait(items.round);
                rows.item = reinterpret_cast<const Item*>(shared + AT_ITEMS + ITEM_BYTES * items.stage);
                softmax.clear();
#if FV_DTYPE == 3
                softmax.set_scale(rows.item->scales.scores[FV_SCALE_BLOCKS ? consumer : 0]);
#endif
                clear(out);
            }
            if (sees) {
                if (is_odd()) complete_scores(s, persistent, *rows.item, consumer, step.key);
                score_waiting(s, scale(), scales, mods, rows, step.key, cell & Cells::EVALUATES && !has_bits,
                              softmax.unscaled);
                rescales = hide_and_weigh<false>(s, rescale, softmax, scales, bits, has_bits, [](float) {});
            }
        }
        if ((step.kind & STEP) && leads) barriers.v_empty(v.stage).arrive();
        k.advance();
        before = STEP | (sees ? WEIGHTS : 0);
        live_keys = sees ? step.live : FV_BN;
        if (sees) hand_on_weights(weights, s, out, rescale, rescales, odd_keys, persistent, mods, rows, step.key);
    }
    if (has_nonfinite) recompute_nonfinite_rows(p, persistent, mods, last_item, first_row);
}
