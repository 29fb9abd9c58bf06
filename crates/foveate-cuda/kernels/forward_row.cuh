// Recomputes single rows of the forward, key by key, one warp for each row and without tiles.
//
// A matrix product multiplies weights of 0 too, and 0 times infinity is NaN: one non-finite value of v
// would reach every row of the tile, also rows whose mask hides that key. The main loop does not guard
// against that. A warp whose out has a non-finite element recomputes here, without weights of 0, its rows
// whose row_sum is finite: in the portable family after the epilogue of its tile, in the hopper family once
// the CTA has no item left, the rows of all items. That also covers three overflows: sums that leave f32
// because the P of a tile is up to 2^RESCALE_THRESHOLD, or above f32 where the hopper family goes by sums;
// and f32 rows that see infinity, where the split into two tf32 makes infinity times any weight NaN.
//
// Roles: a warp owns its rows of fv_forward, a lane every 32nd key and every 32nd column of out.
// No barriers beyond the warp, no shared memory.

// The page that an entry of a sequence's table holds: one outside 0 .. page_count is clamped, and reported by checked
// kernels.
__device__ int valid_page(const ForwardParams& p, int sequence, int page) {
    const int clamped = max(min(page, p.page_count - 1), 0);
    if (FV_CHECKED && page != clamped) report_index(p.page_report, -1, sequence, page);
    return clamped;
}

__device__ int read_entry(const ForwardParams& p, int sequence, int entry) {
    return __ldg(p.page_table + i64(sequence) * p.page_stride + entry);
}

// Paged KV: elements from row 0 of page 0 to the row of key `key`.
__device__ i64 row_in_pages(const ForwardParams& p, const View& view, int sequence, u32 key) {
    const u32 entry = key / u32(p.page_size);
    return valid_page(p, sequence, read_entry(p, sequence, entry)) * view.batch +
           (key - entry * p.page_size) * view.row;
}

// The row of key `key` of a sequence whose row 0 is at `all`; with paged KV, row 0 of page 0 is there.
__device__ const Elem* row_of_key(const ForwardParams& p, const View& view, const Rows& all, int sequence, int key) {
    const i64 row = FV_PAGED ? row_in_pages(p, view, sequence, key) : key * view.row;
    return reinterpret_cast<const Elem*>(all.data) + row;
}

// What a row's product with a key is multiplied by, and what that key's value is.
struct RowScales {
    float scale;

    __device__ float of_score(int) const { return scale; }
    __device__ float of_value(int) const { return 1.f; }
};

// `steps` are those of the row's CTA.
template <typename Steps, typename Scales>
__device__ void recompute_row(const ForwardParams& p, const Mods& mods, const Sequence& sequence, Steps steps,
                              Scales scales, int head, int query) {
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
        return fv_score(mods, place, query, key, sum * scales.of_score(key), to_float(Int(query - key)),
                        fv_place_reads(mods, place));
    };

    float out[COLUMNS] = {}, row_max = -infinity(), row_sum = 0.f;
    #pragma unroll 1
    while (steps.next()) {
        const int end = min(steps.key + FV_BN, sequence.k_len);
        #pragma unroll 1
        for (int first = steps.key; first < end; first += 32) {
            const int key = first + lane;
            const bool visible = key < end && (!steps.evaluate || fv_mask(mods, place, query, key));
            const float score = visible ? score_of(key) : -infinity();
            float new_max = max_or_nan(row_max, score);
            for (int distance = 16; distance > 0; distance /= 2)
                new_max = max_or_nan(new_max, __shfl_xor_sync(~0u, new_max, distance));
            const float rescale = row_max == new_max ? 1.f : exp2f((row_max - new_max) * LOG2_E);
            float weight = score == -infinity() ? 0.f : exp2f((score - new_max) * LOG2_E);
            row_max = new_max;
            row_sum = row_sum * rescale + weight;
            if (FV_DROPOUT && !fv_dropout_keep(mods, place, query, key)) weight = 0.f;
            #pragma unroll
            for (int c = 0; c < COLUMNS; ++c) out[c] = rescale == 0.f ? 0.f : out[c] * rescale;
            #pragma unroll 1
            for (u32 left = __ballot_sync(~0u, weight != 0.f); left != 0; left &= left - 1) {
                const int from = __ffs(left) - 1;
                const float w = __shfl_sync(~0u, weight, from) * scales.of_value(first + from);
                const Elem* v = row_of_key(p, p.v, of_v, sequence.b, first + from);
                #pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    if (lane + c * 32 < FV_DV)
                        out[c] = fmaf(w, widen<FV_DTYPE>(__ldg(v + (lane + c * 32) * p.v.elem)), out[c]);
            }
        }
    }
    for (int distance = 16; distance > 0; distance /= 2) row_sum += __shfl_xor_sync(~0u, row_sum, distance);

    const float scale = FV_DROPOUT ? fv_dropout_scale(mods) : 1.f;
    if constexpr (FV_KV_SPLIT) {
        const i64 row = partial_row(p, sequence, head, query);
        if (lane == 0) {
            p.partial_max[row] = row_max;
            p.partial_sum[row] = row_sum;
        }
        #pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (lane + c * 32 < FV_DV) p.partial_out[row * FV_DV + lane + c * 32] = out[c] * scale;
    } else {
        const Row row = finish_row(p, sequence, head, query, row_max, row_sum, lane == 0);
        #pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (lane + c * 32 < FV_DV) store_one(row, lane + c * 32, out[c] * scale * row.factor);
    }
}
