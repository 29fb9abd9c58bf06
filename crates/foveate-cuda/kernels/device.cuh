// Building blocks of the kernels: copies of tiles into shared memory (smem), mbarriers, and matrix
// products on the tensor cores.
//
// A tile in smem is rows of FV_DP (or FV_DVP) elements with 16 bytes of padding after each row. A row
// is a multiple of 32 bytes, so with the padding consecutive rows start 16 bytes apart modulo 32: the
// eight rows that one ldmatrix reads lie in different banks. Unlike a swizzle, padding keeps every
// address of a product at a constant offset from one base address of each thread.
//
// A product gives each warp a rectangle of 16-row, 8-column accumulators (`Warps`). Its operands lie
// in smem either along the summed axis or across it (`transposed`).
//   16-bit operands: m16n8k16, ldmatrix, with .trans for a transposed operand.
//   f32 operands: m16n8k8 on tf32 (3xTF32): each number is the sum of two tf32, x = hi + lo, and the
//   product is hi*hi + hi*lo + lo*hi. One k-step has an accumulator of its own, which is added to the
//   result in f32, because the tensor core rounds its sums towards zero.

constexpr int THREADS = FV_WARPS * 32;
constexpr int ELEM_BYTES = FV_DTYPE == 2 ? 4 : FV_DTYPE == 3 ? 1 : 2;
[[maybe_unused]] constexpr int MMA_K = 32 / ELEM_BYTES;   // elements of the summed axis in one mma
[[maybe_unused]] constexpr int PAD_BYTES = 16;
[[maybe_unused]] constexpr float LOG2_E = 1.4426950408889634f;

#if FV_DTYPE == 2
typedef float Elem;
#elif FV_DTYPE == 3
typedef unsigned char Elem;             // the bits of an e4m3, which the hopper family's forward takes
#else
typedef unsigned short Elem;            // the bits of an f16 or bf16
#endif

#if __CUDA_ARCH__ >= 900
#define MBARRIER_WAIT "try_wait"
#else
#define MBARRIER_WAIT "test_wait"
#endif

__device__ float infinity() { return __int_as_float(0x7f800000); }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

// ---- numbers ----

template <int DTYPE>
__device__ float widen(unsigned short bits) {
    if constexpr (DTYPE == 1) return __uint_as_float(u32(bits) << 16);
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
template <int DTYPE>
__device__ float widen(float x) { return x; }
template <int DTYPE>
__device__ float widen(unsigned char bits) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)bits));
    return widen<0>((unsigned short)halves);
}

// Two numbers rounded to 16 bits each, `low` in the lower half.
template <int DTYPE>
__device__ u32 narrow2(float low, float high) {
    u32 bits;
    if constexpr (DTYPE == 1) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// Four numbers rounded to e4m3, `a` in the lowest byte; those above 448 become 448.
[[maybe_unused]] __device__ u32 narrow4(float a, float b, float c, float d) {
    u32 bits;
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
        : "=r"(bits)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return bits;
}

__device__ float exp2_score(float x) {
    if constexpr (FV_DTYPE == 2) return exp2f(x);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger of two; NaN when either is, which fmaxf would drop.
__device__ float max_or_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// Over the four lanes (a quad) that hold a row of an accumulator.
__device__ float quad_max(float x) {
    x = max_or_nan(x, __shfl_xor_sync(0xffffffff, x, 1));
    return max_or_nan(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// ---- copies into shared memory ----

__device__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// BYTES (4, 8, 16) to shared memory, of which the first `valid` come from `source` and the rest
// are zeros. Both addresses are multiples of BYTES.
template <int BYTES>
__device__ void copy_async(u32 target, const void* source, int valid) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(target), "l"(source), "r"(valid)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(target), "l"(source), "n"(BYTES), "r"(valid)
                     : "memory");
}
__device__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Rows of a [rows, dim] operand: `data` is element 0 of row 0.
struct Rows {
    const char* data;
    i64 row, elem;      // strides in elements
    int count;          // rows that exist; zeros stand for the others
};

__device__ Rows rows_of(const View& view, int batch, int head, int first, int count) {
    i64 offset = view.at(batch, head, first);
    return {static_cast<const char*>(view.data) + offset * ELEM_BYTES, view.row, view.elem, count};
}

// Copies one element of a tile through a register: cp.async needs 4 bytes at least.
__device__ void copy_element(u32 target, const Elem* source, bool exists) {
    Elem x = 0;
    if (exists) x = __ldg(source);
    if constexpr (FV_DTYPE == 2) asm volatile("st.shared.f32 [%0], %1;" :: "r"(target), "f"(float(x)) : "memory");
    else asm volatile("st.shared.u16 [%0], %1;" :: "r"(target), "h"((unsigned short)x) : "memory");
}

// How the threads of a CTA copy rows of COLUMNS elements: each thread copies chunks of BYTES at a
// constant stride.
template <int COLUMNS>
struct Chunks {
    static constexpr int BYTES = FV_ALIGN >= 4 ? FV_ALIGN : ELEM_BYTES;
    static constexpr int PER_ROW = COLUMNS * ELEM_BYTES / BYTES;
    // Threads that copy consecutive chunks of one row.
    static constexpr int THREADS_PER_ROW = min_of(32, PER_ROW & -PER_ROW);
    static constexpr int ROWS_PER_PASS = THREADS / THREADS_PER_ROW;              // rows that the CTA copies in one pass
};

// A tile of ROWS rows of DIM elements, zeros up to COLUMNS and from row `count` on, by all threads
// of the CTA. `data(row, pass)` is the address of a row, one of ROWS_PER_PASS * pass ..; the lanes of a warp
// call it convergently.
template <int ROWS, int DIM, int COLUMNS, typename F>
__device__ void load_tile_from(u32 tile, int count, i64 elem, F data) {
    constexpr int PITCH = COLUMNS * ELEM_BYTES + PAD_BYTES;
    constexpr int BYTES = Chunks<COLUMNS>::BYTES, CHUNKS = Chunks<COLUMNS>::PER_ROW;
    constexpr int THREADS_PER_ROW = Chunks<COLUMNS>::THREADS_PER_ROW, ROWS_PER_PASS = Chunks<COLUMNS>::ROWS_PER_PASS;
    const int row = threadIdx.x / THREADS_PER_ROW, byte = threadIdx.x % THREADS_PER_ROW * BYTES;
    const u32 target = tile + row * PITCH + byte;
    #pragma unroll
    for (int down = 0; down < ROWS; down += ROWS_PER_PASS) {
        const char* source = data(row + down, down / ROWS_PER_PASS);
        if (ROWS % ROWS_PER_PASS != 0 && row + down >= ROWS) break;
        const bool exists = row + down < count;
        #pragma unroll
        for (int across = 0; across < CHUNKS * BYTES; across += THREADS_PER_ROW * BYTES) {
            const u32 to = target + down * PITCH + across;
            if constexpr (FV_ALIGN >= 4) {
                const int valid = DIM == COLUMNS ? BYTES : min(max(DIM * ELEM_BYTES - byte - across, 0), BYTES);
                copy_async<BYTES>(to, source + byte + across, exists ? valid : 0);
            } else {
                copy_element(to, reinterpret_cast<const Elem*>(source) + (byte + across) / ELEM_BYTES * elem,
                             exists && byte + across < DIM * ELEM_BYTES);
            }
        }
    }
}

template <int ROWS, int DIM, int COLUMNS>
__device__ void load_tile(u32 tile, const Rows& rows) {
    load_tile_from<ROWS, DIM, COLUMNS>(tile, rows.count, rows.elem,
                                       [&](int row, int) { return rows.data + row * rows.row * ELEM_BYTES; });
}

// One f32 for each of ROWS rows from two views (lse, delta) one after the other; zeros where there
// is no row.
template <int ROWS>
__device__ void load_row_values(u32 target, const RowView& x, const RowView& y, int batch, int head, int first,
                                int count) {
    #pragma unroll
    for (int start = 0; start < 2 * ROWS; start += THREADS) {
        int i = start + threadIdx.x;
        if (i >= 2 * ROWS) break;
        const RowView& view = i < ROWS ? x : y;
        int row = i % ROWS;
        const float* source = view.data + batch * view.batch + head * view.head + (first + row) * view.row;
        copy_async<4>(target + i * 4, source, row < count ? 4 : 0);
    }
}

__device__ float load_shared(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}

// ---- mbarriers ----

#ifdef BOUNDED_WAITS
// Waits of a build for tests: one that takes longer than BOUNDED_WAITS seconds ends the kernel by an assertion, for
// which the driver prints what was waited for, its number in place of a line, CTA and thread.
extern "C" __device__ void __assertfail(const char* assertion, const char* file, unsigned line, const char* function,
                                        decltype(sizeof 0) char_size);

struct BoundedWait {
    unsigned long long until = now() + BOUNDED_WAITS * 1000000000ull;

    __device__ static unsigned long long now() {
        unsigned long long nanoseconds;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
        return nanoseconds;
    }
    __device__ void turn(const char* awaited, u32 number) const {
        if (now() > until) __assertfail(awaited, "a wait that never ends, number", number, BOUNDED_KERNEL, 1);
    }
};

extern "C" __device__ u32 mbarrier_number(u32 at);
#endif

// A split arrive/wait barrier in smem, 8 bytes: a warp arrives, continues, and waits for the others
// later. Rounds are numbered 0, 1, ..; the phase parity of a round is its lowest bit, so no warp may be
// two rounds ahead of another.
struct Mbarrier {
    u32 at;

    __device__ void init(int arrivals) const {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at), "r"(arrivals) : "memory");
    }
    // Orders the calling warp's reads and writes so far before those of the waiters after their wait.
    __device__ void arrive_warp() const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive();
    }
    __device__ void arrive() const {
        asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" :: "r"(at) : "memory");
    }
    // Arrives for this thread when all its copies so far, those of load_tile included, have landed.
    __device__ void arrive_after_copies() const {
        if constexpr (FV_ALIGN >= 4) {
            asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(at) : "memory");
        } else {
            wait_copies();
            arrive();
        }
    }
    // Waits for all arrivals of `round`; round -1 is complete from the start.
    __device__ void wait(int round) const {
        u32 done;
#ifdef BOUNDED_WAITS
        BoundedWait bounded;
#endif
        do {
#ifdef BOUNDED_WAITS
            bounded.turn(round & 1 ? "an mbarrier's odd round is complete" : "an mbarrier's even round is complete",
                         mbarrier_number(at));
#endif
            asm volatile("{ .reg .pred over; mbarrier." MBARRIER_WAIT
                         ".parity.shared.b64 over, [%1], %2; selp.u32 %0, 1, 0, over; }"
                         : "=r"(done)
                         : "r"(at), "r"(round & 1)
                         : "memory");
        } while (!done);
    }
    // Whether `wait` would return at once.
    __device__ bool is_complete(int round) const {
        u32 done;
        asm volatile("{ .reg .pred over; mbarrier.test_wait.parity.shared.b64 over, [%1], %2; selp.u32 %0, 1, 0, over; }"
                     : "=r"(done)
                     : "r"(at), "r"(round & 1)
                     : "memory");
        return done;
    }
};

// ---- products ----

// How the warps of a CTA divide a product of M rows and N columns: `down` x `across` rectangles of
// `rows` x `columns` accumulators (16 rows, 8 columns). The split with the fewest operand bytes
// read, the taller grid where two are equal. With `even`, only splits without a remainder.
struct Warps {
    int down, across, rows, columns;
};
constexpr Warps divide(int m, int n, bool even) {
    Warps best = {0, 0, 0, 0};
    for (int down = 1; down <= FV_WARPS; ++down) {
        if (FV_WARPS % down != 0 || m / 16 % down != 0) continue;
        int across = FV_WARPS / down;
        if (even && n / 8 % across != 0) continue;
        Warps w = {down, across, m / 16 / down, ceil_div(n / 8, across)};
        if (best.down == 0 || 2 * w.rows + w.columns <= 2 * best.rows + best.columns) best = w;
    }
    return best;
}

// The offset of a lane's first element of an operand. `a` and `b` are rows x columns in shared memory:
// [m][k] and [n][k], or transposed [k][m] and [k][n].
template <bool TRANSPOSED>
__device__ u32 lane_offset_a(int pitch) {
    int lane = threadIdx.x % 32;
    if constexpr (!TRANSPOSED) return (lane & 15) * pitch + (lane >> 4) * 16;
    else if constexpr (FV_DTYPE == 2) return (lane & 3) * pitch + (lane >> 2) * 4;
    else return ((lane & 7) + (lane >> 4) * 8) * pitch + (lane >> 3 & 1) * 16;
}
template <bool TRANSPOSED>
__device__ u32 lane_offset_b(int pitch) {
    int lane = threadIdx.x % 32;
    if constexpr (!TRANSPOSED) return ((lane & 7) + (lane >> 4) * 8) * pitch + (lane >> 3 & 1) * 16;
    else if constexpr (FV_DTYPE == 2) return (lane & 3) * pitch + (lane >> 2) * 4;
    else return (lane & 15) * pitch + (lane >> 4) * 16;
}

template <bool TRANSPOSED>
__device__ void load_matrices(u32 (&r)[4], u32 address) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
template <bool TRANSPOSED>
__device__ void load_matrices(u32 (&r)[2], u32 address) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1]) : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1]) : "r"(address));
}

#if FV_DTYPE == 2
// A number as the sum of two tf32. mma ignores the lower 13 bits of a tf32, so those of `low` may stand there.
struct Tf32Pair { u32 high, low; };
// High and low of an infinite number are 1 and infinity with its sign, of NaN a finite number and NaN: infinity in
// `high` would meet the low part of the other factor, which may be 0 or of the other sign, and make the product NaN.
// Finite numbers that would round up to infinity are split likewise.
__device__ Tf32Pair split_tf32(u32 bits) {
    constexpr u32 HALF_ULP = 0x1000, TF32_BITS = 0xffffe000, INFINITY_TO_ONE = 0xc0000000;
    const float x = __uint_as_float(bits);
    const bool rounds = fabsf(x) < 3.4e38f;
    Tf32Pair s;
    s.high = (bits + (rounds ? HALF_ULP : INFINITY_TO_ONE)) & TF32_BITS;
    s.low = __float_as_uint(x - __uint_as_float(s.high)) + (rounds ? HALF_ULP : 0);
    return s;
}
__device__ void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
struct FragmentA {
    u32 high[4], low[4];
    __device__ void set(int i, u32 bits) { Tf32Pair s = split_tf32(bits); high[i] = s.high; low[i] = s.low; }
};
#else
struct FragmentA {
    u32 bits[4];
};
#endif

#if FV_DTYPE == 2
// d += A B by 3xTF32; d rounds towards zero.
__device__ void multiply_tf32x3(float (&d)[4], const FragmentA& a, Tf32Pair b0, Tf32Pair b1) {
    mma_tf32(d, a.low, b0.high, b1.high);
    mma_tf32(d, a.high, b0.low, b1.low);
    mma_tf32(d, a.high, b0.high, b1.high);
}
#endif

__device__ void multiply_add(float (&d)[4], const FragmentA& a, u32 b0, u32 b1) {
#if FV_DTYPE == 2
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    multiply_tf32x3(sum, a, split_tf32(b0), split_tf32(b1));
    for (int i = 0; i < 4; ++i) d[i] += sum[i];
#elif FV_DTYPE == 1
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.bits[0]), "r"(a.bits[1]), "r"(a.bits[2]), "r"(a.bits[3]), "r"(b0), "r"(b1));
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.bits[0]), "r"(a.bits[1]), "r"(a.bits[2]), "r"(a.bits[3]), "r"(b0), "r"(b1));
#endif
}

template <bool TRANSPOSED, int PITCH>
__device__ FragmentA load_a(u32 address) {
    FragmentA a;
#if FV_DTYPE == 2
    if constexpr (TRANSPOSED) {
        a.set(0, __float_as_uint(load_shared(address)));
        a.set(1, __float_as_uint(load_shared(address + 8 * 4)));
        a.set(2, __float_as_uint(load_shared(address + 4 * PITCH)));
        a.set(3, __float_as_uint(load_shared(address + 4 * PITCH + 8 * 4)));
    } else {
        u32 bits[4];
        load_matrices<false>(bits, address);
        for (int i = 0; i < 4; ++i) a.set(i, bits[i]);
    }
#else
    load_matrices<TRANSPOSED>(a.bits, address);
#endif
    return a;
}

// The 8 columns at `address`, or with COUNT 4 the 16.
template <bool TRANSPOSED, int PITCH, int COUNT>
__device__ void load_b(u32 (&b)[COUNT], u32 address) {
    if constexpr (FV_DTYPE == 2 && TRANSPOSED) {
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            b[i] = __float_as_uint(load_shared(address + i / 2 * 8 * 4 + i % 2 * 4 * PITCH));
    } else {
        load_matrices<TRANSPOSED>(b, address);
    }
}

// Whether code of `steps` instructions for each of a lane's scores runs in a loop instead of being
// unrolled: ptxas would take seconds for the unrolled copies. The loop costs overlap with the matrix
// products and register moves (see rotate), so shorter code is unrolled. In f32, where a product is many
// instructions already, the threshold is on all copies together.
constexpr bool is_long(int scores, int steps) { return FV_DTYPE == 2 ? scores * steps > 2200 : steps > 80; }

// The unroll factor of the k loop of a product of M x N accumulators. It is small in f32: the
// accumulators and tf32 pairs of unrolled k-steps are live together, and large dims would spill.
template <int M, int N>
constexpr int unrolled_steps(int steps) { return FV_DTYPE != 2 ? steps : M * N >= 16 ? 1 : 2; }

// sum += A B over K steps, for the M x N accumulators of one warp. `a` and `b` are the addresses
// of the lane's elements in the warp's first row and column. Columns from `live` on are skipped.
template <int K, bool A_TRANSPOSED, int A_PITCH, bool B_TRANSPOSED, int B_PITCH, int M, int N>
__device__ void multiply(float (&sum)[M][N][4], u32 a, u32 b, int live = N) {
    constexpr int A_STEP = A_TRANSPOSED ? MMA_K * A_PITCH : 32;
    constexpr int A_ROW = A_TRANSPOSED ? 16 * ELEM_BYTES : 16 * A_PITCH;
    constexpr int B_STEP = B_TRANSPOSED ? MMA_K * B_PITCH : 32;
    constexpr int B_COLUMN = B_TRANSPOSED ? 8 * ELEM_BYTES : 8 * B_PITCH;
    constexpr int UNROLL = unrolled_steps<M, N>(K);
    #pragma unroll UNROLL
    for (int k = 0; k < K; ++k) {
        FragmentA fragment[M];
        #pragma unroll
        for (int m = 0; m < M; ++m) fragment[m] = load_a<A_TRANSPOSED, A_PITCH>(a + k * A_STEP + m * A_ROW);
        #pragma unroll
        for (int n = 0; n < N; n += 2) {
            if (n >= live) break;
            if (n + 1 < N) {
                u32 pair[4];
                load_b<B_TRANSPOSED, B_PITCH>(pair, b + k * B_STEP + n * B_COLUMN);
                #pragma unroll
                for (int m = 0; m < M; ++m) {
                    multiply_add(sum[m][n], fragment[m], pair[0], pair[1]);
                    multiply_add(sum[m][n + 1 < N ? n + 1 : n], fragment[m], pair[2], pair[3]);
                }
            } else {
                u32 single[2];
                load_b<B_TRANSPOSED, B_PITCH>(single, b + k * B_STEP + n * B_COLUMN);
                #pragma unroll
                for (int m = 0; m < M; ++m) multiply_add(sum[m][n], fragment[m], single[0], single[1]);
            }
        }
    }
}

template <int M, int N>
__device__ void clear(float (&sum)[M][N][4]) {
    #pragma unroll
    for (int i = 0; i < M * N * 4; ++i) sum[i / 4 / N][i / 4 % N][i % 4] = 0.f;
}

// Rotates the accumulators by one: a loop whose body reads accumulator (0, 0) calls it after each
// iteration, because registers cannot be indexed. M N rotations restore the order.
template <int M, int N>
__device__ void rotate(float (&x)[M][N][4]) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float first = x[0][0][i];
        #pragma unroll
        for (int at = 1; at < M * N; ++at) x[(at - 1) / N][(at - 1) % N][i] = x[at / N][at % N][i];
        x[M - 1][N - 1][i] = first;
    }
}
