// Attention forward: fv_forward<<<(tiles of queries, heads_q, KV splits), FV_WARPS * 32>>>
//
// Roles. A CTA owns one tile of FV_BM query rows of one head and iterates over the live tiles of FV_BN
// keys. All warps have one role: each owns FV_BM / FV_WARPS rows, so the softmax of a row stays within
// a quad of lanes.
//
//     S = Q K^T    S = score(scale S), -inf where the mask is false
//     P = 2^(unit S - reference)    row_sum += P    O += P V
//
// `unit` converts S into exponents of 2: log2 e for scores, scale * log2 e where there is no score
// function and S stays unscaled (unless scale <= 0, which would reverse the order, or scale is tiny).
// Online softmax with a rescale threshold, after FlashAttention-4: the reference of a row may be any
// number near the largest exponent. It is raised only when an exponent exceeds it by more than
// RESCALE_THRESHOLD, which is rare; then row_sum and O are rescaled. P becomes the left operand of P V in
// registers, and the exponentials of one k-step of P V are computed between the mma of the k-step before.
//
// Barriers: __syncthreads only, after cp.async.wait_all. One step of the main loop,
// with two stages of K and V:                   with one stage:
//
//     K, V of this step have landed, barrier        K has landed, barrier, start V
//     start K of the next step                      S, mask, row_max
//     S, mask, row_max                              V has landed, barrier, start the next K
//     start V of the next step                      P and O
//     P and O
//
// Shared memory: Q and the stages of K and V; forward_device.cuh has the sum.
//
// A step evaluates the mask and the length only if its run is partial or it has the last keys of a
// sequence; there a warp skips P and O if the mask hides the whole tile from its rows. With 16-bit
// operands the masked step is compiled separately from the unmasked one. A row without visible keys gives
// out = 0 and lse = -inf; a row with a NaN score is NaN. Non-finite values of v reach only the rows that
// see them: see forward_row.cuh.
//
// Packed GQA (FV_PACK_GQA), for few queries: the rows of a tile are those of all query heads of a KV
// head, so K and V are read once for all of them. Row r is query r / FV_GROUP of head r % FV_GROUP of the
// group, and the grid has heads_kv in place of heads_q. Where FV_GROUP does not divide FV_BM, the last
// rows are unused. The mask does not depend on the head.
//
// The planner has tuned tiles (src/choose/); conformance/kernel-resources.toml records registers, local
// and shared memory of each kernel for each architecture.
//
// With 16-bit operands a warp of 32 rows does twice the work of one of 16 for each key that it reads: at
// head dims up to 128 smem bandwidth would otherwise be the limit.

// Writes two columns of a row of out over the warp's rows of Q in shared memory.
__device__ void stage_out(u32 queries, int row, int column, float x, float y) {
    const u32 at = queries + row * PITCH_K + column * int(sizeof(OutElem));
    if constexpr (FV_OUT_DTYPE == 2)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(at), "f"(x), "f"(y) : "memory");
    else asm volatile("st.shared.u32 [%0], %1;" :: "r"(at), "r"(narrow2<FV_OUT_DTYPE>(x, y)) : "memory");
}

// Calls `f(m, n, i)` for scores from .. to of this lane.
template <typename F>
__device__ void for_each_score(int from, int to, F f) {
    #pragma unroll
    for (int j = from; j < to; ++j) f(j / 4 % M, j / 4 / M, j % 4);
}

// The largest of this lane's scores in row `half` of a pair of rows.
__device__ float largest_score(const float (&s)[N][4], int half) {
    float largest = max_or_nan(s[0][half * 2], s[0][half * 2 + 1]);
    #pragma unroll
    for (int n = 1; n < N; ++n) largest = max_or_nan(largest, max_or_nan(s[n][half * 2], s[n][half * 2 + 1]));
    return largest;
}

// Multiplies row `half` of a pair of rows of out.
__device__ void scale_row(float (&out)[N_OUT][4], int half, float factor) {
    #pragma unroll
    for (int n = 0; n < N_OUT; ++n) {
        out[n][half * 2] *= factor;
        out[n][half * 2 + 1] *= factor;
    }
}

// Writes this lane's columns of a row of a partial result, times `factor`.
[[maybe_unused]] __device__ void store_partial_row(float* target, int column0, const float (&out)[N_OUT][4], int half,
                                                   float factor) {
    #pragma unroll
    for (int n = 0; n < N_OUT; ++n)
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = n * 8 + column0 + i;
            if (column < FV_DV) target[column] = out[n][half * 2 + i] * factor;
        }
}

// 0, or NaN where out has a non-finite element. Several chains of additions hide their latency; f32 has
// registers for one only.
__device__ float nonfinite_probe(const float (&out)[M][N_OUT][4]) {
    constexpr int CHAINS = FV_DTYPE == 2 ? 1 : 4;
    float probe[CHAINS] = {};
    #pragma unroll
    for (int i = 0; i < M * N_OUT * 4; ++i)
        probe[i % CHAINS] = fmaf(out[i / 4 / N_OUT][i / 4 % N_OUT][i % 4], 0.f, probe[i % CHAINS]);
    #pragma unroll
    for (int i = 1; i < CHAINS; ++i) probe[0] += probe[i];
    return probe[0];
}

// Copies the warp's rows of out, of the `rows` of the CTA, from the smem of Q to memory, 16 bytes a lane.
[[maybe_unused]] __device__ void store_staged_out(const ForwardParams& p, const Sequence& sequence, int head0,
                                                  int query0, int rows, int warp, int lane, const char* shared) {
    constexpr int CHUNKS = max_of(1, FV_DV * int(sizeof(OutElem)) / 16), THREADS_PER_ROW = min_of(32, CHUNKS & -CHUNKS),
                  ROWS_PER_PASS = 32 / THREADS_PER_ROW;
    const int row = warp * M * 16 + lane / THREADS_PER_ROW, byte = lane % THREADS_PER_ROW * 16;
    const int left = rows - row;
    char* target = static_cast<char*>(p.out.data) + byte
                 + p.out.at(sequence.q_batch, head0, sequence.q_start + query0 + row) * sizeof(OutElem);
    #pragma unroll
    for (int down = 0; down < M * 16; down += ROWS_PER_PASS) {
        if (down < left) {
            #pragma unroll
            for (int across = 0; across < CHUNKS * 16; across += THREADS_PER_ROW * 16)
                *reinterpret_cast<uint4*>(target + across) =
                    *reinterpret_cast<const uint4*>(shared + (row + down) * PITCH_K + byte + across);
        }
        target += p.out.row * (ROWS_PER_PASS * sizeof(OutElem));
    }
}

// Recomputes those of the warp's rows whose row_sum is finite. Not inlined, so that it costs fv_forward no
// registers.
__device__ __noinline__ void recompute_nonfinite_rows(const ForwardParams& p, const Mods& mods) {
    const WorkItem work = WorkItem::of(p);
    const Tile tile = p.tiles[work.tile];
    const Sequence sequence = p.sequences[tile.sequence];
    const Steps steps(p, sequence, tile, work.head * HEADS, blockIdx.z);
    const int first = threadIdx.x / 32 * M * 16, rows = min(QUERIES, sequence.q_len - tile.tile * QUERIES) * HEADS;
    __syncwarp();
    #pragma unroll 1
    for (int row = first; row < min(first + M * 16, rows); ++row) {
        const int head = work.head * HEADS + row % HEADS, query = tile.tile * QUERIES + row / HEADS;
        float row_sum;
        if constexpr (FV_KV_SPLIT) row_sum = p.partial_sum[partial_row(p, sequence, head, query)];
        else
            row_sum =
                p.lse.data[sequence.q_batch * p.lse.batch + head * p.lse.head + (sequence.q_start + query) * p.lse.row];
        __syncwarp();
        if (row_sum < infinity()) recompute_row(p, mods, sequence, steps, RowScales{p.scale}, head, query);
    }
}

// Where a lane's scores are in a tile: s[m][n][i] is in row row0 + m * 16 + i / 2 * 8 and column
// column0 + n * 8 + i % 2. Mods are also called past the ends of a sequence, within the tile.
struct Scores {
    const Sequence& sequence;
    int head0, head_kv, query0, key0;                      // of the tile's first row and column
    int row0, column0;                                     // of the lane's first score

    __device__ u32 row(int m, int i) const {
        const u32 row = row0 + m * 16 + i / 2 * 8;
        return FV_BM % HEADS == 0 ? row : min(row, QUERIES * HEADS - 1u);
    }
    __device__ int query(int m, int i) const { return query0 + int(row(m, i) / HEADS); }
    __device__ int key(int n, int i) const { return key0 + column0 + n * 8 + i % 2; }
    __device__ Place place(int m, int i) const {
        return {sequence.b, head0 + int(row(m, i) % HEADS), head_kv, sequence.q_len, sequence.k_len};
    }
    __device__ float score(const Mods& mods, int m, int n, int i, float x) const {
        const Place at = place(m, i);
        return fv_score(mods, at, query(m, i), key(n, i), x, to_float(Int(query(m, i) - key(n, i))),
                        fv_place_reads(mods, at));
    }
    __device__ bool is_past_the_end(int n, int i) const { return key(n, i) >= sequence.k_len; }
};

// s = score(scale Q K^T), or Q K^T where scores stay `unscaled`.
__device__ void score_tile(float (&s)[M][N][4], const Scores& at, const QOperand& queries, u32 keys,
                           const ForwardParams& p, bool unscaled, const Mods& mods) {
    auto score = [&](int m, int n, int i) {
        float& x = s[m][n][i];
        x *= p.scale;
        if constexpr (FV_SCORE) x = at.score(mods, m, n, i, x);
    };
    clear(s);
    if constexpr (SCORES_IN_LOOP) {
        multiply_qk<0, N>(s, queries, keys, [](int) {});
        #pragma unroll 1
        for (int j = 0; j < M * N; ++j) {
            const int m = j / N, n = j % N;
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                s[0][0][i] = at.score(mods, m, n, i, s[0][0][i] * p.scale);
            rotate(s);
        }
    } else if constexpr (FV_SCORE && FV_DTYPE != 2) {
        // The score function of the first keys runs between the mma of the other keys.
        constexpr int FIRST = N / 4 * 2, EACH = M * FIRST * 4, PRODUCTS = FV_DP / MMA_K * (N - FIRST) / 2;
        // The loop is as long as the scores of one mma: a loop over all scores would be unrolled for
        // every mma before the compiler drops the dead iterations, which takes it seconds.
        constexpr int MOST = ceil_div(EACH, PRODUCTS);
        auto score_some = [&](int product) {
            const int from = EACH * product / PRODUCTS, to = EACH * (product + 1) / PRODUCTS;
            #pragma unroll
            for (int k = 0; k < MOST; ++k)
                if (from + k < to) for_each_score(from + k, from + k + 1, score);
        };
        multiply_qk<0, FIRST>(s, queries, keys, [](int) {});
        multiply_qk<FIRST, N>(s, queries, keys, score_some);
        for_each_score(EACH, ALL, score);
    } else {
        multiply_qk<0, N>(s, queries, keys, [](int) {});
        if (!unscaled) for_each_score(0, ALL, score);
    }
}

// Hides, by a score of -inf, what `hidden(m, n, i)` says.
template <typename F>
__device__ void hide_scores(float (&s)[M][N][4], F hidden) {
    for_each_score(0, ALL, [&](int m, int n, int i) { if (hidden(m, n, i)) s[m][n][i] = -infinity(); });
}

// The online softmax of a lane's rows.
struct Softmax {
    const bool unscaled;
    const float unit;
    // row_max and row_sum are of this lane's columns.
    float row_max[M][2], reference_max[M][2], row_sum[M][2];

    // A score function may give -1e30 to a whole row. Then score - row_max is exact, but the difference of
    // the products with `unit` has their rounding error. f32 always subtracts before it multiplies, 16-bit
    // operands where a row maximum is large.
    static constexpr bool SUBTRACT_FIRST = FV_DTYPE == 2;
    __device__ static bool is_large(float highest) {
        return SUBTRACT_FIRST || (FV_SCORE && fabsf(highest) > LARGE_SCORE && highest != -infinity());
    }

    __device__ Softmax(bool unscaled, float unit) : unscaled(unscaled), unit(unit) {
        #pragma unroll
        for (int i = 0; i < M * 2; ++i) {
            row_max[i / 2][i % 2] = reference_max[i / 2][i % 2] = -infinity();
            row_sum[i / 2][i % 2] = 0.f;
        }
    }

    // The exponent that is subtracted from those of a row.
    __device__ float reference(int m, int half) const {
        return reference_max[m][half] == -infinity() ? 0.f : fmaf(reference_max[m][half], unit, -RESCALE_THRESHOLD);
    }

    // Takes the scores of a tile into row_max, and raises references that they exceed. Whether the lane
    // sees one of them.
    __device__ bool raise(const float (&s)[M][N][4], float (&out)[M][N_OUT][4]) {
        bool needs_rescale = false, any_visible = false;
        #pragma unroll
        for (int m = 0; m < M; ++m)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float largest = largest_score(s[m], half);
                any_visible |= largest != -infinity();
                row_max[m][half] = max_or_nan(row_max[m][half], largest);
                needs_rescale |= row_max[m][half] > reference_max[m][half];
            }
        if (__any_sync(0xffffffff, needs_rescale)) {
            #pragma unroll
            for (int m = 0; m < M; ++m)
                #pragma unroll
                for (int half = 0; half < 2; ++half) rescale(m, half, out[m]);
        }
        return any_visible;
    }

    // Raises the reference of a row.
    __device__ void rescale(int m, int half, float (&out)[N_OUT][4]) {
        // Before the first visible key there is nothing to rescale.
        const float before = reference_max[m][half], reference_before = reference(m, half);
        reference_max[m][half] = max_or_nan(before, quad_max(row_max[m][half]) + RESCALE_THRESHOLD / unit);
        const float exponent = is_large(before) ? (before - reference_max[m][half]) * unit
                                                : reference_before - reference(m, half);
        const float rescale = before == -infinity() ? 1.f : exp2_score(exponent);
        row_sum[m][half] *= rescale;
        scale_row(out, half, rescale);
    }

    // out += P V, row_sum += P.
    __device__ void add_values(float (&out)[M][N_OUT][4], float (&s)[M][N][4], const Scores& at, u32 values,
                               const Mods& mods) {
        float shift[M][2];
        bool any_large = false;
        auto offset = [&](int m, int half) {
            return reference_max[m][half] == -infinity() ? 0.f : -reference_max[m][half];
        };
        #pragma unroll
        for (int i = 0; i < M * 2; ++i) {
            shift[i / 2][i % 2] = SUBTRACT_FIRST ? offset(i / 2, i % 2) : -reference(i / 2, i % 2);
            any_large |= is_large(reference_max[i / 2][i % 2]);
        }
        if (FV_SCORE && !SUBTRACT_FIRST && __any_sync(0xffffffff, any_large)) {
            for_each_score(0, ALL, [&](int m, int n, int i) { s[m][n][i] += offset(m, i / 2); });
            #pragma unroll
            for (int i = 0; i < M * 2; ++i) shift[i / 2][i % 2] = RESCALE_THRESHOLD;
        }
        auto exponentiate = [&](int m, int n, int i) {
            float& x = s[m][n][i];
            x = exp2_score(SUBTRACT_FIRST ? fmaf(x + shift[m][i / 2], unit, RESCALE_THRESHOLD)
                                          : fmaf(x, unit, shift[m][i / 2]));
            row_sum[m][i / 2] += x;
            if constexpr (FV_DROPOUT)
                if (!fv_dropout_keep(mods, at.place(m, i), at.query(m, i), at.key(n, i))) x = 0.f;
        };
        multiply_pv(out, s, values, exponentiate);
    }
};

// Epilogue: writes a row of out and its lse, or its part of them, relative to its row_max.
__device__ void store_row(const ForwardParams& p, const Mods& mods, const Scores& at, const Softmax& softmax, int rows,
                          u32 queries, const float (&out)[N_OUT][4], int m, int half) {
    const u32 row_of_tile = at.row0 + m * 16 + half * 8;
    const float largest = quad_max(softmax.row_max[m][half]), score = softmax.unscaled ? largest * p.scale : largest;
    const float reference_max = softmax.reference_max[m][half];
    const float above = Softmax::is_large(reference_max)
                            ? fmaf(reference_max - largest, softmax.unit, -RESCALE_THRESHOLD)
                            : fmaf(-largest, softmax.unit, softmax.reference(m, half));
    float factor = score == -infinity() ? 0.f : exp2_score(above);
    const float scaled_sum = quad_sum(softmax.row_sum[m][half]) * factor;
    if (int(row_of_tile) >= rows) return;
    if constexpr (FV_DROPOUT) factor *= fv_dropout_scale(mods);
    const int head = at.head0 + int(row_of_tile % HEADS), query = at.query0 + int(row_of_tile / HEADS);
    const bool is_first = threadIdx.x % 4 == 0;            // lane of the row
    if constexpr (FV_KV_SPLIT) {
        const i64 row = partial_row(p, at.sequence, head, query);
        if (is_first) {
            p.partial_max[row] = score;
            p.partial_sum[row] = scaled_sum;
        }
        store_partial_row(p.partial_out + row * FV_DV, at.column0, out, half, factor);
    } else {
        Row row = finish_row(p, at.sequence, head, query, score, scaled_sum, is_first);
        row.factor *= factor;
        #pragma unroll
        for (int n = 0; n < N_OUT; ++n) {
            const float x = out[n][half * 2], y = out[n][half * 2 + 1];
            if constexpr (OUT_THROUGH_SMEM)
                stage_out(queries, at.row0 + m * 16 + half * 8, n * 8 + at.column0, x * row.factor, y * row.factor);
            else store_out(row, n * 8 + at.column0, x, y);
        }
    }
}

struct Yes { static constexpr bool value = true; };
struct No { static constexpr bool value = false; };

// The minimum of CTAs per SM: 2 where smem has no room for a third. Left to itself, ptxas saves registers
// for a third CTA in some f32 kernels, which took a fifth longer.
constexpr int BLOCKS = FV_DTYPE == 2 && THREADS <= 128 && 3 * SHARED_BYTES > 228 * 1024 ? 2 : 0;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fv_forward(const __grid_constant__ ForwardParams p, const __grid_constant__ Mods mods) {
    extern __shared__ __align__(16) char shared[];
    const u32 base = shared_address(shared);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const WorkItem work = WorkItem::of(p);
    const int head0 = work.head * HEADS, head_kv = head0 / FV_GROUP;
    const Tile tile = p.tiles[work.tile];
    const Sequence sequence = p.sequences[tile.sequence];
    const int query0 = tile.tile * QUERIES;
    const int rows = min(QUERIES, sequence.q_len - query0) * HEADS;
    Scores at = {sequence, head0, head_kv, query0, 0, warp * M * 16 + lane / 4, lane % 4 * 2};
    const bool unscaled = !FV_SCORE && p.scale > 1e-20f;
    const float unit = unscaled ? p.scale * LOG2_E : LOG2_E;

    Steps steps(p, sequence, tile, head0, blockIdx.z);
    load_queries(p, sequence, head0, query0, rows, base);
    const Rows of_k = rows_of(p.k, sequence.k_batch, head_kv, sequence.k_start, sequence.k_len);
    const Rows of_v = rows_of(p.v, sequence.k_batch, head_kv, sequence.k_start, sequence.k_len);
    auto load_k = [&](int key, u32 stage) { load_keys<FV_D, FV_DP>(p, p.k, of_k, sequence.b, head_kv, key, stage); };
    auto load_v = [&](int key, u32 stage) {
        load_keys<FV_DV, FV_DVP>(p, p.v, of_v, sequence.b, head_kv, key, stage + AT_V);
    };
    bool more = steps.next();
    if (more) {
        load_k(steps.key, base + AT_STAGES);
        if constexpr (FV_STAGES == 2) load_v(steps.key, base + AT_STAGES);
    } else if (!Q_IN_REGISTERS) {
        // The main loop, which waits for Q, has no step, and the epilogue writes over Q.
        wait_copies();
        __syncthreads();
    }

    QOperand queries;
    queries.address = base + warp * M * 16 * PITCH_K + lane_offset_a<false>(PITCH_K);
    if constexpr (Q_IN_REGISTERS) {
        wait_copies();
        __syncthreads();
        queries.hold();
    }
    const u32 keys = lane_offset_b<false>(PITCH_K);
    const u32 values = AT_V + lane_offset_v();

    float out[M][N_OUT][4];
    clear(out);
    Softmax softmax(unscaled, unit);

    int parity = 0;
    while (more) {
        const u32 stage = base + AT_STAGES + parity * STAGE_BYTES;
        at.key0 = steps.key;
        const bool evaluate = steps.evaluate;
        wait_copies();
        __syncthreads();
        more = steps.next();
        if constexpr (FV_STAGES == 2) parity ^= 1;
        const u32 next_stage = base + AT_STAGES + parity * STAGE_BYTES;
        if constexpr (FV_STAGES == 1) load_v(at.key0, stage);
        else if (more) load_k(steps.key, next_stage);

        // One step of the main loop, with or without evaluation of the mask.
        const bool ends = at.key0 + FV_BN > sequence.k_len;
        auto step = [&](auto evaluates) {
            constexpr bool EVALUATES = decltype(evaluates)::value;
            float s[M][N][4];
            score_tile(s, at, queries, stage + keys, p, softmax.unscaled, mods);
            if (EVALUATES && (SPECIALIZE_MASKED || evaluate || ends))
                hide_scores(s, [&](int m, int n, int i) {
                    return !fv_mask(mods, at.place(m, i), at.query(m, i), at.key(n, i)) | at.is_past_the_end(n, i);
                });
            else if (!FV_MASK && ends) hide_scores(s, [&](int, int n, int i) { return at.is_past_the_end(n, i); });
            const bool any_visible = softmax.raise(s, out);

            if constexpr (FV_STAGES == 1) {
                wait_copies();
                __syncthreads();
                if (more) load_k(steps.key, stage);
            } else if (more) {
                load_v(steps.key, next_stage);
            }
            if (EVALUATES && !__any_sync(0xffffffff, any_visible)) return;
            softmax.add_values(out, s, at, stage + values, mods);
        };
        if (FV_MASK && (evaluate || ends || !SPECIALIZE_MASKED)) step(Yes());
        else if constexpr (!FV_MASK || SPECIALIZE_MASKED) step(No());
    }

    const bool has_nonfinite = __any_sync(~0u, nonfinite_probe(out) != 0.f);
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) store_row(p, mods, at, softmax, rows, base, out[m], m, half);
    if constexpr (OUT_THROUGH_SMEM) {
        __syncwarp();
        store_staged_out(p, sequence, head0, query0, rows, warp, lane, shared);
    }
    if (has_nonfinite) recompute_nonfinite_rows(p, mods);
}
