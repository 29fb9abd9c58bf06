// One row of the forward again, key by key, by a warp and without a tile.
//
// A weight of 0 takes part in no sum, but in a product of tiles 0 times infinity is NaN: a value that
// is not finite would reach every row of the tile, those too that do not see its key. Nothing is done
// about it on the way. A warp looks at what out has come to, and where that is not finite though the
// weights are, its rows are computed here, leaving out weights of 0. So are sums that have left f32
// because the powers of a tile are up to 2^SLACK, and rows that see infinity in f32, whose operands are
// split in two, so that infinity times any weight is NaN.

// The row of key `key` of a sequence, whose first is at `all`; with pages the first row of the first is there.
__device__ const Elem* row_of_key(const ForwardParams& p, const View& view, const Rows& all, int sequence, int key) {
    i64 row = key * view.row;
    if constexpr (FV_PAGED) {
        const int page = __ldg(p.page_table + i64(sequence) * p.page_stride + key / p.page_size);
        row = max(min(page, p.page_count - 1), 0) * view.batch + key % p.page_size * view.row;
    }
    return reinterpret_cast<const Elem*>(all.data) + row;
}

// `steps` are those of the row's block.
__device__ void attend_row(const ForwardParams& p, const Mods& mods, const Sequence& sequence, Steps steps, int head, int query) {
    constexpr int COLUMNS = ceil_div(FV_DVP, 32);          // of a lane, 32 apart
    const int lane = threadIdx.x % 32, head_kv = head / FV_GROUP;
    const Place place = {sequence.b, head, head_kv, sequence.q_len, sequence.k_len};
    const Rows of_q = rows_of(p.q, sequence.q_batch, head, sequence.q_start + query, 1);
    const Rows of_k = rows_of(p.k, sequence.k_batch, head_kv, sequence.k_start, sequence.k_len);
    const Rows of_v = rows_of(p.v, sequence.k_batch, head_kv, sequence.k_start, sequence.k_len);
    auto score_of = [&](int key) {
        const Elem* q = reinterpret_cast<const Elem*>(of_q.data);
        const Elem* k = row_of_key(p, p.k, of_k, sequence.b, key);
        float sum = 0.f;
        #pragma unroll 1
        for (int d = 0; d < FV_D; ++d)
            sum = fmaf(widen<FV_DTYPE>(__ldg(q + d * p.q.elem)), widen<FV_DTYPE>(__ldg(k + d * p.k.elem)), sum);
        return fv_score(mods, place, query, key, sum * p.scale);
    };

    float out[COLUMNS] = {}, top = -infinity(), total = 0.f;
    #pragma unroll 1
    while (steps.next()) {
        const int end = min(steps.key + FV_BN, sequence.k_len);
        #pragma unroll 1
        for (int first = steps.key; first < end; first += 32) {
            const int key = first + lane;
            const bool seen = key < end && (!steps.evaluate || fv_mask(mods, place, query, key));
            const float score = seen ? score_of(key) : -infinity();
            float highest = larger(top, score);
            for (int apart = 16; apart > 0; apart /= 2) highest = larger(highest, __shfl_xor_sync(~0u, highest, apart));
            const float shrink = top == highest ? 1.f : exp2f((top - highest) * LOG2_E);
            float weight = score == -infinity() ? 0.f : exp2f((score - highest) * LOG2_E);
            top = highest;
            total = total * shrink + weight;
            if (FV_KEEP && !fv_keep(mods, place, query, key)) weight = 0.f;
            #pragma unroll
            for (int c = 0; c < COLUMNS; ++c) out[c] = shrink == 0.f ? 0.f : out[c] * shrink;
            #pragma unroll 1
            for (u32 left = __ballot_sync(~0u, weight != 0.f); left != 0; left &= left - 1) {
                const int from = __ffs(left) - 1;
                const float w = __shfl_sync(~0u, weight, from);
                const Elem* v = row_of_key(p, p.v, of_v, sequence.b, first + from);
                #pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    if (lane + c * 32 < FV_DV) out[c] = fmaf(w, widen<FV_DTYPE>(__ldg(v + (lane + c * 32) * p.v.elem)), out[c]);
            }
        }
    }
    for (int apart = 16; apart > 0; apart /= 2) total += __shfl_xor_sync(~0u, total, apart);

    const float scale = FV_KEEP ? fv_keep_scale(mods) : 1.f;
    if constexpr (FV_SPLIT) {
        const i64 row = partial_row(p, sequence, head, query);
        if (lane == 0) {
            p.partial_max[row] = top;
            p.partial_sum[row] = total;
        }
        #pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (lane + c * 32 < FV_DV) p.partial_out[row * FV_DV + lane + c * 32] = out[c] * scale;
    } else {
        const Row row = finish_row(p, sequence, head, query, top, total, lane == 0);
        #pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (lane + c * 32 < FV_DV) store_one(row, lane + c * 32, out[c] * scale * row.factor);
    }
}

// Computes the warp's rows again whose weights are finite. Not inlined, so that what it needs takes no
// registers from the rest.
__device__ __noinline__ void attend_again(const ForwardParams& p, const Mods& mods) {
    const Turn turn = Turn::of(p);
    const Tile tile = p.tiles[turn.tile];
    const Sequence sequence = p.sequences[tile.sequence];
    const Steps steps(p, sequence, tile, turn.head * HEADS, blockIdx.z);
    const int first = threadIdx.x / 32 * M * 16, rows = min(QUERIES, sequence.q_len - tile.tile * QUERIES) * HEADS;
    __syncwarp();
    #pragma unroll 1
    for (int row = first; row < min(first + M * 16, rows); ++row) {
        const int head = turn.head * HEADS + row % HEADS, query = tile.tile * QUERIES + row / HEADS;
        float total;
        if constexpr (FV_SPLIT) total = p.partial_sum[partial_row(p, sequence, head, query)];
        else total = p.lse.data[sequence.q_batch * p.lse.batch + head * p.lse.head + (sequence.q_start + query) * p.lse.row];
        __syncwarp();
        if (total < infinity()) attend_row(p, mods, sequence, steps, head, query);
    }
}
