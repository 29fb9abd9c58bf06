// Gated MLPs: out = f(gate) up, gate and up side by side in a row. f is SiLU, x sigmoid(x), or GELU by tanh.
//   FV_GELU      0 SiLU, 1 GELU

struct GatedParams {
    Rows gate_up;               // [rows, 2 width]
    Rows out;                   // [rows, width]
    int width;
};

struct Activation { float value, slope; };

__device__ Activation activation(float x) {
    if constexpr (FV_GELU) {
        // x / 2 (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x^3); (1 + tanh u) / 2 = sigmoid(2 u).
        // Beyond 16 the sigmoid is 0 or 1, whose slope of 0 is to meet no infinite cube.
        const float unit = 0.7978845608028654f, cube = 0.044715f, c = x > 16.f ? 16.f : x < -16.f ? -16.f : x;
        const float u = unit * c * fmaf(cube * c, c, 1.f), s = divide_fast(1.f, 1.f + exp2_fast(-2.f * LOG2_E * u));
        return {x * s, s + 2.f * c * s * (1.f - s) * unit * fmaf(3.f * cube * c, c, 1.f)};
    } else {
        const float s = divide_fast(1.f, 1.f + exp2_fast(-LOG2_E * x));
        return {x * s, s * fmaf(x, 1.f - s, 1.f)};
    }
}

__device__ int column_of_thread() { return (blockIdx.y * THREADS + threadIdx.x) * VECTOR; }

extern "C" __global__ void __launch_bounds__(THREADS)
fv_gated(const __grid_constant__ GatedParams p) {
    const int column = column_of_thread();
    if (column >= p.width) return;
    const Elem* const row = p.gate_up.row(blockIdx.x) + column;
    float gate[VECTOR], up[VECTOR];
    load(gate, row);
    load(up, row + p.width);
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) gate[i] = activation(gate[i]).value * up[i];
    store(p.out.row(blockIdx.x) + column, gate);
}

// In place: gate_up becomes its gradient, and out, which holds its own gradient, f(gate) up.
extern "C" __global__ void __launch_bounds__(THREADS)
fv_gated_backward(const __grid_constant__ GatedParams p) {
    const int column = column_of_thread();
    if (column >= p.width) return;
    Elem* const row = p.gate_up.row(blockIdx.x) + column;
    Elem* const at_out = p.out.row(blockIdx.x) + column;
    float gate[VECTOR], up[VECTOR], d_out[VECTOR];
    load(gate, row);
    load(up, row + p.width);
    load(d_out, at_out);
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const Activation f = activation(gate[i]);
        gate[i] = d_out[i] * up[i] * f.slope;
        const float out = f.value * up[i];
        up[i] = d_out[i] * f.value;
        d_out[i] = out;
    }
    store(row, gate);
    store(row + p.width, up);
    store(at_out, d_out);
}
