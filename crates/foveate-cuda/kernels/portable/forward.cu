// Attention, forward: fv_forward<<<(tiles of queries, heads_q, splits), FV_WARPS * 32>>>
//
// A block owns FV_BM rows, queries of one head, and steps over the tiles of FV_BN keys that they
// see. A warp owns FV_BM / FV_WARPS rows, so the softmax of a row stays within four lanes:
//
//     S = Q K^T    S = score(scale S), -inf where the mask is false
//     P = 2^(unit S - reference)    sum += P    O += P V
//
// `unit` turns what S is kept in into exponents of 2: log2 e for scores, scale * log2 e where there
// is no score function and S stays unscaled (unless scale <= 0, which would turn the order round, or
// next to nothing).
// The reference of a row may be any number near its largest exponent. It follows only when an
// exponent exceeds it by more than SLACK = 8, which is rare; then sum and O are rescaled. P becomes
// the operand of the second product without leaving the registers, and the powers of one step of
// that product are computed between the instructions of the step before.
//
// One step, with two stages of K and V:         with one stage:
//
//     K, V of this step have landed, barrier        K has landed, barrier, start V
//     start K of the next step                      S, what is seen, largest scores
//     S, what is seen, largest scores               V has landed, barrier, start the next K
//     start V of the next step                      powers and O
//     powers and O
//
// Only a step whose run says so, or that has the last keys of a sequence, asks the mask and the length;
// there a warp whose rows see nothing of the tile does without powers. With 16-bit operands such steps
// have code of their own, so that neither kind waits for what the other needs. A row that sees nothing
// at all gives out = 0 and lse = -inf; one with a NaN among its scores is NaN. Values that are not
// finite stay with the rows that see them: see forward_row.cuh.
//
// With FV_FOLD, for few queries, the rows of a tile are those of all query heads of a key/value
// head, so that keys and values are read once for all of them: row r is query r / FV_GROUP of head
// r % FV_GROUP of the group, and the grid has heads_kv in place of heads_q. Where FV_GROUP does not
// divide FV_BM, the last rows are nobody's. The mask is one that does not tell heads apart.
//
// Which tiles do best is the planner's to know (src/planner/known.rs); what each takes of an
// architecture is in conformance/kernel-resources.toml.
//
// With 16-bit operands a warp of 32 rows reads each key for twice the work of one of 16: at head
// dims up to 128 shared memory's bandwidth would otherwise be the limit.

// Two columns of a row of out, into the place of the warp's queries in shared memory.
__device__ void stage_out(u32 queries, int row, int column, float x, float y) {
    const u32 at = queries + row * PITCH_K + column * int(sizeof(OutElem));
    if constexpr (FV_OUT_DTYPE == 2) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(at), "f"(x), "f"(y) : "memory");
    else asm volatile("st.shared.u32 [%0], %1;" :: "r"(at), "r"(narrow2<FV_OUT_DTYPE>(x, y)) : "memory");
}

struct Yes { static constexpr bool value = true; };
struct No { static constexpr bool value = false; };

// Where shared memory has room for two blocks at most, the assembler need not spare registers for a
// third, as it does for some f32 kernels, which took a fifth longer.
constexpr int BLOCKS = FV_DTYPE == 2 && THREADS <= 128 && 3 * SHARED_BYTES > 228 * 1024 ? 2 : 0;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fv_forward(const __grid_constant__ ForwardParams p, const __grid_constant__ Mods mods) {
    extern __shared__ __align__(16) char shared[];
    const u32 base = shared_address(shared);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Turn turn = Turn::of(p);
    const int head0 = turn.head * HEADS, head_kv = head0 / FV_GROUP;
    const Tile tile = p.tiles[turn.tile];
    const Sequence sequence = p.sequences[tile.sequence];
    const int query0 = tile.tile * QUERIES;
    const int rows = min(QUERIES, sequence.q_len - query0) * HEADS;
    const int row0 = warp * M * 16 + lane / 4;             // this lane's first row and column of S
    const int column0 = lane % 4 * 2;
    const bool unscaled = !FV_SCORE && p.scale > 1e-20f;
    const float unit = unscaled ? p.scale * LOG2_E : LOG2_E;

    Steps steps(p, sequence, tile, head0, blockIdx.z);
    load_queries(p, sequence, head0, query0, rows, base);
    const Rows of_k = rows_of(p.k, sequence.k_batch, head_kv, sequence.k_start, sequence.k_len);
    const Rows of_v = rows_of(p.v, sequence.k_batch, head_kv, sequence.k_start, sequence.k_len);
    auto load_k = [&](int key, u32 stage) { load_keys<FV_D, FV_DP>(p, p.k, of_k, sequence.b, head_kv, key, stage); };
    auto load_v = [&](int key, u32 stage) { load_keys<FV_DV, FV_DVP>(p, p.v, of_v, sequence.b, head_kv, key, stage + AT_V); };
    bool more = steps.next();
    if (more) {
        load_k(steps.key, base + AT_STAGES);
        if constexpr (FV_STAGES == 2) load_v(steps.key, base + AT_STAGES);
    } else if (!HOLDS_QUERIES) {
        // There is no step to wait for the queries in, and out is to take their place.
        wait_copies();
        __syncthreads();
    }

    Queries queries;
    queries.address = base + warp * M * 16 * PITCH_K + lane_offset_a<false>(PITCH_K);
    if constexpr (HOLDS_QUERIES) {
        wait_copies();
        __syncthreads();
        queries.hold();
    }
    const u32 keys = lane_offset_b<false>(PITCH_K);
    const u32 values = AT_V + lane_offset_values();

    float out[M][N_OUT][4];
    clear(out);
    float top[M][2], ceiling[M][2], sum[M][2];             // `top` and `sum` of this lane's columns
    #pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        top[i / 2][i % 2] = ceiling[i / 2][i % 2] = -infinity();
        sum[i / 2][i % 2] = 0.f;
    }
    // The exponent that a row's powers are relative to.
    auto reference = [&](int m, int half) {
        return ceiling[m][half] == -infinity() ? 0.f : fmaf(ceiling[m][half], unit, -SLACK);
    };
    // A score function may give -1e30 to a whole row. Only a difference of scores that is taken before
    // anything is multiplied is then small; products of both differ by their rounding. f32 always takes
    // it so, 16-bit operands where a largest score is far from 0.
    constexpr bool apart = FV_DTYPE == 2;
    auto is_far = [&](float highest) { return apart || (FV_SCORE && fabsf(highest) > FAR && highest != -infinity()); };

    int parity = 0;
    while (more) {
        const u32 stage = base + AT_STAGES + parity * STAGE_BYTES;
        const int key0 = steps.key;
        const bool evaluate = steps.evaluate;
        wait_copies();
        __syncthreads();
        more = steps.next();
        if constexpr (FV_STAGES == 2) parity ^= 1;
        const u32 next_stage = base + AT_STAGES + parity * STAGE_BYTES;
        if constexpr (FV_STAGES == 1) load_v(key0, stage);
        else if (more) load_k(steps.key, next_stage);

        // Mods are called past the ends of a sequence too, within the tile.
        auto row_of = [&](int m, int i) {
            const u32 row = row0 + m * 16 + i / 2 * 8;
            return FV_BM % HEADS == 0 ? row : min(row, QUERIES * HEADS - 1u);
        };
        auto query_of = [&](int m, int i) { return query0 + int(row_of(m, i) / HEADS); };
        auto place_of = [&](int m, int i) -> Place {
            return {sequence.b, head0 + int(row_of(m, i) % HEADS), head_kv, sequence.q_len, sequence.k_len};
        };
        auto key_of = [&](int n, int i) { return key0 + column0 + n * 8 + i % 2; };
        // Calls `f(m, n, i)` for numbers from .. to of this lane's scores.
        auto for_each = [&](int from, int to, auto f) {
            #pragma unroll
            for (int j = from; j < to; ++j) f(j / 4 % M, j / 4 / M, j % 4);
        };

        // The step, evaluating what is seen or taking everything for seen.
        const bool ends = key0 + FV_BN > sequence.k_len;
        auto step = [&](auto evaluates) {
            constexpr bool EVALUATES = decltype(evaluates)::value;
            float s[M][N][4];
            clear(s);
            auto score = [&](int m, int n, int i) {
                float& x = s[m][n][i];
                x *= p.scale;
                if constexpr (FV_SCORE) x = fv_score(mods, place_of(m, i), query_of(m, i), key_of(n, i), x);
            };
            if constexpr (IN_TURN) {
                multiply_keys<0, N>(s, queries, stage + keys, [](int) {});
                #pragma unroll 1
                for (int at = 0; at < M * N; ++at) {
                    const int m = at / N, n = at % N;
                    #pragma unroll
                    for (int i = 0; i < 4; ++i)
                        s[0][0][i] = fv_score(mods, place_of(m, i), query_of(m, i), key_of(n, i), s[0][0][i] * p.scale);
                    rotate(s);
                }
            } else if constexpr (FV_SCORE && FV_DTYPE != 2) {
                // The scores of the first keys are finished between the products of the others.
                constexpr int FIRST = N / 4 * 2, EACH = M * FIRST * 4, PRODUCTS = FV_DP / STEP * (N - FIRST) / 2;
                // A loop as long as a share at most: one over all scores would be copied for every product
                // before the compiler drops what is not in the share, which takes it seconds.
                constexpr int SHARE = ceil_div(EACH, PRODUCTS);
                auto score_share = [&](int product) {
                    const int from = EACH * product / PRODUCTS, to = EACH * (product + 1) / PRODUCTS;
                    #pragma unroll
                    for (int k = 0; k < SHARE; ++k)
                        if (from + k < to) for_each(from + k, from + k + 1, score);
                };
                multiply_keys<0, FIRST>(s, queries, stage + keys, [](int) {});
                multiply_keys<FIRST, N>(s, queries, stage + keys, score_share);
                for_each(EACH, ALL, score);
            } else {
                multiply_keys<0, N>(s, queries, stage + keys, [](int) {});
                if (!unscaled) for_each(0, ALL, score);
            }
            auto hide = [&](auto hidden) {
                for_each(0, ALL, [&](int m, int n, int i) { if (hidden(m, n, i)) s[m][n][i] = -infinity(); });
            };
            if (EVALUATES && (TWO_KINDS || evaluate || ends))
                hide([&](int m, int n, int i) {
                    return !fv_mask(mods, place_of(m, i), query_of(m, i), key_of(n, i)) | (key_of(n, i) >= sequence.k_len);
                });
            else if (!FV_MASK && ends) hide([&](int m, int n, int i) { return key_of(n, i) >= sequence.k_len; });

            bool rises = false, sees = !EVALUATES;
            #pragma unroll
            for (int m = 0; m < M; ++m)
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float largest = larger(s[m][0][half * 2], s[m][0][half * 2 + 1]);
                    #pragma unroll
                    for (int n = 1; n < N; ++n) largest = larger(largest, larger(s[m][n][half * 2], s[m][n][half * 2 + 1]));
                    sees |= largest != -infinity();
                    top[m][half] = larger(top[m][half], largest);
                    rises |= top[m][half] > ceiling[m][half];
                }
            if (__any_sync(0xffffffff, rises)) {
                #pragma unroll
                for (int m = 0; m < M; ++m)
                    #pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        // A row that has seen nothing yet has nothing to rescale.
                        const float before = ceiling[m][half], reference_before = reference(m, half);
                        ceiling[m][half] = larger(before, over_quad_max(top[m][half]) + SLACK / unit);
                        const float falls = is_far(before) ? (before - ceiling[m][half]) * unit : reference_before - reference(m, half);
                        const float shrink = before == -infinity() ? 1.f : exp2_score(falls);
                        sum[m][half] *= shrink;
                        #pragma unroll
                        for (int n = 0; n < N_OUT; ++n) {
                            out[m][n][half * 2] *= shrink;
                            out[m][n][half * 2 + 1] *= shrink;
                        }
                    }
            }

            if constexpr (FV_STAGES == 1) {
                wait_copies();
                __syncthreads();
                if (more) load_k(steps.key, stage);
            } else if (more) {
                load_v(steps.key, next_stage);
            }
            if (EVALUATES && !__any_sync(0xffffffff, sees)) return;

            float shift[M][2];
            bool far = false;
            auto offset = [&](int m, int half) { return ceiling[m][half] == -infinity() ? 0.f : -ceiling[m][half]; };
            #pragma unroll
            for (int i = 0; i < M * 2; ++i) {
                shift[i / 2][i % 2] = apart ? offset(i / 2, i % 2) : -reference(i / 2, i % 2);
                far |= is_far(ceiling[i / 2][i % 2]);
            }
            if (FV_SCORE && !apart && __any_sync(0xffffffff, far)) {
                for_each(0, ALL, [&](int m, int n, int i) { s[m][n][i] += offset(m, i / 2); });
                #pragma unroll
                for (int i = 0; i < M * 2; ++i) shift[i / 2][i % 2] = SLACK;
            }
            auto weigh = [&](int m, int n, int i) {
                float& x = s[m][n][i];
                x = exp2_score(apart ? fmaf(x + shift[m][i / 2], unit, SLACK) : fmaf(x, unit, shift[m][i / 2]));
                sum[m][i / 2] += x;
                if constexpr (FV_KEEP)
                    if (!fv_keep(mods, place_of(m, i), query_of(m, i), key_of(n, i))) x = 0.f;
            };
            multiply_values(out, s, stage + values, weigh);
        };
        if (FV_MASK && (evaluate || ends || !TWO_KINDS)) step(Yes());
        else if constexpr (!FV_MASK || TWO_KINDS) step(No());
    }

    auto query_at = [&](u32 row_of_tile) { return query0 + int(row_of_tile / HEADS); };
    auto head_at = [&](u32 row_of_tile) { return head0 + int(row_of_tile % HEADS); };
    // 0, or NaN where something in out is not finite. In parts, so that an addition need not wait for the
    // one before; f32 has no registers for more than one.
    constexpr int PARTS = FV_DTYPE == 2 ? 1 : 4;
    float rest[PARTS] = {};
    #pragma unroll
    for (int i = 0; i < M * N_OUT * 4; ++i) rest[i % PARTS] = fmaf(out[i / 4 / N_OUT][i / 4 % N_OUT][i % 4], 0.f, rest[i % PARTS]);
    #pragma unroll
    for (int i = 1; i < PARTS; ++i) rest[0] += rest[i];
    const bool spoiled = __any_sync(~0u, rest[0] != 0.f);

    // What the rows have come to, relative to their largest scores.
    #pragma unroll
    for (int m = 0; m < M; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 row_of_tile = row0 + m * 16 + half * 8;
            const float largest = over_quad_max(top[m][half]), score = unscaled ? largest * p.scale : largest;
            const float above = is_far(ceiling[m][half]) ? fmaf(ceiling[m][half] - largest, unit, -SLACK)
                                                         : fmaf(-largest, unit, reference(m, half));
            float factor = score == -infinity() ? 0.f : exp2_score(above);
            const float total = over_quad_sum(sum[m][half]) * factor;
            if (int(row_of_tile) >= rows) continue;
            if constexpr (FV_KEEP) factor *= fv_keep_scale(mods);
            if constexpr (FV_SPLIT) {
                const i64 row = partial_row(p, sequence, head_at(row_of_tile), query_at(row_of_tile));
                if (lane % 4 == 0) {
                    p.partial_max[row] = score;
                    p.partial_sum[row] = total;
                }
                #pragma unroll
                for (int n = 0; n < N_OUT; ++n)
                    #pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        int column = n * 8 + column0 + i;
                        if (column < FV_DV) p.partial_out[row * FV_DV + column] = out[m][n][half * 2 + i] * factor;
                    }
            } else {
                Row row = finish_row(p, sequence, head_at(row_of_tile), query_at(row_of_tile), score, total, lane % 4 == 0);
                row.factor *= factor;
                #pragma unroll
                for (int n = 0; n < N_OUT; ++n) {
                    const float x = out[m][n][half * 2], y = out[m][n][half * 2 + 1];
                    if constexpr (STAGES_OUT) stage_out(base, row0 + m * 16 + half * 8, n * 8 + column0, x * row.factor, y * row.factor);
                    else store_out(row, n * 8 + column0, x, y);
                }
            }
        }
    if constexpr (STAGES_OUT) {
        __syncwarp();
        constexpr int CHUNKS = max_of(1, FV_DV * int(sizeof(OutElem)) / 16), ABREAST = min_of(32, CHUNKS & -CHUNKS), APART = 32 / ABREAST;
        const int row = warp * M * 16 + lane / ABREAST, byte = lane % ABREAST * 16;
        const int left = rows - row;
        char* target = static_cast<char*>(p.out.data) + byte
                     + p.out.at(sequence.q_batch, head0, sequence.q_start + query0 + row) * sizeof(OutElem);
        #pragma unroll
        for (int down = 0; down < M * 16; down += APART) {
            if (down < left) {
                #pragma unroll
                for (int across = 0; across < CHUNKS * 16; across += ABREAST * 16)
                    *reinterpret_cast<uint4*>(target + across) =
                        *reinterpret_cast<const uint4*>(shared + (row + down) * PITCH_K + byte + across);
            }
            target += p.out.row * (APART * sizeof(OutElem));
        }
    }
    if (spoiled) attend_again(p, mods);
}
