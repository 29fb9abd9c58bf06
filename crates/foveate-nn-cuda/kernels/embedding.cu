// Rows of a table, or of a part of it, by token, and the gradient of the table.
//
// The gradient of a row is the sum over the places where its token stands, in their order. Places are sorted by
// token and cut into segments, a CTA each, so that a frequent token keeps no single CTA busy: a token of one
// segment is added to its row at once, sums of the others go to `partial`, and fv_embedding_join adds them in order.
//   FV_NARROW    0 the gradient of the table is f32, 1 it is as operands

typedef ElemOf<FV_NARROW ? FV_DTYPE : 2>::type Gradient;

struct EmbeddingParams {
    Rows table, out;
    u64 tokens;                 // i32 [rows of out]
    int width;
    float scale;
    int first, rows;            // the token of the table's first row, and its rows; 0 for tokens without one
};

// As EmbeddingOrder in src/embedding.rs makes them.
struct Segment { int token, first, end, partial; };         // places order[first..end]; partial -1: all of the token's
struct Joined { int token, first, end, unused; };           // rows of partial

struct EmbeddingBackwardParams {
    Rows d_out;
    u64 d_table;                // Gradient [rows, width], added to
    u64 order;                  // i32: places, sorted by token
    u64 segments;               // Segment, or Joined
    u64 partial;                // f32 [segments of tokens with more than one, width]
    int width;
    float scale;
    int first, rows;            // the token of the table's first row, and its rows; other tokens are left out
};

// A vector of the table's gradient, in either type.
constexpr int NARROW = FV_DTYPE == 2 ? 1 : FV_DTYPE;
__device__ void load_sums(float (&x)[VECTOR], const float* from) { load_f32(x, from); }
__device__ void load_sums(float (&x)[VECTOR], const u16* from) { load<NARROW>(x, from); }
__device__ void store_sums(float* to, const float (&x)[VECTOR]) { store_f32(to, x); }
__device__ void store_sums(u16* to, const float (&x)[VECTOR]) { store<NARROW>(to, x); }

extern "C" __global__ void __launch_bounds__(THREADS)
fv_embedding(const __grid_constant__ EmbeddingParams p) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * VECTOR;
    if (column >= p.width) return;
    const int row = reinterpret_cast<const int*>(p.tokens)[blockIdx.x] - p.first;
    float x[VECTOR] = {};
    if (row >= 0 && row < p.rows) load(x, p.table.row(row) + column);
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) x[i] *= p.scale;
    store(p.out.row(blockIdx.x) + column, x);
}

// With 1536 threads an SM it may hold what it asks for of several places: left to itself the compiler would have 2048,
// and ask for one after the other.
extern "C" __global__ void __launch_bounds__(THREADS, 1536 / THREADS)
fv_embedding_backward(const __grid_constant__ EmbeddingBackwardParams p) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * VECTOR;
    if (column >= p.width) return;
    const Segment segment = reinterpret_cast<const Segment*>(p.segments)[blockIdx.x];
    const int row = segment.token - p.first;
    if (row < 0 || row >= p.rows) return;
    const int* const order = reinterpret_cast<const int*>(p.order);
    float sum[VECTOR] = {};
    #pragma unroll 4
    for (int i = segment.first; i < segment.end; ++i) {
        float x[VECTOR];
        load(x, p.d_out.row(order[i]) + column);
        #pragma unroll
        for (int j = 0; j < VECTOR; ++j) sum[j] += x[j];
    }
    if (segment.partial >= 0) {
        store_f32(reinterpret_cast<float*>(p.partial) + i64(segment.partial) * p.width + column, sum);
        return;
    }
    Gradient* const to = reinterpret_cast<Gradient*>(p.d_table) + i64(row) * p.width + column;
    float before[VECTOR];
    load_sums(before, to);
    #pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum[j] = before[j] + p.scale * sum[j];
    store_sums(to, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_embedding_join(const __grid_constant__ EmbeddingBackwardParams p) {
    const int column = blockIdx.y * THREADS + threadIdx.x;
    if (column >= p.width) return;
    const Joined joined = reinterpret_cast<const Joined*>(p.segments)[blockIdx.x];
    const int row = joined.token - p.first;
    if (row < 0 || row >= p.rows) return;
    float sum = 0.f;
    for (int i = joined.first; i < joined.end; ++i)
        sum += reinterpret_cast<const float*>(p.partial)[i64(i) * p.width + column];
    constexpr int DTYPE = FV_NARROW ? FV_DTYPE : 2;
    Gradient& to = reinterpret_cast<Gradient*>(p.d_table)[i64(row) * p.width + column];
    to = narrow<DTYPE>(widen<DTYPE>(to) + p.scale * sum);
}
