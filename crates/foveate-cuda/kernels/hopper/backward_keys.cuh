// The items of kernels that own tiles of keys: the scheduler that walks them, and the producers of their tiles.

// Query heads of an item: all those of a KV head, or with FV_SPLIT_GQA one, whose dK and dV fv_group_sums adds to those
// of the others.
constexpr int ITEM_HEADS = FV_SPLIT_GQA ? 1 : FV_GROUP;

// A tile of keys and the heads of an item, as CTAs take them one after the other: where a mask makes some heavier than
// others, p.interleaved_heads of all that have items take turns at each tile, so that the heaviest items of all of them
// come first; and where CTAs add dQ in order, so that few of those that start together add to the same.
struct KeysItem {
    u32 tile, heads;                    // ITEM_HEADS query heads from heads * ITEM_HEADS on

    __device__ static u32 all_heads(const BackwardParams& p) { return FV_SPLIT_GQA ? p.heads_q : p.heads_kv; }
    __device__ static KeysItem number(const BackwardParams& p, u32 number) {
        if constexpr (!FV_MASK && !FV_ORDERED_DQ) return {number % p.tile_count, number / p.tile_count};
        const u32 together = p.interleaved_heads * p.tile_count, first = number / together * p.interleaved_heads;
        const u32 heads = min(p.interleaved_heads, all_heads(p) - first), place = number % together;
        return {place / heads, first + place % heads};
    }
};

// Slots of mask bits, of each run; null where there are none.
__device__ const int* mask_slots_of(const PersistentParams& persistent) {
    return FV_MASK_BITS ? persistent.mask_slots : nullptr;
}

#if FV_ORDERED_DQ
// Iterates over the live tiles of queries of an item, from the last to the first: of every sequence that reads its
// keys, and of every query head of the item, one tile of each in turn where the mask does not tell heads apart. All
// items of a sequence begin with the same tile and go the same way, so each follows those before it at a distance and
// adds to dq_accum after them without having to wait for long.
struct LiveQueries {
    const BackwardParams& p;
    const int* const mask_slots;
    const Tile keys;
    const int first_head;
    int sequence = -1, member = ITEM_HEADS - 1;    // of those that read the keys, and of the heads
    i64 row = 0;                        // of the lists
    int runs = 0;                       // that remain
    int tile = 0, first = 0;            // remaining tiles of the current run
    bool evaluates = false;
    int slot = NO_SLOTS;                // of the mask bits of the tile, negative without

    // Whether heads have lists of their own.
    __device__ bool by_head() const { return FV_MASK && p.lists.head_stride != 0; }

    __device__ bool next() {
        if (!by_head()) {
            if (++member < ITEM_HEADS) return true;
            member = 0;
        }
        --tile;
        --slot;
        while (tile < first) {
            if (FV_MASK && runs > 0) {
                const Run run = p.lists.runs[row * p.lists.capacity + --runs];
                first = run.first;
                tile = first + (run.count_kind >> 1) - 1;
                evaluates = run.count_kind & 1;
                if (FV_MASK_BITS && mask_slots) slot = mask_slots[row * p.lists.capacity + runs] + tile - first;
                continue;
            }
            if (!by_head() || ++member == ITEM_HEADS) {
                member = 0;
                if (++sequence == p.sharing) return false;
            }
            const Sequence& s = p.sequences[keys.sequence + sequence];
            first = 0;
            tile = -1;
            if constexpr (FV_MASK) {
                row = s.first_row + keys.tile + (first_head + member) * p.lists.head_stride;
                runs = p.lists.counts[row];
            } else {
                tile = ceil_div(s.q_len, FV_BM) - 1;
            }
        }
        return true;
    }

    // How many tiles of keys add to dq_accum of the tile of queries before this one. Those of a sequence stand in
    // p.tiles in order.
    __device__ int rank() const { return FV_MASK ? p.dq_ranks[row * p.dq_rank_columns + tile] : keys.tile; }
};
#else
// Iterates over the live tiles of queries of an item: of every sequence that reads its keys, and of each of its query
// heads.
struct LiveQueries {
    const BackwardParams& p;
    const int* const mask_slots;
    const Tile keys;
    const int first_head;
    int sequence = 0, member = -1;      // of those that read the keys, and of the heads
    const Run* at = nullptr;            // the remaining runs
    int runs = 0;
    int tile = -1, end = 0;             // remaining tiles of the current run
    bool evaluates = false;
    int slot = NO_SLOTS;                // of the mask bits of the tile, negative without

    __device__ bool next() {
        ++tile;
        ++slot;
        while (tile == end) {
            if (runs == 0) {
                if (++member == ITEM_HEADS) {
                    member = 0;
                    if (++sequence == p.sharing) return false;
                }
                const Sequence& s = p.sequences[keys.sequence + sequence];
                if constexpr (FV_MASK) {
                    const int row = s.first_row + keys.tile + (first_head + member) * p.lists.head_stride;
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
                if (FV_MASK_BITS && mask_slots) slot = mask_slots[at - p.lists.runs];
                ++at;
            }
        }
        return true;
    }
};
#endif

// Writes a consumer's rows of dK or dV of an item, of which `done` is a step: to `view`, or with FV_SPLIT_GQA as that
// of the query head to `of_head`.
template <int COLUMNS>
__device__ void store_of_keys(const BackwardParams& p, const View& view, const View& of_head, const Step& done, int dim,
                              const float (&sums)[COLUMNS][4], float factor) {
    if constexpr (FV_SPLIT_GQA)
        store_gradient(of_head, of_head.at(done.k_batch, done.head, done.k_row), done.keys, dim, sums, factor, false);
    else
        store_gradient(view, view.at(done.k_batch, done.head_kv, done.k_row), done.keys, dim, sums, factor,
                       p.accumulate);
}

// The scheduler: one warp, whose lanes do the same.
__device__ void schedule(const BackwardParams& p, const PersistentParams& persistent, char* shared,
                         StepBarriers barriers) {
    const u32 items = p.tile_count * KeysItem::all_heads(p);
    Announcer ring = {shared, barriers};
    Step step = {};
    #pragma unroll 1
    for (u32 number = first_item(persistent, items); number < items; number = next_item(persistent, items)) {
        const KeysItem item = KeysItem::number(p, number);
        const Tile tile = p.tiles[item.tile];
        const Sequence& own = p.sequences[tile.sequence];
        step.head = item.heads * ITEM_HEADS;
        step.head_kv = step.head / FV_GROUP;
        step.key = tile.tile * FV_BN;
        step.keys = min(own.k_len - step.key, FV_BN);
        step.k_batch = own.k_batch;
        step.k_row = own.k_start + step.key;
        LiveQueries queries = {p, mask_slots_of(persistent), tile, step.head};
        bool more = queries.next();
        if (!more) {
            step.kind = Step::EMPTY | Step::FIRST | Step::LAST;
            ring.announce(step);
        }
        #pragma unroll 1
        for (bool first = true; more; first = false) {
            const Sequence& s = p.sequences[tile.sequence + queries.sequence];
            step.query = queries.tile * FV_BM;
            step.queries = s.q_len - step.query;
            step.q_batch = s.q_batch;
            step.q_row = s.q_start + step.query;
            step.head = queries.first_head + queries.member;
            step.b = s.b;
            step.q_len = s.q_len;
            step.k_len = s.k_len;
#if FV_ORDERED_DQ
            step.dq = (step.head * p.sum_rows + s.sum_row + step.query) / 16;
            step.dq_rank = queries.rank();
#else
            step.dq = (i64(step.head) * p.sum_rows + s.sum_row + step.query) * FV_DP;
#endif
            const bool cut = step.queries < FV_BM || step.keys < FV_BN;
            const bool has_bits = FV_MASK_BITS && queries.evaluates && queries.slot >= 0 && !cut;
            const int of_mask = has_bits                   ? Step::BITS + queries.slot * Step::SLOT
                                : queries.evaluates || cut ? Step::EVALUATES
                                                           : 0;
            more = queries.next();
            step.kind = of_mask + (first ? Step::FIRST : 0) + (more ? 0 : Step::LAST);
            ring.announce(step);
        }
    }
    step.kind = Step::STOP;
    ring.announce(step);
}

// The producer of K and Q: one thread.
template <typename Barriers>
__device__ void copy_k_and_q(const Copies& copies, const Barriers& barriers, const TensorMap& map_k,
                             const TensorMap& map_q) {
    const PersistentParams& at = copies.persistent;
    Ring<FV_STAGES> q;
    int item = -1;
    copies.for_each_step([&](const Step& step) {
        if (step.kind & Step::FIRST) {
            barriers.k_empty().wait(item++);
            barriers.k_full().arrive_expecting(K_BYTES);
            copies.keys<FV_D>(copies.base, map_k, barriers.k_full(), step, at.k_head, at.k_batch);
        }
        barriers.q_empty(q.stage).wait(q.round - 1);
        barriers.q_full(q.stage).arrive_expecting(Q_BYTES);
        copies.queries<FV_BM, FV_D>(copies.base + AT_Q + q.stage * Q_BYTES, map_q, barriers.q_full(q.stage), step,
                                    at.q_head, at.q_group, at.q_batch);
        q.advance();
    });
}

// Copies V and dO of one step after the other.
template <typename Barriers>
struct ValueCopier {
    const Copies& copies;
    const Barriers& barriers;
    const TensorMap& map_v;
    const TensorMap& map_d_out;
    Ring<FV_STAGES> d_out;
    int item = -1;

    __device__ void copy(const Step& step) {
        const PersistentParams& at = copies.persistent;
        if (step.kind & Step::FIRST) {
            barriers.v_empty().wait(item++);
            barriers.v_full().arrive_expecting(V_BYTES);
            copies.keys<FV_DV>(copies.base + AT_V, map_v, barriers.v_full(), step, at.v_head, at.v_batch);
        }
        barriers.d_out_empty(d_out.stage).wait(d_out.round - 1);
        barriers.d_out_full(d_out.stage).arrive_expecting(D_OUT_BYTES);
        copies.queries<FV_BM, FV_DV>(copies.base + AT_D_OUT + d_out.stage * D_OUT_BYTES, map_d_out,
                                     barriers.d_out_full(d_out.stage), step, at.d_out_head, at.d_out_group,
                                     at.d_out_batch);
        d_out.advance();
    }
};

// The producer of V and dO: one thread.
template <typename Barriers>
__device__ void copy_v_and_d_out(const Copies& copies, const Barriers& barriers, const TensorMap& map_v,
                                 const TensorMap& map_d_out) {
    ValueCopier<Barriers> values = {copies, barriers, map_v, map_d_out};
    copies.for_each_step([&](const Step& step) { values.copy(step); });
}
