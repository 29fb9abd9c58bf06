// What probes share. A probe is a kernel `(map, input, out)`; shared memory begins with what the host laid out.

extern __shared__ __align__(1024) u32 shared[];
extern "C" __device__ const int fv_shared_bytes = PROBE_BYTES;

__device__ u32 aligned_base() {
    const u32 base = shared_address(shared);
    if (base % 1024 != 0) __trap();
    return base;
}

// Fills smem with the first words of the input, where products read it afterwards.
__device__ u32 load_image(const u32* input) {
    const u32 base = aligned_base();
    for (int i = threadIdx.x; i < PROBE_BYTES / 4; i += blockDim.x) shared[i] = input[i];
    fence_async_proxy();
    __syncthreads();
    return base;
}

// What an accumulator holds before products that add to it. Tensor cores sum e4m3 in 14 bits.
__device__ float before(int i) { return FV_DTYPE == 3 ? i : threadIdx.x % 128 * 128 + i; }

template <int N>
__device__ void set_before(float (&d)[N][4]) {
    #pragma unroll
    for (int i = 0; i < N * 4; ++i) d[i / 4][i % 4] = before(i);
}

// Accumulators of a thread of a warpgroup, in their order.
template <int N>
__device__ void store(float* out, const float (&d)[N][4]) {
    #pragma unroll
    for (int i = 0; i < N * 4; ++i) out[threadIdx.x % 128 * (N * 4) + i] = d[i / 4][i % 4];
}

// The accumulators of one group of products of COLUMNS columns.
template <int COLUMNS, typename F>
__device__ void multiply_and_store(float* out, F products) {
    float d[COLUMNS / 8][4];
    set_before(d);
    pin(d);
    product_fence();
    products(d);
    product_commit();
    product_wait<0>();
    pin(d);
    store(out, d);
}

// S = A B, both along the sum, of 64 x FV_DP by ROWS x FV_DP.
template <int ROWS, int N>
__device__ void multiply_rows(float (&s)[N][4], Operand a, Operand b) {
    #pragma unroll
    for (int k = 0; k < FV_DP / MMA_K; ++k)
        multiply_async(s, a + (k / 4 * 64 * PANEL_ROW + k % 4 * 32), b + (k / 4 * ROWS * PANEL_ROW + k % 4 * 32),
                       k > 0);
}

// Registers of a left operand as the host gives them, four for each step and thread.
template <int STEPS>
__device__ void load_registers(u32 (&a)[STEPS][4], const u32* from) {
    #pragma unroll
    for (int i = 0; i < STEPS * 4; ++i) a[i / 4][i % 4] = from[(i / 4 * 128 + threadIdx.x % 128) * 4 + i % 4];
}
