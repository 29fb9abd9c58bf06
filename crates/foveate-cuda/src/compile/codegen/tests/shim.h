// What a host compiler needs to run device code one thread at a time.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

#define __device__
#define __shared__
// A CTA's, where one makes range tables; what kernels declare of other names is memory of its own.
char dynamic_shared[1 << 16];
typedef long long i64;

// As in Rust: the first operand where both are zeros, the other one where one is NaN.
static float shim_fminf(float x, float y) { return x != x ? y : y < x ? y : x; }
static float shim_fmaxf(float x, float y) { return x != x ? y : y > x ? y : x; }
#define fminf shim_fminf
#define fmaxf shim_fmaxf

static float __fadd_rn(float x, float y) { return x + y; }
static float __fsub_rn(float x, float y) { return x - y; }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fdiv_rn(float x, float y) { return x / y; }
static float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
// As far off as the device's may be, so that the steps after it are seen to mend it.
static float rough_reciprocal(float x) { return nextafterf(1.f / x, 0.f); }
static float __fsqrt_rn(float x) { return sqrtf(x); }
static float __int2float_rn(int x) { return float(x); }
static int __float2int_rz(float x) {
    if (x != x) return 0;
    if (x >= 2147483648.f) return 2147483647;
    if (x < -2147483648.f) return -2147483647 - 1;
    return int(x);
}
static float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
static int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
static int __clz(int x) { return __builtin_clz(unsigned(x)); }
template <typename T> static T __ldg(const T* at) { return *at; }
static int min(int x, int y) { return x < y ? x : y; }
static int max(int x, int y) { return x < y ? y : x; }
static int atomicCAS(int* at, int expected, int value) {
    int old = *at;
    if (old == expected) *at = value;
    return old;
}
static float atomicAdd(float* at, float x) { float old = *at; *at += x; return old; }

template <typename T> static T take() {
    T x;
    if (fread(&x, sizeof x, 1, stdin) != 1) abort();
    return x;
}
template <typename T> static void give(T x) { fwrite(&x, sizeof x, 1, stdout); }

// What device addresses point into: a file read to a fixed address.
static void take_arena() {
    i64 base = take<i64>(), bytes = take<i64>();
    void* at = mmap((void*)base, size_t(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (at != (void*)base || fread(at, 1, size_t(bytes), stdin) != size_t(bytes)) abort();
}

// One program: its structure, points, rectangles; then the answers.
#define RUN                                                                                     \
    static void run() {                                                                         \
        if (take<int>() != int(sizeof(Mods))) abort();                                          \
        const Mods mods = take<Mods>();                                                         \
        const Place place = take<Place>();                                                      \
        for (int points = take<int>(); points > 0; --points) {                                  \
            int q = take<int>(), kv = take<int>();                                              \
            float score = take<float>();                                                        \
            give<int>(fv_mask(mods, place, q, kv));                                             \
            give<float>(fv_score(mods, place, q, kv, score, float(q - kv), fv_place_reads(mods, place))); \
            give<float>(fv_score_gradient(mods, place, q, kv, score, 1.f, float(q - kv)));      \
            give<int>(fv_dropout_keep(mods, place, q, kv));                                             \
        }                                                                                       \
        if (i64 report = take<i64>()) fwrite((const void*)report, 4, 4, stdout);                \
        for (int rectangles = take<int>(); rectangles > 0; --rectangles) {                      \
            int q0 = take<int>(), q1 = take<int>(), kv0 = take<int>(), kv1 = take<int>();       \
            give<int>(fv_cover(mods, place, q0, q1, kv0, kv1));                                 \
        }                                                                                       \
    }

// Capture<0>::one for each rectangle: 2 where it holds and fv_score given what it reads is fv_score
// at every point.
#define RUN_ONE                                                                                 \
    static void run() {                                                                         \
        if (take<int>() != int(sizeof(Mods))) abort();                                          \
        const Mods mods = take<Mods>();                                                         \
        const Place place = {1, 3, 1, 70, 90};                                                  \
        for (int rectangles = take<int>(); rectangles > 0; --rectangles) {                      \
            int q0 = take<int>(), q1 = take<int>(), kv0 = take<int>(), kv1 = take<int>();       \
            bool one = Capture<0>::one(mods, place, q0, q1, kv0, kv1), same = true;             \
            if (one != fv_reads_one(mods, place, q0, q1, kv0, kv1)) abort();                    \
            const ScoreReads reads = fv_score_reads(mods, place, q0, kv0);                      \
            for (int q = q0; q < q1; ++q)                                                       \
                for (int kv = kv0; kv < kv1; ++kv) {                                            \
                    const float distance = q - kv;                                              \
                    const PlaceReads of_place = fv_place_reads(mods, place);                    \
                    same &= fv_score_given(mods, place, q, kv, .5f, distance, of_place, reads)  \
                         == fv_score(mods, place, q, kv, .5f, distance, of_place);              \
                }                                                                               \
            give<int>(one ? 1 + same : 0);                                                      \
        }                                                                                       \
    }

// Every read of a learned buffer at every point, then the gradients.
#define RUN_CAPTURES                                                                            \
    template <int READ>                                                                         \
    static void capture(const Mods& mods, const Place& place, Int q, Int kv, float score, float d) { \
        if constexpr (READ < CAPTURE_READS) {                                                   \
            using Read = Capture<READ>;                                                         \
            const float term = Read::term(mods, place, q, kv, score, d);                        \
            if constexpr (Read::kind == CAPTURE_EACH)                                           \
                Read::add(mods, Read::at(mods, place, q, kv, score), term);                     \
            else Read::add(mods, Read::at(mods, place, q, kv), term);                           \
            capture<READ + 1>(mods, place, q, kv, score, d);                                    \
        }                                                                                       \
    }                                                                                           \
    static void run() {                                                                         \
        if (take<int>() != int(sizeof(Mods))) abort();                                          \
        const Mods mods = take<Mods>();                                                         \
        const Place place = take<Place>();                                                      \
        for (int points = take<int>(); points > 0; --points) {                                  \
            int q = take<int>(), kv = take<int>();                                              \
            float score = take<float>();                                                        \
            capture<0>(mods, place, q, kv, score, take<float>());                               \
        }                                                                                       \
        for (int buffers = take<int>(); buffers > 0; --buffers) {                               \
            const i64 at = take<i64>(), elems = take<i64>();                                    \
            fwrite((const void*)at, 4, size_t(elems), stdout);                                  \
        }                                                                                       \
    }
