// Rings, turns and roles of a CTA of a producer and two consumers.

constexpr int STAGES = 3, TURNS = 1000, ROWS = 16, STAGE_BYTES = ROWS * PANEL_ROW, AT_BARRIERS = PROBE_BYTES - 1024;

// Who arrives at which mbarrier: for a full stage `filling` threads, for an empty one each warp of the consumers.
struct Barriers {
    u32 base;
    int filling;

    __device__ CopyBarrier full(int stage) const { return {base + AT_BARRIERS + stage * 8}; }
    __device__ CopyBarrier empty(int stage) const { return {base + AT_BARRIERS + (STAGES + stage) * 8}; }
    __device__ void init() const {
        for (int stage = 0; stage < STAGES; ++stage) {
            full(stage).init(filling);
            empty(stage).init(2 * 4);
        }
        fence_barrier_init();
    }
};

// Turn t is rows 16 t .. of [TURNS * 16, 64] elements, by the map or, by the lanes of a warp, from `input`.
template <bool COPIED>
__device__ void fill_stages(const Barriers& barriers, const TensorMap& map, const char* input) {
    Ring<STAGES> at;
    for (int turn = 0; turn < TURNS; ++turn) {
        barriers.empty(at.stage).wait(at.round - 1);
        const u32 target = barriers.base + at.stage * STAGE_BYTES;
        const CopyBarrier full = barriers.full(at.stage);
        if constexpr (COPIED) {
            for (int i = threadIdx.x % 32; i < STAGE_BYTES / 16; i += 32)
                copy_async<16>(target + i / 8 * PANEL_ROW + (i % 8 ^ i / 8 % 8) * 16,
                               input + turn * STAGE_BYTES + i * 16, 16);
            full.arrive_after_copies();
        } else {
            full.arrive_expecting(STAGE_BYTES);
            copy_panel(target, map, full, 0, turn * ROWS, 0, 0);
        }
        at.advance();
    }
}

// A consumer reads each stage by loads, in an order that counts, and by a product with 1 + turn % 7.
template <bool COPIED>
__device__ void read_stages(const Barriers& barriers, int consumer, u32* out) {
    constexpr int WORDS = STAGE_BYTES / 4 / 128;
    const int thread = threadIdx.x % 128;
    float d[8][4] = {};
    u32 seen[WORDS] = {};
    Ring<STAGES> at;
    for (int turn = 0; turn < TURNS; ++turn) {
        barriers.full(at.stage).wait(at.round);
        if constexpr (COPIED) fence_async_proxy();
        if (turn % 5 == consumer) __nanosleep(500);
        #pragma unroll
        for (int i = 0; i < WORDS; ++i)
            seen[i] = seen[i] * 31 + shared[at.stage * (STAGE_BYTES / 4) + i * 128 + thread];
        const float weight = 1 + turn % 7;
        const u32 both = narrow2<FV_DTYPE>(weight, weight), a[4] = {both, both, both, both};
        pin(d);
        product_fence();
        multiply_async(d, a, Operand::columns(barriers.base + at.stage * STAGE_BYTES, 0));
        product_commit();
        product_wait<0>();
        pin(d);
        barriers.empty(at.stage).arrive_warp();
        at.advance();
    }
    u32* const own = out + (consumer * 128 + thread) * (WORDS + 32);
    #pragma unroll
    for (int i = 0; i < WORDS; ++i) own[i] = seen[i];
    #pragma unroll
    for (int i = 0; i < 32; ++i) own[WORDS + i] = __float_as_uint(d[i / 4][i % 4]);
}

template <bool COPIED>
__device__ void run_ring(const TensorMap& map, const u32* input, u32* out) {
    const u32 base = aligned_base();
    const Barriers barriers = {base, COPIED ? 32 : 1};
    if constexpr (COPIED) prepare(barriers, base);
    else prepare(barriers, base, map);
    const int warpgroup = warpgroup_of_thread();
    if (warpgroup > 0) read_stages<COPIED>(barriers, warpgroup - 1, out);
    else if (warp_of_warpgroup() == 0 && (COPIED || elect_one()))
        fill_stages<COPIED>(barriers, map, reinterpret_cast<const char*>(input));
}

extern "C" __global__ void __launch_bounds__(384, 1)
ring_of_loads(const __grid_constant__ TensorMap map, const u32* input, u32* out) { run_ring<false>(map, input, out); }
extern "C" __global__ void __launch_bounds__(384, 1)
ring_of_copies(const __grid_constant__ TensorMap map, const u32* input, u32* out) { run_ring<true>(map, input, out); }

// Two consumers take turns at words that the last one wrote; each hands a word on to the thread beside it.
extern "C" __global__ void __launch_bounds__(384, 1)
turns(const __grid_constant__ TensorMap map, const u32* input, u32* out) {
    constexpr int TURN = 1, OWN = 3;
    const int consumer = warpgroup_of_thread() - 1, thread = threadIdx.x % 128;
    if (consumer < 0) shared[thread] = input[thread];
    __syncthreads();
    if (consumer < 0) return;
    if (consumer == 1) named_arrive(TURN, 256);
    for (int turn = 0; turn < TURNS; ++turn) {
        named_sync(TURN + consumer, 256);
        const u32 before = shared[thread];
        named_sync(OWN + consumer, 128);
        shared[(thread + 1) % 128] = before * 5 + (consumer + 1) * (turn + 1) + thread;
        if (consumer == 0 || turn + 1 < TURNS) named_arrive(TURN + (consumer ^ 1), 256);
    }
    if (consumer == 0) return;
    named_sync(OWN + consumer, 128);
    out[thread] = shared[thread];
}
