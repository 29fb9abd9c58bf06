// Products of the backward, of one warpgroup. DQ_FIRST is its first column of dQ, DQ_COLUMNS how many it has.

// The first of a sum, which writes accumulators that held nothing, and the others.
extern "C" __global__ void __launch_bounds__(128, 1)
rows_first(const __grid_constant__ TensorMap map, const u32* input, float* out) {
    const u32 base = load_image(input);
    const Operand a = Operand::rows(base), b = Operand::rows(base + 64 * panels(FV_DP) * PANEL_ROW);
    float s[FV_BM / 8][4];
    product_fence();
    wgmma_first(s, a.bits, b.bits);
    #pragma unroll
    for (int k = 1; k < FV_DP / MMA_K; ++k)
        multiply_async(s, a + (k / 4 * 64 * PANEL_ROW + k % 4 * 32), b + (k / 4 * FV_BM * PANEL_ROW + k % 4 * 32),
                       true);
    product_commit();
    product_wait<0>();
    pin(s);
    store(out, s);
}

// 64 x FV_BN along the sum, of a tile of FV_BM rows, by FV_BN x DQ_COLUMNS across it.
extern "C" __global__ void __launch_bounds__(128, 1)
across(const __grid_constant__ TensorMap map, const u32* input, float* out) {
    const u32 base = load_image(input);
    const Operand a = Operand::rows(base);
    const u32 keys = base + FV_BM * (FV_BN / PANEL_COLUMNS) * PANEL_ROW;
    const Operand b = Operand::columns(
        keys + DQ_FIRST / PANEL_COLUMNS * FV_BN * PANEL_ROW + DQ_FIRST % PANEL_COLUMNS * ELEM_BYTES, FV_BN * PANEL_ROW);
    multiply_and_store<DQ_COLUMNS>(out, [&](auto& d) {
        #pragma unroll
        for (int k = 0; k < FV_BN / 16; ++k)
            multiply_across(d, a + (k / 4 * FV_BM * PANEL_ROW + k % 4 * 32), b + k * 16 * PANEL_ROW, k > 0);
    });
}

// 64 keys of FV_BM x 64 by FV_BM x FV_DP, both across the sum.
extern "C" __global__ void __launch_bounds__(128, 1)
transposed(const __grid_constant__ TensorMap map, const u32* input, float* out) {
    const u32 base = load_image(input);
    const Operand a = Operand::columns(base, 0);
    const Operand b = Operand::columns(base + FV_BM * PANEL_ROW, FV_BM * PANEL_ROW);
    multiply_and_store<FV_DP>(out, [&](auto& d) {
        #pragma unroll
        for (int k = 0; k < FV_BM / 16; ++k) multiply_transposed(d, a + k * 16 * PANEL_ROW, b + k * 16 * PANEL_ROW);
    });
}
