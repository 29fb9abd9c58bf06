// Two consumers with the accumulators of two products each, 176 a thread, more than the 168 registers of the launch.
// The producer gives up its own, and has something to write.
extern "C" __global__ void __launch_bounds__(384, 1)
roles(const __grid_constant__ TensorMap map, const u32* input, float* out) {
    constexpr int N = FV_BN / 8, N_OUT = FV_DVP / 8, STEPS = FV_BN / 16;
    constexpr int AT_B = 64 * panels(FV_DP) * PANEL_ROW, AT_V = AT_B + FV_BN * panels(FV_DP) * PANEL_ROW;
    const u32 base = load_image(input);
    const int consumer = warpgroup_of_thread() - 1;
    if (consumer < 0) {
        give_registers<40>();
        out[2 * 128 * (N + N_OUT) * 4 + threadIdx.x] = threadIdx.x * 3 + 1;
        return;
    }
    take_registers<232>();
    u32 a[STEPS][4];
    load_registers(a, input + PROBE_BYTES / 4);
    float s[N][4], d[N_OUT][4];
    set_before(d);
    set_before(s);
    pin(s);
    pin(d);
    product_fence();
    multiply_rows<FV_BN>(s, Operand::rows(base), Operand::rows(base + AT_B));
    #pragma unroll
    for (int k = 0; k < STEPS; ++k)
        multiply_async(d, a[k], Operand::columns(base + AT_V, FV_BN * PANEL_ROW) + k * 16 * PANEL_ROW);
    product_commit();
    product_wait<0>();
    pin(s);
    pin(d);
    float* const own = out + consumer * 128 * (N + N_OUT) * 4;
    store(own, s);
    store(own + 128 * N * 4, d);
}
