// What lies between blocks whose operands are of different dtypes or apart: widening, adding, copying rows.

struct ElemsParams {
    u64 from, to;               // [elems], of which fv_widen has `to` and fv_add `from` in f32
    i64 elems;
};

struct RowsParams {
    Rows from, to;              // [rows, width]
    int width;
};

extern "C" __global__ void __launch_bounds__(THREADS)
fv_widen(const __grid_constant__ ElemsParams p) {
    const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at < p.elems) reinterpret_cast<float*>(p.to)[at] = widen<FV_DTYPE>(reinterpret_cast<const Elem*>(p.from)[at]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_add(const __grid_constant__ ElemsParams p) {
    const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= p.elems) return;
    Elem& to = reinterpret_cast<Elem*>(p.to)[at];
    to = narrow<FV_DTYPE>(widen<FV_DTYPE>(to) + reinterpret_cast<const float*>(p.from)[at]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_copy_rows(const __grid_constant__ RowsParams p) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * VECTOR;
    if (column >= p.width) return;
    typedef Vector<Elem, VECTOR> Elems;
    *reinterpret_cast<Elems*>(p.to.row(blockIdx.x) + column) = *reinterpret_cast<const Elems*>(p.from.row(blockIdx.x) +
                                                                                               column);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fv_add_rows(const __grid_constant__ RowsParams p) {
    const int column = (blockIdx.y * THREADS + threadIdx.x) * VECTOR;
    if (column >= p.width) return;
    float x[VECTOR], y[VECTOR];
    load(x, p.from.row(blockIdx.x) + column);
    load(y, p.to.row(blockIdx.x) + column);
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) y[i] += x[i];
    store(p.to.row(blockIdx.x) + column, y);
}
