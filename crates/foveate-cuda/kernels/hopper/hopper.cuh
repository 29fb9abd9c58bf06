// What compute capability 9.0 has beyond 8.x, one wrapper for each form of PTX that the family uses:
// copies by tensor map (TMA), mbarriers that count bytes, matrix products of warpgroups (wgmma), and
// registers that move from one warpgroup to another.
//
// A tile in smem is made of panels: FV_D (or FV_DV) is cut into stretches of 128 bytes, and a panel is the
// rows of a tile in one stretch, in the 128-byte swizzle: the 16-byte chunk c of row r lies
// at chunk c ^ (r & 7). A panel begins at a multiple of 1024 bytes. A tensor map writes a panel in this
// order, and the descriptor of an operand says it.

typedef unsigned long long u64;

constexpr int PANEL_ROW = 128;                             // bytes
constexpr int PANEL_COLUMNS = PANEL_ROW / ELEM_BYTES;
constexpr int panels(int columns) { return ceil_div(columns, PANEL_COLUMNS); }

// A map as the driver encodes it. Kernels take it by value and hand its address to the copy.
struct alignas(64) TensorMap {
    u32 opaque[32];
};

// ---- copies ----

__device__ bool elect_one() {
    u32 elected;
    asm volatile("{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 %0, 1, 0, one; }" : "=r"(elected));
    return elected != 0;
}

__device__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// An mbarrier on which one arrival also announces bytes that copies are to deliver.
struct CopyBarrier : Mbarrier {
    __device__ void arrive_expecting(u32 bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(bytes) : "memory");
    }
};

// One panel: rows `row` .. of a box, columns `column` .., of one head of one batch entry.
__device__ void copy_panel(u32 target, const TensorMap& map, CopyBarrier barrier, int column, int row, int head,
                           int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];"
        :: "r"(target), "l"(&map), "r"(barrier.at), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
// The same where heads come in groups: head `head` of group `group`.
__device__ void copy_panel(u32 target, const TensorMap& map, CopyBarrier barrier, int column, int row, int head,
                           int group, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
        :: "r"(target), "l"(&map), "r"(barrier.at), "r"(column), "r"(row), "r"(head), "r"(group), "r"(batch)
        : "memory");
}

// Adds `bytes` of f32, a multiple of 16, from smem to memory, at addresses that are multiples of 16. What smem held
// has been read after await_bulk_reads().
__device__ void add_bulk(float* target, u32 source, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" :: "l"(target),
                 "r"(source), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ void await_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// And memory has been written.
__device__ void await_bulk_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// A count in memory that tells other CTAs how many have written something by the copy engine, one after the other. What
// a thread has awaited (await_bulk_writes) comes before the count that it publishes, and a count that a thread has read
// before what it has the copy engine write.
__device__ void publish_count(u32* at, u32 count) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(at), "r"(count) : "memory");
}
__device__ u32 read_count(const u32* at) {
    u32 count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(at) : "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return count;
}
__device__ void await_count(const u32* at, u32 count) {
#ifdef BOUNDED_WAITS
    BoundedWait bounded;
    while (read_count(at) != count) bounded.turn("as many tiles of keys have added their dQ", count);
#else
    while (read_count(at) != count) {}
#endif
}

// Writes four 8x8 matrices of 16 bits transposed: register m of lane l has elements (2 (l % 4), l / 4) of matrix m and
// the one below it, and lane 8 m + r says where row r of matrix m goes, 16 bytes.
__device__ void store_matrices_transposed(u32 at, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// Orders this thread's stores to smem before what the copy engine and wgmma read afterwards.
__device__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Makes initialised mbarriers visible to the copy engine.
__device__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// ---- pipelines ----

// A position in a ring of STAGES stages.
template <int STAGES>
struct Ring {
    int stage = 0, round = 0;

    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            ++round;
        }
    }
    __device__ Ring before() const { return stage == 0 ? Ring{STAGES - 1, round - 1} : Ring{stage - 1, round}; }
    __device__ static Ring before_first() { return Ring{0, 0}.before(); }
};

// ---- roles ----

template <int REGISTERS>
__device__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }
template <int REGISTERS>
__device__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }

// A barrier by number, among `threads` threads of the CTA. 0 is __syncthreads.
#ifdef BOUNDED_WAITS
// A thread that waits in hardware looks at no clock, so arrivals are counted in memory, which launches share: one at a
// time. As in hardware, nobody arrives for a round before the one ahead is complete.
__device__ u32 named_arrivals[1024][16];

__device__ void reset_named_barriers() {
    for (u32& arrivals : named_arrivals[blockIdx.x]) arrivals = 0;
}
__device__ void named_arrive(int id, int) {
    asm volatile("red.release.cta.global.add.u32 [%0], 1;" :: "l"(&named_arrivals[blockIdx.x][id]) : "memory");
}
__device__ void named_sync(int id, int threads) {
    const u32* const at = &named_arrivals[blockIdx.x][id];
    u32 arrivals;
    asm volatile("atom.acq_rel.cta.global.add.u32 %0, [%1], 1;" : "=r"(arrivals) : "l"(at) : "memory");
    const u32 round = arrivals / threads;
    BoundedWait bounded;
    do {
        bounded.turn(round & 1 ? "a named barrier's odd round is complete" : "a named barrier's even round is complete",
                     id);
        asm volatile("ld.acquire.cta.global.u32 %0, [%1];" : "=r"(arrivals) : "l"(at) : "memory");
    } while (arrivals / threads == round);
    __syncwarp();
}
#else
__device__ void reset_named_barriers() {}
__device__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
#endif

// ---- products of a warpgroup ----

// Where an operand lies in smem. `address` is that of its first panel.
//   rows(...): the summed axis runs along the rows of panels (Q, K of Q K^T). A product's 32 bytes lie side by side.
//   half_rows(...): the same in panels whose rows have 64 bytes, in the 64-byte swizzle.
//   columns(...): the summed axis runs across the rows (V of P V). 16 elements further is 16 rows, 2048 bytes;
//   `panel_bytes` leads from 64 columns to the next.
struct Operand {
    u64 bits;

    static constexpr u64 SWIZZLE_128 = u64(1) << 62, SWIZZLE_64 = u64(2) << 62, EIGHT_ROWS = u64(1024 >> 4) << 32;
    __device__ static Operand rows(u32 address) {
        return {SWIZZLE_128 | EIGHT_ROWS | u64(1) << 16 | (address & 0x3ffff) >> 4};
    }
    __device__ static Operand half_rows(u32 address) {
        return {SWIZZLE_64 | EIGHT_ROWS >> 1 | u64(1) << 16 | (address & 0x3ffff) >> 4};
    }
    __device__ static Operand columns(u32 address, int panel_bytes) {
        return {SWIZZLE_128 | EIGHT_ROWS | u64(panel_bytes >> 4) << 16 | (address & 0x3ffff) >> 4};
    }
    __device__ Operand operator+(int bytes) const { return {bits + (bytes >> 4)}; }
};

// d += A B, or d = A B where it does not add; the result is there after a wait. Of MMA_K summed elements.
template <int N>
__device__ void multiply_async(float (&d)[N][4], Operand a, Operand b, bool adds) { wgmma(d, a.bits, b.bits, adds); }
// The same where B runs across the summed axis.
template <int N>
__device__ void multiply_across(float (&d)[N][4], Operand a, Operand b, bool adds) {
    if (adds) wgmma_across(d, a.bits, b.bits, true);
    else wgmma_across_first(d, a.bits, b.bits);
}
// d += A B where both run across it.
template <int N>
__device__ void multiply_transposed(float (&d)[N][4], Operand a, Operand b) {
    wgmma_transposed(d, a.bits, b.bits, true);
}
// d += A B with A in registers, in the order of m16n8k16, and B across the summed axis; of e4m3 in that of m16n8k32,
// and B along it.
template <int N>
__device__ void multiply_async(float (&d)[N][4], const u32 (&a)[4], Operand b) { wgmma(d, a, b.bits); }

// Before the first product of a group: registers that the thread wrote are operands now.
__device__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products.
__device__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most LEFT groups are under way.
template <int LEFT>
__device__ void product_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }

// The compiler must not move accesses of accumulators over the point where this stands.
template <int N>
__device__ void pin(float (&x)[N][4]) {
    #pragma unroll
    for (int i = 0; i < N * 4; ++i) asm volatile("" : "+f"(x[i / 4][i % 4]) :: "memory");
}

// The assembler is free to move arithmetic behind a wait that comes after it, and does: nothing would run beside the
// products then. It does not move a store, and this one, which never happens, needs `sum`: what is never negative.
__device__ void keep_before(float sum, u32 address) {
    asm volatile("{ .reg .pred never; setp.lt.f32 never, %0, 0f00000000; @never st.shared.f32 [%1], %0; }" :: "f"(sum),
                 "r"(address)
                 : "memory");
}

// ---- the opening of a persistent kernel ----

// The same for all threads of a warp, and so the compiler knows.
__device__ int warpgroup_of_thread() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }
__device__ int warp_of_warpgroup() { return __shfl_sync(~0u, threadIdx.x / 32 % 4, 0); }

// Makes the mbarriers and fetches the maps, before any role begins.
template <typename Barriers, typename... Maps>
__device__ void prepare(const Barriers& barriers, u32 base, const Maps&... maps) {
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();
        barriers.init();
        reset_named_barriers();
        (prefetch_map(maps), ...);
    }
    __syncthreads();
}

// ---- accumulators on their way out ----

// Lane l of a quad has word l of four chunks of 16 bytes; afterwards it has chunk l.
__device__ void exchange_in_quad(u32 (&x)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    auto exchange = [](u32& low, u32& high, bool keeps_high, int distance) {
        const u32 other = __shfl_xor_sync(~0u, keeps_high ? low : high, distance);
        low = keeps_high ? other : low;
        high = keeps_high ? high : other;
    };
    exchange(x[0], x[1], odd, 1);
    exchange(x[2], x[3], odd, 1);
    exchange(x[0], x[2], upper, 2);
    exchange(x[1], x[3], upper, 2);
}
