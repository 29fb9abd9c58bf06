// Varlen sequences from cu_seqlens in device memory: fv_sequences<<<1, FV_WARPS * 32>>>
//
// Writes every sequence, and the tiles of one axis. The host knows the maximum number of tiles, not the
// number: unused entries get the first tile of an empty sequence, which follows the others. The tiles are
// listed backwards, because under most masks the last tiles of a sequence have the most live tiles.
//
// Offsets may hold anything. Each is clamped to the rows of the tensor and to the offset before it, so
// sequences lie inside the tensors and do not overlap. A sequence is cut at the longest length that the
// caller gave.
//
// Roles: a thread processes one sequence at a time. Barriers: the __syncthreads of the scans.
// Shared memory: 4 bytes for each warp.

extern "C" __device__ const int fv_shared_bytes = FV_WARPS * 4;

constexpr int SEQUENCE_THREADS = FV_WARPS * 32;

// What stands in place of a captured buffer's number in a report: offsets of queries, of keys.
constexpr int OFFSETS_Q = -2, OFFSETS_K = -3;

struct Largest { static __device__ int of(int x, int y) { return max(x, y); } };
struct Total { static __device__ int of(int x, int y) { return x + y; } };

// The inclusive prefix of this thread, and the reduction over the CTA.
struct Scan { int here, all; };

template <typename Join>
__device__ Scan scan(int x, int* of_warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        int before = __shfl_up_sync(0xffffffff, x, step);
        if (lane >= step) x = Join::of(x, before);
    }
    __syncthreads();    // all threads have read of_warps of the scan before
    if (lane == 31) of_warps[warp] = x;
    __syncthreads();
    int all = of_warps[0];
    for (int w = 1; w < FV_WARPS; ++w) {
        if (w == warp) x = Join::of(x, all);
        all = Join::of(all, of_warps[w]);
    }
    return {x, all};
}

// The rows of this thread's sequence on one axis.
struct Span { int start, length; };

// `reached` is the end of the sequences of earlier rounds, and advances to the end of this round's.
__device__ Span span_of(const SequencesParams& p, bool keys, int i, int& reached, int* of_warps) {
    const int* offsets = keys ? p.cu_k : p.cu_q;
    const int rows = keys ? p.rows_k : p.rows_q, longest = keys ? p.longest_k : p.longest_q;
    auto row = [&](int offset) { return max(0, min(offset, rows)); };
    const int first = i < p.count ? offsets[i] : 0, last = i < p.count ? offsets[i + 1] : 0;
    const Scan scanned = scan<Largest>(row(first), of_warps);
    const int start = max(reached, scanned.here), end = max(start, row(last));
    reached = max(reached, scanned.all);
    if (i >= p.count) return {0, 0};
    if (p.report) {
        if (i == 0 && first != start) report_index(p.report, keys ? OFFSETS_K : OFFSETS_Q, 0, first);
        if (last != end || end - start > longest) report_index(p.report, keys ? OFFSETS_K : OFFSETS_Q, i + 1, last);
    }
    return {start, min(end - start, longest)};
}

extern "C" __global__ void __launch_bounds__(SEQUENCE_THREADS) fv_sequences(const __grid_constant__ SequencesParams p) {
    extern __shared__ int of_warps[];
    int reached_q = 0, reached_k = 0, tiles = 0;
    for (int base = 0; base < p.count; base += SEQUENCE_THREADS) {
        const int i = base + threadIdx.x;
        const Span q = span_of(p, false, i, reached_q, of_warps), k = span_of(p, true, i, reached_k, of_warps);
        const int length = p.of_keys ? k.length : q.length, own = length / p.side + (length % p.side != 0);
        const Scan before = scan<Total>(own, of_warps);
        // Rounded up to 16 rows, a sequence ends before floor16(its end) + 16 (i + 1).
        if (i < p.count)
            p.sequences[i] = {
                i, 0, 0, q.start, q.length, k.start, k.length, tiles + before.here - own, q.start / 16 * 16 + 16 * i};
        tiles += before.all;
    }
    if (threadIdx.x == 0) p.sequences[p.count] = {0, 0, 0, 0, 0, 0, 0, p.tile_capacity, 0};
    __syncthreads();

    for (int slot = threadIdx.x; slot < p.tile_capacity; slot += SEQUENCE_THREADS) {
        Tile tile = {p.count, 0};
        const int row = p.of_keys ? slot : tiles - 1 - slot;
        if (row >= 0 && row < tiles) {
            // The last sequence that begins at the row or before it.
            int sequence = 0, end = p.count;
            while (end - sequence > 1) {
                int middle = sequence + (end - sequence) / 2;
                if (p.sequences[middle].first_row <= row) sequence = middle;
                else end = middle;
            }
            tile = {sequence, row - p.sequences[sequence].first_row};
        }
        p.tiles[slot] = tile;
    }
}
