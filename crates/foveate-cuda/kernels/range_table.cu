// The range table of a captured buffer, see ranges.cuh: fv_range_table<<<rows, any number of threads>>>
//
// A CTA owns a row. It computes the ends of every RANGE_BLOCK elements, then each level from the level
// below, with one __syncthreads for each level:
//
//   level 0    e0  e1  e2  e3  e4          entry i holds blocks i .. i + 2^level; past the end of
//   level 1    e01 e12 e23 e34 e4          the row an entry is copied
//   level 2    e03 e14 e24 e34 e4
//
// No shared memory.

extern "C" __device__ const int fv_shared_bytes = 0;

template <typename Ends, typename Elem>
__device__ void table_of_row(const RangeTableParams& p, const Elem* elems) {
    i64 row = blockIdx.x;
    for (int a = p.axes - 1; a >= 0; --a) {
        elems += row % p.lengths[a] * p.strides[a];
        row /= p.lengths[a];
    }
    const int blocks = p.length / RANGE_BLOCK + (p.length % RANGE_BLOCK != 0);
    Ends* level = static_cast<Ends*>(p.table) + i64(blockIdx.x) * blocks;
    for (int i = threadIdx.x; i < blocks; i += blockDim.x) {
        const Elem* block = elems + i64(i) * RANGE_BLOCK * p.step;
        const int count = min(RANGE_BLOCK, p.length - i * RANGE_BLOCK);
        Ends ends = ends_at(block);
        for (int k = 1; k < count; ++k) ends = join(ends, ends_at(block + k * p.step));
        level[i] = ends;
    }
    for (int reach = 1; 2 * reach <= blocks; reach *= 2) {
        __syncthreads();
        Ends* next = level + p.rows * blocks;
        for (int i = threadIdx.x; i < blocks; i += blockDim.x)
            next[i] = i + reach < blocks ? join(level[i], level[i + reach]) : level[i];
        level = next;
    }
}

extern "C" __global__ void __launch_bounds__(1024)
fv_range_table(const __grid_constant__ RangeTableParams p) {
    switch (p.ty) {
        case 0: return table_of_row<BoolEnds>(p, static_cast<const unsigned char*>(p.elems));
        case 1: return table_of_row<IntEnds>(p, static_cast<const U8*>(p.elems));
        case 2: return table_of_row<IntEnds>(p, static_cast<const signed char*>(p.elems));
        case 3: return table_of_row<IntEnds>(p, static_cast<const short*>(p.elems));
        case 4: return table_of_row<IntEnds>(p, static_cast<const int*>(p.elems));
        case 5: return table_of_row<IntEnds>(p, static_cast<const i64*>(p.elems));
        case 6: return table_of_row<FloatEnds>(p, static_cast<const F16*>(p.elems));
        case 7: return table_of_row<FloatEnds>(p, static_cast<const BF16*>(p.elems));
        case 8: return table_of_row<FloatEnds>(p, static_cast<const float*>(p.elems));
        default: return table_of_row<FloatEnds>(p, static_cast<const double*>(p.elems));
    }
}
