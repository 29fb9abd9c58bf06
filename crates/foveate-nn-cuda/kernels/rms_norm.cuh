// What the backward passes of RMSNorm share, a CTA or a warp a row.

constexpr int HELD = FV_HELD;

struct RmsNormBackwardParams {
    Rows x, d_out, d_x, again;      // what the forward gave, once more: nobody asks where its data is null
    u64 weight, inverse;
    u64 partial;                    // f32 [parts, width]; a part a CTA
    int rows, width, accumulate;
    float offset;
};

// What the forward gave of a row, to the bit, by threads that each take every `threads`-th vector: x comes from the
// caches, a few vectors at a time, so that no registers hold it until here.
__device__ void give_again(const RmsNormBackwardParams& p, int row, float inverse, int thread, int threads) {
    #pragma unroll 4
    for (int column = thread * VECTOR; column < p.width; column += threads * VECTOR) {
        float again[VECTOR], w[VECTOR];
        load(again, p.x.row(row) + column);
        load(w, reinterpret_cast<const Elem*>(p.weight) + column);
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) again[i] = again[i] * inverse * (p.offset + w[i]);
        store(p.again.row(row) + column, again);
    }
}
