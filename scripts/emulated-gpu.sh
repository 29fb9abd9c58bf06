#!/usr/bin/env bash
# Runs a command with an emulated H200 in place of a GPU: kernels are compiled by NVRTC as ever, and when they are
# launched their sources run on this machine's processor, every thread of the GPU a fiber (docs/gpu.md, "On the
# host"), and with cuBLASLt and NCCL made for tests. Times that are seen mean nothing.
#
#     scripts/emulated-gpu.sh target/debug/foveate doctor
#     scripts/emulated-gpu.sh target/debug/foveate-conformance run --cases conformance/cases --only causal \
#         --backend "cuda, hopper" --dtype bf16 --workers 0
#
# Variables: SEED (1) orders threads; EAGER=1 has copies and products done as soon as they are started, and not as
# late as somebody waits for them; SMS (2) is how many there are; FOVEATE_EXACT_MEMORY=1 has arrays that share an
# allocation have their own, beyond which a kernel is told of; HOME is a folder of the run's own.
# What is built is kept under target/. Where a compiler or NVRTC is missing it says so and ends with 77.
set -euo pipefail
if [ $# = 0 ]; then
    echo "usage: scripts/emulated-gpu.sh COMMAND [ARGUMENT...], such as target/debug/foveate doctor" >&2
    exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
sources=$root/crates/foveate-gpu/tests

for compiler in cc c++; do
    command -v $compiler >/dev/null || { echo "no emulated GPU: there is no compiler \`$compiler\`" >&2; exit 77; }
done
echo '_Float16 x;' | c++ -std=c++17 -fsyntax-only -x c++ - 2>/dev/null ||
    { echo "no emulated GPU: the compiler \`c++\` has no _Float16" >&2; exit 77; }
nvrtc=$("$root/scripts/nvrtc.sh")
REAL_NVRTC=$(ls "$nvrtc"/libnvrtc.so.* 2>/dev/null | head -n 1 || true)
[ -n "$REAL_NVRTC" ] || { echo "no emulated GPU: there is no libnvrtc.so in '$nvrtc'" >&2; exit 77; }

built=$root/target/emulated-gpu/$(cat "$0" "$sources"/{driver,emulator}/* | sha256sum | cut -c 1-16)
if ! [ -e "$built" ]; then
    find "$root/target/emulated-gpu" -mindepth 1 -maxdepth 1 -mtime +7 -exec rm -rf {} + 2>/dev/null || true
    # In a folder of its own: others may be building the same.
    own=$built.$$
    mkdir -p "$own"/{lib,kernels,cache}
    cc -c -fPIC -O1 -pthread -DLOADS -DRUNS -o "$own/cuda.o" "$sources/driver/cuda.c"
    c++ -c -fPIC -O1 -std=c++17 -o "$own/emulator.o" "$sources/emulator/emulator.cpp"
    c++ -shared -pthread -Wl,-soname,libcuda.so.1 -o "$own/lib/libcuda.so.1" "$own"/*.o -ldl
    for library in cublasLt.so.13 nccl.so.2; do
        name=${library%%.*}
        cc -shared -fPIC -O3 -Wl,-soname,lib$library -o "$own/lib/lib$library" "$sources/driver/${name,,}.c" \
            "$own/lib/libcuda.so.1" -Wl,-rpath,'$ORIGIN' -lm
    done
    cc -shared -fPIC -O1 -Wl,-soname,libnvrtc.so.13 -o "$own/lib/libnvrtc.so.13" "$sources/emulator/nvrtc.c" -ldl
    mv -T "$own" "$built" 2>/dev/null || rm -rf "$own"
fi

# The driver lists launches there.
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
export REAL_NVRTC CUBINS=$built/kernels EMULATOR=$sources/emulator
export FOVEATE_CUDA_LIBRARIES=$built/lib FOVEATE_CACHE_DIR=$built/cache HOME=$home
# NVRTC looks for its other half beside itself.
export LD_LIBRARY_PATH=$nvrtc${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export SMS=${SMS:-2} TOTAL=${TOTAL:-4000000000}
"$@"
