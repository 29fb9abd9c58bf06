// How the CTAs of fv_forward divide the work: tiles of queries and heads in the order of the schedule, and
// for each the live tiles of keys.

// The tile and the head of a CTA. CTAs start in the order of blockIdx, and the first tiles of a mask have
// the most live tiles: p.interleaved_heads heads are interleaved at each tile, so that the longest CTAs start
// first and short ones fill the last wave.
struct WorkItem {
    u32 tile, head;

    // Of a launch over tiles x heads.
    __device__ static WorkItem of(const ForwardParams& p) {
        return at(p, blockIdx.x, blockIdx.y, gridDim.x, gridDim.y);
    }

    // Item `number` of a launch whose CTAs take one after the other, of all tiles and heads.
    __device__ static WorkItem number(const ForwardParams& p, u32 number) {
        return at(p, number % p.tile_count, number / p.tile_count, p.tile_count, p.heads_q);
    }

    // Item (x, y) of `tiles` x `heads_in_all`.
    __device__ static WorkItem at(const ForwardParams& p, u32 x, u32 y, u32 tiles, u32 heads_in_all) {
        if constexpr (!FV_MASK) return {x, y};
        const u32 together = p.interleaved_heads, first = y / together * together;
        const u32 heads = min(together, heads_in_all - first), number = (y - first) * tiles + x;
        return {number / heads, first + number % heads};
    }
};

// Iterates over the live tiles of keys of a CTA.
struct Steps {
    const Run* runs;
    int left;                           // runs after the current one
    int budget = 0;                     // remaining steps of this CTA's KV split
    int tile = 0, end = 0;              // remaining tiles of the current run
    bool run_evaluates = false;

    int key;                            // of the current step: its first key,
    bool evaluate;                      // whether the mask is evaluated

    // The live tiles of keys of tile `queries`; with split-KV those of split `kv_split`.
    __device__ Steps(const ForwardParams& p, const Sequence& sequence, const Tile& queries, int head, int kv_split) {
        if constexpr (FV_MASK) {
            int row = sequence.first_row + queries.tile + head * p.lists.head_stride;
            runs = p.lists.runs + i64(row) * p.lists.capacity;
            left = __ldg(p.lists.counts + row);
        } else {
            left = 0;
            end = ceil_div(sequence.k_len, FV_BN);
        }
        if constexpr (FV_KV_SPLIT) {
            int live_tiles = end;
            for (int i = 0; i < left; ++i) live_tiles += __ldg(&runs[i].count_kind) >> 1;
            int from = int(i64(live_tiles) * kv_split / p.kv_splits);
            budget = int(i64(live_tiles) * (kv_split + 1) / p.kv_splits) - from;
            while (from > 0) {
                open();
                int skipped = min(from, end - tile);
                tile += skipped;
                from -= skipped;
            }
        }
    }

    // Advances to the next run if the current one is exhausted.
    __device__ bool open() {
        while (tile == end) {
            if (left == 0) return false;
            int count_kind = __ldg(&runs->count_kind);
            tile = __ldg(&runs->first);
            end = tile + (count_kind >> 1);
            run_evaluates = count_kind & 1;
            ++runs;
            --left;
        }
        return true;
    }

    __device__ bool next() {
        if (FV_KV_SPLIT && budget-- == 0) return false;
        if (!open()) return false;
        key = tile++ * FV_BN;
        evaluate = run_evaluates;
        return true;
    }
};

// The row of the partial results, among those of all KV splits.
[[maybe_unused]] __device__ i64 partial_row(const ForwardParams& p, const Sequence& sequence, int head, int query) {
    return blockIdx.z * p.partial_rows + sequence.q_batch * p.partial_batch + head * p.partial_head + sequence.q_start +
           query;
}
