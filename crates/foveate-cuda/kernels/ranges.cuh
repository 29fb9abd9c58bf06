// Interval arithmetic: what a mask can be over a rectangle of queries and keys.
//
// The types have the operators of `bool`, `Int` and `Exact`, so a mask prints as the same text
// over ranges. Every rule gives a range that holds the result for all operands in the given
// ranges, with their wrapping and rounding; where a rule would be long it gives everything. They
// are the rules of foveate_mods::bounds.

struct BoolRange {
    bool yes, no;       // whether it can be true, false
    __device__ explicit BoolRange(bool v) : yes(v), no(!v) {}
    __device__ BoolRange(bool yes, bool no) : yes(yes), no(no) {}
    static __device__ BoolRange any() { return {true, true}; }
    __device__ bool known() const { return yes != no; }
};

struct IntRange {
    int lo, hi;         // both are in it
    __device__ IntRange(int v) : lo(v), hi(v) {}
    __device__ IntRange(Int v) : lo(v.v), hi(v.v) {}
    __device__ IntRange(int lo, int hi) : lo(lo), hi(hi) {}
    static __device__ IntRange any() { return {-2147483647 - 1, 2147483647}; }
    // lo .. hi, or everything when it would wrap.
    static __device__ IntRange wide(i64 lo, i64 hi) {
        return lo == int(lo) && hi == int(hi) ? IntRange(int(lo), int(hi)) : any();
    }
    __device__ bool known() const { return lo == hi; }
};

struct FloatRange {
    float lo, hi;       // both are in it, and are no NaN
    bool nan;           // whether it can be NaN
    __device__ explicit FloatRange(float v) : lo(v), hi(v), nan(false) { if (v != v) *this = any(); }
    __device__ explicit FloatRange(Exact v) : FloatRange(v.v) {}
    __device__ FloatRange(float lo, float hi, bool nan) : lo(lo), hi(hi), nan(nan) {}
    static __device__ FloatRange any() { return {of_bits(0xff800000), of_bits(0x7f800000), true}; }
    // Smallest to largest of four values, or everything when one is NaN.
    static __device__ FloatRange of(Exact a, Exact b, Exact c, Exact d, bool nan) {
        if (a != a || b != b || c != c || d != d) return any();
        return {fminf(fminf(a.v, b.v), fminf(c.v, d.v)), fmaxf(fmaxf(a.v, b.v), fmaxf(c.v, d.v)), nan};
    }
    // Wider than lo .. hi by more than the error of the elementary functions, so that those that
    // are not quite monotone stay inside.
    static __device__ FloatRange widened(Exact lo, Exact hi, bool nan) {
        return {lo.v - slack(lo.v), hi.v + slack(hi.v), nan};
    }
    static __device__ float slack(float x) {
        return fabsf(x) < of_bits(0x7f800000) ? fabsf(x) * 1e-6f + 1.17549435e-38f : 0.f;
    }
    // The ends do not tell the two zeros apart.
    __device__ bool known() const { return lo == hi && !nan && lo != 0.f; }
    __device__ Exact low() const { return Exact(lo); }
    __device__ Exact high() const { return Exact(hi); }
};

__device__ BoolRange join(BoolRange x, BoolRange y) { return {x.yes || y.yes, x.no || y.no}; }
__device__ IntRange join(IntRange x, IntRange y) { return {min(x.lo, y.lo), max(x.hi, y.hi)}; }
__device__ FloatRange join(FloatRange x, FloatRange y) {
    return {fminf(x.lo, y.lo), fmaxf(x.hi, y.hi), x.nan || y.nan};
}

__device__ BoolRange select(BoolRange c, BoolRange x, BoolRange y) { return c.known() ? c.yes ? x : y : join(x, y); }
__device__ IntRange select(BoolRange c, IntRange x, IntRange y) { return c.known() ? c.yes ? x : y : join(x, y); }
__device__ FloatRange select(BoolRange c, FloatRange x, FloatRange y) { return c.known() ? c.yes ? x : y : join(x, y); }

// Truth values.
__device__ BoolRange operator!(BoolRange x) { return {x.no, x.yes}; }
__device__ BoolRange operator&(BoolRange x, BoolRange y) { return {x.yes && y.yes, x.no || y.no}; }
__device__ BoolRange operator|(BoolRange x, BoolRange y) { return {x.yes || y.yes, x.no && y.no}; }
__device__ BoolRange operator^(BoolRange x, BoolRange y) {
    return x.known() && y.known() ? BoolRange(x.yes != y.yes) : BoolRange::any();
}
__device__ BoolRange operator!=(BoolRange x, BoolRange y) { return x ^ y; }
__device__ BoolRange operator==(BoolRange x, BoolRange y) { return !(x ^ y); }

// Integers.
__device__ IntRange operator+(IntRange x, IntRange y) {
    if (x.known() && y.known()) return Int(x.lo) + Int(y.lo);
    return IntRange::wide(i64(x.lo) + y.lo, i64(x.hi) + y.hi);
}
__device__ IntRange operator-(IntRange x, IntRange y) {
    if (x.known() && y.known()) return Int(x.lo) - Int(y.lo);
    return IntRange::wide(i64(x.lo) - y.hi, i64(x.hi) - y.lo);
}
__device__ IntRange operator-(IntRange x) {
    return x.known() ? IntRange(-Int(x.lo)) : IntRange::wide(-i64(x.hi), -i64(x.lo));
}

__device__ IntRange operator*(IntRange x, IntRange y) {
    if (x.known() && y.known()) return Int(x.lo) * Int(y.lo);
    i64 a = i64(x.lo) * y.lo, b = i64(x.lo) * y.hi, c = i64(x.hi) * y.lo, d = i64(x.hi) * y.hi;
    i64 ab = a < b ? a : b, cd = c < d ? c : d, AB = a < b ? b : a, CD = c < d ? d : c;
    return IntRange::wide(ab < cd ? ab : cd, AB < CD ? CD : AB);
}

__device__ IntRange operator/(IntRange x, IntRange y) {
    if (x.known() && y.known()) return Int(x.lo) / Int(y.lo);
    if (y.lo > 0 || y.hi < 0) {
        // The one quotient that wraps.
        if (x.lo == -2147483647 - 1 && y.hi == -1) return IntRange::any();
        Int a = Int(x.lo) / Int(y.lo), b = Int(x.lo) / Int(y.hi), c = Int(x.hi) / Int(y.lo), d = Int(x.hi) / Int(y.hi);
        return {min(min(a, b), min(c, d)).v, max(max(a, b), max(c, d)).v};
    }
    i64 low = x.lo < 0 ? -i64(x.lo) : x.lo, high = x.hi < 0 ? -i64(x.hi) : x.hi;
    i64 most = low < high ? high : low;
    return IntRange::wide(-most, most);
}

__device__ IntRange operator%(IntRange x, IntRange y) {
    if (x.known() && y.known()) return Int(x.lo) % Int(y.lo);
    if (y.known() && y.lo > 0 && Int(x.lo) / Int(y.lo) == Int(x.hi) / Int(y.lo))
        return {(Int(x.lo) % Int(y.lo)).v, (Int(x.hi) % Int(y.lo)).v};
    i64 low = y.lo < 0 ? -i64(y.lo) : y.lo, high = y.hi < 0 ? -i64(y.hi) : y.hi;
    i64 most = low < high ? high : low;
    return IntRange::wide(0, most > 0 ? most - 1 : 0);
}

// The smallest 2^k - 1 that is not below x, which is not negative.
__device__ int below_power(int x) { return x == 0 ? 0 : int(0xffffffffu >> __clz(x)); }

__device__ IntRange operator&(IntRange x, IntRange y) {
    if (x.known() && y.known()) return Int(x.lo) & Int(y.lo);
    if (x.known()) { IntRange known = x; x = y; y = known; }
    if (y.known()) {
        // -2^k rounds down, 2^k - 1 is a remainder.
        const unsigned bits = unsigned(y.lo), up = 0u - bits;
        if (y.lo < 0 && (up & (up - 1)) == 0) return {x.lo & y.lo, x.hi & y.lo};
        if (y.lo >= 0 && (bits & (bits + 1)) == 0 && (x.lo & ~y.lo) == (x.hi & ~y.lo))
            return {x.lo & y.lo, x.hi & y.lo};
    }
    if (x.lo >= 0 && y.lo >= 0) return {0, min(x.hi, y.hi)};
    if (x.lo >= 0) return {0, x.hi};
    if (y.lo >= 0) return {0, y.hi};
    return {-2147483647 - 1, max(x.hi, y.hi)};
}
__device__ IntRange operator|(IntRange x, IntRange y) {
    if (x.known() && y.known()) return Int(x.lo) | Int(y.lo);
    if (x.lo < 0 || y.lo < 0) return IntRange::any();
    return {max(x.lo, y.lo), below_power(x.hi | y.hi)};
}
__device__ IntRange operator^(IntRange x, IntRange y) {
    if (x.known() && y.known()) return Int(x.lo) ^ Int(y.lo);
    if (x.lo < 0 || y.lo < 0) return IntRange::any();
    return {0, below_power(x.hi | y.hi)};
}
__device__ IntRange shift_left(IntRange x, IntRange y) {
    if (x.known() && y.known()) return shift_left(Int(x.lo), Int(y.lo));
    if (!y.known() || y.lo < 0 || y.lo > 31) return IntRange::any();
    return IntRange::wide(i64(x.lo) * (i64(1) << y.lo), i64(x.hi) * (i64(1) << y.lo));
}
__device__ IntRange shift_right(IntRange x, IntRange y) {
    if (x.known() && y.known()) return shift_right(Int(x.lo), Int(y.lo));
    // A distance outside of 0 .. 31 shifts like 31.
    int near = unsigned(y.lo) < 32 ? y.lo : 31, far = unsigned(y.hi) < 32 ? y.hi : 31;
    if (y.lo < 0 || near > far) { near = 0; far = 31; }
    return {min(x.lo >> near, x.lo >> far), max(x.hi >> near, x.hi >> far)};
}

// Positions of indices that count from the end where they are negative.
__device__ IntRange range_from_end(IntRange x, int length) {
    if (x.lo >= 0) return x;
    if (x.hi < 0) return IntRange::wide(i64(x.lo) + length, i64(x.hi) + length);
    return IntRange(min(x.lo + length, 0), max(x.hi, length - 1));
}

__device__ IntRange min(IntRange x, IntRange y) { return {min(x.lo, y.lo), min(x.hi, y.hi)}; }
__device__ IntRange max(IntRange x, IntRange y) { return {max(x.lo, y.lo), max(x.hi, y.hi)}; }
__device__ IntRange abs(IntRange x) {
    if (x.known()) return abs(Int(x.lo));
    i64 low = x.lo < 0 ? -i64(x.lo) : x.lo, high = x.hi < 0 ? -i64(x.hi) : x.hi;
    i64 least = x.lo <= 0 && 0 <= x.hi ? 0 : low < high ? low : high;
    return IntRange::wide(least, low < high ? high : low);
}
__device__ IntRange mix(IntRange x, IntRange y) {
    return x.known() && y.known() ? IntRange(mix(Int(x.lo), Int(y.lo))) : IntRange::any();
}
__device__ BoolRange operator==(IntRange x, IntRange y) {
    return {x.lo <= y.hi && y.lo <= x.hi, !(x.known() && y.known() && x.lo == y.lo)};
}
__device__ BoolRange operator!=(IntRange x, IntRange y) { return !(x == y); }
__device__ BoolRange operator<(IntRange x, IntRange y) { return {x.lo < y.hi, x.hi >= y.lo}; }
__device__ BoolRange operator<=(IntRange x, IntRange y) { return {x.lo <= y.hi, x.hi > y.lo}; }

// Floats.
__device__ FloatRange operator+(FloatRange x, FloatRange y) {
    // Rounding to nearest keeps sums of the ends at the ends.
    return FloatRange::of(x.low() + y.low(), x.high() + y.high(), x.low() + y.high(), x.high() + y.low(),
                          x.nan || y.nan);
}
__device__ FloatRange operator-(FloatRange x, FloatRange y) {
    return FloatRange::of(x.low() - y.high(), x.high() - y.low(), x.low() - y.low(), x.high() - y.high(),
                          x.nan || y.nan);
}
__device__ FloatRange operator-(FloatRange x) { return {-x.hi, -x.lo, x.nan}; }

__device__ FloatRange operator*(FloatRange x, FloatRange y) {
    auto infinite = [](FloatRange x) {
        return fabsf(x.lo) == of_bits(0x7f800000) || fabsf(x.hi) == of_bits(0x7f800000);
    };
    auto zero = [](FloatRange x) { return x.lo <= 0.f && 0.f <= x.hi; };
    if ((infinite(x) && zero(y)) || (infinite(y) && zero(x))) return FloatRange::any();
    return FloatRange::of(x.low() * y.low(), x.low() * y.high(), x.high() * y.low(), x.high() * y.high(),
                          x.nan || y.nan);
}

__device__ FloatRange operator/(FloatRange x, FloatRange y) {
    if (!(y.lo > 0.f || y.hi < 0.f)) return FloatRange::any();
    return FloatRange::of(x.low() / y.low(), x.low() / y.high(), x.high() / y.low(), x.high() / y.high(),
                          x.nan || y.nan);
}

__device__ FloatRange operator%(FloatRange x, FloatRange y) {
    return x.known() && y.known() ? FloatRange(x.low() % y.low()) : FloatRange::any();
}

__device__ FloatRange min(FloatRange x, FloatRange y) {
    // The other operand stands in for a NaN.
    return x.nan || y.nan ? join(x, y) : FloatRange(fminf(x.lo, y.lo), fminf(x.hi, y.hi), false);
}
__device__ FloatRange max(FloatRange x, FloatRange y) {
    return x.nan || y.nan ? join(x, y) : FloatRange(fmaxf(x.lo, y.lo), fmaxf(x.hi, y.hi), false);
}
__device__ FloatRange abs(FloatRange x) {
    float low = fabsf(x.lo), high = fabsf(x.hi);
    return {x.lo <= 0.f && 0.f <= x.hi ? 0.f : fminf(low, high), fmaxf(low, high), x.nan};
}
__device__ FloatRange floor(FloatRange x) { return {floorf(x.lo), floorf(x.hi), x.nan}; }

// Functions that grow with their argument.
__device__ FloatRange exp(FloatRange x) {
    return x.known() ? FloatRange(exp(x.low())) : FloatRange::widened(exp(x.low()), exp(x.high()), x.nan);
}
__device__ FloatRange exp2(FloatRange x) {
    return x.known() ? FloatRange(exp2(x.low())) : FloatRange::widened(exp2(x.low()), exp2(x.high()), x.nan);
}
__device__ FloatRange tanh(FloatRange x) {
    return x.known() ? FloatRange(tanh(x.low())) : FloatRange::widened(tanh(x.low()), tanh(x.high()), x.nan);
}
__device__ FloatRange sigmoid(FloatRange x) {
    return x.known() ? FloatRange(sigmoid(x.low())) : FloatRange::widened(sigmoid(x.low()), sigmoid(x.high()), x.nan);
}
__device__ FloatRange erf(FloatRange x) {
    return x.known() ? FloatRange(erf(x.low())) : FloatRange::widened(erf(x.low()), erf(x.high()), x.nan);
}

// The same for arguments that are not negative.
__device__ FloatRange log(FloatRange x) {
    if (x.known()) return FloatRange(log(x.low()));
    return x.lo >= 0.f ? FloatRange::widened(log(x.low()), log(x.high()), x.nan) : FloatRange::any();
}
__device__ FloatRange log2(FloatRange x) {
    if (x.known()) return FloatRange(log2(x.low()));
    return x.lo >= 0.f ? FloatRange::widened(log2(x.low()), log2(x.high()), x.nan) : FloatRange::any();
}
__device__ FloatRange sqrt(FloatRange x) {
    if (x.known()) return FloatRange(sqrt(x.low()));
    return x.lo >= 0.f ? FloatRange::widened(sqrt(x.low()), sqrt(x.high()), x.nan) : FloatRange::any();
}

__device__ FloatRange rsqrt(FloatRange x) { return x.known() ? FloatRange(rsqrt(x.low())) : FloatRange::any(); }
// Whatever the compiler makes of them.
__device__ FloatRange sin(FloatRange) { return {-1.0001f, 1.0001f, true}; }
__device__ FloatRange cos(FloatRange) { return {-1.0001f, 1.0001f, true}; }
__device__ FloatRange pow(FloatRange, FloatRange) { return FloatRange::any(); }

__device__ BoolRange operator==(FloatRange x, FloatRange y) {
    return {x.lo <= y.hi && y.lo <= x.hi, !(x.known() && y.known() && x.lo == y.lo)};
}
__device__ BoolRange operator!=(FloatRange x, FloatRange y) { return !(x == y); }
__device__ BoolRange operator<(FloatRange x, FloatRange y) { return {x.lo < y.hi, x.hi >= y.lo || x.nan || y.nan}; }
__device__ BoolRange operator<=(FloatRange x, FloatRange y) { return {x.lo <= y.hi, x.hi > y.lo || x.nan || y.nan}; }

// Conversions.
__device__ IntRange to_int(BoolRange x) { return {!x.no, x.yes}; }
__device__ IntRange to_int(FloatRange x) {
    IntRange range(to_int(x.low()).v, to_int(x.high()).v);
    return x.nan ? join(range, IntRange(0)) : range;
}
__device__ FloatRange to_float(BoolRange x) { return {x.no ? 0.f : 1.f, x.yes ? 1.f : 0.f, false}; }
__device__ FloatRange to_float(IntRange x) { return {to_float(Int(x.lo)), to_float(Int(x.hi)), false}; }
__device__ BoolRange to_bool(IntRange) { return BoolRange::any(); }
__device__ BoolRange to_bool(FloatRange) { return BoolRange::any(); }
__device__ FloatRange unit(IntRange x) { return x.known() ? FloatRange(unit(Int(x.lo))) : FloatRange(0.f, 1.f, false); }

__device__ BoolRange range_of(bool x) { return BoolRange(x); }
__device__ IntRange range_of(Int x) { return IntRange(x); }
__device__ FloatRange range_of(float x) { return FloatRange(x); }
__device__ BoolRange range_of(BoolEnds x) { return {x.hi != 0, x.lo == 0}; }
__device__ IntRange range_of(IntEnds x) { return x.lo <= x.hi ? IntRange(x.lo, x.hi) : IntRange::any(); }
__device__ bool fits(BoolEnds) { return true; }
__device__ bool fits(IntEnds x) { return x.lo <= x.hi; }
__device__ bool fits(FloatEnds) { return true; }
__device__ FloatRange range_of(FloatEnds x) { return x.lo == x.lo ? FloatRange(x.lo, x.hi, false) : FloatRange::any(); }
__device__ BoolRange any_of(BoolEnds) { return BoolRange::any(); }
__device__ IntRange any_of(IntEnds) { return IntRange::any(); }
__device__ FloatRange any_of(FloatEnds) { return FloatRange::any(); }

// Captured buffers.
//
// Every row of a buffer (its last axis) is cut into blocks of RANGE_BLOCK elements, the last one
// shorter. table[level][row][i] holds the ends of blocks i .. i + 2^level, so a stretch is two
// overlapping powers of two of blocks and at most two ends of single elements.
constexpr int RANGE_BLOCK = 32;

// Leading axes with up to this many rows are joined row by row; beyond, anything is possible.
constexpr int RANGE_ROWS = 64;

// Where a table is. One that a CTA makes for itself (own_tables.cuh) is told by the bytes before it in the CTA's
// dynamic shared memory: less than OWN_TABLES_END, where no device memory lies.
constexpr i64 OWN_TABLES_END = 1 << 20;
template <typename Ends>
__device__ bool is_own(const Ends* table) { return reinterpret_cast<i64>(table) < OWN_TABLES_END; }
template <typename Ends>
__device__ Ends* own_table(const Ends* table) {
    extern __shared__ char dynamic_shared[];
    return reinterpret_cast<Ends*>(dynamic_shared + reinterpret_cast<i64>(table));
}

struct Axis {
    IntRange index;
    int length;
    i64 stride = -1;    // of a buffer with strides; else it is row-major
};

// Range of the elements that indices in the given ranges read, clamped to the axes. `within` is
// cleared when an index may be outside its axis, or an element one that no Int holds.
template <typename Elem, typename Ends, int RANK>
__device__ auto load(const Elem* elems, const Ends* table, const Axis (&axes)[RANK], bool& within) {
    int lo[RANK], hi[RANK];
    i64 rows = 1, count = 1;
    #pragma unroll
    for (int a = 0; a < RANK; ++a) {
        within &= inside(axes[a].index.lo, axes[a].length) && inside(axes[a].index.hi, axes[a].length);
        lo[a] = clamp(axes[a].index.lo, axes[a].length);
        hi[a] = clamp(axes[a].index.hi, axes[a].length);
        if (a < RANK - 1) {
            rows *= axes[a].length;
            count *= hi[a] - lo[a] + 1;
        }
    }
    if (count > RANGE_ROWS) return any_of(Ends{});
    const int length = axes[RANK - 1].length, from = lo[RANK - 1], to = hi[RANK - 1] + 1;
    const int blocks = (length + RANGE_BLOCK - 1) / RANGE_BLOCK;
    const int first = (from + RANGE_BLOCK - 1) / RANGE_BLOCK, last = to == length ? blocks : to / RANGE_BLOCK;
    const int level = first < last ? 31 - __clz(last - first) : 0;
    const bool dense = axes[RANK - 1].stride < 0;
    const i64 step = dense ? 1 : axes[RANK - 1].stride;
    auto one = [&](const Elem* at) {
        within &= fits(at);
        return range_of(load(at));
    };
    auto of_row = [&](int n) {
        i64 row = 0, scale = 1, start = 0;
        #pragma unroll
        for (int a = RANK - 2; a >= 0; --a) {
            int width = hi[a] - lo[a] + 1;
            row += scale * (lo[a] + n % width);
            start += (lo[a] + n % width) * axes[a].stride;
            n /= width;
            scale *= axes[a].length;
        }
        const Elem* at = elems + (dense ? row * length : start);
        if (first >= last) {
            auto range = one(at + from * step);
            for (int i = from + 1; i < to; ++i) range = join(range, one(at + i * step));
            return range;
        }
        const Ends* ends = (is_own(table) ? own_table(table) : table) + (level * rows + row) * blocks;
        within &= fits(ends[first]) && fits(ends[last - (1 << level)]);
        auto range = join(range_of(ends[first]), range_of(ends[last - (1 << level)]));
        for (int i = from; i < first * RANGE_BLOCK; ++i) range = join(range, one(at + i * step));
        for (int i = last * RANGE_BLOCK; i < to; ++i) range = join(range, one(at + i * step));
        return range;
    };
    auto range = of_row(0);
    for (int n = 1; n < int(count); ++n) range = join(range, of_row(n));
    return range;
}

// What `fv_cover` answers.
__device__ int cover(BoolRange mask, bool within) {
    return !within || !mask.known() ? 2 : mask.yes;
}
