// What compiled kernels and the emulator that calls them know of each other.
#pragma once
#include <cstddef>

namespace emulated {

constexpr size_t STACK = 256 << 10;

// What kernels take from the emulator, which outlives them.
struct Host {
    char* (*stack_of)(size_t fiber);       // STACK bytes, those of the kernel that ran before
    void (*tell_of_memory)(unsigned long long address);
};
// A grid of a kernel.
struct Launch {
    const char* name;
    const unsigned* grid;
    unsigned threads, shared;              // bytes
    void** parameters;
    unsigned long long seed;
    bool eager;
    unsigned together;                     // CTAs at a time
};
typedef void (*RunLaunch)(const Launch&, const Host&);

}  // namespace emulated
