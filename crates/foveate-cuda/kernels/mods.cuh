// What printed masks and scores are made of: the meaning of foveate-mods on the device.
//
// Two types carry it. `Int` wraps, divides towards minus infinity and has the Euclidean remainder,
// both 0 for a divisor of 0. `Exact` is a float whose operations are rounded one by one and never
// contracted into a multiply-add: whatever decides a mask or an index is computed in it, so that
// the forward, the backward, the block mask and the CPU take the same decisions. Plain `float`
// is for what ends up in a score, where the compiler may contract.

// For long functions that are called at several places but seldom: one copy of them.
#ifdef __CUDA_ARCH__
#define OUT_OF_LINE __noinline__
#else
#define OUT_OF_LINE
#endif

struct Int {
    int v;
    Int() = default;
    __device__ Int(int v) : v(v) {}
};

struct Exact {
    float v;
    Exact() = default;
    __device__ explicit Exact(float v) : v(v) {}
};

// The coordinates that a CTA does not change.
struct Place {
    Int b, h, h_kv, q_len, kv_len;
};

__device__ Int operator+(Int x, Int y) { return int(unsigned(x.v) + unsigned(y.v)); }
__device__ Int operator-(Int x, Int y) { return int(unsigned(x.v) - unsigned(y.v)); }
__device__ Int operator*(Int x, Int y) { return int(unsigned(x.v) * unsigned(y.v)); }
__device__ Int operator-(Int x) { return int(0u - unsigned(x.v)); }
__device__ bool operator==(Int x, Int y) { return x.v == y.v; }
__device__ bool operator!=(Int x, Int y) { return x.v != y.v; }
__device__ bool operator<(Int x, Int y) { return x.v < y.v; }
__device__ bool operator<=(Int x, Int y) { return x.v <= y.v; }
__device__ Int min(Int x, Int y) { return x.v < y.v ? x.v : y.v; }
__device__ Int max(Int x, Int y) { return x.v < y.v ? y.v : x.v; }
__device__ Int abs(Int x) { return x.v < 0 ? -x : x; }

__device__ Int operator/(Int x, Int y) {
    if (y.v == 0) return 0;
    if (y.v == -1) return -x;
    int quotient = x.v / y.v;
    return quotient - (x.v % y.v != 0 && (x.v < 0) != (y.v < 0));
}

__device__ Int operator%(Int x, Int y) {
    if (y.v == 0 || y.v == -1) return 0;
    Int rest = x.v % y.v;
    return rest.v < 0 ? rest + abs(y) : rest;
}

// What integers are divided by where it is the same for all threads and known to the host, which makes a factor of it
// (CaptureLayout::pack). Without a branch: an entry of a mask is decided between products.
struct Divisor {
    int size;                   // the divisor without its sign
    unsigned factor, unit;
    int shift;
    int some, negative;         // all ones unless it is 0, and if it is negative; else 0

    // The largest integer that is not above x / size.
    __device__ int quotient(int x) const {
        const int sign = x >> 31 & some;
        const unsigned n = unsigned(x ^ sign);
        return int((unsigned((unsigned long long)(n) * factor >> 32) + (n & unit)) >> shift) ^ sign;
    }
    __device__ int rest(int x) const { return int(unsigned(x) - unsigned(quotient(x)) * unsigned(size)) & some; }
};
__device__ Int operator/(Int x, Divisor y) {
    return int(unsigned(y.quotient(x.v) ^ y.negative) + (y.rest(x.v) == 0 & y.negative));
}
__device__ Int operator%(Int x, Divisor y) { return y.rest(x.v); }

__device__ Int operator&(Int x, Int y) { return x.v & y.v; }
__device__ Int operator|(Int x, Int y) { return x.v | y.v; }
__device__ Int operator^(Int x, Int y) { return x.v ^ y.v; }
// Distances outside of 0 .. 31 shift everything out.
__device__ Int shift_left(Int x, Int y) { return unsigned(y.v) < 32 ? int(unsigned(x.v) << y.v) : 0; }
__device__ Int shift_right(Int x, Int y) { return x.v >> (unsigned(y.v) < 32 ? y.v : 31); }

__device__ Exact operator+(Exact x, Exact y) { return Exact(__fadd_rn(x.v, y.v)); }
__device__ Exact operator-(Exact x, Exact y) { return Exact(__fsub_rn(x.v, y.v)); }
__device__ Exact operator*(Exact x, Exact y) { return Exact(__fmul_rn(x.v, y.v)); }
__device__ Exact operator/(Exact x, Exact y) { return Exact(__fdiv_rn(x.v, y.v)); }
__device__ Exact operator-(Exact x) { return Exact(-x.v); }
__device__ bool operator==(Exact x, Exact y) { return x.v == y.v; }
__device__ bool operator!=(Exact x, Exact y) { return x.v != y.v; }
__device__ bool operator<(Exact x, Exact y) { return x.v < y.v; }
__device__ bool operator<=(Exact x, Exact y) { return x.v <= y.v; }
__device__ Exact min(Exact x, Exact y) { return Exact(fminf(x.v, y.v)); }
__device__ Exact max(Exact x, Exact y) { return Exact(fmaxf(x.v, y.v)); }
__device__ Exact abs(Exact x) { return Exact(fabsf(x.v)); }
__device__ Exact floor(Exact x) { return Exact(floorf(x.v)); }
__device__ Exact sqrt(Exact x) { return Exact(__fsqrt_rn(x.v)); }
__device__ Exact operator%(Exact x, Exact y) { return x - y * floor(x / y); }

// Conversions. A float becomes the nearest Int towards zero; NaN becomes 0.
__device__ float to_float(Int x) { return __int2float_rn(x.v); }
__device__ float to_float(bool x) { return x ? 1.f : 0.f; }
__device__ Int to_int(Exact x) { return __float2int_rz(x.v); }
__device__ Int to_int(bool x) { return x ? 1 : 0; }
__device__ bool to_bool(Int x) { return x.v != 0; }
__device__ bool to_bool(Exact x) { return x.v != 0.f; }
__device__ bool to_bool(float x) { return x != 0.f; }

// Bits of a float, for infinities and NaN.
__device__ float of_bits(unsigned bits) { return __int_as_float(int(bits)); }

// The counter-based hash of two integers: MurmurHash3's 32-bit finaliser.
__device__ Int mix(Int x, Int y) {
    unsigned z = unsigned(x.v) * 0x9E3779B1u + unsigned(y.v) + 0x7F4A7C15u;
    z = (z ^ z >> 16) * 0x85EBCA6Bu;
    z = (z ^ z >> 13) * 0xC2B2AE35u;
    return int(z ^ z >> 16);
}

// The upper 24 bits as a float in [0, 1).
__device__ float unit(Int x) { return float(unsigned(x.v) >> 8) * (1.f / 16777216.f); }

// Elements of captured buffers. They do not change while a kernel runs, so loads that do not
// depend on the key or on the query leave the loops over them.
__device__ Int load(const int* at) { return __ldg(at); }
__device__ float load(const float* at) { return __ldg(at); }
__device__ bool load(const unsigned char* at) { return __ldg(at) != 0; }

// The other types that memory may hold. An i64 gives its lower 32 bits.
struct U8 { unsigned char v; };
struct F16 { unsigned short v; };
struct BF16 { unsigned short v; };
__device__ float half_to_float(unsigned short x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#else
    const unsigned sign = unsigned(x >> 15) << 31, exponent = x >> 10 & 31, fraction = x & 1023;
    if (exponent == 31) return of_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent > 0) return of_bits(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = float(fraction) * (1.f / 16777216.f);
    return sign ? -small : small;
#endif
}
__device__ Int load(const U8* at) { return int(__ldg(&at->v)); }
__device__ Int load(const signed char* at) { return int(__ldg(at)); }
__device__ Int load(const short* at) { return int(__ldg(at)); }
__device__ Int load(const i64* at) { return int(__ldg(at)); }
__device__ float load(const F16* at) { return half_to_float(__ldg(&at->v)); }
__device__ float load(const BF16* at) { return of_bits(unsigned(__ldg(&at->v)) << 16); }
__device__ float load(const double* at) { return float(__ldg(at)); }

// Whether an element is one that an Int or a float holds.
template <typename Elem> __device__ bool fits(const Elem*) { return true; }
__device__ bool fits(const i64* at) { return __ldg(at) == i64(int(__ldg(at))); }

// Smallest and largest element of a stretch of a captured buffer; see ranges.cuh.
struct BoolEnds { int lo, hi; };
struct IntEnds { int lo, hi; };         // lo above hi for a stretch that holds what is no Int
struct FloatEnds { float lo, hi; };     // both NaN for a stretch that holds one

// The nearest index of an axis of `length`.
__device__ int clamp(Int index, int length) { return max(min(index.v, length - 1), 0); }
// The position that an index means which counts from the end where it is negative.
__device__ Int from_end(Int index, int length) { return index.v < 0 ? index + Int(length) : index; }
__device__ bool inside(Int index, int length) { return unsigned(index.v) < unsigned(length); }

// The first index out of range that anybody meets: {1, buffer, axis, index}.
__device__ void report_index(int* report, int buffer, int axis, int index) {
    if (atomicCAS(report, 0, 1) != 0) return;
    report[1] = buffer;
    report[2] = axis;
    report[3] = index;
}

// The first element that no Int holds: {2, buffer, lower half, upper half}.
__device__ void report_value(int* report, int buffer, i64 value) {
    if (atomicCAS(report, 0, 2) != 0) return;
    report[1] = buffer;
    report[2] = int(value);
    report[3] = int(value >> 32);
}

// Elementary functions, operation by operation those of foveate_mods::math and so the same bits
// as on the CPU. sin, cos and pow have no such twin and are the compiler's.

// 2^n for an integer-valued n in [-126, 127].
__device__ Exact power_of_two(int n) { return Exact(__int_as_float((n + 127) << 23)); }

// The nearest integer of an x below 2^22.
__device__ Exact nearest(Exact x) {
    const Exact magic(12582912.f);
    return (x + magic) - magic;
}

// e^r * 2^n for |r| <= 0.35; scaled in two steps so that subnormals come out.
__device__ Exact exp_scaled(Exact r, Exact n) {
    Exact p(1.9875692e-4f);
    p = p * r + Exact(1.3981999e-3f);
    p = p * r + Exact(8.333452e-3f);
    p = p * r + Exact(4.1665796e-2f);
    p = p * r + Exact(1.6666665e-1f);
    p = p * r + Exact(5e-1f);
    Exact y = (p * r * r + r) + Exact(1.f);
    int whole = to_int(n).v, half = whole >> 1;
    return y * power_of_two(half) * power_of_two(whole - half);
}

__device__ Exact exp(Exact x) {
    Exact c(fminf(fmaxf(x.v, -104.f), 89.f));
    Exact n = nearest(c * Exact(1.44269504f));
    Exact y = exp_scaled((c - n * Exact(0.6933594f)) - n * Exact(-2.1219444e-4f), n);
    return x.v != x.v ? x : y;
}

__device__ Exact exp2(Exact x) {
    Exact c(fminf(fmaxf(x.v, -150.f), 128.f));
    Exact n = nearest(c);
    Exact y = exp_scaled((c - n) * Exact(0.693147181f), n);
    return x.v != x.v ? x : y;
}

// The logarithm of a normal positive `m * 2^e`, given its bits and what to add to its exponent.
__device__ Exact log_of(int bits, Exact more) {
    // Mantissa in [sqrt(1/2), sqrt(2)).
    int exponent = int(unsigned(bits) - 0x3F3504F3u) >> 23;
    Exact m = Exact(of_bits(unsigned(bits) - (unsigned(exponent) << 23))) - Exact(1.f);
    Exact e = Exact(to_float(Int(exponent))) - more;
    Exact z = m * m;
    Exact p(7.0376836e-2f);
    p = p * m - Exact(1.151461e-1f);
    p = p * m + Exact(1.1676999e-1f);
    p = p * m - Exact(1.2420141e-1f);
    p = p * m + Exact(1.4249323e-1f);
    p = p * m - Exact(1.6668058e-1f);
    p = p * m + Exact(2.0000715e-1f);
    p = p * m - Exact(2.4999994e-1f);
    p = p * m + Exact(3.333333e-1f);
    Exact y = p * m * z + e * Exact(-2.1219444e-4f) - Exact(0.5f) * z;
    return (m + y) + e * Exact(0.6933594f);
}

__device__ Exact log(Exact x) {
    bool subnormal = x.v < 1.17549435e-38f;
    Exact scaled = subnormal ? x * Exact(8388608.f) : x;
    Exact y = log_of(__float_as_int(scaled.v), Exact(subnormal ? 23.f : 0.f));
    if (x.v > 0.f && x.v < of_bits(0x7f800000)) return y;
    if (x.v == 0.f) return Exact(of_bits(0xff800000));
    return x.v > 0.f ? x : Exact(of_bits(0x7fc00000));
}

// The same of an x that is known to be positive, finite and not subnormal.
__device__ Exact log_normal(Exact x) { return log_of(__float_as_int(x.v), Exact(0.f)); }
__device__ Exact log2_normal(Exact x) { return log_normal(x) * Exact(1.44269504f); }

__device__ Exact log2(Exact x) { return log(x) * Exact(1.44269504f); }

// x / y, given 1 / y rounded to nearest, where nothing underflows or overflows: the same bits in five
// instructions instead of a dozen and a call, which a kernel has for each score. The first
// correction brings the quotient within one unit of its last place; from there the residual is exact
// and the second rounds right (P. Markstein, Computation of elementary functions on the IBM RISC
// System/6000 processor, IBM J. Res. Dev. 34, 1990, theorem 8.2).
__device__ Exact quotient(Exact x, Exact y, Exact inverse) {
    float near = __fmul_rn(x.v, inverse.v);
    near = __fmaf_rn(__fmaf_rn(-near, y.v, x.v), inverse.v, near);
    return Exact(__fmaf_rn(__fmaf_rn(-near, y.v, x.v), inverse.v, near));
}

#ifdef __CUDA_ARCH__
__device__ float rough_reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#endif

// x / y where neither operands nor quotient come near to underflow or overflow: what the compiler's
// division does for such, without its question whether they do, which ends in a call.
__device__ Exact usual_quotient(Exact x, Exact y) {
    float inverse = rough_reciprocal(y.v);
    inverse = __fmaf_rn(__fmaf_rn(-y.v, inverse, 1.f), inverse, inverse);
    return quotient(x, y, Exact(inverse));
}

__device__ Exact rsqrt(Exact x) { return Exact(1.f) / sqrt(x); }

__device__ Exact tanh(Exact x) {
    Exact a(fabsf(x.v) > 10.f ? 10.f : fabsf(x.v));
    Exact n = nearest(a * Exact(2.88539008f));
    Exact r = ((a + a) - n * Exact(0.6933594f)) - n * Exact(-2.1219444e-4f);
    Exact p(1.3882021e-3f);
    p = p * r + Exact(8.369135e-3f);
    p = p * r + Exact(4.1667286e-2f);
    p = p * r + Exact(1.6666524e-1f);
    p = p * r + Exact(4.9999997e-1f);
    Exact scale = power_of_two(to_int(n).v);
    Exact e = scale * (p * r * r + r) + (scale - Exact(1.f));
    Exact y = usual_quotient(e, e + Exact(2.f));
    return Exact(copysignf(a.v < 1e-8f ? a.v : y.v, x.v));      // e is 2 a and e + 2 is 2
}

__device__ Exact sigmoid(Exact x) { return Exact(1.f) / (Exact(1.f) + exp(-x)); }

__device__ Exact erf(Exact x) {
    Exact z = x * x;
    Exact p = Exact(1.f) / Exact(9360.f);
    p = p * z - Exact(1.f) / Exact(1320.f);
    p = p * z + Exact(1.f) / Exact(216.f);
    p = p * z - Exact(1.f) / Exact(42.f);
    p = p * z + Exact(1.f) / Exact(10.f);
    p = p * z - Exact(1.f) / Exact(3.f);
    Exact small = (p * z * x + x) * Exact(1.12837917f);
    // From 16 on e^-z is 0.
    Exact t = usual_quotient(Exact(1.f), Exact(1.f) + Exact(0.3275911f) * min(abs(x), Exact(16.f)));
    Exact q(1.0614054f);
    q = q * t - Exact(1.453152f);
    q = q * t + Exact(1.4214137f);
    q = q * t - Exact(0.28449674f);
    q = q * t + Exact(0.2548296f);
    Exact large = Exact(1.f) - q * t * exp(-z);
    return fabsf(x.v) < 0.5f ? small : Exact(copysignf(large.v, x.v));
}

__device__ Exact sin(Exact x) { return Exact(sinf(x.v)); }
__device__ Exact cos(Exact x) { return Exact(cosf(x.v)); }
__device__ Exact pow(Exact x, Exact y) { return Exact(powf(x.v, y.v)); }

// The same for scores of f32 operands.
__device__ float exact_exp(float x) { return exp(Exact(x)).v; }
__device__ float exact_exp2(float x) { return exp2(Exact(x)).v; }
__device__ float exact_log(float x) { return log(Exact(x)).v; }
__device__ float exact_log2(float x) { return log2(Exact(x)).v; }
__device__ float exact_rsqrt(float x) { return rsqrt(Exact(x)).v; }
__device__ float exact_tanh(float x) { return tanh(Exact(x)).v; }
__device__ float exact_sigmoid(float x) { return sigmoid(Exact(x)).v; }
__device__ float exact_erf(float x) { return erf(Exact(x)).v; }

// For scores of f16 and bf16 operands: what the special function units give, with a relative
// error of 2^-22 (tanh: 2^-11), far below the operands' own.
#ifdef __CUDA_ARCH__
__device__ float fast_exp2(float x) { float y; asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ float fast_log2(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ float fast_tanh(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ float fast_sqrt(float x) { float y; asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ float fast_rsqrt(float x) { float y; asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ float fast_reciprocal(float x) { float y; asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ float fast_exp(float x) { return fast_exp2(x * 1.44269504f); }
__device__ float fast_log(float x) { return fast_log2(x) * 0.693147181f; }
__device__ float fast_sigmoid(float x) { return fast_reciprocal(1.f + fast_exp(-x)); }
__device__ float fast_divide(float x, float y) { return x * fast_reciprocal(y); }

// sin(x + quarters pi / 2), to 2^-21 up to x = 2^26. There is no branch for x beyond, as the compiler's
// sine has, whose copies for each score are long and slow to compile. From 2^31 on floats are some
// forty turns apart, and r is taken for 0.
__device__ float fast_sine(float x, int quarters) {
    float r = x;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float whole = rintf(r * 0.636619772f);
        r = fmaf(-whole, -4.37113900e-8f, fmaf(-whole, 1.57079637f, r));
        quarters += __float2int_rn(whole);
    }
    r = fabsf(x) < 2147483648.f ? r : 0.f * x;
    const float z = r * r;
    const float sine = fmaf(r * z, fmaf(z, fmaf(z, -1.95152959e-4f, 8.33216087e-3f), -1.66666546e-1f), r);
    const float cosine = fmaf(z * z, fmaf(z, fmaf(z, 2.44331571e-5f, -1.38873163e-3f), 4.16666456e-2f),
                              fmaf(z, -0.5f, 1.f));
    const float y = quarters & 1 ? cosine : sine;
    return quarters & 2 ? -y : y;
}
__device__ float fast_sin(float x) { return fast_sine(x, 0); }
__device__ float fast_cos(float x) { return fast_sine(x, 1); }
#endif

__device__ float remainder_of(float x, float y) { return x - y * floorf(x / y); }

// Sums whose bits do not depend on the order of additions: x is cut into multiples of 2^-16, 2^-48
// and 2^-80, and each is counted in an i64. Exact but for what is below 2^-81, up to a sum of 2^46.
// What no count can hold, infinities and NaN among it, goes to `total`, where the counts end up.
#ifdef __CUDA_ARCH__
__device__ void add_exactly(i64* counts, float* total, float x) {
    if (!(fabsf(x) < 70368744177664.f)) {
        atomicAdd(total, x);
        return;
    }
    float unit = 65536.f;
    for (int i = 0; i < 3; ++i) {
        const i64 count = __float2ll_rn(x * unit);
        if (count != 0) atomicAdd(reinterpret_cast<unsigned long long*>(counts + i), (unsigned long long)count);
        x -= __ll2float_rn(count) / unit;
        unit *= 4294967296.f;
    }
}
__device__ double exact_total(const i64* counts) {
    const double unit = 1. / 65536., apart = 1. / 4294967296.;
    return ((double(counts[2]) * apart + double(counts[1])) * apart + double(counts[0])) * unit;
}
#endif

// Which scores of a tile read the same element of a learned buffer: none as far as is known, those
// of a query, of a key, of a distance between both, or all. For each read, mods say so in
// Capture<read>::kind.
enum CaptureKind { CAPTURE_EACH, CAPTURE_ROW, CAPTURE_COLUMN, CAPTURE_DIAGONAL, CAPTURE_BLOCK };
