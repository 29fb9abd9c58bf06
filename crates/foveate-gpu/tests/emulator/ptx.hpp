// The instructions that kernels write in PTX. An asm statement finds what its text does once, by instruction(text), and
// calls it with the text and {outputs and inputs}.
#pragma once

namespace emulated {

// An operand: where an output stands, or an input's bits.
struct Arg {
    void* out;
    u64 in;
};
template <typename T> inline Arg out(T& x) {
    u64 bits = 0;
    std::memcpy(&bits, &x, sizeof x);
    return {&x, bits};
}
// The operands of an asm statement, which stand until it is over.
struct Args {
    const Arg* first;
    size_t count;

    Args(std::initializer_list<Arg> all) : first(all.begin()), count(all.size()) {}
    const Arg& operator[](size_t i) const { return first[i]; }
};
// What an output held is not read where it is written only.
template <typename T> inline Arg only_out(T& x) { return {&x, 0}; }
inline Arg in_f(float x) { return {nullptr, bits_of(x)}; }
inline Arg in_r(u32 x) { return {nullptr, x}; }
inline Arg in_h(unsigned short x) { return {nullptr, x}; }
inline Arg in_l(const void* x) { return {nullptr, u64(reinterpret_cast<uintptr_t>(x))}; }
inline Arg in_l(u64 x) { return {nullptr, x}; }
inline Arg in_l(long long x) { return {nullptr, u64(x)}; }
inline Arg in_l(unsigned long long x) { return {nullptr, x}; }

// ---- formats of 16 bits ----

inline u32 to_half(float x) {
    const _Float16 half = _Float16(x);
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
inline float from_half(u32 bits) {
    const unsigned short low = bits;
    _Float16 half;
    std::memcpy(&half, &low, 2);
    return float(half);
}
inline u32 to_bf16(float x) {
    u32 bits = u32(bits_of(x));
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float from_bf16(u32 bits) { return from_bits<float>(u64(bits & 0xffff) << 16); }
inline float widen16(u32 bits, bool is_half) { return is_half ? from_half(bits) : from_bf16(bits); }
inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.f, x) : x; }

// ---- smem as tensor maps write it and products read it ----

// Swizzles of 128, 64 and 32 bytes have the numbers 1, 2 and 3 in a descriptor.
inline u32 swizzled(u32 at, int bits) { return at ^ (at >> 7 & ((1u << bits) - 1)) << 4; }

// The operand of a product.
struct Operand {
    u32 start, leading, stride;
    int bits;                              // of the swizzle

    explicit Operand(u64 descriptor)
        : start((descriptor & 0x3fff) << 4), leading((descriptor >> 16 & 0x3fff) << 4),
          stride((descriptor >> 32 & 0x3fff) << 4), bits(int(descriptor >> 62) == 0 ? 0 : 4 - int(descriptor >> 62)) {
        if (bits == 0 || descriptor >> 49 & 7) fail("an operand without a swizzle, or with a base offset");
    }

    // The address of number (row, k) of so many bytes. Where the summed axis runs across the rows in smem, `row` runs
    // along them.
    u32 at(u32 row, u32 k, u32 bytes, bool across) const {
        const u32 width = 16u << bits;     // of a row of the swizzle
        if (!across) return swizzled(start + row / 8 * stride + row % 8 * width + k * bytes, bits);
        const u32 columns = width / bytes;
        return swizzled(start + row / columns * leading + k / 8 * stride + k % 8 * width + row % columns * bytes, bits);
    }
};

// One wgmma.mma_async of a warpgroup.
struct Product {
    std::string text;
    int n = 0, k = 16;
    bool is_half = false, is_e4m3 = false, in_registers = false, adds = true, across_a = false, across_b = false;
    u64 a = 0, b = 0;
    std::vector<Arg> args[128];
    u32 came = 0, fence = ~0u;             // the earliest of the last fences of those that have started it
    bool is_done = false;
};

inline float of_e4m3(u32 bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float x = exponent ? std::ldexp(1.f + mantissa / 8.f, exponent - 7) : std::ldexp(mantissa / 8.f, -6);
    return bits & 0x80 ? -x : x;
}

// The nearest of 254 numbers, ties to even, the largest of them beyond.
inline u32 to_e4m3(float x) {
    if (x != x) return 0x7f;
    u32 best = 0;
    const float size = std::fabs(x);
    for (u32 bits = 0; bits < 0x7f; ++bits) {
        const float near = std::fabs(of_e4m3(bits) - size), so_far = std::fabs(of_e4m3(best) - size);
        if (near < so_far || (near == so_far && bits % 2 == 0)) best = bits;
    }
    return best | (std::signbit(x) ? 0x80 : 0);
}

inline void multiply(Product& p) {
    const int bytes = p.is_e4m3 ? 1 : 2;
    auto read = [&](u32 at) {
        const char* from = shared_at(at, bytes);
        reads_asynchronously(at, p.fence, "a product");
        if (p.is_e4m3) return of_e4m3(u32((unsigned char)*from));
        unsigned short bits;
        std::memcpy(&bits, from, 2);
        return widen16(bits, p.is_half);
    };
    std::vector<float> a(64 * p.k), b(size_t(p.n) * p.k);
    const Operand of_b(p.b);
    for (int c = 0; c < p.n; ++c)
        for (int k = 0; k < p.k; ++k) b[c * p.k + k] = read(of_b.at(c, k, bytes, p.across_b));
    if (p.in_registers) {
        for (int t = 0; t < 128; ++t)
            for (int word = 0; word < 4; ++word) {
                const u32 bits = u32(p.args[t][p.n / 2 + word].in);
                const int per = 4 / bytes, row = t / 32 * 16 + t % 32 / 4 + word % 2 * 8;
                for (int i = 0; i < per; ++i) {
                    const int k = t % 4 * per + i + word / 2 * p.k / 2;
                    a[row * p.k + k] = p.is_e4m3 ? of_e4m3(bits >> 8 * i & 0xff) : widen16(bits >> 16 * i, p.is_half);
                }
            }
    } else {
        const Operand of_a(p.a);
        for (int r = 0; r < 64; ++r)
            for (int k = 0; k < p.k; ++k) a[r * p.k + k] = read(of_a.at(r, k, bytes, p.across_a));
    }
    for (int t = 0; t < 128; ++t)
        for (int j = 0; j < p.n / 2; ++j) {
            const int row = t / 32 * 16 + t % 32 / 4 + j % 4 / 2 * 8, column = j / 4 * 8 + t % 4 * 2 + j % 2;
            float sum = 0;
            for (int k = 0; k < p.k; ++k) sum += a[row * p.k + k] * b[column * p.k + k];
            float* const to = static_cast<float*>(p.args[t][j].out);
            *to = p.adds ? *to + sum : sum;
        }
    p.is_done = true;
    ++changes;
}

inline void start_product(const char* text, Args args) {
    Warpgroup& group = self->cta->warpgroups[self->number / 128];
    const u64 number = self->products++;
    while (group.first + group.products.size() <= number) group.products.push_back(std::make_shared<Product>());
    Product& p = *group.products[number - group.first];
    const std::string said = text;
    if (p.came == 0) {
        p.text = said;
        const size_t shape = said.find(".m64n") + 5;
        p.n = std::atoi(said.c_str() + shape);
        p.k = std::atoi(said.c_str() + said.find('k', shape) + 1);
        p.is_half = said.find(".f32.f16") != std::string::npos;
        p.is_e4m3 = said.find(".e4m3") != std::string::npos;
        // {sums}, a, b, adds, 1, 1 and whether a, b run across the summed axis; or {sums}, {a}, b, adds, 1, 1 and b.
        p.in_registers = said.find("}, {", shape) != std::string::npos;
        std::string tail = said.substr(said.find("adds, 1, 1", shape) + 10);
        std::vector<int> flags;
        for (size_t at = tail.find(','); at != std::string::npos; at = tail.find(',', at + 1))
            flags.push_back(std::atoi(tail.c_str() + at + 1));
        if (p.in_registers) p.across_b = !flags.empty() && flags[0];
        else if (flags.size() == 2) p.across_a = flags[0], p.across_b = flags[1];
        const size_t first = p.n / 2 + (p.in_registers ? 4 : 1);
        if (!p.in_registers) p.a = args[p.n / 2].in;
        p.b = args[first].in;
    }
    const size_t of_b = p.n / 2 + (p.in_registers ? 4 : 1);
    const std::string flag = said.substr(said.find("setp.ne.b32 adds, ") + 18);
    const bool adds = flag[0] == '%' ? u32(args[std::atoi(flag.c_str() + 1)].in) != 0 : flag[0] != '0';
    if (p.came == 0) p.adds = adds;
    const bool is_same = p.text == said && p.adds == adds && p.b == args[of_b].in;
    if (!is_same || (!p.in_registers && p.a != args[p.n / 2].in))
        fail("a product that is not that of the others of its warpgroup: " + said);
    p.fence = std::min(p.fence, self->fence);
    p.args[self->number % 128].assign(args.first, args.first + args.count);
    if (++p.came == 128) {
        ++changes;
        if (eager) multiply(p);
    }
}
inline void await_products(u32 left) {
    Warpgroup& group = self->cta->warpgroups[self->number / 128];
    if (self->groups.size() <= left) return;
    const u64 end = self->groups[self->groups.size() - 1 - left];
    while (group.first < end) {
        // Kept by the count, since others may take it off while this one waits.
        std::shared_ptr<Product> p = group.products.front();
        const u64 number = group.first;
        wait("others to start a product", [&] { return group.first != number || p->came == 128; });
        if (group.first != number) continue;
        if (!p->is_done) multiply(*p);
        group.products.pop_front();
        ++group.first;
    }
    self->groups.erase(self->groups.begin(), self->groups.end() - left);
}

// A box of a tensor map, as the driver for tests encodes it, into smem.
inline void copy_box(u32 target, const u64* parameter, u32 barrier, std::vector<int> place) {
    // A parameter of the kernel, which is gone when its thread is.
    struct { u64 words[16]; } held;
    std::memcpy(&held, parameter, sizeof held);
    do_later(self, [=] {
        const u64* const map = held.words;
        const u32* const halves = reinterpret_cast<const u32*>(map + 11);
        static const u32 sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
        const u32 rank = map[0] >> 8 & 0xff, size = sizes[map[0] & 0xff];
        const int bits = int(map[0] >> 24 & 0xff);     // none, 32, 64, 128 bytes
        u64 count = 1;
        for (u32 i = 0; i < rank; ++i) {
            if (halves[5 + i] != 1) fail("a tensor map that takes not every element");
            count *= halves[i];
        }
        for (u64 n = 0; n < count; ++n) {
            u64 rest = n, from = map[1];
            bool is_there = true;
            for (u32 i = 0; i < rank; ++i) {
                const long at = place[i] + long(rest % halves[i]);
                rest /= halves[i];
                is_there &= at >= 0 && u64(at) < map[2 + i];
                from += u64(at) * (i == 0 ? size : map[7 + i - 1]);
            }
            const u32 place = swizzled(u32(target + n * size), bits);
            char* const at = shared_at(place, size);
            wrote(place, size, nullptr);
            if (is_there) std::memcpy(at, reinterpret_cast<const void*>(from), size);
            else std::memset(at, 0, size);
        }
        Mbarrier& m = mbarrier(barrier);
        if (m.made_by->init_fence <= m.made_at) fail("a copy ends at an mbarrier without a fence since it was made");
        m.bytes -= long(count * size);
        m.settle();
    });
}

// ---- products of a warp ----

// One lane multiplies for all: their operands are d, then a, then b.
inline void multiply_in_warp(const char* text, Args args) {
    u64 lanes[32];
    std::memcpy(lanes, meet(u64(reinterpret_cast<uintptr_t>(args.first))), sizeof lanes);
    auto of = [&](int lane) { return reinterpret_cast<const Arg*>(lanes[lane]); };
    if (lane() == 0) {
        const bool is_tf32 = std::strstr(text, "tf32"), is_half = std::strstr(text, "f32.f16.f16");
        const int k = is_tf32 ? 8 : 16, per = is_tf32 ? 1 : 2;     // terms; of them in a word
        float a[16][16], b[16][8];
        auto term = [&](u64 word, int i) {
            return is_tf32 ? from_bits<float>(u32(word) & 0xffffe000) : widen16(u32(word) >> 16 * i, is_half);
        };
        for (int l = 0; l < 32; ++l)
            for (int word = 0; word < 4; ++word)
                for (int i = 0; i < per; ++i) {
                    const int at = l % 4 * per + i + word / 2 * k / 2;
                    a[l / 4 + word % 2 * 8][at] = term(of(l)[4 + word].in, i);
                    if (word % 2 == 0) b[at][l / 4] = term(of(l)[8 + word / 2].in, i);
                }
        for (int row = 0; row < 16; ++row) {
            float sums[8] = {};
            for (int j = 0; j < k; ++j)
                for (int column = 0; column < 8; ++column) sums[column] += a[row][j] * b[j][column];
            for (int column = 0; column < 8; ++column) {
                const Arg& d = of(row % 8 * 4 + column / 2)[row / 8 * 2 + column % 2];
                *static_cast<float*>(d.out) = from_bits<float>(d.in) + sums[column];
            }
        }
    }
    meet(0);
}
// Four or two 8x8 matrices of 16 bits, whose rows stand where lanes say.
inline void load_matrices(const char* text, Args args) {
    const bool transposed = std::strstr(text, ".trans");
    const int count = std::strstr(text, ".x4") ? 4 : 2;
    const u64* rows = meet(args[count].in);
    for (int m = 0; m < count; ++m) {
        u32 bits = 0;
        for (int i = 0; i < 2; ++i) {
            const int along = lane() % 4 * 2 + i, across = lane() / 4;
            const int row = transposed ? along : across, column = transposed ? across : along;
            unsigned short half;
            std::memcpy(&half, shared_at(u32(rows[m * 8 + row]) + column * 2, 2), 2);
            bits |= u32(half) << 16 * i;
        }
        *static_cast<u32*>(args[m].out) = bits;
    }
}
inline void store_matrices(const char* text, Args args) {
    const bool transposed = std::strstr(text, ".trans");
    u64 rows[32];
    std::memcpy(rows, meet(args[0].in), sizeof rows);
    for (int m = 0; m < 4; ++m)
        for (int i = 0; i < 2; ++i) {
            const int along = lane() % 4 * 2 + i, across = lane() / 4;
            const int row = transposed ? along : across, column = transposed ? across : along;
            const unsigned short half = args[1 + m].in >> 16 * i;
            std::memcpy(shared_at(u32(rows[m * 8 + row]) + column * 2, 2), &half, 2);
            wrote(u32(rows[m * 8 + row]) + column * 2, 2, self);
        }
    meet(0);
}

// ---- dispatch ----

inline float f(Args args, int i) { return from_bits<float>(args[i].in); }
template <typename T> inline void give(Args args, int i, T x) { std::memcpy(args[i].out, &x, sizeof x); }

inline void run_bulk(const char* text, Args args) {
    auto done = self->done;
    if (std::strstr(text, "reduce")) {
        ++self->bulk_started;
        float* const target = reinterpret_cast<float*>(args[0].in);
        const u32 source = u32(args[1].in), bytes = u32(args[2].in);
        Thread* const by = self;
        const u32 passed = by->fence;
        do_later(by, [=] {
            const float* const from = reinterpret_cast<const float*>(shared_at(source, bytes));
            for (u32 i = 0; i < bytes; i += 4) reads_asynchronously(source + i, passed, "a bulk reduction");
            const std::vector<float> read(from, from + bytes / 4);
            ++done->bulk_reads;
            do_later(by, [=] {
                for (size_t i = 0; i < read.size(); ++i) target[i] += read[i];
                ++done->bulk_writes;
            });
        });
    } else if (std::strstr(text, "wait_group")) {
        if (!std::strstr(text, " 0;")) fail(std::string("an instruction that is not emulated: ") + text);
        const u64& over = std::strstr(text, ".read") ? done->bulk_reads : done->bulk_writes;
        wait("its bulk reductions", [&] { return over == self->bulk_started; });
    } else if (std::strstr(text, "tensor")) {
        const int axes = std::strstr(text, ".5d") ? 5 : 4;
        std::vector<int> place;
        for (int i = 0; i < axes; ++i) place.push_back(int(args[3 + i].in));
        copy_box(u32(args[0].in), reinterpret_cast<const u64*>(args[1].in), u32(args[2].in), place);
    }
}

inline void arrive(u32 at) {
    Mbarrier& m = mbarrier(at);
    if (--m.pending < 0) fail("more arrivals at an mbarrier than it awaits");
    m.settle();
}

// Copies of a thread, which end in order.
inline void run_copy(const char* text, Args args) {
    auto done = self->done;
    if (std::strstr(text, "wait_all"))
        return wait("its copies", [&] { return done->copies == self->copies_started; });
    self->last_due = std::max(self->last_due, turn) + 1 + draw() % 20;
    const u32 at = u32(args[0].in);
    if (std::strstr(text, "mbarrier.arrive.noinc")) return do_later(self, [=] { arrive(at); }, self->last_due);
    if (!std::strstr(text, ".shared.global")) fail(std::string("an instruction that is not emulated: ") + text);
    // So many bytes, of which as many as the last operand says come from memory and the others are zeros.
    const bool is_16 = args.count == 3;
    const u32 bytes = is_16 ? 16 : u32(args[2].in), valid = u32(args[is_16 ? 2 : 3].in);
    const void* const from = reinterpret_cast<const void*>(args[1].in);
    ++self->copies_started;
    do_later(self, [=] {
        char* const to = shared_at(at, bytes);
        std::memset(to, 0, bytes);
        std::memcpy(to, from, valid);
        wrote(at, bytes, self);
        ++done->copies;
    }, self->last_due);
}

inline void run_mbarrier(const char* text, Args args) {
    if (std::strstr(text, "init")) {
        Mbarrier& m = self->cta->mbarriers[u32(args[0].in)];
        m = Mbarrier();
        m.count = m.pending = int(args[1].in);
        m.made_at = fences, m.made_by = self;
    } else if (std::strstr(text, "_wait.parity")) {
        Mbarrier& m = mbarrier(u32(args[1].in));
        if ((m.phase & 1) == (args[2].in & 1)) {
            self->waits_for = "an mbarrier", self->waits_at = u32(args[1].in), self->waits_parity = args[2].in & 1;
            yield();
        }
        const bool is_over = (m.phase & 1) != (args[2].in & 1);
        if (is_over) self->waits_for = nullptr, self->waits_at = 0;
        give(args, 0, u32(is_over));
    } else if (std::strstr(text, "arrive")) {
        if (std::strstr(text, "expect_tx")) mbarrier(u32(args[0].in)).bytes += long(args[1].in);
        arrive(u32(args[0].in));
    } else {
        fail(std::string("an instruction that is not emulated: ") + text);
    }
}

inline void run_shared(const char* text, Args args, bool stores) {
    const u32 bytes = std::strstr(text, "16") && !std::strstr(text, ".b16x2") ? 2 : 4;
    const int count = std::strstr(text, ".v4") ? 4 : std::strstr(text, ".v2") ? 2 : 1;
    char* const at = shared_at(u32(args[stores ? 0 : count].in), bytes * count);
    if (reinterpret_cast<uintptr_t>(at) % (bytes * count)) fail(std::string("an address is not aligned: ") + text);
    if (stores) wrote(u32(args[0].in), bytes * count, self);
    for (int i = 0; i < count; ++i) {
        if (stores) std::memcpy(at + i * bytes, &args[1 + i].in, bytes);
        else std::memcpy(args[i].out, at + i * bytes, bytes);
    }
}

// Instructions between braces, and what has no name of its own.
inline void run_braced(const char* text, Args args) {
    if (std::strstr(text, "wgmma.mma_async")) return start_product(text, args);
    if (std::strstr(text, "mbarrier.")) return run_mbarrier(text, args);
    if (std::strstr(text, "elect.sync")) {
        u32 came;
        meet(0, &came);
        return give(args, 0, u32(lane() == u32(__builtin_ctz(came))));
    }
    // keep_before, and Scores::multiply_unless_zero.
    if (std::strstr(text, "never")) {
        if (f(args, 0) < 0) std::memcpy(shared_at(u32(args[1].in), 4), &args[0].in, 4);
        return;
    }
    if (std::strstr(text, "is_weight")) {
        if (f(args, 0) != 0) give(args, 0, f(args, 0) * f(args, 1));
        return;
    }
    if (std::strstr(text, "cvt.rn.satfinite.e4m3x2.f32")) {
        u32 bits = 0;
        for (int i = 0; i < 4; ++i) bits |= to_e4m3(f(args, 1 + i)) << 8 * i;
        return give(args, 0, bits);
    }
    fail(std::string("an instruction that is not emulated: ") + text);
}

inline void run_barrier(const char* text, Args args) {
    if (args[0].in > 15) fail("a CTA has 16 named barriers");
    meet_cta(self->cta->named[args[0].in], u32(args[1].in), !std::strstr(text, "bar.arrive"));
}

inline void run_reduction(const char* text, Args args) {
    if (!std::strstr(text, ".f32")) fail(std::string("an instruction that is not emulated: ") + text);
    float* const at = reinterpret_cast<float*>(args[0].in);
    for (int i = 0; i < (std::strstr(text, ".v4") ? 4 : 1); ++i) at[i] += f(args, 1 + i);
}

inline void load_acquired(const char*, Args args) {
    self->waits_for = "a count in memory";
    yield();
    self->waits_for = nullptr;
    give(args, 0, *reinterpret_cast<const u32*>(args[1].in));
}

inline void load_words(const char*, Args args) {
    u32 words[4];
    std::memcpy(words, reinterpret_cast<const void*>(args[4].in), sizeof words);
    for (int i = 0; i < 4; ++i) give(args, i, words[i]);
}
inline void store_words(const char*, Args args) {
    const u32 words[] = {u32(args[1].in), u32(args[2].in), u32(args[3].in), u32(args[4].in)};
    std::memcpy(reinterpret_cast<void*>(args[0].in), words, sizeof words);
}
inline void tell_time(const char*, Args args) {
    give(args, 0, u64(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1)));
    yield();
}

inline float max_or_nan(float x, float y) { return x != x || y != y ? NAN : std::fmax(x, y); }

typedef void (*Run)(const char* text, Args args);
// What is done for a text that begins so, the first of these.
static const struct { const char* begins; Run run; } INSTRUCTIONS[] = {
    {"{", run_braced},
    {"fence.proxy.async.shared", [](const char*, Args) { self->fence = ++fences; }},
    {"fence.mbarrier_init", [](const char*, Args) { self->init_fence = ++fences; }},
    {"fence.", [](const char*, Args) {}},
    {"setmaxnreg", [](const char*, Args) {}},
    {"prefetch", [](const char*, Args) {}},
    {"griddepcontrol", [](const char*, Args) {}},
    {"wgmma.fence", [](const char*, Args) {}},
    {"wgmma.commit_group", [](const char*, Args) { self->groups.push_back(self->products); }},
    {"wgmma.wait_group", [](const char*, Args args) { await_products(u32(args[0].in)); }},
    {"mbarrier.", run_mbarrier},
    {"cp.async.bulk.commit_group", [](const char*, Args) {}},
    {"cp.async.bulk", run_bulk},
    {"cp.reduce", run_bulk},
    {"cp.async.", run_copy},
    {"ld.shared", [](const char* text, Args args) { run_shared(text, args, false); }},
    {"st.shared", [](const char* text, Args args) { run_shared(text, args, true); }},
    {"stmatrix", store_matrices},
    {"ldmatrix", load_matrices},
    {"mma.sync", multiply_in_warp},
    {"bar.", run_barrier},
    {"red.", run_reduction},
    {"st.release", [](const char*, Args args) { *reinterpret_cast<u32*>(args[0].in) = u32(args[1].in), ++changes; }},
    {"ld.acquire", load_acquired},
    {"ld.global.cs.v4", load_words},
    {"st.v4", store_words},
    {"mov.u64 %0, %globaltimer", tell_time},
    {"ex2.approx.ftz", [](const char*, Args args) { give(args, 0, flushed(std::exp2(flushed(f(args, 1))))); }},
    {"ex2.approx", [](const char*, Args args) { give(args, 0, std::exp2(f(args, 1))); }},
    {"lg2.approx", [](const char*, Args args) { give(args, 0, std::log2(f(args, 1))); }},
    {"rcp.approx.ftz", [](const char*, Args args) { give(args, 0, flushed(1.f / flushed(f(args, 1)))); }},
    {"rcp.approx", [](const char*, Args args) { give(args, 0, 1.f / f(args, 1)); }},
    {"rsqrt.approx", [](const char*, Args args) { give(args, 0, 1.f / std::sqrt(f(args, 1))); }},
    {"sqrt.approx", [](const char*, Args args) { give(args, 0, std::sqrt(f(args, 1))); }},
    {"tanh.approx", [](const char*, Args args) { give(args, 0, std::tanh(f(args, 1))); }},
    {"max.NaN", [](const char*, Args args) { give(args, 0, max_or_nan(f(args, 1), f(args, 2))); }},
    {"cvt.rn.bf16x2.f32", [](const char*, Args args) {
        give(args, 0, to_bf16(f(args, 1)) << 16 | to_bf16(f(args, 2)));
    }},
    {"cvt.rn.f16x2.f32", [](const char*, Args args) {
        give(args, 0, to_half(f(args, 1)) << 16 | to_half(f(args, 2)));
    }},
    {"cvt.rn.bf16.f32", [](const char*, Args args) { give(args, 0, (unsigned short)to_bf16(f(args, 1))); }},
    {"cvt.rn.f16.f32", [](const char*, Args args) { give(args, 0, (unsigned short)to_half(f(args, 1))); }},
    {"cvt.f32.f16", [](const char*, Args args) { give(args, 0, from_half(u32(args[1].in))); }},
    {"cvt.rn.f16x2.e4m3x2", [](const char*, Args args) {
        give(args, 0, to_half(of_e4m3(args[1].in & 0xff)) | to_half(of_e4m3(args[1].in >> 8 & 0xff)) << 16);
    }},
};

inline Run instruction(const char* text) {
    while (*text == ' ') ++text;
    if (!*text) return [](const char*, Args) {};
    for (const auto& each : INSTRUCTIONS)
        if (std::strncmp(text, each.begins, std::strlen(each.begins)) == 0) return each.run;
    return [](const char* text, Args) { fail(std::string("an instruction that is not emulated: ") + text); };
}

}  // namespace emulated
