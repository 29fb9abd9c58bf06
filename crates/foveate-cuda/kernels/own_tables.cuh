// Range tables that a CTA makes for itself in shared memory: those of fv_range_table, see ranges.cuh.
//
// Every CTA makes them anew. Where buffers are small that takes less time than a launch before this one.
// Barriers: a __syncthreads before each level but the first; the caller's own comes after the last.

struct OwnTables {
    template <typename Ends>
    static __device__ Ends of_lane(Ends x, int distance) {
        return {__shfl_xor_sync(0xffffffff, x.lo, distance), __shfl_xor_sync(0xffffffff, x.hi, distance)};
    }

    // The table of a buffer, if it is one of these.
    template <typename Elem, typename Ends, int RANK>
    __device__ void operator()(const Elem* elems, const Ends* table, const Axis (&axes)[RANK]) const {
        if (!is_own(table)) return;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
        const Axis& last = axes[RANK - 1];
        const int blocks = (last.length + RANGE_BLOCK - 1) / RANGE_BLOCK;
        const bool dense = last.stride < 0;
        const i64 step = dense ? 1 : last.stride;
        int entries = blocks;
        #pragma unroll
        for (int a = 0; a < RANK - 1; ++a) entries *= axes[a].length;

        // 8 lanes to a block, so that a warp reads 128 elements that lie together.
        Ends* level = own_table(table);
        for (int first = warp * 4; first < entries; first += warps * 4) {
            const int entry = min(first + lane / 8, entries - 1), from = entry % blocks * RANGE_BLOCK;
            int row = entry / blocks;
            const Elem* at = elems + (dense ? i64(row) * last.length : 0);
            #pragma unroll
            for (int a = RANK - 2; a >= 0; --a) {
                if (!dense) at += row % axes[a].length * axes[a].stride;
                row /= axes[a].length;
            }
            auto element = [&](int k) { return ends_at(at + min(from + k, last.length - 1) * step); };
            Ends ends = element(lane % 8 * 4);
            #pragma unroll
            for (int k = 1; k < 4; ++k) ends = join(ends, element(lane % 8 * 4 + k));
            #pragma unroll
            for (int distance = 1; distance < 8; distance *= 2) ends = join(ends, of_lane(ends, distance));
            if (lane % 8 == 0 && first + lane / 8 < entries) level[entry] = ends;
        }
        for (int reach = 1; 2 * reach <= blocks; reach *= 2) {
            __syncthreads();
            Ends* next = level + entries;
            for (int i = threadIdx.x; i < entries; i += blockDim.x)
                next[i] = i % blocks + reach < blocks ? join(level[i], level[i + reach]) : level[i];
            level = next;
        }
    }
};
