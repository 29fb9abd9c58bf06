// Values of e4m3 as the forward multiplies them: fv_transpose_values<<<columns / 64 * heads * batch, 256>>>
//
// wgmma takes 8-bit operands only along the summed axis, here the keys, and so V has to be transposed. Once for all
// tiles of queries that read it: it costs as much as reading V twice more.
//
// Weights lie in registers as the accumulators of the scores have them, which is in another order than an operand's:
// position 4c + e of 16 keys is key 2c + e, or 8 + 2c + e - 2 from e = 2 on. Keys are written in that order, and zeros
// from the end of a sequence to the end of its last tile.
//
// A CTA has 64 columns of the result, a thread four rows of 16 of them.

constexpr int KEYS = 64, WORDS = ceil_div(FV_DV, 4), PITCH = WORDS | 1;    // words of a key in smem
extern "C" __device__ const int fv_shared_bytes = KEYS * PITCH * 4;

// The sequence that column `column` belongs to.
__device__ int sequence_of(const TransposeValuesParams& p, int column, int batch) {
    if (!p.packed) return min(batch, p.count - 1);
    int low = 0, high = p.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_value(p.sequences[middle], p.tile_kv, true) <= column) low = middle;
        else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_transpose_values(const __grid_constant__ TransposeValuesParams p) {
    extern __shared__ u32 keys[];
    const int chunks = p.columns / KEYS, column = blockIdx.x % chunks * KEYS;
    const int head = blockIdx.x / chunks % p.heads, batch = blockIdx.x / chunks / p.heads;
    const Sequence sequence = p.sequences[sequence_of(p, column, batch)];
    const int first = column - first_value(sequence, p.tile_kv, p.packed);
    const int live = first < 0 ? 0 : min(max(sequence.k_len - first, 0), KEYS);
    const Elem* source = static_cast<const Elem*>(p.v.data) + p.v.at(batch, head, sequence.k_start + first);
    for (int i = threadIdx.x; i < KEYS * WORDS; i += THREADS) {
        const int key = i / WORDS, word = i % WORDS;
        u32 bits = 0;
        if (key < live) {
            const Elem* row = source + key * p.v.row;
            if constexpr (FV_DV % 4 == 0) bits = __ldg(reinterpret_cast<const u32*>(row) + word);
            else
                for (int e = 0; e < 4; ++e)
                    if (word * 4 + e < FV_DV) bits |= u32(row[word * 4 + e]) << 8 * e;
        }
        keys[key * PITCH + word] = bits;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < WORDS * (KEYS / 16); i += THREADS) {
        const int part = i % (KEYS / 16), word = i / (KEYS / 16);
        u32 rows[4][4];
        #pragma unroll
        for (int c = 0; c < 4; ++c) {
            const u32* pair = keys + (part * 16 + c * 2) * PITCH + word;
            const u32 a = pair[0], b = pair[PITCH], x = pair[8 * PITCH], y = pair[9 * PITCH];
            const u32 low = __byte_perm(a, b, 0x5140), high = __byte_perm(a, b, 0x7362);
            const u32 low_after = __byte_perm(x, y, 0x5140), high_after = __byte_perm(x, y, 0x7362);
            rows[0][c] = __byte_perm(low, low_after, 0x5410);
            rows[1][c] = __byte_perm(low, low_after, 0x7632);
            rows[2][c] = __byte_perm(high, high_after, 0x5410);
            rows[3][c] = __byte_perm(high, high_after, 0x7632);
        }
        unsigned char* target = p.values + ((i64(batch) * p.heads + head) * FV_DV + word * 4) * p.columns + column +
                                part * 16;
        #pragma unroll
        for (int row = 0; row < 4; ++row)
            if (FV_DV % 4 == 0 || word * 4 + row < FV_DV)
                *reinterpret_cast<uint4*>(target + i64(row) * p.columns) = make_uint4(rows[row][0], rows[row][1],
                                                                                      rows[row][2], rows[row][3]);
    }
}
