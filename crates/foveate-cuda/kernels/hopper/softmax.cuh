// The softmax of fv_forward on Hopper: exponents of 2 below a reference, as in the portable family (portable/forward.cu).
//
// There a tile's largest scores come before its weights, so that the reference can be raised first. Overlapped steps
// of scores that no function makes (BY_SUMS) do without: they weigh by the references of the steps before, and what
// tells that these are too low is that sums of weights become large. So a step has a quarter fewer instructions, and its
// powers wait for nothing. A row whose scores rise in a step by so much that weights or their sum leave f32, by 65 at
// the least, or their sum what a sink or a waiting step behind it can take, by 52, is computed again, key by key, which
// takes long. So that rows of usual scores are not, the largest score goes before the weights in the first two steps of
// an item, where a row has no reference yet, and from a reference of 40 on; and where somebody asks for max_score.

template <int COUNT>
__device__ void multiply_rows(float (&all)[COUNT][4], const float (&by)[2]) {
    #pragma unroll
    for (int i = 0; i < COUNT * 4; ++i) all[i / 4][i % 4] *= by[i % 4 / 2];
}

// The softmax of a thread's rows, lane / 4 and lane / 4 + 8 of its warp's 16.
struct Softmax {
    float row_max[2], reference_max[2], row_sum[2];        // row_max and row_sum: of this lane's columns
    float scale;                                           // on the sums of products
    float unit, headroom;                                  // RESCALE_THRESHOLD as a score
    bool unscaled;              // scores are sums of products, so is row_max, but not with FV_SCALE_BLOCKS
    bool wants_max;             // row_max is the largest score, to the last bit
    bool fits;                  // the next overlapped step may go by the references that there are

    __device__ Softmax(float scale, bool wants_max) : wants_max(wants_max), fits(false) { set_scale(scale); }

    __device__ void set_scale(float of_item) {
        unscaled = !FV_SCORE && (FV_SCALE_BLOCKS ? is_usual(of_item) : of_item > 1e-20f);
        scale = FV_SCALE_BLOCKS && !FV_SCORE && !unscaled ? 1.f : of_item;
        unit = unscaled && !FV_SCALE_BLOCKS ? scale * LOG2_E : LOG2_E;
        headroom = RESCALE_THRESHOLD / unit;
    }

    // What `weigh` multiplies the scores of a block by.
    __device__ float scale_of(const KeyScales& scales, int block) const {
        return FV_SCORE ? 1.f : scale * scales.score[block];
    }

    __device__ void clear() {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            row_max[half] = reference_max[half] = -infinity();
            row_sum[half] = 0.f;
        }
        fits = false;
    }

    // The exponent that is subtracted from those of a row.
    __device__ float reference(int half) const {
        return reference_max[half] == -infinity() ? 0.f : fmaf(reference_max[half], unit, -LARGEST_EXPONENT);
    }
    // A score function may give -1e30 to a whole row. Then score - row_max is exact, but the difference of the
    // products with `unit` has their rounding error.
    __device__ static bool is_large(float highest) {
        return FV_SCORE && fabsf(highest) > LARGE_SCORE && highest != -infinity();
    }

    // Raises the references that `highest` is above, and brings row_sum and `rescale` down with them. Returns whether
    // there were any in the warp.
    __device__ bool raise(const float (&highest)[2], float (&rescale)[2]) {
        const bool is_above = (highest[0] > reference_max[0]) | (highest[1] > reference_max[1]);
        if (!__any_sync(~0u, is_above)) return false;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Before the first visible key there is nothing to rescale.
            const float before = reference_max[half], reference_before = reference(half);
            reference_max[half] = max_or_nan(before, quad_max(highest[half]) + headroom);
            const float exponent =
                is_large(before) ? (before - reference_max[half]) * unit : reference_before - reference(half);
            const float by = before == -infinity() ? 1.f : exp2_score(exponent);
            rescale[half] *= by;
            // A sum that the step before has left, and that a power of 0 would bring down by too much, is lost.
            row_sum[half] = BY_SUMS && row_sum[half] > LARGE_SUM ? infinity() : row_sum[half] * by;
        }
        fits = fits && takes_sums();
        return true;
    }

    // Whether every row of the warp has a reference, and none so large that scores may rise by more than f32 has.
    __device__ bool takes_sums() const {
        return __all_sync(~0u, !wants_max & (fabsf(reference_max[0]) * unit < LARGE_EXPONENT) &
                                   (fabsf(reference_max[1]) * unit < LARGE_EXPONENT));
    }
    __device__ bool sums_fit() const {
        return !SUMS_LATE || __all_sync(~0u, (row_sum[0] <= LARGEST_SUM) & (row_sum[1] <= LARGEST_SUM));
    }

    // Brings rows of which `sum` is above 32 down to that, as `raise` does. For row_max any score near the largest does.
    __device__ void raise_by_sums(const float (&sum)[2], float (&rescale)[2]) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float before = reference(half);
            const float above = fmaxf(log2_of(fminf(quad_max(sum[half]), LARGEST_FLOAT)) - 5.f, 0.f);
            reference_max[half] += above * (headroom / RESCALE_THRESHOLD);
            row_max[half] = max_or_nan(row_max[half], reference_max[half] - headroom);
            const float by = exp2_score(before - reference(half));
            row_sum[half] *= by;
            rescale[half] *= by;
        }
        fits = takes_sums() && sums_fit();
    }

    // The largest score of a row whose weights add up to `sum`; one near it where the last step has left a large sum.
    // row_max may be far below then, by which lse would be rounded.
    __device__ float largest_of_row(int half, float sum) const {
        const float largest = quad_max(row_max[half]);
        if (!SUMS_LATE || wants_max) return largest;
        const float above = log2_of(fminf(sum, LARGEST_FLOAT)) - 16.f;         // above LARGEST_SUM
        if (!(above > 0.f)) return largest;
        return max_or_nan(largest, fmaf(above, headroom / RESCALE_THRESHOLD, reference_max[half] - headroom));
    }

    // `weigh` in an overlapped step, if BY_SUMS.
    template <typename Look>
    __device__ bool weigh_by_sums(float (&s)[N][4], float (&rescale)[2], const Look& look) {
        bool rescales = false;
        if (!fits) {
            if (!sums_fit() && takes_sums()) {
                raise_by_sums(row_sum, rescale);
                rescales = true;
            }
            if (!fits) {
                find_largest(s);
                rescales |= raise(row_max, rescale);
                fits = takes_sums();
            }
        }
        const float shift[2] = {-reference(0), -reference(1)};
        if constexpr (SUMS_LATE) {
            add_weights(s, 0, unit, shift, row_sum, look);
            fits &= sums_fit();
        } else {
            float sum[2] = {};
            add_weights(s, 0, unit, shift, sum, look);
            if (__any_sync(~0u, (sum[0] > LARGEST_SUM) | (sum[1] > LARGEST_SUM))) {
                float by[2] = {1.f, 1.f};
                raise_by_sums(sum, by);
                multiply_rows(s, by);
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    sum[half] *= by[half];
                    rescale[half] *= by[half];
                }
                rescales = true;
            }
            #pragma unroll
            for (int half = 0; half < 2; ++half) row_sum[half] += sum[half];
        }
        return rescales;
    }

    // Turns scores into weights. Returns whether out is to be multiplied by `rescale` first.
    template <typename Look>
    __device__ bool weigh(float (&s)[N][4], float (&rescale)[2], const KeyScales& scales, const Look& look) {
        float highest[2];                                  // what the reference has to reach
        if constexpr (FV_SCALE_BLOCKS) {
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                highest[half] = -infinity();
                #pragma unroll
                for (int block = 0; block < KEY_BLOCKS; ++block) {
                    const float largest = largest_score(s, half, block) * scale_of(scales, block);
                    row_max[half] = max_or_nan(row_max[half], largest);
                    highest[half] = max_or_nan(highest[half], fmaf(scales.value[block], 1.f / LOG2_E, largest));
                }
            }
        } else {
            find_largest(s);
        }
        const bool rescales = raise(FV_SCALE_BLOCKS ? highest : row_max, rescale);
        float shift[2] = {-reference(0), -reference(1)};
        if constexpr (FV_SCORE)
            if (__any_sync(~0u, is_large(reference_max[0]) || is_large(reference_max[1])))
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float offset = reference_max[half] == -infinity() ? 0.f : -reference_max[half];
                    #pragma unroll
                    for (int j = 0; j < N * 2; ++j) s[j / 2][half * 2 + j % 2] += offset;
                    shift[half] = LARGEST_EXPONENT;
                }
        if constexpr (!FV_SCALE_BLOCKS) {
            add_weights(s, 0, unit, shift, row_sum, look);
            return rescales;
        }
        #pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
            const float value = scales.value[block], inverse = exp2_score(-value);
            const float of_block[2] = {shift[0] + value, shift[1] + value};
            float sum[2] = {};
            auto look_last = [&](float weights) { if (block == KEY_BLOCKS - 1) look(weights); };
            add_weights(s, block, unit * scale_of(scales, block), of_block, sum, look_last);
            #pragma unroll
            for (int half = 0; half < 2; ++half) row_sum[half] = fmaf(sum[half], inverse, row_sum[half]);
        }
        return rescales;
    }

    // Turns the scores of a block into weights, and adds them up. `look` gets the sum of those before it, of a row.
    template <typename Look>
    __device__ static void add_weights(float (&s)[N][4], int block, float unit, const float (&shift)[2],
                                       float (&sum)[2], const Look& look) {
        #pragma unroll
        for (int n = 0; n < N_BLOCK; ++n) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = s[block * N_BLOCK + n][i];
                x = exp2_score(fmaf(x, unit, shift[i / 2]));
                sum[i / 2] += x;
            }
            if (n == N_BLOCK * 5 / 8) look(sum[0]);
        }
    }

    __device__ void find_largest(const float (&s)[N][4]) {
        #pragma unroll
        for (int half = 0; half < 2; ++half) row_max[half] = max_or_nan(row_max[half], largest_score(s, half, 0));
    }

    // The largest of this lane's scores in a row of a block.
    __device__ static float largest_score(const float (&all)[N][4], int half, int block) {
        const float (*const s)[4] = all + block * N_BLOCK;
        auto of_pair = [&](int n) { return max_or_nan(s[n][half * 2], s[n][half * 2 + 1]); };
        float largest[2] = {of_pair(0), of_pair(1)};
        #pragma unroll
        for (int n = 2; n < N_BLOCK; ++n) largest[n % 2] = max_or_nan(largest[n % 2], of_pair(n));
        return max_or_nan(largest[0], largest[1]);
    }
};
