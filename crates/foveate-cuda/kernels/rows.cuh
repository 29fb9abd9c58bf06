// Epilogue of a row of the forward, shared by fv_forward and fv_combine.

#if FV_OUT_DTYPE == 2
typedef float OutElem;
#else
typedef unsigned short OutElem;
#endif

// A row of out, and the factor of its accumulators.
struct Row {
    OutElem* out;
    i64 elem;
    float factor;
};

// Approximations with an error of about 2^-22 where operands are of 16 bits.
__device__ float log2_of(float x) { return FV_DTYPE == 2 ? log2f(x) : __log2f(x); }
__device__ float ratio(float x, float y) { return FV_DTYPE == 2 ? x / y : __fdividef(x, y); }

// `row_max` is the largest score, `row_sum` the sum of e^(score - row_max). Both are in units of the
// scores, not exponents of 2: where one score is far above the others, lse then equals that score to the
// last bit, and the backward, which recomputes that score, gets a weight of exactly 1.
// Joins the sink, writes lse and max_score where `writes`.
__device__ Row finish_row(const ForwardParams& p, const Sequence& sequence, int head, int query,
                          float row_max, float row_sum, bool writes) {
    constexpr float LN_2 = 0.6931471805599453f;
    const i64 at = sequence.q_start + query;
    float max_with_sink = row_max, factor = 1.f;
    if constexpr (FV_SINK) {
        const float sink = __ldg(p.sink + head);
        max_with_sink = max_or_nan(row_max, sink);
        factor = max_with_sink == -infinity() ? 0.f : exp2_score((row_max - max_with_sink) * LOG2_E);
        row_sum = row_sum * factor + (max_with_sink == -infinity() ? 0.f : exp2_score((sink - max_with_sink) * LOG2_E));
    }
    if (writes) {
        const i64 of_head = sequence.q_batch * p.lse.batch + head * p.lse.head;
        p.lse.data[of_head + at * p.lse.row] = row_sum == 0.f ? -infinity() : max_with_sink + log2_of(row_sum) * LN_2;
        if (p.max_score.data)
            p.max_score.data[sequence.q_batch * p.max_score.batch + head * p.max_score.head + at * p.max_score.row] =
                row_max;
    }
    OutElem* out = static_cast<OutElem*>(p.out.data) + p.out.at(sequence.q_batch, head, at);
    return {out, p.out.elem, row_sum == 0.f ? 0.f : ratio(factor, row_sum)};
}

// A column of a row.
__device__ void store_one(const Row& row, int column, float x) {
    if constexpr (FV_OUT_DTYPE == 2) row.out[column * row.elem] = x;
    else row.out[column * row.elem] = narrow2<FV_OUT_DTYPE>(x, 0.f);
}

// Columns column, column + 1 of a row, times its factor; column is even.
__device__ void store_out(const Row& row, int column, float x, float y) {
    if (column >= FV_DV) return;
    x *= row.factor;
    y *= row.factor;
    if constexpr (FV_ALIGN >= (FV_OUT_DTYPE == 2 ? 8 : 4)) {
        if (column + 1 < FV_DV) {
            if constexpr (FV_OUT_DTYPE == 2) *reinterpret_cast<float2*>(row.out + column) = make_float2(x, y);
            else *reinterpret_cast<u32*>(row.out + column) = narrow2<FV_OUT_DTYPE>(x, y);
            return;
        }
    }
    store_one(row, column, x);
    if (column + 1 < FV_DV) store_one(row, column + 1, y);
}
