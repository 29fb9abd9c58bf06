#if FV_CAPTURES
// After a deterministic backward: adds the integer sums of a learned buffer to its gradient, and zeroes
// them. fv_capture_sums<<<elements / 256 rounded up, 256>>>
extern "C" __global__ void __launch_bounds__(256) fv_capture_sums(i64* counts, float* gradient, i64 elements) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i >= elements) return;
    gradient[i] += float(exact_total(counts + i * 3));
    for (int k = 0; k < 3; ++k) counts[i * 3 + k] = 0;
}
#endif
