// Behind a kernel whose waits are bounded (BoundedWait): the number of an mbarrier among those of its Barriers.

extern "C" __device__ u32 mbarrier_number(u32 at) {
    extern __shared__ __align__(1024) char shared[];
    return (at - shared_address(shared) - AT_BARRIERS) / 8;
}
