// Scales of e4m3 operands in fv_forward on Hopper.
//
// Of a scale for each head the scheduler makes one factor on an item's scores and one on its out. With FV_SCALE_BLOCKS
// blocks of queries and of keys have scales of their own, multiples of 64 rows: a consumer's queries have one, the keys
// of a tile KEY_BLOCKS. Nothing is multiplied number by number for them:
//
//     weight = 2^(s * unit[block] + value[block] - reference)     reference >= the largest exponent of the row so far
//     row_sum += 2^-value[block] * sum of the block's weights
//
// where unit has the scales of Q and K, and value is log2 of V's scale over that of the head's first keys, which out is
// multiplied by. So a weight is rounded to e4m3 as the part that it has in out, and one row's weights use the range of
// e4m3 however far V's scales are apart.
//
// That takes scales that are neither 0, negative nor huge. Where others are, the step is ODD: its scores and weights
// are multiplied number by number by what `unit` and `value` do not hold.

// Scales that factors are made of: the product of two of them is a normal number.
__device__ inline bool is_usual(float scale) { return scale > 1e-18f && scale < 1e18f; }

__device__ inline float scale_at(const ScaleView& view, int b, int head, int row) {
    if (!view.data) return 1.f;
    const float* const of_head = view.data + b * view.batch + head * view.head;
    return __ldg(of_head + (FV_SCALE_BLOCKS ? u32(row) / u32(view.rows) * view.block : 0));
}

#if FV_DTYPE == 3
// V's scale that out is multiplied by: that of the first keys, if others can be divided by it.
__device__ inline float scale_of_out(const PersistentParams& persistent, int b, int head_kv) {
    const float first = scale_at(persistent.v_scale, b, head_kv, 0);
    return !FV_SCALE_BLOCKS || (fabsf(first) > 1e-37f && fabsf(first) < 8e37f) ? first : 1.f;
}

// Of a row that is computed key by key.
struct KeyedScales {
    const ForwardParams& p;
    const PersistentParams& persistent;
    int b, head, query;

    __device__ float of_score(int key) const {
        return p.scale * scale_at(persistent.q_scale, b, head, query) *
               scale_at(persistent.k_scale, b, head / FV_GROUP, key);
    }
    __device__ float of_value(int key) const { return scale_at(persistent.v_scale, b, head / FV_GROUP, key); }
};

__device__ inline ItemScales item_scales(const ForwardParams& p, const PersistentParams& persistent,
                                         const Sequence& sequence, int head, int tile) {
    ItemScales scales;
    const int head_kv = head / FV_GROUP;
    #pragma unroll
    for (int c = 0; c < (FV_SCALE_BLOCKS ? CONSUMERS : 1); ++c) {
        const int query = min(tile * FV_BM + c * BLOCK_UNIT, sequence.q_len - 1);
        scales.scores[c] = p.scale * scale_at(persistent.q_scale, sequence.b, head, query);
        if (!FV_SCALE_BLOCKS) scales.scores[c] *= scale_at(persistent.k_scale, sequence.b, head_kv, 0);
    }
    scales.out = scale_of_out(persistent, sequence.b, head_kv);
    return scales;
}

#endif

// What a step's scores and weights are multiplied by, for each BLOCK_UNIT keys, in smem.
struct KeyScales {
    float score[4];
    float value[4];         // as exponents of 2

#if FV_SCALE_BLOCKS
    static constexpr float MOST_EXPONENT = 100.f;

    // Those of the keys from `key` on. Returns whether the step is ODD.
    __device__ bool read(const PersistentParams& persistent, const Item& item, int key) {
        bool is_odd = false;
        #pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
            const float of_keys = scale_of_block(persistent.k_scale, item, key, block);
            const float ratio = value_ratio(persistent, item, key, block);
            const bool is_factor = FV_SCORE || is_usual(of_keys);
            score[block] = is_factor ? of_keys : 1.f;
            value[block] = exponent(ratio);
            is_odd |= !is_factor | !(ratio > 0.f) | (fabsf(value[block]) == MOST_EXPONENT);
        }
        return is_odd;
    }

    // Multiplies the scores of an ODD step, or of an item whose own factor is no usual one, by what Softmax does not.
    __device__ static void complete_scores(float (&s)[N][4], const PersistentParams& persistent, const Item& item,
                                           int consumer, int key) {
        const float of_item = item.scales.scores[consumer];
        multiply(s, [&](int block) {
            const float of_keys = scale_of_block(persistent.k_scale, item, key, block);
            return (is_usual(of_item) ? 1.f : of_item) * (is_usual(of_keys) ? 1.f : of_keys);
        });
    }

    // Multiplies the weights of an ODD step by what `value` does not hold.
    __device__ static void complete_weights(float (&s)[N][4], const PersistentParams& persistent, const Item& item,
                                            int key) {
        multiply(s, [&](int block) {
            const float ratio = value_ratio(persistent, item, key, block);
            return ratio * exp2_score(-exponent(ratio));
        });
    }

private:
    // Of the block's keys of a tile from `key` on.
    __device__ static float scale_of_block(const ScaleView& view, const Item& item, int key, int block) {
        const int at = min(key + block * BLOCK_UNIT, item.sequence.k_len - 1);
        return scale_at(view, item.sequence.b, item.head / FV_GROUP, at);
    }
    __device__ static float value_ratio(const PersistentParams& persistent, const Item& item, int key, int block) {
        return __fdividef(scale_of_block(persistent.v_scale, item, key, block), item.scales.out);
    }
    // Of the size of a ratio, as far as weights have room for it.
    __device__ static float exponent(float ratio) {
        return fminf(fmaxf(__log2f(fabsf(ratio)), -MOST_EXPONENT), MOST_EXPONENT);
    }

    template <typename F>
    __device__ static void multiply(float (&s)[N][4], F factor_of) {
        #pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
            const float factor = factor_of(block);
            #pragma unroll
            for (int j = 0; j < N_BLOCK * 4; ++j) s[block * N_BLOCK + j / 4][j % 4] *= factor;
        }
    }
#endif
};
static_assert(sizeof(KeyScales) == 32 && KEY_BLOCKS <= 4, "a place of scales");

// The place of a step's.
__device__ inline KeyScales& key_scales(char* shared, const Ring<FV_STAGES>& k) {
    return *reinterpret_cast<KeyScales*>(shared + AT_SCALES + sizeof(KeyScales) * (k.stage * 2 + k.round % 2));
}
