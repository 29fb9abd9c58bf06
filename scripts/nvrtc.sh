#!/usr/bin/env bash
# Puts NVRTC under target/ from its wheel, for machines without a CUDA toolkit, and prints the
# folder to name in FOVEATE_CUDA_LIBRARIES:
#
#     export FOVEATE_CUDA_LIBRARIES=$(scripts/nvrtc.sh)
set -euo pipefail
cd "$(dirname "$0")/.."

version=13.0.88
site=target/nvrtc-$version
if ! ls "$site"/nvidia/*/lib/libnvrtc.so.13 >/dev/null 2>&1; then
    rm -rf "$site" "$site.part"
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$site.part" \
        "nvidia-cuda-nvrtc==$version" >&2
    mv "$site.part" "$site"
fi
cd "$site"/nvidia/*/lib
pwd
