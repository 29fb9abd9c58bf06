// Rotary positions, in place on the query and key heads of a packed projection: a pair (a, b) of a head becomes
//
//     (a cos - b sin, b cos + a sin)
//
// with the cosine and sine of its token's position. Pairs are an element and the one half the rotated columns
// later, or two neighbours. A thread turns VECTOR pairs.
//   FV_NEIGHBOURS    0 halves, 1 neighbours

struct RopeParams {
    Rows qkv;                   // a row a token; the heads to turn come first
    u64 positions;              // i32 [tokens]
    u64 table;                  // f32 [positions, rotated]: rotated / 2 cosines, then as many sines
    int heads, dim, rotated;    // columns of a head, and those that turn, from the first on
    float sign;                 // -1: back
};

extern "C" __global__ void __launch_bounds__(THREADS)
fv_rope(const __grid_constant__ RopeParams p) {
    const int half = p.rotated / 2, vectors = half / VECTOR;
    const int number = blockIdx.y * THREADS + threadIdx.x, head = number / vectors, pair = number % vectors * VECTOR;
    if (head >= p.heads) return;
    const i64 position = reinterpret_cast<const int*>(p.positions)[blockIdx.x];
    const float* const angles = reinterpret_cast<const float*>(p.table) + position * p.rotated + pair;
    Elem* const at = p.qkv.row(blockIdx.x) + head * p.dim + (FV_NEIGHBOURS ? 2 * pair : pair);
    Elem* const beside = at + (FV_NEIGHBOURS ? VECTOR : half);
    float first[VECTOR], second[VECTOR];
    load(first, at);
    load(second, beside);
    auto turn = [&](float& a, float& b, int i) {
        const float c = angles[i], s = p.sign * angles[half + i], x = a;
        a = x * c - b * s;
        b = b * c + x * s;
    };
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        if constexpr (!FV_NEIGHBOURS) turn(first[i], second[i], i);
        else if constexpr (VECTOR == 1) turn(first[0], second[0], 0);
        else if (2 * i < VECTOR) turn(first[2 * i], first[2 * i + 1], i);
        else turn(second[2 * i - VECTOR], second[2 * i + 1 - VECTOR], i);
    }
    store(at, first);
    store(beside, second);
}
