// What only a GPU's compiler takes. Tests that run kernels on the host bring the same functions in C++
// (src/tests/machine.h); everything else of this folder is plain C++.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ float from_f16(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
// Both round to the nearest, ties to even.
__device__ u16 to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ u16 to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
// NaN where either is; fmaxf leaves NaN out.
__device__ float max_or_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
// 2^x, to 2 ulp.
__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Both to 1 ulp; 0 for subnormal numbers the root, for numbers beyond 2^126 the reciprocal.
__device__ float sqrt_fast(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// x / y to 2 ulp, for y up to 2^126.
__device__ float divide_fast(float x, float y) { return __fdividef(x, y); }
__device__ float bits_float(u32 x) { return __uint_as_float(x); }
__device__ u32 float_bits(float x) { return __float_as_uint(x); }
// Bytes of two words, numbered from the first's lowest: a digit of `which` names each of the result.
__device__ u32 pick_bytes(u32 x, u32 y, u32 which) { return __byte_perm(x, y, which); }
// From 0 to 1; 0 for NaN.
__device__ float saturated(float x) { return __saturatef(x); }
// The upper halves of two words, the first one's below.
__device__ u32 upper_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x7632); }
__device__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
__device__ double shuffle_xor(double x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
__device__ float shuffle(float x, int lane) { return __shfl_sync(~0u, x, lane); }
__device__ void sync_cta() { __syncthreads(); }
// A load of what nobody reads soon: its line is the first to leave L2, before what others have left there to be read.
template <typename T>
__device__ T load_streaming(const T* from) {
    if constexpr (sizeof(T) == 16) {
        uint4 words;
        asm volatile("ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                     : "l"(from));
        return reinterpret_cast<const T&>(words);
    } else return *from;
}
// A store of 2, 4, 8 or 16 bytes that nobody reads soon: its line is the first to leave L2.
template <typename T>
__device__ void store_streaming(T* to, const T& x) {
    if constexpr (sizeof(T) == 16) __stcs(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4&>(x));
    else if constexpr (sizeof(T) == 8) __stcs(reinterpret_cast<uint2*>(to), reinterpret_cast<const uint2&>(x));
    else if constexpr (sizeof(T) == 4) __stcs(reinterpret_cast<u32*>(to), reinterpret_cast<const u32&>(x));
    else __stcs(reinterpret_cast<u16*>(to), reinterpret_cast<const u16&>(x));
}
// A vector at once: where its elements are computed one by one, the compiler may store them so.
template <typename T>
__device__ void store_whole(T* to, const T& x) {
    if constexpr (sizeof(T) == 16) {
        const uint4& words = reinterpret_cast<const uint4&>(x);
        asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};" :: "l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
                     "r"(words.w)
                     : "memory");
    } else *to = x;
}
// Of the device's clock, since a moment that is always the same.
__device__ i64 nanoseconds() {
    i64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Shared memory of the CTA: 4 bytes a thread or more.
extern "C" __device__ const int fv_shared_bytes = FV_SHARED_BYTES;
template <typename T>
__device__ T* scratch() {
    extern __shared__ double of_cta[];
    return reinterpret_cast<T*>(of_cta);
}
