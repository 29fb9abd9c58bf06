// A GPU of one lane at a time: runs kernels of this crate on the host, thread after thread, as coroutines that
// change at barriers and shuffles. It stands in the place of kernels/device.cuh.

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Index { u32 x, y, z; };
static Index threadIdx, blockIdx, gridDim;

template <typename T>
static T min(T x, T y) { return y < x ? y : x; }

// Waits of a group of threads for each other.
struct Meeting {
    int members = 0, waiting = 0;
    long round = 0;
};

struct Coroutine {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
};

static ucontext_t home;
static std::vector<Coroutine> threads;
static std::vector<double> exchanged;
static std::vector<Meeting> warps;
static Meeting cta;
static std::function<void()> body;
static long progress;       // meetings that ended

static void meet(Meeting& meeting) {
    const long round = meeting.round;
    if (++meeting.waiting == meeting.members) {
        meeting.waiting = 0;
        ++meeting.round;
        ++progress;
        return;
    }
    const Index me = threadIdx;
    while (meeting.round == round) swapcontext(&threads[me.x].context, &home);
    threadIdx = me;
}

static double shared[1024];
template <typename T>
static T* scratch() { return reinterpret_cast<T*>(shared); }

static void sync_cta() { meet(cta); }

template <typename T>
static void store_streaming(T* to, const T& x) { *to = x; }

template <typename T>
static T load_streaming(const T* from) { return *from; }

template <typename T>
static void store_whole(T* to, const T& x) {
    // A device faults there.
    if (reinterpret_cast<std::uintptr_t>(to) % sizeof(T) != 0) std::abort();
    *to = x;
}

static i64 nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

template <typename T>
static T shuffle_xor(T x, int lanes) {
    const u32 me = threadIdx.x;
    exchanged[me] = x;
    meet(warps[me / 32]);
    const T other = T(exchanged[me ^ lanes]);
    meet(warps[me / 32]);
    return other;
}

static float shuffle(float x, int lane) {
    const u32 me = threadIdx.x;
    exchanged[me] = x;
    meet(warps[me / 32]);
    const float other = float(exchanged[me / 32 * 32 + lane]);
    meet(warps[me / 32]);
    return other;
}

static void enter() {
    body();
    threads[threadIdx.x].done = true;
    swapcontext(&threads[threadIdx.x].context, &home);
}

// Until every lane waits for other warps or is done. Returns how many came to their end.
static int run_warp(int warp) {
    int ended = 0;
    for (long before = -1; before != progress;) {
        before = progress;
        for (u32 i = warp * 32; i < u32(warp + 1) * 32; ++i) {
            if (threads[i].done) continue;
            threadIdx = {i, 0, 0};
            swapcontext(&home, &threads[i].context);
            ended += threads[i].done;
        }
    }
    return ended;
}

// False when threads wait for some that have gone elsewhere.
static bool run_cta(int count) {
    memset(shared, 0xff, sizeof shared);        // NaN
    threads.resize(count);
    exchanged.resize(count);
    warps.assign(count / 32, Meeting{32});
    cta = Meeting{count};
    for (Coroutine& thread : threads) {
        thread.done = false;
        thread.stack.resize(64 << 10);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, enter, 0);
    }
    // A warp runs for as long as it can, the last one first in every other round: what is read or written without
    // a barrier meets what another warp has done long before or not at all.
    int left = count;
    for (int round = 0; left > 0; ++round) {
        const long before = progress;
        const int left_before = left;
        for (int i = 0; i < count / 32; ++i) left -= run_warp(round % 2 ? count / 32 - 1 - i : i);
        if (left == left_before && progress == before) return false;
    }
    return true;
}

template <typename P>
static int launch(void (*kernel)(P), const u32* grid, int count, const void* parameters, u64 bytes) {
    if (bytes != sizeof(P)) {
        fprintf(stderr, "the kernel's parameters are %zu bytes, %llu were given\n", sizeof(P), bytes);
        return 1;
    }
    P p;
    memcpy(&p, parameters, bytes);
    gridDim = {grid[0], grid[1], grid[2]};
    body = [kernel, p] { kernel(p); };
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
                if (!run_cta(count)) {
                    fprintf(stderr, "threads of CTA %u, %u wait for each other\n", blockIdx.x, blockIdx.y);
                    return 2;
                }
    return 0;
}

static float bits_float(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
static u32 float_bits(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}

static float from_f16(u16 x) {
    const int exponent = x >> 10 & 31, mantissa = x & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent == 0  ? std::ldexp(float(mantissa), -24)
                                      : std::ldexp(float(mantissa + 1024), exponent - 25);
    return x & 0x8000 ? -size : size;
}
static u16 to_f16(float x) {
    const u16 sign = float_bits(x) >> 16 & 0x8000;
    const float size = std::fabs(x);
    if (x != x) return sign | 0x7e00;
    if (size >= 65520.f) return sign | 0x7c00;
    if (size == 0.f) return sign;
    int exponent;
    std::frexp(size, &exponent);                            // size is below 2^exponent
    const int unit = std::max(exponent - 11, -24);          // of the last place
    const int places = int(std::nearbyint(std::ldexp(size, -unit)));
    if (unit == -24) return sign | places;                  // subnormal, or just no more
    return sign | (u32(unit + 24) << 10) + places;          // the leading 1024 counts one exponent up
}
static u16 to_bf16(float x) {
    const u32 bits = float_bits(x);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static float max_or_nan(float x, float y) { return x > y || x != x ? x : y; }
static float exp2_fast(float x) { return std::exp2(x); }
static float sqrt_fast(float x) { return std::sqrt(x); }
static float reciprocal_fast(float x) { return 1.f / x; }
static u32 upper_halves(u32 x, u32 y) { return x >> 16 | (y & 0xffff0000); }
static u32 pick_bytes(u32 x, u32 y, u32 which) {
    const u64 bytes = u64(y) << 32 | x;
    u32 picked = 0;
    for (int i = 0; i < 4; ++i) picked |= u32(bytes >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return picked;
}
static float saturated(float x) { return x > 0.f ? x < 1.f ? x : 1.f : 0.f; }
static float divide_fast(float x, float y) { return x / y; }
