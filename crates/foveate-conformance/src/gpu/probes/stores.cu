// What leaves registers and smem: bulk reductions, matrices that are stored, words that lanes exchange.

constexpr int WORDS = PROBE_BYTES / 4, ROUNDS = 4;

// Each CTA adds WORDS words, from the fifth one of `out` on, of ROUNDS rounds: those of one round are written over
// when they were read.
extern "C" __global__ void __launch_bounds__(128, 1)
add_rounds(const __grid_constant__ TensorMap map, const u32* input, float* out) {
    const u32 base = aligned_base();
    for (int round = 0; round < ROUNDS; ++round) {
        for (int i = threadIdx.x; i < WORDS; i += blockDim.x)
            shared[i] = __float_as_uint(float((blockIdx.x + 1) * 1000 + round * 100) + i % 97);
        fence_async_proxy();
        __syncthreads();
        if (threadIdx.x == 0) {
            add_bulk(out + 4, base, PROBE_BYTES);
            await_bulk_reads();
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) await_bulk_writes();
}

// CTAs add WORDS words of the input each, the last CTA first: in another order sums are rounded otherwise. The count
// stands behind the words.
extern "C" __global__ void __launch_bounds__(128, 1)
add_in_order(const __grid_constant__ TensorMap map, const u32* input, float* out) {
    const u32 base = aligned_base();
    const u32 rank = gridDim.x - 1 - blockIdx.x;
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x) shared[i] = input[rank * WORDS + i];
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x > 0) return;
    u32* const count = reinterpret_cast<u32*>(out + WORDS);
    await_count(count, rank);
    add_bulk(out, base, PROBE_BYTES);
    await_bulk_writes();
    publish_count(count, rank + 1);
}

// A warp stores four matrices. The input is, of each lane, where it puts a row, and four registers.
extern "C" __global__ void __launch_bounds__(32, 1)
matrices(const __grid_constant__ TensorMap map, const u32* input, u32* out) {
    const u32 base = aligned_base();
    for (int i = threadIdx.x; i < WORDS; i += 32) shared[i] = ~0u;
    __syncwarp();
    const u32* const own = input + threadIdx.x * 5;
    const u32 x[4] = {own[1], own[2], own[3], own[4]};
    store_matrices_transposed(base + own[0], x);
    __syncwarp();
    for (int i = threadIdx.x; i < WORDS; i += 32) out[i] = shared[i];
}

// Of each lane: four words that its quad has exchanged, how many lanes of the warp were elected, its warpgroup, its
// warp, and what is left of two numbers in smem of which the negative one is stored.
extern "C" __global__ void __launch_bounds__(256, 1)
lanes(const __grid_constant__ TensorMap map, const u32* input, u32* out) {
    u32 x[4];
    for (int i = 0; i < 4; ++i) x[i] = threadIdx.x * 4 + i;
    exchange_in_quad(x);
    shared[threadIdx.x * 2] = shared[threadIdx.x * 2 + 1] = 7;
    const float number = threadIdx.x + 1;
    keep_before(number, shared_address(shared + threadIdx.x * 2));
    keep_before(-number, shared_address(shared + threadIdx.x * 2 + 1));
    u32* const own = out + threadIdx.x * 9;
    for (int i = 0; i < 4; ++i) own[i] = x[i];
    own[4] = __popc(__ballot_sync(~0u, elect_one()));
    own[5] = warpgroup_of_thread();
    own[6] = warp_of_warpgroup();
    own[7] = shared[threadIdx.x * 2];
    own[8] = shared[threadIdx.x * 2 + 1];
}
