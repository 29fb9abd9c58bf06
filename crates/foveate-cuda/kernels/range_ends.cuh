// Ends of elements and of stretches of them: what range tables are made of, see ranges.cuh.

__device__ BoolEnds ends_of(bool x) { return {x, x}; }
__device__ IntEnds ends_of(Int x) { return {x.v, x.v}; }
__device__ FloatEnds ends_of(float x) { return {x, x}; }

__device__ BoolEnds join(BoolEnds x, BoolEnds y) { return {min(x.lo, y.lo), max(x.hi, y.hi)}; }
__device__ IntEnds join(IntEnds x, IntEnds y) {
    // What is no Int stays.
    if (x.lo > x.hi) return x;
    return y.lo > y.hi ? y : IntEnds{min(x.lo, y.lo), max(x.hi, y.hi)};
}
// A NaN takes both ends.
__device__ FloatEnds join(FloatEnds x, FloatEnds y) {
    if (x.lo != x.lo) return x;
    return y.lo != y.lo ? y : FloatEnds{fminf(x.lo, y.lo), fmaxf(x.hi, y.hi)};
}

template <typename Elem> __device__ auto ends_at(const Elem* at) { return ends_of(load(at)); }
__device__ IntEnds ends_at(const i64* at) { return fits(at) ? ends_of(load(at)) : IntEnds{1, 0}; }
