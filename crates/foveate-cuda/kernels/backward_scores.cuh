// One tile of scores and their gradients, in the registers of the warps that own it: the kernels of the
// backward recompute it.
//
//     S = Q K^T    P = exp(score(scale S) - lse)    dP = dO V^T    dS = P (dP - delta) dscore/ds
//
// Dropout applies to P as the operand of dV, and to dP.
//
// A family says before how its warps own the tile: WARPS_S, the accumulators of a warp; warp_row() and
// warp_column(), where they begin; KEYS_DOWN, whether rows of accumulators are keys, as of S^T = K Q^T, or
// queries; lse_of(), what is subtracted from the scores of a query whose lse smem holds; FINDS_HUGE_LSE, whether
// whoever wrote lse to smem has looked for huge ones; HOLDS_SUMS, whether warps hold HeldSums; SCORE_COPIES, in how
// many kinds of steps a score stands; and HIDES_FIRST, whether entries that the mask hides are found before their
// scores are computed instead of after: with the derivative of a score there are twice as many numbers then, and
// registers for a bit of each before.

typedef float ScoreFragment[WARPS_S.rows][WARPS_S.columns][4];

// A bit for each score of a lane.
struct ScoreBits {
    u32 words[ceil_div(WARPS_S.rows * WARPS_S.columns * 4, 32)] = {};

    __device__ static constexpr int number(int m, int n, int i) { return (m * WARPS_S.columns + n) * 4 + i; }
    __device__ void set(int m, int n, int i) { words[number(m, n, i) / 32] |= 1u << number(m, n, i) % 32; }
    __device__ void set_all_but(const ScoreBits& others) {
        #pragma unroll
        for (int i = 0; i < int(sizeof(words) / 4); ++i) words[i] |= ~others.words[i];
    }
    __device__ bool has(int m, int n, int i) const { return words[number(m, n, i) / 32] >> number(m, n, i) % 32 & 1; }
};

// The tile: its queries query .. query + queries and keys key .. key + keys.
struct ScoreTile {
    Place place;
    int query, queries;
    int key, keys;
    bool evaluate;      // whether the mask is evaluated in it
    bool has_bits;      // or `visible` is the mask's values in it
    ScoreBits visible;
    bool has_huge_lse;  // with FINDS_HUGE_LSE: of one of its queries
};

// ---- places of scores ----

// Row and column, in the tile, of the first score of this lane.
__device__ int score_row() { return warp_row() + threadIdx.x % 32 / 4; }
__device__ int score_column() { return warp_column() + threadIdx.x % 4 * 2; }

constexpr int WARP_QUERIES = KEYS_DOWN ? WARPS_S.columns * 8 : WARPS_S.rows * 16;
constexpr int WARP_KEYS = KEYS_DOWN ? WARPS_S.rows * 16 : WARPS_S.columns * 8;

// A place in the tile, or the way from one to another.
struct Spot {
    int query, key;

    __device__ static constexpr Spot of(int row, int column) {
        return KEYS_DOWN ? Spot{column, row} : Spot{row, column};
    }
    // The way from a lane's first score to number i of accumulator (m, n).
    __device__ static constexpr Spot step(int m, int n, int i) { return of(m * 16 + i / 2 * 8, n * 8 + i % 2); }
    __device__ constexpr Spot operator+(Spot other) const { return {query + other.query, key + other.key}; }

    __device__ static Spot of_lane() { return of(score_row(), score_column()); }
    __device__ static Spot of_warp() { return of(warp_row(), warp_column()); }
};

// The queries that the scores of a lane are of: their number, the one of a score, and how far each is from
// the first.
constexpr int QUERIES_HELD = KEYS_DOWN ? WARPS_S.columns * 2 : WARPS_S.rows * 2;
__device__ constexpr int query_held(int m, int n, int i) { return KEYS_DOWN ? n * 2 + i % 2 : m * 2 + i / 2; }
__device__ constexpr int held_query(int held) { return KEYS_DOWN ? held / 2 * 8 + held % 2 : held * 8; }

// Whether a query that is held has scores in columns from .. to of accumulators.
__device__ constexpr bool is_of_columns(int held, int from, int to) {
    return !KEYS_DOWN || (held / 2 >= from && held / 2 < to);
}

// Calls `f(m, n, i)` for each score of the lane: number i of accumulator (m, n).
template <typename F>
__device__ void for_each_score(F f) {
    #pragma unroll
    for (int m = 0; m < WARPS_S.rows; ++m)
        #pragma unroll
        for (int n = 0; n < WARPS_S.columns; ++n)
            #pragma unroll
            for (int i = 0; i < 4; ++i) f(m, n, i);
}

// Whether score function and derivative run in a loop instead of being unrolled.
constexpr bool SCORES_IN_LOOP = is_long(WARPS_S.rows * WARPS_S.columns * 4, SCORE_COPIES * GRADIENT_INSTRUCTIONS);

// A loop leaves no number of its own to the bits of an entry.
constexpr bool USES_HIDDEN = HIDES_FIRST && !SCORES_IN_LOOP;

// row_weight_sum of the rows of a tile, from query `first` on.
__device__ const float* row_weight_sums_of(const BackwardParams& p, int batch, int head, int first) {
    return HAS_ROW_WEIGHT_SUM
               ? p.row_weight_sum + batch * p.delta.batch + head * p.delta.head + i64(first) * p.delta.row
               : nullptr;
}

#if FV_CAPTURES
// For each read of a learned buffer a sum of the lane's terms, of tiles all of which reads one element: it is added
// to memory when another element's turn comes, and at last by add_held.
struct HeldSums {
    i64 at[CAPTURE_READS];
    float sum[CAPTURE_READS] = {};

    __device__ HeldSums() {
        for (int read = 0; read < CAPTURE_READS; ++read) at[read] = -1;
    }

    // All lanes of a warp call this with the same `to`.
    template <int READ>
    __device__ void hold(const Mods& mods, i64 to, float x) {
        if (__any_sync(~0u, to != at[READ])) {
            add_to_memory<READ>(mods);
            at[READ] = to;
        }
        sum[READ] += x;
    }

    template <int READ>
    __device__ void add_to_memory(const Mods& mods) {
        float total = sum[READ];
        #pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) total += __shfl_xor_sync(~0u, total, distance);
        if (threadIdx.x % 32 == 0 && total != 0.f) Capture<READ>::add(mods, at[READ], total);
        sum[READ] = 0.f;
    }

    template <int READ = 0>
    __device__ void add_held(const Mods& mods) {
        if constexpr (READ < CAPTURE_READS) {
            add_to_memory<READ>(mods);
            add_held<READ + 1>(mods);
        }
    }
};
#else
struct HeldSums {
    __device__ void add_held(const Mods&) {}
};
#endif

struct Scores {
    ScoreFragment g;        // S, then P times the derivative of the score, then dS
#if FV_DSCORE
    ScoreFragment weight;   // P
#endif
#if FV_DROPOUT
    u32 dropout_keep[ceil_div(WARPS_S.rows * WARPS_S.columns * 4, 32)];   // a bit for each score
    float dropout_scale;
#endif
#if FV_CAPTURES
    ScoreFragment raw;      // scale S
#endif

    // Calls `f(m, n, i, spot)` for each score, in a loop: rotation moves each accumulator to (0, 0).
    template <typename F>
    __device__ void for_each_in_loop(F f) {
        #pragma unroll 1
        for (int at = 0; at < WARPS_S.rows * WARPS_S.columns; ++at) {
            const Spot first = Spot::of_lane() + Spot::step(at / WARPS_S.columns, at % WARPS_S.columns, 0);
            #pragma unroll
            for (int i = 0; i < 4; ++i) f(0, 0, i, first + Spot::step(0, 0, i));
            rotate(g);
#if FV_DSCORE
            rotate(weight);
#endif
#if FV_CAPTURES
            rotate(raw);
#endif
        }
    }

    __device__ float p(int m, int n, int i) const {
#if FV_DSCORE
        return weight[m][n][i];
#else
        return g[m][n][i];
#endif
    }

    __device__ float dropped(float x, int m, int n, int i) const {
#if FV_DROPOUT
        int at = (m * WARPS_S.columns + n) * 4 + i;
        return dropout_keep[at / 32] >> at % 32 & 1 ? x * dropout_scale : 0.f;
#else
        return x;
#endif
    }

    // From plain scores S to the exponents of P, of columns from .. to of accumulators; and of those in the first
    // POWERS columns, now and not later, to P. compute_p<POWERS> goes on from there.
    template <int POWERS>
    __device__ void subtract(float scale, const float (&lse)[QUERIES_HELD], int from = 0, int to = WARPS_S.columns) {
        for_each_score([&](int m, int n, int i) {
            if (n >= from && n < to) g[m][n][i] = fmaf(g[m][n][i], scale * LOG2_E, -lse[query_held(m, n, i)]);
        });
        for_each_score([&](int m, int n, int i) {
            if (n < from || n >= to || n >= POWERS) return;
            g[m][n][i] = exp2_score(g[m][n][i]);
            asm volatile("" : "+f"(g[m][n][i]) :: "memory");
        });
    }

    // Calls `f(holds)` with each condition that some entry of the tile may not meet, and has to, to be visible:
    // `holds(spot)`. Rows past the end have zeros for q, d_out and delta, and zero or infinity for lse, and contribute
    // nothing unless a score function gives them a gradient.
    template <typename F>
    __device__ static void for_each_condition(const Mods& mods, const ScoreTile& c, F f) {
        if (c.keys < FV_BN || (FV_SCORE && c.queries < FV_BM))
            f([&](Spot at) { return at.key < c.keys && (!FV_SCORE || at.query < c.queries); });
        if (FV_MASK && c.evaluate)
            f([&](Spot at) { return fv_mask(mods, c.place, c.query + at.query, c.key + at.key); });
    }

    __device__ void hide(int m, int n, int i) {
        g[m][n][i] = 0.f;
#if FV_DSCORE
        weight[m][n][i] = 0.f;
#endif
    }

    // The bits of dropout of columns from .. to of accumulators.
    __device__ void draw_dropout(const Mods& mods, const ScoreTile& c, Spot lane, int from, int to) {
#if FV_DROPOUT
        // Four at a time: the hashes of all scores at once would spill.
        constexpr int COUNT = WARPS_S.rows * WARPS_S.columns * 4;
        dropout_scale = fv_dropout_scale(mods);
        #pragma unroll
        for (int word = 0; word < ceil_div(COUNT, 32); ++word) {
            // Eight columns are a word, and parts of a tile whole words.
            if (WARPS_S.rows == 1 && (word * 8 < from || word * 8 >= to)) continue;
            u32 bits = 0;
            #pragma unroll 1
            for (int at = word * 32; at < COUNT && at < word * 32 + 32; at += 4) {
                const Spot first = lane + Spot::step(at / 4 / WARPS_S.columns, at / 4 % WARPS_S.columns, 0);
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Spot spot = first + Spot::step(0, 0, i);
                    bits |= u32(fv_dropout_keep(mods, c.place, c.query + spot.query, c.key + spot.key))
                            << (at % 32 + i);
                }
            }
            dropout_keep[word] = bits;
        }
#endif
    }

    // P of queries whose lse is huge, by the sums of their weights.
    __device__ void divide_by_weight_sums(Spot lane, u32 lse_at, const float* sums, i64 stride, int from, int to) {
        #pragma unroll
        for (int h = 0; h < QUERIES_HELD; ++h) {
            if (!is_of_columns(h, from, to) || !is_huge(load_shared(lse_at + held_query(h) * 4))) continue;
            const float inverse = 1.f / __ldg(sums + (lane.query + held_query(h)) * stride);
            for_each_score([&](int m, int n, int i) {
                if (query_held(m, n, i) != h) return;
                g[m][n][i] *= inverse;
#if FV_DSCORE
                weight[m][n][i] *= inverse;
#endif
            });
        }
    }

    // Entries in columns from .. to of accumulators that the mask hides, or that stand past the end of a sequence.
    __device__ void hide_all(const Mods& mods, const ScoreTile& c, Spot lane, int from, int to) {
        for_each_condition(mods, c, [&](auto holds) {
            for_each_score([&](int m, int n, int i) {
                if (n >= from && n < to && !holds(lane + Spot::step(m, n, i))) hide(m, n, i);
            });
        });
        if constexpr (FV_MASK_BITS)
            if (c.has_bits)
                for_each_score([&](int m, int n, int i) {
                    if (n >= from && n < to && !c.visible.has(m, n, i)) hide(m, n, i);
                });
    }

    // From S, or from what subtract<POWERS> made of it, to P, of columns from .. to of accumulators (of all of them
    // where SCORES_IN_LOOP). `lse` is lse_of() of each of their queries, and `lse_at` the smem address of that of the
    // lane's first.
    template <int POWERS = -1>
    __device__ void compute_p(const Mods& mods, const ScoreTile& c, float scale, const float (&lse)[QUERIES_HELD],
                              u32 lse_at, const float* row_weight_sums, i64 row_weight_stride, int from = 0,
                              int to = WARPS_S.columns) {
        const Spot lane = Spot::of_lane();
        [[maybe_unused]] ScoreBits hidden;
        if constexpr (USES_HIDDEN)
            for_each_condition(mods, c, [&](auto holds) {
                for_each_score([&](int m, int n, int i) {
                    if (n >= from && n < to && !holds(lane + Spot::step(m, n, i))) hidden.set(m, n, i);
                });
            });
        if constexpr (FV_MASK_BITS && USES_HIDDEN)
            if (c.has_bits) hidden.set_all_but(c.visible);
        [[maybe_unused]] bool has_huge_lse = c.has_huge_lse;
        if constexpr (HAS_ROW_WEIGHT_SUM && !FINDS_HUGE_LSE)
            #pragma unroll
            for (int h = 0; h < QUERIES_HELD; ++h)
                if (is_of_columns(h, from, to)) has_huge_lse |= is_huge(lse[h]);
        // A score function may give -1e30 to a whole row. Then score - lse is exact, but the difference of
        // products has their rounding error. And __fsub_rn keeps the score rounded, without contraction
        // into a multiply-add, as in fv_row_weight_sum.
        auto exp_score = [&](float score, int m, int n, int i, Spot at) {
            return exp2_score(__fsub_rn(score, SCORES_IN_LOOP
                                                   ? lse_of(load_shared(lse_at + (at.query - lane.query) * 4))
                                                   : lse[query_held(m, n, i)]) *
                              LOG2_E);
        };
        // Of the lane's first score; that of another is so many more, as the compiler knows.
        [[maybe_unused]] const float first_distance = to_float(Int(c.query + lane.query - (c.key + lane.key)));
        [[maybe_unused]] const PlaceReads reads = fv_place_reads(mods, c.place);
        // `score_of` is the score function, of an entry, its product and q - kv.
        auto compute_all = [&]([[maybe_unused]] auto score_of) {
            auto compute_one = [&](int m, int n, int i, Spot at) {
#if FV_SCORE
                const int q = c.query + at.query, kv = c.key + at.key;
                const float s = g[m][n][i] * scale;
                const float distance = first_distance + float(at.query - lane.query - (at.key - lane.key));
                float x = exp_score(score_of(q, kv, s, distance), m, n, i, at);
                if (USES_HIDDEN && hidden.has(m, n, i)) x = 0.f;
                g[m][n][i] = x;
#if FV_DSCORE
                weight[m][n][i] = x;
                g[m][n][i] = x != 0.f ? fv_score_gradient(mods, c.place, q, kv, s, x, distance) : 0.f;
#endif
#if FV_CAPTURES
                raw[m][n][i] = s;
#endif
#else
                if (n < POWERS) return;
                if constexpr (POWERS >= 0) g[m][n][i] = exp2_score(g[m][n][i]);
                else if constexpr (FV_DTYPE == 2) g[m][n][i] = exp_score(g[m][n][i] * scale, m, n, i, at);
                else g[m][n][i] = exp2_score(fmaf(g[m][n][i], scale * LOG2_E, -lse[query_held(m, n, i)]));
#endif
            };
            if constexpr (SCORES_IN_LOOP) for_each_in_loop(compute_one);
            else for_each_score([&](int m, int n, int i) {
                if (n >= from && n < to) compute_one(m, n, i, lane + Spot::step(m, n, i));
            });
        };
#ifdef SCORE_READS
        const int query0 = c.query + Spot::of_warp().query, key0 = c.key + Spot::of_warp().key;
        if (!SCORES_IN_LOOP && fv_reads_one(mods, c.place, query0, query0 + WARP_QUERIES, key0, key0 + WARP_KEYS)) {
            const ScoreReads given = fv_score_reads(mods, c.place, query0, key0);
            compute_all([&](int q, int kv, float s, float distance) {
                return fv_score_given(mods, c.place, q, kv, s, distance, reads, given);
            });
        } else
#endif
            compute_all([&](int q, int kv, float s, float distance) {
                return fv_score(mods, c.place, q, kv, s, distance, reads);
            });
        // Rare; the check is repeated for each row, so that it occupies no registers.
        if (HAS_ROW_WEIGHT_SUM && __any_sync(~0u, has_huge_lse))
            divide_by_weight_sums(lane, lse_at, row_weight_sums, row_weight_stride, from, to);
        if constexpr (!USES_HIDDEN) hide_all(mods, c, lane, from, to);
        if constexpr (FV_DROPOUT) draw_dropout(mods, c, lane, from, to);
    }

    // From dP to dS; `delta_at` is the smem address of the delta of the lane's first query. An entry whose weight is 0,
    // as that of a hidden one is, has no gradient, also where a non-finite v makes dP and delta NaN.
    __device__ void differentiate(const ScoreFragment& dp, u32 delta_at) {
        #pragma unroll
        for (int h = 0; h < QUERIES_HELD; ++h) {
            const float delta = load_shared(delta_at + held_query(h) * 4);
            for_each_score([&](int m, int n, int i) {
                if (query_held(m, n, i) == h) differentiate_one(dp, delta, m, n, i);
            });
        }
    }

    // The same for column n of accumulators; `delta` is that of the lane's queries.
    __device__ void differentiate_column(const ScoreFragment& dp, const float (&delta)[QUERIES_HELD], int n) {
        #pragma unroll
        for (int m = 0; m < WARPS_S.rows; ++m)
            #pragma unroll
            for (int i = 0; i < 4; ++i) differentiate_one(dp, delta[query_held(m, n, i)], m, n, i);
    }

    // The same from dP - delta, without dropout.
    __device__ void multiply_column(const ScoreFragment& dp, int n) {
        #pragma unroll
        for (int m = 0; m < WARPS_S.rows; ++m)
            #pragma unroll
            for (int i = 0; i < 4; ++i) multiply_one<true>(dp[m][n][i], m, n, i);
    }

    // One instruction less than a selection.
    __device__ static void multiply_unless_zero(float& x, float y) {
        asm("{ .reg .pred is_weight; setp.neu.f32 is_weight, %0, 0f00000000; @is_weight mul.f32 %0, %0, %1; }"
            : "+f"(x)
            : "f"(y));
    }

    __device__ void differentiate_one(const ScoreFragment& dp, float delta, int m, int n, int i) {
        multiply_one<FV_DSCORE && KEYS_DOWN>(dropped(dp[m][n][i], m, n, i) - delta, m, n, i);
    }

    // By dP - delta of an entry.
    template <bool CONDITIONAL>
    __device__ void multiply_one(float d, int m, int n, int i) {
#if FV_DSCORE && FV_CAPTURES
        // dS before the derivative of the score
        weight[m][n][i] = weight[m][n][i] == 0.f ? 0.f : weight[m][n][i] * d;
#endif
        if constexpr (CONDITIONAL) multiply_unless_zero(g[m][n][i], d);
        else g[m][n][i] = g[m][n][i] == 0.f ? 0.f : g[m][n][i] * d;
    }

    // Adds to the gradients of captured buffers, for each read of one.
    template <int READ = 0>
    __device__ void capture(const Mods& mods, const ScoreTile& c, [[maybe_unused]] HeldSums& held) const {
#if FV_CAPTURES
        if constexpr (READ < CAPTURE_READS) {
            capture_read<READ>(mods, c, held);
            capture<READ + 1>(mods, c, held);
        }
#endif
    }

#if FV_CAPTURES
    // Over lanes whose numbers differ in the bits from .. to.
    __device__ static float sum_over(float x, int from, int to) {
        for (int distance = from; distance < to; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
        return x;
    }

    // Adds a sum for each row of accumulators.
    template <typename Given, typename Add>
    __device__ static void add_rows(Given given, Add add) {
        #pragma unroll
        for (int r = 0; r < WARPS_S.rows * 2; ++r) {
            float sum = 0.f;
            #pragma unroll
            for (int n = 0; n < WARPS_S.columns; ++n)
                sum += given(r / 2, n, r % 2 * 2) + given(r / 2, n, r % 2 * 2 + 1);
            add(threadIdx.x % 4 == 0, Spot::of(r * 8, 0), sum_over(sum, 1, 4));
        }
    }

    // Adds one for each column.
    template <typename Given, typename Add>
    __device__ static void add_columns(Given given, Add add) {
        #pragma unroll
        for (int n = 0; n < WARPS_S.columns * 2; ++n) {
            float sum = 0.f;
            #pragma unroll
            for (int m = 0; m < WARPS_S.rows; ++m) sum += given(m, n / 2, n % 2) + given(m, n / 2, n % 2 + 2);
            add(threadIdx.x % 32 / 4 == 0, Spot::of(0, n / 2 * 8 + n % 2), sum_over(sum, 4, 32));
        }
    }

    // Where it is known which scores read the same element, the warp sums their terms first; each sum is one
    // atomic addition in memory.
    template <int READ>
    __device__ void capture_read(const Mods& mods, const ScoreTile& c, [[maybe_unused]] HeldSums& held) const {
        using Read = Capture<READ>;
        const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
        const int query = c.query + Spot::of_lane().query, key = c.key + Spot::of_lane().key;
        [[maybe_unused]] const int query0 = c.query + Spot::of_warp().query, key0 = c.key + Spot::of_warp().key;
        // The term of one score; `d` is the gradient of the result of the score function.
        auto term = [&](int m, int n, int i, float score, float d) {
            if constexpr (Read::plain) return d;
            const Spot step = Spot::step(m, n, i);
            if (!SCORES_IN_LOOP && d == 0.f) return 0.f;
            const float x = Read::term(mods, c.place, query + step.query, key + step.key, score, d);
            return SCORES_IN_LOOP && d == 0.f ? 0.f : x;
        };
        constexpr bool AT_ONCE = !Read::plain && SCORES_IN_LOOP;
        ScoreFragment terms;
        if constexpr (AT_ONCE) {
            ScoreFragment scores;
            for_each_score([&](int m, int n, int i) {
                scores[m][n][i] = raw[m][n][i];
                terms[m][n][i] = p(m, n, i);
            });
            #pragma unroll 1
            for (int at = 0; at < WARPS_S.rows * WARPS_S.columns; ++at) {
                const int m = at / WARPS_S.columns, n = at % WARPS_S.columns;
                #pragma unroll
                for (int i = 0; i < 4; ++i) terms[0][0][i] = term(m, n, i, scores[0][0][i], terms[0][0][i]);
                rotate(scores);
                rotate(terms);
            }
        }
        auto given = [&](int m, int n, int i) {
            return AT_ONCE ? terms[m][n][i] : term(m, n, i, raw[m][n][i], p(m, n, i));
        };
        // The element that a score reads. Only one that no two scores are known to share may depend on the score.
        auto element = [&](int query, int key, [[maybe_unused]] float score) {
            if constexpr (Read::kind == CAPTURE_EACH) return Read::at(mods, c.place, query, key, score);
            else return Read::at(mods, c.place, query, key);
        };
        // Adds `sum` to what the score reads that is `step` from the lane's first.
        auto add = [&](bool adds, Spot step, float sum, float score = 0.f) {
            if (adds && sum != 0.f) Read::add(mods, element(query + step.query, key + step.key, score), sum);
        };
        auto add_all = [&] {
            float sum = 0.f;
            for_each_score([&](int m, int n, int i) { sum += given(m, n, i); });
            if constexpr (HOLDS_SUMS) held.hold<READ>(mods, element(query0, key0, 0.f), sum);
            else add(lane == 0, Spot::of(0, 0), sum_over(sum, 1, 32));
        };
        if constexpr (Read::kind == CAPTURE_EACH) {
            for_each_score([&](int m, int n, int i) { add(true, Spot::step(m, n, i), given(m, n, i), raw[m][n][i]); });
        } else if constexpr (Read::kind == (KEYS_DOWN ? CAPTURE_COLUMN : CAPTURE_ROW)) {
            add_rows(given, add);
        } else if constexpr (Read::kind == CAPTURE_ROW || Read::kind == CAPTURE_COLUMN) {
            add_columns(given, add);
        } else if constexpr (Read::kind == CAPTURE_BLOCK) {
            add_all();
        } else {
            // Far from the diagonal a clamped or bucketed distance reads one element.
            if (__all_sync(~0u, Read::one(mods, c.place, query0, query0 + WARP_QUERIES, key0, key0 + WARP_KEYS))) {
                add_all();
                return;
            }
            // CAPTURE_DIAGONAL. Of rows 8 r + group and columns 8 n + 2 member + j, those with equal
            // n - r lie on one diagonal for each j; the diagonal of j = 1 is that of j = 0 in the
            // row above; and lane (group + 2, member + 1) has the diagonals of lane (group, member).
            constexpr int FIRST = 1 - WARPS_S.rows * 2, DIAGONALS = WARPS_S.rows * 2 + WARPS_S.columns - 1;
            float even[DIAGONALS + 1] = {}, odd[DIAGONALS + 1] = {};
            #pragma unroll
            for (int r = 0; r < WARPS_S.rows * 2; ++r)
                #pragma unroll
                for (int n = 0; n < WARPS_S.columns; ++n) {
                    even[n - r - FIRST] += given(r / 2, n, r % 2 * 2);
                    odd[n - r - FIRST] += given(r / 2, n, r % 2 * 2 + 1);
                }
            #pragma unroll
            for (int at = 0; at <= DIAGONALS; ++at) {
                // Row 0's j = 1 goes to row 7 of the rows above, whose n - r is one more.
                const float handed = group == 0 ? (at == 0 ? 0.f : odd[at == 0 ? 0 : at - 1]) : odd[at];
                float sum = even[at] + __shfl_sync(~0u, handed, (lane + 4) % 32);
                const float next = __shfl_down_sync(~0u, sum, 9);
                if (group < 6 && member < 3) sum += next;
                const float after = __shfl_down_sync(~0u, sum, 18);
                if (group < 4 && member < 2) sum += after;
                add(group < 2 || member == 0, Spot::of(0, (at + FIRST) * 8), sum);
            }
        }
    }
#endif
};
