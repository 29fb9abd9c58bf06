// The items of kernels that own tiles of keys, and the scheduler that walks them.

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

// The scheduler: one warp, whose lanes do the same.
__device__ void schedule(const BackwardParams& p, const PersistentParams& persistent, char* shared, StepBarriers barriers) {
    const u32 items = p.tile_count * p.heads_kv;
    Announcer ring = {shared, barriers};
    Step step = {};
    #pragma unroll 1
    for (u32 number = blockIdx.x; number < items; number = next_item(persistent, items)) {
        const Tile tile = p.tiles[number % p.tile_count];
        const Sequence& own = p.sequences[tile.sequence];
        step.head_kv = number / p.tile_count;
        step.key = tile.tile * FV_BN;
        step.keys = min(own.k_len - step.key, FV_BN);
        step.k_batch = own.k_batch;
        step.k_row = own.k_start + step.key;
        LiveQueries queries = {p, tile, step.head_kv};
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
            step.head = step.head_kv * FV_GROUP + queries.member;
            step.b = s.b;
            step.q_len = s.q_len;
            step.k_len = s.k_len;
            step.dq = (i64(step.head) * p.sum_rows + s.sum_row + step.query) * FV_DP;
            const bool evaluates = queries.evaluates || step.queries < FV_BM || step.keys < FV_BN;
            ++queries.tile;
            more = queries.next();
            step.kind = (evaluates ? Step::EVALUATES : 0) + (first ? Step::FIRST : 0) + (more ? 0 : Step::LAST);
            ring.announce(step);
        }
    }
    step.kind = Step::STOP;
    ring.announce(step);
}
