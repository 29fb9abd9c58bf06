// Products of the forward, of one warpgroup.

constexpr int BOX_KEYS = FV_BN % 128 == 0 ? 128 : 64;      // of values of e4m3

// 64 x FV_DP by FV_BN x FV_DP, both in smem along the sum.
extern "C" __global__ void __launch_bounds__(128, 1)
rows(const __grid_constant__ TensorMap map, const u32* input, float* out) {
    const u32 base = load_image(input);
    const Operand a = Operand::rows(base), b = Operand::rows(base + 64 * panels(FV_DP) * PANEL_ROW);
    multiply_and_store<FV_BN>(out, [&](auto& s) { multiply_rows<FV_BN>(s, a, b); });
}

// 64 x FV_BN in registers by FV_BN x FV_DVP: of 16 bits across the sum, of e4m3 along it.
extern "C" __global__ void __launch_bounds__(128, 1)
registers(const __grid_constant__ TensorMap map, const u32* input, float* out) {
    const u32 base = load_image(input);
    u32 a[FV_BN / MMA_K][4];
    load_registers(a, input + PROBE_BYTES / 4);
    const Operand b = FV_DTYPE != 3     ? Operand::columns(base, FV_BN * PANEL_ROW)
                      : BOX_KEYS == 128 ? Operand::rows(base)
                                        : Operand::half_rows(base);
    multiply_and_store<FV_DVP>(out, [&](auto& d) {
        #pragma unroll
        for (int k = 0; k < FV_BN / MMA_K; ++k) {
            const int key = k * MMA_K, along = key / BOX_KEYS * BOX_KEYS * FV_DVP + key % BOX_KEYS;
            multiply_async(d, a[k], b + (FV_DTYPE == 3 ? along : key * PANEL_ROW));
        }
    });
}
