// Parts of fv_forward on Hopper: what smem holds, what its roles hand to each other, and a consumer's two
// products.

constexpr int CONSUMERS = FV_WARPS / 4 - 1;                // warpgroups, 64 rows of queries each
constexpr int N = FV_BN / 8;                               // accumulators of a warp: 16 rows, 8 keys,
constexpr int N_OUT = FV_DVP / 8;                          // 8 columns of out

// Shared memory, in this order, in panels of 128-byte rows (see hopper.cuh):
//     Q_STAGES * FV_BM * row(FV_D)                              Q, a part for each consumer
//   + FV_STAGES * FV_BN * (row(FV_D) + row(FV_DV))              K, V; of e4m3 FV_DVP bytes a row of V
//   + 1024                                                      items, steps and mbarriers
constexpr int ROW_K = panels(FV_D) * PANEL_ROW, ROW_V = panels(FV_DV) * PANEL_ROW;
constexpr int Q_BYTES = 64 * ROW_K;                        // of a consumer
constexpr int K_BYTES = FV_BN * ROW_K;
// Of e4m3 wgmma takes operands along the summed axis only, so V comes transposed (transpose_values.cu): a panel is all
// of its columns, as rows, by so many keys.
constexpr int VALUE_KEYS = FV_BN % 128 == 0 ? 128 : 64, VALUE_PANELS = FV_BN / VALUE_KEYS;
constexpr int V_BYTES = FV_DTYPE == 3 ? FV_DVP * FV_BN : FV_BN * ROW_V;
constexpr int END_BYTES = 1024, SMEM_LIMIT = 232448;
// Two tiles of queries where there is room: the next one lands while this one is at work.
constexpr int Q_STAGES = 2 * CONSUMERS * Q_BYTES + FV_STAGES * (K_BYTES + V_BYTES) + END_BYTES <= SMEM_LIMIT ? 2 : 1;
constexpr int ITEMS = 3;                    // the item that is finished, the one at work, and the next one
constexpr int AT_K = Q_STAGES * CONSUMERS * Q_BYTES, AT_V = AT_K + FV_STAGES * K_BYTES;
constexpr int AT_ITEMS = AT_V + FV_STAGES * V_BYTES;
// Of e4m3 with scales of blocks: rows of a block are a multiple of so many, so that a consumer's queries have one
// scale, and a tile's keys these. Two places for each stage of K, since the scales are read after K was released.
constexpr int BLOCK_UNIT = 64, KEY_BLOCKS = FV_SCALE_BLOCKS ? FV_BN / BLOCK_UNIT : 1, N_BLOCK = N / KEY_BLOCKS;
constexpr int SCALE_PLACES = FV_SCALE_BLOCKS ? 2 * FV_STAGES : 0;
constexpr int ITEM_BYTES = FV_SCALE_BLOCKS ? 96 : FV_DTYPE == 3 || FV_MASK_BITS ? 80 : 64;
constexpr int AT_STEPS = AT_ITEMS + ITEM_BYTES * ITEMS, AT_SCALES = AT_STEPS + 16 * FV_STAGES;
constexpr int AT_BARRIERS = AT_SCALES + 32 * SCALE_PLACES;
constexpr int SHARED_BYTES = AT_ITEMS + END_BYTES;
extern "C" __device__ const int fv_shared_bytes = SHARED_BYTES;

static_assert(FV_DTYPE != 2, "wgmma sums 16-bit and e4m3 operands in f32; f32 operands are the portable family's");
static_assert(FV_BM == 64 * CONSUMERS && FV_WARPS % 4 == 0, "a consumer owns 64 rows");
static_assert(FV_BN % (FV_DTYPE == 3 ? 64 : 16) == 0 && FV_BN <= 256, "keys of a product");

// As exponents of 2: P is at most 2^8, but BY_SUMS, and 2^(8 - RESCALE_THRESHOLD) or more is the largest of a row so
// far. Of e4m3 that is fine from 2^-6 up: a row uses what room there is.
constexpr float LARGEST_EXPONENT = 8.f, RESCALE_THRESHOLD = FV_DTYPE == 3 ? 1.f : 8.f;
constexpr float LARGE_SCORE = 4096.f;                      // see Softmax::is_large
// Whether overlapped steps go by sums of weights instead of the largest score (Softmax::weigh_by_sums). Scores of a
// function may rise by more in a step than f32 has exponents, and dropout drops weights that have overflowed.
constexpr bool BY_SUMS = FV_OVERLAP && !FV_SCORE && !FV_DROPOUT && FV_DTYPE != 3;
// bf16 has f32's exponents, so a sum that is too large is one for the next step; f16 holds no weight from 2^16 on.
constexpr bool SUMS_LATE = BY_SUMS && FV_DTYPE == 1;
constexpr float LARGEST_SUM = SUMS_LATE ? 65536.f : 20000.f, LARGEST_FLOAT = 3.4e38f;
constexpr float LARGE_SUM = 1.3e30f;                       // 2^100; powers below 2^-126 are 0, a sink's factor too
constexpr float LOST_SUM = FV_SINK ? LARGE_SUM : 1.3e36f;  // or 2^120
constexpr float LARGE_EXPONENT = 58.f;                     // a score of 40
// Consumers take turns in starting their products, but for two that go by sums: these are faster without.
constexpr bool TAKE_TURNS = CONSUMERS > 2 || (CONSUMERS == 2 && !BY_SUMS);
// Whether a step looks at the one ahead (look_ahead): three consumers with a longer score have no registers for it.
constexpr bool LOOKS_AHEAD = CONSUMERS < 3 || !FV_SCORE || SCORE_INSTRUCTIONS < 12;
// A score function stands twice, in either kind of step.
constexpr bool SCORES_IN_LOOP = is_long(N * 4, 2 * SCORE_INSTRUCTIONS);

// Registers that the roles have after they were dealt out again; those of the launch are 65536 / THREADS.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 1 ? 56 : CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 1 ? 256 : CONSUMERS == 2 ? 232 : 160;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= 65536 / THREADS / 8 * 8 * (CONSUMERS + 1),
              "more registers than there are");

// What the scores and the out of an item are multiplied by, with FV_SCALE_BLOCKS beside what a step's are (KeyScales).
struct ItemScales {
    float scores[FV_SCALE_BLOCKS ? CONSUMERS : 1], out;
};

// A tile of queries of one head: items are numbered in the order of the schedule, the heaviest first. As the
// scheduler finds it, in smem.
struct Item {
    u32 number;
    int head;
    int tile;                   // in its sequence
    int runs;                   // of live tiles of keys; without a mask 0
    Run last_run;
    Sequence sequence;
    int stop;                   // there is no item any more, and this is none
#if FV_DTYPE == 3
    ItemScales scales;
#endif
#if FV_MASK_BITS
    int last_slot;              // that of the last run's first tile
#endif
};
static_assert(sizeof(Item) <= ITEM_BYTES, "a place of the ring");

// The cells of a tile of queries by keys: a consumer's queries by all of the keys. Two bits for each consumer, in one
// number for all of them.
struct Cells {
    static constexpr u32 LIVE = 1;       // the consumer multiplies
    // The mask cuts it, or the end of the sequence does: by mask bits or by evaluation.
    static constexpr u32 EVALUATES = 2;
    static constexpr int BITS = 2, ALL_BITS = CONSUMERS * BITS;
    // Of a run in memory, where a tile of one cell is live and has one bit.
    static constexpr int RUN_BITS = CONSUMERS == 1 ? 1 : ALL_BITS;

    // The same for every consumer.
    __device__ static constexpr u32 all(u32 cell) {
        u32 cells = 0;
        for (int c = 0; c < CONSUMERS; ++c) cells |= cell << c * BITS;
        return cells;
    }
    __device__ static u32 of(const Run& run) {
        return CONSUMERS == 1 ? LIVE | (run.count_kind & 1) << 1 : run.count_kind & ((1 << RUN_BITS) - 1);
    }
    __device__ static int tiles(const Run& run) { return u32(run.count_kind) >> RUN_BITS; }
};

// What the producer tells the consumers with a stage of K, 16 bytes in smem.
struct Step {
    int key;                    // the first key
    u32 kind;                   // the sum of the constants below, and from CELLS on the cells
    int live;                   // keys of the sequence from there on
    int slot;                   // of its mask bits

    static constexpr u32 FIRST = 1;      // of its item: Q is another one, and the item before is finished
    static constexpr u32 LAST = 2;       // of its item: Q is free after it
    static constexpr u32 STOP = 4;       // there is no item after the one before; no K, no V, no Q
    static constexpr u32 BITS = 8;       // cells that the mask cuts have mask bits
    static constexpr u32 ODD = 1u << 29; // scales of its keys or values are no usual numbers; see KeyScales
    static constexpr int CELLS = 3 + FV_MASK_BITS;

    // What a consumer makes of it.
    __device__ static u32 cell(u32 kind, int consumer) {
        return kind >> (CELLS + consumer * Cells::BITS) & ((1 << Cells::BITS) - 1);
    }
};

// Named barriers, of which 0 is __syncthreads: the turn of each consumer, and among each consumer's own threads.
struct Named {
    static constexpr int TURN = 1, OWN = TURN + CONSUMERS, COUNT = OWN + CONSUMERS;
};
static_assert(Named::COUNT <= 16, "a CTA has 16 named barriers");

// The mbarriers, 8 bytes each. A stage in round r is full for whoever has waited for round r, and empty for
// whoever has waited for round r - 1.
struct Barriers {
    u32 base;

    __device__ CopyBarrier k_full(int stage) const { return at(stage); }
    __device__ CopyBarrier k_empty(int stage) const { return at(FV_STAGES + stage); }
    __device__ CopyBarrier v_full(int stage) const { return at(2 * FV_STAGES + stage); }
    __device__ CopyBarrier v_empty(int stage) const { return at(3 * FV_STAGES + stage); }
    __device__ CopyBarrier q_full(int stage, int consumer) const {
        return at(4 * FV_STAGES + stage * CONSUMERS + consumer);
    }
    __device__ CopyBarrier q_empty(int stage, int consumer) const {
        return at(4 * FV_STAGES + (Q_STAGES + stage) * CONSUMERS + consumer);
    }
    __device__ CopyBarrier item_full(int place) const { return at(4 * FV_STAGES + 2 * Q_STAGES * CONSUMERS + place); }
    __device__ CopyBarrier item_empty(int place) const {
        return at(4 * FV_STAGES + 2 * Q_STAGES * CONSUMERS + ITEMS + place);
    }
    // The producer of K has come to the last step of an item.
    __device__ CopyBarrier item_ends() const { return at(4 * FV_STAGES + 2 * Q_STAGES * CONSUMERS + 2 * ITEMS); }

    __device__ void init() const {
        for (int s = 0; s < FV_STAGES; ++s) {
            k_full(s).init(Keys::ARRIVALS + COPIED_K);
            k_empty(s).init(CONSUMERS);
            v_full(s).init(Values::ARRIVALS);
            v_empty(s).init(CONSUMERS);
        }
        for (int s = 0; s < Q_STAGES; ++s)
            for (int c = 0; c < CONSUMERS; ++c) {
                q_full(s, c).init(COPIED_Q ? 32 : 1);
                q_empty(s, c).init(1);
            }
        for (int i = 0; i < ITEMS; ++i) {
            item_full(i).init(1);
            item_empty(i).init(2 + 4 * CONSUMERS);
        }
        item_ends().init(1);
        fence_barrier_init();
    }

private:
    __device__ CopyBarrier at(int number) const {
        CopyBarrier barrier;
        barrier.at = base + AT_BARRIERS + 8 * number;
        return barrier;
    }
};
static_assert(AT_BARRIERS - AT_ITEMS + 8 * (4 * FV_STAGES + 2 * Q_STAGES * CONSUMERS + 2 * ITEMS + 1) <= END_BYTES,
              "no room for barriers");

// The live tiles of keys of an item, from the last one: what a mask cuts then comes first, together with the
// end of the item before. A run is read while the one before it is at work.
struct LiveKeys {
    const Run* runs;
    Run ahead;
    const int* slots = nullptr;         // of runs, where the tiles that the mask cuts have mask bits
    int slot_ahead = NO_SLOTS, run_slot = NO_SLOTS;
    int left;                           // runs after the current one
    int tile, first;                    // the current run: the tile of the current step, and its first one
    u32 cells;

    __device__ LiveKeys(const ForwardParams& p, const Sequence& sequence, int own_tile, int head, int count,
                        const Run& last) {
        left = count;
        tile = first = 0;
        if constexpr (FV_MASK) {
            const int row = sequence.first_row + own_tile + head * p.lists.head_stride;
            runs = p.lists.runs + i64(row) * p.lists.capacity;
            ahead = last;
        } else {
            tile = ceil_div(sequence.k_len, FV_BN);
            const int consumers = min(ceil_div(sequence.q_len - own_tile * FV_BM, 64), CONSUMERS);
            cells = Cells::all(Cells::LIVE) & ((1u << consumers * Cells::BITS) - 1);
        }
    }

    // Runs have slots of mask bits, this one the last of them.
    __device__ void take_slots(const ForwardParams& p, const int* mask_slots, int last) {
        slots = mask_slots + (runs - p.lists.runs);
        slot_ahead = last;
    }

    __device__ bool next() {
        while (tile == first) {
            if (!FV_MASK || left == 0) return false;
            first = ahead.first;
            tile = first + Cells::tiles(ahead);
            cells = Cells::of(ahead);
            run_slot = slot_ahead;
            if (--left > 0) {
                ahead = runs[left - 1];
                if (slots) slot_ahead = slots[left - 1];
            }
        }
        --tile;
        return true;
    }

    // The slot of the current tile, negative without one.
    __device__ int slot() const { return run_slot + tile - first; }
};

// The same of a row that is computed key by key.
struct RowSteps {
    LiveKeys keys;
    int key;                            // of the current step: its first key,
    bool evaluate;                      // whether the mask is evaluated

    __device__ bool next() {
        const bool more = keys.next();
        key = keys.tile * FV_BN;
        evaluate = keys.cells != Cells::all(Cells::LIVE);
        return more;
    }
};

// s = Q K^T.
__device__ void start_qk(float (&s)[N][4], Operand queries, Operand keys) {
    #pragma unroll
    for (int k = 0; k < FV_DP / MMA_K; ++k)
        multiply_async(s, queries + (k / 4 * 64 * PANEL_ROW + k % 4 * 32),
                       keys + (k / 4 * FV_BN * PANEL_ROW + k % 4 * 32), k > 0);
}

// V of a stage.
__device__ Operand values_at(u32 address) {
    if constexpr (FV_DTYPE != 3) return Operand::columns(address, FV_BN * PANEL_ROW);
    else if constexpr (VALUE_KEYS == 128) return Operand::rows(address);
    else return Operand::half_rows(address);
}

// out += P V.
__device__ void start_pv(float (&out)[N_OUT][4], const u32 (&weights)[FV_BN / MMA_K][4], Operand values) {
    #pragma unroll
    for (int k = 0; k < FV_BN / MMA_K; ++k) {
        const int key = k * MMA_K;
        const int along = key / VALUE_KEYS * VALUE_KEYS * FV_DVP + key % VALUE_KEYS;
        multiply_async(out, weights[k], values + (FV_DTYPE == 3 ? along : key * PANEL_ROW));
    }
}

// Weights as the operand of P V. A thread's four e4m3 of it are sums of two neighbouring accumulators: keys 2c, 2c + 1,
// 8 + 2c and 9 + 2c of 16 for lane c of a quad. V has its keys in this order.
__device__ void narrow_weights(u32 (&weights)[FV_BN / MMA_K][4], const float (&s)[N][4]) {
    #pragma unroll
    for (int i = 0; i < FV_BN / MMA_K * 4; ++i) {
        if constexpr (FV_DTYPE == 3) {
            const int n = i / 4 * 4 + i % 4 / 2 * 2, half = i % 2 * 2;
            weights[i / 4][i % 4] = narrow4(s[n][half], s[n][half + 1], s[n + 1][half], s[n + 1][half + 1]);
        } else {
            weights[i / 4][i % 4] = narrow2<FV_DTYPE>(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]);
        }
    }
}

// The turns of the consumers, which follow one another in starting their products.
struct Turns {
    int consumer;

    // Nobody goes before the first turn of the first consumer.
    __device__ void begin() const {
        if (TAKE_TURNS && consumer == CONSUMERS - 1) named_arrive(Named::TURN, 256);
    }
    __device__ void await() const {
        if constexpr (TAKE_TURNS) named_sync(Named::TURN + consumer, 256);
    }
    __device__ void pass() const {
        if constexpr (TAKE_TURNS) named_arrive(Named::TURN + (consumer + 1 == CONSUMERS ? 0 : consumer + 1), 256);
    }
    // In a step without a product, for which the warps of a consumer would not have to meet: the first of them would
    // give back keys of which the others have not seen yet that they are there.
    __device__ void pass_over() const {
        if constexpr (!TAKE_TURNS) named_sync(Named::OWN + consumer, 128);
        pass();
    }
};

// Awaits the consumer's turn; neither accumulator is touched before.
__device__ void begin_turn(float (&s)[N][4], float (&out)[N_OUT][4], const Turns& turns) {
    turns.await();
    pin(s);
    pin(out);
}

// The products of a step that waits for them: both, Q K^T alone, or P V alone.
__device__ void multiply_both(float (&s)[N][4], float (&out)[N_OUT][4], const u32 (&weights)[FV_BN / MMA_K][4],
                              Operand queries, Operand keys, Operand values, const Turns& turns) {
    product_fence();
    start_qk(s, queries, keys);
    start_pv(out, weights, values);
    product_commit();
    turns.pass();
    product_wait<0>();
    pin(s);
    pin(out);
}
__device__ void multiply_keys(float (&s)[N][4], Operand queries, Operand keys, const Turns& turns) {
    product_fence();
    start_qk(s, queries, keys);
    product_commit();
    turns.pass();
    product_wait<0>();
    pin(s);
}
__device__ void multiply_values(float (&out)[N_OUT][4], const u32 (&weights)[FV_BN / MMA_K][4], Operand values,
                                const Turns& turns) {
    product_fence();
    start_pv(out, weights, values);
    product_commit();
    turns.pass();
    product_wait<0>();
    pin(out);
}

// The products of an overlapped step, of which Q K^T has come.
__device__ void multiply_overlapped(float (&s)[N][4], float (&out)[N_OUT][4], const u32 (&weights)[FV_BN / MMA_K][4],
                                    Operand queries, Operand keys, Operand values, const Turns& turns) {
    product_fence();
    start_qk(s, queries, keys);
    product_commit();
    start_pv(out, weights, values);
    product_commit();
    turns.pass();
    product_wait<1>();
    pin(s);
}
