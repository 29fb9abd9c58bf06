// A GPU on the host: what the source of a kernel is compiled behind, once its inline assembly has become calls
// (ptx.hpp). Every thread is a fiber; warps, warpgroups and CTAs meet where instructions say so, and nowhere else.
// Fibers run in an order drawn from a seed, and what is asynchronous happens late: a copy some turns after it was
// started, a product of a warpgroup when somebody waits for it. Or all of it happens at once (EAGER). So what reads too
// early, or writes too early over what is still to be read, gives other numbers in one of the two, and a wait without
// an end is reported, thread by thread.
//
// Not modelled: what fences order but those for products and copy engines, registers, time; and sums of products are
// rounded as f32, not as tensor cores do.
#pragma once
#include <algorithm>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <signal.h>
#include <string>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

#include "host.hpp"

#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __host__
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

typedef uint32_t u32;
typedef uint64_t u64;

constexpr u32 SHARED_BASE = 1024;          // the smem address of a CTA's first byte

[[noreturn]] void fail(const std::string& why);

// ---- threads ----

struct Warp {
    u64 given[2][32];                      // what lanes brought to this meeting, and to the one before
    u32 came[2] = {};
    const char* what = nullptr;            // the instruction that they have met in
    u32 alive = 0, here = 0;
    u64 meetings = 0;
};
// Of a CTA, or of a named barrier.
struct Meeting {
    u32 here = 0;
    u64 rounds = 0;
    u32 any = 0, any_before = 0;
};
struct Thread;
struct Mbarrier {
    int count = 0, pending = 0;
    long bytes = 0;
    u64 phase = 0;
    u32 made_at = 0;                       // how many fences there had been
    const Thread* made_by = nullptr;

    void settle();
};
struct Product;
struct Warpgroup {
    std::deque<std::shared_ptr<Product>> products;
    u64 first = 0;                         // the number of the first of them
};
struct Cta {
    Index index;
    std::vector<char> memory;
    char* shared;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    Meeting all, named[16];
    u32 alive = 0;
    std::unordered_map<u32, Mbarrier> mbarriers;
    // What a thread has written, products and copy engines see behind a fence of that thread, or of the one that starts
    // them: for each word of smem how many fences there had been and who wrote it, nobody where it was a copy engine.
    std::vector<u32> written_at;
    std::vector<const Thread*> writers;
};
// What of a thread's is over, which may outlive the thread.
struct Done { u64 bulk_reads = 0, bulk_writes = 0, copies = 0; };
// What a thread runs on, and the next thread after it.
struct Fiber {
    ucontext_t start;
    jmp_buf now;
    char* stack;
    bool has_started = false;
};
struct Thread {
    Cta* cta;
    u32 number;
    Fiber* fiber;
    bool is_done = false;
    std::shared_ptr<Done> done = std::make_shared<Done>();
    const char* waits_for = nullptr;
    const u64* watched = nullptr;          // it cannot go on while this is `seen`
    u64 seen = 0;
    u32 waits_at = 0, waits_parity = 0;    // of an mbarrier
    u32 fence = 0, init_fence = 0;         // the numbers of its last fences
    u64 products = 0;                      // that it has started
    std::vector<u64> groups;               // at which of them its groups end
    u64 bulk_started = 0, copies_started = 0;
    u64 last_due = 0;                      // of its copies, which end in order
};

static Thread* self;
static jmp_buf scheduler;
static u64 changes, turn;                  // of what anybody may wait for; of the scheduler
static bool eager;
static u64 seed;
static std::multimap<u64, std::function<void()>> later;   // what happens when, by turns

[[noreturn]] inline void fail(const std::string& why) {
    std::fprintf(stderr, "emulated GPU: CTA %u, thread %u: %s\n", self->cta->index.x, self->number, why.c_str());
    std::abort();
}

inline u64 draw() {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed;
}
inline void yield() {
    if (!_setjmp(self->fiber->now)) _longjmp(scheduler, 1);
}
// Until `count`, which others change, is another than now.
inline void wait_for_change(const char* what, const u64& count) {
    self->waits_for = what, self->watched = &count, self->seen = count;
    yield();
    self->waits_for = nullptr, self->watched = nullptr;
}
template <typename F>
inline void wait(const char* what, F until) {
    while (!until()) {
        self->waits_for = what;
        yield();
    }
    self->waits_for = nullptr;
}
// As what thread `by` does, after what was due before `earliest`.
inline void do_later(Thread* by, std::function<void()> work, u64 earliest = 0) {
    auto by_thread = [by, work = std::move(work)] {
        Thread* const before = self;
        self = by;
        work();
        self = before;
        ++changes;
    };
    if (eager) by_thread();
    else later.emplace(std::max(earliest, turn + 1 + draw() % 40), std::move(by_thread));
}

inline Warp& warp() { return self->cta->warps[self->number / 32]; }
inline u32 lane() { return self->number % 32; }

// All lanes of the warp that still run bring a number; afterwards everybody has all of them, until the next meeting but
// one.
inline const u64* meet(u64 mine, u32* came = nullptr, const char* what = __builtin_FUNCTION()) {
    Warp& w = warp();
    const u64 now = w.meetings;
    const int half = now & 1;
    if (w.here == 0) {
        w.came[half] = 0, w.what = what;
        if (w.alive < 32) std::memset(w.given[half], 0, sizeof w.given[half]);
    }
    if (w.what != what && std::strcmp(w.what, what))
        fail(std::string("lanes of a warp meet in ") + what + " and in " + w.what);
    w.given[half][lane()] = mine;
    w.came[half] |= 1u << lane();
    if (++w.here == w.alive) w.here = 0, ++w.meetings, ++changes;
    else wait_for_change("its warp", w.meetings);
    if (came) *came = w.came[half];
    return w.given[half];
}
template <typename T>
inline u64 bits_of(T x) {
    u64 bits = 0;
    static_assert(sizeof x <= 8);
    std::memcpy(&bits, &x, sizeof x);
    return bits;
}
template <typename T>
inline T from_bits(u64 bits) {
    T x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline void Mbarrier::settle() {
    if (pending == 0 && bytes == 0) ++phase, pending = count;
    ++changes;
}
inline Mbarrier& mbarrier(u32 at) {
    auto found = self->cta->mbarriers.find(at);
    if (found == self->cta->mbarriers.end()) fail("no mbarrier at " + std::to_string(at));
    return found->second;
}
inline void meet_cta(Meeting& m, u32 threads, bool waits) {
    if (++m.here == threads) m.here = 0, m.any_before = m.any, m.any = 0, ++m.rounds, ++changes;
    else if (waits) wait_for_change("a barrier of its CTA", m.rounds);
}

inline char* shared_at(u32 at, u32 bytes) {
    Cta& cta = *self->cta;
    if (at < SHARED_BASE || at - SHARED_BASE + bytes > cta.memory.size() - 1024)
        fail("no smem at " + std::to_string(at));
    return cta.shared + (at - SHARED_BASE);
}

// ---- fences between threads and what is asynchronous ----

static u32 fences;                         // that there have been

inline void wrote(u32 at, u32 bytes, const Thread* writer) {
    Cta& cta = *self->cta;
    for (u32 word = (at - SHARED_BASE) / 4; word * 4 < at - SHARED_BASE + bytes; ++word)
        cta.written_at[word] = fences, cta.writers[word] = writer;
}
// What was started by a thread that had passed fence number `passed`.
inline void reads_asynchronously(u32 at, u32 passed, const char* what) {
    const Cta& cta = *self->cta;
    const u32 word = (at - SHARED_BASE) / 4, written_at = cta.written_at[word];
    const Thread* const writer = cta.writers[word];
    if (!writer || passed > written_at || writer->fence > written_at) return;
    fail(std::string(what) + " reads smem at " + std::to_string(at) + " without a fence since thread " +
         std::to_string(writer->number) + " wrote it");
}

// ---- the scheduler ----

inline void end_thread() {
    Warp& w = warp();
    if (--w.alive && w.here == w.alive) w.here = 0, ++w.meetings;
    Cta& cta = *self->cta;
    if (--cta.alive && cta.all.here == cta.alive)
        cta.all.here = 0, cta.all.any_before = cta.all.any, cta.all.any = 0, ++cta.all.rounds;
    ++changes;
    self->is_done = true;
    yield();
}

static std::function<void()> entry;
// The kernels of this file.
static std::map<std::string, void (*)(void**)> kernels;
inline bool know(const char* name, void (*kernel)(void**)) { return kernels[name] = kernel, true; }
inline void begin() {
    while (true) {
        entry();
        end_thread();
    }
}

inline void resume(Thread& t) {
    self = &t;
    threadIdx = {t.number, 0, 0};
    blockIdx = t.cta->index;
    if (_setjmp(scheduler)) return;
    Fiber& fiber = *t.fiber;
    if (fiber.has_started) _longjmp(fiber.now, 1);
    fiber.has_started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack;
    fiber.start.uc_stack.ss_size = STACK;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, begin, 0);
    setcontext(&fiber.start);
}

inline void do_what_is_due(bool all) {
    while (!later.empty() && (all || later.begin()->first <= turn)) {
        const auto work = std::move(later.begin()->second);
        later.erase(later.begin());
        work();
    }
}

inline void report(std::vector<std::unique_ptr<Thread>>& threads) {
    for (auto& t : threads) {
        const bool leads = t->number % 32 == 0 || threads[&t - &threads[0] - 1]->waits_for != t->waits_for ||
                           threads[&t - &threads[0] - 1]->waits_at != t->waits_at;
        if (t->is_done || !leads) continue;
        std::fprintf(stderr, "emulated GPU: CTA %u, warp %u, from lane %u on, waits for %s", t->cta->index.x,
                     t->number / 32, t->number % 32, t->waits_for ? t->waits_for : "nothing");
        const auto found = t->cta->mbarriers.find(t->waits_at);
        if (t->waits_at && found != t->cta->mbarriers.end())
            std::fprintf(stderr, " at %u, parity %u, in round %llu with %d arrivals and %ld bytes to come", t->waits_at,
                         t->waits_parity, (unsigned long long)found->second.phase, found->second.pending,
                         found->second.bytes);
        std::fprintf(stderr, "\n");
    }
}

static const Host* host;
static std::vector<std::unique_ptr<Fiber>> fibers;
inline Fiber* fiber_of(size_t number) {
    while (fibers.size() <= number) {
        fibers.push_back(std::make_unique<Fiber>());
        fibers.back()->stack = host->stack_of(fibers.size() - 1);
    }
    return fibers[number].get();
}

// Runs CTAs first .. end of a grid, side by side.
inline void run_ctas(u64 first, u64 end, u32 threads_each, u32 shared_bytes) {
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<std::unique_ptr<Thread>> threads;
    for (u64 i = first; i < end; ++i) {
        auto cta = std::make_unique<Cta>();
        cta->index = {u32(i % gridDim.x), u32(i / gridDim.x % gridDim.y), u32(i / gridDim.x / gridDim.y)};
        // NaN where nobody has written.
        cta->memory.assign(shared_bytes + 1024, char(0xff));
        cta->shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(cta->memory.data()) + 1023) / 1024 * 1024);
        cta->warps.resize((threads_each + 31) / 32);
        cta->warpgroups.resize((threads_each + 127) / 128);
        cta->alive = threads_each;
        cta->written_at.resize(shared_bytes / 4 + 1), cta->writers.resize(shared_bytes / 4 + 1);
        for (u32 n = 0; n < threads_each; ++n) {
            auto t = std::make_unique<Thread>();
            t->cta = cta.get();
            t->number = n;
            t->fiber = fiber_of(threads.size());
            ++cta->warps[n / 32].alive;
            threads.push_back(std::move(t));
        }
        ctas.push_back(std::move(cta));
    }
    std::vector<size_t> order;             // the first threads of warps
    for (size_t c = 0; c < ctas.size(); ++c)
        for (size_t w = 0; w < threads_each; w += 32) order.push_back(c * threads_each + w);
    size_t late = threads.size();          // a warp that is kept from going on for a while, as long as others can
    u64 late_until = 0;
    for (size_t left = threads.size(), idle = 0; left > 0; ++turn) {
        const u64 before = changes;
        const bool skips = idle == 0;
        if (turn >= late_until) {
            late = draw() % 3 ? order[draw() % order.size()] : threads.size();
            late_until = turn + draw() % 1000;
        }
        for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
        for (size_t at : order) {
            if (skips && (at == late || draw() % 4 == 0)) continue;
            const size_t cta_end = at / threads_each * threads_each + threads_each;
            const size_t lanes = std::min<size_t>(32, cta_end - at), first = draw() % lanes;
            for (size_t i = 0; i < lanes; ++i) {
                Thread& t = *threads[at + (first + i) % lanes];
                if (t.is_done || (t.watched && *t.watched == t.seen)) continue;
                resume(t);
                if (t.is_done) --left, ++changes;
            }
        }
        do_what_is_due(false);
        idle = changes == before ? idle + 1 : 0;
        if (idle > 2) {
            if (later.empty()) {
                report(threads);
                std::fprintf(stderr, "emulated GPU: nobody can go on\n");
                std::abort();
            }
            do_what_is_due(true);
        }
    }
    do_what_is_due(true);
    self = nullptr;
}

// Tells of a kernel that touches what is no memory.
inline void touched(int, siginfo_t* what, void*) {
    const u64 at = u64(reinterpret_cast<uintptr_t>(what->si_addr));
    std::fprintf(stderr, "emulated GPU: address %#llx is touched, where no memory is\n", (unsigned long long)at);
    host->tell_of_memory(at);
    fail("it was this thread");
}
// While it lives, a thread that touches what is no memory is told of, on a stack that is not its own.
struct Watch {
    struct sigaction before;
    stack_t stack_before;
    std::vector<char> stack;

    Watch() : stack(64 << 10) {
        stack_t own = {};
        own.ss_sp = stack.data(), own.ss_size = stack.size();
        sigaltstack(&own, &stack_before);
        struct sigaction action = {};
        action.sa_sigaction = touched, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &before);
    }
    ~Watch() {
        sigaction(SIGSEGV, &before, nullptr);
        sigaltstack(&stack_before, nullptr);
    }
};

}  // namespace emulated

extern "C" __attribute__((visibility("default"))) void emulated_run(const emulated::Launch& launch,
                                                                    const emulated::Host& host) {
    gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    blockDim = {launch.threads, 1, 1};
    emulated::seed = launch.seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
    emulated::eager = launch.eager;
    emulated::host = &host;
    const auto kernel = emulated::kernels.find(launch.name);
    if (kernel == emulated::kernels.end())
        std::fprintf(stderr, "emulated GPU: no kernel %s\n", launch.name), std::abort();
    emulated::entry = [=] { kernel->second(launch.parameters); };
    const emulated::Watch watch;
    const unsigned long long ctas = (unsigned long long)gridDim.x * gridDim.y * gridDim.z;
    for (unsigned long long i = 0; i < ctas; i += launch.together)
        emulated::run_ctas(i, std::min<unsigned long long>(ctas, i + launch.together), launch.threads, launch.shared);
    emulated::fibers.clear();              // their stacks are another kernel's next
}

// ---- what CUDA C++ has of its own ----

template <typename T> inline T __ldg(const T* at) { return *at; }
template <typename T> inline void __stcs(T* at, const T& x) { *at = x; }
template <typename T> inline T __shfl_sync(unsigned, T x, int from, int = 32) {
    return emulated::from_bits<T>(emulated::meet(emulated::bits_of(x))[from & 31]);
}
template <typename T> inline T __shfl_xor_sync(unsigned, T x, int distance, int = 32) {
    const int from = emulated::lane() ^ distance;
    return emulated::from_bits<T>(emulated::meet(emulated::bits_of(x))[from & 31]);
}
template <typename T> inline T __shfl_down_sync(unsigned, T x, int distance, int width = 32) {
    const int lane = emulated::lane(), from = lane % width + distance < width ? lane + distance : lane;
    return emulated::from_bits<T>(emulated::meet(emulated::bits_of(x))[from & 31]);
}
template <typename T> inline T __shfl_up_sync(unsigned, T x, int distance, int width = 32) {
    const int lane = emulated::lane(), from = lane % width >= distance ? lane - distance : lane;
    return emulated::from_bits<T>(emulated::meet(emulated::bits_of(x))[from & 31]);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    const emulated::u64* all = emulated::meet(x);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(all[i]) << i;
    return bits;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, !x) == 0; }
inline unsigned __reduce_or_sync(unsigned, unsigned x) {
    const emulated::u64* all = emulated::meet(x);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(all[i]);
    return bits;
}
inline void __syncwarp(unsigned = ~0u) { emulated::meet(0); }
inline void __syncthreads() {
    emulated::Cta& cta = *emulated::self->cta;
    emulated::meet_cta(cta.all, cta.alive, true);
}
inline int __syncthreads_or(int x) {
    emulated::Cta& cta = *emulated::self->cta;
    cta.all.any |= x != 0;
    emulated::meet_cta(cta.all, cta.alive, true);
    return cta.all.any_before;
}
inline void __threadfence() {}
inline void __nanosleep(unsigned) { emulated::yield(); }
[[noreturn]] inline void __trap() { emulated::fail("trap"); }
inline float __uint_as_float(unsigned x) { return emulated::from_bits<float>(x); }
inline float __int_as_float(int x) { return emulated::from_bits<float>(unsigned(x)); }
inline unsigned __float_as_uint(float x) { return unsigned(emulated::bits_of(x)); }
inline int __float_as_int(float x) { return int(emulated::bits_of(x)); }
inline float __fmaf_rn(float x, float y, float z) { return std::fmaf(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdividef(float x, float y) { return std::fabs(y) > 0x1p126f && std::fabs(y) < INFINITY ? 0.f : x / y; }
inline float __log2f(float x) { return std::log2(x); }
inline float __saturatef(float x) { return x > 0 ? std::fmin(x, 1.f) : 0.f; }
inline float __int2float_rn(int x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline long long __float2ll_rn(float x) { return x != x ? (long long)(1ull << 63) : std::llrint(x); }
inline int __float2int_rz(float x) {
    return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? INT32_MIN : int(x);
}
inline int __float2int_rn(float x) { return __float2int_rz(std::nearbyint(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    const emulated::u64 both = emulated::u64(y) << 32 | x;
    unsigned z = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = s >> 4 * i & 0xf;
        unsigned byte = both >> 8 * (pick & 7) & 0xff;
        if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
        z |= byte << 8 * i;
    }
    return z;
}
template <typename T, typename U> inline T atomicAdd(T* at, U x) {
    const T before = *at;
    *at = before + T(x);
    ++emulated::changes;
    return before;
}
template <typename T, typename U> inline T atomicOr(T* at, U x) {
    const T before = *at;
    *at = before | T(x);
    ++emulated::changes;
    return before;
}
template <typename T, typename U> inline T atomicMax(T* at, U x) {
    const T before = *at;
    if (T(x) > before) *at = T(x);
    return before;
}
template <typename T, typename U, typename V> inline T atomicCAS(T* at, U expected, V x) {
    const T before = *at;
    if (before == T(expected)) *at = T(x), ++emulated::changes;
    else emulated::yield();
    return before;
}
inline size_t __cvta_generic_to_shared(const void* at) {
    return static_cast<const char*>(at) - emulated::self->cta->shared + emulated::SHARED_BASE;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline long long min(long long a, int b) { return min(a, (long long)b); }
inline long long min(int a, long long b) { return min((long long)a, b); }
inline long long max(long long a, int b) { return max(a, (long long)b); }
inline long long max(int a, long long b) { return max((long long)a, b); }

#include "ptx.hpp"
