// A block of threads on the CPU: every thread is a coroutine, and a collective operation lets the
// others run until all of its warp (or block) have come to it.
#include <functional>
#include <ucontext.h>
#include <vector>

#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
#define FV_CHECKED 0

struct Index { int x, y, z; };

struct Meeting { int arrived = 0, round = 0; unsigned given[32], taken[32]; };

struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 << 10);
    Index index;
    bool done = false;
};

static std::vector<Thread> threads;
static std::vector<Meeting> warps;
static Meeting block;
static ucontext_t scheduler;
static Thread* current;
static Index blockIdx, blockDim, gridDim;
static std::function<void()> body;

#define threadIdx (current->index)

static void pause() { swapcontext(&current->context, &scheduler); }

static void meet(Meeting& m, int count) {
    int round = m.round;
    if (++m.arrived == count) {
        memcpy(m.taken, m.given, sizeof m.taken);
        m.arrived = 0;
        ++m.round;
    }
    while (m.round == round) pause();
}

static const unsigned* exchange(unsigned x) {
    Meeting& warp = warps[threadIdx.x / 32];
    warp.given[threadIdx.x % 32] = x;
    meet(warp, 32);
    return warp.taken;
}

static void __syncthreads() { meet(block, int(threads.size())); }
static void __syncwarp() { exchange(0); }
static unsigned __ballot_sync(unsigned, bool x) {
    const unsigned* all = exchange(x);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= all[i] << i;
    return bits;
}
static bool __any_sync(unsigned lanes, bool x) { return __ballot_sync(lanes, x) != 0; }
static int __shfl_sync(unsigned, int x, int from) { return int(exchange(unsigned(x))[from]); }
static int __shfl_up_sync(unsigned, int x, int by) {
    int lane = threadIdx.x % 32;
    return int(exchange(unsigned(x))[lane < by ? lane : lane - by]);
}
static int __shfl_xor_sync(unsigned, int x, int by) { return int(exchange(unsigned(x))[threadIdx.x % 32 ^ by]); }
static float __shfl_xor_sync(unsigned lanes, float x, int by) {
    return __int_as_float(__shfl_xor_sync(lanes, __float_as_int(x), by));
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(int x) { return __builtin_ffs(x); }
static i64 min(i64 x, i64 y) { return x < y ? x : y; }
static unsigned atomicOr(unsigned* at, unsigned x) { unsigned old = *at; *at |= x; return old; }

// Runs `kernel` for every thread of one block.
static void run_block(int count, std::function<void()> kernel) {
    body = kernel;
    blockDim = {count, 1, 1};
    if (int(threads.size()) != count) threads.resize(count), warps.resize(count / 32), block = {};
    for (int i = 0; i < count; ++i) {
        Thread& t = threads[i];
        t.index = {i, 0, 0};
        t.done = false;
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.data();
        t.context.uc_stack.ss_size = t.stack.size();
        t.context.uc_link = &scheduler;
        makecontext(&t.context, +[] { body(); current->done = true; }, 0);
    }
    for (bool left = true; left;) {
        left = false;
        for (Thread& t : threads) {
            if (t.done) continue;
            left = true;
            current = &t;
            swapcontext(&scheduler, &t.context);
        }
    }
}

// One launch: its arguments, the grid, and the memory that is the answer.
#define LAUNCH(kernel, Params, count)                                                           \
    static void run() {                                                                         \
        if (take<int>() != int(sizeof(Mods))) abort();                                          \
        const Mods mods = take<Mods>();                                                         \
        const Params params = take<Params>();                                                   \
        const int x = take<int>(), y = take<int>();                                             \
        for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)                                      \
            for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)                                  \
                run_block(count, [&] { kernel(params, mods); });                                \
        const i64 at = take<i64>(), bytes = take<i64>();                                        \
        fwrite((const void*)at, 1, size_t(bytes), stdout);                                      \
    }

// One launch of a kernel of the same text that takes no mods, and a grid of three axes.
#define LAUNCH_PLAIN(kernel, Params, count)                                                     \
    static void run_plain() {                                                                   \
        const Params params = take<Params>();                                                   \
        const int x = take<int>(), y = take<int>(), z = take<int>();                            \
        for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z)                                      \
            for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)                                  \
                for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)                              \
                    run_block(count, [&] { kernel(params); });                                  \
        blockIdx.z = 0;                                                                         \
        const i64 at = take<i64>(), bytes = take<i64>();                                        \
        fwrite((const void*)at, 1, size_t(bytes), stdout);                                      \
    }

// One launch of a kernel with mods whose CTAs along z share the work of one.
#define LAUNCH_SHARED(kernel, Params, count)                                                    \
    static void run_shared() {                                                                  \
        if (take<int>() != int(sizeof(Mods))) abort();                                          \
        const Mods mods = take<Mods>();                                                         \
        const Params params = take<Params>();                                                   \
        gridDim.x = take<int>(), gridDim.y = take<int>(), gridDim.z = take<int>();              \
        for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)                              \
            for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)                          \
                for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)                      \
                    run_block(count, [&] { kernel(params, mods); });                            \
        blockIdx.z = 0;                                                                         \
        const i64 at = take<i64>(), bytes = take<i64>();                                        \
        fwrite((const void*)at, 1, size_t(bytes), stdout);                                      \
    }
