// Elements as they lie in memory. What a file is compiled for:
//   FV_DTYPE     of operands: 0 f16, 1 bf16, 2 f32
//   FV_VECTOR    elements of an operand that a thread reads at once: rows start at multiples of so many
//   FV_THREADS   of a CTA

constexpr int VECTOR = FV_VECTOR, THREADS = FV_THREADS, WARPS = THREADS / 32;
constexpr float LOG2_E = 1.4426950408889634f;

template <int DTYPE> struct ElemOf { typedef u16 type; };
template <> struct ElemOf<2> { typedef float type; };

template <int DTYPE>
__device__ float widen(typename ElemOf<DTYPE>::type x) {
    if constexpr (DTYPE == 0) return from_f16(x);
    else if constexpr (DTYPE == 1) return bits_float(u32(x) << 16);
    else return x;
}
template <int DTYPE>
__device__ typename ElemOf<DTYPE>::type narrow(float x) {
    if constexpr (DTYPE == 0) return to_f16(x);
    else if constexpr (DTYPE == 1) return to_bf16(x);
    else return x;
}

typedef ElemOf<FV_DTYPE>::type Elem;

template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vector { T of[COUNT]; };

// `VECTOR` elements from `at` on, a multiple of VECTOR: as they lie in memory, and as numbers.
template <int DTYPE = FV_DTYPE>
__device__ Vector<typename ElemOf<DTYPE>::type, VECTOR> fetch(const typename ElemOf<DTYPE>::type* from) {
    return *reinterpret_cast<const Vector<typename ElemOf<DTYPE>::type, VECTOR>*>(from);
}
// The same of what nobody reads soon.
template <int DTYPE = FV_DTYPE>
__device__ Vector<typename ElemOf<DTYPE>::type, VECTOR> fetch_streaming(const typename ElemOf<DTYPE>::type* from) {
    return load_streaming(reinterpret_cast<const Vector<typename ElemOf<DTYPE>::type, VECTOR>*>(from));
}
template <int DTYPE = FV_DTYPE>
__device__ void widened(float (&x)[VECTOR], const Vector<typename ElemOf<DTYPE>::type, VECTOR>& from) {
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) x[i] = widen<DTYPE>(from.of[i]);
}
template <int DTYPE = FV_DTYPE>
__device__ void load(float (&x)[VECTOR], const typename ElemOf<DTYPE>::type* from) {
    widened<DTYPE>(x, fetch<DTYPE>(from));
}
template <int DTYPE = FV_DTYPE>
__device__ Vector<typename ElemOf<DTYPE>::type, VECTOR> narrowed(const float (&x)[VECTOR]) {
    Vector<typename ElemOf<DTYPE>::type, VECTOR> v;
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) v.of[i] = narrow<DTYPE>(x[i]);
    return v;
}
template <int DTYPE = FV_DTYPE>
__device__ void store(typename ElemOf<DTYPE>::type* to, const float (&x)[VECTOR]) {
    *reinterpret_cast<Vector<typename ElemOf<DTYPE>::type, VECTOR>*>(to) = narrowed<DTYPE>(x);
}
// f32 numbers that lie beside a vector of operands, 16 bytes at a time.
__device__ void load_f32(float (&x)[VECTOR], const float* from) {
    constexpr int WIDE = VECTOR % 4 == 0 ? 4 : 1;
    #pragma unroll
    for (int i = 0; i < VECTOR; i += WIDE) {
        const auto v = *reinterpret_cast<const Vector<float, WIDE>*>(from + i);
        #pragma unroll
        for (int j = 0; j < WIDE; ++j) x[i + j] = v.of[j];
    }
}
__device__ void store_f32(float* to, const float (&x)[VECTOR]) {
    constexpr int WIDE = VECTOR % 4 == 0 ? 4 : 1;
    #pragma unroll
    for (int i = 0; i < VECTOR; i += WIDE) {
        Vector<float, WIDE> v;
        #pragma unroll
        for (int j = 0; j < WIDE; ++j) v.of[j] = x[i + j];
        *reinterpret_cast<Vector<float, WIDE>*>(to + i) = v;
    }
}

// As it is read again.
__device__ float rounded(float x) { return widen<FV_DTYPE>(narrow<FV_DTYPE>(x)); }

// Rows side by side or apart, elements of a row side by side.
struct Rows {
    u64 data;
    i64 stride;         // elements from a row to the next

    __device__ Elem* row(i64 number) const { return reinterpret_cast<Elem*>(data) + number * stride; }
};

// The sum over the CTA, for all its threads, in an order that THREADS fixes.
template <typename T>
__device__ T cta_sum(T x) {
    T* const of_warps = scratch<T>();
    #pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    sync_cta();         // what an earlier sum wrote has been read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    sync_cta();
    T sum = of_warps[0];
    #pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) sum += of_warps[warp];
    return sum;
}
