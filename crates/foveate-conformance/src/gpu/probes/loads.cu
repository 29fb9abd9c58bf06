// Loads by a tensor map. The input is how many boxes there are and, of each, where it goes in smem and its
// coordinates; the rest of smem holds ones.

constexpr int BARRIER = PROBE_BYTES - 1024;
struct Barriers {
    u32 base;

    __device__ CopyBarrier full() const { return {base + BARRIER}; }
    __device__ void init() const {
        full().init(1);
        fence_barrier_init();
    }
};

struct Box {
    int target, at[5];
};
struct Boxes {
    int count, bytes;           // bytes of all of them
    Box boxes[16];
};

template <int AXES>
__device__ void load_boxes(const TensorMap& map, const u32* input, u32* out) {
    const Boxes& all = *reinterpret_cast<const Boxes*>(input);
    const u32 base = aligned_base();
    const Barriers barriers = {base};
    for (int i = threadIdx.x; i < BARRIER / 4; i += blockDim.x) shared[i] = ~0u;
    fence_async_proxy();
    prepare(barriers, base, map);
    if (threadIdx.x < 32 && elect_one()) {
        barriers.full().arrive_expecting(all.bytes);
        for (int i = 0; i < all.count; ++i) {
            const Box box = all.boxes[i];
            if constexpr (AXES == 4)
                copy_panel(base + box.target, map, barriers.full(), box.at[0], box.at[1], box.at[2], box.at[3]);
            else
                copy_panel(base + box.target, map, barriers.full(), box.at[0], box.at[1], box.at[2], box.at[3],
                           box.at[4]);
        }
    }
    barriers.full().wait(0);
    for (int i = threadIdx.x; i < BARRIER / 4; i += blockDim.x) out[i] = shared[i];
}

extern "C" __global__ void __launch_bounds__(128, 1)
heads(const __grid_constant__ TensorMap map, const u32* input, u32* out) { load_boxes<4>(map, input, out); }
extern "C" __global__ void __launch_bounds__(128, 1)
groups(const __grid_constant__ TensorMap map, const u32* input, u32* out) { load_boxes<5>(map, input, out); }
