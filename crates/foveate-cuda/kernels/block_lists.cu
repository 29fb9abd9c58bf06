// The block lists: runs of live tiles of every row of tiles, from the mask, a CTA for each row and head.
//
//   0. tables     the range tables that a CTA makes for itself                    OwnTables
//   1. cover      a thread decides 32 tiles at once by bounds                      fv_cover
//   2. cover      a warp decides the 32 tiles of an undecided word, one a lane     fv_cover
//   3. evaluate   a warp evaluates every entry of a tile that bounds leave open    fv_mask
//   4. runs       one warp turns the bits of the row into runs
//
// Barriers: __syncthreads between the phases. Shared memory: three bits a tile (live, full, undecided), so
// a row of a million keys, 16384 tiles of 64, takes 6 KiB, and behind them the tables of phase 0. For causal,
// window, prefix and document masks phase 1 decides all but a few words of a row.
//
// A tile may have several cells (see Run in params.cuh). Phases 1 to 3 then take each strip of queries as a row of
// its own, and phase 4 puts tiles together from their cells.
//
// Where a row has more runs than the list's capacity, the runs with the narrowest gaps are joined. A joined
// run is partial, so the mask is evaluated there and the result stays exact.
//
// fv_mask_bits reads the runs and writes the mask of their partial tiles, a bit a pair, as Hopper's consumers read it.

constexpr int LIST_WARPS = 8;
constexpr unsigned ALL_LANES = 0xffffffff;

// A row of tiles: positions from .. to of its own axis, and all tiles of the other axis.
struct TileRow {
    const Mods& mods;
    const Place& place;
    bool of_keys;           // the row is a tile of keys, and tiles of queries stand along it
    int from, to;
    int length, side;       // of the other axis: positions, and positions of a tile
    int columns;            // tiles

    struct Rectangle { int q0, q1, kv0, kv1; };

    __device__ Rectangle rectangle(int first, int end) const {
        int a = first * side, b = int(min(i64(end) * side, i64(length)));
        if (of_keys) return {a, b, from, to};
        return {from, to, a, b};
    }

    // Tiles first .. end by bounds: 0 empty, 1 full, 2 undecided.
    __device__ int cover(int first, int end) const {
        Rectangle r = rectangle(first, end);
        return fv_cover(mods, place, r.q0, r.q1, r.kv0, r.kv1);
    }

    // One tile by its entries: 0 empty, 1 full, 2 partial. For a whole warp.
    __device__ int evaluate(int column, int lane) const {
        Rectangle r = rectangle(column, column + 1);
        bool visible = false, hidden = false;
        for (int i = 0; i < r.q1 - r.q0; ++i) {
            // From both ends inwards: where documents meet in a tile, its first and its last row tell.
            const int q = i % 2 ? r.q1 - 1 - i / 2 : r.q0 + i / 2;
            for (int kv = r.kv0 + lane; kv < r.kv1; kv += 32) {
                bool is = fv_mask(mods, place, q, kv);
                visible |= is;
                hidden |= !is;
            }
            // Checked mods have to evaluate every index.
            if (!FV_CHECKED && __any_sync(ALL_LANES, visible) && __any_sync(ALL_LANES, hidden)) return 2;
        }
        visible = __any_sync(ALL_LANES, visible);
        hidden = __any_sync(ALL_LANES, hidden);
        return !visible ? 0 : hidden ? 2 : 1;
    }
};

// What is known of the cells of a row of tiles, a bit each.
struct Cells {
    const unsigned* lives;
    const unsigned* fulls;
    int strips, words;          // words of a strip, of 32 tiles each

    __device__ int kind_bits() const { return strips == 1 ? 1 : 2 * strips; }
    __device__ int joined() const { return (1 << kind_bits()) - 1; }

    __device__ unsigned live(int strip, int w) const {
        return unsigned(w) < unsigned(words) ? lives[strip * words + w] : 0;
    }
    __device__ unsigned partial(int strip, int w) const {
        return unsigned(w) < unsigned(words) ? lives[strip * words + w] & ~fulls[strip * words + w] : 0;
    }

    // Of a live tile.
    __device__ int kind(int tile) const {
        const int w = tile / 32, bit = tile % 32;
        if (strips == 1) return partial(0, w) >> bit & 1;
        int kind = 0;
        for (int strip = strips - 1; strip >= 0; --strip)
            kind = kind << 2 | (partial(strip, w) >> bit & 1) << 1 | (live(strip, w) >> bit & 1);
        return kind;
    }
};

// 32 tiles of a row, and where runs begin and end among them.
struct Word {
    int at;                     // the first tile
    bool open;                  // a run goes on into the word, or ends right before it
    unsigned live;
    unsigned starts, ends;      // tiles that begin a run, that follow the last one of a run

    // Word `w` of a row; one past the end is empty.
    __device__ Word(const Cells& cells, int w) : at(w * 32), open(false), live(0) {
        unsigned differs = 0;   // from the tile before
        for (int strip = 0; strip < cells.strips; ++strip) {
            const unsigned is_live = cells.live(strip, w), was_live = cells.live(strip, w - 1) >> 31;
            const unsigned is_partial = cells.partial(strip, w), was_partial = cells.partial(strip, w - 1) >> 31;
            differs |= (is_live ^ (is_live << 1 | was_live)) | (is_partial ^ (is_partial << 1 | was_partial));
            live |= is_live;
            open |= was_live;
        }
        const unsigned live_before = live << 1 | open, same = live & live_before & ~differs;
        starts = live & ~same;
        ends = live_before & ~same;
    }

    // The last live tile before tile `bit` of the word; `before` when there is none in it.
    __device__ int last_live(int bit, int before) const { return last_of(live & ((1u << bit) - 1), before); }
    // The last live tile of the word.
    __device__ int last_live(int before) const { return last_of(live, before); }
    __device__ int last_of(unsigned bits, int before) const { return bits ? at + 31 - __clz(int(bits)) : before; }
};

// Takes the lowest bit out of `bits` and gives its number.
__device__ int take_bit(unsigned& bits) {
    int bit = __ffs(int(bits)) - 1;
    bits &= bits - 1;
    return bit;
}

// The runs of one row. Every function is for a whole warp.
struct RowRuns {
    const Cells cells;
    const int words, lane;

    // Calls f(word, runs that begin before the word, last live tile before it) for every word of
    // the row and the empty one behind it, a word a lane. Returns the number of runs.
    template <typename F>
    __device__ int for_each_word(F f) const {
        int runs = 0, last = -1;
        for (int base = 0; base <= words; base += 32) {
            Word word(cells, base + lane);
            int begun = __popc(word.starts), lately = word.last_live(-1);
            for (int step = 1; step < 32; step *= 2) {
                int more = __shfl_up_sync(ALL_LANES, begun, step), other = __shfl_up_sync(ALL_LANES, lately, step);
                if (lane >= step) {
                    begun += more;
                    lately = max(lately, other);
                }
            }
            int before = __shfl_up_sync(ALL_LANES, lately, 1);
            f(word, runs + begun - __popc(word.starts), max(last, lane > 0 ? before : -1));
            runs += __shfl_sync(ALL_LANES, begun, 31);
            last = max(last, __shfl_sync(ALL_LANES, lately, 31));
        }
        return runs;
    }

    __device__ int count() const {
        return for_each_word([](const Word&, int, int) {});
    }

    // Writes all runs.
    __device__ void write(Run* runs) const {
        const int kind_bits = cells.kind_bits();
        int count = for_each_word([&](const Word& word, int begun, int) {
            int run = begun, closed = begun - word.open;
            for (unsigned bits = word.starts; bits != 0;) runs[run++].first = word.at + take_bit(bits);
            for (unsigned bits = word.ends; bits != 0;) {
                int bit = take_bit(bits);
                const int end = word.at + bit;
                runs[closed++].count_kind = int(unsigned(end) << kind_bits | unsigned(cells.kind(end - 1)));
            }
        });
        // Ends and beginnings of a run may come from two lanes.
        __syncwarp();
        for (int run = lane; run < count; run += 32)
            runs[run].count_kind = int(unsigned(runs[run].count_kind) - (unsigned(runs[run].first) << kind_bits));
    }

    // Number of gaps between neighbouring runs of at most `widest` tiles.
    __device__ int gaps(int widest) const {
        int count = 0;
        for_each_word([&](const Word& word, int, int before) {
            for (unsigned bits = word.starts; bits != 0;) {
                int bit = take_bit(bits), last = word.last_live(bit, before);
                count += last >= 0 && word.at + bit - last - 1 <= widest;
            }
        });
        for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(ALL_LANES, count, step);
        return count;
    }

    // Writes `capacity` runs where there are `count`, more than that: joins those with the
    // narrowest gaps between them, and of equal gaps the first.
    __device__ void write_joined(Run* runs, int count, int capacity) const {
        const int joins = count - capacity;
        int narrow = -1, wide = words * 32;     // gaps(narrow) < joins <= gaps(wide)
        while (wide - narrow > 1) {
            int middle = (narrow + wide) / 2;
            if (gaps(middle) < joins) narrow = middle;
            else wide = middle;
        }
        int spare = joins - gaps(narrow);
        if (lane != 0) return;
        const int kind_bits = cells.kind_bits();
        int first = -1, kind = 0, last = -1, run = 0;
        auto close = [&](int last) {
            runs[run++] = {first, int(unsigned(last + 1 - first) << kind_bits | unsigned(kind))};
        };
        for (int w = 0; w < words; ++w) {
            Word word(cells, w);
            for (unsigned starts = word.starts; starts != 0;) {
                int bit = take_bit(starts), before = word.last_live(bit, last), gap = word.at + bit - before - 1;
                if (first >= 0 && (gap < wide || (gap == wide && spare-- > 0))) {
                    kind = cells.joined();
                    continue;
                }
                if (first >= 0) close(before);
                first = word.at + bit;
                kind = cells.kind(first);
            }
            last = word.last_live(last);
        }
        close(last);
    }
};

// Strips of a row of tiles. Only lists of the Hopper forward have several: elsewhere they take no registers.
__device__ int strips_of(const BlockListsParams& p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    return 1;
#else
    return p.strips;
#endif
}

extern "C" __global__ void __launch_bounds__(LIST_WARPS * 32)
fv_block_lists(const __grid_constant__ BlockListsParams p, const __grid_constant__ Mods mods) {
    extern __shared__ unsigned lives[];
    if (p.own_tables) {
        for_each_bounded(mods, OwnTables());
        __syncthreads();
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence s = p.sequences[tile.sequence];
    const Place place = {s.b, head, head / p.group, s.q_len, s.k_len};

    const int of_row = p.of_keys ? p.tile_kv : p.tile_q, rows = p.of_keys ? s.k_len : s.q_len;
    const int side = p.of_keys ? p.tile_q : p.tile_kv, length = p.of_keys ? s.q_len : s.k_len;
    const int from = tile.tile * of_row, to = int(min(i64(from) + of_row, i64(rows)));
    const int columns = length / side + (length % side != 0), words = (columns + 31) / 32;
    const int strips = strips_of(p);
    auto strip_row = [&](int strip) -> TileRow {
        const int strip_rows = of_row / strips, first = from + strip * strip_rows;
        return {mods, place, p.of_keys != 0, first, min(first + strip_rows, to), length, side, columns};
    };

    // One bit a cell: live, full, left open by bounds.
    const int all_words = strips * words;
    unsigned* fulls = lives + all_words;
    unsigned* opens = fulls + all_words;
    const bool coarse = words > 2 * LIST_WARPS;
    for (int i = threadIdx.x; i < all_words; i += LIST_WARPS * 32) {
        const TileRow row = strip_row(i / words);
        const int first = i % words * 32, end = min(first + 32, columns), count = end - first;
        int answer = row.from >= row.to ? 0 : coarse ? row.cover(first, end) : 2;
        unsigned all = count == 32 ? ALL_LANES : (1u << count) - 1;
        lives[i] = fulls[i] = answer == 1 ? all : 0;
        opens[i] = answer == 2 ? all : 0;
    }
    __syncthreads();

    for (int i = warp; i < all_words; i += LIST_WARPS) {
        const unsigned open = opens[i];
        if (open == 0) continue;
        const int column = i % words * 32 + lane,
                  answer = open >> lane & 1 ? strip_row(i / words).cover(column, column + 1) : 0;
        unsigned full = __ballot_sync(ALL_LANES, answer == 1), undecided = __ballot_sync(ALL_LANES, answer == 2);
        if (lane == 0) {
            lives[i] = fulls[i] = full;
            opens[i] = undecided;
        }
    }
    __syncthreads();

    int turn = 0;
    for (int i = 0; i < all_words; ++i)
        for (unsigned open = opens[i]; open != 0; ++turn) {
            int bit = take_bit(open);
            if (turn % LIST_WARPS != warp) continue;
            int answer = strip_row(i / words).evaluate(i % words * 32 + bit, lane);
            if (lane == 0 && answer != 0) atomicOr(lives + i, 1u << bit);
            if (lane == 0 && answer == 1) atomicOr(fulls + i, 1u << bit);
        }
    __syncthreads();

    if (warp != 0) return;
    const i64 at = s.first_row + tile.tile + i64(head) * p.head_stride;
    const RowRuns runs = {{lives, fulls, strips, words}, words, lane};
    const int count = runs.count();
    if (count <= p.capacity) runs.write(p.runs + at * p.capacity);
    else runs.write_joined(p.runs + at * p.capacity, count, p.capacity);
    if (lane == 0) p.counts[at] = min(count, p.capacity);
}

// The order in which tiles of keys add to a tile of queries, which is that of their numbers: how many of those that see
// it come before, for each. A warp counts for one tile of queries of a sequence, 32 tiles of keys at a time, one a
// lane.
extern "C" __global__ void __launch_bounds__(LIST_WARPS * 32)
fv_dq_ranks(const __grid_constant__ BlockListsParams p) {
    const int lane = threadIdx.x % 32, column = blockIdx.z * LIST_WARPS + threadIdx.x / 32;
    const Sequence s = p.sequences[blockIdx.x];
    const int tiles = s.k_len / p.tile_kv + (s.k_len % p.tile_kv != 0);
    int before = 0;
    for (int base = 0; base < tiles && column < p.columns; base += 32) {
        const i64 row = s.first_row + base + lane + i64(blockIdx.y) * p.head_stride;
        bool live = false;
        if (base + lane < tiles) {
            const Run* runs = p.runs + row * p.capacity;
            for (int i = 0; i < p.counts[row] && !live; ++i)
                live = runs[i].first <= column && column < runs[i].first + (runs[i].count_kind >> 1);
        }
        const unsigned all = __ballot_sync(ALL_LANES, live);
        if (live) p.ranks[row * p.columns + column] = before + __popc(all & ((1u << lane) - 1));
        before += __popc(all);
    }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
// The mask bits of partial tiles, in the order in which accumulators of Hopper's consumers have their pairs: rows of
// them are positions of the list's own axis, 16 a warp. A tile stands at its slot, [warps][lanes][mask_words(side)];
// bit j of a lane is that of its j-th number, and false for what the sequence has not got. Runs of a row get slots in
// order, as long as all of a run's tiles find room. CTAs along z share a row.
extern "C" __global__ void __launch_bounds__(LIST_WARPS * 32)
fv_mask_bits(const __grid_constant__ BlockListsParams p, const __grid_constant__ Mods mods) {
    const int lane = threadIdx.x % 32, head = blockIdx.y;
    const int turn = blockIdx.z * LIST_WARPS + threadIdx.x / 32, turns = gridDim.z * LIST_WARPS;
    const Tile tile = p.tiles[blockIdx.x];
    const Sequence s = p.sequences[tile.sequence];
    const Place place = {s.b, head, head / p.group, s.q_len, s.k_len};
    const int of_row = p.of_keys ? p.tile_kv : p.tile_q, rows = p.of_keys ? s.k_len : s.q_len;
    const int side = p.of_keys ? p.tile_q : p.tile_kv, length = p.of_keys ? s.q_len : s.k_len;
    const int warps = of_row / 16, words = mask_words(side);
    const int strips = strips_of(p), kind_bits = strips == 1 ? 1 : 2 * strips, warps_of_strip = warps / strips;
    const i64 row = s.first_row + tile.tile + i64(head) * p.head_stride;
    int next = 0, passed = 0;           // slots that are taken, warps' parts before the run
    for (int i = 0; i < p.counts[row]; ++i) {
        const Run run = p.runs[row * p.capacity + i];
        const int kind = run.count_kind & ((1 << kind_bits) - 1), tiles = int(unsigned(run.count_kind) >> kind_bits);
        const bool partial = strips == 1 ? kind : kind & 0xaaaaaaaa;
        const bool fits = partial && tiles <= p.row_slots - next;
        const i64 slot = row * p.row_slots + next;
        if (turn == 0 && lane == 0) p.mask_slots[row * p.capacity + i] = fits ? int(slot) : NO_SLOTS;
        if (!fits) continue;
        for (int part = (turn + turns - passed % turns) % turns; part < tiles * warps; part += turns) {
            const int warp = part % warps, column = run.first + part / warps;
            // Nobody reads a cell that is not live.
            if (strips > 1 && !(kind >> 2 * (warp / warps_of_strip) & 1)) continue;
            const int down = tile.tile * of_row + warp * 16 + lane / 4, across = column * side + lane % 4 * 2;
            u32* const to = p.mask_bits + ((slot * warps + i64(part)) * 32 + lane) * words;
            for (int word = 0; word < words; ++word) {
                u32 bits = 0;
                const int numbers = min(32, side / 2 - word * 32);
                #pragma unroll 4
                for (int j = 0; j < numbers; ++j) {
                    const int number = word * 32 + j, a = down + number % 4 / 2 * 8,
                              b = across + number / 4 * 8 + number % 2;
                    const bool is = a < rows && b < length &&
                                    (p.of_keys ? fv_mask(mods, place, b, a) : fv_mask(mods, place, a, b));
                    bits |= u32(is) << j;
                }
                to[word] = bits;
            }
        }
        next += tiles;
        passed += tiles * warps;
    }
}
#endif
