// Attention whose tokens are on several ranks: partial results joined, and gradients of keys brought together.

struct JoinParams {
    u64 out;                    // f32 [tokens, heads, dim]
    u64 lse;                    // f32 [rows, heads, len], natural logs of denominators
    u64 part;                   // of other keys, f32 [rows, count, heads, dim]
    u64 part_lse;               // of other keys, f32 [rows, heads, count]
    u64 to;                     // [tokens, heads, dim], f32 or as operands
    u64 to_lse;                 // as lse
    i64 elems;
    int heads, len, dim;
    int to_is_f32;
    int first, count;           // tokens of a row that `part` has
};

struct SumKeysParams {
    u64 from;                   // f32 [all rows, width]
    u64 sources;                // i32 [parts, rows]: rows of `from`, -1 where a part has none
    Rows to;                    // [rows, width]
    int parts, rows, width;
};

// Both parts are divided by their own denominators, so a row is their mean, weighted by e^lse. A row without keys
// weighs nothing, and has an lse of -inf; where `part` has none, it is not read, and `out` is what it was.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_join(const __grid_constant__ JoinParams p) {
    const i64 at = (i64(blockIdx.x) * THREADS + threadIdx.x) * VECTOR;
    if (at >= p.elems) return;
    const i64 row = at / p.dim, token = row / p.heads, head = row % p.heads, batch = token / p.len;
    const i64 of_lse = (batch * p.heads + head) * p.len + token % p.len;
    const float lse = reinterpret_cast<const float*>(p.lse)[of_lse];
    const float none = bits_float(0xff800000);
    const int place = int(token % p.len) - p.first;
    float part_lse = none;
    if (place >= 0 && place < p.count)
        part_lse = reinterpret_cast<const float*>(p.part_lse)[(batch * p.heads + head) * p.count + place];
    float joined = lse, x[VECTOR];
    if (part_lse != none) {
        float own = 0.f, other = 1.f, y[VECTOR];
        joined = part_lse;
        if (lse != none) {
            const float most = lse > part_lse ? lse : part_lse;
            own = expf(lse - most), other = expf(part_lse - most);
            const float sum = own + other;
            own /= sum, other /= sum, joined = most + logf(sum);
        }
        load_f32(x, reinterpret_cast<const float*>(p.out) + at);
        const i64 of_part = ((batch * p.count + place) * p.heads + head) * p.dim + at % p.dim;
        load_f32(y, reinterpret_cast<const float*>(p.part) + of_part);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) x[i] = x[i] * own + y[i] * other;
        if (p.to_is_f32) store_f32(reinterpret_cast<float*>(p.to) + at, x);
        else store(reinterpret_cast<Elem*>(p.to) + at, x);
    } else if (!p.to_is_f32) {
        load_f32(x, reinterpret_cast<const float*>(p.out) + at);
        store(reinterpret_cast<Elem*>(p.to) + at, x);
    }
    if (at % p.dim == 0) reinterpret_cast<float*>(p.to_lse)[of_lse] = joined;
}

// In order of part, in f32, rounded once.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_sum_keys(const __grid_constant__ SumKeysParams p) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * VECTOR;
    if (column >= p.width) return;
    const i64 row = blockIdx.x;
    float sum[VECTOR] = {};
    #pragma unroll 1
    for (int part = 0; part < p.parts; ++part) {
        const i64 source = reinterpret_cast<const int*>(p.sources)[i64(part) * p.rows + row];
        if (source < 0) continue;
        float x[VECTOR];
        load_f32(x, reinterpret_cast<const float*>(p.from) + source * p.width + column);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += x[i];
    }
    store(p.to.row(row) + column, sum);
}
